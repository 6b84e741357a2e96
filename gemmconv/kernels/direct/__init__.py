"""Kernels that gather without columns: csrc/direct/."""
