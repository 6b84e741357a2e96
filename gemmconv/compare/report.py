"""The comparison as a table in the terminal, a chart in a PNG file, and plain values for a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import torch

from gemmconv import info
from gemmconv.compare.measure import AUTO, BASELINE, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Group

_COLOURS = {AUTO: "#0072B2", BASELINE: "#8C8C8C"}  # Okabe and Ito's blue, told apart from grey with any colour vision
_OTHER_COLOUR = "#BFD4E2"
_WRONG_COLOUR = "#B00020"
_EMPTY = "-"
_GAP_LINES = 1.8  # lines between layers of the chart, for the next heading
_FASTER, _SLOWER = 1.02, 0.97  # times torch's speed: ratios between them are noise

_COLUMNS = (  # heading and least width; all fit 80 columns
    *(("algorithm", 13), ("error", 7), ("gradient\nerror", 8), ("forward\nms", 7), ("vs\ntorch", 6)),
    *(("fwd+bwd\nms", 7), ("vs\ntorch", 6), ("workspace\nMiB", 9)),
)


def table(rows: Sequence[Row]) -> Group:
    """The rows of one layer as a table, headed by the layer. A wrong result is red and has no times."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    layer = rows[0].layer
    title = Text.assemble("\n", (f"{layer.name}: ", "bold"), layer.describe())
    if note := layer.shrink_note():
        title.append(f"\nmade smaller for the CPU: {note}", "yellow")
    result = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, (heading, width) in enumerate(_COLUMNS):
        result.add_column(heading, justify="right" if index else "left", min_width=width, overflow="fold")
    for row in rows:
        cells = (Text(text, style) for text, style in _cells(row))
        result.add_row(*cells, style="dim" if row.skipped else None)
    return Group(title, result)


def _cells(row: Row) -> list[tuple[str, str]]:
    """The texts of a row, each with its style."""
    return [
        (row.algorithm + " *" * row.chosen, "bold" if row.algorithm == AUTO else ""),
        (_EMPTY if row.error is None else f"{row.error:.1e}", "bold red" * row.error_is_wrong),
        (_EMPTY if row.gradient_error is None else f"{row.gradient_error:.1e}", "bold red" * row.gradient_is_wrong),
        (_milliseconds(row.forward_ms), ""),
        (times_text(row.forward_ratio), _ratio_style(row, row.forward_ratio)),
        (_milliseconds(row.both_ms), ""),
        (times_text(row.both_ratio), _ratio_style(row, row.both_ratio)),
        (_EMPTY if row.workspace_bytes is None else f"{row.workspace_bytes / 2**20:.1f}", ""),
    ]


def _ratio_style(row: Row, ratio: float | None) -> str:
    """Green where ``auto`` is faster than torch, red where it is slower."""
    if row.algorithm != AUTO or ratio is None:
        return ""
    return "bold green" if ratio >= _FASTER else "red" if ratio < _SLOWER else ""


def _milliseconds(value: float | None) -> str:
    return _EMPTY if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def times_text(value: float | None) -> str:
    """A ratio as text; ``-`` where there is none."""
    return _EMPTY if value is None else f"{value:.2f}x"


def notes(rows: Sequence[Row]) -> list[str]:
    """Notes below the table of a layer: choices of ``auto``, algorithms that were skipped or wrong, missing ratios."""
    lines = []
    for forward, of_input, of_weight in (row.taken for row in rows if row.taken):
        gradients = of_input if of_input == of_weight else f"{of_input} (input) and {of_weight} (weight)"
        lines.append(f"auto takes {forward} forward, {gradients} for gradients")
    lines += [f"{row.algorithm} was not run: {row.skipped}" for row in rows if row.skipped]
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


def summary(results: Sequence[Sequence[Row]]) -> str:
    """Say in one sentence what ``auto`` gains over all layers; slower ones count too."""
    autos = [row for rows in results for row in rows if row.algorithm == AUTO]
    parts: list[str] = []
    for name, ratios in (
        ("torch's speed forward", [row.forward_ratio for row in autos]),
        ("with gradients", [row.both_ratio for row in autos]),
    ):
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            of = f"{len(known)} layers" if len(known) == len(results) else f"{len(known)} of {len(results)} layers"
            mean = f"geometric mean of {of}; " if not parts else ""
            detail = f" ({mean}least {times_text(min(known))})" if len(results) > 1 else ""
            parts.append(f"{times_text(geometric_mean(known))} {name}{detail}")
    return f"auto: {', '.join(parts) or 'no ratio to torch, as noted above'}"


def legend(device_type: str) -> str:
    """Explain the names and columns of the table."""
    torch, native = "", ""
    if device_type == "cuda":
        torch, native = ", with cuDNN's benchmark mode on", ", with torch's settings for cuDNN"
    return (
        f"torch      torch.nn.ConvTranspose2d in the same run{torch}\n"
        "auto       gemmconv.ConvTranspose2d, which picks an algorithm for each pass\n"
        f"native     torch's operator, called by gemmconv{native}\n"
        "*          the algorithm that auto takes for the forward pass\n"
        "error      against float64: |result - reference| / |reference|\n"
        "gradient   the largest such error of the input, weight and bias gradients\n"
        "ms         median time; fwd+bwd is a forward pass with all gradients\n"
        "vs torch   torch's time / this time: above 1x is faster than torch\n"
        "workspace  temporary memory, the most of any pass; - where torch manages it"
    )


def as_json(results: Sequence[Sequence[Row]], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Versions, device, dtype, and each layer with its rows. A value that is missing or not finite is None."""
    of_rows = [[asdict(row) | {"layer": row.layer.name, "wrong": row.wrong} for row in rows] for rows in results]
    layers = [asdict(rows[0].layer) | {"rows": some} for rows, some in zip(results, of_rows, strict=True)]
    finite = json.loads(json.dumps(layers), parse_constant=lambda name: None)
    dtype_name, where = str(dtype).removeprefix("torch."), info.device_text(device)
    return {"versions": info.versions(), "device": where, "dtype": dtype_name, "layers": finite}


def chart(results: Sequence[Sequence[Row]], path: Path, heading: str) -> None:
    """Draw the speed of all layers relative to torch: one panel for the forward pass, one with the backward pass.

    ``path`` is the PNG file to write; ``heading`` says where and how the times were measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = [sorted(rows, key=lambda row: row.algorithm != AUTO) for rows in results]
    height = sum(len(rows) + _GAP_LINES for rows in groups)
    figure = Figure(figsize=(13, 1.7 + 0.25 * height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    position, lines = 0.0, list[tuple[float, Row]]()
    for rows in groups:
        layer, note = rows[0].layer, rows[0].layer.shrink_note()
        name = left.text(0, position - 0.6, layer.name, fontsize=9.5, weight="bold")
        text = f":  {layer.describe()}" + (f" (made smaller: {note})" if note else "")
        left.annotate(text, (1, 0), xycoords=name, fontsize=8.5, va="bottom").set_in_layout(False)  # over both panels
        lines += [(position + index, row) for index, row in enumerate(rows)]
        position += len(rows) + _GAP_LINES
    _panel(left, lines, "forward pass", lambda row: (row.forward_ms, row.forward_ratio))
    _panel(right, lines, "forward and backward pass", lambda row: (row.both_ms, row.both_ratio))
    names = [row.algorithm + " *" * row.chosen for _, row in lines]
    left.set_yticks([at for at, _ in lines], names, fontsize=9)
    ratios = [ratio or 0.0 for _, row in lines for ratio in (row.forward_ratio, row.both_ratio)]
    left.set_xlim(0, 1.35 * max(1.0, *ratios))  # room for the text at the end of the longest bar
    left.set_ylim(position - _GAP_LINES - 0.4, -1.4)
    for label in left.get_yticklabels():
        label.set_weight("bold" if label.get_text() == AUTO else "normal")
    figure.suptitle(summary(results), fontsize=13, weight="bold")
    figure.supxlabel(f"{heading}\n* the algorithm that auto takes for the forward pass", fontsize=9)
    figure.savefig(path)


def _panel(
    axes: Axes,
    lines: Sequence[tuple[float, Row]],
    title: str,
    measured: Callable[[Row], tuple[float | None, float | None]],
) -> None:
    """One bar for each row, at its place, with its ratio and time; torch's bars have the length 1."""
    for position, row in lines:
        axes.vlines(1, position - 0.5, position + 0.5, color="black", linewidth=1, zorder=3)
        time, ratio = measured(row)
        length, text, colour = ratio or 0.0, f"{times_text(ratio)}  ({_milliseconds(time)} ms)", "black"
        if row.skipped:
            text, colour = "not run", "dimgrey"
        elif row.wrong:
            text, colour = "wrong result, no time", _WRONG_COLOUR
        elif row.algorithm == BASELINE:
            length, text = 1.0, f"{_milliseconds(time)} ms"
        elif ratio is None:
            text = f"{_milliseconds(time)} ms, not in torch's precision"
        elif row.algorithm == AUTO and ratio < _SLOWER:
            colour = _WRONG_COLOUR
        axes.barh(position, length, height=0.84, color=_COLOURS.get(row.algorithm, _OTHER_COLOUR))
        weight = "bold" if row.algorithm == AUTO else "normal"
        axes.text(max(length, 1.0), position, f" {text}", va="center", fontsize=9, color=colour, weight=weight)
    axes.set_xlabel("times torch's speed (longer is faster; the line is torch)", fontsize=9)
    axes.set_title(title, fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.patch.set_visible(False)  # it would hide the end of a layer's heading
