/* The weight gradient: for each tap, products of the input with grad_output, shifted, summed over all cells.
 *
 * Both are staged as planes with the same numbers of cells (conv.h), so that a term of a sum is a vector of one times a
 * vector of the other; lanes are added up at the end of a band. An item owns some channels of both, and a slice of the
 * bands; slices are added up in their order. None of that depends on the number of threads.
 */
#pragma once
#include "conv.h"

/* partials [slices, all input channels, grad channels of a group, taps]; the last three are those of conv_call_t */
typedef struct {
    const wgrad_t* p; const void *input, *grad; void* gradient; real* partials; char* scratch; i64 bytes; int bad;
} wgrad_call_t;

enum { kSummed = 4096 };  /* values of the gradient of an item that adds up slices */

INLINE i64 gradient_values(const wgrad_t* p) { return p->groups * p->input.channels * p->grad.channels * p->taps; }

/* sums[i][j] = sum over cells of inputs[i] * grads[j] */
TARGET static void dots(const real* const* inputs, const real* const* grads, i64 count,
                        real sums[kDotRows][kDotColumns]) {
    vec sum[kDotRows][kDotColumns] = {0};
    for (i64 at = 0; at < count; at += kLanes) {
        vec g[kDotColumns];
        UNROLL
        for (int j = 0; j < kDotColumns; ++j) g[j] = load(grads[j] + at);
        UNROLL
        for (int i = 0; i < kDotRows; ++i) {
            const vec x = load(inputs[i] + at);
            UNROLL
            for (int j = 0; j < kDotColumns; ++j) sum[i][j] += x * g[j];
        }
    }
    for (int i = 0; i < kDotRows; ++i)
        for (int j = 0; j < kDotColumns; ++j) {
            sums[i][j] = 0;
            for (int l = 0; l < kLanes; ++l) sums[i][j] += sum[i][j][l];
        }
}

TARGET static void wgrad_item(void* context, i64 item, int worker) {
    wgrad_call_t* call = context;
    const wgrad_t* p = call->p;
    view_t input = p->input, grad = p->grad;
    const i64 blocks = CEIL_DIV(input.channels, p->input_block), rest = item / p->slices / blocks;
    const i64 grad_blocks = CEIL_DIV(grad.channels, p->grad_block), group = rest / grad_blocks;
    const i64 first_input = item / p->slices % blocks * p->input_block, first_grad = rest % grad_blocks * p->grad_block;
    const i64 input_channel = group * input.channels + first_input, row = grad.channels * p->taps;
    const i64 grad_channel = group * grad.channels + first_grad, slice = item % p->slices;
    real *x = (real*)(call->scratch + worker * call->bytes), *g = x + p->input_block * p->input_plane;
    real* partial = call->partials + slice * gradient_values(p) + input_channel * row + first_grad * p->taps;
    input.channels = MIN(p->input_block, input.channels - first_input);
    grad.channels = MIN(p->grad_block, grad.channels - first_grad);
    for (i64 i = 0; i < input.channels; ++i)
        memset(partial + i * row, 0, sizeof(real) * (size_t)(grad.channels * p->taps));
    for (i64 band = slice; band < p->bands; band += p->slices) {
        const i64 start = band * p->band, count = p->band + p->high - p->low;
        if (!stage(&input, call->input, input_channel, start, p->band, p->input_plane, 1, x)) set(&call->bad);
        if (!stage(&grad, call->grad, grad_channel, start + p->low, count, p->grad_plane, 1, g)) set(&call->bad);
        for (i64 i = 0; i < input.channels; i += kDotRows)
            for (i64 j = 0; j < grad.channels; j += kDotColumns)
                for (i64 tap = 0; tap < p->taps; ++tap) {
                    const real *rows[kDotRows], *columns[kDotColumns];  /* beyond the last channel: itself, unused */
                    real sums[kDotRows][kDotColumns];
                    for (int r = 0; r < kDotRows; ++r) rows[r] = x + MIN(i + r, input.channels - 1) * p->input_plane;
                    for (int c = 0; c < kDotColumns; ++c) {
                        const i64 plane = MIN(j + c, grad.channels - 1) * p->planes + p->plane_of[tap];
                        columns[c] = g + plane * p->grad_plane + p->shift[tap] - p->low;
                    }
                    dots(rows, columns, p->band, sums);
                    for (int r = 0; r < MIN(kDotRows, input.channels - i); ++r)
                        for (int c = 0; c < MIN(kDotColumns, grad.channels - j); ++c)
                            partial[(i + r) * row + (j + c) * p->taps + tap] += sums[r][c];
                }
    }
}

TARGET static void sum_slices(void* context, i64 item, int worker) {
    const wgrad_call_t* call = context;
    const i64 all = gradient_values(call->p);
    for (i64 i = item * kSummed; i < MIN(all, (item + 1) * kSummed); ++i) {
        real sum = 0;
        for (i64 slice = 0; slice < call->p->slices; ++slice) sum += call->partials[slice * all + i];
        narrow(call->p->grad.kind, call->gradient, i, sum);
    }
}

/* Partials may be the gradient itself, if it has wide values and one slice. */
TARGET static int wgrad(const wgrad_t* p, const void* input, const void* grad, void* gradient, void* partials,
                        void* scratch, i64 bytes, int threads) {
    wgrad_call_t call = {p, input, grad, gradient, partials, scratch, bytes, 0};
    const i64 blocks = CEIL_DIV(p->input.channels, p->input_block) * CEIL_DIV(p->grad.channels, p->grad_block);
    parallel_for(p->groups * blocks * p->slices, threads, wgrad_item, &call);
    if (partials != gradient) parallel_for(CEIL_DIV(gradient_values(p), kSummed), threads, sum_slices, &call);
    return call.bad;
}
