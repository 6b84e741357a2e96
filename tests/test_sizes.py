"""A tile of a layer fits other sizes: nothing new is compiled for them, and it computes what it should."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from benchmarks.workloads import select
from gemmconv.algorithms import ALGORITHMS, KERNELS
from gemmconv.device import MEASURED
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Kernel
from gemmconv.kernels.layout.transpose import transposition
from gemmconv.kernels.size_class import representatives
from tests import emulator
from tests.cases import Case
from tests.samples import arguments_of, assert_right, channels_last, config_of, problem_of, sample
from tests.test_kernels import PASSES, Run

NCHW, NHWC = FORMATS = torch.contiguous_format, torch.channels_last
HALF, IEEE, TF32 = (torch.float16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32")


def around(layer):
    """A layer at random sizes, up to twice and down to half as large: rows of eights, of fours, and of any length."""
    draw = random.Random(str(layer))
    for unit in (8, 4, 1):
        batch, height, width = (
            draw.randint(-(-extent // 2), 2 * extent) for extent in (layer.batch, *layer.input_size)
        )
        height = 1 if layer.input_size[0] == 1 else height
        yield replace(layer, batch=batch, input_size=(height, -(-width // unit) * unit))


def at(layer, *sizes):
    """A layer at these batches and sizes of images."""
    return [replace(layer, batch=batch, input_size=size) for batch, size in sizes]


def compiled_for(kernel, config, direction, tile):
    """What is compiled for a tile, beside what adds up partial sums."""
    steps = kernel.program(config, direction, tile).steps
    return [(step.source, step.macros) for step in steps if not step.source.startswith("splits/")]


# A tile declines so many of the sizes below, whose rows are cut elsewhere. The kernel has another tile for each.
MISSES = {"sm90/gemm_depth_to_space": 2, "sm90/wgrad_nchw": 4}


@pytest.mark.parametrize(
    ("kernel", "direction"),
    [
        pytest.param(kernel, direction, id=f"{kernel.name}-{direction}")
        for kernel in KERNELS.values()
        # What sm90/implicit_gemm is compiled for depends on the size: a slow test below checks what its tiles compute.
        if type(kernel).fitted is not Kernel.fitted and kernel.name != "sm90/implicit_gemm"
        for direction in kernel.directions
    ],
)
def test_a_tile_of_a_class_fits_its_sizes_and_nothing_is_compiled_for_them(kernel, direction):
    fitted_ones = missed = 0
    for workload, kind, layout in itertools.product(select(["public", "models"]), (HALF, TF32, IEEE), FORMATS):
        for problem in around(workload.problem):
            config = config_of(problem, kind[0], layout, kind[1])
            for one in representatives(config):
                if kernel.why_not(one, direction) is not None:
                    continue
                tile = kernel.tile(one, direction)
                if kernel.seconds(one, direction, tile) == math.inf:
                    continue
                fitted = kernel.fitted(config, direction, tile)
                if fitted is None:
                    missed += kernel.why_not(config, direction) is None
                    continue
                fitted_ones += 1
                assert getattr(fitted, "problem", problem) == problem
                assert kernel.seconds(config, direction, fitted) > 0, problem
                compiled = compiled_for(kernel, one, direction, tile)
                assert compiled_for(kernel, config, direction, fitted) == compiled, problem
    assert fitted_ones >= 10
    assert missed <= MISSES.get(kernel.name, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("channels", [3, 16, 66, 96])
def test_tensors_are_transposed_by_few_kernels(channels, dtype):
    draw = random.Random(channels)
    shapes = [(draw.randint(1, 64), channels, draw.randint(32, 159), draw.randint(32, 159)) for _ in range(60)]
    for memory_format in FORMATS:
        launches = [transposition(shape, dtype.itemsize, memory_format)[0] for shape in shapes]
        assert len({(launch.source, *launch.macros.items()) for launch in launches}) <= 3


SHUFFLE = Problem(8, 256, 256, 1, (24, 40), (2, 2), (2, 2))
DCGAN = Problem(16, 64, 3, 1, (32, 32), (4, 4), (2, 2), (1, 1))
IMAGES = Problem(128, 256, 128, 1, (8, 8), (4, 4), (2, 2), (1, 1))
SIGNALS = Problem(16, 256, 128, 1, (1, 600), (1, 10), (1, 5))
WIDE = Problem(8, 64, 48, 1, (256, 252), (3, 5))
K4S2P1 = Problem(8, 64, 48, 1, (40, 56), (4, 4), (2, 2), (1, 1))
FEATURES = Problem(8, 256, 128, 1, (32, 24), (4, 4), (2, 2), (1, 1))
SLICED = replace(FEATURES, batch=32, in_channels=2048, out_channels=256, input_size=(32, 32))
LIMIT = config_of(SLICED).workspace_limit
# Kernel, pass, types and format; a layer, what its tile is like, sizes (a batch and an image) that this tile declines.
# fmt: off
DECLINED = [
    # Other pieces, odd rows; 36 inputs: no eight of them; 49, which nobody computes.
    ("sm90/gemm_depth_to_space", "forward", HALF, NCHW, SHUFFLE, lambda tile: True,
     (8, (24, 41)), (8, (6, 6)), (8, (7, 7))),
    # Rows of 56 and 60 bytes, of which there are no boxes; more than a row has room for; offsets of 64 bits.
    ("sm90/gemm_fold_narrow", "forward", HALF, NCHW, DCGAN, lambda tile: tile.whole,
     *((16, (32, width)) for width in (28, 30, 40)), (16, (2**21, 32)), (2**31 - 40, (32, 32))),
    # 36 inputs: no eight of them; two blocks of positions; what nobody computes; no windows; two rows.
    ("sm90/gemm_fold_pixels", "forward", HALF, NCHW, IMAGES, lambda tile: True, (128, (6, 6)), (128, (20, 20))),
    ("sm90/gemm_fold_pixels", "forward", TF32, NCHW, IMAGES, lambda tile: tile.position_blocks == 1, (128, (16, 16))),
    ("sm90/gemm_fold_pixels", "forward", HALF, NCHW, SIGNALS, lambda tile: True, (16, (1, 64)), (16, (2, 600))),
    # Rows of 1000 bytes; more items than integers.
    ("sm90/gemm_fold_rows", "forward", TF32, NCHW, WIDE, lambda tile: True, (8, (256, 250)), (2**28, (256, 252))),
    # Lines of several rows are for one width; rows of 100 bytes.
    ("sm90/wgrad_nchw", "weight_grad", HALF, NCHW, replace(K4S2P1, batch=64, input_size=(8, 8)),
     lambda tile: tile.flat, (5, (9, 12))),
    ("sm90/wgrad_nchw", "weight_grad", HALF, NCHW, replace(K4S2P1, batch=4, input_size=(20, 24)),
     lambda tile: True, (4, (20, 25))),
    # The type of partial sums, which is compiled, is another where there is one slice.
    ("sm90/wgrad_nhwc", "weight_grad", HALF, NHWC, FEATURES, lambda tile: tile.slices(LIMIT) > 1, (1, (1, 1))),
    ("sm90/wgrad_nhwc", "weight_grad", HALF, NHWC, replace(SLICED, batch=1, input_size=(4, 4)),
     lambda tile: tile.slices(LIMIT) == 1),
]
# fmt: on


@pytest.mark.parametrize(
    ("kernel", "direction", "kind", "layout", "layer", "like", "sizes"),
    [(*case[:6], case[6:]) for case in DECLINED],
    ids=[f"{i}-{case[0]}" for i, case in enumerate(DECLINED)],
)
def test_a_tile_declines_what_it_cannot_compute(kernel, direction, kind, layout, layer, like, sizes):
    config, kernel = config_of(layer, kind[0], layout, kind[1]), KERNELS[kernel]
    tile = kernel.tile(config, direction)
    assert like(tile)
    for problem in at(layer, *sizes):
        assert kernel.fitted(replace(config, problem=problem), direction, tile) is None, problem


TRIES, FOUND = 400, 3


def any_case(draw):
    """A small layer, of images that are no class's own."""
    kernel = draw.choice(((1, 1), (2, 2), (3, 3), (4, 4), (3, 5), (1, 4), (5, 5)))
    stride = tuple(draw.randint(1, min(extent, 2)) for extent in kernel)
    padding = tuple(draw.randint(0, (extent - 1) // 2) for extent in kernel)
    size = 1 if kernel[0] == 1 and draw.random() < 0.5 else draw.randint(9, 21), draw.choice((33, 36, 44, 48, 56, 72))
    channels = draw.choice((3, 8, 16, 24, 32)), draw.choice((1, 3, 4, 8, 16, 32))
    return Case(draw.randint(1, 3), *channels, size, kernel, stride, padding)


def of_kernel(algorithm, kernel, direction):
    """Cases, configurations and choices of a kernel whose tiles come from other sizes."""
    draw, found = random.Random(f"{kernel.name} {direction} 0"), 0
    for _ in range(TRIES):
        case, kind, layout = any_case(draw), draw.choice((TF32, IEEE, HALF)), draw.choice(FORMATS)
        config = replace(config_of(problem_of(case), kind[0], layout, kind[1]), bias=True, spec=MEASURED)
        choice = algorithm.choice_of(kernel, config, direction)
        if choice is None or config in representatives(config):
            continue
        yield case, config, choice
        found += 1
        if found == FOUND:
            return


@emulator.needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "kernel", "direction"),
    [
        pytest.param(algorithm, kernel, direction, id=f"{kernel.name}-{direction}")
        for algorithm in ALGORITHMS
        if algorithm.name in ("direct", "fused")
        for kernel in algorithm.kernels
        for direction in kernel.directions
        if direction != "grads" and kernel.device_type == "cuda"
    ],
)
def test_tiles_of_a_class_compute_what_they_should(algorithm, kernel, direction, builder, poison):
    for case, config, choice in of_kernel(algorithm, kernel, direction):
        arrange = channels_last if config.channels_last else torch.Tensor.contiguous
        arguments = arguments_of(direction, sample(case, config.dtype, "cpu"), arrange)
        poison("cpu")
        with emulator.install(builder):
            result = choice.program(config, direction).prepare(config.device)(*arguments)
        assert_right(result, direction, case, config)


KINDS = {kind: getattr(torch, kind.replace("tf32", "float32")) for kind in ("float16", "bfloat16", "float32", "tf32")}
BOTH = "float32", "float16"
# An operation of Run, a case, the batch and image that its tile is for, types, its format if that is channels_last; of
# several tiles which one, and how the fitted one differs from it.
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
    ("gemm_fold_rows", Case(2, 32, 16, (4, 80), (4, 4), (1, 1), (1, 1)), (5, (9, 40)), ["bfloat16"]),
    # Outputs that end with a sector, by a tile for some that do not.
    ("gemm_fold_rows", Case(3, 16, 24, (5, 76), (3, 5)), (2, (9, 144)), ["tf32"]),
    ("gemm_fold_rows", Case(2, 24, 16, (4, 44), (4, 4), (1, 1), (1, 1)), (5, (9, 88)), ["tf32"]),
    ("fused_weight_grad", Case(3, 24, 20, (5, 21), (4, 4), (2, 2), (1, 1)), (2, (9, 37)), ["float16", "tf32"]),
    ("fused_weight_grad", Case(2, 24, 16, (7, 18), (3, 3), (1, 1), (1, 1)), (1, (16, 38)), ["float16", "tf32"]),
    ("fused_weight_grad", Case(3, 24, 16, (3, 40), (3, 3), (1, 1), (1, 1)), (1, (20, 24)), ["float16", "tf32"]),
    *(("fused_weight_grad_lines", Case(batch, 24, 16, size, (3, 3), (1, 1), (1, 1)), (2, (16, 16)), ["float16"],
       "channels_last", lambda tile: True, lambda tile, fitted: fitted.tiles_image != tile.tiles_image)
      for batch, size in ((3, (21, 9)), (1, (8, 33)))),
    # Whole images to strips, and to parts of images; lines to narrow images, and to eight cells each, the last of one.
    *(("implicit_gemm_nhwc", Case(batch, 40, 32, size, (4, 4), (2, 2), (1, 1)), (7, (5, 4)), ["tf32"],
       "channels_last", lambda tile: tile.images > 1, like)
      for batch, size, like in ((2, (13, 19), lambda tile, fitted: fitted.strips > 1 and cut(tile, fitted)),
                                (1, (61, 3), lambda tile, fitted: fitted.segments > 1 and cut(tile, fitted)))),
    *(("implicit_gemm_nhwc", Case(3, 24, 32, size, (3, 3), (1, 1), (1, 1)), (2, (11, 30)), ["float16"],
       "channels_last", lambda tile: tile.group == 8, like)
      for size, like in (((40, 9), lambda tile, fitted: fitted.group == 8 and cut(tile, fitted)),
                         ((7, 25), lambda tile, fitted: fitted.group > 8 and cut(tile, fitted)))),
]
# fmt: on


def cut(tile, fitted):
    """Whether two tiles cut images differently."""
    return (tile.images, tile.strips, tile.segments) != (fitted.images, fitted.strips, fitted.segments)


def few_blocks(operation):
    """Multiprocessors that Hopper's kernels, which go from item to item, are launched for."""
    return 3 if PASSES[operation][0].startswith("sm90") else None


@emulator.needs_compiler
@pytest.mark.parametrize(
    ("layer", "images", "suits", "like"),
    [
        pytest.param(
            run := Run(
                operation, case, KINDS[kind], (*more, "contiguous")[0], few_blocks(operation), tf32=kind == "tf32"
            ),
            images,
            *(more[1:] or [None, None]),
            id=f"{run}-{images}",
            marks=() if kind == kinds[i % len(kinds)] else pytest.mark.slow,  # of two types, the other of the next case
        )
        for i, (operation, case, images, kinds, *more) in enumerate(FITTED)
        for kind in kinds
    ],
)
def test_a_tile_of_another_size_computes_what_it_should(layer, images, suits, like, builder, poison):
    kernel, direction, config = layer.kernel, layer.direction, layer.config if suits else layer.launched
    other = replace(config, problem=replace(config.problem, batch=images[0], input_size=images[1]))
    made = kernel.tile(other, direction) if suits is None else next(filter(suits, kernel.tiles(other, direction)))
    fitted = kernel.fitted(config, direction, made)
    assert fitted is not None
    assert like is None or like(made, fitted)
    if kernel.features:  # those of Hopper
        assert compiled_for(kernel, config, direction, fitted) == compiled_for(kernel, other, direction, made)
    run = replace(layer, choice=fitted)
    poison("cpu")
    with emulator.install(builder):
        run.check(run.prepare())
