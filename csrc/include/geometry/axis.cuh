/* Cells and phases of one axis, worked out when compiling.
 *
 * Output o = j*S + r belongs to cell j and is its r-th output. It reads tap k iff S divides r + P - k*D, and then input
 * j + (r + P - k*D) / S: a shift that does not depend on j. All outputs of a cell read around input j.
 *
 *   S=2 P=1 K=4 D=1:  r=0 reads k=1 at j, k=3 at j-1;  r=1 reads k=0 at j+1, k=2 at j
 *
 * Taps kStep = S / gcd(S, D) apart serve the same r, so r has taps iff one of the first kStep taps is its: it is called
 * after that tap, phase t, t < kPhases. The other r, as with S=5 D=2 K=3 two of five, hold the bias alone.
 *
 * Macros: KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W.
 */
#pragma once

#include "numeric/integers.cuh"

constexpr int kNone = -1;

template <int KERNEL, int STRIDE, int PADDING, int DILATION> struct axis {
    static constexpr int kStep = tap_step(STRIDE, DILATION);
    static constexpr int kPhases = KERNEL < kStep ? KERNEL : kStep;
    static constexpr bool kEven = KERNEL % kPhases == 0;  // all phases have as many taps
    static constexpr int kShiftStep = DILATION * kStep / STRIDE;  // from a tap to the next of the same phase, downwards

    /* The r of the outputs in phase t. */
    static __device__ constexpr int output(int phase) {
        return (phase * DILATION + (PADDING + STRIDE - 1) / STRIDE * STRIDE - PADDING) % STRIDE;
    }
    /* Shift from a cell to the input that a tap reads. */
    static __device__ constexpr int shift(int tap) {
        return (output(tap % kStep) + PADDING - tap * DILATION) / STRIDE;  // the division is exact
    }
    /* Number of taps of phase t. */
    static __device__ constexpr int taps(int phase) {
        return kEven ? KERNEL / kPhases : (KERNEL - phase + kStep - 1) / kStep;
    }
    /* The phase of the r-th outputs, or kNone. */
    static __device__ constexpr int phase(int r) {
        for (int t = 0; t < kPhases; ++t)
            if (output(t) == r) return t;
        return kNone;
    }
    static __device__ constexpr int least_shift() {
        int found = shift(0);
        for (int k = 1; k < KERNEL; ++k) found = least(found, shift(k));
        return found;
    }
    static __device__ constexpr int largest_shift() {
        int found = shift(0);
        for (int k = 1; k < KERNEL; ++k) found = most(found, shift(k));
        return found;
    }
};
using axis_h = axis<KERNEL_H, STRIDE_H, PADDING_H, DILATION_H>;
using axis_w = axis<KERNEL_W, STRIDE_W, PADDING_W, DILATION_W>;
