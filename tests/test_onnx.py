"""ONNX's own node tests of ConvTranspose, which the onnx package brings: inputs, attributes and expected outputs."""

import numpy as np
import pytest
import torch

from tests.samples import REFUSED_ON_A_CPU, conv_precision
from tests.test_rank import ALGORITHMS, FUNCTIONS

LEAST = 9  # cases of the oldest packages; newer ones have more


def geometry(size, kernel, given):
    """Stride, padding, output_padding, groups and dilation by ONNX's attributes, and the size of the output.

    ``output_shape``, and ``auto_pad``, which makes it the input times the stride, give the sum of both pads of an axis;
    SAME_UPPER rounds its half up at the end, all others at the beginning. Where the end is less than the beginning,
    output_padding makes up for it; where it is more, the output has to be cut off.
    """
    size, kernel, auto = np.array(size), np.array(kernel), given.get("auto_pad", b"NOTSET")
    assert auto in (b"NOTSET", b"SAME_UPPER", b"SAME_LOWER", b"VALID")
    defaults = {"strides": 1 + 0 * size, "dilations": 1 + 0 * size, "output_padding": 0 * size}
    stride, dilation, more = (np.array(given.get(name, default)) for name, default in defaults.items())
    whole = (size - 1) * stride + (kernel - 1) * dilation + 1 + more
    begin, end = np.array(given.get("pads", [0, 0] * len(size))).reshape(2, -1)
    output = given.get("output_shape", size * stride if auto.startswith(b"SAME") else None)
    if output is not None:
        total = whole - output
        begin, end = total - total // 2, total // 2
        begin, end = (end, begin) if auto == b"SAME_UPPER" else (begin, end)
    more = np.maximum(0, more + begin - end)
    call = stride.tolist(), begin.tolist(), more.tolist(), given.get("group", 1), dilation.tolist()
    return call, (whole - begin - end).tolist()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_node_tests_of_onnx(algorithm, device, monkeypatch):
    module = pytest.importorskip("onnx.backend.test.case.node.convtranspose")
    value_of, cases = pytest.importorskip("onnx.helper").get_attribute_value, []
    monkeypatch.setattr(module, "expect", lambda node, inputs, outputs, name: cases.append((node, inputs, outputs)))
    for export in [name for name in dir(module.ConvTranspose) if name.startswith("export")]:
        getattr(module.ConvTranspose, export)()
    assert len(cases) >= LEAST
    assert {inputs[0].ndim - 2 for _, inputs, _ in cases} == {1, 2, 3}
    may_refuse, refused = algorithm in (("direct", "fused") if device == "cuda" else REFUSED_ON_A_CPU), 0
    for node, inputs, (expected,) in cases:
        input, weight, *bias = (torch.from_numpy(one).to(device) for one in inputs)
        attributes = {one.name: value_of(one) for one in node.attribute}
        call, size = geometry(input.shape[2:], weight.shape[2:], attributes)
        try:
            with conv_precision("ieee"):
                output = FUNCTIONS[len(size)](input, weight, *(bias or [None]), *call, algorithm=algorithm)
        except NotImplementedError:
            refused += 1
            continue
        torch.testing.assert_close(output[(..., *map(slice, size))].cpu(), torch.from_numpy(expected))
    if may_refuse and refused == len(cases):
        pytest.skip(f"{algorithm} serves no case here")
    assert may_refuse or refused == 0
