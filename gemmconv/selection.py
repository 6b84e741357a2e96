"""The choice of an algorithm for one pass. What a backward pass takes for both gradients is chosen in pairs.py.

``auto`` takes what :func:`gemmconv.tune` measured, where it did. Else it compares the algorithms that can serve a pass:

    device      function                  rule
    Hopper      estimates                 the shortest estimated wait, of device and host
    other GPUs  _first_on_other_gpus      torch's operator, unless ours is clearly faster
    CPU         _order_on_cpu             a rule that was fitted to measured rows
    CPU, no C   preference, at its end    torch's operator

An algorithm that is named computes a pass as follows. ``why_not(config, direction)`` says why it cannot compute a pass,
and ``why_not(config)`` why not the forward pass (`pytest tests/test_selection.py tests/test_portable.py` tests it):

    it cannot compute the layer's forward pass    an error, for gradients too: it serves a layer or it does not
    it cannot compute this gradient               gemm_col2im computes it
    it can compute both                           it does

``auto`` takes an algorithm for a gradient only if that can compute the forward pass too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gemmconv import tuned
from gemmconv.algorithms import ALGORITHMS, Algorithm, Config
from gemmconv.device import MEASURED, DeviceSpec, spec_of
from gemmconv.geometry import Problem
from gemmconv.kernels.base import DEFAULT_WORKSPACE_LIMIT, Direction, Precision, missing_software
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.cpu import estimate
from gemmconv.kernels.cpu.library import isa_name

BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}
NAMES = tuple(BY_NAME)
NATIVE = BY_NAME["native"]  # torch's operator
_GEMM_COL2IM = BY_NAME["gemm_col2im"]  # computes a gradient that no kernel of a named algorithm takes
_COST = costs_of("choice")  # gemmconv/costs/h200.json
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


# torch.compile cannot trace this function: it takes its value at compile time as a constant.
torch_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rounds_as_asked(dtype: torch.dtype, device: torch.device, precision: Precision | None) -> bool:
    """Whether torch's operator rounds products as ``precision`` asks: True, except perhaps for float32 on CUDA."""
    has_choice = precision is not None and dtype == torch.float32 and device.type == "cuda"
    return not has_choice or precision == torch_precision(dtype, device)


def is_deterministic(requested: str, device: torch.device, spec: DeviceSpec) -> bool:
    """Whether torch's operator, if it is chosen, is limited to deterministic kernels: for ``"auto"`` on Hopper.

    False if our kernels are not available: then torch's operator behaves as it does without gemmconv.
    """
    return requested == "auto" and device.type == "cuda" and spec.is_hopper and missing_software(device) is None


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
    return Config(
        problem,
        dtype,
        device,
        precision=precision or current,
        workspace_limit=DEFAULT_WORKSPACE_LIMIT if workspace_limit is None else workspace_limit,
        torch_precision=current,
        memory_format=memory_format,
        bias=bias,
        spec=spec,
        deterministic=is_deterministic(algorithm, device, spec),
    )


@dataclass(frozen=True)
class Seconds:
    """Estimated seconds of a call: those of the device, and those for which the host is kept to enqueue it.

    A step of large layers waits for the device, and a step of small ones for the host: the longer time counts. But host
    time counts up to twice the device time at most (``most_slowdown``, a policy): in a CUDA graph it is free, and there
    no choice shall be more than twice as slow. What counts is ``max(device, min(host, 2 * device))``:

        device    host     counts as
        19 us     5 us     19 us, so this one is taken
        10 us     50 us    20 us
        21 us     5 us     21 us
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


def estimates(
    config: Config, direction: Direction, among: Sequence[Algorithm] = ALGORITHMS
) -> list[tuple[Seconds, Algorithm]]:
    """The estimates of algorithms, the shortest wait first; last those that cannot serve the pass, as infinite."""
    able = [one for one in among if can_serve(one, config, direction)]
    found = [(Seconds(one.estimate(config, direction), one.host_seconds(config, direction)), one) for one in able]
    found.sort(key=lambda item: item[0].waited)
    return found + [(Seconds(math.inf, math.inf), one) for one in among if one not in able]


def preference(config: Config, direction: Direction = "forward") -> Sequence[tuple[Algorithm, str]]:
    """The algorithms in the order in which ``auto`` tries them, each with the reason for its position."""
    if config.device.type == "cuda":
        reasons = [(one, _estimate_text(seconds)) for seconds, one in estimates(config, direction)]
        if config.spec.is_hopper:
            return reasons
        first, why = _first_on_other_gpus(config, direction)
        return [(first, why), *(one for one in reasons if one[0] is not first)]
    if config.device.type == "cpu" and (isa := isa_name()) is not None:
        return _order_on_cpu(config, direction, isa)
    others = [(one, "comes later") for one in ALGORITHMS if one is not NATIVE]
    return [(NATIVE, f"first on {config.device.type}"), *others]


def _first_on_other_gpus(config: Config, direction: Direction) -> tuple[Algorithm, str]:
    """The first algorithm on a GPU that is not Hopper: torch's operator, unless another is clearly faster.

    The estimates that ``explain`` prints are those for the GPU itself; those of this function only decide who is first.

    Only a Hopper GPU was measured, so both are estimated as if on that one: see :func:`on_measured_gpu`. If ours takes
    40 us there and torch's operator 100, it is assumed to take 0.4 of torch's time here too. :func:`clearly_below` is
    the margin for the error of that: in TF32, say, ours comes first below 0.65 of torch's time.
    """
    on_hopper = estimates(on_measured_gpu(config), direction)
    seconds, first = on_hopper[0]
    seconds_of_torch = next(seconds for seconds, one in on_hopper if one is NATIVE)
    if first is not NATIVE and seconds.waited < clearly_below(config, seconds_of_torch):
        return first, "clearly faster than torch's operator: comes first"
    is_known = NATIVE.estimate(config, direction) < math.inf
    why = "torch's operator, since no other is clearly faster" if is_known else "torch's operator was not measured"
    return NATIVE, f"{why}: comes first"


def _order_on_cpu(config: Config, direction: Direction, isa: str) -> list[tuple[Algorithm, str]]:
    """The order on a CPU with the C extension, by the rule in :mod:`gemmconv.kernels.cpu.estimate`.

    The order is that of :func:`estimates`. There torch's operator has a bonus, since the rule may be wrong: its
    estimate (``estimate.native_seconds``) is its expected time divided by ``least``, the speed-up from which ``auto``
    takes ``fused``. With a least of 1.3, torch's 150 us count as 115, and ``fused`` comes first if it is expected to
    take less. Where a weight changes between calls, the time to pack it counts against ``fused`` too.
    """
    (ratio, least), threads = estimate.speedups(config, direction), torch.get_num_threads()
    fused = f"expected at {ratio:.2f} times torch's speed with {isa} and {threads} threads" if ratio else "not measured"
    texts = {"fused": f"{fused}; auto takes it from {least:.2f} on", "native": "torch's operator"}
    return [
        (one, texts.get(one.name, "kept to compare with: slower than fused")) for _, one in estimates(config, direction)
    ]


def _estimate_text(seconds: Seconds) -> str:
    if seconds.device == math.inf:
        return "no estimate: comes last"
    host = f", {MICROSECONDS * seconds.host:,.0f} us of the host" if seconds.host else ""
    return f"estimated at {MICROSECONDS * seconds.device:,.0f} us{host}"


def on_measured_gpu(config: Config) -> Config:
    """The configuration with the speeds of the measured GPU, a Hopper, and the capability of the GPU at hand.

    So estimates are Hopper's, but kernels that only Hopper can run do not count.
    """
    return replace(config, spec=replace(MEASURED, capability=config.spec.capability))


def clearly_below(config: Config, seconds_of_torch: Seconds) -> float:
    """The seconds below which one of ours comes before torch's operator on a GPU that is not Hopper.

    ``seconds_of_torch`` are Hopper's, for deterministic kernels. On other GPUs torch may take others, in
    float32 up to twice as fast. So ours must take less than half of that time in float32 and float64, and less than
    0.65 of it in TF32 and 16 bits.
    """
    share = _CLEARLY_FASTER["half" if config.dtype.itemsize == 2 else config.precision]  # "half" are 16-bit types
    return share * seconds_of_torch.waited if seconds_of_torch.device < math.inf else 0.0


def choose(config: Config, requested: str, where: str, direction: Direction = "forward") -> Algorithm:
    """The algorithm for a configuration: the requested one; with ``"auto"`` the tuned one, or the first able one.

    A gradient that no kernel of the requested algorithm takes goes to ``gemm_col2im``.

    Args:
        config, direction: what is computed.
        requested: the caller's argument ``algorithm``.
        where: the operator's name, for the error.

    Raises:
        NotImplementedError: the requested algorithm, or with ``"auto"`` every one, cannot serve it; with the reasons.
    """
    if requested != "auto":
        named = BY_NAME[requested]
        if named.why_not(config) is None and named.why_not(config, direction) is not None:
            named = _GEMM_COL2IM  # which serves every gradient of a layer whose forward pass it serves
        if (reason := named.why_not(config)) is not None:
            raise NotImplementedError(f'{where}: {named.name}: {reason}; or use algorithm="auto"')
        return named
    if (entry := tuned.entry_of(config, direction)) is not None:
        fastest = BY_NAME.get(entry.algorithms[0])  # the only one: entries of two are for both gradients
        if fastest is not None and can_serve(fastest, config, direction):
            return fastest
    for algorithm, _ in preference(config, direction):
        if can_serve(algorithm, config, direction):
            return algorithm
    raise no_algorithm(config, where, direction)


def no_algorithm(config: Config, where: str, direction: Direction = "forward") -> NotImplementedError:
    """The error of a call that no algorithm can serve, with the reason of each."""
    reasons = "; ".join(f"{one.name}: {one.why_not(config) or one.why_not(config, direction)}" for one in ALGORITHMS)
    return NotImplementedError(f"{where}: no algorithm can serve this: {reasons}")
