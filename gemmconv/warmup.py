"""Does before a model's first step what that step would wait for: choose, compile and load kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gemmconv import validation
from gemmconv.ops import volumes
from gemmconv.ops.autocast import is_autocasting
from gemmconv.ops.followers import Given, compile_calls
from gemmconv.ops.schemas import OPERATORS, Options, as_hashable, split_arguments

T = TypeVar("T")


def warmup(model: nn.Module, *example_inputs: Any, backward: bool = True) -> None:
    """Choose, compile and load the kernels that a model's gemmconv layers need for inputs like these, and run it once.

    All kernels are compiled at the same time, those of backward passes too; a model on the CPU has none, it only runs.
    Parameters, buffers, gradients, training flags and torch's random states are restored afterwards. For this,
    parameters and buffers are copied. Autocast has its effect, if it is on.

    Args:
        model: any module, converted, on its device, in the mode (``train()``, ``eval()``) of the steps to come; one
            for distributed training before it is wrapped.
        example_inputs: its arguments; only shapes, strides, dtypes and devices of tensors matter.
        backward: whether gradients are recorded, and a backward pass to all tensors that require them is run too.

    Raises:
        TypeError: ``model`` is no torch.nn.Module, or ``backward`` no bool.
        ValueError: ``backward`` is True, and no output requires gradients.

    >>> from gemmconv import ConvTranspose2d
    >>> warmup(ConvTranspose2d(4, 2, 3), torch.zeros(1, 4, 8, 8))
    """
    check_step("warmup", model, backward)
    with trial(model, example_inputs, backward) as gpus:
        if gpus:
            _compile(_calls_of(model, example_inputs), backward)
        run_step(model, example_inputs, backward, "warmup")


def check_step(where: str, model: object, backward: object) -> None:
    """Raise TypeError if ``model`` is no torch.nn.Module, or ``backward`` no bool."""
    validation.model(where, model)
    if not isinstance(backward, bool):
        validation.fail(TypeError, where, "backward", "be True or False", repr(backward))


@contextmanager
def trial(model: nn.Module, inputs: Any, backward: bool) -> Iterator[list[int]]:
    """A context for a step after which the model's state and torch's random states are what they were before.

    Yields the indices of the GPUs that hold the model or its inputs.
    """
    tensors = [one for one in (*model.parameters(), *model.buffers(), *tree_leaves(inputs)) if isinstance(one, Tensor)]
    gpus = sorted({one.device.index for one in tensors if one.is_cuda})
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(backward),
        torch.random.fork_rng(gpus),
        preserve_state(model),
    ):
        yield gpus


@contextmanager
def recording(layers: Iterable[nn.Module], record: Callable[..., None]) -> Iterator[None]:
    """A context in which ``record`` gets each call of the layers before it is made: layer, arguments, named ones."""
    with ExitStack() as hooks:
        for one in layers:
            hooks.enter_context(one.register_forward_pre_hook(record, with_kwargs=True))
        yield


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """A context after which parameters, buffers and training flags of a model are what they were before."""
    modules = [(one, one.training, one._parameters.copy(), one._buffers.copy()) for one in model.modules()]
    copies = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        for module, training, parameters, buffers in modules:
            module.training = training
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        for tensor, before in copies:
            tensor.data.copy_(before)  # leaves the version as it is, since an older graph may have saved the tensor


class _CallRecorder(TorchDispatchMode):
    """Records the arguments of the operators' calls, on images and on volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Given] = []
        self.of_volumes: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is OPERATORS["conv_transpose2d"]:
            tensors, _, arguments = split_arguments("conv_transpose2d", args)
            self.calls.append((tensors, tuple(Options(*as_hashable(arguments)))))
        if operator is volumes.OPERATOR._opoverload:
            self.of_volumes.append(args)
        return operator(*args, **(kwargs or {}))


def _calls_of(model: nn.Module, inputs: Any) -> _CallRecorder:
    """The operators' calls in a run without data; none if the model cannot run so, whose real run compiles then."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with suppress(Exception), mode, _CallRecorder() as recorder:
        fake: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in named.items()}
        torch.func.functional_call(model, fake, tree_map_only(Tensor, mode.from_tensor, inputs))
        return recorder
    return _CallRecorder()


def _compile(found: _CallRecorder, backward: bool) -> None:
    """Compile the kernels that calls and their backward passes launch."""
    compilations: list[Future[Any]] = []
    chosen = compile_calls(found.calls, backward, torch.float32 if is_autocasting("cuda") else None)
    chosen += [one for call in found.of_volumes if (one := volumes.compile_forward_ahead(*call)) is not None]
    for future in chosen:
        with suppress(Exception):  # the run of the model raises it
            compilations += [one for _, one in future.result()]
    show_progress([one for one in dict.fromkeys(compilations) if not one.done()])


def show_progress(compilations: Sequence[Future[Any]]) -> None:
    """Wait for compilations, and show how many are done."""
    if compilations:
        for _ in with_progress(as_completed(compilations), len(compilations), "compiles", "kernel"):
            pass


def with_progress(items: Iterable[T], count: int, does: str, unit: str) -> Iterator[T]:
    """Yield items with a progress bar of tqdm if that is installed, else with a line on a terminal."""
    with suppress(ImportError):
        from tqdm.auto import tqdm

        yield from tqdm(items, f"gemmconv {does}", count, unit=unit)
        return
    for done, one in enumerate(items, 1):
        if sys.stderr.isatty():
            print(f"\rgemmconv: {does} {unit} {done} of {count}", end="\n" * (done == count), file=sys.stderr)
        yield one


def run_step(model: nn.Module, inputs: Any, backward: bool, where: str) -> None:
    """Call a model, and if ``backward`` compute the gradients of its outputs for all tensors that require them."""
    outputs = model(*inputs)
    if not backward:
        return
    outputs = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
    if not outputs:
        rule = "be False where no output of the model requires gradients"
        validation.fail(ValueError, where, "backward", rule, True, "pass backward=False, or unfreeze a parameter")
    leaves = [one for one in (*model.parameters(), *tree_leaves(inputs)) if isinstance(one, Tensor)]
    wanted = [one for one in leaves if one.requires_grad]
    torch.autograd.grad(outputs, wanted, [torch.ones_like(one) for one in outputs], allow_unused=True)
