"""The steps of ``gemm_col2im`` on the CPU: torch's matrix product, fold and unfold, in the same chunks as on CUDA."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gemmconv.algorithms.base import Config, accumulator_dtype
from gemmconv.algorithms.chunking import Chunk, Span


class CpuEngine:
    """Implements ``gemm_col2im.Engine``.

    torch's fold knows neither parts of an image nor every output_padding. So rows of columns are folded into the whole
    area that they reach, its padding not cut away yet, and what belongs to the chunk is cut from that.
    """

    def __init__(self, config: Config) -> None:
        self._problem = config.problem
        self._accumulator = accumulator_dtype(config.dtype)

    def columns_from_input(
        self, input: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor, chunk: Chunk
    ) -> None:
        target = self._columns(columns, chunk)
        if target.numel():
            torch.matmul(self._weight(weight).mT, self._pixels(input, chunk).to(self._accumulator), out=target)

    def fold(self, columns: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor, chunk: Chunk) -> None:
        target = output[_slice(chunk.images), :, _slice(chunk.out_rows)]
        sums = target.new_zeros(target.shape, dtype=self._accumulator)
        if chunk.in_rows[0] < chunk.in_rows[1]:
            self._fold_into(sums, columns, chunk)
        if bias is not None:
            sums += bias.to(self._accumulator).view(-1, 1, 1)
        target.copy_(sums)

    def _fold_into(self, sums: torch.Tensor, columns: torch.Tensor, chunk: Chunk) -> None:
        p = self._problem
        rows = chunk.in_rows[1] - chunk.in_rows[0]
        reached = (self._reach(0, rows), self._reach(1, p.input_size[1]))
        area = F.fold(
            self._columns(columns, chunk).flatten(1, 2),
            reached,
            p.kernel_size,
            dilation=p.dilation,
            stride=p.stride,
        )
        # Row r of the area is output row r + in_row * S - P; its column c is output column c - P.
        area_rows, sum_rows = _overlap(
            reached[0], chunk.in_rows[0] * p.stride[0] - p.padding[0], chunk.out_rows[0], sums.shape[2]
        )
        area_columns, sum_columns = _overlap(reached[1], -p.padding[1], 0, sums.shape[3])
        sums[:, :, sum_rows, sum_columns] = area[:, :, area_rows, area_columns]

    def unfold(self, grad_output: torch.Tensor, columns: torch.Tensor, chunk: Chunk) -> None:
        p = self._problem
        rows = chunk.in_rows[1] - chunk.in_rows[0]
        reached = (self._reach(0, rows), self._reach(1, p.input_size[1]))
        area = grad_output.new_zeros((chunk.images[1] - chunk.images[0], p.out_channels, *reached))
        area_rows, grad_rows = _overlap(
            reached[0], chunk.in_rows[0] * p.stride[0] - p.padding[0], 0, grad_output.shape[2]
        )
        area_columns, grad_columns = _overlap(reached[1], -p.padding[1], 0, grad_output.shape[3])
        area[:, :, area_rows, area_columns] = grad_output[_slice(chunk.images), :, grad_rows, grad_columns]
        unfolded = F.unfold(area, p.kernel_size, dilation=p.dilation, stride=p.stride)
        target = self._columns(columns, chunk)
        target.copy_(unfolded.view(target.shape))

    def input_grad(self, columns: torch.Tensor, weight: torch.Tensor, grad_input: torch.Tensor, chunk: Chunk) -> None:
        product = self._weight(weight) @ self._columns(columns, chunk).to(self._accumulator)
        p = self._problem
        grad_input[_slice(chunk.images), :, _slice(chunk.in_rows)] = product.view(
            -1, p.in_channels, chunk.in_rows[1] - chunk.in_rows[0], p.input_size[1]
        ).to(grad_input.dtype)

    def weight_grad(self, columns: torch.Tensor, input: torch.Tensor, partials: torch.Tensor, chunk: Chunk) -> None:
        pixels = self._pixels(input, chunk).to(self._accumulator)
        products = pixels @ self._columns(columns, chunk).to(self._accumulator).mT  # [images, groups, K, M]
        partials[: products.shape[0]] += products.view(-1, *partials.shape[1:])

    def _reach(self, axis: int, size: int) -> int:
        """Extent of what ``size`` input positions of an axis reach, padding not cut away."""
        p = self._problem
        return (size - 1) * p.stride[axis] + p.dilation[axis] * (p.kernel_size[axis] - 1) + 1

    def _weight(self, weight: torch.Tensor) -> torch.Tensor:  # [groups, K, M]
        p = self._problem
        return weight.to(self._accumulator).view(p.groups, p.gemm_k, p.gemm_m)

    def _pixels(self, input: torch.Tensor, chunk: Chunk) -> torch.Tensor:  # [images, groups, K, P]
        p = self._problem
        rows = input[_slice(chunk.images), :, _slice(chunk.in_rows)]
        return rows.reshape(rows.shape[0], p.groups, p.gemm_k, rows.shape[2] * rows.shape[3])

    def _columns(self, columns: torch.Tensor, chunk: Chunk) -> torch.Tensor:  # [images, groups, M, P]
        p = self._problem
        images = chunk.images[1] - chunk.images[0]
        pixels = (chunk.in_rows[1] - chunk.in_rows[0]) * p.input_size[1]
        return columns[: images * p.groups * p.gemm_m * pixels].view(images, p.groups, p.gemm_m, pixels)


def _slice(span: Span) -> slice:
    return slice(*span)


def _overlap(size_a: int, origin_a: int, origin_b: int, size_b: int) -> tuple[slice, slice]:
    """The common part of two stretches of one axis, as a slice of each."""
    begin = max(origin_a, origin_b)
    end = max(begin, min(origin_a + size_a, origin_b + size_b))
    return slice(begin - origin_a, end - origin_a), slice(begin - origin_b, end - origin_b)
