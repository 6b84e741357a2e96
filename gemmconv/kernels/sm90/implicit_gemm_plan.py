"""How csrc/sm90/implicit_gemm.cu goes about a problem: cells, M blocks, strips, tiles and stages. Pure integers.

Words are those of the kernel's header. The kernel gathers outputs from inputs; which tensors these are depends on the
direction. The input gradient of a transposed convolution is a convolution: its inputs are those of grad_output.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gemmconv.device import REFERENCE
from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property, changed
from gemmconv.kernels.base import Pass
from gemmconv.kernels.integers import covering, even_share, up_to_multiple
from gemmconv.kernels.phases import Gathering, axis_taps
from gemmconv.kernels.sm90.base import LONGEST_BOX, SHARED_BYTES
from gemmconv.kernels.sm90.implicit_gemm_cost import cost_of_boxes, cost_of_lines, cycles_of_batch, item_cycles_of
from gemmconv.kernels.weights.pack import MOST_ENTRIES, ROWS_CHANNELS, ROWS_LINES, ROWS_PLAIN, ROWS_SLOTS

_BARRIER_BYTES = 8
_UNIT_BYTES = 16
BLOCK_ROWS, _WARP_ROWS = 64, 16
# Least bytes of a line that is stored, if possible; the latter for 16 bits and several neighbours of a thread. Memory
# is slow if many pieces are written together, whatever their size; with boxes, stages matter more.
_LINE_BYTES, _LONG_LINE_BYTES = 128, 256
WIDEST = 256  # columns of all accumulators of a warpgroup: 128 registers of a thread
MOST_COLUMNS = 192  # of one instruction: a kernel of 512 threads cannot name more registers
_PLACE_BYTES, _SPOT_BYTES = 2 * 8, 2 * 4  # in two tables, of at most 64 bits each, and of 32
_LANDING_BYTES = 24 << 10  # that are on their way at least, where that is possible, and that a stage has at most
_MOST_LANDINGS = 6
_MOST_STAGES = 24
# Stages of inputs, and the fewest of weights that come again and again beside them; of boxes, where chunks have few
# steps, and where they have many.
_STAGES = {4: _MOST_STAGES, 3: 8, 2: 3}
_BOX_STAGES = {6: 6, 5: 5, 4: 5, 3: 3, 2: 3}, {6: 6, 5: 6, 4: 8, 3: 8, 2: 3}
_MANY_STEPS = 8
_BOX_ALIGNMENT = 128  # bytes
_MOST_BOXES, _LONGEST_STEP = 32, 8  # of lines, of a patch: a lane has one; from one line of a box to the next
_NARROW = 30  # cells of a strip, which are then not always whole vectors of outputs
_SPARE_ROWS = 3  # of a strip, beside those that it needs
FEW_LOADERS, MANY_LOADERS = 96, 224  # threads; few where inputs come as boxes alone
_MOST_ENTRIES, _MOST_STEPS = 12_000, 900  # of all tables in 64 KiB of constant memory; of offsets, in 4 KiB of params
PHASE_BASE = 1 << 12  # a phase is a number: row * PHASE_BASE + column
# Where planes lie multiples of so many pixels apart, sectors that two strips share were 10 to 25% slower than others
# (1024 x 1024, 1024 x 2048); with 512 x 1024 and less, or 1080 x 1920, they were as fast or faster.
_CONFLICTING_PIXELS = 1 << 20
STORED_POSITIONS = 8  # that are stored together where they do not go by way of shared memory
_LINED_VECTOR = 4  # outputs that warps with whole rows store together at least; else M blocks of all phases are faster

PAIR_NONE, PAIR_BLOCKS, PAIR_ROWS = range(3)

Way = Literal["loaded", "landing", "lines"]
Axis = tuple[int, int, int, int]  # taps, stride, padding, dilation
Steps = dict[Pair, tuple[int, ...]]  # by the shift, the tap that reaches each slot of each side, -1 for none


@dataclass(frozen=True)
class Plan(Gathering):
    """One way to go about a problem. The defaults are those of the smallest plan."""

    problem: Problem  # the geometry
    direction: Pass  # "forward" or "input_grad"
    itemsize: int  # bytes of an element
    split: bool  # whether float32 is split into two parts of TF32
    channels_last: bool  # format of input and output
    # how many times the smallest cell a cell is, per axis. The smallest has one input, or one output of an input
    # gradient, and as many of the other as the stride says.
    multiple: Pair = (1, 1)
    slots: int = 1  # output phases of an M block, which are neighbours in a row of cells
    blocks: int = 1  # M blocks of a warpgroup, which are neighbouring column phases
    columns: int = 32  # positions that an M block is multiplied with at a time, a multiple of 32
    warpgroups_m: int = 1  # warpgroups with M blocks of their own, 1 or 2
    # warpgroups with phases of their own, 1 or 2; where it is 1, they have output channels of their own
    phase_sides: int = 1
    units: int = 2  # 16-byte units of channels of a chunk: 2, 4 or 8
    strips: int = 1  # into how many strips an image is cut
    wide: int = 1  # inputs beside each other in a row that are taken together
    # how inputs come into shared memory. "loaded" through registers, or "landing" there as they lie in memory, to be
    # laid out by threads. Or "lines" of channels_last come to where products read them, as boxes of a tensor map.
    way: Way = "loaded"
    loaders: int = MANY_LOADERS  # threads that load inputs, 96 or 224
    multiprocessors: int = REFERENCE.multiprocessors  # of the GPU: as many blocks run at once
    # the plan for other sizes that the kernel was compiled for; None if it is compiled for this one
    compiled: Plan | None = None

    @property
    def landing(self) -> bool:
        return self.way == "landing"

    # Phases and output channels: the left sides.

    @cached_property
    def span(self) -> Pair:
        """Outputs of a cell, per axis."""
        (height, width), (stride_h, stride_w) = self.multiple, self.problem.stride
        return (height * stride_h, width * stride_w) if self.direction == "forward" else self.multiple

    @cached_property
    def cells(self) -> Pair:
        """Cells of an image, down and across, that have outputs."""
        return covering(self.output_size, self.span)

    @cached_property
    def channels(self) -> int:
        """Output channels of an M block."""
        return min(BLOCK_ROWS // self.slots, self.out_channels)

    @cached_property
    def lined(self) -> bool:
        """Whether warps have whole rows of cells, since no M block has all channels of several phases."""
        return not self.channels_last and self.slots > 1 and self.slots * self.out_channels > BLOCK_ROWS

    @cached_property
    def channel_sets(self) -> int:
        """Into how many parts the output channels are cut, each an M block of one warpgroup or of both."""
        return -(-self.out_channels // (self.channels * (self.warpgroups_m // self.phase_sides)))

    @cached_property
    def phases(self) -> tuple[tuple[Pair | None, ...], ...]:
        """The phases of each M block, those of a phase set one after the other; None where a slot is left over."""
        return _phases(self.span, self.slots)

    @cached_property
    def phase_sets(self) -> int:
        return len(self.phases) // (self.blocks * self.phase_sides)

    @cached_property
    def pairing(self) -> int:
        """Where a thread has neighbouring outputs."""
        if self.lined:
            return PAIR_NONE
        if self.blocks > 1 and not self.channels_last:
            return PAIR_BLOCKS
        return PAIR_ROWS if (self.channels if self.channels_last else self.slots) % 2 == 0 else PAIR_NONE

    @cached_property
    def inner(self) -> int:
        """Neighbouring outputs of a thread, of a cell."""
        return {PAIR_NONE: 1, PAIR_ROWS: 2, PAIR_BLOCKS: self.blocks}[self.pairing]

    @property
    def row_order(self) -> int:
        """How rows g and g + 8 of an M block belong together."""
        if self.lined:
            return ROWS_LINES
        if self.pairing != PAIR_ROWS:
            return ROWS_PLAIN
        return ROWS_CHANNELS if self.channels_last else ROWS_SLOTS

    @cached_property
    def staged(self) -> bool:
        """Whether outputs go by way of shared memory: a warp has runs of a row of cells, or pieces of channels."""
        if not self.channels_last:
            return self.lined or self.span[1] == self.inner
        return self.channels % self.element_units == 0 and self.out_channels % self.element_units == 0

    @cached_property
    def line_cells(self) -> int:
        """Cells of a line, of what a warp has of a row of the output, which are turned round together."""
        if self.lined:
            return _WARP_ROWS // self.blocks
        long = self.itemsize == 2 and self.inner > 1 and self.way != "lines"
        cells, wanted = 8, _LONG_LINE_BYTES if long else _LINE_BYTES
        while cells * self.inner * self.itemsize < wanted and self.columns % (2 * cells) == 0:
            cells *= 2
        return cells

    @property
    def vector(self) -> int:
        """Outputs that a thread stores together."""
        return (self.compiled or self).most_vector

    @cached_property
    def most_vector(self) -> int:
        """The most outputs that a thread may store together."""
        if self.channels_last:
            return self.element_units if self.staged else math.gcd(self.inner, self.out_channels)
        width, cells = self.output_size[1], self.strip_cells if self.strips > 1 else 0
        if self.staged:
            return math.gcd(width, cells * self.span[1], self.pitch * self.span[1], 4)
        return math.gcd(self.inner, width, self.span[1])

    # Shifts: the reduced extent.

    @cached_property
    def steps(self) -> tuple[Steps, ...]:
        """The steps of each block of each phase set: the shifts of any phase of its M block, or of either side's."""
        p = self.problem
        rows, columns = zip(p.kernel_size, p.stride, p.padding, p.dilation, strict=True)
        return _steps(self.direction, rows, columns, self.span, self.slots, self.blocks, self.phase_sides)

    @cached_property
    def _reach(self) -> tuple[Pair, Pair]:
        """The least and the largest shift of each axis, in units."""
        return self._reach_of(0), self._reach_of(1)

    def _reach_of(self, axis: int) -> Pair:
        p, unit, multiple = self.problem, self.unit[axis], self.multiple[axis]
        first, stride = -p.padding[axis], p.stride[axis]  # where the first tap is
        last = first + (p.kernel_size[axis] - 1) * p.dilation[axis]
        if self.direction == "forward":
            return -(last // stride) // unit, (multiple - 1 - first // stride) // unit
        return first // unit, ((multiple - 1) * stride + last) // unit

    @cached_property
    def element_units(self) -> int:
        """Elements of a unit."""
        return _UNIT_BYTES // self.itemsize

    @cached_property
    def set_steps(self) -> list[int]:
        """Steps of each phase set, of a chunk."""
        return [sum(map(len, self.steps[i : i + self.blocks])) for i in range(0, len(self.steps), self.blocks)]

    @cached_property
    def all_steps(self) -> int:
        """Steps of all phase sets, of a chunk."""
        return sum(self.set_steps)

    @property
    def item_steps(self) -> float:
        """Steps of an item, of all its chunks: the mean of all phase sets."""
        return self.all_steps / self.phase_sets * self.chunks

    @cached_property
    def chunks(self) -> int:
        """Chunks of the input channels of a group."""
        return -(-self.in_channels // (self.units * self.element_units))

    # Strips and positions: the right sides.

    @cached_property
    def unit(self) -> Pair:
        """Inputs of a cell, per axis."""
        (height, width), (stride_h, stride_w) = self.multiple, self.problem.stride
        return self.multiple if self.direction == "forward" else (height * stride_h, width * stride_w)

    @cached_property
    def strip_cells(self) -> int:
        """Cells across of a strip, the last of which may have fewer; even where there are several strips."""
        if self.strips == 1:
            return self.cells[1]
        cells = -(-self.cells[1] // self.strips)
        return up_to_multiple(cells, 2 if self.way == "lines" or cells <= _NARROW else 4)

    @property
    def planes_conflict(self) -> bool:
        """Whether planes of outputs lie so far apart that the same places of all of them meet in memory."""
        return not self.channels_last and math.prod(self.output_size) % _CONFLICTING_PIXELS == 0

    def _least_pitch(self, axis: int) -> int:
        """Positions of an image along an axis, where what lies beyond either end is the same gap."""
        inputs, (first, last) = -(-self.input_size[axis] // self.unit[axis]), self._reach[axis]
        return max(inputs - min(0, first), self.cells[axis] + max(0, last))

    @cached_property
    def pitch(self) -> int:
        """Positions from one row of a strip to the next."""
        least = self._least_pitch(1) if self.strips == 1 else self.strip_cells + self._reach[1][1] - self.origin[1]
        if self.way == "lines":
            return least
        return up_to_multiple(least, 2 if least == self.input_size[1] else max(2, self.neighbours))

    @cached_property
    def strip_rows(self) -> int:
        """Rows of positions from one strip to the next: a few more where what comes as boxes then is less."""
        rows = self._least_pitch(0)
        return min(range(rows, rows + _SPARE_ROWS + 1), key=self._cost_of_rows) if self.way == "lines" else rows

    def _cost_of_rows(self, rows: int) -> float:
        """In proportion to what an image takes whose strips have so many rows of positions."""
        positions = math.prod(self._line_box_of(rows))
        boxes = _boxes_of(self.tile, self.first, self.patch, positions) * math.prod(self.unit)
        return rows * cost_of_lines(self, boxes, boxes * positions * self.units * _UNIT_BYTES)

    @property
    def neighbours(self) -> int:
        """Neighbouring positions that are loaded together: one where these are of neighbouring planes."""
        return self.wide if self.unit[1] == 1 else 1

    @property
    def aligned(self) -> bool:
        """Whether inputs that are loaded together lie aligned in memory, all of them in the image or none."""
        if self.wide == 1:
            return True
        if self.channels_last or self.unit[1] > 2:
            return False
        height, width = self.input_size
        if width % self.wide == 0:
            return True
        return self.whole_images and height * width % self.wide == 0 and self.strip_rows * width % self.wide == 0

    @cached_property
    def whole_images(self) -> bool:
        """Whether rows follow each other without gaps: an image is one long row."""
        return self.strips == 1 and self.unit == (1, 1) and self.pitch == self.input_size[1]

    @cached_property
    def origin(self) -> Pair:
        """The input, in units, of a strip's first position."""
        if self.strips == 1:
            return 0, 0
        return 0, self._reach[1][0] // self.neighbours * self.neighbours

    def _place(self, row: int, column: int) -> int:
        """Positions from a cell to the input at a shift in units, in its plane."""
        top, left = self.origin
        return (row - top) * self.pitch + column - left

    @cached_property
    def places(self) -> Pair:
        """The least and the largest place of an input relative to its cell."""
        # Every row shift goes with every column shift, if not for the same phase.
        (first_row, last_row), (first, last) = self._reach
        return self._place(first_row, first), self._place(last_row, last)

    @property
    def tile(self) -> int:
        """Positions of a tile."""
        return 2 // self.warpgroups_m * self.columns

    @cached_property
    def first(self) -> int:
        """The first position of a tile's inputs, relative to its first cell."""
        return self.places[0] // self.neighbours * self.neighbours

    @cached_property
    def patch(self) -> int:
        """Positions of a tile's inputs, of each plane."""
        return up_to_multiple(self.tile + self.places[1] - self.first, self.neighbours)

    @cached_property
    def unit_pitch(self) -> int:
        """Positions from one unit of a patch to the next: units that threads store together begin in other banks."""
        positions, apart = math.prod(self.unit) * self.plane_pitch, 0 if self.way == "lines" else 8 // self.units
        return positions + (apart - positions) % 8

    def offset(self, shift: Pair) -> int:
        """Positions from the first of a patch to a tile's first cell's input at a shift."""
        height, width = self.unit
        plane = shift[0] % height * width + shift[1] % width
        return plane * self.plane_pitch + self._place(shift[0] // height, shift[1] // width) - self.first

    @cached_property
    def plane_pitch(self) -> int:
        """Positions from one plane of a patch to the next."""
        return self.boxes * self.box_positions if self.way == "lines" else self.patch

    @cached_property
    def strip_positions(self) -> int:
        """Positions from one strip to the next."""
        return self.strip_rows * self.pitch

    @property
    def image_positions(self) -> int:
        return self.strips * self.strip_positions

    @property
    def strip_tiles(self) -> int:
        """The most tiles that begin in a strip."""
        return -(-self.strip_positions // self.tile)

    @cached_property
    def items(self) -> int:
        """The items that blocks take one after the other."""
        return self._items_of(self.problem.batch)

    def _items_of(self, batch: int) -> int:
        return -(-batch * self.image_positions // self.tile) * self.sets

    # Inputs that come as lines, or that land.

    @property
    def suits_memory(self) -> bool:
        """Whether inputs lie in memory as the way in which they come needs them."""
        if self.way == "loaded":
            return self.aligned
        if self.way == "lines":  # pixels are whole units
            units = self.in_channels * self.problem.groups * self.itemsize % _UNIT_BYTES == 0
            fits = self.pitch * self.unit[1] <= LONGEST_BOX and max(self.unit) <= _LONGEST_STEP
            return self.channels_last and self.wide == 1 and units and (self.whole_images or fits)
        # Planes, and rows of strips, are whole pieces of 16 bytes.
        height, width = self.input_size
        rows = self.strips == 1 or width % self.element_units == 0
        small = height * width + self.run_pitch * self.unit[1] < 1 << 31  # what the kernel adds up
        return self.aligned and not self.channels_last and rows and small and height * width % self.element_units == 0

    @cached_property
    def line_box(self) -> tuple[int, int, int]:
        """Images, rows and positions of a row of a box of lines of a plane: rows of a strip, or all of several images.

        Where rows follow each other without gaps, an image is one row, of which boxes are equal parts; where images do
        as well, a tile is.
        """
        return self._line_box_of(self.strip_rows)

    def _line_box_of(self, strip_rows: int) -> tuple[int, int, int]:
        if self._flat_of(strip_rows):
            return 1, 1, self.tile // -(-self.tile // LONGEST_BOX)
        rows, pitch = (strip_rows * self.pitch, 1) if self.whole_images else (strip_rows, self.pitch)
        most, row_bytes = LONGEST_BOX // self.unit[0], pitch * self.units * _UNIT_BYTES
        most_images = self.problem.batch if self.strips == 1 else 1
        images, rows = _line_box(self.tile, self.first, self.patch, pitch, rows, most, most_images, row_bytes)
        return (images, 1, rows) if self.whole_images else (images, rows, pitch)

    @property
    def flat(self) -> bool:
        """Whether each cell sees the input at its own place alone, and positions are those of images alone."""
        return self._flat_of(self.strip_rows)

    def _flat_of(self, strip_rows: int) -> bool:
        return self.whole_images and self.places == (0, 0) and strip_rows == self.input_size[0]

    @property
    def box_positions(self) -> int:
        return math.prod(self.line_box)

    @property
    def boxes(self) -> int:
        """Boxes of a plane of a patch."""
        return _boxes_of(self.tile, self.first, self.patch, self.box_positions) if self.way == "lines" else 1

    @property
    def _whole_chunks(self) -> bool:
        """Whether a chunk has no channels of another group."""
        return self.problem.groups == 1 or self.in_channels % (self.units * self.element_units) == 0

    @property
    def partial_pieces(self) -> bool:
        """Whether a run may end within a piece."""
        return self.landing and not self.whole_images and self.input_size[1] % self.element_units != 0

    @property
    def run_pitch(self) -> int:
        """Positions from one run of inputs that lie in one piece in memory to the next."""
        return self.strip_positions if self.whole_images else self.pitch

    @cached_property
    def pieces(self) -> int:
        """Pieces of 16 bytes that the inputs of a channel land as."""
        runs = (self.run_pitch + self.patch - 2) // self.run_pitch + 1
        return self.unit[0] * (-(-self.patch * self.unit[1] // self.element_units) + 2 * runs - 1)

    @cached_property
    def landing_units(self) -> int:
        """Units of channels that land together, 0 where none do."""
        if self.compiled:
            return self.compiled.landing_units
        if not self.landing:
            return 0
        most = min(self.units, _LANDING_BYTES // (self.element_units * self.landed_channel_bytes))
        return max((units for units in (2, 4, 8) if units <= most), default=2)

    @property
    def landed_channel_bytes(self) -> int:
        """Bytes of a channel where it lands."""
        return self.pieces * _UNIT_BYTES

    @property
    def landing_bytes(self) -> int:
        """Bytes of a stage of what lands."""
        return self.landing_units * self.element_units * self.landed_channel_bytes

    @cached_property
    def landing_stages(self) -> int:
        """Stages of what lands: one is read, and the others are on their way."""
        if self.compiled:
            return self.compiled.landing_stages
        if not self.landing:
            return 0
        return 3 if 2 * self.landing_bytes >= _LANDING_BYTES else _MOST_LANDINGS

    # Stages in shared memory.

    @property
    def parts(self) -> int:
        return 2 if self.split else 1

    @property
    def patch_bytes(self) -> int:
        """Bytes of a stage of inputs."""
        return self.parts * self.units * self.unit_pitch * _UNIT_BYTES

    @property
    def rounded(self) -> bool:
        """Whether threads round lines where products read them."""
        return self.way == "lines" and self.itemsize == 4

    @property
    def _stage_bytes(self) -> Pair:
        """Bytes of a stage of inputs and of one of weights, with their barriers."""
        barriers = 3 if self.rounded else 2
        return self.patch_bytes + barriers * _BARRIER_BYTES, self.weight_bytes + 2 * _BARRIER_BYTES

    @property
    def rows(self) -> int:
        """Rows of the weights of a step."""
        return self.warpgroups_m * BLOCK_ROWS

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of a stage of weights: those of one step."""
        return self.parts * self.units * self.rows * _UNIT_BYTES

    @cached_property
    def spots(self) -> int:
        """Spots of a patch: ``wide`` inputs each."""
        return self.patch * math.prod(self.unit) // self.wide

    @property
    def vector_loads(self) -> bool:
        """Whether units are vectors in memory."""
        return self.channels_last and self.in_channels % self.element_units == 0

    @property
    def few_loaders(self) -> bool:
        return self.loaders == FEW_LOADERS

    @property
    def batches(self) -> int:
        """How often a thread waits for its loads of a patch."""
        return -(-self.loads // self.together)

    @cached_property
    def together(self) -> int:
        """Units that a thread has on their way: the same number in each batch."""
        if self.compiled:
            return self.compiled.together
        if self.way != "loaded":
            return 0
        # A thread loads as many as fit its registers with addresses. All else has 8 registers fewer, and none spills.
        registers, others, words = self._load_registers
        most = min(words // self._unit_words, (registers - others + 8) // (self._unit_words + 1))
        needed = even_share(self.loads, most)
        return most if 2 * needed > most else -(-most // 2)

    @property
    def sharers(self) -> int:
        """Loaders that share the pieces of a place, at most: a power of two."""
        return 1 << (self.loaders // self.pieces).bit_length() - 1 if self.landing else 0

    @property
    def landed_turns(self) -> int:
        """How often a loader takes up what has landed, at least, as a multiple of four."""
        return 4 * -(-self.spots * self.landing_units // (4 * self.loaders))

    @property
    def loads(self) -> int:
        """Units of spots that a thread loads of a patch, at most."""
        return -(-self.spots * self.units // self.loaders)

    @property
    def _unit_words(self) -> int:
        """Registers of a unit of a spot."""
        return 4 if self.vector_loads else self.element_units * -(-self.wide * self.itemsize // 4)

    @cached_property
    def _load_registers(self) -> tuple[int, int, int]:
        """Registers that two warpgroups with sums leave a thread that loads; for all but that; words loaded at once."""
        sums = (self.blocks + self.split) * self.columns // 2
        registers = 256 - max(144 if self.blocks > 2 else 136, sums + (48 if self.split else 56))
        others = 64 if self.split else 48 if registers == 72 and not self.vector_loads else 56
        return registers, others, min(40 if self.vector_loads else 64, registers // 2, registers - others)

    @cached_property
    def _turned_bytes(self) -> int:
        """Bytes of outputs that are turned round: lines of each of 8 warps."""
        if not self.staged:
            return 0
        if self.channels_last:
            lines, line = 32 // self.itemsize, BLOCK_ROWS + self.element_units  # a quarter of a warpgroup's
        elif self.lined:
            lines, line = _WARP_ROWS // self.slots, self.line_cells * self.span[1] + max(4, self.slots)
        else:
            lines = 8 * self.blocks * 2 // self.inner
            line = self.line_cells * self.inner + (16 if self.inner == 2 else 8)
        return 8 * lines * line * self.itemsize

    @property
    def _other_bytes(self) -> int:
        """Bytes beside the stages: places of inputs, what lands, outputs that are turned round."""
        inputs = self.spots * _PLACE_BYTES if self.way == "loaded" else 0
        if self.landing:
            inputs = self.spots * _SPOT_BYTES + self.landing_stages * self.landing_bytes
        return inputs + self._turned_bytes

    @cached_property
    def stages(self) -> Pair:
        """Stages of inputs and of weights; none where the fewest do not fit."""
        steps, (patch_bytes, weight_bytes) = max(self.set_steps), self._stage_bytes
        most, for_stages = steps * self.chunks, SHARED_BYTES - self._other_bytes
        for patches, least in (_BOX_STAGES[steps >= _MANY_STEPS] if self.way == "lines" else _STAGES).items():
            weights = (for_stages - patches * patch_bytes) // weight_bytes
            if weights >= most and self.sets <= self.multiprocessors:
                return patches, max(1, most)
            if weights >= least:
                return patches, min(_MOST_STAGES, weights)
        return 0, 0

    @cached_property
    def resident(self) -> bool:
        """Whether a block keeps the weights of its set."""
        return self.sets <= self.multiprocessors and self.stages[1] == max(1, max(self.set_steps) * self.chunks)

    @property
    def turns(self) -> bool:
        """Whether the warpgroups multiply by turns: the one stores while the other multiplies."""
        brought = self.way in ("lines", "landing")
        return brought and self.resident and not self.split and self.stages[0] > self.chunks

    @cached_property
    def sets(self) -> int:
        """Sets of all groups."""
        return self.phase_sets * self.channel_sets * self.problem.groups

    def blocks_of(self, items: int, multiprocessors: int) -> int:
        """Thread blocks for so many items: at most one a multiprocessor; each has one set where weights stay."""
        blocks = max(1, min(items, multiprocessors))
        return max(blocks // self.sets, 1) * self.sets if self.resident else blocks

    def items_of_a_block(self, batch: int) -> int:
        """Items that a block takes, at most, of a launch for so many images."""
        items = self._items_of(batch)
        return -(-items // self.blocks_of(items, self.multiprocessors))

    @property
    def shared_bytes(self) -> int:
        return sum(count * size for count, size in zip(self.stages, self._stage_bytes, strict=True)) + self._other_bytes

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weights as they are laid out."""
        return self.all_steps * self.channel_sets * self.chunks * self.problem.groups * self.weight_bytes

    @property
    def possible(self) -> bool:
        """Whether registers, shared memory and tables hold it."""
        return (
            self.columns <= MOST_COLUMNS
            and (self.blocks + self.split) * self.columns <= WIDEST
            and self.span[1] <= PHASE_BASE
            and self.all_steps <= _MOST_STEPS
            and (self.slots + 1) * len(self.phases) <= _MOST_ENTRIES
            and self.all_steps * (2 + self.slots * self.phase_sides) <= MOST_ENTRIES
            and (self.strips - 1) * self.strip_cells < self.cells[1]  # no strip is empty
            and not (self.lined and self.vector < _LINED_VECTOR)
            and self._inputs_fit
            and self.stages > (0, 0)
        )

    @property
    def _inputs_fit(self) -> bool:
        """Whether the threads that load can bring the inputs of a chunk into shared memory."""
        if self.landing:
            return self.pieces <= self.loaders
        if self.way == "loaded":
            registers, _, words = self._load_registers
            return self._unit_words <= min(words, registers // 3)
        if self.units == 2 or not (self._whole_chunks and (self.few_loaders or self.rounded)):
            return False
        boxes, box_bytes = self.boxes * math.prod(self.unit), self.box_positions * self.units * _UNIT_BYTES
        return boxes <= _MOST_BOXES and (boxes == 1 or box_bytes % _BOX_ALIGNMENT == 0)

    @cached_property
    def item_cycles(self) -> float:
        """Roughly the cycles of an item, which hardly depend on the number of images."""
        return item_cycles_of(self)

    @cached_property
    def cycles(self) -> float:
        """Roughly the cycles of the launch, by which plans are chosen."""
        return cycles_of_batch(self, self.problem.batch, self.problem.least_bytes(self.itemsize))

    def fitted(self, problem: Problem) -> Plan | None:
        """The plan for a problem that differs in sizes alone, with as much of what is compiled as these allow.

        None where its patches or strips are more than the plan is for.
        """
        kernel = self.compiled or self
        plan = changed(self, problem=problem, compiled=kernel)
        if self.strips > 1:
            plan = changed(plan, strips=-(-plan.cells[1] // self.strip_cells))
        if not (plan.suits_memory and plan.possible) or plan.most_vector % kernel.vector:
            return None
        if plan.landing and (plan.pieces * kernel.sharers > plan.loaders or plan.landed_turns > kernel.landed_turns):
            return None
        return None if plan.partial_pieces and not kernel.partial_pieces else plan


def _boxes_of(tile: int, first: int, patch: int, positions: int) -> int:
    """The most boxes of so many positions that the patch of a tile has parts of."""
    apart = math.gcd(tile, positions)
    last_start = positions - apart + first % apart  # in its first box
    return (last_start + patch - 1) // positions + 1


@lru_cache(maxsize=1024)
def _line_box(
    tile: int, first: int, patch: int, pitch: int, rows: int, most_rows: int, most_images: int, row_bytes: int
) -> Pair:
    """The images and rows of a box that a patch comes the fastest with: a part of an image's rows, or all of several.

    Args:
        tile, first, patch: positions of a tile, to the first of its patch, and of the patch.
        pitch, rows: positions of a row, rows of an image or a strip.
        most_rows, most_images: of a box.
        row_bytes: bytes of a row.
    """

    def cost(box: Pair) -> tuple[float, int]:
        box_rows = math.prod(box)
        boxes = _boxes_of(tile, first, patch, box_rows * pitch)
        return cost_of_boxes(boxes, boxes * box_rows * row_bytes), boxes * box_rows

    found = [(1, count) for count in range(1, min(rows, most_rows) + 1) if rows % count == 0]
    if rows <= most_rows:
        found += [(count, rows) for count in range(2, min(most_images, LONGEST_BOX, 1 + patch // (rows * pitch)) + 1)]
    aligned = [box for box in found if math.prod(box) * row_bytes % _BOX_ALIGNMENT == 0]
    return min(aligned or found, key=cost)


@lru_cache(maxsize=1024)
def _phases(span: Pair, slots: int) -> tuple[tuple[Pair | None, ...], ...]:
    height, width = span
    across = up_to_multiple(width, slots)  # slots do not go on in the next row
    return tuple(
        tuple((row, column) if column < width else None for column in range(first, first + slots))
        for row in range(height)
        for first in range(0, across, slots)
    )


@lru_cache(maxsize=1024)
def _steps(
    direction: Pass, rows: Axis, columns: Axis, span: Pair, slots: int, blocks: int, sides: int
) -> tuple[Steps, ...]:
    taps_down, taps_across = _taps(direction, rows, span[0]), _taps(direction, columns, span[1])
    phases, found = _phases(span, slots), []
    for first in range(0, len(phases), blocks * sides):
        for block in range(first, first + blocks):
            slots_of_sides: list[dict[Pair, int]] = []
            for phase in itertools.chain(*phases[block : block + blocks * (sides - 1) + 1 : blocks]):
                down, across = (taps_down[phase[0]], taps_across[phase[1]]) if phase else ({}, {})
                pairs = itertools.product(down, across)
                slots_of_sides.append({(row, column): down[row] * columns[0] + across[column] for row, column in pairs})
            shifts = sorted(set().union(*slots_of_sides))
            found.append({shift: tuple([slot.get(shift, -1) for slot in slots_of_sides]) for shift in shifts})
    return tuple(found)


@lru_cache(maxsize=1024)
def _taps(direction: Pass, axis: Axis, span: int) -> list[dict[int, int]]:
    """The taps that reach each of a cell's outputs, by the shifts from its first input to what they read."""
    taps, stride = axis_taps(direction, *axis), axis[1]
    outputs, inputs = (stride, 1) if direction == "forward" else (1, stride)  # of the smallest cell
    return [
        {phase // outputs * inputs + of.shift: of.tap for of in taps if of.phase == phase % outputs}
        for phase in range(span)
    ]
