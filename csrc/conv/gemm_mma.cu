/* fused on any GPU with tensor cores (mma.sync, since sm_80): one GEMM over a table of taps, for images, signals and volumes.
 *
 * Outputs of an axis are cut into cells of SPAN neighbours; phase r is output r of each cell. Cell j reads, for a tap of its
 * phase, the input at j * STEP + shift:
 *
 *   transposed convolution  SPAN = S, STEP = 1: tap k is of the phase r for which S divides r + P - k*D; its shift is the quotient
 *   its input gradient      SPAN = 1, STEP = S: every tap k is of the one phase; its shift is k*D - P
 *
 * For one phase, the outputs of all cells are then a matrix product
 *
 *   output [cell, co] = input [cell * STEP + shift, (shift, ci)] . weight [(shift, ci), co]
 *
 *   block_m  TILE_D x TILE_H x TILE_W neighbouring cells of one image
 *   block_n  PHASES column phases x kChannels output channels; a warp has one phase
 *   K        chunks of UNITS x 16 bytes of channels, and in each all taps of the phase, one after the other
 *
 *   S=2 P=1 K=4, block_m 8 x 16 cells: outputs 16 x 32. Row phase 0 has the taps kh = 1, 3 at the shifts 0, -1; so has column
 *   phase 0. A block of row phase 0 loads 10 x 18 pixels (shifts -1 to 1). Its warps of column phase 0 multiply the pixels at
 *   (0, 0), (0, -1), (-1, 0), (-1, -1), those of phase 1 at (0, 1), (0, 0), (-1, 1), (-1, 0).
 *
 * Prologue: the block copies the patch, all pixels that any tap of its cells reads, to shared memory as [pixel][unit], chunk by
 * chunk, zeros outside of the image. An odd number of units from a pixel to the next keeps neighbours in different banks. Copies
 * are asynchronous, a chunk ahead. Pixels in NCHW go through registers where four of a channel are aligned together, or two
 * bytes are all that lies together.
 * Main loop: a tap is an offset into the patch, so each pixel is loaded once for all taps. ldmatrix reads the left side. The right
 * side comes from the L2 cache in the order in which it is used (FRAGMENTS of weights/pack.cu), a tap ahead, into registers.
 * Epilogue: epilogue/store_tile.cuh.
 *
 * float32 in SPLIT has two parts of TF32 on both sides, and three products. Tensor cores cut sums off where float32 would
 * round, so they sum the products of one tap alone there, and sums are added up in float32.
 *
 * What limits it: beginning and ending a block, which only another block of the multiprocessor hides. docs/notes/gemm_mma.md has
 * the measurements.
 *
 * Macros: ELEMENT_T, SPLIT; CHANNELS_LAST; WARPS_M, WARPS_N; TILES_M, TILES_N (of 16 cells and of 8 channels, of a warp); PHASES
 * (divides WARPS_N and the span across); TILE_H, TILE_W; UNITS (of a chunk, even); COPY_BYTES (of an asynchronous copy; 0 through
 * registers), WIDE (pixels that are loaded together through registers); VECTOR (outputs that are stored together); PARTIALS
 * (split-K: outputs are float32 sums over some of the chunks, which splits/reduce.cu adds up); INDEX_64 (images of 2^31 elements).
 * Chosen by gemmconv/kernels/conv/gemm_mma.py.
 */
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "numeric/index.cuh"
#include "numeric/integers.cuh"
#include "numeric/units.cuh"

constexpr int kMostPhases = 128, kMostTaps = 512;
constexpr int kStages = 2;  // buffers of a chunk; three were no faster
#if PARTIALS
using output_t = float;
#else
using output_t = ELEMENT_T;
#endif

struct extent_t { int d, h, w; };

struct gemm_mma_params {
    const ELEMENT_T* __restrict__ input;
    const unit_t* packed;                // weights, written by the launch before
    const ELEMENT_T* __restrict__ bias;  // or null
    output_t* __restrict__ output;
    int batch, groups, in_channels, out_channels;  // channels of a group
    extent_t in, out;                              // pixels of an image
    extent_t step, span;                           // inputs and outputs from a cell to the next
    extent_t first, patch;                         // least shift; pixels that a block reads
    extent_t tiles;                                // of an image
    int taps, channel_blocks;
    int chunks, split_chunks;                      // in all, and of a block
    int tap_begin[kMostPhases + 1];                // first tap of each phase (d, h, w)
    int tap_offset[kMostTaps + 1];                 // bytes of the patch from a cell's first pixel to the tap's
};

constexpr int kWarps = WARPS_M * WARPS_N, kThreads = kWarps * 32;
constexpr int kCells = WARPS_M * TILES_M * 16, kTileD = kCells / (TILE_H * TILE_W);
constexpr int kWarpChannels = TILES_N * 8, kChannels = WARPS_N / PHASES * kWarpChannels;
constexpr int kParts = SPLIT ? 2 : 1, kElements = elements_of_unit<ELEMENT_T>;
constexpr int kChunkChannels = UNITS * kElements;
constexpr int kSteps = UNITS / 2;           // products of a tap along a chunk: an instruction takes 32 bytes of channels
constexpr int kPitch = (UNITS | 1) * 16;    // bytes from a pixel to the next
constexpr int kTapUnits = kParts * UNITS * kChannels;  // of a tap's weights
constexpr int kSums = TILES_M * TILES_N * 4, kRegisters = kSums * kParts + TILES_N * 4 * kParts + 76;  // of a thread, about
constexpr int kBlocks = kRegisters * kThreads * 2 <= 65536 ? (kRegisters * kThreads * 3 <= 65536 ? 3 : 2) : 1;
static_assert(WARPS_N % PHASES == 0 && kCells % (TILE_H * TILE_W) == 0 && UNITS % 2 == 0, "tiles come out even");

// Shared memory: places of the patch's pixels in the image, later of the tile's outputs; then kStages patches, later outputs.
extern __shared__ __align__(16) unsigned char shared[];

using sums_t = float[TILES_M][TILES_N][4];

struct block_t {
    int image, group, channel_block, split;
    extent_t cell, phase;  // the first cell; the phase, across the first of PHASES
};

/* The work of this block. Blocks of the same cells are neighbours, so the L2 cache has their inputs after the first. */
__device__ __forceinline__ block_t block_of(const gemm_mma_params& p) {
    block_t block;
    int rest = blockIdx.x;
    const auto take = [&rest](int count) {
        const int whole = rest / count, part = rest - whole * count;
        rest = whole;
        return part;
    };
    block.channel_block = take(p.channel_blocks);
    block.phase.w = take(p.span.w / PHASES) * PHASES;
    block.phase.h = take(p.span.h);
    block.phase.d = take(p.span.d);
    block.group = take(p.groups);
    block.cell.w = take(p.tiles.w) * TILE_W;
    block.cell.h = take(p.tiles.h) * TILE_H;
    block.cell.d = take(p.tiles.d) * kTileD;
    block.image = rest;
    block.split = blockIdx.y;
    return block;
}

/* Where each pixel of the patch lies in its image, in elements; -1 outside. */
__device__ __forceinline__ void find_pixels(const gemm_mma_params& p, const block_t& block, index_t* places) {
    const int pixels = p.patch.d * p.patch.h * p.patch.w;
    for (int pixel = threadIdx.x; pixel < pixels; pixel += kThreads) {
        const int row = pixel / p.patch.w, plane = row / p.patch.h;
        const int w = block.cell.w * p.step.w + p.first.w + pixel - row * p.patch.w;
        const int h = block.cell.h * p.step.h + p.first.h + row - plane * p.patch.h;
        const int d = block.cell.d * p.step.d + p.first.d + plane;
        const bool inside = static_cast<unsigned>(w) < p.in.w && static_cast<unsigned>(h) < p.in.h &&
                            static_cast<unsigned>(d) < p.in.d;
        const index_t place = (static_cast<index_t>(d) * p.in.h + h) * p.in.w + w;
        places[pixel] = inside ? place * (CHANNELS_LAST ? p.groups * p.in_channels : 1) : -1;
    }
}

/* Neighbouring channels of a pixel as they lie in the patch: rounded already, except in two parts. */
__device__ __forceinline__ unit_t as_unit(const ELEMENT_T (&values)[kElements]) {
    if (!SPLIT) return pack_unit<1>(values).part[0];
    unit_t unit;
    as_words<4>(unit.word, values);
    return unit;
}

/* Loads the chunks of a block's patch, one after the other, each in steps of some pixels a warp.
 *
 * Asynchronous copies: eight neighbouring threads have eight pixels, the four eights of a warp pieces of their channels.
 * Through registers: UNITS neighbouring threads have WIDE neighbouring pixels, each a unit of their channels.
 */
struct loader_t {
    static constexpr int kPiece = COPY_BYTES > 0 ? COPY_BYTES / sizeof(ELEMENT_T) : kElements;  // channels
    static constexpr int kPixels = COPY_BYTES > 0 ? kWarps * 8 : kThreads / UNITS * WIDE;       // of a step
    const index_t* places;
    int pixels, first_pixel, own_channel;
    index_t channel_step;
    const ELEMENT_T* __restrict__ channels;  // the thread's first of the chunk, in the image's first pixel
    int channels_left;                       // from there on
    int pixel;
    unsigned char* target;

    __device__ __forceinline__ loader_t(const gemm_mma_params& p, const block_t& block, int chunk, const index_t* places)
        : places(places), pixels(p.patch.d * p.patch.h * p.patch.w) {
        const index_t image_pixels = static_cast<index_t>(p.in.d) * p.in.h * p.in.w;
        first_pixel = COPY_BYTES > 0 ? threadIdx.x / 32 * 8 + threadIdx.x % 8 : threadIdx.x / UNITS * WIDE;
        own_channel = (COPY_BYTES > 0 ? threadIdx.x / 8 % 4 : threadIdx.x % UNITS) * kPiece;
        channel_step = CHANNELS_LAST ? 1 : image_pixels;
        const int channel = chunk * kChunkChannels + own_channel;
        const long long image = block.image * static_cast<long long>(image_pixels) * (p.groups * p.in_channels);
        channels = p.input + image + (block.group * p.in_channels + channel) * static_cast<long long>(channel_step);
        channels_left = p.in_channels - channel;
        pixel = pixels;
    }
    __device__ __forceinline__ void begin(unsigned char* stage) {
        pixel = first_pixel;
        target = stage + first_pixel * kPitch + own_channel * sizeof(ELEMENT_T);
    }
    __device__ __forceinline__ bool more() const { return pixel < pixels; }
    __device__ __forceinline__ void step() {
        const index_t place = places[pixel];
        const ELEMENT_T* __restrict__ from = channels + (place < 0 ? 0 : place);
#if COPY_BYTES > 0
        #pragma unroll
        for (int i = 0; i < kChunkChannels; i += 4 * kPiece, from += 4 * kPiece * channel_step) {
            if (kChunkChannels % (4 * kPiece) != 0 && own_channel + i >= kChunkChannels) continue;
            const bool inside = place >= 0 && i < channels_left;
            cp_async<COPY_BYTES>(target + i * sizeof(ELEMENT_T), inside ? from : channels, inside);
        }
#else
        vector_of<ELEMENT_T, WIDE> values[kElements];
        #pragma unroll
        for (int e = 0; e < kElements; ++e, from += channel_step) {
            values[e] = {};
            if (place >= 0 && e < channels_left) values[e] = *reinterpret_cast<const vector_of<ELEMENT_T, WIDE>*>(from);
        }
        #pragma unroll
        for (int i = 0; i < WIDE; ++i) {
            ELEMENT_T of_pixel[kElements];
            #pragma unroll
            for (int e = 0; e < kElements; ++e) of_pixel[e] = values[e].value[i];
            *reinterpret_cast<unit_t*>(target + i * kPitch) = as_unit(of_pixel);
        }
#endif
        pixel += kPixels;
        target += kPixels * kPitch;
    }
    /* Load what is left of the chunk; the next is the one after it. */
    __device__ __forceinline__ void finish() {
        #pragma unroll 2
        while (more()) step();
        channels += kChunkChannels * channel_step;
        channels_left -= kChunkChannels;
        cp_async_commit();
    }
};

/* A tap's weights for 8 channels and all of a chunk: a lane's words of one row of B, of each part. */
struct right_t { words_t<UNITS * 4> part[kParts]; };

__device__ __forceinline__ void fetch(right_t (&rights)[TILES_N], const unit_t* weights) {
    const auto* rows = reinterpret_cast<const words_t<UNITS * 4>*>(weights) + threadIdx.x % 32;
    #pragma unroll
    for (int n = 0; n < TILES_N; ++n)
        #pragma unroll
        for (int part = 0; part < kParts; ++part) rights[n].part[part] = rows[n * 32 + part * kChannels * 4];
}

/* sums += left . right for a tap. `rows` are where a lane's rows of the left side begin. */
__device__ __forceinline__ void multiply(
    sums_t& sums, const unsigned char* const (&rows)[TILES_M], int offset, const right_t (&rights)[TILES_N]) {
    using words = mma_words<ELEMENT_T>;
    #pragma unroll
    for (int m = 0; m < TILES_M; ++m)
        #pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            a_words_t left[kParts];
            unsigned (&word)[4] = left[0].value;
            load_matrices(word, rows[m] + offset + step * 32);
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                if (SPLIT || COPY_BYTES > 0) word[i] = rounded<kParts, ELEMENT_T>(word[i], left[kParts - 1].value[i]);
            #pragma unroll
            for (int n = 0; n < TILES_N; ++n) {
                const auto& big = rights[n].part[0].word;
                [[maybe_unused]] const auto& small = rights[n].part[kParts - 1].word;
                if (SPLIT) words::mma(sums[m][n], left[kParts - 1], big[2 * step], big[2 * step + 1]);
                if (SPLIT) words::mma(sums[m][n], left[0], small[2 * step], small[2 * step + 1]);
                words::mma(sums[m][n], left[0], big[2 * step], big[2 * step + 1]);
            }
        }
}

__device__ __forceinline__ void clear(sums_t& sums) {
    #pragma unroll
    for (int i = 0; i < kSums; ++i) (&sums[0][0][0])[i] = 0.0f;
}

__device__ __forceinline__ void add(sums_t& sums, const sums_t& more) {
    #pragma unroll
    for (int i = 0; i < kSums; ++i) (&sums[0][0][0])[i] += (&more[0][0][0])[i];
}

#include "epilogue/store_tile.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) conv_gemm_mma_kernel(const __grid_constant__ gemm_mma_params p) {
    const int pixels = p.patch.d * p.patch.h * p.patch.w, stage_bytes = pixels * kPitch, lane = threadIdx.x % 32;
    const int warp_m = threadIdx.x / 32 % WARPS_M, warp_n = threadIdx.x / 32 / WARPS_M;
    index_t* places = reinterpret_cast<index_t*>(shared);
    unsigned char* stages = shared + (most(pixels, kCells * PHASES) * static_cast<int>(sizeof(index_t)) + 15) / 16 * 16;
    const block_t block = block_of(p);
    const int first_chunk = block.split * p.split_chunks, chunks = least(p.split_chunks, p.chunks - first_chunk);

    // The taps of the warp's phase and their weights, and where its lanes' rows of cells begin.
    const int phase = (block.phase.d * p.span.h + block.phase.h) * p.span.w + block.phase.w + warp_n % PHASES;
    const int tap_begin = p.tap_begin[phase], taps = p.tap_begin[phase + 1] - tap_begin;
    const long long before = static_cast<long long>(block.group) * p.taps + tap_begin;  // taps of other groups and phases
    const long long matrices = (before * p.channel_blocks + block.channel_block * taps) * p.chunks + first_chunk * taps;
    const unit_t* weights = p.packed + matrices * kTapUnits + warp_n / PHASES * kWarpChannels * UNITS;
    int row_offsets[TILES_M];
    #pragma unroll
    for (int m = 0; m < TILES_M; ++m) {
        const int cell = (warp_m * TILES_M + m) * 16 + lane % 16;
        const int d = cell / (TILE_H * TILE_W) * p.step.d, h = cell / TILE_W % TILE_H * p.step.h, w = cell % TILE_W * p.step.w;
        row_offsets[m] = ((d * p.patch.h + h) * p.patch.w + w) * kPitch + lane / 16 * 16;
    }

    // Prologue: the weights of the first tap, and all buffers but one.
    right_t rights[TILES_N];
    grid_dependency_wait();
    fetch(rights, weights);
    find_pixels(p, block, places);
    loader_t loader(p, block, first_chunk, places);
    __syncthreads();
    #pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
        if (i < chunks) loader.begin(stages + i * stage_bytes);
        loader.finish();
    }

    // Main loop. Weights of the next tap are on their way while one multiplies; those after the last are of no use.
    sums_t sums;
    clear(sums);
    int stage = 0, next_stage = (kStages - 1) * stage_bytes;  // bytes from the first
    #pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        cp_async_wait<kStages - 2>();
        __syncthreads();
        if (chunk + kStages - 1 < chunks) loader.begin(stages + next_stage);
        if (COPY_BYTES == 0) loader.finish();
        const unsigned char* rows[TILES_M];
        #pragma unroll
        for (int m = 0; m < TILES_M; ++m) rows[m] = stages + stage + row_offsets[m];
        next_stage = stage;
        stage = stage == (kStages - 1) * stage_bytes ? 0 : stage + stage_bytes;
        int offset = p.tap_offset[tap_begin];
        #pragma unroll 1
        for (int tap = 0; tap < taps; ++tap) {
            const int next_offset = p.tap_offset[tap_begin + tap + 1];
            weights += kTapUnits;
            right_t next[TILES_N];
            fetch(next, weights);
            if (COPY_BYTES > 0 && loader.more()) loader.step();
#if SPLIT
            sums_t of_tap;
            clear(of_tap);
            multiply(of_tap, rows, offset, rights);
            add(sums, of_tap);
#else
            multiply(sums, rows, offset, rights);
#endif
            #pragma unroll
            for (int n = 0; n < TILES_N; ++n) rights[n] = next[n];
            offset = next_offset;
        }
        if (COPY_BYTES > 0) loader.finish();
    }
    __syncthreads();
    store_tile(p, block, sums, places, stages, warp_m, warp_n);
}
