"""What stands in where kernels cannot be had: torch's operator, and a warning for each cause."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from gemmconv.errors import KernelError
from gemmconv.kernels.base import missing
from gemmconv.tuned import log

Call = TypeVar("Call")

_said: set[str] = set()
_said_lock = threading.Lock()


def with_fallback(device: torch.device, ours: Callable[[], Call], torchs: Callable[[], Call]) -> Call:
    """What ``ours`` prepares; where a kernel for it does not compile or load, what ``torchs`` prepares.

    Warns of that, and of what the machine lacks, where ``ours`` has done without.

    Raises:
        KernelError: a kernel fails, and torch's operator cannot serve the call either.
    """
    try:
        call, cause = ours(), missing(device)
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
        RuntimeWarning: where the user's filter makes errors of warnings; then at each call.
    """
    log.info("torch's operator is used, since %s", cause)
    with _said_lock:
        if cause in _said:
            return
        _said.add(cause)
    try:
        warnings.warn(f"gemmconv: torch's operator is used, since {cause}", RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        _said.discard(cause)
        raise
