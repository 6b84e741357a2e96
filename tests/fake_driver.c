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

typedef struct {
    void* function;
    unsigned grid[3], block[3], shared;
    void **params, **more;
    uintptr_t kernel, context;
} kernel_node_t;
typedef struct { uint64_t address; size_t pitch; unsigned value, unit; size_t width, height; } clear_node_t;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char text[1 << 20], failing[64];
static size_t length;
static int failing_with, quiet;
static _Thread_local uintptr_t contexts[8];
static _Thread_local int depth;
/* Counts, and the stream that was asked about last, which the tests read. */
long calls_with_lock, contexts_retained, contexts_pushed, kernels_launched, most_at_once;
long graphs_there, replays_there, replays_in_flight, graphs_at_once, asked_of_stream;
static long together;
static int capturing, loose, after_kernel, newest_is_kernel, there[512];
static volatile int held;
static uintptr_t nodes, stream_context;
static char written[4096], texts[512][4096];
static _Thread_local int capture_mode;  /* global, as a thread begins with */

/* For the tests. */
const char* said(void) { return text; }
void forget(void) {
    pthread_mutex_lock(&mutex);
    length = 0, text[0] = 0;
    pthread_mutex_unlock(&mutex);
}
void be_quiet(int whether) { quiet = whether; }
void fail(const char* function, int status) { snprintf(failing, sizeof failing, "%s", function), failing_with = status; }
void set_context(uintptr_t context) { contexts[0] = context, depth = context != 0; }
uintptr_t context(void) { return depth ? contexts[depth - 1] : 0; }
void hold_replays(int whether) { held = whether; }
int mode_of_capture(void) { return capture_mode; }
void set_stream_context(uintptr_t context) { stream_context = context; }
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
    calls_with_lock += has_lock && has_lock();
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
     if (!status) *context = 1000 + device, ++contexts_retained;)
CALL(cuDevicePrimaryCtxRelease_v2, (int device), say("release %d\n", device); --contexts_retained;)
CALL(cuCtxGetCurrent, (uintptr_t* current), *current = context();)
CALL(cuCtxPushCurrent_v2, (uintptr_t context), say("push %d\n", (int)context);
     if (!status) contexts[depth++] = context, ++contexts_pushed;)
CALL(cuCtxPopCurrent_v2, (uintptr_t* context), say("pop\n"); *context = contexts[--depth]; --contexts_pushed;)
CALL(cuThreadExchangeStreamCaptureMode, (int* mode), if (!status) { int other = *mode; *mode = capture_mode, capture_mode = other; })
CALL(cuStreamIsCapturing, (uintptr_t stream, int* answer), asked_of_stream = (long)stream; *answer = capturing;)
CALL(cuStreamGetCtx, (uintptr_t stream, uintptr_t* of), (void)stream; *of = stream_context ? stream_context : context();)
CALL(cuGraphCreate, (uintptr_t* graph, unsigned flags), (void)flags; if (!status) *graph = 88, ++graphs_there, nodes = 0, written[0] = 0, newest_is_kernel = 0;)
CALL(cuGraphDestroy, (uintptr_t graph), (void)graph; --graphs_there;)
CALL(cuGraphExecDestroy, (uintptr_t replay), say("forget %d %d\n", (int)replay, capture_mode); there[replay - 991] = 0; --replays_there;)

/* Nodes follow each other; what they would do is written down, for when their graph is kernels_launched. */
static int add_node(int status, uintptr_t* node, const uintptr_t* before, size_t count, const char* format, ...) {
    const size_t length = strlen(written);
    va_list values;
    if (status) return status;
    if (count > 1 || (count && before[0] != 5000 + nodes)) return 1;
    loose = nodes && !count;  /* an edge has to follow */
    after_kernel = newest_is_kernel, newest_is_kernel = format[0] == 'l';
    *node = 5000 + ++nodes;
    va_start(values, format);
    vsnprintf(written + length, sizeof written - length, format, values);
    va_end(values);
    return 0;
}

int cuGraphAddKernelNode_v2(uintptr_t* node, uintptr_t graph, const uintptr_t* before, size_t count, const kernel_node_t* of) {
    const unsigned* s = of->grid;
    char params[8193] = "";
    pthread_mutex_lock(&mutex);
    const uintptr_t kernel = of->kernel;
    for (unsigned i = 0; i < (kernel & 0xffff); ++i) sprintf(params + 2 * i, "%02x", ((const unsigned char*)of->params[0])[i]);
    const int status = add_node(of->function || of->more || graph != 88 ? 1 : status_of(__func__), node, before, count,
                                "launch %llx (%u, %u, %u) (%u, %u, %u) %u %%llx in %d %s\n", (unsigned long long)kernel,
                                s[0], s[1], s[2], s[3], s[4], s[5], of->shared, (int)of->context, params);
    pthread_mutex_unlock(&mutex);
    return status;
}

int cuGraphAddMemsetNode(uintptr_t* node, uintptr_t graph, const uintptr_t* before, size_t count, const clear_node_t* of,
                         uintptr_t in) {
    pthread_mutex_lock(&mutex);
    const int status = add_node(graph != 88 || of->unit != 1 || of->height != 1 ? 1 : status_of(__func__), node, before,
                                count, "clear %llx %u %zu %%llx in %d\n", (unsigned long long)of->address, of->value,
                                of->width, (int)in);
    pthread_mutex_unlock(&mutex);
    return status;
}

int cuGraphAddDependencies_v2(uintptr_t graph, const uintptr_t* from, const uintptr_t* to, const unsigned char* edge, size_t count) {
    pthread_mutex_lock(&mutex);
    int status = status_of(__func__);
    if (graph != 88 || count != 1 || from[0] + 1 != to[0] || to[0] != 5000 + nodes || !loose || !after_kernel) status = 1;
    if (edge[0] != 1 || edge[1] || edge[2] != 1) status = 1;
    loose = 0;
    strcat(written, "early\n");
    pthread_mutex_unlock(&mutex);
    return status;
}

int cuGraphInstantiateWithFlags(uintptr_t* replay, uintptr_t graph, unsigned long long flags) {
    pthread_mutex_lock(&mutex);
    int status = status_of(__func__), free = 0;
    while (there[free]) ++free;
    *replay = 991 + free;  /* whatever the answer */
    if (graph != 88 || flags || loose || capture_mode != 2) status = 1;
    if (!status) {
        snprintf(texts[free], sizeof texts[free], "%s", written);
        there[free] = 1, ++replays_there;
        say("make %d\n", (int)*replay);
    }
    pthread_mutex_unlock(&mutex);
    return status;
}

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
    ++kernels_launched;
    if (++together > most_at_once) most_at_once = together;
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
    int status = status_of(__func__);
    if (!there[replay - 991]) status = 1;
    say("replay %d\n", (int)replay);
    const unsigned long long on = stream;  /* of four nodes at most */
    if (!status) say(texts[replay - 991], on, on, on, on);
    if (replays_in_flight++) ++graphs_at_once;
    pthread_mutex_unlock(&mutex);
    const struct timespec little = {0, 1000000};
    if (quiet > 1) nanosleep(&little, NULL);
    while (held) nanosleep(&little, NULL);
    pthread_mutex_lock(&mutex);
    --replays_in_flight;
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
