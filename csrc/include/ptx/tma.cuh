/* Copies of boxes of a tensor, which may reach beyond it, from global to shared memory. sm_90. */
#pragma once

#include "ptx/mbarrier.cuh"

/* A tensor map of cuTensorMapEncodeTiled: a tensor, its boxes and their swizzle: see gemmconv/runtime/tensor_map.py. */
struct alignas(64) tensor_map_t { unsigned long long opaque[16]; };

/* Begin to copy the box whose first element has these coordinates, the innermost first; zeros for what is not in the tensor.
 * `b` learns of all its bytes. The map is a parameter of the kernel; the target lies at a multiple of 128 bytes.
 * Where boxes are swizzled, in lines of 64 or 128 bytes, their pieces of 16 lie in another order, which depends on the address:
 * see ptx/wgmma.cuh.
 */
__device__ __forceinline__ void tma_load(void* target, const tensor_map_t& map, int i, int j, int k, int l, barrier_t& b) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 : : "r"(shared_address(target)), "l"(&map), "r"(i), "r"(j), "r"(k), "r"(l), "r"(shared_address(&b))
                 : "memory");
}
