/* Columns are folded: outputs gather them from shared memory (see geometry/axis.cuh for cells, phases and shifts).
 *
 *   output [co, cell, phase] = bias [co] + sum over the taps of the phase of columns [(co, tap), cell + shift of the tap]
 *
 * Macros: ELEMENT_T; KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W, such that every phase has a tap; OUT_MORE_H,
 * OUT_MORE_W (rows and columns of outputs beyond STRIDE for each of the inputs, whatever their number; may be negative);
 * FOLD_PITCH (floats from a line of columns to the next); VECTOR (outputs that are stored together). kTaps is the kernel's.
 */
#pragma once

#include "geometry/axis.cuh"
#include "numeric/integers.cuh"
#include "numeric/types.cuh"
#include "numeric/vector.cuh"

static_assert(axis_h::kPhases == STRIDE_H && axis_w::kPhases == STRIDE_W, "every phase has a tap");

/* Rows and columns of an image. */
__device__ constexpr int more_cells(int more, int stride) { return more < 0 ? -(-more / stride) : ceil_div(more, stride); }
constexpr int kMoreCellsH = more_cells(OUT_MORE_H, STRIDE_H), kMoreCellsW = more_cells(OUT_MORE_W, STRIDE_W);
struct image_t {
    int in_h, in_w;
    __device__ __forceinline__ constexpr int out_h() const { return in_h * STRIDE_H + OUT_MORE_H; }
    __device__ __forceinline__ constexpr int out_w() const { return in_w * STRIDE_W + OUT_MORE_W; }
    __device__ __forceinline__ constexpr int cells_h() const { return in_h + kMoreCellsH; }
    __device__ __forceinline__ constexpr int cells_w() const { return in_w + kMoreCellsW; }
};

// Where outputs read the input at their own cell alone, a cell is a position.
constexpr bool kInPlace = axis_h::least_shift() == 0 && axis_h::largest_shift() == 0 && axis_w::least_shift() == 0 &&
                          axis_w::largest_shift() == 0 && kMoreCellsH == 0 && kMoreCellsW == 0;
// A row of a cell is divided into parts if one store of a lane does not cover it; neighbouring lanes have neighbouring parts.
// The taps of a lane's outputs are then known only at run time.
constexpr int kParts = DILATION_W == 1 ? STRIDE_W / VECTOR : 1, kRun = STRIDE_W / kParts;

using pair_t = vector_of<float, 2>;  // neighbouring columns, written at once

/* Whether a cell exists, its image, its row and column there, and the position of its columns in each line of columns. */
struct cell_place_t { bool exists; int image, row, column, position; };

/* The part that thread `member` of THREADS gathers in a turn, counted through all cells, kParts of each. */
template <int THREADS>
__device__ constexpr int part_of(int turn, int member) { return turn * THREADS + member; }

/* Gathers OUTS output channels of `channels`, from `out` on, of so many cells, and stores the outputs; WHOLE if all OUTS
 * exist. THREADS threads call it, of which this is number `member`, and have at most TURNS cells each, or parts of them.
 * cell_of(turn, i) says where the i-th cell is. What does not exist (cells, inputs, outputs, channels) is skipped.
 */
template <int TURNS, int THREADS, int OUTS, bool WHOLE, typename CELL_OF>
__device__ __forceinline__ void gather(
    const image_t& image, ELEMENT_T* output, int channels, const float* columns, const float* biases, int out, int member,
    int cells, const CELL_OF& cell_of) {
    const int out_h = image.out_h(), out_w = image.out_w();
    #pragma unroll (TURNS * OUTS * kTaps <= 64 ? TURNS : 1)
    for (int turn = 0; turn < TURNS; ++turn) {
        const int i = part_of<THREADS>(turn, member);
        if (i >= cells * kParts) continue;
        const cell_place_t cell = cell_of(turn, i / kParts);
        const int cell_h = cell.row, cell_w = cell.column;
        const int first_w = cell_w * STRIDE_W + i % kParts * kRun;
        if (!cell.exists || (OUT_MORE_W % STRIDE_W != 0 && kParts > 1 && first_w >= out_w)) continue;
        const long long plane = static_cast<long long>(cell.image) * channels + out;
        ELEMENT_T* target = output + (plane * (out_h * out_w) + (cell_h * STRIDE_H * out_w + first_w));
        #pragma unroll (kTaps <= 16 ? least(OUTS, 4) : 1)
        for (int channel = 0; channel < OUTS; ++channel) {
            if (!WHOLE && out + channel >= channels) continue;
            const float* from = columns + (channel * (kTaps * FOLD_PITCH) + cell.position);
            float sums[STRIDE_H][kRun];
            #pragma unroll
            for (int r = 0; r < STRIDE_H * kRun; ++r) sums[r / kRun][r % kRun] = biases[channel];
            #pragma unroll
            for (int kh = 0; kh < KERNEL_H; ++kh) {
                const int row = cell_h + axis_h::shift(kh);
                const float* of_row = from + (kh * (KERNEL_W * FOLD_PITCH) + axis_h::shift(kh) * image.in_w);
                // Adds the column of a tap, at its shift across, to an output of the cell.
                const auto add = [&](int r, int kw, int shift) {
                    const int column = cell_w + shift;
                    const bool inside = kInPlace || (0 <= row && row < image.in_h && 0 <= column && column < image.in_w);
                    const bool tap = kParts == 1 || KERNEL_W % STRIDE_W == 0 || kw < KERNEL_W;
                    sums[axis_h::output(kh % axis_h::kStep)][r] += inside && tap ? of_row[kw * FOLD_PITCH + shift] : 0.0f;
                };
                if constexpr (kParts == 1) {
                    #pragma unroll
                    for (int kw = 0; kw < KERNEL_W; ++kw) add(axis_w::output(kw % axis_w::kStep), kw, axis_w::shift(kw));
                } else {
                    #pragma unroll
                    for (int r = 0; r < kRun; ++r) {
                        const int reach = i % kParts * kRun + r + PADDING_W;
                        #pragma unroll
                        for (int n = 0; n < ceil_div(KERNEL_W, STRIDE_W); ++n)
                            add(r, reach % STRIDE_W + n * STRIDE_W, reach / STRIDE_W - n);
                    }
                }
            }
            #pragma unroll
            for (int r = 0; r < STRIDE_H; ++r) {
                if (OUT_MORE_H % STRIDE_H != 0 && cell_h * STRIDE_H + r >= out_h) continue;
                #pragma unroll
                for (int first = 0; first < kRun; first += VECTOR) {
                    if (OUT_MORE_W % STRIDE_W != 0 && kParts == 1 && first_w + first >= out_w) continue;
                    store_together<VECTOR>(target + (r * out_w + first),
                                           [&](int e) { return narrow<ELEMENT_T>(sums[r][first + e]); });
                }
            }
            target += out_h * out_w;
        }
    }
}
