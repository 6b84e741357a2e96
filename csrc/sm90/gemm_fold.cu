/* fused for small images: columns of whole images are computed on tensor cores and folded in shared memory. No workspace.
 *
 * As gemm_col2im has it, with the positions of several images beside each other,
 *
 *   columns [(co, kh, kw), (image, position)] = weights [(co, kh, kw), ci] . input [ci, (image, position)]
 *
 * and outputs gather columns (see geometry/axis.cuh for cells, phases and shifts):
 *
 *   output [co, cell, phase] = bias [co] + sum over the taps of the phase of columns [(co, tap), cell + shift of the tap]
 *
 * sm90/implicit_gemm.cu gathers inputs in its place. For that, positions that products read have gaps between rows and images, which
 * are multiplied too: of 8 x 6 inputs, one in three. And weights are laid out in a launch of their own. Here positions are
 * inputs, nothing else, and weights come as torch has them: [ci][line]. An image must fit a tile, with all lines of some output
 * channels.
 *
 * A block goes over items: IMAGES images and as many output channels as have the lines of its warpgroups, BLOCKS of 64 each.
 * One thread begins to copy weights, PRODUCERS threads bring inputs, 128 bytes of channels of both to a stage; warpgroups
 * multiply: values of 16 bits as they lie (load/gemm_fold_16bit.cuh), float32 rounded to TF32 (load/gemm_fold_tf32.cuh).
 * At the end of an item warps fold their own lines, groups of 16 * FOLD_WARPS with all taps of their output channels: they
 * write the columns of some images to shared memory, and gather them.
 *
 * Macros: ELEMENT_T, MN_MAJOR (1 for 16 bits, 0 for float32); KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W, such that every
 * phase has a tap; IN_CHANNELS, OUT_CHANNELS; IN_H, IN_W; OUT_MORE_H, OUT_MORE_W; IMAGES (of an item), COLUMNS (positions, up to a
 * multiple of 16); WARPGROUPS (1 or 2), BLOCKS; PRODUCERS; CONSUMER_REGISTERS, PRODUCER_REGISTERS (of a thread that multiplies
 * or does not, with two warpgroups; with one, all have as many); FOLD_WARPS (1 or 4); FOLDED (positions that are folded
 * together: of whole images, or, where outputs read the input at their own cell alone, any multiple of 8), FOLD_PITCH (floats
 * between lines of columns, an odd multiple of 8); PIECE (inputs that are copied together; divides IN_H * IN_W); STAGES; VECTOR
 * (outputs that are stored together); SHARED_BYTES.
 * Chosen by gemmconv/kernels/sm90/gemm_fold.py.
 */
#if MN_MAJOR
#include "load/gemm_fold_16bit.cuh"
#else
#include "load/gemm_fold_tf32.cuh"
#endif
#include "ptx/named_barrier.cuh"

/* The i-th cell of a pass of the item that begins with `image`. */
__device__ __forceinline__ cell_t cell_of(const gemm_fold_params& p, int image, int pass, int i) {
    int n = 0, of_image = pass * FOLDED + i;  // image of the item, and cell of it
    if constexpr (kInPlace) n = of_image / kPixels, of_image %= kPixels;
    else n = pass * kPassImages + i / (kCellsH * kCellsW), of_image = i % (kCellsH * kCellsW);
    const int row = of_image / kCellsW, column = of_image % kCellsW;
    const int at = kInPlace ? i : (n - pass * kPassImages) * kPixels + row * IN_W + column;
    return {n < IMAGES && image + n < p.batch, image + n, row, column, at};
}

/* A warpgroup's lines of item after item. `warpgroup` is the same for a whole warp, as far as the compiler can see. */
__device__ __forceinline__ void consume(const gemm_fold_params& p, barriers_t& barriers, int warpgroup) {
    constexpr int kLanes = 32 * FOLD_WARPS, kTurns = ceil_div(kPassCells * kParts, kLanes);  // that gather
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = warp / FOLD_WARPS;  // of a block of lines
    float* columns = reinterpret_cast<float*>(shared + STAGES * kStageBytes) +
                     (warpgroup * (4 / FOLD_WARPS) + group) * kGroupFloats;
    float* mine = columns + ((warp % FOLD_WARPS * 16 + lane / 4) * FOLD_PITCH + lane % 4 * 2);
    const auto meet_group = [&] {
        if (FOLD_WARPS == 1) __syncwarp();
        else named_barrier_sync<128>(1 + warpgroup);
    };
    // Output channel of the tile that the i-th of the group is.
    const auto out_of = [&](int i) {
        return (warpgroup * BLOCKS + i / kGroupOuts) * kBlockOuts + group * kGroupOuts + i % kGroupOuts;
    };
    float* biases = reinterpret_cast<float*>(shared + kFirstBias);
    ring_t ring;
    each_item<item_t>(p, [&](const item_t& item) {
        float bias = 0.0f;  // of the lane's output channel, which comes while products run
        if (lane < BLOCKS * kGroupOuts && p.bias != nullptr && item.out + out_of(lane) < OUT_CHANNELS)
            bias = widen(load_once(p.bias + (item.out + out_of(lane))));
        float sums[BLOCKS][COLUMNS / 2];
        multiply(sums, ring, barriers, warpgroup);
        if (lane < BLOCKS * kGroupOuts) biases[out_of(lane)] = bias;

        #pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const int out = out_of(block * kGroupOuts);
            if (item.out + out >= OUT_CHANNELS) continue;
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
                gather<kTurns, kLanes, kGroupOuts, OUT_CHANNELS % kGroupOuts == 0>(
                    kImage, p.output, OUT_CHANNELS, columns, biases + out, item.out + out, threadIdx.x % kLanes, kPassCells,
                    [&](int, int i) { return cell_of(p, item.image, pass, i); });
                meet_group();
            }
        }
    });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sm90_gemm_fold_kernel(const __grid_constant__ gemm_fold_params p) {
    barriers_t& barriers = *reinterpret_cast<barriers_t*>(shared + kFirstBarrier);
    init_barriers([&] { init_ring(barriers, 1 + PRODUCERS / 32, kConsumers / 32); });
    const auto produce = [&] {
        if (threadIdx.x >= 32) produce_inputs(p, barriers);
        else if (elected()) produce_weights(p, barriers);
    };
    run_roles<kProducers, 128, WARPGROUPS == 2 ? CONSUMER_REGISTERS : 0, PRODUCER_REGISTERS>(
        produce, [&](int warpgroup) { consume(p, barriers, warpgroup); });
}
