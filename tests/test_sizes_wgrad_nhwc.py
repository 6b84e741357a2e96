"""What sm90/wgrad_nhwc.cu is compiled for serves a layer at other sizes, and a layer is compiled for few tiles."""

from dataclasses import replace
from random import Random

import pytest
import torch

from gemmconv import Problem
from gemmconv.kernels.sm90 import wgrad_nhwc
from tests import emulator
from tests.cases import Case
from tests.samples import config_of, problem_of
from tests.test_kernels import Run

LAYERS = [
    Problem(8, 256, 128, 1, (32, 24), (4, 4), (2, 2), (1, 1)),
    Problem(16, 128, 192, 2, (56, 56), (3, 3), (1, 1), (1, 1)),
    Problem(4, 64, 96, 1, (61, 99), (5, 3), (2, 1), (2, 0), (1, 0), (1, 2)),
    Problem(16, 64, 32, 1, (1, 3000), (1, 4), (1, 2), (0, 1)),
    Problem(64, 128, 64, 1, (4, 4), (4, 4), (2, 2), (1, 1)),
]
KERNEL = wgrad_nhwc.KERNEL


def config_for(problem):
    return config_of(problem, torch.float16, torch.channels_last)


def compiled_for(config, tile):
    (main, _) = KERNEL.program(config, "weight_grad", tile).steps
    return main.macros


def sizes_of(problem, count):
    """The layer at sizes up to twice and down to half as large."""
    random = Random(str(problem))
    for _ in range(count):
        batch, *size = (random.randint(-(-n // 2), 2 * n) for n in (problem.batch, *problem.input_size))
        yield replace(problem, batch=batch, input_size=tuple(size))


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_tile_serves_other_sizes_as_it_is_compiled(layer):
    config = config_for(layer)
    tile = KERNEL.tile(config, "weight_grad")
    assert KERNEL.fitted(config, "weight_grad", tile) == tile
    served = 0
    for problem in sizes_of(layer, 12):
        other = config_for(problem)
        fitted = KERNEL.fitted(other, "weight_grad", tile)
        wanted = replace(tile, problem=problem)
        if tile.slices(config.workspace_limit) > 1 == wanted.slices(other.workspace_limit):
            assert fitted is None
        else:
            served += 1
            assert fitted == wanted
            assert compiled_for(config, tile) == compiled_for(other, fitted)
    assert served >= 8


@pytest.mark.parametrize("layer", LAYERS[:3], ids=str)
def test_layers_are_compiled_for_three_tiles(layer):
    random, compiled = Random(3), set()
    for _ in range(60):
        size = random.randint(16, 159), random.randint(16, 159)
        config = config_for(replace(layer, batch=random.randint(1, 64), input_size=size))
        compiled.add(str(compiled_for(config, KERNEL.tile(config, "weight_grad"))))
    assert len(compiled) <= 3


def test_single_slice_is_not_made_of_several():
    """The type of partial sums, which is compiled, is another where there is one slice."""
    several = config_for(Problem(32, 2048, 256, 1, (32, 32), (4, 4), (2, 2), (1, 1)))
    single = replace(several, problem=replace(several.problem, batch=1, input_size=(4, 4)))
    tile = KERNEL.tile(single, "weight_grad")
    assert tile.slices(single.workspace_limit) == 1
    other = replace(LAYERS[0], input_size=(1, 1), batch=1)
    tile = KERNEL.tile(config_for(LAYERS[0]), "weight_grad")
    assert tile.slices(several.workspace_limit) > 1
    assert KERNEL.fitted(config_for(other), "weight_grad", tile) is None


@pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler (g++ or c++) to emulate with")
@pytest.mark.parametrize("other", [(3, (21, 9)), (1, (8, 33))], ids=str)
def test_fitted_tile_computes_the_other_size(other, builder, poison):
    case = Case(2, 24, 16, (16, 16), (3, 3), (1, 1), (1, 1))
    tile = KERNEL.tile(config_for(problem_of(case)), "weight_grad")
    case = replace(case, batch=other[0], input_size=other[1])
    config = config_for(problem_of(case))
    fitted = KERNEL.fitted(config, "weight_grad", tile)
    assert fitted.tiles_image != tile.tiles_image
    run = Run("fused_weight_grad_lines", case, torch.float16, "channels_last", choice=fitted)
    poison("cpu")
    with emulator.install(builder):
        run.check(run.prepare())
