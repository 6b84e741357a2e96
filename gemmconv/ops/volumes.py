"""Volumes by kernels of their own: an operator for every mode, and prepared calls for plain eager calls.

A forward pass is one product on tensor cores (conv/gemm_mma), or a product into columns and a fold (``gemm_col2im``),
whichever is expected to take less time. Gradients are computed by ``gemm_col2im``, or by torch's operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gemmconv.algorithms.fallback import with_fallback
from gemmconv.algorithms.gemm_col2im import GemmCol2im
from gemmconv.device import DeviceSpec, make_current, spec_of
from gemmconv.dispatch import transforms_active
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Choice, Config, Precision, choices, strides_of
from gemmconv.kernels.conv import gemm_mma
from gemmconv.kernels.forms import launches
from gemmconv.kernels.program import Launch, Program
from gemmconv.ops.ahead import compile_in_background
from gemmconv.ops.autocast import cast_as_autocast, is_autocasting
from gemmconv.ops.autograd import Gradients, Needs, needed_pass, of_all, required_gradients
from gemmconv.ops.call_cache import find_or_make, tensor_signature
from gemmconv.ops.configs import Convention
from gemmconv.ops.gradients import prepare_gradient
from gemmconv.ops.pass_programs import bias_grad_program, pass_program
from gemmconv.ops.recording import PlainCall, with_node
from gemmconv.ops.schemas import Tensors, WithoutData, as_hashable, without_data
from gemmconv.selection import BY_NAME, choose, current_config, torch_precision

_GEMM_COL2IM, _NCHW = cast(GemmCol2im, BY_NAME["gemm_col2im"]), torch.contiguous_format
DENSE = 16  # channels of a group from which on tensor cores are well used
FEW = 64  # channels of a group up to which cuDNN is slow
_MANY_COLUMNS, _MANY_TAPS = 1 << 26, 8  # elements; taps that reach an output
_GEOMETRY = (
    "SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt groups, SymInt[] dilation, str? precision,"
)
_SCHEMA = f"(Tensor input, Tensor weight, Tensor? bias, {_GEOMETRY} int? workspace_limit=None) -> Tensor"
_GRADS_SCHEMA = (
    f"(Tensor grad_output, Tensor input, Tensor weight, {_GEOMETRY} int? workspace_limit, bool[] needs)"
    " -> (Tensor, Tensor, Tensor)"
)


class Volume(NamedTuple):
    """A call on volumes without its data. torch.compile can trace it, unlike a Config with a device's properties."""

    problem: Problem
    dtype: torch.dtype  # what autocast casts the tensors to, if it is on; else theirs
    device: torch.device
    precision: Precision  # of float32 products
    last: bool = False  # whether the input or the weight is in channels_last_3d, which the kernel does not take
    workspace_limit: int | None = None  # bytes of temporary memory of a call; None for the default
    requested: Precision | None = None  # the precision that the caller asked for; None follows torch's setting

    def config(self, spec: DeviceSpec | None = None) -> Config:
        """Its configuration, on its device or one with other properties; torch.channels_last is channels_last_3d."""
        memory_format = torch.channels_last if self.last else torch.contiguous_format
        given = self.problem, self.dtype, self.device, self.precision, self.workspace_limit, memory_format
        # By this name torch's operator keeps torch's own settings, and is not limited to deterministic kernels.
        return current_config(*given, algorithm="native", spec=spec)


def is_hopper(device: torch.device) -> bool:
    return spec_of(device).is_hopper


is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile cannot trace it


def prepare(tensors: Tensors, volume: Volume) -> PlainCall:
    """Prepare an eager call on tensors of this signature, with an autograd node if it records gradients.

    ``tensors`` are input, weight, and bias or None; where autocast is on, it casts them in each call.
    """
    config, casts = volume.config(), is_autocasting(volume.device.type)
    needs = required_gradients(*tensors)
    run = _forward(config, tuple(without_data(one, config.dtype) for one in tensors) if casts else tensors)
    if torch.is_grad_enabled() and any(needs):
        backward = _Backward(config, volume.requested)
        backward.compile_ahead(needs)
        run = with_node(run, backward, needs)
    if not casts:
        return run
    return lambda *tensors: run(*(cast_as_autocast(one, config.dtype) for one in tensors))


def torch_is_faster(problem: Problem, dtype: torch.dtype, precision: Precision) -> bool:
    """Whether torch's operator is expected to compute a forward pass faster than the kernels for volumes.

    On an H200 cuDNN was up to 1.3 times as fast for deep layers, and as fast under a stride of 1 where the channels
    fill its tiles; without TF32, and where the kernel equals the stride, it never was.
    """
    channels, is_float32 = (problem.gemm_k, problem.group_out_channels), dtype == torch.float32
    if not is_dense(problem) or problem.is_apart or (is_float32 and precision == "ieee"):
        return False
    fill_tiles = all(count % (FEW if is_float32 else FEW // 2) == 0 for count in channels)
    return min(channels) > FEW or (max(problem.stride) == 1 and (fill_tiles or max(channels) > FEW))


def is_dense(problem: Problem) -> bool:
    """Whether a layer has one group, enough channels for tensor cores, and no dilation: what cuDNN is fast for."""
    channels = problem.gemm_k, problem.group_out_channels
    return problem.groups == max(problem.dilation) == 1 and min(channels) >= DENSE


def has_own_gradients(problem: Problem) -> bool:
    """Whether ``gemm_col2im`` computes the gradients, not torch's operator.

    On an H200 it was 1.1 to 3 times as fast, up to 90 times for depthwise layers, except on many columns of many
    channels, or of many taps (0.6 to 0.9 times).
    """
    p = problem
    has_few = min(p.gemm_k, p.group_out_channels) <= DENSE and p.taps <= _MANY_TAPS * math.prod(p.stride)
    return p.is_apart or has_few or p.column_elements <= _MANY_COLUMNS


@lru_cache(maxsize=256)
def choice_of(config: Config) -> Choice | None:
    """The kernel of a forward pass with the least expected time; None where torch's operator computes it."""
    if config.device.type != "cuda" or torch_is_faster(config.problem, config.dtype, config.precision):
        return None
    able = choices(config, "forward", (gemm_mma.KERNEL, _GEMM_COL2IM))
    return min(able, key=lambda choice: choice.seconds, default=None)


def program_of(config: Config) -> Program | None:
    """The program of a forward pass; None where torch's operator computes it."""
    choice = choice_of(config)
    return None if choice is None else choice.program(config, "forward")


def _forward(config: Config, tensors: Tensors) -> PlainCall:
    """Prepare the forward call on tensors of these strides: by a kernel, if one is faster, else by torch."""
    p, device = config.problem, config.device

    def torchs() -> PlainCall:
        choose(config, "native", "conv_transpose3d")  # raises where torch's operator rounds otherwise
        return lambda input, weight, bias: torch.conv_transpose3d(input, weight, bias, *p.geometry)

    def ours() -> PlainCall:
        program = program_of(config)
        return torchs() if program is None else program.bound(device, tensors)

    return with_fallback(device, ours, torchs)


def compile_forward_ahead(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Future[Any] | None:
    """Compile in the background what a call of the operator launches; see :func:`ahead.compile_in_background`."""
    volume = volume_of(input, weight, *arguments)

    def list_launches(*tensors: Any) -> list[Launch]:
        program = program_of(volume.config())
        return [] if program is None else launches(program, tensors, volume.device)

    return compile_in_background(("volume", volume), (input, weight, bias), list_launches)


def _compute(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    volume, tensors = volume_of(input, weight, *arguments), (input, weight, bias)
    with make_current(input.device):
        key = volume, *map(tensor_signature, tensors)
        return find_or_make(key, lambda: _forward(volume.config(), tensors))(*tensors)


def volume_of(input: Tensor, weight: Tensor, *arguments: Any) -> Volume:
    *geometry, precision, workspace_limit = (*as_hashable(arguments), None)[:7]  # a call may leave out the last
    stride, padding, output_padding, groups, dilation = geometry
    (batch, channels, *size), (_, channels_out, *kernel_size) = input.shape, weight.shape
    sizes: Any = tuple(size), tuple(kernel_size), stride, padding, output_padding, dilation
    problem = Problem(batch, channels, channels_out * groups, groups, *sizes)
    rounding = precision or torch_precision(input.dtype, input.device)
    return Volume(problem, input.dtype, input.device, rounding, False, workspace_limit, precision)


def fake(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    return input.new_empty(volume_of(input, weight, *arguments).problem.output_shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, weight, _, *ctx.arguments = inputs
    ctx.save_for_backward(input, weight)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    (input, weight), needs = ctx.saved_tensors, ctx.needs_input_grad[:3]
    volume = volume_of(input, weight, *ctx.arguments)
    problem, options = volume.problem, (volume.requested, volume.workspace_limit)
    others, is_first_order = [None] * len(ctx.arguments), not torch.is_grad_enabled() and not transforms_active()
    if is_first_order and grad_output.is_cuda and has_own_gradients(problem):
        found = GRADS_OPERATOR(grad_output, input, weight, *problem.geometry, *options, list(needs))
        return *(one if need else None for one, need in zip(found, needs, strict=True)), *others
    return *_torchs_gradients(grad_output, input, weight, problem, needs), *others


def _compute_gradients(grad: Tensor, input: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The gradients that are needed; an empty tensor for each other."""
    tensors, needs = (grad, input, weight), tuple(arguments[-1])
    volume = volume_of(input, weight, *arguments[:-1])
    with make_current(grad.device):
        key = "gradients", volume, needs, *map(tensor_signature, tensors)
        call = find_or_make(key, lambda: _Backward(volume.config(), volume.precision).prepare(*tensors, needs))
        found = call(*tensors)
    return tuple(one if need else grad.new_empty(0) for one, need in zip(found, needs, strict=True))


def _fake_gradients(grad: Tensor, input: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    shapes = input.shape, weight.shape, grad.shape[1:2]
    return tuple(grad.new_empty(of if need else (0,)) for of, need in zip(shapes, arguments[-1], strict=True))


def _torchs_gradients(grad: Tensor, input: Tensor, weight: Tensor, p: Problem, needs: Sequence[bool]) -> Gradients:
    by = [p.out_channels], p.stride, p.padding, p.dilation, True, p.output_padding, p.groups, list(needs)
    return torch.ops.aten.convolution_backward(grad, input, weight, *by)


class _Backward(NamedTuple):
    """The backward pass of a prepared call, as gemmconv/ops/recording.py asks for it."""

    config: Config  # of the forward call
    precision: Precision | None  # the argument; without one each backward pass follows torch's setting

    def __call__(self, grad: Tensor, input: Tensor | None, weight: Tensor | None, needs: Needs) -> Gradients:
        """torch's gradients, which can be differentiated in turn; tensors that none of them needs were not saved."""
        p = self.config.problem
        input = grad.new_empty(p.input_shape) if input is None else input
        weight = grad.new_empty(p.weight_shape) if weight is None else weight
        return _torchs_gradients(grad, input, weight, p, needs)

    def prepare(self, grad: Tensor, input: Any, weight: Any, needs: Needs) -> Callable[..., Gradients]:
        """Prepare a call that computes the gradients from tensors of these strides."""
        rounding = self.precision or torch_precision(self.config.dtype, self.config.device)
        config, (direction, tensors) = replace(self.config, precision=rounding), needed_pass(grad, input, weight, needs)
        by_torch: Callable[..., Gradients] = partial(self.__call__, needs=needs)

        def ours() -> Callable[..., Gradients]:
            convention = Convention(with_bias_grad=needs[2])
            return of_all(prepare_gradient(direction, _GEMM_COL2IM, config, tensors, convention), needs)

        return with_fallback(config.device, ours, lambda: by_torch) if gradients_are_ours(config, needs) else by_torch

    def compile_ahead(self, needs: Needs) -> None:
        """Compile in the background what the backward pass launches, while the forward pass's kernels compile, too."""
        config, p = self.config, self.config.problem
        if not gradients_are_ours(config, needs):
            return
        direction, shapes = needed_pass(p.output_shape, p.input_shape, p.weight_shape, needs)
        tensors = tuple(WithoutData.of(of, strides_of(of, _NCHW), config.dtype, config.device) for of in shapes)

        def list_launches(*tensors: Any) -> list[Launch]:
            of_bias = bias_grad_program(tensors[0]) if needs[2] else None
            programs = (pass_program(direction, _GEMM_COL2IM, config), tensors), (of_bias, tensors[:1])
            return [step for one, given in programs if one for step in launches(one, given, config.device)]

        compile_in_background(("volume gradients", config, needs), tensors, list_launches)


def gradients_are_ours(config: Config, needs: Needs) -> bool:
    """Whether ``gemm_col2im`` computes the gradients that are needed; a bias's alone is torch's."""
    able = has_own_gradients(config.problem) and _GEMM_COL2IM.why_not(config, "weight_grad") is None
    return able and config.device.type == "cuda" and (needs[0] or needs[1])


OPERATOR = torch.library.custom_op("gemmconv::conv_transpose3d", _compute, mutates_args=(), schema=_SCHEMA)
OPERATOR.register_autograd(_backward, setup_context=_save)
_GRADS = "gemmconv::conv_transpose3d_grads"
GRADS_OPERATOR = torch.library.custom_op(_GRADS, _compute_gradients, mutates_args=(), schema=_GRADS_SCHEMA)
GRADS_OPERATOR.register_fake(_fake_gradients)
