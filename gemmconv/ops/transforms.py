"""The operators as functions, which call the dispatcher, or pass through every level of torch.func's transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gemmconv import flops, validation
from gemmconv.dispatch import loses_a_tangent
from gemmconv.ops.autocast import KEYS, is_autocasting, with_autocast
from gemmconv.ops.schemas import ARGUMENT_NAMES, OPERATORS, Arguments, register

Rules = tuple[Callable[..., None], Callable[..., Arguments], Callable[..., Any]]  # set-up, gradient, tangent

_PUBLIC = ("conv_transpose2d", "im2col", "col2im")
_TRANSFORMABLE: dict[str, type[torch.autograd.Function]] = {}


def _route(name: str) -> Callable[..., Any]:
    """A function that calls an operator, or under torch.func an autograd function that all transforms understand."""
    operator, names = OPERATORS[name], ARGUMENT_NAMES[name]

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*inputs)
        if name in _PUBLIC:  # arguments of the others have been checked before
            validation.in_64_bits(name, zip(names, inputs, strict=False))
        flops.register()
        if not torch._C._are_functorch_transforms_active():
            return operator(*inputs)
        if loses_a_tangent():
            raise NotImplementedError(
                f"{name}: torch.func.jvp inside torch.func.jvp has a rule for torch's own operator alone; use "
                'algorithm="auto" with precision=None, in a call inside of both'
            )
        if name == "conv_transpose2d" and is_autocasting(inputs[0].device.type):
            # Cast before the transforms: the tensors that they save for gradients must have one dtype.
            return _WITH_AUTOCAST[inputs[0].device.type](*inputs)
        return _TRANSFORMABLE[name].apply(*map(_Wrapped.wrap, inputs))

    return call


conv_transpose2d = _route("conv_transpose2d")
conv_transpose2d_input_grad = _route("conv_transpose2d_input_grad")
conv_transpose2d_weight_grad = _route("conv_transpose2d_weight_grad")
conv_transpose2d_grads = _route("conv_transpose2d_grads")
im2col = _route("im2col")
col2im = _route("col2im")

_WITH_AUTOCAST = {device_type: with_autocast(conv_transpose2d, device_type) for device_type in KEYS}
for _device_type, _call in _WITH_AUTOCAST.items():
    register("conv_transpose2d", _call, KEYS[_device_type].name)


class _Wrapped:
    """Hides a tuple or list from transforms of torch.func, which would mix up the tangents of its items."""

    def __init__(self, content: Any) -> None:
        self.content = content

    @classmethod
    def wrap(cls, argument: Any) -> Any:
        return cls(argument) if isinstance(argument, tuple | list) else argument

    @classmethod
    def unwrap(cls, arguments: Arguments) -> Arguments:
        return tuple(argument.content if isinstance(argument, cls) else argument for argument in arguments)


def register_rules(name: str, rules: Rules) -> None:
    """Give transforms of torch.func an operator's rules; they act before the dispatcher's Autograd key."""
    operator, (setup, gradient, tangent) = OPERATORS[name], rules

    class Function(torch.autograd.Function):
        generate_vmap_rule = True
        backward, jvp = staticmethod(gradient), staticmethod(tangent)

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return operator(*_Wrapped.unwrap(inputs))

        @staticmethod
        def setup_context(ctx: Any, inputs: Arguments, output: Any) -> None:
            setup(ctx, _Wrapped.unwrap(inputs), output)

    _TRANSFORMABLE[name] = Function
