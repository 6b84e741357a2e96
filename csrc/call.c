/* Calls a program with tensors: the host time of a small layer.
 *
 *   call = Call(program, exchange, index, allocate, outputs, operands, scratch, (device_of, blas_of), otherwise)
 *   call.run(tensor or None, ...) -> the outputs
 *
 * A call allocates outputs and scratch memory, takes all addresses and runs the program. If the device is not current or
 * a tensor is not aligned, ``otherwise`` takes over before anything is enqueued. A call with the addresses of an earlier
 * one, usual in training steps with cached memory, is one launch of a graph: 13 to 17 us of host time for any number of
 * launches, beside 3 to 5 us for an allocation (H100, driver 580).
 */
#include "executor.h"

#include <string.h>

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

PyObject* count_replays(PyObject* module, PyObject* nothing) {
    (void)module, (void)nothing;
    return PyLong_FromLong(replays.count);
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

static PyMethodDef call_methods[] = {
    {"run", (PyCFunction)(void (*)(void))call_run, METH_FASTCALL, "The program's outputs for these tensors."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot call_slots[] = {
    {Py_tp_new, call_new}, {Py_tp_dealloc, call_dealloc}, {Py_tp_methods, call_methods}, {0, NULL}};
static PyType_Spec call_spec = {"gemmconv._extension.Call", sizeof(call_t), 0, Py_TPFLAGS_DEFAULT, call_slots};

PyObject* make_call_type(void) { return PyType_FromSpec(&call_spec); }
