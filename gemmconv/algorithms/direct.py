"""``direct``: one gather kernel (csrc/direct/forward.cu), no workspace, specialised for the layer.

For layers whose work is moving bytes: grouped, depthwise, strided, dilated, of few channels. Products are ordinary
multiplications and additions, in float32 (float64 for float64); of 16-bit types, and of float32 where TF32 may be used,
those of tensor cores where that is faster. Gradients take tensor cores where both are computed at once.

    direct_forward.py         csrc/direct/forward.cu              forward on CUDA cores
    direct_forward_mma.py          csrc/direct/forward_mma.cu          forward on tensor cores
    direct_input_grad.py   csrc/direct/input_grad.cu
    direct_weight_grad.py  csrc/direct/weight_grad.cu  and both gradients at once on CUDA cores
    direct_grads_mma.py        csrc/direct/grads_mma.cu        both gradients at once on tensor cores
    direct_patch.py        csrc/include/load/patch.cuh       what gradients stage
"""

from __future__ import annotations

import math

import torch

from gemmconv.device import REFERENCE
from gemmconv.kernels.base import BothGradients, Config, Direction, Forward, Gradient, why_no_kernels
from gemmconv.kernels.direct import forward as direct_forward
from gemmconv.kernels.direct import forward_mma as direct_forward_mma
from gemmconv.kernels.direct import grads_mma as direct_grads_mma
from gemmconv.kernels.layout.transpose import grads_turning_seconds, one_by_one_seconds, turning_seconds
from gemmconv.kernels.macros import why_not_dtype
from gemmconv.kernels.splits.reduce_splits import partial_bytes

_INT32_MAX = 2**31 - 1
_WIDEST_KERNEL = 64  # taps whose window a thread can keep in registers
_WIDEST_STRIDE = 32
_CHANNELS_LAST_FACTOR = 1.1  # of what the kernel without tensor cores is estimated at, beside fused
_LAUNCH_SECONDS = 4e-6
_TENSOR_CORE_SECONDS, _TENSOR_CORE_FACTOR = 12e-6, 0.95  # beside fused: its launch, and what its tile is estimated at
_TENSOR_CORE_START = 7_000  # cycles by which the kernel with tensor cores must be faster, laying out its weights
# What forward passes of depthwise layers, and input gradients, reach on an H200: operations and bytes a second, and
# seconds of a tap and channel that a block goes through. Input gradients move bytes while they compute: of 33 that take
# at most 3.5 times as long as the fastest algorithm, 13% from what was measured.
_DEPTHWISE = 22e12, 2.1e12, 35e-9
_INPUT_GRAD = 29e12, 4.4e12, 80e-9
_INPUT_GRAD_LAUNCH = 12e-6


def _tiles(config: Config) -> tuple[direct_forward.Tile, direct_forward_mma.Tile | None]:
    """The tile of csrc/direct/forward.cu, and that of csrc/direct/forward_mma.cu where it is faster."""
    channels_last = config.memory_format is torch.channels_last
    tile = direct_forward.tile_of(config.problem, config.dtype, channels_last, config.spec)
    other = direct_forward_mma.tile_for(config)
    assert tile is not None
    if other is not None:
        cycles = direct_forward.cycles_of(config.problem, config.dtype, channels_last, tile, config.spec)
        other = other if other.cycles + _TENSOR_CORE_START < 1.06 * cycles else None
    return tile, other


def _grads_tile(config: Config) -> direct_grads_mma.Tile | None:
    """The tile of csrc/direct/grads_mma.cu, where that is faster than both gradients at once on CUDA cores."""
    from gemmconv.kernels.direct.weight_grad import grads_seconds

    tile = direct_grads_mma.tile_for(config)
    return tile if tile is not None and tile.seconds(config.workspace_limit) < grads_seconds(config) else None


def _slowest_elsewhere(config: Config) -> float:
    """What estimates that were made for Hopper's multiprocessors are divided by on other GPUs."""
    return 1.0 if config.spec.is_hopper else config.spec.slowest_ratio


def _parts(config: Config, ffma_rate: float, copy_rate: float, step_seconds: float) -> tuple[float, float, float]:
    """Seconds of arithmetic, of bytes, and of the steps that a block goes through one after the other."""
    p, spec = config.problem, config.spec
    double = 2 if config.dtype == torch.float64 else 1
    ffma_rate, copy_rate = ffma_rate * spec.ratio("fp32"), copy_rate * spec.ratio("bandwidth")
    step_seconds /= spec.ratio("clock")
    moved, steps = p.least_bytes(config.dtype.itemsize), p.taps * p.out_channels // p.groups
    return p.useful_flops / ffma_rate * double, moved / copy_rate, steps * step_seconds


class Direct:
    """See the module."""

    name = "direct"
    summary = "one gather kernel, no workspace, specialised for the layer"

    def why_not(self, config: Config) -> str | None:
        p = config.problem
        if config.device.type != "cuda":
            return f"the device must be cuda, got {config.device.type}"
        if (reason := why_no_kernels(config.device, config.spec) or why_not_dtype(config.dtype)) is not None:
            return reason
        if max(p.stride) > _WIDEST_STRIDE:
            return f"stride must be at most {_WIDEST_STRIDE} on both axes, got {p.stride}"
        if p.kernel_size[1] > _WIDEST_KERNEL:
            return f"kernel width must be at most {_WIDEST_KERNEL}, got {p.kernel_size[1]}"
        channels_last = config.memory_format is torch.channels_last
        if direct_forward.tile_of(p, config.dtype, channels_last, config.spec) is None:
            window = f"kernel_size={p.kernel_size}, dilation={p.dilation}"
            return f"the inputs of one cell must fit {direct_forward.SHARED_BYTES} bytes of shared memory, got {window}"
        longest = direct_forward.longest_sum(p)
        if config.dtype == torch.float32 and longest > direct_forward.LONGEST_SUM:
            return f"float32 outputs must be sums of at most {direct_forward.LONGEST_SUM} products, got {longest}"
        if max(p.in_pixels, p.out_pixels, p.batch * p.groups) > _INT32_MAX:
            return "images must have less than 2**31 pixels"
        return None

    def workspace_bytes(self, config: Config, direction: Direction) -> int:
        if direction != "weight_grad":
            return 0
        from gemmconv.kernels.direct.weight_grad import weight_grad_workspace_bytes

        tile = _grads_tile(config)
        at_once = 0 if tile is None else partial_bytes(config, tile.slices(config.workspace_limit))
        return max(weight_grad_workspace_bytes(config), at_once)

    def estimate(self, config: Config, direction: Direction) -> float:
        """Forward, what its tile is estimated at; else arithmetic, bytes and steps, or tiles of a weight gradient."""
        clock = REFERENCE.clock * config.spec.ratio("clock")
        if direction == "forward":
            tile, tensor_core_tile = _tiles(config)
            if tensor_core_tile is not None:
                return _TENSOR_CORE_SECONDS + _TENSOR_CORE_FACTOR * tensor_core_tile.cycles / clock
            if not tile.depthwise:
                channels_last = config.memory_format is torch.channels_last
                cycles = direct_forward.cycles_of(config.problem, config.dtype, channels_last, tile, config.spec)
                cycles *= _CHANNELS_LAST_FACTOR if channels_last else 1
                return _LAUNCH_SECONDS + cycles / clock
            return _LAUNCH_SECONDS + sum(_parts(config, *_DEPTHWISE))
        if direction == "input_grad":
            arithmetic, moved, steps = _parts(config, *_INPUT_GRAD)
            return _INPUT_GRAD_LAUNCH + max(arithmetic, moved) + steps + turning_seconds(config)
        from gemmconv.kernels.direct.weight_grad import weight_grad_seconds

        return weight_grad_seconds(config) / _slowest_elsewhere(config) + turning_seconds(config)

    def turns(self, config: Config, direction: Direction) -> bool:
        return direction != "forward"

    def forward(self, config: Config) -> Forward:
        tile, tensor_core_tile = _tiles(config)
        if tensor_core_tile is not None:
            return direct_forward_mma.prepare_forward(config, tensor_core_tile)
        return direct_forward.prepare_forward(config, tile)

    def input_grad(self, config: Config) -> Gradient:
        from gemmconv.kernels.direct.input_grad import prepare_input_grad

        return prepare_input_grad(config)

    def weight_grad(self, config: Config) -> Gradient:
        from gemmconv.kernels.direct.weight_grad import prepare_weight_grad

        return prepare_weight_grad(config)

    def grads(self, config: Config, weight_config: Config) -> BothGradients:
        from gemmconv.kernels.direct import weight_grad as direct_weight_grad

        tile = _grads_tile(config)
        if tile is not None:
            return direct_grads_mma.prepare_grads(config, weight_config, tile)
        return direct_weight_grad.prepare_grads(config, weight_config)

    def grads_estimate(self, config: Config, weight_config: Config) -> float:
        from gemmconv.kernels.direct import weight_grad as direct_weight_grad

        p = config.problem
        if not math.prod(p.weight_shape) or not math.prod(p.input_shape):
            return math.inf
        tile = _grads_tile(config)
        limit = config.workspace_limit
        seconds = direct_weight_grad.grads_seconds(config) if tile is None else tile.seconds(limit)
        seconds /= _slowest_elsewhere(config)
        seconds += grads_turning_seconds(config, weight_config)
        return seconds if seconds < one_by_one_seconds(self, config, weight_config) else math.inf
