"""The last step of ``fused``'s weight gradients: host side of csrc/splits/reduce_wgrad_splits.cu."""

from __future__ import annotations

import math

import torch

from gemmconv.device import REFERENCE
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, strides_of
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros
from gemmconv.kernels.program import Launch, Long, Operand, Output, Params, Program

_THREADS = 256
# Of a block: weights at most, of one slice or of several; shared memory that keeps them, output channels at least; and
# blocks of a multiprocessor at least.
_OF_ONE, _OF_SEVERAL, _BYTES, _LEAST_RUN, _BLOCKS = 2048, 1024, 32 << 10, 8, 4
_MOST_SHARES = 32
_PIECE_BYTES = 16


def fits(problem: Problem) -> bool:
    """Whether the taps of a weight fit a block."""
    return _bytes(problem, 1) <= _BYTES


def partial_dtype(dtype: torch.dtype, slices: int) -> torch.dtype:
    """What partial sums of at most so many slices are kept in: float32, but of one slice it is the gradient already."""
    return dtype if slices == 1 else torch.float32


def partial_bytes(problem: Problem, itemsize: int, slices: int, most_slices: int = 0) -> int:
    """Bytes of the partial sums of gradients of so many bytes; ``most_slices`` as in :func:`program`."""
    return (itemsize if (most_slices or slices) == 1 else 4 * slices) * math.prod(problem.weight_shape)


def sum_macros(
    problem: Problem, dtype: torch.dtype, slices: int, multiprocessors: int = REFERENCE.multiprocessors
) -> Macros:
    """Macros that specialise csrc/splits/reduce_wgrad_splits.cu, for at most so many slices."""
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


def program(
    config: Config,
    slices: int,
    memory_format: torch.memory_format,
    main: Launch,
    columns: int = 0,
    most_slices: int = 0,
) -> Program:
    """A weight gradient by a kernel that writes ``partials`` of so many slices, which are added up.

    Args:
        config: of the weight gradient.
        slices: partial sums of a weight.
        memory_format: in which the kernel reads grad_output and input, which are transposed where they are in another.
        main: the kernel's launch.
        columns: of zeros, beside each row of the input.
        most_slices: that there are at any size of the layer, where that is not as many; what is compiled is for them.
    """
    p, multiprocessors, most_slices = config.problem, config.spec.multiprocessors, most_slices or slices
    macros = sum_macros(p, config.dtype, most_slices, multiprocessors)
    grid = _blocks(p, int(macros["SUM_RUN"])), 1, 1
    params: Params = {
        "partials, grad_weight": ("partials", "grad_weight"),
        "elements": Long(math.prod(p.weight_shape)),
        "slices": slices,
    }
    add_up = Launch("splits/reduce_wgrad_splits.cu", macros, grid, (_THREADS, 1, 1), params, overlaps=True)
    operands = (
        Operand("grad_output", memory_format, 16),
        Operand("input", memory_format, 16, columns),
    )
    output = Output("grad_weight", p.weight_shape, strides_of(p.weight_shape, torch.contiguous_format))
    scratch = {"partials": partial_bytes(p, config.dtype.itemsize, slices, most_slices)}
    return Program(config.dtype, operands, (output,), (main, add_up), scratch)


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
