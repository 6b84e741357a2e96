"""How ``fused`` goes about layers of few output channels (sm90/gemm_fold_narrow.cu): tiles, estimates, launch.

It is for one group, for phases that all have taps, for columns of at most 256 lines that fit shared memory, and for
rows of the input (channels, in channels_last) of whole 4 bytes; ``tile_of`` gives None for others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from gemmconv.device import REGISTERS
from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property, changed
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of, overlapped
from gemmconv.kernels.integers import INT32_MAX, even_share, up_to_multiple
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, geometry_macros, index_macros, named_macros
from gemmconv.kernels.phases import can_be_folded, cells_of, reach_of, stored_together
from gemmconv.kernels.program import (
    Launch,
    Operand,
    Params,
    Program,
    TensorMapSpec,
    gathering,
    reciprocal,
    weight_strides,
)
from gemmconv.kernels.sm90.base import FAST_CLOCK_RATE, LONGEST_BOX, SHARED_BYTES, Sm90Kernel, image_map, variant_of

_COST = costs_of("sm90/gemm_fold_narrow")
_RESERVED_BYTES = 1 << 10  # of shared memory, for each block
_BARRIER_BYTES = 128
_OTHER_REGISTERS = 56  # of a thread, beside sums and words that are multiplied
_SPLIT_REGISTERS = 12
_SPARED_REGISTERS = 24  # that ptxas can do without, but for three products
_WARPGROUP = 128  # threads; ptxas gives registers to whole ones
_MOST_LINES = 256  # that the tensor core takes
_MOST_OUTPUTS = 32  # that a thread folds at a time; with more it has no registers
_LEAST_COPY, _MOST_COPY = 4, 16  # bytes that cp.async takes
_BOX_LINE = 128  # bytes of a line of boxes
_COLUMNS = 32, 64  # of strips
_WHOLE_COLUMNS = 8, 16, 32, 64  # at most, of whole rows
_ROWS, _MOST_POSITIONS = (1, 2, 4, 8), 512  # of a step
_KNOWN = (4, 256), (64, 104)  # batches of the images whose best tiles serve others, and the width of wide ones
_MOST_ITEMS = 2  # of a block, where segments are chosen
_MOST_FOLDERS, _LEAST_FOLDERS = 256, 64
_LOADERS, _BOX_LOADERS = 64, 32
_STAGES, _BOX_STAGES = (2,), (2, 4)
_MOST_TOGETHER = 12  # outputs that a thread folds together


@dataclass(frozen=True)
class Tile:
    """The work of a block of csrc/sm90/gemm_fold_narrow.cu; see its header."""

    problem: Problem  # the geometry
    itemsize: int  # bytes of an element
    split: bool  # whether float32 is three products of TF32
    channels_last: bool  # format of input and output
    multiprocessors: int  # multiprocessors of the GPU
    rows: int  # input rows of a step
    columns: int  # positions across of a step; if these are whole rows, the most that the kernel has room for
    whole: bool  # whether positions are whole rows of the input: what lies beside them is zero in any case
    warpgroups: int = 1  # warpgroups that multiply, and share the positions of a step
    folders: int = 0  # threads that fold columns
    copied: int = 0  # bytes that are copied together; 0 where inputs come as boxes of a tensor map
    stages: int = 2  # buffers of the inputs of a step
    segments: int = 1  # parts that the cell rows of an image are cut into

    packed_bytes: ClassVar[int] = 0  # blocks lay weights out themselves

    @property
    def loaders(self) -> int:
        """Threads that copy inputs."""
        return _BOX_LOADERS if self.boxed else _LOADERS

    @property
    def threads(self) -> int:
        return _WARPGROUP * self.warpgroups + self.folders + self.loaders

    @property
    def lines(self) -> int:
        """Lines of columns: output channels x taps."""
        return self.problem.out_channels * self.problem.taps

    @cached_property
    def whole_lines(self) -> int:
        """:attr:`lines`, up to a multiple that the tensor core takes."""
        return up_to_multiple(self.lines, 16)

    @property
    def steps(self) -> int:
        """Steps of 32 bytes of channels."""
        return -(-self.problem.in_channels * self.itemsize // 32)

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies, about."""
        sums = self.whole_lines + _SPLIT_REGISTERS if self.split else self.whole_lines // 2
        return _OTHER_REGISTERS + sums + 4 * min(8, self.steps)

    @property
    def boxed(self) -> bool:
        return self.copied == 0

    @property
    def line(self) -> int:
        """Elements of a line of boxes."""
        return _BOX_LINE // self.itemsize

    @property
    def flat(self) -> bool:
        """Whether lines of boxes go on with the next row."""
        return self.boxed and self.whole and not self.channels_last

    @property
    def unit(self) -> int:
        """Elements that are copied together."""
        return self.copied // self.itemsize

    @cached_property
    def reach(self) -> tuple[Pair, Pair]:
        """Least and largest shift of either axis."""
        return reach_of(self.problem, 0), reach_of(self.problem, 1)

    @property
    def halo_h(self) -> int:
        first, last = self.reach[0]
        return last - first

    @property
    def position_unit(self) -> int:
        """Positions that are copied together; boxes begin at multiples of 16 bytes."""
        return 1 if self.channels_last else 16 // self.itemsize if self.boxed else self.unit

    @property
    def origin(self) -> int:
        """The first strip's first position."""
        return 0 if self.whole else self.reach[1][0] // self.position_unit * self.position_unit

    @cached_property
    def most_cells(self) -> int:
        """Cells across of a strip, of whole rows those of the most positions: it does not depend on sizes."""
        if self.whole:
            return self.columns + cells_of(self.problem)[1] - self.problem.input_size[1]
        return (self.columns - self.reach[1][1] + self.origin) // self.position_unit * self.position_unit

    @property
    def cells(self) -> int:
        """Cells across of a strip."""
        return cells_of(self.problem)[1] if self.whole else self.most_cells

    @property
    def left(self) -> int:
        """Columns in the ring before a row's first."""
        return max(0, self.origin - self.reach[1][0])

    @property
    def column_pitch(self) -> int:
        """Floats from a line of the ring to the next: an odd multiple of 4, which spreads lines over banks."""
        count = self.left + max(self.columns, self.most_cells + self.reach[1][1] - self.origin)
        return (count + 3) // 8 * 8 + 4

    @property
    def positions(self) -> int:
        """Positions of a step, at most."""
        return self.rows * self.columns

    @property
    def across(self) -> int:
        return self.problem.input_size[1] if self.whole else self.columns

    @property
    def turns(self) -> int:
        """Turns that a warpgroup takes over the positions of a step."""
        return -(-self.rows * self.across // (64 * self.warpgroups))

    @property
    def pitch(self) -> int:
        """Elements between channels of a stage, or between positions: free of bank conflicts. 0 of boxes."""
        if self.boxed:
            return 0
        return self.padded + 16 // self.itemsize if self.channels_last else self.positions + 8

    @property
    def padded(self) -> int:
        """Input channels, up to whole steps of 32 bytes."""
        return self.steps * 32 // self.itemsize

    @property
    def stage_bytes(self) -> int:
        if not self.boxed:
            return (self.positions if self.channels_last else self.padded) * self.pitch * self.itemsize
        channels = up_to_multiple(self.padded, self.line) if self.channels_last else self.padded
        return self.positions * channels * self.itemsize

    @property
    def boxable(self) -> bool:
        """Whether boxes of a tensor map, whose lines are whole, can have the inputs of a step."""
        across = self.problem.in_channels if self.channels_last else self.problem.input_size[1]
        lines = self.columns if self.channels_last else self.padded
        whole = self.channels_last or self.whole or self.columns % self.line == 0
        return whole and across * self.itemsize % 16 == 0 and lines <= LONGEST_BOX

    @property
    def input_map(self) -> TensorMapSpec:
        """The tensor map of the input: see the kernel."""
        p, rows = self.problem, 1 if self.flat else self.rows
        shape = (p.batch, p.in_channels, 1, p.in_pixels) if self.flat else p.input_shape
        box = self.line, self.across if self.channels_last else self.padded, rows, 1
        return image_map(shape, self.itemsize, box, self.channels_last)

    @property
    def shared_bytes(self) -> int:
        ring = (2 * self.rows + self.halo_h) * self.lines * self.column_pitch * 4
        ring = up_to_multiple(max(ring, self.problem.in_channels * self.lines * self.itemsize), 16)
        weights = (1 + self.split) * self.steps * 32 * self.whole_lines
        return _BARRIER_BYTES + ring + weights + self.stages * self.stage_bytes

    @cached_property
    def blocks_resident(self) -> int:
        """Blocks that a multiprocessor is to have registers and shared memory for."""
        by_registers = REGISTERS // (up_to_multiple(self.registers, 8) * self.threads)
        return max(1, min(by_registers, SHARED_BYTES // (self.shared_bytes + _RESERVED_BYTES)))

    @property
    def strips(self) -> int:
        return -(-cells_of(self.problem)[1] // self.cells)

    @property
    def segment_rows(self) -> int:
        """Cell rows of a segment."""
        return -(-cells_of(self.problem)[0] // self.segments)

    @property
    def items(self) -> int:
        return self.problem.batch * self.strips * self.segments

    @property
    def block_steps(self) -> float:
        """Steps of the block that has most."""
        rounds = max(1.0, self.items / blocks_at_once(self))
        item_steps = -(-(self.segment_rows + self.halo_h) // self.rows)
        return (math.ceil(rounds) if rounds < 4 else rounds) * item_steps

    @property
    def cell_parts(self) -> int:
        """Parts of a cell, each of which a thread folds at a time: its row phases, in NCHW those of each channel."""
        return self.problem.stride[0] * (1 if self.channels_last else self.problem.out_channels)

    @property
    def outputs(self) -> int:
        """Outputs beside each other that a thread folds at a time."""
        return self.problem.stride[1] * (self.problem.out_channels if self.channels_last else 1)

    @property
    def rows_together(self) -> int:
        """Cell rows that a thread folds together."""
        most = max(1, _MOST_TOGETHER // self.outputs)
        return max(count for count in range(1, min(self.rows, most) + 1) if self.rows % count == 0)

    @property
    def fits_integers(self) -> bool:
        """Whether the kernel's integers reach as far: also whole strips, and what a step has beyond the image."""
        p, (down, across) = self.problem, self.reach
        rows = cells_of(p)[0] + self.rows + self.halo_h + abs(down[0]) + 1
        columns = self.strips * self.cells + self.columns + max(map(abs, across))
        last = max(rows * p.stride[0], columns * p.stride[1], rows * self.across if self.flat else 0)
        return max(p.in_pixels, p.out_pixels, self.items + blocks_at_once(self), last) <= INT32_MAX

    @property
    def vector(self) -> int:
        """Outputs that are stored together."""
        return stored_together(self.problem, self.itemsize, self.problem.out_channels if self.channels_last else 1)

    @property
    def cycles(self) -> float:
        """Roughly the cycles that a call takes.

        A step takes as long as the slowest role, or what all blocks of a multiprocessor ask of its tensor cores, its
        shared memory or the L2 cache, and more where several are close.
        """
        p, blocks = self.problem, self.blocks_resident
        products = self.steps * self.whole_lines * (3 if self.split else 1)
        rounding = 0 if self.itemsize == 2 else _COST.split_rounding_cycles if self.split else _COST.rounding_cycles
        multiplied = _COST.multiply_cycles + _COST.product_cycles * products + rounding * self.steps
        multiplying, positions = self.turns * multiplied, self.rows * self.across
        together, added = self.rows_together, self.outputs * p.taps / math.prod(p.stride)
        turns = -(-self.cell_parts * self.cells // self.folders) * self.rows // together
        folding = _COST.fold_cycles + turns * (_COST.fold_turn_cycles + _COST.fold_add_cycles * together * added)
        loaded = positions * p.in_channels * self.itemsize
        if self.boxed:
            loading, written = _COST.box_cycles + _COST.box_byte_cycles * loaded, loaded / 128
        else:
            loading = _COST.copy_cycles + _COST.copy_turn_cycles * loaded / (self.copied * self.loaders)
            written = loaded / (16 * self.copied)
        wavefronts = (loaded / _COST.read_divisor + positions * 8 * self.lines) / 128 + written
        moved = loaded + positions * math.prod(p.stride) * p.out_channels * self.itemsize
        tensor_cores = _COST.tensor_core_cycles * products * self.turns * self.warpgroups
        shared = max(tensor_cores, _COST.wavefront_cycles * wavefronts, _COST.moved_byte_cycles * moved) * blocks
        step = overlapped(_COST.overlap, multiplying, folding, loading, shared)
        words = self.steps * 8 * self.whole_lines * (1 + self.split)
        weights = _COST.word_cycles * words / (self.threads - self.loaders)
        return _COST.start_cycles + weights + self.block_steps * step


@lru_cache(maxsize=1024)
def tile_of(problem: Problem, itemsize: int, split: bool, channels_last: bool, multiprocessors: int) -> Tile | None:
    """The tile for a problem: a pure function of it. None where the kernel is not for it.

    It is one of two that are best for images of the most columns that whole rows may have, or for wide ones, in a small
    and in a large batch, so few are compiled. For 300 images of random sizes their estimates were 3% above those of the
    best of all tiles, on average.
    """
    width = problem.input_size[1]
    most = next((columns for columns in _WHOLE_COLUMNS if columns >= width), None)
    whole = channels_last or width * itemsize % _MOST_COPY == 0  # rows are whole pieces
    variant, found = (itemsize, split, channels_last, multiprocessors), list[Tile]()
    for batch, wide in _KNOWN if whole else _KNOWN[-1:]:
        across = most or wide
        size = 1 if problem.input_size[0] == 1 else across, across if whole else across - _LEAST_COPY // itemsize
        known = replace(problem, batch=batch, input_size=size)
        if min(known.output_size) > 0 and (tile := _sized(_best(known, *variant), problem)) is not None:
            found.append(tile)
    return min(found, key=lambda tile: tile.cycles, default=None) or _best(problem, *variant)


@lru_cache(maxsize=1024)
def _best(problem: Problem, itemsize: int, split: bool, channels_last: bool, multiprocessors: int) -> Tile | None:
    """The best of all tiles."""
    uncut = _uncut_tiles(problem, itemsize, split, channels_last, multiprocessors)
    return min(map(_cut, uncut), key=lambda tile: tile.cycles, default=None)


def _sized(tile: Tile | None, problem: Problem) -> Tile | None:
    """A tile of a layer for other images. None where it has no room for them, or does not begin where their rows do."""
    width = problem.input_size[1]
    if tile is None or problem.batch == 0 or (tile.whole and width > tile.columns):
        return None
    if not tile.channels_last and width * tile.itemsize % (tile.copied or _MOST_COPY):
        return None
    return _cut(changed(tile, problem=problem, segments=1))


def _uncut_tiles(
    problem: Problem, itemsize: int, split: bool, channels_last: bool, multiprocessors: int
) -> Iterator[Tile]:
    """All tiles that do not cut images into segments, whatever the kernel's integers hold."""
    p, width = problem, problem.input_size[1]
    if p.groups > 1 or p.batch == 0 or p.out_channels * p.taps > _MOST_LINES or not can_be_folded(p):
        return
    together = math.gcd(_MOST_COPY, (p.in_channels if channels_last else width) * itemsize)
    if together < _LEAST_COPY:
        return
    widths = [(columns, False) for columns in _COLUMNS if columns < width]
    widths += [(columns, True) for columns in _WHOLE_COLUMNS if columns >= width][:1]
    for (columns, whole), rows in itertools.product(widths, _ROWS):
        groups, rest = divmod(rows * columns, 64)
        if rest or rows * columns > _MOST_POSITIONS:
            continue
        boxed = Tile(p, itemsize, split, channels_last, multiprocessors, rows, columns, whole)
        # The smallest copies waste the fewest columns at the ends of strips.
        copied = 0 if boxed.boxable else together if whole or channels_last else _LEAST_COPY
        for stages, warpgroups in itertools.product(_STAGES if copied else _BOX_STAGES, (1, 2)):
            tile = changed(boxed, copied=copied, stages=stages, warpgroups=warpgroups)
            if groups % warpgroups or tile.most_cells <= 0 or tile.outputs > _MOST_OUTPUTS:
                continue
            for folders in _shares(tile.cell_parts * tile.most_cells):
                folding = changed(tile, folders=folders)
                needed = folding.registers - (0 if split else _SPARED_REGISTERS)
                fits = needed <= min(255, REGISTERS // up_to_multiple(folding.threads, _WARPGROUP))
                if fits and folding.shared_bytes <= SHARED_BYTES:
                    yield folding


def _shares(folded: int) -> Iterator[int]:
    """Threads that fold, in whole warps, where each has one, two or three of what is folded of a cell row."""
    for each in (1, 2, 3):
        folders = up_to_multiple(-(-folded // each), 32)
        if folders <= _MOST_FOLDERS and (each == 1 or folders >= _LEAST_FOLDERS):
            yield folders


def _cuts(tile: Tile) -> Iterator[Tile]:
    """A tile of whole images, cut into segments that give every block that runs at once one or two items."""
    cells, at_once = cells_of(tile.problem)[0], blocks_at_once(tile)
    most = (max(1, items * at_once // tile.items) for items in range(1, _MOST_ITEMS + 1))
    for segments in {even_share(cells, min(count, cells)) for count in most}:
        cut = object.__new__(Tile)  # faster than replace: cached values, which do not depend on segments, are kept
        vars(cut).update(vars(tile), segments=segments)
        yield cut


def _cut(tile: Tile) -> Tile:
    """A tile of whole images with the segments that take fewest steps."""
    return min(_cuts(tile), key=lambda cut: cut.block_steps)


def blocks_at_once(tile: Tile) -> int:
    """How many blocks run at once; they share its items evenly."""
    return tile.multiprocessors * tile.blocks_resident


class GemmFoldNarrow(Sm90Kernel):
    name = "sm90/gemm_fold_narrow"
    serves = "one group, phases that all have taps, at most 256 columns for all output channels"
    clock_rate = FAST_CLOCK_RATE

    def tiles(self, config: Config, direction: Pass) -> Iterator[Tile]:
        uncut = _uncut_tiles(config.problem, *variant_of(config), config.spec.multiprocessors)
        return (cut for tile in uncut for cut in _cuts(tile) if cut.fits_integers)

    def tile(self, config: Config, direction: Pass) -> Tile | None:
        tile = tile_of(config.problem, *variant_of(config), config.spec.multiprocessors)
        # The layer is declined if the best tile's integers do not reach, even if another's do: all need about as much.
        return tile if tile is not None and tile.fits_integers else None

    def fitted(self, config: Config, direction: Pass, tile: Tile) -> Tile | None:
        if index_macros(config.problem.image_elements) != index_macros(tile.problem.image_elements):
            return None
        sized = _sized(tile, config.problem)
        return sized if sized is not None and sized.fits_integers else None

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        p = config.problem
        macros: Macros = {
            "ELEMENT_T": ELEMENT_TYPES[config.dtype],
            **named_macros(p, "in_channels out_channels"),
            **named_macros(tile, "channels_last split stages warpgroups folders rows columns whole origin left"),
            **named_macros(tile, "column_pitch pitch unit boxed vector shared_bytes"),
            "CHANNEL_STEPS": tile.steps,
            "LINES": tile.whole_lines,
            "PRODUCERS": tile.loaders,
            "CELLS": tile.most_cells,
            "TOGETHER": tile.rows_together,
            "MIN_BLOCKS": tile.blocks_resident,
            **geometry_macros(p, p.image_elements),
        }
        params: Params = {
            **({"map": tile.input_map} if tile.boxed else {}),
            "input, weight, bias, output": ("input", "weight", "bias", "output"),
            "h_in, w_in, h_out, w_out": (*p.input_size, *p.output_size),
            "cells_h, cells_w": cells_of(p),
            "strips, segments, segment_rows, items": (tile.strips, tile.segments, tile.segment_rows, tile.items),
            **weight_strides(p),
            "by_w_in, by_cells_w": (reciprocal(p.input_size[1]), reciprocal(tile.cells)),
            "turns": tile.turns,
        }
        grid, block = (even_share(tile.items, blocks_at_once(tile)), 1, 1), (tile.threads, 1, 1)
        launch = Launch("sm90/gemm_fold_narrow.cu", macros, grid, block, params, tile.shared_bytes)
        return gathering(config, "forward", [launch], weight=Operand("weight", None, 16))


KERNEL = GemmFoldNarrow()
