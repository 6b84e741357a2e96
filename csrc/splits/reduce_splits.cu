/* Adds up partial sums: the last step of the weight gradients of `direct` and `gemm_col2im`.
 *
 *   partials [slices, elements] -> sums [elements]
 *
 * A block owns 32 elements; 8 threads share one, each adds every eighth slice, so the order is always the same.
 *
 * Macros: ELEMENT_T.
 */
#include "numeric/types.cuh"

using accumulate_t = accumulator_t<ELEMENT_T>;

struct reduce_splits_params {
    const accumulate_t* __restrict__ partials;
    ELEMENT_T* __restrict__ sums;
    long long elements;
    int slices;
};

extern "C" __global__ void __launch_bounds__(256) splits_reduce_splits_kernel(const __grid_constant__ reduce_splits_params p) {
    __shared__ accumulate_t totals[8][32];
    const int lane = threadIdx.x % 32, share = threadIdx.x / 32;
    const long long element = static_cast<long long>(blockIdx.x) * 32 + lane;
    accumulate_t total = 0;
    if (element < p.elements) {
        const accumulate_t* __restrict__ partial = p.partials + element;
        #pragma unroll 8
        for (int slice = share; slice < p.slices; slice += 8) total += load_once(partial + slice * p.elements);
    }
    totals[share][lane] = total;
    __syncthreads();
    if (share != 0 || element >= p.elements) return;
    #pragma unroll
    for (int s = 1; s < 8; ++s) total += totals[s][lane];
    p.sums[element] = narrow<ELEMENT_T>(total);
}
