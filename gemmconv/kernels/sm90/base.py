"""What Hopper's kernels have in common: the types they are for, and the rates that their estimates count in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from gemmconv.device import REFERENCE
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Kernel, Pass
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.layout.transpose import turning_seconds

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLOCK_RATE = costs_of("device").busy_clock  # cycles a second, where tensor cores are busy
FAST_CLOCK_RATE = REFERENCE.clock  # where they are not, as estimates of such kernels are fitted
INT32_MAX = 2**31 - 1
_FORMATS = {torch.contiguous_format: "NCHW", torch.channels_last: "channels_last"}


def variant_of(config: Config) -> tuple[int, bool, bool]:
    """What plans and tiles depend on: bytes of an element, whether float32 is three products, whether channels_last."""
    split = config.dtype == torch.float32 and config.precision == "ieee"
    return config.dtype.itemsize, split, config.memory_format is torch.channels_last


class Sm90Kernel(Kernel):
    """A kernel of wgmma and TMA.

    Attributes:
        only_in: the format that it is for, and then for 16-bit types and TF32 alone; None where it is for both.
    """

    features = frozenset({"wgmma", "tma"})
    dtypes: ClassVar[tuple[torch.dtype, ...]] = DTYPES
    only_in: ClassVar[torch.memory_format | None] = None

    def declines(self, config: Config, direction: Pass) -> str | None:
        if self.only_in is not None:
            if variant_of(config)[1]:
                return "float32 must be rounded to TF32, got precision='ieee'"
            if config.memory_format is not self.only_in:
                return f"memory_format must be {_FORMATS[self.only_in]}, got {_FORMATS[config.memory_format]}"
        return super().declines(config, direction)


class OneFormatForward(Sm90Kernel):
    """A forward kernel of one format.

    Args:
        tile_of, tiles_of: its tile, and all that it may take, for a problem, bytes of an element and multiprocessors.
    """

    def __init__(
        self,
        tile_of: Callable[[Problem, int, int], Any],
        tiles_of: Callable[[Problem, int, int], Iterable[Any]],
    ) -> None:
        self._tile_of, self._tiles_of = tile_of, tiles_of

    def tiles(self, config: Config, direction: Pass) -> Iterable[Any]:
        return self._tiles_of(config.problem, config.dtype.itemsize, config.spec.multiprocessors)

    def tile(self, config: Config, direction: Pass) -> Any | None:
        return self._tile_of(config.problem, config.dtype.itemsize, config.spec.multiprocessors)

    def workspace_bytes(self, config: Config, direction: Pass, tile: Any) -> int:
        packed: int = tile.packed_bytes
        return packed


class WeightGradKernel(Sm90Kernel):
    """A kernel of weight gradients, whose partial sums csrc/splits/reduce.cu adds up."""

    directions = ("weight_grad",)

    def seconds(self, config: Config, direction: Pass, tile: Any) -> float:
        assert self.computed_in is not None
        seconds: float = tile.seconds(config.workspace_limit)
        return seconds + turning_seconds(config, self.computed_in)

    def workspace_bytes(self, config: Config, direction: Pass, tile: Any) -> int:
        taken: int = tile.workspace_bytes(config.workspace_limit)
        return taken
