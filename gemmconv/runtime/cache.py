"""Compiled kernels on disk, shared by every process of a user."""

from __future__ import annotations

import errno
import hashlib
import warnings
from functools import cache, cached_property
from pathlib import Path

from cuda.core.utils import FileStreamProgramCache

from gemmconv.folder import cache_folder

_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_BYTES = 1 << 30
_FOR_READING_ALONE = (errno.EACCES, errno.EPERM, errno.EROFS)


class KernelCache:
    """Bytes by key in a folder of mode 0700. Never raises: an unreadable entry is a miss, a failed write only warns.

    Entries appear by an atomic rename, so any number of processes may share the folder. Each entry starts with the
    SHA-256 digest of the rest: a truncated or altered one is a miss and is replaced.
    """

    def __init__(self, path: Path | None) -> None:
        self._warned = False
        self._path = path
        self._files: FileStreamProgramCache | None = None
        if path is None:
            self._warn("its folder is in a home directory, and there is none")
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            self._files = FileStreamProgramCache(path)  # with a limit it would look at every entry at once
        except OSError as error:
            self._warn(error)

    def get(self, key: bytes) -> bytes | None:
        """The entry; None if there is none, or its digest is wrong."""
        try:
            entry = None if self._files is None else self._files.get(key)
        except OSError as error:
            self._warn(error)
            return None
        if entry is None:
            return None
        digest, value = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
        return value if hashlib.sha256(value).digest() == digest else None

    def put(self, key: bytes, value: bytes) -> None:
        """Store an entry, or warn once that it cannot be stored; a read-only folder is skipped without a warning."""
        if self._files is None:
            return
        try:
            self._limited[key] = hashlib.sha256(value).digest() + value
        except OSError as error:
            if error.errno not in _FOR_READING_ALONE:
                self._warn(error)

    @cached_property
    def _limited(self) -> FileStreamProgramCache:
        """The files for writing, which deletes those that were read longest ago if all exceed the limit."""
        return FileStreamProgramCache(self._path, max_size_bytes=_MAX_BYTES)

    def _warn(self, error: object) -> None:
        if not self._warned:
            self._warned = True
            where = f"the kernel cache{'' if self._path is None else f' {self._path}'}"
            warnings.warn(
                f"gemmconv: {where} cannot be used ({error}); kernels are compiled anew in each process; set "
                "GEMMCONV_CACHE_DIR to a folder that can be written",
                RuntimeWarning,
                stacklevel=2,
            )


@cache
def default_cache() -> KernelCache:
    """The cache of this process, opened once."""
    return KernelCache(cache_folder())
