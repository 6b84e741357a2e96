"""The tiles of csrc/sm90/wgrad_nhwc.cu leave out no weight and no pixel, and keep promises. No kernel runs."""

import functools
import math
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import SUITES
from gemmconv import Problem
from gemmconv.algorithms import fused
from gemmconv.kernels.base import Config
from gemmconv.kernels.sm90 import wgrad_nhwc
from gemmconv.kernels.sm90.implicit_gemm_plan import SHARED_BYTES
from tests.samples import tile_for

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


tiles = st.integers(0, 3 * EXAMPLES).map(random_tile)


def taps_of(taps, first):
    """The taps of a block that begins with one."""
    return [first + i % taps.boxes + i // taps.boxes * taps.step for i in range(taps.taps)]


@given(tiles)
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


@given(tiles)
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


@given(tiles)
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


@given(tiles)
def test_stages_fit_and_boxes_are_what_a_tensor_map_takes(tile):
    macros = wgrad_nhwc.macros_of(tile, torch.float16, 2)
    assert macros["STAGES"] >= 2
    assert macros["SHARED_BYTES"] <= SHARED_BYTES
    specs = wgrad_nhwc.maps_of(tile)
    for spec in specs:
        assert (spec.itemsize, spec.swizzled, spec.steps[0], spec.box[0]) == (2, True, 1, 64)
        assert not any(stride % 16 for stride in spec.strides)
        assert max(count * step for count, step in zip(spec.box, spec.steps, strict=True)) <= 256
        assert max(spec.sizes) < 2**31
        assert max(spec.steps) <= 8
    assert [math.prod(spec.sizes) for spec in specs] == [
        *map(math.prod, (tile.problem.input_shape, tile.problem.output_shape))
    ]


@pytest.mark.parametrize(
    "problem",
    [
        Problem(2, 64, 64, 1, (32, 32), (16, 16), (16, 16)),  # steps of a tensor map
        Problem(2, 64, 64, 1, (32, 32), (3, 3), (1, 9)),
        Problem(1, 65536, 65536, 1, (8, 8), (2, 2)),  # 2^31 pieces of 16 bytes of weights
        Problem(1, 8, 8, 1, (1, 64), (1, 9), (1, 1), (0, 1 << 32), dilation=(1, 1 << 30)),  # places of outputs
        Problem(1, 12, 64, 1, (32, 32), (3, 3)),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_reach_has_no_tile(problem):
    assert wgrad_nhwc.tile_of(problem, 1 << 40) is None


@pytest.mark.parametrize("name", ["kb57", "pose3", "dcgan3", "unet1", "stylegan_up256", "hifigan2"])
def test_real_layers_take_the_kernel_in_channels_last(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # asked as if on Hopper
    (workload,) = (one for suite in ("public", "models") for one in SUITES[suite] if one.name == name)
    last, nchw = (
        Config(workload.problem, torch.float16, torch.device("cuda", 0), memory_format=memory_format)
        for memory_format in (torch.channels_last, torch.contiguous_format)
    )
    tile = tile_for(wgrad_nhwc, last)
    assert tile == tile_for(wgrad_nhwc, nchw) is not None
    assert fused.Fused().choice(last, "weight_grad").kernel is wgrad_nhwc.KERNEL
    assert fused.Fused().workspace_bytes(last, "weight_grad") == tile.workspace_bytes(LIMIT) <= LIMIT
    assert not fused.Fused().transposes(last, "weight_grad")


def test_what_the_kernel_is_not_for_is_left_to_others():
    problem, odd = (Problem(2, channels, 16, 1, (4, 16), (2, 2), (2, 2)) for channels in (16, 20))
    device = torch.device("cuda", 0)
    assert tile_for(wgrad_nhwc, Config(problem, torch.bfloat16, device)) is not None
    assert tile_for(wgrad_nhwc, Config(problem, torch.float32, device, "tf32")) is None
    assert tile_for(wgrad_nhwc, Config(odd, torch.bfloat16, device)) is None
    assert tile_for(wgrad_nhwc, Config(problem, torch.bfloat16, device, workspace_limit=1)) is None
    large = Problem(1, 8, 8, 1, (1 << 16, 1 << 15), (1, 1))
    assert tile_for(wgrad_nhwc, Config(large, torch.bfloat16, device)) is None
