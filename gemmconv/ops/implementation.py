"""The implementations of the operators: each finds the prepared call for its arguments, or prepares it, and runs it.

The first call of a signature goes through these stages; here ``[8, 64, 32, 32]`` by ``[64, 32, 4, 4]``, float16, H200:

    arguments        [2, 2], [1, 1]                         stride and padding, as the dispatcher passes them
    Options          (2, 2), (1, 1), ..., "auto", ...       with all defaults
    Problem          batch=8, in_channels=64, ...           the geometry, once all arguments were checked: schemas.py
    Config           problem, float16, cuda:0, ...          all that decides how it is computed: configs.py
    Algorithm        Fused(), kernel sm90/implicit_gemm     chosen once, by selection.py
    Program          weights/pack.cu, then the kernel       its launches as plain data: pass_programs.py
    OperatorCall     call(input, weight, None)              launches them on tensors of these strides: kernels/bind.py

Who calls whom, the first time. An eager call bypasses the dispatcher; others reach ``_compute``:

    plain.prepare                         a call that has a signature; functional.py asks for it, for layers too
      recording.prepare_with_autograd     adds the autograd node, whose backward pass is prepared by prepare_call too
        prepare_call (this file)          looks in the cache; also from _compute, the body of every operator
          _prepare_or_fall_back (here)    torch's operator where kernels of "auto" do not compile
            _choose_and_prepare (here)
              configs.choose_algorithm    checks arguments, makes the Config, asks selection.py (for two: pairs.py)
              forward.prepare_forward     the Program, bound to the device; gradients.py has the same for gradients

On a CPU and for torch's operator there is no program: the algorithm prepares the call itself. Layers on volumes have
operators of their own, in volumes.py.

A caller may want a call that takes or returns other tensors than the operator does: under autocast, for example, one
that casts a float32 weight in a kernel of ours. It says so by a Convention (configs.py), which is part of the key.

The cache (call_cache.py) has calls of two kinds, and the first call of a layer adds one of each: the OperatorCall,
which launches what one pass needs (prepare_call adds it), and a PlainCall around it, which makes the autograd node if
gradients are recorded (functional.py and module.py add it, by the signature that they find it by).

What is checked and chosen is in configs.py, selection.py and pairs.py; what a call launches in forward.py and
gradients.py. A new setting, such as ``workspace_limit``, needs no change here: docs/guide/contributing.md has steps.
``pytest tests/test_{dispatch,rank,fallback,compiled,autocast}.py`` runs each line of this file, in two minutes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gemmconv import pairs, selection
from gemmconv.algorithms.fallback import with_fallback
from gemmconv.algorithms.fold import prepare_col2im, prepare_im2col
from gemmconv.device import make_current
from gemmconv.kernels.base import PASSES, Pass
from gemmconv.ops.call_cache import arguments_key, find_or_make, tensor_signature
from gemmconv.ops.configs import Convention, OperatorCall, choose_algorithm, choose_gradients, default_convention
from gemmconv.ops.forward import prepare_forward
from gemmconv.ops.gradients import prepare_gradient, prepare_gradients
from gemmconv.ops.schemas import (
    OPERATORS,
    Arguments,
    Options,
    Tensors,
    Window,
    as_hashable,
    col2im_problem,
    im2col_problem,
    operator_name,
    register,
    split_arguments,
)


def _compute(direction: Pass, operator: str, *inputs: Any) -> Any:
    """Compute an operator; ``inputs`` are as in its schema: tensors, the size of a single gradient, then options."""
    tensors, target_size, arguments = split_arguments(operator, inputs)
    with make_current(tensors[0].device):
        return prepare_call(direction, tensors, target_size, arguments)(*tensors)


def prepare_call(
    direction: Pass, tensors: Tensors, target_size: Any, arguments: Arguments, convention: Convention | None = None
) -> OperatorCall:
    """The prepared call of an operator on tensors of these shapes and strides, from the cache if it is there.

    Args:
        tensors: the operator's tensors, all of one dtype. With a ``parameter_dtype`` weight and bias are stand-ins of
            the dtype after the cast.
        target_size: for ``"input_grad"`` height and width of the input, for ``"weight_grad"`` those of the kernel: the
            tensor whose gradient is computed is not passed. None for other passes.
        arguments: the operator's other arguments, from the stride on; trailing defaults may be left out.
        convention: what the call takes and returns; None for what the operator takes and returns.
    """
    convention = convention or default_convention(direction, tensors)
    # All that the choice and the kernels depend on must be in the key, or a call would be found for another one:
    # tests/test_dispatch.py changes each, and expects another call. The arguments are there as bytes, which are made
    # faster than tuples.
    given: Any = arguments_key((target_size, arguments))
    if given is None:  # sizes of a traced graph may be symbols, which have no bytes
        given = target_size, Options(*as_hashable(arguments))
    precision = selection.torch_precision(tensors[0].dtype, tensors[0].device)  # the user may change it between calls
    key = (direction, *map(tensor_signature, tensors), given, precision, convention)
    return find_or_make(key, lambda: _prepare_or_fall_back(direction, tensors, target_size, arguments, convention))


def _prepare_or_fall_back(
    direction: Pass, tensors: Tensors, target_size: Any, arguments: Arguments, convention: Convention
) -> OperatorCall:
    """Prepare a call by the algorithm asked for; for ``"auto"``, by torch's where kernels do not compile or load.

    The call that is returned is cached, so what did not compile is not tried again for calls with the same key.
    """
    options = Options(*as_hashable(arguments))
    prepare = partial(_choose_and_prepare, direction, tensors, target_size, convention)
    if options.algorithm != "auto":
        return prepare(options)
    by_torch = options._replace(algorithm="native")
    return with_fallback(tensors[0].device, lambda: prepare(options), lambda: prepare(by_torch))


def _choose_and_prepare(
    direction: Pass, tensors: Tensors, target_size: Any, convention: Convention, options: Options
) -> OperatorCall:
    """Check the arguments, choose an algorithm (for ``"grads"`` one for each gradient), and prepare the call."""
    is_auto = options.algorithm == "auto"
    if direction == "grads":  # chosen together, since some kernels compute both; input and weight may differ in format
        gradients, config, weight_config = choose_gradients(tensors, options)
        if is_auto:
            pairs.log_choice(gradients.passes(config, weight_config))
        return prepare_gradients(gradients, config, weight_config, tensors, convention)
    algorithm, config = choose_algorithm(direction, tensors, target_size, options, convention.trained)
    if is_auto:
        pairs.log_choice([(direction, algorithm, config)])
    if direction == "forward":
        return prepare_forward(algorithm, config, tensors, convention)
    return prepare_gradient(direction, algorithm, config, tensors, convention)


def _conv_transpose2d_casting(input: Tensor, weight: Tensor, bias: Tensor | None = None, *arguments: Any) -> Tensor:
    """conv_transpose2d with a float32 weight and bias cast to the input's dtype.

    A compiled graph under autocast has this operator in place of casts and a call. It mostly bypasses this body, by
    ``_casting`` in compiled.py, where one kernel makes both casts; it comes here in modes and to record gradients.
    """
    cast = [one.to(input.dtype) if one is not None and one.dtype is torch.float32 else one for one in (weight, bias)]
    return OPERATORS["conv_transpose2d"](input, *cast, *arguments)


def _im2col(input: Tensor, *arguments: Any) -> Tensor:
    window = Window(*as_hashable(arguments))
    key = "im2col", tensor_signature(input), window
    with make_current(input.device):
        call = find_or_make(key, lambda: prepare_im2col(im2col_problem(input, window), input.dtype, input.device))
        return call(input)


def _col2im(columns: Tensor, output_size: Any, *arguments: Any) -> Tensor:
    size, window = tuple(output_size), Window(*as_hashable(arguments))
    key, dtype, device = ("col2im", tensor_signature(columns), size, window), columns.dtype, columns.device
    with make_current(device):
        call = find_or_make(key, lambda: prepare_col2im(col2im_problem(columns, size, window), dtype, device))
        return call(columns)


for _direction in PASSES:
    _operator = operator_name(_direction)
    # Explicit: autograd.py registers the derivative. Implicit: autograd follows the operators that the body calls.
    register(_operator, partial(_compute, _direction, _operator), "CompositeExplicitAutograd")
register("conv_transpose2d_casting", _conv_transpose2d_casting, "CompositeImplicitAutograd")
register("im2col", _im2col, "CompositeExplicitAutograd")
register("col2im", _col2im, "CompositeExplicitAutograd")
