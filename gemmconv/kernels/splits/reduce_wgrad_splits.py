"""The last step of ``fused``'s weight gradients: host side of csrc/splits/reduce_wgrad_splits.cu."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gemmconv.device import REFERENCE
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros
from gemmconv.kernels.params import params_struct

_THREADS = 256
# Of a block: weights at most, of one slice or of several; shared memory that keeps them, output channels at least; and
# blocks of a multiprocessor at least.
_OF_ONE, _OF_SEVERAL, _BYTES, _LEAST_RUN, _BLOCKS = 2048, 1024, 32 << 10, 8, 4
_MOST_SHARES = 32
_PIECE_BYTES = 16

ReduceWgradSplitsParams = params_struct(
    "reduce_wgrad_splits_params", ("partials", "grad_weight"), ("slices",), ("elements",)
)


def fits(problem: Problem) -> bool:
    """Whether the taps of a weight fit a block."""
    return _bytes(problem, 1) <= _BYTES


def partial_dtype(dtype: torch.dtype, slices: int) -> torch.dtype:
    """What partial sums are kept in: float32, but that of a single slice is the gradient already."""
    return dtype if slices == 1 else torch.float32


def partial_bytes(problem: Problem, itemsize: int, slices: int) -> int:
    """Bytes of the partial sums of gradients of so many bytes."""
    return (itemsize if slices == 1 else 4 * slices) * math.prod(problem.weight_shape)


def sum_macros(
    problem: Problem, dtype: torch.dtype, slices: int, multiprocessors: int = REFERENCE.multiprocessors
) -> Macros:
    """Macros that specialise csrc/splits/reduce_wgrad_splits.cu."""
    run, partial = _run(problem, slices, multiprocessors), partial_dtype(dtype, slices)
    out_channels = problem.out_channels // problem.groups
    read = _piece(partial, run, out_channels)
    return {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        "PARTIAL_T": ELEMENT_TYPES[partial],
        "CI": problem.gemm_k,
        "CO": out_channels,
        "KERNEL_H": problem.kernel_size[0],
        "KERNEL_W": problem.kernel_size[1],
        "SUM_RUN": run,
        "SUM_SHARES": _shares(problem, run, slices, read),
        "SUM_READ": read,
        "SUM_WRITE": _piece(dtype, run * problem.taps, out_channels * problem.taps),
    }


def prepare_sum(config: Config, slices: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Prepare what fills grad_weight from the partial sums that the launch before wrote."""
    from gemmconv.runtime.launch import load

    problem, multiprocessors = config.problem, config.spec.multiprocessors
    macros = sum_macros(problem, config.dtype, slices, multiprocessors)
    kernel = load("splits/reduce_wgrad_splits.cu", macros, config.device.index)
    elements = math.prod(problem.weight_shape)
    grid = (_blocks(problem, _run(problem, slices, multiprocessors)), 1, 1)

    def add_up(partials: torch.Tensor, grad_weight: torch.Tensor) -> None:
        params = ReduceWgradSplitsParams(partials.data_ptr(), grad_weight.data_ptr(), elements, slices)
        kernel.launch(grid, (_THREADS, 1, 1), params, overlaps=True)

    return add_up


def _piece(dtype: torch.dtype, *counts: int) -> int:
    """Neighbours that are read or written at once: as many as 16 bytes have, where these divide all counts."""
    return math.gcd(_PIECE_BYTES // dtype.itemsize, *counts)


def _bytes(problem: Problem, run: int) -> int:
    """Of the shared memory of a block, for one share."""
    return 4 * (run + 1) * problem.taps


def _run(problem: Problem, slices: int, multiprocessors: int) -> int:
    """Output channels of a block: a power of two, few enough for many blocks."""
    run, most = _LEAST_RUN, _OF_ONE if slices == 1 else _OF_SEVERAL
    while run > 1 and _bytes(problem, run) > _BYTES:
        run //= 2
    while run < problem.out_channels // problem.groups and 2 * run * problem.taps <= most:
        if _blocks(problem, 2 * run) < _BLOCKS * multiprocessors:
            break
        run *= 2
    return run


def _blocks(problem: Problem, run: int) -> int:
    return problem.in_channels * -(-(problem.out_channels // problem.groups) // run)


def _shares(problem: Problem, run: int, slices: int, read: int) -> int:
    """Threads that add the slices of one weight, few enough that each thread has one piece."""
    shares, pieces = _MOST_SHARES, problem.taps * run // read
    while shares > 1 and (shares > slices or shares * pieces > _THREADS or shares * _bytes(problem, run) > _BYTES):
        shares //= 2
    return shares
