#pragma once

/* Keeps a value, such as a running offset, where the compiler would rather work it out anew each time. Of an address the
 * compiler forgets in which memory it lies: what is read there is to be read by load_once, else by slower generic loads.
 */
template <typename T> __device__ __forceinline__ void keep(T*& address) { asm("" : "+l"(address)); }
__device__ __forceinline__ void keep(int& offset) { asm("" : "+r"(offset)); }
__device__ __forceinline__ void keep(long long& offset) { asm("" : "+l"(offset)); }

/* Has what follows from a value worked out anew, in fewer registers than keeping it takes. */
__device__ __forceinline__ void forget(int& value) { asm volatile("" : "+r"(value)); }

/* Has a word worked out here, before anything that follows. */
__device__ __forceinline__ void settle(unsigned& word) { asm volatile("" : "+r"(word) : : "memory"); }
