/* Runs the steps of a call: launches, products of cuBLAS, memory that is cleared. See gemmconv/runtime/executor.py.
 *
 *   program = Program(device, (gemm, set_math_mode), alignments, steps)
 *   program.run(stream, blas_handle, address, ...) -> 0, or 1 + the index of an address that is not aligned
 *
 * A program is made once and not changed afterwards, so any number of threads may run it. Params are copied to the
 * stack, pointers and tensor maps put into them, and the interpreter's lock is not held while the driver works.
 *
 * It takes Python's limited API, so that one build serves Python 3.10 and later, and needs neither torch nor CUDA's
 * headers.
 *
 * A launch takes the host 7 us in a training step, a product of cuBLAS 12 to 31, all else here 1 or 2 (H100, driver 580).
 * Launches that overlap take no longer than others; a CUfunction in place of a CUkernel, and keeping the lock, gained
 * nothing.
 */
#include "executor.h"

#include <dlfcn.h>
#include <string.h>

driver_t cuda;
PyObject* program_type;

static int load_driver(void) {
#define LISTED(name, text, ...) {(void**)&cuda.name, text},
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

failure_t fill_params(const step_t* step, const uint64_t* addresses, unsigned char* params) {
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

failure_t run_steps(const program_t* program, void* stream, void* blas, const uint64_t* addresses) {
    failure_t failure = {0};
    if (blas && program->set_math_mode)
        failure = (failure_t){"cublasSetMathMode failed", NULL,
                              program->set_math_mode(blas, kDisallowReducedPrecisionReduction), 1};
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

PyObject* raise_failure(failure_t failure) {
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

int read_number(PyObject* from, uint64_t* number) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(from);
    *number = value;
    return value == (unsigned long long)-1 && PyErr_Occurred() ? -1 : 0;
}

int misaligned(const program_t* program, const uint64_t* addresses) {
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
    void* memory = PyMem_Calloc(count, size);
    return memory ? memory : PyErr_NoMemory();
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

/* The module. */

static PyObject* takes(PyObject* module, PyObject* capsule) {
    (void)module;
    const exchange_t* exchange = exchange_of(capsule);
    PyErr_Clear();
    return Py_NewRef(exchange ? Py_True : Py_False);
}

static PyMethodDef program_methods[] = {
    {"run", (PyCFunction)(void (*)(void))program_run, METH_FASTCALL,
     "Enqueue the steps on a stream, with a cuBLAS handle (or 0), for these addresses."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot program_slots[] = {
    {Py_tp_new, program_new}, {Py_tp_dealloc, program_dealloc}, {Py_tp_methods, program_methods}, {0, NULL}};
static PyType_Spec program_spec = {
    "gemmconv._extension.Program", sizeof(program_t), 0, Py_TPFLAGS_DEFAULT, program_slots};

/* Takes the reference of a type, or NULL after an error. */
static int add_type(PyObject* module, PyObject* type) {
    const int status = type ? PyModule_AddType(module, (PyTypeObject*)type) : -1;
    Py_XDECREF(type);
    return status;
}

static int add_types(PyObject* module) {
    if (!program_type && !(program_type = PyType_FromSpec(&program_spec))) return -1;
    if (add_type(module, Py_NewRef(program_type)) || add_type(module, make_call_type())) return -1;
    return add_type(module, make_signatures_type());
}

static PyMethodDef functions[] = {
    {"takes", takes, METH_O, "Whether tensors can be read by these functions of DLPack's."},
    {"replays", count_replays, METH_NOARGS, "How many graphs there are of calls that came with the same addresses again."},
    {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, add_types}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_extension", NULL, 0, functions, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__extension(void) { return PyModuleDef_Init(&definition); }
