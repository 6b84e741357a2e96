"""The steps of ``gemm_col2im`` on CUDA: cuBLAS for the products, columns/col2im.cu and columns/im2col.cu for the rest.

cuBLAS is column-major and torch is row-major: a row-major matrix [R, C] is, in cuBLAS's eyes, a column-major [C, R] of
leading extent C, its own transpose. So every product below is written transposed, with P the input pixels of a chunk,
M = C_out/groups * K_h * K_w and K = C_in/groups:

    forward      columns^T [P, M]    = input^T [P, K] . weight [K, M]         weight is seen as [M, K]: transposed
    input_grad   grad_input^T [P, K] = columns^T [P, M] . weight^T [M, K]     nothing is transposed
    weight_grad  grad_weight^T [M, K] += columns [M, P] . input^T [P, K]      columns are seen as [P, M]: transposed
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from gemmconv.kernels.base import Config, Direction, accumulator_dtype
from gemmconv.kernels.columns.chunking import Chunk, Span, longest_sum
from gemmconv.kernels.columns.col2im import Col2im, Im2col
from gemmconv.runtime.cublas import Operand, StridedBatchedGemm, handle, library


@dataclass(frozen=True)
class Matrices:
    """One column-major matrix for each image and group: element type, leading extent, strides in elements."""

    dtype: torch.dtype
    leading: int
    image_stride: int
    group_stride: int


class GroupedProduct:
    """C = op(A) op(B) for every image and group, in as few strided-batched calls as their strides allow.

    A call steps by one stride, so it covers the images of one group or the groups of one image, whichever are more.
    """

    def __init__(
        self,
        extents: tuple[int, int, int],
        operands: tuple[Matrices, Matrices, Matrices],
        groups: int,
        **options: bool,
    ) -> None:
        self._groups = groups
        a, b, c = ((x.dtype, x.leading, x.image_stride) for x in operands)
        self._over_images = StridedBatchedGemm(*extents, Operand(*a), Operand(*b), Operand(*c), **options)
        a, b, c = ((x.dtype, x.leading, x.group_stride) for x in operands)
        self._over_groups = StridedBatchedGemm(*extents, Operand(*a), Operand(*b), Operand(*c), **options)
        self._image_bytes = tuple(x.image_stride * x.dtype.itemsize for x in operands)
        self._group_bytes = tuple(x.group_stride * x.dtype.itemsize for x in operands)

    def __call__(self, blas: int, a: int, b: int, c: int, images: int) -> None:
        if images >= self._groups:
            gemm, batch, steps, (step_a, step_b, step_c) = (
                self._over_images,
                images,
                self._groups,
                self._group_bytes,
            )
        else:
            gemm, batch, steps, (step_a, step_b, step_c) = (
                self._over_groups,
                self._groups,
                images,
                self._image_bytes,
            )
        for step in range(steps):
            gemm(blas, a + step * step_a, b + step * step_b, c + step * step_c, batch)


class CudaEngine:
    """Implements ``gemm_col2im.Engine``."""

    def __init__(self, config: Config, direction: Direction) -> None:
        problem = config.problem
        self._problem, self._dtype, self._device = problem, config.dtype, config.device
        self._tf32 = config.precision == "tf32" and config.dtype == torch.float32
        self._longest_sum = longest_sum(config)
        self._width = problem.input_size[1]
        self._input_image_bytes = problem.in_channels * problem.in_pixels * config.dtype.itemsize
        self._output_image_bytes = problem.out_channels * problem.out_pixels * config.dtype.itemsize
        # What a call needs is made at its first use, but for what may not be had: its libraries, its kernel.
        self._forward_product = cache(self._make_forward_product)
        self._input_grad_product = cache(self._make_input_grad_product)
        self._weight_grad_product = cache(self._make_weight_grad_product)
        self._col2im = cache(lambda: Col2im(problem, accumulator_dtype(config.dtype), config.dtype, config.device))
        self._im2col = cache(lambda: Im2col(problem, config.dtype, config.device))
        library()
        (self._col2im if direction == "forward" else self._im2col)()

    def columns_from_input(
        self, input: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor, chunk: Chunk
    ) -> None:
        if pixels := self._pixels(chunk):
            product = self._forward_product(pixels)
            product(handle(), self._at(input, chunk), weight.data_ptr(), columns.data_ptr(), _length(chunk.images))

    def fold(self, columns: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor, chunk: Chunk) -> None:
        self._col2im()(
            columns.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            output.data_ptr() + chunk.images[0] * self._output_image_bytes,
            _length(chunk.images),
            chunk.in_rows,
            chunk.out_rows,
        )

    def unfold(self, grad_output: torch.Tensor, columns: torch.Tensor, chunk: Chunk) -> None:
        images = grad_output.data_ptr() + chunk.images[0] * self._output_image_bytes
        self._im2col()(images, columns.data_ptr(), _length(chunk.images), chunk.in_rows)

    def input_grad(self, columns: torch.Tensor, weight: torch.Tensor, grad_input: torch.Tensor, chunk: Chunk) -> None:
        product = self._input_grad_product(self._pixels(chunk))
        product(
            handle(),
            columns.data_ptr(),
            weight.data_ptr(),
            self._at(grad_input, chunk),
            _length(chunk.images),
        )

    def weight_grad(self, columns: torch.Tensor, input: torch.Tensor, partials: torch.Tensor, chunk: Chunk) -> None:
        pixels, images, slots = self._pixels(chunk), _length(chunk.images), len(partials)
        step = self._longest_sum * self._dtype.itemsize  # from a slice of the pixels to the next
        whole, rest = divmod(pixels, self._longest_sum)
        parts = [(first, min(slots, whole - first), self._longest_sum) for first in range(0, whole, slots)]
        if rest:
            parts.append((whole, 1, rest))
        for first, slices, length in parts:
            # One call sums many images or many slices, each into a partial of its own; the calls follow each other.
            over_slices = slices > images
            if over_slices:
                calls, batch = images, slices
                a_step = self._columns(self._dtype, pixels).image_stride * self._dtype.itemsize
                b_step = self._input_image_bytes
            else:
                calls, batch = slices, images
                a_step = b_step = step
            product = self._weight_grad_product(pixels, length, over_slices)
            a, b = columns.data_ptr() + first * step, self._at(input, chunk) + first * step
            for call in range(calls):
                product(handle(), a + call * a_step, b + call * b_step, partials.data_ptr(), batch)

    def _pixels(self, chunk: Chunk) -> int:
        """Input pixels of each image of a chunk."""
        return _length(chunk.in_rows) * self._width

    def _at(self, input: torch.Tensor, chunk: Chunk) -> int:
        """Address of the chunk's first image and row in an input or its gradient."""
        first_row = chunk.in_rows[0] * self._width * self._dtype.itemsize
        return input.data_ptr() + chunk.images[0] * self._input_image_bytes + first_row

    # The operands, as column-major matrices of the shapes that the module's table calls "seen as".

    def _input(self) -> Matrices:  # [P, K], in rows of all the image's pixels
        pixels, p = self._problem.in_pixels, self._problem
        return Matrices(self._dtype, pixels, p.in_channels * pixels, p.gemm_k * pixels)

    def _weight(self) -> Matrices:  # [M, K], shared by the images
        return Matrices(self._dtype, self._problem.gemm_m, 0, self._problem.gemm_k * self._problem.gemm_m)

    def _columns(self, dtype: torch.dtype, pixels: int) -> Matrices:  # [P, M]
        m = self._problem.gemm_m
        return Matrices(dtype, pixels, self._problem.groups * m * pixels, m * pixels)

    def _make_forward_product(self, pixels: int) -> GroupedProduct:
        p = self._problem
        columns = self._columns(accumulator_dtype(self._dtype), pixels)
        return GroupedProduct(
            (pixels, p.gemm_m, p.gemm_k),
            (self._input(), self._weight(), columns),
            p.groups,
            transpose_a=False,
            transpose_b=True,
            tf32=self._tf32,
        )

    def _make_input_grad_product(self, pixels: int) -> GroupedProduct:
        p = self._problem
        return GroupedProduct(
            (pixels, p.gemm_k, p.gemm_m),
            (self._columns(self._dtype, pixels), self._weight(), self._input()),
            p.groups,
            transpose_a=False,
            transpose_b=False,
            tf32=self._tf32,
        )

    def _make_weight_grad_product(self, pixels: int, length: int, over_slices: bool) -> GroupedProduct:
        """The product over ``length`` of a chunk's pixels, for its images or, in their place, for slices of one."""
        p = self._problem
        columns, input, group = self._columns(self._dtype, pixels), self._input(), p.gemm_k * p.gemm_m
        if over_slices:
            columns, input = (replace(operand, image_stride=self._longest_sum) for operand in (columns, input))
        partials = Matrices(accumulator_dtype(self._dtype), p.gemm_m, p.groups * group, group)  # [M, K]
        return GroupedProduct(
            (p.gemm_m, p.gemm_k, length),
            (columns, input, partials),
            p.groups,
            transpose_a=True,
            transpose_b=False,
            tf32=self._tf32,
            accumulate=True,
        )


def _length(span: Span) -> int:
    return span[1] - span[0]
