/* The skeleton of persistent kernels whose warps have roles. sm_90a.
 *
 * A block stays on its multiprocessor and takes item after item. Producers fill stages of shared memory, consumers multiply what
 * lies there and store: all roles go over the same items, and over the stages of a ring in turn (ptx/mbarrier.cuh).
 */
#pragma once

#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"

/* A place in a ring of stages, and the parity of the round: that of its barriers' phases. */
struct ring_t {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance(int count) {
        if (++stage == count) stage = 0, parity ^= 1;
    }
};

/* The barriers of a ring: whether a stage is full, and whether it is empty. */
template <int COUNT> struct ring_barriers_t { barrier_t full[COUNT], empty[COUNT]; };

/* Has them ready, for so many threads that arrive in each round. */
template <int COUNT>
__device__ __forceinline__ void init_ring(ring_barriers_t<COUNT>& ring, int producers, int consumers) {
    for (int i = 0; i < COUNT; ++i) {
        barrier_init(ring.full[i], producers);
        barrier_init(ring.empty[i], consumers);
    }
}

/* One thread of each of the first WARPS warps has barriers ready, by init(warp), for when the threads of the block next meet. */
template <int WARPS, typename INIT> __device__ __forceinline__ void begin_barriers(const INIT& init) {
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp < WARPS && elected()) {
        init(warp);
        barrier_init_done();
    }
}
/* begin_barriers, and a wait until all threads of the block see the barriers. */
template <int WARPS, typename INIT> __device__ __forceinline__ void init_barriers(const INIT& init) {
    begin_barriers<WARPS>(init);
    __syncthreads();
}
template <typename INIT> __device__ __forceinline__ void init_barriers(const INIT& init) {
    init_barriers<1>([&](int) { init(); });
}

/* Wait until a stage is empty, and announce what bulk copies will bring. They tell the barrier that this returns. */
template <typename BARRIERS>
__device__ __forceinline__ barrier_t& begin_stage(BARRIERS& barriers, const ring_t& ring, int bytes) {
    barrier_wait(barriers.empty[ring.stage], ring.parity ^ 1);
    barrier_arrive_expecting(barriers.full[ring.stage], bytes);
    return barriers.full[ring.stage];
}

/* Calls body(ITEM(p, i)) for the items i of a block. Where items are of `sets`, p.items of each, a block has one of them. */
template <typename ITEM, typename PARAMS, typename BODY>
__device__ __forceinline__ void each_item(const PARAMS& p, int sets, const BODY& body) {
    #pragma unroll 1
    for (int i = blockIdx.x / sets; i < p.items; i += gridDim.x / sets) body(ITEM(p, i));
}
template <typename ITEM, typename PARAMS, typename BODY>
__device__ __forceinline__ void each_item(const PARAMS& p, const BODY& body) { each_item<ITEM>(p, 1, body); }

/* The roles of a block: threads before FIRST produce, with FEWER registers each, the others consume, with MORE, or all with as many
 * where MORE is 0. consume(i) is for the i-th THREADS of them: a number that a whole warp has, as far as the compiler can see.
 */
template <int FIRST, int THREADS, int MORE, int FEWER, typename PRODUCE, typename CONSUME>
__device__ __forceinline__ void run_roles(const PRODUCE& produce, const CONSUME& consume) {
    if (threadIdx.x >= FIRST) {
        if constexpr (MORE > 0) setmaxnreg_inc<MORE>();
        consume(__shfl_sync(0xffffffffu, (threadIdx.x - FIRST) / THREADS, 0));
    } else {
        if constexpr (MORE > 0) setmaxnreg_dec<FEWER>();
        produce();
    }
}
