/* wgmma whose A is in registers: D (+)= A B by a warpgroup, as in ptx/wgmma.cuh but for A. sm_90a.
 *
 * With w = warp % 4, g = lane / 4, t = lane % 4 a thread's a has, of rows 16w + g and 16w + g + 8, the words t and t + 4 of the
 * 32 bytes of K, as ptx/mma.cuh has them: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4). B is K-major or, of 16-bit values, the
 * other way round (SWIZZLED); N is a multiple of 16. While products run, what they have of A may not change either: words are
 * kept for two groups by turns.
 */
#pragma once

#include "ptx/wgmma.cuh"
#include "ptx/wgmma_operands.cuh"

/* Begin D = A B, plus D where `accumulate` is not 0. */
template <typename T, int N, bool SWIZZLED = false>
__device__ __forceinline__ void wgmma_rows(float (&d)[N / 2], const unsigned (&a)[4], descriptor_t b, int accumulate);

/* d is zero from here on: were it set where products run already, of other sums, each of those would be waited for. */
template <int COUNT> __device__ __forceinline__ void wgmma_clear(float (&d)[COUNT]) {
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        d[i] = 0.0f;
        asm volatile("" : "+f"(d[i]) : : "memory");
    }
}

/* Wait until all products are complete, those of d among them, which may be read from here on. */
template <int COUNT> __device__ __forceinline__ void wgmma_finish_rows(float (&d)[COUNT]) {
    wgmma_wait<0>();
    // That d goes through here keeps the compiler from reading it before.
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i]) : : "memory");
}

// A0 to A3, B and ACCUMULATE: numbers of the operands after those of d. LAST: whether B is the other way round, of 16 bits.
#define WGMMA_OF(T, N, SWIZZLED, KIND, LAST, A0, A1, A2, A3, B, ACCUMULATE)                                              \
    template <>                                                                                                          \
    __device__ __forceinline__ void wgmma_rows<T, N, SWIZZLED>(                                                          \
        float (&d)[N / 2], const unsigned (&a)[4], descriptor_t b, int accumulate) {                                         \
        asm volatile("{\n"                                                                                               \
                     ".reg .pred sum;\n"                                                                                 \
                     "setp.ne.b32 sum, %" #ACCUMULATE ", 0;\n"                                                           \
                     "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" TEXT_##N "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 \
                     "}, %" #B ", sum, 1, 1" LAST ";\n}"                                                                 \
                     : SUMS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                  \
    }
#define WGMMA(N, ...)                                                          \
    WGMMA_OF(half_t, N, false, "k16.f32.f16.f16", ", 0", __VA_ARGS__)          \
    WGMMA_OF(half_t, N, true, "k16.f32.f16.f16", ", 1", __VA_ARGS__)           \
    WGMMA_OF(bfloat16_t, N, false, "k16.f32.bf16.bf16", ", 0", __VA_ARGS__)    \
    WGMMA_OF(bfloat16_t, N, true, "k16.f32.bf16.bf16", ", 1", __VA_ARGS__)     \
    WGMMA_OF(float, N, false, "k8.f32.tf32.tf32", "", __VA_ARGS__)

WGMMA(16, 8, 9, 10, 11, 12, 13)
WGMMA(32, 16, 17, 18, 19, 20, 21)
WGMMA(48, 24, 25, 26, 27, 28, 29)
WGMMA(64, 32, 33, 34, 35, 36, 37)
WGMMA(80, 40, 41, 42, 43, 44, 45)
WGMMA(96, 48, 49, 50, 51, 52, 53)
WGMMA(112, 56, 57, 58, 59, 60, 61)
WGMMA(128, 64, 65, 66, 67, 68, 69)
WGMMA(144, 72, 73, 74, 75, 76, 77)
WGMMA(160, 80, 81, 82, 83, 84, 85)
WGMMA(176, 88, 89, 90, 91, 92, 93)
WGMMA(192, 96, 97, 98, 99, 100, 101)
WGMMA(208, 104, 105, 106, 107, 108, 109)
WGMMA(224, 112, 113, 114, 115, 116, 117)
WGMMA(240, 120, 121, 122, 123, 124, 125)
WGMMA(256, 128, 129, 130, 131, 132, 133)

#undef WGMMA_OF
#undef WGMMA
