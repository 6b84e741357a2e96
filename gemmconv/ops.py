"""The operators ``torch.ops.gemmconv.*``: their schemas, implementations, fakes, gradients and autocast rule.

A transposed convolution and its two gradients are closed under differentiation: each is linear in either of its
tensors, and its derivatives are the other two. So a backward pass is made of the same operators, and so is the backward
pass of that; where both gradients are wanted, one operator gives them, so that they share what is done to grad_output.
im2col and col2im are each other's derivative.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gemmconv import flops, selection, validation
from gemmconv.algorithms.fallback import warn_once, with_fallback
from gemmconv.algorithms.fold import prepare_col2im, prepare_im2col
from gemmconv.autocast import to_autocast_dtype
from gemmconv.device import spec_of
from gemmconv.dispatch import as_plain, loses_a_tangent
from gemmconv.geometry import Pair, Problem
from gemmconv.kernels.base import DEFAULT_WORKSPACE_LIMIT, Config, Direction, Precision, missing, with_strides
from gemmconv.kernels.layout.transpose import prepare_turned, to_nchw

_OPTIONS = (
    "SymInt[2] stride=1, SymInt[2] padding=0, SymInt[2] output_padding=0, SymInt groups=1, SymInt[2] dilation=1, "
    "str algorithm='auto', str? precision=None, int? workspace_limit=None"
)
_WINDOW = "SymInt[2] kernel_size, SymInt[2] dilation=1, SymInt[2] padding=0, SymInt[2] stride=1"
_SCHEMAS = {
    "conv_transpose2d": f"Tensor input, Tensor weight, Tensor? bias=None, {_OPTIONS}",
    "conv_transpose2d_input_grad": f"Tensor grad_output, Tensor weight, SymInt[2] input_size, {_OPTIONS}",
    "conv_transpose2d_weight_grad": f"Tensor grad_output, Tensor input, SymInt[2] kernel_size, {_OPTIONS}",
    "conv_transpose2d_grads": f"Tensor grad_output, Tensor input, Tensor weight, {_OPTIONS}",  # both of the above
    "im2col": f"Tensor input, {_WINDOW}",
    "col2im": f"Tensor columns, SymInt[2] output_size, {_WINDOW}",
}
_PUBLIC = ("conv_transpose2d", "im2col", "col2im")
_RESULTS = {"conv_transpose2d_grads": "(Tensor, Tensor)"}  # of the others a tensor

_library = torch.library.Library("gemmconv", "DEF")
for _name, _arguments in _SCHEMAS.items():
    _tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _library.define(f"{_name}({_arguments}) -> {_RESULTS.get(_name, 'Tensor')}", tags=_tags)


Tensors = tuple[Any, ...]  # tensors, the bias perhaps None
Arguments = tuple[Any, ...]  # what follows an operator's tensors; the dispatcher leaves trailing defaults out


class _Sealed:
    """A tuple or list that transforms of torch.func take for one argument: they mix up the tangents of its items."""

    def __init__(self, content: Any) -> None:
        self.content = content

    @classmethod
    def of(cls, argument: Any) -> Any:
        return cls(argument) if isinstance(argument, tuple | list) else argument

    @classmethod
    def opened(cls, arguments: Arguments) -> Arguments:
        return tuple(argument.content if isinstance(argument, cls) else argument for argument in arguments)


def _routed(name: str) -> Callable[..., Any]:
    """The operator; under a transform of torch.func, the function that carries it through every level of transforms."""
    operator = getattr(torch.ops.gemmconv, name).default
    names = [argument.name for argument in operator._schema.arguments]

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*inputs)
        if name in _PUBLIC:  # of the others all has been checked before
            validation.in_64_bits(name, zip(names, inputs, strict=False))
        flops.register()
        if not torch._C._are_functorch_transforms_active():
            return operator(*inputs)
        if loses_a_tangent():
            raise NotImplementedError(
                f"{name}: torch.func.jvp inside torch.func.jvp has a rule for torch's own operator alone; use "
                'algorithm="auto" with precision=None, in a call inside of both'
            )
        if name == "conv_transpose2d" and (cast := _cast_by_autocast(inputs[0].device.type)) is not None:
            return cast(*inputs)  # here, since what the transforms keep for the gradients has to be of one dtype
        return _TRANSFORMABLE[name].apply(*map(_Sealed.of, inputs))

    return call


conv_transpose2d = _routed("conv_transpose2d")
conv_transpose2d_input_grad = _routed("conv_transpose2d_input_grad")
conv_transpose2d_weight_grad = _routed("conv_transpose2d_weight_grad")
conv_transpose2d_grads = _routed("conv_transpose2d_grads")
im2col = _routed("im2col")
col2im = _routed("col2im")


class Options(NamedTuple):
    """What every convolution operator takes after its tensors and sizes."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    output_padding: Pair = (0, 0)
    groups: int = 1
    dilation: Pair = (1, 1)
    algorithm: str = "auto"
    precision: Precision | None = None
    workspace_limit: int | None = None

    @property
    def geometry(self) -> tuple[Pair, Pair, Pair, int, Pair]:
        return self.stride, self.padding, self.output_padding, self.groups, self.dilation


def _hashable(arguments: Arguments) -> Arguments:
    return tuple(tuple(item) if isinstance(item, list) else item for item in arguments)


# Problems: what a call means, checked. For real tensors once a plan, for fake ones at every call.


def _forward_problem(where: str, tensors: Tensors, sizes: Any, options: Options) -> Problem:
    input, weight, bias = tensors
    problem = validation.problem(where, input.shape, weight.shape, *options.geometry)
    validation.same_kind(where, (("input", input), ("weight", weight), ("bias", bias)))
    validation.bias_shape(where, bias, problem.out_channels)
    validation.sizes(where, problem, input.dtype.itemsize)
    return problem


def _input_grad_problem(where: str, tensors: Tensors, sizes: Any, options: Options) -> Problem:
    grad_output, weight = tensors
    validation.rank4(where, (("grad_output", grad_output), ("weight", weight)))
    input_shape = (grad_output.shape[0], weight.shape[0], *sizes)
    problem = validation.problem(where, input_shape, weight.shape, *options.geometry)
    validation.same_kind(where, (("grad_output", grad_output), ("weight", weight)))
    validation.shape(where, "grad_output", grad_output.shape, problem.output_shape)
    return problem


def _weight_grad_problem(where: str, tensors: Tensors, sizes: Any, options: Options) -> Problem:
    grad_output, input = tensors
    validation.rank4(where, (("grad_output", grad_output), ("input", input)))
    weight_shape = (input.shape[1], grad_output.shape[1] // max(1, options.groups), *sizes)
    problem = validation.problem(where, input.shape, weight_shape, *options.geometry)
    validation.same_kind(where, (("grad_output", grad_output), ("input", input)))
    validation.shape(where, "grad_output", grad_output.shape, problem.output_shape)
    return problem


def _grads_problem(where: str, tensors: Tensors, sizes: Any, options: Options) -> Problem:
    grad_output, input, weight = tensors
    validation.rank4(where, (("grad_output", grad_output),))
    problem = validation.problem(where, input.shape, weight.shape, *options.geometry)
    validation.same_kind(where, (("grad_output", grad_output), ("input", input), ("weight", weight)))
    validation.shape(where, "grad_output", grad_output.shape, problem.output_shape)
    return problem


class _Entry(NamedTuple):
    """One of the convolution operators."""

    where: str
    problem: Callable[[str, Tensors, Any, Options], Problem]


_FORWARD = _Entry("conv_transpose2d", _forward_problem)
_INPUT_GRAD = _Entry("conv_transpose2d_input_grad", _input_grad_problem)
_WEIGHT_GRAD = _Entry("conv_transpose2d_weight_grad", _weight_grad_problem)
_GRADS = _Entry("conv_transpose2d_grads", _grads_problem)


def _checked_problem(entry: _Entry, tensors: Tensors, sizes: Any, options: Options) -> Problem:
    validation.choice(entry.where, options.algorithm, selection.NAMES, options.precision, options.workspace_limit)
    validation.in_64_bits(entry.where, zip(Options._fields, options, strict=True))
    return entry.problem(entry.where, tensors, sizes, options)


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether torch takes a 4-D tensor for channels_last: by its strides, C innermost, then W, H and N."""
    size, stride = tensor.shape, tensor.stride()
    if stride[1] == 0:
        return False
    least = 0
    for axis in (1, 3, 2, 0):
        if size[axis] == 0 or stride[axis] < least:
            return False
        if axis == 0 and least == stride[1]:  # all other extents are 1: torch takes that for contiguous
            return False
        least = stride[axis] * max(1, size[axis])
    return True


def _memory_format(first: Tensor, second: Tensor) -> torch.memory_format:
    """torch's rule for a convolution's result: channels_last where either tensor is."""
    either = _is_channels_last(first) or _is_channels_last(second)
    return torch.channels_last if either else torch.contiguous_format


# Plans: all of a call that does not depend on the data, made once and kept.

_plans: dict[Hashable, Any] = {}
_plans_lock = threading.Lock()  # of those who add one
_MOST_PLANS = 4096
_ALREADY_THERE = nullcontext()


def _plan(key: Hashable, make: Callable[[], Any]) -> Any:
    plan = _plans.get(key)
    if plan is None:
        plan = make()
        with _plans_lock:
            if len(_plans) >= _MOST_PLANS:
                del _plans[next(iter(_plans))]
            _plans[key] = plan
    return plan


def _signature(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device current where it is not."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return _ALREADY_THERE


def _config(
    problem: Problem, first: Tensor, second: Tensor, options: Options, current: Precision, bias: bool = False
) -> Config:
    spec = spec_of(first.device)
    return Config(
        problem,
        first.dtype,
        first.device,
        options.precision or current,
        DEFAULT_WORKSPACE_LIMIT if options.workspace_limit is None else options.workspace_limit,
        current,
        _memory_format(first, second),
        bias,
        spec,
        selection.is_deterministic(options.algorithm, first.device, spec),
    )


def _prepared(
    prepare: Callable[[Options], Callable[..., Any]], options: Options, device: torch.device
) -> Callable[..., Any]:
    """What ``prepare`` gives for the options; with ``"auto"`` torch's operator where kernels cannot be had."""
    if options.algorithm != "auto":
        return prepare(options)
    return with_fallback(device, lambda: prepare(options), lambda: prepare(options._replace(algorithm="native")))


def _compute(entry: _Entry, direction: Direction, tensors: Tensors, sizes: Any, arguments: Arguments) -> Tensor:
    first, second = tensors[0], tensors[1]
    options = Options(*_hashable(arguments))
    current = selection.torch_precision(first.dtype, first.device)

    def make() -> Callable[..., Tensor]:
        bias = len(tensors) > 2 and tensors[2] is not None
        problem = _checked_problem(entry, tensors, sizes, options)

        def prepare(options: Options) -> Callable[..., Tensor]:
            config = _config(problem, first, second, options, current, bias)
            return getattr(selection.choose(config, options.algorithm, entry.where, direction), direction)(config)

        return _prepared(prepare, options, first.device)

    key = (direction, *map(_signature, tensors), sizes, options, current)
    with _on(first.device):
        result: Tensor = _plan(key, make)(*tensors)
    return result


def _conv_transpose2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, *arguments: Any) -> Tensor:
    return _compute(_FORWARD, "forward", (input, weight, bias), None, arguments)


def _conv_transpose2d_input_grad(grad_output: Tensor, weight: Tensor, input_size: Any, *arguments: Any) -> Tensor:
    return _compute(_INPUT_GRAD, "input_grad", (grad_output, weight), tuple(input_size), arguments)


def _conv_transpose2d_weight_grad(grad_output: Tensor, input: Tensor, kernel_size: Any, *arguments: Any) -> Tensor:
    return _compute(_WEIGHT_GRAD, "weight_grad", (grad_output, input), tuple(kernel_size), arguments)


def _both_gradients(
    gradients: selection.Gradients, config: Config, weight_config: Config
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepare both gradients: of one call where an algorithm has it, else grad_output is turned once, if at all."""
    if gradients.at_once:
        return gradients.input_grad.grads(config, weight_config)
    turned = to_nchw(config, config.problem.output_shape) if gradients.share else None
    input_grad = gradients.input_grad.input_grad(config)
    weight_grad = gradients.weight_grad.weight_grad(weight_config)

    def call(grad_output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if turned is not None:
            grad_output = turned(grad_output)
        return input_grad(grad_output, weight), weight_grad(grad_output, input)

    return call


def _conv_transpose2d_grads(
    grad_output: Tensor, input: Tensor, weight: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Both gradients of one backward pass, which may share what is done to their tensors."""
    options = Options(*_hashable(arguments))
    current = selection.torch_precision(grad_output.dtype, grad_output.device)
    tensors = grad_output, input, weight

    def make() -> Callable[..., tuple[Tensor, Tensor]]:
        problem = _checked_problem(_GRADS, tensors, None, options)

        def prepare(options: Options) -> Callable[..., tuple[Tensor, Tensor]]:
            config, weight_config = (
                _config(problem, grad_output, other, options, current) for other in (weight, input)
            )
            gradients = selection.choose_gradients(config, weight_config, options.algorithm, _GRADS.where)
            if gradients.turned:
                last = replace(config, memory_format=torch.channels_last)
                return prepare_turned(config, _both_gradients(gradients, last, last), gradients.turns_weight)
            return _both_gradients(gradients, config, weight_config)

        return _prepared(prepare, options, grad_output.device)

    key = ("grads", *map(_signature, tensors), options, current)
    with _on(grad_output.device):
        result: tuple[Tensor, Tensor] = _plan(key, make)(*tensors)
    return result


class Window(NamedTuple):
    """What im2col and col2im take after their tensor and output size."""

    kernel_size: Pair
    dilation: Pair = (1, 1)
    padding: Pair = (0, 0)
    stride: Pair = (1, 1)


def _im2col_problem(input: Tensor, window: Window) -> Problem:
    validation.rank4("im2col", (("input", input),))
    validation.same_kind("im2col", (("input", input),))
    size = (input.shape[2], input.shape[3])
    problem = validation.fold_geometry("im2col", "input", size, *window, shape=(input.shape[0], input.shape[1]))
    shape = problem.batch, problem.gemm_m, problem.gemm_n
    validation.in_memory("im2col", "padding", shape, input.dtype.itemsize, "leave columns of", "pad less")
    return problem


def _col2im_problem(columns: Tensor, output_size: Pair, window: Window) -> Problem:
    validation.same_kind("col2im", (("columns", columns),))
    shape = validation.fold_columns("col2im", columns.shape, window.kernel_size)
    problem = validation.fold_geometry("col2im", "output_size", output_size, *window, shape=shape)
    validation.shape("col2im", "columns", columns.shape, (problem.batch, problem.gemm_m, problem.gemm_n))
    itemsize, images = columns.dtype.itemsize, problem.output_shape
    validation.in_memory("col2im", "output_size", images, itemsize, "be of images of", "fold into smaller ones")
    return problem


def _im2col(input: Tensor, *arguments: Any) -> Tensor:
    window = Window(*_hashable(arguments))

    def make() -> Callable[..., Tensor]:
        return prepare_im2col(_im2col_problem(input, window), input.dtype, input.device)

    with _on(input.device):
        return _plan(("im2col", _signature(input), window), make)(input)


def _col2im(columns: Tensor, output_size: Any, *arguments: Any) -> Tensor:
    size, window = tuple(output_size), Window(*_hashable(arguments))

    def make() -> Callable[..., Tensor]:
        return prepare_col2im(_col2im_problem(columns, size, window), columns.dtype, columns.device)

    with _on(columns.device):
        return _plan(("col2im", _signature(columns), size, window), make)(columns)


# Fakes: the same checks, and the shape, strides and dtype that the implementation gives.


def _empty(shape: Sequence[int], like: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format)


def _conv_transpose2d_fake(input: Tensor, weight: Tensor, bias: Tensor | None = None, *arguments: Any) -> Tensor:
    problem = _checked_problem(_FORWARD, (input, weight, bias), None, Options(*_hashable(arguments)))
    return _empty(problem.output_shape, input, _memory_format(input, weight))


def _input_grad_fake(grad_output: Tensor, weight: Tensor, input_size: Any, *arguments: Any) -> Tensor:
    options = Options(*_hashable(arguments))
    problem = _checked_problem(_INPUT_GRAD, (grad_output, weight), tuple(input_size), options)
    return _empty(problem.input_shape, grad_output, _memory_format(grad_output, weight))


def _weight_grad_fake(grad_output: Tensor, input: Tensor, kernel_size: Any, *arguments: Any) -> Tensor:
    options = Options(*_hashable(arguments))
    problem = _checked_problem(_WEIGHT_GRAD, (grad_output, input), tuple(kernel_size), options)
    return _empty(problem.weight_shape, grad_output)


def _grads_fake(grad_output: Tensor, input: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    problem = _checked_problem(_GRADS, (grad_output, input, weight), None, Options(*_hashable(arguments)))
    return (
        _empty(problem.input_shape, grad_output, _memory_format(grad_output, weight)),
        _empty(problem.weight_shape, grad_output),
    )


def _im2col_fake(input: Tensor, *arguments: Any) -> Tensor:
    problem = _im2col_problem(input, Window(*_hashable(arguments)))
    return _empty((problem.batch, problem.gemm_m, problem.gemm_n), input)


def _col2im_fake(columns: Tensor, output_size: Any, *arguments: Any) -> Tensor:
    problem = _col2im_problem(columns, tuple(output_size), Window(*_hashable(arguments)))
    return _empty(problem.output_shape, columns)


# Gradients, made of the operators themselves. The gradient of a setting is None.


def _no_gradients(count: int) -> tuple[None, ...]:
    return (None,) * count


def _conv_transpose2d_setup(ctx: Any, inputs: Arguments, output: Tensor) -> None:
    """Keep what the gradients that can be asked for need: a frozen weight's layer does not keep its input."""
    input, weight = inputs[:2]
    transformed = torch._C._are_functorch_transforms_active()
    of_input, of_weight = ctx.needs_input_grad[:2]
    if transformed or forward_ad._current_level >= 0:  # tangents need both
        of_input = of_weight = True
        ctx.save_for_forward(input, weight)
    ctx.save_for_backward(input if of_weight else None, weight if of_input else None)
    ctx.input_size, ctx.kernel_size = input.shape[2:], weight.shape[2:]
    ctx.weight_strides = None if transformed or not _is_dense(weight) else weight.stride()
    ctx.has_bias, ctx.options, ctx.output_shape = len(inputs) > 2, inputs[3:], output.shape


def _is_dense(weight: Tensor) -> bool:
    return weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)


def _is_asked_for(ctx: Any, index: int) -> bool:
    """Whether this backward pass wants the gradient of a tensor that requires one: autograd.grad may want others.

    torch tells it of the node that the gradient would go to, and refuses to of leaves that autograd.grad asks for.
    """
    if not ctx.needs_input_grad[index]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[index][0]))
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return True


def _conv_transpose2d_backward(ctx: Any, grad: Tensor) -> Arguments:
    input, weight = ctx.saved_tensors
    options, of_input, of_weight = ctx.options, _is_asked_for(ctx, 0), _is_asked_for(ctx, 1)
    grad_input = grad_weight = None
    if of_input and of_weight:
        grad_input, grad_weight = conv_transpose2d_grads(grad, input, weight, *options)
    elif of_input:
        grad_input = conv_transpose2d_input_grad(grad, weight, ctx.input_size, *options)
    elif of_weight:
        grad_weight = conv_transpose2d_weight_grad(grad, input, ctx.kernel_size, *options)
    if grad_weight is not None and ctx.weight_strides is not None:
        grad_weight = with_strides(grad_weight, ctx.weight_strides)  # or optimizers and DDP would copy it each time
    if not ctx.has_bias:
        return grad_input, grad_weight
    grad_bias = grad.sum((0, 2, 3)) if _is_asked_for(ctx, 2) else None
    return grad_input, grad_weight, grad_bias, *_no_gradients(len(options))


def _gradient_setup(ctx: Any, inputs: Arguments, output: Tensor) -> None:
    grad_output, other, sizes, *options = inputs
    ctx.save_for_backward(grad_output, other)
    ctx.save_for_forward(grad_output, other)
    ctx.sizes, ctx.options = sizes, options


def _input_grad_backward(ctx: Any, grad: Tensor) -> Arguments:
    grad_output, weight = ctx.saved_tensors
    needs_grad_output, needs_weight, *_ = ctx.needs_input_grad
    return (
        _without_autocast(grad, weight, None, *ctx.options) if needs_grad_output else None,
        conv_transpose2d_weight_grad(grad_output, grad, weight.shape[2:], *ctx.options) if needs_weight else None,
        *_no_gradients(1 + len(ctx.options)),
    )


def _weight_grad_backward(ctx: Any, grad: Tensor) -> Arguments:
    grad_output, input = ctx.saved_tensors
    needs_grad_output, needs_input, *_ = ctx.needs_input_grad
    return (
        _without_autocast(input, grad, None, *ctx.options) if needs_grad_output else None,
        conv_transpose2d_input_grad(grad_output, grad, input.shape[2:], *ctx.options) if needs_input else None,
        *_no_gradients(1 + len(ctx.options)),
    )


def _grads_setup(ctx: Any, inputs: Arguments, output: tuple[Tensor, Tensor]) -> None:
    grad_output, input, weight, *options = inputs
    ctx.save_for_backward(grad_output, input, weight)
    ctx.save_for_forward(grad_output, input, weight)
    ctx.options = options
    ctx.set_materialize_grads(False)  # often one of the two is not differentiated


def _grads_backward(ctx: Any, grad_input: Tensor | None, grad_weight: Tensor | None) -> Arguments:
    grad_output, input, weight = ctx.saved_tensors
    needs, options, grads = ctx.needs_input_grad, ctx.options, (grad_input, grad_weight)
    of_input, of_weight = needs[1] and grad_weight is not None, needs[2] and grad_input is not None
    return (
        _sum(_bilinear_tangent(_without_autocast, (input, weight), grads, None, *options)) if needs[0] else None,
        conv_transpose2d_input_grad(grad_output, grad_weight, input.shape[2:], *options) if of_input else None,
        conv_transpose2d_weight_grad(grad_output, grad_input, weight.shape[2:], *options) if of_weight else None,
        *_no_gradients(len(options)),
    )


def _im2col_setup(ctx: Any, inputs: Arguments, output: Tensor) -> None:
    input, *window = inputs
    ctx.size, ctx.window = input.shape[2:], window


def _im2col_backward(ctx: Any, grad: Tensor) -> Arguments:
    return col2im(grad, ctx.size, *ctx.window), *_no_gradients(len(ctx.window))


def _col2im_setup(ctx: Any, inputs: Arguments, output: Tensor) -> None:
    _, ctx.size, *window = inputs
    ctx.window = window


def _col2im_backward(ctx: Any, grad: Tensor) -> Arguments:
    return im2col(grad, *ctx.window), *_no_gradients(1 + len(ctx.window))


# Tangents: an operator is linear in each of its tensors, so its tangent is the sum of its values with one replaced.


def _sum(terms: list[Tensor]) -> Any:
    """Of tensors, None of none."""
    return sum(terms[1:], terms[0]) if terms else None


def _bilinear_tangent(
    operator: Callable[..., Tensor], tensors: Tensors, tangents: Tensors, *arguments: Any
) -> list[Tensor]:
    (a, b), (first, second) = tensors, tangents
    terms = []
    if first is not None:
        terms.append(operator(first, b, *arguments))
    if second is not None:
        terms.append(operator(a, second, *arguments))
    return terms


def _conv_transpose2d_tangent(ctx: Any, *tangents: Tensor | None) -> Tensor:
    terms = _bilinear_tangent(_without_autocast, ctx.saved_tensors, tangents[:2], None, *ctx.options)
    if ctx.has_bias and (bias := tangents[2]) is not None:
        shape = ctx.output_shape
        terms.append(bias.view(-1, 1, 1).expand(shape))
    return _sum(terms)


def _input_grad_tangent(ctx: Any, *tangents: Tensor | None) -> Tensor:
    call = conv_transpose2d_input_grad
    return _sum(_bilinear_tangent(call, ctx.saved_tensors, tangents[:2], ctx.sizes, *ctx.options))


def _weight_grad_tangent(ctx: Any, *tangents: Tensor | None) -> Tensor:
    call = conv_transpose2d_weight_grad
    return _sum(_bilinear_tangent(call, ctx.saved_tensors, tangents[:2], ctx.sizes, *ctx.options))


def _grads_tangent(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    grad_output, input, weight = ctx.saved_tensors
    of_grad, of_input, of_weight = tangents[:3]

    def tangent(call: Callable[..., Tensor], other: Tensor, of_other: Tensor | None, like: Tensor) -> Any:
        return _sum(_bilinear_tangent(call, (grad_output, other), (of_grad, of_other), like.shape[2:], *ctx.options))

    return (
        tangent(conv_transpose2d_input_grad, weight, of_weight, input),
        tangent(conv_transpose2d_weight_grad, input, of_input, weight),
    )


def _im2col_tangent(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
    return im2col(tangent, *ctx.window)


def _col2im_tangent(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
    return col2im(tangent, ctx.size, *ctx.window)


# Autocast: as torch treats conv_transpose2d, tensors of lower or equal precision than float32 take the autocast dtype.
# Gradients and tangents are of the dtypes that the call had, wherever they are computed.

_AUTOCAST_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
_EVERY_AUTOCAST_KEY = torch._C.DispatchKeySet(_AUTOCAST_KEYS["cpu"]) | torch._C.DispatchKeySet(_AUTOCAST_KEYS["cuda"])


def _without_autocast(*inputs: Any) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(_EVERY_AUTOCAST_KEY):
        return conv_transpose2d(*inputs)


def _cast_by_autocast(device_type: str) -> Callable[..., Tensor] | None:
    """The call that casts, None where autocast is off or has cast already."""
    key = _AUTOCAST_KEYS.get(device_type)
    if key is None or not torch.is_autocast_enabled(device_type):
        return None
    return None if torch._C._dispatch_tls_is_dispatch_key_excluded(key) else _AUTOCAST[device_type]


def _autocast(device_type: str) -> Callable[..., Tensor]:
    excluded = torch._C.DispatchKeySet(_AUTOCAST_KEYS[device_type])

    def call(input: Tensor, weight: Tensor, bias: Tensor | None = None, *arguments: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)

        def lower(tensor: Tensor | None) -> Any:
            if tensor is None or tensor.device.type != device_type or not tensor.is_floating_point():
                return tensor
            return tensor if tensor.dtype == torch.float64 else to_autocast_dtype(tensor, dtype)

        tensors = lower(input), lower(weight), lower(bias)  # while operators autocast
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return conv_transpose2d(*tensors, *arguments)

    return call


_AUTOCAST = {device_type: _autocast(device_type) for device_type in _AUTOCAST_KEYS}


# Registration.


def _on_plain(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` on plain tensors, of whatever class those given are: the methods of that may not be torch's."""
    return lambda *inputs: call(*as_plain(inputs))


def _of_plain(derivative: Callable[..., Any]) -> Callable[..., Any]:
    """A gradient or tangent, of plain tensors as well: a hook or a user may give others."""
    return lambda ctx, *given: derivative(ctx, *as_plain(given))


def _with_gradient(
    compute: Callable[..., Any],
    setup: Callable[..., None],
    backward: Callable[..., Arguments],
    tangent: Callable[..., Any],
) -> Callable[..., Any]:
    """``compute`` with a gradient where one is asked for.

    torch.library.register_autograd does the same for 50 us more of every call that needs gradients.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = compute(*inputs)
            setup(ctx, inputs, output)
            return output

    Function.backward = staticmethod(_of_plain(backward))  # type: ignore[method-assign]
    Function.jvp = staticmethod(_of_plain(tangent))  # type: ignore[method-assign]

    def call(*inputs: Any) -> Any:
        if (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)) or forward_ad._current_level >= 0:
            return Function.apply(*inputs)
        return compute(*inputs)

    return call


def _transformable(
    operator: Callable[..., Any],
    setup: Callable[..., None],
    backward: Callable[..., Arguments],
    tangent: Callable[..., Any],
) -> type[torch.autograd.Function]:
    """An operator as torch.func's transforms want it: they come before the dispatcher's own handling of gradients."""

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return operator(*_Sealed.opened(inputs))

        @staticmethod
        def setup_context(ctx: Any, inputs: Arguments, output: Tensor) -> None:
            setup(ctx, _Sealed.opened(inputs), output)

    Function.backward = staticmethod(_of_plain(backward))  # type: ignore[method-assign]
    Function.jvp = staticmethod(_of_plain(tangent))  # type: ignore[method-assign]
    return Function


def _below_autograd(operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    return call


_ENTRIES: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    # implementation, fake, what is kept for the gradient, gradient, tangent
    "conv_transpose2d": (
        _conv_transpose2d,
        _conv_transpose2d_fake,
        _conv_transpose2d_setup,
        _conv_transpose2d_backward,
        _conv_transpose2d_tangent,
    ),
    "conv_transpose2d_input_grad": (
        _conv_transpose2d_input_grad,
        _input_grad_fake,
        _gradient_setup,
        _input_grad_backward,
        _input_grad_tangent,
    ),
    "conv_transpose2d_weight_grad": (
        _conv_transpose2d_weight_grad,
        _weight_grad_fake,
        _gradient_setup,
        _weight_grad_backward,
        _weight_grad_tangent,
    ),
    "conv_transpose2d_grads": (
        _conv_transpose2d_grads,
        _grads_fake,
        _grads_setup,
        _grads_backward,
        _grads_tangent,
    ),
    "im2col": (_im2col, _im2col_fake, _im2col_setup, _im2col_backward, _im2col_tangent),
    "col2im": (_col2im, _col2im_fake, _col2im_setup, _col2im_backward, _col2im_tangent),
}
_TRANSFORMABLE: dict[str, type[torch.autograd.Function]] = {}
for _name, (_implementation, _fake, *_derivatives) in _ENTRIES.items():
    _operator = getattr(torch.ops.gemmconv, _name).default
    _library.impl(_name, _on_plain(_implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gemmconv::{_name}", _fake, lib=_library)
    _library.impl(_name, _on_plain(_with_gradient(_below_autograd(_operator), *_derivatives)), "Autograd")
    _TRANSFORMABLE[_name] = _transformable(_operator, *_derivatives)
for _device_type, _key in _AUTOCAST_KEYS.items():
    _library.impl("conv_transpose2d", _on_plain(_AUTOCAST[_device_type]), _key.name)

# conv_transpose2d without the dispatcher, for calls that it would only pass on: see ``dispatch``.
conv_transpose2d_directly = _with_gradient(_conv_transpose2d, *_ENTRIES["conv_transpose2d"][2:])


def torchs_conv_transpose2d(input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """torch's own operator, which takes every mode and kind of tensor, of arguments that ours would take.

    Raises:
        RuntimeError, NotImplementedError: as the operator.
    """
    if not torch.compiler.is_compiling():  # what is traced has no sizes yet
        tensors = input, weight, bias
        cast = torch.is_autocast_enabled(input.device.type)
        kinds = None if cast else tuple(None if one is None else (one.dtype, one.device) for one in tensors)
        shapes = input.shape, weight.shape, None if bias is None else bias.shape
        _plan(("check", shapes, kinds, geometry), lambda: _is_forward(tensors, geometry, cast))
    return torch.conv_transpose2d(input, weight, bias, *geometry)


def _is_forward(tensors: Tensors, geometry: Any, cast: bool) -> bool:
    """True, for a call that is right; raises what is wrong with another. ``cast``: autocast makes dtypes alike."""
    _checked_problem(_FORWARD, _batched(tensors, torch.float32 if cast else None), None, Options(*geometry))
    return True


def _batched(tensors: Tensors, cast: torch.dtype | None) -> Tensors:
    """A call's tensors for its checks: the input with a batch; of the dtype that autocast makes them, without data."""
    input, *others = tensors
    tensors = input.unsqueeze(0) if input.dim() == 3 else input, *others
    if cast is None or input.dtype == torch.float64:
        return tensors
    return tuple(None if one is None else torch.empty_like(one, dtype=cast, device="meta") for one in tensors)


def is_left_to_torch(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> bool:
    """Whether a call on CUDA, with the gradients that it may be asked for, is torch's own with torch's settings.

    torch's operator then serves it in any mode. Raises what is wrong with the call.
    """
    algorithm, device = arguments[5], input.device
    if algorithm not in ("auto", "native") or selection.is_deterministic(algorithm, device, spec_of(device)):
        return False
    tracked = torch.is_grad_enabled()
    wanted = tracked and input.requires_grad, tracked and weight.requires_grad
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    dtype = input.dtype if cast is None or input.dtype == torch.float64 else cast
    current = selection.torch_precision(dtype, device)

    def make() -> bool:
        options, tensors = Options(*arguments), _batched((input, weight, bias), cast)
        problem = _checked_problem(_FORWARD, tensors, None, options)
        config = _config(problem, tensors[0], tensors[1], options, current, bias is not None)
        config = replace(config, device=device, spec=spec_of(device))
        left = selection.leaves_all_to_torch(config, algorithm, _FORWARD.where, *wanted)
        if left and algorithm == "auto" and (cause := missing(device)) is not None:
            warn_once(cause)
        return left

    kinds = device, input.dtype, weight.dtype, cast, current, None if bias is None else (bias.shape, bias.dtype)
    layout = input.shape, input.stride(), weight.shape, weight.stride()
    answer: bool = _plan(("torch", layout, kinds, arguments, wanted), make)
    return answer
