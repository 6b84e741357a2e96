"""What ``auto`` takes on CUDA, as estimates have it; no GPU is touched."""

import math
import threading
from dataclasses import replace

import pytest
import torch

import gemmconv
from gemmconv import pairs, selection
from gemmconv.algorithms import ALGORITHMS, Config, fold
from gemmconv.algorithms.direct import Direct
from gemmconv.algorithms.fused import Fused
from gemmconv.algorithms.gemm_col2im import GemmCol2im
from gemmconv.algorithms.native import Native, _Deterministic
from gemmconv.device import MEASURED, REFERENCE, spec_of
from gemmconv.geometry import Problem
from gemmconv.kernels.layout.transpose import grad_output_transpose_seconds, transpose_seconds
from gemmconv.pairs import choose_pair
from gemmconv.selection import choose, is_deterministic

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="fused is for Hopper"
)

NCHW, LAST = FORMATS = torch.contiguous_format, torch.channels_last
FP32, TF32 = (torch.float32, "ieee"), (torch.float32, "tf32")
FP16, BF16 = (torch.float16, "ieee"), (torch.bfloat16, "ieee")
DENSE = Problem(128, 512, 256, 1, (4, 4), (4, 4), stride=(2, 2), padding=(1, 1))  # DCGAN 2
GROUPED = Problem(16, 32, 64, 4, (64, 64), (3, 3), stride=(2, 2))
KERNELBENCH_75 = Problem(16, 32, 64, 4, (128, 256), (3, 5), (2, 3), (1, 2), dilation=(2, 1))
FEW_PIXELS = Problem(128, 100, 512, 1, (1, 1), (4, 4))  # DCGAN 1
POINTWISE = Problem(4, 64, 128, 1, (248, 216), (1, 1))  # PointPillars 1
UPSAMPLING = Problem(4, 1024, 512, 1, (32, 32), (2, 2), stride=(2, 2))  # U-Net 1
FSRCNN = Problem(1, 56, 1, 1, (512, 512), (9, 9), (3, 3), (4, 4), (2, 2))  # 73 us and 80, on an H200 and an H100
TINY = Problem(4, 4, 4, 1, (32, 32), (4, 4), (2, 2), (1, 1))  # 7.0 and 6.3
MASK_RCNN = Problem(256, 256, 256, 1, (14, 14), (2, 2), stride=(2, 2))
FEW_OUTPUTS = Problem(128, 64, 3, 1, (32, 32), (4, 4), stride=(2, 2), padding=(1, 1))


def config_of(problem, dtype, precision, torch_precision=None, memory_format=NCHW, bias=False):
    where = torch.device("cuda", 0)
    how = {"torch_precision": torch_precision or precision, "memory_format": memory_format, "bias": bias}
    return Config(problem, dtype, where, precision, spec=spec_of(where), **how)


def taken(problem, dtype, precision, direction, requested="auto", **options):
    return choose(config_of(problem, dtype, precision, **options), requested, "test", direction).name


@pytest.mark.parametrize(
    ("problem", "kind", "direction", "memory_format", "name"),
    [
        # Many channels.
        *((DENSE, kind, "forward", NCHW, "fused") for kind in (TF32, FP16)),
        (DENSE, TF32, "weight_grad", LAST, "native"),
        (DENSE, FP16, "weight_grad", LAST, "fused"),
        (UPSAMPLING, BF16, "forward", LAST, "fused"),
        # What turns nothing.
        (POINTWISE, FP16, "weight_grad", LAST, "fused"),
        (POINTWISE, TF32, "weight_grad", LAST, "native"),
        # Few channels and long strides.
        *((KERNELBENCH_75, kind, "forward", one, "direct") for kind in (FP32, TF32, FP16) for one in FORMATS),
        # Few output channels: what was measured to be faster.
        (FSRCNN, FP32, "forward", NCHW, "fused"),
        (TINY, FP32, "forward", NCHW, "direct"),
        # A product would read the weights for each image.
        (FEW_PIXELS, TF32, "forward", NCHW, "fused"),
        # Input gradients of few channels.
        (replace(MASK_RCNN, out_channels=32), TF32, "input_grad", LAST, "fused"),
        (replace(MASK_RCNN, out_channels=64), TF32, "input_grad", LAST, "native"),
    ],
)
def test_auto_takes_the_fastest(problem, kind, direction, memory_format, name):
    assert taken(problem, *kind, direction, memory_format=memory_format) == name


def test_auto_takes_others_than_native():
    for kind in (TF32, FP16):
        assert taken(GROUPED, *kind, "weight_grad") != "native"
    for direction in ("input_grad", "weight_grad"):
        assert taken(DENSE, *FP32, direction) != "native"
    assert taken(DENSE, *TF32, "weight_grad", torch_precision="ieee") != "native"  # it would round otherwise


def test_algorithms_of_one_format_count_the_turning_of_another():
    """Products take the input in either format."""
    for algorithm, directions, turning in (
        (GemmCol2im(), ("forward", "input_grad", "weight_grad"), grad_output_transpose_seconds),
        (Direct(), ("input_grad", "weight_grad"), transpose_seconds),
    ):
        for direction in directions:
            configs = [config_of(POINTWISE, *FP16, memory_format=one) for one in FORMATS]
            choices = [algorithm.choice(config, direction) for config in configs]
            nchw, channels_last = (
                choice.kernel.seconds(config, direction, choice.tile)
                for choice, config in zip(choices, configs, strict=True)
            )
            assert channels_last - nchw == pytest.approx(turning(configs[1]))
            assert turning(configs[1]) > POINTWISE.batch * POINTWISE.in_pixels * 128 * 2 / 4e12


def gradients_taken(problem, dtype, precision, requested="auto", memory_format=LAST):
    config = config_of(problem, dtype, precision, memory_format=memory_format)
    return choose_pair(config, config, requested, "test")


def share_a_turning(problem, dtype, precision, requested="auto", memory_format=LAST):
    config = config_of(problem, dtype, precision, memory_format=memory_format)
    return choose_pair(config, config, requested, "test").shares_transpose(config, config)


def test_gradients_share_the_turning_of_grad_output_where_both_turn_it():
    found = gradients_taken(KERNELBENCH_75, *FP32)
    assert (found.input_grad.name, found.weight_grad.name) == ("direct", "direct")
    assert share_a_turning(KERNELBENCH_75, *FP32)
    assert not share_a_turning(KERNELBENCH_75, *FP32, memory_format=NCHW)
    config = config_of(KERNELBENCH_75, *FP32, memory_format=LAST)
    assert pairs.one_by_one(config, config, "gemm_col2im", "test").shares_transpose(config, config)
    assert not share_a_turning(KERNELBENCH_75, *FP32, "native")


def test_gradients_of_nchw_are_computed_in_channels_last_where_that_gains_more_than_turning_costs():
    upsampling = Problem(4, 256, 128, 1, (62, 54), (4, 4), stride=(4, 4))  # PointPillars 3
    nchw, last = (config_of(upsampling, *FP16, memory_format=one) for one in FORMATS)
    found = choose_pair(nchw, nchw, "auto", "test")
    assert found.via_channels_last
    assert found == choose_pair(last, last, "auto", "test")._replace(via_channels_last=True)
    # Not where a tensor is in channels_last already, where an algorithm was asked for, or in float32.
    for configs in ((last, last), (nchw, last), (last, nchw)):
        assert not choose_pair(*configs, "auto", "test").via_channels_last
    for requested in ("fused", "gemm_col2im", "native"):
        assert not choose_pair(nchw, nchw, requested, "test").via_channels_last
    for precision in ("ieee", "tf32"):
        assert not gradients_taken(upsampling, torch.float32, precision, memory_format=NCHW).via_channels_last
    assert not gradients_taken(DENSE, *FP16, memory_format=NCHW).via_channels_last
    explained = [gemmconv.explain(upsampling, device="cuda", dtype=torch.float16, memory_format=one) for one in FORMATS]
    assert [one.gradients_turned for one in explained] == [True, False]
    assert ["in channels_last between transposes" in str(one) for one in explained] == [True, False]


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("requested", ["auto", "direct"])
def test_direct_computes_both_gradients_at_once_where_that_is_faster(requested, memory_format):
    depthwise = Problem(16, 128, 128, 128, (64, 64), (4, 4), stride=(2, 2), padding=(1, 1))
    for problem, dtype, precision, at_once in (
        (depthwise, torch.float64, "ieee", True),
        (depthwise, *FP32, True),
        (depthwise, *FP16, True),
        (KERNELBENCH_75, *FP32, False),  # on tensor cores alone
        (KERNELBENCH_75, *TF32, True),
        (KERNELBENCH_75, *BF16, True),
    ):
        found = gradients_taken(problem, dtype, precision, requested, memory_format)
        assert (found.input_grad.name, found.weight_grad.name) == ("direct", "direct")
        assert found.at_once is at_once
    assert not gradients_taken(replace(KERNELBENCH_75, batch=0), *FP16, "direct", memory_format).at_once
    assert not gradients_taken(DENSE, *FP16, requested, memory_format).at_once


def test_gemm_col2im_writes_columns_once_for_both_gradients():
    algorithm = GemmCol2im()
    for memory_format in FORMATS:
        config = config_of(FEW_OUTPUTS, *FP16, memory_format=memory_format)
        one_by_one = algorithm.estimate(config, "input_grad") + algorithm.estimate(config, "weight_grad")
        assert 0.5 * one_by_one < algorithm.grads_estimate(config, config) < one_by_one
        assert gradients_taken(FEW_OUTPUTS, *FP16, "gemm_col2im", memory_format).at_once
    found = gradients_taken(replace(FEW_OUTPUTS, input_size=(64, 64)), *FP16, memory_format=NCHW)
    assert (found.input_grad.name, found.weight_grad.name, found.at_once) == ("gemm_col2im", "gemm_col2im", True)
    assert not gradients_taken(DENSE, *FP16).at_once


def test_grad_output_is_in_nchw_where_the_formats_of_both_gradients_differ():
    """A weight or an input in channels_last alone makes the gradient that reads it channels_last."""
    nchw, last = (config_of(FEW_OUTPUTS, *FP16, memory_format=one) for one in FORMATS)
    plain, both_last, first_last, second_last = (
        GemmCol2im().seconds(replace(config, weight_format=weight_format), "grads")
        for config, weight_format in ((nchw, NCHW), (last, LAST), (last, NCHW), (nchw, LAST))
    )
    assert plain == first_last == second_last
    assert both_last - plain > grad_output_transpose_seconds(last)


def test_others_compute_one_gradient_after_the_other():
    config = config_of(KERNELBENCH_75, *FP16)
    for algorithm in (Fused(), Native()):
        assert algorithm.grads_estimate(config, config) == math.inf


@pytest.mark.parametrize(("fused_seconds", "taken"), [(41e-6, "direct"), (39e-6, "fused")])
def test_auto_takes_the_gradients_that_are_the_fastest_together(fused_seconds, taken, monkeypatch):
    """fused turns nothing for this input gradient, and direct does."""
    problem = Problem(16, 32, 64, 1, (64, 64), (3, 3), stride=(2, 2))
    config = config_of(problem, *FP32, memory_format=LAST)
    saved = grad_output_transpose_seconds(config)
    assert not Fused().transposes(config, "input_grad")
    assert Direct().transposes(config, "input_grad")
    input_seconds = {"fused": fused_seconds, "direct": 40e-6 + saved}
    seconds = {"input_grad": input_seconds, "weight_grad": {"fused": 60e-6 + saved}}
    for algorithm in ALGORITHMS:
        monkeypatch.setattr(
            type(algorithm), "estimate", lambda self, config, direction: seconds[direction].get(self.name, math.inf)
        )
    monkeypatch.setattr(pairs, "_fastest_pair", pairs._fastest_pair.__wrapped__)  # keeps nothing of these estimates
    found = gradients_taken(problem, *FP32)
    assert (found.input_grad.name, found.weight_grad.name) == (taken, "fused")
    assert share_a_turning(problem, *FP32) is (taken == "direct")
    assert choose(config, "auto", "test", "input_grad").name == "fused"


@pytest.mark.parametrize(
    ("microseconds", "forward", "gradient"),
    [
        ({"native": 20, "fused": 28, "direct": 30}, "fused", "fused"),  # torch's operator keeps the host for 29 and 40
        ({"native": 20, "fused": 30}, "native", "fused"),
        ({"native": 30, "fused": 31}, "native", "fused"),
        ({"native": 40, "fused": 41}, "native", "native"),
        ({"native": 10, "fused": 21}, "native", "native"),  # more than twice as long on the device
        ({"gemm_col2im": 20, "direct": 21, "fused": 22}, "direct", "gemm_col2im"),  # products keep it for 22 and 20
        ({"gemm_col2im": 20, "native": 21}, "gemm_col2im", "gemm_col2im"),
        ({"direct": 20, "fused": 20.5}, "direct", "direct"),
    ],
    ids=str,
)
def test_the_longer_of_device_and_host_time_counts(microseconds, forward, gradient, monkeypatch):
    """Host time counts up to twice the device time."""
    for algorithm in ALGORITHMS:
        seconds = 1e-6 * microseconds.get(algorithm.name, math.inf)
        monkeypatch.setattr(type(algorithm), "estimate", lambda self, config, direction, seconds=seconds: seconds)
    assert taken(GROUPED, *FP16, "forward") == forward
    assert taken(GROUPED, *FP16, "input_grad") == gradient


@pytest.mark.parametrize(
    ("layer", "dtype", "least"),
    [  # random ones, which took cuDNN 1507 and 517 us, where 50 were estimated (H200)
        (Problem(3, 200, 141, 1, (46, 11), (9, 9), (5, 4), (1, 0), output_padding=(3, 0)), torch.bfloat16, 75e-6),
        (Problem(18, 3, 241, 1, (5, 20), (8, 8), (3, 3), (3, 3), output_padding=(0, 1)), torch.float32, 150e-6),
    ],
    ids=["bf16", "tf32"],
)
def test_input_gradients_of_many_taps_take_native_long(layer, dtype, least):
    precision = "ieee" if dtype == torch.bfloat16 else "tf32"
    config = config_of(layer, dtype, precision, memory_format=LAST)
    assert Native().estimate(config, "input_grad") > least
    assert taken(layer, dtype, precision, "input_grad", memory_format=LAST) != "native"


@pytest.mark.parametrize("direction", ["forward", "input_grad", "weight_grad"])
@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
def test_output_padding_of_a_stride_or_more_is_not_left_to_torchs_own_products(direction, memory_format):
    """All four such random layers, 8 gradients, took torch's im2col, an image at a time: 11 times the estimate."""
    dilated = Problem(27, 120, 16, 1, (5, 47), (2, 2), output_padding=(0, 1), dilation=(2, 2))
    config = config_of(dilated, *BF16, memory_format=memory_format)
    assert Native().estimate(config, direction) == math.inf
    assert taken(dilated, *BF16, direction, memory_format=memory_format) != "native"
    assert taken(dilated, *BF16, direction, memory_format=memory_format, requested="native") == "native"
    for served in (replace(dilated, output_padding=(0, 0)), replace(dilated, stride=(2, 2))):
        assert Native().estimate(replace(config, problem=served), direction) < math.inf


@pytest.mark.parametrize("deterministic", [False, True])
def test_native_is_deterministic_where_a_config_says_so(monkeypatch, deterministic):
    seen = []

    def conv_transpose2d(*arguments):
        seen.append((torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark))
        return plain(*arguments)

    plain = torch.conv_transpose2d
    monkeypatch.setattr(torch, "conv_transpose2d", conv_transpose2d)
    config = config_of(Problem(1, 64, 64, 1, (6, 6), (2, 2)), *BF16)
    input, weight = (torch.ones(shape, dtype=config.dtype) for shape in (config.problem.input_shape, (64, 64, 2, 2)))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    Native().prepare(replace(config, deterministic=deterministic), "forward")(input, weight, None)
    assert seen == [(True, False) if deterministic else (False, True)]
    assert torch.backends.cudnn.benchmark


def test_auto_is_deterministic_on_hopper_alone():
    where = torch.device("cuda", 0)
    for capability in ((8, 0), (9, 0), (10, 0)):
        spec = replace(REFERENCE, capability=capability)
        assert is_deterministic("auto", where, spec) == (capability == (9, 0))
        assert not is_deterministic("native", where, spec)
    assert not is_deterministic("auto", torch.device("cpu"), REFERENCE)


def test_a_bias_makes_native_dearer_and_no_other():
    without, with_bias = (config_of(UPSAMPLING, *FP16, memory_format=LAST, bias=bias) for bias in (False, True))
    for algorithm in ALGORITHMS:
        less, more = (algorithm.estimate(config, "forward") for config in (without, with_bias))
        assert (less < more) if algorithm.name == "native" else (less == more)


def test_auto_takes_what_saves_the_host_more_than_it_costs_the_device():
    """One backward pass is one launch of a graph if no product of cuBLAS and no operator of torch is part of it."""
    tiny = Problem(1, 64, 64, 1, (16, 16), (4, 4), stride=(2, 2), padding=(1, 1))
    few_outputs = replace(FEW_OUTPUTS, input_size=(64, 64))
    for layer, kind, name in ((tiny, TF32, "fused"), (few_outputs, FP16, "gemm_col2im")):
        for memory_format in FORMATS:
            gradients = gradients_taken(layer, *kind, memory_format=memory_format)
            assert gradients.input_grad.name == gradients.weight_grad.name == name
    configs = [config_of(tiny, *TF32, memory_format=one) for one in FORMATS]
    fastest = min(GemmCol2im().estimate(config, "input_grad") for config in configs)
    assert fastest < Fused().estimate(configs[0], "input_grad")


def test_products_are_estimated_by_the_longest_sums_of_a_block():
    """With few images, blocks sum many terms; as many images share as many terms; one alone is cut."""

    def seconds(batch, size, direction="weight_grad"):
        layer = Problem(batch, 56, 1, 1, (size, size), (9, 9), stride=(3, 3), padding=(4, 4), output_padding=(2, 2))
        return GemmCol2im().estimate(config_of(layer, *BF16), direction)

    assert seconds(1, 512) < seconds(64, 64) < seconds(16, 128) < seconds(4, 256)
    assert seconds(4, 256, "input_grad") == pytest.approx(seconds(16, 128, "input_grad"), rel=0.1)


def test_a_last_slice_is_as_long_as_it_is():
    """In float32 a weight's gradient sums 1024 pixels at a time, by a call for what is left."""

    def seconds(height):
        layer = Problem(1, 64, 32, 1, (height, 32), (3, 3), padding=(1, 1))
        return GemmCol2im().estimate(config_of(layer, *FP32), "weight_grad")

    assert seconds(32) < seconds(33) < 1.3 * seconds(32)


def test_products_whose_rows_are_no_whole_units_take_longer():
    """But in float32, which tensor cores do not multiply."""

    def ratio(precision, dtype):
        aligned, odd = (
            GemmCol2im().seconds(config_of(layer, dtype, precision), "input_grad")
            for layer in (Problem(8, 512, out, 1, (32, 32), (3, 3), padding=(1, 1)) for out in (64, 65))
        )
        return odd / aligned

    assert ratio("ieee", torch.float32) < 1.1 < 2 < ratio("tf32", torch.float32)
    assert ratio("ieee", torch.bfloat16) > 2


def test_auto_takes_gradients_that_torch_takes_the_host_longer_for_than_ours_the_device():
    """Where the device takes longer, what takes it the least time."""
    layer = Problem(16, 256, 128, 1, (1, 64), (1, 16), stride=(1, 8), padding=(0, 4))
    for batch, names in ((16, {"fused"}), (1024, {"native", "fused"})):
        gradients = gradients_taken(replace(layer, batch=batch), *BF16)
        assert {gradients.input_grad.name, gradients.weight_grad.name} == names


def test_auto_takes_native_on_gpus_older_than_the_kernels(monkeypatch):
    monkeypatch.setenv("GEMMCONV_CAPABILITY", "7.5")
    spec_of.cache_clear()
    for direction in ("forward", "input_grad", "weight_grad"):
        assert {taken(DENSE, dtype, "ieee", direction) for dtype in (torch.float32, torch.bfloat16)} == {"native"}
    assert fold.prepare_col2im(DENSE, torch.bfloat16, torch.device("cuda", 0)).__name__ == "<lambda>"  # torch's
    with pytest.raises(NotImplementedError, match=r"direct: the device must have compute capability 8\.0 .* got 7\.5"):
        choose(config_of(DENSE, *FP32), "direct", "test")


def test_deterministic_leaves_what_another_thread_has_set_meanwhile(monkeypatch):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "deterministic", True)
    monkeypatch.setattr(cudnn, "benchmark", False)
    with _Deterministic():
        cudnn.deterministic, cudnn.benchmark = False, True
    assert (cudnn.deterministic, cudnn.benchmark) == (False, True)


@pytest.mark.parametrize("before", [False, True])
def test_deterministic_puts_the_setting_back_after_the_last_thread(before, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", before)
    deterministic, inside, leave = _Deterministic(), threading.Event(), threading.Event()

    def other():
        with deterministic:
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    try:
        with deterministic:
            thread.start()
            assert inside.wait(10)
        assert torch.backends.cudnn.deterministic  # the other thread is still inside
    finally:
        leave.set()
    thread.join(10)
    assert torch.backends.cudnn.deterministic is before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stride": (1, 33)}, "stride must be at most 32 on both axes, got (1, 33)"),
        ({"kernel_size": (1, 65)}, "kernel width must be at most 64, got 65"),
        (
            {"kernel_size": (60, 60), "dilation": (9, 9)},
            "the inputs of one cell must fit 49152 bytes of shared memory, got kernel_size=(60, 60), dilation=(9, 9)",
        ),
    ],
)
def test_direct_names_the_rule_and_the_value(changes, reason):
    problem = replace(Problem(1, 4, 4, 1, (64, 64), (3, 3)), **changes)
    config = config_of(problem, torch.float64, "ieee")
    for direction in ("forward", "input_grad", "weight_grad"):
        assert Direct().why_not(config, direction) == reason


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("direction", ["forward", "input_grad", "weight_grad"])
def test_explain_lists_what_a_pass_compiles(direction, memory_format):
    problem = Problem(8, 256, 128, 1, (32, 32), (4, 4), stride=(2, 2), padding=(1, 1))
    how = {"dtype": torch.float16, "direction": direction, "memory_format": memory_format}
    report = gemmconv.explain(problem, gpu="H100", algorithm="gemm_col2im", **how)
    sources = [source for source, _ in report.compilations]
    assert len({*report.compilations}) == len(sources) > 0
    assert any(source.startswith("layout/") for source in sources) == (memory_format is LAST)
    assert f"compiles {len(sources)} kernel" in str(report)
    for kind in ({"device": "cpu"}, {"gpu": "H100", "algorithm": "native"}):
        other = gemmconv.explain(problem, **how, **kind)
        assert other.compilations == ()
        assert "compiles" not in str(other)


def test_the_example_of_pairs_has_these_estimates():
    """The numbers of the module's docstring, whose table has these columns."""
    order = "fused", "native", "gemm_col2im", "direct"
    problem = Problem(32, 256, 128, 1, (16, 16), (4, 4), (2, 2), (1, 1))
    config = selection.current_config(problem, torch.float16, torch.device("cuda", 0), spec=MEASURED)
    last = replace(config, memory_format=torch.channels_last)
    for line in pairs.__doc__.splitlines():
        name, _, values = line.strip().partition(" ")
        if name in ("input_grad", "weight_grad"):
            found = [next(one for one in ALGORITHMS if one.name == of).estimate(config, name) for of in order]
            assert values.split() == [f"{1e6 * seconds:.1f}" for seconds in found]
    (as_is, pair), (as_last, _) = (pairs._fastest_pair(one, one, ALGORITHMS) for one in (config, last))
    transposes = pairs.via_channels_last_seconds(config, False)
    texts = [f"{1e6 * seconds:.1f}" for seconds in (as_is.device, as_last.device, transposes)]
    assert all(f"{text} us" in pairs.__doc__ for text in texts)
    assert pair.input_grad.name == pair.weight_grad.name == "fused"
    assert pairs.choose_pair(config, config, "auto", "test") == pair
