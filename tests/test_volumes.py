"""Volumes as one product: the kernel on three axes, and the operator that conv_transpose3d puts it behind."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import gemmconv
from gemmconv import rank, selection
from gemmconv.device import named
from gemmconv.explain import ModelExplanation
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config
from gemmconv.kernels.conv import gemm_mma
from gemmconv.ops import volumes
from tests import emulator
from tests.samples import conv_precision

PROBLEMS = [
    Problem(2, 24, 20, 1, (3, 5, 6), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 0, 1), (1, 1, 1)),
    Problem(1, 40, 24, 2, (4, 3, 9), (2, 3, 1), (1, 2, 3), (0, 1, 0), (0, 1, 2), (2, 1, 1)),
    Problem(2, 8, 40, 1, (2, 4, 4), (3, 5, 3), (1, 1, 1), (1, 2, 0), (0, 0, 0), (1, 1, 1)),
    Problem(1, 16, 3, 1, (5, 4, 12), (4, 4, 4), (2, 2, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
    Problem(2, 16, 24, 2, (3, 4, 5), (2, 2, 3), (2, 2, 3), (0, 0, 0), (0, 0, 0), (1, 1, 1)),
]
KINDS = [(torch.float32, "ieee", 2e-6), (torch.float32, "tf32", 2e-3), (torch.float16, "ieee", 2e-3)]
ARGUMENTS = {"stride": 2, "padding": 1, "output_padding": 1}


def geometry_of(problem):
    names = "stride", "padding", "output_padding", "groups", "dilation"
    return {name: getattr(problem, name) for name in names}


def tensors_of(problem, dtype=torch.float32, device="cpu"):
    shapes = problem.input_shape, problem.weight_shape, (problem.out_channels,)
    return [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]


@emulator.needs_compiler
@pytest.mark.parametrize(("problem", "kind"), [*itertools.product(PROBLEMS, KINDS)], ids=str)
def test_kernel_computes_both_passes_of_volumes(problem, kind, builder, poison):
    dtype, precision, tolerance = kind
    config = Config(problem, dtype, torch.device("cpu"), precision)
    input, weight, bias = tensors_of(problem, dtype)
    grad_output = torch.randn(problem.output_shape).to(dtype)
    x, w, b = (one.double().requires_grad_() for one in (input, weight, bias))
    output = torch.conv_transpose3d(x, w, b, **geometry_of(problem))
    (gradient,) = torch.autograd.grad(output, x, grad_output.double())
    with emulator.install(builder):
        for direction, arguments, exact in (
            ("forward", (input, weight, bias), output),
            ("input_grad", (grad_output, weight), gradient),
        ):
            tiles = [*gemm_mma.KERNEL.tiles(config, direction)]
            call = gemm_mma.KERNEL.prepare(config, direction, tiles[len(tiles) // 2])
            poison("cpu")
            error = (call(*arguments).double() - exact).norm() / exact.norm()
            assert error < tolerance


def test_products_of_volumes_have_the_callers_limit():
    volume = volumes.Volume(PROBLEMS[0], torch.bfloat16, torch.device("cpu"), "ieee", workspace_limit=1 << 20)
    assert volume.config().workspace_limit == 1 << 20


def test_partial_sums_of_split_k_stay_within_the_workspace():
    problem = Problem(2, 512, 512, 1, (16, 16), (3, 3), (2, 2), (1, 1), (1, 1))
    config = Config(problem, torch.bfloat16, torch.device("cuda", 0))
    for limit, are_split in ((config.workspace_limit, True), (1 << 20, False)):
        limited = replace(config, workspace_limit=limit)
        works = [gemm_mma.Work(limited, "forward", tile) for tile in gemm_mma.KERNEL.tiles(limited, "forward")]
        assert any(work.tile.splits > 1 for work in works) == are_split
        assert all(work.partial_bytes <= limit for work in works)


@pytest.fixture
def as_products(monkeypatch):
    """Every volume is one product, for which torch's operator stands on a CPU."""
    monkeypatch.setattr(rank, "choose_way", lambda *_: "product")

    def program_of(config):
        if config.device.type == "cuda":
            return on_gpu(config)
        return SimpleNamespace(
            bound=lambda *_: lambda *tensors: torch.conv_transpose3d(*tensors, *config.problem.geometry)
        )

    on_gpu = volumes.program_of
    monkeypatch.setattr(volumes, "program_of", program_of)


def test_operator_is_torchs_with_gradients_of_any_order(as_products):
    tensors = [one.requires_grad_() for one in tensors_of(PROBLEMS[0])]
    torch.library.opcheck(volumes.OPERATOR, (*tensors, (2,) * 3, (1,) * 3, (1,) * 3, 1, (1,) * 3, "ieee"))
    found, wanted = [], []
    for results, function in ((found, gemmconv.conv_transpose3d), (wanted, torch.conv_transpose3d)):
        output = function(*tensors, **ARGUMENTS)
        first = torch.autograd.grad(output.square().sum(), tensors, create_graph=True)
        results += [output, *first, *torch.autograd.grad(sum(one.sum() for one in first), tensors[:2])]
    torch.testing.assert_close(found, wanted)


def test_operator_compiles_and_leaves_transforms_and_float64_to_torch(as_products):
    input, weight, bias = tensors_of(PROBLEMS[0])
    wanted = torch.conv_transpose3d(input, weight, bias, **ARGUMENTS)

    def call(input):
        return gemmconv.conv_transpose3d(input, weight, bias, **ARGUMENTS)

    torch.compiler.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        found, (code,) = run_and_get_code(torch.compile(call, fullgraph=True), input)
        torch.testing.assert_close(torch.compile(call, fullgraph=True, dynamic=True)(input), wanted)
    torch.testing.assert_close(found, wanted)
    assert "getattr(torch.ops.gemmconv.conv_transpose3d.default, 'served'" in code  # past the dispatcher
    torch.testing.assert_close(torch.func.vmap(call)(torch.stack([input] * 2))[1], wanted)
    gradient = torch.func.grad(lambda input: call(input).sum())(input)
    assert gradient.shape == input.shape
    with forward_ad.dual_level():
        dual = call(forward_ad.make_dual(input, torch.ones_like(input)))
        assert forward_ad.unpack_dual(dual).tangent is not None
    double = gemmconv.conv_transpose3d(input.double(), weight.double(), **ARGUMENTS)
    torch.testing.assert_close(double, torch.conv_transpose3d(input.double(), weight.double(), **ARGUMENTS))
    with torch.autocast("cpu", torch.bfloat16):
        assert call(input).dtype == torch.bfloat16


def test_autocast_refuses_tensors_of_other_devices_and_dtypes(as_products):
    input, weight, bias = tensors_of(PROBLEMS[0])
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="weight must be on the device of input, cpu, got meta"):
            gemmconv.conv_transpose3d(input, weight.to("meta"), bias)
        for other in (weight.double(), weight.int()):
            with pytest.raises(RuntimeError, match="weight must have the dtype of input"):
                gemmconv.conv_transpose3d(input, other, bias)


@pytest.mark.parametrize("needs", itertools.product([True, False], repeat=3), ids=str)
def test_operator_of_gradients_gives_those_that_are_needed(needs):
    input, weight, bias = (one.requires_grad_() for one in tensors_of(PROBLEMS[-1]))
    output = torch.conv_transpose3d(input, weight, bias, *PROBLEMS[-1].geometry)
    grad = torch.randn_like(output)
    arguments = (grad, input.detach(), weight.detach(), *PROBLEMS[-1].geometry, "ieee", None, [*needs])
    found = volumes.GRADS_OPERATOR(*arguments)
    for one, other, need in zip(found, torch.autograd.grad(output, (input, weight, bias), grad), needs, strict=True):
        torch.testing.assert_close(one, other if need else torch.empty(0))
    torch.library.opcheck(volumes.GRADS_OPERATOR, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_steps_compute_gradients_by_the_kernels(backend, as_products):
    """Bit for bit what a prepared call computes, which has the same programs."""
    p = PROBLEMS[-1]
    leaves = [one.requires_grad_() for one in tensors_of(p, device="cuda")]

    def step(*leaves):
        return gemmconv.conv_transpose3d(*leaves, **geometry_of(p))

    grad = torch.randn(p.output_shape, device="cuda")
    torch.compiler.reset()
    with conv_precision("ieee"):
        found, wanted = (
            torch.autograd.grad(function(*leaves), leaves, grad)
            for function in (torch.compile(step, backend=backend, fullgraph=True), step)
        )
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_calls_keep_no_list_of_the_callers(as_products):
    """A list that is changed after a call leaves the prepared call as it was."""
    input, weight, _ = tensors_of(PROBLEMS[0])
    stride = [2, 2, 2]
    wanted = gemmconv.conv_transpose3d(input[0], weight, stride=stride)
    stride[:] = [1, 1, 1]
    torch.testing.assert_close(gemmconv.conv_transpose3d(input[0], weight, stride=[2, 2, 2]), wanted)


def test_backward_passes_compute_what_is_needed_and_are_counted(as_products, monkeypatch):
    needed, gradients = [], volumes._torchs_gradients
    monkeypatch.setattr(volumes, "_torchs_gradients", lambda *given: needed.append(given[-1]) or gradients(*given))
    input, weight, bias = (one.requires_grad_() for one in tensors_of(PROBLEMS[0]))
    for leaf in (input, weight, bias):
        output = gemmconv.conv_transpose3d(2 * input, 2 * weight, 2 * bias, **ARGUMENTS)
        torch.autograd.grad(output.sum(), leaf)
    assert needed == [(True, False, False), (False, True, True), (False, False, True)]
    counts = []
    for function in (gemmconv.conv_transpose3d, torch.conv_transpose3d):
        with FlopCounterMode(display=False) as counter:
            function(input, weight, bias, **ARGUMENTS).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_rule_on_gpus(monkeypatch):
    """Small outputs are never images, which keep the host long; dense layers are torch's where nothing was measured."""
    device = torch.device("cuda", 0)
    dense = Problem(2, 32, 48, 1, (16,) * 3, (3,) * 3, (2,) * 3, (1,) * 3, (0,) * 3, (1,) * 3)
    large, flat = {"input_size": (64,) * 3}, {"kernel_size": (1, 2, 2), "stride": (1, 2, 2), "padding": (0,) * 3}
    apart = {"kernel_size": (2,) * 3, "padding": (0,) * 3}

    def way(changes, direction="forward", is_hopper=True, **of_volume):
        volume = volumes.Volume(replace(dense, **changes), torch.float32, device, "tf32")
        return rank.way_of(volume._replace(**of_volume), direction, is_hopper)

    last, other, ieee = {"last": True}, {"is_hopper": False}, {"precision": "ieee"}
    assert way({}) == way({}, "grads") == way(large) == way({"groups": 2}) == way(apart) == way(flat) == "product"
    assert way(apart | large) == way(apart | large, "grads") == way({"groups": 16}) == "product"
    assert way(apart | large, "grads", **ieee) == way(flat | large, "grads") == way({"groups": 16} | large) == "images"
    assert way({"groups": 16}, "grads") == "product"
    assert way({}, **last) == way({}, **other) == way(apart, "grads", **other) == "torch"
    assert way({"groups": 2}, **other) == way({"dilation": (2,) * 3}, **other) == "product"
    assert way({"groups": 2} | large, **last) == way(flat | large, **last) == "images"
    stride_1 = {"stride": (1,) * 3}
    assert way(stride_1) == way(stride_1 | {"out_channels": 128}, precision="ieee") == "product"
    wide, deep = {"kernel_size": (3, 5, 5)}, {"in_channels": 256, "out_channels": 128}
    assert way(stride_1 | wide) == way(stride_1 | wide | large, "grads") == way(deep, precision="ieee") == "product"
    assert way(stride_1 | wide | large) == "images"
    assert way(deep) == way(deep | large, "grads") == "torch"
    assert way(deep, "grads") == "product"  # torch's operator forward, and gemm_col2im's gradients
    with monkeypatch.context() as patch:  # copies of slices are fused there
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert (way(stride_1 | large), way(stride_1), way(large)) == ("images", "product", "product")
    assert way(stride_1 | large) == "product"
    assert way(stride_1 | {"out_channels": 128}) == way(stride_1 | {"in_channels": 64, "out_channels": 64}) == "torch"


@pytest.mark.parametrize("gpu", ["A100", "H200"])
def test_kernels_for_volumes_are_there_to_be_tuned_on_every_gpu(gpu):
    """The rule leaves dense layers to torch's operator on GPUs that were not measured; tune may take kernels there."""
    dense = replace(PROBLEMS[0], in_channels=32, out_channels=48)
    for problem in (dense, replace(dense, kernel_size=(2,) * 3, padding=(0,) * 3, output_padding=(0,) * 3)):
        volume = volumes.Volume(problem, torch.float32, torch.device("cuda", 0), "tf32")
        assert volumes.choice_of(volume.config(named(gpu))) is not None
        assert rank.way_of(volume, "forward", gpu == "H200") == ("product" if gpu == "H200" else "torch")


def test_torchs_operator_has_no_part_where_it_rounds_otherwise(monkeypatch):
    monkeypatch.setattr(selection, "torch_precision", lambda *_: "tf32")
    volume = volumes.Volume(PROBLEMS[0], torch.float32, torch.device("cuda", 0), "ieee", requested="ieee")
    follows = volume._replace(requested=None)
    asked = [(one, trains) for one in ("images", "product", "torch") for trains in (False, True)]
    assert [rank.settled(one, volume, trains) for one, trains in asked] == [
        *("images", "images", "product", "images", "images", "images")
    ]
    for other in (volume._replace(dtype=torch.bfloat16), volume._replace(device=torch.device("cpu"))):
        assert [rank.settled(one, other, trains) for one, trains in asked] == [one for one, _ in asked]
    assert [rank.settled(one, follows, trains) for one, trains in asked] == [one for one, _ in asked]
    config = replace(volume.config(), torch_precision="tf32")
    # A layer whose forward pass is torch's is computed as images then.
    monkeypatch.setattr(volumes, "program_of", lambda *_: None)
    with pytest.raises(NotImplementedError, match="native: precision follows torch"):
        volumes._forward(config, ())
    monkeypatch.setattr(rank, "compute", lambda way, *_: way)
    monkeypatch.setattr(volumes, "prepare", lambda *_: "product")
    assert rank.prepare("product", (), volume)(None, None, None) == "images"
    assert rank.prepare("product", (), follows) == "product"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem", [*PROBLEMS, replace(PROBLEMS[0], groups=4), replace(PROBLEMS[2], groups=8)], ids=str
)
def test_precision_is_what_is_asked_for_whatever_torchs_setting(problem):
    """Float32 as float32, forward and in gradients, while torch's setting allows TF32; torch's operator is refused."""
    leaves = [one.requires_grad_() for one in tensors_of(problem, device="cuda")]
    exact = [one.detach().double().requires_grad_() for one in leaves]
    wanted = torch.conv_transpose3d(*exact, **geometry_of(problem))
    grad = torch.randn_like(wanted)
    with conv_precision("tf32"):
        quiet = gemmconv.conv_transpose3d(*(one.detach() for one in leaves), **geometry_of(problem), precision="ieee")
        output = gemmconv.conv_transpose3d(*leaves, **geometry_of(problem), precision="ieee")
        found = quiet, output, *torch.autograd.grad(output, leaves, grad.float())
        for one, other in zip(found, (wanted, wanted, *torch.autograd.grad(wanted, exact, grad)), strict=True):
            assert (one - other).norm() < 3e-6 * other.norm()
        with pytest.raises(NotImplementedError, match="native: precision follows torch"):
            gemmconv.conv_transpose3d(*leaves, **geometry_of(problem), precision="ieee", algorithm="native")


def test_explain_says_that_a_volume_is_one_product():
    layer = torch.nn.ConvTranspose3d(32, 64, 3, stride=2, padding=1)
    found = gemmconv.explain(layer, (16, 32, 16, 32, 32), gpu="H200", precision="tf32", device="cuda")
    assert found.algorithm == "fused"
    assert 0 < found.product.seconds < 1e-2
    assert "as one product by conv/gemm_mma" in str(found)
    small = gemmconv.explain(layer, (1, 32, 4, 8, 8), gpu="H200", precision="tf32", device="cuda")
    assert small.algorithm == "gemm_col2im"
    assert "as one product by gemm_col2im" in str(small)
    assert f"{small.product.kernel.workspace_bytes(small.volume, 'forward'):,}" in str(ModelExplanation((small,)))


@pytest.mark.gpu
def test_prepared_calls_of_a_product(as_products, poison):
    """Repeated calls, without a batch, of strided tensors, under autocast, with gradients of gradients."""
    input, weight, bias = tensors_of(PROBLEMS[0], device="cuda")
    strided = input.transpose(3, 4).contiguous().transpose(3, 4)
    wanted = torch.conv_transpose3d(input.double(), weight.double(), bias.double(), **ARGUMENTS)
    for _ in range(3):
        for given in (input, strided, input[0]):
            poison("cuda")
            output = gemmconv.conv_transpose3d(given, weight, bias, **ARGUMENTS, precision="ieee")
            torch.testing.assert_close(output.double(), wanted[0] if given.dim() == 4 else wanted, atol=1e-4, rtol=1e-4)
    leaves = [one.clone().requires_grad_() for one in (input, weight, bias)]
    with torch.autocast("cuda", torch.bfloat16):
        output = gemmconv.conv_transpose3d(*leaves, **ARGUMENTS)
    assert output.dtype == torch.bfloat16
    gradients = torch.autograd.grad(output.float().square().sum(), leaves)
    assert all(one.dtype == torch.float32 for one in gradients)
    with conv_precision("ieee"):
        functions = gemmconv.conv_transpose3d, torch.conv_transpose3d
        losses = [function(*leaves, **ARGUMENTS).square().sum() for function in functions]
        first, torchs = (torch.autograd.grad(loss, leaves, create_graph=True) for loss in losses)
        for grads in (first, torchs):
            grads[0].square().mean().backward()
    torch.testing.assert_close(first, torchs, atol=1e-2, rtol=1e-4)
    for one, other in zip(gradients, torchs, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("problem", "kind"), [*itertools.product(PROBLEMS, KINDS)], ids=str)
def test_volumes_match_torch_on_a_gpu(problem, kind, as_products, poison):
    dtype, precision, tolerance = kind
    input, weight, bias = (one.requires_grad_() for one in tensors_of(problem, dtype, "cuda"))
    leaves, exact = (input, weight, bias), [one.detach().double().requires_grad_() for one in (input, weight, bias)]
    wanted = torch.conv_transpose3d(*exact, **geometry_of(problem))
    grad = torch.randn_like(wanted).to(dtype)
    with conv_precision(precision):
        poison("cuda")
        output = gemmconv.conv_transpose3d(*leaves, **geometry_of(problem), precision=precision)
        found = [output, *torch.autograd.grad(output, leaves, grad, retain_graph=True)]
        found += (torch.autograd.grad(output, one, grad, retain_graph=True)[0] for one in leaves)
    gradients = torch.autograd.grad(wanted, exact, grad.double(), retain_graph=True)
    for one, other in zip(found, (wanted, *gradients, *gradients), strict=True):
        assert (one - other).norm() < tolerance * other.norm()
    # A gradient that is one number everywhere, and no volumes at all.
    with conv_precision(precision):
        ones = torch.autograd.grad(output.sum(), leaves)
        none = gemmconv.conv_transpose3d(input[:0], weight, bias, **geometry_of(problem), precision=precision)
        assert [one.count_nonzero().item() for one in torch.autograd.grad(none.sum(), leaves)] == [0, 0, 0]
    assert none.shape == (0, *output.shape[1:])
    for one, other in zip(ones, torch.autograd.grad(wanted.sum(), exact), strict=True):
        assert (one - other).norm() < tolerance * other.norm()
