"""Host side of csrc/columns/col2im.cu and csrc/columns/im2col.cu: macros, params structs, launch shapes.

Both kernels see planes (an image's channel) of items: output cells for col2im, input pixels for im2col.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.columns.chunking import Span
from gemmconv.kernels.integers import power_of_two
from gemmconv.kernels.launch import plane_grid
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, geometry_macros
from gemmconv.runtime.launch import Extent3, Kernel, load

_BLOCK = 256
_INT32_MAX = 2**31 - 1
_WIDEST_CELL = 16  # outputs of a row that a thread keeps in registers
# Rows of a cell: more rows give a thread more independent loads, and cost it registers and code.
# On the H200, one row is the best for 3x5 stride 1 (103% of copy bandwidth against 78% with two), four for 2x2 stride 2
# (88% against 80% with one).
_LOADS_IN_FLIGHT = 16
_MOST_CELL_ROWS = 4
_CELL_OUTPUTS = 8


def _params_struct(name: str, pointers: tuple[str, ...], integers: tuple[str, ...]) -> type[ctypes.Structure]:
    """The mirror of a kernel's params struct."""
    fields: list[tuple[str, Any]] = [(field, ctypes.c_void_p) for field in pointers]
    fields += [(field, ctypes.c_int) for field in integers]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


Col2imParams = _params_struct(
    "col2im_params",
    ("columns", "bias", "output"),
    (
        *("planes", "channels", "w_in", "h_out", "w_out"),
        *("in_row_begin", "in_rows", "out_row_begin", "out_rows", "cells_w"),
    ),
)
Im2colParams = _params_struct(
    "im2col_params", ("grad_output", "columns"), ("planes", "w_in", "h_out", "w_out", "in_row_begin", "in_rows")
)


def col2im_macros(problem: Problem, column_dtype: torch.dtype, output_dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/columns/col2im.cu."""
    cell_w = problem.stride[1] if problem.stride[1] <= _WIDEST_CELL else 1
    loads = -(-problem.taps // (problem.stride[0] * problem.stride[1])) * cell_w  # of a row of the cell
    cell_rows = max(1, min(_MOST_CELL_ROWS, _LOADS_IN_FLIGHT // loads, _CELL_OUTPUTS // cell_w))
    return {
        "COLUMN_T": ELEMENT_TYPES[column_dtype],
        "OUTPUT_T": ELEMENT_TYPES[output_dtype],
        "CELL_W": cell_w,
        "CELL_ROWS": cell_rows,
        **_geometry_macros(problem),
    }


def im2col_macros(problem: Problem, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/columns/im2col.cu."""
    return {"ELEMENT_T": ELEMENT_TYPES[dtype], **_geometry_macros(problem)}


def _geometry_macros(problem: Problem) -> Macros:
    macros = geometry_macros(problem)
    if max(problem.taps * problem.in_pixels, problem.out_pixels) > _INT32_MAX:
        macros["INDEX_64"] = 1
    return macros


class Col2im:
    """The fold of a problem's columns on one device, for any number of images and any rows."""

    def __init__(
        self, problem: Problem, column_dtype: torch.dtype, output_dtype: torch.dtype, device: torch.device
    ) -> None:
        macros = col2im_macros(problem, column_dtype, output_dtype)
        self._kernel: Kernel = load("columns/col2im.cu", macros, device.index)
        self._cell_rows = int(macros["CELL_ROWS"])
        self._cells_w = -(-problem.output_size[1] // int(macros["CELL_W"]))
        self._channels = problem.out_channels
        self._sizes = (problem.input_size[1], *problem.output_size)

    def __call__(self, columns: int, bias: int, output: int, images: int, in_rows: Span, out_rows: Span) -> None:
        """Fold columns at one device address into the images at another; ``bias`` is an address or 0."""
        rows = out_rows[1] - out_rows[0]
        planes = images * self._channels
        if planes == 0:
            return
        params = Col2imParams(
            *(columns, bias, output, planes, self._channels, *self._sizes),
            *(in_rows[0], in_rows[1] - in_rows[0], out_rows[0], rows, self._cells_w),
        )
        grid, block = _launch_shape(-(-rows // self._cell_rows) * self._cells_w, planes)
        self._kernel.launch(grid, block, params)


class Im2col:
    """The columns of a problem's output gradient on one device, for any number of images and any input rows."""

    def __init__(self, problem: Problem, dtype: torch.dtype, device: torch.device) -> None:
        self._kernel: Kernel = load("columns/im2col.cu", im2col_macros(problem, dtype), device.index)
        self._channels = problem.out_channels
        self._sizes = (problem.input_size[1], *problem.output_size)

    def __call__(self, grad_output: int, columns: int, images: int, in_rows: Span) -> None:
        """Lay out the images at one device address as columns at another."""
        rows = in_rows[1] - in_rows[0]
        planes = images * self._channels
        if planes == 0:
            return
        params = Im2colParams(grad_output, columns, planes, *self._sizes, in_rows[0], rows)
        grid, block = _launch_shape(rows * self._sizes[0], planes)
        self._kernel.launch(grid, block, params)


def _launch_shape(items: int, planes: int) -> tuple[Extent3, Extent3]:
    """Grid and block for planes of items: a block holds several planes where one would leave threads idle."""
    block_items = min(_BLOCK, power_of_two(items))
    block_planes = min(_BLOCK // block_items, 64)
    return plane_grid(-(-items // block_items), -(-planes // block_planes)), (block_items, block_planes, 1)
