"""A pass as a correlation over a table of taps: what csrc/cpu/conv.h and wgrad.h read of a layer's geometry.

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
from dataclasses import dataclass, replace
from functools import lru_cache

from gemmconv.geometry import Problem

Tap = tuple[int, int, int]  # tap, class of the source, shift in cells
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Axis:
    """One axis of a correlation.

    Attributes:
        size, extent: positions of source and target.
        source_step, target_step: positions of a cell.
        base: the target's position ``step * cell + class - base``.
        classes: for each class of the target, its taps.
    """

    size: int
    extent: int
    source_step: int
    target_step: int
    base: int
    classes: tuple[tuple[Tap, ...], ...]

    @property
    def shifts(self) -> tuple[int, int]:
        """The least and the greatest shift, 0 between them."""
        shifts = [shift for taps in self.classes for _, _, shift in taps]
        return min(0, *shifts, 0), max(0, *shifts, 0)

    @property
    def cells(self) -> int:
        """Cells of the target."""
        return -(-(self.extent + self.base) // self.target_step)

    @property
    def pitch(self) -> int:
        """Cells from one row to the next, so many that no tap reaches from one row into another's values."""
        low, high = self.shifts
        return max(-(-self.size // self.source_step) - low, self.cells + high)


@lru_cache(maxsize=1024)
def axes_of(problem: Problem, is_gradient: bool, together: bool) -> tuple[Axis, Axis, Axis]:
    """The axes of a forward pass, or of an input gradient.

    Args:
        problem: the layer.
        is_gradient: whether it is the input's gradient.
        together: whether all classes of a cell are computed together: bases are then such that they share shifts.

    >>> axes_of(Problem(1, 8, 8, 1, (4, 4), (4, 4), stride=(2, 2), padding=(1, 1)), False, True)[2].classes
    (((0, 0, 0), (2, 0, -1)), ((1, 0, 0), (3, 0, -1)))
    """
    p = _flattened(problem)
    pairs = zip(p.input_size, p.output_size, p.kernel_size, p.stride, p.padding, p.dilation, strict=True)
    rows = [(1, 1, 1, 1, 0, 1)] * (3 - len(p.input_size)) + list(pairs)
    made = []
    for size, extent, kernel, stride, padding, dilation in rows:
        base = padding % stride if together and not is_gradient else 0
        if is_gradient:
            reached = [divmod(k * dilation - padding, stride) for k in range(kernel)]
            taps = tuple((k, source_class, shift) for k, (shift, source_class) in enumerate(reached))
            made.append(Axis(extent, size, stride, 1, 0, (taps,)))
            continue
        offsets = [[c + padding - base - k * dilation for k in range(kernel)] for c in range(stride)]
        classes = [[(k, 0, e // stride) for k, e in enumerate(of_class) if e % stride == 0] for of_class in offsets]
        made.append(Axis(size, extent, 1, stride, base, tuple(map(tuple, classes))))
    depth, height, width = made
    return depth, height, width


def _flattened(p: Problem) -> Problem:
    """The layer with images of one row, where a kernel of one tap leaves them as they are: rows may be short."""
    if p.taps == 1 and max(p.stride) == 1 and max(p.padding) == 0 and p.output_size == p.input_size:
        return replace(p, input_size=(1, p.in_pixels))
    return p


@dataclass(frozen=True)
class Table:
    """The tap table of a pass: the entries of each product, with the tap of each of its classes.

    Attributes:
        axes: see :class:`Axis`.
        together: whether one product has all classes as its rows; else there is one for each class.
        products: for each product its entries: (class of the source, shift in cells, tap of each class or -1).
    """

    axes: tuple[Axis, Axis, Axis]
    together: bool
    products: tuple[tuple[tuple[int, int, tuple[int, ...]], ...], ...]

    @property
    def classes(self) -> int:
        """Classes of the target."""
        return math.prod(axis.target_step for axis in self.axes)

    @property
    def cells(self) -> int:
        """Cells of the row of numbers that an image takes, those between its rows too."""
        return math.prod(axis.pitch for axis in self.axes)

    @property
    def has_gaps(self) -> bool:
        """Whether some class lacks a tap that others of its product have: a weight of zero stands in."""
        return any(-1 in taps for product in self.products for _, _, taps in product)

    @property
    def terms(self) -> int:
        """Multiplications of a cell for each pair of channels, zeros among them."""
        return sum(len(product) for product in self.products) * (self.classes if self.together else 1)

    def shift_range(self) -> tuple[int, int]:
        """The least and the greatest shift."""
        shifts = [shift for product in self.products for _, shift, _ in product]
        return min([0, *shifts]), max([0, *shifts])


@lru_cache(maxsize=1024)
def table_of(problem: Problem, is_gradient: bool, together: bool) -> Table:
    """The tap table of a forward pass or an input gradient, with classes together or one by one."""
    axes = axes_of(problem, is_gradient, together)
    pitches = [axis.pitch for axis in axes]
    kernel = (*[1] * (3 - len(problem.kernel_size)), *problem.kernel_size)

    def flat(numbers: tuple[int, ...], extents: list[int]) -> int:
        found = 0
        for number, extent in zip(numbers, extents, strict=True):
            found = found * extent + number
        return found

    kernels, steps = list(kernel), [axis.source_step for axis in axes]
    classes = list(itertools.product(*(range(axis.target_step) for axis in axes)))
    products = []
    for of_product in [classes] if together else [[one] for one in classes]:
        joined = [sorted({tap[1:] for c in of_product for tap in axis.classes[c[i]]}) for i, axis in enumerate(axes)]
        known = [
            {(c[i], *tap[1:]): tap[0] for c in of_product for tap in axis.classes[c[i]]} for i, axis in enumerate(axes)
        ]
        entries = []
        for triple in itertools.product(*joined):
            taps = []
            for c in of_product:
                each = tuple(known[i].get((c[i], *triple[i]), -1) for i in range(3))
                taps.append(-1 if -1 in each else flat(each, kernels))
            source_class = flat(tuple(one[0] for one in triple), steps)
            entries.append((source_class, flat(tuple(one[1] for one in triple), pitches), tuple(taps)))
        products.append(tuple(entries))
    return Table(axes, together, tuple(products))
