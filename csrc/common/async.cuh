/* cp.async: copies from global to shared memory that go on while the thread computes. */
#pragma once

/* Begin to copy BYTES (4, 8 or 16, and so aligned), or to write as many zeros where `inside` is false. */
template <int BYTES> __device__ __forceinline__ void copy_async(void* target, const void* source, bool inside) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(target));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 : : "r"(address), "l"(source), "n"(BYTES), "r"(inside ? BYTES : 0) : "memory");
}

/* Wait for all copies that this thread has begun. Other threads see them after a barrier. */
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" : : : "memory"); }
