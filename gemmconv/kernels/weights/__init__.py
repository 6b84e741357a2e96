"""Packing of weights for kernels: csrc/weights/."""
