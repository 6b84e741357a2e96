"""Fit the rule by which `auto` chooses on a CPU: rows of `python -m benchmarks.cpu` become speedup.npz.

    python -m benchmarks.cpu_fit            # from all files under benchmarks/results/cpu

Rows of `fused` beside torch, each pass apart, are sorted by instruction set, pass, memory format and type. For each
group the logarithm of torch's time over ours is fitted in the logarithms of the layer's sizes, as
gemmconv/kernels/cpu/estimate.py says. Ten-fold cross-validation says what choosing by it is worth on layers that it was
not fitted to. The instruction set is that of the rows: any machine can fit another's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from benchmarks import fit
from benchmarks.results import RESULTS, read_table
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config
from gemmconv.kernels.cpu import estimate
from gemmconv.kernels.measured import scaled_sizes

_MOST = 1.7  # logarithm to base 2 beyond which a row counts no more: by how much a choice is right does not matter
_FEWEST = 60  # rows of a group
_WORTH, _MOST_LOST = 1.02, 1 / 20  # what choosing must gain on average, and the share of what it takes that may lose
_FOLDS, _NOISE = 10, 0.1  # noise: of a row, to what layers near each other have in common
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


def _rows() -> dict[str, list[tuple[Config, Any, float]]]:
    """For each group its rows: configuration, pass, and the logarithm of the ratio."""
    found = defaultdict(list)
    for path in sorted((RESULTS / "cpu").glob("*/*.csv")):
        head, table = read_table(path.read_text())
        _as_on(head["isa"])
        for row in table:
            if row["status"] != "ok" or row["algorithm"] != "fused" or row.get("pass", "both") == "both":
                continue
            memory_format = torch.channels_last if row["memory_format"] == "channels_last" else torch.contiguous_format
            dtype, direction = getattr(torch, row["dtype"]), row["pass"]
            config = Config(_problem(row), dtype, torch.device("cpu"), memory_format=memory_format)
            key = estimate.key_of(config, direction)  # type: ignore[arg-type]
            found[key].append((config, direction, math.log2(float(row["ratio"]))))
    return found


def _as_on(isa: str) -> None:
    """Have estimates made as on a machine with an instruction set, which need not be this one's."""
    estimate.cycles.cache_clear()
    vars(estimate).update(isa_name=lambda: isa, kernels_for=lambda dtype: _Tile(isa))


def _fit(values: Any, ratios: Any) -> Any:
    """The array of a group that gemmconv/kernels/cpu/estimate.py reads."""
    mean, spread = fit.scale_of(values)
    scaled = np.array([scaled_sizes(one, mean, spread) for one in values])
    off = np.clip(ratios, -_MOST, _MOST)
    coefficients, near, layers = fit.fitted(scaled, off, True, _NOISE, estimate.WIDTH)
    layers[:, 0] = near
    return np.array([mean, spread, coefficients, *layers])


def main() -> None:
    """Fit, print, write."""
    fits = {}
    for key, rows in sorted(_rows().items()):
        if len(rows) < _FEWEST:
            print(f"{key}: {len(rows)} rows are too few")
            continue
        _as_on(key.split()[0])
        values = np.array([[*estimate.sizes(config, direction).values()] for config, direction, _ in rows])
        ratios, folds = np.array([row[2] for row in rows]), np.arange(len(rows)) % _FOLDS
        taken = np.zeros(len(rows), bool)
        for fold in range(_FOLDS):
            others = _fit(values[folds != fold], ratios[folds != fold])
            for i in np.flatnonzero(folds == fold):
                expected, least = estimate.speedups_by(others, *rows[i][:2])
                taken[i] = expected > least
        chosen, best = np.where(taken, ratios, 0.0), np.maximum(ratios, 0.0)
        lost = np.sort(2 ** ratios[taken & (ratios < math.log2(0.97))])
        print(
            f"{key}: {len(rows)} rows, ours {2 ** ratios.mean():.2f}x, chosen {2 ** chosen.mean():.3f}x of "
            f"{2 ** best.mean():.3f}x, {taken.sum()} taken, {len(lost)} of them below 0.97x"
            + (f": {', '.join(f'{one:.2f}' for one in lost[:4])}" if len(lost) else "")
        )
        fits[key] = _fit(values, ratios).astype(np.float32)
        if 2 ** chosen.mean() < _WORTH or len(lost) > taken.sum() * _MOST_LOST:
            print("  which is left to torch")
            del fits[key]
    with estimate.FILE.open("wb") as file:
        np.savez_compressed(file, **fits)


if __name__ == "__main__":
    main()
