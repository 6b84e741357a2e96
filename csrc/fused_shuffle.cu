/* fused for kernels as large as their stride: a product, whose rows are shuffled into images (depth to space). No workspace.
 *
 * Where taps do not overlap an output is one product,
 *
 *   output [co, ih * KERNEL_H + kh, iw * KERNEL_W + kw] = bias [co] + sum over ci of weight [ci, co, kh, kw] input [ci, ih, iw]
 *
 * so that nothing is gathered or folded: weights [ci][lines (co, kh, kw)] times inputs [ci][positions (ih, iw)], both of 16
 * bits, as torch has them; inputs as they lie, the other way round (common/wgmma_rows.cuh). What is left is that neighbours in
 * an output row are rows of the product.
 *
 * An item is ROWS x WIDTH positions of an image, whole rows or a stretch of one, and BLOCKS times 64 lines. Its inputs lie in
 * shared memory while all its lines come by: LOADERS threads bring them, one thread the weights, and two warpgroups take blocks
 * of lines by turns. A warp has 16 lines, all taps of its output channels, and stores them by itself: lines go to shared memory,
 * and come back as neighbours while products of the next block run.
 *
 * Mask R-CNN in fp16 (H100, one run each): 76 us with lines shuffled by lanes, and stored before the next product; 72 by way of
 * shared memory; 70 with weights in registers; 68 stored while products run; of which stores alone take 39, at the rate of
 * memory. fused_wgmma.cu takes 90. Warpgroups whose products wait for each other's gained nothing, nor did inputs that were
 * brought to the L2 cache before.
 *
 * Macros: ELEMENT_T; KERNEL_H, KERNEL_W (the strides too; their product divides 16, KERNEL_W divides VECTOR); IN_CHANNELS,
 * OUT_CHANNELS; IN_H, IN_W (one row where KERNEL_H is 1, whatever the image); ROWS, WIDTH; COLUMNS (positions of an item, up to
 * a multiple of 16); SETS (of lines, each BLOCKS of 64), BLOCKS; STAGED_PITCH (elements from one line of outputs to the next, an
 * odd multiple of 8); SLOTS (of inputs, of 64 channels), STAGES (of weights, of a warpgroup), SUBS (times 64 channels that a
 * stage has); LOADERS; MULTIPLIER_REGISTERS, LOADER_REGISTERS; PIECE (inputs that are copied together); VECTOR (outputs that are
 * stored together); SHARED_BYTES.
 * Chosen by gemmconv/algorithms/fused_shuffle.py.
 */
#include "common/async.cuh"
#include "common/integers.cuh"
#include "common/mbarrier.cuh"
#include "common/mma.cuh"
#include "common/numeric.cuh"
#include "common/ring.cuh"
#include "common/store.cuh"
#include "common/tensor_map.cuh"
#include "common/unroll.cuh"
#include "common/wgmma_rows.cuh"

struct fused_shuffle_params {
    tensor_map_t weights;  // [channels][lines]; a box has SUBS * kChannels of kBlockLines
    const ELEMENT_T* __restrict__ input;
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    int items;
};

constexpr int kTaps = KERNEL_H * KERNEL_W, kPixels = IN_H * IN_W, kOutW = IN_W * KERNEL_W;
constexpr int kWarpLines = 16, kWarpOuts = kWarpLines / kTaps;
static_assert(kWarpLines % kTaps == 0, "a warp has all taps of its output channels");

constexpr int kPositions = ROWS * WIDTH, kTilesH = ceil_div(IN_H, ROWS), kTilesW = ceil_div(IN_W, WIDTH);
static_assert(kPositions <= COLUMNS && COLUMNS % 16 == 0 && (WIDTH == IN_W || ROWS == 1), "whole rows, or a part of one");
static_assert(kPixels % PIECE == 0, "pieces are whole");

// Outputs that are stored together lie in one row, and are some of each line of it. A warp has so many rows at once.
constexpr int kTogether = VECTOR / KERNEL_W, kRowVectors = WIDTH / kTogether, kAcross = ceil_div(kRowVectors, 32);
static_assert(VECTOR % KERNEL_W == 0 && WIDTH % kTogether == 0 && IN_W % kTogether == 0, "vectors have whole positions");
__device__ constexpr int rows_at_once(int most) {
    if (most >= KERNEL_H) return most - most % KERNEL_H;
    return most <= 1 ? 1 : KERNEL_H % most == 0 ? most : rows_at_once(most - 1);
}
constexpr int kAtOnce = rows_at_once(least(32 / kRowVectors, ROWS * KERNEL_H)), kPlane = kPixels * kTaps;
constexpr int kRowTurns = ceil_div(ROWS * KERNEL_H, kAtOnce), kTurns = kWarpOuts * kRowTurns * kAcross;  // of a warp's lines
static_assert(ceil_div(kPositions, 8) * 8 <= STAGED_PITCH && STAGED_PITCH % 16 == 8, "lines lie apart, in different banks");

// Shared memory: inputs [SLOTS][kLines of 64 positions][kChannels][128 bytes], weights [2][STAGES][SUBS * kChannels][128 bytes
// of 64 lines], both swizzled; lines of outputs [warps][kWarpLines][STAGED_PITCH]; barriers.
constexpr int kItem = sizeof(ELEMENT_T), kChannels = 64, kBlockLines = 64, kLine = 64;
constexpr int kSteps = ceil_div(IN_CHANNELS, SUBS * kChannels), kChunks = kSteps * SUBS;  // stages of a block; slots of an item
constexpr int kLineBytes = kChannels * 128, kSlotBytes = ceil_div(COLUMNS, kLine) * kLineBytes;
constexpr int kStageBytes = SUBS * kChannels * 128;
constexpr int kConsumers = 256, kProducers = LOADERS + 32, kThreads = kConsumers + kProducers;
constexpr int kFirstStage = SLOTS * kSlotBytes, kFirstStaged = kFirstStage + 2 * STAGES * kStageBytes;
constexpr int kStagedBytes = kWarpLines * STAGED_PITCH * kItem;
constexpr int kFirstBarrier = kFirstStaged + kConsumers / 32 * kStagedBytes;
struct barriers_t { barrier_t slot_full[SLOTS], slot_empty[SLOTS], full[2][STAGES], empty[2][STAGES]; };
static_assert(kFirstBarrier + sizeof(barriers_t) <= SHARED_BYTES, "what is shared fits the launch's memory");
static_assert(SLOTS >= kChunks, "the inputs of an item lie in shared memory together");
extern __shared__ __align__(1024) unsigned char shared[];

/* Neighbours in memory, two to a word. */
template <int COUNT> struct alignas(COUNT * kItem) vector_t { unsigned word[COUNT / 2]; };
template <> struct vector_t<1> { unsigned short word[1]; };

/* What an item is: its first position, and how many there are of its rows and of each; its first line. */
struct item_t {
    int image, row, column, rows, width, line;
    __device__ __forceinline__ explicit item_t(int index) {
        const int tile = index / SETS;
        image = tile / (kTilesH * kTilesW);
        row = tile / kTilesW % kTilesH * ROWS, column = tile % kTilesW * WIDTH;
        rows = least(ROWS, IN_H - row), width = least(WIDTH, IN_W - column);
        line = index % SETS * (BLOCKS * kBlockLines);
    }
};

/* Calls body(item) for the items of a block of threads. */
template <typename BODY> __device__ __forceinline__ void each_item(const fused_shuffle_params& p, const BODY& body) {
    #pragma unroll 1
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) body(item_t(i));
}

/* Where the weights of a warpgroup's stage lie. */
__device__ __forceinline__ unsigned char* stage_of(int warpgroup, int stage) {
    return shared + (kFirstStage + (warpgroup * STAGES + stage) * kStageBytes);
}

/* Begins to copy the weights of all items: of two blocks of lines by turns, which the warpgroups take at the same time. Both
 * are of one item: weights of the next would be waited for by inputs that they keep from coming. One thread.
 */
__device__ __forceinline__ void produce_weights(const fused_shuffle_params& p, barriers_t& barriers) {
    ring_t<STAGES> rings[2];
    int first = 0;  // warpgroup of the first block of an item
    each_item(p, [&](const item_t& item) {
        #pragma unroll 1
        for (int i = 0; i < BLOCKS * kSteps; ++i) {
            const int pair = i / (2 * kSteps) * 2, left = i - pair * kSteps, blocks = least(2, BLOCKS - pair);
            const int block = pair + left % blocks, warpgroup = (first + block) % 2;
            ring_t<STAGES>& ring = rings[warpgroup];
            barrier_wait(barriers.empty[warpgroup][ring.stage], ring.parity ^ 1);
            barrier_t& full = barriers.full[warpgroup][ring.stage];
            barrier_arrive_expecting(full, kStageBytes);
            copy_box(stage_of(warpgroup, ring.stage), p.weights, item.line + block * kBlockLines,
                     left / blocks * (SUBS * kChannels), 0, 0, full);
            ring.advance();
        }
        first = (first + BLOCKS) % 2;
    });
}

/* What a lane copies of a channel: pieces beside those of its neighbours, so that a warp touches few lines of memory. */
struct pieces_t {
    static constexpr int kTurn = 32 * PIECE, kCount = ceil_div(kPositions, kTurn);
    int target[kCount];  // of each, bytes in the slot of channel 0

    __device__ __forceinline__ pieces_t() {
        #pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int here = threadIdx.x % 32 * PIECE + i * kTurn;
            target[i] = here / kLine * kLineBytes + here % kLine * kItem;
        }
    }
};

/* Begins to copy the inputs of a slot, of so many positions, each warp channels of its own; zeros for those there are not. */
__device__ __forceinline__ void fetch(
    const pieces_t& pieces, unsigned char* slot, const ELEMENT_T* __restrict__ source, int positions, int channels) {
    constexpr int kWarps = LOADERS / 32;
    const int warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;
    const ELEMENT_T* from = source + (warp * kPixels + lane * PIECE);
    #pragma unroll 4
    for (int channel = warp; channel < kChannels; channel += kWarps, from += kWarps * kPixels) {
        const bool is = IN_CHANNELS % kChannels == 0 || channel < channels;
        #pragma unroll
        for (int i = 0; i < pieces.kCount; ++i) {
            if (lane * PIECE + i * pieces.kTurn >= positions) continue;
            unsigned char* target = slot + ((pieces.target[i] ^ channel % 8 * 16) + channel * 128);
            const ELEMENT_T* piece = is ? from + i * pieces.kTurn : source;
            if constexpr (PIECE == 8) copy_piece_async(target, piece, is);
            else copy_async<PIECE * kItem>(target, piece, is);
        }
    }
}

/* Slots that may be on their way while the next is waited for, the `chunk`-th of an item: whoever frees it needs all slots of
 * the item that it is free of. At most kMostUnderway.
 */
constexpr int kMostUnderway = 2;
__device__ __forceinline__ int most_underway(int chunk) {
    return least(kMostUnderway, chunk + ((SLOTS - chunk + kChunks - 1) / kChunks - 1) * kChunks);
}

/* Copies the inputs of all items. */
__device__ __forceinline__ void produce_inputs(const fused_shuffle_params& p, barriers_t& barriers) {
    ring_t<SLOTS> ring, come;
    int underway = 0;
    const auto pass_on_to = [&](int most) {  // until no more are underway
        while (underway > most) {
            if (underway == 1) wait_for_groups<0>();
            else if (underway == 2) wait_for_groups<1>();
            else wait_for_groups<kMostUnderway>();
            fence_async_proxy();
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(barriers.slot_full[come.stage]);
            come.advance();
            --underway;
        }
    };
    const pieces_t pieces;
    each_item(p, [&](const item_t& item) {
        const ELEMENT_T* source =
            p.input + (static_cast<long long>(item.image) * IN_CHANNELS * kPixels + item.row * IN_W + item.column);
        #pragma unroll 1
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            pass_on_to(most_underway(chunk));
            barrier_wait(barriers.slot_empty[ring.stage], ring.parity ^ 1);
            fetch(pieces, shared + ring.stage * kSlotBytes, source, item.rows * item.width, IN_CHANNELS - chunk * kChannels);
            source += kChannels * kPixels;
            commit_copies();
            ring.advance();
            ++underway;
        }
    });
    pass_on_to(0);
}

/* The words of a stage's weights that wgmma_rows asks of a lane: its warp's 16 lines, channels k * 16 and on for each k. Where
 * wgmma turns them round itself, from shared memory, each product waits 107 cycles for them, whatever its columns.
 */
constexpr int kProducts = SUBS * kChannels / 16;  // of a step, one after the other
struct words_t { unsigned of[kProducts][4]; };
__device__ __forceinline__ void load_weights(words_t& words, const unsigned char* stage, int warp) {
    const int lane = threadIdx.x % 32, channel = lane / 16 * 8 + lane % 8, piece = (warp * 2 + lane / 8 % 2) ^ lane % 8;
    const unsigned char* row = stage + (channel * 128 + piece * 16);
    #pragma unroll
    for (int k = 0; k < kProducts; ++k)
        load_matrices_turned(words.of[k][0], words.of[k][1], words.of[k][2], words.of[k][3], row + k * 2048);
}

/* The sums of a block of lines of a warpgroup; `meanwhile` is called while products run, for each step. The slots of the item
 * are free then, if this is the `last` block: both warpgroups wait for all slots and free them, also where one has no block of
 * an item, or it might meet a slot of a later item before that of the one between was there, and take the one for the other.
 */
template <typename MEANWHILE>
__device__ __forceinline__ void multiply(
    float (&sums)[COLUMNS / 2], ring_t<STAGES>& ring, ring_t<SLOTS> slots, barriers_t& barriers, int warpgroup, bool last,
    const MEANWHILE& meanwhile) {
    const bool speaker = threadIdx.x % 32 == 0;  // arrives at barriers for its warp
    ring_t<SLOTS> held = slots;                  // that products in flight may still read
    const auto free = [&] {
        #pragma unroll
        for (int sub = 0; sub < SUBS; ++sub, held.advance())
            if (last && speaker) barrier_arrive(barriers.slot_empty[held.stage]);
    };
    words_t words[2];
    each<kSteps>([&](auto step) {
        constexpr int kStep = decltype(step)::value;
        barrier_wait(barriers.full[warpgroup][ring.stage], ring.parity);
        load_weights(words[kStep % 2], stage_of(warpgroup, ring.stage), threadIdx.x / 32 % 4);
        matrix_t right[SUBS];
        #pragma unroll
        for (int sub = 0; sub < SUBS; ++sub, slots.advance()) {
            barrier_wait(barriers.slot_full[slots.stage], slots.parity);
            right[sub] = swizzled_matrix_of(shared + slots.stage * kSlotBytes, kLineBytes, 1024);
        }
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < kProducts; ++k)
            wgmma_rows<ELEMENT_T, COLUMNS, true>(
                sums, words[kStep % 2].of[k], advanced(right[k / 4], k % 4 * 2048), kStep + k > 0);
        wgmma_commit();
        if (speaker) barrier_arrive(barriers.empty[warpgroup][ring.stage]);  // its words are there: products have begun
        ring.advance();
        meanwhile(step);
        wgmma_wait<1>();
        if (kStep > 0) free();
    });
    wgmma_finish_rows(sums);
    free();
}

/* The slots of an item of which this warpgroup has no block. */
__device__ __forceinline__ void pass_by(ring_t<SLOTS> slots, barriers_t& barriers) {
    #pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        barrier_wait(barriers.slot_full[slots.stage], slots.parity);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(barriers.slot_empty[slots.stage]);
        slots.advance();
    }
}

/* A warp's lines of a block, on their way to memory by way of its own part of shared memory. Lanes have vectors of kAtOnce rows
 * of outputs beside each other.
 */
struct lines_t {
    ELEMENT_T* output = nullptr;              // of the lane's first vector
    int outs = 0, rows = 0, width = 0;  // that there are: output channels, rows of outputs, columns of inputs

    __device__ __forceinline__ static int row() { return kAcross > 1 ? 0 : least(threadIdx.x % 32 / kRowVectors, kAtOnce - 1); }
    __device__ __forceinline__ static int vector() { return kAcross > 1 ? threadIdx.x % 32 : threadIdx.x % 32 % kRowVectors; }

    /* Lines `line` to line + 15 of an item. */
    __device__ __forceinline__ void put(
        const fused_shuffle_params& p, const float (&sums)[COLUMNS / 2], ELEMENT_T* staged, const item_t& item, int line) {
        const int lane = threadIdx.x % 32, out = line / kTaps;
        const bool own = kAcross > 1 || lane / kRowVectors < kAtOnce;  // else the lane has nothing to store
        outs = own ? OUT_CHANNELS - out : 0, rows = item.rows * KERNEL_H, width = item.width;
        output = p.output + (static_cast<long long>(item.image) * OUT_CHANNELS + out) * kPlane +
                 ((item.row * KERNEL_H + row()) * kOutW + item.column * KERNEL_W + vector() * VECTOR);
        ELEMENT_T* mine = staged + (lane / 4 * STAGED_PITCH + lane % 4 * 2);
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < ceil_div(kPositions, 8) * 2; ++i) {
            const ELEMENT_T pair[2] = {narrow<ELEMENT_T>(sums[i * 2]), narrow<ELEMENT_T>(sums[i * 2 + 1])};
            *reinterpret_cast<unsigned*>(mine + (i % 2 * 8 * STAGED_PITCH + i / 2 * 8)) = mma_words<ELEMENT_T>::pack(pair);
        }
        __syncwarp();
    }

    /* Stores vectors FIRST to END - 1 of the lane. */
    template <int FIRST, int END> __device__ __forceinline__ void store(const ELEMENT_T* staged) const {
        const ELEMENT_T* from =
            staged + (row() % KERNEL_H * KERNEL_W * STAGED_PITCH + row() / KERNEL_H * WIDTH + vector() * kTogether);
        each<END - FIRST>([&](auto turn) {
            constexpr int kTurn = FIRST + decltype(turn)::value, kFirst = kTurn % kAcross * 32;
            constexpr int kRow = kTurn / kAcross % kRowTurns * kAtOnce, kOut = kTurn / kAcross / kRowTurns;
            // The last turns are for some lanes alone: what others would read is not of this warp, or not there.
            if (kFirst + 32 > kRowVectors && kAcross > 1 && kFirst + vector() >= kRowVectors) return;
            if (kRow + kAtOnce > ROWS * KERNEL_H && kRow + row() >= ROWS * KERNEL_H) return;
            const ELEMENT_T* here = from + ((kOut * kTaps + kRow % KERNEL_H * KERNEL_W) * STAGED_PITCH +
                                            kRow / KERNEL_H * WIDTH + kFirst * kTogether);
            vector_t<VECTOR> values;
            if constexpr (KERNEL_W == 1) {
                values = *reinterpret_cast<const vector_t<VECTOR>*>(here);
            } else {
                #pragma unroll
                for (int kw = 0; kw < KERNEL_W; kw += 2) {
                    const auto even = *reinterpret_cast<const vector_t<kTogether>*>(here + kw * STAGED_PITCH);
                    const auto odd = *reinterpret_cast<const vector_t<kTogether>*>(here + (kw + 1) * STAGED_PITCH);
                    #pragma unroll
                    for (int i = 0; i < kTogether; ++i)
                        values.word[(i * KERNEL_W + kw) / 2] = halves(even.word[i / 2], odd.word[i / 2], i % 2, i % 2);
                }
            }
            const bool is = kOut < outs && kRow + row() < rows && (kFirst + vector()) * kTogether < width;
            store_words(output + (kOut * kPlane + kRow * kOutW + kFirst * VECTOR), values.word, is);
        });
    }
};

/* Every other block of lines, of item after item; those of one are stored while products of the next run. `warpgroup` is the same
 * for a whole warp, as far as the compiler can see.
 */
__device__ __forceinline__ void consume(const fused_shuffle_params& p, barriers_t& barriers, int warpgroup) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    ELEMENT_T* staged = reinterpret_cast<ELEMENT_T*>(shared + (kFirstStaged + (warpgroup * 4 + warp) * kStagedBytes));
    ring_t<STAGES> ring;
    ring_t<SLOTS> slots;
    lines_t lines;
    int turn = warpgroup;  // 0 for own blocks
    each_item(p, [&](const item_t& item) {
        #pragma unroll 1
        for (int block = 0; block < BLOCKS; ++block, turn ^= 1) {
            if (turn != 0) {
                if (BLOCKS == 1) pass_by(slots, barriers);
                continue;
            }
            const int line = item.line + block * kBlockLines + warp * kWarpLines;
            float biases[2] = {};
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int out = (line + g + i * 8) / kTaps;
                if (p.bias != nullptr && out < OUT_CHANNELS) biases[i] = widen(load_once(p.bias + out));
            }
            float sums[COLUMNS / 2];
            multiply(sums, ring, slots, barriers, warpgroup, block + 2 >= BLOCKS, [&](auto step) {
                constexpr int kStep = decltype(step)::value;
                lines.template store<kTurns * kStep / kSteps, kTurns * (kStep + 1) / kSteps>(staged);
            });
            if (p.bias != nullptr) {
                #pragma unroll
                for (int i = 0; i < COLUMNS / 2; ++i) sums[i] += biases[i / 2 % 2];
            }
            lines.put(p, sums, staged, item, line);
        }
        for (int chunk = 0; chunk < kChunks; ++chunk) slots.advance();
    });
    lines.store<0, kTurns>(staged);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
fused_shuffle_kernel(const __grid_constant__ fused_shuffle_params p) {
    barriers_t& barriers = *reinterpret_cast<barriers_t*>(shared + kFirstBarrier);
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(barriers.slot_full[i], LOADERS / 32);
            barrier_init(barriers.slot_empty[i], kConsumers / 32);
        }
        for (int i = 0; i < 2 * STAGES; ++i) {
            barrier_init(barriers.full[i / STAGES][i % STAGES], 1);
            barrier_init(barriers.empty[i / STAGES][i % STAGES], 4);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= kProducers) {
        registers_up<MULTIPLIER_REGISTERS>();
        consume(p, barriers, __shfl_sync(0xffffffffu, (threadIdx.x - kProducers) / 128, 0));
    } else {
        registers_down<LOADER_REGISTERS>();
        if (threadIdx.x >= 32) produce_inputs(p, barriers);
        else if (threadIdx.x == 0) produce_weights(p, barriers);
    }
}
