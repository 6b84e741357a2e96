"""Turning tensors between NCHW and channels_last: csrc/turn.cu under the emulator and on the GPU."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import emulator
from tests.samples import offset, offset_channels_last, transposed

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.algorithms import turning
from gemmconv.algorithms.base import Config, strides_of
from gemmconv.geometry import Problem
from gemmconv.runtime import launch

FORMATS = (torch.contiguous_format, torch.channels_last)
DTYPES = (torch.float16, torch.float32, torch.float64)
# Even and odd extents, more channels or pixels than a tile has, and channels that two tiles share unevenly.
SHAPES = [(2, 3, 5, 7), (1, 2, 1, 2), (3, 64, 8, 9), (2, 70, 4, 6), (1, 131, 3, 43), (2, 8, 32, 70), (70, 6, 2, 2)]
needs_compiler = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler (g++ or c++) to emulate with")


def config_of(dtype, device, memory_format=torch.channels_last):
    return Config(Problem(1, 2, 2, 1, (2, 2), (1, 1)), dtype, torch.device(device), memory_format=memory_format)


def random_tensor(shape, dtype, device="cpu"):
    return torch.arange(math.prod(shape), device=device).view(shape).mul(0.37).sin().to(dtype)


def check(turn, tensor, memory_format):
    turned = turn(tensor)
    assert turned.stride() == strides_of(tensor.shape, memory_format)
    assert torch.equal(turned, tensor)


@needs_compiler
@pytest.mark.parametrize(("shape", "dtype"), [*itertools.product(SHAPES, DTYPES)], ids=str)
def test_turn_kernel_moves_every_element(folder, shape, dtype, poison):
    tensor = random_tensor(shape, dtype)
    with emulator.install(folder):
        turns = {one: turning.prepare_turn(config_of(dtype, "cpu"), shape, one) for one in FORMATS}
        for memory_format, other in zip(FORMATS, FORMATS[::-1], strict=True):
            poison("cpu")
            check(turns[memory_format], tensor.contiguous(memory_format=other), memory_format)


@needs_compiler
def test_turn_kernel_in_64_bits(folder, monkeypatch):
    monkeypatch.setattr(turning, "_INT32_MAX", 0)
    macros = turning.turn_macros(8, 12, True, 2)
    assert macros["INDEX_64"] == 1
    with emulator.install(folder):
        turn = turning.prepare_turn(config_of(torch.float16, "cpu"), (2, 8, 3, 4), torch.channels_last)
        check(turn, random_tensor((2, 8, 3, 4), torch.float16), torch.channels_last)


@needs_compiler
def test_turn_leaves_what_it_cannot_take_to_torch(folder):
    shape = (2, 6, 4, 3)
    with emulator.install(folder):
        turns = {one: turning.prepare_turn(config_of(torch.float16, "cpu"), shape, one) for one in FORMATS}
    tensor = random_tensor(shape, torch.float16)
    for memory_format in FORMATS:  # none of these launches the kernel
        as_it_is = tensor.contiguous(memory_format=memory_format)
        assert turns[memory_format](as_it_is) is as_it_is
        for arranged in (offset(tensor), offset_channels_last(tensor), transposed(tensor), tensor[:1].expand(shape)):
            check(turns[memory_format], arranged, memory_format)


@needs_compiler
@pytest.mark.parametrize(
    "mistake",
    [
        (r"upper >> 16", "lower >> 16"),  # a column takes the wrong row
        (r"first_row \+ row >= p\.rows", "first_row + row + kStep >= p.rows"),  # the last row is left out
        (r"__syncthreads\(\);", ""),
    ],
)
def test_emulator_notices_a_mistake_in_turn(folder, mistake, poison):
    shape = (2, 6, 8, 9)
    with emulator.install(folder, emulator.Edit("turn.cu", *mistake)):
        turn = turning.prepare_turn(config_of(torch.float16, "cpu"), shape, torch.channels_last)
        poison("cpu")
        with pytest.raises((AssertionError, RuntimeError)):
            check(turn, random_tensor(shape, torch.float16), torch.channels_last)


def test_nothing_is_compiled_where_there_is_nothing_to_turn(monkeypatch):
    monkeypatch.setattr(launch, "load", None)
    for device, memory_format, shape in (
        ("cuda:0", torch.contiguous_format, (2, 3, 4, 5)),
        ("cpu", torch.channels_last, (2, 3, 4, 5)),
        ("cuda:0", torch.channels_last, (0, 3, 4, 5)),
        ("cuda:0", torch.channels_last, (2, 1, 4, 5)),
        ("cuda:0", torch.channels_last, (2, 3, 1, 1)),
    ):
        turn = turning.turn_to(config_of(torch.float32, device, memory_format), shape, torch.channels_last)
        check(turn, torch.ones(shape), torch.channels_last)


@given(st.integers(2, 5000), st.integers(2, 1 << 40), st.booleans(), st.sampled_from([2, 4, 8]))
def test_tiles_fit_shared_memory_and_waste_little(channels, pixels, to_last, itemsize):
    macros = turning.turn_macros(channels, pixels, to_last, itemsize)
    rows, columns, step = macros["TILE_ROWS"], macros["TILE_COLUMNS"], 1 + macros["PAIRS"]
    assert rows % step == columns % step == 0
    assert columns * (rows // step | 1) * itemsize * step <= 48 << 10
    tile_channels, tile_pixels = (rows, columns) if to_last else (columns, rows)
    assert -(-channels // tile_channels) * tile_channels < channels + 2 * -(-channels // 64) + 2
    assert tile_pixels < 2 * pixels
    assert ("INDEX_64" in macros) == (1024 * max(channels, pixels) > 2**31 - 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"), [*itertools.product([*SHAPES, (3, 96, 61, 67), (2, 3, 300, 301)], DTYPES)], ids=str
)
def test_turn_on_the_gpu(shape, dtype, poison):
    tensor = random_tensor(shape, dtype, "cuda")
    config = config_of(dtype, f"cuda:{torch.cuda.current_device()}")
    for memory_format, other in zip(FORMATS, FORMATS[::-1], strict=True):
        turn = turning.turn_to(config, shape, memory_format)
        arranged = tensor.contiguous(memory_format=other)
        poison("cuda")
        check(turn, arranged, memory_format)
