"""Tells the calls that torch's dispatcher would only pass on to the implementation, and those that are torch's own.

The dispatcher serves modes, tensor subclasses, transforms, tracing, autocast and profiling. A plain eager call needs
none of them, and going through an operator defined in Python costs it 10 us, a third of what a small layer takes in
all. Such a call may go to the implementation directly. Whatever is not recognised as plain takes the dispatcher.

Transforms of torch.func come before the dispatcher, and carry an operator of ours through less than torch's own: a
vmap of it is a loop, jvp of jvp loses a tangent, functionalize and compiled transforms have no rule. Of these only
gradients, however deep, are served as well.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_dynamic_layer_stack_depth, get_interpreter_stack
from torch.autograd import forward_ad

_keys_of = torch._C._dispatch_keys
# What says that a thread is in a mode, beside the level of forward-mode gradients; the last tells of a profiler.
MODES: tuple[Callable[[], Any], ...] = (
    torch._C._len_torch_function_stack,
    torch._C._len_torch_dispatch_stack,
    torch._C._are_functorch_transforms_active,
    torch._C._get_tracing_state,
    torch._C._autograd._profiler_enabled,
)


def _keys_of_dense(device_type: str) -> set[int]:
    """The dispatch keys of dense tensors of a device, made outside and inside inference mode."""
    with torch.inference_mode(False):
        ordinary = _keys_of(torch.empty(0, device=device_type)).raw_repr()
    with torch.inference_mode():
        inference = _keys_of(torch.empty(0, device=device_type)).raw_repr()
    return {ordinary, inference}


with ThreadPoolExecutor(1) as _fresh:  # a thread in no mode, whatever this one imports gemmconv in
    _plain_keys = {"cpu": _fresh.submit(_keys_of_dense, "cpu").result()}  # CUDA's come with its first tensor
_all_plain_keys = set(_plain_keys["cpu"])
_USUAL = frozenset((Tensor, torch.nn.Parameter, type(None), tuple, list, int, str))  # types of operators' arguments


def in_a_mode(or_profiled: bool = True) -> bool:
    """Whether this thread is in a mode that the dispatcher serves; autocast and inference mode are none of these.

    The keys that a thread adds and removes would not tell: a backward pass's differ between versions and devices.
    """
    for is_on in MODES if or_profiled else MODES[:-1]:
        if is_on():
            return True
    return forward_ad._current_level >= 0


def are_dense(*tensors: Tensor | None) -> bool:
    """Whether all are torch's own tensors or parameters with data on the CPU or on CUDA, no views that negate."""
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return False
        if _keys_of(tensor).raw_repr() not in _all_plain_keys and not _is_first_of_cuda(tensor):
            return False
    return True


def is_for_torch() -> bool:
    """Whether transforms of torch.func are active that want torch's own operators."""
    if not _transforms_active():
        return False
    return torch.compiler.is_compiling() or any(kind != TransformType.Grad for kind in _transforms())


def are_for_torch(*tensors: Tensor | None) -> bool:
    """Whether one is of a kind that torch's operator knows and ours cannot: without strides, or a wrapper.

    A wrapper subclass (distributed, quantised) has rules for torch's operators, and none for those of a library.
    """
    return any(tensor is not None and (tensor.layout != torch.strided or _is_wrapper(tensor)) for tensor in tensors)


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor's class takes the dispatcher's calls itself; torch's own stand-ins for tracing know ours."""
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter or kind.__module__.startswith("torch._subclasses."):
        return False
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_own_kind(value: object) -> bool:
    """Whether a value is a tensor with data of a class neither torch's nor a wrapper: its methods may be its own.

    Not while torch.compile traces, which serves such classes itself.
    """
    kind = type(value)
    if kind is Tensor or kind is torch.nn.Parameter or not isinstance(value, Tensor) or torch.compiler.is_compiling():
        return False
    return type(value).__torch_dispatch__ is Tensor.__torch_dispatch__


def as_plain(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Values, of which those that :func:`is_own_kind` become torch's own: with the same data, in the same graph."""
    if _USUAL.issuperset(map(type, values)):
        return values
    return tuple(Tensor.as_subclass(value, Tensor) if is_own_kind(value) else value for value in values)


def _transforms_active() -> bool:
    return get_dynamic_layer_stack_depth() > 0


# torch.compile, which may not look into the function before torch 2.13, takes its result for a constant: transforms are
# guarded anyway. torch.compiler.assume_constant_result does the same, and imports all of torch._dynamo.
_transforms_active._dynamo_marked_constant = True  # type: ignore[attr-defined]


def loses_a_tangent() -> bool:
    """Whether torch.func.jvp is active inside torch.func.jvp: torch differentiates what ours computes only once."""
    return _transforms().count(TransformType.Jvp) > 1


def _transforms() -> list[TransformType]:
    """The transforms of torch.func that are active in this thread, the outermost first."""
    return [interpreter.key() for interpreter in get_interpreter_stack() or ()]


def _is_first_of_cuda(tensor: Tensor) -> bool:
    """Whether a tensor is a plain one of CUDA, whose keys were not known yet."""
    if not tensor.is_cuda or "cuda" in _plain_keys:
        return False
    _plain_keys["cuda"] = _keys_of_dense("cuda")
    _all_plain_keys.update(_plain_keys["cuda"])
    return _keys_of(tensor).raw_repr() in _all_plain_keys
