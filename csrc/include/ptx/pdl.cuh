/* A launch that may begin before the one before it has ended (programmatic dependent launch, since sm_90). */
#pragma once

/* Let the next launch begin, if it may, once all blocks of this one have come here or ended. */
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

/* Wait until the launch before this one has ended, and see what it wrote. Before sm_90 it always has. */
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
