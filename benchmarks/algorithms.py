"""Every algorithm and ``auto`` beside torch on a few layers: errors, times and workspace in tables and a chart.

    python -m benchmarks.algorithms     # five layers that are hard for a library, made smaller on a CPU
    python -m benchmarks.algorithms --in-channels 64 --out-channels 32 --kernel 4 --stride 2 --height 64 --width 64

Results are compared with float64 before anything is timed, and a wrong one has no times. What is timed are calls of
modules, by turns; medians count.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.contenders import PASSES, Contender
from benchmarks.measure import GRADIENTS, error_bar, verdict
from benchmarks.reference import Reference, Tensors, random_tensors, reference
from benchmarks.summary import milliseconds, times_text
from benchmarks.timing import medians_ms
from benchmarks.workloads import DEMO, Workload, pair_text, parse_layer, short_text, shrunk
from gemmconv import __version__, algorithms, flags, info
from gemmconv.algorithms import Algorithm
from gemmconv.folder import make_writable
from gemmconv.kernels.base import Config, Precision
from gemmconv.pairs import choose_pair
from gemmconv.selection import choose, current_config, torch_precision

if TYPE_CHECKING:
    from rich.console import Group

TORCH, AUTO = "torch", "auto"
FASTER, SLOWER = 1.02, 0.97  # times torch's speed: ratios between them are noise

# Below both limits, two cores of a CPU check and time all algorithms on a layer of the demo in 3 to 8 seconds.
_CPU_FLOPS, _CPU_BYTES = 600_000_000, 128 << 20
_COLUMNS = (  # heading and least width; all fit 80 columns
    *(("algorithm", 13), ("error", 7), ("gradient\nerror", 8), ("forward\nms", 7), ("vs\ntorch", 6)),
    *(("fwd+bwd\nms", 7), ("vs\ntorch", 6), ("workspace\nMiB", 9)),
)


@dataclass(frozen=True)
class Row:
    """The measurements of one algorithm on one layer.

    Attributes:
        algorithm: its name, ``AUTO``, or ``TORCH``: ``torch.nn.ConvTranspose2d`` with ``cudnn.benchmark``.
        precision: how float32 products are rounded.
        chosen: whether ``auto`` takes this algorithm for the forward pass.
        taken: of ``AUTO``, the algorithms of the forward pass, the input's and the weight's gradient.
        skipped: why it was not run; all that follows is then empty.
        error, gradient_error: of the output, and the largest of the gradients, relative to float64.
        bar, gradient_bar: the largest errors that count as right.
        wrong: which error is over its bar; such a row has no times.
        forward_ms, both_ms: of a forward pass, and of forward and backward passes together.
        forward_ratio, both_ratio: torch's time divided by this one; None if the precisions differ.
        workspace_bytes: temporary memory, the most of any pass; None where torch manages it.
    """

    algorithm: str
    precision: Precision
    chosen: bool = False
    taken: tuple[str, ...] = ()
    skipped: str | None = None
    error: float | None = None
    gradient_error: float | None = None
    bar: float = 0.0
    gradient_bar: float = 0.0
    wrong: str = ""
    forward_ms: float | None = None
    both_ms: float | None = None
    forward_ratio: float | None = None
    both_ratio: float | None = None
    workspace_bytes: int | None = None


Results = Mapping[Workload, Sequence[Row]]
Calls = tuple[Callable[[], Tensor], Callable[[], tuple[Tensor, ...]]]  # a forward pass, and one with all gradients


def measure(
    workload: Workload, device: torch.device, dtype: torch.dtype, precision: Precision | None = None
) -> list[Row]:
    """Measure torch, ``auto`` and every algorithm on a layer: a row for each, in this order.

    Torch's layer runs first, with cuDNN's benchmark mode on. torch keeps what that finds, so ``native`` is timed
    with the same cuDNN kernels. On Hopper ``auto`` has torch's operator take deterministic ones.
    ``precision`` is the rounding of float32 products in gemmconv, None for torch's setting.
    """
    auto = current_config(workload.problem, dtype, device, precision, bias=workload.bias)
    config, current = replace(auto, deterministic=False), auto.torch_precision
    gradients = choose_pair(auto, auto, AUTO, "benchmarks")
    taken = choose(auto, AUTO, "benchmarks"), gradients.input_grad, gradients.weight_grad
    names = tuple(one.name for one in taken)
    tensors = random_tensors(workload, device).to(dtype)
    exact = reference(workload.problem, tensors)
    tensors.x.requires_grad_()
    before = torch.backends.cudnn.benchmark
    try:
        calls = {TORCH: _calls(Contender(TORCH, benchmark=True), workload, tensors, precision)}
        bar = error_bar(dtype, current)
        rows = [_checked(Row(TORCH, current, bar=bar, gradient_bar=10 * bar), calls[TORCH], exact)]
        # A weight gradient sums over all pixels: where torch loses more than the bar, twice that is right.
        bar = gradient_bar = error_bar(dtype, config.precision)
        if rows[0].gradient_error is not None and not rows[0].wrong:
            gradient_bar = max(bar, 2 * rows[0].gradient_error)
        for name, passes in ((AUTO, taken), *((one.name, (one, one, one)) for one in algorithms.ALGORITHMS)):
            row = Row(
                name, config.precision, name == names[0], names * (name == AUTO), bar=bar, gradient_bar=gradient_bar
            )
            if (reason := passes[0].why_not(config)) is not None:
                rows.append(replace(row, skipped=reason))
                continue
            calls[name] = _calls(Contender(name, kind="gemmconv"), workload, tensors, precision)
            rows.append(_checked(replace(row, workspace_bytes=workspace_bytes(passes, config)), calls[name], exact))
        right = [row.algorithm for row in rows if row.skipped is None and not row.wrong]
        forward, both = (medians_ms([calls[name][which] for name in right], device) for which in (0, 1))
    finally:
        torch.backends.cudnn.benchmark = before
    times = {name: pair for name, *pair in zip(right, forward, both, strict=True)}
    return [_timed(row, times, current) for row in rows]


def _calls(contender: Contender, workload: Workload, tensors: Tensors, precision: Precision | None) -> Calls:
    """The calls of a contender's module that are checked and timed."""
    module = contender.module(workload.problem, tensors, precision)
    leaves = tensors.x, *module.parameters()

    def forward() -> Tensor:
        torch.backends.cudnn.benchmark = contender.benchmark
        output: Tensor = module(tensors.x)
        return output

    return torch.no_grad()(forward), lambda: torch.autograd.grad(forward(), leaves, tensors.grad_output)


def _checked(row: Row, calls: Calls, exact: Reference) -> Row:
    """The row with its errors."""
    forward, both = calls
    try:
        results = {"output": forward()} | dict(zip(GRADIENTS, both(), strict=False))
    except (NotImplementedError, torch.OutOfMemoryError) as error:
        return replace(row, skipped=str(error).splitlines()[0])
    errors = exact.errors(results)
    bars = {name: row.bar if name == "output" else row.gradient_bar for name in errors}
    _, wrong = verdict(errors, bars)
    of_output = errors.pop("output")
    largest, _ = verdict(errors, bars)
    return replace(row, error=of_output, gradient_error=errors[largest], wrong=wrong)


def _timed(row: Row, times: Mapping[str, Sequence[float]], torchs: Precision) -> Row:
    """The row with its times, if it has any, and with ratios where torch's are of the same precision."""
    if row.algorithm not in times:
        return row
    row = replace(row, forward_ms=times[row.algorithm][0], both_ms=times[row.algorithm][1])
    if row.algorithm == TORCH or TORCH not in times or row.precision != torchs:
        return row
    forward, both = (theirs / ms for theirs, ms in zip(times[TORCH], times[row.algorithm], strict=True))
    return replace(row, forward_ratio=forward, both_ratio=both)


def workspace_bytes(passes: Sequence[Algorithm], config: Config) -> int | None:
    """Most bytes of temporary memory that an algorithm of three passes takes; None if torch manages all memory."""
    ours = [(one, direction) for one, direction in zip(passes, PASSES["both"], strict=True) if one.name != "native"]
    return max((algorithm.workspace_bytes(config, direction) for algorithm, direction in ours), default=None)


def describe(workload: Workload) -> str:
    """A layer in one line, such as ``N=8, C 64 -> 64, kernel 3x7, image 512x512, no bias``."""
    p = workload.problem
    parts = [f"N={p.batch}", f"C {p.in_channels} -> {p.out_channels}", f"kernel {pair_text(p.kernel_size)}"]
    for name in ("stride", "padding", "output_padding", "dilation"):
        if (value := getattr(p, name)) != getattr(type(p), name):
            parts.append(f"{name.replace('_', ' ')} {short_text(value)}")
    parts += [f"groups {p.groups}"] * (p.groups > 1)
    return ", ".join([*parts, f"image {pair_text(p.input_size)}", "bias" if workload.bias else "no bias"])


def table(workload: Workload, rows: Sequence[Row]) -> Group:
    """The rows of one layer as a table, headed by the layer. A wrong result is red and has no times."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    title = Text.assemble("\n", (f"{workload.name}: ", "bold"), describe(workload))
    if workload.note:
        title.append(f"\nmade smaller for the CPU: {workload.note}", "yellow")
    result = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, (heading, width) in enumerate(_COLUMNS):
        result.add_column(heading, justify="right" if index else "left", min_width=width, overflow="fold")
    for row in rows:
        cells = (Text(text, style) for text, style in _cells(row))
        result.add_row(*cells, style="dim" if row.skipped else None)
    return Group(title, result)


def _cells(row: Row) -> list[tuple[str, str]]:
    """The texts of a row, each with its style: green where ``auto`` is faster than torch, red where it is slower."""

    def times(value: float | None) -> tuple[str, str]:
        is_noise = row.algorithm != AUTO or value is None or SLOWER <= value < FASTER
        return times_text(value), "" if is_noise else "bold green" if value and value >= FASTER else "red"

    def errors(error: float | None, bar: float) -> tuple[str, str]:
        return ("-", "") if error is None else (f"{error:.1e}", "" if error <= bar else "bold red")

    return [
        (row.algorithm + " *" * row.chosen, "bold" if row.algorithm == AUTO else ""),
        errors(row.error, row.bar),
        errors(row.gradient_error, row.gradient_bar),
        (milliseconds(row.forward_ms), ""),
        times(row.forward_ratio),
        (milliseconds(row.both_ms), ""),
        times(row.both_ratio),
        ("-" if row.workspace_bytes is None else f"{row.workspace_bytes / 2**20:.1f}", ""),
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """Notes below the table of a layer: choices of ``auto``, algorithms that were skipped or wrong, missing ratios."""
    found = []
    for forward, of_input, of_weight in (row.taken for row in rows if row.taken):
        gradients = of_input if of_input == of_weight else f"{of_input} (input) and {of_weight} (weight)"
        found.append(f"auto takes {forward} forward, {gradients} for gradients")
    found += [f"{row.algorithm} was not run: {row.skipped}" for row in rows if row.skipped]
    found += [f"{row.algorithm} is wrong: {row.wrong}; no times" for row in rows if row.wrong]
    of_torch = next((row.precision for row in rows if row.algorithm == TORCH), None)
    others = {row.precision for row in rows if row.algorithm != TORCH}
    if of_torch is not None and others - {of_torch}:
        own = f"torch computes in {of_torch} under its own setting"
        found.append(f"no ratio: {own}, the others in {', '.join(sorted(others))}")
    return found


def summary(results: Results) -> str:
    """Say in one sentence what ``auto`` gains over all layers; slower ones count too."""
    autos = [row for rows in results.values() for row in rows if row.algorithm == AUTO]
    parts: list[str] = []
    for name, kind in (("torch's speed forward", "forward_ratio"), ("with gradients", "both_ratio")):
        if known := [ratio for row in autos if (ratio := getattr(row, kind)) is not None]:
            of = f"{len(known)} layers" if len(known) == len(results) else f"{len(known)} of {len(results)} layers"
            mean = f"geometric mean of {of}; " if not parts else ""
            detail = f" ({mean}least {times_text(min(known))})" if len(results) > 1 else ""
            parts.append(f"{times_text(geometric_mean(known))} {name}{detail}")
    return f"auto: {', '.join(parts) or 'no ratio to torch, as noted above'}"


def legend(device: torch.device) -> str:
    """Explain the names and columns of the table."""
    of_torch, of_native = "", ""
    if device.type == "cuda":
        of_torch, of_native = ", with cuDNN's benchmark mode on", ", with torch's settings for cuDNN"
    return (
        f"torch      torch.nn.ConvTranspose2d in the same run{of_torch}\n"
        "auto       gemmconv.ConvTranspose2d, which picks an algorithm for each pass\n"
        f"native     torch's operator, called by gemmconv{of_native}\n"
        "*          the algorithm that auto takes for the forward pass\n"
        "error      against float64: |result - reference| / |reference|\n"
        "gradient   the largest such error of the input, weight and bias gradients\n"
        "ms         median time; fwd+bwd is a forward pass with all gradients\n"
        "vs torch   torch's time / this time: above 1x is faster than torch\n"
        "workspace  temporary memory, the most of any pass; - where torch manages it"
    )


def as_json(results: Results, device: torch.device, dtype: str) -> dict[str, Any]:
    """Versions, device, dtype, and each layer with its rows. A value that is missing or not finite is None."""
    layers = [
        asdict(workload) | {"layer": workload.layer, "rows": [asdict(row) | {"wrong": bool(row.wrong)} for row in rows]}
        for workload, rows in results.items()
    ]
    finite = json.loads(json.dumps(layers), parse_constant=lambda name: None)
    return {"versions": info.versions(), "device": info.device_text(device), "dtype": dtype, "layers": finite}


def _planned(arguments: argparse.Namespace) -> tuple[list[Workload], torch.device]:
    """The layers to compare and where, once all arguments have been checked."""
    device = flags.pick_device(arguments.device)
    flags.check_precision(arguments.precision, flags.DTYPES[arguments.dtype], device)
    workloads = [Workload(name, "demo", *parse_layer(text)) for name, text in DEMO.items()]
    if flags.has_layer(arguments):
        problem, bias = flags.layer_of(arguments)
        workloads = [Workload(f"{pair_text(problem.kernel_size)} kernel", "layer", problem, bias)]
    _check_folder("--out", arguments.out)
    if arguments.json is not None:
        _check_folder("--json", arguments.json.parent)
        if arguments.json.is_dir():
            raise ValueError(f"argument --json: must be a file, got the folder {arguments.json}")
    if missing := [name for name in ("rich", "matplotlib") if find_spec(name) is None]:
        raise ValueError(f"the comparison needs {', '.join(missing)}; run: pip install 'gemmconv[demo]'")
    if device.type == "cpu" and not arguments.full_size:
        workloads = [shrunk(workload, _CPU_FLOPS, _CPU_BYTES) for workload in workloads]
    return workloads, device


def _check_folder(flag: str, folder: Path) -> None:
    """Make a folder, and find out now, not after all was measured, whether files can be written into it."""
    try:
        make_writable(folder)
    except OSError as why:
        raise ValueError(f"argument {flag}: cannot make the folder {folder} or write into it: {why.strerror}") from why


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 1 if a result was wrong, else 0."""
    description = "Compare all algorithms with torch on one layer, or without a layer on five that are hard."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=description)
    flags.add_device_and_types(parser)
    parser.add_argument("--full-size", action="store_true", help="do not shrink layers on a CPU; may take long")
    text = "folder of the chart (default: gemmconv-demo)"
    parser.add_argument("--out", type=Path, default="gemmconv-demo", metavar="DIR", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to this file too")
    flags.add_layer(parser)
    arguments = parser.parse_args(argv)
    try:
        workloads, device = _planned(arguments)
    except ValueError as error:
        parser.error(str(error))
    return _run(arguments, workloads, device)


def _run(arguments: argparse.Namespace, workloads: Sequence[Workload], device: torch.device) -> int:
    """Measure, print, draw, and write JSON. Returns the exit status."""
    from rich.console import Console

    from benchmarks import plot

    dtype, precision = flags.DTYPES[arguments.dtype], arguments.precision
    rounding = f" ({precision or torch_precision(dtype, device)})" if dtype == torch.float32 else ""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    heading = f"gemmconv {__version__} on {info.device_text(device)}: {arguments.dtype}{rounding}, {versions}"
    console = Console(highlight=False, markup=False)
    console.print(heading, style="bold", soft_wrap=True)
    results: dict[Workload, list[Row]] = {}
    for index, workload in enumerate(workloads):
        with console.status(f"{workload.name}, {index + 1} of {len(workloads)}"):
            rows = results[workload] = measure(workload, device, dtype, precision)
        console.print(table(workload, rows))
        for line in notes(rows):
            console.print(f"  {line}", style="red" if "is wrong" in line else "dim")
    console.print(f"\n{legend(device)}", style="dim")
    console.print(f"\n{summary(results)}", style="bold", soft_wrap=True)
    path = arguments.out / "times.png"
    plot.bars(results, summary(results), heading).savefig(path)
    console.print(f"chart: {path}", soft_wrap=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(results, device, arguments.dtype), indent=1) + "\n")
        console.print(f"rows: {arguments.json}", soft_wrap=True)
    return int(any(row.wrong for rows in results.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
