"""Fitted numbers of gemmconv/costs, by rows that benchmarks.choices measures and keeps: tiles and what they took.

Of the rows' layers every fifth is held out. The others are fitted to; numbers are written where estimates of the former
come closer to what was measured.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import LAYOUTS, PRECISIONS
from benchmarks.results import replace_file
from benchmarks.workloads import Workload, custom
from gemmconv import algorithms
from gemmconv.algorithms import Algorithm
from gemmconv.device import KNOWN, DeviceSpec, spec_of
from gemmconv.kernels.base import Choice, Config, Kernel, Pass, Precision
from gemmconv.kernels.costs import FOLDER, costs_of

RESULTS = Path(__file__).parent / "results"
ROWS = RESULTS / "nvidia-h200" / "choices.csv"
COSTS = FOLDER / "h200.json"  # what kernels estimate by, on every GPU
_HELD_OUT = 5  # every fifth layer
_FARTHEST = math.log(4)  # that a number goes in one fit
_STAYING = 0.1 / 0.5  # estimates are 10% off, and numbers 50%, before rows say more
_STEP, _TURNS = 1e-3, 30
_THRESHOLDS = ("cells", "stages")  # units of numbers where estimates jump; they stay

# The kernels for GPUs that have tiles.
KERNELS = {
    name: kernel
    for name, kernel in algorithms.KERNELS.items()
    if not isinstance(kernel, Algorithm) and kernel.device_type == "cuda"
}

Number = tuple[str, str]  # a cost by name, and the key where it is a table
Numbers = dict[Number, float]
Errors = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Case:
    """A layer, and how it is computed."""

    workload: Workload
    precision: str
    layout: str

    def config(self, device: torch.device, spec: DeviceSpec | None = None) -> Config:
        """What the kernel decides on."""
        rounding: Precision = "tf32" if self.precision == "tf32" else "ieee"
        dtype, memory_format = PRECISIONS[self.precision], LAYOUTS[self.layout]
        spec = spec or spec_of(device)
        return Config(self.workload.problem, dtype, device, rounding, memory_format=memory_format, spec=spec)


@dataclass(frozen=True)
class Row:
    """What a tile took, in seconds, and where: a line of the file."""

    layer: str
    precision: str
    layout: str
    direction: Pass
    kernel: str
    tile: str
    seconds: float
    gpu: str
    commit: str


Measured = tuple[Row, Config, Any]  # the last is the tile


def read(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        lines: Iterable[dict[str, Any]] = csv.DictReader(file)
        return [Row(**{**line, "seconds": float(line["seconds"])}) for line in lines]


def keep(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a file. Older ones of the same tile go, and all of the same kernel from other commits."""
    commits = {row.kernel: row.commit for row in rows}
    kept = [row for row in read(path) if row.commit == commits.get(row.kernel, row.commit)]
    by_tile = {replace(row, seconds=0.0): row for row in [*kept, *rows]}
    file = io.StringIO()
    writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, by_tile.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, file.getvalue())


def fit_all(kernels: Iterable[Kernel], path: Path = ROWS, costs: Path = COSTS) -> int:
    """Fit the numbers of kernels to the rows of a file, print how well, write. The exit status: 1 without any rows."""
    rows, found = read(path), False
    for kernel in kernels:
        of_kernel = [row for row in rows if row.kernel == kernel.name]
        found = found or bool(of_kernel)
        if of_kernel:
            fit_kernel(kernel, of_kernel, _place(path), costs)
        elif "forward" in kernel.directions:
            command = f"python -m benchmarks.choices --kernel {kernel.name} --layout nchw,channels_last --keep"
            print(f"{kernel.name}: no rows in {_place(path)}; on a GPU, measure them by {command}")
        else:
            print(f"{kernel.name}: no rows, and benchmarks.choices measures forward passes alone")
    return int(not found)


def fit_kernel(kernel: Kernel, rows: Sequence[Row], place: str, costs: Path = COSTS) -> None:
    """Fit the numbers of a kernel to its rows, print how well, and write those that help layers held out."""
    measured = tiles_of(kernel, rows)
    layers = sorted({row.layer for row, _, _ in measured})
    held_out = set(layers[_HELD_OUT - 1 :: _HELD_OUT])
    gpus, commits = (" and ".join(sorted({getattr(row, name) for row in rows})) for name in ("gpu", "commit"))
    source = f"{len(measured)} rows of {len(layers)} layers ({place}; {gpus}; commit {commits})"
    print(f"{kernel.name}: {source}; {len(rows) - len(measured)} of tiles that it has no more")
    if not held_out:
        print(f"not fitted: rows of {_HELD_OUT} layers are needed")
        return
    before = numbers_of(kernel, costs)
    held = np.array([row.layer in held_out for row, _, _ in measured])
    others = [one for one in measured if one[0].layer not in held_out]
    try:
        fitted = fit(partial(errors_of, kernel, others), before)
        after = {number: _rounded(value, before[number]) for number, value in fitted.items()}
        old, new = errors_of(kernel, measured, before), errors_of(kernel, measured, after)
    finally:
        costs_of(kernel.name).replace(_values(before))
    print(f"off (root mean square of the logarithm): {_off(old[~held])}, fitted {_off(new[~held])}", end="; ")
    print(f"held out ({len(held_out)} of {len(layers)} layers) {_off(old[held])}, fitted {_off(new[held])}")
    changed = {number: value for number, value in after.items() if value != before[number]}
    for number, value in changed.items():
        print(f"  {' '.join(number).strip()}: {before[number]:g} -> {value:g}")
    if changed and _size(new[held]) < _size(old[held]):
        write(costs, kernel.name, changed, f"{source}: {_off(new)} off, {_off(new[held])} where held out")
        print(f"written to {costs.name}")
    else:
        print("not written: estimates of layers held out come no closer")


def tiles_of(kernel: Kernel, rows: Iterable[Row]) -> list[Measured]:
    """The rows whose tiles the kernel still has, with them."""
    cases: dict[tuple[Config, Pass], list[Row]] = {}
    for row in rows:
        case = Case(custom(row.layer), row.precision, row.layout)
        cases.setdefault((case.config(torch.device("cuda", 0), KNOWN.get(row.gpu)), row.direction), []).append(row)
    found = []
    for (config, direction), of_case in cases.items():
        able = kernel.why_not(config, direction) is None
        tiles = {tile_text(kernel, tile): tile for tile in (kernel.tiles(config, direction) if able else ())}
        found += [(row, config, replace(tiles[row.tile])) for row in of_case if row.tile in tiles]
    for row, config, tile in found:
        kernel.seconds(config, row.direction, tile)  # by numbers as they are, which decide geometry too
    return found


def errors_of(kernel: Kernel, measured: Iterable[Measured], numbers: Numbers) -> Errors:
    """By how much estimates by some numbers are above what was measured, as logarithms."""
    costs_of(kernel.name).replace(_values(numbers))
    found = []
    for row, config, tile in measured:
        # A tile keeps floats, which are estimates, and geometry, which is to be that of the tile that was measured.
        for name in [name for name, value in vars(tile).items() if isinstance(value, float)]:
            tile.__dict__.pop(name)
        found.append(math.log(kernel.seconds(config, row.direction, tile) / row.seconds))
    return np.array(found)


def tile_text(kernel: Kernel, tile: Any) -> str:
    """A tile as rows name it."""
    return Choice(kernel, tile, 0.0).tile_text


def numbers_of(kernel: Kernel, costs: Path = COSTS) -> Numbers:
    """The numbers of a kernel that can be fitted: those above zero that are no thresholds."""
    group = json.loads(costs.read_text())[kernel.name]["costs"]
    found: Numbers = {}
    for name, entry in group.items():
        values = entry["value"] if isinstance(entry["value"], dict) else {"": entry["value"]}
        if entry["unit"] not in _THRESHOLDS:
            found |= {(name, key): value for key, value in values.items() if value > 0}
    return found


def fit(errors: Callable[[Numbers], Errors], start: Numbers) -> Numbers:
    """The numbers whose mean squared errors are the least, by Levenberg and Marquardt, in logarithms of numbers.

    That a number goes away from where it was counts a little: so those stay that the rows say nothing of.
    """
    first = np.log(list(start.values()))

    def at(logs: Errors) -> Errors:
        found = errors(dict(zip(start, np.exp(logs).tolist(), strict=True)))
        return np.concatenate([found, _STAYING * (logs - first)])

    logs, now, damping = first, at(first), 1e-2
    for _ in range(_TURNS):
        slopes = np.stack([(at(logs + _STEP * one) - now) / _STEP for one in np.eye(len(logs))], axis=1)
        size = _size(now)
        while damping < 1e3:
            normal = slopes.T @ slopes / len(now) + damping * np.eye(len(logs))
            step = np.linalg.solve(normal, -slopes.T @ now / len(now))
            there = np.clip(logs + step, first - _FARTHEST, first + _FARTHEST)
            if _size(then := at(there)) < size:
                logs, now, damping = there, then, max(damping / 10, 1e-9)
                break
            damping *= 10
        if _size(now) > (1 - 1e-4) * size:
            break
    return dict(zip(start, np.exp(logs).tolist(), strict=True))


def write(path: Path, kernel: str, numbers: Numbers, source: str) -> None:
    """Put numbers of a kernel into a file of costs, with their source; all other lines stay as they are."""
    lines, values = path.read_text().split("\n"), _values(numbers)
    i = lines.index(f'  "{kernel}": {{')
    while not lines[i].startswith("  }"):
        line, i = lines[i], i + 1
        name = line.strip().split('"')[1] if line.startswith('      "') else ""
        if name in values:
            entry = json.loads(f"{{{line.rstrip(',')}}}")[name]
            value = values[name]
            entry["value"] = {**entry["value"], **value} if isinstance(value, dict) else value
            text = json.dumps({**entry, "source": source}, ensure_ascii=False)
            lines[i - 1] = f'      "{name}": {text}{"," * line.endswith(",")}'
    replace_file(path, "\n".join(lines))


def _values(numbers: Mapping[Number, float]) -> dict[str, float | dict[str, float]]:
    """The same as a file of costs has them."""
    values: dict[str, Any] = {}
    for (name, key), value in numbers.items():
        if key:
            values.setdefault(name, {})[key] = value
        else:
            values[name] = value
    return values


def _rounded(value: float, before: float) -> float:
    """To three digits; as it was where it is within 2% of that."""
    if abs(math.log(value / before)) < 0.02:
        return before
    rounded = float(f"{value:.3g}")
    return int(rounded) if rounded.is_integer() and rounded < 1e6 else rounded


def _size(errors: Errors) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def _off(errors: Errors) -> str:
    return f"{100 * _size(errors):.1f}%"


def _place(path: Path) -> str:
    """Of a file of results, as the repository has it; of another its name."""
    inside = path.resolve().is_relative_to(RESULTS.resolve())
    return path.resolve().relative_to(RESULTS.resolve().parents[1]).as_posix() if inside else path.name
