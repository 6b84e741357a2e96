"""Flags that command lines share: a device, an element type, and a layer."""

from __future__ import annotations

import argparse
from functools import partial

import torch

from gemmconv import validation
from gemmconv.geometry import Problem

DTYPES = {validation.short_name(d): d for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}
_NEEDED = ("in_channels", "out_channels", "kernel", "height", "width")
_PAIRS = ("stride", "padding", "output_padding", "dilation")


def add_device_and_types(
    parser: argparse.ArgumentParser, device: str = "cpu, cuda or cuda:1 (default: cuda where there is one)"
) -> None:
    """Add ``--device``, with a text of help, ``--dtype`` and ``--precision``."""
    parser.add_argument("--device", help=device)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="default: float32")
    text = "rounding of float32 products in gemmconv (default: as torch's convolutions are set)"
    parser.add_argument("--precision", choices=validation.PRECISIONS, help=text)


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


def check_precision(precision: str | None, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError where products have no precision to choose."""
    if precision == "tf32" and (dtype != torch.float32 or device.type != "cuda"):
        raise ValueError("argument --precision: tf32 is for float32 on a CUDA device; leave it out")


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


def add_layer(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe one layer and its input, which :func:`layer_of` reads."""
    text = "arguments of torch.nn.ConvTranspose2d, and the input's size; a pair is 3 or 3x5 (height, width)"
    group, from_0 = parser.add_argument_group("layer", text), partial(pair, least=0)
    group.add_argument("--batch", type=integer, metavar="N", help="images in the input (default: 1)")
    group.add_argument("--in-channels", type=integer, metavar="C")
    group.add_argument("--out-channels", type=integer, metavar="C")
    group.add_argument("--kernel", type=pair, metavar="K", help="kernel size")
    group.add_argument("--stride", type=pair, metavar="S", help="default: 1")
    group.add_argument("--padding", type=from_0, metavar="P", help="default: 0")
    group.add_argument("--output-padding", type=from_0, metavar="P", help="default: 0")
    group.add_argument("--dilation", type=pair, metavar="D", help="default: 1")
    group.add_argument("--groups", type=integer, metavar="G", help="default: 1")
    group.add_argument("--height", type=integer, metavar="H", help="rows of the input")
    group.add_argument("--width", type=integer, metavar="W", help="columns of the input")
    group.add_argument("--bias", action=argparse.BooleanOptionalAction, help="default: --bias")


def has_layer(arguments: argparse.Namespace) -> bool:
    """Whether any flag of a layer was given."""
    return any(getattr(arguments, name) is not None for name in (*_NEEDED, *_PAIRS, "batch", "groups", "bias"))


def layer_of(arguments: argparse.Namespace) -> tuple[Problem, bool]:
    """The layer that the flags of :func:`add_layer` describe: its geometry, and whether it has a bias.

    Raises ValueError if a flag is missing or the values do not fit together; the message says which.
    """
    a = arguments
    if missing := [f"--{name.replace('_', '-')}" for name in _NEEDED if getattr(a, name) is None]:
        raise ValueError(f"the following arguments are required: {', '.join(missing)}")
    pairs = {name: value for name in _PAIRS if (value := getattr(a, name)) is not None}
    counts = a.batch or 1, a.in_channels, a.out_channels, a.groups or 1
    return checked_problem(Problem(*counts, (a.height, a.width), a.kernel, **pairs)), a.bias is not False


def checked_problem(made: Problem) -> Problem:
    """The geometry of a layer as it is; raises ValueError if a call would find that its values do not fit together."""
    try:
        return validation.made_problem("layer", made, torch.float32)
    except (TypeError, RuntimeError) as error:
        raise ValueError(str(error)) from None
