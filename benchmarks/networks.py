"""Whole networks as a user runs them: inference and training steps, with torch's layers and converted.

    python -m benchmarks.networks --device cpu

Wall-clock time. Torch's network runs twice, as two contenders, and all take turns, so that a row tells what torch
shows against itself. Outputs and gradients are compared with torch's before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import gemmconv
from gemmconv.compare.measure import relative_error

_BAR = 1e-4  # between two ways to compute a whole network in float32
_SECONDS = 3.0  # for the rounds of a row, at least
_LEAST_ROUNDS = 9


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

    def __init__(self, channels: Sequence[int] = (32, 64, 128, 256)) -> None:
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


def fsrcnn_last() -> nn.Module:
    """The last layer of FSRCNN (Dong et al. 2016), yjn870/FSRCNN-pytorch, three times the size."""
    return nn.ConvTranspose2d(56, 1, 9, 3, 4, output_padding=2)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dcgan n4": (dcgan, (4, 100, 1, 1)),
    "dcgan n16": (dcgan, (16, 100, 1, 1)),
    "unet n1 128x128": (UNet, (1, 3, 128, 128)),
    "fsrcnn_last n1": (fsrcnn_last, (1, 56, 128, 128)),
    "fsrcnn_last n16": (fsrcnn_last, (16, 56, 128, 128)),
}


def _step(network: nn.Module, images: Tensor) -> Tensor:
    network.zero_grad(set_to_none=True)
    loss: Tensor = network(images).square().mean()
    loss.backward()
    return loss


def _infer(network: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        output: Tensor = network(images)
    return output


def _error(one: nn.Module, other: nn.Module, images: Tensor) -> float:
    """The largest relative difference of outputs and of gradients; batch statistics of both have seen one batch."""
    outputs = [_step(network, images) for network in (one, other)]
    gradients = zip(one.parameters(), other.parameters(), strict=True)
    pairs = [tuple(outputs), *((a.grad, b.grad) for a, b in gradients)]
    return max(relative_error(found.detach(), right.detach().double()) for found, right in pairs)  # type: ignore[union-attr]


def measure(name: str, device: torch.device) -> list[tuple[str, float, float, float]]:
    """Of inference and a training step: torch's milliseconds, and how many times as fast torch again and ours are.

    Raises:
        RuntimeError: the converted network computes something else.
    """
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    network, images = make().to(device), torch.randn(shape, device=device)
    networks = [network, copy.deepcopy(network), gemmconv.convert(copy.deepcopy(network))]
    if not (error := _error(networks[2], networks[0], images)) <= _BAR:
        raise RuntimeError(f"{name}: the converted network is off by {error:.1e}, more than {_BAR:.0e}")
    _step(networks[1], images)
    rows = []
    for mode, run in (("inference", _infer), ("training step", _step)):
        times: list[list[float]] = [[], [], []]
        began = time.perf_counter()
        while len(times[0]) < _LEAST_ROUNDS or time.perf_counter() - began < _SECONDS:
            for index in range(3):
                begin = time.perf_counter()
                run(networks[index], images)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times[index].append(time.perf_counter() - begin)
        torch_s, again_s, ours_s = (statistics.median(series[len(series) // 5 :]) for series in times)
        rows.append((mode, 1e3 * torch_s, torch_s / again_s, torch_s / ours_s))
    return rows


def main() -> int:
    """Print the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="names, separated by commas")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{device.type}, {where}, torch {torch.__version__}, gemmconv {gemmconv.__version__}")
    print(f"{'network':<18} {'mode':<14} {'torch ms':>9} {'torch again':>12} {'converted':>10}")
    for name in arguments.networks.split(","):
        for mode, torch_ms, again, ours in measure(name, device):
            print(f"{name:<18} {mode:<14} {torch_ms:9.2f} {again:11.3f}x {ours:9.3f}x", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
