/* Stands in for csrc/include/ptx/wgmma_mn.cuh; what the function does is in scheduler.cpp. */
#pragma once

#include "ptx/wgmma_rs.cuh"

extern "C" void emulator_wgmma_turned(int type, int columns, float* d, descriptor_t a, descriptor_t b, int accumulate);

template <typename T, int N>
__device__ __forceinline__ void wgmma_turned(float (&d)[N / 2], descriptor_t a, descriptor_t b, int accumulate) {
    static_assert(sizeof(T) == 2 && N % 16 == 0 && 0 < N && N <= 256, "no such wgmma");
    emulator_wgmma_turned(kEmulatorType<T>, N, d, a, b, accumulate);
}
