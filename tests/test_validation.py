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
from torch.utils._python_dispatch import TorchDispatchMode

import gemmconv
from gemmconv import validation

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
        with pytest.raises(mistake.error) as torch_caught:
            theirs(**arguments)
        assert isinstance(torch_caught.value, mistake.error)


def by_mistake(mistakes: list[Mistake]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mistake", mistakes, ids=lambda mistake: mistake.id)


GOOD_CONVOLUTION = {"input": INPUT, "weight": WEIGHT, "bias": BIAS}
CONVOLUTION_MISTAKES = [
    # Types
    Mistake("input_array", {"input": INPUT.numpy()}, TypeError, "input", "ndarray"),
    Mistake("weight_list", {"weight": [1.0]}, TypeError, "weight", "list"),
    Mistake("bias_number", {"bias": 1.5}, TypeError, "bias", "float"),
    Mistake("stride_float", {"stride": 1.5}, TypeError, "stride", "1.5"),
    Mistake("stride_floats", {"stride": (1, 2.5)}, TypeError, "stride", "2.5"),
    Mistake("padding_name", {"padding": "same"}, TypeError, "padding", "2 * padding = dilation * (kernel_size - 1)"),
    Mistake("padding_valid", {"padding": "valid"}, TypeError, "padding", "write padding=0"),
    Mistake("padding_other_name", {"padding": "full"}, TypeError, "padding", "'full'"),
    Mistake("dilation_none", {"dilation": None}, TypeError, "dilation", "None"),
    Mistake("groups_float", {"groups": 2.0}, TypeError, "groups", "2.0"),
    # Beyond 64 bits
    Mistake("stride_huge", {"stride": (1, 2**70)}, TypeError, "stride", str(2**70)),
    Mistake("padding_huge", {"padding": (2**63, 0)}, TypeError, "padding", str(2**63)),
    Mistake("output_padding_huge", {"output_padding": (0, -(2**70))}, TypeError, "output_padding", str(-(2**70))),
    Mistake("dilation_huge", {"dilation": (2**64, 1)}, TypeError, "dilation", str(2**64)),
    # torch raises ValueError of an int, and TypeError of the pair that its module makes of it.
    Mistake("stride_of_both_axes_huge", {"stride": 2**70}, TypeError, "stride", str(2**70), False),
    Mistake("groups_huge", {"groups": 2**70}, TypeError, "groups", str(2**70), False),
    Mistake("workspace_limit_huge", {"workspace_limit": 2**63}, ValueError, "workspace_limit", str(2**63), False),
    Mistake("output_of_2**64_bytes", {"stride": 2**31}, RuntimeError, "stride", "2**63 bytes"),
    Mistake("output_of_more_pixels", {"dilation": (2**62, 2)}, RuntimeError, "dilation", "2**63 bytes"),
    # Layouts
    Mistake("input_coo", {"input": INPUT.to_sparse()}, RuntimeError, "input", "sparse_coo; use input.to_dense()"),
    Mistake("weight_coo", {"weight": WEIGHT.to_sparse()}, RuntimeError, "weight", "weight.to_dense()"),
    Mistake("bias_coo", {"bias": BIAS.to_sparse()}, RuntimeError, "bias", "bias.to_dense()"),
    Mistake("input_csr", {"input": csr(INPUT[0])}, RuntimeError, "input", "sparse_csr; use input.to_dense()"),
    Mistake("weight_csr", {"weight": csr(WEIGHT[0])}, RuntimeError, "weight", "weight.to_dense()"),
    # Ranks and shapes
    Mistake("input_rank_2", {"input": INPUT[0, 0]}, RuntimeError, "input", "[5, 6]"),
    Mistake("input_rank_5", {"input": INPUT[None]}, RuntimeError, "input", "[1, 2, 4, 5, 6]"),
    Mistake("weight_rank_3", {"weight": WEIGHT[0]}, RuntimeError, "weight", "[6, 3, 3]"),
    Mistake("weight_rank_5", {"weight": WEIGHT[None]}, RuntimeError, "weight", "[1, 4, 6, 3, 3]"),
    Mistake("channels", {"input": INPUT[:, :3]}, RuntimeError, "input", "3"),
    Mistake("unbatched_channels", {"input": INPUT[0, :3]}, RuntimeError, "input", "3"),
    Mistake("bias_length", {"bias": BIAS[:3]}, RuntimeError, "bias", "3"),
    Mistake("bias_rank_2", {"bias": BIAS[None]}, RuntimeError, "bias", "[1, 6]"),
    Mistake("bias_scalar", {"bias": BIAS[0]}, RuntimeError, "bias", "[]"),
    Mistake("bias_of_one_group", {"groups": 2, "bias": BIAS}, RuntimeError, "bias", "6"),
    Mistake("no_rows", {"input": INPUT[:, :, :0]}, RuntimeError, "input", "0"),
    Mistake("no_columns", {"input": INPUT[..., :0]}, RuntimeError, "input", "0"),
    Mistake("no_taps", {"weight": WEIGHT[..., :0]}, RuntimeError, "weight", "0"),
    # Numbers of values
    Mistake("stride_triple", {"stride": (1, 1, 2)}, RuntimeError, "stride", "(1, 1, 2)"),
    Mistake("padding_triple", {"padding": (0, 1, 2)}, RuntimeError, "padding", "(0, 1, 2)"),
    Mistake("output_padding_triple", {"output_padding": (0, 0, 0)}, RuntimeError, "output_padding", "(0, 0, 0)"),
    Mistake("dilation_triple", {"dilation": (1, 2, 3)}, RuntimeError, "dilation", "(1, 2, 3)"),
    Mistake("stride_empty", {"stride": ()}, RuntimeError, "stride", "()"),
    # Ranges
    Mistake("stride_zero", {"stride": 0}, RuntimeError, "stride", "0"),
    Mistake("stride_negative", {"stride": (2, -1)}, RuntimeError, "stride", "-1"),
    Mistake("dilation_zero", {"dilation": 0}, RuntimeError, "dilation", "0"),
    Mistake("dilation_negative", {"dilation": (-1, 1)}, RuntimeError, "dilation", "-1"),
    Mistake("padding_negative", {"padding": -1}, RuntimeError, "padding", "-1"),
    Mistake("output_padding_negative", {"output_padding": (0, -1)}, RuntimeError, "output_padding", "-1"),
    Mistake("output_padding_of_stride", {"output_padding": 1}, RuntimeError, "output_padding", "1"),
    Mistake(
        "output_padding_of_one_axis",
        {"stride": (3, 2), "output_padding": (2, 2)},
        RuntimeError,
        "output_padding",
        "2",
    ),
    Mistake("output_negative", {"padding": 10}, RuntimeError, "padding", "10"),
    # torch returns an empty output.
    Mistake("output_empty", {"padding": (3, 4), "input": INPUT[..., :4, :]}, RuntimeError, "padding", "3", False),
    Mistake("groups_zero", {"groups": 0}, RuntimeError, "groups", "0"),
    Mistake("groups_negative", {"groups": -2}, RuntimeError, "groups", "-2"),
    Mistake("groups_not_a_divisor", {"groups": 3}, RuntimeError, "groups", "3"),
    # Dtypes and devices
    Mistake("weight_dtype", {"weight": WEIGHT.double()}, RuntimeError, "weight", "float64"),
    Mistake("bias_dtype", {"bias": BIAS.double()}, RuntimeError, "bias", "float64"),
    Mistake("half_and_float", {"input": INPUT.half()}, RuntimeError, "weight", "float32"),
    # torch computes with integers on the CPU and refuses them on the GPU.
    Mistake(
        "integers",
        {"input": INPUT.long(), "weight": WEIGHT.long(), "bias": BIAS.long()},
        RuntimeError,
        "input",
        "int64",
        False,
    ),
    Mistake(
        "booleans",
        {"input": INPUT.bool(), "weight": WEIGHT.bool(), "bias": None},
        RuntimeError,
        "input",
        "bool",
    ),
    # torch takes a meta weight and returns a meta output.
    Mistake("weight_device", {"weight": WEIGHT.to("meta")}, RuntimeError, "weight", "meta", False),
    Mistake("bias_device", {"bias": BIAS.to("meta")}, RuntimeError, "bias", "meta", False),
    # gemmconv's own options; torch has none of them.
    Mistake("algorithm", {"algorithm": "fastest"}, ValueError, "algorithm", "fastest", False),
    Mistake("algorithm_none", {"algorithm": None}, ValueError, "algorithm", "None", False),
    Mistake("precision", {"precision": "fp16"}, ValueError, "precision", "fp16", False),
    Mistake("workspace_limit", {"workspace_limit": -1}, ValueError, "workspace_limit", "-1", False),
]


@by_mistake(CONVOLUTION_MISTAKES)
def test_conv_transpose2d_rejects(mistake):
    check(mistake, gemmconv.conv_transpose2d, torch.nn.functional.conv_transpose2d, GOOD_CONVOLUTION)


@by_mistake(CONVOLUTION_MISTAKES)
def test_conv_transpose2d_rejects_before_any_work(mistake):
    """No tensor is made or computed: no operator of torch's runs before the error."""

    class Recorder(TorchDispatchMode):
        calls: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls.append(str(function))
            return function(*args, **(kwargs or {}))

    with pytest.raises(mistake.error), Recorder() as recorder:
        gemmconv.conv_transpose2d(**{**GOOD_CONVOLUTION, **mistake.changes})
    views = ("aten.unsqueeze", "aten.view", "aten.expand", "aten.alias", "aten.detach")
    assert [call for call in recorder.calls if not call.startswith(("gemmconv.", *views))] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"input": INPUT[:, :3]},
        {"stride": 0},
        {"padding": 10},
        {"bias": BIAS[:3]},
        {"weight": WEIGHT.double()},
        {"algorithm": "fastest"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_conv_transpose2d_rejects_meta_tensors_alike(changes):
    """The shapes alone decide, so that a compiler sees the error too."""

    def move(value):
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    messages = []
    for arguments in (
        {**GOOD_CONVOLUTION, **changes},
        {name: move(value) for name, value in {**GOOD_CONVOLUTION, **changes}.items()},
    ):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            gemmconv.conv_transpose2d(**arguments)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]


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


def test_conv_transpose2d_raises_the_reason_of_an_algorithm_that_cannot_serve():
    """NotImplementedError, which is a RuntimeError."""
    complex_arguments = {name: tensor.to(torch.complex64) for name, tensor in GOOD_CONVOLUTION.items()}
    with pytest.raises(NotImplementedError, match=r"^conv_transpose2d: gemm_col2im: .* got complex64"):
        gemmconv.conv_transpose2d(**complex_arguments, algorithm="gemm_col2im")


# The module

GOOD_MODULE = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}
MODULE_MISTAKES = [
    Mistake("in_channels", {"groups": 3}, ValueError, "in_channels", "4"),
    Mistake("out_channels", {"groups": 2, "out_channels": 7}, ValueError, "out_channels", "7"),
    Mistake("groups_zero", {"groups": 0}, ValueError, "groups", "0"),
    Mistake("groups_negative", {"groups": -1}, ValueError, "groups", "-1"),
    Mistake("padding_mode", {"padding_mode": "reflect"}, ValueError, "padding_mode", "reflect"),
    Mistake("padding_mode_unknown", {"padding_mode": "ones"}, ValueError, "padding_mode", "ones"),
    Mistake("algorithm", {"algorithm": "fastest"}, ValueError, "algorithm", "fastest", False),
    Mistake("precision", {"precision": "fp16"}, ValueError, "precision", "fp16", False),
    Mistake("workspace_limit", {"workspace_limit": -1}, ValueError, "workspace_limit", "-1", False),
    Mistake("workspace_limit_huge", {"workspace_limit": 2**63}, ValueError, "workspace_limit", str(2**63), False),
    # Types
    Mistake("in_channels_float", {"in_channels": 4.0}, TypeError, "in_channels", "4.0"),
    Mistake("in_channels_name", {"in_channels": "4"}, TypeError, "in_channels", "'4'"),
    Mistake("in_channels_none", {"in_channels": None}, TypeError, "in_channels", "None"),
    Mistake("in_channels_bool", {"in_channels": True}, TypeError, "in_channels", "True"),
    Mistake("out_channels_float", {"out_channels": 6.0}, TypeError, "out_channels", "6.0"),
    Mistake("out_channels_pair", {"out_channels": (6, 6)}, TypeError, "out_channels", "(6, 6)"),
    Mistake("groups_name", {"groups": "1"}, TypeError, "groups", "'1'"),
    Mistake("groups_float", {"groups": 2.0}, TypeError, "groups", "2.0"),
    Mistake("groups_bool", {"groups": True}, TypeError, "groups", "True"),
    Mistake("kernel_size_name", {"kernel_size": "3"}, TypeError, "kernel_size", "'3'"),
    Mistake("kernel_size_float", {"kernel_size": (3, 3.0)}, TypeError, "kernel_size", "3.0"),
    Mistake("kernel_size_none", {"kernel_size": None}, TypeError, "kernel_size", "None"),
    Mistake("stride_none", {"stride": None}, TypeError, "stride", "None"),
    Mistake("stride_name", {"stride": "2"}, TypeError, "stride", "'2'"),
    Mistake("stride_bool", {"stride": True}, TypeError, "stride", "True"),
    Mistake("stride_numpy_float", {"stride": np.float32(2)}, TypeError, "stride", "2.0"),
    Mistake("padding_name", {"padding": "same"}, TypeError, "padding", "no padding='same'"),
    Mistake("padding_valid", {"padding": "valid"}, TypeError, "padding", "write padding=0"),
    Mistake("output_padding_float", {"output_padding": 0.5}, TypeError, "output_padding", "0.5"),
    Mistake("dilation_name", {"dilation": "2"}, TypeError, "dilation", "'2'"),
    Mistake("dtype_name", {"dtype": "float32"}, TypeError, "dtype", "'float32'"),
    Mistake("dtype_integer", {"dtype": torch.int32}, RuntimeError, "dtype", "int32"),
    Mistake("device_name", {"device": "nowhere"}, RuntimeError, "device", "'nowhere'"),
    Mistake("device_float", {"device": 1.5}, TypeError, "device", "1.5"),
    Mistake("bias_tensor", {"bias": torch.ones(6)}, RuntimeError, "bias", "Tensor"),
    Mistake("bias_array", {"bias": np.ones(6)}, ValueError, "bias", "ndarray"),
    # Numbers of values
    Mistake("kernel_size_single", {"kernel_size": ()}, RuntimeError, "kernel_size", "()"),
    Mistake("kernel_size_triple", {"kernel_size": (3, 3, 3)}, RuntimeError, "kernel_size", "(3, 3, 3)"),
    Mistake("stride_triple", {"stride": (2, 2, 2)}, RuntimeError, "stride", "(2, 2, 2)"),
    Mistake("padding_array", {"padding": np.array([1, 1, 1])}, RuntimeError, "padding", "1"),
    # Sizes
    Mistake("in_channels_negative", {"in_channels": -4}, RuntimeError, "in_channels", "-4"),
    Mistake("out_channels_negative", {"out_channels": -6}, RuntimeError, "out_channels", "-6"),
    Mistake("kernel_size_negative", {"kernel_size": (3, -1)}, RuntimeError, "kernel_size", "-1"),
    Mistake("in_channels_huge", {"in_channels": 2**70}, TypeError, "in_channels", str(2**70)),
    Mistake("out_channels_huge", {"out_channels": 2**63}, TypeError, "out_channels", str(2**63)),
    Mistake("groups_huge", {"groups": 2**70}, ValueError, "in_channels", str(2**70)),
    Mistake("kernel_size_huge", {"kernel_size": 2**70}, TypeError, "kernel_size", str(2**70)),
    Mistake("stride_huge", {"stride": 2**70}, TypeError, "stride", str(2**70)),
    Mistake("padding_huge", {"padding": (0, 2**70)}, TypeError, "padding", str(2**70)),
    Mistake("dilation_huge", {"dilation": -(2**70)}, TypeError, "dilation", str(-(2**70))),
    Mistake("weight_huge", {"kernel_size": 2**40}, RuntimeError, "weight", str(2**40)),
    Mistake("weight_of_2**63_bytes", {"in_channels": 2**61, "out_channels": 1}, RuntimeError, "weight", str(2**61)),
]


@by_mistake(MODULE_MISTAKES)
def test_module_constructor_rejects(mistake):
    """Some of them torch notices in the first call."""

    def make_and_call(**arguments):
        return torch.nn.ConvTranspose2d(**arguments)(INPUT)

    check(mistake, gemmconv.ConvTranspose2d, make_and_call, GOOD_MODULE)


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


GOOD_FORWARD = {"input": INPUT}
FORWARD_MISTAKES = [
    Mistake("input_rank_2", {"input": INPUT[0, 0]}, RuntimeError, "input", "[5, 6]"),
    Mistake("input_dtype", {"input": INPUT.double()}, RuntimeError, "weight", "float32"),
    Mistake("input_array", {"input": INPUT.numpy()}, TypeError, "input", "ndarray"),
    Mistake("channels", {"input": INPUT[:, :3]}, RuntimeError, "input", "3"),
    Mistake("output_size_int", {"output_size": 11}, TypeError, "output_size", "11"),
    Mistake("input_coo", {"input": INPUT.to_sparse()}, RuntimeError, "input", "input.to_dense()"),
    Mistake("output_size_small", {"output_size": (2, 13)}, ValueError, "output_size", "2"),
    Mistake("output_size_large", {"output_size": (11, 20)}, ValueError, "output_size", "20"),
    Mistake("output_size_of_one", {"output_size": (11,)}, ValueError, "output_size", "11"),
    Mistake("output_size_of_three", {"output_size": (6, 11, 13)}, ValueError, "output_size", "(6, 11, 13)"),
    Mistake("output_size_unbatched", {"input": INPUT[0], "output_size": (2, 20)}, ValueError, "output_size", "2"),
]


@by_mistake(FORWARD_MISTAKES)
def test_module_forward_rejects(mistake):
    ours = gemmconv.ConvTranspose2d(4, 6, 3, stride=2)
    theirs = torch.nn.ConvTranspose2d(4, 6, 3, stride=2)
    check(mistake, ours, theirs, GOOD_FORWARD)


# im2col and col2im

GOOD_UNFOLD = {"input": INPUT, "kernel_size": 3}
UNFOLD_MISTAKES = [
    Mistake("input_list", {"input": [1.0]}, TypeError, "input", "list"),
    Mistake("input_rank_5", {"input": INPUT[None]}, RuntimeError, "input", "[1, 2, 4, 5, 6]"),
    Mistake("kernel_size_zero", {"kernel_size": 0}, RuntimeError, "kernel_size", "0"),
    Mistake("kernel_size_large", {"kernel_size": (3, 9)}, RuntimeError, "kernel_size", "9"),
    Mistake("kernel_size_triple", {"kernel_size": (3, 3, 3)}, RuntimeError, "kernel_size", "(3, 3, 3)"),
    Mistake("kernel_size_float", {"kernel_size": 2.5}, TypeError, "kernel_size", "2.5"),
    Mistake("stride_zero", {"stride": (0, 1)}, RuntimeError, "stride", "0"),
    Mistake("dilation_zero", {"dilation": 0}, RuntimeError, "dilation", "0"),
    Mistake("padding_negative", {"padding": -1}, RuntimeError, "padding", "-1"),
    Mistake("padding_name", {"padding": "same"}, TypeError, "padding", "same"),
    Mistake("integers", {"input": INPUT.long()}, RuntimeError, "input", "int64"),
    Mistake("input_coo", {"input": INPUT.to_sparse()}, RuntimeError, "input", "input.to_dense()"),
    Mistake("input_csr", {"input": csr(INPUT[0])}, RuntimeError, "input", "input.to_dense()"),
    Mistake("kernel_size_huge", {"kernel_size": 2**70}, TypeError, "kernel_size", str(2**70)),
    Mistake("padding_huge", {"padding": (0, 2**63)}, TypeError, "padding", str(2**63)),
    Mistake("columns_huge", {"padding": 2**62}, RuntimeError, "padding", "2**63 bytes"),
]


@by_mistake(UNFOLD_MISTAKES)
def test_im2col_rejects(mistake):
    check(mistake, gemmconv.im2col, torch.nn.functional.unfold, GOOD_UNFOLD)


COLUMNS = torch.randn(2, 36, 12)
GOOD_FOLD = {"columns": COLUMNS, "output_size": (5, 6), "kernel_size": 3}
FOLD_MISTAKES = [
    Mistake("columns_list", {"columns": [1.0]}, TypeError, "columns", "list"),
    Mistake("columns_rank_1", {"columns": COLUMNS[0, 0]}, RuntimeError, "columns", "[12]"),
    Mistake("columns_rank_4", {"columns": COLUMNS[None]}, RuntimeError, "columns", "[1, 2, 36, 12]"),
    Mistake("columns_channels", {"columns": COLUMNS[:, :35]}, RuntimeError, "columns", "35"),
    Mistake("columns_length", {"columns": COLUMNS[..., :11]}, RuntimeError, "columns", "11"),
    Mistake("output_size_negative", {"output_size": (-5, 6)}, RuntimeError, "output_size", "-5"),
    Mistake("output_size_small", {"output_size": (2, 2)}, RuntimeError, "output_size", "2"),
    Mistake("output_size_triple", {"output_size": (5, 6, 7)}, RuntimeError, "output_size", "(5, 6, 7)"),
    Mistake("kernel_size_zero", {"kernel_size": 0}, RuntimeError, "kernel_size", "0"),
    Mistake("stride_zero", {"stride": 0}, RuntimeError, "stride", "0"),
    Mistake("dilation_zero", {"dilation": (1, 0)}, RuntimeError, "dilation", "0"),
    Mistake("padding_negative", {"padding": (0, -1)}, RuntimeError, "padding", "-1"),
    Mistake("integers", {"columns": COLUMNS.long()}, RuntimeError, "columns", "int64"),
    Mistake("columns_coo", {"columns": COLUMNS.to_sparse()}, RuntimeError, "columns", "columns.to_dense()"),
    Mistake("output_size_huge", {"output_size": (5, 2**70)}, TypeError, "output_size", str(2**70)),
    Mistake(
        "images_huge",
        {"columns": COLUMNS[..., :4], "output_size": 2**40 + 3, "stride": 2**40},
        RuntimeError,
        "output_size",
        "2**63 bytes",
    ),
]


@by_mistake(FOLD_MISTAKES)
def test_col2im_rejects(mistake):
    def fold(columns, **options):
        return torch.nn.functional.fold(columns, **options)

    check(mistake, gemmconv.col2im, fold, GOOD_FOLD)


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
    ("changes", "dtype", "error", "message"),
    [
        ({}, torch.int32, NotImplementedError, "dtype must be floating-point, got int32"),
        ({}, "float32", TypeError, "dtype must be a torch.dtype, got 'float32'"),
        ({"batch": -2}, torch.float32, RuntimeError, "batch must be at least 0, got -2"),
        ({"groups": 0}, torch.float32, RuntimeError, "groups must be at least 1, got 0"),
        (
            {"groups": 3},
            torch.float32,
            RuntimeError,
            "weight must have a number of input channels that groups=3 divides",
        ),
        ({"groups": 4}, torch.float32, RuntimeError, "out_channels must be divisible by groups=4, got 6"),
        ({"stride": (0, 1)}, torch.float32, RuntimeError, "stride must be at least 1"),
        ({"output_padding": (1, 0)}, torch.float32, RuntimeError, "output_padding must be less"),
        ({"padding": (9, 0)}, torch.float32, RuntimeError, "padding must leave an output"),
        ({"stride": (2.5, 2)}, torch.float32, TypeError, "stride must be an int or a pair of ints, got (2.5, 2)"),
        ({"input_size": (4, 5, 6)}, torch.float32, RuntimeError, "input_size must have one or two elements"),
        ({"batch": 2.0}, torch.float32, TypeError, "batch must be an int, got 2.0"),
        ({"batch": 2**63}, torch.float32, TypeError, f"batch must fit 64 bits, got {2**63}"),
        ({"dilation": (1, 2**70)}, torch.float32, TypeError, f"dilation must fit 64 bits, got (1, {2**70})"),
        ({"padding": "same"}, torch.float32, TypeError, "padding must be an int or a pair of ints, since a transposed"),
        ({"batch": 2**56}, torch.float64, RuntimeError, "input must have less than 2**63 bytes, got shape"),
        ({"stride": 2**31}, torch.float16, RuntimeError, "stride and dilation must leave an output of less than"),
    ],
)
def test_explain_rejects_what_no_call_can_have(changes, dtype, error, message):
    with pytest.raises(error, match=re.escape(f"explain: {message}")):
        gemmconv.explain(replace(PROBLEM, **changes), dtype=dtype)


@pytest.mark.parametrize(("device", "error"), [("nowhere", RuntimeError), (1.5, TypeError), (None, TypeError)], ids=str)
def test_explain_names_a_device_that_is_none(device, error):
    with pytest.raises(error, match=f"explain: device must be a torch.device, .* got {device!r}"):
        gemmconv.explain(PROBLEM, device=device)


def test_explain_takes_a_problem_with_ints_and_lists_for_pairs():
    loose = gemmconv.Problem(2, 4, 6, 1, [5, 6], 3, stride=[1], padding=0)
    for device in ("cpu", "cuda"):
        assert str(gemmconv.explain(loose, device=device)) == str(gemmconv.explain(PROBLEM, device=device))


def test_explain_rejects_what_is_no_problem():
    with pytest.raises(
        TypeError, match=r"explain: the first argument must be a gemmconv\.Problem, a layer .* got tuple"
    ):
        gemmconv.explain((2, 4, 6))


def test_bytes_are_no_pair():
    with pytest.raises(TypeError, match="stride must be an int or a pair of ints, got b'2'"):
        gemmconv.conv_transpose2d(torch.ones(1, 2, 3, 3), torch.ones(2, 2, 1, 1), stride=b"2")
