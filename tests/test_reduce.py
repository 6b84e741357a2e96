"""Partial sums that are added up, in either format of a weight and either dtype: splits/reduce.cu, emulated."""

import pytest
import torch

from gemmconv.device import REFERENCE
from gemmconv.geometry import Problem
from gemmconv.kernels.base import strides_of
from gemmconv.ops.configs import Convention
from gemmconv.ops.gradients import convert_outputs
from tests import emulator

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.kernels.forms import launches
from gemmconv.kernels.program import Operand, Output, Program, Zero
from gemmconv.kernels.splits import reduce

CPU = torch.device("cpu")
LAST = torch.channels_last

# Input and output channels, groups, taps of each axis, slices.
LAYERS = {
    "usual": (6, 16, 1, (3, 3), 5),
    "groups": (6, 18, 3, (2, 2), 3),
    "odd": (5, 7, 1, (2, 3), 4),
    "wide": (3, 80, 1, (4, 4), 9),
    "one slice": (4, 24, 1, (3, 1), 1),
}


def program_of(problem, dtype, slices):
    """The sums of partial sums, which are given."""
    columns = problem.out_channels // problem.groups
    shape = problem.groups, problem.gemm_k, columns
    macros = reduce.wgrad_macros(problem, dtype, slices, REFERENCE.multiprocessors)
    step = reduce._launch(macros, shape, slices, "partials", "grad_weight")
    size = problem.weight_shape
    output = Output("grad_weight", size, strides_of(size, torch.contiguous_format), torch.contiguous_format)
    return Program(dtype, (Operand("partials", torch.contiguous_format, 16),), (output,), (step,))


def check(layer, dtype, layout, widens, poison):
    *sizes, kernel, slices = LAYERS[layer]
    problem = Problem(2, *sizes, (4, 4), kernel)
    groups, columns = problem.groups, problem.out_channels // problem.groups
    partial = reduce.wgrad_partial_dtype(dtype, slices)
    generator = torch.Generator().manual_seed(1)
    partials = torch.randn(slices, groups, problem.taps, problem.gemm_k, columns, generator=generator).to(partial)
    exact = partials.double().sum(0).permute(0, 2, 3, 1).reshape(problem.weight_shape)
    strides = strides_of(problem.weight_shape, layout)
    convention = Convention(strides if layout is LAST else None, parameter_dtype=torch.float32 if widens else None)
    program = convert_outputs(program_of(problem, dtype, slices), convention)
    assert len(launches(program, (partials,), CPU)) == 1, "one launch does it all"
    poison("cpu")
    found = program.prepare(CPU)(partials)
    assert (found.dtype, found.stride()) == (torch.float32 if widens else dtype, strides)
    if dtype.itemsize == 2:
        assert torch.equal(found, found.to(dtype).to(found.dtype)), "rounded before it is widened"
    # Half a unit of the last place, and what float32 loses over the slices.
    bound = (torch.finfo(dtype).eps / 2 + slices * 2.0**-24) * partials.double().abs().sum(0).max()
    assert (found.double() - exact).abs().max() <= bound


@emulator.needs_compiler
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=str)
def test_sums_in_every_form(layer, dtype, layout, builder, poison):
    with emulator.install(builder):
        for widens in (False, True)[: 1 + (dtype.itemsize == 2)]:
            check(layer, dtype, layout, widens, poison)


@emulator.needs_compiler
@pytest.mark.parametrize(
    "mistake",
    [
        (r"place / RUN \* p\.columns", "0"),
        (r"place % RUN >= columns", "place % RUN + 1 >= columns"),
        (r"narrow<ELEMENT_T>\(total\)", "total"),
    ],
    ids=str,
)
def test_emulator_notices_a_mistake(mistake, builder, poison):
    edit = emulator.Edit("splits/reduce.cu", *mistake)
    with emulator.install(builder, edit), pytest.raises((AssertionError, RuntimeError)):
        check("odd", torch.bfloat16, LAST, True, poison)


def test_what_cannot_write_another_form_says_so():
    problem = Problem(2, 4, 6, 1, (4, 4), (1, 1))
    (step,) = program_of(problem, torch.float32, 2).steps
    assert reduce.in_channels_last(step, 4) is None  # of one tap
    assert reduce.widened(step, torch.float32) is not None
    assert reduce.widened(Zero("grad_weight", 4), torch.float32) is None
