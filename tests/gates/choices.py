"""What ``auto`` takes for each layer of every suite, beside what a file says.

    python -m tests.gates.choices [--write] [--suite public,models]

A row is a layer in a precision, a format and a pass: the algorithm, its kernels, a digest of the values that they are
specialised with, and the estimate in microseconds. The digest leaves names out, so that it outlives renaming. The exit
status is 1 where rows differ. No GPU is needed; choices are those for an H100.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest import mock

import torch

from benchmarks.contenders import LAYOUTS
from benchmarks.precompile import asked, load
from benchmarks.workloads import SUITES, Workload, select
from gemmconv import pairs, selection
from gemmconv.device import MEASURED
from gemmconv.kernels.base import PASSES, Config, Direction
from gemmconv.ops.gradients import both_gradients
from gemmconv.ops.pass_programs import gradient_programs

FILE = Path(__file__).parents[1] / "data" / "choices.csv"
KEY, VALUES = ("workload", "precision", "layout", "pass"), ("algorithm", "kernels", "digest", "estimate_us")
NUMERICS = ("fp32", "tf32", "fp16")  # bf16 is chosen for as fp16
Row = dict[str, str]
Load = tuple[str, Mapping[str, object]]  # a source and the macros that specialise it


def rows_of(workload: Workload) -> list[Row]:
    """The rows of a layer."""
    return [
        {"workload": workload.name, "precision": precision, "layout": layout, "pass": one, **_taken(config, one)}
        for precision, layout, config in configs_of(workload)
        for one in PASSES
    ]


def configs_of(workload: Workload) -> Iterator[tuple[str, str, Config]]:
    """Precision, layout and what a call asks for."""
    for precision, layout in itertools.product(NUMERICS, LAYOUTS):
        yield precision, layout, asked(workload.problem, precision, layout, MEASURED, workload.bias)


def loads_of(config: Config, one: str) -> tuple[str, float, list[Load]]:
    """The algorithm of a pass, its estimate in seconds, and the kernels that it would load."""
    loads: list[Load] = []

    def note(source: str, macros: Mapping[str, object], device: int | None, shared_bytes: int = 0) -> None:
        if (source, macros) not in loads:
            loads.append((source, macros))

    with mock.patch("gemmconv.runtime.launch.load", note):
        if one != "grads":
            chosen = selection.choose(config, "auto", "", cast(Direction, one))
            load(chosen.prepare(config, cast(Direction, one)), config, cast(Direction, one))
            return chosen.name, chosen.estimate(config, cast(Direction, one)), loads
        gradients = pairs.choose_pair(config, config, "auto", "")
        inner = replace(config, memory_format=torch.channels_last) if gradients.via_channels_last else config
        program, *others = gradient_programs(gradients, config, config)
        if program is not None and not others:
            load(program.prepare(config.device), config, "grads")
        else:
            both_gradients(gradients, inner, inner)
        taken = gradients.input_grad, gradients.weight_grad
        names = [algorithm.name for algorithm in taken]
        flags = gradients.shares_transpose(inner, inner), gradients.at_once, gradients.via_channels_last
        how = [word for word, flag in zip(("share", "at_once", "turned"), flags, strict=True) if flag]
        return "+".join([*dict.fromkeys(names), *how]), pairs._fastest_pair(inner, inner, taken)[0].device, loads


def _taken(config: Config, one: str) -> Row:
    algorithm, seconds, loads = loads_of(config, one)
    values = [sorted(map(str, macros.values())) for _, macros in loads]
    digest = hashlib.sha256(repr(values).encode()).hexdigest()[:12] if loads else ""
    kernels = "+".join(dict.fromkeys(source.removesuffix(".cu") for source, _ in loads))
    return dict(zip(VALUES, (algorithm, kernels, digest, f"{1e6 * seconds:.6g}"), strict=True))


def read(path: Path = FILE) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(rows: Iterable[Row], path: Path = FILE) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, KEY + VALUES, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def differences(before: Iterable[Row], after: Iterable[Row]) -> Iterator[str]:
    """A line for each row that is not the same in both; estimates may differ by their last digit."""
    old, new = ({tuple(row[name] for name in KEY): row for row in rows} for rows in (before, after))
    for key in dict.fromkeys([*old, *new]):
        if key not in old or key not in new:
            yield f"{' '.join(key)}: {'gone' if key in old else 'new'}"
            continue
        changed = [name for name in VALUES if not _same(name, old[key][name], new[key][name])]
        if changed:
            yield f"{' '.join(key)}: " + ", ".join(f"{name} {old[key][name]} -> {new[key][name]}" for name in changed)


def _same(name: str, one: str, other: str) -> bool:
    if name != "estimate_us":
        return one == other
    return abs(float(one) - float(other)) <= 2e-6 * abs(float(one)) or one == other


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the file anew")
    parser.add_argument("--suite", default=",".join(SUITES), help="suites, with commas between (default: all)")
    options = parser.parse_args(arguments)
    workloads = select(options.suite.split(","))
    with ProcessPoolExecutor() as pool:
        after = list(itertools.chain(*pool.map(rows_of, workloads)))
    if options.write:
        write(after)
        print(f"{len(after)} rows in {FILE.name}")
        return 0
    names = {workload.name for workload in workloads}
    lines = list(differences((row for row in read() if row["workload"] in names), after))
    print(*lines, f"{len(lines)} of {len(after)} rows differ", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
