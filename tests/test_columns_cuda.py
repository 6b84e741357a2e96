"""The CUDA side of gemm_col2im on the CPU: emulated kernels, and cuBLAS replaced by the definition of its product.

What it shows is every address, leading extent and stride that cuBLAS is given, on every case, in every chunking.
"""

import ctypes
import dataclasses

import pytest
import torch

from tests import emulator, reference
from tests.cases import CASES, Case
from tests.samples import channels_last, expected, problem_of, sample

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.algorithms import gemm_col2im
from gemmconv.kernels.base import Config
from gemmconv.kernels.columns import cuda as columns_cuda

pytestmark = [
    pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler (g++ or c++) to emulate with"),
    pytest.mark.filterwarnings("ignore:gemm_col2im. workspace_limit:RuntimeWarning"),
]

GPU = torch.device("cuda", 0)  # what is configured for; every tensor is in the memory of the CPU
MANY_PIXELS = Case(2, 3, 2, (61, 83), (2, 3), (2, 1), (1, 0), groups=1)  # sums longer than one stage
STORAGE = {torch.float64: ctypes.c_double, torch.float32: ctypes.c_float}


def matrices(address, operand, rows, columns, batch):
    """A batch of column-major matrices in memory, as [batch, rows, columns]."""
    elements = (batch - 1) * operand.stride + (columns - 1) * operand.leading + rows
    code = STORAGE.get(operand.dtype, ctypes.c_int16)
    memory = torch.frombuffer((code * elements).from_address(address), dtype=operand.dtype)
    return memory.as_strided((batch, rows, columns), (operand.stride, 1, operand.leading))


class DefinedGemm:
    """Stands in for gemmconv.runtime.cublas.StridedBatchedGemm."""

    def __init__(self, m, n, k, a, b, c, *, transpose_a, transpose_b, tf32, accumulate=False):
        rows, columns = (k, m) if transpose_a else (m, k)
        assert a.leading >= rows
        assert b.leading >= (n if transpose_b else k)
        assert c.leading >= m
        self._a = (a, rows, columns, transpose_a)
        self._b = (b, n, k, True) if transpose_b else (b, k, n, False)
        self._c = (c, m, n)
        self._accumulate = accumulate

    def __call__(self, blas, a, b, c, batch):
        operands = []
        for address, (operand, rows, columns, transposed) in ((a, self._a), (b, self._b)):
            matrix = matrices(address, operand, rows, columns, batch).double()
            operands.append(matrix.mT if transposed else matrix)
        target = matrices(c, *self._c, batch)
        product = operands[0] @ operands[1]
        target.copy_(product + target.double() if self._accumulate else product)


@pytest.fixture
def on_cpu(monkeypatch, builder):
    """Let the CUDA engine run on CPU tensors."""
    monkeypatch.setattr(columns_cuda, "StridedBatchedGemm", DefinedGemm)
    monkeypatch.setattr(columns_cuda, "handle", lambda: 0)
    monkeypatch.setattr(columns_cuda, "library", lambda: None)
    monkeypatch.setattr(gemm_col2im, "_engine", columns_cuda.CudaEngine)
    with emulator.install(builder):
        yield


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("limit", [None, 4096, 1], ids=["whole", "images_or_rows", "least"])
@pytest.mark.parametrize("case", [*CASES, MANY_PIXELS], ids=lambda case: case.id)
def test_cuda_engine_matches_reference(case, limit):
    check(case, torch.float32, limit, lambda tensor: tensor)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES[:6], MANY_PIXELS], ids=lambda case: case.id)
def test_cuda_engine_matches_reference_in_other_types(case, dtype):
    check(case, dtype, 4096, channels_last)


def check(case, dtype, limit, layout):
    data, exact = sample(case, dtype, "cpu"), expected(case, dtype)
    config = Config(problem_of(case), dtype, GPU)
    if limit is not None:
        config = dataclasses.replace(config, workspace_limit=limit)
    algorithm = gemm_col2im.GemmCol2im()
    input, weight, grad_output = layout(data.input), layout(data.weight), layout(data.grad_output)
    both = algorithm.grads(config, config)(grad_output, input, weight)
    results = (
        *zip(both, (exact.input_grad, exact.weight_grad), strict=True),
        (algorithm.forward(config)(input, weight, data.bias), exact.output),
        (algorithm.forward(config)(input, weight, None), exact.output_without_bias),
        (algorithm.input_grad(config)(grad_output, weight), exact.input_grad),
        (algorithm.weight_grad(config)(grad_output, input), exact.weight_grad),
    )
    for actual, wanted in results:
        reference.assert_close(actual, wanted, dtype, "ieee")


@pytest.mark.usefixtures("on_cpu")
def test_defined_gemm_sees_a_wrong_stride(monkeypatch):
    original = columns_cuda.CudaEngine._input

    def of_the_first_image(self):
        return dataclasses.replace(original(self), image_stride=0)

    monkeypatch.setattr(columns_cuda.CudaEngine, "_input", of_the_first_image)
    case = CASES[0]
    data = sample(case, torch.float32, "cpu")
    output = gemm_col2im.GemmCol2im().forward(Config(problem_of(case), torch.float32, GPU))(
        data.input, data.weight, data.bias
    )
    with pytest.raises(AssertionError, match="relative error"):
        reference.assert_close(output, expected(case, torch.float32).output, torch.float32, "ieee")
