"""Charts of the results in a folder: speed-ups by suite, rooflines with every workload, sweeps as lines.

    python -m benchmarks.plot [FOLDER]

Colours are Okabe and Ito's, told apart with any colour vision; markers differ too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import summary
from benchmarks.contenders import DEFAULT_TORCH, PRECISIONS
from benchmarks.report import current_and_older, newest_results
from benchmarks.results import Row, load_all
from benchmarks.workloads import SUITES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREEN, _SKY, _VERMILION, _PURPLE = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#CC79A7"
_GREY, _BLACK = "#7F7F7F", "#000000"
_STYLES = {
    "auto": (_BLUE, "o"),
    "gemm_col2im": (_ORANGE, "s"),
    "direct": (_GREEN, "^"),
    "fused": (_PURPLE, "D"),
}
_MORE_STYLES = ((_SKY, "v"), (_VERMILION, "P"))
_DPI = 110
_PRECISION_NAMES = {"fp32": "fp32 (ieee)", "tf32": "TF32", "fp16": "fp16", "bf16": "bf16"}
_BEST = "best torch"
_BEST_LONG = "best torch (any setting, any layout)"

_SWEEP_TITLES = {
    "channels": "channels in and out",
    "kernel": "kernel side, stride 1",
    "stride": "stride, kernel 4",
    "dilation": "dilation, kernel 3",
    "groups": "groups of 64 channels",
    "batch": "batch, 16x16 images",
    "image": "image side, batch 1",
}


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
    target = folder / "plots"
    target.mkdir(exist_ok=True)
    made = []
    for suite in summary.SUITE_ORDER:
        for direction in ("forward", "backward"):
            of_suite = [row for row in _timed(rows) if row.suite == suite and row.direction == direction]
            if any(row.speedup_default is not None and not row.is_torch for row in of_suite):
                title = f"{suite}, {direction}: speed-up over torch's default"
                figure = speedups(of_suite, title, _heading(of_suite, runs))
                made.append(_save(figure, target / f"speedup_{suite}_{direction}.png"))
    current = _timed(current_and_older(rows, runs)[0])
    for precision in PRECISIONS:
        of_precision = [row for row in current if row.precision == precision and row.direction == "forward"]
        if any(not row.is_torch and row.flops for row in of_precision):
            ceilings = next(run["ceilings"] for run in reversed(runs) if precision in run["ceilings"].get("tflops", {}))
            figure = roofline(of_precision, ceilings, precision, _heading(of_precision, runs))
            made.append(_save(figure, target / f"roofline_{precision}.png"))
        of_sweep = [row for row in of_precision if row.suite == "sweep"]
        if any(not row.is_torch for row in of_sweep):
            figure = sweeps(of_sweep, precision, _heading(of_sweep, runs))
            made.append(_save(figure, target / f"sweep_{precision}.png"))
    return made


def _timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.median_ms is not None and row.mode == "eager"]


def _heading(rows: Sequence[Row], runs: Sequence[dict[str, Any]]) -> str:
    """What made the rows: GPU and versions, with the commits of gemmconv's own rows."""
    own = [runs[index] for index in dict.fromkeys(row.run for row in rows if not row.is_torch)]
    commits = ", ".join(dict.fromkeys(run["commit"][:7] for run in own))
    heading = f"{own[-1]['gpu']}, gemmconv {own[-1]['gemmconv']} ({commits}), torch {own[-1]['torch']}"
    return f"{heading}, cuDNN {own[-1]['cudnn']}" if own[-1]["cudnn"] else heading


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=_DPI)
    return path


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _ours(rows: Sequence[Row]) -> list[str]:
    """gemmconv's algorithms among the rows, ``auto`` first; ``native`` is torch's own operator and left out."""
    names = {row.algorithm for row in rows if not row.is_torch and row.algorithm != "native"}
    known = list(_STYLES)
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def _styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each algorithm: the same ones in every chart."""
    others = iter(_MORE_STYLES)
    return {name: _STYLES[name] if name in _STYLES else next(others, (_BLACK, "+")) for name in names}


def _order(workload: str) -> int:
    """A workload's place in its suite; unknown ones last."""
    names = [one.name for suite in SUITES.values() for one in suite]
    return names.index(workload) if workload in names else len(names)


def speedups(rows: Sequence[Row], title: str, heading: str) -> Figure:
    """For each workload and precision, torch's default time over gemmconv's in NCHW: a bar for ``auto``, a marker for
    each algorithm. A black tick marks torch's best setting of any layout: a bar that ends before it loses.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    names, workloads = _ours(rows), sorted(dict.fromkeys(row.workload for row in rows), key=_order)
    precisions = [name for name in PRECISIONS if any(row.precision == name for row in rows)]
    styles = _styles(names)
    figure = _figure(2.4 + 3.1 * len(precisions), 1.7 + 0.3 * len(workloads))
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
                if value is not None and name != "auto":
                    colour, marker = styles[name]
                    panel.plot(*(value, place, marker), color=colour, markersize=6, markeredgecolor="white", zorder=3)
            own = [row for row in of_precision if row.workload == workload]
            best = _best_over_default(own)
            if best is not None:
                panel.plot([best, best], [place - 0.45, place + 0.45], color=_BLACK, linewidth=2, zorder=4)
            values = [found.get((workload, name)) for name in names]
            shown += [value for value in (best, *values) if value is not None]
            if bar is None and "auto" in names:
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
        if name != "auto":
            colour, marker = styles[name]
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


def roofline(rows: Sequence[Row], ceilings: dict[str, Any], precision: str, heading: str) -> Figure:
    """Rates over arithmetic intensity, log-log: every workload with torch's default, its best and ``auto``.

    Workloads are named above the roof; those of sweeps are drawn small and without a name.
    """
    peak, copy = ceilings["tflops"][precision], ceilings["copy_tbps"]
    points: dict[str, dict[str, Row]] = {}
    for row in rows:
        if not row.flops or not row.least_bytes or not row.median_ms:
            continue
        kinds = points.setdefault(row.workload, {})
        if row.algorithm == DEFAULT_TORCH:
            kinds["torch default"] = row
        if row.algorithm == "auto" and row.layout == "nchw":
            kinds["auto"] = row
        if row.is_torch and (_BEST not in kinds or row.median_ms < (kinds[_BEST].median_ms or 0)):
            kinds[_BEST] = row
    figure = _figure(15, 8.5)
    axes = figure.subplots()
    styles = {"torch default": (_GREY, "x"), _BEST: (_ORANGE, "s"), "auto": (_BLUE, "o")}
    where, lowest, top = {}, peak, peak
    for workload, kinds in points.items():
        any_row = next(iter(kinds.values()))
        intensity = (any_row.flops or 0) / (any_row.least_bytes or 1)
        small = any_row.suite == "sweep"
        rates = {}
        for kind, row in kinds.items():
            rates[kind] = (row.flops or 0) / (row.median_ms or 1) / 1e9
            colour, marker = styles[kind]
            axes.plot(
                *(intensity, rates[kind]),
                marker,
                color=colour,
                markersize=3 if small else 6.5,
                alpha=0.6 if small else 1,
            )
        axes.plot([intensity] * 2, [min(rates.values()), max(rates.values())], color="#BBBBBB", linewidth=0.7, zorder=0)
        lowest, top = min(lowest, *rates.values()), max(top, *rates.values())
        if not small:
            where[workload] = (intensity, max(rates.values()))
    intensities = [(row.flops or 0) / (row.least_bytes or 1) for kinds in points.values() for row in kinds.values()]
    left, right = min(intensities) / 1.6, max([*intensities, peak / copy * 2]) * 1.6
    ridge = peak / copy
    axes.plot([left, ridge, right], [left * copy, peak, peak], color=_BLACK, linewidth=1.6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    floor_y, roof_y = lowest / 2, top * 1.5
    axes.set_ylim(floor_y, roof_y * (roof_y / floor_y) ** 0.2)
    _names_above(axes, where, roof_y, (left, right))
    axes.text(right / 1.03, peak * 1.04, f"matrix product {peak:.0f} TFLOP/s", ha="right", va="bottom", fontsize=9)
    start = left * 1.1
    axes.text(start, start * copy * 2.1, f"copy {copy:.2f} TB/s", ha="left", va="bottom", fontsize=9)
    axes.set_xlabel("useful flops / least bytes")
    axes.set_ylabel("useful TFLOP/s")
    axes.grid(which="major", color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"roofline, {_PRECISION_NAMES[precision]}, forward (small: sweep)\n{heading}", fontsize=11)
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=c, marker=m, linestyle="", label=kind) for kind, (c, m) in styles.items()]
    axes.legend(handles=handles, loc="lower right", frameon=False, fontsize=9)
    return figure


def _names_above(axes: Axes, where: dict[str, tuple[float, float]], height: float, limits: tuple[float, float]) -> None:
    """Names at one height, turned upright, moved apart where they would overlap, each with a line to its point."""
    if not where:
        return
    from math import log10

    low, high = (log10(limit) for limit in limits)
    ordered = sorted(where, key=lambda name: where[name][0])
    gap = min(0.0155 * (high - low), (high - low) / len(ordered))
    places = [log10(where[name][0]) for name in ordered]
    for _ in range(500):  # push neighbours apart until all keep the gap
        moved = False
        for i in range(len(places) - 1):
            short = gap - (places[i + 1] - places[i])
            if short > 1e-9:
                places[i] -= short / 2
                places[i + 1] += short / 2
                moved = True
        places[0], places[-1] = max(places[0], low + gap / 2), min(places[-1], high - gap / 2)
        if not moved:
            break
    for name, place in zip(ordered, places, strict=True):
        x, y = where[name]
        axes.plot([x, 10**place], [y, height], color="#CCCCCC", linewidth=0.5, zorder=0)
        axes.text(10**place, height * 1.05, name, rotation=90, ha="center", va="bottom", fontsize=7.5)


def sweeps(rows: Sequence[Row], precision: str, heading: str) -> Figure:
    """Times over the swept value, one panel for each axis: torch's default and best, each algorithm, the floor."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    workloads = {workload.name: workload for workload in SUITES["sweep"]}
    names = _ours(rows)
    style = {"torch default": (_GREY, "x"), _BEST: (_BLACK, "*"), **_styles(names)}
    axes_names = [axis for axis in _SWEEP_TITLES if any(workloads[row.workload].axis == axis for row in rows)]
    columns = 4
    lines = -(-len(axes_names) // columns)
    figure = _figure(3.7 * columns, 1.3 + 3.0 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, axis in zip(panels, axes_names, strict=False):
        series: dict[str, dict[int, float]] = {}
        floor: dict[int, float] = {}
        for row in rows:
            workload = workloads[row.workload]
            if workload.axis != axis or row.median_ms is None:
                continue
            if row.floor_ms:
                floor[workload.value] = row.floor_ms
            if row.algorithm == DEFAULT_TORCH:
                series.setdefault("torch default", {})[workload.value] = row.median_ms
            if row.is_torch:
                best = series.setdefault(_BEST, {})
                best[workload.value] = min(row.median_ms, best.get(workload.value, row.median_ms))
            elif row.algorithm in names and row.layout == "nchw":
                series.setdefault(row.algorithm, {})[workload.value] = row.median_ms
        values = sorted(floor)
        panel.plot(values, [floor[value] for value in values], ":", color=_GREY, linewidth=1.3)
        for name in style:
            if name in series:
                xs = sorted(series[name])
                colour, marker = style[name]
                panel.plot(xs, [series[name][x] for x in xs], color=colour, marker=marker, markersize=5, linewidth=1.3)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.xaxis.set_major_locator(FixedLocator([float(value) for value in values]))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_locator(NullLocator())
        low, high = panel.get_ylim()
        panel.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if high / low < 60 else (1.0,), numticks=20))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_title(_SWEEP_TITLES[axis], fontsize=10)
        panel.tick_params(labelsize=8)
        panel.grid(which="major", color="#E5E5E5", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(axes_names) :]:
        panel.set_visible(False)
    for panel in panels[::columns]:
        panel.set_ylabel("median ms", fontsize=9)
    handles = [Line2D([], [], color=colour, marker=marker, label=name) for name, (colour, marker) in style.items()]
    handles.append(Line2D([], [], color=_GREY, linestyle=":", label="floor"))
    figure.suptitle(f"sweeps, {_PRECISION_NAMES[precision]}, forward, NCHW\n{heading}", fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the charts of a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description="Draw the charts of a result folder."
    )
    parser.add_argument("folder", type=Path, nargs="?", help="default: the newest in benchmarks/results")
    arguments = parser.parse_args(argv)
    try:
        for path in draw(arguments.folder or newest_results()):
            print(path)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
