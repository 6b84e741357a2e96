"""The emulator itself: what it computes, and that it notices mistakes. Needs a C++ compiler, no GPU.

The mistakes here are in kernels of its own; those of csrc/ are damaged in test_kernels.py.
"""

import ctypes
import errno
import functools
import math
import re
import subprocess

import pytest
import torch

from gemmconv.kernels.macros import ELEMENT_TYPES
from gemmconv.runtime import sources
from tests import emulator
from tests.emulator import build
from tests.emulator.translate import TWINS


class Pointers(ctypes.Structure):
    _fields_ = [("pointers", ctypes.c_void_p * 3)]


def launch_source(builder, source, macros, shared_bytes, *tensors, threads=32):
    """Run `test_kernel` of a source of its own: one block, with three pointers."""

    def read(name):
        return source if name == "test.cu" else sources.read(name)

    build = functools.partial(builder.kernel, "test.cu", macros, read)
    kernel = emulator.Kernel(builder, build, "test_kernel", shared_bytes)
    params = Pointers((ctypes.c_void_p * 3)(*(tensor.data_ptr() for tensor in tensors)))
    kernel.launch((1, 1, 1), (threads, 1, 1), params, shared_bytes)


def cut_to_tf32(values):
    """Return values as TF32 products take them; of 16 bits, as they are."""
    return (values.view(torch.int32) & ~0x1FFF).view(torch.float32) if values.dtype == torch.float32 else values


PRODUCT = """
#include "ptx/mma.cuh"
struct test_params { const unsigned* a; const unsigned* b; float* d; };
extern "C" __global__ void __launch_bounds__(32) test_kernel(const __grid_constant__ test_params p) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const a_words_t a = {{p.a[g * 8 + t], p.a[g * 8 + 64 + t], p.a[g * 8 + t + 4], p.a[g * 8 + 64 + t + 4]}};
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = p.d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    mma_words<ELEMENT_T>::mma(d, a, p.b[g * 8 + t], p.b[g * 8 + t + 4]);
    for (int i = 0; i < 4; ++i) p.d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}
"""


@emulator.needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_emulator_multiplies_by_the_definition(dtype, builder):
    values = 32 // dtype.itemsize
    a, b, d = torch.randn(16, values).to(dtype), torch.randn(8, values).to(dtype), torch.randn(16, 8)
    wanted = d.double() + cut_to_tf32(a).double() @ cut_to_tf32(b).double().mT
    launch_source(builder, PRODUCT, {"ELEMENT_T": ELEMENT_TYPES[dtype]}, 0, a, b, d)
    torch.testing.assert_close(d.double(), wanted, rtol=0, atol=2e-6)


ROUNDING = """
#include "ptx/mma.cuh"
struct test_params { const unsigned* source; unsigned* rounded; unsigned* rest; };
extern "C" __global__ void __launch_bounds__(32) test_kernel(const __grid_constant__ test_params p) {
    for (int i = threadIdx.x; i < VALUES; i += 32) {
        unsigned rest = 0;
        p.rounded[i] = rounded<PARTS_OF_VALUE, float>(p.source[i], rest);
        p.rest[i] = rest;
    }
}
"""


def round_to_tf32(builder, values, arch, parts):
    """Return what products take of float32 values rounded by the kernels' own code; of two parts, both."""
    rounded, rest = torch.zeros_like(values), torch.zeros_like(values)
    macros = {"VALUES": values.numel(), "PARTS_OF_VALUE": parts, "__CUDA_ARCH__": arch}
    launch_source(builder, ROUNDING, macros, 0, values, rounded, rest)
    return cut_to_tf32(rounded), cut_to_tf32(rest)


@emulator.needs_compiler
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("arch", [800, 900])
def test_rounding_to_tf32_is_to_nearest(builder, arch, parts):
    """Ties go to even where one instruction rounds, else away from zero."""
    representable = torch.randn(500).view(torch.int32) & ~0x1FFF
    ties = representable + 0x1000
    values = torch.cat([representable, ties - 1, ties, ties + 1]).view(torch.float32)
    fraction, exponent = torch.frexp(values.double())
    scaled = fraction.abs() * 2**11
    nearest = torch.ldexp((scaled.round() if arch >= 900 else (scaled + 0.5).floor()).copysign(fraction), exponent - 11)
    rounded, rest = round_to_tf32(builder, values, arch, parts)
    assert torch.equal(rounded.double(), nearest)
    assert (
        parts == 1
        or ((rounded.double() + rest.double() - values.double()).abs() <= values.double().abs() * 2.0**-22).all()
    )


@emulator.needs_compiler
@pytest.mark.parametrize("arch", [800, 900])
def test_rounding_to_tf32_keeps_what_is_not_finite(builder, arch):
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    assert torch.equal(round_to_tf32(builder, special, arch, 1)[0].view(torch.int32), special.view(torch.int32))
    assert torch.equal(sum(round_to_tf32(builder, special, arch, 2)), special)
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F802000], dtype=torch.int32).view(torch.float32)
    for parts in (1, 2):
        assert round_to_tf32(builder, nans, arch, parts)[0].isnan().all()


@emulator.needs_compiler
@pytest.mark.parametrize("arch", [800, 900])
def test_the_largest_float32_has_two_finite_parts(builder, arch):
    largest = torch.tensor([0x7F7FFFFF, 0x7F7FF000, 0x7F7FEFFF, 0x7F7FE000], dtype=torch.int32).view(torch.float32)
    values = torch.cat([largest, -largest])
    big, rest = round_to_tf32(builder, values, arch, 2)
    torch.testing.assert_close(big.double() + rest.double(), values.double(), rtol=2.0**-22, atol=0)


COPIES = """
#include "ptx/cp_async.cuh"
extern __shared__ __align__(16) unsigned char shared[];
struct test_params { const unsigned char* source; unsigned char* before; unsigned char* after; };
extern "C" __global__ void __launch_bounds__(32) test_kernel(const __grid_constant__ test_params p) {
    const int place = threadIdx.x * SIZE;
    for (int i = 0; i < SIZE; ++i) shared[place + i] = 7;
    __syncthreads();
    cp_async<SIZE>(shared + place, p.source + place, threadIdx.x % 3 != 0);
    for (int i = 0; i < SIZE; ++i) p.before[place + i] = shared[place + i];
    wait_for_copies();
    for (int i = 0; i < SIZE; ++i) p.after[place + i] = shared[place + i];
}
"""


@emulator.needs_compiler
@pytest.mark.parametrize("size", [4, 8, 16])
def test_emulator_copies_at_once_or_when_waited_for(size, builder):
    source = torch.randint(8, 256, (32, size), dtype=torch.uint8)
    before, after = torch.zeros_like(source), torch.zeros_like(source)
    launch_source(builder, COPIES, {"SIZE": size}, 32 * size, source, before, after)
    wanted = torch.where((torch.arange(32) % 3 == 0)[:, None], 0, source)
    assert torch.equal(after, wanted)
    assert torch.equal(before[1::2], wanted[1::2])
    assert (before[::2] == 7).all()


@emulator.needs_compiler
def test_emulator_converts_as_torch_does(builder):
    scheduler = builder.scheduler
    scheduler.emulator_half_to_float.restype = ctypes.c_float
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    floats = torch.tensor([scheduler.emulator_half_to_float(bits & 0xFFFF) for bits in halves.tolist()])
    assert torch.equal(floats.nan_to_num(7), halves.view(torch.float16).float().nan_to_num(7))

    finite = floats[floats.isfinite()].sort().values.unique()
    ties = (finite[1:] + finite[:-1]) / 2
    values = torch.cat(
        [finite, ties, ties.nextafter(finite[1:]), torch.tensor([65519.9, 65520.0, 1e30, math.inf, -math.inf])]
    )
    for name, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16)):
        convert = scheduler[f"emulator_float_to_{name}"]
        convert.restype, convert.argtypes = ctypes.c_uint16, [ctypes.c_float]
        bits = torch.tensor([convert(value) for value in values.tolist()]).to(torch.int16)
        assert torch.equal(bits.view(dtype), values.to(dtype))
        assert convert(math.nan) == 0x7FFF


# wgmma, mbarriers, bulk copies

# A warpgroup fetches steps of A [64, STEPS * 16] and B [COLUMNS, STEPS * 16] into two stages, another multiplies.
PIPELINE = """
#include "ptx/mbarrier.cuh"
#define WGMMA_COLUMNS COLUMNS
#include "ptx/wgmma.cuh"
struct test_params { const unsigned char* a; const unsigned char* b; float* d; };  // [STEPS][2][rows][16 bytes]
extern __shared__ __align__(16) unsigned char shared[];
constexpr int kABytes = 64 * 32, kBBytes = COLUMNS * 32, kStageBytes = kABytes + kBBytes;
extern "C" __global__ void __launch_bounds__(256) test_kernel(const __grid_constant__ test_params p) {
    __shared__ __align__(8) barrier_t full[2];
    __shared__ __align__(8) barrier_t empty[2];
    const int thread = threadIdx.x % 128;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < 2; ++stage) {
            barrier_init(full[stage], 1);
            barrier_init(empty[stage], ARRIVALS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<40>();
        for (int step = 0; step < STEPS && thread == 0; ++step) {
            const int stage = step % 2;
            unsigned char* target = shared + stage * kStageBytes;
            barrier_wait(empty[stage], ~(step / 2) & 1);
            barrier_arrive_expecting(full[stage], kStageBytes);
            bulk_copy(target, p.a + step * kABytes, kABytes, full[stage]);
            bulk_copy(target + kABytes, p.b + step * kBBytes, kBBytes, full[stage]);
        }
    } else {
        setmaxnreg_inc<232>();
        float d[COLUMNS / 2];
        for (int step = 0; step < STEPS; ++step) {
            const int stage = step % 2;
            barrier_wait(full[stage], step / 2 & 1);
            const descriptor_t a = descriptor_k_major(shared + stage * kStageBytes, 64 * 16, 128);
            const descriptor_t b = descriptor_k_major(shared + stage * kStageBytes + kABytes, COLUMNS * 16, 128);
            wgmma_fence();
            wgmma<half_t, COLUMNS>(d, a, b, step > 0);
            wgmma_commit();
            wgmma_wait<AHEAD>();
            if (step >= AHEAD && thread % (128 / ARRIVALS) == 0) barrier_arrive(empty[(step - AHEAD) % 2]);
        }
        wgmma_finish(d);
        const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
        for (int i = 0; i < COLUMNS / 2; ++i)
            p.d[(16 * warp + g + i / 2 % 2 * 8) * COLUMNS + i / 4 * 8 + 2 * t + i % 2] = d[i];
    }
}
"""


def check_pipeline(builder, source, ahead=0, arrivals=128, steps=7, columns=64, threads=256):
    """Run PIPELINE or what became of it, and compare."""

    def steps_of(matrix):
        return matrix.view(len(matrix), steps, 2, 8).permute(1, 2, 0, 3).contiguous()

    a, b = torch.randn(64, steps * 16).half(), torch.randn(columns, steps * 16).half()
    d = torch.full((64, columns), math.nan)
    macros = {"STEPS": steps, "COLUMNS": columns, "AHEAD": ahead, "ARRIVALS": arrivals}
    launch_source(builder, source, macros, 64 * (64 + columns), steps_of(a), steps_of(b), d, threads=threads)
    torch.testing.assert_close(d.double(), a.double() @ b.double().mT, rtol=0, atol=1e-4)


@emulator.needs_compiler
@pytest.mark.parametrize("arrivals", [128, 4, 1], ids=["each_thread", "each_warp", "once"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_emulator_runs_a_pipeline(ahead, arrivals, builder):
    check_pipeline(builder, PIPELINE, ahead, arrivals)


WRONG = "Tensor-likes are not close"
DEADLOCK = r"deadlock: .* [1-9]\d* at an mbarrier"
TOO_MANY = "more than 1 arrivals in a phase of an mbarrier"
COPY_LEFT = "a bulk copy that was never waited for"
WAIT = "barrier_wait(full[stage], step / 2 & 1);"
WAIT_FOR_FULL = re.escape(WAIT)
RELEASE = r"if \(step >= AHEAD .*;"
COMMIT_AND_WAIT = r"(wgmma_commit\(\);\s*wgmma_wait<AHEAD>\(\);)"
PIPELINE_MISTAKES = {
    "full_not_waited_for": (WAIT_FOR_FULL, "", TOO_MANY),
    "full_waited_for_with_the_other_parity": (WAIT_FOR_FULL, "barrier_wait(full[stage], ~(step / 2) & 1);", TOO_MANY),
    "full_waited_for_with_no_parity": (WAIT_FOR_FULL, "barrier_wait(full[stage], step / 2);", "with parity 2"),
    "full_waited_for_by_one_thread": (WAIT_FOR_FULL, f"if (thread == 0) {WAIT}", WRONG),
    "empty_not_waited_for": (r"barrier_wait\(empty.*;", "", TOO_MANY),
    "empty_never_arrived_at": (RELEASE, "", DEADLOCK),
    "empty_released_too_early": (f"{COMMIT_AND_WAIT}\\s*({RELEASE})", r"\2 \1", WRONG),
    "empty_released_while_it_is_pending": (r"wgmma_wait<AHEAD>\(\)", "wgmma_wait<AHEAD + 1>()", WRONG),
    "too_many_arrivals": (r"bulk_copy\(target,", r"barrier_arrive(full[stage]); \g<0>", TOO_MANY),
    "bytes_not_expected": (r"barrier_arrive_expecting\((.*), kStageBytes\)", r"barrier_arrive(\1)", DEADLOCK),
    "too_few_bytes_expected": (r"kStageBytes\);", "kABytes);", f"{DEADLOCK}|{COPY_LEFT}|{WRONG}"),
    "too_many_bytes_expected": (r"kStageBytes\);", "kStageBytes + 16);", DEADLOCK),
    "copy_not_waited_for": (r"step < STEPS; ", "step < STEPS - 1; ", COPY_LEFT),
    "copy_misaligned": (r"bulk_copy\(target,", "bulk_copy(target + 8,", f"misaligned bulk copy of {64 * 32} bytes"),
    "copy_of_odd_bytes": (r"kABytes, full", "kABytes - 8, full", f"misaligned bulk copy of {64 * 32 - 8} bytes"),
    "copy_past_the_end": (r"kBBytes, full", "kBBytes + 16, full", "a bulk copy past the end of shared memory"),
    "wgmma_not_waited_for": (r"wgmma_(wait<\w+>\(\)|finish\(d\));", "", "a wgmma that was never waited for"),
    "wgmma_waited_for_after_the_result": (r"(wgmma_finish\(d\);)([^}]*;)", r"\2 \1", WRONG),
    "wgmma_not_committed": (r"wgmma_commit\(\);", "", "a wgmma that was never waited for"),
    "wgmma_not_fenced": (r"wgmma_fence\(\);", "if (step == 0) wgmma_fence();", "a wgmma without wgmma_fence"),
    "wgmma_not_alike": (r"step > 0\);", "step > thread / 64);", "threads of a warpgroup do not all do alike"),
    "wgmma_of_some_threads": (r"(wgmma_fence\(\);)", r"\1 if (thread == 5) return;", "deadlock: .* 127 at wgmma_wait"),
    "matrix_misaligned": (r"descriptor_k_major\(shared \+", "descriptor_k_major(shared + 8 +", "a misaligned matrix"),
    "matrix_past_the_end": (
        r"COLUMNS \* 16, 128\)",
        "COLUMNS * 16, 144)",
        "matrix of wgmma past the end of shared memory",
    ),
    "matrix_in_static_shared": (
        r"descriptor_k_major\(shared .*?,",
        "descriptor_k_major(full,",
        "a matrix of wgmma outside",
    ),
    "barrier_not_initialised": (r"barrier_init\(full\[stage\], 1\);", "", "an mbarrier that was not initialised"),
    "barrier_initialised_twice": (r"full\[stage\], 1\);", "full[0], 1);", "an mbarrier that is initialised twice"),
    "barrier_initialised_for_nobody": (r"full\[stage\], 1\);", "full[stage], 0);", "an mbarrier for 0 arrivals"),
    "barrier_not_made_visible": (r"barrier_init_done\(\);", "", "without barrier_init_done"),
    "barrier_before_the_block_barrier": (r"__syncthreads\(\);", "", "an mbarrier that was not initialised"),
    "barrier_written_over": (r"(setmaxnreg_inc<232>\(\);)", r"\1 full[0].state = 1;", "a write over an mbarrier"),
    "barrier_misaligned": (
        r"(setmaxnreg_inc<232>\(\);)",
        r"\1 barrier_arrive(reinterpret_cast<barrier_t*>(shared + 4)[0]);",
        "a misaligned address",
    ),
    "barrier_not_shared": (
        r"(setmaxnreg_inc<232>\(\);)",
        r"\1 barrier_t mine; barrier_init(mine, 1);",
        "an mbarrier outside of shared memory",
    ),
    "no_such_registers": ("setmaxnreg_inc<232>", "setmaxnreg_inc<236>", "no such number of registers"),
    "no_such_wgmma": (r"wgmma<half_t, COLUMNS>\(d,", "float e[20]; wgmma<half_t, 40>(e,", "no such wgmma"),
}


@emulator.needs_compiler
@pytest.mark.parametrize("mistake", PIPELINE_MISTAKES)
def test_emulator_notices_a_mistake_in_a_pipeline(mistake, builder):
    pattern, replacement, message = PIPELINE_MISTAKES[mistake]
    source, count = re.subn(pattern, replacement, PIPELINE)
    assert count
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check_pipeline(builder, source, ahead=1)


def test_emulator_takes_no_edit_of_a_header_with_a_twin(folder):
    edit = emulator.Edit("ptx/wgmma.cuh", "K-major", "")
    with pytest.raises(AssertionError, match=r"ptx/wgmma.cuh has a twin"), emulator.install(folder, edit):
        pass


@emulator.needs_compiler
def test_emulator_wants_whole_warpgroups(builder):
    source = PIPELINE.replace("__launch_bounds__(256)", "__launch_bounds__(288)")
    with pytest.raises(RuntimeError, match="wgmma by threads that are no whole warpgroup"):
        check_pipeline(builder, source, threads=288)


def declarations(text):
    """Return the functions that a header declares, with their template and other parameters."""
    found = re.findall(r"^(template <[^>]*>\s+)?__device__ __forceinline__ ([^;{]*[^;{\s])", text, re.MULTILINE)
    return sorted(" ".join("".join(parts).split()) for parts in found)


@pytest.mark.parametrize("name", TWINS)
def test_twins_declare_the_same_functions(name):
    wanted = declarations(sources.read(name))
    assert wanted
    assert declarations(TWINS[name].read_text()) == wanted


# Compiling


@pytest.fixture
def compiling(monkeypatch):
    """compiling(outcomes): let subprocess.run raise or return one after the other; returns the pauses between them."""
    pauses = []
    monkeypatch.setattr(build.time, "sleep", pauses.append)

    def prepare(outcomes):
        left = iter(outcomes)

        def run(*args, **kwargs):
            outcome = next(left)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(build.subprocess, "run", run)
        return pauses

    return prepare


def ended(returncode, stderr=""):
    return subprocess.CompletedProcess([], returncode, "", stderr)


SHORT_OF_PROCESSES = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize(
    "hindrance",
    [
        SHORT_OF_PROCESSES,
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError(errno.EIO, "Input/output error"),
        ended(-9),
        ended(1, "g++: fatal error: Killed signal terminated program cc1plus"),
        ended(1, "g++: fatal error: cannot execute 'as': vfork: Resource temporarily unavailable"),
    ],
    ids=["no_processes", "no_memory", "cannot_start", "killed", "part_killed", "part_cannot_start"],
)
def test_compiling_goes_on_after_a_hindrance(hindrance, compiling):
    success = ended(0)
    pauses = compiling([hindrance, hindrance, success])
    assert build._run(["c++"], "") is success
    assert len(pauses) == 2


def test_compiling_gives_up_in_the_end(compiling):
    pauses = compiling([SHORT_OF_PROCESSES] * 100)
    with pytest.raises(BlockingIOError):
        build._run(["c++"], "")
    assert 0 < len(pauses) < 20
    compiling([failure := ended(1, "Killed signal")] * 100)
    assert build._run(["c++"], "") is failure


def test_compiling_tries_once_where_the_source_is_wrong(compiling):
    pauses = compiling([refusal := ended(1, "test.cu:1:1: error: expected ';'")])
    assert build._run(["c++"], "") is refusal
    assert pauses == []
