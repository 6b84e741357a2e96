"""The README's snippets run as they stand, and what it quotes is what happens."""

import shlex

import pytest

import gemmconv
from tests import documents
from tests.documents import ROOT, blocks, commands, missing_files, named_files

README = ROOT.joinpath("README.md").read_text(encoding="utf-8")


def arguments_of(command):
    """Return the arguments of README's one call of a command of gemmconv."""
    (found,) = [line for line in commands(README) if f"gemmconv {command}" in line]
    return shlex.split(found.split("-m gemmconv ")[1])


@pytest.mark.parametrize("snippet", blocks(README, "python"), ids=lambda snippet: snippet.splitlines()[-1][:40])
def test_readme_snippet_runs(snippet, capsys):
    try:
        documents.run_snippet(snippet, "README.md", capsys)
    finally:
        gemmconv.forget_tuned()


def test_readme_command_runs(tmp_path, capsys):
    documents.run_compare(arguments_of("compare"), tmp_path, capsys)


def test_readme_is_read_in_three_minutes():
    assert len(README.splitlines()) <= 160


@pytest.mark.parametrize("document", ["README.md", "benchmarks/README.md"])
def test_every_file_that_a_readme_names_exists(document):
    assert len(named_files((ROOT / document).read_text(encoding="utf-8"))) > 10
    assert missing_files(ROOT / document) == []


def test_named_files_finds_links_paths_and_sources():
    text = "[a](docs/a.md) [b](https://b.org/c.py) `csrc/gone.cu`, load/gone.cuh; benchmarks/results/gpu."
    assert named_files(text) == {"docs/a.md", "csrc/gone.cu", "load/gone.cuh", "benchmarks/results/gpu"}
