"""The CUDA side of gemm_col2im on the CPU: emulated kernels, and cuBLAS replaced by the definition of its product.

What it shows is every address, leading extent and stride that cuBLAS is given, on every case, in every chunking.
"""

import dataclasses

import pytest
import torch

from tests import emulator, reference
from tests.cases import CASES, Case
from tests.samples import arguments_of, assert_right, channels_last, config_of, expected, problem_of, sample

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.algorithms import gemm_col2im
from gemmconv.geometry import Problem
from gemmconv.kernels.base import PASSES, Config
from gemmconv.kernels.program import Zero

pytestmark = [
    emulator.needs_compiler,
    pytest.mark.filterwarnings("ignore:gemm_col2im. workspace_limit:RuntimeWarning"),
]

GPU = torch.device("cuda", 0)  # what is configured for; every tensor is in the memory of the CPU
MANY_PIXELS = Case(2, 3, 2, (61, 83), (2, 3), (2, 1), (1, 0), groups=1)  # sums longer than one stage
# Channels that are whole units in every type: products take them in channels_last as they are.
UNITS = [
    Case(2, 8, 2, (61, 83), (2, 3), (2, 1), (1, 0)),
    Case(2, 16, 6, (5, 4), (3, 2), (2, 1), groups=2),
    Case(1, 24, 6, (5, 4), (3, 2), (2, 1), groups=3),
    Case(2, 16, 2, (37, 41), (2, 3), (2, 1), (1, 0), groups=2),
]


@pytest.fixture
def on_cpu(builder):
    """Let what is configured for a GPU run on CPU tensors."""
    with emulator.install(builder):
        yield


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("limit", [None, 4096, 1], ids=["whole", "images_or_rows", "least"])
@pytest.mark.parametrize("case", [*CASES, MANY_PIXELS, *UNITS], ids=lambda case: case.id)
def test_products_and_kernels_matches_reference(case, limit, last, poison):
    check(case, torch.float32, limit, last, poison)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("groups", [1, 2])
def test_tensors_in_channels_last_are_multiplied_as_they_are(groups):
    """But where a group's channels are no whole units of 16 bytes."""
    few, many = (Case(2, size * groups, 6, (5, 4), (3, 2), (2, 1), groups=groups) for size in (6, 8))
    for case in (few, many):
        config = Config(problem_of(case), torch.float32, GPU, memory_format=torch.channels_last)
        for direction, names in (("forward", ["input"]), ("grads", ["input", "grad_input"])):
            program = gemm_col2im.GemmCol2im().program(config, direction)
            formats = {one.name: one.form for one in program.operands} | {
                one.name: one.written for one in program.outputs
            }
            last = {name for name, form in formats.items() if form is torch.channels_last}
            assert last == (set() if case is few else set(names))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES[:6], MANY_PIXELS, *UNITS], ids=lambda case: case.id)
def test_products_and_kernels_matches_reference_in_other_types(case, dtype, poison):
    for last in (False, True):
        check(case, dtype, 4096, last, poison)


# Kernels that equal the stride, overlap, leave phases without a tap, and reach beyond the volume.
VOLUMES = [
    Problem(2, 6, 8, 2, (3, 4, 5), (2, 2, 2), (2, 2, 2), (0, 0, 0), (0, 0, 0), (1, 1, 1)),
    Problem(2, 3, 2, 1, (5, 3, 4), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 0, 1), (1, 1, 1)),
    Problem(1, 4, 4, 2, (4, 6, 3), (2, 3, 1), (3, 2, 5), (0, 2, 0), (1, 1, 2), (2, 1, 1)),
    Problem(1, 2, 3, 1, (3, 1, 9), (4, 5, 3), (1, 3, 2), (2, 0, 1), (0, 0, 0), (1, 2, 3)),
    Problem(2, 2, 2, 1, (2, 37, 41), (1, 2, 3), (1, 2, 1), (0, 0, 1), (0, 0, 0), (1, 1, 1)),
]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("limit", [1 << 26, 4096, 1], ids=["whole", "volumes_or_slices", "least"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("problem", VOLUMES, ids=str)
def test_volumes_match_torch(problem, dtype, limit, poison):
    """Forward and all gradients, by the same steps as images."""
    p, config = problem, Config(problem, dtype, GPU, workspace_limit=limit)
    input, weight, bias = (torch.randn(shape).to(dtype) for shape in (p.input_shape, p.weight_shape, (p.out_channels,)))
    exact = [one.double().requires_grad_() for one in (input, weight, bias)]
    output = torch.conv_transpose3d(*exact, *p.geometry)
    grad_output = torch.randn(p.output_shape).to(dtype)
    of_input, of_weight, _ = torch.autograd.grad(output, exact, grad_output.double())
    poison("cpu")
    algorithm = gemm_col2im.GemmCol2im()
    forward, input_grad, weight_grad, grads = (algorithm.prepare(config, direction) for direction in PASSES)
    found = forward(input, weight, bias), input_grad(grad_output, weight), weight_grad(grad_output, input)
    found += grads(grad_output, input, weight)
    for one, other in zip(found, (output, of_input, of_weight, of_input, of_weight), strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= (3e-6 if dtype is torch.float32 else 5e-3) * other.norm()


def check(case, dtype, limit, last, poison):
    data, algorithm = sample(case, dtype, "cpu"), gemm_col2im.GemmCol2im()
    arrange = channels_last if last else torch.Tensor.contiguous
    config = config_of(problem_of(case), dtype, torch.channels_last if last else torch.contiguous_format)
    if limit is not None:
        config = dataclasses.replace(config, workspace_limit=limit)
    for direction in PASSES:
        call = algorithm.prepare(config, direction)
        arguments = arguments_of(direction, data, arrange)
        poison("cpu")
        assert_right(call(*arguments), direction, case, config)
        if direction == "forward":
            poison("cpu")
            without_bias = call(*arguments[:2], None)
            reference.assert_close(without_bias, expected(case, dtype).output_without_bias, dtype, "ieee")


@pytest.mark.parametrize(("case", "precision", "zeros"), [(CASES[0], "tf32", 0), (MANY_PIXELS, "ieee", 1)], ids=str)
def test_partial_sums_are_cleared_where_the_first_product_does_not_write_them(case, precision, zeros):
    """As of many slices of pixels, or of no images."""
    config = Config(problem_of(case), torch.float32, GPU, precision)
    for direction in ("weight_grad", "grads"):
        for batch, wanted in ((case.batch, zeros), (0, 1)):
            one = dataclasses.replace(config, problem=dataclasses.replace(config.problem, batch=batch))
            steps = gemm_col2im.GemmCol2im().program(one, direction).steps
            assert sum(isinstance(step, Zero) for step in steps) == wanted
