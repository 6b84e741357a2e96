"""What is compiled for a layer depends on the classes that its sizes are of, which are few; layers at random."""

import functools
import itertools
import json
import pickle
import random
import statistics
from dataclasses import replace

import pytest
import torch

from benchmarks.random_layers import COUNT, random_layers
from gemmconv import selection
from gemmconv.device import MEASURED
from gemmconv.explain import compilations_of
from gemmconv.geometry import Problem
from gemmconv.hashing import hashed_once
from gemmconv.kernels.base import Config
from gemmconv.kernels.size_class import representatives
from gemmconv.validation import made_problem
from tests.processes import output_of

# Channels, kernel, stride, padding, output padding.
LAYERS = {
    "k2s2": (256, 256, (2, 2), (2, 2), (0, 0), (0, 0)),
    "k3s1": (64, 64, (3, 3), (1, 1), (1, 1), (0, 0)),
    "k4s2": (256, 128, (4, 4), (2, 2), (1, 1), (0, 0)),
    "k3s2": (128, 64, (3, 3), (2, 2), (1, 1), (1, 1)),
    "k5s2": (80, 48, (5, 5), (2, 2), (2, 2), (1, 1)),
    "rgb": (64, 3, (4, 4), (2, 2), (1, 1), (0, 0)),
    "vocoder": (512, 256, (1, 16), (1, 8), (0, 4), (0, 0)),
}
FORMATS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
PASSES = "forward", "input_grad", "weight_grad"
CASES = list(itertools.product(LAYERS, ("tf32", "ieee", "bf16"), FORMATS, PASSES))
QUICK = list(itertools.product(("k2s2", "k4s2"), ("tf32", "bf16"), FORMATS, PASSES))
SIZES, MOST, MEDIAN = 60, 16, 8  # sizes of a layer, and compilations that they may take
FEW_SIZES, MOST_OF_FEW, MEDIAN_OF_FEW = 20, 12, 6
# Layers that take more than MOST: strides of 1, whose tiles differ more from size to size, and a few of stride 2.
ABOVE = {
    ("k3s1", "tf32", "nchw", "forward"): 25,
    ("k3s1", "tf32", "nchw", "input_grad"): 25,
    ("k3s1", "ieee", "nchw", "forward"): 19,
    ("k3s1", "ieee", "nchw", "input_grad"): 19,
    ("k3s1", "bf16", "nchw", "forward"): 22,
    ("k3s1", "bf16", "nchw", "input_grad"): 21,
    ("k4s2", "tf32", "nchw", "forward"): 18,
    ("k4s2", "bf16", "nchw", "forward"): 18,
    ("k3s2", "tf32", "nchw", "forward"): 19,
    ("k5s2", "tf32", "nchw", "forward"): 18,
}


def sizes(layer, count):
    """Batches and sizes at random, the same for a layer."""
    draw = random.Random(0)
    for _ in range(count):
        batch = draw.randint(1, 64)
        yield batch, (1, draw.randint(50, 2000)) if layer == "vocoder" else (draw.randint(8, 128), draw.randint(8, 128))


def config_of(layer, precision, memory_format, batch, size):
    problem = Problem(batch, *LAYERS[layer][:2], 1, size, *LAYERS[layer][2:])
    dtype, rounding = (torch.bfloat16, "ieee") if precision == "bf16" else (torch.float32, precision)
    options = {"memory_format": FORMATS[memory_format], "bias": True, "spec": MEASURED, "deterministic": True}
    return Config(problem, dtype, torch.device("cuda", 0), rounding, torch_precision=rounding, **options)


def taken(config, direction):
    """The kernel and the tile that ``auto`` takes, and all that is compiled for it, transposed tensors included."""
    choice = selection.choose(config, "auto", "test", direction).choice(config, direction)
    program = choice.program(config, direction)
    return str(choice), () if program is None else compilations_of(program, config)


@functools.cache
def compilations(count, layer, precision, memory_format, direction):
    """How many different kernels are compiled for so many sizes."""
    found = set()
    for batch, size in sizes(layer, count):
        found.update(taken(config_of(layer, precision, memory_format, batch, size), direction)[1])
    return len(found)


def test_a_layer_compiles_few_kernels_for_20_sizes():
    counts = {case: compilations(FEW_SIZES, *case) for case in QUICK}
    assert {case: count for case, count in counts.items() if count > MOST_OF_FEW} == {}
    assert statistics.median(counts.values()) <= MEDIAN_OF_FEW


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_compiles_few_kernels_for_60_sizes(layer):
    counts = {case: compilations(SIZES, *case) for case in CASES if case[0] == layer}
    assert {case: count for case, count in counts.items() if count > ABOVE.get(case, MOST)} == {}
    no_longer = [case for case in ABOVE if case[0] == layer and counts[case] <= MOST]
    assert no_longer == [], "take these out of ABOVE"


@pytest.mark.slow
def test_a_layer_compiles_8_kernels_for_60_sizes_in_the_median():
    assert statistics.median(compilations(SIZES, *case) for case in CASES) <= MEDIAN


# Choices are a pure function.


def some_choices(order):
    """Choices of a few configurations, made one after the other in an order."""
    layers = ("k3s1", "bf16", "nchw"), ("k4s2", "tf32", "channels_last"), ("rgb", "ieee", "nchw")
    cases = [(*case, *one, way) for case in layers for one in sizes(case[0], 6) for way in PASSES]
    return {repr(case): repr(taken(config_of(*case[:-1]), case[-1])) for case in sorted(cases, key=repr)[::order]}


def test_choices_are_the_same_in_either_order_and_in_another_process():
    """The other begins with empty caches, at the other end, with other hashes of strings."""
    code = "import json, tests.test_size_classes as t; print(json.dumps(t.some_choices(-1)))"
    other = output_of(code, PYTHONHASHSEED="7")
    assert json.loads(other.splitlines()[-1]) == some_choices(1)


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("size", [(8, 8), (64, 40), (1, 200)])
def test_an_empty_batch_is_chosen_for(size, direction):
    for layer, precision, memory_format in itertools.product(LAYERS, ("tf32", "bf16"), FORMATS):
        assert taken(config_of(layer, precision, memory_format, 0, size), direction)[0]


# Representatives of classes of sizes.


def representatives_of(problem, dtype=torch.float32, device="cuda:0"):
    return [one.problem for one in representatives(Config(problem, dtype, torch.device(device)))]


def alignment(problem, elements):
    """The largest power of two, up to 16 bytes, that divides rows of inputs, and of outputs."""
    return [
        next(power for power in (16, 8, 4, 2, 1) if power <= elements and shape[3] % power == 0)
        for shape in (problem.input_shape, problem.output_shape)
    ]


@pytest.mark.parametrize(("dtype", "elements"), [(torch.float64, 2), (torch.float32, 4), (torch.bfloat16, 8)], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_representatives_are_as_well_aligned(layer, dtype, elements):
    for batch, size in sizes(layer, 40):
        problem = config_of(layer, "ieee", "nchw", batch, size).problem
        found = representatives_of(problem, dtype)
        assert 1 <= len(found) <= 2
        for one in found:
            assert alignment(one, elements) == alignment(problem, elements), (problem, one)
            assert replace(one, batch=batch, input_size=size) == problem
            assert one.input_size[1] <= 2 * size[1]
            if size[1] % elements == 0:  # kernels take planes of whole blocks as rows of one
                for plane, of_problem in ((one.in_pixels, problem.in_pixels), (one.out_pixels, problem.out_pixels)):
                    assert (plane % 64 == 0) == (of_problem % 64 == 0), (problem, one)


@pytest.mark.parametrize(
    ("batch", "size"),
    [(1, (1, 1)), (16, (32, 32)), (64, (64, 64)), (4, (128, 128)), (64, (4, 4)), (32, (8, 64)), (16, (1, 1024))],
    ids=str,
)
def test_sizes_of_a_class_represent_themselves(batch, size):
    """Powers of two: as high as wide, or an eighth of that, or 1."""
    problem = Problem(batch, 64, 64, 1, size, (4, 4), (2, 2), (1, 1))
    assert representatives_of(problem) == [problem] == representatives_of(problem, torch.bfloat16)


def test_representatives_of_nothing_and_of_the_cpu():
    layer = Problem(2, 8, 8, 1, (5, 6), (3, 3), (2, 2))
    empty = {"batch": 0}, {"input_size": (0, 6)}, {"input_size": (5, 0)}, {"in_channels": 0}, {"out_channels": 0}
    assert representatives_of(layer)
    assert [representatives_of(replace(layer, **one)) for one in empty] == [[]] * len(empty)
    assert representatives_of(layer, device="cpu") == []


# Kernel, padding and dilation of layers whose padding takes away more outputs than the kernel adds.
CROPPED = [((2, 7), (1, 0), (1, 2)), ((2, 3), (1, 1), (1, 1)), ((4, 4), (1, 26), (2, 3)), ((3, 3), (30, 30), (1, 1))]


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize(("kernel", "padding", "dilation"), CROPPED)
def test_layers_that_padding_crops_are_chosen_for(kernel, padding, dilation, direction):
    for size in ((33, 8), (300, 512), (64, 64)):
        problem = Problem(2, 1, 4, 1, size, kernel, (1, 1), padding, (0, 0), dilation)
        if min(problem.output_size) < 1:
            continue
        for dtype, memory_format in itertools.product((torch.float32, torch.float16), FORMATS.values()):
            config = Config(problem, dtype, torch.device("cuda", 0), memory_format=memory_format, spec=MEASURED)
            assert min(extent for one in representatives(config) for extent in one.problem.output_size) > 0
            assert taken(config, direction)[0]


@pytest.mark.parametrize(("batch", "size"), [(1, (1, 1)), (1, (1, 6)), (1, (5, 1)), (64, (1, 1))], ids=str)
def test_representatives_of_one_pixel_have_one(batch, size):
    for one in representatives_of(Problem(batch, 8, 8, 1, size, (3, 3), (2, 2))):
        assert min(one.batch, *one.input_size, *one.output_size) >= 1
        assert all(extent == 1 for extent, of in zip(one.input_size, size, strict=True) if of == 1)


@pytest.mark.parametrize(
    ("batch", "size"),
    [(1 << 40, (7, 9)), (3, (1 << 20, 1 << 20)), (1, ((1 << 31) - 1, 3)), (5, (1, 1 << 40))],
)
def test_representatives_of_huge_sizes_are_no_larger_than_the_largest_class(batch, size):
    layer = Problem(batch, 8, 8, 1, size, (3, 3))
    (found,) = representatives_of(layer)
    assert found.batch == 1 or found.batch * found.in_pixels <= 2 << 24
    assert alignment(found, 4) == alignment(layer, 4)


# Hashes that are kept.


PROBLEM = Problem(2, 8, 8, 1, (5, 6), (3, 3))
CONFIG = config_of("k2s2", "bf16", "nchw", 2, (5, 6))


@pytest.mark.parametrize(
    ("value", "changes"),
    [(PROBLEM, {"batch": 3}), (CONFIG, {"bias": False}), (MEASURED, {"name": "another"})],
    ids=["Problem", "Config", "DeviceSpec"],
)
def test_equal_values_have_equal_hashes_which_are_not_pickled(value, changes):
    one, other, changed = replace(value), replace(value), replace(value, **changes)
    assert one is not other
    assert hash(one) == hash(one) == hash(other) != hash(changed) == hash(replace(changed))
    assert {one: 1}[other] == 1
    assert one.__dict__["_hash"] == hash(one)
    pickled = pickle.dumps(one)
    assert b"_hash" not in pickled
    again = pickle.loads(pickled)
    assert "_hash" not in again.__dict__
    assert again == one
    assert hash(again) == hash(one)


def test_a_hash_is_worked_out_once():
    counted = []

    class Value:
        def __hash__(self):
            counted.append(self)
            return 5

    kept = hashed_once(Value)()
    assert [hash(kept), hash(kept)] == [5, 5]
    assert counted == [kept]


# Layers at random.


@pytest.mark.parametrize("seed", [0, 7, 20])
def test_random_layers_are_of_all_kinds_within_their_bounds_and_the_same_for_a_seed(seed):
    layers = random_layers(seed)
    assert len(layers) == len({layer.name for layer in layers}) == COUNT
    assert layers == random_layers(seed)
    assert layers[:9] == random_layers(seed, 9)
    problems = [layer.problem for layer in layers]
    assert problems != [layer.problem for layer in random_layers(seed + 1)]
    kinds = {
        "height 1": lambda p: p.input_size[0] == p.kernel_size[0] == 1,
        "groups": lambda p: 1 < p.groups < p.in_channels,
        "depthwise": lambda p: 1 < p.groups == p.in_channels == p.out_channels,
        "dilated": lambda p: p.dilation != (1, 1),
        "few outputs": lambda p: p.out_channels <= 4 < p.in_channels,
        "many channels": lambda p: min(p.in_channels, p.out_channels) >= 128,
        "stride 1": lambda p: p.stride == (1, 1),
        "output padding": lambda p: p.output_padding != (0, 0),
        "odd sizes": lambda p: p.input_size[1] % 2 == 1,
        "channels that are no multiples of 8": lambda p: p.in_channels % 8 and p.in_channels > 8,
    }
    assert [name for name, of_kind in kinds.items() if not any(map(of_kind, problems))] == []
    for p in problems:
        assert made_problem("test", p, torch.float32) == p
        assert 1 <= p.batch <= 64
        assert all(1 <= count <= 1024 for count in (p.in_channels, p.out_channels))
        assert all(1 <= stride <= kernel <= 9 for stride, kernel in zip(p.stride, p.kernel_size, strict=True))
        assert 4 <= p.input_size[1] <= 256
        assert p.input_size[0] == 1 or 4 <= p.input_size[0] <= 256
