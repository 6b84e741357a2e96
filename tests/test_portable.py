"""What ``auto`` takes on GPUs that are not at hand, from rows of properties: a table, and what was measured of it.

tests/data/h100_without_wgmma.csv has torch's default, ``direct`` and ``gemm_col2im`` on an H100 80GB HBM3 (torch 2.11,
cuDNN 9.19, forward, NCHW, milliseconds): what a GPU without Hopper's instructions has. Its row of DCGAN 5 in 16 bits
was measured again on 2026-11-26: an earlier one, of 0.28 ms for ``direct``, did not repeat. The rows of an H200 have
``conv/gemm_mma`` too, and torch's operator as ``auto`` takes it on Hopper.
"""

import csv
import functools
import itertools
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gemmconv
from benchmarks import rows
from benchmarks.results import RESULTS
from benchmarks.workloads import SUITES, parse_layer
from gemmconv.algorithms import Config
from gemmconv.device import KNOWN, spec_of
from gemmconv.pairs import choose_pair
from gemmconv.selection import preference
from tests import samples

ELSEWHERE = [name for name, spec in KNOWN.items() if not spec.is_hopper]
# GPUs of the least and the greatest compute capability that kernels are for; the others run with ``make test-slow``.
USUAL = ["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 5090"]
each_elsewhere = pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in ELSEWHERE]
)
PRECISIONS = {"tf32": (torch.float32, "tf32"), "bf16": (torch.bfloat16, "ieee"), "ieee": (torch.float32, "ieee")}
FORMATS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
WORKLOADS = [workload for suite in ("public", "models") for workload in SUITES[suite]]


def measured():
    """Torch's time over the better of ours, by problem and precision."""
    with (Path(__file__).parent / "data" / "h100_without_wgmma.csv").open() as file:
        return {
            (parse_layer(row["layer"])[0], row["precision"]): float(row["torch_ms"])
            / min(float(row["direct_ms"]), float(row["gemm_col2im_ms"]))
            for row in csv.DictReader(file)
        }


def config_of(workload, precision, layout, spec):
    dtype, rounding = PRECISIONS[precision]
    config = samples.config_of(workload.problem, dtype, FORMATS[layout], rounding)
    return replace(config, torch_precision=rounding, bias=workload.bias, spec=spec)


@functools.cache
def rows_of(name):
    """What ``auto`` takes, by (GPU, workload, precision, format): name and reason of the forward pass, gradients."""
    taken_of = {}
    for workload in WORKLOADS:
        for precision in PRECISIONS:
            for layout in FORMATS:
                config = config_of(workload, precision, layout, KNOWN[name])
                taken, why = next(item for item in preference(config) if item[0].why_not(config) is None)
                taken_of[name, workload.name, precision, layout] = taken.name, why
    return taken_of


@each_elsewhere
def test_table_of_what_auto_takes_has_a_reason_for_every_row(name, record_property):
    table = rows_of(name)
    assert len(table) == 6 * len(WORKLOADS)
    for key, (taken, why) in table.items():
        print(*key, taken, why, sep=" | ")  # pytest -s shows the table
        assert why
        assert "comes first" in why or "comes last" not in why
    ours = sum(taken != "native" for taken, _ in table.values())
    record_property("ours", ours)
    assert 0 < ours < len(table)


@each_elsewhere
def test_what_was_clearly_faster_than_torch_is_ours(name):
    found = measured()
    compared = 0
    for workload in WORKLOADS:
        for precision in PRECISIONS:
            ratio = found.get((workload.problem, precision))
            if ratio is None:
                continue
            compared += 1
            taken = rows_of(name)[name, workload.name, precision, "nchw"][0]
            if ratio >= 1.5:
                assert taken != "native", (workload.name, precision, ratio)
    assert compared == 57


@functools.cache
def portable_times():
    """Measured seconds of a forward pass by each algorithm's portable kernels and torch, on an H200."""
    times = defaultdict(dict)
    for row in rows.read(RESULTS / "nvidia-h200" / "rows.csv.gz")[1]:
        if row.direction == "forward" and not row.kernel.startswith("sm90/") and row.seconds > 0:
            algorithm = {"conv": "fused"}.get(row.kernel.split("/")[0], row.kernel.split("/")[0])
            of = times[row.layer, row.precision, row.layout]
            of[algorithm] = min(row.seconds, of.get(algorithm, row.seconds))
    return times


@each_elsewhere
def test_nothing_is_taken_that_was_measured_to_be_much_slower_than_torch(name):
    """At most 5% slower; and torch's operator is nowhere taken where another algorithm took less than half its time."""
    compared = 0
    for workload in WORKLOADS:
        for precision, layout in itertools.product(PRECISIONS, FORMATS):
            times = portable_times()[workload.layer, {"ieee": "fp32"}.get(precision, precision), layout]
            taken = rows_of(name)[name, workload.name, precision, layout][0]
            if "fused" in times and taken in times:
                compared += 1
                assert times[taken] <= 1.05 * times["native"], (workload.name, precision, layout, times)
                if taken == "native":
                    assert times["native"] <= 2.1 * min(times.values()), (workload.name, precision, layout, times)
    assert compared >= 200


@each_elsewhere
def test_gradients_of_depthwise_layers_stay_ours(name):
    depthwise = next(workload for workload in WORKLOADS if workload.name == "depthwise")
    for precision in PRECISIONS:
        config = config_of(depthwise, precision, "nchw", KNOWN[name])
        gradients = choose_pair(config, config, "auto", "test")
        assert {gradients.input_grad.name, gradients.weight_grad.name} == {"direct"}
        dense = next(workload for workload in WORKLOADS if workload.name == "pose3")
        config = config_of(dense, precision, "nchw", KNOWN[name])
        gradients = choose_pair(config, config, "auto", "test")
        assert gradients.input_grad.name == gradients.weight_grad.name == "native"
        assert gradients.at_once


def test_capability_in_the_environment_replaces_that_alone(monkeypatch):
    where = torch.device("cuda", 0)
    plain = spec_of(where)
    spec_of.cache_clear()
    monkeypatch.setenv("GEMMCONV_CAPABILITY", "8.0")
    assert spec_of(where) == replace(plain, capability=(8, 0))
    assert spec_of(torch.device("cpu")).capability == KNOWN["NVIDIA H200"].capability
    problem = gemmconv.Problem(64, 512, 512, 1, (16, 16), (4, 4), stride=(2, 2), padding=(1, 1))
    explanation = gemmconv.explain(problem, device="cuda")
    assert explanation.algorithm == "native"
    assert explanation.reasons["native"].endswith("comes first; torch's own settings")
    assert gemmconv.explain(problem, device="cuda", algorithm="fused").kernel == "conv/gemm_mma"
    spec_of.cache_clear()
    monkeypatch.setenv("GEMMCONV_CAPABILITY", "ampere")
    with pytest.raises(
        ValueError, match=r"GEMMCONV_CAPABILITY must be a compute capability such as 8\.0, got 'ampere'"
    ):
        spec_of(where)


def test_explain_says_that_what_auto_leaves_to_torch_on_hopper_is_deterministic():
    problem = gemmconv.Problem(8, 256, 128, 1, (32, 32), (4, 4), stride=(2, 2), padding=(1, 1))
    for algorithm, settings in (("auto", "cuDNN's deterministic kernels"), ("native", "torch's own settings")):
        explanation = gemmconv.explain(problem, device="cuda", algorithm=algorithm)
        assert explanation.reasons["native"].endswith(f"; {settings}")


def test_types_of_which_nothing_is_known_are_torchs_elsewhere():
    problem = gemmconv.Problem(4, 64, 64, 1, (32, 32), (4, 4), stride=(2, 2), padding=(1, 1))
    config = Config(problem, torch.float64, torch.device("cuda", 0), spec=KNOWN["NVIDIA A100-SXM4-80GB"])
    (first, why), *_ = preference(config)
    assert first.name == "native"
    assert why == "torch's operator was not measured: comes first"


def test_gradients_that_no_algorithm_can_serve_are_refused_elsewhere():
    """Torch's operator would round to TF32 here."""
    one_line = gemmconv.Problem(1, 1, 1, 1, (1, 2**31), (1, 1))
    spec = KNOWN["NVIDIA A100-SXM4-80GB"]
    config = Config(one_line, torch.float32, torch.device("cuda", 0), "ieee", torch_precision="tf32", spec=spec)
    with pytest.raises(NotImplementedError, match=r"no algorithm can serve this.*native: precision follows"):
        choose_pair(config, config, "auto", "test")
