"""What an algorithm is to the rest of the library."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from gemmconv.device import AMPERE, REFERENCE, DeviceSpec, spec_of
from gemmconv.geometry import Problem
from gemmconv.runtime.available import what_is_missing

Direction = Literal["forward", "input_grad", "weight_grad"]
Precision = Literal["ieee", "tf32"]

DEFAULT_WORKSPACE_LIMIT = 64 << 20

# Prepared calls: everything that depends on the configuration alone was worked out when they were made.
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # input, weight, bias -> output
Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # grad_output, weight or input -> gradient
# grad_output, input, weight -> grad_input, grad_weight
BothGradients = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Config:
    """A problem together with what it is computed on and how.

    Attributes:
        problem: the geometry.
        dtype: element type of every tensor.
        device: where they are; a CUDA device carries its index.
        precision: ``"tf32"`` where float32 products may be rounded to TF32, else ``"ieee"``.
        workspace_limit: bytes of temporary memory that a call may take.
        torch_precision: the precision that torch's own convolutions use at this moment.
        memory_format: format of the output and of the input gradient; weight gradients are contiguous.
        bias: whether a forward call has one.
        spec: the properties of a CUDA device.
        deterministic: whether torch's operator may take none but cuDNN's deterministic kernels.
    """

    problem: Problem
    dtype: torch.dtype
    device: torch.device
    precision: Precision = "ieee"
    workspace_limit: int = DEFAULT_WORKSPACE_LIMIT
    torch_precision: Precision = "ieee"
    memory_format: torch.memory_format = torch.contiguous_format
    bias: bool = False
    spec: DeviceSpec = REFERENCE
    deterministic: bool = False


class Algorithm(Protocol):
    """One way to compute a transposed convolution and its gradients.

    The prepared calls take tensors that fit the configuration, of any strides.
    """

    @property
    def name(self) -> str:
        """What a user writes in ``algorithm=``."""
        ...

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        ...

    def why_not(self, config: Config) -> str | None:
        """Why it cannot serve the configuration, as a clause after its name; None where it can."""
        ...

    def workspace_bytes(self, config: Config, direction: Direction) -> int:
        """Bytes of temporary memory that one call takes at most beside its arguments and its result.

        A weight gradient's are those of both gradients at once too. Tensors that are turned round (see transpose.py) do
        not count.
        """
        ...

    def estimate(self, config: Config, direction: Direction) -> float:
        """Roughly the seconds of one call on a GPU, to choose by; infinite where nothing is known of it."""
        ...

    def turns(self, config: Config, direction: Direction) -> bool:
        """Whether a gradient's call begins with turning a grad_output in channels_last to NCHW (see transpose.py)."""
        ...

    def forward(self, config: Config) -> Forward:
        """Prepare output = conv_transpose2d(input, weight, bias)."""
        ...

    def input_grad(self, config: Config) -> Gradient:
        """Prepare grad_input from (grad_output, weight)."""
        ...

    def weight_grad(self, config: Config) -> Gradient:
        """Prepare grad_weight from (grad_output, input)."""
        ...

    def grads(self, config: Config, weight_config: Config) -> BothGradients:
        """Prepare both gradients at once, from (grad_output, input, weight), where :meth:`grads_estimate` is finite.

        Args:
            config, weight_config: of the input's and of the weight's gradient; they differ in their memory format, if
                at all.
        """
        ...

    def grads_estimate(self, config: Config, weight_config: Config) -> float:
        """Roughly the seconds of both gradients at once; infinite where there is nothing but one after the other."""
        ...


class OneByOne:
    """What algorithms inherit that compute one gradient after the other."""

    def grads(self, config: Config, weight_config: Config) -> BothGradients:
        raise NotImplementedError("one after the other")

    def grads_estimate(self, config: Config, weight_config: Config) -> float:
        return math.inf


def why_no_kernels(device: torch.device, spec: DeviceSpec | None = None) -> str | None:
    """Why kernels cannot run on a CUDA device: a GPU before compute capability 8.0, or what :func:`missing` says."""
    if device.type != "cuda":
        return None
    if (capability := (spec or spec_of(device)).capability) < AMPERE:
        return f"the device must have compute capability 8.0 or more, got {capability[0]}.{capability[1]}"
    return missing(device)


@functools.cache
def missing(device: torch.device) -> str | None:
    """What keeps this machine from kernels that its device could run, and the way out, as a clause.

    None where nothing does, of GPUs that no kernel is for, and where there is no GPU at hand: kernels for one can be
    spoken of everywhere.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or spec_of(device).capability < AMPERE:
        return None
    return what_is_missing(torch.cuda.get_device_capability(device))


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def strides_of(shape: Sequence[int], memory_format: torch.memory_format) -> tuple[int, ...]:
    """The strides of a new tensor.

    >>> strides_of((2, 3, 4, 5), torch.channels_last)
    (60, 1, 15, 3)
    """
    return torch.empty(tuple(shape), device="meta", memory_format=memory_format).stride()


def with_strides(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A result with exactly these strides.

    ``Tensor.contiguous`` would leave strides as they are where extents of 1 make them irrelevant, and the operators
    promise the strides, not just the order, that their fakes have.
    """
    if result.stride() == strides:
        return result
    return result.new_empty_strided(result.shape, strides).copy_(result)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that begins at 16 bytes, for kernels that load vectors; a copy where it does not."""
    return tensor.clone(memory_format=torch.preserve_format) if tensor.data_ptr() % 16 else tensor


def either_format(weight: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A weight as it lies in memory, and whether that is channels_last; a contiguous copy where it is neither."""
    if weight.is_contiguous():
        return weight, False
    if weight.is_contiguous(memory_format=torch.channels_last):
        return weight, True
    return weight.contiguous(), False


def in_either_format(weight: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """As :func:`either_format`, and the elements from one output channel of a group to the next, and from one tap."""
    weight, channels_last = either_format(weight)
    _, channels, height, width = weight.shape
    return weight, (1, channels) if channels_last else (height * width, 1)
