"""Layers and functions of one, two and three axes beside torch's own."""

import io
import random

import numpy as np
import pytest
import torch

import gemmconv
from gemmconv.geometry import output_extent
from gemmconv.ops import plain
from tests.processes import output_of
from tests.samples import REFUSED_ON_A_CPU, conv_precision

FUNCTIONS = {1: gemmconv.conv_transpose1d, 2: gemmconv.conv_transpose2d, 3: gemmconv.conv_transpose3d}
TORCHS = {rank: getattr(torch.nn.functional, f"conv_transpose{rank}d") for rank in FUNCTIONS}
LAYERS = {1: gemmconv.ConvTranspose1d, 2: gemmconv.ConvTranspose2d, 3: gemmconv.ConvTranspose3d}
ALGORITHMS = "auto", "direct", "fused", "gemm_col2im", "native"
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
each_rank = pytest.mark.parametrize("rank", FUNCTIONS)
COUNT = 40  # random layers of each rank and algorithm; those of nine slow parts are 1,800 of each rank


def random_call(rank, draw, device="cpu", dtype=torch.float64):
    """Tensors and geometry of a small random layer; a third have a kernel equal to the stride."""
    while True:
        groups = draw.choice((1, 1, 1, 2, 3))
        channels = groups * draw.randint(1, 6), draw.randint(1, 6)
        kernel, stride = [draw.randint(1, 4) for _ in range(rank)], [draw.randint(1, 3) for _ in range(rank)]
        dilation = [draw.randint(1, 2) for _ in range(rank)]
        if draw.random() < 0.3:
            kernel, dilation = list(stride), [1] * rank
        padding = [draw.randint(0, d * (k - 1) // 2) for k, d in zip(kernel, dilation, strict=True)]
        more = [draw.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
        size = [draw.randint(1, 7) for _ in range(rank)]
        if min(map(output_extent, size, kernel, stride, padding, more, dilation)) > 0:
            break
    torch.manual_seed(draw.randint(0, 1 << 30))
    shapes = (draw.randint(1, 3), channels[0], *size), (channels[0], channels[1], *kernel), (channels[1] * groups,)
    tensors = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    if rank in FORMATS and draw.random() < 0.5:
        tensors[0] = tensors[0].contiguous(memory_format=FORMATS[rank])
    tensors[2] = draw.choice((tensors[2], None))
    return tensors, (stride, padding, more, groups, dilation)


def check(rank, draw, algorithm, device="cpu", dtype=torch.float64, bar=1e-12):
    """Compare output and gradients of a random layer with torch's in float64. False if the algorithm refuses it.

    Relative errors may be ``bar``, or twice those of torch's own operator in this dtype.
    """
    tensors, geometry = random_call(rank, draw, device, dtype)
    given = [one if one is None else one.requires_grad_() for one in tensors]
    exact = [one if one is None else one.detach().double().cpu().requires_grad_() for one in tensors]
    try:
        output = FUNCTIONS[rank](*given, *geometry, algorithm=algorithm)
    except NotImplementedError:
        return False
    wanted = TORCHS[rank](*exact, *geometry)
    grad = torch.randn(wanted.shape, dtype=dtype)
    plain = TORCHS[rank](*given, *geometry)
    leaves, exact_leaves = ([one for one in of if one is not None] for of in (given, exact))
    found = output, *torch.autograd.grad(output, leaves, grad.to(device))
    torchs = plain, *torch.autograd.grad(plain, leaves, grad.to(device))
    truth = wanted, *torch.autograd.grad(wanted, exact_leaves, grad.double())
    for place, (one, other, true) in enumerate(zip(found, torchs, truth, strict=True)):
        assert one.shape == true.shape, (algorithm, geometry)
        # A bias's gradient may be one sum whose terms cancel: its error is relative to them.
        norm = (grad if place == 3 else true).norm().clamp_min(1e-30)
        error, of_torch = ((of.double().cpu() - true).norm() / norm for of in (one, other))
        about = float(error), algorithm, [of if of is None else of.shape for of in tensors], geometry
        assert error <= max(bar, 2 * of_torch), about
    return True


@each_rank
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("part", ["", *(pytest.param(f" {i}", marks=pytest.mark.slow) for i in range(9))])
def test_random_layers_are_torchs_to_float64(rank, algorithm, part):
    if algorithm in REFUSED_ON_A_CPU:
        pytest.skip("it needs the extension in C")
    draw = random.Random(f"{rank} {algorithm}{part}")
    assert sum(check(rank, draw, algorithm) for _ in range(COUNT)) > COUNT // 2


def check_on_a_gpu(seed, count, rank, dtype, bar):
    """Compare ``count`` random layers that are served: three algorithms take all that are drawn, two may refuse."""
    draw, served = random.Random(seed), 0
    with conv_precision("ieee"):
        for number in range(2 * count):
            served += check(rank, draw, ALGORITHMS[number % len(ALGORITHMS)], "cuda", dtype, bar)
            if served == count:
                return
    raise AssertionError(f"only {served} of {2 * count} layers are served")


@pytest.mark.gpu
@each_rank
@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize("part", ["", *(pytest.param(f" {i}", marks=pytest.mark.slow) for i in range(5))])
def test_random_layers_on_a_gpu_are_torchs_to_float64(rank, dtype, bar, part):
    """The 45 slow parts are 2,025 layers; pytest-xdist spreads them over processes and GPUs."""
    check_on_a_gpu(f"{rank} {dtype}{part}", 45 if part else 60, rank, dtype, bar)


# torch's own tests inherit from it; their samples do not use it.
STUB = """
import copy, sys, types, unittest, torch, gemmconv
stub = types.ModuleType("expecttest")
stub.TestCase = unittest.TestCase
sys.modules.setdefault("expecttest", stub)
from tests.test_rank import ALGORITHMS, FUNCTIONS, TORCHS
compared = 0
"""


def test_operator_database_of_torch():
    """torch's samples of its functions; in a process of its own, since their module changes torch's settings."""
    code = """
from torch.testing._internal.common_methods_invocations import op_db
for rank in FUNCTIONS:
    (info,) = [one for one in op_db if one.name == f"nn.functional.conv_transpose{rank}d"]
    for sample in info.sample_inputs("cpu", torch.float64, requires_grad=False):
        wanted = TORCHS[rank](sample.input, *sample.args, **sample.kwargs)
        for algorithm in ALGORITHMS:
            found = FUNCTIONS[rank](sample.input, *sample.args, **sample.kwargs, algorithm=algorithm)
            torch.testing.assert_close(found, wanted)
            compared += 1
print(compared)
"""
    assert int(output_of(STUB + code)) >= 3 * len(ALGORITHMS)


def test_module_database_of_torch():
    """torch's samples of its modules, lazy ones too, converted: outputs and all gradients, with every algorithm."""
    code = """
from torch.testing._internal.common_modules import module_db
for info in module_db:
    if "ConvTranspose" not in info.module_cls.__name__:
        continue
    for sample in info.module_inputs_func(info, "cpu", torch.float64, requires_grad=False, training=False):
        made, given = sample.constructor_input, sample.forward_input
        module = info.module_cls(*made.args, **made.kwargs).double()
        wanted = module(*given.args, **given.kwargs)
        grads = torch.autograd.grad(wanted.sum(), [*module.parameters()])
        for algorithm in ALGORITHMS:
            ours = gemmconv.convert(copy.deepcopy(module), algorithm=algorithm)
            assert type(ours).__module__ == "gemmconv.module", type(ours)
            found = ours(*given.args, **given.kwargs)
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(torch.autograd.grad(found.sum(), [*ours.parameters()]), grads)
            compared += 1
print(compared)
"""
    assert int(output_of(STUB + code)) == 6 * 2 * len(ALGORITHMS)


def tensors_of(rank, dtype=torch.float64):
    return torch.randn(2, 3, *(4, 3, 5)[:rank], dtype=dtype), torch.randn(3, 2, *(3,) * rank, dtype=dtype)


@each_rank
def test_gradients_of_gradients(rank):
    input, weight = (one.requires_grad_() for one in tensors_of(rank))
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def call(*tensors):
        return FUNCTIONS[rank](*tensors, 2, 1, algorithm="gemm_col2im")

    assert torch.autograd.gradcheck(call, (input, weight, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (input, weight, bias), fast_mode=True)


@each_rank
def test_tangents_and_what_no_tap_reaches(rank):
    """With a kernel of 1 and a stride of 2 every other output is the bias, whatever the input holds."""
    input, weight = tensors_of(rank)
    weight, bias = weight[(..., *(slice(1),) * rank)], torch.randn(2, dtype=torch.float64)
    for one in (input, weight):
        found = torch.func.jvp(
            lambda input, weight: FUNCTIONS[rank](input, weight, bias, 2, algorithm="gemm_col2im"),
            *((input, weight), (input if one is input else 0 * input, weight if one is weight else 0 * weight)),
        )
        wanted = TORCHS[rank](input, weight, bias, 2)
        torch.testing.assert_close(found[0], wanted)
        torch.testing.assert_close(found[1], wanted - bias.view(-1, *(1,) * rank))
    input.flatten()[0] = torch.inf
    found, wanted = (
        FUNCTIONS[rank](input, weight, bias, 2, algorithm="gemm_col2im"),
        TORCHS[rank](input, weight, bias, 2),
    )
    torch.testing.assert_close(found, wanted, equal_nan=True)


@each_rank
def test_transforms_compiled_graphs_and_exports(rank):
    layer = LAYERS[rank](3, 2, 3, stride=2, padding=1, algorithm="gemm_col2im").double()
    input, _ = tensors_of(rank)
    wanted = layer(input)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input), wanted)
    with torch.no_grad(), torch.device("meta"):
        torch.testing.assert_close(compiled(input), wanted)
    torch.testing.assert_close(torch.export.export(layer, (input,)).module()(input), wanted)
    torch.jit.save(torch.jit.trace(layer, 2 * input[:1]), file := io.BytesIO())
    torch.testing.assert_close(torch.jit.load(io.BytesIO(file.getvalue()))(input), wanted)
    images = torch.stack([input, 2 * input])
    torch.testing.assert_close(torch.func.vmap(layer)(images)[0], wanted)
    gradients = torch.func.grad(lambda one: layer(one).square().sum())(input)
    of_torch = torch.autograd.grad(layer(leaf := input.clone().requires_grad_()).square().sum(), leaf)
    torch.testing.assert_close(gradients, *of_torch)


@each_rank
@pytest.mark.parametrize("kernel_size", [2, 3], ids="k{}".format)
@pytest.mark.parametrize("records", [False, True])
def test_compiled_in_one_graph(rank, kernel_size, records, device):
    """Under a stride of 2 a kernel of 2 has one product for all phases, one of 3 has a product for each phase."""
    algorithm = "auto" if device == "cuda" else "gemm_col2im"  # on a CPU auto leaves traced calls to torch
    layer = LAYERS[rank](16, 16, kernel_size, stride=2, algorithm=algorithm, device=device)
    input = torch.randn(2, 16, *(4, 3, 5)[:rank], device=device, requires_grad=records)
    torch.compiler.reset()
    with torch.set_grad_enabled(records), conv_precision("ieee"):
        output = torch.compile(layer, backend="aot_eager", fullgraph=True)(input)
        torch.testing.assert_close(output, layer(input))
        if records:
            gradients = torch.autograd.grad(output.sum(), (input, layer.weight))
            torch.testing.assert_close(gradients, torch.autograd.grad(layer(input).sum(), (input, layer.weight)))


@each_rank
def test_calls_on_the_meta_device_and_of_no_images(rank):
    """The meta device has no autocast, which torch refuses to answer for."""
    layer, input = LAYERS[rank](3, 2, 3, 2, dilation=2, algorithm="gemm_col2im"), tensors_of(rank, torch.float32)[0]
    shape = layer(input).shape
    layer(input[:0]).sum().backward()
    assert layer(input[:0]).shape == (0, *shape[1:])
    layer, input = layer.to("meta"), input.to("meta")
    assert layer(input).shape == shape
    assert gemmconv.explain(layer, input, gpu="A100").input_shape == input.shape
    with pytest.raises(RuntimeError, match="weight must be on the device of input, cpu, got meta"):
        layer(tensors_of(rank, torch.float32)[0])
    with pytest.raises(TypeError, match=r"input must be a torch\.Tensor, got NoneType"):
        FUNCTIONS[rank](None, layer.weight)


@each_rank
def test_autocast_computes_in_its_dtype(rank):
    layer, input = LAYERS[rank](3, 2, 3, stride=2, algorithm="gemm_col2im"), tensors_of(rank, torch.float32)[0]
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(input)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(output.float(), layer(input), atol=0.05, rtol=0.05)


@each_rank
def test_one_without_a_batch_arrays_and_output_size(rank):
    layer = LAYERS[rank](3, 2, 3, stride=2, padding=1).double()
    theirs = LAYERS[rank].__mro__[2](3, 2, 3, stride=2, padding=1).double()
    theirs.load_state_dict(layer.state_dict())
    input, weight = tensors_of(rank)
    torch.testing.assert_close(layer(input[0]), layer(input)[0])
    size = [2 * extent for extent in input.shape[2:]]
    torch.testing.assert_close(layer(input, output_size=size), theirs(input, output_size=size))
    with pytest.raises(ValueError, match="output_size must be from"):
        layer(input, output_size=[99] * rank)
    array = FUNCTIONS[rank](input.numpy(), weight.numpy(), stride=2)
    assert isinstance(array, np.ndarray)
    np.testing.assert_allclose(array, TORCHS[rank](input, weight, stride=2))


@each_rank
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"stride": 0}, RuntimeError, "stride must be at least 1"),
        ({"stride": "2"}, TypeError, "stride must be an int"),
        ({"stride": (1, 2, 1, 2)}, RuntimeError, "stride must have one"),
        ({"padding": 9}, RuntimeError, "padding must leave an output of at least 1"),
        ({"output_padding": 3}, RuntimeError, "output_padding must be less than"),
        ({"groups": 2}, RuntimeError, "weight must have a number of input channels"),
        ({"algorithm": "best"}, ValueError, "algorithm must be one of"),
        ({"bias": torch.zeros(5)}, RuntimeError, "bias must have"),
        ({"input": torch.zeros(1, 1, 1, 1, 1, 1)}, RuntimeError, "input must have shape"),
        ({"weight": torch.zeros(3)}, RuntimeError, "weight must have shape"),
        ({"input": 3}, TypeError, "input must be a torch.Tensor"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_are_named_in_the_words_of_the_function(rank, arguments, kind, words):
    input, weight = tensors_of(rank)
    call = {"input": input, "weight": weight, "bias": None, **arguments}
    with pytest.raises(kind, match=f"conv_transpose{rank}d: {words}"):
        FUNCTIONS[rank](**call)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_signals_without_gradients_take_a_prepared_call(algorithm, device):
    """Its output has no axis for the height; other lengths, batches and settings have calls of their own."""
    layer = gemmconv.ConvTranspose1d(16, 8, 4, 2, 1, algorithm=algorithm).to(device)
    theirs = torch.nn.ConvTranspose1d(16, 8, 4, 2, 1).to(device)
    theirs.load_state_dict(layer.state_dict())
    with torch.no_grad(), conv_precision("ieee"):
        for shape in (2, 16, 12), (2, 16, 12), (16, 12), (1, 16, 33), (0, 16, 5):
            signal = torch.randn(shape, device=device)
            try:
                found = layer(signal)
            except NotImplementedError as refusal:
                pytest.skip(str(refusal))
            wanted = theirs(signal) if 0 not in shape else signal.new_empty(0, 8, 10)
            assert found.is_contiguous()
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        with pytest.raises(RuntimeError, match="conv_transpose1d: input must have the 16 channels"):
            layer(torch.randn(2, 3, 12, device=device))


@pytest.mark.parametrize("algorithm", ["auto", "gemm_col2im"])
def test_signals_with_gradients_take_a_prepared_call(algorithm, device):
    """Gradients, some of them or all, and gradients of gradients, are those of torch."""
    layer = gemmconv.ConvTranspose1d(16, 8, 4, 2, 1, algorithm=algorithm).to(device, torch.float64)
    theirs = torch.nn.ConvTranspose1d(16, 8, 4, 2, 1).to(device, torch.float64)
    theirs.load_state_dict(layer.state_dict())
    for needs_input, needs_weight in (True, True), (False, True), (True, False), (True, True):
        signal = torch.randn(2, 16, 12, device=device, dtype=torch.float64, requires_grad=needs_input)
        found = []
        for one in layer, theirs:
            one.weight.requires_grad_(needs_weight)
            leaves = [leaf for leaf in (signal, *one.parameters()) if leaf.requires_grad]
            first = torch.autograd.grad(one(signal).square().sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)
            plain = torch.autograd.grad(one(signal).square().sum(), leaves)
            found.append((*first, *second, *plain))
            assert [grad.shape for grad in plain] == [leaf.shape for leaf in leaves]
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("last", [False, True])
def test_a_volume_keeps_its_memory_format(last):
    layer = gemmconv.ConvTranspose3d(4, 6, 4, stride=2, padding=1, algorithm="gemm_col2im")
    volume = torch.randn(2, 4, 3, 5, 6)
    form = torch.channels_last_3d if last else torch.contiguous_format
    assert layer(volume.contiguous(memory_format=form)).is_contiguous(memory_format=form)


def test_depth_taps_are_summed_before_a_result_is_rounded():
    """All four depth taps of an output meet in one product, so bfloat16 is rounded once."""
    volume, weight = torch.randn(1, 64, 6, 6, 6), torch.randn(64, 16, 8, 3, 3)
    low = gemmconv.conv_transpose3d(volume.bfloat16(), weight.bfloat16(), stride=2, algorithm="gemm_col2im")
    exact = TORCHS[3](volume.bfloat16().double(), weight.bfloat16().double(), stride=2)
    assert torch.equal(low, exact.bfloat16()) or (low.double() - exact).norm() / exact.norm() < 1.8e-3


def test_an_error_of_a_prepared_call_on_signals_is_raised_and_the_call_is_not_made_again(monkeypatch):
    calls = []

    def call(*tensors):
        calls.append(tensors)
        raise RuntimeError("no memory")

    monkeypatch.setattr(plain, "prepare_signal", lambda *_: call)
    with pytest.raises(RuntimeError, match="no memory"):
        gemmconv.ConvTranspose1d(3, 5, 4, 2)(torch.randn(2, 3, 11))
    assert len(calls) == 1
