"""The fallback if kernels are not available: torch's operator, with one warning for each cause."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from gemmconv.errors import KernelError
from gemmconv.kernels.base import missing_software
from gemmconv.tuned import log

AnyCall = TypeVar("AnyCall")

_warned: set[str] = set()
_warned_lock = threading.Lock()


def with_fallback(device: torch.device, ours: Callable[[], AnyCall], torchs: Callable[[], AnyCall]) -> AnyCall:
    """The call that ``ours`` prepares; if its kernel does not compile or load, the call that ``torchs`` prepares.

    Warns of a kernel that failed, and of missing packages that made ``ours`` work without kernels.

    Raises:
        KernelError: a kernel fails, and torch's operator cannot serve the call either.
    """
    try:
        call, cause = ours(), missing_software(device)
    except KernelError as error:
        try:
            call, cause = torchs(), error.cause
        except NotImplementedError:
            raise error from None
    if cause is not None:
        warn_once(cause)
    return call


def warn_once(cause: str) -> None:
    """Warn that torch's operator is used, in each process once for each cause, and log it at INFO each time.

    Raises:
        RuntimeWarning: the user's filter turns warnings into errors; then each call raises it.
    """
    log.info("torch's operator is used, since %s", cause)
    with _warned_lock:
        if cause in _warned:
            return
        _warned.add(cause)
    try:
        warnings.warn(f"gemmconv: torch's operator is used, since {cause}", RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        _warned.discard(cause)
        raise
