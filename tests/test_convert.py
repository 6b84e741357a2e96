"""convert(), report(), revert(), converted() and patched(): whole models, and layers that others have changed."""

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import gemmconv

KINDS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
OURS = {1: gemmconv.ConvTranspose1d, 2: gemmconv.ConvTranspose2d, 3: gemmconv.ConvTranspose3d}
each_rank = pytest.mark.parametrize("rank", KINDS)


class Decoder(nn.Module):
    """Nested layers, one of them reached by two names and in a plain list, and one that convert() does not know."""

    def __init__(self):
        super().__init__()
        self.shared = nn.ConvTranspose2d(4, 4, 3, padding=1)
        self.up = nn.Sequential(nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1), nn.ReLU(), self.shared)
        self.again, self.listed = nn.ModuleDict({"tied": self.shared}), [self.shared]
        self.plain = nn.Conv2d(4, 2, 3)

    def forward(self, images):
        return self.plain(self.listed[0](self.up(images)))


class OwnForward(nn.ConvTranspose2d):
    def forward(self, input, output_size=None):
        return super().forward(input, output_size) + 1


def signal(rank, channels=3):
    return torch.randn(2, channels, *(5, 6, 4)[:rank])


def results(layer, inputs):
    """The output, and the gradients of all parameters."""
    layer.zero_grad()
    output = layer(inputs)
    output.square().sum().backward()
    return [output.detach(), *(one.grad.clone() for one in layer.parameters())]


def test_convert_and_revert_leave_objects_names_and_parameters():
    model = Decoder()
    names, parameters = [name for name, _ in model.named_modules()], dict(model.named_parameters())
    images, keys, generator = torch.randn(2, 3, 5, 6), list(model.state_dict()), torch.get_rng_state()
    before, optimizer = results(model, images), torch.optim.SGD(model.parameters(), lr=0.1)
    assert gemmconv.convert(model) is model
    assert torch.equal(torch.get_rng_state(), generator)
    assert [name for name, _ in model.named_modules()] == names
    assert model.shared is model.up[2] is model.again["tied"] is model.listed[0]
    assert type(model.shared) is type(model.up[0]) is gemmconv.ConvTranspose2d
    assert isinstance(model.shared, nn.ConvTranspose2d)
    assert type(model.plain) is nn.Conv2d
    assert list(model.state_dict()) == keys
    assert all(one is parameters[name] for name, one in model.named_parameters())
    torch.testing.assert_close(results(model, images), before)
    assert gemmconv.revert(model) is model
    assert type(model.shared) is nn.ConvTranspose2d
    assert vars(model.shared).keys() == vars(nn.ConvTranspose2d(4, 4, 3, padding=1)).keys()
    assert all(map(torch.equal, results(model, images), before))  # the same bits
    weight = model.up[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.up[0].weight, weight)


@each_rank
def test_convert_of_a_single_layer_keeps_its_settings(rank):
    layer = KINDS[rank](3, 4, 3, stride=2, padding=1, output_padding=1, dilation=2, dtype=torch.bfloat16)
    layer = layer.eval().requires_grad_(False)
    text, weight, input = repr(layer), layer.weight, signal(rank).bfloat16()
    before = layer(input)
    assert gemmconv.convert(layer, algorithm="native", precision="ieee", workspace_limit=1 << 20) is layer
    assert type(layer) is OURS[rank]
    assert repr(layer).startswith(text.removesuffix(")"))
    assert (layer.algorithm, layer.precision, layer.workspace_limit) == ("native", "ieee", 1 << 20)
    assert layer.weight is weight
    assert not layer.training
    assert torch.equal(layer(input), before)


def test_converting_again_changes_settings_alone():
    model = gemmconv.convert(Decoder(), algorithm="native")
    modules = list(model.modules())
    gemmconv.convert(model, precision="ieee")
    assert list(model.modules()) == modules
    assert (model.shared.algorithm, model.shared.precision) == ("auto", "ieee")


def test_convert_rejects_what_is_no_model_and_unknown_options():
    for call in (gemmconv.convert, gemmconv.revert, gemmconv.report):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
            call(3)
    with pytest.raises(ValueError, match="fastest"):
        gemmconv.convert(Decoder(), algorithm="fastest")
    with pytest.raises(ValueError, match="fp16"):
        gemmconv.convert(nn.ReLU(), precision="fp16")


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 5)
    return layer


@each_rank
@pytest.mark.parametrize(
    "change",
    [
        nn.utils.weight_norm,
        parametrizations.weight_norm,
        nn.utils.spectral_norm,
        parametrizations.spectral_norm,
        pruned,
    ],
    ids=["weight_norm", "parametrized weight_norm", "spectral_norm", "parametrized spectral_norm", "pruned"],
)
def test_layers_whose_weights_are_made_anew_are_converted(rank, change):
    layer, input = change(KINDS[rank](3, 4, 3, dtype=torch.float64)).eval(), signal(rank).double()
    before = results(layer, input)
    gemmconv.convert(layer)
    assert isinstance(layer, OURS[rank])
    torch.testing.assert_close(results(layer, input), before)
    if parametrize.is_parametrized(layer):  # torch copies no other of these
        torch.testing.assert_close(results(copy.deepcopy(layer), input), before)
    gemmconv.revert(layer)
    assert not isinstance(layer, OURS[rank])
    assert all(map(torch.equal, results(layer, input), before))


def test_removing_a_parametrization_leaves_a_converted_layer():
    layer = gemmconv.convert(parametrizations.weight_norm(nn.ConvTranspose2d(3, 4, 3)))
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is gemmconv.ConvTranspose2d
    assert type(gemmconv.revert(layer)) is nn.ConvTranspose2d
    parametrizations.weight_norm(layer)
    parametrize.remove_parametrizations(layer, "weight")  # leaves a hook of the state dict
    assert type(gemmconv.convert(layer)) is gemmconv.ConvTranspose2d


@pytest.mark.parametrize("name", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_go_on_being_called(name):
    layer, called = nn.ConvTranspose2d(3, 4, 3), []
    getattr(layer, name)(lambda *_: called.append(name))
    gemmconv.convert(layer)(torch.randn(1, 3, 4, 4, requires_grad=True)).sum().backward()
    assert type(layer) is gemmconv.ConvTranspose2d
    assert called == [name]


def replaced(layer):
    layer.forward = lambda input: input
    return layer


def test_report_says_what_was_left_and_why(capsys, caplog):
    caplog.set_level(logging.INFO, "gemmconv")
    model = nn.ModuleDict(
        {
            "own": OwnForward(3, 4, 3),
            "lazy": nn.LazyConvTranspose2d(4, 3),
            "replaced": replaced(nn.ConvTranspose1d(3, 4, 3)),
            "scripted": torch.jit.script(nn.ConvTranspose2d(3, 4, 3)),
            "volume": nn.ConvTranspose3d(3, 4, 3),
            "other": nn.Conv2d(3, 4, 3),
        }
    )
    kinds = {name: type(module) for name, module in model.items()}
    gemmconv.convert(model)
    assert [name for name, module in model.items() if type(module) is not kinds[name]] == ["volume"]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "1 of 5 transposed convolutions" in caplog.text
    lines = {line.name: line for line in gemmconv.report(model)}
    assert [name for name, line in lines.items() if line.is_converted] == ["volume"]
    for name, words in {
        "own": "subclass",
        "lazy": "run the model once",
        "replaced": "its forward was replaced",
        "scripted": "it was scripted: trace a converted model",
        "volume": "algorithm=auto",
    }.items():
        assert words in lines[name].reason, name
    assert "volume" in capsys.readouterr().out
    model["added"] = nn.ConvTranspose2d(3, 4, 3)
    assert "convert was not called" in gemmconv.report(model)[-1].reason
    gemmconv.convert(nn.ReLU())
    assert caplog.records[-1].levelname == "WARNING"
    assert str(gemmconv.report(nn.ReLU())) == "no transposed convolution in this model"


def test_a_lazy_layer_is_converted_once_it_has_parameters():
    layer, images = nn.LazyConvTranspose2d(4, 3), torch.randn(2, 3, 5, 6)
    before = layer(images)
    torch.testing.assert_close(gemmconv.convert(layer)(images), before)
    assert type(layer) is gemmconv.ConvTranspose2d


def test_a_compiled_layer_is_compiled_for_its_new_class():
    layer = nn.ConvTranspose2d(4, 6, 3)
    layer.compile(backend="eager")
    images = torch.randn(1, 4, 5, 6)
    before = layer(images)
    gemmconv.convert(layer, algorithm="gemm_col2im")
    torch.testing.assert_close(layer(images), before)


@each_rank
def test_converted_models_are_copied_pickled_and_saved(rank):
    options = {"algorithm": "native", "precision": "ieee", "workspace_limit": 1 << 20}
    layer, input, file = gemmconv.convert(KINDS[rank](3, 4, 3), **options), signal(rank), io.BytesIO()
    wanted = layer(input)  # whatever the call keeps must not get in the way
    torch.save([layer, layer.state_dict()], file)
    file.seek(0)
    loaded, state = torch.load(file, weights_only=False)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert type(again) is OURS[rank]
        assert repr(again) == repr(layer)
        assert again.weight is not layer.weight
        assert torch.equal(again(input), wanted)
    other = KINDS[rank](3, 4, 3)
    other.load_state_dict(state)
    torch.testing.assert_close(other(input), wanted)


def test_a_model_is_converted_for_a_block():
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 3), gemmconv.ConvTranspose2d(4, 4, 3, algorithm="direct"))
    with gemmconv.converted(model, algorithm="native") as same:
        assert same is model
        assert [one.algorithm for one in model] == ["native", "native"]
    assert [type(one) for one in model] == [nn.ConvTranspose2d, gemmconv.ConvTranspose2d]
    assert model[1].algorithm == "direct"
    with gemmconv.converted(model):
        taken, model[0] = model[0], gemmconv.ConvTranspose2d(3, 4, 3, algorithm="native")
    assert [type(one) for one in (taken, model[0])] == [nn.ConvTranspose2d, gemmconv.ConvTranspose2d]


def test_revert_leaves_a_layer_whose_forward_was_replaced(caplog):
    layer, images = gemmconv.convert(nn.ConvTranspose2d(3, 4, 3)), torch.randn(1, 3, 5, 6)
    ours, wanted = layer.forward, layer(images)
    layer.forward = lambda *inputs: ours(*inputs)
    assert gemmconv.revert(layer)(images).equal(wanted)
    assert "stays, since its forward was replaced" in caplog.text


@each_rank
def test_functions_are_patched_for_a_block(rank, monkeypatch):
    name = f"conv_transpose{rank}d"
    weight, input = torch.randn(3, 2, *(3,) * rank), signal(rank)
    for function in (getattr(torch.nn.functional, name), getattr(torch, name)):
        wanted = function(input, weight, stride=2)
        with gemmconv.patched(algorithm="gemm_col2im"):
            found = function(input, weight, stride=2)
            with pytest.raises(RuntimeError, match=f"{name}: stride must be at least 1"):
                function(input, weight, stride=0)
        torch.testing.assert_close(found, wanted)
        with pytest.raises(RuntimeError) as plain:
            function(input, weight, stride=0)
        assert name not in str(plain.value)  # torch's own words again


def test_layers_of_ours_keep_their_settings_in_a_patched_block(monkeypatch):
    layer = gemmconv.ConvTranspose2d(4, 3, 3, stride=2, algorithm="native")
    seen, images = [], torch.randn(1, 4, 5, 6)
    monkeypatch.setattr(gemmconv.patched, "__torch_function__", lambda *arguments: seen.append(arguments))
    with torch.no_grad(), gemmconv.patched(algorithm="direct"):
        found = [layer(images) for _ in range(2)]
    assert seen == []
    assert all(one.shape == (1, 3, 11, 13) for one in found)
    complex_layer = gemmconv.ConvTranspose2d(4, 3, 3, dtype=torch.complex64)
    monkeypatch.undo()
    with gemmconv.patched(algorithm="gemm_col2im"):
        assert complex_layer(images.to(torch.complex64)).dtype == torch.complex64


def test_report_says_that_a_subclass_of_our_layer_is_computed_by_gemmconv(capsys):
    class Own(gemmconv.ConvTranspose2d):
        pass

    (line,) = gemmconv.report(torch.nn.Sequential(Own(2, 2, 2)))
    assert line.is_converted
    assert line.kind == "Own"
