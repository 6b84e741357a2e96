"""Turns a :class:`Program` into a call: prepared once for tensors with given strides, then run at every call.

:mod:`gemmconv.kernels.forms` completes the program for the strides at hand. Names become indices of addresses, params
bytes with placeholders, and regions of scratch memory offsets in one allocation, or in outputs that are written later.
An executor of :mod:`gemmconv.runtime.executor` does the rest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple
from typing import Any, NamedTuple

import torch

from gemmconv.kernels.base import restrided
from gemmconv.kernels.forms import Completed, Made, Tensors, completed, launches
from gemmconv.kernels.integers import up_to_multiple
from gemmconv.kernels.program import At, Gemm, Launch, Program, Step, TensorMapSpec, Zero
from gemmconv.runtime import compiler, cublas, executor, launch, pool

_REGION_BYTES = 256  # alignment of regions of scratch memory
_MOST_BOUND = 64  # most calls that are cached, one for each combination of strides
_MANY_CORES = 4


class LoadedProgram:
    """A program on a device, with its kernels loaded. To be called with tensors of any strides."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.program, self.device = program, device
        self._bound: dict[Hashable, Callable[..., Any]] = {}
        self.kernels = _loaded(program.steps, device)

    def __call__(self, *tensors: torch.Tensor | None) -> Any:
        key = tuple([None if tensor is None else (tensor.stride(), tensor.dtype) for tensor in tensors])
        call = self._bound.get(key)
        if call is None:
            if len(self._bound) >= _MOST_BOUND:
                self._bound.clear()
            call = self._bound[key] = bound(self.program, self.device, tensors)
        return call(*tensors)

    def load(self, *tensors: torch.Tensor | None) -> None:
        """Load all kernels for tensors with the strides of these, which may be without data."""
        _loaded(launches(self.program, tensors, self.device), self.device)


def bound(program: Program, device: torch.device, tensors: Tensors) -> Callable[..., Any]:
    """The call of a program for tensors with the strides of these, with its kernels loaded."""
    done = completed(program, tensors, device)
    program, fits, channels_last, made, after = done
    kernels = iter(_loaded(program.steps, device))
    places, scratch_bytes = _laid_out(program, made)
    names = [one.name for one in program.outputs] + [one.name for one in program.operands]
    index_of = {name: (i, 0) for i, name in enumerate(names)} | places
    alignments = [1] * len(program.outputs) + [one.alignment for one in program.operands]
    steps = [_lowered(step, index_of, channels_last, kernels) for step in program.steps]
    ready = executor.prepare(device, alignments, steps)
    scratch, given_as = -(-scratch_bytes // program.dtype.itemsize), program.arguments
    arguments = [given_as.index(one.given_as) for one in program.operands]
    call = _of_any(done, ready.run, scratch, arguments)
    same_type = tensors[0] is not None and tensors[0].dtype == program.dtype
    if ready.call is None or not same_type or any(fits) or after:
        return call
    outputs = [(tuple(shape), tuple(strides), dtype) for shape, strides, dtype in made]
    return ready.call(outputs, arguments, ((scratch,), (1,), program.dtype) if scratch else None, call)


def _loaded(steps: Iterable[Step], device: torch.device) -> list[launch.Kernel]:
    """Load the kernels of all launches among some steps; missing ones are compiled in parallel."""
    wanted = [step for step in steps if isinstance(step, Launch)]
    if len(wanted) > 1 and device.type == "cuda":
        launch.compile_together(((step.source, step.macros) for step in wanted), device.index)
    return [launch.load(step.source, step.macros, device.index, step.shared_bytes) for step in wanted]


def _lowered(
    step: Step, index_of: Mapping[str, tuple[int, int]], channels_last: bool, kernels: Iterator[launch.Kernel]
) -> executor.Step:
    """A step in the executor's form, for a weight in the given format; a launch takes the next of the kernels."""

    def place(at: At) -> executor.Place:
        index, offset = index_of[at.tensor]
        return index, offset + at.offset

    if isinstance(step, Zero):
        return executor.Zero(index_of[step.tensor], step.size)
    if isinstance(step, Gemm):
        a, b, c = ((one.dtype, one.leading, one.stride) for one in step.operands)
        product = cublas.StridedBatchedGemm(
            step.extents, a, b, c, step.batch, step.transposed, tf32=step.tf32, accumulates=step.accumulates
        )
        return executor.Gemm(product, [place(one.at) for one in step.operands])
    params, placeholders = step.laid_out(channels_last)
    pointers = [(offset, *place(one)) for offset, one in placeholders if isinstance(one, At)]
    specs = [(offset, one) for offset, one in placeholders if isinstance(one, TensorMapSpec)]
    maps = [(offset, *index_of[spec.tensor], astuple(spec)[1:]) for offset, spec in specs]
    shape = step.grid, step.block, step.shared_bytes, step.overlaps
    return executor.Launch(next(kernels), *shape, params, pointers, maps)


Compilations = list[tuple[str, Future[float | None]]]  # sources, and the seconds that each has taken


def compile_ahead(steps: Callable[[], Iterable[Launch]], device: torch.device) -> Future[Compilations]:
    """Compute ``steps`` in a thread of the pool, and compile the kernels of these launches in the background."""

    def work() -> Compilations:
        return launch.compile_ahead(((step.source, step.macros) for step in steps()), launch.architecture(device.index))

    return pool.submit(work, urgent=False, at_once=True)


def compilation_count() -> int:
    """Kernels that this process has compiled."""
    return len(compiler.compilation_seconds)


def in_background(work: Callable[[], object]) -> None:
    """Run ``work`` in another thread if the machine has enough cores: some are idle while a call's kernels compile."""
    if pool.cores() >= _MANY_CORES:
        pool.submit(work, urgent=False)


def _of_any(done: Completed, run: executor.Run, scratch: int, arguments: Sequence[int]) -> Callable[..., Any]:
    """The call of a program with ``scratch`` elements of scratch memory, which copies what is not aligned."""
    dtype, fits, made, after = done.program.dtype, done.fits, done.made, done.after

    def call(*tensors: torch.Tensor | None) -> Any:
        first: Any = tensors[0]
        results = [first.new_empty_strided(shape, strides, dtype=of) for shape, strides, of in made]
        operands = [tensors[i] for i in arguments]
        for i, fit in enumerate(fits):
            if fit is not None and (operand := operands[i]) is not None:
                operands[i] = fit(operand)
        regions = [first.new_empty(scratch, dtype=dtype)] if scratch else []
        addresses = [0 if one is None else one.data_ptr() for one in (*results, *operands, *regions)]
        while misaligned := run(*addresses):
            i = misaligned - 1 - len(results)
            operand = operands[i]
            assert operand is not None
            operands[i] = copy = operand.clone(memory_format=torch.preserve_format)
            addresses[misaligned - 1] = copy.data_ptr()
        for i, strides in after:
            results[i] = restrided(results[i], strides)
        return results[0] if len(results) == 1 else tuple(results)

    return call


class _Memory(NamedTuple):
    """Memory that can hold regions of scratch memory: an output that is written later, or an allocation for scratch."""

    place: int  # index among outputs, operands and scratch memory
    size: int  # bytes
    # for each region there, its begin and end in bytes, and the first and end of the steps that need it
    taken: list[tuple[int, int, int, int]]

    def offset(self, size: int, first: int, end: int) -> int:
        """The first free offset for ``size`` bytes that steps from ``first`` to ``end`` need."""
        offset = 0
        for low, high, begin, until in sorted(self.taken):
            if begin < end and first < until and offset + size > low:
                offset = max(offset, high)
        return offset


def _laid_out(program: Program, made: Sequence[Made]) -> tuple[dict[str, executor.Place], int]:
    """Where each region of scratch memory begins, and bytes of scratch memory in all.

    Regions that are never needed at the same time share memory, and one that is needed until an output is written lies
    where that will be: it takes none of its own. One is needed until what reads it has ended, which the next step that
    does not overlap waits for. ``made`` is what is allocated for each output.
    """
    steps, count, needed = program.steps, len(program.steps), dict[str, tuple[int, int]]()
    for i, step in enumerate(steps):
        end = next((j for j in range(i + 1, count) if not getattr(steps[j], "overlaps", False)), count)
        needed |= {name: (needed.get(name, (i, i))[0], end) for name in step.tensors}
    memories = list[_Memory]()
    for i, (output, (shape, _, dtype)) in enumerate(zip(program.outputs, made, strict=True)):
        size, first = math.prod(shape) * dtype.itemsize, needed.get(output.name, (0, count))[0]
        memories.append(_Memory(i, size, [(0, size, first, count)]))
    scratch = _Memory(len(program.outputs) + len(program.operands), sys.maxsize, [])
    memories.append(scratch)
    places: dict[str, executor.Place] = {}
    for name, size in sorted(program.scratch.items(), key=lambda item: -item[1]):
        span = needed.get(name, (0, count))
        offsets = ((memory, memory.offset(size, *span)) for memory in memories)
        memory, offset = next((one, at) for one, at in offsets if at + size <= one.size)
        places[name] = memory.place, offset
        memory.taken.append((offset, offset + up_to_multiple(size, _REGION_BYTES), *span))
    return places, max((high for _, high, *_ in scratch.taken), default=0)
