"""``python -m gemmconv``: describe an installation, measure or compile a layer."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gemmconv import __version__, info
from gemmconv.device import KNOWN, Capability, named, spec_of
from gemmconv.explain import compilations_of
from gemmconv.flags import DTYPES, add_device_and_types, add_layer, check_precision, layer_of, pick_device
from gemmconv.kernels.base import Config, why_no_kernels
from gemmconv.module import ConvTranspose2d
from gemmconv.selection import current_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, of this process if ``argv`` is None, and return its exit status.

    It is 1 if a kernel did not compile.
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        arguments.parser.error(str(error))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gemmconv", description="Transposed convolutions as matrix products.")
    parser.add_argument("--version", action="version", version=f"gemmconv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{info,tune,warmup}")

    def add(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(parser=command, run=run)
        return command

    command = add("info", _info, "print versions, devices, what kernels lack, the cache and tuned choices")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command = add("tune", _tune, "measure what is fastest for one layer, into a file that gemmconv.load_tuned reads")
    add_device_and_types(command)
    command.add_argument("--path", type=Path, metavar="FILE", help="default: tuned.json in the folder of the cache")
    _add_formats(command, "time gradients too (default: --backward)")
    command = add("warmup", _warmup_command, "compile one layer's kernels into the cache, even for an absent GPU")
    text = 'cuda, cuda:1, or a name such as "NVIDIA H100 80GB HBM3" or A100 (default: cuda where there is one)'
    add_device_and_types(command, text)
    _add_formats(command, "compile the kernels of a backward pass too (default: --backward)")
    return parser


def _add_formats(command: argparse.ArgumentParser, backward: str) -> None:
    """Add the layer, its memory format, and whether there is a backward pass, which ``backward`` explains."""
    last, text = torch.channels_last, "tensors are in channels_last"
    command.add_argument("--channels-last", action="store_const", dest="memory_format", const=last, help=text)
    command.set_defaults(memory_format=torch.contiguous_format)
    command.add_argument("--backward", action=argparse.BooleanOptionalAction, default=True, help=backward)
    add_layer(command)


def _info(arguments: argparse.Namespace) -> int:
    state = info.collect()
    print(json.dumps(state, indent=1) if arguments.json else info.report(state))
    return 0


def _warmup_command(arguments: argparse.Namespace) -> int:
    """Compile for the GPU that ``--device`` names, which is here or one of the table of known ones."""
    text, dtype = arguments.device or "cuda", DTYPES[arguments.dtype]
    problem, bias = layer_of(arguments)
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
    check_precision(arguments.precision, dtype, where)
    how = arguments.precision, None, arguments.memory_format, bias
    config = current_config(problem, dtype, where, *how, spec=spec)
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
    from gemmconv.ops.pass_programs import layer_programs
    from gemmconv.runtime.launch import architecture_of, compile_ahead
    from gemmconv.warmup import show_progress

    search_cache.without_gpu = True
    start, arch = time.perf_counter(), architecture_of(capability)
    wanted = dict.fromkeys(one for of in layer_programs(config, backward) for one in compilations_of(of, config))
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
    from gemmconv.tune import tune

    device, dtype, precision = pick_device(arguments.device), DTYPES[arguments.dtype], arguments.precision
    check_precision(precision, dtype, device)
    p, bias = layer_of(arguments)
    window = p.kernel_size, p.stride, p.padding, p.output_padding, p.groups, bias, p.dilation
    module = ConvTranspose2d(p.in_channels, p.out_channels, *window, "zeros", device, dtype, precision=precision)
    module.to(memory_format=arguments.memory_format)  # type: ignore[call-overload]
    x = torch.randn(p.input_shape, device=device, dtype=dtype).contiguous(memory_format=arguments.memory_format)
    x.requires_grad_(arguments.backward)
    for entry in tune(module, x, backward=arguments.backward, path=arguments.path):
        times = ", ".join(f"{name} {us:,.1f} us" for name, us in sorted(entry.microseconds.items(), key=lambda x: x[1]))
        taken = " and ".join(dict.fromkeys(entry.algorithms))
        print(f"{entry.key[1]:<12} {' '.join((taken, entry.kernel, entry.tile)).strip()}; measured: {times}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
