"""How much slower than the best a kernel's own choice of tile or plan is: candidates for a layer, checked and timed.

    python -m benchmarks.choices --kernel sm90/implicit_gemm --suite public,models --seconds 300 --out FILE
    python -m benchmarks.choices --kernel sm90/implicit_gemm --layer "n64 c64x128 k3x5 h128 w256" --count 40
    python -m benchmarks.choices --kernel direct/forward_mma --inspect
    python -m benchmarks.choices --kernel sm90/gemm_fold --keep
    python -m benchmarks.choices --fit sm90/gemm_fold

A kernel chooses the candidate of the least estimate. Here those of the least estimates take part, and a random sample
of the others. Estimates are fitted to the rows that --keep keeps. Needs a CUDA device, except for --inspect and --fit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import geometric_mean, median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import environment, fit
from benchmarks.contenders import LAYOUTS, PRECISIONS
from benchmarks.fit import Case, Row
from benchmarks.measure import DeviceLost
from benchmarks.precompile import in_processes, only_compile
from benchmarks.reference import random_tensors
from benchmarks.results import replace_file
from benchmarks.workloads import SUITES, Workload, custom, select
from gemmconv.compare.measure import relative_error
from gemmconv.compare.timing import cuda_rounds
from gemmconv.errors import CompileError
from gemmconv.kernels.base import Config, Kernel

_BARS = {"fp32": 2e-6, "tf32": 5e-4, "fp16": 1e-3, "bf16": 5e-3}
_ROUNDS = 5
_SEED = 0
_PATIENCE_SECONDS = 20.0  # for a first call
_HEAD = f"{'':<4} {'':<13} layer"
_DEFECTS = ("wrong", "failed", "lost")


# Those whose tiles compete for forward passes.
KERNELS = {name: kernel for name, kernel in fit.KERNELS.items() if "forward" in kernel.directions}


@dataclass
class Trial:
    """A candidate for a case, and what is known of it by now.

    Attributes:
        case: what it is to compute.
        candidate: the tile or plan.
        estimate: the seconds that the kernel estimates.
        chosen: whether it is the kernel's own choice.
        status: ``untimed``; then ``ok``, ``wrong`` (no time), ``uncompiled``, ``failed`` (it raised), or ``lost`` (the
            GPU no longer answers).
        reason: why it is one of the last three.
        error: relative to float64, of the last image; NaN with any NaN.
        median_us: of the time.
    """

    case: Case
    candidate: Any
    estimate: float
    chosen: bool
    status: str = "untimed"
    reason: str = ""
    error: float | None = None
    median_us: float | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """What sets the candidate apart from others for the case."""
        of_case = "problem", "multiprocessors", "spec"
        return {name: value for name, value in asdict(self.candidate).items() if name not in of_case}

    def row(self, kernel: Kernel) -> dict[str, Any]:
        """What the file says of it; an error that is no number is None there."""
        return {
            "layer": self.case.workload.layer,
            "precision": self.case.precision,
            "layout": self.case.layout,
            "kernel": kernel.name,
            "candidate": self.fields,
            "estimate": self.estimate,
            "chosen": self.chosen,
            "median_us": self.median_us,
            "error": self.error if self.error is not None and math.isfinite(self.error) else None,
            "status": self.status,
            "reason": self.reason,
        }

    def kept(self, kernel: Kernel, head: Mapping[str, str]) -> Row:
        """What is kept of one that was timed."""
        return Row(
            self.case.workload.layer,
            self.case.precision,
            self.case.layout,
            "forward",
            kernel.name,
            fit.tile_text(kernel, self.candidate),
            float(f"{1e-6 * (self.median_us or 0.0):.6g}"),
            head["device"],
            head["commit"],
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 1 without a CUDA device or where something is wrong."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.fit is not None:
        return fit.fit_all([fit.KERNELS[name] for name in arguments.fit or fit.KERNELS], arguments.rows)
    if arguments.kernel is None:
        parser.error("one of --kernel and --fit is needed")
    kernel, workloads = KERNELS[arguments.kernel], list(arguments.layer)
    if arguments.suite or not workloads:
        workloads += select(arguments.suite or ("public", "models"))
    cases = [
        Case(workload, precision, layout)
        for precision, layout, workload in itertools.product(arguments.precision, arguments.layout, workloads)
    ]
    if arguments.inspect:
        inspect(kernel, cases)
        return 0
    if not torch.cuda.is_available():
        print("benchmarks.choices needs a CUDA device; torch finds none here; --inspect needs none", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    kept = fit.RESULTS / environment.slug(device) / fit.ROWS.name if arguments.keep else None
    return run(kernel, cases, device, arguments.count, arguments.seconds, arguments.out, kept)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.choices",
        description="Time many of the tiles or plans that a kernel may take for a layer, and say how much slower than "
        "the best of them its own choice is. Several values are given with commas.",
    )
    add = parser.add_argument
    add("--kernel", choices=KERNELS, help="whose choice")
    add("--suite", type=_names(SUITES), metavar="S", help=f"of {', '.join(SUITES)} (default: public,models)")
    add(
        "--layer", type=_layer, action="append", default=[], metavar="L", help='like "n64 c64x128 k3x5 h128 w256 s2 p1"'
    )
    precisions = f"of {', '.join(PRECISIONS)} (default: tf32,fp16,fp32)"
    add("--precision", type=_names(PRECISIONS), default="tf32,fp16,fp32", metavar="P", help=precisions)
    add("--layout", type=_names(LAYOUTS), default="nchw", metavar="L", help=f"of {', '.join(LAYOUTS)} (default: nchw)")
    add("--count", type=_count, default=12, metavar="N", help="candidates of a layer (default: 12)")
    add("--seconds", type=float, default=math.inf, metavar="S", help="measure no longer; compiling is not counted")
    add("--out", type=Path, metavar="FILE", help="JSON, written after every layer")
    add("--keep", action="store_true", help=f"keep times in results/GPU/{fit.ROWS.name}, to fit estimates to")
    add("--fit", nargs="*", choices=fit.KERNELS, metavar="K", help="fit numbers of kernels to rows kept, and leave")
    add("--rows", type=Path, default=fit.ROWS, metavar="FILE", help="of --fit (default: those of the H200)")
    add("--inspect", action="store_true", help="print the choices and their estimates, and leave")
    return parser


def _names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    known = tuple(known)

    def names(text: str) -> tuple[str, ...]:
        given = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {name!r}")
        return given

    return names


def _layer(text: str) -> Workload:
    try:
        return custom(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1, got {text!r}")
    return int(text)


def candidates_of(kernel: Kernel, case: Case, device: torch.device) -> list[tuple[float, Any]]:
    """The tiles that a kernel may take for a case, with the seconds that it estimates; none where it is not for it."""
    config = case.config(device)
    if kernel.why_not(config, "forward") is not None:
        return []
    return [(kernel.seconds(config, "forward", tile), tile) for tile in kernel.tiles(config, "forward")]


def sampled(kernel: Kernel, case: Case, device: torch.device, count: int) -> list[tuple[float, Any]]:
    """Candidates of a kernel, as :func:`sample` takes them: the kernel's own choice first."""
    candidates = candidates_of(kernel, case, device)
    return sample(candidates, count, kernel.tile(case.config(device), "forward") if candidates else None)


def sample(candidates: Iterable[tuple[float, Any]], count: int, first: Any = None) -> list[tuple[float, Any]]:
    """Half of ``count`` those of least estimates, but ``first`` before all; half others, the same ones each time."""
    ordered = sorted(candidates, key=lambda one: (one[1] != first, one[0]))  # of equals the first, as kernels choose
    best = -(-count // 2)
    others = range(best, len(ordered))
    return ordered[:best] + [ordered[i] for i in sorted(Random(_SEED).sample(others, min(count - best, len(others))))]


def inspect(kernel: Kernel, cases: Sequence[Case]) -> None:
    """Print what the kernel chooses for each case, and its estimate. Needs no GPU."""
    device, skipped, width = torch.device("cuda", 0), 0, _width(cases)
    print(f"{_HEAD:<{width}} {'candidates':>10} {'estimate':>13}  choice")
    for case in cases:
        candidates = candidates_of(kernel, case, device)
        if not candidates:
            skipped += 1
            continue
        estimate, tile = sampled(kernel, case, device, 1)[0]
        text = _text(Trial(case, tile, estimate, True).fields)
        print(f"{_title(case):<{width}} {len(candidates):>10} {1e6 * estimate:10.1f} us  {text}")
    print(f"without candidates: {skipped} of {len(cases)}")


def _title(case: Case) -> str:
    return f"{case.precision:<4} {case.layout:<13} {case.workload.name}"


def _width(cases: Sequence[Case]) -> int:
    return max(map(len, (_HEAD, *map(_title, cases))))


def _text(fields: dict[str, Any]) -> str:
    """``columns=64 unit=1x2``."""
    texts = ("x".join(map(str, value)) if isinstance(value, tuple) else value for value in fields.values())
    return " ".join(f"{name}={text}" for name, text in zip(fields, texts, strict=True))


def run(
    kernel: Kernel,
    cases: Sequence[Case],
    device: torch.device,
    count: int,
    seconds: float,
    out: Path | None,
    kept: Path | None = None,
) -> int:
    """Compile, measure, save, keep, print. Returns the exit status."""
    about = environment.describe(device)
    head = {"device": about.pop("gpu"), **about}
    print(f"{head['device']}, torch {head['torch']}, commit {head['commit']}, {kernel.name}", flush=True)
    if out is not None:
        save(out, {**head, "rows": []})  # what cannot be written is to be known now
    groups, width = [], _width(cases)
    for case in cases:
        candidates = sampled(kernel, case, device, count)
        if candidates:
            groups.append([Trial(case, tile, estimate, i == 0) for i, (estimate, tile) in enumerate(candidates)])
    compile_all(kernel, [trial for trials in groups for trial in trials], device)

    done: list[Trial] = []
    deadline, finished = time.monotonic() + seconds, 0
    print(f"{_HEAD:<{width}} {'timed':>5} {'best us':>9} {'chosen us':>9} {'ratio':>6} {'error':>8}  best", flush=True)
    for trials in groups:
        if time.monotonic() > deadline:
            break
        measure(kernel, trials, device, deadline)
        done += trials
        if out is not None:
            save(out, {**head, "rows": [trial.row(kernel) for trial in done]})
        if kept is not None:
            fit.keep(kept, [trial.kept(kernel, head) for trial in trials if trial.status == "ok"])
        for trial in trials:
            if trial.status in _DEFECTS:
                print(_complaint(trial), flush=True)
        if any(trial.status in ("untimed", "lost") for trial in trials):
            break
        finished += 1
        print(_line(trials, width), flush=True)
    for line in summary(done):
        print(line)
    print(f"without candidates: {len(cases) - len(groups)} of {len(cases)}; not measured: {len(groups) - finished}")
    # A candidate that does not compile can be done without, a choice cannot.
    return int(any(trial.status in _DEFECTS or (trial.chosen and trial.status == "uncompiled") for trial in done))


def compile_all(kernel: Kernel, trials: Sequence[Trial], device: torch.device) -> None:
    """Put the kernels of all candidates into the cache; print which do not compile."""
    from gemmconv.runtime.launch import architecture

    began, arch = time.monotonic(), architecture(device.index or 0)
    jobs = [(kernel, trial.case.config(device), trial.candidate, arch) for trial in trials]
    for trial, reason in zip(trials, in_processes(_compile, jobs), strict=True):
        if reason:
            trial.status, trial.reason = "uncompiled", reason
            print(_complaint(trial), flush=True)
    print(f"compiled {len(jobs)} candidates, {time.monotonic() - began:.0f} s", flush=True)


def _compile(job: tuple[Kernel, Config, Any, str]) -> str:
    """Compile a candidate's kernels; why that failed, or nothing."""
    kernel, config, candidate, arch = job
    only_compile(arch)
    try:
        kernel.prepare(config, "forward", candidate)
    except Exception as error:
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    lines = (error.log if isinstance(error, CompileError) else str(error)).splitlines() or [""]
    return f"{type(error).__name__}: {next((line for line in lines if 'error' in line), lines[0])}"[:300]


def measure(kernel: Kernel, trials: Sequence[Trial], device: torch.device, deadline: float) -> None:
    """Check the trials of one case, then time those that are right, in turns; leave them untimed when time is up."""
    case = trials[0].case
    p, config = case.workload.problem, case.config(device)
    tensors = random_tensors(case.workload, device).to(config.dtype)
    x, weight = (each.contiguous(memory_format=config.memory_format) for each in (tensors.x, tensors.weight))
    bias = tensors.bias
    del tensors
    exact = None if bias is None else bias.double()
    options = p.stride, p.padding, p.output_padding, p.groups, p.dilation
    reference = F.conv_transpose2d(x[-1:].double(), weight.double(), exact, *options)
    right: list[tuple[Trial, Callable[[], torch.Tensor]]] = []
    round_seconds = 0.0
    for trial in trials:
        if trial.status == "uncompiled":
            continue
        if time.monotonic() > deadline:
            return
        try:
            call = partial(kernel.prepare(config, "forward", trial.candidate), x, weight, bias)
            # The output is likely to take this memory: an element that is left unwritten then shows.
            torch.full(p.output_shape, torch.nan, dtype=config.dtype, device=device)
            began = time.monotonic()
            output = call()
            _wait(device)
            round_seconds += time.monotonic() - began
            trial.error = relative_error(output[-1:], reference)
            del output
        except Exception as error:  # a candidate's failure must not end the run
            trial.status, trial.reason = "lost" if _is_lost(device, error) else "failed", _reason(error)
            if trial.status == "lost":
                return
            continue
        if trial.error <= _BARS[case.precision]:
            right.append((trial, call))
        else:
            trial.status = "wrong"
    if not right or time.monotonic() + (_ROUNDS + 1) * round_seconds > deadline:
        return
    samples = cuda_rounds([call for _, call in right], device, lambda index: None, _ROUNDS)
    for (trial, _), times in zip(right, samples, strict=True):
        trial.status, trial.median_us = "ok", 1e3 * median(times)


def _wait(device: torch.device) -> None:
    """Wait for a device. Raises DeviceLost where a kernel seems to run for ever: nothing in this process can end it."""
    if device.type != "cuda":
        return
    end = torch.cuda.Event()
    end.record()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not end.query():
        if time.monotonic() > deadline:
            raise DeviceLost(f"not done after {_PATIENCE_SECONDS:.0f} s")
        time.sleep(1e-4)


def _is_lost(device: torch.device, error: Exception) -> bool:
    """Whether the device answers nothing any more after an error."""
    if isinstance(error, DeviceLost) or device.type != "cuda":
        return isinstance(error, DeviceLost)
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file by an atomic rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content, allow_nan=False) + "\n")


def summary(trials: Iterable[Trial]) -> list[str]:
    """A line for each precision: the time of the choice over the best one's, over all cases that have both."""
    cases: dict[Case, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.status == "ok":
            cases[trial.case].append(trial)
    ratios: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for case, timed in cases.items():
        if (ratio := _ratio(timed)) is not None:
            ratios[case.precision].append((ratio, f"{case.workload.name}, {case.layout}"))
    lines = []
    for precision, found in ratios.items():
        mean, (worst, where) = geometric_mean(ratio for ratio, _ in found), max(found)
        lines.append(
            f"{precision}: chosen/best {mean:.3f} (geometric mean of {len(found)}), worst {worst:.2f} ({where})"
        )
    return lines


def _best(trials: Iterable[Trial]) -> Trial | None:
    timed = [trial for trial in trials if trial.median_us is not None]
    return min(timed, key=lambda trial: trial.median_us or 0.0, default=None)


def _ratio(trials: Sequence[Trial]) -> float | None:
    best, chosen = _best(trials), next((trial.median_us for trial in trials if trial.chosen), None)
    return None if best is None or not best.median_us or chosen is None else chosen / best.median_us


def _line(trials: Sequence[Trial], width: int) -> str:
    """The best of a case beside the choice: times, ratio, the best one's error and where its fields differ."""
    chosen, best, ratio = trials[0], _best(trials), _ratio(trials)
    cells = ["-"] * 4
    differs = ""
    if best is not None:
        cells[0], cells[3] = f"{best.median_us:.1f}", f"{best.error:.1e}"
        differs = (
            _text({name: value for name, value in best.fields.items() if value != chosen.fields[name]}) or "chosen"
        )
    if ratio is not None:
        cells[1:3] = f"{chosen.median_us:.1f}", f"{ratio:.2f}"
    count = sum(trial.status == "ok" for trial in trials)
    return (
        f"{_title(chosen.case):<{width}} {count:>5} {cells[0]:>9} {cells[1]:>9} {cells[2]:>6} {cells[3]:>8}  {differs}"
    )


def _complaint(trial: Trial) -> str:
    reason = trial.reason or f"error {trial.error:.1e}"
    return f"{trial.status}: {' '.join(_title(trial.case).split())}, {_text(trial.fields)}: {reason}"


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a kernel that runs for ever might not let the interpreter end
