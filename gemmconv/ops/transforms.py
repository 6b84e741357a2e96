"""The operators as functions: straight to the dispatcher, or through every level of torch.func's transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gemmconv import flops, validation
from gemmconv.dispatch import loses_a_tangent
from gemmconv.ops.autocast import KEYS, casting, casts
from gemmconv.ops.schemas import ARGUMENT_NAMES, OPERATORS, Arguments, of_plain, register

Rules = tuple[Callable[..., None], Callable[..., Arguments], Callable[..., Any]]  # what is kept, gradient, tangent

_PUBLIC = ("conv_transpose2d", "im2col", "col2im")
_TRANSFORMABLE: dict[str, type[torch.autograd.Function]] = {}


def _routed(name: str) -> Callable[..., Any]:
    """The operator; under a transform of torch.func, the function that carries it through every level of transforms."""
    operator, names = OPERATORS[name], ARGUMENT_NAMES[name]

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*inputs)
        if name in _PUBLIC:  # of the others all has been checked before
            validation.in_64_bits(name, zip(names, inputs, strict=False))
        flops.register()
        if not torch._C._are_functorch_transforms_active():
            return operator(*inputs)
        if loses_a_tangent():
            raise NotImplementedError(
                f"{name}: torch.func.jvp inside torch.func.jvp has a rule for torch's own operator alone; use "
                'algorithm="auto" with precision=None, in a call inside of both'
            )
        if name == "conv_transpose2d" and casts(inputs[0].device.type):
            # here, since what the transforms keep for the gradients has to be of one dtype
            return _CASTING[inputs[0].device.type](*inputs)
        return _TRANSFORMABLE[name].apply(*map(_Sealed.of, inputs))

    return call


conv_transpose2d = _routed("conv_transpose2d")
conv_transpose2d_input_grad = _routed("conv_transpose2d_input_grad")
conv_transpose2d_weight_grad = _routed("conv_transpose2d_weight_grad")
conv_transpose2d_grads = _routed("conv_transpose2d_grads")
im2col = _routed("im2col")
col2im = _routed("col2im")

_CASTING = {device_type: casting(conv_transpose2d, device_type) for device_type in KEYS}
for _device_type, _call in _CASTING.items():
    register("conv_transpose2d", _call, KEYS[_device_type].name)


class _Sealed:
    """A tuple or list that transforms of torch.func take for one argument: they mix up the tangents of its items."""

    def __init__(self, content: Any) -> None:
        self.content = content

    @classmethod
    def of(cls, argument: Any) -> Any:
        return cls(argument) if isinstance(argument, tuple | list) else argument

    @classmethod
    def opened(cls, arguments: Arguments) -> Arguments:
        return tuple(argument.content if isinstance(argument, cls) else argument for argument in arguments)


def carry(name: str, rules: Rules) -> None:
    """Give transforms of torch.func an operator's rules: transforms come before the dispatcher's Autograd key."""
    operator, (setup, gradient, tangent) = OPERATORS[name], rules

    class Function(torch.autograd.Function):
        generate_vmap_rule = True
        backward, jvp = staticmethod(of_plain(gradient)), staticmethod(of_plain(tangent))

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return operator(*_Sealed.opened(inputs))

        @staticmethod
        def setup_context(ctx: Any, inputs: Arguments, output: Any) -> None:
            setup(ctx, _Sealed.opened(inputs), output)

    _TRANSFORMABLE[name] = Function
