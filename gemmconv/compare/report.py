"""The comparison as a table in the terminal and a chart in a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmconv.compare.measure import BASELINE, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Group
    from rich.text import Text

# Okabe and Ito's palette, told apart with any colour vision; grey is the baseline.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_BASELINE_COLOUR = "#7F7F7F"
_WRONG_COLOUR = "#B00020"
_EMPTY = "-"

_HEADINGS = (
    "algorithm",
    "error",
    "gradient\nerror",
    "forward\nms",
    "vs\ntorch",
    "fwd+bwd\nms",
    "vs\ntorch",
    "workspace\nMiB",
)
_WIDTHS = (13, 7, 8, 7, 6, 7, 6, 9)  # fits 80 columns


def table(rows: Sequence[Row]) -> Group:
    """The rows of one layer as a table, headed by the layer. A wrong result is red and has no times."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    layer = rows[0].layer
    note = layer.shrink_note()
    title = Text.assemble("\n", (f"{layer.name}: ", "bold"), layer.describe())
    if note:
        title.append(f"\nmade smaller for the CPU: {note}", "yellow")
    result = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, (heading, width) in enumerate(zip(_HEADINGS, _WIDTHS, strict=True)):
        result.add_column(heading, justify="right" if index else "left", min_width=width, overflow="fold")
    for row in rows:
        result.add_row(*_cells(row), style="dim" if row.skipped else None)
    return Group(title, result)


def _cells(row: Row) -> list[Text]:
    from rich.text import Text

    return [
        Text(row.algorithm + (" *" if row.chosen else "")),
        _error(row.error, row.error_is_wrong),
        _error(row.gradient_error, row.gradient_is_wrong),
        Text(_milliseconds(row.forward_ms)),
        Text(_times(row.forward_ratio)),
        Text(_milliseconds(row.both_ms)),
        Text(_times(row.both_ratio)),
        Text(_EMPTY if row.workspace_bytes is None else f"{row.workspace_bytes / 2**20:.1f}"),
    ]


def _error(value: float | None, wrong: bool) -> Text:
    from rich.text import Text

    return Text(_EMPTY if value is None else f"{value:.1e}", style="bold red" if wrong else "")


def _milliseconds(value: float | None) -> str:
    return _EMPTY if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _times(value: float | None) -> str:
    return _EMPTY if value is None else f"{value:.2f}x"


def notes(rows: Sequence[Row]) -> list[str]:
    """What the rows of one layer leave to say: what was skipped, what is wrong, what has no ratio."""
    lines = [f"{row.algorithm} was not run: {row.skipped}" for row in rows if row.skipped]
    for row in rows:
        if row.error_is_wrong:
            lines.append(f"{row.algorithm} is wrong: error {row.error:.1e} is over {row.bar:.0e}; no times")
        if row.gradient_is_wrong:
            lines.append(
                f"{row.algorithm} is wrong: gradient error {row.gradient_error:.1e} is over "
                f"{row.gradient_bar:.0e}; no times"
            )
    baseline = next((row for row in rows if row.algorithm == BASELINE), None)
    others = {row.precision for row in rows if row is not baseline}
    if baseline is not None and others - {baseline.precision}:
        lines.append(
            f"no ratio: torch computes in {baseline.precision} under its own setting, "
            f"the others in {', '.join(sorted(others))}"
        )
    return lines


LEGEND = (
    "torch      torch.nn.ConvTranspose2d, cuDNN's benchmark mode on, in the same run\n"
    "native     torch's operator, called by gemmconv; cuDNN's deterministic kernels where auto may take it\n"
    "*          what algorithm='auto' takes for a forward pass\n"
    "error      against float64: |result - reference| / |reference|\n"
    "gradient   the largest such error of the input, weight and bias gradients\n"
    "ms         median time; fwd+bwd is a forward pass with all gradients\n"
    "vs torch   torch's time / this time: above 1x is faster than torch\n"
    "workspace  temporary memory, the most of any direction; - where torch manages it"
)


def chart(results: Sequence[Sequence[Row]], path: Path, heading: str) -> None:
    """Draw the times of all layers, one panel for the forward pass and one for forward and backward together.

    Args:
        results: for each layer its rows, torch's first.
        path: the PNG file to write.
        heading: where and how the times were measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(row.algorithm for rows in results for row in rows))
    colours = dict(zip((n for n in names if n != BASELINE), _COLOURS * len(names), strict=False))
    colours[BASELINE] = _BASELINE_COLOUR
    bars = sum(len(rows) + 1 for rows in results)

    figure = Figure(figsize=(13, 1.7 + 0.33 * bars), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _panel(left, results, colours, "forward", lambda row: row.forward_ms, lambda row: row.forward_ratio)
    _panel(right, results, colours, "forward + backward", lambda row: row.both_ms, lambda row: row.both_ratio)
    figure.suptitle(heading, fontsize=12)
    figure.legend(
        handles=[Patch(color=colours[name], label=name) for name in names],
        loc="outside lower center",
        ncols=len(names),
        frameon=False,
    )
    figure.savefig(path)


def _panel(
    axes: Axes, results: Sequence[Sequence[Row]], colours: dict[str, str], title: str, time: Any, ratio: Any
) -> None:
    longest = max((time(row) or 0.0 for rows in results for row in rows), default=0.0) or 1.0
    position = 0.0
    centres, labels = [], []
    for rows in results:
        layer = rows[0].layer
        centres.append(position + (len(rows) - 1) / 2)
        labels.append(_label(layer.describe(), layer.shrink_note()))
        for row in rows:
            value, faster = time(row), ratio(row)
            text, colour = f" {_milliseconds(value)} ms", "black"
            if row.skipped:
                text, colour = f" {row.algorithm} not run", "dimgrey"
            elif row.wrong:
                text, colour = f" {row.algorithm} is wrong, no time", _WRONG_COLOUR
            elif faster is not None and row.algorithm != BASELINE:
                text += f"  ({_times(faster)})"
            axes.barh(position, value or 0.0, height=0.84, color=colours[row.algorithm])
            axes.text(value or 0.0, position, text, va="center", fontsize=8.5, color=colour)
            position += 1
        position += 1
    axes.set_yticks(centres, labels, fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(position - 1.3, -0.7)
    axes.set_xlim(0, longest * 1.32)  # room for the text at the end of the longest bar
    axes.set_xlabel("median time, ms (shorter is better; in brackets: torch's time / this time)", fontsize=9)
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#DDDDDD")
    axes.set_axisbelow(True)


def _label(description: str, note: str | None) -> str:
    """The layer's line, broken after every third part."""
    parts = description.split(", ")
    lines = [", ".join(parts[i : i + 3]) for i in range(0, len(parts), 3)]
    return "\n".join(lines + ([f"({note})"] if note else []))
