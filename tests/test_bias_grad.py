"""Gradients of biases by csrc/splits/bias_grad.cu: in the emulator, and on a GPU."""

from dataclasses import replace

import pytest
import torch

import gemmconv
from tests import emulator, reference
from tests.cases import Case
from tests.samples import config_of, problem_of

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.kernels.splits import bias_grad

FORMATS = torch.contiguous_format, torch.channels_last
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64
# Vectors of one element, and of 16 bytes; one pixel; blocks of several channels; more channels than a block has lanes.
CASES = [
    Case(3, 2, 5, (3, 7), (2, 3)),
    Case(2, 2, 8, (8, 8), (4, 4), (2, 2), (1, 1)),
    Case(7, 2, 24, (1, 1), (1, 1)),
    Case(1, 2, 300, (5, 4), (1, 1)),
]


def check(config, device, poison):
    grad_output = torch.randn(config.problem.output_shape, dtype=config.dtype, device=device)
    grad_output = grad_output.contiguous(memory_format=config.memory_format)
    call = bias_grad.program(config).prepare(config.device)
    poison(device)
    found = call(grad_output)
    assert found.dtype == config.dtype
    exact = reference.to_array(grad_output).sum((0, 2, 3))
    reference.assert_close(found, exact, config.dtype, "ieee")
    return call, grad_output, found


@emulator.needs_compiler
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", FORMATS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_sums_match_reference(case, layout, dtype, slices, builder, poison, monkeypatch):
    monkeypatch.setattr(bias_grad, "slices_of", lambda items, least, most: min(slices, items))
    config = config_of(problem_of(case), dtype, layout)
    with emulator.install(builder):
        check(replace(config, device=torch.device("cpu")), "cpu", poison)


def test_several_slices_are_for_many_items():
    few = config_of(problem_of(CASES[1]), torch.float32)
    many = replace(few, problem=replace(few.problem, batch=64, input_size=(256, 256)))
    assert [len(bias_grad.program(config).steps) for config in (few, many)] == [1, 2]
    assert bias_grad.program(replace(few, problem=replace(few.problem, batch=0))) is None
    assert bias_grad.program(replace(many, problem=replace(many.problem, input_size=(65536, 65536)))) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", FORMATS, ids=str)
@pytest.mark.parametrize("case", [*CASES, Case(16, 3, 64, (64, 63), (4, 4), (2, 2))], ids=lambda case: case.id)
def test_sums_on_the_gpu(case, layout, dtype, poison):
    index = torch.cuda.current_device()
    config = config_of(problem_of(case), dtype, layout)
    call, grad_output, found = check(replace(config, device=torch.device("cuda", index)), "cuda", poison)
    assert torch.equal(call(grad_output), found)


@pytest.mark.parametrize("wanted", ["input", "weight", "input weight"])
@pytest.mark.parametrize("layout", FORMATS, ids=str)
def test_it_comes_with_other_gradients(layout, wanted, device):
    """The gradients of a plain backward pass."""
    leaves = {"input": torch.randn(3, 8, 5, 6), "weight": torch.randn(8, 6, 3, 3), "bias": torch.randn(6)}
    leaves = {name: leaf.to(device, torch.float64) for name, leaf in leaves.items()}
    leaves |= {name: leaves[name].contiguous(memory_format=layout) for name in ("input", "weight")}
    asked = [leaves[name].requires_grad_() for name in (*wanted.split(), "bias")]
    for algorithm in ("gemm_col2im", "native"):
        output = gemmconv.conv_transpose2d(*leaves.values(), stride=2, algorithm=algorithm)
        exact = torch.nn.functional.conv_transpose2d(*leaves.values(), stride=2)
        grad_output = torch.randn_like(output)
        found, right = (torch.autograd.grad(one, asked, grad_output) for one in (output, exact))
        for one, other, leaf in zip(found, right, asked, strict=True):
            assert algorithm == "native" or one.stride() == leaf.stride()
            torch.testing.assert_close(one, other)
