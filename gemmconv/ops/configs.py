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
from gemmconv.kernels.base import Config, Pass, strides_of
from gemmconv.kernels.program import Strides
from gemmconv.ops.schemas import Options, Tensors, checked_problem, memory_format, operator_name

Chosen = Algorithm | pairs.Gradients  # the algorithm of a pass, or those of both gradients
Prepared = Callable[..., Any]  # a prepared call: what it takes and returns is said by a Convention


class Convention(NamedTuple):
    """What a prepared call takes and returns where that differs from its operator. Each field is for some passes:

        field                 passes     what it asks for, and why
        weight_grad_strides   gradients  the weight's gradient in these strides, so that optimizers need not copy it
        with_bias_grad        gradients  the bias's gradient too, after the others
        parameter_dtype       all        weight and bias, and their gradients, in this dtype: the call casts (autocast)
        returns_casts         forward    these casts too, after the output: autocast keeps them, and gradients need them
        trained               forward    a weight that changes before the next call: a CPU keeps no packed copy of it
        is_signal             forward    tensors of one axis, whose memory is that of images of height 1

    By default a call takes and returns what its operator does, except that strides are those of a contiguous tensor.
    """

    weight_grad_strides: Strides | None = None
    with_bias_grad: bool = False
    parameter_dtype: torch.dtype | None = None
    returns_casts: bool = False
    trained: bool = False
    is_signal: bool = False


DEFAULT_CONVENTION = Convention()  # made once, since known calls ask for it


def default_convention(direction: Pass, tensors: Tensors) -> Convention:
    """The convention of an operator's schema: ``grads`` gives a channels_last weight a gradient in channels_last."""
    if direction != "grads" or memory_format(tensors[2], tensors[2]) is torch.contiguous_format:
        return DEFAULT_CONVENTION
    return Convention(strides_of(tensors[2].shape, torch.channels_last))


def config_of(problem: Problem, first: Tensor, second: Tensor, options: Options, bias: bool = False) -> Config:
    """The configuration of a pass on two tensors."""
    settings = options.precision, options.workspace_limit, memory_format(first, second), bias, options.algorithm
    return selection.current_config(problem, first.dtype, first.device, *settings)


def choose_pass(
    direction: Pass, tensors: Tensors, sizes: Any, options: Options, trained: bool = False
) -> tuple[Chosen, Config, Config]:
    """Check the arguments of a pass, and choose its algorithm, or those of both gradients.

    Returns it with the configurations of the input's and the weight's gradient; any other pass has its own twice.
    """
    where, (first, second, *others) = operator_name(direction), tensors
    problem = checked_problem(where, tensors, sizes, options)
    if direction == "grads":
        configs = config_of(problem, first, others[0], options), config_of(problem, first, second, options)
        return pairs.choose_pair(*configs, options.algorithm, where), *configs
    config = config_of(problem, first, second, options, bias=bool(others) and others[0] is not None)
    config = replace(config, trained=trained)
    return selection.choose(config, options.algorithm, where, direction), config, config
