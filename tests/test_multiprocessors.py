"""Tiles, grids and choices on GPUs of Hopper with fewer multiprocessors than the reference; no GPU is touched."""

import ctypes
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.workloads import SUITES
from gemmconv import kernels
from gemmconv.algorithms import KERNELS, fused
from gemmconv.device import KNOWN, REFERENCE
from gemmconv.geometry import Problem
from gemmconv.kernels.base import choices
from gemmconv.kernels.direct import forward as direct_forward
from gemmconv.kernels.direct import forward_mma as direct_forward_mma
from gemmconv.kernels.direct import grads_mma as direct_grads_mma
from gemmconv.kernels.direct import input_grad as direct_input_grad
from gemmconv.kernels.direct import weight_grad as direct_weight_grad
from gemmconv.kernels.sm90 import gemm_fold_narrow, implicit_gemm, wgrad_nchw, wgrad_nhwc
from gemmconv.kernels.sm90.gemm_fold_rows import RowTile
from gemmconv.kernels.splits import reduce
from gemmconv.selection import choose
from tests.samples import config_of, tile_for

SMALLER = [pytest.param(KNOWN["NVIDIA H100 PCIe"], marks=pytest.mark.slow), KNOWN["NVIDIA H20"]]
NCHW, LAST = torch.contiguous_format, torch.channels_last
KINDS = [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.float16, "ieee")]
WORKLOADS = SUITES["public"] + SUITES["models"]
each_smaller = pytest.mark.parametrize("spec", SMALLER, ids=lambda spec: spec.name)


@pytest.fixture
def launches(monkeypatch):
    """The grids that kernels would be launched with, by the name of the source."""
    pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")
    from gemmconv.runtime import executor, launch, tensor_map

    found = []

    def load(source, macros, index, shared_bytes=0):
        def launch(grid, block, params, shared_bytes=0, overlaps=False):
            found.append((source.removesuffix(".cu"), math.prod(grid)))

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(tensor_map, "encode", lambda *_: (ctypes.c_ulonglong * 16)())
    monkeypatch.setattr(executor, "extension", lambda: None)
    return found


def most_blocks(way, multiprocessors):
    """Blocks that run at once: one or some on each multiprocessor, but one for each set of weights at least."""
    resident = way.blocks_resident if isinstance(way, direct_forward_mma.Tile | gemm_fold_narrow.Tile) else 1
    sets = way.channel_sets if isinstance(way, RowTile) else 1
    sets = way.sets if isinstance(way, direct_forward_mma.Tile) else sets
    return max(resident * multiprocessors, sets)


@each_smaller
def test_grids_of_persistent_kernels_are_what_runs_at_once(spec, launches):
    fullest = {}
    persistent = [kernel for kernel in KERNELS.values() if kernel.features or kernel is direct_forward_mma.KERNEL]
    for workload, (dtype, precision), layout in itertools.product(WORKLOADS, KINDS[1:], (NCHW, LAST)):
        problem = workload.problem
        config = replace(config_of(problem, dtype, layout, precision), spec=spec)
        input = torch.empty(problem.input_shape, dtype=dtype, device="meta").to(memory_format=layout)
        weight = torch.empty(problem.weight_shape, dtype=dtype, device="meta")
        for choice in choices(config, "forward", persistent):
            choice.kernel.prepare(config, "forward", choice.tile)(input, weight, None)
            source, blocks = launches[-1]
            most = most_blocks(choice.tile, spec.multiprocessors)
            assert 0 < blocks <= most, (workload.name, source)
            fullest[source] = max(fullest.get(source, 0), blocks / most)
    products = {"sm90/implicit_gemm", "sm90/implicit_gemm_nhwc", "sm90/gemm_depth_to_space"}
    folds = {f"sm90/gemm_fold_{kind}" for kind in ("narrow", "pixels", "rows")}
    assert set(fullest) == {"direct/forward_mma"} | products | folds
    assert min(fullest.values()) > 0.9  # none leaves multiprocessors idle that it might have


@each_smaller
def test_weight_gradients_are_cut_into_slices_for_the_multiprocessors_there_are(spec):
    for workload in WORKLOADS:
        config = replace(config_of(workload.problem), spec=spec)
        for module, rounds in ((wgrad_nchw, 1), (wgrad_nhwc, 3)):
            if (tile := tile_for(module, config, "weight_grad")) is not None:
                blocks = tile.weight_blocks * tile.slices(config.workspace_limit)
                assert blocks <= max(tile.weight_blocks, rounds * spec.multiprocessors)
        if (both := direct_grads_mma.KERNEL.tile(config, "grads")) is not None:
            assert both.multiprocessors == spec.multiprocessors


@each_smaller
def test_auto_takes_what_it_takes_on_the_reference(spec):
    """Forward passes in NCHW, ours or torch's; ``fused`` too, where no other's estimate is close there."""
    others = set()
    for workload in WORKLOADS:
        for dtype, precision in KINDS:
            config = config_of(workload.problem, dtype, NCHW, precision)
            there = replace(config, spec=spec)
            first, second = (choose(one, "auto", "test").name for one in (config, there))
            assert (first == "native") == (second == "native"), (workload.name, precision)
            if first == "fused":
                assert fused.Fused().why_not(there) is None
                if second != "fused":
                    others.add((workload.name, precision if dtype == torch.float32 else "float16"))
    close = {("stylegan_up128", "tf32"), ("pointpillars1", "float16")} if spec.multiprocessors < 100 else set()
    assert others <= close


def test_what_a_tile_is_for_is_part_of_it():
    spec = replace(REFERENCE, multiprocessors=16)
    dense = Problem(8, 64, 64, 1, (32, 32), (4, 4), (2, 2), (1, 1))
    grouped = Problem(8, 32, 64, 4, (64, 64), (3, 3), (2, 2))
    here, there = (replace(config_of(dense), spec=one) for one in (REFERENCE, spec))
    for direction in ("forward", "input_grad"):
        plans = [tile_for(implicit_gemm, config, direction) for config in (here, there)]
        assert [plan.multiprocessors for plan in plans] == [REFERENCE.multiprocessors, 16]
        assert plans[0].cycles < plans[1].cycles
    for module in (wgrad_nchw, wgrad_nhwc):
        tiles = [tile_for(module, config, "weight_grad") for config in (here, there)]
        assert tiles[0].seconds(here.workspace_limit) < tiles[1].seconds(there.workspace_limit)
    here, there = (replace(config_of(grouped), spec=one) for one in (REFERENCE, spec))
    tiles = [tile_for(direct_forward_mma, config, "forward") for config in (here, there)]
    assert tiles[1].spec is spec
    assert tiles[0].cycles_of(grouped) < tiles[1].cycles_of(grouped)
    tile = direct_forward.tile_of(grouped, torch.float16, False)
    layers = [direct_forward._Layer(grouped, torch.float16, False, one) for one in (REFERENCE, spec)]
    cycles = [layer.cycles(tile) for layer in layers]
    assert cycles[0] < cycles[1]


def test_few_multiprocessors_are_busy_with_larger_blocks():
    depthwise, many = Problem(1, 8, 8, 8, (32, 32), (3, 3)), Problem(1, 64, 512, 1, (8, 8), (1, 1))
    for size_of in (
        lambda count: direct_input_grad.input_grad_tile(depthwise, 2, count).threads,
        lambda count: direct_weight_grad.weight_grad_tile(depthwise, 2, False, count).threads,
        lambda count: reduce.wgrad_macros(many, torch.float16, 4, count)["RUN"],
    ):
        assert size_of(1) > size_of(64)


def test_weights_stay_in_blocks_only_where_each_set_has_a_multiprocessor():
    plan = tile_for(implicit_gemm, config_of(Problem(4, 64, 64 * 100, 1, (64, 64), (1, 1))), "forward")
    for count in (plan.sets - 1, plan.sets):
        other = replace(plan, multiprocessors=count)
        assert other.resident == (count == plan.sets)
        assert other.blocks_of(other.items, count) <= count


def test_no_algorithm_knows_how_many_multiprocessors_the_reference_has():
    for path in Path(kernels.__file__).parent.rglob("*.py"):
        assert not re.search(r"\b132\b|MULTIPROCESSORS|multiprocessors_of", path.read_text()), path.name
