"""Devices, seeds, poisoned memory, a kernel cache of their own for the tests, and what is compiled beside them."""

import atexit
import contextlib
import gc
import multiprocessing
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

# Set before gemmconv is imported: the tests neither read nor fill the user's own kernel cache.
if "GEMMCONV_CACHE_DIR" not in os.environ:
    os.environ["GEMMCONV_CACHE_DIR"] = tempfile.mkdtemp(prefix="gemmconv-tests-")
    atexit.register(shutil.rmtree, os.environ["GEMMCONV_CACHE_DIR"], ignore_errors=True)

# Set before numpy is imported: its BLAS threads spin while they wait, on the cores that compile for the emulator.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest
import torch

# Set before CUDA is initialised: a worker of pytest-xdist has one of the GPUs, all of them by turns.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(worker.removeprefix("gw")) % len(visible)]

from gemmconv.device import spec_of
from gemmconv.kernels import search_cache
from gemmconv.kernels.base import missing_software
from gemmconv.ops import autocast, call_cache
from tests import emulator
from tests.samples import DEVICES, REFUSED_ON_A_CPU

search_cache.enabled = False  # tests replace what a choice follows from
torch.set_num_threads(1)  # the tensors are tiny: threads would mostly wait for each other

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


gc.disable()  # until all tests are known: whatever comes with them, stays


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `device` on the CPU and, where there is one, on the GPU."""
    given = [marker.args[0] for marker in metafunc.definition.iter_markers("parametrize")]
    if "device" in metafunc.fixturenames and not any("device" in names for names in given):
        metafunc.parametrize("device", DEVICES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what waits for compilers come last: calls that are compiled ahead, then what is compiled when it is met."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        names = getattr(item, "fixturenames", ())
        return "folder" in names, "calls" not in names

    items.sort(key=place)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Where the extension in C is missing, skip a test whose algorithm, by name, is refused on a CPU for that."""
    try:
        return (yield)
    except Exception as error:
        named = "|".join(REFUSED_ON_A_CPU)
        if named and re.match(rf"\w+: ({named}): it needs the extension in C", str(error)):
            pytest.skip("it needs the extension in C")
        raise


@pytest.fixture(autouse=True)
def _seeds() -> None:
    torch.manual_seed(20)
    np.random.seed(20)


@pytest.fixture(autouse=True)
def _devices_are_asked_anew() -> None:
    """No test's GEMMCONV_CAPABILITY is another's."""
    spec_of.cache_clear()
    missing_software.cache_clear()


@pytest.fixture(autouse=True)
def _no_call_is_cached() -> None:
    """No test meets a call that another has prepared, perhaps by what it replaced."""
    call_cache.entries.clear()


@pytest.fixture(autouse=True)
def _nothing_is_known_of_regions_of_autocast() -> None:
    """Whether regions use casts again decides how often tensors are cast."""
    autocast._regions.clear()


@pytest.fixture
def poison() -> Iterator[Callable[[str], None]]:
    """poison(device), called right before the code under test: memory from torch.empty then holds NaN.

    Without it, an output element that a kernel forgets to write may by chance hold the right value, left
    there by the run before.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()

    def poison_now(device: str) -> None:
        if device == "cuda":
            poison_cuda_cache()
        else:
            # Makes torch.empty fill. Not used on the GPU, where it would change cuDNN's choices too.
            torch.use_deterministic_algorithms(True, warn_only=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
        yield poison_now
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@pytest.fixture(scope="session")
def parametrized(request: pytest.FixtureRequest) -> list[tuple[Any, dict[str, Any]]]:
    """The module and the parameters of each test that is to run and has any."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return [(item.module, item.callspec.params) for item in items]


@pytest.fixture(scope="session", autouse=True)
def compilations(parametrized: list[tuple[Any, dict[str, Any]]]) -> Iterator[dict[tuple[str, str], Future[Any]]]:
    """What tests of a variant and an architecture compile, as futures, from the beginning of the session on.

    In several processes, because threads of one wait for each other; the tests go first.
    """
    wanted = {
        (values["variant"], values["arch"]): module.VARIANTS[values["variant"]]
        for module, values in parametrized
        if {"variant", "arch"} <= values.keys()
    }
    if not wanted:
        yield {}
        return
    pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"), os.nice, (10,))
    yield {key: pool.submit(compile_variant, *variant, key[1]) for key, variant in wanted.items()}
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session", autouse=True)
def prepared(
    parametrized: list[tuple[Any, dict[str, Any]]], request: pytest.FixtureRequest
) -> Iterator[dict[Any, Any]]:
    """The prepared calls of the emulator's runs, whose kernels are compiled from the beginning of the session on.

    So are those with mistakes in them.
    """
    runs = [values["run"] for _, values in parametrized if hasattr(values.get("run"), "prepare")]
    mistakes = [
        module.MISTAKES[values["mistake"]]
        for module, values in parametrized
        if "mistake" in values and hasattr(module, "MISTAKES")
    ]
    if not runs + mistakes or emulator.compiler() is None:
        yield {}
        return
    builder = request.getfixturevalue("builder")
    with emulator.install(builder):
        calls = {run: run.prepare() for run in runs}
    for run, edit, _ in mistakes:
        with contextlib.suppress(Exception), emulator.install(builder, edit):  # the test meets it again
            run.prepare()
    yield calls


def compile_variant(source_name: str, macros: Mapping[str, Any], arch: str) -> Any:
    """Compile in a process of the pool, which looks this name up: unlike the compiler's, no test replaces it."""
    from gemmconv.runtime import compiler

    return compiler.compile(source_name, macros, arch)


@pytest.fixture(scope="session")
def builder(folder: Path) -> Iterator[emulator.Builder]:
    """What compiles for the emulator, each source once."""
    with contextlib.closing(emulator.Builder(folder)) as builder:
        yield builder


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the emulator keeps compiled kernels: from one test session to the next, if pytest may keep anything."""
    cache = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp("emulator") if cache is None else cache.mkdir("emulator")


def poison_cuda_cache() -> None:
    """Fill the free memory of torch's CUDA allocator with NaN."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # What is left are segments that live tensors share with free blocks.
    segments = torch.cuda.memory_snapshot()
    free = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    holes = [torch.full((size // 4,), torch.nan, device="cuda") for size in sorted(free, reverse=True)]
    # The allocator keeps small blocks (512 KiB here) and large ones (16 MiB) apart.
    small = [torch.full((2**17,), torch.nan, device="cuda") for _ in range(32)]
    large = [torch.full((2**22,), torch.nan, device="cuda") for _ in range(6)]
    del holes, small, large
