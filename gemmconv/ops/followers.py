"""Compiles in the background the kernels that the modules after a module's call are likely to launch.

Most models call their modules in the order in which these were made, and each gets a signal or an image of the size
that the one before it returned. So the first call of a step is enough to guess the others, whose kernels are compiled
at the same time. At a new size that module guesses again, if kernels were compiled since its last guess. If a module is
called with another size than guessed, no further guess is made about it and those behind it. (It is not noticed if the
cache already has that call.) Only compilations depend on guesses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import nn

from gemmconv.kernels.base import strides_of, why_no_kernels
from gemmconv.ops.ahead import compile_forward_ahead
from gemmconv.ops.autocast import dtype_of, is_autocasting
from gemmconv.ops.autograd import compile_backward_ahead
from gemmconv.ops.schemas import Arguments, Tensors, WithoutData, checked_problem, memory_format, without_data

Given = tuple[Tensors, Arguments]  # what a call of the operator is given

_MOST_GUESSES = 16  # modules, for one call
_MOST_ELEMENTS = 1 << 31  # a guess with a larger output is taken to be wrong
_next_position = itertools.count()
_unguessed: WeakValueDictionary[int, Any] = WeakValueDictionary()  # modules without a guess yet, by position


@dataclass
class _Chain:
    """The modules that are guessed to follow a module, in the order of their calls."""

    axes: int  # of all of them, 1 for signals and 2 for images
    input_shape: torch.Size  # in the module's last call that was not in the cache
    compilations: int  # of this process when the last guess was made
    was_wrong: bool = False  # whether a guess was wrong, after which no follower is added
    followers: list[ref[nn.Module]] = field(default_factory=list)


class _Guess(NamedTuple):
    """A guess about the next call of a follower."""

    chain: _Chain
    chain_shape: torch.Size  # the chain's input_shape
    shape: torch.Size  # of the follower's input, as an image


_chains: WeakKeyDictionary[nn.Module, _Chain] = WeakKeyDictionary()  # of the modules that guess
_guesses: WeakKeyDictionary[nn.Module, _Guess] = WeakKeyDictionary()  # of the followers


def register(module: nn.Module) -> int:
    """Register a new module, and return its position in the order in which modules are made."""
    position = next(_next_position)
    _unguessed[position] = module
    return position


def forget(position: int) -> None:
    """Take a module out of that order, which is no layer of ours any more."""
    _unguessed.pop(position, None)


def compile_followers(position: int, module: Any, tensors: Tensors) -> None:
    """Have other threads guess and compile what the modules made after this one, which is called, will launch.

    Nothing is guessed from a module that other modules' calls were guessed for, if no kernel was compiled since the
    module's own last guess, or if the machine has few cores.

    Args:
        module: a layer of signals or images; no reference to it is kept.
        tensors: on CUDA, the input with or without a batch; no reference to them is kept.
    """
    shape = tensors[0].shape
    _forget_if_wrong(module, shape)
    is_first, chain = _unguessed.pop(position, None) is not None, _chains.get(module)
    if not is_first and (chain is None or chain.input_shape == shape):
        return
    with suppress(Exception):  # the call itself raises what is wrong with it
        if why_no_kernels(tensors[0].device) is not None:
            return
        from gemmconv.kernels import bind  # needs the CUDA packages, which are there

        count = bind.compilation_count()
        if is_first or chain is None:  # first again, with a new position, if it was converted again
            chain = _chains[module] = _Chain(tensors[1].dim() - 2, shape, count)
        elif chain.compilations == count:
            chain.input_shape = shape
            return
        chain.input_shape, chain.compilations = shape, count
        recorded, cast = torch.is_grad_enabled(), torch.get_autocast_dtype("cuda") if is_autocasting("cuda") else None
        call = tuple(_without_data(module, one, recorded, cast) for one in tensors), module._arguments_and_key()[0]
        guesses = _guess_calls(chain, shape, position if is_first else None, call, recorded, cast)

        def compile_guesses() -> None:
            calls: list[Given] = []
            with suppress(Exception):  # a module is gone, or cannot be called with this input
                calls.extend(guesses)
            compile_calls(calls, recorded, None if cast is None else torch.float32)

        bind.in_background(compile_guesses)


def _forget_if_wrong(module: nn.Module, shape: torch.Size) -> None:
    """Make no further guesses about a module, and those behind it, if the guess about this call was wrong."""
    guess = _guesses.pop(module, None)
    if guess is None or guess.chain_shape != guess.chain.input_shape:
        return  # or it was about a call at another size of the chain's input
    axes, followers = guess.chain.axes, [one() for one in guess.chain.followers]
    if guess.shape[-axes:] != shape[-axes:] and module in followers:
        del guess.chain.followers[followers.index(module) :]
        guess.chain.was_wrong = True


def compile_calls(calls: Sequence[Given], backward: bool, dtype: torch.dtype | None = None) -> list[Future[Any]]:
    """Compile in the background the kernels of calls and, if ``backward``, then those of their backward passes.

    ``dtype`` is the dtype of weights and biases, if calls cast them themselves.
    """
    recorded = [call for call in calls if backward and any(one is not None and one.requires_grad for one in call[0])]
    chosen = [compile_forward_ahead(*call) for call in calls]
    chosen += [compile_backward_ahead(*call, dtype) for call in recorded]
    return [future for future in chosen if future is not None]


def _guess_calls(
    chain: _Chain, chain_shape: torch.Size, position: int | None, call: Given, recorded: bool, cast: torch.dtype | None
) -> Iterator[Given]:
    """Guess the calls of a chain's followers from the call of its first module, whose input has ``chain_shape``.

    With the position of that module, the chain's followers are found first: modules made after it.
    """
    tensors, arguments = call
    problem = checked_problem("conv_transpose2d", tensors, None, arguments)
    known = chain.followers.copy()
    for i in range(_MOST_GUESSES if position is not None else len(known)):
        module: Any = known[i]() if position is None else _unguessed[position + 1 + i]
        # None for a tensor that a parametrization computes, which may change its state each time.
        weight, bias = (module._parameters.get(name, vars(module).get(name)) for name in ("weight", "bias"))
        if weight.dim() != chain.axes + 2:  # a layer of another rank is called with other outputs than these
            continue
        if module.in_channels > 2 * problem.out_channels:  # with so many channels it is another network's
            return
        shape = problem.batch, module.in_channels, *problem.output_size
        strides = strides_of(shape, memory_format(*tensors[:2]))
        input = WithoutData.of(shape, strides, tensors[0].dtype, tensors[0].device)
        input.requires_grad_(any(one is not None and one.requires_grad for one in tensors))
        parameters = (_without_data(module, one, recorded, cast) for one in (weight, bias))
        tensors, arguments = (input, *parameters), module._arguments_and_key()[0]
        problem = checked_problem("conv_transpose2d", tensors, None, arguments)
        if math.prod(problem.output_shape) > _MOST_ELEMENTS:
            return
        if position is not None:
            if chain.was_wrong:
                return
            del _unguessed[position + 1 + i]
            chain.followers.append(ref(module))
        _guesses[module] = _Guess(chain, chain_shape, input.shape)
        yield tensors, arguments


def _without_data(module: Any, tensor: Any, recorded: bool, cast: torch.dtype | None) -> Any:
    """A stand-in for a tensor of a layer's call as images, with the dtype that autocast gives it.

    An input gets a batch, if it has none; inputs and weights of signals get a height of 1.
    """
    if tensor is None:
        return None
    image = tensor
    with torch.no_grad():  # else views would be autograd nodes of this thread
        if tensor.dim() > 1:  # no bias
            image = image if image.dim() == len(module.kernel_size) + 2 else image.unsqueeze(0)
            image = image if image.dim() == 4 else image.unsqueeze(-2)
    made = without_data(image, None if cast is None else dtype_of(tensor, cast))
    return made.requires_grad_(recorded and tensor.requires_grad)
