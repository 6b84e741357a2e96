"""Lines that say how far a command is."""

from __future__ import annotations

import time


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
