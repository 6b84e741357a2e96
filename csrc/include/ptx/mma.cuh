/* mma.sync on words: D += A B with A [16 rows, 8 words], B [8 words, 8 columns], D [16 rows, 8 columns] in float32.
 *
 * A word is one float32 value of which TF32 multiplies (m16n8k8) or two neighbouring 16-bit values (m16n8k16), and in words the
 * instructions agree on who holds what. With g = lane / 4, t = lane % 4 a lane holds
 *
 *   A  words (row g, word t) (g+8, t) (g, t+4) (g+8, t+4)
 *   B  words (word t, column g) (t+4, g)
 *   D  values (row g, column 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)
 */
#pragma once

#include "numeric/types.cuh"

/* Load four matrices of 8 rows of 16 bytes from shared memory. Lane i has the address of row i % 8 of matrix i / 8; it gets
 * word t of row g of each. */
__device__ __forceinline__ void load_matrices(unsigned (&word)[4], const void* row) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(address) : "memory");
}

/* load_matrices with transposes, for 16-bit values: a lane gets rows 2t and 2t + 1 in column g of each matrix. */
__device__ __forceinline__ void load_matrices_turned(unsigned (&word)[4], const void* row) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(address) : "memory");
}

struct alignas(16) a_words_t { unsigned value[4]; };

/* A 16-bit value of each of two words, the upper one of its word or the lower one. */
__device__ __forceinline__ unsigned halves(unsigned a, unsigned b, bool upper_a, bool upper_b) {
    unsigned result;
    const unsigned bytes = (upper_a ? 0x32u : 0x10u) | (upper_b ? 0x7600u : 0x5400u);
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(bytes));
    return result;
}

/* Functions of words of two 16-bit values, for both types. */
template <typename T> struct pairs_of {
    static constexpr int kElements = 2;
    static __device__ __forceinline__ unsigned pack(const T (&values)[2]) {
        return values[0].bits | static_cast<unsigned>(values[1].bits) << 16;
    }
    static __device__ __forceinline__ unsigned rounded(unsigned word) { return word; }
};

template <typename T> struct mma_words;

/* Neighbouring values as words, which are not rounded. */
template <int COUNT, typename T> __device__ __forceinline__ void as_words(unsigned* words, const T* values) {
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if constexpr (sizeof(T) == 4) words[i] = __float_as_uint(values[i]);
        else words[i] = values[2 * i].bits | static_cast<unsigned>(values[2 * i + 1].bits) << 16;
    }
}

template <> struct mma_words<half_t> : pairs_of<half_t> {
    static __device__ __forceinline__ void mma(float (&d)[4], const a_words_t& a, unsigned b0, unsigned b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a.value[0]), "r"(a.value[1]), "r"(a.value[2]), "r"(a.value[3]), "r"(b0), "r"(b1));
    }
};

template <> struct mma_words<bfloat16_t> : pairs_of<bfloat16_t> {
    static __device__ __forceinline__ void mma(float (&d)[4], const a_words_t& a, unsigned b0, unsigned b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a.value[0]), "r"(a.value[1]), "r"(a.value[2]), "r"(a.value[3]), "r"(b0), "r"(b1));
    }
};

template <> struct mma_words<float> {
    static constexpr int kElements = 1;
    /* Rounds to nearest. Where that takes more than an instruction, ties away from zero: multiplying cuts the low bits off, so
     * they may stay (cvt.rna.tf32 takes an instruction more to clear them). A NaN stays one: the largest would overflow to zero. */
    static __device__ __forceinline__ unsigned pack(const float (&values)[1]) {
#if __CUDA_ARCH__ >= 900
        unsigned word;
        asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(word) : "f"(values[0]));
        return word;
#else
        const unsigned bits = __float_as_uint(values[0]);
        return values[0] == values[0] ? bits + kHalf : bits;
#endif
    }
    static __device__ __forceinline__ unsigned rounded(unsigned word) {
        const float value[1] = {__uint_as_float(word)};
        return pack(value);
    }
    static constexpr unsigned kHalf = 0x1000;  // of the lowest bit that multiplies
    static __device__ __forceinline__ void mma(float (&d)[4], const a_words_t& a, unsigned b0, unsigned b1) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a.value[0]), "r"(a.value[1]), "r"(a.value[2]), "r"(a.value[3]), "r"(b0), "r"(b1));
    }
};

/* A word rounded to what is multiplied; of float32 in two parts, `rest` is what that leaves of it. The largest values are
 * rounded down: up would be to infinity. The rest of infinity is infinity, that of NaN is anything.
 *
 * The rest of values below 2e-34 has fewer bits than TF32, whose least is 2^-136: at 1e-37 results are 4e-5 off. Scaled by 2^10,
 * with sums of its own that are scaled back before the other products, it would be as good as elsewhere; but to wait for those sums
 * took forward passes and input gradients 5%, weight gradients 17% longer (H100, public and models in ieee).
 */
template <int PARTS, typename T> __device__ __forceinline__ unsigned rounded(unsigned word, [[maybe_unused]] unsigned& rest) {
    if constexpr (PARTS == 1) {
        return mma_words<T>::rounded(word);
    } else {
        constexpr unsigned kHalf = mma_words<T>::kHalf;
        const float value = __uint_as_float(word), most = __uint_as_float(0x7f7fffff - kHalf);
        float bounded;  // min(|value|, most), with the sign of the value; NaN stays NaN
#if __CUDA_ARCH__ >= 860
        asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(bounded) : "f"(value), "f"(most));
#else
        bounded = __uint_as_float(word & 0x7fffffff) > most ? __uint_as_float(__float_as_uint(most) | (word & 0x80000000)) : value;
#endif
        const unsigned big = mma_words<T>::rounded(__float_as_uint(bounded));
        rest = __float_as_uint(value - __uint_as_float(big & ~(2 * kHalf - 1))) + kHalf;
        return big;
    }
}
