"""``python -m gemmconv info``, and the lines of the log ``gemmconv``."""

import json
import logging
from pathlib import Path

import pytest
import torch

import gemmconv
from gemmconv import extension, info, pairs, selection, tuned
from gemmconv.__main__ import main
from gemmconv.algorithms import fallback
from gemmconv.device import named
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config
from tests.processes import output_of


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder with two entries of 1 MiB in all and a file of tuned choices."""
    monkeypatch.setenv("GEMMCONV_CACHE_DIR", str(tmp_path))
    for name in ("a", "b"):
        tmp_path.joinpath("entries", name).mkdir(parents=True)
        tmp_path.joinpath("entries", name, "cubin").write_bytes(bytes(1 << 19))
    entry = tuned.Entry(("layer",), (1, 2, 3), ("native",))
    tuned.write(tmp_path / "tuned.json", [entry])
    yield tmp_path
    tuned.forget_tuned()


def test_info_prints_aligned_lines(cache, capsys):
    assert main(["info"]) == 0
    lines = {line[:20].strip(): line[21:] for line in capsys.readouterr().out.splitlines()}
    assert lines["gemmconv"] == gemmconv.__version__
    assert lines["torch"] == torch.__version__
    assert lines["devices"].startswith("cpu: CPU, ")
    assert (lines["cache folder"], lines["cache MiB"], lines["cache entries"]) == (str(cache), "1.0", "2")
    assert (lines["tuned file"], lines["tuned entries"]) == (str(cache / "tuned.json"), "1")
    assert lines["executor"] == ("Python" if extension.extension() is None else "C")
    assert int(lines["compilations"]) >= 0


def test_info_counts_tuned_choices_and_compilations_of_this_process(cache, capsys):
    assert info.collect()["tuned loaded"] == 0
    gemmconv.load_tuned()
    before = info.collect()
    assert before["tuned loaded"] == 1
    compiler = pytest.importorskip("gemmconv.runtime.compiler", reason="compiling needs the cuda-core package")
    macros = {"T": "float"}
    with pytest.raises(gemmconv.CompileError):
        compiler.compile("columns/col2im.cu", macros, "sm_80")  # macros are missing: does not count
    assert info.collect()["compilations"] == before["compilations"]
    compiler.compilation_seconds.append(0.5)
    assert main(["info", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    compiler.compilation_seconds.pop()
    assert state["compilations"] == before["compilations"] + 1
    assert state["compilation seconds"] == pytest.approx(before["compilation seconds"] + 0.5)


def test_info_names_gpus_and_what_they_miss(monkeypatch):
    reasons = {
        0: None,
        1: "the driver must load what NVRTC 13.0 compiles, got a driver for CUDA 12.4; update the driver",
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(info, "why_no_kernels", lambda device: reasons[device.index])
    state = info.collect()
    assert state["devices"]["cuda:1"] == "NVIDIA H200, compute capability 9.0"
    assert state["missing for kernels"] == {"cuda:0": "nothing", "cuda:1": reasons[1]}
    assert f"{'':<20} cuda:1: {reasons[1]}" in info.report(state).splitlines()


def test_info_reports_wrong_settings_and_needs_no_cuda_package():
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "from gemmconv import info; state = info.collect()\n"
        "assert 'must be' in state['executor'], state['executor']\n"
        "assert 'ModuleNotFoundError' in state['NVRTC'], state['NVRTC']\n"
        "assert state['compilations'] == 0\n"
    )
    output_of(code, GEMMCONV_EXECUTOR="rust")


# The log


@pytest.fixture
def debug(caplog):
    caplog.set_level(logging.DEBUG, "gemmconv")
    return caplog


@pytest.mark.parametrize("left_to_torch", [False, True])
def test_a_choice_is_logged_once_for_each_pass_of_a_new_configuration(left_to_torch, debug, monkeypatch):
    """A call that is torch's own, gradients included, has one line."""
    monkeypatch.setattr(pairs, "leaves_all_to_torch", lambda *_: left_to_torch)
    layer, images = gemmconv.ConvTranspose2d(24, 1, 3, stride=2), torch.randn(2, 24, 5, 6, requires_grad=True)
    for _ in range(3):
        layer(images).sum().backward()
    first, *others = [record.getMessage() for record in debug.records if record.levelno == logging.DEBUG]
    assert first.startswith("auto chooses for c24x1 g1 k3x3 s2x2 p0x0 o0x0 d1x1 forward float32 ieee nchw cpu 2x5x6: ")
    assert [" grads float32 " in one for one in others] == [True] * (not left_to_torch)
    algorithm, kernel, _ = first.rsplit(": ", 1)[1].split(", ")
    assert algorithm in selection.NAMES
    assert kernel.startswith("kernel ")


def test_no_choice_is_logged_where_an_algorithm_was_asked_for_or_the_level_is_off(debug, monkeypatch):
    layer = gemmconv.ConvTranspose2d(24, 1, 3, algorithm="gemm_col2im")
    layer(torch.randn(1, 24, 5, 6))
    debug.set_level(logging.INFO, "gemmconv")
    monkeypatch.setattr(tuned, "key_of", lambda *_: pytest.fail("a message was built"))
    gemmconv.ConvTranspose2d(24, 1, 5)(torch.randn(1, 24, 5, 6))
    assert not debug.records


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_log_names_both_gradients_on_a_gpu(dtype, debug):
    problem = Problem(8, 256, 128, 1, (32, 32), (4, 4), stride=(2, 2), padding=(1, 1))
    config = Config(problem, dtype, torch.device("cuda", 0), spec=named("H100"), deterministic=True)
    pairs.log_choice(pairs.choose_pair(config, config, "auto", "test").passes(config, config))
    (record,) = debug.records
    assert " nchw NVIDIA H100 80GB HBM3 8x32x32: fused, kernel sm90/implicit_gemm " in record.getMessage()
    assert " and sm90/wgrad_n" in record.getMessage()


def test_a_fallback_is_logged_for_each_call_that_is_prepared(debug, monkeypatch):
    monkeypatch.setattr(fallback, "_warned", {"the GPU is gone"})  # so that nothing warns
    for _ in range(2):
        fallback.warn_once("the GPU is gone")
    assert [record.getMessage() for record in debug.records] == ["torch's operator is used, since the GPU is gone"] * 2
    assert {record.levelno for record in debug.records} == {logging.INFO}


def test_the_citation_is_of_this_version():
    text = (Path(__file__).parent.parent / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {gemmconv.__version__}\n" in text
