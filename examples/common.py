"""Shared by the four examples: flags, progress, pictures, and a comparison with torch's layers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import numpy as np
import torch
from torch import Tensor, nn

import gemmconv

matplotlib.use("Agg")  # pictures go into files, also where there is no display
from matplotlib import pyplot as plt

OUR_COLOUR, TORCH_COLOUR = "tab:blue", "tab:orange"
_WARM_UPS = 3  # calls that are not timed: a first call compiles or packs weights


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of a description, and shows the default of each flag."""


def parser(description: str) -> argparse.ArgumentParser:
    """Make a parser with the flags of every example, --device and --out."""
    made = argparse.ArgumentParser(description=description, formatter_class=_Formatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", type=torch.device, default=device, help="where to compute: cpu or cuda")
    made.add_argument("--out", type=Path, default=Path("gemmconv-examples"), help="folder of the picture")
    return made


def progress(count: int, label: str, losses: Sequence[float] = ()) -> Iterator[int]:
    """Yield 0 to ``count - 1`` behind a bar if tqdm is installed, else print ten lines; both show the last loss."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    bar: Any = range(count) if tqdm is None else tqdm(range(count), label)
    began = time.perf_counter()
    for step in bar:
        yield step
        loss = f"loss {losses[-1]:.4f}" if losses else ""
        if tqdm is not None:
            bar.set_postfix_str(loss, refresh=False)
        elif (step + 1) * 10 // count > step * 10 // count:
            print(f"{label}: {step + 1} of {count}, {time.perf_counter() - began:.0f} s {loss}", flush=True)


def photograph() -> Tensor:
    """Grace Hopper's portrait, which matplotlib carries: float32 [3, 600, 512], values from 0 to 1."""
    path = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    return torch.from_numpy(np.array(plt.imread(path))).permute(2, 0, 1) / 255


def show(axes: Any, image: Tensor, title: str = "", **options: Any) -> None:
    """Draw an image, [height, width] or [channels, height, width], without ticks."""
    image = image.detach().float().cpu()
    axes.imshow(image.permute(1, 2, 0).clamp(0, 1) if image.ndim == 3 else image, **options)
    axes.set_title(title, fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])


def save(figure: Any, path: Path) -> None:
    """Write a picture, and say where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"picture: {path}")


def check_same(ours: Tensor, of_torch: Tensor, bound: float) -> float:
    """Return the largest difference, relative to torch's largest value.

    Raises:
        RuntimeError: the difference exceeds ``bound``.
    """
    difference = ((ours.double() - of_torch.double()).abs().max() / of_torch.double().abs().max()).item()
    if not difference <= bound:
        raise RuntimeError(f"results must differ from torch's by at most {bound}, got {difference}")
    return difference


def explained(network: nn.Module, images: Tensor, **options: Any) -> list[gemmconv.Explanation]:
    """Call a network, and return what ``gemmconv.explain`` says of each transposed convolution in it.

    ``options`` are those of ``gemmconv.explain``, such as the dtype.
    """
    return [call for layer in gemmconv.explain(network, images, **options).layers for call in layer.calls]


def algorithms(network: nn.Module, images: Tensor, **options: Any) -> str:
    """Say in one line which algorithms gemmconv's layers take, "native" being torch's own."""
    takes = [f"{one.algorithm} / {' + '.join(one.gradients)}" for one in explained(network, images, **options)]
    return "algorithms of the layers (forward / gradients of input + weight): " + ", ".join(takes)


def times_by_turns(runs: Sequence[Callable[[], object]], device: torch.device, rounds: int = 20) -> list[float]:
    """Median wall-clock time of each run in milliseconds; runs take turns, so that a slow moment slows all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(-_WARM_UPS, rounds):
        for run, found in zip(runs, times, strict=True):
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number >= 0:
                found.append(1e3 * (time.perf_counter() - began))
    return [median(found) for found in times]


def verdict(task: str, torch_ms: float, our_ms: float) -> str:
    """Say in one line what was timed, both times and their ratio; a difference of up to 5% counts as noise."""
    ratio = torch_ms / our_ms
    word = "gemmconv is faster" if ratio > 1.05 else "gemmconv is slower" if ratio < 0.95 else "no difference"
    return f"{task}: {torch_ms:.2f} ms with torch's layers, {our_ms:.2f} ms with gemmconv's ({ratio:.2f}x, {word})"
