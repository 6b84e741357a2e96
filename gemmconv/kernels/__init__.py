"""What runs: the host side of each kernel, in the folders of csrc/."""
