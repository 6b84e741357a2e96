"""im2col and col2im on their own, with the meaning of torch.nn.functional.unfold and fold.

On CUDA they run the kernels of ``gemm_col2im``. Elsewhere, on older GPUs, for planes that these cannot count, and where
kernels cannot be had, they are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from gemmconv.algorithms.fallback import with_fallback
from gemmconv.geometry import Problem
from gemmconv.kernels.base import why_no_kernels

Rearrange = Callable[[torch.Tensor], torch.Tensor]

_KERNEL_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MOST_PLANES = 2**31 - 2**23  # of all images; what a grid has beyond them is still an int


def prepare_col2im(problem: Problem, dtype: torch.dtype, device: torch.device) -> Rearrange:
    """The fold of columns ``[N, C*K_h*K_w, H_in*W_in]`` into images ``[N, C, H_out, W_out]``."""
    p = problem

    def torchs() -> Rearrange:
        return lambda columns: F.fold(columns, p.output_size, p.kernel_size, p.dilation, p.padding, p.stride)

    def ours() -> Rearrange:
        from gemmconv.kernels.columns.col2im import Col2im

        kernel = Col2im(problem, dtype, dtype, device)

        def call(columns: torch.Tensor) -> torch.Tensor:
            columns = columns.contiguous()
            images = columns.new_empty(p.output_shape)
            kernel(columns.data_ptr(), 0, images.data_ptr(), p.batch, (0, p.input_size[0]), (0, p.output_size[0]))
            return images

        return call

    return with_fallback(device, ours if _takes_the_kernel(problem, dtype, device) else torchs, torchs)


def prepare_im2col(problem: Problem, dtype: torch.dtype, device: torch.device) -> Rearrange:
    """The columns ``[N, C*K_h*K_w, H_in*W_in]`` of images ``[N, C, H_out, W_out]``."""
    p = problem

    def torchs() -> Rearrange:
        return lambda images: F.unfold(images, p.kernel_size, p.dilation, p.padding, p.stride)

    def ours() -> Rearrange:
        from gemmconv.kernels.columns.col2im import Im2col

        kernel = Im2col(problem, dtype, device)

        def call(images: torch.Tensor) -> torch.Tensor:
            images = images.contiguous()
            columns = images.new_empty((p.batch, p.gemm_m, p.gemm_n))
            kernel(images.data_ptr(), columns.data_ptr(), p.batch, (0, p.input_size[0]))
            return columns

        return call

    return with_fallback(device, ours if _takes_the_kernel(problem, dtype, device) else torchs, torchs)


def _takes_the_kernel(problem: Problem, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda" or dtype not in _KERNEL_DTYPES or why_no_kernels(device) is not None:
        return False
    return problem.batch * problem.out_channels <= _MOST_PLANES
