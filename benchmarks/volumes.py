"""Layers of volumes: torch's operator beside gemmconv's, the device's time and what a user waits for.

    python -m benchmarks.volumes                       # a GPU; three minutes
    python -m benchmarks.volumes --only nnunet --device cpu
    python -m benchmarks.volumes --random 40 --seed 1

Layers have the sizes of public 3-D networks, small ones too, or are drawn at random. ``device`` is the time between two
events around a call that the host enqueued before. ``waited`` is the wall-clock time of a call among several in a row,
so that the host's part counts. ``last`` is the device's time beside torch's operator on tensors in channels_last_3d.
All are medians, by turns, beside torch's operator twice, which shows the noise. A step is a forward pass and both
gradients. Every result is compared with torch's in full float32 precision before it is timed.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
from collections.abc import Callable, Sequence
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gemmconv
from benchmarks.commands import Progress
from benchmarks.contenders import torch_settings
from benchmarks.reference import relative_error
from benchmarks.summary import markdown_table
from benchmarks.timing import medians_ms
from benchmarks.turns import Pace, by_turns

_PRECISIONS = {"tf32": torch.float32, "bf16": torch.bfloat16}
_BAR = {"tf32": 2e-3, "bf16": 8e-3}  # a result is wrong if its relative error exceeds this and twice torch's own
_LEAST_CALLS, _MOST_CALLS, _BURST_MS, _ROUNDS = 3, 12, 50.0, 5  # calls in a row of one contender, and how often
_SLOWER = 1.03  # counted as slower: more than this times the longer of torch's two measurements


class Layer(NamedTuple):
    """A layer of volumes with its input: an int for all three axes, or one for each."""

    batch: int
    channels: tuple[int, int]
    size: int | tuple[int, int, int]
    kernel: int | tuple[int, int, int]
    stride: int | tuple[int, int, int] = 2
    padding: int = 0
    output_padding: int = 0
    groups: int = 1
    dilation: int = 1


LAYERS = {
    "nnunet 4": Layer(2, (320, 320), 4, 2),
    "nnunet 8": Layer(2, (320, 256), 8, 2),
    "nnunet 16": Layer(2, (256, 128), 16, 2),
    "nnunet 32": Layer(2, (128, 64), 32, 2),
    "nnunet 64": Layer(2, (64, 32), 64, 2),
    "nnunet flat": Layer(2, (128, 64), (16, 64, 64), (1, 2, 2), (1, 2, 2)),
    "swinunetr 6": Layer(1, (384, 192), 6, 2),
    "swinunetr 48": Layer(1, (48, 48), 48, 2),
    "vnet 32": Layer(1, (128, 64), 32, 2),
    "monai 12": Layer(2, (128, 64), 12, 3, 2, 1, 1),
    "monai 48": Layer(2, (32, 16), 48, 3, 2, 1, 1),
    "gan 8": Layer(4, (256, 128), 8, 4, 2, 1),
    "gan 32": Layer(4, (64, 32), 32, 4, 2, 1),
    "groups 16": Layer(4, (32, 32), 16, 3, 2, 1, 1, groups=4),
    "groups 48": Layer(2, (32, 32), 48, 3, 2, 1, 1, groups=4),
    "dilation 32": Layer(2, (32, 64), 32, 3, 2, 1, 0, dilation=2),
    "few 48": Layer(2, (4, 16), 48, 3, 2, 1),
    "depthwise 16": Layer(2, (64, 64), 16, 3, 2, 1, groups=64),
    "depthwise 48": Layer(2, (64, 64), 48, 3, 2, 1, groups=64),
    "stride 1, 16": Layer(2, (32, 48), 16, 3, 1, 1),
    "stride 1, 64": Layer(2, (32, 48), 64, 3, 1, 1),
}


def random_layers(count: int, seed: int) -> dict[str, Layer]:
    """Layers of 2**14 to 2**26 outputs with any channels, groups, kernels, strides and paddings, by their fields."""
    draw, layers = random.Random(seed), dict[str, Layer]()
    while len(layers) < count:
        groups = draw.choice([1, 1, 1, 1, 2, 4, 32])
        channels = tuple(groups * draw.choice([1, 2, 3, 8, 16, 24, 32, 64, 96, 128, 256]) for _ in range(2))
        size = tuple(draw.choice([2, 4, 8, 12, 16, 24, 32, 48]) for _ in range(3))
        kernel, stride = tuple(draw.choice([1, 2, 3, 3, 4, 5]) for _ in range(3)), draw.choice([1, 2, 2, 2, 3])
        if draw.random() < 0.3:
            kernel = (stride,) * 3
        padding = draw.randint(0, (min(kernel) - 1) // 2)
        layer = Layer(draw.choice([1, 2, 4]), channels, size, kernel, stride, padding, 0, groups)  # type: ignore[arg-type]
        outputs = layer.batch * channels[1] * math.prod(size) * stride**3
        if 1 << 14 <= outputs <= 1 << 26 and max(channels) <= 512:
            layers[" ".join(str(one).replace(" ", "") for one in layer[:-1])] = layer
    return layers


def row_of(layer: Layer, precision: str, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of torch's operator, of gemmconv's and of torch's again, for each step and kind of time."""
    sizes = (layer.size,) * 3 if isinstance(layer.size, int) else layer.size
    more: Any = layer.stride, layer.padding, layer.output_padding, layer.groups, True, layer.dilation
    kind: Any = {"device": device, "dtype": _PRECISIONS[precision]}
    torch.manual_seed(0)
    theirs: Any = torch.nn.ConvTranspose3d(*layer.channels, layer.kernel, *more, **kind)
    ours = gemmconv.ConvTranspose3d(*layer.channels, layer.kernel, *more, **kind)
    ours.load_state_dict(theirs.state_dict())
    input = torch.randn(layer.batch, layer.channels[0], *sizes, device=device, dtype=kind["dtype"], requires_grad=True)
    grad, form = torch.randn_like(theirs(input)), torch.channels_last_3d
    last = copy.deepcopy(theirs).to(memory_format=form)
    of_last = [one.detach().to(memory_format=form).requires_grad_() for one in (input, grad)]

    def step(module: Any, trains: bool) -> tuple[Tensor, ...]:
        given, of_output = of_last if module is last else (input, grad)
        with torch.set_grad_enabled(trains):
            output = module(given)
            leaves = given, module.weight, module.bias
            return (output.detach(), *torch.autograd.grad(output, leaves, of_output)) if trains else (output,)

    with torch_settings("fp32"):
        exact = [one.detach().double() for one in _in_float32(theirs, input, grad)]
    with torch_settings(precision):
        errors = [
            [relative_error(*pair) for pair in zip(step(one, True), exact, strict=True)] for one in (ours, theirs)
        ]
        if wrong := [pair for pair in zip(*errors, strict=True) if not pair[0] <= max(_BAR[precision], 2 * pair[1])]:
            raise ValueError(f"off by {wrong[0][0]:.1e}, torch by {wrong[0][1]:.1e}")
        found = {}
        for name, trains in (("forward", False), ("step", True)):
            runs = [lambda one=one, trains=trains: step(one, trains) for one in (theirs, ours, theirs, last)]
            *found[f"{name}, device"], of_form = medians_ms(runs, device)
            found[f"{name}, waited"] = _waited_ms(runs[:3], device)
            found[f"{name}, last"] = [of_form, found[f"{name}, device"][1], of_form]
    return found


def _in_float32(module: Any, input: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of a layer in float32, of values that a lower precision holds."""
    weight, bias = (one.detach().float().requires_grad_() for one in (module.weight, module.bias))
    geometry = module.stride, module.padding, module.output_padding, module.groups, module.dilation
    leaf = input.detach().float().requires_grad_()
    output = torch.conv_transpose3d(leaf, weight, bias, *geometry)
    return output, *torch.autograd.grad(output, (leaf, weight, bias), grad.float())


def _waited_ms(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    guess = min(by_turns(runs[:1], device, Pace(0.0, 3), 1)[0])
    calls = max(_LEAST_CALLS, min(_MOST_CALLS, int(_BURST_MS / guess)))
    return [median(times) for times in by_turns(runs, device, Pace(0.0, _ROUNDS), calls)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 1 if a result is wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.volumes", description="Layers of volumes.")
    parser.add_argument("--only", default="", metavar="TEXT", help="layers whose name begins with this")
    parser.add_argument("--random", type=int, metavar="N", help="N random layers instead")
    parser.add_argument("--seed", type=int, default=0, help="of random layers; default: %(default)s")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    options = parser.parse_args(argv)
    device, failed = torch.device(options.device), []
    layers = LAYERS if options.random is None else random_layers(options.random, options.seed)
    cases = [(name, one) for name in layers if name.startswith(options.only) for one in _PRECISIONS]
    if not cases:
        print(f"no layer's name begins with {options.only!r}; there are {', '.join(layers)}", file=sys.stderr)
        return 1
    progress, rows = Progress(len(cases)), dict[tuple[str, str], dict[str, list[float]]]()
    for name, precision in cases:
        try:
            rows[name, precision] = row_of(layers[name], precision, device)
        except (ValueError, RuntimeError) as error:
            failed.append(f"failed: {name}, {precision}: {' '.join(str(error).split())[:200]}")
        progress.done += 1
        progress.say(f"{name}, {precision}")
    if rows:
        print_table(rows)
    print(*failed, sep="\n")
    return int(bool(failed))


def print_table(rows: dict[tuple[str, str], dict[str, list[float]]]) -> None:
    """Print a line for each layer: torch's and our time in microseconds and their ratio, and each column's mean."""
    columns = list(next(iter(rows.values())))
    cells = []
    for (name, precision), row in rows.items():
        texts = (f"{1e3 * torchs:.0f} / {1e3 * ours:.0f} ({torchs / ours:.2f}x)" for torchs, ours, _ in row.values())
        cells.append([name, precision, *texts])
    print(markdown_table(["layer", "precision", *columns], cells, left=2))
    for column in columns:
        times = [row[column] for row in rows.values()]
        ratios = [torchs / ours for torchs, ours, _ in times]
        slower = sum(ours > _SLOWER * max(torchs, again) for torchs, ours, again in times)
        print(f"{column}: {geometric_mean(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}), {slower} slower")


if __name__ == "__main__":
    sys.exit(main())
