"""The module as a drop-in for torch.nn.ConvTranspose2d."""

import copy
import inspect
import itertools

import pytest
import torch
from torch.nn.utils import prune

import gemmconv
from tests.samples import conv_precision

ARGUMENTS = [
    ((3, 5, 3), {}),
    ((4, 6, (3, 2)), {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "groups": 2}),
    ((4, 4, 2), {"stride": 2, "groups": 4, "bias": False, "dilation": (1, 2)}),
    ((2, 3, 4), {"stride": 2, "padding": 1, "dtype": torch.float64}),
]
by_arguments = pytest.mark.parametrize(
    ("args", "kwargs"), ARGUMENTS, ids=[f"{args}{kwargs}" for args, kwargs in ARGUMENTS]
)


def pair_of_modules(args, kwargs):
    """Return torch's module and ours, each made under the same seed."""
    torch.manual_seed(11)
    theirs = torch.nn.ConvTranspose2d(*args, **kwargs)
    torch.manual_seed(11)
    return theirs, gemmconv.ConvTranspose2d(*args, **kwargs)


def images_for(module, batch=(2,)):
    return torch.randn(*batch, module.in_channels, 5, 6, dtype=module.weight.dtype, device=module.weight.device)


def test_module_signature_is_torchs_and_three_options():
    theirs = inspect.signature(torch.nn.ConvTranspose2d).parameters
    ours = inspect.signature(gemmconv.ConvTranspose2d).parameters
    assert list(ours) == [*theirs, "algorithm", "precision", "workspace_limit"]
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


@by_arguments
def test_module_has_torchs_initial_values_and_computes_what_torchs_does(args, kwargs, device):
    theirs, ours = (module.to(device) for module in pair_of_modules(args, kwargs))
    assert isinstance(ours, torch.nn.ConvTranspose2d)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
        assert ours.state_dict()[name].dtype == value.dtype
    ours.precision = "ieee"
    for batch in ((2,), ()):
        images = images_for(theirs, batch)
        with conv_precision("ieee"):
            torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize("more", [(), ([7, 8],)], ids=["", "output_size"])
def test_module_with_a_parametrization_computes_it_once_a_call(more):
    ours = torch.nn.utils.parametrizations.spectral_norm(gemmconv.ConvTranspose2d(3, 4, 3))
    computed = []
    ours.parametrizations.weight.register_forward_hook(lambda *_: computed.append(1))
    for call in (1, 2):
        ours(torch.randn(2, 3, 5, 6), *more)
        assert len(computed) == call


def test_module_repr_names_algorithm_and_layer():
    text = repr(gemmconv.ConvTranspose2d(3, 4, (3, 5), stride=2, output_padding=1, algorithm="gemm_col2im"))
    assert text.startswith("ConvTranspose2d(3, 4, kernel_size=(3, 5), stride=(2, 2)")
    assert "gemm_col2im" in text
    assert "output_padding=(1, 1)" in text
    assert "ieee" in repr(gemmconv.ConvTranspose2d(3, 4, 3, precision="ieee"))
    assert "4096" in repr(gemmconv.ConvTranspose2d(3, 4, 3, workspace_limit=4096))


@pytest.mark.parametrize("batch", [(2,), ()], ids=["batched", "unbatched"])
def test_module_output_size_picks_the_output_padding(batch):
    for options, heights, widths in (
        ({"stride": 2, "padding": 1}, (9, 10), (11, 12)),
        ({"stride": (3, 1), "dilation": (1, 2)}, (15, 17), (10,)),
    ):
        theirs, ours = pair_of_modules((3, 5, 3), options)
        images = images_for(theirs, batch)
        for size in itertools.product(heights, widths):
            for output_size in (size, [*size], torch.Size(size), (*batch, 5, *size)):
                output = ours(images, output_size)
                assert output.shape == (*batch, 5, *size)
                torch.testing.assert_close(output, theirs(images, output_size=output_size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_module_follows_a_change_of_dtype(dtype, device):
    module = gemmconv.ConvTranspose2d(3, 4, 3, stride=2).to(device)
    before = module(images_for(module))
    module.to(dtype)
    images = images_for(module)
    output = module(images)
    assert output.dtype == dtype
    assert output.shape == before.shape
    wide = torch.nn.functional.conv_transpose2d(images.double(), module.weight.double(), module.bias.double(), stride=2)
    torch.testing.assert_close(output.double(), wide, rtol=2e-2, atol=2e-2)


def test_module_of_torch_whose_class_is_changed_has_the_defaults():
    layer = torch.nn.ConvTranspose2d(4, 6, 3)
    layer.__class__ = gemmconv.ConvTranspose2d
    assert "algorithm=auto" in repr(layer)
    assert layer(torch.randn(1, 4, 5, 6)).shape == (1, 6, 7, 8)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: torch.nn.utils.spectral_norm(layer, n_power_iterations=1),
        lambda layer: torch.nn.utils.parametrizations.spectral_norm(layer),
        lambda layer: torch.nn.utils.parametrizations.weight_norm(layer),
        lambda layer: torch.nn.utils.parametrizations.weight_norm(layer, "bias"),
        lambda layer: prune.l1_unstructured(layer, "weight", 5),
        lambda layer: prune.l1_unstructured(layer, "bias", 1),
        lambda layer: layer.register_parameter("bias", None),
        lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.ones_like(layer.weight))),
        lambda layer: layer.weight.data.fill_(2.0),
        lambda layer: setattr(layer.weight, "data", torch.ones(2, 3, 2, 2)),
    ],
    ids=range(10),
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_known_layer_that_changes_is_computed_with_what_it_has_then(change):
    """As torch's, wherever its weight and bias are kept."""
    torch.manual_seed(0)
    theirs = torch.nn.ConvTranspose2d(2, 3, 2, 2)
    ours = gemmconv.convert(copy.deepcopy(theirs))
    image = torch.randn(1, 2, 4, 4)
    for layer in (ours, ours, theirs):
        layer(image)
    results = []
    for layer in (theirs, ours):
        torch.manual_seed(1)
        change(layer)
        layer.eval()
        results.append([layer(image) for _ in range(3)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    weight = torch.randn(2, 3, 2, 2)
    called = [torch.func.functional_call(layer, {"weight": weight}, (image,)) for layer in (theirs, ours)]
    torch.testing.assert_close(*called, rtol=0, atol=0)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_list_that_is_edited_in_place_counts(axes):
    kinds = {1: "ConvTranspose1d", 2: "ConvTranspose2d", 3: "ConvTranspose3d"}
    layer, torchs = (getattr(owner, kinds[axes])(2, 2, 3) for owner in (gemmconv, torch.nn))
    x = torch.ones(1, 2, *[5] * axes)
    for one in (layer, torchs):
        one.stride = [2] * axes
        one(x)
        one.stride[0] = 1
    assert layer(x).shape == torchs(x).shape
