"""Columns: products by cuBLAS or torch, folded by csrc/columns/."""
