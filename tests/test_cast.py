"""Calls that cast weight and bias themselves under autocast: layout/cast.cu, emulated, and whole calls on a GPU."""

import contextlib
import gc
import itertools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import gemmconv
from tests import emulator, reference
from tests.cases import Case
from tests.samples import config_of, expected, problem_of, sample

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.algorithms.gemm_col2im import GemmCol2im
from gemmconv.kernels import base
from gemmconv.kernels.base import with_strides
from gemmconv.kernels.layout import cast
from gemmconv.kernels.program import Operand, Output, Program
from gemmconv.ops import autocast, gradients
from gemmconv.ops.configs import Convention
from gemmconv.ops.forward import also_return_casts
from gemmconv.ops.gradients import convert_outputs

LOW = torch.float16, torch.bfloat16
CPU = torch.device("cpu")

# By itself


def check(low, sizes, poison):
    """Two tensors to 16 bits and back, each in a place of its own, beside the same by torch."""
    generator = torch.Generator().manual_seed(1)
    wide = [torch.randn(size, generator=generator) for size in sizes]
    names = ("weight", "bias")[: len(sizes)]
    for source, given in ((torch.float32, wide), (low, [one.to(low) for one in wide])):
        target = torch.float32 if source == low else low
        named = dict(zip(names, given, strict=True))
        steps = cast.casts(((name, f"{name} cast", one.numel()) for name, one in named.items()), source, target)
        # Called otherwise, since a program casts what is a weight or a bias by itself.
        operands = tuple(Operand(name, torch.contiguous_format, 16, argument=f"{name} given") for name in names)
        outputs = tuple(Output(f"{name} cast", tuple(one.shape), (1,)) for name, one in named.items())
        poison("cpu")
        made = Program(target, operands, outputs, tuple(steps)).prepare(CPU)(*given)
        for found, one in zip(made if len(sizes) > 1 else (made,), given, strict=True):
            assert torch.equal(found, one.to(target))


@emulator.needs_compiler
@pytest.mark.parametrize("sizes", [(1,), (7, 1), (8, 3), (2048, 9), (4099, 2049), (24, 4096)], ids=str)
@pytest.mark.parametrize("low", LOW, ids=str)
def test_it_rounds_and_widens_as_torch(low, sizes, builder, poison):
    with emulator.install(builder):
        check(low, sizes, poison)


@emulator.needs_compiler
@pytest.mark.parametrize(
    ("sizes", "mistake"),
    [
        ((4099, 2049), (r"is_first \? p\.first_source : p\.second_source", "p.first_source")),
        ((4099, 2049), (r"is_first \? 0 : p\.first_blocks", "0")),
        ((7, 1), (r"i < elements", "i + 1 < elements")),
    ],
    ids=str,
)
def test_emulator_notices_a_mistake(sizes, mistake, builder, poison):
    edit = emulator.Edit("layout/cast.cu", *mistake)
    with emulator.install(builder, edit), pytest.raises((AssertionError, RuntimeError)):
        check(torch.float16, sizes, poison)


# Along with a pass


def columns_program(case, dtype, layout, direction):
    return GemmCol2im().program(config_of(problem_of(case), dtype, layout), direction)


CASES = [Case(2, 3, 4, (5, 6), (3, 2), (2, 1)), Case(1, 8, 8, (4, 4), (4, 4), (2, 2), (1, 1))]


@emulator.needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_forward_pass_casts_in_front(case, layout, with_bias, builder, poison):
    """Bits equal to those of torch's casts; the casts are returned where they are to be kept."""
    data = sample(case, torch.float32, "cpu")
    input, weight = (one.contiguous(memory_format=layout) for one in (data.input.bfloat16(), data.weight))
    bias = data.bias if with_bias else None
    low = input, weight.bfloat16(), None if bias is None else bias.bfloat16()
    program = columns_program(case, torch.bfloat16, layout, "forward")
    with emulator.install(builder):
        exact = program.prepare(CPU)(*low)
        for keeps in (False, True):
            given = also_return_casts(program, low, Convention(parameter_dtype=torch.float32, returns_casts=keeps))
            call = given.prepare(CPU)
            poison("cpu")
            found, *casts = call(input, weight, bias) if keeps else (call(input, weight, bias),)
            assert torch.equal(found, exact)
            assert len(casts) == keeps * (1 + with_bias)
            for made, one in zip(casts, low[1:], strict=False):
                assert torch.equal(made, one)
                assert made.stride() == one.stride()


@emulator.needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("written", ["contiguous", "channels_last"])
def test_gradients_are_widened_behind(case, written, builder, poison):
    data, low = sample(case, torch.bfloat16, "cpu"), torch.bfloat16
    program = columns_program(case, low, torch.contiguous_format, "weight_grad")
    strides = None if written == "contiguous" else data.weight.contiguous(memory_format=torch.channels_last).stride()
    with emulator.install(builder):
        exact = program.prepare(CPU)(data.grad_output, data.input)
        call = convert_outputs(program, Convention(strides, parameter_dtype=torch.float32)).prepare(CPU)
        poison("cpu")
        found = call(data.grad_output, data.input)
    assert found.dtype == torch.float32
    assert found.stride() == (strides or exact.stride())
    assert torch.equal(found, exact.float())
    reference.assert_close(found.to(low), expected(case, low).weight_grad, low, "ieee")


# On a GPU

needs_gpu = pytest.mark.gpu
LAYERS = {
    "small": {"in_channels": 16, "out_channels": 24, "kernel_size": 3, "stride": 2, "padding": 1},
    "wide": {"in_channels": 64, "out_channels": 32, "kernel_size": 4, "stride": 2, "padding": 1},
    "grouped": {"in_channels": 16, "out_channels": 32, "kernel_size": 3, "groups": 4},
    "odd": {"in_channels": 7, "out_channels": 5, "kernel_size": (2, 3), "bias": False},
}


def made(layer, layout=torch.contiguous_format, **more):
    torch.manual_seed(3)
    module = gemmconv.ConvTranspose2d(**LAYERS[layer], **more).cuda().to(memory_format=layout)
    input = torch.randn(4, module.in_channels, 13, 10, device="cuda").contiguous(memory_format=layout)
    return module, input


def outcome(module, input, low, poison, of_input):
    """Output and gradients of a call under autocast, and by hand in the dtype that it casts to."""
    results = []
    leaves = list(module.parameters())
    for by_hand in (False, True):
        images = input.to(low).requires_grad_(of_input)
        wanted = [images] * of_input + leaves
        poison("cuda")
        if by_hand:
            weight, bias = (one if one is None else one.to(low) for one in (module.weight, module.bias))
            geometry = module.stride, module.padding, module.output_padding, module.groups, module.dilation
            output = gemmconv.conv_transpose2d(images, weight, bias, *geometry, algorithm=module.algorithm)
        else:
            with torch.autocast("cuda", low):
                output = module(images)
        grad = torch.randn(output.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
        results.append((output, *torch.autograd.grad(output, wanted, grad.to(low))))
    return results


@needs_gpu
@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("algorithm", ["auto", "direct", "gemm_col2im", "native"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("layer", "low"), [*itertools.product(LAYERS, LOW)], ids=str)
def test_the_same_bits_as_of_tensors_that_were_cast(layer, low, layout, algorithm, of_input, poison):
    module, input = made(layer, layout, algorithm=algorithm)
    for _ in ("a region that keeps its casts", "one that does not, since that one used none again"):
        found, by_hand = outcome(module, input, low, poison, of_input)
        for one, other in zip(found, by_hand, strict=True):
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
            assert torch.equal(one, other)


@needs_gpu
def test_every_call_of_a_region_has_one_cast_and_the_next_region_another():
    module, input = made("wide")
    input, kept = input.requires_grad_(), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one)
    for _ in range(2):
        with hooks, torch.autocast("cuda", torch.bfloat16):
            outputs = [module(input) for _ in range(3)]
        casts = [one for one in kept if one.shape == module.weight.shape]
        assert {one.dtype for one in casts} == {torch.bfloat16}
        assert len({one.data_ptr() for one in casts}) == 1
        del outputs, casts
        kept.clear()
        with torch.no_grad():
            before = module.weight.bfloat16()
            module.weight.data.mul_(2)  # which no version tells of
            assert torch.equal(module.weight.bfloat16(), 2 * before)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        first = module(input)
    by_hand = gemmconv.conv_transpose2d(input.bfloat16(), module.weight.bfloat16(), module.bias.bfloat16(), 2, 1)
    assert torch.equal(first, by_hand)


@needs_gpu
@pytest.mark.parametrize("grads", [False, True])
def test_casts_are_freed_with_the_region(grads):
    module, input = made("wide")
    with torch.set_grad_enabled(grads), torch.autocast("cuda", torch.bfloat16):
        module(input)
        cache = autocast.cast_cache(input.device, torch.bfloat16)
        casts = [StorageWeakRef(cache.find(one).cast.untyped_storage()) for one in module.parameters()]
        del cache
        gc.collect()
        assert not any(one.expired() for one in casts)
    assert all(one.expired() for one in casts)


@needs_gpu
def test_autocast_to_float32_casts_nothing():
    module, input = made("wide")
    input = input.requires_grad_()
    with torch.autocast("cuda", torch.float32):
        output = module(input)
    found = torch.autograd.grad(output, (input, *module.parameters()), torch.ones_like(output))
    output = module(input)
    for one, other in zip(
        found, torch.autograd.grad(output, (input, *module.parameters()), torch.ones_like(output)), strict=True
    ):
        assert torch.equal(one, other)


@needs_gpu
@pytest.mark.parametrize("trains", [False, True])
def test_a_layer_that_was_made_in_inference_mode(trains):
    with torch.inference_mode():
        module, input = made("small")
        module.requires_grad_(trains)
    images = input.clone().requires_grad_()
    with torch.autocast("cuda", torch.float16):
        output = module(images)
    (found,) = torch.autograd.grad(output, images, torch.ones_like(output))
    assert found.isfinite().all()
    with torch.no_grad(), torch.autocast("cuda", torch.float16):
        assert torch.equal(module(images), output)


@needs_gpu
def test_saved_tensors_that_hooks_bring_back_in_another_format(poison):
    module, input = made("wide", torch.channels_last)
    images = input.requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: one, torch.Tensor.contiguous)
    found = []
    for context in (hooks, contextlib.nullcontext(), hooks):
        for autocast_on in (False, True):
            with context, torch.autocast("cuda", torch.bfloat16, enabled=autocast_on):
                output = module(images)
            poison("cuda")
            found.append(torch.autograd.grad(output, (images, *module.parameters()), torch.ones_like(output)))
    for one in (found[0], found[4]):
        for gradient, plain in zip(one, found[2], strict=True):
            torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-3)
    for one in (found[1], found[5]):
        for gradient, plain in zip(one, found[3], strict=True):
            torch.testing.assert_close(gradient, plain, rtol=2e-2, atol=2e-1)


@needs_gpu
@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen_parameters(frozen, poison):
    module, input = made("wide")
    for name in ("weight", "bias") if frozen == "both" else (frozen,):
        getattr(module, name).requires_grad_(False)
    images = input.bfloat16().requires_grad_()
    wanted = [images, *(one for one in module.parameters() if one.requires_grad)]
    with torch.autocast("cuda", torch.bfloat16):
        output = module(images)
    found = torch.autograd.grad(output, wanted, torch.ones_like(output))
    output = gemmconv.conv_transpose2d(images, module.weight.bfloat16(), module.bias.bfloat16(), 2, 1)
    for one, other in zip(found, torch.autograd.grad(output, wanted, torch.ones_like(output)), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@needs_gpu
@pytest.mark.parametrize("algorithm", ["auto", "gemm_col2im", "native"])
def test_a_weight_gradient_comes_in_the_weights_format(algorithm, monkeypatch):
    """cuDNN's has it already."""

    def copied(result, strides):
        assert algorithm != "native", "a copy"
        return with_strides(result, strides)

    for module in (base, gradients):
        monkeypatch.setattr(module, "with_strides", copied)
    module, input = made("small", torch.channels_last, algorithm=algorithm)
    for images in (input[:1], input[:1].clone().requires_grad_()):
        output = module(images)
        found = torch.autograd.grad(output, module.weight, torch.ones_like(output))[0]
        assert found.stride() == module.weight.stride()


@needs_gpu
def test_gradients_of_gradients_are_those_of_torch():
    module, input = made("small")
    theirs = torch.nn.ConvTranspose2d(**LAYERS["small"]).cuda()
    theirs.load_state_dict(module.state_dict())

    def second(layer):
        images = input.bfloat16().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            output = layer(images)
        (first,) = torch.autograd.grad(output, images, torch.ones_like(output), create_graph=True)
        return torch.autograd.grad(first.float().square().sum(), layer.weight)[0]

    found, exact = second(module), second(theirs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2 * exact.abs().max().item())


@needs_gpu
def test_a_weight_that_changed_before_a_second_backward_pass_is_an_error():
    module, input = made("small")
    with torch.autocast("cuda", torch.bfloat16):
        output = module(input.requires_grad_())
    with torch.no_grad():
        module.weight.mul_(2)
    (first,) = torch.autograd.grad(output, input, torch.ones_like(output), retain_graph=True)  # as torch's own
    assert first.isfinite().all()
    with pytest.raises(RuntimeError, match="weight must be what it was in the forward pass"):
        torch.autograd.grad(output, input, torch.ones_like(output), create_graph=True)


@needs_gpu
def test_a_region_without_a_cache_and_inference_mode(poison):
    module, input = made("small")
    by_hand = gemmconv.conv_transpose2d(input.half(), module.weight.half(), module.bias.half(), 2, 1)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            poison("cuda")
            for cache in (False, True):
                with torch.autocast("cuda", torch.float16, cache_enabled=cache):
                    for _ in range(2):
                        assert torch.equal(module(input), by_hand)
    with torch.autocast("cuda", torch.float16, cache_enabled=False):
        assert torch.equal(module(input), by_hand)


@needs_gpu
def test_a_cuda_graph_casts_what_the_weight_is_at_replay():
    module, input = made("wide")
    with torch.no_grad():
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                module(input)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.autocast("cuda", torch.bfloat16):
            output = module(input)
        module.weight.mul_(0.5)
        graph.replay()
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(output, module(input))
