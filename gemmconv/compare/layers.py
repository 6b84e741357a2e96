"""The layers to compare: the demo's own five, a user's, and their smaller forms for a CPU."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial

import torch

from gemmconv import validation
from gemmconv.geometry import Problem

# Below both limits, two cores of a CPU check and time all algorithms on a layer of the demo in 3 to 8 seconds.
CPU_FLOPS = 600_000_000
CPU_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Layer:
    """A transposed convolution to measure."""

    name: str  # a short name, for the chart and the table
    problem: Problem  # the geometry to measure
    bias: bool = False  # whether the layer adds a bias
    full: Problem | None = None  # the geometry that was asked for, where ``problem`` is a smaller form of it

    def describe(self) -> str:
        """The layer in one line.

        >>> print(Layer("x", Problem(8, 64, 64, 1, (512, 512), (3, 7))).describe())
        N=8, C 64 -> 64, kernel 3x7, image 512x512, no bias
        """
        p = self.problem
        parts = [f"N={p.batch}", f"C {p.in_channels} -> {p.out_channels}", f"kernel {pair_text(p.kernel_size)}"]
        for name in ("stride", "padding", "output_padding", "dilation"):
            value, default = getattr(p, name), getattr(Problem, name)
            if value != default:
                parts.append(f"{name.replace('_', ' ')} {short_text(value)}")
        if p.groups > 1:
            parts.append(f"groups {p.groups}")
        parts += [f"image {pair_text(p.input_size)}", "bias" if self.bias else "no bias"]
        return ", ".join(parts)

    def shrink_note(self) -> str | None:
        """The sizes that were reduced, such as ``batch 64 -> 1, image 128x256 -> 64x128``; None if none were."""
        if self.full is None:
            return None
        notes = []
        if self.full.batch != self.problem.batch:
            notes.append(f"batch {self.full.batch} -> {self.problem.batch}")
        if self.full.input_size != self.problem.input_size:
            notes.append(f"image {pair_text(self.full.input_size)} -> {pair_text(self.problem.input_size)}")
        return ", ".join(notes)


def pair_text(pair: tuple[int, int]) -> str:
    """``(3, 5)`` as ``3x5``."""
    return f"{pair[0]}x{pair[1]}"


def short_text(pair: tuple[int, int]) -> str:
    """``(3, 5)`` as ``3x5``, and ``(3, 3)`` as ``3``."""
    return str(pair[0]) if pair[0] == pair[1] else pair_text(pair)


_K3X5 = Problem(64, 64, 128, 1, (128, 256), (3, 5))
_K3X7 = Problem(8, 64, 64, 1, (512, 512), (3, 7))
_S5D2 = Problem(16, 32, 64, 1, (64, 128), (3, 3), stride=(5, 5), padding=(1, 1), dilation=(2, 2))

DEMO_LAYERS = (
    Layer("3x5 kernel", _K3X5),
    Layer("3x5 kernel, bias", _K3X5, bias=True),
    Layer("3x7 kernel", _K3X7),
    Layer("stride 5, dilation 2", _S5D2),
    Layer("stride 5, dilation 2, bias", _S5D2, bias=True),
)


def shrink(layer: Layer, flops: int = CPU_FLOPS, traffic: int = CPU_BYTES) -> Layer:
    """The largest smaller form of a layer that stays within both limits.

    ``flops`` limits the useful floating-point operations of one forward pass; ``traffic`` limits input, weight and
    output together, in bytes at 4 bytes an element. The batch is halved down to 1 first, then the longer side of the
    image, again and again. Channels, kernel, stride, padding, dilation and groups stay. A layer within the limits comes
    back as it is.

    >>> shrink(DEMO_LAYERS[0]).shrink_note()
    'batch 64 -> 1, image 128x256 -> 32x64'
    """
    problem = layer.problem
    while problem.useful_flops > flops or problem.least_bytes(4) > traffic:
        if problem.batch > 1:
            smaller = replace(problem, batch=problem.batch // 2)
        else:
            height, width = problem.input_size
            size = (max(1, height // 2), width) if height >= width else (height, width // 2)
            smaller = replace(problem, input_size=size)
        if smaller == problem or min(smaller.output_size) < 1:
            break
        problem = smaller
    return layer if problem == layer.problem else replace(layer, problem=problem, full=layer.problem)


def pick_device(text: str | None) -> torch.device:
    """The device of a flag ``--device``; None means the current CUDA device, or the CPU where there is none.

    Raises ValueError if there is no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text is None:
        text = "cuda" if count else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"argument --device: must be cpu, cuda or cuda:INDEX, got {text!r}")
    if not count:
        raise ValueError(f"argument --device: torch finds no CUDA device here, got {text!r}; use --device cpu")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise ValueError(f"argument --device: must be below cuda:{count}, got {text!r}")
    return torch.device("cuda", index)


def integer(text: str, least: int = 1) -> int:
    """Argument type: an integer of at least 1, or ``least``."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def pair(text: str, least: int = 1) -> tuple[int, int]:
    """Argument type: ``3`` or ``3x5`` or ``3,5``, each at least 1, or ``least``; pairs are (height, width)."""
    parts = text.replace("x", ",").split(",")
    if len(parts) > 2:
        raise argparse.ArgumentTypeError(f"must be one integer or two as in 3x5, got {text!r}")
    values = [integer(part, least) for part in parts]
    return values[0], values[-1]


def image_shape(text: str) -> tuple[int, int, int]:
    """Argument type: ``8,32,32``, images with their height and width, each at least 1."""
    parts = text.replace("x", ",").split(",")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"must be three integers as in 8,32,32, got {text!r}")
    images, height, width = map(integer, parts)
    return images, height, width


def add_layer_arguments(parser: argparse.ArgumentParser, by_size: bool = False) -> None:
    """Add the flags that describe one layer. Names and defaults are those of ``torch.nn.ConvTranspose2d``.

    With ``by_size`` one flag says how many images there are, and of what size.
    """
    group = parser.add_argument_group(
        "layer", "arguments of torch.nn.ConvTranspose2d, and the input's size; a pair is 3 or 3x5 (height, width)"
    )
    if not by_size:
        group.add_argument("--batch", type=integer, default=1, metavar="N", help="images in the input (default: 1)")
    group.add_argument("--in-channels", type=integer, required=True, metavar="C")
    group.add_argument("--out-channels", type=integer, required=True, metavar="C")
    kernel = "--kernel-size" if by_size else "--kernel"
    group.add_argument(kernel, dest="kernel", type=pair, required=True, metavar="K", help="kernel size")
    group.add_argument("--stride", type=pair, default=(1, 1), metavar="S", help="default: 1")
    group.add_argument("--padding", type=partial(pair, least=0), default=(0, 0), metavar="P", help="default: 0")
    group.add_argument("--output-padding", type=partial(pair, least=0), default=(0, 0), metavar="P", help="default: 0")
    group.add_argument("--dilation", type=pair, default=(1, 1), metavar="D", help="default: 1")
    group.add_argument("--groups", type=integer, default=1, metavar="G", help="default: 1")
    if by_size:
        text = "images, rows and columns of the input"
        group.add_argument("--size", type=image_shape, required=True, metavar="N,H,W", help=text)
    else:
        group.add_argument("--height", type=integer, required=True, metavar="H", help="rows of the input")
        group.add_argument("--width", type=integer, required=True, metavar="W", help="columns of the input")
    group.add_argument("--bias", action=argparse.BooleanOptionalAction, default=True, help="default: --bias")


def checked_problem(made: Problem) -> Problem:
    """The geometry of a layer as it is; raises ValueError if a call would find that its values do not fit together."""
    try:
        return validation.made_problem("layer", made, torch.float32)
    except (TypeError, RuntimeError) as error:
        raise ValueError(str(error)) from None


def layer_from_arguments(arguments: argparse.Namespace) -> Layer:
    """The layer that the flags of :func:`add_layer_arguments` describe.

    Raises ValueError if the values do not fit together; the message says which.
    """
    a = arguments
    batch, *size = a.size if "size" in a else (a.batch, a.height, a.width)
    for flag, value in (("--in-channels", a.in_channels), ("--out-channels", a.out_channels)):
        if value % a.groups:
            raise ValueError(f"{flag} must be divisible by --groups, got {value} and {a.groups}")
    window = a.kernel, a.stride, a.padding, a.output_padding, a.dilation
    problem = checked_problem(Problem(batch, a.in_channels, a.out_channels, a.groups, (size[0], size[1]), *window))
    return Layer(f"{pair_text(problem.kernel_size)} kernel", problem, bias=a.bias)
