"""gemmconv.tune: what is measured is chosen, kept in a file, merged, and passed over where it no longer holds."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace

import pytest
import torch

import gemmconv
from gemmconv import pairs, rank, tuned
from gemmconv.algorithms import gemm_col2im
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config
from gemmconv.ops import call_cache
from gemmconv.pairs import Gradients, choose_pair
from gemmconv.selection import choose
from tests.samples import REFUSED_ON_A_CPU

LAYER = Problem(2, 8, 4, 1, (6, 5), (3, 3), (2, 2), (1, 1))
CONFIG = Config(LAYER, torch.float32, torch.device("cpu"))
ENTRY = tuned.Entry(
    tuned.key_of(CONFIG, "forward"), (2, 6, 5), ("gemm_col2im",), "gemm_col2im", "", {}, {"native": 2.0}
)
ON_GPU = replace(CONFIG, device=torch.device("cuda", 0))
takes_entry = pytest.mark.skipif("gemm_col2im" in REFUSED_ON_A_CPU, reason="it needs the extension in C")


@pytest.fixture(autouse=True)
def _forgotten():
    gemmconv.forget_tuned()
    yield
    gemmconv.forget_tuned()


def layer() -> gemmconv.ConvTranspose2d:
    return gemmconv.ConvTranspose2d(8, 4, 3, stride=2, padding=1)


def taken(config: Config = CONFIG, direction: str = "forward") -> str:
    return choose(config, "auto", "", direction).name


def entry_of_tile(direction: str, index: int) -> tuned.Entry:
    """An entry for a tile of implicit_gemm that is not its own choice."""
    from gemmconv.kernels.base import Choice
    from gemmconv.kernels.sm90.implicit_gemm import KERNEL

    own = KERNEL.tile(ON_GPU, direction)
    tiles = [Choice(KERNEL, one, 0.0).tile_text for one in KERNEL.tiles(ON_GPU, direction) if one != own]
    return tuned.Entry(tuned.key_of(ON_GPU, direction), (2, 6, 5), ("fused",), KERNEL.name, tiles[index])


def test_tune_measures_each_pass_and_what_it_finds_is_chosen(tmp_path):
    model = torch.nn.Sequential(layer(), torch.nn.ReLU())
    before = {name: one.clone() for name, one in model.state_dict().items()}
    found = gemmconv.tune(model, torch.randn(2, 8, 6, 5, requires_grad=True), path=tmp_path / "tuned.json")
    assert [one.key[1] for one in found] == ["forward", "input_grad", "weight_grad", "grads"]
    assert all("native" in one.microseconds and min(one.microseconds.values()) > 0 for one in found)
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    forward, of_input, _, both = found
    assert (taken(),) == forward.algorithms
    assert (taken(direction="input_grad"),) == of_input.algorithms
    gradients = choose_pair(CONFIG, CONFIG, "auto", "")
    assert (gradients.input_grad.name, gradients.weight_grad.name) == both.algorithms
    best = min(forward.microseconds, key=forward.microseconds.__getitem__)
    assert forward.algorithms == (best,)
    reasons = gemmconv.explain(LAYER).reasons
    assert all(f"measured: {us:,.1f} us" in reasons[name] for name, us in forward.microseconds.items())


def test_signals_are_tuned_as_images_of_height_1(tmp_path):
    layer, signal = gemmconv.ConvTranspose1d(8, 4, 4, 2, 1), torch.randn(2, 8, 30)
    (entry,) = gemmconv.tune(layer, signal, backward=False, path=tmp_path / "tuned.json")
    assert list(entry.size) == [2, 1, 30]
    assert layer(signal).shape == (2, 4, 60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_volumes_take_the_way_that_was_measured(tmp_path, monkeypatch, dtype):
    """On a CPU a volume goes as images or to torch's operator; inference and training steps have their own entries."""
    layer, volume = gemmconv.ConvTranspose3d(8, 4, 2, 2).to(dtype), torch.randn(2, 8, 3, 4, 5, dtype=dtype)
    entries = gemmconv.tune(layer, volume, path=tmp_path / "tuned.json")
    assert [entry.key[1] for entry in entries] == ["forward", "grads"]
    assert all({*entry.microseconds} == {"torch", "images"} for entry in entries)
    assert all(entry.size == (2, 3, 4, 5) for entry in entries)
    taken, compute = [], rank.compute
    monkeypatch.setattr(rank, "compute", lambda way, *others: (taken.append(way), compute(way, *others))[1])
    theirs = torch.nn.functional.conv_transpose3d(volume, layer.weight, layer.bias, 2)
    for ways in ("images", "torch"), ("torch", "images"):
        gemmconv.forget_tuned()
        tuned.take([replace(entry, algorithms=(way,)) for entry, way in zip(entries, ways, strict=True)])
        with torch.no_grad():
            torch.testing.assert_close(layer(volume), theirs)
        torch.testing.assert_close(layer(volume), theirs)
        assert (*taken,) == ways
        taken.clear()
    assert gemmconv.explain(layer, volume).algorithm == "native"


def test_a_way_that_fails_is_left_out(tmp_path, monkeypatch, caplog):
    """Where a volume lacks the memory to go as images, torch's operator is measured and taken."""

    def fail(*arguments):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(rank, "_as_images", fail)
    layer, volume = gemmconv.ConvTranspose3d(8, 4, 2, 2), torch.randn(2, 8, 3, 4, 5)
    with caplog.at_level(logging.INFO, "gemmconv"):
        entries = gemmconv.tune(layer, volume, path=tmp_path / "tuned.json")
    assert [(entry.algorithms, {*entry.microseconds}) for entry in entries] == [(("torch",), {"torch"})] * 2
    assert caplog.text.count("tune leaves out images") == 2


def test_inference_alone_is_measured_without_gradients(tmp_path):
    found = gemmconv.tune(layer(), torch.randn(2, 8, 6, 5), backward=False, path=tmp_path / "tuned.json")
    assert [one.key[1] for one in found] == ["forward"]
    assert gemmconv.tune(layer(), torch.randn(0, 8, 6, 5), path=tmp_path / "tuned.json") == []  # nothing to measure


@takes_entry
def test_a_file_ships_and_merges(tmp_path):
    path, other = tmp_path / "deep" / "tuned.json", replace(ENTRY, size=(4, 6, 5))
    tuned.write(path, [ENTRY])
    tuned.write(path, [replace(ENTRY, algorithms=("native",), kernel="native"), other])
    assert gemmconv.load_tuned(path) == 2
    assert taken() == "native"  # of the same layer and size the last
    assert taken(replace(CONFIG, problem=replace(LAYER, batch=4))) == "gemm_col2im"
    assert json.loads(path.read_text())["gemmconv"] == gemmconv.__version__
    gemmconv.forget_tuned()
    assert tuned.entry_of(CONFIG, "forward") is None


@pytest.mark.parametrize(("batch", "holds"), [(1, True), (4, True), (5, False)])
def test_an_entry_holds_for_half_to_twice_its_pixels(batch, holds):
    tuned.take([ENTRY])
    near = replace(CONFIG, problem=replace(LAYER, batch=batch))
    assert (tuned.entry_of(near, "forward") is ENTRY) is holds


@pytest.mark.parametrize(
    "other",
    [
        replace(CONFIG, dtype=torch.float64),
        replace(CONFIG, memory_format=torch.channels_last),
        replace(CONFIG, problem=replace(LAYER, stride=(1, 2))),
        ON_GPU,
    ],
)
def test_an_entry_is_for_its_layer_type_format_and_device(other):
    tuned.take([ENTRY])
    assert tuned.entry_of(other, "forward") is None
    assert tuned.entry_of(CONFIG, "input_grad") is None
    assert choose(CONFIG, "native", "").name == "native"  # who names an algorithm gets it


@takes_entry
def test_calls_prepared_before_take_the_new_choice(monkeypatch):
    used: list[str] = []
    prepare = gemm_col2im.GemmCol2im.prepare

    def noting(self, config, direction, tile=None):
        used.append(direction)
        return prepare(self, config, direction, tile)

    monkeypatch.setattr(gemm_col2im.GemmCol2im, "prepare", noting)
    module, x = layer(), torch.randn(2, 8, 6, 5)
    tuned.take([replace(ENTRY, algorithms=("native",), kernel="native")])
    expected = module(x)
    assert not used
    tuned.take([ENTRY])
    torch.testing.assert_close(module(x), expected)
    assert used == ["forward"]


def test_a_tile_of_a_gpu_is_taken_and_one_that_is_gone_is_passed_over(caplog):
    entry = entry_of_tile("forward", 3)
    tuned.take([entry])
    (algorithm,) = (one for one in gemmconv.algorithms.ALGORITHMS if one.name == "fused")
    assert algorithm.choice(ON_GPU, "forward").tile_text == entry.tile
    with caplog.at_level(logging.INFO, "gemmconv"):
        tuned.take([replace(entry, tile="columns=1")])
        for _ in range(2):
            assert algorithm.choice(ON_GPU, "forward") is not None
    assert [record.message for record in caplog.records if "its tile is gone" in record.message] != []
    assert len(caplog.records) == 1


def test_gradients_are_taken_as_they_were_measured_together():
    how = {"share": False, "at_once": False, "turned": False}
    entry = tuned.Entry(tuned.key_of(ON_GPU, "grads"), (2, 6, 5), ("native", "gemm_col2im"), how=how)
    tuned.take([entry])
    found = choose_pair(ON_GPU, ON_GPU, "auto", "")
    assert isinstance(found, Gradients)
    assert (found.input_grad.name, found.weight_grad.name, found.at_once) == ("native", "gemm_col2im", False)


def test_another_versions_entries_are_passed_over_with_a_line(tmp_path, caplog):
    path = tmp_path / "tuned.json"
    tuned.write(path, [ENTRY])
    path.write_text(path.read_text().replace(gemmconv.__version__, "0.0.9"))
    with caplog.at_level(logging.INFO, "gemmconv"):
        assert gemmconv.load_tuned(path) == 0
    assert "0.0.9" in caplog.text
    assert "tune again" in caplog.text


def test_gradients_at_once_that_nothing_computes_are_passed_over():
    how = {"share": False, "at_once": True, "turned": False}
    entry = tuned.Entry(tuned.key_of(ON_GPU, "grads"), (2, 6, 5), ("fused", "fused"), how=how)
    tuned.take([entry])
    assert pairs._tuned_pair(ON_GPU, ON_GPU) is None
    tuned.take([replace(entry, algorithms=("gemm_col2im",) * 2)])
    assert pairs._tuned_pair(ON_GPU, ON_GPU).at_once


WRONG = {"size": [0, 6, 5]}, {"size": "a"}, {"algorithms": []}, {"kernel": 3}, {"how": "x"}, {"microseconds": {"a": ""}}
ENTRIES = [{}], *([{**asdict(ENTRY), **one}] for one in WRONG)  # each field of a kind that no call could use
FILES = [json.dumps({"format": 1, "gemmconv": "%s", "entries": entries}) for entries in ENTRIES]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', *FILES])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "tuned.json"
    path.write_text(text.replace("%s", gemmconv.__version__))
    with pytest.raises(ValueError, match=r"path must name a file that gemmconv\.tune wrote, got .*tuned\.json"):
        gemmconv.load_tuned(path)
    with pytest.raises(ValueError, match="path must name a file"):
        gemmconv.tune(layer(), torch.randn(2, 8, 6, 5), path=path)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"tune: model must be a torch\.nn\.Module, got int"):
        gemmconv.tune(3)
    with pytest.raises(TypeError, match="tune: backward must be True or False, got 1"):
        gemmconv.tune(layer(), backward=1)
    with pytest.raises(OSError, match="/proc"):
        gemmconv.tune(torch.nn.Module(), path="/proc/no/tuned.json")  # before the module is run, which cannot be


def test_the_file_is_in_the_cache_unless_said_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("GEMMCONV_CACHE_DIR", str(tmp_path))
    gemmconv.tune(layer(), torch.randn(1, 8, 3, 3), backward=False)
    assert (tmp_path / "tuned.json").exists()
    gemmconv.forget_tuned()
    assert gemmconv.load_tuned() == 1


@pytest.mark.gpu
def test_tune_on_a_gpu_leaves_results_right_and_says_what_it_measured(tmp_path):
    x = torch.randn(4, 32, 12, 16, device="cuda", requires_grad=True)
    model = gemmconv.ConvTranspose2d(32, 16, 4, stride=2, padding=1, device="cuda")
    expected = torch.nn.functional.conv_transpose2d(x.double(), model.weight.double(), model.bias.double(), 2, 1)
    right = torch.autograd.grad(expected.sum(), (x, model.weight))
    expected = expected.detach()
    for path in (tmp_path / "tuned.json", None):
        if path is not None:
            found = gemmconv.tune(model, x, path=path)
            assert [one.key[1] for one in found] == ["forward", "input_grad", "weight_grad", "grads"]
            assert all({"native"} < one.microseconds.keys() for one in found[:3])
        else:
            gemmconv.forget_tuned()
        output = model(x)
        assert float((output.detach() - expected).norm() / expected.norm()) < 1e-3
        of_input, of_weight = torch.autograd.grad(output.sum(), (x, model.weight))
        for one, other in zip((of_input, of_weight), right, strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-3


def test_a_call_that_was_prepared_while_choices_changed_is_not_cached():
    def prepare():
        tuned.take([])
        return "by old choices"

    assert call_cache.find_or_make("a call of this test", prepare) == "by old choices"
    assert call_cache.find_or_make("a call of this test", lambda: "by new choices") == "by new choices"
    assert call_cache.entries == {"a call of this test": "by new choices"}
