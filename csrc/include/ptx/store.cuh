/* Stores of neighbouring words by one instruction, where `is` holds. The compiler makes several of words that come from
 * arithmetic, and waits for loads one by one where stores are branches. Nothing that the kernel does later may read them.
 */
#pragma once

/* To global memory, at a multiple of their size. */
__device__ __forceinline__ void store_words(void* to, const unsigned (&word)[4], int is) {
    const unsigned long long address = __cvta_generic_to_global(to);
    asm volatile("{ .reg .pred is; setp.ne.s32 is, %5, 0; @is st.global.v4.b32 [%0], {%1, %2, %3, %4}; }"
                 : : "l"(address), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]), "r"(is));
}
__device__ __forceinline__ void store_words(void* to, const unsigned (&word)[2], int is) {
    const unsigned long long address = __cvta_generic_to_global(to);
    asm volatile("{ .reg .pred is; setp.ne.s32 is, %3, 0; @is st.global.v2.b32 [%0], {%1, %2}; }"
                 : : "l"(address), "r"(word[0]), "r"(word[1]), "r"(is));
}
__device__ __forceinline__ void store_words(void* to, const unsigned (&word)[1], int is) {
    if (is) *static_cast<unsigned*>(to) = word[0];
}
__device__ __forceinline__ void store_words(void* to, const unsigned short (&half)[1], int is) {
    if (is) *static_cast<unsigned short*>(to) = half[0];
}
