/* mbarrier: barriers in shared memory that threads and bulk copies arrive at, and that any thread may wait for. sm_90.
 *
 * A barrier goes through phases. A phase is complete once as many threads have arrived as barrier_init said and all
 * bytes that were announced have been copied; the next begins at once. Phases have parity 0, 1, 0, ... in turn, and
 * barrier_wait(b, parity) returns when the current phase has the other parity: when the one with that parity is over.
 * A fresh barrier is in a phase of parity 0, as if one of parity 1 had just been over: waiting for 1 returns at once.
 *
 * With two barriers for each stage of a ring, stage s is filled for the n-th time by a producer that does
 *
 *   barrier_wait(empty[s], ~n & 1); barrier_arrive_expecting(full[s], bytes); bulk_copy(stage[s], ..., bytes, full[s]);
 *
 * and used by consumers that do barrier_wait(full[s], n & 1), read it, and barrier_arrive(empty[s]).
 */
#pragma once

struct alignas(8) barrier_t { unsigned long long state; };  // lies in shared memory

/* Offset in shared memory. */
__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

/* Once, by one thread; `arrivals` of each phase. */
__device__ __forceinline__ void barrier_init(barrier_t& b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(&b)), "r"(arrivals) : "memory");
}

/* After the last barrier_init, by the same thread, so that bulk copies see the barriers; then __syncthreads(). */
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

__device__ __forceinline__ void barrier_arrive(barrier_t& b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(&b)) : "memory");
}

/* Arrive once all copies of ptx/cp_async.cuh that this thread has begun are complete: others see them behind the barrier. */
__device__ __forceinline__ void barrier_arrive_when_copied(barrier_t& b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(shared_address(&b)) : "memory");
}

/* Announce what bulk copies will bring in this phase, and arrive. */
__device__ __forceinline__ void barrier_arrive_expecting(barrier_t& b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 : : "r"(shared_address(&b)), "r"(bytes) : "memory");
}

/* Wait until the phase with that parity is complete. */
__device__ __forceinline__ void barrier_wait(barrier_t& b, int parity) {
    asm volatile("{\n"
                 ".reg .pred complete;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
                 "@!complete bra again;\n"
                 "}"
                 : : "r"(shared_address(&b)), "r"(parity) : "memory");
}

/* Begin to copy from global to shared memory: both 16-byte aligned, bytes a multiple of 16. One thread copies them all,
 * and `b` learns of each byte that has come.
 */
__device__ __forceinline__ void bulk_copy(void* target, const void* source, int bytes, barrier_t& b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 : : "r"(shared_address(target)), "l"(__cvta_generic_to_global(source)), "r"(bytes),
                     "r"(shared_address(&b))
                 : "memory");
}

/* Make this thread's writes to shared memory visible to the async proxy, wgmma and bulk copies. Call it before the barrier
 * after which these begin.
 */
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
