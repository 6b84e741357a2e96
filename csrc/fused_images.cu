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
 * inputs, nothing else, and weights come as torch has them: [ci][line]. An image must fit a tile, with all lines of some output
 * channels.
 *
 * A block goes over items: IMAGES images and as many output channels as have the lines of its warpgroups, BLOCKS of 64 each.
 * One thread begins to copy weights, LOADERS threads bring inputs, 128 bytes of channels of both to a stage; warpgroups
 * multiply: values of 16 bits as they lie (common/images_turned.cuh), float32 rounded to TF32 (common/images_rounded.cuh).
 * At the end of an item warps fold their own lines, groups of 16 * FOLD_WARPS with all taps of their output channels: they
 * write the columns of some images to shared memory, and gather them.
 *
 * Macros: ELEMENT_T, TURNED (1 for 16 bits, 0 for float32); KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W, such that every
 * phase has a tap; IN_CHANNELS, OUT_CHANNELS; IN_H, IN_W, OUT_H, OUT_W; IMAGES (of an item), COLUMNS (positions, up to a
 * multiple of 16); WARPGROUPS (1 or 2), BLOCKS; LOADERS; MULTIPLIER_REGISTERS, LOADER_REGISTERS (of a thread that multiplies
 * or does not, with two warpgroups; with one, all have as many); FOLD_WARPS (1 or 4); FOLDED (positions that are folded
 * together: of whole images, or, where outputs read the input at their own cell alone, any multiple of 8), FOLD_PITCH (floats
 * between lines of columns, an odd multiple of 8); PIECE (inputs that are copied together; divides IN_H * IN_W); STAGES; VECTOR
 * (outputs that are stored together); SHARED_BYTES.
 * Chosen by gemmconv/algorithms/fused_images.py.
 */
#if TURNED
#include "common/images_turned.cuh"
#else
#include "common/images_rounded.cuh"
#endif
#include "common/meet.cuh"

struct alignas(8) pair_t { float value[2]; };
template <int COUNT> struct alignas(COUNT * sizeof(ELEMENT_T)) vector_t { ELEMENT_T value[COUNT]; };

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
        multiply(sums, ring, barriers, warpgroup);
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
            barrier_init(barriers.full[i], 1 + LOADERS / 32);
            barrier_init(barriers.empty[i], kConsumers / 32);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= kProducers) {
        if constexpr (WARPGROUPS == 2) registers_up<MULTIPLIER_REGISTERS>();
        consume(p, barriers, __shfl_sync(0xffffffffu, (threadIdx.x - kProducers) / 128, 0));
    } else {
        if constexpr (WARPGROUPS == 2) registers_down<LOADER_REGISTERS>();
        if (threadIdx.x >= 32) produce_inputs(p, barriers);
        else if (threadIdx.x == 0) produce_weights(p, barriers);
    }
}
