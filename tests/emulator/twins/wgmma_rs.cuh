/* Stands in for csrc/include/ptx/wgmma_rs.cuh; what the functions do is in scheduler.cpp. */
#pragma once

#include "ptx/wgmma.cuh"

extern "C" void emulator_wgmma_rows(
    int type, int columns, int swizzled, float* d, const unsigned* a, descriptor_t b, int accumulate);

template <int COUNT> __device__ __forceinline__ void wgmma_clear(float (&d)[COUNT]) {
    for (float& one : d) one = 0.0f;
}

template <int COUNT> __device__ __forceinline__ void wgmma_finish_rows(float (&d)[COUNT]) { emulator_wgmma_wait(0); }

template <typename T, int N, bool SWIZZLED = false>
__device__ __forceinline__ void wgmma_rows(float (&d)[N / 2], const unsigned (&a)[4], descriptor_t b, int accumulate) {
    static_assert(kEmulatorType<T> >= 0 && N % 16 == 0 && 0 < N && N <= 256, "no such wgmma");
    static_assert(!SWIZZLED || sizeof(T) == 2, "only 16-bit values may lie the other way round");
    emulator_wgmma_rows(kEmulatorType<T>, N, SWIZZLED, d, a, b, accumulate);
}

template <typename T, int N, bool SWIZZLED = false>
__device__ __forceinline__ void wgmma_rows(
    float (&d)[N / 2], const unsigned (&a)[4][4], const descriptor_t (&b)[4], int accumulate) {
    for (int i = 0; i < 4; ++i) wgmma_rows<T, N, SWIZZLED>(d, a[i], b[i], i > 0 || accumulate);
}
