"""One cast of a leaf is kept under autocast, as long as torch keeps its own, where regions use it again.

And who casts weight and bias: a call's own kernel, or torch. tests/test_cast.py runs that kernel.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import gemmconv
from gemmconv.ops import autocast, plain
from gemmconv.ops.autocast import cast_as_autocast, cast_cache
from tests.processes import in_threads


def ours(input, weight, bias=None):
    return gemmconv.conv_transpose2d(input, weight, bias, algorithm="gemm_col2im")


theirs = torch.nn.functional.conv_transpose2d


class Casts(TorchDispatchMode):
    """Counts the casts of a tensor."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor, self.count = tensor, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default and args[0] is self.tensor
        return function(*args, **(kwargs or {}))


@pytest.fixture
def images(device):
    return torch.randn(2, 4, 5, 6, device=device)


@pytest.fixture
def weight(device):
    return torch.randn(4, 3, 3, 2, device=device, requires_grad=True)


@pytest.fixture
def bias(device):
    return torch.randn(3, device=device, requires_grad=True)


def test_four_calls_cast_a_leaf_once(images, weight, bias, device):
    for leaf in (weight, bias):
        with Casts(leaf) as casts, torch.autocast(device, torch.bfloat16):
            for _ in range(4):
                ours(images, weight, bias)
        assert casts.count == 1


def test_four_calls_keep_one_cast_for_the_gradient(images, weight, device):
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one)
    with hooks, torch.autocast(device, torch.bfloat16):
        outputs = [ours(images.requires_grad_(), weight) for _ in range(4)]
    kept = [one for one in kept if one.shape == weight.shape]
    assert len(kept) == len(outputs)
    assert {one.dtype for one in kept} == {torch.bfloat16}
    assert len({one.data_ptr() for one in kept}) == 1


def test_gradients_through_one_cast_are_those_of_torch(images, weight, bias, device):
    def gradients(function):
        with torch.autocast(device, torch.bfloat16):
            loss = sum(function(images * scale, weight, bias).float().square().mean() for scale in (1, 2, 3, 4))
        first = torch.autograd.grad(loss, (weight, bias), retain_graph=True)
        return *first, *torch.autograd.grad(loss, (weight, bias))

    for actual, expected in zip(gradients(ours), gradients(theirs), strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2 * expected.abs().max().item())


def within(context, again):
    with context:
        again()


BETWEEN = {
    "nothing": lambda device, again: None,
    "clearing": lambda device, again: torch.clear_autocast_cache(),
    "region": lambda device, again: within(torch.autocast(device, torch.bfloat16), again),
    "region_without_autocast": lambda device, again: within(torch.autocast(device, enabled=False), again),
    "region_without_cache": lambda device, again: within(
        torch.autocast(device, torch.bfloat16, cache_enabled=False), again
    ),
    "region_of_another_thread": lambda device, again: in_threads(lambda: BETWEEN["region"](device, again)),
    "call_without_gradients": lambda device, again: within(torch.no_grad(), again),
    "call_in_inference_mode": lambda device, again: within(torch.inference_mode(), again),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("cache", [True, False])
def test_a_leaf_is_cast_as_often_as_by_torch(between, cache, images, weight, device):
    """Two calls, before and after something else, in two regions."""

    def count(function):
        with Casts(weight) as casts:
            for _ in range(2):
                with torch.autocast(device, torch.bfloat16, cache_enabled=cache):
                    function(images, weight)
                    between(device, lambda: function(images, weight))
                    function(images, weight)
        return casts.count

    assert count(ours) == count(theirs)


@pytest.mark.parametrize(
    "make",
    [torch.Tensor.detach, lambda weight: weight.detach()[:].requires_grad_(), lambda weight: weight * 1],
    ids=["constant", "view", "result"],
)
def test_other_tensors_are_cast_at_every_call(make, images, weight, device):
    tensor = make(weight)
    with Casts(tensor) as casts, torch.autocast(device, torch.bfloat16):
        ours(images, tensor)
        ours(images, tensor)
    assert casts.count == 2


def test_a_call_without_gradients_leaves_the_next_its_gradient(images, weight, device):
    with Casts(weight) as casts, torch.autocast(device, torch.bfloat16):
        with torch.no_grad():
            assert not ours(images, weight).requires_grad
        ours(images, weight).sum().backward()
    assert weight.grad.abs().sum() > 0
    assert casts.count == 1


def doubled(weight):
    with torch.no_grad():
        weight.mul_(2)


def replaced(weight):
    weight.data = 2 * weight.data


@pytest.mark.parametrize("change", [doubled, replaced])
def test_a_change_inside_a_region_is_seen(change, images, weight, device):
    """By torch's own operator only after the region, which trains nothing that one region holds whole."""
    with torch.autocast(device, torch.bfloat16):
        before = ours(images, weight)
        change(weight)
        for _ in range(2):
            assert torch.equal(ours(images, weight), 2 * before)


def test_regions_that_use_no_cast_again_have_no_witness_but_now_and_then(images, weight, device):
    def region(calls):
        """Whether it kept a cast, and how many were made."""
        with Casts(weight) as casts, torch.autocast(device, torch.bfloat16):
            for _ in range(calls):
                ours(images, weight)
            return cast_cache(images.device, torch.bfloat16) is not None, casts.count

    assert region(1) == (True, 1)
    found = [region(1) for _ in range(2 * autocast._WITNESS_ONE_IN)]
    assert found.count((False, 1)) > 1.9 * autocast._WITNESS_ONE_IN
    found = [region(2)[1] for _ in range(4 * autocast._WITNESS_ONE_IN)]
    assert found[-2 * autocast._WITNESS_ONE_IN :] == [1] * 2 * autocast._WITNESS_ONE_IN
    for _ in range(2):
        region(1)
    calls = 2 * autocast._WITNESS_ONE_IN
    witnessed, casts = region(calls)
    assert witnessed
    assert casts <= autocast._WITNESS_ONE_IN + 1
    assert region(calls) == (True, 1)


def test_a_region_of_another_dtype_has_its_own_cast(images, weight, device):
    with torch.autocast(device, torch.bfloat16):
        ours(images, weight)
        with torch.autocast(device, torch.float16):
            inside = ours(images, weight)
            assert inside.dtype == torch.float16
        with torch.autocast(device, enabled=False):
            assert ours(images, weight).dtype == torch.float32
        assert ours(images, weight).dtype == torch.bfloat16
    with torch.autocast(device, torch.float16):
        assert torch.equal(ours(images, weight), inside)  # not from a cast to bfloat16


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_tracing_takes_no_cast_from_outside_of_the_trace(images, weight, device):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight)
    module.forward = lambda images: ours(images, module.weight)
    with torch.autocast(device, torch.bfloat16):
        expected = module(images)
        traced = torch.jit.trace(module, images)
        assert torch.equal(traced(images), expected)


@pytest.mark.parametrize("gradients", [True, False])
def test_casts_and_leaves_are_freed_with_the_region(gradients, images, device):
    leaf = torch.randn(4, 3, 3, 2, device=device, requires_grad=True)
    with torch.set_grad_enabled(gradients), torch.autocast(device, torch.bfloat16):
        ours(images, leaf)
        cast = StorageWeakRef(cast_as_autocast(leaf, torch.bfloat16).untyped_storage())
        assert not cast.expired()
    assert cast.expired()
    alive = weakref.ref(leaf)
    del leaf
    assert alive() is None


def test_casts_are_not_kept_by_the_frame_of_a_call_that_failed(images, weight, device):
    with torch.no_grad():
        with torch.autocast(device, torch.bfloat16):
            held = cast_cache(images.device, torch.bfloat16)  # as a traceback would
            before = ours(images, weight)
        weight.mul_(2)
        with torch.autocast(device, torch.bfloat16):
            assert torch.equal(ours(images, weight), 2 * before)
            assert cast_cache(images.device, torch.bfloat16) is not held


def test_the_default_dtype_does_not_matter(images, weight, device):
    expected = ours(images.bfloat16(), weight.bfloat16())
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast(device, torch.bfloat16):
            assert torch.equal(ours(images, weight), expected)
            assert torch.equal(ours(images, weight), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda':UserWarning")
def test_autocast_of_another_device_casts_nothing(images, weight, device):
    """Whichever of the two comes first."""
    other = "cuda" if device == "cpu" else "cpu"
    for _ in range(2):
        with torch.autocast(other, torch.float16):
            assert ours(images, weight).dtype == torch.float32
        with torch.autocast(device, torch.float16):
            assert ours(images, weight).dtype == torch.float16


def test_threads_share_a_leaf(images, weight, device):
    """A region that ends clears the cache of the others."""
    expected = ours(images.bfloat16(), weight.bfloat16())
    equal = []

    def work():
        for _ in range(50):
            with torch.autocast(device, torch.bfloat16):
                equal.extend(torch.equal(ours(images, weight), expected) for _ in range(3))

    in_threads(*[work] * 4)
    assert len(equal) == 600
    assert all(equal)


# Who casts weight and bias.

ON_GPU = SimpleNamespace(is_cuda=True, dtype=torch.float32)  # all that is asked about the input


def parameters(dtype=torch.float32, requires=(True, True)):
    """A weight and a bias, each of which may require gradients."""
    tensors = torch.ones(4, 2, 3, 5, dtype=dtype), torch.ones(2, dtype=dtype)
    return [one.requires_grad_(wanted) for one, wanted in zip(tensors, requires, strict=True)]


def with_weight(change):
    weight, bias = parameters()
    return [change(weight.detach()).requires_grad_(), bias]


def made_in_inference_mode():
    with torch.inference_mode():
        return parameters(requires=(False, False))


@pytest.mark.parametrize(
    ("given", "casts"),
    {
        "leaves": (parameters(), True),
        "a leaf without a bias": ([parameters()[0], None], True),
        "frozen": (parameters(requires=(False, False)), True),
        "one of two frozen": (parameters(requires=(False, True)), False),
        "computed": ([one * 1 for one in parameters()], False),
        "a view": (with_weight(lambda one: one.view(one.shape)), False),
        "made in inference mode": (made_in_inference_mode(), False),
        "16 bits": (parameters(torch.float16, requires=(False, False)), False),
        "channels_last": (with_weight(lambda one: one.clone(memory_format=torch.channels_last)), True),
        "rows of another order": (with_weight(lambda one: torch.empty_permuted(one.shape, (1, 0, 2, 3))), False),
        "with gaps": (with_weight(lambda one: torch.empty_strided(one.shape, (60, 30, 10, 2))), False),
    }.values(),
    ids=lambda one: None,
)
def test_a_call_casts_float32_leaves_and_what_needs_no_gradient(given, casts):
    assert plain.casts_parameters((ON_GPU, *given), torch.float16) == casts


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_call_casts_what_is_not_cached_only_where_no_gradient_is_recorded(recorded, cache, device):
    leaves, computed = parameters(), [one * 1 for one in parameters()]
    with torch.set_grad_enabled(recorded), torch.autocast(device, torch.bfloat16, cache_enabled=cache):
        assert plain.casts_parameters((ON_GPU, *leaves), torch.bfloat16) == (cache or not recorded)
        assert plain.casts_parameters((ON_GPU, *computed), torch.bfloat16) == (not recorded)
        assert plain.casts_parameters((ON_GPU, leaves[0], computed[1]), torch.bfloat16) == (not recorded and not cache)


@pytest.mark.parametrize(
    ("changed", "dtype"),
    [({"is_cuda": False}, torch.float16), ({"dtype": torch.float64}, torch.float16), ({}, torch.float32)],
    ids=["cpu", "float64", "autocast to float32"],
)
def test_torch_casts_for_a_call_that_is_not_one_in_16_bits_on_a_gpu(changed, dtype):
    input = SimpleNamespace(**{**vars(ON_GPU), **changed})
    assert not plain.casts_parameters((input, *parameters()), dtype)


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (4, 5, 6)], ids=str)
@pytest.mark.parametrize("requires", [(True, True), (False, False)], ids=str)
@pytest.mark.parametrize("casts", [True, False], ids=["the call", "torch"])
def test_whoever_casts_the_results_are_those_of_tensors_that_were_cast(casts, requires, shape, device, monkeypatch):
    """The call casts by a kernel on a GPU; on a CPU it is made to cast, which it does by torch."""
    monkeypatch.setattr(plain, "casts_parameters", lambda *_: casts)
    images = torch.randn(shape, device=device, requires_grad=True)
    leaves = [one.detach().to(device).requires_grad_(one.requires_grad) for one in parameters(requires=requires)]
    wanted = [images, *(one for one in leaves if one.requires_grad)]
    expected = ours(images.bfloat16(), *(one.bfloat16() for one in leaves))
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, wanted, grad)
    for _ in range(2):
        with torch.autocast(device, torch.bfloat16):
            output = ours(images, *leaves)
        assert torch.equal(output, expected)
        for found, exact in zip(torch.autograd.grad(output, wanted, grad), gradients, strict=True):
            assert found.stride() == exact.stride()
            torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-2)  # the sum of a bias's may be in float32
