"""Summaries of rows: geometric means, worst cases, and the rows that lose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean

from benchmarks.contenders import PRECISIONS
from benchmarks.results import MODES, Row
from benchmarks.workloads import SUITES

# The order of lines: of suites that are not here, random ones and single layers, after all others.
_ORDERS = (tuple(SUITES), MODES, tuple(PRECISIONS), ("forward", "backward"))

HEADINGS = (
    *("suite", "mode", "precision", "direction", "algorithm", "layout", "rows"),
    *("vs torch default", "worst", "vs best torch", "worst", "x floor", "worst"),
)


def lines(
    rows: Iterable[Row], algorithms: Sequence[str] = ("auto",), layouts: Sequence[str] = ("nchw",)
) -> list[list[str]]:
    """A line for each suite, mode, precision, direction, algorithm and layout, of these algorithms and layouts.

    Each has these six, how many rows have a time, and for each ratio its geometric mean and worst, as HEADINGS says.
    """
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.algorithm in algorithms and row.layout in layouts and row.median_ms is not None:
            groups[row.suite, row.mode, row.precision, row.direction, row.algorithm, row.layout].append(row)

    def order(group: tuple[str, ...]) -> tuple[object, ...]:
        orders = (*_ORDERS, algorithms, layouts)
        places = [one.index(name) if name in one else len(one) for name, one in zip(group, orders, strict=True)]
        return *places, group

    def cells(ratios: Iterable[float | None], worst: Callable[..., float], unit: str) -> list[str]:
        values = [ratio for ratio in ratios if ratio]
        return [f"{one:.2f}{unit}" for one in (geometric_mean(values), worst(values))] if values else ["-", "-"]

    return [
        [
            *group,
            str(len(groups[group])),
            *cells((row.speedup_default for row in groups[group]), min, "x"),
            *cells((row.speedup_best for row in groups[group]), min, "x"),
            *cells((row.floor_ratio for row in groups[group]), max, ""),
        ]
        for group in sorted(groups, key=order)
    ]


# Layout and mode of what users get unless they ask for more, and of what they may ask for.
DEFAULT = ("nchw", "eager")
ASKED_FOR = {"channels_last": ("channels_last", "eager"), "CUDA graphs, NCHW": ("nchw", "graph")}


def compared(rows: Iterable[Row], kind: tuple[str, str] = DEFAULT) -> list[Row]:
    """The rows of ``auto`` in a layout and mode that have a ratio to torch's best."""
    return [row for row in _timed(rows, kind) if row.speedup_best is not None]


def losing(rows: Iterable[Row], kind: tuple[str, str] = DEFAULT) -> list[Row]:
    """The compared rows that are slower than torch's best setting, the worst first."""
    slower = (row for row in compared(rows, kind) if (row.speedup_best or 0.0) < 1)
    return sorted(slower, key=lambda row: row.speedup_best or 0.0)


def losing_of(rows: Sequence[Row], kind: tuple[str, str] = DEFAULT) -> str:
    """How many of them lose, of how many."""
    return f"{len(losing(rows, kind))} of {len(compared(rows, kind))}"


def alone(rows: Iterable[Row]) -> list[Row]:
    """The rows of ``auto`` with a time where torch has none in any setting."""
    return [row for row in _timed(rows, DEFAULT) if row.speedup_best is None]


def _timed(rows: Iterable[Row], kind: tuple[str, str]) -> list[Row]:
    return [row for row in rows if (row.algorithm, row.layout, row.mode) == ("auto", *kind) and row.median_ms]


def troubles(rows: Iterable[Row]) -> list[str]:
    """A line for each row that is wrong or failed, gemmconv's first; then how many were refused."""
    rows = list(rows)
    bad = sorted((row for row in rows if row.status in ("wrong", "failed")), key=lambda row: row.is_torch)
    found = [f"{row.status}: {title(row)}, {row.algorithm} in {row.layout}: {row.reason}" for row in bad]
    refused: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        if row.status == "refused":
            refused[row.algorithm, row.reason.split(",")[0]] += 1
    return found + [f"refused {count}x: {name}: {reason}" for (name, reason), count in sorted(refused.items())]


def title(row: Row) -> str:
    """A row's workload, precision, direction and mode in one phrase."""
    mode = "" if row.mode == "eager" else f" ({row.mode})"
    return f"{row.workload} {row.precision} {row.direction}{mode}"


def losing_cells(row: Row) -> list[str]:
    """A losing row as texts: workload, precision, direction, what auto took, times, ratios."""
    best_ms = (row.median_ms or 0.0) * (row.speedup_best or 0.0)
    return [
        *(row.workload, row.precision, row.direction, row.took or row.algorithm, milliseconds(row.median_ms)),
        *(row.best_torch.removeprefix("torch_"), milliseconds(best_ms), f"{row.speedup_best or 0:.2f}x"),
        "-" if row.floor_ratio is None else f"{row.floor_ratio:.1f}",
    ]


LOSING_HEADINGS = ("workload", "precision", "direction", "took", "ms", "best torch", "its ms", "vs best", "x floor")


def milliseconds(value: float | None) -> str:
    """Three digits or so."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def times_text(value: float | None) -> str:
    """A ratio as text; ``-`` where there is none."""
    return "-" if value is None else f"{value:.2f}x"


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A plain table; the first ``left`` columns are aligned left, the others right."""
    widths = [max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(headings), line(["-" * width for width in widths]), *map(line, rows)])


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table in Markdown; the first ``left`` columns are aligned left, the others right."""
    rule = ["---" if index < left else "--:" for index in range(len(headings))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


def report(rows: Sequence[Row], most_losing: int = 20) -> str:
    """The summary as plain text: what is wrong, what loses, then the ratios of auto, and of the algorithms in NCHW."""
    parts = [*troubles(rows)]
    slower = losing(rows)
    if compared(rows):
        parts.append(f"\nauto in NCHW is slower than the best torch setting in {losing_of(rows)} rows")
    if slower:
        parts.append(text_table(LOSING_HEADINGS, [losing_cells(row) for row in slower[:most_losing]], left=4))
        if len(slower) > most_losing:
            parts.append(f"... and {len(slower) - most_losing} more")
    names = {row.algorithm for row in rows if not row.is_torch} - {"auto"}
    eager = [row for row in rows if row.mode == "eager"]
    found = lines(rows, layouts=("nchw", "channels_last")) + lines(eager, sorted(names))
    if found:
        parts.append("\nspeed-ups: geometric mean, and the worst row; x floor: time / floor")
        parts.append(text_table(HEADINGS, found, left=6))
    return "\n".join(parts)
