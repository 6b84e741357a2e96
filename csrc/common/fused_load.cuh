/* Producers of fused_wgmma.cu: what they bring into shared memory, ahead of those who multiply. */
#pragma once

#include "common/fused.cuh"

/* Copies the weights of step after step; where they all stay (RESIDENT), those of the first item alone. One thread. */
__device__ __forceinline__ void produce_weights(const fused_params& p, const stages_t& s) {
    ring_t<WEIGHT_STAGES> ring;
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const item_t item = item_of(p, i);
        if (!item.exists()) continue;
        const int phase_set = phase_set_of(item.set), first = first_step(phase_set);
        const int steps = first_step(phase_set + 1) - first;
        const long long matrices_before = static_cast<long long>(item.group) * CHANNEL_SETS * STEPS +
                                          first * CHANNEL_SETS + item.set % CHANNEL_SETS * steps;
        const unit_t* source = p.packed + matrices_before * CHUNKS * kWeightUnits;
        #pragma unroll 1
        for (int step = 0; step < steps * CHUNKS; ++step) {
            if (!RESIDENT) barrier_wait(s.weight_empty[ring.stage], ring.parity ^ 1);
            barrier_t& full = s.weight_full[ring.stage];
            barrier_arrive_expecting(full, kWeightUnits * 16);
            bulk_copy(s.weights + ring.stage * kWeightUnits, source, kWeightUnits * 16, full);
            source += kWeightUnits;
            ring.advance();
        }
        if (RESIDENT) return;
    }
}

/* How the loaders share a patch. A spot is WIDE inputs that lie beside each other in NCHW and are loaded together:
 * neighbouring positions or, with two inputs a cell, one position in either plane. Where they are 8 bytes or more, and in
 * channels_last, neighbours among the threads take the units of a spot; else neighbouring spots.
 */
constexpr bool kPlanesApart = WIDE == 2 && UNIT_W == 2;
constexpr int kNext = kPlanesApart ? PATCH : 1;  // from one input of a spot to the next, in the patch
constexpr int kPlaneSpots = kPlanesApart ? PATCH : PATCH / WIDE;
constexpr int kSpots = PATCH * kPlanes / WIDE;
static_assert(kPlanesApart || PATCH % WIDE == 0 && FIRST % WIDE == 0, "a patch is whole spots");
constexpr int kSpotBytes = WIDE * static_cast<int>(sizeof(ELEMENT_T));  // of a channel
constexpr bool kUnitsFirst = CHANNELS_LAST || kSpotBytes >= 8;
constexpr int kTurns = ceil_div(kSpots * UNITS, LOADERS);
// A thread has as many loads on their way as registers allow, the same number in each batch.
constexpr int kUnitWords = VECTOR_LOADS ? 4 : kElements * ceil_div(kSpotBytes, 4);
constexpr int kBatches = ceil_div(kTurns, kLoadedWords / kUnitWords);
constexpr int kTogether = ceil_div(kTurns, kBatches);

/* What a thread loads in a turn. */
struct share_t { int spot, unit; };
__device__ __forceinline__ share_t share_of(int turn, int thread) {
    const int share = thread + turn * LOADERS;
    if (kUnitsFirst) return {share / UNITS, share % UNITS};
    return {share % kSpots, share / kSpots};
}

struct spot_t { int plane, position; };
__device__ __forceinline__ spot_t spot_at(int spot) {
    if (kPlanesApart) return {spot / kPlaneSpots * 2, spot % kPlaneSpots};
    return {spot / kPlaneSpots, spot % kPlaneSpots * WIDE};
}

/* Where a spot of a tile's patch begins in the input, -1 for zeros. */
__device__ __forceinline__ index_t place_of(const fused_params& p, int first, spot_t spot) {
    const int position = first + spot.position;  // of all that are flattened; may be negative
    const int period = p.strip_rows * PITCH;
    const int strip = (position + period) / period - 1, rest = position - strip * period;
    const int image = strip / p.strips;
    const int ih = (rest / PITCH + p.origin_h) * UNIT_H + spot.plane / UNIT_W;
    const int column = rest % PITCH + strip % p.strips * p.strip_cells + p.origin_w;
    const int iw = column * UNIT_W + spot.plane % UNIT_W;
    if (strip < 0 || image >= p.batch) return -1;
    if (static_cast<unsigned>(ih) >= p.h_in || static_cast<unsigned>(iw) >= p.w_in) return -1;
    const index_t pixels = static_cast<index_t>(p.h_in) * p.w_in, pixel = static_cast<index_t>(ih) * p.w_in + iw;
    const int channels = p.groups * IN_CHANNELS;
    return CHANNELS_LAST ? (image * pixels + pixel) * channels : image * channels * pixels + pixel;
}

/* What a thread has of a spot: a unit of channels, of each its WIDE inputs. */
template <int BYTES> struct alignas(BYTES) words_t { unsigned word[BYTES / 4]; };
template <> struct words_t<2> { unsigned short word[1]; };
struct spot_unit_t { words_t<kSpotBytes> channel[kElements]; };

/* Channels from `channel` on, `stride` bytes apart; zeros beyond the last channel, and where nothing is there. */
__device__ __forceinline__ void load_spot(
    spot_unit_t& values, const char* __restrict__ from, bool there, int channel, long long stride) {
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

/* One of the inputs of a spot, as it is stored: input `even` or, where `odd`, the one after it. */
__device__ __forceinline__ parts_t<kParts> pack_input(const spot_unit_t& values, int even, bool odd) {
    if constexpr (sizeof(ELEMENT_T) == 2 && WIDE > 1) {
        parts_t<kParts> result;
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            result.part[0].word[i] =
                halves(values.channel[2 * i].word[even / 2], values.channel[2 * i + 1].word[even / 2], odd);
        return result;
    } else {
        ELEMENT_T unit[kElements];
        #pragma unroll
        for (int e = 0; e < kElements; ++e) {
            const auto word = odd && WIDE > 1 ? values.channel[e].word[even + (WIDE > 1)] : values.channel[e].word[even];
            unit[e] = element_of<ELEMENT_T>(word);
        }
        return pack_unit<kParts>(unit);
    }
}

/* Stores a unit of all inputs of a spot; `target` is the place of the first. */
__device__ __forceinline__ void store_spot(unit_t* target, const spot_unit_t& values) {
    // Of 8 lanes that store at once, 4 exchange neighbours where all would meet the same banks.
    const bool turned = WIDE > 1 && !kPlanesApart && !(kUnitsFirst && UNITS == 8) && threadIdx.x / 4 % 2;
    #pragma unroll
    for (int w = 0; w < WIDE; ++w) {
        const int even = w / 2 * 2;
        const bool odd = (w % 2 == 1) != turned;
        const parts_t<kParts> parts = pack_input(values, even, odd);
        #pragma unroll
        for (int part = 0; part < kParts; ++part)
            target[part * UNITS * UNIT_PITCH + (even + odd) * kNext] = parts.part[part];
    }
}

/* Loads the patches of tile after tile, chunk after chunk. The places of a tile's spots are worked out once, for all warps, in
 * one of two tables: nobody is more than a table ahead.
 */
__device__ __forceinline__ void produce_patches(const fused_params& p, const stages_t& s, int thread) {
    const long long stride = (CHANNELS_LAST ? 1ll : 1ll * p.h_in * p.w_in) * sizeof(ELEMENT_T);  // of channels, in bytes
    const int lane = thread % 32;
    ring_t<PATCH_STAGES> ring;
    ring_t<2> tables;
    int placed = 0;  // parity
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const item_t item = item_of(p, i);
        if (!item.exists()) continue;
        const char* input = reinterpret_cast<const char*>(p.input) + item.group * IN_CHANNELS * stride;
        index_t* places = s.places + tables.stage * kSpots;
        for (int spot = thread; spot < kSpots; spot += LOADERS)
            places[spot] = place_of(p, item.tile * kTile + FIRST, spot_at(spot));
        barrier_arrive(*s.placed);
        barrier_wait(*s.placed, placed);
        placed ^= 1;
        tables.advance();
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            unit_t* patch = s.patches + ring.stage * kPatchUnits;
            #pragma unroll 1
            for (int batch = 0; batch < kBatches; ++batch) {
                spot_unit_t values[kTogether];
                #pragma unroll
                for (int k = 0; k < kTogether; ++k) {
                    const share_t share = share_of(batch * kTogether + k, thread);
                    const bool mine = share.spot < kSpots && share.unit < UNITS;
                    const index_t place = mine ? places[share.spot] : -1;
                    const int channel = (chunk * UNITS + share.unit) * kElements;
                    const char* from = input + static_cast<long long>(place) * sizeof(ELEMENT_T) + channel * stride;
                    load_spot(values[k], from, place >= 0, channel, stride);
                }
                // The loads are on their way while this waits.
                if (batch == 0) barrier_wait(s.patch_empty[ring.stage], ring.parity ^ 1);
                #pragma unroll
                for (int k = 0; k < kTogether; ++k) {
                    const share_t share = share_of(batch * kTogether + k, thread);
                    if (share.spot >= kSpots || share.unit >= UNITS) continue;
                    const spot_t at = spot_at(share.spot);
                    store_spot(patch + share.unit * UNIT_PITCH + at.plane * PATCH + at.position, values[k]);
                }
            }
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) barrier_arrive(s.patch_full[ring.stage]);
            ring.advance();
        }
    }
}
