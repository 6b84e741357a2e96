/* One thread for a warp. sm_90. */
#pragma once

/* Whether this thread speaks for its warp, all of whose threads are here; one does. Of such a thread the compiler knows that it
 * is alone: what takes barriers and copies in registers of the whole warp then needs no loop over threads.
 */
__device__ __forceinline__ bool elected() {
    unsigned speaks;
    asm volatile("{ .reg .pred is; elect.sync _|is, 0xffffffff; selp.u32 %0, 1, 0, is; }" : "=r"(speaks) : : "memory");
    return speaks != 0;
}
