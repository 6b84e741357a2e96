"""Random data for a case, its float64 reference results, and the devices to run on."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gemmconv
from gemmconv.kernels.base import Config, Pass, Precision
from gemmconv.kernels.cpu.library import isa_name
from tests import reference
from tests.cases import Case

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
Arrange = Callable[[torch.Tensor], torch.Tensor]
REFUSED_ON_A_CPU = () if isa_name() else ("direct", "fused", "gemm_col2im")  # for want of the extension in C


@dataclass(frozen=True)
class Sample:
    """The tensors of one call, all of one dtype."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    grad_output: torch.Tensor

    def leaves(self) -> "Sample":
        """Return the same tensors (storage and strides too) as leaves that require gradients."""
        input, weight, bias = (tensor.detach().requires_grad_() for tensor in (self.input, self.weight, self.bias))
        return Sample(input, weight, bias, self.grad_output)


class Operators(TorchDispatchMode):
    """Notes the names of the operators that the dispatcher is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Expected:
    """The float64 results for one Sample, each computed when it is first asked for; they are not to be changed."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self._case = case
        self._x, self._w, self._b, self._grad_output = map(reference.to_array, arrays(case, dtype))

    @functools.cached_property
    def output(self) -> np.ndarray:
        return fixed(self.output_without_bias + self._b[:, None, None])

    @functools.cached_property
    def output_without_bias(self) -> np.ndarray:
        return fixed(reference.forward(self._x, self._w, None, **self._case.parameters))

    @functools.cached_property
    def input_grad(self) -> np.ndarray:
        case = self._case
        return fixed(reference.input_grad(self._grad_output, self._w, case.input_size, **case.grad_parameters))

    @functools.cached_property
    def weight_grad(self) -> np.ndarray:
        case = self._case
        return fixed(reference.weight_grad(self._grad_output, self._x, case.kernel_size, **case.grad_parameters))

    @functools.cached_property
    def bias_grad(self) -> np.ndarray:
        return fixed(reference.bias_grad(self._grad_output))


def fixed(array: np.ndarray) -> np.ndarray:
    """Return the array, which cannot be written to any more: all tests share it."""
    array.flags.writeable = False
    return array


@functools.cache
def arrays(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return input, weight, bias and output gradient on the CPU, rounded to `dtype`; not to be changed."""
    generator = torch.Generator().manual_seed(7)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    shapes = [case.input_shape, case.weight_shape, (case.out_channels,), case.output_shape]
    input, weight, bias, grad_output = (
        torch.randn(shape, generator=generator, dtype=wide).to(dtype) for shape in shapes
    )
    return input, weight, bias, grad_output


def sample(case: Case, dtype: torch.dtype, device: str) -> Sample:
    """Return fresh copies of the random data of a case on a device."""
    return Sample(*(tensor.to(device, copy=True) for tensor in arrays(case, dtype)))


def config_of(
    problem: gemmconv.Problem,
    dtype: torch.dtype = torch.float16,
    layout: torch.memory_format = torch.contiguous_format,
    precision: Precision = "ieee",
) -> Config:
    """What a call on a GPU, of which there need not be any, asks for."""
    return Config(problem, dtype, torch.device("cuda", 0), precision, memory_format=layout)


def problem_of(case: Case) -> gemmconv.Problem:
    return gemmconv.Problem(**asdict(case))


@functools.cache
def expected(case: Case, dtype: torch.dtype) -> Expected:
    """Return the reference results for `sample(case, dtype, ...)`: rounded inputs, exact arithmetic."""
    return Expected(case, dtype)


def arguments_of(direction: Pass, data: Sample, arrange: Arrange = torch.Tensor.contiguous) -> tuple[torch.Tensor, ...]:
    """Return the arguments of a prepared call; all but the bias are arranged in memory in some way."""
    input, weight, grad_output = (arrange(tensor) for tensor in (data.input, data.weight, data.grad_output))
    return {
        "forward": (input, weight, data.bias),
        "input_grad": (grad_output, weight),
        "weight_grad": (grad_output, input),
        "grads": (grad_output, input, weight),
    }[direction]


def step(data: Sample, case: Case, **options: Any) -> list[torch.Tensor]:
    """Return output and all gradients of one forward and backward pass; skip the test where the layer is refused."""
    leaves = data.leaves()
    try:
        output = gemmconv.conv_transpose2d(leaves.input, leaves.weight, leaves.bias, **case.parameters, **options)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    grads = torch.autograd.grad(output, [leaves.input, leaves.weight, leaves.bias], data.grad_output)
    return [output.detach(), *grads]


def assert_same_bits(actual: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> None:
    for one, other in zip(actual, wanted, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def assert_right(results: torch.Tensor | tuple[torch.Tensor, ...], direction: Pass, case: Case, config: Config) -> None:
    """Assert that results of a call of `arguments_of` a sample are the reference's."""
    names = {"forward": ("output",), "grads": ("input_grad", "weight_grad")}.get(direction, (direction,))
    for one, name in zip(results if isinstance(results, tuple) else (results,), names, strict=True):
        reference.assert_close(one, getattr(expected(case, config.dtype), name), config.dtype, config.precision)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with NaN between all elements: no dimension is dense, the offset is not zero."""
    wide = tensor.new_full([2 * size + 1 for size in tensor.shape], torch.nan)
    view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with the order of all dimensions in memory reversed."""
    order = list(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order)


def offset(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values one element into a storage: contiguous, but aligned to nothing."""
    wide = tensor.new_full((tensor.numel() + 1,), torch.nan)
    view = wide[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def offset_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in channels_last, one element into a storage."""
    return offset(tensor.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


LAYOUTS = {"channels_last": channels_last, "transposed": transposed, "spread": spread, "offset": offset}


@contextlib.contextmanager
def conv_precision(precision: str) -> Iterator[None]:
    """Set the float32 precision of torch's own convolutions, "ieee" or "tf32", for a while."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def tile_for(module, config, direction=None):
    """The tile that the kernel of a module takes for a pass, on any device; None where it declines that."""
    kernel = module.KERNEL
    direction = direction or kernel.directions[0]
    on_gpu = replace(config, device=torch.device("cuda", 0))
    return kernel.tile(config, direction) if kernel.why_not(on_gpu, direction) is None else None
