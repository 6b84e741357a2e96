"""The plans that csrc/sm90/implicit_gemm.cu may take for a problem, and the one that it takes: a pure function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from gemmconv.geometry import Pair
from gemmconv.hashing import changed
from gemmconv.kernels.sm90.implicit_gemm_cost import cycles_of_batch
from gemmconv.kernels.sm90.implicit_gemm_plan import BLOCK_ROWS, FEW_LOADERS, MANY_LOADERS, MOST_COLUMNS, WIDEST, Plan

_PROMISING = 4  # kinds of plans, all plans of which are looked at, and plans
_BATCHES = (1, 64)  # for which kinds are promising, or not

# Cells of a strip. Narrow ones are for patches that fit no other way: what several blocks write piece by piece is slow.
_WIDTHS, _NARROW_WIDTHS = (62, 94, 126, 190), (14, 30)
_WHOLE_WIDTH = 64  # of strips of rows of 1024 and the like, that are whole sectors of memory

_COLUMNS = (32, 64, 96, 128, MOST_COLUMNS)  # of a tile, where a block has many
_WIDES = (1, 2)  # inputs that may be taken together
# Column phases of which a warpgroup may have all. With seven, storing them runs out of registers.
_ALL_COLUMNS = (3, 4, 5, 8)

# Slots and blocks of warps that have whole rows of so many outputs a cell.
_LINED = {4: ((4, 1), (2, 2)), 8: ((8, 1), (4, 2)), 16: ((16, 1), (8, 2))}


@lru_cache(maxsize=1024)
def plan_of(smallest: Plan) -> Plan | None:
    """The plan for a problem, which the smallest one is of: a pure function of it. None where the kernel has none.

    It is the fastest, for the number of images, of the plans that :func:`_searched` gives for images of this size.
    """
    problem, least_bytes = smallest.problem, smallest.problem.least_bytes(smallest.itemsize)
    found = _searched(changed(smallest, problem=changed(problem, batch=max(_BATCHES))))
    first = sorted(found, key=lambda plan: cycles_of_batch(plan, problem.batch, least_bytes))[:_PROMISING]
    plans = (changed(plan, problem=problem) for plan in first)
    return min((plan for plan in plans if plan.possible), key=lambda plan: plan.cycles, default=None)


@lru_cache(maxsize=256)
def _searched(smallest: Plan) -> list[Plan]:
    """All plans of the most promising kinds, for few images and for many: there are hundreds in all."""
    return plans_of(smallest, _promising)


def plans_of(smallest: Plan, chosen: Callable[[Iterable[Plan]], Iterable[Plan]] = iter) -> list[Plan]:
    """The plans of the chosen kinds that a problem may have: they fit registers, shared memory and constant memory.

    Strips are narrow only where nothing else is possible.
    """
    for widths in (_WIDTHS, _NARROW_WIDTHS):
        kinds = chosen(_kinds(smallest, widths))
        if plans := [plan for kind in kinds for plan in _of_kind(kind)]:
            return plans
    return []


def _promising(kinds: Iterable[Plan]) -> list[Plan]:
    """The kinds whose tried plans are the fastest, for each of the batches; all kinds if nothing tried is possible."""
    kinds, promising = list(kinds), set[int]()
    tried = {i: plans for i, kind in enumerate(kinds) if (plans := _tried(kind))}
    for batch in _BATCHES:
        order = sorted(tried, key=lambda i: min(cycles_of_batch(plan, batch, 0) for plan in tried[i]))
        promising.update(order[:_PROMISING])
    return [kinds[i] for i in sorted(promising)] or kinds


def _tried(kind: Plan) -> list[Plan]:
    """A few plans of a kind that are possible, by which kinds are compared."""
    widest = max(32, min(128, WIDEST // (kind.blocks + kind.split) // 32 * 32))
    return _with(kind, {widest, max(32, widest // 64 * 32)}, (FEW_LOADERS if kind.way == "lines" else MANY_LOADERS,))


def _kinds(smallest: Plan, widths: tuple[int, ...]) -> Iterator[Plan]:
    """The kinds of plans with strips of some widths: a kind leaves open columns, units and loaders alone."""
    for slots, blocks in _left_sides(smallest):
        multiple = 1, max(1, slots // smallest.span[1])  # of the cell across, so that it has all phases of an M block
        left = changed(smallest, multiple=multiple, slots=slots, blocks=blocks)
        cells = left.cells[1]
        wanted = (*widths, _WHOLE_WIDTH) if left.planes_conflict else widths
        strips = {1, *(-(-cells // width) for width in wanted if width < cells)}
        sides = [(1, 1)]
        if len(left.phases) % (2 * blocks) == 0:
            both = changed(left, warpgroups_m=2, phase_sides=2)
            if 2 * both.all_steps == left.all_steps:  # the same for either side
                sides.append((2, 2))  # of those of one estimate the first is taken: rows beside each other are faster
        if left.out_channels > left.channels:
            sides.append((2, 1))
        for strip in strips:
            for right in _right_sides(changed(left, strips=strip)):
                for warpgroups_m, phase_sides in sides:
                    yield changed(right, warpgroups_m=warpgroups_m, phase_sides=phase_sides)


def _of_kind(kind: Plan) -> list[Plan]:
    return _with(kind, _COLUMNS, (MANY_LOADERS, FEW_LOADERS) if kind.way == "lines" else (MANY_LOADERS,))


def _with(kind: Plan, menu: Iterable[int], loaders: tuple[int, ...]) -> list[Plan]:
    """The plans of a kind that are possible with some numbers of columns and of loaders."""
    plans = (
        changed(kind, columns=columns, units=units, loaders=count)
        for columns, units, count in itertools.product(menu, _units(kind), loaders)
    )
    return [plan for plan in plans if plan.possible]


@lru_cache(maxsize=1024)
def with_other_columns(plan: Plan) -> tuple[Plan, ...]:
    """The plan with every other number of columns that is possible."""
    columns = [one for one in range(32, 2 * plan.columns + 1, 32) if 2 * one >= plan.columns != one]
    return tuple(one for one in (changed(plan, columns=count) for count in columns) if one.possible)


def _right_sides(plan: Plan) -> Iterator[Plan]:
    """The plan with each way to bring inputs into shared memory, and how many of them are taken together."""
    for wide, way in itertools.product(_WIDES, ("lines", "loaded", "landing")):
        right = changed(plan, wide=wide, way=way)
        if right.suits_memory and not (wide == 1 and changed(right, wide=2).aligned):
            yield right


def _units(plan: Plan) -> tuple[int, ...]:
    """Units of a chunk: two where they leave fewer channels of the last chunk empty than four."""
    return (2, 4, 8) if 0 < -(-plan.in_channels // plan.element_units) % 4 <= 2 else (4, 8)


def _left_sides(smallest: Plan) -> Iterator[Pair]:
    """Slots of an M block, M blocks of a warpgroup."""
    span, channels = smallest.span[1], smallest.out_channels
    yield 1, 1
    if span % 2 == 0:
        yield 1, 2
    if not smallest.channels_last:  # a warpgroup may have all columns of a cell, to store rows of them
        if span in _ALL_COLUMNS:
            yield 1, span
        yield from ((slots, blocks) for slots, blocks in _LINED.get(span, ()) if slots * channels > BLOCK_ROWS)
    for slots in (2, 3, 4):
        if slots * channels <= BLOCK_ROWS and (span >= slots or slots % span == 0):
            yield slots, 1
