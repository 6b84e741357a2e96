"""Child processes that compile for threads that would otherwise wait for NVRTC's lock; see :mod:`.nvrtc`."""

from __future__ import annotations

import functools
import marshal
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
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


class _Thread(threading.local):
    """State of the current thread."""

    may_have_one = False
    process: subprocess.Popen[bytes] | None = None


_thread = _Thread()


def compiled(source: str, name: str, flags: Sequence[bytes], cancelled: Array[c_char]) -> nvrtc.Result:
    """Compile a source in this process; while it compiles several, in this thread's child process, if it may have one.

    A failure of the child process is repeated in this one, which reports it.

    Args:
        source, name, flags: text, name and compiler flags of the source.
        cancelled: "1" if compilations are to be cancelled.
    """
    here = _here.acquire(blocking=False)
    try:
        if not here and _thread.may_have_one and cancelled.value == b"0":
            result = _compiled_elsewhere(cancelled, source, name, flags)
            if result is not None and not result.error:
                return result
        return nvrtc.compiled(_library(), source, name, flags, addressof(cancelled))
    finally:
        if here:
            _here.release()


def allow() -> None:
    """Let this thread start a child process, which it must :func:`end`, unless :func:`end_all` does."""
    name = os.path.basename(sys.executable or "")
    _thread.may_have_one = name.startswith("python")  # false in a program that embeds Python


def has_one() -> bool:
    """Whether this thread has a child process, which holds as much memory as its largest compilation needed."""
    return _thread.process is not None


def end() -> None:
    """End this thread's child process, if it has one."""
    process, _thread.process = _thread.process, None
    if process is not None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # a request may not have been sent completely
                pipe and pipe.close()
        _processes.discard(process)
        _elsewhere.release()


def end_all() -> None:
    """Kill the child processes of all threads."""
    for process in tuple(_processes):
        process.kill()


def _compiled_elsewhere(cancelled: Array[c_char], *request: Any) -> nvrtc.Result | None:
    """The result of this thread's child process, which is started if needed; None if there is no process."""
    process = _thread.process or _started()
    if process is None:
        return None
    try:
        if cancelled.value != b"0":  # the process may have started after ``end_all``
            process.kill()
        assert process.stdin is not None
        assert process.stdout is not None
        marshal.dump(request, process.stdin)
        process.stdin.flush()
        return nvrtc.Result(*marshal.load(process.stdout))
    except (OSError, EOFError, ValueError, TypeError):  # the process was killed
        end()
        return None


def _started() -> subprocess.Popen[bytes] | None:
    """Start a child process for this thread; None if there are too many, or it cannot be started."""
    if not _elsewhere.acquire(blocking=False):
        return None
    command = [sys.executable, "-I", "-S", nvrtc.__file__, _library()]
    try:  # detached from the terminal, so that an interrupt there does not end it
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, start_new_session=True)
    except OSError:
        _elsewhere.release()
        _thread.may_have_one = False
        return None
    _thread.process = process
    _processes.add(process)
    return process


@functools.cache
def _library() -> str:
    path = load_nvidia_dynamic_lib("nvrtc").abs_path
    assert path is not None
    return path
