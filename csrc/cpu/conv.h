/* The implicit product: a forward pass or an input gradient without columns.
 *
 * A worker stages a band of the source's cells as planes, one for each channel and class, zeros where images end. Every
 * tap then reads the same planes at a shift (product.h). Sums of a strip of cells go through a small buffer, from
 * which the classes of a row are interleaved into the image, with the bias.
 *
 *   one axis, stride 2, padding 1, kernel 4, 4 inputs, 8 outputs: output 2*m + c - 1 is class c of cell m (base 1), and
 *   output 3 (m=2, c=0) reads tap 0 at cell 2 and tap 2 at cell 1: shifts 0 and -1, as every output of class 0 does
 */
#pragma once
#include "product.h"

/* Each worker has so many bytes of scratch memory. staged [workers] is what each has staged, band * groups + group + 1.
 * bad is set when a value is met that is not finite. */
typedef struct {
    const conv_t* p; const void *source, *weight, *bias; void* target; real* packed;
    char* scratch; i64 bytes, *staged; int bad;
} conv_call_t;

INLINE void set(int* flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }

TARGET static int is_finite(const real* values, i64 count) {
    lane_t bad = 0;
    for (i64 i = 0; i < count; ++i) bad |= values[i] * 0 != 0;
    return !bad;
}

typedef struct { i64 image, d, h, first; } place_t;  /* a cell's image, row and place in it; image -1 is before all */

INLINE place_t place_of(const view_t* view, i64 cell) {
    const i64 *pitch = view->pitch, from = cell + pitch[0] * pitch[1] * pitch[2], row = from / pitch[2];
    return (place_t){row / pitch[1] / pitch[0] - 1, row / pitch[1] % pitch[0], row % pitch[1], from % pitch[2]};
}

/* The first cell of the next row. Divisions would take longer than a short row. */
INLINE void next_row(const view_t* view, place_t* place) {
    place->first = 0;
    if (++place->h == view->pitch[1]) ++place->d, place->h = 0;
    if (place->d == view->pitch[0]) ++place->image, place->d = 0;
}

/* Writes cells [start, start + count) of channels from `channel` on to planes [channels * classes, plane], zeros where
 * images end, and up to a vector beyond. Returns whether all values are finite, where that is `checked`. */
TARGET static int stage(const view_t* view, const void* source, i64 channel, i64 start, i64 count,
                        i64 plane, int checked, real* planes) {
    const i64 *size = view->size, *step = view->step, *stride = view->stride + kAxis, apart = step[2] * stride[2];
    const i64 classes = step[0] * step[1] * step[2], cells = size[2] / step[2], rest = size[2] % step[2];
    const i64 readable = view->kind || apart != 1 ? 0 : view->batch * view->stride[kImage] - kLanes;
    place_t row = place_of(view, start);
    for (i64 cell = 0, next; cell < count; cell = next, next_row(view, &row)) {  /* a row of cells, or a part of one */
        next = MIN(count, cell + view->pitch[2] - row.first);
        for (i64 class = 0; class < classes; ++class) {
            const i64 line = class / step[2], c = class % step[2];
            const i64 depth = row.d * step[0] + line / step[1], height = row.h * step[1] + line % step[1];
            const int inside = row.image >= 0 && row.image < view->batch && depth < size[0] && height < size[1];
            const i64 taken = inside ? MAX(0, MIN(next - cell, cells + (c < rest) - row.first)) : 0;
            i64 from = row.image * view->stride[kImage] + channel * view->stride[kChannel] + depth * stride[0] +
                           height * stride[1] + row.first * apart + c * stride[2];
            real* to = planes + class * plane + cell;
            for (i64 i = 0; i < view->channels; ++i, from += view->stride[kChannel], to += classes * plane) {
                if (from + taken <= readable)  /* whole vectors: what they have too many is overwritten below */
                    for (i64 j = 0; j < taken; j += kLanes) store(to + j, load((const real*)source + from + j));
                else if (taken) gather_row(view->kind, element(view->kind, source, from), apart, taken, to);
                store(to + taken, (vec){0});
                for (i64 j = taken + kLanes; j < next - cell; ++j) to[j] = 0;
            }
        }
    }
    for (i64 i = 0; checked && i < view->channels * classes; ++i) if (!is_finite(planes + i * plane, count)) return 0;
    return 1;
}

/* Sums [class of the job, channel of the block, strip] become positions of the target: cells [start, start + count). */
TARGET static void store_cells(const conv_t* p, i64 job, i64 channel, i64 channels, i64 start, i64 count,
                               i64 ld, const real* sums, const void* bias, void* target, real* line) {
    const view_t* view = &p->target;
    const i64 *step = view->step, *stride = view->stride + kAxis, kind = view->kind;
    real added[kRows];
    for (int t = 0; t < channels; ++t) added[t] = bias ? widened(kind, bias, channel + t) : 0;
    place_t row = place_of(view, start);
    for (i64 cell = 0, next; cell < count; cell = next, next_row(view, &row)) {
        next = MIN(count, cell + view->pitch[2] - row.first);
        const i64 origin = row.first * step[2] - view->base[2];  /* position of class 0 of the first cell */
        const i64 from = MAX(0, -origin), to = MIN((next - cell) * step[2], view->size[2] - origin);
        for (i64 pair = 0; pair < p->pairs[0] * p->pairs[1]; ++pair) {
            const i64 depth = row.d * step[0] + p->job_class[2 * job] + pair / p->pairs[1] - view->base[0];
            const i64 height = row.h * step[1] + p->job_class[2 * job + 1] + pair % p->pairs[1] - view->base[1];
            if (depth < 0 || depth >= view->size[0] || height < 0 || height >= view->size[1]) continue;
            const real* rows = sums + pair * step[2] * p->block * ld + cell;
            const i64 place = row.image * view->stride[kImage] + channel * view->stride[kChannel] + depth * stride[0] +
                                  height * stride[1] + origin * stride[2];
            if (stride[2] != 1) {  /* channels lie side by side */
                for (i64 i = from; i < MIN(to, from + step[2]); ++i) {  /* the first position of each class */
                    const real* values = rows + i % step[2] * p->block * ld + i / step[2];
                    for (i64 j = i; j < to; j += step[2], ++values)
                        for (int t = 0; t < channels; ++t)
                            narrow(kind, target, place + j * stride[2] + t, values[t * ld] + added[t]);
                }
                continue;
            }
            for (int t = 0; t < channels; ++t) {
                const i64 at = place + t * view->stride[kChannel];
                interleave(step[2], rows + t * ld, p->block * ld, added[t], from, to, kind ? line : (real*)target + at);
                if (kind) for (i64 i = from; i < to; ++i) narrow(kind, target, at + i, line[i]);
            }
        }
    }
}

/* Packed weights of a block of one product, and where those of a product begin. */
INLINE i64 packed_values(const conv_t* p, i64 first, i64 last) {
    return CEIL_DIV(p->rows, kRows) * kRows * p->source.channels * (p->first[last] - p->first[first]);
}
INLINE i64 packed_at(const conv_t* p, i64 product) { return p->blocks * packed_values(p, 0, product); }

/* Packs the weights of one block of channels of every product; see product.h. */
TARGET static void pack_block(void* context, i64 item, int worker) {
    conv_call_t* call = context;
    const conv_t* p = call->p;
    const i64 block = item % p->blocks, channels = p->source.channels, height = tile_rows(p->rows);
    const i64 left = p->target.channels - block * p->block;  /* channels of this block: the last may have fewer */
    const i64 kind = p->target.kind, from = item / p->blocks * p->weight_group + block * p->block * p->weight_target;
    real* packed = call->packed + item / p->blocks * p->packed;
    for (i64 c = 0; c < channels; ++c) {
        const void* weight = element(kind, call->weight, from + c * p->weight_source);
        for (i64 i = 0; i < p->jobs * p->products; ++i) {
            const i64 entries = p->first[i + 1] - p->first[i], step = channels_at_once(entries, channels);
            const i64 first = c / step * step, count = MIN(step, channels - first);
            real* to = packed + packed_at(p, i) + block * packed_values(p, i, i + 1);
            to += (first * entries + c - first) * kRows;
            for (i64 row = 0; row < p->rows; row += height, to += entries * channels * kRows)
                for (i64 e = 0; e < entries; ++e) {
                    const i64* tap = p->tap + (p->first[i] + e) * p->rows + row;
                    real* values = to + e * count * kRows;
                    if (!kind && !p->checked && left >= p->block && height == kRows && p->rows - row >= kRows)
                        for (int r = 0; r < kRows; ++r) values[r] = ((const real*)weight)[tap[r]];
                    else for (int r = 0; r < kRows; ++r) {
                        const int is_there = r < height && row + r < p->rows && (row + r) % p->block < left;
                        values[r] = is_there && tap[r] >= 0 ? widened(kind, weight, tap[r]) : 0;
                    }
                }
        }
    }
    for (i64 i = 0; i < p->jobs * p->products; ++i) {
        const i64 count = packed_values(p, i, i + 1);
        if (!is_finite(packed + packed_at(p, i) + block * count, count)) set(&call->bad);
    }
}

TARGET static int pack(const conv_t* p, const void* weight, void* packed, int threads) {
    conv_call_t call = {.p = p, .weight = weight, .packed = packed};
    parallel_for(p->groups * p->blocks, threads, pack_block, &call);
    return call.bad;
}

/* A part of the work on one group and band of cells: some of its units, a unit being a job's block of channels. */
TARGET static void conv_item(void* context, i64 item, int worker) {
    conv_call_t* call = context;
    const conv_t* p = call->p;
    const i64 split = item % p->splits, band = item / p->splits % p->bands, group = item / p->splits / p->bands;
    const i64 channels = p->source.channels, ld = p->strip + kTile, sums_step = p->products * p->rows * ld;
    const i64 start = band * p->band, end = MIN(p->total, start + p->band), entries = p->first[p->jobs * p->products];
    const i64 units = p->jobs * p->blocks, last = (split + 1) * units / p->splits;
    real *planes = (real*)(call->scratch + worker * call->bytes), *sums = planes + channels * p->planes * p->plane;
    real* line = sums + p->at_once * sums_step;
    i64* at = (i64*)(line + (p->target.kind ? p->strip * p->target.step[2] : 0));
    if (call->staged[worker] != band * p->groups + group + 1) {
        call->staged[worker] = band * p->groups + group + 1;
        if (!stage(&p->source, call->source, group * channels, start + p->low, end - start + p->high - p->low, p->plane,
                   p->checked, planes))
            set(&call->bad);
    }
    for (i64 cell = start; cell < end; cell += p->strip) {
        const i64 count = MIN(p->strip, end - cell);
        for (i64 e = 0; e < entries; ++e) at[e] = p->plane_of[e] * p->plane + p->shift[e] - p->low + cell - start;
        for (i64 unit = split * units / p->splits, blocks; unit < last; unit += blocks) {
            const i64 job = unit / p->blocks, block = unit % p->blocks;
            blocks = MIN(MIN(last - unit, p->blocks - block), p->at_once);
            for (i64 i = job * p->products; i < (job + 1) * p->products; ++i) {
                const i64 values = packed_values(p, i, i + 1);
                product(blocks, p->rows, count, p->first[i + 1] - p->first[i], channels,
                        call->packed + group * p->packed + packed_at(p, i) + block * values, values, planes,
                        at + p->first[i], p->planes * p->plane, sums + i % p->products * p->rows * ld, sums_step, ld);
            }
            for (i64 b = 0, channel = block * p->block; b < blocks; ++b, channel += p->block)
                store_cells(p, job, group * p->target.channels + channel, MIN(p->block, p->target.channels - channel),
                            cell, count, ld, sums + b * sums_step, call->bias, call->target, line);
        }
    }
}

TARGET static int conv(const conv_t* p, const void* source, const void* packed, const void* bias, void* target,
                       void* scratch, i64 bytes, int threads) {
    const size_t staged = (size_t)(threads * 8 + 63) / 64 * 64, itemsize = p->target.kind ? 2 : sizeof(real);
    conv_call_t call = {.p = p, .source = source, .packed = (real*)packed, .bias = bias, .target = target,
                        .scratch = (char*)scratch + staged, .bytes = bytes, .staged = memset(scratch, 0, staged)};
    advise_huge_pages(target, (size_t)(p->target.batch * p->target.stride[kImage]) * itemsize);
    parallel_for(p->groups * p->bands * p->splits, threads, conv_item, &call);
    return call.bad;
}
