"""Processor seconds that compiling takes: the kernels of a DCGAN generator's training step, without a GPU.

    python -m benchmarks.compile_time
    python -m benchmarks.compile_time --against TREE

The step is in TF32, of 128 images in NCHW, on an H100. ``--against`` has another checkout do the same by turns, each
time in a new process; what counts is the median of all rounds. The other checkout runs this file too, which therefore
imports nothing of the benchmarks until it prints.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gemmconv import selection
from gemmconv.device import MEASURED
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Direction
from gemmconv.kernels.program import Launch
from gemmconv.runtime.compiler import Macros, compile

_ARCH = "sm_90a"
_BATCH, _CHANNELS = 128, (100, 512, 256, 128, 64, 3)
_ROUNDS = 5  # of --against
_PASSES: tuple[Direction, ...] = ("forward", "input_grad", "weight_grad")

Kernels = dict[str, tuple[str, Macros]]  # sources and macros, by what launches them first
Seconds = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_time", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--against", type=Path, metavar="TREE", help="another checkout, measured by turns with this one")
    add("--only", default="", metavar="TEXT", help="kernels whose source has this in its name")
    add("--json", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.against is None:
        seconds = measure(arguments.only)
        print(json.dumps(seconds) if arguments.json else table([seconds]))
        return 0
    if not (arguments.against / "gemmconv").is_dir():
        parser.error(f"argument --against: must be a checkout of gemmconv, got {arguments.against}")
    trees = Path(__file__).parents[1], arguments.against.resolve()
    rounds: tuple[list[Seconds], list[Seconds]] = ([], [])
    for i in range(_ROUNDS):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            rounds[which].append(_in(trees[which], arguments.only))
    print(table(*rounds))
    return 0


def kernels() -> Kernels:
    """The kernels that the step compiles, each once."""
    seen, found = set(), Kernels()
    for name, step in _launches():
        if (key := (step.source, tuple(sorted(step.macros.items())))) not in seen:
            seen.add(key)
            name = f"{name} {step.source.removesuffix('.cu')}"
            again = sum(one.startswith(name) for one in found)
            found[f"{name} {again + 1}" if again else name] = step.source, step.macros
    return found


def _launches() -> Iterator[tuple[str, Launch]]:
    """The launches of the step, with the layer and the pass of each."""
    size = 1
    for i, (inputs, outputs) in enumerate(itertools.pairwise(_CHANNELS)):
        stride, padding = ((1, 1), (0, 0)) if i == 0 else ((2, 2), (1, 1))
        problem = Problem(_BATCH, inputs, outputs, 1, (size, size), (4, 4), stride, padding)
        config = Config(problem, torch.float32, torch.device("cuda", 0), "tf32", spec=MEASURED, deterministic=True)
        size = problem.output_size[0]
        for direction in _PASSES:
            choice = selection.choose(config, "auto", "compile_time", direction).choice(config, direction)
            program = choice.program(config, direction) if choice else None  # None where it is torch's operator
            for step in program.steps if program else ():
                if isinstance(step, Launch):
                    yield f"layer {i + 1} {direction}", step


def measure(only: str = "") -> Seconds:
    """The processor seconds of each compilation; the first is done once before, so that the compiler is loaded."""
    wanted = [(name, kernel) for name, kernel in kernels().items() if only in kernel[0]]
    seconds = Seconds()
    for name, (source, macros) in wanted[:1] + wanted:
        start = time.process_time()
        compile(source, macros, _ARCH)
        seconds[name] = time.process_time() - start
    return seconds


def _in(tree: Path, only: str) -> Seconds:
    """The seconds of a checkout, measured in a new process."""
    command = [sys.executable, __file__, "--json", "--only", only]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"compile_time: {tree} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    seconds: Seconds = json.loads(done.stdout.splitlines()[-1])
    return seconds


def table(*trees: Sequence[Seconds]) -> str:
    """A table of medians of rounds, of what all trees compile and of all that each does.

    >>> print(table([{"a": 0.5, "b": 1.0}], [{"a": 0.25}]))
    kernel   here s  there s   ratio
    -------  ------  -------  ------
    a         0.500    0.250  2.000x
    all       1.500    0.250  6.000x
    slowest   1.000    0.250  4.000x
    <BLANKLINE>
    2 kernels here, 1 there
    """
    from benchmarks.summary import text_table

    names = [name for name in trees[0][0] if all(name in tree[0] for tree in trees)]
    rows = {name: [[one[name] for one in tree] for tree in trees] for name in names}
    rows["all"] = [[sum(one.values()) for one in tree] for tree in trees]
    rows["slowest"] = [[max(one.values(), default=0.0) for one in tree] for tree in trees]
    cells = []
    for name, seconds in rows.items():
        medians = [statistics.median(one) for one in seconds]
        ratio = [f"{medians[0] / medians[1]:.3f}x" if medians[1] else "-"] if len(trees) > 1 else []
        cells.append([name, *(f"{one:.3f}" for one in medians), *ratio])
    headings = ("kernel", "here s", "there s", "ratio")[: len(cells[0])]
    counts = ", ".join(f"{len(tree[0])} {where}" for tree, where in zip(trees, ("kernels here", "there"), strict=False))
    return f"{text_table(headings, cells)}\n\n{counts}"


if __name__ == "__main__":
    raise SystemExit(main())
