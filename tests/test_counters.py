"""torch.utils.flop_counter counts gemmconv's operators as it counts torch's own, whenever its mode was made."""

import subprocess
import sys
import textwrap

import pytest

WAYS = {
    "first mode of a process": """
        import torch, gemmconv
        from torch.utils.flop_counter import FlopCounterMode
        mode = FlopCounterMode(display=False)
    """,
    "mode made before the import": """
        import torch
        from torch.utils.flop_counter import FlopCounterMode
        mode = FlopCounterMode(display=False)
        import gemmconv
    """,
    "second mode of a process": """
        import torch, gemmconv
        from torch.utils.flop_counter import FlopCounterMode
        with FlopCounterMode(display=False):
            gemmconv.conv_transpose2d(torch.ones(1, 2, 3, 3), torch.ones(2, 2, 2, 2), algorithm="gemm_col2im")
        mode = FlopCounterMode(display=False)
    """,
}
COUNT = """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    def count(make, counting):
        layer, images = make(8, 6, 3, 2).to(device), torch.randn(2, 8, 5, 4, device=device, requires_grad=True)
        with counting:
            layer(images).sum().backward()
        return counting.get_total_flops()
    torchs = count(torch.nn.ConvTranspose2d, FlopCounterMode(display=False))
    def ours(*arguments):
        return gemmconv.ConvTranspose2d(*arguments, algorithm=ALGORITHM)
    print(count(ours, mode) == torchs > 0)
"""


@pytest.mark.parametrize("algorithm", ["gemm_col2im", "auto"])
@pytest.mark.parametrize("way", WAYS)
def test_flop_counter_counts_what_it_counts_for_torch(way, algorithm):
    script = textwrap.dedent(WAYS[way]) + textwrap.dedent(COUNT).replace("ALGORITHM", repr(algorithm))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True"], done.stderr
