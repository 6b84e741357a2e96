/* fused for few output channels: columns are computed on tensor cores and folded in shared memory. No workspace.
 *
 * For the positions of a few input rows, all channels of which are staged as they lie in memory,
 *
 *   columns [(co, kh, kw), position] = weights [(co, kh, kw), ci] . input [ci, position]
 *
 * as gemm_col2im has it; outputs then gather columns (see geometry/axis.cuh for cells, phases and shifts):
 *
 *   output [co, cell, phase] = bias [co] + sum over the taps of the phase of columns [(co, tap), cell + shift of the tap]
 *
 * sm90/implicit_gemm.cu gathers inputs in its place, which leaves nothing to fold, but its M blocks have 64 rows and each phase
 * some of its own: of 3 channels at stride 2 these fill 12 rows, and one channel at stride 3 fills 9. Here the 48, or 81, lines
 * (co, kh, kw) are the N of a product whose M are 64 positions.
 *
 * A block goes over items: strips of CELLS cells across, of a segment of an image's cell rows. Step by step it takes
 * ROWS more input rows, multiplies, and stores the cell rows that have become complete; the columns of the last rows stay
 * in a ring. Of images of at most COLUMNS positions across (WHOLE) a strip is all cells, and the positions of a step are the
 * rows one right behind the other, as many as there are.
 *
 *   S=2 P=1 K=4:  shifts -1, 0, 1; with ROWS=4 a step ends with the cells above row 3, and two rows stay for the next one
 *
 * Warps have roles, since each of them waits most of the time and none for long: WARPGROUPS multiply, FOLDERS threads fold
 * what was multiplied the step before, PRODUCERS copy the inputs of the next steps: piece by piece, or one of them begins boxes
 * of a tensor map (BOXED). The steps of a role are passed on by mbarriers: full and empty for stages, made and folded for the
 * ring, which has room for the rows of two steps.
 *
 * Boxes lie as lines of 128 bytes, whose pieces of 16 are in another order (ptx/wgmma.cuh), so that words come free of bank
 * conflicts: a channel's neighbouring positions, of one row or, of WHOLE rows, going on into the next; in channels_last a
 * position's channels. For the same reason words t and t + 4 of a product are channels 2t and 2t + 1 of float32 in NCHW.
 *
 * A warp's positions go from the stage to registers, where float32 is rounded to TF32, each once; the weights stay in shared
 * memory. SPLIT: float32 in three products of TF32 (see sm90/implicit_gemm.cu), whose sums leave the tensor core, which rounds
 * towards zero, after kChain steps. Positions outside of the image count as zeros, not as products with zeros.
 *
 * A thread folds a few cell rows at a time: it waits for their columns once. Weights are asked for before any inputs: those
 * keep memory busy for 2 us. What limits it: memory, and instructions, alike in all roles; see docs/notes.
 *
 * Macros: ELEMENT_T; KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W, such that every phase has a tap; IN_CHANNELS,
 * OUT_CHANNELS; CHANNELS_LAST; SPLIT; LINES (OUT_CHANNELS of all taps, up to a multiple of 16); CHANNEL_STEPS (of 32 bytes, of
 * the channels); WARPGROUPS, FOLDERS, PRODUCERS; ROWS, COLUMNS (positions of a step; together a multiple of 64), WHOLE, CELLS (WHOLE: of COLUMNS positions); ORIGIN (the
 * first strip's first position), LEFT (columns in the ring before a row's first), COLUMN_PITCH (floats from a line of the ring
 * to the next); TOGETHER (cell rows that a thread folds at a time, a divisor of ROWS); STAGES; PITCH (elements between channels
 * in a stage, or between positions in channels_last), UNIT (elements that are copied together; divides the input's width, in
 * channels_last IN_CHANNELS); BOXED, of which both are 0, and PRODUCERS a warp, of which one thread begins boxes; VECTOR
 * (outputs that are stored together); MIN_BLOCKS (blocks that a multiprocessor must have registers for), SHARED_BYTES,
 * INDEX_64. Sizes of images are params. Chosen by gemmconv/kernels/sm90/gemm_fold_narrow.py.
 */
#define WGMMA_COLUMNS LINES
#include "ptx/cp_async.cuh"
#include "geometry/axis.cuh"
#include "numeric/divide.cuh"
#include "numeric/index.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/mma.cuh"
#include "pipeline/persistent.cuh"
#include "numeric/unroll.cuh"
#include "numeric/vector.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

struct gemm_fold_narrow_params {
#if BOXED
    tensor_map_t map;  // of the input: [images][rows][channels][columns]; WHOLE: of one row; channels_last: channels innermost
#endif
    const ELEMENT_T* __restrict__ input;
    const ELEMENT_T* __restrict__ weight;
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    int h_in, w_in, h_out, w_out;
    int cells_h, cells_w;
    int strips, segments, segment_rows, items;
    int weight_channel, weight_tap;  // elements of the weight, from an output channel or a tap to the next
    unsigned long long by_w_in, by_cells_w;  // to divide by them, where rows are WHOLE; see numeric/divide.cuh
    int turns;                               // of a warpgroup, that have the positions of a step
};

using words = mma_words<ELEMENT_T>;
static_assert(axis_h::kPhases == STRIDE_H && axis_w::kPhases == STRIDE_W, "every phase has a tap");

constexpr int kMultipliers = 128 * WARPGROUPS, kOthers = kMultipliers + FOLDERS, kThreads = kOthers + PRODUCERS;
constexpr int kItem = sizeof(ELEMENT_T), kElements = words::kElements;  // of a word
constexpr int kParts = SPLIT ? 2 : 1, kChain = 2;  // of words; steps whose sums stay in the tensor core
constexpr int kTaps = KERNEL_H * KERNEL_W, kLines = OUT_CHANNELS * kTaps, kWholeLines = LINES;
constexpr int kFirstH = axis_h::least_shift(), kHaloH = axis_h::largest_shift() - kFirstH;
constexpr int kRing = 2 * ROWS + kHaloH;  // rows of columns
constexpr int kPositions = ROWS * COLUMNS;
constexpr int kReach = LEFT + CELLS + axis_w::largest_shift() - (ORIGIN);  // columns of the ring that a strip's cells read
constexpr int kAfter = kReach > LEFT + COLUMNS ? kReach - LEFT - COLUMNS : 0;  // of them, behind those of positions
static_assert(LEFT + axis_w::least_shift() - (ORIGIN) >= 0 && kReach <= COLUMN_PITCH, "cells read within a line");
constexpr int kPadded = CHANNEL_STEPS * 8 * kElements;  // channels
static_assert(kPositions % (64 * WARPGROUPS) == 0 && COLUMNS % 8 == 0, "a warp's positions are two times 8 in a row");
static_assert(ROWS % TOGETHER == 0, "rows that are folded together end with a step");
static_assert(kLines <= kWholeLines && kWholeLines % 16 == 0, "a product has all lines");
static_assert(COLUMN_PITCH % 8 == 4, "a warp writes columns to different banks");

// Shared memory: stages of inputs [STAGES], each [kPadded][PITCH], or [kPositions][PITCH] in channels_last, or of lines of boxes
// [kBlocks][kPadded], or [kBlocks][kPositions]; barriers; weights [kParts][kPadded * kItem / 16][kWholeLines][16 bytes]; the
// ring of columns [kRing][kLines][COLUMN_PITCH], and before that the weights as they come.
constexpr int kStepBytes = 32 * kWholeLines, kWeightBytes = CHANNEL_STEPS * kStepBytes;
constexpr int kRowFloats = kLines * COLUMN_PITCH, kCame = IN_CHANNELS * kLines * kItem;
constexpr int kRingBytes = ceil_div(kRing * kRowFloats * 4 < kCame ? kCame : kRing * kRowFloats * 4, 16) * 16;
constexpr int kLine = 128 / kItem;  // elements of a line of a box
constexpr int kBlocks = CHANNELS_LAST ? ceil_div(IN_CHANNELS, kLine) : kPositions / kLine;
constexpr int kBlock = (CHANNELS_LAST ? kPositions : kPadded) * kLine;                             // elements
constexpr int kStage = BOXED ? kBlocks * kBlock : (CHANNELS_LAST ? kPositions : kPadded) * PITCH;  // elements
static_assert(!BOXED || CHANNELS_LAST || WHOLE || COLUMNS % kLine == 0, "lines do not cross rows");
static_assert(!BOXED || kBlock * kItem % 1024 == 0, "boxes begin where the order of their pieces does");
constexpr int kFirstBarrier = STAGES * kStage * kItem, kBarrierBytes = 128, kFirstWeight = kFirstBarrier + kBarrierBytes;
constexpr int kFirstRing = kFirstWeight + kParts * kWeightBytes;
static_assert(kFirstRing + kRingBytes <= SHARED_BYTES, "ring and stages do not fit the launch's shared memory");
extern __shared__ __align__(1024) unsigned char shared[];

// Columns are full where they are made, and empty where they are folded.
struct barriers_t { ring_barriers_t<STAGES> inputs; ring_barriers_t<2> columns; };
static_assert(sizeof(barriers_t) <= kBarrierBytes, "barriers fit");

/* Cell rows [cell_row, cell_row + cell_rows) of a strip of an image. */
struct item_t { int image, strip, cell_row, cell_rows; };
__device__ __forceinline__ item_t item_of(const gemm_fold_narrow_params& p, int index) {
    const int rest = index / p.strips, segment = rest % p.segments, cell_row = segment * p.segment_rows;
    return {rest / p.segments, index % p.strips, cell_row, min(p.segment_rows, p.cells_h - cell_row)};
}
__device__ __forceinline__ int first_position(const item_t& item) { return ORIGIN + item.strip * CELLS; }

/* Positions across, and where a position of a step is. */
__device__ __forceinline__ int columns_of(const gemm_fold_narrow_params& p) { return WHOLE ? p.w_in : COLUMNS; }
struct place_t { int row, column; };
__device__ __forceinline__ place_t place_of(const gemm_fold_narrow_params& p, int position) {
    if (!WHOLE) return {position / COLUMNS, position % COLUMNS};
    const int row = divided(position, p.by_w_in);
    return {row, position - row * p.w_in};
}

/* Steps of the items of a block, one after the other. */
struct course_t {
    item_t item;
    int index, step;
    int ring_row = 0;  // of the item's first row

    __device__ __forceinline__ bool ended(const gemm_fold_narrow_params& p) const { return index >= p.items; }
    __device__ __forceinline__ void begin(const gemm_fold_narrow_params& p) {
        step = 0;
        if (!ended(p)) item = item_of(p, index);
    }
    __device__ __forceinline__ void advance(const gemm_fold_narrow_params& p) {
        if (ended(p) || ++step * ROWS < item.cell_rows + kHaloH) return;
        ring_row = (ring_row + step * ROWS) % kRing;
        index += gridDim.x;
        begin(p);
    }
};

#if BOXED
/* Begin to copy the inputs of a step; zeros where the image has none. One thread. */
__device__ __forceinline__ void fetch(
    const gemm_fold_narrow_params& p, ELEMENT_T* stage, const course_t& course, barrier_t& full) {
    const item_t& item = course.item;
    const int row0 = item.cell_row + kFirstH + course.step * ROWS, column0 = first_position(item);
#if CHANNELS_LAST
    barrier_arrive_expecting(full, kBlocks * ROWS * columns_of(p) * kLine * kItem);
    for (int block = 0; block < kBlocks; ++block, stage += kBlock)
        tma_load(stage, p.map, block * kLine, column0, row0, item.image, full);
#elif WHOLE
    const int blocks = ceil_div(ROWS * p.w_in, kLine);
    barrier_arrive_expecting(full, blocks * kBlock * kItem);
    #pragma unroll 1
    for (int block = 0; block < blocks; ++block, stage += kBlock)
        tma_load(stage, p.map, row0 * p.w_in + block * kLine, 0, 0, item.image, full);
#else
    barrier_arrive_expecting(full, kStage * kItem);
    for (int column = 0; column < COLUMNS; column += kLine, stage += ROWS * kBlock)
        tma_load(stage, p.map, column0 + column, 0, row0, item.image, full);
#endif
}
#else
__device__ __forceinline__ void copy_unit(ELEMENT_T* target, const ELEMENT_T* source, bool inside) {
    if constexpr (UNIT * kItem == 16) copy_piece_async(target, source, inside);
    else cp_async<UNIT * kItem>(target, source, inside);
}

/* Begin to copy the inputs of a step; zeros where the image has none, and where the item needs none. */
__device__ __forceinline__ void fetch(const gemm_fold_narrow_params& p, ELEMENT_T* stage, const course_t& course) {
    const item_t& item = course.item;
    const int row0 = item.cell_row + kFirstH + course.step * ROWS, column0 = first_position(item);
    const int rows = min(p.h_in, item.cell_row + item.cell_rows + kFirstH + kHaloH);
    const index_t pixels = static_cast<index_t>(p.h_in) * p.w_in;
    const ELEMENT_T* __restrict__ image = p.input + item.image * static_cast<long long>(pixels) * IN_CHANNELS;
    const auto inside = [&](int row, int column) { return 0 <= row && row < rows && 0 <= column && column < p.w_in; };
    const int thread = threadIdx.x - kOthers;
#if CHANNELS_LAST
    constexpr int kPixelUnits = IN_CHANNELS / UNIT;
    #pragma unroll 4
    for (int i = thread; i < ROWS * columns_of(p) * kPixelUnits; i += PRODUCERS) {
        const int position = i / kPixelUnits, channel = i % kPixelUnits * UNIT;
        const place_t place = place_of(p, position);
        const int row = row0 + place.row, column = column0 + place.column;
        copy_unit(stage + position * PITCH + channel,
                  image + ((static_cast<index_t>(row) * p.w_in + column) * IN_CHANNELS + channel), inside(row, column));
    }
#else
    // A thread has a spot and every so many channels.
    constexpr int kSpots = kPositions / UNIT;
    constexpr int kAtOnce = kSpots < PRODUCERS ? PRODUCERS / kSpots : 1, kTurns = ceil_div(kSpots, PRODUCERS);
    #pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int spot = turn * PRODUCERS + thread % (kSpots < PRODUCERS ? kSpots : PRODUCERS);
        const int channel0 = kSpots < PRODUCERS ? thread / kSpots : 0;
        if (spot * UNIT >= ROWS * columns_of(p) || channel0 >= kAtOnce) continue;
        const auto [row, column] = place_of(p, spot * UNIT);
        const bool copied = inside(row0 + row, column0 + column);
        const ELEMENT_T* source = image + (channel0 * pixels + static_cast<index_t>(row0 + row) * p.w_in + column0 + column);
        ELEMENT_T* target = stage + (channel0 * PITCH + spot * UNIT);
        #pragma unroll 8
        for (int channel = channel0; channel < IN_CHANNELS; channel += kAtOnce) {
            copy_unit(target, source, copied);
            target += kAtOnce * PITCH;
            source += kAtOnce * pixels;
        }
    }
#endif
}
#endif

/* Which channel a word of a product is of, or the first of a pair. */
__device__ __forceinline__ int channel_of(int word) {
    const int place = word % 8;
    return (BOXED && !CHANNELS_LAST && kElements == 1 ? word - place + place % 4 * 2 + place / 4 : word) * kElements;
}

/* Begin to copy the weights; all threads but those that load. */
__device__ __forceinline__ void fetch_weights(const gemm_fold_narrow_params& p, unsigned char* came) {
    if (threadIdx.x >= kOthers) return;
    for (int i = threadIdx.x * 16; i < kCame; i += kOthers * 16)
        copy_some_async(came + i, reinterpret_cast<const unsigned char*>(p.weight) + i, least(kCame - i, 16));
}

/* Lay them out for wgmma, zeros after the last channel and line; the same threads. */
__device__ __forceinline__ void lay_weights_out(
    const gemm_fold_narrow_params& p, unsigned char* target, const unsigned char* came) {
    wait_for_copies();
    named_barrier_sync<1, kOthers>();
    const ELEMENT_T* all = reinterpret_cast<const ELEMENT_T*>(came);
    #pragma unroll 4
    for (int i = threadIdx.x; i < kPadded / kElements * kWholeLines; i += kOthers) {
        const int line = i % kWholeLines, word = i / kWholeLines;
        const int place = line / kTaps * p.weight_channel + line % kTaps * p.weight_tap;
        ELEMENT_T values[kElements];
        #pragma unroll
        for (int e = 0; e < kElements; ++e) {
            const int channel = channel_of(word) + e;
            const bool is = channel < IN_CHANNELS && line < kLines;
            values[e] = is ? all[channel * kLines + place] : element_of<ELEMENT_T>(0);
        }
        unsigned* to = reinterpret_cast<unsigned*>(target) + ((word / 4 * kWholeLines + line) * 4 + word % 4);
        unsigned of_values;
        as_words<1>(&of_values, values);
        *to = rounded<kParts, ELEMENT_T>(of_values, to[kWeightBytes / 4]);
    }
    named_barrier_sync<1, kOthers>();
}

/* Where a piece of 16 bytes of a line of a box lies. */
__device__ __forceinline__ const unsigned char* piece_of(const ELEMENT_T* stage, int block, int line, int piece) {
    return reinterpret_cast<const unsigned char*>(stage + (block * kBlock + line * kLine)) + (piece ^ line % 8) * 16;
}

/* The words of a step and of the warp's 16 positions from `position` on, as wgmma_rows has them. */
__device__ __forceinline__ void load_words(unsigned (&a)[4], const ELEMENT_T* stage, int position, int step) {
    const int lane = threadIdx.x % 32;
    [[maybe_unused]] const int first = position + lane / 8 % 2 * 8;
#if BOXED && CHANNELS_LAST
    const int piece = step * 2 + lane / 16;
    load_matrices(a, piece_of(stage, piece / 8, first + lane % 8, piece % 8));
#elif BOXED
    // Lines do not end within 16 positions.
    const int row = position / COLUMNS, column = position % COLUMNS;
    const int block = WHOLE ? position / kLine : column / kLine * ROWS + row, place = (WHOLE ? position : column) % kLine;
    if constexpr (kElements == 2) {
        const int channel = step * 16 + lane / 16 * 8 + lane % 8;
        load_matrices_turned(a, piece_of(stage, block, channel, place / 8 + lane / 8 % 2));
    } else {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int channel = step * 8 + lane % 4 * 2 + i / 2;
            const unsigned char* piece = piece_of(stage, block, channel, place / 4 + i % 2 * 2 + lane / 16);
            a[i] = reinterpret_cast<const unsigned*>(piece)[lane / 4 % 4];
        }
    }
#elif CHANNELS_LAST
    load_matrices(a, stage + ((first + lane % 8) * PITCH + (step * 8 + lane / 16 * 4) * kElements));
#else
    if constexpr (kElements == 2) {
        load_matrices_turned(a, stage + ((step * 16 + lane / 16 * 8 + lane % 8) * PITCH + first));
    } else {
        const unsigned* from = reinterpret_cast<const unsigned*>(stage) + ((step * 8 + lane % 4) * PITCH + position + lane / 4);
        #pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = from[i / 2 * 4 * PITCH + i % 2 * 8];
    }
#endif
}

/* The columns of a step's positions, into the ring; a warpgroup 64 positions at a time. */
__device__ __forceinline__ void multiply(
    const gemm_fold_narrow_params& p, const unsigned char* weights_here, float* ring, const ELEMENT_T* stage, barrier_t& empty,
    barrier_t& folded, int parity, const course_t& course) {
    const item_t& item = course.item;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row0 = item.cell_row + kFirstH + course.step * ROWS, column0 = first_position(item);
    const descriptor_t weights = descriptor_k_major(weights_here, 16 * kWholeLines, 128);
    constexpr int kTurns = kPositions / (64 * WARPGROUPS);
    const int turns = WHOLE ? p.turns : kTurns;
    #pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        [[maybe_unused]] const bool last = turn == turns - 1;
        const int first = (turn * WARPGROUPS * 4 + threadIdx.x / 32) * 16;
        float sum[kWholeLines / 2];
        // Not the first chain's own: its registers would be another chain's too, and each product waited for.
        if constexpr (SPLIT)
            #pragma unroll
            for (int i = 0; i < kWholeLines / 2; ++i) sum[i] = 0.0f;
        constexpr int kAtOnce = SPLIT ? kChain : 8;  // steps
        #pragma unroll
        for (int step0 = 0; step0 < CHANNEL_STEPS; step0 += kAtOnce) {
            unsigned a[kAtOnce][4], rest[kAtOnce][4];
            #pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                if (step0 + k >= CHANNEL_STEPS) continue;
                load_words(a[k], stage, first, step0 + k);
                if constexpr (kElements == 1)
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) a[k][i] = rounded<kParts, ELEMENT_T>(a[k][i], rest[k][i]);
            }
            wgmma_fence();
#if SPLIT
            float chain[kWholeLines / 2];
            #pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                if (step0 + k >= CHANNEL_STEPS) continue;
                const descriptor_t here = advance(weights, (step0 + k) * kStepBytes);
                wgmma_rows<ELEMENT_T, kWholeLines>(chain, a[k], advance(here, kWeightBytes), k > 0);
                wgmma_rows<ELEMENT_T, kWholeLines>(chain, rest[k], here, 1);
                wgmma_rows<ELEMENT_T, kWholeLines>(chain, a[k], here, 1);
            }
            wgmma_commit();
            wgmma_finish_rows(chain);
            #pragma unroll
            for (int i = 0; i < kWholeLines / 2; ++i) sum[i] += chain[i];
#else
            #pragma unroll
            for (int k = 0; k < kAtOnce; ++k)
                if (step0 + k < CHANNEL_STEPS)
                    wgmma_rows<ELEMENT_T, kWholeLines>(sum, a[k], advance(weights, (step0 + k) * kStepBytes), step0 + k > 0);
            wgmma_commit();
            // Behind products, which have the words: between words and products a branch makes each product wait.
            if (step0 + kAtOnce >= CHANNEL_STEPS && last) barrier_arrive(empty);
            wgmma_finish_rows(sum);
#endif
        }
        if constexpr (SPLIT && kTurns == 1) barrier_arrive(empty);
        barrier_wait(folded, parity);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Eight positions lie in one row, unless rows are WHOLE.
            const place_t place = place_of(p, first + half * 8 + (WHOLE ? g : 0));
            const int row = place.row, column = place.column + (WHOLE ? 0 : g);
            if (WHOLE && row >= ROWS) continue;
            const int h = row0 + row, w = column0 + column;
            const bool inside = 0 <= h && h < p.h_in && (WHOLE || (0 <= w && w < p.w_in));
            float* target = ring + ((course.ring_row + course.step * ROWS + row) % kRing * kRowFloats + LEFT + column);
            target += 2 * t * COLUMN_PITCH;
            #pragma unroll
            for (int i = 0; i < kWholeLines / 4; ++i) {
                const int line = i / 2 * 8 + i % 2;  // and 2t more
                if (line + 6 < kLines || line + 2 * t < kLines)
                    target[line * COLUMN_PITCH] = inside ? sum[i / 2 * 4 + half * 2 + i % 2] : 0.0f;
            }
        }
    }
    // Not in the last turn: a branch between chains has all their products waited for.
    if constexpr (SPLIT && kTurns > 1) barrier_arrive(empty);
}

/* Gather and store the cell rows that the columns of a step complete. */
__device__ __forceinline__ void fold(const gemm_fold_narrow_params& p, const float* ring, const course_t& course) {
    const item_t& item = course.item;
    constexpr int kEach = CHANNELS_LAST ? OUT_CHANNELS : 1;  // output channels of a thread
    constexpr int kRest = OUT_CHANNELS / kEach;
    constexpr int kNeighbours = STRIDE_W * kEach;
    const int end = (course.step + 1) * ROWS - kHaloH;
    const int first_row = max(0, end - ROWS), rows = min(item.cell_rows, end) - first_row;
    const index_t out_pixels = static_cast<index_t>(p.h_out) * p.w_out;
    ELEMENT_T* __restrict__ image = p.output + item.image * static_cast<long long>(out_pixels) * OUT_CHANNELS;
    const int cells = WHOLE ? p.cells_w : CELLS;
    #pragma unroll 1
    for (int i = threadIdx.x - kMultipliers; i < STRIDE_H * kRest * cells; i += FOLDERS) {
        const int line = WHOLE ? divided(i, p.by_cells_w) : i / CELLS;
        const int cell = i - line * cells, out = line % kRest, phase = line / kRest;
        const int ow = (item.strip * CELLS + cell) * STRIDE_W;
        const int oh = (item.cell_row + first_row) * STRIDE_H + axis_h::output(phase);
        if (ow >= p.w_out) continue;
        float bias[kEach];
        #pragma unroll
        for (int each = 0; each < kEach; ++each)
            bias[each] = p.bias == nullptr ? 0.0f : widen(load_once(p.bias + (out + each)));
        const float* lines = ring + ((out * KERNEL_H + phase) * KERNEL_W * COLUMN_PITCH + cell);
        int slot = (course.ring_row + first_row + axis_h::shift(phase) - kFirstH) % kRing;
        ELEMENT_T* target = image + (out * out_pixels + static_cast<index_t>(oh) * p.w_out + ow) * kEach;
        const auto next = [&](auto count) {
            // All that is read comes before what is stored, so that rows wait together.
            constexpr int kCount = count.value;
            float sum[kCount][STRIDE_W][kEach];
            #pragma unroll
            for (int row = 0; row < kCount; ++row) {
                #pragma unroll
                for (int r = 0; r < STRIDE_W; ++r)
                    #pragma unroll
                    for (int each = 0; each < kEach; ++each) sum[row][r][each] = bias[each];
                #pragma unroll (axis_h::kEven ? axis_h::taps(0) : 1)
                for (int tap = 0; tap < axis_h::taps(phase); ++tap) {
                    const int here = slot - tap * axis_h::kShiftStep;
                    const float* from = lines + ((here < 0 ? here + kRing : here) * kRowFloats +
                                                 tap * (axis_h::kStep * KERNEL_W * COLUMN_PITCH));
                    #pragma unroll
                    for (int kw = 0; kw < KERNEL_W; ++kw)
                        #pragma unroll
                        for (int each = 0; each < kEach; ++each)
                            sum[row][axis_w::output(kw % axis_w::kStep)][each] +=
                                from[(each * kTaps + kw) * COLUMN_PITCH + axis_w::shift(kw) - (ORIGIN) + LEFT];
                }
                slot = slot == kRing - 1 ? 0 : slot + 1;
            }
            #pragma unroll
            for (int row = 0; row < kCount; ++row) {
                #pragma unroll
                for (int first = 0; first < kNeighbours; first += VECTOR) {
                    if (ow + first / kEach >= p.w_out) continue;
                    store_together<VECTOR>(target + first, [&](int e) {
                        return narrow<ELEMENT_T>(sum[row][(first + e) / kEach][(first + e) % kEach]);
                    });
                }
                target += static_cast<index_t>(STRIDE_H) * p.w_out * kEach;
            }
        };
        const int complete = oh < p.h_out ? min(rows, (p.h_out - oh - 1) / STRIDE_H + 1) : 0;
        int row = 0;
        #pragma unroll 1
        for (; row + TOGETHER <= complete; row += TOGETHER) next(constant<TOGETHER>{});
        #pragma unroll 1
        for (; TOGETHER > 1 && row < complete; ++row) next(constant<1>{});
    }
}

/* Zeros where nothing is ever written, but read: before and after a row's columns, and channels that there are not, of which
 * boxes bring zeros.
 */
__device__ __forceinline__ void clear(
    const gemm_fold_narrow_params& p, float* ring, [[maybe_unused]] ELEMENT_T* stages) {
    constexpr int kZeros = LEFT + kAfter, kBeside = kZeros > 0 ? kZeros : 1;
    for (int i = threadIdx.x; i < kRing * kLines * kZeros; i += kOthers) {
        const int column = i % kBeside;
        ring[i / kBeside * COLUMN_PITCH + column + (column < LEFT ? 0 : columns_of(p))] = 0.0f;
    }
#if !BOXED
    for (int channel = IN_CHANNELS; channel < kPadded; ++channel)
        for (int i = threadIdx.x; i < STAGES * kPositions; i += kOthers) {
            const int position = i % kPositions, at = CHANNELS_LAST ? position * PITCH + channel : channel * PITCH + position;
            stages[i / kPositions * kStage + at] = element_of<ELEMENT_T>(0);
        }
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
sm90_gemm_fold_narrow_kernel(const __grid_constant__ gemm_fold_narrow_params p) {
    ELEMENT_T* stages = reinterpret_cast<ELEMENT_T*>(shared);
    barriers_t& barriers = *reinterpret_cast<barriers_t*>(shared + kFirstBarrier);
    unsigned char* weights = shared + kFirstWeight;
    float* ring = reinterpret_cast<float*>(shared + kFirstRing);
    fetch_weights(p, shared + kFirstRing);
    init_barriers([&] {
        init_ring(barriers.inputs, BOXED ? 1 : PRODUCERS, kMultipliers);
        init_ring(barriers.columns, kMultipliers, FOLDERS);
    });
    course_t course;
    course.index = blockIdx.x;
    course.begin(p);
    ring_t inputs, half;

    if (threadIdx.x >= kOthers) {
#if BOXED
        if (threadIdx.x >= kOthers + 32 || !elected()) return;
        #pragma unroll 1
        for (; !course.ended(p); course.advance(p)) {
            barrier_wait(barriers.inputs.empty[inputs.stage], inputs.parity ^ 1);
            fetch(p, stages + inputs.stage * kStage, course, barriers.inputs.full[inputs.stage]);
            inputs.advance(STAGES);
        }
#else
        // Begin a step's copies, and pass on those that were begun STAGES - 1 steps before.
        ring_t come;
        int begun = 0;
        #pragma unroll 1
        for (int turn = 0, passed = 0; turn < STAGES - 1 || passed < begun; ++turn) {
            if (!course.ended(p)) {
                barrier_wait(barriers.inputs.empty[inputs.stage], inputs.parity ^ 1);
                fetch(p, stages + inputs.stage * kStage, course);
                inputs.advance(STAGES);
                course.advance(p);
                ++begun;
            }
            cp_async_commit();
            if (turn < STAGES - 1) continue;
            cp_async_wait<STAGES - 1>();
            barrier_arrive(barriers.inputs.full[come.stage]);
            come.advance(STAGES);
            ++passed;
        }
#endif
        return;
    }
    lay_weights_out(p, weights, shared + kFirstRing);
    clear(p, ring, stages);
    fence_async_proxy();
    named_barrier_sync<1, kOthers>();

    if (threadIdx.x < kMultipliers) {
        #pragma unroll 1
        for (; !course.ended(p); course.advance(p)) {
            barrier_wait(barriers.inputs.full[inputs.stage], inputs.parity);
            multiply(p, weights, ring, stages + inputs.stage * kStage, barriers.inputs.empty[inputs.stage],
                     barriers.columns.empty[half.stage], half.parity ^ 1, course);
            barrier_arrive(barriers.columns.full[half.stage]);
            inputs.advance(STAGES);
            half.advance(2);
        }
    } else {
        #pragma unroll 1
        for (; !course.ended(p); course.advance(p)) {
            barrier_wait(barriers.columns.full[half.stage], half.parity);
            fold(p, ring, course);
            barrier_arrive(barriers.columns.empty[half.stage]);
            half.advance(2);
        }
    }
}
