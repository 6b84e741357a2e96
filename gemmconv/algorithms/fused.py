"""``fused``: weights times columns, and their fold, in one kernel on Hopper's tensor cores; columns are never written.

    fused_plan.py          how the kernel may go about a problem
    fused_cycles.py        what that takes, estimated
    fused_choice.py        all ways, and the fastest
    csrc/fused_weights.cu  lays the weights out, in a launch of its own before the other
    csrc/fused_wgmma.cu    gathers inputs, for layers whose work is arithmetic, and for input gradients
    fused_fold.py          csrc/fused_fold.cu  folds columns in shared memory, for layers of few output channels
    fused_images.py        csrc/fused_images.cu  the same of whole small images in NCHW
    fused_image_rows.py    csrc/fused_image_rows.cu  the same with positions as rows of the product
    fused_shuffle.py       csrc/fused_shuffle.cu  nothing to fold: kernels as large as their stride, in NCHW
    fused_cell_rows.py     csrc/fused_cell_rows.cu  nothing to fold: cells as rows of the product, in channels_last
    fused_rows.py          csrc/fused_rows.cu  folds columns in registers, for wide rows of 16 bits in NCHW
    fused_rows_tf32.py     csrc/fused_rows_tf32.cu  the same of TF32
    row_gathering.py       what both have in common
    position_rows.py       what those two have in common whose positions are rows
    fused_gradient.py      csrc/fused_weight_grad.cu  weight gradients, of outputs whose rows are whole words
    fused_gradient_lines.py  csrc/fused_weight_grad_lines.cu  the same of 16 bits in channels_last
    fused_gradient_sum.py  csrc/fused_weight_grad_sum.cu  adds up the parts that either has computed

Other weight gradients are left to gemm_col2im, as are those for which it is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import ModuleType

import torch

from gemmconv.algorithms import (
    fused_cell_rows,
    fused_fold,
    fused_gradient,
    fused_gradient_lines,
    fused_image_rows,
    fused_images,
    fused_rows,
    fused_rows_tf32,
    fused_shuffle,
    row_gathering,
)
from gemmconv.algorithms.base import (
    Config,
    Direction,
    Forward,
    Gradient,
    OneByOne,
    aligned,
    either_format,
    missing,
    strides_of,
    with_strides,
)
from gemmconv.algorithms.fused_choice import plan_of
from gemmconv.algorithms.fused_plan import (
    BLOCK_POSITIONS,
    CHAIN,
    PHASE_BASE,
    SHARED_BYTES,
    Plan,
)
from gemmconv.algorithms.gemm_col2im import GemmCol2im
from gemmconv.algorithms.launches import MAX_GRID_Y, Boxes, params_struct, reciprocal
from gemmconv.algorithms.macros import ELEMENT_TYPES, Macros, geometry_macros, table, why_not_dtype
from gemmconv.algorithms.row_gathering import RowGathering
from gemmconv.algorithms.turning import turning_seconds
from gemmconv.geometry import Shape4

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CLOCK_RATE = 1.6e9  # cycles a second, of an H200 whose tensor cores are busy
_LAUNCH_SECONDS = 6e-6  # of both kernels; the second begins while the first ends
_FAST_CLOCK_RATE = 1.755e9  # where they are not, as estimates of such kernels are fitted
_ROWS_MARGIN = 1.05  # of 16 bits, whose estimates are 10% off, mostly too low where steps are short
_IMAGE_ROWS_MARGIN = 1.15  # of 16 bits and of signals, whose estimates are up to that too low
_CELL_ROWS_MARGIN = 1.05  # of TF32: where much of the time goes to laying weights out, estimates are too low
_WEIGHT_RATE = 3.2e12  # bytes a second, of laying weights out
_OTHERWISE = GemmCol2im()  # for other weight gradients, and input gradients of large strides
_INT32_MAX = 2**31 - 1
_OTHER_THREADS = 32 + 256  # beside those who load: a warp for weights, two warpgroups that multiply
_WEIGHT_THREADS, _WEIGHT_STEPS = 256, 32  # of a block of csrc/fused_weights.cu
_WEIGHT_ELEMENTS = 8  # of a thread

FusedWeightsParams = params_struct("fused_weights_params", ("weight", "packed"), ("channels_last",))
_FUSED_PARAMS = (
    "fused_params",
    ("input", "packed", "bias", "output"),
    (
        *("batch", "groups", "h_in", "w_in", "h_out", "w_out", "strips", "strip_rows", "strip_cells", "cells_h"),
        *("origin_h", "origin_w", "strip_tiles", "items"),
    ),
    ("by_strips", "by_strip_rows", "by_strip_tiles", "by_image_positions", "by_bottom", "by_sets"),
)
FusedParams, FusedBoxedParams = params_struct(*_FUSED_PARAMS), params_struct(*_FUSED_PARAMS, ("map",))


def variant_of(config: Config) -> tuple[int, bool, bool]:
    """What plans and tiles depend on: bytes of an element, whether float32 is three products, whether channels_last."""
    split = config.dtype == torch.float32 and config.precision == "ieee"
    return config.dtype.itemsize, split, config.memory_format is torch.channels_last


def plan_for(config: Config, direction: Direction) -> Plan | None:
    """The plan for a configuration, None where the kernel is not for it."""
    if config.dtype not in _DTYPES:
        return None
    return plan_of(config.problem, direction, *variant_of(config), config.spec.multiprocessors)


def macros_of(plan: Plan, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/fused_wgmma.cu and csrc/fused_weights.cu."""
    p = plan.problem
    assert plan.stages is not None
    shifts = [shift for steps in plan.steps for shift in steps]
    begins = [sum(map(len, plan.steps[:i])) for i in range(len(plan.steps) + 1)]
    phases = [phase for block in plan.phases for phase in block]
    macros: Macros = {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        "SPLIT": int(plan.split),
        "INPUT_GRAD": int(plan.direction == "input_grad"),
        "IN_CHANNELS": plan.in_channels,
        "OUT_CHANNELS": plan.out_channels,
        "CHANNELS_LAST": int(plan.channels_last),
        "UNIT_H": plan.unit[0],
        "UNIT_W": plan.unit[1],
        "SPAN_H": plan.span[0],
        "SPAN_W": plan.span[1],
        "SLOTS": plan.slots,
        "CHANNELS": plan.channels,
        "ROW_ORDER": plan.row_order,
        "BLOCKS": plan.blocks,
        "COLUMNS": plan.columns,
        "WARPGROUPS_M": plan.warpgroups_m,
        "PHASE_SIDES": plan.phase_sides,
        "PHASE_SETS": plan.phase_sets,
        "CHANNEL_SETS": plan.channel_sets,
        "UNITS": plan.units,
        "CHUNKS": plan.chunks,
        "PITCH": plan.pitch,
        "PATCH": plan.patch,
        "UNIT_PITCH": plan.unit_pitch,
        "FIRST": plan.first,
        "PATCH_STAGES": plan.stages[0],
        "WEIGHT_STAGES": plan.stages[1],
        "RESIDENT": int(plan.resident),
        "TURNS": int(plan.turns),
        "CHAIN": CHAIN,
        "PAIRING": plan.pairing,
        "STAGED": int(plan.staged),
        "LINE_CELLS": plan.line_cells,
        "VECTOR": plan.vector,
        "VECTOR_LOADS": int(plan.vector_loads),
        "RUN_PITCH": plan.run_pitch,
        "WHOLE_IMAGES": int(plan.whole_images),
        "PARTIAL_PIECES": int(plan.partial_pieces),
        "BOXED": int(plan.boxed),
        "BOX_BLOCKS": plan.box_blocks,
        "LANDING_BOX": int(plan.landing_box),
        "BOXES": plan.boxes,
        "TOGETHER": _units_together(plan),
        "FLAT": int(plan.flat),
        "IN_ORDER": int(plan.in_order),
        "BOX_IMAGES": plan.line_box[0] if plan.way == "lines" else 1,
        "BOX_ROWS": plan.box_size[0],
        "BOX_WIDTH": plan.box_size[1],
        "LANDING_UNITS": plan.landing_units,
        "LANDING_STAGES": plan.landing_stages,
        "WIDE": plan.wide,
        "LOADERS": plan.loaders,
        "LOADED_WORDS": plan.loaded_words,
        "SHARED_BYTES": plan.shared_bytes,
        "PHASE_BASE": PHASE_BASE,
        "STEPS": len(shifts),
        "STEP_BEGIN": table(begins),
        "STEP_OFFSET": table([plan.offset(shift) for shift in shifts]),
        "STEP_SHIFT_H": table([shift[0] for shift in shifts]),
        "STEP_SHIFT_W": table([shift[1] for shift in shifts]),
        "PHASES": table([-1 if phase is None else phase[0] * PHASE_BASE + phase[1] for phase in phases]),
        **geometry_macros(p),
    }
    if p.batch * max(p.in_pixels * p.in_channels, p.out_pixels * p.out_channels) > _INT32_MAX:
        macros["INDEX_64"] = 1
    return macros


def prepare_forward(config: Config, plan: Plan) -> Forward:
    """As ``Algorithm.forward``."""
    return _prepare(config, plan, config.problem.input_shape, config.problem.output_shape)


def prepare_input_grad(config: Config, plan: Plan) -> Gradient:
    """As ``Algorithm.input_grad``."""
    gather = _prepare(config, plan, config.problem.output_shape, config.problem.input_shape)
    return lambda grad_output, weight: gather(grad_output, weight, None)


def _prepare(config: Config, plan: Plan, input_shape: Shape4, output_shape: Shape4) -> Forward:
    """Prepare outputs gathered from inputs."""
    from gemmconv.runtime import tensor_map
    from gemmconv.runtime.launch import load

    p, shared_bytes = config.problem, plan.shared_bytes
    macros = macros_of(plan, config.dtype)
    pack = load("fused_weights.cu", "fused_weights_kernel", macros, config.device.index)
    kernel = load("fused_wgmma.cu", "fused_wgmma_kernel", macros, config.device.index, shared_bytes)
    strides = strides_of(output_shape, config.memory_format)
    input_strides = strides_of(input_shape, config.memory_format)
    sets = plan.phase_sets * plan.channel_sets
    pack_grid = _weights_grid(plan)
    items, packed_bytes, threads = plan.items, plan.packed_bytes, plan.loaders + _OTHER_THREADS
    grid = (plan.blocks_on(config.spec.multiprocessors), 1, 1)
    boxes = _boxes(plan) if plan.boxed or plan.landing_box else None
    sizes = (
        *map(reciprocal, (plan.strips, plan.strip_rows, plan.strip_tiles)),
        *map(reciprocal, (plan.image_positions, plan.bottom, sets * p.groups)),
        *(p.batch, p.groups, *plan.input_size, *plan.output_size),
        *(plan.strips, plan.strip_rows, plan.strip_cells, plan.cells[0], *plan.origin, plan.strip_tiles, items),
    )

    def call(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = input.new_empty_strided(output_shape, strides)
        if items == 0:
            return output
        input, (weight, weights_last) = aligned(with_strides(input, input_strides)), either_format(weight)
        bias_address = 0 if bias is None else (bias := bias.contiguous()).data_ptr()
        # All that the main kernel reads but `packed` is there before the other is launched; see Kernel.launch.
        packed = torch.empty(packed_bytes, dtype=torch.uint8, device=input.device)
        weights_params = FusedWeightsParams(weight.data_ptr(), packed.data_ptr(), weights_last)
        pack.launch(pack_grid, (_WEIGHT_THREADS, 1, 1), weights_params)
        values = input.data_ptr(), packed.data_ptr(), bias_address, output.data_ptr(), *sizes
        if boxes is None:
            params = FusedParams(*values)
        else:
            params = FusedBoxedParams(tensor_map.encode(input.data_ptr(), *boxes), *values)
        kernel.launch(grid, (threads, 1, 1), params, shared_bytes, overlaps=True)
        return output

    return call


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
        if (reason := why_not_dtype(config.dtype, _DTYPES)) is not None:
            return reason
        if _tiles_for(config, "forward"):
            return None
        plan = plan_for(config, "forward")
        if plan is None:
            window = f"kernel_size={p.kernel_size}, stride={p.stride}, dilation={p.dilation}"
            return (
                f"a tile must fit {SHARED_BYTES} bytes of shared memory, and its tables constant memory; got {window}"
            )
        return _too_large(plan)

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
            return row_gathering.prepare_input_grad(config, way)
        return prepare_input_grad(config, way) if isinstance(way, Plan) else _OTHERWISE.input_grad(config)

    def weight_grad(self, config: Config) -> Gradient:
        way = _gradient_way(config)
        if isinstance(way, fused_gradient.Tile):
            return fused_gradient.prepare_weight_grad(config, way)
        if isinstance(way, fused_gradient_lines.Tile):
            return fused_gradient_lines.prepare_weight_grad(config, way)
        return _OTHERWISE.weight_grad(config)


def fold_tile_for(config: Config) -> fused_fold.Tile | None:
    """The tile of csrc/fused_fold.cu for a configuration, None where that kernel is not for it."""
    p = config.problem
    if config.dtype not in _DTYPES or max(p.in_pixels, p.out_pixels) > _INT32_MAX:
        return None
    tile = fused_fold.tile_of(p, *variant_of(config), config.spec.multiprocessors)
    if tile is None or max(tile.items + fused_fold.blocks_at_once(tile), tile.reaches) > _INT32_MAX:
        return None
    return tile


def gradient_tile_for(config: Config) -> fused_gradient.Tile | None:
    """The tile of csrc/fused_weight_grad.cu for a configuration, None where that kernel is not for it."""
    if config.dtype not in _DTYPES:
        return None
    itemsize, split, _ = variant_of(config)
    count = config.spec.multiprocessors
    return fused_gradient.tile_of(config.problem, itemsize, split, config.workspace_limit, count)


def lines_tile_for(config: Config) -> fused_gradient_lines.Tile | None:
    """The tile of csrc/fused_weight_grad_lines.cu for a configuration, None where that kernel is not for it."""
    if config.dtype not in (torch.float16, torch.bfloat16):
        return None
    return fused_gradient_lines.tile_of(config.problem, config.workspace_limit, config.spec.multiprocessors)


def image_tile_for(config: Config) -> fused_images.Tile | None:
    """The tile of csrc/fused_images.cu for a configuration, None where that kernel is not for it."""
    itemsize, count = _itemsize_in_nchw(config), config.spec.multiprocessors
    return None if itemsize is None else fused_images.tile_of(config.problem, itemsize, count)


def image_rows_tile_for(config: Config) -> fused_image_rows.Tile | None:
    """The tile of csrc/fused_image_rows.cu for a configuration, None where that kernel is not for it."""
    itemsize, count = _itemsize_in_nchw(config), config.spec.multiprocessors
    return None if itemsize is None else fused_image_rows.tile_of(config.problem, itemsize, count)


def shuffle_tile_for(config: Config) -> fused_shuffle.Tile | None:
    """The tile of csrc/fused_shuffle.cu for a configuration, None where that kernel is not for it."""
    itemsize, count = _itemsize_in_nchw(config), config.spec.multiprocessors
    return None if itemsize is None else fused_shuffle.tile_of(config.problem, itemsize, count)


def cell_rows_tile_for(config: Config) -> fused_cell_rows.Tile | None:
    """The tile of csrc/fused_cell_rows.cu for a configuration, None where that kernel is not for it."""
    itemsize, split, channels_last = variant_of(config)
    if config.dtype not in _DTYPES or split or not channels_last:
        return None
    return fused_cell_rows.tile_of(config.problem, itemsize, config.spec.multiprocessors)


def rows_tile_for(config: Config, direction: Direction) -> RowGathering | None:
    """The tile of csrc/fused_rows.cu or csrc/fused_rows_tf32.cu for a pass, None where they are not for it."""
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
    return fused_rows if itemsize == 2 else fused_rows_tf32


def _itemsize_in_nchw(config: Config) -> int | None:
    """Bytes of an element, for the kernels that are for 16 bits and TF32 in NCHW; None for others."""
    itemsize, split, channels_last = variant_of(config)
    return None if config.dtype not in _DTYPES or split or channels_last else itemsize


_Tile = (
    fused_fold.Tile
    | fused_images.Tile
    | fused_image_rows.Tile
    | fused_shuffle.Tile
    | fused_cell_rows.Tile
    | RowGathering
)


_MODULES: dict[type, ModuleType] = {  # that have the call of a tile
    fused_fold.Tile: fused_fold,
    fused_images.Tile: fused_images,
    fused_image_rows.Tile: fused_image_rows,
    fused_shuffle.Tile: fused_shuffle,
    fused_cell_rows.Tile: fused_cell_rows,
    fused_rows.Tile: row_gathering,
    fused_rows_tf32.Tile: row_gathering,
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
    plan, tiles = _own_plan(config, direction), _tiles_for(config, direction)
    return min(tiles if plan is None else [plan, *tiles], key=_seconds, default=None)


def _seconds(way: Plan | _Tile) -> float:
    if isinstance(way, Plan):
        return _plan_seconds(way)
    if isinstance(way, RowGathering):
        return (_ROWS_MARGIN if way.itemsize == 2 else 1) * way.seconds
    if isinstance(way, fused_image_rows.Tile) and (way.itemsize == 2 or way.windows[0] > 1):
        return _IMAGE_ROWS_MARGIN * way.cycles / _CLOCK_RATE
    if isinstance(way, fused_cell_rows.Tile):
        return (_CELL_ROWS_MARGIN if way.packed else 1) * way.cycles / _FAST_CLOCK_RATE
    return way.cycles / (_FAST_CLOCK_RATE if isinstance(way, fused_fold.Tile) else _CLOCK_RATE)


_GradientWay = fused_gradient.Tile | fused_gradient_lines.Tile


def _gradient_way(config: Config) -> _GradientWay | None:
    """What a weight gradient takes of the kernels that are for it: the fastest, None where gemm_col2im is faster."""
    ways = [way for way in (gradient_tile_for(config), lines_tile_for(config)) if way is not None]
    way = min(ways, key=lambda way: _gradient_seconds(config, way), default=None)
    if way is None or _gradient_seconds(config, way) > _OTHERWISE.estimate(config, "weight_grad"):
        return None
    return way


def _gradient_seconds(config: Config, way: _GradientWay) -> float:
    return way.seconds(config.workspace_limit) + turning_seconds(config, way.computed_in)


def _plan_seconds(plan: Plan) -> float:
    return _LAUNCH_SECONDS + plan.expected_cycles / _CLOCK_RATE + 2 * plan.packed_bytes / _WEIGHT_RATE


def _own_plan(config: Config, direction: Direction) -> Plan | None:
    """The plan for a pass that the kernel computes, None where gemm_col2im does."""
    plan = None if direction == "weight_grad" else plan_for(config, direction)
    return None if plan is None or _too_large(plan) else plan


def _boxes(plan: Plan) -> Boxes:
    """What :func:`gemmconv.runtime.tensor_map.encode` is to know of the input and its boxes.

    The input is [positions][channels][blocks of positions][images] where products read blocks as they come, and
    [channels][columns][rows][images] where they read lines, all of an image in one row where nothing lies between rows,
    or of all images. A box has lines of one plane. The input is [columns][rows][channels][images] where it lands, all
    of an image in one row where it lands as stretches.
    """
    p, itemsize, pixels = plan.problem, plan.itemsize, math.prod(plan.input_size)
    channels = plan.in_channels * p.groups
    if plan.way == "lines":
        images, rows, columns = plan.line_box
        width, steps = pixels if plan.whole_images else plan.input_size[1], (1, plan.unit[1], plan.unit[0], 1)
        sizes = (channels, p.batch * pixels, 1, 1) if plan.flat else (channels, width, pixels // width, p.batch)
        strides = channels * itemsize, width * channels * itemsize, pixels * channels * itemsize
        return itemsize, sizes, strides, (plan.units * plan.element_units, columns, rows, images), steps, True
    if plan.boxed:
        sizes = BLOCK_POSITIONS, channels, pixels // BLOCK_POSITIONS, p.batch
        strides = pixels * itemsize, BLOCK_POSITIONS * itemsize, channels * pixels * itemsize
        box = BLOCK_POSITIONS, plan.units * plan.element_units, plan.box_blocks, 1
        return itemsize, sizes, strides, box, (1, 1, 1, 1), True
    rows, width = plan.box_size
    columns = pixels if rows == 1 else plan.input_size[1]
    sizes = columns, pixels // columns, channels, p.batch
    strides = columns * itemsize, pixels * itemsize, channels * pixels * itemsize
    return itemsize, sizes, strides, (width, rows, plan.landing_units * plan.element_units, 1), (1, 1, 1, 1), False


def _units_together(plan: Plan) -> int:
    """Units that a thread lays out of the weights."""
    return _WEIGHT_ELEMENTS // plan.element_units


def _weights_grid(plan: Plan) -> tuple[int, int, int]:
    """Blocks that lay the weights out: of rows and units; of steps and channel sets; of groups."""
    steps = sum(plan.set_steps)
    along = min(steps, _WEIGHT_STEPS)
    threads = plan.chunks * plan.units // _units_together(plan) * plan.rows * along
    return -(-threads // _WEIGHT_THREADS), -(-steps // along) * plan.channel_sets, plan.problem.groups


def _too_large(plan: Plan) -> str | None:
    """Why the kernel's integers do not reach as far as the plan, or None."""
    p = plan.problem
    if max(plan.last_position, plan.items + plan.multiprocessors, p.in_pixels, p.out_pixels) > _INT32_MAX:
        return "images must have less than 2**31 pixels in all"
    blocks, channel_blocks, groups = _weights_grid(plan)
    if max(groups, channel_blocks) > MAX_GRID_Y:
        return f"groups and blocks of output channels must be at most {MAX_GRID_Y} each"
    if blocks * _WEIGHT_THREADS > _INT32_MAX:
        return "the weights of a group and a block of its output channels must be laid out by less than 2**31 threads"
    return None
