/* What executor.c and call.c share: the driver's functions, and programs of steps.
 *
 * CUDA's headers are not needed: the driver's functions are declared here, equal to cuda.h, and found in libcuda.
 */
#pragma once
#include "extension.h"

enum { kMostAddresses = 32, kMostAlignment = 1 << 20, kMostParams = 4096, kMapBytes = 128 };

/* The driver. */

typedef int status_t;
typedef void* context_t;
typedef struct { int id; union { uint64_t words[8]; int value; } value; } launch_attribute_t;
typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    launch_attribute_t* attributes;
    unsigned attribute_count;
} launch_config_t;
_Static_assert(sizeof(launch_attribute_t) == 72 && sizeof(launch_config_t) == 56, "as in cuda.h");
enum { kProgrammaticStreamSerialization = 6 };

typedef struct {
    void* function;  /* NULL: it is a kernel of a library */
    unsigned grid[3], block[3], shared_bytes;
    void **params, **more;
    void* kernel;
    context_t context;
} kernel_node_t;
typedef struct { uint64_t address; size_t pitch; unsigned value, unit; size_t width, height; } clear_node_t;
typedef struct { unsigned char from_port, to_port, type, reserved[5]; } edge_t;
_Static_assert(sizeof(kernel_node_t) == 72 && sizeof(clear_node_t) == 40 && sizeof(edge_t) == 8, "as in cuda.h");
enum { kProgrammatic = 1 };  /* port and type of an edge to a launch that may begin before the one before has ended */

/* The functions that are used: the name here, the driver's, and the types of arguments. */
#define DRIVER_FUNCTIONS(FUNCTION) \
    FUNCTION(init, "cuInit", unsigned) \
    FUNCTION(get_error_name, "cuGetErrorName", status_t, const char**) \
    FUNCTION(device_get, "cuDeviceGet", int*, int) \
    FUNCTION(primary_retain, "cuDevicePrimaryCtxRetain", context_t*, int) \
    FUNCTION(primary_release, "cuDevicePrimaryCtxRelease_v2", int) \
    FUNCTION(get_current, "cuCtxGetCurrent", context_t*) \
    FUNCTION(push_current, "cuCtxPushCurrent_v2", context_t) \
    FUNCTION(pop_current, "cuCtxPopCurrent_v2", context_t*) \
    FUNCTION(clear, "cuMemsetD8Async", uint64_t, unsigned char, size_t, void*) \
    FUNCTION(encode, "cuTensorMapEncodeTiled", void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, \
             const uint32_t*, const uint32_t*, int, int, int, int) \
    FUNCTION(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", int*) \
    FUNCTION(is_capturing, "cuStreamIsCapturing", void*, int*) \
    FUNCTION(context_of_stream, "cuStreamGetCtx", void*, context_t*) \
    FUNCTION(graph_create, "cuGraphCreate", void**, unsigned) \
    FUNCTION(graph_destroy, "cuGraphDestroy", void*) \
    FUNCTION(add_kernel, "cuGraphAddKernelNode_v2", void**, void*, void* const*, size_t, const kernel_node_t*) \
    FUNCTION(add_clear, "cuGraphAddMemsetNode", void**, void*, void* const*, size_t, const clear_node_t*, context_t) \
    FUNCTION(add_edges, "cuGraphAddDependencies_v2", void*, void* const*, void* const*, const edge_t*, size_t) \
    FUNCTION(instantiate, "cuGraphInstantiateWithFlags", void**, void*, unsigned long long) \
    FUNCTION(replay, "cuGraphLaunch", void*, void*) \
    FUNCTION(replay_destroy, "cuGraphExecDestroy", void*) \
    FUNCTION(launch, "cuLaunchKernelEx", const launch_config_t*, void*, void**, void**)

#define DECLARED(name, text, ...) status_t (*name)(__VA_ARGS__);
typedef struct { DRIVER_FUNCTIONS(DECLARED) } driver_t;
#undef DECLARED
extern driver_t cuda;  /* loaded with the first program; add_edges is NULL before CUDA 12.3 */
enum { kRelaxed = 2 };

/* Steps. */

typedef struct { int index; uint64_t offset; } place_t;  /* an address of the call, and bytes behind it */
typedef struct { unsigned at; place_t place; } pointer_t;
typedef struct {
    unsigned at;
    place_t place;
    int type, swizzle, promotion;
    uint64_t sizes[4], strides[3];
    uint32_t box[4], steps[4];
} map_t;
typedef struct {
    void* function;
    const char *name, *params;
    unsigned shape[8];  /* grid, block, shared bytes, whether it overlaps */
    unsigned size, pointer_count, map_count;
    pointer_t* pointers;
    map_t* maps;
} launch_t;
typedef struct { place_t place; int type, leading; long long stride; } matrices_t;
typedef struct {
    int m, n, k, transposed_a, transposed_b, batch, compute;
    matrices_t a, b, c;
    union { double d; float f; } alpha, beta;
} product_t;
typedef struct { place_t place; size_t size; } clear_t;
typedef struct { int kind; union { launch_t launch; product_t product; clear_t clear; } of; } step_t;
enum { kLaunch = 0, kProduct = 1, kClear = 2 };

typedef int (*gemm_t)(void*, int, int, int, int, int, const void*, const void*, int, int, long long, const void*, int,
                      int, long long, const void*, void*, int, int, long long, int, int, int);
typedef int (*set_math_mode_t)(void*, int);
enum { kDisallowReducedPrecisionReduction = 16, kDefaultAlgorithm = -1 };

typedef struct {
    object_t object;
    int device, retained;
    context_t context;
    gemm_t gemm;
    set_math_mode_t set_math_mode;
    int alignment_count, step_count;
    int address_count;  /* the least that a call must give: all that are aligned, and all that steps name */
    unsigned alignments[kMostAddresses];
    step_t* steps;
} program_t;

/* An error that was found without the interpreter's lock, to be raised once it is held. */
typedef struct { const char* call; const step_t* step; int status, of_cublas; } failure_t;

/* The params of a launch, in memory that is aligned to 64. */
failure_t fill_params(const step_t* step, const uint64_t* addresses, unsigned char* params);

/* Enqueues all steps; the program's device is current. */
failure_t run_steps(const program_t* program, void* stream, void* blas, const uint64_t* addresses);

/* Raises the error; NULL. */
PyObject* raise_failure(failure_t failure);

/* 1 + the index of the first address that is not aligned, else 0. */
int misaligned(const program_t* program, const uint64_t* addresses);

int read_number(PyObject* from, uint64_t* number);

extern PyObject* program_type;

/* What call.c and signature.c add to the module. */
PyObject* make_call_type(void);
PyObject* count_replays(PyObject* module, PyObject* nothing);
PyObject* make_signatures_type(void);
