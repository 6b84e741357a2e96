"""What surrounds a call: transforms of torch.func, forward-mode differentiation, hooks, modes, subclasses."""

import copy
import functools
from typing import ClassVar

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gemmconv
from gemmconv.algorithms import ALGORITHMS
from tests.cases import Case
from tests.samples import Operators, conv_precision, sample

# torch runs an operator without a batching rule of its own in a loop, and says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]

CASE = Case(3, 4, 6, (4, 5), (3, 2), (2, 1), (1, 0), (1, 0), (1, 2), groups=2)
OPTIONS = CASE.parameters


def ours(input, weight, bias=None, **options):
    return gemmconv.conv_transpose2d(input, weight, bias, **OPTIONS, **options)


def theirs(input, weight, bias=None):
    return torch.nn.functional.conv_transpose2d(input, weight, bias, **OPTIONS)


def tensors(device, copies=None, dtype=torch.float64):
    """Return input, weight and bias; `copies` adds a leading dimension of different values."""
    data = sample(CASE, dtype, device)
    found = (data.input, data.weight, data.bias)
    if copies is None:
        return found
    return tuple(torch.stack([tensor * (k + 1) for k in range(copies)]) for tensor in found)


def small(device):
    """Return a part of the input, whose second derivatives are few, and the weight."""
    input, weight, _ = tensors(device)
    return input[:2, :, :2, :2], weight


# torch.func


@pytest.mark.parametrize(
    ("in_dims", "out_dim"),
    [
        ((0, None, None), 0),
        ((None, 0, None), 0),
        ((None, None, 0), 0),
        ((0, 0, None), 0),
        ((0, 0, 0), 0),
        ((3, None, None), 1),
    ],
    ids=["input", "weight", "bias", "input_weight", "all", "another_dimension"],
)
def test_conv_transpose2d_under_vmap_matches_a_loop(in_dims, out_dim, device):
    plain, stacked = tensors(device), tensors(device, copies=3)
    arguments = [plain[i] if dim is None else stacked[i].movedim(0, dim) for i, dim in enumerate(in_dims)]
    rows = [ours(*(plain[i] if dim is None else stacked[i][k] for i, dim in enumerate(in_dims))) for k in range(3)]
    torch.testing.assert_close(vmap(ours, in_dims, out_dim)(*arguments), torch.stack(rows, out_dim))


FOLDS = {
    "im2col": [lambda x, f=f: f(x, (3, 2), padding=1) for f in (gemmconv.im2col, torch.nn.functional.unfold)],
    "col2im": [lambda x, f=f: f(x, (5, 6), (3, 2), padding=1) for f in (gemmconv.col2im, torch.nn.functional.fold)],
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1, 2)], ids=["input", "weight", "all"])
def test_flops_are_counted_as_those_of_torch(which, gradients, device):
    shapes = (3, 4, 5, 6), (4, 2, 3, 2), (2,)  # of one group: torch counts weight gradients of several once for each
    counts = []
    for function in (gemmconv.conv_transpose2d, torch.nn.functional.conv_transpose2d):
        given = [torch.ones(s, device=device, requires_grad=gradients and i in which) for i, s in enumerate(shapes)]
        with FlopCounterMode(display=False) as counter:
            output = function(*given, stride=2)
            if gradients:
                output.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# What only torch's own operators are carried through: auto takes those.


def _compiled(function):
    return torch.compile(function, backend="eager")


TRANSFORMED = {
    # The mixed second derivative of a bilinear map is not zero.
    "jacrev_of_jacrev": lambda f, x, w: jacrev(jacrev(lambda x, w: f(x, w).sum((0, 2, 3)), argnums=0), argnums=1)(x, w),
    "jvp_of_jvp": lambda f, x, w: jvp(lambda x: jvp(lambda w: f(x, w).sin(), (w,), (w,))[1], (x,), (x,))[1],
    "jvp_of_vmap": lambda f, x, w: jvp(vmap(lambda x: f(x[None], w)), (x,), (x,))[1],
    "vmap_of_nothing": lambda f, x, w: vmap(lambda x: f(x[None], w))(x[:0]),
    "vmap_of_single_images": lambda f, x, w: vmap(lambda x: f(x, w, w.sum((0, 2, 3)).repeat(2)))(x),
    "gradients_per_sample": lambda f, x, w: vmap(
        grad(lambda x, w: f(x[None], w, w.sum((0, 2, 3)).repeat(2)).square().sum(), argnums=(0, 1)), in_dims=(0, None)
    )(x, w),
    "hessian": lambda f, x, w: hessian(lambda w: f(x, w).pow(3).sum())(w),
    "jacfwd_of_jacfwd": lambda f, x, w: jacfwd(jacfwd(lambda w: f(x, w).pow(3).sum()))(w),
    "functionalize": lambda f, x, w: functionalize(f)(x, w),
    "compiled_grad": lambda f, x, w: _compiled(lambda x: grad(lambda x: f(x, w).sin().sum())(x))(x),
    "compiled_grad_of_grad": lambda f, x, w: _compiled(
        lambda x: grad(lambda x: grad(lambda x: f(x, w).pow(3).sum())(x).sum())(x)
    )(x),
    "compiled_gradients_per_sample": lambda f, x, w: _compiled(
        lambda w, x: vmap(grad(lambda w, x: f(x[None], w).sin().sum()), in_dims=(None, 0))(w, x)
    )(w, x),
}


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_conv_transpose2d_under_any_transform_matches_torch(transformed, device):
    torch._dynamo.reset()
    torch.testing.assert_close(transformed(ours, *small(device)), transformed(theirs, *small(device)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for float32 on CUDA it says something")
@pytest.mark.parametrize("transformed", ["jvp_of_jvp", "functionalize", "compiled_grad"])
def test_a_precision_that_says_nothing_under_transforms_changes_nothing(transformed):
    torch._dynamo.reset()
    actual = TRANSFORMED[transformed](functools.partial(ours, precision="tf32"), *small("cpu"))
    torch.testing.assert_close(actual, TRANSFORMED[transformed](theirs, *small("cpu")))


@pytest.mark.parametrize("transformed", ["jvp_of_vmap", "vmap_of_single_images", "gradients_per_sample", "hessian"])
def test_an_algorithm_by_name_under_transforms_matches_torch(transformed, device):
    chosen = functools.partial(ours, algorithm="gemm_col2im")
    actual = TRANSFORMED[transformed](chosen, *small(device))
    torch.testing.assert_close(actual, TRANSFORMED[transformed](theirs, *small(device)))
    with pytest.raises(NotImplementedError, match=r"jvp inside torch\.func\.jvp .* use algorithm=\"auto\""):
        TRANSFORMED["jvp_of_jvp"](chosen, *small(device))


@pytest.mark.parametrize("inner", [lambda f: lambda x: jvp(f, (x,), (x,))[1], vmap], ids=["jvp_of_jvp", "jvp_of_vmap"])
def test_folds_under_forward_mode_match_torch(inner, device):
    images = torch.randn(2, 3, 5, 6, dtype=torch.float64, device=device)

    def transformed(unfold, fold):
        return jvp(inner(lambda x: fold(unfold(x.sin(), 3), (5, 6), 3)), (images,), (images,))[1]

    wanted = transformed(torch.nn.functional.unfold, torch.nn.functional.fold)
    torch.testing.assert_close(transformed(gemmconv.im2col, gemmconv.col2im), wanted)


# Forward-mode differentiation: the right tangent or an error, never a tangent that is lost.


def tangent(function, given):
    """Return the output's tangent, None where forward mode is refused, zeros where it was lost."""
    try:
        output, found = forward_ad.unpack_dual(function(*given))
    except RuntimeError as refusal:
        if "forward" in str(refusal).lower() or "jvp" in str(refusal).lower():
            return None
        if isinstance(refusal, NotImplementedError):
            pytest.skip(str(refusal))
        raise
    return torch.zeros_like(output) if found is None else found.detach()


NAMED = ["auto", *(algorithm.name for algorithm in ALGORITHMS)]


@pytest.mark.parametrize("algorithm", NAMED)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["input", "weight", "bias"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_conv_transpose2d_of_dual_tensors_is_right_or_refused(needs_grad, which, algorithm, device):
    chosen = functools.partial(ours, algorithm=algorithm)
    with forward_ad.dual_level():
        given = [tensor.requires_grad_(needs_grad) for tensor in tensors(device)]
        given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))
        actual, wanted = tangent(chosen, given), tangent(theirs, given)
    if actual is not None:
        torch.testing.assert_close(actual, wanted)


# Hooks on saved tensors, checkpoints, in-place changes


def test_conv_transpose2d_saves_its_tensors_through_the_hooks(device):
    given = [tensor.requires_grad_() for tensor in tensors(device)]
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to(device)):
        output = ours(*given)
    assert sorted(packed) == sorted([given[0].shape, given[1].shape])
    found, wanted = (torch.autograd.grad(one.sin().sum(), given) for one in (output, theirs(*given)))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_conv_transpose2d_in_a_checkpoint_has_the_same_gradients(use_reentrant, device):
    given = [tensor.requires_grad_() for tensor in tensors(device)]
    output = checkpoint(ours, *given, use_reentrant=use_reentrant)
    output.sin().sum().backward()
    found = [tensor.grad for tensor in given]
    torch.testing.assert_close(found, torch.autograd.grad(theirs(*given).sin().sum(), given))


def test_conv_transpose2d_notices_a_saved_tensor_that_changed(device):
    images, weight, _ = tensors(device)
    output = ours(images, weight.requires_grad_())
    images.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_conv_transpose2d_frees_its_graph_after_backward(device):
    given = [tensor.requires_grad_() for tensor in tensors(device)]
    output = ours(*given).sum()
    output.backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()


# Modes and subclasses must see the call


class Tagged(torch.Tensor):
    """A subclass without behaviour of its own; torch's functions return it."""


def _refuse(*_, **__):
    raise TypeError("not what torch's means")


class Awkward(torch.Tensor):
    """A subclass whose methods and attributes mean something else, as torch's own functions never notice."""

    shape = dtype = device = layout = is_cuda = is_cpu = ndim = itemsize = property(_refuse)


_ASKED = (
    "size stride dim numel element_size data_ptr storage_offset is_contiguous is_floating_point is_complex get_device"
)
_DERIVED = "contiguous view reshape expand permute transpose flatten unsqueeze squeeze sum to clone numpy new_empty"
_SPECIAL = "as_subclass as_strided copy_ __getitem__ __add__ __mul__ __len__ __iter__"
for _name in f"{_ASKED} {_DERIVED} {_SPECIAL}".split():
    setattr(Awkward, _name, _refuse)


class Labelled(torch.Tensor):
    """A subclass with a label that results take over, as MONAI's MetaTensor; it notes the functions that it sees."""

    seen: ClassVar = []

    def stride(self):
        return self.label

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        result = super().__torch_function__(function, types, args, kwargs)
        if isinstance(result, cls):
            given = (*args, *(kwargs or {}).values())
            result.label = "".join(getattr(value, "label", "") for value in given if isinstance(value, cls))
        return result


def labelled(tensor):
    result = torch.Tensor.as_subclass(tensor, Labelled)
    result.label = f"{tensor.dim()}-D"
    return result


def awkward(tensor):
    return torch.Tensor.as_subclass(tensor, Awkward)


def plain(tensor):
    return torch.Tensor.as_subclass(tensor, torch.Tensor)


KINDS = [awkward, labelled]


def assert_same_kinds(actual, wanted):
    for one, other in zip(actual, wanted, strict=True):
        assert type(one) is type(other)
        assert getattr(one, "label", None) == getattr(other, "label", None)
        torch.testing.assert_close(plain(one), plain(other), rtol=1e-5, atol=1e-5)


def assert_same_as_torch(functions, kind, given, which, gradient=plain):
    """The results and gradients of both functions, of tensors of which some are of another kind."""
    results = []
    for function in functions:
        leaves = [(kind if i in which else plain)(one.detach()).requires_grad_() for i, one in enumerate(given)]
        try:
            with conv_precision("ieee"):
                output = function(*leaves)
                values = plain(output)
                values.register_hook(gradient)
                values.sin().sum().backward()
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
        results.append([output, *(leaf.grad for leaf in leaves)])
    assert_same_kinds(*results)


@pytest.mark.parametrize("algorithm", NAMED)
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=["input", "weight", "bias", "all"])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_conv_transpose2d_of_subclasses_is_what_torch_gives(kind, batched, which, algorithm, device):
    input, weight, bias = tensors(device, dtype=torch.float32)
    given = input if batched else input[0], weight, bias
    assert_same_as_torch([functools.partial(ours, algorithm=algorithm), theirs], kind, given, which)


@pytest.mark.parametrize("algorithm", NAMED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_a_subclass_is_what_torch_makes_of_it(kind, algorithm, device):
    functions = [functools.partial(ours, algorithm=algorithm), theirs]
    for which in (), (0,):
        assert_same_as_torch(functions, kind, tensors(device, dtype=torch.float32), which, gradient=kind)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_folds_of_subclasses_are_what_torch_gives(kind, batched, device):
    images = torch.randn(2, 3, 5, 6, device=device)
    columns = torch.nn.functional.unfold(images, (3, 2), padding=1)
    if not batched:
        images, columns = images[0], columns[0]
    for functions, given in (FOLDS["im2col"], images), (FOLDS["col2im"], columns):
        for gradient in plain, kind:
            assert_same_as_torch(functions, kind, [given], (0,), gradient)


@pytest.mark.parametrize("algorithm", NAMED)
def test_a_module_with_subclasses_for_parameters_is_what_torch_gives(algorithm, device):
    class Own(torch.nn.Parameter):
        stride = is_contiguous = shape = _refuse

    layer = torch.nn.ConvTranspose2d(4, 6, 3, stride=2, device=device)
    layer.weight, layer.bias = Own(layer.weight.detach()), Own(layer.bias.detach())
    images, results = torch.randn(2, 4, 5, 6, device=device), []
    for convert in (lambda layer: gemmconv.convert(copy.copy(layer), algorithm=algorithm)), lambda layer: layer:
        try:
            with conv_precision("ieee"):
                output = convert(layer)(images)
                gradients = torch.autograd.grad(output.sin().sum(), [layer.weight, layer.bias])
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
        results.append([output, *gradients])
    assert_same_kinds(*results)


def test_a_subclass_sees_the_public_function_once(device):
    images, weight, _ = tensors(device)
    columns = torch.nn.functional.unfold(images, 2)
    for function, *arguments in (
        (gemmconv.conv_transpose2d, labelled(images), weight, None, 1, 0, 0, 2),
        (gemmconv.conv_transpose2d, images, labelled(weight), None, 1, 0, 0, 2),
        (gemmconv.im2col, labelled(images), 2),
        (gemmconv.col2im, labelled(columns), images.shape[2:], 2),
    ):
        Labelled.seen.clear()
        function(*arguments)
        assert Labelled.seen == [function]


def test_subclasses_that_do_not_know_each_other_are_refused_as_by_torch(device):
    images, weight, bias = tensors(device)
    for function in (ours, theirs):
        with pytest.raises(TypeError, match=r"no implementation found|Multiple dispatch failed"):
            function(labelled(images), awkward(weight), bias)


def test_a_function_mode_sees_the_call_beside_a_subclass_too(device):
    seen = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    images, weight, bias = tensors(device)
    with Recorder():
        for one in (bias, None):
            ours(images, weight, one)
            assert any("conv_transpose2d" in str(function) for function in seen)
            assert ours not in seen  # it is called: what it calls is seen
            seen.clear()
        output = ours(labelled(images), weight, bias)
        assert seen.count(gemmconv.conv_transpose2d) == 1
    assert_same_kinds([output], [theirs(labelled(images), weight, bias)])


@pytest.mark.parametrize("algorithm", ["auto", "gemm_col2im"])
def test_a_compiled_call_of_a_subclass_is_what_torch_gives(algorithm, device):
    images, weight, bias = (tensor.requires_grad_() for tensor in tensors(device))
    torch._dynamo.reset()
    results = []
    for function in (lambda *x: ours(*x, algorithm=algorithm), theirs):
        output = torch.compile(function, backend="eager", fullgraph=True)(images.as_subclass(Tagged), weight, bias)
        results.append([output, *torch.autograd.grad(plain(output).sin().sum(), (images, weight, bias))])
    assert_same_kinds(*results)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_operators_compute_on_subclasses_as_on_plain_tensors(kind, mode, device):
    images, weight, _ = tensors(device, dtype=torch.float32)
    operators = torch.ops.gemmconv
    with mode(), torch.autocast(device, torch.bfloat16, enabled=mode is torch.enable_grad):
        given = kind(images), weight.requires_grad_(mode is torch.enable_grad)
        output = operators.conv_transpose2d(*given, algorithm="gemm_col2im")
        assert type(output) is type(given[0])
        wanted = operators.conv_transpose2d(images, weight, algorithm="gemm_col2im")
        assert torch.equal(plain(output), wanted)
        assert torch.equal(plain(operators.im2col(given[0], [2, 2])), operators.im2col(images, [2, 2]))
    if mode is torch.enable_grad:
        gradients = [torch.autograd.grad(plain(one).float().sin().sum(), weight)[0] for one in (output, wanted)]
        assert torch.equal(*gradients)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_conv_transpose2d_is_seen_by_a_dispatch_mode(needs_grad, device):
    given = [tensor.requires_grad_(needs_grad) for tensor in tensors(device)]
    with Operators() as seen:
        output = ours(*given, algorithm="gemm_col2im")
        if needs_grad:
            output.sum().backward()
    assert seen.names[0] == "gemmconv.conv_transpose2d.default"
    assert ("gemmconv.conv_transpose2d_grads.default" in seen.names) == (len(seen.names) > 1) == needs_grad


def test_conv_transpose2d_appears_in_a_profile(device):
    given = tensors(device)
    with torch.profiler.profile() as profile:
        ours(*given, algorithm="gemm_col2im")
    assert "gemmconv::conv_transpose2d" in {event.key for event in profile.key_averages()}


def test_conv_transpose2d_takes_inference_tensors(device):
    with torch.inference_mode():
        made_inside = tensors(device)
        inside = ours(*made_inside)
    assert inside.is_inference()
    outside = ours(*tensors(device))
    assert not outside.is_inference()
    assert torch.equal(inside, outside)
    mixed = ours(made_inside[0], *tensors(device)[1:])
    assert torch.equal(mixed, outside)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_compiled_call_takes_a_height_that_data_decide(device):
    input, weight, _ = tensors(device)

    def of_chosen_rows(function):
        return lambda chosen: function(input[:, :, chosen.nonzero().squeeze(1)], weight)

    torch._dynamo.reset()
    chosen = torch.tensor([1, 0, 1, 1], device=device)
    actual = torch.compile(of_chosen_rows(ours), backend="aot_eager", fullgraph=True)(chosen)
    torch.testing.assert_close(actual, of_chosen_rows(theirs)(chosen))


@pytest.mark.parametrize("algorithm", ["auto", "gemm_col2im"])
def test_transforms_under_autocast_give_the_dtypes_that_torch_gives(algorithm, device):
    input, weight, bias = tensors(device, dtype=torch.float32)

    def results(function):
        call = functools.partial(function, bias=bias)
        with torch.autocast(device, torch.bfloat16):
            gradients = grad(lambda *both: call(*both).float().square().sum(), argnums=(0, 1))(input, weight)
            return *gradients, *jvp(call, (input, weight), (input, weight))

    chosen = functools.partial(ours, algorithm=algorithm)
    for actual, expected in zip(results(chosen), results(theirs), strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2 * expected.abs().max().item())


def test_vmap_of_a_named_algorithm_under_autocast_casts(device):
    """torch's own operator takes no part in autocast under vmap."""
    input, weight, _ = tensors(device, dtype=torch.float32)
    call = functools.partial(ours, weight=weight, algorithm="gemm_col2im")
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(vmap(call)(input[:, None]).squeeze(1), call(input))
        assert call(input).dtype == torch.bfloat16
