"""The tensor-core side of ``direct`` (direct/forward_mma.cu): for 16-bit types, and for float32 where TF32 may be used.

It is for channels that fit a block's shared memory, and for more than one of them; ``tile_of`` gives None for others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from gemmconv.device import LEAST_SHARED_BYTES, REFERENCE, REGISTERS, DeviceSpec
from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property
from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.direct.forward import DirectKernel, clock_of
from gemmconv.kernels.integers import covering, even_share, power_of_two, up_to_multiple
from gemmconv.kernels.macros import ELEMENT_TYPES, TENSOR_CORE_TYPES, Macros, geometry_macros, named_macros, table
from gemmconv.kernels.menu import menu_of, samples
from gemmconv.kernels.phases import cells_of, phase_shifts, reach_of
from gemmconv.kernels.program import MAX_GRID_Y, Launch, Params, Program, gathering, weight_strides

_COST = costs_of("direct/forward_mma")
_WARPS = 8
_OTHER_REGISTERS = 41  # of a thread, beside those of sums
_MOST_UNROLLED = 256  # products
_ACCUMULATORS = 12  # of tiles of 16 x 8 that a warp has registers for
_SECTOR_BYTES = 32
_ROW_TILES = 4  # across, where the image has as many: whole sectors of its rows
_SHIFT_BASE = 1 << 12
_MOST_WEIGHTS = 1 << 18  # of a group
_MOST_M_TILES = 32  # bits of a mask
_MOST_STEPS = 2048  # 4 KiB of constant memory a table
_MOST = 4  # tiles of a menu
_ALIGNED = 8  # pixels: widths that are as far beyond a multiple of them are loaded and stored alike

Shift = Pair  # from a cell to an input, per axis
_Shifts = tuple[frozenset[int], ...]  # those along an axis, of each of several phases


@dataclass(frozen=True)
class Step:
    """Eight words of the reduced extent: of one shift, or a few words of each of several shifts (None: padding)."""

    shifts: tuple[Shift | None, ...]
    first_word: int
    m_tiles: tuple[int, ...]  # those with a weight that is not zero by its place


@dataclass(frozen=True)
class Tile:
    """The work of a block of csrc/direct/forward_mma.cu; see its header."""

    problem: Problem
    itemsize: int
    channels_last: bool
    row_phases: int
    channels: int
    n_tiles: int
    groups: int = 1
    warps_m: int = 1
    warps_n: int = _WARPS
    row_tiles: int = 1  # of 8 cells, across
    spec: DeviceSpec = REFERENCE

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def size(self) -> Pair:
        """Cells, rows and columns."""
        return self.warps_n * self.n_tiles // self.row_tiles, 8 * self.row_tiles

    @property
    def lines(self) -> int:
        """Output lines, pairs of a row phase and a channel, of a row of cells."""
        return self.row_phases * self.channels

    @cached_property
    def m_tile_lines(self) -> tuple[tuple[Pair, ...], ...]:
        """For each M tile, the pairs of a row phase (of the turn) and a column phase that its 16 rows belong to."""
        return _m_tile_lines(self.problem.stride[1], self.row_phases, self.channels)

    @cached_property
    def used_tiles(self) -> frozenset[int]:
        """The M tiles that any step is for: those that take registers."""
        return frozenset().union(*(step.m_tiles for turn in self.turns for step in turn))

    @cached_property
    def words(self) -> int:
        """Words of a pixel's channels of a group."""
        words = -(-self.problem.gemm_k * self.itemsize // 4)
        return power_of_two(words) if words <= 8 else up_to_multiple(words, 8)

    @property
    def pixel_pitch(self) -> int:
        """Words between pixels: up to 4, or 4 more than a multiple of 8, so that 8 pixels x 4 words lie in 32 banks."""
        words = self.groups * self.words
        return words if words <= 4 else up_to_multiple(words + 4, 8) - 4

    @cached_property
    def turns(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of each turn of row phases."""
        layer = replace(self.problem, batch=1, input_size=(1, 1))  # turns are cached for all sizes
        return _turns(layer, self.row_phases, self.channels, self.words)

    @cached_property
    def pairs(self) -> int:
        """Pairs of a step and an M tile."""
        return sum(len(step.m_tiles) for turn in self.turns for step in turn)

    @cached_property
    def pixels(self) -> int:
        """Neighbouring pixels that are loaded at once."""
        return 1 if self.channels_last else math.gcd(4, self.problem.input_size[1])

    @property
    def copied(self) -> bool:
        """Whether a tile's input is copied, as it is used, while the tile before it is computed."""
        return self.channels_last or self.itemsize == 4

    @property
    def lead(self) -> int:
        """Columns of the patch before the least shift, so that loads are aligned."""
        return self.reach[1][0] % self.pixels

    @cached_property
    def patch(self) -> Pair:
        """Rows and columns of the patch."""
        height, width = (self.size[axis] + last - first for axis, (first, last) in enumerate(self.reach))
        return height, up_to_multiple(width + self.lead, self.pixels)

    @cached_property
    def reach(self) -> tuple[Pair, Pair]:
        """Least and largest shift of either axis."""
        return reach_of(self.problem, 0), reach_of(self.problem, 1)

    @property
    def vector(self) -> int:
        """Outputs that a lane stores at once from the stage, in NCHW at the ends of lines."""
        p, most = self.problem, 16 // self.itemsize
        if self.channels_last:
            return math.gcd(most, self.groups * self.channels, self.groups * p.group_out_channels)
        return math.gcd(most, 8 * p.stride[1], p.output_size[1])

    @property
    def stage_bytes(self) -> int:
        """Shared memory in which a warp turns its outputs round."""
        run = 8 * self.n_tiles * self.problem.stride[1]

        def padded(size: int) -> int:
            return (-(-size // 16) | 1) * 16

        if self.channels_last:
            return padded(self.row_phases * run * padded(self.groups * self.channels * self.itemsize))
        return padded(8 * padded(run * self.itemsize + _SECTOR_BYTES))

    @property
    def patch_words(self) -> int:
        """Words of a patch in shared memory."""
        pixels = math.prod(self.patch)
        if self.copied and not self.channels_last:
            return self.words * ((pixels + 7) // 16 * 16 + 8)
        return up_to_multiple(pixels * self.pixel_pitch, 4)

    @property
    def unrolled(self) -> bool:
        """Whether the steps are unrolled, with offsets that are known when compiling."""
        return self.words >= 4 and self.pairs * self.n_tiles <= _MOST_UNROLLED

    @cached_property
    def shared_bytes(self) -> int:
        fragments = self.groups * self.warps_m * self.pairs * 512
        steps = sum(map(len, self.turns))
        biases = self.groups * self.warps_m * up_to_multiple(self.lines, 8)
        words = self.patch_words * (1 + self.copied) + 8 * steps + biases
        return fragments + 4 * words + self.warps_m * self.warps_n * self.stage_bytes

    @cached_property
    def blocks_resident(self) -> int:
        """Blocks that a multiprocessor is to have registers and shared memory for."""
        lines, stride = -(-self.lines // 8), self.problem.stride[1]
        registers = _OTHER_REGISTERS + 4 * len(self.used_tiles) * self.n_tiles + 6 * lines + 3 * stride
        registers += 10 * max(0, lines - 3) + 8 * max(0, stride - 2)  # addresses
        registers += (16 + 2 * self.n_tiles) * self.channels_last
        registers += 16 * (self.unrolled or self.itemsize == 4)
        by_registers = REGISTERS // (registers * self.threads)
        return max(1, min(by_registers, REFERENCE.shared_bytes // (self.shared_bytes + 1024), 32))

    @property
    def sets(self) -> int:
        """Sets of weights, each of which a block may own."""
        p = self.problem
        return p.groups // self.groups * -(-p.group_out_channels // (self.warps_m * self.channels))

    @property
    def tiles(self) -> Pair:
        """Tiles of an image, down and across."""
        return covering(cells_of(self.problem), self.size)

    def cycles_of(self, problem: Problem) -> float:
        """Roughly the cycles that a multiprocessor takes for its share of the layer at the sizes of ``problem``.

        Its schedulers are busy, or its shared memory is, or what it moves takes longer, or its blocks wait, each for
        its own loads and stores.
        """
        alone, busy, moved = self._costs
        image_tiles = math.prod(covering(cells_of(problem), self.size))
        tiles = problem.batch * image_tiles * self.sets / self.spec.multiprocessors
        rounds = max(1.0, tiles / self.blocks_resident)
        alone *= math.ceil(rounds) if rounds < 4 else rounds
        busy, moved = busy * tiles, moved * tiles
        longest = max(busy, alone, _COST.moved_overlapped_share * moved)
        return longest + _COST.moved_share * moved + _COST.computed_share * (busy + alone)

    @cached_property
    def _costs(self) -> tuple[float, float, float]:
        """The costs of a tile: cycles of a block alone, busy cycles, and cycles of memory traffic."""
        steps, turns = sum(map(len, self.turns)), len(self.turns) * self.groups
        store = _COST.channels_last_n_tile_instructions if self.channels_last else _COST.n_tile_instructions
        outputs = len(self.m_tile_lines) * (_COST.m_tile_instructions + self.n_tiles * store)
        rounding = _COST.rounding_instructions * self.n_tiles if self.itemsize == 4 else 0
        a_step = (0 if self.unrolled else _COST.step_instructions) + _COST.n_tile_step_instructions * self.n_tiles
        products = steps * (a_step + rounding) + self.pairs * (_COST.pair_instructions + self.n_tiles)
        if self.copied:
            chunk = math.gcd(4, self.problem.gemm_k * self.itemsize // 4) if self.channels_last else self.pixels
            copies = math.prod(self.patch) * self.groups * self.words / chunk / self.threads
            loading = copies * _COST.copy_instructions
        else:
            words = self.pixels * min(4, self.words)
            loads = -(-math.prod(self.patch) // self.pixels * -(-self.words // 4) // self.threads)
            loading = loads * (_COST.stage_instructions + words * _COST.word_instructions)
        issued = self.groups * products + turns * outputs + loading + _COST.block_instructions

        # A block alone.
        step = _COST.unrolled_step_cycles if self.unrolled else _COST.step_cycles
        alone = issued + self.groups * steps * step + _COST.turn_cycles * turns
        if not self.copied:
            alone += _COST.load_cycles

        # Instructions: the more warps, the fewer cycles pass without one. Shared memory: a wavefront is 32 words.
        warps = self.threads / 32
        issuing = min(_COST.issue_share, _COST.warp_issue_share * self.blocks_resident * warps)
        busy = issued * warps / (4 * issuing)
        wavefronts = self.groups * (2 * steps * self.n_tiles + 4 * self.pairs) + turns * outputs / 2
        busy = max(busy, _COST.wavefront_cycles * wavefronts * warps)
        if not self.spec.is_hopper:  # whose tensor cores are never what takes longest here
            per_clock = (self.spec.half if self.itemsize == 2 else self.spec.tf32) / self.spec.cycles
            product = 2 * 16 * 8 * 32 // self.itemsize
            operations = self.groups * self.pairs * self.n_tiles * warps * product
            busy = max(busy, operations / (_COST.tensor_core_share * per_clock))

        # To and from the L2 cache. Rows that are cut short or into pieces cost more than their bytes.
        loaded = math.prod(self.patch) * self.groups * self.problem.gemm_k
        channels = self.groups * self.channels * self.warps_m
        stored: float = math.prod(self.size) * math.prod(self.problem.stride) * channels
        if self.channels_last:
            stored *= 1 + _COST.apart_bytes / (channels * self.itemsize)
        else:
            stored *= 2 + _COST.run_bytes / (self.size[1] * self.problem.stride[1] * self.itemsize)
        moved = (_COST.load_factor * loaded + stored) * self.itemsize / (_COST.bytes_a_cycle * self.spec.bytes_ratio)
        return alone, busy, moved


@lru_cache(maxsize=1024)
def tile_of(problem: Problem, itemsize: int, channels_last: bool, spec: DeviceSpec = REFERENCE) -> Tile | None:
    """The tile for a problem: a pure function of it. None where the channels do not fit shared memory."""
    menu = _menu(samples(problem, _ALIGNED), itemsize, channels_last, spec)
    tile = min(menu, key=lambda tile: tile.cycles_of(problem), default=None)
    return tile and replace(tile, problem=problem)  # which has the alignment of the samples


@lru_cache(maxsize=1024)
def _menu(problems: tuple[Problem, ...], itemsize: int, channels_last: bool, spec: DeviceSpec) -> list[Tile]:
    """The few tiles that a layer takes, by how they do at samples of its sizes, which have the same tiles."""
    tiles = [*tiles_of(problems[0], itemsize, channels_last, spec)]
    return menu_of(tiles, [[tile.cycles_of(one) for tile in tiles] for one in problems], _MOST)


def tiles_of(problem: Problem, itemsize: int, channels_last: bool, spec: DeviceSpec = REFERENCE) -> Iterator[Tile]:
    """The tiles that a problem may have: those that fit registers and shared memory. None for depthwise layers."""
    p, channels_out, weights = problem, problem.group_out_channels, problem.gemm_k * problem.gemm_m
    whole_words = not channels_last or p.gemm_k * itemsize % 4 == 0  # to copy
    if weights == p.taps or weights > _MOST_WEIGHTS or not whole_words:
        return
    row_tiles = power_of_two(-(-cells_of(p)[1] // 8))  # of 8 cells, that a row of an image fills
    most_channels = channels_out if channels_last else up_to_multiple(channels_out, 8)
    for groups, channels in itertools.product((1, 2, 4, 8), {most_channels, min(16, most_channels)}):
        if p.groups % groups or (groups > 1 and (not channels_last or channels < channels_out)):
            continue
        warps_m = min(4, power_of_two(-(-channels_out // channels)))
        for row_phases, n_tiles in itertools.product({1, p.stride[0]}, (8, 4, 2, 1)):
            shape = row_phases, channels, n_tiles, groups, warps_m
            tile = Tile(p, itemsize, channels_last, *shape, spec=spec)
            if tile.sets > MAX_GRID_Y or sum(map(len, tile.turns)) > _MOST_STEPS:
                continue
            if len(tile.m_tile_lines) > _MOST_M_TILES or len(tile.used_tiles) * n_tiles > _ACCUMULATORS:
                continue
            for warps in (_WARPS, _WARPS // 2):
                warps_n = max(1, warps // warps_m)
                widest = warps_n * n_tiles
                narrowest = max(n_tiles, min(_ROW_TILES, widest, row_tiles))
                for i in range(narrowest.bit_length() - 1, widest.bit_length()):
                    shaped = replace(tile, warps_n=warps_n, row_tiles=1 << i)
                    if shaped.shared_bytes <= LEAST_SHARED_BYTES:
                        yield shaped


@lru_cache(maxsize=1024)
def _m_tile_lines(stride: int, row_phases: int, channels: int) -> tuple[tuple[Pair, ...], ...]:
    """See :attr:`Tile.m_tile_lines`."""
    lines = row_phases * channels
    blocks = -(-lines // 8)
    together = 2 if channels % 16 == 0 else 1
    firsts = range(0, blocks, together)
    slots = [(first + i, rw) for first in firsts for rw in range(stride) for i in range(together)]
    phases = [{(line // channels, rw) for line in range(8 * block, min(8 * block + 8, lines))} for block, rw in slots]
    return tuple(tuple(set().union(*phases[i : i + 2])) for i in range(0, len(phases), 2))


@lru_cache(maxsize=1024)
def _turns(layer: Problem, row_phases: int, channels: int, words: int) -> tuple[tuple[Step, ...], ...]:
    """See :attr:`Tile.turns`."""
    lines = _m_tile_lines(layer.stride[1], row_phases, channels)
    shifts_h, shifts_w = (phase_shifts(layer, axis) for axis in (0, 1))
    of_turns = (shifts_h[first : first + row_phases] for first in range(0, len(shifts_h), row_phases))
    return tuple(tuple(_steps(of_turn, shifts_w, lines, words)) for of_turn in of_turns)


def _steps(
    shifts_h: _Shifts, shifts_w: _Shifts, m_tile_lines: tuple[tuple[Pair, ...], ...], words: int
) -> Iterator[Step]:
    """The steps of a turn, from the shifts of its row phases and of all column phases."""
    rows, columns = (sorted(set().union(*shifts)) for shifts in (shifts_h, shifts_w))
    every = [*itertools.product(rows, columns)]
    count = max(1, 8 // words)
    for i in range(0, len(every), count):
        shifts = every[i : i + count]
        m_tiles = tuple(
            m
            for m, phases in enumerate(m_tile_lines)
            if any(h in shifts_h[rh] and w in shifts_w[rw] for rh, rw in phases for h, w in shifts)
        )
        if m_tiles:
            padding = (None,) * (count - len(shifts))
            yield from (Step((*shifts, *padding), word, m_tiles) for word in range(0, words, 8))


def forward_macros(tile: Tile, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/direct/forward_mma.cu."""
    p = tile.problem
    (first_h, last_h), (first_w, last_w) = tile.reach
    steps = [step for turn in tile.turns for step in turn]
    begins = [sum(map(len, tile.turns[:i])) for i in range(len(tile.turns) + 1)]
    pairs = [(i, m) for i, step in enumerate(steps) for m in step.m_tiles]
    first_pairs = [sum(len(step.m_tiles) for step in steps[:begin]) for begin in begins]
    shifts = [shift or (first_h, first_w - 1) for step in steps for shift in step.shifts]  # none is -1
    return {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        "IN_CHANNELS": p.gemm_k,
        "OUT_CHANNELS": p.group_out_channels,
        "FIRST_H": first_h,
        "FIRST_W": first_w,
        "HALO_H": last_h - first_h,
        "HALO_W": last_w - first_w,
        **named_macros(tile, "words pixel_pitch row_phases channels groups n_tiles warps_m warps_n"),
        "TILE_H": tile.size[0],
        "TILE_W": tile.size[1],
        **named_macros(tile, "channels_last vector copied unrolled pixels lead shared_bytes"),
        "MIN_BLOCKS": tile.blocks_resident,
        "SHIFT_BASE": _SHIFT_BASE,
        "USED_TILES": sum(1 << m for m in tile.used_tiles),
        "STEPS": len(steps),
        "PAIRS": len(pairs),
        "STEP_BEGIN": table(begins),
        "STEP_SHIFTS": table([(h - first_h) * _SHIFT_BASE + w - first_w for h, w in shifts]),
        "STEP_WORD": table([step.first_word for step in steps]),
        "STEP_TURN": table([i for i, turn in enumerate(tile.turns) for _ in turn]),
        "STEP_TILES": table([sum(1 << m for m in step.m_tiles) for step in steps]),
        "PAIR_BEGIN": table(first_pairs),
        "PAIR_STEP": table([step for step, _ in pairs]),
        "PAIR_TILE": table([m for _, m in pairs]),
        **geometry_macros(p, p.image_elements),
    }


def blocks_at_once(tile: Tile) -> int:
    """How many blocks of each set of weights run at once; they share its tiles evenly."""
    return max(1, tile.spec.multiprocessors * tile.blocks_resident // tile.sets)


class DirectForwardMma(DirectKernel):
    name = "direct/forward_mma"
    dtypes = TENSOR_CORE_TYPES
    serves = (
        "layers of more than one channel whose weights fit shared memory, in TF32 or 16-bit types, and those in"
        " channels_last with an even number of input channels a group"
    )

    def tiles(self, config: Config, direction: Pass) -> Iterator[Tile]:
        if not config.is_ieee:  # whose products may not be rounded to what tensor cores take
            yield from tiles_of(config.problem, config.dtype.itemsize, config.channels_last, config.spec)

    def tile(self, config: Config, direction: Pass) -> Tile | None:
        if config.is_ieee:
            return None
        return tile_of(config.problem, config.dtype.itemsize, config.channels_last, config.spec)

    def seconds(self, config: Config, direction: Pass, tile: Tile) -> float:
        return _COST.launch_seconds + _COST.factor * tile.cycles_of(tile.problem) / clock_of(config)

    def fitted(self, config: Config, direction: Pass, tile: Tile) -> Tile | None:
        other = replace(tile, problem=config.problem)
        return other if (other.pixels, other.vector) == (tile.pixels, tile.vector) else None

    def program(self, config: Config, direction: Pass, tile: Tile) -> Program:
        p = config.problem
        tiles = p.batch * math.prod(tile.tiles)
        grid = even_share(max(1, tiles), blocks_at_once(tile)), tile.sets, 1
        steps_image, rest = divmod(grid[0], math.prod(tile.tiles))
        params: Params = {
            "input, weight, bias, output": ("input", "weight", "bias", "output"),
            "groups": p.groups,
            "h_in, w_in, h_out, w_out": (*p.input_size, *p.output_size),
            "tiles_h, tiles_w": tile.tiles,
            "tiles, step_image": (tiles, steps_image),
            "step_tile_h, step_tile_w": divmod(rest, tile.tiles[1]),
            **weight_strides(p),
        }
        macros, block = forward_macros(tile, config.dtype), (tile.threads, 1, 1)
        launch = Launch("direct/forward_mma.cu", macros, grid, block, params, tile.shared_bytes)
        return gathering(config, "forward", [launch] if tiles else [])


KERNEL = DirectForwardMma()
