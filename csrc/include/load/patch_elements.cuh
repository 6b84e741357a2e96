/* Spots of a patch: WIDE inputs that lie beside each other in a row of NCHW and are taken together: neighbouring positions
 * or, with two inputs a cell, one position in either plane. Loaders pack them into units (see sm90/implicit_gemm.cu).
 */
#pragma once

#include "pipeline/implicit_gemm.cuh"

constexpr bool kPlanesApart = WIDE == 2 && UNIT_W == 2;
constexpr int kSpotBytes = WIDE * static_cast<int>(sizeof(ELEMENT_T));  // of a channel
// Whether neighbouring loaders take the units of one spot, or one unit of neighbouring spots.
constexpr bool kUnitsFirst = LANDING_UNITS == 0 && (CHANNELS_LAST || kSpotBytes >= 8);

struct spot_t { int plane, position; };
__device__ __forceinline__ spot_t spot_at(const implicit_gemm_params& p, int spot) {
    if (kPlanes == 1) return {0, spot * WIDE};
    const int plane = divided_small(spot, p.by_plane_spots), own = spot - plane * (kPlanesApart ? p.patch : p.patch / WIDE);
    return {kPlanesApart ? plane * 2 : plane, kPlanesApart ? own : own * WIDE};
}
/* Where a spot's first input lies in a unit of the patch. */
__device__ __forceinline__ int place_in_unit(const implicit_gemm_params& p, spot_t spot) {
    return spot.plane * p.patch + spot.position;
}

/* A thread's part of a spot: a unit of channels, with WIDE inputs of each. */
struct spot_unit_t { words_t<kSpotBytes> channel[kElements]; };

/* The first of the inputs of a spot, as it is stored, or the second one. */
__device__ __forceinline__ parts_t<kParts> pack_input(const spot_unit_t& values, bool second) {
    if constexpr (sizeof(ELEMENT_T) == 2 && WIDE == 2) {
        parts_t<kParts> result;
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            result.part[0].word[i] =
                halves(values.channel[2 * i].word[0], values.channel[2 * i + 1].word[0], second, second);
        return result;
    } else {
        ELEMENT_T unit[kElements];
        #pragma unroll
        for (int e = 0; e < kElements; ++e) {
            const auto word = second ? values.channel[e].word[WIDE - 1] : values.channel[e].word[0];
            unit[e] = element_of<ELEMENT_T>(word);
        }
        return pack_unit<kParts>(unit);
    }
}

/* Stores a unit of all inputs of a spot; `target` is the place of the first. */
__device__ __forceinline__ void store_spot(
    const implicit_gemm_params& p, unit_t* target, const spot_unit_t& values, int thread) {
    // 4 of 8 lanes that store at once exchange neighbours where all would meet in one bank.
    const bool turned = WIDE > 1 && !kPlanesApart && !(kUnitsFirst && UNITS == 8) && thread / 4 % 2;
    const int next = kPlanesApart ? p.patch : 1;  // from one input of a spot to the next
    #pragma unroll
    for (int w = 0; w < WIDE; ++w) {
        const bool second = (w == 1) != turned;
        const parts_t<kParts> parts = pack_input(values, second);
        #pragma unroll
        for (int part = 0; part < kParts; ++part) target[part * UNITS * p.unit_pitch + second * next] = parts.part[part];
    }
}
