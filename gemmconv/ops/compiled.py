"""Under torch.compile: how inductor lowers the operators, and what the code that it generates calls.

Inductor knows nothing of a library's operator. It would hand it tensors as they were traced: where it has brought a
network's convolutions to channels_last, copies turn them round on both sides of ours. And it would call the dispatcher,
two of whose keys Python serves: 13 us before anything is done. Convolutions of torch's it lowers, and so, here, ours:
images come in channels_last where those do, and a call is known as a plain one is, in 2 us.

Where torch lacks what that takes, inductor does with the operators as it would.
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from gemmconv.dispatch import are_dense
from gemmconv.ops import plain
from gemmconv.ops.implementation import planned, plans, prepared
from gemmconv.ops.schemas import FAKES, OPERATORS, Arguments, Tensors


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    call, key = plain.known(input, weight, bias, marshal.dumps(arguments, 2))
    if call is None and (call := plain.prepare(input, weight, bias, arguments)) is not None:
        plain.keep(key, call)
    return (call or _dispatched("", arguments))(input, weight, bias)


def _input_grad(grad_output: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    input_grad: Tensor = _gradient("input_grad", (grad_output, None, weight), arguments)
    return input_grad


def _weight_grad(grad_output: Tensor, input: Tensor, *arguments: Any) -> Tensor:
    weight_grad: Tensor = _gradient("weight_grad", (grad_output, input, None), arguments)
    return weight_grad


def _grads(grad_output: Tensor, input: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    grads: tuple[Tensor, Tensor] = _gradient("grads", (grad_output, input, weight), arguments)
    return grads


def _gradient(direction: Literal["input_grad", "weight_grad", "grads"], tensors: Tensors, arguments: Arguments) -> Any:
    """What an operator of gradients returns.

    Args:
        direction: which operator.
        tensors: grad_output, input and weight, None for what it does not take.
        arguments: those after them.
    """
    key = plain.signature_of_gradient(*tensors, (direction, marshal.dumps(arguments, 2)))
    given = tuple(one for one in tensors if one is not None)
    call: Callable[..., Any] | None = plans.get(key)
    if call is None and key is not None and are_dense(*given):
        sizes, options = (None, arguments) if direction == "grads" else (tuple(arguments[0]), arguments[1:])
        call = planned(key, lambda: prepared(direction, given, sizes, options))
    return (call or _dispatched(f"_{direction}", arguments))(*given)


def _dispatched(name: str, arguments: Arguments) -> Callable[..., Any]:
    """The operator, for what is no plain call: a profiler or a mode is on, gradients are recorded."""
    operator = OPERATORS[f"conv_transpose2d{name}"]
    return lambda *tensors: operator(*tensors, *arguments)


# By operator: what serves it, and how many of its first tensors are images.
_SERVED: dict[str, tuple[Callable[..., Any], int]] = {
    "conv_transpose2d": (_forward, 1),
    "conv_transpose2d_input_grad": (_input_grad, 1),
    "conv_transpose2d_weight_grad": (_weight_grad, 2),
    "conv_transpose2d_grads": (_grads, 2),
}


@lru_cache(maxsize=1)
def _lower() -> None:
    """Tell inductor, once."""
    with suppress(AttributeError, ImportError, TypeError):
        from torch._inductor import ir, lowering
        from torch._inductor.virtualized import V

        class Served(ir.FallbackKernel):
            """An operator's call, past the dispatcher where the code is Python."""

            def __init__(self, *arguments: Any, **more: Any) -> None:
                super().__init__(*arguments, **more)
                if not V.graph.cpp_wrapper:
                    self.python_kernel_name = f"{self.python_kernel_name}.served"

        def lowered(operator: Any, images: int) -> Callable[..., Any]:
            def lower(*inputs: Any) -> Any:
                in_last = images if V.graph.layout_opt else 0  # which brings torch's convolutions to channels_last
                last = [ir.ExternKernel.require_channels_last(one) for one in inputs[:in_last]]
                node = V.graph.current_node
                others, _ = lowering.constrain_to_fx_strides(node, *[None] * in_last, *inputs[in_last:])
                defaults = [one.default_value for one in operator._schema.arguments[len(inputs) :]]
                made = Served.create(operator, *last, *others[in_last:], *defaults)
                return torch.utils._pytree.tree_map_only(ir.IRNode, ir.TensorBox.create, made)

            return lower

        for name, (_, images) in _SERVED.items():
            lowering.register_lowering(OPERATORS[name], type_promotion_kind=None)(lowered(OPERATORS[name], images))


def _faked(fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake, which torch.compile calls before inductor, imported by then, lowers the operator."""

    def call(*inputs: Any, **named: Any) -> Any:
        if "torch._inductor.lowering" in sys.modules:
            _lower()
        return fake(*inputs, **named)

    return call


for _name, _fake in FAKES.items():
    torch.library.register_fake(f"gemmconv::{_name}", _faked(_fake) if _name in _SERVED else _fake)
for _name, (_served, _) in _SERVED.items():
    OPERATORS[_name].served = _served  # generated code names it so, also what another process generated
