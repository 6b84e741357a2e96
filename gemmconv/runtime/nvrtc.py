"""Compiles sources with NVRTC: in this process, or, run as a script, for the process that started it.

A kernel compiles in 70 ms to a second. For 12 to 90 ms of that NVRTC holds a lock of the whole process, while it reads
the source. So 16 threads of one process are no faster than 8 for the 26 kernels of a DCGAN generator's training step.

The script, ``python -I -S nvrtc.py LIBRARY``, imports only the standard library and starts in 0.05 s. It reads a
request from its input and writes the result to its output, both by marshal.
"""

from __future__ import annotations

import ctypes
import glob
import marshal
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Result(NamedTuple):
    error: str  # NVRTC's text for its error; empty without one
    log: str  # output of NVRTC and ptxas
    cubin: bytes  # the machine code


def compiled(library: str, source: str, name: str, flags: Sequence[bytes], cancelled: int | None = None) -> Result:
    """Compile a source.

    Args:
        library: path of NVRTC's shared library.
        source, name, flags: text, name and compiler flags of the source.
        cancelled: address of a string that NVRTC reads about 10 times a second: "1" cancels the compilation. Older
            versions compile to the end.
    """
    nvrtc = ctypes.CDLL(library)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()

    def text_of(error: int) -> str:
        return "" if not error else (nvrtc.nvrtcGetErrorString(error) or b"").decode()

    def got(what: str) -> tuple[int, bytes]:
        size = ctypes.c_size_t()
        error = getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        made = ctypes.create_string_buffer(size.value)
        return error or getattr(nvrtc, f"nvrtcGet{what}")(program, made), made.raw

    if error := nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None):
        return Result(text_of(error), "", b"")
    try:
        if cancelled is not None and hasattr(nvrtc, "nvrtcSetFlowCallback"):
            # NVRTC calls ``int callback(void* payload, void*)`` without the interpreter's lock: atoi fits.
            c_library = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
            nvrtc.nvrtcSetFlowCallback(program, c_library.atoi, ctypes.c_void_p(cancelled))
        error = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        _, log = got("ProgramLog")
        cubin = b""
        if not error:
            error, cubin = got("CUBIN")
        text = text_of(error) or ("" if cubin else "there is no machine code")
        return Result(text, log.rstrip(b"\0").decode(errors="replace"), cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def main() -> None:
    """Compile the request on the standard input."""
    library, results = sys.argv[1], os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that libraries print must not mix with the result
    for builtins in glob.glob(f"{glob.escape(os.path.dirname(library))}/libnvrtc-builtins.so.*"):
        ctypes.CDLL(builtins)  # the library needs it, but does not look for it in its own folder
    with results:
        marshal.dump(tuple(compiled(library, *marshal.load(sys.stdin.buffer))), results)


if __name__ == "__main__":
    main()
