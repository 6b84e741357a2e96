"""Which is faster on a CPU, torch's operator or the implicit product: a rule that is fitted to measured rows.

The logarithm of torch's time over ours is taken to be linear in the logarithms of a layer's sizes (:func:`sizes`). Its
coefficients are in speedup.json, a row of them for each instruction set, pass, memory format and element
type; ``python -m benchmarks.cpu_fit`` writes them, from the rows of ``python -m benchmarks.cpu`` in the tree.
What has no row is left to torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import torch

from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.cpu.correlation import table_of
from gemmconv.kernels.cpu.library import isa_name, kernels_for

_ROWS = Path(__file__).with_name("speedup.json")
LEAST_SPEEDUP = 1.4  # that is expected before the implicit product is taken: the rule may be off by more than that
# What the rule was wrong about most is left to torch: depthwise layers of few taps or short rows, whose planes are
# little work each; and layers without strides that compute much more between rows than in them, or whose channels fill
# oneDNN's vectors, so that it is at its best (of 500 random layers those 20 lose 1% of what choosing gains).
_LEAST_TAPS, _MOST_WASTE = 16, 0.5  # taps, and inputs of a row; logarithm to base 2
MOST_CLASSES = 1024  # product of the strides: a table of taps has all classes of outputs
CYCLES = 2.5e9  # a second
_PACK_SECONDS = 1.8e-9  # of a weight that is packed, for one thread (AVX2 and AVX-512, layers of 2 million weights)
_COLUMNS, _DIRECT = 2.0, 8.0  # times as long as an implicit product, about: never chosen, but compared


@lru_cache(maxsize=1024)
def cycles(config: Config, is_gradient: bool, together: bool) -> float:
    """Cycles that the register tiles of an implicit product take, with the classes of a cell in one product or in many.

    In a cycle a core multiplies two vectors, or loads two: of a tile's cells, and of its weights.
    """
    p, kernels = config.problem, kernels_for(config.dtype)
    channels, targets = p.in_channels // p.groups, p.out_channels // p.groups
    if is_gradient:
        channels, targets = targets, channels
    table, blocks = table_of(p, is_gradient, together), -(-targets // kernels.rows)
    rows, vectors = -(-targets // blocks) * (table.classes if together else 1), kernels.vectors
    tiles = [kernels.rows] * (rows // kernels.rows) + [rows % kernels.rows] * (rows % kernels.rows > 0)
    of_term = sum(max(count * vectors / 2, (1.5 * vectors + count + 1) / 2) for count in tiles)
    terms = sum(map(len, table.products)) * channels * blocks * p.groups
    return terms * of_term * p.batch * table.cells / (vectors * kernels.lanes)


def is_together(config: Config) -> bool:
    """Whether a forward pass takes fewer cycles with all classes of a cell as rows of one product."""
    return cycles(config, False, True) <= cycles(config, False, False)


def sizes(config: Config, direction: Pass) -> dict[str, float]:
    """What the rule is linear in: logarithms to base 2 of a layer's sizes, and what it is."""
    p, is_gradient = config.problem, direction != "forward"
    of_input, of_output = p.in_channels // p.groups, p.out_channels // p.groups
    least = p.useful_flops / 4 / kernels_for(config.dtype).lanes
    return {
        "1": 1.0,
        "waste": math.log2(cycles(config, is_gradient, not is_gradient and is_together(config)) / least),
        "in_channels": math.log2(min(of_input, 64)),
        "out_channels": math.log2(min(of_output, 64)),
        "taps": math.log2(p.taps),
        "stride": math.log2(math.prod(p.stride)),
        "width": math.log2(p.input_size[1]),
        "work": math.log2(p.useful_flops),
        "weights": math.log2(math.prod(p.weight_shape)),
        "outputs": math.log2(math.prod(p.output_shape)),
        "inputs": math.log2(math.prod(p.input_shape)),
        "is_dilated": float(max(p.dilation) > 1),
        "is_grouped": float(p.groups > 1),
        "is_depthwise": float(p.groups > 1 and of_input == of_output == 1),
    }


def key_of(config: Config, direction: Pass) -> str:
    """The name of the row of coefficients."""
    layout = "channels_last" if config.memory_format is torch.channels_last else "nchw"
    return f"{isa_name()} {direction} {layout} {str(config.dtype).removeprefix('torch.')}"


@cache
def _coefficients() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(_ROWS.read_text())
    return found


@lru_cache(maxsize=4096)
def speedup(config: Config, direction: Pass) -> float:
    """How many times as fast as torch's operator the implicit product is expected to be; 0 where nothing is known."""
    coefficients = _coefficients().get(key_of(config, direction))
    p = config.problem
    if coefficients is None or not p.useful_flops or min(p.output_shape) < 1 or math.prod(p.stride) > MOST_CLASSES:
        return 0.0
    values = sizes(config, direction)
    short, wasteful = p.taps < _LEAST_TAPS or p.input_size[1] < _LEAST_TAPS, values["waste"] > _MOST_WASTE
    fills = math.gcd(p.in_channels // p.groups, p.out_channels // p.groups) % kernels_for(config.dtype).lanes == 0
    if (values["is_depthwise"] and short) or (max(p.stride) == 1 and (wasteful or fills)):
        return 0.0
    return float(2 ** sum(values[name] * coefficients[name] for name in coefficients))


def fused_seconds(config: Config, direction: Pass) -> float:
    """Roughly the seconds of an implicit product, and of packing the weight where it is another one each time."""
    p = config.problem
    if p.useful_flops == 0 or math.prod(p.stride) > MOST_CLASSES:
        return 1.0  # whatever it is, torch's operator comes before it and all that is estimated by it
    is_gradient = direction != "forward"
    seconds = 2 * cycles(config, is_gradient, not is_gradient and is_together(config)) / CYCLES
    if config.trained and direction == "forward":
        seconds += math.prod(p.weight_shape) * _PACK_SECONDS
    return seconds / torch.get_num_threads()


def native_seconds(config: Config, direction: Pass) -> float:
    """Seconds of torch's operator, to compare with :func:`fused_seconds`: by the rule, less what that may be off."""
    if isa_name() is None:
        return math.inf
    config = replace(config, trained=False)
    return fused_seconds(config, direction) * speedup(config, direction) / LEAST_SPEEDUP


def columns_seconds(config: Config, direction: Pass) -> float:
    """Seconds of ``gemm_col2im``, which ``auto`` does not take where there are implicit products."""
    return _COLUMNS * fused_seconds(config, direction)


def direct_seconds(config: Config, direction: Pass) -> float:
    """Seconds of ``direct``, which is there to be read and compared."""
    return _DIRECT * fused_seconds(config, direction)
