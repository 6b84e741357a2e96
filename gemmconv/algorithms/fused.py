"""``fused``: weights times columns, and their fold, in one kernel on Hopper's tensor cores; columns are never written.

Its kernels are those of gemmconv/kernels/sm90/. Other weight gradients are left to gemm_col2im, as are those for which
it is faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

import torch

from gemmconv.algorithms.gemm_col2im import GemmCol2im
from gemmconv.kernels.base import (
    Config,
    Direction,
    Forward,
    Gradient,
    OneByOne,
    missing,
)
from gemmconv.kernels.layout.transpose import turning_seconds
from gemmconv.kernels.macros import why_not_dtype
from gemmconv.kernels.sm90 import (
    gemm_depth_to_space,
    gemm_fold,
    gemm_fold_narrow,
    gemm_fold_pixels,
    gemm_fold_rows,
    gemm_fold_rows_tf32,
    implicit_gemm_nhwc,
    row_streaming,
    wgrad_nchw,
    wgrad_nhwc,
)
from gemmconv.kernels.sm90.implicit_gemm import (
    DTYPES,
    own_plan,
    plan_for,
    plan_seconds,
    prepare_forward,
    prepare_input_grad,
    too_large,
    variant_of,
)
from gemmconv.kernels.sm90.implicit_gemm_plan import SHARED_BYTES, Plan
from gemmconv.kernels.sm90.row_streaming import RowGathering

_CLOCK_RATE = 1.6e9  # cycles a second, of an H200 whose tensor cores are busy
_FAST_CLOCK_RATE = 1.755e9  # where they are not, as estimates of such kernels are fitted
_ROWS_MARGIN = 1.05  # of 16 bits, whose estimates are 10% off, mostly too low where steps are short
_IMAGE_ROWS_MARGIN = 1.15  # of 16 bits and of signals, whose estimates are up to that too low
_CELL_ROWS_MARGIN = 1.05  # of TF32: where much of the time goes to laying weights out, estimates are too low
_INT32_MAX = 2**31 - 1
_OTHERWISE = GemmCol2im()  # for other weight gradients, and input gradients of large strides


class Fused(OneByOne):
    """See the module."""

    name = "fused"
    summary = "product and col2im in one kernel on Hopper's tensor cores; no columns"

    def why_not(self, config: Config) -> str | None:
        p = config.problem
        if config.device.type != "cuda":
            return f"the device must be cuda, got {config.device.type}"
        if (reason := missing(config.device)) is not None:
            return reason
        if not config.spec.is_hopper:
            major, minor = config.spec.capability
            return f"the device must have compute capability 9.0, got {major}.{minor}"
        if (reason := why_not_dtype(config.dtype, DTYPES)) is not None:
            return reason
        if _tiles_for(config, "forward"):
            return None
        plan = plan_for(config, "forward")
        if plan is None:
            window = f"kernel_size={p.kernel_size}, stride={p.stride}, dilation={p.dilation}"
            return (
                f"a tile must fit {SHARED_BYTES} bytes of shared memory, and its tables constant memory; got {window}"
            )
        return too_large(plan)

    def workspace_bytes(self, config: Config, direction: Direction) -> int:
        if direction == "weight_grad" and (tile := _gradient_way(config)) is not None:
            return tile.workspace_bytes(config.workspace_limit)
        way = _way(config, direction)
        if way is None:
            return _OTHERWISE.workspace_bytes(config, direction)
        return way.packed_bytes

    def estimate(self, config: Config, direction: Direction) -> float:
        """The cycles of its plan, and the bytes of the weights that are laid out; or the cycles of its tile."""
        if direction == "weight_grad" and (gradient := _gradient_way(config)) is not None:
            return _gradient_seconds(config, gradient)
        way = _way(config, direction)
        return _OTHERWISE.estimate(config, direction) if way is None else _seconds(way)

    def turns(self, config: Config, direction: Direction) -> bool:
        if direction == "weight_grad" and (way := _gradient_way(config)) is not None:
            return way.computed_in is torch.contiguous_format
        return direction != "forward" and _way(config, direction) is None

    def forward(self, config: Config) -> Forward:
        way = _way(config, "forward")
        assert way is not None
        if isinstance(way, Plan):
            return prepare_forward(config, way)
        call: Forward = _MODULES[type(way)].prepare_forward(config, way)
        return call

    def input_grad(self, config: Config) -> Gradient:
        way = _way(config, "input_grad")
        if isinstance(way, RowGathering):
            return row_streaming.prepare_input_grad(config, way)
        return prepare_input_grad(config, way) if isinstance(way, Plan) else _OTHERWISE.input_grad(config)

    def weight_grad(self, config: Config) -> Gradient:
        way = _gradient_way(config)
        if isinstance(way, wgrad_nchw.Tile):
            return wgrad_nchw.prepare_weight_grad(config, way)
        if isinstance(way, wgrad_nhwc.Tile):
            return wgrad_nhwc.prepare_weight_grad(config, way)
        return _OTHERWISE.weight_grad(config)


def fold_tile_for(config: Config) -> gemm_fold_narrow.Tile | None:
    """The tile of csrc/sm90/gemm_fold_narrow.cu for a configuration, None where that kernel is not for it."""
    p = config.problem
    if config.dtype not in DTYPES or max(p.in_pixels, p.out_pixels) > _INT32_MAX:
        return None
    tile = gemm_fold_narrow.tile_of(p, *variant_of(config), config.spec.multiprocessors)
    if tile is None or max(tile.items + gemm_fold_narrow.blocks_at_once(tile), tile.reaches) > _INT32_MAX:
        return None
    return tile


def gradient_tile_for(config: Config) -> wgrad_nchw.Tile | None:
    """The tile of csrc/sm90/wgrad_nchw.cu for a configuration, None where that kernel is not for it."""
    if config.dtype not in DTYPES:
        return None
    itemsize, split, _ = variant_of(config)
    count = config.spec.multiprocessors
    return wgrad_nchw.tile_of(config.problem, itemsize, split, config.workspace_limit, count)


def lines_tile_for(config: Config) -> wgrad_nhwc.Tile | None:
    """The tile of csrc/sm90/wgrad_nhwc.cu for a configuration, None where that kernel is not for it."""
    if config.dtype not in (torch.float16, torch.bfloat16):
        return None
    return wgrad_nhwc.tile_of(config.problem, config.workspace_limit, config.spec.multiprocessors)


def image_tile_for(config: Config) -> gemm_fold.Tile | None:
    """The tile of csrc/sm90/gemm_fold.cu for a configuration, None where that kernel is not for it."""
    itemsize, count = _itemsize_in_nchw(config), config.spec.multiprocessors
    return None if itemsize is None else gemm_fold.tile_of(config.problem, itemsize, count)


def image_rows_tile_for(config: Config) -> gemm_fold_pixels.Tile | None:
    """The tile of csrc/sm90/gemm_fold_pixels.cu for a configuration, None where that kernel is not for it."""
    itemsize, count = _itemsize_in_nchw(config), config.spec.multiprocessors
    return None if itemsize is None else gemm_fold_pixels.tile_of(config.problem, itemsize, count)


def shuffle_tile_for(config: Config) -> gemm_depth_to_space.Tile | None:
    """The tile of csrc/sm90/gemm_depth_to_space.cu for a configuration, None where that kernel is not for it."""
    itemsize, count = _itemsize_in_nchw(config), config.spec.multiprocessors
    return None if itemsize is None else gemm_depth_to_space.tile_of(config.problem, itemsize, count)


def cell_rows_tile_for(config: Config) -> implicit_gemm_nhwc.Tile | None:
    """The tile of csrc/sm90/implicit_gemm_nhwc.cu for a configuration, None where that kernel is not for it."""
    itemsize, split, channels_last = variant_of(config)
    if config.dtype not in DTYPES or split or not channels_last:
        return None
    return implicit_gemm_nhwc.tile_of(config.problem, itemsize, config.spec.multiprocessors)


def rows_tile_for(config: Config, direction: Direction) -> RowGathering | None:
    """The tile of sm90/gemm_fold_rows.cu or sm90/gemm_fold_rows_tf32.cu for a pass, None where they are not for it."""
    kernel = _rows_kernel_for(config, direction)
    return None if kernel is None else kernel.tile_of(config.problem, direction, config.spec.multiprocessors)


def rows_tiles_for(config: Config, direction: Direction) -> Iterable[RowGathering]:
    """All tiles that it may have."""
    kernel = _rows_kernel_for(config, direction)
    return () if kernel is None else kernel.tiles_of(config.problem, direction, config.spec.multiprocessors)


def _rows_kernel_for(config: Config, direction: Direction) -> ModuleType | None:
    """What goes along rows of values of a configuration's type and format."""
    itemsize = _itemsize_in_nchw(config)
    if itemsize is None or direction == "weight_grad":
        return None
    return gemm_fold_rows if itemsize == 2 else gemm_fold_rows_tf32


def _itemsize_in_nchw(config: Config) -> int | None:
    """Bytes of an element, for the kernels that are for 16 bits and TF32 in NCHW; None for others."""
    itemsize, split, channels_last = variant_of(config)
    return None if config.dtype not in DTYPES or split or channels_last else itemsize


_Tile = (
    gemm_fold_narrow.Tile
    | gemm_fold.Tile
    | gemm_fold_pixels.Tile
    | gemm_depth_to_space.Tile
    | implicit_gemm_nhwc.Tile
    | RowGathering
)


_MODULES: dict[type, ModuleType] = {  # that have the call of a tile
    gemm_fold_narrow.Tile: gemm_fold_narrow,
    gemm_fold.Tile: gemm_fold,
    gemm_fold_pixels.Tile: gemm_fold_pixels,
    gemm_depth_to_space.Tile: gemm_depth_to_space,
    implicit_gemm_nhwc.Tile: implicit_gemm_nhwc,
    gemm_fold_rows.Tile: row_streaming,
    gemm_fold_rows_tf32.Tile: row_streaming,
}


def _tiles_for(config: Config, direction: Direction) -> list[_Tile]:
    """Those of the kernels that are for some layers alone, and for this one."""
    tiles: list[_Tile | None] = [rows_tile_for(config, direction)]
    if direction == "forward":
        of_images = image_tile_for(config), image_rows_tile_for(config)
        tiles += [fold_tile_for(config), *of_images, shuffle_tile_for(config), cell_rows_tile_for(config)]
    return [tile for tile in tiles if tile is not None]


def _way(config: Config, direction: Direction) -> Plan | _Tile | None:
    """What a pass takes of the kernels that are for it: the fastest. None where gemm_col2im computes it."""
    plan, tiles = own_plan(config, direction), _tiles_for(config, direction)
    return min(tiles if plan is None else [plan, *tiles], key=_seconds, default=None)


def _seconds(way: Plan | _Tile) -> float:
    if isinstance(way, Plan):
        return plan_seconds(way)
    if isinstance(way, RowGathering):
        return (_ROWS_MARGIN if way.itemsize == 2 else 1) * way.seconds
    if isinstance(way, gemm_fold_pixels.Tile) and (way.itemsize == 2 or way.windows[0] > 1):
        return _IMAGE_ROWS_MARGIN * way.cycles / _CLOCK_RATE
    if isinstance(way, implicit_gemm_nhwc.Tile):
        return (_CELL_ROWS_MARGIN if way.packed else 1) * way.cycles / _FAST_CLOCK_RATE
    return way.cycles / (_FAST_CLOCK_RATE if isinstance(way, gemm_fold_narrow.Tile) else _CLOCK_RATE)


_GradientWay = wgrad_nchw.Tile | wgrad_nhwc.Tile


def _gradient_way(config: Config) -> _GradientWay | None:
    """What a weight gradient takes of the kernels that are for it: the fastest, None where gemm_col2im is faster."""
    ways = [way for way in (gradient_tile_for(config), lines_tile_for(config)) if way is not None]
    way = min(ways, key=lambda way: _gradient_seconds(config, way), default=None)
    if way is None or _gradient_seconds(config, way) > _OTHERWISE.estimate(config, "weight_grad"):
        return None
    return way


def _gradient_seconds(config: Config, way: _GradientWay) -> float:
    return way.seconds(config.workspace_limit) + turning_seconds(config, way.computed_in)
