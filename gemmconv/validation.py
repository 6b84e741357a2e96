"""The checks of arguments, which raise every error that a user can cause.

A check takes an argument as the user wrote it, and returns it in one form or raises the exception that torch raises for
this mistake; the message names the argument, the rule, the value and a remedy. All checks come before computation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn, cast

import torch

from gemmconv.geometry import Geometry, Pair, Problem, output_extent

PRECISIONS = ("ieee", "tf32")
AXES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}  # by the number of axes
_ON_ALL = {1: "", 2: " on both axes", 3: " on all axes"}
_IMAGES, _KERNELS = {1: "L", 2: "H, W", 3: "D, H, W"}, {1: "K", 2: "K_h, K_w", 3: "K_d, K_h, K_w"}
_COUNTS = ("batch", "in_channels", "out_channels", "groups")  # ints of a problem or a module; its others are tuples
_LIMIT = 1 << 63  # integers, and bytes of a tensor, stay below it
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_FOLDS = {"im2col": "kernel_size", "col2im": "output_size"}  # and the argument that says how many axes there are
_NAMED_PADDINGS = {  # those that torch.nn.Conv2d takes, and a remedy
    "valid": "write padding=0",
    "same": "an output of stride times the input has 2 * padding = dilation * (kernel_size - 1) + 1 + output_padding "
    "- stride",
}


def fail(kind: type[Exception], where: str, argument: str, rule: str, got: object, remedy: str = "") -> NoReturn:
    """Raise ``kind``: ``<where>: <argument> must <rule>, got <got>; <remedy>``."""
    raise kind(f"{where}: {argument} must {rule}, got {got}" + (f"; {remedy}" if remedy else ""))


def extents(where: str, argument: str, value: int | Sequence[int], rank: int = 2) -> Any:
    """An int for all axes, or a sequence with one int for all or one for each, as a tuple with an int for each axis.

    NumPy's ints and tensors of one int count too. Raises TypeError for a value that is no int, and RuntimeError for a
    sequence of another length.
    """
    if type(value) is int:
        return (value,) * rank
    if type(value) is tuple and len(value) == rank and all(type(item) is int for item in value):
        return value
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else (value,)
    items = [_integer(item) for item in values]
    if any(item is None for item in items):
        rule = {1: "be an int", 2: "be an int or a pair of ints", 3: "be an int or three ints"}[rank]
        if argument == "padding" and isinstance(value, str) and value in _NAMED_PADDINGS and where not in _FOLDS:
            rule += f", since a transposed convolution has no padding={value!r}"
            fail(TypeError, where, argument, rule, repr(value), _NAMED_PADDINGS[value])
        fail(TypeError, where, argument, rule, repr(value))
    if where in _FOLDS and isinstance(value, Sequence) and len(items) != rank:  # torch's refuse one for all, too
        remedy = f"for another number of axes give {_FOLDS[where]} an element for each"
        fail(RuntimeError, where, argument, f"be an int or ({', '.join(AXES[rank])})", repr(value), remedy)
    if len(items) not in (1, rank):
        rule = {1: "have one element", 2: "have one or two elements", 3: "have one or three elements"}[rank]
        fail(RuntimeError, where, argument, rule, repr(value), f"give ({', '.join(AXES[rank])})")
    return tuple(items) if len(items) == rank else (items[0],) * rank


def geometry(
    where: str, stride: Any, padding: Any, output_padding: Any, groups: int, dilation: Any, *, rank: int = 2
) -> tuple[Any, ...]:
    """The arguments of torch's operator after its tensors in one form; raises as :func:`extents` does."""
    return (
        extents(where, "stride", stride, rank),
        extents(where, "padding", padding, rank),
        extents(where, "output_padding", output_padding, rank),
        integer(where, "groups", groups),
        extents(where, "dilation", dilation, rank),
    )


def integer(where: str, argument: str, value: int) -> int:
    """``value`` as an int; raises TypeError if it is none."""
    if (found := _integer(value)) is None:
        fail(TypeError, where, argument, "be an int", repr(value))
    return found


def _integer(value: Any) -> int | None:
    """An int, also from NumPy's ints and tensors of one int; None for any other value."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, torch.SymInt)):
        return value  # type: ignore[return-value]
    try:
        return operator.index(value)
    except TypeError:
        return None


def in_64_bits(where: str, arguments: Iterable[tuple[str, Any]]) -> None:
    """Raise TypeError if an argument is or contains an int beyond 64 bits; symbolic ints are not checked."""
    for argument, value in arguments:
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, int) and not -_LIMIT <= item < _LIMIT:
                fail(TypeError, where, argument, "fit 64 bits", value)


def in_memory(where: str, argument: str, shape: Sequence[int], itemsize: int, rule: str, remedy: str) -> None:
    """Raise RuntimeError if 64 bits cannot count a tensor's bytes; symbolic sizes are not checked."""
    if all(isinstance(extent, int) for extent in shape) and math.prod(shape) * itemsize >= _LIMIT:
        fail(RuntimeError, where, argument, f"{rule} less than 2**63 bytes", f"shape {list(shape)}", remedy)


def model(where: str, value: object) -> None:
    """Raise TypeError if a value is no torch.nn.Module."""
    if not isinstance(value, torch.nn.Module):
        fail(TypeError, where, "model", "be a torch.nn.Module", type(value).__name__)


def tensor(where: str, argument: str, value: object) -> None:
    """Raise TypeError if a value is no tensor, or NotImplementedError if it is sparse."""
    if not isinstance(value, torch.Tensor):
        fail(TypeError, where, argument, "be a torch.Tensor", type(value).__name__)
    if value.layout != torch.strided and value.layout in _SPARSE:
        remedy = f"use {argument}.to_dense()"
        fail(NotImplementedError, where, argument, "be dense", short_name(value.layout), remedy)


def choice(where: str, algorithm: str, algorithms: Sequence[str], precision: str | None, limit: int | None) -> None:
    """Raise ValueError for an unknown algorithm or precision, or a limit below 1 byte; TypeError if it is no int."""
    if algorithm != "auto" and algorithm not in algorithms:
        fail(ValueError, where, "algorithm", f"be one of auto, {', '.join(algorithms)}", repr(algorithm))
    if precision is not None and precision not in PRECISIONS:
        fail(ValueError, where, "precision", f"be None or one of {', '.join(PRECISIONS)}", repr(precision))
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        fail(TypeError, where, "workspace_limit", "be None or an int, in bytes", repr(limit))
    if limit is not None and not 1 <= limit < _LIMIT:
        rule = "be at least 1 byte" if limit < 1 else "be less than 2**63 bytes"
        fail(ValueError, where, "workspace_limit", rule, limit, "leave it None for 64 MiB")


def floating(where: str, argument: str, dtype: object, remedy: str = "") -> None:
    """Raise TypeError if ``dtype`` is no torch.dtype, or NotImplementedError if it is one of integers or bools."""
    if not isinstance(dtype, torch.dtype):
        fail(TypeError, where, argument, "be a torch.dtype", repr(dtype))
    if not (dtype.is_floating_point or dtype.is_complex):
        fail(NotImplementedError, where, argument, "be floating-point", short_name(dtype), remedy)


def same_kind(
    where: str,
    tensors: Sequence[tuple[str, torch.Tensor | None]],
    dtype_of: Callable[[torch.Tensor], torch.dtype] = operator.attrgetter("dtype"),
) -> None:
    """Raise RuntimeError for mixed dtypes or devices, or NotImplementedError if the first tensor has integers or bools.

    ``dtype_of`` gives the dtype that counts, such as the one that autocast makes of a tensor's.
    """
    (first_name, first), *rest = tensors
    assert first is not None
    floating(where, first_name, first.dtype, f"use {first_name}.float()")
    for name, other in rest:
        if other is None:
            continue
        if other.device != first.device:
            rule = f"be on the device of {first_name}, {first.device}"
            fail(RuntimeError, where, name, rule, str(other.device), f"use {name}.to({str(first.device)!r})")
        if dtype_of(other) != dtype_of(first):
            rule = f"have the dtype of {first_name}, {short_name(first.dtype)}"
            fail(RuntimeError, where, name, rule, short_name(other.dtype), "convert one of them, or use torch.autocast")


def parameters(where: str, given: Geometry, kernel_size: Pair) -> None:
    """Raise RuntimeError if a value of the geometry is outside its range, whatever the input."""
    stride, padding, output_padding, groups, dilation = given
    for name, values, least in (
        ("kernel_size", kernel_size, 1),
        ("stride", stride, 1),
        ("dilation", dilation, 1),
        ("padding", padding, 0),
        ("output_padding", output_padding, 0),
    ):
        if _any_below(least, values):
            fail(RuntimeError, where, name, f"be at least {least}{_ON_ALL[len(stride)]}", tuple(values))
    if groups < 1:
        fail(RuntimeError, where, "groups", "be at least 1", groups)
    for axis, label in enumerate(AXES[len(stride)]):
        most = max(stride[axis], dilation[axis])
        if output_padding[axis] >= most:
            rule = f"be less than the larger of stride and dilation, {most} on the {label} axis"
            remedy = "pad the output afterwards instead"
            fail(RuntimeError, where, "output_padding", rule, tuple(output_padding), remedy)


def problem(where: str, input_shape: Sequence[int], weight_shape: Sequence[int], given: Geometry) -> Problem:
    """The problem of a call; raises RuntimeError if ranks, channels, groups, values or sizes do not fit together."""
    stride, padding, output_padding, groups, dilation = given
    rank = len(stride)
    if len(input_shape) != 2 + rank:
        rule = f"have shape [N, C_in, {_IMAGES[rank]}] or [C_in, {_IMAGES[rank]}]"
        fail(RuntimeError, where, "input", rule, list(input_shape), "use unsqueeze or reshape")
    if len(weight_shape) != 2 + rank:
        rule = f"have shape [C_in, C_out/groups, {_KERNELS[rank]}]"
        fail(RuntimeError, where, "weight", rule, list(weight_shape))
    kernel_size: Any = tuple(weight_shape[2:])
    if _any_below(1, weight_shape):
        rule = "have at least one input channel, output channel and tap"
        fail(RuntimeError, where, "weight", rule, f"shape {list(weight_shape)}")
    parameters(where, given, kernel_size)
    in_channels = weight_shape[0]
    if in_channels % groups:
        rule = f"have a number of input channels that groups={groups} divides"
        fail(RuntimeError, where, "weight", rule, f"{in_channels} in shape {list(weight_shape)}")
    if input_shape[1] != in_channels:
        rule = f"have the {in_channels} channels of weight {list(weight_shape)}"
        fail(RuntimeError, where, "input", rule, f"{input_shape[1]} in shape {list(input_shape)}")
    if _any_below(1, input_shape[2:]):
        rule = f"have a {' and a '.join(AXES[rank])} of at least 1"
        fail(RuntimeError, where, "input", rule, list(input_shape))
    size: Any = tuple(input_shape[2:])
    window = kernel_size, stride, padding, output_padding, dilation
    result = Problem(input_shape[0], in_channels, weight_shape[1] * groups, groups, size, *window)
    if _any_below(1, result.output_size):
        least, of_input, left = ("x".join(map(str, of)) for of in ((1,) * rank, size, result.output_size))
        rule = f"leave an output of at least {least} for an input of {of_input}"
        got = f"{tuple(padding)}, an output of {left}"
        fail(RuntimeError, where, "padding", rule, got, "use less padding or a larger input")
    return result


def made_problem(where: str, made: Problem, dtype: torch.dtype) -> Problem:
    """A user's Problem with ints and pairs in one form, after the checks that a call on tensors of this dtype makes."""
    floating(where, "dtype", dtype)
    if not isinstance(made, Problem):
        fail(TypeError, where, "problem", "be a gemmconv.Problem", type(made).__name__)
    values: dict[str, Any] = {
        field.name: (integer if field.name in _COUNTS else extents)(where, field.name, getattr(made, field.name))
        for field in fields(Problem)
    }
    in_64_bits(where, values.items())
    made = Problem(**values)
    parameters(where, made.geometry, made.kernel_size)
    if made.batch < 0:
        fail(RuntimeError, where, "batch", "be at least 0", made.batch)
    for name, channels in (("in_channels", made.in_channels), ("out_channels", made.out_channels)):
        if channels % made.groups:
            fail(RuntimeError, where, name, f"be divisible by groups={made.groups}", channels)
    problem(where, made.input_shape, made.weight_shape, made.geometry)
    sizes(where, made, dtype.itemsize)
    return made


def sizes(where: str, made: Problem, itemsize: int) -> None:
    """Raise RuntimeError if 64 bits cannot count the bytes of a tensor of a problem."""
    for name, shape in (("input", made.input_shape), ("weight", made.weight_shape)):
        in_memory(where, name, shape, itemsize, "have", "use fewer channels or smaller images")
    remedy = f"use a smaller stride or dilation than {made.stride} and {made.dilation}"
    in_memory(where, "stride and dilation", made.output_shape, itemsize, "leave an output of", remedy)


def bias_shape(where: str, bias: torch.Tensor | None, out_channels: int) -> None:
    """Raise RuntimeError if a bias is not ``[C_out]``."""
    if bias is not None and tuple(bias.shape) != (out_channels,):
        fail(RuntimeError, where, "bias", f"have shape [C_out] = [{out_channels}]", list(bias.shape))


def dimensions(where: str, tensors: Sequence[tuple[str, torch.Tensor]], rank: int = 2) -> None:
    """Raise RuntimeError if a tensor is no batch of signals, images or volumes, which have one, two and three axes."""
    for name, value in tensors:
        if value.dim() != 2 + rank and where in _FOLDS:
            rule = f"have shape [N, C, {_IMAGES[rank]}] or [C, {_IMAGES[rank]}]"
            remedy = f"for another number of axes give {_FOLDS[where]} an element for each"
            fail(RuntimeError, where, name, rule, list(value.shape), remedy)
        if value.dim() != 2 + rank:
            fail(RuntimeError, where, name, f"have {2 + rank} dimensions", list(value.shape))


def shape(where: str, argument: str, actual: Sequence[int], expected: Sequence[int]) -> None:
    """Raise RuntimeError if a tensor's shape is not the expected one."""
    if tuple(actual) != tuple(expected):
        fail(RuntimeError, where, argument, f"have shape {list(expected)}", list(actual))


def fold_rank(where: str, value: Any, otherwise: int) -> int:
    """How many axes im2col's kernel_size or col2im's output_size asks for, 1 to 3; ``otherwise`` if it is an int."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return otherwise
    if len(value) not in AXES:
        remedy = "give (length,), (height, width) or (depth, height, width)"
        fail(RuntimeError, where, _FOLDS[where], "have one, two or three elements", repr(value), remedy)
    return len(value)


def fold_geometry(
    where: str, argument: str, output_size: Pair, window: Sequence[Pair], shape: tuple[int, int]
) -> Problem:
    """The problem whose columns col2im folds into signals, images or volumes of this size; ``shape`` is ``(N, C)``.

    Raises RuntimeError for a value outside its range, or a window larger than the padded image.
    """
    kernel_size, dilation, padding, stride = window
    axes, no_more = range(len(kernel_size)), cast(Pair, (0,) * len(kernel_size))
    parameters(where, (stride, padding, no_more, 1, dilation), kernel_size)
    if shape[1] < 1:
        fail(RuntimeError, where, "the number of channels", "be at least 1", shape[1])
    reaches = [output_size[a] + 2 * padding[a] - dilation[a] * (kernel_size[a] - 1) - 1 for a in axes]
    if _any_below(0, reaches) or _any_below(1, output_size):
        rule = f"be at least the window of kernel_size={kernel_size}, dilation={dilation}, less 2 * padding={padding}"
        fail(RuntimeError, where, argument, rule, tuple(output_size))
    size: Any = tuple([reaches[a] // stride[a] + 1 for a in axes])
    output_padding: Any = tuple([reaches[a] % stride[a] for a in axes])
    return Problem(shape[0], 1, shape[1], 1, size, kernel_size, stride, padding, output_padding, dilation)


def fold_columns(where: str, columns_shape: Sequence[int], kernel_size: Pair) -> tuple[int, int]:
    """``(N, C)`` of columns ``[N, C*K_h*K_w, L]``; raises RuntimeError if the kernel's size does not divide them so."""
    taps, named = math.prod(kernel_size), _KERNELS[len(kernel_size)].replace(", ", "*")
    if len(columns_shape) != 3:
        rule = f"have shape [N, C*{named}, L] or [C*{named}, L]"
        fail(RuntimeError, where, "columns", rule, list(columns_shape))
    if _any_below(1, kernel_size):
        fail(RuntimeError, where, "kernel_size", f"be at least 1{_ON_ALL[len(kernel_size)]}", kernel_size)
    if columns_shape[1] % taps:
        rule = f"have a second extent that {named} = {taps} divides"
        fail(RuntimeError, where, "columns", rule, list(columns_shape))
    return columns_shape[0], columns_shape[1] // taps


def module(
    where: str, rank: int, values: Mapping[str, Any], bias: Any, padding_mode: str, device: Any, dtype: Any
) -> dict[str, Any]:
    """A module's numbers and sizes as ints and tuples, checked before any parameter is allocated.

    All arguments are as torch.nn.ConvTranspose2d takes them; ``values`` has those of its numbers and sizes by name.
    """
    made: dict[str, Any] = {
        name: integer(where, name, value) if name in _COUNTS else extents(where, name, _unpacked(value), rank)
        for name, value in values.items()
    }
    groups, kernel_size = made["groups"], made["kernel_size"]
    if groups < 1:
        fail(ValueError, where, "groups", "be at least 1", groups)
    for name in ("in_channels", "out_channels"):
        if made[name] < 0:
            fail(RuntimeError, where, name, "be at least 0", made[name])
        if made[name] % groups:
            fail(ValueError, where, name, f"be divisible by groups={groups}", made[name])
    if padding_mode != "zeros":
        fail(ValueError, where, "padding_mode", 'be "zeros", the only one there is', repr(padding_mode))
    in_64_bits(where, made.items())
    if _any_below(0, kernel_size):
        fail(RuntimeError, where, "kernel_size", f"be at least 0{_ON_ALL[rank]}", kernel_size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    floating(where, "dtype", dtype)
    weight_shape = (made["in_channels"], made["out_channels"] // groups, *kernel_size)
    in_memory(where, "the weight", weight_shape, dtype.itemsize, "have", "use fewer channels or a smaller kernel_size")
    if device is not None:
        place(where, device)
    try:
        bool(bias)
    except (RuntimeError, ValueError) as error:  # a tensor or an array of several elements
        fail(type(error), where, "bias", "be True or False", type(bias).__name__)
    return made


def _unpacked(value: Any) -> Any:
    """An iterable as a tuple, which torch's modules accept; any other value unchanged."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable) or _integer(value) is not None:
        return value
    return tuple(value)


def place(where: str, device: Any) -> torch.device:
    """A torch.device; raises TypeError or RuntimeError if torch accepts no such device."""
    try:
        return torch.device(device)
    except (TypeError, RuntimeError) as error:
        fail(type(error), where, "device", "be a torch.device, a name such as cuda:0, or an index", repr(device))


def output_padding_for(
    where: str, output_size: Sequence[int], input_shape: Sequence[int], window: Sequence[Pair]
) -> tuple[int, ...]:
    """The output_padding with which an input ``[N, C_in, H, W]`` or ``[C_in, H, W]`` gives an output of a size.

    ``output_size`` is ``[H_out, W_out]``, or the output's whole shape, whose other extents are ignored. ``window`` is
    kernel_size, stride, padding and dilation. Raises ValueError for a size that no output_padding below the stride
    gives.
    """
    kernel_size, stride, padding, dilation = window
    rank = len(stride)
    before = len(input_shape) - rank
    if isinstance(output_size, int):
        names = ", ".join(f"{name}_out" for name in _IMAGES[rank].split(", "))
        fail(TypeError, where, "output_size", f"be ({names})", output_size)
    if len(output_size) not in (rank, rank + before):
        rule = f"have {rank} or {rank + before} elements for a {len(input_shape)}-D input"
        fail(ValueError, where, "output_size", rule, output_size)
    result = []
    for a, label in enumerate(AXES[rank]):
        least = output_extent(input_shape[before + a], kernel_size[a], stride[a], padding[a], 0, dilation[a])
        size, most = output_size[len(output_size) - rank + a], least + stride[a] - 1
        if size < least or size > most:
            rule = f"be from {least} to {most} on the {label} axis for an input of shape {list(input_shape)}"
            fail(ValueError, where, "output_size", rule, output_size)
        result.append(size - least)
    return tuple(result)


def _any_below(least: int, values: Sequence[int]) -> bool:
    """Whether any value is less. Unlike ``min``, it adds no guard on sizes of a compiled graph that depend on data."""
    return any(_is_known(value < least) for value in values)


def _is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition holds; False if it depends on data in a compiled graph."""
    if not isinstance(condition, torch.SymBool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))


def short_name(value: torch.dtype | torch.layout) -> str:
    """A dtype's or a layout's name, such as ``float32``."""
    return str(value).removeprefix("torch.")
