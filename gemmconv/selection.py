"""The choice of an algorithm for a pass, and of a pair for both gradients of a backward pass.

``auto`` takes what :func:`gemmconv.tune` measured, where it did. Else it compares the algorithms that can serve a pass:

    device      one pass                  both gradients              rule
    Hopper      _estimates                _gradients_on_hopper        the shortest estimated wait, of device and host
    other GPUs  _first_on_other_gpus      _gradients_on_other_gpus    torch's operator, unless ours is clearly faster
    CPU         _order_on_cpu             choose, for each            a rule that was fitted to measured rows
    CPU, no C   preference, at its end    choose, for each            torch's operator; gemm_col2im for few outputs

An algorithm that is named is taken for all passes that it can serve. Named or not, it serves a gradient only where it
can serve the forward pass, too: ``why_not(config)`` asks for that, ``why_not(config, direction)`` for the pass itself.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from gemmconv import tuned
from gemmconv.algorithms import ALGORITHMS, Algorithm, Config
from gemmconv.device import MEASURED, DeviceSpec, spec_of
from gemmconv.geometry import Problem
from gemmconv.kernels.base import DEFAULT_WORKSPACE_LIMIT, Choice, Direction, Pass, Precision, missing, why_no_kernels
from gemmconv.kernels.columns.cpu import is_faster_than_torch
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.cpu import estimate
from gemmconv.kernels.cpu.library import isa_name
from gemmconv.kernels.layout.transpose import grad_output_transpose_seconds, via_channels_last_seconds

BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}
NAMES = tuple(BY_NAME)
NATIVE = BY_NAME["native"]  # torch's operator
_GEMM_COL2IM = BY_NAME["gemm_col2im"]  # computes a gradient that no kernel of a named algorithm takes
_COST = costs_of("choice")
_CLEARLY_FASTER = _COST.table("clearly_faster")
MICROSECONDS = 10**6


def torch_precision(dtype: torch.dtype, device: torch.device) -> Precision:
    """The precision of torch's own convolutions at this moment: ``"tf32"`` where its settings allow that.

    Reads the setting that torch keeps for convolutions, which the legacy flag torch.backends.cudnn.allow_tf32 feeds
    too. Never writes either, and never reads the legacy flag, which raises once the new one was set.
    """
    if dtype != torch.float32 or device.type != "cuda":
        return "ieee"
    # torch.backends.cudnn.conv.fp32_precision, without the microsecond that the property takes.
    return "tf32" if torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32" else "ieee"


# torch.compile cannot trace it, and takes what it was at that moment as a constant.
torch_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rounds_as_asked(dtype: torch.dtype, device: torch.device, precision: Precision | None) -> bool:
    """Whether torch's operator rounds products as the argument ``precision`` asks; float32 on CUDA has a choice."""
    has_choice = precision is not None and dtype == torch.float32 and device.type == "cuda"
    return not has_choice or precision == torch_precision(dtype, device)


def is_deterministic(requested: str, device: torch.device, spec: DeviceSpec) -> bool:
    """Whether torch's operator, if it is chosen, is limited to deterministic kernels: for ``"auto"`` on Hopper.

    False if our kernels are not available: then torch's operator behaves as it does without gemmconv.
    """
    return requested == "auto" and device.type == "cuda" and spec.is_hopper and missing(device) is None


def current_config(
    problem: Problem,
    dtype: torch.dtype,
    device: torch.device,
    precision: Precision | None = None,
    workspace_limit: int | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
    bias: bool = False,
    algorithm: str = "auto",
    spec: DeviceSpec | None = None,
) -> Config:
    """The configuration of a call that is made now: what is None follows torch's settings and the device."""
    current, spec = torch_precision(dtype, device), spec or spec_of(device)
    limit = DEFAULT_WORKSPACE_LIMIT if workspace_limit is None else workspace_limit
    settings = precision or current, limit, current, memory_format, bias, spec
    return Config(problem, dtype, device, *settings, is_deterministic(algorithm, device, spec))


@dataclass(frozen=True)
class Seconds:
    """Estimated seconds of a call: those of the device, and those for which the host is kept to enqueue it.

    A step of large layers waits for the device, and a step of small ones for the host. So the longer of both counts.
    But in a CUDA graph host time costs nothing. So it counts up to ``most_slowdown`` (2, a policy) times the device
    time: no choice is more than twice as slow on the device to save host time.
    """

    device: float
    host: float

    @property
    def waited(self) -> float:
        """Seconds that a step waits for the call, by which choices are made."""
        return max(self.device, min(self.host, _COST.most_slowdown * self.device))


def can_serve(algorithm: Algorithm, config: Config, direction: Direction) -> bool:
    """Whether ``auto`` may take an algorithm for a pass: it must be able to serve that, and the forward pass."""
    return algorithm.why_not(config) is None and algorithm.why_not(config, direction) is None


def _estimates(
    config: Config, direction: Direction, among: Sequence[Algorithm] = ALGORITHMS
) -> list[tuple[Seconds, Algorithm]]:
    """The estimates of algorithms, the least waited for first; last those that cannot serve the pass, as infinite."""
    able = [one for one in among if can_serve(one, config, direction)]
    found = [(Seconds(one.estimate(config, direction), one.host_seconds(config, direction)), one) for one in able]
    found.sort(key=lambda item: item[0].waited)
    return found + [(Seconds(math.inf, math.inf), one) for one in among if one not in able]


def preference(config: Config, direction: Direction = "forward") -> Sequence[tuple[Algorithm, str]]:
    """The algorithms in the order in which ``auto`` tries them, each with the reason for its position."""
    if config.device.type == "cuda":
        reasons = [(one, _estimate_text(seconds)) for seconds, one in _estimates(config, direction)]
        if config.spec.is_hopper:
            return reasons
        first, why = _first_on_other_gpus(config, direction)
        return [(first, why), *(one for one in reasons if one[0] is not first)]
    if config.device.type == "cpu" and (isa := isa_name()) is not None:
        return _order_on_cpu(config, direction, isa)
    if direction == "forward" and is_faster_than_torch(config):
        first, why = _GEMM_COL2IM, "first on the CPU for few output channels"
    else:
        first, why = NATIVE, f"first on {config.device.type}"
    return [(first, why), *((one, "comes later") for one in ALGORITHMS if one is not first)]


def _first_on_other_gpus(config: Config, direction: Direction) -> tuple[Algorithm, str]:
    """The first algorithm on a GPU that is not Hopper: torch's operator, unless another is clearly faster.

    Only a Hopper GPU was measured, so both are compared as on that one: see :func:`_on_measured_gpu`.
    """
    (seconds, first), *_ = measured = _estimates(_on_measured_gpu(config), direction)
    torchs = next(seconds for seconds, one in measured if one is NATIVE)
    if first is not NATIVE and seconds.waited < _clearly_below(config, torchs):
        return first, "clearly faster than torch's operator: comes first"
    is_known = NATIVE.estimate(config, direction) < math.inf
    why = "torch's operator, since no other is clearly faster" if is_known else "torch's operator was not measured"
    return NATIVE, f"{why}: comes first"


def _order_on_cpu(config: Config, direction: Direction, isa: str) -> list[tuple[Algorithm, str]]:
    """The order on a CPU with the C extension, by the rule in :mod:`gemmconv.kernels.cpu.estimate`."""
    ratio, threads = estimate.speedup(config, direction), torch.get_num_threads()
    fused = f"expected at {ratio:.2f} times torch's speed with {isa} and {threads} threads" if ratio else "not measured"
    texts = {"fused": f"{fused}; auto takes it from {estimate.LEAST_SPEEDUP:.2f} on", "native": "torch's operator"}
    return [
        (one, texts.get(one.name, "kept to compare with: slower than fused"))
        for _, one in _estimates(config, direction)
    ]


def _estimate_text(seconds: Seconds) -> str:
    if seconds.device == math.inf:
        return "no estimate: comes last"
    host = f", {MICROSECONDS * seconds.host:,.0f} us of the host" if seconds.host else ""
    return f"estimated at {MICROSECONDS * seconds.device:,.0f} us{host}"


def _on_measured_gpu(config: Config) -> Config:
    """The configuration with the speeds of the measured GPU, and the kernels that the GPU at hand can run."""
    return replace(config, spec=replace(MEASURED, capability=config.spec.capability))


def _clearly_below(config: Config, torchs: Seconds) -> float:
    """The seconds below which one of ours comes before torch's operator on a GPU that is not Hopper.

    ``torchs`` was measured on Hopper with deterministic kernels. On other GPUs torch may take others, up to twice as
    fast. So ours must take less than 0.5 of this time in float32 and float64, less than 0.65 in TF32 and 16 bits.
    """
    share = _CLEARLY_FASTER["half" if config.dtype.itemsize == 2 else config.precision]  # "half" are 16-bit types
    return share * torchs.waited if torchs.device < math.inf else 0.0


def choose(config: Config, requested: str, where: str, direction: Direction = "forward") -> Algorithm:
    """The algorithm for a configuration: the requested one; with ``"auto"`` the tuned one, or the first able one.

    A gradient that no kernel of the requested algorithm takes goes to ``gemm_col2im``.

    Raises:
        NotImplementedError: the requested algorithm, or with ``"auto"`` every one, cannot serve it; with the reasons.
    """
    if requested != "auto":
        named = BY_NAME[requested]
        if named.why_not(config) is None and named.why_not(config, direction) is not None:
            named = _GEMM_COL2IM
        if (reason := named.why_not(config)) is not None:
            raise NotImplementedError(f'{where}: {named.name}: {reason}; or use algorithm="auto"')
        return named
    if (entry := tuned.entry_of(config, direction)) is not None:
        measured = BY_NAME.get(entry.algorithms[0])
        if measured is not None and can_serve(measured, config, direction):
            return measured
    for algorithm, _ in preference(config, direction):
        if can_serve(algorithm, config, direction):
            return algorithm
    reasons = "; ".join(f"{algorithm.name}: {algorithm.why_not(config)}" for algorithm in ALGORITHMS)
    raise NotImplementedError(f"{where}: no algorithm can serve this: {reasons}")


def leaves_all_to_torch(config: Config, requested: str, where: str, of_input: bool, of_weight: bool) -> bool:
    """Whether a forward pass and the gradients that may follow it are torch's own, with torch's settings.

    ``of_input`` and ``of_weight`` say which gradients may follow; for the others see :func:`choose`.
    """
    if config.deterministic or choose(config, requested, where) is not NATIVE:
        return False
    if of_input and of_weight:
        gradients = choose_gradients(config, config, requested, where)
        return gradients.input_grad is gradients.weight_grad is NATIVE
    passes: tuple[tuple[Direction, bool], ...] = ("input_grad", of_input), ("weight_grad", of_weight)
    return all(choose(config, requested, where, direction) is NATIVE for direction, wanted in passes if wanted)


class Gradients(NamedTuple):
    """The algorithms of both gradients of a backward pass.

    Attributes:
        input_grad, weight_grad: the algorithms.
        share: whether both transpose grad_output from channels_last to NCHW, so that one transpose serves both; it
            does not count with ``at_once``.
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
        both_native = self.input_grad is self.weight_grad is NATIVE
        return both_native and not self.via_channels_last and config.memory_format is weight_config.memory_format

    @property
    def transposes_weight(self) -> bool:
        """Whether the weight is transposed too: cuDNN wants all tensors in one format, and torch's own copy is slow."""
        return self.via_channels_last and self.input_grad is NATIVE


def choose_gradients(config: Config, weight_config: Config, requested: str, where: str) -> Gradients:
    """The algorithms of the input's and the weight's gradient of one backward pass.

    A named algorithm, or a CPU, takes what :func:`choose` gives for each gradient, in one call if the algorithm can.
    ``"auto"`` on Hopper takes the pair with the least estimate: one algorithm that computes both at once; two that
    share the transpose of grad_output (channels_last); or, for 16-bit tensors in NCHW, two that compute in
    channels_last with three transposes around them.

    Args:
        config, weight_config: configurations of the input's and the weight's gradient, equal but for memory formats.
        requested, where: see :func:`choose`.

    Raises:
        NotImplementedError: see :func:`choose`.
    """
    if requested == "auto":
        if (measured := _tuned_gradients(config, weight_config)) is not None:
            return measured
        if config.device.type == "cuda" and why_no_kernels(config.device, config.spec) is None:
            able = tuple(one for one in ALGORITHMS if can_serve(one, config, "forward"))
            if not able:
                choose(config, requested, where)  # raises, with the reasons
            rule = _gradients_on_hopper if config.spec.is_hopper else _gradients_on_other_gpus
            return rule(config, weight_config, able)
    apart = one_by_one(config, weight_config, requested, where)
    if (one := apart.input_grad) is not apart.weight_grad:
        return apart
    # One call of torch's operator, with the user's own cuDNN settings, computes both.
    is_torchs_call = one is NATIVE and not config.deterministic
    return apart._replace(at_once=is_torchs_call or one.grads_estimate(config, weight_config) < math.inf)


def _tuned_gradients(config: Config, weight_config: Config) -> Gradients | None:
    """The tuned algorithms of both gradients together; None if none were tuned, or they cannot serve the layer now."""
    entry = tuned.entry_of(config, "grads")
    if entry is None or config.memory_format is not weight_config.memory_format:
        return None
    first, second = map(BY_NAME.get, entry.algorithms)
    if first is None or second is None:
        return None
    share, at_once, turned = (entry.how.get(name, False) for name in ("share", "at_once", "turned"))
    if turned:  # in files, for via_channels_last
        config = weight_config = replace(config, memory_format=torch.channels_last)
    both = replace(config, weight_format=weight_config.memory_format)
    if at_once and first is not NATIVE and first.choice(both, "grads") is None:
        return None
    if not (can_serve(first, config, "input_grad") and can_serve(second, config, "weight_grad")):
        return None
    return Gradients(first, second, share, at_once, turned)


def one_by_one(config: Config, weight_config: Config, requested: str, where: str) -> Gradients:
    """What :func:`choose` gives for each gradient alone, to run one after the other with a transpose they may share."""
    first = choose(config, requested, where, "input_grad")
    second = choose(weight_config, requested, where, "weight_grad")
    return Gradients(first, second, _share(first, second, config, weight_config))


def _share(first: Algorithm, second: Algorithm, config: Config, weight_config: Config) -> bool:
    """Whether both algorithms transpose the one grad_output from channels_last to NCHW."""
    both_last = config.memory_format is weight_config.memory_format is torch.channels_last
    return both_last and first.transposes(config, "input_grad") and second.transposes(weight_config, "weight_grad")


def _gradients_on_hopper(config: Config, weight_config: Config, able: tuple[Algorithm, ...]) -> Gradients:
    """The fastest gradients for tensors as they are or, for 16-bit tensors in NCHW, by way of channels_last."""
    seconds, gradients = _fastest_pair(config, weight_config, able)
    # float32 would gain less than the error of the estimates of cuDNN's gradients.
    if config.dtype.itemsize == 2 and config.memory_format is weight_config.memory_format is torch.contiguous_format:
        last = replace(config, memory_format=torch.channels_last)
        inner, others = _fastest_pair(last, last, able)
        transposes = via_channels_last_seconds(config, others.transposes_weight)
        if replace(inner, device=inner.device + transposes).waited < seconds.waited:
            return others._replace(via_channels_last=True)
    return gradients


def _gradients_on_other_gpus(config: Config, weight_config: Config, able: tuple[Algorithm, ...]) -> Gradients:
    """The gradients of a backward pass on a GPU that is not Hopper: torch's, unless ours are clearly faster.

    Whether they are is asked on the GPU that was measured; which of ours is taken, by the estimates for this GPU.
    """
    torchs = Gradients(NATIVE, NATIVE, share=False, at_once=True)
    ours = tuple(one for one in able if one is not NATIVE)
    if not ours:
        return torchs
    pair = _on_measured_gpu(config), _on_measured_gpu(weight_config)
    of_torch = Seconds(NATIVE.grads_estimate(*pair), NATIVE.host_seconds(config, "grads"))
    is_faster = _fastest_pair(*pair, ours)[0].waited < _clearly_below(config, of_torch)
    return _fastest_pair(config, weight_config, ours)[1] if is_faster or NATIVE not in able else torchs


@lru_cache(maxsize=1024)
def _fastest_pair(config: Config, weight_config: Config, among: tuple[Algorithm, ...]) -> tuple[Seconds, Gradients]:
    """The estimate and the algorithms of both gradients for which a step waits the least, for tensors as they are."""
    inputs, weights = _estimates(config, "input_grad", among), _estimates(weight_config, "weight_grad", among)
    saved, host = grad_output_transpose_seconds(config), {one: one.host_seconds(config, "grads") for one in among}
    found = []
    for (first_seconds, first), (second_seconds, second) in itertools.product(inputs, weights):
        share = _share(first, second, config, weight_config)
        seconds = first_seconds.device + second_seconds.device - (saved if share else 0)
        found.append((Seconds(seconds, max(host[first], host[second])), Gradients(first, second, share)))
    for one in among:
        seconds = one.grads_estimate(config, weight_config)
        found.append((Seconds(seconds, host[one]), Gradients(one, one, share=False, at_once=True)))
    return min(found, key=lambda item: item[0].waited)


tuned.on_change.append(_fastest_pair.cache_clear)  # an algorithm's estimate is that of its tuned kernel, if it has one


def log_choice(chosen: Algorithm | Gradients, config: Config, weight_config: Config, direction: Pass) -> None:
    """Log at DEBUG what ``auto`` chose for a new configuration: one algorithm, or those of both gradients."""
    if not tuned.log.isEnabledFor(logging.DEBUG):
        return
    if isinstance(chosen, Gradients):
        names = dict.fromkeys((chosen.input_grad.name, chosen.weight_grad.name))
        last = replace(config, memory_format=torch.channels_last)
        made = chosen.choices(*(last, last) if chosen.via_channels_last else (config, weight_config))
    else:
        names, made = {chosen.name: None}, [chosen.choice(config, direction)]
    layer, size = " ".join(tuned.key_of(config, direction)), "x".join(map(str, tuned.size_of(config)))
    kernels, seconds = " and ".join(map(str, made)), sum(one.seconds for one in made if one)
    expected = f"expected {MICROSECONDS * seconds:,.0f} us" if 0 < seconds < math.inf else "no estimate"
    text = f"{' and '.join(names)}, kernel {kernels}, {expected}"
    tuned.log.debug("auto chooses for %s %s: %s", layer, size, text)
