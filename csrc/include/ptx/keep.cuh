#pragma once

/* Keeps a value, such as a running offset, in a register where the compiler would compute it anew each time. The compiler
 * forgets the memory space of an address that is kept: reads need load_once, or become slower generic loads.
 */
template <typename T> __device__ __forceinline__ void keep(T*& address) { asm("" : "+l"(address)); }
__device__ __forceinline__ void keep(int& offset) { asm("" : "+r"(offset)); }
__device__ __forceinline__ void keep(long long& offset) { asm("" : "+l"(offset)); }

/* Makes the compiler compute values that depend on this one anew, which takes fewer registers than keeping them. */
__device__ __forceinline__ void forget(int& value) { asm volatile("" : "+r"(value)); }

/* Makes the compiler compute a word here, before everything that follows. */
__device__ __forceinline__ void settle(unsigned& word) { asm volatile("" : "+r"(word) : : "memory"); }
