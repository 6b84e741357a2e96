"""Partial sums of weight gradients: host side of csrc/splits/reduce_splits.cu."""

from __future__ import annotations

import math

import torch

from gemmconv.kernels.base import Config, accumulator_dtype, strides_of
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros
from gemmconv.kernels.program import Launch, Long, Operand, Output, Params, Program


def sum_partials_macros(dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/splits/reduce_splits.cu."""
    return {"ELEMENT_T": ELEMENT_TYPES[dtype]}


def partial_bytes(config: Config, slices: int) -> int:
    """Bytes of the partial sums of a weight gradient; none where there is one slice."""
    weight_bytes = math.prod(config.problem.weight_shape) * accumulator_dtype(config.dtype).itemsize
    return slices * weight_bytes if slices > 1 else 0


def sum_partials(config: Config, slices: int) -> Launch:
    """The launch that adds up ``partials`` in ``grad_weight``."""
    return sums(config.dtype, math.prod(config.problem.weight_shape), slices, "partials", "grad_weight")


def sums(dtype: torch.dtype, elements: int, slices: int, partials: str, target: str) -> Launch:
    """The launch that adds up so many slices of as many elements."""
    params: Params = {"partials, sums": (partials, target), "elements": Long(elements), "slices": slices}
    grid = -(-elements // 32), 1, 1
    return Launch("splits/reduce_splits.cu", sum_partials_macros(dtype), grid, (256, 1, 1), params)


def result_params(slices: int) -> Params:
    """What a kernel of so many slices writes: partial sums, or the gradient."""
    return {"partials, grad_weight": ("partials", None) if slices > 1 else (None, "grad_weight")}


def with_partials(
    config: Config, slices: int, operands: tuple[Operand, ...], outputs: tuple[Output, ...], main: Launch
) -> Program:
    """A program whose last output is the weight gradient, which ``main`` writes, or ``partials`` of several slices."""
    shape = config.problem.weight_shape
    grad_weight = Output("grad_weight", shape, strides_of(shape, torch.contiguous_format))
    if slices == 1:
        return Program(config.dtype, operands, (*outputs, grad_weight), (main,))
    steps, scratch = (main, sum_partials(config, slices)), {"partials": partial_bytes(config, slices)}
    return Program(config.dtype, operands, (*outputs, grad_weight), steps, scratch)
