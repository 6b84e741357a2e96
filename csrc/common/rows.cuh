/* Rows of the matrix products of fused: an M block is 64 rows, which are SLOTS phases x CHANNELS output channels, in an
 * order that gives a thread neighbours to store. Of each 16 rows, a thread has row g and row g + 8 (see wgmma.cuh).
 *
 *   ROWS_PLAIN     row = (slot, channel)
 *   ROWS_SLOTS     rows g and g + 8 are slots 2k and 2k + 1 of one channel: neighbouring columns of the output
 *   ROWS_CHANNELS  rows g and g + 8 are channels 2k and 2k + 1 of one slot: neighbours in channels_last
 *   ROWS_LINES     all slots of a channel are among the same 16 rows, which have as many channels as fit: a warp has whole
 *                  rows of cells. Rows g and g + 8 are slots 2k and 2k + 1 where SLOTS is even
 */
#pragma once

#define ROWS_PLAIN 0
#define ROWS_SLOTS 1
#define ROWS_CHANNELS 2
#define ROWS_LINES 3

struct row_t { int slot, channel; };

/* What a row of an M block is; none of the block's where the slot is SLOTS or more. */
__device__ __forceinline__ row_t place_of_row(int row) {
    [[maybe_unused]] const int pair = row / 16 * 8 + row % 8, half = row / 8 % 2;
#if ROW_ORDER == ROWS_SLOTS
    return {pair / CHANNELS * 2 + half, pair % CHANNELS};
#elif ROW_ORDER == ROWS_CHANNELS
    return {pair / (CHANNELS / 2), pair % (CHANNELS / 2) * 2 + half};
#elif ROW_ORDER == ROWS_LINES
    constexpr int kOfWarp = 16 / SLOTS;  // channels
    const int place = SLOTS % 2 == 0 ? row % 8 * 2 + half : row % 16, channel = place / SLOTS;
    return {channel < kOfWarp ? place % SLOTS : SLOTS, row / 16 * kOfWarp + channel};
#else
    return {row / CHANNELS, row % CHANNELS};
#endif
}
