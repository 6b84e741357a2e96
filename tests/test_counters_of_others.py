"""fvcore, thop and ptflops count gemmconv's layers as they count torch's, each with the one line of its function here.

They know layers by their exact type, or operators by their name.
"""

import functools

import pytest
import torch
from torch import nn

import gemmconv


def model(device, algorithm=None):
    """Return a model of torch's layers; with an algorithm, converted to it.

    The last layer leaves all that can be left out, and has so few outputs that "auto" is gemmconv's on the CPU too.
    """
    layers = nn.Sequential(
        nn.Conv2d(3, 48, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(48, 48, (4, 3), stride=2, padding=1, groups=4),
        nn.ConvTranspose2d(48, 2, 3, bias=False),
    ).to(device)
    return layers if algorithm is None else gemmconv.convert(layers, algorithm=algorithm)


def fvcore(model, images, told):
    FlopCountAnalysis = pytest.importorskip("fvcore.nn").FlopCountAnalysis
    from fvcore.nn.jit_handles import conv_flop_count, get_shape

    counted = FlopCountAnalysis(model, images).unsupported_ops_warnings(False)
    if told:
        name = "gemmconv::conv_transpose2d"
        counted.set_op_handle(name, lambda i, o: conv_flop_count(*map(get_shape, i[:2] + o), True))
    return counted.total(), counted.by_module()


def thop(model, images, told):
    pytest.importorskip("thop")
    from thop.profile import profile, register_hooks

    line = {"custom_ops": {gemmconv.ConvTranspose2d: register_hooks[nn.ConvTranspose2d]}} if told else {}
    return profile(model, inputs=(images,), verbose=False, **line)


def ptflops(model, images, told, backend):
    get_model_complexity_info = pytest.importorskip("ptflops").get_model_complexity_info
    from ptflops.aten_ops import conv_flop_count
    from ptflops.pytorch_ops import MODULES_MAPPING

    hooks = {
        "pytorch": {gemmconv.ConvTranspose2d: MODULES_MAPPING[nn.ConvTranspose2d]},
        "aten": {
            torch.ops.gemmconv.conv_transpose2d: lambda i, o: conv_flop_count(
                i[0].shape, i[1].shape, o[0].shape, True, len(i) > 2 and i[2] is not None
            )
        },
    }[backend]
    return get_model_complexity_info(
        model,
        tuple(images.shape[1:]),
        print_per_layer_stat=False,
        as_strings=False,
        backend=backend,
        custom_modules_hooks=hooks if told else {},
    )


COUNTERS = {
    "fvcore": fvcore,
    "thop": thop,
    "ptflops": functools.partial(ptflops, backend="pytorch"),
    "ptflops aten": functools.partial(ptflops, backend="aten"),
}


@pytest.mark.parametrize("algorithm", ["auto", "gemm_col2im"])
@pytest.mark.parametrize("counter", COUNTERS)
def test_one_line_makes_it_count_what_it_counts_for_torch(counter, algorithm, device):
    count, images = COUNTERS[counter], torch.ones(2, 3, 6, 5, device=device)
    torchs = count(model(device), images, told=False)
    assert torchs[0] > 0
    assert count(model(device), images, told=True) == torchs
    assert count(model(device, algorithm), images, told=True) == torchs


@pytest.mark.parametrize("counter", COUNTERS)
def test_without_the_line_it_counts_none_of_the_layers(counter, device):
    count, images = COUNTERS[counter], torch.ones(2, 3, 6, 5, device=device)
    counted = count(model(device, "gemm_col2im"), images, told=False)
    if counted == count(model(device), images, told=False):
        pytest.skip("needs no line: ultralytics-thop, which has thop's name, counts subclasses as their base")
    assert counted[0] == count(model(device)[:2], images, told=False)[0]
