"""Gradients of first and second order, operator registrations and autocast."""

import weakref

import pytest
import torch

import gemmconv
from gemmconv import ops, pairs
from gemmconv.algorithms import ALGORITHMS, Config
from gemmconv.kernels.base import strides_of
from gemmconv.ops import autograd
from tests import reference
from tests.cases import Case
from tests.samples import channels_last, problem_of, sample, spread

NAMES = ["auto", *(algorithm.name for algorithm in ALGORITHMS)]
SMALL_CASES = [
    Case(2, 2, 3, (3, 2), (2, 3), (2, 1), (1, 0), (1, 0), (1, 2)),
    Case(1, 4, 2, (2, 3), (3, 2), (3, 2), (1, 1), (2, 0), (2, 1), groups=2),
]
# From torch's own compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

by_algorithm = pytest.mark.parametrize("algorithm", NAMES)
by_case = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.id)


def function_of(case, algorithm):
    def function(input, weight, bias=None):
        return gemmconv.conv_transpose2d(input, weight, bias, algorithm=algorithm, **case.parameters)

    return function


def arguments(case, device, algorithm):
    data = sample(case, torch.float64, device).leaves()
    try:
        function_of(case, algorithm)(data.input, data.weight, data.bias)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    return data.input, data.weight, data.bias


@by_algorithm
@by_case
def test_conv_transpose2d_passes_gradcheck(case, algorithm, device):
    tensors = arguments(case, device, algorithm)
    assert torch.autograd.gradcheck(function_of(case, algorithm), tensors)
    assert torch.autograd.gradcheck(function_of(case, algorithm), tensors[:2])


@by_algorithm
@by_case
def test_conv_transpose2d_passes_gradgradcheck(case, algorithm, device):
    tensors = arguments(case, device, algorithm)
    assert torch.autograd.gradgradcheck(function_of(case, algorithm), tensors)


# Operator registrations

CASE = Case(2, 4, 6, (5, 4), (3, 2), (2, 1), (1, 0), (1, 0), (1, 2), groups=2)
GEOMETRY = ([2, 1], [1, 0], [1, 0], 2, [1, 2])  # stride, padding, output_padding, groups, dilation
OPTIONS = ("auto", None, None)  # algorithm, precision, workspace_limit
UNCHANGED = {"contiguous": lambda tensor: tensor, "channels_last": channels_last, "spread": spread}


def operator_arguments(operator, layout, device, dtype):
    """Arguments of one of the operators; tensors require gradients."""
    data = sample(CASE, dtype, device)
    input, weight, bias, grad_output = (
        (UNCHANGED[layout](tensor) if tensor.ndim == 4 else tensor).detach().requires_grad_()
        for tensor in (data.input, data.weight, data.bias, data.grad_output)
    )
    window = ([3, 2], [1, 2], [1, 0], [2, 1])  # kernel_size, dilation, padding, stride
    return {
        "conv_transpose2d": (input, weight, bias, *GEOMETRY, *OPTIONS),
        "conv_transpose2d_input_grad": (grad_output, weight, [5, 4], *GEOMETRY, *OPTIONS),
        "conv_transpose2d_weight_grad": (grad_output, input, [3, 2], *GEOMETRY, *OPTIONS),
        "conv_transpose2d_grads": (grad_output, input, weight, *GEOMETRY, *OPTIONS),
        "im2col": (input, *window),
        "col2im": (torch.randn(2, 24, 6, dtype=dtype, device=device, requires_grad=True), [5, 4], *window),
    }[operator]


OPERATORS = [
    "conv_transpose2d",
    "conv_transpose2d_input_grad",
    "conv_transpose2d_weight_grad",
    "conv_transpose2d_grads",
    "im2col",
    "col2im",
]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        pytest.param(dtype, layout, marks=() if (layout == "spread") == (dtype == torch.bfloat16) else pytest.mark.slow)
        for dtype in (torch.float32, torch.bfloat16)
        for layout in UNCHANGED
    ],
    ids=str,
)
def test_operators_pass_opcheck(operator, layout, dtype, device):
    arguments = operator_arguments(operator, layout, device, dtype)
    torch.library.opcheck(getattr(torch.ops.gemmconv, operator).default, arguments)


@pytest.mark.parametrize("algorithm", NAMES[1:])
def test_operators_pass_opcheck_with_every_algorithm(algorithm, device):
    for operator in OPERATORS[:4]:
        *first, _, _, _ = operator_arguments(operator, "contiguous", device, torch.float64)
        try:
            getattr(torch.ops.gemmconv, operator)(*first, algorithm, None, None)
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
        torch.library.opcheck(getattr(torch.ops.gemmconv, operator).default, (*first, algorithm, None, 4096))


@pytest.mark.parametrize("layout", UNCHANGED)
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.float16, "ieee")], ids=str
)
@pytest.mark.parametrize("algorithm", NAMES[1:])
def test_both_gradients_together_are_those_of_one_by_one(algorithm, dtype, precision, layout, device):
    grad_output, input, weight, *geometry = (
        argument.detach() if isinstance(argument, torch.Tensor) else argument
        for argument in operator_arguments("conv_transpose2d_grads", layout, device, dtype)[:8]
    )
    options = (*geometry, algorithm, precision)
    try:
        one_by_one = (
            torch.ops.gemmconv.conv_transpose2d_input_grad(grad_output, weight, input.shape[2:], *options),
            torch.ops.gemmconv.conv_transpose2d_weight_grad(grad_output, input, weight.shape[2:], *options),
        )
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    together = torch.ops.gemmconv.conv_transpose2d_grads(grad_output, input, weight, *options)
    in_last = not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)
    strides = one_by_one[0].stride(), (weight if in_last else one_by_one[1]).stride()  # that of a weight is like it
    for own, other, expected in zip(together, one_by_one, strides, strict=True):
        assert own.stride() == expected
        if precision == "tf32":  # together perhaps on tensor cores
            reference.assert_close(own, other, dtype, precision)
        else:
            torch.testing.assert_close(own, other)


@pytest.mark.parametrize("result", [0, 1, slice(None)], ids=["input", "weight", "both"])
def test_both_gradients_together_pass_gradient_checks(result, device):
    grad_output, input, weight, *rest = operator_arguments("conv_transpose2d_grads", "contiguous", device, torch.double)

    def function(*tensors):
        return torch.ops.gemmconv.conv_transpose2d_grads(*tensors, *rest)[result]

    assert torch.autograd.gradcheck(function, (grad_output, input, weight), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (grad_output, input, weight), fast_mode=True)


@pytest.mark.parametrize("algorithm", ["gemm_col2im", "fused", "native"])
@pytest.mark.parametrize(
    "case",
    [
        Case(3, 16, 24, (6, 5), (4, 4), (2, 2), (1, 1)),
        Case(2, 1, 8, (1, 7), (1, 3), (1, 2)),
        Case(1, 8, 16, (4, 8), (4, 4), (4, 4)),
    ],
    ids=lambda case: case.id,
)
def test_gradients_of_nchw_can_be_computed_in_channels_last_between_turns(case, algorithm, device, monkeypatch, poison):
    chosen = next(one for one in ALGORITHMS if one.name == algorithm)
    gradients = pairs.Gradients(chosen, chosen, via_channels_last=True)
    assert gradients.transposes_weight is (algorithm == "native")
    assert not gradients._replace(via_channels_last=False).transposes_weight
    monkeypatch.setattr(pairs, "choose_pair", lambda *arguments: gradients)
    formats = []

    def recording(original):
        def recorded(itself, config, *direction):
            if "forward" not in direction:
                formats.append(config.memory_format)
            return original(itself, config, *direction)

        return recorded

    for name in ("choice", "prepare"):  # of programs, and of torch's operator
        monkeypatch.setattr(type(chosen), name, recording(getattr(type(chosen), name)))
    dtype = torch.float16 if device == "cuda" else torch.float32
    if chosen.why_not(Config(problem_of(case), dtype, torch.device(device))) is not None:
        pytest.skip(f"{algorithm} is not for {device}")
    last = Config(problem_of(case), dtype, torch.device(device), memory_format=torch.channels_last)
    if chosen.why_not(last, "weight_grad") is not None:
        pytest.skip(f"no kernel of {algorithm} takes this gradient in channels_last")
    data = sample(case, dtype, device).leaves()
    wide = sample(case, dtype, device)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (wide.input, wide.weight)]
    exact = torch.nn.functional.conv_transpose2d(*exact_inputs, **case.parameters)
    geometry = case.stride, case.padding, case.output_padding, case.groups, case.dilation
    output = ops.conv_transpose2d(data.input, data.weight, None, *geometry)
    for grad_output in (
        data.grad_output.detach(),
        spread(data.grad_output.detach()),
        output.detach()[:1, :1].expand_as(output),
    ):
        poison(device)
        found = torch.autograd.grad(output, (data.input, data.weight), grad_output, retain_graph=True)
        wanted = torch.autograd.grad(exact, exact_inputs, grad_output.double(), retain_graph=True)
        for one, other, leaf in zip(found, wanted, (data.input, data.weight), strict=True):
            assert one.stride() == leaf.stride()
            reference.assert_close(one, other, dtype, "ieee")
    assert set(formats) == {torch.channels_last}


@pytest.mark.parametrize(
    ("images", "biased", "precision"), [(2, False, None), (2, False, "ieee"), (2, False, "tf32"), (0, True, None)]
)
def test_operators_pass_opcheck_without_bias_or_images(images, biased, precision, device):
    arguments = operator_arguments("conv_transpose2d", "contiguous", device, torch.float32)
    input, weight, bias, *geometry, algorithm, _, limit = arguments
    given = input[:images].detach().requires_grad_(), weight, bias if biased else None
    torch.library.opcheck(torch.ops.gemmconv.conv_transpose2d.default, (*given, *geometry, algorithm, precision, limit))


@pytest.mark.parametrize("layout", UNCHANGED)
@pytest.mark.parametrize("changed", ["input", "weight"])
@pytest.mark.parametrize(
    "case",
    [CASE, Case(2, 1, 3, (4, 5), (3, 3)), Case(2, 3, 1, (4, 5), (2, 2)), Case(1, 3, 2, (1, 1), (1, 1))],
    ids=lambda case: case.id,
)
def test_fake_output_has_the_strides_of_the_real_one(case, changed, layout, device):
    """Strides predicted for the compiler, also where channels_last and contiguous look alike."""
    data = sample(case, torch.float32, device)
    tensors = {"input": data.input, "weight": data.weight}
    tensors[changed] = UNCHANGED[layout](tensors[changed])
    real = gemmconv.conv_transpose2d(tensors["input"], tensors["weight"], data.bias, **case.parameters)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (tensors["input"], tensors["weight"], data.bias)]
        fake = gemmconv.conv_transpose2d(*fakes, **case.parameters)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


# Autocast


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_autocast_gives_the_dtypes_that_torch_gives(given, low, device):
    """Output and gradients; torch leaves float64 alone."""
    dtypes = []
    for function in (torch.nn.functional.conv_transpose2d, gemmconv.conv_transpose2d):
        data = sample(CASE, given, device).leaves()
        with torch.autocast(device, low):
            output = function(data.input, data.weight, data.bias, **CASE.parameters)
        output.float().sum().backward()
        dtypes.append([output.dtype, data.input.grad.dtype, data.weight.grad.dtype, data.bias.grad.dtype])
    assert dtypes[1] == dtypes[0]


def test_autocast_casts_mixed_operands(device):
    """A bfloat16 activation meets float32 parameters, as behind another autocast layer."""
    data = sample(CASE, torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        output = gemmconv.conv_transpose2d(data.input.bfloat16(), data.weight, data.bias, **CASE.parameters)
    assert output.dtype == torch.bfloat16
    wide = torch.nn.functional.conv_transpose2d(data.input, data.weight, data.bias, **CASE.parameters)
    torch.testing.assert_close(output.float(), wide, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("wanted", [("input",), ("weight",), ("input", "weight")], ids="_".join)
def test_autocast_around_the_gradient_of_a_gradient_leaves_its_dtypes_alone(wanted, device, monkeypatch):
    """A float32 island for a gradient penalty: float16 would overflow under the scale of a GradScaler.

    As torch's own does on CUDA, whose backward of a backward casts: what is wanted is computed without autocast.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    def gradients(function, dtype, autocast):
        data = sample(CASE, dtype, device).leaves()
        with torch.autocast(device, torch.float16, enabled=autocast):
            with torch.autocast(device, enabled=False):
                output = function(data.input, data.weight, data.bias, **CASE.parameters).square().sum()
                found = torch.autograd.grad(output, [getattr(data, name) for name in wanted], create_graph=True)
                penalty = 2**16 * sum(one.square().sum() for one in found)
            penalty.backward()
        return data.input.grad, data.weight.grad

    actual = gradients(gemmconv.conv_transpose2d, torch.float32, autocast=True)
    expected = gradients(torch.nn.functional.conv_transpose2d, torch.float64, autocast=False)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5 * other.abs().max().item())


# What a backward pass computes and keeps.


@pytest.fixture
def leaves(device):
    case = SMALL_CASES[1]
    data = sample(case, torch.float32, device).leaves()
    return case, data


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("asked", ["input", "weight", "bias", "input weight", "input weight bias"])
def test_a_backward_pass_computes_what_it_is_asked_for(asked, leaf, leaves, monkeypatch):
    """All three require gradients; torch.autograd.grad and backward(inputs=...) want some of them."""
    case, data = leaves
    ran = []
    for name in ("input_grad", "weight_grad", "grads"):
        operator = getattr(autograd, f"conv_transpose2d_{name}")
        recorded = lambda *a, name=name, operator=operator: ran.append(name) or operator(*a)  # noqa: E731
        monkeypatch.setattr(autograd, f"conv_transpose2d_{name}", recorded)
    prepare_call = autograd.prepare_call

    def recording(direction, *of):
        call = prepare_call(direction, *of)
        return lambda *tensors: ran.append(direction) or call(*tensors)

    monkeypatch.setattr(autograd, "prepare_call", recording)
    tensors = {"input": data.input, "weight": data.weight, "bias": data.bias}
    if not leaf:
        tensors = {name: tensor * 1.0 for name, tensor in tensors.items()}
    wanted = [tensors[name] for name in asked.split()]
    exact = torch.nn.functional.conv_transpose2d(*tensors.values(), **case.parameters)
    right = torch.autograd.grad(exact, wanted, data.grad_output, retain_graph=True)
    output = function_of(case, "gemm_col2im")(**tensors)
    expected = {"input": ["input_grad"], "weight": ["weight_grad"], "bias": []}.get(asked, ["grads"])
    for create_graph in (False, True):
        found = torch.autograd.grad(output, wanted, data.grad_output, retain_graph=True, create_graph=create_graph)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert ran == expected
        ran.clear()
    if leaf:
        output.backward(data.grad_output, inputs=wanted)
        assert ran == expected


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_a_layer_keeps_nothing_that_no_gradient_needs(frozen, leaves):
    case, data = leaves
    input, weight = data.input.detach().clone(), data.weight.detach().clone()
    (weight if frozen == "input" else input).requires_grad_()
    kept = weakref.ref(weight if frozen == "input" else input)
    with torch.no_grad():
        assert not function_of(case, "gemm_col2im")(input, weight).requires_grad
    output = function_of(case, "gemm_col2im")(input, weight)
    del input, weight
    assert kept() is not None  # the leaf whose gradient is wanted
    held = [t for t in output.grad_fn.saved_tensors if t is not None]
    assert [t.shape for t in held] == [torch.Size(case.input_shape if frozen == "input" else case.weight_shape)]
    output.sum().backward()
    assert kept().grad is not None


@pytest.mark.parametrize("kernel", [(3, 3), (1, 1)])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_weight_gradients_have_the_weights_strides(layout, frozen, kernel, device):
    case = Case(2, 8, 6, (5, 4), kernel, (2, 2))
    data = sample(case, torch.float32, device)
    weight = torch.empty_strided(case.weight_shape, strides_of(case.weight_shape, layout), device=device)
    weight = weight.copy_(data.weight).requires_grad_()
    function_of(case, "gemm_col2im")(data.input.requires_grad_(not frozen), weight).sum().backward()
    assert weight.grad.stride() == weight.stride()
