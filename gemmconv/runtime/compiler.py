"""Compiles a kernel source for one architecture with NVRTC. Needs no GPU."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cuda.core import Program, ProgramOptions
from cuda.core.utils import make_program_cache_key

from gemmconv.errors import CompileError
from gemmconv.runtime import sources
from gemmconv.runtime.cache import KernelCache

Macros = Mapping[str, str | int]


@dataclass(frozen=True)
class Compiled:
    """A compiled source and, where it was compiled just now rather than read from a cache, what ptxas said of it.

    Attributes:
        cubin: the machine code.
        log: the compiler's log; empty for a cache hit.
        registers: most registers a thread of any kernel in it uses; None for a cache hit.
        spill_bytes: bytes of register spills, stores and loads; None for a cache hit.
    """

    cubin: bytes
    log: str = ""
    registers: int | None = None
    spill_bytes: int | None = None


def compile(source_name: str, macros: Macros, arch: str, *, cache: KernelCache | None = None) -> Compiled:
    """Compile ``csrc/<source_name>`` with ``macros`` for ``arch``, such as ``"sm_90a"``.

    Args:
        source_name: file under ``csrc``.
        macros: preprocessor definitions that specialise the kernel.
        arch: real architecture, with the ``a`` where the device has one.
        cache: where to look first and to store the result.

    Raises:
        CompileError: the source does not compile; it carries options, log and source.
    """
    source = sources.read(source_name)
    options = ProgramOptions(
        name=source_name,
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in sorted(macros.items())],
        device_as_default_execution_space=True,  # of lambdas
        ptxas_options=["-v"],
    )
    key = None
    if cache is not None:
        key = make_program_cache_key(
            code=source,
            code_type="c++",
            options=options,  # not where headers lie: installations share what is compiled
            target_type="cubin",
            extra_digest=sources.header_digest(),
        )
        if (cubin := cache.get(key)) is not None:
            return Compiled(cubin)

    log = io.StringIO()
    try:
        with_headers = replace(options, include_path=str(sources.directory() / "include"))
        cubin = bytes(Program(source, "c++", with_headers).compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core has one exception type per CUDA library
        flags = [f"-arch={arch}", *(f"-D{name}={value}" for name, value in sorted(macros.items()))]
        raise CompileError(source_name, flags, f"{log.getvalue()}{error}", source) from error
    if cache is not None and key is not None:
        cache.put(key, cubin)
    text = log.getvalue()
    return Compiled(
        cubin,
        text,
        registers=max(map(int, re.findall(r"Used (\d+) registers", text)), default=None),
        spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", text))),
    )
