"""A pool of threads that compile kernels, as many as cores. They start with the first jobs and then wait for more."""

from __future__ import annotations

import atexit
import heapq
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gemmconv.runtime import compiler

_condition = threading.Condition()  # of all below
_jobs: list[tuple[bool, int, Future[Any], Callable[[], Any]]] = []  # a heap
_order = itertools.count()
_threads: list[threading.Thread] = []
_idle = 0
_closed = False


def submit(work: Callable[[], Any], urgent: bool, at_once: bool = False) -> Future[Any]:
    """Run ``work`` in a thread of the pool; urgent jobs come first. The future holds its result or its exception.

    An interpreter that exits cancels what has not begun, and compilations that have.

    Args:
        work, urgent: what is done, and whether somebody waits for it.
        at_once: whether the thread that asks does it itself, now, if it is one of these.
    """
    future = Future[Any]()
    if at_once and not _closed and threading.current_thread() in _threads:
        _do(work, future)
        return future
    with _condition:
        if _closed:
            future.cancel()
            return future
        heapq.heappush(_jobs, (not urgent, next(_order), future, work))
        if _idle >= len(_jobs):
            _condition.notify()
        elif len(_threads) < cores():
            if not _threads:
                atexit.register(_close)
            _threads.append(threading.Thread(target=_work, name=f"gemmconv-{len(_threads)}", daemon=True))
            _threads[-1].start()
    return future


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _work() -> None:
    global _idle
    while True:
        with _condition:
            _idle += 1
            while not _jobs and not _closed:
                _condition.wait()
            _idle -= 1
            if _closed:
                return
            *_, future, work = heapq.heappop(_jobs)
        _do(work, future)
        del future, work


def _do(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _close() -> None:
    """End the threads at exit: a compilation that outlives the interpreter would crash it."""
    global _closed
    with _condition:
        _closed = True
        for *_, future, _ in _jobs:
            future.cancel()
        _jobs.clear()
        _condition.notify_all()
    with compiler.cancelling():
        for thread in _threads:
            thread.join()
