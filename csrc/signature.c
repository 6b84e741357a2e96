/* Keys by which repeated plain calls, and their gradients, are recognised; gemmconv/ops/signatures.py says what counts.
 *
 *   signatures = Signatures(exchange, cache, (count, modes), levels, has_grad, has_autocast, cast_to,
 *                           (precision, arguments), types)
 *   signatures.find_call(input, weight, bias, said) -> what the dictionary ``cache`` has for the call's key, and the key:
 *                                                      None for what there is not; no key if Python has to look
 *   signatures.of_gradient(grad, input, weight, asked) -> a key, or None, also while gradients are recorded
 *
 * Types, devices, shapes and strides are packed as bytes into one object. It needs from torch: DLPack's functions;
 * functions without arguments that are true if this thread is in a mode, of which the first, in Python, is for modes of
 * torch functions, and is called only if their count is not zero; a module whose ``_current_level`` is below zero
 * outside forward-mode gradients; names of attributes; the types Tensor and Parameter. Tensors of other types, without
 * data (sparse, wrappers, empty) and complex ones have no signature.
 *
 * What is called here is seldom in the processor's caches, where a layer's data fills them: on an H100's host a key
 * takes 9 to 13 us in a training step. Python took 17 to 35 us, and 9 us in a loop.
 */
#include "extension.h"

#include <string.h>

enum { kIsNegative, kNeedsGrad, kIsLeaf, kIsView, kIsInference, kLevel, kNames };
static const char* const texts[kNames] = {"is_neg", "requires_grad", "is_leaf", "_is_view", "is_inference",
                                          "_current_level"};
static PyObject* names[kNames];

enum { kCache, kCount, kModes, kLevels, kHasGrad, kHasAutocast, kCastTo, kPrecision, kArguments, kTensor, kParameter,
       kHeld };
typedef struct {
    object_t object;
    const exchange_t* exchange;
    PyObject* held[kHeld];  /* borrowed from the arguments */
} signatures_t;

enum { kCuda = 2, kComplex = 5, kFloat32 = 1 << 16 | 32 << 8 | 2 };  /* DLPack's; the last with bits and lanes */
enum { kMostRank = 8, kTensors = 3, kMostWords = kTensors * (2 + 2 * kMostRank) };
typedef struct { int count; uint64_t words[kMostWords]; } packed_t;

static PyObject* call(PyObject* function) { return PyObject_CallFunctionObjArgs(function, NULL); }

/* Whether a new object is true; -1 if it is NULL. Takes the reference. */
static int is_true(PyObject* made) {
    const int found = made ? PyObject_IsTrue(made) : -1;
    Py_XDECREF(made);
    return found;
}

static int is_in_a_mode(const signatures_t* self) {
    const Py_ssize_t count = PyTuple_Size(self->held[kModes]);
    const int in_function_modes = is_true(call(self->held[kCount]));
    if (in_function_modes < 0) return -1;
    for (Py_ssize_t i = !in_function_modes; i < count; ++i) {
        const int found = is_true(call(PyTuple_GetItem(self->held[kModes], i)));
        if (found) return found;
    }
    PyObject* level = PyObject_GetAttr(self->held[kLevels], names[kLevel]);
    if (!level) return -1;
    const long value = PyLong_AsLong(level);
    Py_DecRef(level);
    return value == -1 && PyErr_Occurred() ? -1 : value >= 0;
}

static int says(PyObject* object, int name) { return is_true(PyObject_CallMethodObjArgs(object, names[name], NULL)); }
static int has(PyObject* object, int name) { return is_true(PyObject_GetAttr(object, names[name])); }

enum { kTracks = 1, kCasts = 2 };  /* properties to add: whether a tensor needs a gradient; whether its cast is cached */

/* Whether an object is a tensor or a parameter, of no subclass. */
static int is_torchs(const signatures_t* self, PyObject* object) {
    PyObject* type = (PyObject*)Py_TYPE(object);
    return type == self->held[kTensor] || type == self->held[kParameter];
}

/* Adds a tensor, or a mark for None. Returns 1 if the tensor has no signature, -1 with an error. */
static int pack(const signatures_t* self, packed_t* packed, PyObject* object, int counts) {
    uint64_t* words = packed->words + packed->count;
    if (object == Py_None) {
        words[0] = UINT64_MAX;
        packed->count += 1;
        return 0;
    }
    tensor_t tensor;
    if (self->exchange->tensor_of(object, &tensor)) {
        PyErr_Clear();
        return 1;
    }
    if (tensor.rank > kMostRank || !tensor.data || tensor.type.code == kComplex) return 1;
    const struct { int name, counts, is_method; } flags[] = {{kIsNegative, 0, 1}, {kNeedsGrad, kTracks | kCasts, 0},
        {kIsLeaf, kCasts, 0}, {kIsView, kCasts, 1}, {kIsInference, kCasts, 1}};
    uint64_t all = 0;
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; ++i) {
        if (flags[i].counts && !(flags[i].counts & counts)) continue;
        const int found = (flags[i].is_method ? says : has)(object, flags[i].name);
        if (found < 0) return -1;
        all |= (uint64_t)found << i;
    }
    memcpy(words, &tensor.type, sizeof tensor.type);
    words[0] = (words[0] & UINT32_MAX) | (uint64_t)tensor.rank << 32 | all << 40;
    words[1] = (uint64_t)(uint32_t)tensor.device_type << 32 | (uint32_t)tensor.device;
    memcpy(words + 2, tensor.shape, (size_t)tensor.rank * sizeof *words);
    memcpy(words + 2 + tensor.rank, tensor.strides, (size_t)tensor.rank * sizeof *words);
    packed->count += 2 + 2 * tensor.rank;
    return 0;
}

/* The tuple of the packed bytes, two objects, and torch's precision, which only float32 on a GPU depends on. */
static PyObject* key_of(const signatures_t* self, const packed_t* packed, PyObject* said, PyObject* cast_to) {
    const int has_precision = (uint32_t)packed->words[0] == kFloat32 && packed->words[1] >> 32 == kCuda;
    PyObject* precision =
        has_precision ? PyObject_Call(self->held[kPrecision], self->held[kArguments], NULL) : Py_NewRef(Py_None);
    if (!precision) return NULL;
    const Py_ssize_t size = packed->count * (Py_ssize_t)sizeof *packed->words;
    PyObject* bytes = PyBytes_FromStringAndSize((const char*)packed->words, size);
    PyObject* key = bytes ? PyTuple_Pack(4, bytes, said, cast_to, precision) : NULL;
    Py_XDECREF(bytes);
    Py_DecRef(precision);
    return key;
}

/* The key of a call; None if it has none. */
static PyObject* of_call(const signatures_t* self, PyObject* const* arguments) {
    packed_t packed;
    packed.count = 0;
    int other = !is_torchs(self, arguments[0]) || !is_torchs(self, arguments[1]);
    if (!other) other = arguments[2] != Py_None && !is_torchs(self, arguments[2]);
    if (!other) other = is_in_a_mode(self);
    const int tracks = other ? 0 : is_true(call(self->held[kHasGrad]));
    const int casts = other || tracks < 0 ? tracks : is_true(call(self->held[kHasAutocast]));
    if (casts < 0) return NULL;
    for (int i = 0; i < kTensors && !other; ++i)
        other = pack(self, &packed, arguments[i], tracks * kTracks | (i ? casts * kCasts : 0));
    if (other) return other > 0 ? Py_NewRef(Py_None) : NULL;
    packed.words[0] |= (uint64_t)tracks << 48;
    PyObject* cast_to = casts ? PyObject_CallFunctionObjArgs(self->held[kCastTo], arguments[0], NULL) : Py_NewRef(Py_None);
    PyObject* key = cast_to ? key_of(self, &packed, arguments[3], cast_to) : NULL;
    Py_XDECREF(cast_to);
    return key;
}

static PyObject* find_call(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
    const signatures_t* self = (const signatures_t*)object;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "find_call takes 4 arguments, got %zd", count);
    PyObject* key = of_call(self, arguments);
    PyObject* found = key ? PyDict_GetItemWithError(self->held[kCache], key) : NULL;  /* there is none for None */
    PyObject* both = PyErr_Occurred() ? NULL : PyTuple_Pack(2, found ? found : Py_None, key);
    Py_XDECREF(key);
    return both;
}

static PyObject* of_gradient(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
    const signatures_t* self = (const signatures_t*)object;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "of_gradient takes 4 arguments, got %zd", count);
    packed_t packed;
    packed.count = 0;
    int other = (PyObject*)Py_TYPE(arguments[0]) != self->held[kTensor];
    if (!other) other = is_true(call(self->held[kHasGrad]));  /* a second backward pass may follow */
    if (!other) other = is_in_a_mode(self);
    for (int i = 0; i < kTensors && !other; ++i) other = pack(self, &packed, arguments[i], 0);
    if (other) return other > 0 ? Py_NewRef(Py_None) : NULL;
    return key_of(self, &packed, arguments[3], Py_None);
}

static int fill(PyObject* object) {
    signatures_t* self = (signatures_t*)object;
    PyObject *capsule, **held = self->held;
    if (!PyArg_ParseTuple(self->object.arguments, "OO!(OO!)OOOO(OO!)(OO)", &capsule, &PyDict_Type, &held[kCache],
                          &held[kCount], &PyTuple_Type, &held[kModes], &held[kLevels], &held[kHasGrad],
                          &held[kHasAutocast], &held[kCastTo], &held[kPrecision], &PyTuple_Type, &held[kArguments],
                          &held[kTensor], &held[kParameter]))
        return -1;
    self->exchange = exchange_of(capsule);
    return self->exchange ? 0 : -1;
}

static PyObject* signatures_new(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
    (void)keywords;
    return new_object(type, arguments, fill);
}

static PyMethodDef methods[] = {
    {"find_call", (PyCFunction)(void (*)(void))find_call, METH_FASTCALL, "The cached call, and what it is known by."},
    {"of_gradient", (PyCFunction)(void (*)(void))of_gradient, METH_FASTCALL, "What its gradients are known by."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, signatures_new}, {Py_tp_dealloc, free_object}, {Py_tp_methods, methods}, {0, NULL}};
static PyType_Spec spec = {"gemmconv._extension.Signatures", sizeof(signatures_t), 0, Py_TPFLAGS_DEFAULT, slots};

PyObject* make_signatures_type(void) {
    for (int i = 0; i < kNames; ++i)
        if (!names[i] && !(names[i] = PyUnicode_InternFromString(texts[i]))) return NULL;
    return PyType_FromSpec(&spec);
}
