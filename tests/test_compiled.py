"""torch.compile: compiled networks compute what they do without it, and call the operators as little as that takes."""

import copy
import functools

import pytest
import torch
import torch._dynamo.testing
import torch._functorch.config
import torch._inductor.config
from torch._inductor import lowering
from torch._inductor.utils import run_and_get_code

import gemmconv
from gemmconv.device import MEASURED
from gemmconv.kernels.base import PASSES
from gemmconv.ops import ahead, compiled, configs
from gemmconv.ops.call_cache import tensor_signature
from gemmconv.ops.configs import Convention
from gemmconv.ops.schemas import OPERATORS, WithoutData, operator_name, split_arguments
from tests.emulator import compiler

# From torch's own compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
compiles_cpp = pytest.mark.skipif(
    compiler() is None and not torch.cuda.is_available(), reason="inductor needs a C++ compiler for the CPU"
)
SERVED = (
    "getattr(torch.ops.gemmconv.conv_transpose2d{0}.default, 'served', torch.ops.gemmconv.conv_transpose2d{0}.default)("
)


def small_network(device):
    torch.manual_seed(3)
    network = torch.nn.Sequential(
        gemmconv.ConvTranspose2d(3, 8, 4, stride=2, padding=1),
        torch.nn.ReLU(),
        gemmconv.ConvTranspose2d(8, 4, 3, stride=2, groups=2, output_padding=1, dilation=2, bias=False),
    )
    return network.to(device)


def outcome(network, images):
    """Return the output, the input's gradient and the parameters' gradients of one step."""
    images = images.detach().requires_grad_()
    output = network(images)
    output.square().mean().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    for parameter in network.parameters():
        parameter.grad = None
    return [output.detach(), images.grad, *gradients]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """One that neither starts processes nor asks a C++ compiler for vectors, either of which takes long.

    Nor does it keep code, which would be that of another lowering.
    """
    torch.compiler.reset()
    settings = {"compile_threads": 1, "cpp.vec_isa_ok": False, "fx_graph_cache": False}
    with torch._inductor.config.patch(settings), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("backend", "dynamic", "layout"),
    [
        ("aot_eager", False, torch.contiguous_format),
        ("aot_eager", True, torch.contiguous_format),
        ("aot_eager", False, torch.channels_last),
        pytest.param("inductor", True, torch.contiguous_format, marks=compiles_cpp),
        pytest.param("inductor", False, torch.contiguous_format, marks=[compiles_cpp, pytest.mark.slow]),
    ],
)
def test_compiled_network_matches_eager(backend, dynamic, layout, device):
    network = small_network(device).to(memory_format=layout)
    compiled = torch.compile(copy.deepcopy(network), fullgraph=True, dynamic=dynamic, backend=backend)
    sizes = [(2, 3, 5, 6), (3, 3, 7, 4)] if dynamic else [(2, 3, 5, 6)]
    for size in sizes:
        images = torch.randn(size, device=device).contiguous(memory_format=layout)
        for actual, wanted in zip(outcome(compiled, images), outcome(network, images), strict=True):
            torch.testing.assert_close(actual, wanted)
            assert actual.stride() == wanted.stride()


def test_compiled_network_with_dynamic_sizes_compiles_once(device):
    network = small_network(device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(network, fullgraph=True, dynamic=True, backend=counter)
    for size in [(2, 3, 5, 6), (3, 3, 7, 4), (4, 3, 6, 9)]:
        compiled(torch.randn(size, device=device))
    assert counter.frame_count == 1


def test_export_keeps_the_operator(device):
    network = small_network(device)
    images = torch.randn(2, 3, 5, 6, device=device)
    program = torch.export.export(network, (images,))
    torch.testing.assert_close(program.module()(images), network(images))
    assert "gemmconv.conv_transpose2d" in str(program.graph)


# What inductor makes of the operators.

LAYER = {"stride": 2, "padding": 1, "algorithm": "gemm_col2im"}
OPTIONS = [2, 2], [1, 1], [0, 0], 1, [1, 1], "gemm_col2im", None, None  # the same, as operators take it
SHAPES = {"input": (2, 6, 4, 5), "weight": (6, 4, 4, 3), "bias": (4,), "grad_output": (2, 4, 8, 9)}

ROUNDED = {"rtol": 1e-3, "atol": 1e-3}  # of torch's convolutions, in TF32 on a GPU
HALF = {"rtol": 2e-2, "atol": 2e-2}


def leaves(device, wanted=()):
    """A layer's tensors, of which those named want gradients."""
    torch.manual_seed(4)
    return {name: torch.randn(shape, device=device, requires_grad=name in wanted) for name, shape in SHAPES.items()}


def step(function, data, wanted):
    """The output of a function of a layer's tensors, and the gradients that are wanted of it."""
    output = function(data["input"], data["weight"], data["bias"])
    given = [data[name] for name in wanted]
    return [output, *torch.autograd.grad(output, given, data["grad_output"])] if wanted else [output]


@pytest.mark.parametrize(
    ("wanted", "name"),
    [((), ""), (("input",), "_input_grad"), (("weight",), "_weight_grad"), (("input", "weight"), "_grads")],
    ids=str,
)
def test_generated_code_calls_past_the_dispatcher(wanted, name, device):
    data, function = leaves(device, wanted), functools.partial(gemmconv.conv_transpose2d, **LAYER)
    results, code = run_and_get_code(step, torch.compile(lambda *given: function(*given), fullgraph=True), data, wanted)
    for which in {"", name}:
        assert sum(one.count(SERVED.format(which)) for one in code) == 1
    torch.testing.assert_close(results, step(function, data, wanted), rtol=0, atol=0)


def between_convolutions(device):
    layer = gemmconv.ConvTranspose2d(6, 4, 4, algorithm="gemm_col2im")
    return torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), layer, torch.nn.Conv2d(4, 2, 3)).to(device)


@compiles_cpp
def test_images_come_in_the_format_of_torchs_convolutions(device, monkeypatch):
    """Where inductor brings those to channels_last, no copy turns the images round for the layer between them."""
    network = between_convolutions(device)
    operator, formats = OPERATORS["conv_transpose2d"], []
    served = operator.served

    def seen(input, *others):
        output = served(input, *others)
        formats.extend(one.is_contiguous(memory_format=torch.channels_last) for one in (input, output))
        return output

    monkeypatch.setattr(operator, "served", seen)
    images = torch.randn(2, 3, 6, 5, device=device)
    with torch.no_grad(), torch._inductor.config.patch(force_layout_optimization=True):
        actual = torch.compile(network)(images)
        torch.testing.assert_close(actual, network(images), **ROUNDED)
    assert formats == [True, True]
    assert actual.is_contiguous()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@compiles_cpp
def test_what_is_cast_for_a_call_alone_is_cast_by_it(biased, cast, recorded, device):
    """What gradients need is cast before; then a bias, which would take a kernel of its own, is added behind."""
    layer = gemmconv.ConvTranspose2d(3, 4, 4, bias=biased, algorithm="gemm_col2im").to(device)
    network = torch.nn.Sequential(layer, torch.nn.ReLU())
    images = torch.randn(2, 3, 5, 6, device=device, requires_grad=recorded)
    with torch.set_grad_enabled(recorded), torch.autocast(device, torch.bfloat16, enabled=cast):
        actual, codes = run_and_get_code(torch.compile(network, fullgraph=True), images)
        torch.testing.assert_close(actual, network(images), **(HALF if cast else ROUNDED))
    served = SERVED.format("_casting" if cast and not recorded else "")
    call = next(line for line in codes[0].splitlines() if served in line)
    _, weight, bias, *_ = call.partition(served)[2].split(", ")
    assert weight.startswith("buf" if cast and recorded else ("primals", "arg"))
    assert (bias == "None") is (not biased or (cast and recorded))


@compiles_cpp
def test_a_computed_bias_is_left_to_the_call_where_nothing_adds_it_in_passing(device):
    data = leaves(device)
    function = torch.compile(lambda x, weight, bias: gemmconv.conv_transpose2d(x, weight, 2 * bias, **LAYER))
    _, (code,) = run_and_get_code(function, data["input"], data["weight"], data["bias"])
    assert code.partition(SERVED.format(""))[2].split(", ")[2].startswith("buf")


@pytest.mark.parametrize("reordered", [True, False])
@compiles_cpp
def test_a_weight_that_changes_between_its_cast_and_the_call(reordered, device):
    data, indices = leaves(device), (torch.tensor([0], device=device),)

    def function(input, weight):
        cast = weight.bfloat16()
        weight.index_put_(indices, torch.full((), 99.0, device=device))
        return gemmconv.conv_transpose2d(input, cast, **LAYER)

    input = data["input"].bfloat16()
    expected = function(input, data["weight"].clone())
    with torch._inductor.config.patch(reorder_for_locality=reordered):
        actual = torch.compile(function)(input, data["weight"].clone())
    torch.testing.assert_close(actual, expected, **HALF)


@compiles_cpp
def test_what_a_call_that_casts_launches_is_compiled_ahead(device, monkeypatch):
    """With its casts, which its tensors have not: they are those of the call after them."""
    ahead = []
    monkeypatch.setattr(compiled, "launches_of", lambda *arguments: ahead.append(arguments))
    monkeypatch.setattr(compiled, "compile_in_background", lambda key, tensors, list_launches: list_launches(*tensors))
    layer = gemmconv.ConvTranspose2d(3, 4, 4, algorithm="gemm_col2im").to(device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        torch.compile(layer)(torch.randn(2, 3, 5, 6, device=device))
    ((direction, tensors, sizes, _, convention),) = ahead
    assert (direction, sizes, convention) == ("forward", None, Convention(parameter_dtype=torch.float32))
    assert [one.dtype for one in tensors] == [torch.bfloat16] * 3


def test_launches_of_a_call_that_casts_have_the_cast(monkeypatch):
    monkeypatch.setattr(configs.selection, "spec_of", lambda device: MEASURED)
    monkeypatch.setattr(configs.selection, "torch_precision", lambda dtype, device: "ieee")
    low = [
        WithoutData.of(SHAPES[name], torch.empty(SHAPES[name]).stride(), torch.float16, torch.device("cuda", 0))
        for name in ("input", "weight", "bias")
    ]
    call = low, None, OPTIONS
    with_casts = ahead.launches_of("forward", *call, Convention(parameter_dtype=torch.float32))
    assert [step.source for step in with_casts if step.source == "layout/cast.cu"]
    assert not [step for step in ahead.launches_of("forward", *call) if step.source == "layout/cast.cu"]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_call_that_casts_is_one_of_what_was_cast(transposed, recorded, device):
    data = leaves(device, ("weight", "bias") if recorded else ())
    input, weight, bias = data["input"].half(), data["weight"], data["bias"]
    if transposed:  # strides of neither format
        weight = weight.transpose(2, 3).contiguous().transpose(2, 3).detach().requires_grad_(recorded)
    expected = OPERATORS["conv_transpose2d"](input, weight.half(), bias.half(), *OPTIONS)
    casting = OPERATORS["conv_transpose2d_casting"]
    for call in (casting, casting.served, casting.served):
        output = call(input, weight, bias, *OPTIONS)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        assert output.requires_grad is recorded
    if recorded:
        output.sum().backward()
        assert weight.grad.dtype == bias.grad.dtype == torch.float32
    with pytest.raises(RuntimeError, match="weight must have the dtype of input"):
        OPERATORS["conv_transpose2d"].served(input, weight, bias, *OPTIONS)


@compiles_cpp
def test_gradients_of_weights_in_channels_last_are_not_copied(device):
    network = between_convolutions(device).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 6, 5, device=device)
    _, codes = run_and_get_code(lambda: torch.compile(network)(images).sum().backward())
    weight = network[1].weight
    assert weight.grad.stride() == weight.stride()
    assert "fused_copy" not in "".join(codes)


@compiles_cpp
def test_sizes_change_between_training_steps_where_formats_do(device):
    """Inductor compiles anew, as for torch's convolutions, and has no format wrong that it saves for the gradients."""
    convolution, layer, _ = between_convolutions(device)
    network = torch.nn.Sequential(convolution, torch.nn.ReLU(), layer)
    with torch._inductor.config.patch(force_layout_optimization=True):
        compiled_network = torch.compile(copy.deepcopy(network), dynamic=True)
        for size in [(2, 3, 6, 5), (2, 3, 6, 4), (3, 3, 9, 9)]:
            images = torch.randn(size, device=device)
            torch.testing.assert_close(outcome(compiled_network, images), outcome(network, images), **ROUNDED)


@compiles_cpp
def test_a_batch_that_data_decide_is_compiled(device):
    network, kept = between_convolutions(device)[:2], torch.tensor([True, False, True], device=device)

    def function(images, kept):
        return network[1](network[0](images)[kept])

    images = torch.randn(3, 3, 6, 5, device=device)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        actual = torch.compile(function, fullgraph=True)(images, kept)
    torch.testing.assert_close(actual, function(images, kept), **ROUNDED)


def test_what_was_generated_runs_where_nothing_is_served(device, monkeypatch):
    """As another process may have generated it, with another gemmconv."""
    data = leaves(device)
    tensors = data["input"], data["weight"], data["bias"]
    function = torch.compile(lambda *given: gemmconv.conv_transpose2d(*given, **LAYER), fullgraph=True)
    expected = function(*tensors)
    monkeypatch.delattr(OPERATORS["conv_transpose2d"], "served")
    torch.testing.assert_close(function(*tensors), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
@compiles_cpp
def test_what_calls_launch_is_compiled_ahead(dynamic, device, monkeypatch):
    """From the shapes, strides and arguments that they have, unless sizes are known at the call alone."""
    ahead, called = [], []

    def seen(direction, served):
        def call(*inputs):
            tensors, sizes, options = split_arguments(operator_name(direction), inputs)
            called.append((direction, repr((sizes, options)), None, *map(tensor_signature, tensors)))
            return served(*inputs)

        return call

    def note(key, tensors, list_launches):
        ahead.append((*key, *map(tensor_signature, tensors)))

    monkeypatch.setattr(compiled, "compile_in_background", note)
    for direction in PASSES:
        operator = OPERATORS[operator_name(direction)]
        monkeypatch.setattr(operator, "served", seen(direction, operator.served))
    network = between_convolutions(device)
    if dynamic:
        network, images = network[1], torch.randn(2, 6, 4, 3, device=device, requires_grad=True)
    else:
        images = torch.randn(2, 3, 6, 5, device=device)
    with torch._inductor.config.patch(force_layout_optimization=not dynamic):
        torch.compile(network, dynamic=dynamic)(images).sum().backward()
    assert [direction for direction, *_ in called] == ["forward", "grads"]
    assert ahead == ([] if dynamic else called)


def test_arguments_by_name_are_lowered(device):
    data = leaves(device)

    def function(input, weight):
        return torch.ops.gemmconv.conv_transpose2d(input, weight=weight, dilation=[1, 2], algorithm="gemm_col2im")

    actual, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), data["input"], data["weight"])
    torch.testing.assert_close(actual, function(data["input"], data["weight"]), rtol=0, atol=0)
    assert SERVED.format("") in code


@compiles_cpp
def test_inductor_does_without_the_lowering(device, monkeypatch):
    """As where torch has nothing of what it takes."""
    compiled._lower()
    monkeypatch.setattr(compiled, "_lower", lambda: None)
    for name in map(operator_name, PASSES):
        monkeypatch.delitem(lowering.lowerings, OPERATORS[name])
    network, images = small_network(device), torch.randn(2, 3, 5, 6, device=device)
    other, codes = run_and_get_code(torch.compile(copy.deepcopy(network), fullgraph=True), images)
    torch.testing.assert_close(other, network(images))
    assert not any(SERVED.format("") in code for code in codes)


@pytest.mark.parametrize("profiled", [False, True])
def test_what_is_served_has_gradients_where_they_are_recorded(profiled, device):
    data = leaves(device, ("input", "weight", "grad_output"))
    tensors = input, weight, grad_output = data["input"], data["weight"], data["grad_output"]

    def compute(of):
        results = [
            of("conv_transpose2d")(input, weight, None, *OPTIONS),
            *of("conv_transpose2d_grads")(grad_output, input, weight, *OPTIONS),
            of("conv_transpose2d_input_grad")(grad_output, weight, SHAPES["input"][2:], *OPTIONS),
            of("conv_transpose2d_weight_grad")(grad_output, input, SHAPES["weight"][2:], *OPTIONS),
        ]
        return [*results, *torch.autograd.grad(sum(one.square().sum() for one in results), tensors)]

    expected = compute(OPERATORS.__getitem__)
    with torch.profiler.profile() if profiled else torch.enable_grad():
        actual = compute(lambda name: OPERATORS[name].served)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
