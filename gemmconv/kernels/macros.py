"""Macros that every kernel of csrc/ is specialised by."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.integers import INT32_MAX
from gemmconv.validation import short_name

Macros = dict[str, str | int]

ELEMENT_TYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "half_t",
    torch.bfloat16: "bfloat16_t",
}
TENSOR_CORE_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def why_not_dtype(dtype: torch.dtype, dtypes: Collection[torch.dtype] = tuple(ELEMENT_TYPES)) -> str | None:
    """Why kernels for some element types cannot take this one, or None."""
    if dtype in dtypes:
        return None
    known = ", ".join(short_name(one) for one in dtypes)
    return f"dtype must be one of {known}, got {short_name(dtype)}"


def named_macros(record: object, names: str) -> Macros:
    """Macros with the values of attributes, whose names they have in capitals; those of axes end in _D, _H and _W.

    >>> named_macros(Problem(1, 2, 3, 1, (8, 8), (3, 3), stride=(2, 1)), "in_channels stride")
    {'IN_CHANNELS': 2, 'STRIDE_H': 2, 'STRIDE_W': 1}
    """
    macros: Macros = {}
    for name in names.split():
        value = getattr(record, name)
        if isinstance(value, tuple):
            macros |= {f"{name.upper()}_{axis}": one for axis, one in zip("DHW"[-len(value) :], value, strict=True)}
        else:
            macros[name.upper()] = int(value)
    return macros


def geometry_macros(problem: Problem, elements: int = 0) -> Macros:
    """KERNEL_, STRIDE_, PADDING_ and DILATION_ with H and W, of volumes with D too, and :func:`index_macros`."""
    of_axes = named_macros(problem, "kernel_size stride padding dilation")
    return {**{name.replace("_SIZE", ""): value for name, value in of_axes.items()}, **index_macros(elements)}


def index_macros(elements: int) -> Macros:
    """INDEX_64, where a kernel indexes so many elements that 32 bits are too few."""
    return {"INDEX_64": 1} if elements > INT32_MAX else {}


def table(values: Sequence[int]) -> str:
    """The initialiser of an array; never empty, which C++ would not take."""
    return f"{{{','.join(map(str, values or [0]))}}}"
