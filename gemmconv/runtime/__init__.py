"""Finds, compiles, caches and launches CUDA kernels. Knows nothing of convolution.

Nothing under here but ``available`` and ``sources``, which say whether the rest can work, is imported on a machine
without a GPU, except by those who compile for one.
"""
