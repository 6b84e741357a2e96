/* fused for wide rows in NCHW, of 16 bits and of TF32: rows of inputs are multiplied, and columns fold in registers.
 *
 * It is for stride 1 without dilation, and one group. Each tap kw across gives
 *
 *   columns [co, kw, i] = sum over (kh, ci) of weights [co, kw, (kh, ci)] . input [(kh, ci), i]
 *
 * Each tap kh down reads another row of the input, all at the same place i: rows of the input as they lie, boxes of a tensor map.
 * What is left of col2im is along a row, where the columns of a tap meet outputs at a constant distance:
 *
 *   output [co, o] = bias [co] + sum over the taps kw of columns [co, kw, o + shift of kw]
 *
 * A block goes along rows, some inputs a step. Outputs come DELAYED inputs later than columns, so that all they need has come: a
 * tap is DELAYED - shift late, and the last columns of a step are carried to the next one. Taps are in the order in which they
 * are late, the first by FIRST_DELAY. With K=3 P=1 and DELAYED=2, taps 0, 1 and 2 have shifts 1, 0 and -1 and are 1, 2 and 3 late:
 * output i - 2 gets their columns i - 1, i - 2 and i - 3. No column is computed twice.
 *
 *                16 bits (PIXELS_ON_M 0)                             TF32 (PIXELS_ON_M 1)
 *   left         64 rows, which are SLOTS taps x 64 / SLOTS output   16 inputs of a row, of each of four warps, from
 *                channels; kTiles of them have all taps across       registers
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
 * An infinite weight may make NaN of an output that its tap gives nothing, beyond the image.
 *
 * Two warpgroups multiply by turns: one folds and stores while the other multiplies. In 16 bits each has a row of its own, in TF32
 * each warp. There words of the first products are loaded before a turn, those of the others while products run: of
 * TAPS_TOGETHER taps down at a time, since whenever products are waited for some time goes by. One thread begins all copies, of
 * all input rows of a step together, since small boxes take as long as large ones. Weights of a set of output channels
 * stay in shared memory; a block takes items of one set alone.
 *
 * What limits 16 bits is shared memory: products of 64 x 128 read it three quarters of their time, beside shuffles and lines of
 * outputs. A warp that folds is alone on its scheduler, so its instructions count: what comes from one lane is added up before it
 * is shuffled, and pieces of lines are loaded together before they are stored. TF32: memory, where there is much of it. A product
 * of 64 x 8 x 192 keeps tensor cores busy for 96 cycles, and reads weights for 48 and words for 16; beside that come boxes,
 * shuffles and lines. docs/notes/gemm_fold_rows.md has what was measured.
 *
 * Memory is written in sectors of 32 bytes, and a part of one costs as much as to read and to write all of it. Rows of outputs
 * begin anywhere in a sector. So in TF32 a line lies in shared memory as far behind a sector's beginning as in memory, behind what
 * was left over of the line before; what is left over of it waits for the next line.
 *
 * Macros: ELEMENT_T, PIXELS_ON_M; CHANNELS (up to whole products, or whole CHUNKs), IN_CHANNELS, OUT_CHANNELS; CHANNEL_SETS;
 * TAPS_ACROSS (6 at most in 16 bits), DELAYED, FIRST_DELAY; WEIGHT_ROWS (taps down), FIRST_ROW (from an item's first row to its
 * first input row); STAGES; VECTOR (outputs that begin at their multiples in memory; in 16 bits they are stored together);
 * SHARED_BYTES.
 * 16 bits: SLOTS.
 * TF32: CHUNK (a multiple of 8); OUTS (a multiple of 8), LINES (up to a multiple of 16); TAPS_TOGETHER (which WEIGHT_ROWS is a
 * multiple of).
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
    int columns, h_out, w_out;  // columns: inputs of a row that are multiplied
    int image_items, items;     // of an image; of all
    int steps;                  // of a row, those behind its end among them
};

constexpr int kProducers = 128, kThreads = kProducers + 256;
constexpr int kRows = PIXELS_ON_M ? 8 : 2;  // of an item
constexpr int kInputRows = WEIGHT_ROWS - 1 + kRows;

// Barriers of warps: the turn of either warpgroup; of all that multiply.
constexpr int kTurnOf0 = 1, kTurnOf1 = 2;
[[maybe_unused]] constexpr int kBiasMeet = 3;

struct barriers_t : ring_barriers_t<STAGES> { barrier_t weights; };

/* An item: an image, and its first row there. */
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
constexpr int kRowBytes = CHUNK * kLineBytes, kBoxBytes = kInputRows * kRowBytes, kStageBytes = kBoxBytes;
constexpr int kStepBytes = 2 * LINES * 16, kTapBytes = CHANNELS / 8 * kStepBytes, kWeightBytes = WEIGHT_ROWS * kTapBytes;
constexpr int kLanes = 8, kOwnOuts = OUTS / 4;  // that columns go round; output channels of a lane
static_assert(CHANNELS % CHUNK == 0 && CHUNK % 8 == 0 && OUTS % 8 == 0, "products are whole");
static_assert(TAPS_ACROSS * OUTS <= LINES && LINES % 16 == 0 && LINES <= 256, "a product has all taps");
static_assert(WEIGHT_ROWS % TAPS_TOGETHER == 0, "groups of products are alike");
static_assert(STAGES > kChunks, "a warpgroup's turn ends only if all stages of a step may come before the other's");

constexpr int kSector = 8;  // outputs

// Shared memory: stages [STAGES][kInputRows][CHUNK][16 inputs] swizzled, weights [WEIGHT_ROWS][CHANNELS / 4][LINES] of 16
// bytes, outputs [8 warps][8 channels][kLinePitch], outputs that are kept [8 warps][OUTS][kSector], the bias, barriers. With that
// pitch lanes write to different banks, but where lines begin differently.
constexpr int kLine = 2 * kColumns, kLinePitch = kLine + kSector + 4;  // outputs of two steps
constexpr int kFirstWeight = STAGES * kStageBytes, kFirstOutput = kFirstWeight + kWeightBytes;
constexpr int kFirstKept = kFirstOutput + 8 * 8 * kLinePitch * 4;
constexpr int kFirstBias = kFirstKept + 8 * OUTS * kSector * 4;
constexpr int kFirstBarrier = kFirstBias + OUTS * 4;
static_assert(kStageBytes % 512 == 0, "a stage begins where the order of pieces does");
#else
constexpr int kUnits = CHANNELS / 8, kSteps = CHANNELS / 16;
constexpr int kColumns = WGMMA_COLUMNS, kStepsTogether = 1, kChunk = CHANNELS, kChunks = 1;
constexpr int kBoxColumns = 64, kBoxes = kColumns / kBoxColumns, kRowBytes = CHANNELS * 128;
constexpr int kBoxBytes = kInputRows * kRowBytes, kStageBytes = kBoxes * kBoxBytes;
constexpr int kTiles = ceil_div(TAPS_ACROSS, SLOTS);  // products that together have all taps across
constexpr int kTileBytes = kUnits * 64 * 16, kTapBytes = kTiles * kTileBytes, kWeightBytes = WEIGHT_ROWS * kTapBytes;
constexpr int kOuts = 64 / SLOTS, kWarpOuts = kOuts / 4;  // output channels of a block, and of a warp
constexpr int kLanes = 4, kOwnOuts = 2 / SLOTS;  // that columns go round; output channels of a lane
// Outputs of a line that are stored together, which are folded before any are stored; from a line to the next.
constexpr int kLine = 64, kLinePitch = kLine + 8, kWarpOutputs = kWarpOuts * kLinePitch;
static_assert(CHANNELS % 16 == 0, "products are whole");

// Shared memory: stages [STAGES][kBoxes][kInputRows][CHANNELS][64 columns] swizzled, weights
// [WEIGHT_ROWS][kTiles][kUnits][64 rows] of 16 bytes, outputs [8 warps][kWarpOuts][kLinePitch], barriers.
constexpr int kFirstWeight = STAGES * kStageBytes, kFirstOutput = kFirstWeight + kWeightBytes;
constexpr int kFirstBarrier = kFirstOutput + 8 * kWarpOutputs * static_cast<int>(sizeof(ELEMENT_T));
#endif
static_assert(kFirstBarrier % 8 == 0 && kFirstBarrier + sizeof(barriers_t) <= SHARED_BYTES, "what is shared fits");
extern __shared__ __align__(1024) unsigned char shared[];

/* Copies the inputs of step after step, chunk after chunk of channels: zeros for rows and columns that there are not. */
__device__ __forceinline__ void produce_inputs(const gemm_fold_rows_params& p, barriers_t& barriers) {
    constexpr int kWhole = kStepsTogether * kColumns;
    const int columns = kStepsTogether == 1 ? p.columns : ceil_div(p.columns, kWhole) * kWhole;
    ring_t ring;
    each_item<item_t>(p, CHANNEL_SETS, [&](const item_t& item) {
        #pragma unroll 1
        for (int column = 0; column < columns; column += kColumns)
            #pragma unroll 1
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                barrier_t& full = begin_stage(barriers, ring, kStageBytes);
                #pragma unroll
                for (int box = 0; box < kBoxes; ++box)
                    tma_load(shared + ring.stage * kStageBytes + box * kBoxBytes, p.map, column + box * kBoxColumns,
                             chunk * kChunk, item.row + FIRST_ROW, item.image, full);
                ring.advance(STAGES);
            }
    });
}

/* Copies the weights of a set, once, a tap down at a time. */
__device__ __forceinline__ void produce_weights(const gemm_fold_rows_params& p, int set, barrier_t& full) {
    grid_dependency_wait();  // which lays them out
    barrier_arrive_expecting(full, kWeightBytes);
    const unit_t* source = p.packed + static_cast<long long>(set) * (kWeightBytes / 16);
    #pragma unroll 1
    for (int i = 0; i < kWeightBytes; i += kTapBytes)
        bulk_copy(shared + kFirstWeight + i, source + i / 16, kTapBytes, full);
}

// What is late comes from one of the two columns of a lane, of a lane so many before: from kLanes on, from the columns before.
constexpr int kMostLanes = 4;
__device__ constexpr int delay_of(int tap) { return FIRST_DELAY + tap; }
__device__ constexpr int column_of(int tap, int e) { return (e + delay_of(tap)) % 2; }
/* From how many lanes before a tap gives a lane's output E something. */
__device__ constexpr int lanes_of(int tap, int e) { return (delay_of(tap) + column_of(tap, e) - e) / 2; }

/* The first tap that gives it something from so many lanes before, or TAPS_ACROSS. */
__device__ constexpr int first_to_give(int e, int lanes) {
    int tap = 0;
    while (tap < TAPS_ACROSS && lanes_of(tap, e) != lanes) ++tap;
    return tap;
}

/* Contributions of an output channel's taps to other lanes from the previous columns: [output][distance]. */
using before_t = float[2][kMostLanes];

/* A lane's output E, of an output channel whose columns column(tap, 0 or 1) are. What comes from the same lane is added up there
 * first.
 */
template <int E, typename COLUMN>
__device__ __forceinline__ float folded(const COLUMN& column, before_t& before, float bias, int lane) {
    float output = bias;
    each<kMostLanes + 1>([&](auto lanes_) {
        constexpr int lanes = lanes_, first = first_to_give(E, lanes);
        if constexpr (first < TAPS_ACROSS) {
            float given = 0.0f;
            each<TAPS_ACROSS>([&](auto tap_) {
                constexpr int tap = tap_;
                if constexpr (lanes_of(tap, E) == lanes) {
                    const float own = column(tap_, constant<column_of(tap, E)>());
                    given = tap == first ? own : given + own;
                }
            });
            if constexpr (lanes == 0) {
                output += given;
            } else {
                float& last = before[E][lanes - 1];
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

/* A lane's two outputs of a step, of an output channel. */
using run_t = float[2];

/* Those of its output channel OUT, with the bias. */
template <int OUT>
__device__ __forceinline__ void fold(run_t& run, const sums_t& sums, before_t (&before)[kOwnOuts], const float* bias, int lane) {
    const float own = bias[OUT / 2 * 8 + OUT % 2];
    each<2>([&](auto i) {
        run[i] = folded<i>([&](auto tap, auto e) { return column<OUT, tap, e>(sums); }, before[OUT], own, lane);
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
        const unsigned begin = static_cast<unsigned>(reinterpret_cast<unsigned long long>(row) / sizeof(float));
        return (begin + channel * static_cast<unsigned>(pixels) - DELAYED) % kSector;
    }
};

// A warp stores lines in pieces of 16 bytes: pieces of a line, and lines, that it stores at once; all that a lane has.
constexpr int kPiece = 4, kAcross = kLine / kPiece, kAtOnce = 32 / kAcross, kTurns = 8 / kAtOnce;
__device__ __forceinline__ int line_of_lane() { return threadIdx.x % 32 / kAcross; }
using pieces_t = vector_t<kPiece>[kTurns];

/* Stores a lane's pieces. Of each turn the piece's place is `to`, and its column in the row `column`, which may lie beyond
 * either end of it; `within`: no piece does. `channels` are there, of the eight.
 */
__device__ __forceinline__ void store(
    const pieces_t& pieces, float* const (&to)[kTurns], const int (&column)[kTurns], bool within, int channels, int width) {
    constexpr bool kFull = OUT_CHANNELS % OUTS == 0;  // all output channels are there
    #pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        if (!within) break;  // one branch around the loop: 1 to 2% slower (KernelBench 69 1447 us instead of 1426)
        unsigned words[kPiece];
        #pragma unroll
        for (int i = 0; i < kPiece; ++i) words[i] = __float_as_uint(pieces[turn].value[i]);
        store_words(to[turn], words, kFull || turn * kAtOnce + line_of_lane() < channels);
    }
    if (within) return;
    #pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
        #pragma unroll
        for (int i = 0; i < kPiece; i += VECTOR) {
            // VECTOR divides the row, and where it begins.
            if (static_cast<unsigned>(column[turn] + i) >= width) continue;
            if (!kFull && turn * kAtOnce + line_of_lane() >= channels) continue;
            store_together<VECTOR>(to[turn] + i, [&](int e) { return pieces[turn].value[i + e]; });
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
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int line = line_of_lane(), place = lane % kAcross * kPiece;
    const bool within = ow >= kSector - 1 && ow + kLine <= width;
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
            float* const put = stage + ((2 * t + out) * kLinePitch + g * 2 + target.early(2 * t + out));
            #pragma unroll
            for (int i = 0; i < 2; i += VECTOR) {
                copy<VECTOR>(put + i, first[2 * eight + out] + i);
                copy<VECTOR>(put + kColumns + i, second[out] + i);
            }
        }
        // A line's first sector, and what lies behind its last one: a lane's share.
        float* const own_kept = kept + (eight * 8 * kSector + lane * 2);
        float* const begin = stage + (g * kLinePitch + t * 2);
        #pragma unroll
        for (int i = 0; i < 2; i += VECTOR)
            if (t * 2 + i < target.early(g)) copy<VECTOR>(begin + i, own_kept + i);
        __syncwarp();
        #pragma unroll
        for (int turn = 0; turn < kTurns; ++turn)
            pieces[turn] = *reinterpret_cast<const vector_t<kPiece>*>(from + turn * kAtOnce * kLinePitch);
        #pragma unroll
        for (int i = 0; i < 2; i += VECTOR) copy<VECTOR>(own_kept + i, begin + kLine + i);
    });
    store_eight(kOwnOuts / 2 - 1);
}

/* A warp's part of item after item: row `own` of eight. It is the same for a whole warp, as far as the compiler can see. */
__device__ __forceinline__ void consume(const gemm_fold_rows_params& p, int set, barriers_t& barriers, int own) {
    const int lane = threadIdx.x % 32, warpgroup = own / 4, g = lane / 4, t = lane % 4;
    const bool speaker = lane == 0;  // arrives at barriers for its warp
    const descriptor_t weights = descriptor_k_major(shared + kFirstWeight, LINES * 16, 128);
    // Where inputs 2g and 2g + 1 of a channel are in a line; and two channels on, where pieces lie in another order.
    const int channel = t / 2 * 4 + t % 2, at = channel * kLineBytes + g % 2 * 8;
    const int low = at + (g / 2 ^ t / 2 * 2) * 16, high = at + 2 * kLineBytes + (g / 2 ^ t / 2 * 2 + 1) * 16;
    const auto row_of = [&](int stage, int down) {
        return shared + stage * kStageBytes + (own + down) * kRowBytes;
    };

    const int first_out = set * OUTS, channels = OUT_CHANNELS - first_out;
    float* const stage = reinterpret_cast<float*>(shared + kFirstOutput) + own * (8 * kLinePitch);
    float* const kept = reinterpret_cast<float*>(shared + kFirstKept) + own * (OUTS * kSector);
    float* const bias = reinterpret_cast<float*>(shared + kFirstBias);
    if (own == 0)
        for (int out = lane; out < OUTS; out += 32) {
            const bool there = out < channels && p.bias != nullptr;
            bias[out] = there ? load_once(p.bias + first_out + out) : 0.0f;
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
    each_item<item_t>(p, CHANNEL_SETS, [&](const item_t& item) {
        const int oh = item.row + own;
        const bool there = oh < p.h_out;
        const long long plane = static_cast<long long>(item.image) * OUT_CHANNELS + first_out;
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
                                   step * kColumns - DELAYED, p.w_out);
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
using sums_t = float[kTiles][kColumns / 2];

/* The column E of a tap, of a lane's two of a block of eight. */
template <int BLOCK, int OUT, int TAP, int E> __device__ __forceinline__ float column(const sums_t& sums) {
    return sums[TAP / SLOTS][4 * BLOCK + 2 * (SLOTS == 2 ? TAP % 2 : OUT) + E];
}

using piece_t = words_t<VECTOR * static_cast<int>(sizeof(ELEMENT_T))>;  // that a thread stores together

/* Folds the columns of a step, adds the bias and stores, by way of shared memory: a warp has whole lines of channels.
 * `ow` is where the step's first output is in the row, and may lie before it; `there` is false for rows beyond the image.
 */
__device__ __forceinline__ void fold(
    const gemm_fold_rows_params& p, const sums_t& sums, before_t (&before)[kOwnOuts], const float (&bias)[2 / SLOTS], int channels,
    ELEMENT_T* stage, ELEMENT_T* target, int ow, bool there) {
    constexpr int kParts = kColumns / kLine, kPieces = kLine / VECTOR;
    // Pieces of a line and lines that a warp handles in one turn; turns; turns whose pieces are in registers together.
    constexpr int kAcross = least(kPieces, 32), kAtOnce = 32 / kAcross;
    constexpr int kTurns = kWarpOuts / kAtOnce;
    constexpr int kTogether = least(kTurns, VECTOR == 1 ? 8 : 16 / VECTOR);
    constexpr bool kFull = OUT_CHANNELS % kOuts == 0;  // all output channels are there
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const long long pixels = static_cast<long long>(p.h_out) * p.w_out;
    each<kParts>([&](auto part) {
        constexpr int kBegin = part * kLine;
        const int first = ow + kBegin;
        if (!there || first >= p.w_out) return;  // and nothing comes after it
        __syncwarp();
        each<kLine / 8>([&](auto tile) {
            constexpr int kTile = tile, kBlock = kBegin / 8 + kTile;
            each<2 / SLOTS>([&](auto half) {
                constexpr int kHalf = half;
                float outputs[2];
                each<2>([&](auto i) {
                    outputs[i] = folded<i>(
                        [&](auto tap, auto e) { return column<kBlock, kHalf, tap, e>(sums); },
                        before[kHalf], bias[kHalf], lane);
                });
                ELEMENT_T* to = stage + ((kHalf * 8 + g) * kLinePitch + kTile * 8 + 2 * t);
                store_together<2>(to, [&](int e) { return narrow<ELEMENT_T>(outputs[e]); });
            });
        });
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < kPieces; i += kAcross) {
            const int piece = i + lane % kAcross, column = first + piece * VECTOR;
            // VECTOR divides the output's width, and where steps begin: all outputs of such a piece are there, or none.
            if (static_cast<unsigned>(column) >= p.w_out) continue;
            int line = lane / kAcross;
            const ELEMENT_T* from = stage + line * kLinePitch + piece * VECTOR;
            ELEMENT_T* to = target + (line * pixels + column);
            #pragma unroll
            for (int turn = 0; turn < kTurns; turn += kTogether) {
                piece_t pieces[kTogether];
                #pragma unroll
                for (int k = 0; k < least(kTogether, kTurns - turn); ++k, from += kAtOnce * kLinePitch)
                    pieces[k] = *reinterpret_cast<const piece_t*>(from);
                #pragma unroll
                for (int k = 0; k < least(kTogether, kTurns - turn); ++k, to += kAtOnce * pixels, line += kAtOnce)
                    if (kFull || line < channels) *reinterpret_cast<piece_t*>(to) = pieces[k];
            }
        }
    });
}

/* A warpgroup's part of item after item. `warpgroup` is the same for a whole warp, as far as the compiler can see. */
__device__ __forceinline__ void consume(const gemm_fold_rows_params& p, int set, barriers_t& barriers, int warpgroup) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool speaker = lane == 0;  // arrives at barriers for its warp
    const descriptor_t weights = descriptor_k_major(shared + kFirstWeight, 64 * 16, 128);
    const descriptor_t inputs = descriptor_mn_major(shared, kBoxBytes, 1024);
    ELEMENT_T* const stage = reinterpret_cast<ELEMENT_T*>(shared + kFirstOutput) + (warpgroup * 4 + warp) * kWarpOutputs;

    const int first_out = set * kOuts + warp * kWarpOuts;
    const int channels = min(kWarpOuts, OUT_CHANNELS - first_out);  // of the warp, that there are
    float bias[2 / SLOTS];
    #pragma unroll
    for (int half = 0; half < 2 / SLOTS; ++half) {
        const int out = half * 8 + lane / 4;
        const bool there = out < channels && p.bias != nullptr;
        bias[half] = there ? widen(load_once(p.bias + first_out + out)) : 0.0f;
    }
    barrier_wait(barriers.weights, 0);
    if (warpgroup == 1) named_barrier_arrive<kTurnOf0, 256>();
    ring_t ring;
    each_item<item_t>(p, CHANNEL_SETS, [&](const item_t& item) {
        const int oh = item.row + warpgroup;
        const bool there = oh < p.h_out;
        const long long plane = static_cast<long long>(item.image) * OUT_CHANNELS + first_out;
        ELEMENT_T* const target = p.output + (plane * p.h_out + oh) * p.w_out;
        sums_t sums;
        before_t before[kOwnOuts] = {};
        int step = 0;
        #pragma unroll 1
        for (; step * kColumns < p.columns; ++step) {
            if (warpgroup == 0) named_barrier_sync<kTurnOf0, 256>();
            else named_barrier_sync<kTurnOf1, 256>();
            barrier_wait(barriers.full[ring.stage], ring.parity);
            wgmma_fence();
            #pragma unroll 1
            for (int tap = 0; tap < WEIGHT_ROWS; ++tap) {
                const descriptor_t left = advance(weights, tap * kTapBytes);
                const descriptor_t right = advance(inputs, ring.stage * kStageBytes + (warpgroup + tap) * kRowBytes);
                #pragma unroll
                for (int k = 0; k < kSteps; ++k)
                    #pragma unroll
                    for (int tile = 0; tile < kTiles; ++tile)
                        wgmma<ELEMENT_T, kColumns, true>(sums[tile], advance(left, tile * kTileBytes + k * 2048),
                                                        advance(right, k * 2048), tap > 0 || k > 0);
                wgmma_commit();
            }
            if (warpgroup == 0) named_barrier_arrive<kTurnOf1, 256>();
            else named_barrier_arrive<kTurnOf0, 256>();
            #pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) wgmma_finish(sums[tile]);
            if (speaker) barrier_arrive(barriers.empty[ring.stage]);
            ring.advance(STAGES);
            fold(p, sums, before, bias, channels, stage, target, step * kColumns - DELAYED, there);
        }
        // Behind the row's end there are no columns but those that are late, and outputs that hold the bias alone.
        #pragma unroll 1
        for (; step < p.steps; ++step)
            fold(p, {}, before, bias, channels, stage, target, step * kColumns - DELAYED, there);
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
    const int set = blockIdx.x % CHANNEL_SETS;  // of output channels
    const auto produce = [&] {
        if (threadIdx.x >= 64 || !elected()) return;
        if (threadIdx.x < 32) produce_inputs(p, barriers);
        else produce_weights(p, set, barriers.weights);
    };
    run_roles<kProducers, PIXELS_ON_M ? 32 : 128, 240, 24>(produce, [&](int own) { consume(p, set, barriers, own); });
}
