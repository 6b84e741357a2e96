"""torch and gemmconv by turns, in wall-clock time: what the suites ``networks`` and ``host`` share.

torch takes part twice, as two contenders, so that each row tells what torch shows against itself in the same run. What
is wrong has no time. A row is written to the files as soon as it is there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import gemmconv
from benchmarks import environment, summary
from benchmarks.commands import Progress
from benchmarks.contenders import LAYOUTS, PASSES, PRECISIONS
from benchmarks.measure import answers, first_line, verdict
from benchmarks.precompile import compile_ahead
from benchmarks.results import BY_TURNS, RESULTS, File, Key, Row, joined
from benchmarks.timing import Times, synchronize
from benchmarks.workloads import Workload
from gemmconv.timing import Run

INFERENCE, RECORDED, TRAINING = STEPS = ("inference", "recorded", "training")
_PASSES = {INFERENCE: PASSES["forward"], RECORDED: PASSES["forward"], TRAINING: PASSES["both"]}


@dataclass(frozen=True)
class Turn:
    """One thing that a user waits for, by torch, by torch again and by gemmconv.

    Attributes:
        suite, workload, shape: what; ``shape`` is that of a network's input, or a layer in one line.
        precision: fp32 (ieee), tf32, fp16 or bf16; of networks bf16 is autocast.
        layout: nchw or channels_last, of inputs and weights, for torch and gemmconv alike.
        mode: eager; graph (replays of a CUDA graph); compile; reduce-overhead (``torch.compile`` in that mode).
        step: inference (without gradients); recorded (forward, gradients recorded); training (forward and backward).
        status: ok, wrong (no time) or failed (``reason`` says why).
        kernels: of gemmconv: the kernels of all passes, as ``explain`` names them.
        error, bar: relative to float64: the error that came closest to its bar, and that bar.
        torch_ms, again_ms, ours_ms: milliseconds, each the median of all rounds.
        ours_p20_ms, ours_p80_ms: of gemmconv's rounds.
        ratio, ratio_p20, ratio_p80: torch's time over gemmconv's: of the medians, and within rounds.
        itself, itself_p20, itself_p80: torch's time over torch's again, likewise.
        rounds, calls: how many there were, and how many calls each had of each.
        torch_peak_bytes, ours_peak_bytes: most device memory during a step, beyond what was held before.
        peak_ratio: gemmconv's over torch's.
        reason: why there is no time.
        run: index of the run, whose environment the file holds.
    """

    suite: str
    workload: str
    shape: str
    precision: str
    layout: str
    mode: str
    step: str
    status: str = "ok"
    kernels: str = ""
    error: float | None = None
    bar: float | None = None
    torch_ms: float | None = None
    again_ms: float | None = None
    ours_ms: float | None = None
    ours_p20_ms: float | None = None
    ours_p80_ms: float | None = None
    ratio: float | None = None
    ratio_p20: float | None = None
    ratio_p80: float | None = None
    itself: float | None = None
    itself_p20: float | None = None
    itself_p80: float | None = None
    rounds: int | None = None
    calls: int | None = None
    torch_peak_bytes: int | None = None
    ours_peak_bytes: int | None = None
    peak_ratio: float | None = None
    reason: str = ""
    run: int = 0

    @property
    def key(self) -> Key:
        """The fields that identify a measurement in any file."""
        return (self.suite, self.workload, self.shape, self.precision, self.layout, self.mode, self.step)

    @property
    def loses(self) -> bool:
        """Whether gemmconv is slower than torch."""
        return self.ratio is not None and self.ratio < 1

    @property
    def loses_clearly(self) -> bool:
        """Whether it is slower by more than torch differs from itself.

        >>> row = Turn(*("",) * 7, ratio=0.97, itself=1.02)
        >>> row.loses_clearly, replace(row, itself=1.04).loses_clearly
        (True, False)
        """
        return self.ratio is not None and self.itself is not None and self.ratio < min(1, self.itself, 1 / self.itself)

    def as_row(self) -> Row:
        """gemmconv's part, as a row of the other suites."""
        return Row(
            *(self.suite, self.workload, self.shape, self.precision, self.layout, self.step, self.mode, "auto"),
            status=self.status,
            median_ms=self.ours_ms,
            p20_ms=self.ours_p20_ms,
            p80_ms=self.ours_p80_ms,
            reason=self.reason,
        )


class Turns(File[Turn]):
    """The rows of a suite by turns."""

    kind = Turn


def load_turns(folder: Path, suites: Iterable[str] = BY_TURNS) -> tuple[list[Turn], list[dict[str, Any]]]:
    """All rows by turns in a folder, none where it has no such files; a row's ``run`` counts over all files."""
    paths = (folder / f"{suite}.json" for suite in suites)
    return joined(Turns, [path for path in paths if path.is_file()])


@dataclass(frozen=True)
class Pace:
    """How long a row may take.

    Attributes:
        seconds: of rounds, for each contender, at least.
        least_rounds: however long they take.
        burst_ms: what the calls of a round shall take, about, for each contender.
        most_calls: in a round, for each contender.
    """

    seconds: float
    least_rounds: int = 5
    burst_ms: float = 20.0
    most_calls: int = 50


@dataclass(frozen=True)
class Group:
    """Rows that share their data.

    Attributes:
        rows: as they are before they are measured.
        open: makes the data; returns what measures a row.
    """

    rows: Sequence[Turn]
    open: Callable[[], Callable[[Turn], Turn]]


def by_turns(
    contenders: Sequence[Run],
    device: torch.device,
    pace: Pace,
    calls: int,
    waits: bool = True,
    after: Callable[[int], object] = lambda index: None,
) -> list[list[float]]:
    """Milliseconds of a call of each contender, round by round; each round begins with another.

    Args:
        contenders: called before.
        device: has nothing to do when a contender's turn begins.
        pace: for how long.
        calls: in a row, each turn.
        waits: whether a turn ends when the device is done, else when the last call has returned.
        after: called with a contender's index after its turn.
    """
    times: list[list[float]] = [[] for _ in contenders]
    end = time.perf_counter() + pace.seconds * len(contenders)
    while len(times[0]) < pace.least_rounds or time.perf_counter() < end:
        first = len(times[0])
        for index in (i % len(contenders) for i in range(first, first + len(contenders))):
            run = contenders[index]
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            if waits:
                synchronize(device)
            times[index].append(1e3 * (time.perf_counter() - begin) / calls)
            after(index)
    return times


def timed(
    row: Turn,
    contenders: Sequence[Run],
    device: torch.device,
    pace: Pace,
    waits: bool = True,
    after: Callable[[int], object] = lambda index: None,
) -> Turn:
    """The row with the times of three contenders: torch, torch again and gemmconv. See :func:`by_turns`."""
    guess = by_turns(contenders[:1], device, Pace(0.0, 3), 1, waits)[0]
    calls = max(1, min(pace.most_calls, int(pace.burst_ms / max(min(guess), 1e-6))))
    theirs, again, ours = by_turns(contenders, device, pace, calls, waits, after)
    of_torch, of_again, of_ours = map(Times.of, (theirs, again, ours))
    ratios, itself = (Times.of([a / b for a, b in zip(theirs, one, strict=True)]) for one in (ours, again))
    return replace(
        row,
        torch_ms=of_torch.median,
        again_ms=of_again.median,
        ours_ms=of_ours.median,
        ours_p20_ms=of_ours.p20,
        ours_p80_ms=of_ours.p80,
        ratio=of_torch.median / of_ours.median,
        ratio_p20=ratios.p20,
        ratio_p80=ratios.p80,
        itself=of_torch.median / of_again.median,
        itself_p20=itself.p20,
        itself_p80=itself.p80,
        rounds=len(ours),
        calls=calls,
    )


def judged(row: Turn, errors: Mapping[str, float], bars: Mapping[str, float]) -> Turn:
    """The row with the error that is closest to its bar, or furthest over it; ``wrong`` where one is over or a NaN."""
    worst, wrong = verdict(errors, bars)
    if wrong:
        return replace(row, status="wrong", reason=wrong)
    return replace(row, error=errors[worst], bar=bars[worst])


def kernels_of(layers: Iterable[Workload], row: Turn, device: torch.device) -> str:
    """The names of the kernels that gemmconv takes for layers, in a row's precision, layout and step."""
    found = [
        gemmconv.explain(
            layer.problem,
            dtype=PRECISIONS[row.precision],
            device=device,
            precision="tf32" if row.precision == "tf32" else "ieee",
            memory_format=LAYOUTS[row.layout],
            bias=layer.bias,
            direction=one,
        ).kernel
        for layer in layers
        for one in _PASSES[row.step]
    ]
    return "; ".join(dict.fromkeys(found))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that command lines of suites by turns have in common."""
    add = parser.add_argument
    add("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
    add("--quick", action="store_true", help="small, a few rounds, to see that all works; needs --out")
    add("--budget", type=float, metavar="SECONDS", help="stop cleanly after this; the same command then goes on")
    add("--out", type=Path, metavar="DIR", help="for the files (default: benchmarks/results/<device>)")
    add("--fresh", action="store_true", help="measure rows anew that the files already have")


def measure(
    groups: Sequence[Group], layers: Sequence[Workload], device: torch.device, arguments: argparse.Namespace
) -> int:
    """Measure what the files lack, and write each row as it comes.

    Args:
        groups: of one suite.
        layers: whose kernels are compiled ahead.
        device: where.
        arguments: with the flags of :func:`add_flags`.

    Returns:
        The exit status: 1 where a row is wrong or the device was lost.

    Raises:
        ValueError: the file in ``--out`` is another machine's, or no result file; ``--quick`` without ``--out``.
    """
    if arguments.quick and not arguments.out:
        raise ValueError("argument --quick: needs --out, since what is small is not for benchmarks/results")
    deadline = time.monotonic() + (arguments.budget or float("inf"))
    about = environment.describe(device)
    wanted = [row for group in groups for row in group.rows]
    path = (arguments.out or RESULTS / environment.slug(device)) / f"{wanted[0].suite}.json"
    turns = Turns.opened(path, about)
    done = {row.key for row in wanted if not arguments.fresh and turns.done(row.key, about) is not None}
    left = [row for row in wanted if row.key not in done]
    if left and device.type == "cuda":
        precisions, layouts = (list({getattr(row, name) for row in left}) for name in ("precision", "layout"))
        compile_ahead(layers, precisions, ("both",), layouts, device, only_auto=True)
    lost, progress = "", Progress(len(left))
    run = turns.begin(about, {}) if left else 0
    for group in groups:
        visit = None
        for row in group.rows:
            if row.key in done or lost or time.monotonic() > deadline:
                continue
            try:
                visit = visit or group.open()
                found = visit(row)
            except Exception as error:  # whatever breaks one row must not end the run; the row says what it was
                found = replace(row, status="failed", reason=first_line(error))
                lost = "" if answers(device) else found.reason
            turns.add(replace(found, run=run))
            turns.save(path)
            done.add(row.key)
            progress.done += 1
            progress.say(said(found))
    rows = [turns.rows[row.key] for row in wanted if row.key in done]
    print(f"\nfiles: {path}, and .csv beside it")
    if lost:
        print(f"stopped: {lost}. The row is in the file; run the same command again for the rest")
    elif len(rows) < len(wanted):
        print(f"stopped with {len(wanted) - len(rows)} rows to measure; run the same command again for the rest")
    return int(bool(lost) or any(row.status == "wrong" for row in rows))


def title(row: Turn) -> str:
    """The network or layer, settings and step of a row in one phrase."""
    return f"{row.workload}, {row.precision} {row.layout}, {row.mode} {row.step}"


def said(row: Turn) -> str:
    """A row in one line."""
    if row.ratio is None:
        return f"{row.status}: {title(row)}: {row.reason}"
    times = f"torch {summary.milliseconds(row.torch_ms)} ms, gemmconv {summary.milliseconds(row.ours_ms)} ms"
    return f"{title(row)}: {times}, {row.ratio:.3f}x; torch against itself {row.itself:.3f}x"
