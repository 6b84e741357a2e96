/* direct, both gradients at once on tensor cores, for groups of few channels: 16-bit types and TF32.
 *
 *   grad_output [N, G, CO, H_out, W_out], input [N, G, CI, H_in, W_in], weight [G, CI, CO, K_H, K_W]
 *   -> grad_input [N, G, CI, H_in, W_in], grad_weight [G, CI, CO, K_H, K_W]
 *
 * For a tap k let X_k [co, pixel] be what the input pixels read of grad_output there (see load/patch.cuh). Then
 *
 *   grad_weight_k [co, ci] = X_k [co, pixel] . input [pixel, ci]         summed over all pixels
 *   grad_input [pixel, ci] = sum over k of X_k^T [pixel, co] . weight_k [co, ci]
 *
 * so the same patch of grad_output, staged once, is the left side of both. Values are words of TF32, which 16-bit values are
 * exactly (see ptx/mma.cuh). A lane reads X_k with its own plane and pixel for the first, and with these changed round for the
 * second. The output channels of a step are taken by lane t as 2t and 2t + 1.
 *
 *   S=2x3 D=2x1 K=3x5, 16 to 8 channels, 4 rows of 16 pixels a warp: it reads 6 patch rows at 5 kernel columns, 16 words a
 *   lane each, for 12 taps and rows that meet in them, 4 products of 16 x 8 x 8 each
 *
 * The pixels are cut into tiles of ROW_WARPS*ROWS x COLUMN_WARPS*16. A block owns a slice, every so many-th tile, and, of one
 * group, CI_WARPS*8 input channels; a warp ROWS x 16 pixels of each tile and 8 input channels. It stores the pixels' gradients
 * tile by tile; its sums of the weights' go on until the last tile, then those of a block's warps are added up, and
 * splits/reduce.cu adds those of several slices. No atomics: the order follows from the problem alone.
 *
 * Pixels beyond the image's edge take part as zeros: where grad_output is infinite or NaN, so may be the gradients of
 * weights that meet it there alone.
 *
 * Macros: ELEMENT_T; CI, CO (channels of a group); KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W; ROWS; ROW_WARPS, COLUMN_WARPS, CI_WARPS; VECTOR; BATCH (rows
 * of a plane that a warp stages at once, or several times as many); MIN_BLOCKS (blocks that a multiprocessor must have
 * registers for); SHARED_BYTES; INDEX_64.
 */
#define PIXEL_WARPS (ROW_WARPS * COLUMN_WARPS)
#define THREADS (PIXEL_WARPS * CI_WARPS * 32)
#define TILE_H (ROW_WARPS * ROWS)
#define TILE_W (COLUMN_WARPS * 16)
#define TAPS_H KERNEL_H
#define TAPS_W KERNEL_W
#define PATCHES ((CO + 7) / 8 * 8)
#define PATCH_INNER PATCHES
#define ON_TENSOR_CORES 1
#include "load/patch.cuh"

struct direct_grads_mma_params {
    const ELEMENT_T* __restrict__ grad_output;  // [images, groups, CO, H_out, W_out]
    const ELEMENT_T* __restrict__ input;        // [images, groups, CI, H_in, W_in]
    const ELEMENT_T* __restrict__ weight;       // [groups, CI, CO, K_H, K_W], or taps first
    ELEMENT_T* __restrict__ grad_input;         // as input
    float* __restrict__ partials;               // [slices, groups, CI, CO, K_H, K_W]
    ELEMENT_T* __restrict__ grad_weight;        // [groups, CI, CO, K_H, K_W] where one slice is all, else null
    int groups;
    int h_in, w_in, h_out, w_out;
    int tiles_h, tiles_w;            // of an image
    int tiles, slices;               // tiles in all
    int weight_channel, weight_tap;  // elements of the weight, from an output channel or a tap to the next
};

using words = mma_words<float>;

// A warp stages planes in turn, kLaneRows rows at once, each by kLanes lanes.
__device__ constexpr int power_of_two(int least) { int n = 1; while (n < least) n *= 2; return n; }
constexpr int kWarps = THREADS / 32;
constexpr int kLanes = least(32, power_of_two(kVectors)), kLaneRows = 32 / kLanes;
constexpr int kRowSteps = ceil_div(patch_h::kExtent, kLaneRows), kVectorSteps = ceil_div(kVectors, kLanes);
constexpr int kPlanePitch = patch_h::kExtent * kRowPitch + kPlaneGap;

constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr int kBlockCi = CI_WARPS * 8, kCiBlocks = ceil_div(CI, kBlockCi);
constexpr int kCoSteps = PATCHES / 8;               // of the sum over output channels
constexpr int kCoTiles = ceil_div(PATCHES, 16);     // of 16 output channels
constexpr int kSums = kTaps * kCoTiles * 4;         // of a lane
constexpr int kQuads = 4;                           // of a warp's 16 pixels
constexpr int kReach = (ROWS - 1) * patch_h::kPitch + patch_h::place(KERNEL_H - 1) + 1;  // patch rows that a warp reads

// Shared memory: the patch, in the end [warps][kSums][32 lanes]; factors [CI_WARPS][kTaps][kCoSteps][32 lanes] of two words.
constexpr int kScratch = PIXEL_WARPS * CI_WARPS * kSums * 32;
constexpr int kFirst = kScratch > kPatchElements ? kScratch : kPatchElements;
constexpr int kFactors = CI_WARPS * kTaps * kCoSteps * 32;
static_assert((kFirst + kFactors * 2) * 4 <= SHARED_BYTES, "the tile fits the shared memory of the launch");
extern __shared__ __align__(16) unsigned char shared[];

/* Stage the planes of a tile, whose first place is (row, column) of grad_output, zero outside it. */
__device__ __forceinline__ void stage_planes(
    const direct_grads_mma_params& p, float* patch, const ELEMENT_T* first_plane, int row, int column) {
    const int lane = threadIdx.x % 32, first_vector = lane % kLanes, first_row = lane / kLanes;
    const long long plane_size = static_cast<long long>(p.h_out) * p.w_out;

    // Per vector of a row: its column, and the row, which is none where the column is outside.
    int columns[kVectorSteps], rows[kVectorSteps];
    #pragma unroll
    for (int j = 0; j < kVectorSteps; ++j) {
        const int vector = first_vector + j * kLanes;
        columns[j] = column - kLead + (VECTOR > 1 ? vector * VECTOR : patch_w::distance(vector));
        const bool inside = vector < kVectors && static_cast<unsigned>(columns[j]) < p.w_out;
        rows[j] = inside ? row : -(1 << 30);
    }
    #pragma unroll 1
    for (int plane = threadIdx.x / 32; plane < CO; plane += kWarps) {
        const ELEMENT_T* __restrict__ from = first_plane + plane * plane_size + static_cast<index_t>(row) * p.w_out;
        float* to = patch + plane * kPlanePitch;
        #pragma unroll 1
        for (int begin = 0; begin < kRowSteps; begin += BATCH) {
            pack_t packs[BATCH][kVectorSteps];
            #pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int distance = patch_h::distance((begin + i) * kLaneRows + first_row);
                const ELEMENT_T* __restrict__ line = from + static_cast<index_t>(distance) * p.w_out;
                #pragma unroll
                for (int j = 0; j < kVectorSteps; ++j) {
                    const bool inside = static_cast<unsigned>(rows[j] + distance) < p.h_out;
                    packs[i][j] = inside ? pack_t::load(line + columns[j]) : pack_t{};
                }
            }
            #pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int patch_row = (begin + i) * kLaneRows + first_row;
                if ((kRowSteps % BATCH != 0 || patch_h::kExtent % kLaneRows != 0) && patch_row >= patch_h::kExtent) continue;
                #pragma unroll
                for (int j = 0; j < kVectorSteps; ++j) {
                    const int vector = first_vector + j * kLanes;
                    store_pack(to + patch_row * kRowPitch, packs[i][j], vector, vector < kVectors);
                }
            }
        }
    }
}

struct alignas(8) b_words_t { unsigned value[2]; };

__device__ __forceinline__ unsigned word_of(ELEMENT_T value) { return __float_as_uint(staged(value)); }

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
direct_grads_mma_kernel(const __grid_constant__ direct_grads_mma_params p) {
    float* patch = reinterpret_cast<float*>(shared);
    b_words_t* factors = reinterpret_cast<b_words_t*>(shared + kFirst * 4);

    // Which channels the block owns, and which of them, and which pixels of a tile, the warp.
    const int ci_block = blockIdx.x % kCiBlocks, group = blockIdx.x / kCiBlocks, slice = blockIdx.y;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int column = warp % COLUMN_WARPS * 16, row = warp / COLUMN_WARPS % ROW_WARPS * ROWS;
    const int ci_warp = warp / PIXEL_WARPS, first_ci = (ci_block * CI_WARPS + ci_warp) * 8;
    const long long plane_size = static_cast<long long>(p.h_in) * p.w_in;

    // The weights, as the lanes load them; the first tile's barrier is theirs too.
    #pragma unroll 1
    for (int i = threadIdx.x; i < kFactors; i += THREADS) {
        const int of_lane = i % 32, step = i / 32 % kCoSteps, tap = i / (32 * kCoSteps) % kTaps;
        const int ci = (ci_block * CI_WARPS + i / (32 * kCoSteps * kTaps)) * 8 + of_lane / 4;
        b_words_t pair = {};
        #pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int co = step * 8 + of_lane % 4 * 2 + e;
            if (ci < CI && co < CO) {
                const long long matrix = static_cast<long long>(group * CI + ci) * (CO * kTaps);
                pair.value[e] = word_of(load_once(p.weight + matrix + co * p.weight_channel + tap * p.weight_tap));
            }
        }
        factors[i] = pair;
    }

    // Planes beyond the last channel hold zero.
    for (int i = CO * kPlanePitch + threadIdx.x; i < PATCHES * kPlanePitch; i += THREADS) patch[i] = 0;

    float sum[KERNEL_H][KERNEL_W][kCoTiles][4];
    float(&flat_sum)[kSums] = reinterpret_cast<float(&)[kSums]>(sum);
    #pragma unroll
    for (int s = 0; s < kSums; ++s) flat_sum[s] = 0;

    #pragma unroll 1
    for (int tile = slice; tile < p.tiles; tile += p.slices) {  // blocks beside each other have tiles beside each other
        const int tile_w = tile % p.tiles_w, tile_row = tile / p.tiles_w;
        const int image = tile_row / p.tiles_h, tile_h = tile_row - image * p.tiles_h;

        // Load: the inputs of the warp's pixels, those of a lane 4 apart, and the tile's part of grad_output.
        const int ih = tile_h * TILE_H + row, iw = tile_w * TILE_W + column;
        const long long plane = (static_cast<long long>(image) * p.groups + group) * CI + first_ci;
        const long long place = plane * plane_size + static_cast<index_t>(ih) * p.w_in + iw;
        ELEMENT_T loaded[ROWS][kQuads];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            #pragma unroll
            for (int quad = 0; quad < kQuads; ++quad) {
                const int away = quad * 4 + t;
                const bool there = (CI % kBlockCi == 0 || first_ci + g < CI) && ih + r < p.h_in && iw + away < p.w_in;
                const long long address = place + g * plane_size + static_cast<index_t>(r) * p.w_in + away;
                loaded[r][quad] = there ? load_once(p.input + address) : ELEMENT_T{};
            }
        }
        const long long first_plane = (static_cast<long long>(image) * p.groups + group) * CO;
        if (tile > slice) __syncthreads();
        stage_planes(p, patch, p.grad_output + first_plane * p.h_out * p.w_out, tile_h * (TILE_H * STRIDE_H) - PADDING_H,
                     tile_w * (TILE_W * STRIDE_W) - PADDING_W);
        __syncthreads();
        unsigned pixels[ROWS][kQuads];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r)
            #pragma unroll
            for (int quad = 0; quad < kQuads; ++quad) pixels[r][quad] = word_of(loaded[r][quad]);

        // Multiply and add: a row of the patch and a kernel column at a time, for all rows that meet in it.
        const float* by_channel = patch + pixel_place(g, row, column + t);   // X [co, pixel]
        const float* by_pixel = patch + pixel_place(2 * t, row, column + g);  // its transpose
        const auto value = [](const float* from, int planes, int patch_row, int kw, int columns) {
            return __float_as_uint(from[planes * kPlanePitch + patch_row * kRowPitch +
                                        columns * (patch_w::kPitch / kBanks) + tap_place(0, 0, kw)]);
        };
        float pixel_sum[ROWS][4] = {};
        #pragma unroll
        for (int kw = 0; kw < KERNEL_W; ++kw) {
            b_words_t factor[KERNEL_H][kCoSteps];
            #pragma unroll
            for (int kh = 0; kh < KERNEL_H; ++kh)
                #pragma unroll
                for (int step = 0; step < kCoSteps; ++step)
                    factor[kh][step] = factors[((ci_warp * kTaps + kh * KERNEL_W + kw) * kCoSteps + step) * 32 + lane];
            #pragma unroll
            for (int patch_row = 0; patch_row < kReach; ++patch_row) {
                a_words_t channels[2][kCoTiles], turned[kCoSteps];
                #pragma unroll
                for (int octet = 0; octet < 2; ++octet)
                    #pragma unroll
                    for (int tile_co = 0; tile_co < kCoTiles; ++tile_co)
                        #pragma unroll
                        for (int part = 0; part < 4; ++part) {
                            const int planes = tile_co * 16 + part % 2 * 8;
                            channels[octet][tile_co].value[part] =
                                planes < PATCHES ? value(by_channel, planes, patch_row, kw, octet * 8 + part / 2 * 4) : 0;
                        }
                #pragma unroll
                for (int step = 0; step < kCoSteps; ++step)
                    #pragma unroll
                    for (int part = 0; part < 4; ++part)
                        turned[step].value[part] = value(by_pixel, step * 8 + part / 2, patch_row, kw, part % 2 * 8);
                #pragma unroll
                for (int kh = 0; kh < KERNEL_H; ++kh) {
                    #pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        if (r * patch_h::kPitch + patch_h::place(kh) != patch_row) continue;
                        #pragma unroll
                        for (int octet = 0; octet < 2; ++octet)
                            #pragma unroll
                            for (int tile_co = 0; tile_co < kCoTiles; ++tile_co)
                                words::mma(sum[kh][kw][tile_co], channels[octet][tile_co], pixels[r][octet * 2],
                                           pixels[r][octet * 2 + 1]);
                        #pragma unroll
                        for (int step = 0; step < kCoSteps; ++step)
                            words::mma(pixel_sum[r], turned[step], factor[kh][step].value[0], factor[kh][step].value[1]);
                    }
                }
            }
        }

        // Store the gradients of the pixels.
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            #pragma unroll
            for (int part = 0; part < 4; ++part) {
                const int ci = 2 * t + part % 2, away = g + part / 2 * 8;
                const long long address = place + ci * plane_size + static_cast<index_t>(r) * p.w_in + away;
                if ((CI % kBlockCi == 0 || first_ci + ci < CI) && ih + r < p.h_in && iw + away < p.w_in)
                    p.grad_input[address] = narrow<ELEMENT_T>(pixel_sum[r][part]);
            }
        }
    }

    // Add up the warps' sums, and store those of the block.
    __syncthreads();
    #pragma unroll
    for (int s = 0; s < kSums; ++s) patch[(warp * kSums + s) * 32 + lane] = flat_sum[s];
    __syncthreads();
    float* __restrict__ partials = p.partials + static_cast<long long>(slice) * p.groups * CI * CO * kTaps;
    #pragma unroll 1
    for (int i = threadIdx.x; i < CI_WARPS * kSums * 32; i += THREADS) {
        const int of_lane = i % 32, s = i / 32 % kSums, owner = i / (32 * kSums);
        const int part = s % 4, tile_co = s / 4 % kCoTiles, tap = s / (4 * kCoTiles);
        const int ci = (ci_block * CI_WARPS + owner) * 8 + of_lane % 4 * 2 + part % 2;
        const int co = tile_co * 16 + part / 2 * 8 + of_lane / 4;
        if (ci >= CI || co >= CO) continue;
        float total = 0;
        #pragma unroll
        for (int w = 0; w < PIXEL_WARPS; ++w) total += patch[((owner * PIXEL_WARPS + w) * kSums + s) * 32 + of_lane];
        const long long place = (static_cast<long long>(group * CI + ci) * CO + co) * kTaps + tap;
        if (p.grad_weight != nullptr) p.grad_weight[place] = narrow<ELEMENT_T>(total);
        else partials[place] = total;
    }
}
