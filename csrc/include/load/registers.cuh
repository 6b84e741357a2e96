/* Loaders of sm90/implicit_gemm.cu that load inputs into registers, and from there store units. */
#pragma once

#include "load/patch_elements.cuh"
#include "ptx/keep.cuh"
#include "ptx/named_barrier.cuh"

// The loaders share a patch in p.batches, of each of which a thread has p.together loads on their way, at most kTogether.
constexpr int kTogether = LOADED_TOGETHER;

/* The spot and the unit that a thread loads in a turn. */
struct share_t { int spot, unit; };
__device__ __forceinline__ share_t share_of(const implicit_gemm_params& p, int turn, int thread) {
    static_assert(PRODUCERS % UNITS == 0, "the unit of a thread is the same in each turn");
    if (kUnitsFirst) return {thread / UNITS + turn * (PRODUCERS / UNITS), thread % UNITS};
    const int share = thread + turn * PRODUCERS;
    const int unit = divided_small(share, p.by_spots);
    return {share - unit * spots_of(p), unit};
}

/* Where a spot of a tile's patch begins in the input, -1 for zeros. */
__device__ __forceinline__ index_t place_of(const implicit_gemm_params& p, int first, spot_t spot) {
    const int position = first + spot.position;  // of all that are flattened; may be negative
    const int period = p.strip_rows * p.pitch;
    const int above = divided(position + period, p.by_pitch);  // rows, from one strip before the first
    const int strip = divided(above, p.by_strip_rows) - 1, row = above - (strip + 1) * p.strip_rows;
    if (strip < 0) return -1;
    const int image = divided(strip, p.by_strips), across = strip - image * p.strips;
    const int ih = (row + p.origin_h) * UNIT_H + spot.plane / UNIT_W;
    const int column = position + period - above * p.pitch + across * p.strip_cells + p.origin_w;
    const int iw = column * UNIT_W + spot.plane % UNIT_W;
    if (image >= p.batch) return -1;
    if (static_cast<unsigned>(ih) >= p.h_in || static_cast<unsigned>(iw) >= p.w_in) return -1;
    const index_t pixels = static_cast<index_t>(p.h_in) * p.w_in, pixel = static_cast<index_t>(ih) * p.w_in + iw;
    const int channels = p.groups * IN_CHANNELS;
    return CHANNELS_LAST ? (image * pixels + pixel) * channels : image * channels * pixels + pixel;
}

/* Channels from `channel` on, `stride` elements apart; zeros beyond the last channel, and where nothing is there. */
__device__ __forceinline__ void load_spot(
    spot_unit_t& values, const ELEMENT_T* __restrict__ from, bool there, int channel, index_t stride) {
#if VECTOR_LOADS
    static_assert(sizeof(spot_unit_t) == sizeof(unit_t), "a unit is 16 bytes");
    unit_t& unit = reinterpret_cast<unit_t&>(values);
    unit = {};
    if (there && channel < IN_CHANNELS) unit = *reinterpret_cast<const unit_t*>(from);
#else
    #pragma unroll
    for (int e = 0; e < kElements; ++e) {
        const bool full = IN_CHANNELS % (UNITS * kElements) == 0;
        values.channel[e] = {};
        if (there && (full || channel + e < IN_CHANNELS))
            values.channel[e] = *reinterpret_cast<const words_t<kSpotBytes>*>(from);
        from += stride;
    }
#endif
}

/* Where a turn's input lies from a chunk's first channel on, -1 for zeros. */
__device__ __forceinline__ index_t from_of(
    const implicit_gemm_params& p, int turn, int thread, const index_t* places, index_t stride) {
    const share_t share = share_of(p, turn, thread);
    const index_t place = share.spot < spots_of(p) && share.unit < UNITS ? places[share.spot] : index_t(-1);
    return place < 0 ? -1 : place + share.unit * (kElements * stride);
}

/* Loads the patches of tile after tile, chunk after chunk. The places of a tile's spots are worked out once, for all warps, in
 * one of two tables: nobody is more than a table ahead. Where a thread's loads are one batch, where they lie stays in registers:
 * from chunk to chunk loaders wait for memory, and for each instruction before their loads.
 */
__device__ __forceinline__ void produce_patches(const implicit_gemm_params& p, const stages_t& s, int thread) {
    const index_t stride = CHANNELS_LAST ? 1 : static_cast<index_t>(p.h_in) * p.w_in;  // of channels
    const int lane = thread % 32;
    const int spots = spots_of(p);
    ring_t ring, tables;
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const item_t item = item_of(p, i);
        index_t before = item.group * IN_CHANNELS * stride;  // a chunk's channels, of an image
        index_t* places = s.places + tables.stage * spots;
        #pragma unroll 1
        for (int spot = thread; spot < spots; spot += PRODUCERS)
            places[spot] = place_of(p, item.tile * kTile + p.first, spot_at(p, spot));
        named_barrier_sync<kLoadersMeet, PRODUCERS>();
        tables.advance(2);
        index_t from[kTogether];
        #pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk, before += UNITS * kElements * stride) {
            unit_t* patch = s.patches + ring.stage * patch_units(p);
            #pragma unroll 1
            for (int batch = 0; batch < p.batches; ++batch) {
                if (chunk == 0 || p.batches > 1) {
                    #pragma unroll
                    for (int k = 0; k < kTogether; ++k) {
                        if (k >= p.together) break;
                        from[k] = from_of(p, batch * p.together + k, thread, places, stride);
                    }
                }
                spot_unit_t values[kTogether];
                #pragma unroll
                for (int k = 0; k < kTogether; ++k) {
                    if (k >= p.together) break;
                    const int unit = share_of(p, batch * p.together + k, thread).unit;
                    load_spot(values[k], p.input + (before + from[k]), from[k] >= 0, (chunk * UNITS + unit) * kElements, stride);
                }
                // The loads are on their way while this waits.
                int again = thread;
                forget(again);
                if (batch == 0) barrier_wait(s.patch_empty[ring.stage], ring.parity ^ 1);
                #pragma unroll
                for (int k = 0; k < kTogether; ++k) {
                    if (k >= p.together) break;
                    const share_t share = share_of(p, batch * p.together + k, again);
                    if (share.spot >= spots || share.unit >= UNITS) continue;
                    const int place = place_in_unit(p, spot_at(p, share.spot));
                    store_spot(p, patch + share.unit * p.unit_pitch + place, values[k], thread);
                }
            }
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) barrier_arrive(s.patch_full[ring.stage]);
            ring.advance(p.patch_stages);
        }
    }
}
