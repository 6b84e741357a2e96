/* The register tile of the implicit product: rows of the target by neighbouring cells.
 *
 *   sums [rows, cells] = sum over entries e and channels c of weight[e][c][row] * plane[c][cell + shift(e)]
 *
 * A row's weight is one value for a whole vector of cells; a vector of cells is one load, unaligned, from the staged
 * plane, whatever the shift. About kLongestSum terms are summed one after the other, then added to what is there: so
 * rounding grows with the square root of that and not of the whole sum.
 */
#pragma once
#include "vector.h"

/* Terms of [rows, vectors * kLanes] sums: `channels` planes at `entries` shifts. weight [entries][channels][kRows]; the
 * cells of shift e begin at planes + at[e]. The first terms of a sum replace what is there. */
INLINE void tile(const int rows, const int vectors, i64 entries, i64 channels, const real* weight,
                 const real* planes, const i64* at, i64 plane_step, real* sums, i64 ld, int is_first) {
    vec sum[kRows][kVectors] = {0};
    for (i64 e = 0; e < entries; ++e) {
        const real* cells = planes + at[e];
        for (i64 c = 0; c < channels; ++c, weight += kRows, cells += plane_step) {
            vec x[kVectors];
            UNROLL
            for (int v = 0; v < vectors; ++v) x[v] = load(cells + v * kLanes);
            UNROLL
            for (int r = 0; r < rows; ++r)
                UNROLL
                for (int v = 0; v < vectors; ++v) sum[r][v] += weight[r] * x[v];
        }
    }
    UNROLL
    for (int r = 0; r < rows; ++r)
        UNROLL
        for (int v = 0; v < vectors; ++v) {
            real* to = sums + r * ld + v * kLanes;
            store(to, is_first ? sum[r][v] : (vec)(load(to) + sum[r][v]));
        }
}

TARGET static void tile_of(i64 rows, i64 vectors, i64 entries, i64 channels, const real* weight,
                           const real* planes, const i64* at, i64 plane_step, real* sums, i64 ld, int is_first) {
#define TILE(R, V) \
    case R * 4 + V: tile(R, V, entries, channels, weight, planes, at, plane_step, sums, ld, is_first); break;
#define TILES(R) TILE(R, 1) TILE(R, 2) TILE(R, 3)
    switch (rows * 4 + vectors) {
        TILES(1) TILES(2) TILES(3) TILES(4)
#if defined(AVX512) || defined(__aarch64__)
        TILES(5) TILES(6) TILES(7) TILES(8)
#endif
    }
}

/* Channels whose terms are summed at once: as many as kLongestSum has room for. */
INLINE i64 channels_at_once(i64 entries, i64 channels) {
    return MAX(1, MIN(channels, kLongestSum / MAX(1, entries)));
}

/* Rows of a tile. As few tiles as hold all rows have even shares: low tiles load more than they multiply. */
INLINE i64 tile_rows(i64 rows) { return CEIL_DIV(rows, CEIL_DIV(rows, kRows)); }

/* Sums of `rows` rows of each of `blocks` blocks, for `count` cells. Packed weights of blocks lie weight_step apart, as
 * [tile of rows][channels at once][entries][channels][kRows]; sums `sums_step` apart. A tile's part of the planes is
 * read from the L2 cache once, and serves all blocks from L1. */
TARGET static void product(i64 blocks, i64 rows, i64 count, i64 entries, i64 channels,
                           const real* weight, i64 weight_step, const real* planes, const i64* at,
                           i64 plane_step, real* sums, i64 sums_step, i64 ld) {
    const i64 step = channels_at_once(entries, channels), all = CEIL_DIV(count, kLanes), height = tile_rows(rows);
    for (i64 c = 0; c < channels; c += step)
        for (i64 v = 0, vectors; v < all; v += vectors) {
            vectors = CEIL_DIV(all - v, CEIL_DIV(all - v, kVectors));
            for (i64 block = 0; block < blocks; ++block)
                for (i64 row = 0; row < rows; row += height) {
                    const real* terms = weight + block * weight_step + (row / height * channels + c) * entries * kRows;
                    tile_of(MIN(height, rows - row), vectors, entries, MIN(step, channels - c), terms,
                            planes + c * plane_step + v * kLanes, at, plane_step,
                            sums + block * sums_step + row * ld + v * kLanes, ld, c == 0);
                }
        }
}
