/* fused for small images, and for signals: columns are computed on tensor cores and folded in shared memory. sm_90a.
 *
 * A position (one pixel of one image) is a row of the product, and a line (one tap of one output channel) a column of it:
 *
 *   columns [position, line] = sum over ci of input [ci, position] weight [ci, line]
 *
 * pipeline/pixels_on_m.cuh has the main loop: a thread takes the inputs of its positions as they lie, and the weights are the
 * right side. Only inputs are multiplied, no gaps between images or their rows.
 *
 * A work tile (item) is some images, or a window of one row (WINDOWED) with as much of its neighbours as its cells read, times
 * some blocks of LINES lines. The epilogue of a block folds its sums, the columns of FOLD_OUTS output channels at a time: the
 * warps that multiply write these to shared memory, wait for each other, and gather the outputs (epilogue/fold_smem.cuh).
 *
 *   64 images of 8 x 8, 64 to 32 channels, kernel 4, stride 2, padding 1, in TF32 (the example of the host file):
 *   item      two images: 128 positions, 64 for each of two warpgroups, 16 for each of eight warps (ROW_BLOCKS = 1)
 *   block     LINES = 144: the 16 taps of 9 output channels. A lane has 72 sums, of two positions and 36 lines
 *   main loop two chunks of 32 channels (LEAST_CHUNKS = 2), four products each of 8 channels x 144 lines; none is peeled off
 *   fold      FOLD_OUTS = 3: 48 lines x FOLD_PITCH = 132 floats, 25 KB. Three folds (kFolds), in two buffers by turns
 *   gather    8 x 8 cells of each image: 128 threads have a cell each, of 2 x 2 outputs of three channels (FOLD_TURNS = 1)
 *
 * Inputs come to slots and weights to stages, two rings of buffers in shared memory, 128 bytes of channels in each. Where all
 * channels of an item have a slot, inputs are held for all of its blocks of lines, and the last block frees the slots.
 *
 * Macros: those of pipeline/pixels_on_m.cuh and epilogue/fold_smem.cuh, OWN_BYTES being for columns; FOLD_OUTS (a divisor of a
 * block's output channels, their lines a multiple of 8), WHOLE_OUTS (1 where it divides all of them), FOLD_GROUPS (of threads,
 * each of which gathers other output channels of a fold: more than 1 where a fold has fewer cells than there are threads),
 * FOLD_TURNS (cells of a thread, or parts of them, at most). Chosen by gemmconv/kernels/sm90/gemm_fold_pixels.py.
 */
// pixels_on_m_params, item_t, multiply, biases_t, biases_of, run, and what they include: each, each_item, divided, ring_t;
// shared (memory); kTaps, kPositions (of an item), kBlockPositions (128), kBlockOuts (output channels of a block), kConsumers (256
// threads that multiply), kProducers, kThreads
#include "pipeline/pixels_on_m.cuh"
// image_t, cell_t, pair_t, gather; kParts (of a row of a cell, with a thread for each)
#include "epilogue/fold_smem.cuh"
#include "ptx/named_barrier.cuh"

constexpr int kFoldLines = FOLD_OUTS * kTaps, kFolds = LINES / kFoldLines, kFoldFloats = kFoldLines * FOLD_PITCH;
// Chunks that are peeled off before the main loop. If ROW_BLOCKS is 1, an iteration takes two chunks, so one is peeled off where
// their number is odd: LEAST_CHUNKS is 1 for one chunk, 2 for an even number, 3 for another odd one. If ROW_BLOCKS is 2, an
// iteration takes one chunk.
constexpr int kPeeled = ROW_BLOCKS == 1 ? LEAST_CHUNKS % 2 : 0;
static_assert(kFoldLines % 8 == 0 && LINES % kFoldLines == 0, "a fold is columns of each thread");
static_assert(FOLD_PITCH % 8 == 4 && kPositions <= FOLD_PITCH, "a warp writes columns to different banks");
static_assert(2 * kFoldFloats * 4 <= OWN_BYTES, "columns of two folds fit");

constexpr int kLanes = kConsumers / FOLD_GROUPS, kGroupOuts = FOLD_OUTS / FOLD_GROUPS;  // threads and channels of a group
static_assert(kConsumers % FOLD_GROUPS == 0 && FOLD_OUTS % FOLD_GROUPS == 0, "groups have as many threads and channels each");
static_assert(FOLD_GROUPS == 1 || kPositions * kParts <= kLanes, "a group has a thread for each position, or part of its cell");
constexpr int kOwnCells = FOLD_TURNS <= 2 ? FOLD_TURNS : 1;  // cells that a thread works out once for all folds: registers are few

/* Writes the columns of one fold that a warp has. wgmma gives lane 4g + t, of 16 positions and 8 lines, the sums
 *
 *   from[0], from[1]: row g, lines 2t and 2t + 1        from[2], from[3]: row g + 8, the same lines
 *
 * and rows g and g + 8 are positions 2g and 2g + 1 (PAIRED in pixels_on_m.cuh), so that a lane writes two neighbours at once.
 *
 *   fold 1 of the example has sums 24 to 47 of a lane, of 6 x 8 lines. Lane 5 (g = 1, t = 1) of warp 2 writes positions 34 and 35
 *   of lines 2, 3, 10, 11, ...
 */
template <int FOLD>
__device__ __forceinline__ void write_columns(float* columns, const float (&sums)[ROW_BLOCKS][LINES / 2], int warp) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int row = 0; row < ROW_BLOCKS; ++row) {
        const int position = row * kBlockPositions + warp * 16 + lane / 4 * 2;
        float* mine = columns + (lane % 4 * 2 * FOLD_PITCH + position);
        #pragma unroll
        for (int j = 0; j < kFoldLines / 8; ++j) {
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float* from = sums[row] + ((FOLD * (kFoldLines / 8) + j) * 4 + e);
                *reinterpret_cast<pair_t*>(mine + (j * 8 + e) * FOLD_PITCH) = {from[0], from[2]};
            }
        }
    }
}

/* The i-th cell of an item: whether it exists, its image, row and column, and its place in a line of columns. */
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

/* The positions of a warp, the `warp`-th that multiplies, of item after item.
 *
 * The example has one block in each item, of output channels 9 `item.block` and on. Its two chunks are one turn of the main loop;
 * then folds 0, 1 and 2 have output channels 0 to 2, 3 to 5 and 6 to 8 of the block, in buffers 0, 1 and 0. Of the last of the four
 * blocks, channels 27 and on, fold 1 has two channels that there are, and fold 2 has none.
 */
__device__ __forceinline__ void consume(const pixels_on_m_params& p, int warp) {
    float* both = reinterpret_cast<float*>(shared + p.first_own);
    const image_t image{WINDOWED ? 1 : p.in_h, p.in_w};
    const int cells = WINDOWED ? p.step : p.images * (image.cells_h() * image.cells_w());
    const int thread = threadIdx.x - kProducers, group = thread / kLanes;
    const float* biases = biases_of(p, warp) + group * kGroupOuts;
    ring_t ring, slots;
    each_item<item_t>(p, [&](const item_t& item) {
        const int lane = thread % kLanes;  // of the group's threads, which are more than a warp's
        cell_t own[kOwnCells];  // cells that the thread gathers, the same of each fold
        #pragma unroll
        for (int turn = 0; turn < kOwnCells; ++turn) own[turn] = cell_of(p, item, (turn * kLanes + lane) / kParts);
        #pragma unroll 1
        for (int block = 0; block < item.blocks; ++block) {
            const int first = (item.block + block) * kBlockOuts;
            const biases_t of_block(p, first);
            float sums[ROW_BLOCKS][LINES / 2];
            ring_t here = slots;
            const bool frees = !p.held || block + 1 == item.blocks;
            // The main loop. true: positions come in pairs; the last argument: nothing else is done while products run.
            multiply<true, kPeeled>(p, sums, ring, here, warp, frees, [](auto) {});
            if (frees) slots = here;
            of_block.share(p, warp);
            #pragma unroll 1
            for (int fold = 0; fold < kFolds; ++fold) {
                // Two buffers take turns. A warp that writes one again has passed the barrier of the fold between, which all
                // warps reach after they have gathered from it.
                float* columns = both + fold % 2 * kFoldFloats;
                each<kFolds>([&](auto known) {  // registers are selected by constants alone
                    if (known == fold) write_columns<known>(columns, sums, warp);
                });
                named_barrier_sync<1, kConsumers>();
                const int out = first + fold * FOLD_OUTS + group * kGroupOuts;
                if (out < p.out_channels)
                    gather<FOLD_TURNS, kLanes, kGroupOuts, WHOLE_OUTS>(
                        image, p.output, p.out_channels, columns + group * (kGroupOuts * kTaps * FOLD_PITCH),
                        biases + fold * FOLD_OUTS, out, lane, cells,
                        [&](int turn, int i) { return turn < kOwnCells ? own[turn % kOwnCells] : cell_of(p, item, i); });
            }
            // The first fold of the next block is written to buffer 0. So is the last of an odd number of folds: warps must have
            // gathered it before. Of an even number the last is in buffer 1, and its barrier was behind all gathering from 0.
            if constexpr (kFolds % 2 == 1) named_barrier_sync<1, kConsumers>();
        }
    });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sm90_gemm_fold_pixels_kernel(const __grid_constant__ pixels_on_m_params p) {
    // Sets up the rings, starts the producers, and calls consume; registers of a thread that multiplies, and of one that loads.
    run<208, 88>(p, [&](int warp) { consume(p, warp); });
}
