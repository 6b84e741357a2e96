"""Prepared calls of gradients: the input's, the weight's, both together, and the bias's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemmconv import pairs
from gemmconv.algorithms import Algorithm
from gemmconv.algorithms.fallback import with_fallback
from gemmconv.device import make_current
from gemmconv.kernels.base import BothGradients, Config, Pass, with_strides
from gemmconv.kernels.layout.transpose import prepare_via_channels_last
from gemmconv.kernels.program import Output, Program, concatenate
from gemmconv.ops.call_cache import find_or_make, tensor_signature
from gemmconv.ops.configs import DEFAULT_CONVENTION, Convention, OperatorCall
from gemmconv.ops.pass_programs import bias_grad_program, gradient_programs, pass_program
from gemmconv.ops.schemas import Tensors
from gemmconv.selection import NATIVE


def prepare_gradient(
    direction: Pass, algorithm: Algorithm, config: Config, tensors: Tensors, convention: Convention
) -> OperatorCall:
    """Prepare one gradient: the input's from (grad_output, weight), or the weight's from (grad_output, input)."""
    if (program := pass_program(direction, algorithm, config)) is not None:
        return _bind_gradients(program, tensors, convention)
    return _convert_results(direction, algorithm.prepare(config, direction), tensors[0], convention)


def prepare_gradients(
    gradients: pairs.Gradients, config: Config, weight_config: Config, tensors: Tensors, convention: Convention
) -> OperatorCall:
    """Prepare both gradients, from (grad_output, input, weight), by programs, by one and torch, or by no program."""
    of_first, *others = programs = gradient_programs(gradients, config, weight_config)
    if of_first is not None and not others:
        return _bind_gradients(of_first, tensors, convention)
    if any(programs) and not gradients.via_channels_last:
        passes = gradients.passes(config, weight_config)
        return _prepare_mixed(passes, tensors, convention, ours_is_of_input=of_first is not None)
    call = both_gradients(gradients, config, weight_config)
    if gradients.via_channels_last:
        call = prepare_via_channels_last(config, call, gradients.transposes_weight)
    return _convert_results("grads", call, tensors[0], convention)


def both_gradients(gradients: pairs.Gradients, config: Config, weight_config: Config) -> BothGradients:
    """Prepare both gradients: one call if an algorithm has it, else two, for which grad_output is made NCHW once."""
    both_torchs = gradients.input_grad is gradients.weight_grad is NATIVE and not gradients.via_channels_last
    if both_torchs and config.memory_format is weight_config.memory_format:
        gradients = gradients._replace(at_once=True)  # one call of torch's gives what two would, by the same kernels
    calls = [algorithm.prepare(of, direction) for direction, algorithm, of in gradients.passes(config, weight_config)]
    if gradients.at_once:
        return calls[0]
    (input_grad, weight_grad), shares = calls, gradients.shares_transpose(config, weight_config)

    def call(grad_output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        grad_output = grad_output.contiguous() if shares else grad_output
        return input_grad(grad_output, weight), weight_grad(grad_output, input)

    return call


def _prepare_mixed(
    passes: Sequence[pairs.Computation], tensors: Tensors, convention: Convention, ours_is_of_input: bool
) -> OperatorCall:
    """Prepare both gradients where torch's operator computes one of them, after a program of the other."""
    of_torch = convention._replace(with_bias_grad=False)  # the program's call gives that gradient
    of_input, of_weight = (convention, of_torch) if ours_is_of_input else (of_torch, convention)
    grad_output, input, weight = tensors
    input_grad = prepare_gradient(*passes[0], (grad_output, weight), of_input)
    weight_grad = prepare_gradient(*passes[1], (grad_output, input), of_weight)

    def call(grad_output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if ours_is_of_input:
            ours, by_torch = input_grad(grad_output, weight), weight_grad(grad_output, input)
        else:
            ours, by_torch = weight_grad(grad_output, input), input_grad(grad_output, weight)
        by_us, *bias = ours if convention.with_bias_grad else (ours,)
        return (by_us, by_torch, *bias) if ours_is_of_input else (by_torch, by_us, *bias)

    return call


def _bind_gradients(program: Program, tensors: Tensors, convention: Convention) -> OperatorCall:
    """Bind a program of gradients to tensors of these strides; its call returns gradients by the convention."""
    grad_output = tensors[0]
    of_bias = bias_grad_program(grad_output) if convention.with_bias_grad else None
    if of_bias is not None:
        program = concatenate(of_bias, program, program.arguments)
    call = convert_outputs(program, convention).bound(grad_output.device, tensors)
    return call if of_bias is not None else _add_bias_gradient(call, grad_output, convention)


def convert_outputs(program: Program, convention: Convention) -> Program:
    """A program of gradients, which writes the weight's and the bias's gradient by the convention."""

    def convert(output: Output) -> Output:
        if output.name not in ("grad_weight", "grad_bias"):
            return output
        if output.name == "grad_weight" and (strides := convention.weight_grad_strides) is not None:
            output = replace(output, strides=strides, written=torch.contiguous_format if strides[1] == 1 else None)
        return replace(output, dtype=convention.parameter_dtype)

    return replace(program, outputs=tuple(map(convert, program.outputs)))


def _convert_results(direction: Pass, call: OperatorCall, grad_output: Tensor, convention: Convention) -> OperatorCall:
    """A call that has no program, with its gradients converted by the convention; the weight's is its last."""
    strides, dtype = convention.weight_grad_strides, convention.parameter_dtype
    if direction != "input_grad" and strides is not None:
        if (returning := getattr(call, "returning", None)) is not None:  # one call of torch's writes these strides
            call = returning(strides)
        else:
            call = _convert_last(call, lambda one: with_strides(one, strides))
    if direction != "input_grad" and dtype is not None:
        call = _convert_last(call, lambda one: one.to(dtype))
    return _add_bias_gradient(call, grad_output, convention)


def _convert_last(call: OperatorCall, convert: Callable[[Tensor], Tensor]) -> OperatorCall:
    def converting(*tensors: Tensor) -> Any:
        results = call(*tensors)
        return (*results[:-1], convert(results[-1])) if isinstance(results, tuple) else convert(results)

    return converting


def _add_bias_gradient(call: OperatorCall, grad_output: Tensor, convention: Convention) -> OperatorCall:
    """A call that returns the bias's gradient after those of ``call`` if the convention asks for it."""
    if not convention.with_bias_grad:
        return call
    bias_gradient = _prepare_bias_gradient(grad_output, convention)  # by a kernel, whatever computes the others

    def with_bias(grad_output: Tensor, *tensors: Tensor) -> Any:
        results = call(grad_output, *tensors)
        grad_bias = bias_gradient(grad_output)
        return (*results, grad_bias) if isinstance(results, tuple) else (results, grad_bias)

    return with_bias


def bias_gradient(grad_output: Tensor) -> Tensor:
    """Sum a dense grad_output over images and pixels, to the same bits as in a call of several gradients."""
    with make_current(grad_output.device):
        key = "bias_grad", tensor_signature(grad_output)
        return find_or_make(key, lambda: _prepare_bias_gradient(grad_output, DEFAULT_CONVENTION))(grad_output)


def _prepare_bias_gradient(grad_output: Tensor, convention: Convention) -> Callable[[Tensor], Tensor]:
    def by_torch(grad_output: Tensor) -> Tensor:
        return grad_output.sum((0, *range(2, grad_output.dim())), dtype=convention.parameter_dtype)

    def prepare() -> Callable[[Tensor], Tensor]:
        if (program := bias_grad_program(grad_output)) is None:
            return by_torch
        return convert_outputs(program, convention).bound(grad_output.device, (grad_output,))

    return with_fallback(grad_output.device, prepare, lambda: by_torch)
