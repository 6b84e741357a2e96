/* Stands in for csrc/include/ptx/tma.cuh; what the function does is in scheduler.cpp. */
#pragma once

#include "ptx/mbarrier.cuh"

struct alignas(64) tensor_map_t { unsigned long long opaque[16]; };

extern "C" void emulator_copy_box(void* target, const void* map, int i, int j, int k, int l, void* barrier);

__device__ __forceinline__ void tma_load(void* target, const tensor_map_t& map, int i, int j, int k, int l, barrier_t& b) {
    emulator_copy_box(target, &map, i, j, k, l, &b);
}
