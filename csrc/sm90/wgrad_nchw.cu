/* fused on Hopper, weight gradient in NCHW: no columns are written. float32 in products of TF32, or in three of them (SPLIT).
 *
 *   grad_weight[ci, co, kh, kw] = sum over n, ih, iw of
 *                                 input[n, ci, ih, iw] * grad_output[n, co, ih*S_H - P_H + kh*D_H, iw*S_W - P_W + kw*D_W]
 *
 * is for each tap a matrix product whose K are pixels, along which both tensors lie in memory:
 *
 *   sums [co, ci] += grad_output at the tap [co, pixel] . input [pixel, ci]
 *
 * The right side comes as boxes of a tensor map, straight to where products read it: PIXELS of CI_TILE channels, each a line of
 * 64 or 128 bytes (see ptx/wgmma.cuh); float32 is rounded where it lies. The left side, which each tap wants at other places,
 * strides and odd shifts among them, comes as rows as they lie in memory, and goes from there to registers: of 16-bit values a
 * thread loads the words that all taps of its row need of two pixels once, and puts those of each tap together.
 *
 *   S=2, pixels 0 and 1: elements e0 to e5 of a row; taps 0 to 3 are (e0, e2), (e1, e3), (e2, e4), (e3, e5)
 *
 * Boxes have rows of whole 16 bytes. Where those of grad_output have not (LONG_ROWS), planes are one long row each,
 * or 2 or 4 of them together are; pieces of rows then begin at other places in the 16 bytes each time, which their
 * warps add. Output channels whose planes are together lie as many apart. Where padding cuts outputs off, taps read
 * beyond the ends of rows, which are other rows here and not zeros: what lies there is mended in shared memory.
 *
 * What lies outside of the tensors counts as zeros, so values must be finite, as in sm90/implicit_gemm.cu.
 *
 * A block has 64 * SIDES_CO output channels, CI_TILE input channels, and as many taps as its warpgroups have, each of its own:
 * TAPS_H x TAPS_W. It goes over a slice of the pixels, tile after tile, and writes a partial sum for each weight;
 * splits/reduce.cu adds the slices in their order. One thread begins all copies, three warps round and mend. The sums
 * of SPLIT leave the tensor cores, which cut them off, after each tile.
 *
 * A line of a box costs some 7 cycles, however short it is, and that is what limits layers of few channels: so a tile has ROWS
 * rows of pixels, whose taps read the same rows of grad_output (KernelBench 57, ROWS = 2: 4 for 6), and three warpgroups may
 * have a row of taps each.
 *
 * Macros: ELEMENT_T, SPLIT; PARTIAL_T (of partial sums: float, or ELEMENT_T where one slice is all that a layer ever
 * has); CI, CO (channels of a group); KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W; PIXELS (of a line: what 64
 * or 128 bytes have), ROWS (lines of a channel in a tile), TILE_W (pixels of a line in a row: all, or the input's
 * width), SEGMENT (of them that read one piece of a row of grad_output), VECTOR (words of it that a thread loads
 * together); CI_TILE (a multiple of 16 up to 256); SIDES_CO, SIDES_H, SIDES_W (warpgroups with output channels, or
 * taps, of their own), TAPS_H, TAPS_W; SLOTS (pieces that a tile needs), SLOT_ROWS, SLOT_COLUMNS (which, from the
 * first), SLOT_OF (of a segment and a row of taps); ROW_PITCH (elements of a piece); LONG_ROWS (0 where boxes have
 * rows); STAGES. None depends on sizes, but for TILE_W and LONG_ROWS. Chosen by gemmconv/kernels/sm90/wgrad_nchw.py.
 */
#define WGMMA_COLUMNS CI_TILE
#include "ptx/pdl.cuh"
#include "numeric/integers.cuh"
#include "ptx/mma.cuh"
#include "pipeline/persistent.cuh"
#include "ptx/tma.cuh"
#include "numeric/units.cuh"
#include "numeric/unroll.cuh"
#include "ptx/wgmma.cuh"

struct wgrad_nchw_params {
    tensor_map_t input, grad_output;
    PARTIAL_T* __restrict__ partials;  // [slices, groups, K_H * K_W, CI, CO]
    int groups, w_in, h_out, w_out;
    int tiles_w, tiles_h;  // of an image: across, and rows of them
    int tiles, slices;     // tiles in all
    int plane_bits;        // of how many planes are one long row
};

constexpr int kWarpgroups = SIDES_CO * SIDES_H * SIDES_W, kMultipliers = 128 * kWarpgroups, kThreads = kMultipliers + 128;
constexpr int kRegisters = 65536 / kThreads / 8 * 8, kHelperRegisters = kWarpgroups == 3 ? 32 : 40;
constexpr int kMultiplierRegisters = (kRegisters * kThreads - 128 * kHelperRegisters) / kMultipliers / 8 * 8;
constexpr int kTaps = TAPS_H * TAPS_W, kAllTaps = KERNEL_H * KERNEL_W, kBlockCo = 64 * SIDES_CO;
constexpr int kSetsH = ceil_div(KERNEL_H, SIDES_H * TAPS_H), kSetsW = ceil_div(KERNEL_W, SIDES_W * TAPS_W);
constexpr int kCiTiles = ceil_div(CI, CI_TILE), kCoTiles = ceil_div(CO, kBlockCo);
// Elements of a word, and of 16 bytes; pixels of a step, 32 bytes.
constexpr int kItem = sizeof(ELEMENT_T), kElements = 4 / kItem, kPiece = 16 / kItem, kStepPixels = 32 / kItem;
constexpr int kTilePixels = ROWS * PIXELS, kTileH = kTilePixels / TILE_W;
constexpr int kLineSteps = PIXELS / kStepPixels, kSteps = ROWS * kLineSteps;
static_assert(STRIDE_W % VECTOR == 0, "vectors are aligned");
// Boxes begin at multiples of 16 bytes; kShift is how far before the first element that is needed, in LONG_ROWS of whole words.
constexpr int kUnit = LONG_ROWS ? kElements : kPiece;
constexpr int kShift = (kUnit - PADDING_W % kUnit) % kUnit, kFirst = kShift % (kElements * VECTOR);
constexpr bool kCut = LONG_ROWS && (PADDING_H > 0 || PADDING_W > 0);
static_assert(!LONG_ROWS || VECTOR == 1, "rows begin at any word");
// Words of a row of grad_output that the taps of a row need of a word of pixels.
constexpr int kLastElement = kFirst + (TAPS_W - 1) * DILATION_W + (kElements - 1) * STRIDE_W;
constexpr int kWords = kLastElement / kElements + 1, kVectors = ceil_div(kWords, VECTOR);
static_assert(kSetsW == 1 || SIDES_W * TAPS_W * DILATION_W % kUnit == 0,
              "all blocks shift alike");
static_assert(SIDES_W == 1 || TAPS_W * DILATION_W % (kElements * VECTOR) == 0, "words of a side are aligned");
static_assert(SEGMENT % (kStepPixels / 2) == 0 && TILE_W % SEGMENT == 0 && PIXELS % TILE_W == 0,
              "the pixels of half a step lie in a segment");

// Shared memory: stages [STAGES] of lines [kParts][ROWS][CI_TILE][PIXELS] and rows [SLOTS][kBlockCo][ROW_PITCH]; barriers.
constexpr int kParts = SPLIT ? 2 : 1;  // of lines; the second are what rounding left of the first
constexpr int kLineBytes = PIXELS * kItem, kBox = CI_TILE * kLineBytes, kPart = ROWS * kBox, kLines = kParts * kPart;
constexpr int kRow = kBlockCo * ROW_PITCH;  // elements
constexpr int kStage = kLines + SLOTS * kRow * kItem;  // bytes
// Channels that come; those that a group does not have only reach sums that nobody stores.
constexpr int kInputs = CI < CI_TILE ? CI : CI_TILE, kOutputs = CO < kBlockCo ? CO : kBlockCo;
constexpr int kComing = (ROWS * kInputs * PIXELS + SLOTS * kOutputs * ROW_PITCH) * kItem;  // bytes
constexpr bool kRounded = kItem == 4, kMended = kRounded || kCut;
constexpr int kMenders = 96;
// Lanes of a warp that arrive for it. What is cut is written and read by threads, and racecheck takes each for itself.
constexpr int kArriving = kCut ? 32 : 1;
static_assert(kBox % 1024 == 0 && kRow * kItem % 1024 == 0, "boxes are swizzled from multiples of 1024 bytes on");
extern __shared__ __align__(1024) unsigned char shared[];

__constant__ constexpr int kSlotRows[] = SLOT_ROWS;
__constant__ constexpr int kSlotColumns[] = SLOT_COLUMNS;
__constant__ constexpr int kSlotOf[kTilePixels / SEGMENT][SIDES_H * TAPS_H] = SLOT_OF;

/* The pixels of a block: tiles [first, end) of a slice. */
struct work_t { int group, ci, co, kh, kw, slice, first, end; };
__device__ __forceinline__ work_t work_of(const wgrad_nchw_params& p) {
    int rest = blockIdx.x;
    work_t work;
    work.ci = rest % kCiTiles * CI_TILE, rest /= kCiTiles;
    work.co = rest % kCoTiles * kBlockCo, rest /= kCoTiles;
    work.kw = rest % kSetsW * (SIDES_W * TAPS_W), rest /= kSetsW;
    work.kh = rest % kSetsH * (SIDES_H * TAPS_H), rest /= kSetsH;
    work.group = rest % p.groups, work.slice = rest / p.groups;
    work.first = static_cast<int>(static_cast<long long>(p.tiles) * work.slice / p.slices);
    work.end = static_cast<int>(static_cast<long long>(p.tiles) * (work.slice + 1) / p.slices);
    return work;
}

/* Output channels of a block whose planes are at the same place of their long rows: a class, whose rows lie together. */
constexpr int kBlockBits = SIDES_CO == 1 ? 6 : 7;
static_assert(kBlockCo == 1 << kBlockBits, "classes of a block have 2^n rows");
__device__ __forceinline__ int plane_bits(const wgrad_nchw_params& p) { return LONG_ROWS ? p.plane_bits : 0; }
__device__ __forceinline__ int class_of(const wgrad_nchw_params& p, int row) { return row >> (kBlockBits - plane_bits(p)); }
__device__ __forceinline__ int row_in_class(const wgrad_nchw_params& p, int row) {
    return row & ((kBlockCo >> plane_bits(p)) - 1);
}

/* Where a tile is: an image, a row and a column of pixels; the row and the column of grad_output that the first piece begins
 * with, and, in LONG_ROWS, the element of these.
 */
struct place_t { int image, row, column; };
__device__ __forceinline__ place_t place_of(const wgrad_nchw_params& p, int tile) {
    const int tiles_image = p.tiles_w * p.tiles_h, image = tile / tiles_image, place = tile - image * tiles_image;
    return {image, place / p.tiles_w * kTileH, place % p.tiles_w * TILE_W};
}
__device__ __forceinline__ int first_row(const work_t& work, const place_t& place) {
    return place.row * STRIDE_H - PADDING_H + work.kh * DILATION_H;
}
__device__ __forceinline__ int first_column(const work_t& work, const place_t& place) {
    return place.column * STRIDE_W - PADDING_W - kShift + work.kw * DILATION_W;
}
__device__ __forceinline__ int first_element(
    const wgrad_nchw_params& p, const work_t& work, const place_t& place, int plane) {
    return (plane * p.h_out + first_row(work, place)) * p.w_out + first_column(work, place);
}

/* The first element of the 16 bytes that an element lies in, and its index among these. */
__device__ __forceinline__ int piece_of(int element) { return element & -kPiece; }
__device__ __forceinline__ int place_in_piece(int element) { return element & (kPiece - 1); }

struct barriers_t { barrier_t *came, *full, *empty; };  // where nothing is mended, came is full

__device__ __forceinline__ void produce(const wgrad_nchw_params& p, const barriers_t& b) {
    const work_t work = work_of(p);
    ring_t ring;
    for (int tile = work.first; tile < work.end; ++tile) {
        const place_t place = place_of(p, tile);
        barrier_wait(b.empty[ring.stage], ring.parity ^ 1);
        barrier_t& full = b.came[ring.stage];
        barrier_arrive_expecting(full, kComing);
        unsigned char* stage = shared + ring.stage * kStage;
        const int channel = work.group * CI + work.ci, out_channel = work.group * CO + work.co;
        #pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            unsigned char* box = stage + row * kBox;
            if (TILE_W < PIXELS) tma_load(box, p.input, place.row * p.w_in + row * PIXELS, 0, channel, place.image, full);
            else tma_load(box, p.input, place.column, place.row + row, channel, place.image, full);
        }
        #pragma unroll 1
        for (int slot = 0; slot < SLOTS; ++slot) {
            unsigned char* row = stage + kLines + slot * kRow * kItem;
            if (LONG_ROWS) {
                int first = first_element(p, work, place, 0) + kSlotRows[slot] * p.w_out + kSlotColumns[slot];
                #pragma unroll 1
                for (const unsigned char* end = row + kRow * kItem; row < end; row += kRow * kItem >> p.plane_bits) {
                    tma_load(row, p.grad_output, piece_of(first), 0, out_channel >> p.plane_bits, place.image, full);
                    first += p.h_out * p.w_out;
                }
            } else {
                tma_load(row, p.grad_output, first_column(work, place) + kSlotColumns[slot],
                         first_row(work, place) + kSlotRows[slot], out_channel, place.image, full);
            }
        }
        ring.advance(STAGES);
    }
}

/* Rounds the right side where it lies. */
__device__ __forceinline__ void round(unsigned char* stage, int thread) {
    unit_t* units = reinterpret_cast<unit_t*>(stage);
    #pragma unroll 4
    for (int i = thread; i < kPart / 16; i += kMenders) {
        const parts_t<kParts> parts = rounded_unit<kParts, ELEMENT_T>(units[i]);
        #pragma unroll
        for (int part = 0; part < kParts; ++part) units[i + part * (kPart / 16)] = parts.part[part];
    }
}

/* Puts zeros where taps of pixels read beyond the ends of rows: padding's elements on both sides, and whole rows. */
__device__ __forceinline__ void cut(
    const wgrad_nchw_params& p, const work_t& work, const place_t& place, ELEMENT_T* rows, int thread) {
    #pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot) {
        const int row = first_row(work, place) + kSlotRows[slot], column = first_column(work, place) + kSlotColumns[slot];
        const bool there = row >= 0 && row < p.h_out;
        if (there && column >= 0 && column + ROW_PITCH <= p.w_out) continue;
        #pragma unroll 1
        for (int line = thread; line < kBlockCo; line += kMenders) {
            if (row_in_class(p, line) >= kOutputs >> plane_bits(p)) continue;
            const int plane = class_of(p, line);
            ELEMENT_T* piece = rows + slot * kRow + line * ROW_PITCH;
            const int begin = place_in_piece((plane * p.h_out + row) * p.w_out + column) - column, end = begin + p.w_out;
            for (int e = there ? begin - PADDING_W : 0; e < (there ? begin : ROW_PITCH); ++e)
                if (e >= 0 && e < ROW_PITCH) piece[e] = ELEMENT_T{};
            for (int e = end; there && e < end + PADDING_W; ++e)
                if (e >= 0 && e < ROW_PITCH) piece[e] = ELEMENT_T{};
        }
    }
}

__device__ __forceinline__ void mend(const wgrad_nchw_params& p, const barriers_t& b, int thread) {
    const work_t work = work_of(p);
    ring_t ring;
    for (int tile = work.first; tile < work.end; ++tile) {
        barrier_wait(b.came[ring.stage], ring.parity);
        unsigned char* stage = shared + ring.stage * kStage;
        if (kRounded) round(stage, thread);
        if (kCut) cut(p, work, place_of(p, tile), reinterpret_cast<ELEMENT_T*>(stage + kLines), thread);
        fence_async_proxy();
        __syncwarp();
        if (thread % 32 < kArriving) barrier_arrive(b.full[ring.stage]);
        ring.advance(STAGES);
    }
}

/* The left sides of the taps of a row, of a step: words (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4) of each. `rows` is where
 * row g of slot 0 begins, at the thread's first pixel; `first` the first element of its plane, in LONG_ROWS.
 */
template <int STEP, int TAP_ROW>
__device__ __forceinline__ void load_left(
    unsigned (&a)[kParts][TAPS_W][4], const ELEMENT_T* rows, int side_h, [[maybe_unused]] int first,
    [[maybe_unused]] int w_out) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int pixel = STEP * kStepPixels + i / 2 * (kStepPixels / 2);
        const int slot = kSlotOf[pixel / SEGMENT][side_h * TAPS_H + TAP_ROW];
        const ELEMENT_T* from = rows + slot * kRow + i % 2 * 8 * ROW_PITCH + pixel % SEGMENT * STRIDE_W;
        if (LONG_ROWS) from += place_in_piece(first + kSlotRows[slot] * w_out + kSlotColumns[slot]);
        unsigned words[kVectors * VECTOR];
        #pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const words_t<4 * VECTOR> vector = reinterpret_cast<const words_t<4 * VECTOR>*>(from)[v];
            #pragma unroll
            for (int j = 0; j < VECTOR; ++j) words[v * VECTOR + j] = vector.word[j];
        }
        #pragma unroll
        for (int tap = 0; tap < TAPS_W; ++tap) {
            const int low = kFirst + tap * DILATION_W, high = low + STRIDE_W;  // elements
            if (kElements == 1) {
                unsigned rest;
                a[0][tap][i] = rounded<kParts, ELEMENT_T>(words[low], rest);
                if (SPLIT) a[kParts - 1][tap][i] = rest;
            } else if (STRIDE_W == 1 && low % 2 == 0) {
                a[0][tap][i] = words[low / 2];
            } else {
                a[0][tap][i] = halves(words[low / 2], words[high / 2], low % 2, high % 2);
            }
        }
    }
}

__device__ __forceinline__ void consume(const wgrad_nchw_params& p, const barriers_t& b, int warpgroup) {
    const work_t work = work_of(p);
    const int side_co = warpgroup % SIDES_CO, side_w = warpgroup / SIDES_CO % SIDES_W;
    const int side_h = warpgroup / (SIDES_CO * SIDES_W);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
    const int first_row = side_co * 64 + warp * 16, plane = __shfl_sync(0xffffffffu, class_of(p, first_row), 0);
    const descriptor_t all_lines = descriptor_k_major_swizzled<kLineBytes>(shared);
    const int begin = (first_row + g) * ROW_PITCH + kElements * t * STRIDE_W + side_w * TAPS_W * DILATION_W +
                      kShift - kFirst;
    float sums[kTaps][CI_TILE / 2];
    [[maybe_unused]] float chain[SPLIT ? kTaps : 1][SPLIT ? CI_TILE / 2 : 1];  // of a tile
    #pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) wgmma_clear(sums[tap]);
    unsigned left[2][kParts][TAPS_W][4];  // one belongs to products that run
    ring_t ring;
    int held = -1;  // stage that they may still read
    for (int tile = work.first; tile < work.end; ++tile) {
        const int first = LONG_ROWS ? first_element(p, work, place_of(p, tile), plane) : 0;
        barrier_wait(b.full[ring.stage], ring.parity);
        const unsigned char* stage = shared + ring.stage * kStage;
        const ELEMENT_T* rows = reinterpret_cast<const ELEMENT_T*>(stage + kLines) + begin;
        const descriptor_t lines = advance(all_lines, ring.stage * kStage);
        each<kSteps>([&](auto step_c) {
            constexpr int kStep = step_c;
            each<TAPS_H>([&](auto row_c) {
                constexpr int kRowOfTaps = row_c, kBuffer = (kStep * TAPS_H + kRowOfTaps) % 2;
                load_left<kStep, kRowOfTaps>(left[kBuffer], rows, side_h, first, p.w_out);
                wgmma_fence();
                const descriptor_t right = advance(lines, kStep / kLineSteps * kBox + kStep % kLineSteps * 32);
                #pragma unroll
                for (int tap = 0; tap < TAPS_W; ++tap) {
                    const auto& words = left[kBuffer];
                    constexpr int kFirstTap = kRowOfTaps * TAPS_W;
#if SPLIT
                    wgmma_rows<ELEMENT_T, CI_TILE>(chain[kFirstTap + tap], words[0][tap], advance(right, kPart), kStep > 0);
                    wgmma_rows<ELEMENT_T, CI_TILE>(chain[kFirstTap + tap], words[1][tap], right, 1);
                    wgmma_rows<ELEMENT_T, CI_TILE>(chain[kFirstTap + tap], words[0][tap], right, 1);
#else
                    wgmma_rows<ELEMENT_T, CI_TILE>(sums[kFirstTap + tap], words[0][tap], right, 1);
#endif
                }
                wgmma_commit();
                wgmma_wait<1>();
                if (kStep == 0 && kRowOfTaps == 0 && held >= 0 && lane < kArriving) barrier_arrive(b.empty[held]);
            });
        });
        held = ring.stage;
#if SPLIT
        #pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
            wgmma_finish_rows(chain[tap]);
            #pragma unroll
            for (int d = 0; d < CI_TILE / 2; ++d) sums[tap][d] += chain[tap][d];
        }
#endif
        ring.advance(STAGES);
    }
    #pragma unroll
    for (int tap = 0; tap < kTaps && !SPLIT; ++tap) wgmma_finish_rows(sums[tap]);

    PARTIAL_T* partials = p.partials + (static_cast<long long>(work.slice) * p.groups + work.group) * (kAllTaps * CI) * CO;
    #pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
        const int kh = work.kh + side_h * TAPS_H + tap / TAPS_W, kw = work.kw + side_w * TAPS_W + tap % TAPS_W;
        if (kh >= KERNEL_H || kw >= KERNEL_W) continue;
        PARTIAL_T* matrix = partials + static_cast<long long>(kh * KERNEL_W + kw) * CI * CO;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {  // rows g and g + 8
            const int co = work.co + (row_in_class(p, first_row + g + half * 8) << plane_bits(p)) + plane;
            if (co >= CO) continue;
            #pragma unroll
            for (int i = 0; i < CI_TILE / 4; ++i) {
                const int ci = work.ci + i / 2 * 8 + 2 * t + i % 2, d = i / 2 * 4 + half * 2 + i % 2;
                if (ci < CI) matrix[static_cast<long long>(ci) * CO + co] = narrow<PARTIAL_T>(sums[tap][d]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sm90_wgrad_nchw_kernel(const __grid_constant__ wgrad_nchw_params p) {
    launch_dependents();
    barrier_t* full = reinterpret_cast<barrier_t*>(shared + STAGES * kStage);
    const barriers_t b = {kMended ? full + 2 * STAGES : full, full, full + STAGES};
    init_barriers([&] {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(b.full[i], kMended ? kMenders / 32 * kArriving : 1);
            barrier_init(b.empty[i], 4 * kWarpgroups * kArriving);
            if (kMended) barrier_init(b.came[i], 1);
        }
    });
    if (threadIdx.x < kMultipliers) {
        if constexpr (kWarpgroups > 1) setmaxnreg_inc<kMultiplierRegisters>();
        consume(p, b, __shfl_sync(0xffffffffu, threadIdx.x / 128, 0));
    } else {
        if constexpr (kWarpgroups > 1) setmaxnreg_dec<kHelperRegisters>();
        if (threadIdx.x < kMultipliers + 32 && elected()) produce(p, b);
        const int mender = threadIdx.x - (kThreads - kMenders);
        if (kMended && mender >= 0) mend(p, b, mender);
    }
}
