"""Where a measurement runs, and with what."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import torch

import gemmconv
from gemmconv import info

_PACKAGE = Path(gemmconv.__file__).parent


def describe(device: torch.device) -> dict[str, str]:
    """Everything that a row must say about where it comes from. ``source`` changes with the library's own files."""
    on_cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_cuda else f"CPU, {torch.get_num_threads()} threads",
        "driver": _driver() if on_cuda else "",
        "cuda": (torch.version.cuda or "") if on_cuda else "",
        "cudnn": (info.cudnn_version() or "unknown") if on_cuda else "",
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "gemmconv": gemmconv.__version__,
        "source": source_digest(),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def text_of(run: Mapping[str, str]) -> str:
    """Return the result of :func:`describe` in one line."""
    parts = [run["gpu"], f"gemmconv {run['gemmconv']} ({run['commit']})", f"torch {run['torch']}"]
    if run["cuda"]:
        parts += [f"CUDA {run['cuda']}", f"cuDNN {run['cudnn']}", f"driver {run['driver']}"]
    return ", ".join(parts)


def slug(device: torch.device) -> str:
    """A folder's name for a device: ``nvidia-h200``, ``cpu-2-threads``."""
    return re.sub(r"[^a-z0-9]+", "-", describe(device)["gpu"].lower()).strip("-")


@cache
def source_digest() -> str:
    """A short digest of gemmconv's Python files and kernels."""
    kernels = next((path for path in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc") if path.is_dir()), _PACKAGE)
    digest = hashlib.sha256()
    for root, pattern in ((_PACKAGE, "*.py"), (kernels, "*.cu*")):
        for path in sorted(root.rglob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


@cache
def _commit() -> str:
    """``$GEMMCONV_COMMIT``, else git's short hash, marked where files differ from it; else ``unknown``."""
    if given := os.environ.get("GEMMCONV_COMMIT"):
        return given
    commit = _output("git", "-C", str(_PACKAGE.parent), "rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    changed = _output("git", "-C", str(_PACKAGE.parent), "status", "--porcelain", "--", "gemmconv", "csrc")
    return f"{commit}-dirty" if changed else commit


@cache
def _driver() -> str:
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else "unknown"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
