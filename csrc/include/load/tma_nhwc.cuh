/* Loader of sm90/implicit_gemm.cu whose inputs come as boxes of a tensor map, straight to where products read them: channels_last.
 * Nothing needs to be done to values of 16 bits; those of float32 are rounded, and split, where they lie.
 *
 * The right side is K-major as elsewhere, but a position is a line of all UNITS (see ptx/wgmma.cuh), so that any place of an input
 * relative to its cell is a whole line:
 *
 *   patch [planes][boxes][box_images][box_rows][box_width positions] of UNITS * 16 bytes, swizzled
 *
 * A box has rows of one strip or, where images are small, all rows of several; a part of an image where nothing lies between
 * rows (whole_images), of all images one after the other where nothing is shifted either (flat). It reaches beyond the image
 * as positions do, and is zero there, so that boxes one after the other are positions one after the other. Boxes begin at
 * multiples of box_positions, and a patch somewhere in its first box. Channels beyond the last are zeros. A warp copies, each
 * lane a box of its own; it is the last of the loaders where the others round.
 */
#pragma once

#include "pipeline/implicit_gemm.cuh"
#include "ptx/elect.cuh"

/* Where a box of a plane begins, of those from the position on that first_position_of counts from. */
struct corner_t { int column, row, image; };
__device__ __forceinline__ corner_t corner_of(const implicit_gemm_params& p, int plane, int box) {
    const int row = p.origin_h * UNIT_H + plane / UNIT_W, column = p.origin_w * UNIT_W + plane % UNIT_W;
    if (p.flat) return {box * p.box_width, 0, 0};
    if (p.box_images > 1) return {column, row, (box - 1) * p.box_images};
    const int strip = divided(box, p.by_strip_boxes) - 1, own = box - (strip + 1) * p.strip_boxes;
    const int image = strip < 0 ? -1 : divided(strip, p.by_strips), across = strip - image * p.strips;
    if (p.whole_images) return {own * p.box_width, 0, image};
    return {across * p.strip_cells * UNIT_W + column, own * p.box_rows * UNIT_H + row, image};
}

/* Copies the patches of tile after tile, chunk after chunk; one warp. `full` of a stage learns of it. */
__device__ __forceinline__ void copy_patches(const implicit_gemm_params& p, const stages_t& s, barrier_t* full, int lane) {
    const int positions = box_positions(p), boxes = kPlanes * p.boxes, plane = divided(lane, p.by_boxes);
    ring_t ring;
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const item_t item = item_of(p, i);
        const int first_box = divided(first_position_of(p, item.tile), p.by_positions);
        const corner_t corner = corner_of(p, plane, first_box + lane - plane * p.boxes);
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            barrier_wait(s.patch_empty[ring.stage], ring.parity ^ 1);
            if (elected()) barrier_arrive_expecting(full[ring.stage], boxes * positions * kLineBytes);
            __syncwarp();
            unit_t* to = s.patches + ring.stage * patch_units(p) + lane * (positions * UNITS);
            const int channel = item.group * IN_CHANNELS + chunk * UNITS * kElements;
            if (lane < boxes) tma_load(to, p.map, channel, corner.column, corner.row, corner.image, full[ring.stage]);
            ring.advance(p.patch_stages);
        }
    }
}

/* Rounds patch after patch where it lies, and lays its second part beside it; all loaders but the last warp. */
__device__ __forceinline__ void round_patches(const implicit_gemm_params& p, const stages_t& s, int thread) {
    constexpr int kTogether = 4;
    const int count = kPlanes * p.boxes * box_positions(p) * UNITS;
    ring_t ring;
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            unit_t* patch = s.patches + ring.stage * patch_units(p);
            barrier_wait(s.landed_full[ring.stage], ring.parity);
            #pragma unroll 1
            for (int first = thread; first < count; first += kTogether * kRounders) {
                unit_t units[kTogether];
                #pragma unroll
                for (int k = 0; k < kTogether; ++k)
                    if (first + k * kRounders < count) units[k] = patch[first + k * kRounders];
                #pragma unroll
                for (int k = 0; k < kTogether; ++k) {
                    if (first + k * kRounders >= count) continue;
                    const parts_t<kParts> parts = rounded_unit<kParts, ELEMENT_T>(units[k]);
                    #pragma unroll
                    for (int part = 0; part < kParts; ++part)
                        patch[part * UNITS * p.unit_pitch + first + k * kRounders] = parts.part[part];
                }
            }
            fence_async_proxy();
            __syncwarp();
            if (thread % 32 == 0) barrier_arrive(s.patch_full[ring.stage]);
            ring.advance(p.patch_stages);
        }
    }
}

__device__ __forceinline__ void produce_patches(const implicit_gemm_params& p, const stages_t& s, int thread) {
    if (kRounded && thread < kRounders) round_patches(p, s, thread);
    else if (kRounded || thread < 32) copy_patches(p, s, kRounded ? s.landed_full : s.patch_full, thread % 32);
}
