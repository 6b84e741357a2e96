"""Autocast, as torch does it for conv_transpose2d: tensors no more precise than float32 take its dtype.

One cast of a leaf is kept until torch clears its cache, for our operators as for torch's own. That cache is not open to
others. On CUDA einsum autocasts and computes nothing: its result is a view of torch's own cast. No operator does this
on the CPU. Our casts are kept there by torch's cast of a witness, and are freed with it.
"""

from __future__ import annotations

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


def _made_for(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    witness = torch.empty(0, 0, dtype=torch.float32, device="cpu", requires_grad=True)
    return witness, witness.detach().to(dtype)


with ThreadPoolExecutor(1) as _fresh:  # a thread in no mode, whatever this one imports gemmconv in
    _DTYPES = torch.bfloat16, torch.float16  # all that autocast has on the CPU
    _WITNESSES = dict(zip(_DTYPES, _fresh.map(_made_for, _DTYPES), strict=True))  # each with an empty operand


def to_autocast_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, to be called under autocast with autocast's dtype."""
    if _is_kept(tensor) and (tensor.is_cuda or dtype in _WITNESSES):
        recorded = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)  # one cast serves calls with and without gradients
        try:
            cast = _kept_on_cuda(tensor) if tensor.is_cuda else _kept_on_cpu(tensor, dtype)
        finally:
            torch._C._set_grad_enabled(recorded)
        if cast.dtype == dtype and cast.requires_grad:  # else torch made it for another region
            return cast
    return tensor.to(dtype)


def _kept_on_cuda(leaf: Tensor) -> Tensor:
    view = torch._VF.einsum("...->...", (leaf,))  # type: ignore[attr-defined]
    return view if (cast := view._base) is None else cast


def _is_kept(tensor: Tensor) -> bool:
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


def _kept_on_cpu(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    witness, empty = _WITNESSES[dtype]
    with torch._C._ExcludeDispatchKeyGuard(_MODES):  # dispatch modes are shown none of this
        result: Any = torch.addmm(witness, empty, empty)  # saves nothing, so calls no hook of saved tensors
    node_of_cast = result.grad_fn.next_functions[0][0]
    casts: dict[Any, Tensor] = node_of_cast.metadata  # the dict lives as long as the node, which torch's cast owns
    if leaf not in casts:
        casts[leaf] = leaf.to(dtype)
    return casts[leaf]
