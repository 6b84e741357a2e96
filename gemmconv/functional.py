"""The functional interface: torch.nn.functional's names, order and defaults. Other ranks are in gemmconv/rank.py.

All tensors of a call may be arrays of one library that speaks DLPack, such as NumPy or CuPy; then so is the result.
For tensor subclasses gemmconv/arrays.py follows the protocol of torch's own functions, torch.overrides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gemmconv import arrays, ops, validation
from gemmconv.algorithms import fold
from gemmconv.dispatch import is_exporting, is_exporting_to_onnx, tensors_need_torch, transforms_need_torch
from gemmconv.kernels.base import Precision, why_no_kernels
from gemmconv.ops import call_cache, plain, signatures
from gemmconv.ops import compiled as compiled  # registers the operators' lowerings for torch.compile
from gemmconv.ops.schemas import Window, col2im_problem, im2col_problem
from gemmconv.selection import NAMES, rounds_as_asked

IntOrPair = int | Sequence[int]
# A compiled or traced call on a CPU is ours if a layer has at least this many input channels for each output channel:
# oneDNN, torch's library, vectorises over output channels, of which there are few. benchmarks/results/cpu has the rows.
_INPUTS_OF_AN_OUTPUT = 24


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrPair = 1,
    padding: IntOrPair = 0,
    output_padding: IntOrPair = 0,
    groups: int = 1,
    dilation: IntOrPair = 1,
    *,
    algorithm: str = "auto",
    precision: Precision | None = None,
    workspace_limit: int | None = None,
) -> Tensor:
    """Transposed 2-D convolution, as torch.nn.functional.conv_transpose2d defines it.

    On each axis, the product of input i and tap k is added to output ``i * stride - padding + k * dilation``. The bias
    is added to every output. The size is
    ``H_out = (H_in - 1) * stride - 2 * padding + dilation * (K_h - 1) + output_padding + 1``.

    Args:
        input: ``[N, C_in, H_in, W_in]``, or ``[C_in, H_in, W_in]``; floating-point or complex; any strides.
        weight: ``[C_in, C_out/groups, K_h, K_w]``, same dtype and device.
        bias: ``[C_out]`` or None.
        stride, padding, output_padding, dilation: an int or ``(height, width)``, in elements.
        groups: number of groups into which channels are divided.
        algorithm: ``"auto"``, ``"direct"``, ``"fused"``, ``"gemm_col2im"`` or ``"native"``.
        precision: for float32 on CUDA, ``"ieee"`` or ``"tf32"``; None follows torch's setting for convolutions.
        workspace_limit: bytes that columns and partial sums may take; a call that needs more warns. None for 64 MiB.

    Returns:
        ``[N, C_out, H_out, W_out]`` (or without N), channels_last where the input or the weight is.

    Raises:
        TypeError: an argument of the wrong type.
        RuntimeError: shapes, dtypes, devices or values that do not fit together; an input or output image without
            pixels, some of which torch accepts.
        ValueError: an unknown algorithm or precision, or a workspace_limit below 1.
        NotImplementedError: an integer dtype, or an algorithm that cannot serve the call.

    >>> conv_transpose2d(torch.ones(1, 4, 8, 8), torch.ones(4, 2, 3, 3), stride=2, padding=1, output_padding=1).shape
    torch.Size([1, 2, 16, 16])
    """
    where, options = "conv_transpose2d", (algorithm, precision, workspace_limit)
    given = stride, padding, output_padding, groups, dilation, *options
    key = None
    # A repeated call: one of the same signature was prepared, and checked, before. ``key`` is the call's signature, of
    # which ``given_key`` is the arguments' part. It is None for a call that is not cached: signatures.py says which.
    if not torch.compiler.is_dynamo_compiling() and (given_key := call_cache.arguments_key(given)) is not None:
        call, key = signatures.find_call(input, weight, bias, given_key)
        if call is not None:
            return call(input, weight, bias)
    # Arrays of other libraries: this function again, on tensors that share their memory.
    if key is None and arrays.are_foreign(input, weight, bias):
        named: Any = {"algorithm": algorithm, "precision": precision, "workspace_limit": workspace_limit}
        return arrays.call(conv_transpose2d, (input, weight, bias), *given[:5], **named)
    # Types and values. Whether shapes fit together is checked later, by the operator or when a call is prepared.
    validation.tensor(where, "input", input)
    validation.tensor(where, "weight", weight)
    if bias is not None:
        validation.tensor(where, "bias", bias)
    validation.choice(where, algorithm, NAMES, precision, workspace_limit)
    if input.is_mkldnn and algorithm not in ("auto", "native"):
        rule = f"be a dense tensor with algorithm={algorithm!r}"
        validation.fail(NotImplementedError, where, "input", rule, "one of mkldnn", "use input.to_dense()")
    geometry = validation.geometry(where, stride, padding, output_padding, groups, dilation)
    arguments = *geometry, *options
    is_eager = (
        type(input) in (Tensor, Parameter)  # no other subclass
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None  # under torch.jit.trace sizes are tensors
    )
    # The cases are tried in this order; the first whose condition holds computes the call. 1 to 3 need algorithm "auto"
    # or "native".
    #      condition                                                 what computes the call
    #   1. on a CPU: traced, compiled, or an input of a subclass     torch's operator (exceptions: see its function)
    #   2. complex tensors                                           torch's operator, by real and imaginary parts
    #   3. eager, and torch's operator with its settings is chosen   torch's operator, called directly: least host time
    #   4. it has a key, and its tensors are ordinary dense ones     a prepared call, which bypasses the dispatcher
    #   5a. an export to ONNX                                        torch's operator, since exports know no other
    #   5b. "auto" or "native" with torch's own precision, under     torch's operator, which has rules for these (our
    #       a transform such as vmap or with a wrapper subclass      operator would be a loop under vmap)
    #   6. any other call                                            our operator, by torch's dispatcher
    # 3 never holds for "auto" on Hopper (if no software is missing): torch's operator is then limited to deterministic
    # kernels, which is not torch's setting, so 4 takes the call.
    # If you add a case: several conditions may hold for a call. 2 has to come before 3, whose estimates know no complex
    # numbers; 3 before 4, which would prepare a call of torch's operator; and all before 6, which takes any call.
    # `pytest tests/test_{dispatch,transforms,arrays,autocast,onnx}.py` takes each of these ways on a CPU, in 20 s.
    if input.is_cpu and not is_eager and _is_for_torch_in_a_graph(input, weight, groups, algorithm):  # 1
        return ops.checked_torch_conv_transpose2d(input, weight, bias, *geometry)
    if input.is_complex() and algorithm in ("auto", "native"):  # 2
        return torch.conv_transpose2d(input, weight, bias, *geometry)
    # is_left_to_torch first checks whether shapes fit together, and raises the error if they do not.
    if is_eager and (input.is_cuda or input.is_cpu) and ops.is_left_to_torch(input, weight, bias, arguments):  # 3

        def torchs_call(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return torch.conv_transpose2d(input, weight, bias, *geometry)

        return call_cache.find_or_make(key, lambda: torchs_call)(input, weight, bias)
    # 4. Calls on other tensors, in torch.compile and in modes have no key. prepare returns None for a negated view.
    if key is not None:
        call = call_cache.find_or_make(key, lambda: plain.prepare(input, weight, bias, arguments))
        if call is not None:
            return call(input, weight, bias)
    if is_exporting_to_onnx() or (  # 5a, 5b
        algorithm in ("auto", "native")
        and (transforms_need_torch() or tensors_need_torch(input, weight, bias))
        and rounds_as_asked(input.dtype, input.device, precision)
    ):
        return torch.conv_transpose2d(input, weight, bias, *geometry)
    if input.dim() == 3:  # 6
        return ops.conv_transpose2d(input.unsqueeze(0), weight, bias, *arguments).squeeze(0)
    return ops.conv_transpose2d(input, weight, bias, *arguments)


def _is_for_torch_in_a_graph(input: Tensor, weight: Tensor, groups: int, algorithm: str) -> bool:
    """Whether torch's operator serves a call on the CPU that is traced, compiled or of a subclass.

    It does for ``"native"``, and for ``"auto"`` unless there are few output channels: forward passes of such layers are
    often faster by ``fused``, if the C extension is there. It does not under torch.export, whose graph may be moved to
    a GPU.
    """
    if is_exporting():
        return False
    if algorithm != "auto":
        return algorithm == "native"
    if why_no_kernels(input.device) is not None:
        return True
    # A weight with too few axes goes to torch's operator too, whose check of shapes raises.
    return groups > 1 or weight.dim() < 2 or weight.shape[0] < _INPUTS_OF_AN_OUTPUT * weight.shape[1]


def im2col(
    input: Tensor, kernel_size: IntOrPair, dilation: IntOrPair = 1, padding: IntOrPair = 0, stride: IntOrPair = 1
) -> Tensor:
    """Columns of sliding windows of signals, images or volumes, as torch.nn.functional.unfold defines them for images.

    A ``kernel_size`` of one or three elements asks for signals or volumes; an int is for images, or for volumes if the
    input has five dimensions.

    Args:
        input: ``[N, C, L]``, ``[N, C, H, W]`` or ``[N, C, D, H, W]``, or without N; floating-point.
        kernel_size: an int, ``(length,)``, ``(height, width)`` or ``(depth, height, width)``, in elements.
        dilation, padding, stride: an int, or as many as there are axes.

    Returns:
        ``[N, C*K, windows]`` (or without N): windows in row-major order, K the product of kernel_size.

    Raises:
        TypeError, RuntimeError: see conv_transpose2d; also a window larger than the padded input.

    >>> im2col(torch.ones(1, 2, 5, 5), 3).shape
    torch.Size([1, 18, 9])
    >>> im2col(torch.ones(1, 2, 5), (3,)).shape, im2col(torch.ones(1, 2, 5, 5, 5), 3).shape
    (torch.Size([1, 6, 3]), torch.Size([1, 54, 27]))
    """
    if type(input) is not Tensor and arrays.are_foreign(input):
        return arrays.call(im2col, (input,), kernel_size, dilation, padding, stride)
    validation.tensor("im2col", "input", input)
    rank = validation.fold_rank("im2col", kernel_size, 3 if input.dim() == 5 else 2)
    window = _window("im2col", rank, kernel_size, dilation, padding, stride)
    if input.dim() == rank + 1:
        return im2col(input.unsqueeze(0), *window).squeeze(0)
    if rank == 1:
        im2col_problem(input, Window(*window))  # raises what is wrong, with names and sizes of one axis
        return im2col(input.unsqueeze(-2), *_with_height(window))
    if transforms_need_torch() or is_exporting_to_onnx():
        return fold.unfold(input, *window)
    return ops.im2col(input, *window)


def col2im(
    columns: Tensor,
    output_size: IntOrPair,
    kernel_size: IntOrPair,
    dilation: IntOrPair = 1,
    padding: IntOrPair = 0,
    stride: IntOrPair = 1,
) -> Tensor:
    """Signals, images or volumes of summed sliding windows, the transpose of ``im2col``; see torch.nn.functional.fold.

    An ``output_size`` of one or three elements asks for signals or volumes; an int is for images. 16-bit columns are
    summed in float32 and rounded once; on a CPU, volumes are folded slice by slice and rounded after each.

    Args:
        columns: ``[N, C*K, windows]`` or ``[C*K, windows]``, floating-point, K the product of kernel_size.
        output_size: ``(length,)``, ``(height, width)`` or ``(depth, height, width)``, or an int for square images.
        kernel_size, dilation, padding, stride: an int, or as many as output_size has, in elements.

    Returns:
        ``[N, C, L]``, ``[N, C, H, W]`` or ``[N, C, D, H, W]`` (or without N).

    Raises:
        TypeError, RuntimeError: see conv_transpose2d; also a number of columns that does not fit the output.

    >>> col2im(torch.ones(1, 18, 9), 5, 3).shape
    torch.Size([1, 2, 5, 5])
    >>> col2im(torch.ones(1, 6, 3), (5,), 3).shape, col2im(torch.ones(1, 54, 27), (5, 5, 5), 3).shape
    (torch.Size([1, 2, 5]), torch.Size([1, 2, 5, 5, 5]))
    """
    if type(columns) is not Tensor and arrays.are_foreign(columns):
        return arrays.call(col2im, (columns,), output_size, kernel_size, dilation, padding, stride)
    validation.tensor("col2im", "columns", columns)
    rank = validation.fold_rank("col2im", output_size, 2)
    size = validation.extents("col2im", "output_size", output_size, rank)
    window = _window("col2im", rank, kernel_size, dilation, padding, stride)
    if columns.dim() == 2:
        return col2im(columns.unsqueeze(0), size, *window).squeeze(0)
    if rank == 1:
        col2im_problem(columns, size, Window(*window))  # raises what is wrong, with names and sizes of one axis
        return col2im(columns, (1, *size), *_with_height(window)).squeeze(-2)
    if transforms_need_torch() or is_exporting_to_onnx():
        return fold.fold(columns, size, *window)
    return ops.col2im(columns, size, *window)


def _window(where: str, rank: int, *given: IntOrPair) -> tuple[Any, ...]:
    """Kernel size, dilation, padding and stride of a window as tuples with an int for each axis."""
    names = "kernel_size", "dilation", "padding", "stride"
    return tuple([validation.extents(where, name, value, rank) for name, value in zip(names, given, strict=True)])


def _with_height(window: tuple[Any, ...]) -> list[tuple[int, int]]:
    """A window of signals as one of images: on the axis of height 1 kernel, dilation and stride are 1, padding is 0."""
    return [(flat, *along) for flat, along in zip((1, 1, 0, 1), window, strict=True)]
