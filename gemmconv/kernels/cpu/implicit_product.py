"""``fused`` on a CPU: products without columns, in csrc/cpu/conv.h and wgrad.h.

Work is cut into bands of cells whose source stays in a core's cache, and a few bands into blocks of channels. No cut
changes the order of a sum, so results are equal to the bit for any number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gemmconv.kernels.base import DEFAULT_WORKSPACE_LIMIT, Config, Pass, accumulator_dtype, strides_of
from gemmconv.kernels.cpu import estimate
from gemmconv.kernels.cpu.base import CpuKernel, dense
from gemmconv.kernels.cpu.correlation import Axis, Table, table_of
from gemmconv.kernels.cpu.direct import KERNEL as DIRECT
from gemmconv.kernels.cpu.library import KINDS, Conv, WeightGrad, address, checksum, integers, kernels_for
from gemmconv.kernels.integers import even_share, up_to_multiple

_BAND_BYTES, _LARGE_BAND_BYTES = 384 << 10, 1 << 20  # bytes of staged planes; the latter for many weights
_MANY_WEIGHTS = 300_000  # weights of a group from which each band reads them from memory again
_STRIP, _SUMS_BYTES = 384, 96 << 10  # cells of a strip at most, and its sums
_LEAST_BAND = 48  # cells
_STAGED_SECONDS, _WEIGHT_SECONDS, _ITEM_SECONDS = 4e-10, 1.5e-10, 2e-6  # to stage a value, to read a weight, per item
_GRADIENT_CHANNELS = 32  # channels of input and of grad_output in an item of a weight gradient
_PARTIALS_SHARE = 4  # one part in so many of the workspace holds partial sums
_GRADIENT_BLOCKS = 4  # least blocks of a weight gradient, of channels and of cells: threads share a small layer so
_GRADIENT_ITEMS = 32  # least items of a weight gradient that has enough blocks
_LINE = 64  # bytes


class ImplicitProduct(CpuKernel):
    name = "cpu/conv"

    def seconds(self, config: Config, direction: Pass, tile: Any) -> float:
        return estimate.fused_seconds(config, direction)

    def workspace_bytes(self, config: Config, direction: Pass, tile: Any) -> int:
        """Bytes of scratch memory, which a thread keeps from call to call; packed weights come on top."""
        threads = torch.get_num_threads()
        if direction == "weight_grad":
            made = _Gradient(config)
            return made.partial_bytes + threads * made.scratch_bytes + _LINE
        return _Correlation(config, direction == "input_grad", threads).threads_bytes + 2 * _LINE

    def packed_weight_bytes(self, config: Config, direction: Pass) -> int:
        """Bytes of the packed weight that forward passes cache, unless the weight is being trained."""
        is_cached = direction == "forward" and not config.trained
        return _Correlation(config, False, 1).packed_bytes if is_cached else 0

    def why_not_device_or_dtype(self, config: Config, direction: Pass) -> str | None:
        if math.prod(config.problem.stride) > estimate.MOST_CLASSES:
            return f"the product of strides must be at most {estimate.MOST_CLASSES}, got {config.problem.stride}"
        p, most = config.problem, max(config.workspace_limit, DEFAULT_WORKSPACE_LIMIT)
        low, high = table_of(p, direction != "forward", False).shift_range
        if (least := 8 * (high - low) * max(p.in_channels, p.out_channels * math.prod(p.stride)) // p.groups) > most:
            return f"rows that a kernel reaches over must fit {most} bytes, got {least} for this kernel and dilation"
        return super().why_not_device_or_dtype(config, direction)

    def prepare(self, config: Config, direction: Pass, tile: Any) -> Callable[..., Any]:
        if direction == "weight_grad":
            return _prepare_weight_grad(config)
        return _prepare_correlation(config, direction == "input_grad")


class _Correlation:
    """The arguments of ``conv`` for one number of threads; see csrc/cpu/cpu.h.

    ``source_last`` is whether the source is in channels_last; the target is in the configuration's format.
    """

    def __init__(self, config: Config, is_gradient: bool, threads: int, source_last: bool = False) -> None:
        p, kernels, itemsize = config.problem, kernels_for(config.dtype), accumulator_dtype(config.dtype).itemsize
        together = not is_gradient and estimate.is_together(config)
        table = table_of(p, is_gradient, together)
        axes, entries, (low, high) = table.axes, table.entries, table.shift_range
        sizes = [(p.gemm_k, p.input_shape), (p.group_out_channels, p.output_shape)]
        (channels, source_shape), (targets, target_shape) = reversed(sizes) if is_gradient else sizes
        block = even_share(targets, kernels.rows)
        blocks, planes = -(-targets // block), math.prod(axis.source_step for axis in axes)
        products, pairs = (1, (axes[0].target_step, axes[1].target_step)) if together else (axes[2].target_step, (1, 1))
        jobs, rows = len(table.products) // products, block * (table.classes if together else 1)
        first_classes = [0, 0] if together else [c for job in range(jobs) for c in divmod(job, axes[1].target_step)]
        weight_strides = [sizes[1][0] * p.taps, p.taps]  # of input and of output channels
        weight_source, weight_target = reversed(weight_strides) if is_gradient else weight_strides
        tile = kernels.lanes * kernels.vectors
        band, bands, splits = _cut(config, table, channels * planes, targets, jobs * blocks, threads, kernels.lanes)
        fitting = _SUMS_BYTES // itemsize // (rows * products * tile)
        strip = max(1, min(-(-band // tile), _STRIP // tile, fitting)) * tile
        at_once = max(1, min(blocks, _SUMS_BYTES // itemsize // (rows * products * strip)))
        plane = _odd_lines(band + high - low + tile, itemsize)
        packed_values = blocks * up_to_multiple(rows, kernels.rows) * channels * len(entries)
        values = channels * planes * plane + at_once * products * rows * (strip + tile)
        values += strip * axes[2].target_step if KINDS[config.dtype] else 0
        self.packed_bytes = packed_values * p.groups * itemsize
        self.scratch_bytes = up_to_multiple(values * itemsize + 8 * len(entries), _LINE)
        self.threads_bytes = up_to_multiple(8 * threads, _LINE) + threads * self.scratch_bytes
        steps = [weight_target * channel for channel in range(block)]
        self._arrays = [
            integers(itertools.accumulate(map(len, table.products), initial=0)),
            integers(shift for _, shift, _ in entries),
            integers(source_class for source_class, _, _ in entries),
            integers(-1 if tap < 0 else tap + step for _, _, taps in entries for tap in taps for step in steps),
            integers(first_classes),
        ]
        self.struct = Conv(
            _view(config, source_shape, channels, axes, False, source_last),
            _view(config, target_shape, targets, axes, True, config.channels_last),
            p.groups,
            *(low, high, jobs, products, block, rows, blocks, splits, table.cells(p.batch), bands),
            *(band, strip, at_once, planes, plane),
            *(channels * targets * p.taps, weight_source, weight_target, packed_values),
            *(one.ctypes.data for one in self._arrays),
            pairs,
            any(-1 in taps for _, _, taps in entries),
        )
        self.address = ctypes.addressof(self.struct)


def _cut(
    config: Config, table: Table, planes: int, targets: int, units: int, threads: int, lanes: int
) -> tuple[int, int, int]:
    """The cut with the least estimate: cells of a band, number of bands, and parts that share the units of a band.

    Threads start apart and take items as they go, so the last item is taken to run while all other threads are idle.

    Args:
        planes: staged values of a cell.
        targets: channels of the target.
        units: units of work in a band; a part stages the whole band and computes some of them.
        threads: threads that share the work.
        lanes: cells of a vector.
    """
    low, high = table.shift_range
    total, span, groups = table.cells(config.problem.batch), high - low, config.problem.groups
    terms = sum(map(len, table.products)) * (table.classes if table.together else 1) * planes * targets
    many = planes * targets * max(map(len, table.products)) > _MANY_WEIGHTS
    room = min(_LARGE_BAND_BYTES if many else _BAND_BYTES, config.workspace_limit // threads - _SUMS_BYTES)
    most = max(span, _LEAST_BAND, room // accumulator_dtype(config.dtype).itemsize // planes - span)
    fewest, rate = -(-total // most), 2 * lanes * estimate.CYCLES
    best = (math.inf, 1, 1)
    for bands in {min(max(1, total // _LEAST_BAND), fewest * factor) for factor in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}:
        band = -(-total // bands)
        for splits in {min(units, one) for one in (1, 2, 3, 4, 6, 8, 16, 32)}:
            computed = (up_to_multiple(band, lanes) / rate + _WEIGHT_SECONDS) * terms / splits + _ITEM_SECONDS
            staged = (band + span) * planes * _STAGED_SECONDS  # by each thread that has a part of the band
            work = bands * groups * (min(splits, threads) * staged + splits * computed)
            best = min(best, ((work + (threads - 1) * (staged + computed)) / threads, bands, splits))
    band = -(-total // best[1])
    return band, -(-total // band), best[2]


def _view(
    config: Config, shape: tuple[int, ...], channels: int, axes: tuple[Axis, ...], is_target: bool, last: bool
) -> tuple[int, ...]:
    """A ``view_t``: the images of a tensor of this shape, cut into cells as source or as target."""
    strides = strides_of(shape, torch.channels_last if last else torch.contiguous_format)
    sides = [(one.extent, one.target_step, one.base) if is_target else (one.size, one.source_step, 0) for one in axes]
    (size, step, base), pitch = map(list, zip(*sides, strict=True)), [axis.pitch for axis in axes]
    if size[2] == pitch[2] and step[1] == step[2] == 1:  # rows that fill their pitch are one long row
        size[1:], pitch[1:] = (1, size[1] * size[2]), (1, pitch[1] * pitch[2])
    of_axes = *size, *step, *base, *pitch
    return KINDS[config.dtype], shape[0], channels, *of_axes, *strides[:2], *[0] * (5 - len(shape)), *strides[2:]


def _odd_lines(values: int, itemsize: int) -> int:
    """``values`` rounded up to an odd number of cache lines, so that planes lie in different sets of a cache."""
    lines = -(-values * itemsize // _LINE)
    return (lines | 1) * _LINE // itemsize


_thread_memory = threading.local()


def _scratch(size: int, what: str = "scratch") -> int:
    """The address of this thread's scratch memory, reused by later calls: new memory costs a page fault a page."""
    memory: torch.Tensor | None = getattr(_thread_memory, what, None)
    if memory is None or memory.numel() < size + _LINE:
        memory = torch.empty(size + _LINE, dtype=torch.uint8, device="cpu")  # whatever the default device is
        setattr(_thread_memory, what, memory)
    return up_to_multiple(memory.data_ptr(), _LINE)


def _prepare_correlation(config: Config, is_gradient: bool) -> Callable[..., torch.Tensor]:
    p, kernels = config.problem, kernels_for(config.dtype)
    arguments_for = functools.cache(functools.partial(_Correlation, config, is_gradient))
    shape = p.input_shape if is_gradient else p.output_shape
    strides = strides_of(shape, config.memory_format)
    directly = DIRECT.prepare(config, "input_grad" if is_gradient else "forward")
    key = is_gradient, p.groups, p.kernel_size, p.stride, p.padding, p.dilation, estimate.is_together(config)

    def call(source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        given = source, weight
        source, weight, threads = dense(source), weight.contiguous(), torch.get_num_threads()
        arguments = arguments_for(threads, not source.is_contiguous())
        target = source.new_empty_strided(shape, strides)
        if target.numel() == 0:
            return target

        def pack(packed: int) -> bool:
            return not kernels.pack(arguments.address, weight.data_ptr(), packed, threads)

        if is_gradient or config.trained:
            packed = _scratch(arguments.packed_bytes, "packed")
            finite = pack(packed)
        else:
            owner, finite = _packed_weight(given[1], key, arguments.packed_bytes, pack)  # the call keeps owner alive
            packed = owner.data_ptr()
        if finite:
            values = None if bias is None else bias.contiguous()
            finite = not kernels.conv(
                *(arguments.address, source.data_ptr(), packed, address(values), target.data_ptr()),
                *(_scratch(arguments.threads_bytes), arguments.scratch_bytes, threads),
            )
        return target if finite else directly(*given, bias)

    return call


class _Packed(NamedTuple):
    """The packed forms of a weight, and the version, address and checksum of the contents they belong to."""

    state: tuple[int, int, int]
    forms: dict[Any, tuple[torch.Tensor, bool]]


_packed: dict[int, _Packed] = {}  # by the id of a weight that is still in memory


def _packed_weight(weight: torch.Tensor, key: Any, size: int, pack: Callable[[int], bool]) -> tuple[torch.Tensor, bool]:
    """A weight's packed form and whether it is finite, cached until the weight's contents change.

    A tensor's version does not count writes through ``weight.data``, so each call computes a checksum too.
    """

    def made() -> tuple[torch.Tensor, bool]:
        packed = weight.new_empty(size, dtype=torch.uint8)
        return packed, pack(packed.data_ptr())

    if not weight.is_leaf or weight.is_inference() or not weight.is_contiguous():
        return made()
    state, number = (weight._version, weight.data_ptr(), checksum(weight)), id(weight)
    known = _packed.get(number)
    if known is None:
        weakref.finalize(weight, _packed.pop, number, None)
    if known is None or known.state != state:
        known = _packed[number] = _Packed(state, {})
    if (form := known.forms.get(key)) is None:
        form = known.forms[key] = made()
    return form


class _Gradient:
    """The arguments of ``wgrad`` for any number of threads; see csrc/cpu/cpu.h."""

    def __init__(self, config: Config, input_last: bool = False, grad_last: bool = False) -> None:
        p, kernels = config.problem, kernels_for(config.dtype)
        itemsize = accumulator_dtype(config.dtype).itemsize
        table = table_of(p, True, False)
        axes, (low, high) = table.axes, table.shift_range
        by_tap = sorted((tap, source_class, shift) for source_class, shift, (tap,) in table.entries)
        planes = math.prod(axis.source_step for axis in axes)
        of_input, of_output = p.gemm_k, p.group_out_channels
        input_block = min(of_input, _GRADIENT_CHANNELS)
        grad_block = min(of_output, max(kernels.dot_columns, _GRADIENT_CHANNELS // planes))
        total, lanes = table.cells(p.batch), kernels.lanes
        blocks = p.groups * -(-of_input // input_block) * -(-of_output // grad_block)
        room = _BAND_BYTES // itemsize // (input_block + grad_block * planes) - (high - low)
        room = min(room, total * blocks // _GRADIENT_BLOCKS)
        band = up_to_multiple(even_share(total, max(room, 8 * lanes, (high - low) // 2)), lanes)
        bands = -(-total // band)
        sum_bytes = math.prod(p.weight_shape) * itemsize
        fitting = config.workspace_limit // _PARTIALS_SHARE // sum_bytes
        slices = max(1, min(bands, -(-_GRADIENT_ITEMS // blocks), fitting))
        in_place = slices == 1 and not KINDS[config.dtype]
        self.partial_bytes = 0 if in_place else slices * sum_bytes
        input_plane, grad_plane = (_odd_lines(one, itemsize) for one in (band + lanes, band + high - low + lanes))
        values = input_block * input_plane + grad_block * planes * grad_plane
        self.scratch_bytes = up_to_multiple(values * itemsize, _LINE)
        self._arrays = [integers([one[i] for one in by_tap]) for i in (2, 1)]
        self.struct = WeightGrad(
            _view(config, p.input_shape, of_input, axes, True, input_last),
            _view(config, p.output_shape, of_output, axes, False, grad_last),
            *(p.groups, p.taps, low, high, input_block, grad_block, band, bands, slices, planes),
            *(input_plane, grad_plane),
            *(one.ctypes.data for one in self._arrays),
        )
        self.address = ctypes.addressof(self.struct)


def _prepare_weight_grad(config: Config) -> Callable[..., torch.Tensor]:
    p, kernels = config.problem, kernels_for(config.dtype)
    arguments_for = functools.cache(functools.partial(_Gradient, config))
    directly = DIRECT.prepare(config, "weight_grad")

    def call(grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        grad, given = dense(grad_output), dense(input)
        arguments = arguments_for(not given.is_contiguous(), not grad.is_contiguous())
        gradient, threads = grad.new_empty(p.weight_shape), torch.get_num_threads()
        if gradient.numel() == 0 or p.batch == 0:
            return gradient.zero_()
        scratch = _scratch(threads * arguments.scratch_bytes + arguments.partial_bytes)
        partials = scratch + threads * arguments.scratch_bytes if arguments.partial_bytes else gradient.data_ptr()
        bad = kernels.wgrad(
            *(arguments.address, given.data_ptr(), grad.data_ptr(), gradient.data_ptr(), partials),
            *(scratch, arguments.scratch_bytes, threads),
        )
        return directly(grad_output, input) if bad else gradient

    return call


KERNEL = ImplicitProduct()
