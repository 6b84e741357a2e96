"""One GEMM over a table of taps, on the tensor cores of any GPU since sm_80: host side of csrc/conv/gemm_mma.cu.

It computes forward passes and input gradients of groups with several channels. csrc/weights/pack.cu lays the weights out
before, in a launch of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from gemmconv.device import DeviceSpec
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Kernel, Pass
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.integers import power_of_two
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros
from gemmconv.kernels.program import Extent3, Launch, Params, Program, gathering
from gemmconv.kernels.splits import reduce
from gemmconv.kernels.weights import pack

_COST = costs_of("conv/gemm_mma")
_MOST_PHASES, _MOST_TAPS = 128, 512  # of the tables in the kernel's params
_INT32_MAX = 2**31 - 1
import os
STG = int(os.environ.get('STG','2'))
GATHER = int(os.environ.get('GATHER','1'))
# Warps along cells and channels, and tiles of 16 cells and of 8 channels of each warp.
MENU = (
    (2, 2, 4, 8),
    (4, 1, 4, 8),
    (2, 2, 4, 4),
    (4, 1, 4, 4),
    (4, 1, 4, 2),
    (4, 1, 4, 1),
    (2, 2, 2, 4),
    (2, 3, 4, 8),
    (2, 3, 2, 4),
    (1, 4, 4, 8),
    (1, 4, 4, 4),
)


@dataclass(frozen=True)
class Layer:
    """A pass as the kernel sees it: cells, shifts and taps of three axes; the depth of an image is 1.

    Attributes:
        channels: input and output channels of a group.
        step, span: inputs and outputs from a cell to the next.
        taps: for each phase, its taps, and the shift of each from a cell's first input.
    """

    problem: Problem
    direction: Pass

    @property
    def channels(self) -> tuple[int, int]:
        p = self.problem
        own = p.in_channels // p.groups, p.out_channels // p.groups
        return own if self.direction == "forward" else (own[1], own[0])

    @property
    def sizes(self) -> tuple[Extent3, Extent3]:
        """Pixels of inputs and of outputs."""
        sizes = _of_three(self.problem.input_size, 1), _of_three(self.problem.output_size, 1)
        return sizes if self.direction == "forward" else (sizes[1], sizes[0])

    @property
    def step(self) -> Extent3:
        return (1, 1, 1) if self.direction == "forward" else _of_three(self.problem.stride, 1)

    @property
    def span(self) -> Extent3:
        return _of_three(self.problem.stride, 1) if self.direction == "forward" else (1, 1, 1)

    @property
    def cells(self) -> Extent3:
        """Cells of an image."""
        return _of_three([-(-size // span) for size, span in zip(self.sizes[1], self.span, strict=True)], 1)

    @property
    def taps(self) -> list[list[tuple[int, Extent3]]]:
        return _taps(self.problem, self.direction)

    @property
    def reach(self) -> tuple[Extent3, Extent3]:
        """Least and largest shift of each axis."""
        shifts = [*zip(*(shift for phase in self.taps for _, shift in phase), strict=True)]
        return _of_three([*map(min, shifts)], 0), _of_three([*map(max, shifts)], 0)

    def patch(self, cells: Extent3, wide: int) -> tuple[Extent3, Extent3]:
        """The least shift of a patch, and the pixels that a tile of cells reads; columns in whole groups of ``wide``."""
        first, last = self.reach
        first = first[0], first[1], first[2] // wide * wide
        axes = zip(cells, self.step, first, last, strict=True)
        depth, height, width = ((count - 1) * step + most - least + 1 for count, step, least, most in axes)
        return first, (depth, height, -(-width // wide) * wide)


def _of_three(values: Any, other: int) -> Extent3:
    first, second, third = (*(other,) * (3 - len(values)), *values)
    return first, second, third


@lru_cache(maxsize=1024)
def _taps(problem: Problem, direction: Pass) -> list[list[tuple[int, Extent3]]]:
    p, phases = problem, list[list[tuple[int, Extent3]]]()
    kernel, stride, padding, dilation = (
        _of_three(values, other)
        for values, other in ((p.kernel_size, 1), (p.stride, 1), (p.padding, 0), (p.dilation, 1))
    )
    taps = [*enumerate(itertools.product(*map(range, kernel)))]
    if direction == "input_grad":
        return [[(i, _shift(tap, dilation, padding)) for i, tap in taps]]
    for phase in itertools.product(*map(range, stride)):
        reached = [
            (i, [divmod(r + pad - k * d, s) for r, pad, k, d, s in zip(phase, padding, tap, dilation, stride, strict=True)])
            for i, tap in taps
        ]
        phases.append([(i, _of_three([q for q, _ in axes], 0)) for i, axes in reached if not any(r for _, r in axes)])
    return phases


def _shift(tap: Any, dilation: Extent3, padding: Extent3) -> Extent3:
    return _of_three([k * d - pad for k, d, pad in zip(tap, dilation, padding, strict=True)], 0)


@dataclass(frozen=True)
class Tile:
    """What a block of csrc/conv/gemm_mma.cu computes; see its header.

    Attributes:
        warps: warps along cells and along channels.
        tiles: tiles of 16 cells and of 8 channels of a warp.
        phases: column phases of a block.
        cells: cells of a block along depth, height and width.
        units: 16 bytes of channels in a chunk.
        stages: buffers of a chunk.
        splits: parts of the chunks, each of which other blocks sum up.
    """

    warps: tuple[int, int]
    tiles: tuple[int, int]
    phases: int
    cells: Extent3
    units: int
    stages: int
    splits: int = 1

    @property
    def threads(self) -> int:
        return 32 * math.prod(self.warps)

    @property
    def channels(self) -> int:
        """Output channels of a block."""
        return self.warps[1] // self.phases * self.tiles[1] * 8


class _Work:
    """A tile of a configuration's pass: its extents, its bytes and how many blocks there are."""

    def __init__(self, config: Config, direction: Pass, tile: Tile) -> None:
        self.tile, self.layer = tile, Layer(config.problem, direction)
        self.batch, self.groups = config.problem.batch, config.problem.groups
        self.split = config.dtype == torch.float32 and config.precision == "ieee"
        self.channels_last = config.memory_format is torch.channels_last
        self.itemsize, self.parts = config.dtype.itemsize, 2 if self.split else 1

    @property
    def chunks(self) -> int:
        return -(-self.layer.channels[0] * self.itemsize // (16 * self.tile.units))

    @property
    def split_chunks(self) -> int:
        return -(-self.chunks // self.tile.splits)

    @property
    def tiles(self) -> Extent3:
        counts = zip(self.layer.cells, self.tile.cells, strict=True)
        return _of_three([-(-all_ // own) for all_, own in counts], 1)

    @property
    def channel_blocks(self) -> int:
        return -(-self.layer.channels[1] // self.tile.channels)

    @property
    def blocks(self) -> int:
        """Blocks of each split."""
        phases = math.prod(self.layer.span) // self.tile.phases
        return self.batch * math.prod(self.tiles) * self.groups * phases * self.channel_blocks

    @property
    def copy_bytes(self) -> int:
        """Bytes of an asynchronous copy; 0 where no such copy is as small as what lies together in memory."""
        if GATHER and not self.channels_last and self.layer.sizes[0][2] % 4 == 0:
            return 0
        together = math.gcd(16, self.layer.channels[0] * self.itemsize) if self.channels_last else self.itemsize
        return together if together >= 4 else 0

    @property
    def wide(self) -> int:
        """Neighbouring pixels that are loaded together where copies are not asynchronous."""
        return 1 if self.copy_bytes or self.channels_last else math.gcd(4, self.layer.sizes[0][2])

    @property
    def patch(self) -> tuple[Extent3, Extent3]:
        return self.layer.patch(self.tile.cells, self.wide)

    @property
    def wide_index(self) -> bool:
        """Whether an image has 2**31 elements or more."""
        channels = zip(self.layer.channels, self.layer.sizes, strict=True)
        return max(self.groups * count * math.prod(size) for count, size in channels) > _INT32_MAX

    @property
    def vector(self) -> int:
        """Outputs that are stored together."""
        most = 16 // (4 if self.tile.splits > 1 else self.itemsize)
        if self.channels_last:
            return math.gcd(most, self.layer.channels[1])
        if self.tile.phases < self.layer.span[2]:
            return 1
        return math.gcd(most, self.layer.sizes[1][2], self.tile.cells[2] * self.tile.phases)

    @property
    def pitch(self) -> int:
        """Bytes from a pixel of the patch to the next."""
        return (self.tile.units | 1) * 16

    @property
    def patch_pixels(self) -> int:
        return math.prod(self.patch[1])

    @property
    def shared_bytes(self) -> int:
        outputs = math.prod(self.tile.cells) * self.tile.phases
        itemsize = 4 if self.tile.splits > 1 else self.itemsize
        staged = self.tile.warps[1] // self.tile.phases * min(self.tile.tiles[1], 16 // itemsize) * 8
        lines, line = (outputs, staged) if self.channels_last else (staged, outputs)
        stages = self.tile.stages * self.patch_pixels * self.pitch
        places = max(self.patch_pixels, outputs) * (8 if self.wide_index else 4)
        return -(-places // 16) * 16 + max(stages, lines * (line * itemsize + 16))

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights, and of one product more, which is fetched and not used."""
        of_tap = self.parts * self.tile.units * self.tile.channels * 16
        taps = sum(map(len, self.layer.taps))
        return (self.groups * self.channel_blocks * self.chunks * taps + 1) * of_tap

    @property
    def partial_bytes(self) -> int:
        """Bytes of the partial sums of split-K."""
        outputs = self.batch * self.groups * self.layer.channels[1] * math.prod(self.layer.sizes[1])
        return 4 * outputs * self.tile.splits if self.tile.splits > 1 else 0

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor, as csrc/conv/gemm_mma.cu asks registers for."""
        registers = 4 * self.tile.tiles[1] * (self.tile.tiles[0] + 1) * self.parts + 72
        return max(1, min(3, 65536 // (registers * self.tile.threads)))

    def seconds(self, spec: DeviceSpec) -> float:
        """Estimated seconds: a block multiplies, or waits for its patches and outputs, and blocks come in waves."""
        rate = (spec.half if self.itemsize == 2 else spec.tf32) / spec.cycles * (_COST.hopper_share if spec.is_hopper else 1)
        tile, taps = self.tile, max(map(len, self.layer.taps))
        shared = max(1, min(self.resident, spec.shared_bytes // (self.shared_bytes + 1024)))
        flops = 2 * tile.channels * tile.phases * math.prod(tile.cells) * tile.units * 16 // self.itemsize
        products = flops * taps * self.split_chunks * (3 if self.split else 1) / rate
        loads = self.patch_pixels * self.split_chunks * (_COST.load_cycles if self.copy_bytes else _COST.gather_cycles)
        stores = math.prod(tile.cells) * tile.phases * tile.channels * _COST.store_cycles
        alone = _COST.block_cycles + loads + stores + products / _COST.alone_share
        busy = products / _COST.busy_share
        waves = math.ceil(self.blocks * tile.splits / (spec.multiprocessors * shared))
        return waves * max(alone, busy * shared) / spec.clock


def tiles_of(config: Config, direction: Pass) -> Iterator[Tile]:
    """The tiles that a pass may take: those of the menu that fit shared memory, and cells in the shapes of images."""
    layer = Layer(config.problem, direction)
    if min(layer.channels) < 2 or 0 in (config.problem.batch, *layer.sizes[0], *layer.sizes[1]):
        return
    if math.prod(layer.span) > _MOST_PHASES or config.problem.taps > _MOST_TAPS:
        return
    channel_bytes = layer.channels[0] * config.dtype.itemsize
    units = 4 if channel_bytes > 32 else 2
    depth, height, width = (power_of_two(count) for count in layer.cells)
    for warps_m, warps_n, tiles_m, tiles_n in MENU:
        phases = math.gcd(warps_n, layer.span[2])
        block = warps_m * tiles_m * 16
        for tile_w in (8, 16, 32, 64, 128, 256):
            for tile_h in (1, 2, 4, 8, 16, 32):
                tile_d = block // (tile_w * tile_h)
                if tile_d * tile_w * tile_h != block or tile_w > max(8, width) or tile_h > height or tile_d > depth:
                    if (tile_d, tile_h) != (1, height) or tile_w > 2 * max(8, width):
                        continue
                tile = Tile((warps_m, warps_n), (tiles_m, tiles_n), phases, (tile_d, tile_h, tile_w), units, STG)
                work = _Work(config, direction, tile)
                room = work.resident * config.spec.multiprocessors // work.blocks
                for splits in {1} | ({min(room, work.chunks), min(2 * room, work.chunks)} if room > 1 else set()):
                    yield replace(tile, splits=-(-work.chunks // -(-work.chunks // splits)))


class GemmMma(Kernel):
    """See the module."""

    name = "conv/gemm_mma"
    directions = ("forward", "input_grad")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    serves = "layers of several channels a group whose patches fit shared memory"

    def tiles(self, config: Config, direction: Pass) -> Iterator[Tile]:
        for tile in tiles_of(config, direction):
            if _Work(config, direction, tile).shared_bytes <= config.spec.shared_bytes:
                yield tile

    def seconds(self, config: Config, direction: Pass, tile: Tile) -> float:
        work = _Work(config, direction, tile)
        return _COST.launch_seconds + work.seconds(config.spec) + 2 * work.packed_bytes / _COST.weight_rate

    def workspace_bytes(self, config: Config, direction: Pass, tile: Tile) -> int:
        work = _Work(config, direction, tile)
        return work.packed_bytes + work.partial_bytes

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        work = _Work(config, direction, tile)
        layer, split_k = work.layer, tile.splits > 1
        (in_channels, out_channels), (inputs, outputs) = layer.channels, layer.sizes
        (first, patch), taps = work.patch, layer.taps
        begins = [*itertools.accumulate(map(len, taps), initial=0)]
        offsets = [
            (((d - first[0]) * patch[1] + h - first[1]) * patch[2] + w - first[2]) * work.pitch
            for phase in taps
            for _, (d, h, w) in phase
        ]
        bias = "bias" if direction == "forward" else None
        params: Params = {
            "input, packed": ("input", "packed"),
            "bias, output": (bias, "partials" if split_k else "output"),
            "batch, groups, in_channels, out_channels": (work.batch, work.groups, in_channels, out_channels),
            "in_d, in_h, in_w": inputs,
            "out_d, out_h, out_w": outputs,
            "step_d, step_h, step_w": layer.step,
            "span_d, span_h, span_w": layer.span,
            "first_d, first_h, first_w": first,
            "patch_d, patch_h, patch_w": patch,
            "tiles_d, tiles_h, tiles_w": work.tiles,
            "phase_sets, channel_blocks": (math.prod(layer.span) // tile.phases, work.channel_blocks),
            "chunks, split_chunks": (work.chunks, work.split_chunks),
            f"tap_begin[{_MOST_PHASES + 1}]": (*begins, *[0] * (_MOST_PHASES + 1 - len(begins))),
            f"tap_offset[{_MOST_TAPS + 1}]": (*offsets, *[0] * (_MOST_TAPS + 1 - len(offsets))),
        }
        element: Macros = {"ELEMENT_T": ELEMENT_TYPES[config.dtype], "SPLIT": int(work.split), "UNITS": tile.units}
        macros: Macros = {
            **element,
            "CHANNELS_LAST": int(work.channels_last),
            "WARPS_M": tile.warps[0],
            "WARPS_N": tile.warps[1],
            "TILES_M": tile.tiles[0],
            "TILES_N": tile.tiles[1],
            "PHASES": tile.phases,
            "TILE_H": tile.cells[1],
            "TILE_W": tile.cells[2],
            "COPY_BYTES": work.copy_bytes,
            "STAGES": tile.stages,
            "WIDE": work.wide,
            "VECTOR": work.vector,
            "PARTIALS": int(split_k),
        }
        if work.wide_index:
            macros["INDEX_64"] = 1
        of_weights: Macros = {
            **element,
            "INPUT_GRAD": int(direction == "input_grad"),
            "IN_CHANNELS": in_channels,
            "OUT_CHANNELS": out_channels,
            "TAPS": config.problem.taps,
            "CHANNEL_SETS": work.channel_blocks,
            "CHUNKS": work.chunks,
            "ROWS": tile.channels,
            "CHANNELS": tile.channels,
            "FRAGMENTS": 1,
        }
        sets = [[[tap] for tap, _ in phase] for phase in taps]
        grid, block = (work.blocks, tile.splits, 1), (tile.threads, 1, 1)
        launches = [
            pack.packing(pack.macros_of(sets, of_weights), work.groups),
            Launch("conv/gemm_mma.cu", macros, grid, block, params, work.shared_bytes, overlaps=True),
        ]
        scratch = {"packed": work.packed_bytes}
        if split_k:
            elements = math.prod(outputs) * out_channels * work.groups * work.batch
            launches.append(reduce.sums(config.dtype, elements, tile.splits, "partials", "output"))
            scratch["partials"] = work.partial_bytes
        return gathering(config, direction, launches if work.blocks else (), scratch)


KERNEL = GemmMma()
