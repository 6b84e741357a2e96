/* Threads, memory advice, and the choice of the instruction set. */
#define _GNU_SOURCE
#include "cpu.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

typedef void (*gomp_parallel_t)(void (*)(void*), void*, unsigned threads, unsigned flags);
typedef struct { work_t work; void* context; i64 items; int parts; _Atomic int workers; _Atomic i64* next; } loop_t;

/* The entry of the OpenMP runtime that torch is linked to, so that no second one is loaded: GNU's, or the equal one of
 * LLVM's or Intel's. NULL if there is none; then one thread does all work. */
static gomp_parallel_t torchs_parallel(void) {
    static _Atomic(gomp_parallel_t) found;
    void* torch = found ? NULL : dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch) found = (gomp_parallel_t)dlsym(torch, "GOMP_parallel");
    return found;
}

/* Each thread has a part of the items, since neighbours write the same cache lines; then it takes what others left. */
static void run(void* argument) {
    loop_t* loop = argument;
    const int worker = atomic_fetch_add(&loop->workers, 1);
    for (int i = worker; i < worker + loop->parts; ++i) {
        const i64 part = i % loop->parts, end = (part + 1) * loop->items / loop->parts;
        for (i64 item; (item = atomic_fetch_add(&loop->next[part], 1)) < end;) loop->work(loop->context, item, worker);
    }
}

void parallel_for(i64 items, int threads, work_t work, void* context) {
    const gomp_parallel_t parallel = threads > 1 && items > 1 ? torchs_parallel() : NULL;
    const int parts = parallel ? threads : 1;
    _Atomic i64 next[parts];
    loop_t loop = {work, context, items, parts, 0, next};
    for (int i = 0; i < parts; ++i) next[i] = i * items / parts;
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
