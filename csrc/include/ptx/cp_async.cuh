/* cp.async: copies from global to shared memory that go on while the thread computes. */
#pragma once

/* Begin to copy BYTES (4, 8 or 16, and so aligned), or to write as many zeros where `inside` is false. */
template <int BYTES> __device__ __forceinline__ void cp_async(void* target, const void* source, bool inside) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(target));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 : : "r"(address), "l"(source), "n"(BYTES), "r"(inside ? BYTES : 0) : "memory");
}

/* Begin to copy the first `bytes` of 16, and to write zeros for the others. */
__device__ __forceinline__ void copy_some_async(void* target, const void* source, int bytes) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(target));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(address), "l"(source), "r"(bytes) : "memory");
}

/* Begin to copy 16 bytes, or to write as many zeros where `inside` is 0. Takes fewer instructions than the other two. */
__device__ __forceinline__ void copy_piece_async(void* target, const void* source, int inside) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(target));
    asm volatile("{ .reg .pred outside; setp.eq.s32 outside, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, outside; }"
                 : : "r"(address), "l"(source), "r"(inside) : "memory");
}

/* The copies that this thread has begun since the last call are a group. */
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }

/* Wait for all groups but the last PENDING, or for all copies. Other threads see them after a barrier. */
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" : : : "memory"); }
