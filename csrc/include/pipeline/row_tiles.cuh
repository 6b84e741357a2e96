/* What sm90/gemm_fold_rows.cu and sm90/gemm_fold_rows_tf32.cu share: barriers, items, the weights of a set, and how
 * late columns are. The macros are those of the kernels.
 */
#pragma once

#include "ptx/pdl.cuh"
#include "numeric/divide.cuh"
#include "ptx/tma.cuh"
#include "numeric/units.cuh"
#include "numeric/vector.cuh"

struct gemm_fold_rows_params {
    tensor_map_t map;  // of the input: [images][rows][channels][columns]
    const unit_t* __restrict__ packed;
    const ELEMENT_T* __restrict__ bias;  // or null
    ELEMENT_T* __restrict__ output;
    unsigned long long by_image_items;  // see numeric/divide.cuh
    int groups, columns, h_out, w_out, cells_h;  // columns: inputs of a row that are multiplied
    int image_items, items;  // of an image; of all
    int steps;               // of a row, those behind its end among them
};

constexpr int kProducers = 128, kThreads = kProducers + 256;
constexpr int kSets = CHANNEL_SETS * PHASES;  // of a group

__constant__ constexpr int kDelay[] = DELAY;
__constant__ constexpr int kPhase[] = PHASE;
__constant__ constexpr int kFirstRow[] = FIRST_ROW;
constexpr int kTapsAcross = sizeof(kDelay) / sizeof(int);  // places for them

// Barriers of warps: the turn of either warpgroup.
constexpr int kTurnOf0 = 1, kTurnOf1 = 2;

struct barriers_t : ring_barriers_t<STAGES> { barrier_t weights; };

/* Has the barriers ready, before any thread goes on. */
__device__ __forceinline__ void begin_barriers(barriers_t& barriers) {
    init_barriers([&] {
        init_ring(barriers, 1, 8);  // warps that multiply
        barrier_init(barriers.weights, 1);
    });
}

/* What a block works on: a row phase, output channels, a group; the same for all of its items. */
struct set_t { int number, phase, channels, group; };
__device__ __forceinline__ set_t set_of(const gemm_fold_rows_params& p) {
    const int number = blockIdx.x % (kSets * p.groups);
    return {number, number % kSets / CHANNEL_SETS, number % CHANNEL_SETS, number / kSets};
}

/* An item: an image, and its first row of cells there. */
struct item_t {
    int image, row;
    __device__ __forceinline__ item_t(const gemm_fold_rows_params& p, int i)
        : image(divided(i, p.by_image_items)), row((i - image * p.image_items) * ROWS) {}
};

/* Copies the weights of a set, once, BYTES at a time. */
template <int ALL, int BYTES>
__device__ __forceinline__ void produce_weights(const gemm_fold_rows_params& p, const set_t& set, void* target, barrier_t& full) {
    grid_dependency_wait();  // which lays them out
    barrier_arrive_expecting(full, ALL);
    const unit_t* source = p.packed + static_cast<long long>(set.number) * (ALL / 16);
    #pragma unroll 1
    for (int i = 0; i < ALL; i += BYTES)
        bulk_copy(static_cast<unsigned char*>(target) + i, source + i / 16, BYTES, full);
}

// What is late by DELAY columns comes from one of the two columns of a lane, of a lane so many before; from four on, in
// sm90/gemm_fold_rows.cu, from the columns before.
constexpr int kMostLanes = 4;
__device__ constexpr int column_of(int delay, int e) { return (e + delay) % 2; }
__device__ constexpr int lanes_of(int delay, int e) { return (delay + column_of(delay, e) - e) / 2; }

/* Whether a tap gives the outputs of a phase at a lane's cell E something, from so many lanes before. */
__device__ constexpr bool gives(int tap, int phase, int e, int lanes) {
    return kPhase[tap] == phase && lanes_of(kDelay[tap], e) == lanes;
}
/* The first tap that does, or kTapsAcross. */
__device__ constexpr int first_to_give(int phase, int e, int lanes) {
    int tap = 0;
    while (tap < kTapsAcross && !gives(tap, phase, e, lanes)) ++tap;
    return tap;
}
