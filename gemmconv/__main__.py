"""``python -m gemmconv``: compare the algorithms with torch on a layer of your own, or on the demo's five; compile a
layer's kernels ahead."""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gemmconv import __version__
from gemmconv.compare import require_demo_extra
from gemmconv.compare.layers import DEMO_LAYERS, Layer, add_layer_arguments, layer_from_arguments, shrink
from gemmconv.device import KNOWN, Capability, named, spec_of
from gemmconv.kernels.base import Config, Precision, why_no_kernels
from gemmconv.selection import compilations_of, is_deterministic, torch_precision

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 1 where an algorithm's result was wrong.

    Args:
        argv: the arguments, ``sys.argv[1:]`` if None.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    command: argparse.ArgumentParser = arguments.parser
    if arguments.command == "warmup":
        try:
            return _warmup(*_warmup_config(arguments), arguments.backward)
        except ValueError as error:
            command.error(str(error))
        except ModuleNotFoundError as error:
            command.error(
                f"compiling needs the CUDA packages, got {error}; install gemmconv[cuda13] or gemmconv[cuda12]"
            )
    if arguments.command == "tune":
        try:
            return _tune(arguments)
        except (OSError, ValueError) as error:
            command.error(str(error))
    try:
        device, precision = _device(arguments.device), arguments.precision
        dtype = _DTYPES[arguments.dtype]
        _check_precision(precision, dtype, device)
        layers: tuple[Layer, ...] = DEMO_LAYERS if arguments.command == "demo" else (layer_from_arguments(arguments),)
        arguments.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=arguments.out):  # rather than after all was measured
            pass
        require_demo_extra()
    except OSError as error:
        command.error(f"argument --out: cannot make the folder {arguments.out} or write into it: {error.strerror}")
    except (ValueError, ModuleNotFoundError) as error:
        command.error(str(error))
    if device.type == "cpu" and not arguments.full_size:
        layers = tuple(shrink(layer) for layer in layers)
    return _compare(layers, device, dtype, precision, arguments.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gemmconv", description="Transposed convolutions as matrix products.")
    parser.add_argument("--version", action="version", version=f"gemmconv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{compare,demo,tune,warmup}")
    for name, text in (
        ("compare", "measure error, times and workspace of every algorithm on one layer"),
        ("demo", "the same on five layers that are hard for a library"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}, beside torch.")
        command.set_defaults(parser=command)
        command.add_argument("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
        _add_types(command)
        command.add_argument(
            "--full-size",
            action="store_true",
            help="do not make a layer smaller on a CPU; may take very long",
        )
        command.add_argument(
            "--out",
            type=Path,
            default=Path("gemmconv-demo"),
            metavar="DIR",
            help="for the chart (default: gemmconv-demo)",
        )
        if name == "compare":
            add_layer_arguments(command)
    text = "measure what is fastest for one layer on a device, and keep it in a file for gemmconv.load_tuned"
    command = commands.add_parser("tune", help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(parser=command)
    command.add_argument("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
    _add_types(command)
    command.add_argument("--path", type=Path, metavar="FILE", help="default: tuned.json in the folder of the cache")
    _add_formats(command, "time gradients too (default: --backward)")
    text = "compile the kernels of one layer into the cache, for a GPU that need not be here"
    command = commands.add_parser("warmup", help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(parser=command)
    text = 'cuda, cuda:1, or a name such as "NVIDIA H100 80GB HBM3" or A100 (default: cuda where there is one)'
    command.add_argument("--device", help=text)
    _add_types(command)
    _add_formats(command, "compile those of a backward pass to input, weight and bias too (default: --backward)")
    return parser


def _add_formats(command: argparse.ArgumentParser, backward: str) -> None:
    """The layer, its memory format, and whether there is a backward pass."""
    command.add_argument("--channels-last", action="store_true", help="tensors are in channels_last")
    command.add_argument("--backward", action=argparse.BooleanOptionalAction, default=True, help=backward)
    add_layer_arguments(command, by_size=True)


def _add_types(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", choices=sorted(_DTYPES), default="float32", help="default: float32")
    command.add_argument(
        "--precision",
        choices=("ieee", "tf32"),
        help="rounding of float32 products in gemmconv (default: as torch's convolutions are set)",
    )


def _warmup_config(arguments: argparse.Namespace) -> tuple[Config, Capability]:
    """What the layer is computed on and how, and the compute capability to compile for."""
    text, dtype, layer = arguments.device or "cuda", _DTYPES[arguments.dtype], layer_from_arguments(arguments)
    if text.startswith("cuda") and torch.cuda.is_available():
        where = _device(text)
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
    current = torch_precision(dtype, where)
    config = Config(
        layer.problem,
        dtype,
        where,
        arguments.precision or current,
        torch_precision=current,
        memory_format=torch.channels_last if arguments.channels_last else torch.contiguous_format,
        bias=layer.bias,
        spec=spec,
        deterministic=is_deterministic("auto", where, spec),
    )
    if (reason := why_no_kernels(where, spec)) is not None:
        raise ValueError(f"argument --device: {reason}")
    return config, capability


def _warmup(config: Config, capability: Capability, backward: bool) -> int:
    """Choose, compile and print. Returns the exit status: 1 where a kernel did not compile."""
    from gemmconv.kernels import kept
    from gemmconv.ops.programs import layer_programs
    from gemmconv.runtime.launch import architecture_of, compile_ahead
    from gemmconv.warmup import show_progress

    kept.without_gpu = True
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
    """Measure one layer, and print what every algorithm took."""
    from gemmconv.module import ConvTranspose2d
    from gemmconv.tune import tune

    device, dtype, layer = _device(arguments.device), _DTYPES[arguments.dtype], layer_from_arguments(arguments)
    _check_precision(arguments.precision, dtype, device)
    p = layer.problem
    module = ConvTranspose2d(
        *(p.in_channels, p.out_channels, p.kernel_size, p.stride, p.padding, p.output_padding, p.groups, layer.bias),
        dilation=p.dilation,
        device=device,
        dtype=dtype,
        precision=arguments.precision,
    )
    x = torch.randn(p.input_shape, device=device, dtype=dtype, requires_grad=arguments.backward)
    if arguments.channels_last:
        module.weight = torch.nn.Parameter(module.weight.contiguous(memory_format=torch.channels_last))
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_(arguments.backward)
    for entry in tune(module, x, backward=arguments.backward, path=arguments.path):
        times = ", ".join(f"{name} {us:,.1f} us" for name, us in sorted(entry.microseconds.items(), key=lambda x: x[1]))
        taken = " and ".join(dict.fromkeys(entry.algorithms))
        print(f"{entry.key[1]:<12} {' '.join((taken, entry.kernel, entry.tile)).strip()}; measured: {times}")
    return 0


def _device(text: str | None) -> torch.device:
    """The device to run on; a CUDA device gets its index."""
    if text is None:
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"argument --device: must be cpu, cuda or cuda:INDEX, got {text!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"argument --device: must be cpu, cuda or cuda:INDEX, got {text!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ValueError(f"argument --device: torch finds no CUDA device here, got {text!r}; use --device cpu")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise ValueError(f"argument --device: must be below cuda:{count}, got {text!r}")
    return torch.device("cuda", index)


def _check_precision(precision: str | None, dtype: torch.dtype, device: torch.device) -> None:
    if precision == "tf32" and (dtype != torch.float32 or device.type != "cuda"):
        raise ValueError("argument --precision: tf32 is for float32 on a CUDA device; leave it out")


def _compare(
    layers: Sequence[Layer], device: torch.device, dtype: torch.dtype, precision: Precision | None, out: Path
) -> int:
    """Measure, print and draw. Returns the exit status."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gemmconv.compare import measure, report

    console = Console()
    heading = _heading(device, dtype, precision or torch_precision(dtype, device))
    console.print(heading, style="bold", highlight=False, soft_wrap=True)
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(layers) * measure.steps_per_layer())
        done = 0
        for layer in layers:

            def step(name: str, layer: Layer = layer) -> None:
                nonlocal done
                progress.update(task, completed=done, description=f"{layer.name}: {name}")
                done += 1

            rows = measure.measure_layer(layer, device, dtype, precision, step)
            results.append(rows)
            console.print(report.table(rows))
            for line in report.notes(rows):
                console.print(f"  {line}", style="red" if "is wrong" in line else "dim", highlight=False, markup=False)
    console.print(report.legend(device.type), style="dim", highlight=False, markup=False)
    console.print(f"\n{report.summary(results)}", style="bold", highlight=False, markup=False, soft_wrap=True)
    path = out / "times.png"
    report.chart(results, path, heading)
    console.print(f"chart: {path}", highlight=False, markup=False, soft_wrap=True)
    return int(any(row.wrong for rows in results for row in rows))


def _heading(device: torch.device, dtype: torch.dtype, precision: Precision) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    name = str(dtype).removeprefix("torch.") + (f" ({precision})" if dtype == torch.float32 else "")
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"gemmconv {__version__} on {where}: {name}, {versions}"


if __name__ == "__main__":
    sys.exit(main())
