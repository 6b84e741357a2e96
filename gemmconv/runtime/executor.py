"""Runs the steps of a call, whose operands are addresses: in C where the extension is there, else in Python.

Both take the same steps and make the same calls of the driver in the same order; but calls that come with the same
addresses again are one launch of a graph in C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from gemmconv.extension import exchange_of_tensors, extension
from gemmconv.runtime import cublas, launch, tensor_map

Extent3 = tuple[int, int, int]
Place = tuple[int, int]  # index of an address, and bytes behind it
Run = Callable[..., int]  # addresses -> 0, or 1 + the index of one that is not aligned, and then nothing was done

Allocation = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, and the dtype

# torch.empty_strided on the current device, as what torch.compile generates calls it, in a third of the time.
_allocate = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class Launch(NamedTuple):
    """A launch of a loaded kernel: its params, and what goes into them.

    Attributes:
        pointers: of each its offset in params, the index of an address, and bytes behind it.
        maps: of each tensor map the same, and the arguments of ``tensor_map.encode`` after the address.
    """

    kernel: launch.Kernel
    grid: Extent3
    block: Extent3
    shared_bytes: int
    overlaps: bool
    params: bytes
    pointers: Sequence[tuple[int, int, int]]
    maps: Sequence[tuple[int, int, int, tuple[Any, ...]]]


class Matrices(NamedTuple):
    """See :class:`gemmconv.kernels.program.Matrices`."""

    place: Place
    dtype: torch.dtype
    leading: int
    stride: int


class Gemm(NamedTuple):
    """See :class:`gemmconv.kernels.program.Gemm`."""

    extents: Extent3
    operands: Sequence[Matrices]
    batch: int
    transposed: tuple[bool, bool]
    tf32: bool
    accumulates: bool


class Zero(NamedTuple):
    """Memory that is cleared."""

    place: Place
    size: int


Step = Launch | Gemm | Zero


class Prepared(NamedTuple):
    """Steps that are ready.

    Attributes:
        run: takes addresses, the first of which are multiples of the alignments, and enqueues the steps on torch's
            current stream of the device.
        call: makes a call with tensors in C; None where there is no such thing. Takes what is allocated for outputs,
            which tensor of the call each operand is, what is allocated for scratch memory, and the call that serves
            where another device is current, or a tensor is not aligned.
    """

    run: Run
    call: Callable[..., Callable[..., Any]] | None


def prepare(device: torch.device, alignments: Sequence[int], steps: Sequence[Step]) -> Prepared:
    """Prepare steps on a device, for addresses of which the first are multiples of ``alignments``."""
    in_c = extension()
    if in_c is None or device.type != "cuda":
        return Prepared(_prepare_in_python(device, alignments, steps), None)
    products = any(isinstance(step, Gemm) for step in steps)
    functions = cublas.addresses() if products else (0, 0)
    program = in_c.Program(device.index, functions, tuple(alignments), tuple(_described(step) for step in steps))
    index, device_of, stream_of = device.index, torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    blas_of, exchange = torch._C._cuda_getCurrentBlasHandle, exchange_of_tensors()

    def run(*addresses: int) -> int:
        answer: int = program.run(stream_of(index), blas_of() if products else 0, *addresses)
        return answer

    def call(
        outputs: Sequence[Allocation],
        operands: Sequence[int],
        scratch: Allocation | None,
        otherwise: Callable[..., Any],
    ) -> Callable[..., Any]:
        of_call = _allocate, tuple(outputs), bytes(operands), scratch
        return in_c.Call(program, exchange, index, *of_call, (device_of, blas_of if products else None), otherwise).run

    return Prepared(_on_device(index, run), None if exchange is None or _allocate is None else call)


def _on_device(index: int, run: Run) -> Run:
    """The same with the device current, and its context this thread's: for torch's handle, and calls to come."""
    device_of = torch._C._cuda_getDevice

    def run_on_device(*addresses: int) -> int:
        if device_of() != index:
            with torch.cuda.device(index):
                return run_on_device(*addresses)
        launch.make_current(index)
        return run(*addresses)

    return run_on_device


def _described(step: Step) -> tuple[Any, ...]:
    """A step as csrc/executor.c takes it."""
    if isinstance(step, Zero):
        return (2, *step.place, step.size)
    if isinstance(step, Gemm):
        of = [(*one.place, cublas.DATA_TYPE[one.dtype], one.leading, one.stride) for one in step.operands]
        compute = cublas.compute_type(step.operands[2].dtype, step.tf32)
        double = step.operands[2].dtype == torch.float64
        scalars = (compute, int(double), int(step.accumulates))
        return (1, *step.extents, *map(int, step.transposed), *of[0], *of[1], *of[2], step.batch, *scalars)
    maps = tuple((offset, *place, *tensor_map.described(*of)) for offset, *place, of in step.maps)
    shape = (*step.grid, *step.block, step.shared_bytes, int(step.overlaps))
    return 0, step.kernel.address, step.kernel.name, shape, step.params, tuple(step.pointers), maps


def _prepare_in_python(device: torch.device, alignments: Sequence[int], steps: Sequence[Step]) -> Run:
    does = [_PREPARE[type(step)](step, device) for step in steps]
    index = device.index if device.type == "cuda" and torch.cuda.is_available() else None

    def run(*addresses: int) -> int:
        for i, alignment in enumerate(alignments):
            if addresses[i] % alignment:
                return i + 1
        for do in does:
            do(addresses)
        return 0

    return run if index is None else _on_device(index, run)


def _prepare_launch(step: Launch, device: torch.device) -> Callable[[Sequence[int]], None]:
    kernel, size = step.kernel, len(step.params)
    shape, last = (step.grid, step.block), (step.shared_bytes, step.overlaps)

    def do(addresses: Sequence[int]) -> None:
        params = (ctypes.c_char * size).from_buffer_copy(step.params)
        for offset, index, more in step.pointers:
            # A null pointer, of a bias that is not there, stays one.
            address = addresses[index]
            ctypes.c_ulonglong.from_buffer(params, offset).value = address + more if address else 0
        for offset, index, more, described in step.maps:
            ctypes.memmove(ctypes.byref(params, offset), tensor_map.encode(addresses[index] + more, *described), 128)
        kernel.launch(*shape, params, *last)

    return do


def _prepare_gemm(step: Gemm, device: torch.device) -> Callable[[Sequence[int]], None]:
    a, b, c = ((one.dtype, one.leading, one.stride) for one in step.operands)
    gemm = cublas.StridedBatchedGemm(
        step.extents, a, b, c, step.batch, step.transposed, tf32=step.tf32, accumulates=step.accumulates
    )
    places = [one.place for one in step.operands]

    def do(addresses: Sequence[int]) -> None:
        gemm(*(addresses[index] + more for index, more in places))

    return do


def _prepare_zero(step: Zero, device: torch.device) -> Callable[[Sequence[int]], None]:
    index, more = step.place

    def do(addresses: Sequence[int]) -> None:
        if step.size:
            launch.clear(addresses[index] + more, step.size, device)

    return do


_PREPARE: dict[type, Callable[..., Callable[[Sequence[int]], None]]] = {
    Launch: _prepare_launch,
    Gemm: _prepare_gemm,
    Zero: _prepare_zero,
}
