"""Autocast, as torch does it for conv_transpose2d: tensors no more precise than float32 take its dtype.

One cast of a leaf is kept until torch clears its cache, for our operators as for torch's own. That cache is not open to
others. But torch keeps its cast of a witness there, and our casts are freed with it: they hang on its graph's node.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

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
            return lowered(tensor, dtype) if tensor is not None and tensor.device.type == device_type else tensor

        tensors = lower(input), lower(weight), lower(bias)  # while operators autocast
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operator(*tensors, *arguments)

    return call


class Cast(NamedTuple):
    """A leaf, its cast, and the leaf's version then."""

    leaf: Tensor
    cast: Tensor
    version: int


Kept = dict[int, Cast]  # by the ids of leaves


class _Region:
    """What lives as long as torch's cache: no frame of a call holds it, as it may hold what is in it."""

    def __init__(self) -> None:
        self.casts: Kept = {}


_regions: dict[tuple[str, torch.dtype], weakref.ref[_Region]] = {}  # by device type and autocast's dtype
_witnesses: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]] = {}  # each with an operand


def _made_for(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    witness = torch.empty(0, 0, dtype=torch.float32, device=device, requires_grad=True)
    return witness, torch.empty(0, 0, dtype=dtype, device=device)


def kept(device: torch.device, dtype: torch.dtype) -> Kept:
    """What holds casts until torch clears its cache, to be called under autocast with its dtype.

    It is to hold casts of what :func:`is_kept` alone.
    """
    key = device.type, dtype
    if (found := _regions.get(key)) is not None and (region := found()) is not None:
        return region.casts
    if key not in _witnesses:
        with ThreadPoolExecutor(1) as fresh:  # a thread in no mode
            _witnesses[key] = fresh.submit(_made_for, device, dtype).result()
    witness, operand = _witnesses[key]
    with torch.enable_grad(), torch._C._ExcludeDispatchKeyGuard(_MODES):  # dispatch modes are shown none of this
        result: Any = torch.addmm(witness, operand, operand)  # saves nothing, so calls no hook of saved tensors
    of_node: dict[Any, Any] = result.grad_fn.next_functions[0][0].metadata  # of the node that torch's cast owns
    region = of_node.setdefault("gemmconv", _Region())
    _regions[key] = weakref.ref(region)
    return region.casts


def dtype_of(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a tensor of autocast's device has under autocast with this dtype."""
    return dtype if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor.dtype


def lowered(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    """The tensor as autocast, with this dtype, has it; to be called under it."""
    if tensor is None or tensor.dtype == dtype_of(tensor, dtype):
        return tensor
    return to_autocast_dtype(tensor, dtype)


def to_autocast_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, to be called under autocast with autocast's dtype."""
    if not is_kept(tensor):
        return tensor.to(dtype)
    casts = kept(tensor.device, dtype)
    if (found := casts.get(id(tensor))) is not None and found.cast.requires_grad:
        return found.cast
    with torch.enable_grad():  # one cast serves calls with and without gradients
        cast = tensor.to(dtype)
    casts[id(tensor)] = Cast(tensor, cast, tensor._version)
    return cast


def is_kept(tensor: Tensor) -> bool:
    """Whether torch keeps its cast of a tensor, and we can have it or know how long."""
    return (
        tensor.requires_grad
        and tensor.dtype == torch.float32
        and tensor.is_leaf
        and not tensor._is_view()
        and not tensor.is_inference()
        and torch.is_autocast_cache_enabled()
        and (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter)
        and not torch.is_inference_mode_enabled()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None  # torch.jit.trace wants all that is done in its graph
    )
