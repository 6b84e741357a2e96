/* One thread for a warp. sm_90. */
#pragma once

/* Whether this thread is the elected one of its warp, all of whose threads must be here. The compiler knows that an elected
 * thread is alone: barriers and copies in registers of the whole warp then need no loop over threads, which took up to 1 us.
 */
__device__ __forceinline__ bool elected() {
    unsigned speaks;
    asm volatile("{ .reg .pred is; elect.sync _|is, 0xffffffff; selp.u32 %0, 1, 0, is; }" : "=r"(speaks) : : "memory");
    return speaks != 0;
}
