"""The layer ConvTranspose2d, and convert, which swaps it for torch's in whole models."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch.fx
from torch import Tensor, nn
from torch.nn.common_types import _size_2_t

from gemmconv import functional, validation
from gemmconv.kernels.base import Precision
from gemmconv.ops import followers, plain, signatures
from gemmconv.selection import NAMES

Model = TypeVar("Model", bound=nn.Module)


class ConvTranspose2d(nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d, computed by gemmconv.

    Parameters, initial values, state_dict and ``output_size`` are those of torch.nn.ConvTranspose2d. The first call of
    a module on a GPU has other threads compile the kernels that the modules made after it are likely to launch.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding: as torch.nn.ConvTranspose2d.
        groups, bias, dilation, padding_mode, device, dtype: as torch.nn.ConvTranspose2d.
        algorithm: ``"auto"``, ``"direct"``, ``"fused"``, ``"gemm_col2im"`` or ``"native"``.
        precision: for float32 on CUDA, ``"ieee"`` or ``"tf32"``; None follows torch's setting for convolutions.
        workspace_limit: bytes of temporary memory of a call; None for 64 MiB.

    Raises:
        TypeError, RuntimeError: an argument of the wrong type or size; torch notices some of these in the first call.
        ValueError: see torch.nn.ConvTranspose2d; also an unknown algorithm or precision, or a workspace_limit below 1.

    >>> import torch
    >>> ConvTranspose2d(64, 32, 4, stride=2, padding=1)(torch.ones(1, 64, 8, 8)).shape
    torch.Size([1, 32, 16, 16])
    """

    # Defaults where __init__ did not run: a pickle of another version, or a torch module whose class was changed.
    algorithm: str = "auto"
    precision: Precision | None = None
    workspace_limit: int | None = None
    _cached_key: tuple[Any, bytes | None] | None = None  # arguments of the last call, and their key
    _position: int = -1  # in the order in which modules are made

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _size_2_t,
        stride: _size_2_t = 1,
        padding: _size_2_t = 0,
        output_padding: _size_2_t = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: _size_2_t = 1,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        algorithm: str = "auto",
        precision: Precision | None = None,
        workspace_limit: int | None = None,
    ) -> None:
        where = "ConvTranspose2d"
        counts = {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
        pairs = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "output_padding": output_padding}
        pairs["dilation"] = dilation
        sizes = validation.module(where, counts, pairs, bias, padding_mode, device, dtype)
        validation.choice(where, algorithm, NAMES, precision, workspace_limit)
        super().__init__(**sizes, bias=bias, padding_mode=padding_mode, device=device, dtype=dtype)
        self.algorithm = algorithm
        self.precision = precision
        self.workspace_limit = workspace_limit
        self._position = followers.register(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled module, as a new one in the order of modules."""
        super().__setstate__(state)
        self._position = followers.register(self)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution of ``input``.

        Args:
            input: ``[N, C_in, H_in, W_in]`` or ``[C_in, H_in, W_in]``.
            output_size: ``[H_out, W_out]``, with or without the extents before it; it replaces output_padding.

        Raises:
            ValueError: an output_size that no output_padding below the stride gives.
        """
        compiling = torch.compiler.is_compiling()
        # nn.Module's attribute look-up takes a microsecond more. Parametrizations and FSDP store the tensors elsewhere.
        parameters: dict[str, Any] = {} if compiling else self._parameters
        weight = parameters["weight"] if "weight" in parameters else self.weight  # noqa: SIM401
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        output_padding = self.output_padding
        if (
            output_size is None
            and not compiling
            and plain.are_torch_tensors(input, weight, bias)
            and (arguments_key := self._arguments_key()) is not None
        ):
            call, key = plain.find_call(input, weight, bias, arguments_key)
            if call is not None:
                return call(input, weight, bias)
            if key is not None and input.is_cuda and self.algorithm != "native":
                followers.compile_followers(self._position, self, (input, weight, bias))
        if output_size is not None:
            geometry = self.kernel_size, self.stride, self.padding, self.dilation
            output_padding = _output_padding_for("ConvTranspose2d", output_size, input.shape, *geometry)  # type: ignore[arg-type]
        return functional.conv_transpose2d(
            input,
            weight,
            bias,
            self.stride,
            self.padding,  # type: ignore[arg-type]
            output_padding,
            self.groups,
            self.dilation,
            algorithm=self.algorithm,
            precision=self.precision,
            workspace_limit=self.workspace_limit,
        )

    def _arguments_key(self) -> bytes | None:
        """The key of a call's arguments; attributes may have changed since the last call."""
        arguments = (
            *(self.stride, self.padding, self.output_padding, self.groups, self.dilation),
            *(self.algorithm, self.precision, self.workspace_limit),
        )
        if (cached := self._cached_key) is None or cached[0] != arguments:
            self._cached_key = cached = arguments, signatures.arguments_key(arguments)
        return cached[1]

    def extra_repr(self) -> str:
        """torch.nn.ConvTranspose2d's text, then the algorithm and the options that are not None."""
        parts = [super().extra_repr(), f"algorithm={self.algorithm}"]
        if self.precision is not None:
            parts.append(f"precision={self.precision}")
        if self.workspace_limit is not None:
            parts.append(f"workspace_limit={self.workspace_limit}")
        return ", ".join(parts)


_output_padding_for = validation.output_padding_for
torch.fx.wrap("_output_padding_for")  # in a traced graph it becomes a node, since sizes are not known yet


def convert(
    model: Model, *, algorithm: str = "auto", precision: Precision | None = None, workspace_limit: int | None = None
) -> Model | ConvTranspose2d:
    """Replace every torch.nn.ConvTranspose2d inside a model by gemmconv's, in place.

    The new modules hold the same parameters, so optimizers and checkpoints go on working. A layer whose ``compile()``
    was called is compiled again, with torch.compile's defaults, since torch does not tell which options it got.
    Subclasses, and modules with hooks or parametrizations, stay as they are: a new module would lose what they add.

    Args:
        model: any module; a bare torch.nn.ConvTranspose2d works too.
        algorithm, precision, workspace_limit: see ConvTranspose2d.

    Returns:
        The model; for a bare torch.nn.ConvTranspose2d, the module that replaces it.

    Raises:
        TypeError: ``model`` is no torch.nn.Module.
        ValueError: an unknown algorithm or precision, or a workspace_limit below 1.

    >>> convert(nn.Sequential(nn.ConvTranspose2d(4, 2, 3)))
    Sequential(
      (0): ConvTranspose2d(4, 2, kernel_size=(3, 3), stride=(1, 1), algorithm=auto)
    )
    """
    if not isinstance(model, nn.Module):
        validation.fail(TypeError, "convert", "model", "be a torch.nn.Module", type(model).__name__)
    validation.choice("convert", algorithm, NAMES, precision, workspace_limit)
    settings = {"algorithm": algorithm, "precision": precision, "workspace_limit": workspace_limit}
    # A module used in several places is replaced by one. New modules are made in the likely order of their calls.
    replacements: dict[Any, ConvTranspose2d] = {one: _like(one, settings) for one in model.modules() if _is_plain(one)}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in replacements:
                parent._modules[name] = replacements[child]
    return replacements.get(model, model)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is torch's own ConvTranspose2d with nothing attached to it."""
    if type(module) is not nn.ConvTranspose2d:
        return False
    hooks = (name for name in vars(module) if name.endswith("_hooks"))
    return not any(getattr(module, name) for name in hooks) and "forward" not in vars(module)


def _like(module: nn.Module, settings: dict[str, Any]) -> ConvTranspose2d:
    """A gemmconv module that shares all attributes of a torch module, parameters included."""
    new = ConvTranspose2d.__new__(ConvTranspose2d)
    new.__dict__.update(module.__dict__)
    new.__dict__.update(settings)
    for name, value in vars(module).items():  # empty dictionaries of hooks: each module needs its own
        if "_hooks" in name and isinstance(value, dict):
            new.__dict__[name] = value.copy()
    if new.__dict__.pop("_compiled_call_impl", None) is not None:
        new.compile()  # the copied graph would call the old module
    new._position = followers.register(new)
    return new
