"""Results of searches for tiles, cached on disk beside compiled kernels, so that no other process repeats them.

A result is a pure function of its key and of this package's code, and is stored under a digest of both. So a cached
result always equals that of a new search: the cache saves time and changes no choice. All results are one entry of the
kernel cache, read once in a process. If processes write it at the same time, one may lose results and search again.
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_PACKAGE = Path(__file__).parents[1]
_MOST_RESULTS = 4096  # of some 600 bytes each
_WRITE_DELAY = 2.0  # seconds from a result until it is written to disk, with others

enabled = True  # False in tests that replace costs or rules which choices follow from
without_gpu = False  # True to use the cache for a GPU that this machine does not have
_timer: threading.Timer | None = None  # runs while results wait to be written
_writing = threading.Lock()


def cached(key_of: Callable[[], object], search: Callable[[], T]) -> T:
    """The result of ``search``, read from the cache if it is there.

    Quick results are cached too: a search is quick where this process has found its tiles before, for another key.

    Args:
        key_of: returns everything that the result depends on, but for code and costs; the ``repr`` of it is the key and
            must be equal in every process.
        search: returns plain values, and dataclasses and named tuples of this package.
    """
    global _timer
    if not (enabled and (without_gpu or torch.cuda.is_initialized())):
        return search()
    key = hashlib.sha256(repr(key_of()).encode()).digest()
    with suppress(Exception):  # no such entry, or one with unexpected contents
        cached_result: T = _loaded(_entries()[key])
        return cached_result
    result = search()
    with suppress(RuntimeError):  # another thread adds a cached property to a tile while it is pickled
        _entries()[key] = pickle.dumps(result)
    if _timer is None:  # two threads may each start a timer: the second one has nothing to write
        _timer = threading.Timer(_WRITE_DELAY, write)
        _timer.daemon = True
        _timer.start()
    return result


@atexit.register
def write() -> None:
    """Write the results of this process, merged with those that others have written meanwhile."""
    global _timer
    with _writing:
        timer, _timer = _timer, None
        if timer is not None:
            from gemmconv.runtime.cache import default_cache

            timer.cancel()
            entries = list((_read() | _entries()).items())
            default_cache().put(_code(), pickle.dumps(dict(entries[-_MOST_RESULTS:])))


def _read() -> dict[bytes, bytes]:
    from gemmconv.runtime.cache import default_cache

    with suppress(Exception):  # the file may hold anything
        entries: dict[bytes, bytes] = _loaded(default_cache().get(_code()) or b"")
        return entries
    return {}


_entries = functools.cache(_read)  # pickled results that this process has read or found, by digests of their keys


def _loaded(entry: bytes) -> Any:
    return _Reader(io.BytesIO(entry)).load()


class _Reader(pickle.Unpickler):
    """Unpickles only plain values and this package's records, so that no file can run other code."""

    def find_class(self, module: str, name: str) -> Any:
        record = getattr(importlib.import_module(module), name, None) if module.startswith("gemmconv.") else None
        if not (isinstance(record, type) and (dataclasses.is_dataclass(record) or issubclass(record, tuple))):
            raise pickle.UnpicklingError(f"{module}.{name} is no record of gemmconv's")
        return record


@functools.cache
def _code() -> bytes:
    """A digest of this package's code and costs, on which every result depends beside its key."""
    digest = hashlib.sha256()
    files = (os.path.join(folder, name) for folder, _, names in os.walk(_PACKAGE) for name in names)
    for path in sorted(path for path in files if path.endswith((".py", ".json", ".npz"))):
        digest.update(os.path.relpath(path, _PACKAGE).encode() + b"\0" + Path(path).read_bytes() + b"\0")
    return digest.digest()
