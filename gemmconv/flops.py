"""Formulas with which torch.utils.flop_counter counts the operators as it counts torch's own."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_MODULE = "torch.utils.flop_counter"  # slow to import, so only its users wait for it
_registered = False


def register() -> None:
    """Register the formulas once that module is imported, also with active counters, which copied its registry."""
    global _registered
    counter = sys.modules.get(_MODULE)
    if counter is None or not hasattr(counter, "register_flop_formula"):  # not all of it is imported yet
        return
    operators = torch.ops.gemmconv
    formulas = {
        operators.conv_transpose2d: _flops,
        operators.conv_transpose2d_input_grad: _input_grad,
        operators.conv_transpose2d_weight_grad: _weight_grad,
        operators.conv_transpose2d_grads: _grads,
    }
    if not _registered:
        _registered = True
        for operator, formula in formulas.items():
            counter.register_flop_formula(operator)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            for operator in formulas:
                registry.setdefault(operator, counter.flop_registry[operator])


def _flops(input_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any) -> int:
    """Operations of a pass: two for each product of an input and a weight."""
    return 2 * input_shape[0] * math.prod(input_shape[2:]) * math.prod(weight_shape)


def _input_grad(
    grad_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any
) -> int:
    return _flops(out_shape, weight_shape)


def _weight_grad(
    grad_shape: Sequence[int], input_shape: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any
) -> int:
    return _flops(input_shape, out_shape)


def _grads(
    grad_shape: Sequence[int], input_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any
) -> int:
    return 2 * _flops(input_shape, weight_shape)
