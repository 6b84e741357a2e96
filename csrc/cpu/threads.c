/* Threads, memory advice, and the choice of the instruction set. */
#define _GNU_SOURCE
#include "cpu.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

typedef void (*gomp_parallel_t)(void (*)(void*), void*, unsigned threads, unsigned flags);
typedef struct { work_t work; void* context; i64 items; _Atomic i64 next; _Atomic int workers; } loop_t;

/* The entry of the OpenMP runtime that torch is linked to, so that no second one is loaded: GNU's, or the equal one of
 * LLVM's or Intel's. NULL if there is none; then one thread does all work. */
static gomp_parallel_t torchs_parallel(void) {
    static _Atomic(gomp_parallel_t) found;
    void* torch = found ? NULL : dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch) found = (gomp_parallel_t)dlsym(torch, "GOMP_parallel");
    return found;
}

static void run(void* argument) {
    loop_t* loop = argument;
    const int worker = atomic_fetch_add(&loop->workers, 1);
    for (i64 item; (item = atomic_fetch_add(&loop->next, 1)) < loop->items;) loop->work(loop->context, item, worker);
}

void parallel_for(i64 items, int threads, work_t work, void* context) {
    loop_t loop = {.work = work, .context = context, .items = items};
    const gomp_parallel_t parallel = threads > 1 && items > 1 ? torchs_parallel() : NULL;
    if (parallel) parallel(run, &loop, (unsigned)threads, 0);  /* all: of a smaller team GNU's lets the others end */
    else run(&loop);
}

/* Large memory is new from the system in each call, and its page faults take most of the time. */
void advise_huge_pages(void* start, size_t bytes) {
    const uintptr_t page = 1 << 21, begin = CEIL_DIV((uintptr_t)start, page) * page;
    const uintptr_t end = ((uintptr_t)start + bytes) / page * page;
    if (bytes >= 32u << 20 && end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
}

extern const kernels_t portable_float, portable_double;
#ifdef __x86_64__
extern const kernels_t avx2_float, avx2_double, avx512_float, avx512_double;
#endif

/* The kernels of an instruction set; NULL if it is not built or this CPU lacks it. */
__attribute__((visibility("default"))) const kernels_t* gemmconv_cpu_kernels(const char* isa, int is_double) {
#ifdef __x86_64__
    if (!strcmp(isa, "avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return is_double ? &avx512_double : &avx512_float;
    if (!strcmp(isa, "avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return is_double ? &avx2_double : &avx2_float;
#endif
#ifdef __aarch64__
    if (!strcmp(isa, "neon")) return is_double ? &portable_double : &portable_float;
#endif
    return strcmp(isa, "portable") ? NULL : is_double ? &portable_double : &portable_float;
}

enum { kChecked = 8192 };  /* words of an item */
typedef uint64_t word_t __attribute__((aligned(1), may_alias));
typedef struct { const word_t* words; i64 count; _Atomic uint64_t sum; } checksum_t;

static void checksum_item(void* context, i64 item, int worker) {
    checksum_t* call = context;
    const word_t* words = call->words + item * kChecked;
    const i64 left = call->count - item * kChecked, count = MIN(left, kChecked);
    uint64_t sums[8] = {0}, sums_of_sums[8] = {0}, all = 0;  /* as Fletcher's: what is moved changes it too */
    for (i64 i = 0; i < count; ++i) {  /* a product of a word's halves: signs alone, of two values, do not cancel */
        const uint64_t word = words[i] ^ (0x9e3779b97f4a7c15u * (uint64_t)(i % 8 + 1));
        sums[i % 8] += words[i] + (word & 0xffffffff) * (word >> 32);
        sums_of_sums[i % 8] += sums[i % 8];
    }
    for (int l = 0; l < 8; ++l) all = (all * 0x9e3779b97f4a7c15u + sums[l]) * 0xbf58476d1ce4e5b9u + sums_of_sums[l];
    atomic_fetch_add(&call->sum, (all ^ all >> 29) * (2 * (uint64_t)item + 0x94d049bb133111ebu));
}

/* A checksum of memory that does not depend on the number of threads. */
__attribute__((visibility("default"))) uint64_t gemmconv_cpu_checksum(const void* start, i64 bytes, int threads) {
    checksum_t call = {.words = start, .count = bytes / 8};
    uint64_t rest = 0;
    memcpy(&rest, (const char*)start + call.count * 8, (size_t)(bytes % 8));
    parallel_for(CEIL_DIV(call.count, kChecked), threads, checksum_item, &call);
    return call.sum + rest * 0xd6e8feb86659fd93u;
}
