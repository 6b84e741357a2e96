"""Classes of sizes, whose tiles are found once and fitted to all sizes of the class.

What is compiled for a layer depends on the classes that its sizes are of, which are few. Which those are is a pure
function of the problem, and of nothing that was called or compiled before.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from gemmconv.geometry import Pair, Problem, output_extent
from gemmconv.kernels.base import Config
from gemmconv.kernels.integers import power_of_two

_VECTOR_BYTES = 16  # that memory is read and written by at most
_BLOCK = 64  # pixels: of what may come as blocks of whole images
# Pixels of all images, of a class: the more there are, the less a tile depends on how many.
_TOTALS = (*(1 << i for i in range(12)), *(1 << i for i in range(12, 26, 2)))
_SMALL = 256  # pixels of an image that is of a class of its own: how a tile covers it is what counts
_SHORT = 8  # inputs: shorter axes are as long in their class
_FLAT = 8  # times as wide as high, or as high as wide: what is no longer nearly square


@lru_cache(maxsize=4096)
def representatives(config: Config) -> tuple[Config, ...]:
    """Configurations that stand for the classes that one is of: the next with fewer pixels, and with more.

    Their images are as wide, to the next power of two, and as well aligned, but lower where one would be too large;
    small ones are the same, and the batches powers of two. On a CPU there are none.

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
    """``elements`` are those of 16 bytes."""
    height, width = problem.input_size
    pixels = problem.batch * height * width
    if pixels * problem.in_channels * problem.out_channels == 0:
        return ()
    if height * width <= _SMALL:
        above = min(power_of_two(problem.batch), _TOTALS[-1] // _SMALL)
        return tuple(replace(problem, batch=one) for one in ([above // 2, above] if problem.batch < above else [above]))
    place = bisect.bisect_left(_TOTALS, pixels)
    totals = _TOTALS[place : place + 1] if pixels in _TOTALS else _TOTALS[max(0, place - 1) : place + 1]
    found: dict[Problem, None] = {}
    for total in totals:
        size = next(_sizes(problem, elements, total), problem.input_size)
        found[replace(problem, batch=max(1, round(total / math.prod(size))), input_size=size)] = None
    return tuple(found)


def _sizes(problem: Problem, elements: int, total: int) -> Iterator[Pair]:
    """Heights and widths of a class of so many pixels, the best first: aligned as those of the problem are."""
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
            if width % elements or _in_blocks(problem, new_height, new_width) == of_planes:
                yield new_height, new_width


def _aligned(problem: Problem, width: int, elements: int) -> Pair:
    """Which powers of two divide rows of inputs and outputs."""
    return math.gcd(width, elements), math.gcd(_output(problem, 1, width), elements)


def _in_blocks(problem: Problem, height: int, width: int) -> tuple[bool, bool]:
    """Whether planes of inputs and of outputs are whole blocks."""
    return height * width % _BLOCK == 0, _output(problem, 0, height) * _output(problem, 1, width) % _BLOCK == 0


def _output(problem: Problem, axis: int, size: int) -> int:
    return output_extent(
        size,
        problem.kernel_size[axis],
        problem.stride[axis],
        problem.padding[axis],
        problem.output_padding[axis],
        problem.dilation[axis],
    )
