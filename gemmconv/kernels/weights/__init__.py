"""Weights as kernels read them: csrc/weights/."""
