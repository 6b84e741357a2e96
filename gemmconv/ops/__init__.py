"""The operators ``torch.ops.gemmconv.*``, a module a job; each imports none but those named after it.

autograd: gradients and tangents. transforms: the operators as functions, under torch.func too. autocast: casts.
implementation: plans and prepared calls. schemas: what the operators take and return.
"""

from gemmconv.ops.implementation import both_gradients, both_programs, is_left_to_torch, torchs_conv_transpose2d
from gemmconv.ops.transforms import col2im, conv_transpose2d, conv_transpose2d_grads, im2col

__all__ = [
    "both_gradients",
    "both_programs",
    "col2im",
    "conv_transpose2d",
    "conv_transpose2d_grads",
    "im2col",
    "is_left_to_torch",
    "torchs_conv_transpose2d",
]
