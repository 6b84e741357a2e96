"""The tiles of direct/forward_mma.cu leave out no product, and what they promise of addresses holds. No kernel runs."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmconv import Problem
from gemmconv.kernels.direct.forward_mma import tile_of, tiles_of
from gemmconv.kernels.phases import phase_shifts
from tests.cases import CASES, TILED_CASES
from tests.examples import any_of, each_of
from tests.samples import problem_of
from tests.test_geometry import problems, scattered

VECTOR_BYTES = 16  # the most that a thread loads or stores at once


@st.composite
def wide_problems(draw):
    """A Problem with more channels and columns than those of the geometry, and at least one image."""
    problem = draw(problems())
    channels = st.sampled_from((1, 2, 3, 4, 8, 11, 16, 20, 24, 33, 40))
    height, width = problem.input_size
    return replace(
        problem,
        batch=draw(st.integers(1, 3)),
        in_channels=problem.groups * draw(channels),
        out_channels=problem.groups * draw(channels),
        input_size=(height, draw(st.sampled_from((width, 12, 16, 19, 40)))),
    )


@st.composite
def tiles(draw):
    """Any tile that a problem may have."""
    return any_of(draw, tiles_of(draw(wide_problems()), draw(st.sampled_from((2, 4))), draw(st.booleans())))


each_tile = each_of(tiles())


def rows_of(tile):
    """The (line, column phase) of each row of each M tile, as the kernel finds them."""
    stride, found = tile.problem.stride[1], [[] for _ in range(len(tile.m_tile_lines))]
    for slot in range(2 * len(tile.m_tile_lines)):
        if tile.channels % 16 == 0:
            block, column_phase = slot // 2 // stride * 2 + slot % 2, slot // 2 % stride
        else:
            block, column_phase = divmod(slot, stride)
        found[slot // 2] += [(line, column_phase) for line in range(8 * block, min(8 * block + 8, tile.lines))]
    return found


@given(problems(), st.sampled_from([0, 1]))
def test_phase_shifts_are_those_of_the_scatter_relation(problem, axis):
    stride, shifts = problem.stride[axis], phase_shifts(problem, axis)
    assert len(shifts) == stride
    for output, _, position in scattered(problem, axis):
        assert position - output // stride in shifts[output % stride]
    # Each tap belongs to one phase, where its shift is its own.
    assert sum(map(len, shifts)) == problem.kernel_size[axis]


@each_tile
def test_m_tiles_have_every_line_and_column_phase_once(tile):
    rows = rows_of(tile)
    every = itertools.product(range(tile.lines), range(tile.problem.stride[1]))
    assert Counter(itertools.chain(*rows)) == Counter(every)
    for found, phases in zip(rows, tile.m_tile_lines, strict=True):
        assert {(line // tile.channels, rw) for line, rw in found} == set(phases)
    assert len(tile.m_tile_lines) <= 32  # M tiles are bits of an unsigned


@each_tile
def test_steps_have_every_tap_once(tile):
    """A tap, a word of channels and an output phase meet in one step; it is for all M tiles with rows of that phase."""
    shifts_h, shifts_w = (phase_shifts(tile.problem, axis) for axis in (0, 1))
    assert len(tile.turns) * tile.row_phases == tile.problem.stride[0]
    for turn, steps in enumerate(tile.turns):
        places = Counter()
        for step in steps:
            assert len(step.shifts) * min(tile.words, 8) == 8
            words = range(step.first_word, step.first_word + min(tile.words, 8))
            places.update((shift, word) for shift in step.shifts if shift is not None for word in words)
        assert set(places.values()) <= {1}
        every_phase = itertools.product(range(tile.row_phases), range(tile.problem.stride[1]))
        for rh, rw in every_phase:
            needed = set(itertools.product(shifts_h[turn * tile.row_phases + rh], shifts_w[rw]))
            for shift, word in itertools.product(needed, range(tile.words)):
                assert (shift, word) in places
            for step in steps:
                for i, phases in enumerate(tile.m_tile_lines):
                    if (rh, rw) in phases and needed.intersection(step.shifts):
                        assert i in step.m_tiles


@each_tile
def test_steps_are_for_no_m_tile_without_a_weight(tile):
    shifts_h, shifts_w = (phase_shifts(tile.problem, axis) for axis in (0, 1))
    for turn, steps in enumerate(tile.turns):
        for step in steps:
            assert step.m_tiles
            for m_tile in step.m_tiles:
                assert any(
                    shift is not None and shift[0] in shifts_h[turn * tile.row_phases + rh] and shift[1] in shifts_w[rw]
                    for rh, rw in tile.m_tile_lines[m_tile]
                    for shift in step.shifts
                )
    assert tile.used_tiles == {m_tile for steps in tile.turns for step in steps for m_tile in step.m_tiles}


@each_tile
def test_tiles_cover_the_cells_of_an_image_and_its_channels(tile):
    p = tile.problem
    for axis in (0, 1):
        cells = -(-p.output_size[axis] // p.stride[axis])
        assert (tile.tiles[axis] - 1) * tile.size[axis] < cells <= tile.tiles[axis] * tile.size[axis]
    assert math.prod(tile.size) == 8 * tile.n_tiles * tile.warps_n
    assert p.groups % tile.groups == 0
    channels = p.out_channels // p.groups
    blocks_each = tile.sets * tile.groups // p.groups
    assert (blocks_each - 1) * tile.warps_m * tile.channels < channels <= blocks_each * tile.warps_m * tile.channels
    assert tile.groups == 1 or tile.channels == channels


@each_tile
def test_patches_hold_what_the_cells_of_a_tile_read(tile):
    for axis in (0, 1):
        first, last = tile.reach[axis]
        read = set().union(*phase_shifts(tile.problem, axis))
        assert (min(read), max(read)) == (first, last)
        assert tile.patch[axis] >= tile.size[axis] + last - first + (tile.lead if axis == 1 else 0)


@each_tile
def test_loads_and_stores_are_aligned(tile):
    p, most = tile.problem, VECTOR_BYTES // tile.itemsize
    width = p.output_size[1]
    # Loads: from a multiple of `pixels` in the input, at most to its row's end.
    assert p.input_size[1] % tile.pixels == 0
    assert (tile.size[1] * 3 + tile.reach[1][0] - tile.lead) % tile.pixels == 0
    assert tile.patch[1] % tile.pixels == 0
    # Stores.
    assert most % tile.vector == 0
    if tile.channels_last:
        assert p.out_channels % tile.vector == 0  # from pixel to pixel
        assert tile.groups * tile.channels % tile.vector == 0  # from block to block
        assert p.out_channels // p.groups * tile.groups % tile.vector == 0  # at the end of the channels
    else:
        assert width % tile.vector == 0
        assert 8 * p.stride[1] % tile.vector == 0


@each_tile
def test_shared_memory_is_aligned_and_free_of_bank_conflicts(tile):
    assert tile.words * 4 >= tile.problem.gemm_k * tile.itemsize
    assert tile.words in (1, 2, 4) or tile.words % 8 == 0
    assert tile.patch_words % 4 == tile.stage_bytes % VECTOR_BYTES == 0
    assert tile.pixel_pitch >= tile.groups * tile.words
    if tile.pixel_pitch > 4:
        assert len({(pixel * tile.pixel_pitch + word) % 32 for pixel in range(8) for word in range(4)}) == 32


@pytest.mark.parametrize("case", [*CASES, *TILED_CASES], ids=lambda case: case.id)
def test_tile_of_is_one_of_the_tiles(case):
    problem = problem_of(case)
    for itemsize, channels_last in itertools.product((2, 4), (False, True)):
        tile = tile_of(problem, itemsize, channels_last)
        found = [*tiles_of(problem, itemsize, channels_last)]
        assert tile in found or (tile is None and not found)


def test_tile_of_declines_depthwise_layers_and_too_many_weights():
    assert tile_of(Problem(2, 16, 16, 16, (32, 32), (3, 3)), 2, False) is None
    assert tile_of(Problem(2, 512, 512, 1, (32, 32), (3, 3)), 2, False) is None


def test_tile_of_declines_pixels_of_half_words():
    odd = Problem(2, 3, 16, 1, (32, 32), (3, 3))
    assert tile_of(odd, 2, True) is None
    assert tile_of(odd, 2, False) is not None
    assert tile_of(odd, 4, True) is not None


def test_tile_of_declines_more_sets_of_weights_than_a_grid_axis_holds():
    many, too_many = (Problem(1, groups, 2 * groups, groups, (8, 8), (4, 4), (2, 2)) for groups in (65_535, 65_536))
    assert tile_of(many, 2, False) is not None
    assert tile_of(too_many, 2, False) is None
