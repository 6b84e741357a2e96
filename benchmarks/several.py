"""Workloads shared by several devices of one kind: a process for each, which measures one workload after the other."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.contenders import SEARCHES, Lanes
from benchmarks.floor import Ceilings, measure_ceilings
from benchmarks.measure import DeviceLost, Plan, rows_of
from benchmarks.results import Key, Row
from benchmarks.workloads import Workload

_PATIENCE_SECONDS = 1.0  # until processes are looked after that say nothing

# Rough times of a workload of public and models on an H200; halves of these suites then take equally long.
_SECONDS_EACH, _SECONDS_A_FLOP = 8.0, 0.26e-9


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
        workload: whose row it is.
        device: what it was measured on.
        ceilings: of that device.
        row: the row; None where the workload is through.
        seconds: what it took then.
    """

    workload: Workload
    device: str
    ceilings: Ceilings
    row: Row | None = None
    seconds: float = 0.0


def parts_of(workload: Workload, plan: Plan, lanes: Lanes, device: str) -> Iterator[Part]:
    """Measure a workload: a part for each row, as it is made, and one at its end. Raises what ``rows_of`` does."""
    began = time.monotonic()
    for row in rows_of(workload, plan, lanes):
        yield Part(workload, device, plan.ceilings, row)
    yield Part(workload, device, plan.ceilings, seconds=time.monotonic() - began)


def shares(workloads: Sequence[Workload], count: int) -> list[list[Workload]]:
    """The workloads of each of ``count`` devices, those with most work first.

    They are shared beforehand, all that a command is for, so that a run made again, or one that goes on, measures each
    on the same device: devices of one kind differ by up to 10%.
    """
    found: list[list[Workload]] = [[] for _ in range(count)]
    seconds = [0.0] * count
    for workload in sorted(workloads, key=lambda workload: -workload.problem.useful_flops):
        least = min(range(count), key=seconds.__getitem__)
        found[least].append(workload)
        seconds[least] += _SECONDS_EACH + _SECONDS_A_FLOP * workload.problem.useful_flops
    return found


def measure(
    plan: Plan,
    devices: Sequence[torch.device],
    tasks: Sequence[Sequence[Task]],
    ahead: Callable[[], None] = lambda: None,
) -> Iterator[Part]:
    """Measure the tasks of each device as the plan says; but each device has ceilings of its own.

    Args:
        plan, devices, tasks: how, where and what.
        ahead: called before anything is measured, while the processes start.

    Raises:
        DeviceLost: a contender broke a device's context, or the process of one ended.
    """
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()  # parts, what is wrong, and numbers of devices that are done
    begin = context.Event()
    processes = [
        context.Process(target=_work, args=(i, replace(plan, device=device), share, answers, begin), daemon=True)
        for i, (device, share) in enumerate(zip(devices, tasks, strict=True))
    ]
    for process in processes:
        process.start()
    busy = set(range(len(devices)))
    try:
        ahead()
        begin.set()
        while busy:
            try:
                answer = answers.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                for i in busy:
                    if not processes[i].is_alive():
                        status = processes[i].exitcode
                        raise DeviceLost(f"the process that measures on {devices[i]} ended with {status}") from None
                continue
            if isinstance(answer, str):
                raise DeviceLost(answer)
            if isinstance(answer, Part):
                yield answer
            else:
                busy.remove(answer)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _work(number: int, plan: Plan, tasks: Sequence[Task], answers: Any, begin: Any) -> None:
    """Measure one task after the other, once it may begin."""
    lanes = Lanes(SEARCHES)
    torch.zeros(1, device=plan.device)  # the first use of a device takes seconds
    begin.wait()
    plan = replace(plan, ceilings=measure_ceilings(plan.device, plan.precisions, plan.effort.sustained))
    try:
        for task in tasks:
            if time.monotonic() > plan.deadline:
                break
            own = replace(plan, directions=task.directions, done=task.done.get)
            for part in parts_of(task.workload, own, lanes, f"{plan.device}#{number}"):
                answers.put(part)
    except DeviceLost as error:
        answers.put(str(error))
    answers.put(number)
