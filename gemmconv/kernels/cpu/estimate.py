"""Whether torch's operator or the implicit product is faster on a CPU: a rule that is fitted to measured rows.

The logarithm of torch's time over ours is linear in the logarithms of a layer's sizes (:func:`sizes`). Its coefficients
are in speedup.json, one row for each instruction set, pass, memory format and element type; ``python -m
benchmarks.cpu_fit`` writes them, from the rows of ``python -m benchmarks.cpu`` in the tree. Passes without a row are
left to torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.base import FORMAT_NAMES, Config, Pass
from gemmconv.kernels.cpu.correlation import table_of
from gemmconv.kernels.cpu.library import isa_name, kernels_for
from gemmconv.kernels.integers import up_to_multiple
from gemmconv.validation import short_name

_ROWS = Path(__file__).with_name("speedup.json")
# Layers for which the rule was most wrong are left to torch: depthwise layers with few taps or short rows, whose planes
# are little work each; and layers without strides that compute much more between rows than in them, or whose channels
# fill oneDNN's vectors, its best case (20 of 500 random layers; leaving them costs 1% of the gain from choosing). And
# layers with strides and dilation that sum many channels into each of few: torch computes what is dilated by columns, a
# product with a row for each tap, ours has a row for each of few channels (0.4 to 0.8x torch's speed forward, 5 layers
# of 5; gradients of one layer 0.2 and 0.8x).
_LEAST_TAPS, _MOST_WASTE = 16, 0.5  # taps, and inputs of a row; logarithm to base 2
_MOST_SUMMED = 64  # input channels for each output channel
_DENSE = 16  # least channels of each side of a dense layer
MOST_CLASSES = 1024  # product of the strides: a table of taps has all classes of outputs
CYCLES = 2.5e9  # a second
_PACK_SECONDS = 1.8e-9  # to pack one weight by one thread (AVX2 and AVX-512, layers of 2 million weights)
# About the times of gemm_col2im and of direct over that of an implicit product: auto never takes these two on a CPU.
COLUMNS, DIRECT = 2.0, 8.0


def least_speedup(problem: Problem, dtype: torch.dtype) -> float:
    """The expected speedup from which the implicit product is taken; the rule's error can exceed it.

    In bfloat16 it errs more, since CPUs of one instruction set differ in what oneDNN has for that type: from 1.3 on 13%
    of the layers that are taken lose in cross-validation, from 1.6 on 9%. It also errs more for dense layers without
    strides, as far as they are not left to torch above: of 26 passes that were expected at 1.3 to 1.6 times torch's
    speed 4 lost, and together they had 1.22 times that speed (geometric mean).
    """
    is_dense = problem.groups == 1 and min(problem.in_channels, problem.out_channels) >= _DENSE
    return 1.6 if dtype.itemsize == 2 or (is_dense and max(problem.stride) == 1) else 1.3


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
    if direction == "forward":
        return min(cycles(config, False, together) for together in (True, False))
    return cycles(config, True, False)


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
    """The name of the row of coefficients."""
    return f"{isa_name()} {direction} {FORMAT_NAMES[config.memory_format]} {short_name(config.dtype)}"


@cache
def _coefficients() -> dict[str, dict[str, float]]:
    return json.loads(_ROWS.read_text())


@lru_cache(maxsize=4096)
def speedup(config: Config, direction: Pass) -> float:
    """The expected speedup of the implicit product over torch's operator; 0 if the rule does not cover the layer."""
    coefficients = _coefficients().get(key_of(config, direction))
    p = config.problem
    if coefficients is None or not p.useful_flops or min(p.output_shape) < 1 or math.prod(p.stride) > MOST_CLASSES:
        return 0.0
    values = sizes(config, direction)
    short, wasteful = p.taps < _LEAST_TAPS or p.input_size[1] < _LEAST_TAPS, values["waste"] > _MOST_WASTE
    by_columns = max(p.dilation) > 1 and p.gemm_k >= _MOST_SUMMED * p.group_out_channels
    torchs_best = by_columns if max(p.stride) > 1 else wasteful or values["fills"]
    if torchs_best or (values["is_depthwise"] and short):
        return 0.0
    return float(2 ** sum(values[name] * coefficients[name] for name in coefficients))


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
    """Seconds of torch's operator by the rule, with :func:`least_speedup` as a margin; see :func:`fused_seconds`."""
    if isa_name() is None:
        return math.inf
    config = replace(config, trained=False)
    return fused_seconds(config, direction) * speedup(config, direction) / least_speedup(config.problem, config.dtype)
