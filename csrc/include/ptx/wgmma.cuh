/* wgmma: D (+)= A B by a warpgroup, 128 threads from a multiple of 128 on, all of which call what is here. sm_90a.
 *
 * A kernel names the type and N of its products before: ELEMENT_T and WGMMA_COLUMNS, a multiple of 16 up to 256. Of all types and
 * N the compiler took up to 70 ms to read them.
 *
 * A [64 rows, K] and B [K, N columns] lie in shared memory, D [64, N] in registers, in float32. K is 32 bytes: 16
 * values of 16 bits, or 8 of float32, of which the low 13 bits are cut off. Both matrices are stored K-major, B as its
 * columns: as core matrices of 8 rows (of B: columns) of 16 bytes, each 128 bytes in one piece, `leading_bytes` from
 * one to the next along K, and `stride_bytes` from one group of 8 rows to the next. Row r, byte k of a matrix is at
 *
 *   r / 8 * stride_bytes + k / 16 * leading_bytes + r % 8 * 16 + k % 16
 *
 * B of 16-bit values may lie the other way round, as columns of a value of K (SWIZZLED), 64 of them in a line of 128 bytes
 * whose pieces of 16 bytes are in another order: piece i of line j is at i ^ j % 8, where line 0 begins at a multiple of 1024
 * bytes. Column c, value k is in piece c % 64 / 8 of line k % 8 of
 *
 *   c / 64 * leading_bytes + k / 8 * stride_bytes
 *
 * Either may also lie K-major as lines of 128 or 64 bytes, a row each (descriptor_k_major_swizzled), whose pieces are in another order too: of the
 * address of a piece, bits 4 to 6 are changed by bits 7 to 9, or 4 and 5 by 7 and 8. Row r begins at
 *
 *   r / 8 * stride_bytes + r % 8 * line bytes
 *
 * and a step along K goes 32 bytes on in the line. A of 16 bits may lie the other way round too, where B does (wgmma_turned).
 *
 * With w = warp % 4, g = lane / 4, t = lane % 4 a thread's d[4j + 2h + e] is row 16w + g + 8h, column 8j + 2t + e.
 *
 * A may come from registers (wgmma_rows): a thread's a has, of rows 16w + g and 16w + g + 8, the words t and t + 4 of the 32 bytes
 * of K, as ptx/mma.cuh has them: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4). While products run, what they have of A may not
 * change either: words are kept for two groups by turns.
 *
 * Products run while the threads go on:
 *
 *   wgmma_fence(); wgmma<T, N>(d, a, b, 0); wgmma<T, N>(d, ...); wgmma_commit(); ...; wgmma_finish(d);
 *
 * Until they were waited for, nobody may write what they read, and d belongs to them: a compiler that keeps d in memory
 * copies it there too early, so d must be indexed by constants alone (numeric/unroll.cuh).
 */
#pragma once

#include "numeric/types.cuh"

/* Where a matrix lies: bits 0-13 address, 16-29 leading bytes, 32-45 stride bytes, all in units of 16; 62-63 swizzled: 1 in
 * lines of 128 bytes, 2 of 64.
 */
using descriptor_t = unsigned long long;

__device__ __forceinline__ descriptor_t descriptor_k_major(const void* shared, int leading_bytes, int stride_bytes) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    const unsigned low = (address >> 4 & 0x3fff) | static_cast<unsigned>(leading_bytes) >> 4 << 16;
    return static_cast<descriptor_t>(static_cast<unsigned>(stride_bytes) >> 4) << 32 | low;
}

__device__ __forceinline__ descriptor_t descriptor_mn_major(const void* shared, int leading_bytes, int stride_bytes) {
    return descriptor_k_major(shared, leading_bytes, stride_bytes) | 1ull << 62;
}

/* A matrix in lines of 64 or 128 bytes; groups of eight lie one after the other unless `stride_bytes`, of whole lines of 128, says
 * otherwise.
 */
template <int LINE_BYTES> __device__ __forceinline__ descriptor_t descriptor_k_major_swizzled(const void* shared, int stride_bytes = 8 * LINE_BYTES) {
    static_assert(LINE_BYTES == 64 || LINE_BYTES == 128, "other lines are not for wgmma");
    return descriptor_k_major(shared, 16, stride_bytes) | (LINE_BYTES == 128 ? 1ull : 2ull) << 62;
}

/* The descriptor moved on by so many bytes, a multiple of 16. */
__device__ __forceinline__ descriptor_t advance(descriptor_t matrix, int bytes) {
    return matrix >> 32 << 32 | (static_cast<unsigned>(matrix) + static_cast<unsigned>(bytes >> 4));
}

/* Before the first product, and again where d was touched since the last. */
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }

/* The products begun since the last call are a group. */
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

/* Wait until all groups but the last PENDING are complete. d may not be read yet. */
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(PENDING) : "memory");
}

/* Begin D = A B, plus D where `accumulate` is not 0. T is half_t, bfloat16_t or float. */
template <typename T, int N, bool SWIZZLED = false>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], descriptor_t a, descriptor_t b, int accumulate);

/* Begin D = A[0] B[0] + A[1] B[1] + ...: 1, 2 or 4 products, which the compiler takes for one instruction: it compiles
 * quicker, since it goes through all of d for each that it knows of.
 */
template <typename T, int N, bool SWIZZLED = false, int COUNT>
__device__ __forceinline__ void wgmma(
    float (&d)[N / 2], const descriptor_t (&a)[COUNT], const descriptor_t (&b)[COUNT], int accumulate);

/* wgmma for 16-bit operands that both are MN-major. */
template <typename T, int N>
__device__ __forceinline__ void wgmma_turned(float (&d)[N / 2], descriptor_t a, descriptor_t b, int accumulate);

/* wgmma with A in registers: one product, or four. */
template <typename T, int N, bool SWIZZLED = false>
__device__ __forceinline__ void wgmma_rows(float (&d)[N / 2], const unsigned (&a)[4], descriptor_t b, int accumulate);
template <typename T, int N, bool SWIZZLED = false>
__device__ __forceinline__ void wgmma_rows(
    float (&d)[N / 2], const unsigned (&a)[4][4], const descriptor_t (&b)[4], int accumulate);

/* The registers that a thread of the warpgroup may have from here on: more, once others gave some up, or fewer. */
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

// The operands of d in inline assembly, for N from 16 to 256 in steps of 16: TEXT_N their numbers, SUMS_N the registers, AFTER_N the
// numbers of operands that follow.
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
#define AFTER_16 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28
#define AFTER_32 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36
#define AFTER_48 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44
#define AFTER_64 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52
#define AFTER_80 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60
#define AFTER_96 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68
#define AFTER_112 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76
#define AFTER_128 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84
#define AFTER_144 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92
#define AFTER_160 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100
#define AFTER_176 88, 89, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108
#define AFTER_192 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116
#define AFTER_208 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122, 123, 124
#define AFTER_224 112, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 131, 132
#define AFTER_240 120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140
#define AFTER_256 128, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140, 141, 142, 143, 144, 145, 146, 147, 148

#define WGMMA_TEXT(N, KIND, LAST, A, B, SUM) \
    "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" TEXT_##N "}, " A ", %" #B ", " SUM ", 1, 1" LAST ";\n"
#define WGMMA_BEGIN(ACCUMULATE) \
    "{\n.reg .pred sum, all;\nsetp.ne.b32 sum, %" #ACCUMULATE ", 0;\nsetp.eq.b32 all, 0, 0;\n"
#define A_WORD(I) "%" #I
#define A_WORDS(I, J, K, L) "{%" #I ", %" #J ", %" #K ", %" #L "}"
#define A_WORDS_OF(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
// I0 to I20: numbers of the operands after those of d. BOTH, LAST: how A and B, or B alone, lie, of 16 bits; 0 says K-major.
#define WGMMA_OF(T, N, SWIZZLED, KIND, BOTH, LAST, I0, I1, I2, I3, I4, I5, I6, I7, I8, I9, I10, I11, I12, I13, I14, I15, \
                 I16, I17, I18, I19, I20)                                                                                \
    template <>                                                                                                          \
    __device__ __forceinline__ void wgmma<T, N, SWIZZLED>(                                                               \
        float (&d)[N / 2], descriptor_t a, descriptor_t b, int sum) {                                                    \
        asm volatile(WGMMA_BEGIN(I2) WGMMA_TEXT(N, KIND, BOTH, A_WORD(I0), I1, "sum") "}"                                \
                     : SUMS_##N : "l"(a), "l"(b), "r"(sum));                                                             \
    }                                                                                                                    \
    template <>                                                                                                          \
    __device__ __forceinline__ void wgmma<T, N, SWIZZLED, 1>(                                                            \
        float (&d)[N / 2], const descriptor_t (&a)[1], const descriptor_t (&b)[1], int sum) {                            \
        wgmma<T, N, SWIZZLED>(d, a[0], b[0], sum);                                                                       \
    }                                                                                                                    \
    template <>                                                                                                          \
    __device__ __forceinline__ void wgmma<T, N, SWIZZLED, 2>(                                                            \
        float (&d)[N / 2], const descriptor_t (&a)[2], const descriptor_t (&b)[2], int sum) {                            \
        asm volatile(WGMMA_BEGIN(I4) WGMMA_TEXT(N, KIND, BOTH, A_WORD(I0), I2, "sum")                                    \
                     WGMMA_TEXT(N, KIND, BOTH, A_WORD(I1), I3, "all") "}"                                                \
                     : SUMS_##N : "l"(a[0]), "l"(a[1]), "l"(b[0]), "l"(b[1]), "r"(sum));                                 \
    }                                                                                                                    \
    template <>                                                                                                          \
    __device__ __forceinline__ void wgmma<T, N, SWIZZLED, 4>(                                                            \
        float (&d)[N / 2], const descriptor_t (&a)[4], const descriptor_t (&b)[4], int sum) {                            \
        asm volatile(WGMMA_BEGIN(I8) WGMMA_TEXT(N, KIND, BOTH, A_WORD(I0), I4, "sum")                                    \
                     WGMMA_TEXT(N, KIND, BOTH, A_WORD(I1), I5, "all") WGMMA_TEXT(N, KIND, BOTH, A_WORD(I2), I6, "all")   \
                     WGMMA_TEXT(N, KIND, BOTH, A_WORD(I3), I7, "all") "}"                                                \
                     : SUMS_##N : "l"(a[0]), "l"(a[1]), "l"(a[2]), "l"(a[3]), "l"(b[0]), "l"(b[1]), "l"(b[2]),           \
                       "l"(b[3]), "r"(sum));                                                                             \
    }                                                                                                                    \
    template <>                                                                                                          \
    __device__ __forceinline__ void wgmma_rows<T, N, SWIZZLED>(                                                          \
        float (&d)[N / 2], const unsigned (&a)[4], descriptor_t b, int sum) {                                            \
        asm volatile(WGMMA_BEGIN(I5) WGMMA_TEXT(N, KIND, LAST, A_WORDS(I0, I1, I2, I3), I4, "sum") "}"                   \
                     : SUMS_##N : A_WORDS_OF(a), "l"(b), "r"(sum));                                                      \
    }                                                                                                                    \
    template <>                                                                                                          \
    __device__ __forceinline__ void wgmma_rows<T, N, SWIZZLED>(                                                          \
        float (&d)[N / 2], const unsigned (&a)[4][4], const descriptor_t (&b)[4], int sum) {                             \
        asm volatile(WGMMA_BEGIN(I20) WGMMA_TEXT(N, KIND, LAST, A_WORDS(I0, I1, I2, I3), I16, "sum")                     \
                     WGMMA_TEXT(N, KIND, LAST, A_WORDS(I4, I5, I6, I7), I17, "all")                                      \
                     WGMMA_TEXT(N, KIND, LAST, A_WORDS(I8, I9, I10, I11), I18, "all")                                    \
                     WGMMA_TEXT(N, KIND, LAST, A_WORDS(I12, I13, I14, I15), I19, "all") "}"                              \
                     : SUMS_##N : A_WORDS_OF(a[0]), A_WORDS_OF(a[1]), A_WORDS_OF(a[2]), A_WORDS_OF(a[3]), "l"(b[0]),     \
                       "l"(b[1]), "l"(b[2]), "l"(b[3]), "r"(sum));                                                       \
    }
#define WGMMA_TURNED(T, N, KIND, I0, I1, I2, ...)                                                                    \
    template <>                                                                                                      \
    __device__ __forceinline__ void wgmma_turned<T, N>(float (&d)[N / 2], descriptor_t a, descriptor_t b, int sum) { \
        asm volatile("{\n.reg .pred sum;\nsetp.ne.b32 sum, %" #I2 ", 0;\n"                                          \
                     WGMMA_TEXT(N, KIND, ", 1, 1", A_WORD(I0), I1, "sum") "}"                                        \
                     : SUMS_##N : "l"(a), "l"(b), "r"(sum));                                                         \
    }
#define WGMMA_16_BITS(T, N, KIND, ...)                        \
    WGMMA_OF(T, N, false, KIND, ", 0, 0", ", 0", __VA_ARGS__) \
    WGMMA_OF(T, N, true, KIND, ", 0, 1", ", 1", __VA_ARGS__)  \
    WGMMA_TURNED(T, N, KIND, __VA_ARGS__)
#define WGMMA_half_t(N, ...) WGMMA_16_BITS(half_t, N, "k16.f32.f16.f16", __VA_ARGS__)
#define WGMMA_bfloat16_t(N, ...) WGMMA_16_BITS(bfloat16_t, N, "k16.f32.bf16.bf16", __VA_ARGS__)
#define WGMMA_float(N, ...) WGMMA_OF(float, N, false, "k8.f32.tf32.tf32", "", "", __VA_ARGS__)
#define WGMMA_ONE(T, N) WGMMA_##T(N, AFTER_##N)
#define WGMMA(T, N) WGMMA_ONE(T, N)  // what macros stand for
WGMMA(ELEMENT_T, WGMMA_COLUMNS)

// That d goes through inline assembly keeps the compiler from setting it later, or reading it before.
#define SUMS_OF(N) SUMS_##N
#define SUMS(N) SUMS_OF(N)

/* d is zero from here on: were it set where products run already, of other sums, each of those would be waited for. */
__device__ __forceinline__ void wgmma_clear(float (&d)[WGMMA_COLUMNS / 2]) {
    #pragma unroll
    for (float& one : d) one = 0.0f;
    asm volatile("" : SUMS(WGMMA_COLUMNS) : : "memory");
}

/* Wait until all products are complete, those of d among them, which may be read from here on. */
__device__ __forceinline__ void wgmma_finish(float (&d)[WGMMA_COLUMNS / 2]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : SUMS(WGMMA_COLUMNS) : : "memory");
}

/* wgmma_finish for wgmma_turned and wgmma_rows. */
__device__ __forceinline__ void wgmma_finish_rows(float (&d)[WGMMA_COLUMNS / 2]) {
    wgmma_wait<0>();
    asm volatile("" : SUMS(WGMMA_COLUMNS) : : "memory");
}
