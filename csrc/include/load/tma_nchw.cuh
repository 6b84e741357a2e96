/* Loader of sm90/implicit_gemm.cu whose inputs need nothing done to them: values of 16 bits in NCHW that come as boxes of a tensor
 * map, straight to where products read them. One thread begins all copies.
 *
 * The right side is positions of a channel, the other way round than elsewhere (see ptx/wgmma.cuh). So it is only for layers where
 * each cell sees the input at its own place alone, whose images are whole blocks of 64 positions:
 *
 *   patch [BLOCKS of 64 positions][UNITS * 8 channels][64 positions] swizzled
 *
 * A box is a patch, or one of its blocks where patches may go from one image to the next. Channels beyond the last are zeros.
 */
#pragma once

#include "pipeline/implicit_gemm.cuh"
#include "ptx/elect.cuh"

__device__ __forceinline__ void produce_patches(const implicit_gemm_params& p, const stages_t& s, int thread) {
    if (thread >= 32 || !elected()) return;
    constexpr int kBlocks = kTile / kSwizzled;
    ring_t ring;
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const item_t item = item_of(p, i);
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            barrier_t& full = s.patch_full[ring.stage];
            barrier_wait(s.patch_empty[ring.stage], ring.parity ^ 1);
            barrier_arrive_expecting(full, patch_units(p) * 16);
            for (int b = 0; b < kBlocks; b += p.box_rows) {
                const int block = item.tile * kBlocks + b, image = divided(block, p.by_strip_boxes);
                unit_t* to = s.patches + ring.stage * patch_units(p) + b * kSwizzledBlock;
                const int channel = item.group * IN_CHANNELS + chunk * UNITS * kElements;
                const int place = block - image * p.strip_boxes;
                tma_load(to, p.map, 0, channel, place, image, full);
            }
            ring.advance(p.patch_stages);
        }
    }
}
