"""What a launch takes beside its kernel: a params struct, a grid."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

MAX_GRID_Y = 65_535  # and of z


def params_struct(
    name: str, pointers: Sequence[str], integers: Sequence[str], long_integers: Sequence[str] = ()
) -> type[ctypes.Structure]:
    """The mirror of a kernel's params struct ``name``: its pointers, then its long long fields, then its int fields."""
    fields = [
        *((field, ctypes.c_void_p) for field in pointers),
        *((field, ctypes.c_longlong) for field in long_integers),
        *((field, ctypes.c_int) for field in integers),
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def plane_grid(x: int, planes: int) -> tuple[int, int, int]:
    """A grid of ``x`` blocks for each of many planes, at least one, which run over y and z."""
    y = min(planes, MAX_GRID_Y)
    return x, y, -(-planes // y)


def reciprocal(divisor: int) -> int:
    """What csrc/common/divide.cuh multiplies with to divide by a positive 32-bit integer."""
    return -(-(1 << 63) // divisor)
