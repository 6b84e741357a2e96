/* Shared by the parts of sm90/implicit_gemm.cu: parameters, tables, shared memory. The macros are those of the kernel. */
#pragma once

#define WGMMA_COLUMNS COLUMNS
#include "numeric/divide.cuh"
#include "numeric/index.cuh"
#include "numeric/integers.cuh"
#include "ptx/tma.cuh"
#include "pipeline/persistent.cuh"
#include "geometry/rows.cuh"
#include "numeric/units.cuh"
#include "numeric/unroll.cuh"
#include "numeric/vector.cuh"
#include "ptx/wgmma.cuh"

#define PAIR_NONE 0
#define PAIR_BLOCKS 1
#define PAIR_ROWS 2

struct implicit_gemm_params {
#if BOXED
    tensor_map_t map;  // of the input: see load/tma_nhwc.cuh
#endif
    const ELEMENT_T* __restrict__ input;
    const unit_t* __restrict__ packed;
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    // Reciprocals, for numeric/divide.cuh.
    unsigned long long by_strips, by_strip_rows, by_strip_tiles, by_image_positions, by_bottom, by_sets, by_pitch;
    int batch, groups;
    int h_in, w_in, h_out, w_out;
    int strips, strip_rows, strip_cells;  // of an image; rows and cells across, of a strip
    int cells_h;                          // rows of cells that have outputs
    int origin_h, origin_w;               // input, in units, of a strip's first position
    int strip_tiles, items;
    int pitch;           // positions from one row of a strip to the next; even but where inputs are lines
    int patch;           // positions of a tile's inputs, of each plane
    int unit_pitch;      // from one unit of a patch to the next, in units
    int first;           // place of the patch relative to the tile's first cell
    int patch_stages, weight_stages;
    int stationary;      // whether the weights of a set stay
    int whole_images;    // whether nothing lies between rows: an image is one row
    int in_order;        // see item_of
    int stored_row, stored_column;  // see epilogue/store_phases.cuh
#if LANDING_UNITS > 0
    // See load/landing.cuh.
    unsigned long long by_run_pitch, by_run_span;
    unsigned by_run_pieces, by_pieces, by_spots, by_plane_spots;
    int run_pitch, run_pieces, landed_channel;
#elif !BOXED
    unsigned by_spots, by_plane_spots;
    int batches, together;  // see load/registers.cuh
#endif
#if BOXED
    int box_images, box_rows, box_width;
    int boxes;  // of a plane of a patch
    int flat;   // see load/tma_nhwc.cuh
    unsigned long long by_boxes, by_positions, by_strip_boxes;
    int strip_boxes;
#endif
    int step_offset[STEPS];  // positions from a patch's first to the input that a tile's first cell reads in a step
};

constexpr int kProducers = PRODUCERS + 32, kThreads = kProducers + 256;
// A block begins with kRegisters for each thread, of which those who load give up what those who multiply need. What is asked
// for beyond that is waited for for ever.
constexpr int kRegisters = 65536 / kThreads / 8 * 8;
constexpr int kSums = (BLOCKS + SPLIT) * COLUMNS / 2;
constexpr int kLeastRegisters = BLOCKS > 2 ? 144 : 136;
constexpr int kSumRegisters = kSums + (SPLIT ? 48 : 56);
constexpr int kConsumerRegisters = PRODUCERS == 96 ? 184 : kSumRegisters < kLeastRegisters ? kLeastRegisters : kSumRegisters;
constexpr int kProducerRegisters = (kRegisters * kThreads - 256 * kConsumerRegisters) / kProducers / 8 * 8;
static_assert(kProducerRegisters <= kRegisters && kRegisters <= kConsumerRegisters, "registers are given up, and taken");
constexpr int kElements = elements_of_unit<ELEMENT_T>;
constexpr int kParts = SPLIT ? 2 : 1, kChain = 2;  // steps of SPLIT whose sums stay in the tensor core
constexpr int kRows = WARPGROUPS_M * 64;
constexpr int kTile = 2 / WARPGROUPS_M * COLUMNS;  // positions
constexpr int kPlanes = UNIT_H * UNIT_W;
constexpr int kSets = PHASE_SETS * CHANNEL_SETS;
constexpr int kChannelSides = WARPGROUPS_M / PHASE_SIDES;  // warpgroups with output channels of their own
// How a patch lies; where BOXED see load/tma_nhwc.cuh.
constexpr int kLineBytes = UNITS * 16;
constexpr int kPositionBytes = BOXED ? kLineBytes : 16;
/* Bytes that a step of the instruction goes on. */
__device__ __forceinline__ int step_bytes(const implicit_gemm_params& p) { return BOXED ? 32 : 32 * p.unit_pitch; }
constexpr bool kRounded = BOXED && sizeof(ELEMENT_T) == 4;  // where they lie, by all loaders but a warp
constexpr int kRounders = PRODUCERS - 32;
constexpr int kSteps = UNITS / 2;  // of the instruction: two units
static_assert(UNITS % 2 == 0, "a step of wgmma is two units");

__constant__ constexpr int kStepBegin[] = STEP_BEGIN;
__constant__ constexpr int kPhases[] = PHASES;

// The most steps of a block of a phase set.
constexpr int kMostSteps = [] {
    int steps = 0;
    for (int i = 0; i < PHASE_SETS * BLOCKS; ++i) steps = most(steps, kStepBegin[i + 1] - kStepBegin[i]);
    return steps;
}();
// More would take longer to compile, and long ones would fill the instruction cache.
constexpr int kUnrolledSteps = SPLIT ? kChain : kMostSteps * BLOCKS <= 28 ? least(kMostSteps, 4) : 1;

// How inputs land; see load/landing.cuh.
constexpr int kPiece = kElements;  // elements of 16 bytes
constexpr int kLandingChannels = LANDING_UNITS * kElements;
/* Spots of a patch; see load/patch_elements.cuh. */
__device__ __forceinline__ int spots_of(const implicit_gemm_params& p) { return p.patch * kPlanes / WIDE; }

// Shared memory: patches [patch_stages][kParts][UNITS][unit_pitch] (BOXED: see load/tma_nhwc.cuh), weights
// [weight_stages][kParts][UNITS][kRows], landing [LANDING_STAGES][kLandingChannels] of landed_channel bytes, outputs
// [8 warps][kWarpOutputs], barriers, places [2][spots] (none if BOXED), in the landing where inputs land.
constexpr int kWeightUnits = kParts * UNITS * kRows;
__device__ __forceinline__ int patch_units(const implicit_gemm_params& p) { return kParts * UNITS * p.unit_pitch; }
__device__ __forceinline__ int landing_units(const implicit_gemm_params& p) {
#if LANDING_UNITS > 0
    return LANDING_UNITS * kElements * p.landed_channel / 16;
#else
    return 0;
#endif
}
/* Stages that barriers tell of when they have landed. */
__device__ __forceinline__ int landed_stages(const implicit_gemm_params& p) {
    return kRounded ? p.patch_stages : 0;
}
// Neighbouring outputs of a thread, of a cell; see epilogue/store_phases.cuh.
constexpr int kInner = PAIRING == PAIR_BLOCKS ? BLOCKS : PAIRING == PAIR_ROWS ? 2 : 1, kOuter = BLOCKS * 2 / kInner;
// Lines that a warp turns round, kOuter * 8 of them: cells, and outputs from one to the next, so that banks differ.
constexpr bool kLined = ROW_ORDER == ROWS_LINES;  // kWarpChannels lines, of all phases of a row of cells
constexpr int kWarpChannels = 16 / SLOTS;
constexpr int kLineCells = LINE_CELLS;
constexpr int kLine = kLined ? kLineCells * SPAN_W + (SLOTS < 4 ? 4 : SLOTS) : kLineCells * kInner + (kInner == 2 ? 16 : 8);
// Shared memory in which a warpgroup transposes outputs in channels_last: see epilogue/store_phases.cuh.
constexpr int kPlaces = 64 / static_cast<int>(sizeof(ELEMENT_T)), kPixel = 64 + kElements;
constexpr int kWarpOutputs = !STAGED ? 0 : CHANNELS_LAST ? 2 * kPlaces * kPixel / 4
                                      : (kLined ? kWarpChannels : kOuter * 8) * kLine;
extern __shared__ __align__(1024) unsigned char shared[];

// Barriers of warps (see ptx/named_barrier.cuh): of all loaders; of the turn of either warpgroup; of either alone, when it stores.
constexpr int kLoadersMeet = 1, kTurnOf0 = 2, kTurnOf1 = 3, kStoresOf0 = 4, kStoresOf1 = 5;

struct stages_t {
    unit_t* patches;
    unit_t* weights;
    unit_t* landing;
    ELEMENT_T* outputs;
    barrier_t *patch_full, *patch_empty, *weight_full, *weight_empty, *landed_full;
    index_t* places;  // of a tile's spots in the input, twice
    int* landed;      // or where they land, in bytes, twice
};

__device__ __forceinline__ stages_t stages(const implicit_gemm_params& p) {
    unit_t *patches = reinterpret_cast<unit_t*>(shared), *weights = patches + p.patch_stages * patch_units(p);
    unit_t* landing = weights + p.weight_stages * kWeightUnits;
    ELEMENT_T* outputs = reinterpret_cast<ELEMENT_T*>(landing + LANDING_STAGES * landing_units(p));
    barrier_t* full = reinterpret_cast<barrier_t*>(outputs + 8 * kWarpOutputs);
    barrier_t* weight_full = full + 2 * p.patch_stages;
    barrier_t* landed_full = weight_full + 2 * p.weight_stages;
    index_t* places = reinterpret_cast<index_t*>(landed_full + landed_stages(p));
    return {patches, weights, landing, outputs, full, full + p.patch_stages, weight_full, weight_full + p.weight_stages,
            landed_full, places, reinterpret_cast<int*>(places)};
}

/* A work tile: tile of positions, set of output channels, group. */
struct item_t { int set, tile, group; };

/* The item of a number below p.items. Blocks that run at the same time have tiles beside each other in all strips of an image,
 * since memory likes to be read and written in long runs: tiles go through the strips first, then down the image. (in_order
 * where that is how they lie: there is one strip, or tiles are at least as long as strips.)
 *
 * A tile is of the strip that it begins in. A strip has `strip_tiles` of them, or one less, which is `bottom` positions short
 * of a strip. Laid end to end, the bottoms of an image's strips have a tile begin every kTile positions, from where its first
 * tile begins: those are the last tiles of the image.
 */
__device__ __forceinline__ item_t item_of(const implicit_gemm_params& p, int item) {
    const int order = divided(item, p.by_sets), set = item - order * kSets * p.groups;
    int tile = order;
    if (!p.in_order) {
        const int period = p.strip_rows * p.pitch, first_strip = divided(order * kTile, p.by_image_positions) * p.strips;
        const int first = (first_strip * period + kTile - 1) / kTile, place = order - first;  // in the image
        const int down = divided(place, p.by_strips), across = place - down * p.strips;
        const int before = (first + across) * kTile - first_strip * period;  // a last tile, in positions of bottoms
        const int strip = first_strip + (down < p.strip_tiles - 1 ? across : divided(before, p.by_bottom));
        tile = (strip * period + kTile - 1) / kTile + down;
    }
    return {set % kSets, tile, set / kSets};
}
__device__ __forceinline__ int phase_set_of(int set) { return set / CHANNEL_SETS; }
__device__ __forceinline__ int first_step(int phase_set, int block = 0) { return kStepBegin[phase_set * BLOCKS + block]; }

/* Where the phases of a warpgroup's M block begin in the table; `side` is which of WARPGROUPS_M it is. */
__device__ __forceinline__ const int* phases_of(int set, int side, int block) {
    const int place = (phase_set_of(set) * PHASE_SIDES + (PHASE_SIDES == 2 ? side : 0)) * BLOCKS + block;
    return kPhases + place * SLOTS;
}
/* The first output channel of a warpgroup's M blocks, of those of a group. */
__device__ __forceinline__ int first_channel_of(int set, int side) {
    return (set % CHANNEL_SETS * kChannelSides + (PHASE_SIDES == 2 ? 0 : side)) * CHANNELS;
}

/* Where a tile's patch begins: its first position, from one strip or, where boxes have several images, one box before the
 * first; where it can begin before the first.
 */
#if BOXED
__device__ __forceinline__ int first_position_of(const implicit_gemm_params& p, int tile) {
    return tile * kTile + p.first + (p.flat ? 0 : p.box_images * p.strip_rows * p.pitch);
}
__device__ __forceinline__ int box_positions(const implicit_gemm_params& p) { return p.box_images * p.box_rows * p.box_width; }
#endif

/* The right sides of the first stage, from a place of the patch of a tile on. */
__device__ __forceinline__ descriptor_t patches_of(const implicit_gemm_params& p, const stages_t& s, int tile, int place) {
#if BOXED
    const int first = first_position_of(p, tile), skipped = first - divided(first, p.by_positions) * box_positions(p);
    return descriptor_k_major_swizzled<kLineBytes>(s.patches + (place + skipped) * UNITS);
#else
    return descriptor_k_major(s.patches + place, p.unit_pitch * 16, 128);
#endif
}
