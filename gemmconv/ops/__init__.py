"""The operators ``torch.ops.gemmconv.*``, one topic a module; a module imports none but those after it in this list.

compiled: lowering by torch.compile. plain: calls past the dispatcher. volumes: those that are one product. recording:
autograd nodes of plain calls. signatures: the keys of calls. followers: modules to be called next. autograd:
functions and derivatives. autocast: casts. left_to_torch: torch's operator. implementation: prepared calls. forward:
prepared forward passes. ahead: compilation in the background. gradients: prepared gradients. programs: those of passes.
configs: choices of algorithms. call_cache: calls by signature. schemas: operators' arguments.
"""

from gemmconv.ops.autograd import col2im, conv_transpose2d, conv_transpose2d_grads, im2col
from gemmconv.ops.left_to_torch import checked_torch_conv_transpose2d, is_left_to_torch

__all__ = [
    "checked_torch_conv_transpose2d",
    "col2im",
    "conv_transpose2d",
    "conv_transpose2d_grads",
    "im2col",
    "is_left_to_torch",
]
