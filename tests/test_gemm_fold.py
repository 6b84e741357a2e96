"""The tiles of csrc/sm90/gemm_fold.cu leave out nothing, and what they promise of addresses holds. No kernel runs."""

from dataclasses import replace

import torch
from hypothesis import assume
from hypothesis import strategies as st

from gemmconv import Problem
from gemmconv.algorithms import fused
from gemmconv.kernels.phases import cells_of
from gemmconv.kernels.sm90 import gemm_fold, implicit_gemm
from tests.examples import each_of
from tests.samples import config_of, tile_for

FIRST_OF_POSE = Problem(32, 2048, 256, 1, (8, 6), (4, 4), (2, 2), (1, 1))
SIZES = [(height, width) for height in range(1, 17) for width in range(1, 65) if height * width in range(4, 257, 4)]


@st.composite
def tiles(draw):
    """Any tile that a problem may have."""
    kernel_size = draw(st.sampled_from([(1, 1), (2, 2), (4, 4), (1, 16), (2, 4), (8, 4), (8, 8), (1, 64)]))
    stride = tuple(draw(st.integers(1, min(size, 8))) for size in kernel_size)
    padding = tuple(draw(st.integers(0, size // 2)) for size in kernel_size)
    input_size = draw(st.sampled_from(SIZES))
    assume(all(2 * pad < size + more - 1 for pad, size, more in zip(padding, input_size, kernel_size, strict=True)))
    batch, in_channels, out_channels = draw(st.integers(1, 300)), draw(st.integers(1, 300)), draw(st.integers(1, 300))
    problem = Problem(batch, in_channels, out_channels, 1, input_size, kernel_size, stride, padding)
    found = [*gemm_fold.tiles_of(problem, draw(st.sampled_from((2, 4))))]
    assume(found)
    return found[draw(st.integers(0, 10_000)) % len(found)]


each_tile = each_of(tiles())


@each_tile
def test_items_cover_all_images_and_output_channels(tile):
    p = tile.problem
    per_image = -(-p.out_channels // tile.tile_outs)
    assert tile.items % per_image == 0
    assert (tile.items // per_image - 1) * tile.images < p.batch <= tile.items // per_image * tile.images
    assert tile.images * p.in_pixels <= tile.columns <= 256
    assert tile.chunks * 128 >= p.in_channels * tile.itemsize > (tile.chunks - 1) * 128


@each_tile
def test_groups_have_whole_output_channels_and_passes_whole_images(tile):
    lines = 16 * tile.fold_warps
    assert lines % tile.problem.taps == 0
    assert tile.tile_outs * tile.problem.taps == 64 * tile.warpgroups * tile.blocks
    if tile.in_place:
        assert tile.folded % 8 == 0
        assert cells_of(tile.problem) == tile.problem.input_size
    else:
        assert tile.folded % tile.problem.in_pixels == 0
        assert tile.folded % 8 == 0 or tile.folded == tile.positions


@each_tile
def test_copies_and_stores_are_aligned(tile):
    p = tile.problem
    assert tile.piece * tile.itemsize in (8, 16)
    assert p.in_pixels % tile.piece == 0
    assert p.out_channels * p.taps * tile.itemsize % 16 == 0  # from one row of weights to the next
    assert tile.tile_outs * p.taps * tile.itemsize % 16 == 0
    assert 16 // tile.itemsize % tile.vector == p.stride[1] % tile.vector == p.output_size[1] % tile.vector == 0
    assert tile.stage_bytes % 1024 == 0


@each_tile
def test_warps_write_columns_to_different_banks(tile):
    assert tile.folded <= tile.fold_pitch
    for half in (range(4), range(4, 8)):  # rows of lanes that store eight bytes at a time
        banks = {(row * tile.fold_pitch + 2 * lane + e) % 32 for row in half for lane in range(4) for e in range(2)}
        assert len(banks) == 32


@each_tile
def test_tiles_fit_a_multiprocessor(tile):
    macros = gemm_fold.macros_of(tile, torch.float16 if tile.turned else torch.float32)
    assert tile.shared_bytes == macros["SHARED_BYTES"] <= 227 << 10
    assert (3 if tile.turned else 2) <= tile.stages == macros["STAGES"]
    assert tile.blocks * tile.columns // 2 + 40 <= tile.registers[0]  # sums of a thread, and others
    if tile.warpgroups == 2:  # with one, nobody gives registers up
        assert 2 * tile.registers[0] + tile.registers[1] <= 3 * 168


DECLINED = [
    replace(FIRST_OF_POSE, groups=2),
    replace(FIRST_OF_POSE, batch=0),
    replace(FIRST_OF_POSE, input_size=(18, 16)),  # 288 inputs
    replace(FIRST_OF_POSE, input_size=(7, 7)),  # no four of them lie together
    replace(FIRST_OF_POSE, kernel_size=(3, 3)),  # nine taps
    replace(FIRST_OF_POSE, kernel_size=(2, 2), stride=(3, 3), padding=(0, 0)),  # a phase without taps
    replace(FIRST_OF_POSE, kernel_size=(2, 2), padding=(0, 0), out_channels=35),  # rows of 280 bytes
    replace(FIRST_OF_POSE, dilation=(32, 32)),  # outputs mostly of border
    replace(FIRST_OF_POSE, kernel_size=(1, 4), stride=(1, 1), padding=(0, 3 * 2**29), dilation=(1, 2**30)),
    replace(FIRST_OF_POSE, batch=2**24),
    replace(FIRST_OF_POSE, in_channels=2**24),
    replace(FIRST_OF_POSE, batch=2**23 - 1, out_channels=2**20),  # more items than integers
]


def test_fused_takes_it_where_that_is_faster_and_then_no_workspace():
    algorithm = fused.Fused()
    small, large = config_of(FIRST_OF_POSE), config_of(replace(FIRST_OF_POSE, input_size=(32, 24)))
    assert algorithm.workspace_bytes(small, "forward") == 0 < algorithm.workspace_bytes(large, "forward")
    assert algorithm.choice(small, "forward").kernel is gemm_fold.KERNEL
    of_plan = tile_for(implicit_gemm, small, "forward").cycles / 1.6e9
    assert algorithm.estimate(small, "forward") < of_plan
