"""Autocast, as torch does it for conv_transpose2d: tensors no more precise than float32 take its dtype.

One cast of a leaf is kept until torch clears its cache, for our operators as for torch's own. That cache is not open to
others. But torch keeps its cast of a witness there, and our casts are freed with it: they hang on its graph's node.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}  # by device type
EVERY_KEY = torch._C.DispatchKeySet(KEYS["cpu"]) | torch._C.DispatchKeySet(KEYS["cuda"])
_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)


def casts(device_type: str) -> bool:
    """Whether a call on such a device is to cast: not where autocast is off, or has cast already."""
    key = KEYS.get(device_type)
    if key is None or not torch.is_autocast_enabled(device_type):
        return False
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def casting(operator: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    """conv_transpose2d on tensors that autocast has cast."""
    key = torch._C.DispatchKeySet(KEYS[device_type])

    def call(input: Tensor, weight: Tensor, bias: Tensor | None = None, *arguments: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)

        def lower(tensor: Tensor | None) -> Any:
            if tensor is None or tensor.device.type != device_type or not tensor.is_floating_point():
                return tensor
            return tensor if tensor.dtype == torch.float64 else to_autocast_dtype(tensor, dtype)

        tensors = lower(input), lower(weight), lower(bias)  # while operators autocast
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operator(*tensors, *arguments)

    return call


class Kept(dict[int, tuple[Tensor, Tensor]]):
    """Leaves by their ids, and casts of them."""


def _made_for(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(0, 0, device=device, requires_grad=True), torch.empty(0, 0, device=device, dtype=dtype)


_kept: dict[tuple[str, torch.dtype], weakref.ref[Kept]] = {}  # by device type and autocast's dtype
_witnesses: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]] = {}  # each with an operand


def kept(device: torch.device, dtype: torch.dtype) -> Kept:
    """What holds casts until torch clears its cache, to be called under autocast with its dtype.

    It is to hold casts of what :func:`is_kept` alone.
    """
    key = device.type, dtype
    if (found := _kept.get(key)) is not None and (casts := found()) is not None:
        return casts
    if key not in _witnesses:
        with ThreadPoolExecutor(1) as fresh:  # a thread in no mode
            _witnesses[key] = fresh.submit(_made_for, device, dtype).result()
    witness, operand = _witnesses[key]
    recorded = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    try:
        with torch._C._ExcludeDispatchKeyGuard(_MODES):  # dispatch modes are shown none of this
            result: Any = torch.addmm(witness, operand, operand)  # saves nothing, so calls no hook of saved tensors
    finally:
        torch._C._set_grad_enabled(recorded)
    node_of_cast = result.grad_fn.next_functions[0][0]
    of_node: dict[Any, Any] = node_of_cast.metadata  # lives as long as the node, which torch's cast owns
    casts = of_node.setdefault("gemmconv", Kept())
    _kept[key] = weakref.ref(casts)
    return casts


def to_autocast_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, to be called under autocast with autocast's dtype."""
    if not is_kept(tensor):
        return tensor.to(dtype)
    casts = kept(tensor.device, dtype)
    if (found := casts.get(id(tensor))) is not None and found[1].requires_grad:
        return found[1]
    recorded = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)  # one cast serves calls with and without gradients
    try:
        cast = tensor.to(dtype)
    finally:
        torch._C._set_grad_enabled(recorded)
    casts[id(tensor)] = tensor, cast
    return cast


def is_kept(tensor: Tensor) -> bool:
    """Whether torch keeps its cast of a tensor, and we can have it or know how long."""
    return (
        tensor.requires_grad
        and tensor.dtype == torch.float32
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
        and (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter)
        and not torch.is_inference_mode_enabled()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None  # torch.jit.trace wants all that is done in its graph
    )
