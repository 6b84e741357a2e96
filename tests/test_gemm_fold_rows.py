"""The tiles of sm90/gemm_fold_rows.cu leave out nothing; what they promise holds.

No kernel runs.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmconv import Problem
from gemmconv.kernels.sm90.gemm_fold_rows import _LINE_PITCH, KERNEL
from tests.examples import any_of, each_of
from tests.samples import config_of

WIDE = Problem(8, 64, 64, 1, (1024, 1024), (3, 3))


@st.composite
def tiles(draw, *itemsizes):
    """Any tile that a problem may have, of elements of so many bytes; of 16 bits and TF32 by default."""
    itemsize = draw(st.sampled_from(itemsizes or (2, 4)))
    kernel_size = draw(st.tuples(st.integers(1, 5), st.integers(1, 9)))
    input_size = draw(st.integers(1, 40)), 8 * draw(st.integers(1, 40))
    most = [(input_size[axis] + kernel_size[axis] - 2) // 2 for axis in (0, 1)]
    padding = tuple(draw(st.integers(0, min(most[axis], kernel_size[axis] + 8))) for axis in (0, 1))
    batch, in_channels, out_channels = draw(st.integers(1, 5)), draw(st.integers(1, 130)), draw(st.integers(1, 80))
    problem = Problem(batch, in_channels, out_channels, 1, input_size, kernel_size, (1, 1), padding)
    direction = draw(st.sampled_from(("forward", "input_grad")))
    config = config_of(problem, torch.float16 if itemsize == 2 else torch.float32)
    return any_of(draw, KERNEL.tiles(config, direction))


each_tile = each_of(tiles())
each_tile_of_tf32 = each_of(tiles(4))
each_tile_of_16_bits = each_of(tiles(2))


def reads(tile, axis):
    """Return by the definition which inputs an output reads, by which tap: (output, tap, input)."""
    p = tile.problem
    pairs = [
        (i, i * p.stride[axis] - p.padding[axis] + k * p.dilation[axis], k)
        for i in range(p.input_size[axis])
        for k in range(p.kernel_size[axis])
    ]
    pairs = [(i, o, k) for i, o, k in pairs if 0 <= o < p.output_size[axis]]
    return {(o, k, i) if tile.direction == "forward" else (i, k, o) for i, o, k in pairs}


@each_tile
def test_columns_meet_the_outputs_that_the_definition_has_them_meet(tile):
    """A column of a tap is read as many columns later as it is delayed, by the cell that is delayed as well."""
    width, found = tile.output_size[1], set()
    for delay, tap in enumerate(tile.taps_across, start=tile.first_delay):
        for column in range(tile.multiplied):
            output = column + delay - tile.delayed
            if 0 <= output < width and column + delay < tile.steps * tile.columns:
                found.add((output, tap.tap, column))
    assert found == reads(tile, 1)
    assert 0 <= tile.first_delay <= tile.first_delay + len(tile.taps_across) - 1 <= 8


@each_tile
def test_input_rows_of_taps_are_those_that_the_definition_has(tile):
    """The row of a tap down is one below that of the tap before."""
    found = set()
    for output, (place, tap) in itertools.product(range(tile.output_size[0]), enumerate(tile.taps_down)):
        row = output % tile.rows
        assert place + row < tile.input_rows
        input_row = output - row + tile.first_row + row + place
        if 0 <= input_row < tile.input_size[0]:
            found.add((output, tap.tap, input_row))
    assert found == reads(tile, 0)


@each_tile
def test_items_cover_all_outputs(tile):
    assert tile.image_items * tile.rows >= tile.output_size[0] > (tile.image_items - 1) * tile.rows
    assert tile.steps * tile.columns - tile.delayed >= tile.output_size[1] + tile.kept
    assert tile.channel_sets * tile.outs >= tile.out_channels > (tile.channel_sets - 1) * tile.outs
    assert tile.channels >= tile.in_channels > tile.channels - 32 // tile.itemsize


@each_tile_of_tf32
def test_copies_and_stores_of_tf32_are_aligned(tile):
    assert tile.input_size[1] * 4 % 16 == 0
    for place in (tile.delayed, tile.columns, tile.output_size[1]):
        assert place % tile.vector == 0
    assert tile.stage_bytes % 512 == 0  # where the order of pieces begins anew
    assert tile.weight_bytes % 16 == tile.steps % 2 == 0


@each_tile_of_tf32
def test_lines_of_whole_sectors_begin_early_and_end_early(tile):
    """Whatever a row begins with: memory is written eight outputs at a time."""
    width, line = tile.output_size[1], 2 * tile.columns
    for begin in range(0, 8, tile.vector):
        early = (begin - tile.delayed) % 8
        assert early <= tile.kept or width % 8 == 0
        assert early % tile.vector == 0
        stored = set()
        for step in range(0, tile.steps, 2):
            first = step * tile.columns - tile.delayed - early
            assert (begin + first) % 8 == 0
            stored.update(range(max(0, first), min(width, first + line)))
        if width % 8 > 0 or begin == 0:
            assert stored == {*range(width)}


@each_tile_of_16_bits
def test_copies_and_stores_are_aligned(tile):
    assert tile.input_size[1] * 2 % 16 == 0
    for place in (tile.delayed, tile.columns, tile.output_size[1], _LINE_PITCH):
        assert place % tile.vector == 0
    assert tile.stage_bytes % 1024 == tile.weight_bytes // tile.weight_rows % 1024 == 0


@given(tiles())
def test_sums_and_words_fit_registers_and_blocks_a_grid(tile):
    assert tile.stages >= 2
    if tile.itemsize == 2:
        assert tile.tiles * tile.columns // 2 <= 192  # sums of a thread
    else:
        assert tile.stages > tile.chunks
        assert tile.lines <= 256
        # Of 24 at 221 to 230, at 231 to 240 and at 241 to 250, ptxas has one each spill.
        assert tile.registers_with(tile.taps_together) <= 250
    assert tile.blocks_on(132) * tile.channel_sets <= max(132, tile.channel_sets)


@pytest.mark.parametrize(("channels", "fetched"), [(64, 128), (32, 256)])
def test_the_l2_cache_fetches_less_where_much_is_on_its_way(channels, fetched):
    """132 blocks that go along ten rows of 64 channels wait for 22 MB, of 32 for 11 MB."""
    problem = replace(WIDE, in_channels=channels, out_channels=channels)
    best = min(KERNEL.tiles(config_of(problem, torch.float32), "forward"), key=lambda tile: tile.cycles)
    assert best.fetched == fetched


@each_tile
def test_what_is_on_its_way_stays_in_the_l2_cache_where_all_of_a_line_is_fetched(tile):
    lines = tile.blocks_on(132) * tile.channel_sets * tile.input_rows * tile.in_channels
    assert (tile.fetched == 256) == (lines * 256 <= 16 << 20)
    assert tile.fetched in (128, 256)
