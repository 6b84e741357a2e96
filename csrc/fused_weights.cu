/* Lays the weights out for fused_wgmma.cu: as the matrices that its steps multiply with, in the order of the steps.
 *
 *   packed [groups][sets][chunks][steps][parts][UNITS][ROWS] of 16 bytes
 *
 * A set is what a block of fused_wgmma.cu owns at a time: the M blocks of one phase set, for one block of output channels or
 * for one of each warpgroup. A step has one shift from a cell to an input; for each row of an M block that is (phase, output
 * channel), and for a unit of input channels, the weight is that of the tap with which the shift reaches the phase:
 *
 *   k = (r + P - shift * S) / D     where that is a tap, and zero elsewhere
 *   k = (shift + P - r * S) / D     in an input gradient, where output channels of the layer are input channels here
 *
 * float32 is rounded to TF32, or split into two parts of TF32 whose sum it is but for its last two bits.
 *
 * Macros: those of fused_wgmma.cu; INPUT_GRAD; KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W; STEP_SHIFT_H, STEP_SHIFT_W
 * (tables: the shift of each step).
 */
#include "common/dependent.cuh"
#include "common/rows.cuh"
#include "common/units.cuh"

struct fused_weights_params {
    const ELEMENT_T* __restrict__ weight;
    unit_t* __restrict__ packed;
    int slice;  // steps of a thread
};

constexpr int kElements = elements_of_unit<ELEMENT_T>;
constexpr int kParts = SPLIT ? 2 : 1;
constexpr int kRows = WARPGROUPS_M * 64;
__constant__ constexpr int kStepBegin[] = STEP_BEGIN;
__constant__ constexpr int kStepShiftH[] = STEP_SHIFT_H;
__constant__ constexpr int kStepShiftW[] = STEP_SHIFT_W;
__constant__ constexpr int kPhases[] = PHASES;

/* The tap of an axis that reaches output r of a cell with a shift, or -1. */
template <int KERNEL, int STRIDE, int PADDING, int DILATION> __device__ __forceinline__ int tap_of(int r, int shift) {
    const int reach = INPUT_GRAD ? shift + PADDING - r * STRIDE : r + PADDING - shift * STRIDE;
    return reach >= 0 && reach % DILATION == 0 && reach / DILATION < KERNEL ? reach / DILATION : -1;
}

/* A grid of (rows and units of all chunks, and slices of the steps; sets; groups). A thread has one row and one unit for all
 * steps of its slice: taps lie beside each other in memory, so what one step loads is in the cache for the next.
 */
extern "C" __global__ void __launch_bounds__(256) fused_weights_kernel(const __grid_constant__ fused_weights_params p) {
    allow_next_launch();
    constexpr int kUnits = UNITS * CHUNKS;
    const int phase_set = blockIdx.y / CHANNEL_SETS, channel_set = blockIdx.y % CHANNEL_SETS;
    const int first_step = kStepBegin[phase_set * BLOCKS], steps = kStepBegin[(phase_set + 1) * BLOCKS] - first_step;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = i % kRows, unit = i / kRows % kUnits, begin = i / (kRows * kUnits) * p.slice;
    const int end = min(begin + p.slice, steps);

    const row_t place = place_of_row(row % 64);
    constexpr int kChannelSides = WARPGROUPS_M / PHASE_SIDES;
    const int side = row / 64, out = (channel_set * kChannelSides + (PHASE_SIDES == 2 ? 0 : side)) * CHANNELS + place.channel;
    const int first_block = (phase_set * PHASE_SIDES + (PHASE_SIDES == 2 ? side : 0)) * BLOCKS;
    const bool inside = place.slot < SLOTS && place.channel < CHANNELS && out < OUT_CHANNELS;
    constexpr long long kTaps = KERNEL_H * KERNEL_W, kChannelStride = kTaps * (INPUT_GRAD ? 1 : OUT_CHANNELS);
    const long long first = blockIdx.z * (IN_CHANNELS * OUT_CHANNELS * kTaps);
    const ELEMENT_T* __restrict__ source =
        p.weight + first + unit * kElements * kChannelStride + out * (INPUT_GRAD ? IN_CHANNELS * kTaps : kTaps);
    const long long sets_before = static_cast<long long>(blockIdx.z) * CHANNEL_SETS;
    const long long steps_before = sets_before * STEPS + first_step * CHANNEL_SETS + channel_set * steps;
    const long long matrix = steps_before * CHUNKS + unit / UNITS * steps;
    unit_t* target = p.packed + (matrix * kParts * UNITS + unit % UNITS) * kRows + row;

    #pragma unroll 2
    for (int step = begin; step < end; ++step) {
        int block = 0;
        for (int b = 1; b < BLOCKS; ++b) block += first_step + step >= kStepBegin[phase_set * BLOCKS + b];
        const int phase = inside ? kPhases[(first_block + block) * SLOTS + place.slot] : -1;
        const int kh = tap_of<KERNEL_H, STRIDE_H, PADDING_H, DILATION_H>(phase / PHASE_BASE, kStepShiftH[first_step + step]);
        const int kw = tap_of<KERNEL_W, STRIDE_W, PADDING_W, DILATION_W>(phase % PHASE_BASE, kStepShiftW[first_step + step]);
        ELEMENT_T values[kElements] = {};
        if (phase >= 0 && kh >= 0 && kw >= 0) {
            #pragma unroll
            for (int e = 0; e < kElements; ++e)
                if (unit * kElements + e < IN_CHANNELS)
                    values[e] = load_once(source + e * kChannelStride + kh * KERNEL_W + kw);
        }
        const parts_t<kParts> parts = pack_unit<kParts>(values);
        #pragma unroll
        for (int part = 0; part < kParts; ++part) target[(step * kParts + part) * (UNITS * kRows)] = parts.part[part];
    }
}
