"""Kernels for a CPU, in C under csrc/cpu/, and their host side."""
