"""Draws the figures of docs/concepts.md and of the pages on algorithms and kernels into docs/images.

    python docs/figures.py

Needs matplotlib alone, takes some seconds, and writes equal files each time with one version of matplotlib. Boxes are
white, so that figures can be read on a dark page too.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

HERE = Path(__file__).parent
IMAGES = HERE / "images"
ROWS = HERE.parent / "benchmarks" / "results" / "nvidia-h200" / "rows.csv.gz"
# Okabe and Ito's colours, which people with any colour vision can tell apart.
TAPS = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
PALE = "#d6e6f2", "#fbe3d0", "#d3ece3", "#f5e4ee"
INK, GREY, LINE = "#222222", "#f0f0f0", "#888888"

Point = tuple[float, float]


def canvas(width: float, height: float, right: float, top: float) -> tuple[Any, Any]:
    """A figure of so many inches whose axes go from 0 to ``right`` and from 0 to ``top``."""
    figure = plt.figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)
    return figure, axes


def box(axes: Any, at: Point, size: Point, text: str = "", colour: str = GREY, **more: Any) -> None:
    """A rectangle with its lower left corner at ``at``, and a text in its middle."""
    edge = {"edgecolor": LINE, "linewidth": 1.2} | {
        key: more.pop(key) for key in ("edgecolor", "linewidth") if key in more
    }
    axes.add_patch(Rectangle(at, *size, facecolor=colour, **edge))
    write(axes, (at[0] + size[0] / 2, at[1] + size[1] / 2), text, **more)


def write(axes: Any, at: Point, text: str, **more: Any) -> None:
    """A text around a point."""
    axes.text(*at, text, **({"ha": "center", "va": "center", "fontsize": 12, "color": INK} | more))


def arrow(axes: Any, begin: Point, end: Point, colour: str = INK, width: float = 1.8, **more: Any) -> None:
    """An arrow between two points."""
    style = {"arrowstyle": "-|>", "mutation_scale": 13, "shrinkA": 0, "shrinkB": 0} | more
    axes.add_patch(FancyArrowPatch(begin, end, color=colour, linewidth=width, **style))


def meetings(inputs: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> list[tuple[int, int, int]]:
    """All (input, tap, output) of one axis: o = i * stride - padding + k * dilation, inside of the output."""
    extent = (inputs - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
    found = ((i, k, i * stride - padding + k * dilation) for i in range(inputs) for k in range(kernel))
    return [(i, k, o) for i, k, o in found if 0 <= o < extent]


def scatter_gather() -> Any:
    """Three inputs, kernel 3, stride 2: what each input sends, and what each output receives."""
    figure, axes = canvas(8.4, 6.3, 16.8, 12.6)
    for top, title, is_gather in (
        (12.0, "Scatter: each input writes three outputs; 2 and 4 are written twice", False),
        (5.7, "Gather: each output reads its inputs; each is written once", True),
    ):
        write(axes, (8.4, top), title, fontsize=13, weight="bold")
        upper, lower = top - 1.9, top - 5.0
        write(axes, (1.1, upper + 0.5), "input")
        write(axes, (1.1, lower + 0.5), "output")
        for i in range(3):
            box(axes, (4.2 + 4 * i, upper), (1.2, 1), str(i), PALE[0])
        for o in range(7):
            twice = sum(end == o for *_, end in meetings(3, 3, 2, 0)) > 1
            box(
                axes,
                (2.2 + 2 * o, lower),
                (1.2, 1),
                str(o),
                PALE[1] if twice else GREY,
                weight="bold" if twice else None,
            )
        for i, k, o in meetings(3, 3, 2, 0):
            begin, end = (4.8 + 4 * i + 0.3 * (k - 1), upper), (2.8 + 2 * o + 0.25 * (1 - k), lower + 1)
            begin, end = (end, begin) if is_gather else (begin, end)
            arrow(axes, begin, end, TAPS[k])
        for k in range(3):
            write(axes, (15.3, upper + 0.9 - 0.75 * k), f"tap {k}", color=TAPS[k], weight="bold")
    return figure


def phases() -> Any:
    """Kernel 4, stride 2, padding 1: outputs as cells of two phases, the taps of each at constant shifts."""
    figure, axes = canvas(8.4, 4.3, 16.8, 8.6)
    inputs, upper, lower = 4, 5.6, 2.0
    write(axes, (1.2, upper + 0.5), "input")
    write(axes, (1.2, lower + 0.5), "output")
    left = lambda o: 3.0 + 3.4 * (o // 2) + 1.3 * (o % 2)  # noqa: E731
    for i in range(inputs):
        box(axes, (3.65 + 3.4 * i, upper), (1.3, 1), str(i), GREY)
        axes.add_patch(Rectangle((2.85 + 3.4 * i, lower - 0.2), 2.9, 1.4, fill=False, edgecolor=INK, linestyle="--"))
        write(axes, (4.3 + 3.4 * i, lower - 0.65), f"cell {i}", fontsize=11)
    for o in range(2 * inputs):
        box(axes, (left(o), lower), (1.3, 1), str(o), PALE[o % 2])
    for i, k, o in meetings(inputs, 4, 2, 1):
        shift = i - o // 2
        arrow(axes, (4.3 + 3.4 * i + 0.42 * (k - 1.5), upper), (left(o) + 0.65 - 0.2 * shift, lower + 1), TAPS[o % 2])
        write(
            axes, (4.3 + 3.4 * i + 0.42 * (k - 1.5), upper + 1.3), str(k), fontsize=11, color=TAPS[o % 2], weight="bold"
        )
    write(axes, (1.2, upper + 1.3), "tap k")
    write(axes, (8.4, 8.15), "Stride 2, kernel 4, padding 1: output o is in cell o // 2", fontsize=13, weight="bold")
    write(axes, (8.4, 0.8), "phase 0 reads tap 1 at shift 0 and tap 3 at shift −1", color=TAPS[0], weight="bold")
    write(axes, (8.4, 0.25), "phase 1 reads tap 0 at shift +1 and tap 2 at shift 0", color=TAPS[1], weight="bold")
    return figure


def columns() -> Any:
    """The product that makes the columns, and the fold that adds them up."""
    figure, axes = canvas(8.4, 3.9, 16.8, 7.8)
    write(axes, (5.2, 7.3), "1. matrix product", fontsize=13, weight="bold")
    write(axes, (14.2, 7.3), "2. col2im", fontsize=13, weight="bold")
    box(axes, (0.9, 1.6), (1.5, 4.6), "weightᵀ", PALE[0])
    write(axes, (1.65, 1.15), "C_in", fontsize=11)
    write(axes, (0.5, 3.9), "C_out·K_h·K_w", fontsize=11, rotation=90)
    write(axes, (2.75, 3.9), "×", fontsize=16)
    box(axes, (3.8, 3.1), (2.6, 1.6), "input", PALE[0])
    write(axes, (5.1, 2.65), "H_in·W_in", fontsize=11)
    write(axes, (3.45, 3.9), "C_in", fontsize=11, rotation=90)
    write(axes, (6.95, 3.9), "=", fontsize=16)
    for k in range(4):
        box(axes, (7.5, 1.6 + 1.15 * (3 - k)), (2.6, 1.15), f"tap {k}", PALE[k])
    write(axes, (8.8, 1.15), "H_in·W_in", fontsize=11)
    write(axes, (8.8, 6.5), "columns", fontsize=12)
    for k in range(4):
        arrow(axes, (10.2, 2.17 + 1.15 * (3 - k)), (12.3, 4.3 - 0.27 * k), TAPS[k])
    box(axes, (12.4, 2.3), (3.6, 3.2), "output", GREY)
    write(axes, (14.2, 1.85), "H_out·W_out, C_out channels", fontsize=11)
    write(
        axes,
        (8.4, 0.4),
        "A row of columns is an output channel and a tap; outputs add up the values that meet there.",
    )
    return figure


def patch() -> Any:
    """One patch of the input, which the four taps of a phase read at four shifts."""
    figure, axes = canvas(8.4, 3.6, 16.8, 7.2)
    shifts = [(-1, -1), (-1, 0), (0, -1), (0, 0)]
    names = [(3, 3), (3, 1), (1, 3), (1, 1)]
    write(
        axes,
        (8.4, 6.7),
        "Phase (0, 0) of stride 2, kernel 4, padding 1: a tile of 4 × 4 cells",
        fontsize=13,
        weight="bold",
    )
    for place, ((down, across), tap) in enumerate(zip(shifts, names, strict=True)):
        left, low, side = 0.7 + 4.0 * place, 2.0, 0.58
        for row in range(6):
            for column in range(6):
                is_read = 0 <= row - 1 - down < 4 and 0 <= column - 1 - across < 4
                colour = PALE[place] if is_read else "white"
                box(axes, (left + side * column, low + side * (5 - row)), (side, side), "", colour)
        corner = left + side * (1 + across), low + side * (1 - down)
        axes.add_patch(Rectangle(corner, 4 * side, 4 * side, fill=False, edgecolor=TAPS[place], linewidth=3))
        write(axes, (left + 3 * side, 1.5), f"tap {tap}", color=TAPS[place], weight="bold")
        write(
            axes,
            (left + 3 * side, 0.95),
            f"shift ({down}, {across})".replace("-", "−"),
            color=TAPS[place],
            weight="bold",
        )
    write(axes, (8.4, 0.3), "The patch of 6 × 6 inputs is loaded once; every tap reads it at another place.")
    return figure


def memory() -> Any:
    """Where the columns are: the algorithms beside each other."""
    figure, axes = canvas(8.4, 4.9, 16.8, 9.8)
    for at, title in ((4.0, "GPU memory"), (7.6, "inside a kernel"), (11.5, "GPU memory"), (15.1, "GPU memory")):
        write(axes, (at, 9.3), title, fontsize=11, color="#555555")
    small = {"fontsize": 11}
    lines: Sequence[tuple[str, Sequence[tuple[float, float, str, int]]]] = (
        (
            "gemm_col2im",
            ((2.9, 2.2, "input", 0), (6.2, 2.8, "product", 2), (10.1, 2.8, "columns", 1), (14.0, 2.2, "output", 0)),
        ),
        (
            "fused, folding",
            ((2.9, 2.2, "input", 0), (6.2, 6.7, "product, columns on chip, fold", 2), (14.0, 2.2, "output", 0)),
        ),
        (
            "fused, implicit",
            ((2.9, 2.2, "input", 0), (6.2, 6.7, "patch on chip, product of shifts", 2), (14.0, 2.2, "output", 0)),
        ),
        (
            "direct",
            ((2.9, 2.2, "input", 0), (6.2, 6.7, "each thread gathers its outputs", 2), (14.0, 2.2, "output", 0)),
        ),
    )
    for row, (name, boxes) in enumerate(lines):
        low = 7.3 - 2.05 * row
        write(axes, (0.25, low + 0.55), name, ha="left", weight="bold", **small)
        for (begin, width, text, colour), after in zip(boxes, [*boxes[1:], None], strict=True):
            box(axes, (begin, low), (width, 1.1), text, PALE[colour], **small)
            if after is not None:
                arrow(axes, (begin + width + 0.1, low + 0.55), (after[0] - 0.1, low + 0.55))
        if row == 0:
            write(axes, (13.45, low - 0.35), "col2im", **small)
    write(axes, (8.4, 0.35), "Only gemm_col2im writes columns to the GPU's memory, and reads them again.")
    return figure


def auto() -> Any:
    """How ``auto`` comes to a choice."""
    figure, axes = canvas(8.4, 5.2, 16.8, 10.4)
    small = {"fontsize": 11}
    steps = (
        (9.6, "Was this layer and pass tuned on this device?", "yes: take it", 3),
        (7.7, "Which algorithms can serve it?", "others are skipped, with a reason", 1),
        (5.8, "Estimate each kernel's tiles, keep the best", "searches are cached by size class", 2),
        (3.9, "Multiply by corrections from measured rows", "native: from rows of torch's operator", 2),
        (2.0, "Take the least expected time", "Hopper: the host's time counts too", 0),
    )
    for row, (low, text, aside, colour) in enumerate(steps):
        box(axes, (0.3, low - 0.55), (9.0, 1.2), text, PALE[colour], **small)
        write(axes, (10.2, low + 0.05), aside, ha="left", **small)
        arrow(axes, (9.35, low + 0.05), (10.0, low + 0.05), LINE, 1.4)
        if row < len(steps) - 1:
            arrow(axes, (5.0, low - 0.6), (5.0, low - 1.25 + 0.02))
    write(axes, (10.2, 1.35), "other GPUs: native, unless another\nis clearly faster", ha="left", va="top", **small)
    return figure


def measured() -> Any:
    """How fast each kernel is beside torch's operator: median and the middle 80% of the measured cases."""
    with gzip.open(ROWS, "rt") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    cases: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if not math.isnan(seconds := float(row["seconds"])):
            case = cases[row["layer"], row["precision"], row["layout"], row["direction"]]
            case[row["kernel"]] = min(seconds, case.get(row["kernel"], math.inf))
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (*_, direction), times in cases.items():
        for kernel in times.keys() - {"native"} if "native" in times else ():
            ratios[direction, kernel].append(times["native"] / times[kernel])
    order = [
        key
        for direction in ("forward", "input_grad", "weight_grad", "grads")
        for key in sorted(ratios)
        if key[0] == direction
    ]
    figure, axes = plt.subplots(figsize=(8.4, 7.2), facecolor="white", layout="constrained")
    colours = dict(zip(("forward", "input_grad", "weight_grad", "grads"), TAPS, strict=True))
    for place, key in enumerate(reversed(order)):
        low, *_, high = quantiles(ratios[key], n=10)
        axes.plot([low, high], [place, place], color=colours[key[0]], linewidth=5, alpha=0.4, solid_capstyle="butt")
        axes.plot(median(ratios[key]), place, "o", color=colours[key[0]], markersize=8)
    names = [
        f"{kernel.removeprefix('sm90/')}, {direction} ({len(ratios[direction, kernel])})" for direction, kernel in order
    ]
    axes.set_yticks(range(len(order)), reversed(names), fontsize=10.5)
    axes.set_xscale("log")
    axes.set_xticks(
        [0.1, 0.25, 0.5, 1, 2, 4, 10, 30], ["0.1x", "0.25x", "0.5x", "1x", "2x", "4x", "10x", "30x"], fontsize=10.5
    )
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.axvline(1, color=INK, linewidth=1)
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.set_xlabel("times the speed of torch's operator (H200, device time)", fontsize=11)
    axes.set_title("Median and middle 80% of the cases (their number)", fontsize=12, weight="bold")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


FIGURES: tuple[Callable[[], Any], ...] = (scatter_gather, phases, columns, patch, memory, auto, measured)


def main() -> None:
    """Draw all figures."""
    IMAGES.mkdir(exist_ok=True)
    plt.rcParams |= {"font.family": "DejaVu Sans", "svg.hashsalt": "gemmconv", "svg.fonttype": "path"}
    for draw in FIGURES:
        figure = draw()
        path = IMAGES / f"{draw.__name__}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        print(path.relative_to(HERE.parent))
        plt.close(figure)


if __name__ == "__main__":
    main()
