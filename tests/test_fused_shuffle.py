"""The tiles of csrc/fused_shuffle.cu leave out nothing, and what they promise of addresses holds. No kernel runs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gemmconv import Problem
from gemmconv.algorithms import fused, fused_shuffle
from gemmconv.algorithms.base import Config

CUDA = torch.device("cuda", 0)
MASK_HEAD = Problem(256, 256, 256, 1, (14, 14), (2, 2), (2, 2))
KERNELS = [(1, 1), (2, 2), (4, 4), (1, 2), (1, 8), (2, 1), (2, 8), (4, 2), (16, 1)]


@st.composite
def tiles(draw):
    """Any tile that a problem may have."""
    kernel_size = draw(st.sampled_from(KERNELS))
    input_size = draw(st.integers(1, 70)), 4 * draw(st.integers(1, 150))
    batch, in_channels = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    out_channels = draw(st.integers(1, 40)) * (8 if kernel_size == (1, 1) else 4 if 2 in kernel_size else 1)
    problem = Problem(batch, in_channels, out_channels, 1, input_size, kernel_size, kernel_size)
    found = [*fused_shuffle.tiles_of(problem)]
    assume(found)
    return found[draw(st.integers(0, 10_000)) % len(found)]


@given(tiles())
def test_items_cover_all_positions_and_lines(tile):
    p, (height, width) = tile.problem, tile.input_size
    assert height * width == p.in_pixels
    across, down = -(-width // tile.width), -(-height // tile.rows)
    assert tile.items == p.batch * across * down * tile.sets
    assert tile.sets * tile.blocks * 64 >= p.out_channels * p.taps
    assert tile.rows == 1 or tile.whole
    assert tile.positions <= tile.columns <= 256
    assert tile.columns % 16 == 0
    assert tile.chunks * 64 >= p.in_channels > (tile.chunks - tile.subs) * 64


@given(tiles())
def test_copies_and_stores_are_aligned(tile):
    p, (_, width), kernel_w = tile.problem, tile.input_size, tile.problem.kernel_size[1]
    assert tile.piece in (4, 8)
    for begin in (p.in_pixels, width * tile.rows, *(() if tile.whole else (tile.width, width))):
        assert begin % tile.piece == 0
    assert p.out_channels * p.taps * 2 % 16 == 0  # from one row of weights to the next
    assert tile.vector <= 8
    assert tile.vector % kernel_w == 0
    assert width * kernel_w % tile.vector == tile.width * kernel_w % tile.vector == 0


@given(tiles())
def test_warps_write_lines_to_different_banks(tile):
    assert tile.positions <= tile.staged_pitch
    banks = {(row * tile.staged_pitch // 2 + lane) % 32 for row in range(8) for lane in range(4)}
    assert len(banks) == 32


@given(tiles())
def test_tiles_fit_a_multiprocessor(tile):
    macros = fused_shuffle.macros_of(tile, torch.float16)
    slots, stages = tile.ring_sizes
    assert tile.shared_bytes == macros["SHARED_BYTES"] <= 227 << 10
    assert slots == macros["SLOTS"] >= tile.chunks  # the inputs of an item lie there together
    assert stages == macros["STAGES"] >= 2
    assert tile.threads == 384
    assert tile.cycles > 0


def config_of(problem, dtype=torch.float16, layout=torch.contiguous_format, precision="ieee"):
    return Config(problem, dtype, CUDA, precision, memory_format=layout)


@pytest.mark.parametrize(
    "problem",
    [
        replace(MASK_HEAD, groups=2),
        replace(MASK_HEAD, batch=0),
        replace(MASK_HEAD, kernel_size=(3, 3)),  # taps overlap
        replace(MASK_HEAD, stride=(3, 3)),  # outputs between them have none
        replace(MASK_HEAD, kernel_size=(3, 3), stride=(3, 3)),  # nine taps
        replace(MASK_HEAD, kernel_size=(1, 16), stride=(1, 16)),  # more than are stored together
        replace(MASK_HEAD, padding=(1, 0)),
        replace(MASK_HEAD, output_padding=(1, 0)),
        replace(MASK_HEAD, dilation=(2, 1)),
        replace(MASK_HEAD, input_size=(7, 7)),  # no four of the inputs lie together
        replace(MASK_HEAD, out_channels=35),  # rows of 280 bytes
        replace(MASK_HEAD, in_channels=2048),  # more than shared memory holds of 14 inputs
        replace(MASK_HEAD, in_channels=2**24),
        Problem(1, 1, 2**31 - 72, 1, (2, 2), (1, 1), (1, 1)),  # more lines, with those of empty blocks, than integers
        replace(MASK_HEAD, batch=2**31 - 1),  # more items than integers
    ],
)
def test_others_are_declined(problem):
    assert fused.shuffle_tile_for(config_of(problem)) is None


def test_only_16_bit_types_in_nchw_are_taken():
    assert fused.shuffle_tile_for(config_of(MASK_HEAD, torch.bfloat16)) is not None
    assert fused.shuffle_tile_for(config_of(MASK_HEAD, torch.float32, precision="tf32")) is None
    assert fused.shuffle_tile_for(config_of(MASK_HEAD, torch.float32)) is None
    assert fused.shuffle_tile_for(config_of(MASK_HEAD, torch.float64)) is None
    assert fused.shuffle_tile_for(config_of(MASK_HEAD, layout=torch.channels_last)) is None


def test_fused_takes_it_where_that_is_faster_and_then_no_workspace():
    algorithm, wide = fused.Fused(), replace(MASK_HEAD, batch=4, in_channels=512, input_size=(64, 64))
    assert algorithm.workspace_bytes(config_of(MASK_HEAD), "forward") == 0
    assert algorithm.workspace_bytes(config_of(wide), "forward") > 0
    of_tile = fused.shuffle_tile_for(config_of(MASK_HEAD)).cycles / 1.6e9
    of_plan = fused.plan_for(config_of(MASK_HEAD), "forward").cycles / 1.6e9
    assert of_tile < algorithm.estimate(config_of(MASK_HEAD), "forward") < 6e-6 + of_plan
