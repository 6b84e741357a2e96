/* fused for small images, and for signals: columns are computed on tensor cores and folded in shared memory. sm_90a.
 *
 *   columns[line][position] = sum over input channels ci of input[ci][position] * weight[ci][line]
 *   output = bias + the sum of the columns that belong to it
 *
 * A position is a pixel of an image, and a line a tap of an output channel. A thread block takes item after item: the
 * positions of some images, or a part of a signal, times a line block. The host file, kernels/sm90/gemm_fold_pixels.py,
 * explains the words. The example is its own: 64 images of 8 x 8, 64 to 32 channels, kernel 4, stride 2, padding 1, TF32.
 *
 *   for an item                                                  threads    in the example
 *   copy         inputs and weights to stages, chunk by chunk    0-127      two chunks of 32 channels
 *   multiply     all its positions by all its lines. The sums    128-383    two images, so 128 positions, 16 for a warp;
 *                are columns, and stay in registers                         LINES = 144: the 16 taps of 9 channels. A lane
 *                                                                           has 72 sums, of two positions and 36 lines
 *   for each fold, the lines of FOLD_OUTS output channels:                  FOLD_OUTS = 3, so three folds (kFolds)
 *     write      its columns from registers to shared memory     128-383    48 lines x FOLD_PITCH = 132 floats, 25 KB
 *     gather     adds up the columns of each output, stores it   128-383    128 cells, each 2 x 2 outputs of 3 channels,
 *                                                                           by 128 threads; the others have no cell
 *
 * Copies run ahead, even to later items, as long as a stage is empty. Two folds have room in shared memory, so the next
 * one can be written while some warps still gather: see fold_item.
 *
 * Macros of its own: FOLD_OUTS; WHOLE_OUTS (1 if it divides out_channels); FOLD_GROUPS (of threads, each with channels
 * of its own); FOLD_TURNS (cells of a thread, or parts of cells, at most). The two headers list the others.
 *
 *   pipeline/pixels_on_m.cuh    copy and multiply. run: starts all warps, calls consume() in those that multiply.
 *                               each_item: calls a function for every item of this block. ring_t: the stage that is next
 *   epilogue/fold_smem.cuh      gather. It skips what does not exist: cells, inputs beside the image, channels.
 *                               part_of: a thread's part in a turn, part / kParts its cell. image_t: an image's extents
 *   numeric                     divided: a division by a reciprocal. each: a loop whose index is known to the compiler
 *
 * `python -m pytest tests/test_kernels.py -k fold_pixels` runs this file on a CPU. It finds barriers that are waited for
 * in vain, shared memory that is read before it was written, and wrong sums.
 */
#include "pipeline/pixels_on_m.cuh"
#include "epilogue/fold_smem.cuh"
#include "ptx/named_barrier.cuh"

// Lines of a fold; folds of a line block; floats of a fold's columns. In the example 48, 3 and 48 * 132.
constexpr int kFoldLines = FOLD_OUTS * kTaps, kFolds = LINES / kFoldLines, kFoldFloats = kFoldLines * FOLD_PITCH;
static_assert(kFoldLines % 8 == 0 && LINES % kFoldLines == 0, "a fold has whole groups of 8 lines, as wgmma has them");
static_assert(FOLD_PITCH % 8 == 4 && kPositions <= FOLD_PITCH, "half a warp writes to banks 8t + 2g, all different");
static_assert(2 * kFoldFloats * 4 <= COLUMN_BYTES, "columns of two folds fit");

// A group of threads gathers all cells of an equal share of a fold's channels. The example has one group, of all 256
// threads, for 3 channels: 128 have a cell, and the others none.
constexpr int kGroupThreads = kConsumers / FOLD_GROUPS, kGroupOuts = FOLD_OUTS / FOLD_GROUPS;
static_assert(kConsumers % FOLD_GROUPS == 0 && FOLD_OUTS % FOLD_GROUPS == 0, "groups are of one size");
static_assert(FOLD_GROUPS == 1 || kPositions * kParts <= kGroupThreads, "a thread for each part of a position's cell");
// Cells that a thread keeps in registers for all folds. Registers are few: with more turns each fold finds them again.
constexpr int kKept = FOLD_TURNS <= 2 ? FOLD_TURNS : 1;

/* For fold_item: writes a warp's sums of fold FOLD to columns `to`. wgmma gives a warp the sums of 16 rows: of
 * each 8 lines, lane 4g + t has lines 2t and 2t + 1 in rows g and g + 8. multiply has loaded positions 2g and 2g + 1 to
 * these rows (PAIRED in pixels_on_m.cuh). So sums 0 to 3 of lane 5 (g = 1, t = 1) are:
 *
 *                 line 2   line 3
 *   position 2    0        1
 *   position 3    2        3
 *
 *   A lane writes sums 0 and 2 at once, which are neighbours in a line of columns, then 1 and 3. It has LINES / 2 sums
 *   of a position block: those of 16 x LINES, shared by 32 lanes.
 *
 *   Fold 1 of the example has sums 24 to 47 of a lane, of 6 x 8 lines. Lane 5 of warp 2 writes positions 34 and 35 of
 *   the fold's lines 2, 3, 10, 11, ... The emulator of the tests has wgmma's layout from the PTX manual.
 */
template <int FOLD>
__device__ __forceinline__ void write_columns(float* to, const float (&sums)[POSITION_BLOCKS][LINES / 2], int warp) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int block = 0; block < POSITION_BLOCKS; ++block) {
        const int position = block * kBlockPositions + warp * 16 + lane / 4 * 2;
        float* target = to + (lane % 4 * 2 * FOLD_PITCH + position);
        #pragma unroll
        for (int j = 0; j < kFoldLines / 8; ++j) {
            #pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float* from = sums[block] + ((FOLD * (kFoldLines / 8) + j) * 4 + e);
                *reinterpret_cast<pair_t*>(target + (j * 8 + e) * FOLD_PITCH) = {from[0], from[2]};
            }
        }
    }
}

/* For consume: the i-th cell of an item. Cell 70 of the example's first item, images 0 and 1, is row 0, column 6 of
 * image 1, at position 70 of the item: {exists true, image 1, row 0, column 6, position 70}.
 * A cell to the right of the image (column 8 of 8 inputs) has the position of the next row's first, which does no harm:
 * gather checks row and column before it reads.
 */
__device__ __forceinline__ cell_place_t cell_of(const pixels_on_m_params& p, const item_t& item, int i) {
    const image_t image{p.in_h, p.in_w};
    if constexpr (!WINDOWED) {
        const int nth = divided(i, p.by_cells), cell = i - nth * (image.cells_h() * image.cells_w());
        const int row = divided(cell, p.by_cells_w), column = cell - row * image.cells_w();
        const int before = nth * (p.in_h * p.in_w);  // positions of the item's images before the nth
        return {item.position + before < p.positions, item.image + nth, row, column, before + row * p.in_w + column};
    } else {
        const int column = item.position + p.left + i;  // the window's number * p.step + i
        return {column < image.cells_w(), item.image, 0, column, p.left + i};
    }
}

/* For consume: turns an item's sums into outputs from channel `first_out` on, fold by fold. kept_cell(turn, i) is cell i
 * of the item, which the thread gathers in this turn. Two buffers hold the folds by turns; in the example:
 *
 *   fold 0   write buffer 0   barrier   gather from buffer 0
 *   fold 1   write buffer 1   barrier   gather from buffer 1   Now no warp gathers fold 0: buffer 0 is free.
 *   fold 2   write buffer 0   barrier   gather from buffer 0
 *   end                       barrier                          Now the next item may write buffer 0.
 *
 * An even number of folds ends with buffer 1, and needs no barrier there: that of the last fold has freed buffer 0.
 */
template <typename KEPT_CELL>
__device__ __forceinline__ void fold_item(
    const pixels_on_m_params& p, const float (&sums)[POSITION_BLOCKS][LINES / 2], int first_out, int warp,
    const image_t& image, int cells, const KEPT_CELL& kept_cell) {
    float* buffers = reinterpret_cast<float*>(shared + p.first_columns);  // [2][kFoldLines][FOLD_PITCH]
    const int thread = threadIdx.x - kProducers, group = thread / kGroupThreads, member = thread % kGroupThreads;
    const float* biases = biases_of(p, warp) + group * kGroupOuts;
    #pragma unroll 1
    for (int fold = 0; fold < kFolds; ++fold) {
        float* columns = buffers + fold % 2 * kFoldFloats;
        // Only constant indices keep sums in registers: all kFolds calls are compiled, and one runs.
        each<kFolds>([&](auto known) {
            if (known == fold) write_columns<known>(columns, sums, warp);
        });
        named_barrier_sync<1, kConsumers>();
        const int out = first_out + fold * FOLD_OUTS + group * kGroupOuts;
        if (out < p.out_channels)
            gather<FOLD_TURNS, kGroupThreads, kGroupOuts, WHOLE_OUTS>(
                image, p.output, p.out_channels,
                columns + group * (kGroupOuts * kTaps * FOLD_PITCH),  // from the group's first channel on
                biases + fold * FOLD_OUTS,                            // likewise
                out, member, cells, kept_cell);
    }
    if constexpr (kFolds % 2 == 1) named_barrier_sync<1, kConsumers>();
}

/* What consumer warp `warp` does: for each item, multiply and fold. */
__device__ __forceinline__ void consume(const pixels_on_m_params& p, int warp) {
    constexpr bool kPaired = true;  // rows g and g + 8 are neighbouring positions: see write_columns
    const image_t image{WINDOWED ? 1 : p.in_h, p.in_w};
    const int cells = WINDOWED ? p.step : p.images * (image.cells_h() * image.cells_w());  // 128 in the example
    ring_t ring;
    each_item<item_t>(p, [&](const item_t& item) {
        // `first_out` is 0, 9, 18 or 27. Of output channels 27 to 35, fold 1 has two that exist, and fold 2 none.
        const int first_out = item.line_block * kBlockOuts;
        const biases_t biases(p, first_out);  // loaded while products run
        float sums[POSITION_BLOCKS][LINES / 2];
        // A thread gathers the same cells in each fold. In the example consumer thread 70 gathers cell 6 of image 1.
        const int member = (threadIdx.x - kProducers) % kGroupThreads;
        cell_place_t kept[kKept];
        multiply<kPaired>(p, sums, ring, warp, [&](auto chunk) {  // finds cells while products of the first chunk run
            #pragma unroll
            for (int i = 0; i < kKept && chunk == 0; ++i)
                kept[i] = cell_of(p, item, part_of<kGroupThreads>(i, member) / kParts);
        });
        // If kKept is 1, `% kKept` is the constant 0, so that kept[0] stays in registers.
        const auto kept_cell = [&](int turn, int i) { return turn < kKept ? kept[turn % kKept] : cell_of(p, item, i); };
        biases.share(p, warp);
        fold_item(p, sums, first_out, warp, image, cells, kept_cell);
    });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sm90_gemm_fold_pixels_kernel(const __grid_constant__ pixels_on_m_params p) {
    // A thread of the two consumer warpgroups gets 208 registers (for 72 sums in the example, at most 128, inputs of
    // two chunks, and its cells), one of the producer warpgroup 88. All begin with 168: 2 * 208 + 88 = 3 * 168. A test
    // compiles what layers take, and fails where anything spills: `pytest tests/test_runtime.py -k without_spills`.
    run<208, 88>(p, [&](int warp) { consume(p, warp); });
}
