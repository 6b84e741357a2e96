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
#define WGMMA_OF(T, N, KIND, A, B, ACCUMULATE)                                                                       \
    template <>                                                                                                      \
    __device__ __forceinline__ void wgmma_turned<T, N>(float (&d)[N / 2], descriptor_t a, descriptor_t b, int accumulate) {   \
        asm volatile("{\n"                                                                                           \
                     ".reg .pred sum;\n"                                                                             \
                     "setp.ne.b32 sum, %" #ACCUMULATE ", 0;\n"                                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND " {" TEXT_##N "}, %" #A ", %" #B         \
                     ", sum, 1, 1, 1, 1;\n}"                                                                         \
                     : SUMS_##N : "l"(a), "l"(b), "r"(accumulate));                                                  \
    }
#define WGMMA(N, ...)                             \
    WGMMA_OF(half_t, N, "f16.f16", __VA_ARGS__)   \
    WGMMA_OF(bfloat16_t, N, "bf16.bf16", __VA_ARGS__)

WGMMA(16, 8, 9, 10)
WGMMA(32, 16, 17, 18)
WGMMA(48, 24, 25, 26)
WGMMA(64, 32, 33, 34)
WGMMA(80, 40, 41, 42)
WGMMA(96, 48, 49, 50)
WGMMA(112, 56, 57, 58)
WGMMA(128, 64, 65, 66)
WGMMA(144, 72, 73, 74)
WGMMA(160, 80, 81, 82)
WGMMA(176, 88, 89, 90)
WGMMA(192, 96, 97, 98)
WGMMA(208, 104, 105, 106)
WGMMA(224, 112, 113, 114)
WGMMA(240, 120, 121, 122)
WGMMA(256, 128, 129, 130)

#undef WGMMA_OF
#undef WGMMA
