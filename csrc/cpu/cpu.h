/* Kernels for a CPU: the arguments from the host, and the functions of each instruction set.
 *
 * They are called through ctypes; gemmconv/kernels/cpu/library.py has the same structs, all of int64. Geometry is
 * worked out there: a pass reaches these kernels as tables of taps and shifts, for images of one to three axes (missing
 * ones have extent 1). Strides are in elements. Sums are kept in float32, and in float64 for float64.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef int64_t i64;

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

enum { kWide, kBfloat16, kFloat16 };  /* element type: float32 or float64, whichever sums are kept in, or 16 bits */
enum { kImage, kChannel, kAxis };     /* strides: of images, of channels, then of the three axes */

/* Images cut into cells. Along an axis, cell m holds the positions step*m - base + c, one of each class c < step. Cells
 * of all images are numbered: cell (n, d, h, w) is ((n*pitch_d + d)*pitch_h + h)*pitch_w + w. A pitch exceeds the cells
 * of its axis by enough that no tap reaches from one row of an image into the values of the next. */
typedef struct {
    i64 kind, batch, channels;  /* channels of one group */
    i64 size[3], step[3], base[3], pitch[3], stride[5];
} view_t;

/* A pass as a correlation: the target's channel t at a cell is the sum, over entries e and channels s of the source, of
 * weight[s][tap(e, t)] * source[s][class(e)][cell + shift(e)]. Jobs are independent, each for some of its classes. The
 * rows of a product share its entries; a row is a pair of a class and one of `block` channels. */
typedef struct {
    view_t source, target;
    i64 groups;
    i64 low, high;                     /* least and greatest shift, in numbers of cells */
    i64 jobs, products, block, rows;   /* products of a job; channels of a block; rows of a product */
    i64 blocks, splits, total, bands;  /* blocks of a group; parts of the work on a band; all cells, and their bands */
    i64 band, strip, at_once, planes;  /* cells of a band and of a strip; blocks at once; classes of the source */
    i64 plane;                         /* values from one staged plane to the next */
    i64 weight_group, weight_source, weight_target;  /* strides of the weight: of groups and of channels */
    i64 packed;                        /* values of one group's packed weight */
    const i64 *first, *shift, *plane_of;  /* first entry of each product, and one more; shift and class of entries */
    const i64 *tap, *job_class;        /* [entries, rows] place in the weight, or -1; [jobs, 2] first class */
    i64 pairs[2], checked;             /* classes of a job along depth and height; whether tap has -1 */
} conv_t;

/* A weight gradient: for a tap, the sum over cells of input[s][cell] * grad[t][class(tap)][cell + shift(tap)]. */
typedef struct {
    view_t input, grad;
    i64 groups, taps, low, high;
    i64 input_block, grad_block;       /* channels that an item has of each */
    i64 band, bands, slices, planes;   /* slices of the bands are summed apart */
    i64 input_plane, grad_plane;
    const i64 *shift, *plane_of;       /* [taps] */
} wgrad_t;

/* A layer in two axes, contiguous NCHW, for `direct`, col2im and im2col; channels are those of a group. */
typedef struct {
    i64 kind, batch, groups, c_in, c_out;
    i64 size[2], out[2], kernel[2], stride[2], padding[2], dilation[2];
} layer_t;

/* The kernels of an instruction set. conv, pack and wgrad return whether they met a value that is not finite: times a
 * padding zero it may have spoiled the result, and `direct` has to compute it again. */
typedef struct {
    i64 rows, lanes, vectors, dot_columns;  /* of a register tile; of a weight gradient's */
    int (*pack)(const conv_t*, const void* weight, void* packed, int threads);
    int (*conv)(const conv_t*, const void* source, const void* packed, const void* bias, void* target, void* scratch,
                i64 bytes, int threads);
    int (*wgrad)(const wgrad_t*, const void* input, const void* grad, void* gradient, void* partials, void* scratch,
                 i64 bytes, int threads);
    void (*direct)(const layer_t*, int pass, const void* a, const void* b, const void* bias, void* result, int threads);
    void (*col2im)(const layer_t*, const void* columns, const void* bias, void* image, i64 ring, const i64* rows,
                   int threads);
    void (*im2col)(const layer_t*, const void* image, void* columns, const i64* rows, int threads);
    uint64_t (*checksum)(const void* start, i64 bytes, int threads);
} kernels_t;

/* Calls work(context, item, worker) for every item, on at most `threads` threads of torch's; workers count from 0. */
typedef void (*work_t)(void* context, i64 item, int worker);
void parallel_for(i64 items, int threads, work_t work, void* context);
void advise_huge_pages(void* start, size_t bytes);
