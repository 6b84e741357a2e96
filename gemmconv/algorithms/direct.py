"""``direct``: one gather kernel, no workspace, specialised for the layer.

For layers whose work is moving bytes: grouped, depthwise, strided, dilated, of few channels. Products are ordinary
multiplications and additions, in float32 (float64 for float64); of 16-bit types, and of float32 where TF32 may be used,
those of tensor cores where that is faster. Gradients take tensor cores where both are computed at once.
"""

from __future__ import annotations

from gemmconv.algorithms.base import Algorithm
from gemmconv.kernels.cpu import direct as on_cpu
from gemmconv.kernels.direct import forward, forward_mma, grads_mma, input_grad, weight_grad


class Direct(Algorithm):
    """See the module."""

    name = "direct"
    summary = "one gather kernel, no workspace, specialised for the layer"
    kernels = (
        forward.KERNEL,
        forward_mma.KERNEL,
        input_grad.KERNEL,
        weight_grad.KERNEL,
        grads_mma.KERNEL,
        on_cpu.KERNEL,
    )
