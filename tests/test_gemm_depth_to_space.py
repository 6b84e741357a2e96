"""The tiles of sm90/gemm_depth_to_space.cu leave out nothing, and what they promise of addresses holds."""

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from gemmconv import Problem
from gemmconv.algorithms import fused
from gemmconv.kernels.sm90 import gemm_depth_to_space
from tests.examples import each_of
from tests.samples import config_of, tile_for

MASK_HEAD = Problem(256, 256, 256, 1, (14, 14), (2, 2), (2, 2))
KERNELS = [(1, 1), (2, 2), (4, 4), (1, 2), (1, 8), (2, 1), (2, 8), (4, 2), (16, 1)]


@st.composite
def tiles(draw):
    """Any tile that a problem may have."""
    kernel_size, itemsize = draw(st.sampled_from(KERNELS)), draw(st.sampled_from((2, 4)))
    input_size = draw(st.integers(1, 70)), 4 * draw(st.integers(1, 150))
    batch, in_channels = draw(st.integers(1, 300)), draw(st.integers(1, 3000))
    out_channels = draw(st.integers(1, 40)) * (8 if kernel_size == (1, 1) else 4 if 2 in kernel_size else 1)
    size = input_size[:: draw(st.sampled_from((1, -1)))]
    problem = Problem(batch, in_channels, out_channels, 1, size, kernel_size, kernel_size)
    found = [*gemm_depth_to_space.tiles_of(problem, itemsize)]
    assert found
    return found[draw(st.integers(0, 10_000)) % len(found)]


each_tile = each_of(tiles())


@each_tile
def test_items_cover_all_positions_and_lines(tile):
    p, (height, width) = tile.problem, tile.input_size
    assert height * width == p.in_pixels
    assert tile.items % tile.sets == 0
    assert 0 <= tile.items // tile.sets * 128 - p.batch * p.in_pixels < 128
    assert 0 <= tile.line_blocks * tile.lines - p.out_channels * p.taps < tile.lines
    assert (tile.sets - 1) * tile.blocks < tile.line_blocks <= tile.sets * tile.blocks  # no set is empty
    assert tile.chunks * 128 >= p.in_channels * tile.itemsize > (tile.chunks - 1) * 128


@each_tile
def test_blocks_of_lines_have_all_taps_and_whole_rows_of_outputs(tile):
    p = tile.problem
    assert tile.lines % 16 == tile.lines % p.taps == 0
    assert 16 <= tile.lines <= 256
    if tile.packed and p.kernel_size[1] > 2:
        assert tile.lines % (4 * p.kernel_size[1]) == 0


@each_tile
def test_copies_and_stores_are_aligned(tile):
    p = tile.problem
    assert tile.piece * tile.itemsize in (8, 16)
    assert p.in_pixels % tile.piece == 128 % tile.piece == 0  # so that pieces are of one image
    assert p.in_pixels % 4 == 0
    if not tile.packed:
        assert p.out_channels * p.taps * tile.itemsize % 16 == 0  # from one row of weights to the next


@each_tile
def test_tiles_fit_a_multiprocessor(tile):
    slots, stages = tile.ring_sizes
    assert tile.shared_bytes <= 227 << 10
    assert slots >= (tile.chunks if tile.held else 2)
    assert stages >= 2
    assert tile.threads == 384
    assert tile.blocks == 1 or tile.kept
    assert tile.cycles > 0


DECLINED = [
    replace(MASK_HEAD, groups=2),
    replace(MASK_HEAD, batch=0),
    replace(MASK_HEAD, kernel_size=(3, 3)),  # taps overlap
    replace(MASK_HEAD, stride=(3, 3)),  # outputs between them have none
    replace(MASK_HEAD, kernel_size=(3, 3), stride=(3, 3)),  # nine taps
    replace(MASK_HEAD, kernel_size=(1, 16), stride=(1, 16)),  # a row of more outputs than lanes share
    replace(MASK_HEAD, padding=(1, 0)),
    replace(MASK_HEAD, output_padding=(1, 0)),
    replace(MASK_HEAD, dilation=(2, 1)),
    replace(MASK_HEAD, input_size=(7, 7)),  # no four of the inputs are of one image
    replace(MASK_HEAD, out_channels=35),  # rows of 280 bytes
    replace(MASK_HEAD, in_channels=2**24),  # more inputs of an image than integers
    Problem(1, 1, 2**31 - 72, 1, (2, 2), (1, 1), (1, 1)),  # more lines, with those of empty blocks, than integers
    replace(MASK_HEAD, batch=2**31 - 1),  # more items than integers
]


def test_float32_needs_no_aligned_rows_of_weights():
    odd = replace(MASK_HEAD, out_channels=35)
    assert tile_for(gemm_depth_to_space, config_of(odd, torch.float32, precision="tf32")) is not None


@pytest.mark.parametrize(("dtype", "packed_bytes"), [(torch.float16, 0), (torch.float32, 4 * 256 * 1024)])
def test_fused_takes_it_where_that_is_faster(dtype, packed_bytes):
    algorithm, config = fused.Fused(), config_of(MASK_HEAD, dtype, precision="tf32")
    assert algorithm.workspace_bytes(config, "forward") == packed_bytes
    assert algorithm.choice(config, "forward").kernel is gemm_depth_to_space.KERNEL


def test_fused_does_not_take_it_where_that_is_slower():
    wide = config_of(Problem(4, 128, 64, 1, (256, 256), (2, 2), (2, 2)))
    assert tile_for(gemm_depth_to_space, wide) is not None
    assert fused.Fused().workspace_bytes(wide, "forward") > 0  # fused_wgmma's weights
