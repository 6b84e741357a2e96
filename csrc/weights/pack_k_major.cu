/* Rounds the weights and lays them out, of float32, for kernels that include pipeline/pixels_on_m.cuh, and for sm90/implicit_gemm_nhwc.cu,
 * whose lines are those of channels_last, (kh, kw, co): units of four input channels of a line,
 *
 *   packed [blocks of LINES][units][LINES] of 16 bytes
 *
 * Where a row of a kernel has more than two taps, and outputs are to be neighbours (ROW), lines are in an order in which columns
 * of the product that a thread has are neighbours in a row of outputs: of 4 * ROW lines, those of four rows, column 8j + 2t + e
 * is line t * ROW + 2j + e. Lines and channels that there are not are zeros.
 *
 * Macros: IN_CHANNELS, ROW (taps of a row; 1 for lines in order), ALL_LINES (output channels times taps), LINES, UNITS (of all
 * stages of a block).
 */
#include "ptx/pdl.cuh"
#include "numeric/units.cuh"

struct pack_k_major_params {
    const float* __restrict__ weight;  // [IN_CHANNELS][ALL_LINES]
    unit_t* __restrict__ packed;
    int units;  // to lay out
};

constexpr int kThreads = 256;

/* The line that is column `column` of its block. */
__device__ __forceinline__ int line_of(int column) {
    constexpr int kPeriod = 4 * ROW;
    if (ROW <= 2) return column;
    const int j = column % kPeriod / 8, t = column % 8 / 2;
    return column / kPeriod * kPeriod + t * ROW + j * 2 + column % 2;
}

/* A thread lays out one unit. */
extern "C" __global__ void __launch_bounds__(kThreads)
weights_pack_k_major_kernel(const __grid_constant__ pack_k_major_params p) {
    launch_dependents();
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= p.units) return;
    const int line = i / (UNITS * LINES) * LINES + line_of(i % LINES), channel = i / LINES % UNITS * 4;
    float values[4] = {};
    if (line < ALL_LINES) {
        #pragma unroll
        for (int e = 0; e < 4; ++e)
            if (channel + e < IN_CHANNELS)
                values[e] = load_once(p.weight + (static_cast<long long>(channel + e) * ALL_LINES + line));
    }
    p.packed[i] = pack_unit<1>(values).part[0];
}
