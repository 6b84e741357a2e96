"""How ``fused`` goes about kernels as large as their stride (csrc/fused_shuffle.cu): tiles, estimates, the launch.

It is for 16-bit types and TF32, NCHW, one group, kernels whose taps divide 16 and neither overlap nor leave gaps, no
padding, and images whose pixels are a multiple of four; of 16 bits, weights whose rows of lines begin at 16 bytes.
``tiles_of`` gives none for others.
"""

from __future__ import annotations

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

_POSITIONS = 128  # of an item
_CHUNK_BYTES = 128  # of channels, of a slot and a stage
_SLOT_BYTES = _POSITIONS * _CHUNK_BYTES
_BOX_LINES = 64
_MOST_LINES = 256  # that tensor cores take
_MOST_KEPT = {2: 224, 4: 160}  # by bytes of an element: registers have room for their outputs too
_LINES = (64, 96, 128, 160, 192, 224, 256)
_SETS = (1, 2, 3, 4, 6, 8, 12, 16)
_WARPS = 8  # that multiply and store
_LOADERS = 96  # threads
_WEIGHT_THREADS = 256
_REGISTERS = (232, 40)  # of a thread that multiplies, and of others, which give theirs up: of 384 each begins with 168
_BARRIER_BYTES = 16  # of a slot or a stage
_MOST_KERNEL_W = 8
_MOST_TAPS = 16
_MOST_RING = 12
_STAGES_BYTES = 98_304 + 6 * _BARRIER_BYTES  # that hide how long weights take from the L2 cache
_BYTES_A_CYCLE = 2_560  # that memory moves
_COPIED_A_CYCLE = 5_500  # bytes, from the L2 cache to all multiprocessors
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Tile:
    """What a block of csrc/fused_shuffle.cu does; see its header.

    Attributes:
        problem: the geometry.
        itemsize: bytes of an element; of four, float32 as TF32.
        lines: of weights that are multiplied together.
        sets: that blocks of lines are divided into, each for other items.
    """

    problem: Problem
    itemsize: int
    lines: int
    sets: int

    @property
    def packed(self) -> bool:
        """Whether weights are laid out by a launch of their own."""
        return self.itemsize == 4

    @cached_property
    def input_size(self) -> Pair:
        """Rows and columns; one row where rows of inputs are rows of outputs, which then follow each other too."""
        height, width = self.problem.input_size
        return (1, height * width) if self.problem.kernel_size[0] == 1 else (height, width)

    @property
    def positions(self) -> int:
        """Of all images."""
        return self.problem.batch * self.problem.in_pixels

    @property
    def line_blocks(self) -> int:
        return -(-self.problem.out_channels * self.problem.taps // self.lines)

    @property
    def blocks(self) -> int:
        """Of lines, of a set; the last may have fewer."""
        return -(-self.line_blocks // self.sets)

    @property
    def chunks(self) -> int:
        """Slots of an item, and stages of a block of lines."""
        return -(-self.problem.in_channels * self.itemsize // _CHUNK_BYTES)

    @property
    def stage_bytes(self) -> int:
        return (self.lines if self.packed else -(-self.lines // _BOX_LINES) * _BOX_LINES) * _CHUNK_BYTES

    @property
    def bias_bytes(self) -> int:
        """Of each warp's copy of a block's."""
        return -(-_WARPS * (self.lines // self.problem.taps) // 4) * 16

    @cached_property
    def ring_sizes(self) -> tuple[int, int]:
        """Slots of inputs and stages of weights."""
        free = SHARED_BYTES - self.bias_bytes
        slot, stage = _SLOT_BYTES + _BARRIER_BYTES, self.stage_bytes + _BARRIER_BYTES
        if self.held:
            stages = min(free - self.chunks * slot, _STAGES_BYTES) // stage
            slots = min((free - stages * stage) // slot, max(2 * self.chunks, 4), _MOST_RING)
        else:
            slots = min(free // (slot + stage), _MOST_RING)
        return slots, min((free - slots * slot) // stage, _MOST_RING)

    @cached_property
    def held(self) -> bool:
        """Whether inputs stay in shared memory for all blocks of lines of an item: if they fit."""
        free = SHARED_BYTES - self.bias_bytes - 2 * (self.stage_bytes + _BARRIER_BYTES)
        return self.blocks > 1 and self.chunks <= min(free // (_SLOT_BYTES + _BARRIER_BYTES), _MOST_RING)

    @property
    def kept(self) -> bool:
        """Whether outputs are stored while products of the next block run."""
        return self.lines <= _MOST_KEPT[self.itemsize]

    @property
    def shared_bytes(self) -> int:
        slots, stages = self.ring_sizes
        rings = slots * (_SLOT_BYTES + _BARRIER_BYTES) + stages * (self.stage_bytes + _BARRIER_BYTES)
        return rings + self.bias_bytes

    @property
    def items(self) -> int:
        return -(-self.positions // _POSITIONS) * self.sets

    @property
    def piece(self) -> int:
        """Inputs that are copied together."""
        return math.gcd(16 // self.itemsize, self.problem.in_pixels)

    @property
    def threads(self) -> int:
        return 32 + _LOADERS + 32 * _WARPS

    @property
    def packed_bytes(self) -> int:
        """Of the weights as they are laid out."""
        return self.line_blocks * self.lines * self.chunks * _CHUNK_BYTES if self.packed else 0

    @property
    def cycles(self) -> float:
        """Roughly the cycles that a call takes, its launches among them.

        Fitted to 221 tiles of 12 layers in two types on an H100, the best ones above all: 8% off as the root mean
        square of the logarithm, all alike 11%. Those that it chooses take 2% longer than the best of those measured
        (geometric mean). Memory is an H200's.
        """
        p = self.problem
        chunk = 3.6 * self.lines + 170
        stored = self.lines * self.itemsize * (4.6 if self.kept else 5.3)
        item = 540 + self.blocks * (self.chunks * chunk + stored)
        computed = -(-self.items // MULTIPROCESSORS) * item
        passes = 1 if self.held else self.blocks  # over an item's inputs, which the L2 cache hardly keeps
        elements = math.prod(p.output_shape) + math.prod(p.input_shape) * (1 + 0.9 * (passes - 1))
        moved = elements * self.itemsize / _BYTES_A_CYCLE
        copied = self.chunks * (self.blocks * self.lines * _CHUNK_BYTES + passes * _SLOT_BYTES)
        parts = computed, moved, self.items * copied / _COPIED_A_CYCLE
        return 8_900 + (900 if self.packed else 0) + sum(part**4.4 for part in parts) ** (1 / 4.4)


@lru_cache(maxsize=1024)
def tile_of(problem: Problem, itemsize: int) -> Tile | None:
    """The tile for a problem in NCHW: a pure function of it. None where the kernel is not for it."""
    return min(tiles_of(problem, itemsize), key=lambda tile: tile.cycles, default=None)


def tiles_of(problem: Problem, itemsize: int) -> Iterator[Tile]:
    """The tiles that a problem may have."""
    p = problem
    if p.groups > 1 or p.batch == 0 or _MOST_TAPS % p.taps or p.kernel_size[1] > _MOST_KERNEL_W:
        return
    if p.kernel_size != p.stride or p.padding != (0, 0) or p.out_pixels != p.taps * p.in_pixels:
        return
    all_lines, step = p.out_channels * p.taps, max(16, 4 * p.kernel_size[1])
    if p.in_pixels % 4 or (itemsize == 2 and all_lines * itemsize % 16):
        return
    # Also of channels and lines that fill the last ones, and of blocks of threads that look for a next item.
    products = (p.in_channels + 64) * max(all_lines + _MOST_LINES, p.in_pixels)
    items = (p.batch * p.in_pixels + (MULTIPROCESSORS + 1) * _POSITIONS) * max(_SETS) // _POSITIONS
    if max(products, items, p.batch * p.in_pixels + _POSITIONS, _MOST_LINES // p.taps * p.out_pixels) > _INT32_MAX:
        return
    few = -(-all_lines // step) * step
    for lines in (*(lines for lines in _LINES if lines < few), *((few,) if few <= _MOST_LINES else ())):
        blocks = -(-all_lines // lines)
        for sets in {-(-blocks // -(-blocks // count)) for count in _SETS}:
            tile = Tile(p, itemsize, lines, sets)
            if tile.kept or tile.blocks == 1:  # others took longer wherever they were tried
                yield tile


def macros_of(tile: Tile, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/fused_shuffle.cu."""
    p = tile.problem
    slots, stages = tile.ring_sizes
    return {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        "PACKED": int(tile.packed),
        "KERNEL_H": p.kernel_size[0],
        "KERNEL_W": p.kernel_size[1],
        "IN_CHANNELS": p.in_channels,
        "OUT_CHANNELS": p.out_channels,
        "IN_H": tile.input_size[0],
        "IN_W": tile.input_size[1],
        "LINES": tile.lines,
        "SETS": tile.sets,
        "BLOCKS": tile.blocks,
        "HELD": int(tile.held),
        "KEPT": int(tile.kept),
        "SLOTS": slots,
        "STAGES": stages,
        "LOADERS": _LOADERS,
        "MULTIPLIER_REGISTERS": _REGISTERS[0],
        "LOADER_REGISTERS": _REGISTERS[1],
        "PIECE": tile.piece,
        "SHARED_BYTES": tile.shared_bytes,
    }


def weights_macros_of(tile: Tile) -> Macros:
    """Macros that specialise csrc/fused_shuffle_weights.cu."""
    p = tile.problem
    return {
        "IN_CHANNELS": p.in_channels,
        "KERNEL_W": p.kernel_size[1],
        "ALL_LINES": p.out_channels * p.taps,
        "LINES": tile.lines,
        "UNITS": tile.chunks * (_CHUNK_BYTES // 16),
    }


_COUNTS = ("positions", "items")
FusedShuffleParams = params_struct(
    "fused_shuffle_params", ("input", "bias", "output"), _COUNTS, tensor_maps=("weights",)
)
FusedShufflePackedParams = params_struct("fused_shuffle_params", ("weights", "input", "bias", "output"), _COUNTS)
FusedShuffleWeightsParams = params_struct("fused_shuffle_weights_params", ("weight", "packed"), ("units",))


def prepare_forward(config: Config, tile: Tile) -> Forward:
    """As ``Algorithm.forward``."""
    params, weights = FusedShuffleParams, _mapped(tile)
    if tile.packed:
        params, weights = FusedShufflePackedParams, _packed(tile, config.device)
    macros = macros_of(tile, config.dtype)
    counts = tile.positions, tile.items
    return weight_lines.prepare_forward(
        config, "fused_shuffle", macros, params, weights, counts, tile.threads, overlaps=tile.packed
    )


def _mapped(tile: Tile) -> weight_lines.Weights:
    box = _BOX_LINES, _CHUNK_BYTES // tile.itemsize
    return weight_lines.mapped(weight_lines.boxes_of(tile.problem, tile.itemsize, box))


def _packed(tile: Tile, device: torch.device) -> weight_lines.Weights:
    """Weights that csrc/fused_shuffle_weights.cu lays out."""
    from gemmconv.runtime.launch import load

    kernel = load("fused_shuffle_weights.cu", "fused_shuffle_weights_kernel", weights_macros_of(tile), device.index)
    packed_bytes, units = tile.packed_bytes, tile.packed_bytes // 16
    grid, block = (-(-units // _WEIGHT_THREADS), 1, 1), (_WEIGHT_THREADS, 1, 1)

    def pack(weight: torch.Tensor) -> tuple[int, torch.Tensor]:
        packed = torch.empty(packed_bytes, dtype=torch.uint8, device=weight.device)
        kernel.launch(grid, block, FusedShuffleWeightsParams(weight.data_ptr(), packed.data_ptr(), units))
        return packed.data_ptr(), packed

    return pack
