/* direct, weight gradient: for every pair of channels and every tap a sum over all images and input pixels, in two steps.
 *
 *   grad_output [N, G, CO, H_out, W_out], input [N, G, CI, H_in, W_in] -> grad_weight [G, CI, CO, K_H, K_W]
 *   grad_weight[ci, co, kh, kw] = sum over n, ih, iw of
 *                                 input[n, ci, ih, iw] * grad_output[n, co, ih*S_H - P_H + kh*D_H, iw*S_W - P_W + kw*D_W]
 *
 *   S=2 P=1 K=3 D=1:  input row ih=2 meets grad_output row 3 in kh=0, row 4 in kh=1, row 5 in kh=2
 *
 * The pixels are cut into tiles (IMAGES x STEPS*ROW_THREADS*ROWS x COLUMN_THREADS) and the tiles into slices. A block owns a
 * slice and, of one group, CO_THREADS*CO_CHANNELS x CI_THREADS*CI_CHANNELS channel pairs at TAPS_H x TAPS_W taps. For each
 * tile it stages what these taps read of grad_output (see load/patch.cuh); a thread goes over its pixels of the tile in STEPS
 * steps, holds the inputs of ROWS pixels in registers (and those of the next step in flight), and adds to its
 * CO_CHANNELS x TAPS_H x TAPS_W x CI_CHANNELS sums. After the last tile the threads of a warp, which own the same sums,
 * add them up by shuffles, then the warps through shared memory. A block writes one partial sum for each weight;
 * splits/reduce.cu adds those of all slices, where there are several.
 *
 * No atomics: slices, tiles, lanes, warps and partials are added in an order that only the problem decides.
 *
 * With INPUT_GRAD the kernel computes the input gradient too, of the same values of grad_output, which are then read
 * once for both: a thread has all output channels and all taps (CO_CHANNELS, TAPS_H and TAPS_W are CO, KERNEL_H and
 * KERNEL_W), so all that an input pixel of its channels receives. Weights lie in shared memory. The order of a sum is that
 * of direct/input_grad.cu, where that has one chunk of taps.
 *
 * Macros: ELEMENT_T; CI, CO (channels of a group); KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W; ROWS, STEPS;
 * CI_CHANNELS, CO_CHANNELS; COLUMN_THREADS, ROW_THREADS, IMAGES (their product is a multiple of 32), CI_THREADS,
 * CO_THREADS; TAPS_H, TAPS_W; VECTOR; BATCH, PREFETCH (as for the input gradient, over tiles); INPUT_GRAD; MIN_BLOCKS (blocks
 * that a multiprocessor must have registers for); INDEX_64.
 */
#define PIXEL_THREADS (COLUMN_THREADS * ROW_THREADS * IMAGES)
#define THREADS (PIXEL_THREADS * CO_THREADS * CI_THREADS)
#define TILE_H (STEPS * ROW_THREADS * ROWS)
#define TILE_W COLUMN_THREADS
#define PATCH_INNER (CO_THREADS * CO_CHANNELS)
#define PATCHES (IMAGES * PATCH_INNER)
#include "load/patch.cuh"
#include "numeric/unroll.cuh"

struct direct_weight_grad_params {
    const ELEMENT_T* __restrict__ grad_output;  // [images, groups, CO, H_out, W_out]
    const ELEMENT_T* __restrict__ input;        // [images, groups, CI, H_in, W_in]
    accumulate_t* __restrict__ partials;        // [slices, groups, CI, CO, K_H, K_W]
    ELEMENT_T* __restrict__ grad_weight;        // [groups, CI, CO, K_H, K_W] where one slice is all, else null
    const ELEMENT_T* __restrict__ weight;       // [groups, CI, CO, K_H, K_W], or taps first; of INPUT_GRAD, as the next
    ELEMENT_T* __restrict__ grad_input;         // as input
    int images, groups;
    int h_in, w_in, h_out, w_out;
    int tiles_h, tiles_w;  // of an image
    int tiles, slices;     // tiles in all
    int weight_channel, weight_tap;  // elements of the weight, from an output channel or a tap to the next
};

static_assert(PIXEL_THREADS % 32 == 0, "a warp's threads own the same sums");
constexpr int kBlockCi = CI_THREADS * CI_CHANNELS, kBlockCo = CO_THREADS * CO_CHANNELS;
constexpr int kCiBlocks = ceil_div(CI, kBlockCi), kCoBlocks = ceil_div(CO, kBlockCo);
constexpr int kTapBlocksH = ceil_div(KERNEL_H, TAPS_H), kTapBlocksW = ceil_div(KERNEL_W, TAPS_W);
constexpr int kPixelWarps = PIXEL_THREADS / 32;
constexpr int kSums = CO_CHANNELS * TAPS_H * TAPS_W * CI_CHANNELS;  // of a thread
constexpr int kBlockSums = CO_THREADS * CI_THREADS * kSums;
constexpr int kScratch = kPixelWarps * kBlockSums;
constexpr int kShared = kScratch > kPatchElements ? kScratch : kPatchElements;
constexpr int kWeights = INPUT_GRAD ? kBlockSums : 1;
static_assert(!INPUT_GRAD || (CO_CHANNELS == CO && CO_THREADS == 1 && TAPS_H == KERNEL_H && TAPS_W == KERNEL_W),
              "a thread has whole sums");
static_assert(!INPUT_GRAD || STEPS == 1, "or all weights are loaded before the steps, into registers that there are not");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
direct_weight_grad_kernel(const __grid_constant__ direct_weight_grad_params p) {
    // [IMAGES, channels, rows, kBanks, kBankPitch], in the end [channel threads, kPixelWarps, kSums]
    __shared__ __align__(16) accumulate_t patch[kShared];
    __shared__ __align__(16) accumulate_t weights[kWeights];  // [CI_THREADS, CO, KERNEL_H, KERNEL_W, CI_CHANNELS]

    // Which weights the block owns, and which pixels of a tile and weights the thread.
    int block = blockIdx.x;
    const int tap_block_w = block % kTapBlocksW; block /= kTapBlocksW;
    const int tap_block_h = block % kTapBlocksH; block /= kTapBlocksH;
    const int ci_block = block % kCiBlocks; block /= kCiBlocks;
    const int co_block = block % kCoBlocks;
    const int group = block / kCoBlocks;
    const int slice = blockIdx.y;
    const int first_kh = tap_block_h * TAPS_H, first_kw = tap_block_w * TAPS_W;
    const int column = threadIdx.x % COLUMN_THREADS;
    const int row = threadIdx.x / COLUMN_THREADS % ROW_THREADS * ROWS;
    const int image = threadIdx.x / (COLUMN_THREADS * ROW_THREADS) % IMAGES;
    const int channel_thread = threadIdx.x / PIXEL_THREADS;
    const int ci_thread = channel_thread % CI_THREADS, co_thread = channel_thread / CI_THREADS;
    const int first_ci = ci_block * kBlockCi + ci_thread * CI_CHANNELS;
    const long long plane_size = static_cast<long long>(p.h_in) * p.w_in;
    const index_t channel_stride = static_cast<index_t>(plane_size);

    // The inputs of ROWS rows from an address on, `rows` of which there are.
    const auto load_input = [&](ELEMENT_T(&values)[ROWS][CI_CHANNELS], const ELEMENT_T* __restrict__ input, int rows) {
        #pragma unroll
        for (int c = 0; c < CI_CHANNELS; ++c) {
            const ELEMENT_T* address = input;
            #pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const bool there = (CI % kBlockCi == 0 || first_ci + c < CI) && r < rows;
                values[r][c] = there ? load_once(address) : ELEMENT_T{};
                address += p.w_in;
                keep(address);
            }
            input += channel_stride;
        }
    };

    // The tile, and its staged patch.
    const int begin = static_cast<int>(static_cast<long long>(p.tiles) * slice / p.slices);
    const int end = static_cast<int>(static_cast<long long>(p.tiles) * (slice + 1) / p.slices);
    int tile_w = begin % p.tiles_w, tile_h = begin / p.tiles_w % p.tiles_h;
    int first_image = begin / p.tiles_w / p.tiles_h * IMAGES;
    const long long out_plane_size = static_cast<long long>(p.h_out) * p.w_out;
    patch_source source;
    source.outer_stride = p.groups * CO * out_plane_size;
    source.inner_count = least(kBlockCo, CO - co_block * kBlockCo);
    source.h_out = p.h_out, source.w_out = p.w_out;
    const auto enter_tile = [&]() {
        const long long plane = (static_cast<long long>(first_image) * p.groups + group) * CO + co_block * kBlockCo;
        source.first = p.grad_output + plane * out_plane_size;
        source.outer_count = least(IMAGES, p.images - first_image);
        source.row = tile_h * (TILE_H * STRIDE_H) - PADDING_H + first_kh * DILATION_H;
        source.column = tile_w * (TILE_W * STRIDE_W) - PADDING_W + first_kw * DILATION_W;
    };
    const auto next_tile = [&]() {
        if (++tile_w < p.tiles_w) return;
        tile_w = 0;
        if (++tile_h < p.tiles_h) return;
        tile_h = 0;
        first_image += IMAGES;
    };

    // The weights; the first tile's barrier is theirs too.
    for (int i = threadIdx.x; INPUT_GRAD && i < kWeights; i += THREADS) {
        const int ci = ci_block * kBlockCi + i / kSums * CI_CHANNELS + i % CI_CHANNELS;
        const int tap = i / CI_CHANNELS % (KERNEL_H * KERNEL_W), co = i / (CI_CHANNELS * KERNEL_H * KERNEL_W) % CO;
        const long long matrix = static_cast<long long>(group * CI + ci) * (CO * KERNEL_H * KERNEL_W);
        weights[i] = ci < CI ? widen(load_once(p.weight + matrix + co * p.weight_channel + tap * p.weight_tap)) : 0;
    }

    [[maybe_unused]] const accumulate_t* factors = weights + ci_thread * kSums;

    accumulate_t sum[CO_CHANNELS][TAPS_H][TAPS_W][CI_CHANNELS];
    accumulate_t(&flat_sum)[kSums] = reinterpret_cast<accumulate_t(&)[kSums]>(sum);
    #pragma unroll
    for (int s = 0; s < kSums; ++s) flat_sum[s] = 0;

    constexpr int kBatch = PREFETCH ? kPasses : BATCH;
    pack_t packs[kBatch][kSteps];
    enter_tile();
    if (PREFETCH) fetch_patch(packs, source, 0);

    #pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        // Load: the thread's first inputs, and the tile's part of grad_output into shared memory.
        const int iw = tile_w * TILE_W + column;
        const bool column_inside = iw < p.w_in && first_image + image < p.images;
        int ih = tile_h * TILE_H + row;
        const long long plane = (static_cast<long long>(first_image + image) * p.groups + group) * CI + first_ci;
        const ELEMENT_T* __restrict__ input =
            p.input + plane * plane_size + static_cast<index_t>(ih) * p.w_in + iw;
        ELEMENT_T next[ROWS][CI_CHANNELS];
        load_input(next, input, column_inside ? p.h_in - ih : 0);
        if (tile > begin) __syncthreads();
        stage_patch<!PREFETCH>(patch, packs, source);
        __syncthreads();
        if (tile + 1 < end) {
            next_tile();
            enter_tile();
            if (PREFETCH) fetch_patch(packs, source, 0);
        }

        // Multiply and add. A pixel outside the image takes no part: its taps might read infinities.
        const accumulate_t* values = patch + pixel_place(image * PATCH_INNER + co_thread * CO_CHANNELS, row, column);
        #pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            const int rows = column_inside ? p.h_in - ih : 0;
            if (rows <= 0) break;
            accumulate_t factor[ROWS][CI_CHANNELS];
            #pragma unroll
            for (int r = 0; r < ROWS; ++r)
                #pragma unroll
                for (int c = 0; c < CI_CHANNELS; ++c) factor[r][c] = widen(next[r][c]);
            [[maybe_unused]] accumulate_t pixel[ROWS][CI_CHANNELS] = {};  // of the input gradient
            [[maybe_unused]] ELEMENT_T* __restrict__ target = p.grad_input + (input - p.input);
            if (step + 1 < STEPS) {
                input += static_cast<index_t>(ROW_THREADS * ROWS) * p.w_in;
                ih += ROW_THREADS * ROWS;
                load_input(next, input, p.h_in - ih);
            }
            const auto multiply = [&](auto whole) {  // whether all rows are there
                #pragma unroll
                for (int co = 0; co < CO_CHANNELS; ++co) {
                    #pragma unroll
                    for (int kw = 0; kw < TAPS_W; ++kw) {
                        #pragma unroll
                        for (int kh = 0; kh < TAPS_H; ++kh) {
                            [[maybe_unused]] accumulate_t weight[CI_CHANNELS];
                            #pragma unroll
                            for (int c = 0; INPUT_GRAD && c < CI_CHANNELS; ++c)
                                weight[c] = factors[((co * TAPS_H + kh) * TAPS_W + kw) * CI_CHANNELS + c];
                            #pragma unroll
                            for (int r = 0; r < ROWS; ++r) {
                                if (!whole.value && r >= rows) continue;
                                const accumulate_t value =
                                    values[co * (patch_h::kExtent * kRowPitch) + tap_place(r, kh, kw)];
                                #pragma unroll
                                for (int c = 0; c < CI_CHANNELS; ++c) sum[co][kh][kw][c] += value * factor[r][c];
                                #pragma unroll
                                for (int c = 0; INPUT_GRAD && c < CI_CHANNELS; ++c) pixel[r][c] += value * weight[c];
                            }
                        }
                    }
                }
            };
            if (rows >= ROWS) multiply(constant<true>());
            else multiply(constant<false>());
            values += ROW_THREADS * ROWS * patch_h::kPitch * kRowPitch;
            #pragma unroll
            for (int c = 0; INPUT_GRAD && c < CI_CHANNELS; ++c) {
                #pragma unroll
                for (int r = 0; r < ROWS; ++r)
                    if ((CI % kBlockCi == 0 || first_ci + c < CI) && r < rows)
                        target[c * channel_stride + static_cast<index_t>(r) * p.w_in] = narrow<ELEMENT_T>(pixel[r][c]);
            }
        }
    }

    // Add up: lanes, then warps.
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll
    for (int s = 0; s < kSums; ++s) {
        accumulate_t total = flat_sum[s];
        #pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(0xffffffffu, total, distance);
        if (lane == 0) patch[warp * kSums + s] = total;
    }
    __syncthreads();

    accumulate_t* __restrict__ partials =
        p.partials + static_cast<long long>(slice) * p.groups * CI * CO * (KERNEL_H * KERNEL_W);
    #pragma unroll 1
    for (int i = threadIdx.x; i < kBlockSums; i += THREADS) {
        const int s = i % kSums, owner = i / kSums;
        const int c = s % CI_CHANNELS, kw = s / CI_CHANNELS % TAPS_W, kh = s / (CI_CHANNELS * TAPS_W) % TAPS_H;
        const int ci = ci_block * kBlockCi + owner % CI_THREADS * CI_CHANNELS + c;
        const int co = co_block * kBlockCo + owner / CI_THREADS * CO_CHANNELS + s / (CI_CHANNELS * TAPS_W * TAPS_H);
        if (ci >= CI || co >= CO || first_kh + kh >= KERNEL_H || first_kw + kw >= KERNEL_W) continue;
        accumulate_t total = 0;
        #pragma unroll
        for (int w = 0; w < kPixelWarps; ++w) total += patch[(owner * kPixelWarps + w) * kSums + s];
        const long long matrix = static_cast<long long>(group * CI + ci) * CO + co;
        const long long place = matrix * (KERNEL_H * KERNEL_W) + (first_kh + kh) * KERNEL_W + first_kw + kw;
        if (p.grad_weight != nullptr) p.grad_weight[place] = narrow<ELEMENT_T>(total);
        else partials[place] = total;
    }
}
