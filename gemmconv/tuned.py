"""Choices that were measured: what :func:`gemmconv.tune` found for layers, and the files that keep it.

``auto`` asks here first. What is known is a pure function of the files that were loaded, and of nothing that runs
later: every process that loads a file chooses the same. An entry holds for its layer, pass, element type, precision,
memory format and kind of device, at sizes of at least half and at most twice its pixels.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gemmconv import validation
from gemmconv.folder import cache_folder
from gemmconv.kernels.base import Choice, Config, Kernel, Pass
from gemmconv.version import __version__

log = logging.getLogger("gemmconv")
_FORMAT = 1  # of the file
_MOST_TIMES = 2.0  # as many pixels, or as few, as an entry was measured with
_FORMATS = {torch.contiguous_format: "nchw", torch.channels_last: "channels_last"}

Key = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """What was measured of a pass of a layer.

    Attributes:
        key: what it is for, in words: layer, pass, dtype, precision, memory format and device.
        size: batch, height and width of the input that it was measured with.
        algorithms: that ``auto`` is to take: one, or of both gradients the input's and the weight's.
        kernel, tile: of the algorithm; empty where it has but one.
        how: of both gradients: how they share work, by the names that ``selection.Gradients`` has for it.
        microseconds: of every algorithm that was measured, the least.
    """

    key: Key
    size: tuple[int, int, int]
    algorithms: tuple[str, ...]
    kernel: str = ""
    tile: str = ""
    how: dict[str, bool] = field(default_factory=dict)
    microseconds: dict[str, float] = field(default_factory=dict)

    @property
    def pixels(self) -> int:
        batch, height, width = self.size
        return batch * height * width


_known: dict[Key, dict[tuple[int, int, int], Entry]] = {}
_said: set[str] = set()
at_change: list[Callable[[], object]] = []  # who keeps what was chosen forgets it then


def key_of(config: Config, direction: Pass) -> Key:
    """What an entry must share with a call to hold for it, sizes apart."""
    p = config.problem
    window = (p.kernel_size, p.stride, p.padding, p.output_padding, p.dilation)
    named = zip("kspod", ("x".join(map(str, pair)) for pair in window), strict=True)
    layer = " ".join([f"c{p.in_channels}x{p.out_channels} g{p.groups}", *(name + text for name, text in named)])
    device = config.spec.name if config.device.type == "cuda" else config.device.type
    dtype = str(config.dtype).removeprefix("torch.")
    return layer, direction, dtype, config.precision, _FORMATS[config.memory_format], device


def entry_of(config: Config, direction: Pass) -> Entry | None:
    """The entry that holds for a pass: the one measured at the nearest size, None where none is near."""
    if not _known:
        return None
    p = config.problem
    size, pixels = (p.batch, *p.input_size), p.batch * p.in_pixels
    of_layer = _known.get(key_of(config, direction), {})
    if (same := of_layer.get(size)) is not None or not pixels:
        return same
    ratios = {max(one.pixels / pixels, pixels / one.pixels): one for one in reversed(of_layer.values())}
    return ratios[min(ratios)] if ratios and min(ratios) <= _MOST_TIMES else None


def choice_of(name: str, kernels: Iterable[Kernel], config: Config, direction: Pass) -> Choice | None:
    """The kernel and tile that an entry names for a pass of an algorithm; None where estimates are to choose."""
    entry = entry_of(config, direction)
    if entry is None or entry.algorithms != (name,):
        return None
    kernel = next((one for one in kernels if one.name == entry.kernel), None)
    if kernel is None or kernel.why_not(config, direction) is not None:
        _pass_over(entry, "its kernel is gone, or cannot serve it")
        return None
    tile = kernel.tile(config, direction)
    if Choice(kernel, tile, 0.0).tile_text != entry.tile:
        others = (one for one in kernel.tiles(config, direction) if Choice(kernel, one, 0.0).tile_text == entry.tile)
        tile = next(others, None)
    if tile is None:
        if (config.problem.batch, *config.problem.input_size) == entry.size:
            _pass_over(entry, "its tile is gone")
            return None
        tile = kernel.tile(config, direction)  # a tile's size may follow from the images'
    return Choice(kernel, tile, kernel.expected(config, direction, tile))


def _pass_over(entry: Entry, why: str) -> None:
    if (text := " ".join((*entry.key, entry.kernel, why))) not in _said:
        _said.add(text)
        log.info("a tuned choice is passed over: %s", text)


def take(entries: Iterable[Entry]) -> None:
    """Let ``auto`` choose by these too; of the same layer and size the last one counts."""
    for entry in entries:
        _known.setdefault(entry.key, {})[entry.size] = entry
    for call in at_change:
        call()


def count() -> int:
    """How many entries ``auto`` chooses by in this process."""
    return sum(map(len, _known.values()))


def forget() -> None:
    """Let ``auto`` choose by estimates alone again."""
    _known.clear()
    take(())


def default_path() -> Path:
    """``tuned.json`` in the folder of the cache.

    Raises:
        ValueError: there is no such folder: the user has no home directory.
    """
    if (folder := cache_folder()) is None:
        validation.fail(ValueError, "tune", "path", "be given where the user has no home directory", None)
    return folder / "tuned.json"


def read(path: Path) -> list[Entry]:
    """The entries of a file, but for those of another version of gemmconv, which are passed over with a line of log.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file.
    """
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise KeyError("format")
        if content["gemmconv"] != __version__:
            log.info("tuned choices of gemmconv %s in %s are passed over; tune again", content["gemmconv"], path)
            return []
        return [_entry(**one) for one in content["entries"]]
    except (KeyError, TypeError, ValueError) as error:
        rule = "name a file that gemmconv.tune wrote"
        validation.fail(ValueError, "tuned", "path", rule, f"{path} ({error})", "tune again into another file")


def _entry(key: list[str], size: list[int], algorithms: list[str], **others: Any) -> Entry:
    batch, height, width = size
    return Entry(tuple(key), (batch, height, width), tuple(algorithms), **others)


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Add entries to a file by an atomic rename; of the same layer and size those that are new stay."""
    merged = {(one.key, one.size): one for one in (*(read(path) if path.exists() else ()), *entries)}
    content = {"format": _FORMAT, "gemmconv": __version__, "entries": [asdict(one) for one in merged.values()]}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
