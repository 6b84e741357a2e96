"""The state of an installation: versions, devices, what kernels lack, the extension in C, caches and compilations.

``python -m gemmconv info`` prints it. A program that calls :func:`collect` finds its own compilations counted.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch

from gemmconv import tuned
from gemmconv.extension import exchange_of_tensors, extension
from gemmconv.folder import cache_folder
from gemmconv.kernels.base import why_no_kernels
from gemmconv.kernels.cpu.library import isa_name
from gemmconv.version import __version__


def collect() -> dict[str, Any]:
    """The state as a dict that JSON can hold. Needs neither a GPU nor the CUDA packages.

    Where a question ends in an error, such as a wrong setting in the environment, its answer is the error's words.

    >>> collect()["gemmconv"] == __version__
    True
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", index) for index in range(count)]
    reasons = {str(one): _answer(partial(why_no_kernels, one)) or "nothing" for one in devices}
    compiler = sys.modules.get("gemmconv.runtime.compiler")  # where it was not imported, nothing was compiled
    seconds = [] if compiler is None else list(compiler.compilation_seconds)
    return {
        **versions(),
        "devices": {str(one): device_text(one) for one in (torch.device("cpu"), *devices)},
        "missing for kernels": reasons or "a GPU: torch must find a CUDA device, got none; layers on the CPU need none",
        "extension in C": _answer(lambda: getattr(extension(), "__file__", None)),
        "executor": _answer(lambda: "Python" if extension() is None else "C"),
        "call recognition": _answer(lambda: "Python" if exchange_of_tensors() is None else "C"),
        "CPU instruction set": _answer(isa_name),
        **_cache(),
        "tuned file": _answer(lambda: str(tuned.default_path())),
        "tuned entries": _answer(lambda: len(tuned.read(path)) if (path := tuned.default_path()).exists() else 0),
        "tuned loaded": tuned.count(),
        "compilations": len(seconds),
        "compilation seconds": round(sum(seconds), 3),
    }


def report(state: dict[str, Any]) -> str:
    """The lines of what :func:`collect` returned, a name and its value each."""
    lines = []
    for name, value in state.items():
        several = [f"{key}: {one}" for key, one in value.items()] if isinstance(value, dict) else [value]
        lines += [f"{'' if i else name:<20} {'none' if one is None else one}" for i, one in enumerate(several)]
    return "\n".join(lines)


def versions() -> dict[str, str | None]:
    """The versions of gemmconv and of what it runs on."""
    return {
        "gemmconv": __version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA of torch": torch.version.cuda,
        "cuDNN": _answer(cudnn_version),
        "NVRTC": _answer(_nvrtc_version),
        "cuda-core": _answer(lambda: metadata.version("cuda-core")),
    }


def device_text(device: torch.device) -> str:
    """A device by name: a CUDA device with its compute capability, the CPU with torch's threads."""
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def cudnn_version() -> str | None:
    """The version of cuDNN, such as ``9.19.0``; None where torch has none."""
    if not (version := torch.backends.cudnn.version()):
        return None
    major, rest = divmod(version, 10000 if version >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def _cache() -> dict[str, Any]:
    """The folder of the cache, the MiB of its files, and the number of compiled kernels and search results in it."""
    folder = cache_folder()
    files = [] if folder is None else [path for path in folder.rglob("*") if path.is_file()]
    mib = _answer(lambda: round(sum(path.stat().st_size for path in files) / 2**20, 1))
    entries = sum(path.is_relative_to(folder / "entries") for path in files) if folder else 0
    return {"cache folder": folder and str(folder), "cache MiB": mib, "cache entries": entries}


def _answer(ask: Callable[[], Any]) -> Any:
    """Return the result of ``ask``, or the first line of its error: libraries raise exceptions of their own."""
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
