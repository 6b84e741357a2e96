/* direct: a transposed convolution and its gradients as they are defined. To be read; serves every layer.
 *
 *   input [N, C_in, H_in, W_in], weight [C_in, C_out/groups, K_H, K_W] -> output [N, C_out, H_out, W_out]
 *   scatter  o = i*S - P + k*D        gather  i = (o + P - k*D) / S, taken iff S divides it and 0 <= i < extent
 *
 *   S=2 P=1 K=3 D=1, o=3:  k=0 -> i=2;  k=1 -> no;  k=2 -> i=1
 *
 * An item is a row of the output, which gathers input rows, or of the input's gradient, or the taps of two channels.
 * Within a row all inputs that a tap joins with an output are taken at once. Channels are those of a group.
 */
#pragma once
#include "vector.h"

enum { kChannels = 16, kParts = 16 };  /* channels summed apart, to round less; sums of a row that vectors keep apart */
typedef struct { const layer_t* p; const real *a, *b, *bias; real* result; } direct_call_t;

/* Inputs [first, last) of an axis that tap k joins with outputs, which are i*S + origin. */
typedef struct { i64 first, last, origin; } reach_t;

INLINE reach_t reach_of(const layer_t* p, int axis, i64 k) {
    const i64 stride = p->stride[axis], origin = k * p->dilation[axis] - p->padding[axis];
    const i64 first = origin < 0 ? CEIL_DIV(-origin, stride) : 0, left = p->out[axis] - origin;
    return (reach_t){first, left > 0 ? MIN(p->size[axis], CEIL_DIV(left, stride)) : 0, origin};
}

/* output[o] = bias + sum over channels and taps of weight * input[i] */
TARGET static void direct_forward_row(void* context, i64 item, int worker) {
    const direct_call_t* call = context;
    const layer_t* p = call->p;
    const i64 oh = item % p->out[0], plane = item / p->out[0], group = plane / p->c_out, co = plane % p->c_out;
    const i64 stride = p->stride[1], taps = p->kernel[0] * p->kernel[1];  /* group: of all images */
    real *restrict output = call->result + item * p->out[1], *restrict sum = calloc(p->out[1], sizeof(real));
    for (i64 ow = 0; ow < p->out[1]; ++ow) output[ow] = call->bias ? call->bias[plane % (p->c_out * p->groups)] : 0;
    for (i64 first = 0; first < p->c_in; first += kChannels) {
        for (i64 kh = 0; kh < p->kernel[0]; ++kh) {
            const i64 reach = oh + p->padding[0] - kh * p->dilation[0], ih = reach / p->stride[0];
            if (reach < 0 || reach % p->stride[0] || ih >= p->size[0]) continue;
            for (i64 ci = group * p->c_in + first; ci < group * p->c_in + MIN(p->c_in, first + kChannels); ++ci) {
                const real* restrict input = call->a + (ci * p->size[0] + ih) * p->size[1];
                const real* weight = call->b + (ci % (p->groups * p->c_in) * p->c_out + co) * taps + kh * p->kernel[1];
                for (i64 kw = 0; kw < p->kernel[1]; ++kw) {
                    const reach_t w = reach_of(p, 1, kw);
                    for (i64 i = w.first; i < w.last; ++i) sum[i * stride + w.origin] += weight[kw] * input[i];
                }
            }
        }
        for (i64 ow = 0; ow < p->out[1]; ++ow) output[ow] += sum[ow], sum[ow] = 0;
    }
    free(sum);
}

/* grad_input[i] = sum over channels and taps of weight * grad_output[o] */
TARGET static void direct_input_grad_row(void* context, i64 item, int worker) {
    const direct_call_t* call = context;
    const layer_t* p = call->p;
    const i64 ih = item % p->size[0], plane = item / p->size[0], group = plane / p->c_in;
    const i64 taps = p->kernel[0] * p->kernel[1], stride = p->stride[1], ci = plane % (p->c_in * p->groups);
    real *restrict gradient = call->result + item * p->size[1], *restrict sum = calloc(p->size[1], sizeof(real));
    memset(gradient, 0, sizeof(real) * (size_t)p->size[1]);
    for (i64 first = 0; first < p->c_out; first += kChannels) {
        for (i64 kh = 0; kh < p->kernel[0]; ++kh) {
            const i64 oh = ih * p->stride[0] - p->padding[0] + kh * p->dilation[0];
            if (oh < 0 || oh >= p->out[0]) continue;
            for (i64 co = first; co < MIN(p->c_out, first + kChannels); ++co) {
                const real* restrict grad = call->a + ((group * p->c_out + co) * p->out[0] + oh) * p->out[1];
                const real* weight = call->b + (ci * p->c_out + co) * taps + kh * p->kernel[1];
                for (i64 kw = 0; kw < p->kernel[1]; ++kw) {
                    const reach_t w = reach_of(p, 1, kw);
                    for (i64 i = w.first; i < w.last; ++i) sum[i] += weight[kw] * grad[i * stride + w.origin];
                }
            }
        }
        for (i64 iw = 0; iw < p->size[1]; ++iw) gradient[iw] += sum[iw], sum[iw] = 0;
    }
    free(sum);
}

/* grad_weight[k] = sum over images and pixels of input[i] * grad_output[o], for an input and an output channel */
TARGET static void direct_weight_grad_pair(void* context, i64 item, int worker) {
    const direct_call_t* call = context;
    const layer_t* p = call->p;
    const i64 co = item % p->c_out, ci = item / p->c_out % p->c_in, group = item / p->c_out / p->c_in;
    const i64 stride = p->stride[1];
    for (i64 tap = 0; tap < p->kernel[0] * p->kernel[1]; ++tap) {
        const reach_t h = reach_of(p, 0, tap / p->kernel[1]), w = reach_of(p, 1, tap % p->kernel[1]);
        double sum = 0;
        for (i64 n = group; n < p->batch * p->groups; n += p->groups)
            for (i64 ih = h.first; ih < h.last; ++ih) {
                const real* input = call->a + ((n * p->c_in + ci) * p->size[0] + ih) * p->size[1];
                const i64 oh = ih * p->stride[0] + h.origin;
                const real* grad = call->b + ((n * p->c_out + co) * p->out[0] + oh) * p->out[1] + w.origin;
                real parts[kParts] = {0};
                i64 iw = w.first;
                for (; iw + kParts <= w.last; iw += kParts)
                    for (int l = 0; l < kParts; ++l) parts[l] += input[iw + l] * grad[(iw + l) * stride];
                for (; iw < w.last; ++iw) parts[0] += input[iw] * grad[iw * stride];
                for (int l = 0; l < kParts; ++l) sum += parts[l];
            }
        call->result[item * p->kernel[0] * p->kernel[1] + tap] = (real)sum;
    }
}

/* Pass 0: from input and weight; 1: from grad_output and weight; 2: from input and grad_output. */
TARGET static void direct(const layer_t* p, int pass, const void* a, const void* b, const void* bias, void* result,
                          int threads) {
    direct_call_t call = {p, a, b, bias, result};
    const i64 images = p->batch * p->groups;
    if (pass == 0) parallel_for(images * p->c_out * p->out[0], threads, direct_forward_row, &call);
    if (pass == 1) parallel_for(images * p->c_in * p->size[0], threads, direct_input_grad_row, &call);
    if (pass == 2) parallel_for(p->groups * p->c_in * p->c_out, threads, direct_weight_grad_pair, &call);
}
