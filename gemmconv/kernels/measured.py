"""What a kernel is expected to take: its own estimate, corrected by what was measured of layers like the one asked for.

Kernels estimate their tiles well beside each other, but not beside other kernels', and nobody has a model of cuDNN.
So a correction follows, fitted by ``python -m benchmarks.fit`` to rows that ``python -m benchmarks.rows`` measured, for
each kernel, pass, precision and memory format apart. The logarithm of what was measured over the estimate is taken to
be linear in the logarithms of a layer's sizes (:func:`sizes`). Of torch's operator, whose kernels change with sizes in
steps, what the nearest layers were off by is added (kernel ridge regression with a Gaussian kernel). Corrections are
factors for the mean, not the likeliest time: what is less certain counts for more.

The numbers are in costs/measured.npz. What was not measured is not corrected.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import FOLDER

FILE = FOLDER / "measured.npz"
NATIVE = "native"
WIDTH = 0.03  # of the Gaussian kernel: exp(-WIDTH * distance**2), of sizes scaled to a spread of one
_FARTHEST = 4.0  # spreads from the mean: a layer that is farther is taken to lie there
_FORMATS = {torch.contiguous_format: "nchw", torch.channels_last: "channels_last"}
_LAUNCH_SECONDS, _REACHED = 3e-6, 0.7  # of a roofline: a launch, and the share of the rates that large layers reach


def sizes(problem: Problem) -> list[float]:
    """What corrections are linear in: a one, logarithms to base 2 of a layer's sizes, and what kind it is."""
    p = problem
    channels = p.in_channels // p.groups, p.out_channels // p.groups
    log, is_grouped, is_strided = math.log2, p.groups > 1, max(p.stride) > 1
    flops, moved, even = (
        log(max(1, p.useful_flops)),
        log(max(1, p.least_bytes(4))),
        math.gcd(p.in_channels, p.out_channels, 64),
    )
    of_even = float(even % 8 == 0)  # whether channels fill 16 bytes in every type
    return [
        1.0,
        flops,
        moved,
        *(log(min(count, 64)) for count in channels),
        *(log(max(count, 64)) for count in channels),
        log(p.taps),
        log(math.prod(p.stride)),
        log(max(1, min(p.in_pixels, 4096))),
        log(max(1, p.batch)),
        log(max(1, p.batch * p.in_pixels)),
        log(p.groups),
        *(log(math.gcd(count, 8)) for count in (p.in_channels, p.out_channels)),
        log(even),
        *(of_even * size for size in (1.0, flops - 30, moved - 24, *(log(min(count, 64)) for count in channels))),
        *(float(count == 1) for count in channels),
        float(is_grouped),
        float(is_grouped and max(channels) == 1),
        float(max(p.dilation) > 1),
        float(is_strided and max(p.dilation) > 1),
        float(p.taps == 1),
        float(p.input_size[0] == 1),
        float(p.stride[0] != p.stride[1]),
        float(any(step > kernel for step, kernel in zip(p.stride, p.kernel_size, strict=True))),
        float(any(more >= step for more, step in zip(p.output_padding, p.stride, strict=True))),
    ]


def roofline(config: Config, direction: Pass) -> float:
    """Seconds that a pass takes at the rates of the device's products and memory, one launch; a bias is added after."""
    p, spec = config.problem, config.spec
    rate = spec.half if config.dtype.itemsize == 2 else spec.tf32 if config.precision == "tf32" else spec.fp32
    moved = p.least_bytes(config.dtype.itemsize) / spec.bandwidth
    seconds = math.hypot(p.useful_flops / rate, moved)
    if config.bias and direction == "forward":
        seconds += 2 * math.prod(p.output_shape) * config.dtype.itemsize / spec.bandwidth
    return _LAUNCH_SECONDS + seconds / _REACHED


def key_of(kernel: str, config: Config, direction: Pass) -> str | None:
    """The name of a correction; None for element types that are not measured."""
    if config.dtype == torch.float64:
        return None
    precision = "half" if config.dtype.itemsize == 2 else config.precision
    return f"{kernel} {direction} {precision} {_FORMATS[config.memory_format]}"


@cache
def _table() -> dict[str, Any]:
    with np.load(FILE) as file:
        return {name: file[name].astype(np.float64) for name in file.files if file[name].dtype.kind == "f"}


@lru_cache(maxsize=4096)
def _scaled(problem: Problem) -> tuple[Any, Any]:
    """A layer's sizes in spreads from the mean, and how near it is to each layer of torch's operator's rows."""
    table = _table()
    scaled = np.clip((np.array(sizes(problem)) - table["mean"]) / table["spread"], -_FARTHEST, _FARTHEST)
    scaled[0] = 1.0
    distances = ((table["layers"] - scaled[1:]) ** 2).sum(1)
    return scaled, np.exp(-WIDTH * distances)


@lru_cache(maxsize=8192)
def correction(kernel: str, config: Config, direction: Pass) -> float | None:
    """The factor from a kernel's estimate to the time that is expected; None where nothing was measured."""
    key, table = key_of(kernel, config, direction), _table()
    if key is None or key not in table:
        return None
    scaled, near = _scaled(config.problem)
    logarithm = float(table[key] @ scaled)
    if kernel == NATIVE:
        logarithm += float(table[f"{key} near"] @ near)
    return math.exp(logarithm)


def torchs_seconds(config: Config, direction: Pass) -> float:
    """Seconds that torch's operator is expected to take on a GPU; infinite where nothing is known of it."""
    factor = correction(NATIVE, config, direction)
    return math.inf if factor is None else factor * roofline(config, direction)
