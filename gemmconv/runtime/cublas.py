"""cuBLAS's strided-batched GEMM, on torch's own handle.

torch's matrix products take their float32 mode from torch.backends.cuda.matmul, a setting of its own that a
convolution must neither follow nor write. Here the mode is an argument of the call. The library is the one that torch
is linked with, found through torch's own shared object, so that its handle, stream and workspace can be used.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from gemmconv.errors import KernelError

Operand = tuple[torch.dtype, int, int]

_DATA_TYPE = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32, _COMPUTE_64F = 68, 77, 70  # cublasComputeType_t
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16  # cublasMath_t: split-K sums stay in the compute type, not C's
_GEMM_DEFAULT = -1  # cublasGemmAlgo_t


@cache
def library() -> Any:
    """cuBLAS, in the library that torch is linked with.

    Raises:
        KernelError: it is not there.
    """
    try:
        found = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so"))
        gemm = found.cublasGemmStridedBatchedEx  # a symbol look-up follows the library's own dependencies
    except (OSError, AttributeError) as error:
        raise KernelError(f"torch must be linked with cuBLAS as a shared library, got {error}") from error
    integer, pointer, stride = ctypes.c_int, ctypes.c_void_p, ctypes.c_longlong
    gemm.argtypes = [
        *(pointer, integer, integer, integer, integer, integer, pointer),  # handle, ops, m, n, k, alpha
        *(pointer, integer, integer, stride),  # A
        *(pointer, integer, integer, stride),  # B
        *(pointer, pointer, integer, integer, stride),  # beta, C
        *(integer, integer, integer),  # batch, compute type, algorithm
    ]
    found.cublasSetMathMode.argtypes = [pointer, integer]
    return found


def addresses() -> tuple[int, int]:
    """Addresses of cublasGemmStridedBatchedEx and cublasSetMathMode."""
    functions = library().cublasGemmStridedBatchedEx, library().cublasSetMathMode
    first, second = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return first, second


class StridedBatchedGemm:
    """C = op(A) op(B) + beta C in cuBLAS's column-major terms, with everything but addresses fixed.

    The arguments are the fields of :class:`gemmconv.kernels.program.Gemm`. An operand is given by its type, and by the
    elements from one column and from one matrix to the next.
    """

    def __init__(
        self,
        extents: tuple[int, int, int],
        a: Operand,
        b: Operand,
        c: Operand,
        batch: int,
        transposed: tuple[bool, bool],
        *,
        tf32: bool,
        accumulates: bool,
    ) -> None:
        self._extents, self._transposed, self._batch = extents, transposed, batch
        self._matrices = [(_DATA_TYPE[dtype], *steps) for dtype, *steps in (a, b, c)]
        self._is_double, self._accumulates = c[0] == torch.float64, accumulates
        self._compute_type = _COMPUTE_64F if self._is_double else _COMPUTE_32F_FAST_TF32 if tf32 else _COMPUTE_32F
        self._scalars = ((ctypes.c_double if self._is_double else ctypes.c_float) * 2)(1, accumulates)

    def described(self, places: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """The numbers that csrc/executor.c parses, for operands at these places."""
        operands = (number for pair in zip(places, self._matrices, strict=True) for one in pair for number in one)
        how = self._batch, self._compute_type, self._is_double, self._accumulates
        return *self._extents, *self._transposed, *operands, *how

    def __call__(self, *addresses: int) -> None:
        """Enqueue the product of A, B and C at these device addresses on torch's current stream.

        torch's handle is that of this thread, device and stream. torch sets its mode whenever it takes the handle, so
        the default float32 mode with float32 sums, which is set here, does not outlive the call.
        """
        a, b, c = ((address, *one) for address, one in zip(addresses, self._matrices, strict=True))
        alpha = ctypes.addressof(self._scalars)
        beta = alpha + ctypes.sizeof(self._scalars) // 2
        how = self._batch, self._compute_type, _GEMM_DEFAULT
        handle, cublas = torch.cuda.current_blas_handle(), library()
        _check(cublas.cublasSetMathMode(handle, _DISALLOW_REDUCED_PRECISION_REDUCTION), "cublasSetMathMode")
        gemm = cublas.cublasGemmStridedBatchedEx
        status = gemm(handle, *self._transposed, *self._extents, alpha, *a, *b, beta, *c, *how)
        _check(status, "cublasGemmStridedBatchedEx")


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call} failed with cublasStatus_t {status}")
