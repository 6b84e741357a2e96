"""The benchmarks: workloads, the gate, resuming, the files, what is made from them; the comparison of algorithms."""

import contextlib
import csv
import functools
import importlib
import io
import itertools
import json
import math
import re
import threading
import time
from dataclasses import asdict, replace
from statistics import fmean

import pytest
import torch

import gemmconv

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the package")

from benchmarks import algorithms, compare, contenders, first_call, measure, plot, report, results, summary, timing
from benchmarks.contenders import PRECISIONS, SEARCHES, Contender, Lanes
from benchmarks.floor import Ceilings, least_bytes, work
from benchmarks.reference import PAGE_BYTES, Tensors, random_tensors
from benchmarks.reference import reference as float64_reference
from benchmarks.results import Results, Row
from benchmarks.timing import Effort, Times
from benchmarks.workloads import DEMO, SUITES, Workload, custom, parse_layer, select, shrunk
from gemmconv import timing as samples_of_time
from gemmconv.algorithms import ALGORITHMS
from gemmconv.algorithms.gemm_col2im import GemmCol2im
from gemmconv.algorithms.native import Native
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config
from tests import reference
from tests.processes import output_of
from tests.samples import REFUSED_ON_A_CPU
from tests.wrong import Wrong, broken, off, one_nan, take_alone, unwritten

CPU = torch.device("cpu")
CEILINGS = Ceilings(0.02, dict.fromkeys(PRECISIONS, 0.1))
TINY = "n2 c4x6 k3x2 h9 w8 s2x1 p1 g2 bias"
BLINK = Effort(target_ms=0.05, least=3, most=3)


def plan(device=CPU, **changes):
    ours = [*contenders.torch_contenders(device), *contenders.gemmconv_contenders(("nchw", "channels_last"))]
    what = {"device": device, "precisions": ("fp32",), "directions": measure.DIRECTIONS, "contenders": ours}
    return measure.Plan(**{**what, "ceilings": CEILINGS, "effort": BLINK, **changes})


def thrice(row):
    """Three looks at each row, more where they differ."""
    return 3 * row.times_as_many


def rows_of(layer=TINY, **changes):
    return results.with_ratios(measure.rows_of(custom(layer), plan(**changes), Lanes()), [ABOUT])


def looks_of(*contenders, layer=TINY, looks=thrice, lanes=1, **changes):
    """Rows of forward passes, by default of torch's in NCHW, one for each look at them."""
    own = {"directions": ("forward",), "contenders": contenders or [Contender("torch_nchw")], "looks": looks}
    return list(measure.rows_of(custom(layer), plan(**own | changes), Lanes(lanes)))


def timed(monkeypatch, medians):
    """Runs are not timed but have these medians; returns the thread of each and the estimate that it is told."""
    threads, estimates, medians = [], [], iter(medians)

    def time_run(run, device, effort, estimate_ms=None):
        run()
        threads.append(threading.get_ident())
        estimates.append(estimate_ms)
        median = next(medians)
        return Times(median, median, median, 3)

    monkeypatch.setattr(measure, "time_run", time_run)
    return threads, estimates


# Workloads.


def test_parse_layer_reads_every_part_and_has_defaults():
    problem = Problem(64, 64, 128, 4, (128, 256), (3, 5), (2, 3), (1, 1), (1, 0), (2, 1))
    assert parse_layer("n64 c64x128 k3x5 h128 w256 s2x3 p1 d2x1 g4 op1x0 bias") == (problem, True)
    assert parse_layer("c8 k3 h4 w5") == (Problem(1, 8, 8, 1, (4, 5), (3, 3)), False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("c8 k3 h4", "w missing"),
        ("c8 k3 h4 w5 q2", "unknown part 'q2'"),
        ("c8 k3 h4 w5 s2x", "unknown part 's2x'"),
        ("c8 k3 h4 w5 s2 s1", "'s' is given twice"),
        ("c8 k3 h4x4 w5", "'h' takes one number"),
        ("c8x9 k3 h4 w5 g2", "divisible by g"),
        ("c8 k3 h4 w5 p9", "padding must"),
        ("n0 c8 k3 h4 w5", "at least 1"),
    ],
)
def test_parse_layer_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        parse_layer(text)


def test_suites_are_filled_and_valid():
    everything = [workload for suite in SUITES.values() for workload in suite]
    assert [*SUITES] == ["seeds", "public", "models", "sweep", "latency"]
    assert min(map(len, SUITES.values())) > 3
    assert len({workload.name for workload in everything}) == len(everything)
    for workload in everything:
        assert min(workload.problem.output_size) > 0
        assert parse_layer(workload.layer) == (workload.problem, workload.bias)


def test_shrunk_says_what_it_did_and_ends_when_nothing_can_get_smaller():
    notes = [shrunk(custom(text), 600_000_000, 128 << 20).note for text in DEMO.values()]
    one, other = "batch 64 -> 1, image 128x256 -> 32x64", "batch 8 -> 1, image 512x512 -> 32x64"
    assert notes == [one, one, other, *["batch 16 -> 1"] * 2]
    assert shrunk(custom(TINY), 10**9, 1 << 30) == custom(TINY)
    problem = shrunk(custom(TINY), 0, 0).problem
    assert problem.batch == 1
    assert min(problem.output_size) >= 1


def test_work_and_bytes_of_the_passes():
    problem, _ = parse_layer("n2 c3x5 k2 h4 w6 s2")
    x, weight, y = 2 * 3 * 24, 3 * 5 * 4, 2 * 5 * 8 * 12
    assert least_bytes(problem, 4, "forward", True) == 4 * (x + weight + y + 5)
    assert least_bytes(problem, 4, "backward", True) == 4 * (2 * x + 2 * weight + y + 5)
    assert work(problem, "backward") == 2 * work(problem, "forward")
    assert Ceilings(1.0, {"fp32": 1.0}).floor_ms(problem, "fp32", "forward", False) == pytest.approx(
        max(problem.useful_flops, 4 * (x + weight + y)) / 1e9
    )


# The float64 reference.

HARD = [
    "n3 c4x6 k3x2 h5 w7 s2x3 p1x0 d2x1 g2 op1x2 bias",
    "n1 c6x6 k2 h3 w4 s3 g6",
    "n2 c3x1 k5x1 h4 w6 p3x0",
    "n2 c2x3 k1 h3 w3 s1 d3 op2",
    "n1 c3x2 k3 h36 w5 s1 p1",
]


@pytest.mark.parametrize("layer", HARD)
def test_reference_agrees_with_the_tests_own(layer):
    workload = custom(layer)
    p, tensors = workload.problem, random_tensors(workload, CPU)
    found = float64_reference(p, tensors).results
    x, w, g = (reference.to_array(t.double()) for t in (tensors.x, tensors.weight, tensors.grad_output))
    b = None if tensors.bias is None else reference.to_array(tensors.bias.double())
    grad = {"stride": p.stride, "padding": p.padding, "groups": p.groups, "dilation": p.dilation}
    forward = {**grad, "output_padding": p.output_padding}
    exact = {"output": reference.forward(x, w, b, **forward), "input": reference.input_grad(g, w, p.input_size, **grad)}
    exact |= {"weight": reference.weight_grad(g, x, p.kernel_size, **grad)}
    exact |= {} if b is None else {"bias": reference.bias_grad(g)}
    assert exact.keys() == found.keys()
    assert max(reference.relative_error(found[name], one) for name, one in exact.items()) < 1e-14


def test_reference_keeps_the_last_image_when_memory_is_short(monkeypatch):
    monkeypatch.setattr("benchmarks.reference._limits", lambda device: (256 << 20, 8 * 3 * 6 * 19 * 8))
    workload = custom("n9 c4x6 k3x2 h9 w8 s2x1")
    tensors = random_tensors(workload, CPU)
    kept = float64_reference(workload.problem, tensors)
    assert kept.images[-1] == 8
    assert 1 < len(kept.images) < 9
    output = torch.nn.functional.conv_transpose2d(tensors.x, tensors.weight, stride=(2, 1))
    assert kept.errors({"output": output})["output"] < 1e-6
    output[8] = 0
    assert kept.errors({"output": output})["output"] > 0.1


def test_reference_errors_of_damaged_results():
    workload = custom(TINY)
    kept = float64_reference(workload.problem, random_tensors(workload, CPU))
    output = kept.results["output"].clone()
    assert kept.errors({"output": output}) == {"output": 0.0}
    output[0, 0, 0, 0] = math.nan
    assert math.isnan(kept.errors({"output": output})["output"])
    assert kept.errors({"output": output[:1], "weight": kept.results["weight"][:1]}) == dict.fromkeys(
        ("output", "weight"), math.inf
    )


# Rows.


def test_rows_have_errors_times_and_ratios():
    rows = rows_of()
    assert {row.algorithm for row in rows} >= {"torch_nchw", "torch_unfused", "gemm_col2im", "native", "auto"}
    assert {row.layout for row in rows} == {"nchw", "channels_last"}
    assert {row.direction for row in rows} == {"forward", "backward"}
    for row in rows:
        if row.algorithm in REFUSED_ON_A_CPU:
            assert row.status == "refused"
            assert row.reason.startswith("it needs the extension in C")
            continue
        assert row.status == "ok", row
        assert 0 < row.error <= min(row.bar, 1e-5)
        assert row.p20_ms <= row.median_ms <= row.p80_ms
        assert row.repeats >= 3
        assert row.speedup_default > 0
        assert row.speedup_best <= row.speedup_default
        assert row.floor_ratio == pytest.approx(row.median_ms / row.floor_ms)
        assert bool(row.took) == (row.algorithm == "auto")
        assert bool(row.kernels) == (not row.algorithm.startswith("torch")), row
        errors = [row.error_output, row.error_input, row.error_weight, row.error_bias]
        is_forward = row.direction == "forward"
        assert [error is not None for error in errors] == [is_forward, *[not is_forward] * 3]


@pytest.mark.parametrize(("apart", "looks"), [(0.01, 3), (0.03, 6), (0.06, 18)])
def test_looks_go_on_where_they_differ_and_their_mean_counts(apart, looks, monkeypatch):
    """Rows come again, those of cudnn.benchmark from threads that search."""
    differing = itertools.cycle([2.0, 2.0 * (1 + apart)])
    agreeing = [3.0, 3.02, 2.98]
    expected = list(itertools.islice(differing, looks))
    times = [*itertools.chain(*zip(agreeing, expected, strict=False)), *expected[3:], 5.0]
    threads, known = timed(monkeypatch, times)
    rows = looks_of(Contender("torch_nchw"), Contender("searched", benchmark=True))
    agree = [row for row in rows if row.algorithm == "torch_nchw"]
    differ = [row for row in rows if row.algorithm == "searched"]
    assert [row.median_ms for row in agree] == pytest.approx([3.0, 3.01, 3.0])
    assert [row.median_ms for row in differ] == pytest.approx([fmean(expected[: i + 1]) for i in range(looks)])
    for found in (agree, differ):
        assert [row.looks for row in found] == list(range(1, len(found) + 1))
        assert [row.repeats for row in found] == [3 * row.looks for row in found]
    assert (agree[-1].fastest_ms, agree[-1].slowest_ms) == (2.98, 3.02)
    assert (differ[-1].fastest_ms, differ[-1].slowest_ms) == (2.0, pytest.approx(2.0 * (1 + apart)))
    assert known[:4] == [None, None, 3.0, 2.0]
    own = threads[1]
    assert [thread == own for thread in threads] == [*[False, True] * 3, *[True] * (looks - 3)]
    assert [row.median_ms for row in looks_of(looks=measure.once)] == [5.0]


def test_looks_come_once_all_element_types_were_measured(monkeypatch):
    monkeypatch.setattr(measure._Bench, "look_again", lambda self, row, contender: replace(row, looks=row.looks + 1))
    precisions = ["fp32", "fp16", "bf16"]
    rows = looks_of(precisions=precisions)
    assert [(row.precision, row.looks) for row in rows] == [(one, look) for look in (1, 2, 3) for one in precisions]


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)], ids=str)
def test_each_look_has_the_same_data_at_places_of_its_own(device, monkeypatch):
    """Places in pages, and relative to each other, decide how fast some kernels are."""
    seen, placed = [], Tensors.placed

    def recorded(tensors, step_bytes):
        found = placed(tensors, step_bytes)
        for steps, name in enumerate(("x", "weight", "grad_output", "bias"), 1):
            one, copy = getattr(tensors, name), getattr(found, name)
            assert torch.equal(one, copy)
            assert one.stride() == copy.stride()
            assert copy.data_ptr() % PAGE_BYTES == steps * step_bytes % PAGE_BYTES
        seen.append((step_bytes, tensors.x))
        return found

    monkeypatch.setattr(Tensors, "placed", recorded)
    monkeypatch.setattr(results, "_MORE_LOOKS", ())
    both = Contender("torch_nchw"), Contender("torch_channels_last", layout="channels_last")
    rows = looks_of(*both, layer="n8 c64x64 k4 h32 w32 s2 p1 bias", device=device)
    assert [row.status for row in rows] == ["ok"] * 6
    steps = [look * measure._STEP_BYTES for look in range(3)]
    assert [step for step, _ in seen] == [step for step in steps for _ in both]
    assert all(torch.equal(x, seen[0][1]) for _, x in seen)
    assert seen[0][1].stride() != seen[1][1].stride()
    looks = range(SEARCHES)  # no two have the same places
    assert all(len({i * look * measure._STEP_BYTES % PAGE_BYTES for look in looks}) == SEARCHES for i in (1, 2, 3, 4))


@pytest.mark.parametrize("trouble", [OSError("lost"), torch.OutOfMemoryError("full")])
def test_a_look_that_fails_takes_the_times_away_but_not_one_without_memory(trouble, monkeypatch):
    run_of = measure._Bench._run

    def first_alone(bench, contender, direction):
        if bench._look:
            raise trouble
        return run_of(bench, contender, direction)

    monkeypatch.setattr(measure._Bench, "_run", first_alone)
    first, *_, last = looks_of()
    if isinstance(trouble, OSError):
        nothing = dict.fromkeys(("median_ms", "p20_ms", "p80_ms", "fastest_ms", "slowest_ms", "repeats"))
        assert last == replace(first, status="failed", reason="OSError: lost", **nothing)
    else:
        assert last == replace(first, looks=3, reason="a look ran out of memory; a look ran out of memory")


def searched_rows(monkeypatch, medians, search_ms=200.0, wrong=(), failing=(), **changes):
    """Rows of a setting that searches, of which each look has a median of its own; and the thread of each."""
    threads, _ = timed(monkeypatch, medians)

    def first_call(bench, run):
        results = run()
        if bench._look in wrong:
            results["output"] *= 2
        if bench._look in failing:
            raise RuntimeError("FIND was unable to find an engine\nand more")
        return results, search_ms

    monkeypatch.setattr(measure._Bench, "_first_call", first_call)
    searched = Contender("torch_nchw_benchmark", benchmark=True)
    return looks_of(searched, looks=measure.looks_at, lanes=SEARCHES, **changes), threads


@pytest.mark.parametrize(
    ("fast", "ms", "search_ms", "looks", "searches"),
    [
        *[(0, 0.5, 0.1, 8, 8), (0, 0.5, 90.0, 4, 4), (0, 0.5, 600.0, 2, 2)],
        *[(1, 0.5, 0.1, 48, 48), (1, 0.5, 600.0, 6, 6), (1, 0.5, 3000.0, 2, 2), (0, 6.0, 200.0, 2, 1)],
    ],
)
def test_each_look_at_short_calls_searches_anew_and_the_mean_counts(fast, ms, search_ms, looks, searches, monkeypatch):
    """What a search finds is chance: the mean of more tells more of one that seldom finds the fastest."""
    medians = [0.4] * fast + [ms] * (looks - fast)
    rows, threads = searched_rows(monkeypatch, medians, search_ms)
    assert [row.looks for row in rows] == list(range(1, looks + 1))
    assert rows[-1].median_ms == pytest.approx(fmean(medians))
    assert rows[-1].fastest_ms == min(medians)
    assert (len(set(threads)), len(threads)) == (searches, looks)


def test_algorithms_far_from_the_floor_are_looked_at_once():
    row = row_of(algorithm="direct", median_ms=5, floor_ms=0.4)
    short = replace(row, median_ms=0.9, floor_ms=0.01)
    others = replace(row, floor_ms=0.6), replace(row, algorithm="torch_nchw"), replace(row, floor_ms=None), short
    assert [measure.looks_at(one) for one in (row, *others)] == [1, 2, 2, 2, 3]


@pytest.mark.parametrize(
    ("trouble", "repeats", "reason"),
    [
        ({"wrong": {2}}, [3, 6, 6], "wrong: output: error 1.0e+00 is over"),
        ({"failing": {1}}, [3, 3, 6], "failed: RuntimeError: FIND was unable to find an engine"),
    ],
    ids=["wrong", "failing"],
)
def test_a_search_that_is_wrong_or_fails_does_not_count(trouble, repeats, reason, monkeypatch):
    rows, _ = searched_rows(monkeypatch, [0.5, 0.5], **trouble)
    assert [(row.looks, row.status) for row in rows] == [(1, "ok"), (2, "ok"), (3, "ok")]
    assert [row.repeats for row in rows] == repeats
    assert rows[-1].median_ms == 0.5
    assert rows[-1].reason.startswith(f"another search: {reason}")
    assert "\n" not in rows[-1].reason


def test_looks_go_on_with_what_was_searched_for_before(monkeypatch):
    rows, _ = searched_rows(monkeypatch, [0.5] * 3)
    again, _ = searched_rows(monkeypatch, [0.6] * 16, done={rows[1].key: rows[1]}.get)
    assert [row.looks for row in again] == list(range(3, 19))
    again, _ = searched_rows(monkeypatch, [0.5] * 2, wrong={1}, done={rows[0].key: rows[0]}.get)
    assert [row.looks for row in again] == [2, 3]
    assert all(row.reason.startswith("another search: wrong") for row in again)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_rows_in_16_bits(precision):
    one = [Contender("torch_nchw"), Contender("gemm_col2im", kind="gemmconv")]
    for row in rows_of("n1 c3x4 k2 h5 w6 s2", precisions=(precision,), contenders=one):
        assert row.status == "ok", row
        assert 1e-5 < row.error <= row.bar


@pytest.mark.parametrize("layer", [TINY, "n1 c3x4 k2 h5 w6 s2"])
def test_gradients_without_autograd_are_those_of_autograd(layer):
    workload = custom(layer)
    tensors = random_tensors(workload, CPU)
    kept = float64_reference(workload.problem, tensors)
    every = [*contenders.TORCH, *contenders.gemmconv_contenders(("nchw",))]
    for contender in (one for one in every if not one.unfused and one.name not in REFUSED_ON_A_CPU):
        found = contender.gradients(workload.problem)(tensors)
        errors = kept.errors(dict(zip(("input", "weight", "bias"), found, strict=False)))
        assert len(errors) == 2 + workload.bias
        assert max(errors.values()) < 1e-6, contender


@pytest.fixture
def algorithm(monkeypatch):
    """algorithm(fake): the only algorithm there is."""
    return functools.partial(take_alone, monkeypatch)


@pytest.mark.parametrize("damage", [off, unwritten, one_nan])
@pytest.mark.parametrize("direction", ["forward", "input_grad", "weight_grad"])
def test_wrong_result_is_red_and_has_no_time(algorithm, direction, damage):
    algorithm(Wrong(direction, damage))
    red = "forward" if direction == "forward" else "backward"
    rows = [row for row in rows_of() if not row.is_torch]
    assert {row.algorithm for row in rows} == {"native", "auto"}
    for row in rows:
        if row.direction == red:
            assert row.status == "wrong"
            assert row.median_ms is row.p20_ms is row.p80_ms is row.speedup_default is row.floor_ratio is None
            assert "is over" in row.reason
        else:
            assert row.status == "ok"
            assert row.median_ms > 0
    assert any(line.startswith("wrong: ") for line in summary.troubles(rows))


def test_raising_algorithm_does_not_end_the_run(algorithm):
    algorithm(Wrong("weight_grad", broken))
    rows = rows_of()
    failed = [row for row in rows if row.status == "failed"]
    assert {(row.algorithm, row.direction) for row in failed} == {("native", "backward"), ("auto", "backward")}
    assert {row.reason for row in failed} == {"ArithmeticError: first line"}
    assert all(row.median_ms is None for row in failed)
    assert len(rows) == len(measure.expected_keys(custom(TINY), plan()))


def test_refusing_algorithm_has_a_row_with_its_reason(algorithm, monkeypatch):
    fake = Native()
    monkeypatch.setattr(fake, "why_not", lambda config: "C_in must be even, got 4", raising=False)
    algorithm(fake)
    rows = {row.algorithm: row for row in rows_of(directions=("forward",)) if row.layout == "nchw"}
    assert rows["native"].status == rows["auto"].status == "refused"
    assert rows["native"].reason == "C_in must be even, got 4"
    assert rows["torch_nchw"].status == "ok"
    assert summary.troubles(rows.values())[-1].startswith("refused 1x: native: C_in must be even")


def test_unfused_is_refused_where_its_columns_are_huge():
    problem, _ = parse_layer("n64 c64x128 k3x5 h128 w256")
    unfused = Contender("torch_unfused", unfused=True)
    assert unfused.why_not(problem, "fp32", CPU, "forward") is None
    assert "columns take" in unfused.why_not(problem, "fp32", CPU, "backward")


def test_bars_follow_torch_where_it_loses_more():
    assert measure.bar_of("output", "fp32", {}) == 1e-6
    assert measure.bar_of("output", "fp32", {"output": 3e-6}) == 6e-6
    assert measure.bar_of("output", "bf16", {"output": 1.0}) == 5e-3
    assert measure.bar_of("weight", "bf16", {"weight": 1e-2}) == 2e-2
    assert measure.bar_of("weight", "bf16", {"weight": math.nan}) == 5e-3


def test_torch_settings_come_back():
    def state():
        cudnn = torch.backends.cudnn
        precisions = cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision
        return *precisions, cudnn.benchmark, cudnn.deterministic

    before = state()
    for precision, rounding in (("fp32", "ieee"), ("tf32", "tf32")):
        with contextlib.suppress(KeyError), contenders.torch_settings(precision, benchmark=True, deterministic=True):
            assert state() == (rounding, rounding, True, True)
            raise KeyError
        assert state() == before


@pytest.fixture
def rounds(monkeypatch):
    """The calls that time rounds of samples on a GPU: how many, after which rests. Each sample is 1 ms less."""
    calls = []

    def cuda_rounds(runs, device, count, estimates_ms=()):
        calls.append((count, [*estimates_ms]))
        return [[3.0 - i for i in range(count)] for _ in runs]

    monkeypatch.setattr(timing, "cuda_rounds", cuda_rounds)
    return calls


@pytest.mark.parametrize(("estimate_ms", "expected"), [(None, [(1, []), (5, [3.0])]), (2.5, [(5, [2.5])])])
def test_a_device_rests_as_long_as_a_run_takes(estimate_ms, expected, rounds):
    found = timing.time_run(lambda: None, torch.device("cuda"), Effort(), estimate_ms)
    assert rounds == expected
    assert found.count == rounds[-1][0]
    rounds.clear()
    assert timing.medians_ms([lambda: None] * 2, torch.device("cuda")) == [-21.5] * 2
    assert rounds == [(3, []), (50, [1.0, 1.0])]


@pytest.mark.parametrize(("milliseconds", "rounds"), [(1, 50), (110, 9), (350, 5), (510, 3), (3000, 3)])
def test_rounds_on_a_cpu_are_by_turns_and_bounded(monkeypatch, milliseconds, rounds):
    now, turns = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def run(name, share):
        turns.append(name)
        now[0] += share * milliseconds * 1e-3

    runs = functools.partial(run, "fast", 0.25), functools.partial(run, "slow", 0.75)
    assert timing.medians_ms(runs, CPU) == pytest.approx([0.25 * milliseconds, 0.75 * milliseconds])
    assert turns == ["fast", "slow"] * (1 + rounds)  # the first is not counted
    assert timing.medians_ms([], CPU) == []


@pytest.mark.gpu
def test_a_gpu_rests_as_long_as_a_run_takes_and_waits_for_the_host(monkeypatch):
    """Else it reaches its power limit and slows down, sooner or later. It waits for no first run."""
    waits, a_ms = [], 1e-3 * samples_of_time._CYCLES_A_SECOND
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append)

    def rests(runs, count, *estimates_ms):
        waits.clear()
        samples_of_time.cuda_rounds(runs, torch.device("cuda", torch.cuda.current_device()), count, estimates_ms)
        return [round(cycles / a_ms, 3) for cycles in waits]

    short = rests([lambda: None] * 3, 1)
    assert len(short) == 6  # a round that counts, after one that does not
    assert rests([lambda: None] * 3, 1, 3.0, 50.0, 0.01) == [3.0, 10.0, short[0]] * 2
    first, second, third = rests([lambda: time.sleep(0.01)], 2)
    assert (first, second) == (short[0], samples_of_time._SECOND_HEAD_START_CYCLES / a_ms)
    assert third >= 10 * samples_of_time._HOST_MARGIN


def test_auto_says_what_it_took_and_which_gradients_are_turned():
    for workload in select(SUITES, ["pose1", "unet1"]):
        for bias in (False, True):
            call = workload.problem, "fp16", torch.device("cuda", 0), "forward", bias
            found = Contender("auto", "channels_last", "gemmconv").choices(*call)
            assert found["took"] == "fused"
            assert found["workspace_bytes"] is not None  # of the same choice
            assert found["kernels"].startswith("sm90/")
    (upsampling,) = select(SUITES, ["pointpillars3"])
    call = upsampling.problem, "fp16", torch.device("cuda", 0)
    nchw, last = (Contender("auto", kind="gemmconv", layout=layout) for layout in ("nchw", "channels_last"))
    assert nchw.choices(*call, "backward")["took"] == f"{last.choices(*call, 'backward')['took']} turned"
    assert not nchw.choices(*call, "forward")["took"].endswith("turned")


@pytest.mark.gpu
def test_rows_on_the_gpu():
    """Every precision, contender and mode, on a layer small enough for graphs."""
    device = torch.device("cuda", torch.cuda.current_device())
    one = plan(device, precisions=tuple(PRECISIONS))
    rows = results.with_ratios(measure.rows_of(custom("n2 c16x32 k4 h16 w16 s2 p1 bias"), one, Lanes()), [ABOUT])
    assert {row.mode for row in rows} == {"eager", "graph"}
    bad = [(row.key, row.reason) for row in rows if row.status != "ok"]
    assert not bad
    assert all(row.median_ms > 0 and row.speedup_best > 0 for row in rows)
    assert all(row.peak_bytes is not None for row in rows if row.mode == "eager")


@pytest.mark.gpu
def test_graphs_are_captured_anew_for_each_look(monkeypatch):
    captures, captured = [], measure.captured
    monkeypatch.setattr(measure, "captured", lambda run: [captures.append(run), captured(run)][1])
    device = torch.device("cuda", torch.cuda.current_device())
    contenders = [Contender("torch_nchw"), Contender("direct", kind="gemmconv")]
    one = plan(device, contenders=contenders, directions=("forward", "backward"), looks=thrice)
    rows = {row.key: row for row in measure.rows_of(custom("n2 c16x32 k4 h16 w16 s2 p1 bias"), one, Lanes())}
    assert {row.mode for row in rows.values()} == {"eager", "graph"}
    for row in rows.values():
        assert row.status == "ok"
        assert 3 <= row.looks <= 18
        assert row.fastest_ms <= row.median_ms <= row.slowest_ms
    assert len(captures) == sum(row.looks for row in rows.values() if row.mode == "graph")


# Files.


def row_of(**changes):
    values = {"suite": "public", "workload": "kb57", "layer": "n1 c8x8 k3 h4 w5", "precision": "tf32"}
    values |= {"layout": "nchw", "direction": "forward", "mode": "eager", "algorithm": "auto"}
    values |= {"median_ms": 1.0, "p20_ms": 0.99, "p80_ms": 1.01, "repeats": 9, "floor_ms": 0.5, "took": "native"}
    values |= changes
    return Row(**{"fastest_ms": values["median_ms"], "slowest_ms": values["median_ms"], **values})


def around(median_ms, **changes):
    """A row whose samples lie within 1% of its median."""
    return row_of(**{"median_ms": median_ms, "p20_ms": 0.99 * median_ms, "p80_ms": 1.01 * median_ms, **changes})


ABOUT = {
    **{"gpu": "NVIDIA H200", "driver": "1", "cuda": "13.0", "cudnn": "9.19.0", "torch": "2.11", "python": "3.12"},
    **{"gemmconv": "0.1", "source": "abc", "commit": "def", "date": "2026-01-01T00:00:00Z"},
}


def results_of(*rows, about=ABOUT, kind=Results):
    """Rows as one run has measured them."""
    made = kind()
    made.begin(about, asdict(CEILINGS) if kind is Results else {})
    for row in rows:
        made.add(row)
    return made


def test_results_survive_the_file(tmp_path):
    rows = [row_of(), row_of(algorithm="torch_nchw", median_ms=3.0, took=""), row_of(mode="graph", status="wrong")]
    results_of(*rows).save(tmp_path / "public.json")
    loaded = Results.load(tmp_path / "public.json")
    assert loaded.finished() == results.with_ratios(rows, loaded.runs)
    assert loaded.rows[rows[0].key].speedup_default == 3.0
    with (tmp_path / "public.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [line["algorithm"] for line in table] == ["auto", "torch_nchw", "auto"]
    assert {"gpu", "driver", "cuda", "cudnn", "torch", "gemmconv", "commit", "date"} <= set(table[0])
    assert table[0]["gpu"] == "NVIDIA H200"
    assert table[2]["peak_bytes"] == ""


def test_results_forget_runs_whose_rows_others_have_replaced(tmp_path):
    made = results_of(row_of(), row_of(mode="graph"))
    made.add(row_of(mode="graph", run=made.begin({**ABOUT, "commit": "new"}, {})))
    made.save(tmp_path / "public.json")
    assert [run["commit"] for run in Results.load(tmp_path / "public.json").runs] == ["def", "new"]
    made.add(row_of(run=1))
    made.save(tmp_path / "public.json")
    loaded = Results.load(tmp_path / "public.json")
    assert [run["commit"] for run in loaded.runs] == ["new"]
    assert {row.run for row in loaded.rows.values()} == {0}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "runs": []}'])
def test_results_refuse_other_files(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="is not a result file"):
        Results.load(path)


def test_results_count_a_row_as_done_only_for_its_maker():
    ours, theirs = row_of(), row_of(algorithm="torch_nchw")
    made, changed = results_of(ours, theirs), {**ABOUT, "source": "xyz", "commit": "new"}

    def done(about, **options):
        return [made.done(row.key, about, **options) for row in (ours, theirs)]

    assert done({**ABOUT, "date": "later"}) == [ours, theirs]
    assert done(changed) == [None, None]
    assert done(changed, keep_torch=True) == [None, theirs]
    assert done({**ABOUT, "driver": "2"}, keep_torch=True) == [None, None]


def test_ratios_take_the_best_torch_of_any_layout_on_the_same_machine():
    rows = [
        row_of(),
        row_of(algorithm="torch_nchw", median_ms=4.0),
        row_of(algorithm="torch_channels_last", layout="channels_last", median_ms=0.5),
        row_of(algorithm="torch_unfused", median_ms=None),
        row_of(algorithm="torch_nchw", mode="graph", median_ms=0.1),
    ]
    rows = results.with_ratios(rows, [ABOUT])
    assert (rows[0].speedup_default, rows[0].speedup_best, rows[0].best_torch) == (4.0, 0.5, "torch_channels_last")
    assert rows[0].floor_ratio == 2.0
    assert rows[3].speedup_best is None
    runs = [{**ABOUT, "torch": "2.10"}, ABOUT, {**ABOUT, "source": "xyz", "commit": "new"}]
    theirs, ours = row_of(algorithm="torch_nchw", median_ms=4.0), row_of(run=1)
    assert results.with_ratios([theirs, ours], runs)[1].speedup_best is None
    assert results.with_ratios([replace(theirs, run=2), ours], runs)[1].speedup_best == 4.0


# The command line.


@pytest.fixture
def refused(capsys):
    """refused(main, *flags): what a command line says that leaves with status 2."""

    def run(main, *flags):
        with pytest.raises(SystemExit) as end:
            main(flags)
        assert end.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return run


@pytest.fixture
def quick_run(monkeypatch, tmp_path):
    """quick_run(*flags): run the command line on a small layer, with next to no samples; counts measurements."""
    monkeypatch.setattr(compare, "measure_ceilings", lambda device, precisions: CEILINGS)
    monkeypatch.setattr(compare, "Effort", lambda: BLINK)
    visits, visit = [], measure._Bench.visit
    monkeypatch.setattr(measure._Bench, "visit", lambda bench, *of: [visits.append(of[0].name), visit(bench, *of)][1])

    def run(*flags):
        visits.clear()
        status = compare.main(["--device", "cpu", "--layer", TINY, "--out", str(tmp_path), *flags])
        return status, list(visits)

    return run


def test_command_line_measures_and_goes_on(quick_run, tmp_path, capsys):
    flags = ("--algorithms", "auto,native", "--layout", "nchw", "--charts")
    status, visits = quick_run("--direction", "forward", *flags)
    assert status == 0
    assert visits == ["torch_nchw", "torch_channels_last", "torch_unfused", "native", "auto"]
    assert "speed-ups: geometric mean" in capsys.readouterr().out
    assert len(Results.load(tmp_path / "layer.json").rows) == 5
    assert (tmp_path / "summary.md").exists()

    status, visits = quick_run("--direction", "forward", "--layout", "nchw")
    assert (status, visits) == (0, ["direct", "fused", "gemm_col2im"])
    assert quick_run("--direction", "forward", "--layout", "nchw")[1] == []
    assert len(quick_run("--direction", "forward", "--layout", "nchw", "--fresh")[1]) == 8
    file = Results.load(tmp_path / "layer.json")
    assert len(file.rows) == 8
    assert len(file.runs) == 1  # of the others no row is left


def test_command_line_shows_nothing_that_was_not_asked_for_or_is_to_be_measured_again(quick_run, monkeypatch):
    flags = ("--algorithms", "native", "--baselines", "none")
    quick_run("--direction", "forward,backward", *flags)
    shown = []
    monkeypatch.setattr(summary, "report", lambda rows: shown.append(rows) or "")
    quick_run("--direction", "forward", "--layout", "nchw", *flags)
    about = compare.environment.describe(CPU)
    monkeypatch.setattr(compare.environment, "describe", lambda device: {**about, "commit": "another"})
    quick_run("--direction", "forward,backward", "--layout", "nchw", "--budget", "1e-9", *flags)
    assert [[(row.layout, row.direction) for row in rows] for rows in shown] == [[("nchw", "forward")], []]


def test_command_line_stops_at_the_budget_and_goes_on(quick_run, monkeypatch, capsys):
    clock = [0.0]

    def step(row, **changes):
        clock[0] += 1.0
        return replace(row, **changes)

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock[0])
        patch.setattr(measure, "replace", step)
        _, visits = quick_run("--direction", "forward", "--budget", "4")
    assert 0 < len(visits) < 13
    assert "run the same command again" in capsys.readouterr().out
    assert len(quick_run("--direction", "forward")[1]) == 13 - len(visits)


def test_command_line_only_looks_at_rows_that_lack_looks(quick_run, monkeypatch, tmp_path, capsys):
    flags = ("--direction", "forward", "--layout", "nchw", "--algorithms", "native", "--baselines", "torch_nchw")
    assert quick_run(*flags)[1] == ["torch_nchw", "native"]
    monkeypatch.setattr(compare, "once", thrice)
    for missing in (2, 0):
        capsys.readouterr()
        assert quick_run(*flags)[1] == []
        assert f"{missing} rows to measure" in capsys.readouterr().out
        assert all(3 <= row.looks <= 18 for row in Results.load(tmp_path / "layer.json").rows.values())
    file = Results.load(tmp_path / "layer.json")
    file.add(replace(next(iter(file.rows.values())), mode="graph", looks=1))
    file.save(tmp_path / "layer.json")
    quick_run(*flags)
    assert "1 rows to measure" in capsys.readouterr().out


def test_command_line_shares_workloads_between_devices(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # by which CPUs are told apart
    layers = [TINY, TINY.replace("n2", "n1"), TINY.replace("n2", "n3")]
    flags = [flag for layer in layers for flag in ("--layer", layer)]
    flags += ["--direction", "forward", "--baselines", "torch_nchw", "--algorithms", "native", "--layout", "nchw"]
    assert compare.main(["--device", "cpu,cpu", "--out", str(tmp_path), *flags]) == 0
    assert "6 rows to measure" in capsys.readouterr().out
    file = Results.load(tmp_path / "layer.json")
    assert {(row.layer, row.algorithm, row.status) for row in file.rows.values()} == {
        (layer, algorithm, "ok") for layer in layers for algorithm in ("torch_nchw", "native")
    }
    assert len(file.runs) == 2
    for layer in layers:  # ratios and floors are those of one device
        assert len({row.run for row in file.rows.values() if row.layer == layer}) == 1
    assert compare.main(["--device", "cpu,cpu", "--out", str(tmp_path), *flags]) == 0
    assert "0 rows to measure" in capsys.readouterr().out
    workloads = [custom(f"n{count} c8x8 k3 h64 w64") for count in (5, 4, 3, 2, 1)]  # a device has the same in every run
    assert compare._share(workloads, 0, 2) == compare._share(workloads[::-1], 0, 2) == workloads[::2]
    assert compare._share(workloads, 1, 2) == workloads[1::2]


def test_command_line_reports_a_wrong_kernel_unless_torch_is_wrong_too(quick_run, algorithm, capsys):
    algorithm(Wrong("forward", off))
    for flags in ([], ["--baselines", "none", "--fresh"]):
        assert quick_run("--direction", "forward", *flags)[0] == 1
        assert "native in nchw: output: error 1.0e-03 is over" in capsys.readouterr().out
    torch_row, native = (row_of(algorithm=name, status="wrong", median_ms=None) for name in ("torch_nchw", "native"))
    assert compare._is_wrong([native])
    assert compare._is_wrong([torch_row, replace(native, layer="n2 c8x8 k3 h4 w5")])
    assert not compare._is_wrong([torch_row, native])
    assert compare._is_wrong([torch_row, native, replace(native, algorithm="direct")])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--device tpu", "argument --device: must be cpu, cuda or cuda:INDEX, got 'tpu'"),
        ("--device cuda", "torch finds no CUDA device here, got 'cuda'; use --device cpu"),
        ("--device cpu --precision tf32", "argument --precision: tf32 needs a CUDA device"),
        ("--device cpu --precision fp8", "argument --precision: must be of fp32, tf32, fp16, bf16, got 'fp8'"),
        ("--suite nonsense", "argument --suite: must be of seeds, public"),
        ("--device cpu --algorithms x", "argument --algorithms: must be of direct, fused, gemm_col2im"),
        ("--device cpu --workload x", "argument --workload: must be of seed0"),
        ("--layer n1", "layer: c, k, h, w missing"),
        ("--device cpu,cpu --layer c8,k3,h4,w5", "argument --out: several devices need it"),
        ("--check nowhere nowhere", "argument --check: must be a result file or a folder"),
    ],
)
def test_command_line_refuses(flags, message, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert message in refused(compare.main, *flags.split())
    assert compare.pick_device(None) == CPU


def test_first_call_child_prints_json(capsys):
    assert first_call.main(["--device", "cpu", "--precisions", "fp32", "n1 c2x3 k2 h4 w4"]) == 0
    found = json.loads(capsys.readouterr().out)
    able = {"direct", "fused", "gemm_col2im"} - set(REFUSED_ON_A_CPU)
    assert {name for _, _, name, _ in found} == {"torch_nchw", "torch_nchw_benchmark", *able}
    assert all(layer == "n1 c2x3 k2 h4 w4" and ms > 0 for layer, _, _, ms in found)


# --check.


def saved(path, *rows, about=ABOUT):
    results_of(*rows, about=about).save(path)
    return path


NOISY = [row_of(), row_of(workload="tiny", median_ms=0.01, p20_ms=0.01, p80_ms=0.01)]
NOISIER = [around(1.04), row_of(workload="tiny", median_ms=0.012, p20_ms=0.0119, p80_ms=0.0121)]
FOUR = [row_of(), row_of(direction="backward"), row_of(precision="bf16"), row_of(algorithm="native")]
SLOWER = [around(1.2), around(0.5, direction="backward"), around(1.2, precision="bf16", p20_ms=0.9), FOUR[3]]
BROKEN = [row_of(median_ms=None, status="wrong", reason="error 1 is over 0")]


@pytest.mark.parametrize(
    ("old", "new", "status", "words"),
    [
        (FOUR, FOUR, 0, ["slower: 0", "faster: 0"]),
        (NOISY, NOISIER, 0, ["2 rows with a time in both", "slower: 0", "1 rows, 0 differ by more than 5%"]),
        (FOUR, SLOWER, 1, ["slower: 1", "faster: 1", "kb57 tf32 forward", "1.20x the time"]),
        ([row_of()], BROKEN, 1, ["broken: 1"]),
    ],
    ids=["equal", "noisy", "slower", "without a time"],
)
def test_check_names_what_got_slower(old, new, status, words, tmp_path, capsys):
    assert compare.check.main(saved(tmp_path / "old.json", *old), saved(tmp_path / "new.json", *new)) == status
    out = capsys.readouterr().out
    assert [word for word in words if word not in out] == []
    assert "bf16" not in out


def test_check_refuses_another_machine(tmp_path):
    old = saved(tmp_path / "old.json", row_of())
    new = saved(tmp_path / "new.json", row_of(), about={**ABOUT, "gpu": "CPU"})
    with pytest.raises(ValueError, match="from the same machine"):
        compare.check.main(old, new)


# What is made from the files.


RUN = {**ABOUT, "ceilings": {}}


def page_in(folder):
    """A page with nothing between its markers."""
    page = folder / "results.md"
    page.write_text(f"# Title\n\n{report.START}\nold\n{report.END}\n\nend\n")
    return page


def losing_and_winning():
    torch_rows = [row_of(algorithm="torch_nchw", median_ms=2.0, took="", workload=name) for name in ("kb57", "kb65")]
    return results.with_ratios([*torch_rows, row_of(), row_of(workload="kb65", median_ms=8.0)], [ABOUT])


def test_summary_puts_losing_rows_first():
    rows = losing_and_winning()
    assert [row.workload for row in summary.losing(rows)] == ["kb65"]
    (line,) = summary.lines(rows)
    assert line[6:] == ["2", "0.71x", "0.25x", "0.71x", "0.25x", "5.66", "16.00"]
    text = summary.report(rows)
    assert "slower than the best torch setting in 1 of 2 rows" in text
    assert text.index("kb65") < text.index("geometric mean")


def test_report_writes_the_newest_of_a_gpu_between_the_markers(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_RESULTS", tmp_path)
    page = page_in(tmp_path)
    with pytest.raises(SystemExit):
        report.main(["--page", str(page)])
    for name, day in (("gpu", 2), ("older", 1), ("cpu-2-threads", 3)):
        results_of(*losing_and_winning(), about={**ABOUT, "date": f"2026-01-0{day}"}).save(tmp_path / name / "x.json")
    assert report.main(["--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith(f"# Title\n\n{report.START}\n## What you wait for\n\n{report.waiting.NOT_MEASURED}")
    assert text.endswith(f"{report.END}\n\nend\n")
    assert "\nold\n" not in text
    assert "2026-01-02 (public)." in text
    assert "[gpu](gpu)" in text
    assert "Slower than the best torch setting in 1 of 2 rows** of `auto` in NCHW (0 of 0 in channels_last" in text
    assert "| kb65 | tf32 | forward | native |" in text
    assert all("Rows that lose" in (tmp_path / name / "summary.md").read_text() for name in ("gpu", "older"))
    assert report.main(["--page", str(page)]) == 0
    assert page.read_text() == text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="must hold the lines"):
        report.write_between(page, "text")


def test_report_leaves_rows_of_older_sources_out_and_says_so():
    runs = [{**RUN, "source": "old", "date": "2026-01-01"}, {**RUN, "date": "2026-01-02"}]
    theirs = row_of(algorithm="torch_nchw", median_ms=2.0, took="")
    rows = [theirs, row_of(median_ms=8.0), row_of(median_ms=4.0, layout="channels_last", run=1), row_of(suite="sweep")]
    rows = results.with_ratios(rows, runs)
    assert report.current_and_older(rows, runs) == ([rows[0], *rows[2:]], [rows[1]])
    for text in ("\n".join(report.device_parts(rows, runs, "results", [])), report.full(rows, runs)):
        assert "Not here: 1 rows of an older gemmconv; of those that are compared 1 of 1 lose." in text
        assert "| kb57 | tf32 | forward | native | 8.000 |" not in text
    assert "older" not in report.full(rows, [RUN, RUN])


def test_report_says_where_torch_has_no_right_result():
    wrong = row_of(algorithm="torch_nchw", status="wrong", median_ms=None, took="")
    text = "\n".join(report.device_parts(results.with_ratios([wrong, row_of()], [RUN]), [RUN], "results", []))
    assert "0 of 0 rows** of `auto` in NCHW" in text
    assert "torch has no right result in time or memory for 1 more: kb57 tf32 forward." in text


def test_charts_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    for suite, count in (("public", 2), ("sweep", 5)):
        rows = [
            row_of(suite=suite, workload=workload.name, layer=workload.layer, algorithm=name, median_ms=ms)
            for workload in SUITES[suite][:count]
            for name, ms in (("torch_nchw", 4.0), ("torch_unfused", 9.0), ("gemm_col2im", 2.5), ("auto", 2.0))
        ]
        results_of(*rows).save(tmp_path / f"{suite}.json")
    names = [path.name for path in plot.draw(tmp_path)]
    assert names == ["speedup_public_forward.png", "speedup_sweep_forward.png"]
    assert all((tmp_path / "plots" / name).stat().st_size > 10_000 for name in names)
    results_of(*(row for row in rows if row.is_torch)).save(tmp_path / "sweep.json")
    assert [path.name for path in plot.draw(tmp_path)] == ["speedup_public_forward.png"]


# The comparison of algorithms beside torch.

SMALL = Workload("small", "layer", Problem(2, 4, 6, 2, (16, 24), (3, 5), stride=(2, 1)), bias=True)
NEEDED = "--in-channels 4 --out-channels 6 --kernel 3 --height 8 --width 9"


@pytest.fixture
def compared(monkeypatch):
    """compared(workload): its rows, as if all took 1 ms. A fixture for tests that need the extra demo."""
    pytest.importorskip("rich", reason="the comparison needs the extra demo")
    pytest.importorskip("matplotlib", reason="the comparison needs the extra demo")
    monkeypatch.setattr(algorithms, "medians_ms", lambda runs, device: [1.0] * len(runs))
    return lambda workload=SMALL: algorithms.measure(workload, CPU, torch.float32)


def text_of(*rows, workload=SMALL):
    console = importlib.import_module("rich.console").Console
    file = io.StringIO()
    console(width=80, file=file, force_terminal=True, color_system="standard").print(algorithms.table(workload, rows))
    return file.getvalue()


def test_algorithms_have_rows_beside_torch_and_auto(compared, monkeypatch):
    """torch's own layer alone has cudnn.benchmark on, and the setting comes back."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    searches = []

    def record(runs, device):
        for run in runs:
            run()
            searches.append(torch.backends.cudnn.benchmark)
        return [1.0] * len(runs)

    monkeypatch.setattr(algorithms, "medians_ms", record)
    rows = compared()
    assert not torch.backends.cudnn.benchmark
    assert searches == [True, *[False] * sum(row.skipped is None for row in rows[1:])] * 2
    assert [row.algorithm for row in rows] == ["torch", "auto", *(one.name for one in ALGORITHMS)]
    (chosen,) = [row.algorithm for row in rows if row.chosen]
    backward = gemmconv.explain(SMALL.problem, bias=True).gradients
    assert [row.taken for row in rows if row.taken] == [rows[1].taken] == [(chosen, *backward)]
    config = Config(SMALL.problem, torch.float32, CPU, bias=True)
    assert [row.skipped for row in rows] == [None, None, *(one.why_not(config) for one in ALGORITHMS)]
    for row in (row for row in rows if row.skipped is None):
        assert not row.wrong
        assert 0 < row.error < 1e-6
        assert row.forward_ms == row.both_ms == 1.0
        assert row.forward_ratio == row.both_ratio == (None if row.algorithm == "torch" else 1.0)
    gemm, native = GemmCol2im(), Native()  # memory that torch manages does not count
    assert algorithms.workspace_bytes((native, gemm, native), config) == gemm.workspace_bytes(config, "input_grad")
    assert algorithms.workspace_bytes((native, native, native), config) is None


@pytest.mark.parametrize("direction", ["forward", "input_grad", "weight_grad"])
@pytest.mark.parametrize(("damage", "shown"), [(off, r"1\.0e-03"), (one_nan, "nan")])
def test_wrong_algorithm_is_red_and_has_no_times(compared, algorithm, direction, damage, shown):
    algorithm(Wrong(direction, damage))
    right, auto, wrong = compared()
    assert [bool(row.wrong) for row in (right, auto, wrong)] == [False, True, True]
    assert (wrong.error <= wrong.bar) == (direction != "forward")
    assert wrong.forward_ms is wrong.both_ms is wrong.forward_ratio is wrong.both_ratio is None
    line = next(line for line in text_of(right, wrong).splitlines() if "native" in line)
    assert re.search(rf"\x1b\[1;31m *{shown}\x1b\[0m", line)
    assert "1.000" not in line
    assert any(note.startswith("native is wrong") and "no times" in note for note in algorithms.notes([right, wrong]))
    (layer,) = algorithms.as_json({SMALL: [wrong]}, CPU, "float32")["layers"]
    (found,) = layer["rows"]
    assert found["wrong"] is True
    assert (None in (found["error"], found["gradient_error"])) == (damage is one_nan)


def test_refused_algorithm_is_skipped_with_its_reason(compared, monkeypatch):
    refuses = Native()
    monkeypatch.setattr(refuses, "why_not", lambda config: "kernel must be 1x1, got 3x5")
    monkeypatch.setattr("gemmconv.algorithms.ALGORITHMS", (refuses,))
    rows = compared()
    assert rows[2].forward_ms is None
    assert "native was not run: kernel must be 1x1, got 3x5" in algorithms.notes(rows)


def auto_row(forward, both):
    taken = "fused", "fused", "native"
    return algorithms.Row("auto", "ieee", taken=taken, forward_ratio=forward, both_ratio=both)


def test_summary_of_algorithms_counts_layers_that_are_slower_and_that_have_no_ratio():
    one, other, third = (replace(SMALL, name=name) for name in "abc")
    results = {one: [auto_row(4.0, 1.0)], other: [auto_row(0.25, 1.0)], third: [auto_row(None, None)]}
    assert algorithms.summary(results) == (
        "auto: 1.00x torch's speed forward (geometric mean of 2 of 3 layers; least 0.25x), "
        "1.00x with gradients (least 1.00x)"
    )
    assert algorithms.summary({one: [auto_row(None, None)]}) == "auto: no ratio to torch, as noted above"


def test_table_colours_what_auto_gains_and_says_what_it_takes_and_what_was_made_smaller(compared):
    row = auto_row(1.02, 0.96)
    workload = shrunk(replace(SMALL, problem=replace(SMALL.problem, batch=64)), SMALL.problem.useful_flops, 1 << 30)
    text = text_of(row, replace(row, algorithm="fused", chosen=True), workload=workload)
    auto, fused = text.rstrip().splitlines()[-2:]
    assert re.search(r"\x1b\[1;32m *1\.02x\x1b\[0m.*\x1b\[31m *0\.96x\x1b\[0m", auto)
    assert fused.startswith(" fused * ")
    assert "\x1b" not in fused
    assert algorithms.notes([row]) == ["auto takes fused forward, fused (input) and native (weight) for gradients"]
    assert "made smaller for the CPU: batch 64 -> 2" in text


ALL_FLAGS = "--batch 2 --stride 3x2 --padding 1,0 --output-padding 1 --dilation 2 --groups 2 --no-bias"
IN_WORDS = "kernel 3x3, stride 3x2, padding 1x0, output padding 1, dilation 2, groups 2, image 8x9, no bias"


@pytest.mark.parametrize(
    ("more", "layer", "words"),
    [
        ("", "n1 c4x6 k3 h8 w9 bias", "N=1, C 4 -> 6, kernel 3x3, image 8x9, bias"),
        (ALL_FLAGS, "n2 c4x6 k3 h8 w9 s3x2 p1x0 op1 d2 g2", f"N=2, C 4 -> 6, {IN_WORDS}"),
    ],
)
def test_algorithms_write_table_chart_and_rows(compared, more, layer, words, tmp_path, capsys):
    out, file = tmp_path / "new" / "folder", tmp_path / "newer" / "rows.json"
    flags = [*NEEDED.split(), *more.split(), "--device", "cpu", "--out", str(out), "--json", str(file)]
    assert algorithms.main(flags) == 0
    assert (out / "times.png").stat().st_size > 10_000
    printed, names = " ".join(capsys.readouterr().out.split()), ["torch", "auto", *(one.name for one in ALGORITHMS)]
    assert all(text in printed for text in (*names, words, "chart: ", "rows: "))
    assert "auto: 1.00x torch's speed forward, 1.00x with gradients" in printed
    assert "cuDNN" not in printed
    found = json.loads(file.read_text())
    assert (found["dtype"], found["versions"]["torch"], found["device"][:5]) == ("float32", torch.__version__, "CPU, ")
    (made,) = found["layers"]
    assert (made["layer"], [row["algorithm"] for row in made["rows"]]) == (layer, names)
    assert [made["rows"][1][name] for name in ("forward_ms", "both_ms", "forward_ratio")] == [1.0] * 3


def test_algorithms_take_the_demo_without_a_layer(compared, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(algorithms, "shrunk", lambda workload, *_: replace(SMALL, name=workload.name))
    assert algorithms.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "geometric mean of 5 layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--stride 0", "argument --stride: must be at least 1, got 0"),
        ("--padding=-1", "argument --padding: must be at least 0, got -1"),
        ("--batch two", "argument --batch: must be an integer, got 'two'"),
        ("--groups 4", "out_channels must be divisible by groups=4, got 6"),
        ("--output-padding 1", "output_padding must be less than the larger of stride and dilation"),
        ("--device cpu --precision tf32", "argument --precision: tf32 is for float32 on a CUDA device"),
        ("--dtype int8", "argument --dtype: invalid choice"),
        ("--out pyproject.toml", "argument --out: cannot make the folder"),
        ("--out /proc", "argument --out: cannot make the folder /proc or write into it"),
        ("--json /tmp", "argument --json: must be a file, got the folder /tmp"),
        ("--height 9", "the comparison needs rich; run: pip install 'gemmconv[demo]'"),
        ("only --batch 2 --width 9", "are required: --in-channels, --out-channels, --kernel, --height"),
        ("only --devise cpu", "unrecognized arguments: --devise"),
    ],
)
def test_algorithms_refuse(text, message, refused, monkeypatch, request, tmp_path):
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setattr(algorithms, "find_spec", lambda name: None if name == "rich" else True)
    needed = [] if text.startswith("only") else [*NEEDED.split(), "--out", str(tmp_path)]
    assert message in refused(algorithms.main, *needed, *text.removeprefix("only").split())


def test_algorithms_help_needs_no_extra():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['rich', 'matplotlib', 'PIL']))\n"
        "from benchmarks.algorithms import main; main(['--help'])"
    )
    assert "--precision" in output_of(code)


# What compiling takes.


@pytest.fixture
def compile_time():
    pytest.importorskip("cuda.core", reason="kernels are compiled by the cuda-core package")
    return importlib.import_module("benchmarks.compile_time")


def test_compile_time_is_measured_of_each_kernel(compile_time, capsys):
    assert compile_time.main(["--only", "splits/reduce", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {*found} == {f"layer {i} weight_grad splits/reduce" for i in (1, 3, 4, 5)}
    assert 0 < min(found.values()) <= max(found.values()) < 5
    assert compile_time.main(["--only", "nothing has this name"]) == 0
    assert "0 kernels here" in capsys.readouterr().out


def test_compile_time_against_another_tree_is_by_turns(compile_time, refused, monkeypatch, tmp_path, capsys):
    turns, rounds = [], iter((1.0, 4.0, 6.0, 2.0, 3.0, 4.0))  # here, there; there, here; here, there

    def child(tree, only):
        turns.append(tree == tmp_path)
        return {"both": next(rounds), "there alone" if tree == tmp_path else "here alone": 1.5}

    monkeypatch.setattr(compile_time, "_in", child)
    monkeypatch.setattr(compile_time, "_ROUNDS", 3)
    tmp_path.joinpath("gemmconv").mkdir()
    assert compile_time.main(["--against", str(tmp_path)]) == 0
    assert turns == [False, True, True, False, False, True]
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["both", "2.000", "4.000", "0.500x"] in printed
    assert not any("alone" in line for line in printed)
    assert "a checkout of gemmconv" in refused(compile_time.main, "--against", "gone")


def test_compile_time_in_another_tree_runs_this_file_there(compile_time, monkeypatch, tmp_path):
    file = tmp_path / "file.py"
    file.write_text(
        "import os, sys; print('said'); print('{\"' + os.environ['PYTHONPATH'] + ' '.join(sys.argv[1:]) + '\": 2}')"
    )
    monkeypatch.setattr(compile_time, "__file__", str(file))
    assert compile_time._in(tmp_path, "x") == {f"{tmp_path}--json --only x": 2}
    file.write_text("raise SystemExit('no kernels')")
    with pytest.raises(RuntimeError, match=r"ended with 1: no kernels"):
        compile_time._in(tmp_path, "")
