/* Stands in for csrc/include/ptx/wgmma.cuh; what the functions do is in scheduler.cpp. */
#pragma once

#include "numeric/types.cuh"

using matrix_t = unsigned long long;

extern "C" {
matrix_t emulator_matrix(const void* shared, int leading_bytes, int stride_bytes);
matrix_t emulator_advanced(matrix_t matrix, int bytes);
void emulator_wgmma_fence();
void emulator_wgmma_commit();
void emulator_wgmma_wait(int pending);
void emulator_wgmma(int type, int columns, int swizzled, float* d, matrix_t a, matrix_t b, int accumulate);
}

__device__ __forceinline__ matrix_t matrix_of(const void* shared, int leading_bytes, int stride_bytes) {
    return emulator_matrix(shared, leading_bytes, stride_bytes);
}
__device__ __forceinline__ matrix_t swizzled_matrix_of(const void* shared, int leading_bytes, int stride_bytes) {
    return matrix_of(shared, leading_bytes, stride_bytes) | 1ull << 62;
}
template <int LINE_BYTES> __device__ __forceinline__ matrix_t lines_of(const void* shared, int stride_bytes = 8 * LINE_BYTES) {
    static_assert(LINE_BYTES == 64 || LINE_BYTES == 128, "other lines are not for wgmma");
    return matrix_of(shared, 16, stride_bytes) | (LINE_BYTES == 128 ? 1ull : 2ull) << 62;
}
__device__ __forceinline__ matrix_t advanced(matrix_t matrix, int bytes) { return emulator_advanced(matrix, bytes); }
__device__ __forceinline__ void wgmma_fence() { emulator_wgmma_fence(); }
__device__ __forceinline__ void wgmma_commit() { emulator_wgmma_commit(); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() { emulator_wgmma_wait(PENDING); }
template <int COUNT> __device__ __forceinline__ void wgmma_finish(float (&d)[COUNT]) { emulator_wgmma_wait(0); }

template <typename T> constexpr int kEmulatorType = -1;
template <> constexpr int kEmulatorType<half_t> = EMULATOR_HALF;
template <> constexpr int kEmulatorType<bfloat16_t> = EMULATOR_BFLOAT16;
template <> constexpr int kEmulatorType<float> = EMULATOR_TF32;

template <typename T, int N, bool SWIZZLED = false>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], matrix_t a, matrix_t b, int accumulate) {
    static_assert(kEmulatorType<T> >= 0 && N % 32 == 0 && 0 < N && N <= 256, "no such wgmma");
    static_assert(!SWIZZLED || sizeof(T) == 2, "only 16-bit values may lie the other way round");
    emulator_wgmma(kEmulatorType<T>, N, SWIZZLED, d, a, b, accumulate);
}

template <int REGISTERS> __device__ __forceinline__ void registers_up() {
    static_assert(REGISTERS % 8 == 0 && 24 <= REGISTERS && REGISTERS <= 256, "no such number of registers");
}
template <int REGISTERS> __device__ __forceinline__ void registers_down() {
    static_assert(REGISTERS % 8 == 0 && 24 <= REGISTERS && REGISTERS <= 256, "no such number of registers");
}
