"""Loads the optional extension in C, which recognises repeated calls and launches their kernels without Python.

The environment variable GEMMCONV_EXECUTOR may be "c", which raises an error if the extension was not built, or
"python", which does without it.
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
    """The extension; None where it was not built, or GEMMCONV_EXECUTOR is "python".

    Raises:
        KernelError: GEMMCONV_EXECUTOR is "c" and it was not built, or has another value.
    """
    wanted = os.environ.get(_ENVIRONMENT, "")
    if wanted not in ("", "c", "python"):
        raise KernelError(f'{_ENVIRONMENT} must be "c" or "python", got {wanted!r}')
    if wanted == "python":
        return None
    try:
        return import_module("gemmconv._extension")
    except ImportError as error:
        if wanted != "c":
            return None
        way_out = "run `make executor`, or install gemmconv where there is a C compiler"
        raise KernelError(f"{_ENVIRONMENT}=c needs the extension, got {error}; {way_out}") from error


@cache
def exchange_of_tensors() -> Any | None:
    """DLPack's C functions for torch's tensors, through which the extension reads them.

    None without the extension, before torch 2.11, which introduced them, and where their version is another. Raises
    KernelError where :func:`extension` does.
    """
    in_c, found = extension(), getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return found if in_c is not None and found is not None and in_c.takes(found) else None
