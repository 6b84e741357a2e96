"""im2col and col2im against the reference, torch.nn.functional.unfold and fold, and convolutions of each rank."""

import math
import random

import pytest
import torch

import gemmconv
from gemmconv.algorithms import fold
from tests import reference
from tests.samples import channels_last, offset, spread, transposed

# image size, kernel_size, dilation, padding, stride
WINDOWS = [
    ((7, 9), (3, 5), (1, 1), (0, 0), (1, 1)),
    ((7, 9), (3, 3), (1, 1), (1, 1), (2, 2)),
    ((11, 8), (3, 2), (2, 3), (2, 1), (1, 2)),
    ((9, 10), (2, 3), (3, 1), (0, 2), (4, 3)),
    ((5, 6), (1, 1), (1, 1), (2, 1), (3, 2)),
    ((1, 37), (1, 16), (1, 1), (0, 4), (1, 8)),
    ((1, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((4, 300), (2, 3), (1, 2), (1, 2), (2, 1)),
    ((6, 6), (6, 6), (1, 1), (0, 0), (1, 1)),
    ((13, 12), (3, 3), (1, 1), (7, 5), (5, 5)),
]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
by_window = pytest.mark.parametrize("window", WINDOWS, ids=str)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def settings_of(window):
    _, kernel_size, dilation, padding, stride = window
    return {"kernel_size": kernel_size, "dilation": dilation, "padding": padding, "stride": stride}


def random_images(window, dtype, device):
    return torch.randn(2, 3, *window[0], dtype=torch.float64).to(dtype).to(device)


def random_columns(window, dtype, device):
    shape = reference.unfold(torch.empty(2, 3, *window[0]).numpy(), **settings_of(window)).shape
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(device)


@by_window
@by_dtype
def test_im2col_matches_reference_and_unfold(window, dtype, device, poison):
    images = random_images(window, dtype, device)
    poison(device)
    columns = gemmconv.im2col(images, **settings_of(window))
    assert columns.dtype == dtype
    assert columns.device == images.device
    assert torch.equal(columns, torch.nn.functional.unfold(images, **settings_of(window)))
    exact = reference.unfold(reference.to_array(images), **settings_of(window))
    assert reference.relative_error(columns, exact) == 0


@by_window
@by_dtype
def test_col2im_matches_reference_and_fold(window, dtype, device, poison):
    columns = random_columns(window, dtype, device)
    poison(device)
    images = gemmconv.col2im(columns, window[0], **settings_of(window))
    exact = reference.fold(reference.to_array(columns), window[0], **settings_of(window))
    reference.assert_close(images, exact, dtype, "ieee")
    wide = torch.nn.functional.fold(columns.double(), window[0], **settings_of(window))
    reference.assert_close(images, wide.cpu().numpy(), dtype, "ieee")


@pytest.mark.parametrize("layout", [channels_last, transposed, spread, offset])
def test_im2col_accepts_any_strides(layout, device):
    images = torch.randn(2, 3, 7, 9, device=device)
    expected = torch.nn.functional.unfold(images, 3, padding=1)
    assert torch.equal(gemmconv.im2col(layout(images), 3, padding=1), expected)
    expanded = images[:1].expand(4, 3, 7, 9)
    assert torch.equal(gemmconv.im2col(expanded, 3), torch.nn.functional.unfold(expanded.contiguous(), 3))


def test_im2col_takes_single_numbers_and_defaults_as_unfold_does(device):
    images = torch.randn(2, 3, 7, 9, device=device)
    for arguments in ((3,), (3, 2), (3, 2, 1), (3, 1, 1, 2), ((3, 2), (1, 2), (1, 0), (2, 1))):
        actual = gemmconv.im2col(images, *arguments)
        assert torch.equal(actual, torch.nn.functional.unfold(images, *arguments))


def test_col2im_takes_single_numbers_and_defaults_as_fold_does(device):
    columns = torch.randn(2, 27, 25, dtype=torch.float64, device=device)
    for output_size, *arguments in ((7, 3), ((7, 7), 3, 1, 0, 1), (9, 3, 2), (5, 3, 1, 1), (11, 3, 1, 0, 2)):
        actual = gemmconv.col2im(columns, output_size, *arguments)
        expected = torch.nn.functional.fold(columns, output_size, *arguments)
        reference.assert_close(actual, expected, torch.float64)


def test_planes_that_the_kernels_cannot_count_are_torchs(monkeypatch):
    loaded = []
    for name in ("fold", "unfold"):
        monkeypatch.setattr(fold.col2im, name, lambda problem, *_: loaded.append(problem.batch) or ())
    for batch in (32_000, 32_768):  # of 65,536 channels: 2^31 - 50,331,648 planes, and 2^31
        problem = gemmconv.Problem(batch, 1, 65_536, 1, (1, 1), (1, 1))
        for prepare in (fold.prepare_col2im, fold.prepare_im2col):
            prepare(problem, torch.float16, torch.device("cuda", 0))
    assert loaded == [32_000, 32_000]


def one_hot_columns(input, kernel_size, dilation, padding, stride):
    """Columns by torch's convolution with kernels that are 1 at one tap."""
    channels, taps, rank = input.shape[1], math.prod(kernel_size), len(kernel_size)
    kernels = torch.eye(taps).to(input).view(taps, 1, *kernel_size).repeat(channels, *[1] * (1 + rank))
    return getattr(torch, f"conv{rank}d")(input, kernels, None, stride, padding, dilation, channels).flatten(2)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_random_windows_of_each_rank_are_one_hot_convolutions(rank, device):
    draw, close = random.Random(rank), torch.testing.assert_close
    for layout in (torch.clone, transposed, spread, offset) * 8:
        window = [[draw.randint(*of) for _ in range(rank)] for of in ((1, 4), (1, 3), (0, 3), (1, 4))]
        least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(*window[:3], strict=True)]
        size = [extent + draw.randint(0, 4) for extent in least]
        shape = draw.randint(1, 3), draw.randint(1, 3), *size
        input = layout(torch.randn(shape, dtype=torch.float64, device=device)).requires_grad_()
        wanted, columns = one_hot_columns(input, *window), gemmconv.im2col(input, *window)
        grad = layout(torch.randn(wanted.shape, dtype=torch.float64, device=device))
        (folded,) = torch.autograd.grad(wanted, input, grad)
        close((columns, *torch.autograd.grad(columns, input, grad)), (wanted, folded))
        close((gemmconv.im2col(input[0], *window), gemmconv.col2im(grad[0], size, *window)), (wanted[0], folded[0]))
        close(gemmconv.col2im(grad, size, *window), folded)
        arrays = input.detach().cpu().numpy(), grad.cpu().numpy()
        arrays = gemmconv.im2col(arrays[0], *window), gemmconv.col2im(arrays[1], size, *window)
        close([torch.from_numpy(one) for one in arrays], [wanted.detach().cpu(), folded.cpu()])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_windows_of_each_rank_in_gradients_transforms_and_graphs(rank, device):
    def there_and_back(input):
        columns = gemmconv.im2col(input, (3,) * rank, padding=1, stride=2)
        return gemmconv.col2im(columns.sin(), input.shape[2:], 3, padding=1, stride=2)

    input = torch.randn(2, 2, *(3, 5, 4)[-rank:], dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(there_and_back, (input,), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(there_and_back, (input,), fast_mode=True)
    wanted, close = there_and_back(input), torch.testing.assert_close
    close(torch.func.vmap(there_and_back)(torch.stack([input, -input])), torch.stack([wanted, there_and_back(-input)]))
    close(torch.func.jvp(there_and_back, (input,), (input,))[0], wanted)
    gradient = torch.func.grad(lambda one: there_and_back(one).sum())(input.detach())
    close(gradient, *torch.autograd.grad(there_and_back(input).sum(), input))
    graph = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)
    for sizes in input, torch.cat([input, input], -1), input[:0]:
        output, of_graph = there_and_back(sizes), graph(sizes)
        close(of_graph, output)
        close(torch.autograd.grad(of_graph.sum(), input), torch.autograd.grad(output.sum(), input))


def test_ints_are_for_images_and_for_volumes_of_five_dimensions(device):
    volumes = torch.randn(2, 3, 5, 6, 7, device=device)
    assert torch.equal(gemmconv.im2col(volumes, 2), gemmconv.im2col(volumes, (2, 2, 2)))
    for images in volumes[0], volumes[0, 0]:
        assert torch.equal(gemmconv.im2col(images, 2), torch.nn.functional.unfold(images, 2))
