"""What tests/test_executor.py runs in processes of their own, in which libcuda.so.1 is tests/fake_driver.c.

    python -m tests.executor_checks FOLDER NAME

Neither torch nor gemmconv is imported. A step's tuple is as csrc/executor.c takes it.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import itertools
import pickle
import resource
import struct
import sys
import threading
from pathlib import Path

from tests.processes import in_threads

FAKE = 700  # CUDA_ERROR_FAKE
WIDE = 2**63 + 8  # an address that is no long long
GRID, BLOCK = (1, 2, 3), (4, 5, 6)
# Type, sizes, strides, box, steps, swizzle, promotion; and what the driver makes of it, after the address.
MAP = (2, *(5, 6, 7, 8), *(16, 32, 48), *(9, 10, 11, 12), *(1, 2, 3, 4), 3, 2)
MAP_BYTES = (2, 4, 5, 6, 7, 8, 16, 32, 48, 9 << 16 | 10, 11 << 16 | 12, 1 << 16 | 2, 3 << 16 | 4, 3, 2 << 16)
REFUSALS = TypeError, ValueError, OverflowError, SystemError, RuntimeError

FOLDER = Path(sys.argv[1]) if __name__ == "__main__" else None
CHECKS = []


def check(function):
    CHECKS.append(function.__name__)
    return function


def check_in_context(function):
    """A check that begins with the context of device 3 made current."""

    def checked():
        DRIVER.set_context(1043)
        function()

    CHECKS.append(function.__name__)
    return checked


def executor():
    spec = importlib.util.spec_from_file_location("_extension", FOLDER / "_extension.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def driver():
    library = ctypes.CDLL("libcuda.so.1")
    library.said.restype = ctypes.c_char_p
    return library


def count(name):
    """What the driver has counted."""
    return ctypes.c_long.in_dll(DRIVER, name).value


def said():
    """What the driver was asked for since it was last asked here."""
    lines = DRIVER.said().decode().splitlines()
    DRIVER.forget()
    return lines


def functions():
    return tuple(ctypes.cast(f, ctypes.c_void_p).value for f in (DRIVER.fake_gemm, DRIVER.fake_math_mode))


def program(*steps, alignments=(), device=3):
    return MODULE.Program(device, functions(), tuple(alignments), steps)


def launch(params=b"", pointers=(), maps=(), overlaps=0):
    return (0, 0x70000 | len(params), "näme", (*GRID, *BLOCK, 7, overlaps), params, pointers, maps)


def product(double=0, accumulates=0, indices=(0, 1, 2)):
    a, b, c = indices
    of = (a, 16, 0, 4, 5, b, 32, 2, 6, 7, c, 0, 14, 8, -9)
    return (1, 10, 11, 12, 0, 1, *of, 3, 70 if double else 68, double, accumulates)


EVERY_STEP = (
    launch(bytes(range(1, 25)), ((8, 1, 4),), overlaps=1),
    launch(bytes(256), ((0, 0, 0),), ((128, 2, 16, *MAP),)),
    product(),
    (2, 0, 4, 5),
)


@contextlib.contextmanager
def refused(kind, *words):
    said = None
    try:
        yield
    except kind as error:
        said = str(error)
    assert said is not None, f"{kind} was not raised"
    assert all(word in said for word in words), f"{words} are not all in {said!r}"


@contextlib.contextmanager
def failing(name, status=FAKE):
    """While it lasts, this function of the driver fails."""
    DRIVER.fail(name.encode(), status)
    yield
    DRIVER.fail(b"", 0)


def keeps_no_memory(held, work, few, many):
    """That work, after a few rounds, leaves no references to what is held, and takes no memory, in many."""
    work(*few)
    gc.collect()
    counts, before = [sys.getrefcount(of) for of in held], resident_bytes()
    work(*many)
    gc.collect()
    assert [sys.getrefcount(of) for of in held] == counts
    assert resident_bytes() - before < 1 << 20, f"{resident_bytes() - before} bytes more"


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@check
def launches_have_their_shape():
    for overlaps, attribute in ((0, ""), (1, " 6=1")):
        one = program(launch(b"\1\2\3", overlaps=overlaps))
        said()
        assert one.run(WIDE, 0) == 0
        assert said() == ["push 1043", f"launch 70003 {GRID} {BLOCK} 7 {WIDE:x}{attribute} 010203", "pop"]


@check
def pointers_are_put_into_params():
    pointers = ((0, 1, 4), (12, 0, 0), (20, 2, 2**64 - 8), (32, 3, 5))
    one = program(launch(bytes(range(40)), pointers))
    said()
    assert one.run(0, 0, 0x1000, WIDE, 0x2000, 0) == 0
    wanted = bytearray(range(40))
    for at, value in ((0, WIDE + 4), (12, 0x1000), (20, 0x2000 - 8), (32, 0)):  # the last one stays null
        struct.pack_into("<Q", wanted, at, value)
    assert said()[1].split()[-1] == wanted.hex()


@check
def tensor_maps_are_put_into_params():
    one = program(launch(b"\xff" * 320, ((128, 0, 1),), ((0, 0, 16, *MAP), (192, 1, 0, *MAP))))
    said()
    assert one.run(0, 0, 0x1000, WIDE) == 0
    first, second = (struct.pack("<16Q", address, *MAP_BYTES) for address in (0x1010, WIDE))
    between = struct.pack("<Q", 0x1001) + b"\xff" * 56
    assert said()[1].split()[-1] == (first + between + second).hex()
    with refused(RuntimeError, "a tensor map was refused"):
        program(launch(bytes(192), (), ((8, 0, 0, *MAP),))).run(0, 0, 64)


@check
def products_are_asked_of_cublas():
    for double, accumulates in itertools.product((0, 1), repeat=2):
        one = program(product(double, accumulates), product(double, accumulates, (2, 2, 0)))
        said()
        assert one.run(5, WIDE, 0x1000, 0x2000, 0x3000) == 0
        middle = f"{WIDE:x} 0 1 10 11 12 1"
        tail = f"14 8 -9 3 {70 if double else 68} -1"
        assert said()[1:-1] == [
            f"mode {WIDE:x} 16",
            f"gemm {middle} 1010 0 4 5 2020 2 6 7 {accumulates} 3000 {tail}",
            f"gemm {middle} 3010 0 4 5 3020 2 6 7 {accumulates} 1000 {tail}",
        ]
    without = MODULE.Program(0, (0, 0), (), ((2, 0, 0, 1),))
    assert without.run(0, 5, 64) == 0  # has no use for the handle


@check
def memory_is_cleared():
    one = program((2, 1, 4, 2**40), (2, 0, 0, 0), (2, 0, 0, 1))
    said()
    assert one.run(5, 0, 0x1000, 0x2000) == 0
    assert said()[1:-1] == [f"clear 2004 0 {2**40} 5", "clear 1000 0 1 5"]


@check
def what_is_not_aligned_is_answered():
    one = program((2, 0, 0, 1), alignments=(1, 16, 4))
    said()
    for addresses, answer in (((3, 0, 4), 0), ((3, 16, 4), 0), ((3, 24, 4), 2), ((3, 32, 6), 3), ((3, 8, 6), 2)):
        assert one.run(0, 0, *addresses) == answer
        assert bool(said()) == (answer == 0)


@check
def a_context_is_made_current_where_it_is_not():
    one = program(*EVERY_STEP)
    for current, pushes in ((0, 1), (1041, 1), (1043, 0)):
        DRIVER.set_context(current)
        said()
        assert one.run(0, 9, 64, 128, 256) == 0
        lines = said()
        assert (lines[0] == "push 1043") == (lines[-1] == "pop") == bool(pushes)
        assert sum(line in ("push 1043", "pop") for line in lines) == 2 * pushes
        assert DRIVER.context() == current


@check
def failures_are_raised():
    one = program(*EVERY_STEP)
    shape = "grid (1, 2, 3), block (4, 5, 6), 7 bytes of shared memory"
    expected = {
        "cuLaunchKernelEx": ("näme: launch failed with CUDA_ERROR_FAKE", shape),
        "cuTensorMapEncodeTiled": ("näme: a tensor map was refused with CUDA_ERROR_FAKE", shape),
        "fake_gemm": ("cublasGemmStridedBatchedEx failed with cublasStatus_t 700",),
        "fake_math_mode": ("cublasSetMathMode failed with cublasStatus_t 700",),
        "cuMemsetD8Async": ("memory could not be cleared with CUDA_ERROR_FAKE",),
        "cuCtxGetCurrent": ("the device could not be made current with CUDA_ERROR_FAKE",),
        "cuCtxPushCurrent_v2": ("the device could not be made current with CUDA_ERROR_FAKE",),
        "cuCtxPopCurrent_v2": ("the device before could not be made current with CUDA_ERROR_FAKE",),
    }
    order = ["mode", "launch", "launch", "gemm", "clear"]
    for current in (0, 1041, 1043):
        DRIVER.set_context(current)
        for name, words in expected.items():
            if current == 1043 and name in ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"):
                continue
            said()
            with failing(name), refused(RuntimeError, *words):
                one.run(0, 9, 64, 128, 256)
            done = [line.split()[0] for line in said() if line != "pop" and not line.startswith("push")]
            assert done == order[: len(done)]  # nothing after what failed
            assert (len(done) == len(order)) == (name in ("cuMemsetD8Async", "cuCtxPopCurrent_v2"))
            assert DRIVER.context() == current
            assert count("contexts_pushed") == 0
    with failing("cuLaunchKernelEx", 12345), refused(RuntimeError, "launch failed with an unknown status"):
        one.run(0, 9, 64, 128, 256)


@check
def contexts_are_retained_once_and_released_once():
    programs = [program(device=2) for _ in range(3)]
    assert said() == ["init 0", "device 2", "retain 42"] * 3
    programs[0].run(0, 0), programs[0].run(0, 0)
    del programs[0]
    assert count("contexts_retained") == 2
    del programs[:]
    assert said().count("release 42") == 3
    for name in ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"):
        with failing(name), refused(RuntimeError, "device 3 refused with CUDA_ERROR_FAKE"):
            program(*EVERY_STEP)
    assert count("contexts_retained") == 0


@check
def runs_with_wrong_values_are_refused():
    """Also with fewer addresses than steps name: they would be whatever lies on the stack."""
    one = program((2, 5, 0, 1), alignments=(1, 1))
    said()
    six = range(6)
    for values in ((), (0,), (0, 0), (0, 0, 1, 2), (0, 0, *six[:5]), (0, 0, *range(33))):
        with refused(TypeError, "run takes a stream, a cuBLAS handle and 6 to 32 addresses"):
            one.run(*values)
    kinds = {-1: OverflowError, 2**64: OverflowError, "1": TypeError, None: TypeError, 1.5: TypeError}
    for wrong, kind in kinds.items():
        for i in range(8):
            with refused(kind):
                one.run(*(wrong if i == j else 16 for j in range(8)))
    assert said() == []
    assert one.run(0, 0, *six) == 0
    assert one.run(0, 0, *range(32)) == 0


@check
def bad_programs_are_refused():
    params = bytes(256)
    bad = [
        *((2, index, 0, 1) for index in (-1, 32, 2**31)),
        *(product(indices=indices) for indices in ((-1, 0, 0), (0, 32, 0), (0, 0, 2**31))),
        launch(bytes(4097)),
        *(launch(params, ((at, 0, 0),)) for at in (249, 256, -8, -1, 2**31 - 1, 2**32 - 8, 2**32)),
        *(launch(params, (), ((at, 0, 0, *MAP),)) for at in (129, 192, 256, -128, -1, 2**32 - 128, 2**32 - 64)),
        *(launch(params, ((0, index, 0),)) for index in (-1, 32)),
        *(launch(params, (), ((0, index, 0, *MAP),)) for index in (-1, 32)),
        *((), (3,), (-1,), (2**32,), (2**64,), ("0",), (None,), None, 2, "200"),
        *([2, 0, 0, 1], (2, 0, 0), (2, 0, 0, 1, 1)),
        *(launch()[:-1], (*launch(), ()), launch(pointers=[]), launch(maps=None), launch(pointers=(None,))),
    ]
    for step in bad:
        with refused(REFUSALS):
            program(*EVERY_STEP, step)
    for alignments in ((0,), (-1,), (2**32,), (2**64,), ("1",), (None,), (1,) * 33):
        with refused(REFUSALS):
            program(alignments=alignments)
    for arguments in ((), (0,), (0, (0, 0), [], ()), (0, (0, 0), (), []), (0, (0,), (), ()), (0, None, (), ())):
        with refused(REFUSALS):
            MODULE.Program(*arguments)
    for some in ((0, 0), (0, 5), (5, 0)):
        with refused(ValueError, "products need cuBLAS's functions"):
            MODULE.Program(0, some, (), (product(),))
    assert count("contexts_retained") == 0
    assert said() == []


def changed(of, junk):
    """A tuple, as often with one value of it replaced, and the values in it by turns."""
    for i, value in enumerate(of):
        for new in (*junk, *(changed(value, junk) if isinstance(value, tuple) else ())):
            yield (*of[:i], new, *of[i + 1 :])


@check
def no_value_of_a_step_makes_it_crash():
    junk = None, -1, 33, 127, 2**31, 2**32, 2**32 - 128, 2**63, 2**64, 1.5, "x", b"", (), (1,), [1]
    refusals = made = 0
    for step in EVERY_STEP:
        for other in changed(step, junk):
            try:
                one = program(other)
            except REFUSALS:
                refusals += 1
                continue
            made += 1
            if other[0] != 0 or (other[1] == step[1] and len(other[4]) == len(step[4])):  # the driver reads so many
                with contextlib.suppress(RuntimeError):
                    one.run(0, 9, *range(0, 32 * 64, 64))
            del one
        DRIVER.forget()
    assert min(refusals, made) > 100
    assert count("contexts_retained") == 0


@check
def memory_does_not_grow():
    one = program(*EVERY_STEP, alignments=(64,))
    with_map = program(launch(bytes(128), (), ((0, 0, 0, *MAP),)), (2, 0, 0, 1))
    bad = (None, (*launch(bytes(300), ((0, 0, 0), (300, 0, 0)))[:-1], ()), launch(bytes(256), (), ((0, 0, 0, *MAP), 1)))
    DRIVER.be_quiet(1)
    held = [MODULE.Program, EVERY_STEP, *EVERY_STEP, EVERY_STEP[0][4], EVERY_STEP[1][6][0], bad]

    def work(runs, programs):
        for i in range(runs):
            assert one.run(0, 9, 64, 128, 256) == 0
            assert one.run(0, 9, 65, 128, 256) == 1
            if i % 10 == 0:
                with failing("cuTensorMapEncodeTiled"), refused(RuntimeError):
                    with_map.run(0, 0, 64)
                with refused(TypeError):
                    one.run(0, 9, 64, None, 256)
        for i in range(programs):
            program(*EVERY_STEP, *(launch(bytes(4096), ((0, 0, 0),) * 50),) * 4)
            with refused(REFUSALS):
                program(*EVERY_STEP, bad[i % 3])

    keeps_no_memory(held, work, (2000, 200), (100_000, 2000))
    assert count("contexts_retained") == 2


@check
def the_lock_is_not_held_in_calls_of_the_driver():
    assert count("calls_with_lock") == 0
    one = program(*EVERY_STEP)
    assert one.run(0, 9, 64, 128, 256) == 0
    assert len(said()) > 8
    assert count("calls_with_lock") == 0
    ctypes.PyDLL("libcuda.so.1").cuInit(0)  # which does hold it
    assert count("calls_with_lock") == 1


@check
def threads_run_one_program_at_once():
    one, answers, each = program(*EVERY_STEP), [], 100
    DRIVER.be_quiet(2)

    def work():
        for _ in range(each):
            answers.append(one.run(0, 9, 64, 128, 256))

    in_threads(work, work)
    assert answers == [0] * 2 * each
    assert count("kernels_launched") == 2 * 2 * each
    assert count("most_at_once") == 2
    assert count("contexts_pushed") == 0


@check
def modules_and_types_can_go():
    """A module may be loaded again; its programs outlive it."""
    for _ in range(100):
        again = executor()
        one = again.Program(0, (0, 0), (), ((2, 0, 0, 1),))
        run = one.run
        del again, one
        assert run(0, 0, 64) == 0
    del run
    assert count("contexts_retained") == 0


# Calls, of tensors that are only addresses


class Array:
    def __init__(self, address):
        self.address = address


NO_STREAM = []


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("kind", ctypes.c_uint64 * 4), ("offset", ctypes.c_uint64)]


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Tensor))
def tensor_of(array, tensor):
    if array.address is None:
        return -1
    tensor[0].data, tensor[0].offset = array.address - 4, 4
    return 0


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))
def current_stream(device_type, device, stream):
    if NO_STREAM:
        return -1
    stream[0] = 100 * device_type + device
    return 0


def exchange(major=1, minor=3, whole=True):
    """A capsule, and what has to live as long."""
    addresses = [ctypes.cast(one, ctypes.c_void_p).value * whole for one in (tensor_of, current_stream)]
    data = (ctypes.c_uint64 * 7)(minor << 32 | major, 0, 0, 0, 0, *addresses)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(data), b"dlpack_exchange_api", None), data


EXCHANGE, _data = exchange()
OUTPUTS, SCRATCH = (((2,), (1,), "a"),), ((7,), (1,), "c")


def call(
    one, outputs=(), operands=b"\0", scratch=None, device_of=lambda: 5, blas_of=None, otherwise=None, allocate=None
):
    places = itertools.count(1024, 1024)
    allocate = allocate or (lambda *arguments: Array(next(places)))
    return MODULE.Call(one, EXCHANGE, 5, allocate, outputs, operands, scratch, (device_of, blas_of), otherwise).run


@check
def a_call_allocates_and_runs():
    asked = []

    def allocate(*arguments):
        asked.append(arguments)
        return Array(1024 * len(asked))

    pointers = tuple((8 * i, i, 0) for i in range(6))
    one = program(launch(bytes(48), pointers), product(indices=(0, 1, 5)))
    outputs = *OUTPUTS, ((3,), (1,), "b")
    run = call(one, outputs, bytes((2, 1, 2)), SCRATCH, blas_of=lambda: 9, allocate=allocate)
    DRIVER.set_context(1043)
    said()
    results = run(Array(32), None, Array(64))
    assert [type(results), *(array.address for array in results)] == [tuple, 1024, 2048]
    assert asked == [*outputs, SCRATCH]
    of_run = said()
    assert one.run(205, 9, 1024, 2048, 64, 0, 64, 3072) == 0
    assert said() == of_run
    assert of_run
    assert call(program((2, 1, 0, 8)), OUTPUTS)(Array(64)).address == 1024
    assert call(program((2, 0, 0, 8)))(Array(64)) == ()
    assert call(program((2, 0, 0, 8)), OUTPUTS, b"")().address == 1024


@check
def a_call_that_cannot_is_anothers():
    """Where another device or context is current, or an address is not aligned, before anything was enqueued."""
    one, left, right = program((2, 1, 0, 8), alignments=(1, 16)), Array(64), Array(72)
    for device, context, array in ((5, 1043, right), (5, 1041, left), (5, 0, left), (4, 1043, left)):
        DRIVER.set_context(context)
        said()
        run = call(one, OUTPUTS, device_of=lambda device=device: device, otherwise=lambda *of: ("another", *of))
        assert run(array, None) == ("another", array, None)
        assert said() == []
    DRIVER.set_context(1043)
    assert call(one, OUTPUTS)(left).address == 1024


@check_in_context
def calls_that_fail_raise():
    one, repeated = program((2, 1, 0, 8)), Repeated()

    def fail(*arguments):
        raise MemoryError("no more")

    for asked in ("allocate", "device_of", "blas_of"):
        with refused(MemoryError, "no more"):
            call(one, OUTPUTS, **{asked: fail})(Array(64))
    with refused(TypeError):
        call(one, OUTPUTS, device_of=lambda: "5")(Array(64))
    with refused(TypeError, "4 tensors", "got 3"):
        call(one, OUTPUTS, bytes((0, 3)))(*[Array(64)] * 3)
    for operands in (b"", bytes(31)):
        with refused(ValueError, "2 to 31", f"got {1 + len(operands)}"):
            call(one, OUTPUTS, operands)
    for bad in ("first", "output", "scratch"):
        with refused(RuntimeError, "a tensor could not be read"):
            repeated(**{bad: None})
        assert said() == []
    NO_STREAM.append(1)
    with refused(RuntimeError, "torch named no stream"):
        call(one, OUTPUTS)(Array(64))
    NO_STREAM.clear()
    assert said() == []
    with failing("cuMemsetD8Async"), refused(RuntimeError, "CUDA_ERROR_FAKE"):
        call(one, OUTPUTS)(Array(64))
    with refused(ValueError, "version 1.2 or later, and whole, got 2.3"):
        another, _kept = exchange(2)
        MODULE.Call(one, another, 5, fail, OUTPUTS, b"\0", None, (fail, None), None)
    wrong = (one, object(), OUTPUTS), (object(), EXCHANGE, OUTPUTS), (one, EXCHANGE, [])
    for (of, capsule, outputs), kind in zip(wrong, ((TypeError, ValueError), TypeError, TypeError), strict=True):
        with refused(kind):
            MODULE.Call(of, capsule, 5, fail, outputs, b"\0", None, (fail, None), None)


# What is called with the same addresses again

REPEATED = (
    launch(bytes(32), ((0, 0, 0), (8, 1, 0), (16, 2, 4))),
    (2, 3, 0, 8),
    launch(bytes(256), ((0, 1, 0),), ((128, 2, 16, *MAP),), overlaps=1),  # not before what clears has ended
    (2, 0, 0, 0),
    launch(bytes(8), ((0, 3, 0),), overlaps=1),
)


class Repeated:
    """A call with one output, two operands and scratch memory, whose places are given at each."""

    def __init__(self, steps=REPEATED, **more):
        self.places = places = []
        self.run = call(program(*steps), OUTPUTS, b"\0\1", SCRATCH, allocate=lambda *_: Array(places.pop(0)), **more)

    def __call__(self, first=64, second=128, output=1024, scratch=2048):
        """What the driver was asked for, but for graphs that were made."""
        self.places[:] = output, scratch
        said()
        arrays = Array(first), None if second is None else Array(second)
        assert self.run(*arrays).address == output
        return [line for line in said() if not line.startswith("make")]


def is_replay(lines, step_by_step):
    """Whether lines are of a replay, of what these were, word by word."""
    if not lines[0].startswith("replay"):
        assert lines == step_by_step
        return False
    assert lines.pop().startswith("early")  # the last launch may begin before what is before it has ended
    words = [line.replace(" in 1043", "").split() for line in lines[1:]]
    wanted = [[word for word in line.split() if word != "6=1"] for line in step_by_step]
    assert words == wanted
    return True


@check_in_context
def calls_with_the_same_addresses_are_replayed():
    one = Repeated()
    places = (64, 128, 1024, 2048), (80, 128, 1024, 2048), (64, None, 1024, 2048), (64, 128, 1040, 2048)
    places = *places, (64, 128, 1024, 4096)
    plain = [one(*each) for each in places]
    assert [lines[0].split()[0] for lines in plain] == ["launch"] * len(places)
    assert [is_replay(one(*each), lines) for each, lines in zip(places, plain, strict=True)] == [False] * len(places)
    for _ in range(3):
        for each, lines in zip(places, plain, strict=True):
            assert is_replay(one(*each), lines)
    assert count("asked_of_stream") == 205
    assert (count("graphs_there"), count("replays_there"), MODULE.replays()) == (0, 5, 5)
    assert DRIVER.mode_of_capture() == 0
    del one
    assert {line.split()[-1] for line in said() if line.startswith("forget")} == {"2"}  # in relaxed mode
    assert (count("replays_there"), MODULE.replays(), DRIVER.mode_of_capture()) == (0, 0, 0)


@check_in_context
def captures_and_parts_of_the_device_have_no_graphs():
    one = Repeated()
    plain = one()
    for set_to, value in ((DRIVER.set_capturing, 1), (DRIVER.set_capturing, 2), (DRIVER.set_stream_context, 1044)):
        set_to(value)
        for i in range(20):
            assert one(64 * (1 + i % 2)) == (plain if i % 2 == 0 else one(128))
        set_to(0)
    assert not is_replay(one(), plain)  # the second of its kind
    assert is_replay(one(), plain)
    DRIVER.set_capturing(1)
    assert one() == plain
    DRIVER.set_capturing(0)
    assert is_replay(one(), plain)


@check_in_context
def one_step_and_products_are_not_replayed():
    for steps in (REPEATED[:1], (*REPEATED, product(indices=(0, 1, 1)))):
        one = Repeated(steps, blas_of=lambda: 9)
        for _ in range(9):
            assert not any(line.startswith("replay") for line in one())


def replays(one, firsts):
    return sum(one(first)[0].startswith("replay") for first in firsts)


@check_in_context
def few_addresses_are_replayed_and_those_that_come_no_longer_make_room():
    one, many = Repeated(), [*range(64, 64 * 13, 64)]
    assert replays(one, many * 10) == 8 * 8  # of twelve by turns eight have a place
    assert MODULE.replays() == 8
    assert replays(one, [9999] * 100) == 0  # no room
    assert replays(one, many[:8]) == 8
    assert replays(one, [9999] * 242) == 0
    assert replays(one, many[1:8]) == 7  # used again
    assert replays(one, [9999] * 20) == 18  # in place of the first
    assert replays(one, many[1:8]) == 7
    assert replays(one, many[:1]) == 0
    assert count("replays_there") == MODULE.replays() == 8
    for first in range(4096, 4096 + 64 * 100, 64):  # all young, of which each is forgotten before it comes again
        one(first)
    del one
    assert count("replays_there") == MODULE.replays() == 0


@check_in_context
def graphs_of_calls_that_rest_make_room_for_others():
    calls = [Repeated() for _ in range(32)]
    for one in calls:
        assert replays(one, [*range(64, 64 * 9, 64)] * 3) == 8
    assert MODULE.replays() == 256
    another = Repeated()
    assert replays(another, [64] * 100) == 0
    used = calls[0]
    for _ in range(4096 // 8):
        assert replays(used, range(64, 64 * 9, 64)) == 8
    assert replays(another, [64] * 10) == 10
    assert replays(used, range(64, 64 * 9, 64)) == 8
    assert count("replays_there") == MODULE.replays() == 256
    del used, another, one
    calls.clear()
    assert count("replays_there") == MODULE.replays() == 0


@check_in_context
def where_no_graph_can_be_made_calls_run_step_by_step():
    making = "cuGraphCreate", "cuGraphAddKernelNode_v2", "cuGraphAddMemsetNode", "cuGraphAddDependencies_v2"
    making = *making, "cuGraphInstantiateWithFlags", "cuThreadExchangeStreamCaptureMode"
    asking = "cuStreamIsCapturing", "cuStreamGetCtx"
    for name in (*making, *asking):
        for attempts in (3, 4):
            one = Repeated()
            plain = one()
            assert [is_replay(one(), plain) for _ in range(2)] == [False, True]
            with failing(name):
                for _ in range(3 * attempts):
                    assert one(80)[0].startswith("launch")
            assert (count("graphs_there"), count("replays_there"), MODULE.replays()) == (0, 1, 1)
            assert is_replay(one(), plain)  # what there is, is used
            comes_later = attempts == 3 or name in asking
            assert (replays(one, [80] * 4) > 0) == comes_later
            del one
            assert count("replays_there") == MODULE.replays() == 0
    one = Repeated()
    plain = one()
    assert [is_replay(one(), plain) for _ in range(2)] == [False, True]
    with failing("cuGraphLaunch"):
        lines = one()
    assert [lines[0].split()[0], lines[-1].split()[0]] == ["replay", "forget"]
    assert lines[1:-1] == plain  # the steps after all, and the graph is gone
    assert count("replays_there") == MODULE.replays() == 0
    assert [is_replay(one(), plain) for _ in range(3)] == [False, False, True]


def at_one_place():
    """A call whose output and scratch memory always have the same addresses."""
    return call(program(*REPEATED), OUTPUTS, b"\0\1", SCRATCH, allocate=lambda *_: Array(1024))


def replayed():
    """Such a call that has a graph for two operands, and those."""
    run, array, other = at_one_place(), Array(64), Array(128)
    for _ in range(3):
        run(array, other)
    return run, array, other


@check_in_context
def threads_launch_no_graph_at_once():
    """Nor forget one that another launches; a call that finds it busy runs step by step."""
    each = 100
    run, array, other = replayed()
    assert MODULE.replays() == 1
    launched = count("kernels_launched")

    def work(change):
        DRIVER.set_context(1043)
        for i in range(each):
            run(Array(256 * (2 + i)) if change else array, other)

    DRIVER.be_quiet(2)
    in_threads(*(functools.partial(work, change) for change in (0, 0, 1)))
    DRIVER.be_quiet(0)
    assert count("graphs_at_once") == 0
    assert count("kernels_launched") > launched + 2 * each
    said()
    run(array, other)
    assert said()[0].startswith("replay")


@check_in_context
def a_graph_that_is_being_launched_is_not_forgotten():
    run, array, other = replayed()

    def work():
        DRIVER.set_context(1043)
        run(array, other)

    DRIVER.hold_replays(1)
    thread = threading.Thread(target=work)
    thread.start()
    while not count("replays_in_flight"):
        assert thread.is_alive(), "no graph was launched"
    for i in range(2000):  # all of them other addresses
        run(Array(256 * (2 + i)), other)
    assert count("replays_in_flight") == count("replays_there") == 1
    DRIVER.hold_replays(0)
    thread.join()


@check_in_context
def the_lock_is_not_held_while_graphs_are_made_launched_and_forgotten():
    one = Repeated()
    one()
    held = count("calls_with_lock")
    one()
    asked = count("calls_with_lock") - held  # what is asked of a stream takes no time
    assert asked <= 3
    for _ in range(2):
        held = count("calls_with_lock")
        one()
        assert count("calls_with_lock") == held + asked
    held = count("calls_with_lock")
    del one
    assert count("calls_with_lock") <= held + 1  # the context's release
    assert count("replays_there") == 0


@check_in_context
def calls_keep_no_memory():
    DRIVER.be_quiet(1)
    one, arguments, array = program(*EVERY_STEP, alignments=(64,)), ((2,), (1,), "a"), Array(64)
    held = [one, arguments, array, EXCHANGE, MODULE.Call]

    def work(runs):
        again = at_one_place()
        for i in range(runs):
            again(Array(64 * (1 + i // 5 % 99)), array)
        run = call(one, (arguments, arguments), b"\0", arguments, blas_of=lambda: 9, otherwise=lambda *of: of)
        for _ in range(runs):
            assert len(run(array)) == 2
        for _ in range(runs // 10):
            other = call(one, (arguments,), b"\0\1", otherwise=lambda *of: of, device_of=lambda: 6)
            assert len(other(array, array)) == 2

    keeps_no_memory(held, work, (500,), (50_000,))


def python_asks_for_the_same(path):
    """Programs with their addresses, and what the executor in Python made of them."""
    programs = pickle.loads(path.read_bytes())
    assert programs
    for alignments, steps, addresses, answer, lines in programs:
        DRIVER.set_context(1040)
        one = MODULE.Program(0, functions(), alignments, steps)
        said()
        products = any(step[0] == 1 for step in steps)
        assert one.run(7, 9 if products else 0, *addresses) == answer
        modes = [line for line in lines if line.startswith("mode")]
        in_c = said()
        assert in_c[: len(modes[:1])] == modes[:1]  # once for all products; in Python for each
        assert in_c[len(modes[:1]) :] == [line for line in lines if not line.startswith("mode")]


if __name__ == "__main__":
    DRIVER, MODULE = driver(), executor()
    globals()[sys.argv[2]](*map(Path, sys.argv[3:]))
