"""Transposed convolutions of one and three axes, made of the operators for images.

A signal is an image of height 1, by views. :func:`choose_way` says how a volume is computed: as one product by kernels
of its own (gemmconv/ops/volumes.py), by torch's operator, or as images, all depth slices of a batch at once. For this,
outputs fall into S phases along the depth (docs/glossary.md): output slice ``j * S + r`` of phase r reads input slice
``j + shift`` through each tap of the phase. The slices of a phase are one transposed convolution of images, whose input
channels are those of the slices that its taps read, side by side:

    S=2 P=1 K=4:  phase 0 has taps 1 and 3, shifts 0 and -1: images j and j-1, twice the input channels
                  phase 1 has taps 0 and 2, shifts 1 and 0: images j+1 and j

Sums over depth taps are thus part of one product, which is rounded once, and no columns are written. If the kernel's
depth equals its stride, all phases read one slice, and are one convolution with S times the output channels.
All operators that make images have gradients, so gradients, transforms and graphs work as for images. The product's
operator has gradients, but no rules for transforms, which torch's operator serves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, unflatten  # the method of this name is not compiled where there is a default device
from torch.autograd import forward_ad

from gemmconv import arrays, flops, tuned, validation
from gemmconv.device import DeviceSpec
from gemmconv.dispatch import (
    are_dense,
    is_exporting,
    is_exporting_to_onnx,
    tensors_need_torch,
    transforms_active,
    transforms_need_torch,
)
from gemmconv.functional import conv_transpose2d
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Pass, Precision, why_no_kernels
from gemmconv.kernels.phases import axis_taps
from gemmconv.ops import signatures, volumes
from gemmconv.ops.autocast import current_dtype
from gemmconv.ops.call_cache import arguments_key, find_or_make
from gemmconv.ops.recording import PlainCall
from gemmconv.ops.schemas import Tensors, is_channels_last
from gemmconv.ops.volumes import DENSE, FEW, Volume
from gemmconv.selection import NAMES, choose, current_config, rounds_as_asked, torch_precision

Ints = int | Sequence[int]
Way = Literal["images", "product", "torch"]  # of computing a volume
_LEAST_OF_A_GROUP = 8  # channels, where there are several groups, that conv/gemm_mma takes
_WIDE = 16  # taps of a slice from which on Hopper's kernels for images are clearly faster than the product
# Elements of an output from which on images may pay: forward, in a training step, and on a CPU.
_LARGE, _LARGE_STEP, _LARGE_ON_A_CPU = 1 << 24, 1 << 26, 1 << 21


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    algorithm: str = "auto",
    precision: Precision | None = None,
    workspace_limit: int | None = None,
) -> Tensor:
    """Transposed 1-D convolution, as torch.nn.functional.conv_transpose1d defines it.

    Args:
        input: ``[N, C_in, L]`` or ``[C_in, L]``.
        weight: ``[C_in, C_out/groups, K]``.
        bias: ``[C_out]`` or None.
        stride, padding, output_padding, dilation: an int, in elements.
        groups, algorithm, precision, workspace_limit: see conv_transpose2d.

    Returns:
        ``[N, C_out, L_out]`` (or without N).

    Raises:
        TypeError, RuntimeError, ValueError, NotImplementedError: see conv_transpose2d.

    >>> conv_transpose1d(torch.ones(1, 4, 8), torch.ones(4, 2, 3), stride=2).shape
    torch.Size([1, 2, 17])
    """
    geometry = stride, padding, output_padding, groups, dilation
    options: Any = {"algorithm": algorithm, "precision": precision, "workspace_limit": workspace_limit}
    if arrays.are_foreign(input, weight, bias):
        return arrays.call(conv_transpose1d, (input, weight, bias), *geometry, **options)
    try:
        images, kernels = input.unsqueeze(-2), weight.unsqueeze(-2)
        output = conv_transpose2d(images, kernels, bias, *of_height_1(*geometry), **options)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        _checked(1, input, weight, bias, geometry, options)  # raises in the words of one axis what is the caller's
        raise
    return output.squeeze(-2)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    algorithm: str = "auto",
    precision: Precision | None = None,
    workspace_limit: int | None = None,
) -> Tensor:
    """Transposed 3-D convolution, as torch.nn.functional.conv_transpose3d defines it.

    Args:
        input: ``[N, C_in, D, H, W]`` or ``[C_in, D, H, W]``.
        weight: ``[C_in, C_out/groups, K_d, K_h, K_w]``.
        bias: ``[C_out]`` or None.
        stride, padding, output_padding, dilation: an int or ``(depth, height, width)``, in elements.
        groups, algorithm, precision: see conv_transpose2d; an algorithm that is named computes the volume as images.
        workspace_limit: bytes of temporary memory; copies of slices are not counted.

    Returns:
        ``[N, C_out, D_out, H_out, W_out]`` (or without N), channels_last_3d where the input or the weight is.

    Raises:
        TypeError, RuntimeError, ValueError, NotImplementedError: see conv_transpose2d.

    >>> conv_transpose3d(torch.ones(1, 4, 3, 8, 8), torch.ones(4, 2, 2, 2, 2), stride=2).shape
    torch.Size([1, 2, 6, 16, 16])
    """
    geometry = stride, padding, output_padding, groups, dilation
    options: Any = {"algorithm": algorithm, "precision": precision, "workspace_limit": workspace_limit}
    key = None
    # A repeated call: a call of the same signature was prepared before, and its checks were made then.
    if not torch.compiler.is_dynamo_compiling() and (text := arguments_key((*geometry, *options.values()))) is not None:
        call, key = signatures.find_call(input, weight, bias, text)
        if call is not None:
            return call(input, weight, bias)
        key = key if key is not None and are_dense(input, weight, bias) else None
    if key is None and arrays.are_foreign(input, weight, bias):
        return arrays.call(conv_transpose3d, (input, weight, bias), *geometry, **options)
    problem = _checked(3, input, weight, bias, geometry, options)

    def make() -> PlainCall:
        if input.dim() == 4:
            by = problem.geometry
            return lambda x, weight, bias: conv_transpose3d(x.unsqueeze(0), weight, bias, *by, **options).squeeze(0)
        if _is_for_torch((input, weight, bias), problem, algorithm, precision):
            return lambda input, weight, bias: torch.conv_transpose3d(input, weight, bias, *problem.geometry)
        dtype, last = current_dtype(input), is_channels_last(input) or is_channels_last(weight)
        rounding = precision or torch_precision(dtype, input.device)
        volume = Volume(problem, dtype, input.device, rounding, last, workspace_limit, precision)
        way: Way = "images"
        if algorithm == "auto":
            records = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
            way = settled(choose_way(volume, "grads" if records else "forward"), volume, records)
        if key is None:
            return lambda *tensors: compute(way, tensors, volume, algorithm)
        return prepare(way, (input, weight, bias), volume, algorithm)

    call = find_or_make(key, make)
    return call(input, weight, bias)


def choose_way(volume: Volume, direction: Pass = "forward", spec: DeviceSpec | None = None) -> Way:
    """How ``auto`` computes a volume: as it was measured by :func:`gemmconv.tune`, else by a rule.

    Args:
        direction: ``"forward"``, or ``"grads"`` for a call whose gradients are recorded.
        spec: properties of another GPU than the volume's device, to explain.
    """
    if torch.compiler.is_compiling():
        if volume.device.type == "cpu" and not is_exporting():
            return "torch"  # which would serve the images in a graph for a CPU, too
        return way_of(volume, direction, volumes.is_hopper(volume.device))
    config = volume.config(spec)
    if (entry := tuned.entry_of(config, direction)) is not None:
        return cast(Way, entry.algorithms[0])
    if spec is None and why_no_kernels(volume.device) is not None:
        return "torch"
    return way_of(volume, direction, config.spec.is_hopper)


def settled(way: Way, volume: Volume, trains: bool) -> Way:
    """The way of a call, or images where that way would round otherwise than was requested.

    It would if torch's setting differs, and torch's operator has a part: it computes all of ``"torch"``, and some
    gradients of ``"product"``, if the call ``trains``: a backward pass may follow.
    """
    if rounds_as_asked(volume.dtype, volume.device, volume.requested):
        return way
    return "product" if way == "product" and not trains else "images"


def prepare(way: Way, tensors: Tensors, volume: Volume, algorithm: str = "auto") -> PlainCall:
    """Prepare the eager call of a batch of volumes in one way; see :func:`compute`."""
    if way == "product" and volumes.program_of(volume.config()) is None:  # torch's forward pass, and our gradients
        way = settled(way, volume, trains=True)
    if way == "product":
        return volumes.prepare(tensors, volume)
    return lambda *tensors: compute(way, tensors, volume, algorithm)


def compute(way: Way, tensors: Tensors, volume: Volume, algorithm: str) -> Tensor:
    """Compute a batch of volumes in one way; ``algorithm`` is that of the images."""
    input, weight, bias = tensors
    dtype, geometry = volume.dtype, volume.problem.geometry
    if way == "product":  # whose operator has no rules for tangents and transforms
        has_tangents = not torch.compiler.is_compiling() and forward_ad._current_level >= 0
        way = settled("torch", volume, trains=True) if has_tangents or transforms_active() else way
    if way == "torch":
        return torch.conv_transpose3d(input, weight, bias, *geometry)
    # Autocast may have cast the input before. Slices are then copied in fewer bytes.
    input, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if way == "product":
        if not torch.compiler.is_compiling():
            flops.register()
        # What is requested may be None: then each call follows torch's setting, in a compiled graph too.
        return volumes.OPERATOR(input, weight, bias, *geometry, volume.requested, volume.workspace_limit)
    return _as_images(input, weight, bias, volume, algorithm)


def image_problems(problem: Problem) -> list[Problem]:
    """The problems of images that a signal or a volume is computed as, the one with the most taps first.

    A problem of images is its own.

    >>> volume = Problem(2, 8, 4, 1, (5, 6, 7), (4, 4, 4), (2, 2, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1))
    >>> [one.input_shape for one in image_problems(volume)]
    [(10, 16, 6, 7)]
    """
    p, rank = problem, len(problem.input_size)
    fields: tuple[Any, ...] = p.input_size, p.kernel_size, p.stride, p.padding, p.output_padding, p.dilation
    if rank == 1:
        high = ((one, *of) for one, of in zip((1, 1, 1, 0, 0, 1), fields, strict=True))
        return [Problem(p.batch, p.in_channels, p.out_channels, p.groups, *high)]
    if rank == 2:
        return [p]
    (size, *planar), depth = (of[1:] for of in fields), p.input_size[0]
    if p.is_apart_along(0):  # all phases are output channels of images, or of one high image
        count, size = (1, (size[0] * depth, size[1])) if p.is_apart_along(1) else (depth, size)
        return [Problem(p.batch * count, p.in_channels, p.out_channels * p.stride[0], p.groups, size, *planar)]
    phases = ((p.batch * count, p.in_channels * len(taps)) for _, count, taps in _depth_phases(p) if taps)
    found = sorted(dict.fromkeys(phases), key=lambda of_phase: -of_phase[1])  # most taps first
    found = found or [(0, p.in_channels)]  # no image where no tap reaches an output slice
    return [Problem(*of_phase, p.out_channels, p.groups, size, *planar) for of_phase in found]


def _depth_phases(problem: Problem) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """The phases of a volume's depth axis that have outputs.

    Returns for each its first output slice, the number of its slices, and its taps with their shifts: the i-th slice
    reads a tap at input slice ``i + shift``. torch.compile traces this function, and no cached one.
    """
    p, stride, size = problem, problem.stride[0], problem.output_size[0]
    taps = axis_taps.__wrapped__("forward", p.kernel_size[0], stride, p.padding[0], p.dilation[0])
    of_phase = ([(of.tap, of.shift) for of in taps if of.phase == first] for first in range(min(stride, size)))
    return [(first, -(-(size - first) // stride), these) for first, these in enumerate(of_phase)]


def of_height_1(stride: Ints, padding: Ints, output_padding: Ints, groups: int, dilation: Ints) -> tuple[Any, ...]:
    """Stride, padding, output_padding, groups and dilation of a signal, for an image of height 1."""
    given = validation.geometry("conv_transpose1d", stride, padding, output_padding, groups, dilation, rank=1)
    steps, pads, more, groups, apart = given
    return (1, *steps), (0, *pads), (0, *more), groups, (1, *apart)


def _is_for_torch(tensors: Tensors, problem: Problem, algorithm: str, precision: Precision | None) -> bool:
    """Whether torch's own operator has to serve a call: by name, of complex tensors, in exports and transforms."""
    if is_exporting_to_onnx():
        return True
    input, dtype = tensors[0], current_dtype(tensors[0])
    rounds_right = rounds_as_asked(dtype, input.device, precision)
    if algorithm == "native" and not rounds_right:
        choose(current_config(problem, dtype, input.device, precision), algorithm, "conv_transpose3d")  # raises
    if algorithm != "auto":
        return algorithm == "native"
    return input.is_complex() or (rounds_right and (transforms_need_torch() or tensors_need_torch(*tensors)))


def _checked(rank: int, input: Any, weight: Any, bias: Any, geometry: Any, options: Any) -> Problem:
    """The problem of a call, with a batch of 1 if it has none, after all checks."""
    where = f"conv_transpose{rank}d"
    named = (("input", input), ("weight", weight), *((("bias", bias),) if bias is not None else ()))
    for name, one in named:
        validation.tensor(where, name, one)
    validation.choice(where, options["algorithm"], NAMES, options["precision"], options["workspace_limit"])
    shape = input.shape if input.dim() != 1 + rank else (1, *input.shape)
    problem = validation.problem(where, shape, weight.shape, validation.geometry(where, *geometry, rank=rank))
    validation.same_kind(where, named, current_dtype)
    validation.bias_shape(where, bias, problem.out_channels)
    validation.sizes(where, problem, input.dtype.itemsize)
    return problem


def way_of(volume: Volume, direction: Pass, is_hopper: bool) -> Way:
    """The way of computing a volume that is expected to take the least time: a rule from measured layers.

    Times torch's speed in NCDHW on an H200 (torch 2.11, cuDNN 9.19), layers at several sizes, TF32 and bfloat16:

    - forward, kernels for volumes had 0.9 to 65 times (see :func:`volumes.torch_is_faster`); images were faster than
      these for a depth of 1 (1.3 to 2.7 times), for large depthwise layers (2.5 times) and for kernels of 5 x 5 and
      5 x 7 in a slice under a stride of 1 (1.7 and 2.3 times; in compiled graphs 1.4 times for 3 x 3, too);
    - gradients by ``gemm_col2im`` had 0.6 to 90 times (see :func:`volumes.has_own_gradients`); those of images were
      1.3 to 3 times as fast as these for few channels, many groups, a depth of 1, and without TF32.

    Images keep the host for 0.1 to 0.5 ms, in a training step for 0.4 to 1.8 ms, so only large outputs are images;
    kernels for volumes take no more of it than torch's operator. On two cores of an AMD EPYC, images had 1.4 to 2.5
    times torch's speed for large volumes under a kernel equal to the stride, 2.1 to 2.7 times for strides with
    dilation, 0.5 to 1.2 times for others.
    """
    p, last, is_step = volume.problem, volume.last, direction == "grads"
    channels, is_dense = (p.gemm_k, p.group_out_channels), volumes.is_dense(p)
    if volume.device.type != "cuda":
        if max(p.dilation) > 1 and max(p.stride) > 1:
            return "images"
        return "images" if p.is_apart and not last and _has_outputs(p, _LARGE_ON_A_CPU) else "torch"
    if is_dense and not is_hopper:  # not measured there
        return "torch"
    is_flat = p.kernel_size[0] == 1 and p.is_apart
    least = _LARGE_STEP if is_step else _LARGE
    if last:  # which kernels for volumes do not take: images compete with torch's operator
        return "images" if (is_flat or not is_dense) and _has_outputs(p, least) else "torch"
    if is_step:
        is_ieee = volume.dtype == torch.float32 and volume.precision == "ieee"
        images_are_faster = p.groups > 1 or min(channels) < DENSE or (p.is_apart and (is_flat or is_ieee))
    else:
        # A compiled graph copies slices in few kernels, so images pay for fewer taps there.
        many_taps = torch.compiler.is_compiling() or math.prod(p.kernel_size[1:]) >= _WIDE
        is_wide = is_hopper and max(p.stride) == 1 and many_taps and max(channels) <= FEW
        images_are_faster = is_flat or is_wide or min(channels) < (2 if p.groups == 1 else _LEAST_OF_A_GROUP)
        least = least // 2 if is_wide else least  # many taps keep the device for longer
    if images_are_faster and _has_outputs(p, least):  # else the host takes too long
        return "images"
    if is_step and volumes.has_own_gradients(p):
        return "product"
    return "torch" if volumes.torch_is_faster(p, volume.dtype, volume.precision) else "product"


def _has_outputs(problem: Problem, least: int) -> bool:
    """Whether the output has at least so many elements; False in an export, whose sizes may change."""
    return not is_exporting() and problem.batch * problem.out_channels * problem.out_pixels >= least


def _as_images(input: Tensor, weight: Tensor, bias: Tensor | None, volume: Volume, algorithm: str) -> Tensor:
    """The transposed convolution of ``[N, C_in, D, H, W]``; ``volume.last``: the result is in channels_last_3d."""
    p, last = volume.problem, volume.last
    batch, depth, groups = p.batch, p.input_size[0], p.groups
    options: Any = {"algorithm": algorithm, "precision": volume.requested, "workspace_limit": volume.workspace_limit}
    planar: Any = p.stride[1:], p.padding[1:], p.output_padding[1:], groups, p.dilation[1:]
    if p.is_apart_along(0):  # all phases read one slice, and are output channels
        phases, merged = p.stride[0], p.is_apart_along(1)
        # The phase is the outer part of the channels where channels lie innermost, so that copies move whole pixels.
        kernels = weight.transpose(1, 2) if last else weight
        if bias is not None:
            of_groups = unflatten(bias, 0, (groups, 1, -1)).expand(-1, phases, -1)
            bias = of_groups.flatten() if last else bias.repeat_interleave(phases)
        # Rows of neighbouring slices do not meet either: then a volume is one high image, without a copy.
        images = input.flatten(2, 3) if merged else _slices(input, [0], depth, 1, last)
        images = conv_transpose2d(images, kernels.flatten(1, 2), bias, *planar, **options)
        output = unflatten(images, 2, (depth, -1)) if merged else unflatten(images, 0, (batch, depth)).transpose(1, 2)
        if last:
            of_phases = unflatten(output, 1, (groups, phases, -1)).permute(0, 4, 2, 5, 6, 1, 3)
            output = of_phases.flatten(1, 2).flatten(4, 5).permute(0, 4, 1, 2, 3)
        else:
            output = unflatten(output, 1, (-1, phases)).transpose(2, 3).flatten(2, 3)
    else:
        taps_of, found = unflatten(weight, 0, (groups, -1)), []  # [groups, C_in/groups, C_out/groups, K_d, K_h, K_w]
        parts = _depth_phases(p)
        for _, count, taps in parts:
            if taps:
                images = _slices(input, [shift for _, shift in taps], count, groups, last)
                kernels = torch.stack([taps_of[:, :, :, tap] for tap, _ in taps], 1).flatten(0, 2)
                found.append(conv_transpose2d(images, kernels, bias, *planar, **options))
            else:  # no tap reaches these slices
                connected = input[:0].sum() + weight[:0].sum()  # 0, whose gradients are zeros as torch's are
                value = connected + (input.new_zeros(p.out_channels) if bias is None else bias)
                found.append(value[:, None, None].expand(batch * count, -1, *p.output_size[1:]))
        places = tuple(part[0] for part in parts)
        # torch.jit.trace and, without gradients, torch.compile do not take the function: they trace its operators.
        is_traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
        interleave = _Interleave.forward if is_traced else _Interleave.apply
        output = interleave(batch, p.output_size[0], p.stride[0], places, last, *found)
    return output.contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)


def _slices(volume: Tensor, begins: Sequence[int], count: int, groups: int, last: bool) -> Tensor:
    """Images ``[N * count, channels, H, W]`` of ``count`` slices from each beginning on, side by side in channels.

    Slices beyond the volume are zero. Channels of a group stay together. ``last``: the result is in channels_last.
    """
    before, after = max(0, -min(begins)), max(0, max(begins) + count - volume.shape[2])
    if before or after:
        volume = torch.nn.functional.pad(volume, (0, 0, 0, 0, before, after))
    images, axis = (volume.permute(0, 2, 3, 4, 1), 4) if last else (volume.transpose(1, 2), 2)
    parts = [images.narrow(1, before + begin, count) for begin in begins]
    if len(parts) == 1:
        joined = parts[0]
    elif groups == 1:
        joined = torch.cat(parts, axis)
    else:
        joined = torch.stack([unflatten(part, axis, (groups, -1)) for part in parts], axis + 1).flatten(axis, axis + 2)
    joined = joined.flatten(0, 1)
    return joined.permute(0, 3, 1, 2) if last else joined


class _Interleave(torch.autograd.Function):
    """The slices of all phases as one volume ``[N, C, D, H, W]``: phase i has slices places[i], places[i] + S, ..."""

    generate_vmap_rule = True

    @staticmethod
    def forward(batch: int, depth: int, stride: int, places: tuple[int, ...], last: bool, *phases: Tensor) -> Tensor:
        channels, height, width = phases[0].shape[1:]
        shape = (batch, depth, height, width, channels) if last else (batch, channels, depth, height, width)
        volume = phases[0].new_empty(shape)
        volume = volume.permute(0, 4, 1, 2, 3) if last else volume
        for place, images in zip(places, phases, strict=True):
            part = volume[:, :, place::stride]
            part.copy_(unflatten(images, 0, (batch, part.shape[2])).transpose(1, 2))
        return volume

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.arguments, ctx.shapes = inputs[:5], [phase.shape for phase in inputs[5:]]
        _, _, ctx.stride, ctx.places, ctx.last = ctx.arguments

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts = (grad[:, :, place :: ctx.stride] for place in ctx.places)
        return *(None,) * 5, *(_slices(part, [0], part.shape[2], 1, ctx.last) for part in parts)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        given = next(one for one in tangents[5:] if one is not None)
        pairs = zip(tangents[5:], ctx.shapes, strict=True)
        return _Interleave.forward(*ctx.arguments, *(given.new_zeros(of) if one is None else one for one, of in pairs))
