"""A tile of a layer, made for other sizes: nothing new is compiled for it, and it computes what it should."""

from dataclasses import replace

import torch

from gemmconv.kernels.base import Config
from tests import emulator, reference
from tests.cases import Case
from tests.samples import expected, problem_of, sample

CPU = torch.device("cpu")


def kernels_of(kernel, config, direction, tile):
    """What is compiled for a tile."""
    return [(step.source, step.macros) for step in kernel.program(config, direction, tile).steps]


def fitted(kernel, config, direction, problems):
    """The tile of a configuration, made for other problems of its layer, each with the same kernels."""
    tile = kernel.tile(config, direction)
    compiled = kernels_of(kernel, config, direction, tile)
    for problem in problems:
        there = replace(config, problem=problem)
        made = kernel.fitted(there, direction, tile)
        assert made is not None, problem
        assert made.problem == problem
        assert kernels_of(kernel, there, direction, made) == compiled, problem
        yield made


def check(kernel, direction, case: Case, other: Case, dtype, precision, builder, multiprocessors=3):
    """Check on the CPU what a kernel computes for a case with the tile of another one of its layer."""
    config = Config(problem_of(case), dtype, CPU, precision)
    config = replace(config, spec=replace(config.spec, multiprocessors=multiprocessors))
    (tile,) = fitted(kernel, replace(config, problem=problem_of(other)), direction, [config.problem])
    data, exact = sample(case, dtype, "cpu"), expected(case, dtype)
    with emulator.install(builder):
        call = kernel.prepare(config, direction, tile)
        if direction == "forward":
            actual, wanted = call(data.input, data.weight, data.bias), exact.output
        else:
            actual, wanted = call(data.grad_output, data.input), exact.weight_grad
    reference.assert_close(actual, wanted, dtype, precision)
