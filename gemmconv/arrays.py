"""Serves calls on arrays of NumPy, CuPy and others, on stand-ins for tensors, and on tensor subclasses.

Arrays are converted through DLPack. Objects that stand for tensors (torch.fx) and tensors of subclasses with methods of
their own (MONAI) are served by the protocol of torch's own functions: ``__torch_function__`` receives the public
function, and its result is returned. If it calls that function, the tensors are treated as plain ones.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from gemmconv.dispatch import as_plain, is_own_kind
from gemmconv.validation import fail


def are_foreign(first: object, *others: object) -> bool:
    """Whether the first argument is an array of another library, or any stands for a tensor or :func:`is_own_kind`."""
    if not isinstance(first, Tensor) and hasattr(first, "__dlpack__"):
        return True
    # Not None, which has_torch_function takes for a stand-in while a mode of torch functions is on.
    given = (value for value in (first, *others) if value is not None)
    return any(is_own_kind(value) if isinstance(value, Tensor) else has_torch_function((value,)) for value in given)


def call(function: Any, values: tuple[Any, ...], *arguments: Any, **options: Any) -> Any:
    """Call a public function whose tensor arguments :func:`are_foreign`; ``values`` are these, its first ones.

    Returns:
        An array of the first array's library, on its device, that shares the memory of the result; or the value that
        ``__torch_function__`` of the object's or the tensor's class returns.

    Raises:
        TypeError: arrays of different libraries, or that DLPack does not take.
    """
    if has_torch_function(values):
        return handle_torch_function(function, values, *values, *arguments, **options)
    if any(is_own_kind(value) for value in values):  # their class does not handle the call
        return function(*as_plain(values), *arguments, **options)
    where, names = function.__name__, function.__code__.co_varnames  # arguments come first among the variables
    (first, array), *others = named = tuple(zip(names, values, strict=False))
    library = _library(array)
    if library is None:
        rule = "be a torch.Tensor, or an array of a library that has from_dlpack"
        fail(TypeError, where, first, rule, type(array).__name__)
    for name, value in others:
        if isinstance(value, Tensor):
            fail(TypeError, where, first, f"be a torch.Tensor, as {name} is", type(array).__name__)
        if value is not None and _library(value) is not library:
            fail(TypeError, where, name, f"be an array of {library.__name__}, as {first} is", type(value).__name__)
    tensors = [None if value is None else _tensor_of(where, name, value) for name, value in named]
    with torch.no_grad():
        result = function(*tensors, *arguments, **options)
    if library is not np:
        return library.from_dlpack(result)
    if result.dtype == torch.bfloat16:  # torch.autocast has cast it
        fail(TypeError, where, "the result", "be of a dtype that NumPy has", "bfloat16", "leave torch.autocast")
    return result.numpy()


def _library(array: Any) -> ModuleType | None:
    """The library whose ``from_dlpack`` returns arrays of this type; None if it has no such function."""
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
        array = array.copy()  # torch would abort the process
    try:
        try:
            tensor: Tensor = torch.from_dlpack(array)  # type: ignore[attr-defined]
        except BufferError:  # an older NumPy does not export read-only arrays
            tensor = torch.from_dlpack(array.copy())  # type: ignore[attr-defined]
    except (AttributeError, BufferError, RuntimeError) as error:
        got = f"{getattr(array, 'dtype', type(array).__name__)}: {error}"
        fail(TypeError, where, name, "be an array that torch takes through DLPack", got)
    return tensor
