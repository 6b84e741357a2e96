"""What holds for every kernel of csrc/sm90: layers that `fused` gives it and that it declines, what it launches.

No kernel runs. A layer is a Problem, or the name of one in benchmarks/workloads.py.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from benchmarks.workloads import SUITES
from gemmconv import Problem
from gemmconv.algorithms import KERNELS
from gemmconv.algorithms.fused import Fused
from gemmconv.kernels.program import TensorMapSpec
from tests import (
    test_gemm_fold_narrow,
    test_gemm_fold_rows,
    test_implicit_gemm,
    test_implicit_gemm_nhwc,
    test_pixels_on_m,
    test_wgrad,
)
from tests.samples import config_of

NCHW, NHWC = FORMATS = torch.contiguous_format, torch.channels_last
SHARED_BYTES = 227 << 10  # of a block
HALF, BFLOAT16, FLOAT64 = ((dtype, "ieee") for dtype in (torch.float16, torch.bfloat16, torch.float64))
TF32, IEEE = ((torch.float32, precision) for precision in ("tf32", "ieee"))
LAYERS = {workload.name: workload.problem for suite in ("public", "models") for workload in SUITES[suite]}
DCGAN2, DCGAN3, DCGAN5, ENCODEC, MASK_HEAD, WIDE = (
    LAYERS[name] for name in ("dcgan2", "dcgan3", "dcgan5", "encodec2", "maskrcnn", "kb57")
)


@pytest.fixture(autouse=True)
def _as_if_on_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def takes(kernel, config, direction):
    """Whether a kernel computes a pass."""
    return KERNELS[f"sm90/{kernel}"].why_not(config, direction) is None


FEW_CHANNELS = replace(LAYERS["pose3"], in_channels=64, out_channels=32, input_size=(512, 512))
# Kernel, type, format; layers that it is faster for than others, with the bytes of their packed weights. In 16 bits,
# gemm_fold_rows was measured to take 1097 us and implicit_gemm 1197 for kb57, 838 and 911 for kb69, 208 and 292 for
# kb71; but 632 and 585 for kb65.
FORWARD = [
    ("gemm_fold_narrow", HALF, NCHW, {DCGAN5: 0}),
    ("implicit_gemm", HALF, NCHW, {replace(DCGAN5, out_channels=16): 98_304, "kb65": 172_032, "hifigan4": 24_576}),
    ("gemm_fold_pixels", TF32, NCHW, {DCGAN3: 4 * 256 * 128 * 16, replace(ENCODEC, batch=4): 1_474_560}),
    ("gemm_fold_rows", HALF, NCHW, {WIDE: 2 * 64 * 64 * 9, "kb69": 294_912, "kb71": 24_576}),
    ("gemm_depth_to_space", HALF, NCHW, {MASK_HEAD: 0, "unet4": 0}),
    ("gemm_depth_to_space", TF32, NCHW, {MASK_HEAD: 4 * 256 * 256 * 4}),
    ("implicit_gemm_nhwc", HALF, NHWC, {DCGAN2: 0, "pose3": 0}),
    ("implicit_gemm_nhwc", TF32, NHWC, {DCGAN2: 4 * 512 * 256 * 16, "pose3": 4 * 256 * 256 * 16}),
    # A layer that implicit_gemm_nhwc could compute, too.
    ("implicit_gemm", HALF, NHWC, {FEW_CHANNELS: 98_304}),
]
GRADIENTS = "kb57", "unet1", "unet4", "sam2", "pose3", "hifigan4"
WEIGHT_GRADS = [
    ("wgrad_nchw", HALF, NCHW, ("kb57", "unet4", "sam2", "hifigan4")),
    ("wgrad_nhwc", HALF, NCHW, ("unet1", "pose3")),  # both tensors are transposed before
    *(("wgrad_nchw", kind, NCHW, GRADIENTS) for kind in (TF32, IEEE)),
    ("wgrad_nhwc", HALF, NHWC, ("kb57", "pose3", "dcgan3", "unet1", "stylegan_up256", "hifigan2")),
]


@pytest.mark.parametrize(
    ("kernel", "kind", "layout", "layer", "packed_bytes"),
    [(*how, layer, packed_bytes) for *how, layers in FORWARD for layer, packed_bytes in layers.items()],
)
def test_fused_takes_the_kernel_that_is_faster(kernel, kind, layout, layer, packed_bytes):
    config = config_of(LAYERS.get(layer, layer), kind[0], layout, kind[1])
    choice = Fused().choice(config, "forward")
    assert choice.kernel.name == f"sm90/{kernel}"
    assert Fused().workspace_bytes(config, "forward") == packed_bytes
    if kernel == "implicit_gemm_nhwc":
        assert choice.tile == choice.kernel.tile(config, "forward")


@pytest.mark.parametrize(
    ("kernel", "kind", "layout", "layer"), [(*how, layer) for *how, layers in WEIGHT_GRADS for layer in layers]
)
def test_fused_takes_the_kernel_of_weight_gradients_that_is_faster(kernel, kind, layout, layer):
    config = config_of(LAYERS[layer], kind[0], layout, kind[1])
    choice, nchw = Fused().choice(config, "weight_grad"), replace(config, memory_format=NCHW)
    assert choice.kernel.name == f"sm90/{kernel}"
    workspace = Fused().workspace_bytes(config, "weight_grad")
    assert workspace == choice.tile.workspace_bytes(config.workspace_limit) <= config.workspace_limit
    if layout is NCHW:
        assert takes("wgrad_nchw", config, "weight_grad")
    if kernel == "wgrad_nhwc":
        assert choice.tile == choice.kernel.tile(nchw, "weight_grad")
        assert not Fused().transposes(config, "weight_grad")  # grad_output to NCHW


def test_layers_of_other_kernels_could_be_theirs():
    assert takes("implicit_gemm_nhwc", config_of(FEW_CHANNELS, layout=NHWC), "forward")
    assert Fused().workspace_bytes(config_of(DCGAN5), "input_grad") > 0


FOLDED = replace(DCGAN3, kernel_size=(2, 2), padding=(0, 0), out_channels=35)  # rows of weights of 280 bytes
FAR = {"kernel_size": (1, 3), "stride": (1, 1), "padding": (0, 2**30), "dilation": (1, 2**30)}
ONE_ROW = Problem(1, 2, 1, 1, (715_827_883, 1), (3, 1), (3, 1), (1, 0))
SMALL = Problem(2, 16, 16, 1, (4, 16), (2, 2), (2, 2))
ODD = replace(SMALL, kernel_size=(3, 3), padding=(1, 1))  # 31 outputs across
PLAIN = Problem(2, 64, 64, 1, (32, 32), (3, 3))

# Layers that a kernel declines, by its name, a pass, a format and types.
DECLINED = {
    ("gemm_depth_to_space", "forward", NCHW, HALF): [
        replace(MASK_HEAD, groups=2),
        replace(MASK_HEAD, batch=0),
        replace(MASK_HEAD, kernel_size=(3, 3)),  # taps overlap
        replace(MASK_HEAD, stride=(3, 3)),  # outputs between them have none
        replace(MASK_HEAD, kernel_size=(3, 3), stride=(3, 3)),  # nine taps
        replace(MASK_HEAD, kernel_size=(1, 16), stride=(1, 16)),  # a row of more outputs than lanes share
        replace(MASK_HEAD, padding=(1, 0)),
        replace(MASK_HEAD, output_padding=(1, 0)),
        replace(MASK_HEAD, dilation=(2, 1)),
        replace(MASK_HEAD, input_size=(7, 7)),  # no four of the inputs are of one image
        replace(MASK_HEAD, out_channels=35),  # rows of 280 bytes
        replace(MASK_HEAD, in_channels=2**24),  # more inputs of an image than integers
        Problem(1, 1, 2**31 - 72, 1, (2, 2), (1, 1), (1, 1)),  # as many lines, with those of empty blocks
        replace(MASK_HEAD, batch=2**31 - 1),  # more items than integers
    ],
    ("gemm_fold_pixels", "forward", NCHW, HALF): [
        replace(DCGAN3, groups=2),
        replace(DCGAN3, batch=0),
        replace(DCGAN3, input_size=(18, 16)),  # 288 inputs of several rows
        replace(DCGAN3, input_size=(7, 7)),  # no four of them lie together
        replace(DCGAN3, kernel_size=(5, 5)),  # 400 lines have all taps of 16 output channels
        replace(DCGAN3, kernel_size=(2, 2), stride=(3, 3), padding=(0, 0)),  # a phase without taps
        FOLDED,
        replace(DCGAN3, dilation=(32, 32)),  # outputs mostly of border
        replace(DCGAN3, **FAR),
        replace(DCGAN3, batch=2**25),
        replace(DCGAN3, in_channels=2**24),
        replace(ENCODEC, kernel_size=(2, 10)),
        replace(ENCODEC, input_size=(2, 600)),
        replace(ENCODEC, kernel_size=(1, 10), stride=(1, 1), dilation=(1, 5)),  # too much of the neighbours
        replace(ENCODEC, input_size=(1, 601)),
    ],
    ("implicit_gemm_nhwc", "forward", NHWC, HALF): [
        replace(DCGAN2, groups=2),
        replace(DCGAN2, batch=0),
        replace(DCGAN2, kernel_size=(2, 2), padding=(0, 0)),  # one tap for each phase
        replace(DCGAN2, kernel_size=(2, 4), stride=(3, 2), padding=(0, 1)),  # a phase without taps
        replace(DCGAN2, in_channels=510),
        replace(DCGAN2, out_channels=252),
        replace(DCGAN2, batch=2**24),
        replace(DCGAN2, **FAR),
        replace(DCGAN2, kernel_size=(3, 3), dilation=(129, 129), padding=(0, 0)),  # no box reaches so far
    ],
    ("implicit_gemm_nhwc", "forward", NHWC, TF32): [replace(DCGAN2, out_channels=264)],  # blocks that are not whole
    ("gemm_fold_narrow", "forward", NCHW, HALF): [
        replace(DCGAN5, groups=3, in_channels=66),
        replace(DCGAN5, batch=0),
        replace(DCGAN5, out_channels=17),  # 272 lines
        replace(DCGAN5, stride=(5, 5)),  # a phase without taps
        replace(DCGAN5, input_size=(32, 33)),  # rows of 66 bytes
        replace(DCGAN5, out_channels=1, kernel_size=(1, 64), stride=(1, 64), padding=(0, 0)),  # 64 sums a thread
        # The last strip, or cell, ends beyond 2**31; so do the numbers of items.
        Problem(1, 2, 1, 1, (1, 69_273_666), (1, 31), (1, 31)),
        Problem(1, 64, 1, 1, (1, 2**29 - 8), (1, 16), (1, 4), (0, 6)),
        Problem(2**31 - 140, 2, 1, 1, (1, 2), (2, 2), (2, 2)),
    ],
    ("gemm_fold_narrow", "forward", NHWC, HALF): [ONE_ROW],  # rows that end beyond the integers
    ("gemm_fold_narrow", "forward", NCHW, FLOAT64): [DCGAN5],
    ("gemm_fold_rows", "forward", NCHW, HALF, TF32): [
        replace(WIDE, batch=0),
        replace(WIDE, kernel_size=(3, 10)),  # taps that reach over nine inputs
        replace(WIDE, stride=(2, 1)),
        replace(WIDE, dilation=(1, 2)),
        replace(WIDE, groups=2),
    ],
    ("gemm_fold_rows", "forward", NCHW, HALF): [
        replace(WIDE, input_size=(1024, 1023)),  # rows that are no whole pieces
        replace(WIDE, in_channels=192),  # weights that do not fit
        replace(WIDE, kernel_size=(1, 1), in_channels=272),  # more lines than a box has
        replace(WIDE, batch=2**23),  # more items than integers
    ],
    ("gemm_fold_rows", "forward", NCHW, TF32): [
        replace(WIDE, input_size=(1024, 1022)),  # rows that are no whole pieces
        replace(WIDE, kernel_size=(3, 9), in_channels=512),  # weights that do not fit
        replace(WIDE, kernel_size=(3, 1)),  # columns that are outputs
        replace(WIDE, batch=2**25),  # more items than integers
    ],
    ("gemm_fold_rows", "forward", NCHW, IEEE, FLOAT64): [WIDE],
    ("gemm_fold_rows", "forward", NHWC, HALF, TF32): [WIDE],
    ("gemm_fold_rows", "weight_grad", NCHW, HALF): [WIDE],
    ("gemm_fold_rows", "input_grad", NCHW, HALF): [replace(WIDE, padding=(1, 1), stride=(1, 2))],
    ("wgrad_nchw", "weight_grad", NCHW, HALF): [ODD],
    ("wgrad_nchw", "weight_grad", NCHW, FLOAT64): [SMALL],
    ("wgrad_nhwc", "weight_grad", NHWC, HALF, BFLOAT16): [
        replace(PLAIN, kernel_size=(16, 16), stride=(16, 16)),  # steps of a tensor map
        replace(PLAIN, stride=(1, 9)),
        Problem(1, 65536, 65536, 1, (8, 8), (2, 2)),  # 2^31 pieces of 16 bytes of weights
        Problem(1, 8, 8, 1, (1, 64), (1, 9), (1, 1), (0, 1 << 32), dilation=(1, 1 << 30)),  # places of outputs
        replace(PLAIN, in_channels=12),
        replace(SMALL, in_channels=20),
        Problem(1, 8, 8, 1, (1 << 16, 1 << 15), (1, 1)),
    ],
    ("wgrad_nhwc", "weight_grad", NHWC, TF32): [SMALL],
}
# Others much like them, which it takes.
TAKEN = {
    ("gemm_fold_pixels", "forward", NCHW, TF32): [FOLDED],
    ("gemm_depth_to_space", "forward", NCHW, TF32): [replace(MASK_HEAD, out_channels=35)],
    ("implicit_gemm_nhwc", "forward", NHWC, HALF): [replace(DCGAN2, out_channels=264)],
    ("gemm_fold_narrow", "forward", NHWC, HALF): [replace(ONE_ROW, input_size=(715_827_000, 1))],
    ("gemm_fold_rows", "forward", NCHW, BFLOAT16, TF32): [WIDE],
    ("gemm_fold_rows", "input_grad", NCHW, HALF): [replace(WIDE, padding=(1, 1))],
    ("wgrad_nchw", "weight_grad", NCHW, HALF): [SMALL],
    ("wgrad_nchw", "weight_grad", NCHW, IEEE): [ODD],
    ("wgrad_nhwc", "weight_grad", NHWC, BFLOAT16): [SMALL],
}


@pytest.mark.parametrize(
    ("kernel", "direction", "layout", "kind", "problem", "taken"),
    [
        (*which[:3], kind, problem, table is TAKEN)
        for table in (DECLINED, TAKEN)
        for which, problems in table.items()
        for kind, problem in itertools.product(which[3:], problems)
    ],
)
def test_layers_that_a_kernel_cannot_compute_are_declined(kernel, direction, layout, kind, problem, taken):
    config = replace(config_of(problem, kind[0], layout, kind[1]), workspace_limit=1 << 40)
    assert takes(kernel, config, direction) == taken


@pytest.mark.parametrize(
    ("kernel", "layer"),
    [("gemm_depth_to_space", MASK_HEAD), ("gemm_fold_pixels", DCGAN3), ("implicit_gemm_nhwc", DCGAN2)],
)
def test_a_kernel_of_one_format_takes_16_bits_and_tf32(kernel, layer):
    for kind, layout in itertools.product((HALF, BFLOAT16, TF32, IEEE, FLOAT64), FORMATS):
        taken = kind in (HALF, BFLOAT16, TF32) and layout is KERNELS[f"sm90/{kernel}"].only_in
        assert takes(kernel, config_of(layer, kind[0], layout, kind[1]), "forward") == taken


TILES = {  # of each kernel, what runs a test on many of its tiles
    "gemm_fold_narrow": test_gemm_fold_narrow.each_tile,
    "gemm_fold_rows": test_gemm_fold_rows.each_tile,
    "gemm_fold_pixels": test_pixels_on_m.each_fold,
    "gemm_depth_to_space": test_pixels_on_m.each_shuffle,
    "implicit_gemm": test_implicit_gemm.each_plan,
    "implicit_gemm_nhwc": test_implicit_gemm_nhwc.each_tile,
    "wgrad_nchw": test_wgrad.each_nchw,
    "wgrad_nhwc": test_wgrad.each_nhwc,
}


def launches_of(kernel, tile):
    """What a tile launches but for the sums of partial sums, in a type and a format that it is for."""
    itemsize, last = getattr(tile, "itemsize", 2), getattr(tile, "channels_last", False)
    precision = "ieee" if itemsize == 2 or getattr(tile, "split", False) else "tf32"
    layout = NHWC if last else kernel.only_in or kernel.computed_in or NCHW
    config = config_of(tile.problem, torch.float16 if itemsize == 2 else torch.float32, layout, precision)
    steps = kernel.program(config, getattr(tile, "direction", kernel.directions[0]), tile).steps
    return [step for step in steps if step.source == f"{kernel.name}.cu"]


def test_every_kernel_has_tiles_here():
    assert {f"sm90/{name}" for name in TILES} == {name for name, kernel in KERNELS.items() if kernel.features}


@pytest.mark.parametrize("kernel", TILES)
def test_all_tiles_of_layers_fit_shared_memory(kernel):
    kernel = KERNELS[f"sm90/{kernel}"]
    for layer, kind, layout in itertools.product(LAYERS.values(), (HALF, TF32, IEEE), FORMATS):
        config = config_of(layer, kind[0], layout, kind[1])
        for direction in kernel.directions:
            if kernel.why_not_device_or_dtype(config, direction) is None:
                assert all(tile.shared_bytes <= SHARED_BYTES for tile in kernel.tiles(config, direction)), layer


@pytest.mark.parametrize("kernel", TILES)
def test_launches_of_any_tile_fit_a_multiprocessor(kernel):
    """Their tensor maps are what CUDA takes, and have all of a tensor."""

    @TILES[kernel]
    def check(tile):
        (launch,) = launches_of(KERNELS[f"sm90/{kernel}"], tile)
        assert launch.shared_bytes == launch.macros.get("SHARED_BYTES", launch.shared_bytes) <= SHARED_BYTES
        assert math.prod(launch.block) in range(32, 1025, 32)
        p = tile.problem
        elements = {math.prod(shape) for shape in (p.input_shape, p.weight_shape, p.output_shape)}
        for spec in launch.fields:
            if isinstance(spec, TensorMapSpec):
                assert not any(stride % 16 for stride in spec.strides)
                assert all(1 <= size * step <= 256 for size, step in zip(spec.box, spec.steps, strict=True))
                assert spec.box[0] * spec.itemsize in ((64, 128) if spec.swizzled else range(16, 4096, 16))
                assert spec.steps[0] == 1
                assert max(spec.steps) <= 8
                assert max(spec.sizes) < 2**31
                padded = getattr(tile, "padded_bytes", 0) // spec.itemsize
                assert math.prod(spec.sizes) in elements | {padded} or spec.tensor not in (
                    "input",
                    "weight",
                    "output",
                    "grad_output",
                )

    check()
