"""What a user can name in ``algorithm=``: a name, and the kernels that compute its passes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import torch

from gemmconv import tuned
from gemmconv.kernels.base import (
    BothGradients,
    Choice,
    Config,
    Direction,
    Forward,
    Gradient,
    Kernel,
    Pass,
    choices,
    missing,
)
from gemmconv.kernels.kept import kept
from gemmconv.kernels.layout.transpose import grad_turning_seconds
from gemmconv.kernels.size_class import representatives


class Algorithm(ABC):
    """One way to compute a transposed convolution and its gradients.

    The prepared calls take tensors that fit the configuration, of any strides.

    Attributes:
        name: what a user writes in ``algorithm=``.
        summary: what it does, in a line.
        kernels: what computes its passes; the first that may compute a pass says why it cannot where none can.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    kernels: tuple[Kernel, ...]

    def choice(self, config: Config, direction: Pass) -> Choice | None:
        """The kernel and tile that were tuned, else those of the least estimate; None where none computes the pass."""
        kernels = self.kernels_for(config)
        if (measured := tuned.choice_of(self.name, kernels, config, direction)) is not None:
            return measured
        return _fitted(kernels, config, direction, missing(config.device))

    def kernels_for(self, config: Config) -> tuple[Kernel, ...]:
        """Its kernels for the configuration's type of device; all where it has none for that."""
        return tuple(one for one in self.kernels if one.device_type == config.device.type) or self.kernels

    def choice_of(self, kernel: Kernel, config: Config, direction: Pass) -> Choice | None:
        """The same of one of its kernels."""
        return _fitted((kernel,), config, direction, missing(config.device))

    def why_not(self, config: Config, direction: Direction = "forward") -> str | None:
        """Why it cannot serve a pass, as a clause after its name; None where it can."""
        if self.choice(config, direction) is not None:
            return None
        kernels = self.kernels_for(config)
        return next(kernel for kernel in kernels if direction in kernel.directions).why_not(config, direction)

    def can_serve(self, config: Config) -> bool:
        """Whether it can serve forward passes: of the classes of sizes, which is known at once, or of these alone."""
        lacks = missing(config.device)
        of_classes = (_known(self.kernels, one, "forward", lacks, True) for one in representatives(config))
        return any(of_classes) or self.why_not(config) is None

    def workspace_bytes(self, config: Config, direction: Direction) -> int:
        """Bytes of temporary memory that one call takes at most beside its arguments and its result.

        A weight gradient's are those of both gradients at once too. Tensors that are transposed do not count.
        """
        passes: tuple[Pass, ...] = ("weight_grad", "grads") if direction == "weight_grad" else (direction,)
        found = (self.choice(config, one) for one in passes)
        return max((one.kernel.workspace_bytes(config, direction, one.tile) for one in found if one), default=0)

    def estimate(self, config: Config, direction: Direction) -> float:
        """Roughly the seconds of one call on a GPU, to choose by; infinite where nothing is known of it."""
        return math.inf if (choice := self.choice(config, direction)) is None else choice.seconds

    def turns(self, config: Config, direction: Direction) -> bool:
        """Whether a gradient's call begins with transposing a grad_output in channels_last to NCHW."""
        choice = None if direction == "forward" else self.choice(config, direction)
        return choice is not None and choice.kernel.computed_in is torch.contiguous_format

    def forward(self, config: Config) -> Forward:
        """Prepare output = conv_transpose2d(input, weight, bias)."""
        return self._prepare(config, "forward")

    def input_grad(self, config: Config) -> Gradient:
        """Prepare grad_input from (grad_output, weight)."""
        return self._prepare(config, "input_grad")

    def weight_grad(self, config: Config) -> Gradient:
        """Prepare grad_weight from (grad_output, input)."""
        return self._prepare(config, "weight_grad")

    def grads(self, config: Config, weight_config: Config) -> BothGradients:
        """Prepare both gradients at once, from (grad_output, input, weight), where :meth:`grads_estimate` is finite.

        Args:
            config, weight_config: of the input's and of the weight's gradient; they differ in their memory format, if
                at all.
        """
        if self.choice(both := _of_both(config, weight_config), "grads") is None:
            raise NotImplementedError(f"{self.name} computes one gradient after the other")
        return self._prepare(both, "grads")

    def grads_estimate(self, config: Config, weight_config: Config) -> float:
        """Roughly the seconds of both gradients at once; infinite where one after the other is faster."""
        choice = self.choice(_of_both(config, weight_config), "grads")
        if choice is None:
            return math.inf
        one_by_one = self.one_by_one_seconds(config, weight_config)
        return choice.seconds if choice.seconds < one_by_one else math.inf

    def one_by_one_seconds(self, config: Config, weight_config: Config) -> float:
        """What one gradient after the other takes, of a grad_output that is transposed once in one format."""
        seconds = self.estimate(config, "input_grad") + self.estimate(weight_config, "weight_grad")
        return seconds - (grad_turning_seconds(config) if config.memory_format is weight_config.memory_format else 0)

    def _prepare(self, config: Config, direction: Pass) -> Callable[..., Any]:
        choice = self.choice(config, direction)
        assert choice is not None
        return choice.kernel.prepare(config, direction, choice.tile)


class AlgorithmOfOne(Kernel, Algorithm):
    """An algorithm that is its only kernel: it overrides what :class:`Algorithm` says of the kernels' passes."""

    directions = ("forward", "input_grad", "weight_grad", "grads")
    serves = "any layer"

    @property
    def kernels(self) -> tuple[Kernel, ...]:  # type: ignore[override]
        return (self,)

    @abstractmethod
    def why_not(self, config: Config, direction: Pass = "forward") -> str | None: ...

    def can_serve(self, config: Config) -> bool:
        return self.why_not(config) is None

    @abstractmethod
    def workspace_bytes(self, config: Config, direction: Pass, tile: Any = None) -> int: ...

    def estimate(self, config: Config, direction: Direction) -> float:
        return self.expected(config, direction, self.tile(config, direction))

    def choice(self, config: Config, direction: Pass) -> Choice | None:
        if self.why_not(config, direction) is not None:
            return None
        tile = self.tile(config, direction)
        return Choice(self, tile, self.expected(config, direction, tile))

    def tiles(self, config: Config, direction: Pass) -> tuple[Any, ...]:
        return (None,)

    def tile(self, config: Config, direction: Pass) -> Any:
        return next(iter(self.tiles(config, direction)))

    def _prepare(self, config: Config, direction: Pass) -> Callable[..., Any]:
        return self.prepare(config, direction, None)


def _of_both(config: Config, weight_config: Config) -> Config:
    """What kernels of both gradients are asked for."""
    return replace(config, weight_format=weight_config.memory_format)


_NEARLY = 1.15  # of the least estimate for a class of sizes: what may be faster for some of it


@lru_cache(maxsize=4096)
def _fitted(kernels: tuple[Kernel, ...], config: Config, direction: Pass, lacks: str | None) -> Choice | None:
    """The best choice of the classes of sizes, made for these; of these sizes alone where that cannot be."""
    found = []
    for of_class in representatives(config):
        for kernel, tile, _ in _known(kernels, of_class, direction, lacks, True):
            if (fitted := kernel.fitted(config, direction, tile)) is not None:
                found.append(Choice(kernel, fitted, kernel.expected(config, direction, fitted)))
    if not found:
        able = tuple(kernel for kernel in kernels if kernel.refuses(config, direction) is None)
        found = [*_known(able, config, direction, lacks)[:1]] if able else []
    return min(found, key=lambda one: one.seconds, default=None)


@lru_cache(maxsize=4096)
def _known(
    kernels: tuple[Kernel, ...], config: Config, direction: Pass, lacks: str | None, of_class: bool = False
) -> tuple[Choice, ...]:
    """The choices nearly as good as the best, which comes first.

    Args:
        lacks: what :func:`missing` says: what else they depend on.
        of_class: whether the sizes stand for a class, so that others will ask the same.
    """

    def asked() -> object:
        return [kernel.name for kernel in kernels], _text(config), direction

    def find() -> tuple[tuple[int, Any, float], ...]:
        found = sorted(choices(config, direction, kernels), key=lambda choice: choice.seconds)
        nearly = (one for one in found if one.seconds <= _NEARLY * found[0].seconds)
        return tuple((kernels.index(one.kernel), one.tile, one.seconds) for one in nearly)

    lasting = of_class or any(kernel.searched for kernel in kernels)
    lasting = lasting and config.device.type == "cuda" and lacks is None
    return tuple(Choice(kernels[i], *rest) for i, *rest in (kept(asked, find, of_class) if lasting else find()))


@lru_cache(maxsize=64)
def _text(config: Config) -> str:
    """All of a configuration but which of a machine's GPUs it is for."""
    return repr(replace(config, device=torch.device(config.device.type)))
