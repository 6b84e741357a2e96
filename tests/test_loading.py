"""Kernels are compiled once, several at the same time, in threads that end with the interpreter. None is launched."""

import logging
import re
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("cuda.core", reason="compiling needs the cuda-core package")

import gemmconv
from gemmconv.kernels import bind
from gemmconv.kernels.base import strides_of
from gemmconv.kernels.columns import col2im
from gemmconv.kernels.program import Launch, Program
from gemmconv.ops import autograd, call_cache, followers, implementation, recording
from gemmconv.ops.autograd import Backward
from gemmconv.ops.schemas import WithoutData
from gemmconv.runtime import compiler, executor, launch, pool
from gemmconv.runtime.cache import KernelCache
from tests.cases import Case
from tests.processes import ROOT, in_threads
from tests.samples import problem_of

GPU = torch.device("cuda", 0)
PROBLEM = problem_of(Case(1, 2, 3, (4, 5), (3, 3)))
SMALL = "columns/col2im.cu", col2im.col2im_macros(PROBLEM, torch.float32, torch.float32)


class Loader:
    """Stands in for the compiler and the driver: what is compiled, most at the same time, limits that are raised."""

    def __init__(self):
        self.compiled, self.raised, self.cached, self.broken = [], [], set(), set()
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.barrier = None  # that compilations meet at

    def compile(self, source, macros, arch, *, cache=None):
        if source in self.cached:
            return compiler.Compiled(b"")
        with self.lock:
            self.compiled.append(source)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            if self.barrier is not None:
                self.barrier.wait(timeout=10)
            if source in self.broken:
                raise ValueError(source)
        finally:
            with self.lock:
                self.now -= 1
        return compiler.Compiled(b"")


@pytest.fixture
def loader(monkeypatch):
    loader = Loader()

    class Kernel(launch.Kernel):
        def __init__(self, code, name, device_index):
            self.name, self.address, self._device_index = name, 7, device_index
            self._shared_bytes, self._lock = 48 << 10, threading.Lock()

    def allowed(attribute, value, kernel, device):
        loader.raised.append(value)
        return (int(value > 227 << 10) and launch.driver.CUresult.CUDA_ERROR_INVALID_VALUE,)

    for name in ("_kernels", "_compiled", "_locks"):
        monkeypatch.setattr(launch, name, {})
    monkeypatch.setattr(launch, "compile", loader.compile)
    monkeypatch.setattr(launch, "cached", lambda name, *_: compiler.Compiled(b"") if name in loader.cached else None)
    monkeypatch.setattr(launch, "default_cache", lambda: None)
    monkeypatch.setattr(launch, "architecture", lambda index: "sm_90a")
    monkeypatch.setattr(launch, "make_current", lambda index: None)
    monkeypatch.setattr(launch, "ObjectCode", SimpleNamespace(from_cubin=lambda cubin, name: None))
    monkeypatch.setattr(launch, "Kernel", Kernel)
    monkeypatch.setattr(launch.driver, "cuKernelSetAttribute", allowed)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(pool, "cores", lambda: 4)
    yield loader
    while pool._jobs or pool._idle < len(pool._threads):  # what an error left, which would ask the next test's loader
        time.sleep(1e-3)


def program_of(*sources):
    return Program(torch.float32, (), (), tuple(Launch(one, {}, (1, 1, 1), (1, 1, 1), {}) for one in sources))


# Loading


def test_load_of_one_key_by_many_threads_compiles_once(loader):
    found = []
    in_threads(*[lambda: found.append(launch.load("a.cu", {"X": 1, "Y": 2}, 0))] * 8)
    assert loader.compiled == ["a.cu"]
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_load_with_more_shared_memory_raises_the_limit_of_the_same_kernel(loader):
    kernels = [launch.load("a.cu", {}, 0, size << 10) for size in (0, 48, 64, 50, 100, 64)]
    assert loader.compiled == ["a.cu"]
    assert len(set(map(id, kernels))) == 1
    assert loader.raised == [64 << 10, 100 << 10]
    with pytest.raises(launch.KernelError, match="bytes of shared memory refused"):
        launch.load("a.cu", {}, 0, 228 << 10)
    assert launch.load("a.cu", {}, 0, 100 << 10) is kernels[0]


def test_load_compiles_again_what_failed(loader):
    loader.broken.add("a.cu")
    with pytest.raises(ValueError, match=r"a\.cu"):
        launch.load("a.cu", {}, 0)
    loader.broken.clear()
    launch.load("a.cu", {}, 0)
    assert loader.compiled == ["a.cu"] * 2


def test_compilations_and_hits_of_the_cache_are_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, "gemmconv")
    for _ in range(2):
        compiler.compile(*SMALL, "sm_90a", cache=KernelCache(tmp_path))
    assert {(record.name, record.levelno) for record in caplog.records} == {("gemmconv", logging.INFO)}
    record, hit = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"columns/col2im\.cu compiled for sm_90a in .* ms", record)
    assert re.fullmatch(r"columns/col2im\.cu for sm_90a read from the cache in .* ms", hit)
    assert compiler.cached(*SMALL, "sm_90a", KernelCache(tmp_path)) is not None
    assert compiler.cached(*SMALL, "sm_80", KernelCache(tmp_path)) is None


# Programs


def test_program_compiles_its_kernels_at_the_same_time(loader):
    loader.barrier = threading.Barrier(3)
    call = bind.LoadedProgram(program_of("a.cu", "b.cu", "c.cu", "a.cu"), GPU)
    assert loader.most == 3
    assert sorted(loader.compiled) == ["a.cu", "b.cu", "c.cu"]
    assert [kernel.name for kernel in call.kernels] == [launch.kernel_name(f"{one}.cu") for one in "abca"]


def test_program_raises_the_first_error(loader):
    loader.broken |= {"b.cu", "c.cu"}
    with pytest.raises(ValueError, match=r"b\.cu"):
        bind.LoadedProgram(program_of("a.cu", "b.cu", "c.cu"), GPU)


@pytest.mark.parametrize("cached", [["a.cu", "b.cu", "c.cu"], ["a.cu", "c.cu"]])
def test_program_asks_no_thread_where_at_most_one_kernel_is_to_be_compiled(cached, loader, monkeypatch):
    monkeypatch.setattr(pool, "submit", None)
    loader.cached.update(cached)
    for _ in range(2):  # from the cache on disk, and loaded
        bind.LoadedProgram(program_of("a.cu", "b.cu", "c.cu"), GPU)
    assert len(loader.compiled) == 3 - len(cached)


def test_program_waits_for_a_kernel_that_another_thread_compiles(loader):
    """It has its other kernel compiled meanwhile."""
    loader.barrier = threading.Barrier(2)
    first = threading.Thread(target=lambda: launch.load("a.cu", {}, 0))
    first.start()
    while not loader.compiled:
        time.sleep(1e-3)
    bind.LoadedProgram(program_of("a.cu", "b.cu"), GPU)
    first.join(timeout=10)
    assert loader.compiled == ["a.cu", "b.cu"]


# Threads


def test_pool_does_what_is_urgent_first_and_keeps_errors(monkeypatch):
    monkeypatch.setattr(pool, "cores", lambda: max(1, len(pool._threads)))
    go = threading.Event()
    blocked = [pool.submit(go.wait, urgent=True) for _ in range(max(1, len(pool._threads)))]
    while pool._jobs:
        time.sleep(1e-3)
    later = pool.submit(lambda: "done", urgent=False)
    first, second = pool.submit(lambda: 1 // 0, urgent=True), pool.submit(lambda: 1, urgent=True)
    assert [future for *_, future, _ in sorted(pool._jobs)] == [first, second, later]
    assert len(pool._threads) == len(blocked)
    go.set()
    assert isinstance(first.exception(timeout=10), ZeroDivisionError)
    assert later.result(timeout=10) == "done"


def test_pool_threads_do_at_once_what_they_are_asked_to():
    def work():
        inner = pool.submit(threading.current_thread, urgent=False, at_once=True)
        assert inner.done()
        failed = pool.submit(lambda: 1 // 0, urgent=False, at_once=True)
        return inner.result(), threading.current_thread(), type(failed.exception())

    inner, outer, error = pool.submit(work, urgent=False, at_once=True).result(timeout=10)
    assert inner is outer is not threading.current_thread()
    assert error is ZeroDivisionError


# In the background of a forward pass


def without_data(shape, memory_format=torch.contiguous_format):
    """A tensor on a GPU that is not there."""
    return WithoutData.of(shape, strides_of(shape, memory_format), torch.float16, GPU)


@pytest.fixture
def on_gpu(loader, monkeypatch):
    """A layer's tensors on a GPU that is not there, and what is compiled for its backward pass."""
    monkeypatch.setattr(executor, "prepare", lambda *_: executor.Prepared(lambda *_: 0, None))

    def tensors(shape=(2, 64, 16, 16), memory_format=torch.contiguous_format, grads=(1, 1, 1)):
        given = without_data(shape, memory_format), without_data((64, 32, 4, 4), memory_format), without_data((32,))
        return [tensor.requires_grad_(bool(wanted)) for tensor, wanted in zip(given, grads, strict=True)]

    return tensors


OPTIONS = ((2, 2), (1, 1), (0, 0), 1, (1, 1), "auto", None, None)


def wait_for(ahead):
    for _, one in ahead.result(timeout=60):
        one.result(timeout=60)


def compiled_ahead(tensors):
    future = autograd.compile_backward_ahead(tuple(tensors), OPTIONS)
    wait_for(future)
    return future


@pytest.mark.parametrize("grads", [(1, 1, 1), (0, 1, 1), (1, 0, 0), (1, 1, 0)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_backward_pass_compiles_nothing_that_was_not_compiled_ahead(memory_format, grads, on_gpu, loader):
    tensors = on_gpu(memory_format=memory_format, grads=grads)
    compiled_ahead(tensors)
    ahead = Counter(loader.compiled)
    assert ahead
    assert not launch._kernels
    grad = without_data((2, 32, 32, 32), memory_format)
    Backward.of(tuple(tensors), OPTIONS).prepare(grad, *tensors[:2], tuple(map(bool, grads)))
    assert Counter(loader.compiled) == ahead
    assert sum(ahead.values()) == len(launch._kernels)


def test_compiled_ahead_once_for_each_key_and_never_for_the_cpu(on_gpu, loader):
    first = compiled_ahead(on_gpu())
    assert compiled_ahead(on_gpu()) is first
    assert compiled_ahead(on_gpu(grads=(0, 1, 1))) is not first
    cpu = [torch.zeros(shape, requires_grad=True) for shape in ((1, 64, 4, 4), (64, 32, 4, 4), (32,))]
    assert autograd.compile_backward_ahead(tuple(cpu), OPTIONS) is None


def test_errors_and_warnings_of_what_is_compiled_ahead_are_left_to_the_call(on_gpu, loader, recwarn):
    tensors = on_gpu((1, 64, 64, 64))
    options = (*OPTIONS[:5], "gemm_col2im", None, 1)
    future = autograd.compile_backward_ahead(tuple(tensors), options)
    compilations = future.result(timeout=60)
    assert [future.exception(timeout=60) for _, future in compilations] == [None] * len(compilations)
    assert not recwarn
    with pytest.warns(RuntimeWarning, match="workspace_limit"):
        Backward.of(tuple(tensors), options).prepare(without_data((1, 32, 128, 128)), *tensors[:2], (1, 1, 1))
    bad = autograd.compile_backward_ahead(tuple(tensors), ((0, 0), *OPTIONS[1:]))
    assert isinstance(bad.exception(timeout=60), RuntimeError)


def test_recorded_calls_compile_ahead_and_others_do_not(on_gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(recording, "compile_backward_ahead", lambda *call: asked.append(call))
    monkeypatch.setattr(recording, "prepare_call", lambda *_: lambda *_: None)
    tensors = tuple(on_gpu())
    recording.prepare_with_autograd(tensors, OPTIONS)
    assert asked == [(tensors, OPTIONS, None)]
    with torch.no_grad():
        recording.prepare_with_autograd(tensors, OPTIONS)
    recording.prepare_with_autograd(tuple(on_gpu(grads=(0, 0, 0))), OPTIONS)
    recording.prepare_with_autograd(tuple(torch.zeros(one.shape, requires_grad=True) for one in tensors), OPTIONS)
    assert len(asked) == 1


def test_dispatched_calls_compile_ahead_and_fake_tensors_do_not(on_gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(autograd, "compile_backward_ahead", lambda *call: asked.append(call))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    tensors = tuple(on_gpu())
    ctx = SimpleNamespace(needs_input_grad=(True,) * 3, save_for_backward=lambda *_: None)
    with FakeTensorMode():
        fakes = [torch.empty(one.shape, device="cuda") for one in tensors]
        autograd._conv_transpose2d_setup(ctx, (*fakes, *OPTIONS), fakes[0])
    autograd._conv_transpose2d_setup(ctx, (*tensors, *OPTIONS), tensors[0])  # of a class that is not torch's
    assert not asked
    monkeypatch.setattr(autograd, "are_dense", lambda *_: True)
    autograd._conv_transpose2d_setup(ctx, (*tensors, *OPTIONS), tensors[0])
    assert asked == [(tensors, OPTIONS)]


def test_calls_of_followers_compile_nothing_that_the_first_call_has_not_had_compiled(on_gpu, loader, monkeypatch):
    """With a real choice of kernels, and threads that work it out."""
    monkeypatch.setattr(followers, "_unguessed", weakref.WeakValueDictionary())
    sizes = (48, 64, 4, 1), (64, 32, 4, 2, 1), (32, 16, 4, 2, 1), (16, 3, 4, 2, 1)
    model, calls = [gemmconv.ConvTranspose2d(*size, bias=False, dtype=torch.float16) for size in sizes], []
    for layer, extent in zip(model, (1, 4, 8, 16), strict=True):
        input = without_data((16, layer.in_channels, extent, extent)).requires_grad_(extent > 1)
        layer._parameters["weight"] = weight = without_data(layer.weight.shape).requires_grad_()
        arguments = layer.stride, layer.padding, *OPTIONS[2:]
        calls.append(((input, weight, None), arguments))
    followers.compile_followers(model[0]._position, model[0], calls[0][0])
    end = time.monotonic() + 60
    while len(ahead := [one for key, one in call_cache.entries.items() if key[0] == "ahead"]) < 6:
        assert time.monotonic() < end
        time.sleep(1e-2)
    for future in ahead:
        wait_for(future)
    compiled = Counter(loader.compiled)
    assert len(compiled) > 3
    for tensors, arguments in calls[1:]:
        assert autograd.compile_backward_ahead(tensors, arguments) in ahead
        implementation.prepare_call("forward", tensors, None, arguments)
        input, weight, _ = tensors
        grad = without_data((16, weight.shape[1], 2 * input.shape[2], 2 * input.shape[3]))
        Backward.of(tensors, arguments).prepare(grad, input, weight, (True, True, False))
    assert Counter(loader.compiled) == compiled
    assert len(launch._kernels) == sum(compiled.values())


# The end


EXITING = """
import atexit, time
atexit.register(lambda: print(time.monotonic() - ended))  # called after those that are registered later
from gemmconv.runtime import compiler, pool
from tests.test_loading import SMALL
pool.cores = lambda: CORES
for i in range(100):
    pool.submit(lambda i=i: compiler.compile(SMALL[0], {**SMALL[1], "X": i}, "sm_90a"), urgent=False)
time.sleep(WAIT)
ended = time.monotonic()
"""


@pytest.mark.parametrize("cores", [2, 8])  # 8 compile in processes of their own, too
@pytest.mark.parametrize("wait", [0.0, pytest.param(0.1, marks=pytest.mark.slow), 0.4])
def test_interpreter_that_exits_while_it_compiles_neither_hangs_nor_crashes(wait, cores):
    command = [sys.executable, "-c", EXITING.replace("WAIT", str(wait)).replace("CORES", str(cores))]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert float(result.stdout) < 3


def test_cancelled_compilation_is_no_error_of_a_kernel():
    with compiler.cancelling(), pytest.raises(compiler.CancelledError):
        compiler.compile(*SMALL, "sm_90a")
    compiler.compile(*SMALL, "sm_90a")
