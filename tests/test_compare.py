"""The comparison: layers, the photograph, and that a wrong result is never timed."""

import argparse
import io
import json
import re
import time
from dataclasses import replace

import pytest
import torch

import gemmconv.__main__ as command_line
from gemmconv import compare
from gemmconv.algorithms.gemm_col2im import GemmCol2im
from gemmconv.algorithms.native import Native
from gemmconv.compare import layers, measure, photo, report, timing
from gemmconv.explain import explain_problem as explain
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config
from tests.processes import output_of
from tests.wrong import Wrong, off, take_alone

Console = pytest.importorskip("rich.console", reason="the comparison needs the extra demo").Console
pytest.importorskip("matplotlib", reason="the comparison needs the extra demo")

CPU = torch.device("cpu")
SMALL = layers.Layer("small", Problem(2, 4, 6, 2, (16, 24), (3, 5), stride=(2, 1)), bias=True)
NEEDED = ["--in-channels", "4", "--out-channels", "6", "--kernel", "3", "--height", "8", "--width", "9"]


def parse(*flags):
    parser = argparse.ArgumentParser(exit_on_error=False)
    layers.add_layer_arguments(parser)
    return layers.layer_from_arguments(parser.parse_args([*NEEDED, *flags]))


@pytest.fixture(autouse=True)
def _short_timing(monkeypatch):
    monkeypatch.setattr(measure, "medians_ms", lambda runs, device: [1.0] * len(runs))


def text_of(table):
    file = io.StringIO()
    Console(width=80, file=file, force_terminal=True, color_system="standard").print(table)
    return file.getvalue()


# Layers.


def test_layer_takes_every_flag_and_has_torchs_defaults():
    layer = parse()
    assert (layer.problem, layer.bias, layer.shrink_note()) == (Problem(1, 4, 6, 1, (8, 9), (3, 3)), True, None)
    flags = "--batch 2 --stride 3x2 --padding 1,0 --output-padding 1 --dilation 2 --groups 2 --no-bias"
    layer = parse(*flags.split())
    assert layer.problem == Problem(2, 4, 6, 2, (8, 9), (3, 3), (3, 2), (1, 0), (1, 1), (2, 2))
    assert not layer.bias
    assert layer.describe() == (
        "N=2, C 4 -> 6, kernel 3x3, stride 3x2, padding 1x0, output padding 1, dilation 2, groups 2, image 8x9, no bias"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stride 0", "argument --stride: must be at least 1, got 0"),
        ("--kernel 3x3x3", "argument --kernel: must be one integer or two as in 3x5, got '3x3x3'"),
        ("--padding=-1", "argument --padding: must be at least 0, got -1"),
        ("--batch two", "argument --batch: must be an integer, got 'two'"),
        ("--groups 4", "--out-channels must be divisible by --groups, got 6 and 4"),
        ("--output-padding 1", "output_padding must be less than the larger of stride and dilation"),
        ("--padding 9", "padding must"),
    ],
)
def test_layer_refuses_with_flag_and_value(flags, message):
    with pytest.raises((argparse.ArgumentError, ValueError), match=re.escape(message)):
        parse(*flags.split())


def test_shrink_says_by_how_much():
    notes = [layers.shrink(layer).shrink_note() for layer in layers.DEMO_LAYERS]
    assert notes == [
        "batch 64 -> 1, image 128x256 -> 32x64",
        "batch 64 -> 1, image 128x256 -> 32x64",
        "batch 8 -> 1, image 512x512 -> 32x64",
        "batch 16 -> 1",
        "batch 16 -> 1",
    ]


def test_shrink_leaves_a_small_layer_alone_and_ends_when_nothing_can_get_smaller():
    assert layers.shrink(SMALL) is SMALL
    layer = replace(SMALL, problem=replace(SMALL.problem, padding=(1, 2)))
    problem = layers.shrink(layer, flops=0, traffic=0).problem
    assert problem.batch == 1
    assert min(problem.output_size) >= 1


# The photograph.


@pytest.mark.parametrize("shape", [(2, 3, 64, 48), (8, 64, 32, 32), (4, 6, 512, 512), (1, 4, 900, 700)], ids=str)
def test_windows_are_normalised_and_all_differ(shape):
    x = photo.windows(shape)
    assert (x.shape, x.dtype, x.is_contiguous()) == (shape, torch.float32, True)
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert torch.equal(x, photo.windows(shape))
    rows = x.flatten(0, 1).flatten(1)
    assert len({row.numpy().tobytes() for row in rows}) == len(rows)
    assert float(rows.std(dim=1).min()) > 0


# Rows.


def test_measure_gives_a_row_for_torch_auto_and_each_algorithm():
    steps = []
    rows = measure.measure_layer(SMALL, CPU, torch.float32, None, steps.append)
    assert [row.algorithm for row in rows] == [measure.BASELINE, measure.AUTO, *(a.name for a in measure.ALGORITHMS)]
    assert len(steps) == measure.STEPS_PER_LAYER
    (chosen,) = [row.algorithm for row in rows if row.chosen]
    backward = explain(SMALL.problem, bias=True).gradients
    assert [row.taken for row in rows if row.taken] == [rows[1].taken] == [(chosen, *backward)]
    config = Config(SMALL.problem, torch.float32, CPU, bias=True)
    assert [row.skipped for row in rows] == [None, None, *(a.why_not(config) for a in measure.ALGORITHMS)]
    for row in (row for row in rows if row.skipped is None):
        assert not row.wrong
        assert 0 < row.error < 1e-6
        assert row.forward_ms == row.both_ms == row.forward_ratio == row.both_ratio == 1.0 or (
            row.algorithm == measure.BASELINE
        )


def test_workspace_leaves_out_what_torch_manages():
    config, gemm, native = Config(SMALL.problem, torch.float32, CPU), GemmCol2im(), Native()
    assert measure._workspace_bytes((native, gemm, native), config) == gemm.workspace_bytes(config, "input_grad")
    assert measure._workspace_bytes((native, native, native), config) is None


def test_measure_puts_the_benchmark_flag_back(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    seen = []

    def record(runs, device):
        for run in runs:
            run()
            seen.append(torch.backends.cudnn.benchmark)
        return [1.0] * len(runs)

    monkeypatch.setattr(measure, "medians_ms", record)
    rows = measure.measure_layer(SMALL, CPU, torch.float32, None)
    assert not torch.backends.cudnn.benchmark
    others = [row for row in rows[1:] if row.skipped is None]
    assert seen == [True, *[False] * len(others)] * 2


@pytest.mark.parametrize("direction", ["forward", "input_grad", "weight_grad"])
def test_wrong_result_is_red_and_has_no_times(monkeypatch, direction):
    take_alone(monkeypatch, Wrong(direction, off))
    right, auto, wrong = measure.measure_layer(SMALL, CPU, torch.float32, None)
    assert not right.wrong
    assert auto.wrong
    assert wrong.wrong
    assert wrong.error_is_wrong == (direction == "forward")
    assert wrong.forward_ms is wrong.both_ms is wrong.forward_ratio is wrong.both_ratio is None
    line = next(line for line in text_of(report.table([right, wrong])).splitlines() if "native" in line)
    assert re.search(r"\x1b\[1;31m *1\.0e-03\x1b\[0m", line)
    assert "1.000" not in line
    assert any(note.startswith("native is wrong") and "no times" in note for note in report.notes([right, wrong]))


def test_not_a_number_is_wrong():
    assert measure.Row(SMALL, "x", "ieee", error=float("nan"), gradient_error=0.0, bar=1e-5).wrong


def test_refused_algorithm_is_skipped_with_its_reason(monkeypatch):
    refuses = Native()
    monkeypatch.setattr(refuses, "why_not", lambda config: "kernel must be 1x1, got 3x5")
    monkeypatch.setattr(measure, "ALGORITHMS", (refuses,))
    rows = measure.measure_layer(SMALL, CPU, torch.float32, None)
    assert rows[2].forward_ms is None
    assert report.notes(rows)[1:] == ["native was not run: kernel must be 1x1, got 3x5"]


def auto_row(forward, both):
    taken = "fused", "fused", "native"
    return measure.Row(SMALL, measure.AUTO, "ieee", taken=taken, forward_ratio=forward, both_ratio=both)


def test_summary_counts_layers_that_are_slower_and_that_have_no_ratio():
    assert report.summary([[auto_row(4.0, 1.0)], [auto_row(0.25, 1.0)], [auto_row(None, None)]]) == (
        "auto: 1.00x torch's speed forward (geometric mean of 2 of 3 layers; least 0.25x), "
        "1.00x with gradients (least 1.00x)"
    )
    assert report.summary([[auto_row(None, None)]]) == "auto: no ratio to torch, as noted above"


def test_table_colours_what_auto_gains_and_notes_what_it_takes():
    row = auto_row(1.02, 0.96)
    auto, fused = text_of(report.table([row, replace(row, algorithm="fused", chosen=True)])).rstrip().splitlines()[-2:]
    assert re.search(r"\x1b\[1;32m *1\.02x\x1b\[0m.*\x1b\[31m *0\.96x\x1b\[0m", auto)
    assert fused.startswith(" fused * ")
    assert "\x1b" not in fused
    assert report.notes([row]) == ["auto takes fused forward, fused (input) and native (weight) for gradients"]


def test_table_says_what_was_made_smaller():
    layer = layers.shrink(replace(SMALL, problem=replace(SMALL.problem, batch=64)), flops=SMALL.problem.useful_flops)
    text = text_of(report.table([measure.Row(layer, measure.BASELINE, "ieee")]))
    assert "made smaller for the CPU: batch 64 -> 2" in text


def test_times_are_medians_of_runs_that_take_turns(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    turns = []

    def slow():
        turns.append("slow")
        next(clock)

    assert timing.medians_ms([lambda: turns.append("fast"), slow], CPU) == [1000, 2000]
    assert turns == ["fast", "slow"] * 4  # such long rounds are three, after one that is not counted
    assert timing.medians_ms([], CPU) == []


@pytest.mark.parametrize(("milliseconds", "rounds"), [(1, 50), (110, 9), (350, 5), (510, 3), (3000, 3)])
def test_rounds_on_a_cpu_are_bounded(monkeypatch, milliseconds, rounds):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def run():
        now[0] += milliseconds * 1e-3

    assert timing.medians_ms([run], CPU) == [pytest.approx(milliseconds)]
    assert round(now[0] / (milliseconds * 1e-3)) == 1 + rounds


def test_estimates_say_how_long_a_gpu_rests(monkeypatch):
    calls = []

    def rounds(runs, device, count, estimates_ms=()):
        calls.append([*estimates_ms])
        return [[3.0, 2.0 + i] for i in range(len(runs))]

    monkeypatch.setattr(timing, "cuda_rounds", rounds)
    assert timing.medians_ms([lambda: None] * 2, torch.device("cuda")) == [2.5, 3.0]
    assert calls == [[], [2.0, 3.0]]


@pytest.mark.gpu
def test_a_gpu_rests_as_long_as_a_run_takes(monkeypatch):
    """Else it reaches its power limit and slows down, sooner or later."""
    waits, sleep = [], torch.cuda._sleep
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: [waits.append(cycles), sleep(cycles)])
    device = torch.device("cuda", torch.cuda.current_device())

    def rests(*estimates_ms):
        waits.clear()
        timing.cuda_rounds([lambda: None] * 3, device, 1, estimates_ms)
        return [round(1e3 * cycles / timing._CYCLES_A_SECOND, 3) for cycles in waits]

    short = rests()
    assert len(short) == 6  # a round that counts, after one that does not
    assert rests(3.0, 50.0, 0.01) == [3.0, 10.0, short[0]] * 2


@pytest.mark.gpu
def test_a_gpu_waits_for_the_host_but_not_for_what_only_the_first_run_does(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append)
    device = torch.device("cuda", torch.cuda.current_device())
    timing.cuda_rounds([lambda: time.sleep(0.01)], device, 2)
    assert waits[:2] == [timing._LEAST_HEAD_START_CYCLES, timing._SECOND_HEAD_START_CYCLES]
    assert waits[2] >= 0.01 * timing._CYCLES_A_SECOND * timing._HOST_MARGIN


# The command line.


def test_compare_writes_table_chart_and_rows(tmp_path, capsys):
    out, file = tmp_path / "new" / "folder", tmp_path / "newer" / "rows.json"
    names = [algorithm.name for algorithm in measure.ALGORITHMS]
    flags = ["--device", "cpu", "--out", str(out), "--json", str(file)]
    assert command_line.main(["compare", *NEEDED, *flags]) == 0
    assert (out / "times.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("torch", *names, "times.png", f"rows: {file}"))
    assert "auto: 1.00x torch's speed forward, 1.00x with gradients\n" in printed
    assert "cuDNN" not in printed
    found = json.loads(file.read_text())
    assert (found["dtype"], found["versions"]["torch"]) == ("float32", torch.__version__)
    assert found["device"].startswith("CPU, ")
    (layer,) = found["layers"]
    assert layer["problem"]["kernel_size"] == [3, 3]
    baseline, auto, *others = layer["rows"]
    assert (baseline["algorithm"], auto["algorithm"]) == (measure.BASELINE, measure.AUTO)
    assert (baseline["forward_ms"], auto["both_ms"], auto["forward_ratio"]) == (1.0, 1.0, 1.0)
    assert len(auto["taken"]) == 3
    assert 0 < auto["error"] < auto["bar"]
    assert [row["algorithm"] for row in others] == names


def test_json_has_none_for_an_error_that_is_no_number():
    row = measure.Row(SMALL, "x", "ieee", error=float("nan"), gradient_error=float("inf"), bar=1e-5)
    (layer,) = report.as_json([[row]], CPU, torch.float32)["layers"]
    (found,) = layer["rows"]
    assert (found["error"], found["gradient_error"], found["wrong"]) == (None, None, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--device tpu", "argument --device: must be cpu, cuda or cuda:INDEX, got 'tpu'"),
        ("--device cpu --precision tf32", "argument --precision: tf32 is for float32 on a CUDA device"),
        ("--dtype int8", "argument --dtype: invalid choice"),
        ("--groups 5", "--in-channels must be divisible by --groups, got 4 and 5"),
        ("--out pyproject.toml", "argument --out: cannot make the folder"),
        ("--out /proc", "argument --out: cannot make the folder /proc or write into it"),
        ("--json /proc/rows.json", "argument --json: cannot make the folder /proc or write into it"),
        ("--json /tmp", "argument --json: must be a file, got the folder /tmp"),
    ],
)
def test_compare_refuses_bad_flags(flags, message, capsys, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    with pytest.raises(SystemExit) as raised:
        command_line.main(["compare", *NEEDED, *flags.split()])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(compare, "find_spec", lambda name: None if name == "rich" else True)
    with pytest.raises(ModuleNotFoundError, match=r"needs rich; run: pip install 'gemmconv\[demo\]'"):
        compare.require_demo_extra()


def test_command_line_help_needs_no_extra():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['rich', 'matplotlib', 'PIL']))\n"
        "from gemmconv.__main__ import main; main(['demo', '--help'])"
    )
    assert "--precision" in output_of(code)
