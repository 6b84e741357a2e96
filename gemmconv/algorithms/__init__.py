"""The algorithms, in order of preference."""

from gemmconv.algorithms.direct import Direct
from gemmconv.algorithms.fused import Fused
from gemmconv.algorithms.gemm_col2im import GemmCol2im
from gemmconv.algorithms.native import Native
from gemmconv.kernels.base import Algorithm, Config

ALGORITHMS: tuple[Algorithm, ...] = (Direct(), Fused(), GemmCol2im(), Native())

__all__ = ["ALGORITHMS", "Algorithm", "Config"]
