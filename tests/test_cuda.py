"""What only a GPU can show: graphs, streams, threads, huge tensors, memory, float32 precision."""

import contextlib
import functools
import gc
import math
import threading
import time
from dataclasses import replace

import pytest
import torch

import gemmconv
from gemmconv.algorithms import ALGORITHMS, Config, direct
from gemmconv.pairs import choose_pair
from tests import reference
from tests.cases import CASES, FEW_CASES, Case
from tests.processes import in_threads, output_of
from tests.samples import Sample, assert_same_bits, conv_precision, expected, problem_of, sample, step

pytestmark = pytest.mark.gpu

NAMES = [algorithm.name for algorithm in ALGORITHMS]
OWN_NAMES = [name for name in NAMES if name != "native"]  # torch promises less for its own
by_algorithm = pytest.mark.parametrize("algorithm", NAMES)
by_own_algorithm = pytest.mark.parametrize("algorithm", OWN_NAMES)
by_few_cases = pytest.mark.parametrize("case", FEW_CASES, ids=lambda case: case.id)

LAYER = Case(8, 32, 16, (28, 30), (4, 4), (2, 2), (1, 1))
GIB = 2**30


def assert_same_numbers(actual, wanted):
    for one, other in zip(actual, wanted, strict=True):
        assert reference.relative_error(one, other) < 1e-2


def comparison_of(algorithm):
    """Return how two runs of an algorithm have to agree: cuDNN may take another of its kernels the second time."""
    return assert_same_numbers if algorithm == "native" else assert_same_bits


def need_memory(size):
    """Skip the test where the GPU has less than `size` bytes free."""
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < size:
        pytest.skip(f"needs {size / GIB:.0f} GiB of GPU memory, {free / GIB:.0f} GiB are free")


# Determinism


@by_own_algorithm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [LAYER, *FEW_CASES], ids=lambda case: case.id)
def test_conv_transpose2d_repeats_to_the_bit(case, dtype, algorithm):
    data = sample(case, dtype, "cuda")
    first = step(data, case, algorithm=algorithm)
    for _ in range(5):
        assert_same_bits(step(data, case, algorithm=algorithm), first)


@by_own_algorithm
def test_conv_transpose2d_agrees_within_every_workspace(algorithm):
    """The forward sums of an output do not depend on the chunk that it falls into."""
    data = sample(LAYER, torch.float64, "cuda")
    options = {"algorithm": algorithm, "precision": "ieee"}
    whole = step(data, LAYER, **options)
    for limit in (1 << 16, 1 << 20, 3 << 20):
        for actual, wanted in zip(step(data, LAYER, workspace_limit=limit, **options), whole, strict=True):
            reference.assert_close(actual, wanted, torch.float64)


# CUDA graphs, streams, devices, threads


@by_algorithm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_conv_transpose2d_replays_in_a_cuda_graph(dtype, algorithm):
    data = sample(LAYER, dtype, "cuda")
    compare = comparison_of(algorithm)
    eager = step(data, LAYER, algorithm=algorithm)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(data, LAYER, algorithm=algorithm)  # compiles and loads what the capture must not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(data, LAYER, algorithm=algorithm)
    for _ in range(2):
        for tensor in captured:
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        compare(captured, eager)
    # New values in the same tensors.
    with torch.no_grad():
        data.input.copy_(torch.randn_like(data.input))
    graph.replay()
    torch.cuda.synchronize()
    compare(captured, step(data, LAYER, algorithm=algorithm))


@by_algorithm
def test_module_works_in_a_graphed_callable(algorithm):
    layer = gemmconv.ConvTranspose2d(4, 6, 3, stride=2, algorithm=algorithm, device="cuda")
    images = torch.randn(2, 4, 9, 11, device="cuda", requires_grad=True)
    wanted = torch.autograd.grad(layer(images).square().sum(), [images, *layer.parameters()])
    graphed = torch.cuda.make_graphed_callables(layer, (torch.randn_like(images).requires_grad_(),))
    actual = torch.autograd.grad(graphed(images).square().sum(), [images, *layer.parameters()])
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other)


@by_algorithm
def test_conv_transpose2d_runs_on_the_current_stream(algorithm):
    """On a side stream, behind a long kernel that makes its input there."""
    data = sample(LAYER, torch.float32, "cuda")
    wanted = step(data, LAYER, algorithm=algorithm)
    late = data.input.new_full(data.input.shape, torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(data.input)
        actual = step(Sample(late, data.weight, data.bias, data.grad_output), LAYER, algorithm=algorithm)
    stream.synchronize()
    comparison_of(algorithm)(actual, wanted)


@by_algorithm
def test_conv_transpose2d_does_not_wait_for_the_gpu(algorithm):
    data = sample(LAYER, torch.float32, "cuda")
    step(data, LAYER, algorithm=algorithm)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        step(data, LAYER, algorithm=algorithm)
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@by_algorithm
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_conv_transpose2d_runs_on_a_device_that_is_not_current(algorithm):
    data = sample(LAYER, torch.float32, "cuda:1")
    assert torch.cuda.current_device() == 0
    results = step(data, LAYER, algorithm=algorithm, precision="ieee")
    assert {tensor.device for tensor in results} == {torch.device("cuda:1")}
    assert torch.cuda.current_device() == 0
    reference.assert_close(results[0], expected(LAYER, torch.float32).output, torch.float32, "ieee")


@by_algorithm
def test_module_may_be_called_by_several_threads_at_once(algorithm):
    """From a cold start: all threads meet the same uncompiled layer, on streams of their own."""
    case = Case(3, 5, 7, (13, 11), (3, 3), (2, 1), (1, 1))
    layer = gemmconv.ConvTranspose2d(5, 7, 3, stride=(2, 1), padding=1, algorithm=algorithm, device="cuda")
    images = sample(case, torch.float32, "cuda").input
    torch.cuda.synchronize()
    results, barrier = {}, threading.Barrier(4)

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            barrier.wait()
            for _ in range(20):
                leaf = images.detach().requires_grad_()
                output = layer(leaf)
                grads = torch.autograd.grad(output.sum(), [leaf, layer.weight])
            torch.cuda.current_stream().synchronize()
            results[number] = [output.detach(), *grads]

    in_threads(*(functools.partial(work, number) for number in range(4)))
    assert sorted(results) == [0, 1, 2, 3]
    for number in (1, 2, 3):
        assert_same_bits(results[number], results[0])
    wide = torch.nn.functional.conv_transpose2d(images.double(), layer.weight.double(), layer.bias.double(), (2, 1), 1)
    torch.testing.assert_close(results[0][0].double(), wide, rtol=1e-2, atol=1e-2)


# Sizes


@by_own_algorithm
def test_conv_transpose2d_of_seventy_thousand_images(algorithm):
    """More images than a grid axis holds blocks (65535)."""
    case = Case(70_000, 3, 2, (2, 3), (2, 2), (2, 2))
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    x, w = random(*case.input_shape).requires_grad_(), random(*case.weight_shape).requires_grad_()
    output = gemmconv.conv_transpose2d(x, w, None, algorithm=algorithm, precision="ieee", **case.parameters)
    # Kernel = stride: every input pixel makes a block of its own.
    wanted = torch.einsum("nchw,cokl->nohkwl", x.double(), w.double()).reshape(output.shape)
    reference.assert_close(output, wanted.detach(), torch.float32, "ieee")
    grad_output = random(*output.shape)
    grads = torch.autograd.grad(output, (x, w), grad_output)
    wide = torch.autograd.grad(wanted, (x, w), grad_output.double())
    for actual, exact in zip(grads, wide, strict=True):
        assert reference.relative_error(actual, exact) < 2e-6  # the weight's sums are 420 000 long


@by_own_algorithm
@pytest.mark.parametrize(
    "case",
    [
        # 2^31 output elements are passed within one channel, within one image, and between images.
        Case(1, 1, 1, (23_200, 23_200), (2, 2), (2, 2)),
        Case(1, 2, 3, (13_400, 13_400), (2, 2), (2, 2)),
        Case(70, 4, 8, (1_000, 1_000), (3, 3), (2, 2), (1, 1), (1, 1)),
        Case(700, 2, 200, (62, 62), (4, 4), (2, 2), (1, 1)),
    ],
    ids=lambda case: case.id,
)
def test_conv_transpose2d_of_more_than_two_to_the_31_elements(case, algorithm):
    """Forward and input gradient, compared on small windows of the data at the corners and around 2^31."""
    elements = math.prod(case.output_shape)
    assert elements > 2**31
    need_memory(4 * elements + 8 * GIB)
    torch.manual_seed(2)
    x = torch.randn(case.input_shape, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(case.weight_shape, dtype=torch.bfloat16, device="cuda")
    try:
        output = gemmconv.conv_transpose2d(x, w, None, algorithm=algorithm, **case.parameters)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    assert output.shape == case.output_shape
    crossing = 2**31 // math.prod(case.output_shape[1:])
    for n in sorted({0, min(crossing, case.batch - 1), case.batch - 1}):
        for rows in (slice(0, 12), slice(case.input_size[0] - 12, None)):
            piece = x[n : n + 1, :, rows].double()
            exact = torch.nn.functional.conv_transpose2d(piece, w.double(), **case.parameters)
            # Rows near the cut miss contributions from beyond it: compare the outer half.
            if rows.start == 0:
                actual, exact = output[n : n + 1, :, :12], exact[:, :, :12]
            else:
                actual, exact = output[n : n + 1, :, -12:], exact[:, :, -12:]
            reference.assert_close(actual, exact, torch.bfloat16)
    grad = torch.autograd.grad(
        gemmconv.conv_transpose2d(x.requires_grad_(), w, None, algorithm=algorithm, **case.parameters),
        x,
        output,
    )[0]
    for n in sorted({0, case.batch - 1}):
        for begin, end, out_rows in ((0, 8, slice(0, 40)), (-8, None, slice(-40, None))):
            piece = output[n : n + 1, :, out_rows].double()
            exact = input_grad_of_rows(piece, w.double(), case, begin == 0)
            reference.assert_close(grad[n : n + 1, :, begin:end], exact[:, :, begin:end], torch.bfloat16)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("groups", [64, 8], ids=["on_cuda_cores", "on_tensor_cores"])
def test_both_gradients_at_once_of_more_than_two_to_the_31_elements(groups, memory_format):
    """Where grad_output is zero but in a few images, those around 2^31 among them: the others come out as zeros."""
    case = Case(500, 64, 64, (130, 130), (4, 4), (2, 2), (1, 1), groups=groups)
    elements = math.prod(case.output_shape)
    assert elements > 2**31
    need_memory(8 * elements + 8 * GIB)
    config = Config(problem_of(case), torch.bfloat16, torch.device("cuda"), "ieee", memory_format=memory_format)
    assert choose_pair(config, config, "direct", "here").at_once
    both = direct.Direct().choice(replace(config, weight_format=memory_format), "grads")
    assert (both.kernel.name == "direct/weight_grad") == (groups == 64)
    crossing = 2**31 // math.prod(case.output_shape[1:])
    images = [0, crossing - 1, crossing, crossing + 1, case.batch - 1]
    torch.manual_seed(3)
    like = {"dtype": torch.bfloat16, "device": "cuda", "memory_format": memory_format}
    x = torch.empty(case.input_shape, **like).normal_().requires_grad_()
    w = torch.randn(case.weight_shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad_output = torch.empty(case.output_shape, **like).zero_()
    for image in images:
        grad_output[image].normal_()
    output = gemmconv.conv_transpose2d(x, w, None, algorithm="direct", **case.parameters)
    # The poison fixture fills less memory than the input gradient takes, so memory of its size is poisoned here.
    poisoned = [torch.full_like(x, torch.nan) for _ in range(3)]
    del poisoned
    input_grad, weight_grad = torch.autograd.grad(output, (x, w), grad_output)
    wide_x, wide_w = x.detach()[images].double().requires_grad_(), w.detach().double().requires_grad_()
    exact = torch.nn.functional.conv_transpose2d(wide_x, wide_w, **case.parameters)
    wanted = torch.autograd.grad(exact, (wide_x, wide_w), grad_output[images].double())
    reference.assert_close(input_grad[images], wanted[0], torch.bfloat16)
    reference.assert_close(weight_grad, wanted[1], torch.bfloat16)
    assert input_grad.count_nonzero() == input_grad[images].count_nonzero()


def input_grad_of_rows(grad_output, w, case, first):
    """The input gradient from the first or the last rows of the output gradient, right at that end only."""
    reach = case.dilation[0] * (case.kernel_size[0] - 1) + 1
    if first:
        padded = torch.nn.functional.pad(grad_output, (0, 0, case.padding[0], 0))
    else:
        # The last input row begins at canvas row (H_in - 1) * S: make the piece start on a multiple of S.
        padded = torch.nn.functional.pad(grad_output, (0, 0, 0, case.padding[0]))
        padded = padded[:, :, : padded.shape[2] - case.output_padding[0]]
        padded = padded[:, :, (padded.shape[2] - reach) % case.stride[0] :]
    padding = 0, case.padding[1]
    return torch.nn.functional.conv2d(padded, w, None, case.stride, padding, case.dilation, case.groups)


# Memory


@by_own_algorithm
@pytest.mark.parametrize("limit", [None, 1 << 20, 8 << 20])
def test_conv_transpose2d_keeps_to_its_workspace_limit(limit, algorithm):
    case = Case(32, 16, 32, (96, 96), (5, 5), (2, 2), (2, 2), (1, 1))  # 900 MiB of columns in all
    data = sample_on_cuda(case)
    workspace, slack = (64 << 20) if limit is None else limit, 4 << 20
    leaves = data.leaves()
    options = {"algorithm": algorithm, "precision": "ieee", "workspace_limit": limit, **case.parameters}

    def forward():
        return gemmconv.conv_transpose2d(leaves.input, leaves.weight, leaves.bias, **options)

    forward().backward(data.grad_output)  # cuBLAS takes its own workspace at its first use
    for leaf in (leaves.input, leaves.weight, leaves.bias):
        leaf.grad = None
    output, forward_peak = peak_of(forward)
    assert forward_peak <= bytes_of(output) + workspace + slack
    for wanted in ("input", "weight"):  # a Python gradient makes those of all tensors that require one
        for name in ("input", "weight", "bias"):
            getattr(leaves, name).requires_grad_(name == wanted)
        output = forward()
        leaf = getattr(leaves, wanted)
        grad, peak = peak_of(lambda output=output, leaf=leaf: torch.autograd.grad(output, leaf, data.grad_output)[0])
        assert peak <= bytes_of(grad) + workspace + slack


def sample_on_cuda(case):
    """Random data made on the GPU: too large to wait for the CPU."""
    shapes = (case.input_shape, case.weight_shape, (case.out_channels,), case.output_shape)
    return Sample(*(torch.randn(shape, device="cuda") for shape in shapes))


def bytes_of(tensor):
    return tensor.numel() * tensor.element_size()


def peak_of(function):
    """Return the function's result and the most memory that it held at once."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


@by_own_algorithm
@by_few_cases
def test_conv_transpose2d_keeps_no_memory_after_the_call(case, algorithm):
    data = sample(case, torch.float32, "cuda")
    step(data, case, algorithm=algorithm)
    gc.collect()
    before = torch.cuda.memory_allocated()
    step(data, case, algorithm=algorithm)
    gc.collect()
    # A thread of autograd may let go of its last tensors after the backward pass returned, of an earlier test's too.
    deadline = time.monotonic() + 5
    while torch.cuda.memory_allocated() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() <= before


# float32 precision. Errors are measured against float64 on data with long mantissas.

PRECISE = Case(4, 64, 32, (24, 24), (3, 3), (2, 2), (1, 1), (1, 1))
ROUNDED = Case(8, 32, 64, (48, 48), (3, 3), (2, 2), (1, 1), (1, 1))  # by every algorithm on tensor cores, in TF32
# By each kernel of products in three parts: in boxes and loaded, folded, of few channels, of groups.
ENDS_CASES = [
    PRECISE,
    Case(4, 128, 128, (16, 32), (4, 4), (2, 2), (1, 1)),
    Case(3, 64, 64, (14, 14), (2, 2), (2, 2)),
    Case(4, 56, 1, (33, 64), (9, 9), (3, 3), (4, 4), (2, 2)),
    Case(2, 64, 128, (20, 64), (3, 3), (1, 1), (1, 1), groups=2),
]


def error_of(results, case=ROUNDED):
    """Return the largest relative error of output, input gradient and weight gradient."""
    exact = expected(case, torch.float32)
    wanted = (exact.output, exact.input_grad, exact.weight_grad)
    return max(reference.relative_error(one, other) for one, other in zip(results, wanted, strict=False))


@by_algorithm
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_precision_tf32_matches_reference(case, algorithm, poison):
    # The bar is one of averages: a sum of few products may by chance lie beyond it, or nearly cancel.
    case = replace(case, batch=max(8 * case.batch, -(-64 // math.prod(case.input_size))))
    data = sample(case, torch.float32, "cuda")
    poison("cuda")
    with conv_precision("tf32"):
        results = step(data, case, algorithm=algorithm, precision="tf32")
    exact = expected(case, torch.float32)
    for actual, wanted in zip(results, (exact.output, exact.input_grad, exact.weight_grad), strict=False):
        reference.assert_close(actual, wanted, torch.float32, "tf32")


@by_own_algorithm
def test_precision_ieee_is_accurate_to_float32(algorithm):
    data = sample(ROUNDED, torch.float32, "cuda")
    for setting in ("ieee", "tf32"):
        with conv_precision(setting):
            assert error_of(step(data, ROUNDED, algorithm=algorithm, precision="ieee")) < 1e-6


@by_own_algorithm
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", ENDS_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("exponent", [-123, 127], ids=["tiny", "huge"])
def test_precision_ieee_at_the_ends_of_float32(exponent, case, layout, algorithm, poison):
    """With one operand of elements of 1e-37 and less, or with some of the largest float32, and others to match."""
    largest = torch.finfo(torch.float32).max
    data = sample(case, torch.float32, "cuda")
    for scaled in range(3):
        tensors = []
        for i, tensor in enumerate((data.input, data.weight, data.grad_output)):
            factor = 2.0 ** (exponent if i == scaled else -24 if exponent > 0 else 0)
            tensors.append(tensor.mul(factor).clamp(-largest, largest).contiguous(memory_format=layout))
        assert exponent < 0 or tensors[scaled].abs().max() == largest
        results = []
        for dtype in (torch.float64, torch.float32):
            input, weight, grad_output = (tensor.to(dtype) for tensor in tensors)
            leaves = [input.requires_grad_(), weight.requires_grad_()]
            poison("cuda")
            if dtype == torch.float64:
                output = torch.nn.functional.conv_transpose2d(*leaves, **case.parameters)
            else:
                output = gemmconv.conv_transpose2d(*leaves, algorithm=algorithm, precision="ieee", **case.parameters)
            results.append([output, *torch.autograd.grad(output, leaves, grad_output)])
        for wanted, actual in zip(*results, strict=True):
            # Sums of TF32 values have few bits there: see csrc/include/ptx/mma.cuh.
            bar = 5e-5 if algorithm == "fused" and exponent < 0 else 1e-6
            assert reference.relative_error(actual, wanted) < bar


@by_own_algorithm
def test_precision_tf32_rounds_products(algorithm):
    data = sample(ROUNDED, torch.float32, "cuda")
    for setting in ("ieee", "tf32"):
        with conv_precision(setting):
            assert 1e-5 < error_of(step(data, ROUNDED, algorithm=algorithm, precision="tf32")) < 1e-3


@pytest.mark.parametrize("algorithm", ["auto", *NAMES])
def test_precision_follows_torchs_convolution_setting(algorithm):
    case = PRECISE if algorithm == "native" else ROUNDED  # of which cuDNN's sums are 2.4e-6 off
    data = sample(case, torch.float32, "cuda")
    with conv_precision("ieee"):
        assert error_of(step(data, case, algorithm=algorithm), case) < 1e-6
    with conv_precision("tf32"):
        assert 1e-5 < error_of(step(data, case, algorithm=algorithm), case) < 1e-3


@by_own_algorithm
@pytest.mark.parametrize("matmul_precision", ["highest", "high"])
def test_precision_does_not_follow_torchs_matmul_setting(matmul_precision, algorithm):
    data = sample(ROUNDED, torch.float32, "cuda")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(matmul_precision)
        with conv_precision("ieee"):
            assert error_of(step(data, ROUNDED, algorithm=algorithm)) < 1e-6
        with conv_precision("tf32"):
            assert error_of(step(data, ROUNDED, algorithm=algorithm)) > 1e-5
        # And it leaves the setting of torch's own products as it was.
        a, b = (torch.randn(256, 256, device="cuda") for _ in range(2))
        error = reference.relative_error(a @ b, (a.double() @ b.double()))
        assert (error < 1e-6) == (matmul_precision == "highest")
    finally:
        torch.set_float32_matmul_precision(before)


SETTINGS_SCRIPT = """
import torch, gemmconv
{setting}
def state():
    return (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision,
            torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled)
before = state()
tf32 = before[0] == "tf32"
x = torch.randn(2, 64, 8, 8, device="cuda", requires_grad=True)  # cuBLAS wants aligned rows for TF32
w = torch.randn(64, 16, 3, 3, device="cuda")
for algorithm in ("auto", "gemm_col2im", "native"):
    output = gemmconv.conv_transpose2d(x, w, stride=2, algorithm=algorithm)
    output.sum().backward()
    exact = torch.nn.functional.conv_transpose2d(x.double(), w.double(), stride=2)
    error = ((output - exact).norm() / exact.norm()).item()
    # cuDNN computes a layer this small in float32 even where it may use TF32.
    assert error < (1e-3 if tf32 else 1e-6) if algorithm == "native" else (error > 1e-5) == tf32, (algorithm, error)
assert state() == before, (before, state())
print("done")
"""


@pytest.mark.parametrize(
    "setting",
    [
        "pass",
        "torch.backends.cudnn.allow_tf32 = True",
        "torch.backends.cudnn.allow_tf32 = False",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cudnn.conv.fp32_precision = 'tf32'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "torch.backends.cudnn.fp32_precision = 'ieee'",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'ieee'",
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'",
    ],
)
def test_precision_settings_of_either_api_are_read_and_never_written(setting):
    """In a new process each: torch raises where its old and its new settings are mixed."""
    assert output_of(SETTINGS_SCRIPT.format(setting=setting)).endswith("done\n")


# Autocast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_module_under_a_grad_scaler_trains(dtype):
    layer = gemmconv.ConvTranspose2d(3, 4, 3, stride=2, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    before = layer.weight.detach().clone()
    with torch.autocast("cuda", dtype):
        output = layer(torch.randn(2, 3, 5, 6, device="cuda"))
        assert output.dtype == dtype
        loss = output.float().square().mean()
    scaler.scale(loss).backward()
    assert layer.weight.grad.dtype == torch.float32
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(layer.weight, before)


def test_errors_leave_the_device_usable():
    with contextlib.suppress(RuntimeError):
        gemmconv.conv_transpose2d(torch.randn(1, 2, 3, 3, device="cuda"), torch.randn(3, 2, 3, 3, device="cuda"))
    output = gemmconv.conv_transpose2d(torch.ones(1, 1, 2, 2, device="cuda"), torch.ones(1, 1, 1, 1, device="cuda"))
    assert torch.equal(output.cpu(), torch.ones(1, 1, 2, 2))
