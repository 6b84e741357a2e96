"""Samples of time. On CUDA: events, the L2 cache overwritten before every run. On a CPU: torch.utils.benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

import torch
from torch.utils.benchmark import Timer

from gemmconv.timing import LEAST_ROUNDS, MOST_ROUNDS, Run, cpu_rounds, cuda_rounds

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """How much time one measurement may take.

    Attributes:
        target_ms: measured time that one look aims at.
        least, most: number of samples.
        cap_ms: where ``least`` samples would take longer than this, there are fewer, but at least three.
    """

    target_ms: float = 10.0
    least: int = 5
    most: int = 9
    cap_ms: float = 30.0

    def samples(self, estimate_ms: float) -> int:
        """How many samples to take of something that takes ``estimate_ms``.

        >>> [Effort().samples(ms) for ms in (0.1, 2, 20, 500)]
        [9, 5, 3, 3]
        """
        count = max(self.least, min(self.most, int(self.target_ms / max(estimate_ms, 1e-6))))
        return max(3, min(count, int(self.cap_ms / max(estimate_ms, 1e-6))))


QUICK = Effort(target_ms=5.0, most=10, cap_ms=100.0)

_WARM_UPS, _SECONDS_EACH = 3, 0.5  # of medians on CUDA: rounds to estimate by, and seconds for each run in all rounds
_TIMES_ON_A_CPU = 10  # of target_ms: there each row is looked at once


@dataclass(frozen=True)
class Times:
    """Quantiles of the samples, in milliseconds."""

    median: float
    p20: float
    p80: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        p20, *_, p80 = quantiles(samples, n=5, method="inclusive")
        return cls(median(samples), p20, p80, len(samples))


def time_run(run: Run, device: torch.device, effort: Effort, estimate_ms: float | None = None) -> Times:
    """Time of one call that has been made before: on CUDA that of the device, from a flushed L2 cache.

    Args:
        run, device, effort: what, where, how often.
        estimate_ms: what it takes, if that is known; else warm-up calls tell.
    """
    if device.type != "cuda":
        seconds = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        samples = list(seconds.blocked_autorange(min_run_time=effort.target_ms * 1e-3 * _TIMES_ON_A_CPU).times)
        while len(samples) < 3:
            samples.append(seconds.timeit(1).median)
        return Times.of([1e3 * sample for sample in samples])
    if estimate_ms is None:
        ((estimate_ms,),) = cuda_rounds([run], device, 1)
    (samples,) = cuda_rounds([run], device, effort.samples(estimate_ms), [estimate_ms])
    return Times.of(samples)


def medians_ms(runs: Sequence[Run], device: torch.device) -> list[float]:
    """Median time of a call of each run, in milliseconds, in 5 to 50 rounds by turns; fewer on a CPU, if they are long.

    On CUDA the time is that of the device, from a flushed L2 cache, after a rest as long as the run, 10 ms at most.

    >>> medians_ms([lambda: None], torch.device("cpu"))[0] < 1
    True
    """
    if device.type != "cuda":
        return [median(times) for times in cpu_rounds(runs)]
    estimates = [min(times) for times in cuda_rounds(runs, device, _WARM_UPS)]
    count = int(_SECONDS_EACH * len(runs) / max(sum(estimates) * 1e-3, 1e-9))
    count = max(LEAST_ROUNDS, min(MOST_ROUNDS, count))
    return [median(times) for times in cuda_rounds(runs, device, count, estimates)]


def peak_bytes(run: Callable[[], T], device: torch.device) -> tuple[int, T]:
    """The most memory of a GPU that a call takes beyond what is held before it, and its results."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, results


def captured(run: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """A CUDA graph of one call, and the results that its replays overwrite. The call must have been made before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a first call on another stream sets up must not be captured
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()
    return graph, result


def synchronize(device: torch.device) -> None:
    """Wait for a device; a CPU is always ready."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
