/* direct: transposed convolution as one gather, no workspace. For layers whose work is moving bytes.
 *
 *   input [N, C_in, H_in, W_in], weight [C_in, C_out/G, K_H, K_W] -> output [N, C_out, H_out, W_out]
 *   output[co, oh, ow] = bias[co] + sum over ci, kh, kw of input[ci, ih, iw] * weight[ci, co, kh, kw]
 *   with ih = (oh + P_H - kh*D_H) / S_H and iw likewise, where they are whole and inside
 *
 * Outputs are grouped into cells and phases; see geometry/axis.cuh. All outputs of a cell read around the cell's input.
 * (Where every group has one channel in and out, pipeline/depthwise.cuh has the mapping instead of the rest of this.)
 *
 * A plane is a group of an image: IN_CHANNELS input channels, OUT_CHANNELS output channels. A block owns TILE_OUT
 * output channels of TILE_PLANES planes, and TILE_H x TILE_W cells of each: whole stretches of S_H*TILE_H output rows,
 * with all their columns. A thread owns CELLS neighbouring cells of one row in one row phase. TILE_PHASES row phases
 * are worked on at a time, by threads of their own. SPLIT_IN threads may share an output, each with a part of the input
 * channels.
 *
 * The block stages TILE_IN input channels at a time in shared memory: the patch of the input that its cells read, as
 * accumulate_t and zero outside the image, and the weights. With TILE_OUT * CELLS * (column phases) accumulators, for
 * each channel and each tap row of its phase a thread reads a window of the patch into registers, then four weights at
 * a time, the same for all threads of a plane; every weight serves CELLS products. Which window element an accumulator
 * takes with which tap is known when compiling.
 *
 * Shared memory serves 128 bytes a cycle, a multiprocessor's time for four FFMA instructions: four weights that all
 * threads of a warp read take one cycle, a 16-byte vector of each one's window takes four. Large CELLS save both, large
 * TILE_OUT save windows, and staging as well.
 *
 * Patch rows are dealt to kBanks runs of 16-byte vectors, vector v to run v % kBanks, where kBanks are the vectors of a
 * thread's cells: the threads of a warp then read neighbouring vectors, which lie in different banks.
 *
 *   CELLS=8, float: vectors 0 2 4 ... | 1 3 5 ...;  thread 1 starts at column 8, vector 2, the second of the first run
 *
 * Stores. A thread's outputs in a row are neighbours, and a warp transposes them in shared memory, see
 * epilogue/store_runs.cuh. In channels_last the TILE_OUT channels of a pixel are, which neighbouring lanes store then.
 * Outputs that hold the bias alone need no accumulators: whole rows of them are stored before the work begins, in
 * channels_last as whole pixels, columns between others come from the bias.
 *
 * Macros: ELEMENT_T; KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W; IN_CHANNELS, OUT_CHANNELS (of a group);
 * CHANNELS_LAST; LANES_W, CELLS (TILE_W = LANES_W * CELLS), TILE_H, TILE_PHASES, TILE_PLANES, SPLIT_IN,
 * TILE_IN, TILE_OUT; LOAD_VECTOR, VECTOR (elements of a load and of a store); LEAST_BLOCKS (that a multiprocessor shall
 * hold), SHARED_BYTES, INDEX_64; DEPTHWISE, and then ROWS and PLANE_VECTOR, else 1, and LOOPED (p.turns may be more than
 * 1), else 0. Chosen by gemmconv/kernels/direct/forward.py.
 */
#include "geometry/axis.cuh"
#include "numeric/index.cuh"
#include "numeric/types.cuh"
#include "numeric/vector.cuh"
#include "epilogue/store_runs.cuh"

struct direct_forward_params {
    const ELEMENT_T* __restrict__ input;
    const ELEMENT_T* __restrict__ weight;
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    int planes, groups;                  // planes = N * groups
    int h_in, w_in, h_out, w_out;
    int tiles_w;  // blockIdx.x = (tile row * tiles_w + tile column) * channel tiles + channel tile
    int turns;    // loop trips of a depthwise block in channels_last, a tile each
    int weight_channel, weight_tap;  // elements of the weight, from an output channel or a tap to the next
};

using accumulate_t = accumulator_t<ELEMENT_T>;

constexpr int kTileW = LANES_W * CELLS;
constexpr int kPartThreads = LANES_W * (TILE_H / ROWS) * TILE_PHASES * (TILE_PLANES / PLANE_VECTOR);
constexpr int kThreads = kPartThreads * SPLIT_IN;
constexpr int kFirstH = axis_h::least_shift(), kHaloH = axis_h::largest_shift() - kFirstH;
constexpr int kFirstW = axis_w::least_shift(), kHaloW = axis_w::largest_shift() - kFirstW;
constexpr int kNeighbours = CELLS * STRIDE_W;  // outputs of a thread in a row
struct alignas(16) weight_quad_t { accumulate_t value[4]; };
extern __shared__ __align__(16) unsigned char shared[];

/* The phase of each r-th output of an axis, or kNone. */
template <int STRIDE> struct phases_t { int of[STRIDE]; };
template <typename AXIS, int STRIDE> __device__ constexpr phases_t<STRIDE> phases_of() {
    phases_t<STRIDE> phases{};
    for (int r = 0; r < STRIDE; ++r) phases.of[r] = AXIS::phase(r);
    return phases;
}
__device__ constexpr phases_t<STRIDE_W> kColumnPhases = phases_of<axis_w, STRIDE_W>();

#if DEPTHWISE
#include "pipeline/depthwise.cuh"
#else

constexpr int kSumBytes = sizeof(accumulate_t);

// Patch [TILE_PLANES][TILE_IN][kPatchH][kPitch]. Rows that a warp reads in the same cycle lie in different banks.
constexpr int kVector = CELLS * sizeof(accumulate_t) < 16 ? CELLS : 16 / static_cast<int>(sizeof(accumulate_t));
constexpr int kBanks = CELLS / kVector;
constexpr int kWindow = (CELLS + kHaloW + kVector - 1) / kVector;  // vectors of a window
constexpr int kPatchH = TILE_H + kHaloH, kPatchW = kTileW + kHaloW;
constexpr int kRunPitch = (LANES_W + (kWindow - 1) / kBanks) * kVector;
constexpr int kRead = LANES_W * kVector, kRowWords = kBanks * kRunPitch;  // of a row: by a warp at once, and in all
constexpr int kPad = kRead * kSumBytes < 128 ? (3 * kRead - kRowWords % (2 * kRead)) % (2 * kRead) : 0;
constexpr int kPitch = kRowWords + kPad;  // an odd multiple of kRead
constexpr int kChannelPitch = kPatchH * kPitch;
struct alignas(kVector * sizeof(accumulate_t)) window_t { accumulate_t value[kVector]; };

// Weights [TILE_PLANES][TILE_IN][K_H][kQuads], a tap row being [K_W][TILE_OUT] in whole quads.
constexpr int kQuads = (KERNEL_W * TILE_OUT + 3) / 4;
constexpr int kTapRows = axis_h::taps(0);  // of a phase, at most
constexpr bool kUnrollsTaps = axis_h::kEven && kTapRows * KERNEL_W * TILE_OUT * CELLS <= 512;

using sums_t = accumulate_t[TILE_OUT][CELLS][axis_w::kPhases];
using biases_t = accumulate_t[TILE_OUT];
constexpr int kSums = TILE_OUT * CELLS * axis_w::kPhases;

// SHARED_BYTES is what the launch gives: to patch and weights, then to the parts' sums, then to the stages of stores.
constexpr int kPatchBytes = (TILE_PLANES * TILE_IN * kChannelPitch * kSumBytes + 15) / 16 * 16;
constexpr int kWeightBytes = TILE_PLANES * TILE_IN * KERNEL_H * kQuads * 4 * kSumBytes;
static_assert(kPatchBytes + kWeightBytes <= SHARED_BYTES, "patch and weights do not fit the launch's shared memory");
static_assert((SPLIT_IN - 1) * kSums * kPartThreads * kSumBytes <= SHARED_BYTES, "nor do the parts' sums");
static_assert(kPartThreads % 32 == 0, "the threads of a warp share their part of the channels");

/* Where a thread stands in the tile. */
struct place_t { int lane, row, phase, plane, part; };
__device__ __forceinline__ place_t place_of(int thread) {
    const int rest = thread / (LANES_W * TILE_H);
    return {thread % LANES_W, thread / LANES_W % TILE_H, rest % TILE_PHASES, rest / TILE_PHASES % TILE_PLANES,
            thread / kPartThreads};
}

/* First plane, output channel and cell of a block. */
struct tile_t { int first_plane, first_out, cell_row, cell_column; };

__device__ __forceinline__ accumulate_t bias_of(const ELEMENT_T* __restrict__ bias, int group, int out) {
    if (bias == nullptr || out >= OUT_CHANNELS) return 0;
    return widen(load_once(bias + group * OUT_CHANNELS + out));
}

/* Offset of an output pixel's first channel of the tile, or in NCHW of the pixel in that channel's image. */
__device__ __forceinline__ long long output_offset(const direct_forward_params& p, int plane, int first_out, int oh, int ow) {
    const index_t pixel = static_cast<index_t>(oh) * p.w_out + ow;
    const long long pixels = static_cast<index_t>(p.h_out) * p.w_out;
#if CHANNELS_LAST
    const int image = plane / p.groups, group = plane - image * p.groups;
    return (image * pixels + pixel) * (p.groups * OUT_CHANNELS) + group * OUT_CHANNELS + first_out;
#else
    return (static_cast<long long>(plane) * OUT_CHANNELS + first_out) * pixels + pixel;
#endif
}

#include "load/stage.cuh"

/* Products of one tap row: patch points at its first window element, quads at its weights. */
__device__ __forceinline__ void add_tap_row(
    sums_t& sum, const accumulate_t* __restrict__ patch, const weight_quad_t* __restrict__ quads) {
    accumulate_t window[kWindow * kVector];
    #pragma unroll
    for (int v = 0; v < kWindow; ++v) {
        const window_t part = *reinterpret_cast<const window_t*>(patch + v % kBanks * kRunPitch + v / kBanks * kVector);
        #pragma unroll
        for (int e = 0; e < kVector; ++e) window[v * kVector + e] = part.value[e];
    }
    #pragma unroll
    for (int q = 0; q < kQuads; ++q) {
        const weight_quad_t quad = quads[q];
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int kw = (q * 4 + e) / TILE_OUT, out = (q * 4 + e) % TILE_OUT;
            if (kw >= KERNEL_W) continue;
            #pragma unroll
            for (int cell = 0; cell < CELLS; ++cell)
                sum[out][cell][kw % axis_w::kStep] += quad.value[e] * window[cell + axis_w::shift(kw) - kFirstW];
        }
    }
}

/* Add up the sums of all parts in the threads of the first, in their order. */
__device__ __forceinline__ void add_parts(sums_t& sum, int part) {
    accumulate_t* flat = &sum[0][0][0];
    accumulate_t* exchange = reinterpret_cast<accumulate_t*>(shared) + threadIdx.x % kPartThreads;
    __syncthreads();
    if (part > 0)
        #pragma unroll
        for (int i = 0; i < kSums; ++i) exchange[((part - 1) * kSums + i) * kPartThreads] = flat[i];
    __syncthreads();
    if (part == 0)
        #pragma unroll
        for (int other = 0; other < SPLIT_IN - 1; ++other)
            #pragma unroll
            for (int i = 0; i < kSums; ++i) flat[i] += exchange[(other * kSums + i) * kPartThreads];
}

struct bias_rows_t { int output[STRIDE_H - axis_h::kPhases + 1]; };
__device__ constexpr bias_rows_t kBiasRows = [] {
    bias_rows_t rows{};
    for (int r = 0, i = 0; r < STRIDE_H; ++r)
        if (axis_h::phase(r) == kNone) rows.output[i++] = r;
    return rows;
}();

constexpr int kOutTiles = ceil_div(OUT_CHANNELS, TILE_OUT);
constexpr int kBiasRowsOfCell = STRIDE_H - axis_h::kPhases + (STRIDE_H == axis_h::kPhases);  // at least one, to divide by

#if !CHANNELS_LAST
/* Store the output rows that no tap reaches, a warp one row of the tile after the other. */
__device__ __forceinline__ void store_bias_rows(const direct_forward_params& p, const tile_t& tile) {
    constexpr int kLength = kTileW * STRIDE_W;
    const int ow = tile.cell_column * STRIDE_W, elements = min(kLength, p.w_out - ow);
    const int lane_element = threadIdx.x % 32 * VECTOR;
    #pragma unroll 1
    for (int line = threadIdx.x / 32; line < kBiasRowsOfCell * TILE_H * TILE_PLANES; line += kThreads / 32) {
        const int row = line / kBiasRowsOfCell, plane = tile.first_plane + row / TILE_H;
        const int oh = (tile.cell_row + row % TILE_H) * STRIDE_H + kBiasRows.output[line % kBiasRowsOfCell];
        const int group = plane % p.groups;
        if (oh >= p.h_out || plane >= p.planes) continue;
        ELEMENT_T* __restrict__ target = p.output + output_offset(p, plane, tile.first_out, oh, ow) + lane_element;
        #pragma unroll 1
        for (int out = tile.first_out; out < least(OUT_CHANNELS, tile.first_out + TILE_OUT); ++out) {
            vector_t<VECTOR> values;
            #pragma unroll
            for (int e = 0; e < VECTOR; ++e) values.value[e] = narrow<ELEMENT_T>(bias_of(p.bias, group, out));
            #pragma unroll (kLength <= 32 * 16 * VECTOR ? kLength / 32 / VECTOR + 1 : 4)
            for (int first = 0; first < kLength; first += 32 * VECTOR)
                if (first + lane_element < elements) *reinterpret_cast<vector_t<VECTOR>*>(target + first) = values;
            target += static_cast<index_t>(p.h_out) * p.w_out;
        }
    }
}

#else
/* Store the output rows that no tap reaches, in whole pixels: the blocks that own channels of them take pixels in turn, and
 * a thread the same channels of each.
 */
__device__ __forceinline__ void store_bias_rows(const direct_forward_params& p, const tile_t& tile) {
    if (tile.first_plane >= p.planes) return;
    const int first_group = tile.first_plane % p.groups, channels = p.groups * OUT_CHANNELS;
    const int owners = p.groups / TILE_PLANES * kOutTiles;  // the block's planes are of one image
    const int owner = first_group / TILE_PLANES * kOutTiles + tile.first_out / TILE_OUT;
    const int vectors = channels / VECTOR, pixels_at_once = max(1, kThreads / vectors);
    const int row0 = tile.cell_row * STRIDE_H, ow = tile.cell_column * STRIDE_W;
    const int width = min(kTileW * STRIDE_W, p.w_out - ow), step = owners * pixels_at_once;
    ELEMENT_T* __restrict__ output = p.output + output_offset(p, tile.first_plane - first_group, 0, row0, ow);
    #pragma unroll 1
    for (int i = threadIdx.x; i < pixels_at_once * vectors; i += kThreads) {
        int pixel = i / vectors;
        const int channel = (i - pixel * vectors) * VECTOR;
        vector_t<VECTOR> values;
        #pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            values.value[e] = p.bias == nullptr ? ELEMENT_T{} : load_once(p.bias + channel + e);
        pixel += owner * pixels_at_once;
        #pragma unroll 1
        for (int line = 0; line < kBiasRowsOfCell * TILE_H; ++line) {
            const int row = line / kBiasRowsOfCell * STRIDE_H + kBiasRows.output[line % kBiasRowsOfCell];
            if (row0 + row >= p.h_out) continue;
            ELEMENT_T* __restrict__ target =
                output + ((static_cast<long long>(row) * p.w_out + pixel) * channels + channel);
            #pragma unroll 4
            for (; pixel < width; pixel += step, target += static_cast<long long>(step) * channels)
                *reinterpret_cast<vector_t<VECTOR>*>(target) = values;
            pixel -= width;  // in the next line
        }
    }
}
#endif

/* One output of a thread: of a channel of the tile, pixel-th in the row. The bias comes last: were sums stored as they
 * are, the compiler would hold them in the registers of their vectors all along, with gaps for columns without sums.
 */
__device__ __forceinline__ ELEMENT_T output_of(const sums_t& sum, const biases_t& bias, int out, int pixel) {
    const int phase = kColumnPhases.of[pixel % STRIDE_W];
    return narrow<ELEMENT_T>(bias[out] + (phase == kNone ? 0 : sum[out][pixel / STRIDE_W][phase < 0 ? 0 : phase]));
}

#if !CHANNELS_LAST
/* Store what the threads of a warp own, lines of cell rows. */
__device__ __forceinline__ void store_sums(
    const direct_forward_params& p, const tile_t& tile, const sums_t& sum, const biases_t& bias, int first_phase) {
    constexpr int kStageBytes = SHARED_BYTES / (kPartThreads / 32) / 16 * 16;  // of a warp
    const index_t out_pixels = static_cast<index_t>(p.h_out) * p.w_out;
    const int warp = threadIdx.x / 32, ow = tile.cell_column * STRIDE_W;
    const place_t first = place_of(warp * 32);
    const auto value = [&](int out, int pixel) { return output_of(sum, bias, out, pixel); };
    const auto line_of = [&](int thread) {
        place_t place = first;  // most warps stay within a phase of a plane
        if (TILE_H * LANES_W % 32 == 0) place.row += thread / LANES_W;
        else place = place_of(warp * 32 + thread);
        const int phase = first_phase + place.phase, plane = tile.first_plane + place.plane;
        const int oh = (tile.cell_row + place.row) * STRIDE_H + axis_h::output(phase);
        const bool inside = phase < axis_h::kPhases && plane < p.planes && oh < p.h_out;
        const index_t image = place.plane * OUT_CHANNELS * out_pixels;
        return line_t{image + static_cast<index_t>(oh) * p.w_out + ow, inside ? p.w_out - ow : 0};
    };
    store_runs<TILE_OUT, kNeighbours, LANES_W, VECTOR, kStageBytes>(
        p.output + output_offset(p, tile.first_plane, tile.first_out, 0, 0),
        reinterpret_cast<ELEMENT_T*>(shared + warp * kStageBytes),
        OUT_CHANNELS % TILE_OUT == 0 ? TILE_OUT : OUT_CHANNELS - tile.first_out,
        out_pixels, value, line_of);
}

#else
/* Store the channels of the pixels that a warp's threads own, a pixel by itself. */
__device__ __forceinline__ void store_sums(
    const direct_forward_params& p, const tile_t& tile, const sums_t& sum, const biases_t& bias, int first_phase) {
    constexpr int kStageBytes = SHARED_BYTES / (kPartThreads / 32) / 16 * 16;  // of a warp
    const int warp = threadIdx.x / 32;
    const auto value = [&](int pixel, int out) { return output_of(sum, bias, out, pixel); };
    const auto runs_of = [&](int thread) {
        const place_t place = place_of(warp * 32 + thread);
        const int phase = first_phase + place.phase, plane = tile.first_plane + place.plane;
        const int oh = (tile.cell_row + place.row) * STRIDE_H + axis_h::output(phase);
        const int ow = (tile.cell_column + place.lane * CELLS) * STRIDE_W;
        const bool inside = phase < axis_h::kPhases && plane < p.planes && oh < p.h_out;
        return apart_t{output_offset(p, plane, tile.first_out, oh, ow), inside ? p.w_out - ow : 0};
    };
    store_runs_apart<kNeighbours, TILE_OUT, VECTOR, kStageBytes>(
        p.output, reinterpret_cast<ELEMENT_T*>(shared + warp * kStageBytes),
        OUT_CHANNELS % TILE_OUT == 0 ? TILE_OUT : OUT_CHANNELS - tile.first_out,
        static_cast<index_t>(p.groups * OUT_CHANNELS), value, runs_of);
}
#endif

__device__ __forceinline__ void direct_block(const direct_forward_params& p) {
    const int tile_index = blockIdx.x / kOutTiles;
    const tile_t tile = {static_cast<int>(blockIdx.y + gridDim.y * blockIdx.z) * TILE_PLANES,
                         static_cast<int>(blockIdx.x % kOutTiles) * TILE_OUT, tile_index / p.tiles_w * TILE_H,
                         tile_index % p.tiles_w * kTileW};
    const place_t place = place_of(threadIdx.x);
    const int plane = tile.first_plane + place.plane, group = plane % p.groups;
    accumulate_t* patch = reinterpret_cast<accumulate_t*>(shared);
    weight_quad_t* weights = reinterpret_cast<weight_quad_t*>(shared + kPatchBytes);
    if (axis_h::kPhases < STRIDE_H) store_bias_rows(p, tile);

    #pragma unroll 1
    for (int first_phase = 0; first_phase < axis_h::kPhases; first_phase += TILE_PHASES) {
        const int phase = first_phase + place.phase;
        const int oh = (tile.cell_row + place.row) * STRIDE_H + axis_h::output(phase);
        const int ow = (tile.cell_column + place.lane * CELLS) * STRIDE_W;
        const bool working = phase < axis_h::kPhases && plane < p.planes && oh < p.h_out && ow < p.w_out;

        sums_t sum;
        #pragma unroll
        for (int i = 0; i < kSums; ++i) (&sum[0][0][0])[i] = 0;

        #pragma unroll 1
        for (int first_in = 0; first_in < IN_CHANNELS; first_in += TILE_IN) {
            __syncthreads();
            stage_patch(p, patch, tile, first_in);
            stage_weights(p, &weights->value[0], tile, first_in);
            __syncthreads();

            if (!working) continue;
            const int channels = IN_CHANNELS % TILE_IN == 0 ? TILE_IN : min(TILE_IN, IN_CHANNELS - first_in);
            const accumulate_t* __restrict__ rows =
                patch + (place.plane * TILE_IN + place.part) * kChannelPitch +
                (place.row + axis_h::shift(phase) - kFirstH) * kPitch + place.lane * kVector;
            const weight_quad_t* __restrict__ quads =
                weights + ((place.plane * TILE_IN + place.part) * KERNEL_H + phase) * kQuads;
            #pragma unroll 1
            for (int in = place.part; in < channels; in += SPLIT_IN) {
                #pragma unroll (kUnrollsTaps ? kTapRows : 1)
                for (int tap = 0; tap < axis_h::taps(phase); ++tap)
                    add_tap_row(
                        sum, rows - tap * (axis_h::kShiftStep * kPitch), quads + tap * (axis_h::kStep * kQuads));
                rows += SPLIT_IN * kChannelPitch;
                quads += SPLIT_IN * KERNEL_H * kQuads;
            }
        }

        if (SPLIT_IN > 1) add_parts(sum, place.part);
        __syncthreads();
        if (place.part > 0) continue;
        biases_t bias;
        #pragma unroll
        for (int out = 0; out < TILE_OUT; ++out) bias[out] = bias_of(p.bias, group, tile.first_out + out);
        store_sums(p, tile, sum, bias, first_phase);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads, LEAST_BLOCKS)
direct_forward_kernel(const __grid_constant__ direct_forward_params p) {
    direct_block(p);
}
