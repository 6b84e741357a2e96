"""Host side of csrc/direct/weight_grad.cu: the weight gradient of ``direct``, and both gradients at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from gemmconv.device import REFERENCE, REGISTERS
from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.direct import patch as staging
from gemmconv.kernels.direct.forward import DirectKernel, slowest_elsewhere
from gemmconv.kernels.direct.patch import Patch, Tile
from gemmconv.kernels.integers import covering, power_of_two_within
from gemmconv.kernels.layout.transpose import gradients_transpose_seconds, transpose_seconds
from gemmconv.kernels.macros import Macros, named_macros
from gemmconv.kernels.program import MAX_GRID_Y, Launch, Params, Program, weight_strides
from gemmconv.kernels.splits.reduce import partial_bytes, result_params

_COST = costs_of("direct/weight_grad")
_THREADS = 128  # threads of a block if there are enough tiles
_PIXEL_THREADS = "images", "row_threads", "column_threads"  # the factors of pixel_threads, the first to be halved first
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
        return self.co_channels * self.ci_channels * math.prod(self.taps)

    @property
    def size(self) -> Pair:
        """Input pixels of a tile."""
        return self.row_threads * self.rows * self.steps, self.column_threads

    @cached_property
    def patch(self) -> Patch:
        planes = self.images * self.co_threads * self.co_channels
        return Patch(self.problem, self.itemsize, self.size, self.taps, planes, self.threads)

    @property
    def shared_bytes(self) -> int:
        scratch = self.threads // 32 * self.sums
        return max(self.patch.elements, scratch) * self.sum_bytes

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Tiles over images, down an image and across it."""
        return -(-self.problem.batch // self.images), *covering(self.problem.input_size, self.size)

    @property
    def weight_blocks(self) -> int:
        """Blocks that share a slice."""
        problem = self.problem
        co_blocks = -(-problem.group_out_channels // (self.co_channels * self.co_threads))
        ci_blocks = -(-problem.gemm_k // (self.ci_channels * self.ci_threads))
        return problem.groups * co_blocks * ci_blocks * math.prod(covering(problem.kernel_size, self.taps))

    def resident(self, input_grad: bool) -> int:
        """Blocks that a multiprocessor is to have registers for."""
        words = self.sum_bytes // 4
        few = self.sums * words <= _FEW_WORDS
        beside = 2 * self.rows * self.ci_channels  # inputs and their gradients
        many = input_grad and self.threads >= 128 and (self.sums + beside) * words > _MANY_WORDS
        return max(1, min(8, (768 if few else 384 if many else 512) // self.threads))

    @property
    def computes_both(self) -> bool:
        """Whether a thread has all that an input pixel receives, and shared memory has room for the weights."""
        weights = self.ci_threads * self.sums * self.sum_bytes
        whole = self.co_channels == self.problem.group_out_channels and self.taps == self.problem.kernel_size
        return whole and self.shared_bytes + weights <= staging.STATIC_SHARED


@lru_cache(maxsize=1024)
def weight_grad_tile(
    problem: Problem, itemsize: int, input_grad: bool = False, multiprocessors: int = REFERENCE.multiprocessors
) -> WeightGradTile:
    """The tile for a problem: as many sums a thread as registers hold, then warps that share what is staged.

    With ``input_grad`` the one for both gradients at once, if it :attr:`~WeightGradTile.computes_both`.
    """
    most_sums = 32 if itemsize == 8 else 64
    height, channels_out = problem.input_size[0], problem.group_out_channels
    taps = staging.taps_of(problem, most_sums)
    ci_channels = _share(problem.gemm_k, max(1, min(8, most_sums // math.prod(taps))))
    co_channels = _share(channels_out, max(1, min(4, most_sums // (math.prod(taps) * ci_channels))))
    sums = math.prod(taps) * ci_channels * co_channels
    rows = staging.rows_of(height, min(8, most_sums // 4 // ci_channels, staging.UNROLLED // sums))
    ci_tiles, co_tiles = -(-problem.gemm_k // ci_channels), -(-channels_out // co_channels)

    def idle_and_read_again(threads: Pair) -> Pair:
        ci_blocks, co_blocks = -(-ci_tiles // threads[0]), -(-co_tiles // threads[1])
        reads = problem.out_pixels * channels_out * ci_blocks + problem.in_pixels * problem.gemm_k * co_blocks
        return ci_blocks * threads[0] * co_blocks * threads[1], reads

    candidates = [(ci, co) for ci in (1, 2, 4) for co in (1, 2, 4) if ci * co <= 4]
    ci_threads, co_threads = min(candidates, key=idle_and_read_again)
    pixel_threads = _THREADS // (co_threads * ci_threads)
    row_threads, column_threads = staging.pixel_threads_of(problem, taps[1], rows, pixel_threads)
    images = power_of_two_within(problem.batch, pixel_threads // (row_threads * column_threads))
    images = max(images, 32 // (row_threads * column_threads))  # images that there are not take no part
    pixels = rows, column_threads, row_threads, taps
    tile = WeightGradTile(problem, itemsize, *pixels, 1, ci_channels, co_channels, images, ci_threads, co_threads)

    # Tiles become smaller until shared memory has room for them, then as small as they may be if blocks are few.
    while tile.shared_bytes > staging.SHARED:
        if tile.rows > 4:
            tile = replace(tile, rows=staging.rows_of(height, tile.rows // 2))
        elif tile.pixel_threads > 32:
            tile = staging.halved(tile, *_PIXEL_THREADS)
        else:
            break
    while tile.shared_bytes > staging.STATIC_SHARED:
        tile = staging.smaller(tile)
    few = math.prod(tile.tiles) * tile.weight_blocks < 2 * multiprocessors
    while few and tile.pixel_threads > 32:
        tile = staging.halved(tile, *_PIXEL_THREADS)

    # Longer tiles for many sums: loading the next tile beside this one would take registers that they have not.
    if tile.sums * tile.sum_bytes // 4 > _FEW_WORDS and not input_grad:
        longer = replace(tile, steps=4)
        many = math.prod(longer.tiles) * longer.weight_blocks >= 8 * multiprocessors
        if many and longer.shared_bytes <= staging.SHARED and longer.size[0] - tile.size[0] < height:
            return longer
    return tile


def _slices(config: Config, tile: WeightGradTile) -> int:
    """How many slices the tiles are cut into.

    There are slices for two rounds of blocks, if each then has a few tiles to pay for its end; more where sums would be
    so long that their roundings add up; and fewer where the partial sums would exceed the workspace.
    """
    tiles, weight_blocks = math.prod(tile.tiles), tile.weight_blocks
    busy = 2 * config.spec.multiprocessors * tile.resident(False) // weight_blocks
    just_busy = -(-2 * config.spec.multiprocessors // weight_blocks)
    exact = -(-tiles * tile.rows * tile.steps // _LONGEST_SUM)
    fitting = config.workspace_limit // partial_bytes(config)
    return max(1, min(max(exact, min(busy, max(just_busy, tiles // 4))), tiles, fitting, MAX_GRID_Y))


def weight_grad_macros(tile: WeightGradTile, dtype: torch.dtype, input_grad: bool = False) -> Macros:
    """Macros that specialise csrc/direct/weight_grad.cu, for both gradients with ``input_grad``."""
    # Registers left for loads of grad_output, beside sums, inputs and their gradients.
    spare = min(255, REGISTERS // (tile.resident(input_grad) * tile.threads) // 8 * 8) - _OTHER_WORDS
    spare -= (tile.sums + tile.rows * tile.ci_channels * (1 + input_grad)) * tile.sum_bytes // 4
    spare -= 16 if tile.threads < 128 else 0  # small blocks are so many that their threads have few registers
    most_words = staging.PREFETCH_WORDS if tile.threads >= _THREADS else _FEW_PREFETCHED_WORDS
    prefetch = tile.steps == 1 and tile.patch.words <= min(most_words, spare)
    return {
        **named_macros(tile, "rows column_threads row_threads taps steps ci_channels co_channels"),
        **named_macros(tile, "images ci_threads co_threads"),
        "INPUT_GRAD": int(input_grad),
        "MIN_BLOCKS": tile.resident(input_grad),
        **tile.patch.macros(prefetch, max(8, spare - 8)),
        **staging.problem_macros(tile.problem, dtype),
    }


def _share(extent: int, most: int) -> int:
    """The whole of an extent that is at most ``most``, else a power of two of it."""
    return extent if extent <= most else power_of_two_within(most + 1, most)


class DirectWeightGrad(DirectKernel):
    name = "direct/weight_grad"
    directions = ("weight_grad", "grads")
    computed_in = torch.contiguous_format

    def tile(self, config: Config, direction: Pass) -> WeightGradTile:
        p, spec = config.problem, config.spec
        return weight_grad_tile(p, config.dtype.itemsize, direction == "grads", spec.multiprocessors)

    def seconds(self, config: Config, direction: Pass, tile: WeightGradTile) -> float:
        if direction == "grads" and not tile.computes_both:
            return math.inf
        p, itemsize = config.problem, config.dtype.itemsize
        alone = self.tile(config, "weight_grad") if direction == "grads" else tile
        # Launches, tiles, products, and bytes that go through patches.
        tiles = math.prod(alone.tiles) * alone.weight_blocks
        products = p.useful_flops / _COST.rate * (2 if itemsize == 8 else 1)
        staged = tiles * alone.patch.elements * alone.sum_bytes
        copied = staged / _COST.staged_rate + p.least_bytes(itemsize) / _COST.memory_rate
        seconds = _COST.launch_seconds + tiles * _COST.tile_seconds / config.spec.multiprocessors + products + copied
        if direction == "weight_grad":
            return seconds / slowest_elsewhere(config) + transpose_seconds(config)
        stored = math.prod(p.input_shape) * itemsize / _COST.memory_rate
        return (seconds + products + stored) / slowest_elsewhere(config) + gradients_transpose_seconds(config)

    def workspace_bytes(self, config: Config, direction: Pass, tile: WeightGradTile) -> int:
        slices = _slices(config, tile)
        return slices * partial_bytes(config) if slices > 1 else 0

    def program(self, config: Config, direction: Pass, tile: WeightGradTile) -> Program:
        p, both = config.problem, direction == "grads"
        slices, (_, tiles_h, tiles_w) = _slices(config, tile), tile.tiles
        macros = weight_grad_macros(tile, config.dtype, both)
        params: Params = {
            "grad_output, input": ("grad_output", "input"),
            **result_params(slices),
            "weight, grad_input": ("weight", "grad_input") if both else (None, None),
            "images, groups": (p.batch, p.groups),
            "h_in, w_in, h_out, w_out": (*p.input_size, *p.output_size),
            "tiles_h, tiles_w, tiles, slices": (tiles_h, tiles_w, math.prod(tile.tiles), slices),
            **(weight_strides(p) if both else {"weight_channel, weight_tap": (0, 0)}),
        }
        grid, block = (tile.weight_blocks, slices, 1), (tile.threads, 1, 1)
        launch = Launch("direct/weight_grad.cu", macros, grid, block, params)
        return staging.gradients_program(config, slices, tile.patch.vector, launch, direction)


KERNEL = DirectWeightGrad()
