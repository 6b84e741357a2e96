"""Compiles the kernels of a run ahead, on all cores: compiling them where they are first called would take longer than
measuring."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from benchmarks.contenders import LAYOUTS, PASSES, PRECISIONS
from benchmarks.workloads import Workload
from gemmconv.algorithms import ALGORITHMS, Config
from gemmconv.device import DeviceSpec, spec_of
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Direction, Pass, Precision
from gemmconv.kernels.layout.transpose import prepare_via_channels_last
from gemmconv.ops.pass_programs import gradient_programs
from gemmconv.pairs import choose_pair
from gemmconv.selection import choose, current_config
from gemmconv.tune import OPERANDS

T = TypeVar("T")
Result = TypeVar("Result")
# Geometry, precision, layout, passes, the GPU, its architecture, and whether only what ``auto`` takes is compiled.
Job = tuple[Problem, str, str, tuple[Direction, ...], DeviceSpec, str, bool]


def compile_ahead(
    workloads: Iterable[Workload],
    precisions: Sequence[str],
    directions: Sequence[str],
    layouts: Iterable[str],
    device: torch.device,
    only_auto: bool = False,
) -> None:
    """Put into the kernel cache what gemmconv's algorithms load when they are prepared for the workloads.

    With ``only_auto`` those alone that ``auto`` takes.
    """
    from gemmconv.runtime.launch import architecture

    spec, arch = spec_of(device), architecture(device.index or 0)
    passes = tuple(dict.fromkeys(itertools.chain(*(PASSES[one] for one in directions))))
    jobs: list[Job] = [  # those of one workload share kernels: far apart, they find in the cache what others compiled
        (workload.problem, precision, layout, passes, spec, arch, only_auto)
        for precision, layout, workload in itertools.product(precisions, layouts, workloads)
    ]
    for _ in in_processes(_compile, jobs):
        pass


def in_processes(work: Callable[[T], Result], jobs: Sequence[T]) -> Iterator[Result]:
    """Run ``work`` for each job on all cores, and yield the results in order."""
    if jobs:
        with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
            yield from pool.imap(work, jobs)


def only_compile(arch: str) -> None:
    """Have this process, which must do nothing else, compile kernels where it would load them. Touches no GPU."""
    from gemmconv.runtime import launch
    from gemmconv.runtime.cache import default_cache
    from gemmconv.runtime.compiler import Macros, compile

    def load(source_name: str, macros: Macros, device_index: int, shared_bytes: int = 0) -> None:
        compile(source_name, macros, arch, cache=default_cache())

    launch.load = load  # type: ignore[assignment]


def asked(problem: Problem, precision: str, layout: str, spec: DeviceSpec, bias: bool = False) -> Config:
    """The configuration of a layer on a GPU, where torch's convolutions round as a benchmark's precision says."""
    rounding: Precision = "tf32" if precision == "tf32" else "ieee"
    settings: Any = {"memory_format": LAYOUTS[layout], "bias": bias, "spec": spec}
    config = current_config(problem, PRECISIONS[precision], torch.device("cuda", 0), rounding, **settings)
    return replace(config, torch_precision=rounding)


def _compile(job: Job) -> None:
    """Prepare every algorithm for one problem, or those that ``auto`` takes."""
    problem, precision, layout, passes, spec, arch, only_auto = job
    only_compile(arch)
    config = asked(problem, precision, layout, spec)
    gradients = choose_pair(config, config, "auto", "benchmarks") if "weight_grad" in passes else None
    taken = [choose(config, "auto", "benchmarks")] if "forward" in passes else []
    taken += [gradients.input_grad, gradients.weight_grad] if gradients else []
    for algorithm in dict.fromkeys(taken) if only_auto else ALGORITHMS:
        if algorithm.why_not(config) is None:
            for one in (one for one in passes if algorithm.why_not(config, one) is None):
                load(algorithm.prepare(config, one), config, one)
            if "weight_grad" in passes and algorithm.grads_estimate(config, config) < math.inf:
                load(algorithm.prepare(config, "grads"), config, "grads")
    both, *others = gradient_programs(gradients, config, config) if gradients else [None]
    if both is not None and not others:
        load(both.prepare(config.device), config, "grads")
    elif gradients and gradients.via_channels_last:
        prepare_via_channels_last(config, lambda *tensors: tensors[:2], gradients.transposes_weight)  # loads transposes


def load(call: Callable[..., object], config: Config, one: Pass) -> None:
    """Load what a prepared call loads when it is first called, with tensors in the configuration's format."""
    from gemmconv.kernels.bind import LoadedProgram  # which needs the CUDA packages

    p = config.problem
    shapes = {"input": p.input_shape, "weight": p.weight_shape, "grad_output": p.output_shape}
    kind: Any = {"dtype": config.dtype, "device": "meta", "memory_format": config.memory_format}
    if isinstance(call, LoadedProgram):
        call.load(*(torch.empty(shapes[name], **kind) for name in OPERANDS[one]))
