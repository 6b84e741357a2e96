"""Images that are folded whole: a tile is for any batch, and for no other size."""

from dataclasses import replace

import pytest
import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.sm90 import gemm_fold
from tests import fitting
from tests.samples import config_of

LAYER = Problem(32, 256, 128, 1, (8, 6), (4, 4), (2, 2), (1, 1))


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float16, "ieee"), (torch.float32, "tf32")], ids=str)
def test_a_tile_is_compiled_once_for_all_batches(dtype, precision):
    config = config_of(LAYER, dtype, precision=precision)
    others = [replace(LAYER, batch=batch) for batch in (1, 2, 3, 7, 16, 33, 100, 1000)]
    tiles = [*fitting.fitted(gemm_fold.KERNEL, config, "forward", others)]
    assert [tile.items for tile in tiles] == sorted(tile.items for tile in tiles)
    other = config_of(replace(LAYER, input_size=(8, 8)), dtype, precision=precision)
    assert gemm_fold.KERNEL.fitted(other, "forward", tiles[0]) is None
