"""Autocast, as torch does it for conv_transpose2d: tensors no more precise than float32 take its dtype.

One cast of a leaf serves all calls of a region that find the leaf as it was; torch's own does, whatever happens to it.
torch's cache is not open to others. But torch keeps its cast of a witness there, and our casts are freed with it: they
hang on its graph's node. A witness takes a step 60 us, so where regions use no cast again, most have none, and each
call casts for itself.
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
_WITNESSED_ONE_IN = 61  # calls, where regions use no cast again; a prime, so that it is any call of a region by turns


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


class Kept:
    """Casts of leaves, which serve until torch clears its cache. It is to hold those of what :func:`is_kept` alone."""

    def __init__(self, regions: _Regions) -> None:
        self._regions, self._casts = regions, dict[int, tuple[Cast, int]]()  # and where leaves lie, by their ids

    def of(self, leaf: Tensor) -> Cast | None:
        """The cast of a leaf, if it has one of what it is now, as far as its version and its place tell."""
        found, place = self._casts.get(id(leaf), (None, 0))
        if found is None or found.version != leaf._version or place != leaf.data_ptr():
            return None
        self._regions.share = True
        return found

    def add(self, leaf: Tensor, cast: Tensor) -> Cast:
        """Keep a cast of a leaf."""
        made = Cast(leaf, cast, leaf._version)
        self._casts[id(leaf)] = made, leaf.data_ptr()
        return made


class _Region:
    """What lives as long as torch's cache: no frame of a call holds it, as it may hold what is in it."""

    def __init__(self, regions: _Regions) -> None:
        self.kept = Kept(regions)


class _Regions:
    """What is known of regions of autocast to a dtype, of one device type."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        with ThreadPoolExecutor(1) as fresh:  # a thread in no mode
            self._witness, self._operand = fresh.submit(self._made, device, dtype).result()
        self._current: Callable[[], _Region | None] = lambda: None
        self._unwitnessed = 0  # calls
        self.share = True  # whether the last that had a witness used a cast again

    @staticmethod
    def _made(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        witness = torch.empty(0, 0, dtype=torch.float32, device=device, requires_grad=True)
        return witness, torch.empty(0, 0, dtype=dtype, device=device)

    def kept(self) -> Kept | None:
        """See :func:`kept`."""
        if (region := self._current()) is not None:
            return region.kept
        if not self.share:
            self._unwitnessed += 1
            if self._unwitnessed % _WITNESSED_ONE_IN:
                return None
        self.share = False
        with torch.enable_grad(), torch._C._ExcludeDispatchKeyGuard(_MODES):  # dispatch modes are shown none of this
            # Saves nothing, so calls no hook of saved tensors.
            result: Any = torch.addmm(self._witness, self._operand, self._operand)
        of_node: dict[Any, Any] = result.grad_fn.next_functions[0][0].metadata  # of the node that torch's cast owns
        region = of_node.setdefault("gemmconv", _Region(self))
        self._current = weakref.ref(region)
        return region.kept


_regions: dict[tuple[str, torch.dtype], _Regions] = {}  # by device type and autocast's dtype


def kept(device: torch.device, dtype: torch.dtype) -> Kept | None:
    """What holds casts until torch clears its cache, to be called under autocast with its dtype.

    None where calls are to cast for themselves.
    """
    key = device.type, dtype
    regions = _regions.get(key)
    if regions is None:
        regions = _regions[key] = _Regions(device, dtype)
    return regions.kept()


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
    if (casts := kept(tensor.device, dtype)) is None:
        return tensor.to(dtype)
    if (found := casts.of(tensor)) is not None and found.cast.requires_grad:
        return found.cast
    with torch.enable_grad():  # one cast serves calls with and without gradients
        return casts.add(tensor, tensor.to(dtype)).cast


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
