"""Sizes, phases and counts of Problem against an enumeration of the scatter relation."""

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gemmconv import Problem
from gemmconv.kernels.phases import phase_shifts, taps_of
from tests.cases import CASES
from tests.samples import problem_of

extents = st.integers(1, 7)
steps = st.integers(1, 6)


@st.composite
def problems(draw):
    """A Problem with valid sizes; the axes are drawn independently."""
    groups = draw(st.integers(1, 4))
    pair = lambda strategy: (draw(strategy), draw(strategy))  # noqa: E731
    input_size, kernel_size, stride, dilation = map(pair, (extents, st.integers(1, 5), steps, steps))
    padding = pair(st.integers(0, 8))
    output_padding = tuple(draw(st.integers(0, max(stride[axis], dilation[axis]) - 1)) for axis in (0, 1))
    problem = Problem(
        *(draw(st.integers(0, 3)), groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3)), groups),
        *(input_size, kernel_size, stride, padding, output_padding, dilation),
    )
    assume(min(problem.output_size) > 0)
    return problem


def scattered(problem, axis):
    """Every (output, tap, input) triple of an axis, found by scattering each input."""
    size = problem.output_size[axis]
    return {
        (output, tap, position)
        for position in range(problem.input_size[axis])
        for tap in range(problem.kernel_size[axis])
        if 0
        <= (output := position * problem.stride[axis] - problem.padding[axis] + tap * problem.dilation[axis])
        < size
    }


def gathered(problem, axis):
    """These triples as the taps of a cell describe them."""
    stride, taps = problem.stride[axis], taps_of(problem, "forward", axis)
    return [
        (output, of.tap, position)
        for output in range(problem.output_size[axis])
        for of in taps
        if of.phase == output % stride and 0 <= (position := output // stride + of.shift) < problem.input_size[axis]
    ]


@given(problems(), st.sampled_from([0, 1]))
def test_taps_cover_the_scatter_relation_exactly(problem, axis):
    triples = gathered(problem, axis)
    assert len(triples) == len(set(triples))
    assert set(triples) == scattered(problem, axis)


@given(problems(), st.sampled_from([0, 1]))
def test_each_tap_is_of_one_phase(problem, axis):
    taps = taps_of(problem, "forward", axis)
    assert [of.tap for of in taps] == list(range(problem.kernel_size[axis]))
    assert {of.phase for of in taps} <= set(range(problem.stride[axis]))
    assert sum(map(len, phase_shifts(problem, axis))) == len(taps)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_output_size_matches_torch(case):
    problem = problem_of(case)
    output = torch.nn.functional.conv_transpose2d(
        *(torch.empty(shape, device="meta") for shape in (case.input_shape, case.weight_shape)), **case.parameters
    )
    assert problem.output_shape == output.shape
    assert problem.output_size == case.output_size
    assert (problem.input_shape, problem.weight_shape) == (case.input_shape, case.weight_shape)


@given(problems())
def test_useful_flops_count_every_multiply_and_add(problem):
    """Two operations for each image, group, channel in, channel out, tap and input position."""
    products = 0
    for _ in range(problem.batch * problem.groups):
        for _ in range(problem.in_channels // problem.groups):
            for _ in range(problem.out_channels // problem.groups):
                products += math.prod(problem.kernel_size) * math.prod(problem.input_size)
    assert problem.useful_flops == 2 * products
    assert problem.useful_flops == 2 * problem.gemm_batch * problem.gemm_m * problem.gemm_n * problem.gemm_k


@given(problems())
def test_gemm_extents_are_those_of_the_operands(problem):
    """weight^T [gemm_m, gemm_k] times input [gemm_k, gemm_n], gemm_batch times."""
    input_elements = torch.Size(problem.input_shape).numel()
    weight_elements = torch.Size(problem.weight_shape).numel()
    assert problem.gemm_batch * problem.gemm_k * problem.gemm_n == input_elements
    assert problem.groups * problem.gemm_k * problem.gemm_m == weight_elements
    assert problem.gemm_batch == problem.batch * problem.groups
    assert problem.column_bytes(1) == problem.column_elements == problem.gemm_batch * problem.gemm_m * problem.gemm_n
    assert problem.column_bytes(8) == 8 * problem.column_elements


@given(problems(), st.sampled_from([2, 4, 8]), st.booleans())
def test_least_bytes_count_every_tensor_once(problem, itemsize, bias):
    shapes = [problem.input_shape, problem.weight_shape, problem.output_shape]
    elements = sum(torch.Size(shape).numel() for shape in shapes) + (problem.out_channels if bias else 0)
    assert problem.least_bytes(itemsize, bias) == itemsize * elements


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Problem)])
def test_problem_differs_by_every_field(field):
    problem = Problem(2, 4, 6, 2, (5, 6), (3, 3), (1, 2), (1, 0), (0, 1), (2, 1))
    value = getattr(problem, field)
    changed = dataclasses.replace(problem, **{field: value + 1 if isinstance(value, int) else (9, 9)})
    assert changed != problem
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(problem, field, value)
