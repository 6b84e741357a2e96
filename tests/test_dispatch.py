"""Which calls may pass the dispatcher by, and that the others do not."""

import pytest
import torch

import gemmconv
from gemmconv.dispatch import are_dense, is_exporting
from gemmconv.ops import implementation
from gemmconv.ops.configs import Convention
from gemmconv.ops.implementation import prepare_call
from gemmconv.ops.schemas import Options
from tests.samples import Operators


@pytest.fixture
def images(device):
    return torch.randn(2, 4, 5, 5, device=device)


@pytest.fixture
def weight(device):
    return torch.randn(4, 2, 3, 3, device=device)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.as_subclass(Subclass),
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
        lambda x: torch.complex(x, -x).conj().imag,
    ],
    ids=["subclass", "meta", "sparse", "negative_view"],
)
def test_other_tensors_are_not_dense(change, images, weight):
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            assert are_dense(images[:, ::2].transpose(2, 3), weight + 1, torch.nn.Parameter(weight), None)
            assert not are_dense(change(images), weight)
            assert not are_dense(weight, change(images))


def test_a_call_is_prepared_for_each_setting(monkeypatch):
    """All fields of Options and of Convention, what a call's tensors are, and torch's precision are in the key."""

    def prepared(convention=None, shape=(1, 4, 5, 6), dtype=torch.float32, bias=False, last=False, **options):
        x, weight = torch.zeros(shape, dtype=dtype), torch.zeros(4, 4, 3, 3, dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        options = Options(**{"stride": (2, 2), "padding": (1, 1), "algorithm": "direct", **options})
        return prepare_call("forward", (x, weight, weight[0, 0, 0] if bias else None), None, options, convention)

    made = []
    monkeypatch.setattr(implementation, "_prepare_or_fall_back", lambda *given: made.append(given) or object())
    options = {"stride": (3, 2), "padding": (0, 1), "output_padding": (1, 0), "groups": 2, "dilation": (1, 2)}
    options |= {"algorithm": "native", "precision": "tf32", "workspace_limit": 1 << 20}
    conventions = {"weight_grad_strides": (9, 9, 3, 1), "with_bias_grad": True, "parameter_dtype": torch.float32}
    conventions |= {"returns_casts": True, "trained": True, "is_signal": True}
    assert options.keys() | conventions.keys() == {*Options._fields, *Convention._fields}, "add what is missing here"
    prepared()
    prepared()
    assert len(made) == 1
    tensors = {"shape": (1, 4, 6, 5), "dtype": torch.float64, "bias": True, "last": True}
    for name, value in (options | tensors).items():
        prepared(**{name: value})
    for name, value in conventions.items():
        prepared(Convention(**{name: value}))
    monkeypatch.setattr(implementation.selection, "torch_precision", lambda *of: "tf32")
    prepared()
    assert len(made) == 1 + len(options | tensors | conventions) + 1


@pytest.mark.parametrize("algorithm", ["gemm_col2im", "native"])
def test_conv_transpose2d_gives_the_same_either_way(algorithm, images, weight):
    leaves = [images.requires_grad_(), weight.requires_grad_()]
    options = {"stride": 2, "algorithm": algorithm}
    direct = gemmconv.conv_transpose2d(*leaves, **options)
    with Operators():
        dispatched = gemmconv.conv_transpose2d(*leaves, **options)
    assert torch.equal(direct, dispatched)
    grad_output = torch.randn_like(direct)
    for one, other in zip(
        torch.autograd.grad(direct, leaves, grad_output),
        torch.autograd.grad(dispatched, leaves, grad_output),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed tensors")
def test_distributed_tensors_go_to_the_operator_that_torch_has_rules_for(one_process):
    from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    layer = distribute_module(gemmconv.ConvTranspose2d(4, 6, 3, stride=2), mesh)
    images = torch.randn(2, 4, 5, 6)
    output = layer(distribute_tensor(images, mesh, [Shard(0)]))
    assert isinstance(output, DTensor)
    output.sum().backward()
    weight, bias = (one.detach().to_local() for one in (layer.weight, layer.bias))
    torch.testing.assert_close(output.to_local(), torch.conv_transpose2d(images, weight, bias, stride=2))
    assert isinstance(layer.weight.grad, DTensor)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without mkldnn")
def test_tensors_without_strides_go_to_torch():
    images, weight = torch.randn(2, 4, 5, 6), torch.randn(4, 6, 3, 3)
    output = gemmconv.conv_transpose2d(images.to_mkldnn(), weight).to_dense()
    torch.testing.assert_close(output, torch.conv_transpose2d(images, weight))


class Scaled(torch.Tensor):
    """A wrapper, as of quantised weights: twice its values, with torch's convolution and its gradient alone."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values):
        self.values_ = values

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function not in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
            return NotImplemented
        plain = [2 * one.values_ if isinstance(one, cls) else one for one in args]
        return function(*plain, **(kwargs or {}))


@pytest.mark.parametrize("algorithm", ["auto", "native"])
def test_wrappers_of_torchs_operator_are_given_it(algorithm, images, weight):
    images.requires_grad_()
    output = gemmconv.conv_transpose2d(images, Scaled(weight), stride=2, algorithm=algorithm)
    exact = torch.conv_transpose2d(images, 2 * weight, stride=2)
    torch.testing.assert_close(output, exact)
    for one, other in zip(*(torch.autograd.grad(y.sum(), images) for y in (output, exact)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.parametrize("algorithm", ["auto", "native"])
def test_traced_calls_are_served_off_hopper(algorithm, images, weight, monkeypatch):
    """torch.jit.trace, which fvcore counts by, has tensors for sizes."""
    monkeypatch.setenv("GEMMCONV_CAPABILITY", "8.0")

    def call(images):
        return gemmconv.conv_transpose2d(images, weight, stride=2, algorithm=algorithm)

    traced = torch.jit.trace(call, images)
    torch.testing.assert_close(traced(images), torch.conv_transpose2d(images, weight, stride=2))


def test_exports_are_told_from_compiled_graphs():
    """Before torch 2.13 torch.compile folds torch.compiler.is_exporting to True."""

    class Model(torch.nn.Module):
        def forward(self, input):
            return input + is_exporting()

    zero = torch.zeros(1)
    assert torch.compile(Model(), backend="eager", fullgraph=True)(zero) == Model()(zero) == 0
    for strict in (True, False):
        assert torch.export.export(Model(), (zero,), strict=strict).module()(zero) == 1


def test_weights_of_too_few_axes_are_refused_where_calls_are_not_eager():
    input = torch.ones(1, 3, 4, 4).as_subclass(Subclass)
    for weight in (torch.ones(3), torch.tensor(1.0)):
        with pytest.raises(RuntimeError, match="weight must have shape"):
            gemmconv.conv_transpose2d(input, weight)
