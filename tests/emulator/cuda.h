/* The part of CUDA C++ that csrc/ uses, for a C++ compiler of the CPU. build.py puts it before every kernel source.
 * No standard headers: a test session compiles a few hundred variants of the kernels.
 */
#pragma once

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif
#define __device__
#define __global__
#define __constant__ static const
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

enum { EMULATOR_HALF, EMULATOR_BFLOAT16, EMULATOR_TF32 };  // types that wgmma multiplies

// Defined in scheduler.cpp; more of it is declared where it is used, in twins/.
extern "C" {
extern emulator_launch_t emulator_now;
extern unsigned char emulator_dynamic_shared[];
void* emulator_shared_array(int declaration, unsigned long bytes);
void emulator_wait_for_previous_launch();
void emulator_block_barrier();
void emulator_warp_barrier(unsigned mask);
float emulator_half_to_float(unsigned short bits);
unsigned short emulator_float_to_half(float value);
unsigned short emulator_float_to_bfloat16(float value);
unsigned emulator_float_to_tf32(float value);
inline float emulator_min_of_magnitudes(float a, float b) {
    if (a != a || b != b) return __builtin_nanf("");
    const float least = __builtin_fminf(__builtin_fabsf(a), __builtin_fabsf(b));
    return __builtin_signbit(a) != __builtin_signbit(b) ? -least : least;
}
void emulator_copy_async(unsigned target, const void* source, int bytes, int source_bytes);
void emulator_commit_copies();
void emulator_wait_for_copies(int pending);
void emulator_barrier(int number, int threads);
void emulator_barrier_pass(int number, int threads);
}

#define threadIdx (emulator_now.thread->index)
#define blockIdx (emulator_now.block_index)
#define blockDim (emulator_now.block_dim)
#define gridDim (emulator_now.grid_dim)

inline void __syncthreads() { emulator_block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator_warp_barrier(mask); }

template <typename T> T __shfl_sync(unsigned mask, T value, int lane) {
    static_assert(sizeof(T) <= 8, "a slot holds 8 bytes");
    const emulator_thread_t& thread = *emulator_now.thread;
    __builtin_memcpy(&thread.exchange[thread.lane], &value, sizeof(T));
    emulator_warp_barrier(mask);
    __builtin_memcpy(&value, &thread.exchange[lane & 31], sizeof(T));
    emulator_warp_barrier(mask);
    return value;
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int distance) {
    return __shfl_sync(mask, value, emulator_now.thread->lane ^ distance);
}

template <typename T> T __ldg(const T* address) { return *address; }
inline unsigned long long __cvta_generic_to_global(const void* address) {
    return reinterpret_cast<unsigned long long>(address);
}
inline unsigned long __cvta_generic_to_shared(const void* address) {
    return static_cast<const unsigned char*>(address) - emulator_dynamic_shared;
}
inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
inline float __uint_as_float(unsigned bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* prmt: bytes of b:a, by the hexadecimal digits of the selector, of which none may ask for a sign. */
inline unsigned emulator_permute(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

/* st.global.v2 and v4: alignment is checked. */
template <int COUNT> struct alignas(COUNT * 4) emulator_words_t { unsigned word[COUNT]; };
template <int COUNT> void emulator_store_words(unsigned long long address, emulator_words_t<COUNT> words) {
    *reinterpret_cast<emulator_words_t<COUNT>*>(address) = words;
}

/* ldmatrix.x4, as csrc/include/ptx/mma.cuh describes it; `row` is the lane's own address in dynamic shared memory. */
inline void emulator_load_matrices(unsigned row, bool turned, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
    const emulator_thread_t& thread = *emulator_now.thread;
    struct alignas(16) row_t { unsigned short value[8]; };
    const row_t* const mine = reinterpret_cast<const row_t*>(emulator_dynamic_shared + row);
    thread.exchange[thread.lane] = reinterpret_cast<unsigned long long>(&mine->value);  // aligned, which is checked
    emulator_warp_barrier(0xffffffffu);
    const int g = thread.lane / 4, t = thread.lane % 4;
    const auto value_of = [&](int matrix, int row, int column) -> unsigned {
        return reinterpret_cast<const row_t*>(thread.exchange[matrix * 8 + row])->value[column];
    };
    unsigned words[4];
    for (int i = 0; i < 4; ++i)
        words[i] = turned ? value_of(i, 2 * t, g) | value_of(i, 2 * t + 1, g) << 16
                          : value_of(i, g, 2 * t) | value_of(i, g, 2 * t + 1) << 16;
    emulator_warp_barrier(0xffffffffu);
    a = words[0], b = words[1], c = words[2], d = words[3];
}

/* The values of a word of a fragment of mma.sync; returns how many. The instruction itself cuts TF32 values off. */
inline int emulator_half_word(float (&values)[2], unsigned word) {
    for (int e = 0; e < 2; ++e) values[e] = emulator_half_to_float(static_cast<unsigned short>(word >> 16 * e));
    return 2;
}
inline int emulator_bfloat16_word(float (&values)[2], unsigned word) {
    for (int e = 0; e < 2; ++e) values[e] = __uint_as_float(word >> 16 * e << 16);
    return 2;
}
inline int emulator_tf32_word(float (&values)[2], unsigned word) {
    values[0] = __uint_as_float(word & ~0x1fffu);
    return 1;
}

/* mma.sync on words, as csrc/include/ptx/mma.cuh describes it; `mine` has the lane's words of A, then those of B. Products
 * are added up in order, in float.
 */
inline void emulator_mma(
    int (*floats_of)(float (&)[2], unsigned), float& d0, float& d1, float& d2, float& d3, const unsigned (&mine)[6]) {
    const emulator_thread_t& thread = *emulator_now.thread;
    thread.exchange[thread.lane] = reinterpret_cast<unsigned long long>(mine);
    emulator_warp_barrier(0xffffffffu);
    const auto word_of = [&](int lane, int i) { return reinterpret_cast<const unsigned*>(thread.exchange[lane])[i]; };
    const int g = thread.lane / 4, t = thread.lane % 4;
    for (int word = 0; word < 8; ++word) {
        float a[2][2], b[2][2];  // of two rows and of two columns
        int count = 0;
        for (int i = 0; i < 2; ++i) {
            count = floats_of(a[i], word_of(g * 4 + word % 4, i + word / 4 * 2));
            floats_of(b[i], word_of((2 * t + i) * 4 + word % 4, 4 + word / 4));
        }
        for (int e = 0; e < count; ++e) {
            d0 += a[0][e] * b[0][e];
            d1 += a[0][e] * b[1][e];
            d2 += a[1][e] * b[0][e];
            d3 += a[1][e] * b[1][e];
        }
    }
    emulator_warp_barrier(0xffffffffu);
}

// What a source exports of its kernels; see build.py.
template <typename P> void emulator_call(void (*kernel)(P), const void* params) {
    P aligned;  // as the host's may not be
    __builtin_memcpy(static_cast<void*>(&aligned), params, sizeof(P));
    kernel(aligned);
}
template <typename P> constexpr unsigned long emulator_params_bytes(void (*)(P)) { return sizeof(P); }
constexpr int emulator_most_threads(int threads, int /* blocks of a multiprocessor */ = 1) { return threads; }
#define EMULATOR_EXPORT(kernel, ...)                                                                \
    extern "C" __attribute__((visibility("default"))) const emulator_kernel_t emulated_##kernel = { \
        [](const void* params) { emulator_call(kernel, params); },                                  \
        emulator_params_bytes(kernel),                                                              \
        emulator_most_threads(__VA_ARGS__),                                                         \
    };
