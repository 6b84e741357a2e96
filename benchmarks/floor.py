"""The floor: the least time that arithmetic and memory allow, from rates measured in the same run.

floor = max(useful flops / rate of cuBLAS's matrix product, least bytes / rate of a large copy)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.contenders import PRECISIONS, torch_settings
from benchmarks.timing import Effort, time_run
from gemmconv.geometry import Problem

_GEMM_EXTENT = {"cuda": 8192, "cpu": 512}
_COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
_EFFORT = Effort(target_ms=40.0, least=5, most=20, cap_ms=400.0)


@dataclass(frozen=True)
class Ceilings:
    """The measured rates of the machine.

    Attributes:
        copy_tbps: terabytes a second of a device-to-device copy, bytes read and written.
        tflops: by precision, teraflops of a large matrix product. ``fp32`` is the faster of float32 arithmetic and a
            third of the TF32 rate, since three TF32 products make a float32-grade one.
    """

    copy_tbps: float
    tflops: dict[str, float]

    def floor_ms(self, problem: Problem, precision: str, direction: str, bias: bool) -> float:
        """The floor of a pass, in milliseconds."""
        flops = work(problem, direction) / (self.tflops[precision] * 1e9)
        traffic = least_bytes(problem, PRECISIONS[precision].itemsize, direction, bias) / (self.copy_tbps * 1e9)
        return max(flops, traffic)


def work(problem: Problem, direction: str) -> int:
    """Useful floating-point operations; each of the two gradients takes as many as the forward pass."""
    return problem.useful_flops * {"forward": 1, "backward": 2}[direction]


def least_bytes(problem: Problem, itemsize: int, direction: str, bias: bool) -> int:
    """Bytes that any algorithm moves: each argument of a pass read once, each result written once."""
    least = problem.least_bytes(itemsize, bias)
    if direction == "backward":  # input, weight and output gradient are read, gradients of input and weight are written
        weight = problem.in_channels * problem.gemm_m
        least += itemsize * (problem.batch * problem.in_channels * problem.in_pixels + weight)
    return least


def measure_ceilings(device: torch.device, precisions: Iterable[str]) -> Ceilings:
    """Measure the rates that the floors of these precisions need."""
    wanted = set(precisions)
    if "fp32" in wanted and device.type == "cuda":
        wanted.add("tf32")
    extent = _GEMM_EXTENT[device.type]
    # cuBLAS keeps the workspace that its first product asks for: of a small one it lies alone.
    torch.mm(*(torch.ones(8, 8, device=device) for _ in range(2)))
    tflops = {}
    for precision in sorted(wanted):
        a, b = (torch.randn(extent, extent, device=device).to(PRECISIONS[precision]) for _ in range(2))
        out = torch.empty_like(a)
        with torch_settings(precision):
            product = partial(torch.mm, a, b, out=out)
            product()
            tflops[precision] = 2e-9 * extent**3 / time_run(product, device, _EFFORT).median
    if "fp32" in tflops and "tf32" in tflops:
        tflops["fp32"] = max(tflops["fp32"], tflops["tf32"] / 3)
    size = _COPY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.get_device_properties(device).total_memory // 8)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    copy_ms = time_run(lambda: target.copy_(source), device, _EFFORT).median
    return Ceilings(2e-9 * 4 * source.numel() / copy_ms, tflops)
