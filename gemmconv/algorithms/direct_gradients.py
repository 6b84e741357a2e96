"""Host side of csrc/direct_input_grad.cu and csrc/direct_weight_grad.cu: the gradients of ``direct``.

Both kernels stage tiles of grad_output in shared memory and keep their sums in registers. How large the tiles are, who
owns what, and how many slices the weight gradient's pixels are cut into, follows from the problem and the element type
alone, so sums have the same order on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import torch

from gemmconv.algorithms.base import Config, Gradient, accumulator_dtype, in_either_format, strides_of, with_strides
from gemmconv.algorithms.integers import even_share, power_of_two
from gemmconv.algorithms.launches import MAX_GRID_Y, params_struct, plane_grid
from gemmconv.algorithms.macros import ELEMENT_TYPES, Macros, geometry_macros
from gemmconv.algorithms.turning import from_nchw, to_nchw
from gemmconv.geometry import Problem

_INT32_MAX = 2**31 - 1
_MULTIPROCESSORS = 132  # of the H200; fewer only means more blocks in a row
_REGISTERS = 65_536  # of a multiprocessor
_STATIC_SHARED = 48 << 10  # bytes of shared memory that a kernel has without asking
_SHARED = 24 << 10  # bytes that leave room for several blocks on a multiprocessor
_SHARED_FOR_TWO = 32 << 10  # the same for two channels of 16-bit elements: of one, few loads are on their way together
_VECTOR_BYTES = 16
_WIDEST_TAPS = 16  # kernel columns that the kernels unroll
_MOST_STEPS = 8  # vectors of a patch row that a thread loads
_UNROLLED = 512  # multiply-adds of a thread for one staged channel: bounds the code
_WEIGHTS = 12 << 10  # bytes of weights that are worth staging at once
_BATCH_WORDS = 24  # registers for loads in flight while nothing is computed
_BATCH_LOADS = 12  # which these are at most
_PREFETCH_WORDS = 32  # registers for them while something is
_FEW_WORDS = 24  # registers for sums that leave room for much else
_OTHER_WORDS = 40  # registers for addresses and what is being computed
_LONGEST_SUM = 1024  # products that are added one by one, so that roundings stay few


# What weight gradients take on an H200, fitted to 183 of 62 layers: 11% from what was measured (geometric mean).
_WEIGHT_GRAD_LAUNCH, _TILE_SECONDS = 11e-6, 92e-9  # of both kernels; of a tile, beside its bytes and products
_WEIGHT_GRAD_RATE, _STAGED_RATE, _COPY_RATE = 50e12, 3.05e12, 9.3e12  # operations; bytes of patches, of memory

InputGradParams = params_struct(
    "direct_input_grad_params",
    ("grad_output", "weight", "grad_input"),
    ("planes", "groups", "h_in", "w_in", "h_out", "w_out", "tiles_w", "weight_channel", "weight_tap"),
)
WeightGradParams = params_struct(
    "direct_weight_grad_params",
    ("grad_output", "input", "partials"),
    ("images", "groups", "h_in", "w_in", "h_out", "w_out", "tiles_h", "tiles_w", "tiles", "slices"),
)
WeightGradSumParams = params_struct(
    "direct_weight_grad_sum_params", ("partials", "grad_weight"), ("slices",), long_integers=("elements",)
)


# The patch: what csrc/common/patch.cuh makes of a tile. Same names, same rules.


@dataclass(frozen=True)
class Patch:
    """The staged part of grad_output.

    Attributes:
        problem: the geometry.
        itemsize: bytes of an element.
        tile: input pixels of a tile, ``(height, width)``.
        taps: kernel taps staged at once.
        planes: planes staged at once.
        threads: threads of a block.
    """

    problem: Problem
    itemsize: int
    tile: tuple[int, int]
    taps: tuple[int, int]
    planes: int
    threads: int

    def _axis(self, axis: int) -> tuple[int, int, bool]:
        """Extent in places, places between neighbouring pixels, and whether it is compact."""
        stride, dilation = self.problem.stride[axis], self.problem.dilation[axis]
        divisor = math.gcd(stride, dilation)
        pixels, taps = self.tile[axis], self.taps[axis]
        span = (pixels - 1) * (stride // divisor) + (taps - 1) * (dilation // divisor) + 1
        compact = pixels * taps < span
        return (pixels * taps, taps, True) if compact else (span, stride // divisor, False)

    @property
    def vector(self) -> int:
        """Neighbouring elements of a row that one load takes."""
        problem = self.problem
        compact = self._axis(1)[2]
        if compact or math.gcd(problem.stride[1], problem.dilation[1]) > 1 or self.taps[1] < problem.kernel_size[1]:
            return 1
        step = self.tile[1] * problem.stride[1]
        return math.gcd(_VECTOR_BYTES // self.itemsize, problem.output_size[1], step)

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        lead = -self.problem.padding[1] % self.vector
        return -(-(lead + self._axis(1)[0]) // self.vector)

    @property
    def steps(self) -> int:
        """Vectors of a row that a thread loads."""
        return -(-self.vectors // min(self.threads, 32))

    @property
    def passes(self) -> int:
        """Rows that a thread helps to load."""
        rows_at_once = self.threads // -(-self.vectors // self.steps)
        return -(-self.planes * self._axis(0)[0] // rows_at_once)

    def words(self, passes: int) -> int:
        """Registers that the loads of some passes fill."""
        return passes * self.steps * max(1, self.vector * self.itemsize // 4)

    @property
    def elements(self) -> int:
        """Elements in shared memory."""
        pitch = self._axis(1)[1]
        banks = min(pitch & -pitch, 32)
        run = self.vector // min(self.vector, banks)
        piece = min(run, 16 // max(4, self.itemsize))
        bank_pitch = _up(-(-self.vectors * self.vector // banks), piece)
        return self.planes * self._axis(0)[0] * banks * bank_pitch

    def macros(self, prefetch: bool, most_words: int) -> Macros:
        """The macros that say how it is staged; with ``most_words`` registers for loads where nothing is prefetched."""
        loads = min(_BATCH_LOADS, most_words * 4 // (self.vector * self.itemsize))
        batch = min(self.passes, max(1, loads // self.steps))
        passes = -(-self.passes // batch)
        return {"VECTOR": self.vector, "BATCH": -(-self.passes // passes), "PREFETCH": int(prefetch)}


# Input gradient


@dataclass(frozen=True)
class InputGradTile:
    """What a block and a thread of direct_input_grad_kernel own; the macros of the same names, in lower case."""

    rows: int
    channels: int
    column_threads: int
    row_threads: int
    planes: int
    channel_threads: int
    chunk_channels: int
    taps: tuple[int, int]

    @property
    def threads(self) -> int:
        return self.column_threads * self.row_threads * self.planes * self.channel_threads

    def patch(self, problem: Problem, itemsize: int) -> Patch:
        tile = (self.row_threads * self.rows, self.column_threads)
        return Patch(problem, itemsize, tile, self.taps, self.planes * self.chunk_channels, self.threads)

    def weights(self, output_channels: int) -> int:
        """Weights in shared memory, for as many output channels."""
        pitch = self.channels if self.channels <= 2 else 4 if self.channels <= 4 else 8
        return self.planes * output_channels * self.taps[0] * self.taps[1] * self.channel_threads * pitch

    def shared_bytes(self, problem: Problem, itemsize: int) -> int:
        elements = self.patch(problem, itemsize).elements + self.weights(self.chunk_channels)
        return elements * _sum_bytes(itemsize)

    def resident(self, itemsize: int, wide_index: bool) -> int:
        """Blocks that a multiprocessor is to have registers for."""
        if not wide_index and self.rows * self.channels * _sum_bytes(itemsize) // 4 <= 16:
            return min(6, 768 // self.threads)
        # 16-bit elements are not prefetched (see _prefetches): other blocks compute while one loads.
        return min(4, (768 if itemsize == 2 and not wide_index else 512) // self.threads)

    def blocks(self, problem: Problem) -> int:
        return math.prod(self.grid(problem)[:2])

    def grid(self, problem: Problem) -> tuple[int, int, int]:
        """Blocks over channels and tiles, blocks over planes, tiles across an image."""
        channel_blocks = -(-problem.gemm_k // (self.channels * self.channel_threads))
        tiles_h = -(-problem.input_size[0] // (self.rows * self.row_threads))
        tiles_w = -(-problem.input_size[1] // self.column_threads)
        return channel_blocks * tiles_h * tiles_w, -(-problem.batch * problem.groups // self.planes), tiles_w


@lru_cache(maxsize=1024)
def input_grad_tile(problem: Problem, itemsize: int) -> InputGradTile:
    """The tile for a problem: as many sums a thread as registers hold well, then blocks that fit and are many."""
    wide = itemsize == 8
    height, channels_out = problem.input_size[0], problem.out_channels // problem.groups
    channels = even_share(problem.gemm_k, 4 if wide else 8)
    rows = _rows(height, min(8 if channels <= 2 else 4, (16 if wide else 32) // channels))
    threads = 256 if rows <= 4 else 128
    taps_w = even_share(problem.kernel_size[1], _WIDEST_TAPS)
    taps_h = even_share(problem.kernel_size[0], max(1, _UNROLLED // (taps_w * rows * channels)))
    channel_tiles = -(-problem.gemm_k // channels)
    channel_threads = min((4, 2, 1), key=lambda threads: _up(channel_tiles, threads))
    tile = InputGradTile(
        rows=rows,
        channels=channels,
        column_threads=_column_threads(problem, taps_w, threads // channel_threads),
        row_threads=1,
        planes=1,
        channel_threads=channel_threads,
        chunk_channels=1,
        taps=(taps_h, taps_w),
    )
    tile = replace(tile, row_threads=_power_of_two_within(-(-height // rows), threads // tile.threads))
    tile = replace(tile, planes=_power_of_two_within(problem.batch * problem.groups, threads // tile.threads))

    # Room in shared memory, then blocks for every multiprocessor.
    while tile.shared_bytes(problem, itemsize) > _SHARED:
        if tile.planes > 1:
            tile = replace(tile, planes=tile.planes // 2)
        elif tile.row_threads > 1 and tile.threads > 128:
            tile = replace(tile, row_threads=tile.row_threads // 2)
        elif tile.rows > 2:
            tile = replace(tile, rows=_rows(height, tile.rows // 2))
        elif tile.row_threads > 1 and tile.threads > 32:
            tile = replace(tile, row_threads=tile.row_threads // 2)
        else:
            break
    while tile.shared_bytes(problem, itemsize) > _STATIC_SHARED:
        tile = _smaller(tile)
    while tile.blocks(problem) < 2 * _MULTIPROCESSORS and tile.threads > 64:
        if tile.planes > 1:
            tile = replace(tile, planes=tile.planes // 2)
        elif tile.row_threads > 1:
            tile = replace(tile, row_threads=tile.row_threads // 2)
        else:
            break

    # Channels in a chunk: all, or as many as can be loaded while a chunk is computed.
    fitting = [tile]
    for chunk_channels in sorted({-(-channels_out // chunks) for chunks in range(1, channels_out + 1)}):
        larger = replace(tile, chunk_channels=chunk_channels)
        most = _SHARED_FOR_TWO if itemsize == 2 and chunk_channels == 2 else _SHARED
        if larger.shared_bytes(problem, itemsize) <= most:
            fitting.append(larger)
    prefetched = [larger for larger in fitting if _prefetches(larger, problem, itemsize)]
    if fitting[-1].chunk_channels < channels_out and prefetched:
        return prefetched[-1]
    return fitting[-1]


def _prefetches(tile: InputGradTile, problem: Problem, itemsize: int) -> bool:
    """Whether a chunk's loads go on while the one before is computed.

    Not those of 16-bit elements: converting them takes registers beside those of the loads. KernelBench 75 in float16
    took 504 us with, 394 without, in as many blocks; in twice as many, of two channels a chunk, 392 and 274.
    """
    if itemsize == 2:
        return False
    patch = tile.patch(problem, itemsize)
    sums = tile.rows * tile.channels * _sum_bytes(itemsize) // 4
    return patch.words(patch.passes) <= min(_PREFETCH_WORDS, 64 - sums)


def input_grad_macros(problem: Problem, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/direct_input_grad.cu."""
    itemsize = dtype.itemsize
    tile = input_grad_tile(problem, itemsize)
    channels_out = problem.out_channels // problem.groups
    one_chunk_of_taps = tile.taps == problem.kernel_size
    chunks = -(-channels_out // tile.chunk_channels) * (1 if one_chunk_of_taps else 2)
    patch_bytes = tile.patch(problem, itemsize).elements * _sum_bytes(itemsize)
    weight_bytes = tile.weights(channels_out) * _sum_bytes(itemsize)
    weights_once = one_chunk_of_taps and weight_bytes <= _WEIGHTS and weight_bytes + patch_bytes <= _STATIC_SHARED
    prefetch = chunks > 1 and _prefetches(tile, problem, itemsize)
    geometry = _problem_macros(problem, dtype)
    return {
        "ROWS": tile.rows,
        "CHANNELS": tile.channels,
        "COLUMN_THREADS": tile.column_threads,
        "ROW_THREADS": tile.row_threads,
        "PLANES": tile.planes,
        "CHANNEL_THREADS": tile.channel_threads,
        "CHUNK_CHANNELS": tile.chunk_channels,
        "TAPS_H": tile.taps[0],
        "TAPS_W": tile.taps[1],
        "WEIGHTS_ONCE": int(weights_once),
        "MIN_BLOCKS": tile.resident(itemsize, "INDEX_64" in geometry),
        **tile.patch(problem, itemsize).macros(prefetch, _BATCH_WORDS),
        **geometry,
    }


def prepare_input_grad(config: Config) -> Gradient:
    """Prepare grad_input from (grad_output, weight)."""
    from gemmconv.runtime.launch import load

    problem, dtype = config.problem, config.dtype
    shape, strides = problem.input_shape, strides_of(problem.input_shape, config.memory_format)
    if not math.prod(shape):
        return lambda grad_output, weight: with_strides(grad_output.new_empty(shape), strides)

    macros = input_grad_macros(problem, dtype)
    kernel = load("direct_input_grad.cu", "direct_input_grad_kernel", macros, config.device.index)
    tile = input_grad_tile(problem, dtype.itemsize)
    pixel_blocks, plane_blocks, tiles_w = tile.grid(problem)
    grid, block = plane_grid(pixel_blocks, plane_blocks), (tile.threads, 1, 1)
    sizes = (problem.batch * problem.groups, problem.groups, *problem.input_size, *problem.output_size, tiles_w)
    alignment = int(macros["VECTOR"]) * dtype.itemsize
    turned = to_nchw(config, problem.output_shape)
    turned_back = from_nchw(config, shape)

    def call(grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        grad_input = grad_output.new_empty(shape)
        grad_output, (weight, steps) = _aligned(turned(grad_output), alignment), in_either_format(weight)
        params = InputGradParams(grad_output.data_ptr(), weight.data_ptr(), grad_input.data_ptr(), *sizes, *steps)
        kernel.launch(grid, block, params)
        return turned_back(grad_input)

    return call


# Weight gradient


@dataclass(frozen=True)
class WeightGradTile:
    """What a block and a thread of direct_weight_grad_kernel own; the macros of the same names, in lower case."""

    rows: int
    steps: int
    ci_channels: int
    co_channels: int
    column_threads: int
    row_threads: int
    images: int
    ci_threads: int
    co_threads: int
    taps: tuple[int, int]

    @property
    def pixel_threads(self) -> int:
        return self.column_threads * self.row_threads * self.images

    @property
    def threads(self) -> int:
        return self.pixel_threads * self.ci_threads * self.co_threads

    @property
    def sums(self) -> int:
        """Sums of a thread."""
        return self.co_channels * self.ci_channels * self.taps[0] * self.taps[1]

    def patch(self, problem: Problem, itemsize: int) -> Patch:
        tile = (self.row_threads * self.rows * self.steps, self.column_threads)
        planes = self.images * self.co_threads * self.co_channels
        return Patch(problem, itemsize, tile, self.taps, planes, self.threads)

    def shared_bytes(self, problem: Problem, itemsize: int) -> int:
        scratch = self.threads // 32 * self.sums
        return max(self.patch(problem, itemsize).elements, scratch) * _sum_bytes(itemsize)

    def tiles(self, problem: Problem) -> tuple[int, int, int]:
        """Tiles over images, down an image and across it."""
        return (
            -(-problem.batch // self.images),
            -(-problem.input_size[0] // (self.row_threads * self.rows * self.steps)),
            -(-problem.input_size[1] // self.column_threads),
        )

    def weight_blocks(self, problem: Problem) -> int:
        """Blocks that share a slice."""
        co_blocks = -(-problem.out_channels // problem.groups // (self.co_channels * self.co_threads))
        ci_blocks = -(-problem.gemm_k // (self.ci_channels * self.ci_threads))
        tap_blocks = math.prod(-(-problem.kernel_size[axis] // self.taps[axis]) for axis in (0, 1))
        return problem.groups * co_blocks * ci_blocks * tap_blocks

    def resident(self, itemsize: int) -> int:
        """Blocks that a multiprocessor is to have registers for."""
        few = self.sums * _sum_bytes(itemsize) // 4 <= _FEW_WORDS
        return min(8, 768 // self.threads) if few else min(4, 512 // self.threads)

    def registers(self, itemsize: int) -> int:
        """Registers that a thread then may have."""
        return min(255, _REGISTERS // (self.resident(itemsize) * self.threads) // 8 * 8)

    def spare_words(self, itemsize: int) -> int:
        """Registers left for loads of grad_output."""
        words = (self.sums + self.rows * self.ci_channels) * _sum_bytes(itemsize) // 4
        return self.registers(itemsize) - _OTHER_WORDS - words


@lru_cache(maxsize=1024)
def weight_grad_tile(problem: Problem, itemsize: int) -> WeightGradTile:
    """The tile for a problem: as many sums a thread as registers hold, then warps that share what is staged."""
    most_sums = 32 if itemsize == 8 else 64
    height, channels_out = problem.input_size[0], problem.out_channels // problem.groups
    taps_w = even_share(problem.kernel_size[1], _WIDEST_TAPS)
    taps_h = even_share(problem.kernel_size[0], max(1, most_sums // taps_w))
    taps = taps_h * taps_w
    ci_channels = _share(problem.gemm_k, max(1, min(8, most_sums // taps)))
    co_channels = _share(channels_out, max(1, min(4, most_sums // (taps * ci_channels))))
    sums = taps * ci_channels * co_channels
    rows = _rows(height, max(1, min(8, most_sums // 4 // ci_channels, _UNROLLED // sums)))
    ci_tiles, co_tiles = -(-problem.gemm_k // ci_channels), -(-channels_out // co_channels)

    def idle_and_read_again(threads: tuple[int, int]) -> tuple[int, int]:
        ci_blocks, co_blocks = -(-ci_tiles // threads[0]), -(-co_tiles // threads[1])
        reads = problem.out_pixels * channels_out * ci_blocks + problem.in_pixels * problem.gemm_k * co_blocks
        return ci_blocks * threads[0] * co_blocks * threads[1], reads

    candidates = [(ci, co) for ci in (1, 2, 4) for co in (1, 2, 4) if ci * co <= 4]
    ci_threads, co_threads = min(candidates, key=idle_and_read_again)
    pixel_threads = 128 // (co_threads * ci_threads)
    tile = WeightGradTile(
        rows=rows,
        steps=1,
        ci_channels=ci_channels,
        co_channels=co_channels,
        column_threads=_column_threads(problem, taps_w, pixel_threads),
        row_threads=1,
        images=1,
        ci_threads=ci_threads,
        co_threads=co_threads,
        taps=(taps_h, taps_w),
    )
    tile = replace(tile, row_threads=_power_of_two_within(-(-height // rows), pixel_threads // tile.column_threads))
    tile = replace(tile, images=_power_of_two_within(problem.batch, pixel_threads // tile.pixel_threads))
    if tile.pixel_threads < 32:  # images that there are not take no part
        tile = replace(tile, images=tile.images * 32 // tile.pixel_threads)

    # Room in shared memory, then blocks for every multiprocessor.
    while tile.shared_bytes(problem, itemsize) > _SHARED:
        if tile.rows > 4:
            tile = replace(tile, rows=_rows(height, tile.rows // 2))
        elif tile.pixel_threads > 32:
            tile = _fewer_pixels(tile)
        else:
            break
    while tile.shared_bytes(problem, itemsize) > _STATIC_SHARED:
        tile = _smaller(tile)
    while (
        math.prod(tile.tiles(problem)) * tile.weight_blocks(problem) < 2 * _MULTIPROCESSORS and tile.pixel_threads > 32
    ):
        tile = _fewer_pixels(tile)

    # Longer tiles for many sums: loading the next tile beside this one would take registers that they have not.
    if tile.sums * _sum_bytes(itemsize) // 4 > _FEW_WORDS:
        for steps in (2, 3, 4, 6, 8):
            longer = replace(tile, steps=steps)
            if (
                longer.rows * longer.row_threads * (steps - 1) < height
                and longer.shared_bytes(problem, itemsize) <= _SHARED
                and math.prod(longer.tiles(problem)) * longer.weight_blocks(problem) >= 8 * _MULTIPROCESSORS
            ):
                tile = longer
    return tile


def _fewer_pixels(tile: WeightGradTile) -> WeightGradTile:
    if tile.images > 1:
        return replace(tile, images=tile.images // 2)
    if tile.row_threads > 1:
        return replace(tile, row_threads=tile.row_threads // 2)
    return replace(tile, column_threads=tile.column_threads // 2)


def _slices(config: Config, tile: WeightGradTile) -> int:
    """How many slices the tiles are cut into.

    Two rounds of blocks on a large GPU, if slices then have a few tiles to pay for their end; more where sums would be
    so long that their roundings add up; less where the partial sums would exceed the workspace.
    """
    problem, itemsize = config.problem, config.dtype.itemsize
    tiles, weight_blocks = math.prod(tile.tiles(problem)), tile.weight_blocks(problem)
    busy = 2 * _MULTIPROCESSORS * tile.resident(itemsize) // weight_blocks
    just_busy = -(-2 * _MULTIPROCESSORS // weight_blocks)
    exact = -(-tiles * tile.rows * tile.steps // _LONGEST_SUM)
    fitting = config.workspace_limit // (math.prod(problem.weight_shape) * _sum_bytes(itemsize))
    return max(1, min(max(exact, min(busy, max(just_busy, tiles // 4))), tiles, fitting, MAX_GRID_Y))


def weight_grad_macros(problem: Problem, dtype: torch.dtype, slices: int) -> Macros:
    """Macros that specialise csrc/direct_weight_grad.cu."""
    itemsize = dtype.itemsize
    tile = weight_grad_tile(problem, itemsize)
    patch, spare = tile.patch(problem, itemsize), tile.spare_words(itemsize)
    repeated = math.prod(tile.tiles(problem)) > slices
    prefetch = repeated and tile.steps == 1 and patch.words(patch.passes) <= min(_PREFETCH_WORDS, spare)
    return {
        "ROWS": tile.rows,
        "ROWS_DIVIDE": int(problem.input_size[0] % tile.rows == 0),
        "STEPS": tile.steps,
        "CI_CHANNELS": tile.ci_channels,
        "CO_CHANNELS": tile.co_channels,
        "COLUMN_THREADS": tile.column_threads,
        "ROW_THREADS": tile.row_threads,
        "IMAGES": tile.images,
        "CI_THREADS": tile.ci_threads,
        "CO_THREADS": tile.co_threads,
        "TAPS_H": tile.taps[0],
        "TAPS_W": tile.taps[1],
        "RESULT_T": ELEMENT_TYPES[accumulator_dtype(dtype) if slices > 1 else dtype],
        "MIN_BLOCKS": tile.resident(itemsize),
        **patch.macros(prefetch, max(8, min(_BATCH_WORDS, spare - 8))),
        **_problem_macros(problem, dtype),
    }


def weight_grad_workspace_bytes(config: Config) -> int:
    """Bytes of the partial sums of all slices; none where there is one slice."""
    if not config.problem.batch:
        return 0
    slices = _slices(config, weight_grad_tile(config.problem, config.dtype.itemsize))
    partial = math.prod(config.problem.weight_shape) * _sum_bytes(config.dtype.itemsize)
    return slices * partial if slices > 1 else 0


def weight_grad_seconds(config: Config) -> float:
    """Roughly what a weight gradient in NCHW takes: launches, tiles, products, and bytes that go through patches.

    >>> upsampling = Problem(8, 21, 21, 1, (64, 64), (16, 16), stride=(8, 8), padding=(4, 4))
    >>> config = Config(upsampling, torch.float32, torch.device("cuda", 0))
    >>> 2e-3 < weight_grad_seconds(config) < 4e-3  # each of 16 tap rows reads its part of the patches
    True
    """
    p, itemsize = config.problem, config.dtype.itemsize
    tile = weight_grad_tile(p, itemsize)
    tiles = math.prod(tile.tiles(p)) * tile.weight_blocks(p)
    staged = tiles * tile.patch(p, itemsize).elements * _sum_bytes(itemsize)
    products = p.useful_flops / _WEIGHT_GRAD_RATE * (2 if itemsize == 8 else 1)
    copied = staged / _STAGED_RATE + p.least_bytes(itemsize) / _COPY_RATE
    return _WEIGHT_GRAD_LAUNCH + tiles * _TILE_SECONDS / _MULTIPROCESSORS + products + copied


def prepare_weight_grad(config: Config) -> Gradient:
    """Prepare grad_weight from (grad_output, input)."""
    from gemmconv.runtime.launch import load

    problem, dtype = config.problem, config.dtype
    shape = problem.weight_shape
    elements = math.prod(shape)
    if not elements or not math.prod(problem.input_shape):
        return lambda grad_output, input: grad_output.new_zeros(shape)

    tile = weight_grad_tile(problem, dtype.itemsize)
    slices = _slices(config, tile)
    macros = weight_grad_macros(problem, dtype, slices)
    source, index = "direct_weight_grad.cu", config.device.index
    kernel = load(source, "direct_weight_grad_kernel", macros, index)
    sum_kernel = load(source, "direct_weight_grad_sum_kernel", macros, index) if slices > 1 else None
    _, tiles_h, tiles_w = tile.tiles(problem)
    sizes = (problem.batch, problem.groups, *problem.input_size, *problem.output_size)
    cut = (tiles_h, tiles_w, math.prod(tile.tiles(problem)), slices)
    grid, block = (tile.weight_blocks(problem), slices, 1), (tile.threads, 1, 1)
    sum_grid = (-(-elements // 32), 1, 1)
    sum_dtype = accumulator_dtype(dtype)
    alignment = int(macros["VECTOR"]) * dtype.itemsize
    turned = to_nchw(config, problem.output_shape)
    turned_input = to_nchw(config, problem.input_shape)

    def call(grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        grad_weight = grad_output.new_empty(shape)
        partials = grad_weight if sum_kernel is None else grad_output.new_empty((slices, elements), dtype=sum_dtype)
        grad_output, input = _aligned(turned(grad_output), alignment), turned_input(input)
        addresses = (grad_output.data_ptr(), input.data_ptr(), partials.data_ptr())
        kernel.launch(grid, block, WeightGradParams(*addresses, *sizes, *cut))
        if sum_kernel is not None:
            params = WeightGradSumParams(partials.data_ptr(), grad_weight.data_ptr(), elements, slices)
            sum_kernel.launch(sum_grid, (256, 1, 1), params)
        return grad_weight

    return call


# Shared by both


def _problem_macros(problem: Problem, dtype: torch.dtype) -> Macros:
    channels_in, channels_out = problem.gemm_k, problem.out_channels // problem.groups
    macros: Macros = {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        "CI": channels_in,
        "CO": channels_out,
        **geometry_macros(problem),
    }
    if max(channels_in * problem.in_pixels, channels_out * problem.out_pixels) > _INT32_MAX // 2:
        macros["INDEX_64"] = 1  # half, because tiles reach beyond the image
    return macros


def _sum_bytes(itemsize: int) -> int:
    return 8 if itemsize == 8 else 4


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _power_of_two_within(wanted: int, most: int) -> int:
    """The least power of two that covers ``wanted``, at most the greatest that ``most`` holds."""
    return min(power_of_two(wanted), 1 << (max(1, most).bit_length() - 1))


def _share(extent: int, most: int) -> int:
    """The whole of an extent that is at most ``most``, else a power of two of it."""
    return extent if extent <= most else _power_of_two_within(most + 1, most)


def _rows(height: int, most: int) -> int:
    """Rows of a thread: most, unless fewer divide the height, or waste less of it."""
    return min(range(1, max(1, most) + 1), key=lambda rows: (_up(height, rows) + height // (8 * rows), -rows))


def _column_threads(problem: Problem, taps_w: int, most: int) -> int:
    """Columns of a tile: few idle ones, few that neighbouring tiles read again, rows loaded in few steps."""
    (height, width), stride = problem.input_size, problem.stride[1]
    overlap = max(0, (taps_w - 1) * problem.dilation[1] + 1 - stride) / stride
    widest = min(most, 64 if height > 4 else 256)

    def steps(columns: int) -> int:
        return Patch(problem, 4, (1, columns), (1, taps_w), 1, max(32, columns)).steps

    candidates = [1 << n for n in range(9) if 1 << n <= min(widest, 2 * width - 1)]
    loadable = [columns for columns in candidates if steps(columns) <= _MOST_STEPS]
    return min(loadable, key=lambda columns: (-(-width // columns) * (columns + overlap + 4), -columns), default=1)


_Tile = TypeVar("_Tile", InputGradTile, WeightGradTile)


def _smaller(tile: _Tile) -> _Tile:
    """A tile that needs less shared memory, of as many pixel threads: fewer taps at once, then less of the rest."""
    taps_h, taps_w = tile.taps
    if taps_h > 1:
        return replace(tile, taps=(-(-taps_h // 2), taps_w))
    for name in ("co_threads", "co_channels", "channel_threads", "rows"):
        if getattr(tile, name, 1) > 1:
            return replace(tile, **{name: getattr(tile, name) // 2})
    return replace(tile, taps=(taps_h, -(-taps_w // 2)))


def _aligned(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    """A contiguous tensor, where its rows may be loaded as vectors; else a copy."""
    return tensor.clone() if tensor.data_ptr() % alignment else tensor
