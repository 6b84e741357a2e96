"""The host side of each kernel, in folders with the names of those in csrc/."""
