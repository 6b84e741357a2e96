"""A progress bar where rich and a terminal are there, else a line for each workload."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Counts rows of ``total`` and says what is being done. A context manager."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._began = total, 0, time.monotonic()
        self._bar: Any = None
        if sys.stdout.isatty():
            try:
                from rich import progress as rich
            except ModuleNotFoundError:
                return
            columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn())
            self._bar = rich.Progress(*columns, rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, text: str, count: int = 1) -> None:
        """``count`` more rows are done; ``text`` says which."""
        self._done += count
        if self._bar:
            self._bar.update(self._task, completed=self._done, description=text)

    def say(self, text: str) -> None:
        """Print a line above the bar; without a bar, with the share that is done and the time since the start."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            share = 100 * self._done // max(1, self._total)
            print(f"[{share:3d}% {time.monotonic() - self._began:4.0f} s] {text}", flush=True)
