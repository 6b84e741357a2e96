"""benchmarks.fit: planted numbers are found, those that do not help are not written, rows are kept."""

import json
import math
import shutil
from dataclasses import replace
from random import Random

import pytest
import torch

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the package")

from benchmarks import choices, fit
from benchmarks.fit import Case, Row
from benchmarks.workloads import custom
from gemmconv.kernels.costs import costs_of

NAME = "sm90/gemm_fold"
KERNEL = fit.KERNELS[NAME]
LAYERS = [f"n{n} c{c}x{k} k4 h{size} w{size} s2" for n in (2, 16) for c, k in ((64, 32), (256, 64)) for size in (4, 8)]
PLANTED = {"start_cycles": 20000, "turn_cycles": 1100, "turned_chunk_cycles": 600}


def rows_of(layers, time=None):
    """A row of every tile for layers in two precisions, with what ``time`` says, or the kernel's estimate."""
    rows = []
    for layer in layers:
        for precision in ("tf32", "fp16"):
            config = Case(custom(layer), precision, "nchw").config(torch.device("cuda", 0))
            for tile in map(replace, KERNEL.tiles(config, "forward")):
                seconds = KERNEL.seconds(config, "forward", tile) if time is None else time(layer)
                where = custom(layer).layer, precision, "nchw", "forward", NAME
                rows.append(Row(*where, fit.tile_text(KERNEL, tile), seconds, "NVIDIA H200", "abc"))
    return rows


@pytest.fixture
def costs(tmp_path):
    """A copy of the file of costs."""
    return shutil.copy(fit.COSTS, tmp_path / "h200.json")


def planted_rows():
    group, before = costs_of(NAME), dict(vars(costs_of(NAME)))
    group.replace(PLANTED)
    try:
        return rows_of(LAYERS)
    finally:
        group.replace(before)


def test_planted_numbers_are_found_and_written(costs, capsys):
    before, estimates = costs.read_text(), rows_of(LAYERS)
    fit.fit_kernel(KERNEL, planted_rows(), "choices.csv", costs)
    assert rows_of(LAYERS) == estimates  # nothing of it stays in this process
    found = json.loads(costs.read_text())
    for name, planted in PLANTED.items():
        assert found[NAME]["costs"][name]["value"] == pytest.approx(planted, rel=0.08)
    entry, old = found[NAME]["costs"]["turn_cycles"], json.loads(before)
    assert (entry["unit"], entry["of"]) == ("cycles", "a turn of copies")
    assert entry["source"].startswith(
        f"{len(estimates)} rows of {len(LAYERS)} layers (choices.csv; NVIDIA H200; commit abc): "
    )
    assert {**found, NAME: None} == {**old, NAME: None}
    lines = list(zip(before.split("\n"), costs.read_text().split("\n"), strict=True))
    assert all('", "source": "' in new for one, new in lines if one != new)  # others are as they were
    out = capsys.readouterr().out
    assert "held out (1 of 8 layers)" in out
    assert "turn_cycles: 655 -> 1" in out
    assert "written to h200.json" in out


def test_numbers_that_suit_only_what_they_were_fitted_to_are_not_written(costs, capsys):
    """Layers that were fitted to take twice as long as estimated, the one that is held out does not."""
    before = costs.read_text()
    held_out = sorted(custom(layer).layer for layer in LAYERS)[4]
    rows = [replace(row, seconds=row.seconds * (1 if row.layer == held_out else 2)) for row in rows_of(LAYERS)]
    fit.fit_kernel(KERNEL, rows, "choices.csv", costs)
    assert costs.read_text() == before
    assert "not written: estimates of layers held out come no closer" in capsys.readouterr().out


def test_numbers_stay_where_rows_are_noise(costs):
    noise = Random(0)
    rows = [replace(row, seconds=row.seconds * noise.lognormvariate(0, 0.02)) for row in rows_of(LAYERS)]
    before = fit.numbers_of(KERNEL, costs)
    measured = fit.tiles_of(KERNEL, rows)
    try:
        after = fit.fit(lambda numbers: fit.errors_of(KERNEL, measured, numbers), before)
    finally:
        costs_of(NAME).replace(fit._values(before))
    assert all(abs(math.log(after[number] / before[number])) < 0.2 for number in before)


def test_few_layers_and_tiles_that_are_gone(costs, capsys):
    rows = rows_of(LAYERS[:4])
    fit.fit_kernel(KERNEL, [replace(rows[0], tile="columns=7"), *rows], "choices.csv", costs)
    out = capsys.readouterr().out
    assert "1 of tiles that it has no more" in out
    assert "not fitted: rows of 5 layers are needed" in out


def test_thresholds_and_zeros_are_no_numbers_to_fit():
    numbers = fit.numbers_of(fit.KERNELS["sm90/implicit_gemm"])
    assert ("column_cycles", "2") in numbers
    assert not {name for name, _ in numbers} & {"wide_strip", "few_weight_stages"}
    assert ("tap_cycles", "2 1") not in fit.numbers_of(fit.KERNELS["sm90/wgrad_nchw"])
    for kernel in fit.KERNELS.values():
        assert fit.numbers_of(kernel), kernel.name


def test_without_rows_it_says_how_to_measure_them(tmp_path, capsys):
    assert choices.main(["--fit", NAME, "sm90/wgrad_nhwc", "--rows", str(tmp_path / "none.csv")]) == 1
    first, second = capsys.readouterr().out.splitlines()
    command = f"python -m benchmarks.choices --kernel {NAME} --layout nchw,channels_last --keep"
    assert first == f"{NAME}: no rows in none.csv; on a GPU, measure them by {command}"
    assert second == "sm90/wgrad_nhwc: no rows, and benchmarks.choices measures forward passes alone"


def test_rows_are_kept_and_replaced(tmp_path):
    path = tmp_path / "new" / "choices.csv"
    row = Row("n1 c2x2 k2 h3 w3", "fp16", "nchw", "forward", "a", "rows=1", 1e-5, "NVIDIA H200", "abc")
    other, faster = replace(row, kernel="b", commit="old"), replace(row, seconds=2e-5)
    fit.keep(path, [row, other])
    assert fit.read(path) == [row, other]
    fit.keep(path, [faster, replace(row, tile="rows=2")])
    assert fit.read(path) == [faster, other, replace(row, tile="rows=2")]
    fit.keep(path, [replace(row, commit="new")])  # the kernel may have changed since
    assert fit.read(path) == [other, replace(row, commit="new")]
