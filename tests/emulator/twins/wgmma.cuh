/* Stands in for csrc/include/ptx/wgmma.cuh; what the functions do is in scheduler.cpp. */
#pragma once

#include "numeric/types.cuh"

using descriptor_t = unsigned long long;

extern "C" {
descriptor_t emulator_matrix(const void* shared, int leading_bytes, int stride_bytes);
descriptor_t emulator_advanced(descriptor_t matrix, int bytes);
void emulator_wgmma_fence();
void emulator_wgmma_commit();
void emulator_wgmma_wait(int pending);
void emulator_wgmma(int type, int columns, int swizzled, float* d, descriptor_t a, descriptor_t b, int accumulate);
void emulator_wgmma_turned(int type, int columns, float* d, descriptor_t a, descriptor_t b, int accumulate);
void emulator_wgmma_rows(
    int type, int columns, int swizzled, float* d, const unsigned* a, descriptor_t b, int accumulate);
}

__device__ __forceinline__ descriptor_t descriptor_k_major(const void* shared, int leading_bytes, int stride_bytes) {
    return emulator_matrix(shared, leading_bytes, stride_bytes);
}
__device__ __forceinline__ descriptor_t descriptor_mn_major(const void* shared, int leading_bytes, int stride_bytes) {
    return descriptor_k_major(shared, leading_bytes, stride_bytes) | 1ull << 62;
}
template <int LINE_BYTES> __device__ __forceinline__ descriptor_t descriptor_k_major_swizzled(const void* shared, int stride_bytes = 8 * LINE_BYTES) {
    static_assert(LINE_BYTES == 64 || LINE_BYTES == 128, "other lines are not for wgmma");
    return descriptor_k_major(shared, 16, stride_bytes) | (LINE_BYTES == 128 ? 1ull : 2ull) << 62;
}
__device__ __forceinline__ descriptor_t advance(descriptor_t matrix, int bytes) { return emulator_advanced(matrix, bytes); }
__device__ __forceinline__ void wgmma_fence() { emulator_wgmma_fence(); }
__device__ __forceinline__ void wgmma_commit() { emulator_wgmma_commit(); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() { emulator_wgmma_wait(PENDING); }
__device__ __forceinline__ void wgmma_finish(float (&d)[WGMMA_COLUMNS / 2]) { emulator_wgmma_wait(0); }

template <typename T> constexpr int kEmulatorType = -1;
template <> constexpr int kEmulatorType<half_t> = EMULATOR_HALF;
template <> constexpr int kEmulatorType<bfloat16_t> = EMULATOR_BFLOAT16;
template <> constexpr int kEmulatorType<float> = EMULATOR_TF32;

template <typename T, int N, bool SWIZZLED = false>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], descriptor_t a, descriptor_t b, int accumulate) {
    static_assert(kEmulatorType<T> >= 0 && N % 32 == 0 && 0 < N && N <= 256, "no such wgmma");
    static_assert(!SWIZZLED || sizeof(T) == 2, "only 16-bit values may lie the other way round");
    emulator_wgmma(kEmulatorType<T>, N, SWIZZLED, d, a, b, accumulate);
}

template <typename T, int N, bool SWIZZLED = false, int COUNT>
__device__ __forceinline__ void wgmma(
    float (&d)[N / 2], const descriptor_t (&a)[COUNT], const descriptor_t (&b)[COUNT], int accumulate) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "no so many products");
    for (int i = 0; i < COUNT; ++i) wgmma<T, N, SWIZZLED>(d, a[i], b[i], i > 0 || accumulate);
}

template <typename T, int N>
__device__ __forceinline__ void wgmma_turned(float (&d)[N / 2], descriptor_t a, descriptor_t b, int accumulate) {
    static_assert(sizeof(T) == 2 && N % 16 == 0 && 0 < N && N <= 256, "no such wgmma");
    emulator_wgmma_turned(kEmulatorType<T>, N, d, a, b, accumulate);
}

__device__ __forceinline__ void wgmma_clear(float (&d)[WGMMA_COLUMNS / 2]) {
    for (float& one : d) one = 0.0f;
}

__device__ __forceinline__ void wgmma_finish_rows(float (&d)[WGMMA_COLUMNS / 2]) { emulator_wgmma_wait(0); }

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

template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_inc() {
    static_assert(REGISTERS % 8 == 0 && 24 <= REGISTERS && REGISTERS <= 256, "no such number of registers");
}
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_dec() {
    static_assert(REGISTERS % 8 == 0 && 24 <= REGISTERS && REGISTERS <= 256, "no such number of registers");
}
