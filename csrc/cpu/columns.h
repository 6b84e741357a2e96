/* col2im and im2col: columns of a matrix product to an image, and an image to columns, in gather form.
 *
 *   columns [C, K_H, K_W, ring, W_in] <-> image [C, H_out, W_out];  input row i lies in row i % ring of the columns
 *   i = (o + P - k*D) / S, taken iff S divides it and 0 <= i < extent; direct.h has a worked case
 *
 * `rows` are those of the image to write, for col2im, and those of the columns, for im2col. Outputs of a phase,
 * (o + P) mod S, read the same taps, each at a constant shift: they are summed together, and written once.
 */
#pragma once
#include "direct.h"

typedef struct { const layer_t* p; const void *from, *bias; void* to; i64 ring; const i64* rows; } columns_call_t;

enum { kPart = 512, kItemRows = 8 };  /* outputs of a phase that are summed at once; rows of the image of an item */

TARGET static void col2im_rows(void* context, i64 item, int worker) {
    const columns_call_t* call = context;
    const layer_t* p = call->p;
    const i64 stride = p->stride[1], channel = item % p->c_out, first = call->rows[0] + item / p->c_out * kItemRows;
    const real added = call->bias ? widened(p->kind, call->bias, channel) : 0;
    real sum[kPart];
    for (i64 oh = first; oh < MIN(call->rows[1], first + kItemRows); ++oh)
        for (i64 ow = 0; ow < p->out[1]; ow = (ow + 1) % stride ? ow + 1 : ow + 1 + (kPart - 1) * stride) {
            const i64 count = MIN(kPart, CEIL_DIV(p->out[1] - ow, stride));  /* ow, ow + S, ow + 2*S, ... */
            for (i64 i = 0; i < count; ++i) sum[i] = added;
            for (i64 kh = 0; kh < p->kernel[0]; ++kh) {
                const i64 reach = oh + p->padding[0] - kh * p->dilation[0], ih = reach / p->stride[0];
                if (reach < 0 || reach % p->stride[0] || ih >= p->size[0]) continue;
                for (i64 kw = 0; kw < p->kernel[1]; ++kw) {
                    const i64 reach_w = ow + p->padding[1] - kw * p->dilation[1], iw = reach_w / stride;
                    if (reach_w % stride) continue;
                    const i64 tap = (channel * p->kernel[0] + kh) * p->kernel[1] + kw;
                    const real* columns = (const real*)call->from + (tap * call->ring + ih % call->ring) * p->size[1];
                    for (i64 i = MAX(0, -iw); i < MIN(count, p->size[1] - iw); ++i) sum[i] += columns[i + iw];
                }
            }
            const i64 place = (channel * p->out[0] + oh) * p->out[1] + ow;
            if (p->kind) for (i64 i = 0; i < count; ++i) narrow(p->kind, call->to, place + i * stride, sum[i]);
            else for (i64 i = 0; i < count; ++i) ((real*)call->to)[place + i * stride] = sum[i];
        }
}

TARGET static void im2col_tap(void* context, i64 item, int worker) {
    const columns_call_t* call = context;
    const layer_t* p = call->p;
    const i64 kw = item % p->kernel[1], kh = item / p->kernel[1] % p->kernel[0], w_in = p->size[1];
    const i64 channel = item / p->kernel[1] / p->kernel[0], rows = call->rows[1] - call->rows[0];
    const reach_t w = reach_of(p, 1, kw);
    for (i64 ih = call->rows[0]; ih < call->rows[1]; ++ih) {
        real* columns = (real*)call->to + (item * rows + ih - call->rows[0]) * w_in;
        const i64 oh = ih * p->stride[0] - p->padding[0] + kh * p->dilation[0];
        const i64 first = oh >= 0 && oh < p->out[0] ? MIN(w.first, w_in) : w_in, last = MAX(first, w.last);
        const i64 place = (channel * p->out[0] + oh) * p->out[1] + first * p->stride[1] + w.origin;
        memset(columns, 0, sizeof(real) * (size_t)first);
        if (first < last)
            gather_row(p->kind, element(p->kind, call->from, place), p->stride[1], last - first, columns + first);
        memset(columns + last, 0, sizeof(real) * (size_t)(w_in - last));
    }
}

TARGET static void col2im(const layer_t* p, const void* columns, const void* bias, void* image, i64 ring,
                          const i64* rows, int threads) {
    columns_call_t call = {p, columns, bias, image, ring, rows};
    if (!rows[0]) advise_huge_pages(image, (size_t)(p->c_out * p->out[0] * p->out[1]) * (p->kind ? 2 : sizeof(real)));
    parallel_for(p->c_out * CEIL_DIV(rows[1] - rows[0], kItemRows), threads, col2im_rows, &call);
}

TARGET static void im2col(const layer_t* p, const void* image, void* columns, const i64* rows, int threads) {
    columns_call_t call = {p, image, NULL, columns, 0, rows};
    parallel_for(p->c_out * p->kernel[0] * p->kernel[1], threads, im2col_tap, &call);
}
