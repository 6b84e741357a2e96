"""Whole networks as a user runs them, torch's own and converted: inference and training steps.

    python -m benchmarks.networks --run eager --budget 300

Wall-clock time, by turns; see :mod:`benchmarks.turns`. Outputs and gradients are compared with the network in float64
before anything is timed: what gemmconv loses may be a few times what torch's own network loses.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import gemmconv
from benchmarks.commands import chosen, separated
from benchmarks.contenders import LAYOUTS
from benchmarks.measure import first_line
from benchmarks.reference import relative_error
from benchmarks.timing import captured, peak_bytes
from benchmarks.turns import INFERENCE, TRAINING, Group, Pace, Turn, add_flags, judged, kernels_of, measure, timed
from benchmarks.workloads import Workload
from gemmconv.flags import pick_device
from gemmconv.geometry import Problem
from gemmconv.timing import Run

# How torch.compile is called for a run mode.
COMPILE: dict[str, dict[str, Any]] = {"compile": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
RUNS = ("eager", "graph", *COMPILE)
MODES = {
    f"{p}-{layout}" if layout != "nchw" else p: (p, layout) for p in ("tf32", "bf16", "fp32") for layout in LAYOUTS
}

_PACE, _QUICK = Pace(0.25), Pace(0.01, 3, 2.0)
_WARM_UP = 3  # calls: torch.compile captures a graph in the second, and replays it from the third on

# Errors that are always right for a whole network, and how many times torch's error is right too: gradients that nearly
# cancel, such as those of what a batch normalisation takes away, are noise for both.
_BARS = {"fp32": 1e-4, "tf32": 2e-3, "bf16": 2e-2}
_TIMES_TORCH = 4.0

_STEPS = (INFERENCE, TRAINING)

Shape = tuple[int, ...]
Results = dict[str, Tensor]


def dcgan() -> nn.Module:
    """The generator of pytorch/examples' DCGAN: 100 x 1 x 1 to 3 x 64 x 64."""
    channels = [100, 512, 256, 128, 64, 3]
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(channels)):
        layers.append(nn.ConvTranspose2d(before, after, 4, 1 if i == 0 else 2, 0 if i == 0 else 1, bias=False))
        layers += [nn.BatchNorm2d(after), nn.ReLU()] if after > 3 else [nn.Tanh()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Ronneberger et al. 2015 with batch normalisation and 3 x 3 convolutions that keep the size."""

    def __init__(self, channels: Sequence[int] = (64, 128, 256, 512)) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            pair = (nn.Conv2d(size, after, 3, padding=1) for size in (before, after))
            return nn.Sequential(*(part for one in pair for part in (one, nn.BatchNorm2d(after), nn.ReLU())))

        up = channels[::-1]
        self.down = nn.ModuleList(block(*pair) for pair in zip((3, *channels), channels, strict=False))
        self.middle = block(channels[-1], 2 * channels[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in up)
        self.join = nn.ModuleList(block(2 * size, size) for size in up)
        self.last = nn.Conv2d(channels[0], 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        skipped = []
        for down in self.down:
            images = down(images)
            skipped.append(images)
            images = nn.functional.max_pool2d(images, 2)
        images = self.middle(images)
        for up, join in zip(self.up, self.join, strict=True):
            images = join(torch.cat([skipped.pop(), up(images)], 1))
        output: Tensor = self.last(images)
        return output


def pose() -> nn.Module:
    """The head of SimpleBaseline (Xiao et al. 2018): a ResNet-50's 2048 x 8 x 6 to 17 heat maps of 64 x 48."""
    layers: list[nn.Module] = []
    for before in (2048, 256, 256):
        layers += [nn.ConvTranspose2d(before, 256, 4, 2, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(256, 17, 1))


def fsrcnn() -> nn.Module:
    """FSRCNN (Dong et al. 2016), yjn870/FSRCNN-pytorch, three times the size."""
    layers: list[nn.Module] = [nn.Conv2d(1, 56, 5, padding=2), nn.PReLU(56), nn.Conv2d(56, 12, 1), nn.PReLU(12)]
    layers += [part for _ in range(4) for part in (nn.Conv2d(12, 12, 3, padding=1), nn.PReLU(12))]
    layers += [nn.Conv2d(12, 56, 1), nn.PReLU(56)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(56, 1, 9, 3, 4, output_padding=2))


def hifigan() -> nn.Module:
    """The upsampler of HiFi-GAN V1 (Kong et al. 2020), signals as images of height 1, one convolution a stage."""
    layers: list[nn.Module] = [nn.Conv2d(80, 512, (1, 7), padding=(0, 3))]
    size = 512
    for stride, kernel in ((8, 16), (8, 16), (2, 4), (2, 4)):
        up = nn.ConvTranspose2d(size, size // 2, (1, kernel), (1, stride), (0, (kernel - stride) // 2))
        size //= 2
        layers += [nn.LeakyReLU(0.1), up, nn.LeakyReLU(0.1), nn.Conv2d(size, size, (1, 3), padding=(0, 1))]
    return nn.Sequential(*layers, nn.Conv2d(size, 1, (1, 7), padding=(0, 3)), nn.Tanh())


# Each with the shape of its input, on a GPU, and on a CPU or where it is to be quick.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Shape, Shape]] = {
    "dcgan": (dcgan, (128, 100, 1, 1), (8, 100, 1, 1)),
    "unet": (UNet, (8, 3, 256, 256), (1, 3, 32, 32)),
    "pose": (pose, (64, 2048, 8, 6), (1, 2048, 4, 3)),
    "fsrcnn": (fsrcnn, (16, 1, 128, 128), (1, 1, 32, 32)),
    "hifigan": (hifigan, (16, 80, 1, 64), (1, 80, 1, 8)),
}


def layers_of(name: str, shape: Shape, make: Callable[[], nn.Module] | None = None) -> list[Workload]:
    """The transposed convolutions of a network (of that name, by default), found on the device that computes nothing.

    >>> [one.layer for one in layers_of("fsrcnn", (16, 1, 8, 8))]
    ['n16 c56x1 k9 h8 w8 s3 p4 op2 bias']
    """
    found: list[Workload] = []

    def note(module: nn.ConvTranspose2d, inputs: tuple[Tensor], output: Tensor) -> None:
        m, images, sizes = module, inputs[0], (module.in_channels, module.out_channels, module.groups)
        options: Any = (m.kernel_size, m.stride, m.padding, m.output_padding, m.dilation)
        problem = Problem(len(images), *sizes, (images.shape[2], images.shape[3]), *options)
        found.append(Workload(f"{name}{len(found) + 1}", "networks", problem, m.bias is not None))

    with torch.device("meta"):
        network, images = (make or NETWORKS[name][0])(), torch.empty(shape)
    for module in network.modules():
        if isinstance(module, nn.ConvTranspose2d):
            module.register_forward_hook(note)
    network(images)
    return found


@contextmanager
def settings(precision: str) -> Iterator[None]:
    """Set what decides how torch computes a float32 product, let cuDNN search, and put all back after.

    By the legacy flags, and none of the new settings: inductor reads those, and raises where the others were set.
    """
    cudnn: Any = torch.backends.cudnn
    conv, matmul = cudnn.conv, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, conv.fp32_precision, matmul.fp32_precision, cudnn.benchmark
    try:
        cudnn.allow_tf32 = matmul.allow_tf32 = precision == "tf32"
        cudnn.benchmark = True
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, conv.fp32_precision, matmul.fp32_precision, cudnn.benchmark = before


@lru_cache(maxsize=1)
def _made(name: str, shape: Shape, device: torch.device) -> tuple[nn.Module, Tensor, dict[str, Results]]:
    """A network, its input, and by step its results in float64, the same each time."""
    torch.manual_seed(0)
    network, images = NETWORKS[name][0]().to(device), torch.randn(shape).to(device)
    exact = copy.deepcopy(network).double()
    results = {}
    for step in _STEPS:
        exact.train(step == TRAINING)
        results[step] = _grouped(exact, _tensors(exact, _call(exact, exact, images.double(), step, "fp32"), step))
    return network, images, results


def _call(network: nn.Module, compiled: Callable[..., Any], images: Tensor, step: str, precision: str) -> Tensor:
    """One step of a network, or of what was compiled from it; its output.

    No optimizer takes part, which would take as long for both.
    """
    autocast = torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16")
    if step == INFERENCE:
        with torch.no_grad(), autocast:
            output: Tensor = compiled(images)
        return output
    network.zero_grad(set_to_none=True)
    with autocast:
        output = compiled(images)
        loss = output.to(torch.promote_types(output.dtype, torch.float32)).square().mean()
    loss.backward()
    return output.detach()


def _tensors(network: nn.Module, output: Tensor, step: str) -> Results:
    """The output; in training also the gradients, by the names of their parameters."""
    grads = network.named_parameters() if step == TRAINING else ()
    return {"output": output} | {name: one.grad for name, one in grads if one.grad is not None}


def _grouped(network: nn.Module, tensors: Results) -> Results:
    """The output and the gradients of transposed convolutions one by one, and all other gradients as one vector."""
    own = {name for name, part in network.named_modules() if isinstance(part, nn.ConvTranspose2d)}
    found = {name: one for name, one in tensors.items() if name == "output" or name.rpartition(".")[0] in own}
    others = [one.flatten() for name, one in tensors.items() if name not in found]
    return found | ({"other gradients": torch.cat(others)} if others else {})


def errors_of(results: Results, exact: Results) -> dict[str, float]:
    """Errors relative to float64; infinite where a result is missing."""
    return {
        name: relative_error(results[name], right) if name in results else math.inf for name, right in exact.items()
    }


class _Networks:
    """A network three times over, as torch has it, again and converted, in one precision and layout."""

    def __init__(self, name: str, shape: Shape, device: torch.device, precision: str, layout: str, pace: Pace) -> None:
        self._device, self._precision, self._pace = device, precision, pace
        network, images, self._exact = _made(name, shape, device)
        self._images = images.contiguous(memory_format=LAYOUTS[layout])
        own, again, ours = (copy.deepcopy(network).to(memory_format=LAYOUTS[layout]) for _ in range(3))  # type: ignore[call-overload]
        self._networks = [own, again, gemmconv.convert(ours)]
        self._layers = layers_of(name, shape)

    def visit(self, row: Turn) -> Turn:
        """Measure a row."""
        row = replace(row, kernels=kernels_of(self._layers, row, self._device))
        for network in self._networks:
            network.train(row.step == TRAINING)
        with settings(self._precision):
            try:
                return self._measured(row)
            finally:
                self._forget()
                if row.mode in COMPILE:
                    torch.compiler.reset()

    def _measured(self, row: Turn) -> Turn:
        runs, found = zip(*self._prepared(row), strict=True)
        of_torch, _, of_ours = (errors_of(results(), self._exact[row.step]) for results in found)
        bars = {name: max(_BARS[self._precision], _TIMES_TORCH * error) for name, error in of_torch.items()}
        row = judged(row, of_ours, bars)
        del found
        if row.status != "ok":
            return row
        if row.mode in ("eager", "compile") and self._device.type == "cuda":
            theirs, _, ours = (self._peak_bytes(run) for run in runs)
            row = replace(row, torch_peak_bytes=theirs, ours_peak_bytes=ours, peak_ratio=ours / max(1, theirs))
        return timed(row, runs, self._device, self._pace, after=self._forget)

    def _prepared(self, row: Turn) -> list[tuple[Run, Callable[[], Results]]]:
        """The runs of all networks by :meth:`_run`; if torch's own fails, its error tells how the converted one did."""
        *torchs, ours = self._networks
        try:
            found = [self._run(network, row) for network in torchs]
        except Exception as error:
            try:
                self._run(ours, row)
                then = "runs"
            except Exception as another:
                then = first_line(another)
            raise RuntimeError(f"torch's own network: {first_line(error)}; the converted one: {then}") from error
        return [*found, self._run(ours, row)]

    def _run(self, network: nn.Module, row: Turn) -> tuple[Run, Callable[[], Results]]:
        """A warmed-up step of a network to time, and a function that returns the results of one more step."""
        compiled = torch.compile(network, **COMPILE[row.mode]) if row.mode in COMPILE else network

        def run() -> Tensor:
            if row.mode in COMPILE:
                torch.compiler.cudagraph_mark_step_begin()
            return _call(network, compiled, self._images, row.step, self._precision)

        for _ in range(_WARM_UP):
            run()
            self._forget()
        if row.mode != "graph":
            return run, lambda: _grouped(network, _tensors(network, run(), row.step))
        graph, output = captured(run)
        assert isinstance(output, Tensor)
        tensors = _tensors(network, output, row.step)  # each replay writes into them

        def replayed() -> Results:
            for tensor in tensors.values():
                tensor.fill_(torch.nan)
            graph.replay()
            return _grouped(network, tensors)

        return graph.replay, replayed

    def _peak_bytes(self, run: Run) -> int:
        """Most memory of a step, beyond what networks, inputs and what they keep between steps hold."""
        self._forget()
        gc.collect()
        peak, _ = peak_bytes(run, self._device)
        self._forget()
        return peak

    def _forget(self, index: int | None = None) -> None:
        """Give back the gradients of one network, or of all."""
        for network in self._networks if index is None else [self._networks[index]]:
            network.zero_grad(set_to_none=True)


def _shape(name: str, device: torch.device, quick: bool) -> Shape:
    _, shape, small = NETWORKS[name]
    return small if quick or device.type == "cpu" else shape


def groups(
    runs: Sequence[str], names: Sequence[str], modes: Sequence[str], device: torch.device, quick: bool
) -> list[Group]:
    """The rows to measure in groups, eager ones first, so that a budget may end the rest."""
    found = []
    for run, name, mode in itertools.product(runs, names, modes):
        shape = _shape(name, device, quick)
        precision, layout = MODES[mode]
        size = " x ".join(map(str, shape))
        rows = [Turn("networks", name, size, precision, layout, run, step) for step in _STEPS]
        make = partial(_Networks, name, shape, device, precision, layout, _QUICK if quick else _PACE)
        found.append(Group(rows, lambda make=make: make().visit))  # type: ignore[misc]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status of :func:`benchmarks.turns.measure`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.networks", description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    add = parser.add_argument
    add("--networks", type=separated, metavar="N", help=f"of {', '.join(NETWORKS)} (default: all)")
    add("--modes", type=separated, metavar="M", help=f"of {', '.join(MODES)} (default: all but fp32; on a CPU fp32)")
    add("--run", type=separated, metavar="R", help=f"of {', '.join(RUNS)} (default: all; on a CPU eager)")
    arguments = parser.parse_args(argv)
    try:
        device = pick_device(arguments.device)
        on_cpu = device.type == "cpu"
        names = chosen("--networks", arguments.networks, NETWORKS, tuple(NETWORKS))
        default = [mode for mode, (precision, _) in MODES.items() if (precision == "fp32") == on_cpu]
        modes = chosen("--modes", arguments.modes, MODES, default)
        runs = chosen("--run", arguments.run, RUNS, ("eager",) if on_cpu else RUNS)
        if on_cpu and (wrong := [one for one in (*modes, *runs) if one in ("tf32", "tf32-channels_last", "graph")]):
            raise ValueError(f"argument --device: {wrong[0]} needs a CUDA device, got cpu; leave it out")
        wanted = groups(runs, names, modes, device, arguments.quick)
        layers = [layer for name in names for layer in layers_of(name, _shape(name, device, arguments.quick))]
        return measure(wanted, layers, device, arguments)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
