/* Loaders of sm90/implicit_gemm.cu that load inputs into registers, and from there store units. */
#pragma once

#include "load/patch_elements.cuh"
#include "ptx/keep.cuh"
#include "ptx/named_barrier.cuh"

// The loaders share a patch in p.batches, of each of which a thread has p.together loads on their way, at most kTogether.
constexpr int kTogether = LOADED_TOGETHER;
// Whether registers also hold what a thread loads in each turn, and where it stores that: 48 are for all else.
constexpr int kUnitWords = VECTOR_LOADS ? 4 : kElements * ceil_div(kSpotBytes, 4);
constexpr bool kKeepsTurns = kTogether * (kUnitWords + 3) <= kProducerRegisters - 48;

/* What a thread loads in a turn, and where that is stored in a patch; a spot of -1 for nothing. */
struct turn_t {
    short spot, unit;
    int to;
    __device__ __forceinline__ turn_t() {}
    __device__ __forceinline__ turn_t(const implicit_gemm_params& p, int turn, int thread) {
        static_assert(PRODUCERS % UNITS == 0, "the unit of a thread is the same in each turn");
        const int share = thread + turn * PRODUCERS, own = kUnitsFirst ? 0 : divided_small(share, p.by_spots);
        const int of_unit = kUnitsFirst ? thread / UNITS + turn * (PRODUCERS / UNITS) : share - own * spots_of(p);
        unit = kUnitsFirst ? thread % UNITS : own;
        spot = of_unit < spots_of(p) && unit < UNITS ? of_unit : -1;
        to = unit * p.unit_pitch + place_in_unit(p, spot_at(p, of_unit));
    }
};

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

/* Loads the patches of tile after tile, chunk after chunk. The places of a tile's spots are worked out once, for all warps, in
 * one of two tables: nobody is more than a table ahead. What a thread loads, where its loads are one batch, and where that lies
 * stays in registers: loaders wait for memory in each chunk, and for each instruction before their loads.
 */
__device__ __forceinline__ void produce_patches(const implicit_gemm_params& p, const stages_t& s, int thread) {
    const index_t stride = CHANNELS_LAST ? 1 : static_cast<index_t>(p.h_in) * p.w_in;  // of channels
    const int lane = thread % 32;
    const int spots = spots_of(p);
    ring_t ring, tables;
    turn_t turns[kTogether];
    index_t from[kTogether];  // where a turn's input lies from a chunk's first channel on, -1 for zeros
    bool known = false;
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const item_t item = item_of(p, i);
        index_t before = item.group * IN_CHANNELS * stride;  // a chunk's channels, of an image
        index_t* places = s.places + tables.stage * spots;
        #pragma unroll 1
        for (int spot = thread; spot < spots; spot += PRODUCERS)
            places[spot] = place_of(p, item.tile * kTile + p.first, spot_at(p, spot));
        named_barrier_sync<kLoadersMeet, PRODUCERS>();
        tables.advance(2);
        #pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk, before += UNITS * kElements * stride) {
            unit_t* patch = s.patches + ring.stage * patch_units(p);
            #pragma unroll 1
            for (int batch = 0; batch < p.batches; ++batch) {
                const auto turn_of = [&](int k, int thread) { return turn_t(p, batch * p.together + k, thread); };
                if (kKeepsTurns && (!known || p.batches > 1)) {
                    #pragma unroll
                    for (int k = 0; k < kTogether; ++k) turns[k] = turn_of(k, thread);
                    known = true;
                }
                if (chunk == 0 || p.batches > 1) {
                    #pragma unroll
                    for (int k = 0; k < kTogether; ++k) {
                        if (k >= p.together) break;
                        const turn_t turn = kKeepsTurns ? turns[k] : turn_of(k, thread);
                        const index_t place = turn.spot >= 0 ? places[turn.spot] : index_t(-1);
                        from[k] = place < 0 ? -1 : place + turn.unit * (kElements * stride);
                    }
                }
                spot_unit_t values[kTogether];
                #pragma unroll
                for (int k = 0; k < kTogether; ++k) {
                    if (k >= p.together) break;
                    const int unit = kKeepsTurns ? turns[k].unit : turn_of(k, thread).unit;
                    const int channel = (chunk * UNITS + unit) * kElements;
                    load_spot(values[k], p.input + (before + from[k]), from[k] >= 0, channel, stride);
                }
                // The loads are on their way while this waits.
                if (batch == 0) barrier_wait(s.patch_empty[ring.stage], ring.parity ^ 1);
                int again = thread;
                if constexpr (!kKeepsTurns) forget(again);
                #pragma unroll
                for (int k = 0; k < kTogether; ++k) {
                    if (k >= p.together) break;
                    const turn_t turn = kKeepsTurns ? turns[k] : turn_of(k, again);
                    if (turn.spot >= 0) store_spot(p, patch + turn.to, values[k], thread);
                }
            }
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) barrier_arrive(s.patch_full[ring.stage]);
            ring.advance(p.patch_stages);
        }
    }
}
