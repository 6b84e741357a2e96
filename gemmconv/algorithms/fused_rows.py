"""How ``fused`` goes about wide rows in NCHW (csrc/fused_rows.cu): tiles, their estimates, the launches.

It is for 16-bit types in NCHW, forward and the input gradients of stride 1, where rows of inputs are whole pieces of 16
bytes, every phase has a tap, the stride across is at most four, taps across are at most twelve and reach over at most
eight inputs, groups have at most 256 input channels, a multiple of 16 if there are several, and the weights of 32 or 64
output channels fit shared memory; ``tile_of`` gives None for others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from gemmconv.algorithms.base import (
    Config,
    Direction,
    Forward,
    Gradient,
    aligned,
    either_format,
    strides_of,
    with_strides,
)
from gemmconv.algorithms.fused_plan import MULTIPROCESSORS, SHARED_BYTES
from gemmconv.algorithms.gathering import Gathering
from gemmconv.algorithms.launches import Boxes, multiprocessors_of, params_struct, reciprocal
from gemmconv.algorithms.macros import ELEMENT_TYPES, Macros, table
from gemmconv.geometry import Pair, Problem

_ITEM = 2  # bytes of an element
_LINE = 64  # columns of a box, 128 bytes
_PIECE = 8  # elements of 16 bytes
_BLOCK_ROWS, _STEP = 64, 16  # rows of a product, and channels
_SLOTS, _COLUMNS, _ROWS = (1, 2), (64, 128), (1, 2)  # of tiles; 96, 192 and 256 columns were hardly ever faster
_MOST_SUMS = 192  # registers of a thread
_LONGEST_BOX, _LONGEST_STEP = 256, 8  # of a tensor map: elements that a box reaches over, from one to the next
_CARRIED = 8  # columns of the step before
_MOST_STAGES = 12
_MOST_SPAN = 4  # outputs of a cell across: folds of more take the compiler up to 12 s, and lose
_LINE_BYTES = 128  # of outputs that are stored together, at most
_BARRIER_BYTES = 8
_THREADS, _WEIGHT_THREADS = 384, 256
_INT32_MAX = 2**31 - 1
_CLOCK_RATE, _MEMORY_RATE = 1.7e9, 3.9e12  # cycles and bytes a second, of the estimate

FusedRowsParams = params_struct(
    "fused_rows_params",
    ("packed", "bias", "output"),
    ("groups", "columns", "h_out", "w_out", "cells_h", "image_items", "items", "steps"),
    ("by_image_items",),
    ("map",),
)
FusedRowsWeightsParams = params_struct("fused_rows_weights_params", ("weight", "packed"), ("channels_last", "units"))


@dataclass(frozen=True)
class Tap:
    """A tap of an axis.

    Attributes:
        tap: which of the kernel's.
        phase: which output of a cell it reaches.
        shift: from the cell to the input that it reads.
    """

    tap: int
    phase: int
    shift: int


@dataclass(frozen=True)
class Tile(Gathering):
    """What a block of csrc/fused_rows.cu does; see its header.

    Attributes:
        problem: the geometry.
        direction: "forward" or "input_grad".
        slots: taps that a product's rows have, each with 64 / slots output channels.
        columns: inputs of a row of a step.
        rows: of cells of an item: of either warpgroup one, or both the same.
    """

    problem: Problem
    direction: Direction
    slots: int
    columns: int
    rows: int

    @property
    def span(self) -> Pair:
        """Outputs of a cell."""
        return self.problem.stride if self.direction == "forward" else (1, 1)

    @cached_property
    def cells(self) -> Pair:
        """Cells of an image, down and across."""
        (height, width), (span_h, span_w) = self.output_size, self.span
        return -(-height // span_h), -(-width // span_w)

    @property
    def channels(self) -> int:
        """Input channels, up to what products take."""
        return -(-self.in_channels // _STEP) * _STEP

    # Taps across: the left sides, and the fold.

    @cached_property
    def taps_across(self) -> tuple[Tap, ...]:
        return taps_of(self.problem, self.direction, 1)

    @property
    def tiles(self) -> int:
        """Of 64 rows, that have all taps across."""
        return -(-len(self.taps_across) // self.slots)

    @cached_property
    def delayed(self) -> int:
        """Inputs that cells come later than columns: of those that let all taps be 0 to 8 late, the best to store."""
        shifts = [tap.shift for tap in self.taps_across]
        possible = range(max(0, *shifts), min(shifts) + _CARRIED + 1)
        return max(possible, key=lambda delayed: (math.gcd(_PIECE, delayed * self.span[1]), -delayed))

    @property
    def delays(self) -> list[int]:
        """Of each tap."""
        return [self.delayed - tap.shift for tap in self.taps_across]

    @property
    def outs(self) -> int:
        """Output channels of a block."""
        return _BLOCK_ROWS // self.slots * (2 if self.rows == 1 else 1)

    @property
    def channel_sets(self) -> int:
        return -(-self.out_channels // self.outs)

    @property
    def sets(self) -> int:
        """Parts of the weights that blocks keep, of all groups."""
        return self.problem.groups * self.span[0] * self.channel_sets

    # Taps down: rows of the input.

    @cached_property
    def taps_down(self) -> list[list[Tap]]:
        """Of each row phase."""
        taps = taps_of(self.problem, self.direction, 0)
        return [[tap for tap in taps if tap.phase == phase] for phase in range(self.span[0])]

    @property
    def weight_rows(self) -> int:
        """Taps down of the phase that has most."""
        return max(map(len, self.taps_down))

    @cached_property
    def row_step(self) -> int:
        """From one input row of an item to the next: one where two rows of cells read them."""
        stride, dilation = self.problem.stride[0], self.problem.dilation[0]
        steps = dilation if self.direction == "input_grad" else dilation // math.gcd(stride, dilation)
        return 1 if self.rows == 2 or self.weight_rows == 1 else steps

    @cached_property
    def first_rows(self) -> list[int]:
        """From an item's first cell to its first input row, of each row phase."""
        return [min(tap.shift for tap in taps) for taps in self.taps_down]

    @cached_property
    def input_rows(self) -> int:
        """Rows of the input that an item reads, of the row phase that reads most."""
        reaches = [max(tap.shift for tap in taps) - min(tap.shift for tap in taps) for taps in self.taps_down]
        return (max(reaches) + self.rows - 1) // self.row_step + 1

    @cached_property
    def row_taps(self) -> list[list[list[int]]]:
        """Of each row phase and input row, and for either row of cells: which of the phase's taps it is, or -1."""
        found = []
        for first, taps in zip(self.first_rows, self.taps_down, strict=True):
            places = {tap.shift - first: i for i, tap in enumerate(taps)}
            reads = [i * self.row_step for i in range(self.input_rows)]
            found.append([[places.get(place - row, -1) for row in range(self.rows)] for place in reads])
        return found

    # Steps along a row.

    @property
    def steps(self) -> int:
        return -(-(self.cells[1] + self.delayed) // self.columns)

    @property
    def multiplied(self) -> int:
        """Inputs of a row that products read."""
        return min(self.input_size[1], self.steps * self.columns)

    @property
    def image_items(self) -> int:
        return -(-self.cells[0] // self.rows)

    @property
    def items(self) -> int:
        """Of a set."""
        return self.problem.batch * self.image_items

    def blocks_on(self, multiprocessors: int) -> int:
        """Blocks of a set."""
        return max(1, min(self.items, multiprocessors // self.sets))

    # Stores.

    @cached_property
    def line_cells(self) -> int:
        """Cells of a line of outputs, which are folded before any are stored."""
        most = max(8, _LINE_BYTES // (_ITEM * self.span[1]))
        return max(cells for cells in range(8, self.columns + 1, 8) if self.columns % cells == 0 and cells <= most)

    @property
    def vector(self) -> int:
        """Outputs that a thread stores together."""
        span = self.span[1]
        return math.gcd(_PIECE, self.output_size[1], self.delayed * span, self.line_cells * span)

    @cached_property
    def line_pitch(self) -> int:
        """Outputs from a line to the next, in shared memory: such that lanes write to different banks."""
        run, word = 2 * self.span[1], word_of(self.span[1])
        multiple, together = max(word, self.vector, 2), 64 // max(2, word)

        def conflicts(pitch: int) -> int:
            banks = [(lane // 4 * pitch + lane % 4 * run) // 2 % 32 for lane in range(together)]
            return max(map(banks.count, banks))

        first = self.line_cells * self.span[1]
        return min(range(-(-first // multiple) * multiple, first + 65, multiple), key=conflicts)

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
        """Weights of a set."""
        return (2 if self.rows == 1 else 1) * self.weight_rows * self.tap_bytes

    @property
    def _output_bytes(self) -> int:
        return 2 * _BLOCK_ROWS // self.slots * self.line_pitch * _ITEM

    @property
    def stages(self) -> int:
        """Each has the inputs of a step."""
        left = SHARED_BYTES - self.weight_bytes - self._output_bytes - _BARRIER_BYTES
        return min(_MOST_STAGES, left // (self.stage_bytes + 2 * _BARRIER_BYTES))

    @property
    def shared_bytes(self) -> int:
        stages = self.stages * (self.stage_bytes + 2 * _BARRIER_BYTES)
        return stages + self.weight_bytes + self._output_bytes + _BARRIER_BYTES

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weights as they are laid out."""
        return self.sets * self.weight_bytes

    @property
    def possible(self) -> bool:
        """Whether registers, shared memory, boxes and integers hold it."""
        fits = self.tiles * self.columns // 2 <= _MOST_SUMS and self.stages > 1
        boxes = self.input_rows * self.row_step <= _LONGEST_BOX and self.row_step <= _LONGEST_STEP
        last = (self.cells[0] + 1) * self.span[0], (self.steps + 1) * self.columns * self.span[1]
        return fits and boxes and max(self.items + MULTIPROCESSORS, self.packed_bytes // 16, *last) <= _INT32_MAX

    @property
    def _shuffles(self) -> int:
        """That a fold takes for two cells of an output channel: what comes from the same lane is added up before."""
        taps = list(zip(self.taps_across, self.delays, strict=True))
        lanes = {(tap.phase, e, (delay + (e + delay) % 2 - e) // 2) for tap, delay in taps for e in (0, 1)}
        return sum(0 < distance < 4 for _, _, distance in lanes)

    @cached_property
    def cycles(self) -> float:
        """Roughly the cycles of a call, its launches among them.

        Of a step a warpgroup multiplies, and folds while the other multiplies. What both ask of shared memory counts,
        where it is more: reads of products, three accesses for the outputs of a line, shuffles. The constants were
        fitted to 95 tiles of 19 layers on an H200, which are 10% off (root mean square of the logarithm); tiles of the
        least estimate took 1.2% longer than the best (geometric mean).
        """
        blocks, rounds = self.blocks_on(MULTIPROCESSORS), -(-self.sets // MULTIPROCESSORS)
        products, span = self.weight_rows * self.channels / _STEP * self.tiles, self.span[1]
        pairs = self.columns / 8 * (2 // self.slots)  # of cells, that a thread folds
        outputs, shuffles = self.columns * span * _BLOCK_ROWS // self.slots, pairs * self._shuffles
        read = products * (2048 + 32 * self.columns) / 128
        shared = 2 * (1.11 * read + 1.08 * (4 * shuffles + 3 * outputs * _ITEM / 128))
        folding = pairs * (0.77 * len(self.taps_across) + 9.2 * span) + shuffles + 12 * outputs / (32 * self.vector)
        step = (shared**3 + (products * self.columns / 2 + folding) ** 3) ** (1 / 3)
        multiplied = -(-self.multiplied // self.columns)
        computing = rounds * -(-self.items // blocks) * (multiplied * step + (self.steps - multiplied) * 1.3 * folding)
        pixels = self.in_channels * math.prod(self.input_size) + self.out_channels * math.prod(self.output_size)
        moving = self.problem.batch * self.problem.groups * pixels * _ITEM / _MEMORY_RATE * _CLOCK_RATE
        return 15_700 + (computing**3 + moving**3) ** (1 / 3)

    @property
    def seconds(self) -> float:
        """Roughly the seconds of a call."""
        return self.cycles / _CLOCK_RATE


def word_of(span: int) -> int:
    """Outputs that a lane writes to shared memory together, of two cells."""
    return math.gcd(2 * span, 8)


@lru_cache(maxsize=1024)
def taps_of(problem: Problem, direction: Direction, axis: int) -> tuple[Tap, ...]:
    """The taps of an axis.

    >>> taps_of(Problem(1, 1, 1, 1, (8, 8), (3, 3), stride=(2, 2), padding=(1, 1)), "forward", 0)
    (Tap(tap=0, phase=1, shift=1), Tap(tap=1, phase=0, shift=0), Tap(tap=2, phase=1, shift=0))
    """
    stride, padding, dilation = problem.stride[axis], problem.padding[axis], problem.dilation[axis]
    found = []
    for tap in range(problem.kernel_size[axis]):
        place = tap * dilation - padding
        if direction == "forward":
            found.append(Tap(tap, place % stride, -(place // stride)))
        else:
            found.append(Tap(tap, 0, place))
    return tuple(found)


@lru_cache(maxsize=1024)
def tile_of(problem: Problem, direction: Direction) -> Tile | None:
    """The tile for a problem of 16 bits in NCHW: a pure function of it. None where the kernel is not for it."""
    return min(tiles_of(problem, direction), key=lambda tile: tile.cycles, default=None)


def tiles_of(problem: Problem, direction: Direction) -> Iterator[Tile]:
    """The tiles that a problem may have: those that fit registers and shared memory."""
    p = problem
    if p.batch == 0 or p.stride[1] > _MOST_SPAN or (direction == "input_grad" and p.stride != (1, 1)):
        return
    for axis in (0, 1) if direction == "forward" else ():
        if len({tap.phase for tap in taps_of(p, direction, axis)}) < p.stride[axis]:
            return  # outputs that hold the bias alone
    shifts = [tap.shift for tap in taps_of(p, direction, 1)]
    if max(0, *shifts) - min(shifts) > _CARRIED:
        return
    for tile in itertools.starmap(Tile, itertools.product((p,), (direction,), _SLOTS, _COLUMNS, _ROWS)):
        if tile.input_size[1] % _PIECE or tile.channels > _LONGEST_BOX:
            return
        if p.groups > 1 and tile.in_channels != tile.channels:
            return  # products would read channels of the next group
        if tile.possible:
            yield tile


def macros_of(tile: Tile, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/fused_rows.cu and csrc/fused_rows_weights.cu."""
    taps, pads = tile.taps_across, [-1] * (tile.tiles * tile.slots - len(tile.taps_across))
    own = [tap for phase in tile.row_taps for row in phase for tap in row * (2 // tile.rows)]
    down = [[tap.tap for tap in taps] + [-1] * (tile.weight_rows - len(taps)) for taps in tile.taps_down]
    return {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        "INPUT_GRAD": int(tile.direction == "input_grad"),
        "KERNEL_H": tile.problem.kernel_size[0],
        "KERNEL_W": tile.problem.kernel_size[1],
        "IN_CHANNELS": tile.in_channels,
        "OUT_CHANNELS": tile.out_channels,
        "CHANNELS": tile.channels,
        "TILES": tile.tiles,
        "SLOTS": tile.slots,
        "COLUMNS": tile.columns,
        "ROWS": tile.rows,
        "CHANNEL_SETS": tile.channel_sets,
        "PHASES": tile.span[0],
        "SPAN_W": tile.span[1],
        "DELAYED": tile.delayed,
        "DELAY": table(tile.delays + [0] * len(pads)),
        "PHASE": table([tap.phase for tap in taps] + pads),
        "WEIGHT_ROWS": tile.weight_rows,
        "INPUT_ROWS": tile.input_rows,
        "FIRST_ROW": table(tile.first_rows),
        "ROW_TAP": table(own),
        "TAP_H": table([tap for phase in down for tap in phase]),
        "TAP_W": table([tap.tap for tap in taps] + pads),
        "STAGES": tile.stages,
        "LINE_CELLS": tile.line_cells,
        "LINE_PITCH": tile.line_pitch,
        "VECTOR": tile.vector,
        "SHARED_BYTES": tile.shared_bytes,
    }


def prepare_forward(config: Config, tile: Tile) -> Forward:
    """As ``Algorithm.forward``."""
    from gemmconv.runtime import tensor_map
    from gemmconv.runtime.launch import load

    p, shared_bytes = config.problem, tile.shared_bytes
    macros = macros_of(tile, config.dtype)
    pack = load("fused_rows_weights.cu", "fused_rows_weights_kernel", macros, config.device.index)
    kernel = load("fused_rows.cu", "fused_rows_kernel", macros, config.device.index, shared_bytes)
    shapes = (p.input_shape, p.output_shape)
    input_shape, output_shape = shapes if tile.direction == "forward" else shapes[::-1]
    strides = strides_of(output_shape, config.memory_format)
    input_strides = strides_of(input_shape, config.memory_format)
    boxes, units = _boxes(tile), tile.packed_bytes // 16
    pack_grid = (-(-units // _WEIGHT_THREADS), 1, 1)
    sizes = (
        reciprocal(tile.image_items),
        *(p.groups, tile.multiplied, *tile.output_size, tile.cells[0]),
        *(tile.image_items, tile.items, tile.steps),
    )

    def call(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = input.new_empty_strided(output_shape, strides)
        input, (weight, weights_last) = aligned(with_strides(input, input_strides)), either_format(weight)
        bias_address = 0 if bias is None else (bias := bias.contiguous()).data_ptr()
        # All that the main kernel reads but `packed` is there before the other is launched; see Kernel.launch.
        packed = torch.empty(tile.packed_bytes, dtype=torch.uint8, device=input.device)
        weights_params = FusedRowsWeightsParams(weight.data_ptr(), packed.data_ptr(), weights_last, units)
        pack.launch(pack_grid, (_WEIGHT_THREADS, 1, 1), weights_params)
        params = FusedRowsParams(
            tensor_map.encode(input.data_ptr(), *boxes),
            *(packed.data_ptr(), bias_address, output.data_ptr(), *sizes),
        )
        multiprocessors = multiprocessors_of(config.device) if config.device.type == "cuda" else MULTIPROCESSORS
        grid = (tile.blocks_on(multiprocessors) * tile.sets, 1, 1)
        kernel.launch(grid, (_THREADS, 1, 1), params, shared_bytes, overlaps=True)
        return output

    return call


def prepare_input_grad(config: Config, tile: Tile) -> Gradient:
    """As ``Algorithm.input_grad``."""
    gather = prepare_forward(config, tile)
    return lambda grad_output, weight: gather(grad_output, weight, None)


def _boxes(tile: Tile) -> Boxes:
    """What :func:`gemmconv.runtime.tensor_map.encode` is to know of the input, [images][rows][channels][columns]."""
    p, (height, width) = tile.problem, tile.input_size
    channels = tile.in_channels * p.groups
    row, plane = width * _ITEM, height * width * _ITEM
    sizes, strides = (width, channels, height, p.batch), (plane, row, channels * plane)
    return _ITEM, sizes, strides, (_LINE, tile.channels, tile.input_rows, 1), (1, 1, tile.row_step, 1), True
