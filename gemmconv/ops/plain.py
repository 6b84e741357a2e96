"""Plain eager calls of conv_transpose2d, which do without the dispatcher: one look-up, then what was prepared.

A call is known by all that decides what it does: its tensors' kinds, shapes and strides, its arguments, whether
gradients are recorded, and the state of this thread: modes, transforms, autocast, profiler, precision. What a known
call does has been checked and chosen when it was first made. Gradients come from a node of autograd that holds the same
for the backward pass, whose calls are known by the gradient's strides.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gemmconv.dispatch import NO_MODE, as_plain, autocast_of_plain, thread_state
from gemmconv.ops import implementation
from gemmconv.ops.autocast import to_autocast_dtype
from gemmconv.ops.autograd import Backward, is_asked_for
from gemmconv.ops.implementation import planned, prepared
from gemmconv.ops.schemas import Arguments
from gemmconv.selection import torch_precision

Call = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_keys_of = torch._C._dispatch_keys
_profiled = torch._C._autograd._profiler_enabled
_function_modes = torch._C._len_torch_function_stack


def signature(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> Hashable:
    """What a call is known by, None where its arguments are of unusual types. The tensors are torch's own."""
    try:
        said = marshal.dumps(arguments, 2)  # 1, 1.0 and True are equal, but not what they are allowed for
    except ValueError:
        return None
    included, excluded = thread_state()
    casts = None if excluded == NO_MODE[1] else torch.get_autocast_dtype(input.device.type)
    tracked = None
    if torch.is_grad_enabled():
        tracked = input.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad
    of_bias = None
    if bias is not None:
        of_bias = bias.shape, bias.stride(), bias.dtype, bias.device, _keys_of(bias).raw_repr()
    dtype, device = input.dtype, input.device
    return (
        *(input.shape, input.stride(), dtype, device, _keys_of(input).raw_repr()),
        *(weight.shape, weight.stride(), weight.dtype, weight.device, _keys_of(weight).raw_repr()),
        *(of_bias, said, included, excluded, casts, tracked),
        *(_function_modes(), _profiled(), forward_ad._current_level, torch_precision(dtype, device)),
    )


def prepare(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> Call | None:
    """What such calls do, None where they are to go through the dispatcher.

    Args:
        input, weight, bias: the input may be without a batch.
        arguments: checked and in the order of the operator's, all of them.
    """
    if input.dim() == 3:
        of_batch = prepare(input.unsqueeze(0), weight, bias, arguments)
        return of_batch and (lambda input, weight, bias: of_batch(input.unsqueeze(0), weight, bias).squeeze(0))
    tensors = input, weight, bias
    if forward_ad._current_level >= 0 or (casts := autocast_of_plain(*tensors)) is None:
        return None
    if casts != input.device.type:
        return _recording(tensors, arguments)
    dtype = torch.get_autocast_dtype(input.device.type)

    def cast(tensor: Tensor | None) -> Any:
        if tensor is None or tensor.dtype in (dtype, torch.float64) or not tensor.is_floating_point():
            return tensor
        return to_autocast_dtype(tensor, dtype)

    of_cast = _recording(tuple(map(cast, tensors)), arguments)
    return lambda input, weight, bias: of_cast(cast(input), cast(weight), cast(bias))


def _recording(tensors: tuple[Any, ...], arguments: Arguments) -> Call:
    forward = prepared("forward", tensors, None, arguments)
    wanted = [one is not None and one.requires_grad for one in tensors]
    if not (torch.is_grad_enabled() and any(wanted)):
        return forward
    recipe = _Recipe(forward, Backward.of(tensors, arguments), wanted[0], wanted[1])
    apply: Any = super(torch.autograd.Function, _Recorded).apply  # torch's own looks for transforms, of which are none
    return lambda input, weight, bias: apply(input, weight, bias, recipe)


class _Recipe:
    """What calls of one kind do: the forward pass, what the dispatcher needs of them for gradients, known gradients."""

    def __init__(self, forward: Call, backward: Backward, of_input: bool, of_weight: bool) -> None:
        self.forward, self.backward = forward, backward
        self.of_input, self.of_weight = of_input, of_weight
        self.gradients: dict[Hashable, Callable[..., tuple[Tensor | None, Tensor | None]]] = {}


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, recipe: _Recipe) -> Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(input if recipe.of_weight else None, weight if recipe.of_input else None)
        return recipe.forward(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        recipe, (input, weight) = ctx.recipe, ctx.saved_tensors
        asked = is_asked_for(ctx, 0), is_asked_for(ctx, 1), is_asked_for(ctx, 2)
        if torch.is_grad_enabled() or type(grad) is not Tensor:  # a second backward pass may follow
            return *recipe.backward(*as_plain((grad,)), input, weight, *asked), None
        of_input, of_weight, of_bias = asked
        grad_input = grad_weight = None
        if of_input or of_weight:
            precision = torch_precision(grad.dtype, grad.device)
            key = grad.stride(), _keys_of(grad).raw_repr(), thread_state(), of_input, of_weight, precision
            known = recipe.gradients.get(key)
            if known is None:
                if autocast_of_plain(grad) is None:
                    return *recipe.backward(grad, input, weight, *asked), None
                known = recipe.gradients[key] = recipe.backward.prepared(grad, input, weight, of_input, of_weight)
            grad_input, grad_weight = known(grad, input, weight)
        return grad_input, grad_weight, grad.sum((0, 2, 3)) if of_bias else None, None


def known(key: Hashable) -> Call | None:
    """What a call of this signature was found to do."""
    call: Call | None = implementation.plans.get(key)
    return call


def keep(key: Hashable, call: Call) -> None:
    """Keep what a call of this signature was found to do."""
    if key is not None:
        planned(key, lambda: call)
