"""The map of the source tree is what the tree says."""

import re
import subprocess
import sys

import pytest

from benchmarks import map
from gemmconv.algorithms import ALGORITHMS, KERNELS
from tests.test_imports import LAYERS


def test_map_is_what_the_tree_says(tmp_path):
    """In a process of its own, where no call was prepared before the one that is traced."""
    pytest.importorskip("cuda.core", reason="what is traced loads kernels, by the cuda-core package")
    command = [sys.executable, "-m", "benchmarks.map", str(tmp_path / "map.svg")]
    made = subprocess.run(command, cwd=map.MAP.parent.parent, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    now = tmp_path.joinpath("map.svg").read_text(encoding="utf-8")
    assert map.MAP.read_text(encoding="utf-8") == now, "run python -m benchmarks.map, and commit what it writes"


def test_map_shows_the_whole_registry_and_the_whole_way():
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", map.MAP.read_text(encoding="utf-8"))
    assert {algorithm.name for algorithm in ALGORITHMS} <= set(texts)
    assert set(KERNELS) - {"gemm_col2im", "native"} <= set(texts)
    for stop in ("module", "functional", "ops/implementation", "selection", "kernels/base", "runtime/launch"):
        assert f"gemmconv/{stop}.py" in texts


def test_layers_of_the_map_are_those_that_imports_are_tested_for():
    found = map.layers()
    order = [part for part, _ in found]
    assert [part for part in order if part in LAYERS] == LAYERS
    assert all(order.index(one) > i for i, (_, used) in enumerate(found) for one in used)
