"""``gemm_col2im``: a matrix product into columns, then a fold. The clear, general algorithm of bounded memory.

Forward, per image n and group g, with M = C_out/groups * K_h * K_w and K = C_in/groups:

    columns[n, g]  [M, H_in*W_in] = weight[g] [K, M]^T . input[n, g] [K, H_in*W_in]
    output[n]      = col2im(columns[n]) + bias

The backward passes go the other way, from columns = im2col(grad_output):

    grad_input[n, g]  [K, H_in*W_in] = weight[g] [K, M] . columns[n, g] [M, H_in*W_in]
    grad_weight[g]    [K, M]         = sum over n of input[n, g] [K, H_in*W_in] . columns[n, g]^T

Both gradients at once take the same columns. A contiguous NCHW tensor already is those row-major matrices, and one in
channels_last their transposes, so nothing is rearranged before a product; outputs are folded, and grad_output is
unfolded, in NCHW. The columns of a chunk (see ``chunking``) share one workspace. Sums stay in float32 (float64 for
float64) until the result is written, so 16-bit results are rounded once, and every sum has one order, so results repeat
to the bit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from gemmconv.algorithms.base import AlgorithmOfOne
from gemmconv.device import REFERENCE
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Direction, Pass, accumulator_dtype, strides_of, why_no_kernels
from gemmconv.kernels.columns import cpu
from gemmconv.kernels.columns.chunking import BLOCK, Chunking, backward_chunks, forward_chunks, longest_sum
from gemmconv.kernels.columns.products import UNIT, Columns, image_format, slices_of
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.cpu import estimate
from gemmconv.kernels.integers import INT32_MAX
from gemmconv.kernels.layout.transpose import grad_output_transpose_seconds, input_transpose_seconds
from gemmconv.kernels.macros import why_not_dtype
from gemmconv.kernels.program import Operand, Output, Program, Step, Zero, grad_input_of, grad_weight_of
from gemmconv.kernels.splits.reduce import partial_bytes, sum_partials

# Rates that were reached on Hopper; other GPUs scale them by the ratio of the devices' peak rates.
_COST = costs_of("gemm_col2im")
_GRADIENTS = costs_of("gemm_col2im/gradients")
_FORWARD_RATE, _GRADIENT_RATE = _COST.table("rate"), _GRADIENTS.table("rate")
_TERM_SECONDS = _GRADIENTS.table("term_seconds")

ahead = ContextVar("ahead", default=False)  # whether a call is prepared ahead, before the user has made it

_PARTIALS_SHARE = 4  # one part in so many of the workspace holds the partial sums of slices


class GemmCol2im(AlgorithmOfOne):
    name = "gemm_col2im"
    computed_in = torch.contiguous_format

    def why_not(self, config: Config, direction: Pass = "forward") -> str | None:
        if (reason := why_no_kernels(config.device, config.spec) or why_not_dtype(config.dtype)) is not None:
            return reason
        if config.device.type not in ("cpu", "cuda"):
            return f"the device must be cpu or cuda, got {config.device.type}"
        problem = config.problem
        planes, rows = problem.batch * problem.out_channels, math.prod(problem.output_size[:-1])
        largest = max(problem.in_pixels, problem.gemm_m, planes, rows, problem.output_size[-1])
        if largest > INT32_MAX:
            return f"the extents of its matrices must stay below 2**31, got {largest}"
        return None

    def tiles(self, config: Config, direction: Pass) -> tuple[Chunking, ...]:
        return (_chunks(config, direction),)

    def workspace_bytes(self, config: Config, direction: Pass, tile: object = None) -> int:
        p, chunks, on_cpu = config.problem, _chunks(config, direction), config.device.type == "cpu"
        if direction == "forward" and on_cpu:
            return cpu.ring_of(config).bytes
        columns = _column_elements(p, chunks) * cpu.dtype_of_columns(config, direction).itemsize
        if direction == "input_grad" and on_cpu:  # the product, before it goes to its rows
            columns += columns * p.gemm_k // max(1, p.gemm_m)
        return columns + _partials(config, direction, chunks) * partial_bytes(config)

    def seconds(self, config: Config, direction: Pass, tile: object = None) -> float:
        """Estimated seconds: columns written and read, products, weights read or summed for each image, launches.

        In channels_last, transposes of tensors that are folded or unfolded are added. Both gradients at once take the
        weight gradient's chunks, which are more, and a second product of the columns of each.
        """
        if config.device.type == "cpu":
            return math.inf if direction == "grads" else estimate.COLUMNS * estimate.fused_seconds(config, direction)
        return _seconds(config, direction)

    def prepare(self, config: Config, direction: Pass, tile: object = None) -> Callable[..., Any]:
        if config.device.type == "cuda":
            return self.program(config, direction).prepare(config.device)
        self._warn_if_over_limit(config, direction)
        if direction == "forward":
            return cpu.prepare_forward(config)
        chunks = _chunks(config, direction)
        elements, slots = _column_elements(config.problem, chunks), _partials(config, direction, chunks)
        return cpu.prepare_gradients(config, direction, chunks, elements, slots)

    def program(self, config: Config, direction: Pass, tile: object = None) -> Program:
        self._warn_if_over_limit(config, direction)
        p, nchw, columns, steps = config.problem, torch.contiguous_format, Columns(config), list[Step]()
        chunks = _chunks(config, direction)
        scratch = {"columns": _column_elements(p, chunks) * cpu.dtype_of_columns(config, direction).itemsize}
        input, weight = Operand("input", image_format(config.of_weight)), Operand("weight", nchw)
        if direction == "forward":
            for chunk in chunks:
                steps += [*columns.from_input(chunk), *columns.fold(chunk)]
            output = Output("output", p.output_shape, strides_of(p.output_shape, config.memory_format), nchw)
            return Program(config.dtype, (input, weight, Operand("bias", nchw)), (output,), tuple(steps), scratch)
        of_input, of_weight = direction != "weight_grad", direction != "input_grad"
        slots = _partials(config, direction, chunks)
        sum_bytes = slots * partial_bytes(config)
        operands, outputs = [Operand("grad_output", nchw)], list[Output]()
        # The first chunk overwrites the partial sums, if it alone writes all of them; else they are cleared before.
        first = next((one for one in list(chunks)[:1] if columns.fills(one, slots)), None)
        if of_weight:
            operands.append(input)
            if first is None:
                steps.append(Zero("partials", sum_bytes))
        if of_input:
            operands.append(weight)
            outputs.append(grad_input_of(config, image_format(config)))
        for chunk in chunks:
            steps += columns.unfold(chunk)
            if of_input:
                steps += columns.input_grad(chunk)
            if of_weight:
                steps += columns.weight_grad(chunk, slots, accumulates=chunk != first)
        if of_weight:
            outputs.append(grad_weight_of(p))
            if slots == 1 and accumulator_dtype(config.dtype) == config.dtype:
                steps = [step.renamed({"partials": "grad_weight"}) for step in steps]
            else:
                scratch["partials"] = sum_bytes
                steps.append(sum_partials(config, slots))
        return Program(config.dtype, tuple(operands), tuple(outputs), tuple(steps), scratch)

    def _warn_if_over_limit(self, config: Config, direction: Pass) -> None:
        needed = self.workspace_bytes(config, direction)
        if needed > config.workspace_limit and not ahead.get():
            warnings.warn(
                f"gemm_col2im: workspace_limit={config.workspace_limit} bytes is less than the smallest piece of this "
                f"layer's {direction} needs; it takes {needed} bytes",
                RuntimeWarning,
                stacklevel=2,
            )


@lru_cache(maxsize=1024)
def _seconds(config: Config, direction: Pass) -> float:
    """The cached part of :meth:`GemmCol2im.seconds`, which choosing both gradients needs many times."""
    if direction == "forward":
        return _forward_seconds(config) + _transpose_seconds(config)
    chunks = _chunks(config, direction)
    moved = config.problem.column_bytes(config.dtype.itemsize) / config.spec.ratio("bandwidth")
    seconds = chunks.count * _GRADIENTS.launch_seconds + moved / _GRADIENTS.copy_rate  # of im2col
    if direction != "grads":
        return seconds + _gradient_seconds(config, direction, chunks) + _transpose_seconds(config)
    seconds += _gradient_seconds(config.of_weight, "weight_grad", chunks)
    seconds += _gradient_seconds(config, "input_grad", chunks)
    return _COST.at_once_factor * (seconds + _transpose_seconds(config, config.of_weight))


def _transpose_seconds(*configs: Config) -> float:
    """Seconds of all transposes in the passes of a call; products take most tensors in either format."""
    transposed = (one for one in configs if image_format(one) is not one.memory_format)
    return min(map(grad_output_transpose_seconds, configs)) + sum(map(input_transpose_seconds, transposed))


def _kind(config: Config) -> str:
    """The name of the GPU's rate that bounds products; float64 scales with the rate of float32."""
    if config.dtype.itemsize == 2:
        return "half"
    return "tf32" if config.dtype == torch.float32 and config.precision == "tf32" else "fp32"


def _forward_seconds(config: Config) -> float:
    """Seconds of a forward pass in NCHW: products, traffic of columns and weights, launches."""
    chunks, problem = _chunks(config, "forward"), config.problem
    itemsize, kind = accumulator_dtype(config.dtype).itemsize, _kind(config)
    rate = _FORWARD_RATE[kind] * config.spec.ratio(kind)
    if kind != "fp32" and problem.in_pixels * config.dtype.itemsize % UNIT:
        rate /= _COST.unaligned_factor
    moved = (2 * problem.column_bytes(itemsize) + problem.least_bytes(config.dtype.itemsize)) / _COST.copy_rate
    moved += problem.batch * math.prod(problem.weight_shape) * config.dtype.itemsize / _COST.weights_rate
    moved /= config.spec.ratio("bandwidth")
    launches = chunks.count * (1 + min(chunks.images, problem.groups))  # a product has one group, or one image
    return launches * _COST.launch_seconds + moved + problem.useful_flops / rate


def _gradient_seconds(config: Config, direction: Direction, chunks: Chunking) -> float:
    """Seconds of the products of a gradient, and of adding up its partial sums.

    A thread block adds all terms of its results one after the other, however few blocks there are. But cuBLAS splits K
    of a product that is alone in its call, so that several blocks share its sums.
    """
    p, spec, itemsize, kind = config.problem, config.spec, config.dtype.itemsize, _kind(config)
    pixels, images = chunks.in_rows * p.input_size[-1], min(chunks.images, p.batch)
    if direction == "weight_grad":
        parts = [part[1:] for part in slices_of(pixels, longest_sum(config), _partials(config, direction, chunks))]
        results, weights_row = (p.gemm_m, p.gemm_k), p.gemm_m * accumulator_dtype(config.dtype).itemsize
        partials = p.batch * -(-p.in_pixels // pixels) * sum(slices for slices, _ in parts)
        of_weights = 2 * partials * partial_bytes(config) / _GRADIENTS.partials_rate
    else:
        parts, results, weights_row = [(1, p.gemm_m)], (p.gemm_k, pixels), p.gemm_m * itemsize
        of_weights = p.batch * math.prod(p.weight_shape) * itemsize / _GRADIENTS.weights_rate
    products = terms = 0
    for slices, length in parts:
        calls, covered = sorted((slices, images))
        calls, batch = chunks.count * calls * min(covered, p.groups), max(covered, p.groups)
        blocks = batch * math.prod(-(-extent // BLOCK) for extent in results)
        summed = length if batch > 1 else min(length, int(_GRADIENTS.most_terms))
        products, terms = products + calls, terms + calls * summed * -(-blocks // spec.multiprocessors)
    a_block = spec.ratio(kind) * REFERENCE.multiprocessors / spec.multiprocessors  # of its rate on the reference
    work = max(p.useful_flops / (_GRADIENT_RATE[kind] * spec.ratio(kind)), terms * _TERM_SECONDS[kind] / a_block)
    images_row = p.in_channels if image_format(config) is torch.channels_last else p.in_pixels
    if kind != "fp32" and (pixels * itemsize % UNIT or images_row * itemsize % UNIT or weights_row % UNIT):
        work *= _GRADIENTS.unaligned_factor
    moved = of_weights + (p.column_bytes(itemsize) + p.least_bytes(itemsize)) / _GRADIENTS.copy_rate
    launches = products + (direction == "weight_grad")
    return launches * _GRADIENTS.launch_seconds + moved / spec.ratio("bandwidth") + work


def _chunks(config: Config, direction: Pass) -> Chunking:
    p, itemsize, limit = config.problem, cpu.dtype_of_columns(config, direction).itemsize, config.workspace_limit
    if direction == "forward":
        return forward_chunks(p, itemsize, limit)
    if config.device.type == "cpu":
        if direction == "input_grad":
            return backward_chunks(p, itemsize, min(limit, cpu.CACHED_BYTES) * p.gemm_m // (p.gemm_m + p.gemm_k))
        partial = max(1, partial_bytes(config))
        cached = max(1, min(cpu.CACHED_BYTES, limit - partial))
        chunks = backward_chunks(p, itemsize, cached)
        return replace(chunks, images=max(1, min(chunks.images, (limit - cached) // partial)))
    if direction == "input_grad":
        return backward_chunks(p, itemsize, limit)
    if longest_sum(config) < p.in_pixels:
        limit -= limit // _PARTIALS_SHARE
    return backward_chunks(p, itemsize, limit, partial_bytes(config))


def _partials(config: Config, direction: Pass, chunks: Chunking) -> int:
    """How many partial sums of a weight gradient are kept: one for each image of a chunk, or slice of its pixels."""
    if direction in ("forward", "input_grad"):
        return 0
    slices = chunks.in_rows * config.problem.input_size[-1] // longest_sum(config)
    fitting = config.workspace_limit // _PARTIALS_SHARE // max(1, partial_bytes(config))
    return max(chunks.images, min(slices, fitting))


def _column_elements(problem: Problem, chunks: Chunking) -> int:
    return chunks.images * problem.out_channels * problem.taps * chunks.in_rows * problem.input_size[-1]
