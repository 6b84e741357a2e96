"""``python -m gemmconv``: compare the algorithms with torch, measure or compile a layer, describe an installation."""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gemmconv import __version__, info
from gemmconv.compare import require_demo_extra
from gemmconv.compare.layers import DEMO_LAYERS, Layer, add_layer_arguments, layer_from_arguments, pick_device, shrink
from gemmconv.device import KNOWN, Capability, named, spec_of
from gemmconv.explain import compilations_of
from gemmconv.folder import make_writable
from gemmconv.kernels.base import Config, why_no_kernels
from gemmconv.selection import current_config, torch_precision

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}
_HERE = "cpu, cuda or cuda:1 (default: cuda where there is one)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, of this process if ``argv`` is None, and return its exit status.

    It is 1 if a result was wrong or a kernel did not compile.
    """
    arguments = _parser().parse_args(argv)
    try:
        if arguments.run is not _compare:
            return int(arguments.run(arguments))
        layers, device = _checked(arguments)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        arguments.parser.error(str(error))
    return _compare(arguments, layers, device)  # an error from here on is no mistake of the user's: it has a traceback


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gemmconv", description="Transposed convolutions as matrix products.")
    parser.add_argument("--version", action="version", version=f"gemmconv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{compare,demo,info,tune,warmup}")

    def add(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(parser=command, run=run)
        return command

    for name, text in (
        ("compare", "measure error, times and workspace of every algorithm on one layer, beside torch"),
        ("demo", "compare the algorithms with torch on five layers that are hard for a library"),
    ):
        command = add(name, _compare, text)
        _add_device_and_types(command, _HERE)
        command.add_argument("--full-size", action="store_true", help="do not shrink layers on a CPU; may take long")
        text = "folder of the chart (default: gemmconv-demo)"
        command.add_argument("--out", type=Path, default="gemmconv-demo", metavar="DIR", help=text)
        command.add_argument("--json", type=Path, metavar="FILE", help="write all rows to this file too")
        if name == "compare":
            add_layer_arguments(command)
    command = add("info", _info, "print versions, devices, what kernels lack, the cache and tuned choices")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command = add("tune", _tune, "measure what is fastest for one layer, into a file that gemmconv.load_tuned reads")
    _add_device_and_types(command, _HERE)
    command.add_argument("--path", type=Path, metavar="FILE", help="default: tuned.json in the folder of the cache")
    _add_formats(command, "time gradients too (default: --backward)")
    command = add("warmup", _warmup_command, "compile one layer's kernels into the cache, even for an absent GPU")
    text = 'cuda, cuda:1, or a name such as "NVIDIA H100 80GB HBM3" or A100 (default: cuda where there is one)'
    _add_device_and_types(command, text)
    _add_formats(command, "compile the kernels of a backward pass too (default: --backward)")
    return parser


def _add_formats(command: argparse.ArgumentParser, backward: str) -> None:
    """Add the layer, its memory format, and whether there is a backward pass, which ``backward`` explains."""
    last, text = torch.channels_last, "tensors are in channels_last"
    command.add_argument("--channels-last", action="store_const", dest="memory_format", const=last, help=text)
    command.set_defaults(memory_format=torch.contiguous_format)
    command.add_argument("--backward", action=argparse.BooleanOptionalAction, default=True, help=backward)
    add_layer_arguments(command, by_size=True)


def _add_device_and_types(command: argparse.ArgumentParser, device: str) -> None:
    command.add_argument("--device", help=device)
    command.add_argument("--dtype", choices=sorted(_DTYPES), default="float32", help="default: float32")
    command.add_argument(
        "--precision",
        choices=("ieee", "tf32"),
        help="rounding of float32 products in gemmconv (default: as torch's convolutions are set)",
    )


def _info(arguments: argparse.Namespace) -> int:
    state = info.collect()
    print(json.dumps(state, indent=1) if arguments.json else info.report(state))
    return 0


def _warmup_command(arguments: argparse.Namespace) -> int:
    """Compile for the GPU that ``--device`` names, which is here or one of the table of known ones."""
    text, dtype, layer = arguments.device or "cuda", _DTYPES[arguments.dtype], layer_from_arguments(arguments)
    if text.startswith("cuda") and torch.cuda.is_available():
        where = pick_device(text)
        spec, capability = spec_of(where), torch.cuda.get_device_capability(where)
    else:
        where = torch.device("cuda", 0)
        try:
            spec = named(text)
        except ValueError:
            rule = f"cuda or cuda:INDEX of a device that is here, or one of {', '.join(KNOWN)}"
            raise ValueError(f"argument --device: must be {rule}, got {text!r}") from None
        capability = spec.capability
    _check_precision(arguments.precision, dtype, where)
    how = arguments.precision, None, arguments.memory_format, layer.bias
    config = current_config(layer.problem, dtype, where, *how, spec=spec)
    if (reason := why_no_kernels(where, spec)) is not None:
        raise ValueError(f"argument --device: {reason}")
    try:
        return _warmup(config, capability, arguments.backward)
    except ModuleNotFoundError as error:
        way_out = "install gemmconv[cuda13] or gemmconv[cuda12]"
        raise ValueError(f"compiling needs the CUDA packages, got {error}; {way_out}") from error


def _warmup(config: Config, capability: Capability, backward: bool) -> int:
    """Choose kernels, compile them and print how long each took. Returns 1 if one did not compile, else 0."""
    from gemmconv.kernels import search_cache
    from gemmconv.ops.programs import layer_programs
    from gemmconv.runtime.launch import architecture_of, compile_ahead
    from gemmconv.warmup import show_progress

    search_cache.without_gpu = True
    start, arch = time.perf_counter(), architecture_of(capability)
    wanted = [one for program in layer_programs(config, backward) for one in compilations_of(program, config)]
    wanted = list(dict.fromkeys(wanted))
    compilations = compile_ahead([(source, dict(macros)) for source, macros in wanted], arch)
    show_progress([future for _, future in compilations])
    print(f"gemmconv {__version__}, kernels for an {config.spec.name} ({arch}):")
    for source, future in compilations:
        error = future.exception()
        took = f"{1e3 * (future.result() or 0):.0f} ms" if error is None else f"failed: {error}"
        print(f"  {source:<34} {took}")
    failed = sum(future.exception() is not None for _, future in compilations)
    there, seconds = len(wanted) - len(compilations), time.perf_counter() - start
    print(f"{len(compilations) - failed} compiled, {there} in the cache already, {failed} failed, in {seconds:.1f} s")
    if not wanted:
        print("torch's operator computes this layer there")
    return int(failed > 0)


def _tune(arguments: argparse.Namespace) -> int:
    """Measure one layer, and print the microseconds of every algorithm."""
    from gemmconv.compare.measure import module_of
    from gemmconv.tune import tune

    device, dtype, layer = pick_device(arguments.device), _DTYPES[arguments.dtype], layer_from_arguments(arguments)
    _check_precision(arguments.precision, dtype, device)
    shapes = layer.problem.input_shape, layer.problem.weight_shape
    how = {"memory_format": arguments.memory_format}
    x, weight = (torch.randn(one, device=device, dtype=dtype).contiguous(**how) for one in shapes)
    bias = x.new_zeros(layer.problem.out_channels) if layer.bias else None
    module = module_of(layer.problem, weight, bias, "auto", arguments.precision)
    x.requires_grad_(arguments.backward)
    for entry in tune(module, x, backward=arguments.backward, path=arguments.path):
        times = ", ".join(f"{name} {us:,.1f} us" for name, us in sorted(entry.microseconds.items(), key=lambda x: x[1]))
        taken = " and ".join(dict.fromkeys(entry.algorithms))
        print(f"{entry.key[1]:<12} {' '.join((taken, entry.kernel, entry.tile)).strip()}; measured: {times}")
    return 0


def _check_precision(precision: str | None, dtype: torch.dtype, device: torch.device) -> None:
    if precision == "tf32" and (dtype != torch.float32 or device.type != "cuda"):
        raise ValueError("argument --precision: tf32 is for float32 on a CUDA device; leave it out")


def _checked(arguments: argparse.Namespace) -> tuple[Sequence[Layer], torch.device]:
    """The layers to compare and where, once all arguments have been checked."""
    device = pick_device(arguments.device)
    _check_precision(arguments.precision, _DTYPES[arguments.dtype], device)
    layers = DEMO_LAYERS if arguments.command == "demo" else (layer_from_arguments(arguments),)
    _check_folder("--out", arguments.out)
    if arguments.json is not None:
        _check_folder("--json", arguments.json.parent)
        if arguments.json.is_dir():
            raise ValueError(f"argument --json: must be a file, got the folder {arguments.json}")
    require_demo_extra()
    shrinks = device.type == "cpu" and not arguments.full_size
    return [shrink(layer) if shrinks else layer for layer in layers], device


def _check_folder(flag: str, folder: Path) -> None:
    """Make a folder, and find out now, not after all was measured, whether files can be written into it."""
    try:
        make_writable(folder)
    except OSError as why:
        raise ValueError(f"argument {flag}: cannot make the folder {folder} or write into it: {why.strerror}") from why


def _compare(arguments: argparse.Namespace, layers: Sequence[Layer], device: torch.device) -> int:
    """Measure, print, draw, and write JSON. Returns 1 if a result was wrong, else 0."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gemmconv.compare import measure, report

    dtype, precision = _DTYPES[arguments.dtype], arguments.precision
    rounding = f" ({precision or torch_precision(dtype, device)})" if dtype == torch.float32 else ""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    heading = f"gemmconv {__version__} on {info.device_text(device)}: {arguments.dtype}{rounding}, {versions}"
    console = Console(highlight=False, markup=False)
    console.print(heading, style="bold", soft_wrap=True)
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(layers) * measure.STEPS_PER_LAYER)
        done = itertools.count()
        for layer in layers:

            def step(name: str, layer: Layer = layer) -> None:
                progress.update(task, completed=next(done), description=f"{layer.name}: {name}")

            rows = measure.measure_layer(layer, device, dtype, precision, step)
            results.append(rows)
            console.print(report.table(rows))
            for line in report.notes(rows):
                console.print(f"  {line}", style="red" if "is wrong" in line else "dim")
    console.print(report.legend(device.type), style="dim")
    console.print(f"\n{report.summary(results)}", style="bold", soft_wrap=True)
    path = arguments.out / "times.png"
    report.chart(results, path, heading)
    console.print(f"chart: {path}", soft_wrap=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.as_json(results, device, dtype), indent=1) + "\n")
        console.print(f"rows: {arguments.json}", soft_wrap=True)
    return int(any(row.wrong for rows in results for row in rows))


if __name__ == "__main__":
    sys.exit(main())
