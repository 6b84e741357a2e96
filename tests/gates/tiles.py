"""Random tiles of every kernel on a GPU, each checked against float64: what compute-sanitizer can watch in minutes.

    python -m tests.gates.tiles                                                       # fills the kernel cache
    compute-sanitizer --report-api-errors no python -m tests.gates.tiles
    compute-sanitizer --tool racecheck python -m tests.gates.tiles --each 1

Under it the GPU tests take minutes for ten of them. The exit status is 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import torch

from gemmconv.algorithms import KERNELS
from gemmconv.kernels.base import Config, Kernel, Pass
from gemmconv.kernels.forms import launches
from tests import cases
from tests.cases import Case
from tests.samples import arguments_of, assert_right, channels_last, problem_of, sample

_NUMERICS = (torch.float32, "ieee"), (torch.float32, "tf32"), (torch.float16, "ieee"), (torch.bfloat16, "ieee")
_FORMATS = torch.contiguous_format, torch.channels_last
_MOST_FLOPS, _MOST_TILES = 5e7, 200  # of a case; of a kernel for one, to draw from
_CASES: dict[Case, None] = {  # each once, in order
    one: None
    for name, found in sorted(vars(cases).items())
    if name.endswith("CASES") and isinstance(found, list | tuple)
    for one in found
    if isinstance(one, Case) and 0 < problem_of(one).useful_flops <= _MOST_FLOPS
}


class Pick(NamedTuple):
    """A kernel, a pass of a case that it computes, and a tile for that."""

    kernel: Kernel
    case: Case
    config: Config
    direction: Pass
    tile: Any

    def __str__(self) -> str:
        layout = "channels_last" if self.config.memory_format is torch.channels_last else "nchw"
        kind = f"{str(self.config.dtype).removeprefix('torch.')} ({self.config.precision}) {layout}"
        return f"{self.kernel.name} {self.direction} {self.case.id} {kind}"

    def arguments(self, device: str) -> tuple[torch.Tensor, ...]:
        """The tensors of the pass, in the picked format."""
        arrange = channels_last if self.config.channels_last else torch.Tensor.contiguous
        return arguments_of(self.direction, sample(self.case, self.config.dtype, device), arrange)


def picks(each: int, seed: int = 0) -> Iterator[Pick]:
    """So many of each kernel and pass, the same for a seed."""
    random = Random(seed)
    for kernel in KERNELS.values():
        if kernel.name == "native":
            continue
        for direction in kernel.directions:
            kinds = [*itertools.product(_CASES, _NUMERICS, _FORMATS)]
            random.shuffle(kinds)
            able = (found for kind in kinds if (found := _pick(kernel, direction, *kind, random)) is not None)
            yield from itertools.islice(able, each)


def _pick(
    kernel: Kernel,
    direction: Pass,
    case: Case,
    numerics: tuple[torch.dtype, Any],
    layout: torch.memory_format,
    random: Random,
) -> Pick | None:
    config = Config(problem_of(case), numerics[0], torch.device("cuda", 0), numerics[1], memory_format=layout)
    if kernel.why_not(config, direction) is not None:
        return None
    tiles = [*itertools.islice(kernel.tiles(config, direction), _MOST_TILES)]
    tile = random.choice(tiles) if tiles else None
    if tile is None or kernel.seconds(config, direction, tile) == math.inf:
        return None
    return Pick(kernel, case, config, direction, tile)


def check(pick: Pick, device: str = "cuda") -> None:
    """Compute what was picked, into memory of NaN.

    Raises:
        AssertionError: a result is wrong.
    """
    config, arguments = pick.config, pick.arguments(device)
    program = pick.kernel.program(config, pick.direction, pick.tile)
    assert program is not None
    call = program.prepare(torch.device(device, 0) if device == "cuda" else torch.device(device))
    for output in program.outputs:  # which the allocator gives again
        torch.full(output.shape, torch.nan, dtype=config.dtype, device=device)
    assert_right(call(*arguments), pick.direction, pick.case, config)


def compile_all(picked: Sequence[Pick]) -> None:
    """Compile what all of them launch, on all cores."""
    from gemmconv.runtime import launch

    wanted = []
    for pick in picked:
        program = pick.kernel.program(pick.config, pick.direction, pick.tile)
        assert program is not None
        wanted += [(step.source, step.macros) for step in launches(program, pick.arguments("cpu"), pick.config.device)]
    launch.compile_together(wanted, 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gates.tiles", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--each", type=int, default=3, help="of each kernel and pass (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is picked (default: %(default)s)")
    arguments = parser.parse_args(argv)
    picked = [*picks(arguments.each, arguments.seed)]
    torch.cuda.init()
    compile_all(picked)
    wrong = 0
    for pick in picked:
        try:
            check(pick)
        except AssertionError as error:
            wrong += 1
            print(f"{pick}: {error}", flush=True)
    torch.cuda.synchronize()
    print(f"{len(picked)} tiles of {len({pick.kernel.name for pick in picked})} kernels, wrong {wrong}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
