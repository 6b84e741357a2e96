"""``explain`` for problems, layers and models: which kernel computes each and why, and torch's time beside ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gemmconv import pairs, selection, tuned, validation
from gemmconv.algorithms import ALGORITHMS, Algorithm
from gemmconv.convert import LAYERS
from gemmconv.device import named
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Choice, Config, Direction, Precision
from gemmconv.kernels.forms import launches
from gemmconv.kernels.program import Program
from gemmconv.ops import volumes
from gemmconv.ops.autocast import current_dtype
from gemmconv.ops.schemas import is_channels_last
from gemmconv.ops.volumes import Volume
from gemmconv.rank import choose_way, image_problems
from gemmconv.selection import BY_NAME, MICROSECONDS, NAMES, NATIVE
from gemmconv.warmup import preserve_state, recording

Compilations = tuple[tuple[str, tuple[tuple[str, str | int], ...]], ...]  # sources with their sorted macros

_MOST_STEPS = 12  # most steps of a program that a report lists
_PASSES = {"forward": "forward", "input_grad": "gradient of the input", "weight_grad": "gradient of the weight"}


@dataclass(frozen=True)
class Explanation:
    """Why a configuration is computed the way it is. ``str()`` gives a report.

    Attributes:
        algorithm: name of the algorithm chosen for the pass.
        kernel: its kernel: the source under csrc/ without ending, or the algorithm's name if it has no kernels.
        tile: fields of the tile that the kernel is specialised by, as ``name=value``, with spaces between.
        reasons: for every algorithm, why it was or was not chosen.
        kernels: for every kernel that the device may take, its tile and estimate, or why it cannot serve the layer.
        config: the configuration that was asked for.
        direction: the pass: ``"forward"``, ``"input_grad"`` or ``"weight_grad"``.
        workspace_bytes: for every able algorithm, bytes of temporary memory of a call.
        gradients: names of the algorithms of the input's and the weight's gradient when a backward pass wants both.
        program: the steps of the call; None for torch's operator, and on the CPU.
        gradients_turned: whether tensors in NCHW are transposed so that both gradients compute in channels_last.
        compilations: the kernels that a first call with tensors in this format compiles: sources and sorted macros.
    """

    algorithm: str
    kernel: str
    tile: str
    reasons: dict[str, str]
    kernels: dict[str, str]
    config: Config
    direction: Direction
    workspace_bytes: dict[str, int]
    gradients: tuple[str, str]
    program: Program | None = None
    gradients_turned: bool = False
    compilations: Compilations = ()

    def __str__(self) -> str:
        p, c = self.config.problem, self.config
        itemsize, dtype = c.dtype.itemsize, validation.short_name(c.dtype)
        input_grad, weight_grad = self.gradients
        backward = input_grad if input_grad == weight_grad else f"{input_grad} (input) and {weight_grad} (weight)"
        turned = ", in channels_last between transposes" * self.gradients_turned
        lines = [
            f"conv_transpose2d {list(p.input_shape)} x {list(p.weight_shape)} -> {list(p.output_shape)}, "
            f"{dtype} ({c.precision}) on {c.device}{', channels_last' * c.channels_last}",
            f"  work     {p.useful_flops:,} flops, at least {p.least_bytes(itemsize):,} bytes moved, "
            f"{p.useful_flops / max(1, p.least_bytes(itemsize)):.1f} flops a byte",
            f"  columns  {p.column_bytes(itemsize):,} bytes if all were written at once, {p.gemm_batch} products of "
            f"{p.gemm_m} x {p.gemm_n} x {p.gemm_k}",
            f"  chosen   {self.algorithm} ({_PASSES[self.direction]}); for a whole backward pass {backward}{turned}",
        ]
        if c.device.type == "cuda" or "/" in self.kernel:
            gpu = f", for an {c.spec.name}" if c.device.type == "cuda" else ""
            lines.append(f"  kernel   {self.kernel} {self.tile}".rstrip() + gpu)
        if self.program is not None:
            head, *steps = str(self.program).splitlines()
            if len(steps) > _MOST_STEPS:
                steps = [*steps[:_MOST_STEPS], f"  and {len(steps) - _MOST_STEPS} more"]
            lines += [f"  program  {head}", *(f"         {step}" for step in steps)]
            count = len(self.compilations)
            lines.append(f"  compiles {count} kernel{'s' * (count != 1)}, unless they are in the cache")
        for name, reason in self.reasons.items():
            memory = f"; workspace {self.workspace_bytes[name]:,} bytes" if self.workspace_bytes.get(name) else ""
            lines.append(f"  {name:<12} {reason}{memory}")
        lines += [f"    {name:<26} {text}" for name, text in self.kernels.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class LayerExplanation:
    """How one call of a layer is computed; ``str()`` gives a report.

    Attributes:
        name: where the layer is in the model; empty for a layer alone.
        layer: its text.
        input_shape: of the call.
        algorithm: the algorithm of the call; "native" for a volume that torch's operator computes.
        calls: an explanation for each problem of images that a call is computed as; a volume may have several.
        product: the kernel for volumes that computes a volume as one product; None for others.
        volume: the configuration of such a volume.
    """

    name: str
    layer: str
    input_shape: tuple[int, ...]
    algorithm: str
    calls: tuple[Explanation, ...]
    product: Choice | None = None
    volume: Config | None = None

    def __str__(self) -> str:
        text = f"{self.layer} on {list(self.input_shape)}: {self.algorithm}"
        if self.product is not None:
            text += f", as one product by {self.product.kernel.name}, which is expected to be faster than these images:"
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
            that need not be there. See gemmconv.explain.explain_problem.

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
    if isinstance(subject, LAYERS):
        if len(inputs) != 1:
            rule = "be followed by its input, as a tensor or a shape"
            validation.fail(TypeError, "explain", "a layer", rule, f"{len(inputs)} more arguments")
        return _of_layer("", subject, inputs[0], options)
    names: dict[Any, str] = {one: name for name, one in subject.named_modules() if isinstance(one, LAYERS)}
    found: list[LayerExplanation] = []

    def record(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        input = arguments[0] if arguments else named["input"]
        found.append(_of_layer(names[layer], layer, input, options))

    with preserve_state(subject), torch.no_grad(), recording(names, record):
        subject(*inputs)
    return ModelExplanation(tuple(found))


def explain_problem(
    problem: Problem,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    algorithm: str = "auto",
    precision: Precision | None = None,
    workspace_limit: int | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
    bias: bool = False,
    direction: Direction = "forward",
    gpu: str | None = None,
) -> Explanation:
    """Say which algorithm and kernel a call takes for a problem, and why.

    Args:
        problem: the geometry.
        dtype: element type.
        device: where the tensors would be; no device is touched.
        algorithm, precision, workspace_limit: see ConvTranspose2d.
        memory_format: format of input and output, ``torch.contiguous_format`` or ``torch.channels_last``.
        bias: whether the call has a bias.
        direction: the pass: ``"forward"``, ``"input_grad"`` or ``"weight_grad"``.
        gpu: name of a GPU, such as ``"A100"``, in place of the device's; the machine need not have it.

    Raises:
        ValueError: an unknown algorithm, precision, memory format, direction or GPU, or a workspace limit below 1 byte.
        TypeError, RuntimeError: a dtype or a problem that no call can have.
        NotImplementedError: an integer dtype, or the algorithm cannot serve the problem.

    >>> problem = Problem(8, 256, 128, 1, (32, 32), (4, 4), stride=(2, 2), padding=(1, 1))
    >>> explain_problem(problem, algorithm="gemm_col2im").algorithm
    'gemm_col2im'
    >>> explain_problem(problem, device="cuda").algorithm
    'fused'
    >>> explain_problem(problem, gpu="H100", dtype=torch.float16, direction="weight_grad").kernel
    'sm90/wgrad_nhwc'
    >>> explain_problem(problem, gpu="A100").kernel
    'conv/gemm_mma'
    """
    problem = validation.made_problem("explain", problem, dtype)
    validation.choice("explain", algorithm, NAMES, precision, workspace_limit)
    if memory_format not in (torch.contiguous_format, torch.channels_last):
        known = "torch.contiguous_format or torch.channels_last"
        raise ValueError(f"explain: memory_format must be {known}, got {memory_format}")
    if direction not in tuple(_PASSES):
        raise ValueError(f"explain: direction must be one of {', '.join(_PASSES)}, got {direction!r}")
    where = validation.place("explain", "cuda" if gpu is not None else device)
    settings = precision, workspace_limit, memory_format, bias, algorithm
    config = selection.current_config(problem, dtype, where, *settings, spec=None if gpu is None else named(gpu))
    chosen = selection.choose(config, algorithm, "explain", direction)
    gradients = pairs.choose_pair(config, config, algorithm, "explain")
    reasons, entry = {}, tuned.entry_of(config, direction)
    for candidate, rule in selection.preference(config, direction):
        if (refusal := candidate.why_not(config)) is not None:
            reasons[candidate.name] = f"cannot serve it: {refusal}"
            continue
        if entry is not None and candidate.name in entry.microseconds:
            rule = f"measured: {entry.microseconds[candidate.name]:,.1f} us with {list(entry.size)}; {rule}"
        if candidate is NATIVE and where.type == "cuda":
            rule += "; cuDNN's deterministic kernels" if config.deterministic else "; torch's own settings"
        reasons[candidate.name] = f"asked for; {rule}" if candidate is chosen and algorithm != "auto" else rule
    made = chosen.choice(config, direction)
    assert made is not None
    program = made.program(config, direction) if where.type == "cuda" else None
    return Explanation(
        algorithm=chosen.name,
        kernel=made.kernel.name,
        tile=made.tile_text,
        reasons=reasons,
        kernels={name: text for a in ALGORITHMS for name, text in _kernel_reports(a, config, direction)},
        config=config,
        direction=direction,
        workspace_bytes={a.name: a.workspace_bytes(config, direction) for a in ALGORITHMS if a.why_not(config) is None},
        gradients=(gradients.input_grad.name, gradients.weight_grad.name),
        program=program,
        gradients_turned=gradients.via_channels_last,
        compilations=() if program is None else compilations_of(program, config),
    )


def compilations_of(program: Program, config: Config) -> Compilations:
    """The kernels that a call of a program compiles for tensors in the configuration's format, without duplicates."""
    p = config.problem
    shapes = {"input": p.input_shape, "weight": p.weight_shape, "grad_output": p.output_shape}
    of: dict[str, Any] = {"dtype": config.dtype, "device": "meta", "memory_format": config.memory_format}
    tensors = [torch.empty(shapes[name], **of) if name in shapes else None for name in program.arguments]
    steps = launches(program, tuple(tensors), config.device)
    return tuple(dict.fromkeys((step.source, tuple(sorted(step.macros.items()))) for step in steps))


def _kernel_reports(algorithm: Algorithm, config: Config, direction: Direction) -> Iterator[tuple[str, str]]:
    """For each kernel of an algorithm with several: its tile and estimate, or why it cannot compute the pass."""
    if len(algorithm.kernels) == 1:
        return
    refusal = algorithm.why_not(config, direction)
    for kernel in algorithm.kernels_for(config):
        if direction not in kernel.directions:
            continue
        if (made := algorithm.choice_of(kernel, config, direction)) is not None:
            packed = kernel.packed_weight_bytes(config, direction)
            packed_text = f"; keeps {packed:,} bytes of packed weights" if packed else ""
            yield kernel.name, f"estimated at {MICROSECONDS * made.seconds:,.0f} us; {made.tile_text}{packed_text}"
        elif (reason := kernel.why_not(config, direction)) != refusal:  # the algorithm's own reason is reported already
            yield kernel.name, f"not for it: {reason}"


def _of_layer(name: str, layer: Any, input: Tensor | Sequence[int], options: dict[str, Any]) -> LayerExplanation:
    """The explanation of a layer's call on a tensor, or on one of this shape."""
    rank = len(layer.kernel_size)
    given_shape = getattr(input, "shape", input)  # of a tensor or an array
    if not isinstance(given_shape, Sequence) or isinstance(given_shape, str):
        validation.fail(TypeError, "explain", "input", "be a tensor or a shape", repr(input))
    shape = tuple(validation.integer("explain", "an extent of input", extent) for extent in given_shape)
    shape = (1, *shape) if len(shape) == 1 + rank else shape
    geometry = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
    problem = validation.problem("explain", shape, layer.weight.shape, geometry)
    dtype = current_dtype(input) if isinstance(input, Tensor) else layer.weight.dtype
    given = {"device": layer.weight.device, "dtype": dtype, "bias": layer.bias is not None}
    given |= {one: getattr(layer, one) for one in ("algorithm", "precision", "workspace_limit") if hasattr(layer, one)}
    tensors = [one for one in (input, layer.weight) if isinstance(one, Tensor) and one.dim() == 2 + rank]
    if rank > 1 and any(map(is_channels_last, tensors)):
        given["memory_format"] = torch.channels_last
    given |= options
    calls = tuple(explain_problem(one, **given) for one in image_problems(problem))
    config, algorithm = calls[0].config, calls[0].algorithm
    if rank == 3 and given.get("algorithm", "auto") == "auto":
        requested = given.get("workspace_limit"), given.get("precision")
        volume = Volume(problem, config.dtype, config.device, config.precision, config.channels_last, *requested)
        way, of_volume = choose_way(volume, spec=config.spec), volume.config(config.spec)  # of the named GPU, if any
        if way == "product" and (choice := volumes.choice_of(of_volume)) is not None:
            algorithm = choice.kernel.name if choice.kernel.name in BY_NAME else "fused"
            return LayerExplanation(name, str(layer), shape, algorithm, calls, choice, of_volume)
        algorithm = algorithm if way == "images" else "native"
    return LayerExplanation(name, str(layer), shape, algorithm, calls)


def _row(one: LayerExplanation) -> tuple[str, ...]:
    """A line of the table: times and workspace of all calls together."""
    ours = sum(BY_NAME[call.algorithm].estimate(call.config, call.direction) for call in one.calls)
    theirs = sum(NATIVE.estimate(call.config, call.direction) for call in one.calls)
    compiled = sum(len(call.compilations) for call in one.calls)
    workspace = max(call.workspace_bytes.get(call.algorithm, 0) for call in one.calls)
    kernels = dict.fromkeys(call.kernel for call in one.calls if call.algorithm == one.algorithm) or ("native",)
    if one.product is not None and one.volume is not None:
        workspace = one.product.kernel.workspace_bytes(one.volume, "forward", one.product.tile)
        ours, kernels, compiled = one.product.seconds, (one.product.kernel.name,), 1 + (one.algorithm == "fused")
    texts = (f"{MICROSECONDS * seconds:,.0f}" if seconds < math.inf else "-" for seconds in (ours, theirs))
    size = "x".join(map(str, one.input_shape))
    return one.name or "-", size, one.algorithm, "+".join(kernels), *texts, f"{workspace:,}", str(compiled)
