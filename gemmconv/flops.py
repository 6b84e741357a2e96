"""Formulas with which torch.utils.flop_counter counts the operators as it counts torch's own."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_MODULE = "torch.utils.flop_counter"  # slow to import, so only its users wait for it
_registered = False


def _flops(input_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any) -> int:
    """Operations of a pass: two for each product of an input and a weight."""
    return 2 * input_shape[0] * math.prod(input_shape[2:]) * math.prod(weight_shape)


_FORMULAS: dict[str, Callable[..., int]] = {  # by operator, from the shapes of its tensors
    "conv_transpose2d": _flops,
    "conv_transpose3d": _flops,
    "conv_transpose2d_input_grad": lambda _grad, weight, *_, out_shape, **__: _flops(out_shape, weight),
    "conv_transpose2d_weight_grad": lambda _grad, input, *_, out_shape, **__: _flops(input, out_shape),
    "conv_transpose3d_grads": lambda _grad, input, weight, *of, **__: sum(of[-1][:2]) * _flops(input, weight),
    "conv_transpose2d_grads": lambda _grad, input, weight, *_, **__: 2 * _flops(input, weight),
}


def register() -> None:
    """Register the formulas once that module is imported, also with active counters, which copied its registry."""
    global _registered
    counter = sys.modules.get(_MODULE)
    if counter is None or not hasattr(counter, "register_flop_formula"):  # not all of it is imported yet
        return
    formulas = {getattr(torch.ops.gemmconv, name): formula for name, formula in _FORMULAS.items()}
    if not _registered:
        _registered = True
        for operator, formula in formulas.items():
            counter.register_flop_formula(operator)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            for operator in formulas:
                registry.setdefault(operator, counter.flop_registry[operator])
