"""Compiles sources with NVRTC: in this process, or, run as a script, for the process that started it.

Of the 70 ms to a second that a kernel takes, NVRTC spends 12 to 90 under a lock of the whole process, in which it reads
the source. A DCGAN generator's step has 26 kernels: by 16 threads of one process they take as long as by 8.

Run as ``python -I -S nvrtc.py LIBRARY`` it imports nothing but what Python always has, and is there in 0.05 s. Requests
come in and results go out by marshal, until the input ends.
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
    """What NVRTC makes of a source.

    Attributes:
        error: what it calls what went wrong; empty where nothing did.
        log: what it, and ptxas, say of the source.
        cubin: the machine code.
    """

    error: str
    log: str
    cubin: bytes


def compiled(library: str, source: str, name: str, flags: Sequence[bytes], cancelled: int | None = None) -> Result:
    """Compile a source.

    Args:
        library: path of NVRTC's.
        source, name, flags: what it is given.
        cancelled: address of a string that NVRTC reads while it compiles, every tenth of a second or so: "1" ends it.
            A version that cannot compiles to the end.
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
            # It calls ``int callback(void* payload, void*)`` without the interpreter's lock: atoi.
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
    """Compile what comes in until it ends."""
    library, requests, results = sys.argv[1], sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # for whatever libraries print
    for builtins in glob.glob(f"{glob.escape(os.path.dirname(library))}/libnvrtc-builtins.so.*"):
        ctypes.CDLL(builtins)  # which the library looks for, but not beside itself
    while True:
        try:
            request = marshal.load(requests)
        except EOFError:
            return
        marshal.dump(tuple(compiled(library, *request)), results)
        results.flush()


if __name__ == "__main__":
    main()
