"""What is no torch.Tensor: arrays through DLPack, objects of torch.fx; and ONNX, which has no operators of ours."""

import numpy as np
import pytest
import torch

import gemmconv
from tests.cases import CASES
from tests.samples import problem_of, sample

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
CASE = CASES[0]
OPTIONS = CASE.parameters


def data_of(dtype=torch.float32):
    data = sample(CASE, dtype, "cpu")
    return data.input, data.weight, data.bias


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("algorithm", ["auto", "gemm_col2im"])
def test_numpy_comes_in_and_goes_out(dtype, algorithm):
    if dtype.is_complex and algorithm != "auto":
        pytest.skip("complex is torch's")
    tensors = [tensor.to(dtype) for tensor in data_of()]
    output = gemmconv.conv_transpose2d(*(tensor.numpy() for tensor in tensors), **OPTIONS, algorithm=algorithm)
    assert type(output) is np.ndarray
    assert np.array_equal(output, gemmconv.conv_transpose2d(*tensors, **OPTIONS, algorithm=algorithm).numpy())
    assert output.shape == problem_of(CASE).output_shape
    assert output.flags.writeable
    without_bias = gemmconv.conv_transpose2d(*(tensor.numpy() for tensor in tensors[:2]), **OPTIONS)
    assert np.array_equal(without_bias, gemmconv.conv_transpose2d(*tensors[:2], **OPTIONS).numpy())


def test_windows_of_numpy_come_in_and_go_out():
    images = np.random.default_rng(1).standard_normal((2, 3, 6, 5))
    columns = gemmconv.im2col(images, (3, 2), padding=1)
    assert np.array_equal(columns, gemmconv.im2col(torch.from_numpy(images), (3, 2), padding=1).numpy())
    back = gemmconv.col2im(columns, (6, 5), (3, 2), padding=1)
    assert type(back) is np.ndarray
    assert np.array_equal(back, gemmconv.col2im(torch.from_numpy(columns), (6, 5), (3, 2), padding=1).numpy())


def test_numpy_of_any_strides_and_what_may_only_be_read():
    input, weight, bias = (tensor.numpy() for tensor in data_of())
    wanted = gemmconv.conv_transpose2d(input, weight, bias, **OPTIONS)
    backwards = np.ascontiguousarray(input[:, :, ::-1])[:, :, ::-1]
    read_only = weight.copy()
    read_only.flags.writeable = False
    spread = np.repeat(bias, 2)[::2]
    assert np.array_equal(gemmconv.conv_transpose2d(backwards, read_only, spread, **OPTIONS), wanted)


class Subclass(np.ndarray):
    """An array of a module that is not NumPy's."""


class Array:
    """An array as the Python array API has them, of a library of this name."""

    def __init__(self, array):
        self.array = array

    def __array_namespace__(self):
        return Library

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Library:
    """The module of such arrays."""

    @staticmethod
    def from_dlpack(tensor):
        return Array(np.from_dlpack(tensor))


def test_arrays_of_other_libraries_come_in_and_go_out():
    given = [tensor.numpy() for tensor in data_of()]
    wanted = gemmconv.conv_transpose2d(*given, **OPTIONS)
    output = gemmconv.conv_transpose2d(*map(Array, given), **OPTIONS)
    assert type(output) is Array
    assert np.array_equal(output.array, wanted)
    assert np.array_equal(gemmconv.conv_transpose2d(given[0].view(Subclass), *given[1:], **OPTIONS), wanted)
    with pytest.raises(TypeError, match=r"weight must be an array of .*Library, as input is, got ndarray"):
        gemmconv.conv_transpose2d(Array(given[0]), given[1], **OPTIONS)


def test_arrays_that_do_not_fit_together_are_refused():
    input, weight, bias = data_of()
    with pytest.raises(TypeError, match=r"input must be a torch\.Tensor, as weight is, got ndarray"):
        gemmconv.conv_transpose2d(input.numpy(), weight, **OPTIONS)
    with pytest.raises(TypeError, match="weight must be an array of numpy, as input is, got list"):
        gemmconv.conv_transpose2d(input.numpy(), weight.tolist(), **OPTIONS)
    with pytest.raises(TypeError, match=r"weight must be a torch\.Tensor, got ndarray"):
        gemmconv.conv_transpose2d(input, weight.numpy(), **OPTIONS)
    with pytest.raises(TypeError, match="bias must be an array that torch takes through DLPack, got object"):
        gemmconv.conv_transpose2d(input.numpy(), weight.numpy(), bias.numpy().astype(object), **OPTIONS)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match="of a dtype that NumPy has, got bfloat16"),
    ):
        gemmconv.conv_transpose2d(input.numpy(), weight.numpy(), **OPTIONS)
    with pytest.raises(NotImplementedError):
        gemmconv.conv_transpose2d(*(tensor.numpy().astype(np.int32) for tensor in (input, weight)), **OPTIONS)
    with pytest.raises(TypeError, match=r"input must be a torch\.Tensor, got list"):
        gemmconv.conv_transpose2d(input.tolist(), weight)


@pytest.mark.gpu
def test_cupy_comes_in_and_goes_out():
    cupy = pytest.importorskip("cupy")
    tensors = [tensor.cuda() for tensor in data_of()]
    output = gemmconv.conv_transpose2d(*map(cupy.from_dlpack, tensors), **OPTIONS)
    assert type(output) is cupy.ndarray
    assert torch.equal(torch.from_dlpack(output), gemmconv.conv_transpose2d(*tensors, **OPTIONS))


def test_torch_fx_traces_through_a_converted_model():
    model = gemmconv.convert(torch.nn.Sequential(torch.nn.ConvTranspose2d(4, 3, 3, 2, bias=False), torch.nn.ReLU()))
    traced = torch.fx.symbolic_trace(model)
    assert gemmconv.conv_transpose2d in {node.target for node in traced.graph.nodes}
    input = torch.randn(2, 4, 5, 6)
    assert torch.equal(traced(input), model(input))


class UNet(torch.nn.Module):
    def __init__(self, constant):
        super().__init__()
        self.down = torch.nn.Conv2d(4, 4, 3, 2, 1)
        self.up = gemmconv.ConvTranspose2d(4, 6, 3, stride=2, padding=1)
        self.constant = constant

    def forward(self, x):
        return self.up(self.down(x), output_size=[8, 8] if self.constant else x.shape[2:])


@pytest.mark.parametrize("constant", [False, True])
def test_torch_fx_traces_an_output_size(constant):
    model = UNet(constant)
    traced = torch.fx.symbolic_trace(model)
    for side in (8, 8) if constant else (7, 8):
        images = torch.randn(1, 4, side, side)
        assert torch.equal(traced(images), model(images))
    if constant:
        with pytest.raises(ValueError, match="output_size must be from"):
            traced(torch.randn(1, 4, 20, 20))


def test_torch_fx_traces_a_weight_that_is_computed():
    class Filter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("image", torch.randn(1, 4, 5, 6))

        def forward(self, weight):
            return gemmconv.conv_transpose2d(self.image, 2 * weight)

    model, weight = Filter(), torch.randn(4, 3, 2, 2)
    assert torch.equal(torch.fx.symbolic_trace(model)(weight), model(weight))


def test_onnx_gets_the_operators_that_it_has(monkeypatch):
    model = gemmconv.ConvTranspose2d(4, 3, 3, 2, algorithm="gemm_col2im")
    input = torch.randn(2, 4, 5, 6)
    assert "gemmconv::" in str(torch.jit.trace(model, input).graph)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    traced = torch.jit.trace(model, input)
    assert "aten::_convolution" in str(traced.graph)
    assert "gemmconv::" not in str(traced.graph)
    for fold in (lambda x: gemmconv.im2col(x, 3), lambda x: gemmconv.col2im(x.flatten(2)[:, :, :4], (3, 3), 2)):
        assert "gemmconv::" not in str(torch.jit.trace(fold, input).graph)
