"""Weight gradients in NCHW: a layer of any sizes has few kernels, and a tile of one size computes others."""

from random import Random

import pytest
import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.sm90 import wgrad_nchw
from tests import fitting
from tests.samples import config_of

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

LAYERS = {
    "k4s2p1": {"in_channels": 64, "out_channels": 48, "kernel_size": (4, 4), "stride": (2, 2), "padding": (1, 1)},
    "k2s2": {"in_channels": 32, "out_channels": 64, "kernel_size": (2, 2), "stride": (2, 2)},
    "k3s1p1": {"in_channels": 64, "out_channels": 64, "kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1)},
}
NUMERICS = [(torch.float16, "ieee"), (torch.float32, "tf32"), (torch.float32, "ieee")]
KERNEL = wgrad_nchw.KERNEL


def problem(layer, batch, size):
    return Problem(batch=batch, input_size=size, groups=1, **LAYERS[layer])


@pytest.mark.parametrize(("dtype", "precision"), NUMERICS, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_tile_is_compiled_once_for_all_sizes_of_a_class(layer, dtype, precision):
    """Sizes of one class have rows of outputs that are whole 16 bytes, or that are not."""
    random = Random(layer)
    for odd in (0, 2) if layer == "k3s1p1" else (0, 1):  # beside multiples of eight
        config = config_of(problem(layer, 8, (40, 56 + odd)), dtype, precision=precision)
        if KERNEL.tile(config, "weight_grad") is None:
            continue
        sizes = [(random.randint(8, 90), 8 * random.choice((3, 5, 7, 9, 13)) + odd) for _ in range(8)]
        others = [problem(layer, random.randint(1, 32), size) for size in sizes]
        for tile in fitting.fitted(KERNEL, config, "weight_grad", others):
            assert (tile.planes > 0) == (odd > 0)


@pytest.mark.parametrize(("dtype", "precision"), NUMERICS, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_of_any_sizes_has_few_kernels(layer, dtype, precision):
    random, compiled = Random(7), set()
    for _ in range(25):
        size = random.randint(16, 159), random.randint(16, 159)
        config = config_of(problem(layer, random.choice((1, 4, 16, 64)), size), dtype, precision=precision)
        if (tile := KERNEL.tile(config, "weight_grad")) is not None and not tile.flat:
            compiled.add(str(fitting.kernels_of(KERNEL, config, "weight_grad", tile)))
    assert 0 < len(compiled) <= 5


def test_lines_of_several_rows_are_for_one_width():
    config = config_of(problem("k4s2p1", 64, (8, 8)))
    tile = KERNEL.tile(config, "weight_grad")
    assert tile.flat
    assert KERNEL.fitted(config_of(problem("k4s2p1", 5, (9, 8))), "weight_grad", tile) is not None
    assert KERNEL.fitted(config_of(problem("k4s2p1", 5, (9, 12))), "weight_grad", tile) is None


def test_what_a_tile_cannot_compute_is_left_to_others():
    tile = KERNEL.tile(config_of(problem("k4s2p1", 4, (20, 24))), "weight_grad")
    assert KERNEL.fitted(config_of(problem("k4s2p1", 4, (20, 25))), "weight_grad", tile) is None  # rows of 100 bytes
