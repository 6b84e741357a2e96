"""The base class of kernels for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemmconv.kernels.base import Config, Kernel, Pass
from gemmconv.kernels.cpu.library import KINDS, isa_name


@dataclass(frozen=True)
class Tile:
    """The tile of a CPU kernel: its instruction set, from which the register tile follows."""

    isa: str


class CpuKernel(Kernel):
    """A kernel of csrc/cpu/. It has one tile and no program: the C function is called directly."""

    device_type = "cpu"
    directions = ("forward", "input_grad", "weight_grad")
    dtypes = tuple(KINDS)
    serves = "every layer"

    def tiles(self, config: Config, direction: Pass) -> tuple[Tile, ...]:
        name = isa_name()
        return () if name is None else (Tile(name),)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor if it is contiguous in NCHW or channels_last, else a copy in NCHW."""
    if tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return tensor
    return tensor.contiguous()
