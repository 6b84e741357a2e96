"""Workloads shared by several devices of one kind: a process for each, which takes one workload after the other."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.contenders import Contender, Lane
from benchmarks.floor import Ceilings, measure_ceilings
from benchmarks.measure import DeviceLost, Plan, rows_of
from benchmarks.results import Key, Row
from benchmarks.timing import Effort
from benchmarks.workloads import Workload

_PATIENCE_SECONDS = 1.0  # until processes are looked after that say nothing


@dataclass(frozen=True)
class Task:
    """A workload to measure.

    Attributes:
        workload: what.
        directions: of ``DIRECTIONS``.
        done: rows that need not be measured again.
    """

    workload: Workload
    directions: Sequence[str]
    done: dict[Key, Row]


@dataclass(frozen=True)
class Part:
    """Some of what is measured of a workload.

    Attributes:
        workload: whose rows they are.
        device: what they were measured on.
        ceilings: of that device.
        rows: the rows.
        seconds: what the whole workload took, where this is the last of it.
        lost: why the device answers nothing any more, or nothing.
    """

    workload: Workload
    device: str
    ceilings: Ceilings
    rows: list[Row] = field(default_factory=list)
    seconds: float | None = None
    lost: str = ""


def measure(
    devices: Sequence[torch.device],
    precisions: Sequence[str],
    contenders: Sequence[Contender],
    effort: Effort,
    deadline: float,
    tasks: Sequence[Task],
) -> Iterator[Part]:
    """Measure the tasks, those with most work first: a part for each, as they are done.

    Each device's ceilings are its own. Stops cleanly at the deadline, in ``time.monotonic`` seconds.
    """
    context = multiprocessing.get_context("spawn")
    waiting: Any = context.Queue()
    parts: Any = context.Queue()  # and numbers of devices that are done
    for task in sorted(tasks, key=lambda task: -task.workload.problem.useful_flops):
        waiting.put(task)
    for _ in devices:
        waiting.put(None)
    processes = [
        context.Process(
            target=_work, args=(i, device, precisions, contenders, effort, deadline, waiting, parts), daemon=True
        )
        for i, device in enumerate(devices)
    ]
    for process in processes:
        process.start()
    busy = set(range(len(devices)))
    try:
        while busy:
            try:
                part = parts.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                for i in busy:
                    if not processes[i].is_alive():
                        status = processes[i].exitcode
                        raise RuntimeError(f"the process that measures on {devices[i]} ended with {status}") from None
                continue
            if isinstance(part, Part):
                yield part
            else:
                busy.remove(part)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _work(
    number: int,
    device: torch.device,
    precisions: Sequence[str],
    contenders: Sequence[Contender],
    effort: Effort,
    deadline: float,
    waiting: Any,
    parts: Any,
) -> None:
    """Measure one task after the other."""
    ceilings, lane = measure_ceilings(device, precisions), Lane()
    while time.monotonic() < deadline and (task := waiting.get()) is not None:
        plan = Plan(device, precisions, task.directions, contenders, ceilings, effort, 0, deadline, task.done.get)
        began, rows, lost = time.monotonic(), [], ""
        try:
            for row in rows_of(task.workload, plan, lane):
                rows.append(row)
        except DeviceLost as error:
            lost = str(error)
        parts.put(Part(task.workload, f"{device}#{number}", ceilings, rows, time.monotonic() - began, lost))
        if lost:
            break
    parts.put(number)
