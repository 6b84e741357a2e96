"""Processes and threads for tests. What runs in such a process imports nothing else of the tests."""

import hashlib
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def output_of(code: str, timeout: float = 300, **environment: str) -> str:
    """What code prints in a new process, which has these variables too; it must neither fail nor hang."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def in_threads(*works):
    """Do some work at once, each piece of it in a thread of its own, none of which may hang."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"


def compile_into(folder, kernels, start, results):
    """Wait for the others, compile kernels into one cache, report their digests."""
    from gemmconv.runtime import compiler
    from gemmconv.runtime.cache import KernelCache

    start.wait(timeout=60)
    cache = KernelCache(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cubins = [compiler.compile(*kernel, "sm_90a", cache=cache).cubin for kernel in kernels]
    results.put([hashlib.sha256(cubin).hexdigest() for cubin in cubins])
