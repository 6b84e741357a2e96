"""The kernels of csrc/, run on the CPU by the emulator, against the float64 reference. Needs a C++ compiler, no GPU.

Most of the time goes into compiling: nearly every test has a specialisation of its own.
"""

import contextlib
import ctypes
import functools
import math
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests import emulator, reference
from tests.cases import CASES, FEW_CASES, TILED_CASES, Case
from tests.emulator.build import Builder
from tests.samples import channels_last, expected, offset, offset_channels_last, problem_of, sample
from tests.test_direct_mma import wide_problems

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.algorithms import direct_mma, fold_kernels
from gemmconv.algorithms.base import Config
from gemmconv.algorithms.chunking import input_rows_of
from gemmconv.algorithms.direct import Direct
from gemmconv.algorithms.fold_kernels import Col2im, Im2col
from gemmconv.algorithms.macros import ELEMENT_TYPES
from gemmconv.runtime import launch, sources

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler (g++ or c++) to emulate with")

CPU = torch.device("cpu")
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
ARRANGEMENTS = {
    "contiguous": (torch.Tensor.contiguous, offset),
    "channels_last": (channels_last, offset_channels_last),
}
PATHS = {
    "unrolled": lambda tile: tile.unrolled,
    "staged": lambda tile: tile.staged,
    "several_groups": lambda tile: tile.groups > 1,
    "row_phases_in_turn": lambda tile: len(tile.turns) > 1,
    "paired_blocks": lambda tile: tile.channels % 16 == 0,
    "channels_shared": lambda tile: tile.warps_m > 1,
}


@dataclass(frozen=True)
class Run:
    """One kernel on one case.

    Attributes:
        operation: "im2col", "col2im", a direction of `direct` on CUDA cores, or "forward_mma", on tensor cores.
        case: the problem.
        dtype: of all tensors; but col2im adds up float32 columns for 16-bit outputs, as in gemm_col2im.
        layout: of the tensors and of the result.
        multiprocessors: how many forward_mma's grid is for; 0 leaves one block for all tiles. None for the true number.
        choice: which of the tiles that forward_mma may have; None for the one that it takes.
    """

    operation: str
    case: Case
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    multiprocessors: int | None = None
    choice: int | None = None

    def __str__(self):
        words = [self.case.id, str(self.dtype).removeprefix("torch."), self.layout]
        return "-".join(words if self.multiprocessors is None else [*words, f"{self.multiprocessors}mp"])

    @property
    def column_dtype(self):
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def precision(self):
        return "tf32" if self.operation == "forward_mma" else "ieee"

    @property
    def config(self):
        memory_format = FORMATS[self.layout]
        return Config(problem_of(self.case), self.dtype, CPU, self.precision, memory_format=memory_format)

    @functools.cached_property
    def tile(self):
        """The tile of forward_mma, None where it declines the problem."""
        if self.choice is None:
            return direct_mma.tile_for(self.config)
        tiles = [*direct_mma.tiles_of(problem_of(self.case), self.dtype.itemsize, self.layout == "channels_last")]
        return tiles[self.choice % len(tiles)] if tiles else None

    def prepare(self):
        """Return the call that runs the kernel, which starts to be compiled; None where forward_mma declines."""
        problem = problem_of(self.case)
        if self.operation == "im2col":
            return Im2col(problem, self.dtype, CPU)
        if self.operation == "col2im":
            return Col2im(problem, self.column_dtype, self.dtype, CPU)
        with pytest.MonkeyPatch.context() as patch:
            if self.operation != "forward_mma":
                patch.setattr(direct_mma, "tile_for", lambda config: None)
                return getattr(Direct(), self.operation)(self.config)
            if self.multiprocessors is not None:
                patch.setattr(
                    direct_mma, "blocks_at_once", lambda tile: self.multiprocessors * tile.blocks_resident or 1
                )
            return None if self.tile is None else direct_mma.prepare_forward(self.config, self.tile)

    def check(self, call):
        """Compare with the reference what the prepared call computes."""
        if self.operation == "im2col":
            check_im2col(call, self)
        elif self.operation == "col2im":
            check_col2im(call, self)
        else:
            check_direct(call, self)


def each_run(operation, *layouts, more=()):
    """Run a test on all cases in float32 and on a few in the other types."""
    samples = [(case, torch.float32) for case in (*CASES, *more)]
    samples += [(case, dtype) for case in FEW_CASES for dtype in (torch.float64, torch.float16, torch.bfloat16)]
    return pytest.mark.parametrize(
        "run", [Run(operation, case, dtype, layout) for layout in layouts for case, dtype in samples], ids=str
    )


MMA_RUNS = [
    Run("forward_mma", case, dtype, layout)
    for layout in FORMATS
    for case in (*CASES, *TILED_CASES)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
]
# Few blocks: each goes over many tiles and images, and loads one tile while it computes the one before it.
MMA_RUNS += [
    replace(run, multiprocessors=multiprocessors)
    for run in MMA_RUNS
    for multiprocessors in ((0, 1) if run.case in TILED_CASES else (0,))
    if run.dtype != torch.bfloat16
]


@pytest.fixture(scope="session")
def folder(request, tmp_path_factory):
    """Where compiled kernels are kept: from one test session to the next, if pytest may keep anything."""
    cache = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp("emulator") if cache is None else cache.mkdir("emulator")


@pytest.fixture(scope="module")
def calls(request, folder):
    """The prepared calls of all tests that are to run: their kernels compile beside each other and beside the tests."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    runs = [values["run"] for values in parameters if isinstance(values.get("run"), Run)]
    with emulator.install(folder):
        yield {run: run.prepare() for run in runs}


@each_run("im2col", "contiguous")
def test_im2col_kernel_matches_reference(run, calls, poison):
    poison("cpu")
    run.check(calls[run])


@each_run("col2im", "contiguous")
def test_col2im_kernel_matches_reference(run, calls, poison):
    poison("cpu")
    run.check(calls[run])


@each_run("forward", "contiguous", "channels_last", more=TILED_CASES)
def test_direct_forward_kernel_matches_reference(run, calls, poison):
    poison("cpu")
    run.check(calls[run])


@pytest.mark.parametrize("run", MMA_RUNS, ids=str)
def test_direct_forward_kernel_on_tensor_cores_matches_reference(run, calls, poison):
    if calls[run] is None:
        pytest.skip("declined: left to CUDA cores")
    poison("cpu")
    run.check(calls[run])


def test_runs_on_tensor_cores_take_every_path_and_are_rarely_skipped():
    tiles = [run.tile for run in MMA_RUNS]
    assert tiles.count(None) < len(tiles) / 10
    tiles = {tile for tile in tiles if tile is not None}
    synchronous, turned, copied = range(3)
    assert {(tile.channels_last, tile.loading) for tile in tiles} == {
        *((False, loading) for loading in (synchronous, turned, copied)),
        *((True, loading) for loading in (synchronous, copied)),
    }
    for name, path in PATHS.items():
        assert {path(tile) for tile in tiles} == {True, False}, name


@each_run("input_grad", "contiguous", "channels_last")
def test_direct_input_grad_kernel_matches_reference(run, calls, poison):
    poison("cpu")
    run.check(calls[run])


@each_run("weight_grad", "contiguous", "channels_last")
def test_direct_weight_grad_kernels_match_reference(run, calls, poison):
    poison("cpu")
    run.check(calls[run])


@st.composite
def mma_runs(draw):
    """Any tile of a small problem, with few blocks."""
    case = Case(**asdict(draw(wide_problems())))
    dtype = draw(st.sampled_from((torch.float16, torch.bfloat16, torch.float32)))
    multiprocessors, choice = draw(st.integers(0, 2)), draw(st.integers(0, 10_000))
    return Run("forward_mma", case, dtype, draw(st.sampled_from(sorted(FORMATS))), multiprocessors, choice)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(run=mma_runs())
def test_direct_forward_kernel_on_tensor_cores_matches_reference_with_any_tile(run, folder, poison):
    poison("cpu")
    with emulator.install(folder):
        assume((call := run.prepare()) is not None)
        run.check(call)


def check_im2col(call, run):
    """Check the columns of all input rows, and of either half of them."""
    case, height = run.case, run.case.input_size[0]
    grad_output = sample(case, run.dtype, "cpu").grad_output
    exact = reference.unfold(reference.to_array(grad_output), **window_of(case))
    exact = exact.reshape(case.batch, -1, *positions_of(case))[..., : case.input_size[1]]
    for begin, end in spans(height):
        columns = torch.empty((*exact.shape[:2], end - begin, case.input_size[1]), dtype=run.dtype)
        call(grad_output.data_ptr(), columns.data_ptr(), case.batch, (begin, end))
        assert reference.relative_error(columns, exact[:, :, begin:end]) == 0


def check_col2im(call, run):
    """Check all output rows, and either half of them, without and with a bias."""
    case, (height, width) = run.case, run.case.output_size
    bias = sample(case, run.dtype, "cpu").bias
    shape = (case.batch, case.out_channels * math.prod(case.kernel_size), *case.input_size)
    columns = torch.randn(shape, dtype=run.column_dtype)
    beyond_input = [(0, there - read) for there, read in zip(positions_of(case), case.input_size, strict=True)]
    every_position = np.pad(reference.to_array(columns), [(0, 0), (0, 0), *beyond_input])
    folded = reference.fold(every_position.reshape(*shape[:2], -1), case.output_size, **window_of(case))
    for begin, end in spans(height):
        in_rows = input_rows_of(problem_of(case), (begin, end))
        part = columns[:, :, slice(*in_rows)].contiguous()
        for address, added in ((0, 0.0), (bias.data_ptr(), reference.to_array(bias)[:, None, None])):
            output = torch.empty(case.output_shape, dtype=run.dtype)
            call(part.data_ptr(), address, output.data_ptr(), case.batch, in_rows, (begin, end))
            rows = output[:, :, begin:end].reshape(case.batch, case.out_channels, end - begin, width)
            reference.assert_close(rows, (folded + added)[:, :, begin:end], run.dtype, "ieee")


def check_direct(call, run):
    """Check the result and its strides, also for tensors that are aligned to nothing."""
    data, exact = sample(run.case, run.dtype, "cpu"), expected(run.case, run.dtype)
    for arrange in ARRANGEMENTS[run.layout]:
        input, weight, grad_output = (arrange(tensor) for tensor in (data.input, data.weight, data.grad_output))
        if run.operation in ("forward", "forward_mma"):
            results = [(call(input, weight, data.bias), exact.output)]
            results += [(call(input, weight, None), exact.output_without_bias)]
        elif run.operation == "input_grad":
            results = [(call(grad_output, weight), exact.input_grad)]
        else:
            results = [(call(grad_output, input), exact.weight_grad)]
        for actual, wanted in results:
            layout = "contiguous" if run.operation == "weight_grad" else run.layout
            assert actual.stride() == torch.empty(actual.shape, memory_format=FORMATS[layout]).stride()
            reference.assert_close(actual, wanted, run.dtype, run.precision)


def window_of(case):
    """Return the keyword arguments of reference.unfold and fold."""
    return {name: getattr(case, name) for name in ("kernel_size", "dilation", "padding", "stride")}


def positions_of(case):
    """Return how often the kernel fits into the output: beyond the input, where output_padding reaches the stride."""
    return reference.sliding_size(case.output_size, **window_of(case))


def spans(rows):
    """Return the span of all rows and those of two halves that are not empty."""
    return [(0, rows)] if rows == 1 else [(0, rows), (0, rows // 2), (rows // 2, rows)]


LAYER = CASES[1]
MMA = Run("forward_mma", TILED_CASES[0], multiprocessors=0)

SHARED_ARRAY = r"(__shared__ __align__\(16\) accumulate_t (\w+)\[(\w+)\];)"
NO_BARRIER = (r"__syncthreads\(\);", "")
MISTAKES = {
    "im2col_border_row": (
        Run("im2col", LAYER),
        emulator.Edit(
            "im2col.cu", r"static_cast<unsigned>\(oh\) < p\.h_out", "static_cast<unsigned>(oh) + 1 < p.h_out"
        ),
        "assert .* == 0",
    ),
    "col2im_border_column": (
        Run("col2im", LAYER),
        emulator.Edit("col2im.cu", r"origin \+ shift\) < p\.w_in", "origin + shift) + 1 < p.w_in"),
        "relative error",
    ),
    "col2im_output_not_written": (
        Run("col2im", LAYER),
        emulator.Edit("col2im.cu", r"row >= p\.out_rows\) break", "row + 1 >= p.out_rows) break"),
        "relative error inf",
    ),
    "forward_no_barrier": (Run("forward", LAYER), emulator.Edit("direct.cu", *NO_BARRIER), "relative error"),
    "input_grad_no_barrier": (
        Run("input_grad", LAYER),
        emulator.Edit("direct_input_grad.cu", *NO_BARRIER),
        "relative error",
    ),
    "weight_grad_no_barrier": (
        Run("weight_grad", LAYER),
        emulator.Edit("direct_weight_grad.cu", *NO_BARRIER),
        "relative error",
    ),
    "barrier_not_reached": (
        Run("input_grad", LAYER),
        emulator.Edit("direct_input_grad.cu", NO_BARRIER[0], "if (threadIdx.x % 2 == 0) __syncwarp();"),
        "deadlock",
    ),
    "past_dynamic_shared": (
        Run("forward", LAYER),
        emulator.Edit("direct.cu", r"(direct_forward_kernel\([^)]*\) \{)", r"\1 shared[SHARED_BYTES] = 0;"),
        "past the end of shared memory",
    ),
    "past_static_shared": (
        Run("input_grad", LAYER),
        emulator.Edit("direct_input_grad.cu", SHARED_ARRAY, r"\1 (&\2[0])[\3] = 0;"),
        "past the end of shared memory",
    ),
    "index_out_of_bounds": (
        Run("weight_grad", LAYER),
        emulator.Edit("direct_weight_grad.cu", SHARED_ARRAY, r"\1 \2[\3 + threadIdx.x] = 0;"),
        "an index out of bounds in line .* of direct_weight_grad.cu",
    ),
    "misaligned_vector": (
        Run("forward", LAYER),
        emulator.Edit("direct.cu", r"(reinterpret_cast<weight_quad_t\*>\(shared \+ )", r"\g<1>4 + "),
        "a misaligned address in line .* of direct.cu",
    ),
    "mma_no_barrier": (MMA, emulator.Edit("direct_mma.cu", *NO_BARRIER), "relative error"),
    "mma_no_barrier_before_the_next_copies": (
        MMA,
        emulator.Edit("direct_mma.cu", r"(wait_for_copies\(\);\s*)__syncthreads\(\);", r"\1"),
        "relative error",
    ),
    "mma_no_barrier_after_packing": (
        replace(MMA, dtype=torch.float16),
        emulator.Edit("direct_mma.cu", r"(pack_patch\([^;]*;\s*)__syncthreads\(\);", r"\1"),
        "relative error",
    ),
    "mma_no_wait_for_copies": (MMA, emulator.Edit("direct_mma.cu", r"wait_for_copies\(\)", "0"), "relative error"),
    "mma_no_wait_for_turned_copies": (
        replace(MMA, dtype=torch.float16),
        emulator.Edit("direct_mma.cu", r"wait_for_copies\(\)", "0"),
        "relative error",
    ),
    "mma_no_warp_barrier": (
        replace(MMA, layout="channels_last"),
        emulator.Edit("direct_mma.cu", r"__syncwarp\(\);", ""),
        "relative error",
    ),
    "mma_past_dynamic_shared": (
        MMA,
        emulator.Edit("direct_mma.cu", r"(direct_mma_kernel\([^)]*\) \{)", r"\1 shared[SHARED_BYTES] = 0;"),
        "past the end of shared memory",
    ),
    "mma_misaligned_copy": (
        MMA,
        emulator.Edit(
            "direct_mma.cu", r"target \+ channel \* kPlane \+ pixel", "target + channel * kPlane + pixel + 1"
        ),
        "a misaligned copy of 16 bytes",
    ),
    "params_size": (
        Run("im2col", LAYER),
        emulator.Edit("im2col.cu", r"int in_row_begin, in_rows;", "int in_row_begin, in_rows, spare[2];"),
        "params struct has 48 bytes in the source and 40 on the host",
    ),
    "launch_bounds": (
        Run("col2im", LAYER),
        emulator.Edit("col2im.cu", r"__launch_bounds__\(256\)", "__launch_bounds__(128)"),
        "block must have from 1 to 128 threads",
    ),
    "instruction_not_known": (
        Run("col2im", LAYER),
        emulator.Edit("common/numeric.cuh", r"cvt\.f32\.f16", "cvt.f32.f8"),
        "does not know the instruction 'cvt.f32.f8",
    ),
    "product_not_known": (
        MMA,
        emulator.Edit("common/mma.cuh", r"m16n8k8\.row", "m16n8k4.row"),
        "does not know the instruction 'mma.sync.aligned.m16n8k4",
    ),
    "not_cuda": (
        Run("im2col", LAYER),
        emulator.Edit("im2col.cu", r"const int plane = ", "const int plane == "),
        "im2col.cu:.*error",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_emulator_notices_a_mistake(mistake, folder, poison):
    run, edit, message = MISTAKES[mistake]
    poison("cpu")
    with (
        emulator.install(folder, edit),
        pytest.raises((AssertionError, RuntimeError), match=message),
    ):
        run.check(run.prepare())


def test_emulator_leaves_the_loader_as_it_was(folder):
    original = launch.load
    with emulator.install(folder):
        assert fold_kernels.load is launch.load is not original
    assert fold_kernels.load is launch.load is original


class ThreePointers(ctypes.Structure):
    _fields_ = [("first", ctypes.c_void_p), ("second", ctypes.c_void_p), ("third", ctypes.c_void_p)]


def launch_source(folder, source, macros, shared_bytes, *tensors):
    """Run `test_kernel` of a source of its own: one warp, with three pointers."""
    with contextlib.closing(Builder(folder)) as builder:
        library = builder.kernel("test.cu", macros, lambda name: source if name == "test.cu" else sources.read(name))
        kernel = emulator.Kernel(builder, library, "test_kernel", shared_bytes)
        params = ThreePointers(*(tensor.data_ptr() for tensor in tensors))
        kernel.launch((1, 1, 1), (32, 1, 1), params, shared_bytes)


PRODUCT = """
#include "common/mma.cuh"
struct test_params { const unsigned* a; const unsigned* b; float* d; };
extern "C" __global__ void __launch_bounds__(32) test_kernel(const __grid_constant__ test_params p) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const a_words_t a = {{p.a[g * 8 + t], p.a[g * 8 + 64 + t], p.a[g * 8 + t + 4], p.a[g * 8 + 64 + t + 4]}};
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = p.d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    mma_words<ELEMENT_T>::mma(d, a, p.b[g * 8 + t], p.b[g * 8 + t + 4]);
    for (int i = 0; i < 4; ++i) p.d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}
"""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_emulator_multiplies_by_the_definition(dtype, folder):
    values = 32 // dtype.itemsize
    a, b, d = torch.randn(16, values).to(dtype), torch.randn(8, values).to(dtype), torch.randn(16, 8)
    exact = [(m.view(torch.int32) & ~0x1FFF).view(dtype) if dtype == torch.float32 else m for m in (a, b)]
    wanted = d.double() + exact[0].double() @ exact[1].double().mT
    launch_source(folder, PRODUCT, {"ELEMENT_T": ELEMENT_TYPES[dtype]}, 0, a, b, d)
    torch.testing.assert_close(d.double(), wanted, rtol=0, atol=2e-6)


def test_emulator_rounds_to_tf32_with_ties_away_from_zero(folder):
    with contextlib.closing(Builder(folder)) as builder:
        convert = builder.scheduler.emulator_float_to_tf32
    convert.restype, convert.argtypes = ctypes.c_uint32, [ctypes.c_float]

    def converted(values):
        return torch.tensor([convert(value) for value in values.tolist()]).to(torch.int32).view(torch.float32)

    representable = torch.randn(500).view(torch.int32) & ~0x1FFF
    ties = representable + 0x1000
    values = torch.cat([representable, ties - 1, ties, ties + 1]).view(torch.float32)
    fraction, exponent = torch.frexp(values.double())
    nearest = torch.ldexp((fraction.abs() * 2**11 + 0.5).floor().copysign(fraction), exponent - 11)
    assert torch.equal(converted(values).double(), nearest)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    assert torch.equal(converted(special).view(torch.int32), special.view(torch.int32))
    assert converted(torch.tensor([math.nan])).isnan().all()


COPIES = """
#include "common/async.cuh"
extern __shared__ __align__(16) unsigned char shared[];
struct test_params { const unsigned char* source; unsigned char* before; unsigned char* after; };
extern "C" __global__ void __launch_bounds__(32) test_kernel(const __grid_constant__ test_params p) {
    const int place = threadIdx.x * SIZE;
    for (int i = 0; i < SIZE; ++i) shared[place + i] = 7;
    __syncthreads();
    copy_async<SIZE>(shared + place + SKEW, p.source + place, threadIdx.x % 3 != 0);
    for (int i = 0; i < SIZE; ++i) p.before[place + i] = shared[place + i];
    wait_for_copies();
    for (int i = 0; i < SIZE; ++i) p.after[place + i] = shared[place + i];
}
"""


@pytest.mark.parametrize("size", [4, 8, 16])
def test_emulator_copies_at_once_or_when_waited_for(size, folder):
    source = torch.randint(8, 256, (32, size), dtype=torch.uint8)
    before, after = torch.zeros_like(source), torch.zeros_like(source)
    launch_source(folder, COPIES, {"SIZE": size, "SKEW": 0}, 32 * size, source, before, after)
    wanted = torch.where((torch.arange(32) % 3 == 0)[:, None], 0, source)
    assert torch.equal(after, wanted)
    assert torch.equal(before[1::2], wanted[1::2])
    assert (before[::2] == 7).all()


def test_emulator_notices_a_misaligned_copy(folder):
    tensors = torch.zeros(3, 32, 16, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="a misaligned copy of 16 bytes"):
        launch_source(folder, COPIES, {"SIZE": 16, "SKEW": 4}, 1024, *tensors)


def test_emulator_converts_as_torch_does(folder):
    with contextlib.closing(Builder(folder)) as builder:
        scheduler = builder.scheduler
    scheduler.emulator_half_to_float.restype = ctypes.c_float
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    floats = torch.tensor([scheduler.emulator_half_to_float(bits & 0xFFFF) for bits in halves.tolist()])
    assert torch.equal(floats.nan_to_num(7), halves.view(torch.float16).float().nan_to_num(7))

    finite = floats[floats.isfinite()].sort().values.unique()
    ties = (finite[1:] + finite[:-1]) / 2
    values = torch.cat(
        [finite, ties, ties.nextafter(finite[1:]), torch.tensor([65519.9, 65520.0, 1e30, math.inf, -math.inf])]
    )
    for name, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16)):
        convert = scheduler[f"emulator_float_to_{name}"]
        convert.restype, convert.argtypes = ctypes.c_uint16, [ctypes.c_float]
        bits = torch.tensor([convert(value) for value in values.tolist()]).to(torch.int16)
        assert torch.equal(bits.view(dtype), values.to(dtype))
        assert convert(math.nan) == 0x7FFF
