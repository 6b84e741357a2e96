/* Units: 16 bytes of neighbouring channels of a pixel, or of a row of weights, as wgmma reads them. */
#pragma once

#include "ptx/mma.cuh"

struct alignas(16) unit_t { unsigned word[4]; };

/* So many bytes that lie together, and are read and written together. */
template <int BYTES> struct alignas(BYTES) words_t { unsigned word[BYTES / 4]; };
template <> struct words_t<2> { unsigned short word[1]; };

template <typename T> constexpr int elements_of_unit = 16 / sizeof(T);

/* float32 in two parts is a sum of TF32 values, all but its last two bits. */
template <int PARTS> struct parts_t { unit_t part[PARTS]; };

/* Rounds a unit as it lies in memory to the operands of a product, as a unit for each part. */
template <int PARTS, typename T> __device__ __forceinline__ parts_t<PARTS> rounded_unit(const unit_t& unit) {
    static_assert(PARTS == 1 || sizeof(T) == 4, "only float32 has parts");
    parts_t<PARTS> result;
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        result.part[0].word[i] = rounded<PARTS, T>(unit.word[i], result.part[PARTS - 1].word[i]);
    return result;
}

/* Rounds elements in registers to the operands of a product, as a unit for each part. */
template <int PARTS, typename T> __device__ __forceinline__ parts_t<PARTS> pack_unit(const T (&values)[elements_of_unit<T>]) {
    unit_t unit;
    as_words<4>(unit.word, values);
    return rounded_unit<PARTS, T>(unit);
}
