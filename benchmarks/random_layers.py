"""Layers that nobody picked: realistic ones at random, the same for a seed.

    python -m benchmarks.compare --random 7

Channels are 1 to 1024, kernels 1 to 9, strides up to the kernel; sizes of images are 4 to 256 each way and multiples of
nothing, batches 1 to 64. Some are of height 1, in groups, depthwise or dilated. None is larger than fits in a second.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.workloads import Workload
from gemmconv.geometry import Pair, Problem

COUNT = 100  # layers of a seed
_MOST_FLOPS, _MOST_BYTES = 4e11, 1 << 30  # of a forward pass; of all its tensors in float32


def random_layers(seed: int, count: int = COUNT) -> tuple[Workload, ...]:
    """The first layers of a seed.

    >>> random_layers(0, 3) == random_layers(0, 5)[:3]
    True
    """
    draw, found = random.Random(seed), list[Workload]()
    while len(found) < count:
        problem = _layer(draw)
        if min(problem.output_size) < 1 or problem.useful_flops > _MOST_FLOPS or problem.least_bytes(4) > _MOST_BYTES:
            continue
        bias = draw.random() < 0.5
        found.append(Workload(f"random{seed}_{len(found)}", f"random-{seed}", problem, bias))
    return tuple(found)


def _layer(draw: random.Random) -> Problem:
    """Any layer, which may be too large, or have no outputs."""
    depthwise, flat = draw.random() < 0.1, draw.random() < 0.2
    kernel_w = draw.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9))
    kernel = (1 if flat else kernel_w if draw.random() < 0.85 else draw.randint(1, 9)), kernel_w
    stride_w = draw.randint(1, min(kernel_w, 8))
    stride = (min(kernel[0], stride_w) if draw.random() < 0.9 else draw.randint(1, kernel[0])), stride_w
    dilation = (2, 2) if not flat and draw.random() < 0.08 else (1, 1)
    padding = _each(lambda axis: draw.randint(0, dilation[axis] * (kernel[axis] - 1) // 2))
    output_padding = _each(lambda axis: draw.randint(0, max(stride[axis], dilation[axis]) - 1) * (draw.random() < 0.3))
    groups, channels_in, channels_out = 1, _channels(draw), _channels(draw)
    if depthwise:
        groups = channels_out = channels_in
    elif draw.random() < 0.1:
        groups = draw.choice((2, 4, 8))
        channels_in, channels_out = (-(-count // groups) * groups for count in (channels_in, channels_out))
    size = (1 if flat else _extent(draw)), _extent(draw)
    batch = round(2 ** draw.uniform(0, 6))
    return Problem(batch, channels_in, channels_out, groups, size, kernel, stride, padding, output_padding, dilation)


def _each(value: Callable[[int], int]) -> Pair:
    return value(0), value(1)


def _channels(draw: random.Random) -> int:
    """Mostly multiples of 8, as people take, but any number too, and few as images have."""
    kind = draw.random()
    if kind < 0.15:
        return draw.choice((1, 2, 3, 4))
    count = round(2 ** draw.uniform(3, 10))
    return count if kind > 0.8 else max(8, round(count / 8) * 8)


def _extent(draw: random.Random) -> int:
    return round(2 ** draw.uniform(2, 8))
