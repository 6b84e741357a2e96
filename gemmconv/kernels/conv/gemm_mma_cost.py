"""Estimated seconds of csrc/conv/gemm_mma.cu, by which tiles are compared."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gemmconv.device import DeviceSpec
from gemmconv.kernels.costs import costs_of

if TYPE_CHECKING:
    from gemmconv.kernels.conv.gemm_mma import Work

_COST = costs_of("conv/gemm_mma")
_FEW_WAVES = 4  # of blocks: so few are counted as whole ones


def seconds_of(work: Work, spec: DeviceSpec) -> float:
    """Estimated seconds: blocks share the tensor cores, and each takes its own time for everything else."""
    tile, pixels = work.tile, math.prod(work.patch)
    # Taps of a block: the most of its column phases; the mean of row phases, which are other blocks.
    sets = [max(map(len, work.phases[i : i + tile.phases])) for i in range(0, len(work.phases), tile.phases)]
    taps = sum(sets) / len(sets)
    slower = _COST.narrow_share * (8 / tile.tiles[1] - 1)
    slower += _COST.rounding_share if work.itemsize == 4 and work.parts == 1 else 0
    products = taps * work.split_chunks * tile.units / 2 * math.prod(tile.tiles) * math.prod(tile.warps)
    per_second = spec.half / 4096 if work.itemsize == 2 else spec.tf32 / 2048  # of 16 x 8 sums, 32 bytes deep
    rate = min(per_second / spec.cycles, _COST.most_products)
    busy = _COST.product_share * products * (3 if work.parts == 2 else 1) * (1 + slower) / rate
    if work.copy_bytes:
        pieces = max(1, 4 * tile.units // work.copy_bytes)
        loaded = -(-pixels // (tile.threads // 4)) * pieces * _COST.copy_cycles
    else:
        loaded = -(-pixels * tile.units // (tile.threads * work.wide)) * _COST.gather_cycles
    chunks = work.split_chunks * (_COST.chunk_cycles + loaded + taps * _COST.tap_cycles)
    stored = math.prod(tile.cells) * tile.phases * tile.channels / tile.threads
    stores = stored * (_COST.output_cycles + _COST.store_cycles * 16 / (work.vector * work.itemsize))
    resident = max(1, min(tile.resident(work.parts), spec.shared_bytes // (work.shared_bytes + 1024)))
    blocks = work.blocks * tile.splits / spec.multiprocessors
    waves = blocks / resident
    waves = math.ceil(waves) if waves < _FEW_WAVES else waves
    cycles = waves * (min(resident, math.ceil(blocks)) * busy + _COST.block_cycles + chunks + stores)
    packed = work.packed_bytes / _COST.weight_rate
    partial = _COST.partial_passes * work.partial_bytes / spec.bandwidth
    return _COST.launch_seconds + packed + cycles / spec.clock + partial
