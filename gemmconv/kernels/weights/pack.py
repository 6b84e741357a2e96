"""Packs weights into the layout that the kernels of ``fused`` read: host side of csrc/weights/pack.cu."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from gemmconv.geometry import Problem
from gemmconv.kernels.macros import Macros, table
from gemmconv.kernels.program import ByFormat, Launch, Params

# Orders of rows: see csrc/include/geometry/rows.cuh.
ROWS_PLAIN, ROWS_SLOTS, ROWS_CHANNELS, ROWS_LINES, ROWS_COLUMNS = range(5)
MOST_ENTRIES = 30_000  # most 16-bit entries of the table of steps, in 64 KiB of constant memory
STEPS = 32  # steps of a block
THREADS, OWN = 256, 8  # threads of a block, input channels of a thread
_USUAL = dict.fromkeys(("CHUNKS", "SIDES", "PHASE_SIDES", "SLOTS"), 1) | dict.fromkeys(
    ("SPLIT", "INPUT_GRAD", "ROW_ORDER", "CHANNEL_PAIRS", "FRAGMENTS"), 0
)


def macros_of(sets: Iterable[Sequence[Sequence[int]]], others: Macros) -> Macros:
    """Macros that specialise csrc/weights/pack.cu.

    Args:
        sets: sets of steps; a step lists the tap of each slot of each side, -1 for none.
        others: macros that differ from the defaults, or have none.

    >>> macros_of([[[0]], [[1], [2]]], {})["STEP_TABLE"]
    '{0,1,0,1,2,1,1,2,2}'
    """
    entries, count = list[int](), 0
    for steps in sets:
        entries += itertools.chain(*([count, len(steps), *taps] for taps in steps))
        count += len(steps)
    return {**_USUAL, **others, "STEPS": count, "STEP_TABLE": table(entries)}


def k_major_macros(problem: Problem, lines: int, units: int, run: int) -> Macros:
    """Macros that pack the C_out * kH * kW rows of weightᵀ as lines of float32, in blocks with ``units`` units each.

    Lines are in order if ``run`` is 1; if it is the kernel's width, the outputs of a thread are neighbours.
    """
    all_lines = problem.out_channels * problem.taps
    return macros_of(
        [[range(run)]],
        {
            "ELEMENT_T": "float",
            "IN_CHANNELS": problem.in_channels,
            "OUT_CHANNELS": all_lines // run,
            "TAPS": run,
            "CHANNEL_SETS": -(-all_lines // lines),
            "UNITS": units,
            "ROWS": lines,
            "SLOTS": run,
            "CHANNELS": lines // run,
            "ROW_ORDER": ROWS_COLUMNS if run > 1 else ROWS_PLAIN,
        },
    )


def blocks_of(shares: int, rows: int, steps: int, sets: int) -> int:
    """Blocks of the launch.

    Args:
        shares: threads that share the input channels.
        rows: rows of the weights of a step.
        steps: steps of all sets of steps.
        sets: sets of output channels in all groups.
    """
    along = min(steps, STEPS)
    return -(-shares * rows * along // THREADS) * -(-steps // along) * sets


def packing(macros: Macros, groups: int = 1) -> Launch:
    """The launch that packs ``weight`` for a kernel that reads ``packed``."""
    size = {name: value for name, value in macros.items() if isinstance(value, int)}
    channels = size["CHUNKS"] * size["UNITS"] * (4 if macros["ELEMENT_T"] == "float" else 8)
    shares = size["CHUNKS"] if size["FRAGMENTS"] else -(-channels // OWN)  # of fragments, a thread has a chunk
    blocks = blocks_of(shares, size["SIDES"] * size["ROWS"], size["STEPS"], groups * size["CHANNEL_SETS"])
    params: Params = {"weight, packed": ("weight", "packed"), "channels_last": ByFormat(0, 1)}
    return Launch("weights/pack.cu", macros, (blocks, 1, 1), (THREADS, 1, 1), params)
