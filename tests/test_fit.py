"""benchmarks.rows and benchmarks.fit: rows are kept, planted corrections are found, and regret is bounded."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import fit, rows
from benchmarks.rows import Row
from benchmarks.workloads import format_layer, select
from gemmconv.kernels import measured

ROWS = fit.load(fit.RESULTS)
HEAD = {"gpu": fit.GPU, "commit": "abc"}
ROW = Row("n2 c8x4 k3 h6 w5 s2", "models", "tf32", "nchw", "forward", "direct/forward", "stride=2", "own", 2e-5, 1e-5)


def test_rows_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "gpu" / "rows.csv.gz"
    wrong = replace(ROW, kernel="native", seconds=math.nan)
    rows.write(path, HEAD, [ROW, wrong])
    head, (first, second) = rows.read(path)
    assert head == HEAD
    assert first == ROW
    assert math.isnan(second.seconds)
    assert second.key == wrong.key


def test_rows_of_several_runs_are_merged_and_of_several_gpus_not(tmp_path):
    one, other, third = (tmp_path / name for name in ("one", "other", "third"))
    rows.write(one, HEAD, [ROW, replace(ROW, kernel="native")])
    rows.write(other, {**HEAD, "commit": "def"}, [replace(ROW, seconds=3e-5)])
    head, found = rows.merged([one, other])
    assert head["commit"] == "abc, def"
    assert sorted((row.kernel, row.seconds) for row in found) == [("direct/forward", 3e-5), ("native", 2e-5)]
    rows.write(third, {**HEAD, "gpu": "another"}, [ROW])
    with pytest.raises(ValueError, match="different GPUs are never mixed, got NVIDIA H200, another"):
        rows.merged([one, third])


def test_every_measured_pass_has_torchs_operator_and_what_auto_took():
    cases = {row.case for row in ROWS if row.suite != "random-3"}
    lacking = cases - {row.case for row in ROWS if row.kernel == "native"}  # where its result was wrong
    assert len(lacking) < 0.005 * len(cases)
    chosen = {row.case for row in ROWS if row.role == rows.AUTO and row.direction != "grads"}
    assert len(chosen) > 0.7 * len({case for case in cases if case[3] != "grads"})


def test_a_planted_correction_is_found():
    layers = [format_layer(workload.problem) for workload in select(("public", "models", "sweep"))]
    planted = [
        replace(ROW, layer=layer, kernel=kernel, seconds=factor * (1e-5 if kernel != "native" else _roofline(layer)))
        for layer in layers
        for kernel, factor in (("native", 3.0), ("direct/forward", 0.5))
    ]
    table = fit.fit(planted, lambda line: None)
    sizes = np.array([measured.sizes(fit.custom(layer).problem) for layer in layers])
    scaled = (sizes - table["mean"]) / table["spread"]
    np.testing.assert_allclose(np.exp(scaled @ table["direct/forward forward tf32 nchw"]), 0.5, rtol=1e-3)
    np.testing.assert_allclose(np.exp(scaled @ table["native forward tf32 nchw"]), 3.0, rtol=0.05)


def _roofline(layer: str) -> float:
    return measured.roofline(fit.config_of(replace(ROW, layer=layer)), "forward")


def test_the_fit_in_the_tree_is_that_of_the_rows_in_the_tree():
    lines: list[str] = []
    table = fit.fit([row for row in ROWS if row.suite != fit.JUDGED], lines.append)
    found = measured._table()
    assert table.keys() == found.keys()
    for name, values in table.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-4, err_msg=name)
    assert len(lines) == len(found) - 3 - sum(name.endswith(" near") for name in found)


@pytest.mark.parametrize(("direction", "most"), [("forward", 1.04), ("input_grad", 1.09), ("weight_grad", 1.065)])
def test_regret_on_layers_that_nobody_fitted_to(direction, most):
    """Choices against the fastest of all that was measured, in every precision and format beside those of e661da4."""
    judged = [row for row in ROWS if row.suite == fit.JUDGED and row.direction == direction]
    then, now = fit.regret_of(judged, fit.as_then), fit.regret_of(judged, fit.as_now)
    assert len(now) == 6
    assert math.prod(now.values()) ** (1 / 6) <= min(most, math.prod(then.values()) ** (1 / 6))
    assert all(now[key] <= 1.015 * then[key] for key in now)
