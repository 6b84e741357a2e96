"""What sm90/implicit_gemm_nhwc.cu is compiled for serves a layer at other sizes, and computes them."""

from dataclasses import replace
from random import Random

import pytest
import torch

from gemmconv import Problem
from gemmconv.kernels.sm90 import implicit_gemm_nhwc
from tests import emulator
from tests.cases import Case
from tests.samples import config_of, problem_of
from tests.test_kernels import Run

LAYERS = [
    Problem(8, 256, 128, 1, (32, 24), (4, 4), (2, 2), (1, 1)),
    Problem(16, 128, 192, 1, (14, 14), (3, 3), (1, 1), (1, 1)),
    Problem(4, 64, 96, 1, (61, 99), (5, 3), (2, 1), (2, 0), (1, 0), (1, 2)),
    Problem(3, 40, 32, 1, (1, 700), (1, 16), (1, 8), (0, 4)),
]
KERNEL = implicit_gemm_nhwc.KERNEL


def sizes_of(problem, seed, count=8):
    """The layer at sizes up to twice and down to half as large."""
    random = Random(seed)
    for _ in range(count):
        batch, *size = (random.randint(-(-n // 2), 2 * n) for n in (problem.batch, *problem.input_size))
        yield replace(problem, batch=batch, input_size=tuple(size))


def config_for(problem, itemsize):
    dtype, precision = {2: (torch.float16, "ieee"), 4: (torch.float32, "tf32")}[itemsize]
    return config_of(problem, dtype, torch.channels_last, precision)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_every_tile_serves_other_sizes_as_it_is_compiled(layer, itemsize):
    config = config_for(layer, itemsize)
    tiles = [*KERNEL.tiles(config, "forward")]
    assert 0 < len({str(KERNEL.program(config, "forward", tile).steps[-1].macros) for tile in tiles}) <= 7
    for tile in tiles:
        compiled = [(step.source, step.macros) for step in KERNEL.program(config, "forward", tile).steps]
        assert KERNEL.fitted(config, "forward", tile).cycles <= tile.cycles
        for problem in sizes_of(layer, str(tile)):
            other = config_for(problem, itemsize)
            fitted = KERNEL.fitted(other, "forward", tile)
            assert fitted.possible
            assert fitted.problem == problem
            assert compiled == [(step.source, step.macros) for step in KERNEL.program(other, "forward", fitted).steps]


SQUARE, WIDE = Case(7, 40, 32, (5, 4), (4, 4), (2, 2), (1, 1)), Case(2, 24, 32, (11, 30), (3, 3), (1, 1), (1, 1))
# A case, bytes of an element, the first of its tiles that suits; a size that it is made for, and what it is then like.
FITTED = {
    "whole images to strips": (SQUARE, 4, lambda tile: tile.images > 1, (2, (13, 19)), lambda tile: tile.strips > 1),
    "whole images to parts": (SQUARE, 4, lambda tile: tile.images > 1, (1, (61, 3)), lambda tile: tile.segments > 1),
    "lines to narrow images": (WIDE, 2, lambda tile: tile.group == 8, (3, (40, 9)), lambda tile: tile.group == 8),
    "lines to eights, the last of one": (
        WIDE,
        2,
        lambda tile: tile.group == 8,
        (3, (7, 25)),
        lambda tile: tile.group > 8,
    ),
}


@pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler (g++ or c++) to emulate with")
@pytest.mark.parametrize("name", FITTED)
def test_fitted_tile_computes_the_other_size(name, builder, poison):
    case, itemsize, suits, (batch, size), wanted = FITTED[name]
    other = replace(case, batch=batch, input_size=size)
    tile = next(filter(suits, KERNEL.tiles(config_for(problem_of(case), itemsize), "forward")))
    fitted = KERNEL.fitted(config_for(problem_of(other), itemsize), "forward", tile)
    assert wanted(fitted)
    assert (fitted.images, fitted.strips, fitted.segments) != (tile.images, tile.strips, tile.segments)
    dtype = {2: torch.float16, 4: torch.float32}[itemsize]
    run = Run("implicit_gemm_nhwc", other, dtype, "channels_last", 3, fitted, tf32=itemsize == 4)
    poison("cpu")
    with emulator.install(builder):
        run.check(run.prepare())
