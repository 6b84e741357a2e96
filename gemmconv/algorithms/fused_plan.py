"""How csrc/fused_wgmma.cu goes about a problem: cells, M blocks, strips, tiles and stages. Pure integers.

Words are those of the kernel's header. The kernel gathers outputs from inputs; which tensors these are depends on the
direction. The input gradient of a transposed convolution is a convolution: its inputs are those of grad_output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from gemmconv.algorithms.base import Direction
from gemmconv.algorithms.cells import phase_shifts
from gemmconv.geometry import Pair, Problem

SHARED_BYTES = 227 << 10
MULTIPROCESSORS = 132  # of the H200; on a smaller device blocks have more items to take
_BARRIER_BYTES = 8
_UNIT_BYTES = 16
_BLOCK_ROWS = 64
_WIDEST = 256  # columns of all accumulators of a warpgroup: 128 registers of a thread
_PLACE_BYTES = 2 * 8  # in two tables, of at most 64 bits each
_MOST_STAGES = 16
_LOADERS = 96  # threads
_LOADED_WORDS = 64, 56  # of registers, that one loads at once; in channels_last
_BATCH_CYCLES = 1_100  # that it takes for that
_MOST_ENTRIES = 12_000  # of all tables of a kernel, in 64 KiB of constant memory
PHASE_BASE = 1 << 12  # a phase is a number: row * PHASE_BASE + column
_CYCLES_A_COLUMN = 0.5  # of the tensor cores, for 64 rows and two units
_EFFICIENCY = 0.85  # of the tensor cores, that products reach
_STEP_CYCLES = 60  # of a warpgroup, between its products
_START_CYCLES = 3_000  # until the first products of a block begin
_STORE_CYCLES = 15  # of a thread, for an output
_BYTES_A_CYCLE = 30  # of a multiprocessor, from the L2 cache

PAIR_NONE, PAIR_BLOCKS, PAIR_ROWS = range(3)
ROWS_PLAIN, ROWS_SLOTS, ROWS_CHANNELS = range(3)


@dataclass(frozen=True)
class Plan:
    """One way to go about a problem.

    Attributes:
        problem: the geometry.
        direction: "forward" or "input_grad".
        itemsize: bytes of an element.
        split: whether float32 is split into two parts of TF32.
        channels_last: format of input and output.
        multiple: how many times the smallest cell a cell is, per axis. The smallest has one input, or one output of an
            input gradient, and as many of the other as the stride says.
        slots: output phases of an M block, which are neighbours in a row of cells.
        blocks: M blocks of a warpgroup, which are neighbouring column phases.
        columns: positions that an M block is multiplied with at a time, a multiple of 32.
        warpgroups_m: warpgroups with output channels of their own, 1 or 2.
        units: 16-byte units of channels of a chunk: 2, 4 or 8.
        strips: into how many strips an image is cut.
    """

    problem: Problem
    direction: Direction
    itemsize: int
    split: bool
    channels_last: bool
    multiple: Pair
    slots: int
    blocks: int
    columns: int
    warpgroups_m: int
    units: int
    strips: int

    # Phases and output channels: the left sides.

    @cached_property
    def span(self) -> Pair:
        """Outputs of a cell, per axis."""
        (height, width), (stride_h, stride_w) = self.multiple, self.problem.stride
        return (height * stride_h, width * stride_w) if self.direction == "forward" else self.multiple

    @property
    def in_channels(self) -> int:
        """Input channels of a group: those that are summed over."""
        return self._channels[0]

    @property
    def out_channels(self) -> int:
        """Output channels of a group."""
        return self._channels[1]

    @property
    def _channels(self) -> Pair:
        p = self.problem
        first, second = p.in_channels // p.groups, p.out_channels // p.groups
        return (first, second) if self.direction == "forward" else (second, first)

    @property
    def channels(self) -> int:
        """Output channels of an M block."""
        return self.out_channels if self.slots > 1 else min(_BLOCK_ROWS, self.out_channels)

    @property
    def channel_sets(self) -> int:
        """Into how many parts, each of ``warpgroups_m`` M blocks, the output channels are cut."""
        return -(-self.out_channels // (self.channels * self.warpgroups_m))

    @property
    def phases(self) -> tuple[tuple[Pair | None, ...], ...]:
        """The phases of each M block, those of a phase set one after the other; None where a slot is left over."""
        return _phases(self.span, self.slots)

    @property
    def phase_sets(self) -> int:
        return len(self.phases) // self.blocks

    @property
    def pairing(self) -> int:
        """Where a thread has neighbouring outputs."""
        if self.channels_last:
            return PAIR_ROWS if self.channels % 2 == 0 else PAIR_NONE
        if self.blocks == 2:
            return PAIR_BLOCKS
        return PAIR_ROWS if self.slots % 2 == 0 else PAIR_NONE

    @property
    def inner(self) -> int:
        """Neighbouring outputs of a thread, of a cell."""
        return 1 if self.pairing == PAIR_NONE else 2

    @property
    def row_order(self) -> int:
        """What rows g and g + 8 of an M block are to each other."""
        if self.pairing != PAIR_ROWS:
            return ROWS_PLAIN
        return ROWS_CHANNELS if self.channels_last else ROWS_SLOTS

    @property
    def staged(self) -> bool:
        """Whether the outputs of a row of cells are neighbours in a warp: then they are stored as whole stretches."""
        return not self.channels_last and self.span[1] == self.inner

    @property
    def vector(self) -> int:
        """Outputs that a thread stores together."""
        width, cells = self.output_size[1], self.strip_cells if self.strips > 1 else 0
        if self.channels_last:
            return 2 if self.pairing == PAIR_ROWS and self.out_channels % 2 == 0 else 1
        if self.staged:
            return math.gcd(width, cells * self.span[1], self.pitch * self.span[1], 16 // self.itemsize, 4)
        return math.gcd(self.inner, width, self.span[1])

    # Shifts: the reduced extent.

    @property
    def steps(self) -> tuple[tuple[Pair, ...], ...]:
        """The shifts of each M block: those of any of its phases."""
        return _steps(self.problem, self.direction, self.phases)

    def _reach(self, axis: int) -> Pair:
        """The least and the largest shift, in units."""
        return _reach(self.problem, self.direction, axis, self.unit[axis], self.span[axis])

    @property
    def element_units(self) -> int:
        """Elements of a unit."""
        return _UNIT_BYTES // self.itemsize

    @property
    def set_steps(self) -> list[int]:
        """Steps of each phase set, of a chunk."""
        return [sum(map(len, self.steps[i : i + self.blocks])) for i in range(0, len(self.steps), self.blocks)]

    @property
    def chunks(self) -> int:
        """Chunks of the input channels of a group."""
        return -(-self.in_channels // (self.units * self.element_units))

    # Strips and positions: the right sides.

    @property
    def input_size(self) -> Pair:
        """Height and width of the inputs."""
        return self.problem.input_size if self.direction == "forward" else self.problem.output_size

    @property
    def output_size(self) -> Pair:
        """Height and width of the outputs."""
        return self.problem.output_size if self.direction == "forward" else self.problem.input_size

    @cached_property
    def unit(self) -> Pair:
        """Inputs of a cell, per axis."""
        (height, width), (stride_h, stride_w) = self.multiple, self.problem.stride
        return self.multiple if self.direction == "forward" else (height * stride_h, width * stride_w)

    @cached_property
    def cells(self) -> Pair:
        """Cells of an image, down and across, that have outputs."""
        (height, width), (span_h, span_w) = self.output_size, self.span
        return -(-height // span_h), -(-width // span_w)

    @cached_property
    def strip_cells(self) -> int:
        """Cells across of a strip, the last of which may have fewer; even where there are several strips."""
        if self.strips == 1:
            return self.cells[1]
        return -(-self.cells[1] // (2 * self.strips)) * 2

    @cached_property
    def _inputs(self) -> Pair:
        """Rows and columns of an image, in units."""
        (height, width), (unit_h, unit_w) = self.input_size, self.unit
        return -(-height // unit_h), -(-width // unit_w)

    @cached_property
    def pitch(self) -> int:
        """Positions from one row of a strip to the next."""
        first, last = self._reach(1)
        if self.strips > 1:
            least = self.strip_cells + last - self.origin[1]
        else:  # what lies beyond either end of a row is the same gap
            least = max(self._inputs[1] - min(0, first), self.cells[1] + max(0, last))
        return -(-least // 2) * 2

    @cached_property
    def strip_rows(self) -> int:
        """Rows of positions from one strip to the next."""
        first, last = self._reach(0)
        return max(self._inputs[0] - min(0, first), self.cells[0] + max(0, last))

    @property
    def wide(self) -> int:
        """Inputs beside each other in a row that are loaded together."""
        return 2 if not self.channels_last and self.unit[1] <= 2 and self.input_size[1] % 2 == 0 else 1

    @property
    def _even(self) -> bool:
        """Whether inputs that are loaded together are neighbouring positions, the first of which is even."""
        return self.wide == 2 and self.unit[1] == 1

    @property
    def origin(self) -> Pair:
        """The input, in units, of a strip's first position."""
        if self.strips == 1:
            return 0, 0
        first = self._reach(1)[0]
        return 0, first // 2 * 2 if self._even else first

    def _place(self, shift: Pair) -> int:
        """Positions from a cell to the input at a shift, in its plane."""
        row, column = (shift[axis] // self.unit[axis] - self.origin[axis] for axis in (0, 1))
        return row * self.pitch + column

    @cached_property
    def places(self) -> Pair:
        """The least and the largest place of an input relative to its cell."""
        # Every row shift goes with every column shift, if not for the same phase.
        first, last = (
            (self._reach(0)[end] - self.origin[0]) * self.pitch + self._reach(1)[end] - self.origin[1] for end in (0, 1)
        )
        return first, last

    @property
    def tile(self) -> int:
        """Positions of a tile."""
        return 2 // self.warpgroups_m * self.columns

    @property
    def first(self) -> int:
        """The first position of a tile's inputs, relative to its first cell."""
        return self.places[0] // 2 * 2 if self._even else self.places[0]

    @cached_property
    def patch(self) -> int:
        """Positions of a tile's inputs, of each plane."""
        positions = self.tile + self.places[1] - self.first
        return -(-positions // 2) * 2 if self._even else positions

    @property
    def unit_pitch(self) -> int:
        """Positions from one unit of a patch to the next: neighbouring units begin in different banks."""
        positions, apart = self.patch * math.prod(self.unit), 8 // self.units
        return positions + (apart - positions) % 8

    def offset(self, shift: Pair) -> int:
        """Positions from the first of a patch to a tile's first cell's input at a shift."""
        plane = shift[0] % self.unit[0] * self.unit[1] + shift[1] % self.unit[1]
        return plane * self.patch + self._place(shift) - self.first

    @property
    def positions(self) -> int:
        """Positions of all images."""
        return self.problem.batch * self.strips * self.strip_rows * self.pitch

    @property
    def last_position(self) -> int:
        """The largest number that the kernel computes with positions."""
        return self.positions + self.tile + self.patch + self.strip_rows * self.pitch

    @property
    def tiles(self) -> int:
        return -(-self.positions // self.tile)

    @property
    def items(self) -> int:
        """What blocks take one after the other."""
        return self.tiles * self.phase_sets * self.channel_sets * self.problem.groups

    # Stages in shared memory.

    @property
    def parts(self) -> int:
        return 2 if self.split else 1

    @property
    def patch_bytes(self) -> int:
        """Bytes of a stage of inputs."""
        return self.parts * self.units * self.unit_pitch * _UNIT_BYTES

    @property
    def rows(self) -> int:
        """Rows of the weights of a step."""
        return self.warpgroups_m * _BLOCK_ROWS

    @property
    def weight_bytes(self) -> int:
        """Bytes of a stage of weights: those of one step."""
        return self.parts * self.units * self.rows * _UNIT_BYTES

    @property
    def spots(self) -> int:
        """Spots of a patch: ``wide`` inputs each."""
        return self.patch * math.prod(self.unit) // self.wide

    @property
    def vector_loads(self) -> bool:
        """Whether units are vectors in memory."""
        return self.channels_last and self.in_channels % self.element_units == 0

    @property
    def batches(self) -> int:
        """How often a thread waits for its loads of a patch."""
        units, words = 1 if self.channels_last else 2, self.element_units  # at a time, and registers of a unit
        if self.vector_loads:
            words = 4
        elif self.wide * self.itemsize > 4:
            words *= self.wide
        turns = -(-self.spots * self.units // units // _LOADERS)
        return -(-turns // (_LOADED_WORDS[self.channels_last] // (units * words)))

    @property
    def _other_bytes(self) -> int:
        """Bytes beside the stages: two barriers, places of a patch in the input, outputs that are turned round."""
        lines = 8 * self.blocks * 2 // self.inner if self.staged else 0  # of each of 8 warps
        outputs = 8 * lines * (32 + 8 * self.inner) * self.itemsize
        return 2 * _BARRIER_BYTES + self.spots * _PLACE_BYTES + outputs

    @cached_property
    def stages(self) -> Pair | None:
        """Stages of inputs and of weights; None where two and three do not fit."""
        for patches in (3, 2):
            left = SHARED_BYTES - self._other_bytes - patches * (self.patch_bytes + 2 * _BARRIER_BYTES)
            weights = min(_MOST_STAGES, left // (self.weight_bytes + 2 * _BARRIER_BYTES))
            if weights >= (4 if patches == 3 else 3):
                return patches, weights
        return None

    @property
    def shared_bytes(self) -> int:
        assert self.stages is not None
        patches, weights = self.stages
        stages = patches * (self.patch_bytes + 2 * _BARRIER_BYTES) + weights * (self.weight_bytes + 2 * _BARRIER_BYTES)
        return stages + self._other_bytes

    @property
    def lead(self) -> int:
        """Steps by which one warpgroup is ahead of the other: fewer than stages hold, or both would wait for ever."""
        assert self.stages is not None
        return max(0, min(self.stages[1], self.stages[0] * min(self.set_steps)) - 1)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weights as they are laid out."""
        matrices = sum(map(len, self.steps)) * self.channel_sets * self.chunks * self.problem.groups
        return matrices * self.weight_bytes

    @property
    def possible(self) -> bool:
        """Whether registers, shared memory and tables hold it."""
        return (
            (self.blocks + self.split) * self.columns <= _WIDEST
            and self.span[1] <= PHASE_BASE
            and 2 * sum(map(len, self.steps)) + (self.slots + 1) * len(self.phases) <= _MOST_ENTRIES
            and self.stages is not None
        )

    @property
    def cycles(self) -> float:
        """Roughly the cycles of the launch; not yet measured.

        A block's tensor cores are busy, or its loads take longer, or its stores; blocks take the same number of items.
        """
        products = self.units // 2 * (3 if self.split else 1)
        steps = sum(map(len, self.steps)) / self.phase_sets * self.chunks  # of an item
        busy = 2 * steps * (products * self.columns * _CYCLES_A_COLUMN / _EFFICIENCY + _STEP_CYCLES)
        loaded = self.chunks * self.patch_bytes / self.parts * math.prod(self.unit) + steps * self.weight_bytes
        stored: float = self.tile * self.rows * self.blocks * self.itemsize
        if not self.channels_last:  # sectors that are not stored whole
            stored *= max(1.0, self.span[1] / self.inner) * max(1.0, 32 / (8 * self.span[1] * self.itemsize))
        stores = self.blocks * self.columns / 2 * _STORE_CYCLES
        item = max(busy + stores, (loaded + 2 * stored) / _BYTES_A_CYCLE)
        item = max(item, self.chunks * self.batches * _BATCH_CYCLES)
        return _START_CYCLES + -(-self.items // MULTIPROCESSORS) * item


@lru_cache(maxsize=1024)
def _axis_shifts(problem: Problem, direction: Direction, axis: int, phase: int) -> tuple[int, ...]:
    """The shifts from a cell's first input to those that reach one of its outputs."""
    stride = problem.stride[axis]
    if direction == "input_grad":
        first, dilation = phase * stride - problem.padding[axis], problem.dilation[axis]
        return tuple(first + tap * dilation for tap in range(problem.kernel_size[axis]))
    return tuple(sorted(shift + phase // stride for shift in phase_shifts(problem, axis)[phase % stride]))


@lru_cache(maxsize=1024)
def _reach(problem: Problem, direction: Direction, axis: int, unit: int, span: int) -> Pair:
    shifts = [shift // unit for phase in range(span) for shift in _axis_shifts(problem, direction, axis, phase)]
    return min(shifts), max(shifts)


@lru_cache(maxsize=1024)
def _phases(span: Pair, slots: int) -> tuple[tuple[Pair | None, ...], ...]:
    height, width = span
    across = -(-width // slots) * slots  # slots do not go on in the next row
    return tuple(
        tuple((row, column) if column < width else None for column in range(first, first + slots))
        for row in range(height)
        for first in range(0, across, slots)
    )


@lru_cache(maxsize=1024)
def _steps(
    problem: Problem, direction: Direction, phases: tuple[tuple[Pair | None, ...], ...]
) -> tuple[tuple[Pair, ...], ...]:
    found = []
    for block in phases:
        shifts: set[Pair] = set()
        for phase in block:
            if phase is not None:
                rows, columns = (_axis_shifts(problem, direction, axis, phase[axis]) for axis in (0, 1))
                shifts.update(itertools.product(rows, columns))
        found.append(tuple(sorted(shifts)))
    return tuple(found)


@lru_cache(maxsize=1024)
def plan_of(problem: Problem, direction: Direction, itemsize: int, split: bool, channels_last: bool) -> Plan | None:
    """The plan for a problem: a pure function of it. None where it is not for this kernel."""
    plans = plans_of(problem, direction, itemsize, split, channels_last)
    return min(plans, key=lambda plan: plan.cycles, default=None)


def plans_of(problem: Problem, direction: Direction, itemsize: int, split: bool, channels_last: bool) -> Iterator[Plan]:
    """The plans that a problem may have: those that fit registers, shared memory and constant memory."""
    smallest = Plan(problem, direction, itemsize, split, channels_last, (1, 1), 1, 1, 32, 1, 2, 1)
    channels = smallest.out_channels
    for multiple, slots, blocks in _left_sides(smallest.span[1], channels):
        cells = replace(smallest, multiple=multiple).cells[1]
        strips = {1, *(-(-cells // width) for width in (14, 30, 62, 94, 126, 254) if width < cells)}
        beside = (1, 2) if slots == 1 and channels > _BLOCK_ROWS else (1,)
        for columns, warpgroups_m, units, strip in itertools.product(
            range(32, _WIDEST // blocks + 1, 32), beside, (2, 4, 8), strips
        ):
            plan = replace(
                smallest,
                multiple=multiple,
                slots=slots,
                blocks=blocks,
                columns=columns,
                warpgroups_m=warpgroups_m,
                units=units,
                strips=strip,
            )
            if plan.possible:
                yield plan


def _left_sides(span: int, channels: int) -> Iterator[tuple[Pair, int, int]]:
    """Multiples of the smallest cell, slots of an M block, M blocks of a warpgroup.

    Args:
        span: outputs across of the smallest cell.
        channels: output channels of a group.
    """
    yield (1, 1), 1, 1
    if span % 2 == 0:
        yield (1, 1), 1, 2
    for slots in (2, 3, 4):
        if slots * channels > _BLOCK_ROWS:
            break
        if span >= slots:
            yield (1, 1), slots, 1
        elif slots % span == 0:
            yield (1, slots // span), slots, 1
