/* col2im: fold the columns of a GEMM into the output of a transposed convolution. Gather form: no atomics, one order.
 *
 *   columns [planes, K_H, K_W, in_rows, W_in] -> output [planes, H_out, W_out],  a plane is a channel of an image
 *
 * Volumes have a depth before the height: [planes, K_D, K_H, K_W, in_rows, W_in] -> [planes, D_out, H_out, W_out], where
 * rows are those of all slices, one slice after the other.
 *
 * The GEMM leaves, for every input pixel and every tap, the value that the pixel sends to an output through that tap.
 * col2im adds up what arrives at each output (and its bias). On each axis, input i and tap k meet at output o:
 *
 *   scatter  o = i*S - P + k*D
 *   gather   i = (o + P - k*D) / S, taken iff S divides it and 0 <= i < extent
 *
 *   S=2 P=1 K=3 D=1, o=3:  k=0 -> i=2;  k=1 -> no;  k=2 -> i=1
 *   S=5 P=1 K=3 D=2, o=2:  3, 1, -1 are no multiples of 5: no tap at all, the output is the bias
 *
 * Outputs with the same residue (o + P) mod S read the same taps. A thread owns a cell: here
 * CELL_ROWS x CELL_W outputs. With CELL_W = STRIDE_W that is one output of every residue across a row:
 * outputs j*S .. j*S + S-1 read inputs near j, so a warp reads each tap's row at consecutive addresses, and which taps
 * an output of the cell has is known when compiling: position_w below depends on s alone. For strides too wide for that,
 * CELL_W = 1 and the residue across a row is found at run time, as that down the rows always is. Either way every value
 * of the columns is read at most once.
 *
 * A thread of the first case (S=2 P=1 K=3 D=1 on both axes, 4 inputs a row), j=1, at output row 3, so outputs 2 and 3:
 *   down the rows   position 4: first_kh = 0, taps 0 and 2, which read input rows 2 and 1
 *   s=0, output 2   position_w 1: first_kw = 1, the only tap, shift 0: input origin + 0 = 1
 *   s=1, output 3   position_w 2: first_kw = 0, taps 0 and 2, shifts 1 and 0: inputs 2 and 1
 * A launch folds the output rows [out_row_begin, out_row_begin + out_rows) from columns that hold the input rows
 * [in_row_begin, in_row_begin + in_rows), which must be all that those outputs read.
 *
 * Macros: COLUMN_T, OUTPUT_T (element types), KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W (and D), CELL_ROWS,
 * CELL_W (STRIDE_W or 1), INDEX_64. The host side, gemmconv/kernels/columns/col2im.py, fills the params in their order.
 */
#include "ptx/keep.cuh"
#include "numeric/types.cuh"
#include "numeric/integers.cuh"
#include "geometry/depth.cuh"
#include "geometry/plane.cuh"

struct col2im_params {
    const COLUMN_T* __restrict__ columns;  // [planes, K_D, K_H, K_W, in_rows, W_in]
    const OUTPUT_T* __restrict__ bias;     // [channels], or null
    OUTPUT_T* __restrict__ output;         // [planes, D_out, H_out, W_out]
    int planes, channels;                  // planes = images * channels
    int h_in, w_in;
    int d_out, h_out, w_out;               // d_out: 1 for images
    int in_row_begin, in_rows;
    int out_row_begin, out_rows;
    int cells_w;                           // cells across a row: ceil(W_out / CELL_W)
};

using accumulate_t = accumulator_t<OUTPUT_T>;

// A row of a cell of 2 or 4 outputs is one vector store if rows of the output are whole cells, else stores by output.
constexpr bool kVectorCell = CELL_W == 2 || CELL_W == 4;
struct alignas(kVectorCell ? CELL_W * sizeof(OUTPUT_T) : sizeof(OUTPUT_T)) cell_t { OUTPUT_T value[CELL_W]; };

/* First tap that reaches position o + P of an axis: the least k for which S divides o + P - k*D. It is the kernel
 * size or more where no tap does, which callers must check. The next ones are kStep = S / gcd(S, D) apart, the least step
 * for which S divides step * D.
 */
template <int KERNEL, int STRIDE, int DILATION>
__device__ __forceinline__ int first_tap(int position) {
    constexpr int kStep = tap_step(STRIDE, DILATION);
    if (DILATION % STRIDE == 1 % STRIDE) return position % STRIDE;  // k*D = k modulo S; 1 % STRIDE is 0 for S = 1
    int tap = KERNEL;
    #pragma unroll (kStep <= 16 ? kStep : 1)
    for (int k = kStep - 1; k >= 0; --k)
        if ((position - k * DILATION) % STRIDE == 0) tap = k;
    return tap;
}

constexpr int kStepD = tap_step(STRIDE_D, DILATION_D);
constexpr int kStepH = tap_step(STRIDE_H, DILATION_H);
constexpr int kStepW = tap_step(STRIDE_W, DILATION_W);
constexpr int kTapsD = ceil_div(KERNEL_D, kStepD);  // most taps that any residue has
constexpr int kTapsH = ceil_div(KERNEL_H, kStepH);
constexpr int kTapsW = ceil_div(KERNEL_W, kStepW);

// Taps that are unrolled: those of a row, up to 32, and of as many rows as make about 32 loads.
constexpr int kUnrollW = kTapsW <= 32 ? kTapsW : 16;
constexpr int kUnrollRows = CELL_W * kTapsW < 32 ? 32 / (CELL_W * kTapsW) : 1;  // taps of depth and height together

extern "C" __global__ void __launch_bounds__(256) columns_col2im_kernel(const __grid_constant__ col2im_params p) {
    const index_t cell = item_of_thread();
    const int plane = plane_of_thread();
    const int row_cell = static_cast<int>(cell / p.cells_w);
    const int j = static_cast<int>(cell - static_cast<index_t>(row_cell) * p.cells_w);
    if (plane >= p.planes || row_cell * CELL_ROWS >= p.out_rows) return;

    const index_t tap_stride = static_cast<index_t>(p.in_rows) * p.w_in;  // elements from a tap's values to the next's
    const int origin = CELL_W == STRIDE_W ? j : 0;  // x of the input at shift 0; 0 if CELL_W is 1: a shift is x itself
    const COLUMN_T* columns =
        p.columns + static_cast<long long>(plane) * (KERNEL_D * KERNEL_H * KERNEL_W) * tap_stride + origin;
    const int plane_rows = kIsVolume ? p.d_out * p.h_out : p.h_out;
    OUTPUT_T* __restrict__ output = p.output + static_cast<long long>(plane) * plane_rows * p.w_out;
    const accumulate_t bias = p.bias == nullptr ? accumulate_t(0) : widen(p.bias[plane % p.channels]);

    #pragma unroll
    for (int r = 0; r < CELL_ROWS; ++r) {
        const int row = row_cell * CELL_ROWS + r, out_row = p.out_row_begin + row;
        const int slice = kIsVolume ? out_row / p.h_out : 0;
        const int position_d = slice + PADDING_D, position_h = out_row - slice * p.h_out + PADDING_H;
        const int first_kd = first_tap<KERNEL_D, STRIDE_D, DILATION_D>(position_d);
        const int first_kh = first_tap<KERNEL_H, STRIDE_H, DILATION_H>(position_h);

        accumulate_t sum[CELL_W];
        #pragma unroll
        for (int s = 0; s < CELL_W; ++s) sum[s] = bias;

        // Load and add: every tap of the row's residue, for every output of the cell in this row.
        #pragma unroll kUnrollRows
        for (int t = 0; t < kTapsD * kTapsH; ++t) {
            const int td = kIsVolume ? t / kTapsH : 0;
            const int kd = first_kd + td * kStepD, kh = first_kh + (t - td * kTapsH) * kStepH;
            const int reach_d = position_d - kd * DILATION_D, reach_h = position_h - kh * DILATION_H;
            const int id = reach_d / STRIDE_D, ih = reach_h / STRIDE_H;
            const index_t in_row = static_cast<index_t>(id) * p.h_in + ih - p.in_row_begin;
            // The cell may reach beyond the launch's last output row, to input rows that this chunk of columns lacks.
            // So in_rows bounds what is read. Slices of a volume are adjacent: ih < h_in keeps to this tap's slice.
            const bool slice_taken = !kIsVolume || (kd < KERNEL_D && reach_d >= 0 && ih < p.h_in);
            const bool row_taken = slice_taken && kh < KERNEL_H && reach_h >= 0 && in_row >= 0 && in_row < p.in_rows;
            // Where the row is not taken, the address is computed and never read.
            const COLUMN_T* tap_row = columns + ((kd * KERNEL_H + kh) * KERNEL_W * tap_stride + in_row * p.w_in);
            #pragma unroll
            for (int s = 0; s < CELL_W; ++s) {
                const int position_w = s + PADDING_W + (CELL_W == STRIDE_W ? 0 : j);
                const int first_kw = first_tap<KERNEL_W, STRIDE_W, DILATION_W>(position_w);
                const COLUMN_T* tap = tap_row + first_kw * tap_stride;
                #pragma unroll kUnrollW
                for (int u = 0; u < kTapsW; ++u) {
                    const int kw = first_kw + u * kStepW;
                    const int shift = (position_w - kw * DILATION_W) / STRIDE_W;  // exact for a tap that exists
                    if (kw < KERNEL_W && row_taken && static_cast<unsigned>(origin + shift) < p.w_in)
                        sum[s] += widen(load_once(tap + shift));
                    tap += kStepW * tap_stride;
                    keep(tap);  // one addition a tap; without it the compiler multiplies for each
                }
            }
        }

        // Store: a row of the cell as one vector if possible. A row beyond the launch's last was summed, since other
        // threads of the warp run the loops anyway; it is not stored.
        if (row >= p.out_rows) break;
        OUTPUT_T* __restrict__ target = output + static_cast<index_t>(out_row) * p.w_out + j * CELL_W;
        if (kVectorCell && p.w_out % CELL_W == 0) {
            cell_t values;
            #pragma unroll
            for (int s = 0; s < CELL_W; ++s) values.value[s] = narrow<OUTPUT_T>(sum[s]);
            *reinterpret_cast<cell_t*>(target) = values;
        } else {
            #pragma unroll
            for (int s = 0; s < CELL_W; ++s)
                if (j * CELL_W + s < p.w_out) target[s] = narrow<OUTPUT_T>(sum[s]);
        }
    }
}
