"""Everything that is made from the result files: summary.md, the charts, and the tables of docs/guide/results.md.

python -m benchmarks.report [FOLDER] [--page docs/guide/results.md]

Without FOLDER it is of the results that the page shows, or of the newest where it shows none.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import summary, waiting
from benchmarks.environment import is_sustained, text_of
from benchmarks.results import BY_TURNS, RESULTS, Row, load_all, newest_runs
from benchmarks.turns import Turn, load_turns

_RESULTS = RESULTS
_PAGE = Path(__file__).parent.parent / "docs" / "guide" / "results.md"
START, END = "<!-- results: start -->", "<!-- results: end -->"
_MOST_LOSING = 10
_ONE_STATE = timedelta(days=1)  # between runs of suites that are shown together

Waited = tuple[Sequence[Turn], Sequence[dict[str, Any]]]  # rows by turns, and their runs


def newest_results() -> Path:
    """The folder in benchmarks/results whose files are the newest, GPUs before CPUs, those that rested before others.

    Raises:
        ValueError: there is none.
    """
    folders = [path for path in _RESULTS.glob("*") if any(path.glob("*.json"))]
    if not folders:
        raise ValueError(f"{_RESULTS} holds no result files; run: python -m benchmarks.compare")

    def age(folder: Path) -> tuple[bool, bool, float]:
        return *_kind(folder), max(path.stat().st_mtime for path in folder.glob("*.json"))

    return max(folders, key=age)


def _kind(folder: Path) -> tuple[bool, bool]:
    """Whether a folder's results are a GPU's, and whether it rested."""
    return not folder.name.startswith("cpu"), not is_sustained(folder.name)


def newer_elsewhere(folder: Path) -> dict[Path, list[str]]:
    """The suites by turns that another GPU has newer rows of, in benchmarks/results as this folder, by its folder."""
    found: dict[Path, list[str]] = {}
    for suite in BY_TURNS if folder.parent == _RESULTS.resolve() else ():
        dates = {
            path.parent: max(run["date"] for run in load_turns(path.parent, [suite])[1])
            for path in folder.parent.glob(f"*/{suite}.json")
            if all(_kind(path.parent))
        }
        newest = max(dates, key=lambda path: (dates[path], path == folder), default=folder)
        if newest != folder:
            found.setdefault(newest, []).append(suite)
    return found


def shown_results(page: Path) -> Path | None:
    """The result folder that the tables of a page are of, None where there is none.

    The page links to it by a text that is the link itself, but for the way out of the page's folder.
    """
    text = page.read_text() if page.is_file() else ""
    found = re.search(r"\[([^]\n]+)\]\(((?:\.\./)*\1)\)", text.partition(START)[2].partition(END)[0])
    folder = None if found is None else page.resolve().parent / found[2]
    return folder if folder is not None and any(folder.glob("*.json")) else None


def made_with(rows: Sequence[Row] | Sequence[Turn], runs: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each environment that made a row, with the suites it made rows of, and by turns with the modes."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    names = ((row.suite if isinstance(row, Row) else f"{row.suite} {row.mode}", row.run) for row in rows)
    for suite, index in dict.fromkeys(names):
        run = runs[index]
        found[f"{text_of(run)}, {run['date'][:10]}"][suite] = None
    return [f"{environment} ({', '.join(suites)})" for environment, suites in found.items()]


def current_and_older(rows: Sequence[Row], runs: Sequence[dict[str, Any]]) -> tuple[list[Row], list[Row]]:
    """The rows, and apart from them those that an older gemmconv was measured for.

    Of each suite gemmconv's rows from its newest sources count, and torch's, which do not grow old; none of it where
    those of another suite are more than a day newer.
    """
    own = [row for row in rows if not row.is_torch]
    newest = newest_runs(own, runs, lambda row: row.suite)
    last = max(map(_when, newest.values()), default=None)
    stale = {suite for suite, run in newest.items() if last is not None and last - _when(run) > _ONE_STATE}
    older = [row for row in own if row.suite in stale or runs[row.run]["source"] != newest[row.suite]["source"]]
    left_out = {row.key for row in older}
    return [row for row in rows if row.key not in left_out and row.suite not in stale], older


def _when(run: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(run["date"].replace("Z", "+00:00"))


def _about_older(older: Sequence[Row], runs: Sequence[dict[str, Any]]) -> str:
    """How many rows of which suites they are, and how many of them lose."""
    counts = Counter((row.suite, runs[row.run]["commit"][:7]) for row in older)
    suites = ", ".join(f"{count} of {suite} ({commit})" for (suite, commit), count in counts.items())
    return f"{suites}. Of those that are compared {summary.losing_of(older)} lose"


def section(
    rows: Sequence[Row],
    runs: Sequence[dict[str, Any]],
    link: str,
    charts: Sequence[str],
    waited: Waited = ((), ()),
    elsewhere: Sequence[tuple[str, Waited]] = (),
) -> str:
    """The results section in Markdown: first what a user waits for, then device time.

    Args:
        rows: finished rows.
        runs: their runs.
        link: path of the result folder, as the page links to it.
        charts: names of charts in its folder ``plots`` that are shown.
        waited: rows of the suites by turns, and their runs.
        elsewhere: the same of other folders, with their links.
    """
    current, older = current_and_older(rows, runs)
    parts = ["## What you wait for"]
    for other, newer in elsewhere:
        parts += _waiting_parts((), newer, other)
    if waited[0] or not elsewhere:
        parts += _waiting_parts(current, waited, link)
    if rows:
        parts += ["## Device time, layer by layer", *_device_parts(current, older, runs, link, charts)]
    parts.append(
        f"All rows, tidy, with errors, percentiles and memory: [{link.replace('../', '')}]({link}). "
        "How they are measured: [benchmarks](benchmarks.md)."
    )
    return "\n\n".join(parts)


def _waiting_parts(rows: Sequence[Row], waited: Waited, link: str = "") -> list[str]:
    """The part about networks and the host; where they were not measured, a sentence about that."""
    turns = waiting.current(*waited)
    made = ["; ".join(made_with(turns, waited[1])) + "."] if turns else [waiting.NOT_MEASURED]
    if left_out := [row for row in waited[0] if row not in turns]:
        losing = sum(row.loses for row in left_out)
        made[0] += f" Not here: {len(left_out)} rows of an older gemmconv, {losing} of them slower than torch."
    return made + waiting.parts(turns, rows, link)


def _device_parts(
    rows: Sequence[Row], older: Sequence[Row], runs: Sequence[dict[str, Any]], link: str, charts: Sequence[str]
) -> list[str]:
    """Device time beside torch's settings and the floor."""
    parts = ["; ".join(made_with(rows, runs)) + "."]
    parts[0] += _measured_ceilings([runs[index]["ceilings"] for index in {row.run for row in rows}])
    parts.append(
        "`torch default` is `torch.nn.functional.conv_transpose2d` in NCHW; `best torch` is the fastest of its "
        "settings (`cudnn.benchmark` on and off, NCHW and channels_last, deterministic, unfused) for that row. A ratio "
        'above 1x means that `algorithm="auto"` is faster. The floor is max(useful flops / matrix product rate, '
        "least bytes / copy bandwidth), both measured in the same run. Wrong results have no time."
    )
    if older:
        parts.append(
            f"Not in the tables here, since an older gemmconv was measured: {_about_older(older, runs)}; "
            f"[summary.md]({link}/summary.md) has them all."
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
    found = [line for line in summary.lines(rows) if line.group[1] == "eager" or line.group[:2] == ("latency", "graph")]
    headings = [heading for heading in summary.HEADINGS if heading not in ("algorithm", "layout")]
    cells = [[*line.cells()[:4], *line.cells()[6:]] for line in found]
    parts.append("Geometric mean, and the worst row, NCHW:")
    parts.append(summary.markdown_table(headings, cells, left=4))
    return parts + [f"![{name.removesuffix('.png').replace('_', ' ')}]({link}/plots/{name})" for name in charts]


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


def full(rows: Sequence[Row], runs: Sequence[dict[str, Any]], waited: Waited = ((), ())) -> str:
    """summary.md: what a user waits for, then every losing row, everything wrong or refused, every line of every
    algorithm and layout.

    What an older gemmconv was measured for comes last, in parts of its own.
    """
    current, older = current_and_older(rows, runs)
    parts = ["# What a user waits for", *_waiting_parts(current, waited)]
    if not rows:
        return "\n\n".join(parts) + "\n"
    parts += ["# Device time", "; ".join(made_with(current, runs)) + ".", *_losing_parts(current)]
    if bad := summary.troubles(rows):
        parts += ["## Rows without a time", "\n".join(f"- {line}" for line in bad)]
    parts.append("## Speed-ups and ratios to the floor\n\nGeometric mean, and the worst row.")
    parts.append(_lines_table(current))
    if older:
        parts += ["# Rows of an older gemmconv", f"{_about_older(older, runs)}.", *_losing_parts(older)]
        parts += ["## Speed-ups and ratios to the floor, of an older gemmconv", _lines_table(older)]
    return "\n\n".join(parts) + "\n"


def _losing_parts(rows: Sequence[Row]) -> list[str]:
    parts = []
    for name, kind in {"NCHW": summary.DEFAULT, **summary.ASKED_FOR}.items():
        count = summary.losing_of(rows, kind)
        parts.append(f"## Rows that lose, {name}\n\n`auto` against torch's best setting of any layout: {count}.")
        if slower := summary.losing(rows, kind):
            cells = [summary.losing_cells(row) for row in slower]
            parts.append(summary.markdown_table(summary.LOSING_HEADINGS, cells, left=4))
    return parts


def _about_alone(rows: Sequence[Row]) -> str:
    """A sentence about the rows that nothing of torch's can be compared with."""
    found = summary.alone(rows)
    what = ", ".join(summary.title(row) for row in found)
    return f" torch has no right result in time or memory for {len(found)} more: {what}." if found else ""


def _lines_table(rows: Sequence[Row]) -> str:
    names = sorted({row.algorithm for row in rows if not row.is_torch}, key=lambda name: (name != "auto", name))
    found = summary.lines(rows, names, ("nchw", "channels_last"))
    return summary.markdown_table(summary.HEADINGS, [line.cells() for line in found], left=6)


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
    """Write summary.md, the charts and the tables of the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="result folder (default: the one shown)")
    parser.add_argument("--page", type=Path, default=_PAGE, help="default: docs/guide/results.md")
    parser.add_argument("--no-page", action="store_true", help="leave the page alone")
    arguments = parser.parse_args(argv)
    try:
        folder = (arguments.folder or shown_results(arguments.page) or newest_results()).resolve()
        charts = write_beside(folder)
        if not arguments.no_page:
            rows, runs = load_all(folder)
            link = os.path.relpath(folder, arguments.page.resolve().parent)
            shown = [f"speedup_{suite}_forward.png" for suite in ("public", "models")]
            names = [name for name in shown if name in charts]
            newer, beside = newer_elsewhere(folder), Path(link).parent
            elsewhere = [(str(beside / path.name), load_turns(path, suites)) for path, suites in newer.items()]
            own = load_turns(folder, [suite for suite in BY_TURNS if suite not in itertools.chain(*newer.values())])
            write_between(arguments.page, section(rows, runs, link, names, own, elsewhere))
            print(arguments.page)
    except ValueError as error:
        parser.error(str(error))
    return 0


def write_beside(folder: Path) -> set[str]:
    """Write summary.md and the charts into a result folder; the charts' names.

    Raises:
        ValueError: the folder holds no results.
    """
    (rows, runs), waited = load_all(folder), load_turns(folder)
    if not rows and not waited[0]:
        raise ValueError(f"{folder} holds no result files")
    (folder / "summary.md").write_text(full(rows, runs, waited))
    print(folder / "summary.md")
    return _charts(folder) if rows else set()


def _charts(folder: Path) -> set[str]:
    """Draw the charts where matplotlib is installed; their names."""
    if find_spec("matplotlib") is None:
        print("no charts: matplotlib is not installed")
        return set()
    from benchmarks.plot import draw

    paths = draw(folder)
    for path in paths:
        print(path)
    return {path.name for path in paths}


if __name__ == "__main__":
    sys.exit(main())
