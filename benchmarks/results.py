"""The rows, their ratios, and the files that hold them: JSON to go on from, CSV to read."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from benchmarks.contenders import DEFAULT_TORCH
from benchmarks.timing import Times

RESULTS = Path(__file__).parent / "results"
FORMAT = 1

BY_TURNS = ("networks", "host")  # suites whose files hold rows of :mod:`benchmarks.turns`

MODES = ("eager", "graph")  # every measurement has a row in the first
# Below this a microsecond of jitter is a large share.
SMALL_MS = 0.05
# Where looks differ by more than such a share there are so many times as many. Of a row with two speeds, 15% apart, the
# mean of 18 looks is within 1.8% (one standard error).
_MORE_LOOKS = ((0.05, 6), (0.02, 2))

# Rows of equal identity were made by the same thing on the same machine: a run goes on from them.
_TORCH = ("gpu", "driver", "cuda", "cudnn", "torch")  # what torch's own rows depend on
_IDENTITY = (*_TORCH, "gemmconv", "source", "commit")

Key = tuple[str, ...]


def in_mode(key: Key, mode: str) -> Key:
    """The key of the same in another mode.

    >>> in_mode(("seeds", "seed0", "n1 c1x1 k1 h1 w1", "fp32", "nchw", "forward", "eager", "auto"), "graph")[5:]
    ('forward', 'graph', 'auto')
    """
    return (*key[:6], mode, *key[7:])


@dataclass(frozen=True)
class Row:
    """One measurement: workload x precision x layout x direction x mode x algorithm.

    Attributes:
        suite, workload, layer: what; ``layer`` is the geometry in one line.
        precision: fp32 (ieee), tf32, fp16 or bf16.
        layout: nchw or channels_last.
        direction: forward, or backward (gradients of input, weight and bias).
        mode: eager (device time, cold L2) or graph (the same of a CUDA graph replay).
        algorithm: gemmconv's algorithms, ``auto``, or a setting of torch.
        status: ok, wrong (no time), refused or failed (``reason`` says why).
        took: the algorithms that ``auto`` chose for the passes, in their order, as ``fused+native``; ``turned`` where
            gradients of tensors in NCHW are computed in channels_last.
        kernels: of gemmconv's algorithms: the kernel and tile of each pass, as ``explain`` names them.
        error_output, error_input, error_weight, error_bias: relative to float64, of the output and of gradients.
        error, bar: the error that came closest to its bar, and that bar.
        median_ms, p20_ms, p80_ms: of the time, each the mean of all looks.
        repeats: runs that were timed.
        looks: how often the time was taken, some time apart, with tensors at other places; of rows of
            ``cudnn.benchmark`` below 5 ms each after a search of its own.
        fastest_ms, slowest_ms: the medians of the fastest and of the slowest look.
        speedup_default: time of torch's default settings in NCHW, divided by this time.
        speedup_best: time of torch's best setting, of any layout, divided by this time.
        best_torch: that setting.
        floor_ms, floor_ratio: the floor, and this time divided by it.
        flops, least_bytes: useful operations, and bytes that any algorithm moves.
        workspace_bytes: what the algorithm promises to stay within; empty for torch.
        peak_bytes: device memory that the call took beyond its results.
        first_ms: wall-clock time of the first call in the process that measured; of rows of ``cudnn.benchmark`` below
            5 ms that of the shortest search.
        note: what was made smaller.
        run: index of the run, whose environment the file holds.
    """

    suite: str
    workload: str
    layer: str
    precision: str
    layout: str
    direction: str
    mode: str
    algorithm: str
    status: str = "ok"
    took: str = ""
    kernels: str = ""
    error_output: float | None = None
    error_input: float | None = None
    error_weight: float | None = None
    error_bias: float | None = None
    error: float | None = None
    bar: float | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    repeats: int | None = None
    looks: int = 1
    fastest_ms: float | None = None
    slowest_ms: float | None = None
    speedup_default: float | None = None
    speedup_best: float | None = None
    best_torch: str = ""
    floor_ms: float | None = None
    floor_ratio: float | None = None
    flops: int | None = None
    least_bytes: int | None = None
    workspace_bytes: int | None = None
    peak_bytes: int | None = None
    first_ms: float | None = None
    note: str = ""
    reason: str = ""
    run: int = 0

    @property
    def key(self) -> Key:
        """The fields that identify a measurement; a row of another file with this key measures the same."""
        return (
            *(self.suite, self.workload, self.layer, self.precision),
            *(self.layout, self.direction, self.mode, self.algorithm),
        )

    @property
    def cell(self) -> Key:
        """The fields that rows share if their times may be compared with each other."""
        return (self.suite, self.workload, self.layer, self.precision, self.direction, self.mode)

    def untimed(self) -> Row:
        """The row without times."""
        return replace(self, median_ms=None, p20_ms=None, p80_ms=None, repeats=None, fastest_ms=None, slowest_ms=None)

    def timed(self, times: Times) -> Row:
        """The row with the times of its first look."""
        return replace(
            self,
            median_ms=times.median,
            p20_ms=times.p20,
            p80_ms=times.p80,
            repeats=times.count,
            looks=1,
            fastest_ms=times.median,
            slowest_ms=times.median,
        )

    def looked_at(self, times: Times) -> Row:
        """The row with the times of one look more."""

        assert self.fastest_ms is not None
        assert self.slowest_ms is not None

        def mean(before: float | None, now: float) -> float:
            assert before is not None
            return (before * self.looks + now) / (self.looks + 1)

        return replace(
            self,
            median_ms=mean(self.median_ms, times.median),
            p20_ms=mean(self.p20_ms, times.p20),
            p80_ms=mean(self.p80_ms, times.p80),
            repeats=(self.repeats or 0) + times.count,
            looks=self.looks + 1,
            fastest_ms=min(self.fastest_ms, times.median),
            slowest_ms=max(self.slowest_ms, times.median),
        )

    def lacks_looks(self, looks: Callable[[Row], int]) -> bool:
        """Whether it has a time, and was looked at less often than ``looks`` has it."""
        return self.median_ms is not None and self.looks < looks(self)

    @property
    def times_as_many(self) -> int:
        """Times as many looks as else, by the share by which the slowest look took longer than the fastest.

        The share is one of SMALL_MS at least: jitter of short rows does not count.

        >>> row = Row(*("",) * 8, fastest_ms=0.010)
        >>> [replace(row, slowest_ms=ms).times_as_many for ms in (0.010, 0.012, 0.0131)]
        [1, 2, 6]
        """
        if self.fastest_ms is None or self.slowest_ms is None:
            return 1
        apart = (self.slowest_ms - self.fastest_ms) / max(self.fastest_ms, SMALL_MS)
        return next((times for share, times in _MORE_LOOKS if apart > share), 1)

    @property
    def is_searched(self) -> bool:
        """Whether a search of ``cudnn.benchmark`` found what was timed."""
        return self.algorithm.endswith("_benchmark")

    @property
    def is_torch(self) -> bool:
        return self.algorithm.startswith("torch_")


class AnyRow(Protocol):
    """A dataclass whose rows a file can hold; ``run`` is its last field."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> Key: ...

    @property
    def run(self) -> int: ...


R = TypeVar("R", bound=AnyRow)
F = TypeVar("F", bound="File[Any]")


@dataclass
class File(Generic[R]):
    """The rows of one suite on one machine, by key.

    Attributes:
        kind: the dataclass of a row.
        runs: for each run its environment and ceilings.
        rows: by key, in the order in which they were first measured.
    """

    kind: ClassVar[type[Any]]
    runs: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[Key, R] = field(default_factory=dict)

    def begin(self, environment: Mapping[str, str], ceilings: Mapping[str, object]) -> int:
        """Note a run; returns its index."""
        self.runs.append({**environment, "ceilings": dict(ceilings)})
        return len(self.runs) - 1

    def add(self, row: R) -> None:
        """Keep a row, in place of an earlier one of the same key."""
        self.rows[row.key] = row

    def merge(self, other: File[R]) -> None:
        """Add the rows of another file, with their runs."""
        begin = len(self.runs)
        self.runs += other.runs
        for row in other.rows.values():
            self.add(replace(row, run=row.run + begin))

    def done(self, key: Key, environment: Mapping[str, str], keep_torch: bool = False) -> R | None:
        """The row of a key, if this very environment made it.

        Args:
            key: the row's key.
            environment: of the present run.
            keep_torch: whether a row of torch's counts also where only gemmconv has changed since.
        """
        row = self.rows.get(key)
        names = _TORCH if keep_torch and getattr(row, "is_torch", False) else _IDENTITY
        is_here = row is not None and all(self.runs[row.run].get(name) == environment.get(name) for name in names)
        return row if is_here else None

    def finished(self) -> list[R]:
        """The rows, as they are written."""
        return list(self.rows.values())

    @classmethod
    def load(cls: type[F], path: Path) -> F:
        """Read a JSON file, but for runs whose rows others have replaced, and for columns that there are no more.

        Raises:
            ValueError: it is no result file of this format.
        """
        try:
            content = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}, not {FORMAT}")
            names, known = content["columns"], {column.name for column in fields(cls.kind)}
            lines = [dict(zip(names, values, strict=True)) for values in content["rows"]]
            rows = [cls.kind(**{name: line[name] for name in names if name in known}) for line in lines]
            made = sorted({row.run for row in rows})
            runs = [content["runs"][run] for run in made]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a result file of this version: {error}") from None
        return cls(runs, {row.key: replace(row, run=made.index(row.run)) for row in rows})

    @classmethod
    def opened(cls: type[F], path: Path | None, environment: Mapping[str, str]) -> F:
        """The file at a path to go on from, or an empty one where there is none.

        Raises:
            ValueError: it has rows of another machine than the present one, or :meth:`load` raises it.
        """
        file = cls.load(path) if path is not None and path.exists() else cls()
        if machines := {run["gpu"] for run in file.runs} - {environment["gpu"]}:
            raise ValueError(f"argument --out: {path} has rows of {', '.join(machines)}; give another folder")
        return file

    def save(self, path: Path) -> None:
        """Write the JSON file, and the CSV file beside it, each by an atomic rename."""
        columns = [column.name for column in fields(self.kind)]
        rows = [[_short(value) for value in asdict(row).values()] for row in self.finished()]
        head = {"format": FORMAT, "runs": self.runs, "columns": columns}
        body = ",\n".join(json.dumps(values, separators=(",", ":"), allow_nan=False) for values in rows)
        replace_file(path, json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{body}\n]}}\n')
        made = ("gpu", "driver", "cuda", "cudnn", "torch", "python", "gemmconv", "source", "commit", "date")
        table = io.StringIO(newline="")
        writer = csv.writer(table)
        writer.writerow([*columns[:-1], *made])
        writer.writerows([*values[:-1], *(self.runs[values[-1]][name] for name in made)] for values in rows)
        replace_file(path.with_suffix(".csv"), table.getvalue())


class Results(File[Row]):
    """Rows of one algorithm each, with their ratios."""

    kind = Row

    def finished(self) -> list[Row]:
        """The rows, with the ratios to torch's."""
        return with_ratios(self.rows.values(), self.runs)


def current(rows: Sequence[R], runs: Sequence[dict[str, Any]], kind: Callable[[R], Hashable]) -> list[R]:
    """The rows that were measured with the newest sources of gemmconv among all rows of their kind."""
    newest: dict[Hashable, dict[str, Any]] = {}
    for row in rows:
        newest[kind(row)] = max(newest.get(kind(row), runs[row.run]), runs[row.run], key=lambda run: run["date"])
    return [row for row in rows if runs[row.run]["source"] == newest[kind(row)]["source"]]


def load_all(folder: Path) -> tuple[list[Row], list[dict[str, Any]]]:
    """All rows of the result files in a folder, and their runs; a row's ``run`` counts over all files.

    The suites ``BY_TURNS`` are not among them.
    """
    return joined(Results, sorted(path for path in folder.glob("*.json") if path.stem not in BY_TURNS))


def joined(kind: type[File[R]], paths: Iterable[Path]) -> tuple[list[R], list[dict[str, Any]]]:
    """The rows of some files, and their runs; a row's ``run`` counts over all files."""
    whole = kind()
    for path in paths:
        whole.merge(kind.load(path))
    return whole.finished(), whole.runs


def with_ratios(rows: Iterable[Row], runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows with ratios to torch's default and best times on the same machine, and to the floor."""
    rows = list(rows)
    machines = [tuple(run.get(name) for name in _TORCH) for run in runs]
    cells: dict[tuple[Key, tuple[Any, ...]], list[Row]] = defaultdict(list)
    for row in rows:
        if row.is_torch and row.median_ms is not None:
            cells[row.cell, machines[row.run]].append(row)

    def finish(row: Row) -> Row:
        torch_rows = cells[row.cell, machines[row.run]]
        default = next((other for other in torch_rows if other.algorithm == DEFAULT_TORCH), None)
        best = min(torch_rows, key=lambda other: other.median_ms or math.inf, default=None)
        return replace(
            row,
            speedup_default=_ratio(default.median_ms if default else None, row.median_ms),
            speedup_best=_ratio(best.median_ms if best else None, row.median_ms),
            best_torch=best.algorithm if best else "",
            floor_ratio=_ratio(row.median_ms, row.floor_ms),
        )

    return [finish(row) for row in rows]


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def table_text(head: Mapping[str, str], rows: Sequence[Mapping[str, Any]], digits: int = 6) -> str:
    """Lines of ``# name: value``, then the rows as CSV, their floats with so many digits."""
    text = io.StringIO()
    text.writelines(f"# {name}: {value}\n" for name, value in head.items())
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows([f"{one:.{digits}g}" if isinstance(one, float) else one for one in row.values()] for row in rows)
    return text.getvalue()


def read_table(text: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The head and the rows of what :func:`table_text` made."""
    lines = text.splitlines()
    head = dict(line.removeprefix("# ").split(": ", 1) for line in lines if line.startswith("# "))
    return head, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _short(value: Any) -> Any:
    """Six digits are more than a measurement has."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file by an atomic rename, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(partial, path)
