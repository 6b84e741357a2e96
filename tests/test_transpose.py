"""From NCHW to NHWC and back: layout/transpose.cu, emulated and on the GPU."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import emulator
from tests.samples import offset, offset_channels_last, transposed

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.geometry import Problem
from gemmconv.kernels import program
from gemmconv.kernels.base import Config, strides_of
from gemmconv.kernels.layout import transpose
from gemmconv.runtime import launch

FORMATS = (torch.contiguous_format, torch.channels_last)
DTYPES = (torch.float16, torch.float32, torch.float64)
# Even and odd extents, more channels or pixels than a tile has, and channels that two tiles share unevenly.
SHAPES = [(2, 3, 5, 7), (1, 2, 1, 2), (3, 64, 8, 9), (2, 70, 4, 6), (1, 131, 3, 43), (2, 8, 32, 70), (70, 6, 2, 2)]
# Multiples of what is read together: of one unit and of many, of more than a block has on either axis.
SHAPES += [
    (3, 4, 2, 2),
    (2, 72, 6, 10),
    (1, 20, 3, 4),
    (2, 264, 1, 24),
    (1, 8, 96, 32),
    (2, 1040, 2, 4),
    (1, 80, 10, 26),
]


def config_of(dtype, device, memory_format=torch.channels_last):
    return Config(Problem(1, 2, 2, 1, (2, 2), (1, 1)), dtype, torch.device(device), memory_format=memory_format)


def random_tensor(shape, dtype, device="cpu"):
    return torch.arange(math.prod(shape), device=device).view(shape).mul(0.37).sin().to(dtype)


def check(call, tensor, memory_format):
    result = call(tensor)
    assert result.stride() == strides_of(tensor.shape, memory_format)
    assert torch.equal(result, tensor)


@emulator.needs_compiler
@pytest.mark.parametrize(("shape", "dtype"), [*itertools.product(SHAPES, DTYPES)], ids=str)
def test_transpose_kernel_moves_every_element(builder, shape, dtype, poison):
    tensor = random_tensor(shape, dtype)
    with emulator.install(builder):
        calls = {one: transpose.prepare_transpose(config_of(dtype, "cpu"), shape, one) for one in FORMATS}
        for memory_format, other in zip(FORMATS, FORMATS[::-1], strict=True):
            poison("cpu")
            check(calls[memory_format], tensor.contiguous(memory_format=other), memory_format)


@emulator.needs_compiler
def test_transpose_kernel_in_64_bits(builder, monkeypatch):
    monkeypatch.setattr("gemmconv.kernels.macros.INT32_MAX", 0)
    macros = transpose.macros_of(8, 12, True, 2)
    assert macros["INDEX_64"] == 1
    with emulator.install(builder):
        call = transpose.prepare_transpose(config_of(torch.float16, "cpu"), (2, 8, 3, 4), torch.channels_last)
        check(call, random_tensor((2, 8, 3, 4), torch.float16), torch.channels_last)


@emulator.needs_compiler
def test_transpose_leaves_what_it_cannot_take_to_torch(builder, monkeypatch):
    shape = (2, 6, 4, 3)
    with emulator.install(builder):
        calls = {one: transpose.prepare_transpose(config_of(torch.float16, "cpu"), shape, one) for one in FORMATS}
    tensor = random_tensor(shape, torch.float16)
    monkeypatch.setattr(emulator.Kernel, "launch", None)
    for memory_format, arrange in zip(FORMATS, (offset_channels_last, offset), strict=True):
        as_it_is = tensor.contiguous(memory_format=memory_format)
        assert calls[memory_format](as_it_is) is as_it_is
        for arranged in (arrange(tensor), transposed(tensor), tensor[:1].expand(shape)):
            check(calls[memory_format], arranged, memory_format)


@emulator.needs_compiler
def test_transpose_takes_more_images_than_a_grid_axis_holds(builder, monkeypatch):
    monkeypatch.setattr(program, "MAX_GRID_Y", 3)
    tensor = random_tensor((7, 6, 4, 3), torch.float16)
    with emulator.install(builder):
        call = transpose.prepare_transpose(config_of(torch.float16, "cpu"), tensor.shape, FORMATS[1])
        check(call, tensor, FORMATS[1])


@emulator.needs_compiler
@pytest.mark.parametrize(
    ("shape", "mistake"),
    [
        ((2, 6, 8, 9), (r"rows\[r\]\.value\[c\]", "rows[c].value[r]")),  # a column takes the wrong row
        ((2, 6, 8, 9), (r"first_row \+ row >= p\.rows", "first_row + row + ROWS >= p.rows")),  # or none
        ((2, 6, 8, 9), (r"__syncthreads\(\);", "")),
        ((2, 72, 6, 10), (r"rows\[r\]\.value\[c\]", "rows[c].value[r]")),
        ((2, 72, 6, 10), (r"if \(row >= p\.rows", "if (row + ROWS >= p.rows")),
        ((1, 8, 96, 32), (r"kPatches \* kLanes", "kPatches * ROW_LANES")),
    ],
    ids=str,
)
def test_emulator_notices_a_mistake_in_transpose(builder, shape, mistake, poison):
    with emulator.install(builder, emulator.Edit("layout/transpose.cu", *mistake)):
        call = transpose.prepare_transpose(config_of(torch.float16, "cpu"), shape, torch.channels_last)
        poison("cpu")
        with pytest.raises((AssertionError, RuntimeError)):
            check(call, random_tensor(shape, torch.float16), torch.channels_last)


@pytest.mark.parametrize(
    ("device", "memory_format", "shape"),
    [
        ("cuda:0", torch.contiguous_format, (2, 3, 4, 5)),
        ("cpu", torch.channels_last, (2, 3, 4, 5)),
        ("cuda:0", torch.channels_last, (0, 3, 4, 5)),
        ("cuda:0", torch.channels_last, (2, 1, 4, 5)),
        ("cuda:0", torch.channels_last, (2, 3, 1, 1)),
    ],
    ids=str,
)
def test_nothing_is_compiled_where_there_is_nothing_to_transpose(device, memory_format, shape, monkeypatch):
    monkeypatch.setattr(launch, "load", None)
    config = config_of(torch.float32, device, memory_format)
    if memory_format is torch.channels_last:
        made = torch.ones(shape).contiguous(memory_format=torch.channels_last)
        check(transpose.from_channels_last(config, shape), made, memory_format)
    slices = torch.ones(shape[0], 2 * shape[1], *shape[2:])[:, : shape[1]]
    assert transpose.to_format(config, shape, torch.contiguous_format)(slices).is_contiguous()


def test_a_channel_slice_of_one_image_is_contiguous_as_it_is(monkeypatch):
    monkeypatch.setattr(launch, "load", lambda *arguments: None)
    one = torch.ones(1, 8, 4, 5)[:, :4]
    for memory_format in FORMATS:
        config = config_of(torch.float32, "cuda:0", memory_format)
        assert transpose.to_format(config, one.shape, torch.contiguous_format)(one) is one


def test_planes_that_the_kernels_integers_do_not_reach_are_left_to_torch(monkeypatch):
    """23171 x 23171 inputs of stride 2 have outputs of 2^31 pixels and some: 8 GB in 16 bits."""
    monkeypatch.setattr(launch, "load", None)
    config = config_of(torch.float16, "cuda:0")
    for shape in ((1, 2, 46342, 46342), (1, 2, 2**31 - 2048, 1), (1, 2**31 - 2048, 2, 1)):
        assert transpose.to_format(config, shape, torch.contiguous_format) is torch.Tensor.contiguous
        transpose.from_channels_last(config_of(torch.float16, "cuda:0", torch.contiguous_format), shape)
    with pytest.raises(TypeError):  # which would load the kernel
        transpose.to_format(config, (1, 2, 2**31 - 2049, 1), torch.contiguous_format)


@given(st.integers(2, 5000), st.integers(2, (1 << 31) - 1025), st.booleans(), st.sampled_from([2, 4, 8]))
def test_tiles_fit_shared_memory_and_waste_little(channels, pixels, to_last, itemsize):
    macros = transpose._staged(channels, pixels, to_last, itemsize)
    rows, columns, unit = macros["TILE_ROWS"], macros["TILE_COLUMNS"], macros["ROW_UNIT"]
    assert unit == macros["COLUMN_UNIT"]
    assert unit == (2 if itemsize == 2 and channels % 2 == 0 else 1)
    assert rows % unit == columns % unit == 0
    assert columns * (rows + unit) * itemsize <= 48 << 10
    tile_channels, tile_pixels = (rows, columns) if to_last else (columns, rows)
    assert -(-channels // tile_channels) * tile_channels < channels + 2 * -(-channels // 64) + 2
    assert tile_pixels < 2 * pixels
    assert ("INDEX_64" in transpose.macros_of(channels, pixels, to_last, itemsize)) == (channels * pixels > 2**31 - 1)


@given(st.integers(1, 500), st.integers(1, 500), st.booleans(), st.sampled_from([2, 4, 8]))
def test_blocks_of_units_have_whole_warps_and_waste_little(rows, columns, to_last, itemsize):
    macros = transpose._vectors(rows, columns, to_last, itemsize)
    if macros is None:
        unit = 8 if itemsize == 2 else 16
        assert rows * itemsize % 32 or columns * itemsize % unit
        return
    extents = {"ROW": rows, "COLUMN": columns}
    for axis, extent in extents.items():
        assert extent % macros[f"{axis}_UNIT"] == 0
        assert macros[f"{axis}_UNIT"] * itemsize in ((8, 16) if itemsize == 2 else (16,))
    tile_rows, tile_columns = macros["TILE_ROWS"], macros["TILE_COLUMNS"]
    assert 32 % macros["ROW_LANES"] == tile_rows % (macros["ROW_LANES"] * macros["ROW_UNIT"]) == 0
    assert tile_columns % (32 // macros["ROW_LANES"] * macros["COLUMN_UNIT"]) == 0
    assert max(tile_rows, tile_columns) <= transpose._REACH
    assert tile_rows * tile_columns == 256 * macros["ROW_UNIT"] * macros["COLUMN_UNIT"]
    assert tile_rows < 2 * rows or tile_columns < 2 * columns
    assert rows * itemsize % 32 == 0 or tile_rows >= rows


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"), [*itertools.product([*SHAPES, (3, 96, 61, 67), (2, 3, 300, 301)], DTYPES)], ids=str
)
def test_transpose_on_the_gpu(shape, dtype, poison):
    tensor = random_tensor(shape, dtype, "cuda")
    config = config_of(dtype, f"cuda:{torch.cuda.current_device()}")
    for memory_format, other in zip(FORMATS, FORMATS[::-1], strict=True):
        call = transpose.prepare_transpose(config, shape, memory_format)
        arranged = tensor.contiguous(memory_format=other)
        poison("cuda")
        check(call, arranged, memory_format)


def test_seconds_of_transposes_add_up():
    problem = Problem(1, 8, 8, 1, (4, 4), (3, 3))
    nchw, last = (replace(config_of(torch.float16, "cuda:0", one), problem=problem) for one in FORMATS)
    assert 0 < transpose.grad_output_transpose_seconds(last) < transpose.transpose_seconds(last)
    with_weight, without = (transpose.via_channels_last_seconds(nchw, transposes) for transposes in (True, False))
    assert with_weight > without > transpose.transpose_seconds(nchw, torch.channels_last)
