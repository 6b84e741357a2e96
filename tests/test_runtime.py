"""Compiling every kernel for every architecture without a GPU, compile errors, and the cache on disk."""

import errno
import math
import multiprocessing
import os
import pickle
import shutil
import stat
import tempfile
import warnings
from collections import Counter, defaultdict
from itertools import chain, cycle, islice, product

import pytest
import torch

import gemmconv
from benchmarks.workloads import SUITES
from gemmconv.geometry import Problem
from tests.cases import TILED_CASES
from tests.compiling import compile_into
from tests.gates.modes import branches
from tests.samples import config_of, problem_of

pytest.importorskip("cuda.core", reason="compiling needs the cuda-core package")

from gemmconv.folder import cache_folder
from gemmconv.kernels import sm90
from gemmconv.kernels.columns import col2im
from gemmconv.kernels.conv import gemm_mma
from gemmconv.kernels.direct import forward as direct_forward
from gemmconv.kernels.direct import forward_mma as direct_forward_mma
from gemmconv.kernels.direct import grads_mma as direct_grads_mma
from gemmconv.kernels.direct import input_grad as direct_input_grad
from gemmconv.kernels.direct import weight_grad as direct_weight_grad
from gemmconv.kernels.layout import cast, transpose
from gemmconv.kernels.sm90 import (
    gemm_fold_narrow,
    gemm_fold_rows,
    implicit_gemm,
    implicit_gemm_choice,
    wgrad_nchw,
    wgrad_nhwc,
)
from gemmconv.kernels.splits import bias_grad, reduce
from gemmconv.kernels.weights import pack
from gemmconv.runtime import compiler, sources, worker
from gemmconv.runtime.cache import KernelCache

ARCHITECTURES = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]

# Problems that make the kernels differ: tap loops, phases, cell widths, 64-bit offsets.
PROBLEMS = {
    "decoder": Problem(2, 8, 4, 1, (8, 8), (4, 4), (2, 2), (1, 1)),
    "plain": Problem(2, 8, 4, 1, (8, 8), (3, 5)),
    "patches": Problem(2, 8, 4, 1, (8, 8), (2, 2), (2, 2)),
    "pointwise": Problem(2, 8, 4, 1, (8, 8), (1, 1)),
    "holes": Problem(1, 4, 3, 1, (5, 6), (3, 3), (5, 5), (1, 1), (4, 4), (2, 2)),
    "common_factor": Problem(1, 2, 3, 1, (4, 5), (4, 3), (6, 6), (3, 2), (5, 0), (4, 4)),
    "asymmetric": Problem(2, 6, 10, 2, (5, 8), (3, 4), (2, 3), (1, 2), (1, 2), (3, 2)),
    "vocoder": Problem(1, 6, 3, 1, (1, 11), (1, 16), (1, 8), (0, 4)),
    "wide_stride": Problem(1, 6, 3, 1, (1, 11), (1, 40), (1, 20), (0, 10)),
    "long_kernel": Problem(2, 3, 2, 1, (1, 37), (1, 41), (1, 1), (0, 20)),
    "large_kernel": Problem(1, 3, 2, 1, (9, 10), (7, 7), (1, 1), (3, 3)),
    "depthwise": Problem(2, 64, 64, 64, (20, 20), (4, 4), (2, 2), (1, 1)),
    "grouped": Problem(2, 64, 64, 16, (20, 20), (3, 3), (1, 1), (1, 1)),
    "huge": Problem(1, 2, 3, 1, (50_000, 50_000), (2, 2), (2, 2)),
}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def kernel_variants():
    """Every source with every macro set that the problems and dtypes above need, duplicates left out."""
    variants = {}
    for name, problem in PROBLEMS.items():
        for dtype in DTYPES if name in ("decoder", "asymmetric", "depthwise") else [torch.float32]:
            label = f"{name}-{str(dtype).removeprefix('torch.')}"
            columns = torch.float64 if dtype == torch.float64 else torch.float32
            variants[f"col2im-{label}"] = ("columns/col2im.cu", col2im.col2im_macros(problem, columns, dtype))
            variants[f"im2col-{label}"] = ("columns/im2col.cu", col2im.im2col_macros(problem, dtype))
            if name == "decoder":
                macros = col2im.col2im_macros(problem, dtype, dtype)  # the public col2im
                variants[f"col2im-public-{label}"] = ("columns/col2im.cu", macros)
            for layout in (False, True):
                if (tile := direct_forward.tile_of(problem, dtype, layout)) is not None:
                    macros = direct_forward.forward_macros(problem, dtype, layout, tile)
                    variants[f"direct-{'nhwc' if layout else 'nchw'}-{label}"] = ("direct/forward.cu", macros)
            tile = direct_input_grad.input_grad_tile(problem, dtype.itemsize)
            macros = direct_input_grad.input_grad_macros(tile, dtype)
            variants[f"direct_input_grad-{label}"] = ("direct/input_grad.cu", macros)
            tile = direct_weight_grad.weight_grad_tile(problem, dtype.itemsize)
            macros = direct_weight_grad.weight_grad_macros(tile, dtype)
            variants[f"direct_weight_grad-{label}"] = ("direct/weight_grad.cu", macros)
            both = direct_weight_grad.weight_grad_tile(problem, dtype.itemsize, True)
            if both.computes_both:
                macros = direct_weight_grad.weight_grad_macros(both, dtype, input_grad=True)
                variants[f"direct_weight_grad-both-{label}"] = ("direct/weight_grad.cu", macros)
            for layout in (torch.contiguous_format, torch.channels_last):
                macros = bias_grad.bias_grad_macros(config_of(problem, dtype, layout))
                variants[f"bias_grad-{dtype}-{macros['LANES']}-{macros['VECTOR']}"] = ("splits/bias_grad.cu", macros)
            variants[f"reduce-{dtype}"] = ("splits/reduce.cu", reduce.sum_macros(dtype))
    for low in (torch.float16, torch.bfloat16):
        for source, target in ((torch.float32, low), (low, torch.float32)):
            (step,) = cast.casts([("a", "b", 1)], source, target)
            variants[f"cast-{source}-{target}"] = (step.source, step.macros)
    for label, (macros, _) in MMA_VARIANTS.items():
        variants[label] = ("direct/forward_mma.cu", macros)
    for label, (macros, _) in GRADS_VARIANTS.items():
        variants[label] = ("direct/grads_mma.cu", macros)
    for channels, pixels, itemsize in (
        *((96, 4095, 2), (3, 4096, 2), (21, 67, 2), (64, 1023, 4), (70, (1 << 31) - 1025, 8)),  # staged
        *((96, 4096, 2), (12, 112, 2), (64, 1032, 4), (8, (1 << 31) - 1032, 8)),
    ):
        for to_last in (False, True):
            macros = transpose.macros_of(channels, pixels, to_last, itemsize)
            variants[f"transpose-{channels}-{pixels}-{itemsize}-{to_last}"] = ("layout/transpose.cu", macros)
    variants |= fused_variants() | fold_variants() | one_format_variants() | row_variants() | gradient_variants()
    return variants | gemm_mma_variants()


def mma_variants():
    """Macros of direct/forward_mma.cu, and the tile that they are for, for the problems above and wider ones."""
    problems = {**PROBLEMS, **{f"tiled{i}": problem_of(case) for i, case in enumerate(TILED_CASES) if i % 2}}
    layers, variants = problems_by_name(), {}
    problems |= {name: layers[name] for name in ("kb75", "kb81")}  # in NCHW with long lines, of 75 in float32
    for name, problem in problems.items():
        for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if name in ("decoder", "grouped") else [])):
            for layout in (False, True):
                if (tile := direct_forward_mma.tile_of(problem, dtype.itemsize, layout)) is not None:
                    label = (
                        f"direct_forward_mma-{'nhwc' if layout else 'nchw'}-{name}-{str(dtype).removeprefix('torch.')}"
                    )
                    variants[label] = (direct_forward_mma.forward_macros(tile, dtype), tile)
    return variants


# Name of a problem or of a layer to measure, type, layout.
FUSED = [
    ("decoder", "float32", "nchw"),
    ("asymmetric", "bfloat16", "nhwc"),
    ("holes", "float16", "nchw"),
    ("depthwise", "float16", "nhwc"),
    ("grouped", "tf32", "nhwc"),
    ("huge", "tf32", "nchw"),
    ("kb57", "float32", "nchw"),
    ("kb57", "tf32", "nhwc"),
    ("kb69", "float32", "nchw"),
    ("kb71", "float32", "nchw"),
    ("kb71", "float16", "nhwc"),
    ("pose3", "float32", "nchw"),
    ("pose3", "bfloat16", "nchw"),
    ("unet4", "float32", "nchw"),
    ("unet4", "float16", "nchw"),
    ("hifigan2", "float16", "nchw"),
    ("encodec2", "float16", "nchw"),
    ("kb65", "tf32", "nchw"),
    ("sam2", "float32", "nchw"),
    ("sam2", "tf32", "nhwc"),
    ("stylegan_up256", "float32", "nhwc"),
    ("stylegan_up256", "float16", "nchw"),
]
BOTH_DIRECTIONS = ("asymmetric", "kb71", "pose3", "unet4")


def fused_variants():
    """Both sources of fused for the problems above and for layers of full size."""
    problems, variants = problems_by_name(), {}
    for name, kind, layout in FUSED:
        dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
        for direction in ("forward", "input_grad") if name in BOTH_DIRECTIONS else ("forward",):
            split, channels_last = kind == "float32", layout == "nhwc"
            plan = implicit_gemm_choice.plan_of(problems[name], direction, dtype.itemsize, split, channels_last)
            for source, macros_of in (
                ("weights/pack", implicit_gemm.weight_macros_of),
                ("sm90/implicit_gemm", implicit_gemm.macros_of),
            ):
                label = f"{source}-{direction}-{layout}-{name}-{kind}"
                variants[label] = (f"{source}.cu", macros_of(plan, dtype))
    return variants


# Name of a problem or of a layer to measure, type, layout.
FOLDS = [
    (name, kind, layout)
    for name in ("dcgan5", "fsrcnn")
    for kind in ("float32", "tf32", "float16")
    for layout in ("nchw", "nhwc")
]
FOLDS += [("decoder", "bfloat16", "nhwc"), ("vocoder", "tf32", "nchw"), ("plain", "float32", "nchw")]
FOLDS += [("huge", "float32", "nchw"), ("huge", "tf32", "nhwc"), ("patches", "float16", "nchw")]


def fold_variants():
    """sm90/gemm_fold_narrow.cu for some of the problems above and for layers of full size."""
    problems, variants = problems_by_name(), {}
    for name, kind, layout in FOLDS:
        dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
        tile = gemm_fold_narrow.tile_of(problems[name], dtype.itemsize, kind == "float32", layout == "nhwc")
        variants[f"gemm_fold_narrow-{layout}-{name}-{kind}"] = (
            "sm90/gemm_fold_narrow.cu",
            gemm_fold_narrow.macros_of(tile, dtype),
        )
    return variants


def gemm_mma_variants():
    """conv/gemm_mma.cu with each entry of its menu in each precision, layers and formats in turn, and its weights."""
    problems, variants = problems_by_name(), {}
    passes = cycle([("kb69", "forward"), ("dcgan2", "forward"), ("kb78", "input_grad"), ("kernel_2", "forward")])
    formats = cycle([torch.contiguous_format, torch.channels_last, torch.channels_last])
    kinds = ("float32", "ieee"), ("float32", "tf32"), ("float16", "ieee"), ("bfloat16", "ieee")
    for (kind, precision), entry in product(kinds, gemm_mma.MENU):
        (name, direction), layout = next(passes), next(formats)
        config = config_of(problems[name], getattr(torch, kind), layout, precision)
        tiles = (one for one in gemm_mma.KERNEL.tiles(config, direction) if (*one.warps, *one.tiles) == entry)
        if (tile := next(tiles, None)) is not None:
            work, label = gemm_mma.Work(config, direction, tile), f"{kind}-{precision}-{'-'.join(map(str, entry))}"
            variants[f"gemm_mma-{label}"] = ("conv/gemm_mma.cu", gemm_mma.macros_of(work))
            variants[f"gemm_mma_weights-{label}"] = ("weights/pack.cu", gemm_mma.weight_macros_of(work))
    return variants


# Kernel, name of a layer to measure, type; which tile, None for its own. Of implicit_gemm_nhwc, which blocks of rows,
# lines and what lies between groups.
ONE_FORMAT = [
    ("gemm_depth_to_space", "maskrcnn", "float16", None),
    ("gemm_depth_to_space", "maskrcnn", "float32", None),
    ("gemm_depth_to_space", "unet1", "float32", None),
    ("gemm_depth_to_space", "unet4", "bfloat16", -1),
    ("gemm_depth_to_space", "pointpillars1", "float32", None),
    ("gemm_depth_to_space", "pointpillars3", "bfloat16", None),
    ("gemm_depth_to_space", "pointpillars3", "float32", 5),
    ("gemm_depth_to_space", "stride_4", "float32", None),
    *(
        ("gemm_fold_pixels", name, kind, choice)
        for name in ("pose1", "dcgan2", "dcgan3", "dcgan4", "hifigan2", "hifigan3", "encodec2", "fcn8s_up2")
        for kind, choice in (("float16", None), ("bfloat16", -1), ("float32", None), ("float32", 0), ("float32", -1))
    ),
    *(
        ("implicit_gemm_nhwc", name, kind, fields)
        for names, kind, fields in (
            (("pose3", "dcgan2", "kb69", "hifigan1"), "float16", None),
            (("pose3", "dcgan2", "kb69", "hifigan1"), "float32", None),
            (("pose3", "dcgan3", "kb69", "encodec2"), "bfloat16", (2, 128, 8)),
            (("dcgan3", "kb69", "encodec2"), "bfloat16", (1, 128, 0)),
            (("pose1", "hifigan1", "encodec1"), "float16", (1, 256, 0)),
            (("pose1", "pose3", "channels_1024"), "bfloat16", (1, 256, 8)),
            (("pose3", "dcgan3"), "float32", (2, 128, 0)),
            (("pose1",), "float32", (1, 256, 0)),
            (("pose3",), "float16", (2, 128, 9)),
            (("dcgan4",), "bfloat16", (2, 64, 9)),
            (("kb57",), "bfloat16", (2, 64, 8)),
            (("kernel_7",), "float32", (2, 64, 0)),
        )
        for name in names
    ),
]


def one_format_variants():
    """Kernels of one format, and weights/pack.cu for TF32 that is K-major, for layers of full size."""
    problems, variants = problems_by_name(), {}
    for kernel, name, kind, choice in ONE_FORMAT:
        module, dtype = getattr(sm90, kernel), torch.float32 if kind == "tf32" else getattr(torch, kind)
        tile, tiles = (of(problems[name], dtype.itemsize) for of in (module.tile_of, module.tiles_of))
        if isinstance(choice, tuple):
            tile = next((one for one in tiles if (one.row_blocks, one.lines, one.group) == choice), None)
        elif choice is not None and tile is not None:
            tile = [*tiles][choice]
        if tile is None:
            continue
        variants[f"{kernel}-{name}-{kind}-{choice}"] = (f"sm90/{kernel}.cu", module.macros_of(tile, dtype))
        if kernel == "gemm_depth_to_space" and tile.packed:
            macros = pack.k_major_macros(problems[name], tile.lines, tile.chunks * 8, tile.problem.kernel_size[1])
            variants[f"pack-{name}"] = ("weights/pack.cu", macros)
    return variants


# Name of a layer to measure, type, direction; which tile, None for its own.
ROWS = [
    (name, kind, direction, choice)
    for name, direction in (
        *((name, "forward") for name in ("kb57", "kb69", "kb71", "sam1", "kernel_2", "stride_3", "stride_4")),
        *(("encodec4", "forward"), ("groups_4", "forward"), ("kb78", "input_grad")),
    )
    for kind, choice in (("float16", None), ("bfloat16", -1), ("float32", None), ("float32", -1))
]


# Rows of outputs of odd widths, which take more registers.
ODD_ROWS = {
    "odd_stride_2": Problem(8, 64, 96, 1, (128, 128), (3, 3), (2, 2), (1, 1)),
    "odd_stride_3": Problem(8, 64, 64, 1, (132, 132), (4, 4), (3, 3), (3, 3)),
    "odd_stride_4": Problem(8, 16, 32, 1, (128, 128), (5, 5), (4, 4), (1, 1)),
}


def row_variants():
    """sm90/gemm_fold_rows.cu and weights/pack.cu for layers of full size."""
    problems, variants = {**problems_by_name(), **ODD_ROWS}, {}
    for name, kind, direction, choice in (*ROWS, *((name, "float32", "forward", None) for name in ODD_ROWS)):
        kernel, config = gemm_fold_rows.KERNEL, config_of(problems[name], getattr(torch, kind), precision="tf32")
        tile = kernel.tile(config, direction)
        if tile is None:  # in TF32, a layer whose columns are outputs
            continue
        if choice is not None:
            tile = [*kernel.tiles(config, direction)][choice]
        for launch in kernel.program(config, direction, tile).steps:
            label = f"{launch.source.removesuffix('.cu')}-{direction}-{name}-{kind}-{choice}"
            variants[label] = (launch.source, launch.macros)
    return variants


# Name of a layer to measure, type.
GRADIENTS = [
    (name, kind)
    for name in ("kb57", "kb78", "unet4", "sam2", "hifigan2", "encodec4", "dcgan4", "pointpillars1")
    for kind in ("float32", "tf32", "float16")
]
GRADIENTS += [("kb71", "bfloat16"), ("pose3", "bfloat16"), ("stylegan_up256", "tf32")]


def gradient_variants():
    """sm90/wgrad_nchw.cu, _lines.cu and _sum.cu for layers of full size."""
    problems, variants = problems_by_name(), {}
    for name, kind in GRADIENTS:
        dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
        tile = wgrad_nchw.tile_of(problems[name], dtype.itemsize, kind == "float32", 64 << 20)
        variants[f"wgrad_nchw-{name}-{kind}"] = (
            "sm90/wgrad_nchw.cu",
            wgrad_nchw.macros_of(tile, dtype),
        )
        if dtype.itemsize == 2:
            tile = wgrad_nhwc.tile_of(problems[name], 64 << 20)
            macros = wgrad_nhwc.macros_of(tile, dtype, 2)
            variants[f"wgrad_nhwc-{name}-{kind}"] = ("sm90/wgrad_nhwc.cu", macros)
        macros = reduce.wgrad_macros(problems[name], dtype, 132)
        variants[f"reduce-{name}-{kind}"] = ("splits/reduce.cu", macros)
        last = {**macros, "CHANNELS_LAST": 1, "SUM_T": "float", "WRITE": 1}
        variants[f"reduce-{name}-{kind}-last"] = ("splits/reduce.cu", last)
    return variants


def problems_by_name():
    """The problems above, and layers of full size."""
    return {**{workload.name: workload.problem for suite in SUITES.values() for workload in suite}, **PROBLEMS}


def grads_variants():
    """Macros of direct/grads_mma.cu, and the tile that they are for, for the problems above and layers of full size."""
    problems, variants = problems_by_name(), {}
    for name in (*PROBLEMS, "kb75", "dcgan5", "groups_4", "groups_16"):
        for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if name in ("decoder", "kb75") else [])):
            if (tile := direct_grads_mma.tile_of(problems[name], dtype.itemsize)) is not None:
                macros = direct_grads_mma.grads_macros(tile, dtype)
                variants[f"direct_grads_mma-{name}-{str(dtype).removeprefix('torch.')}"] = (macros, tile)
    return variants


MMA_VARIANTS = mma_variants()
GRADS_VARIANTS = grads_variants()
VARIANTS = kernel_variants()
OTHERS = [arch for arch in ARCHITECTURES if arch != "sm_90a"]


def architectures_of(source_name):
    """Those that a source is for."""
    return ["sm_90a"] if source_name.startswith("sm90/") else ARCHITECTURES


def type_of(macros):
    return macros.get("ELEMENT_T", macros.get("OUTPUT_T"))


def for_other_architectures():
    """Each source for each architecture: the first variants of its types and offset widths, in turn."""
    firsts = defaultdict(dict)
    for variant, (source_name, macros) in VARIANTS.items():
        if architectures_of(source_name) == ARCHITECTURES:
            firsts[source_name].setdefault((type_of(macros), "INDEX_64" in macros), variant)
    for variants in firsts.values():
        count = max(len(variants), len(OTHERS))
        yield from zip(islice(cycle(variants.values()), count), islice(cycle(OTHERS), count), strict=True)


def first_of_each_kind():
    """Variants that between them have each type and each branch of the preprocessor of each source; early ones."""
    kinds = {
        variant: {(source_name, kind) for kind in (type_of(macros), *branches(source_name, macros))}
        for variant, (source_name, macros) in VARIANTS.items()
    }
    left = Counter(chain(*kinds.values()))
    for variant, own in reversed(kinds.items()):
        if min(left[kind] for kind in own) > 1:
            left.subtract(own)
        else:
            yield variant


COMPILATIONS = {*((variant, "sm_90a") for variant in first_of_each_kind()), *for_other_architectures()}
EVERY_COMPILATION = [
    (variant, arch) for variant, (source_name, _) in VARIANTS.items() for arch in architectures_of(source_name)
]
# Their blocks of many sums have 128 threads, and three of those fit the registers of a multiprocessor.
MOST_REGISTERS = dict.fromkeys(("direct/forward.cu", "direct/input_grad.cu", "direct/weight_grad.cu"), 168)
LEAST_SHARED_BYTES = 99 << 10  # that a block may have on every architecture since sm_80
SMALL = ("columns/col2im.cu", col2im.col2im_macros(PROBLEMS["decoder"], torch.float32, torch.float32))


def most_registers(source_name, macros):
    """Return the registers that a thread may take; with tensor cores those that its blocks leave to it."""
    if source_name in ("direct/forward_mma.cu", "direct/grads_mma.cu"):
        names = (
            ("WARPS_M", "WARPS_N")
            if source_name == "direct/forward_mma.cu"
            else ("ROW_WARPS", "COLUMN_WARPS", "CI_WARPS")
        )
        threads = 32 * math.prod(macros[name] for name in names)
        return min(255, 65_536 // (threads * macros["MIN_BLOCKS"]))
    if source_name == "conv/gemm_mma.cu":
        warps, tiles = ((macros[f"{name}_M"], macros[f"{name}_N"]) for name in ("WARPS", "TILES"))
        tile = gemm_mma.Tile(warps, tiles, 1, (1, 1, 1), 2)
        return min(255, 65_536 // (tile.threads * tile.resident(1 + macros["SPLIT"])) // 8 * 8)
    if source_name == "sm90/gemm_fold_narrow.cu":
        threads = 128 * macros["WARPGROUPS"] + macros["FOLDERS"] + macros["PRODUCERS"]
        warpgroups = -(-threads // 128)  # ptxas gives registers to whole ones
        return min(255, 65_536 // (128 * warpgroups * macros["MIN_BLOCKS"]))
    of_384 = (
        "sm90/gemm_fold_rows.cu",
        "sm90/gemm_depth_to_space.cu",
        "sm90/gemm_fold_pixels.cu",
        "sm90/implicit_gemm_nhwc.cu",
    )
    if source_name in of_384:
        return 65_536 // 384 // 8 * 8  # as launch bounds have it; those who multiply take more once others gave some up
    if source_name in ("sm90/wgrad_nchw.cu", "sm90/wgrad_nhwc.cu"):
        warpgroups = math.prod(macros.get(f"SIDES_{side}", 1) for side in ("CI", "CO", "H", "W"))
        return min(255, 65_536 // (128 * (warpgroups + 1)) // 8 * 8)
    if source_name == "sm90/implicit_gemm.cu":
        return 65_536 // (macros["PRODUCERS"] + 288) // 8 * 8
    return MOST_REGISTERS.get(source_name, 128)


@pytest.mark.parametrize(
    ("variant", "arch"),
    [one if one in COMPILATIONS else pytest.param(*one, marks=pytest.mark.slow) for one in EVERY_COMPILATION],
)
def test_compile_builds_every_kernel_for_every_architecture_without_spills(variant, arch, compilations):
    source_name, macros = VARIANTS[variant]
    compiled = compilations[variant, arch].result()
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.spill_bytes == 0, compiled.log
    assert 0 < compiled.registers <= most_registers(source_name, macros), compiled.log
    assert "warning" not in compiled.log, compiled.log
    assert "wgmma.mma_async instructions are serialized" not in compiled.log, compiled.log


def test_every_source_is_compiled_for_every_architecture():
    pairs = {(VARIANTS[variant][0], arch) for variant, arch in COMPILATIONS}
    for source_name, _ in VARIANTS.values():
        for arch in architectures_of(source_name):
            assert (source_name, arch) in pairs
    assert {*EVERY_COMPILATION} > COMPILATIONS


def test_compile_variants_use_every_source():
    kernels = {path.relative_to(sources.directory()).as_posix() for path in sources.directory().rglob("*.cu")}
    assert {source_name for source_name, _ in VARIANTS.values()} == kernels


def test_compile_variants_use_both_offset_widths():
    for names in (
        {"direct/forward_mma.cu"},
        {"direct/grads_mma.cu"},
        {"sm90/implicit_gemm.cu"},
        {"sm90/gemm_fold_narrow.cu"},
        {source_name for source_name, _ in VARIANTS.values()},
    ):
        found = {"INDEX_64" in macros for source_name, macros in VARIANTS.values() if source_name in names}
        assert found == {True, False}


@pytest.mark.parametrize("variant", [*MMA_VARIANTS, *GRADS_VARIANTS])
def test_tiles_on_tensor_cores_fit_the_shared_memory_of_every_architecture(variant):
    macros, tile = {**MMA_VARIANTS, **GRADS_VARIANTS}[variant]
    assert tile.shared_bytes == macros["SHARED_BYTES"] <= LEAST_SHARED_BYTES
    assert tile.threads <= 1024
    assert 1 <= macros["MIN_BLOCKS"] <= 2048 // tile.threads


def test_variants_on_tensor_cores_are_of_nearly_all_problems():
    problems = {variant.split("-")[2] for variant in MMA_VARIANTS}
    assert {tile.shifted for _, tile in MMA_VARIANTS.values()} == {True, False}
    assert {name for name in PROBLEMS if name not in problems} <= {"depthwise"}


# Errors


def broken_macros():
    source_name, macros = SMALL
    return source_name, {**macros, "OUTPUT_T": "no_such_type"}


def test_compile_error_carries_options_log_and_numbered_source():
    source_name, macros = broken_macros()
    with pytest.raises(gemmconv.CompileError) as caught:
        compiler.compile(source_name, macros, "sm_90a")
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert "no_such_type" in error.log
    assert any("OUTPUT_T=no_such_type" in option for option in error.options)
    assert any("sm_90a" in option for option in error.options)
    assert error.source == sources.read(source_name)
    text = str(error)
    assert error.log in text
    assert all(option in text for option in error.options)
    number, line = next(
        (number, line) for number, line in enumerate(error.source.splitlines(), 1) if "OUTPUT_T*" in line
    )
    assert f"{number}  {line}" in text


@pytest.mark.parametrize(("version", "asked"), [((12, 8), False), ((12, 9), True), ((13, 0), True)], ids=str)
def test_nvrtc_is_asked_to_keep_nothing_where_it_would(version, asked, monkeypatch):
    """Since 12.9 it has a cache; before, it would refuse the option."""
    monkeypatch.setattr(compiler.nvrtc, "nvrtcVersion", lambda: (compiler.nvrtc.nvrtcResult.NVRTC_SUCCESS, *version))
    assert compiler._options(*SMALL, "sm_90a").no_cache is asked


def test_compile_error_survives_pickling():
    with pytest.raises(gemmconv.CompileError) as caught:
        compiler.compile(*broken_macros(), "sm_90a")
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.options, twin.log) == (str(caught.value), caught.value.options, caught.value.log)


def test_compile_error_names_an_unknown_architecture():
    with pytest.raises(gemmconv.CompileError, match="sm_1"):
        compiler.compile(*SMALL, "sm_1")


def test_compile_error_leaves_nothing_in_the_cache(tmp_path):
    cache = KernelCache(tmp_path / "kernels")
    for _ in range(2):
        with pytest.raises(gemmconv.CompileError):
            compiler.compile(*broken_macros(), "sm_90a", cache=cache)
    assert entries(tmp_path / "kernels") == []


# Cache


def entries(folder):
    """The cached kernels: files that hold machine code."""
    return [path for path in folder.rglob("*") if path.is_file() and b"\x7fELF" in path.read_bytes()]


@pytest.fixture
def compile_counter(monkeypatch):
    """Count real compilations; returns a list that grows by one with each."""
    calls = []
    compiled = worker.compiled

    def counting(*args):
        calls.append(args)
        return compiled(*args)

    monkeypatch.setattr(worker, "compiled", counting)
    return calls


def test_cache_second_compile_is_a_hit(tmp_path, compile_counter):
    first = compiler.compile(*SMALL, "sm_90a", cache=KernelCache(tmp_path / "kernels"))
    second = compiler.compile(*SMALL, "sm_90a", cache=KernelCache(tmp_path / "kernels"))
    assert len(compile_counter) == 1
    assert second.cubin == first.cubin


def test_cache_tells_macros_architectures_and_sources_apart(tmp_path, compile_counter, monkeypatch):
    cache = KernelCache(tmp_path / "kernels")
    source_name, macros = SMALL
    other_macros = col2im.col2im_macros(PROBLEMS["plain"], torch.float32, torch.float32)
    cubins = {
        compiler.compile(source_name, macros, "sm_90a", cache=cache).cubin,
        compiler.compile(source_name, macros, "sm_80", cache=cache).cubin,
        compiler.compile(source_name, other_macros, "sm_90a", cache=cache).cubin,
    }
    assert len(cubins) == len(compile_counter) == 3
    text = sources.read(source_name)
    monkeypatch.setattr(sources, "read", lambda name: text + "\n// changed\n")
    compiler.compile(source_name, macros, "sm_90a", cache=cache)
    assert len(compile_counter) == 4
    monkeypatch.setattr(sources, "header_digest", lambda: b"changed headers")
    compiler.compile(source_name, macros, "sm_90a", cache=cache)
    assert len(compile_counter) == 5


def test_cache_is_shared_by_installations_at_other_places(tmp_path, compile_counter, monkeypatch):
    cache = KernelCache(tmp_path / "kernels")
    first = compiler.compile(*SMALL, "sm_90a", cache=cache)
    elsewhere = tmp_path / "elsewhere" / "csrc"
    shutil.copytree(sources.directory(), elsewhere)
    monkeypatch.setattr(sources, "directory", lambda: elsewhere)
    sources.header_digest.cache_clear()
    try:
        assert compiler.compile(*SMALL, "sm_90a", cache=cache).cubin == first.cubin
        assert compiler.compile(*SMALL, "sm_90a").cubin == first.cubin
    finally:
        sources.header_digest.cache_clear()
    assert len(compile_counter) == 2  # the last one asked no cache


def test_cache_folder_is_private(tmp_path):
    folder = tmp_path / "deep" / "kernels"
    compiler.compile(*SMALL, "sm_90a", cache=KernelCache(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_cache_directory_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("GEMMCONV_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GEMMCONV_CACHE_DIR", "mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("GEMMCONV_CACHE_DIR", "~/kernels")
    assert cache_folder() == tmp_path / "kernels"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("GEMMCONV_CACHE_DIR")
        else:
            monkeypatch.setenv("GEMMCONV_CACHE_DIR", unset)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache_folder() == tmp_path / "xdg" / "gemmconv"
    monkeypatch.setenv("GEMMCONV_CACHE_DIR", "~nobody-of-that-name/kernels")
    assert cache_folder() is None


def test_cache_does_without_a_folder_and_says_so():
    with pytest.warns(RuntimeWarning, match="cannot be used .*set GEMMCONV_CACHE_DIR"):
        cache = KernelCache(None)
    cache.put(b"key", b"value")
    assert cache.get(b"key") is None


@pytest.mark.parametrize("damage", ["truncated", "one_bit", "empty", "garbage"])
def test_cache_corrupt_entry_is_a_miss_and_is_replaced(damage, tmp_path, compile_counter):
    folder = tmp_path / "kernels"
    first = compiler.compile(*SMALL, "sm_90a", cache=KernelCache(folder))
    (entry,) = entries(folder)
    content = entry.read_bytes()
    middle = len(content) // 2
    entry.write_bytes(
        {
            "truncated": content[:middle],
            "one_bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "empty": b"",
            "garbage": os.urandom(len(content)),
        }[damage]
    )
    assert compiler.compile(*SMALL, "sm_90a", cache=KernelCache(folder)).cubin == first.cubin
    assert len(compile_counter) == 2
    assert compiler.compile(*SMALL, "sm_90a", cache=KernelCache(folder)).cubin == first.cubin
    assert len(compile_counter) == 2


def test_cache_in_an_impossible_place_warns_once_and_compiling_works(tmp_path):
    """The folder would lie under a regular file, which even root cannot make."""
    (tmp_path / "file").write_text("in the way")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = KernelCache(tmp_path / "file" / "kernels")
        for _ in range(2):
            assert compiler.compile(*SMALL, "sm_90a", cache=cache).cubin[:4] == b"\x7fELF"
    messages = [str(warning.message) for warning in caught if "cache" in str(warning.message)]
    assert len(messages) == 1
    assert str(tmp_path / "file" / "kernels") in messages[0]
    assert "GEMMCONV_CACHE_DIR" in messages[0]


def test_cache_that_stops_being_writable_warns_once_and_compiling_works(tmp_path):
    """A file takes the folder's place while the cache is in use."""
    folder = tmp_path / "kernels"
    cache = KernelCache(folder)
    folder.rename(tmp_path / "moved")
    folder.write_text("in the way")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert compiler.compile(*SMALL, "sm_90a", cache=cache).cubin[:4] == b"\x7fELF"
    assert len([warning for warning in caught if "cache" in str(warning.message)]) == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_cache_for_reading_alone_is_read_and_says_nothing(number, tmp_path, compile_counter, monkeypatch):
    compiler.compile(*SMALL, "sm_90a", cache=KernelCache(tmp_path / "kernels"))

    def refusing(function):
        """Elsewhere another test's threads may be at work."""

        def call(*of, **named):
            if any(str(one).startswith(str(tmp_path)) for one in (*of, *named.values())):
                raise OSError(number, os.strerror(number))
            return function(*of, **named)

        return call

    for module, name in ((tempfile, "mkstemp"), (os, "utime"), (os, "unlink"), (os, "replace")):
        monkeypatch.setattr(module, name, refusing(getattr(module, name)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = KernelCache(tmp_path / "kernels")
        compiler.compile(*SMALL, "sm_90a", cache=cache)
        assert len(compile_counter) == 1
        for _ in range(2):
            assert compiler.compile(*SMALL, "sm_80", cache=cache).cubin[:4] == b"\x7fELF"
    assert len(compile_counter) == 3


def test_cache_may_be_filled_by_several_processes_at_once(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gemmconv.runtime.compiler"])
    start, results = context.Barrier(4), context.Queue()
    im2col = ("columns/im2col.cu", col2im.im2col_macros(PROBLEMS["decoder"], torch.float32))
    arguments = (tmp_path / "kernels", (SMALL, im2col), start, results)
    processes = [context.Process(target=compile_into, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=90)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    digests = [results.get(timeout=10) for _ in processes]
    assert all(pair == digests[0] for pair in digests)
    assert len(entries(tmp_path / "kernels")) == 2


# Sources


def test_sources_are_found_and_include_only_each_other():
    """No CUDA header: a user need not have the toolkit."""
    folder = sources.directory()
    for path in [*folder.rglob("*.cu"), *folder.rglob("*.cuh")]:
        for line in path.read_text().splitlines():
            if line.startswith("#include"):
                name = line.split()[1]
                assert name[0] == '"', f"{path.name}: {line}"
                assert (folder / "include" / name.strip('"')).is_file(), f"{path.name}: {line}"


def test_sources_header_digest_depends_on_every_header(tmp_path, monkeypatch):
    folder = tmp_path / "include" / "ptx"
    folder.mkdir(parents=True)
    (folder / "a.cuh").write_text("1")
    monkeypatch.setattr(sources, "directory", lambda: tmp_path)
    digests = []
    for text in ("1", "2"):
        (folder / "a.cuh").write_text(text)
        sources.header_digest.cache_clear()
        digests.append(sources.header_digest())
    sources.header_digest.cache_clear()
    assert digests[0] != digests[1]
