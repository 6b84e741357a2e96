"""The kernels of csrc/, run on the CPU by the emulator, against the float64 reference. Needs a C++ compiler, no GPU.

Most of the time goes into compiling: nearly every test has a specialisation of its own.
"""

import contextlib
import ctypes
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests import emulator, reference
from tests.cases import CASES, FEW_CASES, Case
from tests.emulator.build import Builder
from tests.samples import channels_last, expected, offset, problem_of, sample

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.algorithms import fold_kernels
from gemmconv.algorithms.base import Config
from gemmconv.algorithms.chunking import input_rows_of
from gemmconv.algorithms.direct import Direct
from gemmconv.algorithms.fold_kernels import Col2im, Im2col
from gemmconv.runtime import launch

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler (g++ or c++) to emulate with")

CPU = torch.device("cpu")
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Run:
    """One kernel on one case.

    Attributes:
        operation: "im2col", "col2im", or a direction of `direct`.
        case: the problem.
        dtype: of all tensors; but col2im adds up float32 columns for 16-bit outputs, as in gemm_col2im.
        layout: of the tensors and of the result.
    """

    operation: str
    case: Case
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"

    def __str__(self):
        return f"{self.case.id}-{str(self.dtype).removeprefix('torch.')}-{self.layout}"

    @property
    def column_dtype(self):
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def prepare(self):
        """Return the call that runs the kernel, which starts to be compiled."""
        problem = problem_of(self.case)
        if self.operation == "im2col":
            return Im2col(problem, self.dtype, CPU)
        if self.operation == "col2im":
            return Col2im(problem, self.column_dtype, self.dtype, CPU)
        config = Config(problem, self.dtype, CPU, memory_format=FORMATS[self.layout])
        return getattr(Direct(), self.operation)(config)

    def check(self, call):
        """Compare with the reference what the prepared call computes."""
        if self.operation == "im2col":
            check_im2col(call, self)
        elif self.operation == "col2im":
            check_col2im(call, self)
        else:
            check_direct(call, self)


def each_run(operation, *layouts):
    """Run a test on all cases in float32 and on a few in the other types."""
    samples = [(case, torch.float32) for case in CASES]
    samples += [(case, dtype) for case in FEW_CASES for dtype in (torch.float64, torch.float16, torch.bfloat16)]
    return pytest.mark.parametrize(
        "run", [Run(operation, case, dtype, layout) for layout in layouts for case, dtype in samples], ids=str
    )


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


@each_run("forward", "contiguous", "channels_last")
def test_direct_forward_kernel_matches_reference(run, calls, poison):
    poison("cpu")
    run.check(calls[run])


@each_run("input_grad", "contiguous", "channels_last")
def test_direct_input_grad_kernel_matches_reference(run, calls, poison):
    poison("cpu")
    run.check(calls[run])


@each_run("weight_grad", "contiguous", "channels_last")
def test_direct_weight_grad_kernels_match_reference(run, calls, poison):
    poison("cpu")
    run.check(calls[run])


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
    for arrange in (channels_last,) if run.layout == "channels_last" else (torch.Tensor.contiguous, offset):
        input, weight, grad_output = (arrange(tensor) for tensor in (data.input, data.weight, data.grad_output))
        if run.operation == "forward":
            results = [(call(input, weight, data.bias), exact.output)]
            results += [(call(input, weight, None), exact.output_without_bias)]
        elif run.operation == "input_grad":
            results = [(call(grad_output, weight), exact.input_grad)]
        else:
            results = [(call(grad_output, input), exact.weight_grad)]
        for actual, wanted in results:
            layout = "contiguous" if run.operation == "weight_grad" else run.layout
            assert actual.stride() == torch.empty(actual.shape, memory_format=FORMATS[layout]).stride()
            reference.assert_close(actual, wanted, run.dtype, "ieee")


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

SHARED_ARRAY = r"(__shared__ __align__\(16\) accumulate_t (\w+)\[(\w+)\];)"
NO_BARRIER = (r"__syncthreads\(\);", "")
MISTAKES = {
    "im2col_border_row": (
        "im2col",
        emulator.Edit(
            "im2col.cu", r"static_cast<unsigned>\(oh\) < p\.h_out", "static_cast<unsigned>(oh) + 1 < p.h_out"
        ),
        "assert .* == 0",
    ),
    "col2im_border_column": (
        "col2im",
        emulator.Edit("col2im.cu", r"origin \+ shift\) < p\.w_in", "origin + shift) + 1 < p.w_in"),
        "relative error",
    ),
    "col2im_output_not_written": (
        "col2im",
        emulator.Edit("col2im.cu", r"row >= p\.out_rows\) break", "row + 1 >= p.out_rows) break"),
        "relative error inf",
    ),
    "forward_no_barrier": ("forward", emulator.Edit("direct.cu", *NO_BARRIER), "relative error"),
    "input_grad_no_barrier": ("input_grad", emulator.Edit("direct_input_grad.cu", *NO_BARRIER), "relative error"),
    "weight_grad_no_barrier": ("weight_grad", emulator.Edit("direct_weight_grad.cu", *NO_BARRIER), "relative error"),
    "barrier_not_reached": (
        "input_grad",
        emulator.Edit("direct_input_grad.cu", NO_BARRIER[0], "if (threadIdx.x % 2 == 0) __syncwarp();"),
        "deadlock",
    ),
    "past_dynamic_shared": (
        "forward",
        emulator.Edit("direct.cu", r"(direct_forward_kernel\([^)]*\) \{)", r"\1 shared[SHARED_BYTES] = 0;"),
        "past the end of shared memory",
    ),
    "past_static_shared": (
        "input_grad",
        emulator.Edit("direct_input_grad.cu", SHARED_ARRAY, r"\1 (&\2[0])[\3] = 0;"),
        "past the end of shared memory",
    ),
    "index_out_of_bounds": (
        "weight_grad",
        emulator.Edit("direct_weight_grad.cu", SHARED_ARRAY, r"\1 \2[\3 + threadIdx.x] = 0;"),
        "an index out of bounds in line .* of direct_weight_grad.cu",
    ),
    "misaligned_vector": (
        "forward",
        emulator.Edit("direct.cu", r"(reinterpret_cast<weight_quad_t\*>\(shared \+ )", r"\g<1>4 + "),
        "a misaligned address in line .* of direct.cu",
    ),
    "params_size": (
        "im2col",
        emulator.Edit("im2col.cu", r"int in_row_begin, in_rows;", "int in_row_begin, in_rows, spare[2];"),
        "params struct has 48 bytes in the source and 40 on the host",
    ),
    "launch_bounds": (
        "col2im",
        emulator.Edit("col2im.cu", r"__launch_bounds__\(256\)", "__launch_bounds__(128)"),
        "block must have from 1 to 128 threads",
    ),
    "instruction_not_known": (
        "col2im",
        emulator.Edit("common/numeric.cuh", r"cvt\.f32\.f16", "cvt.f32.f8"),
        "does not know the instruction 'cvt.f32.f8",
    ),
    "not_cuda": (
        "im2col",
        emulator.Edit("im2col.cu", r"const int plane = ", "const int plane == "),
        "im2col.cu:.*error",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_emulator_notices_a_mistake(mistake, folder, poison):
    operation, edit, message = MISTAKES[mistake]
    run = Run(operation, LAYER)
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
