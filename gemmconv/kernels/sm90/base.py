"""What Hopper's kernels have in common: the types they are for, and the rates that their estimates count in."""

from __future__ import annotations

from typing import ClassVar

import torch

from gemmconv.device import REFERENCE
from gemmconv.kernels.base import Config, Kernel, Pass
from gemmconv.kernels.costs import costs_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLOCK_RATE = costs_of("device").busy_clock  # cycles a second, where tensor cores are busy
FAST_CLOCK_RATE = REFERENCE.clock  # where they are not, as estimates of such kernels are fitted
INT32_MAX = 2**31 - 1


def variant_of(config: Config) -> tuple[int, bool, bool]:
    """What plans and tiles depend on: bytes of an element, whether float32 is three products, whether channels_last."""
    split = config.dtype == torch.float32 and config.precision == "ieee"
    return config.dtype.itemsize, split, config.memory_format is torch.channels_last


class Sm90Kernel(Kernel):
    """A kernel of wgmma and TMA.

    Attributes:
        only_last, only_nchw: whether it is for one format alone, and then for 16-bit types and TF32.
    """

    features = frozenset({"wgmma", "tma"})
    dtypes: ClassVar[tuple[torch.dtype, ...]] = DTYPES
    only_last = only_nchw = False

    def declines(self, config: Config, direction: Pass) -> str | None:
        _, split, channels_last = variant_of(config)
        if self.only_last or self.only_nchw:
            if split:
                return "float32 must be rounded to TF32, got precision='ieee'"
            if channels_last is not self.only_last:
                formats = "channels_last", "NCHW"
                return "memory_format must be {}, got {}".format(*formats[:: 1 if self.only_last else -1])
        return super().declines(config, direction)
