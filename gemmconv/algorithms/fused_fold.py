"""How ``fused`` goes about layers of few output channels (csrc/fused_fold.cu): tiles, their estimates, the launch.

It is for one group, for phases that all have taps, for columns of at most 256 lines that fit shared memory, and for
rows of the input (channels, in channels_last) of whole 4 bytes; ``tile_of`` gives None for others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from gemmconv.algorithms.base import Config, Forward, aligned, in_either_format, strides_of, with_strides
from gemmconv.algorithms.cells import can_be_folded, cells_of, reach_of
from gemmconv.algorithms.fused_plan import CHAIN, MULTIPROCESSORS, SHARED_BYTES
from gemmconv.algorithms.launches import params_struct
from gemmconv.algorithms.macros import ELEMENT_TYPES, Macros, geometry_macros
from gemmconv.geometry import Pair, Problem

_INT32_MAX = 2**31 - 1
_RESERVED_BYTES = 1 << 10  # of shared memory, for each block
_BARRIER_BYTES = 128
_REGISTERS = 65_536
_OTHER_REGISTERS = 56  # of a thread, beside sums and words that are multiplied
_SPLIT_REGISTERS = 12
_WARPGROUP = 128  # threads; ptxas gives registers to whole ones
_MOST_LINES = 256  # that the tensor core takes
_MOST_OUTPUTS = 32  # that a thread folds at a time; with more it has no registers
_LEAST_COPY, _MOST_COPY = 4, 16  # bytes that cp.async takes
_COLUMNS = 32, 48, 64, 96, 128  # of strips
_MOST_ROWS, _MOST_POSITIONS = 8, 512  # of a step
_MOST_ITEMS = 4  # of a block, where segments are chosen
_MOST_FOLDERS, _LEAST_FOLDERS = 256, 64
_LOADERS = 32, 64
_STAGES = 2, 3
_SPLIT_FACTOR = 0.77  # of a step of float32 in NCHW, whose products do not wait any more: of two layers


@dataclass(frozen=True)
class Tile:
    """What a block of csrc/fused_fold.cu does; see its header.

    Attributes:
        rows: input rows of a step.
        columns: positions across.
        warpgroups: that share the positions of a step.
        folders, loaders: threads that fold, and that copy.
        copied: bytes that are copied together.
        stages: of inputs.
        segments: parts of an image's cell rows.
    """

    problem: Problem
    itemsize: int
    split: bool
    channels_last: bool
    rows: int
    columns: int
    warpgroups: int
    folders: int
    loaders: int
    copied: int
    stages: int = 2
    segments: int = 1

    @property
    def threads(self) -> int:
        return _WARPGROUP * self.warpgroups + self.folders + self.loaders

    @property
    def lines(self) -> int:
        """Of columns: output channels x taps."""
        return self.problem.out_channels * self.problem.taps

    @property
    def whole_lines(self) -> int:
        """Up to what the tensor core takes."""
        return -(-self.lines // 16) * 16

    @property
    def steps(self) -> int:
        """Of 32 bytes, of the channels."""
        return -(-self.problem.in_channels * self.itemsize // 32)

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies, about."""
        words = 4 * min(8, self.steps)
        if self.split:
            return _OTHER_REGISTERS + _SPLIT_REGISTERS + self.whole_lines + words
        return _OTHER_REGISTERS + self.whole_lines // 2 + words

    @property
    def unit(self) -> int:
        """Elements that are copied together."""
        return self.copied // self.itemsize

    @cached_property
    def reach(self) -> tuple[Pair, Pair]:
        """Least and largest shift of either axis."""
        return reach_of(self.problem, 0), reach_of(self.problem, 1)

    @property
    def halo_h(self) -> int:
        first, last = self.reach[0]
        return last - first

    @property
    def whole_rows(self) -> bool:
        """Whether the positions are whole rows of the input: what lies beside them is zero in any case."""
        return self.problem.input_size[1] <= self.columns

    @property
    def position_unit(self) -> int:
        """Positions that are copied together."""
        return 1 if self.channels_last else self.unit

    @property
    def origin(self) -> int:
        """The first strip's first position."""
        return 0 if self.whole_rows else self.reach[1][0] // self.position_unit * self.position_unit

    @property
    def cells(self) -> int:
        """Cells across of a strip."""
        if self.whole_rows:
            return cells_of(self.problem)[1]
        return (self.columns - self.reach[1][1] + self.origin) // self.position_unit * self.position_unit

    @property
    def left(self) -> int:
        """Columns in the ring before a row's first."""
        return max(0, self.origin - self.reach[1][0])

    @property
    def column_pitch(self) -> int:
        """Floats from a line of the ring to the next: an odd multiple of 4, which spreads lines over banks."""
        count = self.left + max(self.columns, self.cells + self.reach[1][1] - self.origin)
        return (count + 3) // 8 * 8 + 4

    @property
    def positions(self) -> int:
        return self.rows * self.columns

    @property
    def pitch(self) -> int:
        """Elements between channels of a stage, or between positions: free of bank conflicts."""
        if self.channels_last:
            return (self.steps * 32 + 16) // self.itemsize
        return self.positions + 8

    @property
    def shared_bytes(self) -> int:
        ring = (2 * self.rows + self.halo_h) * self.lines * self.column_pitch * 4
        ring = -(-max(ring, self.problem.in_channels * self.lines * self.itemsize) // 16) * 16
        weights = (1 + self.split) * self.steps * 32 * self.whole_lines
        lines = self.positions if self.channels_last else self.steps * 32 // self.itemsize
        return _BARRIER_BYTES + ring + weights + self.stages * lines * self.pitch * self.itemsize

    @property
    def blocks_resident(self) -> int:
        """Blocks that a multiprocessor is to have registers and shared memory for."""
        by_registers = _REGISTERS // (-(-self.registers // 8) * 8 * self.threads)
        return max(1, min(by_registers, SHARED_BYTES // (self.shared_bytes + _RESERVED_BYTES), 2048 // self.threads))

    @property
    def strips(self) -> int:
        return -(-cells_of(self.problem)[1] // self.cells)

    @property
    def segment_rows(self) -> int:
        """Cell rows of a segment."""
        return -(-cells_of(self.problem)[0] // self.segments)

    @property
    def items(self) -> int:
        return self.problem.batch * self.strips * self.segments

    @property
    def item_steps(self) -> int:
        return -(-(self.segment_rows + self.halo_h) // self.rows)

    @property
    def folded(self) -> int:
        """Pairs of a cell and a row phase, in NCHW with a channel too, of a cell row: what a thread folds at a time."""
        p = self.problem
        return p.stride[0] * (1 if self.channels_last else p.out_channels) * self.cells

    @property
    def outputs(self) -> int:
        """Outputs beside each other that a thread folds at a time."""
        return self.problem.stride[1] * (self.problem.out_channels if self.channels_last else 1)

    @property
    def reaches(self) -> int:
        """The largest row or column that the kernel works out: whole strips, and what a step has beyond the image."""
        p, (down, across) = self.problem, self.reach
        rows = cells_of(p)[0] + self.rows + self.halo_h + abs(down[0]) + 1
        columns = self.strips * self.cells + self.columns + max(map(abs, across))
        return max(rows * p.stride[0], columns * p.stride[1])

    @property
    def vector(self) -> int:
        """Outputs that are stored together."""
        p = self.problem
        channels = p.out_channels if self.channels_last else 1
        return math.gcd(16 // self.itemsize, p.stride[1] * channels, p.output_size[1] * channels)

    @property
    def cycles(self) -> float:
        """Roughly the cycles that a call takes.

        A step takes as long as the slowest role, or what all blocks of a multiprocessor ask of its tensor cores, its
        shared memory or the L2 cache, and more where several are close. The constants were fitted to 516 tiles of 7
        layers on an H200: they are 17% off, and what they choose takes 2% longer than the best of those (both means
        geometric).
        """
        p, blocks = self.problem, self.blocks_resident
        rounds = max(1.0, self.items / (MULTIPROCESSORS * blocks))
        rounds = math.ceil(rounds) if rounds < 4 else rounds
        products = self.steps * self.whole_lines * (3 if self.split else 1)
        rounding = 0 if self.itemsize == 2 else 35 * self.steps if self.split else 17 * self.steps
        multiplying = 130 + self.positions / (64 * self.warpgroups) * (600 + 0.5 * products + rounding)
        outputs = self.outputs
        added = outputs * p.taps / math.prod(p.stride)
        folding = 390 + -(-self.folded // self.folders) * self.rows * (9.4 * added + 29 * outputs)
        loaded = self.positions * p.in_channels * self.itemsize
        loading = 780 + 14 * loaded / (self.copied * self.loaders)
        wavefronts = (loaded / 1.5 + self.positions * 8 * self.lines) / 128 + loaded / (16 * self.copied)
        moved = loaded + self.positions * math.prod(p.stride) * p.out_channels * self.itemsize
        shared = max(1.9 * products * self.positions / 64, 2.8 * wavefronts, 0.075 * moved) * blocks
        step = sum(part**4 for part in (multiplying, folding, loading, shared)) ** 0.25
        step *= _SPLIT_FACTOR if self.split and not self.channels_last else 1
        words = self.steps * 8 * self.whole_lines * (1 + self.split)
        return 12_000 + 4 * words / (self.threads - self.loaders) + rounds * self.item_steps * step


@lru_cache(maxsize=1024)
def tile_of(problem: Problem, itemsize: int, split: bool, channels_last: bool) -> Tile | None:
    """The tile for a problem: a pure function of it. None where the kernel is not for it."""
    return min(tiles_of(problem, itemsize, split, channels_last), key=lambda tile: tile.cycles, default=None)


def tiles_of(problem: Problem, itemsize: int, split: bool, channels_last: bool) -> Iterator[Tile]:
    """The tiles that a problem may have: those that fit registers and shared memory."""
    p = problem
    if p.groups > 1 or p.batch == 0 or p.out_channels * p.taps > _MOST_LINES:
        return
    if not can_be_folded(p):
        return
    width = p.input_size[1]
    together = math.gcd(_MOST_COPY, (p.in_channels if channels_last else width) * itemsize)
    if together < _LEAST_COPY:
        return
    whole = -(-width // 8) * 8
    widths = {columns for columns in _COLUMNS if columns < width} | ({whole} if whole <= _COLUMNS[-1] else set())
    for columns, rows in itertools.product(sorted(widths), range(1, _MOST_ROWS + 1)):
        groups, rest = divmod(rows * columns, 64)
        if rest or rows * columns > _MOST_POSITIONS:
            continue
        # Smaller units waste fewer columns at the ends of strips.
        least = together if columns >= width or channels_last else _LEAST_COPY
        for copied, warpgroups, loaders, stages in itertools.product({together, least}, (1, 2), _LOADERS, _STAGES):
            tile = Tile(p, itemsize, split, channels_last, rows, columns, warpgroups, 0, loaders, copied, stages)
            if groups % warpgroups or tile.cells <= 0:
                continue
            for folders in _shares(tile.folded):
                if _fits(folding := replace(tile, folders=folders)):
                    yield from (replace(folding, segments=segments) for segments in _segments(folding))


def _shares(folded: int) -> Iterator[int]:
    """Threads that fold, in whole warps, where each has one, two or three of what is folded of a cell row."""
    for each in (1, 2, 3):
        folders = -(-folded // each // 32) * 32
        if folders <= _MOST_FOLDERS and (each == 1 or folders >= _LEAST_FOLDERS):
            yield folders


def _segments(tile: Tile) -> set[int]:
    """Numbers of segments that give every block that runs at once up to 1, 2, 3 or 4 items."""
    cells = cells_of(tile.problem)[0]
    found = set()
    for items in range(1, _MOST_ITEMS + 1):
        most = max(1, items * blocks_at_once(tile) // tile.items)
        rows = -(-cells // min(most, cells))
        found.add(-(-cells // rows))
    return found


def _fits(tile: Tile) -> bool:
    threads = -(-tile.threads // _WARPGROUP) * _WARPGROUP if tile.split else tile.threads  # most others need fewer
    most = min(255, _REGISTERS // threads)
    return tile.registers <= most and tile.outputs <= _MOST_OUTPUTS and tile.shared_bytes <= SHARED_BYTES


def macros_of(tile: Tile, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/fused_fold.cu."""
    p = tile.problem
    macros: Macros = {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        "IN_CHANNELS": p.in_channels,
        "OUT_CHANNELS": p.out_channels,
        "CHANNELS_LAST": int(tile.channels_last),
        "SPLIT": int(tile.split),
        "CHAIN": CHAIN,
        "CHANNEL_STEPS": tile.steps,
        "STAGES": tile.stages,
        "WARPGROUPS": tile.warpgroups,
        "FOLDERS": tile.folders,
        "LOADERS": tile.loaders,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "CELLS": tile.cells,
        "ORIGIN": tile.origin,
        "LEFT": tile.left,
        "COLUMN_PITCH": tile.column_pitch,
        "PITCH": tile.pitch,
        "UNIT": tile.unit,
        "VECTOR": tile.vector,
        "MIN_BLOCKS": tile.blocks_resident,
        "SHARED_BYTES": tile.shared_bytes,
        **geometry_macros(p),
    }
    if max(p.in_pixels * p.in_channels, p.out_pixels * p.out_channels) > _INT32_MAX:
        macros["INDEX_64"] = 1
    return macros


FusedFoldParams = params_struct(
    "fused_fold_params",
    ("input", "weight", "bias", "output"),
    (
        *("h_in", "w_in", "h_out", "w_out", "cells_h", "cells_w", "strips", "segments", "segment_rows", "items"),
        *("weight_channel", "weight_tap"),
    ),
)


def blocks_at_once(tile: Tile) -> int:
    """How many blocks run at once; they share its items evenly."""
    return MULTIPROCESSORS * tile.blocks_resident


def prepare_forward(config: Config, tile: Tile) -> Forward:
    """As ``Algorithm.forward``."""
    from gemmconv.runtime.launch import load

    p, shared_bytes = config.problem, tile.shared_bytes
    macros = macros_of(tile, config.dtype)
    kernel = load("fused_fold.cu", "fused_fold_kernel", macros, config.device.index, shared_bytes)
    strides = strides_of(p.output_shape, config.memory_format)
    input_strides = strides_of(p.input_shape, config.memory_format)
    grid = (-(-tile.items // -(-tile.items // blocks_at_once(tile))), 1, 1)
    block = (tile.threads, 1, 1)
    sizes = (
        *(*p.input_size, *p.output_size, *cells_of(p)),
        *(tile.strips, tile.segments, tile.segment_rows, tile.items),
    )

    def call(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = input.new_empty_strided(p.output_shape, strides)
        input, (weight, steps) = aligned(with_strides(input, input_strides)), in_either_format(weight)
        weight = aligned(weight)
        bias_address = 0 if bias is None else (bias := bias.contiguous()).data_ptr()
        kernel.launch(
            grid,
            block,
            FusedFoldParams(input.data_ptr(), weight.data_ptr(), bias_address, output.data_ptr(), *sizes, *steps),
            shared_bytes,
        )
        return output

    return call
