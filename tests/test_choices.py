"""benchmarks.choices: which candidates take part, what is said of wrong ones, the time that is left, and the file."""

import json
import time
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the package")

from benchmarks import choices, fit
from benchmarks.choices import KERNELS, Case, Trial, sample
from benchmarks.measure import DeviceLost
from benchmarks.precompile import in_processes
from benchmarks.workloads import custom
from gemmconv.errors import CompileError
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Kernel
from gemmconv.runtime import compiler, launch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LAYER = "n2 c32x32 k3 h16 w16 s2"
# Layers and formats that kernels are for.
LAYERS = {
    "sm90/implicit_gemm": (LAYER, "channels_last"),
    "sm90/gemm_fold_narrow": ("n2 c32x4 k3 h16 w16 s2", "channels_last"),
    "sm90/gemm_fold": ("n5 c32x32 k4 h8 w8 s2", "nchw"),
    "sm90/gemm_fold_pixels": ("n5 c32x32 k3 h8 w8 s2", "nchw"),
    "sm90/gemm_fold_rows": ("n2 c32x32 k3 h8 w64 s2", "nchw"),
    "sm90/gemm_depth_to_space": ("n2 c32x32 k2 h8 w16 s2", "nchw"),
    "sm90/implicit_gemm_nhwc": (LAYER, "channels_last"),
    "direct/forward": (LAYER, "channels_last"),
    "direct/forward_mma": (LAYER, "channels_last"),
}
SMALL, OTHER = "n2 c2x3 k3 h4 w5 s2 p1 bias", "n1 c4x4 k2 h3 w3"


def case_of(layer=SMALL, precision="fp32", layout="nchw"):
    return Case(custom(layer), precision, layout)


@dataclass(frozen=True)
class Plan:
    """A candidate of a kernel that torch computes.

    Attributes:
        us: its time, as the timer says.
        damage: done to what it computes.
    """

    problem: Problem
    size: tuple[int, int]
    cycles_each: int
    us: float
    damage: str = ""

    @property
    def cycles(self):
        return self.size[0] * self.cycles_each


class Call:
    """A prepared plan; counts calls."""

    made = 0

    def __init__(self, config, plan):
        self.problem, self.plan, self.channels_last = config.problem, plan, config.memory_format is torch.channels_last

    def __call__(self, x, weight, bias):
        Call.made += 1
        assert x.is_contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)
        p = self.problem
        output = torch.nn.functional.conv_transpose2d(
            x, weight, bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation
        )
        if self.plan.damage == "off":
            output[-1] *= 1.001
        elif self.plan.damage == "unwritten":
            output[-1, 0, 0, 0] = torch.nan
        elif self.plan.damage == "raises":
            raise ArithmeticError("first line\nsecond line")
        elif self.plan.damage == "lost":
            raise DeviceLost("not done after 20 s")
        return output


def kernel_of(*plans):
    """A kernel with these candidates, each ``(cycles, us)`` or ``(cycles, us, damage)``; none for one input channel."""

    def candidates(config):
        made = [Plan(config.problem, (cycles, 1), 1, *rest) for cycles, *rest in plans]
        return made if config.problem.in_channels > 1 else []

    return Fake(candidates)


class Fake(Kernel):
    """A kernel with the candidates that a function gives."""

    name = "fake"

    def __init__(self, candidates):
        self.candidates = candidates

    def why_not(self, config, direction):
        return None

    def tiles(self, config, direction):
        return self.candidates(config)

    def seconds(self, config, direction, tile):
        return 1e-6 * tile.cycles

    def program(self, config, direction, tile):
        return None

    def prepare(self, config, direction, tile):
        return Call(config, tile)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """measured(kernel, *cases, ...): the exit status and the file of a run on the CPU, with times that plans name."""

    def rounds(runs, device, before, count):
        assert count == 5
        return [[1e-3 * run.func.plan.us * factor for factor in (9, 1, 0.5, 1, 3)] for run in runs]

    monkeypatch.setattr(choices, "cuda_rounds", rounds)
    monkeypatch.setattr(choices, "compile_all", lambda kernel, trials, device: None)
    monkeypatch.setattr(Call, "made", 0)

    def run(kernel, *cases, count=8, seconds=60.0, kept=None):
        out = tmp_path / "new" / "choices.json"
        status = choices.run(kernel, cases or [case_of()], CPU, count, seconds, out, kept)
        return status, json.loads(out.read_text())

    return run


# Which candidates take part.


def plans_of(*cycles):
    return [Plan(None, (i, one), 1, float(one)) for i, one in enumerate(cycles)]


def estimated(plans):
    return [(1e-6 * plan.cycles, plan) for plan in plans]


def test_sample_has_the_choice_and_is_the_same_each_time():
    plans = estimated(Plan(None, (1000 - 7 * i % 101, i), 1, 0.0) for i in range(100))
    ordered = sorted(plans, key=lambda one: one[0])
    for count in (1, 2, 7, 40):
        found = sample(iter(plans), count)
        assert len(found) == len(set(found)) == count
        assert found[0] == min(plans, key=lambda one: one[0])
        assert found[: -(-count // 2)] == ordered[: -(-count // 2)]
        assert [seconds for seconds, _ in found] == sorted(seconds for seconds, _ in found)
        assert found == sample(plans, count)
    assert sample(plans, 40)[20:] != ordered[20:40]


def test_sample_takes_what_there_is():
    equal = estimated(Plan(None, (5, i), 1, 0.0) for i in range(3))
    assert sample(equal, 12) == equal
    assert sample(equal, 4)[0] == equal[0]
    assert sample([], 12) == []


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_first_candidate_is_the_kernels_own_choice(name, precision):
    layer, layout = LAYERS[name]
    case = case_of(layer, precision, layout)
    config, kernel = case.config(GPU), KERNELS[name]
    choice = kernel.tile(config, "forward") if kernel.why_not(config, "forward") is None else None
    found = [tile for _, tile in choices.sampled(kernel, case, GPU, 1)]
    assert found == ([] if choice is None else [choice])
    declined = {
        **dict.fromkeys(KERNELS, ("fp32",)),
        **{"sm90/implicit_gemm": (), "sm90/gemm_fold_narrow": (), "direct/forward": ()},
    }
    assert (choice is None) == (precision in declined[name])


# Checking and timing.


def test_choice_is_compared_with_the_best(measured, capsys):
    kernel = kernel_of((30, 20.0), (10, 25.0), (20, 50.0))
    status, file = measured(
        kernel, case_of(), case_of(precision="tf32", layout="channels_last"), case_of("c1 k2 h3 w3")
    )
    assert status == 0
    assert [(row["estimate"], row["median_us"], row["status"]) for row in file["rows"][:3]] == [
        (pytest.approx(10e-6), pytest.approx(25.0), "ok"),
        (pytest.approx(20e-6), pytest.approx(50.0), "ok"),
        (pytest.approx(30e-6), pytest.approx(20.0), "ok"),
    ]
    assert all(0 <= row["error"] < 1e-6 for row in file["rows"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (line,) = (line for line in lines if line[:2] == ["fp32", "nchw"])
    assert line[2:-3] == [*custom(SMALL).layer.split(), "3", "20.0", "25.0", "1.25"]
    assert line[-2:] == ["size=30x1", "us=20.0"]
    text = "\n".join(map(" ".join, lines))
    assert f"tf32: chosen/best 1.250 (geometric mean of 1), worst 1.25 ({custom(SMALL).layer}, channels_last)" in text
    assert "without candidates: 1 of 3; not measured: 0" in text


def test_times_are_kept_for_fits(measured, tmp_path):
    kept = tmp_path / "choices.csv"
    measured(kernel_of((10, 25.0), (20, 5.0, "off")), kept=kept)
    (row,) = fit.read(kept)
    assert (row.layer, row.precision, row.layout) == (custom(SMALL).layer, "fp32", "nchw")
    assert (row.kernel, row.direction, row.seconds) == ("fake", "forward", pytest.approx(25e-6))
    assert row.tile == "size=10x1 cycles_each=1 us=25.0 damage="


def test_summary_is_over_layers_and_for_each_precision(measured, capsys):
    def candidates(config):  # the ratio is 4 where two channels come in, else 1
        return [Plan(config.problem, (i, 1), 1, us) for i, us in ((1, 20.0 / config.problem.in_channels), (2, 2.5))]

    layers = (custom("c2 k2 h3 w3"), custom("c8 k2 h3 w3"))
    cases = [Case(layer, precision, "nchw") for precision in ("fp32", "fp16") for layer in layers]
    measured(Fake(candidates), *cases)
    out = capsys.readouterr().out
    for precision in ("fp32", "fp16"):
        assert f"{precision}: chosen/best 2.000 (geometric mean of 2), worst 4.00 ({layers[0].layer}, nchw)" in out


@pytest.mark.parametrize(("damage", "complaint"), [("off", "error 1.0e-03"), ("unwritten", "error nan")])
def test_wrong_candidate_has_no_time(measured, capsys, damage, complaint):
    status, file = measured(kernel_of((10, 30.0), (20, 5.0, damage), (30, 20.0)))
    assert status == 1
    right, wrong, other = file["rows"]
    assert (wrong["status"], wrong["median_us"]) == ("wrong", None)
    assert wrong["error"] == (None if damage == "unwritten" else pytest.approx(1e-3, rel=0.01))
    assert right["status"] == other["status"] == "ok"
    out = capsys.readouterr().out
    assert f"wrong: fp32 nchw {custom(SMALL).layer}, size=20x1" in out
    assert f": {complaint}" in out
    assert "chosen/best 1.500" in out


def test_wrong_choice_has_no_ratio(measured, capsys):
    status, _ = measured(kernel_of((10, 30.0, "off"), (20, 5.0)))
    assert status == 1
    out = capsys.readouterr().out
    assert "chosen/best" not in out
    (line,) = (line for line in out.splitlines() if line.startswith("fp32"))
    assert line.split()[-7:-4] == ["5.0", "-", "-"]


def test_bars_are_those_of_the_precision(measured):
    kernel = kernel_of((10, 1.0, "off"))
    for precision, status in (("fp32", 1), ("tf32", 1), ("fp16", 1), ("bf16", 0)):
        assert measured(kernel, case_of(precision=precision))[0] == status


def test_candidate_that_raises_does_not_end_the_run(measured, capsys):
    status, file = measured(kernel_of((10, 1.0), (20, 1.0, "raises")), case_of(), case_of(OTHER))
    assert status == 1
    assert [row["status"] for row in file["rows"]] == ["ok", "failed", "ok", "failed"]
    assert file["rows"][1]["reason"] == "ArithmeticError: first line"
    assert ": ArithmeticError: first line" in capsys.readouterr().out


def test_memory_of_the_output_holds_nan_before_each_check(measured, monkeypatch):
    full, poisoned = torch.full, []

    def note(shape, value, **options):
        poisoned.append((Call.made, shape, value is torch.nan, options["dtype"]))
        return full(shape, value, **options)

    monkeypatch.setattr(torch, "full", note)
    measured(kernel_of((1, 1.0), (2, 1.0)), case_of(precision="fp16"))
    shape = custom(SMALL).problem.output_shape
    assert poisoned == [(0, shape, True, torch.float16), (1, shape, True, torch.float16)]


def test_lost_device_ends_the_run(measured, capsys):
    status, file = measured(kernel_of((10, 1.0), (20, 1.0, "lost"), (30, 1.0)), case_of(), case_of(OTHER))
    assert status == 1
    assert [row["status"] for row in file["rows"]] == ["untimed", "lost", "untimed"]
    out = capsys.readouterr().out
    assert "DeviceLost: not done after 20 s" in out
    assert "not measured: 2" in out
    _, file = measured(kernel_of((10, 1.0, "lost")), case_of(), case_of(OTHER))
    assert [row["status"] for row in file["rows"]] == ["lost"]


def test_device_is_lost_where_a_kernel_does_not_end_or_breaks_it(monkeypatch):
    class Event:
        def record(self):
            pass

        def query(self):
            return False

    def broken(device):
        raise RuntimeError("illegal memory access")

    cuda, error = torch.device("cuda", 0), RuntimeError("x")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(choices, "_PATIENCE_SECONDS", 0.01)
    with pytest.raises(DeviceLost) as lost:
        choices._wait(cuda)
    assert choices._is_lost(cuda, lost.value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not choices._is_lost(cuda, error)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert choices._is_lost(cuda, error)


def test_candidate_that_does_not_compile_is_left_out(measured, monkeypatch, capsys):
    kernel = kernel_of((10, 1.0), (20, 2.0))
    for index, status in ((1, 0), (0, 1)):  # the choice must compile

        def compile_all(kernel, trials, device, index=index):
            trials[index].status, trials[index].reason = "uncompiled", "CompileError: x"

        monkeypatch.setattr(choices, "compile_all", compile_all)
        found, file = measured(kernel)
        assert found == status
        assert [row["status"] for row in file["rows"]] == (["uncompiled", "ok"] if index == 0 else ["ok", "uncompiled"])


def test_run_stops_in_time(measured, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    call = Call.__call__

    def slow(self, *tensors):
        clock[0] += 1.0
        return call(self, *tensors)

    monkeypatch.setattr(Call, "__call__", slow)
    kernel, cases = kernel_of((10, 1.0), (20, 2.0)), [case_of(), case_of(OTHER), case_of(precision="tf32")]
    # A case takes two seconds to check, and is expected to take twelve to time, in which this clock stands still.
    status, file = measured(kernel, *cases, seconds=16.5)
    assert status == 0
    assert [row["status"] for row in file["rows"]] == ["ok"] * 4 + ["untimed"] * 2
    assert "not measured: 1" in capsys.readouterr().out
    clock[0] = 0.0
    _, file = measured(kernel, *cases, seconds=0.5)
    assert [row["status"] for row in file["rows"]] == ["untimed"] * 2
    assert [row["error"] is None for row in file["rows"]] == [False, True]
    _, file = measured(kernel, *cases, seconds=-1)
    assert file["rows"] == []
    assert "not measured: 3" in capsys.readouterr().out


# Compiling.


def test_jobs_compile_and_say_why_not(monkeypatch):
    asked = []

    def compile(source_name, macros, arch, *, cache):
        asked.append((source_name, arch))
        if source_name == "direct/forward_mma.cu" and macros["N_TILES"] == 1:
            raise CompileError(source_name, [], "note: x\ny.cu(3): error: no such thing\n", "")

    monkeypatch.setattr(launch, "load", launch.load)  # put back after
    monkeypatch.setattr(compiler, "compile", compile)
    config = case_of(LAYER, "tf32").config(torch.device("cuda", 0))
    kernel = KERNELS["direct/forward_mma"]
    tiles = kernel.tiles(config, "forward")
    reasons = {tile.n_tiles: choices._compile((kernel, config, tile, "sm_90a")) for tile in tiles}
    assert reasons.pop(1) == "CompileError: y.cu(3): error: no such thing"
    assert set(reasons.values()) == {""}
    asked.clear()
    kernel = KERNELS["sm90/implicit_gemm"]
    assert choices._compile((kernel, config, kernel.tile(config, "forward"), "sm_90a")) == ""
    assert asked == [("weights/pack.cu", "sm_90a"), ("sm90/implicit_gemm.cu", "sm_90a")]


def test_compile_all_notes_what_fails(monkeypatch, capsys):
    monkeypatch.setattr(launch, "architecture", lambda index: "sm_90a")
    monkeypatch.setattr(choices, "in_processes", lambda work, jobs: ["", "E: x"])
    trials = [Trial(case_of(), plan, 1e-6 * plan.cycles, False) for plan in plans_of(1, 2)]
    choices.compile_all(kernel_of(), trials, CPU)
    assert [(trial.status, trial.reason) for trial in trials] == [("untimed", ""), ("uncompiled", "E: x")]
    out = capsys.readouterr().out
    assert f"uncompiled: fp32 nchw {custom(SMALL).layer}, size=1x2 cycles_each=1 us=2.0 damage=: E: x" in out
    assert "compiled 2 candidates" in out


def test_in_processes_keeps_the_order():
    assert list(in_processes(abs, [-3, 2, -1])) == [3, 2, 1]
    assert list(in_processes(abs, [])) == []


# The file.


@pytest.mark.parametrize("name", KERNELS)
def test_rows_of_the_file_name_their_candidates(name, tmp_path):
    layer, layout = LAYERS[name]
    kernel, case = KERNELS[name], case_of(layer, "fp16", layout)
    found = sample(choices.candidates_of(kernel, case, GPU), 6)
    if not found:
        return  # not for 16 bits
    candidates = [tile for _, tile in found]
    errors = [1e-4, *[float("nan")] * len(found)]
    trials = [Trial(case, one, at, i == 0, "ok", "", errors[i], 2.5) for i, (at, one) in enumerate(found)]
    choices.save(tmp_path / "x.json", {"device": "H200", "rows": [trial.row(kernel) for trial in trials]})
    file = json.loads((tmp_path / "x.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert file["device"] == "H200"
    problem = custom(file["rows"][0]["layer"]).problem
    for row, candidate in zip(file["rows"], candidates, strict=True):
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in row["candidate"].items()}
        of_problem = {"problem": problem} if hasattr(candidate, "problem") else {}
        assert type(candidate)(**of_problem, **fields) == candidate
        assert row["estimate"] == kernel.seconds(case.config(GPU), "forward", candidate)
        assert (row["layer"], row["precision"], row["layout"], row["kernel"]) == (layer, "fp16", layout, name)
        assert (row["median_us"], row["status"], row["chosen"]) == (2.5, "ok", candidate is candidates[0])
        assert row["error"] == (1e-4 if candidate is candidates[0] else None)


def test_file_that_cannot_be_written_is_known_before_compiling(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(choices, "compile_all", lambda *_: pytest.fail("compiled first"))
    with pytest.raises(IsADirectoryError):
        choices.run(kernel_of((1, 1.0)), [case_of()], CPU, 1, 60.0, tmp_path)


def test_file_says_where_it_comes_from(measured):
    _, file = measured(kernel_of((1, 1.0)))
    assert {"device", "torch", "commit", "rows"} <= set(file)
    assert file["device"].startswith("CPU")
    assert file["torch"] == str(torch.__version__)


# The command line.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "one of --kernel and --fit is needed"),
        (["--kernel", "x"], "argument --kernel: invalid choice: 'x'"),
        (
            ["--kernel", "sm90/implicit_gemm", "--suite", "public,x"],
            "argument --suite: must be of seeds, public, models, sweep",
        ),
        (
            ["--kernel", "sm90/implicit_gemm", "--precision", "fp8"],
            "argument --precision: must be of fp32, tf32, fp16, bf16, got 'fp8'",
        ),
        (
            ["--kernel", "sm90/implicit_gemm", "--layout", ""],
            "argument --layout: must be of nchw, channels_last, got ''",
        ),
        (["--kernel", "sm90/implicit_gemm", "--layer", "n1"], "argument --layer: layer: c, k, h, w missing in 'n1'"),
        (["--kernel", "sm90/implicit_gemm", "--count", "0"], "argument --count: must be a number from 1, got '0'"),
        (["--kernel", "sm90/implicit_gemm", "--seconds", "x"], "argument --seconds: invalid float value: 'x'"),
    ],
)
def test_command_line_refuses(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        choices.main(flags)
    assert end.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_command_line_says_that_there_is_no_gpu(capsys):
    assert choices.main(["--kernel", "sm90/implicit_gemm"]) == 1
    assert "benchmarks.choices needs a CUDA device; torch finds none here" in capsys.readouterr().err


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("name", "found"), [("sm90/implicit_gemm", 3), ("direct/forward_mma", 2)])
def test_inspect_prints_the_choices(name, found, capsys):
    assert choices.main(["--kernel", name, "--inspect", "--layer", LAYER, "--precision", "tf32,fp16,fp32"]) == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["layer", "candidates", "estimate", "choice"]
    assert last == f"without candidates: {3 - found} of 3"
    assert [line.split()[0] for line in lines] == ["tf32", "fp16", "fp32"][:found]
    for line in lines:
        case = case_of(LAYER, line.split()[0])
        candidates = choices.candidates_of(KERNELS[name], case, GPU)
        seconds, choice = choices.sampled(KERNELS[name], case, GPU, 1)[0]
        fields = Trial(None, choice, seconds, True).fields
        assert line.split()[1 : -len(fields)] == [
            *("nchw", *LAYER.split(), str(len(candidates)), f"{1e6 * seconds:.1f}", "us")
        ]
        assert line.endswith(choices._text(fields))


@pytest.mark.usefixtures("no_gpu")
def test_inspect_takes_the_suites(capsys):
    assert (
        choices.main(["--kernel", "direct/forward_mma", "--inspect", "--suite", "seeds,public", "--precision", "fp16"])
        == 0
    )
    out = capsys.readouterr().out
    assert "kb71" in out
    assert "seed3" in out


@pytest.mark.gpu
def test_run_on_the_gpu(tmp_path, capsys):
    flags = ["--layer", LAYER, "--precision", "tf32", "--count", "3", "--out", str(tmp_path / "x.json")]
    assert choices.main(["--kernel", "direct/forward_mma", *flags]) == 0
    assert [row["status"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]] == ["ok"] * 3
    assert "tf32: chosen/best " in capsys.readouterr().out
