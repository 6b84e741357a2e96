"""Compare two result files row by row, and name what got slower beyond noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import BY_TURNS, SMALL_MS, Results, Row, joined
from benchmarks.summary import milliseconds, text_table, title
from benchmarks.turns import Turns

_JITTER_MS = 0.003  # allowed below SMALL_MS


@dataclass(frozen=True)
class Change:
    """One row that is not what it was.

    Attributes:
        kind: ``slower``, ``broken`` (has no time any more), ``faster``.
        old, new: the rows.
    """

    kind: str
    old: Row
    new: Row

    @property
    def ratio(self) -> float:
        """New time over old time; infinite where there is no new time."""
        return (self.new.median_ms or float("inf")) / (self.old.median_ms or float("inf"))


def compare(old: Sequence[Row], new: Sequence[Row], tolerance: float = 0.05) -> list[Change]:
    """The rows that changed beyond noise.

    A time has changed where it differs by more than ``tolerance``, and neither what its looks found, nor the middle 60%
    of its samples, nor what jitter is allowed overlap with those of the other file.

    Args:
        old, new: rows of two runs.
        tolerance: share of the old time.
    """
    before = {row.key: row for row in old}
    changes = []
    for row in new:
        other = before.get(row.key)
        if other is None or other.median_ms is None:
            continue
        if row.median_ms is None:
            changes.append(Change("broken", other, row))
        elif _beyond(other, row, tolerance):
            changes.append(Change("slower", other, row))
        elif _beyond(row, other, tolerance):
            changes.append(Change("faster", other, row))
    order = {"broken": 0, "slower": 1, "faster": 2}
    return sorted(changes, key=lambda change: (order[change.kind], -abs(change.ratio - 1)))


def _beyond(fast: Row, slow: Row, tolerance: float) -> bool:
    """Whether the second takes longer than the first, beyond noise."""
    assert fast.median_ms is not None
    assert slow.median_ms is not None
    allowance = fast.median_ms * tolerance + (_JITTER_MS if fast.median_ms < SMALL_MS else 0.0)
    above = min(ms for ms in (slow.median_ms, slow.p20_ms, slow.fastest_ms) if ms is not None)
    below = max(ms for ms in (fast.median_ms, fast.p80_ms, fast.slowest_ms) if ms is not None)
    return slow.median_ms > fast.median_ms + allowance and above > below


def read(path: Path) -> tuple[list[Row], set[str]]:
    """The rows of a file or of all files in a folder, and the machines they come from.

    Of suites by turns they are gemmconv's times.

    Raises:
        ValueError: there are none.
    """
    if not path.exists():
        raise ValueError(f"argument --check: must be a result file or a folder of them, got {path}")
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    rows, runs = joined(Results, [one for one in paths if one.stem not in BY_TURNS])
    turns, more = joined(Turns, [one for one in paths if one.stem in BY_TURNS])
    if not rows and not turns:
        raise ValueError(f"argument --check: {path} holds no rows")
    machines = {runs[row.run]["gpu"] for row in rows} | {more[turn.run]["gpu"] for turn in turns}
    return rows + [turn.as_row() for turn in turns], machines


def main(old_path: Path, new_path: Path, tolerance: float = 0.05) -> int:
    """Print the comparison. Returns 1 where something got slower or broke, else 0.

    Raises:
        ValueError: a path that holds no results, or results of different machines.
    """
    (old, old_gpus), (new, new_gpus) = read(old_path), read(new_path)
    if old_gpus != new_gpus:
        raise ValueError(
            f"argument --check: the files must come from the same machine, got {', '.join(sorted(old_gpus))} and "
            f"{', '.join(sorted(new_gpus))}"
        )
    changes = compare(old, new, tolerance)
    before = {row.key: row for row in old}
    pairs = [(before[row.key], row) for row in new if row.key in before]
    timed = [(a.median_ms, b.median_ms) for a, b in pairs if a.median_ms and b.median_ms]
    alone = f"{len(old) - len(pairs)} only in the first, {len(new) - len(pairs)} only in the second"
    print(f"{len(timed)} rows with a time in both; {alone}")
    large = [abs(b / a - 1) for a, b in timed if a >= SMALL_MS]
    if large:
        over = sum(change > tolerance for change in large)
        print(
            f"above {1e3 * SMALL_MS:.0f} us: {len(large)} rows, {over} differ by more than {tolerance:.0%}; "
            f"median difference {sorted(large)[len(large) // 2]:.1%}, largest {max(large):.1%}"
        )
    for kind in ("broken", "slower", "faster"):
        found = [change for change in changes if change.kind == kind]
        print(f"{kind}: {len(found)}")
        if found:
            cells = [
                [
                    *(title(change.new), change.new.algorithm, change.new.layout),
                    *(milliseconds(change.old.median_ms), milliseconds(change.new.median_ms)),
                    change.new.reason or f"{change.ratio:.2f}x the time",
                ]
                for change in found
            ]
            print(text_table(("row", "algorithm", "layout", "old ms", "new ms", "change"), cells, left=3))
    return int(any(change.kind != "faster" for change in changes))
