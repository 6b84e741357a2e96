"""The README's snippets run as they stand, and what it quotes is what happens."""

import re
import shlex

import pytest

import gemmconv
from gemmconv.algorithms import ALGORITHMS
from tests import documents
from tests.documents import ROOT, blocks, commands, missing_files, named_files

README = ROOT.joinpath("README.md").read_text(encoding="utf-8")


def arguments_of(command):
    """Return the arguments of README's one call of a command of gemmconv."""
    (found,) = [line for line in commands(README) if f"gemmconv {command}" in line]
    return shlex.split(found.split("-m gemmconv ")[1])


@pytest.mark.parametrize("snippet", blocks(README, "python"), ids=lambda snippet: snippet.splitlines()[-1][:40])
def test_readme_snippet_runs(snippet, capsys):
    documents.run_snippet(snippet, "README.md", capsys)


def test_readme_command_runs(tmp_path, capsys):
    documents.run_compare(arguments_of("compare"), tmp_path, capsys)


def test_readme_warmup_command_says_what_to_compile(monkeypatch):
    problem, backward = documents.run_warmup(arguments_of("warmup"), monkeypatch)
    assert problem == gemmconv.Problem(8, 64, 32, 1, (16, 16), (4, 4), (2, 2), (1, 1))
    assert backward


def test_readme_quotes_the_errors():
    assert documents.errors() == documents.quoted(README, "Error: ")


def test_readme_quotes_the_warning(monkeypatch):
    assert documents.warning_of_an_old_driver(monkeypatch) == documents.quoted(README, "RuntimeWarning: ")


def test_readme_lists_every_algorithm():
    assert re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)[: len(ALGORITHMS) + 1] == [
        *(algorithm.name for algorithm in ALGORITHMS),
        "auto",
    ]


@pytest.mark.parametrize("document", ["README.md", "benchmarks/README.md"])
def test_every_file_that_a_readme_names_exists(document):
    assert len(named_files((ROOT / document).read_text(encoding="utf-8"))) > 10
    assert missing_files(ROOT / document) == []


def test_named_files_finds_links_paths_and_sources():
    text = "[a](docs/a.md) [b](https://b.org/c.py) `csrc/gone.cu`, load/gone.cuh; benchmarks/results/gpu."
    assert named_files(text) == {"docs/a.md", "csrc/gone.cu", "load/gone.cuh", "benchmarks/results/gpu"}
