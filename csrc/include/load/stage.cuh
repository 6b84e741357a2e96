/* direct: fills the patch and the weights in shared memory. Part of direct/forward.cu.
 *
 * In NCHW the threads of a warp load neighbouring columns, each of several channels; in channels_last neighbouring
 * channels, LOAD_VECTOR a thread. All loads of a step are in flight before the first store.
 */
#pragma once

/* Column of a patch row -> its place. */
__device__ __forceinline__ int place_of_column(int column) {
    return column / kVector % kBanks * kRunPitch + column / CELLS * kVector + column % kVector;
}

#if !CHANNELS_LAST
/* How many channels of the patch a thread fills in a row: up to 16 loads in flight, but work for all threads. */
__device__ constexpr int channels_at_once(int columns, int steps) {
    int best = 1;
    for (int channels = 2; channels * steps <= 16; ++channels)
        if (TILE_IN % channels == 0 && columns * kPatchH * (TILE_PLANES * TILE_IN / channels) >= kThreads)
            best = channels;
    return best;
}

/* Fill STEPS * COLUMNS columns of the patch from FIRST on. COLUMNS threads share a row, each with one set of columns of
 * several channels, for which row and column offsets are computed once.
 */
template <int FIRST, int COLUMNS, int STEPS>
__device__ __forceinline__ void stage_columns(
    const direct_forward_params& p, accumulate_t* patch, const tile_t& tile, int first_in) {
    constexpr int kChannels = channels_at_once(COLUMNS, STEPS), kParts = TILE_PLANES * TILE_IN / kChannels;
    constexpr int kCount = COLUMNS * kPatchH * kParts;
    const index_t in_pixels = static_cast<index_t>(p.h_in) * p.w_in;
    const ELEMENT_T* __restrict__ source =
        p.input + (static_cast<long long>(tile.first_plane) * IN_CHANNELS + first_in) * in_pixels;
    #pragma unroll 1
    for (int i = threadIdx.x; i < kCount; i += kThreads) {
        const int row = i / COLUMNS % kPatchH, first_channel = i / (COLUMNS * kPatchH) * kChannels;
        const int first_column = FIRST + i % COLUMNS, plane = first_channel / TILE_IN, in = first_channel % TILE_IN;
        const int ih = tile.cell_row + kFirstH + row, iw = tile.cell_column + kFirstW + first_column;
        const bool inside =
            (static_cast<unsigned>(ih) < p.h_in) & (TILE_PLANES == 1 || tile.first_plane + plane < p.planes);
        const ELEMENT_T* from =
            source + ((plane * IN_CHANNELS + in) * in_pixels + (static_cast<index_t>(ih) * p.w_in + iw));
        ELEMENT_T values[kChannels][STEPS];
        #pragma unroll
        for (int channel = 0; channel < kChannels; ++channel, from += in_pixels) {
            keep(from);
            #pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const bool taken = inside & (static_cast<unsigned>(iw + step * COLUMNS) < p.w_in) &
                                   (IN_CHANNELS % TILE_IN == 0 || first_in + in + channel < IN_CHANNELS);
                values[channel][step] = taken ? load_once(from + step * COLUMNS) : ELEMENT_T{};
            }
        }
        accumulate_t* to = patch + (first_channel * kPatchH + row) * kPitch + place_of_column(first_column);
        #pragma unroll
        for (int channel = 0; channel < kChannels; ++channel)
            #pragma unroll
            for (int step = 0; step < STEPS; ++step)
                if (first_column + step * COLUMNS < kPatchW)
                    to[channel * kChannelPitch + step * (COLUMNS / CELLS * kVector)] = widen(values[channel][step]);
    }
}
#endif

/* Fill the patch, zero outside the image and beyond the last channel or plane. */
__device__ __forceinline__ void stage_patch(
    const direct_forward_params& p, accumulate_t* patch, const tile_t& tile, int first_in) {
#if CHANNELS_LAST
    const int row0 = tile.cell_row + kFirstH, column0 = tile.cell_column + kFirstW;
    const index_t in_pixels = static_cast<index_t>(p.h_in) * p.w_in;
    // Channels innermost, LOAD_VECTOR of them a thread; the block's planes are neighbouring groups of one image.
    constexpr int kVectors = TILE_IN / LOAD_VECTOR;
    constexpr int kCount = kVectors * TILE_PLANES * kPatchH * kPatchW;
    const int image = tile.first_plane / p.groups, first_group = tile.first_plane - image * p.groups;
    const index_t channels = static_cast<index_t>(p.groups) * IN_CHANNELS;
    const ELEMENT_T* __restrict__ source =
        p.input + image * static_cast<long long>(in_pixels) * channels + first_group * IN_CHANNELS + first_in;
    const bool aligned = reinterpret_cast<unsigned long long>(p.input) % sizeof(vector_t<LOAD_VECTOR>) == 0;
    #pragma unroll 4
    for (int i = threadIdx.x; i < kCount; i += kThreads) {
        const int in = i % kVectors * LOAD_VECTOR, plane = i / kVectors % TILE_PLANES;
        const int column = i / (kVectors * TILE_PLANES) % kPatchW, row = i / (kVectors * TILE_PLANES * kPatchW);
        const int ih = row0 + row, iw = column0 + column;
        const bool inside = static_cast<unsigned>(ih) < p.h_in && static_cast<unsigned>(iw) < p.w_in &&
                            (IN_CHANNELS % TILE_IN == 0 || first_in + in < IN_CHANNELS);
        const index_t pixel = static_cast<index_t>(ih) * p.w_in + iw;
        const ELEMENT_T* __restrict__ from = source + (pixel * channels + (plane * IN_CHANNELS + in));
        vector_t<LOAD_VECTOR> values{};
        if (inside && aligned) values = *reinterpret_cast<const vector_t<LOAD_VECTOR>*>(from);
        else if (inside)
            for (int v = 0; v < LOAD_VECTOR; ++v) values.value[v] = load_once(from + v);
        accumulate_t* target = patch + (plane * TILE_IN + in) * kChannelPitch + row * kPitch + place_of_column(column);
        #pragma unroll
        for (int v = 0; v < LOAD_VECTOR; ++v) target[v * kChannelPitch] = widen(values.value[v]);
    }
#else
    // Whole warps fill blocks of 32 columns. The rest of each row, and short rows, are distributed over all threads.
    constexpr int kSteps = (kPatchW + 8) / 32, kRest = kPatchW > kSteps * 32 ? kPatchW - kSteps * 32 : 0;
    if constexpr (kSteps > 0) stage_columns<0, 32, kSteps>(p, patch, tile, first_in);
    if constexpr (kRest > 0) stage_columns<kSteps * 32, kRest, 1>(p, patch, tile, first_in);
#endif
}

/* Pack the weights as the quads that are read at once. Values beyond the last channel or tap are never used. */
__device__ __forceinline__ void stage_weights(
    const direct_forward_params& p, accumulate_t* target, const tile_t& tile, int first_in) {
    // A thread lays out one tap row of a pair of channels: in order of memory, so that neighbours read neighbours.
    constexpr int kRows = TILE_OUT * KERNEL_H, kCount = TILE_PLANES * TILE_IN * kRows;
    constexpr int kTrips = (kCount + kThreads - 1) / kThreads;
    const int first_group = tile.first_plane % p.groups;
    #pragma unroll (KERNEL_W <= 8 ? least(kTrips, 2) : 1)
    for (int trip = 0; trip < kTrips; ++trip) {
        const int i = trip * kThreads + static_cast<int>(threadIdx.x);
        const int channel = i / kRows, in = channel % TILE_IN, plane = channel / TILE_IN;
        const int out = i % kRows / KERNEL_H, kh = i % KERNEL_H;
        if (i >= kCount || (IN_CHANNELS % TILE_IN != 0 && first_in + in >= IN_CHANNELS) ||
            (OUT_CHANNELS % TILE_OUT != 0 && tile.first_out + out >= OUT_CHANNELS))
            continue;
        const int group = TILE_PLANES == 1 ? first_group : (first_group + plane) % p.groups;
        const index_t matrix = static_cast<index_t>(group) * IN_CHANNELS + first_in + in;
        const ELEMENT_T* __restrict__ from = p.weight + matrix * (OUT_CHANNELS * KERNEL_H * KERNEL_W) +
                                             (tile.first_out + out) * p.weight_channel + kh * KERNEL_W * p.weight_tap;
        accumulate_t* to = target + (channel * KERNEL_H + kh) * kQuads * 4 + out;
        #pragma unroll (KERNEL_W <= 16 ? KERNEL_W : 4)
        for (int kw = 0; kw < KERNEL_W; ++kw) to[kw * TILE_OUT] = widen(load_once(from + kw * p.weight_tap));
    }
}
