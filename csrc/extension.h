/* What executor.c and signature.c share: Python's limited API, objects that are made and freed, and tensors. */
#pragma once
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* Sets an error with a formatted text; an expression of value -1. */
#define RAISE(...) (PyErr_Format(__VA_ARGS__), -1)

/* How each object of the extension begins. It holds the arguments that it was made of, and may borrow from them. */
typedef struct { PyObject_HEAD PyObject* arguments; } object_t;

/* A new object, all zeros but for what ``fill`` reads from its arguments. If that fails, the object is deallocated. */
static inline PyObject* new_object(PyTypeObject* type, PyObject* arguments, int (*fill)(PyObject* self)) {
    PyObject* self = PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    ((object_t*)self)->arguments = Py_NewRef(arguments);
    if (!fill(self)) return self;
    Py_DecRef(self);
    return NULL;
}

static inline void free_object(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_DecRef(((object_t*)self)->arguments);
    PyObject_Free(self);
    Py_DecRef((PyObject*)type);
}

/* DLPack's C exchange API, which torch has from 2.11 on, reads tensors without torch's headers or the interpreter. The
 * declarations follow https://github.com/dmlc/dlpack, version 1.3. */

typedef struct {
    void* data;
    int32_t device_type, device;
    int32_t rank;
    struct { uint8_t code, bits; uint16_t lanes; } type;
    int64_t *shape, *strides;  /* in elements, and the tensor's own */
    uint64_t byte_offset;
} tensor_t;

typedef struct {
    struct { uint32_t major, minor; } version;
    void* before;
    void *allocate, *to_managed, *from_managed;
    int (*tensor_of)(void* object, tensor_t* tensor);
    int (*current_stream)(int device_type, int32_t device, void** stream);
} exchange_t;

_Static_assert(sizeof(tensor_t) == 48 && sizeof(exchange_t) == 56, "as in dlpack.h");

/* torch.Tensor.__dlpack_c_exchange_api__; NULL with an error if its version differs, or it lacks a needed function. */
static inline const exchange_t* exchange_of(PyObject* capsule) {
    const exchange_t* exchange = (const exchange_t*)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (exchange && (exchange->version.major != 1 || exchange->version.minor < 2 || !exchange->tensor_of ||
                     !exchange->current_stream)) {
        PyErr_Format(PyExc_ValueError, "DLPack's exchange must be of version 1.2 or later, and whole, got %u.%u",
                     exchange->version.major, exchange->version.minor);
        return NULL;
    }
    return exchange;
}
