"""``native``: torch's own operator (cuDNN on CUDA, oneDNN on the CPU). The baseline, and the fallback.

Requested by name, and on every GPU but Hopper, it is torch's operator with torch's settings. On Hopper ``auto`` limits
it to cuDNN's deterministic kernels, which give equal bits on every run. In TF32 and 16 bits these are as fast as the
others (suites public and models, H200, geometric mean); gradients in float32 take 1.3 times as long.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gemmconv.algorithms.base import AlgorithmOfOne
from gemmconv.geometry import Shape4
from gemmconv.kernels.base import Config, Forward, Gradient, Pass, restrided, strides_of
from gemmconv.kernels.cpu import estimate
from gemmconv.kernels.measured import roofline, torchs_seconds


class Native(AlgorithmOfOne):
    name = "native"

    def why_not(self, config: Config, direction: Pass = "forward") -> str | None:
        on_cuda_float32 = config.device.type == "cuda" and config.dtype == torch.float32
        if on_cuda_float32 and config.precision != config.torch_precision:
            return (
                f"precision follows torch.backends.cudnn.conv.fp32_precision, now {config.torch_precision!r}, "
                f"got precision={config.precision!r}; change the setting or choose another algorithm"
            )
        return None

    def workspace_bytes(self, config: Config, direction: Pass, tile: object = None) -> int:
        """0: torch decides for itself and does not say."""
        return 0

    def seconds(self, config: Config, direction: Pass, tile: object = None) -> float:
        """Seconds of the roofline that measured times are corrected from; on a CPU, seconds by a fitted rule."""
        if config.device.type == "cpu":
            return math.inf if direction == "grads" else estimate.native_seconds(config, direction)
        return roofline(config, direction)

    def expected(self, config: Config, direction: Pass, tile: object = None) -> float:
        """Seconds that measurements of similar layers predict; infinite if none were measured, such as for float64.

        It is also infinite on Hopper if the output padding reaches the stride: torch then computes without cuDNN, by
        columns of one image after the other.
        """
        p = config.problem
        if config.device.type == "cpu":
            return self.seconds(config, direction)
        if config.spec.is_hopper and any(more >= step for more, step in zip(p.output_padding, p.stride, strict=True)):
            return math.inf
        return torchs_seconds(config, direction)

    def prepare(self, config: Config, direction: Pass, tile: object = None) -> Callable[..., Any]:
        if direction == "forward":
            return self._forward(config)
        if direction == "input_grad":
            return self._input_grad(config)
        weight_config = config.of_weight
        if direction == "weight_grad" or config.memory_format is weight_config.memory_format:
            return _WeightGradient(config, with_input=direction == "grads")
        first, second = self._input_grad(config), _WeightGradient(weight_config)
        return lambda grad_output, input, weight: (first(grad_output, weight), second(grad_output, input))

    def _forward(self, config: Config) -> Forward:
        p, settings = config.problem, _settings(config)
        strides = strides_of(p.output_shape, config.memory_format)

        def call(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            with settings:
                output = torch.conv_transpose2d(input, weight, bias, *p.geometry)
            return restrided(output, strides)

        return call

    def _input_grad(self, config: Config) -> Gradient:
        """Prepare the input gradient, by ``conv2d`` where that is equivalent: it takes half the host time."""
        p, settings = config.problem, _settings(config)
        strides = strides_of(p.input_shape, config.memory_format)
        backward, shaped = _prepare_backward(config, True, False), _OfShape(p.input_shape)
        is_plain = config.device.type == "cuda" and p.groups == 1
        is_plain = is_plain and all(more < step for more, step in zip(p.output_padding, p.stride, strict=True))

        def call(grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if is_plain and not torch.is_autocast_enabled("cuda"):
                with settings:
                    gradient = torch.conv2d(grad_output, weight, None, p.stride, p.padding, p.dilation)
                return restrided(gradient, strides)
            if config.channels_last:
                input = _in_channels_last(grad_output, p.input_shape, strides)
            else:
                input = shaped(grad_output)
            return restrided(backward(grad_output, input, weight)[0], strides)

        return call

    def grads_estimate(self, config: Config, weight_config: Config) -> float:
        """Seconds of one call for both gradients, which torch computes in sequence; infinite on Hopper."""
        if config.spec.is_hopper and config.device.type == "cuda":
            return math.inf
        return self.estimate(config, "input_grad") + self.estimate(weight_config, "weight_grad")


class _WeightGradient:
    """The gradient of a weight, alone or after the input's, in one call of torch's operator.

    Args:
        config: the configuration; all tensors have its memory format.
        with_input: whether it takes the weight too and gives both gradients.
        strides: strides of the weight's gradient, None for contiguous ones; other than the tensors' cost a copy.
    """

    def __init__(self, config: Config, with_input: bool = False, strides: tuple[int, ...] | None = None) -> None:
        p = config.problem
        self._config, self._with_input = config, with_input
        self._backward, self._shaped = _prepare_backward(config, with_input, True), _OfShape(p.weight_shape)
        self._input_strides = strides_of(p.input_shape, config.memory_format)
        self._strides = strides or strides_of(p.weight_shape, torch.contiguous_format)

    def returning(self, strides: tuple[int, ...]) -> _WeightGradient:
        """A copy of this call that returns the weight's gradient with other strides."""
        return _WeightGradient(self._config, self._with_input, strides)

    def __call__(self, grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None = None) -> Any:
        weight = self._shaped(grad_output) if weight is None else weight
        of_input, of_weight, _ = self._backward(grad_output, input, weight)
        of_weight = restrided(of_weight, self._strides)
        return (restrided(of_input, self._input_strides), of_weight) if self._with_input else of_weight


class _OfShape:
    """Makes a tensor in NCHW of which torch reads only the shape: one expanded element, made in the first call."""

    def __init__(self, shape: Shape4) -> None:
        self._shape = shape
        self._made: torch.Tensor | None = None

    def __call__(self, like: torch.Tensor) -> torch.Tensor:
        if self._made is None:
            self._made = like.new_empty(1).expand(self._shape)
        return self._made


def _in_channels_last(tensor: torch.Tensor, shape: Shape4, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor of which torch reads only the shape and the format, in which it then computes the gradient.

    It shares the memory of ``tensor`` if that is large enough.
    """
    if math.prod(shape) <= tensor.numel() and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.detach().as_strided(shape, strides)
    return tensor.new_empty_strided(shape, strides)


class _Deterministic:
    """Makes cuDNN take deterministic kernels while any thread is inside. ``cudnn.benchmark`` is off, since its search
    could find others in the next process. The last thread to leave restores torch's settings, unless somebody has
    changed them meanwhile."""

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


def _settings(config: Config) -> AbstractContextManager[object]:
    """cuDNN's settings for a pass: torch's own, or its deterministic kernels."""
    return _deterministic if config.deterministic else nullcontext()


def _prepare_backward(
    config: Config, of_input: bool, of_weight: bool
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]:
    """Prepare gradients from grad_output, input and weight: a list of three."""
    p, settings, backward = config.problem, _settings(config), torch.ops.aten.convolution_backward.default
    geometry = p.stride, p.padding, p.dilation, True, p.output_padding, p.groups, [of_input, of_weight, False]
    # torch 2.11 treats a tensor with one channel, whose strides fit either format, as NCHW. The weight gradient of a
    # kernel with one tap is then wrong by as much as it is large (cuDNN 9.19, any input in channels_last).
    strides = strides_of(p.output_shape, config.memory_format)
    is_ambiguous = p.out_channels == 1 and config.channels_last

    def call(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        if is_ambiguous and grad_output.is_contiguous():
            grad_output = grad_output.as_strided(p.output_shape, strides)
        with settings:
            gradients: Sequence[torch.Tensor] = backward(grad_output, input, weight, None, *geometry)
        return gradients

    return call
