"""The contenders of a comparison: gemmconv's algorithms, and torch in its settings.

torch keeps one cuDNN plan for each convolution it has met, and looks there before it looks at ``cudnn.benchmark``: the
first call of a shape decides for both settings. It keeps them for each thread, so the benchmark's contenders live in
threads of their own (see ``Lanes``), and backward passes stay in the thread that calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

import gemmconv
from benchmarks.reference import Tensors
from gemmconv import algorithms, ops, pairs, selection
from gemmconv.geometry import Problem
from gemmconv.kernels.base import Config, Direction, Precision

T = TypeVar("T")
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Gradients = Callable[[Tensors], tuple[torch.Tensor, ...]]

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}

PASSES: dict[str, tuple[Direction, ...]] = {
    "forward": ("forward",),
    "backward": ("input_grad", "weight_grad"),
    "both": ("forward", "input_grad", "weight_grad"),
}

# The unfused path writes all columns; a backward pass of it holds them three times.
_UNFUSED_BYTES = {"forward": 32 << 30, "backward": 4 << 30}

SEARCHES = 48  # of cudnn.benchmark, at most


class Lanes:
    """Threads with cuDNN plans of their own: each makes its own search."""

    def __init__(self, count: int = 1) -> None:
        self._pools = [ThreadPoolExecutor(max_workers=1) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._pools)

    def run_in(self, lane: int, work: Callable[[], T]) -> T:
        """Run a function in one of the threads, and return its result."""
        return self._pools[lane].submit(work).result()


@contextmanager
def torch_settings(precision: str, benchmark: bool = False, deterministic: bool = False) -> Iterator[None]:
    """Set what decides how torch computes a float32 product, and put it back after.

    Convolutions and matrix products are set alike. Only the new settings are touched: torch refuses a mix with the
    legacy ones.
    """
    cudnn: Any = torch.backends.cudnn
    conv, matmul = cudnn.conv, torch.backends.cuda.matmul
    before = conv.fp32_precision, matmul.fp32_precision, cudnn.benchmark, cudnn.deterministic
    value = "tf32" if precision == "tf32" else "ieee"
    try:
        conv.fp32_precision = matmul.fp32_precision = value
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic
        yield
    finally:
        conv.fp32_precision, matmul.fp32_precision, cudnn.benchmark, cudnn.deterministic = before


@dataclass(frozen=True)
class Contender:
    """One way to compute a layer.

    Attributes:
        name: the row's algorithm.
        layout: ``nchw`` or ``channels_last``, of all tensors.
        kind: ``torch`` or ``gemmconv``.
        benchmark, deterministic: torch's cuDNN settings.
        unfused: torch's matrix product and fold instead of its convolution.
    """

    name: str
    layout: str = "nchw"
    kind: str = "torch"
    benchmark: bool = False
    deterministic: bool = False
    unfused: bool = False

    def why_not(self, problem: Problem, precision: str, device: torch.device, direction: str) -> str | None:
        """Why it cannot take part, or None. Called inside :func:`torch_settings`."""
        if self.unfused:
            columns = problem.column_bytes(PRECISIONS[precision].itemsize)
            if columns > _UNFUSED_BYTES[direction]:
                return f"its columns take {columns >> 20} MiB; the limit is {_UNFUSED_BYTES[direction] >> 20} here"
        if self.kind == "gemmconv":
            config = self.config(problem, precision, device)
            reasons = {algorithm.name: algorithm.why_not(config) for algorithm in algorithms.ALGORITHMS}
            if self.name != "auto":
                return reasons[self.name]
            if None not in reasons.values():
                return "no algorithm can serve it"
        return None

    def config(self, problem: Problem, precision: str, device: torch.device, bias: bool = False) -> Config:
        """The configuration from which gemmconv chooses algorithms and kernels."""
        options: Any = {"memory_format": LAYOUTS[self.layout], "bias": bias, "algorithm": self.name}
        return selection.current_config(problem, PRECISIONS[precision], device, **options)

    def choices(
        self, problem: Problem, precision: str, device: torch.device, direction: str, bias: bool = False
    ) -> dict[str, Any]:
        """What gemmconv takes for the passes of a direction, as columns of a row; nothing for torch.

        ``took`` has the algorithms of ``auto``, as ``fused`` or ``fused+native``; gradients that are computed in
        channels_last, of tensors in NCHW, are ``turned``. ``kernels`` has each kernel with its tile, and
        ``workspace_bytes`` what the algorithms promise to stay within, None where torch manages the memory of any.
        """
        if self.kind == "torch":
            return {}
        config, passes = self.config(problem, precision, device, bias), PASSES[direction]
        taken, kernels, computed = dict[Direction, algorithms.Algorithm](), list[Any](), config
        if "forward" in passes:
            taken["forward"] = selection.choose(config, self.name, "benchmarks")
            kernels.append(taken["forward"].choice(config, "forward"))
        if "input_grad" in passes:
            gradients = pairs.choose_pair(config, config, self.name, "benchmarks")
            if gradients.via_channels_last:
                computed = replace(config, memory_format=torch.channels_last)
            taken |= {"input_grad": gradients.input_grad, "weight_grad": gradients.weight_grad}
            kernels += [algorithm.choice(of, one) for one, algorithm, of in gradients.passes(config, config)]
        names = "+".join(dict.fromkeys(one.name for one in taken.values())) + " turned" * (computed is not config)
        is_torchs = any(one.name == "native" for one in taken.values())
        needs = (one.workspace_bytes(config if way == "forward" else computed, way) for way, one in taken.items())
        return {
            "took": names if self.name == "auto" else "",
            "kernels": "; ".join(dict.fromkeys(map(str, kernels))),
            "workspace_bytes": None if is_torchs else max(needs),
        }

    def forward(self, problem: Problem) -> Forward:
        """The layer as a function of input, weight and bias."""
        if self.unfused:
            return _unfused(problem)
        geometry = problem.geometry
        operator: Callable[..., torch.Tensor] = torch.nn.functional.conv_transpose2d
        if self.kind == "gemmconv":
            operator = partial(gemmconv.conv_transpose2d, algorithm=self.name)
        return lambda x, weight, bias: operator(x, weight, bias, *geometry)

    def gradients(self, problem: Problem) -> Gradients:
        """The gradients of input, weight and bias, as autograd computes them but without it; not of ``unfused``."""
        p, name = problem, self.name
        if self.kind == "torch":

            def torch_call(t: Tensors) -> tuple[torch.Tensor, ...]:
                sizes = None if t.bias is None else [p.out_channels]
                mask = [True, True, t.bias is not None]
                found = torch.ops.aten.convolution_backward(
                    *(t.grad_output, t.x, t.weight, sizes, p.stride, p.padding, p.dilation),
                    *(True, p.output_padding, p.groups, mask),
                )
                return tuple(found[: 2 if t.bias is None else 3])

            return torch_call

        def call(t: Tensors) -> tuple[torch.Tensor, ...]:
            found = ops.conv_transpose2d_grads(t.grad_output, t.x, t.weight, *p.geometry, name, None, None)
            return found if t.bias is None else (*found, t.grad_output.sum((0, 2, 3)))

        return call

    def module(self, problem: Problem, tensors: Tensors, precision: Precision | None = None) -> nn.ConvTranspose2d:
        """The layer as a module that holds the tensors' parameters; that of ``unfused`` is torch's own.

        ``precision`` is how gemmconv rounds products, None for torch's setting.
        """
        p = problem
        channels, window = (p.in_channels, p.out_channels), (p.kernel_size, p.stride, p.padding, p.output_padding)
        make: Callable[..., nn.ConvTranspose2d] = nn.ConvTranspose2d
        if self.kind == "gemmconv":
            make = partial(gemmconv.ConvTranspose2d, algorithm=self.name, precision=precision)
        module = make(*channels, *window, p.groups, tensors.bias is not None, p.dilation, device="meta")
        module.weight = nn.Parameter(tensors.weight)
        module.bias = None if tensors.bias is None else nn.Parameter(tensors.bias)
        return module


def _unfused(problem: Problem) -> Forward:
    p = problem

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        matrices = weight.reshape(p.groups, p.gemm_k, p.gemm_m).transpose(1, 2)
        columns = matrices @ x.reshape(p.batch, p.groups, p.gemm_k, p.gemm_n)  # [N, groups, gemm_m, gemm_n]
        columns = columns.view(p.batch, p.groups * p.gemm_m, p.gemm_n)
        output = torch.nn.functional.fold(columns, p.output_size, p.kernel_size, p.dilation, p.padding, p.stride)
        return output if bias is None else output + bias.view(-1, 1, 1)

    return call


DEFAULT_TORCH = "torch_nchw"

# torch as it is, by layout. They are measured first: their errors are the measure of gemmconv's.
DEFAULTS = {"nchw": Contender(DEFAULT_TORCH), "channels_last": Contender("torch_channels_last", "channels_last")}
TORCH = (
    *DEFAULTS.values(),
    Contender("torch_deterministic", deterministic=True),
    Contender("torch_nchw_benchmark", benchmark=True),
    Contender("torch_channels_last_benchmark", "channels_last", benchmark=True),
    Contender("torch_unfused", unfused=True),
)
_CPU_TORCH = (DEFAULT_TORCH, "torch_channels_last", "torch_unfused")  # the others differ in cuDNN alone


def torch_contenders(device: torch.device) -> list[Contender]:
    """torch's settings that make a difference on a device."""
    return [contender for contender in TORCH if device.type == "cuda" or contender.name in _CPU_TORCH]


def gemmconv_contenders(layouts: Sequence[str]) -> list[Contender]:
    """Every algorithm of gemmconv, and its own choice, in each layout."""
    names = [*(algorithm.name for algorithm in algorithms.ALGORITHMS), "auto"]
    return [Contender(name, layout, "gemmconv") for layout in layouts for name in names]
