"""gemmconv.warmup and ``python -m gemmconv warmup``."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import gemmconv
from gemmconv import rank
from gemmconv.__main__ import main
from gemmconv.device import named
from gemmconv.kernels.base import Choice
from gemmconv.ops import followers, volumes
from gemmconv.ops.schemas import without_data

module = sys.modules["gemmconv.warmup"]  # the function has its name


class Network(nn.Module):
    """With buffers, one that is replaced, random numbers, and a parameter that a step changes in place."""

    def __init__(self, fails=False):
        super().__init__()
        self.body = nn.Sequential(
            gemmconv.ConvTranspose2d(4, 8, 4, 2, 1, algorithm="gemm_col2im"),
            nn.BatchNorm2d(8),
            nn.Dropout(),
            gemmconv.ConvTranspose2d(8, 3, 3, 1, 1, bias=False, algorithm="gemm_col2im"),
        )
        self.register_buffer("steps", torch.zeros(()))
        self.fails = fails

    def forward(self, images):
        self.steps = self.steps + 1
        with torch.no_grad():
            self.body[1].weight.clamp_(max=0.5)
        self.train(False)
        self.body[2].train()
        if self.fails:
            raise ArithmeticError("no")
        return {"images": [self.body(images)], "more": 3}


def state_of(model):
    tensors = {**model.state_dict(keep_vars=True), **{f"{name}.grad": p.grad for name, p in model.named_parameters()}}
    return (
        {name: None if one is None else one.detach().clone() for name, one in tensors.items()},
        [*map(id, tensors.values())],
        [one.training for one in model.modules()],
        torch.get_rng_state(),
    )


def assert_same(before, after):
    for name, one in before[0].items():
        assert one is after[0][name] is None or torch.equal(one, after[0][name]), name
    assert before[1:3] == after[1:3]
    assert torch.equal(before[3], after[3])


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_warmup_leaves_a_model_as_it_was(backward, fails):
    model = Network(fails)
    model.body(torch.randn(1, 4, 5, 5)).sum().backward()
    model.body[3].weight.requires_grad_(False)
    before = state_of(model)
    if fails:
        with pytest.raises(ArithmeticError):
            gemmconv.warmup(model, torch.randn(2, 4, 5, 5), backward=backward)
    else:
        images = torch.randn(2, 4, 5, 5)
        before = state_of(model)
        gemmconv.warmup(model, images, backward=backward)
    after = state_of(model)
    if fails:  # its images were drawn after the first look
        after = (*after[:3], before[3])
    assert_same(before, after)


def test_warmup_does_not_spoil_a_graph_that_waits_for_its_backward_pass():
    model, images = nn.Sequential(*[gemmconv.ConvTranspose2d(4, 4, 3) for _ in range(2)]), torch.randn(2, 4, 5, 5)
    output = model(images).sum()
    gemmconv.warmup(model, images)
    output.backward()


def test_warmup_runs_the_model_once_with_the_gradients_that_are_asked_for():
    model, seen = nn.Sequential(gemmconv.ConvTranspose2d(4, 2, 3)), []
    model[0].register_forward_hook(lambda layer, args, output: seen.append(output.requires_grad))
    model[0].weight.register_hook(lambda grad: seen.append(grad.shape))
    gemmconv.warmup(model, torch.randn(1, 4, 5, 5))
    assert seen == [True, model[0].weight.shape]
    with torch.inference_mode():
        gemmconv.warmup(model, torch.randn(1, 4, 5, 5), backward=False)
    assert seen[2:] == [False]
    assert model[0].weight.grad is None


def test_warmup_finds_the_calls_without_data():
    model, images = Network(), torch.randn(2, 4, 5, 5)
    before = state_of(model)
    with module.preserve_state(model):
        calls = module._calls_of(model, (images,)).calls
    assert_same(before, state_of(model))
    (first, options), (second, _) = calls
    assert [tuple(one.shape) for one in first] == [(2, 4, 5, 5), (4, 8, 4, 4), (8,)]
    assert [one.requires_grad for one in first] == [False, True, True]
    assert options == ((2, 2), (1, 1), (0, 0), 1, (1, 1), "gemm_col2im", None, None)
    assert second[0].requires_grad
    assert second[2] is None
    assert module._calls_of(Network(fails=True), (images,)).calls == []


def test_warmup_compiles_what_volumes_launch(monkeypatch):
    """Forward passes of volumes that are one product; a training step's run compiles what its gradients launch."""
    monkeypatch.setattr(rank, "choose_way", lambda *_: "product")
    layer, asked = gemmconv.ConvTranspose3d(16, 8, 2, 2), []
    found = module._calls_of(layer, (torch.randn(1, 16, 3, 4, 5),))
    assert not found.calls
    (call,) = found.of_volumes
    assert [tuple(one.shape) for one in call[:3]] == [(1, 16, 3, 4, 5), (16, 8, 2, 2, 2), (8,)]

    def note(key, tensors, list_launches):
        asked.append(partial(list_launches, *map(without_data, tensors)))

    monkeypatch.setattr(volumes, "compile_in_background", note)
    module._compile(found, backward=True)
    assert asked[0]() == []  # a CPU launches nothing
    hopper = volumes.Volume.config
    monkeypatch.setattr(volumes.Volume, "config", lambda volume: replace(hopper(volume), spec=named("H100")))
    kernel = volumes.gemm_mma.KERNEL
    monkeypatch.setattr(volumes, "choice_of", lambda config: Choice(kernel, kernel.tile(config, "forward"), 0.0))
    assert [one.source for one in asked[0]()] == ["weights/pack.cu", "conv/gemm_mma.cu"]


def test_warmup_compiles_both_passes_of_each_call(monkeypatch):
    asked = []
    monkeypatch.setattr(followers, "compile_forward_ahead", lambda *call: asked.append(("forward", call)))
    monkeypatch.setattr(followers, "compile_backward_ahead", lambda *call: asked.append(("backward", call[:2])))
    model, images = Network(), torch.randn(2, 4, 5, 5)
    found = module._calls_of(model, (images,))
    module._compile(found, backward=True)
    assert asked == [(one, call) for one in ("forward", "backward") for call in found.calls]
    asked.clear()
    module._compile(found, backward=False)
    assert asked == [("forward", call) for call in found.calls]


def test_warmup_refuses_what_it_cannot_do():
    layer, images = gemmconv.ConvTranspose2d(4, 2, 3), torch.randn(1, 4, 5, 5)
    with pytest.raises(TypeError, match=r"warmup: model must be a torch.nn.Module, got function"):
        gemmconv.warmup(lambda images: images, images)
    with pytest.raises(TypeError, match=r"warmup: backward must be True or False, got 1"):
        gemmconv.warmup(layer, images, backward=1)
    layer.requires_grad_(False)
    message = "warmup: backward must be False where no output of the model requires gradients, got True; pass "
    with pytest.raises(ValueError, match=message):
        gemmconv.warmup(layer, images)
    gemmconv.warmup(layer, images, backward=False)


# The command

LAYER = (
    "--in-channels 8 --out-channels 4 --kernel 3 --stride 2 --padding 1 --batch 2 --height 9 --width 10 --dtype float16"
)


def run(capsys, more, layer=LAYER):
    status = main(["warmup", *layer.split(), *more])
    return status, capsys.readouterr().out.splitlines()


def test_command_compiles_for_a_gpu_that_is_not_here(capsys):
    pytest.importorskip("cuda.core")
    more = ["--device", "NVIDIA H100 80GB HBM3", "--channels-last"]
    status, (head, *lines, tail) = run(capsys, [*more, "--no-backward"])
    assert status == 0
    assert head.endswith("kernels for an NVIDIA H100 80GB HBM3 (sm_90a):")
    assert lines
    assert tail.startswith(f"{len(lines)} compiled, 0 in the cache already, 0 failed, in ")
    problem = gemmconv.Problem(2, 8, 4, 1, (9, 10), (3, 3), (2, 2), (1, 1))
    how = {"dtype": torch.float16, "memory_format": torch.channels_last, "gpu": "H100 80GB", "bias": True}
    sources = [source for source, _ in gemmconv.explain(problem, **how).compilations]
    assert [line.split()[0] for line in lines] == sources
    assert run(capsys, [*more, "--no-backward"])[1][1].startswith(f"0 compiled, {len(lines)} in the cache already")
    _, (_, *lines, _) = run(capsys, more)
    assert any("grad" in line or "reduce" in line for line in lines)


def test_command_names_what_it_cannot_do(capsys):
    for more, message in (
        (["--device", "H1000"], "argument --device: must be cuda or cuda:INDEX of a device that is here, or one of"),
        (["--device", "A100", "--precision", "tf32"], "argument --precision: tf32 is for float32"),
        (["--device", "A100", "--groups", "3"], "layer: in_channels must be divisible by groups=3, got 8"),
        (
            ["--device", "A100", "--stride", "2x9x1"],
            "argument --stride: must be one integer or two as in 3x5, got '2x9x1'",
        ),
    ):
        with pytest.raises(SystemExit):
            run(capsys, more)
        assert message in capsys.readouterr().err


def test_command_fails_where_a_kernel_does(capsys, monkeypatch):
    launch = pytest.importorskip("gemmconv.runtime.launch")

    def broken(source, *_, **__):
        raise ValueError("no compiler")

    monkeypatch.setattr(launch, "compile", broken)
    monkeypatch.setattr(launch, "cached", lambda *_: None)
    monkeypatch.setattr(launch, "_compiled", {})
    status, (_, *lines, tail) = run(capsys, ["--device", "H100", "--no-backward"])
    assert status == 1
    assert all(line.endswith("failed: no compiler") for line in lines)
    assert f"{len(lines)} failed" in tail
