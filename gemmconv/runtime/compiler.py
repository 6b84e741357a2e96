"""Compiles a kernel source for one architecture with NVRTC. Needs no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace

from cuda.bindings import nvrtc
from cuda.core import ProgramOptions
from cuda.core.utils import make_program_cache_key

from gemmconv.errors import CompileError
from gemmconv.runtime import sources, worker
from gemmconv.runtime.cache import KernelCache

Macros = Mapping[str, str | int]

_log = logging.getLogger("gemmconv")
compilation_seconds: list[float] = []  # of this process, one for each source that it compiled
_cancelled = ctypes.create_string_buffer(b"0")  # "1" while compilations are to end


@dataclass(frozen=True)
class Compiled:
    cubin: bytes  # the machine code
    log: str = ""  # the compiler's log, with the registers and spills that ptxas counts; empty for a cache hit
    seconds: float | None = None  # compile time; None for a cache hit


def compile(source_name: str, macros: Macros, arch: str, *, cache: KernelCache | None = None) -> Compiled:
    """Compile ``csrc/<source_name>`` with ``macros`` for ``arch``, such as ``"sm_90a"``, unless it is in ``cache``.

    Raises:
        CompileError: the source does not compile; it carries options, log and source.
        CancelledError: the interpreter exits, see :func:`cancelling`.
    """
    if cache is not None and (found := cached(source_name, macros, arch, cache)) is not None:
        return found

    source, options = sources.read(source_name), _options(source_name, macros, arch)
    start = time.perf_counter()
    flags = replace(options, include_path=str(sources.directory() / "include")).as_bytes("nvrtc")
    error, log, cubin = worker.compiled(source, source_name, flags, _cancelled)
    if error:
        if _cancelled.value != b"0":
            raise CancelledError
        shown = [f"-arch={arch}", *(f"-D{name}={value}" for name, value in sorted(macros.items()))]
        raise CompileError(source_name, shown, f"{log}{error}", source)
    seconds = time.perf_counter() - start
    compilation_seconds.append(seconds)
    _log.info("%s compiled for %s in %.0f ms", source_name, arch, 1e3 * seconds)
    if cache is not None:
        cache.put(_key(source, options), cubin)
    return Compiled(cubin, log, seconds)


def cached(source_name: str, macros: Macros, arch: str, cache: KernelCache) -> Compiled | None:
    """The entry that :func:`compile` would take from a cache; None if it would compile."""
    start = time.perf_counter()
    cubin = cache.get(_key(sources.read(source_name), _options(source_name, macros, arch)))
    if cubin is None:
        return None
    _log.info("%s for %s read from the cache in %.1f ms", source_name, arch, 1e3 * (time.perf_counter() - start))
    return Compiled(cubin)


@contextlib.contextmanager
def cancelling() -> Iterator[None]:
    """Cancel all compilations of this process while the context is active; NVRTC checks about 10 times a second."""
    _cancelled.value = b"1"
    worker.end_all()
    try:
        yield
    finally:
        _cancelled.value = b"0"


def _options(source_name: str, macros: Macros, arch: str) -> ProgramOptions:
    status, *version = nvrtc.nvrtcVersion()
    return ProgramOptions(
        name=source_name,
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in sorted(macros.items())],
        device_as_default_execution_space=True,  # lambdas are device functions
        minimal=True,  # skips declarations of textures and the like, which take time to parse
        # From 12.9 on NVRTC uses the driver's cache: code would be stored twice, and hits there have no log.
        no_cache=not status and version >= [12, 9],
        ptxas_options=["-v"],
    )


def _key(source: str, options: ProgramOptions) -> bytes:
    return make_program_cache_key(
        code=source,
        code_type="c++",
        options=options,  # without the path of headers: installations share compiled kernels
        target_type="cubin",
        extra_digest=sources.header_digest(),
    )
