"""Times the first call of layers in this process, by every algorithm, and prints JSON: milliseconds.

    python -m benchmarks.first_call --device cuda --precisions tf32 "n64 c64x128 k3x5 h128 w256"

Another layer runs first, so that libraries and handles are there. Whether kernels are compiled depends on the cache:
``GEMMCONV_CACHE_DIR=$(mktemp -d)`` begins with an empty one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.contenders import (
    DEFAULT_TORCH,
    PRECISIONS,
    TORCH,
    Contender,
    Lanes,
    gemmconv_contenders,
    torch_settings,
)
from benchmarks.reference import random_tensors
from benchmarks.timing import synchronize
from benchmarks.workloads import custom

_WARM_UP = "n1 c24x40 k3 h20 w28 s2"
_TORCH = (DEFAULT_TORCH, "torch_nchw_benchmark")


def _first_ms(contender: Contender, layer: str, precision: str, device: torch.device) -> float:
    workload = custom(layer)
    tensors = random_tensors(workload, device).to(PRECISIONS[precision])
    forward = contender.forward(workload.problem)
    with torch_settings(precision, contender.benchmark, contender.deterministic), torch.no_grad():
        synchronize(device)
        start = time.perf_counter()
        forward(tensors.x, tensors.weight, tensors.bias)
        synchronize(device)
        return 1e3 * (time.perf_counter() - start)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_call", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", required=True)
    parser.add_argument("--precisions", required=True)
    parser.add_argument("layers", nargs="+")
    arguments = parser.parse_args(argv)
    device, lanes = torch.device(arguments.device), Lanes()
    contenders = [*(c for c in TORCH if c.name in _TORCH), *gemmconv_contenders(("nchw",))]
    contenders = [c for c in contenders if c.name not in ("native", "auto")]
    found = []
    every = itertools.product((_WARM_UP, *arguments.layers), arguments.precisions.split(","), contenders)
    for layer, precision, contender in every:
        visit = partial(_first_ms, contender, layer, precision, device)
        try:
            ms = lanes.run_in(0, visit) if contender.benchmark else visit()
        except RuntimeError:  # refused or failed: the row itself says why
            continue
        if layer != _WARM_UP:
            found.append((layer, precision, contender.name, round(ms, 3)))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
