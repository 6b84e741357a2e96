/* Loader of fused_wgmma.cu whose inputs come piece by piece, by cp.async, to where products read them: values of 16 bits in
 * NCHW, as in fused_blocks.cuh, of layers where each cell sees the input at its own place alone. Images need not be whole blocks
 * of 64 positions, nor planes be whole 16 bytes, as a tensor map wants them: blocks go on from one image to the next, and a
 * piece is PIECE positions of a channel, of which an image is a multiple. With threads that lay the values out by channels
 * Mask R-CNN took 89 us in fp16, and takes 84, PointPillars 2 34.7 and 32.7: what is left is how short rows are stored.
 *
 *   patch [blocks of 64 positions][UNITS * 8 channels][64 positions] swizzled
 *
 * A warp has whole lines of 64 positions: a thread the same piece of every line, and every so many channels.
 */
#pragma once

#include "common/async.cuh"
#include "common/fused.cuh"

constexpr int kBlockPieces = kSwizzled / PIECE, kUnitPieces = kElements / PIECE;  // of 64 positions, and of 16 bytes
constexpr int kChannelStep = LOADERS / kBlockPieces;
// Stages whose copies may be on their way while others begin: products still hold the stage before the one that they wait for.
constexpr int kBehind = PATCH_STAGES - 2;
static_assert(PIECE * kUnitPieces == kElements && kBlockPieces <= 32, "a warp copies whole lines of whole pieces");

__device__ __forceinline__ void produce_patches(const fused_params& p, const stages_t& s, int thread) {
    constexpr int kBlocks = kTile / kSwizzled, kChannels = UNITS * kElements;
    const int piece = thread % kBlockPieces, first_channel = thread / kBlockPieces;
    const index_t pixels = static_cast<index_t>(p.h_in) * p.w_in;
    ring_t<PATCH_STAGES> ring, come;
    int begun = 0;  // stages whose copies are on their way
    const auto pass_on = [&] {
        fence_async_proxy();
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(s.patch_full[come.stage]);
        come.advance();
    };
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const item_t item = item_of(p, i);
        const ELEMENT_T* from[kBlocks];
        bool there[kBlocks];
        #pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const int position = item.tile * kTile + b * kSwizzled + piece * PIECE, image = divided(position, p.by_image_positions);
            const index_t plane = (static_cast<index_t>(image) * p.groups + item.group) * IN_CHANNELS + first_channel;
            there[b] = image < p.batch;
            from[b] = p.input + (there[b] ? plane * pixels + (position - image * pixels) : 0);
        }
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            barrier_wait(s.patch_empty[ring.stage], ring.parity ^ 1);
            unsigned char* patch = reinterpret_cast<unsigned char*>(s.patches + ring.stage * kPatchUnits);
            patch += piece % kUnitPieces * (PIECE * static_cast<int>(sizeof(ELEMENT_T)));
            #pragma unroll 4
            for (int channel = first_channel; channel < kChannels; channel += kChannelStep) {
                const bool is = IN_CHANNELS % kChannels == 0 || chunk * kChannels + channel < IN_CHANNELS;
                unsigned char* to = patch + channel * 128 + ((piece / kUnitPieces ^ channel % 8) * 16);
                #pragma unroll
                for (int b = 0; b < kBlocks; ++b) {
                    const ELEMENT_T* source = from[b] + (chunk * kChannels + channel - first_channel) * pixels;
                    copy_async<PIECE * static_cast<int>(sizeof(ELEMENT_T))>(to + b * kSwizzledBlock * 16, source, is && there[b]);
                }
            }
            commit_copies();
            ring.advance();
            if (begun < kBehind) {
                ++begun;
            } else {
                wait_for_groups<kBehind>();
                pass_on();
            }
        }
    }
    wait_for_copies();
    for (; begun > 0; --begun) pass_on();
}
