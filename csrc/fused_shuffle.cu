/* fused for kernels as large as their stride: a product, whose columns are shuffled into images (depth to space).
 *
 * Where taps do not overlap an output is one product,
 *
 *   output [co, ih * KERNEL_H + kh, iw * KERNEL_W + kw] = bias [co] + sum over ci of input [ci, ih, iw] weight [ci, co, kh, kw]
 *
 * so that nothing is gathered or folded: positions (image, ih, iw) times lines (co, kh, kw). What is left is that neighbours in
 * an output row are columns of the product.
 *
 * Positions are its rows: a warp takes its 16 as they lie in shared memory, channel by channel, into registers, in any order
 * it likes, of 16 bits or rounded to TF32. Rows g and g + 8 are neighbours where that gives a thread more outputs that lie
 * together (kPaired), and the eight lanes that have the same columns store a stretch of an output row. So outputs go from
 * registers to memory, and no shared memory is read or written for them: weights take most of what it can give. What comes from
 * memory and goes there is as much as products take, so that outputs are KEPT while the products of the next block run.
 *
 * Weights are the columns' side: of 16 bits as torch has them, [ci][line], the other way round (common/wgmma.cuh); tensor cores
 * take TF32 K-major alone, and fused_shuffle_weights.cu lays it out (PACKED).
 *
 * An item is kPositions positions, across images, and BLOCKS times LINES lines; each of two warpgroups has half of the
 * positions. LOADERS threads bring inputs to slots, one thread the weights to stages, each of 128 bytes of channels. Slots are
 * kept for all lines of an item where it has more than one block of them (HELD), else both come together.
 *
 * Macros: ELEMENT_T, PACKED (1 for float32, 0 for 16 bits); KERNEL_H, KERNEL_W (the strides too; their product divides 16);
 * IN_CHANNELS, OUT_CHANNELS; IN_H, IN_W (one row where KERNEL_H is 1, whatever the image); LINES (a multiple of 16 up to 256,
 * and of 4 * KERNEL_W where PACKED); SETS (of lines, for other items), BLOCKS (of LINES of a set, at most), HELD, KEPT (1 or 0);
 * SLOTS, STAGES; LOADERS; MULTIPLIER_REGISTERS, LOADER_REGISTERS (of a thread that multiplies or does not); PIECE (inputs that
 * are copied together); SHARED_BYTES.
 * Chosen by gemmconv/algorithms/fused_shuffle.py.
 */
#include "common/async.cuh"
#include "common/dependent.cuh"
#include "common/integers.cuh"
#include "common/mbarrier.cuh"
#include "common/numeric.cuh"
#include "common/ring.cuh"
#include "common/store.cuh"
#include "common/tensor_map.cuh"
#include "common/units.cuh"
#include "common/unroll.cuh"
#include "common/wgmma_rows.cuh"

struct fused_shuffle_params {
#if PACKED
    const unit_t* __restrict__ weights;
#else
    tensor_map_t weights;  // [channels][lines]; a box has kChannels of 64
#endif
    const ELEMENT_T* __restrict__ input;
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    int positions;  // of all images
    int items;
};

constexpr int kTaps = KERNEL_H * KERNEL_W, kPixels = IN_H * IN_W, kOutW = IN_W * KERNEL_W, kPlane = kPixels * kTaps;
constexpr int kItem = sizeof(ELEMENT_T), kPositions = 128, kAllLines = OUT_CHANNELS * kTaps;
constexpr int kBlocks = ceil_div(kAllLines, LINES), kBlockOuts = LINES / kTaps;  // of all lines; of a block
static_assert(LINES % 16 == 0 && 16 % kTaps == 0, "a block has all taps of its output channels");
static_assert(kPixels % PIECE == 0 && kPixels % 4 == 0, "pieces are whole, and pairs");

// Shared memory: inputs [SLOTS][kChannels][kPositions], whose pieces of 16 bytes are swapped; weights [STAGES], either
// [64 lines][kChannels] of 128 bytes, swizzled, or [kSteps][2][LINES] of 16; biases [warps][kBlockOuts]; barriers.
constexpr int kChannels = 128 / kItem, kSteps = 4;  // of a slot; products of them
constexpr int kChunks = ceil_div(IN_CHANNELS, kChannels), kRowBytes = kPositions * kItem, kSlotBytes = kChannels * kRowBytes;
constexpr int kBoxBytes = 64 * 128, kStageBytes = PACKED ? LINES * 128 : ceil_div(LINES, 64) * kBoxBytes;
constexpr int kConsumers = 256, kProducers = LOADERS + 32, kThreads = kConsumers + kProducers;
constexpr int kFirstStage = SLOTS * kSlotBytes, kFirstBias = kFirstStage + STAGES * kStageBytes;
constexpr int kFirstBarrier = kFirstBias + ceil_div(kConsumers / 32 * kBlockOuts, 4) * 16;
struct barriers_t { barrier_t slot_full[SLOTS], slot_empty[SLOTS], full[STAGES], empty[STAGES]; };
static_assert(kFirstBarrier + sizeof(barriers_t) <= SHARED_BYTES, "what is shared fits the launch's memory");
static_assert(HELD == 0 || SLOTS >= kChunks, "the inputs of an item lie in shared memory together");
static_assert(STAGES >= 2, "a stage is free once products of the next have begun");
extern __shared__ __align__(1024) unsigned char shared[];

// Rows g and g + 8 of a warp's 16 are positions 2g and 2g + 1, or g and g + 8.
constexpr bool kPaired = KERNEL_W <= 2 && IN_W % 2 == 0;

/* What an item is: its first position, its first block of lines, and how many there are. */
struct item_t {
    int position, block, blocks;
    __device__ __forceinline__ explicit item_t(int index) {
        position = index / SETS * kPositions, block = index % SETS * BLOCKS;
        blocks = least(BLOCKS, kBlocks - block);
    }
};

/* Calls body(item) for the items of a block of threads. */
template <typename BODY> __device__ __forceinline__ void each_item(const fused_shuffle_params& p, const BODY& body) {
    #pragma unroll 1
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) body(item_t(i));
}

/* Where a slot's row of a channel has the 16 bytes of some positions. Of those that lanes of a warp read at a time, four
 * channels of 32 bytes or eight of 16, all lie in different banks.
 */
__device__ __forceinline__ int swapped(int bytes, int channel) {
    return bytes ^ (kItem == 4 ? channel % 4 * 32 : channel % 8 * 16);
}

/* Begins to copy the weights of all items. One thread. */
__device__ __forceinline__ void produce_weights(const fused_shuffle_params& p, barriers_t& barriers) {
    ring_t<STAGES> ring;
    if (PACKED) wait_for_previous_launch();
    each_item(p, [&](const item_t& item) {
        #pragma unroll 1
        for (int i = 0; i < item.blocks * kChunks; ++i, ring.advance()) {
            const int block = item.block + i / kChunks, chunk = i % kChunks;
            unsigned char* stage = shared + (kFirstStage + ring.stage * kStageBytes);
            barrier_wait(barriers.empty[ring.stage], ring.parity ^ 1);
            barrier_arrive_expecting(barriers.full[ring.stage], kStageBytes);
#if PACKED
            const long long first = (static_cast<long long>(block) * kChunks + chunk) * (LINES * 8);
            bulk_copy(stage, p.weights + first, kStageBytes, barriers.full[ring.stage]);
#else
            #pragma unroll
            for (int box = 0; box < kStageBytes / kBoxBytes; ++box)
                copy_box(stage + box * kBoxBytes, p.weights, block * LINES + box * 64, chunk * kChannels, 0, 0,
                         barriers.full[ring.stage]);
#endif
        }
    });
}

/* Begins to copy the inputs of all items: pieces of positions that stay the thread's, channel by channel. */
__device__ __forceinline__ void produce_inputs(const fused_shuffle_params& p, barriers_t& barriers) {
    constexpr int kPieces = kPositions / PIECE, kAtOnce = LOADERS / kPieces;  // of a channel; channels
    static_assert(LOADERS % kPieces == 0, "threads have whole channels");
    const int thread = threadIdx.x - 32, first = thread / kPieces, piece = thread % kPieces * PIECE;
    ring_t<SLOTS> ring;
    each_item(p, [&](const item_t& item) {
        const int position = item.position + piece, image = position / kPixels;
        const bool inside = position < p.positions;
        const ELEMENT_T* source = inside ? p.input + (static_cast<long long>(image) * IN_CHANNELS * kPixels + position % kPixels)
                                         : p.input;
        #pragma unroll 1
        for (int i = 0; i < (HELD ? kChunks : item.blocks * kChunks); ++i, ring.advance()) {
            const int before = i % kChunks * kChannels;  // channels
            const ELEMENT_T* from = source + static_cast<long long>(before + first) * (inside ? kPixels : 0);
            unsigned char* slot = shared + ring.stage * kSlotBytes;
            barrier_wait(barriers.slot_empty[ring.stage], ring.parity ^ 1);
            #pragma unroll 4
            for (int channel = first; channel < kChannels; channel += kAtOnce) {
                const bool is = inside && (IN_CHANNELS % kChannels == 0 || before + channel < IN_CHANNELS);
                unsigned char* target = slot + (channel * kRowBytes + swapped(piece * kItem, channel));
                const ELEMENT_T* here = is ? from : p.input;
                if constexpr (PIECE * kItem == 16) copy_piece_async(target, here, is);
                else copy_async<PIECE * kItem>(target, here, is);
                from += kAtOnce * kPixels;
            }
            barrier_arrive_when_copied(barriers.slot_full[ring.stage]);
        }
    });
    wait_for_copies();
}

/* The words of a slot that wgmma_rows asks of a lane, for each product: of its warp's 16 positions, the warp being the
 * `warp`-th that multiplies.
 */
struct inputs_t { unsigned of[kSteps][4]; };
__device__ __forceinline__ void load_inputs(inputs_t& words, const unsigned char* slot, int warp) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = warp * 16 * kItem;  // bytes
    const auto word = [&](const unsigned char* from) { return *reinterpret_cast<const unsigned*>(from); };
    if constexpr (kItem == 4) {
        const unsigned char* row = slot + t * kRowBytes;
        const unsigned char* from = row + swapped(first + g * (kPaired ? 8 : 4), t);
        const unsigned char* other = kPaired ? from + 4 : row + swapped(first + g * 4 + 32, t);
        #pragma unroll
        for (int step = 0; step < kSteps; ++step)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {  // channels t and t + 4
                const int there = (step * 8 + half * 4) * kRowBytes;
                words.of[step][half * 2] = mma_words<float>::rounded(word(from + there));
                words.of[step][half * 2 + 1] = mma_words<float>::rounded(word(other + there));
            }
    } else if constexpr (kPaired) {
        const unsigned char* even = slot + (t * 2 * kRowBytes + swapped(first + g * 4, t * 2));
        const unsigned char* odd = slot + ((t * 2 + 1) * kRowBytes + swapped(first + g * 4, t * 2 + 1));
        #pragma unroll
        for (int step = 0; step < kSteps; ++step)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {  // channels 2t, 2t + 1; and 8 on
                const int there = (step * 16 + half * 8) * kRowBytes;
                const unsigned a = word(even + there), b = word(odd + there);
                words.of[step][half * 2] = halves(a, b, false, false);
                words.of[step][half * 2 + 1] = halves(a, b, true, true);
            }
    } else {
        const int channel = lane / 16 * 8 + lane % 8;
        const unsigned char* row = slot + (channel * kRowBytes + swapped(first + lane / 8 % 2 * 16, channel));
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            unsigned(&of)[4] = words.of[step];
            load_matrices_turned(of[0], of[1], of[2], of[3], row + step * 16 * kRowBytes);
        }
    }
}

/* The sums of a block of lines. The item's slots begin at `slots`, which goes on; they are free behind this block if `frees`.
 * `meanwhile` is called while products run, for each of kShares.
 */
constexpr int kShares = least(kChunks, 8);
template <typename MEANWHILE>
__device__ __forceinline__ void multiply(
    float (&sums)[LINES / 2], ring_t<STAGES>& ring, ring_t<SLOTS>& slots, barriers_t& barriers, int warp, bool frees,
    const MEANWHILE& meanwhile) {
    const bool speaker = threadIdx.x % 32 == 0;  // arrives at barriers for its warp
    int held = 0;                                // stage that products in flight may still read
    inputs_t words[2];
    const auto step = [&](auto half, int chunk, const auto& along) {
        inputs_t& own = words[decltype(half)::value];
        barrier_wait(barriers.slot_full[slots.stage], slots.parity);
        load_inputs(own, shared + slots.stage * kSlotBytes, warp);
        barrier_wait(barriers.full[ring.stage], ring.parity);
        const unsigned char* stage = shared + (kFirstStage + ring.stage * kStageBytes);
        const matrix_t right = PACKED ? matrix_of(stage, LINES * 16, 128) : swizzled_matrix_of(stage, kBoxBytes, 1024);
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < kSteps; ++k)
            wgmma_rows<ELEMENT_T, LINES, !PACKED>(
                sums, own.of[k], advanced(right, k * (PACKED ? LINES * 32 : 2048)), k > 0 || chunk > 0);
        wgmma_commit();
        __syncwarp();  // all lanes have their words
        if (frees && speaker) barrier_arrive(barriers.slot_empty[slots.stage]);
        along();
        wgmma_wait<1>();
        if (chunk > 0 && speaker) barrier_arrive(barriers.empty[held]);
        held = ring.stage;
        ring.advance();
        slots.advance();
    };
    each<kShares>([&](auto share) {
        step(constant<decltype(share)::value % 2>(), decltype(share)::value, [&] { meanwhile(share); });
    });
    #pragma unroll 1
    for (int chunk = kShares; chunk < kChunks; chunk += 2) {
        step(constant<kShares % 2>(), chunk, [] {});
        if (chunk + 1 < kChunks) step(constant<(kShares + 1) % 2>(), chunk + 1, [] {});
    }
    wgmma_finish_rows(sums);
    if (speaker) barrier_arrive(barriers.empty[held]);
}

// Lines that a lane has one after the other (see fused_shuffle_weights.cu), tiles of 8 columns that have them, in turn.
constexpr int kLane = PACKED && KERNEL_W > 2 ? KERNEL_W : 2, kTiles = kLane / 2, kTurns = LINES / 8 / kTiles;
static_assert(LINES % (8 * kTiles) == 0 && KERNEL_W <= 8, "tiles and lanes have whole rows of outputs");

/* The first line of a lane. */
__device__ __forceinline__ int lane_line() { return threadIdx.x % 4 * kLane; }

/* Where a lane's outputs of its first line go, of two positions, and whether there are any. */
struct places_t {
    ELEMENT_T* to[2] = {};
    bool inside[2] = {};

    places_t() = default;
    __device__ __forceinline__ places_t(const fused_shuffle_params& p, int position, int warp) {
        const int g = threadIdx.x % 32 / 4, line = lane_line();
        const int column = line / kTaps * kPlane + line % kTaps / KERNEL_W * kOutW + line % KERNEL_W;
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int here = position + warp * 16 + (kPaired ? g * 2 + h : g + h * 8), pixel = here % kPixels;
            inside[h] = here < p.positions;
            to[h] = p.output + (static_cast<long long>(here / kPixels) * (OUT_CHANNELS * static_cast<long long>(kPlane)) +
                                (pixel / IN_W * (KERNEL_H * kOutW) + pixel % IN_W * KERNEL_W + column));
        }
    }

    /* Those of output channels from `first` on. */
    __device__ __forceinline__ places_t from(int first) const {
        places_t there = *this;
        #pragma unroll
        for (int h = 0; h < 2; ++h) there.to[h] += static_cast<long long>(first) * kPlane;
        return there;
    }
};

/* A lane's outputs of a block of lines, as they are stored. */
struct outputs_t {
    static constexpr int kWords = 4 * kTiles * kItem / 4;  // of a turn
    places_t places;
    int outs = 0;  // output channels that there are, from the lane's first on
    unsigned words[kTurns][kWords] = {};

    outputs_t() = default;
    /* Takes sums and biases from output channel `first` on. */
    __device__ __forceinline__ outputs_t(const places_t& item, int first, const float (&sums)[LINES / 2], const float* biases)
        : places(item.from(first)), outs(OUT_CHANNELS - first - lane_line() / kTaps) {
        each<kTurns>([&](auto turn) {
            constexpr int kTurn = decltype(turn)::value, kTile = kTurn * kTiles, kOut = kTile * 8 / kTaps;
            ELEMENT_T values[4 * kTiles];  // neighbours in a row one after the other
            #pragma unroll
            for (int e = 0; e < 2 * kTiles; ++e) {
                const float bias = biases[kOut + lane_line() / kTaps + (kTaps == 1 ? e : 0)];
                #pragma unroll
                for (int h = 0; h < 2; ++h)
                    values[KERNEL_W == 1 ? e * 2 + h : h * 2 * kTiles + e] =
                        narrow<ELEMENT_T>(sums[(kTile + e / 2) * 4 + h * 2 + e % 2] + bias);
            }
            pack(words[kTurn], values);
        });
    }

    /* Stores turns FIRST to END - 1. */
    template <int FIRST, int END> __device__ __forceinline__ void store() const {
        each<END - FIRST>([&](auto turn) {
            constexpr int kTurn = FIRST + decltype(turn)::value, kFirst = kTurn * kTiles * 8, kOut = kFirst / kTaps;
            constexpr long long kAt = static_cast<long long>(kOut) * kPlane + kFirst % kTaps / KERNEL_W * kOutW;
            constexpr int kRuns = KERNEL_W == 1 ? 2 : 1, kRunWords = kWords / kRuns;  // of lines that are no neighbours
            #pragma unroll
            for (int e = 0; e < kRuns; ++e) {
                const bool is = kAllLines % LINES == 0 || kOut + (kTaps == 1 ? e : 0) < outs;
                constexpr long long kNext = KERNEL_H > 1 ? kOutW : kPlane;
                const unsigned* run = words[kTurn] + e * kRunWords;
                if constexpr (kPaired) {
                    store_run<kRunWords>(places.to[0] + (kAt + e * kNext), run, places.inside[0] && is);
                } else if constexpr (kRunWords == 1) {
                    #pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const unsigned short half[1] = {static_cast<unsigned short>(run[0] >> h * 16)};
                        store_words(places.to[h] + (kAt + e * kNext), half, places.inside[h] && is);
                    }
                } else {
                    #pragma unroll
                    for (int h = 0; h < 2; ++h)
                        store_run<kRunWords / 2>(places.to[h] + (kAt + e * kNext), run + h * (kRunWords / 2),
                                                 places.inside[h] && is);
                }
            }
        });
    }

private:
    template <typename T, int COUNT> __device__ __forceinline__ static void pack(unsigned (&words)[kWords], const T (&values)[COUNT]) {
        constexpr int kElements = mma_words<T>::kElements;
        #pragma unroll
        for (int i = 0; i < kWords; ++i) {
            if constexpr (kElements == 1) {
                words[i] = __float_as_uint(values[i]);
            } else {
                const T pair[2] = {values[i * 2], values[i * 2 + 1]};
                words[i] = mma_words<T>::pack(pair);
            }
        }
    }

    template <int COUNT> __device__ __forceinline__ static void store_run(ELEMENT_T* to, const unsigned* run, bool is) {
        constexpr int kTogether = least(COUNT, 4);
        #pragma unroll
        for (int first = 0; first < COUNT; first += kTogether) {
            unsigned words[kTogether];
            #pragma unroll
            for (int i = 0; i < kTogether; ++i) words[i] = run[first + i];
            store_words(to + first * (4 / kItem), words, is);
        }
    }
};

/* The positions of a warp, the `warp`-th that multiplies, of item after item. Outputs are KEPT while the next block's products
 * run, and stored meanwhile: memory may take as long for them.
 */
__device__ __forceinline__ void consume(const fused_shuffle_params& p, barriers_t& barriers, int warp) {
    constexpr int kOwn = ceil_div(kBlockOuts, 32);
    const int lane = threadIdx.x % 32;
    float* biases = reinterpret_cast<float*>(shared + kFirstBias) + warp * kBlockOuts;
    ring_t<STAGES> ring;
    ring_t<SLOTS> slots;
    outputs_t outputs;
    each_item(p, [&](const item_t& item) {
        const places_t places(p, item.position, warp);
        #pragma unroll 1
        for (int block = 0; block < item.blocks; ++block) {
            const int first = (item.block + block) * kBlockOuts;
            float own[kOwn] = {};  // biases, which come while products run
            #pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const int out = first + i * 32 + lane;
                if (p.bias != nullptr && i * 32 + lane < kBlockOuts && out < OUT_CHANNELS) own[i] = widen(load_once(p.bias + out));
            }
            float sums[LINES / 2];
            ring_t<SLOTS> here = slots;
            const bool last = block + 1 == item.blocks;
            multiply(sums, ring, here, barriers, warp, !HELD || last, [&](auto share) {
                constexpr int kShare = decltype(share)::value;
                if constexpr (KEPT) outputs.store<kTurns * kShare / kShares, kTurns * (kShare + 1) / kShares>();
            });
            if (!HELD || last) slots = here;
            __syncwarp();
            #pragma unroll
            for (int i = 0; i < kOwn; ++i)
                if (i * 32 + lane < kBlockOuts) biases[i * 32 + lane] = own[i];
            __syncwarp();
            outputs = outputs_t(places, first, sums, biases);
            if constexpr (!KEPT) outputs.store<0, kTurns>();
        }
    });
    if constexpr (KEPT) outputs.store<0, kTurns>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
fused_shuffle_kernel(const __grid_constant__ fused_shuffle_params p) {
    barriers_t& barriers = *reinterpret_cast<barriers_t*>(shared + kFirstBarrier);
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(barriers.slot_full[i], LOADERS);
            barrier_init(barriers.slot_empty[i], kConsumers / 32);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(barriers.full[i], 1);
            barrier_init(barriers.empty[i], kConsumers / 32);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= kProducers) {
        registers_up<MULTIPLIER_REGISTERS>();
        consume(p, barriers, __shfl_sync(0xffffffffu, (threadIdx.x - kProducers) / 32, 0));
    } else {
        registers_down<LOADER_REGISTERS>();
        if (threadIdx.x >= 32) produce_inputs(p, barriers);
        else if (threadIdx.x == 0) produce_weights(p, barriers);
    }
}
