/* Stands in for libcuda.so.1 in tests/test_executor.py: writes down what it is asked for, a line a call, and fails if it
 * is told to. A function's address is made up; its last 16 bits are the size of its params. Two functions of cuBLAS too.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

typedef struct { unsigned id, unused; int value; char more[60]; } attribute_t;
typedef struct { unsigned grid[3], block[3], shared; void* stream; attribute_t* attributes; unsigned count; } config_t;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char text[1 << 20], failing[64];
static size_t length;
static int failing_with, quiet;
static _Thread_local uintptr_t contexts[8];
static _Thread_local int depth;
static long with_lock, retained, pushed, launched, together, most_together, streams, graphs, replays;
static int capturing;

/* For the tests. */
const char* said(void) { return text; }
void forget(void) { length = 0, text[0] = 0; }
void be_quiet(int whether) { quiet = whether; }
void fail(const char* function, int status) { snprintf(failing, sizeof failing, "%s", function), failing_with = status; }
void set_context(uintptr_t context) { contexts[0] = context, depth = context != 0; }
uintptr_t context(void) { return depth ? contexts[depth - 1] : 0; }
long calls_with_lock(void) { return with_lock; }
long contexts_retained(void) { return retained; }
long contexts_pushed(void) { return pushed; }
long kernels_launched(void) { return launched; }
long most_at_once(void) { return most_together; }
long streams_there(void) { return streams; }
long graphs_there(void) { return graphs; }
long replays_there(void) { return replays; }
void set_capturing(int whether) { capturing = whether; }

static void say(const char* format, ...) {
    va_list values;
    va_start(values, format);
    if (!quiet && length < sizeof text - 1) {
        const int size = vsnprintf(text + length, sizeof text - length, format, values);
        length = length + size < sizeof text ? length + size : sizeof text - 1;
    }
    va_end(values);
}

static int status_of(const char* function) {
    int (*has_lock)(void);
    *(void**)&has_lock = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    with_lock += has_lock && has_lock();
    return strcmp(function, failing) ? 0 : failing_with;
}

#define CALL(name, parameters, ...)              \
    int name parameters {                        \
        pthread_mutex_lock(&mutex);              \
        int status = status_of(#name);           \
        __VA_ARGS__                              \
        pthread_mutex_unlock(&mutex);            \
        return status;                           \
    }

int cuGetErrorName(int status, const char** name) {
    if (status != 700) return 1;
    *name = "CUDA_ERROR_FAKE";
    return 0;
}
CALL(cuInit, (unsigned flags), say("init %u\n", flags);)
CALL(cuDeviceGet, (int* device, int ordinal), *device = 40 + ordinal; say("device %d\n", ordinal);)
CALL(cuDevicePrimaryCtxRetain, (uintptr_t* context, int device), say("retain %d\n", device);
     if (!status) *context = 1000 + device, ++retained;)
CALL(cuDevicePrimaryCtxRelease_v2, (int device), say("release %d\n", device); --retained;)
CALL(cuCtxGetCurrent, (uintptr_t* current), *current = context();)
CALL(cuCtxPushCurrent_v2, (uintptr_t context), say("push %d\n", (int)context);
     if (!status) contexts[depth++] = context, ++pushed;)
CALL(cuCtxPopCurrent_v2, (uintptr_t* context), say("pop\n"); *context = contexts[--depth]; --pushed;)
CALL(cuThreadExchangeStreamCaptureMode, (int* mode), say("mode of capture %d\n", *mode); *mode = 2 - *mode;)
CALL(cuStreamCreate, (uintptr_t* stream, unsigned flags), say("stream %u\n", flags); if (!status) *stream = 77, ++streams;)
CALL(cuStreamDestroy_v2, (uintptr_t stream), say("destroy %d\n", (int)stream); --streams;)
CALL(cuStreamBeginCapture_v2, (uintptr_t stream, int mode), say("begin %d %d\n", (int)stream, mode);)
CALL(cuStreamEndCapture, (uintptr_t stream, uintptr_t* graph), say("end %d\n", (int)stream);
     if (!status) *graph = 88, ++graphs;)
CALL(cuStreamIsCapturing, (uintptr_t stream, int* answer), (void)stream; *answer = capturing;)
CALL(cuGraphInstantiateWithFlags, (uintptr_t* replay, uintptr_t graph, unsigned long long flags),
     say("instantiate %d %d\n", (int)graph, (int)flags); if (!status) *replay = 990 + ++replays;)
CALL(cuGraphDestroy, (uintptr_t graph), say("destroy %d\n", (int)graph); --graphs;)
CALL(cuGraphExecDestroy, (uintptr_t replay), say("destroy replay\n"); (void)replay; --replays;)
CALL(cuMemsetD8Async, (uint64_t address, unsigned char value, size_t size, void* stream),
     say("clear %llx %d %zu %llx\n", (unsigned long long)address, value, size, (unsigned long long)(uintptr_t)stream);)

int cuTensorMapEncodeTiled(uint64_t* map, int type, unsigned rank, uint64_t address, const uint64_t* sizes,
                           const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                           int swizzle, int promotion, int fill) {
    pthread_mutex_lock(&mutex);
    const int status = (uintptr_t)map % 64 ? 1 : status_of(__func__);
    pthread_mutex_unlock(&mutex);
    const uint64_t words[16] = {address, type, rank, sizes[0], sizes[1], sizes[2], sizes[3], strides[0], strides[1],
                                strides[2], box[0] << 16 | box[1], box[2] << 16 | box[3], steps[0] << 16 | steps[1],
                                steps[2] << 16 | steps[3], interleave << 16 | swizzle, promotion << 16 | fill};
    if (!status) memcpy(map, words, sizeof words);
    return status;
}

int cuLaunchKernelEx(const config_t* config, void* function, void** params, void** extra) {
    const unsigned* s = config->grid;
    pthread_mutex_lock(&mutex);
    const int status = extra || (config->count && !config->attributes) ? 1 : status_of(__func__);
    say("launch %llx (%u, %u, %u) (%u, %u, %u) %u %llx", (unsigned long long)(uintptr_t)function, s[0], s[1], s[2], s[3],
        s[4], s[5], config->shared, (unsigned long long)(uintptr_t)config->stream);
    for (unsigned i = 0; i < config->count; ++i) say(" %u=%d", config->attributes[i].id, config->attributes[i].value);
    say(" ");
    for (unsigned i = 0; i < ((uintptr_t)function & 0xffff); ++i) say("%02x", ((const unsigned char*)params[0])[i]);
    say("\n");
    ++launched;
    if (++together > most_together) most_together = together;
    pthread_mutex_unlock(&mutex);
    if (quiet > 1) {  /* wait a little, for another thread to be here too */
        const struct timespec little = {0, 1000000};
        nanosleep(&little, NULL);
    }
    pthread_mutex_lock(&mutex);
    --together;
    pthread_mutex_unlock(&mutex);
    return status;
}

int cuGraphLaunch(uintptr_t replay, uintptr_t stream) {
    pthread_mutex_lock(&mutex);
    const int status = status_of(__func__);
    say("replay %d %d\n", (int)replay, (int)stream);
    if (++together > most_together) most_together = together;
    pthread_mutex_unlock(&mutex);
    if (quiet > 1) {
        const struct timespec little = {0, 1000000};
        nanosleep(&little, NULL);
    }
    pthread_mutex_lock(&mutex);
    --together;
    pthread_mutex_unlock(&mutex);
    return status;
}

int fake_math_mode(void* handle, int mode) {
    say("mode %llx %d\n", (unsigned long long)(uintptr_t)handle, mode);
    return status_of(__func__);
}

int fake_gemm(void* handle, int transposed_a, int transposed_b, int m, int n, int k, const void* alpha, uint64_t a,
              int a_type, int a_leading, long long a_stride, uint64_t b, int b_type, int b_leading, long long b_stride,
              const void* beta, uint64_t c, int c_type, int c_leading, long long c_stride, int batch, int compute,
              int algorithm) {
    const int wide = compute == 70;
    const double one = wide ? *(const double*)alpha : *(const float*)alpha;
    const double other = wide ? *(const double*)beta : *(const float*)beta;
    say("gemm %llx %d %d %d %d %d %g %llx %d %d %lld %llx %d %d %lld %g %llx %d %d %lld %d %d %d\n",
        (unsigned long long)(uintptr_t)handle, transposed_a, transposed_b, m, n, k, one, (unsigned long long)a, a_type,
        a_leading, a_stride, (unsigned long long)b, b_type, b_leading, b_stride, other, (unsigned long long)c, c_type,
        c_leading, c_stride, batch, compute, algorithm);
    return status_of(__func__);
}
