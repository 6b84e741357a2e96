/* patch: the part of grad_output that a tile of input pixels reads, staged in shared memory in the type of the sums.
 *
 *   grad_output [planes, H_out, W_out] -> patch [PATCHES, rows, kBanks, kBankPitch],  a plane is a channel of an image
 *
 * On each axis, input i and tap k read output o = i*S - P + k*D. With i and k counted from the first of the tile, the
 * distance of o from the first output is i*S + k*D, and only multiples of gcd(S, D) are ever read. The patch holds
 *
 *   dense    every such multiple, output i*S + k*D at place (i*S + k*D) / gcd(S, D)
 *   compact  one place for each pair (i, k), place i*TAPS + k, where that is less: kernels smaller than the stride,
 *            dilations longer than the tile
 *
 *   S=2 D=2 K=3, tile of 4:  distances 0, 2 .. 10 are read, places 0 .. 5;  i=1, k=2 is at place 3
 *   S=5 D=1 K=2, tile of 4:  distances 0 1, 5 6, 10 11, 15 16 are read, places 0 .. 7
 *
 * Neighbouring threads read places that are kPitch apart. Places are dealt to kBanks runs, the power of two in kPitch, so
 * what a warp reads lies an odd distance apart: no two of its threads meet in a bank, whatever the stride.
 * Places outside grad_output hold zero.
 *
 * A row is staged by kRowThreads threads in kSteps steps of VECTOR elements. With VECTOR > 1 rows start at a multiple of
 * VECTOR, kLead elements early, and W_out must be a multiple of VECTOR.
 *
 * For tensor cores (ON_TENSOR_CORES) values are rounded to what TF32 multiplies, which 16-bit values are, and planes begin
 * an odd multiple of 4 places apart: what a warp reads of 8 planes and 4 inputs, or of 4 such even planes and 8 inputs, is in
 * different banks.
 *
 * (direct/grads_mma.cu stages by whole warps instead, from the same geometry.)
 *
 * Macros: ON_TENSOR_CORES, ELEMENT_T, THREADS, STRIDE_, DILATION_, PADDING_, TILE_, TAPS_ (of the tile's pixels and of the
 * kernel, staged at once) with H and W, PATCHES = outer * PATCH_INNER (planes staged at once), VECTOR.
 */
#pragma once

#include "numeric/index.cuh"
#include "numeric/integers.cuh"
#include "ptx/keep.cuh"
#include "ptx/mma.cuh"
#include "numeric/types.cuh"

#ifndef ON_TENSOR_CORES
#define ON_TENSOR_CORES 0
#endif

using accumulate_t = accumulator_t<ELEMENT_T>;

/* Where the outputs that OUTPUTS neighbouring inputs and TAPS taps read lie in the patch, on one axis. */
template <int OUTPUTS, int TAPS, int STRIDE, int DILATION> struct patch_axis {
    static constexpr int kGcd = gcd(STRIDE, DILATION);
    static constexpr long long kSpan = (OUTPUTS - 1ll) * (STRIDE / kGcd) + (TAPS - 1ll) * (DILATION / kGcd) + 1;
    static constexpr bool kCompact = OUTPUTS * TAPS < kSpan;
    static constexpr int kExtent = kCompact ? OUTPUTS * TAPS : static_cast<int>(kSpan);
    static constexpr int kPitch = kCompact ? TAPS : STRIDE / kGcd;  // places between neighbouring inputs
    /* Places from an input's first tap to one of its taps. */
    static __device__ constexpr int place(int tap) { return kCompact ? tap : tap * (DILATION / kGcd); }
    /* Distance in grad_output from the first place to a place. */
    static __device__ constexpr int distance(int place) {
        return kCompact ? place / TAPS * STRIDE + place % TAPS * DILATION : place * kGcd;
    }
};
using patch_h = patch_axis<TILE_H, TAPS_H, STRIDE_H, DILATION_H>;
using patch_w = patch_axis<TILE_W, TAPS_W, STRIDE_W, DILATION_W>;
static_assert(VECTOR == 1 || (patch_w::kGcd == 1 && !patch_w::kCompact), "vectors hold neighbouring outputs");

// Rows of the patch
constexpr int kLead = (VECTOR - PADDING_W % VECTOR) % VECTOR;
constexpr int kVectors = ceil_div(kLead + patch_w::kExtent, VECTOR);
constexpr int kBanks = least(patch_w::kPitch & -patch_w::kPitch, 32);
constexpr int kRun = VECTOR / least(VECTOR, kBanks);                        // neighbours in a bank from one vector
constexpr int kPiece = least(kRun, 16 / static_cast<int>(sizeof(accumulate_t)));  // of which one store takes
constexpr int kBankPitch = ceil_div(ceil_div(kVectors * VECTOR, kBanks), kPiece) * kPiece;
constexpr int kRowPitch = kBanks * kBankPitch;
constexpr int kPatchRows = PATCHES * patch_h::kExtent;
constexpr int kPlaneGap = ON_TENSOR_CORES ? (patch_h::kExtent * kRowPitch + 3) / 8 * 8 + 4 - patch_h::kExtent * kRowPitch : 0;
constexpr int kPatchElements = kPatchRows * kRowPitch + PATCHES * kPlaneGap;

// Who stages them
constexpr int kSteps = ceil_div(kVectors, least(THREADS, 32));
constexpr int kRowThreads = ceil_div(kVectors, kSteps);
constexpr int kRowsAtOnce = THREADS / kRowThreads;
constexpr int kPasses = ceil_div(kPatchRows, kRowsAtOnce);

/* A vector in the registers of its load: 16-bit elements stay packed in words of two. */
template <typename T, bool PAIRS> struct alignas(VECTOR * sizeof(T)) loaded_of {
    T value[VECTOR];
    __device__ __forceinline__ T element(int e) const { return value[e]; }
    static __device__ __forceinline__ loaded_of load(const T* address) {
        if constexpr (VECTOR == 1) return {load_once(address)};
        else return *reinterpret_cast<const loaded_of*>(address);
    }
};
template <typename T> struct alignas(VECTOR * sizeof(T)) loaded_of<T, true> {
    unsigned value[ceil_div(VECTOR, 2)];
    __device__ __forceinline__ T element(int e) const { return element_of<T>(value[e / 2] >> e % 2 * 16); }
    static __device__ __forceinline__ loaded_of load(const T* address) {
        return *reinterpret_cast<const loaded_of*>(address);
    }
};
using pack_t = loaded_of<ELEMENT_T, (sizeof(ELEMENT_T) == 2 && VECTOR > 1)>;
struct alignas(kPiece * sizeof(accumulate_t)) piece_t { accumulate_t value[kPiece]; };

/* Source of a patch: planes outer*outer_stride + inner, rows and columns from (row, column) on. */
struct patch_source {
    const ELEMENT_T* __restrict__ first;  // the first plane
    long long outer_stride;               // elements
    int outer_count, inner_count;         // planes that exist; the others are staged as zeros
    int h_out, w_out;
    int row, column;                      // of grad_output, at place 0 of both axes
};

/* A value as it lies in the patch. Rounded as mma_words does, but without predicates, of which a batch of loads has many: the
 * magnitude plus half of the lowest bit that multiplies, at most the largest NaN. */
__device__ __forceinline__ accumulate_t staged(ELEMENT_T value) {
    if constexpr (!ON_TENSOR_CORES || sizeof(ELEMENT_T) == 2) {
        return widen(value);
    } else {
        const unsigned word = __float_as_uint(widen(value)), sum = (word & 0x7fffffffu) + mma_words<float>::kHalf;
        return __uint_as_float((sum < 0x7fffffffu ? sum : 0x7fffffffu) | (word & 0x80000000u));
    }
}

/* Stores a vector in a row of the patch, if it is one of it. */
__device__ __forceinline__ void store_pack(accumulate_t* row, const pack_t& pack, int vector, bool there = true) {
    #pragma unroll
    for (int first = 0; first < VECTOR / kRun; ++first) {  // elements first, first + kBanks, ... share a bank
        const int place = vector * VECTOR + first;
        accumulate_t* target = row + place % kBanks * kBankPitch + place / kBanks;
        #pragma unroll
        for (int run = 0; run < kRun; run += kPiece) {
            piece_t piece;
            #pragma unroll
            for (int e = 0; e < kPiece; ++e) piece.value[e] = staged(pack.element(first + (run + e) * kBanks));
            if (there) *reinterpret_cast<piece_t*>(target + run) = piece;
        }
    }
}

/* Loads COUNT passes into registers: pass, pass + 1, ... */
template <int COUNT>
__device__ __forceinline__ void fetch_patch(pack_t (&packs)[COUNT][kSteps], const patch_source& source, int pass) {
    const int row_thread = threadIdx.x / kRowThreads;
    const int lane = threadIdx.x - row_thread * kRowThreads;
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int patch_row = (pass + i) * kRowsAtOnce + row_thread;
        const int plane = PATCHES == 1 ? 0 : patch_row / patch_h::kExtent;
        const int outer = plane / PATCH_INNER, inner = plane - outer * PATCH_INNER;
        const int oh = source.row + patch_h::distance(patch_row - plane * patch_h::kExtent);
        const bool row_inside = row_thread < kRowsAtOnce && (PATCHES > 1 || patch_row < kPatchRows) &&
                                outer < source.outer_count && inner < source.inner_count &&
                                static_cast<unsigned>(oh) < source.h_out;
        const ELEMENT_T* __restrict__ row =
            source.first + (static_cast<index_t>(inner) * source.h_out + oh) * source.w_out;
        if (PATCHES > PATCH_INNER) row += outer * source.outer_stride;
        #pragma unroll
        for (int j = 0; j < kSteps; ++j) {
            const int vector = lane + j * kRowThreads;
            const int ow = source.column - kLead + (VECTOR > 1 ? vector * VECTOR : patch_w::distance(vector));
            const bool inside = row_inside && static_cast<unsigned>(ow) < source.w_out;
            packs[i][j] = inside ? pack_t::load(row + ow) : pack_t{};
        }
    }
}

/* Stores what fetch_patch loaded. */
template <int COUNT>
__device__ __forceinline__ void store_patch(accumulate_t* patch, const pack_t (&packs)[COUNT][kSteps], int pass) {
    const int row_thread = threadIdx.x / kRowThreads;
    const int lane = threadIdx.x - row_thread * kRowThreads;
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int patch_row = (pass + i) * kRowsAtOnce + row_thread;
        if (row_thread >= kRowsAtOnce || patch_row >= kPatchRows) continue;
        #pragma unroll
        for (int j = 0; j < kSteps; ++j) {
            const int vector = lane + j * kRowThreads;
            if (vector >= kVectors) continue;
            store_pack(patch + patch_row * kRowPitch, packs[i][j], vector);
        }
    }
}

/* Stores the patch: in one batch that has been fetched already or, with FETCH, fetched and stored batch after batch. */
template <bool FETCH, int COUNT>
__device__ __forceinline__ void stage_patch(accumulate_t* patch, pack_t (&packs)[COUNT][kSteps], const patch_source& source) {
    #pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += COUNT) {
        if (FETCH) fetch_patch(packs, source, pass);
        store_patch(patch, packs, pass);
    }
}

/* Offset in the patch from a thread's first row and column to the value that a tap reads. */
__device__ constexpr int tap_place(int row, int tap_h, int tap_w) {
    return (row * patch_h::kPitch + patch_h::place(tap_h)) * kRowPitch +
           (kLead + patch_w::place(tap_w)) % kBanks * kBankPitch + (kLead + patch_w::place(tap_w)) / kBanks;
}

/* Offset in the patch of the first row and column that a pixel of the tile reads. */
__device__ __forceinline__ int pixel_place(int plane, int row, int column) {
    return (plane * patch_h::kExtent + row * patch_h::kPitch) * kRowPitch + plane * kPlaneGap +
           column * (patch_w::kPitch / kBanks);
}
