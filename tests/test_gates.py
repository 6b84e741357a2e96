"""The gates of tests/gates: that they see a change, and none where there is none; and that choices are as filed."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the package")

from benchmarks.workloads import SUITES, select
from gemmconv.algorithms import KERNELS
from tests import emulator, samples
from tests.gates import choices, kernels, modes, tiles

SOURCE = """
extern "C" __global__ void __launch_bounds__(THREADS) NAME(float* p) {
    __shared__ float values[THREADS];
    values[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = FACTOR * values[THREADS - 1 - threadIdx.x];
}
"""


def code_of(**macros):
    core = pytest.importorskip("cuda.core", reason="compiling needs the cuda-core package")
    defined = {"NAME": "some_kernel", "THREADS": 32, "FACTOR": "3.0f"} | macros
    options = core.ProgramOptions(arch="sm_90a", define_macro=[(name, str(value)) for name, value in defined.items()])
    try:
        cubin = bytes(core.Program(SOURCE, "c++", options).compile("cubin").code)
    except (RuntimeError, ImportError) as error:  # of whichever CUDA library is not there
        pytest.skip(str(error))
    return sorted(kernels._sections(cubin))


def test_code_is_compared_without_names():
    assert code_of() == code_of(NAME="other_kernel_of_a_longer_name")


@pytest.mark.parametrize("macros", [{"FACTOR": "3.5f"}, {"THREADS": 64}])
def test_code_that_does_other_things_differs(macros):
    assert code_of() != code_of(**macros)


def answers(monkeypatch, before, after):
    """Have two trees hold variants, each ``label: (sources, code)``."""
    trees = {Path("before"): before, Path("after"): after}

    def ask(tree, labels):
        variants = trees[tree]
        return {label: variants[label][labels is not None] for label in (variants if labels is None else labels)}

    monkeypatch.setattr(kernels, "_ask", ask)


def test_changed_new_and_gone_kernels_are_told_from_renamed_ones(monkeypatch):
    before = {"same": ("a", "1"), "text": ("b", "2"), "old_name": ("c", "3"), "code": ("d", "4"), "gone": ("e", "5")}
    after = {"same": ("a", "1"), "text": ("B", "2"), "new_name": ("C", "3"), "code": ("D", "6"), "more": ("F", "7")}
    answers(monkeypatch, before, after)
    assert kernels.compare(Path("before"), Path("after")) == (3, ["code", "more"], ["gone"])


def test_variants_are_what_the_tests_compile():
    listed = kernels._list(kernels.ROOT)
    assert len(listed) == len(kernels._variants()) > 500
    assert len(set(listed.values())) > 500


def row(**values):
    usual = {"workload": "layer", "precision": "tf32", "layout": "nchw", "pass": "forward"}
    return usual | {"algorithm": "fused", "kernels": "a+b", "digest": "0", "estimate_us": "12.5"} | values


def test_choices_that_differ_are_named():
    before = [row(), row(layout="channels_last"), row(precision="fp16")]
    after = [row(estimate_us="12.50001"), row(layout="channels_last", kernels="c", estimate_us="12"), row(workload="x")]
    assert [*choices.differences(before, after)] == [
        "layer tf32 channels_last forward: kernels a+b -> c, estimate_us 12.5 -> 12",
        "layer fp16 nchw forward: gone",
        "x tf32 nchw forward: new",
    ]


def test_choices_are_as_filed():
    """Those of one suite; ``python -m tests.gates.choices`` compares all."""
    workloads = select(["public"])
    names = {workload.name for workload in workloads}
    found = [row for workload in workloads for row in choices.rows_of(workload)]
    assert len(found) == 24 * len(workloads)
    assert [*choices.differences((row for row in choices.read() if row["workload"] in names), found)] == []


def test_branches_are_those_of_the_preprocessor(monkeypatch):
    texts = {
        "a.cu": """
#define DEFERRED_STORES 2
#include "b.cuh"
#if MODE == DEFERRED_STORES && !OFF
#elif MODE > 2 || defined EXTRA
#else
#endif
""",
        "b.cuh": """
#ifndef EXTRA
#if MODE == 1
#include "c.cuh"
#endif
#endif
""",
        "c.cuh": "#ifdef OFF\n#endif\n",
    }
    monkeypatch.setattr("gemmconv.runtime.sources.read", texts.__getitem__)

    def taken(**macros):
        return [*modes.branches("a.cu", macros)]

    assert taken(MODE=2, OFF=0) == ["b.cuh: !defined EXTRA", "a.cu: MODE == DEFERRED_STORES && !OFF"]
    assert taken(MODE=2, OFF=1, EXTRA=1) == ["a.cu: MODE > 2 || defined EXTRA"]
    assert taken(MODE=1, OFF=1) == [
        *("b.cuh: !defined EXTRA", "b.cuh: MODE == 1", "c.cuh: defined OFF"),
        "a.cu: not MODE > 2 || defined EXTRA",
    ]
    assert len([*modes.branches("a.cu", None)]) == 6


@pytest.mark.slow
def test_every_branch_of_a_kernel_is_taken_by_a_layer_or_is_a_fallback():
    assert modes.unused(select(list(SUITES))) == ([], [])


def test_tiles_to_watch_are_of_every_kernel_and_pass():
    found = [(pick.kernel.name, pick.direction) for pick in tiles.picks(1)]
    on_gpus = [one for one in KERNELS.values() if one.name != "native" and one.device_type == "cuda"]
    every = [(one.name, way) for one in on_gpus for way in one.directions]
    assert found == every
    assert [*map(str, tiles.picks(1, 5))] == [*map(str, tiles.picks(1, 5))] != [*map(str, tiles.picks(1))]


@emulator.needs_compiler
def test_a_tile_to_watch_is_checked(builder, monkeypatch):
    pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")
    pick = next(pick for pick in tiles.picks(1) if (pick.kernel.name, pick.direction) == ("gemm_col2im", "forward"))
    with emulator.install(builder):
        tiles.check(pick, "cpu")
        right = samples.expected(pick.case, pick.config.dtype)
        monkeypatch.setattr(samples, "expected", lambda *_: SimpleNamespace(output=1.0 + right.output))
        with pytest.raises(AssertionError, match="relative error"):
            tiles.check(pick, "cpu")
