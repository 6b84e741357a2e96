"""Transposed 2-D convolution for PyTorch on NVIDIA GPUs, as matrix products.

A drop-in for torch.nn.ConvTranspose2d:

    import gemmconv
    layer = gemmconv.ConvTranspose2d(64, 32, 4, stride=2, padding=1)   # instead of torch.nn.ConvTranspose2d
    model = gemmconv.convert(model)                                    # or all of a model at once
"""

from gemmconv.errors import CompileError
from gemmconv.functional import col2im, conv_transpose2d, im2col
from gemmconv.geometry import Problem
from gemmconv.module import ConvTranspose2d, convert
from gemmconv.selection import explain
from gemmconv.tune import forget_tuned, load_tuned, tune
from gemmconv.version import __version__
from gemmconv.warmup import warmup

__all__ = [
    "CompileError",
    "ConvTranspose2d",
    "Problem",
    "__version__",
    "col2im",
    "conv_transpose2d",
    "convert",
    "explain",
    "forget_tuned",
    "im2col",
    "load_tuned",
    "tune",
    "warmup",
]
