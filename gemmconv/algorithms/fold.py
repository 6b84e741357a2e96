"""im2col and col2im of images and volumes on their own, with the meaning of torch.nn.functional.unfold and fold.

On CUDA they run the kernels of ``gemm_col2im``. On other devices and older GPUs, for more planes than a grid can have,
and if kernels are not available, they run torch's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gemmconv.algorithms.fallback import with_fallback
from gemmconv.geometry import Problem
from gemmconv.kernels.base import strides_of, why_no_kernels
from gemmconv.kernels.columns import col2im
from gemmconv.kernels.columns.chunking import whole_rows
from gemmconv.kernels.macros import ELEMENT_TYPES
from gemmconv.kernels.program import At, Operand, Output, Program

Rearrange = Callable[[torch.Tensor], torch.Tensor]

_NCHW = torch.contiguous_format
_MOST_PLANES = 2**31 - 2**23  # images times channels; the last blocks of a grid reach beyond, and must still fit an int


def prepare_col2im(problem: Problem, dtype: torch.dtype, device: torch.device) -> Rearrange:
    """The fold of columns ``[N, C*K, L]`` into images ``[N, C, H_out, W_out]`` or volumes."""
    p = problem

    def torchs() -> Rearrange:
        return lambda columns: fold(columns, p.output_size, p.kernel_size, p.dilation, p.padding, p.stride)

    def ours() -> Rearrange:
        steps = col2im.fold(problem, dtype, dtype, At("images"), p.batch, *whole_rows(problem))
        images = Output("images", p.output_shape, strides_of(p.output_shape, _NCHW))
        return Program(dtype, (Operand("columns", _NCHW),), (images,), tuple(steps)).prepare(device)

    return with_fallback(device, ours if _takes_the_kernel(problem, dtype, device) else torchs, torchs)


def prepare_im2col(problem: Problem, dtype: torch.dtype, device: torch.device) -> Rearrange:
    """The columns ``[N, C*K, L]`` of images ``[N, C, H_out, W_out]`` or volumes."""
    p = problem

    def torchs() -> Rearrange:
        return lambda images: unfold(images, p.kernel_size, p.dilation, p.padding, p.stride)

    def ours() -> Rearrange:
        steps = col2im.unfold(problem, dtype, At("images"), p.batch, whole_rows(problem)[0])
        shape = p.batch, p.gemm_m, p.gemm_n
        columns = Output("columns", shape, strides_of(shape, _NCHW))
        return Program(dtype, (Operand("images", _NCHW),), (columns,), tuple(steps)).prepare(device)

    return with_fallback(device, ours if _takes_the_kernel(problem, dtype, device) else torchs, torchs)


def _takes_the_kernel(problem: Problem, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda" or dtype not in ELEMENT_TYPES or why_no_kernels(device) is not None:
        return False
    return problem.batch * problem.out_channels <= _MOST_PLANES


def unfold(images: torch.Tensor, *window: Any) -> torch.Tensor:
    """The columns of images or volumes by torch's function; ``window`` is kernel size, dilation, padding and stride.

    A volume is unfolded as an image ``[D, H*W]`` first, then each slice ``[H, W]`` of the result. One copy brings
    ``[C*K_d, D_w, K_h*K_w]`` to ``[C*K_d, K_h*K_w, D_w]``, D_w windows along the depth. A fold does the reverse.
    """
    if images.dim() == 4:
        return F.unfold(images, *window)
    deep, within = _windows_of_images(window)
    lines = F.unfold(images.flatten(3), *deep)  # [N, C*K_d, D_w*H*W]
    batch, rows, depth = *lines.shape[:2], lines.shape[2] // math.prod(images.shape[3:])
    slices = F.unfold(lines.reshape(batch, rows * depth, *images.shape[3:]), *within)
    taps, windows = math.prod(within[0]), slices.shape[2]
    return slices.view(batch, rows, depth, taps, windows).transpose(2, 3).reshape(batch, rows * taps, depth * windows)


def fold(columns: torch.Tensor, size: Any, *window: Any) -> torch.Tensor:
    """The images or volumes of this size that columns fold into, by torch's function; see :func:`unfold`."""
    if len(size) == 2:
        return F.fold(columns, size, *window)
    deep, within = _windows_of_images(window)
    (kernel, _), (dilation, _), (padding, _), (stride, _) = deep
    depth, taps = (size[0] + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1, math.prod(within[0])
    batch, rows, windows = len(columns), columns.shape[1] // taps, columns.shape[2] // depth
    slices = columns.reshape(batch, rows, taps, depth, windows).transpose(2, 3)
    slices = F.fold(slices.reshape(batch, rows * depth * taps, windows), size[1:], *within)
    lines = slices.reshape(batch, rows, depth * math.prod(size[1:]))  # [N, C*K_d, D_w*H*W]
    return F.fold(lines, (size[0], math.prod(size[1:])), *deep).unflatten(3, size[1:])


def _windows_of_images(window: Any) -> tuple[list[Any], list[Any]]:
    """A window of volumes as two of images: along the depth, and in a slice."""
    return [(of[0], one) for one, of in zip((1, 1, 0, 1), window, strict=True)], [of[1:] for of in window]
