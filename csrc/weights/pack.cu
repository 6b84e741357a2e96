/* Packs the weights: lays them out as the matrices that a kernel of fused multiplies with, in the order of its steps.
 *
 *   packed [groups][sets of steps][CHANNEL_SETS][CHUNKS][steps of the set][parts][UNITS][SIDES][ROWS] of 16 bytes
 *
 * A row of a step's matrix is a slot and an output channel (geometry/rows.cuh), and a unit is neighbouring input channels. The
 * weight is that of the tap that the step has for the slot: STEP_TABLE has for each step where its set begins, how many steps are
 * in it, and the tap of each slot, -1 for none. Rows, taps and channels that there are not are zeros.
 *
 *   16 bits, ROWS_PLAIN, CHANNELS = 16: row 20 is channel 4 of slot 1; its unit 2 has input channels 16 to 23 of a chunk
 *
 * float32 is rounded to TF32, or split into two parts of TF32 whose sum it is but for its last two bits.
 *
 * Reads take contiguous weights, and writes are pieces of kRowsAlong rows or more. In NCHW contiguous weights are taps
 * of a channel, and channels of an input channel (of an output channel in an input gradient): neighbouring threads have the
 * same few rows, and step after step. In channels_last they are output channels: neighbouring threads have row after row (in
 * an input gradient a thread's own elements are neighbours).
 *
 * With FRAGMENTS a row of units is [4][UNITS] words, the first words of all units before the second ones: mma.sync's lanes of a row
 * each read theirs at once.
 *
 * Macros: ELEMENT_T, SPLIT; FRAGMENTS; INPUT_GRAD (output channels of the layer are input channels here); IN_CHANNELS, OUT_CHANNELS (of a
 * group), TAPS; STEPS, STEP_TABLE; CHANNEL_SETS, CHUNKS, UNITS (of a chunk); SIDES, PHASE_SIDES (SIDES where sides have slots of
 * their own; 1 where they have output channels of their own); ROWS (of a side), SLOTS, CHANNELS, ROW_ORDER; CHANNEL_PAIRS (two
 * units of float32 have channels 0 1 4 5 and 2 3 6 7). Set by gemmconv/kernels/weights/pack.py.
 */
#include "ptx/pdl.cuh"
#include "numeric/integers.cuh"
#include "geometry/rows.cuh"
#include "numeric/units.cuh"

struct pack_params {
    const ELEMENT_T* __restrict__ weight;
    unit_t* __restrict__ packed;
    int channels_last;  // how the weights lie
};

constexpr int kElements = elements_of_unit<ELEMENT_T>;
constexpr int kThreads = 256, kOwn = FRAGMENTS ? UNITS * kElements : 8;  // input channels of a thread
constexpr int kOwnUnits = kOwn / kElements, kParts = SPLIT ? 2 : 1;
constexpr int kRows = SIDES * ROWS, kPlaces = PHASE_SIDES * SLOTS;
constexpr int kRowsAlong = 4;                  // 64 bytes; of weights in NCHW
constexpr int kStepsAlong = least(STEPS, 32);  // of a block
constexpr int kRowBlocks = ceil_div(CHUNKS * UNITS / kOwnUnits * kRows * kStepsAlong, kThreads);
constexpr int kStepBlocks = ceil_div(STEPS, kStepsAlong);
__constant__ constexpr short kSteps[STEPS][2 + kPlaces] = STEP_TABLE;
static_assert(UNITS % kOwnUnits == 0 && kRows % kRowsAlong == 0, "threads have whole pieces");

/* A step of a block. */
struct step_t {
    long long matrix;   // of the first chunk
    int matrices;       // to that of the next chunk
    int taps[kPlaces];  // of each slot of a side, or -1
};

/* Blocks of rows and channels, of steps, of channel sets, of groups. A thread has kOwn input channels of a row of a step, whose
 * loads are on their way together.
 */
extern "C" __global__ void __launch_bounds__(kThreads) weights_pack_kernel(const __grid_constant__ pack_params p) {
    launch_dependents();
    __shared__ step_t block_steps[kStepsAlong];
    const int set = blockIdx.x / (kRowBlocks * kStepBlocks), channel_set = set % CHANNEL_SETS, group = set / CHANNEL_SETS;
    const int first = blockIdx.x / kRowBlocks % kStepBlocks * kStepsAlong, along = least(kStepsAlong, STEPS - first);
    if (threadIdx.x < along) {
        const int step = first + threadIdx.x, set_first = kSteps[step][0], steps = kSteps[step][1];
        const long long matrices_before =
            static_cast<long long>(group) * CHANNEL_SETS * STEPS + set_first * CHANNEL_SETS + channel_set * steps;
        step_t& own = block_steps[threadIdx.x];
        own.matrix = matrices_before * CHUNKS + step - set_first;
        own.matrices = steps;
        for (int i = 0; i < kPlaces; ++i) own.taps[i] = kSteps[step][2 + i];
    }
    __syncthreads();

    const int i = blockIdx.x % kRowBlocks * kThreads + threadIdx.x;
    int row = i % kRows, along_steps = i / kRows % kStepsAlong;
    const int channel = i / (kRows * kStepsAlong) * kOwn, unit = channel / kElements;
    if (!p.channels_last) {
        row = i / (kRowsAlong * kStepsAlong) % (kRows / kRowsAlong) * kRowsAlong + i % kRowsAlong;
        along_steps = i / kRowsAlong % kStepsAlong;
    }
    if (along_steps >= along || unit >= CHUNKS * UNITS) return;
    const step_t& step = block_steps[along_steps];
    const row_t place = place_of_row(row % ROWS);
    const int phase_side = PHASE_SIDES == 1 ? 0 : row / ROWS, channel_side = PHASE_SIDES == 1 ? row / ROWS : 0;
    const int out = (channel_set * (SIDES / PHASE_SIDES) + channel_side) * CHANNELS + place.channel;
    const bool inside = place.slot < SLOTS && place.channel < CHANNELS && out < OUT_CHANNELS;
    const int tap = inside ? step.taps[phase_side * SLOTS + place.slot] : -1;

    ELEMENT_T values[kOwnUnits][kElements] = {};
    if (tap >= 0) {
        // The layer's own: [input channels][output channels][taps], or [input channels][taps][output channels].
        constexpr long long kTaps = TAPS, kLayerOut = INPUT_GRAD ? IN_CHANNELS : OUT_CHANNELS;
        // From one input channel to the next, and from one output channel.
        const long long far = kTaps * kLayerOut, near = p.channels_last ? 1 : kTaps, stride = INPUT_GRAD ? near : far;
        const ELEMENT_T* __restrict__ source = p.weight + group * (kTaps * IN_CHANNELS * OUT_CHANNELS) + channel * stride +
                                               out * (INPUT_GRAD ? far : near) + tap * (p.channels_last ? kLayerOut : 1);
        #pragma unroll
        for (int e = 0; e < kOwn; ++e) {
            const int own = CHANNEL_PAIRS ? e / 4 * 2 + e % 4 / 2 * 4 + e % 2 : e;
            if (channel + own < IN_CHANNELS) values[e / kElements][e % kElements] = load_once(source + own * stride);
        }
    }
    const long long matrix = step.matrix + static_cast<long long>(unit / UNITS) * step.matrices;
#if FRAGMENTS
    parts_t<kParts> parts[UNITS];
    #pragma unroll
    for (int u = 0; u < UNITS; ++u) parts[u] = pack_unit<kParts>(values[u]);
    auto* target = reinterpret_cast<words_t<UNITS * 4>*>(p.packed + matrix * (kParts * UNITS) * kRows) + row * 4;
    #pragma unroll
    for (int part = 0; part < kParts; ++part, target += kRows * 4)
        #pragma unroll
        for (int word = 0; word < 4; ++word) {
            words_t<UNITS * 4> together;
            #pragma unroll
            for (int u = 0; u < UNITS; ++u) together.word[u] = parts[u].part[part].word[word];
            target[word] = together;
        }
#else
    unit_t* target = p.packed + (matrix * (kParts * UNITS) + unit % UNITS) * kRows + row;
    #pragma unroll
    for (int u = 0; u < kOwnUnits; ++u) {
        const parts_t<kParts> parts = pack_unit<kParts>(values[u]);
        #pragma unroll
        for (int part = 0; part < kParts; ++part) target[part * (UNITS * kRows) + u * kRows] = parts.part[part];
    }
#endif
}
