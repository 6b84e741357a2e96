"""Fit what kernels are expected to take to measured rows: gemmconv/costs/measured.npz.

    python -m benchmarks.fit                       # from all benchmarks/results/GPU/rows.csv.gz and cudnn.csv.gz
    python -m benchmarks.fit --judge random-2      # the suite that is left out, and that choices are judged by

gemmconv/kernels/measured.py says what is fitted. Prints for each kernel how far estimates are off, before, after, and
of layers that a fit has not seen (ten parts, by layers). Then how much slower than the fastest of all that was measured
choices are: those that the library made when rows were measured, and those that it makes now. Needs no GPU.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch

from benchmarks import rows as measured_rows
from benchmarks.precompile import asked
from benchmarks.results import RESULTS
from benchmarks.rows import AUTO, Row
from benchmarks.workloads import custom
from gemmconv.device import KNOWN
from gemmconv.kernels import measured
from gemmconv.kernels.base import Config

JUDGED = "random-2"
FILES = ("rows.csv.gz", "cudnn.csv.gz")  # of a GPU's results: all kernels, and torch's operator of more layers
GPU = "NVIDIA H200"  # whose rows are fitted to; of other GPUs estimates are in proportion
_RIDGE, _FEW_RIDGE = 3.0, 60.0  # rows' worth of belief that a size does not matter: for torch's operator, for ours
_NOISE = 0.3  # of a row, to what layers near each other have in common
_FEWEST = 14  # rows of a correction: fewer follow single layers
_PICKED, _COUNT = ("public", "models"), 3  # suites of layers that people use, whose rows of torch's count so often
_FOLDS = 10

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Sample:
    """A row with what it is fitted by: its layer's sizes, and by how much the estimate was off, as a logarithm."""

    row: Row
    sizes: tuple[float, ...]
    off: float


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description="Fit estimates to measured rows.")
    parser.add_argument("--judge", default=JUDGED, metavar="SUITE", help="left out of the fit (default: %(default)s)")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    rows = load(RESULTS)
    table = fit([row for row in rows if row.suite != options.judge], print)
    if not options.dry:
        write(table)
        print(f"written to {measured.FILE.name}")
    measured._table.cache_clear()
    measured._scaled.cache_clear()
    measured.correction.cache_clear()
    for line in regrets(rows, options.judge):
        print(line)
    return 0


def write(table: dict[str, Array]) -> None:
    """Write what gemmconv.kernels.measured reads."""
    names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    stored: dict[str, Any] = {}
    for name, values in table.items():
        names[values.shape].append(name)
    for i, same_shape in enumerate(names.values()):
        stored[f"names {i}"] = np.array(same_shape)
        stored[f"values {i}"] = np.stack([table[name] for name in same_shape]).astype(np.float32)
    with measured.FILE.open("wb") as file:
        np.savez_compressed(file, **stored)


def load(results: Path) -> list[Row]:
    """The rows of the GPU that is fitted to; wrong ones are left out."""
    paths = [path for folder in sorted(results.iterdir()) for name in FILES if (path := folder / name).exists()]
    files = [measured_rows.read(path) for path in paths]
    return [row for head, rows in files if head["gpu"] == GPU for row in rows if not math.isnan(row.seconds)]


def config_of(row: Row) -> Config:
    """The configuration that a row was measured with."""
    return _config(row.layer, row.precision, row.layout)


@cache
def _config(layer: str, precision: str, layout: str) -> Config:
    workload = custom(layer)
    return asked(workload.problem, precision, layout, KNOWN[GPU], workload.bias)


@cache
def _sizes(layer: str) -> tuple[float, ...]:
    return tuple(measured.sizes(custom(layer).problem))


def samples(rows: Iterable[Row]) -> dict[str, list[Sample]]:
    """The samples of each correction, by its key."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for row in rows:
        key, estimate = measured.key_of(row.kernel, config_of(row), row.direction), row.estimate
        if row.kernel == measured.NATIVE:
            estimate = measured.roofline(config_of(row), row.direction)
        if key is not None and math.isfinite(estimate):
            one = Sample(row, _sizes(row.layer), math.log(row.seconds / estimate))
            found[key] += [one] * (_COUNT if row.suite in _PICKED and row.kernel == measured.NATIVE else 1)
    return {key: of_key for key, of_key in sorted(found.items()) if len(of_key) >= _FEWEST}


def fit(rows: Sequence[Row], say: Callable[[str], None]) -> dict[str, Array]:
    """The table that gemmconv/kernels/measured.py reads."""
    of_torch = sorted({row.layer for row in rows if row.kernel == measured.NATIVE})
    every = np.array([_sizes(layer) for layer in of_torch])
    mean, spread = scale_of(every)
    place = {layer: i for i, layer in enumerate(of_torch)}
    table: dict[str, Array] = {"mean": mean, "spread": spread, "layers": ((every - mean) / spread)[:, 1:]}
    for key, of_key in samples(rows).items():
        scaled = (np.array([one.sizes for one in of_key]) - mean) / spread
        off = np.array([one.off for one in of_key])
        is_torchs = key.startswith(measured.NATIVE)
        parts = np.array([_part(one.row.layer) for one in of_key])
        unseen = np.zeros(len(off))
        for part in range(_FOLDS if len(set(parts)) > 1 else 0):
            weights, near, known = fitted(scaled[parts != part], off[parts != part], is_torchs)
            unseen[parts == part] = off[parts == part] - _at(scaled[parts == part], weights, near, known)
        weights, near, known = fitted(scaled, off, is_torchs)
        left = off - _at(scaled, weights, near, known)
        say(
            f"{key}: {len(off)} rows, off by {_size(off):.2f}, fitted {_size(left):.2f}, unseen {_size(unseen):.2f} "
            "(root mean square of the logarithm)"
        )
        weights[0] += _size(unseen) ** 2 / 2  # the mean of what is spread so, of a logarithm
        table[key] = weights
        if is_torchs:
            table[f"{key} near"] = np.zeros(len(of_torch))
            np.add.at(table[f"{key} near"], [place[one.row.layer] for one in of_key], near)
    return table


def _part(layer: str) -> int:
    return sum(layer.encode()) % _FOLDS


def scale_of(values: Array) -> tuple[Array, Array]:
    """The mean and the spread of each size, the first of which is a one; a size that does not vary counts nothing."""
    mean, spread = values.mean(0), values.std(0)
    mean[0], spread[0], spread[spread < 1e-9] = 0.0, 1.0, np.inf
    return mean, spread


def fitted(
    scaled: Array, off: Array, by_neighbours: bool, noise: float = _NOISE, width: float = measured.WIDTH
) -> tuple[Array, Array, Array]:
    """Weights of scaled sizes, and where neighbours count what each layer adds, with where it lies."""
    belief = (_RIDGE if by_neighbours else _FEW_RIDGE) * np.eye(scaled.shape[1])
    belief[0, 0] = 1e-9
    weights = np.linalg.solve(scaled.T @ scaled + belief, scaled.T @ off)
    if not by_neighbours:
        return weights, np.zeros(0), scaled[:0]
    left = off - scaled @ weights
    near = np.linalg.solve(_nearness(scaled, scaled, width) + noise * np.eye(len(off)), left)
    return weights, near, scaled


def _nearness(one: Array, other: Array, width: float = measured.WIDTH) -> Array:
    return np.asarray(measured.nearness(one[:, None, 1:], other[None, :, 1:], width))


def _at(scaled: Array, weights: Array, near: Array, known: Array) -> Array:
    found = scaled @ weights
    return np.asarray(found + _nearness(scaled, known) @ near if len(near) else found)


def _size(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2)))


def expected(row: Row) -> float:
    """The seconds that the library expects of what was measured, by the estimate of then and the corrections of now."""
    config = config_of(row)
    if row.kernel == measured.NATIVE:
        return measured.torchs_seconds(config, row.direction)
    factor = measured.correction(row.kernel, config, row.direction)
    return row.estimate * (1.0 if factor is None else factor)


def regret_of(rows: Iterable[Row], chosen: Callable[[Sequence[Row]], Row]) -> dict[tuple[str, str, str], float]:
    """How many times as long as the fastest what is chosen takes: geometric means by precision, format and pass."""
    cases = defaultdict(list)
    for row in rows:
        if row.direction != "grads":
            cases[row.case].append(row)
    found = defaultdict(list)
    for (_, precision, layout, direction), of_case in cases.items():
        fastest = min(row.seconds for row in of_case)
        found[precision, layout, direction].append(chosen(of_case).seconds / fastest)
    return {key: geometric_mean(ratios) for key, ratios in sorted(found.items())}


def as_then(rows: Sequence[Row]) -> Row:
    """The row that ``auto`` chose when rows were measured, or the one of the least estimate if none is marked."""
    return next((row for row in rows if row.role == AUTO), min(rows, key=lambda row: row.estimate))


def as_now(rows: Sequence[Row]) -> Row:
    """The row that is now expected to be the fastest."""
    return min(rows, key=expected)


def regrets(rows: Sequence[Row], judged: str) -> list[str]:
    """Lines of regret: of the judged suite, and of the others."""
    lines = []
    for name, some in (
        (judged, [row for row in rows if row.suite == judged]),
        ("public, models", [row for row in rows if row.suite in ("public", "models")]),
    ):
        then, now = regret_of(some, as_then), regret_of(some, as_now)
        lines += [f"{name} {' '.join(key)}: {then[key]:.3f} then, {now[key]:.3f} now" for key in then]
        by_pass: Mapping[str, list[Any]] = defaultdict(list)
        for key in then:
            by_pass[key[2]].append((then[key], now[key]))
        for direction, pairs in by_pass.items():
            means = [geometric_mean(column) for column in zip(*pairs, strict=True)]
            lines.append(f"{name} {direction}: {means[0]:.3f} then, {means[1]:.3f} now")
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
