"""Lowers the operators for inductor, the compiler behind torch.compile, and serves the calls of the code it generates.

Inductor knows nothing of a library's operator. It would pass tensors in the format in which they were traced: where it
has changed a network's convolutions to channels_last, it would transpose before and after each of ours. And it would
call the dispatcher, two of whose keys are served in Python, which costs 13 us. So our operators are lowered as torch's
convolutions are: images come in channels_last where those of torch's convolutions do, and a call is looked up as a
plain one is, in 2 us. Kernels are compiled in the background while inductor goes on.

Where this torch lacks the interfaces that this needs, inductor treats the operators by its defaults.
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
from gemmconv.ops import plain, signatures, volumes
from gemmconv.ops.ahead import compile_in_background, launches_of
from gemmconv.ops.autocast import have_no_gaps
from gemmconv.ops.call_cache import entries, find_or_make
from gemmconv.ops.configs import Convention
from gemmconv.ops.implementation import prepare_call
from gemmconv.ops.schemas import (
    FAKES,
    OPERATORS,
    TENSOR_COUNTS,
    Arguments,
    Tensors,
    WithoutData,
    operator_name,
    split_arguments,
    without_data,
)
from gemmconv.ops.signatures import gradient_signature

_CASTING, _CASTS = "conv_transpose2d_casting", Convention(parameter_dtype=torch.float32)


# Calls of generated code. The operators serve those that are not plain: a profiler or a mode is on, or gradients of a
# gradient are recorded.


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    call, key = signatures.find_call(input, weight, bias, marshal.dumps(arguments, 2))
    if call is None:
        call = find_or_make(key, lambda: plain.prepare(input, weight, bias, arguments))
    return call(input, weight, bias) if call else OPERATORS["conv_transpose2d"](input, weight, bias, *arguments)


def _casting(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """A call whose kernels cast weight and bias; the dispatcher serves it if gradients are recorded."""
    tensors, parameters = (input, weight, bias), (weight, bias)
    call, key = signatures.find_call(*tensors, marshal.dumps((arguments,), 2))  # a tuple, so unlike other calls' keys
    if call is None and key is not None and are_dense(*tensors) and have_no_gaps(parameters):
        recorded = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
        if not recorded and all(one is None or one.dtype is torch.float32 for one in parameters):
            low = input, *(without_data(one, input.dtype) for one in parameters)
            call = find_or_make(key, lambda: prepare_call("forward", low, None, arguments, _CASTS))
    return call(*tensors) if call else OPERATORS[_CASTING](*tensors, *arguments)


def _gradient(direction: Pass) -> Callable[..., Any]:
    where = operator_name(direction)
    count = TENSOR_COUNTS[where]
    missing = [None] * (3 - count)

    def gradient(*inputs: Any) -> Any:
        tensors, arguments = inputs[:count], inputs[count:]
        key = gradient_signature(*tensors, *missing, (direction, marshal.dumps(arguments, 2)))
        call = entries.get(key)
        if call is None and key is not None and are_dense(*tensors):
            call = find_or_make(key, lambda: prepare_call(direction, *split_arguments(where, inputs)))
        return call(*tensors) if call else OPERATORS[where](*inputs)

    return gradient


def _volume(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    call, key = signatures.find_call(input, weight, bias, marshal.dumps(("volume", arguments), 2))
    if call is None and key is not None and are_dense(input, weight, bias):
        volume = volumes.volume_of(input, weight, *arguments)
        call = find_or_make(key, lambda: volumes.prepare((input, weight, bias), volume))
    return call(input, weight, bias) if call else volumes.OPERATOR(input, weight, bias, *arguments)


@lru_cache(maxsize=1)
def _lower() -> None:
    """Register the lowerings with inductor, once."""
    with suppress(AttributeError, ImportError, KeyError, TypeError):
        from torch._inductor import ir, lowering
        from torch._inductor.virtualized import V

        as_traced, as_channels_last = lowering.constrain_to_fx_strides, ir.ExternKernel.require_channels_last
        add, view = (lowering.lowerings[one] for one in (torch.ops.aten.add.Tensor, torch.ops.aten.view.default))

        def is_better_added_after(bias: Any, users: Iterable[Any]) -> bool:
            """Whether a bias would cost a kernel of its own, such as a cast, and pointwise users can add it instead."""
            computed = isinstance(bias, ir.TensorBox) and isinstance(getattr(bias.data, "data", None), ir.Pointwise)
            return computed and all(torch.Tag.pointwise in getattr(user.target, "tags", ()) for user in users)

        class Served(ir.FallbackKernel):
            """An operator's call, which skips the dispatcher if the generated code is Python."""

            def __init__(self, *arguments: Any, **more: Any) -> None:
                super().__init__(*arguments, **more)
                name = self.python_kernel_name
                if not V.graph.cpp_wrapper:  # cached code may run with a gemmconv without ``served``
                    self.python_kernel_name = f"getattr({name}, 'served', {name})"

        def lower(direction: Pass, *inputs: Any, casts: bool = False) -> Any:
            node, operator = V.graph.current_node, OPERATORS[_CASTING if casts else operator_name(direction)]
            images = 2 if direction in ("weight_grad", "grads") else 1  # first arguments that are images
            in_last = images if V.graph.layout_opt and _have_fixed_sizes(node.args[:images]) else 0
            last = [as_channels_last(one) for one in inputs[:in_last]]
            others, _ = as_traced(node, *[None] * in_last, *inputs[in_last:])
            defaults = [one.default_value for one in operator._schema.arguments[len(inputs) :]]
            inputs = *last, *others[in_last:], *defaults
            made = Served.create(operator, *inputs)
            if not V.graph.cpp_wrapper:  # code in C++ may be for another process
                _compile_ahead(direction, inputs, _CASTS if casts else None)
            return torch.utils._pytree.tree_map_only(ir.IRNode, ir.TensorBox.create, made)

        def lower_forward(*inputs: Any) -> Any:
            node = V.graph.current_node
            if uncast := _find_all_uncast(node.args[1:3], V.graph):
                return lower("forward", inputs[0], *uncast, *inputs[3:], casts=True)
            if len(inputs) < 3 or not is_better_added_after(inputs[2], node.users):
                return lower("forward", *inputs)
            return add(lower("forward", *inputs[:2], None, *inputs[3:]), view(inputs[2], [-1, 1, 1]))

        def lower_volume(*inputs: Any) -> Any:
            node: Any = V.graph.current_node
            if not all(isinstance(size, int) for size in node.args[0].meta["val"].shape):
                return by_default(*inputs)  # torch 2.13 cannot compare strides of three dynamic sizes
            inputs, _ = as_traced(node, *inputs)
            if not V.graph.cpp_wrapper:
                with suppress(Exception):  # as in _compile_ahead
                    tensors: Any = (None if one is None else _without_data(one, inputs[0]) for one in inputs[:3])
                    volumes.compile_forward_ahead(*tensors, *inputs[3:])
            return ir.TensorBox.create(Served.create(of_volumes, *inputs))

        of_volumes = volumes.OPERATOR._opoverload
        by_default = lowering.fallback_handler(of_volumes, add_to_fallback_set=False)
        lowering.register_lowering(of_volumes, type_promotion_kind=None)(lower_volume)
        for direction in PASSES:
            lowered = lower_forward if direction == "forward" else partial(lower, direction)
            lowering.register_lowering(OPERATORS[operator_name(direction)], type_promotion_kind=None)(lowered)


def _have_fixed_sizes(images: Arguments) -> bool:
    """Whether all sizes of these nodes are fixed. Asking fixes them: a graph of torch's convolutions fixes them too."""
    with suppress(Exception):  # data decide over a size
        return all(int(size) >= 0 for one in images for size in one.meta["val"].shape)
    return False


def _find_all_uncast(parameters: Arguments, graph: Any) -> list[Any] | None:
    """A call's weight and bias before casts that serve this call alone; None unless each of them has such a cast."""
    found = [None if node is None else _find_uncast(node, graph) for node in parameters]
    return found if found and all(parameters[i] is None or one for i, one in enumerate(found)) else None


def _find_uncast(node: Any, graph: Any) -> Any:
    """The float32 input of a graph behind a node that casts it to 16 bits for one call; None for any other node.

    An input with another use may be modified between the cast and the call.
    """
    if node.target is not torch.ops.prims.convert_element_type.default or len(node.users) > 1:
        return None
    (source, _), to = node.args, node.meta["val"].dtype
    if source.op != "placeholder" or len(source.users) > 1:
        return None
    return graph.graph_inputs[source.target] if source.meta["val"].dtype is torch.float32 and to.itemsize == 2 else None


def _compile_ahead(direction: Pass, inputs: Arguments, convention: Convention | None) -> None:
    """Compile in the background what a call will launch, if all sizes of ``inputs``, inductor's nodes, are known."""
    with suppress(Exception):  # a size is no integer yet; if anything is wrong, the call raises it
        nodes, sizes, options = split_arguments(operator_name(direction), inputs)
        tensors: Tensors = tuple(None if one is None else _without_data(one, nodes[0]) for one in nodes)
        key = direction, repr((sizes, options)), convention
        compile_in_background(key, tensors, lambda *of: launches_of(direction, of, sizes, options, convention))


def _without_data(node: Any, first: Any) -> WithoutData:
    """The tensor of a node, in the dtype of a call's first node, to which the others may be cast."""
    shape, strides = (tuple(map(int, of)) for of in (node.get_size(), node.get_stride()))
    return WithoutData.of(shape, strides, first.get_dtype(), node.get_device())


def _with_lowering(fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake that also registers lowerings: torch.compile calls it after importing inductor, and before lowering."""

    def call(*inputs: Any) -> Any:
        if "torch._inductor.lowering" in sys.modules:
            _lower()
        return fake(*inputs)

    return call


for _name, _fake in FAKES.items():
    torch.library.register_fake(f"gemmconv::{_name}", _with_lowering(_fake))
for _direction in PASSES:  # ``served`` is a name in generated code, which another process may have generated
    OPERATORS[operator_name(_direction)].served = _forward if _direction == "forward" else _gradient(_direction)
OPERATORS[_CASTING].served = _casting
volumes.OPERATOR.register_fake(_with_lowering(volumes.fake))
volumes.OPERATOR._opoverload.served = _volume  # type: ignore[attr-defined]
