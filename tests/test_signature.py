"""What plain calls and their gradients are known by: in C and in Python, the same calls are one."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter

from gemmconv.extension import exchange_of_tensors, extension
from gemmconv.ops import signatures as keys
from tests.executor_checks import exchange, keeps_no_memory

needs_the_extension = pytest.mark.skipif(
    exchange_of_tensors() is None, reason="no extension in C (`make executor`), or an old torch"
)


def tensor(*shape, **options):
    return torch.zeros(shape, **options)


@contextlib.contextmanager
def float32_precision(value):
    conv = torch.backends.cudnn.conv
    before, conv.fp32_precision = conv.fp32_precision, value
    try:
        yield
    finally:
        conv.fp32_precision = before


def call_signature(*call):
    return keys.find_call(*call)[1]


INPUT, WEIGHT, BIAS = tensor(2, 3, 4, 5), Parameter(tensor(3, 6, 2, 2)), Parameter(tensor(6))
LAST = torch.channels_last
CALLS = {
    "usual": (INPUT, WEIGHT, BIAS),
    "other arguments": (INPUT, WEIGHT, BIAS, b"b"),
    "no bias": (INPUT, WEIGHT, None),
    "other images": (tensor(3, 3, 4, 5), WEIGHT, BIAS),
    "other width": (tensor(2, 3, 5, 4), WEIGHT, BIAS),
    "no batch": (tensor(3, 4, 5), WEIGHT, BIAS),
    "channels_last": (INPUT.contiguous(memory_format=LAST), WEIGHT, BIAS),
    "strides of one": (tensor(999).as_strided((2, 3, 1, 5), (60, 20, 5, 1)), WEIGHT, BIAS),
    "other strides of one": (tensor(999).as_strided((2, 3, 1, 5), (60, 20, 7, 1)), WEIGHT, BIAS),
    "double": (INPUT.double(), WEIGHT, BIAS),
    "half": (INPUT.half(), WEIGHT, BIAS),
    "bfloat16": (INPUT.bfloat16(), WEIGHT, BIAS),
    "negative input": (torch._neg_view(INPUT), WEIGHT, BIAS),
    "tracked input": (tensor(2, 3, 4, 5, requires_grad=True), WEIGHT, BIAS),
    "frozen weight": (INPUT, Parameter(WEIGHT.detach(), False), BIAS),
    "other weight": (INPUT, Parameter(tensor(3, 6, 2, 3)), BIAS),
    "weight in channels_last": (INPUT, Parameter(WEIGHT.detach().contiguous(memory_format=LAST)), BIAS),
    "half weight": (INPUT, Parameter(WEIGHT.detach().half()), BIAS),
    "frozen bias": (INPUT, WEIGHT, Parameter(BIAS.detach(), False)),
    "half bias": (INPUT, WEIGHT, Parameter(BIAS.detach().half())),
    "bias with steps": (INPUT, WEIGHT, Parameter(tensor(12)[::2])),
    "negative bias": (INPUT, WEIGHT, torch._neg_view(BIAS.detach()).requires_grad_()),
}
STATES = {
    "usual": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to half": lambda: torch.autocast("cpu", torch.float16),
    "autocast without its cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "ieee": lambda: float32_precision("ieee"),
}


def signatures(make):
    """All calls in all states."""
    found = {}
    for (call, given), (state, enter) in itertools.product(CALLS.items(), STATES.items()):
        tensors, said = given[:3], (*given, b"a")[3]
        with enter():
            found[call, state] = make(*tensors, said)
    return found


@needs_the_extension
def test_both_tell_the_same_calls_apart():
    in_c, in_python = signatures(call_signature), signatures(keys._call_signature_in_python)
    assert keys.find_call is not keys._find_call_in_python
    assert None not in (*in_c.values(), *in_python.values())
    for one, other in itertools.combinations(in_c, 2):
        assert (in_c[one] == in_c[other]) == (in_python[one] == in_python[other]), (one, other)
    assert signatures(call_signature) == in_c


@needs_the_extension
def test_both_tell_the_same_gradients_apart():
    grads = [
        tensor(2, 6, 5, 6),
        tensor(2, 6, 5, 6).contiguous(memory_format=LAST),
        tensor(1, 1, 1, 1).expand(2, 6, 5, 6),
        torch._neg_view(tensor(2, 6, 5, 6)),
    ]
    inputs = None, INPUT, INPUT.contiguous(memory_format=LAST)
    asked = (True, True, True), (True, False, False)
    weights = None, WEIGHT, WEIGHT.detach().half()
    calls = [*itertools.product([*grads, grads[0].half()], inputs, weights, asked)]
    with torch.no_grad():
        in_c = [keys.gradient_signature(*call) for call in calls]
        in_python = [keys._gradient_signature_in_python(*call) for call in calls]
    for i, j in itertools.combinations(range(len(calls)), 2):
        assert (in_c[i] == in_c[j]) == (in_python[i] == in_python[j])
    for make in (keys.gradient_signature, keys._gradient_signature_in_python):
        assert make(*calls[0]) is None  # gradients are recorded
        with torch.no_grad():
            assert make(BIAS, *calls[0][1:]) is None  # of another class


@needs_the_extension
@pytest.mark.parametrize("make", [call_signature, keys._call_signature_in_python])
def test_calls_in_a_mode_have_none(make):
    found = []

    def ask(input):
        found.append(make(input, WEIGHT, BIAS, b"a"))
        return input

    with torch.overrides.BaseTorchFunctionMode():
        ask(INPUT)
    with torch.utils._python_dispatch.TorchDispatchMode():
        ask(INPUT)
    torch.func.vmap(ask)(INPUT)
    torch.func.grad(lambda input: ask(input).sum())(INPUT)
    torch.jit.trace(ask, INPUT, check_trace=False)
    with torch.autograd.forward_ad.dual_level():
        ask(INPUT)
    with torch.autograd.profiler.profile(use_kineto=False):
        ask(INPUT)
    assert len(found) >= 7
    assert found == [None] * len(found)
    ask(INPUT)
    assert found[-1] is not None


@needs_the_extension
def test_tensors_without_data_are_not_known():
    empty = tensor(0, 3, 4, 5)
    functional = [torch._to_functional_tensor(one) for one in (INPUT, empty)]
    zeros = [torch._efficientzerotensor(one.shape) for one in (INPUT, empty)]
    for odd in (INPUT.to_sparse(), INPUT.to("meta"), INPUT.cfloat().conj(), empty, *functional, *zeros):
        assert call_signature(odd, WEIGHT, BIAS, b"a") is None
        assert call_signature(INPUT, WEIGHT, odd, b"a") is None
        with torch.no_grad():
            assert keys.gradient_signature(odd, INPUT, WEIGHT, (True,) * 3) is None


@needs_the_extension
@pytest.mark.parametrize("make", [call_signature, keys._call_signature_in_python])
def test_only_tensors_and_parameters_are_known(make):
    assert make(Parameter(INPUT), WEIGHT, BIAS, b"a") is not None
    for odd in (INPUT.as_subclass(type("Own", (torch.Tensor,), {})), INPUT.numpy(), [1.0], None):
        assert make(odd, WEIGHT, BIAS, b"a") is None
        assert make(INPUT, odd, BIAS, b"a") is None
        assert odd is None or make(INPUT, WEIGHT, odd, b"a") is None


@needs_the_extension
def test_signatures_keep_no_memory():
    held = [INPUT, WEIGHT, BIAS, (asked := (True, True, True)), (said := b"unlike all others")]

    def work(rounds):
        for _ in range(rounds):
            call_signature(INPUT, WEIGHT, BIAS, said)
            call_signature(INPUT.to_sparse(), WEIGHT, None, said)
            with torch.no_grad():
                keys.gradient_signature(INPUT, None, WEIGHT, asked)
            with torch.autocast("cpu", torch.bfloat16):
                call_signature(INPUT, WEIGHT, BIAS, said)
            with pytest.raises(TypeError, match="takes 4 arguments, got 1"):
                keys.find_call(INPUT)

    keeps_no_memory(held, work, (500,), (5000,))


@needs_the_extension
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_raised_while_a_signature_is_made_is_raised(device):
    """Not what comes after it. torch's precision is read for a GPU alone."""
    input, weight, bias = (one.to(device) for one in (INPUT, WEIGHT.detach(), BIAS.detach()))
    of_device = ["precision"] if device == "cuda" else []

    def fail(*_):
        raise KeyboardInterrupt

    def make(of_call=True, **changed):
        parts = {name: (lambda: False) for name in ("has_grad", "precision", "count")}
        parts |= {"has_autocast": lambda: True, "cast_to": lambda input: None}
        parts |= {"function_modes": fail, "mode": lambda: False} | changed
        modes = parts["count"], (parts["function_modes"], parts["mode"])
        states = parts["has_grad"], parts["has_autocast"], parts["cast_to"], (parts["precision"], ())
        torchs = modes, SimpleNamespace(_current_level=-1), *states, (torch.Tensor, torch.nn.Parameter)
        made = extension().Signatures(exchange_of_tensors(), {}, *torchs)
        if of_call:
            return made.find_call(input, weight, bias, b"a")
        return made.of_gradient(input, input, weight, (True,))

    assert make() is not None  # without a mode of functions, what says whether it matters is not asked
    with pytest.raises(KeyboardInterrupt):
        make(count=lambda: 1)
    for name in ("count", "mode", "has_grad", "has_autocast", "cast_to", *of_device):
        with pytest.raises(KeyboardInterrupt):
            make(**{name: fail})
    for name in ("count", "mode", "has_grad", *of_device):
        with pytest.raises(KeyboardInterrupt):
            make(of_call=False, **{name: fail})


def test_other_functions_of_dlpack_are_not_taken(monkeypatch):
    """With an extension of another version, of none, or without one, gemmconv does without it."""
    in_c = extension()
    if in_c is not None:
        for version, whole in (((1, 3), True), ((1, 1), True), ((2, 0), True), ((1, 3), False)):
            capsule, _kept = exchange(*version, whole=whole)
            assert in_c.takes(capsule) == (version == (1, 3) and whole)
        assert not in_c.takes(object())
    find = exchange_of_tensors.__wrapped__
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", object(), raising=False)
    assert find() is None
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert find() is None
