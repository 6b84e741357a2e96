"""``direct``: one gather kernel, no workspace, specialised for the layer.

For layers whose work is moving bytes: grouped, depthwise, strided, dilated, of few channels. Products are ordinary
multiplications and additions, in float32 (float64 for float64); of 16-bit types, and of float32 where TF32 may be used,
those of tensor cores where that is faster. Gradients take tensor cores where both are computed at once.
"""

from __future__ import annotations

from gemmconv import tuned
from gemmconv.algorithms.base import Algorithm
from gemmconv.kernels.base import Choice, Config, Pass
from gemmconv.kernels.costs import costs_of
from gemmconv.kernels.cpu import direct as on_cpu
from gemmconv.kernels.direct import forward, forward_mma, grads_mma, input_grad, weight_grad

_COST = costs_of("direct")


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

    def choice(self, config: Config, direction: Pass) -> Choice | None:
        """As of every algorithm, but that estimates of both forward kernels are compared in cycles of their own."""
        if direction != "forward" or tuned.entry_of(config, direction) is not None:
            return super().choice(config, direction)
        if (of_cores := self.choice_of(forward.KERNEL, config, direction)) is None:
            return super().choice(config, direction)
        of_tensor_cores = self.choice_of(forward_mma.KERNEL, config, direction)
        cycles = _COST.tensor_core_margin * forward.KERNEL.cycles(config, of_cores.tile)
        if of_tensor_cores is not None and of_tensor_cores.tile.cycles + _COST.tensor_core_start_cycles < cycles:
            return of_tensor_cores
        return of_cores
