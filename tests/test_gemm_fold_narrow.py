"""The tiles of sm90/gemm_fold_narrow.cu leave out no output, and what they promise of addresses holds."""

import math
from dataclasses import replace

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gemmconv import Problem
from gemmconv.kernels.phases import cells_of, reach_of
from gemmconv.kernels.sm90.gemm_fold_narrow import KERNEL
from tests.examples import any_of, each_of
from tests.samples import config_of

KINDS = (torch.float16, "ieee"), (torch.float32, "tf32"), (torch.float32, "ieee")
NHWC = torch.channels_last
LAST_OF_DCGAN = Problem(128, 64, 3, 1, (32, 32), (4, 4), (2, 2), (1, 1))


@st.composite
def axes(draw):
    """Kernel size, stride, padding, output padding and dilation of an axis on which every phase has a tap."""
    stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    assume(math.gcd(stride, dilation) == 1)
    kernel_size = stride + draw(st.integers(0, 4))
    padding = draw(st.integers(0, dilation * (kernel_size - 1)))
    return kernel_size, stride, padding, draw(st.integers(0, max(stride, dilation) - 1)), dilation


@st.composite
def tiles(draw):
    """Any tile that a problem may have."""
    height, width = draw(st.integers(4, 40)), 2 * draw(st.integers(4, 80))
    kernel_size, stride, padding, output_padding, dilation = zip(draw(axes()), draw(axes()), strict=True)
    batch, in_channels, out_channels = draw(st.integers(1, 9)), 2 * draw(st.integers(1, 80)), draw(st.integers(1, 4))
    assume(out_channels * math.prod(kernel_size) <= 256)
    assume(all(size > 2 * pad for size, pad in zip((height, width), padding, strict=True)))
    problem = Problem(
        *(batch, in_channels, out_channels, 1, (height, width)),
        *(kernel_size, stride, padding, output_padding, dilation),
    )
    dtype, precision = draw(st.sampled_from(KINDS))
    config = config_of(problem, dtype, draw(st.sampled_from((torch.contiguous_format, NHWC))), precision)
    return any_of(draw, KERNEL.tiles(config, "forward"))


each_tile = each_of(tiles())


@each_tile
def test_items_cover_the_cells_of_all_images(tile):
    height, width = cells_of(tile.problem)
    assert (tile.strips - 1) * tile.cells < width <= tile.strips * tile.cells
    assert (tile.segments - 1) * tile.segment_rows < height <= tile.segments * tile.segment_rows
    assert tile.items == tile.problem.batch * tile.strips * tile.segments


@each_tile
def test_strips_have_all_that_their_cells_read(tile):
    (first, last), width = reach_of(tile.problem, 1), tile.problem.input_size[1]
    for strip in range(tile.strips):
        begin = tile.origin + strip * tile.cells  # position of the first column
        cells = range(strip * tile.cells, min((strip + 1) * tile.cells, cells_of(tile.problem)[1]))
        read = {cell + shift for cell in cells for shift in (first, last)}
        assert all(position in range(begin, begin + tile.columns) for position in read if 0 <= position < width)
        assert all(0 <= position - begin + tile.left < tile.column_pitch for position in read)
    assert tile.across == width if tile.whole else tile.across == tile.columns
    assert tile.across <= tile.columns


@each_tile
def test_copies_and_stores_are_aligned(tile):
    p = tile.problem
    assert tile.copied in (0, 4, 8, 16)
    unit = 16 // tile.itemsize if tile.boxed else tile.unit
    assert tile.copied % tile.itemsize == 0
    if tile.channels_last:
        assert p.in_channels % unit == 0
    else:
        assert p.input_size[1] % unit == tile.across % unit == 0
        assert all((tile.origin + strip * tile.cells) % unit == 0 for strip in range(tile.strips))
    assert tile.pitch * tile.itemsize % 16 == 0
    channels = p.out_channels if tile.channels_last else 1
    assert 16 % (tile.vector * tile.itemsize) == 0
    assert p.stride[1] * channels % tile.vector == p.output_size[1] * channels % tile.vector == 0


@given(tiles())
def test_boxes_fill_a_stage(tile):
    assume(tile.boxed)
    itemsize, box = tile.input_map.itemsize, tile.input_map.box
    assert tile.input_map.swizzled
    assert box[0] * itemsize == 128
    if tile.channels_last:
        lines = math.prod(box[1:])
        assert lines == tile.rows * tile.across <= tile.positions
        count = -(-tile.problem.in_channels // box[0])
    else:
        channels, rows = box[1:3]
        lines = channels * rows
        assert tile.problem.in_channels <= channels == tile.steps * 32 // itemsize
        count = tile.positions // (rows * box[0])
        assert count * rows * box[0] == tile.positions  # no box ends within a line
        assert tile.flat == tile.whole
        assert not tile.flat or rows == 1
        assert lines % 8 == 0  # where a line's pieces are follows from its number
    assert count * lines * 128 <= tile.stage_bytes


def test_boxes_bring_what_they_can():
    assert {tile.boxed for tile in KERNEL.tiles(config_of(LAST_OF_DCGAN), "forward")} == {True}
    narrow = replace(LAST_OF_DCGAN, input_size=(32, 28))  # rows of 56 bytes
    assert {tile.boxed for tile in KERNEL.tiles(config_of(narrow), "forward")} == {False}
    assert {tile.boxed for tile in KERNEL.tiles(config_of(narrow, layout=NHWC), "forward")} == {True}


@each_tile
def test_warps_reach_different_banks(tile):
    """Eight rows of 16 bytes that are loaded together, or words of four channels; columns as a warp writes them."""
    if tile.boxed:
        assert tile.pitch == 0  # the order of pieces in lines does it
    elif tile.channels_last or tile.itemsize == 2:
        assert tile.pitch * tile.itemsize // 16 % 2 == 1
    else:
        assert len({(channel * tile.pitch + position) % 32 for channel in range(4) for position in range(8)}) == 32
    assert len({(2 * line * tile.column_pitch + position) % 32 for line in range(4) for position in range(8)}) == 32


@each_tile
def test_blocks_share_a_multiprocessor_and_have_whole_warps(tile):
    assert tile.blocks_resident * (tile.shared_bytes + 1024) <= 228 << 10
    assert tile.blocks_resident * tile.threads <= 2048
    assert tile.positions % (64 * tile.warpgroups) == 0
    assert tile.folders % 32 == tile.loaders % 32 == 0
