"""Fit the rule by which `auto` chooses on a CPU: rows of `python -m benchmarks.cpu` become speedup.json.

    python -m benchmarks.cpu_fit            # from all files of random layers under benchmarks/results/cpu

Rows of `fused` beside torch, each pass apart, are sorted by instruction set, pass, memory format and type.
For each group the logarithm of torch's time over ours is fitted by a ridge regression in the logarithms of the layer's
sizes (gemmconv/kernels/cpu/estimate.py, beside which the file lies). Ten-fold cross-validation says what choosing by it
is worth on layers that it was not fitted to. The instruction set is that of the rows: any machine can fit another's.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results import RESULTS, read_table
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config
from gemmconv.kernels.cpu import estimate

_TARGET = Path(estimate.__file__).with_name("speedup.json")
_RIDGE = 3.0  # rows' worth of belief that a size does not matter
_MOST = 1.7  # logarithm to base 2 beyond which a row counts no more: by how much a choice is right does not matter
_FEWEST = 60  # rows of a group
_WORTH, _MOST_LOST = 1.02, 1 / 6  # what choosing must gain on average, and the share of what it takes that may lose
_LANES = {"avx512": (8, 16, 3), "avx2": (4, 8, 3)}  # rows, lanes and vectors of float32's register tile


class _Tile:
    def __init__(self, isa: str) -> None:
        self.rows, self.lanes, self.vectors = _LANES[isa]


def _problem(row: dict[str, str]) -> Problem:
    def pair(name: str) -> tuple[int, int]:
        first, second = (int(row[f"{name}_{axis}"]) for axis in "hw")
        return first, second

    counts = [int(row[name]) for name in ("batch", "in_channels", "out_channels", "groups")]
    return Problem(*counts, *(pair(name) for name in ("in", "k", "s", "p", "op", "d")))  # type: ignore[arg-type]


def _rows() -> dict[str, list[tuple[dict[str, float], float, float]]]:
    """For each group its rows: sizes, the logarithm of the ratio, and that from which the rule takes the layer."""
    found = defaultdict(list)
    for path in sorted((RESULTS / "cpu").glob("*/random-*.csv")):
        head, table = read_table(path.read_text())
        _as_on(head["isa"])
        for row in table:
            if row["status"] != "ok" or row["algorithm"] != "fused" or row["pass"] == "both":
                continue
            memory_format = torch.channels_last if row["memory_format"] == "channels_last" else torch.contiguous_format
            dtype = getattr(torch, row["dtype"])
            config = Config(_problem(row), dtype, torch.device("cpu"), memory_format=memory_format)
            values = estimate.sizes(config, row["pass"])  # type: ignore[arg-type]
            key = estimate.key_of(config, row["pass"])  # type: ignore[arg-type]
            least = estimate.least_speedup(config.problem, dtype)
            found[key].append((values, math.log2(float(row["ratio"])), math.log2(least)))
    return found


def _as_on(isa: str) -> None:
    """Have estimates made as on a machine with an instruction set, which need not be this one's."""
    estimate.cycles.cache_clear()
    vars(estimate).update(isa_name=lambda: isa, kernels_for=lambda dtype: _Tile(isa))


def _fit(values: Any, ratios: Any) -> Any:
    mean, spread = values.mean(0), values.std(0)
    mean[0], spread[0] = 0.0, 1.0
    spread[spread < 1e-9] = math.inf  # a size that does not vary
    scaled = (values - mean) / spread
    penalty = _RIDGE * np.eye(values.shape[1])
    penalty[0, 0] = 0.0
    found = np.linalg.solve(scaled.T @ scaled + penalty, scaled.T @ np.clip(ratios, -_MOST, _MOST)) / spread
    found[0] -= (found * mean)[1:].sum()
    return found


def main() -> None:
    coefficients = {}
    for key, rows in sorted(_rows().items()):
        names = list(rows[0][0])
        values = np.array([[one[name] for name in names] for one, _, _ in rows])
        ratios, least = (np.array(of) for of in list(zip(*rows, strict=True))[1:])
        if len(rows) < _FEWEST:
            print(f"{key}: {len(rows)} rows are too few")
            continue
        expected, folds = np.zeros(len(rows)), np.arange(len(rows)) % 10
        for fold in range(10):
            expected[folds == fold] = values[folds == fold] @ _fit(values[folds != fold], ratios[folds != fold])
        taken = expected > least
        chosen, best = np.where(taken, ratios, 0.0), np.maximum(ratios, 0.0)
        lost = np.sort(2 ** ratios[taken & (ratios < math.log2(0.97))])
        print(
            f"{key}: {len(rows)} rows, ours {2 ** ratios.mean():.2f}x, chosen {2 ** chosen.mean():.3f}x of "
            f"{2 ** best.mean():.3f}x, {taken.sum()} taken, {len(lost)} of them below 0.97x"
            + (f": {', '.join(f'{one:.2f}' for one in lost[:4])}" if len(lost) else "")
        )
        if 2 ** chosen.mean() < _WORTH or len(lost) > taken.sum() * _MOST_LOST:
            print("  which is left to torch")
            continue
        coefficients[key] = {name: round(float(one), 4) for name, one in zip(names, _fit(values, ratios), strict=True)}
    _TARGET.write_text(json.dumps(coefficients, indent=1) + "\n")


if __name__ == "__main__":
    main()
