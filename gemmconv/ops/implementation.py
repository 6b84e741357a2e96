"""The operators' implementations. All of a call that does not depend on the data is a plan, made once and kept."""

from __future__ import annotations

import marshal
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemmconv import selection, tuned
from gemmconv.algorithms.fallback import warn_once, with_fallback
from gemmconv.algorithms.fold import prepare_col2im, prepare_im2col
from gemmconv.algorithms.gemm_col2im import ahead
from gemmconv.device import spec_of
from gemmconv.geometry import Problem
from gemmconv.kernels.base import (
    DEFAULT_WORKSPACE_LIMIT,
    PASSES,
    Config,
    Pass,
    Precision,
    missing,
    strides_of,
    why_no_kernels,
    with_strides,
)
from gemmconv.kernels.forms import launches, name_of_cast
from gemmconv.kernels.layout.transpose import prepare_via_channels_last, to_nchw
from gemmconv.kernels.program import Launch, Output, Program, Strides, one_after_the_other
from gemmconv.kernels.splits import bias_grad
from gemmconv.ops.schemas import (
    ARGUMENT_NAMES,
    OPERATORS,
    Arguments,
    Options,
    Tensors,
    Window,
    WithoutData,
    checked_problem,
    col2im_problem,
    hashable,
    im2col_problem,
    memory_format,
    register,
    taken_apart,
)

# Plans: prepared calls by the signature of a call, and answers to questions about one.

plans: dict[Hashable, Any] = {}
tuned.at_change.append(plans.clear)  # which lets calls that were prepared before be chosen anew
_plans_lock = threading.Lock()  # of those who add one
_MOST_PLANS = 4096
_ALREADY_THERE = nullcontext()


def planned(key: Hashable, make: Callable[[], Any]) -> Any:
    plan = plans.get(key)
    if plan is None:
        plan = make()
        with _plans_lock:
            if len(plans) >= _MOST_PLANS:
                del plans[next(iter(plans))]
            plans[key] = plan
    return plan


def signature(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device current where it is not."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return _ALREADY_THERE


def config_of(
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
        memory_format(first, second),
        bias,
        spec,
        selection.is_deterministic(options.algorithm, first.device, spec),
    )


def _compute(direction: Pass, where: str, *inputs: Any) -> Any:
    tensors, sizes, arguments = taken_apart(where, inputs)
    with _on(tensors[0].device):
        return prepared(direction, tensors, sizes, arguments)(*tensors)


class Form(NamedTuple):
    """How a call has weights, biases and gradients, where they are not contiguous and of one dtype.

    Attributes:
        weight_format: strides of the weight's gradient, None for those of a contiguous tensor.
        with_bias: whether the bias's gradient is returned too, as the last.
        dtype: of weight and bias as they are given, and of their gradients; None where that is all others'.
        keeps_casts: whether a forward call returns weight and bias as they were cast, behind the output.
        trained: see :class:`Config`.
    """

    weight_format: Strides | None = None
    with_bias: bool = False
    dtype: torch.dtype | None = None
    keeps_casts: bool = False
    trained: bool = False


_USUAL = Form()


def _form_of(direction: Pass, tensors: Tensors) -> Form:
    """How an operator returns a weight's gradient: like the weight, where it has that and it is in channels_last."""
    if direction != "grads" or memory_format(tensors[2], tensors[2]) is torch.contiguous_format:
        return _USUAL
    return Form(strides_of(tensors[2].shape, torch.channels_last))


def prepared(
    direction: Pass, tensors: Tensors, sizes: Any, arguments: Arguments, asked: Form | None = None
) -> Callable[..., Any]:
    """The prepared call of an operator on tensors of such shapes and strides.

    Args:
        direction, tensors, sizes, arguments: the operator, and what it is called with, all of one dtype.
        asked: see :class:`Form`; None for the operator's own.
    """
    first, form = tensors[0], asked or _form_of(direction, tensors)
    current = selection.torch_precision(first.dtype, first.device)

    def make() -> Callable[..., Any]:
        options = Options(*hashable(arguments))
        where = name_of(direction)
        problem = checked_problem(where, tensors, sizes, options)

        def prepare(options: Options) -> Callable[..., Any]:
            config, weight_config = _configs(direction, problem, tensors, options, current)
            config = replace(config, trained=True) if form.trained else config
            selection.log_choice(config, weight_config, direction, options.algorithm)
            if direction == "grads":
                gradients = selection.choose_gradients(config, weight_config, options.algorithm, where)
                return gradients_call(gradients, config, weight_config, tensors, form)
            program = _program(direction, config, weight_config, options.algorithm, where)
            if direction == "forward":
                if program is not None:
                    return _with_casts(program, tensors, form).bound(config.device, _given(tensors, form.dtype))
                torchs = selection.choose(config, options.algorithm, where, direction).forward(config)
                return _torchs_with_casts(torchs, first.dtype, form)
            if program is not None:
                return _bound(program, tensors, form)
            algorithm = selection.choose(config, options.algorithm, where, direction)
            return _returning(direction, getattr(algorithm, direction)(config), first, form)

        if options.algorithm != "auto":
            return prepare(options)
        native = options._replace(algorithm="native")  # for where kernels cannot be had
        return with_fallback(first.device, lambda: prepare(options), lambda: prepare(native))

    try:
        said: Hashable = marshal.dumps((sizes, arguments), 2)  # several times as fast as to hash lists made tuples
    except ValueError:
        said = sizes, Options(*hashable(arguments))
    key = (direction, *map(signature, tensors), said, current, form)
    call: Callable[..., Any] = planned(key, make)
    return call


def name_of(direction: Pass) -> str:
    return "conv_transpose2d" if direction == "forward" else f"conv_transpose2d_{direction}"


def _configs(
    direction: Pass, problem: Problem, tensors: Tensors, options: Options, current: Precision
) -> tuple[Config, Config]:
    """The configuration of a pass, of both gradients the input's and the weight's."""
    first, second = tensors[:2]
    if direction == "grads":
        by_weight = config_of(problem, first, tensors[2], options, current)
        return by_weight, config_of(problem, first, second, options, current)
    bias = len(tensors) > 2 and tensors[2] is not None
    return (config_of(problem, first, second, options, current, bias),) * 2


def _program(direction: Pass, config: Config, weight_config: Config, algorithm: str, where: str) -> Program | None:
    """What a pass does as one program, None where torch's operator or the CPU computes any of it."""
    if config.device.type != "cuda":
        return None
    if direction == "grads":
        gradients = selection.choose_gradients(config, weight_config, algorithm, where)
        return both_programs(gradients, config, weight_config)
    choice = selection.choose(config, algorithm, where, direction).choice(config, direction)
    return None if choice is None else choice.program(config, direction)


def _given(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """A forward call's tensors, of which weight and bias have this dtype, if any is said."""
    if dtype is None:
        return tensors
    return tensors[0], *(without_data(one, dtype) for one in tensors[1:])


def _with_casts(program: Program, tensors: Tensors, form: Form) -> Program:
    """A forward pass's program, which returns its casts too where they are to be kept."""
    given, outputs = dict(zip(program.arguments, tensors, strict=False)), list(program.outputs)
    for operand in program.operands if form.keeps_casts else ():  # the weight comes first
        tensor = given[operand.given_as]
        if operand.given_as != "input" and tensor is not None:
            outputs.append(Output(name_of_cast(operand.name), tuple(tensor.shape), tensor.stride()))
    return replace(program, outputs=tuple(outputs))


def _in_form(program: Program, form: Form) -> Program:
    """A program of gradients, of which it returns the weight's and the bias's in this form."""

    def changed(output: Output) -> Output:
        if output.name not in ("grad_weight", "grad_bias"):
            return output
        if output.name == "grad_weight" and (strides := form.weight_format) is not None:
            output = replace(output, strides=strides, written=torch.contiguous_format if strides[1] == 1 else None)
        return replace(output, dtype=form.dtype)

    return replace(program, outputs=tuple(map(changed, program.outputs)))


# What calls on a GPU are to compile, worked out before they are made.


def launches_of(
    direction: Pass, tensors: Tensors, sizes: Any, arguments: Arguments, asked: Form | None = None
) -> list[Launch]:
    """The launches of what :func:`prepared` prepares, from tensors that may be without data."""
    options, where, first = Options(*hashable(arguments)), name_of(direction), tensors[0]
    form = asked or _form_of(direction, tensors)
    current = selection.torch_precision(first.dtype, first.device)
    problem = checked_problem(where, tensors, sizes, options)
    config, weight_config = _configs(direction, problem, tensors, options, current)
    programs = programs_of(direction, config, weight_config, options.algorithm, where)
    if form.with_bias and (of_bias := _bias_grad_program(_config_of_gradient(first))) is not None:
        programs.append(of_bias)
    if direction == "forward":
        tensors = _given(tensors, form.dtype)
    else:
        programs = [_in_form(program, form) for program in programs]
    given = dict(zip(ARGUMENT_NAMES[where], tensors, strict=False))
    named = [(program, tuple(given[name] for name in program.arguments)) for program in programs]
    return [launch for program, operands in named for launch in launches(program, operands, config.device)]


def programs_of(direction: Pass, config: Config, weight_config: Config, algorithm: str, where: str) -> list[Program]:
    """The program of a pass, or of the gradients that torch's operator does not compute."""
    if (program := _program(direction, config, weight_config, algorithm, where)) is not None:
        return [program]
    if direction != "grads":
        return []
    gradients = selection.choose_gradients(config, weight_config, algorithm, where)
    return [program for program in _gradient_programs(gradients, config, weight_config) if program is not None]


def ahead_of(
    key: Hashable, device: torch.device, launches_of: Callable[[], Callable[[], Iterable[Launch]]]
) -> Future[Any] | None:
    """Compile in the background, once for each key, what calls to come launch. Nothing else follows from it.

    What is raised is dropped: the call that is made raises it. None where no kernels can be had.

    Args:
        key, device: what calls are known by, and where they compute.
        launches_of: makes what works the launches out, which is to hold no data.
    """

    def make() -> Future[Any] | None:
        if why_no_kernels(device) is not None:
            return None
        from gemmconv.kernels import bind  # the CUDA packages are there

        launches = launches_of()

        def quietly() -> Iterable[Launch]:
            token = ahead.set(True)
            try:
                return launches()
            finally:
                ahead.reset(token)

        return bind.compile_ahead(quietly, device)

    future: Future[Any] | None = planned(("ahead", key), make) if device.type == "cuda" else None
    return future


def compile_forward_ahead(tensors: Tensors, arguments: Arguments) -> Future[Any] | None:
    """Choose and compile in the background what a forward pass wants; see :func:`ahead_of`."""

    def of_forward() -> Callable[[], list[Launch]]:
        given = tuple(map(without_data, tensors))
        return lambda: launches_of("forward", given, None, arguments)

    return ahead_of(("forward", *map(signature, tensors), repr(arguments)), tensors[0].device, of_forward)


def layer_programs(config: Config, backward: bool) -> list[Program]:
    """The programs of a layer's forward pass and of its gradients; none of what torch's operator computes."""
    programs = programs_of("forward", config, config, "auto", "conv_transpose2d")
    if backward:
        of_gradients, shape = replace(config, bias=False), config.problem.output_shape
        programs += programs_of("grads", of_gradients, of_gradients, "auto", "conv_transpose2d_grads")
        grad = WithoutData.of(shape, strides_of(shape, config.memory_format), config.dtype, config.device)
        of_bias = _bias_grad_program(replace(_config_of_gradient(grad), spec=config.spec)) if config.bias else None
        programs += [] if of_bias is None else [of_bias]
    return programs


def without_data(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Any:
    """A tensor of the same shape, strides and device, of its dtype or this one; gradients are wanted alike."""
    if tensor is None:
        return None
    made = WithoutData.of(tensor.shape, tensor.stride(), dtype or tensor.dtype, tensor.device)
    return made.requires_grad_(tensor.requires_grad)


# Prepared calls.


def _torchs_with_casts(call: Callable[..., Tensor], dtype: torch.dtype, form: Form) -> Callable[..., Any]:
    """A forward call of torch's for weight and bias in the form's dtype."""
    if form.dtype is None:
        return call

    def with_casts(input: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        casts = [one.to(dtype) for one in (weight, bias) if one is not None]
        output = call(input, *casts, *[None] * (bias is None))
        return (output, *casts) if form.keeps_casts else output

    return with_casts


def _bound(program: Program, tensors: Tensors, form: Form) -> Callable[..., Any]:
    """The call of a program of gradients, which returns them in this form."""
    grad_output = tensors[0]
    of_bias = _bias_grad_program(_config_of_gradient(grad_output)) if form.with_bias else None
    if of_bias is not None:
        program = _after(of_bias, program, program.arguments)
    call = _in_form(program, form).bound(grad_output.device, tensors)
    return call if of_bias is not None else _with_bias(call, grad_output, form)


def _after(earlier: Program, program: Program, arguments: Sequence[str]) -> Program:
    """A program behind another, whose outputs are returned behind its own.

    What the earlier one keeps aside lies where the outputs of this one will be: see gemmconv/kernels/bind.py.
    """
    return replace(one_after_the_other(arguments, earlier, program), outputs=(*program.outputs, *earlier.outputs))


def _returning(direction: Pass, call: Callable[..., Any], grad_output: Tensor, form: Form) -> Callable[..., Any]:
    """A call of gradients that are torch's, which returns them in this form; the weight's is the last."""
    strides, dtype = form.weight_format, form.dtype
    if direction != "input_grad" and strides is not None:
        if (returning := getattr(call, "returning", None)) is not None:  # of one call of torch's
            call = returning(strides)
        else:
            call = _with_last(call, lambda one: with_strides(one, strides))
    if direction != "input_grad" and dtype is not None:
        call = _with_last(call, lambda one: one.to(dtype))
    return _with_bias(call, grad_output, form)


def _with_last(call: Callable[..., Any], change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def with_last(*tensors: Tensor) -> Any:
        results = call(*tensors)
        return (*results[:-1], change(results[-1])) if isinstance(results, tuple) else change(results)

    return with_last


def _with_bias(call: Callable[..., Any], grad_output: Tensor, form: Form) -> Callable[..., Any]:
    """The call of gradients, which returns the bias's too if that is wanted."""
    if not form.with_bias:
        return call
    bias_gradient = _prepared_bias_gradient(grad_output, form)  # by a kernel, whatever computes the others

    def with_bias(grad_output: Tensor, *tensors: Tensor) -> Any:
        results = call(grad_output, *tensors)
        of_bias = bias_gradient(grad_output)
        return (*results, of_bias) if isinstance(results, tuple) else (results, of_bias)

    return with_bias


def bias_gradient(grad_output: Tensor) -> Tensor:
    """The sum over images and pixels, of dense tensors; the same bits as where it comes with other gradients."""
    with _on(grad_output.device):
        key = "bias_grad", signature(grad_output)
        found: Tensor = planned(key, lambda: _prepared_bias_gradient(grad_output, _USUAL))(grad_output)
    return found


def _prepared_bias_gradient(grad_output: Tensor, form: Form) -> Callable[[Tensor], Tensor]:
    def by_torch() -> Callable[[Tensor], Tensor]:
        return lambda grad_output: grad_output.sum((0, 2, 3), dtype=form.dtype)

    def prepare() -> Callable[[Tensor], Tensor]:
        program = _bias_grad_program(_config_of_gradient(grad_output))
        if program is None:
            return by_torch()
        return _in_form(program, form).bound(grad_output.device, (grad_output,))

    return with_fallback(grad_output.device, prepare, by_torch)


def _config_of_gradient(grad_output: Tensor) -> Config:
    """What a bias's gradient depends on, in the format of the gradient that it is of."""
    images, channels, height, width = grad_output.shape
    problem = Problem(images, 1, channels, 1, (height, width), (1, 1))
    return config_of(problem, grad_output, grad_output, Options(), "ieee")


def _bias_grad_program(config: Config) -> Program | None:
    """None where torch adds up."""
    if config.device.type != "cuda" or why_no_kernels(config.device, config.spec) is not None:
        return None
    return bias_grad.program(config)


def gradients_call(
    gradients: selection.Gradients, config: Config, weight_config: Config, tensors: Tensors, form: Form = _USUAL
) -> Callable[..., Any]:
    """Prepare both gradients as they were chosen, from (grad_output, input, weight)."""
    if (program := both_programs(gradients, config, weight_config)) is not None:
        return _bound(program, tensors, form)
    mixed = _mixed_grads(gradients, config, weight_config, tensors, form)
    return mixed or _returning("grads", _prepared_grads(gradients, config, weight_config), tensors[0], form)


def _prepared_grads(
    gradients: selection.Gradients, config: Config, weight_config: Config
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepare both gradients of one backward pass, perhaps in channels_last between conversions of the tensors."""
    if gradients.via_channels_last:
        last = replace(config, memory_format=torch.channels_last)
        return prepare_via_channels_last(config, both_gradients(gradients, last, last), gradients.transposes_weight)
    return both_gradients(gradients, config, weight_config)


def _mixed_grads(
    gradients: selection.Gradients, config: Config, weight_config: Config, tensors: Tensors, form: Form
) -> Callable[..., Any] | None:
    """Prepare both gradients where torch's operator computes one of them and a program the other, else None."""
    if config.device.type != "cuda" or gradients.via_channels_last or gradients.at_once or gradients.share:
        return None
    of_input, of_weight = _gradient_programs(gradients, config, weight_config)
    grad_output, input, weight = tensors
    if of_input is None and of_weight is not None:
        torchs, ours = gradients.input_grad.input_grad(config), _bound(of_weight, (grad_output, input), form)

        def by_torch_and_us(grad_output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            found = ours(grad_output, input)
            return torchs(grad_output, weight), *(found if form.with_bias else (found,))

        return by_torch_and_us
    if of_input is not None and of_weight is None:
        ours, torchs = _bound(of_input, (grad_output, weight), form), gradients.weight_grad.weight_grad(weight_config)
        torchs = _returning("weight_grad", torchs, grad_output, form._replace(with_bias=False))

        def by_us_and_torch(grad_output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            first, *bias = ours(grad_output, weight) if form.with_bias else (ours(grad_output, weight),)
            return first, torchs(grad_output, input), *bias

        return by_us_and_torch
    return None


def both_programs(gradients: selection.Gradients, config: Config, weight_config: Config) -> Program | None:
    """Both gradients as one program, None where torch's operator or the CPU computes either.

    What is transposed for both is transposed once. The weight's is computed first.
    """
    if config.device.type != "cuda":
        return None
    programs = _gradient_programs(gradients, config, weight_config)
    if any(program is None for program in programs):
        return None
    *others, both = programs
    for other in others:
        both = _after(both, other, ("grad_output", "input", "weight"))
    if not gradients.via_channels_last:
        return both
    strides = strides_of(config.problem.input_shape, config.memory_format)
    of_input = replace(both.outputs[0], strides=strides, written=both.outputs[0].written or torch.channels_last)
    return replace(both, outputs=(of_input, *both.outputs[1:]))


def _gradient_programs(gradients: selection.Gradients, config: Config, weight_config: Config) -> list[Any]:
    """The programs of the input's and the weight's gradient, or one of both; None for torch's operator."""
    computed = config, weight_config
    if gradients.via_channels_last:
        computed = (replace(config, memory_format=torch.channels_last),) * 2
    passes: tuple[tuple[Config, Pass], ...] = (computed[0], "input_grad"), (computed[1], "weight_grad")
    if gradients.at_once:
        passes = ((replace(computed[0], weight_format=computed[1].memory_format), "grads"),)
    choices = gradients.choices(*computed)
    return [choice and choice.program(*of) for choice, of in zip(choices, passes, strict=True)]


def both_gradients(
    gradients: selection.Gradients, config: Config, weight_config: Config
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepare both gradients: of one call where an algorithm has it, else grad_output is turned once, if at all."""
    if gradients.at_once or gradients.are_torchs_in_one_call(config, weight_config):
        return gradients.input_grad.grads(config, weight_config)
    turned = to_nchw(config, config.problem.output_shape) if gradients.share else None
    input_grad = gradients.input_grad.input_grad(config)
    weight_grad = gradients.weight_grad.weight_grad(weight_config)

    def call(grad_output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if turned is not None:
            grad_output = turned(grad_output)
        return input_grad(grad_output, weight), weight_grad(grad_output, input)

    return call


def _casting(input: Tensor, weight: Tensor, bias: Tensor | None = None, *arguments: Any) -> Tensor:
    """conv_transpose2d of float32 that it casts to the input's dtype: what casts in compiled code come to."""
    cast = [one.to(input.dtype) if one is not None and one.dtype is torch.float32 else one for one in (weight, bias)]
    output: Tensor = OPERATORS["conv_transpose2d"](input, *cast, *arguments)
    return output


def _im2col(input: Tensor, *arguments: Any) -> Tensor:
    window = Window(*hashable(arguments))
    key = "im2col", signature(input), window
    with _on(input.device):
        plan = planned(key, lambda: prepare_im2col(im2col_problem(input, window), input.dtype, input.device))
        return plan(input)


def _col2im(columns: Tensor, output_size: Any, *arguments: Any) -> Tensor:
    size, window = tuple(output_size), Window(*hashable(arguments))
    key, dtype, device = ("col2im", signature(columns), size, window), columns.dtype, columns.device
    with _on(device):
        plan = planned(key, lambda: prepare_col2im(col2im_problem(columns, size, window), dtype, device))
        return plan(columns)


for _direction in PASSES:
    _where = name_of(_direction)
    register(_where, partial(_compute, _direction, _where), "CompositeExplicitAutograd")
register("conv_transpose2d_casting", _casting, "CompositeImplicitAutograd")
register("im2col", _im2col, "CompositeExplicitAutograd")
register("col2im", _col2im, "CompositeExplicitAutograd")


# torch's own operator, where it serves a call.


def torchs_conv_transpose2d(input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """torch's own operator, which takes every mode and kind of tensor, of arguments that ours would take.

    Raises:
        RuntimeError, NotImplementedError: as the operator.
    """
    if not torch.compiler.is_compiling():  # what is traced has no sizes yet
        tensors = input, weight, bias
        cast = torch.float32 if torch.is_autocast_enabled(input.device.type) else None  # makes all of one dtype
        kinds = None if cast else tuple(None if one is None else (one.dtype, one.device) for one in tensors)
        shapes = input.shape, weight.shape, None if bias is None else bias.shape
        planned(
            ("check", shapes, kinds, geometry),
            lambda: checked_problem("conv_transpose2d", _batched(tensors, cast), None, geometry),
        )
    return torch.conv_transpose2d(input, weight, bias, *geometry)


def _batched(tensors: Tensors, cast: torch.dtype | None) -> Tensors:
    """A call's tensors for its checks: the input with a batch; of the dtype that autocast makes them, without data."""
    input, *others = tensors
    tensors = input.unsqueeze(0) if input.dim() == 3 else input, *others
    if cast is None or input.dtype == torch.float64:
        return tensors
    return tuple(None if one is None else torch.empty_like(one, dtype=cast, device="meta") for one in tensors)


def is_left_to_torch(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> bool:
    """Whether a call, with the gradients that it may be asked for, is torch's own with torch's settings.

    torch's operator then serves it in any mode. Raises what is wrong with the call.
    """
    algorithm, device = arguments[5], input.device
    if algorithm not in ("auto", "native") or selection.is_deterministic(algorithm, device, spec_of(device)):
        return False
    tracked = torch.is_grad_enabled()
    wanted = tracked and input.requires_grad, tracked and weight.requires_grad
    kind = device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    dtype = input.dtype if cast is None or input.dtype == torch.float64 else cast
    current = selection.torch_precision(dtype, device)

    def make() -> bool:
        options, tensors = Options(*arguments), _batched((input, weight, bias), cast)
        problem = checked_problem("conv_transpose2d", tensors, None, options)
        config = config_of(problem, tensors[0], tensors[1], options, current, bias is not None)
        config = replace(config, device=device, spec=spec_of(device), trained=wanted[1] and input.is_cpu)
        left = selection.leaves_all_to_torch(config, algorithm, "conv_transpose2d", *wanted)
        if left:
            selection.log_choice(config, config, "forward", algorithm)
        if left and algorithm == "auto" and (cause := missing(device)) is not None:
            warn_once(cause)
        return left

    kinds = device, input.dtype, weight.dtype, cast, current, None if bias is None else (bias.shape, bias.dtype)
    layout = input.shape, input.stride(), weight.shape, weight.stride()
    answer: bool = planned(("torch", layout, kinds, arguments, wanted), make)
    return answer
