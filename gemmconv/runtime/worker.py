"""Child processes that compile for threads that would otherwise wait for NVRTC's lock; see :mod:`.nvrtc`.

A process compiles one source. To start it takes 45 ms; to compile a kernel, 330 ms (mean of a DCGAN step's 26).
"""

from __future__ import annotations

import functools
import marshal
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from ctypes import Array, addressof, c_char
from typing import Any

from cuda.pathfinder import load_nvidia_dynamic_lib

from gemmconv.runtime import nvrtc

_MOST_HERE = 4  # compilations at a time in this process; so few wait for the lock for 3% of their time
_MOST_PROCESSES = 12  # each of up to 150 MB
_here = threading.BoundedSemaphore(_MOST_HERE)
_elsewhere = threading.BoundedSemaphore(_MOST_PROCESSES)
_processes: set[subprocess.Popen[bytes]] = set()  # added and taken out in one step each
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_processes.clear)  # they belong to the parent


def compiled(source: str, name: str, flags: Sequence[bytes], cancelled: Array[c_char]) -> nvrtc.Result:
    """Compile a source in this process, or, while it compiles several, in a child process.

    A failure of the child process is repeated in this one, which reports it. For the arguments see
    :func:`.nvrtc.compiled`.
    """
    here = _here.acquire(blocking=False)
    elsewhere = not here and cancelled.value == b"0" and _elsewhere.acquire(blocking=False)
    try:
        if elsewhere:
            result = _compiled_elsewhere(cancelled, source, name, flags)
            if result is not None and not result.error:
                return result
        return nvrtc.compiled(_library(), source, name, flags, addressof(cancelled))
    finally:
        if here:
            _here.release()
        if elsewhere:
            _elsewhere.release()


def end_all() -> None:
    """Kill all child processes."""
    for process in tuple(_processes):
        process.kill()


def _compiled_elsewhere(cancelled: Array[c_char], *request: Any) -> nvrtc.Result | None:
    """The result of a child process; None if none can be started, or it was killed."""
    if not os.path.basename(sys.executable or "").startswith("python"):  # a program that embeds Python
        return None
    command, pipe = [sys.executable, "-I", "-S", nvrtc.__file__, _library()], subprocess.PIPE
    streams: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.DEVNULL}
    try:  # detached from the terminal, so that an interrupt there does not end it
        with subprocess.Popen(command, **streams, start_new_session=True) as process:
            _processes.add(process)
            try:
                if cancelled.value != b"0":  # the process may have started after ``end_all``
                    process.kill()
                result = _answer(process, request)
            finally:
                _processes.discard(process)
        return nvrtc.Result(*result)
    except (OSError, EOFError, ValueError, TypeError):
        return None


def _answer(process: subprocess.Popen[bytes], request: tuple[Any, ...]) -> Any:
    """What a process answers to a request.

    It is read up to its own end, not to that of the file: another thread may fork while the process is started, and its
    child then holds the file open.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(marshal.dumps(request))
    process.stdin.close()
    return marshal.load(process.stdout)


@functools.cache
def _library() -> str:
    path = load_nvidia_dynamic_lib("nvrtc").abs_path
    assert path is not None
    return path
