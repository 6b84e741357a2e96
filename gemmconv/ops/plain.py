"""Eager calls of conv_transpose2d on torch's own tensors, bypassing its dispatcher: a look-up, then a prepared call.

The cache of calls (call_cache.py) maps a signature to a prepared call, a function of input, weight and bias:

    step                               by                          made for
    find the call of a signature       :func:`find_call`           every call
    prepare it, and add it             :func:`prepare`             the first call of a signature
      of a layer of signals            :func:`prepare_signal`      the same

A signature holds all that decides how a call is computed: dtypes, shapes and strides of its tensors, its arguments,
whether gradients are recorded, autocast and torch's precision. So arguments are checked and kernels chosen only once
for each. Under modes, transforms and profilers a call has no signature, and the dispatcher serves it. When tuned
choices change, the cache is emptied. A prepared call that records gradients makes an autograd node, which caches
prepared backward passes by signatures of their own.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gemmconv.dispatch import are_dense, in_a_mode
from gemmconv.ops import call_cache
from gemmconv.ops.autocast import cast_as_autocast, casts_parameters, is_autocasting
from gemmconv.ops.left_to_torch import is_left_to_torch
from gemmconv.ops.recording import Call, prepare_recording
from gemmconv.ops.schemas import Arguments, Tensors, without_data
from gemmconv.ops.signatures import call_signature


def find_call(input: Tensor, weight: Tensor, bias: Tensor | None, arguments_key: bytes) -> tuple[Call | None, Hashable]:
    """The cached call for these tensors and arguments, if there is one, and their signature.

    What is no tensor, or one of a subclass of torch's, has no signature.
    """
    try:
        key = call_signature(input, weight, bias, arguments_key)
    except RuntimeError:  # a tensor without strides, such as a sparse one
        return None, None
    return call_cache.entries.get(key), key


def prepare(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> Call | None:
    """Prepare the call on these tensors. Returns None if torch's dispatcher has to serve it.

    It has to if a mode is active or a tensor is not dense.

    Call it only after :func:`is_left_to_torch` returned False: torch's operator needs no autograd node of ours.

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
    """Prepare a call under autocast.

    torch casts the input. Where :func:`casts_parameters` says so, our kernels cast weight and bias; else torch does.
    """
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    cast = partial(cast_as_autocast, dtype=dtype)
    if not casts_parameters(tensors, dtype):
        call = prepare_recording(tuple(map(cast, tensors)), arguments)
        return lambda input, weight, bias: call(cast(input), cast(weight), cast(bias))
    # The prepared call takes float32 parameters and casts them itself, each time. To choose kernels one needs dtype,
    # shapes and strides of the casts, which do not exist yet: tensors without data describe them. ``parameters``
    # only tell the dtype to cast from. The call keeps none of these tensors.
    input, *parameters = tensors
    stand_ins = cast(input), *(without_data(one, dtype) for one in parameters)
    call_with_casts = prepare_recording(stand_ins, arguments, parameters=tuple(parameters))
    return lambda input, weight, bias: call_with_casts(cast(input), weight, bias)


def prepare_signal(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> Call | None:
    """Prepare a call on a batch of signals as images of height 1; None if the dispatcher serves it, or under autocast.

    Unlike :func:`prepare`, which functional.py calls, it asks is_left_to_torch itself, since layers call it directly.
    So it may return a call of torch's operator.

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
