"""explain() of layers and models; explain() of problems is tested with the choice."""

import pytest
import torch
from torch import nn

import gemmconv


def test_a_layer_is_explained_by_a_tensor_or_a_shape():
    layer = nn.ConvTranspose2d(64, 32, 4, 2, 1).bfloat16()
    images = torch.randn(2, 64, 16, 16, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    found = gemmconv.explain(layer, images, gpu="H100")
    (call,) = found.calls
    assert found.algorithm == call.algorithm == "fused"
    assert (call.config.dtype, call.config.memory_format) == (torch.bfloat16, torch.channels_last)
    assert "conv_transpose2d [2, 64, 16, 16]" in str(found)
    assert gemmconv.explain(layer, (64, 16, 16), gpu="H100").input_shape == (1, 64, 16, 16)
    ours = gemmconv.convert(layer, algorithm="gemm_col2im")
    assert gemmconv.explain(ours, (2, 64, 16, 16)).algorithm == "gemm_col2im"


def test_signals_and_volumes_are_explained_by_their_images():
    signal = gemmconv.explain(nn.ConvTranspose1d(8, 4, 4, 2), (3, 8, 50), gpu="H100")
    assert signal.calls[0].config.problem.input_shape == (3, 8, 1, 50)
    apart = gemmconv.explain(nn.ConvTranspose3d(64, 32, 2, 2), (1, 64, 8, 9, 10), gpu="H100")
    assert apart.calls[0].config.problem.input_shape == (1, 64, 72, 10)
    assert apart.calls[0].config.problem.out_channels == 64
    dense = gemmconv.explain(nn.ConvTranspose3d(64, 32, 3, 2, 1), (1, 64, 8, 9, 10), gpu="A100", precision="tf32")
    assert dense.algorithm == "native"
    assert "torch's operator is expected to be faster" in str(dense)
    limited = gemmconv.ConvTranspose3d(64, 32, 2, 2, workspace_limit=1000)
    assert gemmconv.explain(limited, (1, 64, 8, 9, 10), gpu="H200", precision="tf32").volume.workspace_limit == 1000


def test_a_volume_is_explained_by_its_images_with_the_most_taps():
    layer = nn.ConvTranspose3d(64, 4, 3, (2, 1, 1), 1, dilation=3)  # of even output slices one tap, of odd ones two
    calls = gemmconv.explain(layer, (2, 64, 16, 32, 32), gpu="H100").calls
    assert [one.config.problem.in_channels for one in calls] == [128, 64]


@pytest.mark.parametrize("gpu", ["H100", "A100"])
def test_a_volume_whose_outputs_are_all_bias_is_explained(gpu):
    layer = nn.ConvTranspose3d(2, 6, (1, 3, 1), (2, 1, 3), (1, 2, 0))  # the one output slice is reached by no tap
    found = gemmconv.explain(layer, (2, 2, 2, 9, 5), gpu=gpu)
    assert found.calls[0].config.problem.batch == 0
    assert str(found)
    assert str(gemmconv.explain(nn.Sequential(layer), torch.zeros(2, 2, 2, 9, 5), gpu=gpu))


def test_a_model_is_explained_by_a_table():
    model = nn.Sequential(nn.ConvTranspose2d(8, 4, 2, 2), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 2, 2, 2))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    found = gemmconv.explain(model, torch.randn(1, 8, 5, 6), gpu="H100")
    assert [one.input_shape for one in found.layers] == [(1, 8, 5, 6), (1, 4, 10, 12)]
    head, *rows = str(found).splitlines()
    assert head.split("  ")[0] == "layer"
    assert [row.split()[0] for row in rows] == ["0", "2"]
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert not any(layer._forward_pre_hooks for layer in model)


def test_what_cannot_be_explained_is_refused():
    with pytest.raises(TypeError, match=r"the first argument must be a gemmconv\.Problem, a layer"):
        gemmconv.explain(3)
    with pytest.raises(TypeError, match="a layer must be followed by its input"):
        gemmconv.explain(nn.ConvTranspose2d(2, 2, 2))
    with pytest.raises(RuntimeError, match="explain: input must have shape"):
        gemmconv.explain(nn.ConvTranspose2d(2, 2, 2), (3,))
    for shape, words in ((None, "got None"), (5, "got 5"), ("1255", "got '1255'"), ((1, 2, 5, 5.0), "an int, got 5.0")):
        with pytest.raises(TypeError, match=f"explain: .*input must be .*{words}"):
            gemmconv.explain(nn.ConvTranspose2d(2, 2, 2), shape)
    with pytest.raises(ValueError, match=r"gpu must be one of .*, got 3"):
        gemmconv.explain(nn.ConvTranspose2d(2, 2, 2), (1, 2, 5, 5), gpu=3)
