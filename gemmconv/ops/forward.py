"""Prepared calls of forward passes: on images, or on signals and with parameters that the call casts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from gemmconv.algorithms import Algorithm
from gemmconv.kernels.base import Config
from gemmconv.kernels.forms import name_of_cast
from gemmconv.kernels.program import Output, Program
from gemmconv.ops.configs import Convention, OperatorCall
from gemmconv.ops.pass_programs import pass_program
from gemmconv.ops.schemas import Tensors, with_parameter_dtype


def prepare_forward(algorithm: Algorithm, config: Config, tensors: Tensors, convention: Convention) -> OperatorCall:
    """Prepare a forward pass: its program, or where there is none, the algorithm's own call on tensors.

    A convention has ``is_signal`` or ``parameter_dtype``, never both: under autocast signals are not prepared
    (:func:`plain.prepare_signal`).
    """
    if (program := pass_program("forward", algorithm, config)) is not None:
        program = _with_signal_output(program) if convention.is_signal else program
        operands = with_parameter_dtype(tensors, convention.parameter_dtype)
        return also_return_casts(program, tensors, convention).bound(config.device, operands)
    call = algorithm.prepare(config, "forward")
    if convention.is_signal:
        return lambda input, weight, bias: call(input.unsqueeze(-2), weight.unsqueeze(-2), bias).squeeze(-2)
    if convention.parameter_dtype is None:
        return call

    def with_casts(input: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        weight, bias = weight.to(config.dtype), None if bias is None else bias.to(config.dtype)
        output = call(input, weight, bias)
        casts = (weight,) if bias is None else (weight, bias)
        return (output, *casts) if convention.returns_casts else output

    return with_casts


def also_return_casts(program: Program, tensors: Tensors, convention: Convention) -> Program:
    """A forward pass's program, which returns its casts of weight and bias too if the convention asks for them."""
    by_name, outputs = dict(zip(program.arguments, tensors, strict=False)), list(program.outputs)
    for operand in program.operands if convention.returns_casts else ():  # the weight comes first
        tensor = by_name[operand.given_as]
        if operand.given_as != "input" and tensor is not None:
            outputs.append(Output(name_of_cast(operand.name), tuple(tensor.shape), tensor.stride()))
    return replace(program, outputs=tuple(outputs))


def _with_signal_output(program: Program) -> Program:
    """A forward pass of images of height 1, whose output has no axis for the height."""
    (output,) = program.outputs
    (batch, channels, _, length), (of_batch, of_channel, _, of_length) = output.shape, output.strides
    signal = replace(output, shape=(batch, channels, length), strides=(of_batch, of_channel, of_length))
    return replace(program, outputs=(signal,))
