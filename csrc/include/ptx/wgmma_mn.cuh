/* wgmma of 16-bit values both of whose matrices lie the other way round: D (+)= A B by a warpgroup, as in ptx/wgmma.cuh. sm_90a.
 *
 * A [64 rows, K] lies as rows of a value of K and B [K, N] as columns of a value of K, both as ptx/wgmma.cuh has SWIZZLED: lines of
 * 64 of them, 128 bytes. N is a multiple of 16. What is begun here is waited for with wgmma_finish_rows.
 */
#pragma once

#include "ptx/wgmma_operands.cuh"
#include "ptx/wgmma_rs.cuh"

/* Begin D = A B, plus D where `accumulate` is not 0. */
template <typename T, int N>
__device__ __forceinline__ void wgmma_turned(float (&d)[N / 2], descriptor_t a, descriptor_t b, int accumulate);

// A, B and ACCUMULATE: numbers of the operands after those of d.
#define WGMMA_OF(T, N, KIND, A, B, ACCUMULATE, ...)                                                                         \
    template <>                                                                                                             \
    __device__ __forceinline__ void wgmma_turned<T, N>(float (&d)[N / 2], descriptor_t a, descriptor_t b, int accumulate) { \
        asm volatile("{\n"                                                                                                  \
                     ".reg .pred sum;\n"                                                                                    \
                     "setp.ne.b32 sum, %" #ACCUMULATE ", 0;\n"                                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND " {" TEXT_##N "}, %" #A ", %" #B                \
                     ", sum, 1, 1, 1, 1;\n}"                                                                                \
                     : SUMS_##N : "l"(a), "l"(b), "r"(accumulate));                                                         \
    }
#define WGMMA_half_t(N, ...) WGMMA_OF(half_t, N, "f16.f16", __VA_ARGS__)
#define WGMMA_bfloat16_t(N, ...) WGMMA_OF(bfloat16_t, N, "bf16.bf16", __VA_ARGS__)
#define WGMMA_ONE(T, N) WGMMA_##T(N, AFTER_##N)
#define WGMMA_NAMED(T, N) WGMMA_ONE(T, N)  // what macros stand for
#ifdef WGMMA_COLUMNS
WGMMA_NAMED(ELEMENT_T, WGMMA_COLUMNS)
#else
#define WGMMA(N) WGMMA_ONE(half_t, N) WGMMA_ONE(bfloat16_t, N)
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

#undef WGMMA_OF
#undef WGMMA_half_t
#undef WGMMA_bfloat16_t
#undef WGMMA_ONE
#undef WGMMA_NAMED
