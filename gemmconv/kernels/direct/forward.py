"""The side of ``direct`` that runs on CUDA cores (csrc/direct/forward.cu): which tile a layer takes, and the launch."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from gemmconv.device import REFERENCE, REGISTERS, DeviceSpec
from gemmconv.geometry import Pair, Problem
from gemmconv.kernels.base import Config, Kernel, Pass, accumulator_dtype
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.integers import INT32_MAX, even_share, power_of_two
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, geometry_macros, named_macros
from gemmconv.kernels.menu import menu_of, samples
from gemmconv.kernels.phases import cells_of, phase_shifts, reach_of
from gemmconv.kernels.program import Launch, Params, Program, gathering, plane_grid, weight_strides

_COST = costs_of("direct/forward")
SHARED_BYTES = 48 << 10  # four blocks of a Hopper multiprocessor, one of every architecture since sm_80
_MOST = 4  # most tiles of a menu
_LANES = (8, 32)  # threads across a cell row in depthwise tiles for wide images
_MOST_ROWS = 16  # most rows of threads in depthwise tiles
_MOST_PHASES = 8  # row phases side by side
_MOST_SPLIT = 4  # threads that share the products of an output
_LONGEST_SUM = 2048  # most float32 products that one thread adds
LONGEST_SUM = _MOST_SPLIT * _LONGEST_SUM
_REGISTERS = (64, 80, 128, 168)  # register limits of a thread: 8, 6, 4 or 3 blocks of 128 threads a multiprocessor
_OTHER_REGISTERS = 32  # registers of a thread beside sums and window
_MOST_TRIPS, _BUSY_BLOCKS = 8, 6  # most loop trips of a block; blocks that keep a multiprocessor busy
_MOST_PAIR_SUMS = 32  # of two cells that a depthwise thread has in channels_last, which share what they read
_WIDEST_KERNEL = 64  # taps whose window a thread can keep in registers
_WIDEST_STRIDE = 32
# Fields of a tile that is not depthwise: lanes_w, cells, rows, phases, planes, channels_out and split.
_Shape = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True)
class Tile:
    """The work of a block of csrc/direct/forward.cu: see its header; for depthwise layers pipeline/depthwise.cuh."""

    depthwise: bool  # whether planes have one channel each
    lanes_w: int  # lanes_w, cells: threads across a cell row, and cells of each
    cells: int
    rows: int  # cell rows
    phases: int  # row phases at a time, each with threads of its own
    planes: int  # planes; a plane is one group of one image
    channels_in: int  # input channels staged at a time
    channels_out: int  # output channels
    split: int = 1  # threads that share the input channels of an output
    rows_each: int = 1  # rows_each, planes_each: cell rows and planes of a thread, in depthwise tiles
    planes_each: int = 1
    turns: int = 1  # loop trips of a block over tiles below each other, in depthwise tiles (the name is in tuned files)
    looped: bool = False  # whether the kernel has that loop

    @property
    def threads(self) -> int:
        return self.lanes_w * self.rows // self.rows_each * self.phases * self.planes // self.planes_each * self.split


@functools.lru_cache(maxsize=1024)
def tile_of(problem: Problem, dtype: torch.dtype, channels_last: bool, spec: DeviceSpec = REFERENCE) -> Tile | None:
    """The tile for a problem: a pure function of it. None if the smallest tile's patch exceeds shared memory."""
    layer = _Layer(problem, dtype, channels_last, spec)
    if layer.is_depthwise:
        return layer.depthwise_tile()
    menu = _menu(samples(problem), dtype, channels_last, spec)
    return min(menu, key=lambda one: layer.cycles(*one), default=(None,))[0]


@functools.lru_cache(maxsize=1024)
def _menu(
    problems: tuple[Problem, ...], dtype: torch.dtype, channels_last: bool, spec: DeviceSpec
) -> list[tuple[Tile, _Cost]]:
    """The menu of a layer: the few tiles that are together the fastest for sample problems, with their costs."""
    layers = [_Layer(problem, dtype, channels_last, spec) for problem in problems]
    shapes = dict.fromkeys(itertools.chain(*(layer.shapes() for layer in layers)))
    shapes = shapes or dict.fromkeys(itertools.chain(*(layer.shapes(whole_sectors=False) for layer in layers)))
    tiles = [tile for tile in map(layers[0].fitting, shapes) if tile is not None]
    costs = [layers[0].cost(tile) for tile in tiles]
    seconds = [[*map(layer.cycles, tiles, costs)] for layer in layers]
    return menu_of([*zip(tiles, costs, strict=True)], seconds, _MOST)


def longest_sum(problem: Problem) -> int:
    """Products that are added for an output of the phase with the most taps."""
    most_taps = (max(map(len, phase_shifts(problem, axis))) for axis in (0, 1))
    return problem.gemm_k * math.prod(most_taps)


class _Layer:
    """The tiles that a problem may have on a GPU, and what they cost."""

    def __init__(self, problem: Problem, dtype: torch.dtype, channels_last: bool, spec: DeviceSpec) -> None:
        self.problem = problem
        self.dtype = dtype
        self.channels_last = channels_last
        self.spec = spec
        self.item_bytes, self.sum_bytes = dtype.itemsize, accumulator_dtype(dtype).itemsize
        self.in_channels = problem.gemm_k
        self.out_channels = problem.group_out_channels
        self.is_depthwise = problem.groups == problem.in_channels == problem.out_channels
        self.planes = max(1, problem.batch * problem.groups)
        self.cells_h, self.cells_w = cells_of(problem)
        self.halo_h, self.halo_w = (last - first for first, last in (reach_of(problem, 0), reach_of(problem, 1)))
        # Threads that must share the products of a float32 output: a sum's rounding error grows with the square root of
        # its length.
        parts = -(-longest_sum(problem) // _LONGEST_SUM) if dtype == torch.float32 else 1
        self.least_split = min(_MOST_SPLIT, power_of_two(parts), 1 << (self.in_channels.bit_length() - 1))
        self.tap_phases_h, self.tap_phases_w = (sum(map(bool, phase_shifts(problem, axis))) for axis in (0, 1))

    def depthwise_tile(self) -> Tile | None:
        """The tile whose threads have the outputs of a 16-byte store, with rows or planes for all threads of a block.

        None if it does not fit shared memory.
        """
        if self.channels_last:
            planes_each = math.gcd(self.problem.groups, 16 // self.sum_bytes)
            cells = 2 if 2 * self.tap_phases_w * planes_each <= _MOST_PAIR_SUMS else 1
        else:
            planes_each, cells = 1, max(1, 16 // self.item_bytes // power_of_two(self.problem.stride[1]))
        while cells > 1 and cells >= 2 * self.cells_w:
            cells //= 2
        sum_bytes = self.tap_phases_w * self.sum_bytes
        while planes_each * max(cells * sum_bytes, 3 * (cells + self.halo_w)) > 256 and planes_each * cells > 1:
            planes_each, cells = (planes_each // 2, cells) if planes_each > 1 else (1, cells // 2)
        window = (2 + self.halo_h) * (cells + self.halo_w)
        rows_each = 2 if not self.channels_last and window <= 48 and self.cells_h > 1 else 1

        threads, across = 256, -(-self.cells_w // cells)
        lanes_w, rows = power_of_two(across), power_of_two(-(-self.cells_h // rows_each))
        if self.channels_last:
            planes = math.gcd(self.problem.groups, 32 * planes_each)  # neighbours
            plane_threads = planes // planes_each
            lanes_w = min(lanes_w, max(1, threads // 4 // plane_threads))
            rows = min(rows, max(1, threads // (lanes_w * plane_threads)))
        else:
            if lanes_w > _LANES[0]:
                lanes_w = min(_LANES, key=lambda lanes: (-(-across // lanes) * (lanes + 4), -lanes))
            rows = min(rows, _MOST_ROWS, max(1, threads // lanes_w))
            planes = min(power_of_two(self.planes), max(1, threads // (lanes_w * rows)))
        tile = Tile(True, lanes_w, cells, rows * rows_each, 1, planes, 1, 1, 1, rows_each, planes_each)
        few = self.blocks(tile) < 2 * self.spec.multiprocessors
        while few and tile.threads > 64:
            if not self.channels_last and tile.planes > 1:
                tile = replace(tile, planes=tile.planes // 2)
            elif tile.rows > rows_each:
                tile = replace(tile, rows=tile.rows // 2)
            else:
                break
        while (idle := tile.threads % 32) or (self.shared_bytes(tile) > SHARED_BYTES and tile.planes > planes_each):
            # Whole warps, some of it idle, then room in shared memory.
            tile = replace(tile, rows=tile.rows * 2) if idle else replace(tile, planes=tile.planes // 2)
        if self.channels_last:
            trips = self.loop_trips(tile)
            tile = replace(tile, turns=trips, looped=trips > 1)
        return tile if self.shared_bytes(tile) <= SHARED_BYTES else None

    def loop_trips(self, tile: Tile) -> int:
        """Tiles that a depthwise block in channels_last loops over. Packing its weights costs as much as a tile."""
        below = -(-self.cells_h // tile.rows)
        busy = _BUSY_BLOCKS * self.spec.multiprocessors
        most = max(1, min(_MOST_TRIPS, below, self.blocks(replace(tile, turns=1)) // busy))
        return min(range(most, 0, -1), key=lambda trips: -(-below // trips) * (trips + 1))

    def shapes(self, whole_sectors: bool = True) -> Iterator[_Shape]:
        """The shapes of tiles that fit registers; ``whole_sectors``: stores in channels_last fill 32 bytes."""
        p = self.problem
        phases = self.tap_phases_h if self.tap_phases_h <= _MOST_PHASES else 1
        most_planes = math.gcd(p.groups, 8) if self.channels_last else power_of_two(self.planes)
        least_planes = 1
        if self.channels_last and whole_sectors:
            sector_planes = 32 // self.item_bytes // min(self.in_channels, self.out_channels)
            least_planes = min(most_planes, power_of_two(sector_planes))
        shares = sorted({even_share(self.out_channels, most) for most in (1, 2, 4, 8, 16)})
        splits = [split for split in (1, 2, 4) if self.least_split <= split <= self.in_channels]
        if self.planes * self.cells_h * self.cells_w > 1 << 20:
            splits = [split for split in splits if split == self.least_split]
        most_rows = power_of_two(self.cells_h)
        for cells in (1, 2, 4):
            if cells > 1 and cells >= 2 * self.cells_w:
                break
            lanes_w = min(power_of_two(-(-self.cells_w // cells)), 32)
            of_block = []  # rows, planes and split
            for rows, split in itertools.product((1, 2, 4, 8, 16, 32), splits):
                part = lanes_w * rows * phases
                if rows > most_rows and part % 64 == 0:
                    continue  # half the rows would make whole warps too
                planes = max(least_planes, min(most_planes, power_of_two(64 // (part * split))))
                planes = max(planes, 32 // math.gcd(32, part))  # whole warps, some of them idle
                if part * planes * split <= 256 and (planes <= most_planes or not self.channels_last):
                    of_block.append((rows, planes, split))
            for channels_out in shares:
                narrowest = cells == 1 and channels_out == 1
                if narrowest or self.registers(cells, channels_out) <= _REGISTERS[-1] - 16:
                    for rows, planes, split in of_block:
                        yield lanes_w, cells, rows, phases, planes, channels_out, split

    def fitting(self, shape: _Shape) -> Tile | None:
        """The tile of a shape with as many input channels at a time as fit, at most 16; None if not even one fits."""
        lanes_w, cells, rows, phases, planes, channels_out, split = shape
        channels_in = min(self.in_channels, 16)
        while channels_in > 0:
            tile = Tile(False, lanes_w, cells, rows, phases, planes, channels_in, channels_out, split)
            if self.shared_bytes(tile) <= SHARED_BYTES:
                return tile
            channels_in //= 2
        return None

    def registers(self, cells: int, channels_out: int) -> int:
        """Registers of a thread, about."""
        words = self.sum_bytes // 4
        vector = max(1, min(cells, 4 // words))
        window = -(-(cells + self.halo_w) // vector) * vector
        return words * (cells * channels_out * self.tap_phases_w + window) + _OTHER_REGISTERS

    def least_blocks(self, tile: Tile) -> int:
        """Blocks that a multiprocessor must be able to hold, which limits the registers of a thread."""
        if tile.depthwise:
            return 1
        registers = self.registers(tile.cells, tile.channels_out)
        limit = next((most for most in _REGISTERS if registers <= most - 8), _REGISTERS[-1])
        return max(1, REGISTERS // (tile.threads * limit))

    def blocks(self, tile: Tile) -> int:
        spatial = -(-self.cells_h // (tile.rows * tile.turns)) * -(-self.cells_w // (tile.lanes_w * tile.cells))
        return spatial * -(-self.planes // tile.planes) * -(-self.out_channels // tile.channels_out)

    def staged_elements(self, tile: Tile) -> Pair:
        """Elements of the patch, with its padding, and of the weights, in quads; see csrc/direct/forward.cu."""
        vector = min(tile.cells, 16 // self.sum_bytes)
        banks, windows, read = tile.cells // vector, -(-(tile.cells + self.halo_w) // vector), tile.lanes_w * vector
        pitch = banks * (tile.lanes_w + (windows - 1) // banks) * vector
        if read * self.sum_bytes < 128:
            pitch += (read - pitch) % (2 * read)
        kernel_h, kernel_w = self.problem.kernel_size
        planes, quads = tile.planes * tile.channels_in, -(-kernel_w * tile.channels_out // 4)
        return planes * (tile.rows + self.halo_h) * pitch, planes * kernel_h * quads * 4

    def shared_bytes(self, tile: Tile) -> int:
        """Bytes of shared memory that csrc/direct/forward.cu takes."""
        kernel_h, kernel_w = self.problem.kernel_size
        if tile.depthwise:
            quads = kernel_h * -(-kernel_w * tile.planes_each // 4) | 1
            stage = 0 if self.channels_last else tile.threads * tile.cells * self.problem.stride[1] * self.item_bytes
            return tile.planes // tile.planes_each * quads * 4 * self.sum_bytes + stage
        return self._gathering_bytes(tile, *self.staged_elements(tile))

    def _gathering_bytes(self, tile: Tile, patch: int, weights: int) -> int:
        """Shared memory for elements of patch and weights, which partial sums and outputs reuse."""
        staged = -(-patch * self.sum_bytes // 16) * 16 + weights * self.sum_bytes
        part = tile.threads // tile.split
        sums = (tile.split - 1) * part * tile.cells * tile.channels_out * self.tap_phases_w * self.sum_bytes
        if self.channels_last:
            put = math.gcd(tile.channels_out, 16 // self.item_bytes)
            run = (tile.channels_out // put | 1) * put  # see csrc/include/epilogue/store_runs.cuh
        else:
            run = tile.cells * self.problem.stride[1]
        return max(staged, sums, part * run * self.item_bytes)

    def cycles(self, tile: Tile, cost: _Cost | None = None) -> float:
        """Estimated cycles of an H200's multiprocessor; ``cost`` is that of the tile, if it is known."""
        held, alone, together, moved = self.cost(tile) if cost is None else cost
        blocks = -(-self.blocks(tile) // self.spec.multiprocessors)
        moved *= blocks
        return max(-(-blocks // held) * alone, blocks * together, moved) + _COST.stored_factor * moved

    def cost(self, tile: Tile) -> _Cost:
        """The cost of a block of a tile, which does not depend on the problem's sizes."""
        # Instructions of a thread, and its cycles of shared memory.
        threads, (kernel_h, kernel_w) = tile.threads, self.problem.kernel_size
        passes = -(-self.tap_phases_h // tile.phases)
        tap_rows = passes * -(-kernel_h // self.tap_phases_h) * -(-self.in_channels // tile.split)
        quads = -(-kernel_w * tile.channels_out // 4)
        vector = min(tile.cells, 16 // self.sum_bytes)
        windows = -(-(tile.cells + self.halo_w) // vector)
        double = self.sum_bytes / 4
        slower = double * REFERENCE.fp32_per_clock / self.spec.fp32_per_clock
        products = tile.cells * tile.channels_out * kernel_w * slower
        instructions = tap_rows * (products + quads + windows + _COST.row_instructions) + _COST.block_instructions
        wavefronts = tap_rows * (quads + windows * vector) * double
        if self.channels_last:
            # L1 takes longer for weights, and for each piece of memory that a warp stores to: the channels of a pixel.
            pixels = self.tap_phases_h * self.problem.stride[1] * tile.cells / (tile.phases * tile.split)
            pieces = pixels * max(1.0, tile.channels_out * self.item_bytes / 128)
            instructions += _COST.pixel_instructions * pixels * tile.channels_out
            wavefronts += tap_rows * quads * double + _COST.piece_wavefronts * 32 * pieces
        # Staging adds to both.
        stages, (patch, weights) = passes * -(-self.in_channels // tile.channels_in), self.staged_elements(tile)
        staged = stages * _COST.staged_instructions * patch / threads
        instructions += staged
        wavefronts += _COST.staged_wavefronts * staged

        # A block alone: it waits for its loads, then computes.
        warps = threads / 32
        loads = -(-patch // (16 * threads)) + 1 + weights / (4 * threads)
        latency = _COST.channels_last_latency_cycles if self.channels_last else _COST.latency_cycles
        alone = stages * (latency * loads + _COST.chunk_cycles) + max(_COST.alone_cycles, warps / 4) * instructions

        shared_bytes = self._gathering_bytes(tile, patch, weights) + 1024  # the system reserves 1 KiB a block
        held = min(self.least_blocks(tile), REFERENCE.shared_bytes // shared_bytes, 2048 // threads)
        # The fewer warps, the more cycles pass in which none can issue.
        issue = instructions / 4 / min(1.0, _COST.warp_issue_share * held * warps)
        together = max(issue, wavefronts) + _COST.hidden_share * min(issue, wavefronts)

        # Stores cost more the fewer contiguous bytes they have.
        run = tile.lanes_w * tile.cells * self.problem.stride[1]
        stored = tile.planes * tile.channels_out * tile.rows * self.problem.stride[0] * run
        moved = stored * self.item_bytes / (_COST.bytes_a_cycle * self.spec.bytes_ratio)
        if self.channels_last:  # sectors of which a block stores a part cost more; rows of bias alone are whole pixels
            neighbours = tile.planes if tile.channels_out == self.out_channels else 1
            parts = neighbours * tile.channels_out * self.item_bytes % 32 > 0
            apart = _COST.parts_apart_bytes if parts else _COST.apart_bytes
            apart *= self.tap_phases_h / self.problem.stride[0]
            moved *= 1 + apart / (tile.planes * tile.channels_out * self.item_bytes)
        else:
            moved *= 1 + _COST.run_bytes / (run * self.item_bytes)
        return _Cost(held, alone, warps * together, moved)


class _Cost(NamedTuple):
    """The cost of a block."""

    held: int  # blocks that a multiprocessor holds at a time
    alone: float  # cycles of a block that has the multiprocessor for itself
    together: float  # cycles that a block adds to those of several on the multiprocessor
    moved: float  # cycles in which memory writes the outputs of a block


def forward_macros(layer: _Layer, tile: Tile) -> Macros:
    """Macros that specialise csrc/direct/forward.cu."""
    p, itemsize = layer.problem, layer.item_bytes
    if layer.channels_last:
        vector = math.gcd(16 // itemsize, tile.channels_out, layer.out_channels)
    else:
        vector = math.gcd(16 // itemsize, tile.cells * p.stride[1], p.output_size[1])
    in_elements = p.in_pixels * max(p.in_channels, tile.planes * layer.in_channels)
    out_elements = p.out_pixels * max(p.out_channels, tile.planes * layer.out_channels)
    return {
        "ELEMENT_T": ELEMENT_TYPES[layer.dtype],
        **named_macros(layer, "in_channels out_channels channels_last"),
        **named_macros(tile, "depthwise lanes_w cells"),
        "TILE_H": tile.rows,
        "TILE_PHASES": tile.phases,
        "TILE_PLANES": tile.planes,
        "TILE_IN": tile.channels_in,
        "TILE_OUT": tile.channels_out,
        "SPLIT_IN": tile.split,
        "ROWS": tile.rows_each,
        "PLANE_VECTOR": tile.planes_each,
        "LOOPED": int(tile.looped),
        "LOAD_VECTOR": math.gcd(16 // itemsize, tile.channels_in, layer.in_channels),
        "VECTOR": vector,
        "LEAST_BLOCKS": layer.least_blocks(tile),
        "SHARED_BYTES": -(-layer.shared_bytes(tile) // 512) * 512,
        **geometry_macros(p, max(in_elements, out_elements, p.in_channels * p.gemm_m)),
    }


class DirectKernel(Kernel):
    """The base class of the kernels of ``direct``: the layers that they serve."""

    serves = "layers of which a block's windows fit registers and shared memory"

    def tiles(self, config: Config, direction: Pass) -> Iterable[Any]:
        return () if (tile := self.tile(config, direction)) is None else (tile,)

    def why_not_device_or_dtype(self, config: Config, direction: Pass) -> str | None:
        if (reason := super().why_not_device_or_dtype(config, direction)) is not None:
            return reason
        p = config.problem
        if max(p.stride) > _WIDEST_STRIDE:
            return f"stride must be at most {_WIDEST_STRIDE} on both axes, got {p.stride}"
        if p.kernel_size[1] > _WIDEST_KERNEL:
            return f"kernel width must be at most {_WIDEST_KERNEL}, got {p.kernel_size[1]}"
        return None

    def why_not_sizes(self, config: Config, direction: Pass) -> str | None:
        p = config.problem
        if tile_of(p, config.dtype, config.channels_last, config.spec) is None:
            window = f"kernel_size={p.kernel_size}, dilation={p.dilation}"
            return f"the inputs of one cell must fit {SHARED_BYTES} bytes of shared memory, got {window}"
        if config.dtype == torch.float32 and (longest := longest_sum(p)) > LONGEST_SUM:
            return f"float32 outputs must be sums of at most {LONGEST_SUM} products, got {longest}"
        if max(p.in_pixels, p.out_pixels, p.batch * p.groups) > INT32_MAX:
            return "images must have less than 2**31 pixels"
        if direction == "grads" and not p.batch:
            return "tensors must have elements"
        return super().why_not_sizes(config, direction)

    def fitted(self, config: Config, direction: Pass, tile: Any) -> Any | None:
        return replace(tile, problem=config.problem)


class DirectForward(DirectKernel):
    name = "direct/forward"

    def tile(self, config: Config, direction: Pass) -> Tile | None:
        return tile_of(config.problem, config.dtype, config.channels_last, config.spec)

    def seconds(self, config: Config, direction: Pass, tile: Tile) -> float:
        if tile.depthwise:
            rates = _COST.depthwise_rate, _COST.depthwise_memory_rate, _COST.depthwise_step_seconds
            return _COST.launch_seconds + sum(seconds_of_parts(config, *rates))
        cycles = _Layer(config.problem, config.dtype, config.channels_last, config.spec).cycles(tile)
        factor = _COST.channels_last_factor if config.channels_last else 1
        return _COST.launch_seconds + factor * cycles / clock_of(config)

    def fitted(self, config: Config, direction: Pass, tile: Tile) -> Tile:
        if not tile.looped:
            return tile
        return replace(tile, turns=_Layer(config.problem, config.dtype, True, config.spec).loop_trips(tile))

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        p, layer = config.problem, _Layer(config.problem, config.dtype, config.channels_last, config.spec)
        macros = forward_macros(layer, tile)
        tiles_w, plane_blocks = -(-layer.cells_w // (tile.lanes_w * tile.cells)), -(-layer.planes // tile.planes)
        params: Params = {
            "input, weight, bias, output": ("input", "weight", "bias", "output"),
            "planes, groups": (p.batch * p.groups, p.groups),
            "h_in, w_in, h_out, w_out": (*p.input_size, *p.output_size),
            "tiles_w, turns": (tiles_w, tile.turns),
            **weight_strides(p),
        }
        grid, block = plane_grid(layer.blocks(tile) // plane_blocks, plane_blocks), (tile.threads, 1, 1)
        launch = Launch("direct/forward.cu", macros, grid, block, params, int(macros["SHARED_BYTES"]))
        return gathering(config, "forward", [launch] if p.batch else [], alignment=1)


def clock_of(config: Config) -> float:
    """Cycles a second, as estimates of forward passes count them."""
    return REFERENCE.clock * config.spec.ratio("clock")


def seconds_of_parts(
    config: Config, ffma_rate: float, copy_rate: float, step_seconds: float
) -> tuple[float, float, float]:
    """Seconds of arithmetic, of memory traffic, and of a block's steps, which run one after the other."""
    p, spec = config.problem, config.spec
    double = 2 if config.dtype == torch.float64 else 1
    ffma_rate, copy_rate = ffma_rate * spec.ratio("fp32"), copy_rate * spec.ratio("bandwidth")
    step_seconds /= spec.ratio("clock")
    moved, steps = p.least_bytes(config.dtype.itemsize), p.taps * p.group_out_channels
    return p.useful_flops / ffma_rate * double, moved / copy_rate, steps * step_seconds


def slowest_elsewhere(config: Config) -> float:
    """The ratio of a GPU's speed to Hopper's by which estimates that were fitted on Hopper are divided."""
    return 1.0 if config.spec.is_hopper else min(config.spec.ratio("fp32"), config.spec.ratio("bandwidth"))


KERNEL = DirectForward()
