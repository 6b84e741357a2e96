"""``native``: torch's own operator (cuDNN on CUDA, oneDNN on the CPU). The baseline, and the fallback.

In TF32 and 16 bits its gradients come from cuDNN's deterministic kernels: ``auto`` may take them, and gives the same
bits on every run. They take as long as the others (public and models, H200, geometric mean). In float32 they take 1.3
times as long and lose more than twice as much, so there the gradients follow torch's settings, and ``auto`` leaves
them alone.
"""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext

import torch

from gemmconv.algorithms.base import Config, Direction, Forward, Gradient, strides_of, with_strides
from gemmconv.geometry import Shape4

# Fitted to cuDNN 9.19's backward passes of the suites public and models.
_LAUNCH_SECONDS = 35e-6
_TF32_RATE, _HALF_RATE = 250e12, 450e12  # operations a second
_CHANNELS = 45  # below which these fall
_COPY_RATE = 1e12  # bytes a second


def _rate(config: Config) -> float | None:
    """Operations a second of gradients that ``auto`` may take, None of others."""
    if config.dtype in (torch.float16, torch.bfloat16):
        return _HALF_RATE
    return _TF32_RATE if config.dtype == torch.float32 and config.precision == "tf32" else None


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
        """Of a gradient: half of what cuDNN takes for both on an H200, within a factor of 1.5. Else infinite.

        Which kernels cuDNN takes, and how long they run, it does not say beforehand. A forward call, and one with
        groups, is left to the others; a gradient may be one that they are slow at.
        """
        p, rate = config.problem, _rate(config)
        if direction == "forward" or p.groups > 1 or rate is None:
            return math.inf
        used = min(1.0, p.in_channels / _CHANNELS) * min(1.0, p.out_channels / _CHANNELS)
        moved = p.least_bytes(config.dtype.itemsize) / _COPY_RATE
        return _LAUNCH_SECONDS + p.useful_flops / (rate * used) + moved

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
            if config.memory_format is torch.channels_last:
                input = _in_channels_last(grad_output, config.problem.input_shape, strides)
            else:
                input = grad_output.new_empty(1).expand(config.problem.input_shape)  # only its shape is used
            return with_strides(_backward(config, grad_output, input, weight, 0), strides)

        return call

    def weight_grad(self, config: Config) -> Gradient:
        strides = strides_of(config.problem.weight_shape, torch.contiguous_format)

        def call(grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
            weight = grad_output.new_empty(1).expand(config.problem.weight_shape)  # only its shape is used
            return with_strides(_backward(config, grad_output, input, weight, 1), strides)

        return call


def _in_channels_last(tensor: torch.Tensor, shape: Shape4, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor of which only the shape and the format are used: in its input's format torch computes the gradient.

    It lies in the memory of ``tensor``, or in memory of its own where that is too small.
    """
    if math.prod(shape) <= tensor.numel() and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.detach().as_strided(shape, strides)
    return tensor.new_empty_strided(shape, strides)


class _Deterministic:
    """Has cuDNN take deterministic kernels while any thread is inside, and puts torch's setting back after the last."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch._C._get_cudnn_deterministic()
                torch._C._set_cudnn_deterministic(True)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch._C._set_cudnn_deterministic(self._before)


_deterministic = _Deterministic()


def _backward(
    config: Config, grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, which: int
) -> torch.Tensor:
    p = config.problem
    geometry = p.stride, p.padding, p.dilation, True, p.output_padding, p.groups
    with _deterministic if _rate(config) else nullcontext():
        gradients = torch.ops.aten.convolution_backward(
            grad_output, input, weight, None, *geometry, [which == 0, which == 1, False]
        )
    return gradients[which]
