"""Where the kernel sources are."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


@cache
def directory() -> Path:
    """The folder ``csrc``: inside an installed package, beside it in a checkout."""
    for candidate in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if (candidate / "include").is_dir():
            return candidate
    raise FileNotFoundError(f"gemmconv's kernel sources are neither in {_PACKAGE} nor beside it; reinstall gemmconv")


def read(name: str) -> str:
    """Text of the source ``csrc/<name>``, or of the header ``csrc/include/<name>``."""
    folder = directory() / "include" if name.endswith(".cuh") else directory()
    return (folder / name).read_text(encoding="utf-8")


@cache
def header_digest() -> bytes:
    """Digest of all shared headers: part of the key of everything compiled with them."""
    digest = hashlib.sha256()
    folder = directory() / "include"
    for header in sorted(folder.rglob("*.cuh")):
        digest.update(header.relative_to(folder).as_posix().encode() + b"\0" + header.read_bytes() + b"\0")
    return digest.digest()
