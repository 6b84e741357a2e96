"""The steps of ``gemm_col2im`` on CUDA: cuBLAS for the products, columns/col2im.cu and columns/im2col.cu for the rest.

cuBLAS is column-major and torch is row-major: a row-major matrix [R, C] is, in cuBLAS's eyes, a column-major [C, R] of
leading extent C, its own transpose. So every product below is written transposed, with P the input pixels of a chunk,
M = C_out/groups * K_h * K_w and K = C_in/groups:

    forward      columns^T [P, M]    = input^T [P, K] . weight [K, M]         weight is seen as [M, K]: transposed
    input_grad   grad_input^T [P, K] = columns^T [P, M] . weight^T [M, K]     nothing is transposed
    weight_grad  grad_weight^T [M, K] += columns [M, P] . input^T [P, K]      columns are seen as [P, M]: transposed

Images in channels_last, rows of pixels [P, C_in], are seen as [K, P]: transposed where they are read. Where they are
written, it is the transpose that is computed:

    input_grad   grad_input [K, P] = weight [K, M] . columns [M, P]           both are transposed
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from gemmconv.kernels.base import Config, accumulator_dtype
from gemmconv.kernels.columns import col2im
from gemmconv.kernels.columns.chunking import Chunk, longest_sum
from gemmconv.kernels.program import At, Extent3, Gemm, Matrices, Step

UNIT = 16  # bytes that cuBLAS's kernels copy at once


@dataclass(frozen=True)
class _Matrices:
    """Column-major matrices, one for each image, slice of its pixels, and group."""

    at: At  # address of the first
    dtype: torch.dtype  # type of the elements
    leading: int  # leading extent
    strides: Extent3  # elements from one image, slice and group to the next; 0 where all share a matrix

    def further(self, elements: int) -> _Matrices:
        """These matrices with the address moved on by so many elements."""
        return replace(self, at=At(self.at.tensor, self.at.offset + elements * self.dtype.itemsize))


def slices_of(pixels: int, longest: int, slots: int) -> list[tuple[int, int, int]]:
    """Cut pixels into slices of at most ``longest`` pixels, and the slices into parts of at most ``slots`` slices.

    Returns:
        For each part its first slice, its number of slices, and the pixels of a slice.

    >>> slices_of(3500, 1024, 2)
    [(0, 2, 1024), (2, 1, 1024), (3, 1, 428)]
    """
    whole, rest = divmod(pixels, longest)
    parts = [(first, min(slots, whole - first), longest) for first in range(0, whole, slots)]
    return [*parts, (whole, 1, rest)] if rest else parts


def image_format(config: Config) -> torch.memory_format:
    """The format in which products read the input, or write its gradient: NCHW, or channels_last for such tensors.

    channels_last is transposed if the channels of a group are not whole units: cuBLAS would take up to 5 times as long.
    """
    last = config.problem.gemm_k * config.dtype.itemsize % UNIT == 0
    return config.memory_format if last else torch.contiguous_format


class Columns:
    """Makes the steps of one configuration, for the part of the dense tensors that a chunk names."""

    def __init__(self, config: Config) -> None:
        self._problem, self._dtype = config.problem, config.dtype
        self._input_last, self._grad_input_last = (
            image_format(one) is torch.channels_last for one in (config.of_weight, config)
        )
        self._sums = accumulator_dtype(config.dtype)
        self._tf32 = config.precision == "tf32" and config.dtype == torch.float32
        self._longest_sum = longest_sum(config)

    def from_input(self, chunk: Chunk) -> Iterator[Step]:
        """columns = weight^T . input"""
        p, pixels = self._problem, self._pixels(chunk)
        if pixels:
            input, last = self._images("input", chunk, self._input_last), self._input_last
            operands, counts = (input, self._weight, self._columns(self._sums, pixels)), (chunk.count, 1, p.groups)
            yield from self._products((pixels, p.gemm_m, p.gemm_k), operands, counts, (last, True))

    def fold(self, chunk: Chunk) -> Iterator[Step]:
        """output = col2im(columns) + bias"""
        output, rows = self._first_image("output", chunk), (chunk.in_rows, chunk.out_rows)
        return col2im.fold(self._problem, self._sums, self._dtype, output, chunk.count, *rows, bias="bias")

    def unfold(self, chunk: Chunk) -> Iterator[Step]:
        """columns = im2col(grad_output)"""
        images = self._first_image("grad_output", chunk)
        return col2im.unfold(self._problem, self._dtype, images, chunk.count, chunk.in_rows)

    def input_grad(self, chunk: Chunk) -> Iterator[Step]:
        """grad_input = weight . columns"""
        p, pixels, last = self._problem, self._pixels(chunk), self._grad_input_last
        columns, grad_input = self._columns(self._dtype, pixels), self._images("grad_input", chunk, last)
        operands = (self._weight, columns, grad_input) if last else (columns, self._weight, grad_input)
        extents = (p.gemm_k, pixels, p.gemm_m) if last else (pixels, p.gemm_k, p.gemm_m)
        yield from self._products(extents, operands, (chunk.count, 1, p.groups), (last, last))

    def fills(self, chunk: Chunk, slots: int) -> bool:
        """Whether the weight gradient of a chunk writes each of ``slots`` partial sums by one product of an image."""
        return chunk.count == slots and 0 < self._pixels(chunk) <= self._longest_sum

    def weight_grad(self, chunk: Chunk, slots: int, accumulates: bool = True) -> Iterator[Step]:
        """partials += columns . input^T, over each image or each slice of its pixels, into ``slots`` partial sums.

        One call sums many images or many slices, each into its own partial sum; calls run one after the other. If the
        chunk :meth:`fills` the partial sums, it may overwrite them (``accumulates=False``).
        """
        p, pixels, images, longest = self._problem, self._pixels(chunk), chunk.count, self._longest_sum
        columns, input = self._columns(self._dtype, pixels), self._images("input", chunk, self._input_last)
        group = p.gemm_k * p.gemm_m
        for first, slices, length in slices_of(pixels, longest, slots):
            a, b = (one.further(first * one.strides[1]) for one in (columns, input))
            image, of_slice = (0, p.groups * group) if slices > images else (p.groups * group, 0)
            partials = _Matrices(At("partials"), self._sums, p.gemm_m, (image, of_slice, group))  # [M, K]
            extents, counts = (p.gemm_m, p.gemm_k, length), (images, slices, p.groups)
            yield from self._products(extents, (a, b, partials), counts, (True, self._input_last), accumulates)

    def _products(
        self,
        extents: Extent3,
        operands: tuple[_Matrices, _Matrices, _Matrices],
        counts: Extent3,
        transposed: tuple[bool, bool],
        accumulates: bool = False,
    ) -> Iterator[Gemm]:
        """C = op(A) op(B) for ``counts`` images, slices and groups, in few strided-batched calls.

        A call steps by one stride, so it covers the images, the slices or the groups, whichever are most.
        """
        images, slices, groups = range(3)
        covered, repeated = (slices, images) if counts[slices] > counts[images] else (images, slices)
        batched, others = (covered, groups) if counts[covered] >= counts[groups] else (groups, covered)
        for i, j in itertools.product(range(counts[repeated]), range(counts[others])):
            firsts = (one.further(i * one.strides[repeated] + j * one.strides[others]) for one in operands)
            a, b, c = (Matrices(one.at, one.dtype, one.leading, one.strides[batched]) for one in firsts)
            yield Gemm(extents, (a, b, c), counts[batched], transposed, self._tf32, accumulates)

    def _pixels(self, chunk: Chunk) -> int:
        """Input pixels of each image of a chunk."""
        return chunk.rows * self._problem.input_size[-1]

    def _first_image(self, name: str, chunk: Chunk) -> At:
        """Where the first image of a chunk begins in the output or in grad_output."""
        image_bytes = self._problem.out_channels * self._problem.out_pixels * self._dtype.itemsize
        return At(name, chunk.images[0] * image_bytes)

    # The operands, as column-major matrices of the shapes that the module's table calls "seen as".

    def _images(self, name: str, chunk: Chunk, last: bool) -> _Matrices:
        """[P, K], in rows of all the image's pixels; in channels_last [K, P], in rows of all channels."""
        pixels, p = self._problem.in_pixels, self._problem
        leading, pixel, channel = (p.in_channels, p.in_channels, 1) if last else (pixels, 1, pixels)
        first = chunk.images[0] * p.in_channels * pixels + chunk.in_rows[0] * p.input_size[-1] * pixel
        at = At(name, first * self._dtype.itemsize)
        strides = p.in_channels * pixels, self._longest_sum * pixel, p.gemm_k * channel
        return _Matrices(at, self._dtype, leading, strides)

    @property
    def _weight(self) -> _Matrices:  # [M, K], shared by the images
        p = self._problem
        return _Matrices(At("weight"), self._dtype, p.gemm_m, (0, 0, p.gemm_k * p.gemm_m))

    def _columns(self, dtype: torch.dtype, pixels: int) -> _Matrices:  # [P, M]
        p = self._problem
        strides = p.groups * p.gemm_m * pixels, self._longest_sum, p.gemm_m * pixels
        return _Matrices(At("columns"), dtype, pixels, strides)
