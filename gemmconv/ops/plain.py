"""Plain eager calls of conv_transpose2d, which do without the dispatcher: one look-up, then what was prepared.

A call is known by all that decides what it does: its tensors' kinds, shapes and strides, its arguments, whether
gradients are recorded, and the state of this thread: modes, transforms, autocast, profiler, precision. What a known
call does has been checked and chosen when it was first made. Gradients come from a node of autograd that holds the same
for the backward pass, whose calls are known by the gradient's strides.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from gemmconv.dispatch import MODES, are_dense, as_plain, in_a_mode
from gemmconv.errors import KernelError
from gemmconv.extension import exchange_of_tensors, extension
from gemmconv.ops import implementation
from gemmconv.ops.autocast import Cast, casts, is_kept, kept, lowered
from gemmconv.ops.autograd import Asked, Backward, Gradients, compile_ahead
from gemmconv.ops.implementation import Form, planned, prepared, without_data
from gemmconv.ops.schemas import Arguments, Tensors

Call = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_keys_of = torch._C._dispatch_keys
_precision = torch._C._get_fp32_precision_getter  # of torch.backends, without the microsecond that its property takes
_has_grad, _has_autocast = torch.is_grad_enabled, torch._C._is_any_autocast_enabled
_has_autocast_cache, _is_inference = torch.is_autocast_cache_enabled, torch.is_inference_mode_enabled
_USUAL = (Tensor, Parameter)  # types of a weight, and of a bias
_ASKED_ANEW = 64  # calls
_ALL_IN_A_ROW, _ASKED_ONE_IN = 8, 8  # backward passes that wanted all gradients; then one in so many is asked


def _signature(input: Tensor, weight: Tensor, bias: Tensor | None, said: bytes) -> Hashable:
    """What a call is known by, None in a mode that is the dispatcher's. csrc/signature.c has the same faster.

    Args:
        input, weight, bias: torch's own tensors, or parameters.
        said: the arguments after them, as :func:`as_said` gives them.

    Raises:
        RuntimeError: a tensor has no strides.
    """
    if in_a_mode():
        return None
    cast_to = (_cast_to(input), _kept_by(weight), _kept_by(bias)) if _has_autocast() else None
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
        _precision("cuda", "conv") if dtype is torch.float32 else None,
    )


def _signature_of_gradient(grad: Tensor, input: Tensor | None, weight: Tensor | None, asked: Asked) -> Hashable:
    """What a backward pass is known by, None where the dispatcher is to serve it: a second one may follow."""
    if torch.is_grad_enabled() or type(grad) is not Tensor or in_a_mode():
        return None
    # Saved tensors, too: hooks may give them back in another format.
    tensors = tuple(
        [one if one is None else (implementation.signature(one), one.is_neg()) for one in (grad, input, weight)]
    )
    return tensors, asked, _precision("cuda", "conv") if grad.dtype is torch.float32 else None


def _cast_to(input: Tensor) -> Hashable:
    """What autocast makes of a call's tensors, and how; see :func:`is_kept`."""
    device_type = "cuda" if input.is_cuda else input.device.type
    if not casts(device_type):
        return None
    return torch.get_autocast_dtype(device_type), _has_autocast_cache(), _is_inference()


def _kept_by(one: Tensor | None) -> Hashable:
    """What decides whether its cast is kept; see :func:`is_kept`."""
    return None if one is None else (one.requires_grad, one.is_leaf, one._is_view(), one.is_inference())


def _signatures() -> tuple[Callable[..., Hashable], Callable[..., Hashable]]:
    """What makes signatures, of calls and of gradients: in C where that is there."""
    try:
        in_c, exchange = extension(), exchange_of_tensors()
    except KernelError:  # which a call on a GPU raises
        in_c = exchange = None
    if in_c is None or exchange is None:
        return _signature, _signature_of_gradient
    torchs = MODES, forward_ad, _has_grad, _has_autocast, _cast_to, (_precision, ("cuda", "conv"))
    found = in_c.Signatures(exchange, *torchs, Tensor)
    return found.of_call, found.of_gradient


signature, signature_of_gradient = _signatures()


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
    cast = partial(lowered, dtype=dtype)
    if _casts_itself(tensors, dtype):
        of_cast = _recording((cast(input), *(without_data(one, dtype) for one in tensors[1:])), arguments, tensors[1:])
        return lambda input, weight, bias: of_cast(cast(input), weight, bias)
    of_cast = _recording(tuple(map(cast, tensors)), arguments)
    return lambda input, weight, bias: of_cast(cast(input), cast(weight), cast(bias))


def _casts_itself(tensors: Tensors, dtype: torch.dtype) -> bool:
    """Whether a call casts weight and bias to autocast's dtype along with what it does, and not torch before it.

    Both are to be float32, dense, and to have a cast that is kept, or none that is, then without gradients.
    """
    parameters = [one for one in tensors[1:] if one is not None]
    return (
        tensors[0].is_cuda
        and tensors[0].dtype != torch.float64
        and dtype.itemsize == 2
        and len({is_kept(one) for one in parameters}) == 1
        and all(
            one.dtype == torch.float32
            and (is_kept(one) or not (one.requires_grad and torch.is_grad_enabled()))
            and not one.is_inference()
            for one in parameters
        )
        and are_packed(tensors[1:])
    )


def are_packed(parameters: Tensors) -> bool:
    """Whether a cast that goes through their memory as it lies keeps their strides."""
    return all(
        one is None or one.is_contiguous() or (one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last))
        for one in parameters
    )


def _recording(tensors: Tensors, arguments: Arguments, given: Tensors | None = None) -> Call:
    """The call on such tensors, with gradients where they are recorded and wanted.

    Args:
        tensors, arguments: of the operator.
        given: weight and bias as the call has them, where it casts them itself; those of ``tensors`` are without data.
    """
    wanted = [one is not None and one.requires_grad for one in tensors]
    recorded = torch.is_grad_enabled() and any(wanted)
    dtype = None if given is None else given[0].dtype
    if recorded and tensors[0].is_cuda:
        compile_ahead(tensors, arguments, dtype)  # while the forward pass's kernels compile, too
    if dtype is None or given is None:
        form = Form(trained=True) if recorded and wanted[1] and tensors[0].is_cpu else None
        forward: Callable[..., Any] = prepared("forward", tensors, None, arguments, form)
    else:
        forward = _forward_with_casts(tensors, arguments, dtype, is_kept(given[0]), recorded and wanted[0])
    if not recorded:
        return forward if dtype is None else lambda *tensors: forward(*tensors)[0]
    recipe = _Recipe(forward, Backward.of(tensors, arguments), (wanted[0], wanted[1], wanted[2]), dtype)
    kind = _Recorded if dtype is None else _RecordedWithCasts
    apply: Any = super(torch.autograd.Function, kind).apply  # torch's own looks for transforms, of which are none
    return lambda input, weight, bias: apply(input, weight, bias, recipe)


def _forward_with_casts(
    tensors: Tensors, arguments: Arguments, given: torch.dtype, keeps: bool, saved: bool
) -> Callable[..., tuple[Tensor, Cast | None]]:
    """A forward call that casts weight and bias from ``given``; it returns the output, and the weight's cast.

    Args:
        tensors, arguments: of the operator.
        given: the dtype of weight and bias.
        keeps: whether the casts are kept for calls to come, as torch would keep its own.
        saved: whether the weight's is wanted.
    """
    dtype = tensors[0].dtype
    alone, keeping = (
        prepared("forward", tensors, None, arguments, Form(dtype=given, keeps_casts=keeping))
        for keeping in (saved, saved or keeps)
    )

    def call(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Cast | None]:
        if keeps and (known := kept(input.device, dtype)) is not None:
            of_weight, of_bias = known.of(weight), None if bias is None else known.of(bias)
            if of_weight is not None and (bias is None or of_bias is not None):
                low = input, of_weight.cast, None if of_bias is None else of_bias.cast  # with the format of then
                return prepared("forward", low, None, arguments)(*low), of_weight
            output, cast, *of_biases = keeping(input, weight, bias)
            if bias is not None:
                known.add(bias, of_biases[0])
            return output, known.add(weight, cast)
        if not saved:
            return alone(input, weight, bias), None
        output, cast, *_ = alone(input, weight, bias)
        return output, Cast(weight, cast, weight._version)

    return call


class _Recipe:
    """What calls of one kind do: the forward pass, what the dispatcher needs of them for gradients, known gradients.

    Args:
        forward: the prepared call.
        backward: the gradients by operators, and how to prepare them.
        wanted: of which tensors gradients can be asked for.
        dtype: of weight and bias, where the forward pass casts them.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        backward: Backward,
        wanted: Asked,
        dtype: torch.dtype | None,
    ) -> None:
        self.forward, self.backward, self.wanted = forward, backward, wanted
        self.of_input, self.of_weight, _ = wanted
        self.dtype = dtype
        self.gradients: dict[Hashable, Callable[..., Gradients]] = {}
        self.unasked, self.all_in_a_row = [0, 0, 0], 0

    def asked(self, ctx: Any) -> Asked:
        """Of which tensors this backward pass wants the gradient.

        torch tells it of the nodes that gradients go to. It refuses to of leaves that autograd.grad asks for, and its
        refusal takes 100 us, so for a while after one the gradient is taken to be asked for: right whether it is or
        not. So after several passes in a row that wanted all of them. That of a bias, which is little, comes with the
        weight's.
        """
        self.all_in_a_row += 1
        if self.all_in_a_row > _ALL_IN_A_ROW and self.all_in_a_row % _ASKED_ONE_IN:
            return self.wanted
        of_input, of_weight, of_bias = self.wanted
        nodes = ctx.next_functions
        of_weight = of_weight and self._is_asked(1, nodes)
        of_input = of_input and self._is_asked(0, nodes)
        asked = of_input, of_weight, of_bias and (of_weight or self._is_asked(2, nodes))
        if asked != self.wanted:
            self.all_in_a_row = 0
        return asked

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
        key = signature_of_gradient(grad, input, weight, asked)
        if key is None:
            if recipe.dtype is not None and weight is not None and torch.is_grad_enabled():
                weight = _cast_anew(ctx, weight.dtype)
            return *recipe.backward(*as_plain((grad,)), input, weight, asked), None
        known = recipe.gradients.get(key)
        if known is None:
            if not are_dense(grad):
                return *recipe.backward(grad, input, weight, asked), None
            known = recipe.gradients[key] = recipe.backward.prepared(grad, input, weight, asked, recipe.dtype)
        return *known(grad, input, weight), None


class _RecordedWithCasts(_Recorded):
    """Of calls that cast weight and bias, whose gradients have their dtype."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, recipe: _Recipe) -> Tensor:
        output, cast = recipe.forward(input, weight, bias)
        ctx.recipe, ctx.cast = recipe, cast and (cast.leaf, cast.version)
        ctx.save_for_backward(input if recipe.of_weight else None, cast.cast if recipe.of_input else None)
        return output


def _cast_anew(ctx: Any, dtype: torch.dtype) -> Tensor:
    """The weight's cast, in a graph of its own for a second backward pass.

    Raises:
        RuntimeError: the weight is another by now.
    """
    weight, version = ctx.cast
    if weight._version != version:
        raise RuntimeError(
            "conv_transpose2d: the weight must be what it was in the forward pass, for gradients of gradients under "
            f"autocast; it was modified in place {weight._version - version} times; clone it before, or after"
        )
    return weight.to(dtype)


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


def keep(key: Hashable, call: Call | None) -> Call | None:
    """Keep what a call of this signature was found to do, and return it."""
    if key is not None and call is not None:
        planned(key, lambda: call)
    return call
