/* Element types and their conversions, without the CUDA headers, which a user need not have.
 * Sums are kept in accumulator_t<T>: float, or double for double. A 16-bit value is rounded to nearest even, once.
 */
#pragma once

struct half_t { unsigned short bits; };
struct bfloat16_t { unsigned short bits; };

template <typename T> struct accumulator { using type = float; };
template <> struct accumulator<double> { using type = double; };
template <typename T> using accumulator_t = typename accumulator<T>::type;

/* Neighbours in memory that are read and written together. */
template <typename T, int COUNT> struct alignas(COUNT * sizeof(T)) vector_of { T value[COUNT]; };

/* Copies COUNT neighbours at once: both addresses are multiples of their size. */
template <int COUNT, typename T> __device__ __forceinline__ void copy(T* to, const T* from) {
    *reinterpret_cast<vector_of<T, COUNT>*>(to) = *reinterpret_cast<const vector_of<T, COUNT>*>(from);
}

/* Stores COUNT neighbours at once, value(0), value(1), ..., at a multiple of their size. */
template <int COUNT, typename T, typename VALUE> __device__ __forceinline__ void store_together(T* to, const VALUE& value) {
    vector_of<T, COUNT> together;
    #pragma unroll
    for (int e = 0; e < COUNT; ++e) together.value[e] = value(e);
    *reinterpret_cast<vector_of<T, COUNT>*>(to) = together;
}

/* Loads from memory that nothing writes while the kernel runs. */
template <typename T> __device__ __forceinline__ T load_once(const T* address) { return __ldg(address); }
template <> __device__ __forceinline__ half_t load_once(const half_t* address) { return {__ldg(&address->bits)}; }
template <> __device__ __forceinline__ bfloat16_t load_once(const bfloat16_t* address) { return {__ldg(&address->bits)}; }

/* The element whose bits these are. */
template <typename T> __device__ __forceinline__ T element_of(unsigned bits) { return {static_cast<unsigned short>(bits)}; }
template <> __device__ __forceinline__ float element_of(unsigned bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(half_t value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}
__device__ __forceinline__ float widen(bfloat16_t value) {
    return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

template <typename T> __device__ __forceinline__ T narrow(accumulator_t<T> value) { return value; }
template <> __device__ __forceinline__ half_t narrow<half_t>(float value) {
    half_t result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}
template <> __device__ __forceinline__ bfloat16_t narrow<bfloat16_t>(float value) {
    bfloat16_t result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}
