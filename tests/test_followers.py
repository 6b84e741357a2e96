"""What a module's first call has compiled for the modules behind it. There is no GPU, and nothing is compiled."""

import copy
import gc
import pickle
import sys
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("cuda.core", reason="compiling needs the cuda-core package")

import gemmconv
from gemmconv.kernels import bind
from gemmconv.ops import followers, signatures
from gemmconv.ops.schemas import WithoutData
from gemmconv.runtime import compiler, pool
from tests.processes import in_threads

GPU = torch.device("cuda", 0)
DCGAN = (100, 64, 4, 1, 0), (64, 32, 4, 2, 1), (32, 16, 4, 2, 1), (16, 8, 4, 2, 1), (8, 3, 4, 2, 1)


def model_of(layers=DCGAN, kind=gemmconv.ConvTranspose2d, **options):
    """A network of such layers, with others between."""
    made = [
        [kind(*layer, bias=i % 2 == 0, **options), nn.BatchNorm2d(layer[1]), nn.ReLU()]
        for i, layer in enumerate(layers)
    ]
    return nn.Sequential(*(one for three in made for one in three))


def layers_of(model):
    return [one for one in model.modules() if isinstance(one, nn.ConvTranspose2d)]


def alike(tensor, device=GPU, dtype=None):
    """A tensor without data, on a GPU that is not there."""
    made = WithoutData.of(tensor.shape, tensor.stride(), dtype or tensor.dtype, device)
    return made.requires_grad_(tensor.requires_grad)


def on_gpu(model, device=GPU):
    for layer in layers_of(model):
        layer._parameters.update({k: alike(one, device) for k, one in layer._parameters.items() if one is not None})
    return model


def compute(layer, images):
    geometry = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
    return gemmconv.conv_transpose2d(images, layer.weight, layer.bias, *geometry)


def real_calls(model, images, recorded=True):
    """Shapes, strides, dtypes and whether gradients are recorded of all tensors of a model's calls, of fakes."""
    noted = []
    twin = copy.deepcopy(model).to("meta")
    for layer in layers_of(twin):
        layer.forward = partial(compute, layer)
        layer.register_forward_pre_hook(lambda layer, args: noted.append((*args, layer.weight, layer.bias)))
    with torch.set_grad_enabled(recorded):
        twin(torch.empty_strided(images.shape, images.stride(), device="meta").requires_grad_(images.requires_grad))
    return [as_known(tensors, recorded) for tensors in noted]


def as_known(tensors, recorded=True):
    return [
        one if one is None else (one.shape, one.stride(), one.dtype, recorded and one.requires_grad) for one in tensors
    ]


@pytest.fixture
def asked(monkeypatch):
    """What other threads are asked to compile, as (pass, tensors, options); they are this one."""
    asked = []
    monkeypatch.setattr(followers, "_unguessed", weakref.WeakValueDictionary())
    monkeypatch.setattr(followers, "compile_forward_ahead", lambda *call: asked.append(("forward", *call)))
    monkeypatch.setattr(followers, "compile_backward_ahead", lambda *call: asked.append(("backward", *call[:2])))
    monkeypatch.setattr(pool, "submit", lambda work, urgent: work() if not urgent else None)
    monkeypatch.setattr(pool, "cores", lambda: 4)
    monkeypatch.setattr(signatures, "find_call", lambda *_: (None, "key"))
    monkeypatch.setattr(gemmconv.ConvTranspose2d, "_function", lambda *_, **__: "result")
    return asked


def noise(batch=8, channels=100, size=(1, 1), memory_format=torch.contiguous_format, dtype=torch.float32):
    return alike(torch.empty((batch, channels, *size), memory_format=memory_format, device="meta", dtype=dtype))


def asked_for(asked, direction):
    return [as_known(tensors) for one, tensors, _ in asked if one == direction]


def guessed_shapes(asked):
    """The shapes of the inputs of what was asked for, which is forgotten."""
    shapes = [tensors[0].shape for _, tensors, _ in asked]
    asked.clear()
    return shapes


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_first_call_has_all_that_follows_compiled_forward_first(memory_format, recorded, asked):
    model = model_of().to(memory_format=memory_format)
    images = noise(memory_format=memory_format)
    followed = real_calls(model, images, recorded)[1:]
    on_gpu(model)
    with torch.set_grad_enabled(recorded):
        assert layers_of(model)[0](images) == "result"
    assert asked_for(asked, "forward") == followed
    assert asked_for(asked, "backward") == (followed if recorded else [])
    assert [one for one, *_ in asked] == ["forward"] * 4 + ["backward"] * 4 * recorded
    assert [options for *_, options in asked[:4]] == [((2, 2), (1, 1), (0, 0), 1, (1, 1), "auto", None, None)] * 4
    assert all(tensors[0].device == GPU for _, tensors, _ in asked)


def test_guesses_are_made_once_about_each_module_and_none_about_those_called(asked):
    first, second, third, fourth, fifth = layers_of(on_gpu(model_of()))
    third(noise(8, 32, (8, 8)))
    assert guessed_shapes(asked) == [(8, 16, 16, 16), (8, 8, 32, 32)] * 2
    first(noise())
    assert guessed_shapes(asked) == [(8, 64, 4, 4)] * 2
    for layer, size in ((first, 1), (second, 4), (third, 8), (fourth, 16), (fifth, 32)):
        layer(noise(16, layer.in_channels, (size, size)))
    assert not asked


def compile_something(monkeypatch):
    monkeypatch.setattr(compiler, "compilation_seconds", [*compiler.compilation_seconds, 1.0])


def test_guesses_are_repeated_at_other_sizes_while_kernels_are_compiled(asked, monkeypatch):
    first, second, third, *_ = layers = layers_of(on_gpu(model_of()))
    first(noise())
    asked.clear()
    first(noise(16))
    assert not asked
    compile_something(monkeypatch)
    first(noise(16))
    assert not asked
    first(noise(16, size=(3, 2)))
    shapes = [(16, 64, 6, 5), (16, 32, 12, 10), (16, 16, 24, 20), (16, 8, 48, 40)]
    assert guessed_shapes(asked) == shapes * 2
    for layer, (batch, channels, *size) in zip(layers[1:], shapes, strict=True):
        layer(noise(batch, channels, size))
    assert not asked
    compile_something(monkeypatch)
    first(noise(4))
    second(noise(4, 64, (4, 4)))
    third(noise(4, 32, (9, 9)))  # which was guessed to be 8 x 8
    assert len(guessed_shapes(asked)) == 8
    compile_something(monkeypatch)
    first(noise(2))
    assert guessed_shapes(asked) == [(2, 64, 4, 4)] * 2


def test_layers_of_signals_are_guessed_as_images_of_height_1(asked, monkeypatch):
    def unsqueezed(one, axis):
        return alike(torch.empty(one.shape, device="meta").unsqueeze(axis).requires_grad_(one.requires_grad))

    monkeypatch.setattr(WithoutData, "unsqueeze", unsqueezed, raising=False)
    monkeypatch.setattr(gemmconv.ConvTranspose1d, "_function", lambda *_, **__: "result")
    monkeypatch.setattr(gemmconv.ConvTranspose1d, "_prepare", gemmconv.module.Layer._prepare)
    layers = [gemmconv.ConvTranspose1d(2 * c, c, 2 * s, s, s // 2) for c, s in ((64, 8), (32, 4))]
    other = gemmconv.ConvTranspose2d(32, 8, 4)
    for layer in (*layers, other):
        layer._parameters.update({name: alike(one) for name, one in layer._parameters.items()})
    assert layers[0](alike(torch.empty(3, 128, 50, device="meta"))) == "result"
    assert [[one.shape for one in tensors] for _, tensors, _ in asked] == [[(3, 64, 1, 400), (64, 32, 1, 8), (32,)]] * 2
    assert asked[0][2][:3] == ((1, 4), (0, 2), (0, 0))


def test_autocast_and_images_without_a_batch(asked, monkeypatch):
    monkeypatch.setattr(followers, "is_autocasting", lambda _: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.float16)
    monkeypatch.setattr(WithoutData, "unsqueeze", lambda one, _: noise(batch=1), raising=False)
    given, note = [], followers.compile_backward_ahead
    monkeypatch.setattr(followers, "compile_backward_ahead", lambda *call: (note(*call), given.append(call[2])))
    layers = layers_of(on_gpu(model_of()))
    layers[0](alike(torch.empty(100, 1, 1, device="meta")))
    assert given == [torch.float32] * 4  # which calls cast themselves
    assert {one.dtype for _, tensors, _ in asked for one in tensors if one is not None} == {torch.float16}
    assert guessed_shapes(asked) == [(1, 64, 4, 4), (1, 32, 8, 8), (1, 16, 16, 16), (1, 8, 32, 32)] * 2


def test_frozen_modules_have_no_backward_pass_compiled(asked):
    model = on_gpu(model_of())
    model.requires_grad_(False)
    layers_of(model)[0](noise())
    assert [one for one, *_ in asked] == ["forward"] * 4


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "convert", "convert nested"])
def test_models_that_were_made_otherwise(how, asked):
    if how == "deepcopy":
        model = copy.deepcopy(model_of())
    elif how == "pickle":
        model = pickle.loads(pickle.dumps(model_of()))
    else:
        model = model_of(kind=nn.ConvTranspose2d)
        if how == "convert nested":
            model = nn.Sequential(nn.Sequential(model[:4]), model[4:])
        model = gemmconv.convert(model)
    followed = real_calls(model, noise())[1:]
    layers_of(on_gpu(model))[0](noise())
    assert asked_for(asked, "forward") == followed


STOPS = {
    "of another device": lambda layer: on_gpu(layer, torch.device("cuda", 1)),
    "of another dtype": lambda layer: layer._parameters.update(weight=alike(layer.weight, dtype=torch.float16)),
    "without an output": lambda layer: setattr(on_gpu(layer), "padding", (99, 99)),
    "of many more channels": lambda layer: (
        setattr(layer, "in_channels", 129)
        or layer._parameters.update(weight=alike(torch.empty(129, 32, 4, 4, device="meta")))
    ),
    "with a huge output": lambda layer: setattr(on_gpu(layer), "stride", (1 << 14, 1 << 14)),
    "on the CPU": lambda layer: layer._parameters.update(weight=torch.empty(64, 32, 4, 4)),
    "of no sense": lambda layer: setattr(on_gpu(layer), "groups", "three"),
}


@pytest.mark.parametrize("stop", STOPS)
def test_guesses_end_at_a_module_that_they_say_nothing_of(stop, asked):
    layers = layers_of(on_gpu(model_of([(100, 64, 4), (64, 64, 3), *DCGAN[1:]])))
    STOPS[stop](layers[2])
    assert layers[0](noise()) == "result"
    assert guessed_shapes(asked) == [(8, 64, 4, 4)] * 2


def test_no_parametrization_is_computed_for_a_guess(asked):
    model = on_gpu(model_of())
    third, fourth = layers_of(model)[2:4]
    weight = vars(third)["weight"] = third._parameters.pop("weight")  # as torch.nn.utils.weight_norm does
    fourth._parameters["weight"] = torch.zeros(16, 8, 4, 4)
    torch.nn.utils.parametrizations.spectral_norm(fourth)
    computed = []
    fourth.parametrizations.weight.register_forward_hook(lambda *_: computed.append(1))
    layers_of(model)[0](noise())
    assert [tensors[1].shape for _, tensors, _ in asked] == [(64, 32, 4, 4), weight.shape] * 2
    assert not computed


def test_at_most_so_many_modules_are_guessed_about(asked):
    layers = layers_of(on_gpu(model_of([(8, 8, 3, 1, 1)] * 20)))
    layers[0](noise(channels=8))
    assert len(asked) == 2 * followers._MOST_GUESSES
    layers[1](noise(channels=8))
    assert len(asked) == 2 * followers._MOST_GUESSES
    layers[followers._MOST_GUESSES + 1](noise(channels=8))
    assert len(asked) == 2 * 18


def test_calls_that_nothing_follows_from(asked, monkeypatch):
    layers = layers_of(on_gpu(model_of()))
    others = layers_of(model_of(algorithm="native"))
    assert on_gpu(others[0])(noise()) == "result"
    layers[0](torch.zeros(8, 100, 1, 1))
    layers[0](torch.zeros(8, 100, 1, 1, device="meta"))
    layers[0](noise(), output_size=[4, 4])
    with monkeypatch.context() as patch:
        patch.setattr(signatures, "find_call", lambda *_: (None, None))  # in a mode
        layers[0](noise())
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
        layers[0](noise())
    with monkeypatch.context() as patch:
        patch.setattr(signatures, "find_call", lambda *_: (lambda *_: "known", "key"))
        assert layers[0](noise()) == "known"
    assert not asked
    layers[0](noise())
    assert len(asked) == 8


def test_nothing_is_guessed_where_cores_are_few(asked, monkeypatch):
    monkeypatch.setattr(pool, "cores", lambda: 3)
    model = on_gpu(model_of())
    model[0](noise())
    assert not asked


def test_nothing_is_raised(asked, monkeypatch):
    def fail(*_):
        raise MemoryError

    def kept_by_a_future(work, urgent):
        with pytest.raises(MemoryError):
            work()

    for owner, name in ((followers, "compile_forward_ahead"), (WithoutData, "of"), (bind, "in_background")):
        model, images = on_gpu(model_of()), noise()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            if name == "compile_forward_ahead":
                patch.setattr(pool, "submit", kept_by_a_future)
            assert model[0](images) == "result"


def test_real_calls_guess_nothing_without_a_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(followers, "compile_followers", lambda *_: asked.append(1))
    model = model_of()
    images = torch.zeros(2, 100, 1, 1)
    model(images).sum().backward()
    torch.fx.symbolic_trace(model)(images)
    torch.export.export(copy.deepcopy(model), (images,))
    copy.deepcopy(model).to("meta")(images.to("meta"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        copy.deepcopy(layers_of(model)[1])(torch.empty(2, 64, 4, 4))
    assert not asked


def test_modules_and_tensors_are_not_kept_alive(asked):
    model, images = on_gpu(model_of()), noise()
    layers_of(model)[0](images)
    also = gemmconv.ConvTranspose2d(4, 4, 3)
    parameters = [one for layer in [*layers_of(model), also] for one in layer.parameters()]
    gone = [weakref.ref(one) for one in (*layers_of(model), also, images, *parameters)]
    del model, images, also, parameters
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)
    assert not followers._unguessed


def test_modules_may_be_made_and_called_by_many_threads(asked):
    failed = []

    def work():
        try:
            for _ in range(20):
                layers = layers_of(on_gpu(model_of(DCGAN[:2])))
                layers[0](noise())
                gc.collect(0)
        except BaseException as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    in_threads(*[work] * 4)
    sys.setswitchinterval(before)
    assert not failed


EQUAL = [(8, 8, 4, 2, 1)] * 4


def call_all(layers, size):
    for i, layer in enumerate(layers):
        layer(noise(2, 8, (size << i, size << i)))


def test_a_layer_converted_again_has_each_follower_once(asked, monkeypatch):
    model = on_gpu(gemmconv.convert(model_of(EQUAL, nn.ConvTranspose2d)))
    layers = layers_of(model)
    call_all(layers, 4)
    for size in (5, 6):
        compile_something(monkeypatch)
        gemmconv.convert(gemmconv.revert(model))
        call_all(layers, size)
        assert [one() for one in followers._chains[layers[0]].followers] == layers[1:]


def test_reverted_layers_are_forgotten(asked):
    model = model_of(EQUAL, nn.ConvTranspose2d)
    for _ in range(3):
        with gemmconv.converted(model):
            assert len(followers._unguessed) == 4
    assert not followers._unguessed


def test_a_guess_is_about_the_size_that_it_was_made_from(asked, monkeypatch):
    """Another thread makes it after the first layer was called at a second size."""
    works = []
    monkeypatch.setattr(pool, "submit", lambda work, urgent: works.append(work))
    layers = layers_of(on_gpu(model_of(EQUAL)))
    layers[0](noise(2, 8, (4, 4)))
    layers[0](noise(2, 8, (5, 5)))
    works[0]()
    call_all(layers[1:], 10)
    assert len(followers._chains[layers[0]].followers) == 3


def test_a_layer_of_another_rank_is_passed_over(asked):
    first = on_gpu(gemmconv.ConvTranspose2d(*EQUAL[0]))
    between = gemmconv.ConvTranspose1d(*EQUAL[0]), gemmconv.ConvTranspose3d(*EQUAL[0])
    last = on_gpu(gemmconv.ConvTranspose2d(*EQUAL[0]))
    first(noise(2, 8, (4, 4)))
    assert [one() for one in followers._chains[first].followers] == [last]
    assert between
