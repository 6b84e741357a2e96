"""Sums of partial sums: csrc/splits/."""
