/* im2col: lay out, for every input pixel of a transposed convolution, the output values that its taps reach.
 * The backward passes multiply these columns: grad_input = weight . columns, grad_weight = input . columns^T.
 *
 *   grad_output [planes, H_out, W_out] -> columns [planes, K_H, K_W, in_rows, W_in],  a plane is a channel of an image
 *   columns[kh, kw, ih, iw] = grad_output[ih*S_H - P_H + kh*D_H, iw*S_W - P_W + kw*D_W], or 0 outside
 *
 * Volumes have a depth before the height: [planes, D_out, H_out, W_out] -> [planes, K_D, K_H, K_W, in_rows, W_in], where
 * rows are those of all slices, one slice after the other.
 *
 *   S=2 P=1 K=3 D=1, ih=2:  kh=0 -> oh=3;  kh=1 -> oh=4;  kh=2 -> oh=5
 *
 * A thread owns one input pixel of a plane and writes all its taps: a warp writes each tap at consecutive addresses, and
 * repeated reads of neighbouring taps come from the L1 cache. Values are moved, not computed with.
 * A launch lays out the input rows [in_row_begin, in_row_begin + in_rows).
 *
 * Macros: ELEMENT_T, KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W (and D), INDEX_64.
 */
#include "numeric/types.cuh"
#include "geometry/depth.cuh"
#include "geometry/plane.cuh"

struct im2col_params {
    const ELEMENT_T* __restrict__ grad_output;  // [planes, D_out, H_out, W_out]
    ELEMENT_T* __restrict__ columns;            // [planes, K_D, K_H, K_W, in_rows, W_in]
    int planes;                                 // images * channels
    int h_in, w_in, d_out, h_out, w_out;        // d_out: 1 for images
    int in_row_begin, in_rows;
};

extern "C" __global__ void __launch_bounds__(256) columns_im2col_kernel(const __grid_constant__ im2col_params p) {
    const index_t pixel = item_of_thread();
    const int plane = plane_of_thread();
    const index_t tap_stride = static_cast<index_t>(p.in_rows) * p.w_in;
    if (plane >= p.planes || pixel >= tap_stride) return;
    const int row = static_cast<int>(pixel / p.w_in);
    const int iw = static_cast<int>(pixel - static_cast<index_t>(row) * p.w_in);
    const int d_out = kIsVolume ? p.d_out : 1;
    const int slice = kIsVolume ? (p.in_row_begin + row) / p.h_in : 0;

    const ELEMENT_T* __restrict__ grad_output = p.grad_output + static_cast<long long>(plane) * d_out * p.h_out * p.w_out;
    ELEMENT_T* __restrict__ column =
        p.columns + static_cast<long long>(plane) * (KERNEL_D * KERNEL_H * KERNEL_W) * tap_stride + pixel;
    const int od_first = slice * STRIDE_D - PADDING_D;
    const int oh_first = (p.in_row_begin + row - slice * p.h_in) * STRIDE_H - PADDING_H;
    const int ow_first = iw * STRIDE_W - PADDING_W;

    #pragma unroll (KERNEL_W <= 16 ? (16 + KERNEL_W - 1) / KERNEL_W : 1)
    for (int k = 0; k < KERNEL_D * KERNEL_H; ++k) {
        const int kd = kIsVolume ? k / KERNEL_H : 0, kh = k - kd * KERNEL_H;
        const int od = od_first + kd * DILATION_D, oh = oh_first + kh * DILATION_H;
        const bool slice_inside = !kIsVolume || static_cast<unsigned>(od) < d_out;
        const bool row_inside = slice_inside && static_cast<unsigned>(oh) < p.h_out;
        const index_t out_row = static_cast<index_t>(od) * p.h_out + oh;
        const ELEMENT_T* __restrict__ source = grad_output + (row_inside ? out_row * p.w_out : 0);
        #pragma unroll 16
        for (int kw = 0; kw < KERNEL_W; ++kw) {
            const int ow = ow_first + kw * DILATION_W;
            const bool inside = row_inside && static_cast<unsigned>(ow) < p.w_out;
            column[(k * KERNEL_W + kw) * tap_stride] = inside ? source[ow] : ELEMENT_T{};
        }
    }
}
