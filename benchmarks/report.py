"""Everything that is made from the result files: summary.md, the charts, and the tables of docs/guide/results.md.

    python -m benchmarks.report

Each GPU's folder in benchmarks/results gets a summary.md. The page shows the newest results: the networks', the host's,
and device time with its charts may come from different GPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import summary, waiting
from benchmarks.environment import text_of
from benchmarks.results import BY_TURNS, RESULTS, Row, current, load_all
from benchmarks.turns import Turn, load_turns

_RESULTS = RESULTS
_PAGE = Path(__file__).parent.parent / "docs" / "guide" / "results.md"
START, END = "<!-- results: start -->", "<!-- results: end -->"
_MOST_LOSING = 10

Runs = Sequence[dict[str, Any]]
Waited = tuple[Sequence[Turn], Runs]  # rows by turns, and their runs


def newest_folders() -> dict[str, Path]:
    """The folder of a GPU with the newest rows, for each suite by turns, and for device time (by the name ``""``)."""
    newest: dict[str, tuple[str, Path]] = {}
    for folder in sorted(path for path in _RESULTS.glob("*") if not path.name.startswith("cpu")):
        runs = {suite: load_turns(folder, [suite])[1] for suite in BY_TURNS} | {"": load_all(folder)[1]}
        for suite, of_suite in runs.items():
            date = max((run["date"] for run in of_suite), default="")
            if date > newest.get(suite, ("",))[0]:
                newest[suite] = date, folder
    return {suite: folder for suite, (_, folder) in newest.items()}


def made_with(rows: Sequence[Row] | Sequence[Turn], runs: Runs) -> str:
    """A sentence: each environment that made a row, with the suites it made rows of, and by turns with the modes."""
    found: dict[str, dict[str, None]] = {}
    names = ((row.suite if isinstance(row, Row) else f"{row.suite} {row.mode}", row.run) for row in rows)
    for suite, index in dict.fromkeys(names):
        run = runs[index]
        found.setdefault(f"{text_of(run)}, {run['date'][:10]}", {})[suite] = None
    return "; ".join(f"{environment} ({', '.join(suites)})" for environment, suites in found.items()) + "."


def current_and_older(rows: Sequence[Row], runs: Runs) -> tuple[list[Row], list[Row]]:
    """The rows, and apart from them those of gemmconv's that newer sources made others of the same suite of."""
    ours = [row for row in rows if not row.is_torch]
    kept = {row.key for row in current(ours, runs, lambda row: row.suite)}
    older = [row for row in ours if row.key not in kept]
    return [row for row in rows if row.is_torch or row.key in kept], older


def _waiting_parts(waited: Waited, link: str = "") -> list[str]:
    """The part about networks and the host; where they were not measured, a sentence about that."""
    turns = waiting.newest(*waited)
    made = made_with(turns, waited[1]) if turns else waiting.NOT_MEASURED
    if left_out := [row for row in waited[0] if row not in turns]:
        losing = sum(row.loses for row in left_out)
        made += f" Not here: {len(left_out)} rows of an older gemmconv, {losing} of them slower than torch."
    return [made, *waiting.parts(turns, link)]


def device_parts(rows: Sequence[Row], runs: Runs, link: str, charts: Sequence[str]) -> list[str]:
    """Device time beside torch's settings and the floor, for the page.

    Args:
        rows: finished rows.
        runs: their runs.
        link: path of the result folder, as the page links to it.
        charts: names of charts in its folder ``plots`` that are shown.
    """
    rows, older = current_and_older(rows, runs)
    ceilings = _measured_ceilings([runs[index]["ceilings"] for index in {row.run for row in rows}])
    parts = ["## Device time, layer by layer", made_with(rows, runs) + ceilings + _about_older(older)]
    parts.append(
        "`torch default` is `torch.nn.functional.conv_transpose2d` in NCHW; `best torch` is the fastest of its "
        "settings (`cudnn.benchmark` on and off, NCHW and channels_last, deterministic, unfused) for that row. A ratio "
        'above 1x means that `algorithm="auto"` is faster. The floor is max(useful flops / matrix product rate, '
        "least bytes / copy bandwidth), both measured in the same run. Wrong results have no time."
    )
    others = [f"{summary.losing_of(rows, kind)} in {name}" for name, kind in summary.ASKED_FOR.items()]
    parts.append(
        f"**Slower than the best torch setting in {summary.losing_of(rows)} rows** of `auto` in NCHW "
        f"({', '.join(others)}).{_about_alone(rows)}"
    )
    if slower := summary.losing(rows):
        shown = [summary.losing_cells(row) for row in slower[:_MOST_LOSING]]
        parts[-1] += f" The worst in NCHW (all: [summary.md]({link}/summary.md)):"
        parts.append(summary.markdown_table(summary.LOSING_HEADINGS, shown, left=4))
    headings = [heading for heading in summary.HEADINGS if heading not in ("algorithm", "layout")]
    cells = [[*line[:4], *line[6:]] for line in summary.lines(rows) if line[1] == "eager"]
    parts += ["Geometric mean, and the worst row, NCHW:", summary.markdown_table(headings, cells, left=4)]
    return parts + [f"![{name.removesuffix('.png').replace('_', ' ')}]({link}/plots/{name})" for name in charts]


def _about_older(older: Sequence[Row]) -> str:
    if not older:
        return ""
    losing = summary.losing_of(older)
    return f" Not here: {len(older)} rows of an older gemmconv; of those that are compared {losing} lose."


def _measured_ceilings(ceilings: Sequence[dict[str, Any]]) -> str:
    """A sentence about the rates that floors are made from, from the least to the most of some runs."""
    found = [one for one in ceilings if one.get("tflops")]
    if not found:
        return ""
    copy = _span([one["copy_tbps"] for one in found], 2)
    names = found[0]["tflops"]
    rates = ", ".join(f"{name} {_span([one['tflops'][name] for one in found], 0)}" for name in names)
    return f" Measured ceilings: copy {copy} TB/s; matrix product {rates} TFLOP/s."


def _span(values: Sequence[float], digits: int) -> str:
    least, most = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def full(rows: Sequence[Row], runs: Runs, waited: Waited = ((), ())) -> str:
    """summary.md: what a user waits for, then every losing row, everything wrong or refused, every line of every
    algorithm and layout.
    """
    parts = ["# What a user waits for", *_waiting_parts(waited)]
    if not rows:
        return "\n\n".join(parts) + "\n"
    troubles = summary.troubles(rows)
    rows, older = current_and_older(rows, runs)
    parts += ["# Device time", made_with(rows, runs) + _about_older(older)]
    for name, kind in {"NCHW": summary.DEFAULT, **summary.ASKED_FOR}.items():
        count = summary.losing_of(rows, kind)
        parts.append(f"## Rows that lose, {name}\n\n`auto` against torch's best setting of any layout: {count}.")
        if slower := summary.losing(rows, kind):
            cells = [summary.losing_cells(row) for row in slower]
            parts.append(summary.markdown_table(summary.LOSING_HEADINGS, cells, left=4))
    if troubles:
        parts += ["## Rows without a time", "\n".join(f"- {line}" for line in troubles)]
    names = sorted({row.algorithm for row in rows if not row.is_torch}, key=lambda name: (name != "auto", name))
    lines = summary.lines(rows, names, ("nchw", "channels_last"))
    parts.append("## Speed-ups and ratios to the floor\n\nGeometric mean, and the worst row.")
    parts.append(summary.markdown_table(summary.HEADINGS, lines, left=6))
    return "\n\n".join(parts) + "\n"


def _about_alone(rows: Sequence[Row]) -> str:
    """A sentence about the rows that nothing of torch's can be compared with."""
    found = summary.alone(rows)
    what = ", ".join(summary.title(row) for row in found)
    return f" torch has no right result in time or memory for {len(found)} more: {what}." if found else ""


def write_between(path: Path, text: str) -> None:
    """Replace what stands between the two markers of a file.

    Raises:
        ValueError: the file has no markers.
    """
    content = path.read_text()
    if content.count(START) != 1 or content.count(END) != 1 or content.index(START) > content.index(END):
        raise ValueError(f"{path} must hold the lines {START!r} and {END!r}, once each; put them where results belong")
    head, tail = content.split(START)[0], content.split(END)[1]
    path.write_text(f"{head}{START}\n{text}\n{END}{tail}")


def main(argv: Sequence[str] | None = None) -> int:
    """Write every summary.md, and the charts and the tables of the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", type=Path, default=_PAGE, help="default: docs/guide/results.md")
    page = parser.parse_args(argv).page
    newest = newest_folders()
    if not newest:
        parser.error(f"{_RESULTS} holds no result files of a GPU; run: python -m benchmarks.compare")
    for folder in sorted({path.parent for path in _RESULTS.glob("*/*.json")}):
        write_summary(folder)
    try:
        write_between(page, page_text(newest, page))
    except ValueError as error:
        parser.error(str(error))
    print(page)
    return 0


def page_text(newest: dict[str, Path], page: Path) -> str:
    """The results section of the page: first what a user waits for, then device time."""
    links = {folder: os.path.relpath(folder, page.resolve().parent) for folder in newest.values()}
    of_folder: dict[Path, list[str]] = {}
    for suite in BY_TURNS:
        if suite in newest:
            of_folder.setdefault(newest[suite], []).append(suite)
    parts = ["## What you wait for"] + [waiting.NOT_MEASURED] * (not of_folder)
    for folder, suites in of_folder.items():
        parts += _waiting_parts(load_turns(folder, suites), links[folder])
    shown = newest.get("", next(iter(newest.values())))
    if "" in newest:
        charts = draw_charts(shown)
        names = [name for suite in ("public", "models") if (name := f"speedup_{suite}_forward.png") in charts]
        parts += device_parts(*load_all(shown), links[shown], names)
    parts.append(
        f"All rows, tidy, with errors, percentiles and memory: [{links[shown].replace('../', '')}]({links[shown]}). "
        "How they are measured: [benchmarks](benchmarks.md)."
    )
    return "\n\n".join(parts)


def write_summary(folder: Path) -> None:
    """Write summary.md into a result folder."""
    (folder / "summary.md").write_text(full(*load_all(folder), load_turns(folder)))
    print(folder / "summary.md")


def draw_charts(folder: Path) -> set[str]:
    """Draw the charts of a folder's results where matplotlib is installed; their names."""
    if find_spec("matplotlib") is None:
        print("no charts: matplotlib is not installed")
        return set()
    from benchmarks.plot import draw

    paths = draw(folder)
    print(*paths, sep="\n")
    return {path.name for path in paths}


if __name__ == "__main__":
    sys.exit(main())
