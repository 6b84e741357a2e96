"""Gradients of biases: host side of csrc/splits/bias_grad.cu."""

from __future__ import annotations

import math

from gemmconv.kernels.base import Config, accumulator_dtype
from gemmconv.kernels.integers import INT32_MAX, power_of_two
from gemmconv.kernels.macros import ELEMENT_TYPES, Macros
from gemmconv.kernels.program import Launch, Operand, Output, Params, Program, reciprocal
from gemmconv.kernels.splits.reduce import sums

_THREADS = 256
_ITEMS = 8  # least items of a thread if there are several slices
_BLOCKS = 4  # most blocks of a multiprocessor if there are several slices
_VECTOR_BYTES = 16


def slices_of(items: int, least: int, most: int) -> int:
    """The number of slices in which items are added up: at most ``most``, with at least ``least`` items in each."""
    return max(1, min(-(-items // least), most))


def program(config: Config) -> Program | None:
    """``grad_bias`` from ``grad_output`` in the configuration's format; None if items exceed the kernel's integers."""
    p, channels_last = config.problem, config.channels_last
    if config.dtype not in ELEMENT_TYPES:
        return None
    # Elements that are loaded at once: of a row of pixels in NCHW, of channels in channels_last.
    vector = math.gcd(p.out_channels if channels_last else p.out_pixels, _VECTOR_BYTES // config.dtype.itemsize)
    lanes = min(32, power_of_two(p.out_channels // vector)) if channels_last else 1
    units = p.out_pixels // vector
    items = p.batch * (p.out_pixels if channels_last else units)
    if items == 0 or items + INT32_MAX // 1024 > INT32_MAX:
        return None
    blocks = -(-p.out_channels // (lanes * vector)) if channels_last else p.out_channels
    slices = slices_of(items, _ITEMS * _THREADS // lanes, _BLOCKS * config.spec.multiprocessors // blocks)
    macros: Macros = {
        "ELEMENT_T": ELEMENT_TYPES[config.dtype],
        "SUM_T": ELEMENT_TYPES[config.dtype],
        "CHANNELS_LAST": int(channels_last),
        "VECTOR": vector,
        "LANES": lanes,
    }
    params: Params = {
        "grad_output, sums, grad_bias": ("grad_output", *(("sums", None) if slices > 1 else (None, "grad_bias"))),
        "by_units": reciprocal(max(1, units)),
        "channels, units, items, share": (p.out_channels, units, items, -(-items // slices)),
    }
    main = Launch("splits/bias_grad.cu", macros, (blocks, slices, 1), (_THREADS, 1, 1), params)
    operand = Operand("grad_output", config.memory_format, vector * config.dtype.itemsize)
    output = Output("grad_bias", (p.out_channels,), (1,))
    if slices == 1:
        return Program(config.dtype, (operand,), (output,), (main,))
    add_up = sums(config.dtype, p.out_channels, slices, "sums", "grad_bias")
    scratch = {"sums": slices * p.out_channels * accumulator_dtype(config.dtype).itemsize}
    return Program(config.dtype, (operand,), (output,), (main, add_up), scratch)
