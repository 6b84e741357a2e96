"""`fused` on the GPU, against the float64 reference: its own plans, and others that it might have chosen."""

import os
from dataclasses import dataclass
from random import Random

import pytest
import torch

from benchmarks.precompile import in_processes, only_compile
from gemmconv.kernels.base import Config
from tests import reference
from tests.cases import (
    CASES,
    CELL_ROW_CASES,
    FOLD_CASES,
    IMAGE_CASES,
    IMAGE_ROW_CASES,
    ROW_CASES,
    SHUFFLE_CASES,
    TILED_CASES,
    Case,
)
from tests.samples import (
    arguments_of,
    assert_right,
    channels_last,
    conv_precision,
    expected,
    offset,
    problem_of,
    sample,
)

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.algorithms import KERNELS
from gemmconv.selection import choose

HOPPER = (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="no GPU with wgmma"
    ),
]

# Long sums, channels that fill several M blocks, several tiles a block.
LARGE_CASES = [
    Case(4, 96, 160, (30, 47), (3, 3), (1, 1), (1, 1)),
    Case(3, 256, 64, (16, 12), (4, 4), (2, 2), (1, 1)),
    Case(2, 64, 32, (64, 64), (2, 2), (2, 2)),
    Case(5, 72, 136, (9, 14), (2, 2), (2, 2)),
    Case(2, 45, 53, (37, 61), (3, 4), (2, 3), (2, 1), (1, 0)),
    Case(1, 2048, 80, (7, 9), (3, 3), (1, 1), (1, 1)),
    Case(2, 40, 72, (24, 200), (3, 3), (1, 1), (1, 1)),
    Case(3, 48, 40, (40, 6), (4, 4), (2, 2), (1, 1)),
    Case(3, 64, 96, (1, 152), (1, 10), (1, 5)),
    Case(2, 33, 70, (3, 64), (1, 16), (1, 8), (0, 4)),
]
# Images that are whole boxes of a tensor map, or patches, or pieces; rows of strips that are boxes.
BOX_CASES = [
    Case(9, 136, 72, (14, 14), (2, 2), (2, 2)),
    Case(3, 72, 140, (31, 10), (4, 2), (4, 2)),
    Case(5, 64, 40, (13, 24), (1, 2), (1, 2), groups=2),
    Case(5, 200, 130, (8, 8), (2, 2), (2, 2)),
    Case(3, 72, 70, (16, 48), (2, 4), (2, 4)),
    Case(7, 128, 128, (4, 16), (3, 2), (3, 2), groups=2),
    Case(2, 64, 40, (32, 64), (1, 1), (1, 1)),
    Case(3, 40, 24, (30, 8), (4, 2), (2, 1), (1, 0)),
    Case(2, 136, 40, (30, 136), (3, 7), (1, 2), (1, 2)),
    Case(2, 64, 140, (31, 72), (2, 5), (1, 1), groups=2),
    Case(9, 136, 72, (4, 4), (4, 4), (2, 2), (1, 1)),
    Case(3, 32, 32, (17, 50), (3, 3), (1, 1), (1, 1)),
    Case(3, 40, 64, (9, 20), (3, 8), (3, 8), (0, 1)),
    Case(2, 64, 40, (6, 12), (4, 8), (4, 4), (1, 2)),
]
# Few output channels, of more than one item a block.
LARGE_FOLD_CASES = [
    Case(64, 64, 3, (32, 32), (4, 4), (2, 2), (1, 1)),
    Case(1, 56, 1, (200, 512), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(9, 128, 3, (40, 128), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(40, 32, 1, (1, 8192), (1, 8), (1, 4), (0, 2)),
]
# Weight gradients of full blocks.
GRADIENT_CASES = [
    Case(4, 96, 160, (30, 64), (3, 3), (1, 1), (1, 1)),
    Case(3, 256, 64, (16, 16), (4, 4), (2, 2), (1, 1)),
    Case(2, 64, 32, (64, 64), (2, 2), (2, 2)),
    Case(9, 72, 130, (8, 8), (2, 2), (2, 2), groups=2),
    Case(2, 33, 70, (3, 64), (1, 16), (1, 8), (0, 4)),
    Case(2, 40, 24, (9, 40), (3, 5), (2, 1), (2, 2), (1, 0), (1, 1)),
    Case(3, 24, 16, (7, 32), (3, 3), (1, 2), (1, 2), (0, 1), (2, 2)),
    Case(1, 32, 32, (33, 256), (3, 7), (1, 1), (1, 3)),
    Case(3, 64, 64, (22, 128), (3, 3)),
    Case(2, 40, 136, (17, 64), (3, 7)),
    Case(2, 32, 64, (9, 48), (4, 3), (2, 2), groups=2),
    Case(9, 128, 96, (14, 14), (2, 2), (2, 2)),
    Case(5, 72, 40, (8, 6), (4, 4), (2, 2), (1, 1)),
    Case(3, 32, 64, (31, 128), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1), groups=2),
    Case(2, 32, 48, (16, 128), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    Case(33, 100, 72, (1, 1), (4, 4)),
]
NUMERICS = {
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "float16": (torch.float16, "ieee"),
    "bfloat16": (torch.bfloat16, "ieee"),
}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def kind_of(plan):
    """Return what makes plans take other paths of the kernel."""
    if plan.way != "lines":
        return plan.way, plan.lined
    images, rows, _ = plan.line_box
    box = "flat" if plan.flat else (images > 1, rows > 1, plan.whole_images)
    return plan.way, plan.units, max(plan.unit) > 1, plan.strips > 1, box, plan.pitch % 2


# How many other tiles each kernel has beside its own.
OTHERS = {
    "gemm_fold_narrow": 2,
    "gemm_fold_pixels": 3,
    "gemm_depth_to_space": 3,
    "implicit_gemm_nhwc": 3,
    "gemm_fold_rows": 3,
    "wgrad_nchw": 5,
    "wgrad_nhwc": 7,
    "gemm_mma": 1,
}


@dataclass(frozen=True)
class Run:
    """A case in a type, with a layout: the tiles that a kernel takes, and others; of implicit_gemm either."""

    case: Case
    numerics: str
    layout: str
    name: str = "implicit_gemm"
    others: bool = False

    def __str__(self):
        return "-".join([self.name, self.case.id, self.numerics, self.layout, *["others"] * self.others])

    @property
    def config(self):
        dtype, precision = NUMERICS[self.numerics]
        return Config(
            problem_of(self.case), dtype, torch.device("cuda", 0), precision, memory_format=FORMATS[self.layout]
        )

    @property
    def kernel(self):
        return KERNELS[f"{'conv' if self.name == 'gemm_mma' else 'sm90'}/{self.name}"]

    @property
    def tiles(self):
        """Pairs of a direction and a tile."""
        kernel, config, random, chosen = self.kernel, self.config, Random(str(self)), []
        for direction in kernel.directions:
            own = kernel.tile(config, direction)
            if own is None:
                continue
            found = [own]
            if self.others:
                kinds, found = {}, []
                for plan in kernel.tiles(config, direction):
                    kinds.setdefault(kind_of(plan), []).append(plan)
                for kind, plans in kinds.items():
                    found += random.sample(plans, min(1 if "lines" in kind else 2, len(plans)))
            elif self.name != "implicit_gemm" and kernel.computed_in in (None, config.memory_format):
                # What transposes the tensors before knows no tiles.
                tiles = [*kernel.tiles(config, direction)]
                found += random.sample(tiles, min(OTHERS[self.name], len(tiles)))
            chosen += [(direction, tile) for tile in found]
        return chosen


def runs_of(name, cases, kinds, *layouts):
    """Those runs of a kernel that it takes."""
    runs = [Run(case, numerics, layout, name) for case in cases for numerics in kinds for layout in layouts]
    return [run for run in runs if run.kernel.tile(run.config, run.kernel.directions[0]) is not None]


HALVES = ("float16", "bfloat16")
ONE_PRODUCT = (*HALVES, "tf32")
RUNS = [
    Run(case, numerics, layout)
    for case in (*CASES, *TILED_CASES, *LARGE_CASES)
    for numerics in NUMERICS
    if numerics != "bfloat16" or case in LARGE_CASES
    for layout in FORMATS
]
RUNS += [
    Run(case, numerics, layout, others=True)
    for case in (*TILED_CASES[:7], *LARGE_CASES, *BOX_CASES)
    for numerics in ("ieee", "tf32", "float16")
    for layout in FORMATS
]


RUNS += [
    run
    for run in runs_of("gemm_fold_narrow", (*FOLD_CASES, *LARGE_FOLD_CASES), NUMERICS, *FORMATS)
    if run.numerics != "bfloat16" or run.case in LARGE_FOLD_CASES
]


# Items that share a multiprocessor, and fill no round; many channels.
LARGE_IMAGE_CASES = [
    Case(37, 264, 72, (8, 6), (4, 4), (2, 2), (1, 1)),
    Case(131, 200, 66, (4, 4), (4, 4), (2, 2), (1, 1)),
    Case(33, 1032, 48, (1, 32), (1, 16), (1, 8), (0, 4)),
    Case(40, 136, 264, (14, 14), (2, 2), (2, 2)),
    Case(50, 64, 24, (16, 16), (4, 4), (2, 2), (1, 1)),
]
# Signals of many windows, nine taps, inputs that are held and that are not.
LARGE_IMAGE_ROW_CASES = [
    Case(60, 264, 72, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(11, 256, 72, (1, 600), (1, 10), (1, 5)),
    Case(7, 72, 40, (1, 5000), (1, 4), (1, 2), (0, 1)),
]
RUNS += runs_of(
    "gemm_fold_pixels",
    (*IMAGE_CASES, *LARGE_IMAGE_CASES, *IMAGE_ROW_CASES, *LARGE_IMAGE_ROW_CASES),
    ONE_PRODUCT,
    "contiguous",
)
# Items that share a multiprocessor, and fill no round; inputs of more slots than one item has, or than there are.
LARGE_SHUFFLE_CASES = [
    Case(140, 264, 72, (14, 14), (2, 2), (2, 2)),
    Case(3, 512, 96, (24, 64), (2, 2), (2, 2)),
    Case(2, 128, 64, (80, 256), (2, 2), (2, 2)),
    Case(3, 64, 200, (70, 52), (1, 1)),
    Case(2, 256, 72, (30, 54), (4, 4), (4, 4)),
    Case(4, 96, 40, (1, 3000), (1, 8), (1, 8)),
]
RUNS += runs_of("gemm_depth_to_space", (*SHUFFLE_CASES, *LARGE_SHUFFLE_CASES), ONE_PRODUCT, "contiguous")
# Items that share a multiprocessor, and fill no round; more steps than are unrolled; few of many channels.
LARGE_CELL_ROW_CASES = [
    Case(131, 200, 64, (4, 4), (4, 4), (2, 2), (1, 1)),
    Case(37, 264, 96, (8, 6), (4, 4), (2, 2), (1, 1)),
    Case(9, 128, 256, (32, 24), (4, 4), (2, 2), (1, 1)),
    Case(3, 64, 128, (61, 130), (3, 5)),
    Case(17, 72, 136, (16, 16), (5, 5), (2, 2), (2, 2), (1, 1)),
    Case(5, 96, 192, (33, 40), (3, 3), (1, 1), (1, 1)),
    Case(40, 256, 64, (1, 600), (1, 10), (1, 5)),
    Case(2, 48, 32, (70, 400), (7, 7), (1, 1), (3, 3)),
]
RUNS += runs_of("implicit_gemm_nhwc", (*CELL_ROW_CASES, *LARGE_CELL_ROW_CASES), ONE_PRODUCT, "channels_last")
# Rows of many steps, items that fill no round, every stage in use, weights of several sets.
LARGE_ROW_CASES = [
    Case(3, 64, 64, (37, 520), (3, 3)),
    Case(5, 64, 128, (19, 256), (3, 5)),
    Case(2, 32, 32, (70, 136), (3, 7), (1, 1), (1, 3)),
    Case(3, 128, 70, (9, 200), (4, 4), (1, 1), (1, 1)),
    Case(40, 64, 32, (1, 1000), (1, 4), (1, 1), (0, 1)),
]
ROW_RUNS = [
    Run(case, numerics, "contiguous", "gemm_fold_rows")
    for case in (*ROW_CASES, *LARGE_ROW_CASES)
    for numerics in ONE_PRODUCT
]
RUNS += [run for run in ROW_RUNS if run.tiles]  # registers and shared memory do not hold every case in every type
RUNS += runs_of("wgrad_nchw", GRADIENT_CASES, NUMERICS, *FORMATS)
# Images smaller than eight pixels across, channels that fill no line, taps that share a box in either direction.
LINES_CASES = [
    Case(2, 64, 64, (16, 40), (3, 3), (1, 1), (1, 1)),
    Case(9, 136, 72, (4, 4), (4, 4), (2, 2), (1, 1)),
    Case(3, 128, 256, (14, 14), (2, 2), (2, 2)),
    Case(4, 192, 64, (16, 16), (4, 4), (2, 2), (1, 1)),
    Case(2, 64, 32, (1, 600), (1, 16), (1, 8), (0, 4)),
    Case(2, 96, 128, (17, 24), (3, 5), (1, 1)),
    Case(1, 512, 128, (33, 7), (3, 3), (2, 2), groups=2),
    Case(2, 40, 104, (9, 33), (5, 3), (3, 2), (2, 1), (1, 0), (1, 3)),
]
RUNS += runs_of("wgrad_nhwc", (*LINES_CASES, *GRADIENT_CASES), HALVES, *FORMATS)
RUNS += runs_of("gemm_mma", (*TILED_CASES[:4], *LARGE_CASES), ("ieee", "tf32", "float16"), *FORMATS)


def compile_tiles(run):
    """In a process of its own: put what a run loads into the kernel cache."""
    only_compile("sm_90a")
    for direction, tile in run.tiles:
        run.kernel.prepare(run.config, direction, tile)


@pytest.fixture(scope="module")
def compiled(parametrized):
    """All kernels of the runs that are to come, compiled on all cores: one after the other would take half an hour.

    Workers of pytest-xdist each compile their own: pools of all of them would be a process for each pair of cores.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    for _ in in_processes(compile_tiles, [one["run"] for _, one in parametrized if isinstance(one.get("run"), Run)]):
        pass


def check_twice(call, arguments, wanted, config, poison):
    """What a call gives is right, and the same to the bit when it is made again."""
    poison("cuda")
    actual = call(*arguments)
    reference.assert_close(actual, wanted, config.dtype, config.precision)
    poison("cuda")
    assert torch.equal(call(*arguments), actual)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_kernel_matches_reference_to_the_bit_again(run, compiled, poison):
    config, case = run.config, run.case
    data, exact = sample(case, config.dtype, "cuda"), expected(case, config.dtype)
    arrange = channels_last if run.layout == "channels_last" else torch.Tensor.contiguous
    assert run.tiles
    for direction, tile in run.tiles:
        call, arguments = run.kernel.prepare(config, direction, tile), arguments_of(direction, data, arrange)
        if direction == "forward":
            check_twice(call, arguments, exact.output, config, poison)
            check_twice(call, (*arguments[:2], None), exact.output_without_bias, config, poison)
        else:
            check_twice(call, arguments, getattr(exact, direction), config, poison)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("numerics", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 64, 64, (8, 8), (16, 16), (16, 16)),
        Case(2, 64, 64, (9, 8), (3, 3), (9, 9)),
        Case(2, 64, 128, (1, 40), (1, 20), (1, 10), (0, 5)),
    ],
    ids=str,
)
def test_gradients_of_strides_that_no_tensor_map_takes_match_reference(case, numerics, layout, poison):
    config = Run(case, numerics, layout).config
    data = sample(case, config.dtype, "cuda")
    arrange = channels_last if layout == "channels_last" else torch.Tensor.contiguous
    for direction in ("weight_grad", "input_grad"):
        call = choose(config, "fused", "test", direction).prepare(config, direction)
        arguments = arguments_of(direction, data, arrange)
        poison("cuda")
        assert_right(call(*arguments), direction, case, config)


@pytest.mark.parametrize(
    "run",
    [
        Run(case, "float16", "contiguous", name)
        for name, case in (
            ("gemm_fold_narrow", FOLD_CASES[0]),
            ("gemm_fold_pixels", IMAGE_CASES[0]),
            ("gemm_fold_rows", ROW_CASES[0]),
        )
    ],
    ids=str,
)
def test_weights_and_inputs_may_be_aligned_to_nothing(run, poison):
    data, exact = sample(run.case, torch.float16, "cuda"), expected(run.case, torch.float16)
    poison("cuda")
    call = run.kernel.prepare(run.config, *run.tiles[0])
    output = call(offset(data.input), offset(data.weight), data.bias)
    reference.assert_close(output, exact.output, torch.float16, "ieee")


@pytest.mark.parametrize("layout", FORMATS)
def test_fused_float32_does_not_lose_accuracy_over_long_sums(layout):
    """Error relative to float64 of sums of up to 18,432 products, beside that of cuDNN in float32."""
    torch.manual_seed(3)
    for channels in (64, 512, 2048):
        run = Run(Case(2, channels, 64, (12, 20), (3, 3), (1, 1), (1, 1)), "ieee", layout)
        x = torch.randn(run.case.input_shape, device="cuda").to(memory_format=FORMATS[layout])
        w = torch.randn(run.case.weight_shape, device="cuda")
        exact = torch.nn.functional.conv_transpose2d(x.double(), w.double(), padding=1)
        ours = run.kernel.prepare(run.config, *run.tiles[0])(x, w, None)
        with conv_precision("ieee"):
            theirs = torch.nn.functional.conv_transpose2d(x, w, padding=1)
        errors = [((one.double() - exact).norm() / exact.norm()).item() for one in (ours, theirs)]
        assert errors[0] <= max(2 * errors[1], 1e-6), (channels, errors)
