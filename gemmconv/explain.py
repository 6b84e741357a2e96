"""``explain`` for layers and models: which kernel computes each, why, and beside torch's operator how fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gemmconv import validation
from gemmconv.algorithms import ALGORITHMS
from gemmconv.geometry import Problem
from gemmconv.kernels.conv import gemm_mma
from gemmconv.module import RANKS
from gemmconv.ops import volumes
from gemmconv.ops.autocast import current_dtype
from gemmconv.rank import choose_way, image_problems
from gemmconv.selection import Explanation, explain_problem
from gemmconv.warmup import preserve_state, recording

_LAYERS = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d


@dataclass(frozen=True)
class LayerExplanation:
    """How one call of a layer is computed; ``str()`` gives a report.

    Attributes:
        name: where the layer is in the model; empty for a layer alone.
        layer: its text.
        input_shape: of the call.
        algorithm: the algorithm of the call; "native" for a volume that torch's operator computes.
        calls: an explanation for each problem of images that a call is computed as; a volume may have several.
        product: expected seconds of a volume that is one product; None for others.
    """

    name: str
    layer: str
    input_shape: tuple[int, ...]
    algorithm: str
    calls: tuple[Explanation, ...]
    product: float | None = None

    def __str__(self) -> str:
        text = f"{self.layer} on {list(self.input_shape)}: {self.algorithm}"
        if self.product is not None:
            text += f", as one product by {gemm_mma.KERNEL.name}, which is expected to be faster than these images:"
        elif self.algorithm != self.calls[0].algorithm:
            text += ", since torch's operator is expected to be faster than these images:"
        return "\n".join([text, *map(str, self.calls)])


@dataclass(frozen=True)
class ModelExplanation:
    """How each call of a model's layers is computed, in the order of calls; ``str()`` gives a table."""

    layers: tuple[LayerExplanation, ...]

    def __str__(self) -> str:
        head = "layer", "input", "algorithm", "kernel", "expected, us", "torch, us", "workspace", "compiles"
        rows = [head, *map(_row, self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def explain(subject: Problem | nn.Module, *inputs: Any, **options: Any) -> Any:
    """Say which algorithm and kernel computes a problem, a layer or all layers of a model, and why.

    Args:
        subject: a Problem; a layer, torch's or gemmconv's, with its input as a tensor or a shape; or a model with its
            positional arguments, which is run once without gradients, and whose state is restored. An ``output_size``
            that a model gives to a layer is not seen.
        inputs: the input of the layer, or the arguments of the model.
        options: device, algorithm, precision, workspace_limit, memory_format, bias, dtype: of the call; a layer has its
            own. ``direction="input_grad"`` or ``"weight_grad"`` explains a gradient. ``gpu="A100"`` chooses for a GPU
            that need not be there. See gemmconv.selection.explain_problem.

    Returns:
        An Explanation, a LayerExplanation or a ModelExplanation, whose ``str()`` is a report.

    Raises:
        TypeError: another subject, or a layer without an input.
        ValueError, RuntimeError, NotImplementedError: options or inputs that no call can have.

    >>> print(explain(nn.ConvTranspose2d(256, 128, 4, stride=2), (8, 256, 32, 32), gpu="H100").algorithm)
    fused
    """
    if isinstance(subject, Problem):
        return explain_problem(subject, *inputs, **options)
    if not isinstance(subject, nn.Module):
        rule = "be a gemmconv.Problem, a layer or a torch.nn.Module"
        validation.fail(TypeError, "explain", "the first argument", rule, type(subject).__name__)
    if isinstance(subject, _LAYERS):
        if len(inputs) != 1:
            rule = "be followed by its input, as a tensor or a shape"
            validation.fail(TypeError, "explain", "a layer", rule, f"{len(inputs)} more arguments")
        return _of_layer("", subject, inputs[0], options)
    names: dict[Any, str] = {one: name for name, one in subject.named_modules() if isinstance(one, _LAYERS)}
    found: list[LayerExplanation] = []

    def record(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        input = arguments[0] if arguments else named["input"]
        found.append(_of_layer(names[layer], layer, input, options))

    with preserve_state(subject), torch.no_grad(), recording(names, record):
        subject(*inputs)
    return ModelExplanation(tuple(found))


def _of_layer(name: str, layer: Any, input: Tensor | Sequence[int], options: dict[str, Any]) -> LayerExplanation:
    """The explanation of a layer's call on a tensor, or on one of this shape."""
    rank = next(rank for kind, rank in RANKS.items() if isinstance(layer, kind))
    shape = tuple(input.shape if isinstance(input, Tensor) else input)
    shape = (1, *shape) if len(shape) == 1 + rank else shape
    geometry = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
    problem = validation.problem("explain", shape, layer.weight.shape, *geometry)
    dtype = current_dtype(input) if isinstance(input, Tensor) else layer.weight.dtype
    given = {"device": layer.weight.device, "dtype": dtype, "bias": layer.bias is not None}
    given |= {one: getattr(layer, one) for one in ("algorithm", "precision", "workspace_limit") if hasattr(layer, one)}
    tensors = [one for one in (input, layer.weight) if isinstance(one, Tensor)]
    form = torch.channels_last if rank < 3 else torch.channels_last_3d
    if rank > 1 and any(one.is_contiguous(memory_format=form) and not one.is_contiguous() for one in tensors):
        given["memory_format"] = torch.channels_last
    calls = tuple(explain_problem(one, **{**given, **options}) for one in image_problems(problem))
    config, algorithm = calls[0].config, calls[0].algorithm
    last = config.memory_format is torch.channels_last
    if rank == 3 and {**given, **options}.get("algorithm", "auto") == "auto":
        of_volume = volumes.config_of(problem, config.dtype, config.device, config.precision, last)
        of_volume = replace(of_volume, spec=config.spec)  # of the GPU that was named, where one was
        way = choose_way(of_volume)
        if way == "product" and (tile := gemm_mma.KERNEL.tile(of_volume, "forward")) is not None:
            seconds = gemm_mma.KERNEL.seconds(of_volume, "forward", tile)
            return LayerExplanation(name, str(layer), shape, "fused", calls, seconds)
        algorithm = algorithm if way == "images" else "native"
    return LayerExplanation(name, str(layer), shape, algorithm, calls)


def _row(one: LayerExplanation) -> tuple[str, ...]:
    """A line of the table: times and workspace of all calls together."""
    torchs = next(algorithm for algorithm in ALGORITHMS if algorithm.name == "native")
    ours, theirs, compiled = 0.0, 0.0, 0
    for call in one.calls:
        chosen = next(algorithm for algorithm in ALGORITHMS if algorithm.name == call.algorithm)
        ours += chosen.estimate(call.config, call.direction)
        theirs += torchs.estimate(call.config, call.direction)
        compiled += len(call.compilations)
    workspace = max(call.workspace_bytes.get(call.algorithm, 0) for call in one.calls)
    kernels = dict.fromkeys(call.kernel for call in one.calls if call.algorithm == one.algorithm) or ("native",)
    if one.product is not None:
        ours, kernels, compiled = one.product, (gemm_mma.KERNEL.name,), 2
    texts = (f"{1e6 * seconds:,.0f}" if seconds < math.inf else "-" for seconds in (ours, theirs))
    size = "x".join(map(str, one.input_shape))
    return one.name or "-", size, one.algorithm, "+".join(kernels), *texts, f"{workspace:,}", str(compiled)
