"""What is no torch.Tensor: arrays of NumPy, CuPy and others, which come in and go out through DLPack, and objects that
stand for tensors, such as those of torch.fx."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from gemmconv.validation import fail

_Result = TypeVar("_Result")


def is_foreign(value: object) -> bool:
    """Whether an argument is an array of another library, or stands for a tensor."""
    return not isinstance(value, Tensor) and (hasattr(value, "__dlpack__") or has_torch_function((value,)))


def call(function: Callable[..., Any], where: str, arrays: dict[str, Any], *arguments: Any, **options: Any) -> Any:
    """Call a public function whose first argument is foreign.

    Args:
        function: it takes the arrays, by position, then the other arguments.
        where: its name.
        arrays: its tensor arguments by name, the foreign one first.

    Returns:
        An array of the first one's library, on its device, that shares the memory of the result; or what the object
        makes of the call.

    Raises:
        TypeError: arrays of different libraries, or that DLPack does not take.
    """
    values = tuple(arrays.values())
    if has_torch_function(values):
        return handle_torch_function(function, values, *values, *arguments, **options)
    (first, array), *others = arrays.items()
    library = _library(array)
    for name, value in others:
        if isinstance(value, Tensor):
            fail(TypeError, where, first, f"be a torch.Tensor, as {name} is", type(array).__name__)
        if value is not None and _library(value) != library:
            fail(TypeError, where, name, f"be an array of {library}, as {first} is", type(value).__name__)
    tensors = [None if value is None else _tensor_of(where, name, value) for name, value in arrays.items()]
    with torch.no_grad():
        result = function(*tensors, *arguments, **options)
    return importlib.import_module(library).from_dlpack(result)


def _library(array: object) -> str:
    """The module that an array belongs to, ``"numpy"`` or ``"cupy"``."""
    return type(array).__module__.split(".")[0]


def _tensor_of(where: str, name: str, array: Any) -> Tensor:
    if any(stride < 0 for stride in getattr(array, "strides", None) or ()):
        array = array.copy()  # torch would end the process
    try:
        tensor: Tensor = torch.from_dlpack(array)  # type: ignore[attr-defined]
    except (BufferError, RuntimeError) as error:
        fail(TypeError, where, name, "be an array that torch takes through DLPack", f"{array.dtype}: {error}")
    return tensor
