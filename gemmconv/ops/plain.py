"""Plain eager calls of conv_transpose2d, past torch's dispatcher: one look-up in the cache, then the prepared call.

functional.py, module.py, rank.py and compiled.py ask :func:`find_call` at every call. For a new signature they cache
the call that :func:`prepare` returns; a layer of signals caches the one that :func:`prepare_signal` returns.

The signature of a call holds all that decides how it is computed: dtypes, shapes and strides of its tensors, its
arguments, whether gradients are recorded, and the state of this thread: modes, transforms, autocast, profiler,
precision. So the checks and the choice of a kernel are made only for the first call of each signature. Tuned choices
are not part of it: the cache is emptied when they change. Gradients come from an autograd node, which caches prepared
backward passes by their own signatures.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gemmconv.dispatch import are_dense, in_a_mode
from gemmconv.ops import call_cache
from gemmconv.ops.autocast import cast_as_autocast, is_autocasting, is_cacheable
from gemmconv.ops.left_to_torch import is_left_to_torch
from gemmconv.ops.recording import Call, prepare_recording
from gemmconv.ops.schemas import Arguments, Tensors, without_data
from gemmconv.ops.signatures import call_signature

_TENSOR_TYPES = (Tensor, Parameter)


def are_torch_tensors(input: object, weight: object, bias: object) -> bool:
    """Whether the input is torch's own tensor, of no subclass, and weight and bias are such tensors or parameters."""
    return type(input) is Tensor and type(weight) in _TENSOR_TYPES and (bias is None or type(bias) in _TENSOR_TYPES)


def find_call(input: Tensor, weight: Tensor, bias: Tensor | None, arguments_key: bytes) -> tuple[Call | None, Hashable]:
    """The cached call for these tensors and arguments, if there is one, and their signature."""
    try:
        key = call_signature(input, weight, bias, arguments_key)
    except RuntimeError:  # a tensor without strides, such as a sparse one
        return None, None
    return call_cache.entries.get(key), key


def prepare(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> Call | None:
    """Prepare the call on these tensors. Returns None if the dispatcher has to serve it, for its mode or its tensors.

    Precondition: torch's operator does not serve all passes of the call, which is_left_to_torch tells. (Code that
    torch.compile generated calls our operators only where that holds.)

    Args:
        input, weight, bias: the input may be without a batch.
        arguments: all arguments of the operator after its tensors, checked.
    """
    has_batch = input.dim() != 3
    tensors = input if has_batch else input.unsqueeze(0), weight, bias
    if in_a_mode() or not are_dense(*tensors):
        return None
    is_cast = is_autocasting(input.device.type)
    call = _prepare_autocast(tensors, arguments) if is_cast else prepare_recording(tensors, arguments)
    if has_batch:
        return call
    return lambda input, weight, bias: call(input.unsqueeze(0), weight, bias).squeeze(0)


def _prepare_autocast(tensors: Tensors, arguments: Arguments) -> Call:
    """Prepare a call under autocast. torch casts the input; kernels of the call, or torch, cast weight and bias."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    cast = partial(cast_as_autocast, dtype=dtype)
    if not casts_parameters(tensors, dtype):
        call = prepare_recording(tuple(map(cast, tensors)), arguments)
        return lambda input, weight, bias: call(cast(input), cast(weight), cast(bias))
    # The call takes float32 parameters and casts them, so its kernels are chosen for the casts. Stand-ins have shapes
    # and strides of the casts, and no data. Of ``parameters`` the dtype is read. The prepared call refers to neither.
    input, *parameters = tensors
    stand_ins = cast(input), *(without_data(one, dtype) for one in parameters)
    casting = prepare_recording(stand_ins, arguments, parameters=tuple(parameters))
    return lambda input, weight, bias: casting(cast(input), weight, bias)


def prepare_signal(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> Call | None:
    """Prepare a call on a batch of signals as images of height 1; None if the dispatcher serves it, or under autocast.

    Unlike :func:`prepare` it asks is_left_to_torch itself, and may return a call of torch's operator.

    Args:
        input, weight, bias: ``[N, C_in, L]``, ``[C_in, C_out/groups, K]`` and ``[C_out]``, not checked.
        arguments: all arguments of the operator on images after its tensors.
    """
    tensors = input.unsqueeze(-2), weight.unsqueeze(-2), bias
    if in_a_mode() or not are_dense(*tensors) or is_autocasting(input.device.type):
        return None
    if is_left_to_torch(*tensors, arguments):
        # Stride, padding, output_padding, groups and dilation, the pairs among them without the height.
        geometry: list[Any] = [one[1:] if isinstance(one, tuple) else one for one in arguments[:5]]
        return lambda input, weight, bias: torch.conv_transpose1d(input, weight, bias, *geometry)
    return prepare_recording(tensors, arguments, is_signal=True)


def casts_parameters(tensors: Tensors, dtype: torch.dtype) -> bool:
    """Whether a call casts weight and bias to autocast's ``dtype`` by a launch of its own; if not, torch casts them.

    Two things decide, where dtypes and memory allow a cast of ours:

    - Gradients. autograd does not see our cast, so our backward pass returns the gradient of the float32 parameter
      itself. That is right for a leaf. The gradient of any other tensor must flow through torch's cast in its graph.
    - The cache. Autocast keeps casts of leaves that require gradients for later calls of its block (see
      :func:`is_cacheable`). A call of ours has one launch for both casts, which keeps both of them there, or none.

        weight and bias are      if gradients are recorded    if not
        both cacheable           ours, kept                   ours, kept
        both not cacheable       torch's (may be no leaves)   ours, not kept
        one of each              torch's (one launch)         torch's (one launch)

    A parameter that requires no gradient is not cacheable, and counts as one for which none are recorded.
    """
    input, *parameters = (one for one in tensors if one is not None)
    # The kernel that casts, csrc/layout/cast.cu, reads float32 and writes 16 bits. Autocast casts no float64 input.
    if not input.is_cuda or dtype.itemsize != 2 or input.dtype == torch.float64:
        return False
    if any(one.dtype != torch.float32 for one in parameters):
        return False
    # The kernel reads memory without gaps, so that a cast has the strides of its tensor.
    if not have_no_gaps(parameters):
        return False
    # A kept cast is used again as long as its tensor's version is the same, and tensors of inference mode have none.
    if any(one.is_inference() for one in parameters):
        return False
    cacheable = [is_cacheable(one) for one in parameters]
    if all(cacheable):
        return True
    is_recorded = torch.is_grad_enabled() and any(one.requires_grad for one in parameters)
    return not any(cacheable) and not is_recorded


def have_no_gaps(parameters: Sequence[Tensor | None]) -> bool:
    """Whether each tensor fills its memory in NCHW or NHWC order, so that a cast of this memory keeps the strides."""
    return all(
        one is None or one.is_contiguous() or (one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last))
        for one in parameters
    )
