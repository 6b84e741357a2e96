"""Macros that every kernel of csrc/ is specialised by."""

from __future__ import annotations

import torch

from gemmconv.geometry import Problem

Macros = dict[str, str | int]

ELEMENT_TYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "half_t",
    torch.bfloat16: "bfloat16_t",
}


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
