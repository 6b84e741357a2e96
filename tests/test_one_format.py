"""Which layers, types and formats the kernels of one format take, and which they leave to others."""

from itertools import product

import pytest
import torch

from gemmconv.kernels.sm90 import gemm_depth_to_space, gemm_fold_narrow, gemm_fold_pixels, implicit_gemm_nhwc
from tests import (
    test_gemm_depth_to_space,
    test_gemm_fold_narrow,
    test_gemm_fold_pixels,
    test_implicit_gemm_nhwc,
)
from tests.samples import config_of, tile_for

FORMATS = (torch.contiguous_format, torch.channels_last)
# A layer that they take, and those that they do not.
LAYERS = {
    gemm_depth_to_space: (test_gemm_depth_to_space.MASK_HEAD, test_gemm_depth_to_space.DECLINED),
    gemm_fold_pixels: (test_gemm_fold_pixels.THIRD_OF_DCGAN, test_gemm_fold_pixels.DECLINED),
    implicit_gemm_nhwc: (test_implicit_gemm_nhwc.SECOND_OF_DCGAN, test_implicit_gemm_nhwc.DECLINED),
}
NARROW = gemm_fold_narrow, (test_gemm_fold_narrow.LAST_OF_DCGAN, test_gemm_fold_narrow.DECLINED)  # of either format


def name_of(kernel):
    return kernel.__name__.rpartition(".")[2]


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [(kernel, problem) for kernel, (_, problems) in (*LAYERS.items(), NARROW) for problem in problems],
    ids=lambda value: name_of(value) if hasattr(value, "KERNEL") else None,
)
def test_others_are_declined(kernel, problem):
    assert tile_for(kernel, config_of(problem, layout=kernel.KERNEL.only_in or FORMATS[0])) is None


@pytest.mark.parametrize("kernel", LAYERS, ids=name_of)
def test_types_and_formats_that_are_taken(kernel):
    types = (torch.float16, "ieee"), (torch.bfloat16, "ieee"), (torch.float32, "tf32"), (torch.float32, "ieee")
    for (dtype, precision), layout in product((*types, (torch.float64, "ieee")), FORMATS):
        config = config_of(LAYERS[kernel][0], dtype, layout, precision)
        takes = layout is kernel.KERNEL.only_in and (dtype, precision) in types[:3]
        assert (tile_for(kernel, config) is not None) == takes
