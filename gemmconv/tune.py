"""Measures which algorithm, kernel and tile is fastest for each layer of a model, on the user's own device."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gemmconv import selection, tuned, validation
from gemmconv.algorithms import ALGORITHMS
from gemmconv.compare.timing import cuda_rounds, medians_ms
from gemmconv.explain import compilations_of
from gemmconv.kernels.base import Choice, Config, Direction, Pass, strides_of
from gemmconv.kernels.conv import gemm_mma
from gemmconv.module import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from gemmconv.ops import volumes
from gemmconv.ops.autocast import current_dtype
from gemmconv.ops.configs import config_of
from gemmconv.ops.gradients import prepare_gradients
from gemmconv.ops.schemas import Options, checked_problem, is_channels_last, without_data
from gemmconv.rank import Way, compute, of_height_1
from gemmconv.tuned import Entry
from gemmconv.warmup import check_step, recording, run_step, show_progress, trial, with_progress

_MOST_TILES = 6  # measured beside torch's operator: those with the least estimates of all kernels
_MOST_OF_A_KERNEL = 3  # tiles measured of one kernel
_ROUNDS, _CALLS = 9, 20  # samples of a candidate; calls in a row when the host's time is measured

Run = Callable[[], object]
C = TypeVar("C")  # what tells candidates apart


@dataclass(frozen=True)
class _Call:
    """The configuration of a layer's call, and which gradients its backward pass computes."""

    config: Config
    of_input: bool
    of_weight: bool

    @property
    def passes(self) -> tuple[Direction, ...]:
        gradients: tuple[tuple[Direction, bool], ...] = ("input_grad", self.of_input), ("weight_grad", self.of_weight)
        return ("forward", *(direction for direction, is_needed in gradients if is_needed))


@dataclass(frozen=True)
class _Volume:
    """A call of a volume's layer: its configuration, whether it has a bias, and whether gradients are recorded."""

    config: Config
    bias: bool
    is_trained: bool
    options: tuple[tuple[str, Any], ...]


def tune(model: nn.Module, *example_inputs: Any, backward: bool = True, path: str | Path | None = None) -> list[Entry]:
    """Measure what is fastest for each layer of a model, and let ``auto`` choose it from now on.

    The model is run once to record the arguments of its layers. For each pass of each layer, and for both gradients
    together, the few candidates with the least estimates are timed beside torch's operator, on the model's device: one
    or two seconds for each layer, and the time to compile them. The choices are written to a file, which any process
    may load (:func:`load_tuned`) and to which another call adds. They hold for their layers on this kind of device, for
    inputs with half to twice as many pixels in the batch. The model's state is restored afterwards.

    Args:
        model: any module, converted, on its device. Layers with another ``algorithm`` than ``"auto"`` are left out.
            For volumes the ways of computing them are timed: as images, as one product, by torch's operator.
        example_inputs: its arguments.
        backward: whether it is trained, so that gradients are measured too.
        path: path of the file; None for ``tuned.json`` in the cache's folder.

    Returns:
        An entry for each pass that was measured, with the microseconds of each algorithm.

    Raises:
        TypeError: ``model`` is no torch.nn.Module, or ``backward`` no bool.
        ValueError: the file is there and was not written by this function, or no output requires gradients.
    """
    check_step("tune", model, backward)
    where = tuned.default_path() if path is None else Path(path)
    if where.exists():
        tuned.read(where)  # raises before the measurements if it is another file
    calls, of_volumes = _calls_of(model, example_inputs, backward)
    steps = [(call, direction) for call in calls for direction in call.passes]
    plans = [(call, direction, _candidates(call.config, direction)) for call, direction in steps]
    _compile(plans)
    found: list[Entry] = []
    for call, direction, candidates in with_progress(plans, len(plans), "tunes", "pass"):
        entry = _measure_pass(call.config, direction, candidates)
        if entry is not None:
            found.append(entry)
            tuned.take([entry])
        if direction == call.passes[-1] and call.of_input and call.of_weight:
            found.append(_measure_gradients(call.config))
            tuned.take(found[-1:])
    for volume in of_volumes:
        entries = _measure_volume(volume)
        found += entries
        tuned.take(entries)
    tuned.write(where, found)
    return found


def load_tuned(path: str | Path | None = None) -> int:
    """Let ``auto`` take the choices of a file that :func:`tune` wrote. Nothing is measured.

    Layers that were called before and compiled graphs use them, too. Entries of another version of gemmconv, and of
    kernels that no longer exist, are ignored with a line in the log ``gemmconv``.

    Args:
        path: path of the file; None for ``tuned.json`` in the cache's folder.

    Returns:
        The number of entries.

    Raises:
        OSError: the file cannot be read.
        ValueError: it was not written by :func:`tune`.
    """
    entries = tuned.read(tuned.default_path() if path is None else Path(path))
    tuned.take(entries)
    return len(entries)


def forget_tuned() -> None:
    """Drop all tuned choices, so that ``auto`` chooses by estimates alone."""
    tuned.forget()


def _calls_of(model: nn.Module, inputs: Any, backward: bool) -> tuple[list[_Call], list[_Volume]]:
    """The distinct calls of a model's layers, recorded in one step of the model."""
    found: dict[_Call, None] = {}
    of_volumes: dict[_Volume, None] = {}

    def record(layer: Any, arguments: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        input, weight = arguments[0] if arguments else named["input"], layer.weight
        if layer.algorithm != "auto" or named.get("output_size") is not None or len(arguments) > 1:
            return  # output_padding is not the layer's own
        dtype = current_dtype(input)
        if isinstance(layer, ConvTranspose3d):
            of_volumes[_volume_of(layer, input, dtype, backward)] = None
            return
        given = [getattr(layer, name) for name in Options._fields]
        if isinstance(layer, ConvTranspose1d):  # an image of height 1
            input, weight, given[:5] = input.unsqueeze(-2), weight.unsqueeze(-2), of_height_1(*given[:5])
        input = input if input.dim() == 4 else input.unsqueeze(0)
        tensors = tuple(without_data(one, dtype) for one in (input, weight, layer.bias))
        options = Options(*given)
        problem = checked_problem("conv_transpose2d", tensors, None, options)
        config = config_of(problem, tensors[0], tensors[1], options, layer.bias is not None)
        needs = backward and input.requires_grad, backward and layer.weight.requires_grad
        config = replace(config, trained=needs[1] and input.is_cpu)
        found[_Call(config, *needs)] = None

    layers = [one for one in model.modules() if isinstance(one, ConvTranspose1d | ConvTranspose2d | ConvTranspose3d)]
    with trial(model, inputs, backward), recording(layers, record):
        run_step(model, inputs, backward, "tune")
    return list(found), list(of_volumes)


def _volume_of(layer: ConvTranspose3d, input: Tensor, dtype: torch.dtype, backward: bool) -> _Volume:
    """The call of a volume's layer; ``dtype`` is what autocast makes of the input."""
    input = input if input.dim() == 5 else input.unsqueeze(0)
    geometry: Any = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
    problem = validation.problem("tune", input.shape, layer.weight.shape, *geometry)
    precision = layer.precision or selection.torch_precision(dtype, input.device)
    last = is_channels_last(input) or is_channels_last(layer.weight)
    config = volumes.config_of(problem, dtype, input.device, precision, last)
    options = tuple((name, getattr(layer, name)) for name in ("algorithm", "precision", "workspace_limit"))
    return _Volume(config, layer.bias is not None, backward and layer.weight.requires_grad, options)


def _measure_volume(call: _Volume) -> list[Entry]:
    """Time a volume in each way, without gradients and, if it is trained, a whole step; return the entries."""
    config, p = call.config, call.config.problem
    last = config.memory_format is torch.channels_last
    kind: dict[str, Any] = {"dtype": config.dtype, "device": config.device, "requires_grad": call.is_trained}
    input, weight = (torch.randn(shape, **kind) for shape in (p.input_shape, p.weight_shape))
    bias = torch.randn(p.out_channels, **kind) if call.bias else None
    if last:
        input = input.detach().contiguous(memory_format=torch.channels_last_3d).requires_grad_(call.is_trained)
    leaves = [one for one in (input, weight, bias) if one is not None]
    ways: list[Way] = ["torch", "images"]
    if not last and gemm_mma.KERNEL.why_not(config, "forward") is None:
        ways.append("product")

    def run(way: Way, direction: Pass) -> None:
        with torch.set_grad_enabled(direction == "grads"):
            output = compute(way, input, weight, bias, config, dict(call.options))
            if direction == "grads":
                torch.autograd.grad(output.sum(), leaves)

    found = []
    directions: tuple[Pass, ...] = ("forward", "grads") if call.is_trained else ("forward",)
    for direction in directions:

        def prepare(way: Way, of: Pass = direction) -> Run:
            return partial(run, way, of)

        runs = _able(ways, prepare, config)
        if not runs:
            continue
        able = [way for way, _ in runs]
        seconds, fastest = _time_all([one for _, one in runs], [way == "torch" for way in able], config.device)
        found.append(_entry(config, direction, (able[fastest],), zip(able, seconds, strict=True)))
    return found


def _able(candidates: Iterable[C], prepare: Callable[[C], Run], config: Config) -> list[tuple[C, Run]]:
    """The candidates that run, each after a first run.

    One that raises, as for want of memory, is left out with a line in the log.
    """
    runs = []
    for candidate in candidates:
        try:
            run = prepare(candidate)
            run()
        except (RuntimeError, NotImplementedError) as error:
            tuned.log.info("tune leaves out %s of %s: %s", candidate, config.problem, error)
        else:
            runs.append((candidate, run))
    return runs


Candidate = tuple[str, Choice]  # the algorithm's name


def _candidates(config: Config, direction: Direction) -> list[Candidate]:
    """torch's operator, and the kernels' tiles with the least estimates."""
    found: list[tuple[float, int, Candidate]] = []
    for algorithm in ALGORITHMS:
        if algorithm.why_not(config, direction) is not None or not algorithm.can_serve(config):
            continue
        for kernel in algorithm.kernels_for(config):
            if direction not in kernel.directions or kernel.why_not(config, direction) is not None:
                continue
            tiles = ((kernel.seconds(config, direction, one), one) for one in kernel.tiles(config, direction))
            for _, tile in heapq.nsmallest(_MOST_OF_A_KERNEL, tiles, key=lambda item: item[0]):
                seconds = kernel.expected(config, direction, tile)  # to compare with other kernels' tiles
                found.append((seconds, len(found), (algorithm.name, Choice(kernel, tile, seconds))))
    ours = [one for *_, one in sorted(one for one in found if one[2][0] != "native")]
    return [*(one for *_, one in found if one[0] == "native"), *ours[:_MOST_TILES]]


def _compile(plans: Sequence[tuple[_Call, Direction, list[Candidate]]]) -> None:
    """Compile the kernels of all candidates on GPUs, on all cores."""
    if not any(call.config.device.type == "cuda" for call, *_ in plans):
        return
    from gemmconv.runtime.launch import architecture, compile_ahead

    wanted: dict[str, dict[Any, None]] = {}
    for call, direction, candidates in plans:
        for _, choice in candidates:
            program = choice.program(call.config, direction)
            if program is not None:
                arch = architecture(call.config.device.index or 0)
                wanted.setdefault(arch, {}).update(dict.fromkeys(compilations_of(program, call.config)))
    futures = [compile_ahead([(name, dict(macros)) for name, macros in one], arch) for arch, one in wanted.items()]
    show_progress([future for some in futures for _, future in some])


def _tensors_of(config: Config) -> dict[str, Tensor]:
    """Random input, weight and grad_output of a layer, in its memory format."""
    p = config.problem
    shapes = {"input": p.input_shape, "weight": p.weight_shape, "grad_output": p.output_shape}
    kind: dict[str, Any] = {"dtype": config.dtype, "device": config.device}
    formats = {name: (shape, strides_of(shape, config.memory_format)) for name, shape in shapes.items()}
    return {name: torch.empty_strided(*one, **kind).normal_() for name, one in formats.items()}


# The tensors that each pass takes, in order.
OPERANDS: dict[Pass, tuple[str, ...]] = {
    "forward": ("input", "weight"),
    "input_grad": ("grad_output", "weight"),
    "weight_grad": ("grad_output", "input"),
    "grads": ("grad_output", "input", "weight"),
}


def _measure_pass(config: Config, direction: Direction, candidates: Sequence[Candidate]) -> Entry | None:
    """Time the candidates of a pass, and return its entry; None where none of them runs."""
    tensors = _tensors_of(config)
    operands = [tensors[name] for name in OPERANDS[direction]]
    bias: list[Any] = [] if direction != "forward" else [None]
    if direction == "forward" and config.bias:
        bias = [torch.zeros(config.problem.out_channels, dtype=config.dtype, device=config.device)]

    def prepare(candidate: Candidate) -> Run:
        _, choice = candidate
        return partial(choice.kernel.prepare(config, direction, choice.tile), *operands, *bias)

    runs = _able(candidates, prepare, config)
    if not runs:
        return None
    seconds, fastest = _time_all([run for _, run in runs], [name == "native" for (name, _), _ in runs], config.device)
    (best, choice), _ = runs[fastest]
    times = [(name, one) for ((name, _), _), one in zip(runs, seconds, strict=True)]
    return _entry(config, direction, (best,), times, kernel=choice.kernel.name, tile=choice.tile_text)


def _measure_gradients(config: Config) -> Entry:
    """Time both gradients as chosen one by one, as chosen together by estimates, and by torch; return the entry."""
    torchs = next(algorithm for algorithm in ALGORITHMS if algorithm.name == "native")
    directions: tuple[Direction, ...] = ("input_grad", "weight_grad")
    first, second = (selection.choose(config, "auto", "tune", direction) for direction in directions)
    ways = [
        selection.Gradients(torchs, torchs, share=False, at_once=not config.deterministic),
        selection.choose_gradients(config, config, "auto", "tune"),
        selection.paired(first, second, config),
    ]
    ways += [
        selection.Gradients(one, one, share=False, at_once=True)
        for one in ALGORITHMS
        if one.why_not(config, "weight_grad") is None and one.grads_estimate(config, config) < math.inf
    ]
    tensors = _tensors_of(config)
    operands = [tensors[name] for name in OPERANDS["grads"]]

    def prepare(way: selection.Gradients) -> Run:
        return partial(prepare_gradients(way, config, config, tuple(operands)), *operands)

    runs = _able(dict.fromkeys(ways), prepare, config)
    seconds, fastest = _time_all([run for _, run in runs], [way == ways[0] for way, _ in runs], config.device)
    best = runs[fastest][0]
    names = ["+".join(dict.fromkeys((way.input_grad.name, way.weight_grad.name))) for way, _ in runs]
    how = {"share": best.share, "at_once": best.at_once, "turned": best.via_channels_last}
    return _entry(
        config, "grads", (best.input_grad.name, best.weight_grad.name), zip(names, seconds, strict=True), how=how
    )


def _entry(
    config: Config, direction: Pass, algorithms: tuple[str, ...], seconds: Iterable[tuple[str, float]], **more: Any
) -> Entry:
    least: dict[str, float] = {}
    for name, one in seconds:
        least[name] = min(least.get(name, math.inf), round(1e6 * one, 2))
    size = config.problem.batch, *config.problem.input_size
    return Entry(tuned.key_of(config, direction), size, algorithms, microseconds=least, **more)


def _time_all(runs: Sequence[Run], are_torchs: Sequence[bool], device: torch.device) -> tuple[list[float], int]:
    """The seconds of each candidate, and the index of the one to take.

    On a GPU, a candidate's time is the device's or the host's, whichever is longer, since a step waits for both; one
    that keeps the device longer than torch's operator is not taken. On a CPU it is wall-clock time.
    """
    if device.type != "cuda":
        seconds = [1e-3 * one for one in medians_ms(runs, device)]
        return seconds, seconds.index(min(seconds))
    of_device = [1e-3 * median(times) for times in cuda_rounds(runs, device, _ROUNDS)]
    most = min((one for one, is_torchs in zip(of_device, are_torchs, strict=True) if is_torchs), default=math.inf)
    waited = [max(one, _host_seconds(run, device)) for one, run in zip(of_device, runs, strict=True)]
    able = [i for i, one in enumerate(of_device) if one <= most] or range(len(runs))
    return waited, min(able, key=lambda i: (waited[i], of_device[i]))


def _host_seconds(run: Run, device: torch.device) -> float:
    """Seconds that the host spends on a call, among several in a row that do not wait for the device."""
    torch.cuda.synchronize(device)
    torch.cuda._sleep(10_000_000)
    start = time.perf_counter()
    for _ in range(_CALLS):
        run()
    seconds = (time.perf_counter() - start) / _CALLS
    torch.cuda.synchronize(device)
    return seconds
