/* Which plane (an image's channel) and which item of it a thread owns.
 * Blocks are [planes, items]: threadIdx.x and blockIdx.x run over the items of a plane, threadIdx.y and the rest of the
 * grid over the planes, so that small planes share a block and there may be more planes than one grid axis holds.
 */
#pragma once

#include "numeric/index.cuh"

__device__ __forceinline__ index_t item_of_thread() {
    return static_cast<index_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ int plane_of_thread() {
    return static_cast<int>((blockIdx.y + gridDim.y * blockIdx.z) * blockDim.y + threadIdx.y);
}
