"""What is not of torch's own kinds: arrays of NumPy, CuPy and others, which come in and go out through DLPack, objects
that stand for tensors, such as those of torch.fx, and tensors of classes with methods of their own, such as MONAI's.

The last two are served by the protocol of torch's own functions: what ``__torch_function__`` makes of the public
function is the result. Where it calls that function as torch.Tensor's does, the tensors are computed on as plain ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from gemmconv.dispatch import as_plain, is_own_kind
from gemmconv.validation import fail


def are_foreign(first: object, *others: object) -> bool:
    """Whether the first argument is an array of another library, or any stands for a tensor or is of its own kind."""
    if not isinstance(first, Tensor) and hasattr(first, "__dlpack__"):
        return True
    return any(
        is_own_kind(value) if isinstance(value, Tensor) else has_torch_function((value,)) for value in (first, *others)
    )


def call(function: Callable[..., Any], arrays: dict[str, Any], *arguments: Any, **options: Any) -> Any:
    """Call a public function whose tensor arguments :func:`are_foreign`.

    Args:
        function: it takes the arrays, by position, then the other arguments.
        arrays: its tensor arguments by name.

    Returns:
        An array of the first one's library, on its device, that shares the memory of the result; or what the object's
        or the tensor's class makes of the call.

    Raises:
        TypeError: arrays of different libraries, or that DLPack does not take.
    """
    values, where = tuple(arrays.values()), function.__name__
    if has_torch_function(values):
        return handle_torch_function(function, values, *values, *arguments, **options)
    if any(is_own_kind(value) for value in values):  # of a class that leaves the call to us
        return function(*as_plain(values), *arguments, **options)
    (first, array), *others = arrays.items()
    library = _library(array)
    if library is None:
        rule = "be a torch.Tensor, or an array of a library that has from_dlpack"
        fail(TypeError, where, first, rule, type(array).__name__)
    for name, value in others:
        if isinstance(value, Tensor):
            fail(TypeError, where, first, f"be a torch.Tensor, as {name} is", type(array).__name__)
        if value is not None and _library(value) is not library:
            fail(TypeError, where, name, f"be an array of {library.__name__}, as {first} is", type(value).__name__)
    tensors = [None if value is None else _tensor_of(where, name, value) for name, value in arrays.items()]
    with torch.no_grad():
        result = function(*tensors, *arguments, **options)
    if library is not np:
        return library.from_dlpack(result)
    if result.dtype == torch.bfloat16:  # made so by torch.autocast
        fail(TypeError, where, "the result", "be of a dtype that NumPy has", "bfloat16", "leave torch.autocast")
    return result.numpy()


def _library(array: Any) -> ModuleType | None:
    """The module whose ``from_dlpack`` makes arrays of this kind; None where none is known."""
    if isinstance(array, np.ndarray):
        return np
    if not hasattr(array, "__dlpack__"):
        return None
    if hasattr(array, "__array_namespace__"):
        library: ModuleType = array.__array_namespace__()
    else:
        library = importlib.import_module(type(array).__module__.split(".")[0])
    return library if hasattr(library, "from_dlpack") else None


def _tensor_of(where: str, name: str, array: Any) -> Tensor:
    if any(stride < 0 for stride in getattr(array, "strides", None) or ()):
        array = array.copy()  # torch would end the process
    try:
        try:
            tensor: Tensor = torch.from_dlpack(array)  # type: ignore[attr-defined]
        except BufferError:  # an older NumPy exports nothing that may only be read
            tensor = torch.from_dlpack(array.copy())  # type: ignore[attr-defined]
    except (AttributeError, BufferError, RuntimeError) as error:
        got = f"{getattr(array, 'dtype', type(array).__name__)}: {error}"
        fail(TypeError, where, name, "be an array that torch takes through DLPack", got)
    return tensor
