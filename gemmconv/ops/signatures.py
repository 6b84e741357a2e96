"""Signatures of plain calls and of their backward passes: the keys under which prepared calls are cached."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from gemmconv.dispatch import MODES, function_mode_count, in_a_mode
from gemmconv.errors import KernelError
from gemmconv.extension import exchange_of_tensors, extension
from gemmconv.ops import call_cache
from gemmconv.ops.autocast import is_autocasting
from gemmconv.ops.autograd import Needs

_TENSOR_TYPES = {Tensor, Parameter}
_keys_of = torch._C._dispatch_keys
_precision = torch._C._get_fp32_precision_getter  # the property of torch.backends takes a microsecond more
_has_grad, _has_autocast = torch.is_grad_enabled, torch._C._is_any_autocast_enabled
_has_autocast_cache, _is_inference = torch.is_autocast_cache_enabled, torch.is_inference_mode_enabled


def _call_signature_in_python(input: Tensor, weight: Tensor, bias: Tensor | None, arguments_key: bytes) -> Hashable:
    """The signature of a call on torch's own tensors and parameters, of no subclass; else None, as in a mode.

    csrc/signature.c does this faster. Raises RuntimeError where a tensor has no strides.
    """
    kinds = {type(input), type(weight), Tensor if bias is None else type(bias)}
    if not kinds <= _TENSOR_TYPES or in_a_mode():
        return None
    cast_to = (_autocast_state(input), _cast_caching(weight), _cast_caching(bias)) if _has_autocast() else None
    dtype, of_bias, tracked = input.dtype, None, None
    if bias is not None:
        of_bias = bias.shape, bias.stride(), bias.dtype, bias.device, bias.is_neg()
    if _has_grad():
        tracked = input.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad
    # A negated view has dispatch keys of its own, as wrappers have, which no parameter is.
    of_weight = weight.is_neg() if type(weight) is Parameter else _keys_of(weight).raw_repr()
    return (
        *(arguments_key, input.shape, input.stride(), dtype, input.get_device(), _keys_of(input).raw_repr()),
        *(weight.shape, weight.stride(), weight.dtype, weight.device, of_weight, of_bias, cast_to, tracked),
        _precision("cuda", "conv") if dtype is torch.float32 and input.is_cuda else None,
    )


def _find_call_in_python(
    input: Tensor, weight: Tensor, bias: Tensor | None, arguments_key: bytes
) -> tuple[Any, Hashable]:
    """The prepared call that is cached for a call, and the call's signature; None for what there is not."""
    signature = None
    with suppress(RuntimeError):  # a tensor without strides, such as a sparse one, has no signature
        signature = _call_signature_in_python(input, weight, bias, arguments_key)
    return call_cache.entries.get(signature), signature  # the cache has no entry for None


def _gradient_signature_in_python(grad: Tensor, input: Tensor | None, weight: Tensor | None, needs: Needs) -> Hashable:
    """The signature of a backward pass; None where the dispatcher has to serve it, as a second one may follow."""
    if torch.is_grad_enabled() or type(grad) is not Tensor or in_a_mode():
        return None
    # Saved tensors count, too: hooks may return them in another format.
    known = call_cache.tensor_signature
    tensors = tuple([one if one is None else (known(one), one.is_neg()) for one in (grad, input, weight)])
    return tensors, needs, _precision("cuda", "conv") if grad.dtype is torch.float32 and grad.is_cuda else None


def _autocast_state(input: Tensor) -> Hashable:
    """The dtype that autocast casts a call to, and the settings that :func:`is_cacheable` reads; None without it."""
    device_type = "cuda" if input.is_cuda else input.device.type
    if not is_autocasting(device_type):
        return None
    return torch.get_autocast_dtype(device_type), _has_autocast_cache(), _is_inference()


def _cast_caching(one: Tensor | None) -> Hashable:
    """The properties of a tensor that :func:`is_cacheable` reads."""
    return None if one is None else (one.requires_grad, one.is_leaf, one._is_view(), one.is_inference())


def _signatures() -> tuple[Callable[..., tuple[Any, Hashable]], Callable[..., Hashable]]:
    """The functions that find prepared calls, and make backward passes' signatures: in C if the extension is there."""
    try:
        in_c, exchange = extension(), exchange_of_tensors()
    except KernelError:  # a call on a GPU raises it
        in_c = exchange = None
    if in_c is None or exchange is None:
        return _find_call_in_python, _gradient_signature_in_python
    modes, precision = (function_mode_count, MODES), (_precision, ("cuda", "conv"))
    states = forward_ad, _has_grad, _has_autocast, _autocast_state
    made = in_c.Signatures(exchange, call_cache.entries, modes, *states, precision, (Tensor, Parameter))
    return made.find_call, made.of_gradient


find_call, gradient_signature = _signatures()
