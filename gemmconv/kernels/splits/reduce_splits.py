"""Partial sums of weight gradients: host side of csrc/splits/reduce_splits.cu."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gemmconv.kernels.base import Config, accumulator_dtype
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros
from gemmconv.kernels.params import params_struct

ReduceSplitsParams = params_struct(
    "reduce_splits_params", ("partials", "sums"), ("slices",), long_integers=("elements",)
)


def sum_partials_macros(dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/splits/reduce_splits.cu."""
    return {"ELEMENT_T": ELEMENT_TYPES[dtype]}


def partial_bytes(config: Config, slices: int) -> int:
    """Bytes of the partial sums of a weight gradient; none where there is one slice."""
    weight_bytes = math.prod(config.problem.weight_shape) * accumulator_dtype(config.dtype).itemsize
    return slices * weight_bytes if slices > 1 else 0


def prepare_partials(
    config: Config, slices: int
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor, torch.Tensor], None]]:
    """Prepare the memory of the partial sums of a weight gradient, and what adds them up.

    Returns:
        ``partials_of(grad_weight)``, uninitialised, of ``slices`` partial sums for each weight; the gradient itself
        where there is one slice. ``add_up(partials, grad_weight)`` fills the gradient then.
    """
    from gemmconv.runtime.launch import load

    if slices == 1:
        return lambda grad_weight: grad_weight, lambda partials, grad_weight: None
    macros = sum_partials_macros(config.dtype)
    kernel = load("splits/reduce_splits.cu", macros, config.device.index)
    elements, dtype = math.prod(config.problem.weight_shape), accumulator_dtype(config.dtype)
    grid = (-(-elements // 32), 1, 1)

    def add_up(partials: torch.Tensor, grad_weight: torch.Tensor) -> None:
        params = ReduceSplitsParams(partials.data_ptr(), grad_weight.data_ptr(), elements, slices)
        kernel.launch(grid, (256, 1, 1), params)

    return lambda grad_weight: grad_weight.new_empty((slices, elements), dtype=dtype), add_up
