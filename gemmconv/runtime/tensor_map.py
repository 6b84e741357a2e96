"""Tensor maps: what csrc/include/ptx/tma.cuh copies boxes by."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

from cuda.bindings import driver

_Opaque = ctypes.c_ulonglong * 16
_TYPES = {
    2: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
    4: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT32,
}
_PROMOTIONS = {  # of lines of the L2 cache
    128: driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    256: driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
}
_SWIZZLES = {  # of lines of so many bytes
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}


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
    status, encoded = driver.cuTensorMapEncodeTiled(
        _TYPES[itemsize],
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size * step) for size, step in zip(box, steps, strict=True)],
        [driver.cuuint32_t(step) for step in steps],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        _SWIZZLES[box[0] * itemsize] if swizzled else driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        _PROMOTIONS[fetched],
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        what = f"a tensor map of {sizes}, strides {strides}, boxes {box}, steps {steps}"
        raise RuntimeError(f"{what} refused with {status.name}")
    return _Opaque(*map(int, encoded.opaque))
