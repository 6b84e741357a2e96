"""Short menus of tiles: all sizes of a layer take a tile from its menu, so that few kernels are compiled for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from gemmconv.geometry import Problem
from gemmconv.kernels.integers import up_to_multiple

T = TypeVar("T")

SHORT = 16  # inputs: each shorter length of an axis has a menu of its own
# Batch, height and width of the problems that menus are made for.
_SIZES = (1, 20, 18), (2, 48, 40), (64, 24, 33), (8, 64, 64), (32, 112, 72), (2, 28, 150), (16, 90, 120)


def samples(problem: Problem, pixels: int = 1) -> tuple[Problem, ...]:
    """Problems that a layer's menu is made for; they depend on an axis of a size only if it is short.

    Args:
        problem: the layer, at some sizes.
        pixels: 1, or a power of two: widths have the remainder of the problem's by it.

    >>> [one.input_size for one in samples(Problem(3, 8, 8, 1, (1, 999), (1, 3)), 8)][:3]
    [(1, 367), (1, 1927), (1, 799)]
    >>> {one.input_size for one in samples(Problem(3, 8, 8, 1, (4, 5), (3, 3)), 8)}
    {(4, 5)}
    >>> [one.output_size for one in samples(Problem(1, 8, 8, 1, (99, 99), (3, 3), padding=(30, 0)))][:2]
    [(20, 20), (48, 42)]
    """
    (height, width), problems = problem.input_size, dict[Problem, None]()
    short_h, short_w, beyond = height < SHORT, width < SHORT, width % pixels
    # Inputs on each axis whose outputs padding takes away, beyond those that the kernel adds.
    window = zip(problem.kernel_size, problem.stride, problem.padding, problem.dilation, strict=True)
    cropped_h, cropped_w = (max(0, -((apart * (kernel - 1) - 2 * pad) // step)) for kernel, step, pad, apart in window)
    for batch, rows, columns in _SIZES:
        if cropped_h >= rows or cropped_w >= columns:  # it would have no outputs
            rows, columns = rows + cropped_h, columns + cropped_w
        area = rows * columns
        rows, columns = area if short_w else rows, up_to_multiple(area if short_h else columns, pixels) + beyond
        size = height if short_h else rows, width if short_w else columns
        problems[replace(problem, batch=batch * (SHORT if short_h and short_w else 1), input_size=size)] = None
    return tuple(problems)


def menu_of(tiles: Sequence[T], seconds: Sequence[Sequence[float]], most: int) -> list[T]:
    """Choose at most ``most`` tiles by ``seconds[sample][tile]``, greedily: the tile that gains most comes next.

    >>> menu_of("abc", [[1, 9, 2], [9, 1, 2]], 1), menu_of("abc", [[1, 9, 2], [9, 1, 2]], 3)
    (['c'], ['c', 'a', 'b'])
    >>> menu_of("", [[], []], 3)
    []
    """
    weights = [1 / min(row, default=1) for row in seconds]
    weighted = ([one * weight for one in row] for row, weight in zip(seconds, weights, strict=True))
    columns = [*zip(*weighted, strict=True)]  # of each tile, the weighted seconds of all samples
    taken: list[T] = []
    least, sums = [float("inf")] * len(weights), {i: sum(column) for i, column in enumerate(columns)}
    while sums and len(taken) < most:
        best = min(sums, key=sums.__getitem__)
        taken.append(tiles[best])
        least = [*map(min, columns[best], least)]
        before = sum(least)
        # A tile that gains nothing now never will.
        sums = {i: after for i in sums if (after := sum(map(min, columns[i], least))) < before}
    return taken
