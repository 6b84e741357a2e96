"""Turning tensors from NCHW to channels_last and back, for algorithms that compute in one of them alone: host side of
csrc/turn.cu, several times as fast as torch's own copy."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gemmconv.algorithms.base import Algorithm, BothGradients, Config, strides_of, with_strides
from gemmconv.algorithms.integers import even_share, power_of_two
from gemmconv.algorithms.launches import params_struct, plane_grid
from gemmconv.algorithms.macros import Macros
from gemmconv.geometry import Shape4

_INT32_MAX = 2**31 - 1
_THREADS = 256
_TILE = 4096  # elements of a tile
_MOST_CHANNELS = 64  # of a tile
_SHORTEST, _LONGEST = 32, 1024  # pixels of a tile
_LAUNCH_SECONDS = 3e-6
_BYTE_SECONDS = 1 / 1.6e12  # of what is turned, which is read and written

Turn = Callable[[torch.Tensor], torch.Tensor]
# grad_output, input, weight, grad_input -> grad_weight; the last two for the input gradient, or None
GradientsInNchw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]

TurnParams = params_struct("turn_params", ("source", "target"), ("matrices", "rows", "columns", "tiles_columns"))


def turning_seconds(config: Config, computed_in: torch.memory_format = torch.contiguous_format) -> float:
    """What turning input and output takes, for an algorithm that computes in one format alone.

    >>> from gemmconv.geometry import Problem
    >>> config = Config(Problem(1, 8, 8, 1, (4, 4), (3, 3)), torch.float16, torch.device("cuda", 0))
    >>> turning_seconds(config)
    0.0
    >>> turning_seconds(config, torch.channels_last) > 0
    True
    """
    shapes = config.problem.input_shape, config.problem.output_shape
    return sum(_seconds(config, shape, computed_in) for shape in shapes)


def grad_turning_seconds(config: Config) -> float:
    """What turning grad_output alone takes.

    >>> from gemmconv.geometry import Problem
    >>> problem = Problem(1, 8, 8, 1, (4, 4), (3, 3))
    >>> both = Config(problem, torch.half, torch.device("cuda", 0), memory_format=torch.channels_last)
    >>> 0 < grad_turning_seconds(both) < turning_seconds(both)
    True
    """
    return _seconds(config, config.problem.output_shape)


def grads_turning_seconds(config: Config, weight_config: Config) -> float:
    """What turning takes where one call computes both gradients in NCHW: grad_output, the input, and its gradient."""
    shape = config.problem.input_shape
    both = weight_config if config.memory_format is torch.channels_last else config
    return grad_turning_seconds(both) + _seconds(weight_config, shape) + _seconds(config, shape)


def turned_seconds(config: Config, turns_weight: bool) -> float:
    """What turning takes where both gradients of tensors in NCHW are computed in channels_last; see prepare_turned.

    >>> from gemmconv.geometry import Problem
    >>> config = Config(Problem(1, 8, 8, 1, (4, 4), (3, 3)), torch.float16, torch.device("cuda", 0))
    >>> turned_seconds(config, True) > turned_seconds(config, False) > turning_seconds(config, torch.channels_last)
    True
    """
    p = config.problem
    shapes = (p.output_shape, p.input_shape, p.input_shape, *([p.weight_shape] if turns_weight else []))
    return sum(_seconds(config, shape, torch.channels_last) for shape in shapes)


def one_by_one_seconds(algorithm: Algorithm, config: Config, weight_config: Config) -> float:
    """What an algorithm that turns grad_output takes for one gradient after the other, once turned in one format."""
    seconds = algorithm.estimate(config, "input_grad") + algorithm.estimate(weight_config, "weight_grad")
    return seconds - (grad_turning_seconds(config) if config.memory_format is weight_config.memory_format else 0)


def _seconds(config: Config, shape: Shape4, computed_in: torch.memory_format = torch.contiguous_format) -> float:
    if config.memory_format is computed_in:
        return 0.0
    return _LAUNCH_SECONDS + math.prod(shape) * config.dtype.itemsize * _BYTE_SECONDS


def to_nchw(config: Config, shape: Shape4) -> Turn:
    """Prepare what gives a tensor of this shape, an argument of any strides, contiguous in NCHW.

    One that is so comes back as it is. One in channels_last is turned by csrc/turn.cu, where ``config`` is in
    channels_last on a GPU; of any other torch makes a copy.
    """
    if _takes_the_kernel(config, shape):
        return prepare_turn(config, shape, torch.contiguous_format)
    return torch.Tensor.contiguous


def to_channels_last(config: Config, shape: Shape4) -> Turn:
    """As :func:`to_nchw`, the other way round: what is contiguous in channels_last comes back as it is."""
    if _takes_the_kernel(config, shape, torch.contiguous_format):
        return prepare_turn(config, shape, torch.channels_last)
    return lambda tensor: tensor.contiguous(memory_format=torch.channels_last)


def from_nchw(config: Config, shape: Shape4) -> Turn:
    """Prepare what gives a result of this shape, made in NCHW, the strides of the configuration's memory format."""
    return _turn_back(config, shape, torch.channels_last)


def from_channels_last(config: Config, shape: Shape4) -> Turn:
    """As :func:`from_nchw`, of a result that was made in channels_last."""
    return _turn_back(config, shape, torch.contiguous_format)


def _turn_back(config: Config, shape: Shape4, wanted: torch.memory_format) -> Turn:
    if _takes_the_kernel(config, shape, wanted):
        return prepare_turn(config, shape, wanted)
    strides = strides_of(shape, config.memory_format)
    return lambda tensor: with_strides(tensor, strides)


def prepare_both(config: Config, compute: GradientsInNchw) -> BothGradients:
    """Prepare both gradients with what computes the weight's and writes the input's, contiguous in NCHW."""
    shape = config.problem.input_shape
    turned_back = from_nchw(config, shape)

    def call(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grad_input = input.new_empty(shape)
        grad_weight = compute(grad_output, input, weight, grad_input)
        return turned_back(grad_input), grad_weight

    return call


def prepare_turned(config: Config, compute: BothGradients, turns_weight: bool) -> BothGradients:
    """Prepare both gradients of tensors in NCHW with what computes them in channels_last.

    Args:
        config: in NCHW.
        compute: from grad_output and input in channels_last.
        turns_weight: whether it is to get the weight in channels_last too.
    """
    p = config.problem
    turned, turned_input = to_channels_last(config, p.output_shape), to_channels_last(config, p.input_shape)
    turned_weight = to_channels_last(config, p.weight_shape) if turns_weight else None
    turned_back = from_channels_last(config, p.input_shape)

    def call(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if turned_weight is not None:
            weight = turned_weight(weight)
        grad_input, grad_weight = compute(turned(grad_output), turned_input(input), weight)
        return turned_back(grad_input), grad_weight

    return call


def _takes_the_kernel(config: Config, shape: Shape4, given: torch.memory_format = torch.channels_last) -> bool:
    """Whether there is anything in that format to turn, on a GPU, of extents that the kernel's integers reach."""
    images, channels, pixels = shape[0], shape[1], math.prod(shape[2:])
    if config.device.type != "cuda" or config.memory_format is not given:
        return False
    return images > 0 and min(channels, pixels) > 1 and max(channels, pixels) + _LONGEST <= _INT32_MAX


def prepare_turn(config: Config, shape: Shape4, memory_format: torch.memory_format) -> Turn:
    """As :func:`to_nchw` and :func:`from_nchw`, always with the kernel."""
    from gemmconv.runtime.launch import load

    strides = strides_of(shape, memory_format)
    images, channels, pixels = shape[0], shape[1], math.prod(shape[2:])
    to_last = memory_format is torch.channels_last
    other = torch.contiguous_format if to_last else torch.channels_last
    rows, columns = (channels, pixels) if to_last else (pixels, channels)
    macros = turn_macros(channels, pixels, to_last, config.dtype.itemsize)
    kernel = load("turn.cu", "turn_kernel", macros, config.device.index)
    tiles_rows, tiles_columns = -(-rows // int(macros["TILE_ROWS"])), -(-columns // int(macros["TILE_COLUMNS"]))
    grid, block = plane_grid(tiles_rows * tiles_columns, images), (_THREADS, 1, 1)
    alignment = 4 if macros["PAIRS"] else config.dtype.itemsize

    def turn(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous(memory_format=memory_format):
            return tensor
        if not tensor.is_contiguous(memory_format=other) or tensor.data_ptr() % alignment:
            return with_strides(tensor, strides)
        turned = tensor.new_empty_strided(shape, strides)
        kernel.launch(
            grid, block, TurnParams(tensor.data_ptr(), turned.data_ptr(), images, rows, columns, tiles_columns)
        )
        return turned

    return turn


def turn_macros(channels: int, pixels: int, to_last: bool, itemsize: int) -> Macros:
    """Macros that specialise csrc/turn.cu. A tile has all channels or an even share of them.

    >>> turn_macros(96, 4096, True, 2)
    {'ELEMENT_BYTES': 2, 'PAIRS': 1, 'TILE_ROWS': 48, 'TILE_COLUMNS': 64}
    """
    pairs = itemsize == 2 and channels % 2 == pixels % 2 == 0
    tile_channels = even_share(channels, _MOST_CHANNELS)
    tile_channels += tile_channels % 2 if pairs else 0
    tile_pixels = min(max(_SHORTEST, power_of_two(_TILE // tile_channels + 1) // 2), _LONGEST, power_of_two(pixels))
    macros: Macros = {
        "ELEMENT_BYTES": itemsize,
        "PAIRS": int(pairs),
        "TILE_ROWS": tile_channels if to_last else tile_pixels,
        "TILE_COLUMNS": tile_pixels if to_last else tile_channels,
    }
    if _LONGEST * max(channels, pixels) > _INT32_MAX:
        macros["INDEX_64"] = 1
    return macros
