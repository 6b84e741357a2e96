"""A tile of a layer fits other sizes: nothing new is compiled for them, and it computes what it should."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from gemmconv.algorithms import ALGORITHMS, KERNELS
from gemmconv.device import MEASURED
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Kernel
from gemmconv.kernels.layout.transpose import transposition
from gemmconv.kernels.size_class import representatives
from tests import emulator, reference
from tests.cases import Case
from tests.samples import config_of, expected, problem_of, sample
from tests.test_kernels import PASSES, Run

NCHW, NHWC = FORMATS = torch.contiguous_format, torch.channels_last
HALF, BFLOAT16, IEEE, TF32 = (
    *((torch.float16, "ieee"), (torch.bfloat16, "ieee")),
    *((torch.float32, "ieee"), (torch.float32, "tf32")),
)
emulated = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler (g++ or c++) to emulate with")


def sized(layer, count, heights, widths, batches=(1, 64), unit=1, beyond=0, name=None):
    """A layer at random sizes. Ranges include their ends; widths are so far beyond multiples of a unit."""
    draw = random.Random(f"{name or layer} {beyond}")
    for _ in range(count):
        size = draw.randint(*heights), unit * draw.randint(widths[0] // unit, widths[1] // unit) + beyond
        yield replace(layer, batch=draw.randint(*batches), input_size=size)


def around(layer, count):
    """A layer at random sizes, up to twice and down to half as large in each extent."""
    batches, heights, widths = ((-(-extent // 2), 2 * extent) for extent in (layer.batch, *layer.input_size))
    return sized(layer, count, heights, widths, batches)


def at(layer, *sizes):
    """A layer at these batches and sizes of images."""
    return [replace(layer, batch=batch, input_size=size) for batch, size in sizes]


# fmt: off
ANY = 1, 1  # a size that is replaced
DIRECT = {
    "k4s2p1": Problem(1, 64, 3, 1, ANY, (4, 4), (2, 2), (1, 1)),
    "k3s2p1op1": Problem(1, 32, 16, 1, ANY, (3, 3), (2, 2), (1, 1), (1, 1)),
    "k3s1p1": Problem(1, 16, 16, 1, ANY, (3, 3), (1, 1), (1, 1)),
    "depthwise": Problem(1, 32, 32, 32, ANY, (4, 4), (2, 2), (1, 1)),
    "grouped": Problem(1, 64, 64, 8, ANY, (5, 5), (2, 2), (2, 2), (1, 1)),
    "dilated": Problem(1, 16, 8, 1, ANY, (3, 5), (2, 3), (1, 2), (0, 0), (2, 1)),
}
# The pass, types and format, and a layer at sizes of which all widths are multiples of 16, or none is.
DIRECT_SIZES = [
    (kernel, direction, kind,
     [*sized(DIRECT[name], 16, (16, 159), (16, 144), unit=16, beyond=12 // kind[0].itemsize * odd, name=name)], layout)
    for kernel, direction, float32 in (
        ("direct/forward", "forward", IEEE), ("direct/forward_mma", "forward", TF32),
        ("direct/input_grad", "input_grad", IEEE), ("direct/weight_grad", "weight_grad", IEEE),
        ("direct/weight_grad", "grads", IEEE), ("direct/grads_mma", "grads", TF32),
    )
    for kind in (float32, HALF) for layout in (FORMATS if direction == "forward" else (NCHW,))
    for name in DIRECT for odd in (0, 1)
]
SHUFFLES = [Problem(8, ci, co, 1, (24, 40), k, k) for ci, co, k in
            ((256, 256, (2, 2)), (128, 64, (4, 4)), (512, 256, (1, 2)), (96, 64, (2, 1)))]
DCGAN, *_ = NARROW = [
    Problem(16, 64, 3, 1, (32, 32), (4, 4), (2, 2), (1, 1)),
    Problem(4, 56, 1, 1, (128, 128), (9, 9), (3, 3), (4, 4), (2, 2)),
    Problem(8, 20, 4, 1, (64, 64), (3, 5), (1, 1), (1, 2)), Problem(8, 40, 2, 1, (1, 256), (1, 8), (1, 4), (0, 2)),
]
NARROW_KINDS = [(layer, *kind) for layer in NARROW
                for kind in ((BFLOAT16, NCHW), (BFLOAT16, NHWC), (TF32, NCHW), (IEEE, NHWC))]
IMAGES = Problem(128, 256, 128, 1, (8, 8), (4, 4), (2, 2), (1, 1))
SIGNALS = Problem(16, 256, 128, 1, (1, 600), (1, 10), (1, 5))
ROWS = [
    (Problem(8, 64, 64, 1, (256, 256), (3, 3)), "forward"),
    (Problem(8, 64, 48, 1, (256, 256), (3, 3), (1, 1), (1, 1)), "input_grad"),
    (Problem(8, 64, 32, 1, (128, 128), (4, 4), (2, 2), (1, 1)), "forward"),
    (Problem(4, 64, 64, 2, (128, 128), (3, 3), (2, 1), (1, 2), (1, 0)), "forward"),
    (Problem(16, 64, 32, 1, (1, 4096), (1, 8), (1, 4), (0, 2)), "forward"),
]
ROWS_OF_SECTORS = Problem(8, 64, 48, 1, (256, 252), (3, 5))  # rows of 256 outputs
NHWC_LAYERS = [
    Problem(8, 256, 128, 1, (32, 24), (4, 4), (2, 2), (1, 1)),
    Problem(16, 128, 192, 1, (14, 14), (3, 3), (1, 1), (1, 1)),
    Problem(4, 64, 96, 1, (61, 99), (5, 3), (2, 1), (2, 0), (1, 0), (1, 2)),
    Problem(3, 40, 32, 1, (1, 700), (1, 16), (1, 8), (0, 4)),
]
K4S2P1, K2S2, K3S1P1 = WGRAD_NCHW = [
    Problem(8, 64, 48, 1, (40, 56), (4, 4), (2, 2), (1, 1)), Problem(8, 32, 64, 1, (40, 56), (2, 2), (2, 2)),
    Problem(8, 64, 64, 1, (40, 56), (3, 3), (1, 1), (1, 1)),
]
WGRAD_NHWC = [
    NHWC_LAYERS[0], Problem(16, 128, 192, 2, (56, 56), (3, 3), (1, 1), (1, 1)), NHWC_LAYERS[2],
    Problem(16, 64, 32, 1, (1, 3000), (1, 4), (1, 2), (0, 1)), Problem(64, 128, 64, 1, (4, 4), (4, 4), (2, 2), (1, 1)),
]
# fmt: on


class Served(NamedTuple):
    """A layer and sizes of it that a tile for one of them serves.

    Attributes:
        sizes: those of the tile, then others; ``given`` of them have a tile each.
        every: whether all tiles that the kernel may take are fitted, and not only the best one.
        like: what is true of a fitted tile, told the kernel, its configuration, the pass and the tile before.
        misses: how many of the sizes it may decline, for which ``like`` is told None.
    """

    kernel: str
    direction: str
    kind: tuple[torch.dtype, str]
    sizes: list[Problem]
    layout: torch.memory_format = NCHW
    given: int = 1
    every: bool = False
    like: Callable[..., Any] = lambda *_: True
    misses: int = 0

    def configs(self):
        return [config_of(problem, self.kind[0], self.layout, self.kind[1]) for problem in self.sizes]

    def __str__(self):
        return "-".join([self.kernel, self.direction, self.kind[1], str(self.sizes[0])])


def of_rows(kernel, config, direction, tile, fitted):
    """Whether a fitted tile is like one that nothing was worked out for yet."""
    anew = replace(tile, problem=config.problem)
    return kernel.program(config, direction, fitted) == kernel.program(config, direction, anew)


def of_narrow(kernel, config, direction, tile, fitted):
    """Whether the segments of a fitted tile are those of a tile that the kernel may take otherwise."""
    found = [one.segments for one in kernel.tiles(config, direction) if replace(one, segments=1) == fitted]
    return not found or fitted.segments in found


def of_wgrad_nhwc(kernel, config, direction, tile, fitted):
    """Whether it is the tile for another problem; None where a single slice remains, whose sums have another type."""
    wanted, limit = replace(tile, problem=config.problem), config.workspace_limit
    several = tile.slices(limit) > 1
    return fitted == (None if several and wanted.slices(limit) == 1 else wanted)


def of_own(member):
    """A condition of a fitted tile alone."""
    return lambda kernel, config, direction, tile, fitted: member(fitted)


# fmt: off
SERVED = [
    *(Served(*of_layer, given=2) for of_layer in DIRECT_SIZES),
    *(Served("sm90/gemm_depth_to_space", "forward", kind, [layer, *sized(layer, 12, (5, 120), (16, 160), unit=8)],
             like=of_own(lambda tile: tile.cycles > 0 and tile.sets * tile.blocks >= tile.line_blocks))
      for layer in SHUFFLES for kind in (HALF, TF32)),
    *(Served("sm90/gemm_fold_narrow", "forward", kind,
             [replace(layer, input_size=(height, width - rest)),
              *sized(layer, 8, (1, 1) if height == 1 else (height // 2, 2 * height - 1), (width // 2 + 1, width),
                     (1, 4 * layer.batch - 1), 1 if layout is NHWC else 16 // kind[0].itemsize, -rest)],
             layout, like=of_narrow)
      for layer, kind, layout in NARROW_KINDS for height, width in [layer.input_size]
      for rest in ((0,) if layout is NHWC else (0, 4 // kind[0].itemsize))),  # boxes of rows, and copies
    *(Served("sm90/gemm_fold_pixels", "forward", kind, sizes,
             like=of_own(lambda tile: tile.possible and tile.item_positions <= 128 * tile.row_blocks
                         and (tile.windows[0] > 1) == (tile.problem.input_size[0] == 1)))
      for kind in (HALF, TF32) for sizes in (
          [IMAGES, *at(IMAGES, (3, (8, 8)), (64, (4, 4)), (17, (4, 8)), (9, (8, 6)), (33, (6, 12)), (1, (2, 4)),
                       (128, (10, 12)), (5, (7, 8)))],
          [SIGNALS, *at(SIGNALS, *((n, (1, 304 + 80 * n)) for n in range(1, 10)))])),
    # Rows of TF32 that do not all begin with a sector of 32 bytes are another class.
    *(Served("sm90/gemm_fold_rows", direction, kind,
             [layer, *sized(layer, 10, (height // 2 + 1, height), (width // 2, width - 1), (1, 63), 8)], like=of_rows)
      for layer, direction in ROWS for height, width in [layer.input_size] for kind in (BFLOAT16, TF32)),
    *(Served("sm90/implicit_gemm_nhwc", "forward", kind, [layer, *around(layer, 16)], NHWC, every=True,
             like=lambda kernel, config, direction, tile, fitted:
             fitted.possible and (config.problem != tile.problem or fitted.cycles <= tile.cycles))
      for layer in NHWC_LAYERS for kind in (HALF, TF32)),
    *(Served("conv/gemm_mma", direction, kind, [layer, *sized(layer, 8, (8, 90), (24, 104), (1, 32), 8)], layout,
             like=lambda kernel, config, direction, tile, fitted: fitted == tile)
      for layer in WGRAD_NCHW[:3] for direction in ("forward", "input_grad") for kind in (HALF, TF32, IEEE)
      for layout in FORMATS),
    # Rows of outputs that are whole 16 bytes, or that are not.
    *(Served("sm90/wgrad_nchw", "weight_grad", kind,
             [replace(layer, input_size=(40, 56 + odd)), *sized(layer, 8, (8, 90), (24, 104), (1, 32), 8, odd)],
             like=of_own(lambda tile: (tile.planes > 0) == (tile.problem.input_size[1] % 8 > 0)))
      for layer in WGRAD_NCHW for odd in (0, 2 if layer is K3S1P1 else 1) for kind in (HALF, TF32, IEEE)),
    # Lines of several rows serve another height.
    Served("sm90/wgrad_nchw", "weight_grad", HALF, at(K4S2P1, (64, (8, 8)), (5, (9, 8))),
           like=of_own(lambda tile: tile.flat)),
    *(Served("sm90/wgrad_nhwc", "weight_grad", HALF, [layer, *around(layer, 12)], NHWC, like=of_wgrad_nhwc, misses=4)
      for layer in WGRAD_NHWC),
]
# fmt: on


def compiled_for(kernel, config, direction, tile):
    """What is compiled for a tile, beside what adds up partial sums."""
    steps = kernel.program(config, direction, tile).steps
    return [(step.source, step.macros) for step in steps if not step.source.startswith("splits/")]


def tile_of(kernel, config, direction):
    """The tile that a kernel takes; None where it declines the layer."""
    if kernel.why_not(config, direction) is not None:
        return None
    tile = kernel.tile(config, direction)
    return None if kernel.seconds(config, direction, tile) == math.inf else tile


def test_every_kernel_that_fits_tiles_is_checked():
    fit = {name for name, kernel in KERNELS.items() if type(kernel).fitted is not Kernel.fitted}
    # sm90/implicit_gemm has no sizes here: a slow test further down checks what its fitted tiles compute.
    assert {served.kernel for served in SERVED} == fit - {"sm90/implicit_gemm"}


@pytest.mark.parametrize("served", SERVED, ids=str)
def test_a_tile_fits_other_sizes_and_nothing_is_compiled_for_them(served):
    kernel, direction, configs, missed = KERNELS[served.kernel], served.direction, served.configs(), 0
    for config in configs[: served.given]:
        tiles = [*kernel.tiles(config, direction)] if served.every else [tile_of(kernel, config, direction)]
        if tiles == [None]:
            pytest.skip("declined: left to others")
        assert tiles
        for tile in tiles:
            compiled = compiled_for(kernel, config, direction, tile)
            for there in configs:
                fitted = kernel.fitted(there, direction, tile)
                assert served.like(kernel, there, direction, tile, fitted), there.problem
                if fitted is None:
                    missed += 1
                    continue
                assert getattr(fitted, "problem", there.problem) == there.problem
                assert compiled_for(kernel, there, direction, fitted) == compiled, there.problem
    assert missed <= served.misses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("channels", [3, 16, 66, 96])
def test_tensors_are_transposed_by_few_kernels(channels, dtype):
    draw = random.Random(channels)
    shapes = [(draw.randint(1, 64), channels, draw.randint(32, 159), draw.randint(32, 159)) for _ in range(60)]
    for memory_format in FORMATS:
        launches = [transposition(shape, dtype.itemsize, memory_format)[0] for shape in shapes]
        assert len({(launch.source, *launch.macros.items()) for launch in launches}) <= 3


SLICED = replace(NHWC_LAYERS[0], batch=32, in_channels=2048, out_channels=256, input_size=(32, 32))
LIMIT = config_of(SLICED).workspace_limit
# Kernel, pass, types and format; a layer, what its tile is like, sizes (a batch and an image) that this tile declines.
# fmt: off
DECLINED = [
    # Other pieces, odd rows; 36 inputs: no eight of them; 49, which nobody computes.
    ("sm90/gemm_depth_to_space", "forward", HALF, NCHW, SHUFFLES[0], lambda tile: True,
     (8, (24, 41)), (8, (6, 6)), (8, (7, 7))),
    # Rows of 56 and 60 bytes, of which there are no boxes; more than a row has room for; offsets of 64 bits.
    ("sm90/gemm_fold_narrow", "forward", HALF, NCHW, DCGAN, lambda tile: tile.whole,
     *((16, (32, width)) for width in (28, 30, 40)), (16, (2**21, 32)), (2**31 - 40, (32, 32))),
    # 36 inputs: no eight of them; two blocks of positions; what nobody computes; no windows.
    ("sm90/gemm_fold_pixels", "forward", HALF, NCHW, IMAGES, lambda tile: True, (128, (6, 6)), (128, (20, 20))),
    ("sm90/gemm_fold_pixels", "forward", TF32, NCHW, IMAGES, lambda tile: tile.row_blocks == 1, (128, (16, 16))),
    ("sm90/gemm_fold_pixels", "forward", HALF, NCHW, SIGNALS, lambda tile: True, (16, (1, 64))),
    # Rows that begin elsewhere.
    ("sm90/gemm_fold_rows", "forward", TF32, NCHW, ROWS_OF_SECTORS, lambda tile: not tile.whole_sectors,
     (8, (256, 250)), (8, (256, 256)), (2**28, (256, 252))),
    # Lines of several rows are for one width; rows of 100 bytes.
    ("sm90/wgrad_nchw", "weight_grad", HALF, NCHW, replace(K4S2P1, batch=64, input_size=(8, 8)),
     lambda tile: tile.flat, (5, (9, 12))),
    ("sm90/wgrad_nchw", "weight_grad", HALF, NCHW, replace(K4S2P1, batch=4, input_size=(20, 24)),
     lambda tile: True, (4, (20, 25))),
    # The type of partial sums, which is compiled, is another where there is one slice.
    ("sm90/wgrad_nhwc", "weight_grad", HALF, NHWC, WGRAD_NHWC[0], lambda tile: tile.slices(LIMIT) > 1, (1, (1, 1))),
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


def test_a_tile_that_cuts_sectors_serves_rows_of_whole_ones():
    kernel, whole = KERNELS["sm90/gemm_fold_rows"], config_of(ROWS_OF_SECTORS, torch.float32, precision="tf32")
    cut = replace(whole, problem=replace(ROWS_OF_SECTORS, input_size=(256, 256)))
    fitted = kernel.fitted(whole, "forward", kernel.tile(cut, "forward"))  # has no need of whole sectors, but may
    assert fitted.whole_sectors
    assert not fitted.cuts_sectors


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


@emulated
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
        data, exact, form = sample(case, config.dtype, "cpu"), expected(case, config.dtype), config.memory_format
        tensors = data.grad_output, data.input, data.weight
        output, input, weight = (one.contiguous(memory_format=form) for one in tensors)
        backward = {"input_grad": (output, weight), "weight_grad": (output, input)}
        poison("cpu")
        with emulator.install(builder):
            call = choice.program(config, direction).prepare(config.device)
            result = call(*backward.get(direction, (input, weight, data.bias)))
        wanted = getattr(exact, "output" if direction == "forward" else direction)
        reference.assert_close(result, wanted, config.dtype, config.precision)


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
    ("gemm_fold_rows", Case(2, 32, 16, (4, 80), (4, 4), (2, 2), (1, 1)), (5, (9, 40)), ["bfloat16"]),
    # Sectors that are not cut, by a tile for some that are.
    ("gemm_fold_rows", Case(3, 16, 24, (5, 76), (3, 5)), (2, (9, 144)), ["tf32"]),
    ("gemm_fold_rows", Case(2, 24, 16, (4, 44), (4, 4), (2, 2), (1, 1)), (5, (9, 88)), ["tf32"]),
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


@emulated
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
