"""Compiles in the background the kernels that the modules after a module's call are likely to launch.

Most models call their modules in the order in which these were made, and each gets a signal or an image of the size
that the one before it returned. So the first call of a step is enough to guess the others, whose kernels are compiled
at the same time. At a new size that module guesses again, if kernels were compiled since its last guess. It makes no
further guess about a module that was called with another size than guessed. Only compilations depend on guesses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import nn

from gemmconv.kernels.base import strides_of, why_no_kernels
from gemmconv.ops.ahead import compile_forward_ahead
from gemmconv.ops.autocast import dtype_of, is_autocasting
from gemmconv.ops.autograd import compile_backward_ahead
from gemmconv.ops.schemas import Arguments, Tensors, WithoutData, checked_problem, memory_format, without_data

Call = tuple[Tensors, Arguments]  # arguments of the operator

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


def compile_followers(position: int, module: nn.Module, tensors: Tensors) -> None:
    """Have other threads guess and compile what the modules made after this one, which is called, will launch.

    Nothing is guessed from a module that other modules' calls were guessed for, if no kernel was compiled since the
    module's own last guess, or if the machine has few cores.

    Args:
        position: position of the module.
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
        if chain is None:
            chain = _chains[module] = _Chain(tensors[1].dim() - 2, shape, count)
        elif chain.compilations == count:
            chain.input_shape = shape
            return
        chain.input_shape, chain.compilations = shape, count
        recorded, cast = torch.is_grad_enabled(), torch.get_autocast_dtype("cuda") if is_autocasting("cuda") else None
        own = (_without_data(_as_images(module, one), recorded, cast) for one in tensors[:2])
        call = (*own, _without_data(tensors[2], recorded, cast)), _options_of(module)
        bind.in_background(partial(_compile_guesses, chain, position if is_first else None, call, recorded, cast))


def _forget_if_wrong(module: nn.Module, shape: torch.Size) -> None:
    """Make no further guesses about a module, and those behind it, if the guess about this call was wrong."""
    guess = _guesses.pop(module, None)
    if guess is None or guess.chain_shape != guess.chain.input_shape:
        return  # or it was about a call at another size of the chain's input
    axes, followers = guess.chain.axes, [one() for one in guess.chain.followers]
    if guess.shape[-axes:] != shape[-axes:] and module in followers:
        del guess.chain.followers[followers.index(module) :]


def _as_images(module: Any, tensor: Any) -> Any:
    """A layer's input or weight with a batch; that of a signal gets a height of 1, as the equal image has."""
    tensor = tensor if tensor.dim() == len(module.kernel_size) + 2 else tensor.unsqueeze(0)
    return tensor if tensor.dim() == 4 else tensor.unsqueeze(-2)


def compile_calls(calls: Sequence[Call], backward: bool, dtype: torch.dtype | None = None) -> list[Future[Any]]:
    """Compile in the background the kernels of calls and, if ``backward``, then those of their backward passes.

    ``dtype`` is the dtype of weights and biases, if calls cast them themselves.
    """
    recorded = [call for call in calls if backward and any(one is not None and one.requires_grad for one in call[0])]
    chosen = [compile_forward_ahead(*call) for call in calls]
    chosen += [compile_backward_ahead(*call, dtype) for call in recorded]
    return [future for future in chosen if future is not None]


def _compile_guesses(chain: _Chain, position: int | None, call: Call, recorded: bool, cast: torch.dtype | None) -> None:
    calls: list[Call] = []
    with suppress(Exception):  # a module is gone, or cannot be called with this input
        calls.extend(_guess_calls(chain, position, call, recorded, cast))
    compile_calls(calls, recorded, None if cast is None else torch.float32)


def _guess_calls(
    chain: _Chain, position: int | None, call: Call, recorded: bool, cast: torch.dtype | None
) -> Iterator[Call]:
    """Guess the calls of a chain's followers from the call before them.

    With the position of the module that is called, the chain's followers are found first: modules made after it.
    """
    tensors, arguments = call
    problem = checked_problem("conv_transpose2d", tensors, None, arguments)
    chain_shape, known = chain.input_shape, chain.followers.copy()
    for i in range(_MOST_GUESSES if position is not None else len(known)):
        module: Any = known[i]() if position is None else _unguessed[position + 1 + i]
        weight, bias = _find_tensor(module, "weight"), _find_tensor(module, "bias")
        # A layer of another rank, or with so many channels, is another network's.
        if weight.dim() != chain.axes + 2 or module.in_channels > 2 * problem.out_channels:
            return
        shape = problem.batch, module.in_channels, *problem.output_size
        strides = strides_of(shape, memory_format(*tensors[:2]))
        input = WithoutData.of(shape, strides, tensors[0].dtype, tensors[0].device)
        input.requires_grad_(any(one is not None and one.requires_grad for one in tensors))
        parameters = _without_data(_as_images(module, weight), recorded, cast), _without_data(bias, recorded, cast)
        tensors, arguments = (input, *parameters), _options_of(module)
        problem = checked_problem("conv_transpose2d", tensors, None, arguments)
        if math.prod(problem.output_shape) > _MOST_ELEMENTS:
            return
        if position is not None:
            del _unguessed[position + 1 + i]
            chain.followers.append(ref(module))
        _guesses[module] = _Guess(chain, chain_shape, input.shape)
        yield tensors, arguments


def _options_of(module: Any) -> Arguments:
    arguments: Arguments = module._arguments()[0]
    return arguments


def _find_tensor(module: nn.Module, name: str) -> Any:
    """A module's tensor; None where a parametrization computes it, which may change its state each time."""
    return module._parameters.get(name, vars(module).get(name))


def _without_data(tensor: Any, recorded: bool, cast: torch.dtype | None) -> Any:
    """A tensor's shape, strides and device, with its dtype after autocast."""
    if tensor is None:
        return None
    made = without_data(tensor, None if cast is None else dtype_of(tensor, cast))
    return made if recorded else made.requires_grad_(False)
