/* A barrier of some warps of a block. */
#pragma once

/* Wait until THREADS threads, of whole warps, have come to barrier BARRIER (1 to 15; 0 is that of __syncthreads). */
template <int BARRIER, int THREADS> __device__ __forceinline__ void named_barrier_sync() {
    asm volatile("bar.sync %0, %1;" : : "n"(BARRIER), "n"(THREADS) : "memory");
}

/* named_barrier_sync for a barrier number that is only known at run time. */
template <int THREADS> __device__ __forceinline__ void named_barrier_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" : : "r"(barrier), "n"(THREADS) : "memory");
}

/* Come to it, for those who wait there, and go on at once. */
template <int BARRIER, int THREADS> __device__ __forceinline__ void named_barrier_arrive() {
    asm volatile("bar.arrive %0, %1;" : : "n"(BARRIER), "n"(THREADS) : "memory");
}
