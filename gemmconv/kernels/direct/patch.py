"""Tiles and patches of the gradients of ``direct``, which stage grad_output in shared memory.

The tile, and the outputs that each thread owns, follow from the problem, the element type and the number of
multiprocessors alone. So under one limit of the workspace sums have one order in every call. A patch is the staged area
of a tile; load/patch.cuh computes it by equal rules and names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.integers import even_share, power_of_two_within, up_to_multiple
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, geometry_macros
from gemmconv.kernels.menu import SHORT
from gemmconv.kernels.program import Launch, Operand, Program, Step, clearing, grad_input_of, grad_weight_of
from gemmconv.kernels.splits.reduce import partial_bytes, sum_partials

STATIC_SHARED = 48 << 10  # bytes of shared memory that a kernel has without asking
SHARED = 24 << 10  # bytes that leave room for several blocks on a multiprocessor
_WIDEST_TAPS = 16  # kernel columns that the kernels unroll
UNROLLED = 512  # multiply-adds of a thread for one staged channel: bounds the code
_BATCH_WORDS = 24  # registers for loads in flight while nothing is computed
PREFETCH_WORDS = 32  # registers for loads in flight during a computation
_VECTOR_BYTES = 16
_MOST_STEPS = 8  # vectors of a patch row that a thread loads
_BATCH_LOADS = 12  # in flight at most while nothing is computed
_COLUMNS, _COLUMNS_OF_LINES = (16, 32), (32, 128)  # columns of a tile for wide images, and for those with few rows
_FEW_ROWS = 4


@dataclass(frozen=True)
class Patch:
    """The staged part of grad_output."""

    problem: Problem
    itemsize: int
    tile: Pair  # input pixels of a tile, ``(height, width)``
    taps: Pair  # taps, planes: kernel taps and planes staged at once
    planes: int
    threads: int
    on_tensor_cores: bool = False  # whether planes are padded: fragments load without bank conflicts then

    def _axis(self, axis: int) -> tuple[int, int, bool]:
        """Extent and pitch of an axis in staged positions, and whether only positions that are read are staged."""
        stride, dilation = self.problem.stride[axis], self.problem.dilation[axis]
        divisor = math.gcd(stride, dilation)
        pixels, taps = self.tile[axis], self.taps[axis]
        span = (pixels - 1) * (stride // divisor) + (taps - 1) * (dilation // divisor) + 1
        compact = pixels * taps < span
        return (pixels * taps, taps, True) if compact else (span, stride // divisor, False)

    @cached_property
    def vector(self) -> int:
        """Neighbouring elements of a row that one load takes."""
        problem = self.problem
        compact = self._axis(1)[2]
        if compact or math.gcd(problem.stride[1], problem.dilation[1]) > 1 or self.taps[1] < problem.kernel_size[1]:
            return 1
        step = self.tile[1] * problem.stride[1]
        return math.gcd(_VECTOR_BYTES // self.itemsize, problem.output_size[1], step)

    @cached_property
    def vectors(self) -> int:
        """Vectors of a row."""
        lead = -self.problem.padding[1] % self.vector
        return -(-(lead + self._axis(1)[0]) // self.vector)

    @cached_property
    def rows(self) -> int:
        """Rows of a plane."""
        return self._axis(0)[0]

    @property
    def steps(self) -> int:
        """Vectors of a row that a thread loads."""
        return -(-self.vectors // min(self.threads, 32))

    @property
    def passes(self) -> int:
        """Rows that a thread helps to load."""
        rows_at_once = self.threads // -(-self.vectors // self.steps)
        return -(-self.planes * self.rows // rows_at_once)

    @property
    def words(self) -> int:
        """Registers that all loads of a thread fill."""
        return self.passes * self.steps * max(1, self.vector * self.itemsize // 4)

    @cached_property
    def elements(self) -> int:
        """Elements in shared memory."""
        pitch = self._axis(1)[1]
        banks = min(pitch & -pitch, 32)
        run = self.vector // min(self.vector, banks)
        piece = min(run, 16 // max(4, self.itemsize))
        bank_pitch = up_to_multiple(-(-self.vectors * self.vector // banks), piece)
        plane = self.rows * banks * bank_pitch
        return self.planes * ((plane + 3) // 8 * 8 + 4 if self.on_tensor_cores else plane)

    def macros(self, prefetch: bool, most_words: int = _BATCH_WORDS) -> Macros:
        """The macros for staging; ``most_words`` is the number of registers for loads without prefetching."""
        loads = min(_BATCH_LOADS, min(most_words, _BATCH_WORDS) * 4 // (self.vector * self.itemsize))
        batch = even_share(self.passes, min(self.passes, max(1, loads // self.steps)))
        return {"VECTOR": self.vector, "BATCH": batch, "PREFETCH": int(prefetch)}


@dataclass(frozen=True)
class Tile:
    """What the tiles of both gradient kernels share. Fields are named like the kernels' macros, in lower case."""

    problem: Problem
    itemsize: int
    rows: int  # rows of a thread
    column_threads: int  # column_threads, row_threads: threads across a row of a tile, and down a column
    row_threads: int
    taps: Pair  # kernel taps staged at once

    @property
    def sum_bytes(self) -> int:
        """Bytes of a sum, and of an element in shared memory."""
        return max(4, self.itemsize)


def problem_macros(problem: Problem, dtype: torch.dtype) -> Macros:
    """Macros of the layer that the kernels of all gradients have."""
    channels = {"CI": problem.gemm_k, "CO": problem.group_out_channels}
    elements = 2 * problem.image_elements // problem.groups  # twice as many, because tiles reach beyond the image
    return {"ELEMENT_T": ELEMENT_TYPES[dtype], **channels, **geometry_macros(problem, elements)}


def gradients_program(config: Config, slices: int, vector: int, main: Launch, direction: Pass) -> Program:
    """The program of a launch that computes the weight's gradient in NCHW, or both; ``vector``: elements of a load."""
    nchw, outputs = torch.contiguous_format, [grad_weight_of(config.problem)]
    operands = [Operand("grad_output", nchw, vector * config.dtype.itemsize), Operand("input", nchw)]
    if direction == "grads":
        operands.append(Operand("weight", None))
        outputs.insert(0, grad_input_of(config, nchw))
    # Without images there is one slice, and no call for both gradients.
    steps: list[Step] = [main] if config.problem.batch else [clearing(config, outputs[0])]
    scratch = {}
    if slices > 1:
        steps.append(sum_partials(config, slices))
        scratch["partials"] = slices * partial_bytes(config)
    return Program(config.dtype, tuple(operands), tuple(outputs), tuple(steps), scratch)


def taps_of(problem: Problem, most: int) -> Pair:
    """Kernel taps staged at once: at most about ``most``, in whole rows if they are not too wide."""
    taps_w = even_share(problem.kernel_size[1], _WIDEST_TAPS)
    return even_share(problem.kernel_size[0], max(1, most // taps_w)), taps_w


def rows_of(height: int, most: int) -> int:
    """Rows of a thread: ``most``, but for images with few rows the number that wastes least of the height."""
    if height >= SHORT:
        return power_of_two_within(height, most)
    counts = range(max(1, most), 0, -1)
    return min(counts, key=lambda rows: up_to_multiple(height, rows) + height // (8 * rows))


def pixel_threads_of(problem: Problem, taps_w: int, rows: int, most: int) -> Pair:
    """Threads down a column of a tile, each of which has ``rows`` rows, and across a row: at most ``most`` in all.

    Columns are so many that few are idle, few are read again by neighbouring tiles, and rows are loaded in few steps.
    Wide images choose between two numbers, or take less if a row would need too many steps.
    """
    (height, width), stride = problem.input_size, problem.stride[1]
    overlap = max(0, (taps_w - 1) * problem.dilation[1] + 1 - stride) / stride
    menu = _COLUMNS if height > _FEW_ROWS else _COLUMNS_OF_LINES
    fewer = power_of_two_within(width, min(most, menu[0]))

    def steps(columns: int) -> int:
        return Patch(problem, 4, (1, columns), (1, taps_w), 1, max(32, columns)).steps

    while fewer > 1 and steps(fewer) > _MOST_STEPS:
        fewer //= 2
    widest = min(most, 2 * width - 1)
    more = [columns for columns in menu if fewer < columns <= widest and steps(columns) <= _MOST_STEPS]
    across = min([fewer, *more], key=lambda columns: (-(-width // columns) * (columns + overlap + 4), -columns))
    return power_of_two_within(-(-height // rows), most // across), across


_AnyTile = TypeVar("_AnyTile", bound=Tile)


def halved(tile: _AnyTile, *names: str) -> _AnyTile:
    """The tile with half of the first of these fields that is more than 1; the tile itself if none is."""
    for name in names:
        if getattr(tile, name, 1) > 1:
            return replace(tile, **{name: getattr(tile, name) // 2})
    return tile


def smaller(tile: _AnyTile) -> _AnyTile:
    """A tile with as many pixel threads and less shared memory: fewer taps at once, then fewer channels or rows."""
    taps_h, taps_w = tile.taps
    if taps_h > 1:
        return replace(tile, taps=(-(-taps_h // 2), taps_w))
    fewer = halved(tile, "co_threads", "co_channels", "channel_threads", "rows")
    return fewer if fewer is not tile else replace(tile, taps=(taps_h, -(-taps_w // 2)))
