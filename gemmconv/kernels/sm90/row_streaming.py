"""What sm90/gemm_fold_rows.cu and sm90/gemm_fold_rows_tf32.cu go about alike: rows of cells, taps, the launches.

Words are those of the kernels' headers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, cast

import torch

from gemmconv.geometry import Pair, Problem
from gemmconv.kernels.base import (
    Config,
    Pass,
)
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, table
from gemmconv.kernels.pass_geometry import Gathering
from gemmconv.kernels.program import Launch, Params, Program, TensorMapSpec, gathering, reciprocal
from gemmconv.kernels.sm90.base import Sm90Kernel
from gemmconv.kernels.weights import pack

LONGEST_BOX = 256  # of a tensor map: elements that a box reaches over
BARRIER_BYTES = 8
_DEVICE = costs_of("device")
_PIECE_BYTES = 16  # that lie together in memory
_CARRIED = 8  # columns of the step before
_LONGEST_STEP = 8  # of a tensor map: from one element of a box to the next
_MOST_FETCHED, _FETCHED_AHEAD = 256, 16 << 20  # bytes of a line; of all lines that are gone along
_MOST_SPAN = 4  # outputs of a cell across: folds of more take the compiler up to 12 s, and lose
_THREADS = 384
_INT32_MAX = 2**31 - 1


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


class RowGathering(Gathering):
    """What a block does that goes along rows of cells, some columns of the input a step.

    Attributes:
        itemsize: bytes of an element.
        source: of the kernel that does it, in csrc/.
        columns: inputs of a row of a step.
        rows: of cells of an item.
        multiprocessors: of the GPU: as many blocks run at once.
    """

    itemsize: ClassVar[int]
    source: ClassVar[str]
    of_layer: ClassVar[tuple[str, ...]] = (
        "taps_across",
        "delayed",
        "given",
        "taps_down",
        "row_step",
        "first_rows",
        "input_rows",
        "compiled",
        "packing",
    )  # what does not depend on sizes
    columns: int
    rows: int
    multiprocessors: int

    def sized(self, problem: Problem) -> Any:
        """The same tile for other images of the layer, whose rows are whole pieces too."""
        one = replace(cast(Any, self), problem=problem)
        vars(one).update((name, getattr(self, name)) for name in self.of_layer)
        return one

    @property
    def piece(self) -> int:
        """Elements that lie together."""
        return _PIECE_BYTES // self.itemsize

    @property
    def span(self) -> Pair:
        """Outputs of a cell."""
        return self.problem.stride if self.direction == "forward" else (1, 1)

    @property
    def set_outs(self) -> int:
        """Output channels of a set."""
        raise NotImplementedError

    @property
    def channels(self) -> int:
        """Input channels, up to what products take."""
        raise NotImplementedError

    @property
    def channel_sets(self) -> int:
        return -(-self.out_channels // self.set_outs)

    @property
    def sets(self) -> int:
        """Parts of the weights that blocks keep, of all groups."""
        return self.problem.groups * self.span[0] * self.channel_sets

    # Taps across: the fold.

    @cached_property
    def taps_across(self) -> tuple[Tap, ...]:
        return taps_of(self.problem, self.direction, 1)

    @cached_property
    def delayed(self) -> int:
        """Inputs that cells come later than columns: of those that let all taps be 0 to 8 late, the best to store."""
        shifts = [tap.shift for tap in self.taps_across]
        possible = range(max(0, *shifts), min(shifts) + _CARRIED + 1)
        return max(possible, key=lambda delayed: (math.gcd(self.piece, delayed * self.span[1]), -delayed))

    @property
    def delays(self) -> list[int]:
        """Of each tap."""
        return [self.delayed - tap.shift for tap in self.taps_across]

    @cached_property
    def given(self) -> list[int]:
        """From how many lanes before an output channel's two cells of a lane get something, of each phase and cell."""
        taps = list(zip(self.taps_across, self.delays, strict=True))
        lanes = {(tap.phase, e, (delay + (e + delay) % 2 - e) // 2) for tap, delay in taps for e in (0, 1)}
        return [distance for _, _, distance in lanes]

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
        """From one input row of an item to the next: one where several rows of cells read them."""
        stride, dilation = self.problem.stride[0], self.problem.dilation[0]
        steps = dilation if self.direction == "input_grad" else dilation // math.gcd(stride, dilation)
        return 1 if self.rows > 1 or self.weight_rows == 1 else steps

    @cached_property
    def first_rows(self) -> list[int]:
        """From an item's first cell to its first input row, of each row phase."""
        return [min(tap.shift for tap in taps) for taps in self.taps_down]

    @cached_property
    def input_rows(self) -> int:
        """Rows of the input that an item reads, of the row phase that reads most."""
        reaches = [max(tap.shift for tap in taps) - min(tap.shift for tap in taps) for taps in self.taps_down]
        return (max(reaches) + self.rows - 1) // self.row_step + 1

    # Steps along a row, and items.

    @property
    def kept(self) -> int:
        """Outputs of a row that may be stored later than what is beside them."""
        return 0

    @property
    def steps(self) -> int:
        cells = self.cells[1] + self.delayed + -(-self.kept // self.span[1])
        return -(-cells // self.columns)

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

    # Memory.

    @property
    def weight_bytes(self) -> int:
        """Weights of a set."""
        raise NotImplementedError

    @property
    def shared_bytes(self) -> int:
        raise NotImplementedError

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weights as they are laid out."""
        return self.sets * self.weight_bytes

    @property
    def box(self) -> tuple[int, int, int]:
        """Columns, channels and rows that are copied together."""
        raise NotImplementedError

    @property
    def addressable(self) -> bool:
        """Whether boxes and integers hold it."""
        boxes = self.input_rows * self.row_step <= LONGEST_BOX and self.row_step <= _LONGEST_STEP
        last = (self.cells[0] + self.rows) * self.span[0], (self.steps + 1) * self.columns * self.span[1]
        return boxes and max(self.items + self.multiprocessors, self.packed_bytes // 16, *last) <= _INT32_MAX

    @cached_property
    def cycles(self) -> float:
        """Roughly the cycles of a call, its launches among them."""
        raise NotImplementedError

    @property
    def seconds(self) -> float:
        """Roughly the seconds of a call."""
        return self.cycles / _DEVICE.clock

    @property
    def moved_cycles(self) -> float:
        """Of moving the inputs and outputs of a call."""
        pixels = self.in_channels * math.prod(self.input_size) + self.out_channels * math.prod(self.output_size)
        return self.cycles_of_bytes(self.problem.batch * self.problem.groups * pixels * self.itemsize)

    @staticmethod
    def cycles_of_bytes(count: int) -> float:
        """Of reading or writing so many bytes of memory."""
        return count / _DEVICE.rows_memory_rate * _DEVICE.clock

    @property
    def macros(self) -> Macros:
        """Macros of the kernel, beside those of all."""
        raise NotImplementedError

    @property
    def packed_as(self) -> Macros:
        """SLOTS, which taps across are in, and other macros of csrc/weights/pack.cu that say how rows are ordered."""
        raise NotImplementedError

    @cached_property
    def compiled(self) -> Macros:
        """Macros of the kernel but the type of elements, which depend on the layer and the fields of the tile alone."""
        return {
            "IN_CHANNELS": self.in_channels,
            "OUT_CHANNELS": self.out_channels,
            "CHANNELS": self.channels,
            "CHANNEL_SETS": self.channel_sets,
            "PHASES": self.span[0],
            "WEIGHT_ROWS": self.weight_rows,
            "SPAN_W": self.span[1],
            "ROWS": self.rows,
            "DELAYED": self.delayed,
            "DELAY": table(self.delays + [0] * self._pads),
            "PHASE": table([tap.phase for tap in self.taps_across] + [-1] * self._pads),
            "INPUT_ROWS": self.input_rows,
            "FIRST_ROW": table(self.first_rows),
            "SHARED_BYTES": self.shared_bytes,
            **self.macros,
        }

    @cached_property
    def packing(self) -> Macros:
        """The same of csrc/weights/pack.cu: sets of steps are row phases, steps taps down and tiles of taps across."""
        slots, width = int(self.packed_as["SLOTS"]), self.problem.kernel_size[1]
        across = [tap.tap for tap in self.taps_across] + [-1] * self._pads
        tiles = [across[first : first + slots] for first in range(0, len(across), slots)]
        sets = (
            [[kh.tap * width + kw if kh and kw >= 0 else -1 for kw in tile] for kh in down for tile in tiles]
            for down in ([*taps, *[None] * (self.weight_rows - len(taps))] for taps in self.taps_down)
        )
        others: Macros = {
            "INPUT_GRAD": int(self.direction == "input_grad"),
            "IN_CHANNELS": self.in_channels,
            "OUT_CHANNELS": self.out_channels,
            "TAPS": self.problem.taps,
            "UNITS": self.channels // self.piece,
            **self.packed_as,
        }
        return pack.macros_of(sets, others)

    @property
    def _pads(self) -> int:
        """Places for taps across that have none."""
        return -len(self.taps_across) % int(self.packed_as["SLOTS"])

    @property
    def input_map(self) -> TensorMapSpec:
        """The tensor map of the inputs: [images][rows][channels][columns]."""
        p, (height, width) = self.problem, self.input_size
        channels = self.in_channels * p.groups
        row, plane = width * self.itemsize, height * width * self.itemsize
        sizes, strides = (width, channels, height, p.batch), (plane, row, channels * plane)
        box, steps = (*self.box, 1), (1, 1, self.row_step, 1)
        return TensorMapSpec("input", self.itemsize, sizes, strides, box, steps, fetched=self.fetched)

    @property
    def fetched(self) -> int:
        """Bytes of a line that the L2 cache fetches together: few where what all blocks wait for would not stay there.

        On an H200, blocks that go along ten rows of 64 channels each (KernelBench 57) wait for 22 MB; with outputs
        written at the same time some of it was fetched twice.
        """
        lines = self.blocks_on(self.multiprocessors) * self.sets * self.input_rows * self.in_channels
        return _MOST_FETCHED if lines * _MOST_FETCHED <= _FETCHED_AHEAD else _MOST_FETCHED // 2


def taps_of(problem: Problem, direction: Pass, axis: int) -> tuple[Tap, ...]:
    """The taps of an axis.

    >>> taps_of(Problem(1, 1, 1, 1, (8, 8), (3, 3), stride=(2, 2), padding=(1, 1)), "forward", 0)
    (Tap(tap=0, phase=1, shift=1), Tap(tap=1, phase=0, shift=0), Tap(tap=2, phase=1, shift=0))
    """
    p = problem
    return _taps_of(direction, p.kernel_size[axis], p.stride[axis], p.padding[axis], p.dilation[axis])


@lru_cache(maxsize=1024)
def _taps_of(direction: Pass, kernel_size: int, stride: int, padding: int, dilation: int) -> tuple[Tap, ...]:
    found = []
    for tap in range(kernel_size):
        place = tap * dilation - padding
        if direction == "forward":
            found.append(Tap(tap, place % stride, -(place // stride)))
        else:
            found.append(Tap(tap, 0, place))
    return tuple(found)


def may_gather(problem: Problem, direction: Pass) -> bool:
    """Whether rows of a problem may be gone along: every phase has a tap, and none is later than is carried."""
    p = problem
    if p.batch == 0 or p.stride[1] > _MOST_SPAN or (direction == "input_grad" and p.stride != (1, 1)):
        return False
    for axis in (0, 1) if direction == "forward" else ():
        if len({tap.phase for tap in taps_of(p, direction, axis)}) < p.stride[axis]:
            return False  # outputs that hold the bias alone
    shifts = [tap.shift for tap in taps_of(p, direction, 1)]
    return max(0, *shifts) - min(shifts) <= _CARRIED


def macros_of(tile: RowGathering, dtype: torch.dtype) -> Macros:
    """Macros that specialise the kernel."""
    return {"ELEMENT_T": ELEMENT_TYPES[dtype], **tile.compiled}


def packing_macros_of(tile: RowGathering, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/weights/pack.cu."""
    return {"ELEMENT_T": ELEMENT_TYPES[dtype], **tile.packing}


class RowStreamingKernel(Sm90Kernel):
    """What both kernels are to the registry."""

    directions = ("forward", "input_grad")
    serves = "wide rows of whole 16 bytes, phases that all have taps, few taps and a stride of at most four across"
    only_in = torch.contiguous_format

    def seconds(self, config: Config, direction: Pass, tile: RowGathering) -> float:
        return tile.seconds

    def fitted(self, config: Config, direction: Pass, tile: RowGathering) -> RowGathering | None:
        sized = tile.sized(config.problem)
        return (
            sized if config.problem.batch > 0 and sized.input_size[1] % tile.piece == 0 and sized.addressable else None
        )

    def workspace_bytes(self, config: Config, direction: Pass, tile: RowGathering) -> int:
        return tile.packed_bytes

    def program(self, config: Config, direction: Pass, tile: RowGathering) -> Program:
        params: Params = {
            "map": tile.input_map,
            "packed": "packed",
            "bias, output": ("bias" if tile.direction == "forward" else None, "output"),
            "by_image_items": reciprocal(tile.image_items),
            "groups, columns": (config.problem.groups, tile.multiplied),
            "h_out, w_out": tile.output_size,
            "cells_h, image_items, items, steps": (tile.cells[0], tile.image_items, tile.items, tile.steps),
        }
        grid, block = (tile.blocks_on(config.spec.multiprocessors) * tile.sets, 1, 1), (_THREADS, 1, 1)
        launches = (
            pack.packing(packing_macros_of(tile, config.dtype), config.problem.groups),
            Launch(
                f"{tile.source}.cu",
                macros_of(tile, config.dtype),
                grid,
                block,
                params,
                tile.shared_bytes,
                overlaps=True,
            ),
        )
        return gathering(config, tile.direction, launches, {"packed": tile.packed_bytes})
