"""``python -m benchmarks.compare``: measure suites or single layers, or compare two result files."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shutil import rmtree

import torch

from benchmarks import check, environment, summary
from benchmarks.commands import Progress, chosen, run_in_processes, separated
from benchmarks.contenders import LAYOUTS, PRECISIONS, SEARCHES, Lanes, gemmconv_contenders, torch_contenders
from benchmarks.floor import Ceilings, measure_ceilings
from benchmarks.measure import DIRECTIONS, DeviceLost, Plan, expected_keys, looks_at, once, rows_of
from benchmarks.precompile import compile_ahead
from benchmarks.random_layers import random_layers
from benchmarks.report import draw_charts, write_summary
from benchmarks.results import MODES, RESULTS, Key, Results, Row, in_mode
from benchmarks.timing import QUICK, Effort
from benchmarks.workloads import SUITES, Workload, custom, select, shrunk
from gemmconv.flags import pick_device

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
        plan, devices = _planned(arguments)
        files = _Files(arguments, plan)
        if len(devices) > 1:
            return _run_on_each(files, devices, list(sys.argv[1:] if argv is None else argv))
        return _run(files)
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
    add("--charts", action="store_true", help="also write summary.md and charts into --out")
    add("--share", help=argparse.SUPPRESS)  # I/N: every Nth workload from the Ith on, of a process for one device
    add("--list", action="store_true", help="print the workloads and leave")
    check_help = "compare two result files or folders; exit with 1 where a row got slower"
    add("--check", nargs=2, type=Path, metavar=("OLD", "NEW"), help=check_help)
    add("--tolerance", type=float, default=0.05, metavar="SHARE", help="of --check (default: 0.05)")
    return parser


def _planned(options: argparse.Namespace) -> tuple[Plan, list[torch.device]]:
    """How to measure, and the devices; ``options`` get ``workloads`` and a default of ``out``."""
    began = time.monotonic()
    devices = list(map(pick_device, separated(options.device) if options.device else (None,)))
    device = devices[0]
    if len(set(devices)) > 1 and len(kinds := set(map(environment.slug, devices))) > 1:
        raise ValueError(f"argument --device: must be of one kind, got {', '.join(sorted(kinds))}")
    on_cpu = device.type == "cpu"
    names_layers = options.suite or options.layer or options.workload or options.random is not None
    quick = options.quick or (on_cpu and not names_layers)
    options.workloads = _workloads(options, quick)
    if on_cpu and not options.full_size:
        options.workloads = [shrunk(workload, _CPU_FLOPS, _CPU_BYTES) for workload in options.workloads]
    if options.share:
        options.workloads = _share(options.workloads, *map(int, options.share.split("/")))

    ours = gemmconv_contenders(chosen("--layout", options.layout, LAYOUTS, tuple(LAYOUTS)))
    names = list(dict.fromkeys(contender.name for contender in ours))
    wanted = chosen("--algorithms", options.algorithms, names, names)
    theirs = torch_contenders(device)
    names = [contender.name for contender in theirs]
    baselines = options.baselines if options.baselines != ("none",) else ()
    wanted += chosen("--baselines", baselines, names, names)

    every = ("fp32",) if on_cpu else _QUICK_GPU if quick else tuple(PRECISIONS)
    precisions = chosen("--precision", options.precision, PRECISIONS, every)
    if on_cpu and "tf32" in precisions:
        raise ValueError("argument --precision: tf32 needs a CUDA device, and torch finds none here; leave it out")
    if options.out is None and (options.suite or options.workload or not options.layer):
        options.out = RESULTS / environment.slug(device)
    if options.out is None and len(devices) > 1:
        raise ValueError("argument --out: several devices need it, since each writes files; give a folder")
    plan = Plan(
        device,
        precisions,
        chosen("--direction", options.direction, DIRECTIONS, DIRECTIONS),
        [contender for contender in (*theirs, *ours) if contender.name in wanted],
        Ceilings(1.0, {}),  # until they are measured
        QUICK if quick else Effort(),
        began + options.budget if options.budget else float("inf"),
        looks=once if on_cpu or quick else looks_at,
    )
    return plan, devices


def _workloads(options: argparse.Namespace, quick: bool) -> list[Workload]:
    layers = [custom(text) for text in options.layer]
    if options.random is not None:
        layers += random_layers(options.random)
    if layers and not (options.suite or options.workload):
        return layers
    suites = chosen("--suite", options.suite, SUITES, tuple(SUITES))
    every = [workload.name for suite in suites for workload in SUITES[suite]]
    names = chosen("--workload", options.workload or None, every, ())
    found = select(suites, names, quick and not names)
    if not found:
        raise ValueError(f"argument --quick: takes no workload of {', '.join(suites)}; leave it out")
    return layers + found


def _share(workloads: Sequence[Workload], index: int, count: int) -> list[Workload]:
    """Every ``count``-th workload by its work, so that each is measured on the same device in every run.

    Devices of one kind differ by up to 10%.
    """
    return sorted(workloads, key=lambda workload: -workload.problem.useful_flops)[index::count]


def _list() -> int:
    cells = [
        [one.suite, one.name, one.layer, f"{one.problem.useful_flops / 1e9:.3g}", "*" * one.quick]
        for suite in SUITES.values()
        for one in suite
    ]
    print(summary.text_table(("suite", "workload", "layer", "GFLOP forward", "quick"), cells, left=3))
    return 0


def _run(files: _Files) -> int:
    """Measure, save, print. Returns the exit status."""
    plan, device = files.plan, files.plan.device
    print(environment.text_of(files.about), flush=True)
    left = [workload for workload in files.options.workloads if files.missing([workload])]
    progress, lost = Progress(files.missing(left)), ""
    print(f"{progress.total} rows to measure, at least", flush=True)
    try:
        if left:
            _compile_ahead(plan, left, progress)
            ceilings, lanes = measure_ceilings(device, plan.precisions), Lanes(SEARCHES)
            rates = ", ".join(f"{name} {rate:.4g}" for name, rate in ceilings.tflops.items())
            progress.say(f"ceilings: copy {ceilings.copy_tbps:.4g} TB/s; matrix product, TFLOP/s: {rates}")
            plan = replace(plan, ceilings=ceilings, done=files.done)
        for workload in left:
            if time.monotonic() > plan.deadline:
                break
            began = time.monotonic()
            for row in rows_of(workload, plan, lanes):
                progress.done += files.add(row, plan.ceilings) and row.mode == "eager"
                if row.status in ("wrong", "failed"):
                    progress.say(f"{row.status}: {summary.title(row)}, {row.algorithm}: {row.reason}")
            files.save([workload.suite])
            seconds = time.monotonic() - began
            progress.say(f"{workload.suite}: {workload.name} ({workload.layer}), {seconds:.1f} s")
    except DeviceLost as error:
        lost = f"{error}. The row is in the file; run the same command again for the rest"
    except KeyboardInterrupt:
        print("\ninterrupted", flush=True)
    finally:
        files.save(files.runs)
    return _reported(files, lost)


def _run_on_each(files: _Files, devices: Sequence[torch.device], arguments: list[str]) -> int:
    """Run a share of the workloads on each device, then put together what they wrote. Returns the exit status."""
    options, count = files.options, len(devices)
    parts = [options.out / f"part{i}" for i in range(count)]
    for i, part in enumerate(parts):
        names = {workload.name for workload in _share(options.workloads, i, count)}
        for suite, results in files.results.items():
            own = {key: row for key, row in results.rows.items() if key[1] in names}
            Results(results.runs, own).save(part / f"{suite}.json")
    print(f"{files.missing(options.workloads)} rows to measure, at least", flush=True)
    flags = [
        ["--device", str(device), "--share", f"{i}/{count}", "--out", str(part)]
        for i, (device, part) in enumerate(zip(devices, parts, strict=True))
    ]
    status = run_in_processes("benchmarks.compare", arguments, flags)
    for part in parts:
        for path in part.glob("*.json"):
            files.results[path.stem].merge(Results.load(path))
        rmtree(part)
    files.save(files.results)
    options.fresh = False  # what was measured is in the files now
    return max(status, _reported(files))


def _reported(files: _Files, lost: str = "") -> int:
    """Print what is in the files of what was asked for, and why it is not all. Returns the exit status."""
    rows, options = files.rows(), files.options
    if not options.share:
        print(f"\n{summary.report(rows)}")
        if options.out is not None:
            print(f"\nfiles: {', '.join(map(str, map(files.path, files.results)))}, and .csv beside them")
            if options.charts:
                write_summary(options.out)
                draw_charts(options.out)
    if not lost and (left := files.missing(options.workloads)):
        print(f"stopped with {left} rows to measure; run the same command again for the rest")
    elif lost:
        print(f"stopped: {lost}")
    return int(_is_wrong(rows) or bool(lost))


def _is_wrong(rows: Sequence[Row]) -> bool:
    """Whether a result of gemmconv's is; ``native`` is torch's own operator, and may be where torch is."""
    wrong = [row for row in rows if row.status == "wrong"]
    of_torch = {row.cell for row in wrong if row.is_torch}
    return any(not row.is_torch and not (row.algorithm == "native" and row.cell in of_torch) for row in wrong)


def _compile_ahead(plan: Plan, workloads: Sequence[Workload], progress: Progress) -> None:
    """Have the kernels of gemmconv's contenders ready, where there is a GPU to run them."""
    layouts = dict.fromkeys(contender.layout for contender in plan.contenders if contender.kind == "gemmconv")
    if plan.device.type == "cuda" and layouts:
        compile_ahead(workloads, plan.precisions, plan.directions, layouts, plan.device)
        progress.say("compiled kernels ahead")


class _Files:
    """What a run is asked for, and its result files, one for each suite."""

    def __init__(self, options: argparse.Namespace, plan: Plan) -> None:
        self.options, self.plan, self.about = options, plan, environment.describe(plan.device)
        self.results: dict[str, Results] = {}
        self.runs: dict[str, int] = {}  # of this process, by suite
        self._measured: set[Key] = set()
        for suite in dict.fromkeys(workload.suite for workload in options.workloads):
            self.results[suite] = Results.opened(self.path(suite), self.about)

    def path(self, suite: str) -> Path | None:
        """The file of a suite, None where nothing is written."""
        return self.options.out and self.options.out / f"{suite}.json"

    def done(self, key: Key) -> Row | None:
        """The row of a key that need not be measured again; it may lack looks."""
        if self.options.fresh and key not in self._measured:
            return None
        return self.results[key[0]].done(key, self.about, self.options.keep_baselines)

    def _lacks(self, key: Key) -> bool:
        """Whether a key has no row yet, or one that lacks looks; or its graph does."""
        rows = [self.done(in_mode(key, mode)) for mode in MODES]
        return rows[0] is None or any(row is not None and row.lacks_looks(self.plan.looks) for row in rows)

    def missing(self, workloads: Sequence[Workload]) -> int:
        """How many rows are to be measured, of modes that are known beforehand."""
        return sum(self._lacks(key) for one in workloads for key in expected_keys(one, self.plan))

    def add(self, row: Row, ceilings: Ceilings) -> bool:
        """Add a row to its suite's file; whether it is the first of its key in this run."""
        results = self.results[row.suite]
        if row.suite not in self.runs:
            self.runs[row.suite] = results.begin(self.about, asdict(ceilings))
        results.add(replace(row, run=self.runs[row.suite]))
        is_first = row.key not in self._measured
        self._measured.add(row.key)
        return is_first

    def save(self, suites: Iterable[str]) -> None:
        """Write the files of suites that have rows."""
        for suite in suites:
            path = self.path(suite)
            if path is not None and self.results[suite].rows:
                self.results[suite].save(path)

    def rows(self) -> list[Row]:
        """The finished rows of what was asked for, in every mode, without those that are to be measured again."""
        wanted = {key for one in self.options.workloads for key in expected_keys(one, self.plan)}
        return [
            row
            for results in self.results.values()
            for row in results.finished()
            if in_mode(row.key, "eager") in wanted and self.done(row.key) is not None
        ]


if __name__ == "__main__":
    sys.exit(main())
