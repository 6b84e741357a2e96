"""Kernels of ``fused`` for every GPU with tensor cores."""
