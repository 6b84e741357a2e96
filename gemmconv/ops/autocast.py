"""Autocast for conv_transpose2d: who casts its tensors, and how long a cast is kept.

Tensors no more precise than float32 are cast to autocast's dtype, as torch does it.

One cast of a leaf serves all calls of an autocast region, until the leaf changes; torch's own cached cast is used even
after that. torch's cache is not open to others. So torch is made to cache its cast of a tensor of ours, the witness,
and our casts hang on the autograd node of that cast: they are freed when torch clears its cache. A witness costs a step
60 us. So where regions do not use a cast twice, most regions have no witness, and each call casts for itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}  # by device type
EVERY_KEY = torch._C.DispatchKeySet(KEYS["cpu"]) | torch._C.DispatchKeySet(KEYS["cuda"])
_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
_WITNESS_ONE_IN = 61  # calls, where regions use no cast twice; a prime, so that each call of a region has its turn


def is_autocasting(device_type: str) -> bool:
    """Whether autocast is on for a device type, and the operator's tensors have not been cast yet."""
    key = KEYS.get(device_type)
    if key is None or not torch.is_autocast_enabled(device_type):
        return False
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def with_autocast(operator: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    """A function that casts the tensors of a call of conv_transpose2d as autocast does, and calls the operator."""
    key = torch._C.DispatchKeySet(KEYS[device_type])

    def call(input: Tensor, weight: Tensor, bias: Tensor | None = None, *arguments: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        tensors = [  # cast before the guard: autocast must be on
            cast_as_autocast(one, dtype) if one is not None and one.device.type == device_type else one
            for one in (input, weight, bias)
        ]
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operator(*tensors, *arguments)

    return call


class Cast(NamedTuple):
    """A leaf, its cast, and the leaf's version when it was cast."""

    leaf: Tensor
    cast: Tensor
    version: int


class CastCache:
    """Casts of leaves that :func:`is_cacheable` allows; it lives until torch clears its own cache."""

    def __init__(self, regions: _Regions) -> None:
        self._regions, self._casts = regions, dict[int, tuple[Cast, int]]()  # by id of the leaf, with its address

    def find(self, leaf: Tensor) -> Cast | None:
        """The cast of a leaf, unless the leaf's version or address has changed since."""
        found, address = self._casts.get(id(leaf), (None, 0))
        if found is None or found.version != leaf._version or address != leaf.data_ptr():
            return None
        self._regions.share = True
        return found

    def add(self, leaf: Tensor, cast: Tensor) -> Cast:
        made = Cast(leaf, cast, leaf._version)
        self._casts[id(leaf)] = made, leaf.data_ptr()
        return made


class _Region:
    """Holds a cache of casts as long as torch's cache lives; frames of calls hold the cache of casts, never this."""

    def __init__(self, regions: _Regions) -> None:
        self.cast_cache = CastCache(regions)


class _Regions:
    """The current autocast region of a device type and dtype, and whether regions use casts more than once."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        with ThreadPoolExecutor(1) as fresh:  # a thread in no mode
            witness = fresh.submit(lambda: torch.empty(0, 0, dtype=torch.float32, device=device, requires_grad=True))
            operand = fresh.submit(lambda: torch.empty(0, 0, dtype=dtype, device=device))
        self._witness, self._operand = witness.result(), operand.result()
        self._current: Callable[[], _Region | None] = lambda: None
        self._calls_without_witness = 0
        self.share = True  # whether the last region with a witness used a cast again

    def cast_cache(self) -> CastCache | None:
        if (region := self._current()) is not None:
            return region.cast_cache
        if not self.share:
            self._calls_without_witness += 1
            if self._calls_without_witness % _WITNESS_ONE_IN:
                return None
        self.share = False
        with torch.enable_grad(), torch._C._ExcludeDispatchKeyGuard(_MODES):  # no dispatch mode sees it
            # addmm saves none of these tensors, so no hook of saved tensors is called.
            result: Any = torch.addmm(self._witness, self._operand, self._operand)
        metadata: dict[Any, Any] = result.grad_fn.next_functions[0][0].metadata  # torch's cached cast owns this node
        region = metadata.setdefault("gemmconv", _Region(self))
        self._current = weakref.ref(region)
        return region.cast_cache


_regions: dict[tuple[str, torch.dtype], _Regions] = {}  # by device type and autocast's dtype


def cast_cache(device: torch.device, dtype: torch.dtype) -> CastCache | None:
    """The cache of casts of the current autocast region, which has this dtype; None if calls cast for themselves."""
    key = device.type, dtype
    regions = _regions.get(key)
    if regions is None:
        regions = _regions[key] = _Regions(device, dtype)
    return regions.cast_cache()


def dtype_of(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that autocast to ``dtype`` gives a tensor on its device."""
    return dtype if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor.dtype


def current_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a call on a tensor is computed now: that of autocast where it is on and casts the tensor."""
    kind = tensor.device.type
    is_on = kind != "meta" and torch.is_autocast_enabled(kind)  # torch raises if it is asked for the meta device
    return dtype_of(tensor, torch.get_autocast_dtype(kind)) if is_on else tensor.dtype


def cast_as_autocast(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    """Cast a tensor as autocast to ``dtype``, which must be on, casts it; the cast may be one from the cache."""
    if tensor is None or tensor.dtype == dtype_of(tensor, dtype):
        return tensor
    if not is_cacheable(tensor) or (cache := cast_cache(tensor.device, dtype)) is None:
        return tensor.to(dtype)
    if (found := cache.find(tensor)) is not None and found.cast.requires_grad:
        return found.cast
    with torch.enable_grad():  # one cast serves calls with and without gradients
        return cache.add(tensor, tensor.to(dtype)).cast


def is_cacheable(tensor: Tensor) -> bool:
    """Whether torch would cache its cast of a tensor, and we can tell how long."""
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
        and torch._C._get_tracing_state() is None  # torch.jit.trace needs the cast in its graph
    )


def casts_parameters(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> bool:
    """Whether our kernel casts weight and bias to autocast's ``dtype``, both in one launch; if not, torch casts each.

    autograd does not see our cast. Our backward pass returns the gradient of the float32 parameter itself, which is
    right for a leaf, such as a Parameter. If the parameter was computed from other tensors, its gradient has to flow on
    through torch's cast. "Cacheable" are leaves that require gradients: autocast keeps their casts for later calls of
    its block (:func:`is_cacheable`). One launch makes both casts, so autocast keeps both or neither. Hence:

        which of weight and bias are cacheable    our kernel casts them
        both                                      always; autocast keeps the casts
        none                                      if no gradients are recorded; the casts are not kept
        one of the two                            never

    Gradients are recorded if grad mode is on and the weight or the bias requires a gradient.
    """
    input, *parameters = (one for one in tensors if one is not None)
    # Our kernel, csrc/layout/cast.cu, reads float32 and writes 16 bits. Autocast does not cast a float64 input.
    if not input.is_cuda or dtype.itemsize != 2 or input.dtype == torch.float64:
        return False
    # It casts the memory in its order, so there must be no gaps in it.
    if any(one.dtype != torch.float32 for one in parameters) or not have_no_gaps(parameters):
        return False
    # A kept cast is valid while its tensor's version counter is the same. Tensors of inference mode have no counter.
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
