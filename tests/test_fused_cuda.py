"""`fused` on the GPU, against the float64 reference: its own plans, and others that it might have chosen."""

import random

import pytest
import torch

from gemmconv.algorithms.base import Config
from tests import reference
from tests.cases import CASES, TILED_CASES, Case
from tests.samples import channels_last, conv_precision, expected, problem_of, sample

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.algorithms import fused, fused_plan

HOPPER = (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="no GPU with wgmma"
    ),
]

# Long sums, channels that fill several M blocks, several tiles a block.
LARGE_CASES = [
    Case(4, 96, 160, (30, 47), (3, 3), (1, 1), (1, 1)),
    Case(3, 256, 64, (16, 12), (4, 4), (2, 2), (1, 1)),
    Case(2, 64, 32, (64, 64), (2, 2), (2, 2)),
    Case(2, 45, 53, (37, 61), (3, 4), (2, 3), (2, 1), (1, 0)),
    Case(1, 2048, 80, (7, 9), (3, 3), (1, 1), (1, 1)),
]
NUMERICS = [
    pytest.param(torch.float32, "ieee", id="ieee"),
    pytest.param(torch.float32, "tf32", id="tf32"),
    pytest.param(torch.float16, "ieee", id="float16"),
    pytest.param(torch.bfloat16, "ieee", id="bfloat16"),
]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

by_case = pytest.mark.parametrize("case", [*CASES, *TILED_CASES, *LARGE_CASES], ids=lambda case: case.id)
by_numerics = pytest.mark.parametrize(("dtype", "precision"), NUMERICS)
by_layout = pytest.mark.parametrize("layout", FORMATS)


def check(case, config, plan, poison):
    """Compare an output with and without a bias, or an input gradient, each computed twice, with the reference."""
    data, exact = sample(case, config.dtype, "cuda"), expected(case, config.dtype)
    arrange = channels_last if config.memory_format is torch.channels_last else torch.Tensor.contiguous
    if plan.direction == "forward":
        call = fused.prepare_forward(config, plan)
        input, weight = arrange(data.input), arrange(data.weight)
        wanted = [((input, weight, data.bias), exact.output), ((input, weight, None), exact.output_without_bias)]
    else:
        call = fused.prepare_input_grad(config, plan)
        wanted = [((arrange(data.grad_output), arrange(data.weight)), exact.input_grad)]
    for arguments, values in wanted:
        poison("cuda")
        actual = call(*arguments)
        reference.assert_close(actual, values, config.dtype, config.precision)
        poison("cuda")
        assert torch.equal(call(*arguments), actual)


def config_of(case, dtype, precision, layout):
    device = torch.device("cuda", torch.cuda.current_device())
    return Config(problem_of(case), dtype, device, precision, memory_format=FORMATS[layout])


@by_layout
@by_numerics
@by_case
def test_fused_matches_reference(case, dtype, precision, layout, poison):
    config = config_of(case, dtype, precision, layout)
    for direction in ("forward", "input_grad"):
        plan = fused.plan_for(config, direction)
        assert plan is not None or direction == "input_grad"
        if plan is not None:
            check(case, config, plan, poison)


@by_layout
@by_numerics
@pytest.mark.parametrize("case", [*TILED_CASES[:8], *LARGE_CASES], ids=lambda case: case.id)
def test_fused_matches_reference_with_other_plans(case, dtype, precision, layout, poison):
    config = config_of(case, dtype, precision, layout)
    split, channels_last = dtype == torch.float32 and precision == "ieee", layout == "channels_last"
    for direction in ("forward", "input_grad"):
        plans = [*fused_plan.plans_of(config.problem, direction, dtype.itemsize, split, channels_last)]
        for plan in random.Random(7).sample(plans, min(3, len(plans))):
            check(case, config, plan, poison)


@by_layout
def test_fused_float32_does_not_lose_accuracy_over_long_sums(layout):
    """Error relative to float64 of sums of up to 18,432 products, beside that of cuDNN in float32."""
    torch.manual_seed(3)
    for channels in (64, 512, 2048):
        case = Case(2, channels, 64, (12, 20), (3, 3), (1, 1), (1, 1))
        config = config_of(case, torch.float32, "ieee", layout)
        memory_format = FORMATS[layout]
        x = torch.randn(case.input_shape, device="cuda").to(memory_format=memory_format)
        w = torch.randn(case.weight_shape, device="cuda")
        exact = torch.nn.functional.conv_transpose2d(x.double(), w.double(), padding=1)
        plan = fused.plan_for(config, "forward")
        ours = fused.prepare_forward(config, plan)(x, w, None)
        with conv_precision("ieee"):
            theirs = torch.nn.functional.conv_transpose2d(x, w, padding=1)
        errors = [((one.double() - exact).norm() / exact.norm()).item() for one in (ours, theirs)]
        assert errors[0] <= max(2 * errors[1], 1e-6), (channels, errors)
