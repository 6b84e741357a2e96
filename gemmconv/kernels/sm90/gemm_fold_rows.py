"""How ``fused`` goes about wide rows of 16 bits in NCHW (csrc/sm90/gemm_fold_rows.cu): tiles and their estimates.

It is for forward passes and the input gradients of stride 1, where rows of inputs are whole pieces of 16 bytes, every
phase has a tap, the stride across is at most four, taps across are at most twelve and reach over at most eight inputs,
groups have at most 256 input channels, a multiple of 16 if there are several, and the weights of 32 or 64 output
channels fit shared memory; ``tile_of`` gives None for others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import torch

from gemmconv.device import REFERENCE
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.macros import Macros, table
from gemmconv.kernels.sm90.implicit_gemm_plan import SHARED_BYTES
from gemmconv.kernels.sm90.row_streaming import (
    BARRIER_BYTES,
    LONGEST_BOX,
    RowGathering,
    RowStreamingKernel,
    may_gather,
)
from gemmconv.kernels.weights.pack import ROWS_PLAIN, ROWS_SLOTS

_COST = costs_of("sm90/gemm_fold_rows")
_ITEM = 2  # bytes of an element
_SECTOR = 16  # outputs that memory writes together
_LINE = 64  # columns of a box, 128 bytes
_BLOCK_ROWS, _STEP = 64, 16  # rows of a product, and channels
_SLOTS, _COLUMNS, _ROWS = (1, 2), (64, 128), (1, 2)  # of tiles; 96, 192 and 256 columns were hardly ever faster
_MOST_SUMS = 192  # registers of a thread
_MOST_STAGES = 12
_LINE_BYTES = 128  # of outputs that are stored together, at most
_CACHED_BYTES = 96 << 20  # of outputs: beyond, hardly any are still in the L2 cache when their neighbours are stored


@dataclass(frozen=True)
class Tile(RowGathering):
    """What a block of csrc/sm90/gemm_fold_rows.cu does; see its header.

    Attributes:
        problem: the geometry.
        direction: "forward" or "input_grad".
        slots: taps that a product's rows have, each with 64 / slots output channels.
        columns: inputs of a row of a step.
        rows: of cells of an item: of either warpgroup one, or both the same.
        whole_sectors: whether lines are stored as sectors of memory lie, not as steps end.
        multiprocessors: of the GPU: as many blocks run at once.
    """

    problem: Problem
    direction: Pass
    slots: int
    columns: int
    rows: int
    whole_sectors: bool
    multiprocessors: int = REFERENCE.multiprocessors

    itemsize: ClassVar[int] = _ITEM
    source: ClassVar[str] = "sm90/gemm_fold_rows"
    of_layer: ClassVar[tuple[str, ...]] = (*RowGathering.of_layer, "line_cells", "line_pitch")

    @property
    def channels(self) -> int:
        """Input channels, up to what products take."""
        return -(-self.in_channels // _STEP) * _STEP

    @property
    def tiles(self) -> int:
        """Of 64 rows, that have all taps across."""
        return -(-len(self.taps_across) // self.slots)

    @property
    def sides(self) -> int:
        """Warpgroups with output channels of their own."""
        return 2 if self.rows == 1 else 1

    @property
    def outs(self) -> int:
        """Output channels of a warpgroup."""
        return _BLOCK_ROWS // self.slots

    @property
    def set_outs(self) -> int:
        return self.outs * self.sides

    @cached_property
    def row_taps(self) -> list[list[list[int]]]:
        """Of each row phase and input row, and for either row of cells: which of the phase's taps it is, or -1."""
        found = []
        for first, taps in zip(self.first_rows, self.taps_down, strict=True):
            places = {tap.shift - first: i for i, tap in enumerate(taps)}
            reads = [i * self.row_step for i in range(self.input_rows)]
            found.append([[places.get(place - row, -1) for row in range(self.rows)] for place in reads])
        return found

    # Stores.

    @cached_property
    def line_cells(self) -> int:
        """Cells of a line of outputs, which are folded before any are stored."""
        most = max(8, _LINE_BYTES // (_ITEM * self.span[1]))
        return max(cells for cells in range(8, self.columns + 1, 8) if self.columns % cells == 0 and cells <= most)

    @property
    def vector(self) -> int:
        """Outputs that begin at a multiple of their bytes in memory, in any line."""
        span = self.span[1]
        return math.gcd(self.piece, self.output_size[1], self.delayed * span, self.line_cells * span)

    @property
    def cuts_sectors(self) -> bool:
        """Whether steps end, and rows begin, within sectors."""
        return any(place % _SECTOR for place in (self.output_size[1], self.delayed * self.span[1]))

    @property
    def _lines_are_sectors(self) -> bool:
        """Whether lines have as much as some sectors."""
        return self.line_cells * self.span[1] % _SECTOR == self.columns * self.span[1] % _SECTOR == 0

    @property
    def stored(self) -> int:
        """Outputs that a thread stores together."""
        return self.piece if self.whole_sectors else self.vector

    @property
    def kept(self) -> int:
        return _SECTOR - 1 if self.whole_sectors else 0

    @cached_property
    def line_pitch(self) -> int:
        """Outputs from a line to the next, in shared memory: such that lanes write to different banks."""
        first = self.line_cells * self.span[1] + (_SECTOR if self.whole_sectors else 0)
        word = math.gcd(2 * self.span[1], self.vector) if self.whole_sectors else word_of(self.span[1])
        return _line_pitch(first, 2 * self.span[1], word, self.stored)

    # Shared memory.

    @property
    def stage_bytes(self) -> int:
        return self.columns * self.input_rows * self.channels * _ITEM

    @property
    def tap_bytes(self) -> int:
        """Weights of a tap down, of a warpgroup."""
        return self.tiles * self.channels * _BLOCK_ROWS * _ITEM

    @property
    def weight_bytes(self) -> int:
        return self.sides * self.weight_rows * self.tap_bytes

    @property
    def _output_bytes(self) -> int:
        return 2 * self.outs * self.line_pitch * _ITEM

    @property
    def stages(self) -> int:
        """Each has the inputs of a step."""
        left = SHARED_BYTES - self.weight_bytes - self._output_bytes - BARRIER_BYTES
        return min(_MOST_STAGES, left // (self.stage_bytes + 2 * BARRIER_BYTES))

    @property
    def shared_bytes(self) -> int:
        stages = self.stages * (self.stage_bytes + 2 * BARRIER_BYTES)
        return stages + self.weight_bytes + self._output_bytes + BARRIER_BYTES

    @property
    def box(self) -> tuple[int, int, int]:
        return _LINE, self.channels, self.input_rows

    @property
    def possible(self) -> bool:
        """Whether registers, shared memory, boxes and integers hold it."""
        sectors = not self.whole_sectors or (self.cuts_sectors and self._lines_are_sectors)
        return sectors and self.tiles * self.columns // 2 <= _MOST_SUMS and self.stages > 1 and self.addressable

    @cached_property
    def cycles(self) -> float:
        """Roughly the cycles of a call, its launches among them.

        Of a step a warpgroup multiplies, and folds while the other multiplies. What both ask of shared memory counts,
        where it is more: reads of products, three accesses for the outputs of a line, shuffles. Whole sectors take up
        to 13% longer where folds are what is waited for; where memory is, sectors that are written in two parts count
        more than once.
        """
        blocks, rounds = self.blocks_on(self.multiprocessors), -(-self.sets // self.multiprocessors)
        products, span = self.weight_rows * self.channels / _STEP * self.tiles, self.span[1]
        pairs = self.columns / 8 * (2 // self.slots)  # of cells, that a thread folds
        outputs = self.columns * span * self.outs
        shuffles = pairs * sum(0 < distance < 4 for distance in self.given)
        read = products * (2048 + 32 * self.columns) / 128
        accesses = 4 * shuffles + 3 * outputs * _ITEM / 128
        shared = 2 * (_COST.read_factor * read + _COST.access_factor * accesses)
        folding = pairs * (_COST.tap_cycles * len(self.taps_across) + _COST.pair_cycles * span)
        folding += shuffles + _COST.store_cycles * outputs / (32 * self.stored)
        overlap = _COST.overlap
        step = (shared**overlap + (products * self.columns / 2 + folding) ** overlap) ** (1 / overlap)
        multiplied = -(-self.multiplied // self.columns)
        unmultiplied = (self.steps - multiplied) * _COST.unmultiplied_factor * folding
        computing = rounds * -(-self.items // blocks) * (multiplied * step + unmultiplied)
        if self.whole_sectors:
            cached = self._output_bytes_of_all <= _CACHED_BYTES
            computing *= _COST.whole_sectors_cached_factor if cached else _COST.whole_sectors_factor
        return _COST.start_cycles + (computing**overlap + self._written_cycles**overlap) ** (1 / overlap)

    @property
    def _written_cycles(self) -> float:
        """Of moving the inputs and outputs, which the L2 cache puts together as long as it has room for them."""
        outputs = self._output_bytes_of_all
        twice = self.cuts_sectors and not self.whole_sectors and outputs > _CACHED_BYTES
        return self.moved_cycles + (_COST.cut_sectors * self.cycles_of_bytes(outputs) if twice else 0)

    @property
    def _output_bytes_of_all(self) -> int:
        p = self.problem
        return p.batch * p.groups * self.out_channels * math.prod(self.output_size) * _ITEM

    @property
    def macros(self) -> Macros:
        return {
            "TILES": self.tiles,
            "SLOTS": self.slots,
            "COLUMNS": self.columns,
            "ROW_TAP": table([tap for phase in self.row_taps for row in phase for tap in row * (2 // self.rows)]),
            "STAGES": self.stages,
            "LINE_CELLS": self.line_cells,
            "LINE_PITCH": self.line_pitch,
            "VECTOR": self.vector,
            "WHOLE_SECTORS": int(self.whole_sectors),
        }

    @property
    def packed_as(self) -> Macros:
        order = ROWS_SLOTS if self.slots == 2 else ROWS_PLAIN
        sets = {"CHANNEL_SETS": self.channel_sets * self.sides, "ROWS": _BLOCK_ROWS, "ROW_ORDER": order}
        return {**sets, "SLOTS": self.slots, "CHANNELS": self.outs}


@lru_cache(maxsize=1024)
def _line_pitch(first: int, run: int, word: int, stored: int) -> int:
    """The pitch from `first` on with which fewest of the lanes that write together write to the same bank."""
    multiple, together = max(word, stored, 2), 64 // max(2, word)

    def conflicts(pitch: int) -> int:
        banks = [(lane // 4 * pitch + lane % 4 * run) // 2 % 32 for lane in range(together)]
        return max(map(banks.count, banks))

    return min(range(-(-first // multiple) * multiple, first + 65, multiple), key=conflicts)


def word_of(span: int) -> int:
    """Outputs that a lane writes to shared memory together, of two cells."""
    return math.gcd(2 * span, 8)


@lru_cache(maxsize=1024)
def tile_of(problem: Problem, direction: Pass, multiprocessors: int = REFERENCE.multiprocessors) -> Tile | None:
    """The tile for a problem of 16 bits in NCHW: a pure function of it. None where the kernel is not for it."""
    return min(tiles_of(problem, direction, multiprocessors), key=lambda tile: tile.cycles, default=None)


def tiles_of(problem: Problem, direction: Pass, multiprocessors: int = REFERENCE.multiprocessors) -> Iterator[Tile]:
    """The tiles that a problem may have: those that fit registers and shared memory."""
    if not may_gather(problem, direction):
        return
    choices = (problem,), (direction,), _SLOTS, _COLUMNS, _ROWS, (False, True), (multiprocessors,)
    for tile in itertools.starmap(Tile, itertools.product(*choices)):
        if tile.input_size[1] % tile.piece or tile.channels > LONGEST_BOX:
            return
        if problem.groups > 1 and tile.in_channels != tile.channels:
            return  # products would read channels of the next group
        if tile.possible:
            yield tile


class GemmFoldRows(RowStreamingKernel):
    """See the module."""

    name = "sm90/gemm_fold_rows"
    dtypes = (torch.float16, torch.bfloat16)

    def tiles(self, config: Config, direction: Pass) -> Iterator[Tile]:
        return tiles_of(config.problem, direction, config.spec.multiprocessors)

    def tile(self, config: Config, direction: Pass) -> Tile | None:
        return tile_of(config.problem, direction, config.spec.multiprocessors)

    def seconds(self, config: Config, direction: Pass, tile: RowGathering) -> float:
        return _COST.margin * tile.seconds


KERNEL = GemmFoldRows()
