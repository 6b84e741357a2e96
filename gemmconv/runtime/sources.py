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
        if (candidate / "common").is_dir():
            return candidate
    raise FileNotFoundError(f"gemmconv's kernel sources are neither in {_PACKAGE} nor beside it; reinstall gemmconv")


def read(name: str) -> str:
    """Text of ``csrc/<name>``."""
    return (directory() / name).read_text(encoding="utf-8")


@cache
def header_digest() -> bytes:
    """Digest of all shared headers: part of the key of everything compiled with them."""
    digest = hashlib.sha256()
    for header in sorted((directory() / "common").glob("*.cuh")):
        digest.update(header.name.encode() + b"\0" + header.read_bytes() + b"\0")
    return digest.digest()
