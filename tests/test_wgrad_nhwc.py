"""The tiles of csrc/sm90/wgrad_nhwc.cu leave out no weight and no pixel, and keep promises. No kernel runs."""

import functools
import math
from collections import Counter
from dataclasses import replace
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmconv import Problem
from gemmconv.kernels.sm90 import wgrad_nhwc
from tests.samples import config_of, tile_for

EXAMPLES = settings.default.max_examples
LIMIT = 64 << 20


@functools.cache
def random_tile(seed):
    """Any tile of a problem that has some."""
    random = Random(seed)
    while True:
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
        if min(problem.output_size) > 0 and (tiles := [*wgrad_nhwc.tiles_of(problem)]):
            return random.choice(tiles)


each_tile = given(st.integers(0, 3 * EXAMPLES).map(random_tile))


def taps_of(taps, first):
    """The taps of a block that begins with one."""
    return [first + i % taps.boxes + i // taps.boxes * taps.step for i in range(taps.taps)]


@each_tile
def test_blocks_have_every_weight_of_a_group_once(tile):
    for taps in (tile.taps_h, tile.taps_w):
        counts = Counter(tap for first in taps.firsts for tap in taps_of(taps, first))
        assert {tap: count for tap, count in counts.items() if tap < taps.kernel} == dict.fromkeys(
            range(taps.kernel), 1
        )
    (ci, co), (block_ci, block_co) = tile.channels, tile.block_channels
    blocks = -(-ci // block_ci) * -(-co // block_co) * len(tile.taps_h.firsts) * len(tile.taps_w.firsts)
    assert tile.problem.groups * blocks == tile.weight_blocks
    assert block_ci < ci + 64
    assert block_co < co + 64


@each_tile
def test_slices_of_tiles_have_every_pixel_once(tile):
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


@each_tile
def test_boxes_have_what_the_taps_read(tile):
    """A step is twice eight lines one after the other, all steps alike, and each tap finds its outputs."""
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


@each_tile
def test_boxes_are_swizzled_lines_and_have_all_of_a_tensor(tile):
    assert wgrad_nhwc.macros_of(tile, torch.float16, 2)["STAGES"] >= 2
    specs = wgrad_nhwc.maps_of(tile)
    for spec in specs:
        assert (spec.itemsize, spec.swizzled, spec.steps[0], spec.box[0]) == (2, True, 1, 64)
    assert [math.prod(spec.sizes) for spec in specs] == [
        *map(math.prod, (tile.problem.input_shape, tile.problem.output_shape))
    ]


def test_weights_that_the_workspace_has_no_room_for_are_declined():
    config = config_of(Problem(2, 16, 16, 1, (4, 16), (2, 2), (2, 2)), torch.bfloat16)
    assert tile_for(wgrad_nhwc, config) is not None
    assert tile_for(wgrad_nhwc, replace(config, workspace_limit=1)) is None
