"""One row per layer and algorithm, and one for ``auto``: errors first, times only where the result is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch

from gemmconv.algorithms import ALGORITHMS, Algorithm
from gemmconv.compare.layers import Layer
from gemmconv.compare.photo import windows
from gemmconv.compare.timing import medians_ms
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Direction, Precision
from gemmconv.module import ConvTranspose2d
from gemmconv.pairs import choose_pair
from gemmconv.selection import choose, current_config

BASELINE, AUTO = "torch", "auto"

# Largest error against float64 that counts as right: ||out - reference|| / ||reference||.
_BARS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
_TF32_BAR = 5e-4

# Most flops of the float64 reference's forward pass, which limits the images that are compared; the last always is.
_REFERENCE_FLOPS = {"cuda": 1e11, "cpu": 1e10}

STEPS_PER_LAYER = 5 + len(ALGORITHMS)  # of which :func:`measure_layer` gives the names
Step = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """The measurements of one algorithm on one layer."""

    layer: Layer  # the layer, at the size that was measured
    # its name, or ``AUTO``; ``BASELINE`` is ``torch.nn.ConvTranspose2d`` with cuDNN's benchmark mode on.
    algorithm: str
    precision: Precision  # how float32 products are rounded
    chosen: bool = False  # whether ``auto`` takes this algorithm for the forward pass
    # in the row of ``AUTO``, the algorithms of the forward pass, the input's and the weight's gradient
    taken: tuple[str, ...] = ()
    skipped: str | None = None  # why it was not run; all fields below are then empty
    error: float | None = None  # error of the output, relative to float64
    gradient_error: float | None = None  # the largest of the gradients of input, weight and bias, relative to float64
    bar: float = 0.0  # bar, gradient_bar: the largest errors that count as right
    gradient_bar: float = 0.0
    # forward_ms, both_ms: median time of a forward pass, and of forward and backward passes together
    forward_ms: float | None = None
    both_ms: float | None = None
    # forward_ratio, both_ratio: the baseline's time divided by this one; None if the precisions differ
    forward_ratio: float | None = None
    both_ratio: float | None = None
    workspace_bytes: int | None = None  # temporary memory, the most of any direction; None where torch manages it

    @property
    def error_is_wrong(self) -> bool:
        """Whether the output's error is over its bar, or no number."""
        return self.error is not None and not self.error <= self.bar

    @property
    def gradient_is_wrong(self) -> bool:
        """Whether a gradient's error is over its bar, or no number."""
        return self.gradient_error is not None and not self.gradient_error <= self.gradient_bar

    @property
    def wrong(self) -> bool:
        """Whether the result is wrong: such a row has no times."""
        return self.error_is_wrong or self.gradient_is_wrong


@dataclass(frozen=True)
class _Data:
    """A layer's tensors and its float64 results."""

    x: torch.Tensor  # input ``[N, C_in, H, W]``, requires grad
    weight: torch.Tensor  # weight, bias: parameters
    bias: torch.Tensor | None
    grad_output: torch.Tensor  # ``[N, C_out, H_out, W_out]``
    images: list[int]  # which images are compared
    masked: torch.Tensor  # grad_output, zero outside ``images``, so that the weight's gradient is theirs alone
    # float64: output and input's gradient of ``images`` alone; the parameters' gradients, of ``masked``
    references: list[torch.Tensor]


def error_bar(dtype: torch.dtype, precision: Precision) -> float:
    """Largest error that counts as right.

    >>> error_bar(torch.float32, "tf32")
    0.0005
    """
    return _TF32_BAR if precision == "tf32" else _BARS[dtype]


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """``||result - reference|| / ||reference||``, in float64."""
    norm = torch.linalg.vector_norm
    difference = float(norm(result.double() - reference))
    size = float(norm(reference))
    return difference / size if size else difference


def spread_images(batch: int, most: int) -> list[int]:
    """At most so many images of a batch, but at least one, evenly spread; the last is always among them.

    >>> spread_images(9, 3), spread_images(9, 0)
    ([0, 4, 8], [8])
    """
    count, last = max(1, min(batch, most)), batch - 1
    return sorted({last - round(i * last / max(1, count - 1)) for i in range(count)})


def measure_layer(
    layer: Layer, device: torch.device, dtype: torch.dtype, precision: Precision | None, step: Step = lambda name: None
) -> list[Row]:
    """Measure torch, ``auto`` and every algorithm on one layer.

    Torch's layer runs first, with cuDNN's benchmark mode on. torch keeps what that finds, so ``native`` is timed
    with the same cuDNN kernels. On Hopper ``auto`` has torch's operator take deterministic ones.

    Args:
        layer, dtype: the layer, at the size to measure, and the element type of its tensors.
        device: where to run; a CUDA device carries its index.
        precision: rounding of float32 products; None for torch's setting.
        step: called with the name of each step as it begins, ``STEPS_PER_LAYER`` times.

    Returns:
        A row for torch, one for ``auto``, then one for each entry of ``ALGORITHMS``, in their order.
    """
    auto = current_config(layer.problem, dtype, device, precision, bias=layer.bias)
    config, current = replace(auto, deterministic=False), auto.torch_precision
    gradients = choose_pair(auto, auto, AUTO, "compare")
    taken = choose(auto, AUTO, "compare"), gradients.input_grad, gradients.weight_grad
    with ExitStack() as stack:
        stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)  # as it was
        step("input and reference")
        # In float64 the reference may be the first to run torch's layer at this size, and the first call decides.
        torch.backends.cudnn.benchmark = dtype == torch.float64
        data = _make_data(layer, device, dtype)

        step(BASELINE)
        torch.backends.cudnn.benchmark = True
        modules = {BASELINE: module_of(layer.problem, data.weight, data.bias)}
        bar = error_bar(dtype, current)
        rows = [_check(Row(layer, BASELINE, current, bar=bar, gradient_bar=10 * bar), modules[BASELINE], data)]
        torch.backends.cudnn.benchmark = False

        # A weight gradient sums over all pixels: where torch loses more than the bar, twice that is right.
        bar = gradient_bar = error_bar(dtype, config.precision)
        if rows[0].gradient_error is not None and not rows[0].wrong:
            gradient_bar = max(bar, 2 * rows[0].gradient_error)
        for name, passes in ((AUTO, taken), *((a.name, (a, a, a)) for a in ALGORITHMS)):
            step(name)
            row = Row(layer, name, config.precision, chosen=name == taken[0].name, bar=bar, gradient_bar=gradient_bar)
            if name == AUTO:
                row = replace(row, taken=tuple(algorithm.name for algorithm in taken))
            if (reason := passes[0].why_not(config)) is not None:
                rows.append(replace(row, skipped=reason))
                continue
            modules[name] = module_of(layer.problem, data.weight, data.bias, name, precision)
            row = replace(row, workspace_bytes=_workspace_bytes(passes, config))
            rows.append(_check(row, modules[name], data))
        return _with_times(rows, modules, data, device, step)


def _make_data(layer: Layer, device: torch.device, dtype: torch.dtype) -> _Data:
    """A photograph as input, fixed random parameters and output gradient, and their results in float64."""
    problem = layer.problem
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        values = torch.rand(shape, generator=generator).mul_(2 * scale).sub_(scale)
        return values.to(device, dtype)

    scale = (problem.gemm_k * problem.taps) ** -0.5
    x = windows(problem.input_shape).to(device, dtype)
    weight = random(problem.weight_shape, scale)
    bias = random((problem.out_channels,), scale) if layer.bias else None
    grad_output = random(problem.output_shape, 1.0)

    flops_each = max(1, problem.useful_flops // problem.batch)
    images = spread_images(problem.batch, int(_REFERENCE_FLOPS[device.type] // flops_each))
    masked = torch.zeros_like(grad_output)
    masked[images] = grad_output[images]

    weight64 = weight.to(torch.float64, copy=True).requires_grad_()
    bias64 = None if bias is None else bias.to(torch.float64, copy=True).requires_grad_()
    outputs, grad_inputs = [], []
    for image in images:  # one at a time, to bound the memory that float64 takes
        x64 = x[image : image + 1].to(torch.float64, copy=True).requires_grad_()
        output = torch.nn.functional.conv_transpose2d(x64, weight64, bias64, *problem.geometry)
        output.backward(masked[image : image + 1].double())
        outputs.append(output.detach())
        assert x64.grad is not None
        grad_inputs.append(x64.grad)
    grads = [one.grad for one in (weight64, bias64) if one is not None and one.grad is not None]
    references = [torch.cat(outputs), torch.cat(grad_inputs), *grads]
    return _Data(x.requires_grad_(), weight, bias, grad_output, images, masked, references)


def module_of(
    problem: Problem,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    algorithm: str | None = None,
    precision: Precision | None = None,
) -> torch.nn.ConvTranspose2d:
    """gemmconv's layer, or with ``algorithm=None`` torch's, with these parameters."""
    p = problem
    channels, window = (p.in_channels, p.out_channels), (p.kernel_size, p.stride, p.padding, p.output_padding)
    arguments = (*channels, *window, p.groups, bias is not None, p.dilation)
    module: torch.nn.ConvTranspose2d
    if algorithm is None:
        module = torch.nn.ConvTranspose2d(*arguments, device="meta")
    else:
        module = ConvTranspose2d(*arguments, device="meta", algorithm=algorithm, precision=precision)
    module.weight = torch.nn.Parameter(weight)
    if bias is not None:
        module.bias = torch.nn.Parameter(bias)
    return module


def _forward(module: torch.nn.ConvTranspose2d, data: _Data) -> torch.Tensor:
    with torch.no_grad():
        return module(data.x)


def _both(module: torch.nn.ConvTranspose2d, data: _Data, grad_output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of input, weight and bias."""
    return torch.autograd.grad(module(data.x), (data.x, *module.parameters()), grad_output)


def _check(row: Row, module: torch.nn.ConvTranspose2d, data: _Data) -> Row:
    """Fill in the errors."""
    try:
        output = _forward(module, data)
        grad_input, *grads = _both(module, data, data.masked)
    except (NotImplementedError, torch.cuda.OutOfMemoryError) as error:
        return replace(row, skipped=str(error).splitlines()[0])
    results = output[data.images], grad_input[data.images], *grads
    of_output, *others = (relative_error(*pair) for pair in zip(results, data.references, strict=True))
    return replace(row, error=of_output, gradient_error=next((one for one in others if one != one), max(others)))


def _with_times(
    rows: Sequence[Row], modules: Mapping[str, torch.nn.ConvTranspose2d], data: _Data, device: torch.device, step: Step
) -> list[Row]:
    """Fill in times and ratios of the rows whose result is right; the first row is torch's."""
    right = [row.algorithm for row in rows if row.skipped is None and not row.wrong]

    def medians(run: Callable[..., object], *arguments: Any) -> dict[str, float]:
        def timed(name: str) -> None:
            torch.backends.cudnn.benchmark = name == BASELINE
            run(modules[name], *arguments)

        return dict(zip(right, medians_ms([partial(timed, name) for name in right], device), strict=True))

    def ratio(times: dict[str, float], row: Row) -> float | None:
        comparable = row.algorithm != BASELINE and row.precision == rows[0].precision
        return times[BASELINE] / times[row.algorithm] if comparable and {BASELINE, row.algorithm} <= {*times} else None

    step("forward times")
    times = medians(_forward, data)
    rows = [replace(row, forward_ms=times.get(row.algorithm), forward_ratio=ratio(times, row)) for row in rows]
    step("forward and backward times")
    times = medians(_both, data, data.grad_output)
    return [replace(row, both_ms=times.get(row.algorithm), both_ratio=ratio(times, row)) for row in rows]


def _workspace_bytes(passes: Sequence[Algorithm], config: Config) -> int | None:
    """Most bytes of temporary memory that a pass of the algorithm takes; None if torch manages the memory."""
    ours = [pair for pair in zip(passes, get_args(Direction), strict=True) if pair[0].name != "native"]
    return max((algorithm.workspace_bytes(config, direction) for algorithm, direction in ours), default=None)
