"""What gemm_fold, gemm_fold_pixels, gemm_depth_to_space and implicit_gemm_nhwc share: weights as lines, and the call.

Lines are the rows of weightᵀ, C_out * kH * kW of them: the weight tensor is [C_in][lines], and a box of it has some
lines of some channels. Those of implicit_gemm_nhwc lie as in channels_last, and it has boxes of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from gemmconv.geometry import Pair, Problem
from gemmconv.kernels.base import Config, Forward, aligned, strides_of, with_strides
from gemmconv.kernels.macros import Macros
from gemmconv.kernels.params import Boxes, params_struct

_THREADS = 256  # of a block of csrc/weights/pack_k_major.cu

PackKMajorParams = params_struct("pack_k_major_params", ("weight", "packed"), ("units",))

# What a kernel is to be told of its weights, a tensor map or an address, and the tensor that it is told of.
Weights = Callable[[torch.Tensor], tuple[Any, torch.Tensor]]


def boxes_of(problem: Problem, itemsize: int, box: Pair) -> Boxes:
    """What :func:`gemmconv.runtime.tensor_map.encode` is to know of the weights, and of boxes of (lines, channels)."""
    lines = problem.out_channels * problem.taps
    matrix = problem.in_channels * lines * itemsize
    return (
        itemsize,
        (lines, problem.in_channels, 1, 1),
        (lines * itemsize, matrix, matrix),
        (*box, 1, 1),
        (1, 1, 1, 1),
        True,
    )


def mapped(boxes: Boxes) -> Weights:
    """Weights that lie as torch has them, and come by boxes."""
    from gemmconv.runtime import tensor_map

    def map_of(weight: torch.Tensor) -> tuple[Any, torch.Tensor]:
        weight = aligned(weight)
        return tensor_map.encode(weight.data_ptr(), *boxes), weight

    return map_of


def packing_macros_of(problem: Problem, lines: int, units: int, row: int) -> Macros:
    """Macros that specialise csrc/weights/pack_k_major.cu, for blocks of ``lines`` with so many units each."""
    return {
        "IN_CHANNELS": problem.in_channels,
        "ROW": row,
        "ALL_LINES": problem.out_channels * problem.taps,
        "LINES": lines,
        "UNITS": units,
    }


def packed(problem: Problem, lines: int, units: int, row: int, device: torch.device) -> Weights:
    """Weights that csrc/weights/pack_k_major.cu lays out."""
    from gemmconv.runtime.launch import load

    macros = packing_macros_of(problem, lines, units, row)
    kernel = load("weights/pack_k_major.cu", macros, device.index)
    count = -(-problem.out_channels * problem.taps // lines) * lines * units
    grid, block = (-(-count // _THREADS), 1, 1), (_THREADS, 1, 1)

    def pack(weight: torch.Tensor) -> tuple[int, torch.Tensor]:
        packed = torch.empty(count * 16, dtype=torch.uint8, device=weight.device)
        kernel.launch(grid, block, PackKMajorParams(weight.data_ptr(), packed.data_ptr(), count))
        return packed.data_ptr(), packed

    return pack


def prepare_forward(
    config: Config,
    name: str,
    macros: Macros,
    params_of: Callable[..., ctypes.Structure],
    weights_of: Weights,
    counts: tuple[int, ...],
    threads: int,
    *,
    input_of: Callable[[torch.Tensor], Any] = torch.Tensor.data_ptr,
    overlaps: bool = False,
) -> Forward:
    """The call of csrc/``name``.cu, for ``Algorithm.forward``.

    Its params are its weights, its input, the addresses of bias and output, and ``counts``, the last that of items:
    as many blocks as there are multiprocessors take turns at them. ``input_of`` is what it is to be told of the input.
    ``overlaps`` says that ``weights_of`` launches a kernel, which it waits for.
    """
    from gemmconv.runtime.launch import load

    p, shared_bytes = config.problem, macros["SHARED_BYTES"]
    assert isinstance(shared_bytes, int)
    kernel = load(f"sm90/{name}.cu", macros, config.device.index, shared_bytes)
    strides = strides_of(p.output_shape, config.memory_format)
    input_strides = strides_of(p.input_shape, config.memory_format)
    grid, block = (min(counts[-1], config.spec.multiprocessors), 1, 1), (threads, 1, 1)

    def call(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = input.new_empty_strided(p.output_shape, strides)
        input = aligned(with_strides(input, input_strides))
        bias_address = 0 if bias is None else (bias := bias.contiguous()).data_ptr()
        kernel.make_current()
        # All else that the kernel reads is there before weights_of launches one; see Kernel.launch.
        weights, _kept = weights_of(weight.contiguous(memory_format=config.memory_format))
        params = params_of(weights, input_of(input), bias_address, output.data_ptr(), *counts)
        kernel.launch(grid, block, params, shared_bytes, overlaps=overlaps)
        return output

    return call
