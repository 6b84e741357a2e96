"""Partial sums of weight gradients: host side of csrc/splits/reduce_splits.cu."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gemmconv.kernels.base import Config, accumulator_dtype, strides_of
from gemmconv.kernels.launch import Launch, Long, Operand, Output, Params, Program
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros


def sum_partials_macros(dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/splits/reduce_splits.cu."""
    return {"ELEMENT_T": ELEMENT_TYPES[dtype]}


def partial_bytes(config: Config, slices: int) -> int:
    """Bytes of the partial sums of a weight gradient; none where there is one slice."""
    weight_bytes = math.prod(config.problem.weight_shape) * accumulator_dtype(config.dtype).itemsize
    return slices * weight_bytes if slices > 1 else 0


def sum_partials(config: Config, slices: int) -> Launch:
    """The launch that adds up ``partials``, uninitialised at first, in ``grad_weight``."""
    elements = math.prod(config.problem.weight_shape)
    params: Params = {"partials, sums": ("partials", "grad_weight"), "elements": Long(elements), "slices": slices}
    grid = -(-elements // 32), 1, 1
    return Launch("splits/reduce_splits.cu", sum_partials_macros(config.dtype), grid, (256, 1, 1), params)


def with_partials(
    config: Config, slices: int, operands: tuple[Operand, ...], outputs: tuple[Output, ...], main: Launch | None
) -> Program:
    """A program whose last output is the weight gradient: the sum of what ``main`` writes as ``partials``."""
    shape, launches = config.problem.weight_shape, () if main is None else (main,)
    strides = strides_of(shape, torch.contiguous_format)
    if slices == 1:
        return Program(config.dtype, operands, (*outputs, Output("partials", shape, strides)), launches)
    launches, outputs = (*launches, sum_partials(config, slices)), (*outputs, Output("grad_weight", shape, strides))
    return Program(config.dtype, operands, outputs, launches, {"partials": partial_bytes(config, slices)})


def prepare_partials(config: Config, slices: int) -> tuple[int, Callable[[torch.Tensor, torch.Tensor], object]]:
    """The bytes of partial sums, of several slices, and what adds those of a tensor up in a contiguous gradient."""
    operands = Operand("partials", torch.contiguous_format), Operand("grad_weight", torch.contiguous_format)
    program = Program(config.dtype, operands, (), (sum_partials(config, slices),))
    return partial_bytes(config, slices), program.prepare(config.device)
