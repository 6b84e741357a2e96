"""Calls that torch's own operator serves, and the checks of their arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemmconv import pairs, selection
from gemmconv.algorithms.fallback import warn_once
from gemmconv.device import spec_of
from gemmconv.kernels.base import missing_software
from gemmconv.ops.call_cache import find_or_make, tensor_signature
from gemmconv.ops.configs import config_of
from gemmconv.ops.schemas import Arguments, Options, Tensors, checked_problem


def checked_torch_conv_transpose2d(input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """torch.conv_transpose2d, after the checks of shapes that our operator makes, with their messages."""
    if not torch.compiler.is_compiling():  # a graph that is traced has no sizes yet
        dtype = torch.float32 if torch.is_autocast_enabled(input.device.type) else None  # autocast makes all of one
        checked_problem("conv_transpose2d", _tensors_to_check((input, weight, bias), dtype), None, geometry)
    return torch.conv_transpose2d(input, weight, bias, *geometry)


def _tensors_to_check(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """A call's tensors: the input with a batch, all without data in the dtype that autocast casts them to, if any."""
    input, *others = tensors
    tensors = input.unsqueeze(0) if input.dim() == 3 else input, *others
    if dtype is None or input.dtype == torch.float64:
        return tensors
    return tuple(None if one is None else torch.empty_like(one, dtype=dtype, device="meta") for one in tensors)


def is_left_to_torch(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> bool:
    """Whether torch's operator, with torch's settings, computes a call and all gradients that it may be asked for.

    Such a call needs no operator of ours in any mode. Raises where the arguments do not fit together.
    """
    algorithm, device = arguments[5], input.device
    if algorithm not in ("auto", "native") or selection.is_deterministic(algorithm, device, spec_of(device)):
        return False
    tracked = torch.is_grad_enabled()
    needs = tracked and input.requires_grad, tracked and weight.requires_grad
    cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    dtype = input.dtype if cast is None or input.dtype == torch.float64 else cast
    current = selection.torch_precision(dtype, device)

    def decide() -> bool:
        options, tensors = Options(*arguments), _tensors_to_check((input, weight, bias), cast)
        problem = checked_problem("conv_transpose2d", tensors, None, options)
        config = config_of(problem, tensors[0], tensors[1], options, bias is not None, device)
        config = replace(config, trained=needs[1] and input.is_cpu)
        left = pairs.leaves_all_to_torch(config, algorithm, "conv_transpose2d", *needs)
        if left and algorithm == "auto":
            pairs.log_choice([("forward", selection.NATIVE, config)])
            if (cause := missing_software(device)) is not None:
                warn_once(cause)
        return left

    signatures = map(tensor_signature, (input, weight, bias))
    return find_or_make(("torch", *signatures, cast, current, arguments, needs), decide)
