/* fused for wide rows of 16-bit values in NCHW: inputs are multiplied as they lie in memory, and columns fold in registers.
 *
 * A cell is an input and the SPAN_H x SPAN_W outputs that it stands for (see geometry/axis.cuh). Of one row phase, each tap kw across
 * gives
 *
 *   columns [co, kw, i] = sum over (kh, ci) of weights [co, kw, (kh, ci)] . input [(kh, ci), i]
 *
 * where kh stands for the taps down that reach the phase. Each of them reads another row of the input, all at the same place
 * i: the right side is rows of the input as they lie, boxes of a tensor map, which no thread touches. What is left of col2im
 * is along a row, where the columns of a tap meet outputs at a constant distance:
 *
 *   output [co, (cell, phase)] = bias [co] + sum over the taps kw of the phase of columns [co, kw, cell + shift of kw]
 *
 * A block goes along a row, COLUMNS inputs a step. Cells come DELAYED inputs later than columns, so that all they need has
 * come: tap kw is DELAY [kw] = DELAYED - shift late, and the last columns of a step are carried to the next one. With K=3 S=1
 * P=1 and DELAYED=2, taps 0, 1 and 2 have shifts 1, 0 and -1 and are 1, 2 and 3 late: cell i - 2 gets their columns i - 1, i -
 * 2 and i - 3. A warp has whole rows of sums, lane t of four the columns 8j + 2t and 8j + 2t + 1, so to be late is a shuffle
 * among four lanes, whose first ones get what the last ones had of the block of eight before. No column is computed twice.
 *
 * sm90/implicit_gemm.cu computes no columns: each tap reads the input at another place, where threads have laid values of 16 bits out
 * by channels. That is what it spends most on in NCHW.
 *
 *   left   64 rows, which are SLOTS taps x 64 / SLOTS output channels; TILES of them have all taps across. Two taps of a
 *          channel are rows g and g + 8 of a warp, a thread's own.
 *   right  COLUMNS inputs of a row
 *   K      rows of the input, CHANNELS input channels each
 *
 * An infinite weight may make NaN of an output that its tap gives nothing, beyond the image.
 *
 * Two warpgroups multiply by turns, each with a row of cells of its own (ROWS 2), or both with the same row and other output
 * channels (ROWS 1): one folds and stores while the other multiplies. One thread begins all copies, of all input rows of a
 * step together, since small boxes take as long as large ones. Weights of a set (a group, a row phase, output channels) stay
 * in shared memory; a block takes items of one set alone.
 *
 * What limits it is shared memory: products of 64 x 128 read it three quarters of their time, beside shuffles and lines of
 * outputs; with 64 x 64 all of it. A warp that folds is alone on its scheduler, so its instructions count: what comes from one
 * lane is added up before it is shuffled, and pieces of lines are loaded together before they are stored. Before that,
 * KernelBench 71 took 261 us, and takes 208 (sm90/implicit_gemm.cu 292).
 *
 * Macros: ELEMENT_T; CHANNELS (of a group, up to a multiple of 16), IN_CHANNELS, OUT_CHANNELS (of a group); TILES, SLOTS,
 * COLUMNS, ROWS; CHANNEL_SETS, PHASES (rows of a cell: SPAN_H); SPAN_W; DELAYED, and tables DELAY and PHASE of each tap across
 * (TILES * SLOTS of them; the phase is -1 where there is none); WEIGHT_ROWS (taps down, of the phase that has most; each has
 * one); INPUT_ROWS (of an item), tables FIRST_ROW (of each phase: from an item's first cell to its first input row) and
 * ROW_TAP (of each phase and input row, for either warpgroup: which of the phase's taps it is, or -1); STAGES; LINE_CELLS (of
 * a line that is stored together), LINE_PITCH (outputs), VECTOR (outputs that begin at their multiples in memory, and are stored
 * together unless WHOLE_SECTORS are); SHARED_BYTES.
 * Chosen by gemmconv/kernels/sm90/gemm_fold_rows.py.
 */
#define WGMMA_COLUMNS COLUMNS
#include "numeric/integers.cuh"
#include "ptx/named_barrier.cuh"
#include "pipeline/persistent.cuh"
#include "pipeline/row_tiles.cuh"
#include "ptx/store.cuh"
#include "numeric/unroll.cuh"
#include "ptx/wgmma.cuh"

constexpr int kUnits = CHANNELS / 8, kSteps = CHANNELS / 16;
constexpr int kLine = 64, kBoxes = COLUMNS / kLine, kRowBytes = CHANNELS * 128;
constexpr int kBoxBytes = INPUT_ROWS * kRowBytes, kStageBytes = kBoxes * kBoxBytes;
constexpr int kSides = ROWS == 1 ? 2 : 1;  // warpgroups with output channels of their own
constexpr int kTileBytes = kUnits * 64 * 16, kTapBytes = TILES * kTileBytes, kSideBytes = WEIGHT_ROWS * kTapBytes;
constexpr int kWeightBytes = kSides * kSideBytes;
constexpr int kOuts = 64 / SLOTS, kWarpOuts = kOuts / 4;  // output channels of a warpgroup, and of a warp
constexpr int kWarpOutputs = kWarpOuts * LINE_PITCH;
static_assert(CHANNELS % 16 == 0 && COLUMNS % kLine == 0, "products and boxes are whole");
static_assert(COLUMNS % LINE_CELLS == 0 && LINE_CELLS % 8 == 0, "lines are whole, and of whole blocks of eight");

__constant__ constexpr int kRowTap[] = ROW_TAP;

// Shared memory: stages [STAGES][kBoxes][INPUT_ROWS][CHANNELS][64 columns] swizzled, weights
// [kSides][WEIGHT_ROWS][TILES][kUnits][64 rows] of 16 bytes, outputs [8 warps][kWarpOuts][LINE_PITCH], barriers.
constexpr int kFirstWeight = STAGES * kStageBytes, kFirstOutput = kFirstWeight + kWeightBytes;
constexpr int kFirstBarrier = kFirstOutput + 8 * kWarpOutputs * static_cast<int>(sizeof(ELEMENT_T));
static_assert(kFirstBarrier % 8 == 0 && kFirstBarrier + sizeof(barriers_t) <= SHARED_BYTES, "what is shared fits");
extern __shared__ __align__(1024) unsigned char shared[];

/* Copies the inputs of step after step: zeros for rows and columns that there are not. */
__device__ __forceinline__ void produce_inputs(const gemm_fold_rows_params& p, const set_t& set, barriers_t& barriers) {
    ring_t ring;
    each_item<item_t>(p, kSets * p.groups, [&](const item_t& item) {
        #pragma unroll 1
        for (int column = 0; column < p.columns; column += COLUMNS) {
            barrier_t& full = begin_stage(barriers, ring, kStageBytes);
            #pragma unroll
            for (int box = 0; box < kBoxes; ++box)
                tma_load(shared + ring.stage * kStageBytes + box * kBoxBytes, p.map, column + box * kLine,
                         set.group * IN_CHANNELS, item.row + kFirstRow[set.phase], item.image, full);
            ring.advance(STAGES);
        }
    });
}

using sums_t = float[TILES][COLUMNS / 2];

/* Of the block before, what taps give to other lanes: for either row of a thread, or one, each phase, cell and distance. */
using before_t = float[2 / SLOTS][SPAN_W][2][kMostLanes];

/* The outputs of a phase at a lane's cell E of a block of eight. What comes from the same lane is added up there first. */
template <int BLOCK, int HALF, int PHASE_, int E>
__device__ __forceinline__ float folded(const sums_t& sums, before_t& before, float bias, int lane) {
    float output = bias;
    each<kMostLanes + 1>([&](auto lanes_) {
        constexpr int lanes = decltype(lanes_)::value, first = first_to_give(PHASE_, E, lanes);
        if constexpr (first < kTapsAcross) {
            float given = 0.0f;
            each<kTapsAcross>([&](auto tap_) {
                constexpr int tap = decltype(tap_)::value, row = SLOTS == 2 ? tap % 2 : HALF;
                if constexpr (gives(tap, PHASE_, E, lanes)) {
                    const float column = sums[tap / SLOTS][4 * BLOCK + 2 * row + column_of(kDelay[tap], E)];
                    given = tap == first ? column : given + column;
                }
            });
            if constexpr (lanes == 0) {
                output += given;
            } else {
                float& last = before[HALF][PHASE_][E][lanes - 1];
                if constexpr (lanes == kMostLanes) {
                    output += last;
                } else {
                    const float value = lane % 4 + lanes < 4 ? given : last;
                    output += __shfl_sync(0xffffffffu, value, (lane & ~3) | (lane - lanes & 3));
                }
                last = given;
            }
        }
    });
    return output;
}

/* The largest power of two that is not more than n. */
__device__ constexpr int power_within(int n) { return n < 2 ? 1 : 2 * power_within(n / 2); }

// Memory is written in sectors of 32 bytes, and a part of one costs as much as to read and to write all of it. Rows of outputs
// begin anywhere in a sector. So a line lies in shared memory as far behind a sector's beginning as in memory, behind what was
// left over of the line before, and is stored by whole sectors; what is left over of it waits for the next line.
constexpr int kSector = 16;                            // outputs
constexpr int kStored = WHOLE_SECTORS ? 8 : VECTOR;    // that a thread stores together
constexpr int kLineOutputs = LINE_CELLS * SPAN_W;
static_assert(!WHOLE_SECTORS || (kLineOutputs % kSector == 0 && COLUMNS * SPAN_W % kSector == 0 && LINE_PITCH % 8 == 0 &&
                                 LINE_PITCH >= kLineOutputs + kSector),
              "lines are whole sectors, and a sector lies behind them");

/* How many outputs lie between the beginning of a sector and one in memory. */
__device__ __forceinline__ int beyond_sector(const ELEMENT_T* output) {
    return WHOLE_SECTORS ? static_cast<int>(reinterpret_cast<unsigned long long>(output) / sizeof(ELEMENT_T) % kSector) : 0;
}

#if WHOLE_SECTORS
using piece_t = vector_t<kStored>;  // as lanes write them: what is read as another type may be read before

/* Stores those of a piece, whose first is in `column` of a row, that the row has. */
__device__ __forceinline__ void store_piece(ELEMENT_T* to, const piece_t& piece, int column, int width) {
    if (column < 0 || column + kStored > width) {
        #pragma unroll
        for (int e = 0; e < kStored; e += VECTOR) {
            // VECTOR divides the row, and where it begins.
            if (static_cast<unsigned>(column + e) >= width) continue;
            vector_t<VECTOR> part;
            #pragma unroll
            for (int i = 0; i < VECTOR; ++i) part.value[i] = piece.value[e + i];
            *reinterpret_cast<vector_t<VECTOR>*>(to + e) = part;
        }
    } else {
        unsigned words[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const ELEMENT_T pair[2] = {piece.value[i * 2], piece.value[i * 2 + 1]};
            words[i] = mma_words<ELEMENT_T>::pack(pair);
        }
        store_words(to, words, 1);
    }
}
#else
using piece_t = words_t<kStored * static_cast<int>(sizeof(ELEMENT_T))>;
__device__ __forceinline__ void store_piece(ELEMENT_T* to, const piece_t& piece, int, int) {
    *reinterpret_cast<piece_t*>(to) = piece;
}
#endif

/* Folds the columns of a step, adds the bias and stores, by way of shared memory: a warp has whole lines of channels.
 * `ow` is where the step's first cell begins in the row, and may lie before it; `there` is false for rows beyond the image.
 * `early` is how far behind a sector's beginning lines g and g + 8 begin.
 */
__device__ __forceinline__ void fold(
    const gemm_fold_rows_params& p, const sums_t& sums, before_t& before, const float (&bias)[2 / SLOTS],
    const int (&early)[2 / SLOTS], int channels, ELEMENT_T* stage, ELEMENT_T* target, int ow, bool there) {
    constexpr int kRun = 2 * SPAN_W, kWord = gcd(kRun, WHOLE_SECTORS ? VECTOR : 8);  // outputs of two cells; written together
    constexpr int kParts = COLUMNS / LINE_CELLS, kPieces = kLineOutputs / kStored;
    // Of a turn: pieces of a line, and lines; how many turns have their pieces in registers together.
    constexpr int kAcross = least(kPieces, 32), kAtOnce = least(power_within(32 / kAcross), kWarpOuts);
    constexpr int kTurns = kWarpOuts / kAtOnce;
    constexpr int kTogether = least(kTurns, kStored == 1 ? 8 : WHOLE_SECTORS ? 4 : 16 / kStored);
    constexpr bool kFull = OUT_CHANNELS % (kSides * kOuts) == 0;  // all output channels are there
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const long long pixels = static_cast<long long>(p.h_out) * p.w_out;
    each<kParts>([&](auto part) {
        constexpr int kFirstCell = decltype(part)::value * LINE_CELLS;
        const int first = ow + kFirstCell * SPAN_W;
        if (!there || first - (WHOLE_SECTORS ? kSector - 1 : 0) >= p.w_out) return;  // and nothing comes after it
        __syncwarp();
        each<LINE_CELLS / 8>([&](auto tile) {
            constexpr int kBlock = kFirstCell / 8 + decltype(tile)::value;
            each<2 / SLOTS>([&](auto half) {
                constexpr int kHalf = decltype(half)::value;
                float outputs[kRun];
                each<kRun>([&](auto i_) {
                    constexpr int i = decltype(i_)::value;
                    outputs[i] = folded<kBlock, kHalf, i % SPAN_W, i / SPAN_W>(sums, before, bias[kHalf], lane);
                });
                ELEMENT_T* to =
                    stage + ((kHalf * 8 + g) * LINE_PITCH + (decltype(tile)::value * 8 + 2 * t) * SPAN_W + early[kHalf]);
                #pragma unroll
                for (int i = 0; i < kRun; i += kWord) {
                    vector_t<kWord> word;
                    #pragma unroll
                    for (int e = 0; e < kWord; ++e) word.value[e] = narrow<ELEMENT_T>(outputs[i + e]);
                    *reinterpret_cast<vector_t<kWord>*>(to + i) = word;
                }
            });
        });
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < kPieces; i += kAcross) {
            const int piece = i + lane % kAcross, column = first + piece * kStored;
            if (lane >= kAtOnce * kAcross || piece >= kPieces) continue;
            // VECTOR divides the output's width, and where steps begin: all outputs of such a piece are there, or none.
            if (!WHOLE_SECTORS && static_cast<unsigned>(column) >= p.w_out) continue;
            int line = lane / kAcross;
            const ELEMENT_T* from = stage + line * LINE_PITCH + piece * kStored;
            ELEMENT_T* to = target + (line * pixels + column);
            #pragma unroll
            for (int turn = 0; turn < kTurns; turn += kTogether) {
                piece_t pieces[kTogether];
                #pragma unroll
                for (int k = 0; k < least(kTogether, kTurns - turn); ++k, from += kAtOnce * LINE_PITCH)
                    pieces[k] = *reinterpret_cast<const piece_t*>(from);
                #pragma unroll
                for (int k = 0; k < least(kTogether, kTurns - turn); ++k, to += kAtOnce * pixels, line += kAtOnce) {
                    // The same for all pieces of a line, which are half sectors.
                    const int behind = beyond_sector(to - piece * kStored);
                    if (kFull || line < channels) store_piece(to - behind, pieces[k], column - behind, p.w_out);
                }
            }
        }
        if constexpr (WHOLE_SECTORS) {
            __syncwarp();
            ELEMENT_T* left = stage + (lane / 2 * LINE_PITCH + lane % 2 * 8);
            if (lane / 2 < kWarpOuts) *reinterpret_cast<piece_t*>(left) = *reinterpret_cast<const piece_t*>(left + kLineOutputs);
        }
    });
}

/* A warpgroup's part of item after item. `warpgroup` is the same for a whole warp, as far as the compiler can see. */
__device__ __forceinline__ void consume(const gemm_fold_rows_params& p, const set_t& set, barriers_t& barriers, int warpgroup) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, side = ROWS == 1 ? warpgroup : 0;
    const bool speaker = lane == 0;  // arrives at barriers for its warp
    const descriptor_t weights = descriptor_k_major(shared + kFirstWeight + side * kSideBytes, 64 * 16, 128);
    const descriptor_t inputs = descriptor_mn_major(shared, kBoxBytes, 1024);
    ELEMENT_T* const stage = reinterpret_cast<ELEMENT_T*>(shared + kFirstOutput) + (warpgroup * 4 + warp) * kWarpOutputs;

    const int first_out = (set.channels * kSides + side) * kOuts + warp * kWarpOuts;
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
        const int row = item.row + (ROWS == 2 ? warpgroup : 0), oh = row * PHASES + set.phase;
        const bool there = row < p.cells_h && oh < p.h_out;
        const long long plane = (static_cast<long long>(item.image) * p.groups + set.group) * OUT_CHANNELS + first_out;
        ELEMENT_T* const target = p.output + (plane * p.h_out + oh) * p.w_out;
        int early[2 / SLOTS];
        #pragma unroll
        for (int half = 0; half < 2 / SLOTS; ++half) {
            const long long line = static_cast<long long>(half * 8 + lane / 4) * p.h_out * p.w_out;
            early[half] = beyond_sector(target + (line - DELAYED * SPAN_W));
        }
        sums_t sums;
        before_t before = {};
        int step = 0;
        #pragma unroll 1
        for (; step * COLUMNS < p.columns; ++step) {
            if (warpgroup == 0) named_barrier_sync<kTurnOf0, 256>();
            else named_barrier_sync<kTurnOf1, 256>();
            barrier_wait(barriers.full[ring.stage], ring.parity);
            int accumulate = 0;
            wgmma_fence();
            #pragma unroll 1
            for (int i = 0; i < INPUT_ROWS; ++i) {
                const int tap = kRowTap[(set.phase * INPUT_ROWS + i) * 2 + (ROWS == 2 ? warpgroup : 0)];
                if (tap < 0) continue;
                const descriptor_t left = advance(weights, tap * kTapBytes);
                const descriptor_t right = advance(inputs, ring.stage * kStageBytes + i * kRowBytes);
                #pragma unroll
                for (int k = 0; k < kSteps; ++k)
                    #pragma unroll
                    for (int tile = 0; tile < TILES; ++tile)
                        wgmma<ELEMENT_T, COLUMNS, true>(sums[tile], advance(left, tile * kTileBytes + k * 2048),
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
            fold(p, sums, before, bias, early, channels, stage, target, (step * COLUMNS - DELAYED) * SPAN_W, there);
        }
        // Behind the row's end there are no columns but those that are late, and outputs that hold the bias alone.
        #pragma unroll 1
        for (; step < p.steps; ++step)
            fold(p, {}, before, bias, early, channels, stage, target, (step * COLUMNS - DELAYED) * SPAN_W, there);
    });
    if (warpgroup == 0) named_barrier_sync<kTurnOf0, 256>();  // the other's last turn has ended
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) sm90_gemm_fold_rows_kernel(const __grid_constant__ gemm_fold_rows_params p) {
    barriers_t& barriers = *reinterpret_cast<barriers_t*>(shared + kFirstBarrier);
    begin_barriers(barriers);
    const set_t set = set_of(p);
    const auto produce = [&] {
        if (threadIdx.x == 0) produce_inputs(p, set, barriers);
        else if (threadIdx.x == 32) produce_weights<kWeightBytes, kTapBytes>(p, set, shared + kFirstWeight, barriers.weights);
    };
    run_roles<kProducers, 128, 240, 24>(produce, [&](int warpgroup) { consume(p, set, barriers, warpgroup); });
}
