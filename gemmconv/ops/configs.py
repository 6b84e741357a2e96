"""From a call's arguments to configurations and the chosen algorithm; the calling conventions of prepared calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemmconv import pairs, selection
from gemmconv.algorithms import Algorithm
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Direction, Pass, strides_of
from gemmconv.kernels.program import Strides
from gemmconv.ops.schemas import Options, Tensors, checked_problem, memory_format, operator_name

OperatorCall = Callable[..., Any]  # a prepared call of an operator; a Convention says what it takes and returns


class Convention(NamedTuple):
    """What a prepared call takes and returns where that differs from its operator.

    By default a call takes and returns what its operator does, with the strides of contiguous tensors:

        forward    call(input, weight, bias) -> output
        gradients  call(grad_output, input, weight) -> grad_input, grad_weight    (one gradient takes two of the three)

    Fields change that as follows; in brackets the modules of gemmconv/ops that set them. "w32" is a float32 tensor.

        weight_grad_strides  grad_weight has these strides (autograd.py: the weight's own; default_convention below)
        with_bias_grad       ... -> grad_input, grad_weight, grad_bias (autograd.py, volumes.py)
        parameter_dtype      float32, under autocast: call(input, w32, b32) -> output casts w32 and b32 in one launch;
                             gradients of parameters are float32 too (recording.py, autograd.py, compiled.py)
        returns_casts        with parameter_dtype: ... -> output, cast weight, cast bias: autograd saves the casts, and
                             later calls of that autocast block reuse them (recording.py)
        trained              forward on a CPU: the same tensors, but the call keeps no packed copy of the weight, which
                             the next training step will change (recording.py)
        is_signal            call(input [N, C, L], weight [C, C_out, K], bias) -> output [N, C_out, L] (recording.py)
    """

    weight_grad_strides: Strides | None = None
    with_bias_grad: bool = False
    parameter_dtype: torch.dtype | None = None
    returns_casts: bool = False
    trained: bool = False
    is_signal: bool = False


DEFAULT_CONVENTION = Convention()  # made once, since known calls ask for it


def default_convention(direction: Pass, tensors: Tensors) -> Convention:
    """The convention of an operator's schema: in ``grads`` a channels_last weight has a gradient in channels_last."""
    if direction != "grads" or memory_format(tensors[2], tensors[2]) is torch.contiguous_format:
        return DEFAULT_CONVENTION
    return Convention(strides_of(tensors[2].shape, torch.channels_last))


def config_of(
    problem: Problem,
    first: Tensor,
    second: Tensor,
    options: Options,
    bias: bool = False,
    device: torch.device | None = None,
) -> Config:
    """The configuration of a pass on two tensors; on a ``device`` that is not theirs, where they have no data."""
    settings = options.precision, options.workspace_limit, memory_format(first, second), bias, options.algorithm
    return selection.current_config(problem, first.dtype, device or first.device, *settings)


def choose_algorithm(
    direction: Direction, tensors: Tensors, target_size: Any, options: Options, trained: bool = False
) -> tuple[Algorithm, Config]:
    """Check the arguments of a forward pass or of one gradient. Choose its algorithm, and return its configuration too.

    For ``target_size`` see :func:`gemmconv.ops.implementation.prepare_call`; ``trained`` is a Convention's.
    """
    where, (first, second, *bias) = operator_name(direction), tensors
    problem = checked_problem(where, tensors, target_size, options)
    config = config_of(problem, first, second, options, bias=bool(bias) and bias[0] is not None)
    config = replace(config, trained=trained)
    return selection.choose(config, options.algorithm, where, direction), config


def choose_gradients(tensors: Tensors, options: Options) -> tuple[pairs.Gradients, Config, Config]:
    """Check the arguments of both gradients in one call, and choose their algorithms.

    Returns the configurations of the input's and of the weight's gradient too, which differ in their memory formats if
    input and weight do.
    """
    where, (grad_output, input, weight) = operator_name("grads"), tensors
    problem = checked_problem(where, tensors, None, options)
    configs = config_of(problem, grad_output, weight, options), config_of(problem, grad_output, input, options)
    return pairs.choose_pair(*configs, options.algorithm, where), *configs
