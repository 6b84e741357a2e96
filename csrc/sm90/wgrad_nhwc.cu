/* fused on Hopper, weight gradient in channels_last, values of 16 bits: no columns are written, and no thread touches a value.
 *
 *   grad_weight[ci, co, kh, kw] = sum over n, ih, iw of
 *                                 input[n, ci, ih, iw] * grad_output[n, co, ih*S_H - P_H + kh*D_H, iw*S_W - P_W + kw*D_W]
 *
 * is for each tap a matrix product whose K are pixels:
 *
 *   sums [ci, co] += input [ci, pixel] . grad_output at the tap [pixel, co]
 *
 * Both sides come as boxes of tensor maps, 64 channels of a pixel in a line of 128 bytes, and products read them where they
 * lie: the other way round (ptx/wgmma.cuh), eight pixels one after the other, and eight more at a distance. A box of
 * grad_output has every S-th pixel of every S-th row, those that one tap wants. Taps whose outputs are S apart want the same
 * box, begun SHIFT lines later:
 *
 *   S=2 D=1: taps kw and kw + 2 of pixel iw read lines iw and iw + 1 of a box that begins at -P + kw
 *
 * so boxes have a few lines more than a tile has pixels. Where rows are so short that eight pixels are of two rows, each tap
 * has a box of its own, as wide as the tile (BOXES_W = TAPS_W). What lies outside of the tensors comes as zeros; values must
 * be finite, as in sm90/implicit_gemm.cu.
 *
 * Along an axis, tap i of a block is in box i % BOXES and i / BOXES shifts further on. Blocks have taps of their own, and so
 * have warpgroups: SIDES_H, SIDES_W of them; others have channels of their own: SIDES_CI of 64, SIDES_CO of 64.
 *
 * A block goes over a slice of the pixels, tile after tile, and writes a partial sum for each weight;
 * splits/reduce.cu adds the slices in their order. One thread begins all copies.
 *
 * Macros: ELEMENT_T; PARTIAL_T (of partial sums: float, or ELEMENT_T where there is one slice); CI, CO (channels of a
 * group); KERNEL_, STRIDE_, PADDING_, DILATION_ with H and W; TILE_N, TILE_H, TILE_W (images, rows and columns of a
 * tile's pixels: powers of two, whatever the sizes of images); PAIR_ROWS (whether a step has eight pixels of two rows
 * each, or sixteen); SIDES_CI, SIDES_CO, SIDES_H, SIDES_W; TAPS_H, TAPS_W, BOXES_H, BOXES_W; COLUMNS
 * (of a product); STAGES; SHARED_BYTES. Chosen by gemmconv/kernels/sm90/wgrad_nhwc.py.
 */
#define WGMMA_COLUMNS COLUMNS
#include "ptx/pdl.cuh"
#include "numeric/integers.cuh"
#include "numeric/types.cuh"
#include "pipeline/persistent.cuh"
#include "ptx/tma.cuh"
#include "numeric/unroll.cuh"
#include "numeric/units.cuh"
#include "ptx/wgmma.cuh"

struct wgrad_nhwc_params {
    tensor_map_t input, grad_output;
    PARTIAL_T* __restrict__ partials;  // [slices, groups, K_H * K_W, CI, CO]
    int groups;
    int tiles_w, tiles_h;  // of an image, or of several: across and down
    int tiles, slices;     // tiles in all
};

constexpr int kAtom = 64, kLine = 2 * kAtom;  // channels of a line; its bytes
constexpr int kWarpgroups = SIDES_CI * SIDES_CO * SIDES_H * SIDES_W, kMultipliers = 128 * kWarpgroups;
constexpr int kThreads = kMultipliers + 128;
constexpr int kRegisters = 65536 / kThreads / 8 * 8, kHelperRegisters = 24;
constexpr int kMultiplierRegisters = (kRegisters * kThreads - 128 * kHelperRegisters) / kMultipliers / 8 * 8;
constexpr int kBlockCi = kAtom * SIDES_CI, kBlockCo = kAtom * SIDES_CO;
constexpr int kCiTiles = ceil_div(CI, kBlockCi), kCoTiles = ceil_div(CO, kBlockCo);

/* Taps of a block and of a warpgroup along an axis, and where blocks begin. */
template <int KERNEL, int STRIDE, int DILATION, int TAPS, int BOXES, int SIDES> struct taps_t {
    static constexpr int kStep = tap_step(STRIDE, DILATION), kShift = DILATION * kStep / STRIDE;  // lines
    static constexpr int kOwn = TAPS / SIDES;
    static constexpr int kExtra = (TAPS - 1) / BOXES * kShift;  // lines of a box beyond those of the tile
    // Boxes that a block loads in a step of taps; blocks that share some of them.
    static constexpr bool kAll = BOXES == TAPS;
    static constexpr int kFirsts = kAll ? 1 : ceil_div(KERNEL < kStep ? KERNEL : kStep, BOXES);
    static constexpr int kReach = kAll ? TAPS : TAPS / BOXES * kStep;
    static constexpr int kSets = kFirsts * ceil_div(KERNEL, kReach);
    static_assert(TAPS % SIDES == 0 && TAPS % BOXES == 0 && (kAll || kStep % BOXES == 0), "boxes have as many taps each");
    static_assert(kAll || kOwn % BOXES == 0, "warpgroups have whole rounds of boxes, or boxes of their own");

    static __device__ constexpr int first(int set) { return set % kFirsts * BOXES + set / kFirsts * kReach; }
    /* Tap i of a block, from its first. */
    static __device__ constexpr int tap(int i) { return i % BOXES + i / BOXES * kStep; }
};
using taps_h = taps_t<KERNEL_H, STRIDE_H, DILATION_H, TAPS_H, BOXES_H, SIDES_H>;
using taps_w = taps_t<KERNEL_W, STRIDE_W, DILATION_W, TAPS_W, BOXES_W, SIDES_W>;

// Lines in shared memory: stages [STAGES] of the input's [SIDES_CI][pixels], and of grad_output's
// [SIDES_CO][BOXES_H][BOXES_W][kBox]; barriers.
constexpr int kPixels = TILE_N * TILE_H * TILE_W, kSteps = kPixels / 16;
constexpr int kBoxH = TILE_H + taps_h::kExtra, kBoxW = TILE_W + taps_w::kExtra;
constexpr int kComing = TILE_N * kBoxH * kBoxW, kBox = ceil_div(kComing, 8) * 8;  // lines
constexpr int kAtomLines = BOXES_H * BOXES_W * kBox;
constexpr int kInputs = SIDES_CI * kPixels, kStage = (kInputs + SIDES_CO * kAtomLines) * kLine;
constexpr int kStageBytes = (kInputs + SIDES_CO * BOXES_H * BOXES_W * kComing) * kLine;  // that come
static_assert(kPixels % 16 == 0, "a step has sixteen pixels");
static_assert(PAIR_ROWS ? TILE_W % 8 == 0 && TILE_H % 2 == 0
                        : TILE_W % 16 == 0 || (kBoxW == TILE_W && (kBoxH == TILE_H || TILE_H * TILE_W % 16 == 0)),
              "the pixels of a step lie at regular distances in boxes");
static_assert(STAGES * kStage + 2 * STAGES * 8 <= SHARED_BYTES, "the stages fit the shared memory of the launch");
constexpr int kOwnW = taps_w::kOwn, kSums = taps_h::kOwn * kOwnW;
constexpr int kColumns = COLUMNS;  // of a product: few channels need not be 64
extern __shared__ __align__(1024) unsigned char shared[];

/* Where the pixels of a step begin: lines of the input, and of a box. */
__device__ constexpr int input_line(int step) {
    return PAIR_ROWS ? step / (TILE_W / 8) * 2 * TILE_W + step % (TILE_W / 8) * 8 : 16 * step;
}
__device__ constexpr int box_line(int step) {
    const int line = input_line(step), row = line / TILE_W;
    return (row / TILE_H * kBoxH + row % TILE_H) * kBoxW + line % TILE_W;
}
constexpr int kInputPair = PAIR_ROWS ? TILE_W : 8, kBoxPair = PAIR_ROWS ? kBoxW : 8;  // lines between both halves of a step

/* The pixels of a block: tiles [first, end) of a slice. */
struct work_t { int group, ci, co, kh, kw, slice, first, end; };
__device__ __forceinline__ work_t work_of(const wgrad_nhwc_params& p) {
    int rest = blockIdx.x;
    work_t work;
    work.ci = rest % kCiTiles * kBlockCi, rest /= kCiTiles;
    work.co = rest % kCoTiles * kBlockCo, rest /= kCoTiles;
    work.kw = taps_w::first(rest % taps_w::kSets), rest /= taps_w::kSets;
    work.kh = taps_h::first(rest % taps_h::kSets), rest /= taps_h::kSets;
    work.group = rest % p.groups, work.slice = rest / p.groups;
    work.first = static_cast<int>(static_cast<long long>(p.tiles) * work.slice / p.slices);
    work.end = static_cast<int>(static_cast<long long>(p.tiles) * (work.slice + 1) / p.slices);
    return work;
}

using barriers_t = ring_barriers_t<STAGES>;

__device__ __forceinline__ void produce(const wgrad_nhwc_params& p, barriers_t& b) {
    const work_t work = work_of(p);
    const int in_channel = work.group * CI + work.ci, out_channel = work.group * CO + work.co;
    ring_t ring;
    for (int tile = work.first; tile < work.end; ++tile) {
        const int tiles_image = p.tiles_w * p.tiles_h, images = tile / tiles_image, place = tile - images * tiles_image;
        const int image = images * TILE_N, row = place / p.tiles_w * TILE_H, column = place % p.tiles_w * TILE_W;
        const int out_row = row * STRIDE_H - PADDING_H + work.kh * DILATION_H;
        const int out_column = column * STRIDE_W - PADDING_W + work.kw * DILATION_W;
        barrier_t& full = begin_stage(b, ring, kStageBytes);
        unsigned char* to = shared + ring.stage * kStage;
        #pragma unroll
        for (int atom = 0; atom < SIDES_CI; ++atom, to += kPixels * kLine)
            tma_load(to, p.input, in_channel + atom * kAtom, column, row, image, full);
        #pragma unroll
        for (int box = 0; box < SIDES_CO * BOXES_H * BOXES_W; ++box, to += kBox * kLine) {
            const int atom = box / (BOXES_H * BOXES_W), kh = box / BOXES_W % BOXES_H, kw = box % BOXES_W;
            tma_load(to, p.grad_output, out_channel + atom * kAtom, out_column + kw * DILATION_W,
                     out_row + kh * DILATION_H, image, full);
        }
        ring.advance(STAGES);
    }
}

/* Lines from the first box of a warpgroup's to tap i along an axis, whose boxes are so many lines apart, and whose shift is so
 * many.
 */
template <typename TAPS, int BOXES> __device__ constexpr int tap_line(int i, int box_lines, int shift_lines) {
    return i % BOXES * box_lines + i / BOXES * (TAPS::kShift * shift_lines);
}

/* Swaps `high` of a lane with `low` of the lane `distance` further on. */
__device__ __forceinline__ void swap(unsigned& low, unsigned& high, int distance) {
    const bool upper = threadIdx.x & distance;
    const unsigned got = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
    (upper ? low : high) = got;
}

/* A thread of four has two of eight columns of each of kUnitBlocks blocks, sums[4 * block] and the next. They are exchanged
 * until each has 16 bytes of neighbours, columns unit_column() and on. Stored two by two, partial sums of 16 bits were half a
 * sector a row.
 */
constexpr int kUnitBlocks = 8 / sizeof(PARTIAL_T);
__device__ __forceinline__ int unit_column() {
    const int t = threadIdx.x % 4;
    return sizeof(PARTIAL_T) == 2 ? 8 * t : t % 2 * 8 + t / 2 * 4;
}
template <typename T, int BLOCKS> __device__ __forceinline__ unit_t unit_of(const float* sums) {
    unit_t unit = {};
    if constexpr (sizeof(T) == 2) {
        #pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const T pair[2] = {narrow<T>(sums[4 * block]), narrow<T>(sums[4 * block + 1])};
            unit.word[block] = mma_words<T>::pack(pair);
        }
        swap(unit.word[0], unit.word[1], 1), swap(unit.word[2], unit.word[3], 1);
        swap(unit.word[0], unit.word[2], 2), swap(unit.word[1], unit.word[3], 2);
    } else {
        #pragma unroll
        for (int i = 0; i < 4; ++i) unit.word[i] = __float_as_uint(sums[i / 2 * 4 + i % 2]);
        swap(unit.word[0], unit.word[2], 1), swap(unit.word[1], unit.word[3], 1);
    }
    return unit;
}

__device__ __forceinline__ void consume(const wgrad_nhwc_params& p, barriers_t& b, int warpgroup) {
    const work_t work = work_of(p);
    const int side_ci = warpgroup % SIDES_CI, side_co = warpgroup / SIDES_CI % SIDES_CO;
    const int side_w = warpgroup / (SIDES_CI * SIDES_CO) % SIDES_W, side_h = warpgroup / (SIDES_CI * SIDES_CO * SIDES_W);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int own_line = tap_line<taps_h, BOXES_H>(side_h * taps_h::kOwn, BOXES_W * kBox, kBoxW) +
                         tap_line<taps_w, BOXES_W>(side_w * taps_w::kOwn, kBox, 1);
    const descriptor_t all_inputs = descriptor_mn_major(shared + side_ci * kPixels * kLine, 1024, kInputPair * kLine);
    const descriptor_t all_outputs =
        descriptor_mn_major(shared + (kInputs + side_co * kAtomLines + own_line) * kLine, kAtomLines * kLine,
                           kBoxPair * kLine);
    float sums[kSums][kColumns / 2];
    #pragma unroll
    for (int i = 0; i < kSums; ++i) wgmma_clear(sums[i]);
    ring_t ring;
    int held = -1;  // stage that products may still read
    for (int tile = work.first; tile < work.end; ++tile) {
        barrier_wait(b.full[ring.stage], ring.parity);
        const descriptor_t inputs = advance(all_inputs, ring.stage * kStage), outputs = advance(all_outputs, ring.stage * kStage);
        wgmma_fence();
        each<kSteps>([&](auto step_c) {
            constexpr int kStep = step_c;
            const descriptor_t left = advance(inputs, input_line(kStep) * kLine);
            each<kSums>([&](auto sum_c) {
                constexpr int kSum = sum_c, kTapH = kSum / kOwnW, kTapW = kSum % kOwnW;
                constexpr int kOffset = box_line(kStep) + tap_line<taps_h, BOXES_H>(kTapH, BOXES_W * kBox, kBoxW) +
                                        tap_line<taps_w, BOXES_W>(kTapW, kBox, 1);
                wgmma_turned<ELEMENT_T, kColumns>(sums[kSum], left, advance(outputs, kOffset * kLine), 1);
            });
        });
        wgmma_commit();
        wgmma_wait<1>();
        if (held >= 0 && lane == 0) barrier_arrive(b.empty[held]);
        held = ring.stage;
        ring.advance(STAGES);
    }
    #pragma unroll
    for (int i = 0; i < kSums; ++i) wgmma_finish_rows(sums[i]);

    const int first_ci = work.ci + side_ci * kAtom + warp * 16 + lane / 4;
    const int first_co = work.co + side_co * kAtom + unit_column();
    constexpr int kUnitValues = elements_of_unit<PARTIAL_T>, kRow = CO / kUnitValues;
    // Indices of units are int: with those of 64 bits, the compiler stores words.
    unit_t* partials = reinterpret_cast<unit_t*>(p.partials) +
                       (static_cast<long long>(work.slice) * p.groups + work.group) * (KERNEL_H * KERNEL_W * CI) * kRow;
    constexpr int kUnits = ceil_div(kColumns / 8, kUnitBlocks);
    each<kSums * kUnits>([&](auto unit_c) {
        constexpr int kUnit = unit_c % kUnits, kSum = unit_c / kUnits;
        constexpr int kColumn = kUnit * kUnitBlocks * 8;
        constexpr int kBlocks = (kColumns - kColumn) / 8 < kUnitBlocks ? (kColumns - kColumn) / 8 : kUnitBlocks;
        const int kh = work.kh + taps_h::tap(side_h * taps_h::kOwn + kSum / kOwnW);
        const int kw = work.kw + taps_w::tap(side_w * taps_w::kOwn + kSum % kOwnW);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unit_t unit = unit_of<PARTIAL_T, kBlocks>(sums[kSum] + kColumn / 2 + 2 * half);
            const int ci = first_ci + 8 * half, co = first_co + kColumn;
            if (kh >= KERNEL_H || kw >= KERNEL_W || ci >= CI || co >= CO || unit_column() >= 8 * kBlocks) continue;
            partials[((kh * KERNEL_W + kw) * CI + ci) * kRow + co / kUnitValues] = unit;
        }
    });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
sm90_wgrad_nhwc_kernel(const __grid_constant__ wgrad_nhwc_params p) {
    launch_dependents();
    barriers_t& b = *reinterpret_cast<barriers_t*>(shared + STAGES * kStage);
    init_barriers([&] { init_ring(b, 1, 4 * kWarpgroups); });
    if (threadIdx.x < kMultipliers) {
        if constexpr (kWarpgroups > 1) setmaxnreg_inc<kMultiplierRegisters>();
        consume(p, b, __shfl_sync(0xffffffffu, threadIdx.x / 128, 0));
    } else {
        if constexpr (kWarpgroups > 1) setmaxnreg_dec<kHelperRegisters>();
        if (threadIdx.x < kMultipliers + 32 && elected()) produce(p, b);
    }
}
