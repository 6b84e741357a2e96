"""Times the first call of a layer in a new process, with an empty and with a filled kernel cache.

The parent starts this module twice with one cache folder. The child first runs another layer, so that libraries and
handles are there, and then times one call of every layer; it prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

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
_SECONDS = 180
_ROOT = Path(__file__).parent.parent

Costs = dict[tuple[str, str, str], float]  # milliseconds by (layer, precision, algorithm)


def measure(layers: Sequence[str], precisions: Sequence[str], device: torch.device) -> tuple[Costs, Costs]:
    """Cost of the first call of each layer, with a cold and with a warm cache.

    Raises:
        RuntimeError: a child process failed; the message holds the end of what it said.
    """
    with tempfile.TemporaryDirectory(prefix="gemmconv-first-call-") as folder:
        cold, warm = (_child(layers, precisions, device, Path(folder)) for _ in range(2))
    return cold, warm


def _child(layers: Sequence[str], precisions: Sequence[str], device: torch.device, cache: Path) -> Costs:
    command = [sys.executable, "-m", "benchmarks.first_call", "--device", str(device)]
    command += ["--precisions", ",".join(precisions), *layers]
    environment = {**os.environ, "GEMMCONV_CACHE_DIR": str(cache)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=environment, cwd=_ROOT, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"first_call: the child took longer than {_SECONDS} s") from None
    if done.returncode:
        raise RuntimeError(f"first_call: the child ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return {(layer, precision, name): ms for layer, precision, name, ms in json.loads(done.stdout.splitlines()[-1])}


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
    """The child's part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_call")
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
