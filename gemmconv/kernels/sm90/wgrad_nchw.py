"""Weight gradients on Hopper's tensor cores, without columns: host side of csrc/sm90/wgrad_nchw.cu.

The kernel reads NCHW. In channels_last, both tensors are transposed before (see transpose.py).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from gemmconv.geometry import Pair, Problem, Shape4
from gemmconv.hashing import cached_property, changed
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of, overlapped
from gemmconv.kernels.integers import INT32_MAX, covering, power_of_two_within, up_to_multiple
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, geometry_macros, named_macros, table
from gemmconv.kernels.program import Launch, Params, Program, TensorMapSpec
from gemmconv.kernels.sm90.base import LONGEST_BOX, WeightGradKernel, WeightGradTile, variant_of
from gemmconv.kernels.splits.reduce import fits, wgrad_partial_bytes, wgrad_partial_dtype, wgrad_program

_BLOCK_ROWS = 64
_LINES = (1, 2, 3)  # of a tile, of each channel
_STEP_BYTES = 32  # of pixels that one step multiplies, of each channel
_BARRIER_BYTES = 24  # of a stage
_REGISTERS = {1: 248, 2: 248, 3: 170}  # of a thread that multiplies, by warpgroups
_OTHER_REGISTERS = 40
_COST = costs_of("sm90/wgrad_nchw")
_DEVICE = costs_of("device")
_TYPICAL = (2, (56, 68)), (8, (128, 252))  # batches and sizes that a layer's tiles are chosen for, whatever its own
_SMALL_PIXELS, _LOW = 256, 16  # of images that tiles are chosen for as they are, but for the batch; rows of low ones
_TAP_CYCLES, _ROUND_CYCLES = _COST.table("tap_cycles"), _COST.table("round_cycles")


@dataclass(frozen=True)
class Tile(WeightGradTile):
    """The work of a block; see csrc/sm90/wgrad_nchw.cu."""

    problem: Problem  # the geometry
    itemsize: int  # bytes of an element
    split: bool  # whether float32 is three products of TF32
    pixels: int  # pixels of a line, which has 64 or 128 bytes
    lines: int  # lines of each input channel in a tile
    tile_w: int  # pixels of a line that lie in one row of the input
    segment: int  # pixels of a row that read one piece of a row of grad_output
    vector: int  # words of grad_output that a thread loads together
    ci_tile: int  # input channels of a block
    # sides_co, sides_h, sides_w: warpgroups with output channels, rows of taps, or columns of taps of their own
    sides_co: int
    sides_h: int
    sides_w: int
    taps: Pair  # rows and columns of taps of a warpgroup
    # planes of grad_output that are one long row together; 0 where rows are whole 16 bytes, for which another kernel
    # is compiled
    planes: int
    multiprocessors: int  # multiprocessors of the GPU, each of which runs one block

    @cached_property
    def warpgroups(self) -> int:
        return self.sides_co * self.sides_h * self.sides_w

    @cached_property
    def input_width(self) -> int:
        """Pixels of a row of the input, in whole 16 bytes."""
        return input_width(self.problem, self.itemsize)

    @cached_property
    def padded_bytes(self) -> int:
        """Bytes of a copy of the input that has such rows, where it has not."""
        *shape, width = self.problem.input_shape
        return math.prod(shape) * self.input_width * self.itemsize if width < self.input_width else 0

    @property
    def flat(self) -> bool:
        """Whether a line has several rows, one after the other in memory."""
        return self.tile_w < self.pixels

    @cached_property
    def block_taps(self) -> Pair:
        return self.sides_h * self.taps[0], self.sides_w * self.taps[1]

    @property
    def block_co(self) -> int:
        return _BLOCK_ROWS * self.sides_co

    @property
    def rows(self) -> int:
        """Rows of pixels of a tile."""
        return self.lines * self.pixels // self.tile_w

    @cached_property
    def slots(self) -> list[Pair]:
        """Where the pieces of rows of grad_output begin that a tile needs, after the first: rows and elements."""
        (stride_h, stride_w), dilation_h = self.problem.stride, self.problem.dilation[0]
        rows, taps = range(self.rows), range(self.block_taps[0])
        rows_read = {row * stride_h + tap * dilation_h for row, tap in itertools.product(rows, taps)}
        columns = range(0, self.tile_w * stride_w, self.segment * stride_w)
        return [*itertools.product(sorted(rows_read), columns)]

    @property
    def slot_of(self) -> list[list[int]]:
        """The slot of each segment of pixels, for each row of taps of the block."""
        (stride_h, stride_w), dilation_h = self.problem.stride, self.problem.dilation[0]
        tap_rows = range(0, self.block_taps[0] * dilation_h, dilation_h)
        places = [divmod(pixel, self.tile_w) for pixel in range(0, self.lines * self.pixels, self.segment)]
        return [
            [self.slots.index((row * stride_h + tap_row, column * stride_w)) for tap_row in tap_rows]
            for row, column in places
        ]

    @cached_property
    def row_pitch(self) -> int:
        """Elements of a piece of a row: whole 16 bytes, of which threads read different banks if that can be."""
        stride, dilation = self.problem.stride[1], self.problem.dilation[1]
        needed = self.shift + self.segment * stride + (self.block_taps[1] - 1) * dilation
        least = -(-(needed + self.vector * self.word_elements) // (4 * self.word_elements))
        return self.word_elements * _pitch(4 * least, stride, self.vector)

    @property
    def shift(self) -> int:
        """The most elements before the first that is needed: boxes begin at multiples of 16 bytes."""
        piece = 16 // self.itemsize
        if self.planes:
            return piece - self.word_elements + self.odd
        return -self.problem.padding[1] % piece

    @property
    def odd(self) -> int:
        """Elements before the first that is needed, of its word."""
        return -self.problem.padding[1] % self.word_elements

    @property
    def word_elements(self) -> int:
        return 4 // self.itemsize

    @cached_property
    def stage_bytes(self) -> int:
        outputs = len(self.slots) * self.block_co * self.row_pitch
        return ((1 + self.split) * self.lines * self.ci_tile * self.pixels + outputs) * self.itemsize + _BARRIER_BYTES

    @property
    def tiles_image(self) -> Pair:
        """Tiles of an image, down and across."""
        return covering((self.problem.input_size[0], self.input_width), (self.rows, self.tile_w))

    @cached_property
    def tiles(self) -> int:
        return self.problem.batch * math.prod(self.tiles_image)

    @cached_property
    def weight_blocks(self) -> int:
        """Blocks that have different weights."""
        channels = covering(self.channels, (self.ci_tile, self.block_co))
        return self.problem.groups * math.prod((*channels, *covering(self.problem.kernel_size, self.block_taps)))

    @property
    def registers(self) -> int:
        """Roughly the registers of a thread that multiplies."""
        words = ((self.taps[1] - 1) * self.problem.dilation[1] + self.problem.stride[1]) // self.word_elements + 2
        sums = math.prod(self.taps) * self.ci_tile // 2
        return (1 + self.split) * (sums + 8 * self.taps[1]) + 2 * words + _OTHER_REGISTERS

    @property
    def reads_pieces(self) -> bool:
        """Whether warpgroups, and blocks, begin at pieces of grad_output that can be read."""
        dilated = self.taps[1] * self.problem.dilation[1]
        return (self.sides_w == 1 or dilated % (self.word_elements * self.vector) == 0) and (
            self.block_taps[1] >= self.problem.kernel_size[1]
            or self.sides_w * dilated * self.itemsize % (4 if self.planes else 16) == 0
        )

    @property
    def words(self) -> int:
        """Words of grad_output that a thread loads for the taps of a row, of one word of pixels."""
        (_, stride), (_, dilation) = self.problem.stride, self.problem.dilation
        last = self.odd + (self.taps[1] - 1) * dilation + (self.word_elements - 1) * stride
        return -(-(last // self.word_elements + 1) // self.vector) * self.vector

    @property
    def cycles(self) -> float:
        """Roughly the cycles of a tile: of products and what feeds them, of copies, or of rounding."""
        conflicts = _conflicts(self.row_pitch // self.word_elements, self.problem.stride[1], self.vector)
        line_bytes = self.lines * self.pixels * self.itemsize  # of each input channel
        computed = line_bytes // _STEP_BYTES * self._step_cycles(conflicts) + self._flush_cycles
        rounded = line_bytes * self.ci_tile / 16 * _ROUND_CYCLES[self.itemsize, 1 + self.split]
        copied = self._copied_cycles
        longest = max(computed, copied, rounded)
        return longest + _COST.tile_cycles + copied * _COST.waited_share / (self.stages - 1)

    def _step_cycles(self, conflicts: int) -> float:
        """Cycles for the products of a step, and for loading their operands."""
        rows, columns = self.taps
        product = max(self.ci_tile / 2, _COST.least_product_cycles) * (3 if self.split else 1)
        word = self.words * conflicts * _COST.word_cycles + columns * _TAP_CYCLES[self.itemsize, 1 + self.split]
        multiplied, laid_out = self.warpgroups * columns * product, 4 * self.warpgroups * word
        chained = _COST.chain_cycles + _COST.chain_share * columns * product
        return rows * overlapped(_COST.overlap, multiplied, laid_out, chained)

    @property
    def _flush_cycles(self) -> float:
        return self.taps[0] * self.taps[1] * _COST.flush_cycles if self.split else 0

    @property
    def _copied_cycles(self) -> float:
        (inputs, outputs), slots = self.box_channels, len(self.slots)
        inputs, outputs = self.lines * inputs, slots * outputs
        copied = (inputs * self.pixels + outputs * self.row_pitch) * self.itemsize
        boxes = self.lines + slots * max(1, self.planes)
        return max(outputs * _COST.line_cycles, copied * _COST.byte_cycles) + boxes * _COST.box_cycles

    @cached_property
    def box_channels(self) -> Pair:
        """Input and output channels of a box: no more than a group has."""
        ci, co = self.channels
        return min(ci, self.ci_tile), min(co, self.block_co)

    @cached_property
    def most_slices(self) -> int:
        """The number of slices at the size that has most."""
        return max(1, self.multiprocessors // self.weight_blocks)

    def slices(self, limit: int) -> int:
        """Into how many slices the tiles are cut, for a workspace of at most so many bytes; 0 where none fit."""
        return min(self._most_fitting(limit), self.tiles)

    def _most_fitting(self, limit: int) -> int:
        fitting = max(0, limit - self.padded_bytes) // (4 * math.prod(self.problem.weight_shape))
        return min(fitting, self.most_slices)

    def workspace_bytes(self, limit: int) -> int:
        """Bytes of the partial sums, and of a copy of the input where its rows are not whole 16 bytes."""
        partials = wgrad_partial_bytes(self.problem, self.itemsize, self.slices(limit), self.most_slices)
        return partials + self.padded_bytes

    def seconds(self, limit: int) -> float:
        """Roughly what it takes, with a workspace of at most ``limit`` bytes."""
        slices = self.slices(limit)
        rounds = -(-self.weight_blocks * slices // self.multiprocessors)
        return self._seconds(rounds * (-(-self.tiles // slices) * self.cycles + self._stored_cycles), slices)

    def least_seconds(self, limit: int) -> float:
        """A lower bound of the time of tiles with as much of the weights: that of their products."""
        pixels, most = self.problem.batch * self.problem.input_size[0] * self.input_width, self._most_fitting(limit)
        steps, most_steps = pixels * self.itemsize // _STEP_BYTES, max(_LINES) * 128 // _STEP_BYTES
        rounds = -(-self.weight_blocks * most // self.multiprocessors)
        step_cycles = self._step_cycles(1) + (self._flush_cycles + _COST.tile_cycles) / most_steps
        computed = rounds * (steps / most * step_cycles + self._stored_cycles)
        return self._seconds(computed, min(most, -(-steps // most_steps)))

    @property
    def _stored_cycles(self) -> float:
        return math.prod(self.taps) * self.ci_tile / 2 * self.warpgroups * _COST.store_cycles

    def _seconds(self, cycles: float, slices: int) -> float:
        """Seconds from the cycles of a multiprocessor, memory traffic and partial sums."""
        moved, others = self._other_seconds
        partials = 2 * wgrad_partial_bytes(self.problem, self.itemsize, slices, self.most_slices) / _COST.partial_rate
        return others + overlapped(_COST.overlap_with_memory, cycles / _DEVICE.clock, moved) + partials

    @cached_property
    def _other_seconds(self) -> tuple[float, float]:
        """Seconds of memory traffic, and of launches and a copy of the input."""
        rows_read = min(1, self.problem.kernel_size[0] / self.problem.stride[0])
        pixels = math.prod(self.problem.input_shape) + rows_read * math.prod(self.problem.output_shape)
        padded = _COST.pad_seconds + 2 * self.padded_bytes / _COST.pad_rate if self.padded_bytes else 0
        return pixels * self.itemsize / _DEVICE.weight_grad_memory_rate, _COST.launch_seconds + padded


def input_width(problem: Problem, itemsize: int) -> int:
    """Pixels of a row of the input, in whole 16 bytes."""
    return up_to_multiple(problem.input_size[1] * itemsize, 16) // itemsize


def _lines_of(problem: Problem, itemsize: int, flat: bool) -> list[int]:
    """Pixels that a line may have, of several rows or of one."""
    width, lengths = input_width(problem, itemsize), (128 // itemsize, 64 // itemsize)
    return [pixels for pixels in lengths if not flat or (pixels > width and pixels % width == 0)]


def _blocks_of(problem: Problem, itemsize: int, split: bool, multiprocessors: int) -> Iterator[Tile]:
    """The parts of the weights that blocks may have, as tiles of one line."""
    planes, (kernel_h, kernel_w) = _planes(problem, itemsize), problem.kernel_size
    if planes is None or not fits(problem):
        return
    line, channels = 128 // itemsize, up_to_multiple(problem.gemm_k, 16)
    widths = [n for n in (16, 32, 48, 64, 96, 128, 160, 256) if min(32, channels) <= n < channels + 32]
    sides = [s for s in itertools.product((1, 2), (1, 2, 3), (1, 2)) if math.prod(s) <= 3]
    taps = [*itertools.product(range(1, min(2, kernel_h) + 1), range(1, min(8, kernel_w) + 1))]
    any_one = Tile(problem, itemsize, split, line, 1, line, line, 1, 16, 1, 1, 1, (1, 1), planes, multiprocessors)
    for ci_tile in widths:
        registers = {of_one: changed(any_one, ci_tile=ci_tile, taps=of_one).registers for of_one in taps}
        for (co, h, w), of_one in itertools.product(sides, taps):
            has_taps = (h - 1) * of_one[0] < kernel_h and (w - 1) * of_one[1] < kernel_w  # each warpgroup
            if has_taps and registers[of_one] <= _REGISTERS[co * h * w]:
                block = changed(any_one, ci_tile=ci_tile, sides_co=co, sides_h=h, sides_w=w, taps=of_one)
                if block.reads_pieces:
                    yield block


def _tiles_with(block: Tile, flat: bool) -> Iterator[Tile]:
    """Tiles with as much of the weights, whose lines are flat or are not."""
    vectors = [one for one in ((1,) if block.planes else (4, 2, 1)) if block.problem.stride[1] % one == 0]
    vectors = [one for one in vectors if one == 1 or changed(block, vector=one).reads_pieces]
    for pixels in _lines_of(block.problem, block.itemsize, flat):
        tile_w = block.input_width if flat else pixels
        segments = [one for one in (tile_w, tile_w // 2) if one * block.itemsize % 16 == 0]
        for lines in _LINES:
            if 1 < lines > block.problem.input_size[0]:
                break
            found = (
                changed(block, pixels=pixels, lines=lines, tile_w=tile_w, segment=segment, vector=vector)
                for segment, vector in itertools.product(segments, vectors)
            )
            yield from itertools.islice((one for one in found if one.row_pitch <= LONGEST_BOX and one.stages >= 2), 1)


def _planes(problem: Problem, itemsize: int) -> int | None:
    """``Tile.planes``, None where boxes can have neither rows nor planes of grad_output, or tensors are too large."""
    in_pixels = problem.batch * problem.input_size[0] * input_width(problem, itemsize)
    if problem.output_size[1] * itemsize % 4 or max(in_pixels, problem.out_pixels) > INT32_MAX:
        return None
    if problem.output_size[1] * itemsize % 16 == 0:
        return 0
    planes = next(planes for planes in (1, 2, 4) if planes * problem.out_pixels * itemsize % 16 == 0)
    is_whole = problem.group_out_channels % planes == 0
    return planes if is_whole and 2 * planes * problem.out_pixels <= INT32_MAX else None


@functools.cache
def _conflicts(pitch: int, stride: int, vector: int) -> int:
    """Most words in one bank among those that threads load at once; pitch and stride in words."""
    lanes = range(32 // vector)
    words = {lane // 4 * pitch + lane % 4 * stride + word for lane in lanes for word in range(vector)}
    return max(Counter(word % 32 for word in words).values())


@functools.cache
def _pitch(least: int, stride: int, vector: int) -> int:
    """The first of eight pitches for which the words of a load lie in the most different banks."""
    return min(range(least, least + 32, 4), key=lambda pitch: _conflicts(pitch, stride, vector))


@functools.lru_cache(maxsize=1024)
def _tile_of(problem: Problem, itemsize: int, split: bool, limit: int, multiprocessors: int) -> Tile | None:
    """The tile of the least estimate of those for typical sizes, with a workspace of at most ``limit`` bytes, or None.

    So a layer has few tiles, and kernels, whatever its sizes.
    """
    found = (
        fitted(tile, problem, limit)
        for typical in _typical(problem, itemsize)
        for tile in _best_of(typical, itemsize, split, limit, multiprocessors)
    )
    return min(filter(None, found), key=lambda tile: tile.seconds(limit), default=None)


def fitted(tile: Tile, problem: Problem, limit: int) -> Tile | None:
    """A tile of the same layer at other sizes, made for those of a problem; None where another kernel is compiled."""
    planes, width = _planes(problem, tile.itemsize), input_width(problem, tile.itemsize)
    if planes is None or (planes > 0) != (tile.planes > 0) or (tile.flat and width != tile.tile_w):
        return None
    made = changed(tile, problem=problem, planes=planes)
    return made if made.slices(limit) > 0 else None


@functools.lru_cache(maxsize=1024)
def _best_of(problem: Problem, itemsize: int, split: bool, limit: int, multiprocessors: int) -> list[Tile]:
    """The best tile whose lines are flat, and the best of others."""
    if problem.in_pixels >= _SMALL_PIXELS:
        limit += 2 * math.prod(problem.input_shape) * itemsize  # which a copy may take
    blocks = [*_blocks_of(problem, itemsize, split, multiprocessors)]
    if not blocks or blocks[0].slices(limit) == 0:  # of others neither
        return []
    found = []
    for flat in (True, False):
        if not _lines_of(problem, itemsize, flat):
            continue
        best: tuple[float, int, Tile | None] = math.inf, len(blocks), None
        for bound, i in sorted((block.least_seconds(limit), i) for i, block in enumerate(blocks)):
            if bound > best[0]:
                break
            tiles = ((tile.seconds(limit), i, tile) for tile in _tiles_with(blocks[i], flat))
            best = min((best, *tiles), key=lambda one: one[:2])
        found.append(best[2])
    return [*filter(None, found)]


def _typical(problem: Problem, itemsize: int) -> Iterator[Problem]:
    """The layer at sizes that its tiles are chosen for: small images are as they are, of others rows that are lines."""
    (height, width), row = problem.input_size, input_width(problem, itemsize)
    flat = bool(_lines_of(problem, itemsize, flat=True))
    if problem.in_pixels < _SMALL_PIXELS and (height > 1 or flat):
        yield replace(problem, batch=power_of_two_within(problem.batch, problem.batch))
        return
    if (planes := _planes(problem, itemsize)) is None:
        return
    for batch, (rows, columns) in _TYPICAL:
        pixels = batch * rows * columns
        rows, columns = height if height < _LOW else rows, row if flat else columns
        if height == 1 and not flat:
            columns = pixels // _LOW
        batch = max(1, pixels // (rows * columns))
        # The first sizes from there on whose rows of outputs are as long as these, or as short.
        heights = [rows] if height < _LOW else range(rows, rows + 4)
        for size in itertools.product(heights, [width] if flat else range(columns, columns + 16)):
            typical = replace(problem, batch=batch, input_size=size)
            if (own := _planes(typical, itemsize)) is not None and (own > 0) == (planes > 0):
                yield typical
                break


def _map_of(name: str, itemsize: int, shape: Shape4, planes: int, box: Shape4) -> TensorMapSpec:
    """The tensor map of rows of a tensor; or, if there are ``planes``, of so many planes together as one row.

    Boxes of the input are swizzled.
    """
    images, channels, height, width = shape
    if planes:
        channels, height, width = channels // planes, 1, planes * height * width
    row = width * itemsize
    sizes, strides = (width, height, channels, images), (row, height * row, channels * height * row)
    return TensorMapSpec(name, itemsize, sizes, strides, box, swizzled=name == "input")


class WgradNchw(WeightGradKernel):
    name = "sm90/wgrad_nchw"
    serves = "rows of outputs that are whole words"
    computed_in = torch.contiguous_format

    def tiles(self, config: Config, direction: Pass) -> Iterator[Tile]:
        """The tiles that a layer may have: none where rows of outputs are no whole words, or images are too large."""
        blocks = _blocks_of(config.problem, *variant_of(config)[:2], config.spec.multiprocessors)
        tiles = (tile for block in blocks for flat in (False, True) for tile in _tiles_with(block, flat))
        return (tile for tile in tiles if tile.slices(config.workspace_limit) > 0)

    def tile(self, config: Config, direction: Pass) -> Tile | None:
        return _tile_of(config.problem, *variant_of(config)[:2], config.workspace_limit, config.spec.multiprocessors)

    def fitted(self, config: Config, direction: Pass, tile: Tile) -> Tile | None:
        return fitted(tile, config.problem, config.workspace_limit)

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        p, slices, (down, across) = config.problem, tile.slices(config.workspace_limit), tile.tiles_image
        macros: Macros = {
            "ELEMENT_T": ELEMENT_TYPES[config.dtype],
            "PARTIAL_T": ELEMENT_TYPES[wgrad_partial_dtype(config.dtype, tile.most_slices)],
            "CI": p.gemm_k,
            "CO": p.group_out_channels,
            "PIXELS": tile.pixels,
            "ROWS": tile.lines,
            **named_macros(tile, "split tile_w segment vector ci_tile sides_co sides_h sides_w taps row_pitch stages"),
            "SLOTS": len(tile.slots),
            "SLOT_ROWS": table([row for row, _ in tile.slots]),
            "SLOT_COLUMNS": table([column for _, column in tile.slots]),
            "SLOT_OF": f"{{{','.join(map(table, tile.slot_of))}}}",
            "LONG_ROWS": int(tile.planes > 0),
            **geometry_macros(p),
        }
        (inputs, outputs), shape = tile.box_channels, (*p.input_shape[:3], tile.input_width)
        lines, rows = (tile.pixels, 1, inputs, 1), (tile.row_pitch, 1, outputs // max(1, tile.planes), 1)
        params: Params = {
            "input, grad_output": (
                _map_of("input", tile.itemsize, shape, int(tile.flat), lines),
                _map_of("grad_output", tile.itemsize, p.output_shape, tile.planes, rows),
            ),
            "partials": "partials",
            "groups, w_in": (p.groups, tile.input_width),
            "h_out, w_out": p.output_size,
            "tiles_w, tiles_h, tiles, slices": (across, down, tile.tiles, slices),
            "plane_bits": tile.planes // 2,  # of 1, 2 or 4
        }
        grid, block = (tile.weight_blocks * slices, 1, 1), (128 * (tile.warpgroups + 1), 1, 1)
        main = Launch("sm90/wgrad_nchw.cu", macros, grid, block, params, tile.shared_bytes)
        columns = tile.input_width - p.input_size[1]
        return wgrad_program(config, slices, torch.contiguous_format, main, columns, tile.most_slices)


KERNEL = WgradNchw()
