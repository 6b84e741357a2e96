/* Stands in for csrc/include/ptx/mbarrier.cuh; what the functions do is in scheduler.cpp. */
#pragma once

struct alignas(8) barrier_t { unsigned long long state; };

extern "C" {
void emulator_barrier_init(void* barrier, int arrivals);
void emulator_barrier_init_done();
void emulator_barrier_arrive(void* barrier, int bytes);
void emulator_barrier_arrive_when_copied(void* barrier);
void emulator_barrier_wait(void* barrier, int parity);
void emulator_bulk_copy(void* target, const void* source, int bytes, void* barrier);
}

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}
__device__ __forceinline__ void barrier_init(barrier_t& b, int arrivals) { emulator_barrier_init(&b, arrivals); }
__device__ __forceinline__ void barrier_init_done() { emulator_barrier_init_done(); }
__device__ __forceinline__ void barrier_arrive(barrier_t& b) { emulator_barrier_arrive(&b, 0); }
__device__ __forceinline__ void barrier_arrive_when_copied(barrier_t& b) { emulator_barrier_arrive_when_copied(&b); }
__device__ __forceinline__ void barrier_arrive_expecting(barrier_t& b, int bytes) {
    emulator_barrier_arrive(&b, bytes);
}
__device__ __forceinline__ void barrier_wait(barrier_t& b, int parity) { emulator_barrier_wait(&b, parity); }
__device__ __forceinline__ void bulk_copy(void* target, const void* source, int bytes, barrier_t& b) {
    emulator_bulk_copy(target, source, bytes, &b);
}
__device__ __forceinline__ void fence_async_proxy() {}
