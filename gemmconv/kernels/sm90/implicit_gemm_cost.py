"""Estimated cycles of csrc/sm90/implicit_gemm.cu for a plan, by which plans are chosen.

What a block multiplies, loads and stores adds up, nearly: they overlap, but hold each other up. Boxes overlap with the
rest. What the costs were fitted to, and how well they do, stands beside them in gemmconv/costs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gemmconv.kernels.costs import costs_of, overlapped

if TYPE_CHECKING:
    from gemmconv.kernels.sm90.implicit_gemm_plan import Plan

_COST = costs_of("sm90/implicit_gemm")
_COLUMN_CYCLES, _STEP_CYCLES = _COST.table("column_cycles"), _COST.table("step_cycles")
_TURN_CYCLES = _COST.table("turn_cycles")
_UNIT_CYCLES, _VECTOR_UNIT_CYCLES = _COST.table("unit_cycles"), _COST.table("vector_unit_cycles")
_ROUNDING_CYCLES, _LINES_STAGES_FACTOR = _COST.table("rounding_cycles"), _COST.table("lines_stages_factor")
_NOT_HIDDEN = _COST.table("not_hidden")

_SECTOR_BYTES = 32  # that memory reads and writes at a time


def item_cycles_of(plan: Plan) -> float:
    """Roughly the cycles of an item of a plan that is possible."""
    waited = plan.chunks * _COST.lines_wait_cycles / plan.stages[0] if plan.way == "lines" else 0  # for lines
    overlaps = {"lines": _COST.lines_overlap, "landing": _COST.landing_overlap, "loaded": _COST.loaded_overlap}
    parts = _multiplied(plan), _loaded(plan), _stored(plan), waited
    return overlapped(overlaps[plan.way], *parts) * _factor(plan)


def cycles_of_batch(plan: Plan, batch: int, least_bytes: int) -> float:
    """Roughly the cycles of a launch for so many images, which moves so many bytes of memory at least.

    A block takes its items one after the other, unless moving the bytes takes longer.
    """
    return _COST.start_cycles + max(plan.items_of_a_block(batch) * plan.item_cycles, least_bytes * _COST.memory_cycles)


def cycles_of_tensor_cores(plan: Plan) -> float:
    """Roughly the cycles of a plan whose tensor cores are what is waited for, 0 for those of which little is known.

    Layers of many taps, whose inputs are loaded into registers, take up to 21% longer than ``cycles``; with this as
    well, those chosen for kernels of 3x5, 5x5, 7x7 and 11x11 are 5% off in the mean, 14% at most (H100). Plans are not
    chosen by it: of 224 plans of 8 layers in two types those that are would gain 1%, but others were not measured.
    """
    if plan.way != "loaded" or plan.split:
        return 0
    products = plan.item_steps * plan.units * plan.columns * _COST.tensor_column_cycles
    item = products + _NOT_HIDDEN[plan.itemsize] * (_loaded(plan) + _stored(plan))
    return _COST.start_cycles + plan.items_of_a_block(plan.problem.batch) * item


def cost_of_lines(plan: Plan, boxes: int, box_bytes: int) -> float:
    """In proportion to what a chunk of an item takes whose inputs come as so many boxes of lines, of bytes together."""
    return overlapped(_COST.lines_overlap, _multiplied(plan) / plan.chunks, cost_of_boxes(boxes, box_bytes))


def cost_of_boxes(boxes: int, box_bytes: int) -> float:
    """Cycles by which boxes of lines are chosen. Bytes count twice: stages lack what these take of shared memory."""
    return _cycles_of_boxes(boxes, 2 * box_bytes)


def _cycles_of_boxes(boxes: int, box_bytes: float) -> float:
    """Cycles to copy so many boxes of lines with so many bytes together."""
    return max(boxes * _COST.line_box_cycles, box_bytes * _COST.line_byte_cycles)


def _factor(plan: Plan) -> float:
    """By how much longer an item takes than its parts do together."""
    lines, (patch_stages, weight_stages) = plan.way == "lines", plan.stages
    few_weights = not (plan.resident or plan.split)
    factor = 1.0
    if few_weights and patch_stages == 2 and weight_stages < _COST.few_weight_stages:
        factor *= _COST.few_stages_factor
    if plan.landing and plan.strips > 1 and plan.strip_cells > _COST.wide_strip:
        factor *= _COST.conflicting_wide_strips_factor if plan.planes_conflict else _COST.wide_strips_factor
    strip_bytes = plan.strip_cells * plan.span[1] * plan.itemsize
    if plan.strips > 1 and plan.planes_conflict and strip_bytes % _SECTOR_BYTES > 0:  # two strips write to a sector
        factor *= _COST.shared_sectors_factor
    if lines and plan.turns:
        factor *= _COST.alternating_factor
    elif lines and few_weights:
        factor *= _LINES_STAGES_FACTOR.get(weight_stages, 1)
    return factor


def _multiplied(plan: Plan) -> float:
    """Cycles of the products of an item."""
    products = plan.units // 2 * (3 if plan.split else 1)
    column = _COST.tensor_column_cycles if plan.way == "lines" else _COLUMN_CYCLES[plan.parts]
    step = products * (plan.columns * column + _COST.product_cycles) + _STEP_CYCLES[plan.parts]
    multiplied = 2 * plan.item_steps * step * (_COST.many_blocks_factor if plan.blocks > 2 else 1)
    return multiplied * (_COST.landing_factor if plan.landing else 1)


def _stored(plan: Plan) -> float:
    """Cycles to store the outputs of an item."""
    outputs = plan.tile * plan.rows * plan.blocks  # with those that do not exist
    if plan.staged:
        cycles = _COST.pixel_store_cycles if plan.channels_last else _COST.staged_store_cycles
        stored = outputs / 32 / plan.vector * cycles
    else:
        cycles = _COST.lines_store_cycles if plan.way == "lines" else _COST.store_cycles
        run, share = (plan.inner, 1.0) if plan.channels_last else (plan.span[1], min(1.0, plan.inner / plan.span[1]))
        share *= min(1.0, run * 8 * plan.itemsize / _SECTOR_BYTES)  # of a sector that a warp stores at once
        stored = outputs / 32 / min(plan.inner, plan.vector) / share * cycles
    stored += outputs * plan.itemsize * _COST.output_cycles
    if plan.strips > 1 and plan.way != "lines":
        stored = (stored + outputs / (plan.strip_cells * plan.span[1]) * _COST.run_cycles) * _COST.strips_factor
    return stored


def _loaded(plan: Plan) -> float:
    """Cycles to bring the inputs and weights of an item into shared memory."""
    loaded = {"loaded": _of_registers, "landing": _of_landings, "lines": _of_lines}[plan.way](plan)
    if not plan.resident:
        loaded += plan.item_steps * plan.weight_bytes * _COST.weight_cycles
    if plan.strips > 1 and plan.way != "lines":
        inputs = plan.chunks * plan.units * plan.element_units * plan.spots * plan.wide
        loaded = (loaded + inputs / (plan.strip_cells * plan.unit[1]) * _COST.run_cycles) * _COST.strips_factor
    return loaded


def _of_registers(plan: Plan) -> float:
    """Cycles to load the inputs of an item into registers and store them in shared memory."""
    if plan.vector_loads:
        turn = _VECTOR_UNIT_CYCLES[plan.parts]
    else:
        turn = plan.wide * _UNIT_CYCLES[plan.itemsize, plan.parts, plan.wide]
    laid_out = plan.loads * plan.loaders / 32 * turn
    cycles = plan.chunks * (plan.batches * _COST.batch_cycles + laid_out)
    return cycles * (_COST.two_stages_factor if plan.stages[0] == 2 else 1)


def _of_landings(plan: Plan) -> float:
    """Cycles to land the inputs of an item and pack them from there."""
    sharers = max(1, plan.loaders // plan.pieces)
    copies = -(-plan.pieces // plan.loaders) * -(-plan.landing_units * plan.element_units // sharers)
    turns = -(-plan.spots * plan.landing_units // plan.loaders)
    busy = copies * _COST.copy_cycles + turns * _TURN_CYCLES[plan.itemsize, plan.parts]
    landings = plan.chunks * plan.units // plan.landing_units
    return _COST.item_cycles + landings * (_COST.landing_cycles + busy + plan.landing_bytes * _COST.landed_byte_cycles)


def _of_lines(plan: Plan) -> float:
    """Cycles to bring the inputs of an item as lines, and to round them in place."""
    cycles = _cycles_of_boxes(plan.boxes * math.prod(plan.unit), plan.patch_bytes / plan.parts)
    if plan.rounded:
        turns = -(-plan.unit_pitch * plan.units // (plan.loaders - 32))
        turn = _ROUNDING_CYCLES[plan.parts] * (_COST.few_rounders_factor if plan.few_loaders else 1)
        cycles = max(cycles, turns * turn)
    return plan.chunks * cycles
