"""Median times. On CUDA: events, and an L2 cache flushed before every run. On a CPU: the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

_FLUSH_BYTES = 128 * 2**20
_WARM_UPS = 3
_LEAST_RUNS, _MOST_RUNS = 5, 50
_CUDA_SECONDS, _CPU_SECONDS = 0.5, 0.5


def median_ms(run: Callable[[], object], device: torch.device) -> float:
    """Median time of one call, in milliseconds.

    Calls are repeated 5 to 50 times, fewer when each is long; the first ones are not counted. On CUDA the
    time is that of the device, between two events, with the L2 cache overwritten before the first.

    Args:
        run: what to time.
        device: where ``run`` does its work.

    >>> median_ms(lambda: None, torch.device("cpu")) < 1
    True
    """
    return _cuda_ms(run, device) if device.type == "cuda" else _cpu_ms(run)


def _cpu_ms(run: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    estimate = min(once() for _ in range(2))
    return 1e3 * median(once() for _ in range(_runs(estimate, _CPU_SECONDS)))


def _cuda_ms(run: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        flush = torch.empty(max(_FLUSH_BYTES, 2 * l2_bytes), dtype=torch.int8, device=device)

        def events(count: int) -> list[float]:
            pairs = []
            for _ in range(count):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                start.record()
                run()
                end.record()
                pairs.append((start, end))
            torch.cuda.synchronize(device)
            return [start.elapsed_time(end) for start, end in pairs]

        estimate = min(events(_WARM_UPS)) * 1e-3
        return median(events(_runs(estimate, _CUDA_SECONDS)))


def _runs(seconds_each: float, budget: float) -> int:
    return max(_LEAST_RUNS, min(_MOST_RUNS, int(budget / max(seconds_each, 1e-9))))
