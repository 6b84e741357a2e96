"""Tables in Markdown of what a user waits for: whole networks, and the host's part of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.networks import RUNS
from benchmarks.results import current
from benchmarks.summary import markdown_table, milliseconds, times_text
from benchmarks.turns import STEPS, Turn, title

_MOST_LOSING = 10
_LOSING = ("what", "precision", "layout", "mode", "step", "torch ms", "gemmconv ms", "gemmconv", "torch itself")

_ABOUT_NETWORKS = (
    "Wall-clock time of whole networks, torch's own and the same after `gemmconv.convert`, by turns in one process, "
    "with `cudnn.benchmark`. A ratio above 1x means that the converted network is faster. torch's network takes part "
    "twice: `torch itself` is what it shows against itself. `bf16` is autocast."
)
_ABOUT_HOST = (
    "The host alone: time until a call of a tiny layer's module has returned, torch's over gemmconv's. `inference` is "
    "without gradients, `recorded` a forward pass with gradients recorded, `training` a forward and a backward pass."
)
NOT_MEASURED = (
    "Whole networks and the host alone were not measured on this machine yet (`python -m benchmarks.networks`, "
    "`python -m benchmarks.host`)."
)


def newest(rows: Sequence[Turn], runs: Sequence[dict[str, Any]]) -> list[Turn]:
    """The rows that were measured with the newest sources of their suite and mode."""
    return current(rows, runs, lambda row: (row.suite, row.mode))


def parts(turns: Sequence[Turn], link: str = "") -> list[str]:
    """Paragraphs and tables about networks and the host.

    Args:
        turns: of the suites by turns.
        link: path of the result folder, as the page links to it; then the worst rows alone are listed, and the host's
            are summed up. Empty for all.
    """
    networks, host = ([row for row in turns if row.suite == suite] for suite in ("networks", "host"))
    found = []
    if networks:
        found += [_ABOUT_NETWORKS, *_losing(networks, link), ratios(networks)]
        if any(row.peak_ratio is not None for row in networks):
            found += ["Most device memory during a step, MiB, torch and gemmconv:", peaks(networks)]
    if host:
        found += [_ABOUT_HOST, *_losing(host, link), host_means(host)]
        found += [] if link else ["Microseconds, torch and gemmconv:", hosttimes_text(host)]
    return found


def _losing(rows: Sequence[Turn], link: str) -> list[str]:
    """How many rows lose, and which, the worst first; then those without a time."""
    timed = [row for row in rows if row.ratio is not None]
    slower = sorted((row for row in timed if row.loses), key=lambda row: row.ratio or 0.0)
    text = f"**Slower than torch in {len(slower)} of {len(timed)} rows**, in "
    text += f"{sum(row.loses_clearly for row in slower)} by more than torch differs from itself."
    shown = slower[:_MOST_LOSING] if link else slower
    if len(shown) < len(slower):
        text += f" The worst (all: [summary.md]({link}/summary.md)):"
    found = [text]
    if shown:
        cells = [
            [
                *(row.workload, row.precision, row.layout, row.mode, row.step),
                *(milliseconds(row.torch_ms), milliseconds(row.ours_ms), times_text(row.ratio), times_text(row.itself)),
            ]
            for row in shown
        ]
        found.append(markdown_table(_LOSING, cells, left=5))
    if bad := [row for row in rows if row.ratio is None]:
        found.append("Without a time:")
        found.append("\n".join(f"- {row.status}: {title(row)}: {row.reason}" for row in bad))
    return found


def ratios(rows: Sequence[Turn]) -> str:
    """A table of networks and modes: torch's time over gemmconv's, with the geometric mean last."""
    return _pivot(rows, lambda row: times_text(row.ratio) if row.ratio else row.status, mean=True)


def peaks(rows: Sequence[Turn]) -> str:
    """A table of the most memory that steps took."""

    def cell(row: Turn) -> str:
        return f"{_mib(row.torch_peak_bytes)} / {_mib(row.ours_peak_bytes)} ({times_text(row.peak_ratio)})"

    return _pivot([row for row in rows if row.peak_ratio is not None], cell)


def hosttimes_text(rows: Sequence[Turn]) -> str:
    """A table of layers: what the host takes, in microseconds, and the kernels of a forward and a backward pass."""

    def cell(row: Turn) -> str:
        if row.torch_ms is None or row.ours_ms is None:
            return row.status
        return f"{1e3 * row.torch_ms:.1f} / {1e3 * row.ours_ms:.1f} ({times_text(row.ratio)})"

    return _pivot(rows, cell, kernels=True)


def host_means(rows: Sequence[Turn]) -> str:
    """A table of precisions and layouts: geometric mean over layers, and the worst."""
    steps = [step for step in STEPS if any(row.step == step for row in rows)]
    headings = ["precision", "layout", *(text for step in steps for text in (step, "worst"))]
    cells = []
    for precision, layout in dict.fromkeys((row.precision, row.layout) for row in rows):
        line = [precision, layout]
        for step in steps:
            of = [row for row in rows if (row.precision, row.layout, row.step) == (precision, layout, step)]
            values = [row.ratio for row in of if row.ratio is not None]
            line += [times_text(geometric_mean(values)), times_text(min(values))] if values else ["-", "-"]
        cells.append(line)
    return markdown_table(headings, cells, left=2)


def _pivot(rows: Sequence[Turn], cell: Callable[[Turn], str], mean: bool = False, kernels: bool = False) -> str:
    """A table with a line for each workload, precision and layout, and a column for each mode and step.

    Args:
        rows: all in one table.
        cell: a row as text.
        mean: whether the last line has the geometric mean of each column.
        kernels: whether the last column names the kernels of training.
    """

    def column(row: Turn) -> tuple[int, int]:
        return RUNS.index(row.mode), STEPS.index(row.step)

    columns = sorted({column(row) for row in rows})
    lines: dict[tuple[str, ...], dict[tuple[int, int], Turn]] = {}
    for row in rows:
        lines.setdefault((row.workload, row.precision, row.layout), {})[column(row)] = row
    headings = ["workload", "precision", "layout", *(f"{RUNS[mode]} {STEPS[step]}" for mode, step in columns)]
    cells = [[*line, *(cell(of[one]) if one in of else "-" for one in columns)] for line, of in lines.items()]
    if kernels:
        headings.append("kernels")
        cells = [[*line, of[max(of)].kernels] for line, of in zip(cells, lines.values(), strict=True)]
    if mean:
        values = [[row.ratio for row in rows if column(row) == one and row.ratio is not None] for one in columns]
        last = [times_text(geometric_mean(of)) if of else "-" for of in values]
        cells.append(["geometric mean", "", "", *last])
    return markdown_table(headings, cells, left=3)


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.0f}"
