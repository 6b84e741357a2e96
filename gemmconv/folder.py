"""Where this user's files are kept: compiled kernels, and choices that were tuned."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path | None:
    """``$GEMMCONV_CACHE_DIR``, else ``gemmconv`` in the platform's user cache directory; None where none is known."""
    try:
        if configured := os.environ.get("GEMMCONV_CACHE_DIR"):
            return Path(configured).expanduser().absolute()  # the process may change its directory
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        else:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # the user has no home directory
        return None
    return Path(base) / "gemmconv"


def make_writable(folder: Path) -> None:
    """Make a folder if there is none; raises OSError if files cannot be written into it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
