"""Transposed convolution for PyTorch on NVIDIA GPUs, as matrix products.

A drop-in for torch.nn.ConvTranspose1d, 2d and 3d:

    import gemmconv
    layer = gemmconv.ConvTranspose2d(64, 32, 4, stride=2, padding=1)   # instead of torch.nn.ConvTranspose2d
    model = gemmconv.convert(model)                                    # or all of a model at once
"""

from gemmconv.convert import convert, converted, patched, report, revert
from gemmconv.errors import CompileError
from gemmconv.explain import Explanation, LayerExplanation, ModelExplanation, explain
from gemmconv.functional import col2im, conv_transpose2d, im2col
from gemmconv.geometry import Problem
from gemmconv.module import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from gemmconv.rank import conv_transpose1d, conv_transpose3d
from gemmconv.tune import tune
from gemmconv.tuned import forget_tuned, load_tuned
from gemmconv.version import __version__
from gemmconv.warmup import warmup

__all__ = [
    "CompileError",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Explanation",
    "LayerExplanation",
    "ModelExplanation",
    "Problem",
    "__version__",
    "col2im",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convert",
    "converted",
    "explain",
    "forget_tuned",
    "im2col",
    "load_tuned",
    "patched",
    "report",
    "revert",
    "tune",
    "warmup",
]
