"""The README's snippets run as they stand, and what it quotes is what happens."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gemmconv
from gemmconv.__main__ import main
from gemmconv.algorithms import ALGORITHMS, fallback
from gemmconv.runtime import available

ROOT = Path(__file__).resolve().parent.parent
README = ROOT.joinpath("README.md").read_text(encoding="utf-8")


def blocks(language):
    """Return the README's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("snippet", blocks("python"), ids=lambda snippet: snippet.splitlines()[-1][:40])
def test_readme_snippet_runs(snippet, capsys):
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})
    promised = re.findall(r"^print\(.*# (.+)$", snippet, re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()
    assert printed[: len(promised)] == promised


def test_readme_command_runs(tmp_path, capsys):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    pytest.importorskip("matplotlib")
    (command,) = [line for block in blocks("sh") for line in block.splitlines() if "gemmconv compare" in line]
    _, arguments = command.split("-m gemmconv ")
    small = ("--batch", "1", "--height", "8", "--width", "8")  # the last of each counts
    assert main([*shlex.split(arguments), *small, "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "gemm_col2im" in capsys.readouterr().out


def test_readme_warmup_command_says_what_to_compile(monkeypatch):
    (command,) = [line for block in blocks("sh") for line in block.splitlines() if "gemmconv warmup" in line]
    seen = []
    monkeypatch.setattr("gemmconv.__main__._warmup", lambda *arguments: seen.append(arguments) or 0)
    _, arguments = command.split("-m gemmconv ")
    assert main(shlex.split(arguments)) == 0
    ((config, _, backward),) = seen
    assert config.problem == gemmconv.Problem(8, 64, 32, 1, (16, 16), (4, 4), (2, 2), (1, 1))
    assert backward


def test_readme_quotes_the_errors():
    quoted = [line for block in blocks("text") for line in block.splitlines() if "Error: " in line]
    images, weight = torch.zeros(1, 4, 5, 5), torch.zeros(4, 2, 3, 3)
    raised = []
    for call in (
        lambda: gemmconv.conv_transpose2d(images, weight, stride=2, output_padding=2),
        lambda: gemmconv.conv_transpose2d(images.cfloat(), weight.cfloat(), algorithm="gemm_col2im"),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        raised.append(f"{caught.type.__name__}: {caught.value}")
    assert raised == quoted


def test_readme_quotes_the_warning(monkeypatch):
    quoted = [line for block in blocks("text") for line in block.splitlines() if line.startswith("RuntimeWarning: ")]
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(available, "importlib", SimpleNamespace(import_module=lambda name: None))
    monkeypatch.setattr(available, "_versions", lambda: ((13, 0), frozenset({90}), (12, 4)))
    monkeypatch.setattr(fallback, "_warned", set())
    with pytest.warns(RuntimeWarning) as caught:
        fallback.warn_once(available.what_is_missing((9, 0)))
    assert [f"RuntimeWarning: {one.message}" for one in caught] == quoted


def test_readme_lists_every_algorithm():
    assert re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)[: len(ALGORITHMS) + 1] == [
        *(algorithm.name for algorithm in ALGORITHMS),
        "auto",
    ]


def named_files(text):
    """The paths that a text links to, those that begin with a folder of the tree, and those of code."""
    found = set(re.findall(r"\]\((?!https?:|#)([^)#]+)", text))
    found |= set(re.findall(r"(?<![\w./-])(?:gemmconv|csrc|tests|benchmarks)/[\w./-]*\w", text))
    return found | set(re.findall(r"(?<![\w./-])[\w-][\w./-]*\.(?:py|cuh?)\b", text))


@pytest.mark.parametrize("document", ["README.md", "benchmarks/README.md"])
def test_every_file_that_a_readme_names_exists(document):
    places = ROOT, (ROOT / document).parent
    names = named_files((ROOT / document).read_text(encoding="utf-8"))
    assert len(names) > 10
    assert [name for name in sorted(names) if not any((place / name).exists() for place in places)] == []


def test_named_files_finds_links_paths_and_sources():
    text = "[a](docs/a.md) [b](https://b.org/c.py) `csrc/gone.cu`, load/gone.cuh; benchmarks/results/gpu."
    assert named_files(text) == {"docs/a.md", "csrc/gone.cu", "load/gone.cuh", "benchmarks/results/gpu"}
