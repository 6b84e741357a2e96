"""``direct`` on a CPU: the definition as loops, in csrc/cpu/direct.h. A reference for every layer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from gemmconv.kernels.base import Config, Pass, accumulator_dtype, strides_of, with_strides
from gemmconv.kernels.cpu import estimate
from gemmconv.kernels.cpu.base import CpuKernel
from gemmconv.kernels.cpu.library import KINDS, Layer, address, kernels_for


class Direct(CpuKernel):
    name = "cpu/direct"

    def seconds(self, config: Config, direction: Pass, tile: Any) -> float:
        return estimate.DIRECT * estimate.fused_seconds(config, direction)

    def prepare(self, config: Config, direction: Pass, tile: Any = None) -> Callable[..., torch.Tensor]:
        """Prepare a pass. 16-bit tensors are widened to float32 first, and the result is rounded once."""
        p, wide, kernels = config.problem, accumulator_dtype(config.dtype), kernels_for(config.dtype)
        number = self.directions.index(direction)
        shape = (p.output_shape, p.input_shape, p.weight_shape)[number]
        memory_format = torch.contiguous_format if direction == "weight_grad" else config.memory_format
        strides, layer = strides_of(shape, memory_format), layer_of(config, wide)

        def call(first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if direction == "weight_grad":
                first, second = second, first  # the input comes first
            a, b, c = (None if one is None else one.to(wide).contiguous() for one in (first, second, bias))
            result = first.new_empty(shape, dtype=wide)
            kernels.direct(
                *(ctypes.addressof(layer), number, address(a), address(b), address(c)),
                *(result.data_ptr(), torch.get_num_threads()),
            )
            return with_strides(result.to(config.dtype), strides)

        return call


def layer_of(config: Config, dtype: torch.dtype, in_groups: bool = True) -> Any:
    """The ``layer_t`` of csrc/cpu/ for images of a dtype, with the channels of a group or all of them."""
    p = config.problem
    sizes = p.input_size, p.output_size, p.kernel_size, p.stride, p.padding, p.dilation
    groups = p.groups if in_groups else 1
    channels = p.in_channels // groups, p.out_channels // groups
    return Layer(KINDS[dtype], p.batch, p.groups, *channels, *sizes)


KERNEL = Direct()
