/* Inputs and products of sm90/gemm_fold.cu in float32, as TF32. Tensor cores take it K-major alone, and cut off what they do not
 * multiply. So inputs land in shared memory as they lie, and go from there through registers, where four channels of a position
 * become a unit: those of a stage are [COLUMNS][128 bytes], a line of kChannels a position, as ptx/wgmma.cuh has lines. Weights go
 * from the stage to registers when they are multiplied.
 */
#pragma once

#define WGMMA_COLUMNS COLUMNS
#include "ptx/cp_async.cuh"
#include "pipeline/gemm_fold.cuh"
#include "numeric/units.cuh"
#include "numeric/unroll.cuh"
#include "ptx/wgmma.cuh"

/* The loads of a warp in sequence: in each stage, lines of every kWarps-th block of 32 positions. */
struct course_t {
    static constexpr int kWarps = PRODUCERS / 32, kPositionBlocks = ceil_div(kPositions, 32);
    int index, channel, block;               // item, the stage's first channel, block of positions; of warps without one too
    int positions;                           // of the item
    const float* __restrict__ source;        // of the stage

    __device__ __forceinline__ explicit course_t(const gemm_fold_params& p) : index(blockIdx.x) { begin(p); }
    __device__ __forceinline__ bool ended(const gemm_fold_params& p) const { return index >= p.items; }
    __device__ __forceinline__ bool ends_stage() const { return block + kWarps >= kPositionBlocks; }
    __device__ __forceinline__ void begin(const gemm_fold_params& p) {
        const item_inputs_t inputs = inputs_from(p, item_t(p, index).image);
        channel = 0, block = threadIdx.x / 32 - 1, positions = inputs.positions, source = inputs.source;
    }
    __device__ __forceinline__ void advance(const gemm_fold_params& p) {
        const bool ends = ends_stage();
        block += kWarps;
        if (!ends) return;
        block = threadIdx.x / 32 - 1, channel += kChannels, source += kChannels * kPixels;
        if (channel < IN_CHANNELS) return;
        index += gridDim.x;
        begin(p);
    }
};

/* Where a warp's inputs land, in turn: a block of positions, [kChannels][32]. */
constexpr int kSlots = 4, kSlotFloats = kChannels * 32;
static_assert(kInputBytes % 1024 == 0, "stages are swizzled");
static_assert(kLandingBytes == PRODUCERS / 32 * kSlots * kSlotFloats * 4, "where inputs land is shared out");

/* Begin to copy a block of positions; zeros for positions and channels that there are not. */
__device__ __forceinline__ void land(float* slot, const course_t& course) {
    static_assert(PIECE == 4, "pieces of 16 bytes");
    const int lane = threadIdx.x % 32, piece = lane % 8 * PIECE, position = course.block * 32 + piece;
    const int channels = position < course.positions ? IN_CHANNELS - course.channel : 0;
    const int offset = position / kPixels * (IN_CHANNELS * kPixels) + position % kPixels;
    #pragma unroll
    for (int c = 0; c < kChannels; c += 4) {
        const int channel = c + lane / 8;
        copy_piece_async(slot + (channel * 32 + piece), course.source + (offset + channel * kPixels), channel < channels);
    }
}

/* The channel that is multiplied as the k-th of a stage: so that the four that lanes of a quad load at a time, t and t + 4 of a
 * step, are two apart, and weights of 8 lines of them lie in different banks.
 */
__device__ constexpr int channel_of(int k) { return k / 8 * 8 + k % 4 * 2 + k % 8 / 4; }

/* Round what has landed, and lay out the lines of its positions. */
__device__ __forceinline__ void lay_out(unsigned char* stage, const float (&values)[kChannels / 4][4], const course_t& course) {
    const int position = course.block * 32 + threadIdx.x % 32;
    if (position >= COLUMNS) return;
    #pragma unroll
    for (int unit = 0; unit < kChannels / 4; ++unit)
        *reinterpret_cast<unit_t*>(stage + (position * 128 + (unit ^ position % 8) * 16)) = pack_unit<1>(values[unit]).part[0];
}

/* Brings the inputs of all stages of all items, which land some blocks of positions ahead of those that are laid out. */
__device__ __forceinline__ void produce_inputs(const gemm_fold_params& p, barriers_t& barriers) {
    float* slots = reinterpret_cast<float*>(shared + kFirstLanding) + (threadIdx.x / 32 - 1) * (kSlots * kSlotFloats);
    ring_t ring;
    course_t ahead(p), here(p);
    const auto begin = [&](int slot) {
        if (!ahead.ended(p)) {
            land(slots + slot * kSlotFloats, ahead);
            ahead.advance(p);
        }
        cp_async_commit();
    };
    for (int slot = 0; slot < kSlots; ++slot) begin(slot);
    #pragma unroll 1
    for (int slot = 0; !here.ended(p); slot = (slot + 1) % kSlots) {
        cp_async_wait<kSlots - 1>();
        __syncwarp();
        float values[kChannels / 4][4];
        #pragma unroll
        for (int k = 0; k < kChannels; ++k)
            values[k / 4][k % 4] = slots[slot * kSlotFloats + channel_of(k) * 32 + threadIdx.x % 32];
        __syncwarp();
        begin(slot);
        if (here.block < here.kWarps) barrier_wait(barriers.empty[ring.stage], ring.parity ^ 1);
        lay_out(shared + ring.stage * kStageBytes + kWeightBytes, values, here);
        if (here.ends_stage()) {
            end_stage(barriers.full[ring.stage]);
            ring.advance(STAGES);
        }
        here.advance(p);
    }
    wait_for_copies();
}

/* Steps of eight channels whose products are begun together, of a block of lines, and the words of them that wgmma_rows asks
 * for, of weights that begin there. There are an even number of such groups in a stage: words of two take turns.
 */
constexpr int kSteps = kChannels / 8, kTogether = BLOCKS == 1 || COLUMNS > 112 ? 2 : 4;
constexpr int kGroups = kSteps / kTogether * BLOCKS;
static_assert(kSteps % kTogether == 0 && kGroups % 2 == 0, "groups take turns");
__device__ __forceinline__ void load_words(unsigned (&words)[kTogether][4], const unsigned char* weights, int first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, line = warp % 2 * 16 + lane / 4;
    const unsigned char* box = weights + (warp / 2 * kBoxBytes + line % 4 * 4);
    #pragma unroll
    for (int step = 0; step < kTogether; ++step)
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int channel = channel_of(lane % 4 + i / 2 * 4), piece = (line / 4 + i % 2 * 2) ^ channel;
            const unsigned word = *reinterpret_cast<const unsigned*>(box + (((first + step) * 8 + channel) * 128 + piece * 16));
            words[step][i] = mma_words<float>::rounded(word);
        }
}

/* The sums of a warpgroup's lines, over all stages of an item. While one group is multiplied, the words of the next come. */
__device__ __forceinline__ void multiply(
    float (&sums)[BLOCKS][COLUMNS / 2], ring_t& ring, barriers_t& barriers, int warpgroup) {
    const bool speaker = threadIdx.x % 32 == 0;  // arrives at barriers for its warp
    int held = -1;                               // stage that products in flight may still read
    unsigned words[2][kTogether][4];
    #pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        barrier_wait(barriers.full[ring.stage], ring.parity);
        const unsigned char* stage = shared + ring.stage * kStageBytes;
        const descriptor_t right = descriptor_k_major_swizzled<128>(stage + kWeightBytes);
        each<kGroups>([&](auto group) {
            constexpr int kGroup = decltype(group)::value, kBlock = kGroup % BLOCKS, kFirst = kGroup / BLOCKS * kTogether;
            unsigned(&own)[kTogether][4] = words[kGroup % 2];
            wgmma_wait<1>();  // for those that had these words
            if (kGroup == 1 && held >= 0 && speaker) barrier_arrive(barriers.empty[held]);
            load_words(own, stage + (warpgroup * BLOCKS + kBlock) * kBlockBytes, kFirst);
            wgmma_fence();
            #pragma unroll
            for (int step = 0; step < kTogether; ++step)
                wgmma_rows<float, COLUMNS>(sums[kBlock], own[step], advance(right, (kFirst + step) * 32),
                                           kFirst + step > 0 || chunk > 0);
            wgmma_commit();
        });
        held = ring.stage;
        ring.advance(STAGES);
    }
    #pragma unroll
    for (int block = 0; block < BLOCKS; ++block) wgmma_finish_rows(sums[block]);
    if (speaker) barrier_arrive(barriers.empty[held]);
}
