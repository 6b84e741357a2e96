"""What csrc/sm90/implicit_gemm.cu takes for a plan: an estimate in cycles, by which plans are chosen.

Fitted to 1692 measured plans of 37 layers in three types (benchmarks.choices, H200): 21% off, as the root mean square
of the logarithm, and the plans it chooses take 4% longer than the best of those measured (geometric mean). What a
block multiplies, loads and stores adds up, nearly: they overlap, but hold each other up. Boxes overlap with the rest.
Blocks, 56 plans of 7 layers: 8% off, those chosen 2% longer than the best; lines, 415 plans of 32 layers: 11% off,
those chosen 1%.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmconv.kernels.sm90.implicit_gemm_plan import Plan

# Products, for float32 as one part and as two:
_COLUMN_CYCLES, _PRODUCT_CYCLES = (0.267, 0.274), 1.9  # of 64 rows and two units; the tensor cores take 0.5 a column
_STEP_CYCLES = 14.5, 53  # the sums of a chain are waited for
_MANY_BLOCKS_FACTOR, _LANDING_FACTOR = 1.11, 1.28  # of more than two blocks, and beside inputs that land

# Inputs that are loaded into registers.
_LOAD_FACTOR, _VECTOR_LOAD_FACTOR = 1.4, 1.3  # of few loaders; of vectors in memory they have more on their way
_BATCH_CYCLES = 293, 366  # of many loaders and of few, until loads that are on their way together have come
# Of a warp's units that are loaded and laid out, by bytes of an element, parts of it and inputs taken together.
_UNIT_CYCLES = {
    (2, 1): {1: 45, 2: 21.4, 4: 27.7},
    (4, 1): {1: 35, 2: 29.2, 4: 23.4},
    (4, 2): {1: 40, 2: 28.3, 4: 28.2},
}
_VECTOR_UNIT_CYCLES = 24.0, 31.0  # of one part and of two, where a unit is a vector in memory
_TWO_STAGES_FACTOR = 1.07  # where loads have only two stages to go to

# Inputs that land: of an item and a landing; of a turn of copies, and of taking up; of a byte.
_ITEM_CYCLES, _LANDING_CYCLES, _COPY_CYCLES, _LANDED_BYTE_CYCLES = 608, 355, 18.6, 0.0234
_LANDING_BOX_FACTOR = 0.5
_TURN_CYCLES = {(2, 1): 65, (4, 1): 64, (4, 2): 137}
_FEW_TURNS_FACTOR = 0.85  # fewer loaders take longer, but not by as much

# Inputs that come as blocks: of a box, and of a byte.
_BOX_CYCLES, _BOX_BYTE_CYCLES = 250, 0.03
# As lines, where products take what tensor cores do: of a column; of a box and of a byte; of a turn of all threads that
# round, by parts, of which one of fewer takes less; of a chunk, for all stages.
_TENSOR_COLUMN_CYCLES, _LINE_BOX_CYCLES, _LINE_BYTE_CYCLES = 0.5, 230, 0.024
_ROUNDING_CYCLES, _FEW_ROUNDERS_FACTOR = {1: 115, 2: 295}, 0.65
_LINES_WAIT_CYCLES = 3_000

_WEIGHT_CYCLES = 0.0051  # of a byte

# Outputs: of a warp's instruction, and of a byte.
_STAGED_STORE_CYCLES, _STORE_CYCLES = 7.1, 10.5
_PIXEL_STORE_CYCLES, _LINES_STORE_CYCLES = 16.5, 8.6  # the same of channels_last, and of lines that are not staged
_OUTPUT_CYCLES = 0.04

# Images that are cut into strips.
_RUN_CYCLES = 0.38  # of a run of inputs or outputs that ends with a strip
_STRIPS_FACTOR = 1.08  # of loads and stores
_WIDE_STRIP, _WIDE_STRIPS_FACTOR = 66, (1.02, 1.1)  # cells; where inputs land, more take longer, if planes conflict too
_SHARED_SECTORS_FACTOR = 1.08  # where strips share sectors of planes that conflict

# How much hides behind other things: 1 if nothing does. Of inputs that are loaded into registers;
# that land; that come as boxes.
_OVERLAP, _LANDING_OVERLAP, _BLOCKS_OVERLAP, _LINES_OVERLAP = 1.03, 1.26, 1.4, 2.05
_TURNS_FACTOR = 0.91  # of lines, where warpgroups multiply by turns
_LINES_STAGES_FACTOR = {3: 1.16, 4: 1.04}  # of so few stages of weights that come again and again, of one part
# Of all that an item takes, where weights that come again and again have few stages, as inputs have.
_FEW_WEIGHT_STAGES, _FEW_STAGES_FACTOR = 9, 1.11

# Where tensor cores are what is waited for: the share of loads and stores that does not hide, by bytes of an element.
_BESIDE_TENSOR_CORES = {2: 0.5, 4: 0.2}

_SECTOR_BYTES = 32  # that memory reads and writes at a time
_MEMORY_CYCLES = 0.00031  # of a byte, for all blocks
_START_CYCLES = 4_290


def cycles_of(plan: Plan) -> float:
    """Roughly the cycles of the launch of a plan that is possible."""
    item = _overlapping(plan, _multiplied(plan), _loaded(plan), _stored(plan), _waited(plan)) * _factor(plan)
    least = plan.problem.least_bytes(plan.itemsize) * _MEMORY_CYCLES
    return _START_CYCLES + max(plan.items_of_a_block * item, least)


def cycles_of_tensor_cores(plan: Plan) -> float:
    """Roughly the cycles of a plan whose tensor cores are what is waited for, 0 for those of which little is known.

    Layers of many taps, whose inputs are loaded into registers, take up to 21% longer than ``cycles_of``; with this as
    well, those chosen for kernels of 3x5, 5x5, 7x7 and 11x11 are 5% off in the mean, 14% at most (H100). Plans are not
    chosen by it: of 224 plans of 8 layers in two types those that are would gain 1%, but others were not measured.
    """
    if plan.way != "loaded" or plan.split:
        return 0
    products = plan.item_steps * plan.units * plan.columns * _TENSOR_COLUMN_CYCLES
    item = products + _BESIDE_TENSOR_CORES[plan.itemsize] * (_loaded(plan) + _stored(plan))
    return _START_CYCLES + plan.items_of_a_block * item


def cost_of_lines(plan: Plan, boxes: int, box_bytes: float) -> float:
    """In proportion to what a chunk of an item takes whose inputs come as so many boxes of lines, of bytes together."""
    return _overlapping(plan, _multiplied(plan) / plan.chunks, cost_of_boxes(boxes, box_bytes))


def cost_of_boxes(boxes: int, box_bytes: float) -> float:
    """By which boxes are chosen. Bytes count twice: what they take of shared memory is missing for stages."""
    return _cycles_of_boxes(boxes, 2 * box_bytes)


def _cycles_of_boxes(boxes: int, box_bytes: float) -> float:
    """Of so many boxes of lines, and their bytes together."""
    return max(boxes * _LINE_BOX_CYCLES, box_bytes * _LINE_BYTE_CYCLES)


def _overlapping(plan: Plan, *parts: float) -> float:
    """What parts of an item take together."""
    if plan.way == "lines":
        overlap = _LINES_OVERLAP
    elif plan.way == "blocks":
        overlap = _BLOCKS_OVERLAP
    else:
        overlap = _LANDING_OVERLAP if plan.landing else _OVERLAP
    return sum(part**overlap for part in parts) ** (1 / overlap)


def _factor(plan: Plan) -> float:
    """By how much longer an item takes than its parts do together."""
    assert plan.stages is not None
    lines, (patch_stages, weight_stages) = plan.way == "lines", plan.stages
    few_weights = not (plan.resident or plan.split)
    factor = 1.0
    if few_weights and patch_stages == 2 and weight_stages < _FEW_WEIGHT_STAGES:
        factor *= _FEW_STAGES_FACTOR
    if plan.landing and plan.strips > 1 and plan.strip_cells > _WIDE_STRIP:
        factor *= _WIDE_STRIPS_FACTOR[plan.planes_conflict]
    if plan.shares_sectors:
        factor *= _SHARED_SECTORS_FACTOR
    if lines and plan.turns:
        factor *= _TURNS_FACTOR
    elif lines and few_weights:
        factor *= _LINES_STAGES_FACTOR.get(weight_stages, 1)
    return factor


def _multiplied(plan: Plan) -> float:
    """Of the products of an item."""
    products = plan.units // 2 * (3 if plan.split else 1)
    column = _TENSOR_COLUMN_CYCLES if plan.way == "lines" else _COLUMN_CYCLES[plan.split]
    step = products * (plan.columns * column + _PRODUCT_CYCLES) + _STEP_CYCLES[plan.split]
    multiplied = 2 * plan.item_steps * step
    return multiplied * (_MANY_BLOCKS_FACTOR if plan.blocks > 2 else 1) * (_LANDING_FACTOR if plan.landing else 1)


def _stored(plan: Plan) -> float:
    """Of storing the outputs of an item."""
    outputs = plan.item_outputs
    if plan.staged:
        cycles = _PIXEL_STORE_CYCLES if plan.channels_last else _STAGED_STORE_CYCLES
        stored = outputs / 32 / plan.vector * cycles
    else:
        cycles = _LINES_STORE_CYCLES if plan.way == "lines" else _STORE_CYCLES
        stored = outputs / 32 / min(plan.inner, plan.vector) / _sector_share(plan) * cycles
    stored += outputs * plan.itemsize * _OUTPUT_CYCLES
    if plan.strips > 1 and plan.way != "lines":
        stored = (stored + outputs / (plan.strip_cells * plan.span[1]) * _RUN_CYCLES) * _STRIPS_FACTOR
    return stored


def _sector_share(plan: Plan) -> float:
    """How much of a sector of memory a warp stores at once, from registers."""
    if plan.channels_last:
        return min(1.0, plan.inner * 8 * plan.itemsize / _SECTOR_BYTES)
    return min(1.0, plan.inner / plan.span[1]) * min(1.0, 8 * plan.span[1] * plan.itemsize / _SECTOR_BYTES)


def _waited(plan: Plan) -> float:
    """Of an item, until lines have come."""
    assert plan.stages is not None
    return plan.chunks * _LINES_WAIT_CYCLES / plan.stages[0] if plan.way == "lines" else 0


def _loaded(plan: Plan) -> float:
    """Of bringing the inputs and weights of an item into shared memory."""
    bring = {
        "loaded": _of_registers,
        "landing": _of_landings,
        "blocks": _of_blocks,
        "lines": _of_lines,
    }
    loaded = bring[plan.way](plan)
    if not plan.resident:
        loaded += plan.item_steps * plan.weight_bytes * _WEIGHT_CYCLES
    if plan.strips > 1 and not plan.boxed:
        inputs = plan.chunks * plan.units * plan.element_units * plan.spots * plan.wide
        loaded = (loaded + inputs / (plan.strip_cells * plan.unit[1]) * _RUN_CYCLES) * _STRIPS_FACTOR
    return loaded


def _of_registers(plan: Plan) -> float:
    """Of loading the inputs of an item into registers and laying them out."""
    assert plan.stages is not None
    if plan.vector_loads:
        turn, few_factor = _VECTOR_UNIT_CYCLES[plan.split], _VECTOR_LOAD_FACTOR
    else:
        turn, few_factor = plan.wide * _UNIT_CYCLES[plan.itemsize, plan.parts][plan.wide], _LOAD_FACTOR
    laid_out = plan.loads * plan.loaders / 32 * turn * (few_factor if plan.few_loaders else 1)
    cycles = plan.chunks * (plan.batches * _BATCH_CYCLES[plan.few_loaders] + laid_out)
    return cycles * (_TWO_STAGES_FACTOR if plan.stages[0] == 2 else 1)


def _of_landings(plan: Plan) -> float:
    """Of landing the inputs of an item and laying them out."""
    sharers = max(1, plan.loaders // plan.pieces)
    copies = -(-plan.pieces // plan.loaders) * -(-plan.landing_units * plan.element_units // sharers)
    turns = -(-plan.spots * plan.landing_units // plan.loaders)
    busy = (not plan.landing_box) * copies * _COPY_CYCLES + turns * _TURN_CYCLES[plan.itemsize, plan.parts]
    busy *= _FEW_TURNS_FACTOR if plan.few_loaders else 1
    landings = plan.chunks * plan.units // plan.landing_units
    copied = plan.landing_bytes * _LANDED_BYTE_CYCLES * (_LANDING_BOX_FACTOR if plan.landing_box else 1)
    return _ITEM_CYCLES + landings * (_LANDING_CYCLES + busy + copied)


def _of_blocks(plan: Plan) -> float:
    """Of bringing the inputs of an item as blocks."""
    boxes = plan.boxes * math.prod(plan.unit)
    return plan.chunks * max(boxes * _BOX_CYCLES, plan.patch_bytes * _BOX_BYTE_CYCLES)


def _of_lines(plan: Plan) -> float:
    """Of bringing the inputs of an item as lines, and of rounding them where they lie."""
    cycles = _cycles_of_boxes(plan.boxes * math.prod(plan.unit), plan.patch_bytes / plan.parts)
    if plan.rounded:
        turns = -(-plan.unit_pitch * plan.units // (plan.loaders - 32))
        turn = _ROUNDING_CYCLES[plan.parts] * (_FEW_ROUNDERS_FACTOR if plan.few_loaders else 1)
        cycles = max(cycles, turns * turn)
    return plan.chunks * cycles
