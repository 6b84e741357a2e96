/* direct on tensor cores: transposed convolution as one gather, for 16-bit types and TF32. No workspace.
 *
 * Cells, shifts and planes are those of direct/forward.cu: output o = j*S + r belongs to cell j, and tap k reaches it from input
 * j + shift with shift = (r + P - k*D) / S. For one row of cells the outputs are then a matrix product
 *
 *   output [(rh, rw, co), cell] = weights [(rh, rw, co), (shift, ci)] . patch [(shift, ci), cell]
 *
 * whose right side is read out of one patch of the input, at a different place for each shift, so nothing is unfolded.
 * A weight is zero where a phase (rh, rw) has no tap with a shift. Rows are cut into M tiles of 16, the reduced extent
 * into steps of 8 words (see ptx/mma.cuh); a step that is zero for a whole M tile is left out for it.
 *
 *   S=2 P=1 K=4, C_out=3:  4 phases x 3 channels make 12 rows, one M tile; 3 x 3 shifts
 *   S=2x3 K=3x5, C_out=16: row phases in turn; 3 column phases make 3 M tiles; up to 3 x 2 shifts
 *
 * A block owns, of GROUPS neighbouring groups, WARPS_M * CHANNELS output channels, and goes over its share of the
 * tiles of TILE_H x TILE_W cells of all images. Once, it lays the weights out as the words that the lanes of a warp
 * load. For each tile it stages the patch as words [row, column, group, word of channels] and computes ROW_PHASES row
 * phases at a time. A warp owns CHANNELS channels and N_TILES x 8 cells of a row of it, for GROUPS groups in turn, so that it
 * has a stretch of each output row, which it turns round in shared memory. In NCHW it stores 16 bytes a lane, but for the ends
 * of a stretch, which need not begin at such; in channels_last VECTOR channels.
 *
 * Values that a zero weight meets must be finite: where an input is infinite or NaN, so may be outputs of other phases
 * of cells next to it. (cuDNN's transforms do the same.)
 *
 * Macros: ELEMENT_T; KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W; IN_CHANNELS, OUT_CHANNELS (of a group);
 * CHANNELS_LAST; FIRST_H, FIRST_W (least shifts), HALO_H, HALO_W (largest minus least); COPIED; PIXELS (of the patch that
 * are loaded together; divides the input's width in NCHW, 1 in channels_last), LEAD (columns of the patch before the first,
 * for that); WORDS (of a pixel's channels of a group: 1, 2, 4 or a multiple of 8), PIXEL_PITCH (words); ROW_PHASES,
 * CHANNELS, GROUPS, N_TILES, WARPS_M, WARPS_N, TILE_H, TILE_W; VECTOR (outputs that a lane stores at once, in NCHW at the
 * ends of lines); UNROLLED (steps); MIN_BLOCKS (blocks that a multiprocessor must have registers for), SHARED_BYTES, INDEX_64.
 *
 * Tables, as initialisers: STEP_BEGIN (first step of each turn of row phases, and the number of steps), STEP_SHIFTS (for
 * each WORDS of a step's words shift_h * SHIFT_BASE + shift_w from the least ones, or -1), STEP_WORD (first word of the
 * channels), STEP_TURN, STEP_TILES (bits of the M tiles it is for), PAIR_BEGIN (first pair of each turn), PAIR_STEP and
 * PAIR_TILE (the pairs of a step and an M tile, in order). STEPS, PAIRS, USED_TILES (bits of the M tiles that any step is
 * for). Chosen by gemmconv/kernels/direct/forward_mma.py.
 */
#include "ptx/cp_async.cuh"
#include "numeric/index.cuh"
#include "numeric/integers.cuh"
#include "ptx/mma.cuh"
#include "numeric/vector.cuh"

struct direct_forward_mma_params {
    const ELEMENT_T* __restrict__ input;
    const ELEMENT_T* __restrict__ weight;
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    int groups;
    int h_in, w_in, h_out, w_out;
    int tiles_h, tiles_w, tiles;               // of an image, and in all
    int step_image, step_tile_h, step_tile_w;  // from one tile of a block to its next
    int weight_channel, weight_tap;            // elements of the weight, from an output channel or a tap to the next
};

using words = mma_words<ELEMENT_T>;

constexpr int kWarps = WARPS_M * WARPS_N;
constexpr int kThreads = kWarps * 32;
constexpr int kOutBlocks = (OUT_CHANNELS + WARPS_M * CHANNELS - 1) / (WARPS_M * CHANNELS);
constexpr int kLines = ROW_PHASES * CHANNELS;  // output lines (row phase, channel) of a row of cells
constexpr int kLineBlocks = (kLines + 7) / 8;
constexpr int kMTiles = (kLineBlocks * STRIDE_W + 1) / 2;
constexpr int kWide = 16 / sizeof(ELEMENT_T);  // elements of 16 bytes
/* Elements, up to whole vectors of 16 bytes, of which there is an odd number: then 8 lines start in different banks. */
__device__ constexpr int padded(int elements) { return ((elements + kWide - 1) / kWide | 1) * kWide; }

constexpr int kPatchH = TILE_H + HALO_H, kPatchW = (LEAD + TILE_W + HALO_W + PIXELS - 1) / PIXELS * PIXELS;
constexpr int kPatchPixels = kPatchH * kPatchW;

/* How the patch comes. Word `word` of pixel `pixel` of a group lies at pixel * kPixelPitch + word * kWordPitch.
 *   COPIED      as it is used, into two patches in turn, while the tile before is computed: [pixels][groups][words] in
 *               channels_last, [channels][pixels] in NCHW where an element is a word; rounded when it is loaded from there
 *   not COPIED  loaded, packed into words and stored: [pixels][words]; 16-bit elements in NCHW
 */
constexpr bool kPlanar = COPIED && !CHANNELS_LAST;
constexpr int kPlane = (kPatchPixels + 7) / 16 * 16 + 8;  // words: whole vectors, and 4 planes in different banks
constexpr int kPixelPitch = kPlanar ? 1 : PIXEL_PITCH, kWordPitch = kPlanar ? kPlane : 1;
constexpr int kElements = words::kElements;  // of a word

constexpr int kStepShifts = WORDS < 8 ? 8 / WORDS : 1;
__constant__ constexpr int kStepBegin[] = STEP_BEGIN;
__constant__ constexpr int kStepShift[] = STEP_SHIFTS;
__constant__ constexpr int kStepWord[] = STEP_WORD;
__constant__ constexpr int kStepTurn[] = STEP_TURN;
__constant__ constexpr unsigned kStepTiles[] = STEP_TILES;
__constant__ constexpr int kPairBegin[] = PAIR_BEGIN;
__constant__ constexpr int kPairStep[] = PAIR_STEP;
__constant__ constexpr int kPairTile[] = PAIR_TILE;
constexpr int kPairs = PAIRS, kSteps = STEPS;

constexpr int kRowTiles = TILE_W / 8;
constexpr int kRun = N_TILES * 8 * STRIDE_W;  // outputs of a warp in a row
static_assert(kRowTiles % N_TILES == 0, "a warp's cells are in one row");
static_assert(WARPS_N * N_TILES == TILE_H * kRowTiles, "the warps share the cells");

// Stage of a warp. NCHW: [8 lines][kRun], with room for a sector more in each line. Channels last:
// [ROW_PHASES][kRun][GROUPS][CHANNELS].
constexpr int kStageLine = padded(CHANNELS_LAST ? GROUPS * CHANNELS : kRun + 2 * kWide);
constexpr int kStageElements = padded(kStageLine * (CHANNELS_LAST ? ROW_PHASES * kRun : 8));

// Shared memory: fragments [GROUPS][WARPS_M][kPairs][32 lanes], patches (two where they are copied), offsets [kSteps][8], biases [GROUPS][WARPS_M][kLineBlocks * 8], stages [kWarps].
constexpr int kFragments = GROUPS * WARPS_M * kPairs * 32;
constexpr int kPatchWords = kPlanar ? GROUPS * WORDS * kPlane : (kPatchPixels * PIXEL_PITCH + 3) / 4 * 4;
constexpr int kPatches = COPIED ? 2 : 1;
constexpr int kOffsets = (kSteps * 8 + 3) / 4 * 4;
constexpr int kBiases = GROUPS * WARPS_M * kLineBlocks * 8;
static_assert(kFragments * 16 + (kPatches * kPatchWords + kOffsets + kBiases) * 4 +
              kWarps * kStageElements * static_cast<int>(sizeof(ELEMENT_T)) <= SHARED_BYTES,
              "the tile does not fit the shared memory of the launch");
extern __shared__ __align__(16) unsigned char shared[];

/* Rows of the product. Lines are cut into blocks of 8, one line a lane g. A block's column phases take slots, and a slot is
 * one half of an M tile, so that a lane has all column phases of its lines. Where blocks come in pairs, a tile is one phase.
 */
constexpr bool kPaired = CHANNELS % 16 == 0;
__device__ constexpr int slot_of(int block, int rw) {
    return kPaired ? (block / 2 * STRIDE_W + rw) * 2 + block % 2 : block * STRIDE_W + rw;
}
__device__ __forceinline__ int block_of(int slot) { return kPaired ? slot / 2 / STRIDE_W * 2 + slot % 2 : slot / STRIDE_W; }
__device__ __forceinline__ int column_phase_of(int slot) { return kPaired ? slot / 2 % STRIDE_W : slot % STRIDE_W; }

/* Shift of a word of a step, counted from the least ones; -1 where the word is padding. */
__device__ constexpr int shift_of(int step, int word) {
    return kStepShift[step * kStepShifts + (WORDS < 8 ? word / WORDS : 0)];
}
/* Which word of a pixel's channels it is. */
__device__ constexpr int channel_word(int step, int word) { return WORDS < 8 ? word % WORDS : kStepWord[step] + word; }
/* The tap of an axis that reaches output r of a cell with a shift, or -1. */
template <int KERNEL, int STRIDE, int PADDING, int DILATION> __device__ __forceinline__ int tap_of(int r, int shift) {
    const int reach = r + PADDING - shift * STRIDE;
    return reach >= 0 && reach % DILATION == 0 && reach / DILATION < KERNEL ? reach / DILATION : -1;
}

/* A word of channels: those from `channel` on, `stride` elements apart, zero from `count` on. */
__device__ __forceinline__ unsigned load_word(const ELEMENT_T* __restrict__ source, int channel, int count, index_t stride) {
    ELEMENT_T values[kElements] = {};
    #pragma unroll
    for (int e = 0; e < kElements; ++e)
        if (channel + e < count) values[e] = load_once(source + (channel + e) * stride);
    return words::pack(values);
}

/* Lay out the weights of the block's groups and channels as the lanes load them, a pair of a step and an M tile a warp. */
__device__ __forceinline__ void stage_weights(
    const direct_forward_mma_params& p, a_words_t* fragments, int first_group, int first_out) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    #pragma unroll 2
    for (int i = threadIdx.x / 32; i < kFragments / 32; i += kWarps) {
        const int pair = i % kPairs, warp_m = i / kPairs % WARPS_M, group = first_group + i / (kPairs * WARPS_M);
        const int step = kPairStep[pair];
        a_words_t values;
        #pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int slot = kPairTile[pair] * 2 + part % 2, word = t + part / 2 * 4, shift = shift_of(step, word);
            const int line = block_of(slot) * 8 + g, rw = column_phase_of(slot);
            const int rh = kStepTurn[step] * ROW_PHASES + line / CHANNELS;
            const int out = first_out + warp_m * CHANNELS + line % CHANNELS;
            const int kh = tap_of<KERNEL_H, STRIDE_H, PADDING_H, DILATION_H>(rh, FIRST_H + shift / SHIFT_BASE);
            const int kw = tap_of<KERNEL_W, STRIDE_W, PADDING_W, DILATION_W>(rw, FIRST_W + shift % SHIFT_BASE);
            values.value[part] = 0;
            if (line < kLines && out < OUT_CHANNELS && shift >= 0 && kh >= 0 && kw >= 0) {
                const long long first = static_cast<long long>(group) * IN_CHANNELS * OUT_CHANNELS;
                const ELEMENT_T* __restrict__ source =
                    p.weight + first * (KERNEL_H * KERNEL_W) + out * p.weight_channel + (kh * KERNEL_W + kw) * p.weight_tap;
                values.value[part] =
                    load_word(source, channel_word(step, word) * kElements, IN_CHANNELS, OUT_CHANNELS * KERNEL_H * KERNEL_W);
            }
        }
        fragments[i * 32 + lane] = values;
    }
}

/* Where a block's patch begins in the input. */
struct origin_t { int image, row, column; };

#if COPIED
/* Begin to copy a patch, zero outside the image and beyond the last channel. */
__device__ __forceinline__ void fetch_patch(const direct_forward_mma_params& p, unsigned* patch, int first_group, origin_t origin) {
    const index_t in_pixels = static_cast<index_t>(p.h_in) * p.w_in, channels = static_cast<index_t>(p.groups) * IN_CHANNELS;
    const ELEMENT_T* source = p.input + origin.image * static_cast<long long>(in_pixels) * channels;
#if CHANNELS_LAST
    constexpr int kGroupWords = IN_CHANNELS / kElements, kChunk = gcd(4, kGroupWords), kChunks = WORDS / kChunk;
    source += first_group * IN_CHANNELS;
    #pragma unroll 4
    for (int i = threadIdx.x; i < kPatchPixels * GROUPS * kChunks; i += kThreads) {
        const int pixel = i / (GROUPS * kChunks), group = i / kChunks % GROUPS, word = i % kChunks * kChunk;
        const int ih = origin.row + pixel / kPatchW, iw = origin.column + pixel % kPatchW;
        const bool inside = static_cast<unsigned>(ih) < p.h_in && static_cast<unsigned>(iw) < p.w_in && word < kGroupWords;
        const index_t place = (static_cast<index_t>(ih) * p.w_in + iw) * channels + group * IN_CHANNELS + word * kElements;
        cp_async<kChunk * 4>(patch + pixel * PIXEL_PITCH + group * WORDS + word, source + (inside ? place : 0), inside);
    }
#else
    constexpr int kSpots = kPatchPixels / PIXELS;
    source += static_cast<index_t>(first_group) * IN_CHANNELS * in_pixels;
    #pragma unroll 4
    for (int i = threadIdx.x; i < kSpots * WORDS; i += kThreads) {
        const int pixel = i % kSpots * PIXELS, channel = i / kSpots;
        const int ih = origin.row + pixel / kPatchW, iw = origin.column + pixel % kPatchW;
        const bool inside =
            static_cast<unsigned>(ih) < p.h_in && static_cast<unsigned>(iw) < p.w_in && channel < IN_CHANNELS;
        const index_t place = channel * in_pixels + (static_cast<index_t>(ih) * p.w_in + iw);
        cp_async<PIXELS * 4>(patch + channel * kPlane + pixel, source + (inside ? place : 0), inside);
    }
#endif
}
#else
/* Load a patch and fill it with words, zero outside the image and beyond the last channel. */
__device__ __forceinline__ void pack_patch(const direct_forward_mma_params& p, unsigned* patch, int group, origin_t origin) {
    constexpr int kQuad = WORDS < 4 ? WORDS : 4, kQuads = WORDS / kQuad;  // words that are stored together
    using quad_t = vector_of<unsigned, kQuad>;
    constexpr int kSpots = kPatchPixels / PIXELS;  // neighbouring pixels that are loaded together
    // Lanes go along pixels, or four quads of each, so that they load whole sectors and store to different banks.
    constexpr int kNext = kQuads % 4 == 0 ? 4 : 1;
    constexpr int kTurns = (kSpots * kQuads + kThreads - 1) / kThreads;
    constexpr int kUnroll = 32 / (PIXELS * kQuad);  // turns whose loads are in flight together
    const index_t in_pixels = static_cast<index_t>(p.h_in) * p.w_in, channels = static_cast<index_t>(p.groups) * IN_CHANNELS;
    const ELEMENT_T* source = p.input + (origin.image * static_cast<long long>(channels) + group * IN_CHANNELS) * in_pixels;
    #pragma unroll kUnroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int i = turn * kThreads + threadIdx.x;
        if (kSpots * kQuads % kThreads != 0 && i >= kSpots * kQuads) break;
        const int pixel = i / kNext % kSpots * PIXELS, first_word = (i / (kNext * kSpots) * kNext + i % kNext) * kQuad;
        const int ih = origin.row + pixel / kPatchW, iw = origin.column + pixel % kPatchW;
        const bool inside = static_cast<unsigned>(ih) < p.h_in && static_cast<unsigned>(iw) < p.w_in;
        const index_t place = static_cast<index_t>(ih) * p.w_in + iw;
        vector_t<PIXELS> loaded[kQuad * kElements] = {};
        #pragma unroll
        for (int c = 0; c < kQuad * kElements; ++c) {
            const int channel = first_word * kElements + c;
            if (inside && (IN_CHANNELS == WORDS * kElements || channel < IN_CHANNELS))
                loaded[c] = *reinterpret_cast<const vector_t<PIXELS>*>(source + (channel * in_pixels + place));
        }
        #pragma unroll
        for (int e = 0; e < PIXELS; ++e) {
            quad_t values;
            #pragma unroll
            for (int w = 0; w < kQuad; ++w) {
                ELEMENT_T elements[kElements];
                #pragma unroll
                for (int c = 0; c < kElements; ++c) elements[c] = loaded[w * kElements + c].value[e];
                values.value[w] = words::pack(elements);
            }
            *reinterpret_cast<quad_t*>(patch + ((pixel + e) * PIXEL_PITCH + first_word)) = values;
        }
    }
}
#endif

/* Where a word of a step lies in the patch, from the pixel of a cell. */
__device__ constexpr int offset_of(int step, int word) {
    const int shift = shift_of(step, word);
    const int pixel = shift < 0 ? 0 : shift / SHIFT_BASE * kPatchW + shift % SHIFT_BASE;
    return pixel * kPixelPitch + channel_word(step, word) * kWordPitch;
}

/* The products of one step, for a group and a warp's cells. `low` and `high` are the words t and t + 4 of cell g. */
__device__ __forceinline__ void multiply(
    float (&sum)[kMTiles][N_TILES][4], const unsigned* low, const unsigned* high, const a_words_t*& weights, unsigned tiles) {
    unsigned b[N_TILES][2];
    #pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        const int place = n * 8 * kPixelPitch;
        b[n][0] = COPIED ? words::rounded(low[place]) : low[place];
        b[n][1] = COPIED ? words::rounded(high[place]) : high[place];
    }
    #pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
        if (!(USED_TILES >> m & 1)) continue;  // whose phases have no tap at all
        if (!(tiles >> m & 1)) continue;
        const a_words_t a = *weights;
        weights += 32;
        #pragma unroll
        for (int n = 0; n < N_TILES; ++n) words::mma(sum[m][n], a, b[n][0], b[n][1]);
    }
}

[[maybe_unused]] constexpr bool kWholeChannels = OUT_CHANNELS % (WARPS_M * CHANNELS) == 0;

/* How far an output lies beyond the beginning of a sector of 32 bytes. */
__device__ __forceinline__ int beyond_sector(const ELEMENT_T* output) {
    return static_cast<int>(reinterpret_cast<unsigned long long>(output) / sizeof(ELEMENT_T) % (2 * kWide));
}

/* Store a warp's outputs of a turn and group; WHOLE says that none of them is outside the image. */
template <bool WHOLE> __device__ __forceinline__ void store(
    const direct_forward_mma_params& p, const float (&sum)[kMTiles][N_TILES][4], ELEMENT_T* stage, int image, int gi,
    int first_group, int first_out, int oh0, int ow0) {
    const int lane = threadIdx.x % 32;
    const index_t out_pixels = static_cast<index_t>(p.h_out) * p.w_out;
    const long long out_channels = static_cast<long long>(p.groups) * OUT_CHANNELS;
    const int g = lane / 4, t = lane % 4;
#if CHANNELS_LAST
    // To the stage, then all groups' channels of a pixel together.
    if (gi == 0) __syncwarp();
    #pragma unroll
    for (int block = 0; block < kLineBlocks; ++block) {
        const int line = block * 8 + g, phase = line / CHANNELS, channel = line % CHANNELS;
        if (kLines % 8 != 0 && line >= kLines) continue;
        #pragma unroll
        for (int n = 0; n < N_TILES; ++n)
            #pragma unroll
            for (int output = 0; output < 2 * STRIDE_W; ++output) {
                const int slot = slot_of(block, output % STRIDE_W);
                const int place = phase * kRun + (n * 8 + 2 * t) * STRIDE_W + output;
                stage[place * kStageLine + gi * CHANNELS + channel] =
                    narrow<ELEMENT_T>(sum[slot / 2][n][slot % 2 * 2 + output / STRIDE_W]);
            }
    }
    if (gi < GROUPS - 1) return;
    __syncwarp();
    constexpr int kVectors = GROUPS * CHANNELS / VECTOR;  // of a pixel
    #pragma unroll 1
    for (int phase = 0; phase < ROW_PHASES; ++phase) {
        const int oh = oh0 + phase;
        if (!WHOLE && oh >= p.h_out) return;
        const long long row = image * static_cast<long long>(out_pixels) + (static_cast<index_t>(oh) * p.w_out + ow0);
        ELEMENT_T* __restrict__ target = p.output + (row * out_channels + first_group * OUT_CHANNELS + first_out);
        #pragma unroll 4
        for (int i = lane; i < kRun * kVectors; i += 32) {
            const int pixel = i / kVectors, channel = i % kVectors * VECTOR;
            if ((WHOLE || ow0 + pixel < p.w_out) && (GROUPS > 1 || first_out + channel < OUT_CHANNELS))
                copy<VECTOR>(target + (pixel * static_cast<int>(out_channels) + channel),
                             stage + (phase * kRun + pixel) * kStageLine + channel);
        }
    }
#else
    const long long plane = image * out_channels + (first_group + gi) * OUT_CHANNELS + first_out;
    ELEMENT_T* __restrict__ first = p.output + (plane * out_pixels + (static_cast<index_t>(oh0) * p.w_out + ow0));
    // A quad of lanes has a line, 16 bytes a lane, from the sector on where it begins; what is left at its two ends is stored
    // in pieces of VECTOR. It lies as far beyond the beginning of its line of the stage. Lines 4 apart are in different banks.
    // Planes 8 channels apart begin alike, modulo 16 bytes: each other 8 half a sector off where planes are odd.
    static_assert(CHANNELS % 8 == 0 && kWide % VECTOR == 0, "blocks of lines of one row phase");
    constexpr int kPiece = gcd(2 * STRIDE_W, VECTOR);  // of a lane's outputs of two cells
    constexpr int kTurns = (kRun / kWide + 1 + 3) / 4;
    const int length = WHOLE ? kRun : min(kRun, p.w_out - ow0), own = lane / 4 % 2 * 4 + lane / 8;
    const ELEMENT_T* own_stage = stage + own * kStageLine;
    #pragma unroll
    for (int phase = 0; phase < ROW_PHASES; ++phase, first += p.w_out) {
        if (!WHOLE && oh0 + phase >= p.h_out) return;
        const int before = beyond_sector(first + own * out_pixels), end = before + length;
        ELEMENT_T* __restrict__ target = first + (own * out_pixels - before);
        ELEMENT_T* line = stage + (g * kStageLine + beyond_sector(first + g * out_pixels));
        #pragma unroll
        for (int channel = 0; channel < CHANNELS; channel += 8, target += 8 * out_pixels) {
            __syncwarp();
            #pragma unroll
            for (int n = 0; n < N_TILES; ++n)
                #pragma unroll
                for (int first_of_piece = 0; first_of_piece < 2 * STRIDE_W; first_of_piece += kPiece) {
                    vector_t<kPiece> piece;
                    #pragma unroll
                    for (int i = 0; i < kPiece; ++i) {
                        const int output = first_of_piece + i;
                        const int slot = slot_of((phase * CHANNELS + channel) / 8, output % STRIDE_W);
                        piece.value[i] = narrow<ELEMENT_T>(sum[slot / 2][n][slot % 2 * 2 + output / STRIDE_W]);
                    }
                    *reinterpret_cast<vector_t<kPiece>*>(line + (n * 8 + 2 * t) * STRIDE_W + first_of_piece) = piece;
                }
            __syncwarp();
            if (!kWholeChannels && first_out + channel + own >= OUT_CHANNELS) continue;
            #pragma unroll
            for (int i = 0; i < kTurns; ++i) {
                const int place = (i * 4 + t) * kWide;
                if ((i > 0 || place >= before) && place + kWide <= end)
                    copy<kWide>(target + place, own_stage + place);
            }
            #pragma unroll
            for (int piece = 0; piece < kWide; piece += 4 * VECTOR) {
                const int rest = piece + t * VECTOR, head = before / kWide * kWide, tail = end / kWide * kWide;
                if (head < before && head + rest >= before && head + rest < end && rest < kWide)
                    copy<VECTOR>(target + (head + rest), own_stage + (head + rest));
                if (tail >= before && tail + rest < end) copy<VECTOR>(target + (tail + rest), own_stage + (tail + rest));
            }
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
direct_forward_mma_kernel(const __grid_constant__ direct_forward_mma_params p) {
    a_words_t* fragments = reinterpret_cast<a_words_t*>(shared);
    unsigned* patch = reinterpret_cast<unsigned*>(fragments + kFragments);
    int* offsets = reinterpret_cast<int*>(patch + kPatches * kPatchWords);
    float* biases = reinterpret_cast<float*>(offsets + kOffsets);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    ELEMENT_T* stage = reinterpret_cast<ELEMENT_T*>(biases + kBiases) + warp * kStageElements;

    // The channels and cells of the block and of the warp.
    const int warp_n = warp % WARPS_N, warp_m = warp / WARPS_N;
    const int first_group = static_cast<int>(blockIdx.y) / kOutBlocks * GROUPS;
    const int block_out = static_cast<int>(blockIdx.y) % kOutBlocks * (WARPS_M * CHANNELS);
    const int first_out = block_out + warp_m * CHANNELS;
    const int first_cell_row = warp_n * N_TILES / kRowTiles, first_cell = warp_n * N_TILES % kRowTiles * 8;

    int tile_w = blockIdx.x % p.tiles_w, tile_h = blockIdx.x / p.tiles_w % p.tiles_h;
    origin_t origin = {static_cast<int>(blockIdx.x / (p.tiles_w * p.tiles_h)), tile_h * TILE_H + FIRST_H,
                       tile_w * TILE_W + FIRST_W - LEAD};
#if COPIED
    unsigned* next_patch = patch + kPatchWords;
    fetch_patch(p, next_patch, first_group, origin);
#endif
    stage_weights(p, fragments, first_group, block_out);
    for (int i = threadIdx.x; i < kSteps * 8; i += kThreads) offsets[i] = offset_of(i / 8, i % 8);
    for (int i = threadIdx.x; i < kBiases; i += kThreads) {
        const int line = i % (kLineBlocks * 8), of_warp = i / (kLineBlocks * 8) % WARPS_M;
        const int out = block_out + of_warp * CHANNELS + line % CHANNELS;
        const int group = first_group + i / (kLineBlocks * 8 * WARPS_M);
        const bool biased = p.bias != nullptr && line < kLines && out < OUT_CHANNELS;
        biases[i] = biased ? widen(load_once(p.bias + group * OUT_CHANNELS + out)) : 0.0f;
    }

    #pragma unroll 1
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const int image = origin.image, cell_row0 = tile_h * TILE_H, cell_column0 = tile_w * TILE_W;
        [[maybe_unused]] const origin_t current = origin;
        origin.image += p.step_image;
        tile_h += p.step_tile_h;
        tile_w += p.step_tile_w;
        if (tile_w >= p.tiles_w) { tile_w -= p.tiles_w; ++tile_h; }
        if (tile_h >= p.tiles_h) { tile_h -= p.tiles_h; ++origin.image; }
        origin.row = tile_h * TILE_H + FIRST_H;
        origin.column = tile_w * TILE_W + FIRST_W - LEAD;
        [[maybe_unused]] const bool another = static_cast<int>(tile + gridDim.x) < p.tiles;

#if COPIED
        // The next tile's copies go on while this one is computed and stored.
        wait_for_copies();
        __syncthreads();
        unsigned* const other = patch;
        patch = next_patch;
        next_patch = other;
        if (another) fetch_patch(p, next_patch, first_group, origin);
#else
        __syncthreads();
        pack_patch(p, patch, first_group, current);
        __syncthreads();
#endif

        // The warp's first output row, of the turn's first row phase, and column.
        int oh0 = (cell_row0 + first_cell_row) * STRIDE_H;
        const int ow0 = (cell_column0 + first_cell) * STRIDE_W;
        if (oh0 >= p.h_out || ow0 >= p.w_out) continue;
        #pragma unroll 1
        for (int turn = 0; turn < STRIDE_H / ROW_PHASES; ++turn, oh0 += ROW_PHASES) {
            #pragma unroll 1
            for (int gi = 0; gi < GROUPS; ++gi) {
                // Compute.
                float sum[kMTiles][N_TILES][4];
                const float* line_bias = biases + (gi * WARPS_M + warp_m) * (kLineBlocks * 8) + g;
                #pragma unroll
                for (int slot = 0; slot < 2 * kMTiles; ++slot) {
                    const float bias = slot < kLineBlocks * STRIDE_W ? line_bias[block_of(slot) * 8] : 0.0f;
                    #pragma unroll
                    for (int n = 0; n < N_TILES; ++n)
                        sum[slot / 2][n][slot % 2 * 2] = sum[slot / 2][n][slot % 2 * 2 + 1] = bias;
                }
                const int first_pixel = first_cell_row * kPatchW + LEAD + first_cell + g;
                const unsigned* cells = patch + (first_pixel * kPixelPitch + gi * (WORDS * kWordPitch));
                const a_words_t* weights = fragments + ((gi * WARPS_M + warp_m) * kPairs + kPairBegin[turn]) * 32 + lane;
#if UNROLLED
                // Every offset is known when compiling.
                #pragma unroll
                for (int i = 0; i < STRIDE_H / ROW_PHASES; ++i) {
                    if (i != turn) continue;
                    #pragma unroll
                    for (int step = kStepBegin[i]; step < kStepBegin[i + 1]; ++step)
                        multiply(sum, cells + t * kWordPitch + offset_of(step, 0),
                                 cells + t * kWordPitch + offset_of(step, 4), weights, kStepTiles[step]);
                }
#else
                for (int step = kStepBegin[turn]; step < kStepBegin[turn + 1]; ++step)
                    multiply(sum, cells + offsets[step * 8 + t], cells + offsets[step * 8 + t + 4], weights,
                             kStepTiles[step]);
#endif
                if (oh0 + ROW_PHASES <= p.h_out && ow0 + kRun <= p.w_out)
                    store<true>(p, sum, stage, image, gi, first_group, first_out, oh0, ow0);
                else
                    store<false>(p, sum, stage, image, gi, first_group, first_out, oh0, ow0);
            }
        }
    }
}
