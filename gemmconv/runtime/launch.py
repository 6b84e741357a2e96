"""Loads compiled kernels and launches them on torch's current stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Hashable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import Device, ObjectCode

from gemmconv.errors import KernelError
from gemmconv.runtime import pool
from gemmconv.runtime.cache import default_cache
from gemmconv.runtime.compiler import Compiled, Macros, cached, compile

Extent3 = tuple[int, int, int]

_DEFAULT_SHARED_BYTES = 48 << 10  # dynamic shared memory that a kernel may use without an attribute
_Key = tuple[str, frozenset[tuple[str, Any]]]  # source and macros
_kernels: dict[tuple[_Key, int], Kernel] = {}  # by device
_compiled: dict[tuple[_Key, str], Compiled] = {}  # by architecture, until it is loaded
_locks: dict[Hashable, threading.Lock] = {}  # one for each kernel that is being loaded or compiled


class _Thread(threading.local):
    def __init__(self) -> None:
        self.devices: set[int] = set()  # devices whose contexts were set in it
        self.configs: dict[tuple[Extent3, Extent3, int], Any] = {}  # cached configurations of overlapping launches


_thread = _Thread()


class Kernel:
    """One kernel of a loaded source, for one device. Takes a single params struct by value."""

    def __init__(self, code: ObjectCode, name: str, device_index: int) -> None:
        self.name = name
        self._kernel = code.get_kernel(name)  # keeps the loaded code alive
        self.address = int(self._kernel.handle)
        self._function = driver.CUfunction(self.address)
        self._device_index = device_index
        self._current_stream = torch._C._cuda_getCurrentRawStream  # torch has it only where it is built for CUDA
        self._shared_bytes = _DEFAULT_SHARED_BYTES
        self._lock = threading.Lock()

    def allow(self, shared_bytes: int) -> None:
        """Allow launches with up to ``shared_bytes`` of dynamic shared memory.

        Raises:
            KernelError: the device has less.
        """
        with self._lock:
            if shared_bytes <= self._shared_bytes:
                return
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            kernel, device = driver.CUkernel(self.address), driver.CUdevice(self._device_index)
            (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, device)
            if status:
                raise KernelError(f"{self.name}: {shared_bytes} bytes of shared memory refused with {status.name}")
            self._shared_bytes = shared_bytes

    def launch(
        self,
        grid: Extent3,
        block: Extent3,
        params: ctypes.Structure | ctypes.Array[ctypes.c_char],
        shared_bytes: int = 0,
        overlaps: bool = False,
    ) -> None:
        """Enqueue one launch on torch's current stream of the current device; ``params`` is copied at once.

        With ``overlaps`` (PDL) it may begin before the previous launch has ended, if that permits it; see
        csrc/include/ptx/pdl.cuh. Memory that it reads before it waits must have been complete when that launch began:
        so the previous launch must not overlap, and nothing that it reads may be enqueued between the two.
        """
        argument = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        stream = self._current_stream(self._device_index)
        address = ctypes.addressof(argument)
        if overlaps:
            config = _overlapping(grid, block, shared_bytes)
            config.hStream = driver.CUstream(stream)
            (status,) = driver.cuLaunchKernelEx(config, self._function, address, 0)
        else:
            (status,) = driver.cuLaunchKernel(self._function, *grid, *block, shared_bytes, stream, address, 0)
        if status:
            raise RuntimeError(
                f"{self.name}: launch failed with {status.name}; grid {grid}, block {block}, "
                f"{shared_bytes} bytes of shared memory"
            )


def make_current(device_index: int) -> None:
    """Set the device's context in this thread, for calls of the driver.

    A thread of torch's that has not called CUDA yet, such as that of a backward pass, has none.
    """
    if device_index not in _thread.devices:
        Device(device_index).set_current()
        _thread.devices.add(device_index)


def _overlapping(grid: Extent3, block: Extent3, shared_bytes: int) -> Any:
    """This thread's cached launch configuration, without its stream: making one takes longer than a launch."""
    config = _thread.configs.get((grid, block, shared_bytes))
    if config is None:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_bytes
        config.attrs, config.numAttrs = [attribute], 1
        _thread.configs[grid, block, shared_bytes] = config
    return config


def clear(address: int, size: int, device: torch.device) -> None:
    """Enqueue zeros for so many bytes on torch's current stream."""
    (status,) = driver.cuMemsetD8Async(address, 0, size, torch.cuda.current_stream(device).cuda_stream)
    if status:
        raise RuntimeError(f"{size} bytes could not be cleared: {status.name}")


def architecture(device_index: int) -> str:
    """The real architecture of a device, such as ``"sm_90a"``."""
    return architecture_of(torch.cuda.get_device_capability(device_index))


def architecture_of(capability: tuple[int, int]) -> str:
    """The real architecture of a compute capability.

    >>> architecture_of((9, 0)), architecture_of((8, 0))
    ('sm_90a', 'sm_80')
    """
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def kernel_name(source_name: str) -> str:
    """The name of the kernel in a source.

    >>> kernel_name("sm90/gemm_fold_rows.cu")
    'sm90_gemm_fold_rows_kernel'
    """
    return f"{source_name.removesuffix('.cu').replace('/', '_')}_kernel"


def load(source_name: str, macros: Macros, device_index: int, shared_bytes: int = 0) -> Kernel:
    """The kernel of ``csrc/<source_name>``, compiled with ``macros`` for a device.

    ``shared_bytes`` is the most dynamic shared memory of its launches; the kernel does not depend on it. A kernel is
    compiled at most once; later calls and other processes take it from a cache. Threads compile in parallel.

    Raises:
        KernelError: it does not compile, which is a CompileError, or the driver does not load it.
    """
    key = _key_of(source_name, macros)
    if (kernel := _kernels.get((key, device_index))) is None:
        with _lock_of((key, device_index)):
            if (kernel := _kernels.get((key, device_index))) is None:
                kernel = _kernels[key, device_index] = _load(key, device_index)
    kernel.allow(shared_bytes)
    return kernel


def compile_together(wanted: Iterable[tuple[str, Macros]], device_index: int) -> None:
    """Compile sources in other threads, while this thread goes on to :func:`load` them one after the other.

    The first missing source is left to this thread, unless it has to wait for one that is being compiled already.
    Errors are left to ``load`` too.
    """
    if not torch.cuda.is_initialized():  # without a GPU, tests replace ``load``
        return
    new = [key for key in _keys_of(wanted) if (key, device_index) not in _kernels]
    if len(new) > 1:
        arch = architecture(device_index)
        begun = any(_lock_of((key, arch)).locked() for key in new)
        for key in _absent(new, arch)[0 if begun else 1 :]:
            pool.submit(partial(_compile, key, arch), urgent=True)


def compile_ahead(wanted: Iterable[tuple[str, Macros]], arch: str) -> list[tuple[str, Future[float | None]]]:
    """Compile missing sources in other threads, with less priority than those that calls wait for.

    Returns the sources with futures of their compile times in seconds. It calls no driver, so a graph may be captured
    meanwhile.
    """

    def compile_one(key: _Key) -> float | None:
        return _compile(key, arch).seconds

    keys = _absent(_keys_of(wanted), arch)
    return [(key[0], pool.submit(partial(compile_one, key), urgent=False)) for key in keys]


def _keys_of(wanted: Iterable[tuple[str, Macros]]) -> Iterable[_Key]:
    return dict.fromkeys(_key_of(*one) for one in wanted)


def _key_of(source_name: str, macros: Macros) -> _Key:
    return source_name, frozenset(macros.items())


def _lock_of(what: Hashable) -> threading.Lock:
    return _locks.setdefault(what, threading.Lock())


def _absent(keys: Iterable[_Key], arch: str) -> list[_Key]:
    """The keys that are neither compiled, nor being compiled, nor in the cache; cached ones go to ``_compiled``."""
    absent = []
    for key in keys:
        if (key, arch) in _compiled or _lock_of((key, arch)).locked():
            continue
        if (compiled := cached(key[0], dict(key[1]), arch, default_cache())) is None:
            absent.append(key)
        else:
            _compiled[key, arch] = compiled
    return absent


def _compile(key: _Key, arch: str) -> Compiled:
    """Compile a source; if several threads want it, one compiles and the others wait."""
    with _lock_of((key, arch)):
        if (compiled := _compiled.get((key, arch))) is None:
            compiled = _compiled[key, arch] = compile(key[0], dict(key[1]), arch, cache=default_cache())
    return compiled


def _load(key: _Key, device_index: int) -> Kernel:
    arch, source_name = architecture(device_index), key[0]
    compiled = _compile(key, arch)
    _compiled.pop((key, arch), None)
    try:
        code = ObjectCode.from_cubin(compiled.cubin, name=source_name)
        return Kernel(code, kernel_name(source_name), device_index)
    except Exception as error:  # cuda.core has one exception type per CUDA library
        rule, got = f"the driver must load what NVRTC compiles for {arch}", str(error).partition(". ")[0]
        way_out = "update the driver, or take the other extra of gemmconv"
        raise KernelError(f"{rule}, got {got}; {way_out}", f"{rule}, and does not; {way_out}") from error
