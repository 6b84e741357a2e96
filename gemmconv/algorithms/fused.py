"""``fused``: the matrix product and the fold of its columns in one kernel, on tensor cores or a CPU's vectors.

Columns are never written to memory.

A gradient that none of its kernels takes goes to gemm_col2im.
"""

from __future__ import annotations

from gemmconv.algorithms.base import Algorithm
from gemmconv.kernels.conv import gemm_mma
from gemmconv.kernels.cpu import implicit_product
from gemmconv.kernels.sm90 import (
    gemm_depth_to_space,
    gemm_fold_narrow,
    gemm_fold_pixels,
    gemm_fold_rows,
    implicit_gemm,
    implicit_gemm_nhwc,
    wgrad_nchw,
    wgrad_nhwc,
)


class Fused(Algorithm):
    name = "fused"
    kernels = (
        implicit_gemm.KERNEL,
        gemm_fold_rows.KERNEL,
        gemm_fold_narrow.KERNEL,
        gemm_fold_pixels.KERNEL,
        gemm_depth_to_space.KERNEL,
        implicit_gemm_nhwc.KERNEL,
        wgrad_nchw.KERNEL,
        wgrad_nhwc.KERNEL,
        gemm_mma.KERNEL,
        implicit_product.KERNEL,
    )
