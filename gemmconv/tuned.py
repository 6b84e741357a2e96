"""Measured choices: the fastest algorithm and kernel that :func:`gemmconv.tune` found for each layer, and their files.

``auto`` looks here first. The entries depend on the loaded files alone, so every process that loads a file makes equal
choices. An entry holds for its layer, pass, element type, precision, memory format and kind of device, for inputs with
at least half and at most twice its pixels.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gemmconv import validation
from gemmconv.folder import cache_folder
from gemmconv.kernels.base import FORMAT_NAMES, Choice, Config, Kernel, Pass
from gemmconv.version import __version__

log = logging.getLogger("gemmconv")
_FILE_FORMAT = 1
_MOST_TIMES = 2.0  # ratio of pixels, either way, up to which an entry holds

Key = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """The measured choice for a pass of a layer."""

    key: Key  # layer, pass, dtype, precision, memory format and device, as text
    size: tuple[int, ...]  # batch and sizes of the input that was measured
    # The algorithms that ``auto`` takes: one, or for both gradients the input's and the weight's. For a volume the way
    # of computing it, whose ``"grads"`` is a whole training step.
    algorithms: tuple[str, ...]
    kernel: str = ""  # kernel of the algorithm; empty where there is only one, as is its tile
    tile: str = ""
    how: dict[str, bool] = field(default_factory=dict)  # how both gradients share work: attributes of pairs.Gradients
    microseconds: dict[str, float] = field(default_factory=dict)  # the least time of each algorithm that was measured

    @property
    def pixels(self) -> int:
        return math.prod(self.size)


_entries: dict[Key, dict[tuple[int, ...], Entry]] = {}  # by key and size
on_change: list[Callable[[], object]] = []  # called when entries change: caches of choices are cleared then


def key_of(config: Config, direction: Pass) -> Key:
    """The key that a call and an entry must share; sizes of images are not in it."""
    p = config.problem
    window = (p.kernel_size, p.stride, p.padding, p.output_padding, p.dilation)
    named = zip("kspod", ("x".join(map(str, pair)) for pair in window), strict=True)
    layer = " ".join([f"c{p.in_channels}x{p.out_channels} g{p.groups}", *(name + text for name, text in named)])
    device = config.spec.name if config.device.type == "cuda" else config.device.type
    dtype = validation.short_name(config.dtype)
    return layer, direction, dtype, config.precision, FORMAT_NAMES[config.memory_format], device


def size_of(config: Config) -> tuple[int, ...]:
    """The size by which entries of one key differ: the batch and the sizes of its images."""
    return config.problem.batch, *config.problem.input_size


def entry_of(config: Config, direction: Pass) -> Entry | None:
    """The entry of a pass that was measured at the nearest size; None where none was measured at a near size."""
    if not _entries:
        return None
    size, of_layer = size_of(config), _entries.get(key_of(config, direction), {})
    pixels = math.prod(size)
    if (same := of_layer.get(size)) is not None or not pixels:
        return same
    ratios = {max(one.pixels / pixels, pixels / one.pixels): one for one in reversed(of_layer.values())}
    return ratios[min(ratios)] if ratios and min(ratios) <= _MOST_TIMES else None


def choice_of(name: str, kernels: Iterable[Kernel], config: Config, direction: Pass) -> Choice | None:
    """The kernel and tile that an entry names for a pass of an algorithm; None where estimates choose."""
    entry = entry_of(config, direction)
    if entry is None or entry.algorithms != (name,):
        return None
    kernel = next((one for one in kernels if one.name == entry.kernel), None)
    if kernel is None or kernel.why_not(config, direction) is not None:
        _log_unused(entry.key, entry.kernel, "its kernel is gone, or cannot serve it")
        return None
    tile = kernel.tile(config, direction)
    if Choice(kernel, tile, 0.0).tile_text != entry.tile:
        others = (one for one in kernel.tiles(config, direction) if Choice(kernel, one, 0.0).tile_text == entry.tile)
        tile = next(others, None)
    if tile is None:
        if size_of(config) == entry.size:
            _log_unused(entry.key, entry.kernel, "its tile is gone")
            return None
        tile = kernel.tile(config, direction)  # a tile's size may follow from the images'
    return Choice(kernel, tile, kernel.expected(config, direction, tile))


@cache  # so that each is logged once
def _log_unused(key: Key, kernel: str, why: str) -> None:
    log.info("a tuned choice is passed over: %s", " ".join((*key, kernel, why)))


def take(entries: Iterable[Entry]) -> None:
    """Let ``auto`` use these entries too; a later entry replaces one with an equal key and size."""
    for entry in entries:
        _entries.setdefault(entry.key, {})[entry.size] = entry
    for call in on_change:
        call()


def count() -> int:
    """How many entries ``auto`` chooses by in this process."""
    return sum(map(len, _entries.values()))


def load_tuned(path: str | Path | None = None) -> int:
    """Let ``auto`` take the choices of a file that :func:`gemmconv.tune` wrote. Nothing is measured.

    Layers that were called before and compiled graphs use them, too, except that a graph keeps the way of computing a
    volume that it was traced with. Entries of another version of gemmconv, and of kernels that no longer exist, are
    ignored with a line in the log ``gemmconv``.

    Args:
        path: path of the file; None for ``tuned.json`` in the cache's folder.

    Returns:
        The number of entries.

    Raises:
        OSError: the file cannot be read.
        ValueError: it was not written by :func:`gemmconv.tune`.
    """
    entries = read(default_path() if path is None else Path(path))
    take(entries)
    return len(entries)


def forget_tuned() -> None:
    """Drop all tuned choices, so that ``auto`` chooses by estimates alone."""
    _entries.clear()
    take(())


def default_path() -> Path:
    """``tuned.json`` in the folder of the cache; raises ValueError where the user has no home directory."""
    if (folder := cache_folder()) is None:
        validation.fail(ValueError, "tune", "path", "be given where the user has no home directory", None)
    return folder / "tuned.json"


def read(path: Path) -> list[Entry]:
    """The entries of a file; those of another version of gemmconv are left out, with a line in the log.

    Raises OSError if the file cannot be read, and ValueError if :func:`gemmconv.tune` did not write it.
    """
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FILE_FORMAT:
            raise KeyError("format")
        if content["gemmconv"] != __version__:
            log.info("tuned choices of gemmconv %s in %s are passed over; tune again", content["gemmconv"], path)
            return []
        return [_entry(**one) for one in content["entries"]]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        rule = "name a file that gemmconv.tune wrote"
        validation.fail(ValueError, "tuned", "path", rule, f"{path} ({error})", "tune again into another file")


def _entry(key: list[str], size: list[int], algorithms: list[str], **others: Any) -> Entry:
    made = Entry(tuple(key), tuple(size), tuple(algorithms), **others)
    texts = *made.key, *made.algorithms, made.kernel, made.tile, *made.how, *made.microseconds
    numbers = *made.size, *made.how.values(), *made.microseconds.values()
    are_right = all(isinstance(one, str) for one in texts) and all(isinstance(one, int | float) for one in numbers)
    count = 2 if "grads" in made.key and len(made.size) == 3 else 1  # both gradients of images
    if not are_right or len(made.algorithms) != count or min(made.size) < 1:
        raise TypeError(f"not an {made}")
    return made


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Add entries to a file by an atomic rename; they replace older ones with an equal key and size."""
    merged = {(one.key, one.size): one for one in (*(read(path) if path.exists() else ()), *entries)}
    content = {"format": _FILE_FORMAT, "gemmconv": __version__, "entries": [asdict(one) for one in merged.values()]}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
