"""torch.utils.flop_counter counts gemmconv's operators as it counts torch's own, whenever its mode was made."""

import json
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
# Runs each script of a list in a process of its own, which has imported torch alone, with what every mode needs.
FORKS = """
import json, os, sys
import torch._dynamo
assert not {"gemmconv", "torch.utils.flop_counter"} & sys.modules.keys()
for script in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        exec(script, {})
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        print("failed", flush=True)
"""
PAIRS = [(way, algorithm) for way in WAYS for algorithm in ("gemm_col2im", "auto")]


@pytest.fixture(scope="module")
def outputs():
    """What the script of each pair prints, and what all of them say on stderr."""
    scripts = [
        textwrap.dedent(WAYS[way]) + textwrap.dedent(COUNT).replace("ALGORITHM", repr(algorithm))
        for way, algorithm in PAIRS
    ]
    done = subprocess.run(
        [sys.executable, "-c", FORKS], input=json.dumps(scripts), capture_output=True, text=True, check=False
    )
    lines = done.stdout.split()
    assert len(lines) == len(PAIRS), done.stderr
    return dict(zip(PAIRS, lines, strict=True)), done.stderr


@pytest.mark.parametrize(("way", "algorithm"), PAIRS)
def test_flop_counter_counts_what_it_counts_for_torch(way, algorithm, outputs):
    printed, errors = outputs
    assert printed[way, algorithm] == "True", errors
