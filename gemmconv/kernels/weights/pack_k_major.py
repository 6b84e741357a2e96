"""What gemm_fold, gemm_fold_pixels, gemm_depth_to_space and implicit_gemm_nhwc share: weights as lines, and the call.

Lines are the rows of weightᵀ, C_out * kH * kW of them: the weight tensor is [C_in][lines], and a box of it has some
lines of some channels. Those of implicit_gemm_nhwc lie as in channels_last, and it has boxes of its own.
"""

from __future__ import annotations

from gemmconv.geometry import Pair, Problem
from gemmconv.kernels.base import Config
from gemmconv.kernels.macros import Macros
from gemmconv.kernels.program import Launch, Operand, Params, Program, TensorMapSpec, gathering

_THREADS = 256  # of a block of csrc/weights/pack_k_major.cu


def map_of(problem: Problem, itemsize: int, box: Pair) -> TensorMapSpec:
    """The tensor map of weights that lie as torch has them, whose boxes have (lines, channels)."""
    lines = problem.out_channels * problem.taps
    matrix = problem.in_channels * lines * itemsize
    sizes, strides = (lines, problem.in_channels, 1, 1), (lines * itemsize, matrix, matrix)
    return TensorMapSpec("weight", itemsize, sizes, strides, (*box, 1, 1))


def packing_macros_of(problem: Problem, lines: int, units: int, row: int) -> Macros:
    """Macros that specialise csrc/weights/pack_k_major.cu, for blocks of ``lines`` with so many units each."""
    return {
        "IN_CHANNELS": problem.in_channels,
        "ROW": row,
        "ALL_LINES": problem.out_channels * problem.taps,
        "LINES": lines,
        "UNITS": units,
    }


def packing(problem: Problem, lines: int, units: int, row: int) -> Launch:
    """The launch that lays weights out, for a kernel that reads them as ``packed``."""
    count = -(-problem.out_channels * problem.taps // lines) * lines * units
    return Launch(
        "weights/pack_k_major.cu",
        packing_macros_of(problem, lines, units, row),
        (-(-count // _THREADS), 1, 1),
        (_THREADS, 1, 1),
        {"weight, packed": ("weight", "packed"), "units": count},
    )


def program(
    config: Config,
    name: str,
    macros: Macros,
    params: Params,
    items: int,
    threads: int,
    pack: Launch | None = None,
    shared_bytes: int | None = None,
) -> Program:
    """A forward pass by csrc/sm90/``name``.cu, whose blocks, one a multiprocessor, take turns at items.

    ``pack`` is what lays its weights out, if anything does; ``shared_bytes`` are SHARED_BYTES where that is not said.
    """
    grid = min(items, config.spec.multiprocessors), 1, 1
    shared_bytes = int(macros["SHARED_BYTES"]) if shared_bytes is None else shared_bytes
    source, block = f"sm90/{name}.cu", (threads, 1, 1)
    main = Launch(source, macros, grid, block, params, shared_bytes, overlaps=pack is not None)
    weight = Operand("weight", config.memory_format, 16 if pack is None else 1)
    launches, scratch = [main], {}
    if pack is not None:
        launches, scratch = [pack, main], {"packed": 16 * _THREADS * pack.grid[0]}
    return gathering(config, "forward", launches, scratch, weight=weight)
