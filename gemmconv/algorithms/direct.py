"""``direct``: one gather kernel, no workspace, specialised for the layer.

It is for layers whose work is moving bytes: grouped, depthwise, strided or dilated ones, and those with few channels.
CUDA cores multiply and add in float32 (float64 for float64). Tensor cores take over where they are faster, for 16-bit
types and for float32 if TF32 may be used. Gradients take tensor cores if both are computed at once.
"""

from __future__ import annotations

from gemmconv.algorithms.base import Algorithm
from gemmconv.kernels.cpu import direct as on_cpu
from gemmconv.kernels.direct import forward, forward_mma, grads_mma, input_grad, weight_grad


class Direct(Algorithm):
    name = "direct"
    kernels = (
        forward.KERNEL,
        forward_mma.KERNEL,
        input_grad.KERNEL,
        weight_grad.KERNEL,
        grads_mma.KERNEL,
        on_cpu.KERNEL,
    )
