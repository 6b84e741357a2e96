/* Rounds the elements of two tensors to 16 bits, or widens them: the casts of autocast for a weight and its bias, and for
 * their gradients. One launch has both, since either takes less time than a launch.
 *
 *   blocks:  0 1 2 ... first_blocks - 1 | first_blocks ...
 *            the first tensor           | the second one
 *
 * A thread has one unit of neighbours, of 16 bytes on the narrower side; the last one's may be cut off.
 *
 * Macros: SOURCE_T, TARGET_T (a type of 16 bits and float, either way). Chosen by gemmconv/kernels/layout/cast.py.
 */
#include "numeric/types.cuh"

struct cast_params {
    const SOURCE_T* __restrict__ first_source;
    TARGET_T* __restrict__ first_target;
    const SOURCE_T* __restrict__ second_source;
    TARGET_T* __restrict__ second_target;
    long long first_elements, second_elements;
    int first_blocks;
};

constexpr int kThreads = 256, kUnit = 8;
template <typename T> using unit_t = vector_of<T, 16 / sizeof(T)>;  // elements that a thread reads or writes at once

extern "C" __global__ void __launch_bounds__(kThreads) layout_cast_kernel(const __grid_constant__ cast_params p) {
    const bool is_first = static_cast<int>(blockIdx.x) < p.first_blocks;
    const int block = blockIdx.x - (is_first ? 0 : p.first_blocks);
    const SOURCE_T* __restrict__ source = is_first ? p.first_source : p.second_source;
    TARGET_T* __restrict__ target = is_first ? p.first_target : p.second_target;
    const long long elements = is_first ? p.first_elements : p.second_elements;
    const long long begin = (static_cast<long long>(block) * kThreads + threadIdx.x) * kUnit;
    if (begin + kUnit > elements) {
        for (long long i = begin; i < elements; ++i) target[i] = narrow<TARGET_T>(widen(source[i]));
        return;
    }
    vector_of<SOURCE_T, kUnit> from;
    vector_of<TARGET_T, kUnit> to;
    constexpr int kSources = sizeof from / 16, kTargets = sizeof to / 16;
    #pragma unroll
    for (int i = 0; i < kSources; ++i)
        reinterpret_cast<unit_t<SOURCE_T>*>(&from)[i] = reinterpret_cast<const unit_t<SOURCE_T>*>(source + begin)[i];
    #pragma unroll
    for (int i = 0; i < kUnit; ++i) to.value[i] = narrow<TARGET_T>(widen(from.value[i]));
    #pragma unroll
    for (int i = 0; i < kTargets; ++i)
        reinterpret_cast<unit_t<TARGET_T>*>(target + begin)[i] = reinterpret_cast<unit_t<TARGET_T>*>(&to)[i];
}
