"""The choice of a pair of algorithms, for both gradients of one backward pass.

``auto`` takes the pair that :func:`gemmconv.tune` measured, where it did. Else the rule depends on the device:

    device      function                  rule
    Hopper      _pair_on_hopper           the pair for which a step waits the least, by estimates
    other GPUs  _pair_on_other_gpus       torch's operator, unless ours is clearly faster
    CPU         one_by_one                what selection.choose gives for each gradient alone

For a named algorithm, and on a GPU for which no kernels can be compiled, one_by_one is used too. If it gives the same
algorithm twice, one call computes both gradients: of torch's operator always, of another if that is estimated to be
faster than two calls.

An example on an H200: input ``[32, 256, 16, 16]``, float16 in NCHW, 128 output channels, kernel 4, stride 2, padding 1.
Estimated device times in microseconds, by algorithm; :class:`gemmconv.selection.Seconds` says how host times count:

                      fused    native    gemm_col2im    direct
    input_grad         29.8      56.8           45.3     769.6
    weight_grad        35.8      71.6          111.6     622.9
    both in one call      -         -          141.2         -

_fastest_pair compares all 16 pairs of the first two rows, and the third row. (On Hopper one call of torch's operator
gains nothing over two, so it is not listed. On other GPUs _pair_on_other_gpus counts it.) The best is fused for both:
65.6 us. The alternative is to transpose all tensors to channels_last first: then the kernels would take 53.4 us, and
three transposes 18.3 us more, 71.7 us in all. So the tensors stay in NCHW.
"""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from gemmconv import tuned
from gemmconv.algorithms import ALGORITHMS, Algorithm, Config
from gemmconv.kernels.base import Direction, Pass, why_no_kernels
from gemmconv.kernels.layout.transpose import grad_output_transpose_seconds, via_channels_last_seconds
from gemmconv.selection import (
    BY_NAME,
    MICROSECONDS,
    NATIVE,
    Seconds,
    can_serve,
    choose,
    clearly_below,
    estimates,
    no_algorithm,
    on_measured_gpu,
)

Computation = tuple[Pass, Algorithm, Config]  # of a pass: what computes it, and its configuration


class Gradients(NamedTuple):
    """The algorithms of both gradients of a backward pass, and how they are computed.

    One call computes both (``at_once``), or two calls do; if both calls need grad_output in NCHW, it is transposed once
    for both. With ``via_channels_last`` tensors in NCHW are transposed before the calls, and the results after them.
    """

    input_grad: Algorithm
    weight_grad: Algorithm
    at_once: bool = False  # whether one call of an algorithm computes both
    via_channels_last: bool = False  # files of tuned choices call it "turned", an old name

    def passes(self, config: Config, weight_config: Config) -> list[Computation]:
        """The passes that are computed, each with its algorithm and configuration: one if at once, else two."""
        if self.via_channels_last:
            config = weight_config = replace(config, memory_format=torch.channels_last)
        if self.at_once:
            return [("grads", self.input_grad, replace(config, weight_format=weight_config.memory_format))]
        return [("input_grad", self.input_grad, config), ("weight_grad", self.weight_grad, weight_config)]

    def shares_transpose(self, config: Config, weight_config: Config) -> bool:
        """Whether one transpose of grad_output, from channels_last to NCHW, serves two calls on tensors as they are."""
        if self.at_once or not (config.channels_last and weight_config.channels_last):
            return False
        of_input = self.input_grad.transposes(config, "input_grad")
        return of_input and self.weight_grad.transposes(weight_config, "weight_grad")

    @property
    def transposes_weight(self) -> bool:
        """Whether our kernel transposes the weight too: cuDNN needs it in channels_last, and torch's copy is slower."""
        return self.via_channels_last and self.input_grad is NATIVE


def choose_pair(config: Config, weight_config: Config, requested: str, where: str) -> Gradients:
    """The algorithms of the input's and the weight's gradient of one backward pass.

    Args:
        config, weight_config: configurations of the input's and the weight's gradient, equal but for memory formats.
        requested, where: see :func:`choose`.

    Raises:
        NotImplementedError: see :func:`choose`.
    """
    if requested == "auto":
        if (measured := _tuned_pair(config, weight_config)) is not None:
            return measured
        if config.device.type == "cuda" and why_no_kernels(config.device, config.spec) is None:
            able = tuple(one for one in ALGORITHMS if can_serve(one, config, "forward"))
            if not able:
                raise no_algorithm(config, where)
            rule = _pair_on_hopper if config.spec.is_hopper else _pair_on_other_gpus
            return rule(config, weight_config, able)
    pair = one_by_one(config, weight_config, requested, where)
    algorithm = pair.input_grad
    if algorithm is not pair.weight_grad:
        return pair
    at_once = algorithm is NATIVE or _fastest_pair(config, weight_config, (algorithm,))[1].at_once
    return pair._replace(at_once=at_once)


def _tuned_pair(config: Config, weight_config: Config) -> Gradients | None:
    """The tuned algorithms of both gradients together; None if none were tuned, or they cannot serve the layer now."""
    entry = tuned.entry_of(config, "grads")
    if entry is None or config.memory_format is not weight_config.memory_format:
        return None
    first, second = map(BY_NAME.get, entry.algorithms)
    if first is None or second is None:
        return None
    at_once, via_channels_last = (entry.how.get(name, False) for name in ("at_once", "turned"))
    if via_channels_last:
        config = weight_config = replace(config, memory_format=torch.channels_last)
    both = replace(config, weight_format=weight_config.memory_format)
    if at_once and first is not NATIVE and first.choice(both, "grads") is None:
        return None
    if not (can_serve(first, config, "input_grad") and can_serve(second, config, "weight_grad")):
        return None
    return Gradients(first, second, at_once, via_channels_last)


def one_by_one(config: Config, weight_config: Config, requested: str, where: str) -> Gradients:
    """What :func:`choose` gives for each gradient alone, to run one after the other with a transpose they may share."""
    first = choose(config, requested, where, "input_grad")
    return Gradients(first, choose(weight_config, requested, where, "weight_grad"))


def _pair_on_hopper(config: Config, weight_config: Config, able: tuple[Algorithm, ...]) -> Gradients:
    """The fastest gradients for tensors as they are or, for 16-bit tensors in NCHW, by way of channels_last."""
    seconds, gradients = _fastest_pair(config, weight_config, able)
    # float32 would gain less than the error of the estimates of cuDNN's gradients.
    if config.dtype.itemsize == 2 and config.memory_format is weight_config.memory_format is torch.contiguous_format:
        last = replace(config, memory_format=torch.channels_last)
        last_seconds, last_gradients = _fastest_pair(last, last, able)
        last_gradients = last_gradients._replace(via_channels_last=True)
        transposes = via_channels_last_seconds(config, last_gradients.transposes_weight)
        if replace(last_seconds, device=last_seconds.device + transposes).waited < seconds.waited:
            return last_gradients
    return gradients


def _pair_on_other_gpus(config: Config, weight_config: Config, able: tuple[Algorithm, ...]) -> Gradients:
    """The gradients of a backward pass on a GPU that is not Hopper: torch's, unless ours are clearly faster.

    Whether they are is estimated as on Hopper, which was measured; which of ours is taken, by estimates for this GPU.
    """
    if ours := tuple(one for one in able if one is not NATIVE):
        as_measured = on_measured_gpu(config), on_measured_gpu(weight_config)  # with the capability of the GPU at hand
        seconds_of_torch = Seconds(NATIVE.grads_estimate(*as_measured), NATIVE.host_seconds(as_measured[0], "grads"))
        is_faster = _fastest_pair(*as_measured, ours)[0].waited < clearly_below(config, seconds_of_torch)
        if is_faster or NATIVE not in able:
            return _fastest_pair(config, weight_config, ours)[1]
    return Gradients(NATIVE, NATIVE, at_once=True)


@lru_cache(maxsize=1024)
def _fastest_pair(config: Config, weight_config: Config, among: tuple[Algorithm, ...]) -> tuple[Seconds, Gradients]:
    """The estimate and the algorithms of both gradients for which a step waits the least, for tensors as they are.

    Of those for which it waits equally long, they are the ones that keep the device busy for the shortest time.
    """
    inputs, weights = estimates(config, "input_grad", among), estimates(weight_config, "weight_grad", among)
    saved, found = grad_output_transpose_seconds(config), []
    # Host times were measured for whole backward passes, not for a gradient each. So of a mixed pair the longer one
    # counts, not the sum.
    host = {one: one.host_seconds(config, "grads") for one in among}
    for (first_seconds, first), (second_seconds, second) in itertools.product(inputs, weights):
        gradients = Gradients(first, second)
        shared = saved if gradients.shares_transpose(config, weight_config) else 0
        seconds = first_seconds.device + second_seconds.device - shared
        found.append((Seconds(seconds, max(host[first], host[second])), gradients))
    for one in among:
        seconds = one.grads_estimate(config, weight_config)
        found.append((Seconds(seconds, host[one]), Gradients(one, one, at_once=True)))
    return min(found, key=lambda item: (item[0].waited, item[0].device))


tuned.on_change.append(_fastest_pair.cache_clear)  # estimates may be those of tuned kernels


def leaves_all_to_torch(config: Config, requested: str, where: str, of_input: bool, of_weight: bool) -> bool:
    """Whether a forward pass and the gradients that may follow it are torch's own, with torch's settings.

    A call of torch's operator for which we set cuDNN's flag (``config.deterministic``) is not torch's own. So this is
    always False for "auto" on Hopper, if kernels can be compiled. ``of_input`` and ``of_weight`` say which gradients
    may follow; for the others see :func:`choose`.
    """
    if config.deterministic or choose(config, requested, where) is not NATIVE:
        return False
    if of_input and of_weight:
        gradients = choose_pair(config, config, requested, where)
        return gradients.input_grad is gradients.weight_grad is NATIVE
    passes: tuple[tuple[Direction, bool], ...] = ("input_grad", of_input), ("weight_grad", of_weight)
    return all(choose(config, requested, where, direction) is NATIVE for direction, wanted in passes if wanted)


def log_choice(passes: list[Computation]) -> None:
    """Log at DEBUG what ``auto`` chose for a new configuration: for one pass, or for both gradients."""
    if not tuned.log.isEnabledFor(logging.DEBUG):
        return
    names = dict.fromkeys(algorithm.name for _, algorithm, _ in passes)
    made = [algorithm.choice(its_config, which) for which, algorithm, its_config in passes]
    direction = "grads" if len(passes) > 1 else passes[0][0]
    config = passes[0][2]
    layer, size = " ".join(tuned.key_of(config, direction)), "x".join(map(str, tuned.size_of(config)))
    kernels, seconds = " and ".join(map(str, made)), sum(one.seconds for one in made if one)
    expected = f"expected {MICROSECONDS * seconds:,.0f} us" if 0 < seconds < math.inf else "no estimate"
    tuned.log.debug("auto chooses for %s %s: %s, kernel %s, %s", layer, size, " and ".join(names), kernels, expected)
