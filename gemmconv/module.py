"""The layers ConvTranspose1d, ConvTranspose2d and ConvTranspose3d."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch.fx
from torch import Tensor, nn

from gemmconv import functional, rank, validation
from gemmconv.dispatch import function_mode_count, only_patched
from gemmconv.kernels.base import Precision
from gemmconv.ops import call_cache, followers, plain, signatures
from gemmconv.ops.recording import PlainCall
from gemmconv.ops.schemas import Options
from gemmconv.selection import NAMES

Sizes = int | tuple[int, ...]

_attributes_of = attrgetter(*Options._fields)  # a call's arguments after its tensors: attributes of a layer


class Layer(nn.Module):
    """Arguments, settings and text that the layers of all ranks have in common."""

    # Defaults where __init__ did not run: a pickle of another version, or a torch module whose class was changed.
    algorithm: str = "auto"
    precision: Precision | None = None
    workspace_limit: int | None = None
    # attributes, and what _arguments_and_key made of them
    _last_arguments: tuple[Any, tuple[Any, bytes | None]] | None = None
    _position: int = -1  # in the order in which layers are made
    _axes: int  # 1 for signals, 2 for images, 3 for volumes
    _function: Callable[..., Tensor]  # the functional form: it computes any call, with all checks

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        algorithm: str = "auto",
        precision: Precision | None = None,
        workspace_limit: int | None = None,
    ) -> None:
        where = f"ConvTranspose{self._axes}d"
        values: dict[str, Any] = {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
        values |= {"kernel_size": kernel_size, "stride": stride, "padding": padding, "output_padding": output_padding}
        values["dilation"] = dilation
        checked = validation.module(where, self._axes, values, bias, padding_mode, device, dtype)
        validation.choice(where, algorithm, NAMES, precision, workspace_limit)
        super().__init__(**checked, bias=bias, padding_mode=padding_mode, device=device, dtype=dtype)
        self.algorithm = algorithm
        self.precision = precision
        self.workspace_limit = workspace_limit
        self._register()

    def _register(self) -> None:
        """Remember in which order layers are made: followers.py compiles kernels of later ones in advance."""
        if self._axes < 3:
            self._position = followers.register(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled layer, as a new one in that order."""
        super().__setstate__(state)
        self._register()

    def _settings(self) -> dict[str, Any]:
        """The keyword arguments of a call."""
        return {"algorithm": self.algorithm, "precision": self.precision, "workspace_limit": self.workspace_limit}

    def _settings_text(self) -> str:
        """The settings that are not None, such as ``algorithm=auto``."""
        return ", ".join(f"{name}={value}" for name, value in self._settings().items() if value is not None)

    def _arguments_and_key(self) -> tuple[tuple[Any, ...], bytes | None]:
        """The arguments of a call after its tensors, and a key of bytes made from them (None if no key can be made).

        For a 1-D layer they are those of the same call in 2-D, with height 1. They are kept until an attribute changes.
        """
        attributes: tuple[Any, ...] = _attributes_of(self)
        if (last := self._last_arguments) is None or last[0] != attributes:
            attributes = deepcopy(attributes)  # a list may be edited in place later
            # The first five are stride, padding, output_padding, groups and dilation; Options has all in order.
            arguments = attributes if self._axes > 1 else (*rank.of_height_1(*attributes[:5]), *attributes[5:])
            self._last_arguments = last = attributes, (arguments, call_cache.arguments_key(arguments))
        return last[1]

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution of ``input``.

        Args:
            input: images ``[N, C_in, H_in, W_in]``, signals ``[N, C_in, L_in]``, or volumes
                ``[N, C_in, D_in, H_in, W_in]``, as the layer takes them; or one of these without N.
            output_size: the output's size along each axis, with or without the extents before these; it replaces
                output_padding.

        Raises:
            ValueError: an output_size that would need an output_padding below 0, or of the stride or more.
        """
        # is_compiling() takes longer, and is not needed: for torch.export's tensors find_call returns (None, None).
        compiling = torch.compiler.is_dynamo_compiling()
        # find_call finds nothing inside a mode (torch.overrides.TorchFunctionMode). ``gemmconv.patched()``, in which
        # torch.nn.functional's functions are ours, is such a mode, but has no effect on our layers. If it is the only
        # one, forward calls itself once with modes switched off, where only_patched() is False.
        if not compiling and function_mode_count() and only_patched():
            with torch._C.DisableTorchFunction():
                return self.forward(input, output_size)
        # Read weight and bias from ``_parameters``: nn.Module's look-up of an attribute takes a microsecond more. Where
        # they are not there, as with parametrizations and FSDP, ask nn.Module.
        parameters: dict[str, Any] = {} if compiling else self._parameters
        weight: Any = parameters["weight"] if "weight" in parameters else self.weight  # noqa: SIM401
        bias: Any = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        # find_call returns    the call
        # a call and a key     is like an earlier one, whose prepared call computes it
        # None and a key       is new: a 1-D layer prepares it here, other layers below
        # None and None        cannot be cached: it is computed below
        if output_size is None and not compiling:
            arguments_key = self._arguments_and_key()[1]
            call = key = None
            if arguments_key is not None:
                call, key = signatures.find_call(input, weight, bias, arguments_key)
            if call is not None:
                return call(input, weight, bias)
            if key is not None:
                self._compile_followers(input, weight, bias)
                if (call := self._prepare(key, input, weight, bias)) is not None:
                    return call(input, weight, bias)
        # Any other call, with all checks.
        output_padding: Any = self.output_padding
        if output_size is not None:
            window: Any = self.kernel_size, self.stride, self.padding, self.dilation
            output_padding = _output_padding_for(f"ConvTranspose{self._axes}d", output_size, input.shape, window)
        geometry = self.stride, self.padding, output_padding, self.groups, self.dilation
        return self._function(input, weight, bias, *geometry, **self._settings())

    def _compile_followers(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """In other threads, compile what layers made after this one are likely to launch.

        Layers of signals and images do so at each call that is not found in the cache, such as the first of a size.
        """
        if self._axes < 3 and input.is_cuda and self.algorithm != "native":
            followers.compile_followers(self._position, self, (input, weight, bias))

    def _prepare(self, key: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> PlainCall | None:
        """The call for a signature that is not cached; None where the functional form checks, prepares and caches it.

        The functional form does so for images and volumes.
        """
        return None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._settings_text()}"


class ConvTranspose2d(Layer, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d, computed by gemmconv.

    Parameters, initial values, state_dict and ``output_size`` are those of torch.nn.ConvTranspose2d. During the first
    call of each size on a GPU, background threads compile the kernels that modules made later are likely to need.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding: as torch.nn.ConvTranspose2d.
        groups, bias, dilation, padding_mode, device, dtype: as torch.nn.ConvTranspose2d.
        algorithm: ``"auto"``, ``"direct"``, ``"fused"``, ``"gemm_col2im"`` or ``"native"``.
        precision: for float32 on CUDA, ``"ieee"`` or ``"tf32"``; None follows torch's setting for convolutions.
        workspace_limit: bytes that columns and partial sums may take; a call that needs more warns. None for 64 MiB.

    Raises:
        TypeError, RuntimeError: an argument of the wrong type or size; torch notices some of these in the first call.
        ValueError: see torch.nn.ConvTranspose2d; also an unknown algorithm or precision, or a workspace_limit below 1.

    >>> import torch
    >>> ConvTranspose2d(64, 32, 4, stride=2, padding=1)(torch.ones(1, 64, 8, 8)).shape
    torch.Size([1, 32, 16, 16])
    """

    _axes = 2
    _function = staticmethod(functional.conv_transpose2d)


class ConvTranspose1d(Layer, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d, computed by gemmconv as images of height 1; see :class:`ConvTranspose2d`.

    >>> import torch
    >>> ConvTranspose1d(64, 32, 4, stride=2, padding=1)(torch.ones(1, 64, 8)).shape
    torch.Size([1, 32, 16])
    """

    _axes = 1
    _function = staticmethod(rank.conv_transpose1d)

    def _prepare(self, key: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> PlainCall | None:
        """A call on signals, cached by ``key``; else one on images of height 1, if the functional form has cached it.

        A call under autocast, or without a batch, is always one on images. Nothing is cached by ``key`` for it, so each
        such call of a 1-D layer comes here.
        """
        arguments, arguments_key = self._arguments_and_key()
        # Errors are ignored here: forward then calls the functional form, which raises it in 1-D terms.
        with suppress(TypeError, RuntimeError, ValueError, NotImplementedError):
            if input.dim() == 3:
                make = partial(plain.prepare_signal, input, weight, bias, arguments)
                call: PlainCall | None = call_cache.find_or_make(key, make)
                if call is not None:
                    return call
        if arguments_key is None or input.dim() not in (2, 3):
            return None
        images, kernels = input.unsqueeze(-2), weight.unsqueeze(-2)
        on_images, _ = signatures.find_call(images, kernels, bias, arguments_key)
        return None if on_images is None else lambda *_: on_images(images, kernels, bias).squeeze(-2)


class ConvTranspose3d(Layer, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d, computed by gemmconv; see :class:`ConvTranspose2d` and gemmconv/rank.py.

    Its calls compile their own kernels alone, not those of later modules.

    >>> import torch
    >>> ConvTranspose3d(64, 32, 2, stride=2)(torch.ones(1, 64, 4, 8, 8)).shape
    torch.Size([1, 32, 8, 16, 16])
    """

    _axes = 3
    _function = staticmethod(rank.conv_transpose3d)


_output_padding_for = validation.output_padding_for
torch.fx.wrap("_output_padding_for")  # in a traced graph it becomes a node, since sizes are not known yet
