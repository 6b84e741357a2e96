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


def random_problem(random, most_outputs):
    """A Problem: small strides more often, some with more output channels than an M block has rows."""
    while True:
        groups = random.choice((1, 1, 2, 3, 4))
        stride = (random.randint(1, 6), random.choice((1, 1, 2, 2, 3, 4, 5, 6)))
        dilation = (random.choice((1, 1, 2, 3, 5)), random.choice((1, 1, 2, 3, 4, 6)))
        output_padding = tuple(random.randrange(max(*steps)) for steps in zip(stride, dilation, strict=True))
        problem = Problem(
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
        elements = max(problem.out_channels * problem.out_pixels, problem.in_channels * problem.in_pixels)
        if min(problem.output_size) > 0 and problem.batch * elements < most_outputs:
            return problem


@functools.cache
def random_plan(most_outputs, seed):
    """Any plan that a problem may have, the rare ones as often as others."""
    random, found = Random(seed), []
    while not found:
        problem, precision = random_problem(random, most_outputs), random.choice(PRECISIONS)
        found = [*plans_of(problem, random.choice(DIRECTIONS), *precision, random.random() < 0.5)]
    for choice in (lambda plan: (plan.multiple, plan.slots, plan.blocks), lambda plan: plan.strips):
        value = random.choice(sorted(set(map(choice, found))))
        found = [plan for plan in found if choice(plan) == value]
    return random.choice(found)


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
def test_steps_are_for_a_phase_of_their_block(plan):
    assert all(products_of(plan))
    for steps in plan.steps:
        assert len(set(steps)) == len(steps)


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


@each_plan
def test_packed_weights_are_every_step_of_every_item_in_order(plan):
    """Those that weights/pack.cu writes for an item follow each other, as sm90/implicit_gemm.cu copies them."""
    begins = [sum(map(len, plan.steps[:block])) for block in range(0, len(plan.steps) + 1, plan.blocks)]
    every_step, copied = begins[-1], []
    for group, phase_set, channel_set in itertools.product(
        range(plan.problem.groups), range(plan.phase_sets), range(plan.channel_sets)
    ):
        first, steps = begins[phase_set], begins[phase_set + 1] - begins[phase_set]
        before = group * plan.channel_sets * every_step + first * plan.channel_sets + channel_set * steps
        written = [before * plan.chunks + chunk * steps + step for chunk in range(plan.chunks) for step in range(steps)]
        begin = before * plan.chunks
        assert written == [*range(begin, begin + steps * plan.chunks)]
        copied += written
    assert sorted(copied) == [*range(len(copied))]
    assert plan.packed_bytes == len(copied) * plan.weight_bytes


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


def landings(plan, tile):
    """Return what lands of a tile: the pixel of all images at each element of a channel, -1 for zeros.

    And where the inputs of the patch are looked for, by plane and position; as csrc/include/load/landing.cuh has it.
    """
    elements, (unit_h, unit_w), (height, width) = plan.element_units, plan.unit, plan.input_size
    run_pieces = plan.pieces // unit_h
    run, skipped = divmod(tile * plan.tile + plan.first + plan.strip_rows * plan.pitch, plan.run_pitch)
    assert run >= 0
    run -= 1 if plan.whole_images else plan.strip_rows

    def run_of(number, plane_row):
        if plan.whole_images:
            return (number if 0 <= number < plan.problem.batch else None), 0, 0, height * width
        strip, row = divmod(number, plan.strip_rows)
        image, across = divmod(strip, plan.strips)
        row = (row + plan.origin[0]) * unit_h + plane_row
        if not (0 <= image < plan.problem.batch and 0 <= row < height):
            return None, 0, 0, 0
        first = (across * plan.strip_cells + plan.origin[1]) * unit_w
        return image, row * width + first, row * width, row * width + width

    def landed(i, origin):
        before = i * plan.run_pitch - skipped
        piece = max(before, 0) * unit_w // elements + 2 * i
        return piece, (origin + max(-before, 0) * unit_w) // elements * elements

    content = np.full(plan.pieces * elements, -1)
    for piece in range(plan.pieces):
        plane_row, own = divmod(piece, run_pieces)
        i = ((own + 1) * elements + skipped * unit_w - 1) // (plan.run_pitch * unit_w + 2 * elements)
        image, origin, begin, end = run_of(run + i, plane_row)
        first, pixel = landed(i, origin)
        pixel += (own - first) * elements
        wanted = min(plan.run_pitch, skipped + plan.patch - i * plan.run_pitch) * unit_w
        last = min(end, origin + wanted)
        count = min(elements, last - pixel if plan.partial_pieces or pixel >= last else elements)
        if image is not None and count > 0 and pixel + elements > begin:
            assert pixel % elements == 0
            assert 0 <= pixel <= pixel + count <= height * width
            content[piece * elements : piece * elements + count] = image * height * width + pixel + np.arange(count)
    places = np.empty((unit_h * unit_w, plan.patch), int)
    for plane, position in np.ndindex(*places.shape):
        (plane_row, plane_column), (i, column) = divmod(plane, unit_w), divmod(skipped + position, plan.run_pitch)
        _, origin, _, _ = run_of(run + i, plane_row)
        piece, pixel = landed(i, origin)
        places[plane, position] = (
            (plane_row * run_pieces + piece) * elements + origin + column * unit_w + plane_column - pixel
        )
    return content, places


@functools.cache
def landing_plan(seed):
    """Any plan whose inputs land, of an image that is often wide enough to be cut into strips."""
    random, found = Random(seed), []
    while not found:
        problem = random_problem(random, 30_000)
        if random.random() < 0.7:
            size = (random.randint(1, 4), random.choice((64, 72, 100, 136, 200)))
            problem = replace(problem, input_size=size, batch=random.randint(1, 2))
        arguments = problem, random.choice(DIRECTIONS), *random.choice(PRECISIONS), False
        found = [*plans_of(*arguments)] if min(problem.output_size) > 0 else []
        found = [plan for plan in found if plan.landing and not plan.landing_box]
    strips = random.choice(sorted({plan.strips for plan in found}))
    return random.choice([plan for plan in found if plan.strips == strips])


def test_landing_plans_are_of_all_kinds():
    found = [landing_plan(seed) for seed in range(EXAMPLES)]
    for name in ("whole_images", "partial_pieces"):
        assert {getattr(plan, name) for plan in found} == {True, False}, name
    assert {plan.strips > 1 for plan in found} == {True, False}
    assert {plan.origin[1] < 0 for plan in found} == {True, False}


@settings(max_examples=EXAMPLES)
@given(st.integers(0, EXAMPLES - 1).map(landing_plan), st.data())
def test_what_lands_is_where_it_is_looked_for(plan, data):
    tile = data.draw(st.integers(0, plan.tiles - 1))
    content, places = landings(plan, tile)
    planes = np.arange(math.prod(plan.unit))[:, None]
    wanted = input_at(plan, tile * plan.tile + plan.first, planes * plan.patch + np.arange(plan.patch))
    assert (content[places] == wanted).all()
    if plan.unit[1] == 1:
        assert (places[:, :: plan.wide] % plan.wide == 0).all()
    elif plan.wide == 2:  # inputs of a cell
        assert (places[::2] % 2 == 0).all()


# Outputs


def warps_of(plan):
    """Return the (phase set, side, part of the output channels, number in its warpgroup) of all warps of a group."""
    parts = plan.channel_sets * (plan.warpgroups_m // plan.phase_sides)
    return itertools.product(range(plan.phase_sets), range(plan.phase_sides), range(parts), range(4))


def descriptor_k_major_swizzled(plan):
    """Return the runs that the rows of a group store for a cell: [row phase, column phase, channel, outputs of a cell].

    A run is of neighbours: columns of the output, or channels in channels_last.
    """
    inner = {PAIR_NONE: 1, PAIR_ROWS: 2, PAIR_BLOCKS: plan.blocks}[plan.pairing]
    assert plan.inner == inner
    found = []
    for (phase_set, side, part, warp), g, outer in itertools.product(
        warps_of(plan), range(8), range(plan.blocks * 2 // inner)
    ):
        blocks_and_halves = {
            PAIR_NONE: [divmod(outer, 2)],
            PAIR_BLOCKS: [(block, outer) for block in range(plan.blocks)],
            PAIR_ROWS: [(outer, 0), (outer, 1)],
        }[plan.pairing]
        outputs = [
            output_of_row(plan, block_of(plan, phase_set, block, side), part, warp * 16 + half * 8 + g)
            for block, half in blocks_and_halves
        ]
        if outputs[0] is None:
            assert set(outputs) == {None}
            continue
        ((row, column), channel), *others = (output for output in outputs if output is not None)
        for i, other in enumerate(others, 1):
            assert other == (((row, column), channel + i) if plan.channels_last else ((row, column + i), channel))
        found.append((row, column, channel, 1 + len(others)))
    return np.array(found).T


def channels_of_lines(plan):
    """Return the row phase and the channel of each line that warps with whole rows of cells turn round."""
    found = []
    for phase_set, side, part, warp in warps_of(plan):
        outputs = Counter(
            output_of_row(plan, block_of(plan, phase_set, block, side), part, row)
            for block, row in itertools.product(range(plan.blocks), range(warp * 16, warp * 16 + 16))
        )
        del outputs[None]
        channels = sorted({channel for _, channel in outputs})
        ((row_phase, _), _) = min(outputs) if outputs else ((0, 0), 0)
        phases = itertools.product(channels, range(plan.span[1]))
        assert outputs == {((row_phase, phase), channel): 1 for channel, phase in phases}
        assert len(channels) <= 16 // plan.slots
        found += [(row_phase, channel) for channel in channels]
    return np.array(found).T


def staged_runs_of(plan):
    """As runs_of, where a warp's outputs are turned round: a thread stores some of a line."""
    channels, pixels, vector = plan.out_channels * plan.problem.groups, math.prod(plan.output_size), plan.vector
    (height, width), (span_h, inner) = plan.output_size, plan.span
    if plan.lined:
        row_phase, channel = channels_of_lines(plan)
        width_of_line = inner * (16 // plan.blocks)
    else:
        assert inner == plan.inner
        row_phase, column_phase, channel, present = descriptor_k_major_swizzled(plan)
        assert (column_phase == 0).all()
        assert (present == inner).all()
        width_of_line = inner * plan.line_cells
    lines = plan.tiles * plan.tile * inner // width_of_line
    outputs = (np.arange(lines)[:, None] * width_of_line + np.arange(0, width_of_line, vector)).reshape(-1, 1)
    image, row, cell, _, there = cells_at(plan, outputs // inner)
    oh, ow = row * span_h + row_phase, cell * inner + outputs % inner
    stored = there & (oh < height) & (ow < width)
    place = (image * channels + channel) * pixels + oh * width + ow
    return place[stored], np.full(stored.sum(), vector), vector


def pixel_runs_of(plan):
    """As runs_of, where a warpgroup turns outputs round in channels_last: a thread stores channels of a pixel."""
    channels, pixels = plan.out_channels * plan.problem.groups, math.prod(plan.output_size)
    height, width = plan.output_size
    image, row, cell, _, there = cells_at(plan, np.arange(plan.tiles * plan.tile))
    image, row, cell = (values[there] for values in (image, row, cell))
    places = []
    for (phase_set, side, part, warp), block, piece in itertools.product(
        warps_of(plan), range(plan.blocks), range(0, 16, plan.vector)
    ):
        # As the thread has them that writes two channels at a time: rows g and g + 8.
        rows = [warp * 16 + half * 8 + g for g in range(8) for half in range(2)][piece : piece + plan.vector]
        outputs = [output_of_row(plan, block_of(plan, phase_set, block, side), part, row) for row in rows]
        if outputs[0] is None:
            assert set(outputs) == {None}
            continue
        (row_phase, column_phase), channel = outputs[0]
        assert outputs == [(outputs[0][0], channel + i) for i in range(plan.vector)]
        oh, ow = row * plan.span[0] + row_phase, cell * plan.span[1] + column_phase
        stored = (oh < height) & (ow < width)
        places.append(((image * pixels + oh * width + ow) * channels + channel)[stored])
    places = np.concatenate(places)
    return places, np.full(len(places), plan.vector), plan.vector


def runs_of(plan):
    """Return where in the output the runs begin that the kernel stores for the first group, and the outputs of each.

    Also the outputs of a whole run.
    """
    if plan.staged:
        return pixel_runs_of(plan) if plan.channels_last else staged_runs_of(plan)
    channels, pixels = plan.out_channels * plan.problem.groups, math.prod(plan.output_size)
    (height, width), (span_h, span_w) = plan.output_size, plan.span
    row_phase, column_phase, channel, present = descriptor_k_major_swizzled(plan)
    in_row = 2 if plan.pitch % 2 == 0 else 1  # of a thread's two cells
    image, row, cell, _, there = cells_at(plan, np.arange(0, plan.tiles * plan.tile, in_row))
    image, row, cell = (values[there][:, None] for values in (image, row, cell))
    places, counts = [], []
    for cell_of_run in range(in_row):
        oh, ow = row * span_h + row_phase, (cell + cell_of_run) * span_w + column_phase
        count = np.where(ow < width, present, 0) if plan.channels_last else np.minimum(present, width - ow)
        stored = (oh < height) & (count > 0)
        pixel = oh * width + ow
        if plan.channels_last:
            place = (image * pixels + pixel) * channels + channel
        else:
            place = (image * channels + channel) * pixels + pixel
        places.append(place[stored])
        counts.append(count[stored])
    return np.concatenate(places), np.concatenate(counts), 1 if plan.pairing == PAIR_NONE else 2


@each_plan
def test_outputs_are_written_once_each(plan):
    batch, channels, pixels = plan.problem.batch, plan.out_channels * plan.problem.groups, math.prod(plan.output_size)
    places, counts, run = runs_of(plan)
    written = np.concatenate([places[counts > i] + i for i in range(run)])
    assert len(written) == batch * plan.out_channels * pixels
    found = np.bincount(written, minlength=batch * channels * pixels)
    assert found.max() == 1
    # Those of the first group, which those of the others follow.
    stride, period = (1, channels) if plan.channels_last else (pixels, channels * pixels)
    assert (written % period < plan.out_channels * stride).all()


@each_plan
def test_runs_of_outputs_are_aligned(plan):
    places, counts, run = runs_of(plan)
    vector = min(plan.vector, run)
    assert run % vector == 0
    assert VECTOR_BYTES % (vector * plan.itemsize) == 0
    assert (places[counts == run] % vector == 0).all()
    behind = (plan.problem.groups - 1) * plan.out_channels * (1 if plan.channels_last else math.prod(plan.output_size))
    assert behind % vector == 0


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


# Boxes of tensor maps


@functools.cache
def box_plan(seed):
    """Any plan whose inputs come, or land, as boxes."""
    random, found = Random(seed), []
    while not found:
        groups, stride = random.choice((1, 1, 2)), (random.randint(1, 3), random.randint(1, 4))
        shifted = random.random() < 0.6
        problem = Problem(
            batch=random.randint(1, 5),
            in_channels=groups * random.choice((8, 20, 32, 64, 72, 128)),
            out_channels=groups * random.choice((1, 8, 20, 64, 130)),
            groups=groups,
            input_size=(
                random.choice((1, 2, 4, 7, 8, 15, 16, 31, 62)),
                random.choice((2, 4, 7, 8, 14, 16, 24, 64, 72, 200)),
            ),
            kernel_size=tuple(random.randint(1, step + 2 * shifted) for step in stride),
            stride=stride,
            padding=(random.randint(0, shifted), random.randint(0, 2 * shifted)),
        )
        if min(problem.output_size) < 1:
            continue
        kinds = [(itemsize, split, last) for itemsize, split in PRECISIONS for last in (False, True)]
        plans = plans_of(problem, random.choice(DIRECTIONS[: 1 + shifted]), *random.choice(kinds))
        found = [plan for plan in plans if plan.way == "lines" or plan.landing_box]

    def kind(plan):
        images = plan.way == "lines" and plan.line_box[0] > 1
        return plan.way, images, plan.box_size[0] > 1, plan.strips > 1

    wanted = random.choice(sorted(set(map(kind, found))))
    return random.choice([plan for plan in found if kind(plan) == wanted])


def test_box_plans_are_of_all_kinds():
    found = [box_plan(seed) for seed in range(EXAMPLES)]
    assert {plan.way for plan in found} == {"lines", "landing"}
    for of_kind in ([plan for plan in found if plan.landing], [plan for plan in found if plan.way == "lines"]):
        assert {plan.box_size[0] > 1 for plan in of_kind} == {True, False}
        assert {plan.strips > 1 for plan in of_kind} == {True, False}
    assert {plan.unit > (1, 1) for plan in found if plan.way == "lines"} == {True, False}
    assert {plan.line_box[0] > 1 for plan in found if plan.way == "lines"} == {True, False}
    assert {plan.whole_images for plan in found if plan.way == "lines"} == {True, False}
    assert {plan.problem.groups > 1 for plan in found} == {True, False}


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_boxes_are_what_a_tensor_map_takes(seed):
    plan = box_plan(seed)
    spec = implicit_gemm.input_map(plan)
    itemsize, box, steps = spec.itemsize, spec.box, spec.steps
    assert all(stride % 16 == 0 < stride for stride in spec.strides)
    assert min(box) > 0
    assert max(np.multiply(box, steps)) <= 256
    assert steps[0] == 1 <= max(steps) <= 8
    assert box[0] * itemsize % 16 == 0
    inputs = plan.problem.batch * plan.in_channels * plan.problem.groups * math.prod(plan.input_size)
    assert math.prod(spec.sizes) == inputs
    assert spec.swizzled == (plan.way == "lines")
    assert not spec.swizzled or box[0] * itemsize in (64, 128)
    # What the kernel tells its barriers to expect of a patch, or of a landing.
    macros = implicit_gemm.macros_of(plan, torch.float32 if itemsize == 4 else torch.float16)
    boxes = plan.boxes * math.prod(plan.unit) if plan.way == "lines" else 1
    positions = math.prod(plan.line_box) if plan.way == "lines" else math.prod(plan.box_size)
    if plan.way == "lines":
        assert boxes <= 32
        assert boxes * positions <= plan.unit_pitch
        units = macros["UNITS"] * boxes * positions
    else:
        units = macros["LANDING_UNITS"] * positions
    assert boxes * math.prod(box) * itemsize == 16 * units
    if plan.problem.groups > 1:  # nothing of the next group
        channels = box[0] if plan.way == "lines" else box[2]
        assert plan.in_channels % channels == 0


def lines_of_tile(plan, tile):
    """Return the pixels of all images that come as lines for a tile, -1 for zeros, from the patch's first on, by plane.

    As csrc/include/load/tma_nhwc.cuh has it.
    """
    (height, width), (unit_h, unit_w), (images, rows, columns) = plan.input_size, plan.unit, plan.line_box
    found, in_box, period = [], images * rows * columns, plan.strip_rows * plan.pitch
    before = 0 if plan.flat else images * period
    first, skipped = divmod(tile * plan.tile + plan.first + before, in_box)
    assert first >= 0
    for plane, number in itertools.product(range(unit_h * unit_w), range(first, first + plan.boxes)):
        image, row, column = (number - 1) * images, *plan.origin
        if images > 1:
            assert plan.strips == 1
        elif plan.flat:
            assert skipped == 0
            image, column = 0, number * columns
        else:
            assert period % in_box == 0
            strip, own = divmod(number, period // in_box)
            image, across = divmod(strip - 1, plan.strips)
            row += 0 if plan.whole_images else own * rows
            column += own * columns if plan.whole_images else across * plan.strip_cells
        corner = image, row * unit_h + plane // unit_w, column * unit_w + plane % unit_w
        size = (height * width, 1) if plan.whole_images else (width, height)
        if plan.flat:
            size = (plan.problem.batch * height * width, 1)
        image, row, column = (
            begin + step * np.arange(count).reshape([-1 if i == axis else 1 for i in range(3)])
            for axis, (begin, step, count) in enumerate(zip(corner, (1, unit_h, unit_w), plan.line_box, strict=True))
        )
        there = (image >= 0) & (image < plan.problem.batch) & (row >= 0) & (row < size[1])
        there = there & (column >= 0) & (column < size[0])
        found.append(np.where(there, image * (height * width) + row * size[0] + column, -1).reshape(-1))
    lines = np.reshape(found, (unit_h * unit_w, plan.plane_pitch))[:, skipped:]
    assert lines.shape[1] >= plan.patch
    return lines[:, : plan.patch]


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_boxes_hold_the_inputs_of_a_tile(seed):
    plan = box_plan(seed)
    (height, width), period, (rows, columns) = plan.input_size, plan.strip_rows * plan.pitch, plan.box_size
    if plan.way == "lines":
        for tile in range(plan.tiles):
            places = np.arange(math.prod(plan.unit))[:, None] * plan.plane_pitch + np.arange(plan.patch)
            assert (lines_of_tile(plan, tile) == input_at(plan, tile * plan.tile + plan.first, places)).all()
        return
    if rows == 1:  # stretches of images
        assert period == height * width
        assert plan.tile % columns == 0
        for first in range(0, plan.tiles * plan.tile, columns):
            assert first % period * plan.itemsize % 16 == 0
            assert first // period == (first + columns - 1) // period  # all of it is of one image, or of none
        return
    assert period % plan.tile == 0  # each tile is of one strip
    for tile in range(plan.tiles):
        # As csrc/include/load/landing.cuh has it.
        strip, number = divmod(tile, period // plan.tile)
        image, across = divmod(strip, plan.strips)
        row, skipped = divmod(number * plan.tile + plan.first, plan.pitch)
        column = across * plan.strip_cells + plan.origin[1]
        skew = column % plan.element_units
        ih = row + plan.origin[0] + np.arange(rows)[:, None]
        iw = column - skew + np.arange(columns)
        there = (image < plan.problem.batch) & (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
        box = np.where(there, (image * height + ih) * width + iw, -1)
        down, along = np.divmod(skipped + np.arange(plan.patch), plan.pitch)
        found, wanted = box[down, along + skew], input_at(plan, tile * plan.tile + plan.first, np.arange(plan.patch))
        assert (found[wanted < 0] < 0).all()
        cells = np.flatnonzero(cells_at(plan, tile * plan.tile + np.arange(plan.tile))[-1])
        for shift in set().union(*plan.steps):
            assert (found[cells + plan.offset(shift)] == wanted[cells + plan.offset(shift)]).all()
        assert ((down * columns + along + skew)[:: plan.wide] % plan.wide == 0).all()  # taken together


# Stages


@each_plan
def test_stages_fit_shared_memory(plan):
    macros = implicit_gemm.macros_of(plan, torch.float32 if plan.itemsize == 4 else torch.float16)
    planes, parts = macros["UNIT_H"] * macros["UNIT_W"], 1 + macros["SPLIT"]
    patch_units = parts * macros["UNITS"] * plan.unit_pitch
    weight_units = parts * macros["UNITS"] * macros["WARPGROUPS_M"] * 64
    patch_stages, weight_stages = plan.stages
    stages = patch_stages * patch_units + weight_stages * weight_units
    barriers = 2 * (patch_stages + weight_stages)
    places, outputs = 2 * (plan.patch * planes // macros["WIDE"]), 0
    if macros["STAGED"] and plan.channels_last:
        outputs = 2 * 2 * 64 // plan.itemsize * (64 + 16 // plan.itemsize)  # two parts of either warpgroup
    elif plan.lined:
        pad = max(4, macros["SLOTS"])
        outputs = 8 * (16 // macros["SLOTS"]) * (16 // macros["BLOCKS"] * macros["SPAN_W"] + pad)
    elif macros["STAGED"]:
        inner = {PAIR_NONE: 1, PAIR_ROWS: 2, PAIR_BLOCKS: macros["BLOCKS"]}[macros["PAIRING"]]
        line = inner * macros["LINE_CELLS"] + (16 if inner == 2 else 8)
        outputs = 8 * (macros["BLOCKS"] * 2 // inner * 8) * line
    landed = math.prod(plan.box_size) * plan.itemsize // 16 if plan.landing_box else plan.pieces  # of a channel
    landing = macros["LANDING_STAGES"] * macros["LANDING_UNITS"] * (16 // plan.itemsize) * landed
    if plan.rounded:
        barriers += patch_stages
    if plan.landing_box:  # has a barrier for each stage, and begins at a multiple of 128 bytes
        barriers += macros["LANDING_STAGES"] + 112 // 8
        assert landing * 16 % (128 * macros["LANDING_STAGES"]) == 0
    place_bytes = {"lines": 0, "landing": 4, "loaded": 8}[plan.way]
    needed = (stages + landing) * 16 + outputs * plan.itemsize + barriers * 8 + places * place_bytes
    assert needed == plan.shared_bytes <= SHARED_BYTES
    assert SHARED_BYTES == 227 << 10  # of a block of sm_90
    if plan.landing:
        assert macros["LANDING_STAGES"] >= 2
        assert macros["UNITS"] % macros["LANDING_UNITS"] == 0
    assert plan.patch * planes <= plan.unit_pitch
    assert patch_stages >= 2
    assert weight_stages >= (1 if plan.resident else 2)
    if plan.way == "lines":
        assert patch_units * 16 % (128 * plan.units) == 0
        return
    # Eight threads that store side by side have the units of some spots.
    spots = range(8 // plan.units)
    assert {(unit * plan.unit_pitch + spot) % 8 for unit in range(plan.units) for spot in spots} == {*range(8)}


def tile_of(order, strips, period, tile):
    """Return the tile that comes in an order, where strips have so many positions (pipeline/implicit_gemm.cuh)."""
    strip_tiles = -(-period // tile)
    first_strip = order * tile // (strips * period) * strips
    first = -(-first_strip * period // tile)
    down, across = divmod(order - first, strips)
    before, bottom = (first + across) * tile - first_strip * period, period - (strip_tiles - 1) * tile
    strip = first_strip + (across if down < strip_tiles - 1 else before // bottom)
    return -(-strip * period // tile) + down


@settings(max_examples=4 * EXAMPLES)
@given(st.integers(1, 7), st.integers(1, 12), st.integers(1, 900), st.integers(1, 300))
def test_tiles_go_through_the_strips_of_an_image_then_down(batch, strips, period, tile):
    count = -(-batch * strips * period // tile)
    tiles = [tile_of(order, strips, period, tile) for order in range(count)]
    assert sorted(tiles) == [*range(count)]
    begins = [divmod(one * tile, period) for one in tiles]  # strip, and position in it
    places = [(strip // strips, position // tile, strip) for strip, position in begins]
    assert places == sorted(places)
    if strips == 1 or period <= tile:
        assert tiles == sorted(tiles)


@each_plan
def test_blocks_take_every_tile_once_and_keep_their_set_where_weights_stay(plan):
    sets = plan.phase_sets * plan.channel_sets * plan.problem.groups
    period = plan.strip_rows * plan.pitch
    assert plan.items == plan.tiles * sets
    assert sorted(tile_of(order, plan.strips, period, plan.tile) for order in range(plan.tiles)) == [*range(plan.tiles)]
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
