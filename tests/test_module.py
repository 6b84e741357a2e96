"""The module as a drop-in for torch.nn.ConvTranspose2d, and convert()."""

import copy
import inspect
import io
import pickle

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
def test_module_has_torchs_initial_values(args, kwargs):
    theirs, ours = pair_of_modules(args, kwargs)
    assert isinstance(ours, torch.nn.ConvTranspose2d)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
        assert ours.state_dict()[name].dtype == value.dtype


@by_arguments
def test_module_computes_what_torchs_does(args, kwargs, device):
    theirs, ours = (module.to(device) for module in pair_of_modules(args, kwargs))
    ours.precision = "ieee"
    for batch in ((2,), ()):
        images = images_for(theirs, batch)
        with conv_precision("ieee"):
            torch.testing.assert_close(ours(images), theirs(images))


@by_arguments
def test_module_state_dict_goes_both_ways(args, kwargs):
    theirs, _ = pair_of_modules(args, kwargs)
    ours = gemmconv.ConvTranspose2d(*args, **kwargs)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    images = images_for(theirs)
    torch.testing.assert_close(ours(images), theirs(images))
    back = torch.nn.ConvTranspose2d(*args, **kwargs)
    assert back.load_state_dict(ours.state_dict()).unexpected_keys == []
    torch.testing.assert_close(back(images), theirs(images))


def test_module_state_dict_survives_a_weights_only_file():
    ours = gemmconv.ConvTranspose2d(3, 4, 3, algorithm="native", precision="ieee")
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    torch.nn.ConvTranspose2d(3, 4, 3).load_state_dict(loaded)


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
    theirs, ours = pair_of_modules((3, 5, 3), {"stride": 2, "padding": 1})
    images = images_for(theirs, batch)
    for height in (9, 10):
        for width in (11, 12):
            full_size = (*batch, 5, height, width)
            for output_size in ((height, width), [height, width], torch.Size((height, width)), full_size):
                output = ours(images, output_size=output_size)
                assert output.shape == full_size
                torch.testing.assert_close(output, theirs(images, output_size=output_size))


def test_module_output_size_with_dilation_and_stride_per_axis():
    theirs, ours = pair_of_modules((3, 5, 3), {"stride": (3, 1), "dilation": (1, 2)})
    images = images_for(theirs)
    for size in ((15, 10), (17, 10)):
        torch.testing.assert_close(ours(images, size), theirs(images, size))


@pytest.mark.parametrize("options", [{}, {"algorithm": "native", "precision": "ieee", "workspace_limit": 1 << 20}])
@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "torch_save"])
def test_module_copies_keep_values_and_options(copier, options):
    module = gemmconv.ConvTranspose2d(3, 4, 3, stride=2, **options)
    images = images_for(module)
    wanted = module(images)  # before copying: whatever the call caches must not get in the way
    if copier == "deepcopy":
        twin = copy.deepcopy(module)
    elif copier == "pickle":
        twin = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert type(twin) is gemmconv.ConvTranspose2d
    assert repr(twin) == repr(module)
    assert twin.weight is not module.weight
    assert torch.equal(twin(images), wanted)


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


def test_module_in_channels_last_returns_channels_last(device):
    module = gemmconv.ConvTranspose2d(3, 4, 3, stride=2, device=device).to(memory_format=torch.channels_last)
    images = images_for(module)
    for given in (images, images.contiguous(memory_format=torch.channels_last)):
        output = module(given)
        assert output.is_contiguous(memory_format=torch.channels_last)
        output.sum().backward()
    assert module.weight.grad.shape == module.weight.shape


def test_module_trains_as_torchs_does(device):
    theirs, ours = (module.to(device) for module in pair_of_modules((3, 5, 3), {"stride": 2, "dtype": torch.float64}))
    images, target = images_for(theirs), torch.randn(2, 5, 11, 13, dtype=torch.float64, device=device)
    for module in (theirs, ours):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(images), target).backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_module_built_on_meta_can_be_filled():
    with torch.device("meta"):
        module = gemmconv.ConvTranspose2d(3, 4, 3)
    assert module(torch.empty(2, 3, 5, 6, device="meta")).shape == (2, 4, 7, 8)
    filled = module.to_empty(device="cpu")
    filled.load_state_dict(torch.nn.ConvTranspose2d(3, 4, 3).state_dict())
    assert filled(torch.randn(2, 3, 5, 6)).shape == (2, 4, 7, 8)


# convert()


class Decoder(torch.nn.Module):
    """Nested modules, one of them reached by two names, and one that convert() does not know."""

    def __init__(self):
        super().__init__()
        self.shared = torch.nn.ConvTranspose2d(4, 4, 3, padding=1)
        self.up = torch.nn.Sequential(
            torch.nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1), torch.nn.ReLU(), self.shared
        )
        self.again = torch.nn.ModuleDict({"tied": self.shared})
        self.one_dimensional = torch.nn.ConvTranspose1d(4, 2, 3)
        self.plain = torch.nn.Conv2d(4, 2, 3)

    def forward(self, images):
        return self.plain(self.again["tied"](self.up(images)))


class OwnForward(torch.nn.ConvTranspose2d):
    def forward(self, input, output_size=None):
        return super().forward(input, output_size) + 1


def test_convert_swaps_nested_modules_in_place():
    model = Decoder()
    names = [name for name, _ in model.named_modules()]
    converted = gemmconv.convert(model)
    assert converted is model
    assert [name for name, _ in model.named_modules()] == names
    assert type(model.up[0]) is type(model.up[2]) is gemmconv.ConvTranspose2d
    assert type(model.one_dimensional) is torch.nn.ConvTranspose1d
    assert type(model.plain) is torch.nn.Conv2d


def test_convert_keeps_shared_modules_shared():
    model = gemmconv.convert(Decoder())
    assert type(model.shared) is gemmconv.ConvTranspose2d
    assert model.shared is model.up[2] is model.again["tied"]


def test_convert_keeps_results_state_dict_and_parameters():
    model = Decoder()
    images = torch.randn(2, 3, 5, 6)
    before, keys = model(images), list(model.state_dict())
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gemmconv.convert(model)
    assert list(model.state_dict()) == keys
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    torch.testing.assert_close(model(images), before)
    model(images).sum().backward()
    weight = model.up[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.up[0].weight, weight)


def test_convert_of_a_single_module_returns_the_new_one():
    module = torch.nn.ConvTranspose2d(3, 4, 3, stride=2)
    converted = gemmconv.convert(module)
    assert type(converted) is gemmconv.ConvTranspose2d
    assert converted.weight is module.weight
    assert converted.bias is module.bias


def test_convert_passes_its_options_on():
    model = gemmconv.convert(Decoder(), algorithm="native", precision="ieee", workspace_limit=1 << 20)
    assert model.up[0].algorithm == "native"
    assert model.up[0].precision == "ieee"
    assert model.up[0].workspace_limit == 1 << 20


def test_convert_rejects_unknown_options():
    with pytest.raises(ValueError, match="fastest"):
        gemmconv.convert(Decoder(), algorithm="fastest")
    model = torch.nn.Sequential(torch.nn.ReLU())
    with pytest.raises(ValueError, match="fp16"):
        gemmconv.convert(model, precision="fp16")


@by_arguments
def test_convert_keeps_the_settings_of_the_layer(args, kwargs):
    module = torch.nn.ConvTranspose2d(*args, **kwargs)
    converted = gemmconv.convert(module)
    images = images_for(module)
    torch.testing.assert_close(converted(images), module(images))
    assert repr(converted).startswith(repr(module).removesuffix(")"))


def test_convert_keeps_flags_dtype_device_and_layout(device):
    module = torch.nn.ConvTranspose2d(3, 4, 3, dtype=torch.bfloat16, device=device)
    module = module.to(memory_format=torch.channels_last).eval().requires_grad_(False)
    module.weight.requires_grad_()
    converted = gemmconv.convert(module)
    assert not converted.training
    assert converted.weight.requires_grad
    assert not converted.bias.requires_grad
    assert converted.weight.dtype == torch.bfloat16
    assert converted.weight.device.type == device
    assert converted.weight.is_contiguous(memory_format=torch.channels_last)


def test_convert_of_a_compiled_layer_compiles_the_new_one():
    layer = torch.nn.ConvTranspose2d(4, 6, 3)
    layer.compile(backend="eager")
    converted = gemmconv.convert(layer, algorithm="gemm_col2im")
    calls = []
    converted.forward = lambda input: calls.append(input)
    converted(torch.ones(1, 4, 5, 6))
    assert len(calls) == 1
    assert converted._compiled_call_impl is not layer._compiled_call_impl


def test_convert_draws_no_random_numbers():
    model = Decoder()
    state = torch.get_rng_state()
    gemmconv.convert(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_convert_leaves_subclasses_alone():
    model = torch.nn.Sequential(OwnForward(3, 4, 3), torch.nn.LazyConvTranspose2d(4, 3))
    gemmconv.convert(model)
    assert type(model[0]) is OwnForward
    assert type(model[1]) is torch.nn.LazyConvTranspose2d


def test_convert_leaves_parametrized_modules_alone():
    model = torch.nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(torch.nn.ConvTranspose2d(3, 4, 3)),
        torch.nn.utils.parametrizations.spectral_norm(torch.nn.ConvTranspose2d(4, 4, 3)),
    )
    types = [type(module) for module in model]
    images = torch.randn(2, 3, 5, 6)
    before = model.eval()(images)
    gemmconv.convert(model)
    assert [type(module) for module in model] == types
    assert torch.equal(model(images), before)


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: module.register_forward_pre_hook(lambda *_: None),
        lambda module: module.register_full_backward_hook(lambda *_: None),
        lambda module: module.register_full_backward_pre_hook(lambda *_: None),
        lambda module: module.register_state_dict_post_hook(lambda *_: None),
        lambda module: module.register_load_state_dict_post_hook(lambda *_: None),
    ],
    ids=["forward", "forward_pre", "backward", "backward_pre", "state_dict", "load_state_dict"],
)
def test_convert_leaves_modules_with_hooks_alone(register):
    model = torch.nn.Sequential(torch.nn.ConvTranspose2d(3, 4, 3), torch.nn.ConvTranspose2d(4, 4, 3))
    register(model[0])
    gemmconv.convert(model)
    assert type(model[0]) is torch.nn.ConvTranspose2d
    assert type(model[1]) is gemmconv.ConvTranspose2d


def test_convert_twice_changes_nothing_more():
    model = gemmconv.convert(Decoder(), algorithm="native")
    modules = list(model.modules())
    gemmconv.convert(model)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert model.up[0].algorithm == "native"


def test_convert_of_a_materialised_lazy_module():
    module = torch.nn.LazyConvTranspose2d(4, 3)
    images = torch.randn(2, 3, 5, 6)
    before = module(images)
    torch.testing.assert_close(gemmconv.convert(module)(images), before)


def test_convert_of_a_single_module_leaves_the_hooks_of_either_to_it():
    old = torch.nn.ConvTranspose2d(4, 6, 3)
    new, called = gemmconv.convert(old, algorithm="native"), []
    new.register_forward_hook(lambda *_: called.append("new"))
    old.register_forward_pre_hook(lambda *_: called.append("old"))
    images = torch.randn(1, 4, 5, 6)
    assert torch.equal(new(images), old(images))
    assert called == ["new", "old"]


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
