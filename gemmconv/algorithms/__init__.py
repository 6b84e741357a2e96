"""The algorithms, in order of preference, and all of their kernels by name."""

from gemmconv.algorithms.base import Algorithm
from gemmconv.algorithms.direct import Direct
from gemmconv.algorithms.fused import Fused
from gemmconv.algorithms.gemm_col2im import GemmCol2im
from gemmconv.algorithms.native import Native
from gemmconv.kernels.base import Config, Kernel

ALGORITHMS: tuple[Algorithm, ...] = (Direct(), Fused(), GemmCol2im(), Native())
KERNELS: dict[str, Kernel] = {kernel.name: kernel for algorithm in ALGORITHMS for kernel in algorithm.kernels}

__all__ = ["ALGORITHMS", "KERNELS", "Algorithm", "Config", "Kernel"]
