"""Size classes: a tile is found once for a class and fitted to all sizes of the class.

A layer has few classes, and all sizes of a class share one compiled kernel, so a new size in a known class compiles
nothing. The class is a pure function of the problem: earlier calls and compilations have no influence.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from gemmconv.geometry import Pair, Problem
from gemmconv.kernels.base import Config
from gemmconv.kernels.integers import power_of_two

_VECTOR_BYTES = 16  # widest load or store
_BLOCK = 64  # pixels of a block of whole images
# Pixels in all images of a class. Steps grow, since tiles depend less on the number of pixels the more there are.
_TOTALS = (*(1 << i for i in range(12)), *(1 << i for i in range(12, 26, 2)))
_SMALL = 256  # pixels: smaller images form a class of their own, since the way a tile covers them matters most
_SHORT = 8  # inputs: a shorter axis keeps its length in its class
_FLAT = 8  # ratio of width and height from which an image is not treated as nearly square


@lru_cache(maxsize=4096)
def representatives(config: Config) -> tuple[Config, ...]:
    """Configurations that represent the two classes of a configuration: the next with fewer pixels, and with more.

    Their images have the width's next power of two, the alignment of the original, and less height if one would be too
    large; small images keep their size. Batches are powers of two. A CPU has no classes.

    >>> import torch
    >>> config = Config(Problem(3, 8, 8, 1, (40, 50), (3, 3)), torch.float32, torch.device("cuda", 0))
    >>> [(one.problem.batch, one.problem.input_size) for one in representatives(config)]
    [(1, (62, 62)), (4, (62, 62))]
    """
    if config.device.type != "cuda":
        return ()
    problems = _problems(config.problem, max(1, _VECTOR_BYTES // config.dtype.itemsize))
    return tuple(replace(config, problem=problem) for problem in problems)


@lru_cache(maxsize=4096)
def _problems(problem: Problem, elements: int) -> tuple[Problem, ...]:
    """The problems that represent the classes of a problem; ``elements`` is the number of elements in 16 bytes."""
    height, width = problem.input_size
    pixels = problem.batch * height * width
    if pixels * problem.in_channels * problem.out_channels == 0:
        return ()
    if height * width <= _SMALL:
        above = min(power_of_two(problem.batch), _TOTALS[-1] // _SMALL)
        return tuple(replace(problem, batch=one) for one in ([above // 2, above] if problem.batch < above else [above]))
    totals = _TOTALS[bisect.bisect_right(_TOTALS, pixels) - 1 : bisect.bisect_left(_TOTALS, pixels) + 1]
    sizes = ((total, next(_sizes(problem, elements, total), problem.input_size)) for total in totals)
    batches = ((max(1, round(total / math.prod(size))), size) for total, size in sizes)
    return tuple(dict.fromkeys(replace(problem, batch=batch, input_size=size) for batch, size in batches))


def _sizes(problem: Problem, elements: int, total: int) -> Iterator[Pair]:
    """Heights and widths of a class with ``total`` pixels, the best first, aligned like those of the problem."""
    height, width = problem.input_size
    of_width, of_planes = _aligned(problem, width, elements), _in_blocks(problem, height, width)
    top = power_of_two(width)
    for new_width in range(top, max(0, top - _BLOCK), -1):
        if _aligned(problem, new_width, elements) != of_width:
            continue
        if height < _SHORT:
            most = height
        elif height * _FLAT <= width:
            most = max(2, new_width // _FLAT)
        else:
            most = new_width if height < _FLAT * width else new_width * _FLAT
        if height >= _SHORT:  # no more than one image
            most = min(most, max(_SHORT, total // new_width))
        for new_height in range(most, max(0, most - _BLOCK), -1):
            has_outputs = min(_output(problem, 0, new_height), _output(problem, 1, new_width)) > 0
            if has_outputs and (width % elements or _in_blocks(problem, new_height, new_width) == of_planes):
                yield new_height, new_width


def _aligned(problem: Problem, width: int, elements: int) -> Pair:
    """The greatest powers of two, at most ``elements``, that divide rows of inputs and of outputs."""
    return math.gcd(width, elements), math.gcd(_output(problem, 1, width), elements)


def _in_blocks(problem: Problem, height: int, width: int) -> tuple[bool, bool]:
    """Whether planes of inputs and of outputs are whole blocks."""
    return height * width % _BLOCK == 0, _output(problem, 0, height) * _output(problem, 1, width) % _BLOCK == 0


def _output(problem: Problem, axis: int, size: int) -> int:
    """The length of an axis of the output for another size of the input."""
    return problem.output_size[axis] + (size - problem.input_size[axis]) * problem.stride[axis]
