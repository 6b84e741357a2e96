"""Compiles in the background the kernels that the modules after a module's first call are likely to launch.

Most models call their modules in the order in which these were made, and each gets an image of the height and width
that the one before it returned. So the first call of a step is enough to guess the others, whose kernels are compiled
at the same time. At most one guess is made about each module, and nothing but compilations depends on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from gemmconv.kernels.base import strides_of, why_no_kernels
from gemmconv.ops.ahead import compile_forward_ahead
from gemmconv.ops.autocast import dtype_of, is_autocasting
from gemmconv.ops.autograd import compile_backward_ahead
from gemmconv.ops.schemas import Arguments, Options, Tensors, WithoutData, checked_problem, memory_format, without_data

Call = tuple[Tensors, Arguments]  # arguments of the operator

_MOST_GUESSES = 16  # modules, for one call
_MOST_ELEMENTS = 1 << 31  # a guess with a larger output is taken to be wrong
_next_position = itertools.count()
_unguessed: WeakValueDictionary[int, Any] = WeakValueDictionary()  # modules without a guess yet, by position


def register(module: nn.Module) -> int:
    """Register a new module, and return its position in the order in which modules are made."""
    position = next(_next_position)
    _unguessed[position] = module
    return position


def compile_followers(position: int, module: nn.Module, tensors: Tensors) -> None:
    """Have other threads guess and compile what the modules made after this one, which is called, will launch.

    Does nothing if this module was called or guessed before, or if the machine has few cores.

    Args:
        position: position of the module.
        module: has attributes with the names of :class:`Options`; no reference to it is kept.
        tensors: on CUDA, the input with or without a batch; no reference to them is kept.
    """
    if _unguessed.pop(position, None) is None:
        return
    with suppress(Exception):  # the call itself raises what is wrong with it
        if why_no_kernels(tensors[0].device) is not None:
            return
        from gemmconv.kernels import bind  # needs the CUDA packages, which are there

        recorded, cast = torch.is_grad_enabled(), torch.get_autocast_dtype("cuda") if is_autocasting("cuda") else None
        batch = tensors[0] if tensors[0].dim() == 4 else tensors[0].unsqueeze(0)
        call = tuple(_without_data(one, recorded, cast) for one in (batch, *tensors[1:])), _options_of(module)
        bind.in_background(partial(_compile_guesses, position, call, recorded, cast))


def compile_calls(calls: Sequence[Call], backward: bool, dtype: torch.dtype | None = None) -> list[Future[Any]]:
    """Choose and compile in the background what calls and, if ``backward``, afterwards their backward passes launch.

    ``dtype`` is the dtype of weights and biases, if calls cast them themselves.
    """
    recorded = [call for call in calls if backward and any(one is not None and one.requires_grad for one in call[0])]
    chosen = [compile_forward_ahead(*call) for call in calls]
    chosen += [compile_backward_ahead(*call, dtype) for call in recorded]
    return [future for future in chosen if future is not None]


def _compile_guesses(position: int, call: Call, recorded: bool, cast: torch.dtype | None) -> None:
    calls: list[Call] = []
    with suppress(Exception):  # a module is gone, or cannot be called with this input
        calls.extend(_guess_calls(position, call, recorded, cast))
    compile_calls(calls, recorded, None if cast is None else torch.float32)


def _guess_calls(position: int, call: Call, recorded: bool, cast: torch.dtype | None) -> Iterator[Call]:
    """Guess calls of the modules after a position from the call of the module at this position."""
    tensors, arguments = call
    problem = checked_problem("conv_transpose2d", tensors, None, arguments)
    for later in range(position + 1, position + 1 + _MOST_GUESSES):
        module = _unguessed[later]
        if module.in_channels > 2 * problem.out_channels:  # a layer with so many is another network's first
            return
        shape = problem.batch, module.in_channels, *problem.output_size
        strides = strides_of(shape, memory_format(*tensors[:2]))
        input = WithoutData.of(shape, strides, tensors[0].dtype, tensors[0].device)
        input.requires_grad_(any(one is not None and one.requires_grad for one in tensors))
        weight, bias = (_without_data(_find_tensor(module, name), recorded, cast) for name in ("weight", "bias"))
        tensors, arguments = (input, weight, bias), _options_of(module)
        problem = checked_problem("conv_transpose2d", tensors, None, arguments)
        if math.prod(problem.output_shape) > _MOST_ELEMENTS:
            return
        del _unguessed[later]
        yield tensors, arguments


def _options_of(module: nn.Module) -> Arguments:
    return tuple(getattr(module, name) for name in Options._fields)


def _find_tensor(module: nn.Module, name: str) -> Any:
    """A module's tensor; None where a parametrization computes it, which may change its state each time."""
    return module._parameters.get(name, vars(module).get(name))


def _without_data(tensor: Any, recorded: bool, cast: torch.dtype | None) -> Any:
    """A tensor's shape, strides and device, with its dtype after autocast."""
    if tensor is None:
        return None
    made = without_data(tensor, None if cast is None else dtype_of(tensor, cast))
    return made if recorded else made.requires_grad_(False)
