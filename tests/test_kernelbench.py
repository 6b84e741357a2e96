"""``python -m benchmarks.kernelbench`` on a checkout made for the test, and ``python -m benchmarks.volumes``."""

import pytest

from benchmarks import kernelbench, volumes

PROBLEM = """
import torch

class Model(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.up = torch.nn.ConvTranspose2d(channels, 3, 4, 2, 1)

    def forward(self, x):
        return self.up(x).tanh()

def get_inputs():
    return [torch.rand(2, 8, 5, 6)]

def get_init_inputs():
    return [8]
"""


@pytest.fixture
def checkout(tmp_path):
    for level, name, text in ((1, "57_up.py", PROBLEM), (2, "3_up.py", PROBLEM), (2, "4_none.py", "x = 1")):
        path = tmp_path / "KernelBench" / f"level{level}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_every_problem_with_a_transposed_convolution_gets_a_row(checkout, capsys):
    kernelbench.main([str(checkout), "--device", "cpu"])
    out = capsys.readouterr().out
    assert "| L1/57" in out
    assert "| L2/3" in out
    assert "2 of 2 problems have layers of ours" in out


def test_a_converted_model_that_is_wrong_has_no_time(checkout, capsys, monkeypatch):
    def convert(model):
        model.up.weight.data += 0.1
        return model

    monkeypatch.setattr(kernelbench.gemmconv, "convert", convert)
    assert kernelbench.main([str(checkout), "--device", "cpu", "--only", "L1/57"]) == 1
    assert "failed: L1/57: ValueError: converted is off by" in capsys.readouterr().out


def test_a_folder_without_problems_is_refused(tmp_path, capsys):
    assert kernelbench.main([str(tmp_path)]) == 1
    assert "no problem with a transposed convolution" in capsys.readouterr().err


def test_slower_is_beyond_the_noise_of_torch_itself():
    assert kernelbench.is_slower({"torch": 1.0, "again": 1.05, "converted": 1.09})
    assert not kernelbench.is_slower({"torch": 1.0, "again": 1.05, "converted": 1.08})
    assert not kernelbench.is_slower({"torch": 0.01, "again": 0.01, "converted": 0.05})


def test_volumes_are_compared_before_they_are_timed(capsys, monkeypatch):
    monkeypatch.setattr(volumes, "LAYERS", {"tiny": volumes.Layer(1, (8, 4), (2, 3, 4), 2)})
    assert volumes.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "| tiny | tf32 |" in out
    assert "step, waited: " in out
    monkeypatch.setattr(
        volumes.gemmconv.ConvTranspose3d,
        "forward",
        lambda layer, input: 1.1 * layer._function(input, layer.weight, layer.bias, layer.stride),
    )
    assert volumes.main(["--device", "cpu"]) == 1
    assert "failed: tiny, bf16: off by 1" in capsys.readouterr().out
