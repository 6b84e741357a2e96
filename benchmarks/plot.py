"""Charts: speed-ups of a result folder by suite, which ``python -m benchmarks.report`` draws; layers' algorithms.

Colours are Okabe and Ito's, told apart with any colour vision; markers differ too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import algorithms, summary
from benchmarks.algorithms import AUTO, TORCH
from benchmarks.contenders import DEFAULT_TORCH, PRECISIONS
from benchmarks.results import Row, load_all
from benchmarks.workloads import SUITES, select

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _GREY, _BLACK = "#0072B2", "#7F7F7F", "#000000"
# Each algorithm of gemmconv has a colour and a marker. native is left out: it is torch's own operator.
_STYLES = {"gemm_col2im": ("#E69F00", "s"), "direct": ("#009E73", "^"), "fused": ("#CC79A7", "D")}
_DPI = 110
_LIGHT_BLUE, _RED = "#BFD4E2", "#B00020"
_GAP_LINES = 1.8  # lines between layers of a chart of algorithms, for the next heading
_PRECISION_NAMES = {"fp32": "fp32 (ieee)", "tf32": "TF32", "fp16": "fp16", "bf16": "bf16"}
_BEST_LONG = "best torch (any setting, any layout)"


def draw(folder: Path) -> list[Path]:
    """Draw every chart that the results in a folder allow, into its folder ``plots``.

    Returns:
        The files, in the order drawn.

    Raises:
        ValueError: the folder holds no results.
    """
    rows, runs = load_all(folder)
    if not rows:
        raise ValueError(f"{folder} holds no result files")
    timed = [row for row in rows if row.median_ms is not None and row.mode == "eager"]
    target = folder / "plots"
    target.mkdir(exist_ok=True)
    made = []
    for suite in dict.fromkeys(row.suite for row in rows):
        for direction in ("forward", "backward"):
            of_suite = [row for row in timed if row.suite == suite and row.direction == direction]
            if any(row.speedup_default is not None and not row.is_torch for row in of_suite):
                title = f"{suite}, {direction}: speed-up over torch's default"
                figure = speedups(of_suite, title, _heading(of_suite, runs))
                made.append(target / f"speedup_{suite}_{direction}.png")
                figure.savefig(made[-1], dpi=_DPI)
    return made


def _heading(rows: Sequence[Row], runs: Sequence[dict[str, Any]]) -> str:
    """A heading that says what made the rows: GPU and versions, with the commits of gemmconv's own rows."""
    own = [runs[index] for index in dict.fromkeys(row.run for row in rows if not row.is_torch)]
    commits = ", ".join(dict.fromkeys(run["commit"][:7] for run in own))
    heading = f"{own[-1]['gpu']}, gemmconv {own[-1]['gemmconv']} ({commits}), torch {own[-1]['torch']}"
    return f"{heading}, cuDNN {own[-1]['cudnn']}" if own[-1]["cudnn"] else heading


def speedups(rows: Sequence[Row], title: str, heading: str) -> Figure:
    """For each workload and precision, torch's default time over gemmconv's in NCHW: a bar for ``auto``, a marker for
    each algorithm. A black tick marks torch's best setting of any layout: a bar that ends before it loses.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    order = {one.name: place for place, one in enumerate(select(SUITES))}
    workloads = sorted(dict.fromkeys(row.workload for row in rows), key=lambda name: order.get(name, len(order)))
    names = [name for name in _STYLES if any(row.algorithm == name for row in rows)]
    precisions = [name for name in PRECISIONS if any(row.precision == name for row in rows)]
    size = 2.4 + 3.1 * len(precisions), 1.7 + 0.3 * len(workloads)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(precisions), sharey=True, squeeze=False)[0]
    shown = [0.5, 2.0]
    for panel, precision in zip(panels, precisions, strict=True):
        of_precision = [row for row in rows if row.precision == precision]
        found = {(row.workload, row.algorithm): row.speedup_default for row in of_precision if row.layout == "nchw"}
        for place, workload in enumerate(workloads):
            bar = found.get((workload, "auto"))
            if bar is not None:
                panel.barh(place, bar - 1, left=1, height=0.66, color=_BLUE, alpha=0.85)
            for name in names:
                value = found.get((workload, name))
                if value is not None:
                    colour, marker = _STYLES[name]
                    panel.plot(*(value, place, marker), color=colour, markersize=6, markeredgecolor="white", zorder=3)
            own = [row for row in of_precision if row.workload == workload]
            best = _best_over_default(own)
            if best is not None:
                panel.plot([best, best], [place - 0.45, place + 0.45], color=_BLACK, linewidth=2, zorder=4)
            values = [found.get((workload, name)) for name in names]
            shown += [value for value in (best, bar, *values) if value is not None]
            if bar is None:
                text = "torch: no time" if summary.alone(own) else "no time"
                panel.text(1.05, place, text, fontsize=7, va="center", color=_GREY)
        panel.set_xscale("log")
        panel.axvline(1, color=_GREY, linewidth=1)
        panel.set_title(_PRECISION_NAMES[precision], fontsize=10)
        panel.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
        panel.tick_params(axis="x", labelsize=8)
    low, high = min(shown) / 1.2, max(shown) * 1.2
    steps = (1.0, 2.0, 5.0) if high / low < 50 else (1.0, 3.0) if high / low < 500 else (1.0,)
    for panel in panels:
        panel.set_xlim(low, high)
        panel.xaxis.set_major_locator(LogLocator(10, subs=steps, numticks=20))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        panel.xaxis.set_minor_formatter(NullFormatter())
    panels[0].set_yticks(range(len(workloads)), workloads, fontsize=9)
    panels[0].set_ylim(len(workloads) - 0.4, -0.6)
    figure.suptitle(f"{title}\n{heading}", fontsize=11)
    handles: list[Any] = [Patch(color=_BLUE, alpha=0.85, label="auto")]
    for name in names:
        colour, marker = _STYLES[name]
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", label=name))
    handles.append(
        Line2D([], [], color=_BLACK, marker="|", markersize=12, markeredgewidth=2, linestyle="", label=_BEST_LONG)
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def _best_over_default(rows: Sequence[Row]) -> float | None:
    """torch's default time over its best, from the rows of one workload, precision and direction."""
    times = {row.algorithm: row.median_ms for row in rows if row.is_torch and row.median_ms is not None}
    return times[DEFAULT_TORCH] / min(times.values()) if DEFAULT_TORCH in times else None


def bars(results: algorithms.Results, title: str, heading: str) -> Figure:
    """For each layer a bar for each algorithm, as long as it is faster than torch: one panel for the forward pass, one
    with the backward pass. ``heading`` says where and how the times were measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = sum(len(rows) + _GAP_LINES for rows in results.values())
    figure = Figure(figsize=(13, 1.7 + 0.25 * height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    position, lines = 0.0, list[tuple[float, algorithms.Row]]()
    for workload, rows in results.items():
        name = left.text(0, position - 0.6, workload.name, fontsize=9.5, weight="bold")
        text = f":  {algorithms.describe(workload)}" + f" (made smaller: {workload.note})" * bool(workload.note)
        left.annotate(text, (1, 0), xycoords=name, fontsize=8.5, va="bottom").set_in_layout(False)  # over both panels
        lines += [(position + i, row) for i, row in enumerate(sorted(rows, key=lambda row: row.algorithm != AUTO))]
        position += len(rows) + _GAP_LINES
    _panel(left, lines, "forward pass", lambda row: (row.forward_ms, row.forward_ratio))
    _panel(right, lines, "forward and backward pass", lambda row: (row.both_ms, row.both_ratio))
    left.set_yticks([at for at, _ in lines], [row.algorithm + " *" * row.chosen for _, row in lines], fontsize=9)
    ratios = [ratio or 0.0 for _, row in lines for ratio in (row.forward_ratio, row.both_ratio)]
    left.set_xlim(0, 1.35 * max(1.0, *ratios))  # room for the text at the end of the longest bar
    left.set_ylim(position - _GAP_LINES - 0.4, -1.4)
    for label in left.get_yticklabels():
        label.set_weight("bold" if label.get_text() == AUTO else "normal")
    figure.suptitle(title, fontsize=13, weight="bold")
    figure.supxlabel(f"{heading}\n* the algorithm that auto takes for the forward pass", fontsize=9)
    return figure


def _panel(
    axes: Axes,
    lines: Sequence[tuple[float, algorithms.Row]],
    title: str,
    measured: Callable[[algorithms.Row], tuple[float | None, float | None]],
) -> None:
    """One bar for each row, at its place, with its ratio and time; torch's bars have the length 1."""
    colours = {AUTO: _BLUE, TORCH: _GREY}
    for position, row in lines:
        axes.vlines(1, position - 0.5, position + 0.5, color=_BLACK, linewidth=1, zorder=3)
        time, ratio = measured(row)
        milliseconds = f"{summary.milliseconds(time)} ms"
        length, text, colour = ratio or 0.0, f"{summary.times_text(ratio)}  ({milliseconds})", _BLACK
        if row.skipped:
            text, colour = "not run", _GREY
        elif row.wrong:
            text, colour = "wrong result, no time", _RED
        elif row.algorithm == TORCH:
            length, text = 1.0, milliseconds
        elif ratio is None:
            text = f"{milliseconds}, not in torch's precision"
        elif row.algorithm == AUTO and ratio < algorithms.SLOWER:
            colour = _RED
        axes.barh(position, length, height=0.84, color=colours.get(row.algorithm, _LIGHT_BLUE))
        weight = "bold" if row.algorithm == AUTO else "normal"
        axes.text(max(length, 1.0), position, f" {text}", va="center", fontsize=9, color=colour, weight=weight)
    axes.set_xlabel("times torch's speed (longer is faster; the line is torch)", fontsize=9)
    axes.set_title(title, fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.patch.set_visible(False)  # it would hide the end of a layer's heading
