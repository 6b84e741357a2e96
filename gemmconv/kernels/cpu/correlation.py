"""A pass as a correlation over a table of taps: the geometry that csrc/cpu/conv.h and wgrad.h read.

A forward pass and an input gradient are one kernel with source and target exchanged. On each axis the target's
positions fall into classes and cells, position = step * cell + class - base, and so do the source's. Tap k joins class
c of the target's cell m with one class of the source's cell m + shift, the same for every m:

    forward     output o = i*S - P + k*D:  target step S, source step 1;  shift = (c + P - base - k*D) / S, if exact
    input grad  the same relation:         target step 1, source step S;  shift, class = divmod(k*D - P, S)

Axes are depth, height and width; a missing one has extent 1, kernel 1 and stride 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from gemmconv.geometry import Problem

Read = tuple[int, int]  # class of the source, shift in cells
Entry = tuple[int, int, tuple[int, ...]]  # class of the source, shift in cells, tap of each class or -1


@dataclass(frozen=True)
class Axis:
    """One axis of a correlation."""

    size: int  # size, extent: positions of source and target
    extent: int
    source_step: int  # source_step, target_step: positions of a cell
    target_step: int
    base: int  # the target's position is ``target_step * cell + class - base``
    # for each class of the target, the taps by the classes and shifts that its cells read
    classes: tuple[dict[Read, int], ...]

    @property
    def cells(self) -> int:
        """Cells of the target."""
        return -(-(self.extent + self.base) // self.target_step)

    @property
    def pitch(self) -> int:
        """Cells from one row to the next, padded so that no tap reaches into the values of another row."""
        shifts = [0, *(shift for reads in self.classes for _, shift in reads)]
        return max(-(-self.size // self.source_step) - min(shifts), self.cells + max(shifts))


def axes_of(problem: Problem, is_gradient: bool, together: bool) -> tuple[Axis, Axis, Axis]:
    """The axes of a forward pass, or of an input gradient.

    If one product computes all classes of a cell ``together``, bases are chosen so that classes share shifts.

    >>> axes_of(Problem(1, 8, 8, 1, (4, 4), (4, 4), stride=(2, 2), padding=(1, 1)), False, True)[2].classes
    ({(0, 0): 0, (0, -1): 2}, {(0, 0): 1, (0, -1): 3})
    """
    p = problem
    pairs = zip(p.input_size, p.output_size, p.kernel_size, p.stride, p.padding, p.dilation, strict=True)
    made = []
    for size, extent, kernel, stride, padding, dilation in [(1, 1, 1, 1, 0, 1)] * (3 - len(p.input_size)) + list(pairs):
        if is_gradient:
            reached = (divmod(k * dilation - padding, stride) for k in range(kernel))
            reads = {(source_class, shift): k for k, (shift, source_class) in enumerate(reached)}
            made.append(Axis(extent, size, stride, 1, 0, (reads,)))
            continue
        base = padding % stride if together else 0
        offsets = [[c + padding - base - k * dilation for k in range(kernel)] for c in range(stride)]
        classes = [{(0, e // stride): k for k, e in enumerate(row) if e % stride == 0} for row in offsets]
        made.append(Axis(size, extent, 1, stride, base, tuple(classes)))
    depth, height, width = made
    return depth, height, width


@dataclass(frozen=True)
class Table:
    """The tap table of a pass: the entries of each product, which computes one class of the target, or all of them."""

    axes: tuple[Axis, Axis, Axis]
    together: bool
    products: tuple[tuple[Entry, ...], ...]

    @property
    def classes(self) -> int:
        """Classes of the target."""
        return math.prod(axis.target_step for axis in self.axes)

    def cells(self, batch: int) -> int:
        """Cells of images, including the padding between their rows, up to the last that is wanted."""
        pitches = [axis.pitch for axis in self.axes]
        return max(1, (batch - 1) * math.prod(pitches) + 1 + _flat((axis.cells - 1 for axis in self.axes), pitches))

    @property
    def entries(self) -> list[Entry]:
        """The entries of all products."""
        return [entry for product in self.products for entry in product]

    @property
    def shift_range(self) -> tuple[int, int]:
        """The least and the greatest shift, of 0 and those in the table."""
        shifts = [0, *(shift for _, shift, _ in self.entries)]
        return min(shifts), max(shifts)


@lru_cache(maxsize=1024)
def table_of(problem: Problem, is_gradient: bool, together: bool) -> Table:
    """The tap table of a forward pass or an input gradient, with all classes in one product or one in each."""
    axes = axes_of(problem, is_gradient, together)
    kernel = [1] * (3 - len(problem.kernel_size)) + list(problem.kernel_size)
    pitches, steps = [axis.pitch for axis in axes], [axis.source_step for axis in axes]
    classes, products = list(itertools.product(*(range(axis.target_step) for axis in axes))), []
    for of_product in [classes] if together else [[one] for one in classes]:
        reads = [sorted({read for c in of_product for read in axis.classes[c[i]]}) for i, axis in enumerate(axes)]
        entries = []
        for triple in itertools.product(*reads):
            taps = [[axis.classes[c[i]].get(triple[i], -1) for i, axis in enumerate(axes)] for c in of_product]
            flat = tuple(-1 if -1 in each else _flat(each, kernel) for each in taps)
            entries.append((_flat((c for c, _ in triple), steps), _flat((s for _, s in triple), pitches), flat))
        products.append(tuple(entries))
    return Table(axes, together, tuple(products))


def _flat(numbers: Iterable[int], extents: list[int]) -> int:
    """The row-major index of three indices in an array of these extents; shifts give the distance of indices."""
    first, second, third = numbers
    return (first * extents[1] + second) * extents[2] + third
