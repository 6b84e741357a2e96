"""A tile of a layer, made for other sizes: nothing new is compiled for it, and it computes what it should."""

from dataclasses import replace


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
