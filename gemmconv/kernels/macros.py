"""Macros that every kernel of csrc/ is specialised by."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.integers import INT32_MAX

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
    known = ", ".join(_name(one) for one in dtypes)
    return f"dtype must be one of {known}, got {_name(dtype)}"


def geometry_macros(problem: Problem) -> Macros:
    """KERNEL_, STRIDE_, PADDING_ and DILATION_ with H and W."""
    macros: Macros = {}
    for name, pair in (
        ("KERNEL", problem.kernel_size),
        ("STRIDE", problem.stride),
        ("PADDING", problem.padding),
        ("DILATION", problem.dilation),
    ):
        macros[f"{name}_H"], macros[f"{name}_W"] = pair
    return macros


def index_macros(elements: int) -> Macros:
    """INDEX_64, where a kernel indexes so many elements that 32 bits are too few."""
    return {"INDEX_64": 1} if elements > INT32_MAX else {}


def table(values: Sequence[int]) -> str:
    """The initialiser of an array; never empty, which C++ would not take."""
    return f"{{{','.join(map(str, values or [0]))}}}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
