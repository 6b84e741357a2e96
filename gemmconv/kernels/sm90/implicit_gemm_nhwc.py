"""How ``fused`` goes about channels_last with cells as rows of a product (sm90/implicit_gemm_nhwc.cu): tiles, launch.

It is for 16-bit types and TF32, one group, channels of whole 16 bytes, and kernels larger than their stride that leave
no phase without taps; of TF32, output channels that are a multiple of 32. ``tiles_of`` gives none for others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property, changed
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of, overlapped
from gemmconv.kernels.integers import INT32_MAX, even_share, up_to_multiple
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, geometry_macros, named_macros
from gemmconv.kernels.phases import can_be_folded, cells_of, phase_shifts
from gemmconv.kernels.program import Params, Program, reciprocal
from gemmconv.kernels.sm90.base import FAST_CLOCK_RATE, LONGEST_BOX, SHARED_BYTES, OneFormatForward, image_map
from gemmconv.kernels.sm90.pixels_on_m import BOX_LINES, CHUNK_BYTES, ChunkedTile, forward_program

_COST = costs_of("sm90/implicit_gemm_nhwc")
_ROWS_CYCLES = _COST.table("rows_cycles")
BLOCK_ROWS = 128  # that two warpgroups multiply at once
_GROUP_ROWS = 8  # whose lines follow each other where the tensor core reads them itself
_PIECE_BYTES = 16
_SWIZZLED_BYTES = 1_024  # that pieces are swapped within
_MOST_SUMS = 256  # lines times blocks of rows: registers have room
_MOST_KEPT = {2: 256, 4: 160}  # and for their outputs too, by bytes of an element
_LEAST_LINES = 32
_LEAST_STAGES, _MOST_STAGES, _MOST_SLOTS = 3, 12, 4
_BARRIER_BYTES = 16 * (_MOST_STAGES + _MOST_SLOTS)
_MOST_STRIPS = 64


@dataclass(frozen=True)
class Tile(ChunkedTile):
    """The work of a block of csrc/sm90/implicit_gemm_nhwc.cu; see its header."""

    problem: Problem  # the geometry
    itemsize: int  # bytes of an element: 2, or 4 for float32 that is rounded to TF32
    row_blocks: int  # blocks of 128 rows of the product in an item
    lines: int  # output channels of an item
    images: int  # images of an item; where there are several, it has all of their cells
    strips: int  # strips that an image's columns of cells are cut into
    multiprocessors: int  # multiprocessors of the GPU, each of which runs one block
    group: int = 0  # lines of a patch from a group of eight rows to the next, 0 where rows are lines from anywhere

    @property
    def rows(self) -> int:
        return self.row_blocks * BLOCK_ROWS

    @property
    def strip_cells(self) -> int:
        """Cells across of a strip; the last may have fewer."""
        return _GROUP_ROWS if self.group > _GROUP_ROWS else -(-cells_of(self.problem)[1] // self.strips)

    @property
    def across(self) -> int:
        """Rows of the product from a row of cells to the next."""
        return self.patch_width if self.group == _GROUP_ROWS else self.strip_cells

    @property
    def segments(self) -> int:
        """Items that a strip of an image is cut into."""
        return -(-cells_of(self.problem)[0] * self.across // self.rows)

    @cached_property
    def halo(self) -> Pair:
        """How much farther than a cell the inputs reach that one of its outputs reads, at most."""
        down, across = (max(max(one) - min(one) for one in phase_shifts(self.problem, axis)) for axis in (0, 1))
        return down, across

    @property
    def patch_width(self) -> int:
        return self.strip_cells + self.halo[1]

    @cached_property
    def patch_size(self) -> Pair:
        """Rows and columns of an image's part of a patch."""
        return _patch_rows(cells_of(self.problem)[0], self.across, self.rows) + self.halo[0], self.patch_width

    @cached_property
    def positions(self) -> int:
        """Positions of a patch."""
        return self.images * math.prod(self.patch_size)

    @property
    def slot_bytes(self) -> int:
        return _slot_bytes(self.positions)

    @property
    def kept(self) -> bool:
        """Whether outputs are stored while products of the next item run."""
        return self.lines * self.row_blocks <= _MOST_KEPT[self.itemsize]

    @property
    def line_blocks(self) -> int:
        return -(-self.problem.out_channels // self.lines)

    @property
    def bias_bytes(self) -> int:
        return self.line_blocks * self.lines * 4

    @cached_property
    def ring_sizes(self) -> Pair:
        """Patches and stages of weights; fewer of these than are of use where they do not fit."""
        free, slot, stage = SHARED_BYTES - self.bias_bytes - _BARRIER_BYTES, self.slot_bytes, self.weight_bytes
        slots = next((count for count in range(_MOST_SLOTS, 2, -1) if free - count * slot >= 6 * stage), 2)
        return slots, min((free - slots * slot) // stage, _MOST_STAGES)

    @property
    def first_bias(self) -> int:
        """Bytes of shared memory before biases: of both rings."""
        slots, stages = self.ring_sizes
        return slots * self.slot_bytes + stages * self.weight_bytes

    @property
    def shared_bytes(self) -> int:
        return self.first_bias + self.bias_bytes + _BARRIER_BYTES

    @property
    def items(self) -> int:
        tiles = -(-self.problem.batch // self.images) * self.strips * self.segments
        return tiles * math.prod(self.problem.stride) * self.line_blocks

    @property
    def possible(self) -> bool:
        """Whether a patch is a box, and rings fit shared memory."""
        return max(*self.patch_size, self.images) <= LONGEST_BOX and self.ring_sizes[1] >= _LEAST_STAGES

    @property
    def cycles(self) -> float:
        """Roughly the cycles that a call takes, its launches among them.

        A step is a tap of some channels. Tensor cores take as long as products do, and shared memory what these read of
        it, and what comes in their place.
        """
        taps = self.problem.taps / math.prod(self.problem.stride)
        products = 4 * self.row_blocks * self.lines
        shared = products / 2 + 128 * self.row_blocks + self.weight_bytes / 128 + self.positions / taps
        step = overlapped(_COST.step_overlap, _COST.product_factor * products, _COST.shared_factor * shared)
        if self.group:
            step += _COST.group_step_cycles + _COST.group_rows_cycles * self.row_blocks
        else:
            step += _COST.step_cycles + _ROWS_CYCLES[self.itemsize] * self.row_blocks
        store = _COST.kept_store_cycles if self.kept else _COST.store_cycles
        stored = self.row_blocks * self.lines * self.itemsize * store
        item = _COST.item_cycles + stored + self.chunks * taps * step
        computed = -(-self.items // self.multiprocessors) * item
        moved = _COST.moved_byte_cycles * self.problem.image_bytes(self.itemsize)
        chunk_bytes = self.positions * CHUNK_BYTES + taps * self.weight_bytes
        copied = _COST.copied_byte_cycles * self.items * self.chunks * chunk_bytes
        packing = _COST.pack_cycles + _COST.packed_byte_cycles * self.packed_bytes if self.packed else 0
        cycles = _COST.start_cycles + packing + overlapped(_COST.overlap, computed, moved, copied)
        return (_COST.margin if self.packed else 1) * cycles


def tiles_of(problem: Problem, itemsize: int, multiprocessors: int) -> Iterator[Tile]:
    """The tiles that a problem may have."""
    p, piece = problem, _PIECE_BYTES // itemsize
    if p.groups > 1 or p.batch == 0 or p.in_channels % piece or p.out_channels % piece:
        return
    if p.taps == math.prod(p.stride) or not can_be_folded(p) or not _fits_integers(p, multiprocessors):
        return
    for row_blocks in (1, 2):
        dense = Tile(p, itemsize, row_blocks, _LEAST_LINES, 1, 1, multiprocessors)
        menu = _lines_of(dense)
        for lines, shape in itertools.product(menu, _shapes_of(dense)):
            whole = shape.strips * shape.segments == 1
            if itemsize == 2 and not shape.group and (row_blocks == 2 or (lines != menu[0] and not whole)):
                continue  # few images are for it, and it would be a kernel more to compile
            tile = changed(shape, lines=lines)
            if tile.possible:
                yield tile


def _lines_of(tile: Tile) -> list[int]:
    """The menu of lines, the most first: of the fewest items, or of up to two, four or eight times as many."""
    channels, found = tile.problem.out_channels, dict[int, int]()
    for lines in range(_MOST_SUMS // tile.row_blocks, 0, -_LEAST_LINES):
        blocks = -(-channels // lines)
        if not tile.packed or channels % lines == 0:
            found[blocks] = up_to_multiple(-(-channels // blocks), _LEAST_LINES)  # the least of as many blocks
    least, times = min(found, default=0), (1, 2, 4, 8) if tile.row_blocks == 1 else (1,)
    counts = {max(count for count in found if count <= least * more) for more in times if found}
    return [found[count] for count in sorted(counts)]


def _shapes_of(dense: Tile) -> Iterator[Tile]:
    """The rows that an item may have, as tiles of the fewest lines."""
    yield from _cuts_of(dense)
    if dense.itemsize == 2:
        yield from _cuts_of(changed(dense, group=_GROUP_ROWS))
        if even_share(cells_of(dense.problem)[1], _GROUP_ROWS) == _GROUP_ROWS:
            yield from _cuts_of(changed(dense, group=_GROUP_ROWS + dense.halo[1]))


def _cuts_of(tile: Tile) -> Iterator[Tile]:
    """A tile as images are cut for it: whole ones together, strips of eight cells, or the two best ways into others."""
    p, (height, width), rows = tile.problem, cells_of(tile.problem), tile.rows
    if tile.group > _GROUP_ROWS:
        images = rows // (height * _GROUP_ROWS) if height % _GROUP_ROWS == 0 else 1
        yield changed(tile, images=even_share(p.batch, max(1, images)), strips=-(-width // _GROUP_ROWS))
    elif not tile.group and height * width <= rows:
        yield changed(tile, images=even_share(p.batch, rows // (height * width)), strips=1)
    else:
        yield from (changed(tile, images=1, strips=strips) for strips in _best_strips(tile))


def _best_strips(tile: Tile) -> list[int]:
    """The two ways to cut images into strips that bring the least, of those whose patches are boxes."""
    p, (height, width), rows = tile.problem, cells_of(tile.problem), tile.rows
    down, across = tile.halo
    free = SHARED_BYTES - tile.bias_bytes - _BARRIER_BYTES - _LEAST_STAGES * tile.weight_bytes
    read, found = 3 * p.taps / math.prod(p.stride) * rows, []
    for cells in {-(-width // strips) for strips in range(1, min(width, _MOST_STRIPS) + 1)}:
        step = cells + across if tile.group else cells
        patch = _patch_rows(height, step, rows) + down, cells + across
        positions = math.prod(patch)
        if max(patch) <= LONGEST_BOX and 2 * _slot_bytes(positions) <= free:
            strips = -(-width // cells)
            found.append((strips * -(-height * step // rows) * (read + positions), strips))
    return [strips for _, strips in sorted(found)[:2]]


def _patch_rows(height: int, across: int, rows: int) -> int:
    """Rows of cells of an item, at most: all of ``height``, or those that so many rows of the product reach over."""
    if height * across <= rows:
        return height
    return (rows + across - math.gcd(rows, across) - 1) // across + 1


def _slot_bytes(positions: int) -> int:
    return up_to_multiple(positions * CHUNK_BYTES, _SWIZZLED_BYTES)


def _fits_integers(problem: Problem, multiprocessors: int) -> bool:
    """Whether the kernel's integers reach as far as any tile of a problem does."""
    p, (height, width) = problem, problem.output_size
    # Also what fills the last boxes, and blocks of threads that look for a next item.
    cells = (math.prod(cells_of(p)) + 2 * BLOCK_ROWS * _MOST_STRIPS) * (p.batch + 2 * BLOCK_ROWS)
    items = cells * math.prod(p.stride) * (p.out_channels // _LEAST_LINES + 1) + multiprocessors
    rows = (p.batch + 2 * BLOCK_ROWS) * (height + 2 * BLOCK_ROWS * p.stride[0])
    pieces = math.prod(p.output_shape) // 4
    return max(items, rows, width + LONGEST_BOX, pieces) <= INT32_MAX


class ImplicitGemmNhwc(OneFormatForward):
    name = "sm90/implicit_gemm_nhwc"
    serves = "one group, kernels larger than their stride, phases that all have taps, channels of whole 16 bytes"
    only_in = torch.channels_last
    clock_rate = FAST_CLOCK_RATE

    def fitted(self, config: Config, direction: Pass, tile: Tile) -> Tile | None:
        problem = config.problem
        if problem.batch == 0 or not _fits_integers(problem, tile.multiprocessors):
            return None
        # Both ways that groups of rows lie in lines are compiled alike.
        groups = (_GROUP_ROWS, _GROUP_ROWS + tile.halo[1]) if tile.group else (0,)
        shapes = (changed(tile, problem=problem, group=group) for group in groups)
        cuts = (cut for shape in shapes for cut in _cuts_of(shape) if cut.possible)
        return min(cuts, key=lambda cut: cut.cycles, default=None)

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        p = tile.problem
        weights = tile.weights((1, p.out_channels, p.in_channels, p.taps), (BOX_LINES, 1, tile.channels, 1))
        across, (slots, stages), (rows, columns) = tile.across, tile.ring_sizes, tile.patch_size
        strip_rows, box = cells_of(p)[0] * across, (tile.channels, columns, rows, tile.images)
        input_map = image_map(p.input_shape, tile.itemsize, box, channels_last=True)
        params: Params = {
            "input, weights": (input_map, weights),
            "bias, output": ("bias", "output"),
            "batch, items, out_h, out_w": (p.batch, tile.items, *p.output_size),
            "images, strips, segments": (tile.images, tile.strips, tile.segments),
            "strip_cells, across, strip_rows": (tile.strip_cells, across, strip_rows),
            "patch_w, image_lines, group_bytes": (columns, rows * columns, tile.group * CHUNK_BYTES),
            "slots, stages": (slots, stages),
            "patch_bytes, slot_bytes": (tile.positions * CHUNK_BYTES, tile.slot_bytes),
            "first_stage, first_bias": (slots * tile.slot_bytes, tile.first_bias),
            "by_strips, by_segments": (reciprocal(tile.strips), reciprocal(tile.segments)),
            "by_across, by_strip_rows": (reciprocal(across), reciprocal(strip_rows)),
        }
        macros: Macros = {  # none depends on sizes of images
            "ELEMENT_T": ELEMENT_TYPES[config.dtype],
            "PACKED": int(tile.packed),
            "DEFERRED_STORES": int(tile.kept),
            **named_macros(p, "in_channels out_channels"),
            **named_macros(tile, "row_blocks lines"),
            "DENSE": int(tile.group == 0),
            **geometry_macros(p),
        }
        return forward_program(config, "implicit_gemm_nhwc", tile, macros, params)


KERNEL = ImplicitGemmNhwc(tiles_of)
