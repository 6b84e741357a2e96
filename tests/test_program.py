"""Programs are plain data, and params structs are laid out as C lays them out."""

import ctypes
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.algorithms.gemm_col2im import GemmCol2im
from gemmconv.kernels import bind, forms
from gemmconv.kernels.base import Config
from gemmconv.kernels.program import (
    At,
    ByFormat,
    Launch,
    Long,
    Operand,
    Output,
    Program,
    TensorMapSpec,
    Zero,
    concatenate,
)
from gemmconv.ops.configs import Convention
from gemmconv.ops.gradients import prepare_gradients
from gemmconv.ops.pass_programs import gradient_programs
from gemmconv.pairs import Gradients
from gemmconv.selection import NATIVE
from tests import emulator, reference
from tests.cases import Case
from tests.samples import expected, problem_of, sample


def test_params_lie_as_ctypes_lays_them_out():
    spec = TensorMapSpec("a", 2, (1, 1, 1, 1), (16, 16, 16), (1, 1, 1, 1))
    fields = [("a", ctypes.c_void_p), ("b", ctypes.c_int), ("c", ctypes.c_longlong), ("d", ctypes.c_int)]
    struct = type("struct", (ctypes.Structure,), {"_fields_": [*fields, ("e", ctypes.c_void_p), ("f", ctypes.c_int)]})
    launch = of_params({"a, b, c, d": ("a", 1, Long(2**63 - 1), ByFormat(3, 4)), "e": At("e", 5), "f": -5})
    for channels_last, last in ((False, 3), (True, 4)):
        params, slots = launch.laid_out(channels_last)
        assert params == bytes(struct(0, 1, 2**63 - 1, last, 0, -5))
        assert slots == [(0, At("a")), (struct.e.offset, At("e", 5))]
    params, slots = of_params({"maps": (spec,), "a, b": ("a", 1), "other": spec}).laid_out(False)
    assert len(params) == 320
    assert slots == [(0, spec), (128, At("a")), (192, spec)]


def of_params(params, **more):
    return Launch("x.cu", {}, (1, 1, 1), (1, 1, 1), params, **more)


def step(reads, writes, overlaps=False):
    return of_params({"a, b": (reads, writes)}, overlaps=overlaps)


def test_params_have_as_many_values_as_names():
    launch = of_params({"a, b": (1, 2, 3)})
    with pytest.raises(AssertionError, match=r"x.cu: values of a, b, got \(1, 2, 3\)"):
        list(launch.fields)


def test_a_program_can_return_zeros_of_the_strides_that_they_promise(monkeypatch):
    monkeypatch.setattr(bind.launch, "clear", lambda address, size, device: ctypes.memset(address, 0, size))
    output = Output("output", (2, 3, 4, 5), (60, 1, 15, 3))
    call = Program(torch.float32, (Operand("input", None),), (output,), (Zero("output", 480),)).prepare(
        torch.device("cpu")
    )
    assert (result := call(torch.ones(1))).stride() == (60, 1, 15, 3)
    assert not result.any()


GPU = torch.device("cuda", 0)  # what is configured for; every tensor is in the memory of the CPU


@emulator.needs_compiler
@pytest.mark.parametrize("at_once", [False, True], ids=["one_by_one", "at_once"])
@pytest.mark.parametrize("layout", ["channels_last", "via_channels_last"])
def test_a_backward_pass_transposes_each_tensor_once(at_once, layout, builder, poison):
    """Whatever both gradients need: grad_output once for two kernels, and weights come back as they are returned.

    Products take the input in channels_last as it is."""
    case = Case(2, 4, 3, (5, 6), (3, 3))
    data, exact = sample(case, torch.float32, "cpu"), expected(case, torch.float32)
    through, columns = layout == "via_channels_last", GemmCol2im()
    given = torch.contiguous_format if through else torch.channels_last
    config = Config(problem_of(case), torch.float32, GPU, memory_format=given)
    gradients = Gradients(columns, columns, at_once)
    with emulator.install(builder):
        (program,) = gradient_programs(gradients._replace(via_channels_last=through), config, config)
        call = program.prepare(GPU)
        tensors = [tensor.contiguous(memory_format=given) for tensor in (data.grad_output, data.input)]
        _, brought, _ = forms.with_operand_transposes(program, (*tensors, data.weight), GPU)
        transposed = [step for step in brought.steps if str(step).startswith("layout/")]
        assert [step.params["source, target"][0] for step in transposed] == (["input"] if through else ["grad_output"])
        poison("cpu")
        grad_input, grad_weight = call(*tensors, data.weight)
    assert grad_input.is_contiguous(memory_format=given)
    reference.assert_close(grad_input, exact.input_grad, torch.float32, "ieee")
    reference.assert_close(grad_weight, exact.weight_grad, torch.float32, "ieee")


@emulator.needs_compiler
@pytest.mark.parametrize("with_bias", [False, True], ids=["two", "with_bias"])
@pytest.mark.parametrize("ours", ["input_grad", "weight_grad"])
def test_torchs_operator_computes_one_gradient_after_a_program_of_the_other(ours, with_bias, builder, monkeypatch):
    case, ran = Case(2, 4, 3, (5, 6), (3, 3)), []
    data, exact = sample(case, torch.float32, "cpu"), expected(case, torch.float32)
    chosen = {"input_grad": NATIVE, "weight_grad": NATIVE, ours: GemmCol2im()}
    torchs = NATIVE.prepare

    def recorded(config, direction):
        call = torchs(config, direction)
        return lambda *tensors: ran.append(direction) or call(*tensors)

    monkeypatch.setattr(NATIVE, "prepare", recorded)
    bound = Program.bound
    monkeypatch.setattr(Program, "bound", lambda *of: lambda *tensors: ran.append("program") or bound(*of)(*tensors))
    config = Config(problem_of(case), torch.float32, GPU)
    tensors = data.grad_output, data.input, data.weight
    with emulator.install(builder):
        gradients, convention = Gradients(**chosen), Convention(with_bias_grad=with_bias)
        found = prepare_gradients(gradients, config, config, tensors, convention)(*tensors)
    assert ran == ["program", "input_grad" if ours == "weight_grad" else "weight_grad"]
    wanted = exact.input_grad, exact.weight_grad, *[exact.bias_grad] * with_bias
    for one, right in zip(found, wanted, strict=True):
        reference.assert_close(one, right, torch.float32, "ieee")


def test_regions_that_are_never_needed_together_share_memory():
    """b is first written by a step that may begin before the one before has ended, which still reads a."""

    def offsets(*steps):
        places, total = bind._laid_out(Program(torch.float32, (), (), steps, {"a": 1000, "b": 300, "c": 300}), ())
        return {name: offset for name, (_, offset) in places.items()}, total

    waits = offsets(step("x", "a"), step("a", "y"), step("y", "b"), step("b", "c"), step("c", "y"))
    assert waits == ({"a": 0, "b": 0, "c": 512}, 1024)
    overlapping = offsets(step("x", "a"), step("a", "y"), step("y", "b", True), step("b", "c"), step("c", "y"))
    assert overlapping == ({"a": 0, "b": 1024, "c": 0}, 1536)


def test_regions_lie_where_an_output_will_be_as_long_as_it_is_not_written():
    """The output has room for one of b and c; a step that may begin early may write it while c is still read."""

    def laid_out(*steps, elements=128):
        outputs, made = (Output("y", (elements,), (1,)),), (((elements,), (1,), torch.float32),)
        operands = (Operand("x", None),)
        return bind._laid_out(Program(torch.float32, operands, outputs, steps, {"a": 600, "b": 300, "c": 300}), made)

    before = step("x", "a"), step("a", "b"), step("b", "c")
    assert laid_out(*before, step("c", "y")) == ({"a": (2, 0), "b": (0, 0), "c": (2, 0)}, 768)
    assert laid_out(*before, step("c", "y"), elements=75)[0]["b"] == (0, 0)
    assert laid_out(*before, step("c", "y"), elements=74)[0]["b"] == (2, 768)
    assert laid_out(*before, step("c", "x"), step("c", "y", True))[0]["c"] == (2, 0)
    waits = laid_out(step("x", "c"), step("c", "x"), step("x", "y"))
    early = laid_out(step("x", "c"), step("c", "x"), step("x", "y", True))
    behind = laid_out(step("x", "y"), step("x", "c"), step("c", "x"))
    assert [places["c"][0] for places, _ in (waits, early, behind)] == [0, 2, 2]


def test_what_a_gradient_keeps_aside_lies_where_the_next_ones_will_be():
    """And outputs stay in the order that they are returned in."""

    operands = (Operand("grad_output", None),)
    of_bias = Program(
        *(torch.float32, operands, (Output("grad_bias", (4,), (1,)),)),
        *((step("grad_output", "sums"), step("sums", "grad_bias")), {"sums": 1000}),
    )
    of_input = Program(
        torch.float32, operands, (Output("grad_input", (300,), (1,)),), (step("grad_output", "grad_input"),)
    )
    both = concatenate(of_bias, of_input, ("grad_output",))
    assert [output.name for output in both.outputs] == ["grad_input", "grad_bias"]
    made = [(output.shape, output.strides, torch.float32) for output in both.outputs]
    assert bind._laid_out(both, made) == ({"sums": (0, 0)}, 0)


def test_programs_one_after_the_other_share_operands_of_one_form_alone():
    first = Program(
        torch.float32,
        (Operand("input", None, argument="g"),),
        (Output("y", (1,), (1,)),),
        (Zero("input", 4),),
        {"s": 4},
    )
    other = Operand("input", torch.channels_last, argument="g")
    second = Program(torch.float32, (other,), (Output("z", (1,), (1,)),), (Zero("input", 4), Zero("s", 8)), {"s": 8})
    both = concatenate(first, second, ("g",))
    assert [operand.name for operand in both.operands] == ["input", "input_2"]
    assert both.arguments == ("g",)
    assert both.steps == (Zero("input", 4), Zero("input_2", 4), Zero("s_2", 8))
    assert both.scratch == {"s": 4, "s_2": 8}
    alike = concatenate(first, replace(first, operands=(Operand("g", None, 16),), steps=(Zero("g", 4),)), ("g",))
    assert alike.operands == (Operand("input", None, 16, argument="g"),)
    assert alike.steps == (Zero("input", 4), Zero("input", 4))
