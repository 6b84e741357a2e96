/* The part of CUDA C++ that csrc/ uses, for a C++ compiler of the CPU. build.py puts it before every kernel source.
 * No standard headers: a test session compiles a few hundred variants of the kernels.
 */
#pragma once

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct uint3 { unsigned x, y, z; };

/* A thread of the block that runs. */
struct emulator_thread_t {
    uint3 index;
    int lane;
    unsigned long long* exchange;  // [32], one slot for each lane of the warp
};

struct emulator_launch_t {
    uint3 grid_dim, block_dim, block_index;
    emulator_thread_t* thread;
};

/* A kernel as scheduler.cpp sees it. */
struct emulator_kernel_t {
    void (*call)(const void* params);
    unsigned long params_bytes;
    int most_threads;
};

// Defined in scheduler.cpp.
extern "C" {
extern emulator_launch_t emulator_now;
extern unsigned char emulator_dynamic_shared[];
void* emulator_shared_array(int declaration, unsigned long bytes);
void emulator_block_barrier();
void emulator_warp_barrier(unsigned mask);
float emulator_half_to_float(unsigned short bits);
unsigned short emulator_float_to_half(float value);
unsigned short emulator_float_to_bfloat16(float value);
}

#define threadIdx (emulator_now.thread->index)
#define blockIdx (emulator_now.block_index)
#define blockDim (emulator_now.block_dim)
#define gridDim (emulator_now.grid_dim)

inline void __syncthreads() { emulator_block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator_warp_barrier(mask); }

template <typename T> T __shfl_xor_sync(unsigned mask, T value, int distance) {
    static_assert(sizeof(T) <= 8, "a slot holds 8 bytes");
    const emulator_thread_t& thread = *emulator_now.thread;
    __builtin_memcpy(&thread.exchange[thread.lane], &value, sizeof(T));
    emulator_warp_barrier(mask);
    __builtin_memcpy(&value, &thread.exchange[thread.lane ^ distance], sizeof(T));
    emulator_warp_barrier(mask);
    return value;
}

template <typename T> T __ldg(const T* address) { return *address; }
inline int min(int a, int b) { return b < a ? b : a; }
inline float __uint_as_float(unsigned bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}

// What a source exports of its kernels; see build.py.
template <typename P> void emulator_call(void (*kernel)(P), const void* params) {
    kernel(*static_cast<const P*>(params));
}
template <typename P> constexpr unsigned long emulator_params_bytes(void (*)(P)) { return sizeof(P); }
constexpr int emulator_most_threads(int threads, int /* blocks of a multiprocessor */ = 1) { return threads; }
#define EMULATOR_EXPORT(kernel, ...)                                                                \
    extern "C" __attribute__((visibility("default"))) const emulator_kernel_t emulated_##kernel = { \
        [](const void* params) { emulator_call(kernel, params); },                                  \
        emulator_params_bytes(kernel),                                                              \
        emulator_most_threads(__VA_ARGS__),                                                         \
    };
