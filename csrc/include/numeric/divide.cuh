/* Division by a number that is the same for a whole launch. */
#pragma once

/* n / d for n >= 0, where `reciprocal` is 2^63 / d, rounded up: its error is too small to change the quotient. */
__device__ __forceinline__ int divided(int n, unsigned long long reciprocal) {
    const unsigned twice = 2u * static_cast<unsigned>(n);
    const unsigned long long low = static_cast<unsigned long long>(twice) * static_cast<unsigned>(reciprocal);
    return static_cast<int>((static_cast<unsigned long long>(twice) * (reciprocal >> 32) + (low >> 32)) >> 32);
}

/* n / d for small numbers, n * d below 2^32: `reciprocal` is 2^32 / d, rounded up. */
__device__ __forceinline__ int divided_small(int n, unsigned reciprocal) {
    return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * reciprocal >> 32);
}
