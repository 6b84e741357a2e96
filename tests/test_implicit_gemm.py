"""The plans of csrc/sm90/implicit_gemm.cu leave out no product, and what they promise of places holds. No kernel runs.

What the kernels work out from a plan (rows, taps, places of inputs, runs of outputs) is written here again.
"""

import functools
import itertools
import math
from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import SUITES
from gemmconv import Problem
from gemmconv.algorithms import fused
from gemmconv.kernels.base import Config
from gemmconv.kernels.program import reciprocal
from gemmconv.kernels.sm90 import implicit_gemm
from gemmconv.kernels.sm90.implicit_gemm_choice import plan_of, plans_of
from gemmconv.kernels.sm90.implicit_gemm_plan import (
    PAIR_BLOCKS,
    PAIR_NONE,
    PAIR_ROWS,
    SHARED_BYTES,
)
from gemmconv.kernels.weights.pack import ROWS_CHANNELS, ROWS_LINES, ROWS_PLAIN, ROWS_SLOTS
from tests.samples import tile_for
from tests.test_geometry import scattered

VECTOR_BYTES = 16  # the most that a thread stores at once
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
    (boxed_problem, lambda plan: plan.way == "lines" or plan.landing_box),
    (wide_problem, lambda plan: plan.lined or (plan.landing and not plan.landing_box)),
)


def way_of(plan):
    """How a plan's inputs come, and how its outputs go."""
    images = plan.way == "lines" and plan.line_box[0] > 1
    boxes = (plan.way == "lines" or plan.landing_box) and plan.box_size[0]
    return plan.way, images, min(boxes, 2), plan.whole_images, plan.lined, plan.staged


@functools.cache
def random_plan(most_outputs, seed):
    """Any plan that a problem may have, the rare ones as often as others."""
    random, found = Random(seed), []
    make, suits = KINDS[seed % len(KINDS)]
    while not found:
        problem, precision = make(random), random.choice(PRECISIONS)
        elements = max(problem.out_channels * problem.out_pixels, problem.in_channels * problem.in_pixels)
        if min(problem.output_size) > 0 and problem.batch * elements < most_outputs:
            plans = plans_of(problem, random.choice(DIRECTIONS), *precision, random.random() < 0.5)
            found = [plan for plan in plans if suits(plan)]
    for choice in (way_of, lambda plan: (plan.multiple, plan.slots, plan.blocks), lambda plan: plan.strips):
        value = random.choice(sorted(set(map(choice, found))))
        found = [plan for plan in found if choice(plan) == value]
    return random.choice(found)


def test_random_plans_are_of_every_kind():
    found = [random_plan(30_000, seed) for seed in range(EXAMPLES)]
    assert {way_of(plan)[:3] for plan in found} >= {
        *(("loaded", False, 0), ("landing", False, 0), ("landing", False, 1)),
        *(("lines", images, rows) for images in (False, True) for rows in (1, 2)),
    }
    for way in ("landing", "lines"):
        own = [plan for plan in found if plan.way == way]
        for kind in (lambda plan: plan.strips > 1, lambda plan: plan.whole_images, lambda plan: plan.unit > (1, 1)):
            assert {kind(plan) for plan in own} == {True, False}, way
    assert {plan.partial_pieces for plan in found if plan.landing} == {True, False}
    assert {plan.problem.groups > 1 for plan in found} == {plan.lined for plan in found} == {True, False}


def plans(most_outputs=1_000_000):
    """Plans by their seed, so that tests share them: finding a plan takes longer than most tests of it."""
    return st.integers(0, 3 * EXAMPLES).map(functools.partial(random_plan, most_outputs))


def each_plan(test):
    """Run a test on many plans."""
    return settings(max_examples=2 * EXAMPLES)(given(plans())(test))


# Phases and output channels: the left sides.


def place_of_row(plan, row):
    """Return the (slot, channel) of a row of an M block, as csrc/include/geometry/rows.cuh has it."""
    pair, half = row // 16 * 8 + row % 8, row // 8 % 2
    if plan.row_order == ROWS_SLOTS:
        return pair // plan.channels * 2 + half, pair % plan.channels
    if plan.row_order == ROWS_CHANNELS:
        return pair // (plan.channels // 2), pair % (plan.channels // 2) * 2 + half
    if plan.row_order == ROWS_LINES:
        channel, slot = divmod(pair * 2 + half, plan.slots)
        return slot, channel
    return divmod(row, plan.channels)


def block_of(plan, phase_set, block, side):
    """Return which M block is a warpgroup's, as csrc/include/pipeline/implicit_gemm.cuh has it."""
    return (phase_set * plan.phase_sides + side) * plan.blocks + block


def output_of_row(plan, block, part, row):
    """Return the (phase, channel) of a row of an M block, of a part of the output channels; None where it is idle."""
    slot, channel = place_of_row(plan, row)
    phase = plan.phases[block][slot] if slot < plan.slots else None
    channel += part * plan.channels
    return None if phase is None or channel >= plan.out_channels else (phase, channel)


def tap_of(plan, axis, output, shift):
    """Return the tap that reaches an output of a cell with a shift, or None, as the algebra has it."""
    problem = plan.problem
    near, far = (output, shift) if plan.direction == "forward" else (shift, output)
    reach = near + problem.padding[axis] - far * problem.stride[axis]
    tap, rest = divmod(reach, problem.dilation[axis])
    return tap if reach >= 0 and rest == 0 and tap < problem.kernel_size[axis] else None


def gathered(plan, axis):
    """Return the (output, tap, input) of an axis: what the layer scatters, or gathers back."""
    triples = scattered(plan.problem, axis)
    return triples if plan.direction == "forward" else [(position, tap, output) for output, tap, position in triples]


def products_of(plan):
    """Return for each step of each M block the (phase, shift, tap) with a weight."""
    found = []
    for place, steps in enumerate(plan.steps):
        for side, shift in itertools.product(range(plan.phase_sides), steps):
            phases = plan.phases[block_of(plan, *divmod(place, plan.blocks), side)]
            taps = {
                phase: tuple(tap_of(plan, axis, phase[axis], shift[axis]) for axis in (0, 1))
                for phase in phases
                if phase is not None
            }
            for phase, tap in zip(phases, steps[shift][side * plan.slots :], strict=False):
                own = taps.get(phase, (None, None))
                assert tap == (-1 if None in own else own[0] * plan.problem.kernel_size[1] + own[1])
            found.append([(phase, shift, tap) for phase, tap in taps.items() if None not in tap])
    return found


@each_plan
def test_steps_have_every_tap_of_every_phase_once(plan):
    found = Counter(itertools.chain(*products_of(plan)))
    assert set(found.values()) == {1}
    # An axis: each tap reaches one of S outputs that follow each other, and a cell has S for each of its inputs. In an
    # input gradient every tap reaches every output.
    assert len(found) == plan.problem.taps * math.prod(plan.multiple)
    rows, columns = (
        {(output % span, position - output // span * unit, tap) for output, tap, position in gathered(plan, axis)}
        for axis, (span, unit) in enumerate(zip(plan.span, plan.unit, strict=True))
    )
    for row, column in itertools.product(rows, columns):
        assert tuple(zip(row, column, strict=True)) in found


@each_plan
def test_rows_of_m_blocks_are_every_phase_and_output_channel_once(plan):
    rows = [place_of_row(plan, row) for row in range(64)]
    assert len(set(rows)) == 64
    assert set(rows) >= {*itertools.product(range(plan.slots), range(plan.channels))}
    assert {channel for _, channel in rows} == {*range(plan.channels)}
    assert plan.phase_sets * plan.phase_sides * plan.blocks == len(plan.phases)
    assert plan.warpgroups_m % plan.phase_sides == 0
    parts = range(plan.channel_sets * (plan.warpgroups_m // plan.phase_sides))
    found = Counter(
        output_of_row(plan, block, part, row)
        for block, part, row in itertools.product(range(len(plan.phases)), parts, range(64))
    )
    found.pop(None, None)
    phases = itertools.product(*map(range, plan.span))
    assert found == Counter(itertools.product(phases, range(plan.out_channels)))


# Strips and positions: the right sides.


def cells_at(plan, positions):
    """Return image, row, column in the image and in its strip of the cells at positions, and which are cells."""
    place, column = np.divmod(positions, plan.pitch)
    strip, row = np.divmod(place, plan.strip_rows)
    image, strip = np.divmod(strip, plan.strips)
    there = (row < plan.cells[0]) & (column < plan.strip_cells) & (image < plan.problem.batch)
    return image, row, strip * plan.strip_cells + column, column, there


def input_at(plan, first, offsets):
    """Return the pixels of all images at offsets into the patch whose positions begin with `first`; -1 for zeros.

    `plan.wide` inputs are loaded together, beside each other in memory: the first decides whether they are there.
    """
    (height, width), (unit_h, unit_w), (origin_h, origin_w) = plan.input_size, plan.unit, plan.origin
    plane, position = np.divmod(offsets, plan.plane_pitch)
    if unit_w == 2:
        plane, behind = plane // plan.wide * plan.wide, plane % plan.wide
    else:
        position, behind = position // plan.wide * plan.wide, position % plan.wide
    position += first
    period = plan.strip_rows * plan.pitch
    assert (position + period >= 0).all()  # a quotient that C++ would round towards zero
    strip = (position + period) // period - 1
    rest = position - strip * period
    image = strip // plan.strips
    ih = (rest // plan.pitch + origin_h) * unit_h + plane // unit_w
    column = rest % plan.pitch + strip % plan.strips * plan.strip_cells + origin_w
    iw = column * unit_w + plane % unit_w
    there = (strip >= 0) & (image < plan.problem.batch) & (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
    pixel = (image * height + ih) * width + iw
    assert (pixel[there] % plan.wide == 0).all()  # aligned
    return np.where(there, pixel + behind, -1)


@each_plan
def test_cells_are_at_one_position_each(plan):
    image, row, cell, _, there = cells_at(plan, np.arange(plan.tiles * plan.tile))
    there &= cell < plan.cells[1]
    places = (image[there] * plan.cells[0] + row[there]) * plan.cells[1] + cell[there]
    assert sorted(places) == [*range(plan.problem.batch * math.prod(plan.cells))]
    assert plan.pitch % 2 == 0 or plan.way == "lines"
    assert plan.strips == 1 or plan.strip_cells % 2 == 0


@each_plan
def test_cells_find_their_inputs_at_every_shift(plan):
    """`offset` away from a cell is the input that the shift means: of its image, or zero where there is none."""
    (height, width), (unit_h, unit_w) = plan.input_size, plan.unit
    positions = np.arange(plan.tiles * plan.tile)
    image, row, cell, _, there = cells_at(plan, positions)
    positions, image, row, cell = (values[there & (cell < plan.cells[1])] for values in (positions, image, row, cell))
    tile, place = np.divmod(positions, plan.tile)
    for shift in set().union(*plan.steps):
        ih, iw = row * unit_h + shift[0], cell * unit_w + shift[1]
        inside = (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
        wanted = np.where(inside, (image * height + ih) * width + iw, -1)
        found = input_at(plan, tile * plan.tile + plan.first, plan.offset(shift) + place)
        assert (found == wanted).all()


@each_plan
def test_patches_hold_the_inputs_of_all_positions_of_a_tile(plan):
    """Also of those without outputs: what they read is in the plane of the shift."""
    for shift in set().union(*plan.steps):
        plane = shift[0] % plan.unit[0] * plan.unit[1] + shift[1] % plan.unit[1]
        first = plan.offset(shift) - plane * plan.plane_pitch
        assert first >= 0
        assert first + plan.tile - 1 < plan.patch


@each_plan
def test_strips_have_all_cells_and_none_is_empty(plan):
    assert (plan.strips - 1) * plan.strip_cells < plan.cells[1] <= plan.strips * plan.strip_cells


@pytest.mark.parametrize("itemsize", [2, 4])
def test_no_strip_is_empty_where_inputs_are_taken_together(itemsize):
    found = [*plans_of(Problem(4, 32, 32, 1, (64, 1276), (3, 3), (1, 1), (1, 1)), "forward", itemsize, False, False)]
    assert {plan.wide for plan in found if plan.strips > 1} >= {2}
    assert all((plan.strips - 1) * plan.strip_cells < plan.cells[1] for plan in found)


@pytest.mark.parametrize("split", [False, True], ids=["tf32", "split"])
@pytest.mark.parametrize(("stride", "height"), [((1, 1), 1024), ((2, 2), 512)])
def test_strips_share_no_sectors_where_planes_conflict(stride, height, split):
    kernel_size = tuple(2 + step for step in stride)
    problem = Problem(8, 64, 64, 1, (height, height), kernel_size, stride, (1, 1))
    plan = plan_of(problem, "forward", 4, split, False)
    assert plan.planes_conflict
    assert plan.strips > 1
    assert plan.strip_cells * plan.span[1] * 4 % 32 == 0
    assert not replace(plan, channels_last=True).planes_conflict
    smaller = replace(problem, input_size=(height - 8, height))
    assert not plan_of(smaller, "forward", 4, split, False).planes_conflict


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
    assert plan_of(problem, "forward", itemsize, split, False) is not None


# Stages


@each_plan
def test_stages_fit_shared_memory_and_have_no_bank_conflicts(plan):
    macros = implicit_gemm.macros_of(plan, torch.float32 if plan.itemsize == 4 else torch.float16)
    assert plan.shared_bytes <= SHARED_BYTES == 227 << 10  # of a block of sm_90
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
    assert plan.items == plan.tiles * sets
    assert plan.in_order == (plan.strips == 1 or period <= plan.tile)
    assert 0 < plan.bottom <= plan.tile
    assert (period - plan.bottom) % plan.tile == 0
    for multiprocessors in (1, 7, 132, 200):
        blocks = plan.blocks_on(multiprocessors)
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
        last_position = (plan.tiles - 1) * plan.tile + plan.first + plan.patch - 1
        assert last_position + plan.strip_rows * plan.pitch <= plan.last_position < 2**31


# The choice


@settings(max_examples=EXAMPLES // 2)  # each works out all plans of a problem twice
@given(plans())
def test_plan_of_is_one_of_the_plans_and_hardly_slower_than_the_fastest(plan):
    arguments = (plan.problem, plan.direction, plan.itemsize, plan.split, plan.channels_last)
    found, every = plan_of(*arguments), list(plans_of(*arguments))
    assert found in every
    assert found.cycles <= 2 * min(other.cycles for other in every)


def test_plan_of_an_empty_batch_has_nothing_to_do():
    plan = plan_of(Problem(0, 8, 8, 1, (4, 4), (3, 3)), "forward", 4, False, False)
    assert plan.items == 0
    assert plan.blocks_on(132) >= 1
    assert plan.cycles > 0


def test_inputs_land_only_where_the_kernel_adds_them_up_in_32_bits():
    problem = Problem(1, 1, 1, 1, (3, 178_956_969), (1, 41), (1, 4), (0, 17), (0, 1))
    assert 2**31 - 64 < math.prod(problem.output_size) < 2**31
    plan = plan_of(problem, "input_grad", 2, False, False)
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
    assert plan_of(problem, "forward", 2, False, False) is None


LAYERS = {workload.name: workload.problem for suite in SUITES.values() for workload in suite}


@pytest.mark.parametrize("split", [False, True], ids=["tf32", "split"])
@pytest.mark.parametrize("name", ["kb57", "kb71", "sam2", "unet4"])
def test_plans_of_real_layers_leave_no_row_idle_and_join_columns(name, split):
    plan = plan_of(LAYERS[name], "forward", 4, split, False)
    assert plan.slots * plan.channels == 64
    assert plan.slots == (2 if name in ("kb71", "sam2") else 1)
    assert plan.unit == ((1, 2) if name == "kb71" else (1, 1))
    assert plan.staged
    assert plan.vector >= 2
    assert plan.pairing == {"kb57": PAIR_NONE, "unet4": PAIR_BLOCKS}.get(name, PAIR_ROWS)
    assert plan.row_order == (ROWS_SLOTS if plan.pairing == PAIR_ROWS else ROWS_PLAIN)
    assert (plan.strips > 1) == name.startswith("kb")  # rows of more than a thousand cells that taps of three rows read


@pytest.mark.parametrize("name", ["kb57", "kb71", "sam2", "unet4"])
def test_plans_in_channels_last_have_pairs_of_channels(name):
    for itemsize, vector in ((2, 8), (4, 4)):
        plan = plan_of(LAYERS[name], "forward", itemsize, False, True)
        assert (plan.pairing, plan.row_order, plan.vector) == (PAIR_ROWS, ROWS_CHANNELS, vector)
        assert plan.staged
        assert plan.way == "lines"


def test_weights_that_no_launch_lays_out_are_refused():
    config = Config(Problem(1, 10_000_000, 1, 1, (1, 1), (6, 6)), torch.float32, torch.device("cuda", 0))
    assert "2**31 threads" in fused.Fused().why_not(config)
    assert fused.Fused().why_not(replace(config, problem=replace(config.problem, in_channels=50_000))) is None
