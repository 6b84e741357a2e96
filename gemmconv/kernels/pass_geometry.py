"""Passes that gather outputs from inputs: forward, and the input gradient, which gathers from grad_output."""

from __future__ import annotations

from gemmconv.geometry import Pair, Problem
from gemmconv.hashing import cached_property
from gemmconv.kernels.base import Pass


class Gathering:
    """Sizes of the inputs and outputs of a pass. The inputs of an input gradient are grad_output."""

    problem: Problem  # the geometry
    direction: Pass  # "forward" or "input_grad"

    @cached_property
    def in_channels(self) -> int:
        """Input channels of a group: those that are summed over."""
        return self.problem.gemm_k if self.direction == "forward" else self.problem.group_out_channels

    @cached_property
    def out_channels(self) -> int:
        """Output channels of a group."""
        return self.problem.group_out_channels if self.direction == "forward" else self.problem.gemm_k

    @property
    def input_size(self) -> Pair:
        """Height and width of the inputs."""
        return self.problem.input_size if self.direction == "forward" else self.problem.output_size

    @property
    def output_size(self) -> Pair:
        """Height and width of the outputs."""
        return self.problem.output_size if self.direction == "forward" else self.problem.input_size

    @property
    def span(self) -> Pair:
        """Outputs of a cell, per axis."""
        return self.problem.stride if self.direction == "forward" else (1, 1)

    @cached_property
    def cells(self) -> Pair:
        """Cells of an image, down and across, that have outputs."""
        (height, width), (span_h, span_w) = self.output_size, self.span
        return -(-height // span_h), -(-width // span_w)
