/* Adds up the slices of fused's weight gradients, each a partial sum for every weight: sm90/wgrad_nchw.cu and
 * sm90/wgrad_nhwc.cu.
 *
 *   partials [slices, groups, K_H * K_W, CI, CO] -> grad_weight [groups, CI, CO, K_H, K_W]
 *
 * A block owns all taps of SUM_RUN output channels of an input channel, which lie together in grad_weight: it reads pieces of
 * SUM_READ neighbours of a tap, turns them round in shared memory, and writes pieces of SUM_WRITE. SUM_SHARES threads share
 * a weight, each adds every SUM_SHARES-th slice, so the order is always the same.
 *
 * Weight by weight, 16 bits at a time, it took as long as the products: 34 us of 72 (SimpleBaseline 1, fp16).
 *
 * Macros: ELEMENT_T; PARTIAL_T (of partial sums: float, or ELEMENT_T where there is one slice); CI, CO (channels of a group);
 * KERNEL_H, KERNEL_W; SUM_RUN, SUM_SHARES, SUM_READ, SUM_WRITE. Chosen by gemmconv/kernels/splits/reduce_wgrad_splits.py.
 */
#include "ptx/pdl.cuh"
#include "numeric/integers.cuh"
#include "numeric/types.cuh"
#include "epilogue/store_runs.cuh"

struct reduce_wgrad_splits_params {
    const PARTIAL_T* partials;  // written by the launch before, which may still run
    ELEMENT_T* __restrict__ grad_weight;  // [groups, CI, CO, K_H, K_W]
    long long elements;
    int slices;
};

constexpr int kSumThreads = 256, kSumLanes = kSumThreads / SUM_SHARES, kRuns = ceil_div(CO, SUM_RUN);
constexpr int kTaps = KERNEL_H * KERNEL_W, kSumWeights = kTaps * SUM_RUN;
constexpr int kRowPieces = CO * kTaps / SUM_WRITE;  // of an input channel
constexpr int kTapPitch = SUM_RUN + 1, kTotals = kTaps * kTapPitch;  // taps of a channel lie in different banks
using read_t = vector_of<PARTIAL_T, SUM_READ>;
using written_t = vector_of<ELEMENT_T, SUM_WRITE>;
static_assert(SUM_RUN % SUM_READ == 0 && CO % SUM_READ == 0, "pieces of channels are aligned, and there or not");
static_assert(kSumWeights % SUM_WRITE == 0 && CO * kTaps % SUM_WRITE == 0, "so are pieces of weights");

extern "C" __global__ void __launch_bounds__(kSumThreads)
splits_reduce_wgrad_splits_kernel(const __grid_constant__ reduce_wgrad_splits_params p) {
    __shared__ float totals[SUM_SHARES][kTotals];
    const int lane = threadIdx.x % kSumLanes, share = threadIdx.x / kSumLanes;
    const int co = blockIdx.x % kRuns * SUM_RUN, ci = blockIdx.x / kRuns % CI, group = blockIdx.x / kRuns / CI;
    grid_dependency_wait();
    for (int weight = lane * SUM_READ; weight < kSumWeights; weight += kSumLanes * SUM_READ) {
        const int tap = weight / SUM_RUN, channel = weight % SUM_RUN;
        if (co + channel >= CO) continue;
        const PARTIAL_T* partial = p.partials + (static_cast<long long>(group * kTaps + tap) * CI + ci) * CO + co + channel;
        float total[SUM_READ] = {};
        #pragma unroll 8
        for (int slice = share; slice < p.slices; slice += SUM_SHARES) {
            const read_t piece = *reinterpret_cast<const read_t*>(partial + slice * p.elements);
            #pragma unroll
            for (int i = 0; i < SUM_READ; ++i) total[i] += widen(piece.value[i]);
        }
        #pragma unroll
        for (int i = 0; i < SUM_READ; ++i) totals[share][tap * kTapPitch + channel + i] = total[i];
    }
    __syncthreads();
    written_t* grad_weight = reinterpret_cast<written_t*>(p.grad_weight) + static_cast<long long>(group * CI + ci) * kRowPieces;
    const int pieces = min(kSumWeights, (CO - co) * kTaps) / SUM_WRITE, first_piece = co * kTaps / SUM_WRITE;
    for (int i = threadIdx.x; i < pieces; i += kSumThreads) {
        written_t piece;
        #pragma unroll
        for (int j = 0; j < SUM_WRITE; ++j) {
            const int place = i * SUM_WRITE + j, weight = place % kTaps * kTapPitch + place / kTaps;
            float total = totals[0][weight];
            #pragma unroll
            for (int other = 1; other < SUM_SHARES; ++other) total += totals[other][weight];
            piece.value[j] = narrow<ELEMENT_T>(total);
        }
        grad_weight[first_piece + i] = piece;
    }
}
