/* wgmma: D (+)= A B by a warpgroup, 128 threads from a multiple of 128 on, all of which call what is here. sm_90a.
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
 * and a step along K goes 32 bytes on in the line.
 *
 * With w = warp % 4, g = lane / 4, t = lane % 4 a thread's d[4j + 2h + e] is row 16w + g + 8h, column 8j + 2t + e.
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
#include "ptx/wgmma_operands.cuh"

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

/* The same matrix so many bytes (a multiple of 16) further on. */
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

/* Wait until all products are complete, those of d among them, which may be read from here on. */
template <int COUNT> __device__ __forceinline__ void wgmma_finish(float (&d)[COUNT]);

/* Begin D = A B, plus D where `accumulate` is not 0. T is half_t, bfloat16_t or float, N a multiple of 32 up to 256. */
template <typename T, int N, bool SWIZZLED = false>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], descriptor_t a, descriptor_t b, int accumulate);

/* Begin D = A[0] B[0] + A[1] B[1] + ...: 1, 2 or 4 products, which the compiler takes for one instruction: it compiles
 * quicker, since it goes through all of d for each that it knows of.
 */
template <typename T, int N, bool SWIZZLED = false, int COUNT>
__device__ __forceinline__ void wgmma(
    float (&d)[N / 2], const descriptor_t (&a)[COUNT], const descriptor_t (&b)[COUNT], int accumulate);

/* The registers that a thread of the warpgroup may have from here on: more, once others gave some up, or fewer. */
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

#define WGMMA_TEXT(N, KIND, LAST, A, B, SUM) \
    "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" TEXT_##N "}, %" #A ", %" #B ", " SUM ", 1, 1" LAST ";\n"
#define WGMMA_BEGIN(ACCUMULATE) \
    "{\n.reg .pred sum, all;\nsetp.ne.b32 sum, %" #ACCUMULATE ", 0;\nsetp.eq.b32 all, 0, 0;\n"
// I0 to I8: numbers of the operands after those of d. LAST: 0, 0 says that both matrices are K-major.
#define WGMMA_OF(T, N, SWIZZLED, KIND, LAST, I0, I1, I2, I3, I4, I5, I6, I7, I8, ...)                                  \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma<T, N, SWIZZLED>(                                                             \
        float (&d)[N / 2], descriptor_t a, descriptor_t b, int sum) {                                                  \
        asm volatile(WGMMA_BEGIN(I2) WGMMA_TEXT(N, KIND, LAST, I0, I1, "sum") "}"                                      \
                     : SUMS_##N : "l"(a), "l"(b), "r"(sum));                                                           \
    }                                                                                                                  \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma<T, N, SWIZZLED, 1>(                                                          \
        float (&d)[N / 2], const descriptor_t (&a)[1], const descriptor_t (&b)[1], int sum) {                          \
        wgmma<T, N, SWIZZLED>(d, a[0], b[0], sum);                                                                     \
    }                                                                                                                  \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma<T, N, SWIZZLED, 2>(                                                          \
        float (&d)[N / 2], const descriptor_t (&a)[2], const descriptor_t (&b)[2], int sum) {                          \
        asm volatile(WGMMA_BEGIN(I4) WGMMA_TEXT(N, KIND, LAST, I0, I2, "sum")                                          \
                     WGMMA_TEXT(N, KIND, LAST, I1, I3, "all") "}"                                                      \
                     : SUMS_##N : "l"(a[0]), "l"(a[1]), "l"(b[0]), "l"(b[1]), "r"(sum));                               \
    }                                                                                                                  \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma<T, N, SWIZZLED, 4>(                                                          \
        float (&d)[N / 2], const descriptor_t (&a)[4], const descriptor_t (&b)[4], int sum) {                          \
        asm volatile(WGMMA_BEGIN(I8) WGMMA_TEXT(N, KIND, LAST, I0, I4, "sum") WGMMA_TEXT(N, KIND, LAST, I1, I5, "all") \
                     WGMMA_TEXT(N, KIND, LAST, I2, I6, "all") WGMMA_TEXT(N, KIND, LAST, I3, I7, "all") "}"             \
                     : SUMS_##N : "l"(a[0]), "l"(a[1]), "l"(a[2]), "l"(a[3]), "l"(b[0]), "l"(b[1]), "l"(b[2]),         \
                       "l"(b[3]), "r"(sum));                                                                           \
    }
#define WGMMA_half_t(N, ...)                                             \
    WGMMA_OF(half_t, N, false, "k16.f32.f16.f16", ", 0, 0", __VA_ARGS__) \
    WGMMA_OF(half_t, N, true, "k16.f32.f16.f16", ", 0, 1", __VA_ARGS__)
#define WGMMA_bfloat16_t(N, ...)                                               \
    WGMMA_OF(bfloat16_t, N, false, "k16.f32.bf16.bf16", ", 0, 0", __VA_ARGS__) \
    WGMMA_OF(bfloat16_t, N, true, "k16.f32.bf16.bf16", ", 0, 1", __VA_ARGS__)
#define WGMMA_float(N, ...) WGMMA_OF(float, N, false, "k8.f32.tf32.tf32", "", __VA_ARGS__)

// That d goes through the wait keeps the compiler from reading it before.
#define WGMMA_FINISH(N)                                                           \
    template <> __device__ __forceinline__ void wgmma_finish(float (&d)[N / 2]) { \
        asm volatile("wgmma.wait_group.sync.aligned 0;" : SUMS_##N : : "memory"); \
    }
#define WGMMA_ONE(T, N) WGMMA_##T(N, AFTER_##N)
#define WGMMA_NAMED(T, N) WGMMA_ONE(T, N)  // what macros stand for
#define WGMMA_FINISH_NAMED(N) WGMMA_FINISH(N)
#ifdef WGMMA_COLUMNS
WGMMA_NAMED(ELEMENT_T, WGMMA_COLUMNS)
WGMMA_FINISH_NAMED(WGMMA_COLUMNS)
#else
#define WGMMA(N) WGMMA_ONE(half_t, N) WGMMA_ONE(bfloat16_t, N) WGMMA_ONE(float, N) WGMMA_FINISH(N)
WGMMA(32)
WGMMA(64)
WGMMA(96)
WGMMA(128)
WGMMA(160)
WGMMA(192)
WGMMA(224)
WGMMA(256)
#undef WGMMA
#endif

#undef WGMMA_TEXT
#undef WGMMA_BEGIN
#undef WGMMA_OF
#undef WGMMA_half_t
#undef WGMMA_bfloat16_t
#undef WGMMA_float
#undef WGMMA_FINISH
#undef WGMMA_ONE
#undef WGMMA_NAMED
#undef WGMMA_FINISH_NAMED
