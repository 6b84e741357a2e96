"""``native``: torch's own operator (cuDNN on CUDA, oneDNN on the CPU). The baseline, and the fallback.

What ``auto`` may take of it comes from cuDNN's deterministic kernels, the same bits on every run: gradients in TF32 and
16 bits, and the forward pass in 16 bits in channels_last, cuDNN's own format, or of one tap. They take as long as the
others (public and models, H200, geometric mean). For gradients in float32 they take 1.3 times as long and lose more
than twice as much, so there all follows torch's settings, and ``auto`` leaves it alone.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from gemmconv.algorithms.base import Config, Direction, Forward, Gradient, OneByOne, strides_of, with_strides
from gemmconv.geometry import Shape4

_HALF_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Cost:
    """What cuDNN takes for a pass, fitted on an H200.

    Attributes:
        launch: seconds.
        rate: operations a second of many channels.
        copy: bytes a second.
        in_exponent, out_exponent: how the operations fall with the channels below ``many``, of input and output.
    """

    launch: float
    rate: float
    copy: float
    in_exponent: float
    out_exponent: float
    many: int = 64

    def seconds(self, config: Config) -> float:
        p = config.problem
        rate = self.rate * min(1.0, p.in_channels / self.many) ** self.in_exponent
        rate *= min(1.0, p.out_channels / self.many) ** self.out_exponent
        return self.launch + math.hypot(p.useful_flops / rate, p.image_bytes(config.dtype.itemsize) / self.copy)


# Gradients of 58 layers, cuDNN 9.19, in TF32 and in 16 bits: 18 to 30% from what was measured (geometric mean). In NCHW
# it turns tensors round, but for input gradients of one tap; of channels that are not whole 16 bytes of a pixel,
# everywhere. Fitted to whole backward passes: both of its gradients take up to 15 us less than the sum of what each
# takes alone, one of its own and one of fused up to 19 us more. Those of TF32 in channels_last are of 72 layers by now,
# 20% off; choices by them take 1.4% longer than the best that was measured. In 16 bits it is 4%, mostly small layers,
# where cuDNN's times follow no such rule.
_GRADIENTS_NCHW = {
    ("input_grad", False): _Cost(24e-6, 150e12, 1.35e12, 1.0, 0.55),
    ("input_grad", True): _Cost(24e-6, 275e12, 1.35e12, 1.0, 0.55),
    ("weight_grad", False): _Cost(25e-6, 125e12, 0.92e12, 1.2, 0.8),
    ("weight_grad", True): _Cost(25e-6, 325e12, 0.92e12, 1.2, 0.8),
}
_GRADIENTS = {
    ("input_grad", False): _Cost(12.5e-6, 250e12, 12e12, 0.55, 0.93),
    ("input_grad", True): _Cost(16e-6, 600e12, 11e12, 0.55, 0.93),
    ("weight_grad", False): _Cost(17.5e-6, 200e12, 15.5e12, 0.84, 0.50, many=128),
    ("weight_grad", True): _Cost(23e-6, 505e12, 6e12, 1.3, 0.9),
}
# Input gradients take several times as long of fewer output channels, in TF32 in channels_last, and of smaller images.
_LEAST_OUT_CHANNELS_TF32, _LEAST_GRADIENT_PIXELS = 64, 16

# Forward passes in 16 bits, in channels_last or of one tap, of 40 layers: 12%. Of fewer channels or pixels, or longer
# strides, they take up to twice as long.
_FORWARD = _Cost(10e-6, 650e12, 3.2e12, 0.0, 0.8, many=128)
_LEAST_CHANNELS, _LEAST_PIXELS, _LARGEST_STRIDE_AREA = 64, 32, 4
_BIAS_RATE = 1.6e12  # bytes a second of the pass that adds it


def _seconds(config: Config, direction: Direction) -> float | None:
    """What cuDNN takes for a pass that ``auto`` may leave to it, None of others."""
    p, channels_last = config.problem, config.memory_format is torch.channels_last
    half = config.dtype in _HALF_TYPES
    if (
        config.device.type != "cuda"
        or p.groups > 1
        or not (half or (config.dtype == torch.float32 and config.precision == "tf32"))
    ):
        return None
    turns_nothing = channels_last or (p.taps == 1 and max(p.stride) == 1 and direction != "weight_grad")
    if direction == "input_grad":
        few = channels_last and not half and p.out_channels < _LEAST_OUT_CHANNELS_TF32
        if few or p.in_pixels < _LEAST_GRADIENT_PIXELS:
            return None
    if direction != "forward":
        odd = any(count * config.dtype.itemsize % 16 for count in (p.in_channels, p.out_channels))
        return (_GRADIENTS if turns_nothing and not odd else _GRADIENTS_NCHW)[direction, half].seconds(config)
    if not (turns_nothing and half) or p.in_pixels < _LEAST_PIXELS:
        return None
    channels = p.in_channels, p.out_channels
    if min(channels) < _LEAST_CHANNELS or any(count % 8 for count in channels):
        return None
    if max(p.dilation) > 1 or math.prod(p.stride) > _LARGEST_STRIDE_AREA:
        return None
    bias_bytes = 2 * p.batch * p.out_channels * p.out_pixels * config.dtype.itemsize if config.bias else 0
    return _FORWARD.seconds(config) + bias_bytes / _BIAS_RATE


class Native(OneByOne):
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
        """What cuDNN takes on an H200, roughly; infinite for what is left to the others.

        Which kernels cuDNN takes, and how long they run, it does not say beforehand.
        """
        seconds = _seconds(config, direction)
        return math.inf if seconds is None else seconds

    def turns(self, config: Config, direction: Direction) -> bool:
        return False

    def forward(self, config: Config) -> Forward:
        p = config.problem
        strides = strides_of(p.output_shape, config.memory_format)
        settings = _settings(config, "forward")

        def call(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            with settings:
                output = torch.conv_transpose2d(
                    input, weight, bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation
                )
            return with_strides(output, strides)

        return call

    def input_grad(self, config: Config) -> Gradient:
        strides = strides_of(config.problem.input_shape, config.memory_format)
        backward = _backward(config, "input_grad")

        def call(grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if config.memory_format is torch.channels_last:
                input = _in_channels_last(grad_output, config.problem.input_shape, strides)
            else:
                input = grad_output.new_empty(1).expand(config.problem.input_shape)  # only its shape is used
            return with_strides(backward(grad_output, input, weight), strides)

        return call

    def weight_grad(self, config: Config) -> Gradient:
        strides = strides_of(config.problem.weight_shape, torch.contiguous_format)
        backward = _backward(config, "weight_grad")

        def call(grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
            weight = grad_output.new_empty(1).expand(config.problem.weight_shape)  # only its shape is used
            return with_strides(backward(grad_output, input, weight), strides)

        return call


def _in_channels_last(tensor: torch.Tensor, shape: Shape4, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor of which only the shape and the format are used: in its input's format torch computes the gradient.

    It lies in the memory of ``tensor``, or in memory of its own where that is too small.
    """
    if math.prod(shape) <= tensor.numel() and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.detach().as_strided(shape, strides)
    return tensor.new_empty_strided(shape, strides)


class _Deterministic:
    """Has cuDNN take deterministic kernels, always the same, while any thread is inside, and puts torch's settings back
    after the last, but for those that have another value by then. A search of ``cudnn.benchmark`` could find
    others in the next process."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, (False, False)

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch._C._get_cudnn_deterministic(), torch._C._get_cudnn_benchmark()
                torch._C._set_cudnn_deterministic(True)
                torch._C._set_cudnn_benchmark(False)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                if torch._C._get_cudnn_deterministic():
                    torch._C._set_cudnn_deterministic(self._before[0])
                if not torch._C._get_cudnn_benchmark():
                    torch._C._set_cudnn_benchmark(self._before[1])


_deterministic = _Deterministic()


def _settings(config: Config, direction: Direction) -> AbstractContextManager[object]:
    """cuDNN's settings for a pass: torch's own, but for those that ``auto`` may take."""
    return nullcontext() if _seconds(config, direction) is None else _deterministic


def _backward(
    config: Config, direction: Direction
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Prepare a gradient from grad_output, input and weight."""
    p, of_input, settings = config.problem, direction == "input_grad", _settings(config, direction)
    geometry = p.stride, p.padding, p.dilation, True, p.output_padding, p.groups

    def call(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with settings:
            gradients = torch.ops.aten.convolution_backward(
                grad_output, input, weight, None, *geometry, [of_input, not of_input, False]
            )
        return gradients[0 if of_input else 1]

    return call
