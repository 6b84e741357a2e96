"""Every mistake a caller can make: torch's own exception type, a message with argument, rule and value."""

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn import Parameter

import gemmconv
from gemmconv import validation
from gemmconv.ops.signatures import _call_signature_in_python
from tests.samples import Operators

INPUT = torch.randn(2, 4, 5, 6)
WEIGHT = torch.randn(4, 6, 3, 3)
BIAS = torch.randn(6)


def csr(tensor: torch.Tensor) -> torch.Tensor:
    """In compressed rows, without torch's warning that these are new."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.to_sparse_csr()


@dataclass(frozen=True)
class Mistake:
    """One bad call: what to change in a good one, and the error it has to raise.

    Attributes:
        changes: arguments that differ from the good call.
        error: exception type.
        argument: name that the message has to contain.
        value: text that the message has to contain.
        torch_raises: whether torch raises for it; it must then be an exception of the same type. A comment
            beside a False says what torch does.
    """

    id: str
    changes: dict[str, Any]
    error: type[Exception]
    argument: str
    value: str
    torch_raises: bool = True


def check(mistake: Mistake, ours: Callable[..., Any], theirs: Callable[..., Any] | None, good: dict[str, Any]) -> None:
    """Assert that `ours` raises what the mistake says and that `theirs` agrees on the type."""
    arguments = {**good, **mistake.changes}
    with pytest.raises(mistake.error) as caught:
        ours(**arguments)
    message = str(caught.value)
    assert mistake.argument in message
    assert mistake.value in message
    assert re.search(r"^[\w.]+: .* must .*, got .+", message, re.DOTALL), message
    if mistake.torch_raises and theirs is not None:
        with pytest.raises(mistake.error):
            theirs(**arguments)


def each(error: type[Exception], torch_raises: bool = True, **arguments: list[Any]) -> list[Mistake]:
    """A mistake for each value of each argument; messages show the value, a tensor's by its shape."""
    return [
        Mistake(f"{argument}={shown}", {argument: value}, error, argument, shown, torch_raises)
        for argument, values in arguments.items()
        for value in values
        for shown in [str(list(value.shape)) if isinstance(value, torch.Tensor) else repr(value)]
    ]


GOOD_CONVOLUTION = {"input": INPUT, "weight": WEIGHT, "bias": BIAS}
# gemmconv's own options; torch has none of them.
OPTION_MISTAKES = each(ValueError, False, algorithm=["fastest", None], precision=["fp16"], workspace_limit=[-1, 2**63])
INTEGERS = {name: tensor.long() for name, tensor in GOOD_CONVOLUTION.items()}
BOOLEANS = {"input": INPUT.bool(), "weight": WEIGHT.bool(), "bias": None}
CONVOLUTION_MISTAKES = [
    # Types, and what is beyond 64 bits
    Mistake("input_array", {"input": INPUT.numpy()}, TypeError, "input", "ndarray"),
    Mistake("weight_list", {"weight": [1.0]}, TypeError, "weight", "list"),
    Mistake("bias_number", {"bias": 1.5}, TypeError, "bias", "float"),
    Mistake("padding_name", {"padding": "same"}, TypeError, "padding", "2 * padding = dilation * (kernel_size - 1)"),
    Mistake("padding_valid", {"padding": "valid"}, TypeError, "padding", "write padding=0"),
    *each(TypeError, stride=[1.5, (1, 2.5), b"2"], padding=["full"], dilation=[None], groups=[2.0]),
    *each(TypeError, stride=[(1, 2**70)], padding=[(2**63, 0)], output_padding=[(0, -(2**70))], dilation=[(2**64, 1)]),
    # torch raises ValueError of an int, and TypeError of the pair that its module makes of it.
    *each(TypeError, False, stride=[2**70], groups=[2**70]),
    Mistake("output_of_2**64_bytes", {"stride": 2**31}, RuntimeError, "stride", "2**63 bytes"),
    Mistake("output_of_more_pixels", {"dilation": (2**62, 2)}, RuntimeError, "dilation", "2**63 bytes"),
    # Layouts
    Mistake("input_coo", {"input": INPUT.to_sparse()}, RuntimeError, "input", "sparse_coo; use input.to_dense()"),
    Mistake("weight_coo", {"weight": WEIGHT.to_sparse()}, RuntimeError, "weight", "weight.to_dense()"),
    Mistake("bias_coo", {"bias": BIAS.to_sparse()}, RuntimeError, "bias", "bias.to_dense()"),
    Mistake("input_csr", {"input": csr(INPUT[0])}, RuntimeError, "input", "sparse_csr; use input.to_dense()"),
    Mistake("weight_csr", {"weight": csr(WEIGHT[0])}, RuntimeError, "weight", "weight.to_dense()"),
    # Ranks, shapes and numbers of values
    *each(RuntimeError, input=[INPUT[0, 0], INPUT[None], INPUT[:, :3], INPUT[:, :, :0], INPUT[..., :0]]),
    *each(RuntimeError, weight=[WEIGHT[0], WEIGHT[None], WEIGHT[..., :0]], bias=[BIAS[:3], BIAS[None], BIAS[0]]),
    Mistake("unbatched_channels", {"input": INPUT[0, :3]}, RuntimeError, "input", "got 3 in shape"),
    Mistake("bias_of_one_group", {"groups": 2, "bias": BIAS}, RuntimeError, "bias", "6"),
    *each(RuntimeError, stride=[(1, 1, 2), ()], padding=[(0, 1, 2)], output_padding=[(0, 0, 0)], dilation=[(1, 2, 3)]),
    # Ranges
    *each(RuntimeError, stride=[0, (2, -1)], dilation=[0, (-1, 1)], padding=[-1, 10], groups=[0, -2, 3]),
    *each(RuntimeError, output_padding=[(0, -1), 1]),
    Mistake("of_one_axis", {"stride": (3, 2), "output_padding": (1, 2)}, RuntimeError, "output_padding", "(1, 2)"),
    # torch returns an empty output.
    Mistake("output_empty", {"padding": (3, 4), "input": INPUT[..., :4, :]}, RuntimeError, "padding", "3", False),
    # Dtypes and devices
    Mistake("weight_dtype", {"weight": WEIGHT.double()}, RuntimeError, "weight", "float64"),
    Mistake("bias_dtype", {"bias": BIAS.double()}, RuntimeError, "bias", "float64"),
    Mistake("half_and_float", {"input": INPUT.half()}, RuntimeError, "weight", "float32"),
    # torch computes with integers on the CPU and refuses them on the GPU.
    Mistake("integers", INTEGERS, RuntimeError, "input", "int64", False),
    Mistake("booleans", BOOLEANS, RuntimeError, "input", "bool"),
    # torch takes a meta weight and returns a meta output.
    Mistake("weight_device", {"weight": WEIGHT.to("meta")}, RuntimeError, "weight", "meta", False),
    Mistake("bias_device", {"bias": BIAS.to("meta")}, RuntimeError, "bias", "meta", False),
    *OPTION_MISTAKES,
]


@pytest.mark.parametrize("mistake", CONVOLUTION_MISTAKES, ids=lambda mistake: mistake.id)
def test_conv_transpose2d_rejects_before_any_work(mistake):
    """No tensor is made or computed: no operator of torch's runs before the error."""
    calls = Operators()

    def ours(**arguments):
        with calls:
            gemmconv.conv_transpose2d(**arguments)

    check(mistake, ours, torch.nn.functional.conv_transpose2d, GOOD_CONVOLUTION)
    views = ("aten.unsqueeze", "aten.view", "aten.expand", "aten.alias", "aten.detach")
    assert [call for call in calls.names if not call.startswith(("gemmconv.", *views))] == []


@pytest.mark.parametrize("name", ["input", "stride", "padding", "bias", "weight", "algorithm"])
def test_conv_transpose2d_rejects_meta_tensors_alike(name):
    """The shapes alone decide, so that a compiler sees the error too."""
    wrong = {"input": INPUT[:, :3], "stride": 0, "padding": 10, "bias": BIAS[:3], "weight": WEIGHT.double()}
    arguments, messages = {**GOOD_CONVOLUTION, name: {**wrong, "algorithm": "fastest"}[name]}, []
    on_meta = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    for given in (arguments, on_meta):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            gemmconv.conv_transpose2d(**given)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("algorithm", ["auto", "native", "gemm_col2im"])
@pytest.mark.parametrize("rank", [1, 2])
def test_conv_transpose_rejects_another_device_after_a_call_that_is_right(rank, algorithm):
    """torch's operator would compute with memory that is not there."""
    input, weight, bias = torch.randn(1, 4, *(3,) * rank), Parameter(torch.randn(4, 6, *(3,) * rank)), BIAS
    call, on_meta = functools.partial(getattr(gemmconv, f"conv_transpose{rank}d"), input), Parameter(weight.to("meta"))
    call(weight, bias, algorithm=algorithm)
    with pytest.raises(RuntimeError, match="weight must be on the device of input, cpu, got meta"):
        call(on_meta, bias, algorithm=algorithm)
    with pytest.raises(RuntimeError, match="bias must be on the device of input, cpu, got meta"):
        call(weight, bias.to("meta"), algorithm=algorithm)
    assert _call_signature_in_python(input, weight, bias, b"") != _call_signature_in_python(input, on_meta, bias, b"")


@pytest.mark.parametrize("algorithm", ["auto", "native", "gemm_col2im"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_conv_transpose2d_rejects_sparse_tensors_whatever_computes_it(algorithm, dtype):
    arguments = {name: tensor.to(dtype) for name, tensor in GOOD_CONVOLUTION.items()}
    for name, tensor in arguments.items():
        with pytest.raises(NotImplementedError, match=f"{name} must be dense, got sparse_coo; use {name}.to_dense"):
            gemmconv.conv_transpose2d(**{**arguments, name: tensor.to_sparse()}, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["auto", "native", "gemm_col2im"])
@pytest.mark.parametrize("name", ["stride", "padding", "output_padding", "dilation", "groups"])
def test_conv_transpose2d_names_what_is_beyond_64_bits_in_every_mode(name, algorithm):
    """The dispatcher would say that an int is no int."""
    call = functools.partial(gemmconv.conv_transpose2d, **GOOD_CONVOLUTION, algorithm=algorithm, **{name: 2**70})
    message = rf"conv_transpose2d: {name} must fit 64 bits, got .*{2**70}"
    with pytest.raises(TypeError, match=message):
        call()
    with torch.autocast("cpu"), pytest.raises(TypeError, match=message):
        call()
    with pytest.raises(TypeError, match=message):
        torch.func.grad(lambda bias: call(bias=bias).sum())(BIAS)


def test_checks_of_64_bits_tie_no_symbolic_size():
    """One that data decides has no value yet: comparing it raises."""
    size = ShapeEnv().create_unbacked_symint()
    with pytest.raises(GuardOnDataDependentSymNode):
        bool(size < 2**62)
    validation.in_64_bits("test", [("stride", (size, 2)), ("groups", size)])
    validation.sizes("test", replace(PROBLEM, batch=size, stride=(size, 1)), 4)


@pytest.mark.gpu
def test_conv_transpose2d_rejects_tensors_on_two_devices():
    for changes in ({"input": INPUT.cuda()}, {"weight": WEIGHT.cuda()}, {"bias": BIAS.cuda()}):
        with pytest.raises(RuntimeError, match="cuda"):
            gemmconv.conv_transpose2d(**{**GOOD_CONVOLUTION, **changes})


def test_conv_transpose2d_accepts_what_is_allowed_at_the_edge():
    convolve = gemmconv.conv_transpose2d
    reference = torch.nn.functional.conv_transpose2d
    for options in (
        {"stride": (2,)},
        {"stride": [2, 1]},
        {"dilation": 3, "output_padding": 2},
        {"stride": 3, "output_padding": 2},
        {"padding": 3},
        {"stride": torch.Size((2, 3))},
    ):
        actual = convolve(INPUT, WEIGHT, BIAS, **options)
        torch.testing.assert_close(actual, reference(INPUT, WEIGHT, BIAS, **options))
    assert convolve(INPUT, WEIGHT, BIAS, workspace_limit=1).shape == (2, 6, 7, 8)


def test_conv_transpose2d_takes_arguments_in_torchs_order():
    arguments = (INPUT, WEIGHT[:, :3], BIAS, (2, 3), (1, 2), (1, 0), 2, (2, 1))
    actual = gemmconv.conv_transpose2d(*arguments)
    torch.testing.assert_close(actual, torch.nn.functional.conv_transpose2d(*arguments))
    with pytest.raises(TypeError):
        gemmconv.conv_transpose2d(*arguments, "auto")


# The module

GOOD_MODULE = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}
MODULE_MISTAKES = [
    Mistake("in_channels", {"groups": 3}, ValueError, "in_channels", "4"),
    Mistake("out_channels", {"groups": 2, "out_channels": 7}, ValueError, "out_channels", "7"),
    *each(ValueError, groups=[0, -1], padding_mode=["reflect", "ones"]),
    *OPTION_MISTAKES,
    # Types
    *each(TypeError, in_channels=[4.0, "4", None, True], out_channels=[6.0, (6, 6)], groups=["1", 2.0, True]),
    *each(TypeError, kernel_size=["3", (3, 3.0), None], stride=[None, "2", True], output_padding=[0.5], dilation=["2"]),
    *each(TypeError, dtype=["float32"], device=[1.5]),
    *each(RuntimeError, device=["nowhere"]),
    Mistake("stride_numpy_float", {"stride": np.float32(2)}, TypeError, "stride", "2.0"),
    Mistake("padding_name", {"padding": "same"}, TypeError, "padding", "no padding='same'"),
    Mistake("padding_valid", {"padding": "valid"}, TypeError, "padding", "write padding=0"),
    Mistake("dtype_integer", {"dtype": torch.int32}, RuntimeError, "dtype", "int32"),
    Mistake("bias_tensor", {"bias": torch.ones(6)}, RuntimeError, "bias", "Tensor"),
    Mistake("bias_array", {"bias": np.ones(6)}, ValueError, "bias", "ndarray"),
    # Numbers of values, and sizes
    *each(RuntimeError, kernel_size=[(), (3, 3, 3), (3, -1)], stride=[(2, 2, 2)], in_channels=[-4], out_channels=[-6]),
    Mistake("padding_array", {"padding": np.array([1, 1, 1])}, RuntimeError, "padding", "1"),
    *each(TypeError, in_channels=[2**70], out_channels=[2**63], kernel_size=[2**70], stride=[2**70]),
    *each(TypeError, padding=[(0, 2**70)], dilation=[-(2**70)]),
    Mistake("groups_huge", {"groups": 2**70}, ValueError, "in_channels", str(2**70)),
    Mistake("weight_huge", {"kernel_size": 2**40}, RuntimeError, "weight", str(2**40)),
    Mistake("weight_of_2**63_bytes", {"in_channels": 2**61, "out_channels": 1}, RuntimeError, "weight", str(2**61)),
]


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel_size": [3, 2]},
        {"kernel_size": torch.Size((3, 2))},
        {"kernel_size": np.array([3, 2])},
        {"kernel_size": torch.tensor([3, 2])},
        {"kernel_size": range(2, 4)},
        {"in_channels": np.int64(4), "out_channels": torch.tensor(6), "groups": np.int32(2)},
        {"stride": (2,), "padding": np.array([1, 0]), "output_padding": [1], "dilation": {2}},
        {"bias": None},
        {"bias": 0},
        {"bias": "yes"},
        {"device": 0} if torch.cuda.is_available() else {"device": "cpu"},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_module_constructor_takes_what_torchs_takes(changes):
    ours, theirs = (kind(**{**GOOD_MODULE, **changes}) for kind in (gemmconv.ConvTranspose2d, torch.nn.ConvTranspose2d))
    ours.load_state_dict(theirs.state_dict())
    images = INPUT.to(ours.weight.device, ours.weight.dtype)
    torch.testing.assert_close(ours(images), theirs(images))
    assert all(type(size) is int for name in ("kernel_size", "stride", "padding") for size in getattr(ours, name))


FORWARD_MISTAKES = [
    Mistake("input_dtype", {"input": INPUT.double()}, RuntimeError, "weight", "float32"),
    Mistake("input_array", {"input": INPUT.numpy()}, TypeError, "input", "ndarray"),
    Mistake("input_coo", {"input": INPUT.to_sparse()}, RuntimeError, "input", "input.to_dense()"),
    *each(RuntimeError, input=[INPUT[0, 0], INPUT[:, :3]]),
    *each(TypeError, output_size=[11]),
    *each(ValueError, output_size=[(2, 13), (11, 20), (11,), (6, 11, 13)]),
    Mistake("output_size_unbatched", {"input": INPUT[0], "output_size": (2, 20)}, ValueError, "output_size", "2"),
]


# im2col and col2im

GOOD_UNFOLD = {"input": INPUT, "kernel_size": 3}
UNFOLD_MISTAKES = [
    Mistake("input_list", {"input": [1.0]}, TypeError, "input", "list"),
    *each(RuntimeError, input=[INPUT[None, None]], kernel_size=[0, (3, 9), (3, 3, 3, 3), ()], stride=[(0, 1)]),
    *each(RuntimeError, padding=[-1, (1, 1, 1)], dilation=[0, (1,)]),
    Mistake("signals", {"kernel_size": (3,)}, RuntimeError, "kernel_size", "[N, C, L] or [C, L]"),
    Mistake("images", {"input": INPUT[None], "kernel_size": (3, 3)}, RuntimeError, "kernel_size", "[1, 2, 4, 5"),
    Mistake("volume", {"kernel_size": (3, 3, 7)}, RuntimeError, "input", "(3, 3, 7)"),
    *each(TypeError, kernel_size=[2.5, 2**70], padding=[(0, 2**63)]),
    Mistake("padding_name", {"padding": "same"}, TypeError, "padding", "same"),
    Mistake("integers", {"input": INPUT.long()}, RuntimeError, "input", "int64"),
    Mistake("input_coo", {"input": INPUT.to_sparse()}, RuntimeError, "input", "input.to_dense()"),
    Mistake("input_csr", {"input": csr(INPUT[0])}, RuntimeError, "input", "input.to_dense()"),
    Mistake("columns_huge", {"padding": 2**62}, RuntimeError, "padding", "2**63 bytes"),
]


COLUMNS = torch.randn(2, 36, 12)
GOOD_FOLD = {"columns": COLUMNS, "output_size": (5, 6), "kernel_size": 3}
HUGE_IMAGES = {"columns": COLUMNS[..., :4], "output_size": 2**40 + 3, "stride": 2**40}
FOLD_MISTAKES = [
    Mistake("columns_list", {"columns": [1.0]}, TypeError, "columns", "list"),
    *each(RuntimeError, columns=[COLUMNS[0, 0], COLUMNS[None], COLUMNS[:, :35], COLUMNS[..., :11]]),
    *each(RuntimeError, output_size=[(-5, 6), (2, 2), (5, 6, 7, 8)], kernel_size=[0, (3,)], stride=[0]),
    *each(RuntimeError, padding=[(0, -1)], dilation=[(1, 0), (1, 1, 1)]),
    Mistake("volumes", {"output_size": (5, 6, 7)}, RuntimeError, "columns", "K_d*K_h*K_w = 27"),
    Mistake("signal", {"output_size": (2,)}, RuntimeError, "output_size", "kernel_size=(3,)"),
    *each(TypeError, output_size=[(5, 2**70)]),
    Mistake("integers", {"columns": COLUMNS.long()}, RuntimeError, "columns", "int64"),
    Mistake("columns_coo", {"columns": COLUMNS.to_sparse()}, RuntimeError, "columns", "columns.to_dense()"),
    Mistake("images_huge", HUGE_IMAGES, RuntimeError, "output_size", "2**63 bytes"),
]


REJECTED = {  # a function of ours, torch's, good arguments, and mistakes, some of which torch notices in a call
    "module_constructor": (
        *(gemmconv.ConvTranspose2d, lambda **given: torch.nn.ConvTranspose2d(**given)(INPUT), GOOD_MODULE),
        MODULE_MISTAKES,
    ),
    "module_forward": (
        *(kind(4, 6, 3, stride=2) for kind in (gemmconv.ConvTranspose2d, torch.nn.ConvTranspose2d)),
        *({"input": INPUT}, FORWARD_MISTAKES),
    ),
    "im2col": (gemmconv.im2col, torch.nn.functional.unfold, GOOD_UNFOLD, UNFOLD_MISTAKES),
    "col2im": (
        *(gemmconv.col2im, lambda columns, **given: torch.nn.functional.fold(columns, **given), GOOD_FOLD),
        FOLD_MISTAKES,
    ),
}


@pytest.mark.parametrize(
    ("name", "mistake"),
    [pytest.param(name, one, id=f"{name}-{one.id}") for name, (*_, mistakes) in REJECTED.items() for one in mistakes],
)
def test_other_functions_reject(name, mistake):
    ours, theirs, good, _ = REJECTED[name]
    check(mistake, ours, theirs, good)


@pytest.mark.parametrize("two", [np.int64(2), torch.tensor(2)], ids=["numpy", "tensor"])
def test_ints_of_other_libraries_are_ints(two):
    wanted = gemmconv.conv_transpose2d(INPUT, WEIGHT, None, 2, 2, (1, 0), 2, (2, 2))
    assert torch.equal(gemmconv.conv_transpose2d(INPUT, WEIGHT, None, two, (two, two), (1, 0), two, [two]), wanted)
    layer = gemmconv.ConvTranspose2d(4, 6, 3, (two, two))
    assert torch.equal(layer(INPUT, output_size=np.array([12, 13])), layer(INPUT, output_size=[12, 13]))
    assert torch.equal(layer(INPUT, output_size=torch.tensor([12, 13])), layer(INPUT, output_size=[12, 13]))


# explain

PROBLEM = gemmconv.Problem(2, 4, 6, 1, (5, 6), (3, 3))


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"algorithm": "fastest"}, "fastest"),
        ({"precision": "fp16"}, "fp16"),
        ({"workspace_limit": -1}, "-1"),
        ({"memory_format": torch.preserve_format}, "must be .* got torch.preserve_format"),
        ({"direction": ["forward"]}, "must be one of .* got .'forward'"),
        ({"workspace_limit": 2**70}, "workspace_limit must be less than"),
        ({"direction": "backward"}, "must be one of forward, input_grad, weight_grad, got 'backward'"),
    ],
)
def test_explain_rejects_unknown_options(options, value):
    with pytest.raises(ValueError, match=value):
        gemmconv.explain(PROBLEM, **options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": torch.int32}, NotImplementedError, "dtype must be floating-point, got int32"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype, got 'float32'"),
        ({"batch": -2}, RuntimeError, "batch must be at least 0, got -2"),
        ({"groups": 0}, RuntimeError, "groups must be at least 1, got 0"),
        ({"groups": 3}, RuntimeError, "in_channels must be divisible by groups=3, got 4"),
        ({"groups": 4}, RuntimeError, "out_channels must be divisible by groups=4, got 6"),
        ({"stride": (0, 1)}, RuntimeError, "stride must be at least 1"),
        ({"output_padding": (1, 0)}, RuntimeError, "output_padding must be less"),
        ({"padding": (9, 0)}, RuntimeError, "padding must leave an output"),
        ({"stride": (2.5, 2)}, TypeError, "stride must be an int or a pair of ints, got (2.5, 2)"),
        ({"input_size": (4, 5, 6)}, RuntimeError, "input_size must have one or two elements"),
        ({"batch": 2.0}, TypeError, "batch must be an int, got 2.0"),
        ({"batch": 2**63}, TypeError, f"batch must fit 64 bits, got {2**63}"),
        ({"dilation": (1, 2**70)}, TypeError, f"dilation must fit 64 bits, got (1, {2**70})"),
        ({"padding": "same"}, TypeError, "padding must be an int or a pair of ints, since a transposed"),
        ({"batch": 2**56, "dtype": torch.float64}, RuntimeError, "input must have less than 2**63 bytes, got shape"),
        (
            {"stride": 2**31, "dtype": torch.float16},
            RuntimeError,
            "stride and dilation must leave an output of less than",
        ),
    ],
)
def test_explain_rejects_what_no_call_can_have(changes, error, message):
    options = {"dtype": torch.float32, **changes}
    dtype = options.pop("dtype")
    with pytest.raises(error, match=re.escape(f"explain: {message}")):
        gemmconv.explain(replace(PROBLEM, **options), dtype=dtype)


@pytest.mark.parametrize(("device", "error"), [("nowhere", RuntimeError), (1.5, TypeError), (None, TypeError)], ids=str)
def test_explain_names_a_device_that_is_none(device, error):
    with pytest.raises(error, match=f"explain: device must be a torch.device, .* got {device!r}"):
        gemmconv.explain(PROBLEM, device=device)


def test_explain_takes_a_problem_with_ints_and_lists_for_pairs():
    loose = gemmconv.Problem(2, 4, 6, 1, [5, 6], 3, stride=[1], padding=0)
    for device in ("cpu", "cuda"):
        assert str(gemmconv.explain(loose, device=device)) == str(gemmconv.explain(PROBLEM, device=device))
