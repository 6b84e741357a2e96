/* fused for channels_last: cells are the rows of a product, and come from any place of a patch.
 *
 * For one phase of all cells (see geometry/axis.cuh) the outputs are a product over the phase's taps and the channels,
 *
 *   output [cell, co] = bias [co] + sum over tap, ci of input [cell + shift of the tap, ci] weight [ci, tap, co]
 *
 * In channels_last a pixel's channels lie together. So a patch comes as one box of a tensor map, with zeros for what lies
 * outside of the image, and is a line of 128 bytes of channels for each position:
 *
 *   patch [images][patch_h][patch_w] lines, whose pieces of 16 bytes are swapped (ptx/wgmma.cuh)
 *
 * A tap's inputs are the same lines so many further on: nothing is copied for it, and nothing is folded.
 *
 *   S=2 P=1 K=4, images of 4 x 4: a patch of 5 x 5 lines an image, of which each of a phase's four taps reads 4 x 4
 *
 * Rows are cells in one of three ways:
 *
 *   DENSE                   cells without gaps, of whatever images: lanes of ldmatrix say where rows begin, any line
 *   group_bytes = 8 lines   all lines of a strip one after the other, those between its rows of cells among them
 *   group_bytes = patch_w   strips of eight cells
 *
 * In the latter two, groups of eight rows are lines that follow each other, group_bytes apart in all of 64 rows, and
 * tensor cores read them from shared memory themselves, which takes less of it than ldmatrix does. But they would not
 * round TF32.
 *
 * Weights are the columns' side. Of 16 bits they come as they lie in channels_last: a box has 64 output channels of a tap, for
 * 64 channels. Tensor cores take TF32 K-major alone, and weights/pack.cu lays it out, a line being an output channel of a
 * tap (PACKED).
 *
 * An item is a phase, LINES output channels, and the cells of a few whole images, or of a strip of them, or as many cells of a
 * strip as there are rows. Items of the same cells follow each other, so that the L2 cache has what they share. One thread
 * begins all boxes of inputs, another those of weights; two warpgroups multiply, each 64 of every 128 rows. Outputs are kept in
 * registers, where these have room (DEFERRED_STORES), and stored while products of the next item run. Four lanes, which have two channels
 * each of every eight, trade them for 16 bytes each.
 *
 * What limits it: shared memory. Of the 128 cycles of a product of 64 rows by 256 columns it reads weights in 64, inputs in 16,
 * and writes what takes their place in 37; of 128 columns it is busy for as long with 256 rows, and for longer with fewer.
 * Trading and storing outputs take a tenth. That inputs come once for all phases, or weights once for two blocks of a cluster,
 * would not help: the L2 cache has time left.
 *
 * Macros: ELEMENT_T, PACKED (1 for float32, 0 for 16 bits); KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W, such
 * that every phase has a tap, and some have several; IN_CHANNELS, OUT_CHANNELS (of whole 16 bytes; PACKED a multiple of
 * LINES); ROW_BLOCKS (of 128 rows: 1 or 2), LINES (a multiple of 32, up to 256 / ROW_BLOCKS), DEFERRED_STORES (1 or 0);
 * DENSE (1 if PACKED). Sizes of images, and what follows from them, are params: one compiled kernel is for all sizes.
 * Chosen by gemmconv/kernels/sm90/implicit_gemm_nhwc.py.
 */
#define WGMMA_COLUMNS LINES
#include "geometry/axis.cuh"
#include "ptx/keep.cuh"
#include "ptx/pdl.cuh"
#include "numeric/divide.cuh"
#include "numeric/integers.cuh"
#include "ptx/mma.cuh"
#include "pipeline/persistent.cuh"
#include "ptx/store.cuh"
#include "ptx/tma.cuh"
#include "numeric/units.cuh"
#include "numeric/unroll.cuh"
#include "ptx/wgmma.cuh"

struct implicit_gemm_nhwc_params {
    tensor_map_t input;  // [images][rows][columns][channels]
#if PACKED
    const unit_t* __restrict__ weights;
#else
    tensor_map_t weights;  // [ci][taps][co]
#endif
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    int batch, items, out_h, out_w;
    int images, strips, segments;           // of an item; that an image is cut into; that a strip is cut into
    int strip_cells, across, strip_rows;    // cells across; rows of the product from a row of cells to the next, in all
    int patch_w, image_lines, group_bytes;  // lines of a patch in a row, of an image; from eight rows to the next
    int slots, stages;                      // patches; weights
    int patch_bytes, slot_bytes, first_stage, first_bias;  // in shared memory
    unsigned long long by_strips, by_segments, by_across, by_strip_rows;  // reciprocals: numeric/divide.cuh
};

static_assert(axis_h::kPhases == STRIDE_H && axis_w::kPhases == STRIDE_W, "every phase has a tap");

constexpr int kConsumers = 256, kProducers = 128, kThreads = kConsumers + kProducers;
constexpr int kItem = sizeof(ELEMENT_T), kPiece = 16 / kItem, kChannels = 128 / kItem;  // elements: of 16 bytes, of a line
constexpr int kRows = ROW_BLOCKS * 128;
constexpr int kChunks = ceil_div(IN_CHANNELS, kChannels), kBlocks = ceil_div(OUT_CHANNELS, LINES);
constexpr int kPhases = STRIDE_H * STRIDE_W;
static_assert(IN_CHANNELS % kPiece == 0 && OUT_CHANNELS % kPiece == 0, "pieces of 16 bytes are whole");
static_assert(!PACKED || OUT_CHANNELS % LINES == 0, "lines of a block are of one tap");

// Shared memory: patches [slots]; weights [stages], either [LINES / 64][kChannels] of 128 bytes, swizzled, or
// [8][LINES] of 16; biases; barriers.
constexpr int kBoxBytes = 64 * 128, kStageBytes = PACKED ? LINES * 128 : ceil_div(LINES, 64) * kBoxBytes;
constexpr int kMostSlots = 4, kMostStages = 12;
struct barriers_t { ring_barriers_t<kMostSlots> slots; ring_barriers_t<kMostStages> stages; };
extern __shared__ __align__(1024) unsigned char shared[];

/* The index-th item: its first image, its strip, its first row of those, its phase of either axis, its first output channel. */
struct item_t {
    int index, image, strip, row, phase_h, phase_w, first;
    __device__ __forceinline__ item_t(const implicit_gemm_nhwc_params& p, int index) : index(index) {
        const int tile = index / (kPhases * kBlocks), phase = index / kBlocks % kPhases;
        const int segments = divided(tile, p.by_strips), images = divided(segments, p.by_segments);
        image = images * p.images, strip = tile - segments * p.strips, row = (segments - images * p.segments) * kRows;
        phase_h = phase / STRIDE_W, phase_w = phase % STRIDE_W, first = index % kBlocks * LINES;
    }
    __device__ __forceinline__ int taps_h() const { return axis_h::taps(phase_h); }
    __device__ __forceinline__ int taps_w() const { return axis_w::taps(phase_w); }
};

/* Begins to copy the patches of all items. One thread. */
__device__ __forceinline__ void produce_inputs(const implicit_gemm_nhwc_params& p, barriers_t& barriers) {
    ring_t ring;
    each_item<item_t>(p, [&](const item_t& item) {
        // The last tap of a phase has the least shift.
        const int row =
            divided(item.row, p.by_across) + axis_h::shift(item.phase_h) - (item.taps_h() - 1) * axis_h::kShiftStep;
        const int column =
            item.strip * p.strip_cells + axis_w::shift(item.phase_w) - (item.taps_w() - 1) * axis_w::kShiftStep;
        #pragma unroll 1
        for (int chunk = 0; chunk < kChunks; ++chunk, ring.advance(p.slots)) {
            barrier_t& full = begin_stage(barriers.slots, ring, p.patch_bytes);
            tma_load(shared + ring.stage * p.slot_bytes, p.input, chunk * kChannels, column, row, item.image, full);
        }
    });
}

/* Begins to copy the weights of all items, tap after tap of a chunk of channels. One thread. */
__device__ __forceinline__ void produce_weights(const implicit_gemm_nhwc_params& p, barriers_t& barriers) {
    ring_t ring;
    if (PACKED) grid_dependency_wait();  // which lays them out
    each_item<item_t>(p, [&](const item_t& item) {
        #pragma unroll 1
        for (int chunk = 0; chunk < kChunks; ++chunk)
            #pragma unroll 1
            for (int kh = item.phase_h; kh < KERNEL_H; kh += axis_h::kStep)
                #pragma unroll 1
                for (int kw = item.phase_w; kw < KERNEL_W; kw += axis_w::kStep, ring.advance(p.stages)) {
                    unsigned char* stage = shared + (p.first_stage + ring.stage * kStageBytes);
                    barrier_t& full = begin_stage(barriers.stages, ring, kStageBytes);
                    const int tap = kh * KERNEL_W + kw;
#if PACKED
                    const int block = tap * kBlocks + item.first / LINES;
                    const unit_t* source = p.weights + (static_cast<long long>(block) * kChunks + chunk) * (LINES * 8);
                    bulk_copy(stage, source, kStageBytes, full);
#else
                    #pragma unroll
                    for (int box = 0; box < kStageBytes / kBoxBytes; ++box)
                        tma_load(stage + box * kBoxBytes, p.weights, item.first + box * 64, tap, chunk * kChannels, 0, full);
#endif
                }
    });
}

/* The i-th row of an item: a cell's image, of those that the item has, and its row and column, of the strip.
 * Rows of images behind those, and of columns beyond strip_cells, are no cells. An item of a part of a strip has one
 * image.
 */
struct cell_t {
    int image, row, column;
    __device__ __forceinline__ cell_t(const implicit_gemm_nhwc_params& p, const item_t& item, int i) {
        image = divided(item.row + i, p.by_strip_rows);
        const int place = item.row + i - image * p.strip_rows;
        row = divided(place, p.by_across), column = place - row * p.across;
    }
};

/* The line of a patch that a tap of the least shift reads for the i-th row of an item; any, where that is no cell. */
__device__ __forceinline__ int line_of(const implicit_gemm_nhwc_params& p, const item_t& item, int i) {
    const cell_t cell(p, item, i);
    const int line = cell.image * p.image_lines + (cell.row - divided(item.row, p.by_across)) * p.patch_w + cell.column;
    return cell.image < p.images ? line : 0;
}

/* Outputs as they are stored: of rows g and g + 8 of a warp's 16 of each block, two of every eight channels. */
struct outputs_t {
    static constexpr int kPair = kItem / 2;               // words of two channels
    static constexpr int kTurns = LINES / 8 * kPair / 4;  // of four words of each lane
    int to[ROW_BLOCKS][2];                                // pieces of 16 bytes before the item's first channel, or -1 for none
    int channels = 0;                                     // that there are from there on
    unsigned words[ROW_BLOCKS][2][LINES / 8 * kPair] = {};

    __device__ __forceinline__ outputs_t() {
        #pragma unroll
        for (int row = 0; row < ROW_BLOCKS * 2; ++row) to[row / 2][row % 2] = -1;
    }

    /* Takes the sums of an item. */
    __device__ __forceinline__ void take(
        const implicit_gemm_nhwc_params& p, const item_t& item, const float (&sums)[ROW_BLOCKS][LINES / 2], int warp) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int down = axis_h::output(item.phase_h), across = axis_w::output(item.phase_w);
        channels = OUT_CHANNELS - item.first;
        #pragma unroll
        for (int block = 0; block < ROW_BLOCKS; ++block)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = block * 128 + warp * 16 + half * 8 + g;
                const cell_t cell(p, item, row);
                const int oh = cell.row * STRIDE_H + down, column = item.strip * p.strip_cells + cell.column;
                const int ow = column * STRIDE_W + across, image = item.image + cell.image;
                const bool is = cell.image < p.images && image < p.batch && oh < p.out_h && ow < p.out_w &&
                                cell.column < p.strip_cells;
                to[block][half] =
                    is ? ((image * p.out_h + oh) * p.out_w + ow) * (OUT_CHANNELS / kPiece) + item.first / kPiece : -1;
            }
        const float* biases = reinterpret_cast<const float*>(shared + p.first_bias) + (item.first + t * 2);
        #pragma unroll
        for (int j = 0; j < LINES / 8; ++j) {
            const float bias[2] = {biases[j * 8], biases[j * 8 + 1]};
            #pragma unroll
            for (int block = 0; block < ROW_BLOCKS; ++block)
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float* from = sums[block] + (j * 4 + half * 2);
                    const ELEMENT_T pair[2] = {narrow<ELEMENT_T>(from[0] + bias[0]), narrow<ELEMENT_T>(from[1] + bias[1])};
                    pack(words[block][half] + j * kPair, pair);
                }
        }
    }

    /* Stores 64 bytes of a row's channels. Of 16 bits lane t of four has channels 8j + 2t of them before, 8t + 2j behind the
     * trade; of float32, 8j + 2t, of two j, and 8 (t % 2) + 4 (t / 2) + 2j.
     */
    template <int BLOCK, int HALF, int TURN>
    __device__ __forceinline__ void store(const implicit_gemm_nhwc_params& p) const {
        const int t = threadIdx.x % 4;
        unsigned own[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = words[BLOCK][HALF][TURN * 4 + i];
        trade<1, kPair>(own);
        if constexpr (kItem == 2) trade<2, 2>(own);
        const int channel = TURN * (64 / kItem) + (kItem == 2 ? t * 8 : t % 2 * 8 + t / 2 * 4);
        const bool is = to[BLOCK][HALF] >= 0 && (OUT_CHANNELS % LINES == 0 || channel < channels);
        store_words(p.output + (to[BLOCK][HALF] * static_cast<long long>(kPiece) + channel), own, is);
    }

    /* Stores the SHARE-th of SHARES parts. */
    template <int SHARE, int SHARES> __device__ __forceinline__ void store_share(const implicit_gemm_nhwc_params& p) const {
        constexpr int kAll = ROW_BLOCKS * 2 * kTurns, kFirst = kAll * SHARE / SHARES, kEnd = kAll * (SHARE + 1) / SHARES;
        each<kEnd - kFirst>([&](auto i) {
            constexpr int kPart = kFirst + i, kRow = kPart / kTurns;
            store<kRow / 2, kRow % 2, kPart % kTurns>(p);
        });
    }

private:
    template <typename T> __device__ __forceinline__ static void pack(unsigned* own, const T (&pair)[2]) {
        if constexpr (sizeof(T) == 2) own[0] = mma_words<T>::pack(pair);
        else own[0] = __float_as_uint(pair[0]), own[1] = __float_as_uint(pair[1]);
    }

    /* With the lane whose number differs in BIT, words i whose number does not have WORD for i + WORD. */
    template <int BIT, int WORD> __device__ __forceinline__ static void trade(unsigned (&own)[4]) {
        const bool upper = threadIdx.x & BIT;
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & WORD) continue;
            const unsigned got = __shfl_xor_sync(0xffffffffu, upper ? own[i] : own[i | WORD], BIT);
            if (upper) own[i] = got;
            else own[i | WORD] = got;
        }
    }
};

/* The place before one of a ring of so many, which products in flight may still read. */
__device__ __forceinline__ int before(const ring_t& ring, int count) {
    return ring.stage == 0 ? count - 1 : ring.stage - 1;
}

/* The rows of a warp, the `warp`-th that multiplies, of item after item. */
__device__ __forceinline__ void consume(const implicit_gemm_nhwc_params& p, barriers_t& barriers, int warp) {
    // Steps that every item has: outputs of the item before are stored in equal shares meanwhile.
    constexpr int kLeastTaps = (KERNEL_H / axis_h::kStep) * (KERNEL_W / axis_w::kStep);
    constexpr int kShares = least(DENSE ? ceil_div(kLeastTaps * kChunks, 2) : kLeastTaps * kChunks, 2);
    constexpr int kTogether = DENSE ? 2 : 4, kGroups = 4 / kTogether;  // products that are begun together; of a line
    const int lane = threadIdx.x % 32;
    [[maybe_unused]] const int piece = lane / 16;
    const bool speaker = lane == 0;  // arrives at barriers for its warp
    ring_t ring, slots;
    outputs_t outputs;
    // h and w count steps of a tap's shift from the least one. Where all phases have as many they go on from item to item, so that
    // the compiler does not know them: it would work out lines of many steps at once, which there are no registers for.
    constexpr bool kEven = axis_h::kEven && axis_w::kEven;
    int h = axis_h::taps(0) - 1, w = axis_w::taps(0) - 1;
    each_item<item_t>(p, [&](const item_t& item) {
        int lines[ROW_BLOCKS];
        #pragma unroll
        for (int block = 0; block < ROW_BLOCKS; ++block)
            lines[block] = line_of(p, item, block * 128 + (DENSE ? warp * 16 + lane % 16 : warp / 4 * 64));
        const int taps_h = item.taps_h(), taps_w = item.taps_w(), steps = taps_h * taps_w * kChunks;
        float sums[ROW_BLOCKS][LINES / 2];
        [[maybe_unused]] unsigned words[2][kTogether][4];
        if (!kEven) h = taps_h - 1, w = taps_w - 1;
        const auto step = [&](bool first, const auto& along) {
            if (h == taps_h - 1 && w == taps_w - 1) barrier_wait(barriers.slots.full[slots.stage], slots.parity);
            const unsigned char* stage = shared + (p.first_stage + ring.stage * kStageBytes);
            const descriptor_t right = PACKED ? descriptor_k_major(stage, LINES * 16, 128) : descriptor_mn_major(stage, kBoxBytes, 1024);
            const int further = h * axis_h::kShiftStep * p.patch_w + w * axis_w::kShiftStep;
            each<ROW_BLOCKS * kGroups>([&](auto which) {
                constexpr int kGroup = which, kBlock = kGroup / kGroups;
                [[maybe_unused]] constexpr int kFirst = kGroup % kGroups * kTogether;  // product of a line
                constexpr bool kLast = kGroup == ROW_BLOCKS * kGroups - 1;
                const int line = lines[kBlock] + further, place = slots.stage * p.slot_bytes + line * 128;
                if (kGroup == 0) barrier_wait(barriers.stages.full[ring.stage], ring.parity);
                const auto right_of = [&](int k) { return advance(right, k * (PACKED ? LINES * 32 : 2048)); };
#if !DENSE
                wgmma_fence();
                const descriptor_t left = descriptor_k_major_swizzled<128>(shared + place, p.group_bytes);
                #pragma unroll
                for (int k = 0; k < kTogether; ++k)
                    wgmma<ELEMENT_T, LINES, true>(sums[kBlock], advance(left, k * 32), right_of(k), k > 0 || !first);
#else
                unsigned(&own)[kTogether][4] = words[kGroup % 2];
                #pragma unroll
                for (int k = 0; k < kTogether; ++k) {
                    load_matrices(own[k], shared + (place + ((piece ^ line % 8) * 16 ^ (kFirst + k) * 32)));
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) own[k][i] = mma_words<ELEMENT_T>::rounded(own[k][i]);
                }
                wgmma_fence();
                #pragma unroll
                for (int k = 0; k < kTogether; ++k)
                    wgmma_rows<ELEMENT_T, LINES, !PACKED>(
                        sums[kBlock], own[k], right_of(kFirst + k), kFirst + k > 0 || !first);
#endif
                wgmma_commit();
                if constexpr (kLast) {
                    if (DENSE && h == 0 && w == 0) {
                        barrier_arrive(barriers.slots.empty[slots.stage]);
                        slots.advance(p.slots);
                    }
                    along();
                }
                wgmma_wait<1>();
                if (kGroup == 0 && !first && speaker) {
                    barrier_arrive(barriers.stages.empty[before(ring, p.stages)]);
                    if (!DENSE && h == taps_h - 1 && w == taps_w - 1)
                        barrier_arrive(barriers.slots.empty[before(slots, p.slots)]);
                }
            });
            if (!DENSE && h == 0 && w == 0) slots.advance(p.slots);
            ring.advance(p.stages);
            if (w > 0) {
                --w;
            } else {
                w = taps_w - 1;
                h = h > 0 ? h - 1 : taps_h - 1;
            }
        };
        each<kShares>([&](auto share) {
            constexpr int kShare = share;
            step(kShare == 0, [&] {
                if constexpr (DEFERRED_STORES) outputs.template store_share<kShare, kShares>(p);
            });
        });
        #pragma unroll 1
        for (int i = kShares; i < steps; ++i) step(false, [] {});
        #pragma unroll
        for (int block = 0; block < ROW_BLOCKS; ++block) wgmma_finish_rows(sums[block]);
        if (speaker) {
            barrier_arrive(barriers.stages.empty[before(ring, p.stages)]);
            if (!DENSE) barrier_arrive(barriers.slots.empty[before(slots, p.slots)]);
        }
        int again = item.index;  // so that what an item is takes no registers while products run
        forget(again);
        outputs.take(p, item_t(p, again), sums, warp);
        if constexpr (!DEFERRED_STORES) outputs.template store_share<0, 1>(p);
    });
    if constexpr (DEFERRED_STORES) outputs.template store_share<0, 1>(p);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sm90_implicit_gemm_nhwc_kernel(const __grid_constant__ implicit_gemm_nhwc_params p) {
    barriers_t& barriers = *reinterpret_cast<barriers_t*>(shared + p.first_bias + kBlocks * LINES * 4);
    begin_barriers<kThreads / 32>([&](int warp) {  // all that there may be, few for each warp
        barrier_t* const all = reinterpret_cast<barrier_t*>(&barriers);
        #pragma unroll
        for (int i = warp; i < static_cast<int>(sizeof(barriers_t) / sizeof(barrier_t)); i += kThreads / 32) {
            const bool slot_empty = i >= kMostSlots && i < 2 * kMostSlots, empty = i >= 2 * kMostSlots + kMostStages;
            barrier_init(all[i], slot_empty ? (DENSE ? kConsumers : kConsumers / 32) : empty ? kConsumers / 32 : 1);
        }
    });
    float* biases = reinterpret_cast<float*>(shared + p.first_bias);
    for (int i = threadIdx.x; i < kBlocks * LINES; i += kThreads)
        biases[i] = p.bias != nullptr && i < OUT_CHANNELS ? widen(load_once(p.bias + i)) : 0.0f;
    __syncthreads();
    const auto produce = [&] {
        if (threadIdx.x >= 64 || !elected()) return;
        if (threadIdx.x < 32) produce_weights(p, barriers);
        else produce_inputs(p, barriers);
    };
    run_roles<kProducers, 32, 240, 24>(produce, [&](int warp) { consume(p, barriers, warp); });
}
