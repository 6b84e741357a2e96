"""The examples run with tiny settings as their README says, save a picture, and print results that are sane."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("PIL")

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples"
COMMANDS = re.findall(r"^\.venv/bin/([^#\n]+)", FOLDER.joinpath("README.md").read_text(encoding="utf-8"), re.MULTILINE)
VERDICT = r".+: [\d.]+ ms with torch's layers, [\d.]+ ms with gemmconv's \([\d.]+x, (gemmconv is \w+|no difference)\)"


def output_of(name, folder, *settings):
    """Run an example by the README's command and further settings: what it prints, without its picture's line."""
    (command,) = [command for command in COMMANDS if f"examples/{name}.py" in command]
    program, *arguments = shlex.split(command)
    start = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[program]
    if program == "torchrun":
        start.append("--standalone")  # a free port, not the default one
    full = [*start, *arguments, *settings, "--device", "cpu", "--out", str(folder / "new")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(full, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    picture = folder / "new" / f"{name}.png"
    image = importlib.import_module("PIL.Image").open(picture)
    assert image.width > 1000
    assert image.height > 300
    assert len(image.convert("L").getcolors()) > 20  # something is drawn
    first, *lines = done.stdout.splitlines()
    assert first == f"picture: {picture}"
    assert re.fullmatch(VERDICT, lines[-1]), lines[-1]
    return "\n".join(lines)


def numbers(pattern, text):
    """The numbers that a pattern's groups find in a text."""
    (found,) = re.findall(pattern, text)
    return [float(one) for one in ([found] if isinstance(found, str) else found)]


def test_readme_names_all_examples():
    names = {path.name for path in FOLDER.glob("*.py")} - {"common.py"}
    assert {Path(shlex.split(command)[-1]).name for command in COMMANDS} == names
    assert len(COMMANDS) == len(names) == 4


def test_super_resolution_is_better_than_bicubic(tmp_path):
    text = output_of("super_resolution", tmp_path, "--steps", "300", "--batch", "4", "--crop", "48")
    before, after = numbers(r"bicubic ([\d.]+) dB, network ([\d.]+) dB", text)
    assert 20 < before < after < 30


def test_vocoder_gives_torchs_outputs(tmp_path):
    settings = ("--lengths", "4", "--longest", "20", "--channels", "32", "--rounds", "2")
    text = output_of("vocoder", tmp_path, *settings)
    (difference,) = numbers(r"from torch's outputs: (\S+) of", text)
    assert difference < 1e-4
    total, first, _ = numbers(r"compiled? (\d+) kernels: (\d+) for the first length, none for (\d+) others", text)
    assert 0 < first <= total


@pytest.mark.parametrize("axes", ["2", "3"])
def test_segmentation_learns(tmp_path, axes):
    sizes = "--batch 8 --size 32" if axes == "2" else "--batch 2 --size 16"
    settings = f"--axes {axes} --dtype bfloat16 --steps 40 --width 8 {sizes}"
    text = output_of("segmentation", tmp_path, *settings.split())
    before, after = numbers(r"training loss: ([\d.]+) -> ([\d.]+)", text)
    assert after < 0.7 * before
    mean, difference = numbers(r"mean IoU ([\d.]+); largest difference from torch's logits (\S+) of", text)
    assert 0.2 < mean <= 1
    assert difference < 5e-2


def test_distributed_learns_with_equal_gradients(tmp_path):
    text = output_of("distributed", tmp_path, "--steps", "80", "--batch", "8", "--width", "16")
    before, after = numbers(r"training loss: ([\d.]+) -> ([\d.]+)", text)
    assert after < 0.8 * before
    processes, equal, checked = numbers(r"of (\d) processes are equal bit for bit in (\d+) of (\d+) steps", text)
    assert (processes, equal) == (2, checked)
    (difference,) = numbers(r"from torch's outputs: (\S+) of", text)
    assert difference < 1e-4


@pytest.fixture
def module(monkeypatch):
    """module(name): an example as a module, which is forgotten after the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_outputs_that_differ_from_torchs_end_an_example(module):
    common, right = module("common"), torch.tensor([1.0, -2.0])
    assert common.check_same(right, right, 1e-4) == 0
    for wrong in (right + 1e-3, right * torch.nan):
        with pytest.raises(RuntimeError, match="differ from torch's by at most"):
            common.check_same(wrong, right, 1e-4)


def test_gradients_that_differ_between_processes_end_the_training(module, monkeypatch):
    example, model = module("distributed"), torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    monkeypatch.setattr(example.distributed, "get_world_size", lambda: 2)
    for error in (0.0, 1e-6):
        gather = lambda all_, mine, error=error: [one.copy_(mine + error * k) for k, one in enumerate(all_)]  # noqa: E731
        monkeypatch.setattr(example.distributed, "all_gather", gather)
        if not error:
            example.check_gradients(model)
    with pytest.raises(RuntimeError, match="gradients must be equal"):
        example.check_gradients(model)


def test_distributed_asks_for_torchrun(module, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["distributed.py"])
    with pytest.raises(SystemExit):
        module("distributed").main()
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ratio", "word"), [(2, "gemmconv is faster"), (0.5, "gemmconv is slower"), (1.04, "no difference")]
)
def test_verdict_is_honest(module, ratio, word):
    line = module("common").verdict("inference", 3.0 * ratio, 3.0)
    assert line == f"inference: {3 * ratio:.2f} ms with torch's layers, 3.00 ms with gemmconv's ({ratio:.2f}x, {word})"


def test_progress_prints_ten_lines_without_tqdm(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(module("common").progress(25, "training", [0.5])) == [*range(25)]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "training: 25 of 25, 0 s loss 0.5000"
