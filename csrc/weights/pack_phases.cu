/* Lays the weights out for sm90/implicit_gemm.cu: as the matrices that its steps multiply with, in the order of the steps.
 *
 *   packed [groups][sets][chunks][steps][parts][UNITS][ROWS] of 16 bytes
 *
 * A set is what a block of sm90/implicit_gemm.cu owns at a time: the M blocks of one phase set, for one block of output channels or
 * for one of each warpgroup. A step has one shift from a cell to an input; for each row of an M block that is (phase, output
 * channel), and for a unit of input channels, the weight is that of the tap with which the shift reaches the phase:
 *
 *   k = (r + P - shift * S) / D     where that is a tap, and zero elsewhere
 *   k = (shift + P - r * S) / D     in an input gradient, where output channels of the layer are input channels here
 *
 * float32 is rounded to TF32, or split into two parts of TF32 whose sum it is but for its last two bits.
 *
 * Weights are read where they lie beside each other, and written in pieces of kRowsAlong rows or more. In NCHW those are taps
 * of a channel, and channels of an input channel (of an output channel in an input gradient): neighbouring threads have the
 * same few rows, and step after step. In channels_last they are output channels: neighbouring threads have row after row (in
 * an input gradient a thread's own elements are neighbours).
 *
 * Macros: those of sm90/implicit_gemm.cu; INPUT_GRAD; KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W; STEP_SHIFT_H, STEP_SHIFT_W
 * (tables: the shift of each step); TOGETHER.
 */
#include "ptx/pdl.cuh"
#include "numeric/integers.cuh"
#include "geometry/rows.cuh"
#include "numeric/units.cuh"

struct pack_phases_params {
    const ELEMENT_T* __restrict__ weight;
    unit_t* __restrict__ packed;
    int channels_last;  // how the weights lie
};

constexpr int kThreads = 256;
constexpr int kElements = elements_of_unit<ELEMENT_T>;
constexpr int kParts = SPLIT ? 2 : 1;
constexpr int kRows = WARPGROUPS_M * 64, kUnits = UNITS * CHUNKS;
constexpr int kRowsAlong = 4;                  // 64 bytes; of weights in NCHW
constexpr int kStepsAlong = least(STEPS, 32);  // of a block
constexpr int kSidePhases = PHASE_SIDES * SLOTS;
__constant__ constexpr int kStepBegin[] = STEP_BEGIN;
__constant__ constexpr int kStepShiftH[] = STEP_SHIFT_H;
__constant__ constexpr int kStepShiftW[] = STEP_SHIFT_W;
__constant__ constexpr int kPhases[] = PHASES;

/* The tap of an axis that reaches output r of a cell with a shift, or -1. */
template <int KERNEL, int STRIDE, int PADDING, int DILATION> __device__ __forceinline__ int tap_of(int r, int shift) {
    const int reach = INPUT_GRAD ? shift + PADDING - r * STRIDE : r + PADDING - shift * STRIDE;
    return reach >= 0 && reach % DILATION == 0 && reach / DILATION < KERNEL ? reach / DILATION : -1;
}

/* The tap that reaches a phase with a step's shift, or -1. */
__device__ __forceinline__ int tap_of_step(int step, int phase) {
    const int kh = tap_of<KERNEL_H, STRIDE_H, PADDING_H, DILATION_H>(phase / PHASE_BASE, kStepShiftH[step]);
    const int kw = tap_of<KERNEL_W, STRIDE_W, PADDING_W, DILATION_W>(phase % PHASE_BASE, kStepShiftW[step]);
    return phase >= 0 && kh >= 0 && kw >= 0 ? kh * KERNEL_W + kw : -1;
}

/* The last place of the table STEP_BEGIN that is not beyond a step: the block of a phase set that has it. */
__device__ __forceinline__ int block_of(int step) {
    int place = 0, behind = PHASE_SETS * BLOCKS;
    while (behind - place > 1) {
        const int middle = (place + behind) / 2;
        if (kStepBegin[middle] <= step) place = middle;
        else behind = middle;
    }
    return place;
}

/* A step of a block. */
struct step_t {
    long long matrix;       // of the first chunk
    int matrices;           // to that of the next chunk
    int taps[kSidePhases];  // of each phase of a side's M block, or -1
};

/* A grid of (rows and units of all chunks; blocks of steps, and channel sets; groups). A thread has TOGETHER units of a row of
 * a step, whose loads are on their way together.
 */
extern "C" __global__ void __launch_bounds__(kThreads) weights_pack_phases_kernel(const __grid_constant__ pack_phases_params p) {
    launch_dependents();
    __shared__ step_t block_steps[kStepsAlong];
    const int channel_set = blockIdx.y % CHANNEL_SETS, first = blockIdx.y / CHANNEL_SETS * kStepsAlong;
    const int along = least(kStepsAlong, STEPS - first);
    if (threadIdx.x < along) {
        const int step = first + threadIdx.x, place = block_of(step), phase_set = place / BLOCKS;
        const int set_first = kStepBegin[phase_set * BLOCKS], steps = kStepBegin[(phase_set + 1) * BLOCKS] - set_first;
        const long long matrices_before =
            static_cast<long long>(blockIdx.z) * CHANNEL_SETS * STEPS + set_first * CHANNEL_SETS + channel_set * steps;
        step_t& own = block_steps[threadIdx.x];
        own.matrix = matrices_before * CHUNKS + step - set_first;
        own.matrices = steps;
        for (int i = 0; i < kSidePhases; ++i) {
            const int block = (phase_set * PHASE_SIDES + i / SLOTS) * BLOCKS + place % BLOCKS;
            own.taps[i] = tap_of_step(step, kPhases[block * SLOTS + i % SLOTS]);
        }
    }
    __syncthreads();

    const int i = blockIdx.x * kThreads + threadIdx.x;
    int row = i % kRows, along_steps = i / kRows % kStepsAlong;
    const int unit = i / (kRows * kStepsAlong);
    if (!p.channels_last) {
        const int rows = i / (kRowsAlong * kStepsAlong) % (kRows / kRowsAlong);
        row = rows * kRowsAlong + i % kRowsAlong;
        along_steps = i / kRowsAlong % kStepsAlong;
    }
    if (along_steps >= along || unit >= kUnits / TOGETHER) return;
    const step_t& step = block_steps[along_steps];
    const row_t place = place_of_row(row % 64);
    constexpr int kChannelSides = WARPGROUPS_M / PHASE_SIDES;
    const int side = row / 64, out = (channel_set * kChannelSides + (PHASE_SIDES == 2 ? 0 : side)) * CHANNELS + place.channel;
    const bool inside = place.slot < SLOTS && place.channel < CHANNELS && out < OUT_CHANNELS;
    const int tap = inside ? step.taps[(PHASE_SIDES == 2 ? side : 0) * SLOTS + place.slot] : -1;

    ELEMENT_T values[TOGETHER][kElements] = {};
    if (tap >= 0) {
        // The layer's own: [input channels][output channels][taps], or [input channels][taps][output channels].
        constexpr long long kTaps = KERNEL_H * KERNEL_W, kLayerOut = INPUT_GRAD ? IN_CHANNELS : OUT_CHANNELS;
        // From one input channel to the next, and from one output channel.
        const long long far = kTaps * kLayerOut, near = p.channels_last ? 1 : kTaps;
        const long long stride = INPUT_GRAD ? near : far;
        const ELEMENT_T* __restrict__ source = p.weight + blockIdx.z * (kTaps * IN_CHANNELS * OUT_CHANNELS) +
                                               unit * (TOGETHER * kElements) * stride + out * (INPUT_GRAD ? far : near) +
                                               tap * (p.channels_last ? kLayerOut : 1);
        #pragma unroll
        for (int e = 0; e < TOGETHER * kElements; ++e)
            if (unit * (TOGETHER * kElements) + e < IN_CHANNELS)
                values[e / kElements][e % kElements] = load_once(source + e * stride);
    }
    // TOGETHER divides UNITS.
    const long long matrix = step.matrix + static_cast<long long>(unit / (UNITS / TOGETHER)) * step.matrices;
    unit_t* target = p.packed + (matrix * (kParts * UNITS) + unit % (UNITS / TOGETHER) * TOGETHER) * kRows + row;
    #pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        const parts_t<kParts> parts = pack_unit<kParts>(values[i]);
        #pragma unroll
        for (int part = 0; part < kParts; ++part) target[part * (UNITS * kRows) + i * kRows] = parts.part[part];
    }
}
