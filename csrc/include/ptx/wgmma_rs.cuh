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

/* Begin D = A[0] B[0] + A[1] B[1] + A[2] B[2] + A[3] B[3], which the compiler takes for one instruction, as in ptx/wgmma.cuh. */
template <typename T, int N, bool SWIZZLED = false>
__device__ __forceinline__ void wgmma_rows(
    float (&d)[N / 2], const unsigned (&a)[4][4], const descriptor_t (&b)[4], int accumulate);

/* d is zero from here on: were it set where products run already, of other sums, each of those would be waited for. */
template <int COUNT> __device__ __forceinline__ void wgmma_clear(float (&d)[COUNT]);

/* Wait until all products are complete, those of d among them, which may be read from here on. */
template <int COUNT> __device__ __forceinline__ void wgmma_finish_rows(float (&d)[COUNT]);

#define WGMMA_TEXT(N, KIND, LAST, A0, A1, A2, A3, B, SUM)                                                                  \
    "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" TEXT_##N "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", " SUM \
    ", 1, 1" LAST ";\n"
#define WGMMA_BEGIN(ACCUMULATE) \
    "{\n.reg .pred sum, all;\nsetp.ne.b32 sum, %" #ACCUMULATE ", 0;\nsetp.eq.b32 all, 0, 0;\n"
#define WORDS_OF(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
// I0 to I20: numbers of the operands after those of d. LAST: whether B is the other way round, of 16 bits.
#define WGMMA_OF(T, N, SWIZZLED, KIND, LAST, I0, I1, I2, I3, I4, I5, I6, I7, I8, I9, I10, I11, I12, I13, I14, I15, I16, \
                 I17, I18, I19, I20, ...)                                                                               \
    template <>                                                                                                         \
    __device__ __forceinline__ void wgmma_rows<T, N, SWIZZLED>(                                                         \
        float (&d)[N / 2], const unsigned (&a)[4], descriptor_t b, int sum) {                                           \
        asm volatile(WGMMA_BEGIN(I5) WGMMA_TEXT(N, KIND, LAST, I0, I1, I2, I3, I4, "sum") "}"                           \
                     : SUMS_##N : WORDS_OF(a), "l"(b), "r"(sum));                                                       \
    }                                                                                                                   \
    template <>                                                                                                         \
    __device__ __forceinline__ void wgmma_rows<T, N, SWIZZLED>(                                                         \
        float (&d)[N / 2], const unsigned (&a)[4][4], const descriptor_t (&b)[4], int sum) {                            \
        asm volatile(WGMMA_BEGIN(I20) WGMMA_TEXT(N, KIND, LAST, I0, I1, I2, I3, I16, "sum")                             \
                     WGMMA_TEXT(N, KIND, LAST, I4, I5, I6, I7, I17, "all")                                              \
                     WGMMA_TEXT(N, KIND, LAST, I8, I9, I10, I11, I18, "all")                                            \
                     WGMMA_TEXT(N, KIND, LAST, I12, I13, I14, I15, I19, "all") "}"                                      \
                     : SUMS_##N : WORDS_OF(a[0]), WORDS_OF(a[1]), WORDS_OF(a[2]), WORDS_OF(a[3]), "l"(b[0]), "l"(b[1]), \
                       "l"(b[2]), "l"(b[3]), "r"(sum));                                                                 \
    }
// That d goes through here keeps the compiler from setting it later, or reading it before.
#define WGMMA_SUMS(N)                                                                  \
    template <> __device__ __forceinline__ void wgmma_clear(float (&d)[N / 2]) {       \
        _Pragma("unroll") for (float& one : d) one = 0.0f;                             \
        asm volatile("" : SUMS_##N : : "memory");                                      \
    }                                                                                  \
    template <> __device__ __forceinline__ void wgmma_finish_rows(float (&d)[N / 2]) { \
        wgmma_wait<0>();                                                               \
        asm volatile("" : SUMS_##N : : "memory");                                      \
    }
#define WGMMA_half_t(N, ...)                                          \
    WGMMA_OF(half_t, N, false, "k16.f32.f16.f16", ", 0", __VA_ARGS__) \
    WGMMA_OF(half_t, N, true, "k16.f32.f16.f16", ", 1", __VA_ARGS__)
#define WGMMA_bfloat16_t(N, ...)                                            \
    WGMMA_OF(bfloat16_t, N, false, "k16.f32.bf16.bf16", ", 0", __VA_ARGS__) \
    WGMMA_OF(bfloat16_t, N, true, "k16.f32.bf16.bf16", ", 1", __VA_ARGS__)
#define WGMMA_float(N, ...) WGMMA_OF(float, N, false, "k8.f32.tf32.tf32", "", __VA_ARGS__)
#define WGMMA_ONE(T, N) WGMMA_##T(N, AFTER_##N)
#define WGMMA_SUMS_NAMED(N) WGMMA_SUMS(N)
#define WGMMA_NAMED(T, N) WGMMA_ONE(T, N)  // what macros stand for
#ifdef WGMMA_COLUMNS
WGMMA_NAMED(ELEMENT_T, WGMMA_COLUMNS)
WGMMA_SUMS_NAMED(WGMMA_COLUMNS)
#else
#define WGMMA(N) WGMMA_ONE(half_t, N) WGMMA_ONE(bfloat16_t, N) WGMMA_ONE(float, N) WGMMA_SUMS(N)
WGMMA(16)
WGMMA(32)
WGMMA(48)
WGMMA(64)
WGMMA(80)
WGMMA(96)
WGMMA(112)
WGMMA(128)
WGMMA(144)
WGMMA(160)
WGMMA(176)
WGMMA(192)
WGMMA(208)
WGMMA(224)
WGMMA(240)
WGMMA(256)
#undef WGMMA
#endif

#undef WGMMA_TEXT
#undef WGMMA_BEGIN
#undef WORDS_OF
#undef WGMMA_OF
#undef WGMMA_half_t
#undef WGMMA_bfloat16_t
#undef WGMMA_float
#undef WGMMA_ONE
#undef WGMMA_NAMED
#undef WGMMA_SUMS
#undef WGMMA_SUMS_NAMED
