"""A volume's forward pass as one tensor-core product (conv/gemm_mma), as an operator; its gradients are torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gemmconv.algorithms.fallback import with_fallback
from gemmconv.device import DeviceSpec, make_current, spec_of
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Precision
from gemmconv.kernels.conv import gemm_mma
from gemmconv.ops.call_cache import find_or_make, tensor_signature
from gemmconv.selection import torch_precision

_SCHEMA = (
    "(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] output_padding,"
    " SymInt groups, SymInt[] dilation, str? precision) -> Tensor"
)


def _spec_of(device: torch.device) -> DeviceSpec:
    return spec_of(device)


def precision_of(dtype: torch.dtype, device: torch.device) -> Precision:
    """The precision of torch's convolutions, for a choice; a compiled graph keeps what it was when it was traced."""
    return torch_precision(dtype, device)


# torch.compile can trace neither, and takes the results as constants.
_spec_of._dynamo_marked_constant = precision_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def config_of(
    problem: Problem, dtype: torch.dtype, device: torch.device, precision: Precision, last: bool = False
) -> Config:
    """The configuration of a volume's call; ``last``: it is in channels_last_3d, which the kernel does not take."""
    memory_format = torch.channels_last if last else torch.contiguous_format
    return Config(problem, dtype, device, precision, memory_format=memory_format, spec=_spec_of(device))


def conv_transpose3d(
    input: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem, precision: Precision | None
) -> Tensor:
    """The transposed convolution of a batch of contiguous volumes, ``[N, C_in, D, H, W]``, which has been checked.

    Without a precision each call follows torch's setting, in a compiled graph too.
    """
    output: Tensor = _operator(input, weight, bias, *problem.geometry, precision)
    return output


def _compute(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    geometry = [one if isinstance(one, int) else tuple(one) for one in arguments[:-1]]
    rounding: Precision = arguments[-1] or torch_precision(input.dtype, input.device)
    tensors = (input.contiguous(), weight.contiguous(), bias)
    key = "volume", *map(tensor_signature, tensors), *geometry, rounding

    def torchs() -> Callable[..., Tensor]:
        return lambda *tensors: torch.conv_transpose3d(*tensors, *geometry)

    def ours() -> Callable[..., Tensor]:
        config = config_of(_problem(input.shape, weight.shape, *geometry), input.dtype, input.device, rounding)
        if gemm_mma.KERNEL.why_not(config, "forward") is not None:
            return torchs()
        return gemm_mma.KERNEL.prepare(config, "forward", gemm_mma.KERNEL.tile(config, "forward"))

    with make_current(input.device):
        call = find_or_make(key, lambda: with_fallback(input.device, ours, torchs))
        output: Tensor = call(*tensors)
        return output


def _problem(input: Sequence[int], weight: Sequence[int], *geometry: Any) -> Problem:
    stride, padding, output_padding, groups, dilation = geometry
    sizes: Any = tuple(input[2:]), tuple(weight[2:]), stride, padding, output_padding, dilation
    return Problem(input[0], input[1], weight[1] * groups, groups, *sizes)


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    return input.new_empty(_problem(input.shape, weight.shape, *arguments[:5]).output_shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, *ctx.geometry, _ = inputs
    ctx.save_for_backward(input, weight)
    ctx.bias_sizes = None if bias is None else list(bias.shape)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    stride, padding, output_padding, groups, dilation = ctx.geometry
    gradients = torch.ops.aten.convolution_backward(
        *(grad_output, *ctx.saved_tensors, ctx.bias_sizes, stride, padding, dilation),
        *(True, output_padding, groups, list(ctx.needs_input_grad[:3])),
    )
    return *gradients, *(None,) * 6


_operator = torch.library.custom_op("gemmconv::conv_transpose3d", _compute, mutates_args=(), schema=_SCHEMA)
_operator.register_fake(_fake)
_operator.register_autograd(_backward, setup_context=_save)
