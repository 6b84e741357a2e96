"""Cells of outputs, as kernels that gather them see them; geometry/axis.cuh has the algebra.

Output ``o`` of an axis belongs to cell ``o // stride``, and the inputs that it reads lie at shifts from there which
depend on ``o % stride`` alone.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property
from gemmconv.kernels.base import Pass
from gemmconv.kernels.integers import covering
from gemmconv.kernels.program import Extent3, three_axes

_MOST_REACH = 2**20

Extents = tuple[int, ...]  # of one to three axes
Taps = tuple[tuple[int, Extent3], ...]  # taps of a phase, each with its shift from a cell's first input


class Gathering:
    """Sizes of a pass that gathers outputs from inputs; the inputs of an input gradient are grad_output."""

    problem: Problem  # the geometry
    direction: Pass  # "forward" or "input_grad"

    @cached_property
    def in_channels(self) -> int:
        """Input channels of a group: those that are summed over."""
        return self.problem.gemm_k if self.direction == "forward" else self.problem.group_out_channels

    @cached_property
    def out_channels(self) -> int:
        """Output channels of a group."""
        return self.problem.group_out_channels if self.direction == "forward" else self.problem.gemm_k

    @property
    def input_size(self) -> Pair:
        """Height and width of the inputs."""
        return self.problem.input_size if self.direction == "forward" else self.problem.output_size

    @property
    def output_size(self) -> Pair:
        """Height and width of the outputs."""
        return self.problem.output_size if self.direction == "forward" else self.problem.input_size


class Tap(NamedTuple):
    """A tap of an axis, as a cell meets it."""

    tap: int  # which of the kernel's
    phase: int  # which output of a cell it reaches
    shift: int  # from the cell's first input to the input that it reads


def cells_of(problem: Problem) -> Pair:
    """Cells of an image, down and across."""
    return covering(problem.output_size, problem.stride)


def phase_shifts(problem: Problem, axis: int) -> tuple[frozenset[int], ...]:
    """For each output r of a cell, the shifts to the inputs that it reads.

    >>> phase_shifts(Problem(1, 1, 1, 1, (8, 8), (4, 4), stride=(2, 2), padding=(1, 1)), 0)
    (frozenset({0, -1}), frozenset({0, 1}))
    """
    taps = taps_of(problem, "forward", axis)
    return tuple(frozenset(of.shift for of in taps if of.phase == phase) for phase in range(problem.stride[axis]))


def taps_of(problem: Problem, direction: Pass, axis: int) -> tuple[Tap, ...]:
    """The taps of an axis, in order: of a forward pass, or of an input gradient, whose cells are single inputs.

    >>> taps_of(Problem(1, 1, 1, 1, (8, 8), (3, 3), stride=(2, 2), padding=(1, 1)), "forward", 0)
    (Tap(tap=0, phase=1, shift=1), Tap(tap=1, phase=0, shift=0), Tap(tap=2, phase=1, shift=0))
    """
    p = problem
    return axis_taps(direction, p.kernel_size[axis], p.stride[axis], p.padding[axis], p.dilation[axis])


@lru_cache(maxsize=1024)
def axis_taps(direction: Pass, kernel_size: int, stride: int, padding: int, dilation: int) -> tuple[Tap, ...]:
    """:func:`taps_of` an axis without a problem."""
    places = [tap * dilation - padding for tap in range(kernel_size)]
    if direction == "input_grad":
        return tuple(Tap(tap, 0, place) for tap, place in enumerate(places))
    return tuple(Tap(tap, place % stride, -(place // stride)) for tap, place in enumerate(places))


@lru_cache(maxsize=1024)
def taps_of_phases(
    direction: Pass, kernel_size: Extents, stride: Extents, padding: Extents, dilation: Extents
) -> tuple[tuple[Taps, ...], Extent3, Extent3]:
    """The taps of each phase, in order of depth, row, column, and the least and the greatest shift of all."""
    of_axes = three_axes(kernel_size), three_axes(stride), three_axes(padding, 0), three_axes(dilation)
    axes = [axis_taps(direction, *of) for of in zip(*of_axes, strict=True)]
    found = defaultdict[Extent3, list[tuple[int, Extent3]]](list)
    for i, (depth, row, column) in enumerate(itertools.product(*axes)):
        found[depth.phase, row.phase, column.phase].append((i, (depth.shift, row.shift, column.shift)))
    span = three_axes(stride if direction == "forward" else ())
    shifts = [[tap.shift for tap in axis] for axis in axes]
    phases = tuple(tuple(found[d, h, w]) for d, h, w in itertools.product(*map(range, span)))
    return phases, three_axes([*map(min, shifts)]), three_axes([*map(max, shifts)])


def reach_of(problem: Problem, axis: int) -> Pair:
    """Least and largest shift from a cell to an input that one of its outputs reads.

    >>> reach_of(Problem(1, 1, 1, 1, (8, 8), (4, 4), stride=(2, 2), padding=(1, 1)), 0)
    (-1, 1)
    """
    shifts = [tap.shift for tap in taps_of(problem, "forward", axis)]
    return min(shifts), max(shifts)


def stored_together(problem: Problem, itemsize: int, channels: int = 1) -> int:
    """Outputs of a row of a cell that one aligned store covers; so many ``channels`` are neighbours in memory."""
    return math.gcd(16 // itemsize, problem.stride[1] * channels, problem.output_size[1] * channels)


def can_be_folded(problem: Problem) -> bool:
    """Whether every phase has a tap, and shifts times the width of an image fit a kernel's 32-bit integers.

    Without a tap an output would be the bias alone. Padding may cancel a dilation that reaches beyond every image.
    """
    reaches = (problem.padding[axis] + problem.dilation[axis] * problem.kernel_size[axis] for axis in (0, 1))
    return max(reaches) <= _MOST_REACH and all(all(phase_shifts(problem, axis)) for axis in (0, 1))
