"""A kernel that nobody has written yet: what it touches is its source, its host file, a line of a registry, its cases.

Here all four are in this file; choosing, explaining, comparing and emulating it need no more.
"""

import shutil
from dataclasses import dataclass

import pytest
import torch

import gemmconv
from benchmarks import rows
from benchmarks.workloads import custom
from gemmconv.algorithms.fused import Fused
from gemmconv.device import named
from gemmconv.kernels.base import Kernel, strides_of
from gemmconv.kernels.macros import ELEMENT_TYPES, geometry_macros
from gemmconv.kernels.program import Launch, Operand, Output, Program
from gemmconv.runtime import sources
from gemmconv.selection import choose
from tests import emulator, reference
from tests.samples import config_of

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

# 1. csrc/toy/gather.cu

SOURCE = """
struct gather_params {
    const ELEMENT_T *input, *weight, *bias;
    ELEMENT_T* output;
    int images, h_in, w_in, h_out, w_out;
};

extern "C" __global__ void __launch_bounds__(THREADS) toy_gather_kernel(const __grid_constant__ gather_params p) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.images * OUT_CHANNELS * p.h_out * p.w_out) return;
    const int w = i % p.w_out, h = i / p.w_out % p.h_out;
    const int channel = i / p.w_out / p.h_out % OUT_CHANNELS, image = i / p.w_out / p.h_out / OUT_CHANNELS;
    float sum = p.bias == nullptr ? 0.0f : p.bias[channel];
    for (int kh = 0; kh < KERNEL_H; ++kh)
        for (int kw = 0; kw < KERNEL_W; ++kw) {
            const int down = h + PADDING_H - kh * DILATION_H, across = w + PADDING_W - kw * DILATION_W;
            const int ih = down / STRIDE_H, iw = across / STRIDE_W;
            if (down < 0 || down % STRIDE_H || ih >= p.h_in) continue;
            if (across < 0 || across % STRIDE_W || iw >= p.w_in) continue;
            for (int ci = 0; ci < IN_CHANNELS; ++ci)
                sum += p.input[((image * IN_CHANNELS + ci) * p.h_in + ih) * p.w_in + iw]
                     * p.weight[((ci * OUT_CHANNELS + channel) * KERNEL_H + kh) * KERNEL_W + kw];
        }
    p.output[i] = sum;
}
"""

# 2. gemmconv/kernels/toy/gather.py


@dataclass(frozen=True)
class Tile:
    threads: int


class Gather(Kernel):
    name = "toy/gather"
    dtypes = (torch.float32,)
    serves = "one group"

    def tiles(self, config, direction):
        return [Tile(32), Tile(64)] if config.problem.groups == 1 else []

    def seconds(self, config, direction, tile):
        return 1e-9 / tile.threads

    def program(self, config, direction, tile):
        p = config.problem
        macros = {"ELEMENT_T": ELEMENT_TYPES[config.dtype], "THREADS": tile.threads, **geometry_macros(p)}
        macros |= {"IN_CHANNELS": p.in_channels, "OUT_CHANNELS": p.out_channels}
        params = {
            "input, weight, bias, output": ("input", "weight", "bias", "output"),
            "images": p.batch,
            "h_in, w_in": p.input_size,
            "h_out, w_out": p.output_size,
        }
        grid = -(-p.batch * p.out_channels * p.out_pixels // tile.threads), 1, 1
        launch = Launch("toy/gather.cu", macros, grid, (tile.threads, 1, 1), params)
        operands = (Operand(name, torch.contiguous_format) for name in ("input", "weight", "bias"))
        strides = strides_of(p.output_shape, config.memory_format)
        output = Output("output", p.output_shape, strides, torch.contiguous_format)
        return Program(config.dtype, tuple(operands), (output,), (launch,))


@pytest.fixture(autouse=True)
def registered(monkeypatch, tmp_path):
    shutil.copytree(sources.directory(), tmp_path / "csrc")
    (tmp_path / "csrc" / "toy").mkdir()
    (tmp_path / "csrc" / "toy" / "gather.cu").write_text(SOURCE)
    monkeypatch.setattr(sources, "directory", lambda: tmp_path / "csrc")
    # 3. gemmconv/algorithms/fused.py
    monkeypatch.setattr(Fused, "kernels", (*Fused.kernels, Gather()))


# 4. tests

LAYERS = ["n2 c3x4 k3 h4 w5 s2 p1 bias", "n1 c2x3 k2x3 h3 w4 d2"]


@pytest.mark.parametrize("layer", LAYERS)
def test_the_choice_and_its_explanation_name_it(layer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    problem = custom(layer).problem
    chosen = choose(config_of(problem, torch.float32), "auto", "test").choice(
        config_of(problem, torch.float32), "forward"
    )
    assert str(chosen) == "toy/gather threads=64"
    explanation = gemmconv.explain(problem, gpu="H100")
    assert (explanation.algorithm, explanation.kernel, explanation.tile) == ("fused", "toy/gather", "threads=64")
    assert "threads=64" in explanation.kernels["toy/gather"]
    half = gemmconv.explain(problem, gpu="H100", dtype=torch.float16)
    assert half.kernel != "toy/gather"
    assert half.kernels["toy/gather"] == "not for it: dtype must be one of float32, got float16"
    assert named("H100").is_hopper


def test_its_tiles_are_measured(monkeypatch):
    monkeypatch.setitem(rows.KERNELS, Gather.name, Gather())
    config = config_of(custom(LAYERS[0]).problem, torch.float32)
    found = rows.candidates_of(config, "forward", near=2, drawn=0, kernels=[Gather.name])
    assert [(name, tile.threads, role) for name, tile, role, _ in found] == [
        (Gather.name, 64, "own"),
        (Gather.name, 32, "near"),
    ]


@emulator.needs_compiler
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("layer", LAYERS)
def test_it_runs_in_the_emulator(layer, layout, builder):
    workload = custom(layer)
    p, config = workload.problem, config_of(workload.problem, torch.float32, layout)
    generator = torch.Generator().manual_seed(0)
    input, weight, bias = (
        torch.randn(shape, generator=generator) for shape in (p.input_shape, p.weight_shape, (p.out_channels,))
    )
    with emulator.install(builder):
        for tile in Gather().tiles(config, "forward"):
            output = Gather().prepare(config, "forward", tile)(input, weight, bias)
            right = torch.nn.functional.conv_transpose2d(
                *(tensor.double() for tensor in (input, weight, bias)),
                *(p.stride, p.padding, p.output_padding, p.groups, p.dilation),
            )
            assert reference.relative_error(output, right) < 1e-6
            assert output.is_contiguous(memory_format=layout)
