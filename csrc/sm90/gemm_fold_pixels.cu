/* fused for small images, and for signals: columns are computed on tensor cores and folded in shared memory.
 *
 * A position is a row of the product, whose inputs a thread takes as they lie (pipeline/pixels_on_m.cuh). Weights are the right
 * side. Tensor cores take that of TF32 K-major alone, so a launch of its own lays them out; in 16 bits they are read as torch has
 * them. Only inputs are multiplied, no gaps between images or their rows.
 *
 * An item is some images, or a window of one row (WINDOWED), with as much of its neighbours as its cells read. At the end of a
 * block of lines the warps that multiply write the columns of FOLD_OUTS output channels to shared memory, all of them at once,
 * gather them (epilogue/fold_smem.cuh), and go on with the next. Two buffers of columns take turns, so that nobody waits before
 * writing.
 *
 * Inputs come to slots and weights to stages, two rings of buffers in shared memory, a chunk of channels in each. Where all chunks
 * of an item have a slot, inputs are held for all of its blocks of lines, and the last block frees the slots.
 *
 * Macros: those of pipeline/pixels_on_m.cuh and epilogue/fold_smem.cuh, OWN_BYTES being for columns; FOLD_OUTS (a divisor of a
 * block's output channels, their lines a multiple of 8), WHOLE_OUTS (1 where it divides all of them), FOLD_TURNS (cells of a
 * thread, or parts of them, at most). Chosen by gemmconv/kernels/sm90/gemm_fold_pixels.py.
 */
#include "epilogue/fold_smem.cuh"
#include "ptx/named_barrier.cuh"
#include "pipeline/pixels_on_m.cuh"

constexpr int kPassLines = FOLD_OUTS * kTaps, kPasses = LINES / kPassLines, kPassFloats = kPassLines * FOLD_PITCH;
// Products before the loop, which takes two in turn: an odd one. More take longer to compile, and no less to run.
constexpr int kShares = ROW_BLOCKS == 1 ? LEAST_CHUNKS % 2 : 0;
static_assert(kPassLines % 8 == 0 && LINES % kPassLines == 0, "a pass is columns of each thread");
static_assert(FOLD_PITCH % 8 == 4 && kPositions <= FOLD_PITCH, "a warp writes columns to different banks");
static_assert(2 * kPassFloats * 4 <= OWN_BYTES, "columns of two passes fit");

// Threads are divided into groups where there are more of them than parts of cells, about as many as positions: each gathers
// other output channels.
constexpr int kGroups = [] {
    int groups = 1;
    while (FOLD_OUTS % (groups * 2) == 0 && groups * 2 * kPositions * kParts <= kConsumers) groups *= 2;
    return groups;
}();
constexpr int kLanes = kConsumers / kGroups, kGroupOuts = FOLD_OUTS / kGroups;
constexpr int kOwnCells = FOLD_TURNS <= 2 ? FOLD_TURNS : 1;

/* Writes a pass of a warp's columns. Sums of rows g and g + 8 are neighbours. */
template <int PASS>
__device__ __forceinline__ void write_columns(float* columns, const float (&sums)[ROW_BLOCKS][LINES / 2], int warp) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int row = 0; row < ROW_BLOCKS; ++row) {
        const int position = row * kBlockPositions + warp * 16 + lane / 4 * 2;
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
    const image_t of{p.in_h, p.in_w};
    if constexpr (!WINDOWED) {
        const int n = divided(i, p.of_cells), cell = i - n * (of.cells_h() * of.cells_w());
        const int row = divided(cell, p.of_cells_w), column = cell - row * of.cells_w(), before = n * (p.in_h * p.in_w);
        return {item.position + before < p.positions, item.image + n, row, column, before + row * p.in_w + column};
    } else {
        const int column = item.position + p.left + i;
        return {column < of.cells_w(), item.image, 0, column, p.left + i};
    }
}

/* The positions of a warp, the `warp`-th that multiplies, of item after item. */
__device__ __forceinline__ void consume(const pixels_on_m_params& p, int warp) {
    float* both = reinterpret_cast<float*>(shared + p.first_own);
    const image_t image{WINDOWED ? 1 : p.in_h, p.in_w};
    const int cells = WINDOWED ? p.step : p.images * (image.cells_h() * image.cells_w());
    const int thread = threadIdx.x - kProducers, group = thread / kLanes;
    const float* biases = biases_of(p, warp) + group * kGroupOuts;
    ring_t ring, slots;
    each_item<item_t>(p, [&](const item_t& item) {
        const int lane = thread % kLanes;
        cell_t own[kOwnCells];  // that a thread gathers, each time
        #pragma unroll
        for (int turn = 0; turn < kOwnCells; ++turn) own[turn] = cell_of(p, item, (turn * kLanes + lane) / kParts);
        #pragma unroll 1
        for (int block = 0; block < item.blocks; ++block) {
            const int first = (item.block + block) * kBlockOuts;
            const biases_t of_block(p, first);
            float sums[ROW_BLOCKS][LINES / 2];
            ring_t here = slots;
            const bool frees = !p.held || block + 1 == item.blocks;
            multiply<true, kShares>(p, sums, ring, here, warp, frees, [](auto) {});
            if (frees) slots = here;
            of_block.share(p, warp);
            #pragma unroll 1
            for (int pass = 0; pass < kPasses; ++pass) {
                float* columns = both + pass % 2 * kPassFloats;
                only<kPasses>(pass, [&](auto known) { write_columns<decltype(known)::value>(columns, sums, warp); });
                named_barrier_sync<1, kConsumers>();
                const int out = first + pass * FOLD_OUTS + group * kGroupOuts;
                if (out < p.out_channels)
                    gather<FOLD_TURNS, kLanes, kGroupOuts, WHOLE_OUTS>(
                        image, p.output, p.out_channels, columns + group * (kGroupOuts * kTaps * FOLD_PITCH),
                        biases + pass * FOLD_OUTS, out, lane, cells,
                        [&](int turn, int i) { return turn < kOwnCells ? own[turn % kOwnCells] : cell_of(p, item, i); });
            }
            if constexpr (kPasses % 2 == 1) named_barrier_sync<1, kConsumers>();  // the next block begins with the same columns
        }
    });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sm90_gemm_fold_pixels_kernel(const __grid_constant__ pixels_on_m_params p) {
    run(p, [&](int warp) { consume(p, warp); });
}
