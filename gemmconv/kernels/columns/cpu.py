"""``gemm_col2im`` on the CPU: torch's product, and the fold and the unfold of csrc/cpu/columns.h.

A forward pass writes the columns of some rows of an image at a time to a ring of rows that stays in the cache: rows
that later outputs read are still there when the next rows are multiplied. Without the C extension, sums of slices and
torch's unfold replace its kernels, in the chunks that a GPU takes.
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gemmconv.kernels.base import Config, Pass, accumulator_dtype, strides_of, with_strides
from gemmconv.kernels.columns.chunking import Chunk, Chunking, Span
from gemmconv.kernels.cpu.direct import layer_of
from gemmconv.kernels.cpu.library import address, integers, isa_name, kernels_for

# Limits of the rule below. Among 290 layers with 1 to 8 output channels and 1 or 2 threads on two cores of an x86 CPU,
# layers within them are 1.06 to 6 times as fast as with torch's operator (oneDNN 3.11), geometric mean 3.1 times.
_INPUTS_OF_AN_OUTPUT, _VALUES_OF_A_THREAD = 24, 4096

CACHED_BYTES = 4 << 20  # bytes of columns that the C kernels fold at once: what two to four cores' L2 caches hold

# Bound before ptflops replaces them, which would count a layer's products beside the layer.
_matmul, _mm = torch.matmul, torch.mm


def is_few_outputs(in_channels: int, out_channels: int) -> bool:
    """Whether a layer has so few output channels that oneDNN, which vectorises over them, is slow."""
    return in_channels >= _INPUTS_OF_AN_OUTPUT * out_channels


def is_faster_than_torch(config: Config) -> bool:
    """Whether a forward pass is faster as columns than by torch's operator.

    It is if oneDNN is slow, in float32 and NCHW, and the addition of a tap is long enough for all threads: at least
    4096 of its ``N * C_out * H_in * W_in`` values for each. Gradients never are.
    """
    p = config.problem
    values = p.batch * p.out_channels * p.in_pixels
    return (
        config.device.type == "cpu"
        and config.dtype == torch.float32
        and config.memory_format is torch.contiguous_format
        and p.groups == 1
        and is_few_outputs(p.in_channels, p.out_channels)
        and values >= _VALUES_OF_A_THREAD * max(2, torch.get_num_threads())
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def is_in_c(config: Config) -> bool:
    """Whether the C kernels for a CPU fold and unfold the columns, in a buffer that fits the cache."""
    return config.device.type == "cpu" and isa_name() is not None


def dtype_of_columns(config: Config, direction: Pass) -> torch.dtype:
    """The type of columns: that of sums in a forward pass, and in C; else that of grad_output, which is unfolded."""
    return accumulator_dtype(config.dtype) if direction == "forward" or is_in_c(config) else config.dtype


class Ring(NamedTuple):
    """A ring of rows of columns, for one image and group: ``step`` rows are multiplied at once, ``rows`` are held."""

    step: int
    rows: int


def ring_of(config: Config) -> Ring:
    """The largest ring that fits the cache and the workspace limit; if none does, the smallest possible one."""
    p = config.problem
    row_bytes = p.gemm_m * p.input_size[1] * accumulator_dtype(config.dtype).itemsize
    halo = p.dilation[0] * (p.kernel_size[0] - 1) // p.stride[0]
    fitting = min(CACHED_BYTES, config.workspace_limit) // max(1, row_bytes)
    if fitting >= p.input_size[0]:
        return Ring(p.input_size[0], p.input_size[0])
    rings = (Ring(step, -(-(halo + step) // step) * step) for step in range(fitting - halo, 0, -1))
    return next((ring for ring in rings if ring.rows <= fitting), Ring(1, halo + 1))


def ring_bytes(config: Config) -> int:
    """Bytes of the columns in the ring."""
    p = config.problem
    return ring_of(config).rows * p.gemm_m * p.input_size[1] * accumulator_dtype(config.dtype).itemsize


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


def prepare(config: Config, direction: Pass, chunks: Chunking, elements: int, slots: int) -> Callable[..., Any]:
    """Prepare a pass in chunks; ``elements`` is the size of the columns, ``slots`` the number of partial sums."""
    if direction == "forward" and is_in_c(config):
        return prepare_forward(config)
    p, steps, accumulator = config.problem, _Steps(config), accumulator_dtype(config.dtype)
    column_dtype = dtype_of_columns(config, direction)

    def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = input.new_empty(p.output_shape)
        columns = input.new_empty(elements, dtype=column_dtype)
        input, weight = input.contiguous(), weight.contiguous()
        for chunk in chunks:
            steps.columns_from_input(input, weight, columns, chunk)
            steps.fold(columns, bias, output, chunk)
        return with_strides(output, strides_of(p.output_shape, config.memory_format))

    def gradients(grad_output: torch.Tensor, input: torch.Tensor | None, weight: torch.Tensor | None) -> Any:
        columns, grad_output = grad_output.new_empty(elements, dtype=column_dtype), grad_output.contiguous()
        grad_input = grad_weight = partials = None
        if weight is not None:
            weight, grad_input = weight.contiguous(), grad_output.new_empty(p.input_shape)
        if input is not None:
            input, partials = input.contiguous(), grad_output.new_zeros((slots, *p.weight_shape), dtype=accumulator)
        for chunk in chunks:
            steps.unfold(grad_output, columns, chunk)
            if weight is not None and grad_input is not None:
                steps.input_grad(columns, weight, grad_input, chunk)
            if input is not None and partials is not None:
                steps.weight_grad(columns, input, partials, chunk)
        if grad_input is not None:
            grad_input = with_strides(grad_input, strides_of(p.input_shape, config.memory_format))
        if partials is not None:
            grad_weight = partials.sum(0).to(config.dtype)
        return grad_input, grad_weight

    if direction == "forward":
        return forward
    if direction == "input_grad":
        return lambda grad_output, weight: gradients(grad_output, None, weight)[0]
    if direction == "weight_grad":
        return lambda grad_output, input: gradients(grad_output, input, None)[1]
    return gradients


class _Steps:
    """Runs the steps of one configuration, for the part of the contiguous tensors that a chunk names.

    Columns are folded into the whole area that they reach, including padding; the chunk's outputs are cut from that.
    """

    def __init__(self, config: Config) -> None:
        self._problem, self._accumulator = config.problem, accumulator_dtype(config.dtype)
        self._layer = layer_of(config, config.dtype, in_groups=False)
        self._kernels = kernels_for(config.dtype) if is_in_c(config) else None

    def columns_from_input(
        self, input: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor, chunk: Chunk
    ) -> None:
        target = self._columns(columns, chunk)
        if target.numel():
            _matmul(self._weight(weight).mT, self._pixels(input, chunk).to(self._accumulator), out=target)

    def fold(self, columns: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor, chunk: Chunk) -> None:
        p = self._problem
        target = output[slice(*chunk.images), :, slice(*chunk.out_rows)]
        sums = target.new_zeros(target.shape, dtype=self._accumulator)
        if chunk.rows:
            by_tap = self._columns(columns, chunk).view(chunk.count, -1, p.taps, chunk.rows, p.input_size[1])
            _, of_area, of_sums = self._overlap(chunk, chunk.out_rows)
            sums[of_sums] = self._area(by_tap)[of_area]
        if bias is not None:
            sums += bias.to(self._accumulator).view(-1, 1, 1)
        target.copy_(sums)

    def _area(self, columns: torch.Tensor) -> torch.Tensor:
        """The sums of columns ``[images, C_out, taps, H, W]``, in at least the extent that they reach.

        All values of a tap belong to one phase of the outputs, whose cells ``q`` take it from ``q - shift``: so with
        cells of a phase side by side a tap is one addition of two slices, which torch shares among its threads.
        (torch's own fold runs on one, and takes 1.5 to 4 times as long: six layers of few output channels, two cores.)
        """
        p, (height, width) = self._problem, columns.shape[3:]
        (stride_h, stride_w), (dilation_h, dilation_w) = p.stride, p.dilation
        cells_h, cells_w = (
            size + dilation * (kernel - 1) // stride
            for size, dilation, kernel, stride in zip((height, width), p.dilation, p.kernel_size, p.stride, strict=True)
        )
        phases = columns.new_zeros((*columns.shape[:2], stride_h, stride_w, cells_h, cells_w))
        for tap in range(p.taps):
            shift_h, phase_h = divmod(tap // p.kernel_size[1] * dilation_h, stride_h)
            shift_w, phase_w = divmod(tap % p.kernel_size[1] * dilation_w, stride_w)
            phase = phases[:, :, phase_h, phase_w]
            phase[:, :, shift_h : shift_h + height, shift_w : shift_w + width] += columns[:, :, tap]
        rows_and_columns = phases.permute(0, 1, 4, 2, 5, 3)  # [images, C_out, cell row, phase, cell column, phase]
        return rows_and_columns.reshape(*columns.shape[:2], cells_h * stride_h, cells_w * stride_w)

    def unfold(self, grad_output: torch.Tensor, columns: torch.Tensor, chunk: Chunk) -> None:
        p, images, target = self._problem, grad_output[slice(*chunk.images)], self._columns(columns, chunk)
        if self._kernels is not None:
            rows = integers(chunk.in_rows)
            for image, of_image in zip(images, target, strict=True):
                self._kernels.im2col(
                    *(ctypes.addressof(self._layer), address(image), address(of_image)),
                    *(rows.ctypes.data, torch.get_num_threads()),
                )
            return
        extent, of_area, of_images = self._overlap(chunk, (0, p.output_size[0]))
        area = grad_output.new_zeros((chunk.count, p.out_channels, *extent))
        area[of_area] = images[of_images]
        unfolded = F.unfold(area, p.kernel_size, dilation=p.dilation, stride=p.stride)
        target.copy_(unfolded.view(target.shape))

    def _overlap(self, chunk: Chunk, out_rows: Span) -> tuple[list[int], tuple[Any, ...], tuple[Any, ...]]:
        """The area that a chunk's columns reach, including padding, and what it has in common with rows of outputs.

        Returns:
            The area's height and width; the indices of the common part in it, and in the rows of outputs.
        """
        p = self._problem
        extents, of_area, of_outputs = list[int](), list[slice](), list[slice]()
        spans = (chunk.in_rows, out_rows), ((0, p.input_size[1]), (0, p.output_size[1]))
        for axis, ((first, last), (out_first, out_last)) in enumerate(spans):
            extent = (last - first - 1) * p.stride[axis] + p.dilation[axis] * (p.kernel_size[axis] - 1) + 1
            origin = first * p.stride[axis] - p.padding[axis]  # the output at the area's first position
            begin = max(origin, out_first)
            end = max(begin, min(origin + extent, out_last))
            extents.append(extent)
            of_area.append(slice(begin - origin, end - origin))
            of_outputs.append(slice(begin - out_first, end - out_first))
        return extents, (..., *of_area), (..., *of_outputs)

    def input_grad(self, columns: torch.Tensor, weight: torch.Tensor, grad_input: torch.Tensor, chunk: Chunk) -> None:
        product = self._weight(weight) @ self._columns(columns, chunk).to(self._accumulator)
        target = grad_input[slice(*chunk.images), :, slice(*chunk.in_rows)]
        target.copy_(product.view(target.shape))

    def weight_grad(self, columns: torch.Tensor, input: torch.Tensor, partials: torch.Tensor, chunk: Chunk) -> None:
        pixels = self._pixels(input, chunk).to(self._accumulator)
        products = pixels @ self._columns(columns, chunk).to(self._accumulator).mT  # [images, groups, K, M]
        partials[: products.shape[0]] += products.view(-1, *partials.shape[1:])

    def _weight(self, weight: torch.Tensor) -> torch.Tensor:  # [groups, K, M]
        p = self._problem
        return weight.to(self._accumulator).view(p.groups, p.gemm_k, p.gemm_m)

    def _pixels(self, input: torch.Tensor, chunk: Chunk) -> torch.Tensor:  # [images, groups, K, P]
        p = self._problem
        rows = input[slice(*chunk.images), :, slice(*chunk.in_rows)]
        return rows.reshape(chunk.count, p.groups, p.gemm_k, chunk.rows * p.input_size[1])

    def _columns(self, columns: torch.Tensor, chunk: Chunk) -> torch.Tensor:  # [images, groups, M, P]
        p = self._problem
        shape = chunk.count, p.groups, p.gemm_m, chunk.rows * p.input_size[1]
        return columns[: math.prod(shape)].view(shape)
