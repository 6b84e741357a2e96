/* Units: 16 bytes of neighbouring channels of a pixel, or of a row of weights, as wgmma reads them. */
#pragma once

#include "common/mma.cuh"

struct alignas(16) unit_t { unsigned word[4]; };

template <typename T> constexpr int elements_of_unit = 16 / sizeof(T);

/* float32 in two parts is a sum of TF32 values, all but its last two bits. */
template <int PARTS> struct parts_t { unit_t part[PARTS]; };

template <int PARTS, typename T> __device__ __forceinline__ parts_t<PARTS> pack_unit(const T (&values)[elements_of_unit<T>]) {
    static_assert(PARTS == 1 || sizeof(T) == 4, "only float32 has parts");
    constexpr int kElements = mma_words<T>::kElements;
    parts_t<PARTS> result;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        T word[kElements];
        #pragma unroll
        for (int e = 0; e < kElements; ++e) word[e] = values[i * kElements + e];
        result.part[0].word[i] = mma_words<T>::pack(word);
        if constexpr (PARTS == 2) {
            result.part[1].word[i] = mma_words<T>::rest(word[0], result.part[0].word[i]);
        }
    }
    return result;
}

/* What pack_unit makes of the elements that are in a unit as they lie in memory. */
template <int PARTS, typename T> __device__ __forceinline__ parts_t<PARTS> rounded_unit(const unit_t& unit) {
    parts_t<PARTS> result;
    #pragma unroll
    for (int i = 0; i < 4; ++i)
        result.part[0].word[i] = rounded<PARTS, T>(unit.word[i], result.part[PARTS - 1].word[i]);
    return result;
}
