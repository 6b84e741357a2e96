"""The plans that csrc/sm90/implicit_gemm.cu may take for a problem, and the one that it takes: a pure function."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from gemmconv.device import REFERENCE
from gemmconv.geometry import Pair, Problem
from gemmconv.kernels.base import Pass
from gemmconv.kernels.sm90.implicit_gemm_plan import BLOCK_ROWS, FEW_LOADERS, MANY_LOADERS, WIDEST, Plan, Way

# Cells of a strip. Narrow ones are for patches that fit no other way: what several blocks write piece by piece is slow.
_WIDTHS, _NARROW_WIDTHS = (62, 94, 126, 190, 254, 510), (14, 30)
_WHOLE_WIDTHS = (64, 128, 256)  # of strips of rows of 1024 and the like, that are whole sectors of memory

_COLUMNS = (32, 64, 96, 128, 192, 256)  # of a tile, where a block has many
_WIDES = (1, 2)  # inputs that may be taken together; where eight of 16-bit types are aligned, they land
# Column phases of which a warpgroup may have all. With seven, storing them runs out of registers.
_ALL_COLUMNS = (3, 4, 5, 6, 8)

# Slots and blocks of warps that have whole rows of so many outputs a cell.
_LINED = {4: ((4, 1), (2, 2)), 8: ((8, 1), (4, 2)), 16: ((16, 1), (8, 2))}


@lru_cache(maxsize=1024)
def plan_of(
    problem: Problem,
    direction: Pass,
    itemsize: int,
    split: bool,
    channels_last: bool,
    multiprocessors: int = REFERENCE.multiprocessors,
) -> Plan | None:
    """The plan for a problem: a pure function of it. None where it is not for this kernel."""
    plans = plans_of(problem, direction, itemsize, split, channels_last, multiprocessors)
    return min(plans, key=lambda plan: plan.cycles, default=None)


def plans_of(
    problem: Problem,
    direction: Pass,
    itemsize: int,
    split: bool,
    channels_last: bool,
    multiprocessors: int = REFERENCE.multiprocessors,
) -> Iterator[Plan]:
    """The plans that a problem may have: those that fit registers, shared memory and constant memory."""
    smallest = Plan(
        problem,
        direction,
        itemsize,
        split,
        channels_last,
        multiple=(1, 1),
        slots=1,
        blocks=1,
        columns=32,
        warpgroups_m=1,
        phase_sides=1,
        units=2,
        strips=1,
        wide=1,
        way="loaded",
        loaders=MANY_LOADERS,
        multiprocessors=multiprocessors,
    )
    found = False
    for plan in _plans_like(smallest, _WIDTHS):
        found = True
        yield plan
    if not found:
        yield from _plans_like(smallest, _NARROW_WIDTHS)


def _plans_like(smallest: Plan, widths: tuple[int, ...]) -> Iterator[Plan]:
    """Those of the problem of the smallest plan, with strips of some widths."""
    channels = smallest.out_channels
    for multiple, slots, blocks in _left_sides(smallest.span[1], channels, smallest.channels_last):
        left = replace(smallest, multiple=multiple, slots=slots, blocks=blocks)
        cells = left.cells[1]
        wanted = (*widths, *_WHOLE_WIDTHS) if left.planes_conflict else widths
        strips = {1, *(-(-cells // width) for width in wanted if width < cells)}
        sides = [(1, 1)]
        if len(left.phases) % (2 * blocks) == 0:
            both = replace(left, warpgroups_m=2, phase_sides=2)
            if 2 * sum(map(len, both.steps)) == sum(map(len, left.steps)):  # the same for either side
                sides.append((2, 2))  # of those of one estimate the first is taken: rows beside each other are faster
        if channels > left.channels:
            sides.append((2, 1))
        for strip in strips:
            for right in _right_sides(replace(left, strips=strip)):
                for columns, (warpgroups_m, phase_sides), units, loaders in itertools.product(
                    [one for one in _COLUMNS if one * blocks <= WIDEST],
                    sides,
                    _units(smallest),
                    (MANY_LOADERS, FEW_LOADERS),
                ):
                    if right.landing and loaders == FEW_LOADERS:
                        continue
                    plan = right.varied(
                        columns=columns,
                        warpgroups_m=warpgroups_m,
                        phase_sides=phase_sides,
                        units=units,
                        loaders=loaders,
                    )
                    if plan.possible:
                        yield plan


@lru_cache(maxsize=1024)
def with_other_columns(plan: Plan) -> tuple[Plan, ...]:
    """The plan with every other number of columns that is possible."""
    most = min(2 * plan.columns, WIDEST // plan.blocks)
    columns = (one for one in range(32, most + 1, 32) if 2 * one >= plan.columns != one)
    return tuple(one for one in (plan.varied(columns=count) for count in columns) if one.possible)


def _right_sides(plan: Plan) -> Iterator[Plan]:
    """The plan with each way to bring inputs into shared memory, and how many of them are taken together."""
    way: Way = "lines" if plan.channels_last else "blocks"
    boxed = replace(plan, way=way)
    if boxed.may_be_boxed:
        yield boxed
    for wide, landing in itertools.product(_WIDES, (False, True)):
        loaded = replace(plan, wide=wide, way="landing" if landing else "loaded")
        if not loaded.aligned or (wide == 1 and replace(loaded, wide=2).aligned):
            continue
        if landing and not (wide <= 2 and loaded.may_land):
            continue
        if not landing and plan.itemsize == 2 and wide > 2 and loaded.may_land:
            continue  # landing is faster
        yield loaded


def _units(plan: Plan) -> tuple[int, ...]:
    """Units of a chunk: two where they leave fewer channels of the last chunk empty than four."""
    return (2, 4, 8) if 0 < -(-plan.in_channels // plan.element_units) % 4 <= 2 else (4, 8)


def _left_sides(span: int, channels: int, channels_last: bool) -> Iterator[tuple[Pair, int, int]]:
    """Multiples of the smallest cell, slots of an M block, M blocks of a warpgroup.

    Args:
        span: outputs of the smallest cell across.
        channels: output channels of a group.
        channels_last: format; without it, a warpgroup may have all columns of a cell, to store rows of them.
    """
    yield (1, 1), 1, 1
    if span % 2 == 0:
        yield (1, 1), 1, 2
    if span in _ALL_COLUMNS and not channels_last:
        yield (1, 1), 1, span
    if not channels_last and span in _LINED:
        yield from (((1, 1), slots, blocks) for slots, blocks in _LINED[span] if slots * channels > BLOCK_ROWS)
    for slots in (2, 3, 4):
        if slots * channels > BLOCK_ROWS:
            break
        if span >= slots:
            yield (1, 1), slots, 1
        elif slots % span == 0:
            yield (1, slots // span), slots, 1
