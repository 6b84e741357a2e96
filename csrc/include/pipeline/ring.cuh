/* Stages that are filled and used in turn, in a ring, with barriers for each: see ptx/mbarrier.cuh. */
#pragma once

/* A place in a ring, and the parity of the round: that of its barriers' phases. */
template <int COUNT> struct ring_t {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

/* The same of a count that is known at run time. */
struct ring_of_t {
    int count, stage = 0, parity = 0;
    __device__ __forceinline__ explicit ring_of_t(int stages) : count(stages) {}
    __device__ __forceinline__ void advance() {
        if (++stage == count) stage = 0, parity ^= 1;
    }
};
