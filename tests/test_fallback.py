"""Machines that lack something: torch's operator stands in, with one warning for each cause, and explain says why."""

import concurrent.futures
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import gemmconv
from gemmconv import pairs, selection
from gemmconv.algorithms import Config, fallback, fold
from gemmconv.algorithms.fused import Fused
from gemmconv.algorithms.gemm_col2im import GemmCol2im
from gemmconv.device import REFERENCE
from gemmconv.errors import CompileError, KernelError
from gemmconv.geometry import Problem
from gemmconv.kernels import base
from gemmconv.kernels.base import missing_software, why_no_kernels
from gemmconv.kernels.columns import col2im
from gemmconv.ops import left_to_torch
from gemmconv.runtime import available, sources
from tests.samples import REFUSED_ON_A_CPU

GPU = torch.device("cuda", 0)
PROBLEM = Problem(8, 256, 128, 1, (32, 32), (4, 4), stride=(2, 2), padding=(1, 1))
REASON = "the packages must be there, got none; pip install 'them'"
LOG = '6: NVRTC_ERROR_COMPILATION:\n\ndirect/forward.cu(33): error: identifier "nope" is undefined\n  nope x;\n\0'


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """No warning is another test's."""
    monkeypatch.setattr(fallback, "_warned", set())


@pytest.fixture
def gpu_at_hand(monkeypatch):
    """torch finds a Hopper GPU whose driver and NVRTC are whole; `gpu_at_hand.compiler = ...` changes an answer."""
    machine = SimpleNamespace(spec=REFERENCE, compiler=(13, 0), architectures=frozenset({80, 90, 100}), driver=(13, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in (base, selection):
        monkeypatch.setattr(module, "spec_of", lambda device: machine.spec)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(available, "importlib", SimpleNamespace(import_module=lambda name: None))
    monkeypatch.setattr(available, "_versions", lambda: (machine.compiler, machine.architectures, machine.driver))
    missing_software.cache_clear()
    return machine


@pytest.fixture
def lacking(monkeypatch):
    """As if the device of the tensors could run kernels, and the machine lacked something."""
    for module in (fallback, left_to_torch):
        monkeypatch.setattr(module, "missing_software", lambda device: REASON)


def compile_error():
    return CompileError("direct/forward.cu", ["-arch=sm_90a"], LOG, "nope x;")


def does_not_compile(*_):
    raise compile_error()


@pytest.fixture
def said():
    """said(): the messages of all RuntimeWarnings so far."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(one.message) for one in caught if one.category is RuntimeWarning]


# What is missing


UPDATE = "update the driver, or pip install 'gemmconv[cuda12]'"
UPGRADE = "NVRTC must know the device's compute capability 9.0, got NVRTC"


@pytest.mark.parametrize(
    ("compiler", "architecture", "driver", "message"),
    [
        ((13, 0), 90, (13, 0), None),
        ((12, 9), 90, (12, 2), None),
        ((12, 9), 90, (13, 0), None),
        ((13, 0), 90, (12, 4), f"the driver must load what NVRTC 13.0 compiles, got a driver for CUDA 12.4; {UPDATE}"),
        ((12, 4), 70, (13, 0), f"{UPGRADE} 12.4; pip install --upgrade nvidia-cuda-nvrtc-cu12"),
        ((13, 0), 70, (13, 0), f"{UPGRADE} 13.0; pip install --upgrade nvidia-cuda-nvrtc"),
    ],
    ids=str,
)
def test_missing_names_an_old_driver_or_compiler_and_the_way_out(compiler, architecture, driver, message, gpu_at_hand):
    gpu_at_hand.compiler, gpu_at_hand.driver = compiler, driver
    gpu_at_hand.architectures = frozenset({80, architecture})
    assert missing_software(GPU) == why_no_kernels(GPU, REFERENCE) == message


@pytest.mark.parametrize("cuda", ["12.8", "13.0"])
@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'cuda'"),
        ImportError("cannot import name 'FileStreamProgramCache' from 'cuda.core.utils'"),
        OSError("libnvrtc.so.13: cannot open shared object file"),
        RuntimeError('Failure finding "libnvrtc.so.13"\n  listdir("/somewhere")'),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("place", ["import", "versions"])
def test_missing_names_the_extra_that_matches_torch(place, error, cuda, gpu_at_hand, monkeypatch):
    def fail(*_):
        raise error

    if place == "import":
        monkeypatch.setattr(available, "importlib", SimpleNamespace(import_module=fail))
    else:
        monkeypatch.setattr(available, "_versions", fail)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    extra, first = f"gemmconv[cuda{cuda[:2]}]", str(error).splitlines()[0]
    rule = f"the packages of {extra} must be installed and whole"
    assert missing_software(GPU) == f"{rule}, got {type(error).__name__}: {first}; pip install '{extra}'"


def test_missing_says_that_rocm_has_no_kernels(gpu_at_hand, monkeypatch):
    """There a compute capability says nothing."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert missing_software(GPU) == "torch must be built for NVIDIA GPUs, got one for ROCm 6.4.43482"
    spec = replace(REFERENCE, capability=(9, 4))
    assert "ROCm 6.4" in Fused().why_not(Config(PROBLEM, torch.float32, GPU, spec=spec))


def test_missing_names_sources_that_are_not_there(gpu_at_hand, monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / "gemmconv")
    sources.directory.cache_clear()
    try:
        assert missing_software(GPU).endswith("; reinstall gemmconv")
    finally:
        sources.directory.cache_clear()


def test_missing_is_asked_once(gpu_at_hand, monkeypatch):
    calls = []
    monkeypatch.setattr(base, "what_is_missing", lambda capability: calls.append(capability))
    assert [missing_software(GPU), missing_software(GPU)] == [None, None]
    assert calls == [(9, 0)]


@pytest.mark.filterwarnings("error")
def test_missing_imports_the_runtime_in_spite_of_a_filter_that_makes_errors_of_warnings(gpu_at_hand, monkeypatch):
    def deprecated(name):
        warnings.warn("old", DeprecationWarning, stacklevel=1)

    monkeypatch.setattr(available, "importlib", SimpleNamespace(import_module=deprecated))
    assert missing_software(GPU) is None


def test_missing_says_nothing_of_gpus_that_no_kernel_is_for(gpu_at_hand):
    gpu_at_hand.spec, gpu_at_hand.driver = replace(REFERENCE, capability=(7, 5)), (11, 0)
    assert missing_software(GPU) is None
    assert "8.0 or more, got 7.5" in why_no_kernels(GPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is at hand")
def test_missing_asks_nothing_where_no_gpu_is_at_hand(monkeypatch):
    monkeypatch.setattr(base, "what_is_missing", lambda capability: pytest.fail("asked"))
    assert missing_software(GPU) is None
    assert gemmconv.explain(PROBLEM, device="cuda").algorithm == "fused"


def test_versions_are_read_from_the_libraries(monkeypatch):
    pytest.importorskip("cuda.bindings", reason="needs the cuda-bindings package")
    from cuda.bindings import driver, nvrtc

    if not torch.cuda.is_available():
        monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (driver.CUresult.CUDA_SUCCESS, 12040))
    compiler, architectures, version = available._versions()
    assert compiler >= (12, 4)
    assert 90 in architectures
    assert version == (12, 4) or torch.cuda.is_available()
    unknown = nvrtc.nvrtcResult.NVRTC_ERROR_INTERNAL_ERROR
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (unknown, None, None))
    with pytest.raises(RuntimeError, match="NVRTC_ERROR_INTERNAL_ERROR"):
        available._versions()


# The choice


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_explain_says_what_is_missing(capability, dtype, gpu_at_hand):
    gpu_at_hand.spec, gpu_at_hand.driver = replace(REFERENCE, capability=capability), (12, 4)
    for direction in ("forward", "input_grad", "weight_grad"):
        found = gemmconv.explain(PROBLEM, device="cuda", dtype=dtype, direction=direction)
        assert found.algorithm == "native"
        assert found.gradients == ("native", "native")
        assert not found.gradients_turned
        assert not found.config.deterministic  # torch's operator as it is without gemmconv
        for name in ("direct", "fused", "gemm_col2im"):
            assert found.reasons[name] == f"cannot serve it: {missing_software(GPU)}"


@pytest.mark.parametrize("name", ["direct", "fused", "gemm_col2im"])
def test_a_named_algorithm_raises_what_is_missing(name, gpu_at_hand):
    gpu_at_hand.driver = (12, 4)
    with pytest.raises(NotImplementedError) as caught:
        gemmconv.explain(PROBLEM, device="cuda", algorithm=name)
    assert str(caught.value) == f'explain: {name}: {missing_software(GPU)}; or use algorithm="auto"'


def test_auto_refuses_a_precision_that_torch_would_not_keep(gpu_at_hand):
    """In a backward pass too."""
    gpu_at_hand.driver = (12, 4)
    for capability in ((8, 0), (9, 0)):
        spec = replace(REFERENCE, capability=capability)
        config = Config(PROBLEM, torch.float32, GPU, "ieee", torch_precision="tf32", spec=spec)
        with pytest.raises(NotImplementedError, match=r"update the driver.*native: precision follows"):
            pairs.choose_pair(config, config, "auto", "test")


@pytest.mark.parametrize("prepare", [fold.prepare_col2im, fold.prepare_im2col])
def test_fold_takes_torchs_operators_where_kernels_are_missing(prepare, gpu_at_hand):
    gpu_at_hand.driver = (12, 4)
    with pytest.warns(RuntimeWarning, match="update the driver"):
        assert prepare(PROBLEM, torch.float32, GPU).__name__ == "<lambda>"


# Calls; on the CPU, for a layer of few output channels, which there does not go to torch at once


def few_outputs():
    return torch.randn(2, 24, 5, 6, requires_grad=True), torch.randn(24, 1, 3, 3, requires_grad=True)


def assert_as_torch(output, wanted, leaves, tolerance=None, grad_tolerance=None):
    """An output and its gradients are those of another output of the same leaves."""
    torch.testing.assert_close(output, wanted, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(output)
    found, right = (torch.autograd.grad(one, leaves, grad) for one in (output, wanted))
    torch.testing.assert_close(found, right, rtol=tolerance, atol=grad_tolerance)


def check_call(**options):
    tensors = few_outputs()
    output = gemmconv.conv_transpose2d(*tensors, stride=2, **options)
    assert_as_torch(output, F.conv_transpose2d(*tensors, stride=2), tensors)


@pytest.mark.usefixtures("lacking")
def test_calls_warn_once_of_what_is_missing(said):
    for dtype in (torch.float32, torch.float64):
        images, weight = (one.detach().to(dtype) for one in few_outputs())
        for _ in range(2):
            gemmconv.conv_transpose2d(images, weight)
    check_call()
    gemmconv.im2col(images, 3)
    gemmconv.col2im(torch.ones(1, 18, 9), 5, 3)
    with torch.autocast("cpu"):  # through the dispatcher
        gemmconv.conv_transpose2d(images.float(), weight.float())
    assert said() == [f"gemmconv: torch's operator is used, since {REASON}"]


@pytest.mark.usefixtures("lacking")
def test_calls_of_several_threads_warn_once(said):
    images, weight = (one.detach() for one in few_outputs())
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda size: gemmconv.conv_transpose2d(images[..., :size], weight), [1, 2, 3, 4] * 4))
    assert len(said()) == 1


@pytest.mark.usefixtures("lacking")
def test_calls_raise_each_time_where_a_filter_makes_errors_of_warnings():
    images, weight = (one.detach() for one in few_outputs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(RuntimeWarning, match="them"):
                gemmconv.conv_transpose2d(images, weight)
    with pytest.warns(RuntimeWarning, match="them"):
        gemmconv.conv_transpose2d(images, weight)


@pytest.mark.usefixtures("lacking")
@pytest.mark.filterwarnings("error")
def test_named_algorithms_warn_of_nothing_that_they_do_without():
    for name in ("native", "gemm_col2im"):
        check_call(algorithm=name)


@pytest.fixture
def broken(monkeypatch):
    """gemm_col2im comes first for every pass, and no kernel of it compiles. Returns the passes that were prepared."""
    if "gemm_col2im" in REFUSED_ON_A_CPU:
        pytest.skip("it needs the extension in C")
    prepared = []
    plain = selection.preference

    def preference(config, direction="forward"):
        return sorted(plain(config, direction), key=lambda item: item[0].name != "gemm_col2im")

    def prepare(self, config, direction, tile=None):
        prepared.append(direction)
        does_not_compile()

    monkeypatch.setattr(selection, "preference", preference)
    monkeypatch.setattr(GemmCol2im, "prepare", prepare)
    return prepared


def test_calls_take_torchs_operator_where_a_kernel_does_not_compile(broken, said):
    for _ in range(3):
        check_call()
    assert said() == [
        "gemmconv: torch's operator is used, since a kernel did not compile: direct/forward.cu(33): error: identifier "
        '"nope" is undefined; a named algorithm raises all that the compiler printed'
    ]
    assert sorted(broken) in (["forward", "grads"], ["forward", "input_grad"])  # once for each plan


@pytest.mark.parametrize("of", [0, 1], ids=["input", "weight"])
def test_one_gradient_takes_torchs_operator_where_its_kernel_does_not_compile(of, broken):
    tensors = few_outputs()
    tensors[1 - of].requires_grad_(False)
    with pytest.warns(RuntimeWarning, match="did not compile"):
        output = gemmconv.conv_transpose2d(*tensors)
    output.sum().backward()
    (wanted,) = torch.autograd.grad(F.conv_transpose2d(*tensors).sum(), tensors[of])
    torch.testing.assert_close(tensors[of].grad, wanted)
    assert broken == ["forward", ("input_grad", "weight_grad")[of]]


def test_a_named_algorithm_raises_what_does_not_compile(broken):
    images, weight = few_outputs()
    for _ in range(2):
        with pytest.raises(CompileError, match="nope"):
            gemmconv.conv_transpose2d(images, weight, algorithm="gemm_col2im")
    output = gemmconv.conv_transpose2d(images, weight, algorithm="native")
    grads = torch.ops.gemmconv.conv_transpose2d_grads
    with pytest.raises(CompileError, match="nope"):
        grads(output, images, weight, algorithm="gemm_col2im")


@pytest.mark.filterwarnings("error")
def test_a_kernel_that_does_not_compile_is_raised_where_torch_would_round_otherwise(broken, monkeypatch):
    native = selection.ALGORITHMS[-1].__class__
    monkeypatch.setattr(native, "why_not", lambda self, config, direction="forward": "it rounds otherwise")
    with pytest.raises(CompileError, match="nope"):
        gemmconv.conv_transpose2d(*few_outputs())


@pytest.mark.usefixtures("broken")
def test_compiling_a_graph_compiles_no_kernel_and_its_calls_fall_back():
    compiled = torch.compile(gemmconv.conv_transpose2d, backend="aot_eager", fullgraph=True)
    tensors = few_outputs()
    with pytest.warns(RuntimeWarning, match="did not compile"):
        torch.testing.assert_close(compiled(*tensors), F.conv_transpose2d(*tensors))


@pytest.mark.parametrize("prepare", [fold.prepare_col2im, fold.prepare_im2col])
def test_fold_takes_torchs_operators_where_a_kernel_does_not_compile(prepare, monkeypatch):
    launch = pytest.importorskip("gemmconv.runtime.launch", reason="needs the cuda-core package")
    monkeypatch.setattr(launch, "load", does_not_compile)
    monkeypatch.setattr(fold, "_takes_the_kernel", lambda *_: True)
    with pytest.warns(RuntimeWarning, match="did not compile"):
        assert prepare(PROBLEM, torch.float32, GPU).__name__ == "<lambda>"


@pytest.mark.parametrize("direction", ["forward", "input_grad", "weight_grad"])
def test_gemm_col2im_loads_its_kernel_when_it_is_prepared(direction, monkeypatch):
    """Not in the first call, which no fallback guards."""
    launch = pytest.importorskip("gemmconv.runtime.launch", reason="needs the cuda-core package")
    from gemmconv.runtime import cublas

    monkeypatch.setattr(cublas, "library", lambda: None)
    monkeypatch.setattr(launch, "load", does_not_compile)
    with pytest.raises(CompileError):
        GemmCol2im().prepare(Config(PROBLEM, torch.float32, GPU), direction)


def test_a_cublas_that_is_not_there_is_an_error_of_kernels(monkeypatch):
    from gemmconv.runtime import cublas

    cublas.library.cache_clear()
    monkeypatch.setattr(torch, "__file__", "nowhere/torch/__init__.py")
    with pytest.raises(KernelError, match="torch must be linked with cuBLAS as a shared library, got "):
        cublas.library()


def test_a_kernel_that_the_driver_refuses_is_an_error_with_the_way_out(monkeypatch):
    launch = pytest.importorskip("gemmconv.runtime.launch", reason="needs the cuda-core package")

    class Refusing:
        @staticmethod
        def from_cubin(cubin, name):
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU: This indicates something. It may occur.")

    monkeypatch.setattr(launch, "architecture", lambda index: "sm_90a")
    monkeypatch.setattr(launch, "compile", lambda *_, **__: SimpleNamespace(cubin=b""))
    monkeypatch.setattr(launch, "default_cache", lambda: None)
    monkeypatch.setattr(launch, "ObjectCode", Refusing)
    with pytest.raises(KernelError) as caught:
        launch.load("direct/forward.cu", {"REFUSED": 1}, 0)
    rule = "the driver must load what NVRTC compiles for sm_90a"
    way_out = "update the driver, or take the other extra of gemmconv"
    assert str(caught.value) == f"{rule}, got CUDA_ERROR_NO_BINARY_FOR_GPU: This indicates something; {way_out}"
    assert caught.value.cause == f"{rule}, and does not; {way_out}"  # the same for all kernels, so that it is said once
    assert not isinstance(caught.value, CompileError)


def test_kernel_errors_name_their_cause_without_the_log():
    assert compile_error().cause.count("\n") == 0
    assert "\0" not in CompileError("a.cu", (), "nvrtc: error: failed to open libnvrtc-builtins\0", "").cause
    assert CompileError("a.cu", (), "", "").cause.startswith("a kernel did not compile: ;")


# On a GPU


@pytest.fixture
def images_and_weight():
    """A layer that kernels of ours compute, forward and backward, on most GPUs."""
    return [torch.randn(shape, device="cuda", requires_grad=True) for shape in ((2, 96, 33, 40), (96, 3, 8, 8))]


def check_on_gpu(tensors):
    leaves = [*tensors, torch.randn(3, device="cuda", requires_grad=True)]
    output = gemmconv.conv_transpose2d(*leaves, stride=4)
    assert_as_torch(output, F.conv_transpose2d(*leaves, stride=4), leaves, 1e-3, 2e-2)
    torch.testing.assert_close(gemmconv.im2col(tensors[0], 3), F.unfold(tensors[0], 3))
    torch.testing.assert_close(gemmconv.col2im(gemmconv.im2col(tensors[0], 2), (33, 40), 2).shape, tensors[0].shape)


@pytest.mark.gpu
def test_gpu_calls_take_torchs_operator_where_something_is_missing(monkeypatch, images_and_weight, said):
    monkeypatch.setattr(base, "what_is_missing", lambda capability: REASON)
    missing_software.cache_clear()
    for _ in range(2):
        check_on_gpu(images_and_weight)
    with torch.autocast("cuda"):
        gemmconv.conv_transpose2d(*images_and_weight, stride=4).sum().backward()
    assert said() == [f"gemmconv: torch's operator is used, since {REASON}"]
    for name in ("direct", "fused", "gemm_col2im"):
        with pytest.raises(NotImplementedError, match="pip install 'them'"):
            gemmconv.conv_transpose2d(*images_and_weight, algorithm=name)


@pytest.mark.gpu
def test_gpu_lacks_nothing_here():
    assert missing_software(GPU) is None


@pytest.mark.gpu
@pytest.mark.parametrize("trouble", ["compile", "load"])
def test_gpu_calls_take_torchs_operator_where_kernels_fail(trouble, monkeypatch, images_and_weight, said):
    from gemmconv.runtime import launch

    def compile(source_name, macros, arch, **options):
        if trouble == "compile":
            raise compile_error()
        # One that compiles for every GPU, for another than this one, in place of each: so all fail for one reason.
        return compiled("columns/col2im.cu", macros_of_col2im, "sm_80" if arch != "sm_80" else "sm_90a", **options)

    compiled, macros_of_col2im = launch.compile, col2im.col2im_macros(PROBLEM, torch.float32, torch.float32)
    monkeypatch.setattr(launch, "compile", compile)
    launch._kernels.clear()
    try:
        for _ in range(2):
            check_on_gpu(images_and_weight)
        (message,) = said()
        assert ("did not compile" if trouble == "compile" else "update the driver") in message
        with pytest.raises(KernelError):
            gemmconv.conv_transpose2d(*images_and_weight, stride=4, algorithm="direct")
    finally:
        launch._kernels.clear()
