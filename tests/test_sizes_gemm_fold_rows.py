"""Tiles of sm90/gemm_fold_rows.cu made for one size, and others: one compiled kernel."""

import random
from dataclasses import replace

import pytest
import torch

from gemmconv import Problem
from gemmconv.kernels.sm90.gemm_fold_rows import KERNEL, macros_of, packing_macros_of
from tests.samples import config_of

BF16, TF32 = (KERNEL, torch.bfloat16, "ieee"), (KERNEL, torch.float32, "tf32")
LAYERS = {
    "wide": (Problem(8, 64, 64, 1, (256, 256), (3, 3)), "forward"),
    "same": (Problem(8, 64, 48, 1, (256, 256), (3, 3), (1, 1), (1, 1)), "input_grad"),
    "doubled": (Problem(8, 64, 32, 1, (128, 128), (4, 4), (2, 2), (1, 1)), "forward"),
    "groups": (Problem(4, 64, 64, 2, (128, 128), (3, 3), (2, 1), (1, 2), (1, 0)), "forward"),
    "signal": (Problem(16, 64, 32, 1, (1, 4096), (1, 8), (1, 4), (0, 2)), "forward"),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("kernel", "dtype", "precision"), [BF16, TF32], ids=["bf16", "tf32"])
def test_fitted_tiles_compile_alike(kernel, dtype, precision, layer):
    rng, (problem, direction) = random.Random(5), LAYERS[layer]
    (height, width), piece = problem.input_size, 16 // dtype.itemsize
    tile = kernel.tile(config_of(problem, dtype, precision=precision), direction)
    for _ in range(10):
        # Rows of TF32 that do not all begin with a sector of 32 bytes are another class.
        size = rng.randrange(height // 2, height) + 1, rng.randrange(width // 2, width) // 8 * 8 + width % piece
        config = config_of(replace(problem, batch=rng.randrange(1, 64), input_size=size), dtype, precision=precision)
        fitted = kernel.fitted(config, direction, tile)
        assert fitted.problem == config.problem
        anew = replace(tile, problem=config.problem)  # for which nothing was worked out yet
        assert macros_of(fitted, dtype) == macros_of(tile, dtype) == macros_of(anew, dtype)
        assert packing_macros_of(fitted, dtype) == packing_macros_of(tile, dtype) == packing_macros_of(anew, dtype)
        assert all(getattr(fitted, name) == getattr(anew, name) for name in tile.of_layer)
        program, other = (kernel.program(config, direction, one) for one in (fitted, anew))
        assert program == other


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("kernel", "dtype", "precision"), [BF16, TF32], ids=["bf16", "tf32"])
def test_few_tiles_serve_all_images(kernel, dtype, precision, layer):
    rng, (problem, direction), found, packings = random.Random(5), LAYERS[layer], set(), set()
    for _ in range(60):
        size = 1 if layer == "signal" else rng.randrange(16, 160), rng.randrange(16, 160) // 8 * 8
        config = config_of(replace(problem, batch=rng.randrange(1, 65), input_size=size), dtype, precision=precision)
        if (tile := kernel.tile(config, direction)) is not None:
            found.add(tuple(macros_of(tile, dtype).items()))
            packings.add(tuple(packing_macros_of(tile, dtype).items()))
    assert len(packings) <= len(found) <= 5


def test_rows_that_begin_elsewhere_are_declined():
    kernel, dtype, precision = TF32
    problem = Problem(8, 64, 48, 1, (256, 252), (3, 5))  # rows of 256 outputs
    config, shorter, cut = (
        config_of(replace(problem, input_size=(256, width)), dtype, precision=precision) for width in (252, 250, 256)
    )
    whole = kernel.tile(config, "forward")
    assert not whole.whole_sectors
    assert kernel.fitted(shorter, "forward", whole) is kernel.fitted(cut, "forward", whole) is None
    fitted = kernel.fitted(config, "forward", kernel.tile(cut, "forward"))  # has no need of whole sectors, but may
    assert fitted.whole_sectors
    assert not fitted.cuts_sectors
    many = replace(config, problem=replace(problem, batch=2**28))
    assert kernel.fitted(many, "forward", whole) is None
