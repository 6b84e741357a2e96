"""An algorithm that a user can name in ``algorithm=``, and the kernels that compute its passes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import torch

from gemmconv import tuned
from gemmconv.kernels.base import Choice, Config, Direction, Kernel, Pass, choices, missing_software
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.search_cache import cached
from gemmconv.kernels.size_class import representatives

_COST = costs_of("choice")


class Algorithm(ABC):
    """One way to compute a transposed convolution and its gradients.

    The prepared calls take tensors that fit the configuration, of any strides.

    Attributes:
        name: the value of ``algorithm=``.
        kernels: kernels that compute its passes; if none can, the first one for the pass gives the reason.
    """

    name: ClassVar[str]
    kernels: tuple[Kernel, ...]

    def host_seconds(self, config: Config, direction: Pass) -> float:
        """Seconds for which a call keeps the host. 0 on a CPU, and for kernels alone, which are one launch of a graph.

        ``"grads"`` is a backward pass in which it computes one gradient or both.
        """
        if config.device.type != "cuda":
            return 0.0
        tables = {"forward": _COST.table("forward"), "grads": _COST.table("grads")}
        return tables.get(direction, _COST.table("gradient")).get(self.name, 0.0)

    def choice(self, config: Config, direction: Pass) -> Choice | None:
        """The tuned kernel and tile, else those with the least estimate; None if no kernel computes the pass."""
        kernels = self.kernels_for(config)
        if (measured := tuned.choice_of(self.name, kernels, config, direction)) is not None:
            return measured
        return _fitted(kernels, config, direction, missing_software(config.device))

    def kernels_for(self, config: Config) -> tuple[Kernel, ...]:
        """Its kernels for the configuration's type of device; all of them if there are none for that type."""
        return tuple(one for one in self.kernels if one.device_type == config.device.type) or self.kernels

    def choice_of(self, kernel: Kernel, config: Config, direction: Pass) -> Choice | None:
        """The tile of one kernel with the least estimate; None if the kernel cannot compute the pass."""
        return _fitted((kernel,), config, direction, missing_software(config.device))

    def why_not(self, config: Config, direction: Direction = "forward") -> str | None:
        """Why it cannot serve a pass, as a clause after its name; None where it can."""
        if self.choice(config, direction) is not None:
            return None
        kernels = self.kernels_for(config)
        return next(kernel for kernel in kernels if direction in kernel.directions).why_not(config, direction)

    def workspace_bytes(self, config: Config, direction: Direction) -> int:
        """Bytes of temporary memory that one call takes at most beside its arguments and its result.

        ``"weight_grad"`` covers calls for both gradients at once too. Transposed copies of tensors are not counted.
        """
        passes: tuple[Pass, ...] = ("weight_grad", "grads") if direction == "weight_grad" else (direction,)
        choices = (self.choice(config, one) for one in passes)
        return max((one.kernel.workspace_bytes(config, direction, one.tile) for one in choices if one), default=0)

    def estimate(self, config: Config, direction: Direction) -> float:
        """Estimated seconds of one call, by which algorithms are compared; infinite if there is no estimate."""
        return math.inf if (choice := self.choice(config, direction)) is None else choice.seconds

    def transposes(self, config: Config, direction: Direction) -> bool:
        """Whether a gradient's call begins with transposing a grad_output in channels_last to NCHW."""
        choice = None if direction == "forward" else self.choice(config, direction)
        return choice is not None and choice.kernel.computed_in is torch.contiguous_format

    def prepare(self, config: Config, direction: Pass) -> Callable[..., Any]:
        """Prepare the call of a pass that it serves; ``"grads"`` where one call computes both gradients."""
        choice = self.choice(config, direction)
        assert choice is not None
        return choice.kernel.prepare(config, direction, choice.tile)

    def grads_estimate(self, config: Config, weight_config: Config) -> float:
        """Estimated seconds of one call that computes both gradients; infinite if no kernel does that."""
        choice = self.choice(replace(config, weight_format=weight_config.memory_format), "grads")
        return math.inf if choice is None else choice.seconds


class AlgorithmOfOne(Kernel, Algorithm):
    """An algorithm that is its own and only kernel; methods that both base classes have are defined here."""

    directions = ("forward", "input_grad", "weight_grad", "grads")

    @property
    def kernels(self) -> tuple[Kernel, ...]:  # type: ignore[override]
        return (self,)

    @abstractmethod
    def why_not(self, config: Config, direction: Pass = "forward") -> str | None: ...

    @abstractmethod
    def workspace_bytes(self, config: Config, direction: Pass, tile: Any = None) -> int: ...

    @abstractmethod
    def prepare(self, config: Config, direction: Pass, tile: Any = None) -> Callable[..., Any]: ...

    def estimate(self, config: Config, direction: Direction) -> float:
        return self.expected(config, direction, self.tile(config, direction))

    def choice(self, config: Config, direction: Pass) -> Choice | None:
        return next(iter(choices(config, direction, (self,))), None)

    def tiles(self, config: Config, direction: Pass) -> tuple[Any, ...]:
        return (None,)


@lru_cache(maxsize=4096)
def _fitted(kernels: tuple[Kernel, ...], config: Config, direction: Pass, lacks: str | None) -> Choice | None:
    """The best choice of the size classes, fitted to the sizes; the best for these sizes alone if none fits."""
    fitting = []
    for representative in representatives(config):
        if (best := _fastest(kernels, representative, direction, lacks)) is not None:
            tile = best.kernel.fitted(config, direction, best.tile)
            if tile is not None:
                fitting.append(Choice(best.kernel, tile, best.kernel.expected(config, direction, tile)))
    if fitting:
        return min(fitting, key=lambda one: one.seconds)
    # A layer that none of them can compute is not searched for, and so adds nothing to the cache on disk.
    able = tuple(kernel for kernel in kernels if kernel.why_not_device_or_dtype(config, direction) is None)
    return _fastest(able, config, direction, lacks) if able else None


@lru_cache(maxsize=4096)
def _fastest(kernels: tuple[Kernel, ...], config: Config, direction: Pass, lacks: str | None) -> Choice | None:
    """The choice with the least expected time; None if no kernel computes the pass.

    Choices depend on ``lacks``, too: it is the result of :func:`missing_software`.
    """

    def search() -> tuple[int, Any, float] | None:
        best = min(choices(config, direction, kernels), key=lambda choice: choice.seconds, default=None)
        return None if best is None else (kernels.index(best.kernel), best.tile, best.seconds)

    if config.device.type == "cuda" and lacks is None:
        on_any = replace(config, device=torch.device("cuda"))  # every GPU of this kind
        found = cached(lambda: ([kernel.name for kernel in kernels], repr(on_any), direction), search)
    else:
        found = search()
    return None if found is None else Choice(kernels[found[0]], *found[1:])
