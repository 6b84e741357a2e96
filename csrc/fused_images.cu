/* fused for small images: columns of whole images are computed on tensor cores and folded in shared memory. No workspace.
 *
 * As gemm_col2im has it, with the positions of several images beside each other,
 *
 *   columns [(co, kh, kw), (image, position)] = weights [(co, kh, kw), ci] . input [ci, (image, position)]
 *
 * and outputs gather columns (see axis.cuh for cells, phases and shifts):
 *
 *   output [co, cell, phase] = bias [co] + sum over the taps of the phase of columns [(co, tap), cell + shift of the tap]
 *
 * fused_wgmma.cu gathers inputs in its place. For that, positions that products read have gaps between rows and images, which
 * are multiplied too: of 8 x 6 inputs, one in three. And weights are laid out in a launch of their own. Here positions are
 * inputs, nothing else, and both matrices are multiplied as they lie in memory, the other way round: [ci][line] are the weights
 * of torch, [ci][position] is NCHW. An image must fit a tile, with all lines of some output channels.
 *
 * A block goes over items: IMAGES images and as many output channels as have the lines of its warpgroups, BLOCKS of 64 each.
 * One thread begins to copy weights, 96 copy inputs, piece by piece, CHANNELS of both to a stage; warpgroups multiply. At the
 * end of an item warps fold their own lines, groups of 16 * FOLD_WARPS with all taps of their output channels: they write
 * the columns of some images to shared memory, and gather them.
 *
 * Macros: ELEMENT_T (16 bits); KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W, such that every phase has a tap;
 * IN_CHANNELS, OUT_CHANNELS; IN_H, IN_W, OUT_H, OUT_W; IMAGES (of an item), COLUMNS (positions, up to a multiple of 16);
 * WARPGROUPS (1 or 2), BLOCKS; FOLD_WARPS (1 or 4); FOLDED (positions that are folded together: of whole images, or, where
 * outputs read the input at their own cell alone, any multiple of 8), FOLD_PITCH (floats between lines of columns, an odd
 * multiple of 8); PIECE (inputs that are copied together, which divides IN_H * IN_W); STAGES; VECTOR (outputs that are stored
 * together); SHARED_BYTES.
 * Chosen by gemmconv/algorithms/fused_images.py.
 */
#include "common/async.cuh"
#include "common/axis.cuh"
#include "common/mbarrier.cuh"
#include "common/meet.cuh"
#include "common/numeric.cuh"
#include "common/ring.cuh"
#include "common/tensor_map.cuh"
#include "common/unroll.cuh"
#include "common/wgmma_turned.cuh"

struct fused_images_params {
    tensor_map_t weights;  // [channels][lines]; a box has CHANNELS of 64 lines
    const ELEMENT_T* __restrict__ input;
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    int batch, items;
};

using axis_h = axis<KERNEL_H, STRIDE_H, PADDING_H, DILATION_H>;
using axis_w = axis<KERNEL_W, STRIDE_W, PADDING_W, DILATION_W>;
static_assert(axis_h::kPhases == STRIDE_H && axis_w::kPhases == STRIDE_W, "every phase has a tap");

constexpr int kLoaders = 96, kProducers = kLoaders + 32, kConsumers = WARPGROUPS * 128, kThreads = kProducers + kConsumers;
constexpr int kChannels = 64, kChunks = ceil_div(IN_CHANNELS, kChannels);  // of a stage
constexpr int kPixels = IN_H * IN_W, kPositions = IMAGES * kPixels;
constexpr int kCellsH = ceil_div(OUT_H, STRIDE_H), kCellsW = ceil_div(OUT_W, STRIDE_W);
constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr int kGroupLines = 16 * FOLD_WARPS, kGroupOuts = kGroupLines / kTaps;
constexpr int kBlockOuts = 4 / FOLD_WARPS * kGroupOuts, kTileOuts = WARPGROUPS * BLOCKS * kBlockOuts;
constexpr int kLineTiles = ceil_div(OUT_CHANNELS, kTileOuts);
static_assert(kGroupLines % kTaps == 0 && BLOCKS * kGroupOuts <= 32, "a group has whole output channels, no more than lanes");
static_assert(kPositions <= COLUMNS && COLUMNS % 16 == 0 && kPixels % PIECE == 0, "positions fit a tile, in whole pieces");

// Where outputs read the input at their own cell alone, a cell is a position.
constexpr bool kInPlace = axis_h::least_shift() == 0 && axis_h::largest_shift() == 0 && axis_w::least_shift() == 0 &&
                          axis_w::largest_shift() == 0 && kCellsH == IN_H && kCellsW == IN_W;
constexpr int kPasses = ceil_div(kPositions, FOLDED);
static_assert(kInPlace ? FOLDED % 8 == 0 : FOLDED % kPixels == 0, "images are folded whole");
static_assert(FOLDED % 8 == 0 || kPasses == 1, "passes begin with a column of a thread");
static_assert(FOLD_PITCH % 16 == 8 && FOLDED <= FOLD_PITCH, "a warp writes columns to different banks");

// Shared memory: stages [STAGES], each of weights [WARPGROUPS * BLOCKS][kChannels][64 lines] and of inputs
// [COLUMNS / 64][kChannels][64 positions], as wgmma.cuh has SWIZZLED; columns [groups][kGroupLines][FOLD_PITCH]; biases of
// the item; barriers.
constexpr int kLine = 64, kBlockBytes = kChannels * kLine * 2;
constexpr int kBlocks = WARPGROUPS * BLOCKS;
constexpr int kWeightBytes = kBlocks * kBlockBytes, kInputBytes = ceil_div(COLUMNS, kLine) * kBlockBytes;
constexpr int kStageBytes = kWeightBytes + kInputBytes;
constexpr int kGroupFloats = kGroupLines * FOLD_PITCH, kFoldBytes = kConsumers / 32 / FOLD_WARPS * kGroupFloats * 4;
struct barriers_t { barrier_t full[STAGES], empty[STAGES]; };
constexpr int kFirstBias = STAGES * kStageBytes + kFoldBytes, kFirstBarrier = kFirstBias + ceil_div(kTileOuts, 2) * 8;
static_assert(kFirstBarrier + sizeof(barriers_t) <= SHARED_BYTES, "what is shared fits the launch's memory");
extern __shared__ __align__(1024) unsigned char shared[];

// With two warpgroups that multiply a thread begins with 168 registers, of which those who load give up what those need.
constexpr int kConsumerRegisters = BLOCKS * COLUMNS > 352 ? 232 : 216, kProducerRegisters = BLOCKS * COLUMNS > 352 ? 40 : 72;

struct alignas(8) pair_t { float value[2]; };
template <int COUNT> struct alignas(COUNT * sizeof(ELEMENT_T)) vector_t { ELEMENT_T value[COUNT]; };

/* Calls body(first image, first output channel) for the items of a block; those of the same images follow each other. */
template <typename BODY> __device__ __forceinline__ void each_item(const fused_images_params& p, const BODY& body) {
    #pragma unroll 1
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) body(i / kLineTiles * IMAGES, i % kLineTiles * kTileOuts);
}

/* Begins to copy the weights of all stages of all items. One thread. */
__device__ __forceinline__ void produce_weights(const fused_images_params& p, barriers_t& barriers) {
    ring_t<STAGES> ring;
    each_item(p, [&](int, int out) {
        #pragma unroll 1
        for (int channel = 0; channel < IN_CHANNELS; channel += kChannels) {
            barrier_wait(barriers.empty[ring.stage], ring.parity ^ 1);
            barrier_t& full = barriers.full[ring.stage];
            barrier_arrive_expecting(full, kWeightBytes);
            unsigned char* stage = shared + ring.stage * kStageBytes;
            #pragma unroll
            for (int block = 0; block < kBlocks; ++block)
                copy_box(stage + block * kBlockBytes, p.weights, (out + block * kBlockOuts) * kTaps, channel, 0, 0, full);
            ring.advance();
        }
    });
}

/* What a lane copies of all stages: pieces of every eighth channel, of which a warp takes four beside each other. */
struct pieces_t {
    static constexpr int kTurn = kLoaders / 32 * 4 * PIECE, kCount = ceil_div(kPositions, kTurn);
    int position;                        // of the first piece
    int target[kCount], source[kCount];  // bytes in a stage; elements from the first of an item's

    __device__ __forceinline__ pieces_t() {
        const int lane = threadIdx.x % 32, channel = lane % 8;
        position = (threadIdx.x / 32 - 1) * (4 * PIECE) + lane / 8 * PIECE;
        #pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int here = position + i * kTurn, piece = here % kLine / 8 ^ channel;
            target[i] = here / kLine * kBlockBytes + channel * (kLine * 2) + piece * 16 + here % 8 * 2;
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
            if constexpr (PIECE == 8) copy_piece_async(target + c * (kLine * 2), from + c * kPixels, is);
            else copy_async<PIECE * 2>(target + c * (kLine * 2), from + c * kPixels, is);
        }
    }
}

/* Copies the inputs of all stages of all items. Those of a stage are passed on once the next stage's are begun. */
__device__ __forceinline__ void produce_inputs(const fused_images_params& p, barriers_t& barriers) {
    ring_t<STAGES> ring, come;
    const auto pass_on = [&] {
        fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(barriers.full[come.stage]);
        come.advance();
    };
    const pieces_t pieces;
    bool begun = false;
    each_item(p, [&](int image, int) {
        const ELEMENT_T* source = p.input + static_cast<long long>(image) * IN_CHANNELS * kPixels;
        const int positions = least(IMAGES, p.batch - image) * kPixels;
        #pragma unroll 1
        for (int channel = 0; channel < IN_CHANNELS; channel += kChannels) {
            barrier_wait(barriers.empty[ring.stage], ring.parity ^ 1);
            fetch(pieces, shared + ring.stage * kStageBytes + kWeightBytes, source, positions, IN_CHANNELS - channel);
            source += kChannels * kPixels;
            commit_copies();
            ring.advance();
            if (begun) {
                wait_for_groups<1>();
                pass_on();
            }
            begun = true;
        }
    });
    wait_for_copies();
    if (begun) pass_on();
}

/* Gather the columns of a group and a pass, and store outputs: of output channels from `out` on, images from `image` on. */
__device__ __forceinline__ void gather(
    const fused_images_params& p, const float* columns, const float* biases, int image, int out, int pass) {
    constexpr int kLanes = 32 * FOLD_WARPS, kImages = FOLDED / kPixels;  // of a pass
    constexpr int kCells = kInPlace ? FOLDED : kImages * kCellsH * kCellsW, kTurns = ceil_div(kCells, kLanes);
    #pragma unroll (kTurns * kGroupOuts * kTaps <= 64 ? kTurns : 1)
    for (int turn = 0; turn < kTurns; ++turn) {
        const int cell = turn * kLanes + threadIdx.x % kLanes;
        int n = 0, of_image = pass * FOLDED + cell;  // image of the item, and cell of it
        if constexpr (kInPlace) n = of_image / kPixels, of_image %= kPixels;
        else n = pass * kImages + cell / (kCellsH * kCellsW), of_image = cell % (kCellsH * kCellsW);
        if ((kCells % kLanes != 0 && cell >= kCells) || n >= IMAGES || image + n >= p.batch) continue;
        const int cell_h = of_image / kCellsW, cell_w = of_image % kCellsW;
        const int at = kInPlace ? cell : (n - pass * kImages) * kPixels + cell_h * IN_W + cell_w;
        const long long plane = static_cast<long long>(image + n) * OUT_CHANNELS + out;
        ELEMENT_T* target = p.output + (plane * (OUT_H * OUT_W) + (cell_h * STRIDE_H * OUT_W + cell_w * STRIDE_W));
        #pragma unroll (kTaps <= 16 ? least(kGroupOuts, 4) : 1)
        for (int channel = 0; channel < kGroupOuts; ++channel) {
            if (OUT_CHANNELS % kGroupOuts != 0 && out + channel >= OUT_CHANNELS) continue;
            const float* from = columns + (channel * (kTaps * FOLD_PITCH) + at);
            float sums[STRIDE_H][STRIDE_W];
            #pragma unroll
            for (int r = 0; r < STRIDE_H * STRIDE_W; ++r) sums[r / STRIDE_W][r % STRIDE_W] = biases[channel];
            #pragma unroll
            for (int tap = 0; tap < kTaps; ++tap) {
                const int kh = tap / KERNEL_W, kw = tap % KERNEL_W;
                const int row = cell_h + axis_h::shift(kh), column = cell_w + axis_w::shift(kw);
                const bool inside = kInPlace || (0 <= row && row < IN_H && 0 <= column && column < IN_W);
                const int there = tap * FOLD_PITCH + axis_h::shift(kh) * IN_W + axis_w::shift(kw);
                sums[axis_h::output(kh % axis_h::kStep)][axis_w::output(kw % axis_w::kStep)] += inside ? from[there] : 0.0f;
            }
            #pragma unroll
            for (int r = 0; r < STRIDE_H; ++r) {
                if (OUT_H % STRIDE_H != 0 && cell_h * STRIDE_H + r >= OUT_H) continue;
                #pragma unroll
                for (int first = 0; first < STRIDE_W; first += VECTOR) {
                    if (OUT_W % STRIDE_W != 0 && cell_w * STRIDE_W + first >= OUT_W) continue;
                    vector_t<VECTOR> values;
                    #pragma unroll
                    for (int e = 0; e < VECTOR; ++e) values.value[e] = narrow<ELEMENT_T>(sums[r][first + e]);
                    *reinterpret_cast<vector_t<VECTOR>*>(target + (r * OUT_W + first)) = values;
                }
            }
            target += OUT_H * OUT_W;
        }
    }
}

/* A warpgroup's lines of item after item. `warpgroup` is the same for a whole warp, as far as the compiler can see. */
__device__ __forceinline__ void consume(const fused_images_params& p, barriers_t& barriers, int warpgroup) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = warp / FOLD_WARPS;  // of a block of lines
    float* columns = reinterpret_cast<float*>(shared + STAGES * kStageBytes) +
                     (warpgroup * (4 / FOLD_WARPS) + group) * kGroupFloats;
    float* mine = columns + ((warp % FOLD_WARPS * 16 + lane / 4) * FOLD_PITCH + lane % 4 * 2);
    const auto meet_group = [&] {
        if (FOLD_WARPS == 1) __syncwarp();
        else meet<128>(1 + warpgroup);
    };
    // Output channel of the tile that the i-th of the group is.
    const auto out_of = [&](int i) {
        return (warpgroup * BLOCKS + i / kGroupOuts) * kBlockOuts + group * kGroupOuts + i % kGroupOuts;
    };
    float* biases = reinterpret_cast<float*>(shared + kFirstBias);
    ring_t<STAGES> ring;
    each_item(p, [&](int image, int out0) {
        float bias = 0.0f;  // of the lane's output channel, which comes while products run
        if (lane < BLOCKS * kGroupOuts && p.bias != nullptr && out0 + out_of(lane) < OUT_CHANNELS)
            bias = widen(load_once(p.bias + (out0 + out_of(lane))));
        float sums[BLOCKS][COLUMNS / 2];
        int held = -1;  // stage that products in flight may still read
        #pragma unroll 1
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            barrier_wait(barriers.full[ring.stage], ring.parity);
            const unsigned char* stage = shared + ring.stage * kStageBytes;
            const matrix_t left = swizzled_matrix_of(stage + warpgroup * BLOCKS * kBlockBytes, 1024, 1024);
            const matrix_t right = swizzled_matrix_of(stage + kWeightBytes, kBlockBytes, 1024);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < kChannels / 16; ++k)
                #pragma unroll
                for (int block = 0; block < BLOCKS; ++block)
                    wgmma_turned<ELEMENT_T, COLUMNS>(sums[block], advanced(left, block * kBlockBytes + k * 2048),
                                                     advanced(right, k * 2048), k > 0 || chunk > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (held >= 0 && lane == 0) barrier_arrive(barriers.empty[held]);
            held = ring.stage;
            ring.advance();
        }
        #pragma unroll
        for (int block = 0; block < BLOCKS; ++block) wgmma_finish_rows(sums[block]);
        if (lane == 0) barrier_arrive(barriers.empty[held]);
        if (lane < BLOCKS * kGroupOuts) biases[out_of(lane)] = bias;

        #pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const int out = out_of(block * kGroupOuts);
            if (out0 + out >= OUT_CHANNELS) continue;
            #pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) {
                #pragma unroll
                for (int j = 0; j < ceil_div(FOLDED, 8); ++j) {
                    if (pass * FOLDED + j * 8 >= kPositions) continue;
                    #pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float* from = sums[block] + (pass * (FOLDED / 8) + j) * 4 + half * 2;
                        *reinterpret_cast<pair_t*>(mine + (half * 8 * FOLD_PITCH + j * 8)) = {from[0], from[1]};
                    }
                }
                meet_group();
                gather(p, columns, biases + out, image, out0 + out, pass);
                meet_group();
            }
        }
    });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
fused_images_kernel(const __grid_constant__ fused_images_params p) {
    barriers_t& barriers = *reinterpret_cast<barriers_t*>(shared + kFirstBarrier);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(barriers.full[i], 1 + kLoaders / 32);
            barrier_init(barriers.empty[i], kConsumers / 32);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= kProducers) {
        if constexpr (WARPGROUPS == 2) registers_up<kConsumerRegisters>();
        consume(p, barriers, __shfl_sync(0xffffffffu, (threadIdx.x - kProducers) / 128, 0));
    } else {
        if constexpr (WARPGROUPS == 2) registers_down<kProducerRegisters>();
        if (threadIdx.x >= 32) produce_inputs(p, barriers);
        else if (threadIdx.x == 0) produce_weights(p, barriers);
    }
}
