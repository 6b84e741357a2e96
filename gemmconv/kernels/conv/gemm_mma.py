"""One GEMM over a table of taps on the tensor cores of any GPU since sm_80: host side of csrc/conv/gemm_mma.cu.

It computes forward passes and input gradients of signals, images and volumes. csrc/weights/pack.cu lays the weights out
before it, in a launch of its own, and with split-K csrc/splits/reduce.cu adds up the parts after it. How long a tile
takes is estimated in gemm_mma_cost.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from gemmconv.device import REGISTERS
from gemmconv.hashing import changed, hashed_once
from gemmconv.kernels.base import Config, Kernel, Pass
from gemmconv.kernels.conv.gemm_mma_cost import seconds_of
from gemmconv.kernels.integers import INT32_MAX, even_share, power_of_two, up_to_multiple
from gemmconv.kernels.macros import ELEMENT_TYPES, TENSOR_CORE_TYPES, Macros, index_macros, named_macros
from gemmconv.kernels.phases import Gathering, taps_of_phases
from gemmconv.kernels.program import Extent3, Launch, Params, Program, gathering, three_axes
from gemmconv.kernels.splits import reduce
from gemmconv.kernels.weights import pack

# Warps along cells and along channels; for each warp, tiles of 16 cells and tiles of 8 channels.
_MENU = [(warps, (4, channel_tiles)) for channel_tiles in (8, 4) for warps in ((2, 2), (4, 1), (1, 4))]
_MENU += [((2, 3), (2, 4)), ((2, 2), (2, 4)), ((4, 1), (4, 1))]
# More of them, by the number of column phases: blocks that have all phases, so that they store whole rows of outputs.
_ALL_PHASES = {3: [((2, 3), (4, 2)), ((1, 3), (4, 4))], 5: [((1, 5), (4, 4))]}
_MOST_PHASES, _MOST_TAPS = 128, 512  # of the tables in the kernel's params
_MOST_SUMS = 32  # tiles of 16 x 8 sums that a warp has registers for; float32 in two parts takes two of each
_STAGES = 2  # buffers of a chunk


@hashed_once
@dataclass(frozen=True)
class Tile:
    """The work of a block of csrc/conv/gemm_mma.cu; see its header."""

    warps: tuple[int, int]  # warps along cells and along channels
    tiles: tuple[int, int]  # tiles of 16 cells and of 8 channels of a warp
    phases: int  # column phases of a block
    cells: Extent3  # cells of a block along depth, height and width
    units: int  # 16 bytes of channels in a chunk
    splits: int = 1  # parts into which the chunks are split (split-K)

    @property
    def threads(self) -> int:
        return 32 * math.prod(self.warps)

    @property
    def channels(self) -> int:
        """Output channels of a block, for each phase."""
        return self.warps[1] // self.phases * self.tiles[1] * 8

    def resident(self, parts: int) -> int:
        """Blocks of a multiprocessor that the kernel leaves registers for; ``parts``: of a float32 value."""
        registers = 4 * self.tiles[1] * (self.tiles[0] + 1) * parts + 76
        return max(1, min(3, REGISTERS // (registers * self.threads)))


class Work(Gathering):
    """A pass of a layer as a tile computes it.

    Attributes:
        inputs, outputs: pixels of an image; the depth of an image is 1.
        step, span: inputs and outputs from a cell to the next.
        phases: the taps of each phase, with their shifts from a cell's first input.
        split: whether a value is split into parts of TF32.
        parts: parts of a value.
        partials: whether blocks store partial sums of split-K, in float32.
        chunks, split_chunks: chunks of channels, in all and of a block.
        grid: tiles of an image.
        channel_blocks: blocks of a group's output channels.
        blocks: thread blocks of each split.
        copy_bytes: bytes of an asynchronous copy; 0 where pixels are loaded through registers.
        wide: neighbouring pixels that are loaded together through registers.
        first, patch: the least shift of a block's patch, and its pixels; columns in whole groups of ``wide``.
        pitch: bytes from a pixel of the patch to the next.
        vector: outputs that are stored together.
        packed_bytes: bytes of the packed weights, with one tap more, which is fetched and not used.
        partial_bytes: bytes of the partial sums of split-K.
    """

    def __init__(self, config: Config, direction: Pass, tile: Tile) -> None:
        p = self.problem = config.problem
        self.direction, self.tile = direction, tile
        self.dtype, self.itemsize, self.channels_last = config.dtype, config.dtype.itemsize, config.channels_last
        self.inputs, self.outputs = three_axes(self.input_size), three_axes(self.output_size)
        one, stride = three_axes(()), three_axes(p.stride)
        self.step, self.span = (one, stride) if direction == "forward" else (stride, one)
        self.phases, least, most = taps_of_phases(direction, p.kernel_size, p.stride, p.padding, p.dilation)
        self.split, self.partials = config.is_ieee, tile.splits > 1
        self.parts = 2 if self.split else 1

        self.chunks = -(-self.in_channels * self.itemsize // (16 * tile.units))
        self.split_chunks = -(-self.chunks // tile.splits)
        covered = zip(self.outputs, self.span, tile.cells, strict=True)
        self.grid = three_axes([-(-outputs // (span * cells)) for outputs, span, cells in covered])
        self.channel_blocks = -(-self.out_channels // tile.channels)
        phase_sets = len(self.phases) // tile.phases
        self.blocks = p.batch * math.prod(self.grid) * p.groups * phase_sets * self.channel_blocks

        if self.channels_last:
            together = math.gcd(16, self.in_channels * self.itemsize)
            self.copy_bytes = together if together >= 4 else 0
        else:  # four pixels of four channels take as many instructions through registers as one pixel by copies
            self.copy_bytes = 4 if self.itemsize == 4 and self.inputs[2] % 4 else 0
        self.wide = 1 if self.copy_bytes or self.channels_last else math.gcd(4, self.inputs[2])
        self.first = *least[:2], least[2] // self.wide * self.wide
        axes = zip(tile.cells, self.step, self.first, most, strict=True)
        depth, height, width = ((cells - 1) * step + last - first + 1 for cells, step, first, last in axes)
        self.patch = depth, height, up_to_multiple(width, self.wide)
        self.pitch = (tile.units | 1) * 16

        stored_bytes = 4 if self.partials else self.itemsize
        self.vector = 16 // stored_bytes
        if self.channels_last:
            self.vector = math.gcd(self.vector, self.out_channels)
        elif tile.phases < self.span[2]:  # phases between them belong to other blocks
            self.vector = 1
        else:
            self.vector = math.gcd(self.vector, self.outputs[2], tile.cells[2] * tile.phases)
        outputs, pixels = math.prod(tile.cells) * tile.phases, math.prod(self.patch)
        channels = tile.warps[1] // tile.phases * min(tile.tiles[1], 16 // stored_bytes) * 8
        lines, line = (outputs, channels) if self.channels_last else (channels, outputs)
        places = max(pixels, outputs) * (8 if p.image_elements > INT32_MAX else 4)
        staged = max(_STAGES * pixels * self.pitch, lines * (line * stored_bytes + 16))
        self.shared_bytes = up_to_multiple(places, 16) + staged

        taps = p.groups * self.channel_blocks * self.chunks * p.taps + 1
        self.packed_bytes = taps * self.parts * tile.units * tile.channels * 16
        sums = p.batch * p.groups * self.out_channels * math.prod(self.outputs)
        self.partial_bytes = 4 * sums * tile.splits if self.partials else 0


work_of = lru_cache(maxsize=256)(Work)  # the search for a tile asks for it twice


def macros_of(work: Work) -> Macros:
    """Macros that specialise csrc/conv/gemm_mma.cu."""
    tile = work.tile
    return {
        "ELEMENT_T": ELEMENT_TYPES[work.dtype],
        "WARPS_M": tile.warps[0],
        "WARPS_N": tile.warps[1],
        "TILES_M": tile.tiles[0],
        "TILES_N": tile.tiles[1],
        "TILE_H": tile.cells[1],
        "TILE_W": tile.cells[2],
        **named_macros(tile, "phases units"),
        **named_macros(work, "split channels_last copy_bytes wide vector partials"),
        **index_macros(work.problem.image_elements),
    }


def weight_macros_of(work: Work) -> Macros:
    """Macros that specialise csrc/weights/pack.cu."""
    others: Macros = {
        "ELEMENT_T": ELEMENT_TYPES[work.dtype],
        "FRAGMENTS": 1,
        "INPUT_GRAD": int(work.direction == "input_grad"),
        **named_macros(work, "split in_channels out_channels chunks"),
        **named_macros(work.tile, "units channels"),
        "TAPS": work.problem.taps,
        "CHANNEL_SETS": work.channel_blocks,
        "ROWS": work.tile.channels,
    }
    return pack.macros_of(([[tap] for tap, _ in taps] for taps in work.phases), others)


class GemmMma(Kernel):
    name = "conv/gemm_mma"
    directions = ("forward", "input_grad")
    dtypes = TENSOR_CORE_TYPES
    serves = "groups of several channels whose patches fit shared memory"

    def tiles(self, config: Config, direction: Pass) -> Iterator[Tile]:
        """The tiles that a pass may take: those of the menu, with cells in a row and in blocks that an image fills."""
        p = config.problem
        if math.prod(p.stride) > _MOST_PHASES or p.taps > _MOST_TAPS or 0 in (p.batch, p.taps):
            return
        layer = Work(config, direction, Tile((1, 1), (1, 1), 1, (1, 1, 1), 2))
        if min(layer.in_channels, layer.out_channels) < 2 or 0 in (*layer.inputs, *layer.outputs):
            return
        units = 4 if layer.in_channels * layer.itemsize > 32 else 2
        depth, height, width = map(power_of_two, layer.grid)
        for warps, tiles in (*_MENU, *_ALL_PHASES.get(layer.span[2], ())):
            if math.prod(tiles) * layer.parts > _MOST_SUMS:
                continue
            block = warps[0] * tiles[0] * 16
            for tile_w, tile_h in ((block, 1), *itertools.product((8, 16, 32), (1, 2, 4, 8, 16, 32))):
                tile_d, rest = divmod(block, tile_w * tile_h)
                fills = tile_d <= depth and tile_h <= height and tile_w <= max(8, width)
                if rest or not (fills or (tile_d, tile_w) == (1, 8)):
                    continue
                tile = Tile(warps, tiles, math.gcd(warps[1], layer.span[2]), (tile_d, tile_h, tile_w), units)
                work = work_of(config, direction, tile)
                # Beside one part: as many parts as fill the GPU with blocks once, or twice.
                room = tile.resident(work.parts) * config.spec.multiprocessors // work.blocks
                for splits in {1, *(min(count, work.chunks) for count in (room, 2 * room) if room > 1)}:
                    split = changed(tile, splits=even_share(work.chunks, splits))
                    if self.fitted(config, direction, split) is not None:
                        yield split

    def seconds(self, config: Config, direction: Pass, tile: Tile) -> float:
        return seconds_of(work_of(config, direction, tile), config.spec)

    def fitted(self, config: Config, direction: Pass, tile: Tile) -> Tile | None:
        work = work_of(config, direction, tile)
        fits = work.shared_bytes <= config.spec.shared_bytes and work.partial_bytes <= config.workspace_limit
        return tile if fits else None

    def workspace_bytes(self, config: Config, direction: Pass, tile: Tile) -> int:
        work = Work(config, direction, tile)
        return work.packed_bytes + work.partial_bytes

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        p, work = config.problem, Work(config, direction, tile)
        first, patch = work.first, work.patch
        begins = [*itertools.accumulate(map(len, work.phases), initial=0)]
        offsets = [
            (((d - first[0]) * patch[1] + h - first[1]) * patch[2] + w - first[2]) * work.pitch
            for taps in work.phases
            for _, (d, h, w) in taps
        ]
        params: Params = {
            "input, packed": ("input", "packed"),
            "bias, output": ("bias" if direction == "forward" else None, "partials" if work.partials else "output"),
            "batch, groups": (p.batch, p.groups),
            "in_channels, out_channels": (work.in_channels, work.out_channels),
            "in_d, in_h, in_w": work.inputs,
            "out_d, out_h, out_w": work.outputs,
            "step_d, step_h, step_w": work.step,
            "span_d, span_h, span_w": work.span,
            "first_d, first_h, first_w": first,
            "patch_d, patch_h, patch_w": patch,
            "tiles_d, tiles_h, tiles_w": work.grid,
            "taps, channel_blocks": (len(offsets), work.channel_blocks),
            "chunks, split_chunks": (work.chunks, work.split_chunks),
            f"tap_begin[{_MOST_PHASES + 1}]": (*begins, *[0] * (_MOST_PHASES + 1 - len(begins))),
            f"tap_offset[{_MOST_TAPS + 1}]": (*offsets, *[0] * (_MOST_TAPS + 1 - len(offsets))),
        }
        grid, block = (work.blocks, tile.splits, 1), (tile.threads, 1, 1)
        launches = [
            pack.packing(weight_macros_of(work), p.groups),
            Launch("conv/gemm_mma.cu", macros_of(work), grid, block, params, work.shared_bytes, overlaps=True),
        ]
        scratch = {"packed": work.packed_bytes}
        if work.partials:
            sums = work.partial_bytes // (4 * tile.splits)
            launches.append(reduce.sums(config.dtype, sums, tile.splits, "partials", "output"))
            scratch["partials"] = work.partial_bytes
        return gathering(config, direction, launches, scratch)


KERNEL = GemmMma()
