"""Calls of conv_transpose2d that bypass torch's dispatcher: prepared once, then found in a cache.

The dispatcher is the part of torch that finds the code of an operator. For one written in Python it takes 10 us a call,
a third of a small layer's time. An eager call on torch's own tensors can do without:

    signature        all that decides how a call is computed: dtypes, shapes and strides of its tensors, its arguments,
                     whether gradients are recorded, autocast, torch's precision (signatures.py)
    prepared call    a function of input, weight and bias, for all calls of one signature: their arguments are checked
                     and their kernels chosen. It makes an autograd node if gradients are recorded (recording.py)
    cache            a dictionary from signatures to prepared calls, emptied when tuned choices change (call_cache.py)

An example is a layer of 64 to 32 channels in an epoch of 1,000 images of 8 x 8, in batches of 128. The last has 104:

    input                     find_call returns      then the caller
    [128, 64, 8, 8]           None and signature A   prepares call A by ``prepare``, adds it to the cache, and calls it
    [128, 64, 8, 8], 6 times  call A and signature A calls it
    [104, 64, 8, 8]           None and signature B   prepares call B, adds it, and calls it

Layers, functions and compiled graphs ask ``find_call`` (signatures.py, mostly in C) first. Where it finds nothing,
conv_transpose2d and compiled graphs call ``prepare``, unless torch's operator is chosen, and layers of signals call
``prepare_signal``. Volumes have rules of their own (volumes.py).

A call goes to the dispatcher if it has no signature, or is not prepared: in a mode, transform or profiler, which act in
the dispatcher, and on tensors that are not dense (:mod:`gemmconv.dispatch`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gemmconv.dispatch import are_dense, in_a_mode
from gemmconv.ops.autocast import cast_as_autocast, casts_parameters, is_autocasting
from gemmconv.ops.left_to_torch import is_left_to_torch
from gemmconv.ops.recording import PlainCall, prepare_with_autograd
from gemmconv.ops.schemas import Arguments, Tensors, without_data


def prepare(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> PlainCall | None:
    """Prepare the call on tensors like these. Returns None if torch's dispatcher has to serve it.

    Whether torch's operator is chosen for the call and its gradients is not asked here: functional.py asks it before,
    since calling torch's operator itself takes less host time than the call that this function would prepare.

    Args:
        input, weight, bias: the input may be without a batch.
        arguments: all arguments of the operator after its tensors, checked.

    >>> input, weight = torch.ones(4, 8, 8), torch.ones(4, 2, 4, 4)
    >>> call = prepare(input, weight, None, ((2, 2), (1, 1), (0, 0), 1, (1, 1), "direct", None, None))
    >>> call(input, weight, None).shape
    torch.Size([2, 16, 16])
    """
    has_batch = input.dim() != 3
    tensors = (input if has_batch else input.unsqueeze(0)), weight, bias
    if in_a_mode() or not are_dense(*tensors):
        return None
    is_cast = is_autocasting(input.device.type)
    call = (_prepare_under_autocast if is_cast else prepare_with_autograd)(tensors, arguments)
    if has_batch:
        return call
    return lambda input, weight, bias: call(input.unsqueeze(0), weight, bias).squeeze(0)


def prepare_signal(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> PlainCall | None:
    """Prepare a call on a batch of signals, computed as images of height 1.

    Returns None under autocast, and if torch's dispatcher has to serve the call. Its caller, a layer, has not asked
    whether torch's operator is chosen. So this function does, and then the prepared call is one of torch's operator.

    Args:
        input, weight, bias: ``[N, C_in, L]``, ``[C_in, C_out/groups, K]`` and ``[C_out]``, not checked.
        arguments: all arguments of the operator on images after its tensors.
    """
    tensors = input.unsqueeze(-2), weight.unsqueeze(-2), bias
    if in_a_mode() or not are_dense(*tensors) or is_autocasting(input.device.type):
        return None
    if is_left_to_torch(*tensors, arguments):
        # The first five arguments are torch's. Of a pair (height, width) signals have the width: stride (1, 2) becomes
        # (2,). ``groups`` is an int.
        geometry: list[Any] = [one[1:] if isinstance(one, tuple) else one for one in arguments[:5]]
        return lambda input, weight, bias: torch.conv_transpose1d(input, weight, bias, *geometry)
    return prepare_with_autograd(tensors, arguments, is_signal=True)


def _prepare_under_autocast(tensors: Tensors, arguments: Arguments) -> PlainCall:
    """Prepare a call that casts its tensors to autocast's dtype.

    torch casts the input. Kernels of ours cast weight and bias where :func:`casts_parameters` says so, as usual for a
    layer's float32 parameters on a GPU; else torch casts them too. An example is a float32 layer under bfloat16:

        on a GPU    call(cast(input), weight, bias)               one launch of ours casts both: csrc/layout/cast.cu
        on a CPU    call(cast(input), cast(weight), cast(bias))   torch casts each
    """
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    cast = partial(cast_as_autocast, dtype=dtype)
    if not casts_parameters(tensors, dtype):
        call = prepare_with_autograd(tuple(map(cast, tensors)), arguments)
        return lambda input, weight, bias: call(cast(input), cast(weight), cast(bias))
    # after_cast   tensors as after the cast, by whose dtype, shapes and strides kernels are chosen: for float32 tensors
    #              under bfloat16 the input in bfloat16, and weight and bias in bfloat16 without data
    # parameters   weight and bias as they are; from their dtype, float32, the call casts those that it is given later
    # The prepared call keeps none of these tensors.
    input, *parameters = tensors
    after_cast = cast(input), *(without_data(one, dtype) for one in parameters)
    casting_call = prepare_with_autograd(after_cast, arguments, parameters=tuple(parameters))
    return lambda input, weight, bias: casting_call(cast(input), weight, bias)
