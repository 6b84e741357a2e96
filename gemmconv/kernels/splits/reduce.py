"""Adds up the partial sums of split-K gradients: host side of csrc/splits/reduce.cu.

Partial sums of ``direct`` and ``gemm_col2im`` have the gradient's layout; those of ``fused`` are [taps, C_in, C_out].
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, accumulator_dtype
from gemmconv.kernels.integers import power_of_two_within
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros
from gemmconv.kernels.program import Launch, Long, Operand, Params, Program, Step, grad_weight_of, reciprocal

_SOURCE, _THREADS = "splits/reduce.cu", 256
# Limits of a block: most sums of one slice, and of several; most bytes of shared memory for them; least columns. The
# last is the least number of blocks of a multiprocessor.
_OF_ONE, _OF_SEVERAL, _BYTES, _LEAST_RUN, _BLOCKS = 2048, 1024, 32 << 10, 8, 4
_MOST_SHARES = 32
_PIECE_BYTES = 16
_MANY, _LONG_RUN = 1 << 14, 128  # elements whose sums are read in pieces, and the columns of a block then


def partial_bytes(config: Config) -> int:
    """Bytes of the partial sums of one slice of a weight gradient."""
    return math.prod(config.problem.weight_shape) * accumulator_dtype(config.dtype).itemsize


def sum_partials(config: Config, slices: int) -> Launch:
    """The launch that adds up ``partials`` in ``grad_weight``."""
    return sums(config.dtype, math.prod(config.problem.weight_shape), slices, "partials", "grad_weight")


def sums(dtype: torch.dtype, elements: int, slices: int, partials: str, target: str) -> Launch:
    """The launch that adds up ``slices`` of ``elements`` each from ``partials`` into ``target``."""
    # Many elements are read in pieces, by fewer blocks: two slices of 819,200 sums took 20 us, one by one.
    run = _LONG_RUN if elements >= _MANY else 32
    macros = _macros(dtype, accumulator_dtype(dtype), 1, run, elements)
    return _launch({**macros, "SHARES": 8}, (1, 1, elements), slices, partials, target)


def widened(step: Step, dtype: torch.dtype) -> Launch | None:
    """The launch changed to write its rounded sums in a wider dtype; None if the step cannot."""
    if not isinstance(step, Launch) or "SUM_T" not in step.macros:
        return None
    macros = {**step.macros, "SUM_T": ELEMENT_TYPES[dtype]}
    if "WRITE" in macros:
        macros["WRITE"] = math.gcd(int(macros["WRITE"]), _PIECE_BYTES // dtype.itemsize)
    return replace(step, macros=macros)


def in_channels_last(step: Step, itemsize: int) -> Launch | None:
    """The launch changed to write a weight's gradient in channels_last; None if the step cannot."""
    if not isinstance(step, Launch) or step.source != _SOURCE or step.macros["TAPS"] == 1:
        return None
    _, columns = cast(tuple[int, int], step.params["elements, columns"])
    write = math.gcd(_PIECE_BYTES // itemsize, int(step.macros["RUN"]), columns)
    return replace(step, macros={**step.macros, "CHANNELS_LAST": 1, "WRITE": write})


def result_params(slices: int) -> Params:
    """The pointers of a gradient kernel's outputs: ``partials`` for several slices, ``grad_weight`` for one."""
    return {"partials, grad_weight": ("partials", None) if slices > 1 else (None, "grad_weight")}


# From here on partial sums are [slices, groups, taps, C_in, C_out], with one slice or several.


def fits(problem: Problem) -> bool:
    """Whether the taps of one weight fit the shared memory of a block."""
    return _bytes(problem, 1) <= _BYTES


def wgrad_partial_dtype(dtype: torch.dtype, slices: int) -> torch.dtype:
    """The type of partial sums: float32; for a single slice, which is the gradient itself, the gradient's."""
    return dtype if slices == 1 else torch.float32


def wgrad_partial_bytes(problem: Problem, itemsize: int, slices: int, most_slices: int = 0) -> int:
    """Bytes of the partial sums of a gradient; ``most_slices`` has the meaning it has in :func:`wgrad_program`."""
    return (itemsize if (most_slices or slices) == 1 else 4 * slices) * math.prod(problem.weight_shape)


def wgrad_macros(problem: Problem, dtype: torch.dtype, slices: int, multiprocessors: int) -> Macros:
    """Macros that specialise csrc/splits/reduce.cu for at most ``slices`` slices."""
    run, partial = _run(problem, slices, multiprocessors), wgrad_partial_dtype(dtype, slices)
    macros = _macros(dtype, partial, problem.taps, run, problem.group_out_channels)
    # Threads that share the slices of one weight: a power of two, so few that no thread has more than one piece.
    pieces = problem.taps * run // int(macros["READ"])
    most = min(_MOST_SHARES, slices, _THREADS // pieces, _BYTES // _bytes(problem, run))
    return {**macros, "SHARES": power_of_two_within(most, most)}


def wgrad_program(
    config: Config,
    slices: int,
    memory_format: torch.memory_format,
    main: Launch,
    columns: int = 0,
    most_slices: int = 0,
) -> Program:
    """A weight gradient by a kernel that writes ``partials``, and a launch that adds them up.

    Args:
        slices: number of partial sums of a weight.
        memory_format: the format in which the kernel reads grad_output and input; others are transposed.
        columns: columns of zeros that pad each row of the input.
        most_slices: most slices at any size of the layer, for which the reduction is compiled; 0 for ``slices``.
    """
    p, most_slices = config.problem, most_slices or slices
    macros = wgrad_macros(p, config.dtype, most_slices, config.spec.multiprocessors)
    shape = p.groups, p.gemm_k, p.group_out_channels
    add_up = replace(_launch(macros, shape, slices, "partials", "grad_weight"), overlaps=True)
    operands = Operand("grad_output", memory_format, 16), Operand("input", memory_format, 16, columns)
    scratch = {"partials": wgrad_partial_bytes(p, config.dtype.itemsize, slices, most_slices)}
    return Program(config.dtype, operands, (grad_weight_of(p),), (main, add_up), scratch)


def _launch(macros: Macros, shape: tuple[int, int, int], slices: int, partials: str, target: str) -> Launch:
    """The launch for sums of ``shape`` (groups, rows, columns) times the taps in the macros; one tap makes one row."""
    taps, run = int(macros["TAPS"]), int(macros["RUN"])
    groups, rows, columns = shape if taps > 1 else (1, 1, math.prod(shape))
    runs = -(-columns // run)
    params: Params = {
        "partials, sums": (partials, target),
        "elements, columns": (Long(math.prod(shape) * taps), Long(columns)),
        "by_rows, by_runs": (reciprocal(rows), reciprocal(max(1, runs))),
        "slices, rows, runs": (slices, rows, runs),
    }
    return Launch(_SOURCE, macros, (groups * rows * runs, 1, 1), (_THREADS, 1, 1), params)


def _macros(dtype: torch.dtype, partial: torch.dtype, taps: int, run: int, columns: int) -> Macros:
    """Macros that specialise csrc/splits/reduce.cu, but for SHARES, to add up runs of as many of the columns.

    READ and WRITE elements are read and written at once: 16 bytes of them, or less if that does not divide all counts.
    """
    return {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        "SUM_T": ELEMENT_TYPES[dtype],
        "PARTIAL_T": ELEMENT_TYPES[partial],
        "CHANNELS_LAST": 0,
        "TAPS": taps,
        "RUN": run,
        "READ": math.gcd(_PIECE_BYTES // partial.itemsize, run, columns),
        "WRITE": math.gcd(_PIECE_BYTES // dtype.itemsize, run * taps, columns * taps),
    }


def _bytes(problem: Problem, run: int) -> int:
    """Bytes of shared memory of a block for one share."""
    return 4 * (run + 1) * problem.taps


def _run(problem: Problem, slices: int, multiprocessors: int) -> int:
    """Output channels of a block: a power of two, few enough for many blocks."""
    run, most = _LEAST_RUN, _OF_ONE if slices == 1 else _OF_SEVERAL
    out_channels = problem.group_out_channels
    while run > 1 and _bytes(problem, run) > _BYTES:
        run //= 2
    while run < out_channels and 2 * run * problem.taps <= most:
        if problem.in_channels * -(-out_channels // (2 * run)) < _BLOCKS * multiprocessors:
            break
        run *= 2
    return run
