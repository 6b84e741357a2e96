"""Small images and signals: a tile of one size of a layer computes others, and nothing new is compiled."""

import pytest
import torch

from gemmconv.geometry import Problem
from gemmconv.kernels.sm90 import gemm_fold_pixels
from tests import fitting
from tests.samples import config_of

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

NUMERICS = [(torch.float16, "ieee"), (torch.float32, "tf32")]
KERNEL = gemm_fold_pixels.KERNEL


def images(batch, size):
    return Problem(batch, 256, 128, 1, size, (4, 4), (2, 2), (1, 1))


def signals(batch, width):
    return Problem(batch, 256, 128, 1, (1, width), (1, 10), (1, 5))


@pytest.mark.parametrize(("dtype", "precision"), NUMERICS, ids=str)
@pytest.mark.parametrize(
    ("problem", "others"),
    [
        (
            images(128, (8, 8)),
            [
                images(batch, (h, w))
                for batch, h, w in (
                    (3, 8, 8),
                    (64, 4, 4),
                    (17, 4, 8),
                    (9, 8, 6),
                    (33, 6, 12),
                    (1, 2, 4),
                    (128, 10, 12),
                    (5, 7, 8),
                )
            ],
        ),
        (signals(16, 600), [signals(batch, 304 + 80 * batch) for batch in range(1, 10)]),
    ],
    ids=("images", "signals"),
)
def test_a_tile_is_compiled_once_for_all_sizes_of_a_class(problem, others, dtype, precision):
    config = config_of(problem, dtype, precision=precision)
    for tile in fitting.fitted(KERNEL, config, "forward", others):
        assert tile.possible
        assert tile.item_positions <= 128 * tile.row_blocks
        assert (tile.windows[0] > 1) == (problem.input_size[0] == 1)


def test_other_pieces_and_items_are_other_kernels():
    tile = KERNEL.tile(config_of(images(128, (8, 8))), "forward")
    assert KERNEL.fitted(config_of(images(128, (6, 6))), "forward", tile) is None  # 36 inputs: no eight of them
    assert KERNEL.fitted(config_of(images(128, (16, 16))), "forward", tile) is None  # two blocks of positions
    assert KERNEL.fitted(config_of(images(128, (20, 20))), "forward", tile) is None  # nobody computes these
    signal = KERNEL.tile(config_of(signals(16, 600)), "forward")
    assert KERNEL.fitted(config_of(signals(16, 64)), "forward", signal) is None  # no windows
