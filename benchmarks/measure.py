"""One row for each contender and direction of a workload: the error first, a time only where the result is right."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from benchmarks.contenders import DEFAULT_TORCH, DEFAULTS, PRECISIONS, Contender, Lanes, torch_settings
from benchmarks.floor import Ceilings, least_bytes, work
from benchmarks.reference import Reference, Tensors, random_tensors, reference
from benchmarks.results import MODES, Key, Row, in_mode
from benchmarks.timing import Effort, captured, peak_bytes, synchronize, time_run
from benchmarks.workloads import Workload
from gemmconv.kernels.base import Precision
from gemmconv.timing import Run

DIRECTIONS = ("forward", "backward")
GRADIENTS = ("input", "weight", "bias")

# Where torch's default takes less than this, replays of CUDA graphs are timed too.
_SMALL_MS = 0.1

# Calls of less than this are searched for by cudnn.benchmark anew for each look; the searches of longer calls take
# seconds each. Eight searches find both of two kernels that are found equally often, but once in 128 times: that many
# are enough, or fewer where one takes long, _SEARCH_EFFORT over the root of its milliseconds. Where looks differ there
# are more, while all of them take _MORE_MS.
_SEARCHED_MS = 5.0
_LEAST_SEARCHES, _ENOUGH_SEARCHES, _SEARCH_EFFORT, _MORE_MS = 2, 8, 45.0, 4000.0

# Other rows are looked at three times, long ones twice, the longest once; so are long ones of gemmconv's so many times
# above the floor.
_LONG_MS, _LONGEST_MS, _FAR = 1.0, 20.0, 10.0

# How much further tensors lie from each other, modulo pages, in each look: no two looks have the same places.
_STEP_BYTES = 655 * 512

# Largest error against float64 that counts as right: ||out - reference|| / ||reference||.
_BARS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
_TF32_BAR = 5e-4

# cuDNN's rounding errors in float32 grow with the sum's length; twice the error of torch itself is right too.
_IEEE_BAR = 1e-6

# torch's own rows are wrong only beyond these: far off, or in fp32 with TF32's errors.
_TORCH_BARS = {"fp32": 1e-4, "tf32": 6e-3, "fp16": 1e-2, "bf16": 5e-2}

Results = dict[str, torch.Tensor]
_Seen = tuple[Row, Contender]


class DeviceLost(RuntimeError):
    """The GPU answers nothing any more in this process."""


def _never(key: Key) -> None:
    """No row was measured before."""


def once(row: Row) -> int:
    """One look at each row, however long it takes."""
    return 1


def looks_at(row: Row) -> int:
    """How many looks to take at a timed row: more where they differ.

    Short rows depend on places, long ones hardly. What ``cudnn.benchmark`` searched for depends on chance too. Nobody
    would take an algorithm of gemmconv's that is far from the floor.

    >>> rows = [Row(*("",) * 7, "auto", median_ms=ms, fastest_ms=ms, slowest_ms=ms) for ms in (0.05, 2, 50)]
    >>> [looks_at(row) for row in rows]
    [3, 2, 1]
    >>> [looks_at(replace(row, algorithm="torch_nchw_benchmark", first_ms=100)) for row in rows]
    [4, 4, 1]
    """
    assert row.median_ms is not None
    if row.is_searched and row.median_ms < _SEARCHED_MS:
        each_ms = row.first_ms or 1.0  # rows of graphs do not know it
        enough = max(_LEAST_SEARCHES, min(_ENOUGH_SEARCHES, int(_SEARCH_EFFORT / math.sqrt(each_ms))))
        return min(enough * row.times_as_many, max(enough, int(_MORE_MS / each_ms)))
    if not row.is_torch and row.median_ms > max(_LONG_MS, _FAR * (row.floor_ms or math.inf)):
        return 1
    return (3 if row.median_ms < _LONG_MS else 2 if row.median_ms < _LONGEST_MS else 1) * row.times_as_many


@dataclass(frozen=True)
class Plan:
    """The rows to measure of every workload, and how.

    Attributes:
        device: where.
        precisions: of ``PRECISIONS``.
        directions: of ``DIRECTIONS``.
        contenders: torch's default first.
        ceilings: for the floor.
        effort: how much time a measurement may take.
        deadline: when to stop, in ``time.monotonic`` seconds.
        done: the row of a key that was measured before, which at most lacks looks, or None.
        looks: how often a timed row is to be looked at, eager or as a graph: again once all of its workload were, with
            tensors at other places, and after another search of ``cudnn.benchmark``. The mean counts: it depends less
            than the fastest on a place, or on a search, that is seldom met.
    """

    device: torch.device
    precisions: Sequence[str]
    directions: Sequence[str]
    contenders: Sequence[Contender]
    ceilings: Ceilings
    effort: Effort = field(default_factory=Effort)
    deadline: float = math.inf
    done: Callable[[Key], Row | None] = _never
    looks: Callable[[Row], int] = once


def error_bar(dtype: torch.dtype, precision: Precision) -> float:
    """Largest error that counts as right, whatever torch's is.

    >>> error_bar(torch.float32, "tf32")
    0.0005
    """
    return _TF32_BAR if precision == "tf32" else _BARS[dtype]


def bar_of(name: str, precision: str, torch_errors: dict[str, float]) -> float:
    """Largest error that counts as right.

    Args:
        name: output, or a gradient: input, weight or bias.
        precision: of the row.
        torch_errors: what torch's default settings lose on the same data in the same layout. Nothing is right beyond
            what makes a row of torch's own wrong.

    >>> bar_of("output", "bf16", {"output": 0.02}), bar_of("weight", "bf16", {"weight": 0.02})
    (0.005, 0.04)
    >>> bar_of("weight", "fp32", {"weight": 2e-3})
    0.0001
    """
    dtype = PRECISIONS[precision]
    bar = _IEEE_BAR if precision == "fp32" else error_bar(dtype, "tf32" if precision == "tf32" else "ieee")
    if name == "output" and precision != "fp32":
        return bar
    own = torch_errors.get(name, 0.0)
    return max(bar, min(2 * own, _TORCH_BARS[precision])) if math.isfinite(own) else bar


def rows_of(workload: Workload, plan: Plan, lanes: Lanes) -> Iterator[Row]:
    """Measure a workload: its rows, as they are made. Ends early at the plan's deadline.

    Args:
        workload: what.
        plan: how.
        lanes: for ``cudnn.benchmark``.

    Raises:
        DeviceLost: a contender broke the GPU's context; its row came before.
    """
    to_look_at: list[tuple[_Bench, list[_Seen]]] = []
    for dtype in dict.fromkeys(PRECISIONS[precision] for precision in plan.precisions):
        bench, own = _Bench(workload, dtype, plan), list[_Seen]()
        to_look_at.append((bench, own))
        precisions = [precision for precision in plan.precisions if PRECISIONS[precision] == dtype]
        for precision, contender, direction in itertools.product(precisions, plan.contenders, plan.directions):
            key = _row(workload, precision, contender, direction).key
            rows = [row for mode in MODES if (row := plan.done(in_mode(key, mode))) is not None]
            if plan.done(key) is None:
                if time.monotonic() > plan.deadline:
                    return
                visit = partial(bench.visit, contender, precision, direction)
                rows = lanes.run_in(0, visit) if contender.benchmark else visit()
                yield from rows
                _recover(plan.device, rows)
            own += [(row, contender) for row in rows if row.lacks_looks(plan.looks)]
        bench.forget()
    look = 0
    while any(own for _, own in to_look_at):
        look += 1
        for bench, own in to_look_at:
            bench.place(look)
            for i, (row, contender) in enumerate(own):
                if time.monotonic() > plan.deadline:
                    return
                if row.looks > look:  # an earlier run was further
                    continue
                look_again = partial(bench.look_again, row, contender)
                lane = look % len(lanes) if (row.median_ms or 0.0) < _SEARCHED_MS else 0
                row = lanes.run_in(lane, look_again) if contender.benchmark else look_again()
                yield row
                _recover(plan.device, [row])
                own[i] = row, contender
            own[:] = [(row, contender) for row, contender in own if row.lacks_looks(plan.looks)]
            bench.forget()


def expected_keys(workload: Workload, plan: Plan) -> list[Key]:
    """The keys of the rows that :func:`rows_of` makes at least."""
    return [
        _row(workload, precision, contender, direction).key
        for precision in plan.precisions
        for contender in plan.contenders
        for direction in plan.directions
    ]


def _row(workload: Workload, precision: str, contender: Contender, direction: str) -> Row:
    return Row(
        *(workload.suite, workload.name, workload.layer, precision),
        *(contender.layout, direction, "eager", contender.name),
        note=workload.note,
    )


def _recover(device: torch.device, rows: Sequence[Row]) -> None:
    """Give memory back after a failure, and see whether the GPU still answers."""
    for row in rows:
        if row.status == "failed" and not answers(device):
            raise DeviceLost(f"{row.algorithm} broke the GPU's context on {row.workload}: {row.reason}")


def answers(device: torch.device) -> bool:
    """Whether a device still answers; memory that nothing holds is given back."""
    try:
        synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


class _Bench:
    """The data of one workload in one element type. It is made when the first row needs it.

    Where tensors lie in pages of memory decides how long some kernels take, by up to 15%, in the same way in every
    process. So each look has places of its own for them, which do not depend on what was measured before.
    """

    def __init__(self, workload: Workload, dtype: torch.dtype, plan: Plan) -> None:
        self._workload, self._problem, self._plan = workload, workload.problem, plan
        self._dtype, self._device = dtype, plan.device
        self._placed: dict[str, Tensors] = {}
        self._look = 0
        self._torch_errors: dict[tuple[str, str, str], dict[str, float]] = {}
        self._torch_ms: dict[tuple[str, str], float] = {}

    @cached_property
    def _reference(self) -> Reference:
        return reference(self._problem, self._tensors("nchw"), gradients="backward" in self._plan.directions)

    def _tensors(self, layout: str) -> Tensors:
        if not self._placed:
            placed: dict[str, Tensors] = {}
            drawn = random_tensors(self._workload, self._device).to(self._dtype)
            for one in dict.fromkeys(("nchw", *(contender.layout for contender in self._plan.contenders))):
                tensors = drawn if one == "nchw" else drawn.channels_last()
                self._empty_cache()
                placed[one] = tensors.placed(self._look * _STEP_BYTES)
            self._placed = placed
        return self._placed[layout]

    def place(self, look: int) -> None:
        """Have the data where this look wants it, from now on."""
        self.forget()
        self._look = look

    def forget(self) -> None:
        """Give the memory of the data back, and of what is right."""
        self._placed.clear()
        self.__dict__.pop("_reference", None)

    def visit(self, contender: Contender, precision: str, direction: str) -> list[Row]:
        """The rows of one contender and direction: the eager one first, then that of a graph, if it has one."""
        row = _row(self._workload, precision, contender, direction)
        with self._settings(contender, precision):
            try:
                return self._measure(row, contender)
            except Exception as error:  # whatever breaks one row must not end the run; the row says what it was
                return [_failed(row, error)]

    def look_again(self, row: Row, contender: Contender) -> Row:
        """A row of a contender, eager or of a graph, timed once more.

        As it is, with a reason, where memory does not suffice now, or another search failed or found what is wrong.
        """
        with self._settings(contender, row.precision):
            try:
                computed = self._run(contender, row.direction)
                run: Run = computed
                if contender.benchmark:  # this thread searches now, unless it did before
                    results, first_ms = self._first_call(computed)
                    found = self._judged(row, contender, self._reference.errors(results))
                    del results
                    self.__dict__.pop("_reference", None)  # it has no place beside what is timed
                    self._empty_cache()
                    if found.status != "ok":
                        return _untimed_look(row, f"another search: wrong: {found.reason}")
                    if row.first_ms is not None and (row.median_ms or 0.0) < _SEARCHED_MS:
                        row = replace(row, first_ms=min(row.first_ms, first_ms))
                if row.mode == "graph":
                    run = self._captured(contender, row.direction, computed)[0].replay
                return row.looked_at(time_run(run, self._device, self._plan.effort, row.median_ms))
            except torch.OutOfMemoryError:
                return _untimed_look(row, "a look ran out of memory")
            except Exception as error:  # as in visit
                if contender.benchmark and answers(self._device):  # what earlier searches found stays
                    return _untimed_look(row, f"another search: failed: {first_line(error)}")
                return _failed(row, error)

    @contextmanager
    def _settings(self, contender: Contender, precision: str) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch_settings(precision, contender.benchmark, contender.deterministic))
            # Backward passes stay in this thread, whose cuDNN plans are meant.
            stack.enter_context(torch.autograd.grad_mode.set_multithreading_enabled(False))
            if self._device.type == "cuda":
                stack.enter_context(torch.cuda.device(self._device))
            yield

    def _measure(self, row: Row, contender: Contender) -> list[Row]:
        problem, device, direction = self._problem, self._device, row.direction
        reason = contender.why_not(problem, row.precision, device, direction)
        if reason is not None:
            return [replace(row, status="refused", reason=reason)]
        bias = self._workload.bias
        row = replace(
            row,
            **contender.choices(problem, row.precision, device, direction, bias),
            floor_ms=self._plan.ceilings.floor_ms(problem, row.precision, direction, bias),
            flops=work(problem, direction),
            least_bytes=least_bytes(problem, self._dtype.itemsize, direction, bias),
        )
        run = self._run(contender, direction)
        results, first_ms = self._first_call(run)
        row = self._judged(replace(row, first_ms=first_ms), contender, self._reference.errors(results))
        if row.status != "ok":
            return [row]
        del results
        if device.type == "cuda":
            peak, results = peak_bytes(run, device)
            row = replace(row, peak_bytes=max(0, peak - sum(result.nbytes for result in results.values())))
            del results
        self._empty_cache()
        eager = row.timed(time_run(run, device, self._plan.effort))
        if contender.name == DEFAULT_TORCH and eager.median_ms is not None:
            self._torch_ms[row.precision, direction] = eager.median_ms
        return [eager, *self._graph_rows(row, contender, run)]

    def _run(self, contender: Contender, direction: str) -> Callable[[], Results]:
        """A pass as a function without arguments; gives its results by name. Nothing but the data has memory then."""
        tensors = self._tensors(contender.layout)
        self._empty_cache()
        return _pass(direction, tensors, contender.forward(self._problem))

    def _empty_cache(self) -> None:
        """Give back what others left over: results shall not lie where it happened to be free."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _judged(self, row: Row, contender: Contender, errors: dict[str, float]) -> Row:
        """The row with its errors; wrong where one is over its bar."""
        if contender.kind == "torch":
            if contender in DEFAULTS.values():
                self._torch_errors[row.precision, row.direction, row.layout] = errors
            bars = dict.fromkeys(errors, _TORCH_BARS[row.precision])
        else:
            own = self._errors_of_torch(row)
            bars = {name: bar_of(name, row.precision, own) for name in errors}
        closest, wrong = verdict(errors, bars)
        finite: dict[str, Any] = {name: error if math.isfinite(error) else None for name, error in errors.items()}
        return replace(
            row,
            **{f"error_{name}": error for name, error in finite.items()},
            error=finite[closest],
            bar=bars[closest],
            status="wrong" if wrong else "ok",
            reason=wrong,
        )

    def _errors_of_torch(self, row: Row) -> dict[str, float]:
        """The errors of torch's default settings in the row's layout: from its own row of this run, or found now."""
        place = row.precision, row.direction, row.layout
        if place not in self._torch_errors:
            results, _ = self._first_call(self._run(DEFAULTS[row.layout], row.direction))
            self._torch_errors[place] = self._reference.errors(results)
        return self._torch_errors[place]

    def _first_call(self, run: Callable[[], Results]) -> tuple[Results, float]:
        """The results of a pass, and the time of this, its first call, in milliseconds."""
        with self._poisoned():
            synchronize(self._device)
            start = time.perf_counter()
            results = run()
            synchronize(self._device)
        return results, 1e3 * (time.perf_counter() - start)

    @contextmanager
    def _poisoned(self) -> Iterator[None]:
        """NaN in the memory that the results are likely to take: an element left unwritten then shows."""
        p = self._problem
        if self._device.type == "cuda":
            for shape in (p.output_shape, p.input_shape, p.weight_shape):
                torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)
            yield
            return
        # Makes torch.empty fill. Not used on a GPU, where it would change cuDNN's choices too.
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
                yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def _graph_rows(self, row: Row, contender: Contender, run: Callable[[], Results]) -> list[Row]:
        """The row of replays of a CUDA graph, where torch's default is fast; else none."""
        torch_ms = self._torch_ms.get((row.precision, row.direction))
        if torch_ms is None:
            done = self._plan.done(_row(self._workload, row.precision, Contender(DEFAULT_TORCH), row.direction).key)
            torch_ms = done.median_ms if done else None
        is_small = torch_ms is not None and torch_ms < _SMALL_MS
        if self._device.type != "cuda" or contender.unfused or not is_small:
            return []
        row = replace(row, mode="graph", peak_bytes=None, first_ms=None)
        try:
            graph, found = self._captured(contender, row.direction, run)
            for result in found.values():
                result.fill_(torch.nan)
            graph.replay()
            row = self._judged(row, contender, self._reference.errors(found))
            if row.status == "ok":
                row = row.timed(time_run(graph.replay, self._device, self._plan.effort))
        except Exception as error:  # as in visit
            row = _failed(row, error)
        return [row]

    def _captured(self, contender: Contender, direction: str, run: Run) -> tuple[torch.cuda.CUDAGraph, Results]:
        """A CUDA graph and its results. A backward pass is captured without autograd, whose streams are its own."""
        if direction == "backward":
            bound = partial(contender.gradients(self._problem), self._tensors(contender.layout))
            graph, found = captured(lambda: dict(zip(GRADIENTS, bound(), strict=False)))
        else:
            graph, found = captured(run)
        assert isinstance(found, dict)
        return graph, found


def _pass(
    direction: str, tensors: Tensors, forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
) -> Callable[[], Results]:
    """A forward pass without autograd, or a backward pass of a graph that is kept."""
    if direction == "forward":

        def run_forward() -> Results:
            with torch.no_grad():
                return {"output": forward(tensors.x, tensors.weight, tensors.bias)}

        return run_forward

    x, weight = tensors.x.detach().requires_grad_(), tensors.weight.detach().requires_grad_()
    bias = None if tensors.bias is None else tensors.bias.detach().requires_grad_()
    leaves = (x, weight) if bias is None else (x, weight, bias)
    output = forward(x, weight, bias)

    def run() -> Results:
        found = torch.autograd.grad(output, leaves, tensors.grad_output, retain_graph=True)
        return dict(zip(GRADIENTS, found, strict=False))

    return run


def _failed(row: Row, error: Exception) -> Row:
    """A row that has no times, and says why."""
    return replace(row.untimed(), status="failed", reason=first_line(error))


def _untimed_look(row: Row, why: str) -> Row:
    """A row after a look that gave no time: as it is, with one more reason."""
    return replace(row, looks=row.looks + 1, reason="; ".join(filter(None, (row.reason, why))))


def verdict(errors: Mapping[str, float], bars: Mapping[str, float]) -> tuple[str, str]:
    """The name of the error that is closest to its bar, or furthest over it, and what is wrong: nothing below the bar.

    >>> verdict({"output": 1e-6, "weight": math.nan}, {"output": 1e-5, "weight": 1e-5})
    ('weight', 'weight: error nan is over 1.0e-05')
    """
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name] / bars[name])
    is_right = errors[worst] <= bars[worst]
    return worst, "" if is_right else f"{worst}: error {errors[worst]:.1e} is over {bars[worst]:.1e}"


def first_line(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
