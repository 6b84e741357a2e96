"""What a GPU is to the choice of kernels: a value, read from torch, or a named row where no such GPU is at hand.

Grids, tiles and estimates take these numbers. Rates are the vendors' (dense products, boost clock): what kernels reach
of them is for the estimates to know.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from gemmconv.hashing import hashed_once

Capability = tuple[int, int]
Value = TypeVar("Value")

AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities
_VARIABLE = "GEMMCONV_CAPABILITY"
# Operations a clock of a multiprocessor, by compute capability: float32, and products in TF32 and 16 bits that are
# summed in float32. GeForce cards of 8.9 have half of the last two. (CUDA programming guide, NVIDIA's white papers.)
_PER_CLOCK = {
    (8, 0): (128, 1024, 2048),
    (8, 6): (256, 256, 512),
    (8, 7): (256, 512, 1024),
    (8, 9): (256, 512, 1024),
    (9, 0): (256, 2048, 4096),
    (10, 0): (256, 4096, 8192),
    (10, 3): (256, 4096, 8192),
    (11, 0): (256, 2048, 4096),
    (12, 0): (256, 256, 512),
    (12, 1): (256, 256, 512),
}
# KiB of shared memory that a block may have; its multiprocessor has one more. (CUDA programming guide.)
_SHARED_KIB = {
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (11, 0): 227,
    (12, 0): 99,
    (12, 1): 99,
}
LEAST_SHARED_BYTES = min(_SHARED_KIB.values()) << 10  # that a block may have on each of those


@hashed_once
@dataclass(frozen=True)
class DeviceSpec:
    """The properties of a GPU that decide which kernel is fast there.

    Attributes:
        name: as the driver gives it.
        capability: compute capability.
        multiprocessors: their number.
        clock: cycles a second.
        bandwidth: bytes a second of its memory.
        l2_bytes: its L2 cache.
        fp32_per_clock: float32 operations a cycle of one multiprocessor; a multiply-add is two.
        tf32, half: operations a second of dense products in TF32, and in 16 bits summed in float32.
    """

    name: str
    capability: Capability
    multiprocessors: int
    clock: float
    bandwidth: float
    l2_bytes: int
    fp32_per_clock: int
    tf32: float
    half: float

    @property
    def fp32(self) -> float:
        """float32 operations a second."""
        return self.fp32_per_clock * self.cycles

    @property
    def is_hopper(self) -> bool:
        """Whether the kernels of Hopper's tensor cores are for it, and estimates what was measured on one."""
        return self.capability == HOPPER

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Shared memory that a block may have, and all blocks of a multiprocessor together but for one KiB."""
        return _of_capability(_SHARED_KIB, self.capability) << 10

    @property
    def features(self) -> frozenset[str]:
        """What only some GPUs have, that kernels may need."""
        return frozenset({"wgmma", "tma"}) if self.is_hopper else frozenset()

    @property
    def cycles(self) -> float:
        """Cycles a second of all multiprocessors."""
        return self.multiprocessors * self.clock

    def ratio(self, rate: str) -> float:
        """Of a rate to the reference's, by its name.

        On Hopper, where estimates are what was measured, all rates but the clock are in proportion to multiprocessors.
        """
        if self.is_hopper:
            return 1.0 if rate == "clock" else self.multiprocessors / REFERENCE.multiprocessors
        return float(getattr(self, rate) / getattr(REFERENCE, rate))

    @property
    def bytes_ratio(self) -> float:
        """Of the bytes that memory moves in a cycle of a multiprocessor, to the reference's."""
        return self.ratio("bandwidth") / self.ratio("cycles")

    @property
    def slowest_ratio(self) -> float:
        """The least of the ratios of arithmetic and memory: for what an estimate does not tell apart."""
        return min(self.ratio("fp32"), self.ratio("bandwidth"))


def _row(
    name: str, capability: Capability, multiprocessors: int, clock: float, bandwidth: float, l2: int
) -> DeviceSpec:
    """A GPU by its data sheet: clock in GHz, bandwidth in TB/s, L2 cache in MiB."""
    fp32, tf32, half = _per_clock(name, capability)
    each_second = multiprocessors * clock * 1e9
    return DeviceSpec(
        name,
        capability,
        multiprocessors,
        clock * 1e9,
        bandwidth * 1e12,
        l2 << 20,
        fp32,
        tf32 * each_second,
        half * each_second,
    )


def _per_clock(name: str, capability: Capability) -> tuple[int, int, int]:
    fp32, tf32, half = _of_capability(_PER_CLOCK, capability)
    return (fp32, tf32 // 2, half // 2) if capability == (8, 9) and "GeForce" in name else (fp32, tf32, half)


def _of_capability(table: dict[Capability, Value], capability: Capability) -> Value:
    """What a table has for a compute capability, or for the newest one before it."""
    known = [older for older in sorted(table) if older <= capability]
    return table[known[-1] if known else AMPERE]


# NVIDIA's data sheets: multiprocessors, boost clock, memory. H20's products are held far below Hopper's.
KNOWN = {
    spec.name: spec
    for spec in (
        _row("NVIDIA H200", HOPPER, 132, 1.755, 4.8, 50),
        _row("NVIDIA H100 80GB HBM3", HOPPER, 132, 1.83, 3.35, 50),
        _row("NVIDIA H100 PCIe", HOPPER, 114, 1.755, 2.04, 50),
        replace(_row("NVIDIA H20", HOPPER, 78, 1.98, 4.0, 60), tf32=74e12, half=148e12),
        _row("NVIDIA A100-SXM4-80GB", AMPERE, 108, 1.41, 2.04, 40),
        _row("NVIDIA L4", (8, 9), 58, 2.04, 0.3, 48),
        _row("NVIDIA L40S", (8, 9), 142, 2.52, 0.864, 96),
        _row("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52, 1.008, 72),
        _row("NVIDIA B200", (10, 0), 148, 1.85, 8.0, 126),
        _row("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407, 1.792, 96),
    )
}
MEASURED = KNOWN["NVIDIA H100 80GB HBM3"]  # where torch's operator and the kernels for every GPU were measured
REFERENCE = KNOWN["NVIDIA H200"]  # where estimates were fitted; what is asked about where no GPU is at hand


def named(name: str) -> DeviceSpec:
    """The GPU of :data:`KNOWN` whose name has ``name`` in it; of several the first.

    Raises:
        ValueError: there is none.

    >>> named("A100").capability
    (8, 0)
    """
    found = [spec for spec in KNOWN.values() if name and name.lower() in spec.name.lower()]
    if not found:
        raise ValueError(f"gpu must be one of {', '.join(KNOWN)}, or part of such a name, got {name!r}")
    return found[0]


@functools.cache
def spec_of(device: torch.device) -> DeviceSpec:
    """The properties of a CUDA device; the reference's for what is none, or where none is at hand.

    ``GEMMCONV_CAPABILITY=8.0`` in the environment replaces the compute capability alone, so that another GPU's choice
    can be tried. It is read when a process asks for a device first. Kernels are compiled for the real one.

    Raises:
        ValueError: that variable is no compute capability.
    """
    here = device.type == "cuda" and torch.cuda.is_available()
    spec = _measured(torch.cuda.current_device() if device.index is None else device.index) if here else REFERENCE
    if (asked := os.environ.get(_VARIABLE)) is None or device.type != "cuda":
        return spec
    major, dot, minor = asked.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"{_VARIABLE} must be a compute capability such as 8.0, got {asked!r}; unset it")
    return replace(spec, capability=(int(major), int(minor)))


def _measured(index: int) -> DeviceSpec:
    """What torch says of a device; of a GPU with a row of its own, what that says beside the number of SMs."""
    properties = torch.cuda.get_device_properties(index)
    name, capability = properties.name, torch.cuda.get_device_capability(index)
    if (known := KNOWN.get(name)) is not None and known.capability == capability:
        return replace(known, multiprocessors=properties.multi_processor_count)
    # In kHz, and in bits; older versions of torch do not say. Memory sends twice a cycle.
    clock = getattr(properties, "clock_rate", 0) / 1e6 or 1.5
    moved = 2e3 * getattr(properties, "memory_clock_rate", 0) * getattr(properties, "memory_bus_width", 0) / 8
    l2 = getattr(properties, "L2_cache_size", 0) >> 20
    return _row(name, capability, properties.multi_processor_count, clock, moved / 1e12 or 1.0, l2)
