"""``gemm_col2im`` on the CPU: torch's product, and the fold and the unfold of csrc/cpu/columns.h.

A forward pass writes the columns of some rows of an image at a time to a ring of rows that stays in the cache: rows
that later outputs read are still there when the next rows are multiplied.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Pass, accumulator_dtype, strides_of, with_strides
from gemmconv.kernels.columns.chunking import Chunk, Chunking
from gemmconv.kernels.cpu.direct import layer_of
from gemmconv.kernels.cpu.library import address, integers, kernels_for
from gemmconv.kernels.integers import up_to_multiple

CACHED_BYTES = 4 << 20  # bytes of columns that the C kernels fold at once: what two to four cores' L2 caches hold

_mm = torch.mm  # bound before ptflops replaces it, which would count a layer's products beside the layer


def dtype_of_columns(config: Config, direction: Pass) -> torch.dtype:
    """The type of columns: that of sums in a forward pass, and on a CPU; else that of grad_output."""
    is_wide = direction == "forward" or config.device.type == "cpu"
    return accumulator_dtype(config.dtype) if is_wide else config.dtype


class Ring(NamedTuple):
    """A ring of rows of columns, for one image and group: ``step`` rows are multiplied at once, ``rows`` are held."""

    step: int
    rows: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


def ring_of(config: Config) -> Ring:
    """The largest ring that fits the cache and the workspace limit; if none does, the smallest possible one."""
    p = config.problem
    row_bytes = p.gemm_m * p.input_size[1] * accumulator_dtype(config.dtype).itemsize
    halo = p.dilation[0] * (p.kernel_size[0] - 1) // p.stride[0]
    fitting = min(CACHED_BYTES, config.workspace_limit) // max(1, row_bytes)
    if fitting >= p.input_size[0]:
        return Ring(p.input_size[0], p.input_size[0], row_bytes)
    rings = (Ring(step, up_to_multiple(halo + step, step), row_bytes) for step in range(fitting - halo, 0, -1))
    return next((ring for ring in rings if ring.rows <= fitting), Ring(1, halo + 1, row_bytes))


def prepare_forward(config: Config) -> Callable[..., torch.Tensor]:
    """Prepare a forward pass: products into a ring of rows; an output row is folded once its columns are there."""
    p, ring, kernels, wide = config.problem, ring_of(config), kernels_for(config.dtype), accumulator_dtype(config.dtype)
    (height, width), (stride, _), (padding, _) = p.input_size, p.stride, p.padding
    layer, strides = layer_of(config, config.dtype), strides_of(p.output_shape, config.memory_format)
    chunks, done = list[tuple[int, int, Any]](), 0
    for begin in range(0, height, ring.step):
        end = min(height, begin + ring.step)
        upto = p.output_size[0] if end == height else min(p.output_size[0], max(done, end * stride - padding))
        chunks.append((begin, end, integers((done, upto))))
        done = upto

    def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = input.new_empty(p.output_shape)
        columns = input.new_empty((p.gemm_m, ring.rows * width), dtype=wide)
        images = input.contiguous().to(wide).view(p.batch, p.groups, p.gemm_k, height * width)
        weights = weight.contiguous().to(wide).view(p.groups, p.gemm_k, p.gemm_m).mT
        output_bytes = p.gemm_m // max(1, p.taps) * p.out_pixels * output.element_size()
        biases = None if bias is None else bias.contiguous().view(p.groups, -1)
        for n in range(p.batch if output.numel() else 0):
            for group in range(p.groups):
                image = output.data_ptr() + (n * p.groups + group) * output_bytes
                added = None if biases is None else biases[group].data_ptr()
                for begin, end, rows in chunks:
                    at = begin % ring.rows * width
                    part = images[n, group, :, begin * width : end * width]
                    _mm(weights[group], part, out=columns[:, at : at + (end - begin) * width])
                    kernels.col2im(
                        *(ctypes.addressof(layer), columns.data_ptr(), added, image, ring.rows),
                        *(rows.ctypes.data, torch.get_num_threads()),
                    )
        return with_strides(output, strides)

    return forward


def prepare_gradients(
    config: Config, direction: Pass, chunks: Chunking, elements: int, slots: int
) -> Callable[..., Any]:
    """Prepare gradients in chunks; ``elements`` is the size of the columns, ``slots`` the number of partial sums."""
    p, wide, kernels = config.problem, accumulator_dtype(config.dtype), kernels_for(config.dtype)
    layer = layer_of(config, config.dtype, in_groups=False)

    def columns_of(grad_output: torch.Tensor, chunk: Chunk, buffer: torch.Tensor) -> torch.Tensor:
        images, pixels = grad_output[slice(*chunk.images)], chunk.rows * p.input_size[1]
        shape = chunk.count, p.groups, p.gemm_m, pixels
        columns, rows = buffer[: math.prod(shape)].view(shape), integers(chunk.in_rows)
        for image, of_image in zip(images, columns, strict=True):
            kernels.im2col(
                *(ctypes.addressof(layer), address(image), address(of_image)),
                *(rows.ctypes.data, torch.get_num_threads()),
            )
        return columns

    @torch.autocast("cpu", enabled=False)
    def gradients(grad_output: torch.Tensor, input: torch.Tensor | None, weight: torch.Tensor | None) -> Any:
        grad_output, buffer = grad_output.contiguous(), grad_output.new_empty(elements, dtype=wide)
        grad_input = grad_weight = None
        if weight is not None:
            weights = weight.contiguous().to(wide).view(p.groups, p.gemm_k, p.gemm_m)
            grad_input = grad_output.new_empty(p.input_shape)
        if input is not None:
            input, partials = input.contiguous(), grad_output.new_zeros((slots, *p.weight_shape), dtype=wide)
        for chunk in chunks:
            columns = columns_of(grad_output, chunk, buffer)
            if grad_input is not None:
                target = grad_input[slice(*chunk.images), :, slice(*chunk.in_rows)]
                target.copy_((weights @ columns).view(target.shape))
            if input is not None:
                # [images, groups, K, M] without a name, which would hold its memory until the call ends
                partials[: chunk.count] += (_pixels(p, input, chunk, wide) @ columns.mT).view(-1, *p.weight_shape)
            del columns  # before the next chunk's are made
        if grad_input is not None:
            grad_input = with_strides(grad_input, strides_of(p.input_shape, config.memory_format))
        if input is not None:
            grad_weight = partials.sum(0).to(config.dtype)
        return grad_input, grad_weight

    if direction == "input_grad":
        return lambda grad_output, weight: gradients(grad_output, None, weight)[0]
    if direction == "weight_grad":
        return lambda grad_output, input: gradients(grad_output, input, None)[1]
    return gradients


def _pixels(p: Problem, input: torch.Tensor, chunk: Chunk, wide: torch.dtype) -> torch.Tensor:  # [images, groups, K, P]
    rows = input[slice(*chunk.images), :, slice(*chunk.in_rows)]
    return rows.reshape(chunk.count, p.groups, p.gemm_k, chunk.rows * p.input_size[1]).to(wide)
