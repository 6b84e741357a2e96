"""Swaps the layers of whole models for gemmconv's and back, says what was left and why, and patches torch's functions.

A layer is converted by changing its class. So it keeps its identity, parameters, hooks and parametrizations, and every
list, optimizer and wrapper that holds it. Layers are left alone where the result would not be provably the same.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from gemmconv import validation
from gemmconv.dispatch import HARMLESS_MODES
from gemmconv.functional import conv_transpose2d
from gemmconv.kernels.base import Precision
from gemmconv.module import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Layer
from gemmconv.ops import followers
from gemmconv.rank import conv_transpose1d, conv_transpose3d
from gemmconv.selection import NAMES
from gemmconv.tuned import log

Model = TypeVar("Model", bound=nn.Module)

LAYERS = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d  # of which gemmconv's classes are subclasses
OURS: dict[type, Any] = dict(zip(LAYERS, (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d), strict=True))
TORCHS = {ours: torchs for torchs, ours in OURS.items()}
_OWN_ATTRIBUTES = ("algorithm", "precision", "workspace_limit", "_last_arguments", "_position")


class Line(NamedTuple):
    """A transposed convolution of a model."""

    name: str  # where it is in the model
    kind: str  # its class
    is_converted: bool  # whether gemmconv computes it
    reason: str  # the settings of a converted layer; why another was left


class Report(tuple[Line, ...]):
    """The lines of a model; ``str()`` gives a table."""

    def __str__(self) -> str:
        if not self:
            return "no transposed convolution in this model"
        width = max(len(line.name) for line in self)
        rows = (f"{'converted' if one.is_converted else 'left':<10} {one.name:<{width}}  {one.reason}" for one in self)
        return "\n".join(rows)


def convert(
    model: Model, *, algorithm: str = "auto", precision: Precision | None = None, workspace_limit: int | None = None
) -> Model:
    """Let gemmconv compute every ConvTranspose1d, ConvTranspose2d and ConvTranspose3d inside a model, in place.

    Each layer stays the same object, with the same parameters, hooks and parametrizations (weight_norm, spectral_norm
    and pruning among them), so optimizers and checkpoints go on working. Subclasses, layers whose ``forward`` was
    replaced, lazy layers without parameters, and scripted, sharded or quantised ones stay as they are: :func:`report`
    says which and why. Layers that are converted already get the new settings. Logs one line, a warning if there was
    nothing to convert.

    Args:
        model: any module; a bare layer works too.
        algorithm, precision, workspace_limit: see ConvTranspose2d.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is no torch.nn.Module.
        ValueError: an unknown algorithm or precision, or a workspace_limit below 1.

    >>> convert(nn.Sequential(nn.ConvTranspose2d(4, 2, 3)))
    Sequential(
      (0): ConvTranspose2d(4, 2, kernel_size=(3, 3), stride=(1, 1), algorithm=auto)
    )
    """
    validation.model("convert", model)
    validation.choice("convert", algorithm, NAMES, precision, workspace_limit)
    settings = {"algorithm": algorithm, "precision": precision, "workspace_limit": workspace_limit}
    for module in model.modules():
        if (base := _base(module)) in OURS and _why_left(module) is None:
            _set_base(module, OURS[base])
            module.__dict__.update(settings)
            module._register()  # type: ignore[operator]
        elif base in TORCHS:
            module.__dict__.update(settings)
    lines = _lines(model)
    count = sum(line.is_converted for line in lines)
    text = f"convert: {count} of {len(lines)} transposed convolutions are computed by gemmconv"
    why = "; gemmconv.report(model) says why" if count < len(lines) else ""
    log.log(logging.INFO if count else logging.WARNING, text + why)
    return model


def revert(model: Model) -> Model:
    """Give every layer that gemmconv computes its torch class back, in place, and return the model.

    Parameters, hooks and parametrizations stay, and results have the bits that they had before :func:`convert`. A layer
    whose ``forward`` was replaced since then stays gemmconv's, with a warning in the log, as what was replaced is ours.

    Raises:
        TypeError: ``model`` is no torch.nn.Module.
    """
    validation.model("revert", model)
    for module in model.modules():
        if (base := _base(module)) not in TORCHS:
            continue
        if "forward" in vars(module):
            log.warning("revert: a %s stays, since its forward was replaced: revert before that", base.__name__)
            continue
        followers.forget(module._position)  # type: ignore[arg-type]
        _set_base(module, TORCHS[base])
        for name in _OWN_ATTRIBUTES:
            module.__dict__.pop(name, None)
    return model


@contextlib.contextmanager
def converted(model: Model, **settings: Any) -> Iterator[Model]:
    """Convert a model inside a ``with`` block; see :func:`convert`. Layers that were converted before stay so."""
    validation.model("converted", model)
    layers: list[Any] = [one for one in model.modules() if isinstance(one, LAYERS)]
    before = [(one, one._settings() if _base(one) in TORCHS else None) for one in layers]
    try:
        yield convert(model, **settings)
    finally:
        for module, old in before:
            if old is None:
                revert(module)
            else:
                convert(module, **old)


def report(model: nn.Module) -> Report:
    """Print, and return, which transposed convolutions of a model gemmconv computes, and why it left the others.

    Raises:
        TypeError: ``model`` is no torch.nn.Module.
    """
    validation.model("report", model)
    lines = Report(_lines(model))
    print(lines)
    return lines


class patched(TorchFunctionMode):
    """Inside this ``with`` block torch.conv_transpose1d, 2d and 3d, and those of torch.nn.functional, are gemmconv's.

    For models that call the functions and have no layers to convert. Layers of gemmconv keep their own settings. Calls
    from compiled code are not seen: compile inside the block instead. Every torch function called in the block takes a
    microsecond or two more.

    Args:
        algorithm, precision, workspace_limit: see ConvTranspose2d.

    >>> with patched():
    ...     torch.nn.functional.conv_transpose1d(torch.ones(1, 2, 4), torch.ones(2, 1, 2), stride=2).shape
    torch.Size([1, 1, 8])
    """

    def __init__(
        self, *, algorithm: str = "auto", precision: Precision | None = None, workspace_limit: int | None = None
    ) -> None:
        super().__init__()
        validation.choice("patched", algorithm, NAMES, precision, workspace_limit)
        self._settings = dict[str, Any](algorithm=algorithm, precision=precision, workspace_limit=workspace_limit)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (ours := _FUNCTIONS.get(func)) is not None:
            return ours(*args, **(kwargs or {}), **self._settings)
        return func(*args, **(kwargs or {}))


HARMLESS_MODES.add(patched)  # a layer of ours inside the block is a plain call

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    function: ours
    for ours in (conv_transpose1d, conv_transpose2d, conv_transpose3d)
    for function in (getattr(torch, ours.__name__), getattr(nn.functional, ours.__name__))
}


def _base(module: nn.Module) -> type:
    """The class of a module; for one with parametrizations, whose class torch made, what that was made from."""
    kind = type(module)
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


def _set_base(module: nn.Module, new: type) -> None:
    """Give a module another class; for one with parametrizations, a class like its own that is made from ``new``."""
    kind = type(module)
    if parametrize.is_parametrized(module):
        parts = {name: value for name, value in kind.__dict__.items() if name not in ("__dict__", "__weakref__")}
        new = type(kind.__name__, (new,), parts)
    module.__class__ = new


def _why_left(module: nn.Module) -> str | None:
    """Why a layer of torch's is not converted; None if it can be."""
    kind = type(module)
    if isinstance(module, LazyModuleMixin):
        return "it has no parameters yet: run the model once, then convert"
    if kind.__name__.startswith("FSDP"):
        return "it was sharded first: convert before fully_shard"
    if _base(module) not in OURS:
        return f"it is of a subclass, {kind.__module__}.{kind.__qualname__}, which may compute something else"
    if "forward" in vars(module):
        return "its forward was replaced: convert before offload hooks, layerwise casting and the like"
    return None


def _lines(model: nn.Module) -> list[Line]:
    """A line for each transposed convolution, and for each module of another kind that once was one."""
    lines = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, Layer):
            lines.append(Line(name, kind, True, f"{kind}, {module._settings_text()}"))
        elif isinstance(module, LAYERS):
            reason = _why_left(module) or "convert was not called since it was added"
            lines.append(Line(name, kind, False, f"{kind}: {reason}"))
        elif "ConvTranspose" in (original := getattr(module, "original_name", kind)):
            is_scripted = isinstance(module, torch.jit.ScriptModule)
            if is_scripted or type(module).__module__.startswith("torch.ao"):
                why = "scripted: trace a converted model" if is_scripted else "quantised: no kernel takes integers"
                lines.append(Line(name, original, False, f"{original}: it was {why}"))
    return lines
