"""Every kernel computes what it should with tiles that were made for other sizes, in the emulator."""

import random
from dataclasses import replace

import pytest
import torch

from gemmconv.algorithms import ALGORITHMS
from gemmconv.device import MEASURED
from gemmconv.kernels.base import Config
from gemmconv.kernels.size_class import representatives
from tests import emulator, reference
from tests.cases import Case
from tests.samples import expected, problem_of, sample
from tests.test_kernels import PASSES as PASSES_OF
from tests.test_kernels import Run

KERNELS = {
    kernel.name: (algorithm, kernel)
    for algorithm in ALGORITHMS
    if algorithm.name in ("direct", "fused")
    for kernel in algorithm.kernels
}
PASSES = "forward", "input_grad", "weight_grad"
TRIES, FOUND = 400, 3
pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler (g++ or c++) to emulate with")


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


@pytest.mark.slow
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


KINDS = {kind: getattr(torch, kind.replace("tf32", "float32")) for kind in ("float16", "bfloat16", "float32", "tf32")}
BOTH = "float32", "float16"
# An operation of Run, a case, the batch and image that its tile is for, types, and its format if that is channels_last.
# fmt: off
FITTED = [
    ("forward", Case(3, 6, 5, (9, 21), (4, 4), (2, 2), (1, 1)), (64, (20, 70)), BOTH),
    ("forward", Case(2, 36, 36, (70, 11), (4, 4), (2, 2), (1, 1), groups=36), (64, (17, 40)), BOTH, "channels_last"),
    ("forward_mma", Case(3, 6, 5, (9, 21), (4, 4), (2, 2), (1, 1)), (64, (20, 69)), BOTH),
    ("forward_mma", Case(2, 6, 5, (7, 18), (3, 3), (2, 2), (1, 1)), (64, (33, 25)), BOTH, "channels_last"),
    ("input_grad", Case(3, 6, 5, (9, 21), (4, 4), (2, 2), (1, 1)), (64, (40, 69)), BOTH),
    ("weight_grad", Case(3, 6, 5, (9, 21), (4, 4), (2, 2), (1, 1)), (64, (40, 69)), BOTH),
    ("grads", Case(3, 6, 6, (13, 21), (3, 3), (2, 2), (1, 1), groups=6), (64, (40, 69)), BOTH),
    ("grads_mma", Case(3, 6, 5, (9, 21), (4, 4), (2, 2), (1, 1)), (64, (40, 69)), BOTH),
    ("gemm_depth_to_space", Case(3, 72, 64, (4, 6), (2, 2), (2, 2)), (2, (8, 10)), ["tf32"]),
    ("gemm_depth_to_space", Case(2, 40, 16, (4, 10), (4, 4), (4, 4)), (5, (8, 17)), ["tf32"]),
    ("gemm_depth_to_space", Case(4, 40, 136, (5, 12), (1, 2), (1, 2)), (1, (8, 9)), ["tf32"]),
    ("gemm_fold_pixels", Case(5, 40, 16, (4, 6), (4, 4), (2, 2), (1, 1)), (9, (8, 8)), ["tf32"]),
    ("gemm_fold_pixels", Case(3, 72, 24, (3, 4), (3, 3), (2, 2), (1, 1)), (2, (8, 9)), ["tf32"]),
    ("gemm_fold_pixels", Case(2, 40, 16, (1, 300), (1, 10), (1, 5), (0, 2)), (2, (1, 444)), ["tf32"]),
    # Boxes of rows, copies of rows, strips.
    ("gemm_fold_narrow", Case(3, 20, 3, (7, 16), (4, 4), (2, 2), (1, 1)), (5, (11, 24)), ["bfloat16"]),
    ("gemm_fold_narrow", Case(2, 24, 2, (6, 26), (4, 5), (2, 3), (1, 0)), (2, (9, 30)), ["tf32"]),
    ("gemm_fold_narrow", Case(2, 24, 1, (5, 36), (3, 3), (2, 2), (1, 1)), (2, (7, 40)), ["tf32"]),
    ("gemm_fold_narrow", Case(2, 24, 2, (6, 19), (3, 3), (1, 1), (2, 2)), (2, (9, 30)), ["bfloat16"], "channels_last"),
    ("gemm_fold_narrow", Case(1, 12, 2, (5, 140), (3, 3), (2, 2), (1, 1)), (1, (4, 70)), ["float32"], "channels_last"),
    ("gemm_fold_rows", Case(3, 16, 24, (5, 72), (3, 3), (1, 1), (1, 1)), (2, (9, 136)), ["bfloat16"]),
    ("gemm_fold_rows", Case(2, 32, 16, (4, 80), (4, 4), (2, 2), (1, 1)), (5, (9, 40)), ["bfloat16"]),
    # Sectors that are not cut, by a tile for some that are.
    ("gemm_fold_rows", Case(3, 16, 24, (5, 76), (3, 5)), (2, (9, 144)), ["tf32"]),
    ("gemm_fold_rows", Case(2, 24, 16, (4, 44), (4, 4), (2, 2), (1, 1)), (5, (9, 88)), ["tf32"]),
    ("fused_weight_grad", Case(3, 24, 20, (5, 21), (4, 4), (2, 2), (1, 1)), (2, (9, 37)), ["float16", "tf32"]),
    ("fused_weight_grad", Case(2, 24, 16, (7, 18), (3, 3), (1, 1), (1, 1)), (1, (16, 38)), ["float16", "tf32"]),
    ("fused_weight_grad", Case(3, 24, 16, (3, 40), (3, 3), (1, 1), (1, 1)), (1, (20, 24)), ["float16", "tf32"]),
]
# fmt: on


def few_blocks(operation):
    """Multiprocessors that Hopper's kernels, which go from item to item, are launched for."""
    return 3 if PASSES_OF[operation][0].startswith("sm90") else None


@pytest.mark.parametrize(
    ("layer", "images"),
    [
        pytest.param(
            Run(operation, case, KINDS[kind], *(layout or ["contiguous"]), few_blocks(operation), tf32=kind == "tf32"),
            images,
            marks=() if kind == kinds[i % len(kinds)] else pytest.mark.slow,  # of two types, the other of the next case
        )
        for i, (operation, case, images, kinds, *layout) in enumerate(FITTED)
        for kind in kinds
    ],
    ids=str,
)
def test_a_tile_of_another_size_computes_what_it_should(layer, images, builder, poison):
    kernel, direction, config = layer.kernel, layer.direction, layer.launched
    other = replace(config, problem=replace(config.problem, batch=images[0], input_size=images[1]))
    made = kernel.tile(other, direction)
    fitted = kernel.fitted(config, direction, made)
    assert fitted is not None
    if kernel.features:  # those of Hopper
        assert compiled_for(kernel, config, direction, fitted) == compiled_for(kernel, other, direction, made)
    run = replace(layer, choice=fitted)
    poison("cpu")
    with emulator.install(builder):
        run.check(run.prepare())


def compiled_for(kernel, config, direction, tile):
    """What is compiled for a tile, beside what adds up partial sums."""
    steps = kernel.program(config, direction, tile).steps
    return [(step.source, step.macros) for step in steps if not step.source.startswith("splits/")]
