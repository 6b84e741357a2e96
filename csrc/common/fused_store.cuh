/* Consumers of fused_wgmma.cu, when a tile's sums are complete: bias and stores. */
#pragma once

#include "common/fused.cuh"

/* How a thread's outputs lie beside each other. In a row of the output, or along the channels in channels_last, it has
 * kInner neighbours: of two M blocks (PAIR_BLOCKS), of rows g and g + 8 (PAIR_ROWS), or one (PAIR_NONE). Where those of its
 * two cells follow each other, so do those of all cells of a warp's row, and they go by way of shared memory (STAGED).
 */
__device__ constexpr int block_of(int outer, int inner) {
    return PAIRING == PAIR_BLOCKS ? inner : PAIRING == PAIR_ROWS ? outer : outer / 2;
}
__device__ constexpr int half_of(int outer, int inner) {
    return PAIRING == PAIR_BLOCKS ? outer : PAIRING == PAIR_ROWS ? inner : outer % 2;
}

/* What is at a position: a cell of a strip, or nothing between rows and strips. */
struct cell_t {
    int column, row, strip, image;

    __device__ __forceinline__ bool exists(const fused_params& p) const {
        return row < p.cells_h && column < p.strip_cells && image < p.batch;
    }
    __device__ __forceinline__ void advance(const fused_params& p, int positions) {
        column += positions;
        while (column >= PITCH) {
            column -= PITCH;
            if (++row == p.strip_rows) {
                row = 0;
                if (++strip == p.strips) strip = 0, ++image;
            }
        }
    }
};
__device__ __forceinline__ cell_t cell_at(const fused_params& p, int position) {
    const int row = position / PITCH, strip = row / p.strip_rows;
    return {position % PITCH, row % p.strip_rows, strip % p.strips, strip / p.strips};
}

#if STAGED
/* Adds the bias and stores, by way of shared memory: a thread has two positions of a row, 8 rows a warp, and a row of the
 * output wants 32 neighbours stored together. A line is what a warp has of a row of the output at 32 / kInner positions.
 * `stage` is the warp's own.
 */
__device__ __forceinline__ void store_tile(
    const fused_params& p, const item_t& item, const float (&sums)[BLOCKS][COLUMNS / 2], int first, int warpgroup_m,
    ELEMENT_T* stage) {
    static_assert(SPAN_W == kInner, "the outputs of a row of cells are neighbours");
    constexpr int kPositions = 32 / kInner, kLanes = 32 / VECTOR, kTurns = kOuter * 8 / VECTOR;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
    const int first_channel = (item.set % CHANNEL_SETS * WARPGROUPS_M + warpgroup_m) * CHANNELS;
    const auto channel_of = [&](int line) {  // of the group; -1 if there is none
        const int outer = line / 8;
        const row_t place = place_of_row(warp * 16 + half_of(outer, 0) * 8 + line % 8);
        const int out = first_channel + place.channel;
        return place.slot < SLOTS && place.channel < CHANNELS && out < OUT_CHANNELS ? out : -1;
    };
    float bias[kOuter];
    #pragma unroll
    for (int outer = 0; outer < kOuter; ++outer) {
        const int out = channel_of(outer * 8 + g);
        bias[outer] = out >= 0 && p.bias != nullptr ? widen(load_once(p.bias + item.group * OUT_CHANNELS + out)) : 0.0f;
    }
    // Lines that the thread stores: where their channels begin, -1 if there is nothing to store.
    const int own = lane % kLanes * VECTOR;  // first of a line's outputs that the thread stores
    const int row_phase = kPhases[phase_set_of(item.set) * BLOCKS * SLOTS] / PHASE_BASE;
    index_t line[kTurns];
    #pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int out = channel_of(turn * VECTOR + lane / kLanes);
        line[turn] = out < 0 ? -1 : static_cast<index_t>(item.group * OUT_CHANNELS + out) * p.h_out * p.w_out;
    }
    cell_t at = cell_at(p, first + own / kInner);
    #pragma unroll
    for (int part = 0; part < COLUMNS / kPositions; ++part) {
        __syncwarp();
        #pragma unroll
        for (int tile = 0; tile < kPositions / 8; ++tile) {
            const int j = part * (kPositions / 8) + tile;
            #pragma unroll
            for (int outer = 0; outer < kOuter; ++outer) {
                vector_t<2 * kInner> run;
                #pragma unroll
                for (int i = 0; i < 2 * kInner; ++i) {
                    const int inner = i % kInner, e = i / kInner;
                    run.value[i] = narrow<ELEMENT_T>(
                        sums[block_of(outer, inner)][4 * j + 2 * half_of(outer, inner) + e] + bias[outer]);
                }
                *reinterpret_cast<vector_t<2 * kInner>*>(stage + (outer * 8 + g) * kLine + (tile * 8 + 2 * t) * kInner) = run;
            }
        }
        __syncwarp();
        using values_t = vector_t<VECTOR>;
        values_t values[kTurns];
        #pragma unroll
        for (int turn = 0; turn < kTurns; ++turn)
            values[turn] = *reinterpret_cast<const values_t*>(stage + (turn * VECTOR + lane / kLanes) * kLine + own);
        const int oh = at.row * SPAN_H + row_phase, cell = at.strip * p.strip_cells + at.column;
        const int ow = cell * SPAN_W + own % kInner;
        const index_t pixels = static_cast<index_t>(p.h_out) * p.w_out, pixel = static_cast<index_t>(oh) * p.w_out + ow;
        ELEMENT_T* target = p.output + (at.image * (p.groups * OUT_CHANNELS) * pixels + pixel);
        // VECTOR divides the widths of the output and of strips, so all of a thread's outputs are there, or none.
        if (at.exists(p) && oh < p.h_out && ow < p.w_out) {
            #pragma unroll
            for (int turn = 0; turn < kTurns; ++turn)
                if (line[turn] >= 0) *reinterpret_cast<values_t*>(target + line[turn]) = values[turn];
        }
        at.advance(p, kPositions);
    }
}
#else
/* Stores the first `count` values of a run; whole runs as vectors. */
__device__ __forceinline__ void store_run(ELEMENT_T* target, const float (&values)[kInner], int count) {
    constexpr int kVector = VECTOR < kInner ? VECTOR : kInner;
    if (kVector > 1 && count >= kInner) {
        #pragma unroll
        for (int i = 0; i < kInner; i += kVector) {
            vector_t<kVector> vector;
            #pragma unroll
            for (int v = 0; v < kVector; ++v) vector.value[v] = narrow<ELEMENT_T>(values[i + v]);
            *reinterpret_cast<vector_t<kVector>*>(target + i) = vector;
        }
    } else {
        #pragma unroll
        for (int i = 0; i < kInner; ++i)
            if (i < count) target[i] = narrow<ELEMENT_T>(values[i]);
    }
}

/* Adds the bias and stores, from registers. `first` is the first of the positions of the thread's warpgroup. */
__device__ __forceinline__ void store_tile(
    const fused_params& p, const item_t& item, const float (&sums)[BLOCKS][COLUMNS / 2], int first, int warpgroup_m,
    ELEMENT_T*) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
    const int channels = p.groups * OUT_CHANNELS;
    // Of each run: its phases, how many of its outputs there are in a whole cell, its bias, its place in a cell's outputs.
    int row_phase[kOuter], column_phase[kOuter], present[kOuter];
    float bias[kOuter][kInner];
    index_t line[kOuter];
    #pragma unroll
    for (int outer = 0; outer < kOuter; ++outer) {
        #pragma unroll
        for (int inner = kInner - 1; inner >= 0; --inner) {
            const row_t place = place_of_row(warp * 16 + half_of(outer, inner) * 8 + g);
            const int index = (phase_set_of(item.set) * BLOCKS + block_of(outer, inner)) * SLOTS + place.slot;
            const int phase = place.slot < SLOTS ? kPhases[index] : -1;
            const int out = (item.set % CHANNEL_SETS * WARPGROUPS_M + warpgroup_m) * CHANNELS + place.channel;
            const bool there = phase >= 0 && place.channel < CHANNELS && out < OUT_CHANNELS;
            const int channel = item.group * OUT_CHANNELS + out;
            bias[outer][inner] = there && p.bias != nullptr ? widen(load_once(p.bias + channel)) : 0.0f;
            present[outer] = there ? (inner == kInner - 1 ? 0 : present[outer]) + 1 : 0;
            row_phase[outer] = phase / PHASE_BASE;
            column_phase[outer] = phase % PHASE_BASE;
            const index_t pixel = static_cast<index_t>(row_phase[outer]) * p.w_out + column_phase[outer];
            line[outer] = CHANNELS_LAST ? pixel * channels + channel
                                        : static_cast<index_t>(channel) * p.h_out * p.w_out + pixel;
        }
    }
    cell_t at = cell_at(p, first + 2 * t);
    #pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
        if (at.exists(p)) {
            const int cell = at.strip * p.strip_cells + at.column;
            const index_t pixel = static_cast<index_t>(at.row) * SPAN_H * p.w_out + cell * SPAN_W;
            const index_t pixels = static_cast<index_t>(p.h_out) * p.w_out;
            ELEMENT_T* target =
                p.output + (CHANNELS_LAST ? (at.image * pixels + pixel) * channels : at.image * channels * pixels + pixel);
            const index_t next_cell = static_cast<index_t>(SPAN_W) * (CHANNELS_LAST ? channels : 1);
            #pragma unroll
            for (int outer = 0; outer < kOuter; ++outer) {
                if (at.row * SPAN_H + row_phase[outer] >= p.h_out) continue;
                #pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float values[kInner];
                    #pragma unroll
                    for (int i = 0; i < kInner; ++i)
                        values[i] = sums[block_of(outer, i)][4 * j + 2 * half_of(outer, i) + e] + bias[outer][i];
                    // Outputs of the run that there are: channels, or columns.
                    const int left = p.w_out - ((cell + e) * SPAN_W + column_phase[outer]);
                    const int count = CHANNELS_LAST ? (left > 0 ? present[outer] : 0) : min(present[outer], left);
                    store_run(target + line[outer] + e * next_cell, values, count);
                }
            }
        }
        at.advance(p, 8);
    }
}
#endif
