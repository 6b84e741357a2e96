"""What the tests of README.md and of the pages under docs share: snippets, commands, quotes, the files they name."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gemmconv
from gemmconv.__main__ import main
from gemmconv.algorithms import fallback
from gemmconv.runtime import available

ROOT = Path(__file__).resolve().parent.parent
_FEW = ["--batch", "1", "--height", "8", "--width", "8", "--device", "cpu"]  # the last of each counts


def blocks(text, language):
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text):
    """Return the shell commands, without their comments."""
    return [line.partition("  #")[0].strip() for block in blocks(text, "sh") for line in block.splitlines()]


def run_snippet(snippet, name, capsys):
    """Run a snippet, and compare what it prints with the comments behind its calls of print."""
    exec(compile(snippet, name, "exec"), {"__name__": "snippet"})
    promised = re.findall(r"^ *print\(.*# (.+)$", snippet, re.MULTILINE)
    assert capsys.readouterr().out.splitlines()[: len(promised)] == promised


def run_compare(arguments, folder, capsys):
    """Run ``gemmconv compare`` on a small image on the CPU."""
    for module in ("rich", "matplotlib"):
        pytest.importorskip(module)
    assert main([*arguments, *_FEW, "--out", str(folder)]) == 0
    assert "gemm_col2im" in capsys.readouterr().out


def run_warmup(arguments, monkeypatch):
    """Run ``gemmconv warmup`` but for compiling. Return what would be compiled for, and whether gradients are too."""
    seen = []
    monkeypatch.setattr("gemmconv.__main__._warmup", lambda *arguments: seen.append(arguments) or 0)
    assert main(arguments) == 0
    ((config, _, backward),) = seen
    return config.problem, backward


def quoted(text, kind):
    """Return the lines of a document that quote an error or a warning."""
    return [line for block in blocks(text, "text") for line in block.splitlines() if kind in line]


def errors():
    """Return the errors that documents quote, as they are raised."""
    images, weight = torch.zeros(1, 4, 5, 5), torch.zeros(4, 2, 3, 3)
    raised = []
    for call in (
        lambda: gemmconv.conv_transpose2d(images, weight, stride=2, output_padding=2),
        lambda: gemmconv.conv_transpose2d(images.cfloat(), weight.cfloat(), algorithm="gemm_col2im"),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        raised.append(f"{caught.type.__name__}: {caught.value}")
    return raised


def warning_of_an_old_driver(monkeypatch):
    """Return the warnings that documents quote, as they are given."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(available, "importlib", SimpleNamespace(import_module=lambda name: None))
    monkeypatch.setattr(available, "_versions", lambda: ((13, 0), frozenset({90}), (12, 4)))
    monkeypatch.setattr(fallback, "_warned", set())
    with pytest.warns(RuntimeWarning) as caught:
        fallback.warn_once(available.what_is_missing((9, 0)))
    return [f"RuntimeWarning: {one.message}" for one in caught]


def named_files(text):
    """The paths that a text links to, those that begin with a folder of the tree, and those of code."""
    found = set(re.findall(r"\]\((?!https?:|#)([^)#]+)", text))
    found |= set(re.findall(r"(?<![\w./-])(?:gemmconv|csrc|tests|benchmarks)/[\w./-]*\w", text))
    return found | set(re.findall(r"(?<![\w./-])[\w-][\w./-]*\.(?:py|cuh?)\b", text))


def missing_files(document):
    """Return the files that a document names and that do not exist: beside it, in the tree, or as kernels' sources."""
    places = ROOT, document.parent, ROOT / "csrc"
    names = named_files(document.read_text(encoding="utf-8"))
    return [name for name in sorted(names) if not any((place / name).exists() for place in places)]
