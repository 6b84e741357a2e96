"""The plans that csrc/sm90/implicit_gemm.cu may take for a problem, and the one that it takes: a pure function."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from gemmconv.device import REFERENCE
from gemmconv.geometry import Pair, Problem
from gemmconv.kernels.base import Pass
from gemmconv.kernels.sm90.implicit_gemm_cost import cycles_of_items, item_cycles_of
from gemmconv.kernels.sm90.implicit_gemm_plan import (
    BLOCK_ROWS,
    FEW_LOADERS,
    MANY_LOADERS,
    MOST_COLUMNS,
    WIDEST,
    Plan,
)

_PROMISING = 4  # kinds of plans, all plans of which are looked at, and plans
_BATCHES = (1, 64)  # for which kinds are promising, or not

# Cells of a strip. Narrow ones are for patches that fit no other way: what several blocks write piece by piece is slow.
_WIDTHS, _NARROW_WIDTHS = (62, 94, 126, 190, 254, 510), (14, 30)
_WHOLE_WIDTHS = (64, 128, 256)  # of strips of rows of 1024 and the like, that are whole sectors of memory

_COLUMNS = (32, 64, 96, 128, MOST_COLUMNS)  # of a tile, where a block has many
_WIDES = (1, 2)  # inputs that may be taken together
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
    """The plan for a problem: a pure function of it. None where it is not for this kernel.

    Of the plans that :func:`_searched` gives for images of this size, the fastest for their number.
    """
    variant = direction, itemsize, split, channels_last, multiprocessors
    least_bytes = problem.least_bytes(itemsize)
    searched = _searched(replace(problem, batch=max(_BATCHES)), *variant)
    first = sorted(searched, key=lambda one: one.cycles(problem.batch, multiprocessors, least_bytes))[:_PROMISING]
    plans = (one.plan.changed(problem=problem) for one in first)
    return min((plan for plan in plans if plan.possible), key=lambda plan: plan.cycles, default=None)


class _Searched(NamedTuple):
    """A plan, and what its cycles follow from for any number of images."""

    plan: Plan
    item_cycles: float
    image_positions: int
    tile: int
    sets: int
    resident: bool

    def cycles(self, batch: int, multiprocessors: int, least_bytes: int) -> float:
        items = -(-batch * self.image_positions // self.tile) * self.sets
        blocks = max(1, min(items, multiprocessors))
        if self.resident:
            blocks = max(blocks // self.sets, 1) * self.sets
        return cycles_of_items(-(-items // blocks), self.item_cycles, least_bytes)


@lru_cache(maxsize=256)
def _searched(
    problem: Problem, direction: Pass, itemsize: int, split: bool, channels_last: bool, multiprocessors: int
) -> tuple[_Searched, ...]:
    """All plans of the most promising kinds, for few images and for many: there are hundreds in all."""
    smallest = _smallest(problem, direction, itemsize, split, channels_last, multiprocessors)
    for widths in (_WIDTHS, _NARROW_WIDTHS):
        kinds = list(_kinds(smallest, widths))
        promises = [_promise(kind) for kind in kinds]
        promising = set[int]()
        for place in range(len(_BATCHES)):
            order = sorted(range(len(kinds)), key=lambda i: promises[i][place])
            promising.update([i for i in order if promises[i][place] < math.inf][:_PROMISING] or order)
        plans = (plan for i in sorted(promising) for plan in _of_kind(kinds[i]) if plan.possible)
        found = [_known(plan) for plan in plans]
        if found:
            return tuple(found)
    return ()


def _known(plan: Plan) -> _Searched:
    return _Searched(plan, item_cycles_of(plan), plan.image_positions, plan.tile, plan.sets, plan.resident)


def _promise(kind: Plan) -> tuple[float, ...]:
    """Roughly the cycles of a kind, for each of the batches; infinite where nothing that is tried is possible."""
    widest = max(32, min(128, WIDEST // (kind.blocks + kind.split) // 32 * 32))
    loaders = FEW_LOADERS if kind.way == "lines" else MANY_LOADERS
    pairs = itertools.product({widest, max(32, widest // 64 * 32)}, _units(kind))
    tried = (kind.changed(columns=columns, units=units, loaders=loaders) for columns, units in pairs)
    known = [_known(plan) for plan in tried if plan.possible]
    return tuple(
        min((one.cycles(batch, kind.multiprocessors, 0) for one in known), default=math.inf) for batch in _BATCHES
    )


def plans_of(
    problem: Problem,
    direction: Pass,
    itemsize: int,
    split: bool,
    channels_last: bool,
    multiprocessors: int = REFERENCE.multiprocessors,
) -> Iterator[Plan]:
    """The plans that a problem may have: those that fit registers, shared memory and constant memory."""
    smallest = _smallest(problem, direction, itemsize, split, channels_last, multiprocessors)
    found = False
    for widths in (_WIDTHS, _NARROW_WIDTHS):
        for plan in itertools.chain.from_iterable(map(_of_kind, _kinds(smallest, widths))):
            if plan.possible:
                found = True
                yield plan
        if found:
            return


def _smallest(
    problem: Problem, direction: Pass, itemsize: int, split: bool, channels_last: bool, multiprocessors: int
) -> Plan:
    return Plan(
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


def _kinds(smallest: Plan, widths: tuple[int, ...]) -> Iterator[Plan]:
    """Those of the problem of the smallest plan, with strips of some widths, but for columns, units and loaders."""
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
                for warpgroups_m, phase_sides in sides:
                    yield right.changed(warpgroups_m=warpgroups_m, phase_sides=phase_sides)


def _of_kind(kind: Plan) -> Iterator[Plan]:
    """The plans of a kind, possible or not."""
    columns = [one for one in _COLUMNS if one * kind.blocks <= WIDEST]
    loaders = (MANY_LOADERS, FEW_LOADERS) if kind.way == "lines" else (MANY_LOADERS,)
    for one, units, threads in itertools.product(columns, _units(kind), loaders):
        yield kind.changed(columns=one, units=units, loaders=threads)


@lru_cache(maxsize=1024)
def with_other_columns(plan: Plan) -> tuple[Plan, ...]:
    """The plan with every other number of columns that is possible."""
    most = min(2 * plan.columns, MOST_COLUMNS, WIDEST // plan.blocks)
    columns = (one for one in range(32, most + 1, 32) if 2 * one >= plan.columns != one)
    return tuple(one for one in (plan.changed(columns=count) for count in columns) if one.possible)


def _right_sides(plan: Plan) -> Iterator[Plan]:
    """The plan with each way to bring inputs into shared memory, and how many of them are taken together."""
    if plan.channels_last and (lines := replace(plan, way="lines")).may_be_boxed:
        yield lines
    for wide, landing in itertools.product(_WIDES, (False, True)):
        loaded = replace(plan, wide=wide, way="landing" if landing else "loaded")
        if not loaded.aligned or (wide == 1 and replace(loaded, wide=2).aligned):
            continue
        if not landing or loaded.may_land:
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
