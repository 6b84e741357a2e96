"""Charts of the speed-ups in a result folder, by suite. ``python -m benchmarks.report`` draws them.

Colours are Okabe and Ito's, told apart with any colour vision; markers differ too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import summary
from benchmarks.contenders import DEFAULT_TORCH, PRECISIONS
from benchmarks.results import Row, load_all
from benchmarks.workloads import SUITES, select

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLUE, _GREY, _BLACK = "#0072B2", "#7F7F7F", "#000000"
# Each algorithm of gemmconv has a colour and a marker. native is left out: it is torch's own operator.
_STYLES = {"gemm_col2im": ("#E69F00", "s"), "direct": ("#009E73", "^"), "fused": ("#CC79A7", "D")}
_DPI = 110
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
