"""Tensor-core kernels for Hopper: csrc/sm90/."""
