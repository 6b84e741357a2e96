/* direct, input gradient: an ordinary strided convolution of grad_output with the weight, one launch, no workspace.
 *
 *   grad_output [N, G, CO, H_out, W_out], weight [G, CI, CO, K_H, K_W] -> grad_input [N, G, CI, H_in, W_in]
 *   grad_input[ih, iw] = sum over co, kh, kw of grad_output[ih*S_H - P_H + kh*D_H, iw*S_W - P_W + kw*D_W] * weight[kh, kw]
 *
 *   S=2 P=1 K=3 D=1, ih=2:  kh=0 -> oh=3;  kh=1 -> oh=4;  kh=2 -> oh=5
 *
 * A block owns a tile of ROW_THREADS*ROWS x COLUMN_THREADS input pixels, of CHANNEL_THREADS*CHANNELS channels, of PLANES
 * planes (a plane is a group of an image). It goes over the output channels and the taps in chunks: what a chunk reads of
 * grad_output is staged in shared memory (see load/patch.cuh) beside its weights. A thread owns ROWS x CHANNELS of the sums: a
 * value that it reads serves all its channels, and those of its rows and taps that meet it; the weights serve all rows.
 *
 * A sum has one order: chunk by chunk, in a chunk by co, kw, kh.
 *
 * Macros: ELEMENT_T; CI, CO (channels of a group); KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W; ROWS, CHANNELS;
 * COLUMN_THREADS, ROW_THREADS, PLANES, CHANNEL_THREADS (their product is the block); CHUNK_CHANNELS, TAPS_H, TAPS_W (a
 * chunk); WEIGHTS_ONCE (the weights of all chunks are staged at the start); VECTOR; BATCH (passes of staging whose loads
 * are in flight together); PREFETCH (the next chunk's loads are in flight while this one is computed); MIN_BLOCKS
 * (blocks that a multiprocessor must have registers for); INDEX_64.
 */
#define THREADS (COLUMN_THREADS * ROW_THREADS * PLANES * CHANNEL_THREADS)
#define TILE_H (ROW_THREADS * ROWS)
#define TILE_W COLUMN_THREADS
#define PATCHES (PLANES * CHUNK_CHANNELS)
#define PATCH_INNER CHUNK_CHANNELS
#include "load/patch.cuh"

struct direct_input_grad_params {
    const ELEMENT_T* __restrict__ grad_output;  // [planes, CO, H_out, W_out]
    const ELEMENT_T* __restrict__ weight;       // [groups, CI, CO, K_H, K_W], or taps first
    ELEMENT_T* __restrict__ grad_input;         // [planes, CI, H_in, W_in]
    int planes, groups;                         // planes = images * groups
    int h_in, w_in, h_out, w_out;
    int tiles_w;
    int weight_channel, weight_tap;  // elements of the weight, from an output channel or a tap to the next
};

constexpr int kBlockChannels = CHANNEL_THREADS * CHANNELS;
constexpr int kChannelBlocks = ceil_div(CI, kBlockChannels);
constexpr int kChunksW = ceil_div(KERNEL_W, TAPS_W);
constexpr int kChunksTaps = ceil_div(KERNEL_H, TAPS_H) * kChunksW;
constexpr int kChunks = ceil_div(CO, CHUNK_CHANNELS) * kChunksTaps;

// A thread's weights of a tap lie together, padded to what vector loads take.
constexpr int kWeightPitch = CHANNELS <= 2 ? CHANNELS : CHANNELS <= 4 ? 4 : 8;
constexpr int kWeightPiece = least(kWeightPitch, 16 / static_cast<int>(sizeof(accumulate_t)));
constexpr int kTapPitch = CHANNEL_THREADS * kWeightPitch;
constexpr int kWeightChannels = WEIGHTS_ONCE ? CO : CHUNK_CHANNELS;  // output channels whose weights are staged
constexpr int kWeightTaps = kWeightChannels * TAPS_H * TAPS_W;       // of a plane
constexpr int kWeights = PLANES * kWeightTaps * kTapPitch;
static_assert(!WEIGHTS_ONCE || kChunksTaps == 1, "chunks of taps have weights of their own");

struct alignas(kWeightPiece * sizeof(accumulate_t)) weights_t { accumulate_t value[kWeightPiece]; };

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
direct_input_grad_kernel(const __grid_constant__ direct_input_grad_params p) {
    __shared__ __align__(16) accumulate_t patch[kPatchElements];  // [PLANES, CHUNK_CHANNELS, rows, kBanks, kBankPitch]
    __shared__ __align__(16) accumulate_t weights[kWeights];      // [PLANES, kWeightChannels, TAPS_H, TAPS_W, kTapPitch]

    // Which pixels, channels and planes the block owns, and which of them the thread.
    const int channel_block = blockIdx.x % kChannelBlocks;
    const int tile = blockIdx.x / kChannelBlocks;
    const int tile_h = tile / p.tiles_w, tile_w = tile - tile_h * p.tiles_w;
    const int first_plane = (blockIdx.y + gridDim.y * blockIdx.z) * PLANES;
    const int first_ih = tile_h * TILE_H, first_iw = tile_w * TILE_W;
    const int column = threadIdx.x % COLUMN_THREADS;
    const int row = threadIdx.x / COLUMN_THREADS % ROW_THREADS * ROWS;
    const int plane = threadIdx.x / (COLUMN_THREADS * ROW_THREADS) % PLANES;
    const int channel_thread = threadIdx.x / (COLUMN_THREADS * ROW_THREADS * PLANES);
    if (first_plane >= p.planes) return;
    const int first_group = first_plane % p.groups;

    const long long out_plane_size = static_cast<long long>(p.h_out) * p.w_out;
    patch_source source;
    source.outer_stride = CO * out_plane_size;
    source.outer_count = least(PLANES, p.planes - first_plane);
    source.h_out = p.h_out, source.w_out = p.w_out;
    const auto enter_chunk = [&](int chunk) {
        const int taps = chunk % kChunksTaps, first_co = chunk / kChunksTaps * CHUNK_CHANNELS;
        source.first = p.grad_output + (static_cast<long long>(first_plane) * CO + first_co) * out_plane_size;
        source.inner_count = least(CHUNK_CHANNELS, CO - first_co);
        source.row = first_ih * STRIDE_H - PADDING_H + taps / kChunksW * TAPS_H * DILATION_H;
        source.column = first_iw * STRIDE_W - PADDING_W + taps % kChunksW * TAPS_W * DILATION_W;
    };

    accumulate_t sum[ROWS][CHANNELS];
    #pragma unroll
    for (int r = 0; r < ROWS; ++r)
        #pragma unroll
        for (int c = 0; c < CHANNELS; ++c) sum[r][c] = 0;

    constexpr int kBatch = PREFETCH ? kPasses : BATCH;
    pack_t packs[kBatch][kSteps];
    enter_chunk(0);
    if (PREFETCH) fetch_patch(packs, source, 0);

    #pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int taps = kChunksTaps == 1 ? 0 : chunk % kChunksTaps;
        const int first_kh = taps / kChunksW * TAPS_H, first_kw = taps % kChunksW * TAPS_W;

        // Stage: the chunk's part of grad_output, and its weights; channels and taps that there are not weigh nothing.
        if (chunk > 0) __syncthreads();
        stage_patch<!PREFETCH>(patch, packs, source);
        const int first_co = chunk / kChunksTaps * CHUNK_CHANNELS;
        const int weights_co = WEIGHTS_ONCE ? 0 : first_co;  // the first whose weights are staged
        #pragma unroll 1
        for (int i = WEIGHTS_ONCE && chunk > 0 ? PLANES * kBlockChannels * kWeightTaps : threadIdx.x;
             i < PLANES * kBlockChannels * kWeightTaps; i += THREADS) {
            const int kw = i % TAPS_W, kh = i / TAPS_W % TAPS_H, co = i / (TAPS_W * TAPS_H) % kWeightChannels;
            const int c = i / kWeightTaps % kBlockChannels, weight_plane = i / (kWeightTaps * kBlockChannels);
            const int ci = channel_block * kBlockChannels + c;
            const int group = PLANES == 1 ? first_group : (first_group + weight_plane) % p.groups;
            accumulate_t value = 0;
            if (ci < CI && weights_co + co < CO && first_kh + kh < KERNEL_H && first_kw + kw < KERNEL_W) {
                const long long matrix = static_cast<long long>(group * CI + ci) * (CO * KERNEL_H * KERNEL_W);
                const int tap = (first_kh + kh) * KERNEL_W + first_kw + kw;
                value = widen(load_once(p.weight + matrix + (weights_co + co) * p.weight_channel + tap * p.weight_tap));
            }
            const int tap = ((weight_plane * kWeightChannels + co) * TAPS_H + kh) * TAPS_W + kw;
            weights[tap * kTapPitch + c / CHANNELS * kWeightPitch + c % CHANNELS] = value;
        }
        __syncthreads();
        if (chunk + 1 < kChunks) {
            enter_chunk(chunk + 1);
            if (PREFETCH) fetch_patch(packs, source, 0);
        }

        // Multiply and add.
        const int channels = least(CHUNK_CHANNELS, CO - first_co);
        #pragma unroll 1
        for (int co = 0; co < channels; ++co) {
            const accumulate_t* values = patch + pixel_place(plane * CHUNK_CHANNELS + co, row, column);
            const int weights_row = plane * kWeightChannels + first_co - weights_co + co;
            const accumulate_t* factors =
                weights + weights_row * (TAPS_H * TAPS_W * kTapPitch) + channel_thread * kWeightPitch;
            #pragma unroll
            for (int kw = 0; kw < TAPS_W; ++kw) {
                if (KERNEL_W % TAPS_W != 0 && first_kw + kw >= KERNEL_W) break;
                #pragma unroll
                for (int kh = 0; kh < TAPS_H; ++kh) {
                    if (KERNEL_H % TAPS_H != 0 && first_kh + kh >= KERNEL_H) break;
                    weights_t factor[kWeightPitch / kWeightPiece];
                    #pragma unroll
                    for (int i = 0; i < kWeightPitch / kWeightPiece; ++i)
                        factor[i] = reinterpret_cast<const weights_t*>(factors + (kh * TAPS_W + kw) * kTapPitch)[i];
                    #pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        const accumulate_t value = values[tap_place(r, kh, kw)];
                        #pragma unroll
                        for (int c = 0; c < CHANNELS; ++c)
                            sum[r][c] += value * factor[c / kWeightPiece].value[c % kWeightPiece];
                    }
                }
            }
        }
    }

    const int iw = first_iw + column;
    const int first_ci = channel_block * kBlockChannels + channel_thread * CHANNELS;
    if (first_plane + plane >= p.planes || iw >= p.w_in) return;
    const long long plane_size = static_cast<long long>(p.h_in) * p.w_in;
    ELEMENT_T* __restrict__ target = p.grad_input +
        (static_cast<long long>(first_plane + plane) * CI + first_ci) * plane_size +
        static_cast<index_t>(first_ih + row) * p.w_in + iw;
    const int rows = p.h_in - first_ih - row;
    #pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const bool there = (CI % kBlockChannels == 0 || first_ci + c < CI) && r < rows;
            if (there) target[static_cast<index_t>(r) * p.w_in] = narrow<ELEMENT_T>(sum[r][c]);
        }
        target += plane_size;
    }
}
