/* Shared by the parts of sm90/gemm_fold.cu: parameters, items, shared memory, the copies of weights. The macros are those of the
 * kernel.
 */
#pragma once

#include "epilogue/fold_smem.cuh"
#include "pipeline/persistent.cuh"
#include "ptx/tma.cuh"

struct gemm_fold_params {
    tensor_map_t weights;  // [channels][lines]; a box has kChannels of kBoxLines
    const ELEMENT_T* __restrict__ input;
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    int batch, items;
};

constexpr int kProducers = PRODUCERS + 32, kConsumers = WARPGROUPS * 128, kThreads = kProducers + kConsumers;
constexpr int kItem = sizeof(ELEMENT_T);
constexpr int kChannels = 128 / kItem, kChunks = ceil_div(IN_CHANNELS, kChannels);  // of a stage
constexpr int kPixels = IN_H * IN_W, kPositions = IMAGES * kPixels;  // of an image, of an item
constexpr image_t kImage{IN_H, IN_W};
constexpr int kCellsH = kImage.cells_h(), kCellsW = kImage.cells_w();
constexpr int kGroupLines = 16 * FOLD_WARPS, kGroupOuts = kGroupLines / kTaps;
constexpr int kBlockOuts = 4 / FOLD_WARPS * kGroupOuts, kTileOuts = WARPGROUPS * BLOCKS * kBlockOuts;
constexpr int kLineTiles = ceil_div(OUT_CHANNELS, kTileOuts);
static_assert(kGroupLines % kTaps == 0 && BLOCKS * kGroupOuts <= 32, "a group has whole output channels, no more than lanes");
static_assert(kPositions <= COLUMNS && COLUMNS % 16 == 0 && kPixels % PIECE == 0, "positions fit a tile, in whole pieces");

constexpr int kPasses = ceil_div(kPositions, FOLDED), kPassImages = FOLDED / kPixels;
constexpr int kPassCells = kInPlace ? FOLDED : kPassImages * kCellsH * kCellsW;
static_assert(kInPlace || FOLDED % kPixels == 0, "images are folded whole");
static_assert(FOLDED <= FOLD_PITCH, "lines do not overlap");
static_assert(FOLDED % 8 == 0 || (kPasses == 1 && !kInPlace), "passes begin with a column of a thread");
static_assert(FOLD_PITCH % 16 == 8, "a warp writes columns to different banks");

// Shared memory: stages [STAGES], each of weights [WARPGROUPS * BLOCKS][64 lines in 128-byte parts][kChannels][128 bytes],
// swizzled, and of inputs (load/gemm_fold_16bit.cuh, load/gemm_fold_tf32.cuh); columns [groups][kGroupLines][FOLD_PITCH]; where inputs land
// that are rounded; biases of the item; barriers.
constexpr int kBlockLines = 64, kBlockBytes = kBlockLines * 128;
constexpr int kBoxLines = 128 / kItem, kBoxBytes = kChannels * 128;
constexpr int kBlocks = WARPGROUPS * BLOCKS;
constexpr int kWeightBytes = kBlocks * kBlockBytes, kInputBytes = (MN_MAJOR ? ceil_div(COLUMNS, 64) * 64 : COLUMNS) * 128;
constexpr int kStageBytes = kWeightBytes + kInputBytes;
constexpr int kGroupFloats = kGroupLines * FOLD_PITCH, kFoldBytes = kConsumers / 32 / FOLD_WARPS * kGroupFloats * 4;
using barriers_t = ring_barriers_t<STAGES>;
constexpr int kFirstLanding = STAGES * kStageBytes + kFoldBytes, kLandingBytes = MN_MAJOR ? 0 : 48 << 10;
constexpr int kFirstBias = kFirstLanding + kLandingBytes, kFirstBarrier = kFirstBias + ceil_div(kTileOuts, 2) * 8;
static_assert(kFirstBarrier + sizeof(barriers_t) <= SHARED_BYTES, "what is shared fits the launch's memory");
extern __shared__ __align__(1024) unsigned char shared[];

/* An item: its first image and output channel. Those of the same images follow each other. */
struct item_t {
    int image, out;
    __device__ __forceinline__ item_t(const gemm_fold_params&, int i)
        : image(i / kLineTiles * IMAGES), out(i % kLineTiles * kTileOuts) {}
};

/* Where the inputs of the images of an item begin, and how many positions there are. */
struct item_inputs_t { const ELEMENT_T* source; int positions; };
__device__ __forceinline__ item_inputs_t inputs_from(const gemm_fold_params& p, int image) {
    return {p.input + static_cast<long long>(image) * IN_CHANNELS * kPixels, least(IMAGES, p.batch - image) * kPixels};
}

/* Begins to copy the weights of all stages of all items. One thread. */
__device__ __forceinline__ void produce_weights(const gemm_fold_params& p, barriers_t& barriers) {
    ring_t ring;
    each_item<item_t>(p, [&](const item_t& item) {
        #pragma unroll 1
        for (int channel = 0; channel < IN_CHANNELS; channel += kChannels) {
            barrier_t& full = begin_stage(barriers, ring, kWeightBytes);
            unsigned char* stage = shared + ring.stage * kStageBytes;
            #pragma unroll
            for (int block = 0; block < kBlocks; ++block)
                #pragma unroll
                for (int line = 0; line < kBlockLines; line += kBoxLines)
                    tma_load(stage + (block * kBlockBytes + line / kBoxLines * kBoxBytes), p.weights,
                             (item.out + block * kBlockOuts) * kTaps + line, channel, 0, 0, full);
            ring.advance(STAGES);
        }
    });
}
