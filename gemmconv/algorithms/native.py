"""``native``: torch's own operator (cuDNN on CUDA, oneDNN on the CPU). The baseline, and the fallback.

What ``auto`` may take of it comes from cuDNN's deterministic kernels, the same bits on every run: gradients in TF32 and
16 bits, and the forward pass in 16 bits in channels_last, cuDNN's own format. They take as long as the others (public
and models, H200, geometric mean). For gradients in float32 they take 1.3 times as long and lose more than twice as
much, so there all follows torch's settings, and ``auto`` leaves it alone.
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

# And to its forward passes in channels_last in 16 bits: 12% from what was measured (geometric mean of 40 layers).
_FORWARD_LAUNCH_SECONDS = 10e-6
_FORWARD_RATE, _FORWARD_COPY_RATE = 650e12, 3.2e12
_FORWARD_CHANNELS, _FORWARD_EXPONENT = 128, 0.8  # how the rate falls below that many output channels
_LEAST_CHANNELS = 64  # below which, and with longer strides, cuDNN takes up to twice as long
_LARGEST_STRIDE_AREA = 4


def _rate(config: Config) -> float | None:
    """Operations a second of gradients that ``auto`` may take, None of others."""
    if config.dtype in (torch.float16, torch.bfloat16):
        return _HALF_RATE
    return _TF32_RATE if config.dtype == torch.float32 and config.precision == "tf32" else None


def _forward_seconds(config: Config) -> float | None:
    """What cuDNN takes for a forward pass that ``auto`` may leave to it, None of others. A bias costs another pass."""
    p = config.problem
    channels = p.in_channels, p.out_channels
    if config.memory_format is not torch.channels_last or config.dtype not in (torch.float16, torch.bfloat16):
        return None
    if p.groups > 1 or max(p.dilation) > 1 or math.prod(p.stride) > _LARGEST_STRIDE_AREA or p.in_pixels == 1:
        return None
    if min(channels) < _LEAST_CHANNELS or any(count % 8 for count in channels):
        return None
    used = min(1.0, p.out_channels / _FORWARD_CHANNELS) ** _FORWARD_EXPONENT
    moved = p.batch * (p.in_channels * p.in_pixels + p.out_channels * p.out_pixels) * config.dtype.itemsize
    arithmetic = p.useful_flops / (_FORWARD_RATE * used)
    return _FORWARD_LAUNCH_SECONDS + math.hypot(arithmetic, moved / _FORWARD_COPY_RATE)


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
        """Of a gradient: half of what cuDNN takes for both on an H200, within a factor of 1.5.

        Which kernels cuDNN takes, and how long they run, it does not say beforehand. Infinite for what is left to the
        others: layers with groups, and most forward passes.
        """
        if direction == "forward":
            seconds = _forward_seconds(config)
            return math.inf if seconds is None else seconds
        p, rate = config.problem, _rate(config)
        if p.groups > 1 or rate is None:
            return math.inf
        used = min(1.0, p.in_channels / _CHANNELS) * min(1.0, p.out_channels / _CHANNELS)
        moved = p.least_bytes(config.dtype.itemsize) / _COPY_RATE
        return _LAUNCH_SECONDS + p.useful_flops / (rate * used) + moved

    def forward(self, config: Config) -> Forward:
        p = config.problem
        strides = strides_of(p.output_shape, config.memory_format)
        reproducible = _forward_seconds(config) is not None

        def call(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            with _deterministic if reproducible else nullcontext():
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
