/* fused for small images, and for signals: columns are computed on tensor cores and folded in shared memory.
 *
 * The same as sm90/gemm_fold.cu, but for what is a row of the product: here a position is, whose inputs a thread takes as they
 * lie (pipeline/pixels_on_m.cuh). Tensor cores take the other side of TF32 K-major alone: those are the weights, laid out by a
 * launch of its own, since inputs would have to go through registers and shared memory again.
 *
 * An item is IMAGES images, or a window of one row (WINDOWS), with as much of its neighbours as its cells read. At the end of a
 * block of lines the warps that multiply write the columns of FOLD_OUTS output channels to shared memory, all of them at once,
 * gather them (epilogue/fold_smem.cuh), and go on with the next; what they write meanwhile lies elsewhere.
 *
 * Macros: those of pipeline/pixels_on_m.cuh and epilogue/fold_smem.cuh, OWN_BYTES being for columns; IMAGES (of an item; 1 of
 * windows); FOLD_OUTS (a divisor of a block's output channels, their lines a multiple of 8).
 * Chosen by gemmconv/kernels/sm90/gemm_fold_pixels.py.
 */
#include "epilogue/fold_smem.cuh"
#include "ptx/named_barrier.cuh"
#include "pipeline/pixels_on_m.cuh"

constexpr int kPassLines = FOLD_OUTS * kTaps, kPasses = LINES / kPassLines, kPassFloats = kPassLines * FOLD_PITCH;
constexpr int kImageCells = kCellsH * kCellsW, kCells = WINDOWS == 1 ? IMAGES * kImageCells : WINDOW_STEP;
static_assert(kPassLines % 8 == 0 && LINES % kPassLines == 0, "a pass is columns of each thread");
static_assert(FOLD_PITCH % 8 == 4 && ITEM_POSITIONS <= FOLD_PITCH, "a warp writes columns to different banks");
static_assert(2 * kPassFloats * 4 <= OWN_BYTES, "columns of two passes fit");
static_assert(WINDOWS == 1 ? IMAGES * kPixels == ITEM_POSITIONS
                           : IN_H == 1 && OUT_H == 1 && IMAGES == 1 && WINDOWS * WINDOW_STEP >= kCellsW &&
                                 WINDOW_LEFT >= -axis_w::least_shift() &&
                                 ITEM_POSITIONS >= WINDOW_LEFT + WINDOW_STEP + axis_w::largest_shift(),
              "an item has all inputs that its cells read");

// Threads are divided into groups where there are more of them than parts of cells: each gathers other output channels.
constexpr int kGroups = [] {
    int groups = 1;
    while (FOLD_OUTS % (groups * 2) == 0 && groups * 2 * ceil_div(kCells * kParts, 32) * 32 <= kConsumers) groups *= 2;
    return groups;
}();
constexpr int kLanes = kConsumers / kGroups, kGroupOuts = FOLD_OUTS / kGroups;

/* Writes a pass of a warp's columns. Sums of rows g and g + 8 are neighbours. */
template <int PASS>
__device__ __forceinline__ void write_columns(float* columns, const float (&sums)[ROW_BLOCKS][LINES / 2], int warp) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int row = 0; row < ROW_BLOCKS; ++row) {
        const int position = row * kBlockPositions + warp * 16 + lane / 4 * 2;
        if (ITEM_POSITIONS % kBlockPositions != 0 && position >= ITEM_POSITIONS) continue;
        float* mine = columns + (lane % 4 * 2 * FOLD_PITCH + position);
        #pragma unroll
        for (int j = 0; j < kPassLines / 8; ++j) {
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float* from = sums[row] + ((PASS * (kPassLines / 8) + j) * 4 + e);
                *reinterpret_cast<pair_t*>(mine + (j * 8 + e) * FOLD_PITCH) = {from[0], from[2]};
            }
        }
    }
}

/* The i-th cell of an item. */
__device__ __forceinline__ cell_t cell_of(const pixels_on_m_params& p, const item_t& item, int i) {
    if constexpr (WINDOWS == 1) {
        const int n = i / kImageCells, row = i % kImageCells / kCellsW, column = i % kCellsW;
        const int image = item.position / kPixels + n;
        return {image < p.positions / kPixels, image, row, column, n * kPixels + row * IN_W + column};
    } else {
        const int column = item.position + WINDOW_LEFT + i;
        return {column < kCellsW, item.image, 0, column, WINDOW_LEFT + i};
    }
}

/* The positions of a warp, the `warp`-th that multiplies, of item after item. */
__device__ __forceinline__ void consume(const pixels_on_m_params& p, barriers_t& barriers, int warp) {
    float* both = reinterpret_cast<float*>(shared + kFirstOwn);
    const int thread = threadIdx.x - kProducers, group = thread / kLanes;
    const float* biases = biases_of(warp) + group * kGroupOuts;
    ring_t<STAGES> ring;
    ring_t<SLOTS> slots;
    each_item(p, [&](const item_t& item) {
        #pragma unroll 1
        for (int block = 0; block < item.blocks; ++block) {
            const int first = (item.block + block) * kBlockOuts;
            const biases_t own(p, first);
            float sums[ROW_BLOCKS][LINES / 2];
            ring_t<SLOTS> here = slots;
            const bool last = block + 1 == item.blocks;
            multiply<true>(sums, ring, here, barriers, warp, !INPUTS_STATIONARY || last, [](auto) {});
            if (!INPUTS_STATIONARY || last) slots = here;
            own.share(warp);
            each<kPasses>([&](auto pass) {
                constexpr int kPass = decltype(pass)::value;
                float* columns = both + kPass % 2 * kPassFloats;
                write_columns<kPass>(columns, sums, warp);
                named_barrier_sync<1, kConsumers>();
                const int out = first + kPass * FOLD_OUTS + group * kGroupOuts;
                if (out < OUT_CHANNELS)
                    gather<kCells, kLanes, kGroupOuts>(
                        p.output, columns + group * (kGroupOuts * kTaps * FOLD_PITCH), biases + kPass * FOLD_OUTS, out,
                        thread % kLanes, [&](int i) { return cell_of(p, item, i); });
            });
            if constexpr (kPasses % 2 == 1) named_barrier_sync<1, kConsumers>();  // the next block begins with the same columns
        }
    });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sm90_gemm_fold_pixels_kernel(const __grid_constant__ pixels_on_m_params p) {
    run(p, [&](barriers_t& barriers, int warp) { consume(p, barriers, warp); });
}
