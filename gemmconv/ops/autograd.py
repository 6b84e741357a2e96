"""The operators as functions, for every mode and transform; their gradients and tangents, computed by the operators.

A transposed convolution and its two gradients are closed under differentiation: each is linear in either of its
tensors, and its derivatives are the other two. So a backward pass calls these operators, and so does the backward pass
of that. Where both gradients are needed one operator computes them, so that they share conversions of grad_output. The
derivative of im2col is col2im, and that of col2im is im2col.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gemmconv import flops, validation
from gemmconv.dispatch import are_dense, as_plain, in_a_mode, loses_a_tangent
from gemmconv.kernels.base import Pass, strides_of, with_strides
from gemmconv.kernels.program import Launch
from gemmconv.ops.ahead import compile_in_background, launches_of
from gemmconv.ops.autocast import EVERY_KEY, KEYS, have_no_gaps, is_autocasting, with_autocast
from gemmconv.ops.configs import Convention
from gemmconv.ops.gradients import bias_gradient
from gemmconv.ops.implementation import prepare_call
from gemmconv.ops.schemas import (
    ARGUMENT_NAMES,
    OPERATORS,
    Arguments,
    Tensors,
    WithoutData,
    checked_problem,
    memory_format,
    register,
)

Rules = tuple[Callable[..., None], Callable[..., Arguments], Callable[..., Any]]  # set-up, gradient, tangent
Needs = tuple[bool, bool, bool]  # whether a backward pass needs the gradient of input, weight and bias
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of input, weight and bias

_PUBLIC = ("conv_transpose2d", "im2col", "col2im")
_TRANSFORMABLE: dict[str, type[torch.autograd.Function]] = {}


def _route(name: str) -> Callable[..., Any]:
    """A function that calls an operator, or under torch.func an autograd function that all transforms understand."""
    operator, names = OPERATORS[name], ARGUMENT_NAMES[name]

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*inputs)
        if name in _PUBLIC:  # arguments of the others have been checked before
            validation.in_64_bits(name, zip(names, inputs, strict=False))
        flops.register()
        if not torch._C._are_functorch_transforms_active():
            return operator(*inputs)
        if loses_a_tangent():
            raise NotImplementedError(
                f"{name}: torch.func.jvp inside torch.func.jvp has a rule for torch's own operator alone; use "
                'algorithm="auto" with precision=None, in a call inside of both'
            )
        if name == "conv_transpose2d" and is_autocasting(inputs[0].device.type):
            # Cast before the transforms: the tensors that they save for gradients must have one dtype.
            return _WITH_AUTOCAST[inputs[0].device.type](*inputs)
        return _TRANSFORMABLE[name].apply(*map(_Wrapped.wrap, inputs))

    return call


conv_transpose2d = _route("conv_transpose2d")
conv_transpose2d_input_grad = _route("conv_transpose2d_input_grad")
conv_transpose2d_weight_grad = _route("conv_transpose2d_weight_grad")
conv_transpose2d_grads = _route("conv_transpose2d_grads")
im2col = _route("im2col")
col2im = _route("col2im")

_WITH_AUTOCAST = {device_type: with_autocast(conv_transpose2d, device_type) for device_type in KEYS}
for _device_type, _call in _WITH_AUTOCAST.items():
    register("conv_transpose2d", _call, KEYS[_device_type].name)


def _conv_transpose2d_uncast(*inputs: Any) -> Tensor:
    """conv_transpose2d without autocast: gradients and tangents have the dtypes of the forward call."""
    with torch._C._ExcludeDispatchKeyGuard(EVERY_KEY):
        return conv_transpose2d(*inputs)


def required_gradients(input: Tensor, weight: Tensor, bias: Tensor | None) -> Needs:
    """Which of a call's tensors require gradients."""
    return input.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad


class Backward(NamedTuple):
    """The backward pass of a forward call: its shapes and arguments without its tensors."""

    input_size: Any  # ``(height, width)``
    weight_shape: Any  # shape of the weight
    # strides of a dense weight, else None. The gradient gets them, so that optimizers and DDP need not copy it at
    # each step.
    weight_strides: tuple[int, ...] | None
    options: Arguments  # arguments of the operator after its tensors
    parameter_dtype: torch.dtype | None = None  # dtype of the weight's and the bias's gradient, if not grad_output's

    @classmethod
    def of(cls, tensors: Tensors, options: Arguments, parameter_dtype: torch.dtype | None = None) -> Backward:
        """The backward pass of a call of conv_transpose2d."""
        input, weight = tensors[:2]
        dense = not torch._C._are_functorch_transforms_active() and have_no_gaps((weight,))
        return cls(input.shape[2:], weight.shape, weight.stride() if dense else None, options, parameter_dtype)

    def __call__(self, grad: Tensor, input: Any, weight: Any, needs: Needs) -> Gradients:
        """Compute the gradients that are needed, by operators, so that they can be differentiated in turn."""
        of_input, of_weight, of_bias = needs
        grad_input = grad_weight = None
        if of_input and of_weight:
            grad_input, grad_weight = conv_transpose2d_grads(grad, input, weight, *self.options)
        elif of_input:
            grad_input = conv_transpose2d_input_grad(grad, weight, self.input_size, *self.options)
        elif of_weight:
            grad_weight = conv_transpose2d_weight_grad(grad, input, self.weight_shape[2:], *self.options)
        if grad_weight is not None and self.weight_strides is not None:
            grad_weight = with_strides(grad_weight, self.weight_strides)
        if not of_bias:
            return grad_input, grad_weight, None
        is_plain = not torch.is_grad_enabled() and not in_a_mode(or_profiled=False)
        is_plain = is_plain and not torch.compiler.is_compiling() and are_dense(grad)
        return grad_input, grad_weight, bias_gradient(grad) if is_plain else grad.sum((0, 2, 3))

    def prepare(self, grad: Tensor, input: Any, weight: Any, needs: Needs) -> Callable[..., Gradients]:
        """Prepare a call that computes the gradients from tensors of these strides without the dispatcher."""
        of_input, of_weight, of_bias = needs
        if not (of_input or of_weight):
            return lambda grad, input, weight: (None, None, bias_gradient(grad) if of_bias else None)
        return of_all(prepare_call(*self.operator_call(grad, input, weight, needs)), needs)

    def operator_call(
        self, grad: Tensor, input: Any, weight: Any, needs: Needs
    ) -> tuple[Pass, Tensors, Any, Arguments, Convention]:
        """The arguments of :func:`prepare_call` for the operator that computes the needed gradients.

        Some gradient of input or weight must be needed. Tensors may be without data.
        """
        _, of_weight, of_bias = needs
        is_contiguous = self.weight_strides == strides_of(self.weight_shape, torch.contiguous_format)
        strides = self.weight_strides if of_weight and not is_contiguous else None
        direction, tensors = needed_pass(grad, input, weight, needs)
        size = {"input_grad": tuple(self.input_size), "weight_grad": tuple(self.weight_shape[2:])}.get(direction)
        return direction, tensors, size, self.options, Convention(strides, of_bias, self.parameter_dtype)


def needed_pass(grad: Any, input: Any, weight: Any, needs: Needs) -> tuple[Pass, Tensors]:
    """The pass that computes the needed gradients of input and weight, and its tensors, or what is given for them."""
    of_input, of_weight, _ = needs
    if of_input and of_weight:
        return "grads", (grad, input, weight)
    return ("input_grad", (grad, weight)) if of_input else ("weight_grad", (grad, input))


def of_all(one: Callable[..., Any], needs: Needs) -> Callable[..., Gradients]:
    """A call that takes all tensors and returns all gradients, from the call of :func:`needed_pass`."""
    of_input, of_weight, of_bias = needs
    if of_input and of_weight:
        return one if of_bias else lambda grad, input, weight: (*one(grad, input, weight), None)
    if of_input and of_bias:
        return lambda grad, input, weight: ((found := one(grad, weight))[0], None, found[1])
    if of_input:
        return lambda grad, input, weight: (one(grad, weight), None, None)
    if of_bias:
        return lambda grad, input, weight: (None, *one(grad, input))
    return lambda grad, input, weight: (None, one(grad, input), None)


def compile_backward_ahead(
    tensors: Tensors, options: Arguments, dtype: torch.dtype | None = None
) -> Future[Any] | None:
    """Choose and compile in the background the kernels that a call's backward pass is expected to launch.

    It is expected to need the gradients of all tensors that require one, and a grad_output in the output's format.
    ``dtype`` is the dtype of the weight's and the bias's gradient, if it is not the input's.
    """
    needs = required_gradients(*tensors)

    def list_launches(*tensors: Any) -> list[Launch]:
        if not (needs[0] or needs[1]):
            return []
        input, weight, _ = tensors
        problem = checked_problem("conv_transpose2d", tensors, None, options)
        strides = strides_of(problem.output_shape, memory_format(input, weight))
        grad = WithoutData.of(problem.output_shape, strides, input.dtype, input.device)
        return launches_of(*Backward.of(tensors, options, dtype).operator_call(grad, input, weight, needs))

    return compile_in_background(("backward", needs, repr(options), dtype), tensors, list_launches)


# Gradients. An argument that is no tensor has the gradient None.


def _conv_transpose2d_setup(ctx: Any, inputs: Arguments, output: Tensor) -> None:
    """Save only the tensors that possible gradients need: a layer whose weight is frozen does not save its input."""
    input, weight = inputs[:2]
    of_input, of_weight = ctx.needs_input_grad[:2]
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:  # tangents need both
        of_input = of_weight = True
        ctx.save_for_forward(input, weight)
    ctx.save_for_backward(input if of_weight else None, weight if of_input else None)
    ctx.of_backward = Backward.of(inputs, inputs[3:])
    ctx.has_bias, ctx.options, ctx.output_shape = len(inputs) > 2, inputs[3:], output.shape
    tensors = input, weight, inputs[2] if ctx.has_bias else None
    if input.is_cuda and not in_a_mode(or_profiled=False) and are_dense(*tensors):
        compile_backward_ahead(tensors, ctx.options)


def _is_needed(ctx: Any, index: int) -> bool:
    """Whether this backward pass needs the gradient of a tensor; autograd.grad may be asked for others only.

    torch answers that for the node that the gradient would go to, and refuses to for leaves that autograd.grad names.
    """
    if not ctx.needs_input_grad[index]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[index][0]))
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return True


def _conv_transpose2d_backward(ctx: Any, grad: Tensor) -> Arguments:
    needs = _is_needed(ctx, 0), _is_needed(ctx, 1), ctx.has_bias and _is_needed(ctx, 2)
    gradients = ctx.of_backward(grad, *ctx.saved_tensors, needs)
    if not ctx.has_bias:
        return gradients[:2]
    return *gradients, *[None] * len(ctx.options)


def _rules_of_one_gradient(operator: Callable[..., Tensor]) -> Rules:
    """The rules of the operator of the input's or of the weight's gradient, which takes grad_output and the other."""
    is_of_input = operator is conv_transpose2d_input_grad
    gradient_of_other = conv_transpose2d_weight_grad if is_of_input else conv_transpose2d_input_grad

    def setup(ctx: Any, inputs: Arguments, output: Tensor) -> None:
        grad_output, other, ctx.sizes, *ctx.options = inputs
        ctx.save_for_backward(grad_output, other)
        ctx.save_for_forward(grad_output, other)

    def backward(ctx: Any, grad: Tensor) -> Arguments:
        grad_output, other = ctx.saved_tensors
        input, weight = (grad, other) if is_of_input else (other, grad)
        needs_grad_output, needs_other, *_ = ctx.needs_input_grad
        return (
            _conv_transpose2d_uncast(input, weight, None, *ctx.options) if needs_grad_output else None,
            gradient_of_other(grad_output, grad, other.shape[2:], *ctx.options) if needs_other else None,
            *[None] * (1 + len(ctx.options)),
        )

    def tangent(ctx: Any, *tangents: Tensor | None) -> Tensor:
        return _product_rule(operator, ctx.saved_tensors, tangents[:2], ctx.sizes, *ctx.options)

    return setup, backward, tangent


def _grads_setup(ctx: Any, inputs: Arguments, output: tuple[Tensor, Tensor]) -> None:
    grad_output, input, weight, *ctx.options = inputs
    ctx.save_for_backward(grad_output, input, weight)
    ctx.save_for_forward(grad_output, input, weight)
    ctx.set_materialize_grads(False)  # often one of the two is not differentiated


def _grads_backward(ctx: Any, grad_input: Tensor | None, grad_weight: Tensor | None) -> Arguments:
    grad_output, input, weight = ctx.saved_tensors
    needs, options, grads = ctx.needs_input_grad, ctx.options, (grad_input, grad_weight)
    of_input, of_weight = needs[1] and grad_weight is not None, needs[2] and grad_input is not None
    return (
        _product_rule(_conv_transpose2d_uncast, (input, weight), grads, None, *options) if needs[0] else None,
        conv_transpose2d_input_grad(grad_output, grad_weight, input.shape[2:], *options) if of_input else None,
        conv_transpose2d_weight_grad(grad_output, grad_input, weight.shape[2:], *options) if of_weight else None,
        *[None] * len(options),
    )


def _fold_setup(ctx: Any, inputs: Arguments, output: Tensor) -> None:
    given, *ctx.arguments = inputs
    ctx.size = given.shape[2:]  # of an image, its height and width


def _im2col_backward(ctx: Any, grad: Tensor) -> Arguments:
    return col2im(grad, ctx.size, *ctx.arguments), *[None] * len(ctx.arguments)


def _col2im_backward(ctx: Any, grad: Tensor) -> Arguments:
    _, *window = ctx.arguments
    return im2col(grad, *window), *[None] * len(ctx.arguments)


# Tangents: an operator is linear in each of its tensors, so its tangent is the sum of its values with one replaced.


def _product_rule(operator: Callable[..., Tensor], tensors: Tensors, tangents: Tensors, *arguments: Any) -> Any:
    """The tangent of an operator of two tensors, None where neither has one."""
    (a, b), (of_a, of_b) = tensors, tangents
    first = None if of_a is None else operator(of_a, b, *arguments)
    if of_b is None:
        return first
    second = operator(a, of_b, *arguments)
    return second if first is None else first + second


def _conv_transpose2d_tangent(ctx: Any, *tangents: Tensor | None) -> Tensor:
    tangent = _product_rule(_conv_transpose2d_uncast, ctx.saved_tensors, tangents[:2], None, *ctx.options)
    if not ctx.has_bias or (bias := tangents[2]) is None:
        return tangent
    of_bias = bias.view(-1, 1, 1).expand(ctx.output_shape)
    return of_bias if tangent is None else tangent + of_bias


def _grads_tangent(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    (grad_output, input, weight), options = ctx.saved_tensors, ctx.options
    of_grad, of_input, of_weight = tangents[:3]
    with_weight = (grad_output, weight), (of_grad, of_weight)
    with_input = (grad_output, input), (of_grad, of_input)
    return (
        _product_rule(conv_transpose2d_input_grad, *with_weight, input.shape[2:], *options),
        _product_rule(conv_transpose2d_weight_grad, *with_input, weight.shape[2:], *options),
    )


# Registration.


def _on_plain_tensors(derivative: Callable[..., Any]) -> Callable[..., Any]:
    """Make a gradient or tangent receive plain tensors: a hook or a user may have passed a subclass."""
    return lambda ctx, *inputs: derivative(ctx, *as_plain(inputs))


class _Wrapped:
    """Hides a tuple or list from transforms of torch.func, which would mix up the tangents of its items."""

    def __init__(self, content: Any) -> None:
        self.content = content

    @classmethod
    def wrap(cls, argument: Any) -> Any:
        return cls(argument) if isinstance(argument, tuple | list) else argument

    @classmethod
    def unwrap(cls, arguments: Arguments) -> Arguments:
        return tuple(argument.content if isinstance(argument, cls) else argument for argument in arguments)


def _differentiable(operator: Callable[..., Any], rules: Rules) -> type[torch.autograd.Function]:
    """The operator with its rules, for the dispatcher's Autograd key, and for transforms of torch.func before it."""
    setup, gradient, tangent = rules

    class Function(torch.autograd.Function):
        generate_vmap_rule = True
        backward, jvp = staticmethod(_on_plain_tensors(gradient)), staticmethod(_on_plain_tensors(tangent))

        @staticmethod
        def forward(*inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*_Wrapped.unwrap(inputs))

        @staticmethod
        def setup_context(ctx: Any, inputs: Arguments, output: Any) -> None:
            setup(ctx, _Wrapped.unwrap(inputs), output)

    return Function


def _with_gradient(operator: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    """The operator below autograd, with an autograd node if gradients are recorded.

    torch.library.register_autograd would do this, but costs every call that needs gradients 50 us more.
    """
    apply: Any = super(torch.autograd.Function, kind).apply  # torch's own takes longer, to look for transforms

    def call(*inputs: Any) -> Any:
        if (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)) or forward_ad._current_level >= 0:
            if torch._C._are_functorch_transforms_active():
                raise NotImplementedError(f"{operator}: torch.func differentiates gemmconv's public functions alone")
            return apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    return call


_RULES: dict[str, Rules] = {
    "conv_transpose2d": (_conv_transpose2d_setup, _conv_transpose2d_backward, _conv_transpose2d_tangent),
    "conv_transpose2d_input_grad": _rules_of_one_gradient(conv_transpose2d_input_grad),
    "conv_transpose2d_weight_grad": _rules_of_one_gradient(conv_transpose2d_weight_grad),
    "conv_transpose2d_grads": (_grads_setup, _grads_backward, _grads_tangent),
    "im2col": (_fold_setup, _im2col_backward, lambda ctx, tangent, *_: im2col(tangent, *ctx.arguments)),
    "col2im": (_fold_setup, _col2im_backward, lambda ctx, tangent, *_: col2im(tangent, *ctx.arguments)),
}
for _name, _rules in _RULES.items():
    _TRANSFORMABLE[_name] = _differentiable(OPERATORS[_name], _rules)
    register(_name, _with_gradient(OPERATORS[_name], _TRANSFORMABLE[_name]), "Autograd")
