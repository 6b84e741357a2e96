/* Stores the sums of a block of tensor-core products (mma.sync) as a tile of outputs, with whole sectors of memory written at once.
 *
 *   sums of a warp [TILES_M x 16 cells, TILES_N x 8 channels] of one phase -> output [N, C, D, H, W] or [N, D, H, W, C]
 *
 * In each pass all warps lay out kPassTiles tiles of 8 channels in shared memory as the output has them: lines of the outputs of
 * all cells and PHASES phases, one for each channel, or lines of channels, one for each output. Then neighbouring threads store
 * neighbours of a line, VECTOR at once. A bias is added in float32, which is rounded once.
 *
 *   PHASES = 2, TILE_W = 16: a row of cells is 32 neighbouring outputs; warps of phase 0 have those of even columns
 *
 * 16 bytes between lines, beyond what they hold, let a warp's sums of 8 cells x 4 pairs of channels meet different banks.
 *
 * Takes from the kernel: output_t, block_t, sums_t, kThreads, kCells, kTileD, kWarpChannels, kChannels and the macros above.
 */
#pragma once

constexpr int kPassTiles = least(TILES_N, 16 / sizeof(output_t)), kPasses = TILES_N / kPassTiles;
constexpr int kPassChannels = kPassTiles * 8, kStaged = kChannels / kWarpChannels * kPassChannels;  // of a warp; of the block
constexpr int kOutputs = kCells * PHASES, kLinePad = 16 / sizeof(output_t);
constexpr int kLine = (CHANNELS_LAST ? kStaged : kOutputs) + kLinePad, kLines = CHANNELS_LAST ? kOutputs : kStaged;
// Threads that share a line, and lines that are stored at once.
constexpr int kVectors = (CHANNELS_LAST ? kStaged : kOutputs) / VECTOR, kAcross = least(kVectors, kThreads), kDown = kThreads / kAcross;
static_assert(TILES_N % kPassTiles == 0, "passes come out even");

/* Place of each output of the tile in its image, -1 outside; phases are counted first, then cells. */
__device__ __forceinline__ void find_outputs(const gemm_mma_params& p, const block_t& block, index_t* places) {
    for (int i = threadIdx.x; i < kOutputs; i += kThreads) {
        const int cell = i / PHASES;
        const int w = (block.cell.w + cell % TILE_W) * p.span.w + block.phase.w + i % PHASES;
        const int h = (block.cell.h + cell / TILE_W % TILE_H) * p.span.h + block.phase.h;
        const int d = (block.cell.d + cell / (TILE_W * TILE_H)) * p.span.d + block.phase.d;
        places[i] = w < p.out.w && h < p.out.h && d < p.out.d ? (static_cast<index_t>(d) * p.out.h + h) * p.out.w + w : -1;
    }
}

__device__ __forceinline__ void store_tile(
    const gemm_mma_params& p, const block_t& block, const sums_t& sums, index_t* places, unsigned char* shared_outputs, int warp_m,
    int warp_n) {
    using stored_t = vector_of<output_t, VECTOR>;
    output_t* staged = reinterpret_cast<output_t*>(shared_outputs);
    const int lane = threadIdx.x % 32, part = warp_n / PHASES, block_channel = block.channel_block * kChannels;
    const int channels = p.out_channels - block_channel;  // that are left
    const index_t pixels = static_cast<index_t>(p.out.d) * p.out.h * p.out.w;
    const long long all_channels = static_cast<long long>(p.groups) * p.out_channels;
    const long long image = block.split * static_cast<long long>(p.batch) + block.image;
    const int first_channel = block.group * p.out_channels + block_channel;
    output_t* __restrict__ output =
        p.output + image * all_channels * pixels + first_channel * static_cast<long long>(CHANNELS_LAST ? 1 : pixels);
    find_outputs(p, block, places);
    #pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        if (pass > 0) __syncthreads();
        #pragma unroll
        for (int n = 0; n < kPassTiles; ++n) {
            float bias[2] = {0.0f, 0.0f};
            const int own = n * 8 + lane % 4 * 2, channel = part * kWarpChannels + pass * kPassChannels + own;
            if (p.bias != nullptr && block.split == 0)
                #pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (channel + e < channels) bias[e] = widen(load_once(p.bias + first_channel + channel + e));
            #pragma unroll
            for (int m = 0; m < TILES_M; ++m)
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int cell = (warp_m * TILES_M + m) * 16 + half * 8 + lane / 4;
                    const int at = cell * PHASES + warp_n % PHASES, line = part * kPassChannels + own;
                    vector_of<output_t, 2> pair;
                    #pragma unroll
                    for (int e = 0; e < 2; ++e)
                        pair.value[e] = narrow<output_t>(sums[m][pass * kPassTiles + n][half * 2 + e] + bias[e]);
                    if (CHANNELS_LAST) *reinterpret_cast<vector_of<output_t, 2>*>(staged + at * kLine + line) = pair;
                    else staged[line * kLine + at] = pair.value[0], staged[(line + 1) * kLine + at] = pair.value[1];
                }
        }
        __syncthreads();
        // Lines in batches: all are read before the first is stored.
        constexpr int kBatch = least(ceil_div(kLines, kDown), 4);
        const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
        #pragma unroll
        for (int first = 0; first < kVectors; first += kAcross) {
            const int along = (first + across) * VECTOR, own = CHANNELS_LAST ? along : 0;
            if (kThreads % kAcross != 0 && down >= kDown || kVectors % kAcross != 0 && along >= kVectors * VECTOR) continue;
            const index_t place = CHANNELS_LAST ? 0 : places[along];
            const int channel = pass * kPassChannels + own / kPassChannels * kWarpChannels + own % kPassChannels;
            if (place < 0 || channel >= channels) continue;
            output_t* __restrict__ target = output + (CHANNELS_LAST ? channel : place + channel * pixels);
            #pragma unroll 1
            for (int line0 = down; line0 < kLines; line0 += kBatch * kDown) {
                stored_t batch[kBatch];
                index_t offsets[kBatch];
                #pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const int line = line0 + i * kDown, beyond = line / kPassChannels * kWarpChannels + line % kPassChannels;
                    offsets[i] = -1;
                    if (kLines % (kBatch * kDown) != 0 && line >= kLines) continue;
                    batch[i] = *reinterpret_cast<const stored_t*>(staged + line * kLine + along);
                    if (CHANNELS_LAST) offsets[i] = places[line] < 0 ? -1 : places[line] * static_cast<index_t>(all_channels);
                    else if (channel + beyond < channels) offsets[i] = beyond * pixels;
                }
                #pragma unroll
                for (int i = 0; i < kBatch; ++i)
                    if (offsets[i] >= 0) *reinterpret_cast<stored_t*>(target + offsets[i]) = batch[i];
            }
        }
    }
}
