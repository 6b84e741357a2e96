/* Consumers of sm90/implicit_gemm.cu, when a tile's sums are complete: bias and stores. */
#pragma once

#include "pipeline/implicit_gemm.cuh"
#include "ptx/named_barrier.cuh"

/* How a thread's outputs lie beside each other. In a row of the output, or along the channels in channels_last, it has
 * kInner neighbours: of its M blocks (PAIR_BLOCKS), of rows g and g + 8 (PAIR_ROWS), or one (PAIR_NONE). Where those of its
 * two cells follow each other, so do those of all cells of a warp's row, and they go by way of shared memory (STAGED): stored
 * from registers, 32 bytes a row at a time, they took longer (KernelBench 57 in fp16: 2.1 ms against 1.4), as they did from a
 * warp that does nothing else (1.9). So do outputs in channels_last, where M blocks have whole pieces of 16 bytes of channels.
 */
__device__ constexpr int block_of(int outer, int inner) {
    return PAIRING == PAIR_BLOCKS ? inner : PAIRING == PAIR_ROWS ? outer : outer / 2;
}
__device__ constexpr int half_of(int outer, int inner) {
    return PAIRING == PAIR_BLOCKS ? outer : PAIRING == PAIR_ROWS ? inner : outer % 2;
}

/* A position: a cell of a strip, or a gap between rows or strips. */
struct cell_t {
    int column, row, strip, image;

    __device__ __forceinline__ bool exists(const implicit_gemm_params& p) const {
        return row < p.cells_h && column < p.strip_cells && image < p.batch;
    }
    /* Goes on by as many positions as are stored together, which are a column and rows. Few threads come to another strip. */
    __device__ __forceinline__ void advance(const implicit_gemm_params& p) {
        column += p.stored_column;
        const bool next_row = column >= p.pitch;
        column -= next_row ? p.pitch : 0;
        row += p.stored_row + next_row;
        #pragma unroll 1
        while (row >= p.strip_rows) {
            row -= p.strip_rows;
            if (++strip == p.strips) strip = 0, ++image;
        }
    }
};
__device__ __forceinline__ cell_t cell_at(const implicit_gemm_params& p, int position) {
    const int above = divided(position, p.by_pitch), strip = divided(above, p.by_strip_rows), image = divided(strip, p.by_strips);
    return {position - above * p.pitch, above - strip * p.strip_rows, strip - image * p.strips, image};
}

#if STAGED && CHANNELS_LAST
/* Adds the bias and stores, by way of shared memory: a thread has two channels of two positions, and stores a piece of 16 bytes
 * of one, so that a warp stores whole rows of M blocks. What a warpgroup has at a position of a row of one of its M blocks is
 * a place; a part is kPlaces of them, which threads store while the next part is written. `stage` is the warpgroup's own:
 *
 *   stage [2][BLOCKS][kPart positions][kPixel], of which 64 are used, so that banks differ
 *
 * Warps that stored their 16 rows alone, 32 bytes of 16 positions at a time, took a tenth to a quarter longer (fp16).
 */
__device__ __forceinline__ void store_tile(
    const implicit_gemm_params& p, const item_t& item, const float (&sums)[BLOCKS][COLUMNS / 2], int first, int side,
    ELEMENT_T* stage) {
    static_assert(PAIRING == PAIR_ROWS && BLOCKS <= 2, "what lies beside each other");
    static_assert(CHANNELS % VECTOR == 0 && OUT_CHANNELS % VECTOR == 0, "pieces of channels are there, or not, and aligned");
    static_assert(VECTOR == kElements, "a piece has 16 bytes");
    using piece_t = vector_t<VECTOR>;
    constexpr int kPlacePieces = 64 / VECTOR;
    constexpr int kPart = kPlaces / BLOCKS, kStored = 128 / kPlacePieces;  // positions that a warpgroup stores together
    constexpr int kPartCount = COLUMNS / kPart;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
    static_assert(kStoresOf1 == kStoresOf0 + 1, "a warpgroup counts on from the first");
    const int barrier = kStoresOf0 + (threadIdx.x - kProducers) / 128;
    const int first_channel = first_channel_of(item.set, side);
    float bias[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int out = first_channel + place_of_row(warp * 16 + half * 8 + g).channel;
        const bool there = out < OUT_CHANNELS && p.bias != nullptr;
        bias[half] = there ? widen(load_once(p.bias + item.group * OUT_CHANNELS + out)) : 0.0f;
    }
    // The thread's piece, and its first row: of the 16 rows of a warp, two that are 8 apart are neighbours.
    const int own = threadIdx.x % 128 / kPlacePieces, channel = threadIdx.x % kPlacePieces * VECTOR;
    const row_t rows = place_of_row(channel / 16 * 16 + channel % 16 / 2);
    const bool mine = rows.slot < SLOTS && first_channel + rows.channel < OUT_CHANNELS;
    int row_phase[BLOCKS], column_phase[BLOCKS];
    #pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        const int phase = mine ? phases_of(item.set, side, block)[rows.slot] : -1;
        row_phase[block] = phase < 0 ? p.h_out : phase / PHASE_BASE;  // no such row
        column_phase[block] = phase % PHASE_BASE;
    }
    const index_t pixels = static_cast<index_t>(p.h_out) * p.w_out, channels = p.groups * OUT_CHANNELS;
    ELEMENT_T* const output = p.output + (item.group * OUT_CHANNELS + first_channel + rows.channel);
    cell_t at = cell_at(p, first + own);
    if (kPartCount % 2 == 1) named_barrier_sync<128>(barrier);  // the last part of the tile before lay where the first of this one will
    each<kPartCount>([&](auto part) {
        constexpr int kFirstTile = part * (kPart / 8);
        ELEMENT_T* const turned = stage + part % 2 * kPlaces * kPixel;
        each<kPart / 8>([&](auto tile) {
            constexpr int n = tile, j = kFirstTile + n;
            each<BLOCKS * 2>([&](auto which) {
                constexpr int block = which / 2, e = which % 2;
                const int place = block * kPart + n * 8 + 2 * t + e;
                store_together<2>(turned + place * kPixel + warp * 16 + 2 * g, [&](int half) {
                    return narrow<ELEMENT_T>(sums[block][4 * j + 2 * half + e] + bias[half]);
                });
            });
        });
        named_barrier_sync<128>(barrier);
        piece_t pieces[kPlaces / kStored];
        #pragma unroll
        for (int i = 0; i < kPlaces / kStored; ++i)
            pieces[i] = *reinterpret_cast<const piece_t*>(turned + (i * kStored + own) * kPixel + channel);
        #pragma unroll
        for (int i = 0; i < kPart / kStored; ++i) {
            #pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const int oh = at.row * SPAN_H + row_phase[block];
                const int ow = (at.strip * p.strip_cells + at.column) * SPAN_W + column_phase[block];
                if (at.exists(p) && oh < p.h_out && ow < p.w_out) {
                    const index_t pixel = at.image * pixels + static_cast<index_t>(oh) * p.w_out + ow;
                    *reinterpret_cast<piece_t*>(output + pixel * channels) = pieces[block * (kPart / kStored) + i];
                }
            }
            at.advance(p);
        }
    });
}
#elif STAGED
/* Where the output of a cell begins that is at a place in a line, or null. `output` is the line's channel of image 0. */
__device__ __forceinline__ ELEMENT_T* target_of_piece(
    const implicit_gemm_params& p, ELEMENT_T* output, const cell_t& at, int row_phase, int place, index_t image_stride) {
    const int oh = at.row * SPAN_H + row_phase, ow = (at.strip * p.strip_cells + at.column) * SPAN_W + place % SPAN_W;
    // VECTOR divides the widths of the output and of strips, so all outputs of a piece are there, or none.
    if (!at.exists(p) || oh >= p.h_out || ow >= p.w_out) return nullptr;
    return output + (at.image * image_stride + static_cast<index_t>(oh) * p.w_out + ow);
}

#if ROW_ORDER == ROWS_LINES
constexpr int kLinePieces = kLineCells * SPAN_W / VECTOR, kPieceTurns = kWarpChannels * kLinePieces / 32;
constexpr int kOwnPlaces = kLinePieces / gcd(32, kLinePieces);  // of a thread in a line, which it has in turn

/* Adds the bias and stores, by way of shared memory: a warp has all phases of a row of cells, of a few channels, each a line.
 * VECTOR neighbours of a line, which a thread stores together, are a piece. `stage` is its own:
 *
 *   stage [kWarpChannels][kLine outputs]
 *
 * The other way to store rows of many phases, an M block for each (PAIR_BLOCKS), has but 32 or 64 columns for each of them,
 * which feeds the tensor cores worse: FCN-8s in TF32 took 289 us, and takes 102.
 */
__device__ __forceinline__ void store_tile(
    const implicit_gemm_params& p, const item_t& item, const float (&sums)[BLOCKS][COLUMNS / 2], int first, int side,
    ELEMENT_T* outputs) {
    static_assert(SPAN_W == SLOTS * BLOCKS, "a warp has whole rows of cells");
    static_assert(kLineCells % 8 == 0 && COLUMNS % kLineCells == 0, "a part is whole tiles of the accumulators");
    static_assert(kWarpChannels * kLinePieces % 32 == 0, "a warp stores 32 pieces in a turn");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
    ELEMENT_T* const stage = outputs + warp * kWarpOutputs;
    const row_t row = place_of_row(warp * 16 + g);  // and the next slot of its channel
    const int warp_channel = warp * kWarpChannels, first_channel = first_channel_of(item.set, side) + warp_channel;
    const int line = row.channel - warp_channel, row_phase = phases_of(item.set, side, 0)[0] / PHASE_BASE;
    const bool there = first_channel + line < OUT_CHANNELS && p.bias != nullptr;
    const float bias = there ? widen(load_once(p.bias + item.group * OUT_CHANNELS + first_channel + line)) : 0.0f;
    const index_t pixels = static_cast<index_t>(p.h_out) * p.w_out, image_stride = p.groups * OUT_CHANNELS * pixels;
    ELEMENT_T* const output = p.output + (item.group * OUT_CHANNELS + first_channel) * pixels;
    each<COLUMNS / kLineCells>([&](auto part) {
        constexpr int kFirstTile = part * (kLineCells / 8);
        __syncwarp();
        each<kLineCells / 8>([&](auto tile) {
            constexpr int n = tile, j = kFirstTile + n;
            each<BLOCKS * 2>([&](auto which) {
                constexpr int block = which / 2, e = which % 2;
                const int cell = n * 8 + 2 * t + e;
                const int place = line * kLine + cell * SPAN_W + block * SLOTS + row.slot;
                store_together<2>(stage + place, [&](int half) {
                    return narrow<ELEMENT_T>(sums[block][4 * j + 2 * half + e] + bias);
                });
            });
        });
        __syncwarp();
        // Worked out anew for each part: many places would not fit the registers.
        #pragma unroll
        for (int own = 0; own < kOwnPlaces; ++own) {
            const int place = (own * 32 + lane) % kLinePieces * VECTOR;
            const cell_t at = cell_at(p, first + part * kLineCells + place / SPAN_W);
            ELEMENT_T* target = target_of_piece(p, output, at, row_phase, place, image_stride);
            if (target == nullptr) continue;
            #pragma unroll
            for (int turn = own; turn < kPieceTurns; turn += kOwnPlaces) {
                const int line = (turn * 32 + lane) / kLinePieces;
                if (first_channel + line < OUT_CHANNELS)
                    copy<VECTOR>(target + line * pixels, stage + line * kLine + place);
            }
        }
    });
}
#else
/* A line is what a warp has of a channel at kLineCells positions. Its VECTOR neighbours that a thread stores together are a
 * piece; a warp stores 32 pieces in a turn. Those of a line follow each other; but where two lines are read at once, kApart
 * lines lie between them, so that lines of 64 bytes lie in different banks. Lines of 64 bytes took a tenth longer than those of
 * 128 or 256 (fp16, H200): what a store costs is how many of them it has parts of.
 */
constexpr int kLines = kOuter * 8, kLinePieces = kLineCells * kInner / VECTOR, kTurnsOfPart = kLines * kLinePieces / 32;
constexpr bool kHalfLines = sizeof(ELEMENT_T) == 2 && kLineCells * kInner == 32;
constexpr int kApart = kHalfLines && VECTOR > 1 && kInner <= 2 ? 4 / kInner : 1;
__device__ constexpr int line_of(int piece) {
    const int line = piece / kLinePieces, pair = line / 2;
    return pair / kApart * 2 * kApart + pair % kApart + line % 2 * kApart;
}
// In how many turns a thread is at other places of lines; then it begins again, in lines as far apart as everybody's.
constexpr int kOwnPlaces = kLinePieces / gcd(32, kLinePieces);
static_assert(kTurnsOfPart % kOwnPlaces == 0, "a part is whole lines");
// Turns of which a thread has the pieces at a time, in 16 registers.
constexpr int kTurnsTogether = 16 / ceil_div(VECTOR * static_cast<int>(sizeof(ELEMENT_T)), 4) * kOwnPlaces;

/* Adds the bias and stores, by way of shared memory: a thread has two positions of a row, 8 rows a warp, and a row of the
 * output wants what a warp has of it stored together. A warp's lines are channels that follow each other. `stage` is its own.
 */
__device__ __forceinline__ void store_tile(
    const implicit_gemm_params& p, const item_t& item, const float (&sums)[BLOCKS][COLUMNS / 2], int first, int side,
    ELEMENT_T* outputs) {
    static_assert(SPAN_W == kInner && SPAN_W == SLOTS * BLOCKS, "the outputs of a row of cells are neighbours");
    constexpr int kRun = 2 * kInner;  // a thread's outputs of two cells
    constexpr int kWord = gcd(kRun, 16 / static_cast<int>(sizeof(ELEMENT_T)));  // of which it writes so many together
    constexpr bool kFull = CHANNELS == 4 * kLines && OUT_CHANNELS % (CHANNELS * kChannelSides) == 0;
    using piece_t = vector_t<VECTOR>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
    ELEMENT_T* const stage = outputs + warp * kWarpOutputs;
    const int warp_channel = warp * kLines, first_channel = first_channel_of(item.set, side) + warp_channel;
    const int line_channels = min(CHANNELS - warp_channel, OUT_CHANNELS - first_channel);  // that there are
    float bias[kOuter];
    #pragma unroll
    for (int outer = 0; outer < kOuter; ++outer) {
        const int channel = outer * 8 + g;
        const bool there = (kFull || channel < line_channels) && p.bias != nullptr;
        bias[outer] = there ? widen(load_once(p.bias + item.group * OUT_CHANNELS + first_channel + channel)) : 0.0f;
    }
    const index_t pixels = static_cast<index_t>(p.h_out) * p.w_out, channels = p.groups * OUT_CHANNELS;
    ELEMENT_T* const output = p.output + (item.group * OUT_CHANNELS + first_channel) * pixels;
    const int row_phase = phases_of(item.set, side, 0)[0] / PHASE_BASE;
    int own[kOwnPlaces], own_line[kOwnPlaces];
    cell_t at[kOwnPlaces];
    #pragma unroll
    for (int i = 0; i < kOwnPlaces; ++i) {
        own[i] = (i * 32 + lane) % kLinePieces * VECTOR;
        own_line[i] = line_of(i * 32 + lane);
        at[i] = cell_at(p, first + own[i] / kInner);
    }
    each<COLUMNS / kLineCells>([&](auto part) {
        constexpr int kFirstTile = part * (kLineCells / 8);
        __syncwarp();
        each<kLineCells / 8>([&](auto tile) {
            constexpr int n = tile, j = kFirstTile + n;
            each<kOuter>([&](auto outer_) {
                constexpr int outer = outer_;
                vector_t<kWord> run[kRun / kWord];
                #pragma unroll
                for (int i = 0; i < kRun; ++i) {
                    const int inner = i % kInner, e = i / kInner;
                    run[i / kWord].value[i % kWord] = narrow<ELEMENT_T>(
                        sums[block_of(outer, inner)][4 * j + 2 * half_of(outer, inner) + e] + bias[outer]);
                }
                ELEMENT_T* target = stage + (outer * 8 + g) * kLine + (n * 8 + 2 * t) * kInner;
                #pragma unroll
                for (int word = 0; word < kRun / kWord; ++word)
                    *reinterpret_cast<vector_t<kWord>*>(target + word * kWord) = run[word];
            });
        });
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < kOwnPlaces; ++i) {
            ELEMENT_T* target = target_of_piece(p, output, at[i], row_phase, own[i], channels * pixels);
            const bool there = target != nullptr;
            if (there) target += own_line[i] * pixels;
            #pragma unroll
            for (int begin = 0; begin < kTurnsOfPart; begin += kTurnsTogether) {
                piece_t pieces[kTurnsTogether / kOwnPlaces];
                #pragma unroll
                for (int turn = begin; turn < least(begin + kTurnsTogether, kTurnsOfPart); turn += kOwnPlaces)
                    pieces[(turn - begin) / kOwnPlaces] =
                        *reinterpret_cast<const piece_t*>(stage + (line_of(turn * 32) + own_line[i]) * kLine + own[i]);
                if (!there) continue;
                #pragma unroll
                for (int turn = begin; turn < least(begin + kTurnsTogether, kTurnsOfPart); turn += kOwnPlaces)
                    if (kFull || line_of(turn * 32) + own_line[i] < line_channels)
                        *reinterpret_cast<piece_t*>(target + line_of(turn * 32) * pixels) =
                            pieces[(turn - begin) / kOwnPlaces];
            }
            at[i].advance(p);
        }
    });
}
#endif
#else
/* Stores the first `count` values of a run; whole runs as vectors. */
__device__ __forceinline__ void store_run(ELEMENT_T* target, const float (&values)[kInner], int count) {
    constexpr int kVector = VECTOR < kInner ? VECTOR : kInner;
    if (kVector > 1 && count >= kInner) {
        #pragma unroll
        for (int i = 0; i < kInner; i += kVector)
            store_together<kVector>(target + i, [&](int v) { return narrow<ELEMENT_T>(values[i + v]); });
    } else {
        #pragma unroll
        for (int i = 0; i < kInner; ++i)
            if (i < count) target[i] = narrow<ELEMENT_T>(values[i]);
    }
}

/* Adds the bias and stores. `first` is the first of the positions of the thread's warpgroup. */
__device__ __forceinline__ void store_tile(
    const implicit_gemm_params& p, const item_t& item, const float (&sums)[BLOCKS][COLUMNS / 2], int first, int side, ELEMENT_T*) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
    const int channels = p.groups * OUT_CHANNELS;
    // For each run: its phases, the number of its outputs in a whole cell, its bias, its place among a cell's outputs.
    int row_phase[kOuter], column_phase[kOuter], present[kOuter];
    float bias[kOuter][kInner];
    index_t line[kOuter];
    #pragma unroll
    for (int outer = 0; outer < kOuter; ++outer) {
        #pragma unroll
        for (int inner = kInner - 1; inner >= 0; --inner) {
            const row_t place = place_of_row(warp * 16 + half_of(outer, inner) * 8 + g);
            const int phase = place.slot < SLOTS ? phases_of(item.set, side, block_of(outer, inner))[place.slot] : -1;
            const int out = first_channel_of(item.set, side) + place.channel;
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
    constexpr int kCells = PAIRED_CELLS ? 2 : 1;  // of a thread's two, that lie in one row
    cell_t cells[2 / kCells];
    #pragma unroll
    for (int i = 0; i < 2 / kCells; ++i) cells[i] = cell_at(p, first + 2 * t + i);
    each<COLUMNS / 8>([&](auto j) {
        #pragma unroll
        for (int i = 0; i < 2 / kCells; ++i) {
            cell_t& at = cells[i];
            if (at.exists(p)) {
                const int cell = at.strip * p.strip_cells + at.column;
                const index_t pixel = static_cast<index_t>(at.row) * SPAN_H * p.w_out + cell * SPAN_W;
                const index_t pixels = static_cast<index_t>(p.h_out) * p.w_out;
                ELEMENT_T* target =
                    p.output + (CHANNELS_LAST ? (at.image * pixels + pixel) * channels : at.image * channels * pixels + pixel);
                const index_t next_cell = static_cast<index_t>(SPAN_W) * (CHANNELS_LAST ? channels : 1);
                each<kOuter>([&](auto outer_) {
                    constexpr int outer = outer_;
                    if (at.row * SPAN_H + row_phase[outer] >= p.h_out) return;
                    #pragma unroll
                    for (int e = 0; e < kCells; ++e) {
                        float values[kInner];
                        #pragma unroll
                        for (int v = 0; v < kInner; ++v)
                            values[v] = sums[block_of(outer, v)][4 * j + 2 * half_of(outer, v) + i + e] +
                                        bias[outer][v];
                        // Outputs of the run that there are: channels, or columns.
                        const int left = p.w_out - ((cell + e) * SPAN_W + column_phase[outer]);
                        const int count = CHANNELS_LAST ? (left > 0 ? present[outer] : 0) : min(present[outer], left);
                        store_run(target + line[outer] + e * next_cell, values, count);
                    }
                });
            }
            at.advance(p);
        }
    });
}
#endif
