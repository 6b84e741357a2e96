/* Stages that are filled and used in turn, in a ring, with barriers for each: see ptx/mbarrier.cuh. */
#pragma once

/* A place in a ring, and the parity of the round: that of its barriers' phases. */
template <int COUNT> struct ring_t {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

/* The same, of as many stages as a launch says. */
struct open_ring_t {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance(int count) {
        if (++stage == count) stage = 0, parity ^= 1;
    }
};
