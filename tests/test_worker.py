"""Compilations by child processes: the same code, and this process takes over what one fails at."""

import marshal
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gemmconv.errors import CompileError
from gemmconv.runtime import compiler, nvrtc, worker
from tests.test_loading import SMALL

WAIT_SECONDS = 60


@pytest.fixture(autouse=True)
def _busy(monkeypatch):
    """As while this process compiles as much as it does at a time."""
    monkeypatch.setattr(worker, "_here", threading.BoundedSemaphore(0))


@pytest.fixture
def processes(monkeypatch):
    """The child processes that were started."""
    started, start = [], subprocess.Popen.__init__

    def noting(process, *arguments, **options):
        start(process, *arguments, **options)
        started.append(process)

    monkeypatch.setattr(subprocess.Popen, "__init__", noting)
    return started


def compile_small():
    return compiler.compile(*SMALL, "sm_90a")


def test_a_process_compiles_the_same_and_ends(processes, monkeypatch):
    found = compile_small()
    (process,) = processes
    assert process.returncode == 0
    assert not worker._processes
    monkeypatch.setattr(worker, "_here", threading.BoundedSemaphore(1))
    expected = compile_small()
    assert processes == [process]
    assert found.cubin == expected.cubin
    assert re.findall(r"Used \d+ registers", found.log) == re.findall(r"Used \d+ registers", expected.log) != []


def test_what_a_process_cannot_compile_is_an_error_with_its_log(processes):
    with pytest.raises(CompileError, match="no_such_word"):
        compiler.compile(SMALL[0], {**SMALL[1], "struct": "no_such_word"}, "sm_90a")
    assert len(processes) == 1


def test_a_process_that_is_killed_is_done_without(processes, monkeypatch):
    answer = worker._answer

    def kill_first(process, request):
        process.kill()
        return answer(process, request)

    monkeypatch.setattr(worker, "_answer", kill_first)
    assert compile_small().cubin
    assert processes[0].returncode < 0


def test_a_fork_meanwhile_does_not_delay_the_answer(monkeypatch):
    """A child of another thread's fork holds what is written to, of the process's input and output."""
    pipe, held = os.pipe, []

    def pipe_that_is_held():
        ends = pipe()
        if len(held) < 2:
            held.append(os.dup(ends[1]))
        return ends

    monkeypatch.setattr(os, "pipe", pipe_that_is_held)
    with ThreadPoolExecutor(1) as threads:
        compilation = threads.submit(compile_small)
        try:
            assert compilation.result(WAIT_SECONDS).cubin
            assert len(held) == 2
        finally:
            for one in held:
                os.close(one)


@pytest.mark.parametrize("executable", ["", "/usr/bin/python-that-is-not-there", "/usr/bin/uwsgi"])
def test_where_none_can_be_started_this_process_compiles(executable, processes, monkeypatch):
    monkeypatch.setattr(worker.sys, "executable", executable)
    assert compile_small().cubin
    assert not processes


def test_no_more_than_so_many_are_started(processes, monkeypatch):
    monkeypatch.setattr(worker, "_elsewhere", threading.BoundedSemaphore(1))
    with worker._elsewhere:
        assert compile_small().cubin
    assert not processes
    assert compile_small().cubin
    assert len(processes) == 1


def test_cancelling_ends_processes_at_once(monkeypatch):
    begun, answer = threading.Event(), worker._answer

    def answer_once_it_is_killed(process, request):
        begun.set()
        process.wait(WAIT_SECONDS)
        return answer(process, request)

    monkeypatch.setattr(worker, "_answer", answer_once_it_is_killed)
    with ThreadPoolExecutor(1) as threads:
        compilation = threads.submit(compile_small)
        assert begun.wait(WAIT_SECONDS)
        (process,) = worker._processes
        with compiler.cancelling():
            assert isinstance(compilation.exception(WAIT_SECONDS), compiler.CancelledError)
    assert process.returncode < 0


SOURCE = 'extern "C" __global__ void nothing() {}'


@pytest.mark.parametrize(
    ("source", "architecture", "error"),
    [
        (SOURCE, "sm_90a", ""),
        ("wrong", "sm_90a", "NVRTC_ERROR_COMPILATION"),
        (SOURCE, "compute_90", "there is no machine code"),
    ],
)
def test_the_script_answers_a_request(source, architecture, error):
    command = [sys.executable, "-I", "-S", nvrtc.__file__, worker._library()]
    given = marshal.dumps((source, "a.cu", [f"-arch={architecture}".encode()]))
    done = subprocess.run(command, input=given, capture_output=True, timeout=WAIT_SECONDS, check=True)
    result = nvrtc.Result(*marshal.loads(done.stdout))
    assert result.error == error
    assert (result.cubin[:4] == b"\x7fELF") == (not error)
    assert ("a.cu(1)" in result.log) == (source == "wrong")
