"""Whether a machine can compile and load kernels. CUDA packages are imported only when it is asked."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from gemmconv.runtime import sources


def what_is_missing(capability: tuple[int, int]) -> str | None:
    """Why this machine cannot compile or load kernels for a compute capability, and the remedy.

    Returns:
        A clause, such as ``the driver must ...``; None if nothing is missing.
    """
    if torch.version.hip is not None:
        return f"torch must be built for NVIDIA GPUs, got one for ROCm {torch.version.hip}"
    try:
        sources.directory()
    except FileNotFoundError as error:
        return str(error)
    try:
        with warnings.catch_warnings():  # a user's filter may turn them into errors
            warnings.simplefilter("ignore")
            importlib.import_module("gemmconv.runtime.launch")  # which imports all packages that are needed
        compiler, architectures, driver = _versions()
    except Exception as error:  # each library raises its own type if it is missing or incomplete
        extra = f"gemmconv[{_extra(torch.version.cuda or '')}]"
        got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return f"the packages of {extra} must be installed and whole, got {got}; pip install '{extra}'"
    if driver[0] < compiler[0]:
        return (
            f"the driver must load what NVRTC {_text(compiler)} compiles, got a driver for CUDA {_text(driver)}; "
            f"update the driver, or pip install 'gemmconv[{_extra(_text(driver))}]'"
        )
    if 10 * capability[0] + capability[1] not in architectures:
        package = "nvidia-cuda-nvrtc-cu12" if compiler[0] == 12 else "nvidia-cuda-nvrtc"
        return (
            f"NVRTC must know the device's compute capability {_text(capability)}, got NVRTC {_text(compiler)}; "
            f"pip install --upgrade {package}"
        )
    return None


def _versions() -> tuple[tuple[int, int], frozenset[int], tuple[int, int]]:
    """The version of NVRTC, the architectures that it compiles for, the CUDA version that the driver is for.

    Raises:
        RuntimeError: one of the libraries cannot be loaded, or does not answer.
    """
    from cuda.bindings import driver, nvrtc

    major, minor = _answer(nvrtc.nvrtcVersion())
    (architectures,) = _answer(nvrtc.nvrtcGetSupportedArchs())
    (newest,) = _answer(driver.cuDriverGetVersion())
    return (major, minor), frozenset(architectures), (newest // 1000, newest % 1000 // 10)


def _answer(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a call of a CUDA library, without its status, which must be success."""
    status, *values = result
    if status:
        raise RuntimeError(status.name)
    return tuple(values)


def _extra(cuda: str) -> str:
    """The name of gemmconv's extra for a version of CUDA."""
    return "cuda12" if cuda.startswith("12.") else "cuda13"


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
