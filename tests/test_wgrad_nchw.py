"""The tiles of csrc/sm90/wgrad_nchw.cu leave out no weight and no pixel; what they promise holds. No kernel runs."""

import functools
import itertools
import math
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import SUITES
from gemmconv import Problem
from gemmconv.kernels.base import Config
from gemmconv.kernels.layout.transpose import transpose_seconds
from gemmconv.kernels.sm90 import wgrad_nchw
from gemmconv.kernels.sm90.implicit_gemm_plan import SHARED_BYTES
from tests.samples import tile_for

EXAMPLES = settings.default.max_examples
LIMIT = 64 << 20


@functools.cache
def random_tile(seed):
    """Any tile of a problem that has some."""
    random = Random(seed)
    while True:
        groups, itemsize = random.choice((1, 1, 2)), random.choice((2, 4))
        problem = Problem(
            batch=random.randint(1, 3),
            in_channels=groups * random.choice((1, 8, 20, 64, 200)),
            out_channels=groups * random.choice((4, 16, 70, 130)),
            groups=groups,
            input_size=(random.randint(1, 9), random.choice((random.randint(1, 80), 8 * random.randint(1, 12)))),
            kernel_size=(random.randint(1, 5), random.choice((1, 2, 3, 4, 5, 7, 16))),
            stride=(random.randint(1, 3), random.choice((1, 1, 2, 3, 4, 8))),
            padding=random.choice(((0, 0), (0, 0), (1, 1), (0, 2), (2, 4))),
            dilation=(random.randint(1, 2), random.choice((1, 1, 2, 3))),
        )
        if min(problem.output_size) > 0 and (
            tiles := [*wgrad_nchw.tiles_of(problem, itemsize, itemsize == 4 and random.random() < 0.5)]
        ):
            return random.choice(tiles)


each_tile = given(st.integers(0, 3 * EXAMPLES).map(random_tile))


@each_tile
def test_blocks_have_every_weight_of_a_group_once(tile):
    (ci, co), (kernel_h, kernel_w), (taps_h, taps_w) = tile.channels, tile.problem.kernel_size, tile.block_taps
    starts = [
        range(0, most, step)
        for most, step in ((ci, tile.ci_tile), (co, tile.block_co), (kernel_h, taps_h), (kernel_w, taps_w))
    ]
    assert tile.problem.groups * math.prod(map(len, starts)) == tile.weight_blocks
    # In a block, which warpgroup and row has which output channel, and which warpgroup which taps.
    classes = max(1, tile.planes)
    channels = Counter(
        row % (tile.block_co // classes) * classes + row // (tile.block_co // classes) for row in range(tile.block_co)
    )
    assert channels == Counter(range(tile.block_co))
    sides = itertools.product(range(tile.sides_h), range(tile.sides_w))
    taps = Counter(
        (h * tile.taps[0] + row, w * tile.taps[1] + column)
        for (h, w), row, column in itertools.product(sides, range(tile.taps[0]), range(tile.taps[1]))
    )
    assert taps == Counter(itertools.product(range(taps_h), range(taps_w)))


@each_tile
def test_slices_of_tiles_have_every_pixel_once(tile):
    height, width = tile.problem.input_size
    down, across = tile.tiles_image
    pixels = Counter()
    for row, column in itertools.product(range(down), range(across)):
        places = itertools.product(range(tile.rows), range(tile.tile_w))
        pixels.update((row * tile.rows + h, column * tile.tile_w + w) for h, w in places)
    inside = {place: count for place, count in pixels.items() if place[0] < height and place[1] < width}
    assert inside == dict.fromkeys(itertools.product(range(height), range(width)), 1)
    for limit in (LIMIT, 4 * math.prod(tile.problem.weight_shape) + tile.padded_bytes):
        slices = tile.slices(limit)
        assert 1 <= slices <= tile.tiles
        assert slices * 4 * math.prod(tile.problem.weight_shape) + tile.padded_bytes <= limit
    assert tile.slices(4 * math.prod(tile.problem.weight_shape) + tile.padded_bytes - 1) == 0


@each_tile
def test_pieces_have_what_the_taps_read(tile):
    """Every tap of every pixel finds its element in the slot that its segment is told, at its place."""
    (stride_h, stride_w), (dilation_h, dilation_w) = tile.problem.stride, tile.problem.dilation
    shifts = range(tile.odd, tile.shift + 1, tile.word_elements) if tile.planes else [tile.shift]
    for shift in shifts:
        for pixel, tap_h, tap_w in itertools.product(range(tile.lines * tile.pixels), *map(range, tile.block_taps)):
            row, column = divmod(pixel, tile.tile_w)
            slot_row, slot_column = tile.slots[tile.slot_of[pixel // tile.segment][tap_h]]
            assert slot_row == row * stride_h + tap_h * dilation_h
            place = shift + column * stride_w + tap_w * dilation_w - slot_column
            assert place == shift + pixel % tile.segment * stride_w + tap_w * dilation_w
            assert 0 <= place < tile.row_pitch


@each_tile
def test_rows_are_whole_pieces_and_boxes_have_all_of_a_tensor(tile):
    assert tile.stages >= 2
    assert tile.shared_bytes <= SHARED_BYTES - 1024 + 24 * 8
    assert tile.row_pitch * tile.itemsize % 16 == 0
    assert tile.row_pitch % (tile.vector * tile.word_elements) == 0
    assert tile.problem.stride[1] % tile.vector == 0
    for spec in wgrad_nchw.maps_of(tile):
        assert (spec.itemsize, spec.steps) == (tile.itemsize, (1, 1, 1, 1))
    elements = [math.prod(spec.sizes) for spec in wgrad_nchw.maps_of(tile)]
    padded = tile.padded_bytes // tile.itemsize
    assert elements == [padded or math.prod(tile.problem.input_shape), math.prod(tile.problem.output_shape)]


def test_channels_last_takes_the_same_tile_and_the_time_to_turn():
    problem = next(workload.problem for workload in SUITES["models"] if workload.name == "unet1")
    nchw, last = (
        Config(problem, torch.float32, torch.device("cuda", 0), "ieee", memory_format=memory_format)
        for memory_format in (torch.contiguous_format, torch.channels_last)
    )
    assert tile_for(wgrad_nchw, last) == tile_for(wgrad_nchw, nchw) is not None
    tile = tile_for(wgrad_nchw, nchw)
    estimates = [wgrad_nchw.KERNEL.seconds(config, "weight_grad", tile) for config in (nchw, last)]
    assert transpose_seconds(last) > 0
    assert estimates[1] - estimates[0] == pytest.approx(transpose_seconds(last))


def test_a_copy_of_the_input_counts_as_workspace():
    problem = Problem(2, 16, 16, 1, (4, 14), (2, 2), (2, 2))
    config = Config(problem, torch.float16, torch.device("cuda", 0), "ieee")
    tile = tile_for(wgrad_nchw, config)
    assert tile.input_width == 16
    assert tile.padded_bytes == 2 * 16 * 4 * 16 * 2
    assert tile.workspace_bytes(config.workspace_limit) > tile.padded_bytes
    less = Config(problem, torch.float16, torch.device("cuda", 0), "ieee", workspace_limit=tile.padded_bytes)
    assert tile_for(wgrad_nchw, less) is None


def test_images_that_padded_rows_make_too_large_are_left_to_others():
    many, too_many = (
        [*wgrad_nchw.tiles_of(Problem(1, 1, 1, 1, (rows, 1), (1, 1)), 4, False)]
        for rows in ((1 << 29) - 4, 1 << 29)  # of one pixel, which become rows of four
    )
    assert many
    assert not too_many
