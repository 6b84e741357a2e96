"""Samples of time, by turns. On CUDA: events, an L2 cache flushed before every run. On a CPU: the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

_FLUSH_BYTES = 128 * 2**20
# The device waits while the host enqueues a run, so that gaps between launches do not count: at least about 0.3 ms, and
# longer if the host took longer in the previous round.
_LEAST_HEAD_START_CYCLES, _MOST_HEAD_START_CYCLES = 500_000, 100_000_000
# The first run may allocate memory and is not typical; the wait after it is limited to this.
_SECOND_HEAD_START_CYCLES = 4_000_000
_CYCLES_A_SECOND = 2e9  # at least the clock of the devices
_HOST_MARGIN = 1.5
# A device that is kept busy with products for 40 ms reaches its power limit, and lowers its clock by up to 12%.
_MOST_REST_MS = 10.0
LEAST_ROUNDS, MOST_ROUNDS = 5, 50
# On a CPU, seconds of all rounds: measuring ends after the former, or earlier if another would exceed the latter.
_CPU_SECONDS, _CPU_MOST_SECONDS = 1.0, 2.5
_CPU_LEAST_ROUNDS = 3  # which may take longer

Run = Callable[[], object]


def cpu_rounds(runs: Sequence[Run]) -> list[list[float]]:
    """Samples of wall-clock time for each run, in milliseconds. The runs take turns, so that a machine that slows down
    slows all of them: 5 to 50 rounds, 3 or 4 where one takes more than 0.4 s, after one that is not counted.
    """
    times: list[list[float]] = [[] for _ in runs]
    began = time.perf_counter()
    for count in range(MOST_ROUNDS + 1):
        round_began = time.perf_counter()
        for index, run in enumerate(runs):
            start = time.perf_counter()
            run()
            if count:  # the first round is a warm-up
                times[index].append(1e3 * (time.perf_counter() - start))
        now = time.perf_counter()
        passes_the_limit = now - began + now - round_began > _CPU_MOST_SECONDS
        is_enough = count >= LEAST_ROUNDS and now - began > _CPU_SECONDS
        if is_enough or (count >= _CPU_LEAST_ROUNDS and passes_the_limit):
            break
    return times


def cuda_rounds(
    runs: Sequence[Run], device: torch.device, count: int, estimates_ms: Sequence[float] = ()
) -> list[list[float]]:
    """Samples of device time for each run, in milliseconds: ``count`` rounds, the L2 cache overwritten before each run.

    Before each run the device rests for as long as it is estimated to take, 10 ms at most; not without an estimate.
    """
    pairs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
    with torch.cuda.device(device):
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        flush = torch.empty(max(_FLUSH_BYTES, 2 * l2_bytes), dtype=torch.int8, device=device)
        rests = [int(min(one, _MOST_REST_MS) * 1e-3 * _CYCLES_A_SECOND) for one in estimates_ms] or [0] * len(runs)
        head_starts = [_LEAST_HEAD_START_CYCLES] * len(runs)
        for round_ in range(-1, count):  # the first round is not counted: it measures the host's time
            for index, run in enumerate(runs):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                flush.zero_()
                torch.cuda._sleep(max(head_starts[index], rests[index]))
                start.record()
                began = time.perf_counter()
                run()
                host_cycles = int((time.perf_counter() - began) * _CYCLES_A_SECOND * _HOST_MARGIN)
                end.record()
                if round_ >= 0:
                    pairs[index].append((start, end))
                most = _MOST_HEAD_START_CYCLES if round_ >= 0 else _SECOND_HEAD_START_CYCLES
                head_starts[index] = min(most, max(_LEAST_HEAD_START_CYCLES, host_cycles))
        torch.cuda.synchronize(device)
    return [[start.elapsed_time(end) for start, end in events] for events in pairs]
