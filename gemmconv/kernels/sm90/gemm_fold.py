"""How ``fused`` goes about small images (csrc/sm90/gemm_fold.cu): tiles, their estimates, the launch.

It is for 16-bit types and TF32, NCHW, one group, kernels whose taps divide 64 and that leave no phase without taps,
weights whose rows of lines begin at 16 bytes, and images of at most 256 inputs, a multiple of four; ``tile_of`` gives
None for others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch

from gemmconv.device import REFERENCE
from gemmconv.geometry import Problem
from gemmconv.hashing import cached_property
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, geometry_macros
from gemmconv.kernels.phases import can_be_folded, cells_of, out_more, reach_of, stored_together
from gemmconv.kernels.program import Params, Program
from gemmconv.kernels.sm90.base import CLOCK_RATE, OneFormatForward, forward_program, weight_map
from gemmconv.kernels.sm90.implicit_gemm_plan import SHARED_BYTES

_COST = costs_of("sm90/gemm_fold")
_FOLDED_CELLS = 1000  # of lines, that the cost of folding is of
_LINE_BYTES = 128  # of channels that a stage has, and of values that lie in one piece in shared memory
_BLOCK_LINES, _WARP_LINES = 64, 16
_BLOCK_BYTES = _BLOCK_LINES * _LINE_BYTES  # of a stage: of lines, and of positions
_MOST_COLUMNS = {2: {1: 256, 2: 192}, 4: {1: 256, 2: 128}}  # by bytes of an element and blocks: registers have room for
_LOADERS = 96  # threads
_PIECES_AT_ONCE = 12  # of a channel, that threads begin to copy together
_INT32_MAX = 2**31 - 1
# Inputs that are turned are passed on once those of the next stage are begun, while those of the stage before are read.
_LEAST_STAGES, _MOST_STAGES = {2: 3, 4: 2}, 6
_MOST_CELLS = 16  # for each input: beyond, outputs are mostly what lies beside images
_BARRIER_BYTES = 16  # of a stage
_LANDING_BYTES = 48 << 10  # four blocks of 32 positions of each warp that brings them
_LEAST_FOLDED = 32  # positions, where images are smaller


@dataclass(frozen=True)
class Tile:
    """The work of a block of csrc/sm90/gemm_fold.cu; see its header.

    Attributes:
        problem: the geometry.
        itemsize: bytes of an element; of four, float32 as TF32.
        images: of an item.
        warpgroups: that multiply, 1 or 2.
        blocks: of 64 lines, of each of them.
        multiprocessors: of the GPU, on each of which a block runs.
    """

    problem: Problem
    itemsize: int
    images: int
    warpgroups: int
    blocks: int
    multiprocessors: int = REFERENCE.multiprocessors

    packed_bytes: ClassVar[int] = 0  # weights are read as they lie

    @property
    def turned(self) -> bool:
        """Whether both matrices are multiplied as they lie."""
        return self.itemsize == 2

    @property
    def pixels(self) -> int:
        return self.problem.in_pixels

    @property
    def positions(self) -> int:
        return self.images * self.pixels

    @property
    def cells(self) -> int:
        """Positions, or cells, if those are more: what is folded."""
        return max(self.positions, self.images * math.prod(cells_of(self.problem)))

    @property
    def columns(self) -> int:
        """Positions, up to what the tensor core takes."""
        return -(-self.positions // 16) * 16

    @property
    def fold_warps(self) -> int:
        """Warps that have all lines of an output channel between them."""
        return 1 if _WARP_LINES % self.problem.taps == 0 else 4

    @property
    def tile_outs(self) -> int:
        """Output channels of an item."""
        return self.warpgroups * self.blocks * _BLOCK_LINES // self.problem.taps

    @property
    def piece(self) -> int:
        """Inputs that are copied together."""
        return math.gcd(16 // self.itemsize, self.pixels)

    @cached_property
    def in_place(self) -> bool:
        """Whether outputs read the input at their own cell alone."""
        p = self.problem
        return cells_of(p) == p.input_size and reach_of(p, 0) == reach_of(p, 1) == (0, 0)

    @cached_property
    def folded(self) -> int:
        """Positions that are folded together."""
        if self.in_place:
            return min(_LEAST_FOLDED, -(-self.positions // 8) * 8)
        images = next(n for n in range(1, 9) if n * self.pixels % 8 == 0)
        images *= max(1, _LEAST_FOLDED // (images * self.pixels))
        return min(images, self.images) * self.pixels

    @property
    def fold_pitch(self) -> int:
        """Floats from a line of columns to the next: an odd multiple of 8, which spreads lines over banks."""
        return (self.folded + 7) // 16 * 16 + 8

    @property
    def fold_bytes(self) -> int:
        """Bytes of shared memory for columns and biases, and for landing inputs that are not transposed."""
        landing = 0 if self.turned else _LANDING_BYTES
        return self.warpgroups * _BLOCK_LINES * self.fold_pitch * 4 + -(-self.tile_outs // 2) * 8 + landing

    @property
    def stage_bytes(self) -> int:
        positions = -(-self.columns // _BLOCK_LINES) * _BLOCK_LINES if self.turned else self.columns
        return self.warpgroups * self.blocks * _BLOCK_BYTES + positions * _LINE_BYTES

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, (SHARED_BYTES - self.fold_bytes) // (self.stage_bytes + _BARRIER_BYTES))

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + _BARRIER_BYTES) + self.fold_bytes

    @property
    def chunks(self) -> int:
        return -(-self.problem.in_channels * self.itemsize // _LINE_BYTES)

    @property
    def items(self) -> int:
        return -(-self.problem.batch // self.images) * -(-self.problem.out_channels // self.tile_outs)

    @property
    def threads(self) -> int:
        return _LOADERS + 32 + 128 * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer thread and of a producer, which gives up some: all 384 threads begin with 168."""
        if not self.turned:
            return 200, 104
        return (232, 40) if self.blocks * self.columns > 352 else (216, 72)

    @property
    def vector(self) -> int:
        """Outputs that are stored together."""
        return stored_together(self.problem, self.itemsize)

    @property
    def possible(self) -> bool:
        if self.items + self.multiprocessors > _INT32_MAX:
            return False
        return self.columns <= _MOST_COLUMNS[self.itemsize][self.blocks] and self.stages >= _LEAST_STAGES[self.itemsize]

    @property
    def cycles(self) -> float:
        """Roughly the cycles that a call takes, its launch among them."""
        lines = self.warpgroups * self.blocks * _BLOCK_LINES
        if self.turned:
            turns = -(-self.positions // (_PIECES_AT_ONCE * self.piece))
            turn = _COST.long_turn_cycles if self.piece == 8 else _COST.short_turn_cycles
            chunk = _COST.turned_product_factor * lines * self.columns / 32 + turns * turn + _COST.turned_chunk_cycles
            fold = _COST.turned_fold_cycles + _COST.turned_fold_warpgroup_cycles / math.sqrt(self.warpgroups)
            folded, start = lines * self.cells / _FOLDED_CELLS * fold, _COST.turned_start_cycles
        else:
            turns = -(-self.positions // _LOADERS)
            products = _COST.product_factor * lines * self.columns / 32
            parts, overlap = (products, turns * _COST.turn_cycles, _COST.line_cycles * lines), _COST.overlap
            chunk = sum(part**overlap for part in parts) ** (1 / overlap) + _COST.chunk_cycles
            folded = lines * self.cells / _FOLDED_CELLS * _COST.fold_cycles + _COST.item_cycles
            start = _COST.start_cycles
        return start + -(-self.items // self.multiprocessors) * (self.chunks * chunk + folded)


@lru_cache(maxsize=1024)
def tile_of(problem: Problem, itemsize: int, multiprocessors: int = REFERENCE.multiprocessors) -> Tile | None:
    """The tile for a problem in NCHW: a pure function of it. None where the kernel is not for it."""
    return min(tiles_of(problem, itemsize, multiprocessors), key=lambda tile: tile.cycles, default=None)


def tiles_of(problem: Problem, itemsize: int, multiprocessors: int = REFERENCE.multiprocessors) -> Iterator[Tile]:
    """The tiles that a problem may have: those that fit registers and shared memory."""
    p, most = problem, _MOST_COLUMNS[itemsize][1]
    if p.groups > 1 or p.batch == 0 or _BLOCK_LINES % p.taps or p.in_pixels > most:
        return
    if p.out_channels * p.taps * itemsize % 16 or p.in_pixels % 4 or math.prod(cells_of(p)) > _MOST_CELLS * p.in_pixels:
        return
    if max(most * p.in_channels, (p.out_channels + 256) * p.taps, p.out_pixels, p.batch * 256) > _INT32_MAX:
        return
    if not can_be_folded(p):
        return
    images = range(1, min(p.batch, most // p.in_pixels) + 1)
    choices = (p,), (itemsize,), images, (1, 2), (1, 2), (multiprocessors,)
    for tile in itertools.starmap(Tile, itertools.product(*choices)):
        if tile.possible:
            yield tile


def macros_of(tile: Tile, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/sm90/gemm_fold.cu."""
    p = tile.problem
    return {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        "MN_MAJOR": int(tile.turned),
        "IN_CHANNELS": p.in_channels,
        "OUT_CHANNELS": p.out_channels,
        "IN_H": p.input_size[0],
        "IN_W": p.input_size[1],
        **out_more(p),
        "IMAGES": tile.images,
        "COLUMNS": tile.columns,
        "WARPGROUPS": tile.warpgroups,
        "BLOCKS": tile.blocks,
        "PRODUCERS": _LOADERS,
        "CONSUMER_REGISTERS": tile.registers[0],
        "PRODUCER_REGISTERS": tile.registers[1],
        "FOLD_WARPS": tile.fold_warps,
        "FOLDED": tile.folded,
        "FOLD_PITCH": tile.fold_pitch,
        "PIECE": tile.piece,
        "STAGES": tile.stages,
        "VECTOR": tile.vector,
        "SHARED_BYTES": tile.shared_bytes,
        **geometry_macros(p),
    }


class GemmFold(OneFormatForward):
    """See the module."""

    name = "sm90/gemm_fold"
    serves = "one group, taps that divide 64, phases that all have taps, small images of 4n inputs"
    only_in = torch.contiguous_format

    def seconds(self, config: Config, direction: Pass, tile: Tile) -> float:
        return tile.cycles / CLOCK_RATE

    def fitted(self, config: Config, direction: Pass, tile: Tile) -> Tile | None:
        """The tile for another batch only: columns are folded by whole images, whose size is compiled."""
        p = config.problem
        if p.batch == 0 or p.input_size != tile.problem.input_size or p.batch * 256 > _INT32_MAX:
            return None
        made = replace(tile, problem=p)
        return made if made.possible else None

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        channels = _LINE_BYTES // tile.itemsize
        params: Params = {
            "weights": weight_map(tile.problem, tile.itemsize, (channels, channels)),
            "input, bias, output": ("input", "bias", "output"),
            "batch, items": (tile.problem.batch, tile.items),
        }
        return forward_program(config, "gemm_fold", tile, macros_of(tile, config.dtype), params, tile.threads)


KERNEL = GemmFold(tile_of, tiles_of)
