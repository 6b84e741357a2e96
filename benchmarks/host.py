"""The host's time for a call of a layer, torch's module and gemmconv's: the time until the call has returned.

    python -m benchmarks.host --budget 60

By turns; see :mod:`benchmarks.turns`. Layers are tiny, a few calls make a round, and a device has nothing to do when
one begins, so that no call waits for the device. Results are compared with float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.commands import chosen, separated
from benchmarks.contenders import DEFAULTS, LAYOUTS, Contender, torch_settings
from benchmarks.measure import GRADIENTS, bar_of
from benchmarks.reference import random_tensors, reference
from benchmarks.turns import (
    INFERENCE,
    STEPS,
    TRAINING,
    Group,
    Pace,
    Turn,
    add_flags,
    judged,
    kernels_of,
    measure,
    timed,
)
from benchmarks.workloads import Workload, parse_layer
from gemmconv.flags import pick_device

# The host's time depends on the number of launches. These layers have one to four for a pass.
_LAYERS = {
    "k3": "n1 c64x64 k3 h16 w16 p1 bias",
    "k4": "n1 c64x32 k4 h8 w8 s2 p1 bias",
    "k2": "n1 c32x32 k2 h16 w16 s2 bias",
    "rgb": "n1 c32x3 k4 h16 w16 s2 p1 bias",
    "odd": "n1 c37x53 k3 h9 w11 s2 p1 op1 bias",
    "depthwise": "n1 c32x32 k4 h16 w16 s2 p1 g32 bias",
    "signal": "n1 c64x32 k1x4 h1 w64 s1x2 p0x1 bias",
}
LAYERS = {name: Workload(name, "host", *parse_layer(text)) for name, text in _LAYERS.items()}
PRECISIONS = ("fp32", "tf32", "bf16")

_PACE = Pace(0.06, burst_ms=5.0, most_calls=8)  # 24 launches and more are what a device's queue has room for
_QUICK = Pace(0.005, 3, 1.0, 4)


class _Layers:
    """A layer as torch has it, again and as gemmconv has it, in one precision and layout."""

    def __init__(self, workload: Workload, device: torch.device, precision: str, layout: str, pace: Pace) -> None:
        self._workload, self._device, self._precision, self._pace = workload, device, precision, pace
        tensors = random_tensors(workload, device).to(torch.bfloat16 if precision == "bf16" else torch.float32)
        self._exact = reference(workload.problem, tensors)
        tensors = tensors.channels_last() if layout == "channels_last" else tensors
        self._input, self._grad_output = tensors.x.requires_grad_(), tensors.grad_output
        contenders = (DEFAULTS[layout], DEFAULTS[layout], Contender("auto", layout, "gemmconv"))
        self._modules = [contender.module(workload.problem, tensors) for contender in contenders]

    def visit(self, row: Turn) -> Turn:
        """Measure a row."""
        row = replace(row, kernels=kernels_of([self._workload], row, self._device))
        with torch_settings(self._precision, benchmark=True), torch.set_grad_enabled(row.step != INFERENCE):
            runs = [self._run(module, row.step) for module in self._modules]
            of_torch, _, of_ours = (self._errors(run()) for run in runs)
            bars = {name: bar_of(name, self._precision, of_torch) for name in of_ours}
            row = judged(row, of_ours, bars)
            return row if row.status != "ok" else timed(row, runs, self._device, self._pace, waits=False)

    def _run(self, module: torch.nn.Module, step: str) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        """A call, with as little as can be around it: a Python function costs as much as some of what is compared."""
        leaves, grad_output = (self._input, *module.parameters()), self._grad_output
        if step != TRAINING:
            return partial(module, self._input)
        return lambda: torch.autograd.grad(module(leaves[0]), leaves, grad_output)

    def _errors(self, found: Tensor | tuple[Tensor, ...]) -> dict[str, float]:
        results = {"output": found.detach()} if isinstance(found, Tensor) else dict(zip(GRADIENTS, found, strict=True))
        return self._exact.errors(results)


def groups(
    names: Sequence[str], precisions: Sequence[str], layouts: Sequence[str], device: torch.device, quick: bool
) -> list[Group]:
    """The rows to measure, in groups that share a layer."""
    found = []
    for name, precision, layout in itertools.product(names, precisions, layouts):
        layer = LAYERS[name]
        rows = [Turn("host", name, layer.layer, precision, layout, "eager", step) for step in STEPS]
        make = partial(_Layers, layer, device, precision, layout, _QUICK if quick else _PACE)
        found.append(Group(rows, lambda make=make: make().visit))  # type: ignore[misc]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status of :func:`benchmarks.turns.measure`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    add = parser.add_argument
    add("--layers", type=separated, metavar="L", help=f"of {', '.join(LAYERS)} (default: all)")
    add("--precision", type=separated, metavar="P", help=f"of {', '.join(PRECISIONS)} (default: all; on a CPU no tf32)")
    add("--layout", type=separated, metavar="L", help=f"of {', '.join(LAYOUTS)} (default: all)")
    arguments = parser.parse_args(argv)
    try:
        device = pick_device(arguments.device)
        on_cpu = device.type == "cpu"
        names = chosen("--layers", arguments.layers, LAYERS, tuple(LAYERS))
        every = [one for one in PRECISIONS if not (on_cpu and one == "tf32")]
        precisions = chosen("--precision", arguments.precision, PRECISIONS, every)
        if on_cpu and "tf32" in precisions:
            raise ValueError("argument --precision: tf32 needs a CUDA device, got cpu; leave it out")
        wanted = groups(
            names, precisions, chosen("--layout", arguments.layout, LAYOUTS, tuple(LAYOUTS)), device, arguments.quick
        )
        return measure(wanted, [LAYERS[name] for name in names], device, arguments)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
