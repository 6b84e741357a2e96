"""The tiles of sm90/implicit_gemm_nhwc.cu leave out nothing, and what they promise of addresses holds."""

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from gemmconv import Problem
from gemmconv.kernels.phases import cells_of, phase_shifts
from gemmconv.kernels.sm90 import implicit_gemm_nhwc
from tests.examples import any_of, each_of


@st.composite
def tiles(draw, itemsizes=(2, 4), kind=lambda tile: True):
    """Any tile of a kind that a problem may have."""
    kernel_size = draw(st.sampled_from([(3, 3), (4, 4), (2, 1), (5, 4), (1, 16), (3, 5), (7, 7)]))
    stride = tuple(draw(st.integers(1, min(size, 8))) for size in kernel_size)
    padding = tuple(draw(st.integers(0, size // 2)) for size in kernel_size)
    dilation = draw(st.sampled_from([(1, 1), (1, 1), (1, 3), (2, 1)]))
    input_size = draw(st.integers(1, 80)), draw(st.integers(1, 400))
    assume(all(2 * pad < size + more - 1 for pad, size, more in zip(padding, input_size, kernel_size, strict=True)))
    batch, in_channels, out_channels = (
        draw(st.integers(1, 300)),
        8 * draw(st.integers(1, 40)),
        8 * draw(st.integers(1, 40)),
    )
    problem = Problem(batch, in_channels, out_channels, 1, input_size, kernel_size, stride, padding, dilation=dilation)
    return any_of(draw, filter(kind, implicit_gemm_nhwc.tiles_of(problem, draw(st.sampled_from(itemsizes)), 132)))


each_tile = each_of(tiles())


def rows_of(tile, segment):
    """The image, row and column of a cell that each row of an item is, of those that are cells of its images."""
    height, _ = cells_of(tile.problem)
    places = []
    for row in range(tile.rows):
        image, place = divmod(row, height * tile.across) if tile.segments == 1 else (0, segment * tile.rows + row)
        cell = image, *divmod(place, tile.across)
        if image < tile.images and cell[1] < height and cell[2] < tile.strip_cells:
            places.append((row, *cell))
    return places


@each_tile
def test_items_have_every_cell_once(tile):
    p, (height, width) = tile.problem, cells_of(tile.problem)
    cells = [cell for segment in range(tile.segments) for _, *cell in rows_of(tile, segment)]
    assert len(cells) == tile.images * height * tile.strip_cells
    assert len({tuple(cell) for cell in cells}) == len(cells)
    assert (tile.strips - 1) * tile.strip_cells < width <= tile.strips * tile.strip_cells
    tiles = -(-p.batch // tile.images) * tile.strips * tile.segments
    assert tile.items == tiles * math.prod(p.stride) * tile.line_blocks
    assert 0 <= tile.line_blocks * tile.lines - p.out_channels < tile.lines


@each_tile
def test_patches_have_all_inputs_that_cells_read(tile):
    reach = [max(max(reads) - min(reads) for reads in phase_shifts(tile.problem, axis)) for axis in (0, 1)]
    rows, columns = tile.patch_size
    for segment in {0, tile.segments - 1}:
        found = rows_of(tile, segment)
        first = segment * tile.rows // tile.across if tile.segments > 1 else 0
        assert max(row for _, _, row, _ in found) - first + reach[0] < rows
        assert max(column for *_, column in found) + reach[1] < columns
    assert max(rows, columns, tile.images) <= 256
    assert tile.positions * 128 <= tile.slot_bytes
    assert tile.slot_bytes % 1024 == 0  # where the order of pieces begins


@given(tiles((2,), lambda tile: tile.group))
def test_groups_of_eight_rows_are_lines_as_far_apart(tile):
    for segment in {0, tile.segments - 1}:
        found = rows_of(tile, segment)
        first = segment * tile.rows // tile.across if tile.segments > 1 else 0
        lines = {
            row: (image * tile.patch_size[0] + cell_row - first) * tile.patch_size[1] + column
            for row, image, cell_row, column in found
        }
        for block in range(0, tile.rows, 64):
            origins = {
                line - (row - block) // 8 * tile.group - row % 8
                for row, line in lines.items()
                if block <= row < block + 64
            }
            assert len(origins) <= 1


@each_tile
def test_rings_fit_shared_memory_and_sums_registers(tile):
    slots, stages = tile.ring_sizes
    barriers = 2 * 8 * (4 + 12)  # of the most slots and stages
    assert slots * tile.slot_bytes + stages * tile.weight_bytes + tile.bias_bytes + barriers == tile.shared_bytes
    assert 2 <= slots <= 4
    assert 3 <= stages <= 12
    assert tile.lines % 32 == 0
    assert tile.lines * tile.row_blocks <= 256
    assert tile.itemsize == 2 or not tile.group
    assert not tile.packed or tile.problem.out_channels % tile.lines == 0
