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
from torch.nn import Parameter

from gemmconv.dispatch import are_dense, as_plain, in_a_mode
from gemmconv.ops import implementation
from gemmconv.ops.autocast import casts, to_autocast_dtype
from gemmconv.ops.autograd import Backward, compile_ahead
from gemmconv.ops.implementation import planned, prepared
from gemmconv.ops.schemas import Arguments
from gemmconv.selection import torch_precision

Call = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_keys_of = torch._C._dispatch_keys
_has_grad, _has_autocast = torch.is_grad_enabled, torch._C._is_any_autocast_enabled
_USUAL = (Tensor, Parameter)  # types of a weight, and of a bias
_ASKED_ANEW = 64  # calls


def signature(input: Tensor, weight: Tensor, bias: Tensor | None, said: bytes) -> Hashable:
    """What a call is known by, None in a mode that is the dispatcher's.

    Args:
        input, weight, bias: torch's own tensors, or parameters.
        said: the arguments after them, as :func:`as_said` gives them.

    Raises:
        RuntimeError: a tensor has no strides.
    """
    if in_a_mode():
        return None
    cast_to = torch.get_autocast_dtype(input.device.type) if _has_autocast() else None
    dtype, of_bias, tracked = input.dtype, None, None
    if bias is not None:
        of_bias = bias.shape, bias.stride(), bias.dtype, bias.get_device(), bias.is_neg()
    if _has_grad():
        tracked = input.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad
    # A negated view has a key of its own, as wrappers have, which no parameter is.
    of_weight = weight.is_neg() if type(weight) is Parameter else _keys_of(weight).raw_repr()
    return (
        *(said, input.shape, input.stride(), dtype, input.get_device(), _keys_of(input).raw_repr()),
        *(weight.shape, weight.stride(), weight.dtype, weight.get_device(), of_weight, of_bias, cast_to, tracked),
        torch_precision(dtype, input.device) if dtype is torch.float32 and input.is_cuda else None,
    )


def as_said(arguments: Arguments) -> bytes | None:
    """Arguments as a key: 1, 1.0 and True are equal, but not all allowed. None of those that are no plain data."""
    try:
        return marshal.dumps(arguments, 2)
    except ValueError:
        return None


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
    if in_a_mode() or not are_dense(*tensors):
        return None
    if not casts(input.device.type):
        return _recording(tensors, arguments)
    dtype = torch.get_autocast_dtype(input.device.type)

    def cast(tensor: Tensor | None) -> Any:
        if tensor is None or tensor.dtype in (dtype, torch.float64) or not tensor.is_floating_point():
            return tensor
        return to_autocast_dtype(tensor, dtype)

    of_cast = _recording(tuple(map(cast, tensors)), arguments)
    return lambda input, weight, bias: of_cast(cast(input), cast(weight), cast(bias))


def _recording(tensors: tuple[Any, ...], arguments: Arguments) -> Call:
    wanted = [one is not None and one.requires_grad for one in tensors]
    recorded = torch.is_grad_enabled() and any(wanted)
    if recorded and tensors[0].is_cuda:
        compile_ahead(tensors, arguments)  # while the forward pass's kernels compile, too
    forward = prepared("forward", tensors, None, arguments)
    if not recorded:
        return forward
    recipe = _Recipe(forward, Backward.of(tensors, arguments), wanted[0], wanted[1])
    apply: Any = super(torch.autograd.Function, _Recorded).apply  # torch's own looks for transforms, of which are none
    return lambda input, weight, bias: apply(input, weight, bias, recipe)


class _Recipe:
    """What calls of one kind do: the forward pass, what the dispatcher needs of them for gradients, known gradients."""

    def __init__(self, forward: Call, backward: Backward, of_input: bool, of_weight: bool) -> None:
        self.forward, self.backward = forward, backward
        self.of_input, self.of_weight = of_input, of_weight
        self.gradients: dict[Hashable, Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]] = {}
        self.unasked = [0, 0, 0]

    def asked(self, ctx: Any) -> tuple[bool, bool, bool]:
        """Of which tensors this backward pass wants the gradient.

        torch tells it of the nodes that gradients go to. It refuses to of leaves that autograd.grad asks for, and its
        refusal takes 100 us, so for a while after one the gradient is taken to be asked for: right whether it is or
        not. That of a bias, which is little, comes with the weight's.
        """
        of_input, of_weight, of_bias, _ = ctx.needs_input_grad
        nodes = ctx.next_functions
        of_weight = of_weight and self._is_asked(1, nodes)
        of_input = of_input and self._is_asked(0, nodes)
        return of_input, of_weight, of_bias and (of_weight or self._is_asked(2, nodes))

    def _is_asked(self, index: int, nodes: tuple[Any, ...]) -> bool:
        if self.unasked[index]:
            self.unasked[index] -= 1
            return True
        try:
            return _is_executed(nodes[index][0])
        except RuntimeError:
            self.unasked[index] = _ASKED_ANEW
            return True


_is_executed = torch._C._will_engine_execute_node


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, recipe: _Recipe) -> Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(input if recipe.of_weight else None, weight if recipe.of_input else None)
        return recipe.forward(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        recipe, (input, weight) = ctx.recipe, ctx.saved_tensors
        asked = recipe.asked(ctx)
        if torch.is_grad_enabled() or type(grad) is not Tensor or in_a_mode():  # a second backward pass may follow
            return *recipe.backward(*as_plain((grad,)), input, weight, *asked), None
        precision = torch_precision(grad.dtype, grad.device) if grad.dtype is torch.float32 else None
        key = grad.stride(), grad.is_neg(), asked, precision
        known = recipe.gradients.get(key)
        if known is None:
            if not are_dense(grad):
                return *recipe.backward(grad, input, weight, *asked), None
            known = recipe.gradients[key] = recipe.backward.prepared(grad, input, weight, *asked)
        return *known(grad, input, weight), None


def are_usual(input: object, weight: object, bias: object) -> bool:
    """Whether these are torch's own tensors, of no other class, and parameters."""
    return type(input) is Tensor and type(weight) in _USUAL and (bias is None or type(bias) in _USUAL)


def known(input: Tensor, weight: Tensor, bias: Tensor | None, said: bytes) -> tuple[Call | None, Hashable]:
    """What such a call was found to do, if it is known, and its signature."""
    try:
        key = signature(input, weight, bias, said)
    except RuntimeError:  # of tensors without strides
        return None, None
    return implementation.plans.get(key), key


def keep(key: Hashable, call: Call) -> None:
    """Keep what a call of this signature was found to do."""
    if key is not None:
        planned(key, lambda: call)
