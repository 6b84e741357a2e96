"""The executor in C: by itself on a driver that is not there, beside the one in Python, and on a GPU."""

import contextlib
import ctypes
import functools
import gc
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from cuda.bindings import driver

import gemmconv
from gemmconv import extension
from gemmconv.algorithms.direct import Direct
from gemmconv.algorithms.gemm_col2im import GemmCol2im
from gemmconv.errors import KernelError
from gemmconv.extension import exchange_of_tensors
from gemmconv.kernels import bind
from gemmconv.kernels.base import Config
from gemmconv.ops import call_cache
from gemmconv.runtime import cublas, executor, launch, tensor_map
from tests import executor_checks, reference, samples
from tests.cases import Case
from tests.processes import ROOT, in_threads
from tests.samples import Sample, arguments_of, assert_same_bits, channels_last, expected, problem_of, sample
from tests.test_kernels import PASSES, RUNS, usual

GPU = torch.device("cuda", 0)  # what is configured for on the CPU
ONE_OF_EACH = {run.operation: run for run in reversed(usual(RUNS)) if run.operation in PASSES}
COMPILER = shutil.which("gcc") or shutil.which("cc")
HEADERS = Path(sysconfig.get_paths()["include"])
needs_compiler = pytest.mark.skipif(
    COMPILER is None or not (HEADERS / "Python.h").exists(), reason="no C compiler (gcc or cc), or no headers of Python"
)

# By itself, on the driver of tests/fake_driver.c


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """checked(name, ...) runs one of tests/executor_checks.py."""
    folder = tmp_path_factory.mktemp("executor")
    common = [COMPILER, "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    of_executor = "csrc/executor.c", "csrc/call.c", "csrc/signature.c"
    for sources, target in ((of_executor, "_extension.so"), (("tests/fake_driver.c",), "libcuda.so.1")):
        sources = [ROOT / source for source in sources]
        command = [*common, f"-I{HEADERS}", *sources, "-o", folder / target, "-ldl", "-lpthread"]
        subprocess.run(command, check=True)

    def check(*arguments):
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.executor_checks", folder, *arguments]
        libraries = os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        where = {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=os.environ | where, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    return check


@needs_compiler
@pytest.mark.parametrize("name", executor_checks.CHECKS)
def test_executor_in_c(name, checked):
    checked(name)


def test_a_variable_says_which_executor_runs(monkeypatch):
    found = extension.extension.__wrapped__
    monkeypatch.setitem(sys.modules, "gemmconv._extension", there := SimpleNamespace())
    for value, wanted in (("", there), ("c", there), ("python", None)):
        monkeypatch.setenv("GEMMCONV_EXECUTOR", value)
        assert found() is wanted
    monkeypatch.setenv("GEMMCONV_EXECUTOR", "cuda")
    with pytest.raises(KernelError, match='GEMMCONV_EXECUTOR must be "c" or "python", got \'cuda\''):
        found()
    monkeypatch.setitem(sys.modules, "gemmconv._extension", None)
    monkeypatch.setenv("GEMMCONV_EXECUTOR", "c")
    with pytest.raises(KernelError, match=r"GEMMCONV_EXECUTOR=c needs the extension, got .*; run `make executor`"):
        found()
    monkeypatch.delenv("GEMMCONV_EXECUTOR")
    assert found() is None


# Beside the one in Python


@pytest.fixture
def programs(monkeypatch):
    """What is prepared runs in Python, and each run of it is kept with what it asks of the driver and of cuBLAS."""
    kept, lines = [], []

    def launched(function, grid, block, shared_bytes, stream, argument, attribute=""):
        params = ctypes.c_void_p.from_address(argument).value
        data = ctypes.string_at(params, int(function) & 0xFFFF).hex()
        lines.append(f"launch {int(function):x} {grid} {block} {shared_bytes} {int(stream):x}{attribute} {data}")
        return (0,)

    def by_config(c, function, argument, extra):
        ((name, value),) = [(one.id, one.value.programmaticStreamSerializationAllowed) for one in c.attrs]
        grid, block = (c.gridDimX, c.gridDimY, c.gridDimZ), (c.blockDimX, c.blockDimY, c.blockDimZ)
        return launched(function, grid, block, c.sharedMemBytes, c.hStream, argument, f" {int(name)}={value}")

    def encoded(kind, rank, address, sizes, strides, box, steps, *how):
        halves = [*map(int, (*box, *steps, *how))]
        words = (a << 16 | b for a, b in zip(halves[::2], halves[1::2], strict=True))
        return 0, SimpleNamespace(opaque=[address, int(kind), rank, *map(int, (*sizes, *strides)), *words])

    def multiplied(*values):
        scalar = ctypes.c_double if values[-2] == 70 else ctypes.c_float
        values = [scalar.from_address(v).value if i in (6, 15) else v for i, v in enumerate(values)]
        formats = dict.fromkeys((0, 7, 11, 16), "x") | {6: "g", 15: "g"}
        lines.append(" ".join(["gemm", *(format(v, formats.get(i, "d")) for i, v in enumerate(values))]))
        return 0

    def cleared(address, value, size, stream):
        lines.append(f"clear {address:x} {value} {size} {int(stream):x}")
        return (0,)

    def kernel_of(step):
        kernel = launch.Kernel.__new__(launch.Kernel)
        kernel.name, kernel._device_index, kernel._current_stream = step.kernel.name, 0, lambda index: 7
        kernel.address = 0x50000 | len(step.params)
        kernel._function = driver.CUfunction(kernel.address)
        return kernel

    def prepare(device, alignments, steps):
        steps = [s._replace(kernel=kernel_of(s)) if isinstance(s, executor.Launch) else s for s in steps]
        run = executor._prepare_in_python(GPU, alignments, steps)

        def run_and_keep(*addresses):
            lines.clear()
            answer = run(*addresses)
            described = tuple(step.described() for step in steps)
            kept.append((tuple(alignments), described, addresses, answer, [*lines]))
            return answer

        return executor.Prepared(run_and_keep, None)

    monkeypatch.setattr(executor, "prepare", prepare)
    monkeypatch.setattr(launch, "load", lambda source, *_: SimpleNamespace(name=launch.kernel_name(source)))
    monkeypatch.setattr(launch, "make_current", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 9)
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda function, *v: launched(function, v[:3], v[3:6], *v[6:9]))
    monkeypatch.setattr(driver, "cuLaunchKernelEx", by_config)
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encoded)
    monkeypatch.setattr(driver, "cuMemsetD8Async", cleared)
    mode = lambda handle, mode: lines.append(f"mode {handle:x} {mode}") or 0  # noqa: E731
    library = SimpleNamespace(cublasGemmStridedBatchedEx=multiplied, cublasSetMathMode=mode)
    monkeypatch.setattr(cublas, "library", lambda: library)
    tensor_map.encode.cache_clear()
    yield kept
    tensor_map.encode.cache_clear()


@needs_compiler
@pytest.mark.parametrize("operation", [*ONE_OF_EACH, "gemm_col2im"])
def test_both_executors_ask_for_the_same(operation, programs, checked, tmp_path):
    calls = []
    if operation == "gemm_col2im":
        case, kinds = Case(2, 3, 4, (5, 6), (3, 3)), ((torch.float64, "ieee"), (torch.float32, "tf32"))
        for dtype, precision in (*kinds, (torch.float16, "ieee")):
            config = Config(problem_of(case), dtype, GPU, precision)
            for direction in ("forward", "input_grad", "weight_grad"):
                calls.append((GemmCol2im().prepare(config, direction), direction, sample(case, dtype, "cpu")))
    else:
        run = ONE_OF_EACH[operation]
        calls.append((run.prepare(), run.direction, sample(run.case, run.dtype, "cpu")))
    for call, direction, data in calls:  # what comes out is what happened to be in memory
        for arrange in (torch.Tensor.contiguous, channels_last):
            arguments = arguments_of(direction, data, arrange)
            call(*arguments)
            if direction == "forward":
                call(*arguments[:2], None)
    assert all(lines for *_, answer, lines in programs if answer == 0)
    (tmp_path / "programs").write_bytes(pickle.dumps(programs))
    checked("python_asks_for_the_same", tmp_path / "programs")


# On a GPU

CASES = {
    "direct": Case(2, 16, 16, (9, 12), (3, 3), (2, 2), (1, 1), groups=16),
    "fused": Case(2, 64, 32, (16, 16), (4, 4), (2, 2), (1, 1)),
    "gemm_col2im": Case(2, 16, 8, (11, 12), (3, 3), (2, 2), (1, 1), (1, 1)),
}
KINDS = {"ieee": (torch.float32, "ieee"), "tf32": (torch.float32, "tf32"), "fp16": (torch.float16, "ieee")}
by_algorithm = pytest.mark.parametrize("algorithm", CASES)


@contextlib.contextmanager
def executed(language):
    """With calls prepared anew, for one executor."""
    with pytest.MonkeyPatch.context() as patch:
        if language == "python":
            patch.setattr(executor, "extension", lambda: None)
        elif os.environ.get("GEMMCONV_EXECUTOR") == "python":
            pytest.skip("GEMMCONV_EXECUTOR asks for Python")
        assert (executor.extension() is not None) == (language == "c"), "run `make executor`"
        call_cache.entries.clear()
        yield


@pytest.fixture
def in_c():
    with executed("c"):
        yield


@pytest.fixture(params=["c", "python"])
def in_both(request):
    with executed(request.param):
        yield request.param


def step(data, algorithm, precision="ieee"):
    """The output and all gradients; on other GPUs than Hopper's some are refused."""
    return samples.step(data, CASES[algorithm], algorithm=algorithm, precision=precision)


def sample_of(algorithm, kind="ieee", device="cuda", arrange=torch.Tensor.contiguous):
    data = sample(CASES[algorithm], KINDS[kind][0], device)
    return Sample(arrange(data.input), arrange(data.weight), data.bias, arrange(data.grad_output))


def needs_exchange():
    if exchange_of_tensors() is None:
        pytest.skip("torch has no exchange of DLPack's, or not this one")


@pytest.mark.gpu
def test_the_extension_is_there():
    assert (extension.extension() is None) == (os.environ.get("GEMMCONV_EXECUTOR") == "python")


@pytest.mark.gpu
def test_zeros_come_first_in_a_thread_that_has_called_nothing_of_cuda(in_both):
    """As in a backward pass's."""
    memory, answers = torch.ones(1024, dtype=torch.uint8, device="cuda"), []
    run, address = executor.prepare(GPU, [1], [executor.Zero((0, 0), 1024)]).run, memory.data_ptr()
    in_threads(lambda: answers.append(run(address)))
    assert answers == [0]
    assert not memory.any()


@pytest.mark.gpu
@by_algorithm
def test_calls_run_in_c(algorithm, in_c, monkeypatch):
    """A forward pass of aligned tensors of the current device takes no other way."""

    def another(*_):
        def refuse(*tensors):
            raise AssertionError("not in C")

        return refuse

    data, case = sample_of(algorithm), CASES[algorithm]
    torch.zeros(1, device="cuda").add_(1)  # this thread has a context
    monkeypatch.setattr(bind, "_of_any", another)
    needs_exchange()
    with torch.no_grad():
        output = gemmconv.conv_transpose2d(
            data.input, data.weight, data.bias, **case.parameters, algorithm=algorithm, precision="ieee"
        )
    reference.assert_close(output, expected(case, torch.float32).output, torch.float32, "ieee")


@pytest.mark.gpu
@by_algorithm
@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_with_the_same_addresses_again_is_replayed(algorithm, kind, in_c):
    """With the same bits, and of whatever lies there then; not products of cuBLAS."""
    needs_exchange()
    data, precision = sample_of(algorithm, kind), KINDS[kind][1]
    before = extension.extension().replays()
    results = [[one.cpu() for one in step(data, algorithm, precision)] for _ in range(6)]
    for result in results[1:]:
        assert_same_bits(result, results[0])
    assert (extension.extension().replays() > before) == (algorithm != "gemm_col2im")
    for one in (data.input, data.weight, data.bias, data.grad_output):
        one.mul_(2)
    output, *grads = (one.cpu() for one in step(data, algorithm, precision))
    assert not torch.equal(output, results[0][0])
    for found, before, times in zip(grads, results[0][1:], (4, 4, 2), strict=True):
        assert torch.equal(found, times * before)


@pytest.mark.gpu
@pytest.mark.parametrize("elsewhere", [False, True], ids=["this thread", "another"])
def test_graphs_may_be_made_and_forgotten_while_another_is_captured(elsewhere, in_c):
    needs_exchange()
    data, graph = sample_of("direct"), torch.cuda.CUDAGraph()
    stream, captured = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()

    def work(times):
        with torch.cuda.stream(stream):
            for _ in range(times):
                results = step(data, "direct")
                if times > 1:
                    results = None  # so that the next ones lie where these did
        return results

    work(6)
    replays = extension.extension().replays
    there = replays()
    assert there > 0
    if elsewhere:
        call_cache.entries.clear()
        work(1)  # compiled, and chosen
        there = replays()
        with torch.cuda.stream(stream):
            spare = [torch.empty(2**19, dtype=torch.uint8, device="cuda") for _ in range(16)]
    torch.cuda.synchronize()
    ones = torch.ones(8, device="cuda")
    with torch.cuda.graph(graph, stream=captured):  # in the mode in which no other thread may call what could spoil it
        twice = ones + 1
        if elsewhere:
            del spare  # for the steps: torch has given back what was free, and allocates nothing while another captures
            with ThreadPoolExecutor(1) as pool:
                pool.submit(work, 6).result()
            assert replays() > there
            there = replays()
        call_cache.entries.clear()
        twice = twice * 2
    assert replays() < there
    graph.replay()
    assert twice.tolist() == [4.0] * 8


@pytest.mark.gpu
@by_algorithm
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arrange", [torch.Tensor.contiguous, channels_last], ids=["nchw", "channels_last"])
def test_both_executors_compute_the_same_bits(algorithm, kind, arrange):
    data, results = sample_of(algorithm, kind, arrange=arrange), {}
    for language in ("c", "python"):
        with executed(language):
            results[language] = [*step(data, algorithm, KINDS[kind][1]), *step(data, algorithm, KINDS[kind][1])]
    assert_same_bits(results["c"], results["python"])


@pytest.mark.gpu
@by_algorithm
def test_threads_run_one_program_on_their_streams(algorithm, in_both):
    data = [sample_of(algorithm) for _ in range(2)]
    data[1].input.neg_()
    wanted = [step(one, algorithm) for one in data]
    torch.cuda.synchronize()
    end, done, wrong = time.monotonic() + 2, [0, 0], []

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            while time.monotonic() < end and not wrong:
                results = step(data[i], algorithm)
                if not all(torch.equal(*pair) for pair in zip(results, wanted[i], strict=True)):
                    wrong.append(i)
                done[i] += 1

    in_threads(*(functools.partial(work, i) for i in range(2)))
    assert not wrong
    assert min(done) > 10


@pytest.mark.gpu
@by_algorithm
def test_programs_run_on_the_current_stream_and_in_graphs(algorithm, in_both):
    data = sample_of(algorithm)
    wanted, stream, late = step(data, algorithm), torch.cuda.Stream(), torch.full_like(data.input, torch.nan)
    other = Sample(late, data.weight, data.bias, data.grad_output)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(data.input)
        results = step(other, algorithm)
    stream.synchronize()
    assert_same_bits(results, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(other, algorithm)
    for _ in range(2):
        late.copy_(torch.randn_like(late))
        graph.replay()
        assert_same_bits(results, step(other, algorithm))


@pytest.mark.gpu
@by_algorithm
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_programs_run_on_a_device_that_is_not_current_and_on_two_at_once(algorithm, in_both):
    data = [sample_of(algorithm, device=f"cuda:{i}") for i in range(2)]
    assert torch.cuda.current_device() == 0
    wanted, there = (step(one, algorithm) for one in data)
    assert torch.cuda.current_device() == 0
    assert_same_bits(there, wanted)
    for _ in range(100):
        results = [step(one, algorithm) for one in data]
    for i in range(2):
        assert_same_bits(results[i], wanted)


@pytest.mark.gpu
@by_algorithm
def test_calls_keep_no_memory(algorithm, in_both):
    data, more = sample_of(algorithm), CASES[algorithm].parameters | {"algorithm": algorithm, "precision": "ieee"}

    def call(times):
        for _ in range(times):
            gemmconv.conv_transpose2d(data.input, data.weight, data.bias, **more)
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated(), executor_checks.resident_bytes()

    allocated, resident = call(2_000)
    allocated_then, resident_then = call(20_000)
    assert allocated_then == allocated
    assert resident_then - resident < 4 << 20


@pytest.mark.gpu
def test_a_launch_that_fails_says_which(in_both):
    """Blocks have 1024 threads at most. What runs next runs."""
    config = Config(problem_of(CASES["direct"]), torch.float32, GPU)
    kernel = Direct().prepare(config, "forward").kernels[0]
    too_many = executor.Launch(kernel, (3, 2, 1), (2048, 1, 1), 0, False, bytes(1024), [], [])
    run, _ = executor.prepare(GPU, [], [too_many])
    shape = r"grid \(3, 2, 1\), block \(2048, 1, 1\), 0 bytes"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{kernel.name}: launch failed with CUDA_ERROR_INVALID_VALUE; {shape}"):
            run()
    step(sample_of("direct"), "direct")
    torch.cuda.synchronize()
