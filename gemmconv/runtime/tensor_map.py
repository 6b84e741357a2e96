"""Encodes tensor maps, by which TMA copies boxes (csrc/include/ptx/tma.cuh)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

from cuda.bindings import driver

_Axes = Sequence[int]
_Opaque = ctypes.c_ulonglong * 16
_TYPES = {2: 1, 4: 2}  # CUtensorMapDataType: UINT16, UINT32
_PROMOTIONS = {128: 2, 256: 3}  # CUtensorMapL2promotion, of lines of the L2 cache
_SWIZZLES = {64: 2, 128: 3}  # CUtensorMapSwizzle, of lines of so many bytes; 0 for none


@lru_cache(maxsize=1024)
def encode(
    address: int, itemsize: int, sizes: _Axes, strides: _Axes, box: _Axes, steps: _Axes, swizzled: bool, fetched: int
) -> ctypes.Array[ctypes.c_ulonglong]:
    """The map of a tensor and of the boxes that are copied from it; ``tensor_map_t`` in C++.

    It depends on the address but not on the contents, so it may be cached. Arguments after the address are described in
    :class:`gemmconv.kernels.program.TensorMapSpec`. The address and the strides are multiples of 16; a box times its
    steps is at most 256 in each dimension; the innermost step is 1; swizzled lines have 64 or 128 bytes.

    Raises:
        RuntimeError: the driver refuses the arguments.
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
    itemsize: int, sizes: _Axes, strides: _Axes, box: _Axes, steps: _Axes, swizzled: bool, fetched: int
) -> tuple[int, ...]:
    """The arguments of :func:`encode` as csrc/executor.c takes them: the driver's numbers, and boxes times steps."""
    boxes = [size * step for size, step in zip(box, steps, strict=True)]
    swizzle = _SWIZZLES[box[0] * itemsize] if swizzled else 0
    return _TYPES[itemsize], *sizes, *strides, *boxes, *steps, swizzle, _PROMOTIONS[fetched]
