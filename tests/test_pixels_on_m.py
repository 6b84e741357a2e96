"""Tiles of sm90/gemm_fold_pixels.cu and gemm_depth_to_space.cu leave out nothing, and keep promises of addresses."""

from hypothesis import assume, given
from hypothesis import strategies as st

from gemmconv import Problem
from gemmconv.kernels.phases import cells_of, phase_shifts
from gemmconv.kernels.sm90 import gemm_depth_to_space, gemm_fold_pixels
from tests.examples import any_of, each_of

IMAGES = [(height, width) for height in range(1, 17) for width in range(1, 65) if height * width in range(4, 257, 4)]
KERNELS_OF_SIGNALS = [(1, 1), (1, 10), (1, 3), (1, 16), (1, 9)]
KERNELS_OF_IMAGES = [(1, 1), (3, 3), (4, 4), (2, 4), (8, 8), (5, 1)]
KERNELS_OF_SHUFFLES = [(1, 1), (2, 2), (4, 4), (1, 2), (1, 8), (2, 1), (2, 8), (4, 2), (16, 1)]


@st.composite
def folds(draw):
    """Any tile of gemm_fold_pixels that a problem may have: of small images, or of signals."""
    signal = draw(st.booleans())
    kernel_size = draw(st.sampled_from(KERNELS_OF_SIGNALS if signal else KERNELS_OF_IMAGES))
    stride = tuple(draw(st.integers(1, min(size, 8))) for size in kernel_size)
    padding = tuple(draw(st.integers(0, size // 2)) for size in kernel_size)
    if signal:
        padding = 0, draw(st.integers(0, 40))  # more than a kernel reaches leaves fewer cells than inputs
    dilation = 1, draw(st.sampled_from((1, 1, 3)))
    input_size = (1, 4 * draw(st.integers(65, 800))) if signal else draw(st.sampled_from(IMAGES))
    assume(all(2 * pad < size + more - 1 for pad, size, more in zip(padding, input_size, kernel_size, strict=True)))
    batch, in_channels, out_channels = draw(st.integers(1, 300)), draw(st.integers(1, 300)), draw(st.integers(1, 300))
    problem = Problem(batch, in_channels, out_channels, 1, input_size, kernel_size, stride, padding, dilation=dilation)
    return any_of(draw, gemm_fold_pixels.tiles_of(problem, draw(st.sampled_from((2, 4))), 132))


@st.composite
def shuffles(draw):
    """Any tile of gemm_depth_to_space that a problem may have; each of these has some."""
    kernel_size, itemsize = draw(st.sampled_from(KERNELS_OF_SHUFFLES)), draw(st.sampled_from((2, 4)))
    input_size = draw(st.integers(1, 70)), 4 * draw(st.integers(1, 150))
    batch, in_channels = draw(st.integers(1, 300)), draw(st.integers(1, 3000))
    out_channels = draw(st.integers(1, 40)) * (8 if kernel_size == (1, 1) else 4 if 2 in kernel_size else 1)
    size = input_size[:: draw(st.sampled_from((1, -1)))]
    problem = Problem(batch, in_channels, out_channels, 1, size, kernel_size, kernel_size)
    found = [*gemm_depth_to_space.tiles_of(problem, itemsize, 132)]
    assert found
    return any_of(draw, found)


each_fold, each_shuffle, each_tile = each_of(folds()), each_of(shuffles()), each_of(folds(), shuffles())


@each_tile
def test_line_blocks_have_all_lines_and_none_is_empty(tile):
    p = tile.problem
    assert 0 <= tile.line_blocks * tile.lines - p.out_channels * p.taps < tile.lines
    assert tile.lines % 16 == tile.lines % p.taps == 0
    assert tile.chunks * 128 >= p.in_channels * tile.itemsize > (tile.chunks - 1) * 128


@each_tile
def test_copies_are_aligned(tile):
    p = tile.problem
    assert tile.piece * tile.itemsize in (8, 16)
    assert p.in_pixels % tile.piece == tile.item_positions % tile.piece == 0  # so that pieces are of one image
    if not tile.packed:
        assert p.out_channels * p.taps * tile.itemsize % 16 == 0  # from one row of weights to the next


@each_tile
def test_there_are_two_stages_at_least(tile):
    assert tile.stages >= 2
    assert tile.cycles > 0


@each_fold
def test_items_cover_all_cells_of_all_images(tile):
    p, (windows, step, _) = tile.problem, tile.windows
    assert (windows == 1) == (tile.window == p.in_pixels)  # as the kernel has it
    if windows == 1:
        assert 0 <= tile.places * tile.images - p.batch < tile.images
    else:
        assert tile.images == 1
        assert tile.places == p.batch * windows
        assert (windows - 1) * step < cells_of(p)[1] <= windows * step


@given(folds())
def test_windows_have_all_inputs_that_their_cells_read(tile):
    windows, step, left = tile.windows
    assume(windows > 1)
    shifts = frozenset().union(*phase_shifts(tile.problem, 1))
    assert left >= -min(shifts)
    assert left + step + max(shifts) <= tile.window == tile.item_positions
    assert step >= 64


@each_fold
def test_blocks_and_passes_have_all_taps_of_some_output_channels(tile):
    p = tile.problem
    assert tile.lines * tile.position_blocks <= 256
    assert tile.lines // p.taps % tile.fold_outs == 0
    assert tile.fold_outs * p.taps % 8 == 0
    assert 2 * tile.fold_outs * p.taps * tile.fold_pitch * 4 == tile.column_bytes


@each_fold
def test_windows_and_stores_are_aligned(tile):
    p = tile.problem
    assert tile.windows[1] % tile.piece == tile.windows[2] % tile.piece == 0
    assert 16 // tile.itemsize % tile.vector == p.stride[1] % tile.vector == p.output_size[1] % tile.vector == 0
    assert tile.column_bytes % 16 == 0


@each_fold
def test_warps_write_columns_to_different_banks(tile):
    assert tile.item_positions <= tile.fold_pitch
    for half in (range(4), range(4, 8)):  # rows of lanes that store eight bytes at a time
        banks = {(2 * lane * tile.fold_pitch + 2 * row + e) % 32 for row in half for lane in range(4) for e in range(2)}
        assert len(banks) == 32


def test_the_example_of_the_module_has_these_tiles():
    example = Problem(64, 64, 32, 1, (8, 8), (4, 4), (2, 2), (1, 1))
    tiles = sorted(gemm_fold_pixels.tiles_of(example, 4, 132), key=lambda tile: tile.cycles)
    best, second, *_, last = tiles
    assert len(tiles) == 36
    assert (best.images, best.lines, round(best.cycles)) == (2, 144, 15_244)
    assert (second.images, second.lines, round(second.cycles)) == (2, 128, 15_359)
    assert (last.images, last.lines, round(last.cycles)) == (1, 208, 26_229)
    assert (best.items, best.chunks, best.stages, best.fold_outs) == (128, 2, 5, 3)
    assert (best.fold_pitch, best.fold_turns) == (132, 1)


def test_signal_of_fewer_cells_than_a_window_has_smaller_windows():
    cropped = Problem(64, 256, 256, 1, (1, 260), (1, 2), (1, 1), (0, 16))  # 229 outputs
    assert {tile.window for tile in gemm_fold_pixels.tiles_of(cropped, 4, 132)} == {128}


@each_shuffle
def test_items_cover_all_positions(tile):
    p, (height, width) = tile.problem, tile.input_size
    assert height * width == p.in_pixels
    assert 0 <= tile.places * 128 - p.batch * p.in_pixels < 128
    assert p.in_pixels % 4 == 0


@each_shuffle
def test_blocks_of_lines_have_whole_rows_of_outputs(tile):
    assert 16 <= tile.lines <= 256
    if tile.packed and tile.problem.kernel_size[1] > 2:
        assert tile.lines % (4 * tile.problem.kernel_size[1]) == 0
