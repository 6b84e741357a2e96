"""The functional interface: torch.nn.functional's names, order and defaults.

All tensors of a call may be arrays of one library that speaks DLPack, such as NumPy or CuPy; then so is the result.
Tensor subclasses are served by the protocol of torch's own functions, torch.overrides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gemmconv import arrays, ops, validation
from gemmconv.dispatch import are_for_torch, is_for_torch
from gemmconv.kernels.base import Precision
from gemmconv.kernels.columns.cpu import is_few_outputs
from gemmconv.ops import call_cache, plain
from gemmconv.ops import compiled as compiled  # registers the operators' lowerings for torch.compile
from gemmconv.selection import NAMES, torch_precision

IntOrPair = int | Sequence[int]


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
        workspace_limit: bytes of temporary memory; None for 64 MiB.

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
    where = "conv_transpose2d"
    given: tuple[Any, ...] = (
        *(stride, padding, output_padding, groups, dilation),
        *(algorithm, precision, workspace_limit),
    )
    are_plain = plain.are_torch_tensors(input, weight, bias)
    key = None
    # A repeated call: a call of the same signature was prepared before, and its checks were made then.
    if are_plain and not torch.compiler.is_compiling() and (text := call_cache.arguments_key(given)) is not None:
        call, key = plain.find_call(input, weight, bias, text)
        if call is not None:
            return call(input, weight, bias)
    # Arrays of other libraries: this function again, on tensors that share their memory.
    if not are_plain and arrays.are_foreign(input, weight, bias):
        return arrays.call(
            *(conv_transpose2d, {"input": input, "weight": weight, "bias": bias}),
            *(stride, padding, output_padding, groups, dilation),
            algorithm=algorithm,
            precision=precision,
            workspace_limit=workspace_limit,
        )
    # Types and values. Whether shapes fit together is checked by the operator, or where a call is prepared.
    validation.tensor(where, "input", input)
    validation.tensor(where, "weight", weight)
    if bias is not None:
        validation.tensor(where, "bias", bias)
    validation.choice(where, algorithm, NAMES, precision, workspace_limit)
    if input.is_mkldnn and algorithm not in ("auto", "native"):
        rule = f"be a dense tensor with algorithm={algorithm!r}"
        validation.fail(NotImplementedError, where, "input", rule, "one of mkldnn", "use input.to_dense()")
    geometry = validation.geometry(where, stride, padding, output_padding, groups, dilation)
    arguments = (*geometry, algorithm, precision, workspace_limit)
    is_eager = (
        type(input) is Tensor
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None  # under torch.jit.trace sizes are tensors
    )
    # What computes the call is said by the first of these cases that holds.
    # On a CPU and not eager, by name or for "auto": torch's operator. A traced call has no sizes to estimate with.
    if input.is_cpu and not is_eager and _is_left_to_torch_on_the_cpu(weight, algorithm):
        return ops.torchs_conv_transpose2d(input, weight, bias, *geometry)  # which checks shapes in our words
    # Complex: torch's operator, which rewrites them as real ones before autograd, and checks shapes.
    if input.is_complex() and algorithm in ("auto", "native"):
        return torch.conv_transpose2d(input, weight, bias, *geometry)
    # Eager, where torch's operator is chosen for all passes: ours would add nothing but host time. Shapes are checked.
    if is_eager and (input.is_cuda or input.is_cpu) and ops.is_left_to_torch(input, weight, bias, arguments):
        plain.store_call(key, lambda input, weight, bias: torch.conv_transpose2d(input, weight, bias, *geometry))
        return torch.conv_transpose2d(input, weight, bias, *geometry)
    # Plain and eager: a prepared call launches our kernels without torch's dispatcher.
    if key is not None and (call := plain.store_call(key, plain.prepare(input, weight, bias, arguments))) is not None:
        return call(input, weight, bias)
    # Exports to ONNX, transforms, wrapper subclasses: they have rules for torch's operators alone.
    if torch.onnx.is_in_onnx_export() or (
        algorithm in ("auto", "native")
        and (is_for_torch() or are_for_torch(input, weight, bias))
        and _rounds_like_torch(input, precision)
    ):
        return torch.conv_transpose2d(input, weight, bias, *geometry)
    # All else: our operator, through the dispatcher, which serves every other mode.
    if input.dim() == 3:
        return ops.conv_transpose2d(input.unsqueeze(0), weight, bias, *arguments).squeeze(0)
    return ops.conv_transpose2d(input, weight, bias, *arguments)


def _is_left_to_torch_on_the_cpu(weight: Tensor, algorithm: str) -> bool:
    """Whether torch's operator serves a call on the CPU that is traced, compiled or of a subclass.

    So it is by name, and for ``"auto"`` but for few output channels, where gemm_col2im is faster at any size. Not under
    torch.export, whose graph may be moved to a GPU.
    """
    if torch.compiler.is_compiling() and torch.compiler.is_exporting():
        return False
    return algorithm == "native" or (algorithm == "auto" and not is_few_outputs(weight.shape[0], weight.shape[1]))


def _rounds_like_torch(tensor: Tensor, precision: Precision | None) -> bool:
    """Whether torch's operator rounds products as ``precision`` asks; only float32 on CUDA has a choice."""
    has_choice = tensor.dtype == torch.float32 and tensor.is_cuda
    return precision is None or not has_choice or precision == torch_precision(tensor.dtype, tensor.device)


def im2col(
    input: Tensor, kernel_size: IntOrPair, dilation: IntOrPair = 1, padding: IntOrPair = 0, stride: IntOrPair = 1
) -> Tensor:
    """Columns of sliding windows, as torch.nn.functional.unfold defines them.

    Args:
        input: ``[N, C, H, W]`` or ``[C, H, W]``, floating-point.
        kernel_size, dilation, padding, stride: an int or ``(height, width)``, in elements.

    Returns:
        ``[N, C*K_h*K_w, L]`` (or without N), L windows in row-major order.

    Raises:
        TypeError, RuntimeError: see conv_transpose2d; also a window larger than the padded image.

    >>> im2col(torch.ones(1, 2, 5, 5), 3).shape
    torch.Size([1, 18, 9])
    """
    if type(input) is not Tensor and arrays.are_foreign(input):
        return arrays.call(im2col, {"input": input}, kernel_size, dilation, padding, stride)
    validation.tensor("im2col", "input", input)
    window = _window("im2col", kernel_size, dilation, padding, stride)
    if is_for_torch() or torch.onnx.is_in_onnx_export():
        return torch.nn.functional.unfold(input, *window)
    if input.dim() == 3:
        return ops.im2col(input.unsqueeze(0), *window).squeeze(0)
    return ops.im2col(input, *window)


def col2im(
    columns: Tensor,
    output_size: IntOrPair,
    kernel_size: IntOrPair,
    dilation: IntOrPair = 1,
    padding: IntOrPair = 0,
    stride: IntOrPair = 1,
) -> Tensor:
    """Images of summed sliding windows, as torch.nn.functional.fold defines them: the transpose of ``im2col``.

    16-bit columns are summed in float32 and rounded once.

    Args:
        columns: ``[N, C*K_h*K_w, L]`` or ``[C*K_h*K_w, L]``, floating-point.
        output_size: ``(H, W)`` of the images.
        kernel_size, dilation, padding, stride: an int or ``(height, width)``, in elements.

    Returns:
        ``[N, C, H, W]`` (or without N).

    Raises:
        TypeError, RuntimeError: see conv_transpose2d; also a number of columns that does not fit the images.

    >>> col2im(torch.ones(1, 18, 9), 5, 3).shape
    torch.Size([1, 2, 5, 5])
    """
    if type(columns) is not Tensor and arrays.are_foreign(columns):
        arguments = output_size, kernel_size, dilation, padding, stride
        return arrays.call(col2im, {"columns": columns}, *arguments)
    validation.tensor("col2im", "columns", columns)
    size = validation.extents("col2im", "output_size", output_size)
    window = _window("col2im", kernel_size, dilation, padding, stride)
    if is_for_torch() or torch.onnx.is_in_onnx_export():
        return torch.nn.functional.fold(columns, size, *window)
    if columns.dim() == 2:
        return ops.col2im(columns.unsqueeze(0), size, *window).squeeze(0)
    return ops.col2im(columns, size, *window)


def _window(where: str, *given: IntOrPair) -> tuple[tuple[int, int], ...]:
    """Kernel size, dilation, padding and stride of a window as pairs."""
    names = "kernel_size", "dilation", "padding", "stride"
    return tuple([validation.extents(where, name, value) for name, value in zip(names, given, strict=True)])
