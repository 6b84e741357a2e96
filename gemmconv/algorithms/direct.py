"""``direct``: one gather kernel (csrc/direct.cu), no workspace, specialised for the layer.

For layers whose work is moving bytes: grouped, depthwise, strided, dilated, of few channels. Products are ordinary
multiplications and additions, in float32 (float64 for float64), never TF32.

Not in ``ALGORITHMS`` yet: its kernels pass the emulator, the GPU suite has not run on all of them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch

from gemmconv.algorithms.base import (
    COPY_RATE,
    FFMA_RATE,
    LAUNCH_SECONDS,
    Config,
    Direction,
    Forward,
    Gradient,
    strides_of,
    with_strides,
)
from gemmconv.algorithms.macros import ELEMENT_TYPES, Macros, geometry_macros
from gemmconv.geometry import Problem

_INT32_MAX = 2**31 - 1
_MAX_GRID_YZ = 65_535
_SHARED_BYTES = 48 << 10  # four blocks of a Hopper multiprocessor, one of every architecture since sm_80
_ACCUMULATOR_BYTES = 48 * 4  # of a thread's registers
_THREADS = 256  # of a block; half of it for threads with many accumulators
_MANY_ACCUMULATORS = 32
_CHANNELS_AT_A_TIME = 16  # staged, where there are more: smaller patches, more blocks
_MOST_PHASES = 4
_MOST_NEIGHBOURS = 16  # outputs of a thread in a row, unless the stride alone is more
_FEW_BLOCKS = 2 * 132  # below this, smaller blocks give more multiprocessors work
_WIDEST_KERNEL = 64  # taps whose window a thread can keep in registers
_WIDEST_STRIDE = 32


@dataclass(frozen=True)
class Tile:
    """What a block of csrc/direct.cu owns; see its header.

    Attributes:
        staged: whether the input goes through shared memory.
        lanes_w, cells: threads across a cell row, and cells of each.
        rows: cell rows.
        phases: row phases at a time.
        planes: groups of images.
        channels_in: input channels staged at a time.
        channels_out: output channels.
    """

    staged: bool
    lanes_w: int
    cells: int
    rows: int
    phases: int
    planes: int
    channels_in: int
    channels_out: int

    @property
    def threads(self) -> int:
        return self.lanes_w * self.rows * self.phases * self.planes


class DirectParams(ctypes.Structure):
    """Mirrors direct_params."""

    _fields_ = [
        ("input", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("planes", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("h_in", ctypes.c_int),
        ("w_in", ctypes.c_int),
        ("h_out", ctypes.c_int),
        ("w_out", ctypes.c_int),
        ("tiles_w", ctypes.c_int),
    ]


def accumulator_bytes(dtype: torch.dtype) -> int:
    """Bytes of the type that sums are kept in."""
    return 8 if dtype == torch.float64 else 4


def cells_of(problem: Problem) -> tuple[int, int]:
    """Cells of an image: outputs o of an axis belong to cell o // stride."""
    height, width = problem.output_size
    return -(-height // problem.stride[0]), -(-width // problem.stride[1])


def shifts_of(problem: Problem, axis: int) -> tuple[int, int]:
    """Least and largest shift from a cell to an input that one of its outputs reads.

    >>> shifts_of(Problem(1, 1, 1, 1, (8, 8), (4, 4), stride=(2, 2), padding=(1, 1)), 0)
    (-1, 1)
    """
    stride, padding, dilation = problem.stride[axis], problem.padding[axis], problem.dilation[axis]
    reaches = (
        residue + padding - tap * dilation for residue in range(stride) for tap in range(problem.kernel_size[axis])
    )
    shifts = [reach // stride for reach in reaches if reach % stride == 0]
    return min(shifts), max(shifts)


def tile_of(problem: Problem, dtype: torch.dtype, channels_last: bool) -> Tile | None:
    """The tile for a problem: a pure function of it. None where the smallest tile's patch exceeds shared memory."""
    p = problem
    per_group_in, per_group_out = p.in_channels // p.groups, p.out_channels // p.groups
    cells_h, cells_w = cells_of(p)
    planes = max(1, p.batch * p.groups)
    depthwise = per_group_in * per_group_out == 1
    neighbouring_planes = _power_of_two_divisor(p.groups, 32) if channels_last else 1
    staged = not (depthwise and not channels_last) and neighbouring_planes < 8

    # Cells of a thread: each weight that is read serves so many products. Where there is next to no arithmetic, what
    # one 16-byte store holds.
    cells = max(1, 16 // dtype.itemsize // _power_of_two(p.stride[1])) if depthwise else 4
    if channels_last:
        cells = min(cells, 2)
    column_phases = sum(bool(phase.taps) for phase in p.phases(1))  # the others need no accumulators
    accumulators = _ACCUMULATOR_BYTES // accumulator_bytes(dtype)
    while cells > 1 and (
        cells >= 2 * cells_w or cells * column_phases > accumulators or cells * p.stride[1] > _MOST_NEIGHBOURS
    ):
        cells //= 2
    channels_out = _even_share(per_group_out, max(1, min(accumulators // (cells * column_phases), 16)))
    most_threads = _THREADS // 2 if cells * column_phases * channels_out >= _MANY_ACCUMULATORS else _THREADS

    # Row phases side by side where all have work; else one after the other.
    row_phases = p.phases(0)
    phases = len(row_phases) if staged and all(phase.taps for phase in row_phases) else 1
    if phases > _MOST_PHASES:
        phases = 1

    # Neighbouring threads are neighbouring cells; in channels_last neighbouring planes, which then divide the groups.
    tile_planes = neighbouring_planes
    most_lanes = max(1, most_threads // 4 // tile_planes) if channels_last else 32
    lanes_w = min(_power_of_two(-(-cells_w // cells)), most_lanes)
    phase_threads = _power_of_two(phases)
    rows = min(_power_of_two(cells_h), max(1, most_threads // (lanes_w * tile_planes * phase_threads)))
    if not channels_last:
        tile_planes = min(_power_of_two(planes), max(1, most_threads // (lanes_w * rows * phase_threads)))
    channels_in = min(per_group_in, _CHANNELS_AT_A_TIME) if staged else per_group_in
    tile = Tile(staged, lanes_w, cells, rows, phases, tile_planes, channels_in, channels_out)

    def blocks(t: Tile) -> int:
        spatial = -(-cells_h // t.rows) * -(-cells_w // (t.lanes_w * t.cells))
        return spatial * -(-planes // t.planes) * -(-per_group_out // t.channels_out)

    while blocks(tile) < _FEW_BLOCKS and tile.threads > 64:
        if not channels_last and tile.planes > 1:
            tile = replace(tile, planes=tile.planes // 2)
        elif tile.rows > 1:
            tile = replace(tile, rows=tile.rows // 2)
        else:
            break
    while tile.threads % 32:  # whole warps, some of it idle
        tile = replace(tile, rows=tile.rows * 2)

    while _shared_bytes(p, tile, dtype, channels_last) > _SHARED_BYTES:
        if staged and tile.channels_in > 4:
            tile = replace(tile, channels_in=-(-tile.channels_in // 2))
        elif tile.rows > 1 and tile.threads % 64 == 0:
            tile = replace(tile, rows=tile.rows // 2)
        elif staged and tile.channels_in > 1:
            tile = replace(tile, channels_in=-(-tile.channels_in // 2))
        elif tile.planes > 1 and tile.threads % 64 == 0:
            tile = replace(tile, planes=tile.planes // 2)
        elif tile.channels_out > 1:
            tile = replace(tile, channels_out=-(-tile.channels_out // 2))
        else:
            return None
    return tile


def forward_macros(problem: Problem, dtype: torch.dtype, channels_last: bool) -> Macros:
    """Macros that specialise csrc/direct.cu."""
    p, tile = problem, tile_of(problem, dtype, channels_last)
    assert tile is not None
    itemsize = dtype.itemsize
    neighbours = tile.cells * p.stride[1]
    vector_cells = not channels_last and neighbours * itemsize in (8, 16) and p.output_size[1] % neighbours == 0
    if channels_last:
        per_group_out = p.out_channels // p.groups
        vector = _vector(itemsize, tile.channels_out, per_group_out)
    else:
        vector = _vector(itemsize, neighbours, p.output_size[1])
    macros: Macros = {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        "IN_CHANNELS": p.in_channels // p.groups,
        "OUT_CHANNELS": p.out_channels // p.groups,
        "CHANNELS_LAST": int(channels_last),
        "LANES_W": tile.lanes_w,
        "CELLS": tile.cells,
        "TILE_H": tile.rows,
        "STAGED": int(tile.staged),
        "TILE_PHASES": tile.phases,
        "TILE_PLANES": tile.planes,
        "TILE_IN": tile.channels_in,
        "TILE_OUT": tile.channels_out,
        "VECTOR": vector,
        "VECTOR_CELLS": int(vector_cells),
        "SHARED_BYTES": _shared_bytes(p, tile, dtype, channels_last),
        **geometry_macros(p),
    }
    if max(p.in_pixels * p.in_channels, p.out_pixels * p.out_channels) > _INT32_MAX:
        macros["INDEX_64"] = 1
    return macros


class Direct:
    """See the module."""

    name = "direct"
    summary = "one gather kernel on CUDA cores, no workspace, specialised for the layer"

    def why_not(self, config: Config) -> str | None:
        p = config.problem
        if config.device.type != "cuda":
            return f"the device must be cuda, got {config.device.type}"
        if config.dtype not in ELEMENT_TYPES:
            dtype = str(config.dtype).removeprefix("torch.")
            return f"dtype must be one of float64, float32, float16, bfloat16, got {dtype}"
        if max(p.stride) > _WIDEST_STRIDE:
            return f"stride must be at most {_WIDEST_STRIDE} on both axes, got {p.stride}"
        if p.kernel_size[1] > _WIDEST_KERNEL:
            return f"kernel width must be at most {_WIDEST_KERNEL}, got {p.kernel_size[1]}"
        channels_last = config.memory_format is torch.channels_last
        if tile_of(p, config.dtype, channels_last) is None:
            window = f"kernel_size={p.kernel_size}, dilation={p.dilation}"
            return f"the inputs of one cell must fit {_SHARED_BYTES} bytes of shared memory, got {window}"
        if max(p.in_pixels, p.out_pixels, p.batch * p.groups) > _INT32_MAX:
            return "images must have less than 2**31 pixels"
        return None

    def workspace_bytes(self, config: Config, direction: Direction) -> int:
        if direction != "weight_grad":
            return 0
        from gemmconv.algorithms.direct_gradients import weight_grad_workspace_bytes

        return weight_grad_workspace_bytes(config)

    def estimate(self, config: Config, direction: Direction) -> float:
        """Arithmetic on CUDA cores and the bytes that any algorithm moves, hardly overlapped; no columns."""
        p = config.problem
        rate = FFMA_RATE if config.dtype != torch.float64 else FFMA_RATE / 2
        return LAUNCH_SECONDS + p.useful_flops / rate + p.least_bytes(config.dtype.itemsize) / COPY_RATE

    def forward(self, config: Config) -> Forward:
        from gemmconv.runtime.launch import load

        p = config.problem
        channels_last = config.memory_format is torch.channels_last
        tile = tile_of(p, config.dtype, channels_last)
        assert tile is not None
        macros = forward_macros(p, config.dtype, channels_last)
        strides = strides_of(p.output_shape, config.memory_format)
        input_strides = strides_of(p.input_shape, config.memory_format)
        cells_h, cells_w = cells_of(p)
        tiles_w = -(-cells_w // (tile.lanes_w * tile.cells))
        tiles = tiles_w * -(-cells_h // tile.rows) * -(-(p.out_channels // p.groups) // tile.channels_out)
        planes = p.batch * p.groups
        plane_blocks = -(-planes // tile.planes)
        grid_y = min(max(1, plane_blocks), _MAX_GRID_YZ)
        grid = (tiles, grid_y, -(-plane_blocks // grid_y))
        block = (tile.threads, 1, 1)
        shared_bytes = int(macros["SHARED_BYTES"])
        kernel = load("direct.cu", "direct_forward_kernel", macros, config.device.index, shared_bytes)
        sizes = (planes, p.groups, *p.input_size, *p.output_size, tiles_w)

        def call(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            output = input.new_empty_strided(p.output_shape, strides)
            if planes == 0:
                return output
            input, weight = with_strides(input, input_strides), weight.contiguous()
            bias_address = 0 if bias is None else (bias := bias.contiguous()).data_ptr()
            kernel.launch(
                grid,
                block,
                DirectParams(input.data_ptr(), weight.data_ptr(), bias_address, output.data_ptr(), *sizes),
                shared_bytes,
            )
            return output

        return call

    def input_grad(self, config: Config) -> Gradient:
        from gemmconv.algorithms.direct_gradients import prepare_input_grad

        return prepare_input_grad(config)

    def weight_grad(self, config: Config) -> Gradient:
        from gemmconv.algorithms.direct_gradients import prepare_weight_grad

        return prepare_weight_grad(config)


def _shared_bytes(problem: Problem, tile: Tile, dtype: torch.dtype, channels_last: bool) -> int:
    """Bytes of shared memory that csrc/direct.cu takes with a tile."""
    halo_h, halo_w = (last - first for first, last in (shifts_of(problem, 0), shifts_of(problem, 1)))
    windows = -(-(tile.cells + halo_w) // tile.cells)
    pitch = tile.lanes_w * tile.cells + (windows - 1) * tile.cells
    patch = tile.planes * (tile.channels_in * (tile.rows + halo_h) * pitch + 1) if tile.staged else 0
    quads = -(-problem.kernel_size[1] * tile.channels_out // 4)
    weights = tile.planes * tile.channels_in * problem.kernel_size[0] * quads * 4
    neighbours = tile.cells * problem.stride[1]
    staged = tile.channels_out if neighbours * tile.channels_out <= 32 else max(1, 32 // neighbours)
    stage = 0 if channels_last else tile.threads * staged * neighbours * dtype.itemsize
    return accumulator_bytes(dtype) * (patch + weights) + stage + 16


def _even_share(total: int, most: int) -> int:
    """The size of the parts when ``total`` is cut into as few even parts as ``most`` allows."""
    return -(-total // -(-total // most))


def _power_of_two(value: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, value - 1).bit_length()


def _power_of_two_divisor(value: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides ``value``."""
    return min(most, value & -value)


def _vector(itemsize: int, *counts: int) -> int:
    """Elements of the widest vector of at most 16 bytes whose size divides all counts."""
    vector = 16 // itemsize
    while any(count % vector for count in counts):
        vector //= 2
    return vector
