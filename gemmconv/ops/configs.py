"""Configurations of passes, made from the tensors and the options of calls."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gemmconv import selection
from gemmconv.device import spec_of
from gemmconv.geometry import Problem
from gemmconv.kernels.base import DEFAULT_WORKSPACE_LIMIT, Config, Pass, Precision, strides_of
from gemmconv.kernels.program import Strides
from gemmconv.ops.schemas import Options, Tensors, memory_format


class Form(NamedTuple):
    """Format and dtype of weights, biases and their gradients, where they differ from the operator's defaults.

    Attributes:
        weight_format: strides of the weight's gradient; None for those of a contiguous tensor.
        with_bias: whether the bias's gradient is returned too, after the others.
        dtype: dtype of weight and bias as arguments, and of their gradients; None for the dtype of the input.
        returns_casts: whether a forward call returns its casts of weight and bias after the output.
        trained: see :class:`Config`.
        is_signal: whether a forward call takes tensors of one axis, whose memory is that of images of height 1.
    """

    weight_format: Strides | None = None
    with_bias: bool = False
    dtype: torch.dtype | None = None
    returns_casts: bool = False
    trained: bool = False
    is_signal: bool = False


DEFAULT_FORM = Form()


def default_form(direction: Pass, tensors: Tensors) -> Form:
    """The form of an operator's results: ``grads`` gives a channels_last weight a gradient in channels_last."""
    if direction != "grads" or memory_format(tensors[2], tensors[2]) is torch.contiguous_format:
        return DEFAULT_FORM
    return Form(strides_of(tensors[2].shape, torch.channels_last))


def config_of(
    problem: Problem, first: Tensor, second: Tensor, options: Options, current: Precision, bias: bool = False
) -> Config:
    """The configuration of a pass on two tensors; ``current`` is the precision that torch's settings ask for."""
    dtype, device, spec = first.dtype, first.device, spec_of(first.device)
    limit = DEFAULT_WORKSPACE_LIMIT if options.workspace_limit is None else options.workspace_limit
    settings = options.precision or current, limit, current, memory_format(first, second)
    deterministic = selection.is_deterministic(options.algorithm, device, spec)
    return Config(problem, dtype, device, *settings, bias, spec, deterministic)


def pass_configs(
    direction: Pass, problem: Problem, tensors: Tensors, options: Options, current: Precision
) -> tuple[Config, Config]:
    """The configurations of the input's and the weight's gradient; any other pass has its own twice."""
    first, second = tensors[:2]
    if direction == "grads":
        by_weight = config_of(problem, first, tensors[2], options, current)
        return by_weight, config_of(problem, first, second, options, current)
    bias = len(tensors) > 2 and tensors[2] is not None
    return (config_of(problem, first, second, options, current, bias),) * 2


def bias_grad_config(grad_output: Tensor) -> Config:
    """The configuration of a bias's gradient, from the gradient of the output ``[N, C_out, H_out, W_out]``."""
    images, channels, height, width = grad_output.shape
    problem = Problem(images, 1, channels, 1, (height, width), (1, 1))
    return config_of(problem, grad_output, grad_output, Options(), "ieee")
