"""Layers and whole networks on a CPU: every algorithm beside torch, as calls of modules, by turns in one process.

    python -m benchmarks.cpu                                             # the 26 layers of the suite probe, forward
    python -m benchmarks.cpu --suite random --passes forward,input_grad,weight_grad    # rows to fit a rule to
    python -m benchmarks.cpu --suite networks --passes forward,input_grad,weight_grad  # others: layers of the networks
    python -m benchmarks.cpu --networks                                  # four networks: inference and training steps

A row is a contender beside torch. ``torch_ms`` and ``ms`` are medians, and ``ratio`` is the median of torch's time over
the contender's in neighbouring pairs of calls. ``self_ratio`` is the ratio of torch called again, measured before.
``error`` and ``torch_error`` are relative to float64, of the result that comes closest to its bar. ``status`` is ok,
wrong (such a row has no time), skipped (the algorithm cannot serve it) or failed, and ``reason`` says why.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import Tensor, nn

import gemmconv
from benchmarks import environment
from benchmarks.commands import chosen, separated
from benchmarks.contenders import DEFAULTS, LAYOUTS
from benchmarks.measure import error_bar, first_line, verdict
from benchmarks.networks import UNet, dcgan, errors_of, fsrcnn, hifigan, layers_of
from benchmarks.random_layers import random_layers
from benchmarks.reference import Tensors, random_tensors, reference
from benchmarks.results import RESULTS, replace_file, table_text
from benchmarks.summary import text_table
from benchmarks.turns import INFERENCE, TRAINING
from benchmarks.workloads import Workload, parse_layer, shrunk
from gemmconv.flags import DTYPES, integer
from gemmconv.kernels.cpu.library import isa_name
from gemmconv.selection import NAMES
from gemmconv.timing import Run

CPU = torch.device("cpu")
ALGORITHMS = ("auto", *NAMES)

# The gradients that each pass computes. Of the last two the backward call alone is timed.
PASSES: dict[str, tuple[str, ...]] = {"forward": (), "both": ("input", "weight", "bias")}
PASSES |= {"input_grad": ("input",), "weight_grad": ("weight",)}

_LOSES = 0.97  # a row below this ratio loses
_PAIRS, _LEAST_PAIRS, _PATIENCE = 7, 3, 10  # at least 7 pairs, or 3 where they take 10 times the given seconds
_TIMES_TORCH = 4.0  # how many times torch's error is right, where that is more than the bar of the element type
_LISTED = 10  # losing rows of an algorithm that are listed; all of auto's are

# Random layers: limits of one forward pass, and the least time that torch takes for it in float32.
_MOST_FLOPS, _MOST_BYTES, _LEAST_MS, _MOST_IMAGES = 1_500_000_000, 64 << 20, 0.3, 64

_PROBE = {
    "3x5": "n1 c64x128 k3x5 h64 w128",
    "3x5 bias": "n1 c64x128 k3x5 h64 w128 bias",
    "3x7": "n1 c64x64 k3x7 h128 w128",
    "s5 d2": "n2 c32x64 k3 h64 w128 s5 p1 d2",
    "s5 d2 bias": "n2 c32x64 k3 h64 w128 s5 p1 d2 bias",
    "fsrcnn n1": "n1 c56x1 k9 h128 w128 s3 p4 op2",
    "fsrcnn n16": "n16 c56x1 k9 h128 w128 s3 p4 op2",
    "dcgan 512-256 4x4": "n4 c512x256 k4 h4 w4 s2 p1",
    "dcgan 128-64 16x16": "n4 c128x64 k4 h16 w16 s2 p1",
    "dcgan 64-3 32x32": "n4 c64x3 k4 h32 w32 s2 p1",
    "k2s2 256-128": "n1 c256x128 k2 h32 w32 s2",
    "k2s2 128-64": "n1 c128x64 k2 h64 w64 s2",
    "k3s2op1 128-64": "n1 c128x64 k3 h32 w32 s2 p1 op1",
    "hifigan 512-256": "n1 c512x256 k1x16 h1 w64 s1x8 p0x4",
    "hifigan 64-32": "n1 c64x32 k1x4 h1 w2048 s1x2 p0x1",
    "depthwise k4s2": "n1 c64x64 k4 h64 w64 s2 p1 g64",
    # Layers that were drawn at random once.
    "n2 c128x256 k5 h26 w56 s3 p2": "n2 c128x256 k5 h26 w56 s3 p2 bias",
    "n1 c256x96 k4 h79 w8 s4 p1": "n1 c256x96 k4 h79 w8 s4 p1",
    "n1 c16x48 k3 h15 w33 s2 p1": "n1 c16x48 k3 h15 w33 s2 p1 bias",
    "n1 c8x3 k7 h73 w36 s3 p3": "n1 c8x3 k7 h73 w36 s3 p3 bias",
    "n1 c256x64 k5 h77 w48 s4": "n1 c256x64 k5 h77 w48 s4",
    "n1 c3x128 k6 h72 w18 s2 p2": "n1 c3x128 k6 h72 w18 s2 p2 bias",
    "n1 c192x64 k5 h18 w32 s4 p1": "n1 c192x64 k5 h18 w32 s4 p1",
    "n2 c48x64 k7 h22 w40 s3 p2": "n2 c48x64 k7 h22 w40 s3 p2 bias",
    "n4 c3x64 k4 h12 w74 s3": "n4 c3x64 k4 h12 w74 s3 bias",
    "n1 c64x24 k7 h78 w36 s4": "n1 c64x24 k7 h78 w36 s4 bias",
}

# Networks with the shape of one input. They are small enough for a training step of 8 inputs to take about a second on
# two cores: the U-Net has half its usual channels, and inputs are smaller than on a GPU.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "dcgan": (dcgan, (100, 1, 1)),
    "unet": (partial(UNet, (32, 64, 128, 256)), (3, 64, 64)),
    "fsrcnn": (fsrcnn, (1, 128, 128)),
    "hifigan": (hifigan, (80, 1, 32)),
}
_BATCHES = 1, 2, 8  # of layers of networks
_RATE = 1e-6  # learning rate: the optimizer does its work, and the weights stay nearly what they are

Row = dict[str, Any]
Results = dict[str, Tensor]
Errors = dict[str, float]
Side = tuple[Run, Callable[[], Results]]  # the call to time, and what calls once more for results by name
_MEASURED = ("status", "reason", "torch_ms", "ms", "ratio", "self_ratio", "pairs", "error", "torch_error")


def beside(theirs: Run, others: Sequence[Run], seconds: float, forget: Run) -> list[Row]:
    """Times of neighbouring calls in pairs, torch's and another's; each of the others has its share of some seconds.

    One follows the other, since what is called more often stays in the processor's caches: when three of four calls
    were torch's, ours took up to 10 us longer. ``forget`` is called before each call, outside the timer.
    """
    rows, share = list[Row](), seconds / max(1, len(others))
    for other in others:
        pairs, begin = list[tuple[float, float]](), time.perf_counter()
        while len(pairs) < _PAIRS or time.perf_counter() < begin + share:
            if len(pairs) >= _LEAST_PAIRS and time.perf_counter() > begin + _PATIENCE * share:
                break
            order = (theirs, other) if (even := len(pairs) % 2 == 0) else (other, theirs)
            first, second = [_timed(call, forget) for call in order]
            pairs.append((first, second) if even else (second, first))
        medians = map(median, zip(*((a, b, a / b) for a, b in pairs), strict=True))
        rows.append(dict(zip(("torch_ms", "ms", "ratio", "pairs"), (*medians, len(pairs)), strict=True)))
    return rows


def _timed(call: Run, forget: Run = lambda: None) -> float:
    forget()
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def judged(errors: Errors, torch_errors: Errors, bar: float) -> Row:
    """The error that is closest to its bar, or furthest over it; ``wrong`` where one is over or a NaN.

    >>> judged({"output": 3e-5}, {"output": 1e-6}, 1e-5)["status"]
    'wrong'
    """
    errors = {name: errors.get(name, math.inf) for name in torch_errors}  # a result that is missing is wrong
    bars = {name: max(bar, _TIMES_TORCH * error) for name, error in torch_errors.items()}
    worst, wrong = verdict(errors, bars)
    found = {"status": "wrong", "reason": wrong} if wrong else {"status": "ok"}
    return {**found, "error": errors[worst], "torch_error": torch_errors[worst]}


def compare(
    rows: Sequence[Row],
    make: Sequence[Callable[[], Side]],
    errors_of: Callable[[Results], Errors],
    bar: float,
    seconds: float,
    forget: Run = lambda: None,
) -> list[Row]:
    """Each row with errors, and with times where its results are right.

    Args:
        rows: one for each contender.
        make: what makes torch's side, torch's again, and that of each row.
        errors_of: the errors of results, relative to float64.
        bar: an error up to this is right, whatever torch's is.
        seconds, forget: for :func:`beside`.
    """
    rows = [{**row, **dict.fromkeys(_MEASURED), "status": "ok"} for row in rows]
    make_torch, make_again, *makes = make
    try:
        (theirs, results), (again, _) = make_torch(), make_again()
        torch_errors = errors_of(results())
    except RuntimeError as error:  # NotImplementedError is one too
        return [{**row, "status": "failed", "reason": f"torch: {first_line(error)}"} for row in rows]
    calls, right = [again], list[Row]()
    for row, make_side in zip(rows, makes, strict=True):
        try:
            call, results = make_side()
            row.update(judged(errors_of(results()), torch_errors, bar))
        except Exception as error:  # whatever breaks one contender must not end the run; the row says what it was
            row["status"] = "skipped" if isinstance(error, NotImplementedError) else "failed"
            row["reason"] = first_line(error)
        if row["status"] == "ok":
            calls, right = [*calls, call], [*right, row]
    if right:
        for call in (theirs, *calls):
            _timed(call, forget)  # the second call of each, a warm-up like the one that gave the results
        itself, *times = beside(theirs, calls, seconds, forget)
        for row, one in zip(right, times, strict=True):
            row.update(one, self_ratio=itself["ratio"])
    return rows


def sized(workload: Workload) -> Workload:
    """A random layer at a size that keeps a CPU busy for neither long nor next to no time.

    The batch is halved first, then both sides of the image, down to the limits of flops and bytes. Where torch then
    takes less than 0.3 ms in float32, the batch is doubled up to 64, then the sides of the image that are not 1.
    """
    workload = shrunk(workload, _MOST_FLOPS, _MOST_BYTES)
    while _torch_ms(workload) < _LEAST_MS:
        larger = replace(workload.problem, batch=2 * workload.problem.batch)
        if larger.batch > _MOST_IMAGES:
            height, width = workload.problem.input_size
            larger = replace(workload.problem, input_size=(2 * height if height > 1 else 1, 2 * width))
        if larger.useful_flops > _MOST_FLOPS or larger.least_bytes(4) > _MOST_BYTES:
            break
        workload = replace(workload, problem=larger)
    return workload


def _torch_ms(workload: Workload) -> float:
    tensors = random_tensors(workload, CPU)
    call = partial(DEFAULTS["nchw"].forward(workload.problem), tensors.x, tensors.weight, tensors.bias)
    return min([_timed(call) for _ in range(5)][1:])


def layer_rows(workload: Workload, how: argparse.Namespace) -> Iterator[list[Row]]:
    """Measure a layer: for each pass the rows of all algorithms."""
    dtype, p = DTYPES[how.dtype], workload.problem
    tensors = random_tensors(workload, CPU).to(dtype)
    tensors = tensors.channels_last() if how.layout == "channels_last" else tensors
    exact = reference(p, tensors, gradients=any(PASSES[name] for name in how.passes))
    module = DEFAULTS["nchw"].module(p, tensors)
    modules = [module, module, *(gemmconv.convert(copy.copy(module), algorithm=name) for name in how.algorithms)]
    leaves = {"input": tensors.x, **dict(module.named_parameters())}

    def forget() -> None:
        for leaf in leaves.values():
            leaf.grad = None

    pairs = {"in": p.input_size, "k": p.kernel_size, "s": p.stride, "p": p.padding}
    pairs |= {"op": p.output_padding, "d": p.dilation}
    about: Row = {"suite": workload.suite, "name": workload.name}
    about |= {name: getattr(p, name) for name in ("batch", "in_channels", "out_channels", "groups")}
    about |= {f"{name}_{axis}": pair["hw".index(axis)] for name, pair in pairs.items() for axis in "hw"}
    about |= {"bias": int(workload.bias), "dtype": how.dtype, "memory_format": how.layout}
    for name in how.passes:
        for which, leaf in leaves.items():
            leaf.requires_grad_(which in PASSES[name])
        rows = [
            {**about, "pass": name, "algorithm": one, "taken": _taken(workload, one, name, how)}
            for one in how.algorithms
        ]
        with torch.set_grad_enabled(name != "forward"):
            make = [partial(_layer_side, one, name, leaves, tensors, forget) for one in modules]
            yield compare(rows, make, exact.errors, error_bar(dtype, "ieee"), how.seconds, forget)


def _layer_side(module: nn.Module, name: str, leaves: Mapping[str, Tensor], tensors: Tensors, forget: Run) -> Side:
    """A pass of a module. A backward pass alone is that of one forward pass, whose graph is kept, again and again."""
    x, grad_output, is_alone = tensors.x, tensors.grad_output, name in ("input_grad", "weight_grad")
    kept = module(x) if is_alone else None

    def call() -> Tensor:
        output: Tensor = module(x) if kept is None else kept
        if name != "forward":
            output.backward(grad_output, retain_graph=is_alone)
        return output

    def results() -> Results:
        forget()
        found = {"output": call().detach()}
        found |= {which: leaf.grad for which, leaf in leaves.items() if leaf.grad is not None}
        return {which: found[which] for which in found if not is_alone or which != "output"}

    return call, results


def _taken(workload: Workload, algorithm: str, name: str, how: argparse.Namespace) -> str:
    """The algorithm that ``explain`` names for a pass; for ``both`` those of forward, input and weight."""
    options: Any = {"algorithm": algorithm, "dtype": DTYPES[how.dtype], "memory_format": LAYOUTS[how.layout]}
    options |= {"bias": workload.bias, "direction": "forward" if name == "both" else name}
    try:
        found = gemmconv.explain(workload.problem, **options)
    except Exception:  # the call fails likewise, and its row says why
        return ""
    return "+".join((found.algorithm, *found.gradients)) if name == "both" else found.algorithm


def network_rows(name: str, how: argparse.Namespace) -> Iterator[list[Row]]:
    """Measure a network with 1 and with 8 inputs: the row of an inference step, then that of a training step."""
    bar = 10 * error_bar(DTYPES[how.dtype], "ieee")
    for batch, step in ((1, INFERENCE), (1, TRAINING), (8, INFERENCE), (8, TRAINING)):
        network, images = _network(name, batch, how)
        _, results = _network_side(copy.deepcopy(network).double(), images.double(), step)
        errors = partial(errors_of, exact=results())
        row = {"name": name, "batch": batch, "input": "x".join(map(str, images.shape[1:])), "dtype": how.dtype}
        row |= {"memory_format": how.layout, "pass": step, "algorithm": "auto", "first_torch_ms": "", "first_ms": ""}
        if step == INFERENCE:
            row |= {"first_torch_ms": _first_ms(f"{name},{batch},torch", how)}
            row |= {"first_ms": _first_ms(f"{name},{batch},gemmconv", how)}
        networks = [copy.deepcopy(network), copy.deepcopy(network), gemmconv.convert(copy.deepcopy(network))]
        make = [partial(_network_side, one, images, step) for one in networks]
        yield compare([row], make, errors, bar, how.seconds)


def _network(name: str, batch: int, how: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    options: Any = {"dtype": DTYPES[how.dtype], "memory_format": LAYOUTS[how.layout]}
    return make().to(**options), torch.randn(batch, *shape).to(**options)


def _network_side(network: nn.Module, images: Tensor, step: str) -> Side:
    network.train(step == TRAINING)
    optimizer = torch.optim.SGD(network.parameters(), lr=_RATE)

    def call() -> Tensor:
        with torch.set_grad_enabled(step == TRAINING):
            output: Tensor = network(images)
            if step == TRAINING:
                optimizer.zero_grad(set_to_none=True)
                output.to(torch.promote_types(output.dtype, torch.float32)).square().mean().backward()
                optimizer.step()
        return output.detach()

    def results() -> Results:
        output = call()
        grads = [one.grad.flatten() for one in network.parameters() if one.grad is not None]
        return {"output": output} | ({"gradients": torch.cat(grads)} if grads else {})

    return call, results


def _probe() -> list[Workload]:
    return [Workload(name, "probe", *parse_layer(text)) for name, text in _PROBE.items()]


def _of_networks() -> list[Workload]:
    """The layers of the networks, at a few batch sizes."""
    every = ((f"{name} n{batch} ", batch, *of) for name, of in NETWORKS.items() for batch in _BATCHES)
    return [layer for name, batch, make, shape in every for layer in layers_of(name, (batch, *shape), make)]


def _first_ms(which: str, how: argparse.Namespace) -> str:
    """Milliseconds of the first forward pass in a new process; empty where the process fails."""
    command = [sys.executable, "-m", "benchmarks.cpu", "--first-call", which, "--dtype", how.dtype]
    command += ["--threads", str(torch.get_num_threads()), *["--channels-last"] * how.channels_last]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    return "" if done.returncode else done.stdout.split()[-1]


def _print_first_call(how: argparse.Namespace) -> None:
    name, batch, who = how.first_call.split(",")
    network, images = _network(name, int(batch), how)
    network = gemmconv.convert(network.eval()) if who == "gemmconv" else network.eval()
    with torch.no_grad():
        print(f"{_timed(partial(network, images)):.2f}")


def machine() -> dict[str, str]:
    """The head of a file: the CPU, its instruction set and threads, versions, the commit and the date."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.+)", cpuinfo.read_text() if cpuinfo.exists() else "")
    cpu = name[1] if name else platform.processor() or platform.machine()
    about = environment.describe(CPU)
    kept = {one: about[one] for one in ("torch", "python", "gemmconv", "source", "commit", "date")}
    return {"cpu": cpu, "isa": str(isa_name() or "unknown"), "threads": str(torch.get_num_threads()), **kept}


def folder_name(about: Mapping[str, str]) -> str:
    """A folder's name for a machine.

    >>> folder_name({"cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "isa": "avx512", "threads": "8"})
    'intel-xeon-platinum-8481c-avx512-8t'
    """
    cpu = re.sub(r"\((r|tm)\)|\b(cpu|processor)\b|@.*", " ", about["cpu"].lower())
    return "-".join(re.findall(r"[a-z0-9]+", f"{cpu} {about['isa']} {about['threads']}t".lower()))


def loses(row: Row, beyond_noise: bool = False) -> bool:
    """Whether a row's ratio is below 0.97; beyond noise where it is also that much below torch's to itself.

    >>> [loses({"ratio": 0.95, "self_ratio": one}, beyond_noise=True) for one in (1.0, 1.1, 0.97)]
    [True, True, False]
    """
    return row["ratio"] is not None and row["ratio"] < _LOSES * min(1.0, row["self_ratio"] if beyond_noise else 1.0)


def summary(rows: Sequence[Row]) -> str:
    """The rows that lose beyond noise, all of ``auto`` and some of the others, then a line for each algorithm."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["pass"], row["algorithm"]].append(row)
    losing, cells, statuses = list[str](), list[list[str]](), ("wrong", "skipped", "failed")
    for (name, algorithm), group in groups.items():
        ratios = [row["ratio"] for row in group if row["ratio"] is not None]
        worst = sorted((row for row in group if loses(row, beyond_noise=True)), key=lambda row: row["ratio"])
        for row in worst if algorithm == "auto" else worst[:_LISTED]:
            losing.append(f"{name}: {said(row)}, torch itself {row['self_ratio']:.2f}x: {title(row)}")
        of_ratios = [f"{geometric_mean(ratios):.3f}x", f"{min(ratios):.2f}x"] if ratios else ["-", "-"]
        counts = [len(ratios), sum(map(loses, group)), len(worst)]
        counts += [sum(row["status"] == status for row in group) for status in statuses]
        cells.append([name, algorithm, *of_ratios, *map(str, counts)])
    headings = ("pass", "algorithm", "geometric mean", "least", "rows", f"below {_LOSES}x", "beyond noise", *statuses)
    listed = [f"\nbelow {_LOSES}x beyond noise:", *losing] if losing else []
    return "\n".join([*listed, "\nratios, torch's time over gemmconv's:", text_table(headings, cells, left=2)])


def title(row: Row) -> str:
    """The name of a row's layer or network."""
    return row["name"] if "suite" in row else f"{row['name']} n{row['batch']}"


def said(row: Row) -> str:
    """How a contender does, in a phrase."""
    name, taken = row["algorithm"], row.get("taken")
    name += f" ({taken})" if name == "auto" and taken else ""
    if row["ratio"] is not None:
        return f"{name} {row['ratio']:.2f}x"
    if row["status"] == "skipped":
        return f"{name} skipped"
    wrong = "\033[31mWRONG\033[0m" if sys.stdout.isatty() else "WRONG"
    return f"{name} {wrong if row['status'] == 'wrong' else row['status']}: {row['reason']}"


def _visit_said(rows: Sequence[Row]) -> str:
    """The rows of one pass in one line."""
    head = f"{title(rows[0])}, {rows[0]['pass']}"
    if rows[0].get("first_ms"):
        head += f", first call {rows[0]['first_torch_ms']} ms by torch, {rows[0]['first_ms']} ms"
    for row in [row for row in rows if row["ratio"] is not None][:1]:
        head += f": torch {row['torch_ms']:.3f} ms, itself {row['self_ratio']:.2f}x"
    return " | ".join([head, *map(said, rows)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 1 where a row is wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--networks", action="store_true", help=f"whole networks ({', '.join(NETWORKS)}) in place of layers")
    add("--suite", choices=("probe", "networks", "random"), default="probe", help="which layers (default: probe)")
    add("--seed", type=int, default=0, help="of the suite random (default: 0)")
    add("--passes", type=separated, metavar="P", help=f"of {', '.join(PASSES)} (default: forward)")
    add("--algorithms", type=separated, metavar="A", help=f"of {', '.join(ALGORITHMS)} (default: all)")
    add("--dtype", choices=sorted(DTYPES), default="float32")
    add("--channels-last", action="store_true", help="inputs, weights and gradients in channels_last")
    add("--threads", type=integer, help="threads of torch and gemmconv (default: torch's)")
    add("--seconds", type=float, default=3.0, help="for the rounds of a layer's pass, about (default: 3)")
    add("--only", default="", metavar="TEXT", help="layers or networks whose name or notation has this")
    add("--limit", type=integer, metavar="N", help="the first N; with --only or --limit no file without --out")
    add("--out", type=Path, metavar="DIR", help="for the file (default: benchmarks/results/cpu/<machine>)")
    add("--first-call", help=argparse.SUPPRESS)
    how = parser.parse_args(argv)
    how.layout = "channels_last" if how.channels_last else "nchw"
    if how.threads:
        torch.set_num_threads(how.threads)
    if how.first_call:
        _print_first_call(how)
        return 0
    try:
        how.passes = chosen("--passes", how.passes, PASSES, ("forward",))
        how.algorithms = chosen("--algorithms", how.algorithms, ALGORITHMS, ALGORITHMS)
    except ValueError as error:
        parser.error(str(error))
    about, is_random, rows = machine(), how.suite == "random", list[Row]()
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    visits: list[Callable[[], Iterator[list[Row]]]]
    if how.networks:
        stem = "networks" if how.dtype == "float32" else f"networks-{how.dtype}"
        visits = [partial(network_rows, name, how) for name in NETWORKS if how.only in name]
    else:
        stem = f"{f'random-{how.seed}' if is_random else how.suite}-{'+'.join(how.passes)}-{how.dtype}"
        layers = random_layers(how.seed) if is_random else _probe() if how.suite == "probe" else _of_networks()
        found = [layer for layer in layers if how.only in layer.name or how.only in layer.layer]
        visits = [lambda one=one: layer_rows(sized(one) if is_random else one, how) for one in found]  # type: ignore[misc]
    folder = how.out or RESULTS / "cpu" / folder_name(about)
    path = folder / f"{stem}{'-channels_last' * how.channels_last}.csv"
    keeps = how.out or not (how.only or how.limit)
    visits = visits[: how.limit]
    for index, visit in enumerate(visits):
        for made in visit():
            rows += made
            print(f"[{index + 1}/{len(visits)}] {_visit_said(made)}", flush=True)
            if keeps:
                replace_file(path, table_text(about, rows))
    print(summary(rows))
    print(f"\nfile: {path}" if keeps else "\nno file, since --only or --limit was given without --out")
    return int(any(row["status"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
