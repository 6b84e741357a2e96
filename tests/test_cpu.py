"""The algorithms on a CPU beside float64: random layers, rounding, threads, memory, kept weights, instruction sets."""

import contextlib
import gc
import itertools
import math
import os
import random
import re
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import conv_transpose2d as torchs

import gemmconv
from gemmconv.errors import KernelError
from gemmconv.kernels.base import Config
from gemmconv.kernels.cpu import implicit_product, library
from tests import reference
from tests.cases import Case
from tests.processes import output_of
from tests.samples import LAYOUTS, problem_of

ALGORITHMS = ("direct", "fused", "gemm_col2im")
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PASSES = ("forward", "input_grad", "weight_grad")
BUILT = library._library()

by_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
by_pass = pytest.mark.parametrize("place", range(3), ids=PASSES)
pytestmark = pytest.mark.skipif(BUILT is None, reason="the extension in C is not built")


def random_case(draw: random.Random) -> Case:
    """A layer that takes little time: any groups, strides, dilations, paddings and output paddings."""
    while True:
        groups = draw.choice((1, 1, 2, 3, 17))
        most = 3 if groups == 17 else draw.choice((3, 12, 45))
        channels = draw.choice(((1, 1), (most, draw.randint(1, 3)), (draw.randint(1, most), draw.randint(1, most))))
        axes = []
        for _ in range(2):
            stride, dilation = draw.choice((1, 2, 2, 3, 4, 5, 7, 8)), draw.choice((1, 1, 2, 3))
            kernel = draw.choice((stride, draw.randint(1, 4), draw.randint(1, 7)))
            padding = draw.choice((0, draw.randint(0, dilation * (kernel - 1) // 2), draw.randint(0, kernel)))
            size = draw.choice((1, draw.randint(2, 7), draw.randint(3, 24), 9 if groups * most > 24 else 130))
            axes.append((size, kernel, stride, padding, draw.randrange(max(stride, dilation)), dilation))
        case = Case(draw.randint(1, 3), groups * channels[0], groups * channels[1], *zip(*axes, strict=True), groups)
        if min(case.output_size) > 0 and math.prod(case.output_shape) < 200_000:
            return case


def defined(case, x, w, grad, bias=None):
    """The output and the gradients of input and weight by definition: no value is multiplied with a zero outside."""
    x, grad = (reference.split_groups(one, case.groups) for one in (x, grad))
    w, output = reference.split_weight(w, case.groups), np.zeros(grad.shape)
    input_grad, weight_grad = np.zeros(x.shape), np.zeros(w.shape)
    for tap in np.ndindex(case.kernel_size):
        steps = zip(case.input_size, case.output_size, tap, case.stride, case.padding, case.dilation, strict=True)
        pairs = [(np.arange(size) * s - p + k * d, extent) for size, extent, k, s, p, d in steps]
        inside = [np.flatnonzero((reached >= 0) & (reached < extent)) for reached, extent in pairs]
        at, to = (..., *np.ix_(*inside)), (..., *np.ix_(*(one[0][i] for one, i in zip(pairs, inside, strict=True))))
        w_tap = w[(..., *tap)]
        output[to] += np.einsum("ngchw,gco->ngohw", x[at], w_tap)
        input_grad[at] += np.einsum("ngohw,gco->ngchw", grad[to], w_tap)
        weight_grad[(..., *tap)] = np.einsum("ngchw,ngohw->gco", x[at], grad[to])
    output = reference.join_groups(output) + (0 if bias is None else bias[:, None, None])
    return output, reference.join_groups(input_grad), weight_grad.reshape(case.weight_shape)


class Trial:
    """A layer with random data that is exact in every type, and its results in float64, which are worked out once."""

    def __init__(self, case: Case, bias: bool = True) -> None:
        shapes = case.input_shape, case.weight_shape, case.output_shape, (case.out_channels,)
        *self.tensors, added = (torch.randn(shape).bfloat16().half().bfloat16().double() for shape in shapes)
        self.case, self.bias = case, added if bias else None
        self.expected = defined(case, *map(reference.to_array, self.tensors), added.numpy() if bias else None)

    def results(self, algorithm, dtype, forms=("contiguous",) * 3):
        """The output and the gradients of input and weight, for input, weight and grad_output of these forms."""
        given = [LAYOUTS.get(form, torch.clone)(one.to(dtype)) for form, one in zip(forms, self.tensors, strict=True)]
        return results_of(self.case, algorithm, *given, None if self.bias is None else self.bias.to(dtype))

    def check(self, algorithm, dtype, forms=("contiguous",) * 3) -> None:
        assert_right(self.results(algorithm, dtype, forms), self.expected, dtype)


def results_of(case, algorithm, input, weight, grad_output, bias=None):
    """The output and the gradients of input and weight; ``algorithm`` may be ``"torch"``."""
    leaves = [one.detach().requires_grad_() for one in (input, weight)]
    options = case.parameters if algorithm == "torch" else {**case.parameters, "algorithm": algorithm}
    call = torchs if algorithm == "torch" else gemmconv.conv_transpose2d
    output = call(*leaves, bias, **options)
    with torch.no_grad():  # a packed weight is kept then
        assert_same_bits([call(*leaves, bias, **options)], [output.detach()])
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output)]


def assert_right(results, expected, dtype) -> None:
    for actual, wanted in zip(results, expected, strict=True):
        reference.assert_close(actual, wanted, dtype, "ieee")


def assert_same_bits(results, expected) -> None:
    for place, pair in enumerate(zip(results, expected, strict=True)):
        first, second = (tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8) for tensor in pair)
        assert torch.equal(first, second), f"result {place}"


def kinds(results) -> list[list[int]]:
    """1 for each NaN, 2 for each infinity and 3 for each negative one, else 0."""
    return [(one.isnan() + 2 * one.isposinf() + 3 * one.isneginf()).flatten().tolist() for one in results]


def check_layers(seeds) -> None:
    """Check random layers: each algorithm and type on tensors of random forms. What is checked last is printed last."""
    for seed in seeds:
        draw, _ = random.Random(seed), torch.manual_seed(seed)
        trial = Trial(random_case(draw), draw.random() < 0.7)
        for dtype, algorithm in itertools.product(TYPES, ALGORITHMS):
            forms, count = draw.choices(("contiguous", *LAYOUTS), k=3), draw.choice((1, 2, 5))
            print(f"seed {seed}, {algorithm}, {dtype}, {forms}, {count} threads, {trial.case}", file=sys.stderr)
            torch.set_num_threads(count)
            trial.check(algorithm, dtype, forms)


@pytest.fixture(autouse=True)
def _one_thread_afterwards():
    yield
    torch.set_num_threads(1)


def in_process(code: str, **environment: str) -> str:
    """What code prints in a process of its own, which has all that is here."""
    return output_of(f"import torch, gemmconv\nfrom tests.test_cpu import *\n{code}", 120, **environment)


@pytest.mark.parametrize("first", range(0, 64, 8))
def test_conv_transpose2d_matches_float64_on_random_layers(first, poison):
    poison("cpu")
    check_layers(range(first, first + 8))


@pytest.mark.parametrize("isa", ["avx512", "avx2", "neon", "portable"])
def test_conv_transpose2d_matches_float64_in_every_instruction_set(isa):
    if not BUILT.gemmconv_cpu_kernels(isa.encode(), 0):
        pytest.skip(f"this machine does not run {isa}")
    assert in_process("check_layers(range(100, 112)); print(library.isa_name())", GEMMCONV_CPU=isa) == f"{isa}\n"


def test_gemm_col2im_sums_in_float32_under_autocast():
    """Columns of 25 x 25 taps in bfloat16 would have 0.1 of error; so have gradients, called inside of autocast."""
    x, w = torch.randn(2, 96, 20, 30), torch.randn(96, 2, 25, 25) / 60
    with torch.autocast("cpu", torch.bfloat16):
        output = gemmconv.conv_transpose2d(x, w, algorithm="gemm_col2im")
    exact = torchs(x.bfloat16().double(), w.bfloat16().double())
    assert (output - exact).abs().max() / exact.abs().max() < 2**-8
    leaves = [one.requires_grad_() for one in (x, w)]
    output = gemmconv.conv_transpose2d(*leaves, algorithm="gemm_col2im")
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(output.sum(), leaves)
    wide = [one.detach().double().requires_grad_() for one in leaves]
    expected = torch.autograd.grad(torchs(*wide).sum(), wide)
    assert all((a - b).abs().max() / b.abs().max() < 1e-5 for a, b in zip(found, expected, strict=True))


@by_pass
def test_comparisons_fail_on_wrong_data(place):
    trial = Trial(Case(1, 3, 4, (3, 5), (3, 3), (2, 2)))
    right, wrong, infinite = (trial.results("direct", torch.float32) for _ in range(3))
    assert_right(right, trial.expected, torch.float32)
    wrong[place].view(-1)[2:3].mul_(1 + 1e-4)
    infinite[place].view(-1)[2:3].fill_(torch.inf)
    for one in (wrong, infinite):
        with pytest.raises(AssertionError, match="relative error"):
            assert_right(one, trial.expected, torch.float32)
        with pytest.raises(AssertionError, match=f"result {place}"):
            assert_same_bits(one, right)
    assert kinds(wrong) == kinds(right) != kinds(infinite)


DEEP = [
    Case(4, 512, 256, (4, 4), (4, 4), (2, 2), (1, 1)),
    Case(1, 64, 128, (32, 40), (3, 5), (1, 1), (1, 2)),
    Case(1, 256, 256, (9, 11), (3, 3), (1, 1), (1, 1)),
    Case(2, 8, 6, (150, 131), (3, 3), (2, 2), (1, 1)),
]


@by_algorithm
@pytest.mark.parametrize("case", DEEP, ids=lambda case: case.id)
def test_conv_transpose2d_rounds_at_most_twice_as_far_as_torch(case, algorithm):
    tensors = [torch.randn(shape) for shape in (case.input_shape, case.weight_shape, case.output_shape)]
    exact = results_of(case, "torch", *(one.double() for one in tensors))
    ours, theirs = (results_of(case, name, *tensors) for name in (algorithm, "torch"))
    for one, value, *pair in zip(PASSES, exact, ours, theirs, strict=True):
        error, bar = (reference.relative_error(rounded, value) for rounded in pair)
        assert error <= 2 * bar, f"{one}: relative error {error:.3g}, torch's {bar:.3g}"


@by_algorithm
@pytest.mark.parametrize("which", range(3), ids=("input", "weight", "grad_output"))
def test_conv_transpose2d_has_nan_and_infinities_where_torch_has_them(which, algorithm):
    """Where they are by definition, or also where torch multiplies with zeros around images, which its columns hold."""
    values = (torch.nan, 1), (torch.inf, 2), (-torch.inf, 1), (torch.finfo(torch.float32).max, 1)
    for seed, (value, count) in itertools.product(range(8), values):
        case = random_case(draw := random.Random(seed))
        tensors = [torch.randn(shape) for shape in (case.input_shape, case.weight_shape, case.output_shape)]
        flat = tensors[which].view(-1)
        flat[draw.choices(range(flat.numel()), k=count)] = value
        with np.errstate(invalid="ignore"):
            by_definition = map(torch.from_numpy, defined(case, *map(reference.to_array, tensors)))
        doubles = by_definition, results_of(case, "torch", *(one.double() for one in tensors))
        allowed = [kinds(one.float() for one in results) for results in doubles]
        found = zip(PASSES, kinds(results_of(case, algorithm, *tensors)), *allowed, strict=True)
        for one, ours, *others in found:
            assert ours in others, f"{one}, {value}, seed {seed}, {case}"


CUT = [  # into bands of cells; into blocks of channels; into slices of a weight gradient
    Case(2, 24, 20, (40, 36), (4, 4), (2, 2), (1, 1)),
    Case(1, 70, 61, (5, 4), (3, 3), (2, 2), (1, 1)),
    Case(3, 12, 18, (30, 70), (3, 3), (1, 1), (1, 1), groups=3),
]


@pytest.mark.parametrize("algorithm", ["direct", "fused"])  # products of gemm_col2im are torch's
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CUT, ids=lambda case: case.id)
def test_conv_transpose2d_has_the_same_bits_with_any_number_of_threads(case, dtype, algorithm):
    trial = Trial(case)
    expected = trial.results(algorithm, dtype)
    assert_right(expected, trial.expected, dtype)
    for count in (1, 2, 5, 16, 2):
        torch.set_num_threads(count)
        assert_same_bits(trial.results(algorithm, dtype), expected)


def test_conv_transpose2d_can_be_called_by_threads_at_once():
    """Calls of several layers, and of one layer with one kept weight."""
    torch.set_num_threads(2)
    calls = [(Trial(case), algorithm) for case in CUT for algorithm in ALGORITHMS]
    layer = gemmconv.ConvTranspose2d(24, 20, 4, 2, 1, algorithm="fused").requires_grad_(False)
    x = torch.randn(2, 24, 40, 36)

    def run(call):
        return [layer(x), *call[0].results(call[1], torch.float32)]

    expected = [*map(run, calls)]
    layer.weight.add_(0)  # to be packed anew
    with ThreadPoolExecutor(len(calls)) as pool:
        for _ in range(5):
            for results, wanted in zip(pool.map(run, calls), expected, strict=True):
                assert_same_bits(results, wanted)


def check_forks(algorithm: str) -> None:
    """Call a layer with one thread in forks, as workers of a DataLoader too, after calls with two in this process."""
    torch.set_num_threads(2)
    trial, images = Trial(CUT[0]), torch.randn(3, 24, 40, 36)
    layer = gemmconv.ConvTranspose2d(24, 20, 4, 2, 1, algorithm=algorithm).requires_grad_(False)
    expected = layer(images)
    trial.check(algorithm, torch.float32)
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)
        with contextlib.suppress(AssertionError):
            trial.check(algorithm, torch.float32)
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    options = {"num_workers": 2, "collate_fn": layer, "multiprocessing_context": "fork"}
    outputs = torch.stack(list(torch.utils.data.DataLoader(list(images), None, **options)))
    reference.assert_close(outputs, expected, torch.float32, "ieee")


@by_algorithm
def test_conv_transpose2d_can_be_called_in_forks(algorithm):
    in_process(f"check_forks({algorithm!r})")


def check_default_device(algorithm: str) -> None:
    """Compute on the CPU inside a block whose default device is another one, in all memory that a call keeps."""
    layer, x = gemmconv.ConvTranspose2d(24, 20, 4, 2, 1, algorithm=algorithm), torch.randn(2, 24, 9, 8)
    with torch.device("meta"):
        kept, trained = layer.requires_grad_(False)(x), layer.requires_grad_()(x.requires_grad_())
        gradients = torch.autograd.grad(trained.sum(), (x, layer.weight, layer.bias))
    exact = [one.detach().double().requires_grad_() for one in (x, layer.weight, layer.bias)]
    expected = torchs(*exact, 2, 1)
    wanted = [expected, expected, *torch.autograd.grad(expected.sum(), exact)]
    assert_right([kept, trained, *gradients], [reference.to_array(one) for one in wanted], torch.float32)


@by_algorithm
def test_conv_transpose2d_does_not_follow_the_default_device(algorithm):
    in_process(f"check_default_device({algorithm!r})")


def test_conv_transpose2d_shares_torchs_openmp_runtime():
    code = "torch.set_num_threads(2); check_layers(range(2)); print(open('/proc/self/maps').read())"
    libraries = set(re.findall(r"/\S*lib(?:gomp|iomp|omp)\S*", in_process(code)))
    assert len(libraries) == 1, libraries


def peak_bytes(call) -> int:
    """The most bytes that a call has allocated at once, its result apart."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    events = [one for one in profile.profiler.kineto_results.events() if one.name() == "[memory]"]
    sizes = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())]
    return int(np.cumsum([0, *sizes]).max()) - result.nbytes


def test_peak_bytes_counts_what_is_freed_again():
    assert 4 << 16 <= peak_bytes(lambda: torch.ones(3) + torch.ones(1 << 16).sum()) < 5 << 16


@by_algorithm
@pytest.mark.parametrize("limit", [None, 1 << 20])
@by_pass
def test_conv_transpose2d_allocates_what_explain_says_within_the_limit(place, limit, algorithm):
    case = Case(1, 64, 32, (64, 64), (4, 4), (2, 2), (1, 1))
    problem, options = problem_of(case), {"algorithm": algorithm, "workspace_limit": limit}
    input, weight, grad = (torch.randn(shape) for shape in (case.input_shape, case.weight_shape, case.output_shape))
    leaves = [one.requires_grad_(i == place) for i, one in enumerate((input, weight), 1)]
    call = partial(gemmconv.conv_transpose2d, *leaves, **options, **case.parameters)
    torch.set_num_threads(2)
    said = gemmconv.explain(problem, direction=PASSES[place], **options).workspace_bytes[algorithm]
    packed = implicit_product.KERNEL.packed_weight_bytes(Config(problem, torch.float32, torch.device("cpu")), "forward")
    if place:
        call = partial(lambda output: torch.autograd.grad(output, leaves[place - 1], grad)[0], call())
    vars(implicit_product._thread_memory).clear()  # scratch memory that a thread keeps
    assert peak_bytes(call) <= said + (packed if algorithm == "fused" else 0)
    assert said <= (limit or 64 << 20)


def train(layer) -> None:
    layer.requires_grad_()(torch.randn(1, 12, 3, 3)).square().sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()
    layer.requires_grad_(False)


CHANGES = {
    "in_place": lambda layer: layer.weight.mul_(2),
    "one_value_of_data": lambda layer: layer.weight.data.view(-1)[77:78].add_(1),
    "moved_values_of_data": lambda layer: layer.weight.data.copy_(layer.weight.data.flip(1)),
    "two_signs_of_data": lambda layer: layer.weight.data.view(-1)[1:34:32].neg_(),
    "numpy": lambda layer: np.multiply(layer.weight.numpy(), 3, out=layer.weight.numpy()),
    "other_data": lambda layer: setattr(layer.weight, "data", torch.randn_like(layer.weight)),
    "optimizer": train,
    "load_state_dict": lambda layer: layer.load_state_dict({k: -one for k, one in layer.state_dict().items()}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_conv_transpose2d_sees_a_changed_weight_and_forgets_the_old_one(change):
    layer = gemmconv.ConvTranspose2d(12, 10, 4, 2, 1, algorithm="fused").requires_grad_(False)
    x, number = torch.randn(1, 12, 5, 6), id(layer.weight)
    for _ in range(3):
        layer(x)
        ((packed, _),) = implicit_product._packed[number].forms.values()
        old = weakref.ref(packed)
        del packed
        CHANGES[change](layer)
        expected = torchs(x.double(), layer.weight.double(), layer.bias.double(), 2, 1)
        reference.assert_close(layer(x), expected, torch.float32, "ieee")
        gc.collect()
        assert old() is None, "what was packed before is still in memory"
    del layer
    gc.collect()
    assert number not in implicit_product._packed


def targets_in_a_graph(*tensors):
    """Check a compiled call, and return what its graph calls."""
    graphs = []
    call = torch.compile(gemmconv.conv_transpose2d, backend=lambda graph, _: graphs.append(graph) or graph)
    torch.testing.assert_close(call(*tensors), torchs(*tensors))
    return [node.target for node in graphs[0].graph.nodes]


def check_left_to_torch(problem) -> None:
    """Check that auto, eager and in a graph, is torch's operator, and that what else is named says why it is not."""
    tensors, call = (torch.randn(problem.input_shape), torch.randn(problem.weight_shape)), gemmconv.conv_transpose2d
    assert torch.equal(call(*tensors), torchs(*tensors))
    assert torch.conv_transpose2d in targets_in_a_graph(*tensors)
    report = gemmconv.explain(problem)
    assert (report.algorithm, report.gradients) == ("native", ("native", "native"))
    for name in ALGORITHMS:
        reason = "it needs the extension in C, which is not there; install gemmconv where there is a C compiler"
        assert report.reasons[name] == f"cannot serve it: {reason}"
        with pytest.raises(NotImplementedError) as raised:
            call(*tensors, algorithm=name)
        assert str(raised.value) == f'conv_transpose2d: {name}: {reason}; or use algorithm="auto"'


@pytest.mark.parametrize("out_channels", [1, 48])
def test_conv_transpose2d_without_the_extension_is_torchs_and_says_so(out_channels):
    problem = gemmconv.Problem(2, 48, out_channels, 1, (64, 64), (3, 3))
    in_process(f"check_left_to_torch(gemmconv.{problem})", GEMMCONV_EXECUTOR="python")


@pytest.mark.parametrize(("out_channels", "is_ours"), [(2, True), (3, False)])
def test_a_graph_of_few_outputs_has_our_operator(out_channels, is_ours):
    """By fused its forward pass may be faster than torch's."""
    targets = targets_in_a_graph(torch.randn(1, 48, 5, 5), torch.randn(48, out_channels, 3, 3))
    assert (torch.ops.gemmconv.conv_transpose2d.default in targets) == is_ours
    assert (torch.conv_transpose2d in targets) != is_ours


def test_isa_name_refuses_an_unknown_instruction_set(monkeypatch):
    monkeypatch.setenv("GEMMCONV_CPU", "nonsense")
    with pytest.raises(KernelError, match=r"^GEMMCONV_CPU must be one of .*portable.*, got 'nonsense'"):
        library.isa_name.__wrapped__()
