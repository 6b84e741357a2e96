"""The judges: the reference against element-by-element loops, and every comparison on wrong data."""

import itertools
import math

import numpy as np
import pytest
import torch

from tests import reference
from tests.cases import CASES, Case
from tests.samples import LAYOUTS, arrays, expected, sample

BIG_CASE = Case(2, 3, 5, (19, 23), (3, 3), (2, 2), (1, 1))


def forward_by_elements(x: np.ndarray, w: np.ndarray, case: Case) -> np.ndarray:
    """The definition, one scalar product at a time."""
    height, width = case.output_size
    out_per_group, in_per_group = case.out_channels // case.groups, case.in_channels // case.groups
    output = np.zeros(case.output_shape)
    for n, c_in, ih, iw in np.ndindex(*x.shape):
        group = c_in // in_per_group
        for c_out, kh, kw in np.ndindex(*w.shape[1:]):
            oh = ih * case.stride[0] - case.padding[0] + kh * case.dilation[0]
            ow = iw * case.stride[1] - case.padding[1] + kw * case.dilation[1]
            if 0 <= oh < height and 0 <= ow < width:
                output[n, group * out_per_group + c_out, oh, ow] += x[n, c_in, ih, iw] * w[c_in, c_out, kh, kw]
    return output


@pytest.mark.parametrize("case", [case for case in CASES if case.in_channels < 60], ids=lambda case: case.id)
def test_reference_forward_matches_elementwise_definition(case):
    x, w, _, _ = (reference.to_array(tensor) for tensor in arrays(case, torch.float64))
    actual = expected(case, torch.float64).output_without_bias
    assert reference.relative_error(actual, forward_by_elements(x, w, case)) < 1e-14


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_reference_gradients_are_adjoint_to_forward(case):
    """<forward(x, w), g> = <x, input_grad(g, w)> = <w, weight_grad(g, x)>."""
    x, w, b, grad_output = (reference.to_array(tensor) for tensor in arrays(case, torch.float64))
    result = expected(case, torch.float64)
    product = np.vdot(result.output_without_bias, grad_output)
    scale = np.linalg.norm(result.output_without_bias) * np.linalg.norm(grad_output)
    assert abs(product - np.vdot(x, result.input_grad)) < 1e-13 * scale
    assert abs(product - np.vdot(w, result.weight_grad)) < 1e-13 * scale
    assert np.isclose(np.vdot(result.output, grad_output) - product, np.vdot(b, result.bias_grad))


def test_reference_fold_is_adjoint_to_unfold():
    rng = np.random.default_rng(5)
    images = rng.standard_normal((2, 3, 11, 13))
    window = {"dilation": (2, 1), "padding": (1, 2), "stride": (2, 3)}
    unfolded = reference.unfold(images, (3, 2), **window)
    columns = rng.standard_normal(unfolded.shape)
    folded = reference.fold(columns, (11, 13), (3, 2), **window)
    assert np.isclose(np.vdot(unfolded, columns), np.vdot(images, folded))


DAMAGES = {
    "wrong border row": lambda output: output[:, :, -1].copy_(output[:, :, -2]),
    "wrong border column of the last image": lambda output: output[-1, :, :, 0].zero_(),
    "one wrong element": lambda output: output[1, 2, 3, 4].neg_(),
    "one NaN": lambda output: output[0, 0, 0, 0].fill_(torch.nan),
    "one infinity": lambda output: output[0, 0, 0, 0].fill_(torch.inf),
    "all zero": lambda output: output.zero_(),
    "wrong scale": lambda output: output.mul_(1.01),
    "swapped images": lambda output: output.copy_(output.flip(0)),
}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
PRECISIONS = {torch.float32: ["ieee", "tf32"]}


def good_output(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(expected(BIG_CASE, dtype).output, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_assert_close_accepts_the_rounded_reference(dtype):
    for precision in PRECISIONS.get(dtype, [None]):
        reference.assert_close(good_output(dtype), expected(BIG_CASE, dtype).output, dtype, precision)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_assert_close_rejects_damaged_output(dtype, damage):
    output = good_output(dtype)
    DAMAGES[damage](output)
    for precision in PRECISIONS.get(dtype, [None]):
        with pytest.raises(AssertionError, match="error"):
            reference.assert_close(output, expected(BIG_CASE, dtype).output, dtype, precision)


def test_assert_close_rejects_wrong_shape_and_dtype():
    output, exact = good_output(torch.float64), expected(BIG_CASE, torch.float64).output
    for wrong in (output[:, :, :-1], output[0], output[:1], output.transpose(2, 3), output[..., None]):
        with pytest.raises(AssertionError, match="shape"):
            reference.assert_close(wrong, exact, torch.float64)
    with pytest.raises(AssertionError, match="dtype"):
        reference.assert_close(output, exact, torch.float32, "ieee")
    reference.assert_close(torch.empty(0, 3), np.empty((0, 3)), torch.float32, "ieee")
    with pytest.raises(AssertionError, match="shape"):
        reference.assert_close(torch.empty(0, 4), np.empty((0, 3)), torch.float32, "ieee")


def test_assert_close_rejects_tf32_as_ieee():
    """Products of operands with 10 mantissa bits must not pass for float32."""
    x, w, _, _ = arrays(BIG_CASE, torch.float32)
    x_tf32, w_tf32 = ((tensor.view(torch.int32) & ~0x1FFF).view(torch.float32) for tensor in (x, w))
    rounded = reference.forward(reference.to_array(x_tf32), reference.to_array(w_tf32), **BIG_CASE.parameters)
    output = torch.from_numpy(rounded).float()
    exact = expected(BIG_CASE, torch.float32).output_without_bias
    assert reference.relative_error(output, exact) > 1e-4
    with pytest.raises(AssertionError, match="relative error"):
        reference.assert_close(output, exact, torch.float32, "ieee")


def test_tolerance_needs_a_precision_for_float32():
    with pytest.raises(KeyError):
        reference.tolerance(torch.float32)


@pytest.mark.parametrize(
    ("actual", "exact", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([1j], [1.0], math.sqrt(2)),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0, math.inf], [1.0, 2.0], math.inf),
        ([1.0, 2.0], [1.0, math.nan], math.inf),
        ([1.0, 2.0], [1.0, math.inf], math.inf),
        ([1.0, math.nan], [1.0, math.nan], math.inf),
        ([1.0, math.inf], [1.0, math.inf], math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0),
        ([0.0, 1e-30], [0.0, 0.0], math.inf),
        ([], [], 0),
    ],
)
def test_relative_error_of_known_values(actual, exact, error):
    assert reference.relative_error(np.array(actual), np.array(exact)) == pytest.approx(error, abs=0)


def test_relative_error_rejects_broadcastable_shapes():
    for broadcastable, exact in (((3, 1), (3, 3)), ((), (3,))):
        with pytest.raises(AssertionError, match="shape"):
            reference.relative_error(np.ones(broadcastable), np.ones(exact))


def test_cases_have_unique_names():
    names = [case.id for case in CASES]
    assert len(set(names)) == len(names)


def test_cases_cover_the_hard_geometry():
    def on_an_axis(condition):
        return any(condition(case, axis) for case, axis in itertools.product(CASES, (0, 1)))

    assert on_an_axis(lambda case, axis: case.kernel_size[axis] < case.stride[axis])
    assert on_an_axis(lambda case, axis: math.gcd(case.stride[axis], case.dilation[axis]) > 1)
    assert on_an_axis(lambda case, axis: case.output_padding[axis] >= case.stride[axis])
    assert on_an_axis(lambda case, axis: case.padding[axis] > case.dilation[axis] * (case.kernel_size[axis] - 1))
    assert any(case.groups == case.in_channels > 1 for case in CASES)
    assert any(case.groups == case.in_channels > 1 and case.out_channels > case.in_channels for case in CASES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_values_and_change_their_place(layout):
    tensor = sample(BIG_CASE, torch.float32, "cpu").input
    changed = LAYOUTS[layout](tensor)
    assert torch.equal(changed, tensor)
    assert (changed.stride(), changed.storage_offset()) != (tensor.stride(), tensor.storage_offset())


def test_poison_fills_fresh_memory_with_nan(poison, device):
    poison(device)
    assert torch.empty(1000, device=device).isnan().all()
    assert torch.empty(2_000_000, device=device).isnan().all()
