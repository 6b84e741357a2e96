"""How ``fused`` goes about wide rows in NCHW, of 16 bits and of TF32 (csrc/sm90/gemm_fold_rows.cu): tiles, estimates.

It is for forward passes and input gradients of one group, without stride or dilation, where rows of inputs are whole
pieces of 16 bytes, kernels are at most nine wide, and the weights of some output channels, of 32 or 64 in 16 bits, fit
shared memory. In 16 bits kernels are at most six wide and inputs have at most 256 channels; in TF32 kernels are more
than one wide. There are no tiles for others. Words are those of the kernel's header.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from gemmconv.geometry import Problem
from gemmconv.hashing import cached_property, changed
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of, overlapped
from gemmconv.kernels.integers import INT32_MAX, up_to_multiple
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, named_macros
from gemmconv.kernels.phases import Gathering, Tap, taps_of
from gemmconv.kernels.program import Launch, Params, Program, gathering, reciprocal
from gemmconv.kernels.sm90.base import LONGEST_BOX, SHARED_BYTES, Sm90Kernel, image_map
from gemmconv.kernels.weights import pack

_COST = costs_of("sm90/gemm_fold_rows")
_DEVICE = costs_of("device")
_BOX_LINE = 128  # bytes of a line of a box of a tensor map
_BARRIER_BYTES = 8
_CARRIED = 8  # columns of the step before
_MOST_FETCHED, _FETCHED_AHEAD = 256, 16 << 20  # bytes of a line; of all lines that are gone along
_THREADS = 384
_WHOLE_LINES = 16  # lines of weights of a product are a multiple of

# Constants for 16-bit types.
_BLOCK_ROWS = 64  # of a product
_MOST_SUMS = 192  # registers of a thread
_LINE_PITCH = 72  # outputs from a line of 64 to the next, in shared memory: lanes write to different banks

# Constants for TF32.
_WHOLE_OUTS, _MOST_LINES = 8, 256  # output channels, and columns of a product
_SECTOR = 8  # outputs that memory writes together, 32 bytes
_CHUNKS = (8, 16, 32, 64)  # channels of a stage
# Unrolled products of a step, and groups; a group has the products of a chunk, and of one tap down or all of them.
_MOST_PRODUCTS, _MOST_GROUPS = 96, 16
_MOST_REGISTERS, _OTHER_REGISTERS, _FEW_WORDS = 250, 40, 64  # of a thread
_MOST_TF32_STAGES = 16
_LINE_PAD = 4  # outputs from the end of a line in shared memory to the next


class RowTile(Gathering):
    """The work of a block that goes along rows, some columns of the input a step."""

    multiprocessors: int  # of the GPU: as many blocks run at once
    itemsize: ClassVar[int]  # bytes of an element
    piece: ClassVar[int]  # elements that lie together in memory, 16 bytes
    product_channels: ClassVar[int]  # input channels of a product, 32 bytes
    pixels_on_m: ClassVar[bool]  # whether inputs are the left side of products, and weights the right one
    columns: ClassVar[int]  # inputs of a row of a step
    rows: ClassVar[int]  # of outputs of an item
    outs: int  # output channels of a block, which are those of a set
    chunk: int  # input channels of a stage
    slots: int  # taps across whose weights a product has, each with ``outs`` output channels
    most_stages: int  # the most stages that are of use
    own_bytes: int  # bytes of shared memory beside stages and weights
    cycles: float  # roughly the cycles of a call, its launches among them
    kept: int = 0  # outputs of a row that may be stored later than what is beside them
    own_macros: ClassVar[str]  # names of values that are macros for this type alone

    @cached_property
    def channels(self) -> int:
        """Input channels, up to whole products."""
        return up_to_multiple(self.in_channels, self.product_channels)

    @property
    def channel_sets(self) -> int:
        return -(-self.out_channels // self.outs)

    # Taps across: the fold.

    @cached_property
    def taps_across(self) -> list[Tap]:
        """Taps across, those first whose columns meet outputs first: each is an input later than the one before."""
        return sorted(taps_of(self.problem, self.direction, 1), key=lambda tap: -tap.shift)

    @cached_property
    def delayed(self) -> int:
        """Inputs that outputs come later than columns: of those that let all taps be 0 to 8 late, the best to store."""
        first, last = self.taps_across[0].shift, self.taps_across[-1].shift
        possible = range(max(0, first), last + _CARRIED + 1)
        return max(possible, key=lambda delayed: (math.gcd(self.piece, delayed), -delayed))

    @property
    def first_delay(self) -> int:
        """Delay of the first tap across, in columns."""
        return self.delayed - self.taps_across[0].shift

    @cached_property
    def given(self) -> list[int]:
        """From how many lanes before a lane's two outputs of an output channel get something, of each output."""
        delays = range(self.first_delay, self.first_delay + len(self.taps_across))
        lanes = {(e, (delay + (e + delay) % 2 - e) // 2) for delay in delays for e in (0, 1)}
        return [distance for _, distance in lanes]

    # Taps down: rows of the input.

    @cached_property
    def taps_down(self) -> list[Tap]:
        """Taps down, in the order of the rows of the input that they read."""
        return sorted(taps_of(self.problem, self.direction, 0), key=lambda tap: tap.shift)

    @property
    def first_row(self) -> int:
        """Rows from an item's first one to its first input row."""
        return self.taps_down[0].shift

    @property
    def weight_rows(self) -> int:
        return len(self.taps_down)

    @property
    def input_rows(self) -> int:
        """Rows of the input that an item reads."""
        return self.weight_rows - 1 + self.rows

    # Steps along a row, and items.

    @property
    def steps(self) -> int:
        """Steps along a row."""
        return -(-(self.output_size[1] + self.delayed + self.kept) // self.columns)

    @property
    def multiplied(self) -> int:
        """Inputs of a row that products read."""
        return min(self.input_size[1], self.steps * self.columns)

    @property
    def image_items(self) -> int:
        return -(-self.output_size[0] // self.rows)

    @property
    def items(self) -> int:
        """Items of a set."""
        return self.problem.batch * self.image_items

    def blocks_on(self, multiprocessors: int) -> int:
        """Blocks of a set."""
        return max(1, min(self.items, multiprocessors // self.channel_sets))

    @property
    def rounds(self) -> int:
        """Items that a multiprocessor takes one after the other."""
        return -(-self.channel_sets // self.multiprocessors) * -(-self.items // self.blocks_on(self.multiprocessors))

    # Memory.

    @property
    def vector(self) -> int:
        """Outputs that begin at a multiple of their bytes in memory, in any line."""
        return math.gcd(self.piece, self.output_size[1], self.delayed)

    @property
    def tiles(self) -> int:
        """Products that together have all taps across."""
        return -(-len(self.taps_across) // self.slots)

    @property
    def lines(self) -> int:
        """Lines of weights of a product: the output channels of each slot."""
        return up_to_multiple(self.slots * self.outs, _WHOLE_LINES)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of a set."""
        return self.weight_rows * self.channels * self.tiles * self.lines * self.itemsize

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weights as they are laid out."""
        return self.channel_sets * self.weight_bytes

    @property
    def stage_bytes(self) -> int:
        return self.columns * self.input_rows * self.chunk * self.itemsize

    @property
    def stages(self) -> int:
        """Each has the inputs of a chunk of a step."""
        left = SHARED_BYTES - self.weight_bytes - self.own_bytes
        return min(self.most_stages, left // (self.stage_bytes + 2 * _BARRIER_BYTES))

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 2 * _BARRIER_BYTES) + self.weight_bytes + self.own_bytes

    @property
    def addressable(self) -> bool:
        """Whether boxes and integers hold it."""
        last = self.output_size[0] + self.rows, (self.steps + 1) * self.columns
        largest = max(self.items + self.multiprocessors, self.packed_bytes // 16, *last)
        return max(self.input_rows, self.chunk) <= LONGEST_BOX and largest <= INT32_MAX

    @property
    def moved_cycles(self) -> float:
        """Cycles to move the inputs and outputs of a call."""
        return self.problem.image_bytes(self.itemsize) / _DEVICE.rows_memory_rate * _DEVICE.clock

    @property
    def packing(self) -> Macros:
        """Macros for csrc/weights/pack.cu but the type of elements: steps are taps down and tiles of taps across."""
        width, across = self.problem.kernel_size[1], [tap.tap for tap in self.taps_across]
        across += [-1] * (-len(across) % self.slots)  # slots that have no tap
        tiles = [across[first : first + self.slots] for first in range(0, len(across), self.slots)]
        steps = [[down.tap * width + kw if kw >= 0 else -1 for kw in tile] for down in self.taps_down for tile in tiles]
        others: Macros = {
            "INPUT_GRAD": int(self.direction == "input_grad"),
            "ROW_ORDER": pack.ROWS_SLOTS if self.slots == 2 and not self.pixels_on_m else pack.ROWS_PLAIN,
            "CHANNEL_PAIRS": int(self.pixels_on_m),
            **named_macros(self, "in_channels out_channels channel_sets slots"),
            "TAPS": self.problem.taps,
            "UNITS": self.channels // self.piece,
            "ROWS": self.lines,
            "CHANNELS": self.outs,
        }
        return pack.macros_of([steps], others)

    @property
    def fetched(self) -> int:
        """Bytes of a line that the L2 cache fetches together: few where what blocks wait for would not stay there."""
        lines = self.blocks_on(self.multiprocessors) * self.channel_sets * self.input_rows * self.in_channels
        return _MOST_FETCHED if lines * _MOST_FETCHED <= _FETCHED_AHEAD else _MOST_FETCHED // 2


@dataclass(frozen=True)
class Tile16(RowTile):
    """The work of a block in 16 bits: a warpgroup has a row of its own, and products have 64 rows."""

    problem: Problem
    direction: Pass
    slots: int
    multiprocessors: int

    itemsize: ClassVar[int] = 2
    piece: ClassVar[int] = 8
    product_channels: ClassVar[int] = 16
    pixels_on_m: ClassVar[bool] = False
    columns: ClassVar[int] = 128
    rows: ClassVar[int] = 2
    most_stages = 12
    own_macros: ClassVar[str] = "slots"

    @cached_property
    def chunk(self) -> int:
        return self.channels

    @cached_property
    def outs(self) -> int:
        return _BLOCK_ROWS // self.slots

    @cached_property
    def own_bytes(self) -> int:
        """A line of outputs of each output channel, for each warpgroup; a barrier."""
        return 2 * self.outs * _LINE_PITCH * self.itemsize + _BARRIER_BYTES

    @property
    def possible(self) -> bool:
        """Whether registers, shared memory, boxes and integers hold it."""
        return self.tiles * self.columns // 2 <= _MOST_SUMS and self.stages > 1 and self.addressable

    @cached_property
    def cycles(self) -> float:
        """Roughly the cycles of a call, its launches among them.

        Of a step a warpgroup multiplies, and folds while the other multiplies. What both ask of shared memory counts,
        where it is more: reads of products, three accesses for the outputs of a line, shuffles.
        """
        products = self.weight_rows * self.channels / self.product_channels * self.tiles
        pairs = self.columns / 8 * (2 // self.slots)  # of outputs, that a thread folds
        outputs = self.columns * self.outs
        shuffles = pairs * sum(0 < distance < 4 for distance in self.given)
        read = products * (2048 + 32 * self.columns) / 128
        accesses = 4 * shuffles + 3 * outputs * self.itemsize / 128
        shared = 2 * (_COST.read_factor * read + _COST.access_factor * accesses)
        folding = pairs * (_COST.tap_cycles * len(self.taps_across) + _COST.pair_cycles)
        folding += shuffles + _COST.store_cycles * outputs / (32 * self.vector)
        step = overlapped(_COST.overlap, shared, products * self.columns / 2 + folding)
        multiplied = -(-self.multiplied // self.columns)
        unmultiplied = (self.steps - multiplied) * _COST.unmultiplied_factor * folding
        computing = self.rounds * (multiplied * step + unmultiplied)
        return _COST.start_cycles + overlapped(_COST.overlap, computing, self.moved_cycles)


@dataclass(frozen=True)
class TileTf32(RowTile):
    """The work of a block in TF32."""

    problem: Problem
    direction: Pass
    outs: int
    chunk: int
    multiprocessors: int

    itemsize: ClassVar[int] = 4
    piece: ClassVar[int] = 4
    product_channels: ClassVar[int] = 8
    pixels_on_m: ClassVar[bool] = True
    columns: ClassVar[int] = 16
    rows: ClassVar[int] = 8
    own_macros: ClassVar[str] = "chunk outs lines taps_together"

    @property
    def chunks(self) -> int:
        return self.channels // self.chunk

    @cached_property
    def slots(self) -> int:
        return len(self.taps_across)

    @property
    def products(self) -> int:
        """Products of a warpgroup in a step."""
        return self.weight_rows * self.channels // self.product_channels

    @property
    def groups(self) -> int:
        """Groups of products in a step; a group has a chunk, and one tap down or all taps down."""
        return self.weight_rows * self.chunks // self.taps_together

    @cached_property
    def taps_together(self) -> int:
        """Taps down whose words a thread loads together: all of them, where registers hold those."""
        return self.weight_rows if self.registers_with(self.weight_rows) <= _MOST_REGISTERS else 1

    @property
    def vector(self) -> int:
        """Outputs that a lane's outputs, rows and where lines begin are multiples of; two at most."""
        return math.gcd(super().vector, 2)

    @property
    def steps(self) -> int:
        """Steps along a row; they come two by two."""
        return up_to_multiple(super().steps, 2)

    @cached_property
    def kept(self) -> int:
        return -self.delayed % _SECTOR if self.output_size[1] % _SECTOR == 0 else _SECTOR - 1

    # Shared memory and registers.

    @cached_property
    def most_stages(self) -> int:
        """No more than two steps are ahead."""
        return min(_MOST_TF32_STAGES, 3 * self.chunks)

    @cached_property
    def own_bytes(self) -> int:
        """Outputs of two steps of eight channels of each warp, and what is kept of all; the bias, a barrier."""
        outputs = _WHOLE_OUTS * (2 * self.columns + _SECTOR + _LINE_PAD) + self.outs * _SECTOR
        return (self.rows * outputs + self.outs) * self.itemsize + _BARRIER_BYTES

    def registers_with(self, taps_together: int) -> int:
        """Registers of a thread that multiplies, about: sums, words of two groups, what is carried or waits.

        Of 400 tiles of random layers that take 170 and more, ten spill, 128 bytes at most.
        """
        groups = self.weight_rows * self.chunks // taps_together
        words = min(2, groups) * taps_together * self.chunk // self.product_channels * 4
        words += max(0, words - _FEW_WORDS) if groups > 1 else 0  # of many, some have to be moved
        return self.lines // 2 + words + self.outs // 4 * (self._carried + 2) + 8 + _OTHER_REGISTERS

    @property
    def _carried(self) -> int:
        """Values that other lanes send for a lane's two outputs of an output channel."""
        return sum(distance > 0 for distance in self.given)

    @property
    def possible(self) -> bool:
        """Whether registers, shared memory, boxes and integers hold it."""
        fits = self.lines <= _MOST_LINES and self.registers_with(self.taps_together) <= _MOST_REGISTERS
        fits = fits and self.products <= _MOST_PRODUCTS and self.groups <= _MOST_GROUPS
        return fits and self.stages > self.chunks and self.addressable

    @cached_property
    def cycles(self) -> float:
        """Roughly the cycles of a call, its launches among them.

        Of a step a warpgroup multiplies, and folds while the other multiplies. That hides a part of reading words, of
        inputs that come, shuffles and stores, which all wait for shared memory. Inputs that are asked for many channels
        at a time keep memory waiting in between.
        """
        step = self.products * (_COST.tf32_line_cycles * self.lines + _COST.tf32_product_cycles)
        step += 2 * _COST.tf32_group_cycles * self.groups + self.stage_bytes * self.chunks / 128
        step += self.outs * (2 * self._carried + _COST.tf32_output_cycles)
        computing = self.rounds * self.steps * _COST.tf32_step_share * step
        moving = _COST.tf32_memory_factor * (1 + self.chunk / _COST.tf32_long_chunk) * self.moved_cycles
        return _COST.tf32_start_cycles + overlapped(_COST.tf32_overlap, computing, moving)


def _tiles_of_tf32(problem: Problem, direction: Pass, multiprocessors: int) -> Iterator[TileTf32]:
    any_tile = TileTf32(problem, direction, _WHOLE_OUTS, _CHUNKS[0], multiprocessors)
    if len(any_tile.taps_across) == 1:
        return  # nothing folds: others store what each tap gives in longer runs
    channels = -(-any_tile.out_channels // _WHOLE_OUTS)
    outs = {-(-channels // sets) * _WHOLE_OUTS for sets in range(1, channels + 1)}
    for set_outs, chunk in itertools.product(sorted(outs, reverse=True), _CHUNKS):
        tile = TileTf32(problem, direction, set_outs, chunk, multiprocessors)
        if tile.channels % chunk == 0:
            yield tile


class GemmFoldRows(Sm90Kernel):
    name = "sm90/gemm_fold_rows"
    directions = ("forward", "input_grad")
    serves = "one group, no stride or dilation, wide rows of whole 16 bytes, few taps across"
    only_in = torch.contiguous_format
    clock_rate = _DEVICE.clock

    def tiles(self, config: Config, direction: Pass) -> Iterator[RowTile]:
        p, multiprocessors = config.problem, config.spec.multiprocessors
        if p.batch == 0 or p.groups > 1 or (p.stride, p.dilation) != ((1, 1), (1, 1)):
            return
        shifts = [tap.shift for tap in taps_of(p, direction, 1)]
        if max(0, *shifts) - min(shifts) > _CARRIED:
            return  # a tap must not be later than columns are carried
        of_16_bits = (Tile16(p, direction, slots, multiprocessors) for slots in (1, 2))
        for tile in _tiles_of_tf32(p, direction, multiprocessors) if config.dtype.itemsize == 4 else of_16_bits:
            if tile.input_size[1] % tile.piece == 0 and tile.possible:
                yield tile

    def fitted(self, config: Config, direction: Pass, tile: RowTile) -> RowTile | None:
        sized = changed(tile, problem=config.problem)
        fits = config.problem.batch > 0 and sized.input_size[1] % tile.piece == 0 and sized.addressable
        return sized if fits else None

    def program(self, config: Config, direction: Pass, tile: RowTile) -> Program:
        p, is_forward = config.problem, direction == "forward"
        box = min(tile.columns, _BOX_LINE // tile.itemsize), tile.chunk, tile.input_rows, 1
        shape = p.input_shape if is_forward else p.output_shape
        params: Params = {
            "map": image_map(shape, tile.itemsize, box, fetched=tile.fetched),
            "packed": "packed",
            "bias, output": ("bias" if is_forward else None, "output"),
            "by_image_items": reciprocal(tile.image_items),
            "columns": tile.multiplied,
            "h_out, w_out": tile.output_size,
            "image_items, items, steps": (tile.image_items, tile.items, tile.steps),
        }
        grid, block = (tile.blocks_on(config.spec.multiprocessors) * tile.channel_sets, 1, 1), (_THREADS, 1, 1)
        element: Macros = {"ELEMENT_T": ELEMENT_TYPES[config.dtype]}
        macros: Macros = {
            **element,
            **named_macros(tile, "in_channels out_channels channels channel_sets weight_rows pixels_on_m"),
            **named_macros(tile, f"delayed first_delay stages vector shared_bytes {tile.own_macros} first_row"),
            "TAPS_ACROSS": len(tile.taps_across),
        }
        main = Launch("sm90/gemm_fold_rows.cu", macros, grid, block, params, tile.shared_bytes, overlaps=True)
        launches = pack.packing(element | tile.packing), main
        return gathering(config, direction, launches, {"packed": tile.packed_bytes})


KERNEL = GemmFoldRows()
