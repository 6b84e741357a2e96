"""Which algorithm computes a configuration, and why."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from gemmconv import tuned
from gemmconv.algorithms import ALGORITHMS, Algorithm, Config
from gemmconv.algorithms.gemm_col2im import HOST_SECONDS as GEMM_COL2IM_HOST_SECONDS
from gemmconv.algorithms.gemm_col2im import PRODUCTS_HOST_SECONDS
from gemmconv.algorithms.native import HOST_SECONDS as NATIVE_HOST_SECONDS
from gemmconv.device import MEASURED, DeviceSpec, named, spec_of
from gemmconv.geometry import Problem
from gemmconv.kernels.base import DEFAULT_WORKSPACE_LIMIT, Choice, Direction, Pass, Precision, missing, why_no_kernels
from gemmconv.kernels.columns.cpu import is_faster_than_torch
from gemmconv.kernels.cpu import estimate
from gemmconv.kernels.cpu.library import isa_name
from gemmconv.kernels.forms import launches
from gemmconv.kernels.layout.transpose import grad_output_transpose_seconds, via_channels_last_seconds
from gemmconv.kernels.program import Program
from gemmconv.validation import choice, made_problem, place

Compilations = tuple[tuple[str, tuple[tuple[str, str | int], ...]], ...]  # sources with their sorted macros

NAMES = tuple(algorithm.name for algorithm in ALGORITHMS)
_MOST_STEPS = 12  # most steps of a program that a report of explain lists

_PASSES = {"forward": "forward", "input_grad": "gradient of the input", "weight_grad": "gradient of the weight"}
_FALLBACK_GRADIENT = "gemm_col2im"  # computes a gradient that no kernel of the named algorithm takes
_MIN_GAIN = 5e-6  # seconds: a smaller difference of estimates is within the variation of a launch
# Algorithms that cost much CPU time; all others are one launch of a graph. For each: host seconds in a backward pass,
# the slowdown on the device that is accepted to avoid it, and seconds that are accepted for each gradient in any case.
_HOST_COSTS = {
    "native": (NATIVE_HOST_SECONDS, 2.0, 0.0),
    "gemm_col2im": (GEMM_COL2IM_HOST_SECONDS, 1.2, PRODUCTS_HOST_SECONDS),
}
# Ratio of two estimates up to which both count as equally fast. On an H100, 30 random layers whose forward passes
# change from products to kernels alone by this rule took 0.3 to 2.3 times as long, 1.003 times in the mean.
_EQUAL_SPEED_RATIO = 1.1
# On GPUs other than Hopper our time must be below this share of torch's estimate. The estimate is for cuDNN's
# deterministic kernels; torch takes others there, which are up to twice as fast in float32 without TF32.
_CLEARLY_FASTER_RATIO = {"ieee": 0.5, "tf32": 0.65, "half": 0.65}
_EXTRA_HOST_SECONDS = 10e-6  # host time by which a call of ours may exceed torch's
_NOT_SLOWER_RATIO = 0.85  # our estimate for the device itself must be below this share of torch's


def torch_precision(dtype: torch.dtype, device: torch.device) -> Precision:
    """The precision of torch's own convolutions at this moment: ``"tf32"`` where its settings allow that.

    Reads the setting that torch keeps for convolutions, which the legacy flag torch.backends.cudnn.allow_tf32 feeds
    too. Never writes either, and never reads the legacy flag, which raises once the new one was set.
    """
    if dtype == torch.float32 and device.type == "cuda" and _precision_of_convolutions() == "tf32":
        return "tf32"
    return "ieee"


def _precision_of_convolutions() -> str:
    """torch.backends.cudnn.conv.fp32_precision, without the microsecond that the property takes."""
    return torch._C._get_fp32_precision_getter("cuda", "conv")


def is_deterministic(requested: str, device: torch.device, spec: DeviceSpec) -> bool:
    """Whether torch's operator, if it is chosen, is limited to deterministic kernels: for ``"auto"`` on Hopper.

    False if our kernels are not available: then torch's operator behaves as it does without gemmconv.
    """
    return requested == "auto" and device.type == "cuda" and spec.is_hopper and missing(device) is None


def preference(config: Config, direction: Direction = "forward") -> Sequence[tuple[Algorithm, str]]:
    """The algorithms in the order in which ``auto`` tries them, each with the reason for its position.

    CUDA orders them by the estimated time of a call, least first; equal estimates keep the order of ``ALGORITHMS``.
    The estimates come down to this: gemm_col2im pays for writing and reading the columns, 8 bytes an element, and for
    its launches. direct pays for arithmetic: on CUDA cores (float32 in ieee, gradients) it comes first up to some 30
    input channels a group, on tensor cores up to about 64. fused (Hopper) pays for two launches and, at the rate of
    large tiles, for arithmetic: it comes first where there are more channels. native pays for transposing tensors in
    NCHW, and for tensor cores that few channels leave empty. An algorithm that saves more host time than it costs
    device time comes before native and gemm_col2im: see :func:`_ordered_by_host_time`.

    Estimates were fitted to Hopper. On other GPUs ``native`` comes first unless another is estimated to be clearly
    faster: our gain there is only an estimate, and torch's operator is what users have today.

    The CPU has a rule of its own, in :mod:`gemmconv.kernels.cpu.estimate`. Without the C extension ``native`` comes
    first, except in forward passes for which :func:`kernels.columns.cpu.is_faster_than_torch` is true.
    """
    if config.device.type == "cpu" and (isa := isa_name()) is not None:
        ratio, threads = estimate.speedup(config, direction), torch.get_num_threads()
        fused = (
            f"expected at {ratio:.2f} times torch's speed with {isa} and {threads} threads" if ratio else "not measured"
        )
        texts = {"fused": f"{fused}; auto takes it from {estimate.LEAST_SPEEDUP:.2f} on", "native": "torch's operator"}
        return [(a, texts.get(a.name, "to compare: slower than fused")) for _, a in _estimates(config, direction)]
    if config.device.type == "cuda":
        estimates = _estimates(config, direction)
        reasons = [(a, _estimate_text(seconds)) for seconds, a in estimates]
        if config.spec.is_hopper:
            return _ordered_by_host_time(config, direction, estimates, reasons)
        first_one, why = _first_on_other_gpus(config, direction, estimates)
        return [(first_one, why), *((a, reason) for a, reason in reasons if a is not first_one)]
    if direction == "forward" and is_faster_than_torch(config):
        first, why = "gemm_col2im", "first on the CPU for few output channels"
    else:
        first, why = "native", f"first on {config.device.type}"
    order = sorted(ALGORITHMS, key=lambda algorithm: algorithm.name != first)
    return [(algorithm, why if i == 0 else "comes later") for i, algorithm in enumerate(order)]


def _estimate_text(seconds: float) -> str:
    return f"estimated at {1e6 * seconds:,.0f} us" if seconds < math.inf else "no estimate: comes last"


def _ordered_by_host_time(
    config: Config,
    direction: Direction,
    estimates: Sequence[tuple[float, Algorithm]],
    reasons: list[tuple[Algorithm, str]],
) -> list[tuple[Algorithm, str]]:
    """The order on Hopper: the fastest algorithm with little CPU overhead comes first if it saves more than it costs.

    Kernels alone are enqueued sooner than products or torch's operator, so they win among equally fast forward passes.
    torch's weight gradient has to be called from Python, and small ones wait for that. The rule leaves out float32,
    where our weight gradients would compile more kernels for other sizes.
    """
    least, first = estimates[0]
    if direction == "forward":
        costly, why = tuple(_HOST_COSTS), f"not clearly slower than {first.name}, which keeps the host longer"
        most = min(least + _MIN_GAIN, _EQUAL_SPEED_RATIO * least)
    elif direction == "weight_grad" and config.dtype.itemsize == 2:
        costly, why = ("native",), "while torch's operator keeps the host longer"
        host_seconds, slowdown, _ = _HOST_COSTS["native"]
        most = min(host_seconds / 2, slowdown * least)
    else:
        return reasons
    index = next(i for i, (_, algorithm) in enumerate(estimates) if algorithm.name not in costly)
    seconds, ours = estimates[index]
    if index == 0 or seconds >= most:
        return reasons
    return [(ours, f"{_estimate_text(seconds)}, {why}"), *reasons[:index], *reasons[index + 1 :]]


def _first_on_other_gpus(
    config: Config, direction: Direction, estimates: Sequence[tuple[float, Algorithm]]
) -> tuple[Algorithm, str]:
    """The first algorithm on a GPU that is not Hopper, and why: ``native``, unless another is clearly faster."""
    torch_seconds, torch_operator = next((seconds, a) for seconds, a in estimates if a.name == "native")
    measured = _on_measured_gpu(config)
    measured_torch_seconds = torch_operator.estimate(measured, direction)
    for seconds, algorithm in estimates:
        if algorithm is torch_operator or seconds == math.inf:
            continue
        pairs = (seconds, torch_seconds), (algorithm.estimate(measured, direction), measured_torch_seconds)
        if _is_clearly_faster(config, *pairs):
            return algorithm, f"{_estimate_text(seconds)}, clearly below torch's operator: comes first"
    if torch_seconds == math.inf:
        return torch_operator, "what torch's operator takes for such a layer is not known: it comes first"
    return torch_operator, f"{_estimate_text(torch_seconds)}, which no other is clearly below: comes first"


def _on_measured_gpu(config: Config) -> Config:
    """The configuration on the GPU where both sides were measured, without the kernels that only Hopper has."""
    return replace(config, spec=replace(MEASURED, capability=config.spec.capability))


def _is_clearly_faster(config: Config, here: tuple[float, float], measured: tuple[float, float]) -> bool:
    """Whether our kernel is clearly faster than torch's on the measured GPU, and not slower by estimates for this one.

    ``here`` and ``measured`` are estimated seconds of our kernel and of torch's operator, on this and the measured GPU.
    """
    if measured[1] == math.inf or here[0] > _NOT_SLOWER_RATIO * here[1]:
        return False
    ratio = _CLEARLY_FASTER_RATIO["half" if config.dtype.itemsize == 2 else config.precision]
    return measured[0] + _EXTRA_HOST_SECONDS < ratio * measured[1]


def _estimates(
    config: Config, direction: Direction, among: Sequence[Algorithm] = ALGORITHMS
) -> list[tuple[float, Algorithm]]:
    """Pairs of estimated seconds and algorithm, least first; infinite if the algorithm cannot serve the pass."""
    able = [a.why_not(config, direction) is None and (direction == "forward" or a.can_serve(config)) for a in among]
    estimates = [(a.estimate(config, direction) if able[i] else math.inf, not able[i], a) for i, a in enumerate(among)]
    return [(seconds, a) for seconds, _, a in sorted(estimates, key=lambda item: item[:2])]


def choose(config: Config, requested: str, where: str, direction: Direction = "forward") -> Algorithm:
    """The algorithm for a configuration: the requested one; with ``"auto"`` the tuned one, or the first able one.

    A gradient that no kernel of the requested algorithm takes goes to ``gemm_col2im``.

    Raises:
        NotImplementedError: the requested algorithm, or with ``"auto"`` every one, cannot serve it; with the reasons.
    """
    if requested == "auto" and (entry := tuned.entry_of(config, direction)) is not None:
        measured = next((a for a in ALGORITHMS if entry.algorithms == (a.name,)), None)
        if measured is not None and measured.why_not(config, direction) is None:
            return measured
    for algorithm, _ in preference(config, direction):
        if requested in ("auto", algorithm.name):
            reason = algorithm.why_not(config)
            if reason is None and algorithm.why_not(config, direction) is None:
                return algorithm
            if reason is None and requested != "auto":
                return choose(config, _FALLBACK_GRADIENT, where, direction)
            if requested != "auto":
                raise NotImplementedError(f'{where}: {algorithm.name}: {reason}; or use algorithm="auto"')
    reasons = "; ".join(f"{algorithm.name}: {algorithm.why_not(config)}" for algorithm in ALGORITHMS)
    raise NotImplementedError(f"{where}: no algorithm can serve this: {reasons}")


class Gradients(NamedTuple):
    """The algorithms of both gradients of a backward pass.

    Attributes:
        input_grad, weight_grad: the algorithms.
        share: whether both transpose grad_output from channels_last to NCHW, so that one transpose serves both.
        at_once: whether one call of an algorithm computes both.
        via_channels_last: whether tensors in NCHW are transposed and computed in channels_last ("turned" in files).
    """

    input_grad: Algorithm
    weight_grad: Algorithm
    share: bool
    at_once: bool = False
    via_channels_last: bool = False

    def choices(self, config: Config, weight_config: Config) -> list[Choice | None]:
        """The kernel and tile of each gradient; a single one if both are computed at once."""
        if self.at_once:
            return [self.input_grad.choice(replace(config, weight_format=weight_config.memory_format), "grads")]
        return [self.input_grad.choice(config, "input_grad"), self.weight_grad.choice(weight_config, "weight_grad")]

    def are_torchs_in_one_call(self, config: Config, weight_config: Config) -> bool:
        """Whether one call of torch's operator gives both gradients, with the kernels that two calls would take."""
        both_native = self.input_grad.name == self.weight_grad.name == "native"
        return both_native and not self.via_channels_last and config.memory_format is weight_config.memory_format

    @property
    def transposes_weight(self) -> bool:
        """Whether the weight is transposed too: cuDNN wants all tensors in one format, and torch's own copy is slow."""
        return self.via_channels_last and self.input_grad.name == "native"


def choose_gradients(config: Config, weight_config: Config, requested: str, where: str) -> Gradients:
    """The algorithms of the input's and the weight's gradient of one backward pass.

    A named algorithm, or a CPU, takes what :func:`choose` gives for each gradient, in one call if the algorithm can.
    ``"auto"`` on CUDA takes the pair with the least estimate: one algorithm that computes both at once; two that share
    the transpose of grad_output (channels_last); or, for 16-bit tensors in NCHW, two that compute in channels_last
    with three transposes around them. torch's operator and cuBLAS products are left out if others need less device
    time than these need host time, or are slower by next to nothing.

    Args:
        config, weight_config: configurations of the input's and the weight's gradient, equal but for memory formats.
        requested, where: see :func:`choose`.

    Raises:
        NotImplementedError: see :func:`choose`.
    """
    if requested == "auto" and (measured := _tuned_gradients(config, weight_config)) is not None:
        return measured
    if requested != "auto" or config.device.type != "cuda" or why_no_kernels(config.device, config.spec) is not None:
        first = choose(config, requested, where, "input_grad")
        second = choose(weight_config, requested, where, "weight_grad")
        at_once = first is second and (
            _is_torchs_call(first, config) or first.grads_estimate(config, weight_config) < math.inf
        )
        return Gradients(first, second, _share(first, second, config, weight_config), at_once)
    if not config.spec.is_hopper:
        return _gradients_on_other_gpus(config, weight_config)
    able = tuple(a for a in ALGORITHMS if a.why_not(config) is None)
    if not able:
        choose(config, requested, where)  # raises
    seconds, gradients = _fastest_of(config, weight_config, able)
    for costly, (host_seconds, slowdown, extra) in _HOST_COSTS.items():
        able = tuple(a for a in able if a.name != costly)
        count = (gradients.input_grad.name, gradients.weight_grad.name).count(costly)
        if able and count:
            other_seconds, others = _fastest_of(config, weight_config, able)
            more = max(_MIN_GAIN, count * extra)
            if other_seconds < max(min(host_seconds, slowdown * seconds), seconds + more):
                seconds, gradients = other_seconds, others
    return gradients


def log_choice(config: Config, weight_config: Config, direction: Pass, requested: str) -> None:
    """Log at DEBUG what ``auto`` chooses for a new configuration, both gradients if the direction is ``"grads"``."""
    if requested != "auto" or not tuned.log.isEnabledFor(logging.DEBUG):
        return
    if direction == "grads":
        gradients = choose_gradients(config, weight_config, requested, "log")
        names = dict.fromkeys((gradients.input_grad.name, gradients.weight_grad.name))
        last = replace(config, memory_format=torch.channels_last)
        made = gradients.choices(*(last, last) if gradients.via_channels_last else (config, weight_config))
    else:
        algorithm = choose(config, requested, "log", direction)
        names, made = {algorithm.name: None}, [algorithm.choice(config, direction)]
    layer, size = " ".join(tuned.key_of(config, direction)), (config.problem.batch, *config.problem.input_size)
    kernels, seconds = " and ".join(map(str, made)), sum(one.seconds for one in made if one)
    expected = f"expected {1e6 * seconds:,.0f} us" if seconds < math.inf else "no estimate"
    chosen = f"{' and '.join(names)}, kernel {kernels}, {expected}"
    tuned.log.debug("auto chooses for %s %s: %s", layer, "x".join(map(str, size)), chosen)


def _tuned_gradients(config: Config, weight_config: Config) -> Gradients | None:
    """The tuned algorithms of both gradients together; None if none were tuned, or they cannot serve the layer now."""
    entry = tuned.entry_of(config, "grads")
    if entry is None or config.memory_format is not weight_config.memory_format:
        return None
    by_name = {algorithm.name: algorithm for algorithm in ALGORITHMS}
    first, second = (by_name[name] for name in entry.algorithms)
    if first.why_not(config, "input_grad") is not None or second.why_not(config, "weight_grad") is not None:
        return None
    return Gradients(first, second, *(entry.how.get(name, False) for name in ("share", "at_once", "turned")))


def paired(first: Algorithm, second: Algorithm, config: Config) -> Gradients:
    """Two algorithms in one memory format that run one after the other and share the transpose they have in common."""
    return Gradients(first, second, _share(first, second, config, config))


def _fastest_of(config: Config, weight_config: Config, able: tuple[Algorithm, ...]) -> tuple[float, Gradients]:
    """The result of :func:`_fastest`, or the faster way through channels_last for tensors in NCHW."""
    seconds, gradients = _fastest(config, weight_config, able)
    # float32 would gain less than the error of the estimates of cuDNN's gradients.
    if config.dtype.itemsize == 2 and config.memory_format is weight_config.memory_format is torch.contiguous_format:
        last = replace(config, memory_format=torch.channels_last)
        last_seconds, others = _fastest(last, last, able)
        others = others._replace(via_channels_last=True)
        last_seconds += via_channels_last_seconds(config, others.transposes_weight)
        if last_seconds < seconds - _MIN_GAIN:
            return last_seconds, others
    return seconds, gradients


def _is_torchs_call(algorithm: Algorithm, config: Config) -> bool:
    """Whether one call of torch's operator, with the user's own cuDNN settings, computes both gradients."""
    return algorithm.name == "native" and not config.deterministic


def leaves_all_to_torch(config: Config, requested: str, where: str, of_input: bool, of_weight: bool) -> bool:
    """Whether a forward pass and the gradients that may follow it are torch's own, with torch's settings.

    ``of_input`` and ``of_weight`` say which gradients may follow; for the others see :func:`choose`.
    """
    if config.deterministic or choose(config, requested, where).name != "native":
        return False
    if of_input and of_weight:
        gradients = choose_gradients(config, config, requested, where)
        return gradients.input_grad.name == gradients.weight_grad.name == "native"
    passes: tuple[tuple[Direction, bool], ...] = ("input_grad", of_input), ("weight_grad", of_weight)
    return all(choose(config, requested, where, direction).name == "native" for direction, wanted in passes if wanted)


def _share(first: Algorithm, second: Algorithm, config: Config, weight_config: Config) -> bool:
    """Whether both algorithms transpose the one grad_output from channels_last to NCHW."""
    both_last = config.memory_format is weight_config.memory_format is torch.channels_last
    return both_last and first.transposes(config, "input_grad") and second.transposes(weight_config, "weight_grad")


def _gradients_on_other_gpus(config: Config, weight_config: Config) -> Gradients:
    """The gradients of a backward pass on a GPU that is not Hopper: torch's, unless ours are clearly faster."""
    torch_operator = next(a for a in ALGORITHMS if a.name == "native")
    torchs = Gradients(torch_operator, torch_operator, False, True)
    ours = tuple(a for a in ALGORITHMS if a is not torch_operator and a.why_not(config) is None)
    if not ours:
        return torchs
    seconds, gradients = _fastest(config, weight_config, ours)
    pair = _on_measured_gpu(config), _on_measured_gpu(weight_config)
    here = seconds, torch_operator.grads_estimate(config, weight_config)
    measured = _fastest(*pair, ours)[0], torch_operator.grads_estimate(*pair)
    if torch_operator.why_not(config) is None and not _is_clearly_faster(config, here, measured):
        return torchs
    return gradients


@lru_cache(maxsize=1024)
def _fastest(config: Config, weight_config: Config, able: tuple[Algorithm, ...]) -> tuple[float, Gradients]:
    """Estimated seconds of the fastest gradients of a backward pass, and these gradients."""
    one, other = _estimates(config, "input_grad", able), _estimates(weight_config, "weight_grad", able)
    (first_seconds, first), (second_seconds, second) = one[0], other[0]
    saved, seconds = grad_output_transpose_seconds(config), first_seconds + second_seconds
    chosen = Gradients(first, second, _share(first, second, config, weight_config))
    if chosen.share:
        seconds -= saved
    else:
        pairs = [(a + b - saved, Gradients(x, y, True)) for a, x in one for b, y in other]
        sharing = [pair for pair in pairs if _share(*pair[1][:2], config, weight_config)]
        least, gradients = min(sharing, key=lambda item: item[0], default=(math.inf, chosen))
        if least < seconds - _MIN_GAIN:
            seconds, chosen = least, gradients
    together = [(a.grads_estimate(config, weight_config), Gradients(a, a, False, True)) for a in able]
    return min((seconds, chosen), *together, key=lambda item: item[0])


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
        itemsize = c.dtype.itemsize
        dtype = str(c.dtype).removeprefix("torch.")
        lines = [
            f"conv_transpose2d {list(p.input_shape)} x {list(p.weight_shape)} -> {list(p.output_shape)}, "
            f"{dtype} ({c.precision}) on {c.device}{', channels_last' * (c.memory_format is torch.channels_last)}",
            f"  work     {p.useful_flops:,} flops, at least {p.least_bytes(itemsize):,} bytes moved, "
            f"{p.useful_flops / max(1, p.least_bytes(itemsize)):.1f} flops a byte",
            f"  columns  {p.column_bytes(itemsize):,} bytes if all were written at once, {p.gemm_batch} products of "
            f"{p.gemm_m} x {p.gemm_n} x {p.gemm_k}",
            f"  chosen   {self.algorithm} ({_PASSES[self.direction]}); for a whole backward pass {self._backward}",
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

    @property
    def _backward(self) -> str:
        input_grad, weight_grad = self.gradients
        names = input_grad if input_grad == weight_grad else f"{input_grad} (input) and {weight_grad} (weight)"
        return f"{names}, in channels_last between transposes" if self.gradients_turned else names


def explain(
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
        algorithm: the ``algorithm`` argument of the call.
        precision: ``"ieee"``, ``"tf32"``, or None for torch's setting.
        workspace_limit: bytes; None for 64 MiB.
        memory_format: format of input and output, ``torch.contiguous_format`` or ``torch.channels_last``.
        bias: whether the call has a bias.
        direction: the pass: ``"forward"``, ``"input_grad"`` or ``"weight_grad"``.
        gpu: name of a GPU, such as ``"A100"``, in place of the device's; the machine need not have it.

    Raises:
        ValueError: an unknown algorithm, precision, memory format, direction or GPU, or a workspace limit below 1 byte.
        TypeError, RuntimeError: a dtype or a problem that no call can have.
        NotImplementedError: an integer dtype, or the algorithm cannot serve the problem.

    >>> problem = Problem(8, 256, 128, 1, (32, 32), (4, 4), stride=(2, 2), padding=(1, 1))
    >>> explain(problem, algorithm="gemm_col2im").algorithm
    'gemm_col2im'
    >>> explain(problem, device="cuda").algorithm
    'fused'
    >>> explain(problem, gpu="H100", dtype=torch.float16, direction="weight_grad").kernel
    'sm90/wgrad_nhwc'
    >>> explain(problem, gpu="A100").algorithm
    'native'
    """
    problem = made_problem("explain", problem, dtype)
    choice("explain", algorithm, NAMES, precision, workspace_limit)
    if memory_format not in (torch.contiguous_format, torch.channels_last):
        known = "torch.contiguous_format or torch.channels_last"
        raise ValueError(f"explain: memory_format must be {known}, got {memory_format}")
    if direction not in tuple(_PASSES):
        raise ValueError(f"explain: direction must be one of {', '.join(_PASSES)}, got {direction!r}")
    where = place("explain", "cuda" if gpu is not None else device)
    current = torch_precision(dtype, where)
    config = Config(
        problem,
        dtype,
        where,
        precision or current,
        DEFAULT_WORKSPACE_LIMIT if workspace_limit is None else workspace_limit,
        current,
        memory_format,
        bias,
        spec := spec_of(where) if gpu is None else named(gpu),
        is_deterministic(algorithm, where, spec),
    )
    chosen = choose(config, algorithm, "explain", direction)
    gradients = choose_gradients(config, config, algorithm, "explain")
    reasons, entry = {}, tuned.entry_of(config, direction)
    for candidate, rule in preference(config, direction):
        refusal = candidate.why_not(config)
        if refusal:
            reasons[candidate.name] = f"cannot serve it: {refusal}"
        else:
            if entry is not None and candidate.name in entry.microseconds:
                rule = f"measured: {entry.microseconds[candidate.name]:,.1f} us with {list(entry.size)}; {rule}"
            if candidate.name == "native" and where.type == "cuda":
                rule += "; cuDNN's deterministic kernels" if config.deterministic else "; torch's own settings"
            reasons[candidate.name] = f"asked for; {rule}" if candidate is chosen and algorithm != "auto" else rule
    choice_made = chosen.choice(config, direction)
    assert choice_made is not None
    kernels = {name: text for a in ALGORITHMS for name, text in _kernel_reports(a, config, direction)}
    workspace = {a.name: a.workspace_bytes(config, direction) for a in ALGORITHMS if a.why_not(config) is None}
    names = gradients.input_grad.name, gradients.weight_grad.name
    taken = chosen.name, choice_made.kernel.name, choice_made.tile_text
    program = choice_made.program(config, direction) if where.type == "cuda" else None
    compilations = () if program is None else compilations_of(program, config)
    how = program, gradients.via_channels_last, compilations
    return Explanation(*taken, reasons, kernels, config, direction, workspace, names, *how)


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
            yield kernel.name, f"{_estimate_text(made.seconds)}; {made.tile_text}{packed_text}"
        elif (reason := kernel.why_not(config, direction)) != refusal:  # the algorithm's own reason is reported already
            yield kernel.name, f"not for it: {reason}"
