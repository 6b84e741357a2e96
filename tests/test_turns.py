"""Suites by turns: whole networks and the host alone, their files, and what the report makes of them."""

import csv
import functools
import re
import time
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the package")

import gemmconv
from benchmarks import check, host, networks, precompile, report, turns, waiting
from benchmarks.results import load_all
from benchmarks.turns import INFERENCE, STEPS, TRAINING, Group, Pace, Turn, Turns, load_turns
from tests.test_benchmarks import ABOUT, RUN, losing_and_winning, page_in, results_of

CPU = torch.device("cpu")
BLINK = Pace(0.0, 3, 0.01, 2)


def turn_of(**changes):
    values = {
        **{"suite": "networks", "workload": "dcgan", "shape": "128 x 100 x 1 x 1", "precision": "tf32"},
        **{"layout": "nchw", "mode": "eager", "step": INFERENCE},
        **{"torch_ms": 2.0, "again_ms": 2.0, "ours_ms": 1.0, "ours_p20_ms": 0.99, "ours_p80_ms": 1.01},
        **{"ratio": 2.0, "itself": 1.0, "rounds": 9, "calls": 5},
    }
    return Turn(**{**values, **changes})


turns_of = functools.partial(results_of, kind=Turns)


def test_by_turns_begins_each_round_with_another(monkeypatch):
    seen, waits = [], []
    monkeypatch.setattr(turns, "synchronize", waits.append)
    runs = [lambda name=name: seen.append(name) for name in "abc"]
    times = turns.by_turns(runs, CPU, Pace(0.0, 3), 2, after=lambda index: seen.append(index))
    assert [len(series) for series in times] == [3, 3, 3]
    first, second, third = (list(f"{name}{name}{'abc'.index(name)}") for name in "abc")
    expected = [*first, *second, *third, *second, *third, *first, *third, *first, *second]
    assert [str(one) for one in seen] == expected
    assert len(waits) == 18
    turns.by_turns(runs, CPU, Pace(0.0, 3), 2, waits=False)
    assert len(waits) == 18 + 9


def test_timed_takes_the_medians_and_their_ratios():
    row = turns.timed(turn_of(), [lambda: time.sleep(3e-3)] * 2 + [lambda: time.sleep(1e-3)], CPU, Pace(0.05))
    assert row.torch_ms >= 3
    assert row.ours_ms >= 1
    assert row.ratio == pytest.approx(row.torch_ms / row.ours_ms)
    assert row.itself == pytest.approx(row.torch_ms / row.again_ms)
    assert row.ratio > 1.3
    assert row.ratio_p20 <= row.ratio_p80
    assert row.calls == 6
    assert row.rounds >= 5


@pytest.mark.parametrize("error", [2e-3, float("nan"), float("inf")])
def test_judged_is_wrong_beyond_a_bar_and_where_there_is_a_nan(error):
    bars = {"output": 1e-3, "0.weight": 1e-3}
    row = turns.judged(turn_of(), {"output": 1e-5, "0.weight": error}, bars)
    assert row.status == "wrong"
    assert row.reason.startswith("0.weight: error")
    right = turns.judged(turn_of(), {"output": 1e-5, "0.weight": 1e-4}, bars)
    assert (right.status, right.error, right.bar) == ("ok", 1e-4, 1e-3)


def test_turns_survive_the_file_and_are_no_rows_of_other_suites(tmp_path):
    rows = [turn_of(), turn_of(step=TRAINING, status="failed", ratio=None, reason="no")]
    turns_of(*rows).save(tmp_path / "networks.json")
    results_of(*losing_and_winning()).save(tmp_path / "public.json")
    assert load_turns(tmp_path) == (rows, [RUN])
    assert {row.suite for row in load_all(tmp_path)[0]} == {"public"}
    with (tmp_path / "networks.csv").open() as file:
        table = list(csv.DictReader(file))
    assert {"gpu", "driver", "torch", "cudnn", "commit", "ratio", "itself", "peak_ratio"} <= set(table[0])
    assert [line["ratio"] for line in table] == ["2.0", ""]


def test_rows_are_written_as_they_come_and_a_failure_is_one(tmp_path, capsys):
    changes = ({}, {"step": TRAINING}, {"workload": "unet"})
    first, second, third = (turn_of(ratio=None, **one) for one in changes)
    seen = []

    def visit(row):
        seen.append(row.key)
        if row is second:
            assert len(Turns.load(tmp_path / "networks.json").rows) == 1
            raise RuntimeError("no such kernel\nand more")
        return replace(row, ratio=1.0)

    def broken():
        raise ValueError("no data")

    arguments = Namespace(budget=None, out=tmp_path, fresh=False, quick=True)
    groups = [Group([first, second], lambda: visit), Group([third], broken)]
    assert turns.measure(groups, [], CPU, arguments) == 0
    rows = [Turns.load(tmp_path / "networks.json").rows[row.key] for row in (first, second, third)]
    assert [row.status for row in rows] == ["ok", "failed", "failed"]
    assert [row.reason for row in rows] == ["", "RuntimeError: no such kernel", "ValueError: no data"]
    assert "failed: dcgan, tf32 nchw, eager training: RuntimeError: no such kernel" in capsys.readouterr().out
    assert turns.measure(groups, [], CPU, arguments) == 0
    assert len(seen) == 2


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """quick(suite, *flags): run a suite's command line on the CPU with next to no samples; the rows in its file."""
    for module in (networks, host):
        monkeypatch.setattr(module, "_QUICK", BLINK)

    def run(module, *flags):
        status = module.main(["--device", "cpu", "--quick", "--out", str(tmp_path), *flags])
        return status, load_turns(tmp_path)[0]

    return run


def test_networks_are_measured_and_go_on(quick, capsys):
    flags = ("--networks", "fsrcnn,hifigan", "--modes", "fp32,bf16-channels_last")
    status, rows = quick(networks, *flags, "--budget", "1e-9")
    assert (status, rows) == (0, [])
    assert "stopped with 8 rows to measure" in capsys.readouterr().out
    status, rows = quick(networks, *flags)
    assert status == 0
    assert [row.status for row in rows] == ["ok"] * 8
    assert {(row.workload, row.precision, row.layout, row.step) for row in rows} == {
        (name, *mode, step)
        for name in ("fsrcnn", "hifigan")
        for mode in (("fp32", "nchw"), ("bf16", "channels_last"))
        for step in (INFERENCE, TRAINING)
    }
    assert all(row.ratio > 0 and row.itself > 0 and row.error <= row.bar and row.kernels for row in rows)
    assert quick(networks, *flags)[1] == rows
    fresh = quick(networks, "--networks", "fsrcnn", "--modes", "fp32", "--fresh")[1]
    assert [row in rows for row in fresh] == [(row.workload, row.precision) != ("fsrcnn", "fp32") for row in fresh]


class _Off(gemmconv.ConvTranspose2d):
    """A layer that is off in its gradients alone."""

    def forward(self, images, output_size=None):
        output = super().forward(images, output_size)
        return output + 0.01 * (output - output.detach())


def test_a_network_that_is_wrong_has_no_time(quick, monkeypatch):
    def convert(network):
        network = original(network)
        for module in network.modules():
            if isinstance(module, gemmconv.ConvTranspose2d):
                module.__class__ = _Off
        return network

    original = gemmconv.convert
    monkeypatch.setattr(gemmconv, "convert", convert)
    status, rows = quick(networks, "--networks", "fsrcnn")
    assert status == 1
    outcomes = {(row.step, row.status, row.ratio is None) for row in rows}
    assert outcomes == {(INFERENCE, "ok", False), (TRAINING, "wrong", True)}


def test_networks_are_compiled_and_a_failure_of_that_is_a_row(quick, monkeypatch):
    monkeypatch.setattr(networks, "COMPILE", {"compile": {"backend": "eager"}, "reduce-overhead": {"backend": "none"}})
    status, rows = quick(networks, "--networks", "fsrcnn", "--modes", "fp32", "--run", "compile,reduce-overhead")
    assert status == 0
    assert [(row.mode, row.status) for row in rows] == [("compile", "ok")] * 2 + [("reduce-overhead", "failed")] * 2
    assert re.fullmatch("RuntimeError: torch's own network: .*none.*; the converted one: .*none.*", rows[-1].reason)


def test_a_row_says_whose_network_fails(quick, monkeypatch):
    def compiled(network, **options):
        if any(type(module) is torch.nn.ConvTranspose2d for module in network.modules()):
            raise AssertionError("torch's strides")
        return network

    monkeypatch.setattr(torch, "compile", compiled)
    rows = quick(networks, "--networks", "fsrcnn", "--modes", "fp32", "--run", "compile")[1]
    expected = "RuntimeError: torch's own network: AssertionError: torch's strides; the converted one: runs"
    assert [(row.status, row.reason) for row in rows] == [("failed", expected)] * 2


def test_settings_come_back():
    def now():
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        return cudnn.conv.fp32_precision, matmul.fp32_precision, cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark

    before = now()
    for precision, expected in (("tf32", ("tf32", "tf32", "high")), ("fp32", ("none", "ieee", "highest"))):
        with networks.settings(precision):
            assert (*now()[:2], torch.get_float32_matmul_precision()) == expected
        assert now() == before


def test_layers_of_networks_are_found():
    counts = {name: len(networks.layers_of(name, shape)) for name, (_, shape, _) in networks.NETWORKS.items()}
    assert counts == {"dcgan": 5, "unet": 4, "pose": 3, "fsrcnn": 1, "hifigan": 4}
    (layer,) = networks.layers_of("fsrcnn", networks.NETWORKS["fsrcnn"][1])
    assert layer.layer == "n16 c56x1 k9 h128 w128 s3 p4 op2 bias"


def test_gradients_of_transposed_convolutions_are_held_against_float64_one_by_one():
    network, images, exact = networks._made("unet", networks.NETWORKS["unet"][2], CPU)
    own = {name for name, part in network.named_modules() if isinstance(part, nn.ConvTranspose2d)}
    names = {f"{name}.{parameter}" for name in own for parameter in ("weight", "bias")}
    assert set(exact[INFERENCE]) == {"output"}
    assert set(exact[TRAINING]) == {"output", "other gradients", *names}
    assert all(one.dtype == torch.float64 for results in exact.values() for one in results.values())
    output = networks._call(network.train(), network, images, TRAINING, "fp32")
    found = networks._grouped(network, networks._tensors(network, output, TRAINING))
    assert max(networks.errors_of(found, exact[TRAINING]).values()) < 1e-3
    del found["up.0.weight"]
    assert networks.errors_of(found, exact[TRAINING])["up.0.weight"] == float("inf")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--networks", "vgg"), "--networks: must be of dcgan"),
        (("--modes", "fp8"), "--modes: must be of tf32"),
        (("--quick",), "--quick: needs --out"),
        (("--run", "graph"), "graph needs a CUDA device"),
        (("--modes", "tf32-channels_last"), "tf32-channels_last needs a CUDA device"),
    ],
)
def test_networks_refuse(flags, message, capsys):
    with pytest.raises(SystemExit):
        networks.main(["--device", "cpu", *flags])
    assert message in capsys.readouterr().err


def test_files_of_another_machine_are_refused(quick, tmp_path, capsys):
    turns_of(turn_of()).save(tmp_path / "networks.json")
    with pytest.raises(SystemExit):
        quick(networks)
    assert "has rows of NVIDIA H200; give another folder" in capsys.readouterr().err


def test_the_host_is_measured(quick, capsys):
    status, rows = quick(host, "--layers", "k2,signal", "--precision", "fp32,bf16")
    assert status == 0
    assert [row.status for row in rows] == ["ok"] * 2 * 2 * 2 * len(STEPS)
    assert {row.mode for row in rows} == {"eager"}
    assert all(row.ratio > 0 and row.kernels and row.torch_peak_bytes is None for row in rows)
    with pytest.raises(SystemExit):
        quick(host, "--precision", "tf32")
    assert "tf32 needs a CUDA device" in capsys.readouterr().err


def test_a_layer_that_is_wrong_has_no_host_time(quick, monkeypatch):
    monkeypatch.setattr("gemmconv.ConvTranspose2d", _Off)
    status, rows = quick(host, "--layers", "k2", "--precision", "fp32", "--layout", "nchw")
    assert status == 1
    assert [row.status for row in rows] == ["ok", "ok", "wrong"]
    assert rows[-1].ratio is None


@pytest.mark.gpu
def test_every_run_mode_of_networks_on_the_gpu(tmp_path):
    flags = "--device cuda --quick --networks dcgan,fsrcnn --modes tf32,bf16 --run eager,graph"
    assert networks.main([*flags.split(), "--out", str(tmp_path)]) == 0
    rows = list(Turns.load(tmp_path / "networks.json").rows.values())
    assert [row.reason for row in rows] == [""] * 16
    assert all(row.torch_peak_bytes and row.ours_peak_bytes for row in rows if row.mode == "eager")


@pytest.mark.gpu
def test_host_on_the_gpu(tmp_path):
    assert host.main(["--device", "cuda", "--quick", "--out", str(tmp_path), "--layers", "k3,depthwise"]) == 0
    rows = list(Turns.load(tmp_path / "host.json").rows.values())
    assert [row.reason for row in rows] == [""] * 36


def test_kernels_are_compiled_ahead_for_auto_alone(monkeypatch):
    pytest.importorskip("cuda.core", reason="kernels are loaded by the cuda-core package")
    from gemmconv.runtime import launch

    loaded = []
    monkeypatch.setattr(precompile, "only_compile", lambda arch: None)
    monkeypatch.setattr(launch, "load", lambda name, *arguments: loaded.append(name))
    problem = host.LAYERS["k3"].problem
    chosen = gemmconv.explain(problem, gpu="H100", dtype=torch.bfloat16)
    precompile._compile((problem, "bf16", "nchw", ("forward",), chosen.config.spec, "sm_90a", True))
    assert chosen.kernel.startswith("sm90/")
    assert set(loaded) == {"weights/pack.cu", chosen.kernel + ".cu"}


# What is made from the files.


def a_table():
    """Rows of two networks and the host; a training step and a compiled one lose, another failed."""
    memory = {"torch_peak_bytes": 4 << 20, "ours_peak_bytes": 3 << 20, "peak_ratio": 0.75}
    failed = {"ratio": None, "itself": None, "status": "failed", "reason": "Unsupported: x"}
    layer = {"suite": "host", "shape": "n1 c8x8 k3 h4 w4", "kernels": "direct/forward"}
    return [
        turn_of(ratio=2.0, **memory),
        turn_of(step=TRAINING, ratio=0.5, **memory),
        turn_of(mode="compile", ratio=0.99, itself=0.98),
        turn_of(mode="compile", step=TRAINING, **failed),
        turn_of(workload="unet", ratio=4.5),
        *(turn_of(**layer, workload="k3", step=step, ratio=1.5, torch_ms=0.03, ours_ms=0.02) for step in STEPS),
        turn_of(**layer, workload="k4", ratio=0.6, torch_ms=0.012, ours_ms=0.02),
    ]


def test_report_shows_first_what_a_user_waits_for(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_RESULTS", tmp_path)
    for suite in ("networks", "host"):
        turns_of(*(row for row in a_table() if row.suite == suite)).save(tmp_path / "gpu" / f"{suite}.json")
    results_of(*losing_and_winning()).save(tmp_path / "gpu" / "public.json")
    assert report.main(["--page", str(page_in(tmp_path))]) == 0
    text = (tmp_path / "results.md").read_text()
    assert "## What you wait for\n\nNVIDIA H200, gemmconv 0.1 (def)" in text
    assert "(networks eager, networks compile, host eager)." in text
    device = text.index("## Device time, layer by layer")
    slower = text.index("**Slower than torch in 2 of 4 rows**, in 1 by more than torch differs from itself.")
    worst = text.index("| dcgan | tf32 | nchw | eager | training | 2.000 | 1.000 | 0.50x | 1.00x |")
    nearly = text.index("| dcgan | tf32 | nchw | compile | inference | 2.000 | 1.000 | 0.99x | 0.98x |")
    table = text.index("| workload | precision | layout | eager inference | eager training | compile inference | co")
    assert slower < worst < nearly < table < device
    assert "- failed: dcgan, tf32 nchw, compile training: Unsupported: x" in text
    assert "| dcgan | tf32 | nchw | 2.00x | 0.50x | 0.99x | failed |" in text
    assert "| unet | tf32 | nchw | 4.50x | - | - | - |" in text
    assert "| geometric mean |  |  | 3.00x | 0.50x | 0.99x | - |" in text
    assert "| dcgan | tf32 | nchw | 4 / 3 (0.75x) | 4 / 3 (0.75x) |" in text
    assert "**Slower than torch in 1 of 4 rows**" in text
    assert "| tf32 | nchw | 0.95x | 0.60x | 1.50x | 1.50x | 1.50x | 1.50x |" in text
    assert "direct/forward" not in text
    assert "kb65" in text[device:]
    full = (tmp_path / "gpu" / "summary.md").read_text()
    parts = [full.index(part) for part in ("# What a user waits for", "dcgan", "# Device time", "kb65")]
    assert parts == sorted(parts)
    assert "30.0 / 20.0 (1.50x) | 30.0 / 20.0 (1.50x) | 30.0 / 20.0 (1.50x) | direct/forward |" in full
    assert waiting.NOT_MEASURED not in text + full


def test_report_lists_the_worst_alone_on_the_page():
    rows = [turn_of(shape=str(i), ratio=0.5 + i / 100) for i in range(12)]
    short, whole = ("\n\n".join(waiting.parts(rows, link)) for link in ("results", ""))
    assert short.count("0.5") - short.count("0.50x | 1.00x") < whole.count("0.5")
    assert "The worst (all: [summary.md](results/summary.md)):" in short
    assert "0.61x" not in short.split("| workload")[0]
    assert "0.61x" in whole.split("| workload")[0]


def test_report_leaves_turns_of_older_sources_out(tmp_path):
    older, newer = (
        {**ABOUT, "source": source, "date": f"2026-01-0{day}", "ceilings": {}} for source, day in (("a1", 1), ("b2", 2))
    )
    rows = [turn_of(), turn_of(ratio=0.5), turn_of(step=TRAINING, run=1)]
    rows += [turn_of(suite="host"), turn_of(mode="compile")]
    assert waiting.newest(rows, [older, newer]) == rows[2:]  # a mode of its own, however old
    text = report.full([], [], (rows, [older, newer]))
    assert "Not here: 2 rows of an older gemmconv, 1 of them slower than torch." in text
    assert "2026-01-02 (networks eager); " in text
    assert "2026-01-01 (host eager, networks compile)." in text
    assert "Device time" not in text


def test_report_takes_the_newest_of_each_suite_by_turns(tmp_path, monkeypatch):
    """The GPU of a suite's rows does not matter. Rows of a CPU are shown elsewhere."""
    monkeypatch.setattr(report, "_RESULTS", tmp_path / "results")
    page = page_in(tmp_path)

    def measured(name, suite, day, ratio):
        path = tmp_path / "results" / name / f"{suite}.json"
        about = {**ABOUT, "gpu": name, "date": f"2026-01-0{day}"}
        turns_of(turn_of(suite=suite, ratio=ratio), about=about).save(path)

    measured("one", "networks", 2, 0.52)
    measured("one", "host", 3, 0.53)
    measured("other", "networks", 4, 0.54)
    measured("other", "host", 1, 0.51)
    measured("cpu-x", "networks", 5, 0.55)
    assert report.main(["--page", str(page)]) == 0
    text = page.read_text()
    assert text.index("2026-01-04 (networks eager)") < text.index("0.54x") < text.index("2026-01-03 (host eager)")
    assert not [one for one in ("0.51x", "0.52x", "0.55x") if one in text]
    assert "| dcgan | tf32 | nchw | 0.52x |" in (tmp_path / "results" / "one" / "summary.md").read_text()


def test_check_compares_turns(tmp_path, capsys):
    slower = turn_of(ours_ms=1.2, ours_p20_ms=1.19, ours_p80_ms=1.21)
    for name, row in (("old", turn_of()), ("new", slower)):
        turns_of(row, turn_of(step=TRAINING)).save(tmp_path / name / "networks.json")
    assert check.main(tmp_path / "old", tmp_path / "old") == 0
    for ending in ("", "networks.json"):
        assert check.main(tmp_path / "old" / ending, tmp_path / "new" / ending) == 1
        assert "dcgan tf32 inference" in capsys.readouterr().out.split("slower: 1")[1]
