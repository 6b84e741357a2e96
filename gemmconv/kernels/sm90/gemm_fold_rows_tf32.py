"""How ``fused`` goes about wide rows of float32 in NCHW, as TF32 (sm90/gemm_fold_rows_tf32.cu): tiles, estimates.

It is for forward passes and the input gradients of stride 1, where rows of inputs are whole pieces of 16 bytes, every
phase has a tap and one across has more, the stride across is at most four, taps across reach over at most eight inputs,
and the weights of some output channels fit shared memory; ``tile_of`` gives None for others.
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
from gemmconv.kernels.sm90.row_streaming import BARRIER_BYTES, RowGathering, RowStreamingKernel, may_gather

_COST = costs_of("sm90/gemm_fold_rows_tf32")
_ITEM = 4  # bytes of an element
_STEP = 8  # channels of a product
_WHOLE_OUTS, _WHOLE_LINES, _MOST_LINES = 8, 16, 256  # output channels, and columns of a product
_CHUNKS = (8, 16, 32, 64)  # channels of a stage
# Of a step, which are written out one by one; a group has those of a chunk, and of a tap down or of all of them.
_MOST_PRODUCTS, _MOST_GROUPS = 96, 16
_MOST_REGISTERS, _OTHER_REGISTERS, _FEW_WORDS = 250, 40, 64  # of a thread
_MOST_STAGES = 16
_LINE_PAD = 4  # outputs from the end of a line in shared memory to the next
_SECTOR = 8  # outputs that memory is written by


@dataclass(frozen=True)
class Tile(RowGathering):
    """What a block of csrc/sm90/gemm_fold_rows_tf32.cu does; see its header.

    Attributes:
        problem: the geometry.
        direction: "forward" or "input_grad".
        outs: output channels of a block.
        chunk: input channels of a stage.
        whole_sectors: whether lines begin early, as sectors of memory do: where not all begin with one.
        columns, rows: inputs of a row of a step, and rows of cells of an item: 16 for each of 8 warps.
        multiprocessors: of the GPU: as many blocks run at once.
    """

    problem: Problem
    direction: Pass
    outs: int
    chunk: int
    whole_sectors: bool
    columns: int = 16
    rows: int = 8
    multiprocessors: int = REFERENCE.multiprocessors

    itemsize: ClassVar[int] = _ITEM
    source: ClassVar[str] = "sm90/gemm_fold_rows_tf32"
    of_layer: ClassVar[tuple[str, ...]] = (*RowGathering.of_layer, "taps_together", "row_places")

    @property
    def channels(self) -> int:
        """Input channels, up to whole chunks."""
        return -(-self.in_channels // self.chunk) * self.chunk

    @property
    def chunks(self) -> int:
        return self.channels // self.chunk

    @property
    def set_outs(self) -> int:
        return self.outs

    @property
    def lines(self) -> int:
        """Columns of a product: the output channels of each tap across."""
        return -(-len(self.taps_across) * self.outs // _WHOLE_LINES) * _WHOLE_LINES

    @property
    def products(self) -> int:
        """Of a warpgroup's step."""
        return self.weight_rows * self.channels // _STEP

    @property
    def groups(self) -> int:
        """Of products of a step: of a chunk, and a tap down, or all taps down."""
        return self.weight_rows * self.chunks // self.taps_together

    @cached_property
    def taps_together(self) -> int:
        """Taps down whose words a thread loads together: all of them, where registers hold those."""
        return self.weight_rows if self._registers_with(self.weight_rows) <= _MOST_REGISTERS else 1

    @cached_property
    def row_places(self) -> list[list[int]]:
        """Of each row phase, from a cell's first input row to that of each of ``weight_rows`` taps down."""
        return [
            [tap.shift - first for tap in taps] + [0] * (self.weight_rows - len(taps))
            for first, taps in zip(self.first_rows, self.taps_down, strict=True)
        ]

    @property
    def vector(self) -> int:
        """Outputs that a lane's cells, rows and where lines begin are multiples of; four at most."""
        span = self.span[1]
        return math.gcd(self.piece, 2 * span, self.output_size[1], self.delayed * span)

    @property
    def steps(self) -> int:
        """Along a row; they come two by two."""
        return -(-super().steps // 2) * 2

    @property
    def cuts_sectors(self) -> bool:
        """Whether lines would begin within sectors."""
        return self.output_size[1] % _SECTOR > 0 or self.delayed * self.span[1] % _SECTOR > 0

    @property
    def kept(self) -> int:
        if not self.whole_sectors:
            return 0
        return -self.delayed * self.span[1] % _SECTOR if self.output_size[1] % _SECTOR == 0 else _SECTOR - 1

    # Shared memory and registers.

    @property
    def stage_bytes(self) -> int:
        return self.columns * self.input_rows * self.chunk * _ITEM

    @property
    def weight_bytes(self) -> int:
        return self.weight_rows * self.channels * self.lines * _ITEM

    @property
    def stages(self) -> int:
        """Each has the inputs of a chunk of a step; no more than two steps are ahead."""
        left = SHARED_BYTES - self.weight_bytes - self._other_bytes
        return min(_MOST_STAGES, 3 * self.chunks, left // (self.stage_bytes + 2 * BARRIER_BYTES))

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 2 * BARRIER_BYTES) + self.weight_bytes + self._other_bytes

    @property
    def _other_bytes(self) -> int:
        """Outputs of two steps of eight channels of each warp, and what is kept of all; the bias, a barrier."""
        line = 2 * self.columns * self.span[1] + self.whole_sectors * _SECTOR + _LINE_PAD
        outputs = _WHOLE_OUTS * line * _ITEM + self.whole_sectors * self.outs * _SECTOR * _ITEM
        return self.rows * outputs + self.outs * _ITEM + BARRIER_BYTES

    @property
    def box(self) -> tuple[int, int, int]:
        return self.columns, self.chunk, self.input_rows

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies, about: sums, words of two groups, what is carried or waits.

        Of 400 tiles of random layers that take 170 and more, ten spill, 128 bytes at most.
        """
        return self._registers_with(self.taps_together)

    def _registers_with(self, taps_together: int) -> int:
        span, groups = self.span[1], self.weight_rows * self.chunks // taps_together
        words = min(2, groups) * taps_together * self.chunk // _STEP * 4
        words += max(0, words - _FEW_WORDS) if groups > 1 else 0  # of many, some have to be moved
        return self.lines // 2 + words + self.outs // 4 * (self._carried + 2 * span) + 8 * span + _OTHER_REGISTERS

    @property
    def _carried(self) -> int:
        """Of an output channel's two cells of a lane, what comes from other lanes."""
        return sum(distance > 0 for distance in self.given)

    @property
    def possible(self) -> bool:
        """Whether registers, shared memory, boxes and integers hold it."""
        fits = self.lines <= _MOST_LINES and self.registers <= _MOST_REGISTERS and self.products <= _MOST_PRODUCTS
        fits = fits and self.groups <= _MOST_GROUPS
        return fits and self.stages > self.chunks and self.addressable

    @cached_property
    def cycles(self) -> float:
        """Roughly the cycles of a call, its launches among them.

        Of a step a warpgroup multiplies, and folds while the other multiplies. That hides a part of reading words, of
        inputs that come, shuffles and stores, which all wait for shared memory. Inputs that are asked for many channels
        at a time keep memory waiting in between.
        """
        blocks, rounds = self.blocks_on(self.multiprocessors), -(-self.sets // self.multiprocessors)
        step = self.products * (_COST.line_cycles * self.lines + _COST.product_cycles)
        step += 2 * _COST.group_cycles * self.groups + self.stage_bytes * self.chunks / 128
        step += self.outs * (2 * self._carried + _COST.output_cycles * self.span[1])
        computing = rounds * -(-self.items // blocks) * self.steps * _COST.step_share * step
        moving = _COST.memory_factor * (1 + self.chunk / _COST.long_chunk) * self.moved_cycles
        overlap = _COST.overlap
        return _COST.start_cycles + (computing**overlap + moving**overlap) ** (1 / overlap)

    @property
    def macros(self) -> Macros:
        return {
            "CHUNK": self.chunk,
            "OUTS": self.outs,
            "LINES": self.lines,
            "ROW_PLACE": table([place for phase in self.row_places for place in phase]),
            "STAGES": self.stages,
            "TAPS_TOGETHER": self.taps_together,
            "VECTOR": self.vector,
            "WHOLE_SECTORS": int(self.whole_sectors),
        }

    @property
    def packed_as(self) -> Macros:
        sets = {"CHANNEL_SETS": self.channel_sets, "ROWS": self.lines, "CHANNEL_PAIRS": 1}
        return {**sets, "SLOTS": len(self.taps_across), "CHANNELS": self.outs}


@lru_cache(maxsize=1024)
def tile_of(problem: Problem, direction: Pass, multiprocessors: int = REFERENCE.multiprocessors) -> Tile | None:
    """The tile for a problem of TF32 in NCHW: a pure function of it. None where the kernel is not for it."""
    return min(tiles_of(problem, direction, multiprocessors), key=lambda tile: tile.cycles, default=None)


def tiles_of(problem: Problem, direction: Pass, multiprocessors: int = REFERENCE.multiprocessors) -> Iterator[Tile]:
    """The tiles that a problem may have: those that fit registers and shared memory."""
    if not may_gather(problem, direction):
        return
    any_tile = Tile(problem, direction, _WHOLE_OUTS, _CHUNKS[0], whole_sectors=False)
    channels, whole_sectors = any_tile.out_channels, any_tile.cuts_sectors
    sets = range(1, -(-channels // _WHOLE_OUTS) + 1)
    outs = {-(-channels // (count * _WHOLE_OUTS)) * _WHOLE_OUTS for count in sets}
    for set_outs, chunk in itertools.product(sorted(outs, reverse=True), _CHUNKS):
        tile = Tile(problem, direction, set_outs, chunk, whole_sectors, multiprocessors=multiprocessors)
        if tile.input_size[1] % tile.piece:
            return
        if len(tile.taps_across) == tile.span[1]:
            return  # nothing folds: others store what each tap gives in longer runs
        if tile.channels - tile.in_channels >= _STEP or (problem.groups > 1 and tile.in_channels != tile.channels):
            continue  # chunks would have products of nothing, or read channels of the next group
        if tile.possible:
            yield tile


class GemmFoldRowsTf32(RowStreamingKernel):
    """See the module."""

    name = "sm90/gemm_fold_rows_tf32"
    dtypes = (torch.float32,)

    def tiles(self, config: Config, direction: Pass) -> Iterator[Tile]:
        return tiles_of(config.problem, direction, config.spec.multiprocessors)

    def tile(self, config: Config, direction: Pass) -> Tile | None:
        return tile_of(config.problem, direction, config.spec.multiprocessors)

    def fitted(self, config: Config, direction: Pass, tile: RowGathering) -> RowGathering | None:
        sized = super().fitted(config, direction, tile)
        assert sized is None or isinstance(sized, Tile)
        return None if sized is None or sized.cuts_sectors > sized.whole_sectors else sized


KERNEL = GemmFoldRowsTf32()
