"""README and the pages under docs: snippets and commands run, links lead somewhere, what they list is complete."""

import ast
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gemmconv
from benchmarks import algorithms, compare
from gemmconv.__main__ import main
from gemmconv.algorithms import fallback
from gemmconv.runtime import available

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = "../README.md"
PAGES = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
SITE = [*PAGES]
PAGES[README] = (DOCS / README).read_text(encoding="utf-8")


def blocks(text, language):
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text):
    """Return the shell commands, without their comments."""
    return [line.partition("  #")[0].strip() for block in blocks(text, "sh") for line in block.splitlines()]


SNIPPETS = [(page, snippet) for page, text in PAGES.items() for snippet in blocks(text, "python")]
COMMANDS = [(page, command) for page, text in PAGES.items() for command in commands(text) if command]
_CALL = re.compile(r"python -m ([\w.]+)([^`\n]*)")
_WORDS = 3  # of a message's piece between two values: fewer say nothing


def quoted(text, kind):
    """Return the lines of a document that quote an error or a warning."""
    return [line for block in blocks(text, "text") for line in block.splitlines() if kind in line]


def named_files(text):
    """The paths that a text links to, those that begin with a folder of the tree, and those of code."""
    found = set(re.findall(r"\]\((?!https?:|#)([^)#]+)", text))
    found |= set(re.findall(r"(?<![\w./-])(?:gemmconv|csrc|tests|benchmarks)/[\w./-]*\w", text))
    return found | set(re.findall(r"(?<![\w./-])[\w-][\w./-]*\.(?:py|cuh?)\b", text))


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(SNIPPETS)])
def test_docs_snippet_runs(page, snippet, capsys, tmp_path, monkeypatch):
    """What it prints is what comments behind its calls of print say."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    try:
        exec(compile(snippet, page, "exec"), {"__name__": "snippet"})
    finally:
        gemmconv.forget_tuned()
    promised = re.findall(r"^ *print\(.*# (.+)$", snippet, re.MULTILINE)
    assert capsys.readouterr().out.splitlines()[: len(promised)] == promised


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(COMMANDS)])
def test_docs_command_runs(page, command, capsys, tmp_path, monkeypatch):
    """What takes a GPU, or longer than seconds, is there."""
    program, *arguments = shlex.split(command)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(arguments) <= set(targets)
        return
    if program == "pip":
        return
    assert program == "python"
    if arguments[0] != "-m":
        assert (ROOT / arguments[0]).exists()
        return
    _, module, *arguments = arguments
    if module == "benchmarks.algorithms" and arguments:
        for one in ("rich", "matplotlib"):
            pytest.importorskip(one)
        small = ["--batch", "1", "--height", "8", "--width", "8", "--device", "cpu"]  # the last of each counts
        assert algorithms.main([*arguments, *small, "--out", str(tmp_path)]) == 0
        assert "gemm_col2im" in capsys.readouterr().out
    elif module == "gemmconv" and arguments[0] == "warmup":
        seen = []  # nothing is compiled
        monkeypatch.setattr("gemmconv.__main__._warmup", lambda *call: seen.append(call) or 0)
        assert main(arguments) == 0
        assert len(seen) == 1
    elif module == "gemmconv" and arguments[0] == "tune":
        few = ["--in-channels", "2", "--out-channels", "1", "--batch", "1", "--height", "4", "--width", "4"]
        few += ["--no-backward", "--device", "cpu"]
        assert main([*arguments, *few, "--path", str(tmp_path / "tuned.json")]) == 0
        assert "measured: " in capsys.readouterr().out
        gemmconv.forget_tuned()
    elif (module, arguments) == ("benchmarks.compare", ["--list"]):
        assert compare.main(arguments) == 0
        assert "kb57" in capsys.readouterr().out
    else:
        assert find_spec(module) is not None


@pytest.mark.parametrize("page", PAGES)
def test_docs_name_modules_and_flags_that_exist(page):
    for module, arguments in _CALL.findall(PAGES[page]):
        assert find_spec(module) is not None, module
        folder = ROOT / module.split(".")[0]
        if folder.is_dir():
            files = [*folder.rglob("*.py"), ROOT / "gemmconv" / "flags.py"]
            sources = "".join(path.read_text(encoding="utf-8") for path in files)
            assert [flag for flag in re.findall(r"--[a-z-]+", arguments) if f'"{flag}"' not in sources] == []


@pytest.mark.parametrize("page", PAGES)
def test_docs_links_lead_to_files_and_headings(page):
    broken = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        file = (DOCS / page).parent / path if path else DOCS / page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(target)
    assert broken == []


def anchors(text):
    """Return the anchors of a page's headings, as MkDocs makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in headings}


@pytest.mark.parametrize("page", [*PAGES, "../benchmarks/README.md"])
def test_docs_name_files_that_exist(page):
    """Beside the page, in the tree, or as kernels' sources."""
    path = (DOCS / page).resolve()
    places = ROOT, path.parent, ROOT / "csrc"
    names = named_files(path.read_text(encoding="utf-8"))
    assert [name for name in sorted(names) if not any((place / name).exists() for place in places)] == []


def test_named_files_finds_links_paths_and_sources():
    text = "[a](docs/a.md) [b](https://b.org/c.py) `csrc/gone.cu`, load/gone.cuh; benchmarks/results/gpu."
    assert named_files(text) == {"docs/a.md", "csrc/gone.cu", "load/gone.cuh", "benchmarks/results/gpu"}


def test_readme_is_read_in_three_minutes():
    assert len(PAGES[README].splitlines()) <= 160


def test_docs_show_what_explain_prints():
    reports = [one for one in blocks(PAGES["algorithms/auto.md"], "text") if one.startswith("conv_transpose2d")]
    problem = gemmconv.Problem(128, 512, 256, 1, (4, 4), (4, 4), stride=(2, 2), padding=(1, 1))
    for gpu, report in zip(("H100", "A100"), reports, strict=True):
        assert str(gemmconv.explain(problem, gpu=gpu, dtype=torch.float16)).rstrip() == report.rstrip(), gpu


def test_docs_quote_the_errors_as_they_are_raised():
    images, weight = torch.zeros(1, 4, 5, 5), torch.zeros(4, 2, 3, 3)
    raised = []
    for call in (
        lambda: gemmconv.conv_transpose2d(images, weight, stride=2, output_padding=2),
        lambda: gemmconv.conv_transpose2d(images.cfloat(), weight.cfloat(), algorithm="gemm_col2im"),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        raised.append(f"{caught.type.__name__}: {caught.value}")
    assert raised == quoted(PAGES["guide/troubleshooting.md"], "Error: ")


def test_docs_quote_the_warning_of_an_old_driver_as_it_is_given(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(available, "importlib", SimpleNamespace(import_module=lambda name: None))
    monkeypatch.setattr(available, "_versions", lambda: ((13, 0), frozenset({90}), (12, 4)))
    monkeypatch.setattr(fallback, "_warned", set())
    with pytest.warns(RuntimeWarning) as caught:
        fallback.warn_once(available.what_is_missing((9, 0)))
    warnings = [f"RuntimeWarning: {one.message}" for one in caught]
    assert warnings == quoted(PAGES["guide/troubleshooting.md"], "RuntimeWarning: ")


def test_troubleshooting_has_every_message():
    said = plainly(PAGES["guide/troubleshooting.md"])
    found = {piece for path in sorted((ROOT / "gemmconv").rglob("*.py")) for piece in messages(path.read_text())}
    assert len(found) > 100
    assert [piece for piece in sorted(found) if piece not in said] == []


def test_messages_finds_what_is_raised_and_warned():
    text = """
def check(value):
    rule = f"be less than {value}, on both axes"
    fail(ValueError, "call", "stride", rule, value, "use a smaller one")
    raise kind(f"{value}: {fail} is what it is for")
    warnings.warn("all is lost here", RuntimeWarning)
    print("none of this counts")
"""
    assert messages(text) == {
        "be less than",
        "on both axes",
        "use a smaller one",
        "is what it is for",
        "all is lost here",
    }


def messages(text):
    """Return the pieces of messages, between their values, that a module raises, warns of, or refuses a call with."""
    found = set()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names.setdefault(node.targets[0].id, []).append(node.value)
        refuses = function.name in (
            "what_is_missing",
            "why_not",
            "why_not_device_or_dtype",
            "why_no_kernels",
            "why_not_dtype",
        )
        for node in ast.walk(function):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                given = node.exc.args
            elif isinstance(node, ast.Return) and refuses and node.value is not None:
                given = [node.value]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("fail", "warn", "_warn"):
                given = node.args
            else:
                continue
            for one in given:
                for value in names.get(one.id, []) if isinstance(one, ast.Name) else [one]:
                    found |= pieces(value)
    return found


def pieces(value):
    """Return the constant parts of an expression for a string that have some words."""
    if isinstance(value, ast.Constant):
        parts = [value.value] if isinstance(value.value, str) else []
    elif isinstance(value, ast.JoinedStr):
        parts = [part.value for part in value.values if isinstance(part, ast.Constant)]
    else:
        parts = []
    texts = (plainly(part).removesuffix(", got ").strip(" ,;:'()") for part in parts)
    return {text for text in texts if len(re.findall(r"[a-zA-Z]+", text)) >= _WORDS}


def plainly(text):
    return re.sub(r"\s+", " ", text.replace("\\|", "|"))


def test_performance_lists_every_environment_variable():
    sources = "".join(path.read_text() for path in (ROOT / "gemmconv").rglob("*.py"))
    listed = re.findall(r"^\| `(GEMMCONV_\w+)` \|", PAGES["guide/performance.md"], re.MULTILINE)
    assert set(listed) == set(re.findall(r"GEMMCONV_[A-Z_]+", sources))


def test_reference_has_every_public_name():
    names = re.findall(r"^::: gemmconv\.([\w.]+)$", PAGES["reference.md"], re.MULTILINE)
    assert {*names} == {*gemmconv.__all__} - {"__version__"}
    assert all(hasattr(gemmconv, name) for name in gemmconv.__all__)


def test_site_builds_without_a_warning(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")} >= {
        page.removesuffix(".md") + ".html" for page in SITE
    }
