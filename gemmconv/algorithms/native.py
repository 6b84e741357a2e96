"""``native``: torch's own operator (cuDNN on CUDA, oneDNN on the CPU). The baseline, and the fallback."""

from __future__ import annotations

import math

import torch

from gemmconv.algorithms.base import Config, Direction, Forward, Gradient, strides_of, with_strides


class Native:
    """See the module."""

    name = "native"
    summary = "torch's own operator: cuDNN on CUDA, oneDNN on the CPU"

    def why_not(self, config: Config) -> str | None:
        on_cuda_float32 = config.device.type == "cuda" and config.dtype == torch.float32
        if on_cuda_float32 and config.precision != config.torch_precision:
            return (
                f"precision follows torch.backends.cudnn.conv.fp32_precision, now {config.torch_precision!r}, "
                f"got precision={config.precision!r}; change the setting or choose another algorithm"
            )
        return None

    def workspace_bytes(self, config: Config, direction: Direction) -> int:
        """0: torch decides for itself and does not say."""
        return 0

    def estimate(self, config: Config, direction: Direction) -> float:
        """Infinite: which of its kernels cuDNN takes, and how long that runs, it does not say beforehand."""
        return math.inf

    def forward(self, config: Config) -> Forward:
        p = config.problem
        strides = strides_of(p.output_shape, config.memory_format)

        def call(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            output = torch.conv_transpose2d(
                input, weight, bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation
            )
            return with_strides(output, strides)

        return call

    def input_grad(self, config: Config) -> Gradient:
        strides = strides_of(config.problem.input_shape, config.memory_format)

        def call(grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            input = grad_output.new_empty(1).expand(config.problem.input_shape)  # only its shape is used
            return with_strides(_backward(config, grad_output, input, weight, 0), strides)

        return call

    def weight_grad(self, config: Config) -> Gradient:
        strides = strides_of(config.problem.weight_shape, torch.contiguous_format)

        def call(grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
            weight = grad_output.new_empty(1).expand(config.problem.weight_shape)  # only its shape is used
            return with_strides(_backward(config, grad_output, input, weight, 1), strides)

        return call


def _backward(
    config: Config, grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, which: int
) -> torch.Tensor:
    p = config.problem
    gradients = torch.ops.aten.convolution_backward(
        grad_output,
        input,
        weight,
        None,
        p.stride,
        p.padding,
        p.dilation,
        True,
        p.output_padding,
        p.groups,
        [which == 0, which == 1, False],
    )
    return gradients[which]
