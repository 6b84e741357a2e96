"""Data for a layer, and the layer in float64: one matrix product for each kernel tap, on the data's device.

Written from the relation ``o = i * stride - padding + k * dilation`` alone: neither torch's convolutions nor any kernel
of the library is used. The canvas is the output before its padding is cut off; tap (kh, kw) connects input row ih with
canvas row ``ih * S_h + kh * D_h``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.workloads import Workload
from gemmconv.geometry import Problem

PAGE_BYTES = 2 << 20  # of a GPU's memory


@dataclass(frozen=True)
class Tensors:
    """The arguments of a layer's passes.

    Attributes:
        x: ``[N, C_in, H_in, W_in]``.
        weight: ``[C_in, C_out/groups, K_h, K_w]``.
        bias: ``[C_out]`` or None.
        grad_output: ``[N, C_out, H_out, W_out]``.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    grad_output: torch.Tensor

    def to(self, dtype: torch.dtype) -> Tensors:
        """Return the tensors, rounded to an element type."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return Tensors(self.x.to(dtype), self.weight.to(dtype), bias, self.grad_output.to(dtype))

    def channels_last(self) -> Tensors:
        """Copies as a model in channels_last has them."""
        turn = partial(torch.Tensor.contiguous, memory_format=torch.channels_last)
        return Tensors(turn(self.x), turn(self.weight), self.bias, turn(self.grad_output))

    def placed(self, step_bytes: int) -> Tensors:
        """Copies of the same strides: x one step beyond the beginning of a page, weight 2, grad_output 3 and bias 4.

        Args:
            step_bytes: a multiple of 512, to which torch's allocator aligns; 0 has all at the beginning of a page.
        """
        bias = None if self.bias is None else _copy_at(self.bias, 4 * step_bytes)
        x, weight = _copy_at(self.x, step_bytes), _copy_at(self.weight, 2 * step_bytes)
        return Tensors(x, weight, bias, _copy_at(self.grad_output, 3 * step_bytes))


def _copy_at(tensor: torch.Tensor, beyond_page: int) -> torch.Tensor:
    """A copy of a tensor without gaps, that begins so many bytes beyond the beginning of a page."""
    memory = torch.empty(tensor.nbytes + PAGE_BYTES, dtype=torch.uint8, device=tensor.device)
    begin = (beyond_page - memory.data_ptr()) % PAGE_BYTES
    copy = memory[begin : begin + tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return copy.copy_(tensor)


@dataclass(frozen=True)
class Reference:
    """The results in float64.

    Attributes:
        images: which images ``output`` and ``input`` hold.
        results: by name: ``output`` and ``input`` (the gradient) of those images; ``weight`` and ``bias``, the
            gradients over all images.
    """

    images: list[int]
    results: dict[str, torch.Tensor]

    def errors(self, results: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """``||result - reference|| / ||reference||`` of each; infinite where the shape is wrong, NaN with any NaN."""
        return {name: self._error(name, result) for name, result in results.items()}

    def _error(self, name: str, result: torch.Tensor) -> float:
        expected = self.results[name]
        per_image = name in ("output", "input")
        if result.shape[per_image:] != expected.shape[per_image:]:
            return math.inf
        if per_image and len(result) != self.images[-1] + 1:  # the last image is always among them
            return math.inf
        if not per_image:
            return relative_error(result, expected)
        step = max(1, _limits(result.device)[0] // (32 * max(1, expected[0].numel())))
        if len(self.images) == len(result):
            return _relative([(result[i : i + step], expected[i : i + step]) for i in range(0, len(result), step)])
        return _relative([(result[image], expected[row]) for row, image in enumerate(self.images)])


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """``||result - expected|| / ||expected||``, in float64."""
    return _relative([(result, expected)])


def _relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    norm = torch.linalg.vector_norm
    differences = torch.stack([norm(result.double() - expected) for result, expected in pairs])
    sizes = torch.stack([norm(expected) for _, expected in pairs])
    difference, size = float(norm(differences)), float(norm(sizes))
    return difference / size if size else difference


def random_tensors(workload: Workload, device: torch.device) -> Tensors:
    """float32 tensors of a layer, normally distributed, the same each time; outputs are of order 1."""
    problem = workload.problem
    generator = torch.Generator(device).manual_seed(zlib.crc32(workload.layer.encode()))

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    scale = (problem.gemm_k * problem.taps) ** -0.5
    return Tensors(
        random(problem.input_shape),
        random(problem.weight_shape).mul_(scale),
        random((problem.out_channels,)).mul_(scale) if workload.bias else None,
        random(problem.output_shape),
    )


def reference(problem: Problem, tensors: Tensors, gradients: bool = True) -> Reference:
    """The layer's float64 results for tensors of any element type.

    Args:
        problem: the geometry.
        tensors: the data, already rounded.
        gradients: whether to compute the gradients too.
    """
    device = tensors.x.device
    chunk, kept = _limits(device)
    each = 8 * max(problem.in_channels * problem.in_pixels, problem.out_channels * problem.out_pixels, 1)
    images = spread_images(problem.batch, kept // each)
    canvas, inside = _canvas(problem)
    widest = max(problem.in_channels * problem.in_pixels, problem.out_channels * canvas[0] * canvas[1])
    step = max(1, min(problem.batch, chunk // (6 * 8 * max(1, widest))))
    groups, in_group, out_group = problem.groups, problem.gemm_k, problem.out_channels // problem.groups
    weight = tensors.weight.double().view(groups, in_group, out_group, *problem.kernel_size)
    taps = [(kh, kw) for kh in range(problem.kernel_size[0]) for kw in range(problem.kernel_size[1])]
    outputs, grad_inputs = [], []
    grad_weight = torch.zeros_like(weight)
    for start in range(0, problem.batch, step):
        x = tensors.x[start : start + step].double().reshape(-1, groups, in_group, problem.in_pixels)
        count = len(x)
        wanted = [image - start for image in images if start <= image < start + step]
        if wanted:
            output = x.new_zeros(count, problem.out_channels, *canvas)
            for kh, kw in taps:
                product = weight[..., kh, kw].transpose(1, 2) @ x  # [count, groups, out_group, in_pixels]
                _at_tap(problem, output, kh, kw).add_(product.view(count, -1, *problem.input_size))
            output = output[inside].contiguous()
            if tensors.bias is not None:
                output += tensors.bias.double().view(-1, 1, 1)
            outputs.append(output[wanted] if len(wanted) < count else output)
        if gradients:
            grad_canvas = x.new_zeros(count, problem.out_channels, *canvas)
            grad_canvas[inside] = tensors.grad_output[start : start + step].double()
            grad_x = torch.zeros_like(x)
            blocks = _row_blocks(problem, count)
            x_rows = _in_rows(x, blocks).contiguous()
            for kh, kw in taps:
                part = _at_tap(problem, grad_canvas, kh, kw).reshape(count, groups, out_group, problem.in_pixels)
                if wanted:
                    grad_x += weight[..., kh, kw] @ part
                grad_weight[..., kh, kw] += (x_rows @ _in_rows(part, blocks).transpose(-1, -2)).sum((0, 2))
            if wanted:
                grad_x = grad_x.view(count, problem.in_channels, *problem.input_size)
                grad_inputs.append(grad_x[wanted] if len(wanted) < count else grad_x)
    results = {"output": torch.cat(outputs)}
    if gradients:
        results |= {"input": torch.cat(grad_inputs), "weight": grad_weight.view(problem.weight_shape)}
        if tensors.bias is not None:
            results["bias"] = tensors.grad_output.sum((0, 2, 3), dtype=torch.float64)
    return Reference(images, results)


def _canvas(problem: Problem) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Height and width of the canvas, which has room for output_padding too, and where the output lies on it."""
    extents, inside = list[int](), [slice(None), slice(None)]
    for axis in (0, 1):
        taps = problem.dilation[axis] * (problem.kernel_size[axis] - 1)
        end = problem.padding[axis] + problem.output_size[axis]
        extents.append(max(end, (problem.input_size[axis] - 1) * problem.stride[axis] + taps + 1))
        inside.append(slice(problem.padding[axis], end))
    return tuple(extents), tuple(inside)


def _row_blocks(problem: Problem, images: int) -> int:
    """Into how many blocks of rows to cut an image's sum over pixels: one long product would leave a GPU idle."""
    most = 64 // (images * problem.groups)
    return next((blocks for blocks in range(most, 1, -1) if problem.input_size[0] % blocks == 0), 1)


def _in_rows(images: torch.Tensor, blocks: int) -> torch.Tensor:
    """``[N, groups, C, pixels]`` as ``[N, groups, blocks, C, pixels/blocks]``."""
    return images.unflatten(3, (blocks, -1)).transpose(2, 3)


def spread_images(batch: int, most: int) -> list[int]:
    """At most so many images of a batch, but at least one, evenly spread; the last is always among them.

    >>> spread_images(9, 3), spread_images(9, 0)
    ([0, 4, 8], [8])
    """
    count, last = max(1, min(batch, most)), batch - 1
    return sorted({last - round(i * last / max(1, count - 1)) for i in range(count)})


def _limits(device: torch.device) -> tuple[int, int]:
    """Most bytes of float64 temporaries, and of each of the float64 output and input gradient, which are kept."""
    if device.type != "cuda":
        return 256 << 20, 1 << 30
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(4 << 30, memory // 16), memory // 8


def _at_tap(problem: Problem, canvas: torch.Tensor, kh: int, kw: int) -> torch.Tensor:
    """The canvas positions that a tap connects with all input positions: ``[N, C_out, H_in, W_in]``."""
    rows, columns = (
        slice(
            tap * problem.dilation[axis],
            tap * problem.dilation[axis] + (problem.input_size[axis] - 1) * problem.stride[axis] + 1,
            problem.stride[axis],
        )
        for axis, tap in ((0, kh), (1, kw))
    )
    return canvas[:, :, rows, columns]
