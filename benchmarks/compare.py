"""``python -m benchmarks.compare``: measure suites or single layers, or compare two result files."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import check, environment, first_call, several, summary
from benchmarks.contenders import LAYOUTS, PRECISIONS, SEARCHES, Contender, Lanes, gemmconv_contenders, torch_contenders
from benchmarks.flags import chosen, separated
from benchmarks.floor import Ceilings, measure_ceilings
from benchmarks.measure import DIRECTIONS, DeviceLost, Plan, expected_keys, looks_at, once
from benchmarks.precompile import compile_ahead
from benchmarks.progress import Progress
from benchmarks.random_layers import random_layers
from benchmarks.report import write_beside
from benchmarks.results import LOOKED_AT, RESULTS, Key, Results, Row, in_mode
from benchmarks.several import Part
from benchmarks.timing import QUICK, Effort
from benchmarks.workloads import SUITES, Workload, custom, select, shrunk
from gemmconv.compare.layers import pick_device

# A CPU measures a layer's forward pass in some tens of milliseconds below these.
_CPU_FLOPS, _CPU_BYTES = 400_000_000, 32 << 20
_QUICK_GPU = ("tf32", "bf16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments, ``sys.argv[1:]`` if None.

    Returns:
        0; 1 where a result of gemmconv was wrong (of ``native``, where torch's was right), or ``--check`` found
        something slower.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.check:
            return check.main(arguments.check[0], arguments.check[1], arguments.tolerance)
        if arguments.list:
            return _list()
        return _run(_request(arguments))
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description="Measure gemmconv's algorithms beside torch's settings and the machine's floor. Several values are "
        "given with commas. A run goes on where the files in --out end, unless the library or the machine changed.",
    )
    add = parser.add_argument
    add("--suite", type=separated, metavar="S", help=f"of {', '.join(SUITES)} (default: all; on a CPU, --quick)")
    add("--workload", type=separated, default=(), metavar="NAME", help="only these workloads")
    add(
        "--layer", action="append", default=[], metavar="LAYER", help='a layer, like "n64 c64x128 k3x5 h128 w256 s2 p1"'
    )
    add("--random", type=int, metavar="SEED", help="layers at random, the same for a seed: benchmarks/random_layers.py")
    add("--algorithms", type=separated, metavar="A", help="of gemmconv; default: all, and auto")
    add("--baselines", type=separated, metavar="B", help="of torch, or none; default: all that differ on the device")
    add("--precision", type=separated, metavar="P", help=f"of {', '.join(PRECISIONS)} (default: all; on a CPU fp32)")
    add("--direction", type=separated, metavar="D", help=f"of {', '.join(DIRECTIONS)} (default: forward,backward)")
    add("--layout", type=separated, metavar="L", help=f"of gemmconv's rows, of {', '.join(LAYOUTS)} (default: all)")
    add("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one); of several the workloads are shared")
    add("--quick", action="store_true", help="a few workloads, fewer samples; on a GPU in tf32 and bf16")
    add("--full-size", action="store_true", help="do not make layers smaller on a CPU; may take hours")
    add("--budget", type=float, metavar="SECONDS", help="stop cleanly after this; the same command then goes on")
    add("--out", type=Path, metavar="DIR", help="for the files (default: benchmarks/results/<device>)")
    add("--fresh", action="store_true", help="measure rows anew that the files already have")
    add("--keep-baselines", action="store_true", help="keep torch's rows where only gemmconv has changed")
    add("--sustained", action="store_true", help="time a GPU that is kept busy, as in training; else it rests")
    add("--charts", action="store_true", help="also write summary.md and charts into --out")
    add("--list", action="store_true", help="print the workloads and leave")
    add(
        *("--check",),
        nargs=2,
        type=Path,
        metavar=("OLD", "NEW"),
        help="compare two result files or folders; exit with 1 where a row got slower",
    )
    add("--tolerance", type=float, default=0.05, metavar="SHARE", help="of --check (default: 0.05)")
    return parser


@dataclass(frozen=True)
class _Request:
    """The parsed command line."""

    devices: tuple[torch.device, ...]
    workloads: list[Workload]
    contenders: list[Contender]
    precisions: tuple[str, ...]
    directions: tuple[str, ...]
    effort: Effort
    out: Path | None
    fresh: bool
    keep_baselines: bool
    deadline: float
    charts: bool

    @property
    def device(self) -> torch.device:
        """The device, or one of those of its kind."""
        return self.devices[0]

    @property
    def looks(self) -> Callable[[Row], int]:
        """How often a row is timed, for :attr:`benchmarks.measure.Plan.looks`."""
        is_quick = replace(self.effort, sustained=False) == QUICK
        return once if self.device.type == "cpu" or is_quick else looks_at


def _request(arguments: argparse.Namespace) -> _Request:
    began = time.monotonic()
    devices = tuple(map(pick_device, separated(arguments.device) if arguments.device else (None,)))
    device = devices[0]
    if len(set(devices)) > 1 and len(kinds := set(map(environment.slug, devices))) > 1:
        raise ValueError(f"argument --device: must be of one kind, got {', '.join(sorted(kinds))}")
    on_cpu = device.type == "cpu"
    quick = arguments.quick or (
        on_cpu and not (arguments.suite or arguments.layer or arguments.workload or arguments.random is not None)
    )
    workloads = _workloads(arguments, quick)
    if on_cpu and not arguments.full_size:
        workloads = [shrunk(workload, _CPU_FLOPS, _CPU_BYTES) for workload in workloads]

    layouts = chosen("--layout", arguments.layout, LAYOUTS, tuple(LAYOUTS))
    ours = gemmconv_contenders(layouts)
    names = [contender.name for contender in ours]
    wanted = chosen("--algorithms", arguments.algorithms, dict.fromkeys(names), names)
    theirs = torch_contenders(device)
    if arguments.baselines == ("none",):
        baselines: tuple[str, ...] = ()
    else:
        names = [contender.name for contender in theirs]
        baselines = chosen("--baselines", arguments.baselines, names, names)

    every = ("fp32",) if on_cpu else _QUICK_GPU if quick else tuple(PRECISIONS)
    precisions = chosen("--precision", arguments.precision, PRECISIONS, every)
    if on_cpu and "tf32" in precisions:
        raise ValueError("argument --precision: tf32 needs a CUDA device, and torch finds none here; leave it out")
    out = arguments.out
    if arguments.sustained and on_cpu:
        raise ValueError("argument --sustained: needs a CUDA device; a CPU does not rest; leave it out")
    if out is None and (arguments.suite or arguments.workload or not arguments.layer):
        out = RESULTS / environment.slug(device, arguments.sustained)
    return _Request(
        devices,
        workloads,
        [c for c in theirs if c.name in baselines] + [c for c in ours if c.name in wanted],
        precisions,
        chosen("--direction", arguments.direction, DIRECTIONS, ("forward", "backward")),
        replace(QUICK if quick else Effort(), sustained=arguments.sustained),
        out,
        arguments.fresh,
        arguments.keep_baselines,
        began + arguments.budget if arguments.budget else float("inf"),
        arguments.charts,
    )


def _workloads(arguments: argparse.Namespace, quick: bool) -> list[Workload]:
    layers = [custom(text) for text in arguments.layer]
    if arguments.random is not None:
        layers += random_layers(arguments.random)
    if layers and not (arguments.suite or arguments.workload):
        return layers
    suites = chosen("--suite", arguments.suite, SUITES, tuple(SUITES))
    every = [workload.name for suite in suites for workload in SUITES[suite]]
    names = chosen("--workload", arguments.workload or None, every, ())
    found = select(suites, names, quick and not names)
    if not found:
        raise ValueError(f"argument --quick: takes no workload of {', '.join(suites)}; leave it out")
    return layers + found


def _list() -> int:
    cells = [
        [one.suite, one.name, one.layer, f"{one.problem.useful_flops / 1e9:.3g}", "*" * one.quick]
        for suite in SUITES.values()
        for one in suite
    ]
    print(summary.text_table(("suite", "workload", "layer", "GFLOP forward", "quick"), cells, left=3))
    return 0


def _run(request: _Request) -> int:
    """Measure, save, print. Returns the exit status."""
    device = request.device
    about = environment.describe(device, request.effort.sustained)
    print(environment.text_of(about), flush=True)
    files = _Files(request, about)
    plan = Plan(
        device,
        request.precisions,
        request.directions,
        request.contenders,
        Ceilings(1.0, {}),
        request.effort,
        deadline=request.deadline,
        looks=request.looks,
    )
    missing = files.missing(plan)
    print(f"{missing} rows to measure, at least", flush=True)

    lost = ""
    progress = Progress(missing)
    try:
        for part in _measured(request, plan, files, progress.say) if missing else ():
            row, workload = part.row, part.workload
            if row is None:
                files.save(workload.suite)
                progress.say(f"{workload.suite}: {workload.name} ({workload.layer}), {part.seconds:.1f} s")
                continue
            if files.is_new(part):
                rates = ", ".join(f"{name} {rate:.4g}" for name, rate in part.ceilings.tflops.items())
                copy = f"ceilings: copy {part.ceilings.copy_tbps:.4g} TB/s"
                progress.say(f"{part.device}: {copy}; matrix product, TFLOP/s: {rates}")
            is_first = files.add(row, part)
            progress.done += is_first and row.mode == "eager"
            if row.status in ("wrong", "failed"):
                progress.say(f"{row.status}: {summary.title(row)}, {row.algorithm}: {row.reason}")
    except DeviceLost as error:
        lost = str(error)
    except KeyboardInterrupt:
        print("\ninterrupted", flush=True)
    finally:
        files.save_all()
    complete = not files.missing(plan)
    if complete and not lost:
        _first_calls(request, files, bool(missing))

    rows = files.rows(plan)
    print()
    print(summary.report(rows))
    files.say_where()
    if request.charts and request.out is not None:
        write_beside(request.out)
    if lost:
        print(f"stopped: {lost}. The row is in the file; run the same command again for the rest")
    elif not complete:
        left = files.missing(plan)
        print(f"stopped with {left} rows to measure; run the same command again for the rest")
    return int(_is_wrong(rows) or bool(lost))


def _is_wrong(rows: Sequence[Row]) -> bool:
    """Whether a result of gemmconv's is; ``native`` is torch's own operator, and may be where torch is."""
    wrong = [row for row in rows if row.status == "wrong"]
    of_torch = {row.cell for row in wrong if row.is_torch}
    return any(not row.is_torch and not (row.algorithm == "native" and row.cell in of_torch) for row in wrong)


def _measured(request: _Request, plan: Plan, files: _Files, say: Callable[[str], None]) -> Iterator[Part]:
    """Measure the workloads and yield parts, until all is done or the deadline comes. ``say`` prints a line."""
    workloads = [workload for workload in request.workloads if files.missing(plan, [workload])]
    if len(request.devices) > 1:
        tasks = [
            [
                several.Task(workload, _plan_for(plan, workload).directions, files.done_of(workload))
                for workload in share
                if workload in workloads
            ]
            for share in several.shares(request.workloads, len(request.devices))
        ]
        yield from several.measure(plan, request.devices, tasks, lambda: _compile_ahead(request, say))
        return
    _compile_ahead(request, say)
    ceilings = measure_ceilings(request.device, request.precisions, plan.effort.sustained)
    plan = replace(plan, ceilings=ceilings, done=files.done)
    lanes = Lanes(SEARCHES)
    for workload in workloads:
        if time.monotonic() > request.deadline:
            return
        yield from several.parts_of(workload, _plan_for(plan, workload), lanes, str(request.device))


def _compile_ahead(request: _Request, say: Callable[[str], None]) -> None:
    """Have the kernels of gemmconv's contenders ready, where there is a GPU to run them."""
    layouts = dict.fromkeys(contender.layout for contender in request.contenders if contender.kind == "gemmconv")
    if request.device.type == "cuda" and layouts:
        began = time.monotonic()
        compile_ahead(request.workloads, request.precisions, request.directions, layouts, request.device)
        say(f"compiled kernels ahead, {time.monotonic() - began:.0f} s")


def _plan_for(plan: Plan, workload: Workload) -> Plan:
    """Latency is also that of a training step."""
    if workload.suite == "latency" and set(plan.directions) == {"forward", "backward"}:
        return replace(plan, directions=DIRECTIONS)
    return plan


class _Files:
    """The result files of a run, one for each suite."""

    def __init__(self, request: _Request, about: dict[str, str]) -> None:
        self._request, self._about = request, about
        self._results: dict[str, Results] = {}
        self._runs: dict[tuple[str, str], int] = {}  # by suite and device
        self._measured: set[tuple[str, ...]] = set()
        for suite in dict.fromkeys(workload.suite for workload in request.workloads):
            path = self._path(suite)
            self._results[suite] = Results.load(path) if path and path.exists() else Results()
            machines = {run["gpu"] for run in self._results[suite].runs} - {about["gpu"]}
            if machines:
                raise ValueError(f"argument --out: {path} has rows of {', '.join(machines)}; give another folder")

    def _path(self, suite: str) -> Path | None:
        return None if self._request.out is None else self._request.out / f"{suite}.json"

    def done(self, key: tuple[str, ...]) -> Row | None:
        """The row of a key that need not be measured again; it may lack looks."""
        if self._request.fresh and key not in self._measured:
            return None
        return self._results[key[0]].done(key, self._about, self._request.keep_baselines)

    def _lacks(self, key: Key) -> bool:
        """Whether a key has no row yet, or one that lacks looks; or its graph does."""
        rows = [self.done(in_mode(key, mode)) for mode in LOOKED_AT]
        return rows[0] is None or any(row is not None and row.lacks_looks(self._request.looks) for row in rows)

    def missing(self, plan: Plan, workloads: Sequence[Workload] | None = None) -> int:
        """How many rows are to be measured, of modes that are known beforehand."""
        chosen = self._request.workloads if workloads is None else workloads
        return sum(self._lacks(key) for one in chosen for key in expected_keys(one, _plan_for(plan, one)))

    def done_of(self, workload: Workload) -> dict[Key, Row]:
        """The rows of a workload that need not be measured again."""
        rows = self._results[workload.suite].rows
        return {key: row for key in rows if key[1] == workload.name and (row := self.done(key)) is not None}

    def is_new(self, part: Part) -> bool:
        """Whether nothing of its device was added yet."""
        return part.device not in {device for _, device in self._runs}

    def add(self, row: Row, part: Part) -> bool:
        """Add a row of a part, to the run of its device in the suite's file; whether it is the first of its key."""
        run = self._runs.get((row.suite, part.device))
        if run is None:
            run = self._results[row.suite].begin(self._about, part.ceilings.as_dict())
            self._runs[row.suite, part.device] = run
        self._results[row.suite].add(replace(row, run=run))
        is_first = row.key not in self._measured
        self._measured.add(row.key)
        return is_first

    def save_all(self) -> None:
        """Write the files of all suites that have new rows."""
        for suite in dict.fromkeys(suite for suite, _ in self._runs):
            self.save(suite)

    def save(self, suite: str) -> None:
        path = self._path(suite)
        if path is not None:
            self._results[suite].save(path)

    def rows(self, plan: Plan) -> list[Row]:
        """The finished rows of what was asked for, in every mode, without those that are to be measured again."""
        wanted = {key for one in self._request.workloads for key in expected_keys(one, _plan_for(plan, one))}
        return [
            row
            for results in self._results.values()
            for row in results.finished()
            if in_mode(row.key, "eager") in wanted and self.done(row.key) is not None
        ]

    def say_where(self) -> None:
        if self._request.out is not None:
            print(f"\nfiles: {', '.join(str(self._path(suite)) for suite in self._results)}, and .csv beside them")

    def has_first_costs(self, layers: Sequence[str]) -> bool:
        """Whether the rows of all these layers of suite latency say what first calls cost."""
        rows = self._results["latency"].rows.values()
        return {*layers} <= {row.layer for row in rows if row.cold_ms is not None}

    def first_costs(self, cold: first_call.Costs, warm: first_call.Costs) -> None:
        """Write what first calls cost into the rows of suite latency."""
        for key, row in list(self._results["latency"].rows.items()):
            cost = (row.layer, row.precision, row.algorithm)
            if row.mode == "eager" and row.direction == "forward" and row.layout == "nchw" and cost in cold:
                filled = replace(row, cold_ms=cold[cost], warm_ms=warm.get(cost))
                self._results["latency"].rows[key] = filled
        self.save("latency")


def _first_calls(request: _Request, files: _Files, again: bool) -> None:
    """Measure first calls, for suite latency on a GPU, again or where there are none yet; a CPU compiles nothing."""
    layers = [workload.layer for workload in request.workloads if workload.suite == "latency"]
    if request.device.type != "cuda" or not layers or "forward" not in request.directions:
        return
    if not again and files.has_first_costs(layers):
        return
    print("first calls, in processes of their own", flush=True)
    try:
        files.first_costs(*first_call.measure(layers, request.precisions, request.device))
    except (RuntimeError, OSError, ValueError) as error:
        print(f"first calls were not measured: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
