/* A checksum of memory, which does not depend on the number of threads. */
#pragma once
#include "vector.h"

enum { kChecked = 1 << 16 };  /* bytes of an item */
typedef uint64_t words __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
typedef struct { const char* bytes; i64 count; uint64_t sum; } checksum_t;

TARGET static void checksum_item(void* context, i64 item, int worker) {
    checksum_t* call = context;
    const char* bytes = call->bytes + item * kChecked;
    const i64 count = MIN(kChecked, call->count - item * kChecked);
    words key, sums = {0}, sums_of_sums = {0};  /* as Fletcher's: what is moved changes it too */
    uint64_t all = 0;
    for (int l = 0; l < kVectorBytes / 8; ++l) key[l] = 0x9e3779b97f4a7c15u * (uint64_t)(l + 1);
    for (i64 i = 0; i < count; i += kVectorBytes) {
        words word = {0};
        if (count - i >= kVectorBytes) word = *(const words*)(bytes + i);
        else memcpy(&word, bytes + i, (size_t)(count - i));
        const words mixed = word ^ key;
        sums += word + (mixed & 0xffffffff) * (mixed >> 32);  /* signs alone, of two values, do not cancel */
        sums_of_sums += sums;
    }
    for (int l = 0; l < kVectorBytes / 8; ++l)
        all = (all * 0x9e3779b97f4a7c15u + sums[l]) * 0xbf58476d1ce4e5b9u + sums_of_sums[l];
    __atomic_fetch_add(&call->sum, (all ^ all >> 29) * (2 * (uint64_t)item + 0x94d049bb133111ebu), __ATOMIC_RELAXED);
}

TARGET static uint64_t checksum(const void* start, i64 bytes, int threads) {
    checksum_t call = {start, bytes, 0};
    parallel_for(CEIL_DIV(bytes, kChecked), threads, checksum_item, &call);
    return call.sum;
}
