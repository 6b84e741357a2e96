"""The layers to measure, in suites, and the notation of a layer in one line.

    n64 c64x128 k3x5 h128 w256 s2x1 p1 d2 g4 op1 bias

is a batch of 64, 64 -> 128 channels, kernel 3x5, input 128x256, stride (2, 1), padding 1, dilation 2, 4 groups, output
padding 1 and a bias. Pairs are height x width; n, s, p, d, g and op may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gemmconv.flags import checked_problem
from gemmconv.geometry import Problem

_PART = re.compile(r"(op|[nckhwspdg])(\d+)(?:x(\d+))?")
_SINGLE = ("n", "h", "w", "g")
_NEEDED = ("c", "k", "h", "w")
_DEFAULTS = {"n": (1, 1), "s": (1, 1), "p": (0, 0), "op": (0, 0), "d": (1, 1), "g": (1, 1)}


@dataclass(frozen=True)
class Workload:
    """A transposed convolution to measure.

    Attributes:
        name: unique over all suites.
        suite: the suite it belongs to.
        problem: the geometry to measure.
        bias: whether the layer adds a bias.
        quick: whether ``--quick`` takes it.
        note: what was made smaller, where ``problem`` is not the geometry that was asked for.
    """

    name: str
    suite: str
    problem: Problem
    bias: bool = False
    quick: bool = False
    note: str = ""

    @property
    def layer(self) -> str:
        """The layer in one line; :func:`parse_layer` reads it."""
        return format_layer(self.problem, self.bias)


def parse_layer(text: str) -> tuple[Problem, bool]:
    """The problem of a layer in one line, and whether it has a bias.

    Raises:
        ValueError: a part that is unknown, missing, given twice, or does not fit the others.

    >>> parse_layer("n2 c8x16 k3 h4 w5 s2 bias")[0].output_shape
    (2, 16, 9, 11)
    """
    values: dict[str, tuple[int, int]] = {}
    bias = False
    for part in text.replace(",", " ").split():
        if part == "bias":
            bias = True
            continue
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"layer: unknown part {part!r} in {text!r}; write it like n64 c64x128 k3x5 h128 w256 s2")
        key, first, second = match.groups()
        if key in values:
            raise ValueError(f"layer: {key!r} is given twice in {text!r}")
        if second is not None and key in _SINGLE:
            raise ValueError(f"layer: {key!r} takes one number, got {part!r}")
        values[key] = (int(first), int(first if second is None else second))
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise ValueError(f"layer: {', '.join(missing)} missing in {text!r}; c, k, h and w are needed")
    values = {**_DEFAULTS, **values}
    size = values["h"][0], values["w"][0]
    window = [values[key] for key in ("k", "s", "p", "op", "d")]
    problem = checked_problem(Problem(values["n"][0], *values["c"], values["g"][0], size, *window))
    if not (problem.batch and problem.in_pixels):
        raise ValueError(f"layer: n, h and w must be at least 1, got {text!r}")
    return problem, bias


def pair_text(pair: tuple[int, int]) -> str:
    """``(3, 5)`` as ``3x5``."""
    return f"{pair[0]}x{pair[1]}"


def short_text(pair: tuple[int, int]) -> str:
    """``(3, 5)`` as ``3x5``, and ``(3, 3)`` as ``3``."""
    return str(pair[0]) if pair[0] == pair[1] else pair_text(pair)


def format_layer(problem: Problem, bias: bool = False) -> str:
    """A layer in one line, defaults left out.

    >>> format_layer(*parse_layer("k3x3 c8 h4 w5 n1 s2x3"))
    'n1 c8x8 k3 h4 w5 s2x3'
    """
    parts = [
        f"n{problem.batch}",
        f"c{problem.in_channels}x{problem.out_channels}",
        f"k{short_text(problem.kernel_size)}",
        f"h{problem.input_size[0]}",
        f"w{problem.input_size[1]}",
    ]
    for key, pair in (
        ("s", problem.stride),
        ("p", problem.padding),
        ("op", problem.output_padding),
        ("d", problem.dilation),
    ):
        if pair != _DEFAULTS[key]:
            parts.append(f"{key}{short_text(pair)}")
    if problem.groups > 1:
        parts.append(f"g{problem.groups}")
    return " ".join(parts + ["bias"] * bias)


# What ``python -m benchmarks.algorithms`` compares; hard for a library.
DEMO = {
    "3x5 kernel": "n64 c64x128 k3x5 h128 w256",
    "3x5 kernel, bias": "n64 c64x128 k3x5 h128 w256 bias",
    "3x7 kernel": "n8 c64x64 k3x7 h512 w512",
    "stride 5, dilation 2": "n16 c32x64 k3 h64 w128 s5 p1 d2",
    "stride 5, dilation 2, bias": "n16 c32x64 k3 h64 w128 s5 p1 d2 bias",
}

# KernelBench, level 1 (https://github.com/ScalingIntelligence/KernelBench): its 2-D transposed convolutions.
_PUBLIC = {
    "kb57": "n8 c64x64 k3 h1024 w1024",
    "kb65": "n8 c64x64 k3x7 h512 w512",
    "kb69": "n64 c64x128 k3x5 h128 w256",
    "kb71": "n8 c32x32 k3 h512 w1024",
    "kb75": "n16 c32x64 k3x5 h128 w256 s2x3 p1x2 d2x1 g4",
    "kb78": "n8 c32x32 k3x7 h512 w1024 p1x3",
    "kb81": "n16 c32x64 k3 h64 w128 s5 p1 d2",
}

# Layers of networks at their own sizes; batches as the networks are trained or served.
_MODELS = {
    # DCGAN (Radford et al. 2016), pytorch/examples: 64x64 images, batch 128.
    "dcgan1": "n128 c100x512 k4 h1 w1",
    "dcgan2": "n128 c512x256 k4 h4 w4 s2 p1",
    "dcgan3": "n128 c256x128 k4 h8 w8 s2 p1",
    "dcgan4": "n128 c128x64 k4 h16 w16 s2 p1",
    "dcgan5": "n128 c64x3 k4 h32 w32 s2 p1",
    # SimpleBaseline pose estimation (Xiao et al. 2018), ResNet-50, 256x192 images, batch 32.
    "pose1": "n32 c2048x256 k4 h8 w6 s2 p1",
    "pose3": "n32 c256x256 k4 h32 w24 s2 p1",
    # Mask R-CNN mask head (He et al. 2017), 256 regions; without its bias.
    "maskrcnn": "n256 c256x256 k2 h14 w14 s2",
    # U-Net (Ronneberger et al. 2015), milesial/Pytorch-UNet, 512x512 images, batch 4; 1 and 4 without their bias.
    "unet1": "n4 c1024x512 k2 h32 w32 s2",
    "unet2": "n4 c512x256 k2 h64 w64 s2 bias",
    "unet4": "n4 c128x64 k2 h256 w256 s2",
    # Segment Anything mask decoder (Kirillov et al. 2023), 16 prompts; without their bias.
    "sam1": "n16 c256x64 k2 h64 w64 s2",
    "sam2": "n16 c64x32 k2 h128 w128 s2",
    # FSRCNN (Dong et al. 2016), yjn870/FSRCNN-pytorch, a 512x512 image to 1536x1536; without its bias.
    "fsrcnn": "n1 c56x1 k9 h512 w512 s3 p4 op2",
    # FCN-8s (Long et al. 2015), 21 classes, 512x512 images, batch 8.
    "fcn8s": "n8 c21x21 k16 h64 w64 s8 p4",
    "fcn8s_up2": "n8 c21x21 k4 h16 w16 s2 p1",
    # CenterNet (Zhou et al. 2019), DLA-34 with depthwise upsampling, 512x512 images, batch 16.
    "depthwise": "n16 c128x128 k4 h64 w64 s2 p1 g128",
    "centernet_up4": "n16 c64x64 k8 h32 w32 s4 p2 g64",
    # StyleGAN2 (Karras et al. 2020), rosinality/stylegan2-pytorch: a batch of 8 becomes 8 groups of one image.
    "stylegan_up128": "n1 c4096x2048 k3 h64 w64 s2 g8",
    "stylegan_up256": "n1 c2048x1024 k3 h128 w128 s2 g8",
    # PointPillars (Lang et al. 2019), OpenPCDet on KITTI, batch 4.
    "pointpillars1": "n4 c64x128 k1 h248 w216",
    "pointpillars2": "n4 c128x128 k2 h124 w108 s2",
    "pointpillars3": "n4 c256x128 k4 h62 w54 s4",
    # HiFi-GAN V1 (Kong et al. 2020), jik876/hifi-gan: segments of 8192 samples, batch 16; 1-D, so height 1.
    "hifigan1": "n16 c512x256 k1x16 h1 w32 s1x8 p0x4 bias",
    "hifigan2": "n16 c256x128 k1x16 h1 w256 s1x8 p0x4 bias",
    "hifigan3": "n16 c128x64 k1x4 h1 w2048 s1x2 p0x1 bias",
    "hifigan4": "n16 c64x32 k1x4 h1 w4096 s1x2 p0x1 bias",
    # EnCodec 24 kHz (Defossez et al. 2022), facebookresearch/encodec: one second, batch 16; 1-D.
    "encodec1": "n16 c512x256 k1x16 h1 w75 s1x8 bias",
    "encodec2": "n16 c256x128 k1x10 h1 w600 s1x5 bias",
    "encodec4": "n16 c64x32 k1x4 h1 w12000 s1x2 bias",
}

# Small layers at batch 1, where the host's part of a call counts.
_LATENCY = {
    "tiny": "n1 c64x64 k3 h16 w16 p1",
    "odd": "n7 c37x53 k3x4 h45 w61 s2x3 p2x1 op1",
    "dcgan3_n1": "n1 c256x128 k4 h8 w8 s2 p1",
    "pose3_n1": "n1 c256x256 k4 h32 w24 s2 p1",
    "sam2_n1": "n1 c64x32 k2 h128 w128 s2 bias",
    "depthwise_n1": "n1 c128x128 k4 h64 w64 s2 p1 g128",
    "hifigan3_n1": "n1 c128x64 k1x4 h1 w2048 s1x2 p0x1 bias",
    "encodec2_n1": "n1 c256x128 k1x10 h1 w600 s1x5 bias",
}

# One axis at a time. `{}` is the value, `{p}` a padding that keeps stride 1 layers at their size.
_SWEEPS: dict[str, tuple[str, tuple[int, ...]]] = {
    "channels": ("n4 c{}x{} k4 h32 w32 s2 p1", (4, 16, 64, 256, 1024)),
    "kernel": ("n8 c64x64 k{} h64 w64 p{p}", (1, 2, 3, 5, 7, 11)),
    "stride": ("n8 c64x64 k4 h32 w32 s{}", (1, 2, 3, 4, 8)),
    "dilation": ("n8 c64x64 k3 h64 w64 d{} p{}", (1, 2, 4, 8)),
    "groups": ("n8 c64x64 k4 h64 w64 s2 p1 g{}", (1, 4, 16, 32, 64)),
    "batch": ("n{} c64x64 k4 h16 w16 s2 p1", (1, 4, 16, 64, 256)),
    "image": ("n1 c64x64 k4 h{} w{} s2 p1", (4, 16, 64, 256, 1024)),
}

_QUICK = ("seed2", "seed3", "kb71", "kb75", "dcgan2", "dcgan5", "pose3", "sam2", "depthwise", "hifigan3", "tiny")


def _build() -> dict[str, tuple[Workload, ...]]:
    def make(suite: str, layers: dict[str, str]) -> tuple[Workload, ...]:
        return tuple(Workload(name, suite, *parse_layer(text), quick=name in _QUICK) for name, text in layers.items())

    sweeps = {
        f"{axis}_{value}": text.format(value, value, p=value // 2)
        for axis, (text, values) in _SWEEPS.items()
        for value in values
    }
    seeds = {f"seed{i}": text for i, text in enumerate(DEMO.values())}
    suites = {"seeds": seeds, "public": _PUBLIC, "models": _MODELS, "sweep": sweeps, "latency": _LATENCY}
    return {name: make(name, layers) for name, layers in suites.items()}


SUITES = _build()


def select(suites: Iterable[str], names: Sequence[str] = (), quick: bool = False) -> list[Workload]:
    """The workloads of some suites, in order; with ``names`` those alone, with ``quick`` the quick ones."""
    chosen = [workload for suite in suites for workload in SUITES[suite]]
    if names:
        chosen = [workload for workload in chosen if workload.name in names]
    return [workload for workload in chosen if workload.quick] if quick else chosen


def custom(text: str) -> Workload:
    """A workload from one line. Raises ValueError as :func:`parse_layer`."""
    problem, bias = parse_layer(text)
    return Workload(format_layer(problem, bias), "layer", problem, bias)


def shrunk(workload: Workload, flops: int, traffic: int) -> Workload:
    """The largest smaller form of a workload that stays within both limits; its note says what became smaller.

    ``flops`` limits the useful floating-point operations of one forward pass; ``traffic`` limits input, weight and
    output together, in bytes at 4 bytes an element. The batch is halved down to 1 first, then the longer side of the
    image, again and again.

    >>> shrunk(custom("n64 c64x128 k3x5 h128 w256"), 600_000_000, 128 << 20).note
    'batch 64 -> 1, image 128x256 -> 32x64'
    """
    full = problem = workload.problem
    while problem.useful_flops > flops or problem.least_bytes(4) > traffic:
        height, width = problem.input_size
        size = (max(1, height // 2), width) if height >= width else (height, width // 2)
        smaller = replace(problem, batch=problem.batch // 2) if problem.batch > 1 else replace(problem, input_size=size)
        if smaller == problem or min(smaller.output_size) < 1:
            break
        problem = smaller
    notes = [f"batch {full.batch} -> {problem.batch}"] * (full.batch != problem.batch)
    if full.input_size != problem.input_size:
        notes.append(f"image {pair_text(full.input_size)} -> {pair_text(problem.input_size)}")
    return replace(workload, problem=problem, note=", ".join(notes))
