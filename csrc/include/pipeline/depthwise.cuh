/* direct, depthwise: every plane has one input and one output channel, and there is too little arithmetic to wait for a
 * patch. Part of direct/forward.cu.
 *
 * A thread owns PLANE_VECTOR neighbouring planes and, of each, CELLS neighbouring cells of ROWS cell rows, in all
 * phases. Windows come straight from global memory, weights from shared memory, [planes / PLANE_VECTOR][K_H][kQuads]
 * quads of [K_W][PLANE_VECTOR], an odd distance apart so that threads of different planes meet no bank conflict.
 *
 * In NCHW neighbouring threads are neighbouring cells. Where the block's rows allow it (kVectorLoads), the CELLS inputs
 * of the cells themselves are one vector and only the halo is read by element. In channels_last neighbouring threads
 * are neighbouring planes, whose values of a pixel are one vector; weights of so many planes are as much as the outputs of
 * a tile, so a block takes some tiles, one below the other.
 *
 * Small windows (kHolds) are held in registers whole, so that phases and rows share what they read, and all loads are
 * in flight at once; else a thread loads one window row for each tap row.
 */
#pragma once

constexpr int kPlaneThreads = TILE_PLANES / PLANE_VECTOR;
constexpr int kQuads = (KERNEL_W * PLANE_VECTOR + 3) / 4, kPlaneQuads = KERNEL_H * kQuads | 1;
constexpr int kWindowRows = ROWS + kHaloH, kWindowW = CELLS + kHaloW;
constexpr bool kHolds = kWindowRows * kWindowW * PLANE_VECTOR <= 64 &&
                        KERNEL_H * KERNEL_W * ROWS * CELLS * PLANE_VECTOR <= 512;
constexpr bool kVectorLoads = !CHANNELS_LAST && CELLS > 1 && kFirstW <= 0 && kHaloW + kFirstW >= 0;

constexpr int kWeightBytes = kPlaneThreads * kPlaneQuads * static_cast<int>(sizeof(weight_quad_t));
constexpr int kStageBytes = (SHARED_BYTES - kWeightBytes) / (kThreads / 32) / 16 * 16;  // of a warp
static_assert(kWeightBytes <= SHARED_BYTES, "the weights do not fit the shared memory of the launch");

using window_row_t = accumulate_t[kWindowW][PLANE_VECTOR];
using sums_t = accumulate_t[CELLS * axis_w::kPhases][PLANE_VECTOR];

__device__ constexpr phases_t<STRIDE_H> kRowPhases = phases_of<axis_h, STRIDE_H>();

/* The position of a thread in the tile. */
struct place_t { int lane, row, plane; };
__device__ __forceinline__ place_t place_of(int thread) {
#if CHANNELS_LAST
    const int rest = thread / kPlaneThreads;
    return {rest % LANES_W, rest / LANES_W, thread % kPlaneThreads * PLANE_VECTOR};
#else
    return {thread % LANES_W, thread / LANES_W % (TILE_H / ROWS), thread / (LANES_W * (TILE_H / ROWS))};
#endif
}

/* Load a row of the window, whose first column is column; zero outside the image. */
template <bool VECTORS>
__device__ __forceinline__ void load_window_row(
    const direct_forward_params& p, const ELEMENT_T* __restrict__ plane_input, index_t pixel_stride, bool valid, int ih,
    int column, window_row_t& window) {
    const bool inside = valid && static_cast<unsigned>(ih) < p.h_in;
    const ELEMENT_T* __restrict__ row =
        plane_input + (static_cast<index_t>(ih) * p.w_in + column) * static_cast<index_t>(pixel_stride);
    #pragma unroll
    for (int i = 0; i < kWindowW; ++i) {
        const bool taken = inside && static_cast<unsigned>(column + i) < p.w_in;
        if (CHANNELS_LAST && VECTORS) {
            vector_t<PLANE_VECTOR> values{};
            if (taken) values = *reinterpret_cast<const vector_t<PLANE_VECTOR>*>(row + i * pixel_stride);
            #pragma unroll
            for (int v = 0; v < PLANE_VECTOR; ++v) window[i][v] = widen(values.value[v]);
        } else if (!CHANNELS_LAST && VECTORS && i >= -kFirstW && i < CELLS - kFirstW) {
            if (i > -kFirstW) continue;
            vector_t<CELLS> values{};
            if (taken) values = *reinterpret_cast<const vector_t<CELLS>*>(row + i);
            #pragma unroll
            for (int cell = 0; cell < CELLS; ++cell) window[i + cell][0] = widen(values.value[cell]);
        } else {
            #pragma unroll
            for (int v = 0; v < PLANE_VECTOR; ++v)
                window[i][v] = taken ? widen(load_once(row + i * pixel_stride + v)) : accumulate_t(0);
        }
    }
}

/* Products of one tap row. */
__device__ __forceinline__ void add_tap_row(
    sums_t& sum, const window_row_t& window, const weight_quad_t* __restrict__ quads) {
    #pragma unroll
    for (int q = 0; q < kQuads; ++q) {
        const weight_quad_t quad = quads[q];
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int kw = (q * 4 + e) / PLANE_VECTOR, v = (q * 4 + e) % PLANE_VECTOR;
            if (kw >= KERNEL_W) continue;
            #pragma unroll
            for (int cell = 0; cell < CELLS; ++cell)
                sum[cell * axis_w::kPhases + kw % axis_w::kStep][v] +=
                    quad.value[e] * window[cell + axis_w::shift(kw) - kFirstW][v];
        }
    }
}

/* Store the outputs of a warp, whose threads have one output row each. */
__device__ __forceinline__ void store_row(
    const direct_forward_params& p, const sums_t& sum, const accumulate_t (&bias)[PLANE_VECTOR], int first_plane, int cell_row0,
    int cell_column0, int row, int rh) {
    const auto value = [&](int i, int v) {
        const int phase = kColumnPhases.of[i % STRIDE_W];
        const int place = i / STRIDE_W * axis_w::kPhases + (phase < 0 ? 0 : phase);
        return narrow<ELEMENT_T>(phase == kNone ? bias[v] : sum[place][v]);
    };
    const index_t out_pixels = static_cast<index_t>(p.h_out) * p.w_out;
#if CHANNELS_LAST
    const place_t place = place_of(threadIdx.x);
    const int oh = (cell_row0 + place.row * ROWS + row) * STRIDE_H + rh;
    const int ow = (cell_column0 + place.lane * CELLS) * STRIDE_W;
    const int plane = first_plane + place.plane;
    if (plane >= p.planes || oh >= p.h_out) return;
    const long long first_pixel = static_cast<long long>(plane / p.groups) * out_pixels;
    ELEMENT_T* __restrict__ target =
        p.output + (first_pixel + static_cast<index_t>(oh) * p.w_out + ow) * p.groups + plane % p.groups;
    #pragma unroll
    for (int i = 0; i < kNeighbours; ++i) {
        vector_t<PLANE_VECTOR> values;
        #pragma unroll
        for (int v = 0; v < PLANE_VECTOR; ++v) values.value[v] = value(i, v);
        if (ow + i < p.w_out)
            *reinterpret_cast<vector_t<PLANE_VECTOR>*>(target + i * static_cast<index_t>(p.groups)) = values;
    }
#else
    ELEMENT_T* __restrict__ output = p.output + static_cast<long long>(first_plane) * out_pixels;
    const auto line_of = [&](int thread) {
        const place_t place = place_of(threadIdx.x / 32 * 32 + thread);
        const int oh = (cell_row0 + place.row * ROWS + row) * STRIDE_H + rh, ow = cell_column0 * STRIDE_W;
        return line_t{place.plane * out_pixels + (static_cast<index_t>(oh) * p.w_out + ow),
                      first_plane + place.plane < p.planes && oh < p.h_out ? p.w_out - ow : 0};
    };
    if (VECTOR == kNeighbours) {
        const line_t line = line_of(threadIdx.x % 32 / LANES_W * LANES_W);
        const int first = threadIdx.x % LANES_W * kNeighbours;
        vector_t<VECTOR> values;
        #pragma unroll
        for (int i = 0; i < VECTOR; ++i) values.value[i] = value(i, 0);
        if (first < line.elements) *reinterpret_cast<vector_t<VECTOR>*>(output + line.first + first) = values;
    } else {
        store_runs<1, kNeighbours, LANES_W, VECTOR, kStageBytes>(
            output, reinterpret_cast<ELEMENT_T*>(shared + kWeightBytes + threadIdx.x / 32 * kStageBytes), 1, 0,
            [&](int, int i) { return value(i, 0); }, line_of);
    }
#endif
}

/* Lay out the weights of the block's planes. */
__device__ __forceinline__ void stage_weights(const direct_forward_params& p, int first_plane) {
    accumulate_t* weights = reinterpret_cast<accumulate_t*>(shared);
    const int first_group = first_plane % p.groups;
    #pragma unroll 1
    for (int i = threadIdx.x; i < TILE_PLANES * KERNEL_H * KERNEL_W; i += kThreads) {
        const int tap = i % (KERNEL_H * KERNEL_W), of_plane = i / (KERNEL_H * KERNEL_W);
        // In channels_last a block's planes are of one image.
        const int group = CHANNELS_LAST ? first_group + of_plane : (first_group + of_plane) % p.groups;
        const index_t source = static_cast<index_t>(group) * (KERNEL_H * KERNEL_W) + tap;
        weights[(of_plane / PLANE_VECTOR * kPlaneQuads + tap / KERNEL_W * kQuads) * 4 + tap % KERNEL_W * PLANE_VECTOR +
                of_plane % PLANE_VECTOR] = widen(load_once(p.weight + source));
    }
}

template <bool VECTORS> __device__ __forceinline__ void depthwise_block(const direct_forward_params& p) {
    const int first_plane = static_cast<int>(blockIdx.y + gridDim.y * blockIdx.z) * TILE_PLANES;
    const int turns = LOOPED ? p.turns : 1;
    int cell_row0 = blockIdx.x / p.tiles_w * (turns * TILE_H);
    const int cell_column0 = blockIdx.x % p.tiles_w * kTileW;
    const place_t place = place_of(threadIdx.x);
    const int plane = first_plane + place.plane, group = plane % p.groups;
    const bool valid = plane < p.planes;
    const int in_column = cell_column0 + place.lane * CELLS + kFirstW;
    const long long in_pixels = static_cast<index_t>(p.h_in) * p.w_in;
    const index_t pixel_stride = CHANNELS_LAST ? p.groups : 1;
    const ELEMENT_T* __restrict__ plane_input =
        p.input + (CHANNELS_LAST ? plane / p.groups * in_pixels * p.groups + group : plane * in_pixels);
    const weight_quad_t* __restrict__ quads =
        reinterpret_cast<const weight_quad_t*>(shared) + place.plane / PLANE_VECTOR * kPlaneQuads;
    accumulate_t bias[PLANE_VECTOR];
    #pragma unroll
    for (int v = 0; v < PLANE_VECTOR; ++v)
        bias[v] = p.bias != nullptr ? widen(load_once(p.bias + group + v)) : accumulate_t(0);

    #pragma unroll 1
    for (int turn = 0; turn < turns; ++turn, cell_row0 += TILE_H) {
        const int in_row = cell_row0 + place.row * ROWS + kFirstH;
        window_row_t windows[kHolds ? kWindowRows : 1];
        if (kHolds)
            #pragma unroll
            for (int row = 0; row < kWindowRows; ++row)
                load_window_row<VECTORS>(
                    p, plane_input, pixel_stride, valid, in_row + row, in_column, windows[kHolds ? row : 0]);
        if (turn == 0) {
            stage_weights(p, first_plane);
            __syncthreads();
        }

        #pragma unroll (kHolds ? ROWS : 1)
        for (int row = 0; row < ROWS; ++row)
            #pragma unroll (kHolds ? STRIDE_H : 1)
            for (int rh = 0; rh < STRIDE_H; ++rh) {
                const int phase = kRowPhases.of[rh];
                sums_t sum;
                #pragma unroll
                for (int i = 0; i < CELLS * axis_w::kPhases * PLANE_VECTOR; ++i)
                    sum[i / PLANE_VECTOR][i % PLANE_VECTOR] = bias[i % PLANE_VECTOR];
                if (kHolds) {
                    #pragma unroll
                    for (int tap = 0; tap < KERNEL_H; ++tap)
                        if (tap % axis_h::kStep == phase)
                            add_tap_row(
                                sum, windows[kHolds ? row + axis_h::shift(tap) - kFirstH : 0], quads + tap * kQuads);
                } else if (phase != kNone) {
                    #pragma unroll 1
                    for (int tap = phase; tap < KERNEL_H; tap += axis_h::kStep) {
                        const int ih = in_row + row + axis_h::shift(tap) - kFirstH;
                        load_window_row<VECTORS>(p, plane_input, pixel_stride, valid, ih, in_column, windows[0]);
                        add_tap_row(sum, windows[0], quads + tap * kQuads);
                    }
                }
                store_row(p, sum, bias, first_plane, cell_row0, cell_column0, row, rh);
            }
    }
}

__device__ __forceinline__ void direct_block(const direct_forward_params& p) {
    constexpr int kBytes = (CHANNELS_LAST ? PLANE_VECTOR : CELLS) * static_cast<int>(sizeof(ELEMENT_T));
    const bool aligned =
        reinterpret_cast<unsigned long long>(p.input) % kBytes == 0 && (CHANNELS_LAST || p.w_in % CELLS == 0);
    if ((CHANNELS_LAST ? PLANE_VECTOR > 1 : kVectorLoads) && aligned) depthwise_block<true>(p);
    else depthwise_block<false>(p);
}
