"""Finds the extension in C, which runs calls and knows them again, and what it needs of torch.

The environment variable GEMMCONV_EXECUTOR ("c" or "python") asks for it, or for Python in its place, and for an error
where that one is not there.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any

import torch

from gemmconv.errors import KernelError

_ENVIRONMENT = "GEMMCONV_EXECUTOR"


@cache
def extension() -> Any | None:
    """The extension, None where it was not built or is not wanted.

    Raises:
        KernelError: it is asked for and not there.
    """
    wanted = os.environ.get(_ENVIRONMENT, "")
    if wanted not in ("", "c", "python"):
        raise KernelError(f'{_ENVIRONMENT} must be "c" or "python", got {wanted!r}')
    if wanted == "python":
        return None
    try:
        found = import_module("gemmconv._extension")
    except ImportError as error:
        if wanted == "c":
            way_out = "run `make executor`, or install gemmconv where there is a C compiler"
            raise KernelError(f"{_ENVIRONMENT}=c needs the extension, got {error}; {way_out}") from error
        return None
    return found


@cache
def exchange_of_tensors() -> Any | None:
    """DLPack's C functions for torch's tensors, by which the extension reads them.

    None where there is no extension, where torch has none, before 2.11, and where they are of another version.

    Raises:
        KernelError: as :func:`extension`.
    """
    in_c, found = extension(), getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return found if in_c is not None and found is not None and in_c.takes(found) else None
