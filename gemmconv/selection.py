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
from gemmconv.algorithms import ALGORITHMS, Algorithm, Config, gemm_col2im, native
from gemmconv.device import MEASURED, DeviceSpec, named, spec_of
from gemmconv.geometry import Problem
from gemmconv.kernels.base import DEFAULT_WORKSPACE_LIMIT, Choice, Direction, Pass, Precision, missing, why_no_kernels
from gemmconv.kernels.columns.cpu import is_faster_than_torch
from gemmconv.kernels.cpu import estimate
from gemmconv.kernels.cpu.library import isa_name
from gemmconv.kernels.forms import launches
from gemmconv.kernels.layout.transpose import grad_turning_seconds, turned_seconds
from gemmconv.kernels.program import Program
from gemmconv.validation import choice, made_problem, place

Compilations = tuple[tuple[str, tuple[tuple[str, str | int], ...]], ...]  # sources with their sorted macros

NAMES = tuple(algorithm.name for algorithm in ALGORITHMS)
_MOST_STEPS = 12  # of a program, in a report of explain

_PASSES = {"forward": "forward", "input_grad": "gradient of the input", "weight_grad": "gradient of the weight"}
_FOR_OTHER_GRADIENTS = "gemm_col2im"  # those that no kernel of a named algorithm takes
_CLEARLY = 5e-6  # seconds by which an estimate is less, and not only as launches vary
# What keeps the host, where kernels alone are one launch of a graph: for how many seconds in a backward pass, how many
# times as long others may take on the device then, and how many seconds longer for each gradient, whatever it takes.
_KEEP_THE_HOST = {
    "native": (native.HOST_SECONDS, 2.0, 0.0),
    "gemm_col2im": (gemm_col2im.HOST_SECONDS, 1.2, gemm_col2im.PRODUCTS_HOST_SECONDS),
}
# Of an estimate: what another may be where both are as fast, as far as estimates tell. 30 random layers whose forward
# passes so go from products to kernels alone took 0.3 to 2.3 times as long on an H100, 1.003 times in the mean.
_AS_FAST = 1.1
# On GPUs other than Hopper: of torch's estimate. That is of cuDNN's deterministic kernels, and the others, which it
# takes there, are up to twice as fast in float32 without TF32. And what the host may take longer for a call of ours.
_CLEARLY_LESS = {"ieee": 0.5, "tf32": 0.65, "half": 0.65}
_HOST_SECONDS = 10e-6
_NO_SLOWER = 0.85  # of torch's estimate, by ours for the device itself


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
    """Whether torch's operator, if it is taken, may take deterministic kernels alone: for ``"auto"`` on Hopper.

    Not where it is all that can be had: then it does what it does without gemmconv.
    """
    return requested == "auto" and device.type == "cuda" and spec.is_hopper and missing(device) is None


def preference(config: Config, direction: Direction = "forward") -> Sequence[tuple[Algorithm, str]]:
    """The algorithms as ``auto`` tries them, each with what gives it its place.

    On CUDA by their estimates of the time of a call, least first, in the order of ``ALGORITHMS`` where those are equal.
    The estimates come down to this: gemm_col2im pays for writing and reading the columns, 8 bytes an element, and for
    its launches. direct pays for arithmetic: on CUDA cores (float32 in ieee, gradients) it comes first up to some 30
    input channels a group, on tensor cores up to about 64. fused (Hopper) pays for two launches and, at the rate of
    large tiles, for arithmetic: it comes first where there are more channels. native pays for turning tensors in NCHW
    round, and for tensor cores that few channels leave empty. It, and gemm_col2im, come behind what saves the host more
    than it costs the device: see :func:`_behind_for_the_host`.

    Estimates were fitted to Hopper. On other GPUs ``native`` comes first but where another is estimated to be clearly
    faster, since what ours gain there is an estimate and what torch takes is what users have today.

    On the CPU by a rule, which :mod:`gemmconv.kernels.cpu.estimate` has. Without the extension in C ``native`` comes
    first, but for forward passes where :func:`kernels.columns.cpu.is_faster_than_torch` says otherwise.
    """
    if config.device.type == "cpu" and (isa := isa_name()) is not None:
        ratio, threads = estimate.speedup(config, direction), torch.get_num_threads()
        fused = (
            f"expected at {ratio:.2f} times torch's speed with {isa} and {threads} threads" if ratio else "not measured"
        )
        said = {"fused": f"{fused}; auto takes it from {estimate.LEAST_SPEEDUP:.2f} on", "native": "torch's operator"}
        return [(a, said.get(a.name, "to compare: slower than fused")) for _, a in _estimates(config, direction)]
    if config.device.type == "cuda":
        estimates = _estimates(config, direction)
        reasons = [(a, _estimate_text(seconds)) for seconds, a in estimates]
        if config.spec.is_hopper:
            return _behind_for_the_host(config, direction, estimates, reasons)
        taken, why = _first_elsewhere(config, direction, estimates)
        return [(taken, why), *((a, reason) for a, reason in reasons if a is not taken)]
    if direction == "forward" and is_faster_than_torch(config):
        first, why = "gemm_col2im", "first on the CPU for few output channels"
    else:
        first, why = "native", f"first on {config.device.type}"
    order = sorted(ALGORITHMS, key=lambda algorithm: algorithm.name != first)
    return [(algorithm, why if i == 0 else "comes later") for i, algorithm in enumerate(order)]


def _estimate_text(seconds: float) -> str:
    return f"estimated at {1e6 * seconds:,.0f} us" if seconds < math.inf else "no estimate: comes last"


def _behind_for_the_host(
    config: Config,
    direction: Direction,
    estimates: Sequence[tuple[float, Algorithm]],
    reasons: list[tuple[Algorithm, str]],
) -> list[tuple[Algorithm, str]]:
    """The order on Hopper: what keeps the host comes behind what is expected to save it more than it costs the device.

    Forward passes that are as fast, as far as estimates tell, are enqueued sooner by kernels alone. A weight's gradient
    of torch's has to be called from Python, which small ones wait for; in float32 ours would be more kernels for other
    sizes.
    """
    least, first = estimates[0]
    if direction == "forward":
        keeping, why = tuple(_KEEP_THE_HOST), f"not clearly slower than {first.name}, which keeps the host longer"
        most = min(least + _CLEARLY, _AS_FAST * least)
    elif direction == "weight_grad" and config.dtype.itemsize == 2:
        keeping, why = ("native",), "while torch's operator keeps the host longer"
        host_seconds, most_times, _ = _KEEP_THE_HOST["native"]
        most = min(host_seconds / 2, most_times * least)
    else:
        return reasons
    place = next(i for i, (_, algorithm) in enumerate(estimates) if algorithm.name not in keeping)
    seconds, ours = estimates[place]
    if place == 0 or seconds >= most:
        return reasons
    return [(ours, f"{_estimate_text(seconds)}, {why}"), *reasons[:place], *reasons[place + 1 :]]


def _first_elsewhere(
    config: Config, direction: Direction, estimates: Sequence[tuple[float, Algorithm]]
) -> tuple[Algorithm, str]:
    """What comes first on a GPU that is not Hopper, and why: ``native``, but where another is clearly faster."""
    torchs, native = next((seconds, a) for seconds, a in estimates if a.name == "native")
    measured = _measured(config)
    measured_torchs = native.estimate(measured, direction)
    for seconds, algorithm in estimates:
        if algorithm is native or seconds == math.inf:
            continue
        pairs = (seconds, torchs), (algorithm.estimate(measured, direction), measured_torchs)
        if _is_clearly_faster(config, *pairs):
            return algorithm, f"{_estimate_text(seconds)}, clearly below torch's operator: comes first"
    if torchs == math.inf:
        return native, "what torch's operator takes for such a layer is not known: it comes first"
    return native, f"{_estimate_text(torchs)}, which no other is clearly below: comes first"


def _measured(config: Config) -> Config:
    """A configuration as on the H100 where both sides were measured, without the kernels that only Hopper has."""
    return replace(config, spec=replace(MEASURED, capability=config.spec.capability))


def _is_clearly_faster(config: Config, here: tuple[float, float], measured: tuple[float, float]) -> bool:
    """Whether ours is, on a GPU that is not Hopper: clearly so where it was measured, and no slower by estimates here.

    Args:
        config: of a pass, for its precision.
        here, measured: the seconds that ours and torch's operator are estimated at.
    """
    if measured[1] == math.inf or here[0] > _NO_SLOWER * here[1]:
        return False
    clearly = _CLEARLY_LESS["half" if config.dtype.itemsize == 2 else config.precision]
    return measured[0] + _HOST_SECONDS < clearly * measured[1]


def _estimates(
    config: Config, direction: Direction, among: Sequence[Algorithm] = ALGORITHMS
) -> list[tuple[float, Algorithm]]:
    """Algorithms with the seconds they are estimated at, least first; infinite where they cannot serve it."""
    able = [a.why_not(config, direction) is None and (direction == "forward" or a.can_serve(config)) for a in among]
    estimates = [(a.estimate(config, direction) if able[i] else math.inf, not able[i], a) for i, a in enumerate(among)]
    return [(seconds, a) for seconds, _, a in sorted(estimates, key=lambda item: item[:2])]


def choose(config: Config, requested: str, where: str, direction: Direction = "forward") -> Algorithm:
    """The algorithm for a configuration: the requested one, or with ``"auto"`` the tuned one, or the first that can.

    A gradient that no kernel of the requested one takes goes to ``gemm_col2im``.

    Raises:
        NotImplementedError: no algorithm, or not the requested one, can serve it; the message says why.
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
                return choose(config, _FOR_OTHER_GRADIENTS, where, direction)
            if requested != "auto":
                raise NotImplementedError(f'{where}: {algorithm.name}: {reason}; or use algorithm="auto"')
    reasons = "; ".join(f"{algorithm.name}: {algorithm.why_not(config)}" for algorithm in ALGORITHMS)
    raise NotImplementedError(f"{where}: no algorithm can serve this: {reasons}")


class Gradients(NamedTuple):
    """The algorithms of both gradients of a backward pass.

    Attributes:
        input_grad, weight_grad: the algorithms.
        share: whether both turn grad_output from channels_last to NCHW, so that turning it once serves both.
        at_once: whether one call of an algorithm computes both.
        turned: whether both are computed in channels_last of tensors in NCHW, which are turned round before.
    """

    input_grad: Algorithm
    weight_grad: Algorithm
    share: bool
    at_once: bool = False
    turned: bool = False

    def choices(self, config: Config, weight_config: Config) -> list[Choice | None]:
        """The kernels and tiles, one for both where they are computed at once."""
        if self.at_once:
            return [self.input_grad.choice(replace(config, weight_format=weight_config.memory_format), "grads")]
        return [self.input_grad.choice(config, "input_grad"), self.weight_grad.choice(weight_config, "weight_grad")]

    def are_torchs_in_one_call(self, config: Config, weight_config: Config) -> bool:
        """Whether one call of torch's gives both, of the same kernels as two calls."""
        native = self.input_grad.name == self.weight_grad.name == "native"
        return native and not self.turned and config.memory_format is weight_config.memory_format

    @property
    def turns_weight(self) -> bool:
        """Whether the weight is turned round as well: cuDNN wants all in one format, and torch's copy of it is slow."""
        return self.turned and self.input_grad.name == "native"


def choose_gradients(config: Config, weight_config: Config, requested: str, where: str) -> Gradients:
    """The algorithms of the input's and the weight's gradient of one backward pass.

    Those that :func:`choose` gives, at once where the algorithm has that; but for ``"auto"`` on CUDA what is estimated
    to be faster together: an algorithm that computes both at once; two that share the turning of grad_output, where
    both are in channels_last; or, where both are in NCHW, of 16 bits, two in channels_last between three turns. Torch's
    operator, and products of cuBLAS, have no part in what others take less time for on the device than their calls take
    the host, nor where they gain next to nothing.

    Args:
        config, weight_config: of the input's and of the weight's gradient; they differ in their memory format, if at
            all.
        requested, where: as of :func:`choose`.

    Raises:
        NotImplementedError: as :func:`choose`.
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
        return _fastest_elsewhere(config, weight_config)
    able = tuple(a for a in ALGORITHMS if a.why_not(config) is None)
    if not able:
        choose(config, requested, where)  # raises
    seconds, gradients = _fastest_of(config, weight_config, able)
    for busy, (host_seconds, most_times, longer) in _KEEP_THE_HOST.items():
        able = tuple(a for a in able if a.name != busy)
        count = (gradients.input_grad.name, gradients.weight_grad.name).count(busy)
        if able and count:
            other_seconds, others = _fastest_of(config, weight_config, able)
            more = max(_CLEARLY, count * longer)
            if other_seconds < max(min(host_seconds, most_times * seconds), seconds + more):
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
        made = gradients.choices(*(last, last) if gradients.turned else (config, weight_config))
    else:
        algorithm = choose(config, requested, "log", direction)
        names, made = {algorithm.name: None}, [algorithm.choice(config, direction)]
    layer, size = " ".join(tuned.key_of(config, direction)), (config.problem.batch, *config.problem.input_size)
    kernels, seconds = " and ".join(map(str, made)), sum(one.seconds for one in made if one)
    expected = f"expected {1e6 * seconds:,.0f} us" if seconds < math.inf else "no estimate"
    chosen = f"{' and '.join(names)}, kernel {kernels}, {expected}"
    tuned.log.debug("auto chooses for %s %s: %s", layer, "x".join(map(str, size)), chosen)


def _tuned_gradients(config: Config, weight_config: Config) -> Gradients | None:
    """What was measured of both gradients together; None where nothing was, or it can no longer be had."""
    entry = tuned.entry_of(config, "grads")
    if entry is None or config.memory_format is not weight_config.memory_format:
        return None
    by_name = {algorithm.name: algorithm for algorithm in ALGORITHMS}
    first, second = (by_name[name] for name in entry.algorithms)
    if first.why_not(config, "input_grad") is not None or second.why_not(config, "weight_grad") is not None:
        return None
    return Gradients(first, second, **entry.how)


def paired(first: Algorithm, second: Algorithm, config: Config) -> Gradients:
    """Two algorithms of one memory format one after the other, with the work that they share."""
    return Gradients(first, second, _share(first, second, config, config))


def _fastest_of(config: Config, weight_config: Config, able: tuple[Algorithm, ...]) -> tuple[float, Gradients]:
    """As :func:`_fastest`, perhaps in channels_last of tensors in NCHW."""
    seconds, gradients = _fastest(config, weight_config, able)
    # In float32 less would be gained than the estimates of cuDNN's gradients are off, which are most of what it takes.
    if config.dtype.itemsize == 2 and config.memory_format is weight_config.memory_format is torch.contiguous_format:
        last = replace(config, memory_format=torch.channels_last)
        turned, others = _fastest(last, last, able)
        others = others._replace(turned=True)
        turned += turned_seconds(config, others.turns_weight)
        if turned < seconds - _CLEARLY:
            return turned, others
    return seconds, gradients


def _is_torchs_call(algorithm: Algorithm, config: Config) -> bool:
    """Whether one call of torch's computes both gradients: with its own settings, it does what torch does."""
    return algorithm.name == "native" and not config.deterministic


def leaves_all_to_torch(config: Config, requested: str, where: str, of_input: bool, of_weight: bool) -> bool:
    """Whether a forward pass and the gradients that may follow it are torch's own, with torch's settings.

    Args:
        config: of the forward pass.
        requested, where: as of :func:`choose`.
        of_input, of_weight: the gradients.
    """
    if config.deterministic or choose(config, requested, where).name != "native":
        return False
    if of_input and of_weight:
        gradients = choose_gradients(config, config, requested, where)
        return gradients.input_grad.name == gradients.weight_grad.name == "native"
    asked: tuple[tuple[Direction, bool], ...] = ("input_grad", of_input), ("weight_grad", of_weight)
    return all(choose(config, requested, where, direction).name == "native" for direction, wanted in asked if wanted)


def _share(first: Algorithm, second: Algorithm, config: Config, weight_config: Config) -> bool:
    """Whether two algorithms turn grad_output from channels_last to NCHW, the same tensor."""
    both_last = config.memory_format is weight_config.memory_format is torch.channels_last
    return both_last and first.turns(config, "input_grad") and second.turns(weight_config, "weight_grad")


def _fastest_elsewhere(config: Config, weight_config: Config) -> Gradients:
    """The gradients of a backward pass on a GPU that is not Hopper: torch's, but where ours are clearly faster."""
    native = next(a for a in ALGORITHMS if a.name == "native")
    ours = tuple(a for a in ALGORITHMS if a is not native and a.why_not(config) is None)
    if not ours:
        return Gradients(native, native, False, True)
    seconds, gradients = _fastest(config, weight_config, ours)
    pair = _measured(config), _measured(weight_config)
    here = seconds, native.grads_estimate(config, weight_config)
    measured = _fastest(*pair, ours)[0], native.grads_estimate(*pair)
    if native.why_not(config) is None and not _is_clearly_faster(config, here, measured):
        return Gradients(native, native, False, True)
    return gradients


@lru_cache(maxsize=1024)
def _fastest(config: Config, weight_config: Config, able: tuple[Algorithm, ...]) -> tuple[float, Gradients]:
    """The gradients of a backward pass that are estimated to be fastest, and the seconds they are estimated at."""
    one, other = _estimates(config, "input_grad", able), _estimates(weight_config, "weight_grad", able)
    (first_seconds, first), (second_seconds, second) = one[0], other[0]
    saved, seconds = grad_turning_seconds(config), first_seconds + second_seconds
    chosen = Gradients(first, second, _share(first, second, config, weight_config))
    if chosen.share:
        seconds -= saved
    else:
        pairs = [(a + b - saved, Gradients(x, y, True)) for a, x in one for b, y in other]
        sharing = [pair for pair in pairs if _share(*pair[1][:2], config, weight_config)]
        least, gradients = min(sharing, key=lambda item: item[0], default=(math.inf, chosen))
        if least < seconds - _CLEARLY:
            seconds, chosen = least, gradients
    together = [(a.grads_estimate(config, weight_config), Gradients(a, a, False, True)) for a in able]
    return min((seconds, chosen), *together, key=lambda item: item[0])


@dataclass(frozen=True)
class Explanation:
    """Why a configuration is computed the way it is. ``str()`` gives a report.

    Attributes:
        algorithm: name of the algorithm chosen for the pass.
        kernel: its kernel: the source under csrc/ without ending, or the algorithm's name where that is all of it.
        tile: what the kernel is specialised by, as ``name=value``, with spaces between.
        reasons: for every algorithm, why it was or was not chosen.
        kernels: for every kernel of an algorithm that the device may take, its tile and estimate, or why not.
        config: what was asked.
        direction: the pass: ``"forward"``, ``"input_grad"`` or ``"weight_grad"``.
        workspace_bytes: for every algorithm that can serve it, bytes of temporary memory of such a call.
        gradients: names of the algorithms of the input's and the weight's gradient where a backward pass wants both;
            they may share work, so that they need not be those of one gradient alone.
        program: what the call does, step by step; None where it is torch's operator, and on the CPU.
        gradients_turned: whether these compute in channels_last, of tensors in NCHW that are turned round.
        compilations: what a first call with tensors in this format compiles, as sources with their sorted macros.
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
        return f"{names}, in channels_last between turns" if self.gradients_turned else names


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
        algorithm: what the call asks for.
        precision: ``"ieee"``, ``"tf32"``, or None for torch's setting.
        workspace_limit: bytes; None for 64 MiB.
        memory_format: of input and output, ``torch.contiguous_format`` or ``torch.channels_last``.
        bias: whether the call has one.
        direction: the pass: ``"forward"``, ``"input_grad"`` or ``"weight_grad"``.
        gpu: a GPU that need not be there, such as ``"A100"``, in place of that of ``device``.

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
    kernels = {name: text for a in ALGORITHMS for name, text in _of_kernels(a, config, direction)}
    workspace = {a.name: a.workspace_bytes(config, direction) for a in ALGORITHMS if a.why_not(config) is None}
    names = gradients.input_grad.name, gradients.weight_grad.name
    taken = chosen.name, choice_made.kernel.name, choice_made.tile_text
    program = choice_made.program(config, direction) if where.type == "cuda" else None
    compilations = () if program is None else compilations_of(program, config)
    how = program, gradients.turned, compilations
    return Explanation(*taken, reasons, kernels, config, direction, workspace, names, *how)


def compilations_of(program: Program, config: Config) -> Compilations:
    """What a call of a program compiles, with tensors in the configuration's format: each once."""
    p = config.problem
    shapes = {"input": p.input_shape, "weight": p.weight_shape, "grad_output": p.output_shape}
    of: dict[str, Any] = {"dtype": config.dtype, "device": "meta", "memory_format": config.memory_format}
    tensors = [torch.empty(shapes[name], **of) if name in shapes else None for name in program.arguments]
    steps = launches(program, tuple(tensors), config.device)
    return tuple(dict.fromkeys((step.source, tuple(sorted(step.macros.items()))) for step in steps))


def _of_kernels(algorithm: Algorithm, config: Config, direction: Direction) -> Iterator[tuple[str, str]]:
    """Of an algorithm of several kernels, each that may compute the pass: its tile and estimate, or why it cannot."""
    if len(algorithm.kernels) == 1:
        return
    refusal = algorithm.why_not(config, direction)
    for kernel in algorithm.kernels_for(config):
        if direction not in kernel.directions:
            continue
        if (made := algorithm.choice_of(kernel, config, direction)) is not None:
            kept = kernel.kept_bytes(config, direction)
            kept_text = f"; keeps {kept:,} bytes of packed weights" if kept else ""
            yield kernel.name, f"{_estimate_text(made.seconds)}; {made.tile_text}{kept_text}"
        elif (reason := kernel.why_not(config, direction)) != refusal:  # which the algorithm has said
            yield kernel.name, f"not for it: {reason}"
