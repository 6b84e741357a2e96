"""Loads the C kernels of csrc/cpu/: their structs, their functions, and the choice of an instruction set.

They are part of the C extension and are called through ctypes, which releases the interpreter's lock during a call.
They use the threads of the OpenMP runtime that torch has loaded. The environment variable ``GEMMCONV_CPU`` overrides
the choice: ``avx512``, ``avx2``, ``neon`` or ``portable``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch

from gemmconv.errors import KernelError
from gemmconv.extension import extension

_VARIABLE = "GEMMCONV_CPU"
_INSTRUCTION_SETS = ("avx512", "avx2", "neon", "portable")  # best first
KINDS = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 1, torch.float16: 2}  # as csrc/cpu/cpu.h numbers them
_long, _int, _pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p


def _struct(name: str, fields: str, *more: tuple[str, Any]) -> Any:
    """A C struct of int64 fields, each ``name`` or ``name:length``, followed by the fields in ``more``."""
    named = [field.partition(":")[::2] for field in fields.split()]
    typed = [(field, _long * int(length) if length else _long) for field, length in named]
    return type(name, (ctypes.Structure,), {"_fields_": [*typed, *more]})


_VIEW = 20  # fields of a view_t
Conv = _struct(
    "Conv",
    f"source:{_VIEW} target:{_VIEW} groups low high jobs products block rows blocks splits total bands band "
    "strip at_once planes plane weight_group weight_source weight_target packed first shift plane_of tap job_class "
    "pairs:2 checked",
)
WeightGrad = _struct(
    "WeightGrad",
    f"input:{_VIEW} grad:{_VIEW} groups taps low high input_block grad_block band bands slices planes input_plane "
    "grad_plane shift plane_of",
)
Layer = _struct("Layer", "kind batch groups c_in c_out size:2 out:2 kernel:2 stride:2 padding:2 dilation:2")
_Kernels = _struct(
    "Kernels",
    "rows lanes vectors dot_columns",
    ("pack", ctypes.CFUNCTYPE(_int, *[_pointer] * 3, _int)),
    ("conv", ctypes.CFUNCTYPE(_int, *[_pointer] * 6, _long, _int)),
    ("wgrad", ctypes.CFUNCTYPE(_int, *[_pointer] * 6, _long, _int)),
    ("direct", ctypes.CFUNCTYPE(None, _pointer, _int, *[_pointer] * 4, _int)),
    ("col2im", ctypes.CFUNCTYPE(None, *[_pointer] * 4, _long, _pointer, _int)),
    ("im2col", ctypes.CFUNCTYPE(None, *[_pointer] * 4, _int)),
    ("checksum", ctypes.CFUNCTYPE(ctypes.c_uint64, _pointer, _long, _int)),
)


@cache
def _library() -> Any | None:
    if (built := extension()) is None:
        return None
    library = ctypes.CDLL(built.__file__)
    library.gemmconv_cpu_kernels.restype = ctypes.POINTER(_Kernels)
    return library


@cache
def isa_name() -> str | None:
    """The instruction set of the kernels on this machine; None without the extension.

    Raises:
        KernelError: the environment names an instruction set that this machine, or this build, does not have.
    """
    if (library := _library()) is None:
        return None
    requested = os.environ.get(_VARIABLE)
    able = [name for name in _INSTRUCTION_SETS if library.gemmconv_cpu_kernels(name.encode(), 0)]
    if requested is not None and requested not in able:
        raise KernelError(f"{_VARIABLE} must be one of {', '.join(able)} on this machine, got {requested!r}")
    return requested or able[0]


@cache
def kernels_for(dtype: torch.dtype) -> Any:
    """The kernels for an element type; :func:`isa_name` must not be None."""
    library: Any = _library()
    return library.gemmconv_cpu_kernels((isa_name() or "").encode(), dtype == torch.float64).contents


def checksum(tensor: torch.Tensor) -> int:
    """A number that changes with the contents of a contiguous tensor."""
    size = tensor.numel() * tensor.element_size()
    return int(kernels_for(torch.float32).checksum(tensor.data_ptr(), size, torch.get_num_threads()))


def integers(values: Iterable[int]) -> np.ndarray[Any, Any]:
    """An array of int64. A struct that holds its address does not keep it alive."""
    return np.fromiter(values, dtype=np.int64)


def address(tensor: torch.Tensor | None) -> int | None:
    """The address of a tensor's data; None for None."""
    return None if tensor is None else tensor.data_ptr()
