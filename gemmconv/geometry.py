"""The geometry of one transposed convolution: sizes, GEMM extents, work and traffic.

Everything here is pure integer arithmetic. One axis at a time, the operator is the relation

    oh = ih * S - P + kh * D        H_out = (H_in - 1) * S - 2 * P + D * (K - 1) + output_padding + 1

between input row ``ih``, kernel tap ``kh`` and output row ``oh`` (stride S, padding P, dilation D, kernel size K).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gemmconv.hashing import cached_property, hashed_once

Pair = tuple[int, int]
Shape4 = tuple[int, int, int, int]
Geometry = tuple[Pair, Pair, Pair, int, Pair]  # stride, padding, output_padding, groups, dilation: as torch orders them


def output_extent(size: int, kernel: int, stride: int, padding: int, output_padding: int, dilation: int) -> int:
    """Output length of one axis.

    >>> output_extent(4, kernel=3, stride=2, padding=1, output_padding=1, dilation=1)
    8
    """
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1


@hashed_once
@dataclass(frozen=True)
class Problem:
    """One transposed convolution, without its data: the key of every cache.

    Sizes are in elements, and have one number for each axis: ``(height, width)``, ``(length,)`` or ``(depth, height,
    width)``. Most kernels compute problems of two axes; gemmconv.rank makes these of others. ``gemmconv.validation``
    checks values.

    >>> Problem(1, 64, 32, 1, (8, 8), (4, 4), stride=(2, 2), padding=(1, 1)).output_shape
    (1, 32, 16, 16)
    """

    batch: int
    in_channels: int
    out_channels: int
    groups: int
    input_size: Pair
    kernel_size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    output_padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    @cached_property
    def output_size(self) -> Pair:
        """``(H_out, W_out)``."""
        of_axes = self.input_size, self.kernel_size, self.stride, self.padding, self.output_padding, self.dilation
        return tuple(map(output_extent, *of_axes))  # type: ignore[return-value]

    @property
    def input_shape(self) -> Shape4:
        """``[N, C_in, H_in, W_in]``."""
        return (self.batch, self.in_channels, *self.input_size)

    @property
    def weight_shape(self) -> Shape4:
        """``[C_in, C_out/groups, K_h, K_w]``."""
        return (self.in_channels, self.group_out_channels, *self.kernel_size)

    @property
    def output_shape(self) -> Shape4:
        """``[N, C_out, H_out, W_out]``."""
        return (self.batch, self.out_channels, *self.output_size)

    @property
    def group_out_channels(self) -> int:
        """Output channels of a group; its input channels are :attr:`gemm_k`."""
        return self.out_channels // self.groups

    @property
    def geometry(self) -> Geometry:
        """The arguments of torch's operator after its tensors."""
        return self.stride, self.padding, self.output_padding, self.groups, self.dilation

    @property
    def taps(self) -> int:
        """Number of kernel taps, ``K_h * K_w``."""
        return math.prod(self.kernel_size)

    @property
    def in_pixels(self) -> int:
        """``H_in * W_in``."""
        return math.prod(self.input_size)

    @property
    def out_pixels(self) -> int:
        """``H_out * W_out``."""
        return math.prod(self.output_size)

    def is_apart_along(self, axis: int) -> bool:
        """Whether no two taps of an axis meet at an output, and all outputs come from a tap: the kernel is the stride.

        >>> Problem(1, 1, 1, 1, (4, 4), (2, 3), stride=(2, 2)).is_apart_along(0)
        True
        """
        kernel_size, is_unpadded = self.kernel_size[axis], self.padding[axis] == self.output_padding[axis] == 0
        return is_unpadded and kernel_size == self.stride[axis] and 1 in (kernel_size, self.dilation[axis])

    @property
    def is_apart(self) -> bool:
        """Whether the kernel is the stride along all axes: the columns are the output in another order."""
        return all(map(self.is_apart_along, range(len(self.stride))))

    # The product that makes the columns, per image and group:
    # columns[M, N] = weight[K, M]^T . input[K, N], with the extents below.

    @property
    def gemm_m(self) -> int:
        """Rows of the columns: ``C_out/groups * K_h * K_w``."""
        return self.group_out_channels * self.taps

    @property
    def gemm_n(self) -> int:
        """Columns of the columns: ``H_in * W_in``."""
        return self.in_pixels

    @property
    def gemm_k(self) -> int:
        """The reduced extent: ``C_in/groups``."""
        return self.in_channels // self.groups

    @property
    def gemm_batch(self) -> int:
        """Number of products: ``N * groups``."""
        return self.batch * self.groups

    @property
    def column_elements(self) -> int:
        """Elements of the whole column matrix, ``N * C_out * K_h * K_w * H_in * W_in``."""
        return self.gemm_batch * self.gemm_m * self.gemm_n

    def column_bytes(self, itemsize: int) -> int:
        """Bytes of the whole column matrix at ``itemsize`` bytes per element."""
        return self.column_elements * itemsize

    @property
    def useful_flops(self) -> int:
        """Floating-point operations, a multiplication and an addition for each tap, channel pair and input pixel."""
        return 2 * self.column_elements * self.gemm_k

    @cached_property
    def image_elements(self) -> int:
        """Elements of an image: of the input or of the output, whichever has more."""
        return max(self.in_channels * self.in_pixels, self.out_channels * self.out_pixels)

    def image_bytes(self, itemsize: int) -> int:
        """Bytes of input and output."""
        return itemsize * self.batch * (self.in_channels * self.in_pixels + self.out_channels * self.out_pixels)

    def least_bytes(self, itemsize: int, bias: bool = False) -> int:
        """Bytes that any algorithm moves: input and weight (and bias) read once, output written once."""
        weight = self.in_channels * self.gemm_m
        return self.image_bytes(itemsize) + itemsize * (weight + (self.out_channels if bias else 0))
