"""A volume's forward pass as one tensor-core product (conv/gemm_mma), as an operator; its gradients are torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemmconv import flops
from gemmconv.algorithms.fallback import with_fallback
from gemmconv.device import DeviceSpec, make_current, spec_of
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Precision
from gemmconv.kernels.conv import gemm_mma
from gemmconv.kernels.forms import launches
from gemmconv.kernels.program import Launch, Program
from gemmconv.ops.ahead import compile_in_background
from gemmconv.ops.autocast import cast_as_autocast, is_autocasting
from gemmconv.ops.call_cache import find_or_make, tensor_signature
from gemmconv.ops.recording import NeedQueries
from gemmconv.ops.schemas import Tensors, as_hashable, without_data
from gemmconv.selection import choose, current_config, torch_precision

Call = Callable[..., Tensor]  # of input, weight, and bias or None

_SCHEMA = (
    "(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] output_padding,"
    " SymInt groups, SymInt[] dilation, str? precision, int? workspace_limit=None) -> Tensor"
)


class Volume(NamedTuple):
    """The call of a volume without its data, as torch.compile can trace it, unlike a Config with a device's properties.

    Attributes:
        problem, dtype, device: of the call; the dtype is what autocast makes of the tensors.
        precision: of float32 products.
        last: whether the input or the weight is in channels_last_3d, which the kernel does not take.
        workspace_limit: bytes of temporary memory of the product; None for the default.
    """

    problem: Problem
    dtype: torch.dtype
    device: torch.device
    precision: Precision
    last: bool = False
    workspace_limit: int | None = None

    def config(self, spec: DeviceSpec | None = None) -> Config:
        """Its configuration, on its device or one with other properties; torch.channels_last is channels_last_3d."""
        memory_format = torch.channels_last if self.last else torch.contiguous_format
        given = self.problem, self.dtype, self.device, self.precision, self.workspace_limit, memory_format
        return current_config(*given, algorithm="native", spec=spec)  # torch's operator with torch's own settings


def is_hopper(device: torch.device) -> bool:
    return spec_of(device).is_hopper


is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile cannot trace it


def conv_transpose3d(
    input: Tensor, weight: Tensor, bias: Tensor | None, volume: Volume, precision: Precision | None
) -> Tensor:
    """The transposed convolution of a batch of contiguous volumes, ``[N, C_in, D, H, W]``, which has been checked.

    Without a precision each call follows torch's setting, in a compiled graph too.
    """
    if not torch.compiler.is_compiling():
        flops.register()
    output: Tensor = OPERATOR(input, weight, bias, *volume.problem.geometry, precision, volume.workspace_limit)
    return output


def prepare(tensors: Tensors, volume: Volume) -> Call:
    """Prepare an eager call as one product on tensors of this signature, with an autograd node if it records gradients.

    Args:
        tensors: input, weight, and bias or None; where autocast is on, it casts them in each call.
        volume: the call.
    """
    config, casts = volume.config(), is_autocasting(volume.device.type)
    of_input, of_weight, of_bias = (one is not None and one.requires_grad for one in tensors)
    records = torch.is_grad_enabled() and (of_input or of_weight or of_bias)
    run = with_fallback(config.device, *_calls(config))
    forward = run if all(one is None or one.is_contiguous() for one in tensors) else _with_copies(run)
    state = forward, config.problem.geometry, NeedQueries((of_input, of_weight, of_bias))
    # torch's own ``apply`` looks for transforms first. A call that has a signature is outside of them.
    apply: Any = super(torch.autograd.Function, _Node).apply

    def call(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if casts:
            input, weight, bias = (cast_as_autocast(one, config.dtype) for one in (input, weight, bias))
        output: Tensor = apply(input, weight, bias, state) if records else forward(input, weight, bias)
        return output

    return call


@lru_cache(maxsize=256)
def program_of(config: Config) -> Program | None:
    """The program of a forward pass; None where the kernel cannot serve the layer."""
    kernel = gemm_mma.KERNEL
    tile = kernel.tile(config, "forward") if kernel.refuses(config, "forward") is None else None
    return None if tile is None else kernel.program(config, "forward", tile)


def _calls(config: Config) -> tuple[Callable[[], Call], Callable[[], Call]]:
    """Functions that prepare the forward call on contiguous tensors: by the kernel, if it can serve, and by torch."""

    def torchs() -> Call:
        choose(config, "native", "conv_transpose3d")  # raises where torch's operator rounds otherwise
        return lambda input, weight, bias: torch.conv_transpose3d(input, weight, bias, *config.problem.geometry)

    def ours() -> Call:
        program = program_of(config)
        return torchs() if program is None else program.prepare(config.device)

    return ours, torchs


def _with_copies(call: Call) -> Call:
    """A call that first copies tensors that are not contiguous."""
    return lambda *tensors: call(*(one if one is None else one.contiguous() for one in tensors))


def compile_forward_ahead(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Future[Any] | None:
    """Compile in the background what a call of the operator launches; see :func:`ahead.compile_in_background`."""
    volume = volume_of(input, weight, *arguments)

    def make_launches() -> Callable[[], list[Launch]]:
        operands = tuple(map(without_data, (input, weight, bias)))

        def list_launches() -> list[Launch]:
            program = program_of(volume.config())
            return [] if program is None else launches(program, operands, volume.device)

        return list_launches

    return compile_in_background(("volume", volume, bias is None), volume.device, make_launches)


def _compute(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    volume = volume_of(input, weight, *arguments)

    def make() -> Call:
        return _with_copies(with_fallback(volume.device, *_calls(volume.config())))

    with make_current(input.device):
        output: Tensor = find_or_make((volume, tensor_signature(bias)), make)(input, weight, bias)
        return output


def volume_of(input: Tensor, weight: Tensor, *arguments: Any) -> Volume:
    *geometry, precision, workspace_limit = (*as_hashable(arguments), None)[:7]  # a call may leave out the last
    problem = _problem(input.shape, weight.shape, *geometry)
    rounding = precision or torch_precision(input.dtype, input.device)
    return Volume(problem, input.dtype, input.device, rounding, workspace_limit=workspace_limit)


def _problem(input: Sequence[int], weight: Sequence[int], *geometry: Any) -> Problem:
    stride, padding, output_padding, groups, dilation = geometry
    sizes: Any = tuple(input[2:]), tuple(weight[2:]), stride, padding, output_padding, dilation
    return Problem(input[0], input[1], weight[1] * groups, groups, *sizes)


def fake(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    return input.new_empty(_problem(input.shape, weight.shape, *arguments[:5]).output_shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save for the backward pass, as custom_op asks for it; ``inputs`` begins with three tensors and the geometry."""
    input, weight, bias, *ctx.geometry = inputs[:8]
    ctx.save_for_backward(input, weight)
    ctx.bias_sizes = None if bias is None else list(bias.shape)


def _gradients(ctx: Any, grad_output: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """torch's gradients of input, weight and bias, those that are needed."""
    stride, padding, output_padding, groups, dilation = ctx.geometry
    gradients: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
        *(grad_output, *ctx.saved_tensors, ctx.bias_sizes, stride, padding, dilation),
        *(True, output_padding, groups, list(needs)),
    )
    return gradients


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    return *_gradients(ctx, grad_output, needs[:3]), *[None] * (len(needs) - 3)


class _Node(torch.autograd.Function):
    """The autograd node of a prepared call; ``state``: the forward call, the geometry, and the queries for needs."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        call, geometry, ctx.queries = state
        _save(ctx, (input, weight, bias, *geometry), None)
        return call(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad_output, ctx.queries.needs(ctx)), None


OPERATOR = torch.library.custom_op("gemmconv::conv_transpose3d", _compute, mutates_args=(), schema=_SCHEMA)
OPERATOR.register_autograd(_backward, setup_context=_save)
