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
            folder = Path(configured).expanduser()
        elif sys.platform == "win32":
            folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local", "gemmconv")
        else:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gemmconv")
        return folder.absolute()  # the process may change its directory
    except (OSError, RuntimeError):  # the user has no home directory, or the process no directory
        return None


def make_writable(folder: Path) -> None:
    """Make a folder if there is none; raises OSError if files cannot be written into it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
