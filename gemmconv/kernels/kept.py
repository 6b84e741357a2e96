"""What took long to find, on disk beside compiled kernels, so that no other process searches for it again.

What is found is a pure function of what is asked and of this package's code, and is kept by a digest of both. So what
is kept never says anything but what a search would: it saves time, and changes no choice. One entry of the cache has
all of it, which a process reads once. Of processes that write it at the same time one may lose what it found, to be
found again.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import importlib
import io
import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_PACKAGE = Path(__file__).parents[1]
_LONG = 1e-3  # seconds of a search whose result is kept
_MOST = 4096  # results, of some 600 bytes each
_SECONDS = 2.0  # from a result to when it is written, with others

enabled = True  # False for who replaces what a choice follows from
without_gpu = False  # True for who asks for a GPU that is not there
_timer: threading.Timer | None = None  # until what was found is written
_writing = threading.Lock()


def kept(asked: Callable[[], object], find: Callable[[], T], always: bool = False) -> T:
    """What ``find`` returns, without a search where it was kept.

    Args:
        asked: what it depends on, but for code and costs; its ``repr`` tells all of it, the same in every process.
        find: returns plain values, and dataclasses and named tuples of this package.
        always: whether what took little is kept too: it may take more in a process that found less before.
    """
    global _timer
    if not (enabled and (without_gpu or torch.cuda.is_initialized())):
        return find()
    key = hashlib.sha256(repr(asked()).encode()).digest()
    with suppress(Exception):  # of an entry that is not there, or that somebody else wrote
        known: T = _loaded(_entries()[key])
        return known
    start = time.thread_time()
    found = find()
    if always or time.thread_time() - start > _LONG:
        with suppress(RuntimeError):  # while another thread works out what a tile keeps, which is then not written
            _entries()[key] = pickle.dumps(found)
        if _timer is None:  # of several threads each may start one: the second finds nothing to write
            _timer = threading.Timer(_SECONDS, write)
            _timer.daemon = True
            _timer.start()
    return found


@atexit.register
def write() -> None:
    """Write what was found, beside what others have written since it was read."""
    global _timer
    with _writing:
        timer, _timer = _timer, None
        if timer is not None:
            from gemmconv.runtime.cache import default_cache

            timer.cancel()
            entries = list((_read() | _entries()).items())
            default_cache().put(_code(), pickle.dumps(dict(entries[-_MOST:])))


@functools.cache
def _entries() -> dict[bytes, bytes]:
    """What this process has read and found, pickled, by digests of what was asked."""
    return _read()


def _read() -> dict[bytes, bytes]:
    from gemmconv.runtime.cache import default_cache

    with suppress(Exception):  # of whatever a file may hold
        found: dict[bytes, bytes] = _loaded(default_cache().get(_code()) or b"")
        return found
    return {}


def _loaded(entry: bytes) -> Any:
    return _Reader(io.BytesIO(entry)).load()


class _Reader(pickle.Unpickler):
    """Reads nothing but plain values and this package's records: a file can have no other code run."""

    def find_class(self, module: str, name: str) -> Any:
        return _record(module, name)


@functools.cache
def _record(module: str, name: str) -> type:
    found = getattr(importlib.import_module(module), name, None) if module.startswith("gemmconv.") else None
    if not (isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, tuple))):
        raise pickle.UnpicklingError(f"{module}.{name} is no record of gemmconv's")
    return found


@functools.cache
def _code() -> bytes:
    """A digest of this package's code and costs: of all that a choice follows from beside what is asked."""
    digest = hashlib.sha256()
    files = (os.path.join(folder, name) for folder, _, names in os.walk(_PACKAGE) for name in names)
    for path in sorted(path for path in files if path.endswith((".py", ".json", ".npz"))):
        digest.update(os.path.relpath(path, _PACKAGE).encode() + b"\0" + Path(path).read_bytes() + b"\0")
    return digest.digest()
