"""Transposed convolution in float64 NumPy, written from the scatter relation and nothing else.

Every function here loops over the kernel taps and moves strided slices, so it shares no index arithmetic with
the gather kernels that it judges. One tap (kh, kw) connects input row ih with row

    ih * S_H + kh * D_H        of the canvas, the output before its P_H rows of padding are cut off,

and the same holds for columns. The canvas of an output [H_out, W_out] is [H_out + 2*P_H, W_out + 2*P_W].
Arrays are NCHW; weights are [C_in, C_out/groups, K_h, K_w]. Pairs are (height, width).
"""

import math

import numpy as np
import torch

Pair = tuple[int, int]


def output_size(
    input_size: Pair, kernel_size: Pair, stride: Pair, padding: Pair, output_padding: Pair, dilation: Pair
) -> Pair:
    """Return (H_out, W_out) of the transposed convolution."""
    height, width = (
        (input_size[axis] - 1) * stride[axis]
        - 2 * padding[axis]
        + dilation[axis] * (kernel_size[axis] - 1)
        + output_padding[axis]
        + 1
        for axis in (0, 1)
    )
    return height, width


def tap_slices(tap: Pair, input_size: Pair, stride: Pair, dilation: Pair) -> tuple[slice, slice]:
    """Return the canvas rows and columns that one tap connects with all input rows and columns."""
    rows, columns = (
        slice(
            tap[axis] * dilation[axis],
            tap[axis] * dilation[axis] + (input_size[axis] - 1) * stride[axis] + 1,
            stride[axis],
        )
        for axis in (0, 1)
    )
    return rows, columns


def crop(canvas: np.ndarray, padding: Pair) -> np.ndarray:
    """Cut the padding off a canvas."""
    height, width = canvas.shape[-2:]
    return canvas[..., padding[0] : height - padding[0], padding[1] : width - padding[1]]


def pad(output: np.ndarray, padding: Pair) -> np.ndarray:
    """Surround an output with `padding` zeros, which makes it a canvas again."""
    no_padding = [(0, 0)] * (output.ndim - 2)
    return np.pad(output, [*no_padding, (padding[0], padding[0]), (padding[1], padding[1])])


def split_groups(images: np.ndarray, groups: int) -> np.ndarray:
    """View [N, C, H, W] as [N, groups, C/groups, H, W]."""
    batch, channels, height, width = images.shape
    return images.reshape(batch, groups, channels // groups, height, width)


def split_weight(weight: np.ndarray, groups: int) -> np.ndarray:
    """View [C_in, C_out/groups, K_h, K_w] as [groups, C_in/groups, C_out/groups, K_h, K_w]."""
    return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])


def join_groups(images: np.ndarray) -> np.ndarray:
    """View [N, groups, C/groups, H, W] as [N, C, H, W]."""
    batch, groups, channels, height, width = images.shape
    return images.reshape(batch, groups * channels, height, width)


def forward(
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    output_padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> np.ndarray:
    """Scatter x [N, C_in, H_in, W_in] through w into an output [N, C_out, H_out, W_out]."""
    input_size, kernel_size = x.shape[2:], w.shape[2:]
    height, width = output_size(input_size, kernel_size, stride, padding, output_padding, dilation)
    x_groups, w_groups = split_groups(x, groups), split_weight(w, groups)
    canvas = np.zeros(
        (x.shape[0], groups, w.shape[1], height + 2 * padding[0], width + 2 * padding[1]),
        dtype=np.result_type(x, w),
    )
    for tap in np.ndindex(*kernel_size):
        rows, columns = tap_slices(tap, input_size, stride, dilation)
        w_tap = w_groups[..., tap[0], tap[1]]
        canvas[..., rows, columns] += np.einsum("ngchw,gco->ngohw", x_groups, w_tap)
    output = join_groups(crop(canvas, padding))
    return output if bias is None else output + bias[:, None, None]


def input_grad(
    grad_output: np.ndarray,
    w: np.ndarray,
    input_size: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> np.ndarray:
    """Return the gradient of sum(forward(x) * grad_output) with respect to x: [N, C_in, H_in, W_in]."""
    canvas = pad(split_groups(grad_output, groups), padding)
    w_groups = split_weight(w, groups)
    grad = np.zeros(
        (grad_output.shape[0], groups, w_groups.shape[1], *input_size), dtype=np.result_type(grad_output, w)
    )
    for tap in np.ndindex(*w.shape[2:]):
        rows, columns = tap_slices(tap, input_size, stride, dilation)
        w_tap = w_groups[..., tap[0], tap[1]]
        grad += np.einsum("ngohw,gco->ngchw", canvas[..., rows, columns], w_tap)
    return join_groups(grad)


def weight_grad(
    grad_output: np.ndarray,
    x: np.ndarray,
    kernel_size: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> np.ndarray:
    """Return the gradient of sum(forward(x) * grad_output) with respect to w, in the shape of w."""
    canvas = pad(split_groups(grad_output, groups), padding)
    x_groups = split_groups(x, groups)
    in_channels, out_channels = x_groups.shape[2], canvas.shape[2]
    grad = np.zeros((groups, in_channels, out_channels, *kernel_size), dtype=np.result_type(grad_output, x))
    for tap in np.ndindex(*kernel_size):
        rows, columns = tap_slices(tap, x.shape[2:], stride, dilation)
        grad[..., tap[0], tap[1]] = np.einsum("ngchw,ngohw->gco", x_groups, canvas[..., rows, columns])
    return grad.reshape(groups * in_channels, out_channels, *kernel_size)


def bias_grad(grad_output: np.ndarray) -> np.ndarray:
    """Return the gradient of sum(forward(x) * grad_output) with respect to the bias: [C_out]."""
    return grad_output.sum(axis=(0, 2, 3))


def sliding_size(image_size: Pair, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Pair:
    """Return how many kernel positions fit into an image, per axis."""
    rows, columns = (
        (size + 2 * padding[axis] - dilation[axis] * (kernel_size[axis] - 1) - 1) // stride[axis] + 1
        for axis, size in enumerate(image_size)
    )
    return rows, columns


def unfold(
    images: np.ndarray,
    kernel_size: Pair,
    dilation: Pair = (1, 1),
    padding: Pair = (0, 0),
    stride: Pair = (1, 1),
) -> np.ndarray:
    """Copy every kernel position of images [N, C, H, W] into a column: [N, C*K_h*K_w, L]."""
    batch, channels, height, width = images.shape
    positions = sliding_size((height, width), kernel_size, dilation, padding, stride)
    canvas = pad(images, padding)
    columns = np.zeros((batch, channels, *kernel_size, *positions), dtype=images.dtype)
    for tap in np.ndindex(*kernel_size):
        tap_rows, tap_columns = tap_slices(tap, positions, stride, dilation)
        columns[:, :, tap[0], tap[1]] = canvas[..., tap_rows, tap_columns]
    return columns.reshape(batch, channels * math.prod(kernel_size), math.prod(positions))


def fold(
    columns: np.ndarray,
    image_size: Pair,
    kernel_size: Pair,
    dilation: Pair = (1, 1),
    padding: Pair = (0, 0),
    stride: Pair = (1, 1),
) -> np.ndarray:
    """Add every column of columns [N, C*K_h*K_w, L] to its place in images [N, C, H, W]: unfold's adjoint."""
    batch, channels = columns.shape[0], columns.shape[1] // math.prod(kernel_size)
    positions = sliding_size(image_size, kernel_size, dilation, padding, stride)
    by_tap = columns.reshape(batch, channels, *kernel_size, *positions)
    canvas = np.zeros((batch, channels, image_size[0] + 2 * padding[0], image_size[1] + 2 * padding[1]), columns.dtype)
    for tap in np.ndindex(*kernel_size):
        tap_rows, tap_columns = tap_slices(tap, positions, stride, dilation)
        canvas[..., tap_rows, tap_columns] += by_tap[:, :, tap[0], tap[1]]
    return crop(canvas, padding)


# Bound on ||actual - expected|| / ||expected|| for inputs exact in the dtype. u is the unit roundoff.
TOLERANCES = {
    # u = 1.1e-16; a sum of a few hundred products in any order stays a thousand times below this bar.
    ("float64", "any"): 1e-13,
    ("complex128", "any"): 1e-13,
    # u = 6e-8; blocked fp32 sums of this length measure 1e-7 to 4e-7. One TF32 product would show as 3e-4.
    ("float32", "ieee"): 1e-6,
    ("complex64", "any"): 1e-6,
    # The operands lose 13 bits, u = 4.9e-4 each; roundings of independent products average to 3e-4.
    ("float32", "tf32"): 5e-4,
    # u = 4.9e-4 for the one rounding of the result (2e-4 in the mean) and once more where columns are 16-bit.
    ("float16", "any"): 1e-3,
    # u = 3.9e-3, otherwise as float16 (1.6e-3 in the mean).
    ("bfloat16", "any"): 5e-3,
}

# One element may be off by this many tolerances of the largest magnitude. Rounding needs less than 2. A
# single wrong element of a large tensor, which the norm would forgive, is off by far more.
PEAK_FACTOR = 4


def tolerance(dtype: torch.dtype, precision: str | None = None) -> float:
    """Return the bound on the relative error of a result computed in `dtype`; float32 needs a precision."""
    name = str(dtype).removeprefix("torch.")
    return TOLERANCES[(name, precision if precision is not None and name == "float32" else "any")]


def to_array(values: torch.Tensor | np.ndarray) -> np.ndarray:
    """Return a tensor or array as float64 (complex128 if it is complex)."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().resolve_conj()
        values = values.to(torch.complex128 if values.is_complex() else torch.float64).numpy()
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)


def relative_error(actual: torch.Tensor | np.ndarray, expected: torch.Tensor | np.ndarray) -> float:
    """Return ||actual - expected|| / ||expected|| in float64.

    NaN or infinity anywhere gives infinity. Against an all-zero (or empty) expectation the error is 0 if
    `actual` is zero too and infinity otherwise. Raises AssertionError if the shapes differ: nothing is
    broadcast.
    """
    actual, expected = to_array(actual), to_array(expected)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return math.inf
    difference, norm = np.linalg.norm(actual - expected), np.linalg.norm(expected)
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return float(difference / norm)


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor | np.ndarray,
    dtype: torch.dtype,
    precision: str | None = None,
) -> None:
    """Assert that `actual` has type `dtype` and agrees with `expected` in the norm and in every element."""
    assert actual.dtype == dtype, f"dtype {actual.dtype}, expected {dtype}"
    bar = tolerance(dtype, precision)
    error = relative_error(actual, expected)
    assert error <= bar, f"relative error {error:.3g} exceeds {bar:.3g}; {worst_element(actual, expected)}"
    if actual.numel():
        actual_array, expected_array = to_array(actual), to_array(expected)
        peak_error = np.abs(actual_array - expected_array).max()
        peak_bar = PEAK_FACTOR * bar * np.abs(expected_array).max()
        assert peak_error <= peak_bar, (
            f"largest error {peak_error:.3g} exceeds {peak_bar:.3g}; {worst_element(actual, expected)}"
        )


def worst_element(actual: torch.Tensor, expected: torch.Tensor | np.ndarray) -> str:
    """Say where two tensors of one shape differ most, for a failure message."""
    actual_array, expected_array = to_array(actual), to_array(expected)
    with np.errstate(invalid="ignore"):
        difference = np.nan_to_num(np.abs(actual_array - expected_array), nan=np.inf)
    index = np.unravel_index(difference.argmax(), difference.shape)
    position = tuple(int(i) for i in index)
    wrong, right = actual_array[index], expected_array[index]
    return f"worst at {position} of {actual_array.shape}: {wrong}, expected {right}"
