/* Rows of packed weights in the matrix products of fused: SLOTS phases or taps x CHANNELS output channels, 64 of an M block, in an
 * order that gives a thread neighbours to store. In each 16 rows, a thread has row g and row g + 8 (see ptx/wgmma.cuh); if
 * weights are columns of the product, it has columns 2t and 2t + 1 in each 8.
 *
 *   ROWS_PLAIN     row = (slot, channel)
 *   ROWS_SLOTS     rows g and g + 8 are slots 2k and 2k + 1 of one channel: neighbouring columns of the output
 *   ROWS_CHANNELS  rows g and g + 8 are channels 2k and 2k + 1 of one slot: neighbours in channels_last
 *   ROWS_LINES     as ROWS_SLOTS, and all slots of a channel are among the same 16 rows: a warp has whole rows of cells
 *   ROWS_COLUMNS   columns 8j + 2t and 8j + 2t + 1 of each 4 * SLOTS are slots 2j and 2j + 1 of channel t: a thread has all of it
 */
#pragma once

#define ROWS_PLAIN 0
#define ROWS_SLOTS 1
#define ROWS_CHANNELS 2
#define ROWS_LINES 3
#define ROWS_COLUMNS 4

struct row_t { int slot, channel; };

/* Slot and channel of a row of an M block; a slot of SLOTS or more is padding. */
__device__ __forceinline__ row_t place_of_row(int row) {
    [[maybe_unused]] const int pair = row / 16 * 8 + row % 8, half = row / 8 % 2;
#if ROW_ORDER == ROWS_SLOTS
    return {pair / CHANNELS * 2 + half, pair % CHANNELS};
#elif ROW_ORDER == ROWS_CHANNELS
    return {pair / (CHANNELS / 2), pair % (CHANNELS / 2) * 2 + half};
#elif ROW_ORDER == ROWS_LINES
    return {pair * 2 % SLOTS + half, pair * 2 / SLOTS};
#elif ROW_ORDER == ROWS_COLUMNS
    return {row % (4 * SLOTS) / 8 * 2 + row % 2, row / (4 * SLOTS) * 4 + row % 8 / 2};
#else
    return {row / CHANNELS, row % CHANNELS};
#endif
}
