/* fused for wide rows of float32 in NCHW, in products of TF32: as sm90/gemm_fold_rows.cu, with both sides of the product changed over.
 *
 * The right side of a product of TF32 lies in shared memory by channels, which rows of NCHW do not, and threads that lay them
 * out so are what sm90/implicit_gemm.cu spends most on. The left side may come from registers, so here it is inputs:
 *
 *   columns [i, (kw, co)] = sum over (kh, ci) of input [i, (kh, ci)] . weights [(kh, ci), (kw, co)]
 *   output [co, (cell, phase)] = bias [co] + sum over the taps kw of the phase of columns [cell + shift of kw, (kw, co)]
 *
 * with the same taps kh down, which sums of products have, and the same distances of the taps kw across, here along the rows of
 * a product. A block goes along ROWS rows of cells, 16 inputs a step, and each of the eight warps that multiply has a row of
 * its own: 16 rows of the left side, of which a thread has inputs 2g and 2g + 1. So to be late (see sm90/gemm_fold_rows.cu) is a shuffle
 * among the eight lanes g, the first of which get what the last had of the step before.
 *
 *   left   16 inputs of a row, of each of four warps; a thread loads what it multiplies from where boxes of a tensor map lie
 *   right  LINES: OUTS output channels of each tap across
 *   K      WEIGHT_ROWS taps down, each CHANNELS input channels, CHUNK of which are a stage
 *
 * A thread reads inputs 2g and 2g + 1 of a channel together, and of four lanes t each another channel. Lines of a box have 64
 * bytes, whose pieces of 16 lie in another order in every other pair of them; with channels 0, 1, 4 and 5 for the words t of a
 * step, and 2, 3, 6 and 7 for the words t + 4, each half of a warp reads from all banks. Weights lie in that order too.
 *
 * An infinite weight may make NaN of an output that its tap gives nothing, beyond the image, and an infinite input of what it
 * makes infinite, where a row phase has fewer taps down than another: the products that it lacks have weights of zero.
 *
 * Two warpgroups multiply by turns, as there; words of the first products are loaded before a turn, those of the others while
 * products run: of TAPS_TOGETHER taps down at a time, since whenever products are waited for some time goes by. One thread
 * begins all copies. Weights of a set stay in shared memory.
 *
 * What limits it: memory where there is much of it. A product of 64 x 8 x 192 keeps tensor cores busy for 96 cycles, and reads
 * weights for 48 and words for 16; beside that come boxes, shuffles and lines. A warp that folds is alone on its scheduler: while
 * each piece of a line was stored by a branch of its own, folds took longer than the products that were to hide them
 * (KernelBench 57 2366 us, and 2019). benchmarks/README.md has the measurements.
 *
 * Macros: ELEMENT_T (float); CHANNELS (of a group, up to a multiple of CHUNK), CHUNK (a multiple of 8), IN_CHANNELS,
 * OUT_CHANNELS (of a group); OUTS (a multiple of 8), LINES (up to a multiple of 16); ROWS (8); CHANNEL_SETS, PHASES (rows of a
 * cell: SPAN_H), SPAN_W; DELAYED, and tables DELAY and PHASE of each tap across; WEIGHT_ROWS (taps down, of the phase that has
 * most), TAPS_TOGETHER (of them, which it is a multiple of); INPUT_ROWS (of an item), tables FIRST_ROW (of each phase: from an
 * item's first cell to its first input row) and ROW_PLACE (of each phase, WEIGHT_ROWS: from a cell's first input row to that of
 * a tap); STAGES; VECTOR (outputs that rows and a lane's cells are multiples of), WHOLE_SECTORS (lines begin early, where
 * sectors do); SHARED_BYTES.
 * Chosen by gemmconv/kernels/sm90/gemm_fold_rows_tf32.py.
 */
#define WGMMA_COLUMNS LINES
#include "numeric/integers.cuh"
#include "ptx/keep.cuh"
#include "ptx/named_barrier.cuh"
#include "pipeline/persistent.cuh"
#include "pipeline/row_tiles.cuh"
#include "ptx/store.cuh"
#include "numeric/unroll.cuh"
#include "ptx/wgmma_rs.cuh"

constexpr int kColumns = 16, kLineBytes = kColumns * 4;
constexpr int kChunks = CHANNELS / CHUNK, kSteps = CHUNK / 8, kGroups = kChunks * WEIGHT_ROWS / TAPS_TOGETHER;
constexpr int kProducts = TAPS_TOGETHER * kSteps;
constexpr int kRowBytes = CHUNK * kLineBytes, kStageBytes = INPUT_ROWS * kRowBytes;
constexpr int kStepBytes = 2 * LINES * 16, kTapBytes = CHANNELS / 8 * kStepBytes, kWeightBytes = WEIGHT_ROWS * kTapBytes;
constexpr int kLaneOuts = OUTS / 4;  // output channels of a thread
static_assert(CHANNELS % CHUNK == 0 && CHUNK % 8 == 0 && OUTS % 8 == 0, "products are whole");
static_assert(kTapsAcross * OUTS <= LINES && LINES % 16 == 0 && LINES <= 256, "a product has all taps");
static_assert(WEIGHT_ROWS % TAPS_TOGETHER == 0, "groups of products are alike");
static_assert(STAGES > kChunks, "a warpgroup's turn ends only if all stages of a step may come before the other's");

__constant__ constexpr int kRowPlace[] = ROW_PLACE;

// Memory is written in sectors of 32 bytes, and a part of one costs as much as to read and to write all of it. Rows of outputs
// begin anywhere in a sector. So a line that is stored begins up to a sector early, with what was kept of the line before, and
// ends as early; in shared memory it lies as far behind a sector, so that its pieces of 16 bytes are those that are stored. 8 x
// 64 planes of 1026 x 1026 floats, in lines of 128 bytes, nothing else done: 1657 us, 8 x 32 planes of 514 x 1026 350 us, of 512
// x 1024 152 us.
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
static_assert(kFirstBarrier + sizeof(barriers_t) <= SHARED_BYTES, "what is shared fits");
extern __shared__ __align__(1024) unsigned char shared[];

constexpr int kBiasMeet = 3;  // a barrier of all warps that multiply

/* Copies the inputs of two steps after two steps, chunk after chunk: zeros for rows and columns that there are not. */
__device__ __forceinline__ void produce_inputs(const gemm_fold_rows_params& p, const set_t& set, barriers_t& barriers) {
    const int columns = ceil_div(p.columns, 2 * kColumns) * (2 * kColumns);
    ring_t ring;
    each_item<item_t>(p, kSets * p.groups, [&](const item_t& item) {
        #pragma unroll 1
        for (int column = 0; column < columns; column += kColumns)
            #pragma unroll 1
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                barrier_t& full = begin_stage(barriers, ring, kStageBytes);
                tma_load(shared + ring.stage * kStageBytes, p.map, column, set.group * IN_CHANNELS + chunk * CHUNK,
                         item.row + kFirstRow[set.phase], item.image, full);
                ring.advance(STAGES);
            }
    });
}

using sums_t = float[LINES / 2];
using words_of_group_t = unsigned[kProducts][4];

/* Of the step before, what taps give to other lanes: each output channel, phase, input and distance. */
using before_t = float[kLaneOuts][SPAN_W][2][kMostLanes];

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

/* The output of a phase at a lane's input E, of its output channel OUT. What comes from the same lane is added up there first. */
template <int OUT, int PHASE_, int E>
__device__ __forceinline__ float folded(const sums_t& sums, before_t& before, float bias, int lane) {
    float output = bias;
    each<kMostLanes + 1>([&](auto lanes_) {
        constexpr int lanes = decltype(lanes_)::value, first = first_to_give(PHASE_, E, lanes);
        if constexpr (first < kTapsAcross) {
            float given = 0.0f;
            each<kTapsAcross>([&](auto tap_) {
                constexpr int tap = decltype(tap_)::value;
                if constexpr (gives(tap, PHASE_, E, lanes)) {
                    constexpr int tile = tap * (OUTS / 8) + OUT / 2;
                    const float column = sums[4 * tile + 2 * column_of(kDelay[tap], E) + OUT % 2];
                    given = tap == first ? column : given + column;
                }
            });
            if constexpr (lanes == 0) {
                output += given;
            } else {
                float& last = before[OUT][PHASE_][E][lanes - 1];
                const float value = lane / 4 + lanes < 8 ? given : last;
                output += __shfl_sync(0xffffffffu, value, lane - 4 * lanes & 31);
                last = given;
            }
        }
    });
    return output;
}

/* The outputs of a lane's two cells of a step, of an output channel. */
using run_t = float[2 * SPAN_W];

/* Those of its output channel OUT, with the bias. */
template <int OUT>
__device__ __forceinline__ void fold(run_t& run, const sums_t& sums, before_t& before, const float* bias, int lane) {
    const float own = bias[OUT / 2 * 8 + OUT % 2];
    each<2 * SPAN_W>([&](auto i_) {
        constexpr int i = decltype(i_)::value;
        run[i] = folded<OUT, i % SPAN_W, i / SPAN_W>(sums, before, own, lane);
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
            vector_t<VECTOR> part;
            #pragma unroll
            for (int e = 0; e < VECTOR; ++e) part.value[e] = pieces[turn][i / kPiece].value[i % kPiece + e];
            *reinterpret_cast<vector_t<VECTOR>*>(to[turn] + place) = part;
        }
}

template <int COUNT> __device__ __forceinline__ void copy(float* to, const float* from) {
    *reinterpret_cast<vector_t<COUNT>*>(to) = *reinterpret_cast<const vector_t<COUNT>*>(from);
}

/* Folds the columns of a second step, and stores its outputs beside those of the first, by way of shared memory: a warp has
 * whole lines of eight channels at a time, which lie there as far behind a sector as in memory. What is left over of a line is
 * `kept` for the next one, by the lanes that put it there. Pieces are stored while the next eight channels fold. `ow` is where
 * lines begin in the row, and may lie beyond either end of it.
 */
__device__ __forceinline__ void fold_and_store(
    const run_t (&first)[kLaneOuts], const sums_t& sums, before_t& before, const float* bias, float* stage, float* kept,
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
    each<kLaneOuts / 2>([&](auto eight_) {
        constexpr int eight = decltype(eight_)::value;
        run_t second[2];
        each<2>([&](auto out_) {
            constexpr int out = decltype(out_)::value;
            fold<2 * eight + out>(second[out], sums, before, bias, lane);
        });
        if constexpr (eight > 0) store_eight(eight - 1);
        __syncwarp();  // all have read their pieces; shuffles say nothing of memory
        #pragma unroll
        for (int out = 0; out < 2; ++out) {
            float* const put = stage + ((2 * t + out) * kLinePitch + g * kRun + target.early(2 * t + out));
            #pragma unroll
            for (int i = 0; i < kRun; i += VECTOR) {
                vector_t<VECTOR> words[2];
                #pragma unroll
                for (int e = 0; e < VECTOR; ++e) {
                    words[0].value[e] = first[2 * eight + out][i + e];
                    words[1].value[e] = second[out][i + e];
                }
                *reinterpret_cast<vector_t<VECTOR>*>(put + i) = words[0];
                *reinterpret_cast<vector_t<VECTOR>*>(put + kHalfLine + i) = words[1];
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
    store_eight(kLaneOuts / 2 - 1);
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
            constexpr int group = decltype(group_)::value, down = group * TAPS_TOGETHER % WEIGHT_ROWS;
            if constexpr (down == 0) barrier_wait(barriers.full[ring.stage], ring.parity);
            each<TAPS_TOGETHER>([&](auto i_) {
                constexpr int i = decltype(i_)::value;
                load_words<i * kSteps>(words[group % 2], row_of(ring.stage, down + i), low, high);
            });
            settle_words(words[group % 2]);  // were one of them rounded where products run, those would be waited for
        };
        load_group(constant<0>());
        if (warpgroup == 0) named_barrier_sync<kTurnOf0, 256>();
        else named_barrier_sync<kTurnOf1, 256>();
        each<kGroups>([&](auto group_) {
            constexpr int group = decltype(group_)::value;
            constexpr int down = group * TAPS_TOGETHER % WEIGHT_ROWS;
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
        before_t before = {};
        run_t first[kLaneOuts];
        // Steps come two by two, and sums that are zero in steps of their own: were it asked of each whether it has columns, sums
        // would have to be moved.
        const auto line = [&](int step, auto has_columns_) {
            each<2>([&](auto half_) {
                constexpr int half = decltype(half_)::value;
                sums_t sums;
                if constexpr (decltype(has_columns_)::value) multiply(sums);
                else
                    #pragma unroll
                    for (int i = 0; i < LINES / 2; ++i) sums[i] = 0.0f;
                if (!there) return;
                if constexpr (half == 0)
                    each<kLaneOuts>([&](auto out) {
                        fold<decltype(out)::value>(first[decltype(out)::value], sums, before, bias + 2 * t, lane);
                    });
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

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sm90_gemm_fold_rows_tf32_kernel(const __grid_constant__ gemm_fold_rows_params p) {
    barriers_t& barriers = *reinterpret_cast<barriers_t*>(shared + kFirstBarrier);
    begin_barriers(barriers);
    const set_t set = set_of(p);
    const auto produce = [&] {
        if (threadIdx.x == 0) produce_inputs(p, set, barriers);
        else if (threadIdx.x == 32) produce_weights<kWeightBytes, kTapBytes>(p, set, shared + kFirstWeight, barriers.weights);
    };
    run_roles<kProducers, 32, 240, 24>(produce, [&](int own) { consume(p, set, barriers, own); });
}
