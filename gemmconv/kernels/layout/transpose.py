"""Transposes between NCHW and channels_last, for algorithms that compute in one format only: the host side of
csrc/layout/transpose.cu, which is several times as fast as torch's own copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from gemmconv.geometry import Shape4
from gemmconv.kernels.base import BothGradients, Config, strides_of, with_strides
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.integers import INT32_MAX, even_share, power_of_two
from gemmconv.kernels.macros import Macros, index_macros
from gemmconv.kernels.program import Launch, Operand, Output, Params, Program, plane_grid

_COST = costs_of("layout/transpose")
_THREADS = 256
_TILE = 4096  # elements of a tile
_MOST_CHANNELS = 64  # most channels of a tile
_SHORTEST, _LONGEST = 32, 1024  # pixels of a tile
_REACH = 2048  # most elements of an axis that a block covers
_LEAST_UNIT, _MOST_UNIT = 8, 16  # bytes of a unit that a thread reads and writes at once without staging
_SECTOR_BYTES = 32  # bytes that memory writes at once
_PIXEL_BYTES, _CHANNEL_BYTES = 64, 128  # contiguous bytes of pixels and of channels that a warp reads or writes at once
_WARPS = _THREADS // 32

Fit = Callable[[torch.Tensor], torch.Tensor]


def transpose_seconds(config: Config, computed_in: torch.memory_format = torch.contiguous_format) -> float:
    """Seconds to transpose input and output, for an algorithm that computes in one format only.

    >>> from gemmconv.geometry import Problem
    >>> config = Config(Problem(1, 8, 8, 1, (4, 4), (3, 3)), torch.float16, torch.device("cuda", 0))
    >>> transpose_seconds(config)
    0.0
    >>> transpose_seconds(config, torch.channels_last) > 0
    True
    """
    return input_transpose_seconds(config, computed_in) + _seconds(config, config.problem.output_shape, computed_in)


def input_transpose_seconds(config: Config, computed_in: torch.memory_format = torch.contiguous_format) -> float:
    """Seconds to transpose the input alone, or its gradient."""
    return _seconds(config, config.problem.input_shape, computed_in)


def grad_output_transpose_seconds(config: Config) -> float:
    """Seconds to transpose grad_output alone."""
    return _seconds(config, config.problem.output_shape)


def gradients_transpose_seconds(config: Config, computed_in: torch.memory_format = torch.contiguous_format) -> float:
    """Seconds to transpose grad_output, the input and its gradient, for both gradients in one format only."""
    configs = config, config.of_weight
    # A grad_output in channels_last makes both formats channels_last: if they differ, it is in NCHW.
    of_grad_output = min(_seconds(one, config.problem.output_shape, computed_in) for one in configs)
    return of_grad_output + sum(input_transpose_seconds(one, computed_in) for one in configs)


def via_channels_last_seconds(config: Config, transposes_weight: bool) -> float:
    """Seconds of the transposes around both gradients in :func:`prepare_via_channels_last`."""
    of_weight = _seconds(config, config.problem.weight_shape, torch.channels_last) if transposes_weight else 0.0
    return gradients_transpose_seconds(config, torch.channels_last) + of_weight


def _seconds(config: Config, shape: Shape4, computed_in: torch.memory_format = torch.contiguous_format) -> float:
    if config.memory_format is computed_in or is_same_memory(shape):
        return 0.0
    itemsize = config.dtype.itemsize
    macros = macros_of(shape[1], math.prod(shape[2:]), computed_in is torch.channels_last, itemsize)
    rate = _COST.rate if macros["STAGED"] else _COST.units_rate
    return _COST.launch_seconds + math.prod(shape) * itemsize / (rate * config.spec.ratio("bandwidth"))


def to_format(config: Config, shape: Shape4, memory_format: torch.memory_format) -> Fit:
    """Prepare a function that brings a tensor of this shape to a format.

    A kernel transposes tensors in the other format if ``config`` is in that one on a GPU; torch copies any other.
    """
    if config.device.type == "cuda" and config.memory_format is not memory_format and takes_the_kernel(shape):
        return prepare_transpose(config, shape, memory_format)
    if memory_format is torch.contiguous_format:
        return torch.Tensor.contiguous
    return partial(torch.Tensor.contiguous, memory_format=memory_format)


def from_channels_last(config: Config, shape: Shape4) -> Fit:
    """Prepare a function that brings a result of this shape from channels_last to the configuration's format."""
    wanted = config.memory_format
    if wanted is torch.channels_last or config.device.type != "cuda" or not takes_the_kernel(shape):
        return partial(with_strides, strides=strides_of(shape, wanted))
    return prepare_transpose(config, shape, wanted)


def prepare_via_channels_last(config: Config, compute: BothGradients, transposes_weight: bool) -> BothGradients:
    """Prepare both gradients of tensors in NCHW by a call that computes them in channels_last.

    Args:
        config: the configuration, in NCHW.
        compute: computes both gradients from grad_output and input in channels_last.
        transposes_weight: whether ``compute`` needs the weight in channels_last too.
    """
    p, last = config.problem, torch.channels_last
    transpose_grad, transpose_input = (to_format(config, shape, last) for shape in (p.output_shape, p.input_shape))
    transpose_weight = to_format(config, p.weight_shape, last) if transposes_weight else None
    transpose_back = from_channels_last(config, p.input_shape)

    def call(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if transpose_weight is not None:
            weight = transpose_weight(weight)
        grad_input, grad_weight = compute(transpose_grad(grad_output), transpose_input(input), weight)
        return transpose_back(grad_input), grad_weight

    return call


def is_same_memory(shape: Sequence[int]) -> bool:
    """Whether NCHW and channels_last have the elements in one order, so that a transpose has nothing to do."""
    return shape[0] == 0 or min(shape[1], math.prod(shape[2:])) <= 1


def takes_the_kernel(shape: Sequence[int]) -> bool:
    """Whether a tensor needs a transpose, and its extents fit the kernel's integers."""
    return not is_same_memory(shape) and max(shape[1], math.prod(shape[2:])) + _REACH <= INT32_MAX


def other_format(memory_format: torch.memory_format) -> torch.memory_format:
    """NCHW for channels_last, channels_last for NCHW."""
    return torch.contiguous_format if memory_format is torch.channels_last else torch.channels_last


def prepare_transpose(config: Config, shape: Shape4, memory_format: torch.memory_format) -> Fit:
    """Prepare a function that brings a tensor to a format, by the kernel if it is in the other format and aligned."""
    program = transposing(config.dtype, shape, memory_format)
    (source,), (target,), transposed = program.operands, program.outputs, program.prepare(config.device)
    given = other_format(memory_format)

    def transpose(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous(memory_format=memory_format):
            return tensor
        if not tensor.is_contiguous(memory_format=given) or tensor.data_ptr() % source.alignment:
            return with_strides(tensor, target.strides)
        result: torch.Tensor = transposed(tensor)
        return result

    return transpose


def transposing(dtype: torch.dtype, shape: Sequence[int], memory_format: torch.memory_format) -> Program:
    """The program that transposes ``source`` to this format in ``target``."""
    launch, alignment = transposition(shape, dtype.itemsize, memory_format)
    source = Operand("source", other_format(memory_format), alignment)
    target = Output("target", tuple(shape), strides_of(shape, memory_format))
    return Program(dtype, (source,), (target,), (launch,))


def transposition(shape: Sequence[int], itemsize: int, memory_format: torch.memory_format) -> tuple[Launch, int]:
    """The launch that transposes ``source`` to this format in ``target``, and the alignment of ``source`` in bytes."""
    to_last = memory_format is torch.channels_last
    images, channels, pixels = shape[0], shape[1], math.prod(shape[2:])
    rows, columns = (channels, pixels) if to_last else (pixels, channels)
    macros = macros_of(channels, pixels, to_last, itemsize)
    unit = max(int(macros["ROW_UNIT"]), int(macros["COLUMN_UNIT"]))
    if macros["STAGED"] and (channels % unit or pixels % unit):  # the kernel then loads single elements
        unit = 1
    tiles_columns = -(-columns // int(macros["TILE_COLUMNS"]))
    params: Params = {
        "source, target": ("source", "target"),
        "matrices, rows, columns, tiles_columns": (images, rows, columns, tiles_columns),
    }
    grid = plane_grid(-(-rows // int(macros["TILE_ROWS"])) * tiles_columns, images)
    return Launch("layout/transpose.cu", macros, grid, (_THREADS, 1, 1), params), unit * itemsize


def macros_of(channels: int, pixels: int, to_last: bool, itemsize: int) -> Macros:
    """Macros that specialise csrc/layout/transpose.cu.

    >>> macros = macros_of(96, 4096, True, 2)
    >>> macros["STAGED"], macros["TILE_ROWS"], macros["TILE_COLUMNS"], macros["ROW_UNIT"], macros["COLUMN_UNIT"]
    (0, 64, 256, 8, 8)
    >>> macros_of(96, 49, True, 2)["STAGED"]
    1
    """
    rows, columns = (channels, pixels) if to_last else (pixels, channels)
    macros = _vectors(rows, columns, to_last, itemsize) or _staged(channels, pixels, to_last, itemsize)
    return {"ELEMENT_BYTES": itemsize, **macros, **index_macros(channels * pixels)}


def _vectors(rows: int, columns: int, to_last: bool, itemsize: int) -> dict[str, int] | None:
    """Macros to transpose in registers; None if staging in shared memory is faster or the only way.

    Staging is for extents that are not multiples of 16 bytes (8 for 16-bit elements), and for blocks that would write
    partial sectors.
    """
    row_unit, column_unit = (math.gcd(_MOST_UNIT // itemsize, extent) for extent in (rows, columns))
    if min(row_unit, column_unit) * itemsize < (_LEAST_UNIT if itemsize == 2 else _MOST_UNIT):
        return None
    # Lanes, then warps, go along the columns as far as these reach, the others along the rows.
    row_units, column_units = rows // row_unit, columns // column_unit
    read_bytes = _PIXEL_BYTES if to_last else _CHANNEL_BYTES
    column_lanes = min(read_bytes // (column_unit * itemsize), power_of_two(column_units))
    row_lanes = min(32 // column_lanes, power_of_two(row_units))
    column_warps = min(_WARPS, power_of_two(-(-column_units // (32 // row_lanes))))
    row_warps = min(_WARPS // column_warps, power_of_two(-(-row_units // row_lanes)))
    tile_rows = row_lanes * row_warps * row_unit
    if rows * itemsize % _SECTOR_BYTES and tile_rows < rows:
        return None
    return {
        "STAGED": 0,
        "TILE_ROWS": tile_rows,
        "TILE_COLUMNS": _THREADS // (row_lanes * row_warps) * column_unit,
        "ROW_UNIT": row_unit,
        "COLUMN_UNIT": column_unit,
        "ROW_LANES": row_lanes,
    }


def _staged(channels: int, pixels: int, to_last: bool, itemsize: int) -> dict[str, int]:
    """Macros to transpose through shared memory. A tile has all channels or an even share of them."""
    unit = 2 if itemsize == 2 and channels % 2 == 0 and pixels > 1 else 1
    tile_channels = even_share(channels, _MOST_CHANNELS)
    tile_channels += tile_channels % unit
    tile_pixels = min(max(_SHORTEST, power_of_two(_TILE // tile_channels + 1) // 2), _LONGEST, power_of_two(pixels))
    rows, columns = (tile_channels, tile_pixels) if to_last else (tile_pixels, tile_channels)
    tile = {"TILE_ROWS": rows, "TILE_COLUMNS": columns}
    return {"STAGED": 1, **tile, "ROW_UNIT": unit, "COLUMN_UNIT": unit, "ROW_LANES": 1}
