"""Weight gradients of 16 bits on Hopper's tensor cores, without columns: host side of csrc/sm90/wgrad_nhwc.cu.

The kernel reads channels_last. In NCHW, both tensors are transposed before (see transpose.py).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property, changed
from gemmconv.kernels.base import DEFAULT_WORKSPACE_LIMIT, Config, Pass
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.integers import INT32_MAX, covering, power_of_two, up_to_multiple
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, geometry_macros, named_macros
from gemmconv.kernels.menu import menu_of, samples
from gemmconv.kernels.program import Launch, Params, Program
from gemmconv.kernels.sm90.base import LONGEST_BOX, WeightGradKernel, WeightGradTile, image_map
from gemmconv.kernels.splits.reduce import fits, wgrad_partial_bytes, wgrad_partial_dtype, wgrad_program

_ATOM = 64  # channels of a line
_LINE_BYTES = 2 * _ATOM
_STEP = 16  # pixels
_LONGEST_STEP = 8  # elements from one of a box to the next
_BARRIER_BYTES = 16  # of a stage
# Most columns of a thread's sums, by warpgroups: more than the compiler finds registers for at first.
_SUMS = {1: 192, 2: 192, 3: 128}
_PIXELS = 32, 256  # of a tile, least and most
_POWERS, _WIDTHS = (1, 2, 4, 8), (8, 16, 32, 64)  # images and rows that a tile may have, and columns
_MENU = 3  # tiles of a menu
Size = tuple[int, int, int]  # images, rows and columns of pixels
_COST = costs_of("sm90/wgrad_nhwc")
_DEVICE = costs_of("device")


@dataclass(frozen=True)
class Taps:
    """The taps of a block along an axis."""

    kernel: int  # taps of the kernel along the axis
    step: int  # taps from one to the next that may share a box
    shift: int  # lines of a box from one such tap to the next
    taps: int  # taps of a block
    boxes: int  # boxes that hold what these taps read
    sides: int  # warpgroups that the taps are shared among

    @property
    def own(self) -> int:
        """Taps of a warpgroup."""
        return self.taps // self.sides

    @property
    def extra(self) -> int:
        """Lines of a box beyond those of the tile."""
        return (self.taps - 1) // self.boxes * self.shift

    @property
    def firsts(self) -> list[int]:
        """The first tap of each block."""
        if self.boxes == self.taps:
            return [*range(0, self.kernel, self.taps)]
        reach = self.taps // self.boxes * self.step
        classes = range(0, min(self.kernel, self.step), self.boxes)
        return [first + begin for begin in range(0, self.kernel, reach) for first in classes]

    @property
    def possible(self) -> bool:
        if self.taps % self.boxes or self.taps % self.sides:
            return False
        return self.boxes == self.taps or (self.step % self.boxes == 0 and self.own % self.boxes == 0)


@dataclass(frozen=True)
class Tile(WeightGradTile):
    """The work of a block; see csrc/sm90/wgrad_nhwc.cu."""

    problem: Problem  # the geometry
    size: Size  # images, rows and columns of pixels of a tile
    pair_rows: bool  # whether a step has eight pixels of each of two rows, not sixteen of one
    sides: Pair  # warpgroups with input channels of their own, and with output channels of their own
    taps_h: Taps  # taps_h, taps_w: taps of a block down and across
    taps_w: Taps
    multiprocessors: int  # multiprocessors of the GPU, each of which runs one block

    @property
    def warpgroups(self) -> int:
        return math.prod(self.sides) * self.taps_h.sides * self.taps_w.sides

    @property
    def pixels(self) -> int:
        return math.prod(self.size)

    @cached_property
    def box(self) -> Size:
        """Images, rows and columns of a box of grad_output."""
        images, height, width = self.size
        return images, height + self.taps_h.extra, width + self.taps_w.extra

    @property
    def boxes(self) -> int:
        """Boxes of grad_output."""
        return self.sides[1] * self.taps_h.boxes * self.taps_w.boxes

    @cached_property
    def stage_bytes(self) -> int:
        lines = self.sides[0] * self.pixels + self.boxes * up_to_multiple(math.prod(self.box), 8)
        return lines * _LINE_BYTES + _BARRIER_BYTES

    @property
    def tiles_image(self) -> Pair:
        """Tiles of an image, or of several together, down and across."""
        return covering(self.problem.input_size, self.size[1:])

    @property
    def tiles(self) -> int:
        return -(-self.problem.batch // self.size[0]) * math.prod(self.tiles_image)

    @cached_property
    def weight_blocks(self) -> int:
        """Blocks that have different weights."""
        channels = covering(self.channels, (_ATOM * self.sides[0], _ATOM * self.sides[1]))
        return self.problem.groups * math.prod(channels) * len(self.taps_h.firsts) * len(self.taps_w.firsts)

    @property
    def columns(self) -> int:
        """Columns of a product."""
        return min(_ATOM, up_to_multiple(self.channels[1], 16))

    @property
    def possible(self) -> bool:
        """Whether stages fit, boxes are not too long, and the pixels of a step lie at regular distances in them."""
        (stride_h, stride_w), (_, height, width), (_, box_height, box_width) = self.problem.stride, self.size, self.box
        if self.pixels % _STEP or max(box_height * stride_h, box_width * stride_w) > LONGEST_BOX or self.stages < 2:
            return False
        if self.pair_rows:
            return width % 8 == 0 and height % 2 == 0
        return width % _STEP == 0 or (width == box_width and (height == box_height or height * width % _STEP == 0))

    @cached_property
    def cycles(self) -> float:
        """Roughly the cycles of a tile: of products, or of copies."""
        # Each warpgroup has a product for each of its taps in a step.
        products = self.pixels / _STEP * (self.taps_h.own * self.taps_w.own) * self.warpgroups
        lines = self.sides[0] * self.pixels + self.boxes * math.prod(self.box)
        # Both sides of each product are read, and lines written, at 128 bytes a cycle.
        multiplied, read = products * (self.columns / 2 * _COST.product_share), products * (_STEP + self.columns / 4)
        copied = lines * _COST.line_cycles
        longest = max(multiplied, (read + lines) * _COST.moved_share, copied)
        return longest + _COST.tile_cycles + copied * _COST.waited_share / (self.stages - 1)

    def slices(self, limit: int) -> int:
        """Into how many slices the tiles are cut, for a workspace of at most so many bytes; 0 where none fit."""
        return self._sliced(limit)[1]

    def _sliced(self, limit: int) -> tuple[float, int]:
        """Roughly the seconds of the kernel and of adding up, and the slices."""
        tiles, blocks, multiprocessors = self.tiles, self.weight_blocks, self.multiprocessors
        if (most := min(limit // (4 * math.prod(self.problem.weight_shape)), tiles)) == 0:
            return math.inf, 0
        found, tile_seconds = [], self.cycles / _DEVICE.clock
        for slices in {min(most, max(1, rounds * multiprocessors // blocks)) for rounds in (1, 2, 3)}:
            tiles_in_turn = -(-blocks * slices // multiprocessors) * -(-tiles // slices)
            adding = 2 * wgrad_partial_bytes(self.problem, 2, slices) / _COST.partial_rate
            found.append((tiles_in_turn * tile_seconds + adding, slices))
        return min(found)

    def workspace_bytes(self, limit: int) -> int:
        return wgrad_partial_bytes(self.problem, 2, self.slices(limit))

    def seconds(self, limit: int) -> float:
        """Roughly what it takes, with a workspace of at most ``limit`` bytes; infinite where no slice fits."""
        moved = self.problem.image_bytes(2) / _DEVICE.weight_grad_memory_rate
        return _COST.launch_seconds + max(self._sliced(limit)[0], moved)

    def at(self, problem: Problem) -> Tile:
        """The tile for the same layer at other sizes."""
        return changed(self, problem=problem, weight_blocks=self.weight_blocks, cycles=self.cycles)


def _reaches(problem: Problem) -> bool:
    """Whether channels are whole 16 bytes, strides not too long for a tensor map, and the kernel's ints large enough.

    These count images, places in them, pieces of a group's weights.
    """
    ci, co = problem.gemm_k, problem.group_out_channels
    if ci % 8 or co % 8 or not fits(problem) or max(problem.stride) > _LONGEST_STEP:
        return False
    axes = zip(problem.input_size, problem.stride, problem.kernel_size, problem.dilation, problem.padding, strict=True)
    places = [(size + LONGEST_BOX) * stride + kernel * dilation + pad for size, stride, kernel, dilation, pad in axes]
    return max(*places, problem.in_pixels, problem.out_pixels, problem.taps * ci * co // 4) <= INT32_MAX


def _layer_tiles(problem: Problem, multiprocessors: int) -> Iterator[Tile]:
    """The parts of a layer's weights that blocks may have, as tiles of one pixel."""
    ci, co = problem.gemm_k, problem.group_out_channels
    for side, axis in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0), (3, 1), (3, 2), (3, 3)):
        sides = [side if axis == other else 1 for other in range(4)]
        rows, columns = (_taps_of(problem, other, sides[2 + other]) for other in (0, 1))
        if (sides[0] - 1) * _ATOM >= ci or (sides[1] - 1) * _ATOM >= co:
            continue
        for taps_h, taps_w in itertools.product(rows, columns):
            if taps_h.own * taps_w.own * _ATOM // 2 <= _SUMS[side]:
                yield Tile(problem, (1, 1, 1), False, (sides[0], sides[1]), taps_h, taps_w, multiprocessors)


def _sized(tile: Tile, size: Size) -> Tile:
    """A tile with so many images, rows and columns of pixels."""
    _, rows, columns = size
    pair_rows = columns % _STEP != 0 and columns % 8 == 0 and rows % 2 == 0 and tile.taps_w.extra > 0
    return changed(tile, size=size, pair_rows=pair_rows)


def _taps_of(problem: Problem, axis: int, sides: int) -> list[Taps]:
    """The taps that a block may have along an axis."""
    kernel, stride, dilation = problem.kernel_size[axis], problem.stride[axis], problem.dilation[axis]
    step = stride // math.gcd(stride, dilation)
    counts = itertools.product(range(1, min(kernel, 6) + 1), repeat=2)
    all_taps = (Taps(kernel, step, dilation * step // stride, taps, boxes, sides) for taps, boxes in counts)
    return [taps for taps in all_taps if taps.possible]


def _all_sizes(problem: Problem) -> Iterator[Size]:
    """The pixels that a tile may have: several images where it has all of each."""
    height, width = problem.input_size
    narrow = power_of_two(width)
    for columns, rows, images in itertools.product((narrow, *_WIDTHS) if narrow < 8 else _WIDTHS, _POWERS, _POWERS):
        if images > 1 and (rows < height or columns < width):
            continue
        near = rows < 2 * height and columns < max(9, 2 * width)
        if near and _PIXELS[0] <= images * rows * columns <= _PIXELS[1]:
            yield images, rows, columns


@functools.lru_cache(maxsize=1024)
def _menu_of(problems: tuple[Problem, ...], multiprocessors: int) -> list[Tile]:
    """The menu of a layer, by sample problems, the last of which has the longest axes.

    A kernel is compiled for each. Of those that have as much of the weights each, one takes the fewest cycles for the
    same pixels, whatever the sizes of images are: of these, tiles are taken that are the best beside those before.
    """
    layer, fastest = problems[-1], dict[tuple[int, Size], Tile]()
    for tile, size in itertools.product(_layer_tiles(layer, multiprocessors), [*_all_sizes(layer)]):
        sized, key = _sized(tile, size), (tile.weight_blocks, size)
        if sized.possible and (key not in fastest or sized.cycles < fastest[key].cycles):
            fastest[key] = sized
    tiles = [*fastest.values()]
    limit = max(DEFAULT_WORKSPACE_LIMIT, 4 * math.prod(layer.weight_shape))
    menu = menu_of(tiles, [[tile.at(one).seconds(limit) for tile in tiles] for one in problems], _MENU)
    # Where fewer are the fastest at all these sizes, the first tile is the fastest at a few others.
    return [*menu, *tiles[:1]][:_MENU]


class WgradNhwc(WeightGradKernel):
    name = "sm90/wgrad_nhwc"
    serves = "channels of whole 16 bytes and tiles that fit shared memory"
    computed_in = torch.channels_last
    dtypes = (torch.float16, torch.bfloat16)

    def tiles(self, config: Config, direction: Pass) -> Iterator[Tile]:
        """The tiles that a layer may have, of the sizes that waste least: those that ``tune`` may measure."""
        if not _reaches(config.problem):
            return
        sizes = [size for size in _all_sizes(config.problem) if size[0] < 2 * config.problem.batch]
        for tile in _layer_tiles(config.problem, config.spec.multiprocessors):
            sized = (_sized(tile, size) for size in sizes)
            least = sorted(sized, key=lambda one: one.tiles * (one.pixels + math.prod(one.box)))  # lines of boxes
            yield from (one for one in least[:8] if one.possible and one.slices(config.workspace_limit) > 0)

    def tile(self, config: Config, direction: Pass) -> Tile | None:
        """The tile of the layer's menu with the least estimate. A menu has few tiles, so few kernels are compiled."""
        problem, limit = config.problem, config.workspace_limit
        if not _reaches(problem) or problem.batch == 0 or limit < 4 * math.prod(problem.weight_shape):
            return None
        menu = _menu_of(samples(problem), config.spec.multiprocessors)
        return min((tile.at(problem) for tile in menu), key=lambda tile: tile.seconds(limit), default=None)

    def fitted(self, config: Config, direction: Pass, tile: Tile) -> Tile | None:
        made, limit = tile.at(config.problem), config.workspace_limit
        if not _reaches(config.problem) or (slices := made.slices(limit)) == 0:
            return None
        return made if (slices == 1) == (tile.slices(limit) == 1) else None  # a single slice is of the gradient's type

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        p, slices, (down, across) = config.problem, tile.slices(config.workspace_limit), tile.tiles_image
        macros: Macros = {
            "ELEMENT_T": ELEMENT_TYPES[config.dtype],
            "PARTIAL_T": ELEMENT_TYPES[wgrad_partial_dtype(config.dtype, slices)],
            "CI": p.gemm_k,
            "CO": p.group_out_channels,
            "TILE_N": tile.size[0],
            "TILE_H": tile.size[1],
            "TILE_W": tile.size[2],
            "PAIR_ROWS": int(tile.pair_rows),
            "SIDES_CI": tile.sides[0],
            "SIDES_CO": tile.sides[1],
            **named_macros(tile, "columns stages shared_bytes"),
            **geometry_macros(p),
        }
        for axis, taps in (("H", tile.taps_h), ("W", tile.taps_w)):
            macros |= {f"SIDES_{axis}": taps.sides, f"TAPS_{axis}": taps.taps, f"BOXES_{axis}": taps.boxes}
        lines, box = ((_ATOM, columns, rows, images) for images, rows, columns in (tile.size, tile.box))
        input_map, steps = image_map(p.input_shape, 2, lines, channels_last=True), (1, p.stride[1], p.stride[0], 1)
        params: Params = {
            "input, grad_output": (input_map, image_map(p.output_shape, 2, box, True, "grad_output", steps=steps)),
            "partials": "partials",
            "groups": p.groups,
            "tiles_w, tiles_h, tiles, slices": (across, down, tile.tiles, slices),
        }
        grid, block = (tile.weight_blocks * slices, 1, 1), (128 * (tile.warpgroups + 1), 1, 1)
        main = Launch("sm90/wgrad_nhwc.cu", macros, grid, block, params, tile.shared_bytes)
        return wgrad_program(config, slices, torch.channels_last, main)


KERNEL = WgradNhwc()
