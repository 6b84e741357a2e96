"""Host side of csrc/direct/input_grad.cu: the input gradient of ``direct``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from gemmconv.device import REFERENCE
from gemmconv.geometry import Problem
from gemmconv.hashing import cached_property
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.direct import patch as staging
from gemmconv.kernels.direct.forward import DirectKernel, seconds_of_parts
from gemmconv.kernels.direct.patch import Patch, Tile
from gemmconv.kernels.integers import covering, even_share, power_of_two, power_of_two_within, up_to_multiple
from gemmconv.kernels.layout.transpose import transpose_seconds
from gemmconv.kernels.macros import Macros, named_macros
from gemmconv.kernels.program import (
    Launch,
    Operand,
    Params,
    Program,
    clearing,
    grad_input_of,
    plane_grid,
    weight_strides,
)

_SHARED_FOR_TWO = 32 << 10  # SHARED for two channels of 16-bit elements; one channel alone has few loads in flight
_WEIGHTS = 12 << 10  # bytes of weights that are worth staging at once
_COST = costs_of("direct/input_grad")


@dataclass(frozen=True)
class InputGradTile(Tile):
    """The tile of direct_input_grad_kernel: extents of a block and a thread, named like the macros, in lower case."""

    channels: int
    planes: int
    channel_threads: int
    chunk_channels: int

    @property
    def threads(self) -> int:
        return self.column_threads * self.row_threads * self.planes * self.channel_threads

    @cached_property
    def patch(self) -> Patch:
        size = self.row_threads * self.rows, self.column_threads
        planes = self.planes * self.chunk_channels
        return Patch(self.problem, self.itemsize, size, self.taps, planes, self.threads)

    def weight_bytes(self, output_channels: int) -> int:
        """Bytes of shared memory for the weights of as many output channels."""
        weights = self.planes * output_channels * math.prod(self.taps) * self.channel_threads
        return weights * power_of_two(self.channels) * self.sum_bytes

    @property
    def shared_bytes(self) -> int:
        return self.patch.elements * self.sum_bytes + self.weight_bytes(self.chunk_channels)

    @property
    def sum_words(self) -> int:
        """Registers of a thread for sums."""
        return self.rows * self.channels * self.sum_bytes // 4

    @property
    def prefetches(self) -> bool:
        """Whether a chunk's loads go on while the one before is computed.

        Not those of 16-bit elements: converting them takes registers beside those of the loads.
        """
        return self.itemsize != 2 and self.patch.words <= min(staging.PREFETCH_WORDS, 64 - self.sum_words)

    def resident(self, wide_index: bool) -> int:
        """Blocks that a multiprocessor is to have registers for."""
        if not wide_index and self.sum_words <= 16:
            return min(6, 768 // self.threads)
        # 16-bit elements are not prefetched: other blocks compute while one loads.
        return min(4, (768 if self.itemsize == 2 and not wide_index else 512) // self.threads)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks over channels and tiles, blocks over planes, tiles across an image."""
        problem = self.problem
        channel_blocks = -(-problem.gemm_k // (self.channels * self.channel_threads))
        tiles_h, tiles_w = covering(problem.input_size, self.patch.tile)
        return channel_blocks * tiles_h * tiles_w, -(-problem.batch * problem.groups // self.planes), tiles_w


@lru_cache(maxsize=1024)
def input_grad_tile(problem: Problem, itemsize: int, multiprocessors: int = REFERENCE.multiprocessors) -> InputGradTile:
    """The tile for a problem: as many sums a thread as registers hold well, then blocks that fit and are many."""
    wide = itemsize == 8
    height, channels_out = problem.input_size[0], problem.group_out_channels
    channels = even_share(problem.gemm_k, 4 if wide else 8)
    rows = staging.rows_of(height, min(8 if channels <= 2 else 4, (16 if wide else 32) // channels))
    threads = 256 if rows <= 4 else 128
    taps = staging.taps_of(problem, staging.UNROLLED // (rows * channels))
    channel_tiles = -(-problem.gemm_k // channels)
    channel_threads = min((4, 2, 1), key=lambda threads: up_to_multiple(channel_tiles, threads))
    pixel_threads = threads // channel_threads
    row_threads, column_threads = staging.pixel_threads_of(problem, taps[1], rows, pixel_threads)
    planes = power_of_two_within(problem.batch * problem.groups, pixel_threads // (row_threads * column_threads))
    pixels = rows, column_threads, row_threads, taps
    tile = InputGradTile(problem, itemsize, *pixels, channels, planes, channel_threads, chunk_channels=1)

    # Room in shared memory, then blocks for every multiprocessor.
    while tile.shared_bytes > staging.SHARED:
        if tile.planes > 1 or (tile.row_threads > 1 and tile.threads > 128):
            tile = staging.halved(tile, "planes", "row_threads")
        elif tile.rows > 2:
            tile = replace(tile, rows=staging.rows_of(height, tile.rows // 2))
        elif tile.row_threads > 1 and tile.threads > 32:
            tile = staging.halved(tile, "row_threads")
        else:
            break
    while tile.shared_bytes > staging.STATIC_SHARED:
        tile = staging.smaller(tile)
    few = math.prod(tile.grid[:2]) < 2 * multiprocessors
    while few and tile.threads > 64 and tile.planes * tile.row_threads > 1:
        tile = staging.halved(tile, "planes", "row_threads")

    # Channels in a chunk: all, or as many as can be loaded while a chunk is computed.
    fitting = [tile]
    for chunk_channels in sorted({-(-channels_out // chunks) for chunks in range(1, channels_out + 1)}):
        larger = replace(tile, chunk_channels=chunk_channels)
        if larger.shared_bytes <= (_SHARED_FOR_TWO if itemsize == 2 and chunk_channels == 2 else staging.SHARED):
            fitting.append(larger)
    prefetched = [larger for larger in fitting if larger.prefetches]
    return prefetched[-1] if prefetched and fitting[-1].chunk_channels < channels_out else fitting[-1]


class DirectInputGrad(DirectKernel):
    name = "direct/input_grad"
    directions = ("input_grad",)
    computed_in = torch.contiguous_format

    def tile(self, config: Config, direction: Pass) -> InputGradTile:
        return input_grad_tile(config.problem, config.dtype.itemsize, config.spec.multiprocessors)

    def seconds(self, config: Config, direction: Pass, tile: InputGradTile) -> float:
        arithmetic, moved, steps = seconds_of_parts(config, _COST.rate, _COST.memory_rate, _COST.step_seconds)
        # It moves bytes while it computes.
        return _COST.launch_seconds + max(arithmetic, moved) + steps + transpose_seconds(config)

    def program(self, config: Config, direction: Pass, tile: InputGradTile) -> Program:
        p, output = config.problem, grad_input_of(config, torch.contiguous_format)
        alignment, nchw = tile.patch.vector * config.dtype.itemsize, torch.contiguous_format
        operands = Operand("grad_output", nchw, alignment), Operand("weight", None)
        if not p.batch:
            return Program(config.dtype, operands, (output,), (clearing(config, output),))
        one_chunk_of_taps = tile.taps == p.kernel_size
        beside_patch = staging.STATIC_SHARED - tile.patch.elements * tile.sum_bytes
        weights_once = one_chunk_of_taps and tile.weight_bytes(p.group_out_channels) <= min(_WEIGHTS, beside_patch)
        several_chunks = tile.chunk_channels < p.group_out_channels or not one_chunk_of_taps
        geometry = staging.problem_macros(p, config.dtype)
        macros: Macros = {
            **named_macros(tile, "rows column_threads row_threads taps channels planes channel_threads chunk_channels"),
            "WEIGHTS_ONCE": int(weights_once),
            "MIN_BLOCKS": tile.resident("INDEX_64" in geometry),
            **tile.patch.macros(several_chunks and tile.prefetches),
            **geometry,
        }
        pixel_blocks, plane_blocks, tiles_w = tile.grid
        params: Params = {
            "grad_output, weight, grad_input": ("grad_output", "weight", "grad_input"),
            "planes, groups": (p.batch * p.groups, p.groups),
            "h_in, w_in, h_out, w_out": (*p.input_size, *p.output_size),
            "tiles_w": tiles_w,
            **weight_strides(p),
        }
        grid, block = plane_grid(pixel_blocks, plane_blocks), (tile.threads, 1, 1)
        launch = Launch("direct/input_grad.cu", macros, grid, block, params)
        return Program(config.dtype, operands, (output,), (launch,))


KERNEL = DirectInputGrad()
