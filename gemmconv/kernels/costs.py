"""The fitted constants of estimates, which ``gemmconv/costs/h200.json`` holds as data.

The file has a group for each kernel, by its name, and "device" for shared constants. A group has a source and its costs
by name. A cost has a value, a unit, a meaning, and a source if that differs from the group's: the measurements it was
fitted to. The source "no rows kept" means that these were not recorded. A value is a number, or a table of numbers by
keys: "4 2" is the key (4, 2), "forward" the key "forward".
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

FOLDER = Path(__file__).parents[1] / "costs"


class Costs:
    """The costs of one kernel, each an attribute; tables by :meth:`table`.

    >>> costs_of("device").busy_clock
    1600000000.0
    >>> costs_of("device").idle_clock
    Traceback (most recent call last):
    AttributeError: 'costs of device' object has no attribute 'idle_clock'
    """

    if TYPE_CHECKING:  # at run time costs are plain attributes of the instance, the fastest to look up

        def __getattr__(self, name: str) -> float: ...

    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            is_table = isinstance(value, dict)
            self.__dict__[name] = {_key(key): one for key, one in value.items()} if is_table else value

    def table(self, name: str) -> dict[Any, float]:
        """A cost that is a table."""
        return vars(self)[name]


@functools.cache
def costs_of(kernel: str) -> Costs:
    """The costs of a kernel, by the name of its group; cached.

    Raises:
        KeyError: the file has no such group.
    """
    costs = _groups()[kernel]["costs"]
    named = type(f"costs of {kernel}", (Costs,), {})  # errors about unknown attributes show this name
    return named({name: entry["value"] for name, entry in costs.items()})


def overlapped(overlap: float, *parts: float) -> float:
    """The time of parts that run at once: as long as the longest, and more where several are close.

    >>> overlapped(2, 3, 4)
    5.0
    """
    return sum([part**overlap for part in parts]) ** (1 / overlap)


@functools.cache
def _groups() -> dict[str, Any]:
    return json.loads((FOLDER / "h200.json").read_text())


def _key(text: str) -> Any:
    """The key of a table's value."""
    parts = tuple(int(part) if part.isdecimal() else part for part in text.split())
    return parts if len(parts) > 1 else parts[0]
