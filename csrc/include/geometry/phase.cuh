/* Phases of one axis: outputs o with the same (o + P) mod S read the same taps. See columns/col2im.cu for the algebra. */
#pragma once

#include "numeric/integers.cuh"

/* Taps of one phase are this far apart. */
__device__ constexpr int tap_step(int stride, int dilation) { return stride / gcd(stride, dilation); }

/* First tap that reaches position o + P of an axis; the kernel size or more where none does. */
template <int KERNEL, int STRIDE, int DILATION>
__device__ __forceinline__ int first_tap(int position) {
    constexpr int kStep = tap_step(STRIDE, DILATION);
    if (DILATION % STRIDE == 1 % STRIDE) return position % STRIDE;
    int tap = KERNEL;
    #pragma unroll (kStep <= 16 ? kStep : 1)
    for (int k = kStep - 1; k >= 0; --k)
        if ((position - k * DILATION) % STRIDE == 0) tap = k;
    return tap;
}
