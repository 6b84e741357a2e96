"""A pass as plain data: a :class:`Program`.

A program lists its operands with their formats, its outputs, regions of scratch memory, and its steps: kernel launches,
matrix products, memory that is cleared. It may be pickled: it holds no tensor, no kernel and no function.
:mod:`gemmconv.kernels.bind` runs it. As text, ``gemm_col2im`` for ``[8, 64, 32, 32]`` by ``[64, 32, 4, 4]``, float16,
stride 2, padding 1, is:

    (input, weight, bias) -> output, by way of columns (16777216 bytes)
      cuBLAS, 8 products of 1024 x 512 x 64
      columns/col2im.cu, 4x256x1 blocks of 256x1x1 threads

Columns of 16-bit tensors are float32. `pytest tests/test_program.py` needs no GPU.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gemmconv.geometry import Problem, Shape4
from gemmconv.kernels.base import Config, Pass, strides_of
from gemmconv.kernels.macros import Macros

Extent3 = tuple[int, int, int]
Strides = tuple[int, ...]

MAX_GRID_Y = 65_535  # blocks of a grid along y, and along z


class Long(int):
    """A constant in a kernel's params that is 64 bits wide in C."""


@dataclass(frozen=True)
class ByFormat:
    """A constant in a kernel's params that depends on the weight's memory format, known when a call is bound."""

    contiguous: int
    channels_last: int


@dataclass(frozen=True)
class At:
    """A place in memory: ``offset`` bytes behind the beginning of an operand, an output or a scratch region."""

    tensor: str
    offset: int = 0


@dataclass(frozen=True)
class TensorMapSpec:
    """A tensor map for TMA: all fields but ``tensor`` are arguments of :func:`gemmconv.runtime.tensor_map.encode`."""

    tensor: str  # the name of an operand, an output or a scratch region
    itemsize: int  # bytes of an element
    sizes: Shape4  # elements of each dimension, the innermost first
    strides: Extent3  # bytes from one element to the next, of all dimensions but the innermost
    box: Shape4  # elements of a box in each dimension
    steps: Shape4 = (1, 1, 1, 1)  # in each dimension, from one element of a box to the next
    swizzled: bool = True  # whether boxes are swizzled in shared memory; see csrc/include/ptx/wgmma.cuh.
    fetched: int = 256  # bytes that the L2 cache fetches together


# A pointer to an operand, an output or a region, a null pointer, a tensor map, or a constant.
ParamValue = str | At | None | TensorMapSpec | int | ByFormat
Params = Mapping[str, ParamValue | tuple[ParamValue, ...]]
# By the type of a field: its format in ``struct``, bytes, alignment. Pointers and tensor maps are placeholders: zeros
# ("8x" is eight bytes of padding), which are filled when a call has its tensors.
_INT, _POINTER = ("i", 4, 4), ("8x", 8, 8)
_C_TYPES = {At: _POINTER, type(None): _POINTER, TensorMapSpec: ("128x", 128, 64), Long: ("Q", 8, 8)}


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    ``params`` has the fields of the kernel's params struct, in order. A key names a field, several or an array; C types
    follow from the values. A test compares names and order with the struct in the source. An example, with its bytes:

        params                                  fields in C                        bytes
        "input, output": ("input", "output")    const float* input; float* output; 0-15   two names of memory
        "bias": None                            const float* bias;                 16-23  a null pointer
        "height, width": (32, 48)               int height, width;                 24-31
        "by_width": Long(5)                     unsigned long long by_width;       32-39
        "offset[3]": (0, 48, 96)                int offset[3];                     40-51, and four bytes of padding
    """

    source: str  # the kernel's file under csrc/
    macros: Macros  # macros that specialise it
    grid: Extent3  # blocks
    block: Extent3  # threads of a block
    params: Params
    shared_bytes: int = 0  # bytes of dynamic shared memory
    # whether it may begin before the previous launch ends (PDL): see gemmconv/runtime/launch.py.
    overlaps: bool = False

    @property
    def fields(self) -> Iterator[At | TensorMapSpec | int | ByFormat | None]:
        """The values of the params struct, in order."""
        for names, value in self.params.items():
            values = value if isinstance(value, tuple) else (value,)
            count = int(names[names.index("[") + 1 : -1]) if names[-1] == "]" else names.count(",") + 1
            assert len(values) == count, f"{self.source}: values of {names}, got {values}"
            yield from (At(one) if isinstance(one, str) else one for one in values)

    @property
    def tensors(self) -> Iterator[str]:
        """The names of all memory that it may read or write."""
        return (value.tensor for value in self.fields if isinstance(value, At | TensorMapSpec))

    def laid_out(self, channels_last: bool) -> tuple[bytes, list[tuple[int, At | TensorMapSpec]]]:
        """The params struct in C's layout, for this format of the weight: bytes, and placeholders with offsets."""
        struct_format, values, placeholders = "<", list[int](), list[tuple[int, At | TensorMapSpec]]()
        end, largest = 0, 1
        for value in self.fields:
            field_format, size, alignment = _C_TYPES.get(type(value), _INT)
            padding = -end % alignment
            struct_format += f"{padding}x{field_format}" if padding else field_format
            end += padding + size
            largest = max(largest, alignment)
            if isinstance(value, int):
                values.append(value)
            elif isinstance(value, ByFormat):
                values.append(value.channels_last if channels_last else value.contiguous)
            elif value is not None:
                placeholders.append((end - size, value))
        return struct.pack(f"{struct_format}{-end % largest}x", *values), placeholders

    def renamed(self, names: Mapping[str, str]) -> Launch:
        """This launch with tensors and regions renamed."""

        def new(value: ParamValue) -> ParamValue:
            if isinstance(value, At | TensorMapSpec):
                return replace(value, tensor=names.get(value.tensor, value.tensor))
            return names.get(value, value) if isinstance(value, str) else value

        of = {key: tuple(map(new, v)) if isinstance(v, tuple) else new(v) for key, v in self.params.items()}
        return replace(self, params=of)

    def __str__(self) -> str:
        grid, block = ("x".join(map(str, extents)) for extents in (self.grid, self.block))
        more = f", {self.shared_bytes} bytes of shared memory" * (self.shared_bytes > 0)
        return f"{self.source}, {grid} blocks of {block} threads{more}{', overlapping' * self.overlaps}"


@dataclass(frozen=True)
class Matrices:
    """Column-major matrices of one product."""

    at: At
    dtype: torch.dtype
    leading: int  # elements from one column to the next
    stride: int  # elements from one matrix of the batch to the next


@dataclass(frozen=True)
class Gemm:
    """A strided-batched product by cuBLAS, C = op(A) op(B) + beta C, in column-major terms.

    It accumulates in float32 (float64 for float64 operands), and multiplies in TF32 only if ``tf32`` is set.
    """

    extents: Extent3  # m, n and k: C is ``m x n``, and the reduced extent is ``k``
    operands: tuple[Matrices, Matrices, Matrices]  # A, B and C
    batch: int  # number of products
    transposed: tuple[bool, bool]  # whether op transposes A, and whether it transposes B
    tf32: bool  # whether float32 operands are rounded to TF32
    accumulates: bool = False  # whether beta is 1, not 0

    @property
    def tensors(self) -> Iterator[str]:
        return (one.at.tensor for one in self.operands)

    def renamed(self, names: Mapping[str, str]) -> Gemm:
        a, b, c = (replace(x, at=replace(x.at, tensor=names.get(x.at.tensor, x.at.tensor))) for x in self.operands)
        return replace(self, operands=(a, b, c))

    def __str__(self) -> str:
        m, n, k = self.extents
        return f"cuBLAS, {self.batch} products of {m} x {n} x {k}{', rounded to TF32' * self.tf32}"


@dataclass(frozen=True)
class Zero:
    """Memory that is cleared."""

    tensor: str
    size: int

    @property
    def tensors(self) -> Iterator[str]:
        return iter((self.tensor,))

    def renamed(self, names: Mapping[str, str]) -> Zero:
        return replace(self, tensor=names.get(self.tensor, self.tensor))

    def __str__(self) -> str:
        return f"{self.size} bytes of {self.tensor} cleared"


Step = Launch | Gemm | Zero


@dataclass(frozen=True)
class Operand:
    """A tensor that a call takes, and the form that steps need.

    gemmconv/kernels/forms.py acts on the fields: it transposes, copies or pads a tensor of another form first.
    """

    name: str  # its name in params
    # the memory format in which it must be contiguous; None for a weight, which may have either
    form: torch.memory_format | None
    alignment: int = 1  # bytes; its address must be a multiple of them
    row_padding: int = 0  # zeros behind each of its rows, in elements
    argument: str = ""  # the name of the call's argument, if it is not ``name``

    @property
    def given_as(self) -> str:
        """The name of the argument."""
        return self.argument or self.name


@dataclass(frozen=True)
class Output:
    """A tensor that a call returns."""

    name: str  # its name in params
    shape: tuple[int, ...]  # shape of the returned tensor
    strides: Strides  # strides of the returned tensor
    # the memory format in which launches write it, if that can differ; it is then transposed
    written: torch.memory_format | None = None
    dtype: torch.dtype | None = None  # dtype of the returned tensor, if it is not the program's


@dataclass(frozen=True)
class Program:
    """A pass as plain data."""

    dtype: torch.dtype  # element type of operands and outputs; weights and biases of another are cast to it
    operands: tuple[Operand, ...]  # the arguments in order; the one named bias may be None
    outputs: tuple[Output, ...]  # the results in order
    steps: tuple[Step, ...]  # launches, products and clears in order
    # bytes of regions of scratch memory, by name; they are not initialised
    scratch: Mapping[str, int] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the tensors that a call takes, in order."""
        return tuple(dict.fromkeys(operand.given_as for operand in self.operands))

    def prepare(self, device: torch.device) -> Callable[..., Any]:
        """Load the kernels; return a function of the operands, with any strides, that returns the output or a tuple."""
        from gemmconv.kernels.bind import LoadedProgram

        return LoadedProgram(self, device)

    def bound(self, device: torch.device, tensors: Sequence[torch.Tensor | None]) -> Callable[..., Any]:
        """Prepare a call for operands with exactly the strides of ``tensors``."""
        from gemmconv.kernels.bind import bound

        return bound(self, device, tensors)

    def __str__(self) -> str:
        regions = ", ".join(f"{name} ({size} bytes)" for name, size in self.scratch.items())
        made = ", ".join(output.name for output in self.outputs)
        head = f"({', '.join(self.arguments)}) -> {made}{f', by way of {regions}' * bool(regions)}"
        return "\n".join((head, *(f"  {step}" for step in self.steps)))


def concatenate(earlier: Program, later: Program, arguments: Sequence[str]) -> Program:
    """One program of the steps of both; it returns the outputs of ``later``, then those of ``earlier``.

    Its call takes ``arguments`` in this order. If both programs need one of them in the same form, it is converted
    once. The outputs of both must have different names. (When the program is bound, scratch of ``earlier`` may lie in
    the memory of outputs of ``later``, which are written after it: see ``_laid_out`` in gemmconv/kernels/bind.py.)

    Where both have a name for different memory, that of ``later`` gets a "_2". An example is the weight's and then the
    input's gradient, which calls grad_output "input" (see :func:`gathering`). Both need it in one form:

        operand or scratch     in earlier       in later    in both
        grad_output            "grad_output"    "input"     "grad_output"
        input                  "input"          -           "input"
        weight                 -                "weight"    "weight"
        scratch for columns    "columns"        "columns"   "columns" of earlier, "columns_2" of later
    """
    operands = {(one.given_as, one.form, one.row_padding): one for one in earlier.operands}
    names: dict[str, str] = {}
    for one in later.operands:
        key = one.given_as, one.form, one.row_padding
        if (same := operands.get(key)) is not None:
            names[one.name] = same.name
            operands[key] = replace(same, alignment=max(same.alignment, one.alignment))
        else:
            names[one.name] = f"{one.name}_2" if any(one.name == x.name for x in operands.values()) else one.name
            operands[key] = replace(one, name=names[one.name], argument=one.given_as)
    names |= {name: f"{name}_2" if name in earlier.scratch else name for name in later.scratch}
    ordered = sorted(operands.values(), key=lambda one: arguments.index(one.given_as))
    return Program(
        earlier.dtype,
        tuple(ordered),
        (*later.outputs, *earlier.outputs),
        (*earlier.steps, *(step.renamed(names) for step in later.steps)),
        {**earlier.scratch, **{names[name]: size for name, size in later.scratch.items()}},
    )


def gathering(
    config: Config,
    direction: Pass,
    steps: Iterable[Step],
    scratch: Mapping[str, int] | None = None,
    *,
    weight: Operand | None = None,
    alignment: int = 16,
) -> Program:
    """A program that gathers ``output`` from ``input``: a forward pass, or an input gradient.

    The names are the same for both: for an input gradient ``input`` is grad_output, ``output`` is the gradient, and no
    ``bias`` is added. Without steps, as for an empty batch, the program clears the output.

    Args:
        weight: the form of the weight; None if either format will do.
        alignment: bytes that the input's address must be a multiple of.
    """
    is_forward = direction == "forward"
    output_shape = config.problem.output_shape if is_forward else config.problem.input_shape
    argument = "input" if is_forward else "grad_output"
    input = Operand("input", config.memory_format, alignment, argument=argument)
    bias = (Operand("bias", torch.contiguous_format),) if is_forward else ()
    output = Output("output", output_shape, strides_of(output_shape, config.memory_format))
    operands = input, weight or Operand("weight", None), *bias
    return Program(config.dtype, operands, (output,), tuple(steps) or (clearing(config, output),), scratch or {})


def grad_input_of(config: Config, written: torch.memory_format) -> Output:
    """The output ``grad_input``, in the configuration's format; launches write it in the format ``written``."""
    shape = config.problem.input_shape
    return Output("grad_input", shape, strides_of(shape, config.memory_format), written)


def grad_weight_of(problem: Problem) -> Output:
    """The output ``grad_weight``, contiguous."""
    return Output("grad_weight", problem.weight_shape, strides_of(problem.weight_shape, torch.contiguous_format))


def clearing(config: Config, output: Output) -> Zero:
    """The step that clears an output: its elements are empty sums, or there are none."""
    return Zero(output.name, math.prod(output.shape) * config.dtype.itemsize)


def weight_strides(problem: Problem) -> dict[str, ParamValue]:
    """Strides of a weight in elements, in either format: between output channels of a group, and between taps."""
    return {"weight_channel": ByFormat(problem.taps, 1), "weight_tap": ByFormat(1, problem.group_out_channels)}


def three_axes(values: Sequence[int], missing: int = 1) -> Extent3:
    """Values along depth, height and width; an absent axis has ``missing``."""
    depth, height, width = (*(missing,) * (3 - len(values)), *values)
    return depth, height, width


def plane_grid(x: int, planes: int) -> Extent3:
    """A grid of ``x`` blocks for each of ``planes``, which are spread over y and z."""
    y = min(planes, MAX_GRID_Y)
    return x, y, -(-planes // y)


def reciprocal(divisor: int) -> Long:
    """The factor by which csrc/include/numeric/divide.cuh multiplies to divide by a positive 32-bit integer."""
    return Long(-(-(1 << 63) // divisor))


def small_reciprocal(divisor: int) -> int:
    """The factor of `divided_small` in numeric/divide.cuh: for divisors from 3 on, with dividend * divisor < 2**32.

    For 1 and 2 the factor is no 32-bit int.
    """
    return -(-(1 << 32) // divisor)
