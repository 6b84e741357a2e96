"""Properties of GPUs by which kernels are chosen, read from torch, or from a table where no such GPU is there.

Grids, tiles and estimates depend on these numbers. Rates are the vendor's (dense products, boost clock); the estimates
know which part of them kernels reach.
"""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from gemmconv.hashing import hashed_once

Capability = tuple[int, int]

AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities
_VARIABLE = "GEMMCONV_CAPABILITY"
# A multiprocessor's operations per clock cycle, by compute capability: in float32, and on tensor cores in TF32 and in
# 16 bits, both summed in float32 (GeForce cards of 8.9 have half of the latter); and the KiB of shared memory that a
# block may use, one less than the multiprocessor has. (CUDA programming guide, white papers.)
_MULTIPROCESSORS = {
    (8, 0): (128, 1024, 2048, 163),
    (8, 6): (256, 256, 512, 99),
    (8, 7): (256, 512, 1024, 163),
    (8, 9): (256, 512, 1024, 99),
    (9, 0): (256, 2048, 4096, 227),
    (10, 0): (256, 4096, 8192, 227),
    (10, 3): (256, 4096, 8192, 227),
    (11, 0): (256, 2048, 4096, 227),
    (12, 0): (256, 256, 512, 99),
    (12, 1): (256, 256, 512, 99),
}
REGISTERS = 65_536  # 32-bit registers of a multiprocessor, of all of these
LEAST_SHARED_BYTES = min(kib for *_, kib in _MULTIPROCESSORS.values()) << 10  # of a block, on all of these


@hashed_once
@dataclass(frozen=True)
class DeviceSpec:
    """The properties of a GPU that decide which kernel is fast there."""

    name: str  # the driver's name of it
    capability: Capability  # compute capability
    multiprocessors: int  # number of multiprocessors
    clock: float  # cycles per second
    bandwidth: float  # bytes per second that its memory moves
    fp32_per_clock: int  # float32 operations of one multiprocessor per cycle; a multiply-add counts as two
    tf32: float  # tf32, half: operations per second of dense products in TF32, and in 16 bits summed in float32
    half: float

    @property
    def fp32(self) -> float:
        """float32 operations per second."""
        return self.fp32_per_clock * self.cycles

    @property
    def is_hopper(self) -> bool:
        """Whether kernels for Hopper's tensor cores run on it; estimates for such GPUs were measured on one."""
        return self.capability == HOPPER

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block may use; a multiprocessor has one KiB more for all its blocks."""
        return _multiprocessor(self.capability)[-1] << 10

    @property
    def features(self) -> frozenset[str]:
        """Instructions that kernels may need and only some GPUs have."""
        return frozenset({"wgmma", "tma"}) if self.is_hopper else frozenset()

    @property
    def cycles(self) -> float:
        """Cycles per second, summed over all multiprocessors."""
        return self.multiprocessors * self.clock

    def ratio(self, rate: str) -> float:
        """Ratio of the rate with this name to that of the reference.

        On Hopper, whose estimates were measured, the rates other than the clock scale with multiprocessors alone.
        """
        if self.is_hopper:
            return 1.0 if rate == "clock" else self.multiprocessors / REFERENCE.multiprocessors
        return float(getattr(self, rate) / getattr(REFERENCE, rate))

    @property
    def bytes_ratio(self) -> float:
        """Ratio of the bytes that memory moves per cycle of a multiprocessor to those of the reference."""
        return self.ratio("bandwidth") / self.ratio("cycles")


def _row(name: str, capability: Capability, multiprocessors: int, clock: float, bandwidth: float) -> DeviceSpec:
    """The properties of a GPU from its data sheet: clock in GHz, bandwidth in TB/s."""
    fp32, tf32, half, _ = _multiprocessor(capability)
    if capability == (8, 9) and "GeForce" in name:
        tf32, half = tf32 // 2, half // 2
    cycles = multiprocessors * clock * 1e9
    rates = fp32, tf32 * cycles, half * cycles
    return DeviceSpec(name, capability, multiprocessors, clock * 1e9, bandwidth * 1e12, *rates)


def _multiprocessor(capability: Capability) -> tuple[int, int, int, int]:
    """The numbers of a multiprocessor of a compute capability, or of the newest one before it."""
    older = (one for one in _MULTIPROCESSORS if one <= capability)
    return _MULTIPROCESSORS[max(older, default=AMPERE)]


# NVIDIA's data sheets: multiprocessors, boost clock, memory. H20's tensor cores are far slower than those of others.
KNOWN = {
    spec.name: spec
    for spec in (
        _row("NVIDIA H200", HOPPER, 132, 1.755, 4.8),
        _row("NVIDIA H100 80GB HBM3", HOPPER, 132, 1.83, 3.35),
        _row("NVIDIA H100 PCIe", HOPPER, 114, 1.755, 2.04),
        replace(_row("NVIDIA H20", HOPPER, 78, 1.98, 4.0), tf32=74e12, half=148e12),
        _row("NVIDIA A100-SXM4-80GB", AMPERE, 108, 1.41, 2.04),
        _row("NVIDIA L4", (8, 9), 58, 2.04, 0.3),
        _row("NVIDIA L40S", (8, 9), 142, 2.52, 0.864),
        _row("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52, 1.008),
        _row("NVIDIA B200", (10, 0), 148, 1.85, 8.0),
        _row("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407, 1.792),
    )
}
MEASURED = KNOWN["NVIDIA H100 80GB HBM3"]  # torch's operator and the portable kernels were measured on it
REFERENCE = KNOWN["NVIDIA H200"]  # estimates were fitted on it; it stands in where there is no GPU


def named(name: str) -> DeviceSpec:
    """The first GPU of :data:`KNOWN` whose name contains ``name``.

    Raises:
        ValueError: no name contains it.

    >>> named("A100").capability
    (8, 0)
    """
    found = [spec for spec in KNOWN.values() if isinstance(name, str) and name and name.lower() in spec.name.lower()]
    if not found:
        raise ValueError(f"gpu must be one of {', '.join(KNOWN)}, or part of such a name, got {name!r}")
    return found[0]


@functools.cache
def spec_of(device: torch.device) -> DeviceSpec:
    """The properties of a CUDA device; those of the reference for any other device, or where there is no GPU.

    ``GEMMCONV_CAPABILITY=8.0`` in the environment replaces the compute capability alone, to try another GPU's choices.
    It is read once for each device. Kernels are compiled for the real compute capability.

    Raises:
        ValueError: the variable is no compute capability.
    """
    here = device.type == "cuda" and torch.cuda.is_available()
    spec = _read(torch.cuda.current_device() if device.index is None else device.index) if here else REFERENCE
    if (text := os.environ.get(_VARIABLE)) is None or device.type != "cuda":
        return spec
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"{_VARIABLE} must be a compute capability such as 8.0, got {text!r}; unset it")
    return replace(spec, capability=(int(major), int(minor)))


def _read(index: int) -> DeviceSpec:
    """The properties of a device from torch; a GPU of :data:`KNOWN` has its row with the number of SMs from torch."""
    properties = torch.cuda.get_device_properties(index)
    name, capability = properties.name, torch.cuda.get_device_capability(index)
    if (known := KNOWN.get(name)) is not None and known.capability == capability:
        return replace(known, multiprocessors=properties.multi_processor_count)
    # Clocks in kHz, bus width in bits; 0 in older versions of torch. Memory transfers twice per cycle.
    clock = getattr(properties, "clock_rate", 0) / 1e6 or 1.5
    bandwidth = 2e3 * getattr(properties, "memory_clock_rate", 0) * getattr(properties, "memory_bus_width", 0) / 8
    return _row(name, capability, properties.multi_processor_count, clock, bandwidth / 1e12 or 1.0)


def make_current(device: torch.device) -> AbstractContextManager[object]:
    """A context in which a CUDA device is the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()
