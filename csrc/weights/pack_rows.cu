/* Lays the weights out for sm90/gemm_fold_rows.cu: for each set, side, tap down and tile of taps across, LINES
 * rows of output channels.
 *
 *   packed [groups][PHASES][CHANNEL_SETS][SIDES][WEIGHT_ROWS][TILES][units of channels][LINES] of 16 bytes
 *
 * A tile has SLOTS taps of OUTS output channels, one after the other; but of values of 16 bits, with two SLOTS, rows g and g +
 * 8 of each 16 are two taps of one. The channels of units of float32 are in the order that it wants of TF32. A phase that has
 * fewer taps down than the one that has most leaves zeros, as do channels and taps that there are not.
 *
 * Macros: those of the kernels; SIDES, TILES, SLOTS, OUTS, LINES; INPUT_GRAD (output channels of the layer are input channels
 * here); KERNEL_H, KERNEL_W; TAP_H (table: of each phase WEIGHT_ROWS taps down, -1 for none), TAP_W (table: taps across of
 * TILES * SLOTS).
 */
#include "ptx/pdl.cuh"
#include "numeric/integers.cuh"
#include "numeric/units.cuh"

struct pack_rows_params {
    const ELEMENT_T* __restrict__ weight;
    unit_t* __restrict__ packed;
    int channels_last;  // how the weights lie
    int units;          // to lay out
};

constexpr int kThreads = 256, kElements = elements_of_unit<ELEMENT_T>, kUnits = CHANNELS / kElements;
constexpr bool kPaired = SLOTS == 2 && sizeof(ELEMENT_T) == 2;
__constant__ constexpr int kTapH[] = TAP_H;
__constant__ constexpr int kTapW[] = TAP_W;

/* Which input channel an element of a unit is. */
__device__ __forceinline__ int channel_of(int unit, int e) {
    if (sizeof(ELEMENT_T) == 2) return unit * kElements + e;
    return unit / 2 * 8 + unit % 2 * 2 + e / 2 * 4 + e % 2;
}

/* A thread lays out one unit: input channels of a row. */
extern "C" __global__ void __launch_bounds__(kThreads)
weights_pack_rows_kernel(const __grid_constant__ pack_rows_params p) {
    launch_dependents();
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= p.units) return;
    int place = i;
    const auto next = [&](int count) {
        const int digit = place % count;
        place /= count;
        return digit;
    };
    const int row = next(LINES), unit = next(kUnits), tile = next(TILES), down = next(WEIGHT_ROWS), side = next(SIDES);
    const int channels = next(CHANNEL_SETS), phase = next(PHASES), group = place;
    const int slot = kPaired ? row / 8 % 2 : row / OUTS, own = kPaired ? row / 16 * 8 + row % 8 : row % OUTS;
    const int out = (channels * SIDES + side) * OUTS + own;
    const int kh = kTapH[phase * WEIGHT_ROWS + down], kw = slot < SLOTS ? kTapW[tile * SLOTS + slot] : -1;

    ELEMENT_T values[kElements] = {};
    if (out < OUT_CHANNELS && kh >= 0 && kw >= 0) {
        // The layer's own: [input channels][output channels][taps], or [input channels][taps][output channels].
        constexpr int kTaps = KERNEL_H * KERNEL_W, kLayerOut = INPUT_GRAD ? IN_CHANNELS : OUT_CHANNELS;
        const int tap = kh * KERNEL_W + kw;
        #pragma unroll
        for (int e = 0; e < kElements; ++e) {
            const int in = channel_of(unit, e);
            if (in >= IN_CHANNELS) continue;
            const int of_in = INPUT_GRAD ? out : in, of_out = INPUT_GRAD ? in : out;
            const long long matrix = static_cast<long long>(group) * (INPUT_GRAD ? OUT_CHANNELS : IN_CHANNELS) + of_in;
            const int at = p.channels_last ? tap * kLayerOut + of_out : of_out * kTaps + tap;
            values[e] = load_once(p.weight + matrix * (kTaps * kLayerOut) + at);
        }
    }
    p.packed[i] = pack_unit<1>(values).part[0];
}
