"""Tiles of sm90/gemm_fold_narrow.cu made for images of one size, and images of others: one compiled kernel."""

import random
from dataclasses import replace

import pytest
import torch

from gemmconv import Problem
from gemmconv.kernels.sm90.gemm_fold_narrow import KERNEL, macros_of
from tests.samples import config_of

LAYERS = {
    "dcgan": Problem(16, 64, 3, 1, (32, 32), (4, 4), (2, 2), (1, 1)),
    "fsrcnn": Problem(4, 56, 1, 1, (128, 128), (9, 9), (3, 3), (4, 4), (2, 2)),
    "plain": Problem(8, 20, 4, 1, (64, 64), (3, 5), (1, 1), (1, 2)),
    "signal": Problem(8, 40, 2, 1, (1, 256), (1, 8), (1, 4), (0, 2)),
}
VARIANTS = [
    (torch.bfloat16, "ieee", torch.contiguous_format),
    (torch.bfloat16, "ieee", torch.channels_last),
    (torch.float32, "tf32", torch.contiguous_format),
    (torch.float32, "ieee", torch.channels_last),
]


def sizes(problem, itemsize, channels_last, rest=0):
    """Random batches and images of about the width of the first, whose rows lack `rest` elements of whole pieces."""
    rng, (height, width) = random.Random(5), problem.input_size
    unit = 1 if channels_last else 16 // itemsize
    for _ in range(8):
        across = rng.randrange(width // 2 + 1, width + 1) // unit * unit - rest
        down = 1 if height == 1 else rng.randrange(height // 2, 2 * height)
        yield replace(problem, batch=rng.randrange(1, 4 * problem.batch), input_size=(down, across))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("dtype", "precision", "layout"), VARIANTS)
def test_fitted_tiles_compile_alike(layer, dtype, precision, layout):
    channels_last, itemsize = layout is torch.channels_last, dtype.itemsize
    for rest in (0,) if channels_last else (0, 4 // itemsize):  # boxes and copies
        height, width = LAYERS[layer].input_size
        problem = replace(LAYERS[layer], input_size=(height, width - rest))
        tile = KERNEL.tile(config_of(problem, dtype, layout, precision), "forward")
        for other in sizes(LAYERS[layer], itemsize, channels_last, rest):
            config = config_of(other, dtype, layout, precision)
            fitted = KERNEL.fitted(config, "forward", tile)
            assert fitted.problem == other
            assert macros_of(fitted, dtype) == macros_of(tile, dtype)
            found = [one.segments for one in KERNEL.tiles(config, "forward") if replace(one, segments=1) == fitted]
            assert not found or fitted.segments in found


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("dtype", "precision", "layout"), VARIANTS)
def test_few_tiles_serve_all_images(layer, dtype, precision, layout):
    rng, found = random.Random(5), set()
    unit = 1 if layout is torch.channels_last else 16 // dtype.itemsize
    for _ in range(60):
        height = 1 if LAYERS[layer].input_size[0] == 1 else rng.randrange(16, 160)
        size = height, rng.randrange(16, 160) // unit * unit
        config = config_of(
            replace(LAYERS[layer], batch=rng.randrange(1, 65), input_size=size), dtype, layout, precision
        )
        found.add(tuple(macros_of(KERNEL.tile(config, "forward"), dtype).items()))
    assert 1 < len(found) <= 8


def test_tiles_of_other_classes_are_declined():
    config = config_of(LAYERS["dcgan"])
    tile = KERNEL.tile(config, "forward")
    assert tile.whole
    for width in (28, 30, 40):  # rows of 56 and 60 bytes, of which there are no boxes; more than a row has room for
        other = replace(config, problem=replace(config.problem, input_size=(32, width)))
        assert KERNEL.fitted(other, "forward", tile) is None
    huge = replace(config, problem=replace(config.problem, input_size=(2**21, 32)))
    assert KERNEL.fitted(huge, "forward", tile) is None  # offsets of 64 bits
    many = replace(config, problem=replace(config.problem, batch=2**31 - 40))
    assert KERNEL.fitted(many, "forward", tile) is None
