"""Measures which algorithm, kernel and tile is fastest for each layer of a model, on the user's own device."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gemmconv import pairs, selection, tuned
from gemmconv.algorithms import ALGORITHMS
from gemmconv.explain import compilations_of
from gemmconv.folder import make_writable
from gemmconv.kernels.base import PASSES, Choice, Config, Direction, Pass, strides_of
from gemmconv.module import ConvTranspose1d, ConvTranspose3d, Layer
from gemmconv.ops.autocast import current_dtype
from gemmconv.ops.configs import Convention, config_of
from gemmconv.ops.gradients import prepare_gradients
from gemmconv.ops.schemas import Options, checked_problem, is_channels_last, without_data
from gemmconv.ops.volumes import Volume, gradients_are_ours, program_of, volume_of
from gemmconv.rank import Way, settled
from gemmconv.rank import prepare as prepare_volume
from gemmconv.selection import NATIVE
from gemmconv.timing import Run, cpu_rounds, cuda_rounds
from gemmconv.tuned import Entry
from gemmconv.warmup import check_step, recording, run_step, show_progress, trial, with_progress

_MOST_TILES = 6  # measured beside torch's operator: those with the least estimates of all kernels
_MOST_OF_A_KERNEL = 3  # tiles measured of one kernel
_ROUNDS, _CALLS = 9, 20  # samples of a candidate; calls in a row when the host's time is measured

NamedChoice = tuple[str, Choice]  # an algorithm's name, and a kernel and tile of it
Step = tuple[Config, Pass, Volume | None]  # a pass of a layer, and its call if that is one on volumes


@dataclass(frozen=True)
class _Candidate:
    """One way of computing a pass."""

    name: str  # the algorithm or way, by which times are reported
    is_torchs: bool  # whether it is torch's operator, by whose time on the device others are limited
    prepare: Callable[[], Callable[..., object]]  # makes the call to be timed
    operands: Sequence[Any]  # the arguments of this call
    taken: dict[str, Any]  # the fields of the entry by which ``auto`` takes it


def tune(model: nn.Module, *example_inputs: Any, backward: bool = True, path: str | Path | None = None) -> list[Entry]:
    """Measure what is fastest for each layer of a model, and let ``auto`` choose it from now on.

    The model is run once to record the arguments of its layers. For each pass of each layer, and for both gradients
    together, the few candidates with the least estimates are timed beside torch's operator, on the model's device: one
    or two seconds for each layer, and the time to compile them. The choices are written to a file, which any process
    may load (:func:`gemmconv.load_tuned`) and to which another call adds. They hold for their layers on this kind of
    device, for inputs with half to twice as many pixels in the batch. The model's state is restored afterwards.

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
        OSError: the file cannot be written, which is found out before anything is measured.
    """
    check_step("tune", model, backward)
    where = tuned.default_path() if path is None else Path(path)
    # What tuned.write would raise is raised before anything is measured.
    if where.exists():
        tuned.read(where)
    make_writable(where.parent)
    steps = _steps_of(model, example_inputs, backward)
    of_kernels = [(config, one) for config, one, volume in steps if volume is None and one != "grads"]
    choices = {one: _choices(*one) for one in of_kernels}
    _compile(choices)
    found: list[Entry] = []
    for config, direction, volume in with_progress(steps, len(steps), "tunes", "pass"):
        if volume is not None:
            candidates = _ways(volume, config.bias, direction)
        elif direction == "grads":
            candidates = _pairs_of_algorithms(config)
        else:
            candidates = _kernels(config, direction, choices[config, direction])
        entries = _measure(config, direction, candidates)
        found += entries
        tuned.take(entries)
    tuned.write(where, found)
    return found


def _steps_of(model: nn.Module, inputs: Any, backward: bool) -> list[Step]:
    """The distinct passes of a model's layers, recorded in one step of the model; those of volumes come last."""
    of_images: dict[Step, None] = {}
    of_volumes: dict[Step, None] = {}

    def record(layer: Any, arguments: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        input, weight = arguments[0] if arguments else named["input"], layer.weight
        if layer.algorithm != "auto" or named.get("output_size") is not None or len(arguments) > 1 or not input.numel():
            return  # output_padding is not the layer's own, or the batch is empty
        dtype, of_weight = current_dtype(input), backward and weight.requires_grad
        input = input if input.dim() == weight.dim() else input.unsqueeze(0)
        options = Options(*layer._arguments_and_key()[0])
        if isinstance(layer, ConvTranspose3d):
            volume = volume_of(without_data(input, dtype), weight, *options[:5], *options[6:])
            volume = volume._replace(last=is_channels_last(input) or is_channels_last(weight))
            config = replace(volume.config(), bias=layer.bias is not None)
            passes: tuple[Pass, ...] = ("forward", "grads") if of_weight else ("forward",)
            of_volumes.update({(config, one, volume): None for one in passes})
            return
        if isinstance(layer, ConvTranspose1d):  # an image of height 1
            input, weight = input.unsqueeze(-2), weight.unsqueeze(-2)
        tensors = tuple(without_data(one, dtype) for one in (input, weight, layer.bias))
        problem = checked_problem("conv_transpose2d", tensors, None, options)
        config = config_of(problem, tensors[0], tensors[1], options, layer.bias is not None)
        config = replace(config, trained=of_weight and input.is_cpu)
        of_input = backward and input.requires_grad
        needed = True, of_input, of_weight, of_input and of_weight
        of_images.update({(config, one, None): None for one in compress(PASSES, needed)})

    layers = [one for one in model.modules() if isinstance(one, Layer)]
    with trial(model, inputs, backward), recording(layers, record):
        run_step(model, inputs, backward, "tune")
    return [*of_images, *of_volumes]


def _choices(config: Config, direction: Direction) -> list[NamedChoice]:
    """torch's operator, and the kernels' tiles with the least estimates."""
    ours: list[NamedChoice] = []
    torchs: list[NamedChoice] = []
    for algorithm in ALGORITHMS:
        if not selection.can_serve(algorithm, config, direction):
            continue
        for kernel in algorithm.kernels_for(config):
            if direction not in kernel.directions or kernel.why_not(config, direction) is not None:
                continue
            tiles = ((kernel.seconds(config, direction, one), one) for one in kernel.tiles(config, direction))
            for _, tile in heapq.nsmallest(_MOST_OF_A_KERNEL, tiles, key=lambda item: item[0]):
                seconds = kernel.expected(config, direction, tile)  # to compare with other kernels' tiles
                (torchs if algorithm is NATIVE else ours).append((algorithm.name, Choice(kernel, tile, seconds)))
    return [*torchs, *sorted(ours, key=lambda item: item[1].seconds)[:_MOST_TILES]]


def _compile(plans: Mapping[tuple[Config, Direction], Sequence[NamedChoice]]) -> None:
    """Compile the kernels of all choices on GPUs, on all cores."""
    if not any(config.device.type == "cuda" for config, _ in plans):
        return
    from gemmconv.runtime.launch import architecture, compile_ahead

    wanted: dict[str, list[Any]] = {}  # by architecture; compile_ahead drops duplicates
    for (config, direction), choices in plans.items():
        for _, choice in choices:
            if (program := choice.program(config, direction)) is not None:
                arch = architecture(config.device.index or 0)
                wanted.setdefault(arch, []).extend(compilations_of(program, config))
    futures = [compile_ahead([(name, dict(macros)) for name, macros in one], arch) for arch, one in wanted.items()]
    show_progress([future for some in futures for _, future in some])


# The tensors that each pass takes, in order.
OPERANDS: dict[Pass, tuple[str, ...]] = {
    "forward": ("input", "weight"),
    "input_grad": ("grad_output", "weight"),
    "weight_grad": ("grad_output", "input"),
    "grads": ("grad_output", "input", "weight"),
}


def _operands(config: Config, direction: Pass) -> list[Any]:
    """Random tensors for a pass of a layer, in its memory format; for a forward pass also its bias, or None."""
    p = config.problem
    shapes = {"input": p.input_shape, "weight": p.weight_shape, "grad_output": p.output_shape}
    kind: dict[str, Any] = {"dtype": config.dtype, "device": config.device}
    formats = [(shapes[name], strides_of(shapes[name], config.memory_format)) for name in OPERANDS[direction]]
    tensors = [torch.empty_strided(*one, **kind).normal_() for one in formats]
    if direction != "forward":
        return tensors
    return [*tensors, torch.zeros(p.out_channels, **kind) if config.bias else None]


def _kernels(config: Config, direction: Direction, choices: Sequence[NamedChoice]) -> Iterator[_Candidate]:
    """The candidates of a layer's pass: a kernel and a tile each."""
    operands = _operands(config, direction)
    for name, choice in choices:
        prepare = partial(choice.kernel.prepare, config, direction, choice.tile)
        taken = {"algorithms": (name,), "kernel": choice.kernel.name, "tile": choice.tile_text}
        yield _Candidate(name, name == "native", prepare, operands, taken)


def _pairs_of_algorithms(config: Config) -> Iterator[_Candidate]:
    """The candidates of a backward pass: torch's, chosen together by estimates, chosen one by one, and at once."""
    pair_of_torch = pairs.Gradients(NATIVE, NATIVE, at_once=not config.deterministic)
    candidates = [
        pair_of_torch,
        pairs.choose_pair(config, config, "auto", "tune"),
        pairs.one_by_one(config, config, "auto", "tune"),
        *(
            pairs.Gradients(one, one, at_once=True)
            for one in ALGORITHMS
            if one.why_not(config, "weight_grad") is None and one.grads_estimate(config, config) < math.inf
        ),
    ]
    operands = _operands(config, "grads")
    for pair in dict.fromkeys(candidates):
        prepare = partial(prepare_gradients, pair, config, config, tuple(operands), Convention())
        names = pair.input_grad.name, pair.weight_grad.name
        how = {"at_once": pair.at_once, "turned": pair.via_channels_last}
        taken = {"algorithms": names, "how": how}
        yield _Candidate("+".join(dict.fromkeys(names)), pair == pair_of_torch, prepare, operands, taken)


def _ways(volume: Volume, has_bias: bool, direction: Pass) -> Iterator[_Candidate]:
    """The candidates of a volume: its ways, without gradients, or for ``"grads"`` in a whole training step."""
    p, is_step = volume.problem, direction == "grads"
    kind: dict[str, Any] = {"dtype": volume.dtype, "device": volume.device, "requires_grad": is_step}
    input, weight = (torch.randn(shape, **kind) for shape in (p.input_shape, p.weight_shape))
    bias = torch.randn(p.out_channels, **kind) if has_bias else None
    if volume.last:
        input = input.detach().contiguous(memory_format=torch.channels_last_3d).requires_grad_(is_step)
    tensors = input, weight, bias
    leaves = [one for one in tensors if one is not None]

    def prepare(way: Way) -> Run:
        with torch.set_grad_enabled(is_step):
            prepared = prepare_volume(way, tensors, volume)

        def run() -> None:
            with torch.set_grad_enabled(is_step):
                output = prepared(*tensors)
                if is_step:
                    torch.autograd.grad(output.sum(), leaves)

        return run

    ways: list[Way] = ["torch", "images"]
    own_gradients = is_step and gradients_are_ours(volume.config(), (True, True, False))
    if not volume.last and (own_gradients or program_of(volume.config()) is not None):
        ways.append("product")
    for way in dict.fromkeys(settled(one, volume, is_step) for one in ways):
        yield _Candidate(way, way == "torch", partial(prepare, way), (), {"algorithms": (way,)})


def _measure(config: Config, direction: Pass, candidates: Iterable[_Candidate]) -> list[Entry]:
    """Time the candidates of a pass, each after a first run; return the entry of the best, or none where none runs.

    A candidate that raises, as for want of memory, is left out with a line in the log.
    """
    able, runs = [], []
    for one in candidates:
        try:
            run = partial(one.prepare(), *one.operands)
            run()
        except (RuntimeError, NotImplementedError) as error:
            tuned.log.info("tune leaves out %s %s of %s: %s", one.name, one.taken, config.problem, error)
        else:
            able.append(one)
            runs.append(run)
    if not runs:
        return []
    seconds, fastest = _time_all(runs, [one.is_torchs for one in able], config.device)
    least: dict[str, float] = {}
    for one, each in zip(able, seconds, strict=True):
        least[one.name] = min(least.get(one.name, math.inf), round(1e6 * each, 2))
    return [Entry(tuned.key_of(config, direction), tuned.size_of(config), microseconds=least, **able[fastest].taken)]


def _time_all(runs: Sequence[Run], are_torchs: Sequence[bool], device: torch.device) -> tuple[list[float], int]:
    """The seconds of each candidate, and the index of the one to take.

    On a GPU, a candidate's time is the device's or the host's, whichever is longer, since a step waits for both; one
    that keeps the device longer than torch's operator is not taken. On a CPU it is wall-clock time.
    """
    if device.type != "cuda":
        seconds = [1e-3 * median(times) for times in cpu_rounds(runs)]
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
