"""What a launch takes beside its kernel: a params struct, tensor maps in it, a grid."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from gemmconv.geometry import Shape4

# What gemmconv.runtime.tensor_map.encode is to know of a tensor beside its address.
Boxes = tuple[int, Shape4, tuple[int, int, int], Shape4, Shape4, bool]

MAX_GRID_Y = 65_535  # and of z


def params_struct(
    name: str,
    pointers: Sequence[str],
    integers: Sequence[str],
    long_integers: Sequence[str] = (),
    tensor_maps: Sequence[str] = (),
) -> type[ctypes.Structure]:
    """The mirror of a kernel's params struct ``name``: its tensor maps, pointers, long long fields and int fields.

    Tensor maps are aligned to 64 bytes, and so is the end of a struct that has some.
    """
    fields: list[tuple[str, Any]] = [
        *((field, ctypes.c_ulonglong * 16) for field in tensor_maps),
        *((field, ctypes.c_void_p) for field in pointers),
        *((field, ctypes.c_longlong) for field in long_integers),
        *((field, ctypes.c_int) for field in integers),
    ]
    if tensor_maps:
        bytes_used = sum(ctypes.sizeof(field_type) for _, field_type in fields)
        fields.append(("padding", ctypes.c_char * (-bytes_used % 64)))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def plane_grid(x: int, planes: int) -> tuple[int, int, int]:
    """A grid of ``x`` blocks for each of many planes, at least one, which run over y and z."""
    y = min(planes, MAX_GRID_Y)
    return x, y, -(-planes // y)


def reciprocal(divisor: int) -> int:
    """What csrc/include/numeric/divide.cuh multiplies with to divide by a positive 32-bit integer."""
    return -(-(1 << 63) // divisor)
