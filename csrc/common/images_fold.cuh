/* Columns are folded: outputs gather them from shared memory (see axis.cuh for cells, phases and shifts).
 *
 *   output [co, cell, phase] = bias [co] + sum over the taps of the phase of columns [(co, tap), cell + shift of the tap]
 *
 * Macros: ELEMENT_T; KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W, such that every phase has a tap; OUT_CHANNELS; IN_H,
 * IN_W, OUT_H, OUT_W; FOLD_PITCH (floats from a line of columns to the next); VECTOR (outputs that are stored together).
 */
#pragma once

#include "common/axis.cuh"
#include "common/image.cuh"
#include "common/integers.cuh"
#include "common/numeric.cuh"

using axis_h = axis<KERNEL_H, STRIDE_H, PADDING_H, DILATION_H>;
using axis_w = axis<KERNEL_W, STRIDE_W, PADDING_W, DILATION_W>;
static_assert(axis_h::kPhases == STRIDE_H && axis_w::kPhases == STRIDE_W, "every phase has a tap");

constexpr int kCellsH = ceil_div(OUT_H, STRIDE_H), kCellsW = ceil_div(OUT_W, STRIDE_W);

// Where outputs read the input at their own cell alone, a cell is a position.
constexpr bool kInPlace = axis_h::least_shift() == 0 && axis_h::largest_shift() == 0 && axis_w::least_shift() == 0 &&
                          axis_w::largest_shift() == 0 && kCellsH == IN_H && kCellsW == IN_W;
template <int COUNT> struct alignas(COUNT * sizeof(ELEMENT_T)) vector_t { ELEMENT_T value[COUNT]; };

/* Where a cell is: of which image, in its rows and columns, and in a line of columns; and whether there is one. */
struct cell_t { bool is; int image, row, column, at; };

/* Gather OUTS output channels, from `out` on, of `CELLS` cells, and store the outputs. LANES threads call it, the `lane`-th of
 * them this one; cell_of(i) says where the i-th is.
 */
template <int CELLS, int LANES, int OUTS, typename CELL_OF>
__device__ __forceinline__ void gather(
    ELEMENT_T* output, const float* columns, const float* biases, int out, int lane, const CELL_OF& cell_of) {
    constexpr int kTurns = ceil_div(CELLS, LANES);
    #pragma unroll (kTurns * OUTS * kTaps <= 64 ? kTurns : 1)
    for (int turn = 0; turn < kTurns; ++turn) {
        const int i = turn * LANES + lane;
        if (CELLS % LANES != 0 && i >= CELLS) continue;
        const auto [is, image, cell_h, cell_w, at] = cell_of(i);
        if (!is) continue;
        const long long plane = static_cast<long long>(image) * OUT_CHANNELS + out;
        ELEMENT_T* target = output + (plane * (OUT_H * OUT_W) + (cell_h * STRIDE_H * OUT_W + cell_w * STRIDE_W));
        #pragma unroll (kTaps <= 16 ? least(OUTS, 4) : 1)
        for (int channel = 0; channel < OUTS; ++channel) {
            if (OUT_CHANNELS % OUTS != 0 && out + channel >= OUT_CHANNELS) continue;
            const float* from = columns + (channel * (kTaps * FOLD_PITCH) + at);
            float sums[STRIDE_H][STRIDE_W];
            #pragma unroll
            for (int r = 0; r < STRIDE_H * STRIDE_W; ++r) sums[r / STRIDE_W][r % STRIDE_W] = biases[channel];
            #pragma unroll
            for (int tap = 0; tap < kTaps; ++tap) {
                const int kh = tap / KERNEL_W, kw = tap % KERNEL_W;
                const int row = cell_h + axis_h::shift(kh), column = cell_w + axis_w::shift(kw);
                const bool inside = kInPlace || (0 <= row && row < IN_H && 0 <= column && column < IN_W);
                const int there = tap * FOLD_PITCH + axis_h::shift(kh) * IN_W + axis_w::shift(kw);
                sums[axis_h::output(kh % axis_h::kStep)][axis_w::output(kw % axis_w::kStep)] += inside ? from[there] : 0.0f;
            }
            #pragma unroll
            for (int r = 0; r < STRIDE_H; ++r) {
                if (OUT_H % STRIDE_H != 0 && cell_h * STRIDE_H + r >= OUT_H) continue;
                #pragma unroll
                for (int first = 0; first < STRIDE_W; first += VECTOR) {
                    if (OUT_W % STRIDE_W != 0 && cell_w * STRIDE_W + first >= OUT_W) continue;
                    vector_t<VECTOR> values;
                    #pragma unroll
                    for (int e = 0; e < VECTOR; ++e) values.value[e] = narrow<ELEMENT_T>(sums[r][first + e]);
                    *reinterpret_cast<vector_t<VECTOR>*>(target + (r * OUT_W + first)) = values;
                }
            }
            target += OUT_H * OUT_W;
        }
    }
}
