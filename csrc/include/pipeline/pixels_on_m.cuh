/* Products whose rows are positions and whose columns are lines: what sm90/gemm_depth_to_space.cu and sm90/gemm_fold_pixels.cu share.
 *
 *   columns [(image, ih, iw), (co, kh, kw)] = sum over ci of input [ci, (image, ih, iw)] weight [ci, (co, kh, kw)]
 *
 * A warp takes the inputs of its 16 positions as they lie in shared memory, channel by channel, into registers, of 16 bits or
 * rounded to TF32. Weights are the columns' side: of 16 bits as torch has them, [ci][line], the other way round
 * (ptx/wgmma.cuh); tensor cores take TF32 K-major alone, and weights/pack_k_major.cu lays it out (PACKED).
 *
 * An item is ITEM_POSITIONS positions, across images or one of an image's WINDOWS, and BLOCKS times LINES lines. Each of two
 * warpgroups has 64 of every 128 positions. PRODUCERS threads bring inputs to slots, one thread the weights to stages, each of 128
 * bytes of channels. Slots are kept for all lines of an item where it has more than one block of them (INPUTS_STATIONARY), else both come
 * together.
 *
 * Macros: ELEMENT_T, PACKED (1 for float32, 0 for 16 bits); KERNEL_H, KERNEL_W; IN_CHANNELS, OUT_CHANNELS; IN_H, IN_W;
 * ROW_BLOCKS (of 128 positions), ITEM_POSITIONS; WINDOWS, WINDOW_STEP and WINDOW_LEFT (positions from one to the next, and before
 * the first; multiples of PIECE; 1, 0 and 0 where items go across images); LINES (a multiple of 16 up to 256, with all taps of
 * its output channels); SETS (of lines, for other items), BLOCKS (of LINES of a set, at most), INPUTS_STATIONARY (1 or 0); SLOTS, STAGES;
 * PRODUCERS; CONSUMER_REGISTERS, PRODUCER_REGISTERS (of a thread that multiplies or does not); PIECE (inputs that are copied
 * together); OWN_BYTES (of shared memory that the kernel has for itself, a multiple of 16), SHARED_BYTES.
 */
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "geometry/image.cuh"
#include "numeric/integers.cuh"
#include "ptx/mbarrier.cuh"
#include "numeric/types.cuh"
#include "pipeline/ring.cuh"
#include "ptx/tma.cuh"
#include "numeric/units.cuh"
#include "numeric/unroll.cuh"
#include "ptx/wgmma_rs.cuh"

struct pixels_on_m_params {
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

constexpr int kItem = sizeof(ELEMENT_T);
constexpr int kBlockPositions = 128, kPositions = ROW_BLOCKS * kBlockPositions, kAllLines = OUT_CHANNELS * kTaps;
constexpr int kBlocks = ceil_div(kAllLines, LINES), kBlockOuts = LINES / kTaps;  // of all lines; of a block
static_assert(LINES % 16 == 0 && LINES % kTaps == 0, "a block has all taps of its output channels");
static_assert(kPixels % PIECE == 0 && kPixels % 4 == 0 && ITEM_POSITIONS % PIECE == 0, "pieces are whole, and pairs");
static_assert(ITEM_POSITIONS <= kPositions, "positions of an item are rows");
static_assert(WINDOW_STEP % PIECE == 0 && WINDOW_LEFT % PIECE == 0, "pieces are whole in windows too");

// Shared memory: inputs [SLOTS][kChannels][kPositions], whose pieces of 16 bytes are swapped; weights [STAGES], either
// [64 lines][kChannels] of 128 bytes, swizzled, or [kSteps][2][LINES] of 16; the kernel's own; biases [warps][kBlockOuts];
// barriers.
constexpr int kChannels = 128 / kItem, kSteps = 4;  // of a slot; products of them
constexpr int kChunks = ceil_div(IN_CHANNELS, kChannels), kRowBytes = kPositions * kItem, kSlotBytes = kChannels * kRowBytes;
constexpr int kBoxBytes = 64 * 128, kStageBytes = PACKED ? LINES * 128 : ceil_div(LINES, 64) * kBoxBytes;
constexpr int kConsumers = 256, kProducers = PRODUCERS + 32, kThreads = kConsumers + kProducers;
constexpr int kFirstStage = SLOTS * kSlotBytes, kFirstOwn = kFirstStage + STAGES * kStageBytes;
constexpr int kFirstBias = kFirstOwn + OWN_BYTES, kFirstBarrier = kFirstBias + ceil_div(kConsumers / 32 * kBlockOuts, 4) * 16;
struct barriers_t { barrier_t slot_full[SLOTS], slot_empty[SLOTS], full[STAGES], empty[STAGES]; };
static_assert(kFirstBarrier + sizeof(barriers_t) <= SHARED_BYTES, "what is shared fits the launch's memory");
static_assert(INPUTS_STATIONARY == 0 || SLOTS >= kChunks, "the inputs of an item lie in shared memory together");
static_assert(STAGES >= 2, "a stage is free once products of the next have begun");
extern __shared__ __align__(1024) unsigned char shared[];

/* What an item is: its first position, of all images or, where they have several windows, of image `image`, which may have no
 * such position; its first block of lines, and how many there are.
 */
struct item_t {
    int image, position, block, blocks;
    __device__ __forceinline__ explicit item_t(int index) {
        const int window = index / SETS;
        image = window / WINDOWS, block = index % SETS * BLOCKS, blocks = least(BLOCKS, kBlocks - block);
        position = WINDOWS == 1 ? window * ITEM_POSITIONS : window % WINDOWS * WINDOW_STEP - WINDOW_LEFT;
    }
};

/* Calls body(item) for the items of a block of threads. */
template <typename BODY> __device__ __forceinline__ void each_item(const pixels_on_m_params& p, const BODY& body) {
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
__device__ __forceinline__ void produce_weights(const pixels_on_m_params& p, barriers_t& barriers) {
    ring_t<STAGES> ring;
    if (PACKED) grid_dependency_wait();
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
                tma_load(stage + box * kBoxBytes, p.weights, block * LINES + box * 64, chunk * kChannels, 0, 0,
                         barriers.full[ring.stage]);
#endif
        }
    });
}

/* Begins to copy the inputs of all items: pieces of positions that stay the thread's, channel by channel. */
__device__ __forceinline__ void produce_inputs(const pixels_on_m_params& p, barriers_t& barriers) {
    constexpr int kPieces = kBlockPositions / PIECE, kAtOnce = PRODUCERS / kPieces;  // of a channel; channels
    static_assert(PRODUCERS % kPieces == 0, "threads have whole channels");
    const int thread = threadIdx.x - 32, first = thread / kPieces, piece = thread % kPieces * PIECE;
    ring_t<SLOTS> ring;
    each_item(p, [&](const item_t& item) {
        const ELEMENT_T* source[ROW_BLOCKS];
        bool inside[ROW_BLOCKS];
        #pragma unroll
        for (int row = 0; row < ROW_BLOCKS; ++row) {
            const int own = row * kBlockPositions + piece, position = item.position + own;
            const int image = WINDOWS == 1 ? position / kPixels : item.image;
            inside[row] = own < ITEM_POSITIONS && 0 <= position && position < (WINDOWS == 1 ? p.positions : kPixels);
            source[row] = p.input;
            if (inside[row]) source[row] += static_cast<long long>(image) * IN_CHANNELS * kPixels + position % kPixels;
        }
        #pragma unroll 1
        for (int i = 0; i < (INPUTS_STATIONARY ? kChunks : item.blocks * kChunks); ++i, ring.advance()) {
            const int before = i % kChunks * kChannels;  // channels
            unsigned char* slot = shared + ring.stage * kSlotBytes;
            barrier_wait(barriers.slot_empty[ring.stage], ring.parity ^ 1);
            #pragma unroll
            for (int row = 0; row < ROW_BLOCKS; ++row) {
                const ELEMENT_T* from = source[row] + static_cast<long long>(before + first) * (inside[row] ? kPixels : 0);
                #pragma unroll 4
                for (int channel = first; channel < kChannels; channel += kAtOnce) {
                    const bool is = inside[row] && (IN_CHANNELS % kChannels == 0 || before + channel < IN_CHANNELS);
                    const int there = swapped((row * kBlockPositions + piece) * kItem, channel);
                    unsigned char* target = slot + (channel * kRowBytes + there);
                    const ELEMENT_T* here = is ? from : p.input;
                    if constexpr (PIECE * kItem == 16) copy_piece_async(target, here, is);
                    else cp_async<PIECE * kItem>(target, here, is);
                    from += kAtOnce * kPixels;
                }
            }
            barrier_arrive_when_copied(barriers.slot_full[ring.stage]);
        }
    });
    wait_for_copies();
}

/* The words of a slot that wgmma_rows asks of a lane, for each product: of 16 positions from 16 * `group` on. Rows g and g + 8
 * of them are positions 2g and 2g + 1 where they are PAIRED, else g and g + 8.
 */
struct inputs_t { unsigned of[kSteps][4]; };
template <bool PAIRED> __device__ __forceinline__ void load_inputs(inputs_t& words, const unsigned char* slot, int group) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = group * 16 * kItem;  // bytes
    const auto word = [&](const unsigned char* from) { return *reinterpret_cast<const unsigned*>(from); };
    if constexpr (kItem == 4) {
        const unsigned char* row = slot + t * kRowBytes;
        const unsigned char* from = row + swapped(first + g * (PAIRED ? 8 : 4), t);
        const unsigned char* other = PAIRED ? from + 4 : row + swapped(first + g * 4 + 32, t);
        #pragma unroll
        for (int step = 0; step < kSteps; ++step)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {  // channels t and t + 4
                const int there = (step * 8 + half * 4) * kRowBytes;
                words.of[step][half * 2] = mma_words<float>::rounded(word(from + there));
                words.of[step][half * 2 + 1] = mma_words<float>::rounded(word(other + there));
            }
    } else if constexpr (PAIRED) {
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

/* The sums of a block of lines, for 16 positions of every 128. The item's slots begin at `slots`, which goes on; they are free
 * behind this block if `frees`. `meanwhile` is called while products run, for each of kShares.
 */
constexpr int kShares = least(kChunks, 8);
template <bool PAIRED, typename MEANWHILE>
__device__ __forceinline__ void multiply(
    float (&sums)[ROW_BLOCKS][LINES / 2], ring_t<STAGES>& ring, ring_t<SLOTS>& slots, barriers_t& barriers, int warp,
    bool frees, const MEANWHILE& meanwhile) {
    static_assert(ROW_BLOCKS <= 2, "words of two groups of products take turns");
    const bool speaker = threadIdx.x % 32 == 0;  // arrives at barriers for its warp
    int held = 0;                                // stage that products in flight may still read
    inputs_t words[2];
    const auto step = [&](auto half, int chunk, const auto& along) {
        barrier_wait(barriers.slot_full[slots.stage], slots.parity);
        const unsigned char* stage = shared + (kFirstStage + ring.stage * kStageBytes);
        const descriptor_t right = PACKED ? descriptor_k_major(stage, LINES * 16, 128) : descriptor_mn_major(stage, kBoxBytes, 1024);
        each<ROW_BLOCKS>([&](auto row) {
            constexpr int kRow = decltype(row)::value;
            inputs_t& own = words[ROW_BLOCKS == 1 ? decltype(half)::value : kRow];
            load_inputs<PAIRED>(own, shared + slots.stage * kSlotBytes, kRow * 8 + warp);
            if (kRow == 0) barrier_wait(barriers.full[ring.stage], ring.parity);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < kSteps; ++k)
                wgmma_rows<ELEMENT_T, LINES, !PACKED>(
                    sums[kRow], own.of[k], advance(right, k * (PACKED ? LINES * 32 : 2048)), k > 0 || chunk > 0);
            wgmma_commit();
            if constexpr (kRow == ROW_BLOCKS - 1) {
                if (frees) barrier_arrive(barriers.slot_empty[slots.stage]);  // each lane, for what it has read itself
                along();
            }
            wgmma_wait<1>();
            if (kRow == 0 && chunk > 0 && speaker) barrier_arrive(barriers.empty[held]);
        });
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
    #pragma unroll
    for (int row = 0; row < ROW_BLOCKS; ++row) wgmma_finish_rows(sums[row]);
    if (speaker) barrier_arrive(barriers.empty[held]);
}

/* Where biases of the `warp`-th warp that multiplies lie. */
__device__ __forceinline__ float* biases_of(int warp) {
    return reinterpret_cast<float*>(shared + kFirstBias) + warp * kBlockOuts;
}

/* Biases of a block of lines from output channel `first` on: those of a lane come while products run, then it shares them with
 * its warp.
 */
struct biases_t {
    static constexpr int kOwn = ceil_div(kBlockOuts, 32);
    float own[kOwn] = {};

    __device__ __forceinline__ biases_t(const pixels_on_m_params& p, int first) {
        if (p.bias == nullptr) return;
        #pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int at = i * 32 + static_cast<int>(threadIdx.x % 32);
            if (at < kBlockOuts && first + at < OUT_CHANNELS) own[i] = widen(load_once(p.bias + (first + at)));
        }
    }
    /* For the `warp`-th warp that multiplies. */
    __device__ __forceinline__ void share(int warp) const {
        float* all = biases_of(warp);
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int at = i * 32 + static_cast<int>(threadIdx.x % 32);
            if (at < kBlockOuts) all[at] = own[i];
        }
        __syncwarp();
    }
};

/* What a block of threads does; `consume` is called by those that multiply, with barriers and the number of the warp. */
template <typename CONSUME> __device__ __forceinline__ void run(const pixels_on_m_params& p, const CONSUME& consume) {
    barriers_t& barriers = *reinterpret_cast<barriers_t*>(shared + kFirstBarrier);
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(barriers.slot_full[i], PRODUCERS);
            barrier_init(barriers.slot_empty[i], kConsumers);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(barriers.full[i], 1);
            barrier_init(barriers.empty[i], kConsumers / 32);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= kProducers) {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(barriers, __shfl_sync(0xffffffffu, (threadIdx.x - kProducers) / 32, 0));
    } else {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x >= 32) produce_inputs(p, barriers);
        else if (threadIdx.x == 0) produce_weights(p, barriers);
    }
}
