"""Every algorithm on every case, dtype and device, forward and backward, against the float64 reference."""

from dataclasses import replace

import pytest
import torch

import gemmconv
from gemmconv.algorithms import ALGORITHMS, Config
from gemmconv.kernels.base import DEFAULT_WORKSPACE_LIMIT
from tests import reference
from tests.cases import CASES, FEW_CASES, Case
from tests.samples import LAYOUTS, channels_last, conv_precision, expected, problem_of, sample, step

NAMES = [algorithm.name for algorithm in ALGORITHMS]

# (dtype, precision) to compute and to compare in. test_cuda.py adds TF32, which the CPU has not.
NUMERICS = [
    pytest.param(torch.float64, None, id="float64"),
    pytest.param(torch.float32, "ieee", id="float32_ieee"),
    pytest.param(torch.float16, None, id="float16"),
    pytest.param(torch.bfloat16, None, id="bfloat16"),
]

by_algorithm = pytest.mark.parametrize("algorithm", NAMES)
by_numerics = pytest.mark.parametrize(("dtype", "precision"), NUMERICS)
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
by_few_cases = pytest.mark.parametrize("case", FEW_CASES, ids=lambda case: case.id)


@pytest.fixture(autouse=True)
def _torch_precision(request):
    """Make torch's own setting agree with the precision of the test: `native` refuses any other."""
    parameters = getattr(request.node, "callspec", None)
    with conv_precision((parameters and parameters.params.get("precision")) or "ieee"):
        yield


def call(data, case, algorithm, *, bias=True, **options):
    """Call conv_transpose2d, or skip the test with the algorithm's own reason for refusing."""
    try:
        tensors = data.input, data.weight, data.bias if bias else None
        return gemmconv.conv_transpose2d(*tensors, algorithm=algorithm, **case.parameters, **options)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))


def is_torch_itself(output, data, case):
    """Whether an output is torch's own on a CPU, to the bit.

    Its 16-bit convolutions lose up to 8e-3 on CPUs without instructions for these types, where the native algorithm,
    which is torch's, cannot be better.
    """
    if output.device.type != "cpu" or output.dtype.itemsize != 2:
        return False
    return torch.equal(
        output, torch.nn.functional.conv_transpose2d(data.input, data.weight, data.bias, **case.parameters)
    )


def assert_all_close(results, case, dtype, precision=None, data=None):
    """With `data`, an output that is torch's own is right."""
    names = ("output", "input_grad", "weight_grad", "bias_grad")
    for name, actual in zip(names, results, strict=True):
        if name == "output" and data is not None and is_torch_itself(actual, data, case):
            continue
        try:
            reference.assert_close(actual, getattr(expected(case, dtype), name), dtype, precision)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@by_algorithm
@by_numerics
@by_case
def test_conv_transpose2d_matches_reference(case, dtype, precision, algorithm, device, poison):
    data = sample(case, dtype, device)
    poison(device)
    results = step(data, case, algorithm=algorithm, precision=precision)
    assert_all_close(results, case, dtype, precision, data if algorithm == "native" else None)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_native_serves_complex_tensors(dtype, device):
    case = FEW_CASES[0]
    data = sample(case, dtype, device)
    for algorithm in ("auto", "native"):
        output = gemmconv.conv_transpose2d(
            data.input, data.weight, data.bias, algorithm=algorithm, precision="ieee", **case.parameters
        )
        reference.assert_close(output, expected(case, dtype).output, dtype)


@by_numerics
@by_case
def test_auto_serves_every_case(case, dtype, precision, device, poison):
    data = sample(case, dtype, device)
    poison(device)
    output = gemmconv.conv_transpose2d(data.input, data.weight, data.bias, precision=precision, **case.parameters)
    if not is_torch_itself(output, data, case):  # auto takes native on a CPU
        reference.assert_close(output, expected(case, dtype).output, dtype, precision)


@pytest.mark.parametrize("algorithm", ["gemm_col2im", "native"])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
@by_case
def test_general_algorithms_serve_every_case_in_every_real_dtype(case, place, algorithm):
    """So that none of the comparisons above is skipped for both of them."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        report = gemmconv.explain(problem_of(case), dtype=dtype, device=place, algorithm=algorithm)
        assert report.algorithm == algorithm


@by_case
def test_explain_names_every_algorithm_and_the_costs(case):
    problem = problem_of(case)
    for place in ("cpu", "cuda"):
        report = gemmconv.explain(problem, dtype=torch.float16, device=place)
        assert report.algorithm in NAMES
        assert set(report.reasons) == set(NAMES)
        assert all(report.reasons.values())
        text = str(report)
        for number in (problem.useful_flops, problem.least_bytes(2), problem.column_bytes(2)):
            assert f"{number:,}" in text or str(number) in text
        assert all(name in text for name in NAMES)


def test_explain_answers_for_every_pass():
    problem = gemmconv.Problem(32, 256, 256, 1, (32, 24), (4, 4), (2, 2), (1, 1))  # SimpleBaseline 3
    options = {"dtype": torch.float16, "device": "cuda", "memory_format": torch.channels_last}
    reports = [gemmconv.explain(problem, direction=one, **options) for one in ("forward", "input_grad", "weight_grad")]
    assert [report.algorithm for report in reports] == ["fused", "native", "fused"]
    assert {report.gradients for report in reports} == {("native", "fused")}
    assert len({tuple(report.reasons.values()) for report in reports}) == 3
    chosen = "chosen   native (gradient of the input); for a whole backward pass native (input) and fused (weight)"
    assert chosen in str(reports[1])
    assert "(forward); for a whole backward pass gemm_col2im\n" in str(
        gemmconv.explain(problem, algorithm="gemm_col2im")
    )


# Layouts


@by_algorithm
@by_few_cases
@pytest.mark.parametrize(("dtype", "precision"), [NUMERICS[1], NUMERICS[3]])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changed", ["input", "weight", "grad_output", "all"])
def test_conv_transpose2d_accepts_any_strides(case, changed, layout, dtype, precision, algorithm, device, poison):
    data = sample(case, dtype, device)
    names = ("input", "weight", "grad_output") if changed == "all" else (changed,)
    data = replace(data, **{name: LAYOUTS[layout](getattr(data, name)) for name in names})
    poison(device)
    assert_all_close(step(data, case, algorithm=algorithm, precision=precision), case, dtype, precision)


@by_algorithm
def test_conv_transpose2d_accepts_expanded_tensors(algorithm, device):
    """Strides of zero: one image for the whole batch, and the gradient of a sum."""
    case = FEW_CASES[0]
    data = sample(case, torch.float64, device)
    data = replace(data, input=data.input[:1].expand_as(data.input)).leaves()
    output = call(data, case, algorithm)
    output.sum().backward()
    x, w, b = (reference.to_array(tensor) for tensor in (data.input, data.weight, data.bias))
    reference.assert_close(output, reference.forward(x, w, b, **case.parameters), torch.float64)
    ones = reference.to_array(torch.ones_like(output))
    weight_grad = reference.weight_grad(ones, x, case.kernel_size, **case.grad_parameters)
    reference.assert_close(data.weight.grad, weight_grad, torch.float64)


@by_algorithm
def test_conv_transpose2d_accepts_negative_views(algorithm, device):
    """The imaginary part of a conjugate holds its values with the sign to be flipped on reading."""
    case = FEW_CASES[0]
    data = sample(case, torch.float64, device)
    negative = torch.complex(data.weight, -data.weight).conj().imag
    assert negative.is_neg()
    results = step(replace(data, weight=negative), case, algorithm=algorithm)
    assert_all_close(results, case, torch.float64)


@by_algorithm
@pytest.mark.parametrize("grad_layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "last", [(), ("input",), ("weight",), ("input", "weight")], ids=lambda names: "_".join(names) or "neither"
)
def test_conv_transpose2d_output_is_channels_last_if_an_operand_is(last, grad_layout, algorithm, device):
    case = Case(2, 4, 6, (5, 7), (3, 3), (2, 2), (1, 1), (1, 1))
    data = sample(case, torch.float32, device)
    names = (*last, "grad_output") if grad_layout == "channels_last" else last
    data = replace(data, **{name: channels_last(getattr(data, name)) for name in names})
    output, *grads = step(data, case, algorithm=algorithm, precision="ieee")
    memory_format = torch.channels_last if last else torch.contiguous_format
    assert output.is_contiguous(memory_format=memory_format), output.stride()
    assert_all_close((output, *grads), case, torch.float32, "ieee")


@by_algorithm
def test_conv_transpose2d_leaves_its_arguments_unchanged(algorithm, device):
    case = FEW_CASES[1]
    data = sample(case, torch.float32, device)
    step(data, case, algorithm=algorithm)
    before = sample(case, torch.float32, device)
    for name in ("input", "weight", "bias", "grad_output"):
        assert torch.equal(getattr(data, name), getattr(before, name))


# Batches


@by_algorithm
@by_numerics
def test_conv_transpose2d_of_an_empty_batch_is_empty(dtype, precision, algorithm, device):
    case = Case(0, 4, 6, (5, 7), (3, 3), (2, 2), (1, 1), (1, 1), groups=2)
    data = sample(case, dtype, device)
    output, input_grad, weight_grad, bias_grad = step(data, case, algorithm=algorithm, precision=precision)
    assert output.shape == (0, 6, 10, 14)
    assert output.dtype == dtype
    assert input_grad.shape == data.input.shape
    assert torch.equal(weight_grad, torch.zeros_like(data.weight))
    assert torch.equal(bias_grad, torch.zeros_like(data.bias))


@by_algorithm
@by_few_cases
def test_conv_transpose2d_of_one_image_needs_no_batch_dimension(case, algorithm, device):
    data = sample(case, torch.float64, device).leaves()
    batched = call(data, case, algorithm)
    one = replace(data, input=data.input[0], grad_output=data.grad_output[0]).leaves()
    output = call(one, case, algorithm)
    assert output.shape == batched.shape[1:]
    reference.assert_close(output, expected(case, torch.float64).output[0], torch.float64)
    output.backward(one.grad_output)
    reference.assert_close(one.input.grad, expected(case, torch.float64).input_grad[0], torch.float64)


# Workspace

WORKSPACE_CASES = [
    Case(5, 4, 6, (9, 11), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(3, 6, 4, (13, 5), (5, 3), (1, 2), (2, 1), (0, 1), (3, 2), groups=2),
    Case(2, 3, 5, (17, 7), (3, 3), (5, 5), (1, 1), (4, 4), (2, 2)),
    Case(3, 4, 4, (11, 3), (4, 2), (3, 1), (5, 0), (0, 0), (1, 1), groups=4),
    Case(1, 3, 2, (9, 10), (7, 7), (1, 1), (3, 3)),
]


@pytest.mark.filterwarnings("ignore:gemm_col2im. workspace_limit:RuntimeWarning")
@by_algorithm
@by_numerics
@pytest.mark.parametrize("case", WORKSPACE_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("part", ["one_byte", "one_row", "few_rows", "one_image", "some_images"])
def test_conv_transpose2d_is_right_within_any_workspace(case, dtype, precision, part, algorithm, device, poison):
    """Limits below the whole column matrix split the work into chunks of images and of rows."""
    image_bytes = problem_of(case).column_bytes(dtype.itemsize) // case.batch
    row_bytes = image_bytes // case.input_size[0]
    limit = {
        "one_byte": 1,
        "one_row": row_bytes,
        "few_rows": 4 * row_bytes + 1,
        "one_image": image_bytes,
        "some_images": 2 * image_bytes + row_bytes,
    }[part]
    data = sample(case, dtype, device)
    poison(device)
    results = step(data, case, algorithm=algorithm, precision=precision, workspace_limit=limit)
    assert_all_close(results, case, dtype, precision, data if algorithm == "native" else None)


@by_algorithm
@pytest.mark.parametrize("direction", ["forward", "input_grad", "weight_grad"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", ["cpu", "cuda:0"])
def test_workspace_bytes_stay_within_the_limit(place, dtype, direction, algorithm):
    """For every limit that holds a row of columns with the weight's partial sums."""
    chosen = next(candidate for candidate in ALGORITHMS if candidate.name == algorithm)
    for problem in (
        gemmconv.Problem(7, 32, 16, 1, (50, 60), (5, 4), (2, 3), (2, 1), (1, 2)),
        gemmconv.Problem(7, 32, 16, 2, (50, 60), (3, 4), (2, 3), (2, 1), (1, 2)),  # both gradients at once
    ):
        for limit in (1 << 20, 5_000_000, DEFAULT_WORKSPACE_LIMIT, 1 << 30):
            config = Config(problem, dtype, torch.device(place), workspace_limit=limit)
            assert 0 <= chosen.workspace_bytes(config, direction) <= limit


def test_workspace_limit_too_small_for_a_row_warns_and_computes():
    case = WORKSPACE_CASES[0]
    data = sample(case, torch.float64, "cpu")
    with pytest.warns(RuntimeWarning, match="workspace_limit=2"):
        output = call(data, case, "gemm_col2im", workspace_limit=2)
    reference.assert_close(output, expected(case, torch.float64).output, torch.float64)
