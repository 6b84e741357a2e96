"""The operators' schemas, the checked problem of a call, and fakes: functions that give its results without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from gemmconv import validation
from gemmconv.dispatch import as_plain
from gemmconv.geometry import Pair, Problem
from gemmconv.kernels.base import PASSES, Pass, Precision
from gemmconv.selection import NAMES

_OPTIONS = (
    "SymInt[2] stride=1, SymInt[2] padding=0, SymInt[2] output_padding=0, SymInt groups=1, SymInt[2] dilation=1, "
    "str algorithm='auto', str? precision=None, int? workspace_limit=None"
)
_WINDOW = "SymInt[2] kernel_size, SymInt[2] dilation=1, SymInt[2] padding=0, SymInt[2] stride=1"
_SCHEMAS = {
    "conv_transpose2d": f"(Tensor input, Tensor weight, Tensor? bias=None, {_OPTIONS}) -> Tensor",
    "conv_transpose2d_casting": f"(Tensor input, Tensor weight, Tensor? bias=None, {_OPTIONS}) -> Tensor",
    "conv_transpose2d_input_grad": f"(Tensor grad_output, Tensor weight, SymInt[2] input_size, {_OPTIONS}) -> Tensor",
    "conv_transpose2d_weight_grad": f"(Tensor grad_output, Tensor input, SymInt[2] kernel_size, {_OPTIONS}) -> Tensor",
    "conv_transpose2d_grads": f"(Tensor grad_output, Tensor input, Tensor weight, {_OPTIONS}) -> (Tensor, Tensor)",
    "im2col": f"(Tensor input, {_WINDOW}) -> Tensor",
    "col2im": f"(Tensor columns, SymInt[2] output_size, {_WINDOW}) -> Tensor",
}

Tensors = tuple[Any, ...]  # tensors, the bias perhaps None
Arguments = tuple[Any, ...]  # those after an operator's tensors; the dispatcher leaves trailing defaults out


class Options(NamedTuple):
    """The arguments of every convolution operator after its tensors and sizes."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    output_padding: Pair = (0, 0)
    groups: int = 1
    dilation: Pair = (1, 1)
    algorithm: str = "auto"
    precision: Precision | None = None
    workspace_limit: int | None = None


class Window(NamedTuple):
    """The arguments of im2col and col2im after their tensor and output size."""

    kernel_size: Pair
    dilation: Pair = (1, 1)
    padding: Pair = (0, 0)
    stride: Pair = (1, 1)


def as_hashable(arguments: Arguments) -> list[Any]:
    return [tuple(item) if isinstance(item, list) else item for item in arguments]


# Problems. They are checked once for each prepared call, and at every call of a fake.


def checked_problem(where: str, tensors: Tensors, sizes: Any, arguments: Arguments) -> Problem:
    """The problem of a call of the convolution operator ``where``, after all checks of its arguments.

    ``sizes`` is the height and width of a tensor whose gradient is computed without it, else None. ``arguments`` are
    those that follow, as the dispatcher passes them, or Options.
    """
    options = Options(*as_hashable(arguments))
    validation.choice(where, options.algorithm, NAMES, options.precision, options.workspace_limit)
    validation.in_64_bits(where, zip(Options._fields, options, strict=True))
    named = tuple(zip(ARGUMENT_NAMES[where], tensors, strict=False))
    by_name: Any = dict(named)
    input, weight, grad_output = by_name.get("input"), by_name.get("weight"), by_name.get("grad_output")
    if grad_output is not None:
        validation.dimensions(where, named[:1] if sizes is None else named)
    input_shape = (grad_output.shape[0], weight.shape[0], *sizes) if input is None else input.shape
    if weight is None:
        weight_shape = (input.shape[1], grad_output.shape[1] // max(1, options.groups), *sizes)
    else:
        weight_shape = weight.shape
    problem = validation.problem(where, input_shape, weight_shape, options[:5])
    validation.same_kind(where, named)
    if grad_output is not None:
        validation.shape(where, "grad_output", grad_output.shape, problem.output_shape)
    else:
        validation.bias_shape(where, by_name["bias"], problem.out_channels)
        validation.sizes(where, problem, input.dtype.itemsize)
    return problem


def im2col_problem(input: Tensor, window: Window) -> Problem:
    validation.dimensions("im2col", (("input", input),), len(window.kernel_size))
    validation.same_kind("im2col", (("input", input),))
    size: Any = tuple(input.shape[2:])
    problem = validation.fold_geometry("im2col", "input", size, window, (input.shape[0], input.shape[1]))
    shape = problem.batch, problem.gemm_m, problem.gemm_n
    validation.in_memory("im2col", "padding", shape, input.dtype.itemsize, "leave columns of", "pad less")
    return problem


def col2im_problem(columns: Tensor, output_size: Pair, window: Window) -> Problem:
    validation.same_kind("col2im", (("columns", columns),))
    shape = validation.fold_columns("col2im", columns.shape, window.kernel_size)
    problem = validation.fold_geometry("col2im", "output_size", output_size, window, shape)
    validation.shape("col2im", "columns", columns.shape, (problem.batch, problem.gemm_m, problem.gemm_n))
    itemsize, images = columns.dtype.itemsize, problem.output_shape
    validation.in_memory("col2im", "output_size", images, itemsize, "be of images of", "fold into smaller ones")
    return problem


def memory_format(first: Tensor, second: Tensor) -> torch.memory_format:
    """torch's rule for a convolution's result: channels_last where either tensor is."""
    either = is_channels_last(first) or is_channels_last(second)
    return torch.channels_last if either else torch.contiguous_format


def is_channels_last(tensor: Tensor) -> bool:
    """Whether torch calls a tensor channels_last or channels_last_3d: strides have C innermost, then W, H and N."""
    size, stride = tensor.shape, tensor.stride()
    if stride[1] == 0:
        return False
    least = 0
    for axis in (1, *range(len(size) - 1, 1, -1), 0):
        if size[axis] == 0 or stride[axis] < least:
            return False
        if axis == 0 and least == stride[1]:  # all other extents are 1: torch calls that contiguous
            return False
        least = stride[axis] * max(1, size[axis])
    return True


# Fakes. They make the checks of the implementation, and give the shape, strides and dtype of its result.


class WithoutData(Tensor):
    """Shape, strides, dtype and device of a tensor, by which a call is prepared; the device need not exist."""

    @staticmethod
    def of(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> WithoutData:
        return Tensor._make_wrapper_subclass(WithoutData, shape, strides=strides, dtype=dtype, device=device)

    # With torch functions disabled, attributes are read as fast as a tensor's.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, operator: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(f"{operator} of a tensor without data")


def without_data(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Any:
    """A tensor's shape, strides, device and requires_grad, and its dtype or ``dtype``."""
    if tensor is None:
        return None
    made = WithoutData.of(tensor.shape, tensor.stride(), dtype or tensor.dtype, tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def with_parameter_dtype(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """A forward call's tensors, with weight and bias replaced by tensors without data of this dtype if one is given."""
    return tensors if dtype is None else (tensors[0], *(without_data(one, dtype) for one in tensors[1:]))


def _empty(shape: Sequence[int], like: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format)


def _convolution_fake(direction: Pass, *inputs: Any) -> Any:
    where = operator_name(direction)
    tensors, sizes, arguments = split_arguments(where, inputs)
    problem = checked_problem(where, tensors, sizes, arguments)
    if direction == "weight_grad":
        return _empty(problem.weight_shape, tensors[0])
    first, weight = tensors[0], tensors[2 if direction == "grads" else 1]
    shape = problem.output_shape if direction == "forward" else problem.input_shape
    images = _empty(shape, first, memory_format(first, weight))
    if direction != "grads":
        return images
    return images, _empty(problem.weight_shape, first, memory_format(weight, weight))


def _im2col_fake(input: Tensor, *arguments: Any) -> Tensor:
    problem = im2col_problem(input, Window(*as_hashable(arguments)))
    return _empty((problem.batch, problem.gemm_m, problem.gemm_n), input)


def _col2im_fake(columns: Tensor, output_size: Any, *arguments: Any) -> Tensor:
    problem = col2im_problem(columns, tuple(output_size), Window(*as_hashable(arguments)))
    return _empty(problem.output_shape, columns)


# Registration.

_library = torch.library.Library("gemmconv", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
OPERATORS: dict[str, Any] = {name: getattr(torch.ops.gemmconv, name).default for name in _SCHEMAS}
ARGUMENT_NAMES = {name: [one.name for one in operator._schema.arguments] for name, operator in OPERATORS.items()}
TENSOR_COUNTS = {  # tensors come first among the arguments
    name: sum("Tensor" in str(one.type) for one in operator._schema.arguments) for name, operator in OPERATORS.items()
}
_WITH_SIZES = {name for name, count in TENSOR_COUNTS.items() if ARGUMENT_NAMES[name][count].endswith("_size")}


def operator_name(direction: Pass) -> str:
    return "conv_transpose2d" if direction == "forward" else f"conv_transpose2d_{direction}"


FAKES: dict[str, Callable[..., Any]] = {operator_name(one): partial(_convolution_fake, one) for one in PASSES}
FAKES |= {"im2col": _im2col_fake, "col2im": _col2im_fake}


def split_arguments(where: str, inputs: Arguments) -> tuple[Tensors, Any, Arguments]:
    """The arguments of a convolution operator: tensors, the height and width of the gradient or None, and the others.

    >>> split_arguments("conv_transpose2d", ("input", "weight"))
    (('input', 'weight', None), None, ())
    >>> split_arguments("conv_transpose2d_input_grad", ("grad_output", "weight", [5, 7], [2, 2]))
    (('grad_output', 'weight'), (5, 7), ([2, 2],))
    """
    count = TENSOR_COUNTS[where]
    if len(inputs) < count:
        inputs = *inputs, None  # the bias
    if where in _WITH_SIZES:
        return inputs[:count], tuple(inputs[count]), inputs[count + 1 :]
    return inputs[:count], None, inputs[count:]


def register(name: str, call: Callable[..., Any], key: str) -> None:
    """Register ``call`` for a dispatch key; it gets plain tensors, since a subclass may have methods of its own."""
    _library.impl(name, lambda *inputs: call(*as_plain(inputs)), key)
