"""Kernels as large as their stride: a tile of one size of a layer computes others, and nothing new is compiled."""

from random import Random

import pytest
import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.sm90 import gemm_depth_to_space
from tests import fitting
from tests.samples import config_of

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

NUMERICS = [(torch.float16, "ieee"), (torch.float32, "tf32")]
LAYERS = [(256, 256, (2, 2)), (128, 64, (4, 4)), (512, 256, (1, 2)), (96, 64, (2, 1))]
KERNEL = gemm_depth_to_space.KERNEL


def problem(layer, batch, size):
    in_channels, out_channels, kernel_size = layer
    return Problem(batch, in_channels, out_channels, 1, size, kernel_size, kernel_size)


@pytest.mark.parametrize(("dtype", "precision"), NUMERICS, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_tile_is_compiled_once_for_all_sizes_of_a_class(layer, dtype, precision):
    random = Random(3)
    config = config_of(problem(layer, 8, (24, 40)), dtype, precision=precision)
    others = [
        problem(layer, random.randint(1, 64), (random.randint(5, 120), 8 * random.randint(2, 20))) for _ in range(12)
    ]
    for tile in fitting.fitted(KERNEL, config, "forward", others):
        assert tile.cycles > 0
        assert tile.sets * tile.blocks >= tile.line_blocks


@pytest.mark.parametrize(("dtype", "precision"), NUMERICS, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_layer_of_any_sizes_has_few_kernels(layer, dtype, precision):
    random, compiled, classes = Random(7), set(), set()
    for _ in range(60):
        size = random.randint(16, 159), random.randint(16, 159)
        config = config_of(problem(layer, random.randint(1, 64), size), dtype, precision=precision)
        if (tile := KERNEL.tile(config, "forward")) is not None:
            compiled.add(str(fitting.kernels_of(KERNEL, config, "forward", tile)))
            classes.add((tile.piece, tile.paired))
    assert 0 < len(compiled) <= 2 * len(classes)


def test_other_pieces_and_odd_rows_are_other_kernels():
    layer = LAYERS[0]
    tile = KERNEL.tile(config_of(problem(layer, 8, (24, 40))), "forward")
    assert KERNEL.fitted(config_of(problem(layer, 8, (24, 41))), "forward", tile) is None
    assert KERNEL.fitted(config_of(problem(layer, 8, (6, 6))), "forward", tile) is None  # 36 inputs: no eight of them
    assert KERNEL.fitted(config_of(problem(layer, 8, (7, 7))), "forward", tile) is None  # nobody computes these
