"""Calls that record gradients: their forward passes, and the autograd nodes that compute their gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from gemmconv.dispatch import are_dense, as_plain
from gemmconv.ops.autocast import Cast, cast_cache, is_cacheable
from gemmconv.ops.autograd import Backward, Gradients, Needs, compile_backward_ahead, required_gradients
from gemmconv.ops.configs import Convention
from gemmconv.ops.implementation import prepare_call
from gemmconv.ops.schemas import Arguments, Tensors
from gemmconv.ops.signatures import gradient_signature

PlainCall = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # a prepared call of input, weight, bias

_CALLS_AFTER_REFUSAL = 64  # backward passes that do not query torch after it refused to answer
_FULL_PASSES, _QUERIED_ONE_IN = 8, 8  # after so many passes in a row that needed all gradients, one in so many queries

_is_executed = torch._C._will_engine_execute_node


def prepare_with_autograd(
    tensors: Tensors, arguments: Arguments, parameters: Tensors | None = None, is_signal: bool = False
) -> PlainCall:
    """Prepare the call on such tensors, with an autograd node if gradients are recorded and a tensor requires one.

    Args:
        tensors, arguments: arguments of the operator.
        parameters: weight and bias before autocast, if the call casts them itself; in ``tensors`` they have no data.
        is_signal: whether the call takes signals, of which ``tensors`` are views as images of height 1.
    """
    requires = of_input, of_weight, _ = required_gradients(*tensors)
    recorded = torch.is_grad_enabled() and any(requires)
    dtype = None if parameters is None else parameters[0].dtype
    if recorded and tensors[0].is_cuda:
        compile_backward_ahead(tensors, arguments, dtype)  # while the forward pass's kernels compile, too
    if parameters is None:
        convention = Convention(trained=recorded and of_weight and tensors[0].is_cpu, is_signal=is_signal)
        forward: Callable[..., Any] = prepare_call("forward", tensors, None, arguments, convention)
    else:
        forward = _forward_with_casts(tensors, arguments, parameters[0], saves=recorded and of_input)
    if not recorded:
        return forward if dtype is None else lambda *tensors: forward(*tensors)[0]
    kind = _SignalNode if is_signal else _CallNode if dtype is None else _CallNodeWithCasts
    return with_node(forward, Backward.of(tensors, arguments, dtype), requires, kind)


def with_node(forward: Callable[..., Any], backward: Any, requires: Needs, kind: Any = None) -> PlainCall:
    """The call ``forward`` with an autograd node of a class, :class:`_CallNode` by default; see :class:`_CallState`."""
    state, kind = _CallState(forward, backward, requires), kind or _CallNode
    apply: Any = super(torch.autograd.Function, kind).apply  # torch's own also looks for transforms: there are none
    return lambda input, weight, bias: apply(input, weight, bias, state)


def _forward_with_casts(
    tensors: Tensors, arguments: Arguments, weight: Tensor, saves: bool
) -> Callable[..., tuple[Tensor, Cast | None]]:
    """A forward call that casts weight and bias; it returns the output, and the weight's cast.

    Args:
        weight: the weight before the cast; no reference to it is kept.
        saves: whether the weight's cast is returned even where it is not cached, to be saved for gradients.
    """
    dtype, caches = weight.dtype, is_cacheable(weight)
    # One for a call that casts for itself alone, and one for a call whose casts are cached.
    alone, caching = (
        prepare_call("forward", tensors, None, arguments, Convention(parameter_dtype=dtype, returns_casts=returns))
        for returns in (saves, saves or caches)
    )

    def call(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Cast | None]:
        if caches and (cache := cast_cache(input.device, input.dtype)) is not None:
            of_weight, of_bias = cache.find(weight), None if bias is None else cache.find(bias)
            if of_weight is not None and (bias is None or of_bias is not None):
                # Casts have the format that their leaves had when they were cast.
                inputs = input, of_weight.cast, None if of_bias is None else of_bias.cast
                return prepare_call("forward", inputs, None, arguments)(*inputs), of_weight
            output, cast, *bias_casts = caching(input, weight, bias)
            if bias is not None:
                cache.add(bias, bias_casts[0])
            return output, cache.add(weight, cast)
        if not saves:
            return alone(input, weight, bias), None
        output, cast, *_ = alone(input, weight, bias)
        return output, Cast(weight, cast, weight._version)

    return call


class _CallState:
    """The state that all nodes of one signature share: the prepared forward call, and the prepared backward passes.

    It asks torch which gradients a backward pass needs, of those that its tensors require. torch answers for the nodes
    that gradients go to. It refuses to for leaves that autograd.grad names, and a refusal takes 100 us, so for a while
    after one the gradient is computed, needed or not, which is right either way. So it is after several passes in a row
    that needed all gradients.

    Args:
        forward: the prepared forward call.
        backward: computes gradients by operators, and prepares calls that do without the dispatcher: a
            :class:`Backward`, or what has its two methods.
        requires: whether input, weight and bias require gradients.
    """

    def __init__(self, forward: Callable[..., Any], backward: Any, requires: Needs) -> None:
        self.forward, self.backward, self.requires = forward, backward, requires
        self.of_input, self.of_weight, _ = requires
        self.passes_without_query, self.full_passes = [0, 0, 0], 0
        self.gradients: dict[Hashable, Callable[..., Gradients]] = {}

    def needs(self, ctx: Any) -> Needs:
        """Which gradients this backward pass needs: of input, weight and bias.

        The bias's gradient, which costs little, is computed with the weight's.
        """
        self.full_passes += 1
        if self.full_passes > _FULL_PASSES and self.full_passes % _QUERIED_ONE_IN:
            return self.requires
        of_input, of_weight, of_bias = self.requires
        nodes = ctx.next_functions
        of_weight = of_weight and self._query(1, nodes)
        of_input = of_input and self._query(0, nodes)
        needs = of_input, of_weight, of_bias and (of_weight or self._query(2, nodes))
        if needs != self.requires:
            self.full_passes = 0
        return needs

    def _query(self, index: int, nodes: tuple[Any, ...]) -> bool:
        if self.passes_without_query[index]:
            self.passes_without_query[index] -= 1
            return True
        try:
            return _is_executed(nodes[index][0])
        except RuntimeError:
            self.passes_without_query[index] = _CALLS_AFTER_REFUSAL
            return True


class _CallNode(torch.autograd.Function):
    """The autograd node of a plain call."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, state: _CallState) -> Tensor:
        ctx.state = state
        ctx.save_for_backward(input if state.of_weight else None, weight if state.of_input else None)
        return state.forward(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_gradients(ctx, grad, *ctx.saved_tensors), None


def _gradients(ctx: Any, grad: Tensor, input: Tensor | None, weight: Tensor | None) -> Gradients:
    """The gradients that a backward pass of a node needs, by its prepared call, or by operators."""
    state = ctx.state
    needs = state.needs(ctx)
    key = gradient_signature(grad, input, weight, needs)
    if key is None:
        if weight is not None and torch.is_grad_enabled() and hasattr(ctx, "cast"):
            weight = _cast_weight_again(ctx, weight.dtype)
        return state.backward(*as_plain((grad,)), input, weight, needs)
    call = state.gradients.get(key)
    if call is None:
        if not are_dense(grad):
            return state.backward(grad, input, weight, needs)
        call = state.gradients[key] = state.backward.prepare(grad, input, weight, needs)
    return call(grad, input, weight)


class _SignalNode(_CallNode):
    """The autograd node of a plain call on signals, whose gradients are those of images of height 1."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = (None if one is None else one.unsqueeze(-2) for one in ctx.saved_tensors)
        of_input, of_weight, of_bias = _gradients(ctx, grad.unsqueeze(-2), input, weight)
        of_input, of_weight = (None if one is None else one.squeeze(-2) for one in (of_input, of_weight))
        return of_input, of_weight, of_bias, None


class _CallNodeWithCasts(_CallNode):
    """The autograd node of a call that casts weight and bias, whose gradients have the dtype before the cast."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, state: _CallState) -> Tensor:
        output, cast = state.forward(input, weight, bias)
        ctx.state, ctx.cast = state, cast and (cast.leaf, cast.version)
        ctx.save_for_backward(input if state.of_weight else None, cast.cast if state.of_input else None)
        return output


def _cast_weight_again(ctx: Any, dtype: torch.dtype) -> Tensor:
    """Cast the weight in a graph of its own, for a second backward pass; it must not have been modified since."""
    weight, version = ctx.cast
    if weight._version != version:
        raise RuntimeError(
            "conv_transpose2d: the weight must be what it was in the forward pass, for gradients of gradients under "
            f"autocast; it was modified in place {weight._version - version} times; clone it before, or after"
        )
    return weight.to(dtype)
