/* Integer arithmetic that is done when compiling. */
#pragma once

__device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
__device__ constexpr int most(int a, int b) { return a > b ? a : b; }

/* Taps of one phase of an axis are this far apart; see geometry/axis.cuh. */
__device__ constexpr int tap_step(int stride, int dilation) { return stride / gcd(stride, dilation); }
