"""From a :class:`Program` to calls: what is prepared once for tensors of some strides, and done at every call.

For the strides at hand, operands in the other format get a transposition in front of the program's steps, outputs one
behind them; what no kernel can transpose, torch copies. Names become indices of addresses, params bytes with slots, and
regions of scratch memory offsets in one allocation. An executor of :mod:`gemmconv.runtime.executor` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gemmconv.kernels.base import restrided, strides_of
from gemmconv.kernels.layout.transpose import is_same_memory, other_format, takes_the_kernel, transposition
from gemmconv.kernels.program import At, Gemm, Launch, Operand, Output, Program, Step, TensorMapSpec, Zero
from gemmconv.runtime import executor, launch

Fit = Callable[[torch.Tensor], torch.Tensor]
Tensors = tuple[torch.Tensor | None, ...]

_REGION_BYTES = 256  # what regions of scratch memory begin at a multiple of
_MOST_BOUND = 64  # calls for tensors of different strides


class Call:
    """A program on a device, with its kernels loaded. To be called with tensors of any strides."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.program, self.device = program, device
        self._bound: dict[Hashable, Callable[..., Any]] = {}
        self._kernels: dict[Hashable, launch.Kernel] = {}
        for step in program.steps:
            if isinstance(step, Launch):
                self._kernel(step)

    def __call__(self, *tensors: torch.Tensor | None) -> Any:
        key = tuple([None if tensor is None else tensor.stride() for tensor in tensors])
        call = self._bound.get(key)
        if call is None:
            if len(self._bound) >= _MOST_BOUND:
                self._bound.clear()
            call = self._bound[key] = self.bind(*tensors)
        return call(*tensors)

    def load(self, *tensors: torch.Tensor | None) -> None:
        """Load all kernels for tensors of the strides that these have, which may be without data."""
        _, program, _ = brought_to_form(self.program, tensors, self.device)
        for step in returned(program)[0].steps:
            if isinstance(step, Launch):
                self._kernel(step)

    def _kernel(self, step: Launch) -> launch.Kernel:
        key = step.source, tuple(step.macros.items()), step.shared_bytes
        if key not in self._kernels:
            self._kernels[key] = launch.load(step.source, step.macros, self.device.index, step.shared_bytes)
        return self._kernels[key]

    def bind(self, *tensors: torch.Tensor | None) -> Callable[..., Any]:
        """The call for tensors of the strides that these have."""
        fits, program, channels_last = brought_to_form(self.program, tensors, self.device)
        program, made, after = returned(program)
        offsets, scratch_bytes = _laid_out(program)
        names = [one.name for one in program.outputs] + [one.name for one in program.operands]
        index_of = {name: (i, 0) for i, name in enumerate(names)}
        index_of |= {name: (len(names), offset) for name, offset in offsets.items()}
        alignments = [1] * len(program.outputs) + [one.alignment for one in program.operands]
        steps = [self._lowered(step, index_of, channels_last) for step in program.steps]
        run = executor.prepare(self.device, alignments, steps)
        scratch = -(-scratch_bytes // program.dtype.itemsize)
        arguments = [program.arguments.index(one.given_as) for one in program.operands]
        same_type = tensors[0] is not None and tensors[0].dtype == program.dtype
        as_they_are = same_type and arguments == [*range(len(tensors))] and not (any(fits) or after)
        call = _of_any(program.dtype, run, made, scratch, arguments, fits, after)
        forward = len(made) == 1 and len(tensors) == 3
        if not as_they_are or any(one is None for one in (tensors[:2] if forward else tensors)):
            return call
        return (_forward if forward else _several)(run, made, scratch, call)

    def _lowered(self, step: Step, index_of: Mapping[str, tuple[int, int]], channels_last: bool) -> executor.Step:
        """A step as the executor takes it, of a weight of either format."""

        def place(at: At) -> executor.Place:
            index, offset = index_of[at.tensor]
            return index, offset + at.offset

        if isinstance(step, Zero):
            return executor.Zero(place(At(step.tensor)), step.size)
        if isinstance(step, Gemm):
            of = [executor.Matrices(place(one.at), one.dtype, one.leading, one.stride) for one in step.operands]
            return executor.Gemm(step.extents, of, step.batch, step.transposed, step.tf32, step.accumulates)
        kernel = self._kernel(step)
        params, slots = step.laid_out(channels_last)
        pointers = [(offset, *place(slot)) for offset, slot in slots if isinstance(slot, At)]
        maps = [
            (offset, *place(At(slot.tensor)), slot.described)
            for offset, slot in slots
            if isinstance(slot, TensorMapSpec)
        ]
        return executor.Launch(kernel, step.grid, step.block, step.shared_bytes, step.overlaps, params, pointers, maps)


def _of_any(
    dtype: torch.dtype,
    run: executor.Run,
    made: Sequence[tuple[Any, Any]],
    scratch_elements: int,
    arguments: Sequence[int],
    fits: Sequence[Fit | None],
    after: Sequence[tuple[int, Any]],
) -> Callable[..., Any]:
    """The call of a program, which copies what is not aligned."""

    def call(*tensors: torch.Tensor | None) -> Any:
        first: Any = tensors[0]
        results = [first.new_empty_strided(shape, strides, dtype=dtype) for shape, strides in made]
        operands = [tensors[i] for i in arguments]
        for i, fit in enumerate(fits):
            if fit is not None and (operand := operands[i]) is not None:
                operands[i] = fit(operand)
        scratch = first.new_empty(scratch_elements, dtype=dtype)
        addresses = [0 if one is None else one.data_ptr() for one in (*results, *operands, scratch)]
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


# The same where torch does nothing to the tensors, without a loop: what a call of a small layer waits for.


def _forward(
    run: executor.Run, made: Sequence[tuple[Any, Any]], scratch_elements: int, of_any: Callable[..., Any]
) -> Callable[..., Any]:
    ((shape, strides),) = made

    def call(first: Any, second: Any, third: Any) -> Any:
        result = first.new_empty_strided(shape, strides)
        scratch = first.new_empty(scratch_elements) if scratch_elements else result
        addresses = result.data_ptr(), first.data_ptr(), second.data_ptr(), 0 if third is None else third.data_ptr()
        return of_any(first, second, third) if run(*addresses, scratch.data_ptr()) else result

    return call


def _several(
    run: executor.Run, made: Sequence[tuple[Any, Any]], scratch_elements: int, of_any: Callable[..., Any]
) -> Callable[..., Any]:
    """Of gradients, none of whose tensors may be None."""
    single = len(made) == 1

    def call(*tensors: Any) -> Any:
        first = tensors[0]
        results = [first.new_empty_strided(shape, strides) for shape, strides in made]
        addresses = [result.data_ptr() for result in results]
        for tensor in tensors:
            addresses.append(tensor.data_ptr())
        if scratch_elements:
            scratch = first.new_empty(scratch_elements)
            addresses.append(scratch.data_ptr())
        if run(*addresses):
            return of_any(*tensors)
        return results[0] if single else tuple(results)

    return call


def brought_to_form(program: Program, tensors: Tensors, device: torch.device) -> tuple[list[Fit | None], Program, bool]:
    """What torch does to each operand, the program with transpositions of others, and whether the weight is in
    channels_last."""
    given = dict(zip(program.arguments, tensors, strict=False))
    fits: list[Fit | None] = []
    operands, before, names, scratch, channels_last = [], list[Step](), dict[str, str](), dict[str, int](), False
    for operand in program.operands:
        tensor = given.get(operand.given_as)
        fit: Fit | None = None
        if tensor is not None and operand.form is None:
            if not tensor.is_contiguous():
                channels_last = tensor.is_contiguous(memory_format=torch.channels_last)
                fit = None if channels_last else torch.Tensor.contiguous
        elif tensor is not None and operand.form is not None:
            if not tensor.is_contiguous(memory_format=operand.form):
                transposed = _transposed(operand, tensor, device)
                if transposed is None:
                    fit = partial(torch.Tensor.contiguous, memory_format=operand.form)
                elif operand.columns:
                    fit = Call(transposed, device)
                else:
                    (step,), (source,) = transposed.steps, transposed.operands
                    names[operand.name] = f"{operand.name} transposed"
                    before.append(step.renamed({"source": operand.name, "target": names[operand.name]}))
                    scratch[names[operand.name]] = tensor.numel() * program.dtype.itemsize
                    operand = replace(operand, alignment=source.alignment)
            if operand.columns:
                fit = partial(_widened, fit=fit, columns=operand.columns)
        fits.append(fit)
        operands.append(operand)
    steps = (*before, *(step.renamed(names) for step in program.steps))
    new = replace(program, operands=tuple(operands), steps=steps, scratch={**scratch, **program.scratch})
    return fits, new, channels_last


def _transposed(operand: Operand, tensor: torch.Tensor, device: torch.device) -> Program | None:
    """A program that brings an operand to its form, None where torch is to: of weights, which are small."""
    assert operand.form is not None
    given = other_format(operand.form)
    if operand.given_as == "weight" or device.type != "cuda" or tensor.dim() != 4 or not takes_the_kernel(tensor.shape):
        return None
    if not tensor.is_contiguous(memory_format=given):
        return None
    step, alignment = transposition(tuple(tensor.shape), tensor.dtype.itemsize, operand.form)
    target = Output("target", tuple(tensor.shape), strides_of(tensor.shape, operand.form))
    return Program(tensor.dtype, (Operand("source", given, alignment),), (target,), (step,))


def returned(program: Program) -> tuple[Program, list[tuple[Any, Any]], list[tuple[int, Any]]]:
    """The program with transpositions of outputs; shape and strides of what is allocated; what torch copies then."""
    made, after, names, behind, scratch = [], [], dict[str, str](), list[Step](), dict[str, int]()
    for i, output in enumerate(program.outputs):
        strides, written = output.strides, output.written
        if written is not None and (other := strides_of(output.shape, written)) != strides:
            if is_same_memory(output.shape):
                pass
            elif takes_the_kernel(output.shape):
                names[output.name] = f"{output.name} written"
                wanted = other_format(written)
                step, _ = transposition(output.shape, program.dtype.itemsize, wanted)
                behind.append(step.renamed({"source": names[output.name], "target": output.name}))
                scratch[names[output.name]] = torch.Size(output.shape).numel() * program.dtype.itemsize
            else:
                after.append((i, strides))
                strides = other
        made.append((output.shape, strides))
    steps = (*(step.renamed(names) for step in program.steps), *behind)
    return replace(program, steps=steps, scratch={**scratch, **program.scratch}), made, after


def _laid_out(program: Program) -> tuple[dict[str, int], int]:
    """Where each region of the scratch memory begins, and bytes in all.

    Regions that are never needed at the same time share memory. One is needed until what reads it has ended, which the
    next step that does not overlap waits for.
    """
    needed: dict[str, tuple[int, int]] = {}
    for i, step in enumerate(program.steps):
        end = i + 1
        while end < len(program.steps) and getattr(program.steps[end], "overlaps", False):
            end += 1
        for name in step.tensors:
            needed[name] = min(i, needed.get(name, (i, i))[0]), end
    offsets: dict[str, int] = {}
    total = 0
    sizes = {name: -(-size // _REGION_BYTES) * _REGION_BYTES for name, size in program.scratch.items()}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        begin, end = needed.get(name, (0, len(program.steps)))
        alive = [
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if needed[other][0] < end and begin < needed[other][1]
        ]
        offset = 0
        for low, high in sorted(alive):
            if offset + sizes[name] > low:
                offset = max(offset, high)
        needed.setdefault(name, (begin, end))
        offsets[name] = offset
        total = max(total, offset + sizes[name])
    return offsets, total


def _widened(tensor: torch.Tensor, fit: Fit | None, columns: int) -> torch.Tensor:
    """A tensor with columns of zeros beside its rows, after ``fit``."""
    fitted = tensor if fit is None else fit(tensor)
    # Contiguous once more: of images of one pixel torch cannot tell in which format they are.
    return torch.nn.functional.pad(fitted, (0, columns)).contiguous()
