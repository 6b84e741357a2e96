"""What Hopper's kernels share: their base classes, limits, the rates that estimates count in, and tensor maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from gemmconv.device import REFERENCE
from gemmconv.geometry import Pair, Problem, Shape4
from gemmconv.hashing import cached_property
from gemmconv.kernels.base import Config, Kernel, Pass
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.layout.transpose import transpose_seconds
from gemmconv.kernels.macros import TENSOR_CORE_TYPES
from gemmconv.kernels.program import TensorMapSpec

SHARED_BYTES = REFERENCE.shared_bytes  # of a block
LONGEST_BOX = 256  # elements that a box of a tensor map reaches over, along each axis
_MOST_STAGES = 8  # of weight gradients
CLOCK_RATE = costs_of("device").busy_clock  # cycles a second, where tensor cores are busy
FAST_CLOCK_RATE = REFERENCE.clock  # where they are not, as estimates of such kernels are fitted
_FORMATS = {torch.contiguous_format: "NCHW", torch.channels_last: "channels_last"}


def variant_of(config: Config) -> tuple[int, bool, bool]:
    """The variant that tiles are for: bytes of an element, whether float32 is three products, whether channels_last."""
    return config.dtype.itemsize, config.is_ieee, config.channels_last


class Sm90Kernel(Kernel):
    """A kernel of wgmma and TMA, whose tiles estimate their ``cycles`` and count their ``packed_bytes`` of weights."""

    features = frozenset({"wgmma", "tma"})
    dtypes: ClassVar[tuple[torch.dtype, ...]] = TENSOR_CORE_TYPES
    # the format that it is for, and then for 16-bit types and TF32 alone; None where it is for both
    only_in: ClassVar[torch.memory_format | None] = None
    clock_rate: ClassVar[float] = CLOCK_RATE  # cycles a second that estimates of its tiles count in

    def why_not_device_or_dtype(self, config: Config, direction: Pass) -> str | None:
        if (reason := super().why_not_device_or_dtype(config, direction)) is None and self.only_in is not None:
            if config.is_ieee:
                return "float32 must be rounded to TF32, got precision='ieee'"
            if config.memory_format is not self.only_in:
                return f"memory_format must be {_FORMATS[self.only_in]}, got {_FORMATS[config.memory_format]}"
        return reason

    def seconds(self, config: Config, direction: Pass, tile: Any) -> float:
        return float(tile.cycles) / self.clock_rate

    def workspace_bytes(self, config: Config, direction: Pass, tile: Any) -> int:
        return int(tile.packed_bytes)


class OneFormatForward(Sm90Kernel):
    """A forward kernel of one format; ``tiles_of`` gives tiles for a problem, an itemsize and multiprocessors."""

    def __init__(self, tiles_of: Callable[[Problem, int, int], Iterable[Any]]) -> None:
        self._tiles_of = tiles_of

    def tiles(self, config: Config, direction: Pass) -> Iterable[Any]:
        return self._tiles_of(config.problem, config.dtype.itemsize, config.spec.multiprocessors)


def image_map(
    shape: Shape4, itemsize: int, box: Shape4, channels_last: bool = False, name: str = "input", **others: Any
) -> TensorMapSpec:
    """The tensor map of images of a shape, [N, C, H, W].

    Boxes have (columns, channels, rows, images), in channels_last (channels, columns, rows, images). ``others`` are
    further fields of :class:`TensorMapSpec`.
    """
    images, channels, height, width = shape
    line, image = width * itemsize * (channels if channels_last else 1), math.prod(shape[1:]) * itemsize
    if channels_last:
        sizes, strides = (channels, width, height, images), (channels * itemsize, line, image)
    else:
        sizes, strides = (width, channels, height, images), (height * line, line, image)
    return TensorMapSpec(name, itemsize, sizes, strides, box, **others)


class WeightGradTile:
    """A tile of a weight gradient, whose block has a part of the weights and goes over pixels in stages."""

    problem: Problem
    stage_bytes: int  # bytes of a stage, with its barriers

    @property
    def channels(self) -> Pair:
        """Input and output channels of a group."""
        return self.problem.gemm_k, self.problem.group_out_channels

    @cached_property
    def stages(self) -> int:
        return min(_MOST_STAGES, (SHARED_BYTES - 1024) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes


class WeightGradKernel(Sm90Kernel):
    """A kernel of weight gradients, whose partial sums csrc/splits/reduce.cu adds up."""

    directions = ("weight_grad",)

    def seconds(self, config: Config, direction: Pass, tile: Any) -> float:
        assert self.computed_in is not None
        return float(tile.seconds(config.workspace_limit)) + transpose_seconds(config, self.computed_in)

    def workspace_bytes(self, config: Config, direction: Pass, tile: Any) -> int:
        return int(tile.workspace_bytes(config.workspace_limit))
