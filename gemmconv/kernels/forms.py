"""Completes a program for tensors with given strides and dtypes, which may be without data.

Operands in the other memory format get a transpose before the program's steps, outputs one after them; torch copies
tensors that no kernel can transpose. Weights and biases of another dtype get a cast before all steps, and their
gradients one after all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from gemmconv.kernels.base import strides_of
from gemmconv.kernels.layout import cast
from gemmconv.kernels.layout.transpose import is_same_memory, other_format, takes_the_kernel, transposing, transposition
from gemmconv.kernels.program import Launch, Operand, Program, Step
from gemmconv.kernels.splits import reduce

Fit = Callable[[torch.Tensor], torch.Tensor]
Prepare = Callable[[Program, torch.device], Fit]
Tensors = Sequence[torch.Tensor | None]
Made = tuple[Any, Any, torch.dtype]  # shape, strides and dtype of an output that a call allocates


class Completed(NamedTuple):
    """A program for tensors with given strides and dtypes."""

    program: Program  # the program with transposes and casts among its steps
    fits: list[Fit | None]  # for each operand a function of torch's that copies it first, or None
    channels_last: bool  # whether the weight is in channels_last
    made: list[Made]  # shape, strides and dtype of the allocation for each output
    after: list[tuple[int, Any]]  # indices of outputs that torch copies after the steps, and the strides they get


def launches(program: Program, tensors: Tensors, device: torch.device) -> list[Launch]:
    """All launches of a call with tensors that have the strides of these."""
    steps: list[Step] = []

    def noted(before: Program, device: torch.device) -> Fit:
        steps.extend(before.steps)
        return torch.Tensor.contiguous

    steps.extend(completed(program, tensors, device, noted).program.steps)
    return [step for step in steps if isinstance(step, Launch)]


def completed(
    program: Program, tensors: Tensors, device: torch.device, prepare: Prepare = Program.prepare
) -> Completed:
    """The program for tensors with the strides and dtypes of these.

    ``prepare`` makes a call of a program that transposes an operand before torch pads its columns.
    """
    with_casts = _with_operand_casts(program, tensors)
    fits, program, channels_last = with_operand_transposes(with_casts, tensors, device, prepare)
    program, made, after = with_output_transposes(program)
    return Completed(_with_output_casts(program), fits, channels_last, made, after)


def name_of_cast(operand: str) -> str:
    """The name of an operand's cast, among scratch regions or, if it is returned, among outputs."""
    return f"{operand} cast"


def _with_operand_casts(program: Program, tensors: Tensors) -> Program:
    """The program with casts of weights and biases that have another dtype.

    A cast has the memory format of its tensor, and is transposed if the operand needs the other.
    """
    given = dict(zip(program.arguments, tensors, strict=False))
    returned = {output.name for output in program.outputs}
    operands, casts, behind, names = [], [], list[Step](), dict[str, str]()
    scratch, dtype, itemsize = dict(program.scratch), program.dtype, program.dtype.itemsize
    for operand in program.operands:
        tensor = given.get(operand.given_as) if operand.given_as in ("weight", "bias") else None
        if tensor is not None and tensor.dtype != program.dtype:
            names[operand.name] = target = name_of_cast(operand.name)
            casts.append((operand.name, target, tensor.numel()))
            dtype = tensor.dtype
            if target not in returned:
                scratch[target] = tensor.numel() * itemsize
            if (form := operand.form) is not None and not tensor.is_contiguous(memory_format=form):
                names[operand.name] = f"{target} transposed"
                step, _ = transposition(tuple(tensor.shape), itemsize, form)
                behind.append(step.renamed({"source": target, "target": names[operand.name]}))
                scratch[names[operand.name]] = tensor.numel() * itemsize
                operand = replace(operand, form=other_format(form))
            operand = replace(operand, alignment=cast.ALIGNMENT)
        operands.append(operand)
    if not casts:
        return program
    steps = *cast.casts(casts, dtype, program.dtype), *behind, *(step.renamed(names) for step in program.steps)
    return replace(program, operands=tuple(operands), steps=steps, scratch=scratch)


def _with_output_casts(program: Program) -> Program:
    """The program with outputs in the dtype that is returned: the launch that writes one casts it if it can."""
    casts, dtype = [], program.dtype
    for output in program.outputs:
        if output.dtype is not None and output.dtype != program.dtype:
            wide = partial(reduce.widened, dtype=output.dtype)
            if (written := _written(program, output.name, wide)) is not None:
                program = written
                continue
            casts.append((f"{output.name} computed", output.name, math.prod(output.shape)))
            dtype = output.dtype
    if not casts:
        return program
    names = {target: source for source, target, _ in casts}
    steps = *(step.renamed(names) for step in program.steps), *cast.casts(casts, program.dtype, dtype)
    scratch = {source: elements * program.dtype.itemsize for source, _, elements in casts}
    return replace(program, steps=steps, scratch={**program.scratch, **scratch})


def _written(program: Program, output: str, change: Callable[[Step], Launch | None]) -> Program | None:
    """The program with its single step that writes ``output`` changed; None if several do, or it cannot change."""
    writing = [i for i, step in enumerate(program.steps) if output in step.tensors]
    if len(writing) != 1 or (changed := change(program.steps[writing[0]])) is None:
        return None
    return replace(program, steps=(*program.steps[: writing[0]], changed, *program.steps[writing[0] + 1 :]))


def with_operand_transposes(
    program: Program, tensors: Tensors, device: torch.device, prepare: Prepare = Program.prepare
) -> tuple[list[Fit | None], Program, bool]:
    """The ``fits``, ``program`` and ``channels_last`` of :class:`Completed`, with transposes of operands."""
    given = dict(zip(program.arguments, tensors, strict=False))
    fits: list[Fit | None] = []
    operands, before, names, scratch, channels_last = [], list[Step](), dict[str, str](), dict[str, int](), False
    for operand in program.operands:
        tensor, form = given.get(operand.given_as), operand.form
        fit: Fit | None = None
        if tensor is None or tensor.is_contiguous(memory_format=form or torch.contiguous_format):
            pass
        elif form is None:
            channels_last = tensor.is_contiguous(memory_format=torch.channels_last)
            fit = None if channels_last else torch.Tensor.contiguous
        elif (transposed := _transposed(operand, tensor, device)) is None:
            fit = partial(torch.Tensor.contiguous, memory_format=form)
        elif operand.row_padding:
            fit = prepare(transposed, device)
        else:
            (step,), (source,) = transposed.steps, transposed.operands
            names[operand.name] = f"{operand.name} transposed"
            before.append(step.renamed({"source": operand.name, "target": names[operand.name]}))
            scratch[names[operand.name]] = tensor.numel() * program.dtype.itemsize
            operand = replace(operand, alignment=source.alignment)
        if tensor is not None and operand.row_padding:
            fit = partial(_padded, fit=fit, row_padding=operand.row_padding)
        fits.append(fit)
        operands.append(operand)
    if names:
        steps = (*before, *(step.renamed(names) for step in program.steps))
        scratch = {**scratch, **program.scratch}
        program = replace(program, operands=tuple(operands), steps=steps, scratch=scratch)
    return fits, program, channels_last


def _transposed(operand: Operand, tensor: torch.Tensor, device: torch.device) -> Program | None:
    """A program that transposes an operand to its form; None if torch has to copy it."""
    assert operand.form is not None
    if device.type != "cuda" or tensor.dim() != 4 or not takes_the_kernel(tensor.shape):
        return None
    if not tensor.is_contiguous(memory_format=other_format(operand.form)):
        return None
    return transposing(tensor.dtype, tensor.shape, operand.form)


def with_output_transposes(program: Program) -> tuple[Program, list[Made], list[tuple[int, Any]]]:
    """The ``program``, ``made`` and ``after`` of :class:`Completed`, with transposes of outputs."""
    made, after, names, behind, scratch = [], [], dict[str, str](), list[Step](), dict[str, int]()
    itemsize = program.dtype.itemsize
    in_form = partial(reduce.in_channels_last, itemsize=itemsize)
    for i, output in enumerate(program.outputs):
        strides, written = output.strides, output.written
        if written is None or (other := strides_of(output.shape, written)) == strides or is_same_memory(output.shape):
            pass
        elif written is torch.contiguous_format and (changed := _written(program, output.name, in_form)) is not None:
            program = changed
        elif takes_the_kernel(output.shape):
            names[output.name] = source = f"{output.name} written"
            step, _ = transposition(output.shape, itemsize, other_format(written))
            behind.append(step.renamed({"source": source, "target": output.name}))
            scratch[source] = math.prod(output.shape) * itemsize
        else:
            after.append((i, strides))
            strides = other
        made.append((output.shape, strides, output.dtype or program.dtype))
    if names:
        steps = (*(step.renamed(names) for step in program.steps), *behind)
        program = replace(program, steps=steps, scratch={**scratch, **program.scratch})
    return program, made, after


def _padded(tensor: torch.Tensor, fit: Fit | None, row_padding: int) -> torch.Tensor:
    """The result of ``fit`` for a tensor, with ``row_padding`` zeros behind each row."""
    fitted = tensor if fit is None else fit(tensor)
    # torch cannot tell the format of images of one pixel, so the result may still need a copy.
    return torch.nn.functional.pad(fitted, (0, row_padding)).contiguous()
