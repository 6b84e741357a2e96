"""The launch path of all kernels: a call is a :class:`Program`, plain data, and :meth:`Program.prepare` makes it.

A program says what its operands must be like, what it makes, what scratch memory it takes, and which kernels it
launches, with which params. It may be pickled: it holds no tensor, no kernel and no function.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import torch

from gemmconv.geometry import Problem, Shape4
from gemmconv.kernels.base import Config, Pass, strides_of, with_strides
from gemmconv.kernels.macros import Macros

Extent3 = tuple[int, int, int]
Strides = tuple[int, ...]
Fit = Callable[[torch.Tensor], torch.Tensor]

MAX_GRID_Y = 65_535  # and of z
_REGION_BYTES = 256  # what regions of scratch memory begin at a multiple of
_KEPT_MAPS = 64  # of a tensor map, for different addresses


class Long(int):
    """A constant of params that is a long long in C."""


@dataclass(frozen=True)
class ByFormat:
    """A constant of params that depends on the format of a weight that may have either."""

    contiguous: int
    channels_last: int


@dataclass(frozen=True)
class TensorMapSpec:
    """A tensor map: what :func:`gemmconv.runtime.tensor_map.encode` is to know, which says more of it.

    Attributes:
        tensor: the name of an operand, an output or a region.
        itemsize: bytes of an element.
        sizes: elements of each dimension, the innermost first.
        strides: bytes from one element to the next, of all dimensions but the innermost.
        box, steps: elements of a box, and from one of them to the next, of each dimension.
        swizzled: whether boxes lie as csrc/include/ptx/wgmma.cuh says.
        fetched: bytes that the L2 cache fetches together.
    """

    tensor: str
    itemsize: int
    sizes: Shape4
    strides: Extent3
    box: Shape4
    steps: Shape4 = (1, 1, 1, 1)
    swizzled: bool = True
    fetched: int = 256


# A pointer to an operand, an output or a region by its name, a null pointer, a tensor map, or a constant.
Field = str | None | TensorMapSpec | int | ByFormat
Params = Mapping[str, Field | tuple[Field, ...]]
_C_TYPES = {str: ("Q", 8), type(None): ("Q", 8), TensorMapSpec: ("128s", 64), Long: ("Q", 8)}  # others are int


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        source, macros: of the kernel, in csrc/.
        grid, block: blocks, and threads of a block.
        params: the fields of its params struct in order; their C types follow from the values. A name with commas, as
            in C, is of several fields, and has a tuple of values.
        shared_bytes: of dynamic shared memory.
        overlaps: whether it may begin before the one before has ended: see ``launch`` of gemmconv/runtime/launch.py.
    """

    source: str
    macros: Macros
    grid: Extent3
    block: Extent3
    params: Params
    shared_bytes: int = 0
    overlaps: bool = False

    @property
    def fields(self) -> Iterator[Field]:
        """The values of the params struct, in order."""
        for names, value in self.params.items():
            values = value if isinstance(value, tuple) else (value,)
            assert len(values) == names.count(",") + 1, f"{self.source}: values of {names}, got {values}"
            yield from values


@dataclass(frozen=True)
class Transpose:
    """How a tensor in NCHW is brought to channels_last, or the other way round.

    Attributes:
        memory_format: to which.
        shape, strides: of the result.
        launch: from ``source`` to ``target``, its first params.
        alignment: bytes, what the kernel needs; torch copies tensors that begin elsewhere, and those of other strides.
    """

    memory_format: torch.memory_format
    shape: Shape4
    strides: Strides
    launch: Launch
    alignment: int

    def prepare(self, device: torch.device) -> Fit:
        """Load the kernel; return what brings a tensor to the format. One that is in it comes back as it is."""
        from gemmconv.runtime.launch import load

        kernel, grid = load(self.launch.source, self.launch.macros, device.index), self.launch.grid
        block = self.launch.block
        wanted, shape, strides, alignment = self.memory_format, self.shape, self.strides, self.alignment
        other, (params, pack, (_, _, (constants, _))) = other_format(wanted), _layout(self.launch.fields)

        def turn(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_contiguous(memory_format=wanted):
                return tensor
            if not tensor.is_contiguous(memory_format=other) or (address := tensor.data_ptr()) % alignment:
                return with_strides(tensor, strides)
            turned = tensor.new_empty_strided(shape, strides)
            kernel.launch(grid, block, params(pack(address, turned.data_ptr(), constants)))
            return turned

        return turn


@dataclass(frozen=True)
class Operand:
    """A tensor that a call takes, and what it must be like: it is copied where it is not.

    Attributes:
        name: what params call it.
        form: the strides that it has; or the format in which it is contiguous, and what brings it to that; None of a
            weight that is contiguous in either format.
        alignment: bytes; it begins at a multiple of them.
        columns: of zeros that are put beside each of its rows.
    """

    name: str
    form: Strides | torch.memory_format | Transpose | None
    alignment: int = 1
    columns: int = 0


@dataclass(frozen=True)
class Output:
    """A tensor that a call makes, of the program's type.

    Attributes:
        name: what params call it.
        shape, strides: when it is returned.
        written: its strides when launches write it, if they are others.
        transpose: what brings it from those to these; torch does if nothing is said.
    """

    name: str
    shape: Shape4
    strides: Strides
    written: Strides | None = None
    transpose: Transpose | None = None

    def prepare_turn(self, device: torch.device) -> Fit:
        """Prepare what brings it to the strides that it is returned with."""
        turn = partial(with_strides, strides=self.strides)
        return turn if self.transpose is None else self.transpose.prepare(device)


@dataclass(frozen=True)
class Program:
    """A call as plain data. One without launches returns zeros: sums of nothing, or tensors without elements.

    Attributes:
        dtype: of operands and outputs.
        operands: in the order of the call; the one that is called bias may be None.
        outputs: in the order in which they are returned.
        launches: in order.
        scratch: bytes of the regions of one allocation, by name; they hold anything at first.
    """

    dtype: torch.dtype
    operands: tuple[Operand, ...]
    outputs: tuple[Output, ...]
    launches: tuple[Launch, ...]
    scratch: Mapping[str, int] = field(default_factory=dict)

    def prepare(self, device: torch.device) -> Callable[..., Any]:
        """Load the kernels; return what takes the operands, launches them and returns the output, or a tuple of them.

        All that kernels read but what launches write is there before the first launch, as overlaps ask for.
        """
        from gemmconv.runtime.launch import load

        kernels = [load(one.source, one.macros, device.index, one.shared_bytes) for one in self.launches]
        rules = [_rule(operand, device) for operand in self.operands]
        made = [(one.shape, one.written or one.strides) for one in self.outputs]
        turns = [(i, one.prepare_turn(device)) for i, one in enumerate(self.outputs) if one.written is not None]
        single = len(made) == 1
        offsets, scratch_elements = [], 0
        for region_bytes in self.scratch.values():
            offsets.append(scratch_elements * self.dtype.itemsize)
            scratch_elements += -(-region_bytes // _REGION_BYTES) * _REGION_BYTES // self.dtype.itemsize

        # The values of a call: addresses of outputs, operands and regions, then tensor maps, then constants.
        names = [one.name for one in self.outputs] + [one.name for one in self.operands] + list(self.scratch)
        specs = [value for one in self.launches for value in one.fields if isinstance(value, TensorMapSpec)]
        maps = [(_encoder(kernels[0], spec), names.index(spec.tensor)) for spec in specs]
        index_of = {name: i for i, name in enumerate((*names, *specs))}
        constants: tuple[list[bytes], list[bytes]] = [], []  # of a weight in NCHW and in channels_last
        steps = []
        for kernel, one in zip(kernels, self.launches, strict=True):
            params, pack, slots = _layout(one.fields)
            indices = []
            for slot in slots:
                indices.append(len(index_of) + len(constants[0]) if isinstance(slot, tuple) else index_of[slot])
                if isinstance(slot, tuple):
                    constants[0].append(slot[0])
                    constants[1].append(slot[1])
            shape = one.grid, one.block, one.shared_bytes, one.overlaps
            steps.append((kernel, *shape, params, pack, itemgetter(*indices)))

        def call(*tensors: torch.Tensor | None) -> Any:
            first: Any = tensors[0]
            results, values, kept, channels_last = [], [], [], False
            for shape, strides in made:
                output = first.new_empty_strided(shape, strides)
                results.append(output)
                values.append(output.data_ptr())
            for i, tensor in enumerate(tensors):
                wanted, fit, alignment = rules[i]
                if tensor is None:
                    values.append(0)
                    continue
                if wanted is not None:
                    if tensor.stride() != wanted:
                        tensor = with_strides(tensor, wanted)
                elif fit is not None:
                    tensor = fit(tensor)
                elif not tensor.is_contiguous():
                    channels_last = tensor.is_contiguous(memory_format=torch.channels_last)
                    tensor = tensor if channels_last else tensor.contiguous()
                address = tensor.data_ptr()
                if address % alignment:
                    tensor = tensor.clone(memory_format=torch.preserve_format)
                    address = tensor.data_ptr()
                kept.append(tensor)  # until what reads it is launched
                values.append(address)
            if scratch_elements:
                scratch = first.new_empty(scratch_elements)
                address = scratch.data_ptr()
                for offset in offsets:
                    values.append(address + offset)
            for encoded, index in maps:
                values.append(encoded(values[index]))
            values += constants[channels_last]
            for kernel, grid, block, shared_bytes, overlaps, params, pack, values_of in steps:
                kernel.launch(grid, block, params(pack(*values_of(values))), shared_bytes, overlaps)
            for i, turn in turns:
                results[i] = turn(results[i])
            return results[0] if single else tuple(results)

        def zeros(first: torch.Tensor, *_: torch.Tensor | None) -> Any:
            results = [first.new_empty_strided(one.shape, one.strides).zero_() for one in self.outputs]
            return results[0] if single else tuple(results)

        return call if self.launches else zeros


def gathering(
    config: Config,
    direction: Pass,
    launches: Iterable[Launch],
    scratch: Mapping[str, int] | None = None,
    *,
    weight: Operand | None = None,
    alignment: int = 16,
) -> Program:
    """A program that gathers ``output`` from ``input``, of any strides: a forward pass, or an input gradient.

    Args:
        config, direction: of the pass. The input of an input gradient is grad_output; it has no ``bias``.
        launches, scratch: of the program.
        weight: what it must be like; in either format if that is not said.
        alignment: of the input.
    """
    shapes = config.problem.input_shape, config.problem.output_shape
    input_shape, output_shape = shapes if direction == "forward" else shapes[::-1]
    input = Operand("input", strides_of(input_shape, config.memory_format), alignment)
    bias = (Operand("bias", torch.contiguous_format),) if direction == "forward" else ()
    output = Output("output", output_shape, strides_of(output_shape, config.memory_format))
    operands = input, weight or Operand("weight", None), *bias
    return Program(config.dtype, operands, (output,), tuple(launches), scratch or {})


def fitting(form: torch.memory_format | Transpose, device: torch.device) -> Fit:
    """Prepare what brings a tensor to a form; one that has it comes back as it is."""
    if isinstance(form, Transpose):
        return form.prepare(device)
    contiguous = torch.Tensor.contiguous
    return contiguous if form is torch.contiguous_format else partial(contiguous, memory_format=form)


def other_format(memory_format: torch.memory_format) -> torch.memory_format:
    """NCHW for channels_last, and the other way round."""
    return torch.contiguous_format if memory_format is torch.channels_last else torch.channels_last


def weight_steps(problem: Problem) -> dict[str, Field]:
    """Elements of a weight in either format from one output channel of a group to the next, and from one tap."""
    channels = problem.out_channels // problem.groups
    return {"weight_channel": ByFormat(problem.taps, 1), "weight_tap": ByFormat(1, channels)}


def plane_grid(x: int, planes: int) -> Extent3:
    """A grid of ``x`` blocks for each of many planes, at least one, which run over y and z."""
    y = min(planes, MAX_GRID_Y)
    return x, y, -(-planes // y)


def reciprocal(divisor: int) -> Long:
    """What csrc/include/numeric/divide.cuh multiplies with to divide by a positive 32-bit integer."""
    return Long(-(-(1 << 63) // divisor))


def _rule(operand: Operand, device: torch.device) -> tuple[Strides | None, Fit | None, int]:
    """The strides of an operand, or what brings it to its form; neither where either format will do. Its alignment."""
    form, columns = operand.form, operand.columns
    if form is None or isinstance(form, tuple):
        return form, None, operand.alignment
    fit = fitting(form, device)

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        # Contiguous once more: of images of one pixel torch cannot tell in which format they are.
        return torch.nn.functional.pad(fit(tensor), (0, columns)).contiguous()

    return None, widened if columns else fit, operand.alignment


def _encoder(kernel: Any, spec: TensorMapSpec) -> Callable[[int], bytes]:
    """What gives the bytes of a tensor map for an address."""
    from gemmconv.runtime import tensor_map

    described = spec.itemsize, spec.sizes, spec.strides, spec.box, spec.steps, spec.swizzled, spec.fetched

    @lru_cache(maxsize=_KEPT_MAPS)
    def encoded(address: int) -> bytes:
        kernel.make_current()
        return bytes(tensor_map.encode(address, *described))

    return encoded


def _layout(
    fields: Iterable[Field],
) -> tuple[Callable[[bytes], ctypes.Array[ctypes.c_char]], Callable[..., bytes], list[Any]]:
    """How a params struct is made of its bytes, how these are packed as C lays them out, and of which slots.

    A slot is a name, a tensor map, or the bytes of constants beside each other: of a weight in either format.
    """
    codes, size, largest = "<", 0, 1
    slots: list[str | TensorMapSpec | tuple[bytes, bytes]] = []
    constants = b"", b""
    for value in fields:
        code, alignment = _C_TYPES.get(type(value), ("i", 4))
        padding, largest = -size % alignment, max(largest, alignment)
        size += padding + struct.calcsize(f"<{code}")
        constants = constants[0] + bytes(padding), constants[1] + bytes(padding)
        if isinstance(value, str | TensorMapSpec):
            if constants[0]:
                codes += f"{len(constants[0])}s"
                slots.append(constants)
                constants = b"", b""
            codes += code
            slots.append(value)
        else:
            one = value if isinstance(value, ByFormat) else ByFormat(value or 0, value or 0)
            numbers = struct.pack(f"<{code}", one.contiguous), struct.pack(f"<{code}", one.channels_last)
            constants = constants[0] + numbers[0], constants[1] + numbers[1]
    end = bytes(-size % largest)
    slots.append((constants[0] + end, constants[1] + end))
    layout = struct.Struct(f"{codes}{len(constants[0] + end)}s")
    return (ctypes.c_char * layout.size).from_buffer_copy, layout.pack, slots
