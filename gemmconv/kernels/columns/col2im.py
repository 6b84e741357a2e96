"""Host side of csrc/columns/col2im.cu and csrc/columns/im2col.cu: macros and launches.

Both kernels see planes (a channel of an image or a volume) of items, one for a thread: rectangles of outputs for
col2im, input pixels for im2col. Rows of a volume are those of all its slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.columns.chunking import Span
from gemmconv.kernels.integers import power_of_two
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, geometry_macros
from gemmconv.kernels.program import At, Launch, Params, plane_grid, three_axes

_BLOCK = 256
_WIDEST_RECT = 16  # outputs of a row that a thread keeps in registers
# Rows of a rectangle: more rows give a thread more independent loads, and cost it registers and code.
# On the H200, one row is the best for 3x5 stride 1 (103% of copy bandwidth against 78% with two), four for 2x2 stride 2
# (88% against 80% with one).
_LOADS_IN_FLIGHT = 16
_MOST_RECT_ROWS = 4
_RECT_OUTPUTS = 8


def col2im_macros(problem: Problem, column_dtype: torch.dtype, output_dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/columns/col2im.cu."""
    rect_w = problem.stride[-1] if problem.stride[-1] <= _WIDEST_RECT else 1
    loads = -(-problem.taps // math.prod(problem.stride)) * rect_w  # of a row of the rectangle
    rect_rows = max(1, min(_MOST_RECT_ROWS, _LOADS_IN_FLIGHT // loads, _RECT_OUTPUTS // rect_w))
    return {
        "COLUMN_T": ELEMENT_TYPES[column_dtype],
        "OUTPUT_T": ELEMENT_TYPES[output_dtype],
        "RECT_W": rect_w,
        "RECT_ROWS": rect_rows,
        **_geometry_macros(problem),
    }


def im2col_macros(problem: Problem, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/columns/im2col.cu."""
    return {"ELEMENT_T": ELEMENT_TYPES[dtype], **_geometry_macros(problem)}


def _geometry_macros(problem: Problem) -> Macros:
    return geometry_macros(problem, max(problem.taps * problem.in_pixels, problem.out_pixels))


def fold(
    problem: Problem,
    column_dtype: torch.dtype,
    output_dtype: torch.dtype,
    output: At,
    images: int,
    in_rows: Span,
    out_rows: Span,
    bias: str | None = None,
) -> Iterator[Launch]:
    """The launch that folds the ``columns`` of some images and rows; none where there is nothing to fold."""
    macros = col2im_macros(problem, column_dtype, output_dtype)
    rows, planes = out_rows[1] - out_rows[0], images * problem.out_channels
    rects_w = -(-problem.output_size[-1] // int(macros["RECT_W"]))
    params: Params = {
        "columns, bias, output": ("columns", bias, output),
        "planes, channels": (planes, problem.out_channels),
        "h_in, w_in": problem.input_size[-2:],
        "d_out, h_out, w_out": three_axes(problem.output_size),
        "in_row_begin, in_rows, out_row_begin, out_rows": (in_rows[0], in_rows[1] - in_rows[0], out_rows[0], rows),
        "rects_w": rects_w,
    }
    return _launches("columns/col2im.cu", macros, params, -(-rows // int(macros["RECT_ROWS"])) * rects_w, planes)


def unfold(problem: Problem, dtype: torch.dtype, images_at: At, images: int, in_rows: Span) -> Iterator[Launch]:
    """The launch that lays some images out as ``columns``, of some input rows; none where there is nothing."""
    rows, planes = in_rows[1] - in_rows[0], images * problem.out_channels
    params: Params = {
        "grad_output, columns": (images_at, "columns"),
        "planes": planes,
        "h_in, w_in": problem.input_size[-2:],
        "d_out, h_out, w_out": three_axes(problem.output_size),
        "in_row_begin, in_rows": (in_rows[0], rows),
    }
    items = rows * problem.input_size[-1]
    return _launches("columns/im2col.cu", im2col_macros(problem, dtype), params, items, planes)


def _launches(source: str, macros: Macros, params: Params, items: int, planes: int) -> Iterator[Launch]:
    """The launch for planes of items: a block holds several planes where one would leave threads idle."""
    if planes:
        block_items = min(_BLOCK, power_of_two(items))
        block_planes = min(_BLOCK // block_items, 64)
        grid = plane_grid(-(-items // block_items), -(-planes // block_planes))
        yield Launch(source, macros, grid, (block_items, block_planes, 1), params)
