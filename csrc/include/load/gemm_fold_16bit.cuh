/* Inputs and products of sm90/gemm_fold.cu in 16-bit types: neither matrix is touched on its way from memory to the tensor cores,
 * which take both the other way round. Inputs of a stage are blocks of 64 positions, [kChannels][64 positions], swizzled.
 */
#pragma once

#define WGMMA_COLUMNS COLUMNS
#include "ptx/cp_async.cuh"
#include "pipeline/gemm_fold.cuh"
#include "ptx/wgmma.cuh"

constexpr int kLine = 64;  // positions that lie in one piece

/* The pieces that a lane copies in each stage: those of every eighth channel; a warp takes four side by side. */
struct pieces_t {
    static constexpr int kTurn = PRODUCERS / 32 * 4 * PIECE, kCount = ceil_div(kPositions, kTurn);
    int position;                        // of the first piece
    int target[kCount], source[kCount];  // bytes in a stage; elements from the first of an item's

    __device__ __forceinline__ pieces_t() {
        const int lane = threadIdx.x % 32, channel = lane % 8;
        position = (threadIdx.x / 32 - 1) * (4 * PIECE) + lane / 8 * PIECE;
        #pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int here = position + i * kTurn, piece = here % kLine / 8 ^ channel;
            target[i] = here / kLine * kBlockBytes + channel * (kLine * kItem) + piece * 16 + here % 8 * 2;
            source[i] = (here / kPixels * IN_CHANNELS + channel) * kPixels + here % kPixels;
        }
    }
};

/* Begin to copy the inputs of a stage, of so many positions; zeros for channels that there are not. */
__device__ __forceinline__ void fetch(
    const pieces_t& pieces, unsigned char* stage, const ELEMENT_T* __restrict__ source, int positions, int channels) {
    const int channel = threadIdx.x % 8;
    #pragma unroll
    for (int i = 0; i < pieces.kCount; ++i) {
        if (pieces.position + i * pieces.kTurn >= positions) continue;
        unsigned char* target = stage + pieces.target[i];
        const ELEMENT_T* from = source + pieces.source[i];
        #pragma unroll
        for (int c = 0; c < kChannels; c += 8) {
            const bool is = IN_CHANNELS % kChannels == 0 || channel + c < channels;
            if constexpr (PIECE == 8) copy_piece_async(target + c * (kLine * kItem), from + c * kPixels, is);
            else cp_async<PIECE * 2>(target + c * (kLine * kItem), from + c * kPixels, is);
        }
    }
}

/* Copies the inputs of all stages of all items. Those of a stage are passed on once the next stage's are begun, and that stage
 * is free once products of the one before are begun, which read a third.
 */
static_assert(STAGES >= 3, "a stage is passed on before the next one is waited for by those who free it");
__device__ __forceinline__ void produce_inputs(const gemm_fold_params& p, barriers_t& barriers) {
    ring_t ring, come;
    const auto pass_on = [&] {
        end_stage(barriers.full[come.stage]);
        come.advance(STAGES);
    };
    const pieces_t pieces;
    bool begun = false;
    each_item<item_t>(p, [&](const item_t& item) {
        auto [source, positions] = inputs_from(p, item.image);
        #pragma unroll 1
        for (int channel = 0; channel < IN_CHANNELS; channel += kChannels) {
            barrier_wait(barriers.empty[ring.stage], ring.parity ^ 1);
            fetch(pieces, shared + ring.stage * kStageBytes + kWeightBytes, source, positions, IN_CHANNELS - channel);
            source += kChannels * kPixels;
            cp_async_commit();
            ring.advance(STAGES);
            if (begun) {
                cp_async_wait<1>();
                pass_on();
            }
            begun = true;
        }
    });
    wait_for_copies();
    if (begun) pass_on();
}

/* The sums of a warpgroup's lines, over all stages of an item. */
__device__ __forceinline__ void multiply(
    float (&sums)[BLOCKS][COLUMNS / 2], ring_t& ring, barriers_t& barriers, int warpgroup) {
    const bool speaker = threadIdx.x % 32 == 0;  // arrives at barriers for its warp
    int held = -1;                               // stage that products in flight may still read
    #pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        barrier_wait(barriers.full[ring.stage], ring.parity);
        const unsigned char* stage = shared + ring.stage * kStageBytes;
        const descriptor_t left = descriptor_mn_major(stage + warpgroup * BLOCKS * kBlockBytes, 1024, 1024);
        const descriptor_t right = descriptor_mn_major(stage + kWeightBytes, kBlockBytes, 1024);
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < kChannels / 16; ++k)
            #pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
                wgmma_turned<ELEMENT_T, COLUMNS>(sums[block], advance(left, block * kBlockBytes + k * 2048),
                                                 advance(right, k * 2048), k > 0 || chunk > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (held >= 0 && speaker) barrier_arrive(barriers.empty[held]);
        held = ring.stage;
        ring.advance(STAGES);
    }
    #pragma unroll
    for (int block = 0; block < BLOCKS; ++block) wgmma_finish_rows(sums[block]);
    if (speaker) barrier_arrive(barriers.empty[held]);
}
