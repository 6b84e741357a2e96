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

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gemmconv.dispatch import are_dense, in_a_mode
from gemmconv.ops import call_cache
from gemmconv.ops.autocast import cast_as_autocast, casts_parameters, is_autocasting
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

    Precondition: is_left_to_torch returns False for the call. Then a kernel of ours computes at least one of its passes
    (forward, or a gradient), or torch's operator has to be made deterministic (``"auto"`` on Hopper). Only then, too,
    does code that torch.compile generates call our operators.

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
    # The prepared call takes float32 parameters and casts them itself. Its kernels will read the casts, which do not
    # exist yet; so kernels are chosen for stand-ins: tensors with the dtype, shapes and strides of the casts, and no
    # data. ``parameters`` only tells the dtype to cast from. The call keeps no reference to stand-ins or parameters.
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
