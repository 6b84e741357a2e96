"""Host side of csrc/direct/weight_grad.cu: the weight gradient of ``direct``, and both gradients at once.

How many slices the pixels are cut into follows from the problem, the element type and the GPU's multiprocessors alone,
as the tiles do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from gemmconv.device import REFERENCE
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Pass, strides_of
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.direct.forward import DirectKernel, slowest_elsewhere
from gemmconv.kernels.direct.patch import (
    BATCH_WORDS,
    PREFETCH_WORDS,
    SHARED,
    STATIC_SHARED,
    UNROLLED,
    WIDEST_TAPS,
    Patch,
    Tile,
    column_threads_of,
    problem_macros,
    rows_of,
    smaller,
    sum_bytes,
)
from gemmconv.kernels.integers import even_share, power_of_two_within
from gemmconv.kernels.layout.transpose import (
    gradients_transpose_seconds,
    transpose_seconds,
)
from gemmconv.kernels.macros import Macros
from gemmconv.kernels.program import MAX_GRID_Y, Launch, Operand, Output, Params, Program, clearing, weight_steps
from gemmconv.kernels.splits.reduce import partial_bytes, result_params, with_partials

_COST = costs_of("direct/weight_grad")
_THREADS = 128  # threads of a block if there are enough tiles
_REGISTERS = 65_536  # of a multiprocessor
_FEW_PREFETCHED_WORDS = 8  # registers for loads beside the computation in small blocks, which have few tiles each
_FEW_WORDS = 24  # registers for sums that leave room for much else
_MANY_WORDS = 64  # registers for sums, inputs and their gradients that leave little room
_OTHER_WORDS = 40  # registers for addresses and what is being computed
_LONGEST_SUM = 1024  # products that are added one by one, so that roundings stay few


@dataclass(frozen=True)
class WeightGradTile(Tile):
    """The tile of direct_weight_grad_kernel: extents of a block and a thread, named like the macros, in lower case."""

    steps: int
    ci_channels: int
    co_channels: int
    images: int
    ci_threads: int
    co_threads: int

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
        return max(self.patch(problem, itemsize).elements, scratch) * sum_bytes(itemsize)

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

    def resident(self, itemsize: int, input_grad: bool) -> int:
        """Blocks that a multiprocessor is to have registers for."""
        words = sum_bytes(itemsize) // 4
        few = self.sums * words <= _FEW_WORDS
        beside = 2 * self.rows * self.ci_channels  # inputs and their gradients
        many = input_grad and self.threads >= 128 and (self.sums + beside) * words > _MANY_WORDS
        return max(1, min(8, (768 if few else 384 if many else 512) // self.threads))

    def registers(self, itemsize: int, input_grad: bool) -> int:
        """Registers that a thread then may have."""
        return min(255, _REGISTERS // (self.resident(itemsize, input_grad) * self.threads) // 8 * 8)

    def spare_words(self, itemsize: int, input_grad: bool) -> int:
        """Registers left for loads of grad_output, beside sums, inputs and their gradients."""
        words = (self.sums + self.rows * self.ci_channels * (1 + input_grad)) * sum_bytes(itemsize) // 4
        words += 16 if self.threads < 128 else 0  # small blocks are so many that their threads have few registers
        return self.registers(itemsize, input_grad) - _OTHER_WORDS - words

    def computes_both(self, problem: Problem, itemsize: int) -> bool:
        """Whether a thread has all that an input pixel receives, and shared memory has room for the weights."""
        weights = self.ci_threads * self.sums * sum_bytes(itemsize)
        whole = self.co_channels == problem.out_channels // problem.groups and self.taps == problem.kernel_size
        return whole and self.shared_bytes(problem, itemsize) + weights <= STATIC_SHARED


@lru_cache(maxsize=1024)
def weight_grad_tile(
    problem: Problem,
    itemsize: int,
    input_grad: bool = False,
    multiprocessors: int = REFERENCE.multiprocessors,
) -> WeightGradTile:
    """The tile for a problem: as many sums a thread as registers hold, then warps that share what is staged.

    With ``input_grad`` the one for both gradients at once, if it :meth:`~WeightGradTile.computes_both`.
    """
    most_sums = 32 if itemsize == 8 else 64
    height, channels_out = problem.input_size[0], problem.out_channels // problem.groups
    taps_w = even_share(problem.kernel_size[1], WIDEST_TAPS)
    taps_h = even_share(problem.kernel_size[0], max(1, most_sums // taps_w))
    taps = taps_h * taps_w
    ci_channels = _share(problem.gemm_k, max(1, min(8, most_sums // taps)))
    co_channels = _share(channels_out, max(1, min(4, most_sums // (taps * ci_channels))))
    sums = taps * ci_channels * co_channels
    rows = rows_of(height, min(8, most_sums // 4 // ci_channels, UNROLLED // sums))
    ci_tiles, co_tiles = -(-problem.gemm_k // ci_channels), -(-channels_out // co_channels)

    def idle_and_read_again(threads: tuple[int, int]) -> tuple[int, int]:
        ci_blocks, co_blocks = -(-ci_tiles // threads[0]), -(-co_tiles // threads[1])
        reads = problem.out_pixels * channels_out * ci_blocks + problem.in_pixels * problem.gemm_k * co_blocks
        return ci_blocks * threads[0] * co_blocks * threads[1], reads

    candidates = [(ci, co) for ci in (1, 2, 4) for co in (1, 2, 4) if ci * co <= 4]
    ci_threads, co_threads = min(candidates, key=idle_and_read_again)
    pixel_threads = _THREADS // (co_threads * ci_threads)
    tile = WeightGradTile(
        rows=rows,
        steps=1,
        ci_channels=ci_channels,
        co_channels=co_channels,
        column_threads=column_threads_of(problem, taps_w, pixel_threads),
        row_threads=1,
        images=1,
        ci_threads=ci_threads,
        co_threads=co_threads,
        taps=(taps_h, taps_w),
    )
    tile = replace(tile, row_threads=power_of_two_within(-(-height // rows), pixel_threads // tile.column_threads))
    tile = replace(tile, images=power_of_two_within(problem.batch, pixel_threads // tile.pixel_threads))
    if tile.pixel_threads < 32:  # images that there are not take no part
        tile = replace(tile, images=tile.images * 32 // tile.pixel_threads)

    # Room in shared memory, then blocks for every multiprocessor.
    while tile.shared_bytes(problem, itemsize) > SHARED:
        if tile.rows > 4:
            tile = replace(tile, rows=rows_of(height, tile.rows // 2))
        elif tile.pixel_threads > 32:
            tile = _fewer_pixels(tile)
        else:
            break
    while tile.shared_bytes(problem, itemsize) > STATIC_SHARED:
        tile = smaller(tile)
    few = math.prod(tile.tiles(problem)) * tile.weight_blocks(problem) < 2 * multiprocessors
    while few and tile.pixel_threads > 32:
        tile = _fewer_pixels(tile)

    # Longer tiles for many sums: loading the next tile beside this one would take registers that they have not.
    if tile.sums * sum_bytes(itemsize) // 4 > _FEW_WORDS and not input_grad:
        fitting = [replace(tile, steps=steps) for steps in (4, 2)]
        longest = next((longer for longer in fitting if longer.shared_bytes(problem, itemsize) <= SHARED), tile)
        if (
            longest.rows * longest.row_threads * (longest.steps - 1) < height
            and math.prod(longest.tiles(problem)) * longest.weight_blocks(problem) >= 8 * multiprocessors
        ):
            tile = longest
    return tile


def _tile_for(config: Config, input_grad: bool) -> WeightGradTile:
    return weight_grad_tile(config.problem, config.dtype.itemsize, input_grad, config.spec.multiprocessors)


def _fewer_pixels(tile: WeightGradTile) -> WeightGradTile:
    if tile.images > 1:
        return replace(tile, images=tile.images // 2)
    if tile.row_threads > 1:
        return replace(tile, row_threads=tile.row_threads // 2)
    return replace(tile, column_threads=tile.column_threads // 2)


def _slices(config: Config, tile: WeightGradTile) -> int:
    """How many slices the tiles are cut into.

    Two rounds of blocks, if slices then have a few tiles to pay for their end; more where sums would be
    so long that their roundings add up; less where the partial sums would exceed the workspace.
    """
    problem, itemsize, multiprocessors = config.problem, config.dtype.itemsize, config.spec.multiprocessors
    tiles, weight_blocks = math.prod(tile.tiles(problem)), tile.weight_blocks(problem)
    busy = 2 * multiprocessors * tile.resident(itemsize, False) // weight_blocks
    just_busy = -(-2 * multiprocessors // weight_blocks)
    exact = -(-tiles * tile.rows * tile.steps // _LONGEST_SUM)
    fitting = config.workspace_limit // (math.prod(problem.weight_shape) * sum_bytes(itemsize))
    return max(1, min(max(exact, min(busy, max(just_busy, tiles // 4))), tiles, fitting, MAX_GRID_Y))


def weight_grad_macros(problem: Problem, dtype: torch.dtype, tile: WeightGradTile, input_grad: bool = False) -> Macros:
    """Macros that specialise csrc/direct/weight_grad.cu, for both gradients with ``input_grad``."""
    itemsize = dtype.itemsize
    patch, spare = tile.patch(problem, itemsize), tile.spare_words(itemsize, input_grad)
    most_words = PREFETCH_WORDS if tile.threads >= _THREADS else _FEW_PREFETCHED_WORDS
    prefetch = tile.steps == 1 and patch.words(patch.passes) <= min(most_words, spare)
    return {
        **tile.own_macros,
        "STEPS": tile.steps,
        "CI_CHANNELS": tile.ci_channels,
        "CO_CHANNELS": tile.co_channels,
        "IMAGES": tile.images,
        "CI_THREADS": tile.ci_threads,
        "CO_THREADS": tile.co_threads,
        "INPUT_GRAD": int(input_grad),
        "MIN_BLOCKS": tile.resident(itemsize, input_grad),
        **patch.macros(prefetch, max(8, min(BATCH_WORDS, spare - 8))),
        **problem_macros(problem, dtype),
    }


def weight_grad_seconds(config: Config, tile: WeightGradTile) -> float:
    """Estimated seconds of a weight gradient in NCHW: launches, tiles, products, and bytes that go through patches.

    >>> upsampling = Problem(8, 21, 21, 1, (64, 64), (16, 16), stride=(8, 8), padding=(4, 4))
    >>> config = Config(upsampling, torch.float32, torch.device("cuda", 0))
    >>> seconds = weight_grad_seconds(config, weight_grad_tile(upsampling, 4))
    >>> 2e-3 < seconds < 4e-3  # each of 16 tap rows reads its part of the patches
    True
    """
    p, itemsize = config.problem, config.dtype.itemsize
    tiles = math.prod(tile.tiles(p)) * tile.weight_blocks(p)
    staged = tiles * tile.patch(p, itemsize).elements * sum_bytes(itemsize)
    products = p.useful_flops / _COST.rate * (2 if itemsize == 8 else 1)
    copied = staged / _COST.staged_rate + p.least_bytes(itemsize) / _COST.memory_rate
    return _COST.launch_seconds + tiles * _COST.tile_seconds / config.spec.multiprocessors + products + copied


def grads_seconds(config: Config, tile: WeightGradTile) -> float:
    """Estimated seconds of both gradients at once in NCHW; infinite if no thread can hold whole sums of both."""
    p, itemsize = config.problem, config.dtype.itemsize
    if not tile.computes_both(p, itemsize):
        return math.inf
    products = p.useful_flops / _COST.rate * (2 if itemsize == 8 else 1)
    stored = math.prod(p.input_shape) * itemsize / _COST.memory_rate
    return weight_grad_seconds(config, _tile_for(config, input_grad=False)) + products + stored


def _program(config: Config, input_config: Config | None, tile: WeightGradTile) -> Program:
    """A weight gradient, after the input's where that has a configuration."""
    p, dtype, both = config.problem, config.dtype, input_config is not None
    nchw = torch.contiguous_format
    grad_weight = Output("grad_weight", p.weight_shape, strides_of(p.weight_shape, nchw))
    if not math.prod(p.weight_shape) or not math.prod(p.input_shape):
        operands = Operand("grad_output", nchw), Operand("input", nchw)
        return Program(dtype, operands, (grad_weight,), (clearing(config, grad_weight),))
    slices, (_, tiles_h, tiles_w) = _slices(config, tile), tile.tiles(p)
    macros = weight_grad_macros(p, dtype, tile, both)
    params: Params = {
        "grad_output, input": ("grad_output", "input"),
        **result_params(slices),
        "weight, grad_input": ("weight", "grad_input") if both else (None, None),
        "images, groups": (p.batch, p.groups),
        "h_in, w_in, h_out, w_out": (*p.input_size, *p.output_size),
        "tiles_h, tiles_w, tiles, slices": (tiles_h, tiles_w, math.prod(tile.tiles(p)), slices),
        **(weight_steps(p) if both else {"weight_channel, weight_tap": (0, 0)}),
    }
    launch = Launch("direct/weight_grad.cu", macros, (tile.weight_blocks(p), slices, 1), (tile.threads, 1, 1), params)
    operands = Operand("grad_output", nchw, int(macros["VECTOR"]) * dtype.itemsize), Operand("input", nchw)
    if input_config is None:
        return with_partials(config, slices, operands, (), launch)
    grad_input = Output("grad_input", p.input_shape, strides_of(p.input_shape, input_config.memory_format), nchw)
    return with_partials(config, slices, (*operands, Operand("weight", None)), (grad_input,), launch)


def _share(extent: int, most: int) -> int:
    """The whole of an extent that is at most ``most``, else a power of two of it."""
    return extent if extent <= most else power_of_two_within(most + 1, most)


class DirectWeightGrad(DirectKernel):
    """See the module."""

    name = "direct/weight_grad"
    directions = ("weight_grad", "grads")
    computed_in = torch.contiguous_format

    def tile(self, config: Config, direction: Pass) -> WeightGradTile:
        return _tile_for(config, direction == "grads")

    def seconds(self, config: Config, direction: Pass, tile: WeightGradTile) -> float:
        if direction == "grads":
            seconds = grads_seconds(config, tile) / slowest_elsewhere(config)
            return seconds + gradients_transpose_seconds(config, config.of_weight)
        return weight_grad_seconds(config, tile) / slowest_elsewhere(config) + transpose_seconds(config)

    def workspace_bytes(self, config: Config, direction: Pass, tile: WeightGradTile) -> int:
        return partial_bytes(config, _slices(config, tile)) if config.problem.batch else 0

    def program(self, config: Config, direction: Pass, tile: WeightGradTile) -> Program:
        return _program(config.of_weight, config, tile) if direction == "grads" else _program(config, None, tile)


KERNEL = DirectWeightGrad()
