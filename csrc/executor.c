/* Runs the steps of a call: launches, products of cuBLAS, memory that is cleared. See gemmconv/runtime/executor.py.
 *
 *   program = Program(device, (gemm, set_math_mode), alignments, steps)
 *   program.run(stream, blas_handle, address, ...) -> 0, or 1 + the index of an address that is not aligned
 *   call = Call(program, exchange, index, allocate, outputs, operands, scratch, (device_of, blas_of), otherwise)
 *   call.run(tensor or None, ...) -> the outputs
 *
 * A call allocates outputs and scratch memory, takes all addresses and runs the program: the host time of a small layer.
 * If the device is not current or a tensor is not aligned, ``otherwise`` takes over before anything is enqueued.
 * A call with the addresses of an earlier one, usual in training steps with cached memory, is one launch of a graph.
 *
 * A program is made once and not changed afterwards, so any number of threads may run it. Params are copied to the
 * stack, pointers and tensor maps put into them, and the interpreter's lock is not held while the driver works.
 *
 * It takes Python's limited API, so that one build serves Python 3.10 and later, and needs neither torch nor CUDA's
 * headers: the driver's functions are declared below, equal to cuda.h, and found in libcuda when first needed.
 *
 * A launch takes the host 7 us in a training step, a product of cuBLAS 12 to 31, a graph of any number of launches 13 to
 * 17 (H100, driver 580), an allocation 3 to 5, all else here 1 or 2. Launches that overlap take no longer than others; a
 * CUfunction in place of a CUkernel, and keeping the lock, gained nothing.
 */
#include "extension.h"

#include <dlfcn.h>
#include <string.h>

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
#define LISTED(name, text, ...) {(void**)&cuda.name, text},
static struct { DRIVER_FUNCTIONS(DECLARED) } cuda;  /* add_edges is NULL before CUDA 12.3 */
enum { kRelaxed = 2 };

static int load_driver(void) {
    static const struct { void** function; const char* name; } functions[] = {DRIVER_FUNCTIONS(LISTED)};
    const int count = sizeof functions / sizeof functions[0];
    if (cuda.launch) return 0;  /* the last that is set */
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return RAISE(PyExc_RuntimeError, "the CUDA driver could not be loaded: %s", dlerror());
    for (int i = 0; i < count; ++i) {
        void* function = dlsym(library, functions[i].name);
        if (!function && functions[i].function != (void**)&cuda.add_edges)
            return RAISE(PyExc_RuntimeError, "the CUDA driver has no %s; update it", functions[i].name);
        memcpy(functions[i].function, &function, sizeof function);
    }
    return 0;
}

static const char* name_of(status_t status) {
    const char* name = NULL;
    return cuda.get_error_name && cuda.get_error_name(status, &name) == 0 && name ? name : "an unknown status";
}

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
static failure_t fill_params(const step_t* step, const uint64_t* addresses, unsigned char* params) {
    const launch_t* one = &step->of.launch;
    memcpy(params, one->params, one->size);
    for (unsigned i = 0; i < one->pointer_count; ++i) {
        const pointer_t* pointer = &one->pointers[i];
        const uint64_t base = addresses[pointer->place.index];
        const uint64_t address = base ? base + pointer->place.offset : 0;  /* null: a bias that is not there */
        memcpy(params + pointer->at, &address, sizeof address);
    }
    for (unsigned i = 0; i < one->map_count; ++i) {
        const map_t* map = &one->maps[i];
        void* address = (void*)(uintptr_t)(addresses[map->place.index] + map->place.offset);
        const status_t status = cuda.encode(params + map->at, map->type, 4, address, map->sizes, map->strides, map->box,
                                            map->steps, 0, map->swizzle, map->promotion, 0);
        if (status) return (failure_t){"a tensor map was refused", step, status, 0};
    }
    return (failure_t){0};
}

static failure_t run_launch(const step_t* step, void* stream, const uint64_t* addresses) {
    const launch_t* one = &step->of.launch;
    _Alignas(64) unsigned char params[kMostParams];
    const failure_t failure = fill_params(step, addresses, params);
    if (failure.status) return failure;
    launch_attribute_t overlapping = {.id = kProgrammaticStreamSerialization, .value.value = 1};
    const unsigned* shape = one->shape;
    const launch_config_t config = {{shape[0], shape[1], shape[2]}, {shape[3], shape[4], shape[5]}, shape[6], stream,
                                    &overlapping, shape[7] != 0};
    void* arguments[1] = {params};
    return (failure_t){"launch failed", step, cuda.launch(&config, one->function, arguments, NULL), 0};
}

static failure_t run_product(const program_t* program, const step_t* step, void* blas, const uint64_t* addresses) {
    const product_t* p = &step->of.product;
    const matrices_t* of[3] = {&p->a, &p->b, &p->c};
    void* at[3];
    for (int i = 0; i < 3; ++i) at[i] = (void*)(uintptr_t)(addresses[of[i]->place.index] + of[i]->place.offset);
    return (failure_t){
        "cublasGemmStridedBatchedEx failed", step,
        program->gemm(blas, p->transposed_a, p->transposed_b, p->m, p->n, p->k, &p->alpha, at[0], p->a.type,
                      p->a.leading, p->a.stride, at[1], p->b.type, p->b.leading, p->b.stride, &p->beta, at[2],
                      p->c.type, p->c.leading, p->c.stride, p->batch, p->compute, kDefaultAlgorithm), 1};
}

static failure_t run_steps(const program_t* program, void* stream, void* blas, const uint64_t* addresses) {
    failure_t failure = {0};
    if (blas && program->set_math_mode) {
        failure = (failure_t){"cublasSetMathMode failed", NULL,
                              program->set_math_mode(blas, kDisallowReducedPrecisionReduction), 1};
    }
    for (int i = 0; i < program->step_count && !failure.status; ++i) {
        const step_t* step = &program->steps[i];
        if (step->kind == kLaunch) {
            failure = run_launch(step, stream, addresses);
        } else if (step->kind == kProduct) {
            failure = run_product(program, step, blas, addresses);
        } else if (step->of.clear.size) {
            const clear_t* one = &step->of.clear;
            const uint64_t address = addresses[one->place.index] + one->place.offset;
            failure = (failure_t){"memory could not be cleared", step, cuda.clear(address, 0, one->size, stream), 0};
        }
    }
    return failure;
}

/* Runs the steps with the program's device current, and restores the device that was current before. */
static failure_t run_on_device(const program_t* program, void* stream, void* blas, const uint64_t* addresses) {
    context_t current = NULL, ours = NULL;
    status_t status = cuda.get_current(&current);
    if (!status && current == program->context) return run_steps(program, stream, blas, addresses);
    if (!status) status = cuda.push_current(program->context);
    if (status) return (failure_t){"the device could not be made current", NULL, status, 0};
    const failure_t failure = run_steps(program, stream, blas, addresses);
    status = cuda.pop_current(&ours);
    if (status && !failure.status) return (failure_t){"the device before could not be made current", NULL, status, 0};
    return failure;
}

static PyObject* raise_failure(failure_t failure) {
    const step_t* step = failure.step;
    if (failure.of_cublas)
        return PyErr_Format(PyExc_RuntimeError, "%s with cublasStatus_t %d", failure.call, failure.status);
    const char* name = name_of(failure.status);
    if (!step || step->kind == kClear) return PyErr_Format(PyExc_RuntimeError, "%s with %s", failure.call, name);
    const unsigned* s = step->of.launch.shape;
    return PyErr_Format(
        PyExc_RuntimeError, "%s: %s with %s; grid (%u, %u, %u), block (%u, %u, %u), %u bytes of shared memory",
        step->of.launch.name, failure.call, name, s[0], s[1], s[2], s[3], s[4], s[5], s[6]);
}

static int read_number(PyObject* from, uint64_t* number) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(from);
    *number = value;
    return value == (unsigned long long)-1 && PyErr_Occurred() ? -1 : 0;
}

/* 1 + the index of the first address that is not aligned, else 0. */
static int misaligned(const program_t* program, const uint64_t* addresses) {
    for (int i = 0; i < program->alignment_count; ++i)
        if (addresses[i] % program->alignments[i]) return i + 1;
    return 0;
}

static PyObject* program_run(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    const program_t* program = (const program_t*)self;
    uint64_t values[2 + kMostAddresses];
    if (count < 2 + program->address_count || count > 2 + kMostAddresses)
        return PyErr_Format(PyExc_TypeError, "run takes a stream, a cuBLAS handle and %d to %d addresses, got %zd values",
                            program->address_count, kMostAddresses, count);
    for (Py_ssize_t i = 0; i < count; ++i)
        if (read_number(arguments[i], &values[i])) return NULL;
    const uint64_t* addresses = values + 2;
    const int wrong = misaligned(program, addresses);
    if (wrong) return PyLong_FromLong(wrong);
    PyThreadState* state = PyEval_SaveThread();
    const failure_t failure = run_on_device(program, (void*)(uintptr_t)values[0], (void*)(uintptr_t)values[1], addresses);
    PyEval_RestoreThread(state);
    return failure.status ? raise_failure(failure) : PyLong_FromLong(0);
}

/* Construction. Any failure leaves a state that program_dealloc can free. Pointers and sizes are read as K: all have 64
 * bits, as the assertions above say. */

static void* zeroed(size_t count, size_t size) {
    void* memory = PyMem_Malloc(count * size + 1);
    if (!memory) return PyErr_NoMemory();
    return memset(memory, 0, count * size + 1);
}

/* Checks the index of a place, and counts it among the addresses that a call must give. */
static int add_place(program_t* program, place_t place) {
    if (place.index < 0 || place.index >= kMostAddresses)
        return RAISE(PyExc_ValueError, "at most %d addresses, got index %d", kMostAddresses, place.index);
    if (program->address_count <= place.index) program->address_count = place.index + 1;
    return 0;
}

static int read_pointer(pointer_t* pointer, PyObject* of) {
    return PyArg_ParseTuple(of, "iiK", &pointer->at, &pointer->place.index, &pointer->place.offset) ? 0 : -1;
}

static int read_map(map_t* map, PyObject* of) {
    uint64_t *size = map->sizes, *stride = map->strides;
    uint32_t *box = map->box, *step = map->steps;
    return PyArg_ParseTuple(of, "iiKiKKKKKKKiiiiiiiiii", &map->at, &map->place.index, &map->place.offset, &map->type,
                            &size[0], &size[1], &size[2], &size[3], &stride[0], &stride[1], &stride[2],
                            &box[0], &box[1], &box[2], &box[3], &step[0], &step[1], &step[2], &step[3],
                            &map->swizzle, &map->promotion) ? 0 : -1;
}

/* Name and params are borrowed from the step, which the program's arguments hold. */
static int read_launch(program_t* program, step_t* step, PyObject* of) {
    launch_t* one = &step->of.launch;
    Py_ssize_t size;
    PyObject *pointers, *maps;
    unsigned* s = one->shape;
    if (!PyArg_ParseTuple(of, "iKs(iiiiiiii)y#O!O!", &step->kind, &one->function, &one->name, &s[0], &s[1], &s[2],
                          &s[3], &s[4], &s[5], &s[6], &s[7], &one->params, &size, &PyTuple_Type, &pointers,
                          &PyTuple_Type, &maps))
        return -1;
    if (size > kMostParams)
        return RAISE(PyExc_ValueError, "%s: params must have at most %d bytes, got %zd", one->name, kMostParams, size);
    one->size = (unsigned)size;
    one->pointer_count = (unsigned)PyTuple_Size(pointers), one->map_count = (unsigned)PyTuple_Size(maps);
    if (!(one->pointers = zeroed(one->pointer_count, sizeof(pointer_t)))) return -1;
    if (!(one->maps = zeroed(one->map_count, sizeof(map_t)))) return -1;
    for (unsigned i = 0; i < one->pointer_count; ++i) {
        pointer_t* pointer = &one->pointers[i];
        if (read_pointer(pointer, PyTuple_GetItem(pointers, i)) || add_place(program, pointer->place)) return -1;
        if (pointer->at + sizeof(uint64_t) > one->size) return RAISE(PyExc_ValueError, "a pointer past params");
    }
    for (unsigned i = 0; i < one->map_count; ++i) {
        map_t* map = &one->maps[i];
        if (read_map(map, PyTuple_GetItem(maps, i)) || add_place(program, map->place)) return -1;
        if (map->at + (size_t)kMapBytes > one->size) return RAISE(PyExc_ValueError, "a tensor map past params");
    }
    return 0;
}

static int read_product(program_t* program, step_t* step, PyObject* of) {
    product_t* p = &step->of.product;
    matrices_t *a = &p->a, *b = &p->b, *c = &p->c;
    int is_double, accumulates;
    if (!PyArg_ParseTuple(of, "iiiiiiiKiiLiKiiLiKiiLiiii", &step->kind, &p->m, &p->n, &p->k, &p->transposed_a,
                          &p->transposed_b, &a->place.index, &a->place.offset, &a->type, &a->leading, &a->stride,
                          &b->place.index, &b->place.offset, &b->type, &b->leading, &b->stride,
                          &c->place.index, &c->place.offset, &c->type, &c->leading, &c->stride,
                          &p->batch, &p->compute, &is_double, &accumulates))
        return -1;
    if (!program->gemm || !program->set_math_mode)
        return RAISE(PyExc_ValueError, "products need cuBLAS's functions");
    if (is_double) p->alpha.d = 1, p->beta.d = accumulates;
    else p->alpha.f = 1, p->beta.f = (float)accumulates;
    return add_place(program, a->place) || add_place(program, b->place) || add_place(program, c->place) ? -1 : 0;
}

static int read_clear(program_t* program, step_t* step, PyObject* of) {
    clear_t* one = &step->of.clear;
    if (!PyArg_ParseTuple(of, "iiKK", &step->kind, &one->place.index, &one->place.offset, &one->size)) return -1;
    return add_place(program, one->place);
}

static int read_step(program_t* program, step_t* step, PyObject* of) {
    PyObject* kind = PyTuple_Check(of) && PyTuple_Size(of) ? PyTuple_GetItem(of, 0) : NULL;
    step->kind = kind ? (int)PyLong_AsLong(kind) : -1;
    if (PyErr_Occurred()) return -1;
    switch (step->kind) {
        case kLaunch: return read_launch(program, step, of);
        case kProduct: return read_product(program, step, of);
        case kClear: return read_clear(program, step, of);
    }
    return RAISE(PyExc_ValueError, "a step must be a tuple that begins with its kind, 0 to 2");
}

static int fill_program(PyObject* self) {
    program_t* program = (program_t*)self;
    int device;
    PyObject *alignments, *steps;
    if (!PyArg_ParseTuple(program->object.arguments, "i(KK)O!O!", &device, &program->gemm, &program->set_math_mode,
                          &PyTuple_Type, &alignments, &PyTuple_Type, &steps))
        return -1;
    const Py_ssize_t alignment_count = PyTuple_Size(alignments), step_count = PyTuple_Size(steps);
    if (alignment_count > kMostAddresses)
        return RAISE(PyExc_ValueError, "at most %d addresses, got %zd alignments", kMostAddresses, alignment_count);
    program->address_count = program->alignment_count = (int)alignment_count;
    for (int i = 0; i < program->alignment_count; ++i) {
        const unsigned long value = PyLong_AsUnsignedLong(PyTuple_GetItem(alignments, i));
        if (PyErr_Occurred()) return -1;
        if (value < 1 || value > kMostAlignment)
            return RAISE(PyExc_ValueError, "an alignment must be 1 to %d, got %lu", kMostAlignment, value);
        program->alignments[i] = (unsigned)value;
    }
    if (!(program->steps = zeroed((size_t)step_count, sizeof(step_t)))) return -1;
    while (program->step_count < step_count) {
        const int i = program->step_count++;
        if (read_step(program, &program->steps[i], PyTuple_GetItem(steps, i))) return -1;
    }
    if (load_driver()) return -1;
    PyThreadState* state = PyEval_SaveThread();  /* a context that is not there yet takes a while */
    status_t status = cuda.init(0);
    if (!status) status = cuda.device_get(&program->device, device);
    if (!status) status = cuda.primary_retain(&program->context, program->device);
    PyEval_RestoreThread(state);
    if (status) return RAISE(PyExc_RuntimeError, "device %d refused with %s", device, name_of(status));
    program->retained = 1;
    return 0;
}

static PyObject* program_new(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
    (void)keywords;
    return new_object(type, arguments, fill_program);
}

static void program_dealloc(PyObject* self) {
    program_t* program = (program_t*)self;
    for (int i = 0; i < program->step_count; ++i) {
        if (program->steps[i].kind != kLaunch) continue;
        PyMem_Free(program->steps[i].of.launch.pointers);
        PyMem_Free(program->steps[i].of.launch.maps);
    }
    PyMem_Free(program->steps);
    if (program->retained) cuda.primary_release(program->device);
    free_object(self);
}

/* Calls with tensors. */

/* The addresses of a call and, after more than kUsesBefore uses of them, the graph of its launches. When a call comes with
 * other addresses, it drops those unused for kYoung of its runs, or for kPatience if they have a graph. There are at most
 * kMostReplays graphs; the least recently used one makes room for a new one if it was idle for kIdle calls. */
enum { kReplays = 8, kUsesBefore = 2, kYoung = 64, kPatience = 256, kMostReplays = 256, kIdle = 4096, kAttempts = 4 };

typedef struct {
    uint64_t addresses[kMostAddresses];
    void* graph;
    unsigned uses;
    unsigned long long last;  /* of the call's runs, the one that had them last */
    unsigned long long used;  /* of all runs, the last by the graph */
    int busy;  /* a thread is launching or making it: no other may do that, or drop it */
} replay_t;

/* Replays of all calls. The interpreter's lock protects them, and the functions below. */
static struct { replay_t* of[kMostReplays]; int count; unsigned long long runs; } replays;

typedef struct {
    object_t object;  /* all objects below are borrowed from its arguments */
    program_t* program;
    const exchange_t* exchange;
    int index;  /* torch's, of the program's device */
    const unsigned char* operands;  /* which tensor of the call each of them is */
    Py_ssize_t output_count, operand_count;
    Py_ssize_t count;  /* of addresses: outputs, operands and, if there is any, scratch memory */
    Py_ssize_t tensor_count;  /* as many as operands name at least */
    PyObject *allocate, *outputs, *scratch;  /* a function, tuples of its arguments, one of them or None */
    PyObject *device_of, *blas_of;  /* functions: torch's current device, and its cuBLAS handle, or None */
    PyObject* otherwise;
    int replayable;  /* several steps, of which none is cuBLAS's: that has memory for each stream */
    int attempts;  /* to make a graph, before no other is made */
    unsigned long long runs;
    replay_t replays[kReplays];
} call_t;

enum { kCuda = 2 };  /* DLPack's */

static PyObject* program_type;

/* The integer that a function of torch's returns. */
static int ask(PyObject* function, uint64_t* number) {
    PyObject* value = PyObject_CallFunctionObjArgs(function, NULL);
    const int failed = !value || read_number(value, number);
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

/* Raises after a failed function of DLPack's, unless that has set an error itself. */
static int refused(const char* what) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, what);
    return -1;
}

static int address_of(const call_t* call, PyObject* object, uint64_t* address) {
    tensor_t tensor;
    if (call->exchange->tensor_of(object, &tensor)) return refused("a tensor could not be read");
    *address = (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset;
    return 0;
}

static PyObject* tuple_of(PyObject* const* objects, Py_ssize_t count) {
    PyObject* tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; ++i) PyTuple_SetItem(tuple, i, Py_NewRef(objects[i]));
    return tuple;
}

/* Empties a slot; the caller has to destroy the graph that it returns. */
static void* forget(replay_t* one) {
    void* graph = one->graph;
    for (int i = 0; i < replays.count; ++i)
        if (replays.of[i] == one) replays.of[i--] = replays.of[--replays.count];
    *one = (replay_t){.busy = one->busy};
    return graph;
}

/* Destroys a graph, or none, in relaxed mode, which other threads' captures allow and which leaves them unaffected. */
static void destroy_graph(void* graph) {
    int mode = kRelaxed;
    if (!graph || cuda.exchange_capture_mode(&mode)) return;  /* it could spoil a capture: rather a leak */
    cuda.replay_destroy(graph);
    cuda.exchange_capture_mode(&mode);
}

/* Makes room for one more graph; ``stale`` gets the graph that is dropped for it. */
static int make_room(void** stale) {
    if (replays.count < kMostReplays) return 1;
    replay_t* oldest = NULL;
    for (int i = 0; i < replays.count; ++i)
        if (!replays.of[i]->busy && (!oldest || replays.of[i]->used < oldest->used)) oldest = replays.of[i];
    if (!oldest || replays.runs - oldest->used < kIdle) return 0;
    *stale = forget(oldest);
    return 1;
}

/* The replay of a call with these addresses, marked busy; NULL if the call has to run step by step. */
static replay_t* replay_of(call_t* call, const uint64_t* addresses, void** stale) {
    const size_t size = (size_t)call->count * sizeof *addresses;
    replay_t* oldest = NULL;
    ++call->runs, ++replays.runs;
    for (int i = 0; i < kReplays; ++i) {
        replay_t* one = &call->replays[i];
        if (one->uses && memcmp(one->addresses, addresses, size) == 0) {
            one->last = call->runs;
            if (one->busy) return NULL;
            if (!one->graph && (++one->uses <= kUsesBefore || !call->attempts || !make_room(stale))) return NULL;
            if (!one->graph) replays.of[replays.count++] = one;
            one->used = replays.runs;
            one->busy = 1;
            return one;
        }
        if (one->busy || (one->uses && call->runs - one->last < (one->graph ? kPatience : kYoung))) continue;
        if (!oldest || one->last < oldest->last) oldest = one;
    }
    if (oldest) {
        *stale = forget(oldest);
        oldest->uses = 1, oldest->last = call->runs;
        memcpy(oldest->addresses, addresses, size);
    }
    return NULL;
}

typedef struct { void* node; int is_kernel; } before_t;  /* the last node of a graph */

static status_t add_step(const program_t* program, const step_t* step, const uint64_t* addresses, void* graph,
                         before_t* before) {
    void* node = NULL;
    const size_t after = before->node != NULL;
    status_t status = 0;
    if (step->kind == kClear) {
        const clear_t* one = &step->of.clear;
        const clear_node_t clear = {addresses[one->place.index] + one->place.offset, 0, 0, 1, one->size, 1};
        if (!one->size) return 0;
        status = cuda.add_clear(&node, graph, &before->node, after, &clear, program->context);
    } else {
        _Alignas(64) unsigned char params[kMostParams];
        const failure_t failure = fill_params(step, addresses, params);
        const launch_t* one = &step->of.launch;
        const unsigned* s = one->shape;
        void* arguments[1] = {params};
        const kernel_node_t kernel = {NULL, {s[0], s[1], s[2]}, {s[3], s[4], s[5]}, s[6], arguments, NULL,
                                      one->function, program->context};
        const edge_t overlapping = {kProgrammatic, 0, kProgrammatic, {0}};
        const int early = s[7] && before->is_kernel && cuda.add_edges;
        if (failure.status) return failure.status;
        status = cuda.add_kernel(&node, graph, &before->node, early ? 0 : after, &kernel);
        if (!status && early) status = cuda.add_edges(graph, &before->node, &node, &overlapping, 1);
    }
    *before = (before_t){node, step->kind == kLaunch};
    return status;
}

/* The graph of a program's steps in sequence; NULL if it cannot be made. It is built without capturing a stream: during a
 * capture other threads could not wait for the device. */
static void* make_graph(const program_t* program, const uint64_t* addresses) {
    void *graph = NULL, *ready = NULL;
    before_t before = {NULL, 0};
    status_t status = cuda.graph_create(&graph, 0);
    for (int i = 0; i < program->step_count && !status; ++i)
        status = add_step(program, &program->steps[i], addresses, graph, &before);
    if (!status) status = cuda.instantiate(&ready, graph, 0);
    if (graph) cuda.graph_destroy(graph);
    return status ? NULL : ready;
}

/* Whether a graph may be launched on a stream: not during its capture, nor if it is limited to a part of the device. */
static int takes_graphs(const program_t* program, void* stream) {
    int capturing = 0;
    context_t context = NULL;
    return !cuda.is_capturing(stream, &capturing) && !capturing && !cuda.context_of_stream(stream, &context) &&
           context == program->context;
}

/* Enqueues a call's steps, by a graph if its addresses are known. */
static int enqueue(call_t* call, const uint64_t* addresses, void* stream, void* blas) {
    const program_t* program = call->program;
    void *graph = NULL, *stale = NULL;
    replay_t* replay = NULL;
    if (call->replayable && takes_graphs(program, stream)) replay = replay_of(call, addresses, &stale);
    if (replay) graph = replay->graph;
    const int is_new = replay && !graph;
    int replayed = 0;
    failure_t failure = {0};
    PyThreadState* state = PyEval_SaveThread();
    int mode = kRelaxed;
    const int relaxed = is_new && cuda.exchange_capture_mode(&mode) == 0;  /* what is new may take memory */
    if (relaxed) graph = make_graph(program, addresses);
    if (graph) replayed = cuda.replay(graph, stream) == 0;
    if (relaxed) cuda.exchange_capture_mode(&mode);
    if (!replayed) failure = run_steps(program, stream, blas, addresses);  /* which says what is wrong */
    destroy_graph(stale);
    if (!replayed) destroy_graph(graph);
    PyEval_RestoreThread(state);
    if (replay) {
        replay->busy = 0;
        if (!replayed) forget(replay), call->attempts -= call->attempts > 0;
        else replay->graph = graph;
    }
    if (failure.status) raise_failure(failure);
    return failure.status ? -1 : 0;
}

/* Allocates, takes addresses and enqueues; ``made`` gets outputs and scratch memory. Returns 1 if the fallback must run. */
static int run_call(call_t* call, PyObject* const* tensors, PyObject** made) {
    const program_t* program = call->program;
    const Py_ssize_t outputs = call->output_count, operands = call->operand_count;
    uint64_t addresses[kMostAddresses] = {0}, device, blas = 0;
    context_t current = NULL;
    void* stream = NULL;
    if (ask(call->device_of, &device)) return -1;
    if (device != (uint64_t)call->index || cuda.get_current(&current) || current != program->context) return 1;
    for (Py_ssize_t i = 0; i < operands; ++i) {
        PyObject* tensor = tensors[call->operands[i]];
        if (tensor != Py_None && address_of(call, tensor, &addresses[outputs + i])) return -1;
    }
    if (misaligned(program, addresses)) return 1;  /* outputs may begin anywhere, and do at multiples of 256 */
    for (Py_ssize_t i = 0; i < outputs; ++i) {
        made[i] = PyObject_Call(call->allocate, PyTuple_GetItem(call->outputs, i), NULL);
        if (!made[i] || address_of(call, made[i], &addresses[i])) return -1;
    }
    if (call->scratch != Py_None) {
        made[outputs] = PyObject_Call(call->allocate, call->scratch, NULL);
        if (!made[outputs] || address_of(call, made[outputs], &addresses[outputs + operands])) return -1;
    }
    if (call->exchange->current_stream(kCuda, call->index, &stream)) return refused("torch named no stream");
    if (call->blas_of != Py_None && ask(call->blas_of, &blas)) return -1;
    return enqueue(call, addresses, stream, (void*)(uintptr_t)blas);
}

static PyObject* call_run(PyObject* self, PyObject* const* tensors, Py_ssize_t count) {
    call_t* call = (call_t*)self;
    if (count < call->tensor_count)
        return PyErr_Format(PyExc_TypeError, "run takes %zd tensors or None, got %zd", call->tensor_count, count);
    PyObject *made[kMostAddresses] = {NULL}, *result = NULL;
    const int status = run_call(call, tensors, made);
    if (status == 0) result = call->output_count == 1 ? Py_NewRef(made[0]) : tuple_of(made, call->output_count);
    for (Py_ssize_t i = 0; i <= call->output_count; ++i) Py_XDECREF(made[i]);
    if (status != 1) return result;
    PyObject* arguments = tuple_of(tensors, count);
    result = arguments ? PyObject_Call(call->otherwise, arguments, NULL) : NULL;
    Py_XDECREF(arguments);
    return result;
}

static PyObject* count_replays(PyObject* module, PyObject* nothing) {
    (void)module, (void)nothing;
    return PyLong_FromLong(replays.count);
}

static PyObject* takes(PyObject* module, PyObject* capsule) {
    (void)module;
    const exchange_t* exchange = exchange_of(capsule);
    PyErr_Clear();
    return Py_NewRef(exchange ? Py_True : Py_False);
}

static int fill_call(PyObject* self) {
    call_t* call = (call_t*)self;
    PyObject* capsule;
    if (!PyArg_ParseTuple(call->object.arguments, "O!OiOO!y#O(OO)O", program_type, &call->program, &capsule,
                          &call->index, &call->allocate, &PyTuple_Type, &call->outputs, &call->operands,
                          &call->operand_count, &call->scratch, &call->device_of, &call->blas_of, &call->otherwise))
        return -1;
    if (!(call->exchange = exchange_of(capsule))) return -1;
    const program_t* program = call->program;
    call->output_count = PyTuple_Size(call->outputs);
    call->count = call->output_count + call->operand_count + (call->scratch != Py_None);
    if (call->count < program->address_count || call->count >= kMostAddresses)
        return RAISE(PyExc_ValueError, "outputs, operands and scratch memory must be %d to %d, got %zd",
                     program->address_count, kMostAddresses - 1, call->count);
    for (Py_ssize_t i = 0; i < call->operand_count; ++i)
        if (call->tensor_count <= call->operands[i]) call->tensor_count = call->operands[i] + 1;
    call->attempts = kAttempts;
    call->replayable = program->step_count > 1;
    for (int i = 0; i < program->step_count; ++i) call->replayable &= program->steps[i].kind != kProduct;
    return 0;
}

static PyObject* call_new(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
    (void)keywords;
    return new_object(type, arguments, fill_call);
}

static void call_dealloc(PyObject* self) {
    call_t* call = (call_t*)self;
    for (int i = 0; i < kReplays; ++i) {
        void* graph = forget(&call->replays[i]);
        if (!graph) continue;
        PyThreadState* state = PyEval_SaveThread();  /* what the driver waits for may want it */
        destroy_graph(graph);
        PyEval_RestoreThread(state);
    }
    free_object(self);
}

static PyMethodDef program_methods[] = {
    {"run", (PyCFunction)(void (*)(void))program_run, METH_FASTCALL,
     "Enqueue the steps on a stream, with a cuBLAS handle (or 0), for these addresses."},
    {NULL, NULL, 0, NULL}};
static PyMethodDef call_methods[] = {
    {"run", (PyCFunction)(void (*)(void))call_run, METH_FASTCALL, "The program's outputs for these tensors."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot program_slots[] = {
    {Py_tp_new, program_new}, {Py_tp_dealloc, program_dealloc}, {Py_tp_methods, program_methods}, {0, NULL}};
static PyType_Slot call_slots[] = {
    {Py_tp_new, call_new}, {Py_tp_dealloc, call_dealloc}, {Py_tp_methods, call_methods}, {0, NULL}};
static PyType_Spec program_spec = {
    "gemmconv._extension.Program", sizeof(program_t), 0, Py_TPFLAGS_DEFAULT, program_slots};
static PyType_Spec call_spec = {"gemmconv._extension.Call", sizeof(call_t), 0, Py_TPFLAGS_DEFAULT, call_slots};

PyObject* make_signatures_type(void);  /* of signature.c */

static int add_types(PyObject* module) {
    if (!program_type && !(program_type = PyType_FromSpec(&program_spec))) return -1;
    PyObject* call_type = PyType_FromSpec(&call_spec);
    PyObject* signatures_type = call_type ? make_signatures_type() : NULL;
    const int failed = !signatures_type || PyModule_AddObjectRef(module, "Program", program_type) ||
                       PyModule_AddObjectRef(module, "Call", call_type) ||
                       PyModule_AddObjectRef(module, "Signatures", signatures_type);
    Py_XDECREF(call_type);
    Py_XDECREF(signatures_type);
    return failed ? -1 : 0;
}

static PyMethodDef functions[] = {
    {"takes", takes, METH_O, "Whether tensors can be read by these functions of DLPack's."},
    {"replays", count_replays, METH_NOARGS, "How many graphs there are of calls that came with the same addresses again."},
    {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, add_types}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_extension", NULL, 0, functions, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__extension(void) { return PyModuleDef_Init(&definition); }
