"""Under torch.compile: how inductor lowers the operators, and what the code that it generates calls.

Inductor knows nothing of a library's operator. It would hand it tensors as they were traced: where it has brought a
network's convolutions to channels_last, copies turn them round on both sides of ours. And it would call the dispatcher,
two of whose keys Python serves: 13 us before anything is done. Convolutions of torch's it lowers, and so, here, ours:
images come in channels_last where those do, and a call is known as a plain one is, in 2 us. Kernels are compiled while
inductor goes on.

Where torch lacks what that takes, inductor does with the operators as it would.
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from gemmconv.dispatch import are_dense
from gemmconv.kernels.base import PASSES, Pass
from gemmconv.ops import plain
from gemmconv.ops.implementation import (
    Form,
    ahead_of,
    launches_of,
    name_of,
    planned,
    plans,
    prepared,
    signature,
    without_data,
)
from gemmconv.ops.schemas import FAKES, OPERATORS, TENSOR_COUNTS, Arguments, Tensors, WithoutData, taken_apart

_CASTING, _CASTS = "conv_transpose2d_casting", Form(dtype=torch.float32)

# How many of an operator's first arguments are images.
_IMAGES: dict[Pass, int] = {"forward": 1, "input_grad": 1, "weight_grad": 2, "grads": 2}


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    call, key = plain.known(input, weight, bias, marshal.dumps(arguments, 2))
    if call is None:
        call = plain.keep(key, plain.prepare(input, weight, bias, arguments))
    output: Tensor = (call or _dispatched("forward", arguments))(input, weight, bias)
    return output


def _casting(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """A call that casts weight and bias along with what it does; gradients are the dispatcher's."""
    tensors, parameters = (input, weight, bias), (weight, bias)
    call, key = plain.known(*tensors, marshal.dumps((arguments,), 2))  # no other call's arguments
    if call is None and key is not None and are_dense(*tensors) and plain.are_packed(parameters):
        recorded = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
        if not recorded and all(one is None or one.dtype is torch.float32 for one in parameters):
            low = input, *(without_data(one, input.dtype) for one in parameters)
            call = plain.keep(key, prepared("forward", low, None, arguments, _CASTS))
    output: Tensor = call(*tensors) if call else OPERATORS[_CASTING](*tensors, *arguments)
    return output


def _gradient(direction: Pass) -> Callable[..., Any]:
    where = name_of(direction)
    count = TENSOR_COUNTS[where]
    missing = [None] * (3 - count)

    def gradient(*inputs: Any) -> Any:
        tensors, arguments = inputs[:count], inputs[count:]
        key = plain.signature_of_gradient(*tensors, *missing, (direction, marshal.dumps(arguments, 2)))
        call: Callable[..., Any] | None = plans.get(key)
        if call is None and key is not None and are_dense(*tensors):
            call = planned(key, lambda: prepared(direction, *taken_apart(where, inputs)))
        return (call or _dispatched(direction, arguments))(*tensors)

    return gradient


def _dispatched(direction: Pass, arguments: Arguments) -> Callable[..., Any]:
    """The operator, for what is no plain call: a profiler or a mode is on, gradients are recorded."""
    return lambda *tensors: OPERATORS[name_of(direction)](*tensors, *arguments)


@lru_cache(maxsize=1)
def _lower() -> None:
    """Tell inductor, once."""
    with suppress(AttributeError, ImportError, KeyError, TypeError):
        from torch._inductor import ir, lowering
        from torch._inductor.virtualized import V

        as_traced, as_channels_last = lowering.constrain_to_fx_strides, ir.ExternKernel.require_channels_last
        add, view = (lowering.lowerings[one] for one in (torch.ops.aten.add.Tensor, torch.ops.aten.view.default))

        def is_better_behind(bias: Any, users: Iterable[Any]) -> bool:
            """Whether it is computed, cast say, by a kernel for the call alone, and added by one that is there."""
            computed = isinstance(bias, ir.TensorBox) and isinstance(getattr(bias.data, "data", None), ir.Pointwise)
            return computed and all(torch.Tag.pointwise in getattr(user.target, "tags", ()) for user in users)

        class Served(ir.FallbackKernel):
            """An operator's call, past the dispatcher where the code is Python."""

            def __init__(self, *arguments: Any, **more: Any) -> None:
                super().__init__(*arguments, **more)
                name = self.python_kernel_name
                if not V.graph.cpp_wrapper:  # what is generated is kept, and may be run with another gemmconv
                    self.python_kernel_name = f"getattr({name}, 'served', {name})"

        def lower(direction: Pass, *inputs: Any, operator: Any = None, form: Form | None = None) -> Any:
            node, images = V.graph.current_node, _IMAGES[direction]
            operator = operator or OPERATORS[name_of(direction)]
            in_last = images if V.graph.layout_opt and _are_known(node.args[:images]) else 0
            last = [as_channels_last(one) for one in inputs[:in_last]]
            others, _ = as_traced(node, *[None] * in_last, *inputs[in_last:])
            defaults = [one.default_value for one in operator._schema.arguments[len(inputs) :]]
            inputs = *last, *others[in_last:], *defaults
            made = Served.create(operator, *inputs)
            if not V.graph.cpp_wrapper:  # whose code may be for another process
                _compile_ahead(direction, inputs, form)
            return torch.utils._pytree.tree_map_only(ir.IRNode, ir.TensorBox.create, made)

        def lower_forward(*inputs: Any) -> Any:
            node = V.graph.current_node
            if uncast := _all_uncast(node.args[1:3], V.graph):
                casting = {"operator": OPERATORS[_CASTING], "form": _CASTS}
                return lower("forward", inputs[0], *uncast, *inputs[3:], **casting)
            if len(inputs) < 3 or not is_better_behind(inputs[2], node.users):
                return lower("forward", *inputs)
            return add(lower("forward", *inputs[:2], None, *inputs[3:]), view(inputs[2], [-1, 1, 1]))

        for direction in PASSES:
            lowered = lower_forward if direction == "forward" else partial(lower, direction)
            lowering.register_lowering(OPERATORS[name_of(direction)], type_promotion_kind=None)(lowered)


def _are_known(images: Arguments) -> bool:
    """Whether all sizes are, or are from now on: a graph of torch's convolutions is for these alone, too.

    Args:
        images: nodes of the graph.
    """
    with suppress(Exception):  # of one that data decide
        return all(int(size) >= 0 for one in images for size in one.meta["val"].shape)
    return False


def _all_uncast(parameters: Arguments, graph: Any) -> list[Any] | None:
    """A call's weight and bias before they are cast for it alone, None where one of them is not."""
    found = [None if node is None else _uncast(node, graph) for node in parameters]
    return found if found and all(parameters[i] is None or one for i, one in enumerate(found)) else None


def _uncast(node: Any, graph: Any) -> Any:
    """Inductor's float32 input of a graph that is cast to 16 bits for one call, and no more; None of all else.

    What has another use may be written to between the cast and the call.
    """
    if node.target is not torch.ops.prims.convert_element_type.default or len(node.users) > 1:
        return None
    (given, _), to = node.args, node.meta["val"].dtype
    if given.op != "placeholder" or len(given.users) > 1:
        return None
    return graph.graph_inputs[given.target] if given.meta["val"].dtype is torch.float32 and to.itemsize == 2 else None


def _compile_ahead(direction: Pass, inputs: Arguments, form: Form | None) -> None:
    """Have what a call will launch compiled in the background, if all its sizes are known.

    Args:
        direction: which operator.
        inputs: inductor's of it, whose formats are decided.
        form: as of :func:`prepared`.
    """
    with suppress(Exception):  # of what is no integer yet; the call tells what is wrong with it
        nodes, sizes, options = taken_apart(name_of(direction), inputs)
        tensors: Tensors = tuple(None if one is None else _without_data(one, nodes[0]) for one in nodes)
        key = direction, *map(signature, tensors), repr((sizes, options)), form
        ahead_of(key, tensors[0].device, lambda: lambda: launches_of(direction, tensors, sizes, options, form))


def _without_data(node: Any, first: Any) -> WithoutData:
    """A tensor as inductor has it, of the dtype of the first of a call, to which the others may be cast."""
    shape, strides = (tuple(map(int, of)) for of in (node.get_size(), node.get_stride()))
    return WithoutData.of(shape, strides, first.get_dtype(), node.get_device())


def _faked(fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake, which torch.compile calls before inductor, imported by then, lowers the operator."""

    def call(*inputs: Any, **named: Any) -> Any:
        if "torch._inductor.lowering" in sys.modules:
            _lower()
        return fake(*inputs, **named)

    return call


_served: dict[str, Callable[..., Any]] = {
    name_of(one): _forward if one == "forward" else _gradient(one) for one in PASSES
}
for _name, _fake in FAKES.items():
    torch.library.register_fake(f"gemmconv::{_name}", _faked(_fake))
for _name, _call in _served.items():
    OPERATORS[_name].served = _call  # generated code names it so, also what another process generated
OPERATORS[_CASTING].served = _casting
