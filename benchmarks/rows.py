"""Measured rows: the device time of every kernel that can serve a pass, of some of its tiles, and of torch's operator.

    python -m benchmarks.rows                                  # suites public and models, random layers; resumes
    python -m benchmarks.rows --suite random-1 --precision tf32,bf16 --near 3 --drawn 2 --seconds 300 --out FILE
    python -m benchmarks.rows --merge ONE.csv.gz OTHER.csv.gz  # into --out

A row is a layer in a precision, a format and a pass, a kernel, and a tile of it. Its role says why it was measured:

    auto    what ``auto`` takes for the pass alone
    own     the tile of another kernel's least estimate, and torch's operator (``native``)
    near    a tile whose estimate comes next
    drawn   a tile drawn from the others, the same one each time

Own tiles of all layers come first, others after them. Each result is compared with float64 before it is timed; what is
wrong has no time and is said. Times are medians of the device alone, from an overwritten L2 cache. Each run measures a
few anchors again, so that the file shows how far runs drift apart. Rows of different GPUs go to different files. With
several GPUs each takes its share of the layers. ``benchmarks.fit`` reads the file. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import geometric_mean, median
from typing import Any

import torch

from benchmarks import environment
from benchmarks.commands import Progress, run_in_processes
from benchmarks.contenders import LAYOUTS, PRECISIONS, torch_settings
from benchmarks.measure import bar_of, verdict
from benchmarks.precompile import asked, load, only_compile
from benchmarks.random_layers import COUNT, random_layers
from benchmarks.reference import Reference, Tensors, random_tensors, reference
from benchmarks.results import RESULTS, read_table, replace_file, table_text
from benchmarks.workloads import SUITES, Workload, custom, select
from gemmconv import algorithms
from gemmconv.algorithms import Algorithm
from gemmconv.device import DeviceSpec, spec_of
from gemmconv.errors import CompileError
from gemmconv.kernels.base import PASSES, Choice, Config, Kernel, Pass
from gemmconv.selection import choose
from gemmconv.timing import cuda_rounds
from gemmconv.tune import OPERANDS

ROLES = AUTO, OWN, NEAR, DRAWN = ("auto", "own", "near", "drawn")
ANCHORS = ("seed2", "dcgan2", "hifigan3")  # layers that every run measures
_SUITES = "public,models,random-1,random-2:50"  # the last to judge by, all others to fit with
_ROUNDS = 7
_RESULTS = {  # of each pass, by name
    "forward": ("output",),
    "input_grad": ("input",),
    "weight_grad": ("weight",),
    "grads": ("input", "weight"),
}

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in algorithms.KERNELS.values()
    if kernel.device_type == "cuda" or isinstance(kernel, Algorithm)
}


@dataclass(frozen=True)
class Row:
    """A line of the file.

    Attributes:
        layer: in one line, as ``benchmarks.workloads.parse_layer`` reads it.
        suite, precision, layout, direction: what of it.
        kernel, tile: by name; the tile as ``explain`` shows it.
        role: of :data:`ROLES`.
        seconds: median time of the device; NaN where the result was wrong or the kernel failed.
        estimate: the seconds that the kernel itself estimated then (``Kernel.seconds``).
    """

    layer: str
    suite: str
    precision: str
    layout: str
    direction: Pass
    kernel: str
    tile: str
    role: str
    seconds: float
    estimate: float

    @property
    def case(self) -> tuple[str, str, str, str]:
        """The fields that rows share if their kernels can replace each other."""
        return self.layer, self.precision, self.layout, self.direction

    @property
    def key(self) -> tuple[str, ...]:
        """The fields that identify a measurement in any run."""
        return (*self.case, self.kernel, self.tile)


def read(path: Path) -> tuple[dict[str, str], list[Row]]:
    """The head (GPU, versions, commits) and the rows of a file."""
    head, table = read_table(gzip.decompress(path.read_bytes()).decode())
    numbers = ({name: float(row[name]) for name in ("seconds", "estimate")} for row in table)
    return head, [Row(**{**row, **both}) for row, both in zip(table, numbers, strict=True)]  # type: ignore[arg-type]


def write(path: Path, head: Mapping[str, str], rows: Iterable[Row]) -> None:
    """Write a file by an atomic rename."""
    text = table_text(head, [asdict(row) for row in rows], digits=5)
    replace_file(path, gzip.compress(text.encode(), mtime=0))


def merged(paths: Sequence[Path]) -> tuple[dict[str, str], list[Row]]:
    """The rows of several files of one GPU; of the same measurement the last one's.

    Raises:
        ValueError: they are of different GPUs.
    """
    heads, found = [], dict[tuple[str, ...], Row]()
    for path in paths:
        head, rows = read(path)
        heads.append(head)
        found |= {row.key: row for row in rows}
    if len({head["gpu"] for head in heads}) > 1:
        raise ValueError(f"rows of different GPUs are never mixed, got {', '.join(head['gpu'] for head in heads)}")
    joined = {name: ", ".join(dict.fromkeys(head[name] for head in heads if name in head)) for name in heads[-1]}
    return joined, list(found.values())


# Cases and candidates.

Case = tuple[Workload, str, str, Pass]
Candidate = tuple[str, Any, str, float]  # kernel by name, tile, role, estimate


def cases_of(workloads: Iterable[Workload], precisions: Sequence[str], layouts: Sequence[str]) -> list[Case]:
    """All cases of some layers, those of a layer together."""
    return list(itertools.product(workloads, precisions, layouts, PASSES))


def workloads_of(suites: Iterable[str]) -> list[Workload]:
    """The layers of suites by turns. ``random-SEED`` has 100 random layers, ``random-SEED:COUNT`` so many."""
    lists = list[Sequence[Workload]]()
    for suite in suites:
        if suite.startswith("random-"):
            seed, _, count = suite.removeprefix("random-").partition(":")
            lists.append(random_layers(int(seed), int(count or COUNT)))
        else:
            lists.append(select([suite]))
    return [one for group in itertools.zip_longest(*lists) for one in group if one is not None]


def config_of(case: Case, spec: DeviceSpec) -> Config:
    """The configuration of a case."""
    workload, precision, layout, direction = case
    config = asked(workload.problem, precision, layout, spec, workload.bias)
    return replace(config, weight_format=config.memory_format) if direction == "grads" else config


def candidates_of(
    config: Config, direction: Pass, near: int, drawn: int, kernels: Iterable[str] = KERNELS
) -> list[Candidate]:
    """The kernels and tiles to measure in a case, own tiles of all kernels first."""
    chosen = None
    if direction != "grads":
        chosen = choose(config, "auto", "benchmarks", direction).choice(config, direction)
    own, others = list[Candidate](), list[Candidate]()
    for kernel in map(KERNELS.__getitem__, kernels):
        if direction not in kernel.directions or kernel.why_not(config, direction) is not None:
            continue
        if isinstance(kernel, Algorithm):
            tile = next(iter(kernel.tiles(config, direction)))
            if math.isfinite(estimate := kernel.seconds(config, direction, tile)) or kernel.name == "native":
                is_auto = chosen is not None and chosen.kernel is kernel
                own.append((kernel.name, tile, AUTO if is_auto else OWN, estimate))
            continue
        taken = chosen.tile if chosen is not None and chosen.kernel is kernel else None
        if taken is not None:
            own.append((kernel.name, taken, AUTO, kernel.seconds(config, direction, taken)))
        tile = kernel.tile(config, direction)
        if (estimate := kernel.seconds(config, direction, tile)) == math.inf:
            continue
        if tile != taken:
            own.append((kernel.name, tile, OWN, estimate))
        if near or drawn:
            tiles = [(kernel.seconds(config, direction, one), one) for one in kernel.tiles(config, direction)]
            rest = sorted((one for one in tiles if one[1] != tile), key=lambda one: one[0])
            far = sorted(Random(0).sample(rest[near:], min(drawn, len(rest[near:]))), key=lambda one: one[0])
            others += [(kernel.name, one, NEAR, seconds) for seconds, one in rest[:near]]
            others += [(kernel.name, one, DRAWN, seconds) for seconds, one in far]
    return own + others


def _compiled(job: tuple[Case, DeviceSpec, str, tuple[str, ...], int, int]) -> list[tuple[Candidate, str]]:
    """The candidates of a case, their kernels in the cache; with each why that failed, or nothing."""
    case, spec, arch, kernels, near, drawn = job
    only_compile(arch)
    config, direction, found = config_of(case, spec), case[3], []
    for candidate in candidates_of(config, direction, near, drawn, kernels):
        reason = ""
        try:
            load(KERNELS[candidate[0]].prepare(config, direction, candidate[1]), config, direction)
        except Exception as error:
            reason = error.log if isinstance(error, CompileError) else f"{type(error).__name__}: {error}"
        found.append((candidate, reason))
    return found


# Measuring.


class Bench:
    """Checks and times candidates on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.complaints = device, list[str]()
        self._of: tuple[str, torch.dtype] | None = None
        self._tensors: dict[str, Tensors] = {}
        self._reference: Reference | None = None

    def rows(
        self, case: Case, candidates: Iterable[tuple[Candidate, str]], known: set[tuple[str, ...]]
    ) -> Iterator[Row]:
        """The rows of a case that are not known yet."""
        workload = case[0]
        config = config_of(case, spec_of(self.device))
        right: list[tuple[Row, Any]] = []
        for (name, tile, role, estimate), reason in candidates:
            kernel = KERNELS[name]
            text = Choice(kernel, tile, 0.0).tile_text
            row = Row(workload.layer, workload.suite, *case[1:], name, text, role, math.nan, estimate)
            if row.key in known or any(row.key == other.key for other, _ in right):
                continue
            call, why = (None, reason) if reason else self._checked(kernel, config, case, tile)
            if call is None:
                self.complaints.append(f"{' '.join(row.key)}: {' '.join(why.split())[:300]}")
                print(f"wrong or failed: {self.complaints[-1]}", flush=True)
                yield row
            else:
                right.append((row, call))
        if right:
            samples = cuda_rounds([call for _, call in right], self.device, _ROUNDS)
            yield from (replace(row, seconds=1e-3 * median(ms)) for (row, _), ms in zip(right, samples, strict=True))

    def _checked(self, kernel: Kernel, config: Config, case: Case, tile: Any) -> tuple[Any, str]:
        """A call that gives the right result, or None and what is wrong."""
        workload, precision, layout, direction = case
        tensors, expected = self._data(workload, config.dtype, layout)
        named = {"input": tensors.x, "weight": tensors.weight, "grad_output": tensors.grad_output}
        arguments = [*(named[name] for name in OPERANDS[direction]), *[tensors.bias] * (direction == "forward")]
        try:
            call = partial(kernel.prepare(config, direction, tile), *arguments)
            for name in _RESULTS[direction]:  # the result is likely to take this memory: what is not written shows
                shape = getattr(workload.problem, f"{name}_shape")
                torch.full(shape, torch.nan, dtype=config.dtype, device=self.device)
            found = call()
            found = found if isinstance(found, list | tuple) else [found]
            errors = expected.errors(dict(zip(_RESULTS[direction], found, strict=True)))
        except torch.cuda.OutOfMemoryError as error:
            return None, str(error)
        except RuntimeError as error:
            torch.cuda.synchronize(self.device)  # raises where the device is lost
            return None, str(error)
        bars = {name: bar_of(name, precision, {name: 5e-3 if kernel.name == "native" else 5e-6}) for name in errors}
        _, wrong = verdict(errors, bars)
        return (None, wrong) if wrong else (call, "")

    def _data(self, workload: Workload, dtype: torch.dtype, layout: str) -> tuple[Tensors, Reference]:
        if self._of != (workload.layer, dtype):
            self._of, self._tensors, self._reference = None, {}, None
            tensors = random_tensors(workload, self.device).to(dtype)
            self._reference = reference(workload.problem, tensors)
            self._tensors = {"nchw": tensors}
            self._of = workload.layer, dtype
        if layout not in self._tensors:
            self._tensors[layout] = self._tensors["nchw"].channels_last()
        assert self._reference is not None
        return self._tensors[layout], self._reference


def measure(cases: Sequence[Case], kernels: tuple[str, ...], near: int, drawn: int, seconds: float, path: Path) -> int:
    """Compile on all cores, measure, and write the file now and then. The exit status: 1 where something was wrong."""
    from gemmconv.runtime.launch import architecture

    device = torch.device("cuda", 0)
    head, rows = read(path) if path.exists() else ({}, [])
    about = {name: str(value) for name, value in environment.describe(device).items()}
    if rows and head["gpu"] != about["gpu"]:
        raise SystemExit(f"{path} has rows of {head['gpu']}; this is {about['gpu']}: take another --out")
    anchors = {workload.layer for workload in select(SUITES, ANCHORS)}
    before = {row.key: row.seconds for row in rows if row.layer in anchors}
    known, bench = {row.key for row in rows} - set(before), Bench(device)
    spec, arch, began, drifts = spec_of(device), architecture(0), time.monotonic(), list[float]()
    levels = [(0, 0), (near, drawn)] if near or drawn else [(0, 0)]
    jobs = [(case, spec, arch, kernels, *level) for level in levels for case in cases]
    progress, saved = Progress(len(jobs)), time.monotonic()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count() or 1) as pool:
        for (case, *_), candidates in zip(jobs, pool.imap(_compiled, jobs), strict=True):
            with torch_settings(case[1]):
                found = list(bench.rows(case, candidates, known))
            rows += found
            known.update(row.key for row in found)
            drifts += [row.seconds / before[row.key] for row in found if before.get(row.key, math.nan) > 0]
            progress.done += 1
            if time.monotonic() - began > seconds:
                break
            if time.monotonic() - saved > 60:
                write(path, about, rows)
                progress.say(f"{len(rows)} rows, {case[0].name}")
                saved = time.monotonic()
        pool.terminate()
    if drifts := [one for one in drifts if not math.isnan(one)]:
        about["drift of anchors"] = f"{geometric_mean(drifts):.3f} (of {len(drifts)} rows, against the run before)"
    write(path, about, {row.key: row for row in rows}.values())
    print(f"{len(rows)} rows in {path.name}; {len(bench.complaints)} wrong or failed")
    return int(bool(bench.complaints))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rows", description="Measure every kernel for every pass of many layers."
    )
    add = parser.add_argument
    add("--suite", default=_SUITES, help="suites, and random-SEED:COUNT (default: %(default)s)")
    add("--layer", action="append", default=[], metavar="L", help='in place of suites, like "n64 c64x128 k3x5 h128"')
    add("--precision", default="tf32,fp32,bf16", help=f"of {', '.join(PRECISIONS)} (default: %(default)s)")
    add("--layout", default=",".join(LAYOUTS), help="default: %(default)s")
    add("--kernel", default=",".join(KERNELS), metavar="K", help="of those alone, with commas between")
    add("--near", type=int, default=0, metavar="N", help="tiles of a kernel beside its own, by estimate (default: 0)")
    add("--drawn", type=int, default=0, metavar="N", help="tiles drawn from the others (default: 0)")
    add("--seconds", type=float, default=math.inf, help="stop after so many")
    add("--share", default="0/1", metavar="I/N", help="every Nth layer from the Ith on")
    add("--out", type=Path, metavar="FILE", help="default: benchmarks/results/GPU/rows.csv.gz")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="write the rows of these files to --out, and leave")
    options = parser.parse_args(argv)
    if options.merge:
        write(options.out or options.merge[0], *merged(options.merge))
        return 0
    if not torch.cuda.is_available():
        print("benchmarks.rows needs a CUDA device; torch finds none here", file=sys.stderr)
        return 1
    out = options.out or RESULTS / environment.slug(torch.device("cuda", 0)) / "rows.csv.gz"
    if (gpus := torch.cuda.device_count()) > 1:
        return _on_each(gpus, list(argv if argv is not None else sys.argv[1:]), out)
    precisions, layouts = options.precision.split(","), options.layout.split(",")
    workloads = [custom(text) for text in options.layer] or workloads_of(options.suite.split(","))
    index, count = map(int, options.share.split("/"))
    share = [workload for workload in workloads if workload.name not in ANCHORS][index::count]
    wanted = cases_of([*select(SUITES, ANCHORS), *share], precisions, layouts)
    return measure(wanted, tuple(options.kernel.split(",")), options.near, options.drawn, options.seconds, out)


def _on_each(gpus: int, arguments: list[str], out: Path) -> int:
    """Run a share on each GPU of the machine, then merge what they wrote."""
    parts = [out.with_name(f"part{i}-{out.name}") for i in range(gpus)]
    flags = [["--share", f"{i}/{gpus}", "--out", str(part)] for i, part in enumerate(parts)]
    own = [{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(gpus)]
    status = run_in_processes("benchmarks.rows", arguments, flags, own)
    write(out, *merged([path for path in (out, *parts) if path.exists()]))
    for part in parts:
        part.unlink(missing_ok=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
