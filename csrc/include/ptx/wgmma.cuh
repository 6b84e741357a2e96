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

/* The registers that a thread of the warpgroup may have from here on: more, once others gave some up, or fewer. */
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(REGISTERS));
}

// A, B and ACCUMULATE: numbers of the operands after those of d. LAST: 0, 0 says that both matrices are K-major.
#define WGMMA_OF(T, N, SWIZZLED, KIND, LAST, A, B, ACCUMULATE)                                                         \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma<T, N, SWIZZLED>(float (&d)[N / 2], descriptor_t a, descriptor_t b, int accumulate) { \
        asm volatile("{\n"                                                                                         \
                     ".reg .pred sum;\n"                                                                           \
                     "setp.ne.b32 sum, %" #ACCUMULATE ", 0;\n"                                                     \
                     "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" TEXT_##N "}, %" #A ", %" #B ", sum, 1, 1" LAST \
                     ";\n}"                                                                                        \
                     : SUMS_##N : "l"(a), "l"(b), "r"(accumulate));                                                \
    }
#define WGMMA(N, ...)                                                          \
    WGMMA_OF(half_t, N, false, "k16.f32.f16.f16", ", 0, 0", __VA_ARGS__)       \
    WGMMA_OF(half_t, N, true, "k16.f32.f16.f16", ", 0, 1", __VA_ARGS__)        \
    WGMMA_OF(bfloat16_t, N, false, "k16.f32.bf16.bf16", ", 0, 0", __VA_ARGS__) \
    WGMMA_OF(bfloat16_t, N, true, "k16.f32.bf16.bf16", ", 0, 1", __VA_ARGS__)  \
    WGMMA_OF(float, N, false, "k8.f32.tf32.tf32", "", __VA_ARGS__)

WGMMA(32, 16, 17, 18)
WGMMA(64, 32, 33, 34)
WGMMA(96, 48, 49, 50)
WGMMA(128, 64, 65, 66)
WGMMA(160, 80, 81, 82)
WGMMA(192, 96, 97, 98)
WGMMA(224, 112, 113, 114)
WGMMA(256, 128, 129, 130)

// That d goes through the wait keeps the compiler from reading it before.
#define WGMMA_FINISH(N)                                                                 \
    template <> __device__ __forceinline__ void wgmma_finish(float (&d)[N / 2]) {       \
        asm volatile("wgmma.wait_group.sync.aligned 0;" : SUMS_##N : : "memory");       \
    }
WGMMA_FINISH(32)
WGMMA_FINISH(64)
WGMMA_FINISH(96)
WGMMA_FINISH(128)
WGMMA_FINISH(160)
WGMMA_FINISH(192)
WGMMA_FINISH(224)
WGMMA_FINISH(256)

#undef WGMMA_OF
#undef WGMMA
#undef WGMMA_FINISH
