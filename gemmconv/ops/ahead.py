"""Compiles in the background what later calls on a GPU will launch; results never depend on it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

from gemmconv.algorithms.gemm_col2im import ahead
from gemmconv.kernels.base import Pass, why_no_kernels
from gemmconv.kernels.forms import launches
from gemmconv.kernels.program import Launch
from gemmconv.ops.call_cache import find_or_make, tensor_signature
from gemmconv.ops.configs import Convention, choose_algorithm, choose_gradients, default_convention
from gemmconv.ops.gradients import convert_outputs
from gemmconv.ops.pass_programs import bias_grad_program, gradient_programs, pass_program
from gemmconv.ops.schemas import (
    ARGUMENT_NAMES,
    Arguments,
    Options,
    Tensors,
    as_hashable,
    operator_name,
    with_parameter_dtype,
    without_data,
)


def launches_of(
    direction: Pass, tensors: Tensors, target_size: Any, arguments: Arguments, convention: Convention | None = None
) -> list[Launch]:
    """The launches of the call that ``implementation.prepare_call`` prepares; tensors may be without data."""
    options, where = Options(*as_hashable(arguments)), operator_name(direction)
    convention = convention or default_convention(direction, tensors)
    if direction == "grads":
        programs = gradient_programs(*choose_gradients(tensors, options))
    else:
        programs = [pass_program(direction, *choose_algorithm(direction, tensors, target_size, options))]
    if convention.with_bias_grad:
        programs.append(bias_grad_program(tensors[0]))
    if direction == "forward":
        tensors = with_parameter_dtype(tensors, convention.parameter_dtype)
    by_name, found = dict(zip(ARGUMENT_NAMES[where], tensors, strict=False)), list[Launch]()
    for program in (convert_outputs(one, convention) for one in programs if one is not None):
        found += launches(program, tuple(by_name[name] for name in program.arguments), tensors[0].device)
    return found


def compile_in_background(
    key: tuple[Hashable, ...], tensors: Tensors, list_launches: Callable[..., Iterable[Launch]]
) -> Future[Any] | None:
    """Have other threads compile the launches of a call, once for each signature.

    Errors are dropped, since the call itself raises them. Returns None where kernels are not available.

    Args:
        key: signature of the call but for its tensors.
        tensors: its tensors, the first of which has its device.
        list_launches: lists the launches of a call on the tensors that it gets, without data; it must hold no data.
    """
    device = tensors[0].device

    def compile() -> Future[Any] | None:
        if why_no_kernels(device) is not None:
            return None
        from gemmconv.kernels import bind  # needs the CUDA packages, which are there

        stand_ins, context = [without_data(one) for one in tensors], copy_context()
        context.run(ahead.set, True)
        return bind.compile_ahead(lambda: context.run(list_launches, *stand_ins), device)

    if device.type != "cuda":
        return None
    return find_or_make(("ahead", *key, *map(tensor_signature, tensors)), compile)


def compile_forward_ahead(tensors: Tensors, arguments: Arguments) -> Future[Any] | None:
    """Choose and compile in the background what a forward pass launches; see :func:`compile_in_background`."""
    key = "forward", repr(arguments)
    return compile_in_background(key, tensors, lambda *tensors: launches_of("forward", tensors, None, arguments))
