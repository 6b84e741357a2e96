"""What command lines share: values of flags with commas between them, progress, and processes for several GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence


def separated(text: str) -> tuple[str, ...]:
    """The parts between commas.

    >>> separated("auto, native,")
    ('auto', 'native')
    """
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def chosen(flag: str, given: Sequence[str] | None, known: Iterable[str], default: Sequence[str]) -> tuple[str, ...]:
    """The values of a flag, in the order of ``known``.

    Raises:
        ValueError: an unknown one.
    """
    known = list(known)
    if given is None:
        return tuple(default)
    for name in given:
        if name not in known:
            raise ValueError(f"argument {flag}: must be of {', '.join(known)}, got {name!r}")
    return tuple(name for name in known if name in given)


class Progress:
    """Prints lines, each with the share that is done and the seconds since the start.

    Attributes:
        total: number of rows to measure.
        done: number of rows that were measured.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done, self._began = total, 0, time.monotonic()

    def say(self, text: str) -> None:
        """Print a line."""
        share = 100 * self.done // max(1, self.total)
        print(f"[{share:3d}% {time.monotonic() - self._began:4.0f} s] {text}", flush=True)


def run_in_processes(
    module: str, arguments: Sequence[str], flags: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]] = ()
) -> int:
    """Run ``python -m module`` at once for each list of flags of its own. Returns the largest exit status.

    Args:
        module: of the command.
        arguments: of all processes; flags come after them, and count where both have one.
        flags: of each process.
        variables: of the environment of each process, where they need any.
    """
    command = [sys.executable, "-m", module, *arguments]
    environments = [{**os.environ, **own} for own in variables or [{}] * len(flags)]
    running = [
        subprocess.Popen([*command, *own], env=environment)
        for own, environment in zip(flags, environments, strict=True)
    ]
    try:
        return max(process.wait() for process in running)
    except KeyboardInterrupt:  # which the processes have got too; they may still write files
        return max(process.wait() for process in running)
