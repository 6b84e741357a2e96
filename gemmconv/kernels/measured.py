"""Expected times of kernels: their own estimates, times corrections that were fitted to measured layers.

A kernel's estimates rank its own tiles well, but do not compare with other kernels', and cuDNN has no model at all. So
each kernel, pass, precision and memory format has a correction, which ``python -m benchmarks.fit`` fits to rows that
``python -m benchmarks.rows`` has measured. The logarithm of measured time over estimate is linear in the logarithms of
a layer's sizes (:func:`sizes`). torch's operator changes its kernels with the size in steps, so the errors at the
nearest layers are added (kernel ridge regression with a Gaussian kernel). Corrections are factors for the mean, not the
likeliest time: a less certain estimate counts for more.

The numbers are in costs/measured.npz. Without measurements there is no correction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.base import FORMAT_NAMES, Config, Pass
from gemmconv.kernels.costs import FOLDER

FILE = FOLDER / "measured.npz"
NATIVE = "native"
WIDTH = 0.03  # Gaussian kernel exp(-WIDTH * distance**2), where sizes are scaled to a spread of one
_FARTHEST = 4.0  # spreads from the mean, to which scaled sizes are clipped
_LAUNCH_SECONDS, _REACHED = 3e-6, 0.7  # roofline: seconds of a launch; share of the peak rates that large layers reach


def sizes(problem: Problem) -> list[float]:
    """The features that corrections are linear in: a one, logarithms to base 2 of sizes, and flags of the layer."""
    p = problem
    channels = p.gemm_k, p.group_out_channels
    log, is_grouped, is_strided = math.log2, p.groups > 1, max(p.stride) > 1
    flops, moved = log(max(1, p.useful_flops)), log(max(1, p.least_bytes(4)))
    even = math.gcd(p.in_channels, p.out_channels, 64)
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
    """Seconds of a pass by the device's peak rates for products and memory, plus a launch and a pass for the bias."""
    p, spec = config.problem, config.spec
    rate = spec.half if config.dtype.itemsize == 2 else spec.tf32 if config.precision == "tf32" else spec.fp32
    moved = p.least_bytes(config.dtype.itemsize) / spec.bandwidth
    seconds = math.hypot(p.useful_flops / rate, moved)
    if config.bias and direction == "forward":
        seconds += 2 * math.prod(p.output_shape) * config.dtype.itemsize / spec.bandwidth
    return _LAUNCH_SECONDS + seconds / _REACHED


def key_of(kernel: str, config: Config, direction: Pass) -> str | None:
    """The name of a correction; None for float64, which is not measured."""
    if config.dtype == torch.float64:
        return None
    precision = "half" if config.dtype.itemsize == 2 else config.precision
    return f"{kernel} {direction} {precision} {FORMAT_NAMES[config.memory_format]}"


@cache
def _table() -> dict[str, Any]:
    """What ``benchmarks.fit`` has written: arrays of one shape are stored as one, since 6 load faster than 149."""
    with np.load(FILE) as file:
        pairs = [(file[f"names {i}"], file[f"values {i}"].astype(np.float64)) for i in range(len(file.files) // 2)]
    return {name: values for names, stacked in pairs for name, values in zip(names.tolist(), stacked, strict=True)}


@lru_cache(maxsize=4096)
def _scaled(problem: Problem) -> tuple[Any, Any]:
    """A layer's scaled sizes, and its nearness to each layer that torch's operator was measured on."""
    table = _table()
    scaled = scaled_sizes(sizes(problem), table["mean"], table["spread"])
    return scaled, nearness(table["layers"], scaled[1:])


def scaled_sizes(values: Sequence[float], mean: Any, spread: Any) -> Any:
    """A layer's sizes, the first of which is a one, in spreads from their mean."""
    scaled = np.clip((np.array(values) - mean) / spread, -_FARTHEST, _FARTHEST)
    scaled[0] = 1.0
    return scaled


def nearness(layers: Any, scaled: Any, width: float = WIDTH) -> Any:
    """How near a layer is to others, from 0 to 1, by its scaled sizes and theirs, a row for each."""
    return np.exp(-width * ((layers - scaled) ** 2).sum(-1))


@lru_cache(maxsize=8192)
def correction(kernel: str, config: Config, direction: Pass) -> float | None:
    """The expected time of a kernel over its estimate; None if no such pass was measured."""
    key, table = key_of(kernel, config, direction), _table()
    if key is None or key not in table:
        return None
    scaled, near = _scaled(config.problem)
    logarithm = float(table[key] @ scaled)
    if kernel == NATIVE:
        logarithm += float(table[f"{key} near"] @ near)
    return math.exp(logarithm)


def torchs_seconds(config: Config, direction: Pass) -> float:
    """Expected seconds of torch's operator on a GPU; infinite if no such pass was measured."""
    factor = correction(NATIVE, config, direction)
    return math.inf if factor is None else factor * roofline(config, direction)
