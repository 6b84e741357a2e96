"""Shared by gemm_depth_to_space and gemm_fold_pixels: products whose rows are positions (pipeline/pixels_on_m.cuh).

gemm_fold_pixels.py explains the words, with an example. Threads that multiply are consumers, those that copy producers.
implicit_gemm_nhwc, whose rows are cells, shares :class:`ChunkedTile` and :func:`forward_program`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from gemmconv.geometry import Pair, Problem, Shape4
from gemmconv.hashing import cached_property
from gemmconv.kernels.base import Config
from gemmconv.kernels.integers import INT32_MAX, up_to_multiple
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, named_macros
from gemmconv.kernels.program import Launch, Operand, Params, Program, TensorMapSpec, gathering, reciprocal
from gemmconv.kernels.sm90.base import SHARED_BYTES, image_map
from gemmconv.kernels.weights.pack import k_major_macros, packing

BLOCK_POSITIONS = 128  # positions that two warpgroups multiply at once
MOST_LINES = 256  # lines of a product that tensor cores take
CHUNK_BYTES = 128  # bytes of a pixel's channels that come together, and of a line's in a stage
LEAST_LINES = 64  # of a line block, unless it has all lines: a smaller one would read all inputs for few products
BOX_LINES = 64  # lines of a box of weights
CONSUMERS = 256  # threads that multiply and store
_THREADS = CONSUMERS + 96 + 32  # with those that copy inputs, and a warp that copies weights
_BARRIER_BYTES = 16  # bytes of the barriers of a stage
_PIECE = 4  # inputs that are copied together, at least
_MOST_STAGES = 12


class ChunkedTile:
    """A tile of a forward kernel whose operands come to shared memory in chunks of channels."""

    problem: Problem
    itemsize: int  # bytes of an element: 2, or 4 for float32 that is rounded to TF32
    lines: int  # lines of weights that are multiplied at once

    @property
    def packed(self) -> bool:
        """Whether weights are laid out by a launch of their own."""
        return self.itemsize == 4

    @property
    def channels(self) -> int:
        """Channels of a chunk."""
        return CHUNK_BYTES // self.itemsize

    @property
    def chunks(self) -> int:
        """Chunks of a pixel's channels."""
        return -(-self.problem.in_channels * self.itemsize // CHUNK_BYTES)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a chunk of so many lines of weights; boxes of a tensor map are whole."""
        return (self.lines if self.packed else up_to_multiple(self.lines, BOX_LINES)) * CHUNK_BYTES

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights."""
        lines = up_to_multiple(self.problem.out_channels * self.problem.taps, self.lines)
        return lines * self.chunks * CHUNK_BYTES if self.packed else 0

    def weights(self, shape: Shape4, box: Shape4) -> str | TensorMapSpec:
        """The kernel's parameter for weights: the packed ones, or a tensor map of weights seen as images of a shape."""
        return "packed" if self.packed else image_map(shape, self.itemsize, box, channels_last=True, name="weight")


class Windows(NamedTuple):
    per_image: int = 1  # windows of an image, each for an item: parts of its only row, or all of it
    step: int = 0  # positions from one window to the next
    left: int = 0  # left halo: positions of a window before that of its first cell


@dataclass(frozen=True)
class PositionRows(ChunkedTile):
    """The work of a thread block of such a kernel.

    What has a value below is no field: gemm_depth_to_space has these values, gemm_fold_pixels others.
    """

    problem: Problem  # the geometry
    itemsize: int  # bytes of an element: 2, or 4 for float32 that is rounded to TF32
    lines: int  # lines of a line block, all taps of some output channels
    multiprocessors: int  # multiprocessors of the GPU, each of which runs one thread block

    item_positions = BLOCK_POSITIONS  # positions of an item
    position_blocks = 1  # position blocks of an item
    item_images = 0  # images of an item that has whole ones; 0 where items go on across images
    cells_of_image = 1, 1  # cells of an image, down and across, where a kernel folds them
    windows = Windows()  # how items divide an image
    column_bytes = 0  # bytes of shared memory that the epilogue needs, beside stages, biases and barriers

    @property
    def input_size(self) -> Pair:
        """Rows and columns of an image, as the kernel sees it."""
        return self.problem.input_size

    @property
    def positions(self) -> int:
        """Positions of all images."""
        return self.problem.batch * self.problem.in_pixels

    @property
    def line_blocks(self) -> int:
        return -(-self.problem.out_channels * self.problem.taps // self.lines)

    @property
    def input_bytes(self) -> int:
        """Bytes of a chunk of the inputs of an item."""
        return self.position_blocks * BLOCK_POSITIONS * CHUNK_BYTES

    @property
    def bias_bytes(self) -> int:
        """Bytes of the biases of a line block, with a copy for each warp."""
        return -(-CONSUMERS // 32 * (self.lines // self.problem.taps) // 4) * 16

    @cached_property
    def stages(self) -> int:
        """Buffers of shared memory with a chunk of inputs and of weights each."""
        stage_bytes = self.input_bytes + self.weight_bytes + _BARRIER_BYTES
        return min((SHARED_BYTES - self.bias_bytes - self.column_bytes) // stage_bytes, _MOST_STAGES)

    @property
    def copied_bytes(self) -> int:
        """Bytes that are copied to shared memory in all."""
        return self.items * self.chunks * (self.lines * CHUNK_BYTES + self.input_bytes)

    @property
    def first_bytes(self) -> tuple[int, int]:
        """Where the epilogue's own bytes and (behind these and biases) barriers begin in shared memory."""
        own = self.stages * (self.input_bytes + self.weight_bytes)
        return own, own + self.column_bytes + self.bias_bytes

    @property
    def shared_bytes(self) -> int:
        return self.first_bytes[1] + self.stages * _BARRIER_BYTES

    @property
    def places(self) -> int:
        """Items of each line block."""
        return -(-self.positions // self.item_positions)

    @property
    def items(self) -> int:
        """Items of all line blocks, at which thread blocks take turns."""
        return self.places * self.line_blocks

    @property
    def piece(self) -> int:
        """Inputs of a channel that are copied together: 16 bytes, or less if images are not whole pieces."""
        return math.gcd(16 // self.itemsize, self.problem.in_pixels)


def serves(problem: Problem, itemsize: int, multiprocessors: int) -> bool:
    """Whether a problem suits the copies and the integers of these kernels, whatever the tile.

    Images are whole pieces, rows of 16-bit weights begin at multiples of 16 bytes as boxes do, and 32-bit integers hold
    all that the kernels count.
    """
    p = problem
    if p.groups > 1 or p.batch == 0 or p.in_pixels % _PIECE or (itemsize == 2 and p.out_channels * p.taps % 8):
        return False
    # Bounds: `elements` of the packed weights and of an image, `items` of i in each_item (it ends after the last item),
    # `reach` of position in produce_inputs, outputs of at in gemm_depth_to_space.cu.
    elements = (p.in_channels + 64) * max(p.out_channels * p.taps + MOST_LINES, p.in_pixels)
    least = min(BLOCK_POSITIONS // 2, p.in_pixels)  # positions of an item, at least, that no other has
    items = 2 * -(-p.batch * p.in_pixels // least) * -(-p.out_channels * p.taps // LEAST_LINES) + multiprocessors
    reach = p.batch * p.in_pixels + 2 * BLOCK_POSITIONS
    return max(elements, items, reach, MOST_LINES // p.taps * p.out_pixels) <= INT32_MAX


def program(config: Config, name: str, tile: PositionRows, own_macros: Macros, run: int = 1) -> Program:
    """A forward pass by csrc/sm90/``name``.cu, which asks for ``own_macros`` beside those of pipeline/pixels_on_m.cuh.

    Packing gives ``run`` lines beside each other to a thread.
    """
    p, windows = tile.problem, tile.windows
    macros: Macros = {
        "ELEMENT_T": ELEMENT_TYPES[config.dtype],
        "KERNEL_H": p.kernel_size[0],
        "KERNEL_W": p.kernel_size[1],
        "WHOLE_CHANNELS": int(p.in_channels * tile.itemsize % CHUNK_BYTES == 0),
        "CHUNK_CLASS": 1 if tile.chunks == 1 or tile.position_blocks == 2 else 2 + tile.chunks % 2,  # see `multiply`
        "WINDOWED": int(windows.per_image > 1),
        **named_macros(tile, "packed lines position_blocks piece column_bytes"),
        **own_macros,
    }
    (in_h, in_w), (cells_h, cells_w) = tile.input_size, tile.cells_of_image
    divisors = tile.line_blocks, in_h * in_w, windows.per_image, in_w, cells_h * cells_w, cells_w
    params: Params = {
        # Rows of weightᵀ lie like channels of an image, one input channel behind the other.
        "weights": tile.weights((1, p.out_channels * p.taps, 1, p.in_channels), (BOX_LINES, tile.channels, 1, 1)),
        "input, bias, output": ("input", "bias", "output"),
        "positions, items": (tile.positions, tile.items),
        "in_channels, out_channels": (p.in_channels, p.out_channels),
        "chunks, line_blocks": (tile.chunks, tile.line_blocks),
        "by_line_blocks, by_pixels, by_windows, by_width, by_cells, by_cells_w": tuple(map(reciprocal, divisors)),
        "in_h, in_w, images, item_positions": (in_h, in_w, tile.item_images, tile.item_positions),
        "windows, step, left": windows,
        "stages, first_columns, first_barrier": (tile.stages, *tile.first_bytes),
    }
    return forward_program(config, name, tile, macros, params, run)


def forward_program(config: Config, name: str, tile: Any, macros: Macros, params: Params, run: int = 1) -> Program:
    """A forward pass by csrc/sm90/``name``.cu, whose blocks, one a multiprocessor, take turns at the tile's items.

    The tile is a :class:`ChunkedTile`. Packing gives ``run`` lines beside each other to a thread.
    """
    grid, block = (min(tile.items, config.spec.multiprocessors), 1, 1), (_THREADS, 1, 1)
    main = Launch(f"sm90/{name}.cu", macros, grid, block, params, tile.shared_bytes, overlaps=tile.packed)
    weight = Operand("weight", config.memory_format, 1 if tile.packed else 16)
    if not tile.packed:
        return gathering(config, "forward", [main], weight=weight)
    pack = packing(k_major_macros(tile.problem, tile.lines, tile.chunks * (CHUNK_BYTES // 16), run))
    return gathering(config, "forward", [pack, main], {"packed": tile.packed_bytes}, weight=weight)
