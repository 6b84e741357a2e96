/* wgmma whose A is in registers: D (+)= A B by a warpgroup, as in wgmma.cuh but for A. sm_90a.
 *
 * With w = warp % 4, g = lane / 4, t = lane % 4 a thread's a has, of rows 16w + g and 16w + g + 8, the words t and t + 4 of the
 * 32 bytes of K, as mma.cuh has them: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4). B is K-major, N is a multiple of 16.
 */
#pragma once

#include "common/wgmma.cuh"

/* Begin D = A B, plus D where `accumulate` is not 0. */
template <typename T, int N>
__device__ __forceinline__ void wgmma_rows(float (&d)[N / 2], const unsigned (&a)[4], matrix_t b, int accumulate);

/* Wait until all products are complete, those of d among them, which may be read from here on. */
template <int COUNT> __device__ __forceinline__ void wgmma_finish_rows(float (&d)[COUNT]) {
    wgmma_wait<0>();
    // That d goes through here keeps the compiler from reading it before.
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i]) : : "memory");
}

// The operands of d for each N: 8 registers more than for the N before.
#define TEXT_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TEXT_32 TEXT_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TEXT_48 TEXT_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TEXT_64 TEXT_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TEXT_80 TEXT_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TEXT_96 TEXT_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TEXT_112 TEXT_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TEXT_128 TEXT_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TEXT_144 TEXT_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TEXT_160 TEXT_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TEXT_176 TEXT_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TEXT_192 TEXT_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TEXT_208 TEXT_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TEXT_224 TEXT_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TEXT_240 TEXT_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TEXT_256 TEXT_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16 SUMS_8(0)
#define SUMS_32 SUMS_16, SUMS_8(8)
#define SUMS_48 SUMS_32, SUMS_8(16)
#define SUMS_64 SUMS_48, SUMS_8(24)
#define SUMS_80 SUMS_64, SUMS_8(32)
#define SUMS_96 SUMS_80, SUMS_8(40)
#define SUMS_112 SUMS_96, SUMS_8(48)
#define SUMS_128 SUMS_112, SUMS_8(56)
#define SUMS_144 SUMS_128, SUMS_8(64)
#define SUMS_160 SUMS_144, SUMS_8(72)
#define SUMS_176 SUMS_160, SUMS_8(80)
#define SUMS_192 SUMS_176, SUMS_8(88)
#define SUMS_208 SUMS_192, SUMS_8(96)
#define SUMS_224 SUMS_208, SUMS_8(104)
#define SUMS_240 SUMS_224, SUMS_8(112)
#define SUMS_256 SUMS_240, SUMS_8(120)

// A0 to A3, B and ACCUMULATE: numbers of the operands after those of d. LAST: 0 says that B is K-major.
#define WGMMA_OF(T, N, KIND, LAST, A0, A1, A2, A3, B, ACCUMULATE)                                                        \
    template <>                                                                                                          \
    __device__ __forceinline__ void wgmma_rows<T, N>(                                                                    \
        float (&d)[N / 2], const unsigned (&a)[4], matrix_t b, int accumulate) {                                         \
        asm volatile("{\n"                                                                                               \
                     ".reg .pred sum;\n"                                                                                 \
                     "setp.ne.b32 sum, %" #ACCUMULATE ", 0;\n"                                                           \
                     "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" TEXT_##N "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 \
                     "}, %" #B ", sum, 1, 1" LAST ";\n}"                                                                 \
                     : SUMS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                  \
    }
#define WGMMA(N, ...)                                             \
    WGMMA_OF(half_t, N, "k16.f32.f16.f16", ", 0", __VA_ARGS__)    \
    WGMMA_OF(bfloat16_t, N, "k16.f32.bf16.bf16", ", 0", __VA_ARGS__) \
    WGMMA_OF(float, N, "k8.f32.tf32.tf32", "", __VA_ARGS__)

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

#undef TEXT_16
#undef TEXT_32
#undef TEXT_48
#undef TEXT_64
#undef TEXT_80
#undef TEXT_96
#undef TEXT_112
#undef TEXT_128
#undef TEXT_144
#undef TEXT_160
#undef TEXT_176
#undef TEXT_192
#undef TEXT_208
#undef TEXT_224
#undef TEXT_240
#undef TEXT_256
#undef SUMS_4
#undef SUMS_8
#undef SUMS_16
#undef SUMS_32
#undef SUMS_48
#undef SUMS_64
#undef SUMS_80
#undef SUMS_96
#undef SUMS_112
#undef SUMS_128
#undef SUMS_144
#undef SUMS_160
#undef SUMS_176
#undef SUMS_192
#undef SUMS_208
#undef SUMS_224
#undef SUMS_240
#undef SUMS_256
#undef WGMMA_OF
#undef WGMMA
