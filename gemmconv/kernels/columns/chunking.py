"""Cuts a problem into chunks whose columns fit a workspace. Pure integer arithmetic.

A chunk has as many whole images as fit. If not even one fits, it has rows of one image: a forward chunk owns some
output rows and reads the input rows that reach them, so neighbouring chunks recompute the few rows that both read, and
every output is summed and rounded in one place. A backward chunk owns input rows, which share nothing.

Volumes are cut between slices. Rows of a volume are those of all its slices, one slice after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config
from gemmconv.kernels.integers import even_share

_LONGEST_SUM = 1024  # pixels
BLOCK = 64  # rows and columns of a product's result that one thread block computes, about
_LEAST_SLICES = 16

Span = tuple[int, int]  # begin, end


@dataclass(frozen=True)
class Chunk:
    """One piece of the work: images, the input rows whose columns it holds, the output rows that it completes."""

    images: Span
    in_rows: Span
    out_rows: Span

    @property
    def count(self) -> int:
        """Its images."""
        return self.images[1] - self.images[0]

    @property
    def rows(self) -> int:
        """Its input rows."""
        return self.in_rows[1] - self.in_rows[0]


@dataclass(frozen=True)
class Chunking:
    """How one pass cuts a problem."""

    images: int  # most images in a chunk
    # the row blocks that each group of images is cut into, as (input rows, output rows)
    blocks: tuple[tuple[Span, Span], ...]
    batch: int  # images in all

    def __iter__(self) -> Iterator[Chunk]:
        for images in _spans(self.batch, self.images):
            for in_rows, out_rows in self.blocks:
                yield Chunk(images, in_rows, out_rows)

    @property
    def count(self) -> int:
        """Chunks in all."""
        return len(self.blocks) * -(-self.batch // self.images)

    @property
    def in_rows(self) -> int:
        """Most input rows in a chunk."""
        return max(end - begin for (begin, end), _ in self.blocks)


def forward_chunks(problem: Problem, itemsize: int, limit: int) -> Chunking:
    """Chunks of the forward pass, whose columns take at most ``limit`` bytes.

    A chunk completes at least one output row, even if the input rows that reach it need more than the limit.
    """
    images = _images_that_fit(problem, problem.column_bytes(itemsize), limit)
    if images:
        return Chunking(images, (whole_rows(problem),), problem.batch)
    parts_that_fit = limit // _part_bytes(problem, itemsize)
    halo = problem.dilation[0] * (problem.kernel_size[0] - 1) // problem.stride[0] + 1
    step = max(1, (parts_that_fit - halo) * problem.stride[0])
    outs = _spans(problem.output_size[0], step)
    return Chunking(1, tuple(_rows_of(problem, input_part_of(problem, out), out) for out in outs), problem.batch)


def backward_chunks(problem: Problem, itemsize: int, limit: int, image_extra: int = 0) -> Chunking:
    """Chunks of a backward pass; each image of a chunk takes ``image_extra`` bytes beside its columns.

    A chunk covers at least one input row, even if that needs more than the limit.
    """
    images = _images_that_fit(problem, problem.column_bytes(itemsize) + problem.batch * image_extra, limit)
    if images:
        return Chunking(images, ((whole_rows(problem)[0], (0, 0)),), problem.batch)
    step = max(1, (limit - image_extra) // _part_bytes(problem, itemsize))
    parts = _spans(problem.input_size[0], step)
    return Chunking(1, tuple(_rows_of(problem, part, (0, 0)) for part in parts), problem.batch)


def whole_rows(problem: Problem) -> tuple[Span, Span]:
    """All input rows, and all output rows, of an image or a volume.

    >>> whole_rows(Problem(1, 1, 1, 1, (4, 8, 8), (2, 2, 2), (2, 2, 2), (0, 0, 0), (0, 0, 0), (1, 1, 1)))
    ((0, 32), (0, 128))
    """
    return _rows_of(problem, (0, problem.input_size[0]), (0, problem.output_size[0]))


def _rows_of(problem: Problem, part: Span, out: Span) -> tuple[Span, Span]:
    """Input and output rows of parts of the first axis, which are rows of an image and slices of a volume."""
    rows, out_rows = math.prod(problem.input_size[1:-1]), math.prod(problem.output_size[1:-1])
    return (part[0] * rows, part[1] * rows), (out[0] * out_rows, out[1] * out_rows)


def input_part_of(problem: Problem, out_rows: Span) -> Span:
    """The part of the input's first axis that reaches any of a part of the output's; an empty span if none does.

    >>> input_part_of(Problem(1, 1, 1, 1, (8, 8), (3, 3), stride=(2, 2), padding=(1, 1)), (4, 6))
    (2, 4)
    """
    stride, padding = problem.stride[0], problem.padding[0]
    reach = problem.dilation[0] * (problem.kernel_size[0] - 1)
    begin = max(0, -((reach - out_rows[0] - padding) // stride))
    end = min(problem.input_size[0], (out_rows[1] - 1 + padding) // stride + 1)
    return begin, max(begin, end)


def _spans(extent: int, step: int) -> list[Span]:
    """Spans of ``step`` that cover an extent; the last may be shorter."""
    return [(begin, min(begin + step, extent)) for begin in range(0, extent, step)]


def _part_bytes(problem: Problem, itemsize: int) -> int:
    """Column bytes of one input row of an image, or of one slice of a volume."""
    return problem.out_channels * problem.taps * math.prod(problem.input_size[1:]) * itemsize


def _images_that_fit(problem: Problem, batch_bytes: int, limit: int) -> int:
    """Whole images in a chunk, evenly shared among chunks within the limit; the batch takes ``batch_bytes``."""
    image_bytes = max(1, batch_bytes // max(1, problem.batch))
    fitting = min(limit // image_bytes, problem.batch)
    return even_share(problem.batch, fitting) if fitting else 0


def longest_sum(config: Config) -> int:
    """The number of pixels that a weight gradient sums in one product.

    The rounding error of a float32 sum grows with the square root of its length. Summing slices apart and adding those
    up keeps a gradient over millions of pixels as exact as one over a thousand. Products of few results are cut, too:
    cuBLAS splits the sums of one product among blocks, but not those of several in a call.
    """
    p = config.problem
    if config.device.type == "cuda" and config.is_ieee:
        return _LONGEST_SUM
    blocks = p.gemm_batch * -(-p.gemm_m // BLOCK) * -(-p.gemm_k // BLOCK)
    slices = config.spec.multiprocessors // max(1, blocks)
    is_batched = p.gemm_batch > 1 and p.column_bytes(config.dtype.itemsize) <= config.workspace_limit
    if config.device.type != "cuda" or not is_batched or slices < _LEAST_SLICES:
        return max(1, p.in_pixels)
    return max(_LONGEST_SUM, -(-p.in_pixels // slices))
