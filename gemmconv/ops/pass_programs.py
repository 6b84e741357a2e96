"""Programs of passes: the steps on a GPU of a forward pass, of a gradient, of both gradients or of a layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemmconv import pairs, selection
from gemmconv.algorithms import Algorithm
from gemmconv.device import DeviceSpec
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Pass, strides_of, why_no_kernels
from gemmconv.kernels.program import Program, concatenate
from gemmconv.kernels.splits import bias_grad
from gemmconv.ops.configs import config_of
from gemmconv.ops.schemas import Options, WithoutData


def pass_program(direction: Pass, algorithm: Algorithm, config: Config) -> Program | None:
    """A forward pass or one gradient as a program; None where torch's operator or the CPU computes it."""
    if config.device.type != "cuda":
        return None
    choice = algorithm.choice(config, direction)
    return None if choice is None else choice.program(config, direction)


def gradient_programs(gradients: pairs.Gradients, config: Config, weight_config: Config) -> list[Program | None]:
    """The program of both gradients, the weight's first; where torch or a CPU computes one of them, None in its place.

    So without a None it is one program for both, in which a tensor that both need transposed is transposed once.
    """
    programs: list[Any] = [pass_program(*one) for one in gradients.passes(config, weight_config)]
    if None in programs:
        return programs
    *of_input, both = programs
    for program in of_input:
        both = concatenate(both, program, ("grad_output", "input", "weight"))
    if not gradients.via_channels_last:
        return [both]
    strides = strides_of(config.problem.input_shape, config.memory_format)
    grad_input = replace(both.outputs[0], strides=strides, written=both.outputs[0].written or torch.channels_last)
    return [replace(both, outputs=(grad_input, *both.outputs[1:]))]


def layer_programs(config: Config, backward: bool) -> list[Program]:
    """The programs of a layer's forward pass and, if wanted, of its gradients; torch's operator needs none."""
    programs = [pass_program("forward", selection.choose(config, "auto", "conv_transpose2d"), config)]
    if backward:
        configs, shape = (replace(config, bias=False),) * 2, config.problem.output_shape
        programs += gradient_programs(pairs.choose_pair(*configs, "auto", "conv_transpose2d_grads"), *configs)
        grad = WithoutData.of(shape, strides_of(shape, config.memory_format), config.dtype, config.device)
        programs.append(bias_grad_program(grad, config.spec) if config.bias else None)
    return [program for program in programs if program is not None]


def bias_grad_program(grad_output: Tensor, spec: DeviceSpec | None = None) -> Program | None:
    """The program of a bias's gradient, from grad_output of images or volumes; None where torch computes it.

    ``spec`` is the device to compute on, if it is not the one here.
    """
    images, channels, *size = grad_output.shape
    problem = Problem(images, 1, channels, 1, (1, math.prod(size)), (1, 1))
    config = config_of(problem, grad_output, grad_output, Options(precision="ieee"))
    config = config if spec is None else replace(config, spec=spec)
    if config.device.type != "cuda" or why_no_kernels(config.device, config.spec) is not None:
        return None
    return bias_grad.program(config)
