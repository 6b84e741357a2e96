"""Vocoder: the upsampler of HiFi-GAN on signals whose length changes from call to call.

One learns that a model of ``Conv1d`` and ``ConvTranspose1d`` is converted as it is, and what changing lengths cost.
On a GPU gemmconv compiles kernels for classes of lengths, so most new lengths compile nothing. On a CPU there is
nothing to compile, and the example counts what an H100 would compile. The network (Kong et al. 2020, half of V1's
channels, one convolution a stage) is not trained and its input is noise: only times and outputs are compared.

Expect a lead of 1.1x to 1.3x on a CPU, where the network's convolutions take most of the time. A first call with a new
length takes longer than later ones with both kinds of layers, since torch's convolutions prepare for each length.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import nn

import gemmconv
from common import OUR_COLOUR, TORCH_COLOUR, check_same, explained, parser, plt, progress, save, times_by_turns, verdict

MELS, HOP, RATE_HZ = 80, 256, 22_050  # channels of the input; samples for each frame of it; samples a second
STAGES = (8, 16), (8, 16), (2, 4), (2, 4)  # stride and kernel of each transposed convolution


def upsampler(channels: int) -> nn.Sequential:
    """Make the network: [N, 80, frames] -> [N, 1, 256 * frames]; each stage halves the channels."""
    layers: list[nn.Module] = [nn.Conv1d(MELS, channels, 7, padding=3)]
    for stride, kernel in STAGES:
        padding = (kernel - stride) // 2
        layers += [nn.LeakyReLU(0.1), nn.ConvTranspose1d(channels, channels // 2, kernel, stride, padding)]
        channels //= 2
        layers += [nn.LeakyReLU(0.1), nn.Conv1d(channels, channels, 3, padding=1)]
    return nn.Sequential(*layers, nn.LeakyReLU(0.1), nn.Conv1d(channels, 1, 7, padding=3), nn.Tanh())


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--lengths", type=int, default=40, help="how many lengths to call the network with, at least 3")
    flags.add_argument("--longest", type=int, default=240, help="frames of the longest signal, 256 samples each")
    flags.add_argument("--channels", type=int, default=256, help="of the first stage, a multiple of 16; V1 has 512")
    flags.add_argument("--rounds", type=int, default=9, help="timed calls for each length, of which the median counts")
    options = flags.parse_args()
    device, on_gpu = options.device, options.device.type == "cuda"
    torch.manual_seed(0)

    with_torch = upsampler(options.channels).to(device).eval()
    networks = with_torch, gemmconv.convert(copy.deepcopy(with_torch))
    lengths = torch.linspace(options.longest // 10 + 1, options.longest, options.lengths).int()
    lengths = lengths[torch.randperm(options.lengths)].tolist()
    gpu = {} if on_gpu else {"gpu": "H100"}  # explain needs no GPU for one that it is told by name

    first_ms: list[dict[int, float]] = [{}, {}]  # of torch's layers, of gemmconv's: by length in frames
    later_ms: list[dict[int, float]] = [{}, {}]
    known: set[object] = set()
    compiled: list[int] = []  # kernels so far
    differences = []
    with torch.no_grad():
        for number in progress(options.lengths, "lengths"):
            frames = lengths[number]
            signal = torch.randn(1, MELS, frames, device=device)
            began = time.perf_counter()
            networks[number % 2](signal).sum().item()  # the host has the number when the device is done
            if number > 1:  # the first call of a network also sets up libraries and packs weights
                first_ms[number % 2][frames] = 1e3 * (time.perf_counter() - began)
            outputs = [network(signal) for network in networks]
            differences.append(check_same(outputs[1], outputs[0], 5e-3 if on_gpu else 1e-4))  # TF32 on GPUs
            medians_ms = times_by_turns([partial(network, signal) for network in networks], device, options.rounds)
            later_ms[0][frames], later_ms[1][frames] = medians_ms
            known.update(kernel for layer in explained(networks[1], signal, **gpu) for kernel in layer.compilations)
            compiled.append(len(known))

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    titles = "first call with a new length (each has half of them)", "later calls, median"
    for panel, title, times in zip(axes, titles, (first_ms, later_ms), strict=False):
        for found, name, colour in zip(times, ("torch", "gemmconv"), (TORCH_COLOUR, OUR_COLOUR), strict=True):
            seconds = [frames * HOP / RATE_HZ for frames in sorted(found)]
            panel.plot(
                seconds, [found[frames] for frames in sorted(found)], "o-", color=colour, label=f"{name}'s layers"
            )
        panel.set(title=title, xlabel="length of the signal in seconds", ylabel="milliseconds", ylim=(0, None))
        panel.legend()
    who = "this GPU compiled" if on_gpu else "an H100 would compile"
    axes[2].step(range(1, options.lengths + 1), compiled, where="post", color=OUR_COLOUR)
    axes[2].set(title=f"kernels that {who}", xlabel="lengths so far", ylabel="kernels so far", ylim=(0, None))
    for panel in axes:
        panel.grid(alpha=0.3)
    save(figure, options.out / "vocoder.png")

    nothing = sum(before == after for before, after in pairwise(compiled))
    print(f"{who} {compiled[-1]} kernels: {compiled[0]} for the first length, none for {nothing} others")
    print(f"largest difference from torch's outputs: {max(differences):.1e} of the largest value")
    for name, times in zip(("torch", "gemmconv"), first_ms, strict=True):
        print(f"first call with a new length, {name}'s layers: median {median(times.values()):.2f} ms")
    totals = [sum(times.values()) / len(times) for times in later_ms]
    print(verdict(f"later calls on {device.type}, on average", *totals))


if __name__ == "__main__":
    main()
