"""The problems that every algorithm has to solve; small, so that the NumPy reference takes milliseconds."""

from dataclasses import dataclass
from typing import Any

from tests import reference

Pair = tuple[int, int]


def label(value: Pair) -> str:
    """Write a pair as '3' when both axes agree and as '3x5' when they do not."""
    return str(value[0]) if value[0] == value[1] else f"{value[0]}x{value[1]}"


@dataclass(frozen=True)
class Case:
    """One transposed convolution; pairs are (height, width). The fields are those of gemmconv.Problem."""

    batch: int
    in_channels: int
    out_channels: int
    input_size: Pair
    kernel_size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    output_padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    @property
    def id(self) -> str:
        return (
            f"n{self.batch}_c{self.in_channels}x{self.out_channels}_k{label(self.kernel_size)}"
            f"_s{label(self.stride)}_p{label(self.padding)}_d{label(self.dilation)}_g{self.groups}"
            f"_op{label(self.output_padding)}_hw{self.input_size[0]}x{self.input_size[1]}"
        )

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.in_channels, *self.input_size)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return (self.in_channels, self.out_channels // self.groups, *self.kernel_size)

    @property
    def output_size(self) -> Pair:
        return reference.output_size(
            self.input_size, self.kernel_size, self.stride, self.padding, self.output_padding, self.dilation
        )

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.out_channels, *self.output_size)

    @property
    def parameters(self) -> dict[str, Any]:
        """The keyword arguments shared by conv_transpose2d and reference.forward."""
        return {
            "stride": self.stride,
            "padding": self.padding,
            "output_padding": self.output_padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }

    @property
    def grad_parameters(self) -> dict[str, Any]:
        """The keyword arguments of reference.input_grad and reference.weight_grad."""
        return {name: value for name, value in self.parameters.items() if name != "output_padding"}


CASES = [
    # Plain layers, odd primes.
    Case(2, 3, 5, (7, 9), (3, 5)),
    Case(2, 3, 5, (7, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(3, 7, 11, (5, 13), (5, 3), (3, 3), (2, 2)),
    # Everything differs between the axes.
    Case(2, 6, 10, (5, 8), (3, 4), (2, 3), (1, 2), (1, 2), (3, 2), groups=2),
    Case(1, 5, 3, (11, 4), (4, 1), (1, 5), (3, 0), (0, 4), (2, 1)),
    # Kernel smaller than the stride: phases without a tap.
    Case(2, 3, 4, (4, 5), (2, 2), (3, 3)),
    Case(1, 4, 3, (5, 6), (3, 3), (5, 5), (1, 1), (4, 4), (2, 2)),
    # Dilation; stride and dilation with a common factor leave whole rows to the bias.
    Case(2, 3, 5, (8, 7), (3, 3), (1, 1), (2, 2), (0, 0), (2, 2)),
    Case(1, 3, 4, (5, 7), (3, 3), (4, 4), (1, 1), (1, 3), (2, 2)),
    Case(1, 2, 3, (4, 5), (4, 3), (6, 6), (3, 2), (5, 0), (4, 4)),
    # output_padding of at least the stride, allowed where the dilation is larger.
    Case(2, 3, 5, (5, 6), (3, 3), (1, 1), (1, 1), (2, 2), (3, 3)),
    Case(1, 3, 2, (4, 5), (2, 3), (2, 2), (0, 1), (3, 2), (4, 4)),
    # Groups and depthwise layers, without and with a channel multiplier.
    Case(2, 6, 9, (6, 5), (3, 3), (2, 2), (1, 1), (0, 1), groups=3),
    Case(2, 7, 7, (6, 7), (3, 3), (2, 2), (1, 1), (1, 1), groups=7),
    Case(2, 5, 15, (5, 6), (5, 5), (1, 1), (2, 2), groups=5),
    # Padding beyond the reach of the kernel: outer input rows contribute nothing.
    Case(1, 3, 4, (9, 8), (3, 3), (2, 2), (4, 3)),
    Case(1, 2, 3, (7, 9), (1, 1), (1, 1), (2, 3)),
    # The usual decoder layers.
    Case(2, 8, 6, (5, 7), (2, 2), (2, 2)),
    Case(2, 8, 4, (6, 5), (4, 4), (2, 2), (1, 1)),
    Case(2, 9, 7, (6, 11), (1, 1)),
    Case(1, 4, 3, (4, 3), (1, 1), (2, 3), (0, 0), (1, 2)),
    Case(1, 3, 2, (9, 10), (7, 7), (1, 1), (3, 3)),
    # One-dimensional layers: vocoders, long kernels.
    Case(1, 6, 3, (1, 11), (1, 16), (1, 8), (0, 4)),
    Case(2, 3, 2, (1, 37), (1, 41), (1, 1), (0, 20)),
    Case(1, 2, 3, (13, 1), (7, 1), (3, 1), (2, 0), (1, 0)),
    # Extremes of size.
    Case(3, 4, 5, (1, 1), (3, 5), (2, 2), (1, 1)),
    Case(1, 1, 1, (1, 1), (1, 1)),
    Case(1, 1, 1, (6, 5), (3, 2), (2, 1)),
    Case(1, 2, 3, (3, 67), (3, 3), (1, 4), (1, 1), (0, 1)),
    Case(1, 1, 2, (2, 277), (2, 5), (1, 1), (0, 2)),
    Case(1, 67, 71, (3, 3), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(11, 5, 3, (3, 2), (3, 3), (1, 1), (1, 1)),
]

# Several tiles to an image, rows that vectors divide, channels that fill a matrix product.
TILED_CASES = [
    Case(2, 6, 10, (5, 16), (4, 4), (2, 2), (1, 1), groups=2),
    Case(1, 5, 3, (3, 32), (3, 3), (1, 1), (1, 1)),
    Case(1, 4, 8, (9, 72), (4, 4), (2, 2), (1, 1), groups=2),
    Case(2, 16, 32, (20, 40), (3, 3), (1, 1), (1, 1)),
    Case(1, 24, 48, (6, 16), (4, 4), (4, 4)),
    Case(2, 8, 32, (6, 70), (3, 5), (2, 3), (1, 2), (0, 0), (2, 1), groups=2),
    Case(1, 40, 20, (5, 33), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 32, 64, (4, 9), (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    Case(3, 32, 32, (7, 16), (3, 3), (1, 1), (1, 1), groups=8),
    Case(2, 9, 3, (12, 16), (9, 9), (3, 3), (4, 4)),
    Case(2, 16, 16, (8, 8), (1, 1), (8, 8)),
]

# Few output channels, for sm90/gemm_fold_narrow.cu: whole rows and strips; halos of any size; odd channels and widths.
FOLD_CASES = [
    Case(3, 20, 3, (9, 16), (4, 4), (2, 2), (1, 1)),
    Case(2, 24, 1, (7, 70), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(1, 33, 5, (5, 61), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(2, 64, 2, (1, 200), (1, 8), (1, 4), (0, 2)),
    Case(2, 8, 3, (6, 40), (5, 3), (1, 1), (2, 1), (0, 0), (2, 3)),
    Case(2, 40, 16, (5, 8), (2, 2), (2, 2)),
    Case(1, 136, 3, (8, 34), (3, 5), (3, 2), (0, 2), (2, 1)),
    Case(2, 12, 4, (4, 6), (1, 1)),
    Case(3, 16, 2, (1, 3), (4, 6), (2, 3), (0, 4), (0, 2)),
]

# Small images, for csrc/sm90/gemm_fold_pixels.cu: several to an item and one alone; cells that are positions and
# others; pieces of eight and of four; rows and channels that fill nothing.
IMAGE_CASES = [
    Case(5, 20, 19, (4, 4), (4, 4), (2, 2), (1, 1)),
    Case(7, 136, 40, (8, 6), (4, 4), (2, 2), (1, 1)),
    Case(3, 72, 34, (14, 14), (2, 2), (2, 2)),
    Case(2, 64, 9, (1, 32), (1, 16), (1, 8), (0, 4)),
    Case(4, 70, 72, (3, 4), (2, 4), (2, 1), (1, 0), (1, 0)),
    Case(3, 24, 5, (5, 8), (8, 4), (3, 2), (3, 2), (2, 1), dilation=(1, 3)),
    Case(2, 40, 3, (8, 8), (8, 8), (4, 4), (2, 2)),
    Case(9, 136, 20, (2, 2), (4, 4), (1, 1)),
    Case(2, 40, 24, (16, 16), (1, 4), (1, 2), (0, 1)),
    Case(3, 5, 264, (2, 6), (1, 1)),
    Case(1, 200, 8, (12, 14), (4, 4), (2, 2), (1, 1)),
]

# Beside those: nine taps, images of one block of rows and of two, and signals in
# windows, with neighbours on either side and on one; of many channels, in an even and an odd number of slots.
IMAGE_ROW_CASES = [
    Case(3, 40, 24, (6, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(3, 24, 16, (8, 6), (3, 3), (2, 2), (1, 1)),
    Case(3, 72, 17, (16, 16), (4, 4), (2, 2), (1, 1)),
    Case(3, 40, 24, (1, 300), (1, 10), (1, 5)),
    Case(2, 24, 8, (1, 520), (1, 16), (1, 8), (0, 4)),
    Case(2, 72, 16, (1, 264), (1, 4), (1, 2), (0, 1)),
    Case(3, 24, 16, (1, 264), (1, 2), (1, 1), (0, 6)),
    Case(2, 24, 16, (1, 1000), (1, 9), (1, 1), (0, 2), dilation=(1, 3)),
    Case(2, 24, 16, (1, 260), (1, 2), (1, 1), (0, 16)),
    Case(2, 256, 16, (4, 4), (3, 3), (2, 2), (1, 1)),
    Case(2, 264, 16, (4, 4), (3, 3), (2, 2), (1, 1)),
]

# Taps that neither overlap nor leave gaps, for sm90/gemm_depth_to_space.cu: rows of even and odd widths; pieces of 8
# and of 16 bytes; positions that fill nothing; channels of one slot and several; lines of one block and several.
SHUFFLE_CASES = [
    Case(3, 72, 34, (14, 14), (2, 2), (2, 2)),
    Case(2, 40, 16, (6, 20), (2, 2), (2, 2)),
    Case(2, 136, 19, (5, 24), (2, 4), (2, 4)),
    Case(2, 64, 9, (4, 6), (4, 4), (4, 4)),
    Case(3, 5, 264, (2, 18), (1, 1)),
    Case(1, 300, 72, (3, 64), (1, 2), (1, 2)),
    Case(3, 48, 36, (12, 15), (2, 2), (2, 2)),
    Case(1, 33, 24, (2, 300), (2, 2), (2, 2)),
    Case(2, 24, 7, (2, 48), (1, 8), (1, 8)),
    Case(2, 96, 40, (12, 7), (2, 1), (2, 1)),
    Case(3, 200, 72, (16, 16), (2, 2), (2, 2)),
]

# Kernels larger than their stride, for sm90/implicit_gemm_nhwc.cu: whole images, alone and several; strips and parts of
# them; phases of as many taps and not; halos that differ; channels of one line and several, that fill nothing.
CELL_ROW_CASES = [
    Case(11, 72, 40, (4, 4), (4, 4), (2, 2), (1, 1)),
    Case(2, 136, 192, (8, 6), (4, 4), (2, 2), (1, 1)),
    Case(2, 64, 64, (7, 30), (3, 3), (1, 1), (1, 1)),
    Case(1, 24, 160, (13, 33), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 40, 32, (7, 70), (3, 5), (1, 1), (0, 2), (0, 0), (2, 1)),
    Case(2, 16, 32, (1, 150), (1, 16), (1, 8), (0, 4)),
    Case(2, 200, 32, (5, 9), (5, 4), (3, 2), (1, 3), (2, 1), (2, 3)),
    Case(2, 8, 8, (40, 13), (2, 1), (1, 1), (1, 0)),
    Case(130, 40, 32, (1, 1), (4, 4)),
    Case(1, 128, 264, (6, 24), (3, 1), (2, 1), (0, 4)),
    Case(3, 40, 256, (8, 8), (4, 4), (2, 2), (1, 1)),
    Case(3, 24, 72, (16, 16), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(2, 72, 32, (37, 16), (3, 3), (1, 1), (1, 1)),
]

# Wide rows, for sm90/gemm_fold_rows.cu: one step and several, ends within one and behind it; taps that reach far or
# stand alone; outputs that are stored alone and together; channels that fill nothing.
ROW_CASES = [
    Case(2, 32, 40, (5, 24), (3, 3)),
    Case(1, 16, 64, (6, 136), (3, 3), (1, 1), (1, 1)),
    Case(2, 32, 32, (4, 72), (3, 7), (1, 1), (1, 3)),
    Case(3, 20, 33, (4, 40), (4, 4), (1, 1), (1, 1)),
    Case(2, 32, 16, (3, 32), (2, 5), (1, 1), (0, 2)),
    Case(1, 32, 70, (4, 64), (3, 3), (1, 1), (2, 2)),
    Case(2, 48, 20, (5, 72), (3, 6), (1, 1), (1, 0)),
    Case(1, 16, 16, (9, 128), (4, 9), (1, 1), (2, 8)),
    Case(2, 16, 72, (3, 64), (1, 1)),
    Case(2, 16, 8, (6, 16), (5, 2), (1, 1), (2, 3)),
    Case(1, 16, 16, (3, 72), (2, 1), (1, 1), (0, 8)),
    Case(2, 16, 136, (7, 24), (3, 3), (1, 1), (2, 1)),
]

# Few enough for tests that try many variants of the call itself.
FEW_CASES = [CASES[1], CASES[3], CASES[6], CASES[13], CASES[22]]
