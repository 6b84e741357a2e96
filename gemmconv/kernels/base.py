"""The interface of a kernel (:class:`Kernel`), and the configuration that it computes (:class:`Config`)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import torch

from gemmconv.device import AMPERE, REFERENCE, DeviceSpec, spec_of
from gemmconv.geometry import Problem
from gemmconv.hashing import hashed_once
from gemmconv.kernels.cpu.library import isa_name
from gemmconv.kernels.macros import ELEMENT_TYPES, why_not_dtype
from gemmconv.runtime.available import what_is_missing

if TYPE_CHECKING:
    from gemmconv.kernels.program import Program

Direction = Literal["forward", "input_grad", "weight_grad"]  # what a user may ask for
# What a kernel may compute; "grads" is both gradients in one call. Functions annotated Direction do not accept "grads".
Pass = Literal["forward", "input_grad", "weight_grad", "grads"]
PASSES: tuple[Pass, ...] = get_args(Pass)
Precision = Literal["ieee", "tf32"]

DEFAULT_WORKSPACE_LIMIT = 64 << 20
FORMAT_NAMES = {torch.contiguous_format: "nchw", torch.channels_last: "channels_last"}  # in files and keys

# Prepared calls: preparation has done everything that depends on the configuration alone.
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # input, weight, bias -> output
Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # grad_output, weight or input -> gradient
# grad_output, input, weight -> grad_input, grad_weight
BothGradients = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@hashed_once
@dataclass(frozen=True)
class Config:
    """A problem together with what it is computed on and how.

    Attributes:
        problem: the geometry.
        dtype: element type of every tensor.
        device: device of the tensors; a CUDA device carries its index.
        precision: ``"tf32"`` if float32 products may be rounded to TF32, else ``"ieee"``.
        workspace_limit: bytes that columns and partial sums may take; packed weights and transposed tensors do not
            count.
        torch_precision: the precision that torch's own convolutions use at this moment.
        memory_format: the format of images: of the output of a forward pass, of the result of an input gradient, and of
            the tensors that a weight gradient reads (its result is always contiguous).
        bias: whether a forward call has a bias.
        spec: the properties of a CUDA device.
        deterministic: whether torch's operator is limited to cuDNN's deterministic kernels.
        weight_format: only for ``"grads"``, both gradients at once, of which the weight's may read another format than
            the input's gradient has. None if both are ``memory_format``.
        trained: whether the weight is expected to change before the next call: on a CPU, if gradients are recorded.
    """

    problem: Problem
    dtype: torch.dtype
    device: torch.device
    precision: Precision = "ieee"
    workspace_limit: int = DEFAULT_WORKSPACE_LIMIT
    torch_precision: Precision = "ieee"
    memory_format: torch.memory_format = torch.contiguous_format
    bias: bool = False
    spec: DeviceSpec = REFERENCE
    deterministic: bool = False
    weight_format: torch.memory_format | None = None
    trained: bool = False

    @property
    def is_ieee(self) -> bool:
        """Whether products are of float32 that is not rounded to TF32."""
        return self.dtype == torch.float32 and self.precision == "ieee"

    @property
    def channels_last(self) -> bool:
        """Whether ``memory_format`` is channels_last, not NCHW."""
        return self.memory_format is torch.channels_last

    @property
    def of_weight(self) -> Config:
        """The configuration of the weight's gradient alone, for a configuration of both gradients."""
        return replace(self, memory_format=self.weight_format or self.memory_format, weight_format=None)


class Kernel(ABC):
    """One way to compute some passes: the layers it serves, its tiles, the cost of each, and its launches.

    A tile is a frozen record of the work of a thread block, stages and threads. Most fields of a tile become macros,
    for which the kernel is compiled; the others are arguments of a launch.

    A new kernel defines ``name``, ``serves``, :meth:`tiles`, :meth:`seconds` and :meth:`program`; one on a CPU, which
    has no program, :meth:`prepare` instead. All else has a default. Its algorithm lists it in ``kernels``:
    gemmconv/algorithms/fused.py is an example. gemmconv/kernels/conv/gemm_mma.py is a kernel to read first. To choose
    among kernels, a pass asks each in this order:

        why_not                          None if the kernel can compute the pass, else the reason
          why_not_device_or_dtype          the GPU, software of this machine, what else does not depend on sizes
          why_not_sizes                    there is no tile for the layer
        tile                             its best tile, by ``seconds``
        expected                         seconds by which kernels are compared; the least gives its ``program``

    On a GPU a kernel is compiled once for a class of sizes (size_class.py). For 3 images of 40 x 50:

        representatives(config)    1 image and 4 images of 62 x 62 stand for the two classes next to this size
        tile(for each of them)     what the kernel is compiled for, for each class
        fitted(config, tile)       each tile for 3 images of 40 x 50: it differs in arguments of the launch alone. The
                                   faster one is taken (gemmconv/algorithms/base.py, ``_fitted``)

    Attributes:
        name: its folder and file under csrc/, without the ending.
        device_type: ``"cuda"`` or ``"cpu"``.
        directions: the passes that it may compute; ``"grads"`` is both gradients at once.
        features: required entries of :attr:`gemmconv.device.DeviceSpec.features`.
        dtypes: element types.
        serves: the layers that it is for, as a clause after "it is for".
        computed_in: the only memory format that it computes in; other tensors are transposed to it first. None if
            nothing is transposed: the kernel takes both formats, or refuses one (``only_in`` in sm90/base.py).
    """

    name: ClassVar[str]
    device_type: ClassVar[str] = "cuda"
    directions: ClassVar[tuple[Pass, ...]] = ("forward",)
    features: ClassVar[frozenset[str]] = frozenset()
    dtypes: ClassVar[tuple[torch.dtype, ...]] = tuple(ELEMENT_TYPES)
    serves: ClassVar[str]
    computed_in: ClassVar[torch.memory_format | None] = None

    @abstractmethod
    def tiles(self, config: Config, direction: Pass) -> Iterable[Any]:
        """The possible tiles for a pass, as frozen dataclasses; none if the kernel declines the layer."""

    @abstractmethod
    def seconds(self, config: Config, direction: Pass, tile: Any) -> float:
        """Estimated seconds of a call, to compare tiles by; :meth:`expected` multiplies them by a kernel's factor."""

    def expected(self, config: Config, direction: Pass, tile: Any) -> float:
        """Expected seconds of a call: :meth:`seconds` times a correction fitted to measurements of similar layers."""
        from gemmconv.kernels.measured import correction

        factor = correction(self.name, config, direction) if config.device.type == "cuda" else None
        return self.seconds(config, direction, tile) * (1.0 if factor is None else factor)

    def program(self, config: Config, direction: Pass, tile: Any) -> Program | None:
        """The steps of a call; None for torch's operator, and on a CPU.

        The call takes (input, weight, bias) for a forward pass, (grad_output, weight) for the input's gradient,
        (grad_output, input) for the weight's, and (grad_output, input, weight) for both.
        """
        return None

    def prepare(self, config: Config, direction: Pass, tile: Any) -> Callable[..., Any]:
        """Prepare the call: :data:`Forward`, :data:`Gradient` or :data:`BothGradients`."""
        program = self.program(config, direction, tile)
        assert program is not None, f"{self.name} must define program or prepare"
        return program.prepare(config.device)

    def tile(self, config: Config, direction: Pass) -> Any | None:
        """The tile with the least estimate: a pure function of the arguments. None if the kernel declines the layer."""
        return _best_tile(self, config, direction)

    def fitted(self, config: Config, direction: Pass, tile: Any) -> Any | None:
        """The tile for ``config``, another size of the layer, that runs with the kernel already compiled for ``tile``.

        None if that kernel cannot compute this size; then another one is compiled. A subclass that does not override
        this method has a kernel compiled for each size.
        """
        return None

    def workspace_bytes(self, config: Config, direction: Pass, tile: Any) -> int:
        """Bytes of temporary memory that a call takes at most, beside arguments, result and transposed tensors.

        Weights that each call packs anew are among them.
        """
        return 0

    def packed_weight_bytes(self, config: Config, direction: Pass) -> int:
        """Bytes of packed weights that stay in memory from call to call, beside the weight."""
        return 0

    def why_not(self, config: Config, direction: Pass) -> str | None:
        """Why it cannot compute a pass, as a clause after its name; None where it can."""
        return self.why_not_device_or_dtype(config, direction) or self.why_not_sizes(config, direction)

    def why_not_device_or_dtype(self, config: Config, direction: Pass) -> str | None:
        """The part of :meth:`why_not` that is known at once and does not depend on sizes."""
        device, spec = config.device, config.spec
        if device.type != self.device_type:
            return f"the device must be {self.device_type}, got {device.type}"
        # Kernels with features skip the check of capability 8.0: that of their features, below, is stricter.
        reason = missing_software(device) if self.features else why_no_kernels(device, spec)
        if reason is not None:
            return reason
        if not self.features <= spec.features:
            major, minor = spec.capability
            return f"the device must have compute capability 9.0, got {major}.{minor}"  # all features are Hopper's
        if direction not in self.directions:
            return f"it computes {' and '.join(self.directions)} alone, got {direction}"
        return why_not_dtype(config.dtype, self.dtypes)

    def why_not_sizes(self, config: Config, direction: Pass) -> str | None:
        """The part of :meth:`why_not` that depends on the layer's sizes."""
        return None if self.tile(config, direction) is not None else f"it is for {self.serves}"


@functools.lru_cache(maxsize=1024)
def _best_tile(kernel: Kernel, config: Config, direction: Pass) -> Any | None:
    tiles = kernel.tiles(config, direction)
    return min(tiles, key=lambda tile: kernel.seconds(config, direction, tile), default=None)


class Choice(NamedTuple):
    """A kernel for a pass, its tile, and its expected seconds."""

    kernel: Kernel
    tile: Any
    seconds: float

    @property
    def tile_text(self) -> str:
        """The fields of the tile as ``name=value``, with spaces between."""
        return " ".join(f"{name}={value}" for name, value in tile_fields(self.tile).items())

    def program(self, config: Config, direction: Pass) -> Program | None:
        """The steps of the call of the pass; None for torch's operator."""
        return self.kernel.program(config, direction, self.tile)

    def __str__(self) -> str:
        return f"{self.kernel.name} {self.tile_text}".rstrip()


def choices(config: Config, direction: Pass, kernels: Iterable[Kernel]) -> list[Choice]:
    """One choice for each of the kernels that can compute a pass, in the order of the kernels."""
    able = (one for one in kernels if direction in one.directions and one.why_not(config, direction) is None)
    tiled = ((kernel, kernel.tile(config, direction)) for kernel in able)
    return [Choice(kernel, tile, kernel.expected(config, direction, tile)) for kernel, tile in tiled]


def tile_fields(tile: Any) -> dict[str, Any]:
    """The fields by which tiles of one kernel, pass and device differ; pairs and nested tiles as text."""
    if not dataclasses.is_dataclass(tile):
        return {}
    # Fields that are the same for all tiles of a pass on a device, which explain's text and tuned files leave out. A
    # new kernel's field of that kind belongs here too.
    of_pass = ("problem", "multiprocessors", "spec", "direction", "itemsize", "compiled")
    found = {}
    for name in (field.name for field in dataclasses.fields(tile) if field.name not in of_pass):
        value = getattr(tile, name)
        parts = tile_fields(value).values() if dataclasses.is_dataclass(value) else value
        found[name] = parts if isinstance(parts, int | str | float) else "x".join(map(str, parts))
    return found


def why_no_kernels(device: torch.device, spec: DeviceSpec | None = None) -> str | None:
    """Why our kernels cannot run on a CPU or a CUDA device, as a clause; None where they can, and for other devices.

    A CPU may lack the C extension. A CUDA device may have a capability below 8.0, or :func:`missing_software`.
    """
    if device.type == "cpu" and isa_name() is None:
        return "it needs the extension in C, which is not there; install gemmconv where there is a C compiler"
    if device.type != "cuda":
        return None
    if (capability := (spec or spec_of(device)).capability) < AMPERE:
        return f"the device must have compute capability 8.0 or more, got {capability[0]}.{capability[1]}"
    return missing_software(device)


why_no_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile cannot trace it


@functools.cache
def missing_software(device: torch.device) -> str | None:
    """Why this machine cannot compile or load kernels that its GPU could run, and the remedy, as a clause.

    None if nothing is missing. Also None without a GPU, or on one that is too old: other checks report that, and
    ``explain`` works there.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or spec_of(device).capability < AMPERE:
        return None
    return what_is_missing(torch.cuda.get_device_capability(device))


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which products are summed: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def strides_of(shape: Sequence[int], memory_format: torch.memory_format) -> tuple[int, ...]:
    """The strides of a new tensor.

    >>> strides_of((2, 3, 4, 5), torch.channels_last)
    (60, 1, 15, 3)
    """
    if memory_format is torch.channels_last:
        _, channels, height, width = shape
        return height * width * channels, 1, width * channels, channels
    steps = (max(1, size) for size in shape[:0:-1])
    return tuple(itertools.accumulate(steps, operator.mul, initial=1))[::-1]


def restrided(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """:func:`with_strides` for a result that nobody else uses: if only axes of size 1 differ, nothing is copied."""
    own = result.stride()
    if own == strides:
        return result
    if all(size == 1 or one == other for size, one, other in zip(result.shape, own, strides, strict=True)):
        return result.as_strided_(result.shape, strides)
    return with_strides(result, strides)


def with_strides(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A result with exactly these strides.

    ``Tensor.contiguous`` would leave strides as they are where extents of 1 make them irrelevant, but operators promise
    exactly the strides of their fake implementations.
    """
    if result.stride() == strides:
        return result
    return result.new_empty_strided(result.shape, strides).copy_(result)
