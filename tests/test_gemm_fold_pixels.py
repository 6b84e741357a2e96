"""The tiles of sm90/gemm_fold_pixels.cu leave out nothing, and what they promise of addresses holds. No kernel runs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gemmconv import Problem
from gemmconv.algorithms import fused
from gemmconv.kernels.phases import cells_of, phase_shifts
from gemmconv.kernels.sm90 import gemm_fold_pixels
from tests.examples import each_of
from tests.samples import config_of, tile_for

THIRD_OF_DCGAN = Problem(128, 256, 128, 1, (8, 8), (4, 4), (2, 2), (1, 1))
SECOND_OF_ENCODEC = Problem(16, 256, 128, 1, (1, 600), (1, 10), (1, 5))
IMAGES = [(height, width) for height in range(1, 17) for width in range(1, 65) if height * width in range(4, 257, 4)]


@st.composite
def tiles(draw):
    """Any tile that a problem may have: of small images, or of signals."""
    signal = draw(st.booleans())
    kernels = [(1, 1), (1, 10), (1, 3), (1, 16), (1, 9)] if signal else [(1, 1), (3, 3), (4, 4), (2, 4), (8, 8), (5, 1)]
    kernel_size = draw(st.sampled_from(kernels))
    stride = tuple(draw(st.integers(1, min(size, 8))) for size in kernel_size)
    padding = tuple(draw(st.integers(0, size // 2)) for size in kernel_size)
    if signal:
        padding = 0, draw(st.integers(0, 40))  # more than a kernel reaches leaves fewer cells than inputs
    dilation = 1, draw(st.sampled_from((1, 1, 3)))
    input_size = (1, 4 * draw(st.integers(65, 800))) if signal else draw(st.sampled_from(IMAGES))
    assume(all(2 * pad < size + more - 1 for pad, size, more in zip(padding, input_size, kernel_size, strict=True)))
    batch, in_channels, out_channels = draw(st.integers(1, 300)), draw(st.integers(1, 300)), draw(st.integers(1, 300))
    problem = Problem(batch, in_channels, out_channels, 1, input_size, kernel_size, stride, padding, dilation=dilation)
    found = [*gemm_fold_pixels.tiles_of(problem, draw(st.sampled_from((2, 4))))]
    assume(found)
    return found[draw(st.integers(0, 10_000)) % len(found)]


each_tile = each_of(tiles())


@each_tile
def test_items_cover_all_cells_of_all_images_and_lines(tile):
    p, (windows, step, _) = tile.problem, tile.windows
    assert tile.items % tile.sets == 0
    assert (windows == 1) == (tile.window == p.in_pixels)  # as the kernel has it
    if windows == 1:
        assert 0 <= tile.items // tile.sets * tile.images - p.batch < tile.images
    else:
        assert tile.images == 1
        assert tile.items // tile.sets == p.batch * windows
        assert (windows - 1) * step < cells_of(p)[1] <= windows * step
    assert 0 <= tile.line_blocks * tile.lines - p.out_channels * p.taps < tile.lines
    assert (tile.sets - 1) * tile.blocks < tile.line_blocks <= tile.sets * tile.blocks  # no set is empty


@given(tiles())
def test_windows_have_all_inputs_that_their_cells_read(tile):
    windows, step, left = tile.windows
    assume(windows > 1)
    shifts = frozenset().union(*phase_shifts(tile.problem, 1))
    assert left >= -min(shifts)
    assert left + step + max(shifts) <= tile.window == tile.item_positions
    assert step >= 64


@each_tile
def test_blocks_and_passes_have_all_taps_of_some_output_channels(tile):
    p = tile.problem
    assert tile.lines % 16 == tile.lines % p.taps == 0
    assert tile.lines * tile.row_blocks <= 256
    assert tile.lines // p.taps % tile.fold_outs == 0
    assert tile.fold_outs * p.taps % 8 == 0
    assert 2 * tile.fold_outs * p.taps * tile.fold_pitch * 4 == tile.own_bytes


@each_tile
def test_copies_and_stores_are_aligned(tile):
    p = tile.problem
    assert tile.piece * tile.itemsize in (8, 16)
    assert p.in_pixels % tile.piece == tile.item_positions % tile.piece == 0
    assert tile.windows[1] % tile.piece == tile.windows[2] % tile.piece == 0
    if not tile.packed:
        assert p.out_channels * p.taps * tile.itemsize % 16 == 0  # from one row of weights to the next
    assert 16 // tile.itemsize % tile.vector == p.stride[1] % tile.vector == p.output_size[1] % tile.vector == 0
    assert tile.own_bytes % 16 == 0


@each_tile
def test_warps_write_columns_to_different_banks(tile):
    assert tile.item_positions <= tile.fold_pitch
    for half in (range(4), range(4, 8)):  # rows of lanes that store eight bytes at a time
        banks = {(2 * lane * tile.fold_pitch + 2 * row + e) % 32 for row in half for lane in range(4) for e in range(2)}
        assert len(banks) == 32


@each_tile
def test_a_copy_is_as_a_fresh_tile_and_the_bound_of_its_cycles_holds(tile):
    fresh, names = replace(tile), ("fold_outs", "fold_turns", "held", "ring_sizes", "shared_bytes", "cycles")
    assert [getattr(tile, name) for name in names] == [getattr(fresh, name) for name in names]
    assert tile.least_cycles <= tile.cycles * (1 + 1e-9)


@each_tile
def test_tiles_fit_a_multiprocessor(tile):
    assert tile.shared_bytes <= 227 << 10
    slots, stages = tile.ring_sizes
    assert min(slots, stages) >= 2
    assert not tile.held or slots >= tile.chunks


def test_signal_of_fewer_cells_than_a_window_has_smaller_windows():
    cropped = Problem(64, 256, 256, 1, (1, 260), (1, 2), (1, 1), (0, 16))  # 229 outputs
    assert {tile.window for tile in gemm_fold_pixels.tiles_of(cropped, 4)} == {128}


DECLINED = [
    replace(THIRD_OF_DCGAN, groups=2),
    replace(THIRD_OF_DCGAN, batch=0),
    replace(THIRD_OF_DCGAN, input_size=(18, 16)),  # 288 inputs of several rows
    replace(THIRD_OF_DCGAN, input_size=(7, 7)),  # no four of them lie together
    replace(THIRD_OF_DCGAN, kernel_size=(5, 5)),  # 400 lines have all taps of 16 output channels
    replace(THIRD_OF_DCGAN, kernel_size=(2, 2), stride=(3, 3), padding=(0, 0)),  # a phase without taps
    replace(THIRD_OF_DCGAN, kernel_size=(2, 2), padding=(0, 0), out_channels=35),  # rows of 280 bytes
    replace(THIRD_OF_DCGAN, dilation=(32, 32)),  # outputs mostly of border
    replace(THIRD_OF_DCGAN, kernel_size=(1, 3), stride=(1, 1), padding=(0, 2**30), dilation=(1, 2**30)),
    replace(THIRD_OF_DCGAN, batch=2**25),
    replace(THIRD_OF_DCGAN, in_channels=2**24),
    replace(SECOND_OF_ENCODEC, kernel_size=(2, 10)),
    replace(SECOND_OF_ENCODEC, input_size=(2, 600)),
    replace(SECOND_OF_ENCODEC, kernel_size=(1, 10), stride=(1, 1), dilation=(1, 5)),  # too much of the neighbours
    replace(SECOND_OF_ENCODEC, input_size=(1, 601)),
]


def test_float32_needs_no_aligned_rows_of_weights():
    odd = replace(THIRD_OF_DCGAN, kernel_size=(2, 2), padding=(0, 0), out_channels=35)
    assert tile_for(gemm_fold_pixels, config_of(odd, torch.float32, precision="tf32")) is not None


@pytest.mark.parametrize("problem", [THIRD_OF_DCGAN, replace(SECOND_OF_ENCODEC, batch=4)])
def test_fused_takes_it_where_that_is_faster(problem):
    config = config_of(problem, torch.float32, precision="tf32")
    choice = fused.Fused().choice(config, "forward")
    assert choice.kernel is gemm_fold_pixels.KERNEL
    assert fused.Fused().workspace_bytes(config, "forward") == choice.tile.packed_bytes > 0
