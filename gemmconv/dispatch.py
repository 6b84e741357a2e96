"""Recognises calls that need no dispatcher, and calls that torch's own operators have to serve.

The dispatcher serves modes, tensor subclasses, transforms, tracing, autocast and profiling. A plain eager call needs
none of them, and an operator defined in Python costs it 10 us, a third of a small layer's time. So such a call goes to
the implementation directly. A call that is not recognised as plain goes through the dispatcher.

Transforms of torch.func act before the dispatcher, and support an operator of ours less well than torch's own: vmap
becomes a loop, jvp of jvp loses a tangent, functionalize and compiled transforms have no rule. Only gradients, nested
or not, work as well.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_dynamic_layer_stack_depth, get_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

_keys_of = torch._C._dispatch_keys
HARMLESS_MODES: set[type] = {DeviceContext}  # of torch functions: they change no call that is recognised as plain
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
_function_mode_at = torch._C._get_function_stack_at


def _function_modes() -> bool:
    """Whether a mode of torch functions is active that may change a plain call."""
    for place in range(function_mode_count()):  # noqa: SIM110  # any() takes longer, in every call under a default device
        if type(_function_mode_at(place)) not in HARMLESS_MODES:
            return True
    return False


def only_patched() -> bool:
    """Whether all modes of torch functions, if there are any, are ``patched`` blocks and see calls."""
    for place in range(function_mode_count()):
        kind = type(_function_mode_at(place))
        if kind is DeviceContext or kind not in HARMLESS_MODES:
            return False
    return not torch._C._is_torch_function_all_disabled()


# Functions that are true in a mode of this thread, other than forward-mode gradients; the last is for a profiler.
MODES: tuple[Callable[[], Any], ...] = (
    _function_modes,
    torch._C._len_torch_dispatch_stack,
    torch._C._are_functorch_transforms_active,
    torch._C._get_tracing_state,
    torch._C._autograd._profiler_enabled,
)


@functools.cache
def _keys_of_dense(device_type: str) -> set[int]:
    """The dispatch keys of dense tensors of a device, made outside and inside inference mode."""
    with torch.inference_mode(False):
        ordinary = _keys_of(torch.empty(0, device=device_type)).raw_repr()
    with torch.inference_mode():
        inference = _keys_of(torch.empty(0, device=device_type)).raw_repr()
    return {ordinary, inference}


with ThreadPoolExecutor(1) as _fresh:  # in a thread of its own, since this one may be in a mode
    _keys_on_cpu = _fresh.submit(_keys_of_dense, "cpu").result()  # those on CUDA are read with its first tensor
_USUAL = frozenset((Tensor, torch.nn.Parameter, type(None), tuple, list, int, str))  # types of operators' arguments


def in_a_mode(or_profiled: bool = True) -> bool:
    """Whether this thread is in a mode that the dispatcher serves; autocast and inference mode do not count.

    The dispatch keys that a thread adds and removes do not tell: in a backward pass they differ between versions.
    """
    for is_on in MODES if or_profiled else MODES[:-1]:
        if is_on():
            return True
    return forward_ad._current_level >= 0


def are_dense(*tensors: Tensor | None) -> bool:
    """Whether all are torch's own tensors or parameters with data on the CPU or on CUDA, and none is a negated view."""
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return False
        keys = _keys_of(tensor).raw_repr()
        if keys not in _keys_on_cpu and not (tensor.is_cuda and keys in _keys_of_dense("cuda")):
            return False
    return True


def transforms_need_torch() -> bool:
    """Whether transforms of torch.func are active that need torch's own operators."""
    if not transforms_active():
        return False
    return torch.compiler.is_compiling() or any(kind != TransformType.Grad for kind in _transforms())


def tensors_need_torch(*tensors: Tensor | None) -> bool:
    """Whether torch's operator has to serve a call on these: one has no strides, or is of a wrapper subclass.

    A wrapper subclass (distributed, quantised) has rules for torch's operators, and none for those of a library.
    """
    return any(tensor is not None and (tensor.layout != torch.strided or _is_wrapper(tensor)) for tensor in tensors)


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor's class handles the dispatcher's calls, other than torch's fake tensors, which support ours."""
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter or kind.__module__.startswith("torch._subclasses."):
        return False
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_own_kind(value: object) -> bool:
    """Whether a value is a tensor with data of another class than torch's, which may have methods of its own.

    Wrappers do not count. False while torch.compile traces, which handles such classes itself.
    """
    kind = type(value)
    if kind is Tensor or kind is torch.nn.Parameter or not isinstance(value, Tensor) or torch.compiler.is_compiling():
        return False
    return type(value).__torch_dispatch__ is Tensor.__torch_dispatch__


def as_plain(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace values that :func:`is_own_kind` finds by torch's tensors with the same data, in the same graph."""
    if _USUAL.issuperset(map(type, values)):
        return values
    return tuple(Tensor.as_subclass(value, Tensor) if is_own_kind(value) else value for value in values)


def transforms_active() -> bool:
    return get_dynamic_layer_stack_depth() > 0


# Before torch 2.13 torch.compile cannot trace into the function. It may treat the result as a constant, since it guards
# transforms anyway. torch.compiler.assume_constant_result would set this too, but imports all of torch._dynamo.
transforms_active._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_exporting() -> bool:
    """Whether torch.export is tracing. Before torch 2.13 torch.compile takes torch's own function for always true."""
    return torch.compiler._is_exporting_flag


is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_exporting_to_onnx() -> bool:
    """Whether torch.onnx.export is running. Asks without importing torch.onnx, which takes a tenth of a second."""
    is_on = getattr(sys.modules.get("torch.onnx"), "is_in_onnx_export", None)
    return is_on is not None and is_on()


is_exporting_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def loses_a_tangent() -> bool:
    """Whether torch.func.jvp is active inside torch.func.jvp: torch differentiates a tangent of ours only once."""
    return _transforms().count(TransformType.Jvp) > 1


def _transforms() -> list[TransformType]:
    """The transforms of torch.func that are active in this thread, the outermost first."""
    return [interpreter.key() for interpreter in get_interpreter_stack() or ()]
