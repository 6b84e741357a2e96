"""Every kernel computes what it should with tiles that were found for a class of sizes, in the emulator. Slow."""

import random

import pytest
import torch

from gemmconv.algorithms import ALGORITHMS
from gemmconv.device import MEASURED
from gemmconv.kernels.base import Config
from gemmconv.kernels.size_class import representatives
from tests import emulator, reference
from tests.cases import Case
from tests.samples import expected, problem_of, sample

KERNELS = {
    kernel.name: (algorithm, kernel)
    for algorithm in ALGORITHMS
    if algorithm.name in ("direct", "fused")
    for kernel in algorithm.kernels
}
PASSES = "forward", "input_grad", "weight_grad"
TRIES, FOUND = 400, 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler (g++ or c++) to emulate with"),
]


def any_case(draw):
    """A small layer, of images that are no class's own."""
    kernel = draw.choice(((1, 1), (2, 2), (3, 3), (4, 4), (3, 5), (1, 4), (5, 5)))
    stride = tuple(draw.randint(1, min(extent, 2)) for extent in kernel)
    padding = tuple(draw.randint(0, (extent - 1) // 2) for extent in kernel)
    size = 1 if kernel[0] == 1 and draw.random() < 0.5 else draw.randint(9, 21), draw.choice((33, 36, 44, 48, 56, 72))
    channels = draw.choice((3, 8, 16, 24, 32)), draw.choice((1, 3, 4, 8, 16, 32))
    return Case(draw.randint(1, 3), *channels, size, kernel, stride, padding)


def of_kernel(name, direction, seed):
    """Cases, configurations and choices of a kernel whose tiles come from other sizes."""
    algorithm, kernel = KERNELS[name]
    draw, found = random.Random(f"{name} {direction} {seed}"), 0
    for _ in range(TRIES):
        case = any_case(draw)
        dtype, precision = draw.choice(((torch.float32, "tf32"), (torch.float32, "ieee"), (torch.float16, "ieee")))
        layout = draw.choice((torch.contiguous_format, torch.channels_last))
        config = Config(
            problem_of(case), dtype, torch.device("cuda", 0), precision, memory_format=layout, bias=True, spec=MEASURED
        )
        choice = algorithm.choice_of(kernel, config, direction)
        if choice is None or config in representatives(config):
            continue
        yield case, config, choice
        found += 1
        if found == FOUND:
            return


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("name", KERNELS)
def test_tiles_of_a_class_compute_what_they_should(name, direction, builder, poison):
    if direction not in KERNELS[name][1].directions:
        pytest.skip("it is not for that")
    for case, config, choice in of_kernel(name, direction, 0):
        data, exact = sample(case, config.dtype, "cpu"), expected(case, config.dtype)
        form = config.memory_format
        output, input, weight = (
            one.contiguous(memory_format=form) for one in (data.grad_output, data.input, data.weight)
        )
        given = {
            "forward": (input, weight, data.bias),
            "input_grad": (output, weight),
            "weight_grad": (output, input),
        }[direction]
        poison("cpu")
        with emulator.install(builder):
            result = choice.program(config, direction).prepare(config.device)(*given)
        wanted = getattr(exact, "output" if direction == "forward" else direction)
        reference.assert_close(result, wanted, config.dtype, config.precision)
