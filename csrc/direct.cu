/* direct: transposed convolution as one gather, no workspace. For layers whose work is moving bytes.
 *
 *   input [N, C_in, H_in, W_in], weight [C_in, C_out/G, K_H, K_W] -> output [N, C_out, H_out, W_out]
 *   output[co, oh, ow] = bias[co] + sum over ci, kh, kw of input[ci, ih, iw] * weight[ci, co, kh, kw]
 *   with ih = (oh + P_H - kh*D_H) / S_H and iw likewise, where they are whole and inside (see col2im.cu)
 *
 * Cells. Output o = j*S + r belongs to cell j and is its r-th output. It reads tap k iff S divides r + P - k*D, and then
 * input j + (r + P - k*D) / S: a shift that does not depend on j. All outputs of a cell read around input j.
 *
 *   S=2 P=1 K=4 D=1:  r=0 reads k=1 at j, k=3 at j-1;  r=1 reads k=0 at j+1, k=2 at j
 *
 * A plane is a group of an image: IN_CHANNELS input channels, OUT_CHANNELS output channels. A block owns, for TILE_PLANES
 * planes and TILE_OUT output channels of each, TILE_H x TILE_W cells, hence whole stretches of S_H*TILE_H output rows with
 * all their column phases. A thread owns CELLS cells of one cell row. TILE_PHASES row phases are worked on at a time, by
 * threads of their own; a row phase without taps costs only its stores.
 *
 * With CELLS * S_W * TILE_OUT accumulators, for each input channel and each tap row of its phase a thread reads a window of
 * the input into registers, then four weights at a time from shared memory, the same for all threads of a plane; every
 * weight serves CELLS products. Which window element an accumulator takes with which tap is known when compiling.
 *
 * The window comes from a patch of the input that the block stages in shared memory, TILE_IN channels at a time, as
 * accumulate_t and zero outside the image (STAGED); or straight from global memory, where neighbouring threads read
 * neighbouring values and there is too little arithmetic to wait for a patch (depthwise, channels_last groups).
 *
 * Stores. In NCHW, a thread's CELLS * S_W outputs of a row are neighbours. Where they make one aligned vector
 * (VECTOR_CELLS) it stores them so; else a warp turns them round in shared memory and stores VECTOR neighbours a thread.
 * In channels_last the threads of a warp are neighbouring planes, and each stores its channels.
 *
 * Macros: ELEMENT_T; KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W; IN_CHANNELS, OUT_CHANNELS (of a group);
 * CHANNELS_LAST, STAGED; LANES_W, CELLS (TILE_W = LANES_W * CELLS), TILE_H, TILE_PHASES, TILE_PLANES, TILE_IN, TILE_OUT;
 * VECTOR, VECTOR_CELLS; SHARED_BYTES, INDEX_64. Chosen by gemmconv/algorithms/direct.py.
 */
#include "common/index.cuh"
#include "common/numeric.cuh"
#include "common/phase.cuh"

struct direct_params {
    const ELEMENT_T* __restrict__ input;
    const ELEMENT_T* __restrict__ weight;
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    int planes, groups;                  // planes = N * groups
    int h_in, w_in, h_out, w_out;
    int tiles_w;                         // blockIdx.x = (tile row * tiles_w + tile column) * channel tiles + channel tile
};

using accumulate_t = accumulator_t<ELEMENT_T>;

constexpr int kTileW = LANES_W * CELLS;
constexpr int kThreads = LANES_W * TILE_H * TILE_PHASES * TILE_PLANES;
constexpr int kOutTiles = (OUT_CHANNELS + TILE_OUT - 1) / TILE_OUT;
constexpr int kChunks = (IN_CHANNELS + TILE_IN - 1) / TILE_IN;
constexpr int kStepH = tap_step(STRIDE_H, DILATION_H);
constexpr int kNone = 1 << 30;

/* Shift from a cell to the input that its r-th output reads through tap k, or kNone. */
__device__ constexpr int shift_of(int r, int k, int stride, int padding, int dilation) {
    const int reach = r + padding - k * dilation;
    return reach % stride == 0 ? reach / stride : kNone;
}
/* Least shift of an axis (sign 1), or minus the largest (sign -1). */
__device__ constexpr int extreme_shift(int sign, int kernel, int stride, int padding, int dilation) {
    int extreme = kNone;
    for (int k = 0; k < kernel; ++k)
        for (int r = 0; r < stride; ++r) {
            const int shift = shift_of(r, k, stride, padding, dilation);
            if (shift != kNone && sign * shift < extreme) extreme = sign * shift;
        }
    return extreme;
}
constexpr int kFirstH = extreme_shift(1, KERNEL_H, STRIDE_H, PADDING_H, DILATION_H);
constexpr int kFirstW = extreme_shift(1, KERNEL_W, STRIDE_W, PADDING_W, DILATION_W);
constexpr int kHaloH = -extreme_shift(-1, KERNEL_H, STRIDE_H, PADDING_H, DILATION_H) - kFirstH;
constexpr int kHaloW = -extreme_shift(-1, KERNEL_W, STRIDE_W, PADDING_W, DILATION_W) - kFirstW;

// Patch: rows of kPatchW values, padded so that a thread may read its window in whole vectors of CELLS.
constexpr int kPatchH = TILE_H + kHaloH;
constexpr int kPatchW = kTileW + kHaloW;
constexpr int kWindow = (CELLS + kHaloW + CELLS - 1) / CELLS;  // vectors of a window
constexpr int kPitch = kTileW + (kWindow - 1) * CELLS;
#if CHANNELS_LAST
constexpr int kPlanePitch = TILE_IN * kPatchH * kPitch + (TILE_IN * kPatchH * kPitch % 2 == 0 ? CELLS % 2 : 0);
#else
constexpr int kPlanePitch = TILE_IN * kPatchH * kPitch;
#endif

// Weights of a plane's input channel and tap row: [K_W][TILE_OUT], padded to whole quads.
constexpr int kQuads = (KERNEL_W * TILE_OUT + 3) / 4;
struct alignas(16) weight_quad_t { accumulate_t value[4]; };
struct alignas(CELLS * sizeof(accumulate_t) > 16 ? 16 : CELLS * sizeof(accumulate_t)) window_t { accumulate_t value[CELLS]; };

constexpr int kNeighbours = CELLS * STRIDE_W;  // outputs of a thread in a row
constexpr int kStageOut = kNeighbours * TILE_OUT <= 32 ? TILE_OUT : (kNeighbours < 32 ? 32 / kNeighbours : 1);
constexpr bool kStages = !CHANNELS_LAST && !VECTOR_CELLS;
// Little arithmetic: unroll all of it, so that every load is in flight at once and phases share what they read.
constexpr bool kUnrolled = !STAGED && IN_CHANNELS * OUT_CHANNELS == 1 && KERNEL_H * STRIDE_H <= 64;
template <int COUNT> struct alignas(COUNT * sizeof(ELEMENT_T)) vector_t { ELEMENT_T value[COUNT]; };

// Shared memory: patch [TILE_PLANES][TILE_IN][kPatchH][kPitch], weights [TILE_PLANES][TILE_IN][K_H][kQuads] of quads,
// stage [warps][kStageOut][cells of the warp]. SHARED_BYTES is what the launch gives.
constexpr int kPatchBytes = !STAGED ? 0 : (TILE_PLANES * kPlanePitch * static_cast<int>(sizeof(accumulate_t)) + 15) / 16 * 16;
constexpr int kWeightBytes = TILE_PLANES * TILE_IN * KERNEL_H * kQuads * static_cast<int>(sizeof(weight_quad_t));
constexpr int kStageElements = kStages ? kStageOut * 32 * kNeighbours : 0;  // of a warp
static_assert(kPatchBytes + kWeightBytes + kThreads / 32 * kStageElements * sizeof(ELEMENT_T) <= SHARED_BYTES,
              "the tile does not fit the shared memory of the launch");
extern __shared__ __align__(16) unsigned char shared[];

/* Where a thread or a block's thread number stands in the tile. */
struct place_t { int lane, row, phase, plane; };
__device__ __forceinline__ place_t place_of(int thread) {
#if CHANNELS_LAST
    const int rest = thread / TILE_PLANES;
    return {rest % LANES_W, rest / LANES_W % TILE_H, rest / (LANES_W * TILE_H), thread % TILE_PLANES};
#else
    const int rest = thread / (LANES_W * TILE_H);
    return {thread % LANES_W, thread / LANES_W % TILE_H, rest % TILE_PHASES, rest / TILE_PHASES};
#endif
}

/* Fill the patch, zero outside the image and beyond the last channel or plane. */
__device__ __forceinline__ void stage_patch(
    const direct_params& p, accumulate_t* patch, int first_plane, int first_in, int row0, int column0) {
    const index_t in_pixels = static_cast<index_t>(p.h_in) * p.w_in;
#if CHANNELS_LAST
    // Channels innermost: the block's planes divide the groups, so they are neighbouring channels of one image.
    constexpr int kCount = TILE_PLANES * TILE_IN * kPatchH * kPatchW;
    const int image = first_plane / p.groups, first_group = first_plane - image * p.groups;
    const index_t channels = static_cast<index_t>(p.groups) * IN_CHANNELS;
    const ELEMENT_T* __restrict__ source = p.input + image * static_cast<long long>(in_pixels) * channels;
    #pragma unroll 4
    for (int i = threadIdx.x; i < kCount; i += kThreads) {
        const int in = i % TILE_IN, plane = i / TILE_IN % TILE_PLANES;
        const int column = i / (TILE_IN * TILE_PLANES) % kPatchW, row = i / (TILE_IN * TILE_PLANES * kPatchW);
        const int ih = row0 + row, iw = column0 + column;
        const bool inside = static_cast<unsigned>(ih) < p.h_in && static_cast<unsigned>(iw) < p.w_in &&
                            first_in + in < IN_CHANNELS && first_plane + plane < p.planes;
        const index_t pixel = static_cast<index_t>(ih) * p.w_in + iw;
        const index_t channel = (first_group + plane) * IN_CHANNELS + first_in + in;
        patch[plane * kPlanePitch + (in * kPatchH + row) * kPitch + column] =
            inside ? widen(load_once(source + (pixel * channels + channel))) : accumulate_t(0);
    }
#else
    // A warp fills one row of the patch after the other: only its columns differ between threads.
    constexpr int kLines = TILE_PLANES * TILE_IN * kPatchH, kWarps = kThreads / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll 4
    for (int line = warp; line < kLines; line += kWarps) {
        const int row = line % kPatchH, in = line / kPatchH % TILE_IN, plane = line / (kPatchH * TILE_IN);
        const int ih = row0 + row;
        const bool inside = static_cast<unsigned>(ih) < p.h_in && first_in + in < IN_CHANNELS && first_plane + plane < p.planes;
        const long long channel = static_cast<long long>(first_plane + plane) * IN_CHANNELS + first_in + in;
        const ELEMENT_T* __restrict__ source = p.input + channel * in_pixels + (static_cast<index_t>(ih) * p.w_in + column0);
        accumulate_t* target = patch + plane * kPlanePitch + (in * kPatchH + row) * kPitch;
        #pragma unroll
        for (int c = 0; c < kPatchW; c += 32) {
            const int column = c + lane;
            if (c + 32 > kPatchW && column >= kPatchW) continue;
            const bool taken = inside && static_cast<unsigned>(column0 + column) < p.w_in;
            target[column] = taken ? widen(load_once(source + column)) : accumulate_t(0);
        }
    }
#endif
}

/* Lay out the weights as the quads that are read together, zero beyond the last channel or tap. */
__device__ __forceinline__ void stage_weights(
    const direct_params& p, accumulate_t* target, int first_plane, int first_in, int first_out) {
    constexpr int kCount = TILE_PLANES * TILE_IN * KERNEL_H * kQuads * 4;
    for (int i = threadIdx.x; i < kCount; i += kThreads) {
        const int out = i % (kQuads * 4) % TILE_OUT, kw = i % (kQuads * 4) / TILE_OUT;
        const int kh = i / (kQuads * 4) % KERNEL_H;
        const int in = i / (kQuads * 4 * KERNEL_H) % TILE_IN, plane = i / (kQuads * 4 * KERNEL_H * TILE_IN);
        const int group = (first_plane + plane) % p.groups;
        const bool inside = kw < KERNEL_W && first_in + in < IN_CHANNELS && first_out + out < OUT_CHANNELS;
        const long long channel = static_cast<long long>(group) * IN_CHANNELS + first_in + in;
        const long long offset = ((channel * OUT_CHANNELS + first_out + out) * KERNEL_H + kh) * KERNEL_W + kw;
        target[i] = inside ? widen(load_once(p.weight + offset)) : accumulate_t(0);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) direct_forward_kernel(const __grid_constant__ direct_params p) {
    // Index decode.
    const int out_tile = blockIdx.x % kOutTiles, tile = blockIdx.x / kOutTiles;
    const int first_out = out_tile * TILE_OUT;
    const int cell_row0 = tile / p.tiles_w * TILE_H, cell_column0 = tile % p.tiles_w * kTileW;
    const int first_plane = static_cast<int>(blockIdx.y + gridDim.y * blockIdx.z) * TILE_PLANES;
    const place_t place = place_of(threadIdx.x);
    const int plane = first_plane + place.plane;
    const int group = plane % p.groups;
    const index_t out_pixels = static_cast<index_t>(p.h_out) * p.w_out;
    weight_quad_t* weights = reinterpret_cast<weight_quad_t*>(shared + kPatchBytes);

#if STAGED
    accumulate_t* patch = reinterpret_cast<accumulate_t*>(shared);
#else
    // The first input that the thread's windows reach, in the row of its cells.
    const int in_row = cell_row0 + place.row, in_column = cell_column0 + place.lane * CELLS + kFirstW;
#if CHANNELS_LAST
    const int image = plane / p.groups;
    const index_t pixel_stride = static_cast<index_t>(p.groups) * IN_CHANNELS, channel_stride = 1;
    const ELEMENT_T* __restrict__ plane_input =
        p.input + image * (static_cast<long long>(p.h_in) * p.w_in) * pixel_stride + group * IN_CHANNELS;
#else
    const index_t pixel_stride = 1, channel_stride = static_cast<index_t>(p.h_in) * p.w_in;
    const ELEMENT_T* __restrict__ plane_input = p.input + static_cast<long long>(plane) * IN_CHANNELS * channel_stride;
#endif
    stage_weights(p, &weights->value[0], first_plane, 0, first_out);
    __syncthreads();
#endif

    #pragma unroll (kUnrolled ? (STRIDE_H + TILE_PHASES - 1) / TILE_PHASES : 1)
    for (int rh0 = 0; rh0 < STRIDE_H; rh0 += TILE_PHASES) {
        const int rh = rh0 + place.phase;
        const int first_kh = rh < STRIDE_H ? first_tap<KERNEL_H, STRIDE_H, DILATION_H>(rh + PADDING_H) : KERNEL_H;

        accumulate_t sum[TILE_OUT][CELLS][STRIDE_W];
        #pragma unroll
        for (int out = 0; out < TILE_OUT; ++out) {
            const bool biased = p.bias != nullptr && first_out + out < OUT_CHANNELS;
            const accumulate_t bias = biased ? widen(load_once(p.bias + group * OUT_CHANNELS + first_out + out)) : 0;
            #pragma unroll
            for (int cell = 0; cell < CELLS; ++cell)
                #pragma unroll
                for (int rw = 0; rw < STRIDE_W; ++rw) sum[out][cell][rw] = bias;
        }

        for (int chunk = 0; chunk < kChunks; ++chunk) {
#if STAGED
            // Load: once where one chunk holds all input channels, else for every turn of row phases anew.
            if (TILE_PHASES == 1 && kChunks > 1 && first_kh >= KERNEL_H) break;  // the whole block's phase has no tap
            if (kChunks > 1 || rh0 == 0) {
                __syncthreads();
                stage_patch(p, patch, first_plane, chunk * TILE_IN, cell_row0 + kFirstH, cell_column0 + kFirstW);
                stage_weights(p, &weights->value[0], first_plane, chunk * TILE_IN, first_out);
                __syncthreads();
            }
            const accumulate_t* __restrict__ plane_patch =
                patch + place.plane * kPlanePitch + (place.row - kFirstH) * kPitch + place.lane * CELLS;
#endif

            // Compute.
            const int channels = kChunks == 1 ? IN_CHANNELS : min(TILE_IN, IN_CHANNELS - chunk * TILE_IN);
            const weight_quad_t* __restrict__ plane_weights = weights + place.plane * TILE_IN * KERNEL_H * kQuads;
            #pragma unroll 1
            for (int in = 0; in < channels; ++in) {
                #pragma unroll (kUnrolled ? (KERNEL_H + kStepH - 1) / kStepH : 1)
                for (int kh = first_kh; kh < KERNEL_H; kh += kStepH) {
                    const int shift_h = (rh + PADDING_H - kh * DILATION_H) / STRIDE_H;  // the division is exact
                    accumulate_t window[kWindow * CELLS];
#if STAGED
                    #pragma unroll
                    for (int v = 0; v < kWindow; ++v) {
                        const window_t part =
                            *reinterpret_cast<const window_t*>(plane_patch + (in * kPatchH + shift_h) * kPitch + v * CELLS);
                        #pragma unroll
                        for (int cell = 0; cell < CELLS; ++cell) window[v * CELLS + cell] = part.value[cell];
                    }
#else
                    const int ih = in_row + shift_h;
                    const ELEMENT_T* __restrict__ row =
                        plane_input + (in * channel_stride + (static_cast<index_t>(ih) * p.w_in + in_column) * pixel_stride);
                    #pragma unroll
                    for (int i = 0; i < CELLS + kHaloW; ++i) {
                        const bool inside = plane < p.planes && static_cast<unsigned>(ih) < p.h_in &&
                                            static_cast<unsigned>(in_column + i) < p.w_in;
                        window[i] = inside ? widen(load_once(row + i * pixel_stride)) : accumulate_t(0);
                    }
#endif
                    #pragma unroll
                    for (int q = 0; q < kQuads; ++q) {
                        const weight_quad_t quad = plane_weights[(in * KERNEL_H + kh) * kQuads + q];
                        #pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int kw = (q * 4 + e) / TILE_OUT, out = (q * 4 + e) % TILE_OUT;
                            if (kw >= KERNEL_W) continue;
                            #pragma unroll
                            for (int rw = 0; rw < STRIDE_W; ++rw) {
                                const int shift_w = shift_of(rw, kw, STRIDE_W, PADDING_W, DILATION_W);
                                if (shift_w == kNone) continue;
                                #pragma unroll
                                for (int cell = 0; cell < CELLS; ++cell)
                                    sum[out][cell][rw] += quad.value[e] * window[cell + shift_w - kFirstW];
                            }
                        }
                    }
                }
            }
        }

        // Store.
#if CHANNELS_LAST
        const int oh = (cell_row0 + place.row) * STRIDE_H + rh, out_channels = p.groups * OUT_CHANNELS;
        const int ow0 = (cell_column0 + place.lane * CELLS) * STRIDE_W;
        if (plane < p.planes && rh < STRIDE_H && oh < p.h_out) {
            ELEMENT_T* __restrict__ target =
                p.output + (static_cast<long long>(plane / p.groups) * out_pixels + static_cast<index_t>(oh) * p.w_out + ow0) * out_channels +
                group * OUT_CHANNELS + first_out;
            #pragma unroll
            for (int cell = 0; cell < CELLS; ++cell)
                #pragma unroll
                for (int rw = 0; rw < STRIDE_W; ++rw) {
                    if (ow0 + cell * STRIDE_W + rw >= p.w_out) continue;
                    ELEMENT_T* __restrict__ pixel = target + static_cast<index_t>(cell * STRIDE_W + rw) * out_channels;
                    #pragma unroll
                    for (int out = 0; out < TILE_OUT; out += VECTOR) {
                        vector_t<VECTOR> values;
                        #pragma unroll
                        for (int v = 0; v < VECTOR; ++v) values.value[v] = narrow<ELEMENT_T>(sum[out + v][cell][rw]);
                        if (first_out + out < OUT_CHANNELS) *reinterpret_cast<vector_t<VECTOR>*>(pixel + out) = values;
                    }
                }
        }
#elif VECTOR_CELLS
        const int oh = (cell_row0 + place.row) * STRIDE_H + rh;
        const int ow = (cell_column0 + place.lane * CELLS) * STRIDE_W;
        if (plane < p.planes && rh < STRIDE_H && oh < p.h_out && ow < p.w_out) {
            #pragma unroll
            for (int out = 0; out < TILE_OUT; ++out) {
                if (first_out + out >= OUT_CHANNELS) break;
                vector_t<kNeighbours> values;
                #pragma unroll
                for (int i = 0; i < kNeighbours; ++i)
                    values.value[i] = narrow<ELEMENT_T>(sum[out][i / STRIDE_W][i % STRIDE_W]);
                const long long channel = static_cast<long long>(plane) * OUT_CHANNELS + first_out + out;
                *reinterpret_cast<vector_t<kNeighbours>*>(
                    p.output + channel * out_pixels + (static_cast<index_t>(oh) * p.w_out + ow)) = values;
            }
        }
#else
        // A warp's stage is [kStageOut][its cells in order], each line of a cell row LANES_W * kNeighbours long.
        constexpr int kLine = LANES_W * kNeighbours;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        ELEMENT_T* stage = reinterpret_cast<ELEMENT_T*>(shared + kPatchBytes + kWeightBytes) + warp * kStageElements;
        #pragma unroll
        for (int out0 = 0; out0 < TILE_OUT; out0 += kStageOut) {
            __syncwarp();
            #pragma unroll
            for (int o = 0; o < kStageOut; ++o) {
                if (out0 + o >= TILE_OUT) continue;
                #pragma unroll
                for (int i = 0; i < kNeighbours; ++i)
                    stage[(o * 32 + lane) * kNeighbours + i] =
                        narrow<ELEMENT_T>(sum[out0 + o][i / STRIDE_W][i % STRIDE_W]);
            }
            __syncwarp();
            #pragma unroll
            for (int v = 0; v < kNeighbours / VECTOR; ++v) {
                const int item = (v * 32 + lane) * VECTOR;
                const place_t line = place_of(warp * 32 + item / kLine * LANES_W);
                const int line_rh = rh0 + line.phase;
                const int oh = (cell_row0 + line.row) * STRIDE_H + line_rh, ow = cell_column0 * STRIDE_W + item % kLine;
                if (first_plane + line.plane >= p.planes || line_rh >= STRIDE_H || oh >= p.h_out || ow >= p.w_out) continue;
                const long long channel = static_cast<long long>(first_plane + line.plane) * OUT_CHANNELS + first_out + out0;
                ELEMENT_T* __restrict__ target = p.output + channel * out_pixels + (static_cast<index_t>(oh) * p.w_out + ow);
                #pragma unroll
                for (int o = 0; o < kStageOut; ++o) {
                    if (out0 + o >= TILE_OUT || first_out + out0 + o >= OUT_CHANNELS) continue;
                    *reinterpret_cast<vector_t<VECTOR>*>(target + o * out_pixels) =
                        *reinterpret_cast<const vector_t<VECTOR>*>(&stage[o * 32 * kNeighbours + item]);
                }
            }
        }
#endif
    }
}
