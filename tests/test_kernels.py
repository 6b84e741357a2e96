"""The kernels of csrc/, run on the CPU by the emulator, against the float64 reference. Needs a C++ compiler, no GPU.

Most of the time goes into compiling: nearly every test has a specialisation of its own.
"""

import contextlib
import functools
import itertools
import math
import operator
import pickle
import re
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests import emulator, reference
from tests.cases import (
    CASES,
    CELL_ROW_CASES,
    FEW_CASES,
    FOLD_CASES,
    IMAGE_CASES,
    IMAGE_ROW_CASES,
    ROW_CASES,
    SHUFFLE_CASES,
    TILED_CASES,
    Case,
)
from tests.samples import arguments_of, channels_last, expected, offset, offset_channels_last, problem_of, sample
from tests.test_direct_forward_mma import wide_problems
from tests.test_implicit_gemm import random_plan

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.algorithms import KERNELS
from gemmconv.device import REFERENCE
from gemmconv.kernels.base import Config, strides_of
from gemmconv.kernels.columns import col2im
from gemmconv.kernels.columns.chunking import input_part_of
from gemmconv.kernels.direct import forward as direct_forward
from gemmconv.kernels.direct import forward_mma as direct_forward_mma
from gemmconv.kernels.direct import grads_mma as direct_grads_mma
from gemmconv.kernels.direct import weight_grad as direct_weight_grad
from gemmconv.kernels.phases import cells_of
from gemmconv.kernels.program import At, Operand, Output, Program
from gemmconv.kernels.sm90 import gemm_fold_narrow
from gemmconv.kernels.sm90.implicit_gemm_choice import plans_of
from gemmconv.kernels.sm90.implicit_gemm_plan import PAIR_BLOCKS, Plan
from gemmconv.kernels.weights import pack
from gemmconv.runtime import launch

pytestmark = emulator.needs_compiler

CPU = torch.device("cpu")
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
ARRANGEMENTS = {
    "contiguous": (torch.Tensor.contiguous, offset),
    "channels_last": (channels_last, offset_channels_last),
}
WEIGHT_ARRANGEMENTS = {  # in the same format, and in the other
    "contiguous": (torch.Tensor.contiguous, offset_channels_last),
    "channels_last": (channels_last, offset),
}


class Attributes(dict):
    """The attributes of a tile as names."""

    def __init__(self, tile):
        self.tile = tile

    def __missing__(self, name):
        if not hasattr(self.tile, name):
            raise KeyError(name)
        return getattr(self.tile, name)


KNOWN = {"math": math, "mod": operator.mod, "cells_of": cells_of, "pack": pack, "PAIR_BLOCKS": PAIR_BLOCKS}


def holds(condition, tile):
    """Whether a condition in Python is true of a tile, whose attributes are names in it."""
    return bool(eval(condition, KNOWN, Attributes(tile)))


# By name, conditions of tiles, of which runs take the best.
PATHS = {
    "neighbouring_groups": "groups > 1",
    "shifted_row_phases": "row_phases > 1",
    "shifted_by_single_outputs": "vector == 1",
    "shifted_by_several_outputs": "vector > 1",
    "shifted_by_four_outputs": "vector == 4",
    "shifted_of_part_of_the_channels": "problem.out_channels // problem.groups % (warps_m * channels) != 0",
}
FUSED_PATHS = {
    "cells_of_several_inputs": "unit > (1, 1)",
    "several_slots": "slots > 1",
    "paired_blocks": "pairing == PAIR_BLOCKS",
    "staged": "staged",
    "staged_pixels": "staged and channels_last",
    "staged_pixels_of_slots": "staged and channels_last and (slots > 1)",
    "staged_pixels_of_blocks": "staged and channels_last and (blocks > 1)",
    "channels_shared": "warpgroups_m > 1",
    "strips": "strips > 1",
    "strips_of_more_tiles_than_others": "items // sets % (problem.batch * strips) > 0",
    "eight_units": "units == 8",
    "pairs_of_inputs_of_a_cell": "wide == 2 and unit[1] == 2",
    "widest": "columns * blocks == 256",
    "rows_of_a_cell": "blocks > 2",
    "lines": 'way == "lines"',
    "half_lines": 'way == "lines" and units == 4',
    "lines_of_images": 'way == "lines" and line_box[0] > 1',
    "lines_of_rows": 'way == "lines" and line_box[1] > 1',
    "lines_of_strips": 'way == "lines" and strips > 1',
    "lines_of_parts": 'way == "lines" and whole_images and (not flat)',
    "lined": "lined and blocks == 1",
    "lined_in_halves": "lined and blocks == 2",
    "lined_in_halves_of_eight": "lined and blocks == 2 and (slots == 8)",
    "lined_strips": "lined and strips > 1",
    "lined_landing": "lined and landing",
    "lined_rows_shared": "lined and phase_sides == 2",
    "lined_channels_shared": "lined and warpgroups_m > phase_sides",
    "flat_lines": "flat",
    "lines_of_planes": 'way == "lines" and unit > (1, 1)',
    "lines_of_odd_rows": 'way == "lines" and pitch % 2 == 1',
    "lines_shared": 'way == "lines" and warpgroups_m == 1',
    "lines_by_turns": 'way == "lines" and turns',
    "landing_by_turns": 'way == "landing" and turns',
    "landing": "landing",
    "landing_whole_images": "landing and whole_images",
    "landing_partial_pieces": "landing and partial_pieces",
    "landing_strips": "landing and strips > 1",
    "landing_cells_of_several_inputs": "landing and unit > (1, 1)",
    "landing_in_parts_of_a_chunk": "landing and landing_units < units",
    "landing_beside_most_sums": "landing and columns * blocks == 256",
}


PASSES = {  # of each operation, the kernel and what it computes
    "forward": ("direct/forward", "forward"),
    "forward_mma": ("direct/forward_mma", "forward"),
    "input_grad": ("direct/input_grad", "input_grad"),
    "weight_grad": ("direct/weight_grad", "weight_grad"),
    "grads": ("direct/weight_grad", "grads"),
    "grads_mma": ("direct/grads_mma", "grads"),
    "fused": ("sm90/implicit_gemm", "forward"),
    "fused_input_grad": ("sm90/implicit_gemm", "input_grad"),
    "fused_weight_grad": ("sm90/wgrad_nchw", "weight_grad"),
    "fused_weight_grad_lines": ("sm90/wgrad_nhwc", "weight_grad"),
    "gemm_mma": ("conv/gemm_mma", "forward"),
    "gemm_mma_input_grad": ("conv/gemm_mma", "input_grad"),
    "gemm_fold_narrow": ("sm90/gemm_fold_narrow", "forward"),
    "gemm_fold_pixels": ("sm90/gemm_fold_pixels", "forward"),
    "gemm_depth_to_space": ("sm90/gemm_depth_to_space", "forward"),
    "implicit_gemm_nhwc": ("sm90/implicit_gemm_nhwc", "forward"),
    "gemm_fold_rows": ("sm90/gemm_fold_rows", "forward"),
    "gemm_fold_rows_input_grad": ("sm90/gemm_fold_rows", "input_grad"),
}
# What is patched for few blocks, where a kernel does not ask its configuration how many there are.
FEW_BLOCKS = {
    "forward_mma": (direct_forward_mma, "blocks_at_once", lambda count, tile: count * tile.blocks_resident or 1),
    "gemm_fold_narrow": (gemm_fold_narrow, "blocks_at_once", lambda count, tile: count or 1),
    "grads": (direct_weight_grad, "_slices", lambda count, *_: count + 1),
    "grads_mma": (direct_grads_mma.Tile, "slices", lambda count, tile, _: min(count + 1, math.prod(tile.tiles))),
}


@dataclass(frozen=True)
class Run:
    """One kernel on one case.

    Attributes:
        operation: "im2col", "col2im" or one of PASSES.
        case: the problem.
        dtype: of all tensors; but col2im adds up float32 columns for 16-bit outputs, as in gemm_col2im.
        layout: of the tensors and of the result.
        multiprocessors: how many the grid on tensor cores is for; 0 leaves one block. None for the true number.
        choice: which of the kernel's tiles, of forward_mma and fused also the best on one of their paths, of fused
            a plan; None for the one that it takes.
        tf32: whether fused may take TF32 for float32; forward_mma always may.
    """

    operation: str
    case: Case
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    multiprocessors: int | None = None
    choice: int | str | Plan | None = None
    tf32: bool = False

    def __str__(self):
        dtype = "tf32" if self.tf32 else str(self.dtype).removeprefix("torch.")
        words = [self.operation, self.case.id, dtype, self.layout]
        words += [] if self.multiprocessors is None else [f"{self.multiprocessors}mp"]
        return "-".join([*words, self.choice] if isinstance(self.choice, str) else words)

    @property
    def column_dtype(self):
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def precision(self):
        return "tf32" if self.tf32 or self.operation in ("forward_mma", "grads_mma") else "ieee"

    @property
    def config(self):
        memory_format = FORMATS[self.layout]
        return Config(problem_of(self.case), self.dtype, CPU, self.precision, memory_format=memory_format)

    @property
    def launched(self):
        """The configuration that a call is prepared for, whose grid is for as many multiprocessors as the run asks."""
        if self.multiprocessors is None:
            return self.config
        return replace(self.config, spec=replace(REFERENCE, multiprocessors=self.multiprocessors or 1))

    @property
    def direction(self):
        return PASSES[self.operation][1]

    @property
    def kernel(self):
        return KERNELS[PASSES[self.operation][0]]

    @property
    def chosen_for(self):
        """The configuration that a tile is for; those of weight gradients depend on multiprocessors."""
        return self.launched if self.direction == "weight_grad" else self.config

    @functools.cached_property
    def tiles(self):
        return [*self.kernel.tiles(self.chosen_for, self.direction)]

    @functools.cached_property
    def tile(self):
        """None where the kernel declines the problem."""
        if self.choice is None:
            return self.kernel.tile(self.chosen_for, self.direction)
        if isinstance(self.choice, str):
            path = (PATHS if self.operation == "forward_mma" else FUSED_PATHS)[self.choice]
            of_path = (tile for tile in self.tiles if holds(path, tile))
            return min(of_path, key=lambda tile: self.kernel.seconds(self.chosen_for, self.direction, tile))
        if isinstance(self.choice, int):
            return self.tiles[self.choice % len(self.tiles)] if self.tiles else None
        return self.choice

    def prepare(self):
        """Return the call that runs the kernel, which starts to be compiled; None where it declines the problem."""
        if self.operation in ("im2col", "col2im"):
            rows_call(self, (0, self.case.input_size[0]), (0, self.case.output_size[0]))  # begins to compile
            return functools.partial(rows_call, self)
        if self.tile is None:
            return None
        patched = FEW_BLOCKS.get(self.operation)
        with pytest.MonkeyPatch.context() as patch:
            if patched and self.multiprocessors is not None:
                owner, name, of_count = patched
                patch.setattr(owner, name, lambda *arguments: of_count(self.multiprocessors, *arguments))
            program = self.kernel.program(self.config if patched else self.launched, self.direction, self.tile)
        again = pickle.loads(pickle.dumps(program))  # as another process has it
        assert again == program
        return again.prepare(CPU)

    def check(self, call):
        """Compare with the reference what the prepared call computes."""
        check = {"im2col": check_im2col, "col2im": check_col2im}.get(self.operation, check_direct)
        check(call, self)


# Runs that are left to ``make test-slow``.
SLOW = set()


def some_are_slow(runs, every, stays=lambda run: False):
    """Leave all but one of so many runs of each case to ``make test-slow``, of one case others than of the next.

    So each case stays, and each type, format and choice of a tile with some of them.

    Args:
        runs: those of all cases, the types, formats and choices of each in the same order.
        every: up to the number of runs of a case.
        stays: whether a run stays whatever its number, for it alone takes some path.
    """
    numbers, counts = {}, {}
    for run in runs:
        number, count = numbers.setdefault(run.case, len(numbers)), counts.get(run.case, 0)
        counts[run.case] = count + 1
        # Sums of digits, unlike the numbers, do not leave out a type or a format of all cases, or of every second.
        digits = np.base_repr(count, every) + np.base_repr(number, every)
        if sum(map(int, digits)) % every and not stays(run):
            SLOW.add(run)


def usual(runs):
    """Those that are not left to ``make test-slow``."""
    return [run for run in runs if run not in SLOW]


def runs_of(operation, *layouts, more=()):
    """All cases in float32 and a few in the other types."""
    samples = [(case, torch.float32) for case in (*CASES, *more)]
    samples += [(case, dtype) for case in FEW_CASES for dtype in (torch.float64, torch.float16, torch.bfloat16)]
    runs = [Run(operation, case, dtype, layout) for layout in layouts for case, dtype in samples]
    if len(layouts) == 2:
        some_are_slow(runs, 4)
    return runs


# Each case as float32, and as one type of 16 bits in one format and as the other in the other, but where
# direct/forward_mma declines pixels of half words in channels_last.
MMA_RUNS = [
    Run("forward_mma", case, dtype, "contiguous" if half_words else layout)
    for i, case in enumerate((*CASES, *TILED_CASES))
    for layout, half in zip(FORMATS, (torch.float16, torch.bfloat16)[:: (-1) ** i], strict=True)
    for dtype in (half, torch.float32)
    for half_words in [dtype.itemsize == 2 and case.in_channels // case.groups % 2 == 1]
]
some_are_slow(MMA_RUNS, 4)
# Few blocks: each goes over many tiles and images, and loads one tile while it computes the one before it.
MMA_RUNS += [
    replace(run, multiprocessors=multiprocessors)
    for run in MMA_RUNS
    for multiprocessors in ((0, 1) if run.case in TILED_CASES else (0,))
]
SLOW |= {run for run in MMA_RUNS if replace(run, multiprocessors=None) in SLOW}
MMA_RUNS += [
    Run("forward_mma", TILED_CASES[8], dtype, "channels_last", multiprocessors=1, choice="neighbouring_groups")
    for dtype in (torch.float32, torch.float16)
]
# Long lines of outputs that do not begin at 16 bytes.
MMA_RUNS += [
    Run("forward_mma", case, dtype, multiprocessors=multiprocessors, choice=choice)
    for choice, case, dtype, multiprocessors in (
        ("shifted_row_phases", Case(2, 16, 32, (6, 71), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)), torch.float32, 1),
        ("shifted_row_phases", Case(2, 16, 32, (4, 41), (1, 2), (2, 6)), torch.float16, None),
        ("shifted_of_part_of_the_channels", Case(2, 16, 24, (6, 38), (3, 2), (2, 7), (2, 1)), torch.float16, 0),
        ("shifted_of_part_of_the_channels", Case(2, 8, 24, (6, 33), (1, 2), (2, 4)), torch.float32, None),
        ("shifted_by_single_outputs", Case(3, 8, 32, (4, 35), (3, 3), (2, 5), (1, 1), groups=2), torch.float16, 0),
        ("shifted_by_several_outputs", Case(2, 32, 40, (5, 40), (3, 1), (2, 5), (0, 1), groups=2), torch.float16, None),
        ("shifted_by_several_outputs", Case(2, 16, 8, (2, 38), (2, 5), (2, 7), (1, 1)), torch.float32, 0),
        ("shifted_by_four_outputs", Case(2, 16, 8, (3, 41), (2, 4), (2, 5)), torch.float16, 0),
    )
]

TYPES = {
    "fp32": {"dtype": torch.float32},
    "tf32": {"dtype": torch.float32, "tf32": True},
    "fp16": {"dtype": torch.float16},
    "bf16": {"dtype": torch.bfloat16},
}
THREE = "fp32", "tf32", "fp16"
HALVES = "fp16", "bf16"


def run_in(kind, operation, case, number, choice=None, layout="contiguous"):
    """A run in one of TYPES; of its numbers every third has one block, and every third is for 3 of them."""
    own = {"layout": layout, "multiprocessors": (None, 0, 3)[number % 3], "choice": choice}
    return Run(operation, case, **own, **TYPES[kind])


# Each case once, each path in more than one type; many with few blocks, which go from item to item.
FUSED_RUNS = [
    run_in(THREE[i % 3], "fused", case, i // 2, layout=[*FORMATS][i % 2])
    for i, case in enumerate((*CASES, *TILED_CASES))
]
ROW, WIDE_ROW, CHANNELS, MANY_CHANNELS = TILED_CASES[1], TILED_CASES[2], TILED_CASES[6], CASES[30]
FUSED_RUNS += [
    Run("fused", case, layout=layout, multiprocessors=i % 2, choice=path, **TYPES[THREE[i % 3]])
    for i, (path, layout, case) in enumerate(
        [
            ("cells_of_several_inputs", "contiguous", ROW),
            ("cells_of_several_inputs", "channels_last", ROW),
            ("pairs_of_inputs_of_a_cell", "contiguous", ROW),
            ("paired_blocks", "contiguous", CHANNELS),
            ("pairs_of_inputs_of_a_cell", "contiguous", replace(ROW, out_channels=32)),
            ("paired_blocks", "contiguous", WIDE_ROW),
            ("several_slots", "channels_last", CHANNELS),
            ("strips", "contiguous", WIDE_ROW),
            ("strips", "channels_last", WIDE_ROW),
            ("channels_shared", "contiguous", MANY_CHANNELS),
            ("channels_shared", "channels_last", replace(MANY_CHANNELS, out_channels=133)),
            ("eight_units", "contiguous", CHANNELS),
            ("eight_units", "channels_last", CHANNELS),
            ("widest", "contiguous", CHANNELS),
            ("staged", "contiguous", CASES[15]),  # pairs of columns in rows of odd length
            ("rows_of_a_cell", "contiguous", Case(2, 9, 20, (3, 7), (2, 6), (1, 5), (0, 1))),
            ("rows_of_a_cell", "contiguous", Case(2, 9, 70, (3, 16), (1, 8), (1, 4), (0, 2))),
            ("landing", "contiguous", TILED_CASES[3]),
            ("landing_whole_images", "contiguous", Case(3, 20, 40, (6, 12), (2, 2), (2, 2))),
            ("landing_partial_pieces", "contiguous", Case(3, 20, 40, (8, 6), (4, 4), (2, 2), (1, 1))),
            ("landing_strips", "contiguous", Case(2, 20, 24, (4, 200), (3, 3), (1, 1), (1, 1))),
            ("landing_in_parts_of_a_chunk", "contiguous", TILED_CASES[3]),
            ("landing_beside_most_sums", "contiguous", Case(2, 20, 40, (16, 16), (2, 2), (2, 2))),
            ("landing_cells_of_several_inputs", "contiguous", Case(2, 40, 8, (6, 24), (3, 3), (1, 1), (1, 1))),
            ("landing_whole_images", "contiguous", Case(3, 64, 48, (8, 16), (1, 3), (1, 3), groups=2)),
            ("landing_whole_images", "contiguous", Case(3, 20, 40, (6, 12), (3, 2), (1, 2), (1, 0))),
        ]
    )
]
FUSED_RUNS += [Run("fused", CHANNELS, torch.bfloat16, layout) for layout in FORMATS]
FUSED_RUNS += [
    Run("fused", case, (torch.float16, torch.bfloat16)[i % 2], layout, i % 2, choice=path)
    for i, (path, layout, case) in enumerate(
        [
            ("lined", "contiguous", Case(3, 20, 30, (1, 9), (1, 16), (1, 8))),
            ("lined", "contiguous", Case(2, 24, 44, (4, 7), (2, 4), (2, 4), groups=2)),
            ("lined", "contiguous", Case(2, 20, 18, (3, 6), (2, 18), (1, 16), (1, 1))),
            ("lined_in_halves", "contiguous", Case(3, 20, 30, (1, 16), (1, 16), (1, 8), (0, 4))),
            ("lined_in_halves", "contiguous", Case(2, 20, 44, (5, 9), (3, 6), (2, 4), (1, 1))),
            ("lined_in_halves_of_eight", "contiguous", Case(2, 20, 18, (2, 6), (1, 16), (1, 16))),
            ("lined_strips", "contiguous", Case(1, 20, 34, (3, 72), (2, 4), (1, 4), (1, 0))),
            ("lined_landing", "contiguous", Case(3, 24, 20, (3, 16), (1, 8), (1, 4), (0, 2))),
            ("lined_rows_shared", "contiguous", Case(2, 20, 40, (5, 9), (4, 4), (4, 4))),
            ("lined_channels_shared", "contiguous", Case(2, 20, 40, (5, 9), (3, 8), (1, 8), (1, 4))),
            ("lines", "channels_last", Case(3, 40, 40, (5, 9), (3, 4), (1, 2), (1, 1))),
            ("lines", "channels_last", Case(2, 128, 140, (6, 7), (2, 3), (1, 1), groups=2)),
            ("lines_of_images", "channels_last", Case(7, 72, 40, (3, 4), (4, 4), (2, 2), (1, 1))),
            ("lines_of_rows", "channels_last", Case(2, 136, 24, (15, 8), (3, 5), (2, 1), (0, 2))),
            ("lines_of_strips", "channels_last", Case(2, 72, 24, (6, 150), (3, 3), (1, 1), (1, 1))),
            ("lines_of_strips", "channels_last", Case(1, 24, 70, (5, 136), (2, 7), (1, 2), (1, 2))),
            ("lines_of_planes", "channels_last", Case(2, 24, 16, (6, 20), (3, 3), (1, 1), (1, 1))),
            ("lines_of_planes", "channels_last", Case(3, 72, 8, (5, 136), (2, 5), (2, 1), (0, 2))),
            ("flat_lines", "channels_last", Case(3, 72, 40, (5, 14), (2, 2), (2, 2))),
            ("staged_pixels", "channels_last", Case(2, 40, 136, (5, 9), (3, 3), (1, 1), (1, 1))),
            ("staged_pixels", "channels_last", Case(2, 20, 48, (5, 9), (3, 4), (2, 2), (1, 1))),
            ("staged_pixels_of_slots", "channels_last", Case(2, 40, 16, (5, 9), (3, 4), (1, 2), (1, 1))),
            ("staged_pixels_of_blocks", "channels_last", Case(2, 40, 64, (5, 9), (2, 2), (2, 2))),
            ("lines_of_odd_rows", "channels_last", Case(5, 72, 24, (3, 4), (4, 4), (2, 2), (1, 1))),
            ("lines_of_odd_rows", "channels_last", Case(3, 64, 35, (4, 7), (2, 2), (1, 2))),
            ("lines_of_parts", "channels_last", Case(2, 40, 40, (9, 16), (3, 2), (1, 2))),
            ("half_lines", "channels_last", Case(3, 24, 40, (5, 9), (3, 3), (1, 1), (1, 1))),
            ("half_lines", "channels_last", Case(5, 64, 24, (1, 40), (1, 8), (1, 4), (0, 2), groups=2)),
            ("lines_shared", "channels_last", Case(3, 72, 40, (6, 12), (2, 4), (2, 2), (0, 1))),
        ]
    )
]


# One run of each path stays in each format, without groups and with them.
KINDS_OF_FUSED = {}
for one in FUSED_RUNS:
    if KINDS_OF_FUSED.setdefault((one.choice, one.layout, one.case.groups > 1), one) != one and one.choice:
        SLOW.add(one)


def run_of_many_items(case, suits, columns=32, layout="contiguous"):
    """A block with many items, chunks and steps, of the first plan of small tiles that suits."""
    plans = plans_of(Plan(problem_of(case), "forward", 2, False, layout == "channels_last"))
    choice = next(plan for plan in plans if plan.columns == columns and plan.units == 4 and suits(plan))
    return Run("fused", case, torch.float16, layout, multiprocessors=0, choice=choice)


# Weights come again and again; inputs land.
FUSED = run_of_many_items(Case(2, 224, 24, (5, 9), (3, 3), (1, 1), (1, 1)), lambda plan: not plan.resident)
FUSED_LANDED = run_of_many_items(Case(2, 224, 24, (5, 16), (3, 3), (1, 1), (1, 1)), lambda plan: plan.landing)
FUSED_PIXELS = Run(
    "fused", Case(2, 20, 48, (5, 9), (3, 4), (2, 2), (1, 1)), torch.float16, "channels_last", choice="staged_pixels"
)
FUSED_LINED = Run("fused", Case(3, 20, 30, (1, 9), (1, 16), (1, 8)), torch.float16, choice="lined")
FUSED_LINES = run_of_many_items(
    Case(5, 224, 24, (5, 9), (3, 3), (1, 1), (1, 1)),
    lambda plan: plan.way == "lines" and plan.line_box[0] > 1,
    layout="channels_last",
)
FUSED_TURNS = Run(
    "fused", Case(5, 40, 24, (9, 11), (3, 3), (1, 1), (1, 1)), torch.float16, "channels_last", 0, "lines_by_turns"
)
FUSED_STRIPS = Run(
    *("fused", Case(2, 20, 24, (3, 200), (3, 3), (1, 1), (1, 1)), torch.float16),
    multiprocessors=0,
    choice="strips_of_more_tiles_than_others",
)
FUSED_SPLIT = Run("fused", MANY_CHANNELS, torch.float32, multiprocessors=0)
FUSED_RUNS += [
    FUSED,
    FUSED_LANDED,
    FUSED_LINES,
    FUSED_STRIPS,
    FUSED_TURNS,
    replace(FUSED_TURNS, case=TILED_CASES[3], layout="contiguous", choice="landing_by_turns"),
    FUSED_SPLIT,
    Run("fused", MANY_CHANNELS, torch.float16, multiprocessors=0),
]
# Sums of 864 products, which float32 as three products has to keep below the bar of float32.
LONG_SUMS = Run("fused", Case(1, 96, 24, (5, 9), (3, 3), (1, 1), (1, 1)))
FUSED_RUNS += [replace(LONG_SUMS, layout=layout) for layout in FORMATS]


# Each case in each type, in its own tile in one format and in another tile in the other; many with few blocks.
FOLD_RUNS = [
    run_in(kind, "gemm_fold_narrow", case, i + j, choice, layout)
    for i, case in enumerate(FOLD_CASES)
    for j, kind in enumerate(THREE)
    for layout, choice in zip(FORMATS, (None, 37 * i + 101 * j)[:: (-1) ** (i + j)], strict=True)
]
some_are_slow(FOLD_RUNS, 6)
FOLD_RUNS += [Run("gemm_fold_narrow", FOLD_CASES[0], torch.bfloat16, layout) for layout in FORMATS]


def run_of(operation, case, suits, kind="fp16", layout="contiguous", multiprocessors=0):
    """A block with many items and steps unless there are more multiprocessors, of the first tile that suits."""
    run = Run(operation, case, layout=layout, multiprocessors=multiprocessors, **TYPES[kind])
    return replace(run, choice=next(i for i, tile in enumerate(run.tiles) if suits(tile)))


fold_run_of = functools.partial(run_of, "gemm_fold_narrow")
FOLD = fold_run_of(Case(2, 24, 3, (35, 16), (4, 4), (2, 2), (1, 1)), lambda tile: tile.folders == 64)
# Rows of 36 and of 40 bytes, of which there are no boxes.
FOLD_PIECES = fold_run_of(Case(2, 24, 3, (35, 18), (4, 4), (2, 2), (1, 1)), lambda tile: tile.folders == 64)
FOLD_MANY_CHANNELS = fold_run_of(Case(2, 240, 1, (35, 20), (2, 4), (1, 2), (1, 1)), lambda tile: not tile.boxed)
FOLD_RUNS += [FOLD, FOLD_PIECES, FOLD_MANY_CHANNELS]
# Boxes: one and several of a row, flat ones, channels of several, strips, few and many stages.
FOLD_RUNS += [
    fold_run_of(FOLD_CASES[3], lambda tile: tile.columns == 64 and tile.stages == 4),
    fold_run_of(FOLD_CASES[3], lambda tile: tile.columns == 64, "tf32", multiprocessors=3),
    fold_run_of(Case(2, 264, 1, (5, 16), (2, 2)), lambda tile: tile.copied == 16),
    fold_run_of(FOLD_CASES[0], lambda tile: tile.flat and tile.stages == 4, "fp32"),
    fold_run_of(FOLD_CASES[4], lambda tile: tile.columns == 32 and tile.rows > 2, "tf32", multiprocessors=None),
    fold_run_of(FOLD_CASES[0], lambda tile: tile.flat and tile.warpgroups == 2),
    fold_run_of(FOLD_CASES[6], lambda tile: tile.boxed and tile.rows > 1, "fp32", "channels_last", 3),
    fold_run_of(FOLD_CASES[6], lambda tile: tile.boxed and tile.stages == 2, layout="channels_last"),
]


def tiles_in_two_types(i):
    """The tiles that a case, by its number, has in a type of 16 bits and in TF32: its own or another."""
    return (None, 5 * i + 7)[i // 2 % 2], (5 * i + 3, None)[i % 2]


def runs_in_two_types(operation, cases, stays, choices=tiles_in_two_types, layout="contiguous"):
    """Each case in a type of 16 bits and in TF32, in its own tile or in another one, many with few blocks.

    `stays` is of tiles whose runs are not left to ``make test-slow``, for they alone take some path.
    """
    runs = [
        run_in(kind, operation, case, i + j, choice, layout)
        for i, case in enumerate(cases)
        for j, (kind, choice) in enumerate(zip((HALVES[i % 2], "tf32"), choices(i), strict=True))
    ]
    runs = [run for run in runs if run.tile is not None]
    some_are_slow(runs, 2, lambda run: stays(run.tile))
    return runs


# Each case in either pass, by any tile; types and formats in turn.
GEMM_MMA_PASSES = itertools.product((*CASES, *TILED_CASES), ("gemm_mma", "gemm_mma_input_grad"))
GEMM_MMA_RUNS = [
    run_in(kind, operation, case, 0, 7 * i + 5 * j, [*FORMATS][(i + i // 2 + j) % 2])
    for i, (case, operation) in enumerate(GEMM_MMA_PASSES)
    for j, kind in enumerate((HALVES[i % 2], *THREE[:2]))
]
GEMM_MMA_RUNS = [run for run in GEMM_MMA_RUNS if run.tile is not None]
some_are_slow(GEMM_MMA_RUNS, 3)
# Blocks that have all column phases of a stride of 3 or 5.
PHASED_CASES = (
    Case(2, 16, 40, (6, 9), (3, 5), (2, 3), (1, 2), dilation=(2, 1), groups=2),
    Case(1, 20, 24, (5, 8), (3, 3), (5, 5), (1, 1), (2, 1)),
)
for number, (case, kind) in enumerate(itertools.product(PHASED_CASES, (*THREE[:2], *HALVES))):
    run = run_in(kind, "gemm_mma", case, 0, layout=[*FORMATS][number % 2])
    of_all = [one for one in run.tiles if one.phases == case.stride[1]]
    GEMM_MMA_RUNS += [replace(run, choice=one) for one in {one.warps + one.tiles: one for one in of_all}.values()]
GEMM_MMA = Run("gemm_mma", TILED_CASES[6], torch.float16, "channels_last", choice=0)
GEMM_MMA_CHUNKS = Run("gemm_mma", MANY_CHANNELS, choice=0)

IMAGE_ROW_RUNS = runs_in_two_types(
    "gemm_fold_pixels",
    (*IMAGE_CASES, *IMAGE_ROW_CASES),
    lambda tile: tile.problem.batch % tile.images > 0 or tile.chunks > 3,
)
# Many items of two blocks of rows, with more passes than there is room for; and of windows.
IMAGE_ROWS = run_of(
    *("gemm_fold_pixels", IMAGE_ROW_CASES[2]),
    lambda tile: tile.position_blocks == 2 and tile.lines // 16 > 2 * tile.fold_outs,
    "tf32",
)
IMAGE_ROW_WINDOWS = run_of("gemm_fold_pixels", IMAGE_ROW_CASES[3], lambda tile: tile.windows[2] > 0, "tf32")
IMAGE_ROW_RUNS += [IMAGE_ROWS, IMAGE_ROW_WINDOWS]


SHUFFLE_RUNS = runs_in_two_types(
    "gemm_depth_to_space", SHUFFLE_CASES, lambda tile: tile.chunks > 3 or tile.lines % 64 > 0
)
# Several blocks of lines, whose outputs are stored during the next item; and outputs that are stored at once.
SHUFFLE, SHUFFLE_TF32 = (
    run_of("gemm_depth_to_space", SHUFFLE_CASES[-1], lambda tile: tile.kept and tile.line_blocks > 2, kind)
    for kind in ("fp16", "tf32")
)
SHUFFLE_ALONE = run_of("gemm_depth_to_space", SHUFFLE_CASES[4], lambda tile: not tile.kept)
SHUFFLE_RUNS += [SHUFFLE, SHUFFLE_TF32, SHUFFLE_ALONE]


CELL_ROW_RUNS = runs_in_two_types(
    *("implicit_gemm_nhwc", CELL_ROW_CASES),
    lambda tile: tile.problem == problem_of(CELL_ROW_CASES[7]) or (tile.group == 0 and tile.segments > 1),
    lambda i: (5 * i + 2, None) if i % 3 else (None, 3 * i + 1),
    "channels_last",
)
cell_row_run_of = functools.partial(run_of, "implicit_gemm_nhwc", layout="channels_last")
# Many items of several chunks: rows from anywhere, in either type; lines one after the other; strips of eight cells.
CELL_ROWS = cell_row_run_of(CELL_ROW_CASES[0], lambda tile: tile.group == 0 and tile.lines == 64)
CELL_ROWS_TF32 = cell_row_run_of(CELL_ROW_CASES[1], lambda tile: tile.kept and tile.lines == 96, "tf32")
CELL_ROWS_IN_LINES = cell_row_run_of(CELL_ROW_CASES[1], lambda tile: tile.group == 8 and tile.lines == 96)
CELL_ROWS_IN_EIGHTS = cell_row_run_of(CELL_ROW_CASES[10], lambda tile: tile.group > 8 and tile.row_blocks == 2)
CELL_ROW_RUNS += [CELL_ROWS, CELL_ROWS_TF32, CELL_ROWS_IN_LINES, CELL_ROWS_IN_EIGHTS]
CELL_ROW_RUNS += [
    cell_row_run_of(CELL_ROW_CASES[10], lambda tile: not tile.kept, "tf32"),
    cell_row_run_of(CELL_ROW_CASES[3], lambda tile: tile.row_blocks == 2, "tf32"),
    cell_row_run_of(CELL_ROW_CASES[12], lambda tile: tile.group > 8 and tile.segments > 1),
    cell_row_run_of(CELL_ROW_CASES[11], lambda tile: tile.group > 8 and tile.strips > 1, "bf16"),
]


# Each case in its own tile or another one, and the other way round backwards, many with few blocks.
ROW_RUNS = [
    run_in(kind, operation, case, i, None if (i + j) % 2 else 5 * i + 3)
    for i, case in enumerate(ROW_CASES)
    for j, operation in enumerate(("gemm_fold_rows", "gemm_fold_rows_input_grad"))
    for kind in (HALVES[i % 2], "tf32")
]
ROW_RUNS = [run for run in ROW_RUNS if run.tile is not None]
some_are_slow(ROW_RUNS, 2, lambda run: run.case in [ROW_CASES[i] for i in (2, 3, 5, 7, 8, 9, 10)])
ROW_RUNS += [  # whose rows end before those of the input
    Run("gemm_fold_rows", Case(1, 32, 32, (3, 136), (2, 1), (1, 1), (0, 24)), torch.float16),
    Run("gemm_fold_rows", Case(1, 16, 16, (3, 132), (2, 5), (1, 1), (0, 8)), torch.float32, tf32=True),
]


row_run_of = functools.partial(run_of, "gemm_fold_rows")
ROWS = row_run_of(Case(2, 32, 64, (5, 136), (3, 3), (1, 1), (1, 1)), lambda tile: tile.slots == 1)
# Nothing is shuffled, so lanes do not meet by that.
ROWS_IN_PARTS = row_run_of(Case(2, 16, 32, (5, 256), (2, 1)), lambda tile: tile.slots == 1)
# The last outputs come in a step behind the row's end.
ROWS_BEHIND = row_run_of(Case(1, 16, 64, (3, 128), (3, 3), (1, 1), (1, 1)), lambda tile: tile.slots == 1)
ROWS_TF32 = row_run_of(ROWS.case, lambda tile: (tile.outs, tile.chunk) == (32, 16), "tf32")
# Not all chunks of two steps have a stage.
ROWS_OF_MANY_CHUNKS = row_run_of(Case(1, 96, 16, (3, 40), (1, 3)), lambda tile: tile.chunk == 8, "tf32")
# Registers do not hold the words of all taps down.
ROWS_OF_TAPS_APART = row_run_of(
    Case(1, 32, 32, (3, 36), (3, 7)), lambda tile: tile.taps_together < tile.weight_rows, "tf32"
)
ROW_RUNS += [ROWS, ROWS_IN_PARTS, ROWS_BEHIND, ROWS_TF32, ROWS_OF_MANY_CHUNKS, ROWS_OF_TAPS_APART]


# Each case in each type, in its own tile and in others.
GRADIENT_CASES = [
    Case(2, 20, 24, (5, 64), (3, 3), (1, 1), (1, 1)),
    Case(2, 40, 70, (7, 16), (4, 4), (2, 2), (1, 1)),
    Case(2, 16, 16, (3, 72), (2, 2), (2, 2)),
    Case(2, 32, 130, (7, 8), (2, 2), (2, 2), groups=2),
    Case(1, 33, 20, (4, 40), (3, 5), (2, 1), (2, 2), (1, 0), (1, 1)),
    Case(2, 24, 16, (3, 32), (3, 3), (1, 2), (1, 2), (0, 1), (2, 2)),
    Case(2, 16, 20, (1, 88), (1, 16), (1, 4), (0, 6)),
    Case(2, 100, 16, (3, 16), (1, 1)),
    # Planes that are one row, and two or four of them together.
    Case(2, 20, 24, (4, 64), (3, 3)),
    Case(2, 24, 40, (5, 24), (2, 5), (1, 2), groups=2),
    Case(3, 16, 68, (3, 16), (1, 3)),
    Case(2, 16, 16, (2, 40), (2, 7), (2, 1), dilation=(1, 2)),
    # Rows of them that are cut off.
    Case(2, 20, 24, (5, 64), (3, 3), (1, 1), (1, 2)),
    Case(2, 24, 40, (4, 24), (4, 5), (2, 3), (1, 1), groups=2),
    Case(1, 16, 20, (9, 72), (3, 6), (1, 1), (2, 3), dilation=(2, 1)),
    Case(3, 8, 12, (3, 16), (3, 3), (5, 5), (1, 1), (1, 0), (2, 2), groups=2),
    # Inputs whose rows are not whole 16 bytes.
    Case(3, 24, 20, (9, 14), (2, 2), (2, 2)),
    Case(2, 40, 24, (8, 6), (4, 4), (2, 2), (1, 1)),
    Case(2, 20, 16, (5, 61), (3, 4), (1, 2), (1, 1)),
    # Images of one pixel, which are in both formats at once.
    Case(9, 20, 24, (1, 1), (4, 4)),
]
GRADIENT_RUNS = [
    run_in(kind, "fused_weight_grad", case, i + j, choice, [*FORMATS][in_other_format and choice is not None])
    for i, case in enumerate(GRADIENT_CASES)
    for in_other_format in [i % 4 == 1 or case.input_size == (1, 1)]
    for j, kind in enumerate(THREE)
    for choice in (None, 37 * i + 101 * j)
]
GRADIENT_RUNS = [run for run in GRADIENT_RUNS if run.tile is not None]
some_are_slow(
    GRADIENT_RUNS,
    6,
    lambda run: run.tile.segment < run.tile.tile_w or (run.case == GRADIENT_CASES[16] and run.tile.lines > 1),
)
GRADIENT_RUNS += [Run("fused_weight_grad", case, torch.bfloat16) for case in GRADIENT_CASES[:2]]
# Sides of output channels of their own, in each type, with few blocks and many.
GRADIENT_RUNS += [
    run_of("fused_weight_grad", case, lambda tile: tile.sides_co > 1, kind, layout, multiprocessors)
    for case, layout, multiprocessors in (
        (GRADIENT_CASES[1], "contiguous", 0),
        (GRADIENT_CASES[10], "channels_last", None),
    )
    for kind in THREE
]
GRADIENT = Run("fused_weight_grad", Case(1, 16, 16, (20, 64), (3, 3), (1, 1), (1, 1)), torch.float16, multiprocessors=0)
GRADIENT_TF32 = replace(GRADIENT, dtype=torch.float32, tf32=True)

# Each case in its own tile and in others.
LINES_CASES = [
    Case(2, 24, 16, (5, 16), (3, 3), (1, 1), (1, 1)),
    Case(2, 72, 136, (7, 16), (4, 4), (2, 2), (1, 1)),
    Case(5, 40, 72, (4, 4), (4, 4), (2, 2), (1, 1)),
    Case(3, 128, 64, (7, 14), (2, 2), (2, 2)),
    Case(2, 128, 96, (7, 8), (3, 2), (2, 2), groups=2),
    Case(1, 40, 24, (6, 40), (3, 5), (2, 1), (2, 2), (1, 0), (1, 1)),
    Case(2, 16, 24, (3, 33), (3, 3), (1, 2), (1, 2), (0, 1), (2, 2)),
    Case(3, 200, 40, (1, 88), (1, 16), (1, 8), (0, 4)),
    Case(9, 72, 104, (1, 1), (4, 4)),
    Case(2, 64, 128, (16, 24), (1, 1)),
    Case(2, 64, 64, (5, 24), (5, 7), (3, 2), (4, 3), (2, 1), (2, 3)),
]
LINES_RUNS = [
    run_in(HALVES[(i + j) % 2], "fused_weight_grad_lines", case, i + j, choice, "channels_last")
    for i, case in enumerate(LINES_CASES)
    for j, choice in enumerate((None, 37 * i, 101 * i + 59, 211 * i + 307))
]
some_are_slow(LINES_RUNS, 4, lambda run: run.tile.size[2] % 8 or 1 < run.tile.taps_w.boxes < run.tile.taps_w.taps)
LINES = replace(LINES_RUNS[0], case=Case(1, 64, 64, (20, 64), (3, 3), (1, 1), (1, 1)), multiprocessors=0)
SHARED_BOXES = run_of(
    *("fused_weight_grad_lines", LINES_CASES[1], lambda tile: 1 < tile.taps_w.boxes < tile.taps_w.taps),
    layout="channels_last",
)
LINES_RUNS += [LINES, SHARED_BOXES]


@pytest.fixture(scope="module")
def calls(prepared, builder):
    """The prepared calls of all tests that are to run."""
    with emulator.install(builder):
        yield prepared


# Two cells of a thread in channels_last: strides of more than two, phases without a tap, planes that are few.
PAIRED_CASES = [
    Case(2, 8, 8, (7, 9), (8, 8), (4, 4), (2, 2), groups=8),
    Case(2, 8, 8, (5, 6), (3, 2), (3, 5), (1, 0), groups=8),
    Case(3, 6, 6, (6, 7), (4, 4), (2, 2), (1, 1), groups=6),
]


@pytest.mark.parametrize(
    ("case", "dtype", "channels_out", "planes"),
    [
        (Case(2, 8, 64, (6, 70), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1), groups=4), torch.float16, 16, 2),
        (Case(3, 8, 44, (5, 9), (3, 3), (2, 2), (1, 1), (0, 1), (2, 2), groups=4), torch.float32, 6, 2),
        (Case(2, 6, 24, (3, 20), (2, 3), (6, 1), (1, 1), (1, 0), (4, 1), groups=2), torch.float64, 6, 1),
        (Case(1, 4, 1064, (4, 5), (1, 3), (3, 1), (1, 1)), torch.float32, 16, 1),  # more than a block stores at once
    ],
)
def test_direct_blocks_share_rows_of_bias_in_channels_last(case, dtype, channels_out, planes, builder, poison):
    layer = direct_forward._Layer(problem_of(case), dtype, True, REFERENCE)
    fitting = filter(None, map(layer.fitting, layer.shapes(False)))
    tiles = [tile for tile in fitting if (tile.channels_out, tile.planes) == (channels_out, planes)]
    run = Run("forward", case, dtype, "channels_last", choice=min(tiles, key=layer.cycles))
    poison("cpu")
    with emulator.install(builder):
        run.check(run.prepare())


@pytest.mark.parametrize(
    ("batch", "channels", "side", "most"),
    [(256, 1024, 7, 3), (128, 512, 14, 4), (4096, 32, 1, 1), (32, 256, 56, 16), (16, 128, 64, 20), (1, 16, 64, 66)],
)
def test_depthwise_blocks_take_few_tiles_below_the_image(batch, channels, side, most):
    problem = problem_of(Case(batch, channels, channels, (side, side), (3, 3), groups=channels))
    tile = direct_forward.tile_of(problem, torch.float16, True)
    assert tile.depthwise
    below = -(-(side + 2) // tile.rows)
    assert -(-below // tile.turns) * tile.turns <= most


def test_depthwise_threads_have_two_cells_in_channels_last_while_their_sums_are_few():
    for case in PAIRED_CASES:
        tile = direct_forward.tile_of(problem_of(case), torch.float32, True)
        assert (tile.depthwise, tile.cells) == (True, 2)
    many = Case(2, 8, 8, (5, 6), (16, 16), (8, 8), (4, 4), groups=8)
    assert direct_forward.tile_of(problem_of(many), torch.float32, True).cells == 1


@pytest.mark.parametrize("channels", [20, 36])
def test_depthwise_blocks_take_tile_after_tile(channels, builder, poison):
    case = Case(2, channels, channels, (270, 11), (4, 4), (2, 2), (1, 1), groups=channels)
    run = Run("forward", case, torch.float16, "channels_last", multiprocessors=1)
    tile = run.kernel.tile(run.launched, "forward")
    assert tile.depthwise
    assert 1 < tile.turns < tile.turns * tile.rows < 270 < 2 * tile.turns * tile.rows
    poison("cpu")
    with emulator.install(builder):
        run.check(replace(run, choice=tile).prepare())


# Two of three forward runs are repeated as input gradients, where a tile serves these. An input gradient has its
# strides between inputs.
FUSED_GRADIENTS = [
    run
    for i, one in enumerate(FUSED_RUNS)
    if one.choice is None and i % 3 != 1
    if (run := replace(one, operation="fused_input_grad")).tile is not None
]
SLOW |= {run for i, run in enumerate(FUSED_GRADIENTS) if i % 3}  # each case stays as a forward pass
FUSED_RUNS += FUSED_GRADIENTS
FUSED_RUNS += [
    Run("fused_input_grad", case, layout=layout, choice="several_slots", **TYPES[THREE[i]])
    for i, (layout, case) in enumerate([("contiguous", ROW), ("channels_last", WIDE_ROW), ("contiguous", WIDE_ROW)])
]
FUSED_RUNS += [
    Run("fused_input_grad", case, dtype, "channels_last", i, choice="lines_of_planes")
    for i, dtype, case in (
        (0, torch.float16, Case(3, 20, 72, (6, 7), (4, 3), (2, 3), (1, 0))),
        (1, torch.bfloat16, Case(2, 70, 128, (5, 9), (2, 2), (2, 2), groups=2)),
    )
]
# Units, columns and sets of phases that those before do not have.
FUSED_RUNS += [
    run_of(operation, case, functools.partial(holds, condition), kind, "channels_last")
    for operation, case, kind, condition in (
        ("fused", Case(1, 70, 1, (4, 6), (2, 1), (6, 4), (1, 8), (5, 0), (1, 2)), "bf16", "phase_sets == 12"),
        ("fused_input_grad", Case(2, 16, 4, (5, 19), (3, 1), (5, 2), (5, 2), (0, 0), (3, 1), 2), "fp32", "staged"),
        ("fused_input_grad", Case(2, 33, 1, (4, 3), (5, 2), (2, 6), (2, 0), (0, 2)), "bf16", "unit[1] == 6"),
        (
            *("fused_input_grad", Case(3, 60, 192, (6, 7), (1, 5), (1, 1), (1, 3), (0, 1), (1, 2), 3), "bf16"),
            "columns == 96 and slots == 3",
        ),
    )
]


def test_runs_of_fused_are_of_every_kind():
    assert {run.tile.split for run in usual(FUSED_RUNS) if run.tile.blocks == 2} == {True, False}
    assert {run.tile.channel_sets > 1 for run in usual(FUSED_RUNS) if run.tile.warpgroups_m == 2} == {True, False}
    assert {run.tile.slots > 1 for run in usual(FUSED_RUNS) if run.operation == "fused_input_grad"} == {True, False}
    few_blocks = [(run.tile, run.multiprocessors) for run in usual(FUSED_RUNS) if run.multiprocessors is not None]
    assert {tile.items > tile.blocks_of(tile.items, count or 1) for tile, count in few_blocks} == {True, False}


# float32 that is rounded on its way to tensor cores, by each kernel that does so.
ROUNDING_RUNS = [
    Run("forward_mma", TILED_CASES[0]),
    *(
        Run(operation, case, layout=layout, tf32=tf32)
        for operation, case, layout in (
            ("fused", Case(2, 40, 24, (5, 8), (3, 3), (1, 1), (1, 1)), "contiguous"),
            ("fused", Case(2, 40, 24, (5, 8), (3, 3), (1, 1), (1, 1)), "channels_last"),
            ("gemm_fold_narrow", FOLD.case, "contiguous"),
            ("fused_weight_grad", GRADIENT.case, "contiguous"),
        )
        for tf32 in (True, False)
    ),
    IMAGE_ROW_WINDOWS,
    Run("grads_mma", Case(2, 16, 12, (5, 8), (3, 3), (1, 1), (1, 1), groups=2)),
]
# NaN as GPUs make it, which an addition would take for an overflow, the same with a sign, and infinity.
NOT_FINITE = {"nan": 0x7FFFFFFF, "negative_nan": -1, "infinity": 0x7F800000}


@pytest.mark.parametrize("bits", NOT_FINITE.values(), ids=NOT_FINITE)
@pytest.mark.parametrize("run", ROUNDING_RUNS, ids=str)
def test_what_is_not_finite_stays_so_where_float32_is_rounded(run, bits, calls):
    data = sample(run.case, torch.float32, "cpu")
    input = data.input.clone()
    input[-1, 1].view(torch.int32)[run.case.input_size[0] // 2, run.case.input_size[1] // 2] = bits
    input = input.contiguous(memory_format=FORMATS[run.layout])
    if run.operation == "fused_weight_grad":
        assert not calls[run](data.grad_output, input)[1].isfinite().any()
        return
    if run.operation == "grads_mma":
        own_group = slice(data.input.shape[1] // run.case.groups)
        assert not calls[run](data.grad_output, input, data.weight)[1][1].isfinite().any()
        weight, grad_output = data.weight.clone(), data.grad_output.clone()
        weight[1].view(torch.int32)[0, 0, 0] = bits
        assert not calls[run](grad_output, data.input, weight)[0][:, 1, 1:, 1:].isfinite().any()
        grad_output[-1, 1].view(torch.int32)[2, 3] = bits
        for_input, for_weight = calls[run](grad_output, data.input, data.weight)
        assert not for_weight[own_group, 1].isfinite().any()
        assert not for_input[-1, own_group, 1:4, 2:5].isfinite().any()
        return
    wanted = torch.nn.functional.conv_transpose2d(input, data.weight, **run.case.parameters)
    assert not wanted.isfinite().all()
    output = calls[run](input, data.weight, None)
    assert not output[~wanted.isfinite()].isfinite().any()
    if run.operation.startswith("fused"):
        assert torch.equal(output[wanted.isinf()], wanted[wanted.isinf()])


# float32 as sums of two values of TF32, by each kernel that does so.
SPLIT_RUNS = [run for run in ROUNDING_RUNS if run.operation.startswith("fused") and run.precision == "ieee"]
SPLIT_RUNS += [replace(SPLIT_RUNS[0], operation="fused_input_grad")]
LARGEST = torch.finfo(torch.float32).max
TINY_BAR = 5e-5  # of values that TF32 has few bits for; see csrc/include/ptx/mma.cuh


@pytest.mark.parametrize("of_second", [False, True], ids=["of_first", "of_second"])
@pytest.mark.parametrize("exponent", [-123, 127], ids=["tiny", "huge"])
@pytest.mark.parametrize("run", SPLIT_RUNS, ids=str)
def test_float32_at_the_ends_of_its_range(run, exponent, of_second, calls):
    """Elements of 1e-37 and less, which lose bits, and some of the largest float32, which do not."""
    case = run.case
    first, second, *no_bias = arguments_of(run.direction, replace(sample(case, torch.float32, "cpu"), bias=None))
    exactly = {
        "forward": functools.partial(reference.forward, **case.parameters),
        "input_grad": functools.partial(reference.input_grad, input_size=case.input_size, **case.grad_parameters),
        "weight_grad": functools.partial(reference.weight_grad, kernel_size=case.kernel_size, **case.grad_parameters),
    }[run.direction]

    def scaled(*exponents):
        return [
            value.mul(2.0**one).clamp(-LARGEST, LARGEST).contiguous(memory_format=FORMATS[run.layout])
            for value, one in zip((first, second), exponents, strict=True)
        ]

    exponents = (exponent, -20 if exponent > 0 else 0)
    exponents = exponents[::-1] if of_second else exponents
    usual, ends = scaled(0, 0), scaled(*exponents)
    assert exponent < 0 or max(value.abs().max() for value in ends) == LARGEST
    errors = []
    for operands in (usual, ends):
        exact = exactly(*map(reference.to_array, operands))
        errors.append(reference.relative_error(calls[run](*operands, *no_bias), exact))
    assert errors[0] <= 1e-6
    assert errors[1] <= (1.25 * errors[0] if exponent > 0 else TINY_BAR), errors


DEPTHWISE_CASES = [
    Case(1, 3, 3, (21, 40), (4, 4), (2, 2), (1, 1), groups=3),  # several tiles an image
    Case(3, 2, 2, (6, 7), (8, 8), (4, 4), (2, 2), groups=2),  # CenterNet's
    Case(2, 6, 6, (6, 7), (2, 2), (2, 2), groups=2),  # three channels of a thread
    Case(2, 44, 2, (5, 6), (2, 2), (2, 2)),  # blocks and threads that share input channels
    Case(1, 2, 8, (5, 9), (3, 3), (1, 1), (1, 1), groups=2),  # a multiplier
    Case(20, 1, 1, (2, 3), (3, 2), (2, 3), (1, 0), (1, 2), (2, 1)),
]
GRADS_RUNS = [
    run
    for layout in FORMATS
    for case in (*CASES, *DEPTHWISE_CASES)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    if (run := Run("grads", case, dtype, layout)).tile.computes_both
    if dtype == torch.float32 or case in DEPTHWISE_CASES
]
some_are_slow(GRADS_RUNS, 2)
GRADS_RUNS += [replace(run, multiprocessors=0) for run in GRADS_RUNS if run.case in DEPTHWISE_CASES]  # one slice
SLOW |= {run for run in GRADS_RUNS if replace(run, multiprocessors=None) not in SLOW and run.multiprocessors == 0}
GRADS_RUNS += [
    Run("grads", Case(3, 2, 2, (40, 75), (3, 3), (1, 1), (1, 1), groups=2), dtype, layout, multiprocessors)
    for dtype, layout, multiprocessors in (
        (torch.float32, "contiguous", 0),
        (torch.float16, "channels_last", 1),
        (torch.float64, "contiguous", 2),
    )
]


def test_runs_of_both_gradients_take_every_path():
    found = set()
    for run in usual(GRADS_RUNS):
        tile, slices = run.tile, 2 if run.multiprocessors is None else run.multiprocessors + 1
        macros = direct_weight_grad.weight_grad_macros(tile, run.dtype, True)
        found.add(("several tiles", math.prod(tile.tiles) > slices))
        found |= {(name, macros[name] > 1) for name in ("ROWS", "CI_THREADS", "CI_CHANNELS", "CO_CHANNELS", "VECTOR")}
        found |= {("PREFETCH", bool(macros["PREFETCH"])), ("whole", run.case.input_size[0] % tile.rows == 0)}
    assert len(found) == 2 * len({name for name, _ in found})


# Every second case of each type and layout, of more images, since the bar of TF32 is one of averages; half of them with
# one slice, whose blocks go over many tiles. Then cases of more channels with each of their tiles, in either type.
WARPS_WITHOUT_CHANNELS = [Case(1, 24, 8, (5, 18), (2, 2), (2, 2)), Case(2, 80, 14, (4, 9), (3, 3), groups=2)]
GRADS_MMA_RUNS = [
    run
    for i, layout in enumerate(FORMATS)
    for j, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16))
    for case in (*CASES, *DEPTHWISE_CASES, *WARPS_WITHOUT_CHANNELS)[(i + j) % 2 :: 2]
    if (run := Run("grads_mma", replace(case, batch=4 * case.batch), dtype, layout, (None, 0)[i])).tile
]
some_are_slow(GRADS_MMA_RUNS, 3)
GRADS_MMA_RUNS += [
    replace(run, choice=choice)
    for run in (
        Run("grads_mma", case, dtype, multiprocessors=1)
        for dtype in (torch.float32, torch.float16)
        for case in (
            Case(1, 32, 64, (7, 37), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1), groups=4),  # KernelBench 75
            Case(2, 20, 17, (7, 18), (2, 2), (2, 2)),
            Case(1, 33, 5, (5, 16), (3, 3), (1, 1), (1, 1)),
        )
    )
    for choice in range(run.dtype.itemsize == 2, len(run.tiles), 2)
]


# What is true of some tiles of the usual runs of a kernel, and not of others, beside PATHS and FUSED_PATHS.
# fmt: off
TILE_PATHS = {
    "gemm_depth_to_space": (SHUFFLE_RUNS, """
        packed; kept; positions % 128 == 0; positions > 128; problem.in_pixels % 128 == 0; input_size[1] % 2 == 0
        input_size == problem.input_size; line_blocks > 1; chunks > 1
        chunks > 3; chunks % 2 == 0; stages > chunks; lines % 64 == 0; piece * itemsize == 16
        problem.kernel_size[1] == 1; problem.kernel_size[1] > 2; problem.in_channels * itemsize % 128 == 0
        problem.out_channels * problem.taps % lines == 0
    """),
    "implicit_gemm_nhwc": (CELL_ROW_RUNS, """
        packed; kept; group == 0; group == 8; group > 8; group > 8 and images > 1; group > 8 and segments > 1
        row_blocks == 2; images > 1; problem.batch % images > 0; strips > 1
        strips * strip_cells > cells_of(problem)[1]; segments > 1
        group == 0 and segments > 1 and rows % strip_cells > 0; chunks > 1; line_blocks > 1; lines % 64 == 0
        problem.out_channels % lines == 0; problem.in_channels % channels == 0; ring_sizes[0] > 2
        chunks * problem.taps > 2 * math.prod(problem.stride)
        not any(map(mod, problem.kernel_size, problem.stride))
    """),
    "gemm_fold_pixels": (IMAGE_ROW_RUNS, """
        packed; position_blocks == 2; windows[0] > 1; windows[2] > 0; item_positions % 128 == 0; images > 1
        problem.batch % images > 0; line_blocks > 1; chunks > 1; stages > chunks
        (position_blocks, itemsize) == (1, 2) and chunks > 3 and chunks % 2 == 0
        (position_blocks, itemsize) == (1, 2) and chunks > 3 and chunks % 2 == 1
        (position_blocks, itemsize) == (1, 4) and chunks > 3 and chunks % 2 == 0
        (position_blocks, itemsize) == (1, 4) and chunks > 3 and chunks % 2 == 1
        lines // problem.taps // fold_outs % 2 == 1; problem.out_channels % fold_outs == 0
        lines // problem.taps // fold_outs > 2; cells > 128; parts > 1
        parts > 1 and problem.kernel_size[1] % problem.stride[1] > 0; 16 % problem.taps == 0; piece * itemsize == 16
        vector > 1; problem.out_channels * problem.taps % lines == 0; cells_of(problem) == problem.input_size
    """),
    "gemm_fold_rows_tf32": ([run for run in ROW_RUNS if run.tf32], """
        direction == "forward"; multiplied % columns == 0; multiplied < input_size[1]; vector == 1; vector == 2
        delayed == 0; first_delay + len(taps_across) == 9; lines == len(taps_across) * outs; channels == in_channels
        out_channels % outs == 0; channel_sets > 1; chunks > 1; chunk > 8; taps_together < weight_rows
        taps_together > 1 and groups == 1; taps_together > 1 and groups > 1; weight_rows % 2 == 1
        stages > 2 * chunks; output_size[0] % rows > 0; output_size[0] > rows
    """),
    "gemm_fold_rows": ([run for run in ROW_RUNS if not run.tf32], """
        direction == "forward"; slots == 2; steps > 1; multiplied % columns == 0; multiplied < input_size[1]
        vector == 1; vector == 8; delayed == 0; first_delay + len(taps_across) == 9; len(taps_across) % slots == 0
        channels == in_channels; out_channels % outs == 0; channel_sets > 1; output_size[0] % rows > 0
    """),
    "wgrad_nchw": (GRADIENT_RUNS, """
        flat; lines > 1; lines > 1 and flat; pixels * itemsize == 64; sides_co > 1; sides_h > 1; sides_w > 1
        taps[0] > 1; taps[1] > 1; vector > 1; shift > 0; segment < tile_w; weight_blocks > 1
        block_taps[0] < problem.kernel_size[0]; block_taps[1] < problem.kernel_size[1]; warpgroups == 3; split
        planes == 1; planes > 1; planes and any(problem.padding); odd; padded_bytes; padded_bytes and flat
        itemsize == 2 and sides_co > 1; split and sides_co > 1; itemsize == 4 and not split and sides_co > 1
        itemsize == 2 and sides_co == 1; split and sides_co == 1; itemsize == 4 and not split and sides_co == 1
    """),
    "wgrad_nhwc": (LINES_RUNS, """
        size[0] > 1; pair_rows; sides[0] > 1; sides[1] > 1; taps_h.sides > 1; taps_w.sides > 1
        taps_h.extra; taps_w.extra; taps_h.boxes > 1; taps_w.boxes > 1; 1 < taps_w.boxes < taps_w.taps
        size[2] % 8; columns % 64; weight_blocks > 1; warpgroups == 3; taps_h.own * taps_w.own > 1
    """),
    "gemm_fold_narrow": (FOLD_RUNS, """
        whole; left > 0; strips > 1; segments > 1; split; warpgroups == 2; stages == 4; boxed
        boxed and channels_last; boxed and strips > 1
        boxed and not flat and not channels_last and columns > line
        boxed and not flat and not channels_last and rows > 1; flat; flat and rows * across > line
        rows_together > 1; cell_parts * cells > folders; vector > 1; positions > 64 * warpgroups
        steps * 32 > problem.in_channels * itemsize; steps > 8 and not split; copied == 0; copied == 4; copied == 8
        copied == 16; flat and itemsize == 2; flat and itemsize == 4; segment_rows + halo_h <= rows
    """),
    "grads_mma": (GRADS_MMA_RUNS, """
        planes > 8; planes > 16; planes % 16 == 8 and planes > 16; problem.gemm_k > 8 * ci_warps
        problem.gemm_k % 8 == 0 and problem.gemm_k % (8 * ci_warps) > 0; row_warps == 1; column_warps == 1
        rows == 4; size[0] < problem.input_size[0]; size[1] < problem.input_size[1]
        ci_warps == 1; ci_warps == 2; ci_warps == 4
    """),
    "forward_mma": (MMA_RUNS, """
        unrolled; len(turns) > 1; channels % 16 == 0; warps_m > 1; copied
        channels_last; copied and not channels_last; channels_last and words * 4 > problem.gemm_k * itemsize
    """),
    "gemm_mma": (GEMM_MMA_RUNS, """
        splits > 1; phases > 1; units == 2; cells[1] > 1; warps[0] == 1; warps[1] == 1; tiles[1] == 8
    """),
    "implicit_gemm": (FUSED_RUNS, """
        row_order == pack.ROWS_PLAIN; row_order == pack.ROWS_SLOTS; row_order == pack.ROWS_CHANNELS
        vector > 1; channel_sets > 1; phase_sets > 1; items > sets; units == 4; chunks > 1; wide == 2
        sum(set_steps) > pack.STEPS
    """),
}
# fmt: on


@pytest.mark.parametrize("kernel", TILE_PATHS)
def test_usual_runs_take_every_path(kernel):
    runs, conditions = TILE_PATHS[kernel]
    paths = {"forward_mma": PATHS, "implicit_gemm": FUSED_PATHS}.get(kernel, {})
    tiles = [run.tile for run in usual(runs)]
    assert tiles.count(None) < len(tiles) / 10
    for condition in (*paths.values(), *re.split(r"[;\n]\s*", conditions.strip())):
        assert {holds(condition, tile) for tile in tiles if tile is not None} == {True, False}, condition


TYPED_RUNS = (
    *(MMA_RUNS, FOLD_RUNS, IMAGE_ROW_RUNS, SHUFFLE_RUNS, CELL_ROW_RUNS, ROW_RUNS),
    *(GRADIENT_RUNS, LINES_RUNS, GRADS_MMA_RUNS, GRADS_RUNS, GEMM_MMA_RUNS),
)
RUNS = [
    *(runs_of("im2col", "contiguous") + runs_of("col2im", "contiguous")),
    *runs_of("forward", *FORMATS, more=(*TILED_CASES, *PAIRED_CASES)),
    *(runs_of("input_grad", *FORMATS) + runs_of("weight_grad", *FORMATS) + FUSED_RUNS),
    *itertools.chain(*TYPED_RUNS),
]


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.slow) if run in SLOW else run for run in RUNS], ids=str
)
def test_kernel_matches_reference(run, calls, poison):
    if calls[run] is None:
        assert run.operation in ("forward_mma", "gemm_fold_narrow")
        pytest.skip("declined: left to others")
    poison("cpu")
    run.check(calls[run])


@pytest.mark.parametrize("runs", TYPED_RUNS, ids=lambda runs: runs[0].operation)
def test_usual_runs_are_of_every_kind(runs):
    for kind in (
        lambda run: (run.operation, run.case),
        lambda run: (run.operation, run.dtype, run.tf32, run.layout),
        lambda run: (run.dtype, run.choice is None),
        lambda run: (run.dtype.itemsize, run.multiprocessors),
    ):
        assert {kind(run) for run in usual(runs)} == {kind(run) for run in runs}


@st.composite
def mma_runs(draw, operation, times):
    """Any tile of a small problem, with few blocks; of so many times as many images."""
    case = Case(**asdict(draw(wide_problems())))
    dtype = draw(st.sampled_from((torch.float16, torch.bfloat16, torch.float32)))
    run = Run(operation, replace(case, batch=times * case.batch), dtype, draw(st.sampled_from(sorted(FORMATS))))
    assume(run.tiles)
    return replace(run, multiprocessors=draw(st.integers(0, 2)), choice=draw(st.integers(0, len(run.tiles) - 1)))


# The bar of TF32 is one of averages, which few images have few values for.
@pytest.mark.parametrize(("operation", "times"), [("forward_mma", 1), ("grads_mma", 4)])
@settings(max_examples=settings.default.max_examples // 12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_direct_kernels_on_tensor_cores_match_reference_with_any_tile(operation, times, data, builder, poison):
    run = data.draw(mma_runs(operation, times))
    poison("cpu")
    with emulator.install(builder):
        run.check(run.prepare())


# Plans whose emulation notices mistakes that few others show: a last piece that does not land, pairs that lie askew.
TELLING = 53, 56


@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=() if i < 12 or i in TELLING else pytest.mark.slow) for i in range(200)]
)
def test_fused_kernels_match_reference_with_any_plan(seed, builder, poison, monkeypatch):
    """Any plan of a small problem, with few blocks."""
    plan = random_plan(30_000, seed)
    dtypes = (torch.float16, torch.bfloat16) if plan.itemsize == 2 else (torch.float32,)
    run = Run(
        "fused" if plan.direction == "forward" else "fused_input_grad",
        Case(**asdict(plan.problem)),
        dtypes[seed % len(dtypes)],
        "channels_last" if plan.channels_last else "contiguous",
        seed % 4,
        plan,
        plan.itemsize == 4 and not plan.split,
    )
    if seed % 2:  # as for tensors of 2**31 elements
        monkeypatch.setattr("gemmconv.kernels.macros.INT32_MAX", 0)
    poison("cpu")
    with emulator.install(builder):
        run.check(run.prepare())


def rows_call(run, in_rows, out_rows):
    """The call that lays some input rows out as columns, or folds columns of some into some output rows."""
    problem, nchw = problem_of(run.case), torch.contiguous_format
    if run.operation == "im2col":
        shape = (run.case.batch, problem.out_channels * problem.taps, in_rows[1] - in_rows[0], run.case.input_size[1])
        steps = col2im.unfold(problem, run.dtype, At("images"), run.case.batch, in_rows)
        operands, output = (Operand("images", nchw),), Output("columns", shape, strides_of(shape, nchw))
    else:
        output = Output("output", problem.output_shape, strides_of(problem.output_shape, nchw))
        to = run.column_dtype, run.dtype, At("output"), run.case.batch, in_rows, out_rows
        steps = col2im.fold(problem, *to, bias="bias")
        operands = Operand("columns", None), Operand("bias", nchw)
    return Program(run.dtype, operands, (output,), tuple(steps)).prepare(CPU)


def check_im2col(call, run):
    """Check the columns of all input rows, and of either half of them."""
    case, height = run.case, run.case.input_size[0]
    grad_output = sample(case, run.dtype, "cpu").grad_output
    exact = reference.unfold(reference.to_array(grad_output), **window_of(case))
    exact = exact.reshape(case.batch, -1, *positions_of(case))[..., : case.input_size[1]]
    for begin, end in spans(height):
        columns = call((begin, end), None)(grad_output)
        assert reference.relative_error(columns, exact[:, :, begin:end]) == 0


def check_col2im(call, run):
    """Check all output rows, and either half of them, without and with a bias."""
    case, (height, width) = run.case, run.case.output_size
    bias = sample(case, run.dtype, "cpu").bias
    shape = (case.batch, case.out_channels * math.prod(case.kernel_size), *case.input_size)
    columns = torch.randn(shape, dtype=run.column_dtype)
    beyond_input = [(0, there - read) for there, read in zip(positions_of(case), case.input_size, strict=True)]
    every_position = np.pad(reference.to_array(columns), [(0, 0), (0, 0), *beyond_input])
    folded = reference.fold(every_position.reshape(*shape[:2], -1), case.output_size, **window_of(case))
    for begin, end in spans(height):
        in_rows = input_part_of(problem_of(case), (begin, end))
        part = columns[:, :, slice(*in_rows)].contiguous()
        for addend, added in ((None, 0.0), (bias, reference.to_array(bias)[:, None, None])):
            output = call(in_rows, (begin, end))(part, addend)
            rows = output[:, :, begin:end].reshape(case.batch, case.out_channels, end - begin, width)
            reference.assert_close(rows, (folded + added)[:, :, begin:end], run.dtype, "ieee")


MARGIN = 4096  # elements
UNTOUCHED = 1234.0


@contextlib.contextmanager
def margins():
    """Tensors that are made without values get memory before and after them, which must be as it was at the end."""
    made = []

    def guarded(like, size, stride=None, dtype=None):
        size = (size,) if isinstance(size, int) else size
        count = math.prod(size)
        memory = torch.full((count + 2 * MARGIN,), UNTOUCHED, dtype=dtype or like.dtype)
        made.append((memory, count))
        own = memory[MARGIN : MARGIN + count].fill_(torch.nan)
        return own.view(size) if stride is None else own.as_strided(size, stride)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda like, size, dtype=None: guarded(like, size, dtype=dtype))
        patch.setattr(torch.Tensor, "new_empty_strided", guarded)
        yield
    assert made
    for memory, count in made:
        for margin in (memory[:MARGIN], memory[MARGIN + count :]):
            assert (margin == UNTOUCHED).all(), "written outside of a tensor"


@margins()
def check_direct(call, run):
    """Check results and their strides, also for tensors that are aligned to nothing; nothing else may be written."""
    data, exact = sample(run.case, run.dtype, "cpu"), expected(run.case, run.dtype)
    # Either arrangement has a bias in some runs and none in others, and both in slow ones.
    biases = [(data.bias, exact.output), (None, exact.output_without_bias)][:: (-1) ** run.case.batch]
    arrangements = zip(ARRANGEMENTS[run.layout], WEIGHT_ARRANGEMENTS[run.layout], biases, strict=True)
    for arrange, arrange_weight, own in arrangements:
        input, weight, grad_output = arrange(data.input), arrange_weight(data.weight), arrange(data.grad_output)
        if run.direction == "forward":
            results = [
                (call(input, weight, bias), wanted, run.layout) for bias, wanted in (biases if run in SLOW else [own])
            ]
        elif run.direction == "input_grad":
            results = [(call(grad_output, weight), exact.input_grad, run.layout)]
        elif run.direction == "grads":
            for_input, for_weight = call(grad_output, input, weight)
            results = [(for_input, exact.input_grad, run.layout), (for_weight, exact.weight_grad, "contiguous")]
        else:
            results = [(call(grad_output, input), exact.weight_grad, "contiguous")]
        for actual, wanted, layout in results:
            assert actual.stride() == torch.empty(actual.shape, memory_format=FORMATS[layout]).stride()
            reference.assert_close(actual, wanted, run.dtype, run.precision)


def window_of(case):
    """Return the keyword arguments of reference.unfold and fold."""
    return {name: getattr(case, name) for name in ("kernel_size", "dilation", "padding", "stride")}


def positions_of(case):
    """Return how often the kernel fits into the output: beyond the input, where output_padding reaches the stride."""
    return reference.sliding_size(case.output_size, **window_of(case))


def spans(rows):
    """Return the span of all rows and those of two halves that are not empty."""
    return [(0, rows)] if rows == 1 else [(0, rows), (0, rows // 2), (rows // 2, rows)]


LAYER = CASES[1]
MMA = Run("forward_mma", TILED_CASES[0], multiprocessors=0)
SHIFTED = next(run for run in MMA_RUNS if run.choice == "shifted_by_single_outputs")

GRADS_MMA = next(run for run in GRADS_MMA_RUNS if run.case.groups == 4)

SHARED_ARRAY = r"(__shared__ __align__\(16\) accumulate_t (\w+)\[(\w+)\];)"
BEGINNING = r"(__global__ [^{]*\{)"  # of a kernel
BEHIND_BARRIERS = r"\1 shared[p.first_barrier + p.stages * 16] = 0;"
BEHIND_BIASES = r"\1 shared[p.first_bias + kBlocks * LINES * 4 + sizeof(barriers_t)] = 0;"
BEHIND_ALL = r"\1 shared[SHARED_BYTES] = 0;"
PAST_SHARED = "past the end of shared memory"
NO_BARRIER = (r"__syncthreads\(\);", "")
LATE = "relative error|arrivals in a phase|deadlock"
OVERWRITTEN = f"{LATE}|too many bytes"
NOT_COME = f"{LATE}|never waited for"
UNREAD = "relative error|arrivals in a phase|never waited for"
UNFINISHED = "relative error|never waited for|without wgmma_fence"
# A stage that is begun, of a ring, and the same without waiting for it.
BEGUN = r"begin_stage\(({}), ring, ([^)]*)\)"
AT_ONCE = r"(barrier_arrive_expecting(\1.full[ring.stage], \2), \1.full[ring.stage])"
# By file, what a run, a pattern there, what comes in its place, and what the emulator says: mostly that results differ.
# fmt: off
EDITS = {
    "columns/im2col.cu": {
        "im2col_border_row":
            (Run("im2col", LAYER), r"static_cast<unsigned>\(oh\) < p\.h_out", "static_cast<unsigned>(oh) + 1 < p.h_out",
             "assert .* == 0"),
        "params_size":
            (Run("im2col", LAYER), r"int in_row_begin, in_rows;", "int in_row_begin, in_rows, spare[2];",
             "params struct has 56 bytes in the source and 48 on the host"),
        "not_cuda": (Run("im2col", LAYER), r"const int plane = ", "const int plane == ", "columns/im2col.cu:.*error"),
    },
    "columns/col2im.cu": {
        "col2im_border_column": (Run("col2im", LAYER), r"origin \+ shift\) < w_in", "origin + shift) + 1 < w_in"),
        "col2im_output_not_written":
            (Run("col2im", LAYER), r"row >= p\.out_rows\) break", "row + 1 >= p.out_rows) break", "relative error inf"),
        "launch_bounds":
            (Run("col2im", LAYER), r"__launch_bounds__\(256\)", "__launch_bounds__(128)",
             "block must have from 1 to 128 threads"),
    },
    "direct/forward.cu": {
        "forward_no_barrier": (Run("forward", LAYER), *NO_BARRIER),
        "forward_rows_of_bias_left_out": (Run("forward", CASES[5], layout="channels_last"), r"pixel -= width;", ""),
        "misaligned_vector":
            (Run("forward", LAYER), r"(reinterpret_cast<weight_quad_t\*>\(shared \+ )", r"\g<1>4 + ",
             "a misaligned address in line .* of direct/forward.cu"),
        "past_dynamic_shared": (Run("forward", LAYER), BEGINNING, BEHIND_ALL, PAST_SHARED),
    },
    "direct/input_grad.cu": {
        "input_grad_no_barrier": (Run("input_grad", LAYER), *NO_BARRIER),
        "barrier_not_reached":
            (Run("input_grad", LAYER), NO_BARRIER[0], "if (threadIdx.x % 2 == 0) __syncwarp();", "deadlock"),
        "past_static_shared":
            (Run("input_grad", LAYER), SHARED_ARRAY, r"\1 (&\2[0])[\3] = 0;", PAST_SHARED),
    },
    "direct/weight_grad.cu": {
        "weight_grad_no_barrier": (Run("weight_grad", LAYER), *NO_BARRIER),
        "both_grads_weights_of_other_channels":
            (Run("grads", DEPTHWISE_CASES[3]), r"factors = weights \+ ci_thread \* kSums;", "factors = weights;"),
        "index_out_of_bounds":
            (Run("weight_grad", LAYER), SHARED_ARRAY, r"\1 \2[\3 + threadIdx.x] = 0;",
             "an index out of bounds in line .* of direct/weight_grad.cu"),
    },
    "direct/grads_mma.cu": {
        "grads_mma_no_barrier": (GRADS_MMA, *NO_BARRIER),
        "grads_mma_planes_not_zero":
            (replace(GRADS_MMA, case=replace(GRADS_MMA.case, out_channels=28)), r"patch\[i\] = 0;",
             "patch[i] = patch[i];"),
        "grads_mma_slices_overlap": (GRADS_MMA, r"tile \+= p\.slices", "tile += 1"),
        "grads_mma_channels_of_the_next_image":
            (Run("grads_mma", WARPS_WITHOUT_CHANNELS[0], torch.float16), r"CI % kBlockCi == 0 \|\| first_ci \+ ci",
             "CI % 8 == 0 || first_ci + ci", "written outside of a tensor"),
    },
    "conv/gemm_mma.cu": {
        "gemm_mma_no_barrier": (GEMM_MMA, *NO_BARRIER),
        "gemm_mma_copies_not_waited_for": (GEMM_MMA, r"cp_async_wait<[^;]*;", ";"),
        "gemm_mma_chunks_overwritten": (GEMM_MMA_CHUNKS, r"next_stage = stage;", "next_stage = 0;"),
        "gemm_mma_weights_not_waited_for":
            (GEMM_MMA, r"grid_dependency_wait\(\);", "", "did not wait for the launch before"),
    },
    "epilogue/store_tile.cuh": {
        "gemm_mma_bias_left_out": (GEMM_MMA, r"p\.bias != nullptr", "false"),
        "gemm_mma_last_outputs":
            (GEMM_MMA, r"w < p\.out\.w &&", "w + 1 < p.out.w &&", "relative error inf|not written"),
    },
    "direct/forward_mma.cu": {
        "mma_no_barrier": (MMA, *NO_BARRIER),
        "mma_no_barrier_before_the_next_copies": (MMA, r"(wait_for_copies\(\);\s*)__syncthreads\(\);", r"\1"),
        "mma_no_barrier_after_packing":
            (replace(MMA, dtype=torch.float16), r"(pack_patch\([^;]*;\s*)__syncthreads\(\);", r"\1"),
        "mma_no_wait_for_copies": (MMA, r"wait_for_copies\(\)", "0"),
        "mma_no_warp_barrier": (replace(MMA, layout="channels_last"), r"__syncwarp\(\);", ""),
        "mma_line_not_shifted": (SHIFTED, r"(line = stage \+ \(g \* kStageLine) \+ [^;]*;", r"\1);"),
        "mma_beginning_of_a_shifted_line":
            (SHIFTED, r"head < before && head \+ rest >= before", "head + rest > before"),
        "mma_no_barrier_before_a_shifted_line":
            (SHIFTED, r"(target \+= 8 \* out_pixels\) \{\s*)__syncwarp\(\);", r"\1"),
        "mma_no_barrier_behind_a_shifted_line": (SHIFTED, r"(= piece;\s*\}\s*)__syncwarp\(\);", r"\1"),
        "mma_end_of_a_shifted_line": (SHIFTED, r"tail \+ rest < end", "tail + rest + VECTOR < end"),
        "mma_misaligned_copy":
            (MMA, r"patch \+ channel \* kPlane \+ pixel", "patch + channel * kPlane + pixel + 1",
             "a misaligned copy of 16 bytes"),
        "mma_past_dynamic_shared": (MMA, BEGINNING, BEHIND_ALL, PAST_SHARED),
    },
    "pipeline/implicit_gemm.cuh": {
        "fused_bottom_tile_of_another_strip": (FUSED_STRIPS, r"down < p\.strip_tiles - 1", "down < p.strip_tiles"),
    },
    "sm90/implicit_gemm.cu": {
        "fused_turn_not_passed_on":
            (FUSED_TURNS, r"if \(PING_PONG && warpgroup == 0\) named_barrier_arrive<kTurnOf1, 256>\(\);", "",
             "deadlock"),
        "fused_turn_passed_on_twice":
            (FUSED_TURNS, r"(if \(PING_PONG && warpgroup == 0\) )(named_barrier_arrive<kTurnOf1, 256>\(\);)",
             r"\1{ \2 \2 }", "arrivals and nobody who waits|deadlock"),
        "fused_weights_not_waited_for": (FUSED, r"barrier_wait\(s\.weight_full[^;]*;", "", UNREAD),
        "fused_weights_released_too_early":
            (FUSED, r"if \(step > 0 \|\|[^;]*;\s*(held_weights = weights[^;]*;)", r"\1 release_weights();", LATE),
        "fused_patch_released_too_early": (FUSED, r"(held_patch = patches[^;]*;)", r"\1 release_patch();"),
        "fused_not_fenced": (FUSED, r"wgmma_fence\(\);", "", "a wgmma without wgmma_fence"),
        "fused_last_product_not_waited_for":
            (FUSED, r"wgmma_finish\(sums[^;]*;", ";", "a wgmma that was never waited for"),
    },
    "sm90/gemm_fold_narrow.cu": {
        "fold_inputs_of_another_round_waited_for":
            (FOLD_MANY_CHANNELS, r"(barrier_wait\(barriers\.inputs\.full.*?inputs\.parity)", r"\1 ^ 1", LATE),
        "fold_boxes_not_waited_for": (FOLD, r"barrier_wait\(barriers\.inputs\.full[^;]*;", "", LATE),
        "fold_boxes_overwritten":
            (FOLD, r"(inputs\.parity \^ 1\);\s*fetch\(p)", r"inputs.parity); fetch(p", f"{LATE}|announced"),
        "fold_copies_not_waited_for": (FOLD_PIECES, r"cp_async_wait<STAGES - 1>\(\);", ""),
        "fold_stages_overwritten": (FOLD_PIECES, r"barrier_wait\(barriers\.inputs\.empty[^;]*;", "", LATE),
        "fold_columns_not_waited_for": (FOLD, r"barrier_wait\(barriers\.columns\.full[^;]*;", "", LATE),
        "fold_ring_of_another_round_waited_for": (FOLD, r"half\.parity \^ 1, course", "half.parity, course", LATE),
        "fold_weights_read_too_early": (FOLD, r"(wait_for_copies\(\);\s*)named_barrier_sync<1, kOthers>\(\);", r"\1"),
        "fold_sums_read_too_early": (FOLD, r"wgmma_finish_rows\(sum\);", "", UNFINISHED),
        "fold_channels_not_cleared": (FOLD_PIECES, r"channel < kPadded; \+\+channel", "channel < 0; ++channel"),
        "fold_past_dynamic_shared": (FOLD, BEGINNING, BEHIND_ALL, PAST_SHARED),
    },
    "epilogue/fold_smem.cuh": {
        "image_rows_border_column": (IMAGE_ROWS, r"0 <= column && column < image\.in_w", "column < image.in_w"),
    },
    "sm90/gemm_fold_pixels.cu": {
        "image_rows_columns_read_too_early":
            (IMAGE_ROWS, r"named_barrier_sync<1, kConsumers>\(\);(\s*const int out)", r"\1"),
        "image_rows_columns_of_one_pass": (IMAGE_ROWS, r"fold % 2 \* kFoldFloats", "0"),
        "image_rows_past_dynamic_shared": (IMAGE_ROWS, BEGINNING, BEHIND_BARRIERS, PAST_SHARED),
    },
    "pipeline/pixels_on_m.cuh": {
        "image_rows_window_without_its_left": (IMAGE_ROW_WINDOWS, r" - p\.left :", " :"),
        "shuffle_inputs_passed_on_too_early": (SHUFFLE, r"barrier_arrive_when_copied\(", "barrier_arrive("),
        "shuffle_chunk_not_waited_for":
            (SHUFFLE_TF32, r"barrier_wait\(barriers_of[^;]*\.full,[^;]*;", "", f"{LATE}|{NOT_COME}"),
        "shuffle_inputs_overwritten":
            (SHUFFLE, r"barrier_wait\(barriers_of[^;]*\.empty[^;]*;(\s*#pragma)", r"\1", LATE),
        "shuffle_words_overwritten": (SHUFFLE_TF32, r"wgmma_wait<1>\(\);", "wgmma_wait<2>();"),
        "shuffle_weights_overwritten":
            (SHUFFLE_TF32, r"barrier_wait\(barriers_of[^;]*\.empty[^;]*;(\s*barrier)", r"\1", OVERWRITTEN),
        "shuffle_biases_read_too_early": (SHUFFLE_ALONE, r"__syncwarp\(\);(\s*\}\s*\};)", r"\1"),
        "shuffle_sums_read_too_early": (SHUFFLE, r"wgmma_finish_rows\(sums\[block\]\);", ";", UNFINISHED),
    },
    "sm90/gemm_depth_to_space.cu": {
        "shuffle_past_dynamic_shared": (SHUFFLE, BEGINNING, BEHIND_BARRIERS, PAST_SHARED),
    },
    "sm90/implicit_gemm_nhwc.cu": {
        "cell_rows_patch_not_waited_for": (CELL_ROWS, r"barrier_wait\(barriers\.slots\.full[^;]*;", ";", NOT_COME),
        "cell_rows_patch_overwritten": (CELL_ROWS_TF32, BEGUN.format(r"barriers\.slots"), AT_ONCE, OVERWRITTEN),
        "cell_rows_patch_freed_while_products_read_it":
            (CELL_ROWS_IN_LINES, r"wgmma_wait<1>\(\);(\s*if \(kGroup == 0)", "\\1", OVERWRITTEN),
        "cell_rows_weights_not_waited_for":
            (CELL_ROWS_IN_EIGHTS, r"barrier_wait\(barriers\.stages\.full[^;]*;", ";", NOT_COME),
        "cell_rows_weights_overwritten": (CELL_ROWS, BEGUN.format(r"barriers\.stages"), AT_ONCE, OVERWRITTEN),
        "cell_rows_words_overwritten": (CELL_ROWS_TF32, r"wgmma_wait<1>\(\);", "wgmma_wait<2>();"),
        "cell_rows_sums_read_too_early": (CELL_ROWS_IN_EIGHTS, r"wgmma_finish_rows\(sums\[block\]\);", ";", UNFINISHED),
        "cell_rows_lines_of_the_tap_before":
            (CELL_ROWS, r"h \* axis_h::kShiftStep \* p\.patch_w", "(h + 1) * axis_h::kShiftStep * p.patch_w"),
        "cell_rows_last_item_not_stored":
            (CELL_ROWS_IN_EIGHTS, r"if constexpr \(DEFERRED_STORES\) (outputs\.template store_share<0, 1>)",
             "if constexpr (!DEFERRED_STORES) \\1"),
        "cell_rows_weights_read_while_they_are_laid_out":
            (CELL_ROWS_TF32, r"if \(PACKED\) grid_dependency_wait\(\);", "", "did not wait for the launch before"),
        "cell_rows_past_dynamic_shared": (CELL_ROWS, BEGINNING, BEHIND_BIASES, PAST_SHARED),
    },
    "sm90/gemm_fold_rows.cu": {
        "rows_weights_not_waited_for":
            (ROWS, r"barrier_wait\(barriers\.weights, 0\);", "", "relative error|never waited for"),
        "rows_inputs_not_waited_for": (ROWS, r"barrier_wait\(barriers\.full[^;]*;", "", UNREAD),
        "rows_stages_overwritten": (ROWS, BEGUN.format("barriers"), AT_ONCE, OVERWRITTEN),
        "rows_stages_released_too_early":
            (ROWS,
             r"(#pragma unroll\s*for \(int tile = 0; tile < kTiles; \+\+tile\) wgmma_finish.*\s*)(if \(speaker\).*)",
             r"\2\n\1", f"{LATE}|overwritten"),
        "rows_sums_read_too_early": (ROWS, r"wgmma_finish\(sums[^;]*;", ";", UNFINISHED),
        "rows_carry_nothing": (ROWS, r"last = given;", "last = 0.0f;"),
        "rows_of_another_lane": (ROWS, r"lane % 4 \+ lanes < 4", "lane % 4 + lanes <= 4"),
        "rows_lines_read_too_early":
            (ROWS, r"__syncwarp\(\);(\s*#pragma unroll\s*for \(int i = 0; i < kPieces)", r"\1"),
        "rows_lines_overwritten": (ROWS_IN_PARTS, r"__syncwarp\(\);(\s*each<kLine / 8>)", r"\1"),
        "rows_end_too_early":
            (ROWS_BEHIND, r"for \(; step < p\.steps; \+\+step\)", "for (; step < 0; ++step)", "relative error inf"),
        "rows_tf32_weights_not_waited_for":
            (ROWS_TF32, r"barrier_wait\(barriers\.weights, 0\);", "", "relative error|never waited for"),
        "rows_tf32_inputs_not_waited_for": (ROWS_TF32, r"barrier_wait\(barriers\.full[^;]*;", ";", UNREAD),
        "rows_tf32_stages_overwritten": (ROWS_TF32, BEGUN.format("barriers"), AT_ONCE, OVERWRITTEN),
        "rows_tf32_sums_read_too_early": (ROWS_TF32, r"wgmma_finish_rows\(sums[^;]*;", ";", UNFINISHED),
        "rows_tf32_channels_in_another_order": (ROWS_TF32, r"t / 2 \* 4 \+ t % 2", "t"),
        "rows_tf32_carry_nothing": (ROWS_TF32, r"last = given;", "last = 0.0f;"),
        "rows_tf32_of_another_lane": (ROWS_TF32, r"lane / 4 \+ lanes < 8", "lane / 4 + lanes <= 8"),
        "rows_tf32_lines_read_too_early": (ROWS_TF32, r"__syncwarp\(\);(\s*#.*\s*for.*\s*pieces)", r"\1"),
        "rows_tf32_nothing_kept": (ROWS_TF32, r"if \(t \* 2 \+ i < target\.early\(g\)\)", "if (false)"),
        "rows_tf32_kept_too_late": (ROWS_TF32, r"copy<VECTOR>\(own_kept \+ i, begin \+ kLine \+ i\)", ""),
        "rows_tf32_beyond_the_row": (ROWS_TF32, r"const bool within = [^;]*;", "const bool within = true;"),
    },
    "load/registers.cuh": {
        "fused_patch_full_too_early":
            (FUSED, r"(for \(int batch = 0;)", r"if (lane == 0) barrier_arrive(s.patch_full[ring.stage]); \1", LATE),
        "fused_places_not_waited_for": (FUSED, r"named_barrier_sync<kLoadersMeet, PRODUCERS>\(\);", ""),
        "fused_patch_not_free": (FUSED, r"barrier_wait\(s\.patch_empty[^;]*;", "", LATE),
        "fused_border_column": (FUSED, r"\(iw\) >= p\.w_in", "(iw) + 1 >= p.w_in"),
    },
    "load/tma_nhwc.cuh": {
        "fused_lines_into_what_is_read": (FUSED_LINES, r"barrier_wait\(s\.patch_empty[^;]*;", "", OVERWRITTEN),
        "fused_lines_of_other_images": (FUSED_LINES, r"\(box - 1\) \* p\.box_images", "box * p.box_images"),
    },
    "load/landing.cuh": {
        "fused_landing_not_waited_for": (FUSED_LANDED, r"cp_async_wait<[^;]*;", ";"),
        "fused_landing_waited_for_too_little":
            (FUSED_LANDED, r"cp_async_wait<LANDING_STAGES - 2>", "cp_async_wait<LANDING_STAGES - 1>"),
        "fused_landing_of_others_not_waited_for":
            (FUSED_LANDED, r"named_barrier_sync<kLoadersMeet, PRODUCERS>\(\);", "",
             "relative error|a misaligned address"),
        "fused_landing_overwritten": (FUSED_LANDED, r"i < LANDING_STAGES; \+\+i", "i <= LANDING_STAGES; ++i"),
    },
    "epilogue/store_phases.cuh": {
        "fused_outputs_turned_round_without_a_barrier": (Run("fused", CASES[12]), r"__syncwarp\(\);", ""),
        "fused_pixels_turned_round_without_a_barrier":
            (FUSED_PIXELS, r"named_barrier_sync<128>\(barrier\);(?=\s+piece_t)", ""),
        "fused_lined_without_a_barrier": (FUSED_LINED, r"__syncwarp\(\);", "", "relative error|not written"),
        "fused_lined_of_one_place":
            (FUSED_LINED, r" \+ place / SPAN_W\)", ")",
             "relative error|written twice|not written"),
        "fused_last_output_of_a_run":
            (Run("fused", MANY_CHANNELS, torch.float16, "channels_last", multiprocessors=0), r"if \(i < count\)",
             "if (i + 1 < count)", "relative error inf"),
    },
    "sm90/wgrad_nchw.cu": {
        "weight_grad_stage_not_free": (GRADIENT, r"barrier_wait\(b\.empty[^;]*;", "", OVERWRITTEN),
        "weight_grad_stage_not_waited_for": (GRADIENT, r"barrier_wait\(b\.full[^;]*;", "", NOT_COME),
        "weight_grad_stage_released_too_early":
            (GRADIENT, r"held = ring\.stage;", "if (lane == 0) barrier_arrive(b.empty[ring.stage]);",
             f"{LATE}|overwritten"),
        "weight_grad_rounded_before_it_came": (GRADIENT_TF32, r"barrier_wait\(b\.came[^;]*;", "", NOT_COME),
    },
    "splits/reduce.cu": {
        "weight_grad_slice_left_out":
            (replace(GRADIENT, multiprocessors=None), r"slice < p\.slices;", "slice < p.slices - 1;"),
    },
    "sm90/wgrad_nhwc.cu": {
        "weight_grad_lines_stage_not_free": (LINES, BEGUN.format("b"), AT_ONCE, OVERWRITTEN),
        "weight_grad_lines_stage_not_waited_for": (LINES, r"barrier_wait\(b\.full[^;]*;", "", NOT_COME),
        "weight_grad_lines_stage_released_too_early":
            (LINES, r"held = ring\.stage;", "if (lane == 0) barrier_arrive(b.empty[ring.stage]);",
             f"{LATE}|overwritten"),
        "weight_grad_lines_of_another_tap": (LINES, r"i / BOXES \* \(TAPS::kShift \* shift_lines\)", "i / BOXES"),
    },
    "ptx/mma.cuh": {
        "fused_second_part_missing": (FUSED_SPLIT, r"(rest = )__float_as_uint[^;]*;", r"\1 0;"),
        "product_not_known":
            (MMA, r"m16n8k8\.row", "m16n8k4.row", "does not know the instruction 'mma.sync.aligned.m16n8k4"),
    },
    "numeric/types.cuh": {
        "instruction_not_known":
            (Run("col2im", LAYER), r"cvt\.f32\.f16", "cvt.f32.f8", "does not know the instruction 'cvt.f32.f8"),
    },
}
# fmt: on
MISTAKES = {
    name: (run, emulator.Edit(file, pattern, replacement), *(message or ["relative error"]))
    for file, edits in EDITS.items()
    for name, (run, pattern, replacement, *message) in edits.items()
}


# One mistake of each kind. The others run with ``make test-slow``, before a change of a kernel is done.
KINDS = {
    "a border": "im2col_border_row",
    "an output that nobody writes": "col2im_output_not_written",
    "a store outside of the tensor": "grads_mma_channels_of_the_next_image",
    "slices that overlap": "grads_mma_slices_overlap",
    "no barrier of the block": "forward_no_barrier",
    "no barrier of a warp": "mma_no_warp_barrier",
    "a barrier that not all reach": "barrier_not_reached",
    "a copy that is not waited for": "mma_no_wait_for_copies",
    "a box that is not waited for": "rows_inputs_not_waited_for",
    "a stage that is overwritten": "rows_stages_overwritten",
    "a stage that is let go of too early": "weight_grad_stage_released_too_early",
    "a turn that is not passed on": "fused_turn_not_passed_on",
    "sums that are read too early": "rows_sums_read_too_early",
    "words of products that run": "shuffle_words_overwritten",
    "no fence before products": "fused_not_fenced",
    "a launch that is not waited for": "cell_rows_weights_read_while_they_are_laid_out",
    "past static shared memory": "past_static_shared",
    "past dynamic shared memory": "past_dynamic_shared",
    "an index out of bounds": "index_out_of_bounds",
    "a misaligned vector": "misaligned_vector",
    "a misaligned copy": "mma_misaligned_copy",
    "params of another size": "params_size",
    "too many threads": "launch_bounds",
    "an instruction that it does not know": "instruction_not_known",
    "no CUDA": "not_cuda",
}


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=() if name in KINDS.values() else pytest.mark.slow) for name in MISTAKES]
)
def test_emulator_notices_a_mistake(mistake, builder, poison):
    run, edit, message = MISTAKES[mistake]
    poison("cpu")
    with emulator.install(builder, edit), pytest.raises((AssertionError, RuntimeError), match=message):
        run.check(run.prepare())


def test_emulator_leaves_the_loader_as_it_was(builder):
    original = launch.load
    with emulator.install(builder):
        assert launch.load is not original
    assert launch.load is original
