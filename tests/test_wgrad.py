"""Tiles of csrc/sm90/wgrad_nchw.cu and wgrad_nhwc.cu leave out no weight and no pixel, and keep promises.

No kernel runs.
"""

import functools
import itertools
import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import SUITES
from gemmconv import Problem
from gemmconv.kernels.layout.transpose import transpose_seconds
from gemmconv.kernels.sm90 import wgrad_nchw, wgrad_nhwc
from gemmconv.kernels.sm90.base import SHARED_BYTES
from tests.samples import config_of, tile_for

LIMIT = 64 << 20


def random_nchw(random):
    """A problem whose tensors are in NCHW, and its tiles."""
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
    dtype, precision = (torch.float16, "ieee") if itemsize == 2 else (torch.float32, random.choice(("ieee", "tf32")))
    return problem, wgrad_nchw.KERNEL.tiles(config_of(problem, dtype, precision=precision), "weight_grad")


def random_nhwc(random):
    """A problem whose tensors are in channels_last, and its tiles."""
    groups = random.choice((1, 1, 2))
    problem = Problem(
        batch=random.randint(1, 5),
        in_channels=groups * random.choice((8, 40, 64, 200)),
        out_channels=groups * random.choice((8, 64, 72, 136)),
        groups=groups,
        input_size=(random.randint(1, 17), random.randint(1, 40)),
        kernel_size=(random.randint(1, 5), random.choice((1, 2, 3, 4, 5, 7, 16))),
        stride=(random.choice((1, 1, 2, 3, 9)), random.choice((1, 1, 2, 3, 4, 8, 10, 16))),
        padding=random.choice(((0, 0), (0, 0), (1, 1), (0, 2), (2, 4))),
        dilation=(random.randint(1, 2), random.choice((1, 1, 2, 3))),
    )
    return problem, wgrad_nhwc.KERNEL.tiles(config_of(problem, layout=torch.channels_last), "weight_grad")


@functools.cache
def random_tile(make, seed):
    """Any tile of a problem that has some."""
    random = Random(seed)
    while True:
        problem, tiles = make(random)
        if min(problem.output_size) > 0 and (tiles := [*tiles]):
            return random.choice(tiles)


SEEDS = st.integers(0, 3 * settings.default.max_examples)
each_nchw, each_nhwc = (given(SEEDS.map(functools.partial(random_tile, make))) for make in (random_nchw, random_nhwc))


@each_nchw
def test_blocks_have_every_weight_of_a_group_once_nchw(tile):
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


@each_nchw
def test_slices_of_tiles_have_every_pixel_once_nchw(tile):
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


@each_nchw
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


@each_nchw
def test_rows_are_whole_pieces(tile):
    assert tile.stages >= 2
    assert tile.shared_bytes <= SHARED_BYTES - 1024 + 24 * 8
    assert tile.row_pitch * tile.itemsize % 16 == 0
    assert tile.row_pitch % (tile.vector * tile.word_elements) == 0
    assert tile.problem.stride[1] % tile.vector == 0


def test_channels_last_takes_the_same_tile_and_the_time_to_turn():
    problem = next(workload.problem for workload in SUITES["models"] if workload.name == "unet1")
    nchw, last = (
        config_of(problem, torch.float32, memory_format)
        for memory_format in (torch.contiguous_format, torch.channels_last)
    )
    assert tile_for(wgrad_nchw, last) == tile_for(wgrad_nchw, nchw) is not None
    tile = tile_for(wgrad_nchw, nchw)
    estimates = [wgrad_nchw.KERNEL.seconds(config, "weight_grad", tile) for config in (nchw, last)]
    assert transpose_seconds(last) > 0
    assert estimates[1] - estimates[0] == pytest.approx(transpose_seconds(last))


def test_a_copy_of_the_input_counts_as_workspace():
    problem = Problem(2, 16, 16, 1, (4, 14), (2, 2), (2, 2))
    config = config_of(problem)
    tile = tile_for(wgrad_nchw, config)
    assert tile.input_width == 16
    assert tile.padded_bytes == 2 * 16 * 4 * 16 * 2
    assert tile.workspace_bytes(config.workspace_limit) > tile.padded_bytes
    assert tile_for(wgrad_nchw, replace(config, workspace_limit=tile.padded_bytes)) is None


def test_images_that_padded_rows_make_too_large_are_left_to_others():
    for rows in ((1 << 29) - 4, 1 << 29):  # of one pixel, which become rows of four
        config = config_of(Problem(1, 1, 1, 1, (rows, 1), (1, 1)), torch.float32)
        tiles = [*wgrad_nchw.KERNEL.tiles(replace(config, workspace_limit=1 << 40), "weight_grad")]
        assert bool(tiles) == (rows < 1 << 29)


def taps_of(taps, first):
    """The taps of a block that begins with one."""
    return [first + i % taps.boxes + i // taps.boxes * taps.step for i in range(taps.taps)]


@each_nhwc
def test_blocks_have_every_weight_of_a_group_once_nhwc(tile):
    for taps in (tile.taps_h, tile.taps_w):
        counts = Counter(tap for first in taps.firsts for tap in taps_of(taps, first))
        assert {tap: count for tap, count in counts.items() if tap < taps.kernel} == dict.fromkeys(
            range(taps.kernel), 1
        )
    (ci, co), (block_ci, block_co) = tile.channels, (64 * tile.sides[0], 64 * tile.sides[1])
    blocks = -(-ci // block_ci) * -(-co // block_co) * len(tile.taps_h.firsts) * len(tile.taps_w.firsts)
    assert tile.problem.groups * blocks == tile.weight_blocks
    assert block_ci < ci + 64
    assert block_co < co + 64


@each_nhwc
def test_slices_of_tiles_have_every_pixel_once_nhwc(tile):
    images, height, width = tile.size
    down, across = tile.tiles_image
    assert (down - 1) * height < tile.problem.input_size[0] <= down * height
    assert (across - 1) * width < tile.problem.input_size[1] <= across * width
    assert images == 1 or (down, across) == (1, 1)
    assert tile.tiles == -(-tile.problem.batch // images) * down * across
    weight_bytes = 4 * math.prod(tile.problem.weight_shape)
    for limit in (LIMIT, weight_bytes):
        slices = tile.slices(limit)
        assert 1 <= slices <= tile.tiles
        assert tile.workspace_bytes(limit) == (weight_bytes // 2 if slices == 1 else slices * weight_bytes) <= limit
    assert tile.slices(weight_bytes - 1) == 0


@each_nhwc
def test_boxes_have_what_the_taps_read(tile):
    """A step is twice eight lines one after the other, all steps alike, and each tap finds its outputs."""
    assert tile.stages >= 2
    _, height, width = tile.size
    _, box_height, box_width = tile.box

    def box_line(pixel):
        row = pixel // width
        return (row // height * box_height + row % height) * box_width + pixel % width

    halves = [range(8 * i, 8 * i + 8) for i in range(tile.pixels // 8)]
    if tile.pair_rows:
        row = width // 8
        order = [
            halves[2 * r * row + h * row + c]
            for r in range(len(halves) // (2 * row))
            for c in range(row)
            for h in (0, 1)
        ]
        assert sorted(order, key=min) == halves
        halves = order
    for half in halves:
        assert [box_line(pixel) - box_line(half[0]) for pixel in half] == [*range(8)]
    pairs = [*zip(halves[::2], halves[1::2], strict=True)]
    assert len({second[0] - first[0] for first, second in pairs}) == 1
    assert len({box_line(second[0]) - box_line(first[0]) for first, second in pairs}) == 1
    p = tile.problem
    for axis, taps, size in ((0, tile.taps_h, height), (1, tile.taps_w, width)):
        stride, dilation, extent = p.stride[axis], p.dilation[axis], tile.box[1 + axis]
        for i, tap in enumerate(taps_of(taps, 0)):
            box, shift = i % taps.boxes * dilation, i // taps.boxes * taps.shift
            for place in {0, size - 1}:
                assert place + shift < extent
                assert box + (place + shift) * stride == place * stride + tap * dilation


def test_weights_that_the_workspace_has_no_room_for_are_declined():
    config = config_of(Problem(2, 16, 16, 1, (4, 16), (2, 2), (2, 2)), torch.bfloat16)
    assert tile_for(wgrad_nhwc, config) is not None
    assert tile_for(wgrad_nhwc, replace(config, workspace_limit=1)) is None
