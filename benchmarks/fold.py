"""Bandwidth of the col2im and im2col kernels on columns larger than any cache, beside a copy and torch's fold.

    python -m benchmarks.fold

A row counts the columns once and the images once, as the least that a fold can move. Needs a CUDA device.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import gemmconv
from benchmarks.floor import measure_ceilings
from benchmarks.reference import relative_error
from benchmarks.summary import text_table
from benchmarks.timing import medians_ms

GEOMETRIES: dict[str, tuple[Any, ...]] = {
    # name: images [N, C, H, W], kernel, dilation, padding, stride
    "3x5 stride 1": ((16, 64, 130, 260), (3, 5), 1, 0, 1),
    "4x4 stride 2": ((64, 64, 128, 128), 4, 1, 1, 2),
    "2x2 stride 2": ((64, 64, 256, 256), 2, 1, 0, 2),
    "3x3 stride 1": ((16, 64, 256, 256), 3, 1, 1, 1),
    "3x3 stride 5, dilation 2": ((16, 64, 318, 638), 3, 2, 1, 5),
}
BARS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}


def main() -> int:
    """Print the table. Returns the exit status: 1 without a CUDA device or where a result is wrong."""
    if not torch.cuda.is_available():
        print("benchmarks.fold needs a CUDA device; torch finds none here", file=sys.stderr)
        return 1
    device, wrong = torch.device("cuda", torch.cuda.current_device()), 0
    copy = measure_ceilings(device, ()).copy_tbps
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; copy {copy:.2f} TB/s")
    cells = []
    for name, (shape, *window) in GEOMETRIES.items():
        for dtype, bar in BARS.items():
            images = torch.randn(shape, device=device).to(dtype)
            columns = gemmconv.im2col(images, *window)
            exact = gemmconv.im2col(images[:1], *window).equal(F.unfold(images[:1], *window))
            size = shape[2:]
            reference = F.fold(columns[:1].double(), size, *window)
            error = relative_error(gemmconv.col2im(columns, size, *window)[:1], reference)
            moved = (columns.nbytes + images.nbytes) / 1e9
            if error > bar or not exact:
                wrong += 1
                print(f"{name}, {str(dtype)[6:]} is wrong: error {error:.1e}, im2col exact: {exact}")
                continue
            runs = partial(gemmconv.col2im, columns, size, *window), partial(gemmconv.im2col, images, *window)
            *ours, torch_ms = medians_ms([*runs, partial(F.fold, columns, size, *window)], device)
            rates = [f"{ms:.3f} ms {moved / ms / copy:4.0%}" for ms in ours]
            cells.append([name, str(dtype)[6:], f"{1e3 * moved:.0f}", *rates, f"{torch_ms:.2f} ms", f"{error:.1e}"])
    print(text_table(("geometry", "dtype", "MB", "col2im", "im2col", "torch fold", "error"), cells, left=2))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
