"""Host side of csrc/sm90/gemm_depth_to_space.cu: ``fused`` for kernels as large as their stride.

Its words are those of gemm_fold_pixels.py, without cells and folds: here each line of the product goes to one place.

It is for 16-bit types and TF32, NCHW and one group. ``tiles_of`` gives tiles where taps divide 16, neither overlap nor
leave gaps, and are at most 8 across; there is no padding; an image's pixels are a multiple of four; and in 16 bits rows
of weights begin at multiples of 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property, changed
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of, overlapped
from gemmconv.kernels.integers import up_to_multiple
from gemmconv.kernels.macros import Macros
from gemmconv.kernels.program import Program
from gemmconv.kernels.sm90 import pixels_on_m
from gemmconv.kernels.sm90.base import OneFormatForward
from gemmconv.kernels.sm90.pixels_on_m import MOST_LINES, PositionRows

_COST = costs_of("sm90/gemm_depth_to_space")
# By bytes of an element: the most lines whose outputs registers hold while those of the next item are multiplied.
_MOST_KEPT = {2: 224, 4: 160}
# Lines of a line block; more sizes would gain a few percent of some layers, and compile more kernels.
_LINES = (64, 128, 256)
_MOST_KERNEL_W = 8
_MOST_TAPS = 16


class Tile(PositionRows):
    """The work of a block of csrc/sm90/gemm_depth_to_space.cu; see its header."""

    @cached_property
    def input_size(self) -> Pair:
        """Height and width; with a kernel one row high an image is one long row, since so are its outputs in memory."""
        height, width = self.problem.input_size
        return (1, height * width) if self.problem.kernel_size[0] == 1 else (height, width)

    @property
    def paired(self) -> bool:
        """Whether a thread has two neighbouring positions, whose outputs it stores together."""
        return self.problem.kernel_size[1] <= 2 and self.input_size[1] % 2 == 0

    @property
    def kept(self) -> bool:
        """Whether outputs are stored while products of the next item run."""
        return self.lines <= _MOST_KEPT[self.itemsize]

    @property
    def cycles(self) -> float:
        """Roughly the cycles that a call takes, its launches among them."""
        chunk = _COST.line_cycles * self.lines + _COST.chunk_cycles
        stored = self.lines * self.itemsize * (_COST.kept_store_cycles if self.kept else _COST.store_cycles)
        item = _COST.item_cycles + self.chunks * chunk + stored
        computed = -(-self.items // self.multiprocessors) * item
        times = 1 + _COST.again_share * (self.line_blocks - 1)  # reads of inputs, which mostly miss the L2 cache
        elements = math.prod(self.problem.output_shape) + math.prod(self.problem.input_shape) * times
        moved = elements * self.itemsize / _COST.bytes_a_cycle
        copied = self.copied_bytes / _COST.copied_a_cycle
        start = _COST.start_cycles + (_COST.pack_cycles if self.packed else 0)
        return start + overlapped(_COST.overlap, computed, moved, copied)


def tiles_of(problem: Problem, itemsize: int, multiprocessors: int) -> Iterator[Tile]:
    """The tiles that a problem may have."""
    if not problem.is_apart or _MOST_TAPS % problem.taps or problem.kernel_size[1] > _MOST_KERNEL_W:
        return
    if not pixels_on_m.serves(problem, itemsize, multiprocessors):
        return
    all_lines = up_to_multiple(problem.out_channels * problem.taps, max(16, 4 * problem.kernel_size[1]))
    for lines in [lines for lines in _LINES if lines < all_lines] + [all_lines] * (all_lines <= MOST_LINES):
        yield Tile(problem, itemsize, lines, multiprocessors)


class GemmDepthToSpace(OneFormatForward):
    name = "sm90/gemm_depth_to_space"
    serves = (
        "one group, kernel_size equal to stride, without padding or dilation, taps that divide 16 and are at most 8 "
        "across, a multiple of four pixels; in 16 bits, rows of the weight that are whole 16 bytes"
    )
    only_in = torch.contiguous_format

    def fitted(self, config: Config, direction: Pass, tile: Tile) -> Tile | None:
        if not pixels_on_m.serves(config.problem, tile.itemsize, tile.multiprocessors):
            return None
        made = changed(tile, problem=config.problem)
        return made if (made.piece, made.paired) == (tile.piece, tile.paired) else None

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        whole = tile.problem.out_channels * tile.problem.taps % tile.lines == 0
        macros: Macros = {"PAIRED_ROWS": int(tile.paired), "DEFERRED_STORES": int(tile.kept), "WHOLE_OUTS": int(whole)}
        return pixels_on_m.program(config, "gemm_depth_to_space", tile, macros, config.problem.kernel_size[1])


KERNEL = GemmDepthToSpace(tiles_of)
