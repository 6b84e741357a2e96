"""Compiles ahead what the modules after one that is called for the first time will most likely want.

Most models call their modules in the order in which these were made, each with an image of the height and width that
the one before it gives, whatever lies between. So what a first step compiles can be guessed from its first call, and
compiled at the same time. A guess is made at most once about each module, and nothing but compilations follows from it.
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
from gemmconv.ops.autocast import casts, dtype_of
from gemmconv.ops.autograd import compile_ahead
from gemmconv.ops.implementation import compile_forward_ahead, without_data
from gemmconv.ops.schemas import Arguments, Options, Tensors, WithoutData, checked_problem, memory_format

Call = tuple[Tensors, Arguments]  # of the operator

_MOST = 16  # modules that one call has guesses made about
_MOST_ELEMENTS = 1 << 31  # of an output: a guess that comes to more is taken to be wrong
_next_place = itertools.count()
_uncalled: WeakValueDictionary[int, Any] = WeakValueDictionary()  # modules that nothing was guessed about, by place


def placed(module: nn.Module) -> int:
    """The place of a module that was just made: behind all that there are."""
    place = next(_next_place)
    _uncalled[place] = module
    return place


def compile_followers(place: int, module: nn.Module, tensors: Tensors) -> None:
    """Have other threads guess and compile what modules behind this one, which is called, will want.

    Nothing where this was done before, or a guess about this module was made; nor where cores are few.

    Args:
        place: of the module.
        module: with attributes that have the names of :class:`Options`; it may go at once.
        tensors: on CUDA, the input with or without a batch; they may go too.
    """
    if _uncalled.pop(place, None) is None:
        return
    with suppress(Exception):  # whatever is wrong with the call: it raises that itself
        if why_no_kernels(tensors[0].device) is not None:
            return
        from gemmconv.kernels import bind  # the CUDA packages are there

        recorded, cast = torch.is_grad_enabled(), torch.get_autocast_dtype("cuda") if casts("cuda") else None
        batch = tensors[0] if tensors[0].dim() == 4 else tensors[0].unsqueeze(0)
        call = tuple(_without_data(one, recorded, cast) for one in (batch, *tensors[1:])), _options_of(module)
        bind.in_background(partial(_compile_behind, place, call, recorded, cast))


def compile_calls(calls: Sequence[Call], backward: bool, given: torch.dtype | None = None) -> list[Future[Any]]:
    """Choose and compile in the background what calls want, and after all of that what their backward passes do.

    Args:
        calls, backward: what to compile for.
        given: the dtype of weights and biases, where calls cast them themselves.
    """
    recorded = [call for call in calls if backward and any(one is not None and one.requires_grad for one in call[0])]
    chosen = [*(compile_forward_ahead(*call) for call in calls), *(compile_ahead(*call, given) for call in recorded)]
    return [future for future in chosen if future is not None]


def _compile_behind(place: int, call: Call, recorded: bool, cast: torch.dtype | None) -> None:
    calls: list[Call] = []
    with suppress(Exception):  # of a module that is gone or cannot be called so
        calls.extend(_guessed(place, call, recorded, cast))
    compile_calls(calls, recorded, None if cast is None else torch.float32)


def _guessed(place: int, call: Call, recorded: bool, cast: torch.dtype | None) -> Iterator[Call]:
    """Calls of the modules behind a place, as far as they can be guessed from the call of the one that has it."""
    tensors, arguments = call
    problem = checked_problem("conv_transpose2d", tensors, None, arguments)
    for behind in range(place + 1, place + 1 + _MOST):
        module = _uncalled[behind]
        if module.in_channels > 2 * problem.out_channels:  # so many are another network's first
            return
        shape = problem.batch, module.in_channels, *problem.output_size
        strides = strides_of(shape, memory_format(*tensors[:2]))
        input = WithoutData.of(shape, strides, tensors[0].dtype, tensors[0].device)
        input.requires_grad_(any(one is not None and one.requires_grad for one in tensors))
        weight, bias = (_without_data(_kept(module, name), recorded, cast) for name in ("weight", "bias"))
        tensors, arguments = (input, weight, bias), _options_of(module)
        problem = checked_problem("conv_transpose2d", tensors, None, arguments)
        if math.prod(problem.output_shape) > _MOST_ELEMENTS:
            return
        del _uncalled[behind]
        yield tensors, arguments


def _options_of(module: nn.Module) -> Arguments:
    return tuple(getattr(module, name) for name in Options._fields)


def _kept(module: nn.Module, name: str) -> Any:
    """A module's tensor, None where a parametrization would compute it: it may change with every time."""
    return module._parameters.get(name, vars(module).get(name))


def _without_data(tensor: Any, recorded: bool, cast: torch.dtype | None) -> Any:
    """A tensor as a call has it after autocast."""
    if tensor is None:
        return None
    made = without_data(tensor, None if cast is None else dtype_of(tensor, cast))
    return made if recorded else made.requires_grad_(False)
