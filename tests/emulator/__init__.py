"""Runs the CUDA kernels of csrc/ on the CPU: their real source, every CUDA thread a fiber.

    with emulator.install(folder):
        call = Direct().prepare(Config(problem, torch.float32, torch.device("cpu")), "forward")
        output = call(input, weight, bias)  # CPU tensors

While it is installed, gemmconv's host code loads emulated kernels: the source is rewritten a little (translate.py),
compiled with a C++ compiler (build.py, cuda.h) and run block by block (scheduler.cpp). Beside wrong results it finds

- missing barriers: threads run in a pseudo-random order, shared memory holds NaN at first;
- asynchronous copies that are used before they were waited for, or begun while their target is in use;
- wgmmas whose sums are used, or whose matrices are overwritten, before they were waited for; without wgmma_fence; with
  matrices outside of dynamic shared memory; that the threads of a warpgroup do not all do alike;
- mbarriers that are not initialised, get more arrivals than they are for, or are written over; bulk copies that are
  misaligned, go past the end of shared memory or are never waited for;
- writes just past the end of shared memory, barriers that not all threads of a block or warp reach, waits without end;
- misaligned vectors, array indices out of bounds, signed overflow;
- a params struct that differs in size from its mirror;
- blocks beyond the kernel's launch bounds, grids and shared memory beyond what CUDA allows.

It knows nothing of registers, caches and time, and does not see reads and writes outside of tensors, nor that a fence
is missing between ordinary writes and the asynchronous proxy. Headers may have a twin in twins/, compiled instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.emulator.build import Builder, compiler
from tests.emulator.translate import TWINS

__all__ = ["Builder", "Edit", "Kernel", "compiler", "install", "needs_compiler"]

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++ or c++) to emulate with")

_SHARED_BYTES_UNASKED = 48 << 10
_ONE_AT_A_TIME = threading.Lock()
_TRAP = b"a trap"  # what scheduler.cpp says of a check that failed


@dataclass(frozen=True)
class Edit:
    """A change of a source, to see what becomes of it: every match of a pattern in a file of csrc/ is replaced."""

    file: str
    pattern: str
    replacement: str

    def apply(self, file: str, text: str) -> str:
        if file != self.file:
            return text
        changed, count = re.subn(self.pattern, self.replacement, text)
        assert count, f"{file} has no {self.pattern!r}"
        return changed


class Kernel:
    """Stands in for gemmconv.runtime.launch.Kernel; the addresses in its params are those of CPU memory."""

    def __init__(self, builder: Builder, build: Callable[[bool], Future[Path]], name: str, shared_bytes: int) -> None:
        self.name = name
        self._builder = builder
        self._build = build  # of what explains, or does not; see Builder.kernel
        self._library = build(False)
        self._shared_bytes = max(shared_bytes, _SHARED_BYTES_UNASKED)

    @functools.cached_property
    def _entry(self) -> ctypes.c_void_p:
        return self._entry_of(self._library)

    def _entry_of(self, library: Future[Path]) -> ctypes.c_void_p:
        loaded = ctypes.CDLL(str(library.result()))
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(loaded, f"emulated_{self.name}")))

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        params: ctypes.Structure,
        shared_bytes: int = 0,
        overlaps: bool = False,
    ) -> None:
        """Run all blocks, after those of all launches before.

        Raises:
            RuntimeError: the compiler refused the kernel, or something was noticed while it ran.
        """
        assert shared_bytes <= self._shared_bytes, f"{self.name}: more shared memory than it was loaded for"
        launch = self._builder.scheduler.emulator_launch
        extents = [ctypes.byref((ctypes.c_uint * 3)(*extent)) for extent in (grid, block)]
        arguments = *extents, ctypes.byref(params), ctypes.sizeof(params), shared_bytes, overlaps
        with _ONE_AT_A_TIME:  # while compilers of other kernels are started
            error = launch(self._entry, *arguments)
            if error == _TRAP:
                error = launch(self._entry_of(self._build(True)), *arguments) or error
        if error:
            raise RuntimeError(f"{self.name}: {error.decode()}; grid {grid}, block {block}")


@contextlib.contextmanager
def install(place: Path | Builder, edit: Edit | None = None) -> Iterator[None]:
    """Let gemmconv load emulated kernels for a while, in which they can be launched.

    They are compiled in the background from the moment they are loaded; their first launch waits for that.

    Args:
        place: the folder where compiled kernels are kept, or what builds into one and goes on to afterwards.
        edit: a change of the sources to make first.
    """
    from gemmconv.runtime import cublas, executor, launch, sources, tensor_map

    assert edit is None or edit.file not in TWINS, f"{edit.file} has a twin, which is compiled in its place"

    def read_edited(name: str) -> str:
        assert edit is not None
        return edit.apply(name, sources.read(name))

    read = sources.read if edit is None else read_edited  # of the same function, what it reads is translated once

    def load(
        source_name: str,
        macros: Mapping[str, str | int],
        device_index: int | None,
        shared_bytes: int = 0,
    ) -> Kernel:
        build = functools.partial(builder.kernel, source_name, dict(macros), read)
        return Kernel(builder, build, launch.kernel_name(source_name), shared_bytes)

    builder = place if isinstance(place, Builder) else Builder(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "load", load)
        patch.setattr(launch, "clear", lambda address, size, device: ctypes.memset(address, 0, size))
        patch.setattr(tensor_map, "encode", _tensor_map)
        patch.setattr(cublas, "library", lambda: None)
        patch.setattr(cublas, "StridedBatchedGemm", StridedBatchedGemm)
        patch.setattr(executor, "extension", lambda: None)
        yield
    if builder is not place:
        builder.close()


def _tensor_map(
    address: int,
    itemsize: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    steps: tuple[int, ...],
    swizzled: bool,
    fetched: int = 256,
) -> ctypes.Array:
    """Stands in for gemmconv.runtime.tensor_map.encode; scheduler.cpp reads it."""
    assert address % 16 == 0, "a misaligned tensor"
    assert not any(stride % 16 for stride in strides), "strides of misaligned lines"
    assert not swizzled or box[0] * itemsize in (64, 128), "swizzled lines that have neither 64 nor 128 bytes"
    assert max(size * step for size, step in zip(box, steps, strict=True)) <= 256, "a box that is too large"
    assert steps[0] == steps[3] == 1, "steps that are not emulated"
    assert max(steps) <= 8, "steps that are too long"
    assert box[0] * itemsize % 16 == 0, "a box of misaligned lines"
    assert fetched in (128, 256), "what the L2 cache does not fetch together"
    return (ctypes.c_ulonglong * 16)(address, *sizes, *strides, *box, itemsize, swizzled, *steps[1:3])


class StridedBatchedGemm:
    """Stands in for gemmconv.runtime.cublas.StridedBatchedGemm, in float64 on CPU memory."""

    def __init__(self, extents, a, b, c, batch, transposed, *, tf32, accumulates=False) -> None:
        m, n, k = extents
        assert a[1] >= (k if transposed[0] else m), "columns of A that overlap"
        assert b[1] >= (n if transposed[1] else k), "columns of B that overlap"
        assert c[1] >= m, "columns of C that overlap"
        shapes = ((k, m) if transposed[0] else (m, k)), ((n, k) if transposed[1] else (k, n)), (m, n)
        self._operands = [(*operand, *shape) for operand, shape in zip((a, b, c), shapes, strict=True)]
        self._batch, self._transposed, self._accumulates = batch, transposed, accumulates

    def __call__(self, *addresses: int) -> None:
        """Multiply what lies at these addresses: column-major, so that rows of torch's are columns."""
        a, b, c = (self._at(address, *one) for address, one in zip(addresses, self._operands, strict=True))
        a, b = (x.double() if t else x.double().mT for x, t in zip((a, b), self._transposed, strict=True))
        product = (a @ b).mT  # a is [m, k] and b [k, n], as rows and columns of torch's
        c.copy_(c.double() + product if self._accumulates else product)

    def _at(self, address: int, dtype: torch.dtype, leading: int, stride: int, rows: int, columns: int) -> torch.Tensor:
        """The matrices there, [batch, columns, rows]."""
        elements = (self._batch - 1) * stride + (columns - 1) * leading + rows
        memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
        flat = torch.frombuffer(memory, dtype=dtype)
        return flat.as_strided((self._batch, columns, rows), (stride, leading, 1))
