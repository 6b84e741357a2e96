"""Input made of a photograph: windows of the portrait of Grace Hopper that matplotlib carries."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Steps of a two-dimensional sequence that spreads its points evenly (1/p and 1/p^2 with p^3 = p + 1).
_STEP_ROW, _STEP_COLUMN = 0.7548776662466927, 0.5698402909980532
_MARGIN = 64  # room for windows to differ in, where an image is as large as the photograph


@cache
def _planes() -> NDArray[np.uint8]:
    """The colour planes of the photograph: [3, 600, 512]."""
    from matplotlib import get_data_path, image

    path = Path(get_data_path()) / "sample_data" / "grace_hopper.jpg"
    return np.ascontiguousarray(image.imread(path).transpose(2, 0, 1))


def windows(shape: tuple[int, int, int, int]) -> torch.Tensor:
    """Cut an input ``(N, C, H, W)`` out of the photograph: contiguous float32 on the CPU, of mean 0 and variance 1.

    Every channel of every image is a window of its own: colour plane, flip and offset change from one to the
    next, always in the same way. Images larger than the photograph (600x512) continue it by reflection.

    >>> windows((2, 3, 64, 64)).shape
    torch.Size([2, 3, 64, 64])
    """
    batch, channels, height, width = shape
    planes = _planes()
    grow = [max(0, size + _MARGIN - have) for size, have in zip((height, width), planes.shape[1:], strict=True)]
    if any(grow):
        planes = np.pad(planes, ((0, 0), (0, grow[0]), (0, grow[1])), mode="symmetric")
    rows, columns = planes.shape[1] - height + 1, planes.shape[2] - width + 1
    cut: NDArray[Any] = np.empty((batch * channels, height, width), dtype=np.float32)
    for index in range(batch * channels):
        top = int(index * _STEP_ROW % 1 * rows)
        left = int(index * _STEP_COLUMN % 1 * columns)
        window = planes[index % 3, top : top + height, left : left + width]
        flip = index // 3 % 4
        cut[index] = window[:: -1 if flip & 1 else 1, :: -1 if flip & 2 else 1]
    x = torch.from_numpy(cut).reshape(shape)
    deviation, mean = torch.std_mean(x, correction=0)
    return x.sub_(mean).div_(deviation.clamp_min(1e-6))
