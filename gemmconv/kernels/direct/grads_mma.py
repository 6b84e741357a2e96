"""Host side of csrc/direct/grads_mma.cu: both gradients at once on tensor cores, for groups of few channels."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from gemmconv.device import LEAST_SHARED_BYTES, REFERENCE, REGISTERS
from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property
from gemmconv.kernels.base import DEFAULT_WORKSPACE_LIMIT, Config, Pass
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.direct.forward import DirectKernel, slowest_elsewhere
from gemmconv.kernels.direct.patch import Patch, gradients_program, problem_macros
from gemmconv.kernels.integers import covering, even_share, power_of_two, power_of_two_within, up_to_multiple
from gemmconv.kernels.layout.transpose import gradients_transpose_seconds
from gemmconv.kernels.macros import TENSOR_CORE_TYPES, Macros, named_macros
from gemmconv.kernels.menu import menu_of, samples
from gemmconv.kernels.program import MAX_GRID_Y, Launch, Params, Program, weight_strides
from gemmconv.kernels.splits.reduce import partial_bytes, result_params

_COST = costs_of("direct/grads_mma")
_WARPS = 4
_MOST = 2  # tiles of a menu
_FEW_ROWS = 4  # of images for which four warps of a block are beside each other
_MOST_PAIRS = 512  # of channels of a group: of more, fused is faster, and the estimate below is too low
_MOST_SUMS = 72  # of a lane: taps * tiles of 16 output channels * 4
_ADDRESS_REGISTERS = 44  # of a thread, beside what is multiplied and added
_SCATTERED_REGISTERS = 40  # where taps are not neighbours in the patch, and the compiler loads further ahead
_STAGING_REGISTERS = 64  # beside sums and loads on their way
_MOST_WORDS = 40  # registers for loads on their way
_MOST_LOADS = 12
_LONGEST_SUM = 1024  # products of 8 pixels that are added one by one, so that roundings stay few


@dataclass(frozen=True)
class Tile:
    """The work of a block and of a warp of csrc/direct/grads_mma.cu; the macros of the same names, in lower case."""

    problem: Problem
    itemsize: int
    rows: int
    row_warps: int
    column_warps: int
    ci_warps: int
    multiprocessors: int = REFERENCE.multiprocessors

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.column_warps * self.ci_warps

    @property
    def size(self) -> Pair:
        """Input pixels of a tile."""
        return self.row_warps * self.rows, 16 * self.column_warps

    @property
    def planes(self) -> int:
        """Planes of grad_output in shared memory."""
        return up_to_multiple(self.problem.group_out_channels, 8)

    @cached_property
    def patch(self) -> Patch:
        return Patch(self.problem, self.itemsize, self.size, self.problem.kernel_size, self.planes, self.threads, True)

    @property
    def sums(self) -> int:
        """Sums of weight gradients of a lane."""
        return self.problem.taps * -(-self.planes // 16) * 4

    @cached_property
    def shared_bytes(self) -> int:
        factors = self.ci_warps * self.problem.taps * self.planes // 8 * 32 * 2
        return (max(self.patch.elements, self.threads * self.sums) + factors) * 4

    @property
    def fits(self) -> bool:
        """Whether there are registers and shared memory for it."""
        return self.sums <= _MOST_SUMS and self.shared_bytes <= LEAST_SHARED_BYTES

    @cached_property
    def resident(self) -> int:
        """Blocks that a multiprocessor is to have registers for."""
        steps, pixels = self.planes // 8, self.rows * 8
        multiplied = 8 * -(-self.planes // 16) + 4 * steps + 2 * steps * self.problem.kernel_size[0]
        if any(map(operator.mod, self.problem.stride, self.problem.dilation)):
            multiplied += _SCATTERED_REGISTERS
        by_registers = REGISTERS // (self.threads * (self.sums + pixels + multiplied + _ADDRESS_REGISTERS))
        return max(1, min(4, by_registers, REFERENCE.shared_bytes // (self.shared_bytes + 1024)))

    @cached_property
    def loads(self) -> Pair:
        """Steps in which a warp stages a plane, each of one row or more, and vectors that a lane loads in a step."""
        lanes = min(32, power_of_two(self.patch.vectors))
        return -(-self.patch.rows * lanes // 32), -(-self.patch.vectors // lanes)

    @property
    def batch(self) -> int:
        """Steps that a warp stages at once: what registers hold of loads."""
        row_steps, vectors = self.loads
        words = vectors * max(1, self.patch.vector * self.itemsize // 4)
        registers = min(255, REGISTERS // (self.threads * self.resident) // 8 * 8)
        most = min(_MOST_WORDS, registers - self.sums - _STAGING_REGISTERS) // (2 if self.itemsize == 2 else 1)
        return even_share(row_steps, max(1, min(most // words, _MOST_LOADS // vectors)))

    @property
    def tiles(self) -> Pair:
        """Tiles down an image and across it."""
        return covering(self.problem.input_size, self.size)

    @property
    def weight_blocks(self) -> int:
        """Blocks that share a slice."""
        return self.problem.groups * -(-self.problem.gemm_k // (8 * self.ci_warps))

    @cached_property
    def _tile_seconds(self) -> float:
        """The work that a tile adds to a multiprocessor: rows that are loaded, their elements, and products."""
        channels_out = self.problem.group_out_channels
        rows = channels_out * self.patch.rows
        elements = rows * self.patch.vectors * self.patch.vector
        products = self.threads // 32 * self.rows * self.problem.taps * (2 * -(-self.planes // 16) + self.planes // 8)
        staging = rows * _COST.row_seconds + channels_out * math.prod(self.loads) * _COST.load_seconds
        staging += elements * (1 + self.itemsize / 2) * _COST.element_seconds
        return _COST.tile_seconds + staging + products * _COST.product_seconds

    def seconds_of(self, slices: int) -> float:
        """Roughly what both gradients take in NCHW, with so many slices."""
        waves = -(-self.weight_blocks * slices // (self.multiprocessors * self.resident))
        tiles = -(-self.problem.batch * math.prod(self.tiles) // slices) * waves * self.resident
        partials = slices * math.prod(self.problem.weight_shape)
        return _COST.launch_seconds + tiles * self._tile_seconds + partials * _COST.partial_seconds

    def slices(self, workspace_limit: int) -> int:
        """How many slices the tiles are cut into: as many blocks as run at once or fewer, as partial sums cost.

        More where sums would be so long that their roundings add up, less where partial sums would exceed the
        workspace.
        """
        tiles = self.problem.batch * math.prod(self.tiles)
        fitting = workspace_limit // (math.prod(self.problem.weight_shape) * 4)
        exact = -(-tiles * self.rows * 2 // _LONGEST_SUM)
        busy = self.multiprocessors * self.resident // self.weight_blocks
        wanted = (max(1, exact, busy >> halvings) for halvings in range(4))
        return min((max(1, min(one, fitting, tiles, MAX_GRID_Y)) for one in wanted), key=self.seconds_of)

    def seconds(self, workspace_limit: int) -> float:
        """Roughly what both gradients take in NCHW."""
        return self.seconds_of(self.slices(workspace_limit))


@lru_cache(maxsize=1024)
def tile_of(problem: Problem, itemsize: int, multiprocessors: int = REFERENCE.multiprocessors) -> Tile | None:
    """The tile for a problem: a pure function of it. None where a warp has no room for the sums of all taps."""
    menu = [replace(tile, problem=problem) for tile in _menu(samples(problem), itemsize, multiprocessors)]
    fitting = [tile for tile in menu if tile.fits] or tiles_of(problem, itemsize, multiprocessors)
    return min(fitting, key=lambda tile: tile.seconds(DEFAULT_WORKSPACE_LIMIT), default=None)


@lru_cache(maxsize=1024)
def _menu(problems: tuple[Problem, ...], itemsize: int, multiprocessors: int) -> list[Tile]:
    """The few tiles that a layer takes, by how they do at samples of its sizes, which have the same tiles."""
    tiles = tiles_of(problems[0], itemsize, multiprocessors)
    seconds = [[replace(tile, problem=one).seconds(DEFAULT_WORKSPACE_LIMIT) for tile in tiles] for one in problems]
    return menu_of(tiles, seconds, _MOST)


def tiles_of(problem: Problem, itemsize: int, multiprocessors: int = REFERENCE.multiprocessors) -> list[Tile]:
    """The tiles that a problem may have: those that fit registers and shared memory."""
    height, ci_warps = problem.input_size[0], min(_WARPS, power_of_two(-(-problem.gemm_k // 8)))
    tiles = []
    for rows, row_warps in itertools.product(sorted({power_of_two_within(height, 4), 2, 1}), (1, 2, 4)):
        column_warps = _WARPS // (ci_warps * row_warps)
        if 0 < column_warps <= (4 if height <= _FEW_ROWS else 2):
            tiles.append(Tile(problem, itemsize, rows, row_warps, column_warps, ci_warps, multiprocessors))
    return [tile for tile in tiles if tile.fits]


class DirectGradsMma(DirectKernel):
    name = "direct/grads_mma"
    directions = ("grads",)
    dtypes = TENSOR_CORE_TYPES
    serves = "few channels, of which a warp has room for the sums of all taps, in 16-bit types or TF32"
    computed_in = torch.contiguous_format

    def tiles(self, config: Config, direction: Pass) -> list[Tile]:
        if self.tile(config, direction) is None:
            return []
        return tiles_of(config.problem, config.dtype.itemsize, config.spec.multiprocessors)

    def tile(self, config: Config, direction: Pass) -> Tile | None:
        p = config.problem
        if config.is_ieee or p.gemm_k * p.group_out_channels > _MOST_PAIRS:
            return None
        return tile_of(p, config.dtype.itemsize, config.spec.multiprocessors)

    def fitted(self, config: Config, direction: Pass, tile: Tile) -> Tile | None:
        other = replace(tile, problem=config.problem)
        return other if other.patch.vector == tile.patch.vector else None

    def seconds(self, config: Config, direction: Pass, tile: Tile) -> float:
        seconds = tile.seconds(config.workspace_limit) / slowest_elsewhere(config)
        return seconds + gradients_transpose_seconds(config)

    def workspace_bytes(self, config: Config, direction: Pass, tile: Tile) -> int:
        slices = tile.slices(config.workspace_limit)
        return slices * partial_bytes(config) if slices > 1 else 0

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        p, slices = config.problem, tile.slices(config.workspace_limit)
        macros: Macros = {
            **named_macros(tile, "rows row_warps column_warps ci_warps shared_bytes batch"),
            "MIN_BLOCKS": tile.resident,
            "VECTOR": tile.patch.vector,
            **problem_macros(p, config.dtype),
        }
        params: Params = {
            "grad_output, input, weight, grad_input": ("grad_output", "input", "weight", "grad_input"),
            **result_params(slices),
            "groups": p.groups,
            "h_in, w_in, h_out, w_out": (*p.input_size, *p.output_size),
            "tiles_h, tiles_w": tile.tiles,
            "tiles, slices": (p.batch * math.prod(tile.tiles), slices),
            **weight_strides(p),
        }
        grid, block = (tile.weight_blocks, slices, 1), (tile.threads, 1, 1)
        launch = Launch("direct/grads_mma.cu", macros, grid, block, params, tile.shared_bytes)
        return gradients_program(config, slices, tile.patch.vector, launch, direction)


KERNEL = DirectGradsMma()
