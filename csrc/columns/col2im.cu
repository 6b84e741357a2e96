/* col2im: add up the columns of a GEMM, so that they become the output of a transposed convolution.
 *
 *   columns [planes, K_H, K_W, in_rows, W_in] -> output [planes, H_out, W_out],  a plane is a channel of an image
 *
 * The GEMM leaves, for every input pixel and every tap, the value that the pixel sends to one output through that tap.
 * An output is its bias plus all that arrives there. On each axis, input i and tap k meet at output o:
 *
 *   scatter  o = i*S - P + k*D
 *   gather   i = (o + P - k*D) / S, taken iff S divides it and 0 <= i < extent
 *
 *   S=2 P=1 K=3 D=1, o=3:  k=0 -> i=2;  k=1 -> no;  k=2 -> i=1
 *   S=5 P=1 K=3 D=2, o=2:  3, 1, -1 are no multiples of 5: no tap at all, the output is the bias
 *
 * This kernel gathers: one thread adds up all of an output, so there are no atomics and the order is always the same.
 * Every value of the columns is read at most once. Outputs of one phase, o mod S, have the same taps.
 *
 * A thread has a rectangle of outputs, RECT_ROWS x RECT_W. RECT_ROWS is 1 to 4: more if each row takes few loads.
 * The j-th rectangle of a row begins at output j * RECT_W.
 *   RECT_W = STRIDE_W  One output of each phase. They read inputs near j, so a warp reads neighbouring addresses. The
 *                      taps of the s-th output, and how far from j it reads (its shift), are known when compiling.
 *   RECT_W = 1         For strides over 16, whose sums take too many registers. The taps across are found at run time.
 * The taps down the rows are always found at run time.
 *
 * Example: a plane of 4 x 4 inputs, S=2 P=1 K=3 D=1 and output_padding 1 on both axes, so 8 x 8 outputs. Rectangles
 * are 2 x 2, 4 x 4 of them. Thread 5 has rectangle j = 1 of rectangle row 1, outputs (2, 2), (2, 3), (3, 2), (3, 3),
 * which read columns[kh, kw, row, column] of their plane:
 *   output row 2     first_kh = 1, the only tap: input row 1
 *   output row 3     first_kh = 0, taps 0 and 2: input rows 2 and 1
 *   output column 2  s = 0, first_kw = 1, the only tap, shift 0: input column j + 0 = 1
 *   output column 3  s = 1, first_kw = 0, taps 0 and 2, shifts 1 and 0: input columns 2 and 1
 *   output (3, 3)    bias + columns[0,0,2,2] + columns[0,2,2,1] + columns[2,0,1,2] + columns[2,2,1,1]
 *
 * A launch computes the output rows [out_row_begin, out_row_begin + out_rows) from columns that hold the input rows
 * [in_row_begin, in_row_begin + in_rows), all that those outputs read: in the example output rows 4 to 7 need 2 and 3.
 *
 * Volumes have a depth before the height: [planes, K_D, K_H, K_W, in_rows, W_in] -> [planes, D_out, H_out, W_out].
 * Their rows are those of all slices, one slice after the other. For images kIsVolume is false (geometry/depth.cuh).
 *
 * Macros: COLUMN_T, OUTPUT_T (element types), KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W (and D), RECT_ROWS,
 * RECT_W, INDEX_64. The host side, gemmconv/kernels/columns/col2im.py, sets them, and fills the params in their order.
 *
 * To try a change without a GPU, `python -m pytest tests/test_kernels.py -k col2im` runs this file on a CPU.
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
    int rects_w;                           // rectangles across a row: ceil(W_out / RECT_W)
};

using accumulate_t = accumulator_t<OUTPUT_T>;
// A row of a rectangle of 2 or 4 outputs is one vector store if rows of the output are whole rectangles.
constexpr bool kVectorStore = RECT_W == 2 || RECT_W == 4;

// Taps of one phase are kStep = S / gcd(S, D) apart, since S then divides kStep * D: with S=4 and D=2 every second tap.
// A phase has at most kTaps of them.
constexpr int kStepD = tap_step(STRIDE_D, DILATION_D), kStepH = tap_step(STRIDE_H, DILATION_H);
constexpr int kStepW = tap_step(STRIDE_W, DILATION_W);
constexpr int kTapsD = ceil_div(KERNEL_D, kStepD), kTapsH = ceil_div(KERNEL_H, kStepH);
constexpr int kTapsW = ceil_div(KERNEL_W, kStepW);

// Taps that are unrolled: all of a row (of more than 32, 16), and of as many rows as make about 32 loads.
constexpr int kUnrollW = kTapsW <= 32 ? kTapsW : 16;
constexpr int kUnrollRows = RECT_W * kTapsW < 32 ? 32 / (RECT_W * kTapsW) : 1;  // taps of depth and height together

/* The first tap of an output o, where `padded` is o + P: the least k for which S divides o + P - k*D. In the example
 * output 2 has first_tap(3) = 1, output 3 has first_tap(4) = 0. Where an output has no tap it is KERNEL or more, which
 * callers must check.
 */
template <int KERNEL, int STRIDE, int DILATION>
__device__ __forceinline__ int first_tap(int padded) {
    constexpr int kStep = tap_step(STRIDE, DILATION);
    if (DILATION % STRIDE == 1 % STRIDE) return padded % STRIDE;  // k*D = k modulo S (any D if S = 1)
    int tap = KERNEL;
    #pragma unroll (kStep <= 16 ? kStep : 1)
    for (int k = kStep - 1; k >= 0; --k)  // downwards: the least tap remains
        if ((padded - k * DILATION) % STRIDE == 0) tap = k;
    return tap;
}

/* Adds to sum[s], of the s-th output in a row of the j-th rectangle, what one input row sends it by the taps across.
 * `tap_row` has the columns of that input row and of the tap's kd and kh, from tap kw = 0 and input column `origin` on.
 */
__device__ __forceinline__ void add_row(
    accumulate_t (&sum)[RECT_W], const COLUMN_T* tap_row, bool row_taken, index_t tap_stride, int w_in, int origin,
    int j) {
    #pragma unroll
    for (int s = 0; s < RECT_W; ++s) {
        // P + the output's place: s in the rectangle, a constant, and then shifts are relative to input column j; or j
        // in the row if RECT_W is 1, and then shifts are input columns themselves (origin is 0).
        const int padded_w = s + PADDING_W + (RECT_W == STRIDE_W ? 0 : j);
        const int first_kw = first_tap<KERNEL_W, STRIDE_W, DILATION_W>(padded_w);
        const COLUMN_T* tap = tap_row + first_kw * tap_stride;
        #pragma unroll kUnrollW
        for (int u = 0; u < kTapsW; ++u) {
            const int kw = first_kw + u * kStepW;
            const int shift = (padded_w - kw * DILATION_W) / STRIDE_W;  // exact for a tap that exists
            // A negative input column is a large unsigned number, so one comparison checks both ends of the row.
            if (kw < KERNEL_W && row_taken && static_cast<unsigned>(origin + shift) < w_in)
                sum[s] += widen(load_once(tap + shift));
            tap += kStepW * tap_stride;
            keep(tap);  // no instruction: it has the compiler add to `tap` for each tap, where it would else multiply
        }
    }
}

/* Stores the outputs of a row of the j-th rectangle, those that exist; `target` is the address of the first. */
__device__ __forceinline__ void store_row(OUTPUT_T* target, const accumulate_t (&sum)[RECT_W], int w_out, int j) {
    constexpr int kTogether = kVectorStore ? RECT_W : 1;
    if (kVectorStore && w_out % RECT_W == 0) {  // all rectangles are whole, so their addresses are aligned
        store_together<kTogether>(target, [&](int s) { return narrow<OUTPUT_T>(sum[s]); });
    } else {
        #pragma unroll
        for (int s = 0; s < RECT_W; ++s)
            if (j * RECT_W + s < w_out) target[s] = narrow<OUTPUT_T>(sum[s]);
    }
}

extern "C" __global__ void __launch_bounds__(256) columns_col2im_kernel(const __grid_constant__ col2im_params p) {
    // The thread's rectangle: the j-th of rectangle row rect_row, counted from the launch's first output row.
    const index_t rectangle = item_of_thread();
    const int plane = plane_of_thread();
    const int rect_row = static_cast<int>(rectangle / p.rects_w);
    const int j = static_cast<int>(rectangle - static_cast<index_t>(rect_row) * p.rects_w);
    if (plane >= p.planes || rect_row * RECT_ROWS >= p.out_rows) return;

    // What the plane has: its columns, from input column `origin` on, which shift 0 reads; its output; its bias.
    const index_t tap_stride = static_cast<index_t>(p.in_rows) * p.w_in;  // elements from a tap's values to the next's
    const int origin = RECT_W == STRIDE_W ? j : 0;  // 0: a shift is the input column itself
    const COLUMN_T* columns =
        p.columns + static_cast<long long>(plane) * (KERNEL_D * KERNEL_H * KERNEL_W) * tap_stride + origin;
    const int plane_rows = kIsVolume ? p.d_out * p.h_out : p.h_out;
    OUTPUT_T* __restrict__ output = p.output + static_cast<long long>(plane) * plane_rows * p.w_out;
    const accumulate_t bias = p.bias == nullptr ? accumulate_t(0) : widen(p.bias[plane % p.channels]);

    #pragma unroll
    for (int r = 0; r < RECT_ROWS; ++r) {
        const int row = rect_row * RECT_ROWS + r, out_row = p.out_row_begin + row;
        const int slice = kIsVolume ? out_row / p.h_out : 0;
        const int padded_d = slice + PADDING_D, padded_h = out_row - slice * p.h_out + PADDING_H;
        const int first_kd = first_tap<KERNEL_D, STRIDE_D, DILATION_D>(padded_d);
        const int first_kh = first_tap<KERNEL_H, STRIDE_H, DILATION_H>(padded_h);

        accumulate_t sum[RECT_W];
        #pragma unroll
        for (int s = 0; s < RECT_W; ++s) sum[s] = bias;

        // The taps (kd, kh) of the output row, and the input row that each reads; quotients are exact if a tap exists.
        #pragma unroll kUnrollRows
        for (int t = 0; t < kTapsD * kTapsH; ++t) {
            const int td = kIsVolume ? t / kTapsH : 0;
            const int kd = first_kd + td * kStepD, kh = first_kh + (t - td * kTapsH) * kStepH;
            const int dividend_d = padded_d - kd * DILATION_D, dividend_h = padded_h - kh * DILATION_H;
            const int id = dividend_d / STRIDE_D, ih = dividend_h / STRIDE_H;
            const index_t in_row = static_cast<index_t>(id) * p.h_in + ih - p.in_row_begin;
            // The rectangle may reach beyond the launch's last output row, to input rows that these columns lack. So
            // in_rows bounds what is read. Slices of a volume are adjacent, so ih < h_in keeps to this tap's slice: of
            // volumes of 8 rows, ih = 8 in slice 0 would read row 0 of slice 1.
            const bool slice_taken = !kIsVolume || (kd < KERNEL_D && dividend_d >= 0 && ih < p.h_in);
            const bool row_taken = slice_taken && kh < KERNEL_H && dividend_h >= 0 && in_row >= 0 && in_row < p.in_rows;
            // Where the row is not taken, the address is computed and never read.
            const COLUMN_T* tap_row = columns + ((kd * KERNEL_H + kh) * KERNEL_W * tap_stride + in_row * p.w_in);
            add_row(sum, tap_row, row_taken, tap_stride, p.w_in, origin, j);
        }

        // A row beyond the launch's last was summed, as other threads of the warp run the loop; it is not stored.
        if (row >= p.out_rows) break;
        store_row(output + static_cast<index_t>(out_row) * p.w_out + j * RECT_W, sum, p.w_out, j);
    }
}
