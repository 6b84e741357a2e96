"""Weights times columns as an implicit product of gathered inputs, for any layer with channels: sm90/implicit_gemm.cu.

    implicit_gemm_plan.py    how the kernel may go about a problem
    implicit_gemm_cost.py    what that takes, estimated
    implicit_gemm_choice.py  all ways, and the fastest

csrc/weights/pack.cu lays the weights out, in a launch of its own before the other.
"""

from __future__ import annotations

import math
from itertools import accumulate, chain

import torch

from gemmconv.kernels.base import Config, Pass
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.integers import INT32_MAX
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros, index_macros, named_macros, table
from gemmconv.kernels.program import Launch, Params, Program, TensorMapSpec, gathering, reciprocal, small_reciprocal
from gemmconv.kernels.sm90.base import CLOCK_RATE, SHARED_BYTES, Sm90Kernel, variant_of
from gemmconv.kernels.sm90.implicit_gemm_choice import plan_of, plans_of, with_other_columns
from gemmconv.kernels.sm90.implicit_gemm_cost import cycles_of_tensor_cores
from gemmconv.kernels.sm90.implicit_gemm_plan import BLOCK_ROWS, PHASE_BASE, STORED_POSITIONS, Plan
from gemmconv.kernels.weights import pack

_COST = costs_of("sm90/implicit_gemm")
_OTHER_THREADS = 32 + 256  # beside those who load: a warp for weights, two warpgroups that multiply
_FEW_ITEMS = 4  # of a thread block


def macros_of(plan: Plan, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/sm90/implicit_gemm.cu. None depends on the sizes of images or on the batch."""
    phases = [phase for block in plan.phases for phase in block]
    return {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        **_common_macros(plan),
        **named_macros(plan, "blocks warpgroups_m phase_sets"),
        "PHASE_BASE": PHASE_BASE,
        "STEPS": plan.all_steps,
        "STEP_BEGIN": table([0, *accumulate(map(len, plan.steps))]),
        "PHASES": table([-1 if phase is None else phase[0] * PHASE_BASE + phase[1] for phase in phases]),
        **named_macros(plan, "unit span columns channels_last"),
        "PING_PONG": int(plan.turns),
        **named_macros(plan, "pairing staged line_cells vector vector_loads wide"),
        "PAIRED_CELLS": int(plan.staged or plan.pitch % 2 == 0),
        "BOXED": int(plan.way == "lines"),
        **named_macros(plan, "landing_units landing_stages"),
        **named_macros(plan.compiled or plan, "partial_pieces sharers landed_turns"),
        "PRODUCERS": plan.loaders,
        "LOADED_TOGETHER": plan.together,
        **index_macros(plan.problem.batch * plan.problem.image_elements),
    }


def weight_macros_of(plan: Plan, dtype: torch.dtype) -> Macros:
    """Macros that specialise csrc/weights/pack.cu."""
    others: Macros = {
        "ELEMENT_T": ELEMENT_TYPES[dtype],
        **_common_macros(plan),
        "INPUT_GRAD": int(plan.direction == "input_grad"),
        "TAPS": plan.problem.taps,
        "SIDES": plan.warpgroups_m,
        "ROWS": BLOCK_ROWS,
    }
    sets = (plan.steps[first : first + plan.blocks] for first in range(0, len(plan.steps), plan.blocks))
    return pack.macros_of(([*chain(*(one.values() for one in blocks))] for blocks in sets), others)


def _common_macros(plan: Plan) -> Macros:
    """The macros by which weights are laid out, and read."""
    channels = named_macros(plan, "split in_channels out_channels slots channels")
    return {**channels, **named_macros(plan, "row_order phase_sides channel_sets units chunks")}


def input_map(plan: Plan) -> TensorMapSpec:
    """The tensor map of an input whose lines come as boxes: [channels][columns][rows][images].

    All of an image is one row where nothing lies between rows, and all images are where nothing is shifted either. A
    box has lines of one plane.
    """
    p, itemsize, pixels = plan.problem, plan.itemsize, math.prod(plan.input_size)
    channels = plan.in_channels * p.groups
    images, rows, columns = plan.line_box
    width, steps = pixels if plan.whole_images else plan.input_size[1], (1, plan.unit[1], plan.unit[0], 1)
    sizes = (channels, p.batch * pixels, 1, 1) if plan.flat else (channels, width, pixels // width, p.batch)
    strides = channels * itemsize, width * channels * itemsize, pixels * channels * itemsize
    box = plan.units * plan.element_units, columns, rows, images
    return TensorMapSpec("input", itemsize, sizes, strides, box, steps)


def _loader_params(plan: Plan) -> Params:
    """The params that depend on how inputs come into shared memory."""
    if plan.way == "lines":
        strip_boxes = plan.strip_positions // plan.box_positions
        return {
            "box_images, box_rows, box_width": plan.line_box,
            "boxes, flat": (plan.boxes, int(plan.flat)),
            "by_boxes, by_positions": (reciprocal(plan.boxes), reciprocal(plan.box_positions)),
            "by_strip_boxes, strip_boxes": (reciprocal(max(1, strip_boxes)), strip_boxes),
        }
    plane_spots = plan.patch // plan.neighbours
    spots = {"by_spots, by_plane_spots": (small_reciprocal(plan.spots), small_reciprocal(plane_spots))}
    if plan.way == "loaded":
        return {**spots, "batches, together": (plan.batches, -(-plan.loads // plan.batches))}
    runs, pieces = plan.run_pitch * plan.unit[1] + 2 * plan.element_units, plan.pieces // plan.unit[0]
    return {
        "by_run_pitch, by_run_span": (reciprocal(plan.run_pitch), reciprocal(runs)),
        "by_run_pieces, by_pieces": (small_reciprocal(pieces), small_reciprocal(plan.pieces)),
        **spots,
        "run_pitch, run_pieces, landed_channel": (plan.run_pitch, pieces, plan.landed_channel_bytes),
    }


def _smallest(config: Config, direction: Pass) -> Plan:
    return Plan(config.problem, direction, *variant_of(config), multiprocessors=config.spec.multiprocessors)


def last_position(plan: Plan) -> int:
    """The largest number that the kernel computes with positions, at most."""
    return plan.problem.batch * plan.image_positions + plan.tile + plan.patch + plan.strip_positions


def _too_large(plan: Plan) -> str | None:
    """Why the kernel's integers do not reach as far as the plan, or None."""
    p, shares = plan.problem, -(-plan.chunks * plan.units * plan.element_units // pack.OWN)
    if max(last_position(plan), plan.items + plan.multiprocessors, p.in_pixels, p.out_pixels) > INT32_MAX:
        return "images must have less than 2**31 pixels in all"
    if pack.THREADS * pack.blocks_of(shares, plan.rows, plan.all_steps, plan.channel_sets * p.groups) > INT32_MAX:
        return "the weights must be packed by less than 2**31 threads"
    return None


class ImplicitGemm(Sm90Kernel):
    name = "sm90/implicit_gemm"
    directions = ("forward", "input_grad")
    serves = "layers whose tiles fit shared memory"

    def tiles(self, config: Config, direction: Pass) -> list[Plan]:
        return plans_of(_smallest(config, direction))

    def tile(self, config: Config, direction: Pass) -> Plan | None:
        plan = plan_of(_smallest(config, direction))
        return None if plan is None or _too_large(plan) else plan

    def why_not_sizes(self, config: Config, direction: Pass) -> str | None:
        p, plan = config.problem, plan_of(_smallest(config, direction))
        if plan is not None:
            return _too_large(plan)
        window = f"kernel_size={p.kernel_size}, stride={p.stride}, dilation={p.dilation}"
        return f"a tile must fit {SHARED_BYTES} bytes of shared memory, and its tables constant memory; got {window}"

    def fitted(self, config: Config, direction: Pass, tile: Plan) -> Plan | None:
        plan = tile.fitted(config.problem)
        if plan is not None and plan.items_of_a_block(plan.problem.batch) <= _FEW_ITEMS:
            # How tiles come out even is most of what counts.
            others = [one.fitted(config.problem) for one in with_other_columns(tile)]
            plan = min((plan, *(one for one in others if one is not None)), key=lambda one: one.cycles)
        return None if plan is None or _too_large(plan) else plan

    def seconds(self, config: Config, direction: Pass, tile: Plan) -> float:
        cycles = max(tile.cycles, cycles_of_tensor_cores(tile))
        return _COST.launch_seconds + cycles / CLOCK_RATE + 2 * tile.packed_bytes / _COST.weight_rate

    def program(self, config: Config, direction: Pass, tile: Plan) -> Program:
        p, block = config.problem, (tile.loaders + _OTHER_THREADS, 1, 1)
        offsets = tuple(tile.offset(shift) for steps in tile.steps for shift in steps)
        bottom = tile.strip_positions - (tile.strip_tiles - 1) * tile.tile  # beyond the other tiles of a strip
        in_pieces = 2 * tile.element_units if tile.channels_last else tile.line_cells
        params: Params = {
            **({"map": input_map(tile)} if tile.way == "lines" else {}),
            "input, packed": ("input", "packed"),
            "bias, output": ("bias" if tile.direction == "forward" else None, "output"),
            "by_strips, by_strip_rows": (reciprocal(tile.strips), reciprocal(tile.strip_rows)),
            "by_strip_tiles, by_image_positions": (reciprocal(tile.strip_tiles), reciprocal(tile.image_positions)),
            "by_bottom, by_sets, by_pitch": (reciprocal(bottom), reciprocal(tile.sets), reciprocal(tile.pitch)),
            "batch, groups": (p.batch, p.groups),
            "h_in, w_in, h_out, w_out": (*tile.input_size, *tile.output_size),
            "strips, strip_rows, strip_cells, cells_h": (tile.strips, tile.strip_rows, tile.strip_cells, tile.cells[0]),
            "origin_h, origin_w": tile.origin,
            "strip_tiles, items": (tile.strip_tiles, tile.items),
            "pitch, patch, unit_pitch, first": (tile.pitch, tile.patch, tile.unit_pitch, tile.first),
            "patch_stages, weight_stages, stationary": (*tile.stages, int(tile.resident)),
            # Tiles come as they lie, or through all strips of an image first, then down.
            "whole_images, in_order": (int(tile.whole_images), int(1 in (tile.strips, tile.strip_tiles))),
            "stored_row, stored_column": divmod(in_pieces if tile.staged else STORED_POSITIONS, tile.pitch),
            **_loader_params(tile),
            f"step_offset[{len(offsets)}]": offsets,
        }
        packing = pack.packing(weight_macros_of(tile, config.dtype), p.groups)
        macros, grid = macros_of(tile, config.dtype), (tile.blocks_of(tile.items, config.spec.multiprocessors), 1, 1)
        main = Launch("sm90/implicit_gemm.cu", macros, grid, block, params, tile.shared_bytes, overlaps=True)
        launches = (packing, main) if tile.items else ()
        return gathering(config, tile.direction, launches, {"packed": tile.packed_bytes})


KERNEL = ImplicitGemm()
