"""Compilations by processes of threads' own: the same code, and this process takes over what one fails at."""

import io
import marshal
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gemmconv.errors import CompileError
from gemmconv.runtime import compiler, nvrtc, pool, worker
from tests.test_loading import SMALL

WAIT_SECONDS = 60


@pytest.fixture(autouse=True)
def _busy(monkeypatch):
    """As while this process compiles as much as it does at a time."""
    monkeypatch.setattr(worker, "_here", threading.BoundedSemaphore(0))


def in_a_thread(work):
    """What ``work`` returns in a thread that may have a process."""

    def whole():
        worker.allow()
        try:
            return work()
        finally:
            worker.end()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(whole).result(WAIT_SECONDS)


def compile_small():
    """The result, and the process of this thread."""
    return compiler.compile(*SMALL, "sm_90a"), worker._thread.process


def test_a_process_compiles_the_same_and_lives_on():
    def compile_twice():
        first, process = compile_small()
        assert process in worker._processes
        again, then = compile_small()
        assert then is process
        assert process.poll() is None
        assert again.cubin == first.cubin
        return first, process

    (found, process), expected = in_a_thread(compile_twice), compiler.compile(*SMALL, "sm_90a")
    assert found.cubin == expected.cubin
    assert re.findall(r"Used \d+ registers", found.log) == re.findall(r"Used \d+ registers", expected.log) != []
    assert process.poll() is not None
    assert process not in worker._processes


def test_what_a_process_cannot_compile_is_an_error_with_its_log():
    def fail():
        with pytest.raises(CompileError, match="no_such_word"):
            compiler.compile(SMALL[0], {**SMALL[1], "struct": "no_such_word"}, "sm_90a")
        return worker._thread.process

    assert in_a_thread(fail) is not None


def test_the_main_thread_has_no_process():
    assert compile_small()[1] is None


def test_a_process_that_is_gone_is_done_without_once():
    def kill_and_compile():
        _, process = compile_small()
        process.kill()
        process.wait()
        found, none = compile_small()
        assert process not in worker._processes
        return found, none, compile_small()[1]

    found, none, another = in_a_thread(kill_and_compile)
    assert found.cubin == compiler.compile(*SMALL, "sm_90a").cubin
    assert none is None
    assert another is not None


@pytest.mark.parametrize("executable", ["", "/usr/bin/python-that-is-not-there", "/usr/bin/uwsgi"])
def test_where_none_can_be_started_this_process_compiles(executable, monkeypatch):
    monkeypatch.setattr(worker.sys, "executable", executable)
    found, process = in_a_thread(compile_small)
    assert found.cubin
    assert process is None


def test_no_more_than_so_many_are_started(monkeypatch):
    monkeypatch.setattr(worker, "_elsewhere", threading.BoundedSemaphore(1))
    with worker._elsewhere:
        assert in_a_thread(compile_small)[1] is None
    assert in_a_thread(compile_small)[1] is not None


def test_a_thread_without_work_ends_its_process(monkeypatch):
    monkeypatch.setattr(pool, "_IDLE_SECONDS", 0.05)
    _, process = pool.submit(compile_small, urgent=False).result(WAIT_SECONDS)
    deadline = time.monotonic() + WAIT_SECONDS
    while process in worker._processes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is not None
    assert process not in worker._processes
    assert pool.submit(compile_small, urgent=False).result(WAIT_SECONDS)[0].cubin


def test_cancelling_ends_processes_at_once():
    def cancel():
        _, process = compile_small()
        with compiler.cancelling(), pytest.raises(compiler.CancelledError):
            compile_small()
        return process.wait(WAIT_SECONDS)

    assert in_a_thread(cancel) != 0


def test_the_script_reads_requests_until_there_are_none():
    source = 'extern "C" __global__ void nothing() {}'
    no_code = [b"-arch=compute_90"]
    requests = [(source, "a.cu", [b"-arch=sm_90a"]), ("wrong", "b.cu", [b"-arch=sm_90a"]), (source, "c.cu", no_code)]
    command = [sys.executable, "-I", "-S", nvrtc.__file__, worker._library()]
    given = b"".join(map(marshal.dumps, requests))
    done = subprocess.run(command, input=given, capture_output=True, timeout=WAIT_SECONDS, check=True)
    taken = io.BytesIO(done.stdout)
    good, bad, none = (nvrtc.Result(*marshal.load(taken)) for _ in requests)
    assert not good.error
    assert good.cubin[:4] == b"\x7fELF"
    assert bad.error == "NVRTC_ERROR_COMPILATION"
    assert "b.cu(1)" in bad.log
    assert none.error
