/* fused for small images, and for signals: columns are computed on tensor cores and folded in shared memory. sm_90a.
 *
 *   columns [position, line] = sum over ci of input [ci, position] weight [ci, line]
 *
 * A position (one pixel of one image) is a row of the product, and a line (one tap of one output channel) a column of
 * it. A thread block takes item after item: positions of some images, or of a window of one row with those neighbours
 * that its cells read (WINDOWED), times some line blocks of LINES lines. No gaps between images or rows are multiplied.
 *
 * Producer warps fill two rings of buffers in shared memory: slots with inputs, stages with weights
 * (pipeline/pixels_on_m.cuh). A consumer warp multiplies, for each line block of each item. Then for each fold, the
 * columns of FOLD_OUTS output channels, it writes columns to shared memory, waits for the other warps, and gathers
 * outputs (epilogue/fold_smem.cuh).
 *
 *   64 images of 8 x 8, 64 to 32 channels, kernel 4, stride 2, padding 1, in TF32 (the example of the host file):
 *   item        two images: 128 positions (POSITION_BLOCKS = 1), 16 for each of eight warps
 *   line block  LINES = 144: the 16 taps of 9 output channels. A lane has 72 sums, of two positions and 36 lines
 *   multiply    two chunks of 32 channels (CHUNK_CLASS = 2), each four products of 8 channels x 144 lines
 *   fold        FOLD_OUTS = 3: 48 lines x FOLD_PITCH = 132 floats, 25 KB. Three folds (kFolds), in two buffers by turns
 *   gather      128 cells, each 2 x 2 outputs of three channels. Of 256 consumer threads the first 128 have one each;
 *               the others have none, and go on to the next fold (FOLD_GROUPS = FOLD_TURNS = 1)
 *
 * Macros: those of pipeline/pixels_on_m.cuh and epilogue/fold_smem.cuh, OWN_BYTES being for columns; FOLD_OUTS (a
 * divisor of a line block's output channels, their lines a multiple of 8); WHOLE_OUTS (1 if it divides all output
 * channels); FOLD_GROUPS (groups of threads, each of which gathers other output channels of a fold); FOLD_TURNS (cells
 * of a thread, or parts of them, at most). Chosen by gemmconv/kernels/sm90/gemm_fold_pixels.py.
 */
// multiply: the main loop; each_item: a loop over the thread block's items; each: a loop whose indices are constants;
// ring_t: a place in a ring; divided: by a reciprocal; run: starts all warps; kBlockOuts: output channels of a line block
#include "pipeline/pixels_on_m.cuh"
// gather: adds columns up, stores outputs; cell_t: where a cell lies; kParts: parts of a row of a cell, one for a thread
#include "epilogue/fold_smem.cuh"
#include "ptx/named_barrier.cuh"

constexpr int kFoldLines = FOLD_OUTS * kTaps, kFolds = LINES / kFoldLines, kFoldFloats = kFoldLines * FOLD_PITCH;
// Chunks before the loop of multiply. Its iterations take two chunks if POSITION_BLOCKS is 1: an odd number leaves one.
constexpr int kPeeled = POSITION_BLOCKS == 1 ? CHUNK_CLASS % 2 : 0;
static_assert(kFoldLines % 8 == 0 && LINES % kFoldLines == 0, "a warp has columns of each fold, in eights");
static_assert(FOLD_PITCH % 8 == 4 && kPositions <= FOLD_PITCH, "a warp writes columns to different banks");
static_assert(2 * kFoldFloats * 4 <= OWN_BYTES, "columns of two folds fit");

constexpr int kLanes = kConsumers / FOLD_GROUPS, kGroupOuts = FOLD_OUTS / FOLD_GROUPS;  // threads and channels of a group
static_assert(kConsumers % FOLD_GROUPS == 0 && FOLD_OUTS % FOLD_GROUPS == 0, "groups have as many threads and channels each");
static_assert(FOLD_GROUPS == 1 || kPositions * kParts <= kLanes, "a group has a thread for each position, or part of its cell");
constexpr int kOwnCells = FOLD_TURNS <= 2 ? FOLD_TURNS : 1;  // cells that a thread keeps in registers for all folds

/* Writes a warp's columns of one fold. wgmma gives lane 4g + t, of 16 positions and 8 lines, the sums
 *
 *   from[0], from[1]: row g, lines 2t and 2t + 1        from[2], from[3]: row g + 8, the same lines
 *
 * and rows g and g + 8 are positions 2g and 2g + 1 (PAIRED in pixels_on_m.cuh): a lane writes two neighbours at once.
 *
 *   fold 1 of the example has sums 24 to 47 of a lane, of 6 x 8 lines. Lane 5 (g = 1, t = 1) of warp 2 writes positions
 *   34 and 35 of lines 2, 3, 10, 11, ...
 */
template <int FOLD>
__device__ __forceinline__ void write_columns(float* columns, const float (&sums)[POSITION_BLOCKS][LINES / 2], int warp) {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int row = 0; row < POSITION_BLOCKS; ++row) {
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

/* The i-th cell of an item: whether it exists, its image, row and column, and its place in a line of columns. A cell beside
 * the image may have a place of the next row. gather adds the shifts of a tap, and reads only what is inside then.
 */
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

/* What consumer warp `warp` does; numbers are those of the example. Two buffers hold its three folds by turns:
 *
 *   fold 0   write buffer 0   barrier   gather from buffer 0
 *   fold 1   write buffer 1   barrier   gather from buffer 1   Behind it no warp gathers fold 0: buffer 0 is free.
 *   fold 2   write buffer 0   barrier   gather from buffer 0
 *   end                       barrier                          Behind it fold 0 of the next line block may be written.
 *
 * An even number of folds ends with buffer 1, and needs no barrier there: that of the last fold has freed buffer 0.
 */
__device__ __forceinline__ void consume(const pixels_on_m_params& p, int warp) {
    constexpr bool kPaired = true;  // rows g and g + 8 are neighbouring positions: see write_columns
    const auto nothing_meanwhile = [](auto) {};  // outputs do not wait to be stored while products run
    float* buffers = reinterpret_cast<float*>(shared + p.first_own);  // [2][kFoldLines][FOLD_PITCH]
    const image_t image{WINDOWED ? 1 : p.in_h, p.in_w};
    const int cells = WINDOWED ? p.step : p.images * (image.cells_h() * image.cells_w());  // 128
    const int thread = threadIdx.x - kProducers, group = thread / kLanes;
    const float* biases = biases_of(p, warp) + group * kGroupOuts;
    ring_t stages, slots;
    each_item<item_t>(p, [&](const item_t& item) {
        const int lane = thread % kLanes;  // number in the group, which has 256 threads in the example
        // A thread gathers the same cells in each fold. Consumer thread 70 of the example has cell 6 of the second image.
        cell_t own[kOwnCells];
        #pragma unroll
        for (int turn = 0; turn < kOwnCells; ++turn) own[turn] = cell_of(p, item, (turn * kLanes + lane) / kParts);
        #pragma unroll 1
        for (int block = 0; block < item.line_blocks; ++block) {
            // Output channels 0, 9, 18 or 27 on. Of the last nine, fold 1 has two that exist, and fold 2 none.
            const int first = (item.line_block + block) * kBlockOuts;
            const biases_t block_biases(p, first);  // loaded while products run
            // Multiply. If inputs are held, every line block reads the same slots, from `slots` on; the last one frees
            // them, and `slots` moves on to those of the next item. Otherwise each line block has slots of its own.
            float sums[POSITION_BLOCKS][LINES / 2];  // 72
            ring_t here = slots;
            const bool frees = !p.held || block + 1 == item.line_blocks;
            multiply<kPaired, kPeeled>(p, sums, stages, here, warp, frees, nothing_meanwhile);
            if (frees) slots = here;
            block_biases.share(p, warp);
            #pragma unroll 1
            for (int fold = 0; fold < kFolds; ++fold) {
                float* columns = buffers + fold % 2 * kFoldFloats;
                // Write. Only constant indices keep sums in registers: all kFolds calls are compiled, and one runs.
                each<kFolds>([&](auto known) {
                    if (known == fold) write_columns<known>(columns, sums, warp);
                });
                named_barrier_sync<1, kConsumers>();
                const int out = first + fold * FOLD_OUTS + group * kGroupOuts;
                // Gather. If kOwnCells is 1, `% kOwnCells` is the constant 0, so that own[0] stays in registers.
                if (out < p.out_channels)
                    gather<FOLD_TURNS, kLanes, kGroupOuts, WHOLE_OUTS>(
                        image, p.output, p.out_channels, columns + group * (kGroupOuts * kTaps * FOLD_PITCH),
                        biases + fold * FOLD_OUTS, out, lane, cells,
                        [&](int turn, int i) { return turn < kOwnCells ? own[turn % kOwnCells] : cell_of(p, item, i); });
            }
            if constexpr (kFolds % 2 == 1) named_barrier_sync<1, kConsumers>();
        }
    });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sm90_gemm_fold_pixels_kernel(const __grid_constant__ pixels_on_m_params p) {
    // Sets up the rings, starts the producers, and calls consume. Consumer threads have 208 registers, producers 88.
    run<208, 88>(p, [&](int warp) { consume(p, warp); });
}
