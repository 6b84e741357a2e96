"""Whether torch's operator or the implicit product is faster on a CPU: a rule that is fitted to measured rows.

The logarithm of torch's time over ours is linear in the logarithms of a layer's sizes (:func:`sizes`). As oneDNN's
kernels change with the size in steps, the errors at the nearest measured layers are added: kernel ridge regression, as
for torch's operator on GPUs (gemmconv/kernels/measured.py).

speedup.npz has an array for each instruction set, pass, memory format and element type. Its rows are the mean and the
spread of each size, the coefficients, and then the scaled sizes of each measured layer, the first of which, always one,
is replaced by what the layer's error counts. ``python -m benchmarks.cpu_fit`` writes it, from the rows of ``python -m
benchmarks.cpu`` in the tree. Passes without an array are left to torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gemmconv.kernels.base import FORMAT_NAMES, Config, Pass
from gemmconv.kernels.cpu.correlation import table_of
from gemmconv.kernels.cpu.library import isa_name, kernels_for
from gemmconv.kernels.integers import up_to_multiple
from gemmconv.kernels.measured import nearness, scaled_sizes
from gemmconv.validation import short_name

FILE = Path(__file__).with_name("speedup.npz")
MOST_CLASSES = 1024  # product of the strides: a table of taps has all classes of outputs
CYCLES = 2.5e9  # a second
_PACK_SECONDS = 1.8e-9  # to pack one weight by one thread (AVX2 and AVX-512, layers of 2 million weights)
# About the times of gemm_col2im and of direct over that of an implicit product: auto never takes these two on a CPU.
COLUMNS, DIRECT = 2.0, 8.0
WIDTH = 0.1  # of the Gaussian kernel, for :func:`gemmconv.kernels.measured.nearness`
# auto takes the implicit product if its expected speedup, less a margin for the rule's error, is at least _LEAST. The
# margin, a logarithm to base 2, is that of a layer that is like no measured one, and less if the nearest is near. It is
# the first for forward passes, the second for gradients, and the last where the rule errs most: small images, depthwise
# layers, whose planes are little work each, and layers without strides that compute much more between rows than in
# them. In 16 bits it is always 1: times of oneDNN's kernels differ so much that a near layer tells little. On AVX-512
# 1 of 499 forward passes that are taken so in cross-validation has less than 0.97 of torch's speed, 3 of 89 gradients
# of inputs, and 5 of 151 forward passes in bfloat16.
_LEAST, _MARGINS = 1.15, (1.2, 1.5, 2.4)
_CERTAIN = 0.02  # share of the margin's square that is left for a layer that was measured
_FEW_PIXELS, _MUCH_WASTE = 100, 0.5  # "waste" of :func:`sizes`


@lru_cache(maxsize=1024)
def cycles(config: Config, is_gradient: bool, together: bool) -> float:
    """Cycles of an implicit product's register tiles, with all classes of a cell in one product or one in each.

    In a cycle a core multiplies two vectors, or loads two: cells of a tile, or weights.
    """
    p, kernels = config.problem, kernels_for(config.dtype)
    channels, targets = (p.gemm_k, p.group_out_channels)[:: -1 if is_gradient else 1]
    table, blocks = table_of(p, is_gradient, together), -(-targets // kernels.rows)
    rows, vectors = -(-targets // blocks) * (table.classes if together else 1), kernels.vectors
    tiles, cells = -(-rows // kernels.rows), up_to_multiple(table.cells(p.batch), kernels.lanes)
    of_term = max(rows * vectors / 2, ((1.5 * vectors + 1) * tiles + rows) / 2)
    return sum(map(len, table.products)) * channels * blocks * p.groups * of_term * cells / (vectors * kernels.lanes)


def is_together(config: Config) -> bool:
    """Whether a forward pass takes about as few cycles with all classes of a cell as rows of one product.

    Rows of one product read the same cells: dcgan's layer of 128 channels is faster so, though it takes 3% more cycles.
    """
    return cycles(config, False, True) <= 1.1 * cycles(config, False, False)


def _least_cycles(config: Config, direction: Pass) -> float:
    """Cycles of an implicit product, for a forward pass in the faster of both ways."""
    ways = (True, False) if direction == "forward" else (False,)
    return min(cycles(config, direction != "forward", together) for together in ways)


def sizes(config: Config, direction: Pass) -> dict[str, float]:
    """The features that the rule is linear in: logarithms to base 2 of a layer's sizes, and flags."""
    p = config.problem
    of_input, of_output = p.gemm_k, p.group_out_channels
    least = p.useful_flops / 4 / kernels_for(config.dtype).lanes
    return {
        "1": 1.0,
        "waste": math.log2(_least_cycles(config, direction) / least),
        "in_channels": math.log2(min(of_input, 64)),
        "out_channels": math.log2(min(of_output, 64)),
        "taps": math.log2(p.taps),
        "stride": math.log2(math.prod(p.stride)),
        "width": math.log2(p.input_size[1]),
        "work": math.log2(p.useful_flops),
        "weights": math.log2(math.prod(p.weight_shape)),
        "outputs": math.log2(math.prod(p.output_shape)),
        "inputs": math.log2(math.prod(p.input_shape)),
        "fills": float(math.gcd(of_input, of_output) % kernels_for(config.dtype).lanes == 0),
        "is_dilated": float(max(p.dilation) > 1),
        "is_grouped": float(p.groups > 1),
        "is_depthwise": float(p.groups > 1 and of_input == of_output == 1),
    }


def key_of(config: Config, direction: Pass) -> str:
    """The name of the array of a fit."""
    return f"{isa_name()} {direction} {FORMAT_NAMES[config.memory_format]} {short_name(config.dtype)}"


@cache
def _fits() -> dict[str, Any]:
    with np.load(FILE) as file:
        return {key: file[key].astype(np.float64) for key in file.files}


@lru_cache(maxsize=4096)
def speedups(config: Config, direction: Pass) -> tuple[float, float]:
    """The expected speedup of the implicit product over torch's operator, and that from which it is taken.

    The former is 0 if the rule does not cover the layer.
    """
    p, fit = config.problem, _fits().get(key_of(config, direction))
    if fit is None or not p.useful_flops or min(p.output_shape) < 1 or math.prod(p.stride) > MOST_CLASSES:
        return 0.0, _LEAST
    return speedups_by(fit, config, direction)


def speedups_by(fit: Any, config: Config, direction: Pass) -> tuple[float, float]:
    """The expected speedup by an array of speedup.npz, and that from which the implicit product is taken."""
    p, values = config.problem, sizes(config, direction)
    mean, spread, coefficients, *_ = fit
    scaled = scaled_sizes([*values.values()], mean, spread)
    near = nearness(fit[3:, 1:], scaled[1:], WIDTH)
    is_wasteful = max(p.stride) == 1 and values["waste"] > _MUCH_WASTE
    is_risky = values["is_depthwise"] or is_wasteful or p.in_pixels < _FEW_PIXELS
    margin = _MARGINS[2 if is_risky else int(direction != "forward")] * math.sqrt(1 + _CERTAIN - near.max() ** 2)
    margin = 1.0 if config.dtype.itemsize == 2 else margin
    return float(2 ** (coefficients @ scaled + fit[3:, 0] @ near)), float(_LEAST * 2**margin)


def fused_seconds(config: Config, direction: Pass) -> float:
    """Estimated seconds of an implicit product, and of packing the weight if it changes between calls."""
    p = config.problem
    if p.useful_flops == 0 or math.prod(p.stride) > MOST_CLASSES:
        return 1.0  # any number: torch's operator is estimated from it, and lower
    seconds = 2 * _least_cycles(config, direction) / CYCLES
    if config.trained and direction == "forward":
        seconds += math.prod(p.weight_shape) * _PACK_SECONDS
    return seconds / torch.get_num_threads()


def native_seconds(config: Config, direction: Pass) -> float:
    """Seconds of torch's operator by the rule, divided by the second of :func:`speedups`; see :func:`fused_seconds`."""
    if isa_name() is None:
        return math.inf
    expected, least = speedups(config := replace(config, trained=False), direction)
    return fused_seconds(config, direction) * expected / least
