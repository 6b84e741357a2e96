"""im2col and col2im on their own, with the meaning of torch.nn.functional.unfold and fold.

On CUDA they run the kernels of ``gemm_col2im``. On other devices and older GPUs, for more planes than a grid can have,
and if kernels are not available, they run torch's own functions.
"""

from __future__ import annotations

from collections.abc import Callable

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
    """The fold of columns ``[N, C*K_h*K_w, H_in*W_in]`` into images ``[N, C, H_out, W_out]``."""
    p = problem

    def torchs() -> Rearrange:
        return lambda columns: F.fold(columns, p.output_size, p.kernel_size, p.dilation, p.padding, p.stride)

    def ours() -> Rearrange:
        steps = col2im.fold(problem, dtype, dtype, At("images"), p.batch, *whole_rows(problem))
        images = Output("images", p.output_shape, strides_of(p.output_shape, _NCHW))
        return Program(dtype, (Operand("columns", _NCHW),), (images,), tuple(steps)).prepare(device)

    return with_fallback(device, ours if _takes_the_kernel(problem, dtype, device) else torchs, torchs)


def prepare_im2col(problem: Problem, dtype: torch.dtype, device: torch.device) -> Rearrange:
    """The columns ``[N, C*K_h*K_w, H_in*W_in]`` of images ``[N, C, H_out, W_out]``."""
    p = problem

    def torchs() -> Rearrange:
        return lambda images: F.unfold(images, p.kernel_size, p.dilation, p.padding, p.stride)

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
