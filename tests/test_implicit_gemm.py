"""The plans of csrc/sm90/implicit_gemm.cu: any of them, by a seed, and what they promise of a block. No kernel runs.

What kernels compute by these plans, tests/test_kernels.py compares with the reference.
"""

import functools
import math
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmconv import Problem
from gemmconv.algorithms import fused
from gemmconv.kernels.base import Config
from gemmconv.kernels.program import reciprocal
from gemmconv.kernels.sm90 import implicit_gemm
from gemmconv.kernels.sm90.implicit_gemm_choice import plan_of, plans_of
from gemmconv.kernels.sm90.implicit_gemm_plan import Plan
from tests.samples import tile_for

CONSTANT_BYTES = 64 << 10  # of all tables of a kernel
DIRECTIONS = ("forward", "input_grad")
EXAMPLES = settings.default.max_examples
PRECISIONS = [(4, True), (4, False), (2, False)]  # itemsize, split


def random_problem(random):
    """A Problem: small strides more often, some with more output channels than an M block has rows."""
    groups = random.choice((1, 1, 2, 3, 4))
    stride = (random.randint(1, 6), random.choice((1, 1, 2, 2, 3, 4, 5, 6)))
    dilation = (random.choice((1, 1, 2, 3, 5)), random.choice((1, 1, 2, 3, 4, 6)))
    output_padding = tuple(random.randrange(max(*steps)) for steps in zip(stride, dilation, strict=True))
    return Problem(
        batch=random.randint(1, 3),
        in_channels=groups * random.choice((1, 2, 3, 4, 8, 11, 16, 20, 33, 70)),
        out_channels=groups * random.choice((1, 2, 3, 5, 8, 16, 20, 32, 64, 65, 130)),
        groups=groups,
        input_size=(random.randint(1, 7), random.choice((1, 2, 3, 5, 6, 7, 12, 16, 19, 40, 136))),
        kernel_size=(random.randint(1, 5), random.randint(1, 5)),
        stride=stride,
        padding=(random.choice((0, 0, 1, 2, 5)), random.choice((0, 0, 1, 2, 3, 8))),
        output_padding=output_padding if random.random() < 0.5 else (0, 0),
        dilation=dilation,
    )


def boxed_problem(random):
    """A Problem whose inputs may come, or land, as boxes of a tensor map."""
    groups, stride = random.choice((1, 1, 2)), (random.randint(1, 3), random.randint(1, 4))
    beyond = random.choice((0, 1, 1))
    return Problem(
        batch=random.randint(1, 5),
        in_channels=groups * random.choice((8, 20, 32, 64, 72, 128)),
        out_channels=groups * random.choice((1, 8, 20, 64, 130)),
        groups=groups,
        input_size=(
            random.choice((1, 2, 4, 7, 8, 15, 16, 31, 62)),
            random.choice((2, 4, 7, 8, 14, 16, 24, 64, 72, 200)),
        ),
        kernel_size=tuple(random.randint(1, step + 2 * beyond) for step in stride),
        stride=stride,
        padding=(random.randint(0, beyond), random.randint(0, 2 * beyond)),
    )


def wide_problem(random):
    """A Problem whose inputs may land piece by piece, often in strips, and whose outputs may be whole lines."""
    across = random.choice((1, 2, 4, 8))
    return replace(
        random_problem(random),
        batch=random.randint(1, 2),
        input_size=(random.randint(1, 4), random.choice((12, 16, 40, 64, 72, 100, 136, 200))),
        kernel_size=(random.randint(1, 4), across * random.randint(1, 2) + random.randint(0, 1)),
        stride=(random.randint(1, 2), across),
        output_padding=(0, 0),
        dilation=(1, 1),
    )


# Makers of problems, and what plans are looked for.
KINDS = (
    (random_problem, lambda plan: True),
    (boxed_problem, lambda plan: plan.way == "lines" or plan.landing),
    (wide_problem, lambda plan: plan.lined or plan.landing),
)


def way_of(plan):
    """How a plan's inputs come, and how its outputs go."""
    images = plan.way == "lines" and plan.line_box[0] > 1
    rows = min(plan.line_box[1], 2) if plan.way == "lines" else 0
    return plan.way, images, rows, plan.whole_images, plan.lined, plan.staged


@functools.cache
def random_plan(most_outputs, seed):
    """Any plan that a problem may have, the rare ones as often as others."""
    random, found = Random(seed), []
    make, suits = KINDS[seed % len(KINDS)]
    while not found:
        problem, precision = make(random), random.choice(PRECISIONS)
        elements = max(problem.out_channels * problem.out_pixels, problem.in_channels * problem.in_pixels)
        if min(problem.output_size) > 0 and problem.batch * elements < most_outputs:
            plans = plans_of(Plan(problem, random.choice(DIRECTIONS), *precision, random.random() < 0.5))
            found = [plan for plan in plans if suits(plan)]
    for choice in (way_of, lambda plan: (plan.multiple, plan.slots, plan.blocks), lambda plan: plan.strips):
        value = random.choice(sorted(set(map(choice, found))))
        found = [plan for plan in found if choice(plan) == value]
    return random.choice(found)


def test_random_plans_are_of_every_kind():
    found = [random_plan(30_000, seed) for seed in range(EXAMPLES)]
    assert {way_of(plan)[:3] for plan in found} >= {
        *(("loaded", False, 0), ("landing", False, 0)),
        *(("lines", images, rows) for images in (False, True) for rows in (1, 2)),
    }
    for way in ("landing", "lines"):
        own = [plan for plan in found if plan.way == way]
        for kind in (lambda plan: plan.strips > 1, lambda plan: plan.whole_images, lambda plan: plan.unit > (1, 1)):
            assert {kind(plan) for plan in own} == {True, False}, way
    assert {plan.partial_pieces for plan in found if plan.landing} == {True, False}
    assert {plan.problem.groups > 1 for plan in found} == {plan.lined for plan in found} == {True, False}


# By their seed, so that tests share them: finding a plan takes longer than most tests of it.
PLANS = st.integers(0, 3 * EXAMPLES).map(functools.partial(random_plan, 1_000_000))


def each_plan(test):
    """Run a test on many plans."""
    return settings(max_examples=2 * EXAMPLES)(given(PLANS)(test))


# Strips and boxes


@each_plan
def test_strips_have_all_cells_and_none_is_empty(plan):
    assert (plan.strips - 1) * plan.strip_cells < plan.cells[1] <= plan.strips * plan.strip_cells
    assert plan.strips == 1 or plan.strip_cells % 2 == 0
    assert plan.pitch % 2 == 0 or plan.way == "lines"


@each_plan
def test_boxes_have_channels_of_one_group(plan):
    """Infinite inputs of another group would become NaN under weights of zero."""
    if plan.problem.groups > 1 and plan.way == "lines":
        assert plan.in_channels % implicit_gemm.input_map(plan).box[0] == 0


@pytest.mark.parametrize("itemsize", [2, 4])
def test_no_strip_is_empty_where_inputs_are_taken_together(itemsize):
    problem = Problem(4, 32, 32, 1, (64, 1276), (3, 3), (1, 1), (1, 1))
    found = plans_of(Plan(problem, "forward", itemsize, False, False))
    assert {plan.wide for plan in found if plan.strips > 1} >= {2}
    assert all((plan.strips - 1) * plan.strip_cells < plan.cells[1] for plan in found)


@pytest.mark.parametrize("split", [False, True], ids=["tf32", "split"])
@pytest.mark.parametrize(("stride", "height"), [((1, 1), 1024), ((2, 2), 512)])
def test_strips_share_no_sectors_where_planes_conflict(stride, height, split):
    kernel_size = tuple(2 + step for step in stride)
    problem = Problem(8, 64, 64, 1, (height, height), kernel_size, stride, (1, 1))
    plan = plan_of(Plan(problem, "forward", 4, split, False))
    assert plan.planes_conflict
    assert plan.strips > 1
    assert plan.strip_cells * plan.span[1] * 4 % 32 == 0
    assert not replace(plan, channels_last=True).planes_conflict
    smaller = replace(problem, input_size=(height - 8, height))
    assert not plan_of(Plan(smaller, "forward", 4, split, False)).planes_conflict


@pytest.mark.parametrize(
    ("itemsize", "split", "channels", "output", "kernel_size", "padding", "dilation"),
    [
        (4, True, (32, 3), (1024, 1024), (5, 7), (8, 12), (4, 4)),
        (2, False, (256, 16), (1024, 1024), (9, 7), (32, 3), (8, 1)),
        (4, True, (256, 64), (4096, 256), (3, 5), (16, 2), (16, 1)),
    ],
)
def test_narrow_strips_may_share_sectors(itemsize, split, channels, output, kernel_size, padding, dilation):
    size = tuple(
        length + 2 * pad - step * (taps - 1)
        for length, pad, step, taps in zip(output, padding, dilation, kernel_size, strict=True)
    )
    problem = Problem(2, *channels, 1, size, kernel_size, (1, 1), padding, dilation=dilation)
    assert problem.output_size == output
    assert plan_of(Plan(problem, "forward", itemsize, split, False)) is not None


# Stages


@each_plan
def test_stages_fit_shared_memory_and_have_no_bank_conflicts(plan):
    macros = implicit_gemm.macros_of(plan, torch.float32 if plan.itemsize == 4 else torch.float16)
    if plan.landing:
        assert macros["LANDING_STAGES"] >= 2
        assert macros["UNITS"] % macros["LANDING_UNITS"] == 0
    assert plan.patch * math.prod(plan.unit) <= plan.unit_pitch
    patch_stages, weight_stages = plan.stages
    assert patch_stages >= 2
    assert weight_stages >= (1 if plan.resident else 2)
    if plan.way != "lines":  # eight threads that store side by side have the units of some spots
        spots = range(8 // plan.units)
        assert {(unit * plan.unit_pitch + spot) % 8 for unit in range(plan.units) for spot in spots} == {*range(8)}


@each_plan
def test_blocks_take_every_tile_once_and_keep_their_set_where_weights_stay(plan):
    sets = plan.phase_sets * plan.channel_sets * plan.problem.groups
    period = plan.strip_rows * plan.pitch
    tiles, rest = divmod(plan.items, sets)
    assert rest == 0 <= tiles * plan.tile - plan.problem.batch * plan.strips * period < plan.tile
    assert (plan.strip_tiles - 1) * plan.tile < period <= plan.strip_tiles * plan.tile
    for multiprocessors in (1, 7, 132, 200):
        blocks = plan.blocks_of(plan.items, multiprocessors)
        assert 1 <= blocks <= plan.items
        assert plan.resident or not plan.turns
        if plan.turns:  # a warpgroup's turn ends only if all inputs of an item have a stage
            assert plan.stages[0] > plan.chunks
        if plan.resident:
            assert blocks % sets == 0
            assert plan.stages[1] >= max(plan.set_steps) * plan.chunks


@each_plan
def test_chunks_cover_the_channels_and_sums_fit_registers(plan):
    elements = plan.units * 16 // plan.itemsize
    assert (plan.chunks - 1) * elements < plan.in_channels <= plan.chunks * elements
    # ptxas declines an instruction with more sums where 512 threads leave 128 registers for each.
    assert plan.columns % 32 == 0 < plan.columns <= 192
    sums = plan.columns // 2
    assert plan.blocks * sums + (sums if plan.split else 0) <= 128


LARGE = {
    "many_phases": Problem(1, 8, 8, 1, (4, 4), (2, 2), (200, 200)),
    "wide_stride": Problem(1, 4, 4, 1, (1, 3), (1, 5), (1, 5000)),
    "tall_image": Problem(1, 1, 1, 1, (190_000_000, 8), (3, 3)),
    "less_tall_image": Problem(1, 1, 1, 1, (150_000_000, 8), (3, 3)),
}


@pytest.mark.parametrize("name", LARGE)
def test_tables_and_positions_of_what_is_not_declined_fit(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # asked as if on Hopper
    config = Config(LARGE[name], torch.float16, torch.device("cuda", 0))
    plan = tile_for(implicit_gemm, config, "forward")
    assert (plan is not None) == (name == "less_tall_image")
    if plan is not None:
        entries = sum(map(len, plan.steps)) + len(plan.phases) + 1 + len(plan.phases) * plan.slots
        assert entries * 4 <= CONSTANT_BYTES
        assert plan.span[1] <= implicit_gemm.macros_of(plan, config.dtype)["PHASE_BASE"]
        assert plan.phase_sets * plan.channel_sets <= 65_535  # blocks along y
        # What the kernel adds to find the strip of a position.
        last = (plan.items // plan.sets - 1) * plan.tile + plan.first + plan.patch - 1
        assert last + plan.strip_rows * plan.pitch <= implicit_gemm.last_position(plan) < 2**31


# The choice


@settings(max_examples=EXAMPLES // 2)  # each works out all plans of a problem twice
@given(PLANS)
def test_plan_of_is_one_of_the_plans_and_hardly_slower_than_the_fastest(plan):
    smallest = Plan(plan.problem, plan.direction, plan.itemsize, plan.split, plan.channels_last)
    found, every = plan_of(smallest), plans_of(smallest)
    assert found in every
    assert found.cycles <= 2 * min(other.cycles for other in every)


def test_plan_of_an_empty_batch_has_nothing_to_do():
    plan = plan_of(Plan(Problem(0, 8, 8, 1, (4, 4), (3, 3)), "forward", 4, False, False))
    assert plan.items == 0
    assert plan.blocks_of(0, 132) >= 1
    assert plan.cycles > 0


def test_inputs_land_only_where_the_kernel_adds_them_up_in_32_bits():
    problem = Problem(1, 1, 1, 1, (3, 178_956_969), (1, 41), (1, 4), (0, 17), (0, 1))
    assert 2**31 - 64 < math.prod(problem.output_size) < 2**31
    plan = plan_of(Plan(problem, "input_grad", 2, False, False))
    assert plan is not None
    assert not plan.landing


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 1000, 46_341, 2**30 + 1, 2**31 - 1])
def test_reciprocals_divide_all_integers(divisor):
    """As csrc/include/numeric/divide.cuh multiplies."""
    mask, number = 2**32 - 1, reciprocal(divisor)
    assert number < 2**64
    multiples = [k * divisor + i for k in (1, 2, (2**31 - 1) // divisor) for i in (-1, 0, 1)]
    for n in (0, 1, 2**30, 2**31 - 2, 2**31 - 1, *(n for n in multiples if 0 <= n < 2**31)):
        low = 2 * n * (number & mask)
        assert (2 * n * (number >> 32) + (low >> 32)) >> 32 == n // divisor
        assert 2 * n <= mask


def test_plan_of_declines_a_patch_that_fits_no_block():
    problem = Problem(1, 8, 8, 1, (8, 64), (2, 1), dilation=(8000, 1))
    assert plan_of(Plan(problem, "forward", 2, False, False)) is None


def test_weights_that_no_launch_lays_out_are_refused():
    config = Config(Problem(1, 10_000_000, 1, 1, (1, 1), (6, 6)), torch.float32, torch.device("cuda", 0))
    assert "2**31 threads" in fused.Fused().why_not(config)
    assert fused.Fused().why_not(replace(config, problem=replace(config.problem, in_channels=50_000))) is None
