"""``native``: torch's own operator (cuDNN on CUDA, oneDNN on the CPU). The baseline, and the fallback.

Asked for by name, and on every GPU but Hopper, it is torch's operator with torch's settings. On Hopper all that
``auto`` leaves to it comes from cuDNN's deterministic kernels, the same bits on every run. In TF32 and 16 bits these
take as long as the others (public and models, H200, geometric mean); for gradients in float32 1.3 times as long.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gemmconv.algorithms.base import AlgorithmOfOne
from gemmconv.device import MEASURED, DeviceSpec
from gemmconv.geometry import Shape4
from gemmconv.kernels.base import (
    BothGradients,
    Config,
    Direction,
    Forward,
    Gradient,
    Pass,
    restrided,
    strides_of,
)
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.cpu import estimate

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
    many: float

    def seconds(self, config: Config) -> float:
        p = config.problem
        rate = self.rate * min(1.0, p.in_channels / self.many) ** self.in_exponent
        rate *= min(1.0, p.out_channels / self.many) ** self.out_exponent
        moved = p.image_bytes(config.dtype.itemsize) / self.copy
        return self.launch + math.hypot(p.useful_flops / rate, moved) / config.spec.ratio("half")


_COST = costs_of("native")
_FIELDS = (
    _COST.table("launch_seconds"),
    _COST.table("rate"),
    _COST.table("copy_rate"),
    _COST.table("in_exponent"),
    _COST.table("out_exponent"),
    _COST.table("many_channels"),
)
# By format, pass and precision. In NCHW cuDNN transposes tensors, but for input gradients of one tap; of channels that
# are not whole 16 bytes of a pixel, everywhere. Fitted to whole backward passes: both of its gradients take up to 15 us
# less than the sum of what each takes alone, one of its own and one of fused up to 19 us more.
_COSTS = {key: _Cost(*(field[key] for field in _FIELDS)) for key in _FIELDS[0]}
HOST_SECONDS = _COST.host_seconds
# Input gradients take several times as long of fewer output channels, in TF32 in channels_last, and of smaller images.
_LEAST_OUT_CHANNELS_TF32, _LEAST_GRADIENT_PIXELS = 64, 16
# For those of more taps no kernel of Hopper's was seen. The others' blocks sum all terms of an output one after the
# other: 95% of random layers take 19.6 ns or more for each in TF32, and 5.5 in 16 bits. With fewer taps a quarter of
# the layers take less than 9, in either.
_MOST_TAPS, _TERM_SECONDS = 32, _COST.table("term_seconds")

# Forward passes in 16 bits of fewer channels or pixels, or longer strides, take up to twice as long.
_LEAST_CHANNELS, _LEAST_PIXELS, _LARGEST_STRIDE_AREA = 64, 32, 4


def _fitted_seconds(config: Config, direction: Direction) -> float | None:
    """What cuDNN takes on Hopper for the passes that it is often fastest for, None of others."""
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
        layout, kind = "channels_last" if turns_nothing and not odd else "nchw", "half" if half else "tf32"
        seconds = _COSTS[layout, direction, kind].seconds(config)
        if direction == "input_grad" and p.taps > _MOST_TAPS:
            seconds += _TERM_SECONDS[kind] * p.out_channels * p.taps
        return seconds
    if not (turns_nothing and half) or p.in_pixels < _LEAST_PIXELS:
        return None
    channels = p.in_channels, p.out_channels
    if min(channels) < _LEAST_CHANNELS or any(count % 8 for count in channels):
        return None
    if max(p.dilation) > 1 or math.prod(p.stride) > _LARGEST_STRIDE_AREA:
        return None
    bias_bytes = 2 * p.batch * p.out_channels * p.out_pixels * config.dtype.itemsize if config.bias else 0
    return _COSTS["channels_last", direction, "half"].seconds(config) + bias_bytes / _COST.bias_rate


# What the model above leaves out, and all passes of other GPUs: the least that cuDNN takes. A rate of products that
# falls with the channels of a group, and what goes through memory: in NCHW it turns tensors round, so several times the
# bytes.
@dataclass(frozen=True)
class _Least:
    """The least that cuDNN takes for a pass.

    Attributes:
        rate: operations a second of 64 channels, on an H100.
        in_exponent, out_exponent: how it falls with fewer channels of a group, of input and output.
        passes: times that the bytes of the tensors go through memory.
    """

    rate: float
    in_exponent: float
    out_exponent: float
    passes: float

    def seconds(self, config: Config, peak: float, peak_there: float) -> float:
        """On the device of ``config``, whose products reach ``peak`` at best, those of the H100 ``peak_there``."""
        p, spec, itemsize = config.problem, config.spec, config.dtype.itemsize
        channels = p.in_channels // p.groups, p.out_channels // p.groups
        rate = self.rate * min(1.0, channels[0] / 64) ** self.in_exponent
        rate *= min(1.0, channels[1] / 64) ** self.out_exponent
        rate *= max(1.0, min(channels) / 64) ** _LEAST_COST.many_exponent
        aligned = peak_there == MEASURED.fp32 or p.in_channels * itemsize % 16 == 0
        if not aligned:
            rate *= _LEAST_COST.unaligned_share
        # Other multiprocessors issue as fast; where their tensor cores are faster, full tiles may be as well.
        rate *= spec.cycles / MEASURED.cycles
        if aligned and min(channels) >= 64:
            rate *= max(1.0, peak / peak_there * MEASURED.cycles / spec.cycles)
        bandwidth = _LEAST_COST.memory_share * _bandwidth(spec, p.least_bytes(itemsize))
        memory = p.least_bytes(itemsize) * self.passes / bandwidth
        products = p.useful_flops / min(rate, _LEAST_COST.peak_share * peak)
        return _LEAST_COST.launch_seconds + math.hypot(products, memory)


_LEAST_COST = costs_of("native", "h100")
_LEAST_FIELDS = (
    _LEAST_COST.table("rate"),
    _LEAST_COST.table("in_exponent"),
    _LEAST_COST.table("out_exponent"),
    _LEAST_COST.table("passes"),
)
_LEAST = {key: _Least(*(field[key] for field in _LEAST_FIELDS)) for key in _LEAST_FIELDS[0]}


def _bandwidth(spec: DeviceSpec, moved: int) -> float:
    """Bytes a second; of what fits the L2 cache, turned copies too, at least an H100's of memory, by cycles."""
    if 4 * moved > spec.l2_bytes:
        return spec.bandwidth
    return max(spec.bandwidth, MEASURED.bandwidth * spec.cycles / MEASURED.cycles)


def _least_seconds(config: Config, direction: Direction) -> float | None:
    """The least that cuDNN takes for a pass, None where nothing is known of it.

    That is of a single tap, which is a product alone; of one input pixel; in float32 of many taps and channels without
    strides, for which it has transforms (96 TFLOP/s were seen); of gradients of strides with dilation.
    """
    p, gradient, strided = config.problem, direction != "forward", max(config.problem.stride) > 1
    if config.dtype not in (torch.float32, *_HALF_TYPES) or (p.taps == 1 and not strided) or p.in_pixels == 1:
        return None
    kind = "half" if config.dtype in _HALF_TYPES else config.precision
    transforms = kind == "ieee" and not strided and p.groups == 1 and p.taps > 9
    if transforms and min(p.in_channels, p.out_channels) >= 64:
        return None
    if gradient and strided and max(p.dilation) > 1 and p.groups == 1:
        return None
    layout = "nchw" if config.memory_format is torch.contiguous_format else "channels_last"
    least = _LEAST[kind, "gradient" if gradient else "forward", layout]
    bias_bytes = 2 * p.batch * p.out_channels * p.out_pixels * config.dtype.itemsize if config.bias else 0
    peak, peak_there = (
        (spec.fp32, spec.tf32, spec.half)[("ieee", "tf32", "half").index(kind)] for spec in (config.spec, MEASURED)
    )
    return least.seconds(config, peak, peak_there) + bias_bytes / config.spec.bandwidth


class Native(AlgorithmOfOne):
    """See the module."""

    name = "native"
    summary = "torch's own operator: cuDNN on CUDA, oneDNN on the CPU"

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

    def estimate(self, config: Config, direction: Direction) -> float:
        """What cuDNN takes, roughly: which kernels it has, and how long they run, it does not say beforehand.

        Infinite where nothing is known of it, and on Hopper where torch does without cuDNN. There, where kernels are
        known better, what was not fitted is taken for as much as it was seen to be, so that ``auto`` leaves torch only
        what it is far faster for.
        """
        p = config.problem
        if config.device.type == "cpu":
            return estimate.native_seconds(config, direction)
        if config.spec.is_hopper and any(more >= step for more, step in zip(p.output_padding, p.stride, strict=True)):
            return math.inf  # columns and products of torch's own, one image after the other
        if config.spec.is_hopper and (seconds := _fitted_seconds(config, direction)) is not None:
            return seconds
        if config.device.type != "cuda" or (least := _least_seconds(config, direction)) is None:
            return math.inf
        if config.spec.is_hopper:
            return _LEAST_COST.at_most * least + _LEAST_COST.launch_seconds
        return least / _LEAST_COST.typical

    def program(self, config: Config, direction: Pass, tile: object = None) -> None:
        """None: torch's operator."""

    def prepare(self, config: Config, direction: Pass, tile: object = None) -> Callable[..., Any]:
        if direction == "grads":
            return self.grads(config, config.of_weight)
        call: Callable[..., Any] = getattr(self, direction)(config)
        return call

    def forward(self, config: Config) -> Forward:
        p = config.problem
        strides = strides_of(p.output_shape, config.memory_format)
        settings = _settings(config)

        def call(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            with settings:
                output = torch.conv_transpose2d(
                    input, weight, bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation
                )
            return restrided(output, strides)

        return call

    def input_grad(self, config: Config) -> Gradient:
        """A convolution of grad_output, where torch's rules for it are those of the gradient: half the host's time."""
        p, settings = config.problem, _settings(config)
        strides = strides_of(p.input_shape, config.memory_format)
        backward, shaped = _prepare_backward(config, True, False), _OfShape(p.input_shape)
        is_plain = config.device.type == "cuda" and p.groups == 1
        is_plain = is_plain and all(more < step for more, step in zip(p.output_padding, p.stride, strict=True))

        def call(grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if is_plain and not torch.is_autocast_enabled("cuda"):
                with settings:
                    found = torch.conv2d(grad_output, weight, None, p.stride, p.padding, p.dilation)
                return restrided(found, strides)
            if config.memory_format is torch.channels_last:
                input = _in_channels_last(grad_output, p.input_shape, strides)
            else:
                input = shaped(grad_output)
            return restrided(backward(grad_output, input, weight)[0], strides)

        return call

    def weight_grad(self, config: Config) -> Gradient:
        return _WeightGradient(config)

    def grads(self, config: Config, weight_config: Config) -> BothGradients:
        if config.memory_format is not weight_config.memory_format:
            first, second = self.input_grad(config), self.weight_grad(weight_config)
            return lambda grad_output, input, weight: (first(grad_output, weight), second(grad_output, input))
        return _WeightGradient(config, with_input=True)

    def grads_estimate(self, config: Config, weight_config: Config) -> float:
        """Of one call of torch's, which does one after the other: where nothing else would be as good."""
        if config.spec.is_hopper and config.device.type == "cuda":
            return math.inf
        return self.estimate(config, "input_grad") + self.estimate(weight_config, "weight_grad")


class _WeightGradient:
    """The gradient of a weight, alone or with the input's before it, in one call of torch's.

    Args:
        config: in the format of all tensors.
        with_input: whether it takes the weight too, and gives both gradients.
        strides: of the weight's gradient, if they are not those of a contiguous tensor. torch's own have the format of
            the others, and to give it other strides is to copy it.
    """

    def __init__(self, config: Config, with_input: bool = False, strides: tuple[int, ...] | None = None) -> None:
        p = config.problem
        self._config, self._with_input = config, with_input
        self._backward, self._shaped = _prepare_backward(config, with_input, True), _OfShape(p.weight_shape)
        self._input_strides = strides_of(p.input_shape, config.memory_format)
        self._strides = strides or strides_of(p.weight_shape, torch.contiguous_format)

    def returning(self, strides: tuple[int, ...]) -> _WeightGradient:
        """The same with other strides of the weight's gradient."""
        return _WeightGradient(self._config, self._with_input, strides)

    def __call__(self, grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None = None) -> Any:
        weight = self._shaped(grad_output) if weight is None else weight
        of_input, of_weight, _ = self._backward(grad_output, input, weight)
        of_weight = restrided(of_weight, self._strides)
        return (restrided(of_input, self._input_strides), of_weight) if self._with_input else of_weight


class _OfShape:
    """A tensor of which only the shape is used, in NCHW: made in the first call, of one element."""

    def __init__(self, shape: Shape4) -> None:
        self._shape = shape
        self._made: torch.Tensor | None = None

    def __call__(self, like: torch.Tensor) -> torch.Tensor:
        if self._made is None:
            self._made = like.new_empty(1).expand(self._shape)
        return self._made


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


def _settings(config: Config) -> AbstractContextManager[object]:
    """cuDNN's settings for a pass: torch's own, or its deterministic kernels."""
    return _deterministic if config.deterministic else nullcontext()


def _prepare_backward(
    config: Config, of_input: bool, of_weight: bool
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]:
    """Prepare gradients from grad_output, input and weight: a list of three."""
    p, settings, backward = config.problem, _settings(config), torch.ops.aten.convolution_backward.default
    geometry = p.stride, p.padding, p.dilation, True, p.output_padding, p.groups, [of_input, of_weight, False]
    # torch 2.11 takes one channel, whose strides fit either format, for NCHW. For a kernel of one tap the weight's
    # gradient is then wrong, by as much as it is large (cuDNN 9.19, any input in channels_last).
    strides = strides_of(p.output_shape, config.memory_format)
    is_ambiguous = p.out_channels == 1 and config.memory_format is torch.channels_last

    def call(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        if is_ambiguous and grad_output.is_contiguous():
            grad_output = grad_output.as_strided(p.output_shape, strides)
        with settings:
            found: Sequence[torch.Tensor] = backward(grad_output, input, weight, None, *geometry)
        return found

    return call
