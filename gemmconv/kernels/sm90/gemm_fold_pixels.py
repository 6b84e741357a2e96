"""Host side of csrc/sm90/gemm_fold_pixels.cu: ``fused`` for small images, and for signals.

The kernel multiplies inputs by weights, and adds up the products that belong to the same output. Its words are:

    position  an input pixel: a row of the product
    line      a tap of an output channel: a column of the product
    block     at most 256 lines, which one product computes: all taps of some output channels
    set       the blocks of lines that an item has: all of them, or a share
    item      what a thread block computes at a time: positions of some images, or of a window of one row, times a set
    chunk     128 bytes of a pixel's channels, which come to shared memory together
    fold      the columns of some output channels, which lie in shared memory at once while threads add them up
    cell      the outputs of one stride, height x width: a thread gathers a cell, or a part of its rows, at a time

An example is 64 images of 8 x 8, 64 to 32 channels, kernel 4, stride 2, padding 1, in TF32. There are 32 * 16 = 512
lines. A block has 144 of them, those of 9 output channels, so there are four blocks, each a set of its own. An item has
two images, 128 positions, so there are 32 * 4 = 128 items, one for nearly each multiprocessor of an H200. Channels come
in two chunks. A fold has 3 output channels, 48 lines of 128 positions, so a block takes three folds.

It is for 16-bit types and TF32, NCHW and one group, where

- a block of lines has all taps of some output channels, and each phase has a tap;
- images have at most 256 inputs, or else image and kernel have one row;
- inputs of an image are a multiple of four;
- in 16 bits, rows of weights begin at multiples of 16 bytes.

``tiles_of`` gives no tile for other layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from gemmconv.device import REFERENCE
from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property, changed
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of, overlapped
from gemmconv.kernels.integers import even_share, up_to_multiple
from gemmconv.kernels.macros import Macros, geometry_macros, named_macros
from gemmconv.kernels.phases import can_be_folded, cells_of, reach_of, stored_together
from gemmconv.kernels.program import Program
from gemmconv.kernels.sm90 import pixels_on_m
from gemmconv.kernels.sm90.base import OneFormatForward
from gemmconv.kernels.sm90.pixels_on_m import BLOCK_POSITIONS, CHUNK_BYTES, CONSUMERS, MOST_LINES, PositionRows

_COST = costs_of("sm90/gemm_fold_pixels")
_MOST_ROW_BLOCKS = 2  # blocks of 128 positions of an item
_MOST_SUMS = 256  # lines times blocks of positions: a thread has registers for half as many sums
_MOST_CELLS = 16  # cells for each input: where there are more, most outputs lie beside what the inputs reach
_FOLD_LINES = 32  # lines of a fold at least, where they do not take too much shared memory
_OWN_BYTES, _MOST_OWN_BYTES = 40 << 10, 72 << 10  # shared memory of two folds; the most where inputs leave so much
_MOST_HALO = 32  # inputs of a window that its neighbours have too


@dataclass(frozen=True)
class Tile(PositionRows):
    """The work of a thread block of csrc/sm90/gemm_fold_pixels.cu. The words are those of the module.

    Attributes:
        images: images of an item; 1 where items are windows.
        window: positions of each image that an item has: all of them, or a part of its only row.
        compiled: the least :attr:`row_blocks` and :attr:`fold_turns` of this tile: those of the tile that the kernel
            was compiled for, where this one reuses it for another size; else ``(1, 1)``.
    """

    images: int
    window: int
    compiled: Pair = (1, 1)

    def of_items(self, images: int, window: int, sets: int) -> Tile:
        """This tile with other items and as many blocks of rows, which leave :attr:`fold_outs` as it is."""
        return changed(self, images=images, window=window, sets=sets, fold_outs=self.fold_outs)

    @property
    def row_blocks(self) -> int:
        """Blocks of 128 positions of an item, as compiled."""
        return max(self.compiled[0], -(-self.item_positions // BLOCK_POSITIONS))

    @cached_property
    def item_positions(self) -> int:
        """Positions of an item."""
        return self.images * self.window

    @cached_property
    def item_images(self) -> int:
        """Images of an item."""
        return self.images

    @cached_property
    def cells_of_image(self) -> Pair:
        """Cells of an image, down and across."""
        return cells_of(self.problem)

    @cached_property
    def windows(self) -> tuple[int, int, int]:
        """Windows of an image, positions from one window to the next, and positions of its left halo."""
        p = self.problem
        if self.window == p.in_pixels:
            return 1, 0, 0
        # Cells read inputs this far to the left and to the right; windows begin with whole pieces.
        left, right = (up_to_multiple(reach, self.piece) for reach in _halo(p))
        step = self.window - left - right
        return -(-self.cells_of_image[1] // step), step, left

    @property
    def set_items(self) -> int:
        """Items of a set."""
        p, (windows, _, _) = self.problem, self.windows
        return -(-p.batch // self.images) if windows == 1 else p.batch * windows

    @property
    def cells(self) -> int:
        """Cells of an item."""
        windows, step, _ = self.windows
        return self.images * math.prod(self.cells_of_image) if windows == 1 else step

    @property
    def fold_pitch(self) -> int:
        """Floats from a line of columns to the next: an odd multiple of 4, which spreads lines over banks."""
        return self.row_blocks * BLOCK_POSITIONS + 4

    @property
    def fold_groups(self) -> int:
        """Groups of threads, each of which gathers all cells of its share of a fold's output channels."""
        groups = 1
        while self.fold_outs % (2 * groups) == 0 and 2 * groups * self._usual_threads <= CONSUMERS:
            groups *= 2
        return groups

    @property
    def fold_turns(self) -> int:
        """How many cells, or parts of cells, a thread gathers of a fold, at most."""
        return max(self.compiled[1], -(-self.cells * self.parts * self.fold_groups // CONSUMERS))

    @property
    def _usual_threads(self) -> int:
        """Threads that gather a fold once: one for each part of as many cells as there are positions."""
        return self.row_blocks * BLOCK_POSITIONS * self.parts

    def _fold_bytes(self, outs: int) -> int:
        """Bytes of shared memory of a fold of so many output channels."""
        return outs * self.problem.taps * self.fold_pitch * 4

    @cached_property
    def fold_outs(self) -> int:
        """Output channels of a fold: their lines are a multiple of 8, and enough for all threads if these fit."""
        block_outs, unit = self.lines // self.problem.taps, math.lcm(8, self.problem.taps) // self.problem.taps
        wanted = max(_FOLD_LINES // self.problem.taps, CONSUMERS // self._usual_threads, unit)
        possible = [outs for outs in range(unit, block_outs + 1, unit) if block_outs % outs == 0]
        most = max(_OWN_BYTES, min(_MOST_OWN_BYTES, self.left_bytes)) if self.line_blocks > 1 else _OWN_BYTES
        fitting = [outs for outs in possible if 2 * self._fold_bytes(outs) <= most] or possible[:1]
        return min((outs for outs in fitting if outs >= wanted), default=fitting[-1])

    @cached_property
    def own_bytes(self) -> int:
        """Bytes of shared memory of two folds: the next is written while one is added up."""
        return 2 * self._fold_bytes(self.fold_outs)

    @property
    def vector(self) -> int:
        """Outputs that are stored together."""
        return stored_together(self.problem, self.itemsize)

    @property
    def parts(self) -> int:
        """Parts into which each row of a cell is cut, for as many threads."""
        return self.problem.stride[1] // self.vector if self.problem.dilation[1] == 1 else 1

    @property
    def possible(self) -> bool:
        """Whether both rings of shared memory have two buffers at least, and windows are parts of an image."""
        slots, stages = self.ring_sizes
        whole = self.window == self.problem.in_pixels
        # The kernel takes an item with a single window of its image for whole images.
        return slots >= 2 and stages >= 2 and (whole or self.windows[0] > 1)

    @property
    def cycles(self) -> float:
        """Roughly the cycles that a call takes, its launches among them."""
        reads = 1 if self.held else self.blocks
        return self._call_cycles(self.items, -(-self.items // self.multiprocessors), self.blocks, reads)

    @property
    def least_cycles(self) -> float:
        """A lower bound of :attr:`cycles` of tiles with the same lines and items, whatever their sets."""
        return self._call_cycles(self.set_items, self.set_items / self.multiprocessors, self.line_blocks, 1)

    def _call_cycles(self, items: int, rounds: float, blocks: int, reads: int) -> float:
        """Cycles of a call.

        Args:
            items: items of all sets.
            rounds: items that a multiprocessor takes one after the other.
            blocks: blocks of lines of an item.
            reads: how often the inputs of an item come to shared memory.
        """
        computed = rounds * (_COST.item_cycles + blocks * self._block_cycles)
        moved = self.problem.image_bytes(self.itemsize) / _COST.bytes_a_cycle
        chunk_bytes = items * (blocks * self.lines * CHUNK_BYTES + reads * self.slot_bytes)
        copied = self.chunks * chunk_bytes / _COST.copied_a_cycle
        start = _COST.start_cycles + _COST.packed_byte_cycles * self.packed_bytes
        return start + overlapped(_COST.overlap, computed, moved, copied)

    @property
    def _block_cycles(self) -> float:
        """Cycles for a block of lines of an item."""
        p, cells = self.problem, self.cells
        outs, folds = self.lines // p.taps, self.lines // (p.taps * self.fold_outs)
        # Sectors of 32 bytes that a lane's stores of a cell have parts of.
        sectors = p.stride[0] * (p.stride[1] / self.vector) * min(1, p.stride[1] * self.itemsize / 32)
        folded = _COST.fold_cycles * self.lines * max(cells, self.item_positions) + _COST.each_fold_cycles * folds
        products = self.row_blocks * (_COST.line_cycles * self.lines + _COST.rows_cycles)
        return self.chunks * (products + _COST.chunk_cycles) + folded + _COST.sector_cycles * outs * cells * sectors


@lru_cache(maxsize=1024)
def tile_of(problem: Problem, itemsize: int, multiprocessors: int = REFERENCE.multiprocessors) -> Tile | None:
    """The tile for a problem in NCHW: a pure function of it. None where the kernel is not for it."""
    blocks = [*_blocks_of(problem, itemsize, multiprocessors)]
    best, found = (math.inf, len(blocks)), None
    for bound, i in sorted((block.least_cycles, i) for i, block in enumerate(blocks)):
        if bound > best[0]:
            break
        for tile in _in_sets(blocks[i]):
            if (key := (tile.cycles, i)) < best:  # of those of one estimate the first is taken
                best, found = key, tile
    return found


def tiles_of(problem: Problem, itemsize: int, multiprocessors: int = REFERENCE.multiprocessors) -> Iterator[Tile]:
    """The tiles that a problem may have: those that fit registers and shared memory."""
    for block in _blocks_of(problem, itemsize, multiprocessors):
        yield from _in_sets(block)


def _in_sets(block: Tile) -> Iterator[Tile]:
    """The possible tiles with the lines and items of one tile, cut into each number of sets."""
    for sets in pixels_on_m.sets_of(block.problem, block.lines):
        if (tile := block.of_items(block.images, block.window, sets)).possible:
            yield tile


def _blocks_of(problem: Problem, itemsize: int, multiprocessors: int) -> Iterator[Tile]:
    """All choices of a block's lines and an item's positions, as tiles of one set."""
    p = problem
    step = math.lcm(16, p.taps)
    if step > MOST_LINES or math.prod(cells_of(p)) > _MOST_CELLS * p.in_pixels or not can_be_folded(p):
        return
    if not pixels_on_m.serves(p, itemsize, multiprocessors):
        return
    few = up_to_multiple(p.out_channels * p.taps, step)
    all_lines = [lines for lines in range(step, min(few, _MOST_SUMS) + 1, step) if lines >= 64 or lines == few]
    first: dict[Pair, Tile] = {}  # by blocks of rows, and lines
    for images, window in _items_of(p):
        row_blocks = -(-images * window // BLOCK_POSITIONS)
        for lines in all_lines:
            if lines * row_blocks > _MOST_SUMS:
                break
            if (key := (row_blocks, lines)) not in first:
                first[key] = Tile(p, itemsize, lines, 1, multiprocessors, images, window)
            yield first[key].of_items(images, window, 1)


def _halo(problem: Problem) -> Pair:
    """How many inputs to the left, and to the right, of its own place a cell of a single row reads."""
    least, largest = reach_of(problem, 1)
    return max(-least, 0), max(largest, 0)


def _items_of(problem: Problem) -> Iterator[tuple[int, int]]:
    """The ``images`` and the ``window`` that tiles may have."""
    p, most = problem, _MOST_ROW_BLOCKS * BLOCK_POSITIONS
    if p.in_pixels <= most:
        for images in range(1, min(p.batch, most // p.in_pixels) + 1):
            yield images, p.in_pixels
    elif p.input_size[0] == p.output_size[0] == p.kernel_size[0] == 1 and sum(_halo(p)) <= _MOST_HALO:
        for row_blocks in range(1, _MOST_ROW_BLOCKS + 1):
            yield 1, row_blocks * BLOCK_POSITIONS


def macros_of(tile: Tile, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/sm90/gemm_fold_pixels.cu."""
    p = tile.problem
    return {
        **pixels_on_m.macros_of(tile, dtype),
        # Outputs of a row beyond a stride for each input, which do not depend on its size.
        "OUT_MORE_H": p.output_size[0] - p.input_size[0] * p.stride[0],
        "OUT_MORE_W": p.output_size[1] - p.input_size[1] * p.stride[1],
        **named_macros(tile, "fold_pitch fold_outs"),
        "WHOLE_OUTS": int(p.out_channels % tile.fold_outs == 0),
        **named_macros(tile, "fold_groups fold_turns vector"),
        **geometry_macros(p),
    }


class GemmFoldPixels(OneFormatForward):
    """See the module."""

    name = "sm90/gemm_fold_pixels"
    serves = (
        "one group, taps whose least common multiple with 16 is at most 256, images of at most 256 inputs or signals"
    )
    only_in = torch.contiguous_format

    def fitted(self, config: Config, direction: Pass, tile: Tile) -> Tile | None:
        """The tile for another size, with the same compiled kernel.

        The kernel is compiled for lines, with or without windows, ``row_blocks``, ``fold_turns``, ``vector`` and
        ``piece``. A size must have the same of each; its items may have fewer positions than the row blocks hold.
        Images of an item, sets and windows are arguments of the kernel.
        """
        p, compiled = config.problem, (tile.row_blocks, tile.fold_turns)
        if not pixels_on_m.serves(p, tile.itemsize, tile.multiprocessors):
            return None
        if (stored_together(p, tile.itemsize), math.gcd(16 // tile.itemsize, p.in_pixels)) != (tile.vector, tile.piece):
            return None
        positions, windowed = tile.row_blocks * BLOCK_POSITIONS, tile.windows[0] > 1
        if windowed != (p.in_pixels > _MOST_ROW_BLOCKS * BLOCK_POSITIONS) or not (windowed or p.in_pixels <= positions):
            return None

        def made(images: int, sets: int) -> Tile:
            window = tile.window if windowed else p.in_pixels
            return replace(tile, problem=p, sets=sets, images=images, window=window, compiled=compiled)

        most = 1 if windowed else min(p.batch, positions // p.in_pixels)
        tiles = [one for sets in pixels_on_m.sets_of(p, tile.lines) if (one := made(most, sets)).possible]
        if not tiles or tiles[0].fold_turns != tile.fold_turns:
            return None
        sets = min(tiles, key=lambda one: one.cycles).sets
        # Fewer images, where that takes no more rounds: as many as others need, or one item for each multiprocessor.
        counts = dict.fromkeys((most, even_share(p.batch, most), min(most, -(-p.batch * sets // tile.multiprocessors))))
        return min((made(images, sets) for images in counts), key=lambda one: one.cycles)

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        return pixels_on_m.program(config, "gemm_fold_pixels", tile, macros_of(tile, config.dtype), row=1)


KERNEL = GemmFoldPixels(tile_of, tiles_of)
