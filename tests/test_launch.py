"""Programs are plain data, and params structs are laid out as C lays them out."""

import ctypes
import pickle

import pytest
import torch

pytest.importorskip("cuda.core", reason="loading kernels needs the cuda-core package")

from gemmconv.kernels.launch import ByFormat, Launch, Long, Operand, Output, Program, TensorMapSpec, _layout
from tests import emulator, test_kernels

needs_compiler = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler (g++ or c++) to emulate with")
RUNS = test_kernels.usual(test_kernels.RUNS)
ONE_OF_EACH = {run.operation: run for run in reversed(RUNS) if run.operation in test_kernels.PASSES}


@needs_compiler
@pytest.mark.parametrize("operation", ONE_OF_EACH)
def test_programs_of_each_kernel_survive_pickling(operation, builder, poison, monkeypatch):
    prepare, pickled = Program.prepare, []

    def prepare_what_is_pickled(program, device):
        pickled.append(pickle.dumps(program))
        again = pickle.loads(pickled[-1])
        assert again == program
        return prepare(again, device)

    monkeypatch.setattr(Program, "prepare", prepare_what_is_pickled)
    run = ONE_OF_EACH[operation]
    poison("cpu")
    with emulator.install(builder):
        run.check(run.prepare())
    assert pickled


def test_params_lie_as_ctypes_lays_them_out():
    spec = TensorMapSpec("a", 2, (1, 1, 1, 1), (16, 16, 16), (1, 1, 1, 1))
    fields = [("a", ctypes.c_void_p), ("b", ctypes.c_int), ("c", ctypes.c_longlong), ("d", ctypes.c_int)]
    struct = type("struct", (ctypes.Structure,), {"_fields_": [*fields, ("e", ctypes.c_void_p), ("f", ctypes.c_int)]})
    params, pack, slots = _layout(["a", 1, Long(2**63), ByFormat(3, 4), "e", -5])
    names, constants = [slot for slot in slots if isinstance(slot, str)], [s for s in slots if isinstance(s, tuple)]
    assert names == ["a", "e"]
    for i, last in enumerate((3, 4)):
        packed = params(pack(10, constants[0][i], 20, constants[1][i]))
        assert bytes(packed) == bytes(struct(10, 1, -(2**63), last, 20, -5))
    params, pack, slots = _layout([spec, "a", 1, spec])
    assert len(bytes(params(pack(bytes(128), 1, slots[2][0], bytes(128), slots[4][0])))) == 320  # the second at 192


def test_params_have_as_many_values_as_names():
    launch = Launch("x.cu", {}, (1, 1, 1), (1, 1, 1), {"a, b": (1, 2, 3)})
    with pytest.raises(AssertionError, match=r"x.cu: values of a, b, got \(1, 2, 3\)"):
        list(launch.fields)


def test_programs_without_launches_return_zeros_of_the_strides_that_they_promise():
    output = Output("output", (2, 3, 4, 5), (60, 1, 15, 3))
    call = Program(torch.float32, (Operand("input", None),), (output,), ()).prepare(torch.device("cpu"))
    assert (result := call(torch.ones(1))).stride() == (60, 1, 15, 3)
    assert not result.any()
