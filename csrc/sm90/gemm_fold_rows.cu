/* fused for wide rows in NCHW, of 16 bits and of TF32: rows of inputs are multiplied, and columns fold in registers.
 *
 * A cell is an input and the SPAN_H x SPAN_W outputs that it stands for (see geometry/axis.cuh). Of one row phase, each tap kw across
 * gives
 *
 *   columns [co, kw, i] = sum over (kh, ci) of weights [co, kw, (kh, ci)] . input [(kh, ci), i]
 *
 * where kh stands for the taps down that reach the phase. Each of them reads another row of the input, all at the same place
 * i: rows of the input as they lie, boxes of a tensor map. What is left of col2im is along a row, where the columns of a tap meet
 * outputs at a constant distance:
 *
 *   output [co, (cell, phase)] = bias [co] + sum over the taps kw of the phase of columns [co, kw, cell + shift of kw]
 *
 * A block goes along rows, some inputs a step. Cells come DELAYED inputs later than columns, so that all they need has come: tap
 * kw is DELAY [kw] = DELAYED - shift late, and the last columns of a step are carried to the next one. With K=3 S=1 P=1 and
 * DELAYED=2, taps 0, 1 and 2 have shifts 1, 0 and -1 and are 1, 2 and 3 late: cell i - 2 gets their columns i - 1, i - 2 and
 * i - 3. No column is computed twice.
 *
 *                16 bits (PIXELS_ON_M 0)                             TF32 (PIXELS_ON_M 1)
 *   left         64 rows, which are SLOTS taps x 64 / SLOTS output   16 inputs of a row, of each of four warps, from
 *                channels; TILES of them have all taps across        registers
 *   right        128 inputs of a row, which no thread touches        LINES: OUTS output channels of each tap across
 *   K            rows of the input, CHANNELS input channels each     WEIGHT_ROWS taps down, each CHANNELS input channels,
 *                                                                    CHUNK of which are a stage
 *   columns      a warp has whole rows of sums, lane t of four       a thread has inputs 2g and 2g + 1
 *                8j + 2t and 8j + 2t + 1
 *   to be late   a shuffle among four lanes, whose first ones get    a shuffle among the eight lanes g, the first of which
 *                what the last had of the block of eight before      get what the last had of the step before
 *
 * 16 bits: two taps of a channel are rows g and g + 8 of a warp, a thread's own. TF32: the right side of its products lies by
 * channels, which rows of NCHW do not, and threads that lay them out so are what sm90/implicit_gemm.cu spends most on; the left
 * side may come from registers, so there it is inputs. A thread reads inputs 2g and 2g + 1 of a channel together, and of four
 * lanes t each another channel. Lines of a box have 64 bytes, whose pieces of 16 lie in another order in every other pair of them;
 * with channels 0, 1, 4 and 5 for the words t of a step, and 2, 3, 6 and 7 for the words t + 4, each half of a warp reads from
 * all banks. Weights lie in that order too.
 *
 * An infinite weight may make NaN of an output that its tap gives nothing, beyond the image; in TF32 an infinite input of what it
 * makes infinite, where a row phase has fewer taps down than another: the products that it lacks have weights of zero.
 *
 * Two warpgroups multiply by turns: one folds and stores while the other multiplies. In 16 bits each has a row of cells of its
 * own, in TF32 each warp. There words of the first products are loaded before a turn, those of the others while products run: of
 * TAPS_TOGETHER taps down at a time, since whenever products are waited for some time goes by. One thread begins all copies, of
 * all input rows of a step together, since small boxes take as long as large ones. Weights of a set (a group, a row phase, output
 * channels) stay in shared memory; a block takes items of one set alone.
 *
 * What limits 16 bits is shared memory: products of 64 x 128 read it three quarters of their time, beside shuffles and lines of
 * outputs. A warp that folds is alone on its scheduler, so its instructions count: what comes from one lane is added up before it
 * is shuffled, and pieces of lines are loaded together before they are stored. TF32: memory, where there is much of it. A product
 * of 64 x 8 x 192 keeps tensor cores busy for 96 cycles, and reads weights for 48 and words for 16; beside that come boxes,
 * shuffles and lines. docs/notes/gemm_fold_rows.md has what was measured.
 *
 * Memory is written in sectors of 32 bytes, and a part of one costs as much as to read and to write all of it. Rows of outputs
 * begin anywhere in a sector. So in TF32, where WHOLE_SECTORS are stored, a line lies in shared memory as far behind a sector's
 * beginning as in memory, behind what was left over of the line before; what is left over of it waits for the next line.
 *
 * Macros: ELEMENT_T, PIXELS_ON_M; CHANNELS (of a group, up to whole products, or whole CHUNKs), IN_CHANNELS, OUT_CHANNELS (of a
 * group); CHANNEL_SETS, PHASES (rows of a cell: SPAN_H), SPAN_W; DELAYED, and tables DELAY and PHASE of each tap across (the
 * phase is -1 for a place that has none); WEIGHT_ROWS (taps down, of the phase that has most); INPUT_ROWS (of an item), FIRST_ROW
 * (of each phase: from an item's first cell to its first input row); STAGES; VECTOR (outputs that begin at their multiples in
 * memory; in 16 bits they are stored together); SHARED_BYTES.
 * 16 bits: TILES, SLOTS; ROW_TAP (of each phase and input row, for either warpgroup: which of the phase's taps it is, or
 * -1); LINE_CELLS (of a line that is stored together), LINE_PITCH (outputs).
 * TF32: WHOLE_SECTORS; CHUNK (a multiple of 8); OUTS (a multiple of 8), LINES (up to a multiple of 16); TAPS_TOGETHER (which
 * WEIGHT_ROWS is a multiple of); ROW_PLACE (of each phase, WEIGHT_ROWS: from a cell's first input row to that of a tap).
 * Chosen by gemmconv/kernels/sm90/gemm_fold_rows.py.
 */
#if PIXELS_ON_M
#define WGMMA_COLUMNS LINES
#else
#define WGMMA_COLUMNS 128  // inputs of a row, of a step
#endif
#include "numeric/divide.cuh"
#include "numeric/integers.cuh"
#include "numeric/units.cuh"
#include "numeric/unroll.cuh"
#include "numeric/vector.cuh"
#include "pipeline/persistent.cuh"
#include "ptx/keep.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/store.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

struct gemm_fold_rows_params {
    tensor_map_t map;  // of the input: [images][rows][channels][columns]
    const unit_t* __restrict__ packed;
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    unsigned long long by_image_items;  // see numeric/divide.cuh
    int groups, columns, h_out, w_out, cells_h;  // columns: inputs of a row that are multiplied
    int image_items, items;  // of an image; of all
    int steps;               // of a row, those behind its end among them
};

constexpr int kProducers = 128, kThreads = kProducers + 256;
constexpr int kSets = CHANNEL_SETS * PHASES;  // of a group
constexpr int kRows = PIXELS_ON_M ? 8 : 2;     // of cells, of an item

__constant__ constexpr int kDelay[] = DELAY;
__constant__ constexpr int kPhase[] = PHASE;
__constant__ constexpr int kFirstRow[] = FIRST_ROW;
constexpr int kTapsAcross = sizeof(kDelay) / sizeof(int);  // places for them

// Barriers of warps: the turn of either warpgroup; of all that multiply.
constexpr int kTurnOf0 = 1, kTurnOf1 = 2;
[[maybe_unused]] constexpr int kBiasMeet = 3;

struct barriers_t : ring_barriers_t<STAGES> { barrier_t weights; };

/* The row phase, output channels and group of a block, which all of its items share. */
struct set_t { int number, phase, channels, group; };
__device__ __forceinline__ set_t set_of(const gemm_fold_rows_params& p) {
    const int number = blockIdx.x % (kSets * p.groups);
    return {number, number % kSets / CHANNEL_SETS, number % CHANNEL_SETS, number / kSets};
}

/* An item: an image, and its first row of cells there. */
struct item_t {
    int image, row;
    __device__ __forceinline__ item_t(const gemm_fold_rows_params& p, int i)
        : image(divided(i, p.by_image_items)), row((i - image * p.image_items) * kRows) {}
};

#if PIXELS_ON_M
constexpr int kColumns = 16, kStepsTogether = 2, kLineBytes = kColumns * 4;
constexpr int kBoxColumns = kColumns, kBoxes = 1;
constexpr int kChunk = CHUNK, kChunks = CHANNELS / CHUNK, kSteps = CHUNK / 8, kGroups = kChunks * WEIGHT_ROWS / TAPS_TOGETHER;
constexpr int kProducts = TAPS_TOGETHER * kSteps;
constexpr int kRowBytes = CHUNK * kLineBytes, kBoxBytes = INPUT_ROWS * kRowBytes, kStageBytes = kBoxBytes;
constexpr int kStepBytes = 2 * LINES * 16, kTapBytes = CHANNELS / 8 * kStepBytes, kWeightBytes = WEIGHT_ROWS * kTapBytes;
constexpr int kLanes = 8, kOwnOuts = OUTS / 4;  // that columns go round; output channels of a lane
static_assert(CHANNELS % CHUNK == 0 && CHUNK % 8 == 0 && OUTS % 8 == 0, "products are whole");
static_assert(kTapsAcross * OUTS <= LINES && LINES % 16 == 0 && LINES <= 256, "a product has all taps");
static_assert(WEIGHT_ROWS % TAPS_TOGETHER == 0, "groups of products are alike");
static_assert(STAGES > kChunks, "a warpgroup's turn ends only if all stages of a step may come before the other's");

__constant__ constexpr int kRowPlace[] = ROW_PLACE;

constexpr int kSector = 8;  // outputs

// Shared memory: stages [STAGES][INPUT_ROWS][CHUNK][16 inputs] swizzled, weights [WEIGHT_ROWS][CHANNELS / 4][LINES] of 16
// bytes, outputs [8 warps][8 channels][kLinePitch], outputs that are kept [8 warps][OUTS][kSector], the bias, barriers. With that
// pitch lanes write to different banks, but where lines begin differently.
constexpr int kLine = 2 * kColumns * SPAN_W, kLinePitch = kLine + (WHOLE_SECTORS ? kSector : 0) + 4;  // outputs of two steps
constexpr int kFirstWeight = STAGES * kStageBytes, kFirstOutput = kFirstWeight + kWeightBytes;
constexpr int kFirstKept = kFirstOutput + 8 * 8 * kLinePitch * 4;
constexpr int kFirstBias = kFirstKept + (WHOLE_SECTORS ? 8 * OUTS * kSector * 4 : 0);
constexpr int kFirstBarrier = kFirstBias + OUTS * 4;
static_assert(kStageBytes % 512 == 0, "a stage begins where the order of pieces does");
#else
constexpr int kUnits = CHANNELS / 8, kSteps = CHANNELS / 16;
constexpr int kColumns = WGMMA_COLUMNS, kStepsTogether = 1, kChunk = CHANNELS, kChunks = 1;
constexpr int kBoxColumns = 64, kBoxes = kColumns / kBoxColumns, kRowBytes = CHANNELS * 128;
constexpr int kBoxBytes = INPUT_ROWS * kRowBytes, kStageBytes = kBoxes * kBoxBytes;
constexpr int kTileBytes = kUnits * 64 * 16, kTapBytes = TILES * kTileBytes, kWeightBytes = WEIGHT_ROWS * kTapBytes;
constexpr int kOuts = 64 / SLOTS, kWarpOuts = kOuts / 4;  // output channels of a block, and of a warp
constexpr int kLanes = 4, kOwnOuts = 2 / SLOTS;  // that columns go round; output channels of a lane
constexpr int kWarpOutputs = kWarpOuts * LINE_PITCH;
static_assert(CHANNELS % 16 == 0, "products are whole");
static_assert(kColumns % LINE_CELLS == 0 && LINE_CELLS % 8 == 0, "lines are whole, and of whole blocks of eight");

__constant__ constexpr int kRowTap[] = ROW_TAP;

// Shared memory: stages [STAGES][kBoxes][INPUT_ROWS][CHANNELS][64 columns] swizzled, weights
// [WEIGHT_ROWS][TILES][kUnits][64 rows] of 16 bytes, outputs [8 warps][kWarpOuts][LINE_PITCH], barriers.
constexpr int kFirstWeight = STAGES * kStageBytes, kFirstOutput = kFirstWeight + kWeightBytes;
constexpr int kFirstBarrier = kFirstOutput + 8 * kWarpOutputs * static_cast<int>(sizeof(ELEMENT_T));
#endif
static_assert(kFirstBarrier % 8 == 0 && kFirstBarrier + sizeof(barriers_t) <= SHARED_BYTES, "what is shared fits");
extern __shared__ __align__(1024) unsigned char shared[];

/* Copies the inputs of step after step, chunk after chunk of channels: zeros for rows and columns that there are not. */
__device__ __forceinline__ void produce_inputs(const gemm_fold_rows_params& p, const set_t& set, barriers_t& barriers) {
    constexpr int kWhole = kStepsTogether * kColumns;
    const int columns = kStepsTogether == 1 ? p.columns : ceil_div(p.columns, kWhole) * kWhole;
    ring_t ring;
    each_item<item_t>(p, kSets * p.groups, [&](const item_t& item) {
        #pragma unroll 1
        for (int column = 0; column < columns; column += kColumns)
            #pragma unroll 1
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                barrier_t& full = begin_stage(barriers, ring, kStageBytes);
                #pragma unroll
                for (int box = 0; box < kBoxes; ++box)
                    tma_load(shared + ring.stage * kStageBytes + box * kBoxBytes, p.map, column + box * kBoxColumns,
                             set.group * IN_CHANNELS + chunk * kChunk, item.row + kFirstRow[set.phase], item.image, full);
                ring.advance(STAGES);
            }
    });
}

/* Copies the weights of a set, once, a tap down at a time. */
__device__ __forceinline__ void produce_weights(const gemm_fold_rows_params& p, const set_t& set, barrier_t& full) {
    grid_dependency_wait();  // which lays them out
    barrier_arrive_expecting(full, kWeightBytes);
    const unit_t* source = p.packed + static_cast<long long>(set.number) * (kWeightBytes / 16);
    #pragma unroll 1
    for (int i = 0; i < kWeightBytes; i += kTapBytes)
        bulk_copy(shared + kFirstWeight + i, source + i / 16, kTapBytes, full);
}

// What is late by DELAY columns comes from one of the two columns of a lane, of a lane so many before: from kLanes on, from the
// columns before.
constexpr int kMostLanes = 4;
__device__ constexpr int column_of(int delay, int e) { return (e + delay) % 2; }
__device__ constexpr int lanes_of(int delay, int e) { return (delay + column_of(delay, e) - e) / 2; }

/* Whether a tap gives the outputs of a phase at a lane's cell E something, from so many lanes before. */
__device__ constexpr bool gives(int tap, int phase, int e, int lanes) {
    return kPhase[tap] == phase && lanes_of(kDelay[tap], e) == lanes;
}
/* The first tap that does, or kTapsAcross. */
__device__ constexpr int first_to_give(int phase, int e, int lanes) {
    int tap = 0;
    while (tap < kTapsAcross && !gives(tap, phase, e, lanes)) ++tap;
    return tap;
}

/* Contributions of an output channel's taps to other lanes from the previous columns: [phase][cell][distance]. */
using before_t = float[SPAN_W][2][kMostLanes];

/* The output of a phase at a lane's cell E, of an output channel whose columns column(tap, 0 or 1) are. What comes from the same
 * lane is added up there first.
 */
template <int PHASE_, int E, typename COLUMN>
__device__ __forceinline__ float folded(const COLUMN& column, before_t& before, float bias, int lane) {
    float output = bias;
    each<kMostLanes + 1>([&](auto lanes_) {
        constexpr int lanes = lanes_, first = first_to_give(PHASE_, E, lanes);
        if constexpr (first < kTapsAcross) {
            float given = 0.0f;
            each<kTapsAcross>([&](auto tap_) {
                constexpr int tap = tap_;
                if constexpr (gives(tap, PHASE_, E, lanes)) {
                    const float own = column(tap_, constant<column_of(kDelay[tap], E)>());
                    given = tap == first ? own : given + own;
                }
            });
            if constexpr (lanes == 0) {
                output += given;
            } else {
                float& last = before[PHASE_][E][lanes - 1];
                if constexpr (lanes == kLanes) {
                    output += last;
                } else {
                    const float value = (PIXELS_ON_M ? lane / 4 + lanes < 8 : lane % 4 + lanes < 4) ? given : last;
                    const int from = PIXELS_ON_M ? lane - 4 * lanes & 31 : (lane & ~3) | (lane - lanes & 3);
                    output += __shfl_sync(0xffffffffu, value, from);
                }
                last = given;
            }
        }
    });
    return output;
}

#if PIXELS_ON_M
using sums_t = float[LINES / 2];
using words_of_group_t = unsigned[kProducts][4];

/* The column E of a tap, of a lane's two. */
template <int OUT, int TAP, int E> __device__ __forceinline__ float column(const sums_t& sums) {
    return sums[4 * (TAP * (OUTS / 8) + OUT / 2) + 2 * E + OUT % 2];
}

__device__ __forceinline__ void settle_words(words_of_group_t& words) {
    #pragma unroll
    for (int k = 0; k < kProducts; ++k)
        #pragma unroll
        for (int i = 0; i < 4; ++i) settle(words[k][i]);
}

/* A thread's words of a row, for all steps of a chunk. `low` and `high` are where its words t and t + 4 are in a line's step. */
template <int FIRST>
__device__ __forceinline__ void load_words(words_of_group_t& words, const unsigned char* row, int low, int high) {
    #pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        const words_t<8> first = *reinterpret_cast<const words_t<8>*>(row + k * 8 * kLineBytes + low);
        const words_t<8> second = *reinterpret_cast<const words_t<8>*>(row + k * 8 * kLineBytes + high);
        words[FIRST + k][0] = mma_words<float>::rounded(first.word[0]);
        words[FIRST + k][1] = mma_words<float>::rounded(first.word[1]);
        words[FIRST + k][2] = mma_words<float>::rounded(second.word[0]);
        words[FIRST + k][3] = mma_words<float>::rounded(second.word[1]);
    }
}

/* The outputs of a lane's two cells of a step, of an output channel. */
using run_t = float[2 * SPAN_W];

/* Those of its output channel OUT, with the bias. */
template <int OUT>
__device__ __forceinline__ void fold(run_t& run, const sums_t& sums, before_t (&before)[kOwnOuts], const float* bias, int lane) {
    const float own = bias[OUT / 2 * 8 + OUT % 2];
    each<2 * SPAN_W>([&](auto i) {
        run[i] = folded<i % SPAN_W, i / SPAN_W>(
            [&](auto tap, auto e) { return column<OUT, tap, e>(sums); }, before[OUT], own, lane);
    });
}

/* Where a warp's lines of a row go: eight channels at a time. */
struct target_t {
    float* row;        // of the warp's first output channel
    long long pixels;  // of a channel
    int channels;      // that there are

    /* How far behind the beginning of a sector the lines of a channel begin. It is the same eight channels on, whose planes are
     * whole sectors. */
    __device__ __forceinline__ int early(int channel) const {
        if (!WHOLE_SECTORS) return 0;
        const unsigned begin = static_cast<unsigned>(reinterpret_cast<unsigned long long>(row) / sizeof(float));
        return (begin + channel * static_cast<unsigned>(pixels) - DELAYED * SPAN_W) % kSector;
    }
};

// A warp stores lines in pieces of 16 bytes: pieces of a line, and lines, that it stores at once; all that a lane has.
constexpr int kPiece = 4, kPieces = kLine / kPiece, kAcross = gcd(kPieces, 32), kAtOnce = 32 / kAcross, kTurns = 8 / kAtOnce;
static_assert(kAcross >= 8, "a turn has at most four lines");
__device__ __forceinline__ int line_of_lane() { return threadIdx.x % 32 / kAcross; }
using pieces_t = vector_t<kPiece>[kTurns][kPieces / kAcross];

/* Stores a lane's pieces. Of each turn the first one's place is `to`, and its column in the row `column`, which may lie beyond
 * either end of it; `within`: no piece does. `channels` are there, of the eight.
 */
__device__ __forceinline__ void store(
    const pieces_t& pieces, float* const (&to)[kTurns], const int (&column)[kTurns], bool within, int channels, int width) {
    constexpr bool kFull = OUT_CHANNELS % OUTS == 0;  // all output channels are there
    #pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        if (!within) break;  // one branch around the loop: 1 to 2% slower (KernelBench 69 1447 us instead of 1426)
        #pragma unroll
        for (int across = 0; across < kPieces / kAcross; ++across) {
            unsigned words[kPiece];
            #pragma unroll
            for (int i = 0; i < kPiece; ++i) words[i] = __float_as_uint(pieces[turn][across].value[i]);
            store_words(to[turn] + across * (kAcross * kPiece), words, kFull || turn * kAtOnce + line_of_lane() < channels);
        }
    }
    if (within) return;
    #pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
        #pragma unroll
        for (int i = 0; i < kPieces / kAcross * kPiece; i += VECTOR) {
            // VECTOR divides the row, and where it begins.
            const int place = i / kPiece * (kAcross * kPiece) + i % kPiece;
            if (static_cast<unsigned>(column[turn] + place) >= width) continue;
            if (!kFull && turn * kAtOnce + line_of_lane() >= channels) continue;
            store_together<VECTOR>(to[turn] + place, [&](int e) { return pieces[turn][i / kPiece].value[i % kPiece + e]; });
        }
}

/* Folds the columns of a second step, and stores its outputs beside those of the first, by way of shared memory: a warp has
 * whole lines of eight channels at a time, which lie there as far behind a sector as in memory. What is left over of a line is
 * `kept` for the next one, by the lanes that put it there. Pieces are stored while the next eight channels fold. `ow` is where
 * lines begin in the row, and may lie beyond either end of it.
 */
__device__ __forceinline__ void fold_and_store(
    const run_t (&first)[kOwnOuts], const sums_t& sums, before_t (&before)[kOwnOuts], const float* bias, float* stage, float* kept,
    const target_t& target, int ow, int width) {
    constexpr int kRun = 2 * SPAN_W, kHalfLine = kColumns * SPAN_W;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int line = line_of_lane(), place = lane % kAcross * kPiece;
    const bool within = ow >= (WHOLE_SECTORS ? kSector - 1 : 0) && ow + kLine <= width;
    const float* const from = stage + (line * kLinePitch + place);
    float* to[kTurns];
    int column[kTurns];
    #pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        column[turn] = ow + place - target.early(line + turn * kAtOnce);
        to[turn] = target.row + ((line + turn * kAtOnce) * target.pixels + column[turn]);
    }
    pieces_t pieces;
    const auto store_eight = [&](int eight) {
        store(pieces, to, column, within, target.channels - 8 * eight, width);
        #pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) to[turn] += 8 * target.pixels;
    };
    each<kOwnOuts / 2>([&](auto eight_) {
        constexpr int eight = eight_;
        run_t second[2];
        each<2>([&](auto out) { fold<2 * eight + out>(second[out], sums, before, bias, lane); });
        if constexpr (eight > 0) store_eight(eight - 1);
        __syncwarp();  // all have read their pieces; shuffles say nothing of memory
        #pragma unroll
        for (int out = 0; out < 2; ++out) {
            float* const put = stage + ((2 * t + out) * kLinePitch + g * kRun + target.early(2 * t + out));
            #pragma unroll
            for (int i = 0; i < kRun; i += VECTOR) {
                copy<VECTOR>(put + i, first[2 * eight + out] + i);
                copy<VECTOR>(put + kHalfLine + i, second[out] + i);
            }
        }
        // A line's first sector, and what lies behind its last one: a lane's share.
        constexpr int kTogether = least(VECTOR, 2);
        float* const own_kept = kept + (eight * 8 * kSector + lane * 2);
        float* const begin = stage + (g * kLinePitch + t * 2);
        if constexpr (WHOLE_SECTORS) {
            #pragma unroll
            for (int i = 0; i < 2; i += kTogether)
                if (t * 2 + i < target.early(g)) copy<kTogether>(begin + i, own_kept + i);
        }
        __syncwarp();
        #pragma unroll
        for (int turn = 0; turn < kTurns; ++turn)
            #pragma unroll
            for (int across = 0; across < kPieces / kAcross; ++across)
                pieces[turn][across] = *reinterpret_cast<const vector_t<kPiece>*>(
                    from + (turn * kAtOnce * kLinePitch + across * (kAcross * kPiece)));
        if constexpr (WHOLE_SECTORS) {
            #pragma unroll
            for (int i = 0; i < 2; i += kTogether) copy<kTogether>(own_kept + i, begin + kLine + i);
        }
    });
    store_eight(kOwnOuts / 2 - 1);
}

/* A warp's part of item after item: row `own` of eight. It is the same for a whole warp, as far as the compiler can see. */
__device__ __forceinline__ void consume(const gemm_fold_rows_params& p, const set_t& set, barriers_t& barriers, int own) {
    const int lane = threadIdx.x % 32, warpgroup = own / 4, g = lane / 4, t = lane % 4;
    const bool speaker = lane == 0;  // arrives at barriers for its warp
    const descriptor_t weights = descriptor_k_major(shared + kFirstWeight, LINES * 16, 128);
    // Where inputs 2g and 2g + 1 of a channel are in a line; and two channels on, where pieces lie in another order.
    const int channel = t / 2 * 4 + t % 2, at = channel * kLineBytes + g % 2 * 8;
    const int low = at + (g / 2 ^ t / 2 * 2) * 16, high = at + 2 * kLineBytes + (g / 2 ^ t / 2 * 2 + 1) * 16;
    const auto row_of = [&](int stage, int down) {
        return shared + stage * kStageBytes + (own + kRowPlace[set.phase * WEIGHT_ROWS + down]) * kRowBytes;
    };

    const int first_out = set.channels * OUTS, channels = OUT_CHANNELS - first_out;
    float* const stage = reinterpret_cast<float*>(shared + kFirstOutput) + own * (8 * kLinePitch);
    float* const kept = reinterpret_cast<float*>(shared + kFirstKept) + own * (OUTS * kSector);
    float* const bias = reinterpret_cast<float*>(shared + kFirstBias);
    if (own == 0)
        for (int out = lane; out < OUTS; out += 32) {
            const bool there = out < channels && p.bias != nullptr;
            bias[out] = there ? load_once(p.bias + set.group * OUT_CHANNELS + first_out + out) : 0.0f;
        }
    named_barrier_sync<kBiasMeet, 256>();
    barrier_wait(barriers.weights, 0);
    if (warpgroup == 1) named_barrier_arrive<kTurnOf0, 256>();
    ring_t ring;
    const auto multiply = [&](sums_t& sums) {
        words_of_group_t words[2];
        const auto load_group = [&](auto group_) {
            constexpr int group = group_, down = group * TAPS_TOGETHER % WEIGHT_ROWS;
            if constexpr (down == 0) barrier_wait(barriers.full[ring.stage], ring.parity);
            each<TAPS_TOGETHER>([&](auto i) {
                load_words<i * kSteps>(words[group % 2], row_of(ring.stage, down + i), low, high);
            });
            settle_words(words[group % 2]);  // were one of them rounded where products run, those would be waited for
        };
        load_group(constant<0>());
        if (warpgroup == 0) named_barrier_sync<kTurnOf0, 256>();
        else named_barrier_sync<kTurnOf1, 256>();
        each<kGroups>([&](auto group_) {
            constexpr int group = group_, down = group * TAPS_TOGETHER % WEIGHT_ROWS;
            constexpr int kFirst = down * kTapBytes + group * TAPS_TOGETHER / WEIGHT_ROWS * kSteps * kStepBytes;
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < kProducts; ++k)
                wgmma_rows<float, LINES>(sums, words[group % 2][k],
                                         advance(weights, kFirst + k / kSteps * kTapBytes + k % kSteps * kStepBytes),
                                         group > 0 || k > 0);
            wgmma_commit();
            if constexpr (down + TAPS_TOGETHER == WEIGHT_ROWS) {
                // Not when its last words are asked for, but now that they have come.
                if (speaker) barrier_arrive(barriers.empty[ring.stage]);
                ring.advance(STAGES);
            }
            if constexpr (group + 1 < kGroups) {
                if constexpr (group > 0) {
                    wgmma_wait<1>();
                    settle_words(words[(group + 1) % 2]);  // nobody else may have their registers until here
                }
                load_group(constant<group + 1>());
            }
        });
        if (warpgroup == 0) named_barrier_arrive<kTurnOf1, 256>();
        else named_barrier_arrive<kTurnOf0, 256>();
        wgmma_finish_rows(sums);
        settle_words(words[0]);
        if constexpr (kGroups > 1) settle_words(words[1]);
    };
    each_item<item_t>(p, kSets * p.groups, [&](const item_t& item) {
        const int oh = (item.row + own) * PHASES + set.phase;
        const bool there = oh < p.h_out;
        const long long plane = (static_cast<long long>(item.image) * p.groups + set.group) * OUT_CHANNELS + first_out;
        float* const row = p.output + (plane * p.h_out + oh) * p.w_out;
        const target_t target{row, static_cast<long long>(p.h_out) * p.w_out, channels};
        before_t before[kOwnOuts] = {};
        run_t first[kOwnOuts];
        // Steps come two by two, and sums that are zero in steps of their own: were it asked of each whether it has columns, sums
        // would have to be moved.
        const auto line = [&](int step, auto has_columns) {
            each<2>([&](auto half) {
                sums_t sums;
                if constexpr (decltype(has_columns)::value) multiply(sums);
                else
                    #pragma unroll
                    for (int i = 0; i < LINES / 2; ++i) sums[i] = 0.0f;
                if (!there) return;
                if constexpr (half == 0)
                    each<kOwnOuts>([&](auto out) { fold<out>(first[out], sums, before, bias + 2 * t, lane); });
                else
                    fold_and_store(first, sums, before, bias + 2 * t, stage, kept, target,
                                   (step * kColumns - DELAYED) * SPAN_W, p.w_out);
            });
        };
        int step = 0;
        #pragma unroll 1
        for (; step * kColumns < p.columns; step += 2) line(step, constant<1>());
        // Behind the row's end there are no columns but those that are late, and outputs that hold the bias alone.
        #pragma unroll 1
        for (; step < p.steps; step += 2) line(step, constant<0>());
    });
    if (warpgroup == 0) named_barrier_sync<kTurnOf0, 256>();  // the other's last turn has ended
}
#else
using sums_t = float[TILES][kColumns / 2];

/* The column E of a tap, of a lane's two of a block of eight. */
template <int BLOCK, int OUT, int TAP, int E> __device__ __forceinline__ float column(const sums_t& sums) {
    return sums[TAP / SLOTS][4 * BLOCK + 2 * (SLOTS == 2 ? TAP % 2 : OUT) + E];
}

/* The largest power of two that is not more than n. */
__device__ constexpr int power_within(int n) { return n < 2 ? 1 : 2 * power_within(n / 2); }

constexpr int kLineOutputs = LINE_CELLS * SPAN_W;
using piece_t = words_t<VECTOR * static_cast<int>(sizeof(ELEMENT_T))>;  // that a thread stores together

/* Folds the columns of a step, adds the bias and stores, by way of shared memory: a warp has whole lines of channels.
 * `ow` is where the step's first cell begins in the row, and may lie before it; `there` is false for rows beyond the image.
 */
__device__ __forceinline__ void fold(
    const gemm_fold_rows_params& p, const sums_t& sums, before_t (&before)[kOwnOuts], const float (&bias)[2 / SLOTS], int channels,
    ELEMENT_T* stage, ELEMENT_T* target, int ow, bool there) {
    constexpr int kRun = 2 * SPAN_W, kWord = gcd(kRun, 8);  // outputs of two cells; written together
    constexpr int kParts = kColumns / LINE_CELLS, kPieces = kLineOutputs / VECTOR;
    // Pieces of a line and lines that a warp handles in one turn; turns; turns whose pieces are in registers together.
    constexpr int kAcross = least(kPieces, 32), kAtOnce = least(power_within(32 / kAcross), kWarpOuts);
    constexpr int kTurns = kWarpOuts / kAtOnce;
    constexpr int kTogether = least(kTurns, VECTOR == 1 ? 8 : 16 / VECTOR);
    constexpr bool kFull = OUT_CHANNELS % kOuts == 0;  // all output channels are there
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const long long pixels = static_cast<long long>(p.h_out) * p.w_out;
    each<kParts>([&](auto part) {
        constexpr int kFirstCell = part * LINE_CELLS;
        const int first = ow + kFirstCell * SPAN_W;
        if (!there || first >= p.w_out) return;  // and nothing comes after it
        __syncwarp();
        each<LINE_CELLS / 8>([&](auto tile) {
            constexpr int kTile = tile, kBlock = kFirstCell / 8 + kTile;
            each<2 / SLOTS>([&](auto half) {
                constexpr int kHalf = half;
                float outputs[kRun];
                each<kRun>([&](auto i) {
                    outputs[i] = folded<i % SPAN_W, i / SPAN_W>(
                        [&](auto tap, auto e) { return column<kBlock, kHalf, tap, e>(sums); },
                        before[kHalf], bias[kHalf], lane);
                });
                ELEMENT_T* to = stage + ((kHalf * 8 + g) * LINE_PITCH + (kTile * 8 + 2 * t) * SPAN_W);
                #pragma unroll
                for (int i = 0; i < kRun; i += kWord)
                    store_together<kWord>(to + i, [&](int e) { return narrow<ELEMENT_T>(outputs[i + e]); });
            });
        });
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < kPieces; i += kAcross) {
            const int piece = i + lane % kAcross, column = first + piece * VECTOR;
            if (lane >= kAtOnce * kAcross || piece >= kPieces) continue;
            // VECTOR divides the output's width, and where steps begin: all outputs of such a piece are there, or none.
            if (static_cast<unsigned>(column) >= p.w_out) continue;
            int line = lane / kAcross;
            const ELEMENT_T* from = stage + line * LINE_PITCH + piece * VECTOR;
            ELEMENT_T* to = target + (line * pixels + column);
            #pragma unroll
            for (int turn = 0; turn < kTurns; turn += kTogether) {
                piece_t pieces[kTogether];
                #pragma unroll
                for (int k = 0; k < least(kTogether, kTurns - turn); ++k, from += kAtOnce * LINE_PITCH)
                    pieces[k] = *reinterpret_cast<const piece_t*>(from);
                #pragma unroll
                for (int k = 0; k < least(kTogether, kTurns - turn); ++k, to += kAtOnce * pixels, line += kAtOnce)
                    if (kFull || line < channels) *reinterpret_cast<piece_t*>(to) = pieces[k];
            }
        }
    });
}

/* A warpgroup's part of item after item. `warpgroup` is the same for a whole warp, as far as the compiler can see. */
__device__ __forceinline__ void consume(const gemm_fold_rows_params& p, const set_t& set, barriers_t& barriers, int warpgroup) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool speaker = lane == 0;  // arrives at barriers for its warp
    const descriptor_t weights = descriptor_k_major(shared + kFirstWeight, 64 * 16, 128);
    const descriptor_t inputs = descriptor_mn_major(shared, kBoxBytes, 1024);
    ELEMENT_T* const stage = reinterpret_cast<ELEMENT_T*>(shared + kFirstOutput) + (warpgroup * 4 + warp) * kWarpOutputs;

    const int first_out = set.channels * kOuts + warp * kWarpOuts;
    const int channels = min(kWarpOuts, OUT_CHANNELS - first_out);  // of the warp, that there are
    float bias[2 / SLOTS];
    #pragma unroll
    for (int half = 0; half < 2 / SLOTS; ++half) {
        const int out = half * 8 + lane / 4;
        const bool there = out < channels && p.bias != nullptr;
        bias[half] = there ? widen(load_once(p.bias + set.group * OUT_CHANNELS + first_out + out)) : 0.0f;
    }
    barrier_wait(barriers.weights, 0);
    if (warpgroup == 1) named_barrier_arrive<kTurnOf0, 256>();
    ring_t ring;
    each_item<item_t>(p, kSets * p.groups, [&](const item_t& item) {
        const int row = item.row + warpgroup, oh = row * PHASES + set.phase;
        const bool there = row < p.cells_h && oh < p.h_out;
        const long long plane = (static_cast<long long>(item.image) * p.groups + set.group) * OUT_CHANNELS + first_out;
        ELEMENT_T* const target = p.output + (plane * p.h_out + oh) * p.w_out;
        sums_t sums;
        before_t before[kOwnOuts] = {};
        int step = 0;
        #pragma unroll 1
        for (; step * kColumns < p.columns; ++step) {
            if (warpgroup == 0) named_barrier_sync<kTurnOf0, 256>();
            else named_barrier_sync<kTurnOf1, 256>();
            barrier_wait(barriers.full[ring.stage], ring.parity);
            int accumulate = 0;
            wgmma_fence();
            #pragma unroll 1
            for (int i = 0; i < INPUT_ROWS; ++i) {
                const int tap = kRowTap[(set.phase * INPUT_ROWS + i) * 2 + warpgroup];
                if (tap < 0) continue;
                const descriptor_t left = advance(weights, tap * kTapBytes);
                const descriptor_t right = advance(inputs, ring.stage * kStageBytes + i * kRowBytes);
                #pragma unroll
                for (int k = 0; k < kSteps; ++k)
                    #pragma unroll
                    for (int tile = 0; tile < TILES; ++tile)
                        wgmma<ELEMENT_T, kColumns, true>(sums[tile], advance(left, tile * kTileBytes + k * 2048),
                                                        advance(right, k * 2048), accumulate || k > 0);
                wgmma_commit();
                accumulate = 1;
            }
            if (warpgroup == 0) named_barrier_arrive<kTurnOf1, 256>();
            else named_barrier_arrive<kTurnOf0, 256>();
            #pragma unroll
            for (int tile = 0; tile < TILES; ++tile) wgmma_finish(sums[tile]);
            if (speaker) barrier_arrive(barriers.empty[ring.stage]);
            ring.advance(STAGES);
            fold(p, sums, before, bias, channels, stage, target, (step * kColumns - DELAYED) * SPAN_W, there);
        }
        // Behind the row's end there are no columns but those that are late, and outputs that hold the bias alone.
        #pragma unroll 1
        for (; step < p.steps; ++step)
            fold(p, {}, before, bias, channels, stage, target, (step * kColumns - DELAYED) * SPAN_W, there);
    });
    if (warpgroup == 0) named_barrier_sync<kTurnOf0, 256>();  // the other's last turn has ended
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads, 1) sm90_gemm_fold_rows_kernel(const __grid_constant__ gemm_fold_rows_params p) {
    barriers_t& barriers = *reinterpret_cast<barriers_t*>(shared + kFirstBarrier);
    init_barriers([&] {
        init_ring(barriers, 1, 8);  // warps that multiply
        barrier_init(barriers.weights, 1);
    });
    const set_t set = set_of(p);
    const auto produce = [&] {
        if (threadIdx.x >= 64 || !elected()) return;
        if (threadIdx.x < 32) produce_inputs(p, set, barriers);
        else produce_weights(p, set, barriers.weights);
    };
    run_roles<kProducers, PIXELS_ON_M ? 32 : 128, 240, 24>(produce, [&](int own) { consume(p, set, barriers, own); });
}
