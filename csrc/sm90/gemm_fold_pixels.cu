/* fused for small images, and for signals: columns are computed on tensor cores and folded in shared memory. sm_90a.
 *
 * For each position (a pixel of an image) and each line (a tap of an output channel) it computes the column element
 *
 *   columns[line][position] = sum over input channels ci of input[ci][position] * weight[ci][line]
 *
 * and for each output the bias plus the sum of the column elements that belong to it. The words are explained, with the
 * example below, in the host file, gemmconv/kernels/sm90/gemm_fold_pixels.py.
 *
 * A warp is 32 threads (lanes), a warpgroup four warps. wgmma is the tensor cores' product of a whole warpgroup: it
 * runs on its own while threads go on, reads operands from registers and shared memory, and leaves each lane some of
 * the sums. A barrier in shared memory lets some threads wait for others; __syncthreads would stop all of them.
 *
 * A block has 384 threads, a warpgroup that copies and two that multiply and gather:
 *
 *   for each item (positions times some line blocks), for each of its line blocks:         threads  function
 *     copy       weights to stages (one thread), inputs to slots (threads 32-127)          0-127    run
 *     multiply   a line block by the item's positions; sums stay in registers              128-383  multiply
 *     for each fold (the lines of FOLD_OUTS output channels) of the line block:
 *       write    its columns from registers to shared memory                               128-383  write_columns
 *       gather   each thread adds up the column elements of its outputs, and stores them   128-383  gather
 *
 *   barrier                  separates
 *   full of slot or stage    copy from multiply: its data have come
 *   empty of slot or stage   multiply from the copy that fills it anew. Copies so run ahead, even to later items
 *   named barrier 1          write from gather, and gather from a later write to the same columns: see fold_line_block
 *
 *   64 images of 8 x 8, 64 to 32 channels, kernel 4, stride 2, padding 1, in TF32:
 *   item        two images: 128 positions (POSITION_BLOCKS = 1), 16 for each of eight warps
 *   line block  LINES = 144: the 16 taps of 9 output channels. A lane has 72 sums, of two positions and 36 lines
 *   multiply    two chunks of 32 channels, each in four products of 8
 *   fold        FOLD_OUTS = 3: 48 lines x FOLD_PITCH = 132 floats, 25 KB. Three folds (kFolds), in two buffers by turns
 *   gather      128 cells, each 2 x 2 outputs of 3 channels, by 128 of 256 threads (FOLD_GROUPS = FOLD_TURNS = 1)
 *   shared      0 5 slots of 16384; 81920 (first_stage) 5 stages of 18432; 174080 (first_columns) two folds of 25344;
 *   (bytes)     224768 biases, 9 for each warp; 225056 (first_barrier) full and empty of 5 + 5 buffers; 225216 end
 *
 * Macros of its own: FOLD_OUTS; WHOLE_OUTS (1 if it divides out_channels); FOLD_GROUPS (of threads, each with channels
 * of its own); FOLD_TURNS (cells of a thread, or parts of cells, at most). The two headers list the others.
 *
 * To read it: the host file, this file, then the headers. What is used of these, and what it promises:
 *   pipeline/pixels_on_m.cuh
 *    run            makes the barriers, lets producer warps copy all items, and calls consume() in each consumer warp
 *    each_item      calls a function for every item of this block. item_t: the item's first image, position, line block
 *    ring_t         the buffer (slot or stage) that is next in its ring. multiply moves it on by one for each chunk
 *    multiply       for each chunk: waits until a slot and a stage are full, multiplies, and says that the stage, and
 *                   if `frees` the slot, is empty. When it returns the sums are complete: nothing is left to wait for
 *    biases_t       the biases of a line block: its constructor loads them, share() gives them to the warp at biases_of
 *    shared         the block's shared memory. kConsumers: threads that multiply. kTaps: taps of the kernel
 *    kBlockOuts     output channels of a line block. kPositions: positions of an item, 128 for each position block
 *   epilogue/fold_smem.cuh
 *    gather         adds up the columns of OUTS channels, for each cell of this thread, and stores the outputs. What
 *                   does not exist is skipped: cells, inputs beside the image, channels. Columns must be written before
 *    part_of        a thread's part in a turn: part / kParts is the cell, part % kParts its place in the row
 *    image_t        extents of an image in pixels and cells. cell_place_t: where a cell is
 *   numeric          divided: a division by a reciprocal. each: a loop whose index is known to the compiler
 *
 * To change         edit
 *   bytes, sizes      the host file: FOLD_OUTS is fold_outs, LINES lines; static_asserts and the tests find errors
 *   a thread's cells  part_of in epilogue/fold_smem.cuh, which this file and gather call
 *   a lane's sums     (fixed: wgmma says which it has, and multiply's PAIRED which positions they are of)
 *   the writes        write_columns: their order and the pitch of columns, as long as every element is written once
 *   when they happen  fold_line_block: a buffer is written again only after a barrier behind its last gather
 *
 * To try a change without a GPU, `python -m pytest tests/test_kernels.py -k fold_pixels` runs this file on a CPU. It
 * finds barriers that are waited for in vain, shared memory that is read before it was written, and wrong sums.
 */
#include "pipeline/pixels_on_m.cuh"
#include "epilogue/fold_smem.cuh"
#include "ptx/named_barrier.cuh"

// Lines of a fold; folds of a line block; floats of a fold's columns. In the example 48, 3 and 48 * 132.
constexpr int kFoldLines = FOLD_OUTS * kTaps, kFolds = LINES / kFoldLines, kFoldFloats = kFoldLines * FOLD_PITCH;
// Chunks that multiply takes before its loop: its comment in pixels_on_m.cuh has a table of them, and says why.
constexpr int kPeeled = POSITION_BLOCKS == 1 ? CHUNK_CLASS % 2 : 0;
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

/* For fold_line_block: writes a warp's sums of fold FOLD to columns `to`. wgmma gives a warp the sums of 16 rows: of
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

/* For consume: turns a line block's sums into outputs from channel `first_out` on, fold by fold. kept_cell(turn, i)
 * is cell i of the item, which the thread gathers in this turn. Two buffers hold the folds by turns; in the example:
 *
 *   fold 0   write buffer 0   barrier   gather from buffer 0
 *   fold 1   write buffer 1   barrier   gather from buffer 1   Now no warp gathers fold 0: buffer 0 is free.
 *   fold 2   write buffer 0   barrier   gather from buffer 0
 *   end                       barrier                          Now the next line block may write buffer 0.
 *
 * An even number of folds ends with buffer 1, and needs no barrier there: that of the last fold has freed buffer 0.
 */
template <typename KEPT_CELL>
__device__ __forceinline__ void fold_line_block(
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

/* What consumer warp `warp` does: for each item and each of its line blocks, multiply and fold. */
__device__ __forceinline__ void consume(const pixels_on_m_params& p, int warp) {
    constexpr bool kPaired = true;  // rows g and g + 8 are neighbouring positions: see write_columns
    const auto nothing_meanwhile = [](auto) {};  // multiply calls it; gemm_depth_to_space stores outputs there
    const image_t image{WINDOWED ? 1 : p.in_h, p.in_w};
    const int cells = WINDOWED ? p.step : p.images * (image.cells_h() * image.cells_w());  // 128 in the example
    ring_t stages, slots;
    each_item<item_t>(p, [&](const item_t& item) {
        // A thread gathers the same cells in each fold. In the example consumer thread 70 gathers cell 6 of image 1.
        const int member = (threadIdx.x - kProducers) % kGroupThreads;
        cell_place_t kept[kKept];
        #pragma unroll
        for (int i = 0; i < kKept; ++i) kept[i] = cell_of(p, item, part_of<kGroupThreads>(i, member) / kParts);
        // If kKept is 1, `% kKept` is the constant 0, so that kept[0] stays in registers.
        const auto kept_cell = [&](int turn, int i) { return turn < kKept ? kept[turn % kKept] : cell_of(p, item, i); };
        #pragma unroll 1
        for (int line_block = 0; line_block < item.line_blocks; ++line_block) {
            // `first_out` is 0, 9, 18 or 27. Of output channels 27 to 35, fold 1 has two that exist, and fold 2 none.
            const int first_out = (item.line_block + line_block) * kBlockOuts;
            const biases_t block_biases(p, first_out);  // loaded while products run
            // If inputs are held, every line block reads the same slots, from `slots` on; the last one frees them, and
            // `slots` moves on to those of the next item. Otherwise each line block has slots of its own.
            float sums[POSITION_BLOCKS][LINES / 2];  // 72
            ring_t block_slots = slots;
            const bool frees = !p.held || line_block + 1 == item.line_blocks;
            multiply<kPaired, kPeeled>(p, sums, stages, block_slots, warp, frees, nothing_meanwhile);
            if (frees) slots = block_slots;
            block_biases.share(p, warp);
            fold_line_block(p, sums, first_out, warp, image, cells, kept_cell);
        }
    });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sm90_gemm_fold_pixels_kernel(const __grid_constant__ pixels_on_m_params p) {
    // A thread of the two consumer warpgroups gets 208 registers (for 72 sums in the example, at most 128, inputs of
    // two chunks, and its cells), one of the producer warpgroup 88. All begin with 168: 2 * 208 + 88 = 3 * 168. A test
    // compiles what layers take, and fails where anything spills: `pytest tests/test_runtime.py -k without_spills`.
    run<208, 88>(p, [&](int warp) { consume(p, warp); });
}
