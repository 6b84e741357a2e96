/* The gradient of a bias: grad_output, added up over images and pixels.
 *
 *   grad_output [images, channels, pixels], or [images, pixels, channels] with CHANNELS_LAST
 *       -> grad_bias [channels], or sums [slices, channels] where there are several, which splits/reduce.cu adds up
 *
 * In NCHW a block has one channel, and its threads take vectors of pixels in turns; in channels_last a block has LANES
 * vectors of channels, and its threads take pixels in turns. Either has one slice of the items, and adds up the sums of
 * its threads in one order.
 *
 * Macros: ELEMENT_T, SUM_T (of grad_bias: as in splits/reduce.cu), CHANNELS_LAST, VECTOR (elements that are loaded together),
 * LANES (a power of two, in channels_last).
 */
#include "numeric/divide.cuh"
#include "numeric/types.cuh"

using accumulate_t = accumulator_t<ELEMENT_T>;

struct bias_grad_params {
    const ELEMENT_T* __restrict__ grad_output;
    accumulate_t* __restrict__ sums;
    SUM_T* __restrict__ grad_bias;  // null where there are several slices
    unsigned long long by_units;  // 2^63 / units: see numeric/divide.cuh
    int channels, units, items, share;  // units of an image, in NCHW; items to add up in all, and of a slice
};

constexpr int kThreads = 256;
constexpr int kLanes = CHANNELS_LAST ? LANES : 1;           // threads beside each other, with channels of their own
constexpr int kOwn = CHANNELS_LAST ? VECTOR : 1;            // channels of a thread
struct alignas(VECTOR * sizeof(ELEMENT_T)) vector_t { ELEMENT_T value[VECTOR]; };

__device__ __forceinline__ const vector_t* item(const bias_grad_params& p, int i, int first_channel) {
    if (CHANNELS_LAST)
        return reinterpret_cast<const vector_t*>(p.grad_output + static_cast<long long>(i) * p.channels + first_channel);
    const int image = divided(i, p.by_units);
    const long long plane = static_cast<long long>(image) * p.channels + first_channel;
    return reinterpret_cast<const vector_t*>(p.grad_output) + (plane * p.units + (i - image * p.units));
}

extern "C" __global__ void __launch_bounds__(kThreads) splits_bias_grad_kernel(const __grid_constant__ bias_grad_params p) {
    __shared__ accumulate_t totals[kThreads][kOwn];
    const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
    const int first_channel = (blockIdx.x * kLanes + lane) * kOwn;
    const int begin = blockIdx.y * p.share, end = min(p.items, begin + p.share);
    accumulate_t sum[kOwn] = {};
    if (first_channel < p.channels) {
        #pragma unroll 2
        for (int i = begin + row; i < end; i += kThreads / kLanes) {
            const vector_t values = *item(p, i, first_channel);
            #pragma unroll
            for (int v = 0; v < VECTOR; ++v) sum[v % kOwn] += widen(values.value[v]);
        }
    }
    #pragma unroll
    for (int c = 0; c < kOwn; ++c) totals[threadIdx.x][c] = sum[c];
    #pragma unroll
    for (int apart = kThreads / 2; apart >= kLanes; apart /= 2) {
        __syncthreads();
        if (threadIdx.x >= apart) continue;
        #pragma unroll
        for (int c = 0; c < kOwn; ++c) totals[threadIdx.x][c] += totals[threadIdx.x + apart][c];
    }
    if (threadIdx.x >= kLanes || first_channel >= p.channels) return;
    #pragma unroll
    for (int c = 0; c < kOwn; ++c) {
        const accumulate_t total = totals[threadIdx.x][c];
        if (p.grad_bias != nullptr) p.grad_bias[first_channel + c] = narrow<SUM_T>(widen(narrow<ELEMENT_T>(total)));
        else p.sums[static_cast<long long>(blockIdx.y) * p.channels + first_channel + c] = total;
    }
}
