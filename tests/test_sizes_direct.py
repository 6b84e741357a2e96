"""Kernels of direct, and those that transpose: a layer of any sizes has few, and a tile of one size computes others."""

import math
from dataclasses import replace
from random import Random

import pytest
import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.direct import forward, forward_mma, grads_mma, input_grad, weight_grad
from gemmconv.kernels.layout.transpose import transposition
from tests.samples import config_of, tile_for

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
LAYERS = {
    "k4s2p1": Problem(1, 64, 3, 1, (1, 1), (4, 4), (2, 2), (1, 1)),
    "k3s2p1op1": Problem(1, 32, 16, 1, (1, 1), (3, 3), (2, 2), (1, 1), (1, 1)),
    "k3s1p1": Problem(1, 16, 16, 1, (1, 1), (3, 3), (1, 1), (1, 1)),
    "depthwise": Problem(1, 32, 32, 32, (1, 1), (4, 4), (2, 2), (1, 1)),
    "grouped": Problem(1, 64, 64, 8, (1, 1), (5, 5), (2, 2), (2, 2), (1, 1)),
    "dilated": Problem(1, 16, 8, 1, (1, 1), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
}
PASSES = [
    (forward, "forward", "ieee"),
    (forward_mma, "forward", "tf32"),
    (input_grad, "input_grad", "ieee"),
    (weight_grad, "weight_grad", "ieee"),
    (weight_grad, "grads", "ieee"),
    (grads_mma, "grads", "tf32"),
]
each_pass = pytest.mark.parametrize(
    ("module", "direction", "precision"),
    PASSES,
    ids=[f"{module.KERNEL.name}-{direction}" for module, direction, _ in PASSES],
)


def compiled_for(kernel, config, direction, tile):
    """What is compiled for a tile, beside what adds up partial sums."""
    main = kernel.program(config, direction, tile).steps[0]
    return main.source, tuple(main.macros.items())


def configs(layer, dtype, precision, layout, beyond, count):
    """A layer at random sizes, of widths that are as far beyond a multiple of 16."""
    random = Random(f"{layer} {beyond}")
    for _ in range(count):
        size = random.randint(16, 159), 16 * random.randint(1, 9) + beyond
        problem = replace(LAYERS[layer], batch=random.randint(1, 64), input_size=size)
        yield config_of(problem, dtype, FORMATS[layout], precision)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@each_pass
def test_a_tile_is_compiled_once_for_all_sizes_of_a_class(module, direction, precision, layer, dtype):
    kernel = module.KERNEL
    for layout in FORMATS if direction == "forward" else ("contiguous",):
        for beyond in (0, 3 if dtype == torch.float32 else 6):
            found = [*configs(layer, dtype, precision, layout, beyond, 16)]
            tiles = [tile_for(module, config, direction) for config in found]
            if tiles[0] is None or kernel.seconds(found[0], direction, tiles[0]) == math.inf:
                continue
            each = [compiled_for(kernel, *of) for of in zip(found, [direction] * len(found), tiles, strict=True)]
            assert len(set(each)) <= 4
            for tile, compiled in zip(tiles[:2], each, strict=False):
                for config in found[2:10]:
                    fitted = kernel.fitted(config, direction, tile)
                    assert compiled_for(kernel, config, direction, fitted) == compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("channels", [3, 16, 66, 96])
def test_tensors_are_turned_by_few_kernels(channels, dtype):
    random = Random(channels)
    shapes = [(random.randint(1, 64), channels, random.randint(32, 159), random.randint(32, 159)) for _ in range(60)]
    for memory_format in FORMATS.values():
        launches = [transposition(shape, dtype.itemsize, memory_format)[0] for shape in shapes]
        assert len({(launch.source, *launch.macros.items()) for launch in launches}) <= 3
