/* What sm90/gemm_fold_rows.cu and sm90/gemm_fold_rows_tf32.cu share: barriers, items, the weights of a set, and how
 * late columns are. The macros are those of the kernels.
 */
#pragma once

#include "ptx/pdl.cuh"
#include "numeric/divide.cuh"
#include "ptx/tma.cuh"
#include "numeric/units.cuh"

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

template <int COUNT> struct alignas(COUNT * sizeof(ELEMENT_T)) vector_t { ELEMENT_T value[COUNT]; };

struct barriers_t { barrier_t full[STAGES], empty[STAGES], weights; };

/* Has the barriers ready, before any thread goes on. */
__device__ __forceinline__ void begin_barriers(barriers_t& barriers) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(barriers.full[i], 1);
            barrier_init(barriers.empty[i], 8);  // warps that multiply
        }
        barrier_init(barriers.weights, 1);
        barrier_init_done();
    }
    __syncthreads();
}

/* What a block works on: a row phase, output channels, a group; the same for all of its items. */
struct set_t { int number, phase, channels, group; };
__device__ __forceinline__ set_t set_of(const gemm_fold_rows_params& p) {
    const int number = blockIdx.x % (kSets * p.groups);
    return {number, number % kSets / CHANNEL_SETS, number % CHANNEL_SETS, number / kSets};
}
/* Calls body(image, first row of cells) for the items of a block. */
template <typename BODY> __device__ __forceinline__ void each_item(const gemm_fold_rows_params& p, const BODY& body) {
    const int sets = kSets * p.groups;
    #pragma unroll 1
    for (int i = blockIdx.x / sets; i < p.items; i += gridDim.x / sets) {
        const int image = divided(i, p.by_image_items);
        body(image, (i - image * p.image_items) * ROWS);
    }
}

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
