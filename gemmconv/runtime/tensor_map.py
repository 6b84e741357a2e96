"""Tensor maps: what csrc/include/ptx/tma.cuh copies boxes by."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

from cuda.bindings import driver

_Opaque = ctypes.c_ulonglong * 16
_TYPES = {2: 1, 4: 2}  # CUtensorMapDataType: UINT16, UINT32
_PROMOTIONS = {128: 2, 256: 3}  # CUtensorMapL2promotion, of lines of the L2 cache
_SWIZZLES = {64: 2, 128: 3}  # CUtensorMapSwizzle, of lines of so many bytes; 0 for none


@lru_cache(maxsize=1024)
def encode(
    address: int,
    itemsize: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    steps: Sequence[int],
    swizzled: bool,
    fetched: int = 256,
) -> ctypes.Array[ctypes.c_ulonglong]:
    """The map of a tensor and the boxes that are copied of it; tensor_map_t in C++.

    It says where memory lies, nothing of what is there, so it may be kept.

    Args:
        address: of the first element, a multiple of 16.
        itemsize: bytes of an element, 2 or 4.
        sizes: elements of each dimension, the innermost first.
        strides: bytes from one element to the next, of all dimensions but the innermost; multiples of 16.
        box: elements of a box, of each dimension; times its step, at most 256.
        steps: from one element of a box to the next, in elements, of each dimension; 1 of the innermost.
        swizzled: whether boxes, whose lines then have 64 or 128 bytes, lie as csrc/include/ptx/wgmma.cuh says.
        fetched: bytes that the L2 cache fetches from memory together, 128 or 256.

    Raises:
        RuntimeError: CUDA refuses them.
    """
    kind, *_, swizzle, promotion = described(itemsize, sizes, strides, box, steps, swizzled, fetched)
    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType(kind),
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size * step) for size, step in zip(box, steps, strict=True)],
        [driver.cuuint32_t(step) for step in steps],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle(swizzle),
        driver.CUtensorMapL2promotion(promotion),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        what = f"a tensor map of {sizes}, strides {strides}, boxes {box}, steps {steps}"
        raise RuntimeError(f"{what} refused with {status.name}")
    return _Opaque(*map(int, encoded.opaque))


def described(
    itemsize: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    steps: Sequence[int],
    swizzled: bool,
    fetched: int = 256,
) -> tuple[int, ...]:
    """The same as csrc/executor.c takes it: the driver's numbers for type, swizzle and promotion, boxes with steps."""
    boxes = [size * step for size, step in zip(box, steps, strict=True)]
    swizzle = _SWIZZLES[box[0] * itemsize] if swizzled else 0
    return _TYPES[itemsize], *sizes, *strides, *boxes, *steps, swizzle, _PROMOTIONS[fetched]
