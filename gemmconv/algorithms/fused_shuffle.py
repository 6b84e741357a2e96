"""How ``fused`` goes about kernels as large as their stride (csrc/fused_shuffle.cu): tiles, estimates, the launch.

It is for 16-bit types, NCHW, one group, kernels whose taps divide 16 and neither overlap nor leave gaps, no padding,
weights whose rows of lines begin at 16 bytes, and images whose pixels are a multiple of four; ``tile_of`` gives None
for others, and where the inputs of a tile do not fit shared memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from gemmconv.algorithms import weight_lines
from gemmconv.algorithms.base import Config, Forward
from gemmconv.algorithms.fused_plan import MULTIPROCESSORS, SHARED_BYTES
from gemmconv.algorithms.launches import params_struct
from gemmconv.algorithms.macros import ELEMENT_TYPES, Macros
from gemmconv.geometry import Pair, Problem

_ITEMSIZE = 2
_WARP_LINES, _BLOCK_LINES = 16, 64
_CHANNELS, _LINE = 64, 64  # of a slot of inputs, and positions that lie in one piece there
_LINE_BYTES = _CHANNELS * _LINE * _ITEMSIZE
_MOST_COLUMNS = 256  # that tensor cores take
_WIDTHS = (64, 96, 128, 160, 192, 224, 256)  # of tiles that are parts of rows
_SETS = (1, 2, 3, 4, 6, 8, 12, 16)
_WARPS = 8  # that multiply and store
_LOADERS = 96  # threads
_REGISTERS = (216, 72)  # of a thread that multiplies, and of others, which give theirs up: of 384 each begins with 168
_MOST_VECTOR = 8  # outputs that a thread stores together
_BARRIER_BYTES = 16  # of a slot or a stage
_MOST_SLOTS, _MOST_STAGES = 12, 4
_BYTES_A_CYCLE = 2_560  # that memory moves
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Tile:
    """What a block of csrc/fused_shuffle.cu does; see its header.

    Attributes:
        problem: the geometry.
        rows: of inputs of an item.
        width: of a row of an item: all of it, or a part where there is one row.
        sets: that lines are divided into, each for other items.
        subs: times 64 channels that a stage of weights has, 1 or 2.
    """

    problem: Problem
    rows: int
    width: int
    sets: int
    subs: int

    @cached_property
    def input_size(self) -> Pair:
        """Rows and columns; one row where rows of inputs are rows of outputs, which then follow each other too."""
        return _input_size(self.problem)

    @property
    def positions(self) -> int:
        return self.rows * self.width

    @property
    def columns(self) -> int:
        """Positions, up to what the tensor core takes."""
        return -(-self.positions // 16) * 16

    @property
    def blocks(self) -> int:
        """Of 64 lines, of a set."""
        return -(-_line_blocks(self.problem) // self.sets)

    @property
    def whole(self) -> bool:
        """Whether an item has whole rows."""
        return self.width == self.input_size[1]

    @property
    def staged_pitch(self) -> int:
        """Elements from one line of outputs to the next: an odd multiple of 8, which spreads lines over banks."""
        return (self.positions + 7) // 16 * 16 + 8

    @property
    def steps(self) -> int:
        """Stages of a block of lines."""
        return -(-self.problem.in_channels // (self.subs * _CHANNELS))

    @property
    def chunks(self) -> int:
        """Slots of an item."""
        return self.steps * self.subs

    @property
    def slot_bytes(self) -> int:
        return -(-self.columns // _LINE) * _LINE_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.subs * _LINE_BYTES

    @property
    def staged_bytes(self) -> int:
        """Of the outputs of all warps."""
        return _WARPS * _WARP_LINES * self.staged_pitch * _ITEMSIZE

    @cached_property
    def ring_sizes(self) -> tuple[int, int] | None:
        """Slots of inputs and stages of weights of a warpgroup, None where they do not fit: an item's inputs must."""
        free = SHARED_BYTES - self.staged_bytes
        slot, stages = self.slot_bytes + _BARRIER_BYTES, 2 * (self.stage_bytes + _BARRIER_BYTES)
        for least, count in ((2 * self.chunks, 2), (self.chunks + 1, 3), (self.chunks, 2)):
            slots = min((free - count * stages) // slot, max(2 * self.chunks, 4), _MOST_SLOTS)
            if slots >= least:  # one stage is not free before the products of the next are begun
                return slots, min((free - slots * slot) // stages, _MOST_STAGES)
        return None

    @property
    def shared_bytes(self) -> int:
        assert self.ring_sizes is not None
        slots, stages = self.ring_sizes
        weights = 2 * stages * (self.stage_bytes + _BARRIER_BYTES)
        return slots * (self.slot_bytes + _BARRIER_BYTES) + weights + self.staged_bytes

    @property
    def items(self) -> int:
        height, width = self.input_size
        return self.problem.batch * -(-height // self.rows) * -(-width // self.width) * self.sets

    @property
    def piece(self) -> int:
        """Inputs that are copied together: items begin at multiples of it."""
        begins = (self.rows * self.width,) if self.whole else (self.width, self.input_size[1])
        return math.gcd(8, self.problem.in_pixels, *begins)

    @property
    def vector(self) -> int:
        """Outputs that are stored together: rows, and what items have of them, are multiples."""
        kernel_w = self.problem.kernel_size[1]
        return kernel_w * math.gcd(_MOST_VECTOR // kernel_w, self.input_size[1], self.width)

    @property
    def threads(self) -> int:
        return 32 + _LOADERS + 32 * _WARPS

    @property
    def possible(self) -> bool:
        if self.items + MULTIPROCESSORS > _INT32_MAX or self.piece < 4:
            return False
        return self.ring_sizes is not None

    @property
    def cycles(self) -> float:
        """Roughly the cycles that a call takes, its launch among them.

        Fitted to 166 tiles of 8 layers on an H100, 11% off as the root mean square of the logarithm; those that it
        chooses take 2% longer than the best of those measured (geometric mean). Memory is an H200's.
        """
        assert self.ring_sizes is not None
        products = 4 * self.chunks * max(self.columns / 2, 32)
        # For weights, where few are on their way.
        waiting = 880 * self.chunks / min(4, self.ring_sizes[1] * self.subs)
        block = 0.49 * products + 0.61 * self.positions + 326 + waiting
        item = 340 + self.blocks * block + 27.6 * self.chunks * self.slot_bytes / 1024
        computed = 9_060 + -(-self.items // MULTIPROCESSORS) * item
        p = self.problem
        elements = math.prod(p.input_shape) + math.prod(p.output_shape) + math.prod(p.weight_shape)
        return math.hypot(computed, elements * _ITEMSIZE / _BYTES_A_CYCLE)


def _input_size(problem: Problem) -> Pair:
    height, width = problem.input_size
    return (1, height * width) if problem.kernel_size[0] == 1 else (height, width)


def _line_blocks(problem: Problem) -> int:
    return -(-problem.out_channels * problem.taps // _BLOCK_LINES)


@lru_cache(maxsize=1024)
def tile_of(problem: Problem) -> Tile | None:
    """The tile for a problem in NCHW: a pure function of it. None where the kernel is not for it."""
    return min(tiles_of(problem), key=lambda tile: tile.cycles, default=None)


def tiles_of(problem: Problem) -> Iterator[Tile]:
    """The tiles that a problem may have: those that fit shared memory."""
    p = problem
    if p.groups > 1 or p.batch == 0 or _WARP_LINES % p.taps or p.kernel_size[1] > _MOST_VECTOR:
        return
    if p.kernel_size != p.stride or p.padding != (0, 0) or p.out_pixels != p.taps * p.in_pixels:
        return
    height, width = _input_size(p)
    if p.out_channels * p.taps * _ITEMSIZE % 16 or p.in_pixels % 4:
        return
    lines = p.out_channels * p.taps + max(_SETS) * _BLOCK_LINES  # with those that fill the last blocks of sets
    if max((p.in_channels + 64) * p.in_pixels, lines, 16 * p.out_pixels) > _INT32_MAX:
        return
    sizes = [(rows, width) for rows in range(1, min(height, _MOST_COLUMNS // width) + 1)]
    sizes += [(1, part) for part in _WIDTHS if part < width]
    sets = [count for count in _SETS if count <= _line_blocks(p)]
    subs = (1, 2) if -(-p.in_channels // _CHANNELS) % 2 == 0 else (1,)
    for (rows, part), count, together in itertools.product(sizes, sets, subs):
        tile = Tile(p, rows, part, count, together)
        if tile.possible:
            yield tile


def macros_of(tile: Tile, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/fused_shuffle.cu."""
    p = tile.problem
    assert tile.ring_sizes is not None
    slots, stages = tile.ring_sizes
    return {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        "KERNEL_H": p.kernel_size[0],
        "KERNEL_W": p.kernel_size[1],
        "IN_CHANNELS": p.in_channels,
        "OUT_CHANNELS": p.out_channels,
        "IN_H": tile.input_size[0],
        "IN_W": tile.input_size[1],
        "ROWS": tile.rows,
        "WIDTH": tile.width,
        "COLUMNS": tile.columns,
        "SETS": tile.sets,
        "BLOCKS": tile.blocks,
        "STAGED_PITCH": tile.staged_pitch,
        "SLOTS": slots,
        "STAGES": stages,
        "SUBS": tile.subs,
        "LOADERS": _LOADERS,
        "MULTIPLIER_REGISTERS": _REGISTERS[0],
        "LOADER_REGISTERS": _REGISTERS[1],
        "PIECE": tile.piece,
        "VECTOR": tile.vector,
        "SHARED_BYTES": tile.shared_bytes,
    }


FusedShuffleParams = params_struct(
    "fused_shuffle_params", ("input", "bias", "output"), ("items",), tensor_maps=("weights",)
)


def prepare_forward(config: Config, tile: Tile) -> Forward:
    """As ``Algorithm.forward``."""
    boxes = weight_lines.boxes_of(tile.problem, _ITEMSIZE, (_BLOCK_LINES, tile.subs * _CHANNELS))
    macros = macros_of(tile, config.dtype)
    counts = (tile.items,)
    return weight_lines.prepare_forward(
        config, "fused_shuffle", macros, FusedShuffleParams, boxes, counts, tile.threads
    )
