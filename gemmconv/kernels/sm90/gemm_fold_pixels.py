"""Host side of csrc/sm90/gemm_fold_pixels.cu: ``fused`` for small images, and for signals.

The kernel multiplies inputs by weights, and adds up the products that belong to the same output. Its words, with the
numbers of an example: 64 images of 8 x 8, 64 to 32 channels, kernel 4, stride 2, padding 1, in TF32 on an H200.

  What is multiplied (the product is stored transposed: columns[line][position])
    position        an input pixel: a row of the product                                  64 * 64 = 4096
    line            a tap of an output channel: a column of the product                   32 * 16 = 512
  How it is divided among thread blocks
    position block  128 positions, which two warpgroups of 128 threads multiply           2 images; 32 in all
    line block      at most 256 lines, all taps of some output channels                   144 of 9 channels; 4 in all
    item            what a thread block computes at a time: one or two position blocks    1 position block;
                    (some images, or a window of one long row) times a line block         32 * 4 = 128 items
  How operands come to shared memory
    chunk           128 bytes of a pixel's channels, which come together                  32 channels; 2 chunks
    stage           a buffer with a chunk of an item's inputs and of its weights          5 stages
    piece           neighbouring inputs of a channel that a thread copies together        4 inputs
  How sums become outputs
    fold            the columns of some channels, which lie in shared memory at once      3 channels; 3 folds
    cell            the outputs of one stride, height x width: a cell for each input,     2 x 2
                    more beside the image if it has more outputs, fewer if padding cuts
    part            what a thread gathers of a row of a cell; neighbours have others      the whole row: 1 part
    phase           the place of an output in its cell                                    one of 4

It is for 16-bit types and TF32, NCHW and one group. ``tiles_of`` gives tiles where all of these hold:

- the least common multiple of 16 and the taps is at most 256, the most lines of a product: so a line block fits;
- some tap reaches each phase: another output would be the bias alone, which ``gather`` does not provide for;
- images have at most 256 inputs, two position blocks, whose sums registers hold; or image and kernel have a single row
  (a signal), which is cut into windows, and a cell reads at most 32 inputs beside its own, which windows repeat;
- inputs of an image are a multiple of four, as pieces are; there are at most 16 cells for each input;
- in 16 bits, rows of weights begin at multiples of 16 bytes: the copy engine asks for that;
- two folds and two stages fit shared memory, and 32-bit integers hold all counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property, changed
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of, overlapped
from gemmconv.kernels.integers import even_share, power_of_two_within, up_to_multiple
from gemmconv.kernels.macros import Macros, geometry_macros, named_macros
from gemmconv.kernels.phases import can_be_folded, cells_of, reach_of, stored_together
from gemmconv.kernels.program import Program
from gemmconv.kernels.sm90 import pixels_on_m
from gemmconv.kernels.sm90.base import OneFormatForward
from gemmconv.kernels.sm90.pixels_on_m import (
    BLOCK_POSITIONS,
    CONSUMERS,
    LEAST_LINES,
    MOST_LINES,
    PositionRows,
    Windows,
)

_COST = costs_of("sm90/gemm_fold_pixels")  # gemmconv/costs/h200.json: unit, meaning, and what they were fitted to
_MOST_POSITIONS = 2 * BLOCK_POSITIONS  # positions of an item
_MOST_SUMS = 256  # lines of a line block times position blocks of an item; a thread keeps half that many sums
# Cells for each input, at most. Where output padding is large, or the kernel is much larger than the image, most cells
# lie beside all inputs; such layers are left to other kernels.
_MOST_CELLS = 16
_FOLD_LINES = 32  # lines of a fold, about; fewer where two such folds do not fit the bytes that they may take
# Bytes of shared memory that two folds may take, which leave three stages; folds of the least size may take more.
_MOST_COLUMN_BYTES = 72 << 10
_MOST_HALO = 32  # inputs of a window that its neighbours have too


@dataclass(frozen=True)
class Tile(PositionRows):
    """The work of a thread block of csrc/sm90/gemm_fold_pixels.cu. Words and example are those of the module."""

    images: int  # images of an item; 1 if items are windows. In the example 2
    window: int  # positions of each image that an item has: all of them, or a part of its only row. In the example 64
    # If this tile reuses the kernel that was compiled for another size: its :attr:`position_blocks` and
    # :attr:`fold_turns`, of which this tile then has as many. Else (1, 1).
    compiled: Pair = (1, 1)

    # An item
    @cached_property
    def item_positions(self) -> int:
        """Positions of an item: 128 in the example."""
        return self.images * self.window

    @cached_property
    def item_images(self) -> int:
        """Images of an item, whole ones or the one of its window: 2 in the example."""
        return self.images

    @cached_property
    def position_blocks(self) -> int:
        """Position blocks of an item, as compiled."""
        return max(self.compiled[0], -(-self.item_positions // BLOCK_POSITIONS))

    @cached_property
    def cells_of_image(self) -> Pair:
        return cells_of(self.problem)

    @cached_property
    def windows(self) -> Windows:
        if self.window == self.problem.in_pixels:
            return Windows()
        # Cells read inputs this far to the left and to the right; windows begin with whole pieces.
        left, right = (up_to_multiple(reach, self.piece) for reach in _halo(self.problem))
        step = self.window - left - right
        return Windows(-(-self.cells_of_image[1] // step), step, left)

    @property
    def places(self) -> int:
        return -(-self.problem.batch // self.images) * self.windows.per_image

    @property
    def cells(self) -> int:
        """Cells of an item: 128 in the example, as each image has 8 x 8."""
        windows = self.windows
        return self.images * math.prod(self.cells_of_image) if windows.per_image == 1 else windows.step

    # What a thread gathers together
    @property
    def vector(self) -> int:
        """Outputs that are stored together."""
        return stored_together(self.problem, self.itemsize)

    @property
    def parts(self) -> int:
        """Parts of each row of a cell, a thread for each. Only for dilation 1 can threads find the taps of a part."""
        return self.problem.stride[1] // self.vector if self.problem.dilation[1] == 1 else 1

    @property
    def _position_parts(self) -> int:
        """Threads that one turn needs to gather all parts of a cell for each position: 128 in the example."""
        return self.position_blocks * BLOCK_POSITIONS * self.parts

    # A fold
    @property
    def fold_pitch(self) -> int:
        """Floats from a line of columns to the next: an odd multiple of 4, so that lines begin in other banks."""
        return self.position_blocks * BLOCK_POSITIONS + 4

    def _fold_bytes(self, outs: int) -> int:
        """Bytes of shared memory of a fold of so many output channels: 25,344 for the example's 3."""
        return outs * self.problem.taps * self.fold_pitch * 4

    @cached_property
    def fold_outs(self) -> int:
        """Output channels of a fold: their lines are a multiple of 8, and enough for all threads if these fit.

        In the example a fold may have 1, 3 or 9 of the 9 channels of a line block. At least 2 are wanted, for 32 lines.
        Two folds of 9 would take 152,064 bytes, two of 3 take 50,688, of 72 KB that they may: so 3.
        """
        block_outs, unit = self.lines // self.problem.taps, math.lcm(8, self.problem.taps) // self.problem.taps
        wanted = max(_FOLD_LINES // self.problem.taps, CONSUMERS // self._position_parts, unit)
        candidates = [outs for outs in range(unit, block_outs + 1, unit) if block_outs % outs == 0]
        fitting = [outs for outs in candidates if 2 * self._fold_bytes(outs) <= _MOST_COLUMN_BYTES] or candidates[:1]
        return min((outs for outs in fitting if outs >= wanted), default=fitting[-1])

    @cached_property
    def column_bytes(self) -> int:
        """Bytes of shared memory of two folds: the next is written while one is added up."""
        return 2 * self._fold_bytes(self.fold_outs)

    @property
    def possible(self) -> bool:
        """Whether shared memory has two stages at least, and windows are parts of an image."""
        # A single window that is not the whole image is no tile: WINDOWED would be 0, which stands for whole images.
        return self.stages >= 2 and (self.window == self.problem.in_pixels or self.windows.per_image > 1)

    # How threads share a fold
    @property
    def fold_groups(self) -> int:
        """Groups of threads, a power of two, each of which gathers all cells of its share of a fold's channels.

        In the example 128 threads gather all cells, so two groups would fit; but 3 channels cannot be halved: one.
        """
        most = CONSUMERS // self._position_parts  # 256 // 128; 0 if there are more parts than threads
        greatest = power_of_two_within(most, most)  # the greatest power of two up to most, or 1
        return math.gcd(self.fold_outs, greatest)

    @property
    def fold_turns(self) -> int:
        """How many cells, or parts of cells, a thread gathers of a fold, at most: 1 of the 128 in the example."""
        return max(self.compiled[1], -(-self.cells * self.parts * self.fold_groups // CONSUMERS))

    # Cost
    @property
    def cycles(self) -> float:
        """Roughly the cycles that a call takes, its launches among them."""
        computed = -(-self.items // self.multiprocessors) * (_COST.item_cycles + self._line_block_cycles)
        moved = self.problem.image_bytes(self.itemsize) / _COST.bytes_a_cycle
        copied = self.copied_bytes / _COST.copied_a_cycle
        start = _COST.start_cycles + _COST.packed_byte_cycles * self.packed_bytes
        return start + overlapped(_COST.overlap, computed, moved, copied)

    @property
    def _line_block_cycles(self) -> float:
        """Cycles for a line block of an item."""
        p, cells = self.problem, self.cells
        outs, folds = self.lines // p.taps, self.lines // (p.taps * self.fold_outs)
        # Stores of a cell, times the sectors of 32 bytes that a store takes for each lane: lanes may share a sector.
        sectors = p.stride[0] * (p.stride[1] / self.vector) * min(1, p.stride[1] * self.itemsize / 32)
        folded = _COST.fold_cycles * self.lines * max(cells, self.item_positions) + _COST.each_fold_cycles * folds
        products = self.position_blocks * (_COST.line_cycles * self.lines + _COST.rows_cycles)
        return self.chunks * (products + _COST.chunk_cycles) + folded + _COST.sector_cycles * outs * cells * sectors


def tiles_of(problem: Problem, itemsize: int, multiprocessors: int) -> Iterator[Tile]:
    """The tiles that a problem may have: those that fit registers and shared memory.

    The example of the module has 36. The best by estimate, 15,244 cycles, has 2 images and 144 lines: three folds of 48
    lines. The next, 15,359 cycles, has 128 lines, four folds of 32; the last, 26,229 cycles, 1 image and 208 lines.
    """
    p, step = problem, math.lcm(16, problem.taps)
    if step > MOST_LINES or math.prod(cells_of(p)) > _MOST_CELLS * p.in_pixels or not can_be_folded(p):
        return
    if not pixels_on_m.serves(p, itemsize, multiprocessors):
        return
    all_lines = up_to_multiple(p.out_channels * p.taps, step)  # of a line block that has all output channels
    for images, window in _items_of(p):
        most = min(all_lines, _MOST_SUMS // -(-images * window // BLOCK_POSITIONS))
        for lines in range(step, most + 1, step):
            tile = Tile(p, itemsize, lines, multiprocessors, images, window)
            if (lines >= LEAST_LINES or lines == all_lines) and tile.possible:
                yield tile


def _fastest(tile: Tile, most: int) -> Tile:
    """The tile with the fastest number of images of an item, up to ``most``."""
    batch = tile.problem.batch
    # Three numbers: as many as fit; an equal share of the batch, in as many items; and the fewest for which all items
    # run at the same time. Fewer images need no more shared memory: stages hold whole position blocks.
    for_all = -(-batch // max(1, tile.multiprocessors // tile.line_blocks))
    counts = dict.fromkeys((most, even_share(batch, most), min(most, for_all)))
    return min((changed(tile, images=images) for images in counts), key=lambda one: one.cycles)


def _halo(problem: Problem) -> Pair:
    """How many inputs to the left, and to the right, of its own place a cell of a single row reads."""
    least, largest = reach_of(problem, 1)
    return max(-least, 0), max(largest, 0)


def _items_of(problem: Problem) -> Iterator[tuple[int, int]]:
    """The ``images`` and the ``window`` that tiles may have."""
    p = problem
    if p.in_pixels <= _MOST_POSITIONS:
        for images in range(1, min(p.batch, _MOST_POSITIONS // p.in_pixels) + 1):
            yield images, p.in_pixels
    elif p.input_size[0] == p.output_size[0] == p.kernel_size[0] == 1 and sum(_halo(p)) <= _MOST_HALO:
        for window in range(BLOCK_POSITIONS, _MOST_POSITIONS + 1, BLOCK_POSITIONS):
            yield 1, window


class GemmFoldPixels(OneFormatForward):
    """Forward passes in NCHW. Base classes (sm90/base.py) take tiles from :func:`tiles_of`, seconds from ``cycles``."""

    name = "sm90/gemm_fold_pixels"
    serves = (
        "one group, a number of taps whose least common multiple with 16 is at most 256, some in every phase, images "
        "of at most 256 inputs, or signals whose outputs read at most 32 inputs beside their own, a multiple of four "
        "inputs, at most 16 cells (of one stride) each; in 16 bits, rows of the weight that are whole 16 bytes"
    )
    only_in = torch.contiguous_format

    def fitted(self, config: Config, direction: Pass, tile: Tile) -> Tile | None:
        """The tile for another size, with the same compiled kernel.

        The kernel is compiled for lines, with or without windows (of one row), ``position_blocks``, ``fold_turns``,
        ``vector`` and ``piece``; its other macros follow from these and the layer's channels and taps. A size must have
        the same of each; its items may have fewer positions than the position blocks hold. How many images an item has,
        and its windows, are arguments of the kernel. So the example's kernel serves 100 images of 4 x 4, with four in
        an item of 64 positions (eight would fit, but leave more multiprocessors without an item), and 7 of 12 x 10, one
        in an item of 120, but none of 16 x 16, which take two position blocks.
        """
        p, positions = config.problem, tile.position_blocks * BLOCK_POSITIONS
        if not pixels_on_m.serves(p, tile.itemsize, tile.multiprocessors):
            return None
        if tile.windows.per_image > 1:  # items are windows, of which a single row has several if it is long enough
            if p.input_size[0] > 1 or p.in_pixels <= _MOST_POSITIONS:
                return None
            most, window = 1, tile.window
        else:  # items are whole images
            if p.in_pixels > positions:
                return None
            most, window = min(p.batch, positions // p.in_pixels), p.in_pixels

        compiled = tile.position_blocks, tile.fold_turns
        sized = changed(tile, problem=p, images=most, window=window, compiled=compiled)
        # _fastest tries other numbers of images, which do not change these: ``compiled`` keeps fold_turns.
        if (sized.fold_turns, sized.vector, sized.piece) != (tile.fold_turns, tile.vector, tile.piece):
            return None
        return _fastest(sized, most)

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        p = tile.problem
        macros: Macros = {
            # output_size = input_size * stride + OUT_MORE: it is the same for all sizes.
            "OUT_MORE_H": p.output_size[0] - p.input_size[0] * p.stride[0],
            "OUT_MORE_W": p.output_size[1] - p.input_size[1] * p.stride[1],
            "WHOLE_OUTS": int(p.out_channels % tile.fold_outs == 0),
            **named_macros(tile, "fold_pitch fold_outs fold_groups fold_turns vector"),
            **geometry_macros(p),
        }
        return pixels_on_m.program(config, "gemm_fold_pixels", tile, macros)


KERNEL = GemmFoldPixels(tiles_of)
