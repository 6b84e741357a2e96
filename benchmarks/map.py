"""The map of the source tree: how a call flows through the files, which layers they form, and the kernels there are.

    python -m benchmarks.map [FILE]

Nothing in it is typed in. The flow is a trace of a layer's first and second call, on tensors without data, with
stand-ins for NVRTC and the driver; layers come from the imports, kernels from the registry, descriptions from
docstrings. It needs the CUDA packages, and no GPU.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import inspect
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from textwrap import wrap
from types import FrameType
from typing import Any, get_args
from unittest import mock

import torch

import gemmconv
from gemmconv import dispatch, functional
from gemmconv.algorithms import ALGORITHMS, KERNELS
from gemmconv.device import named
from gemmconv.kernels.base import Config, Kernel, Pass
from gemmconv.ops import configs, plain, signatures
from gemmconv.runtime import sources

PACKAGE = Path(gemmconv.__file__).parent
MAP = Path(__file__).resolve().parent / "map.svg"
GPU = "H100"  # whose kernels the traced call chooses among
LAYER, SHAPE = (64, 32, 4, 2, 1), (1, 64, 16, 16)  # channels, kernel size, stride, padding; of the input


# The contents of the tree.


def described(path: Path) -> str:
    """The first sentence of a file's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return text.replace("``", "").partition(". ")[0].rstrip(".")


def imported_modules(path: Path) -> set[str]:
    """Dotted names of everything of the package that a file of it imports, at any depth of the file."""
    package = ["gemmconv", *path.relative_to(PACKAGE).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # "from gemmconv import runtime" lists modules, "from gemmconv.errors import X" does not.
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "gemmconv" else {module}
    return {name for name in found if name.split(".")[0] == "gemmconv"}


def layers() -> list[tuple[str, list[str]]]:
    """The parts of the package from the top down, each with the parts that it imports; none imports one above it.

    Raises:
        graphlib.CycleError: imports form a circle.
    """
    files = [path for path in PACKAGE.rglob("*.py") if not path.relative_to(PACKAGE).parts[0].startswith("_")]
    uses: dict[str, set[str]] = defaultdict(set)
    for path in files:
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        uses[part] |= {name.split(".")[1] for name in imported_modules(path) if "." in name} - {part}
    parts = {part: used & uses.keys() for part, used in uses.items()}
    height: dict[str, int] = {}
    for part in graphlib.TopologicalSorter(parts).static_order():
        height[part] = max((height[one] + 1 for one in parts[part]), default=0)
    order = sorted(parts, key=lambda part: (-height[part], part))
    return [(part, sorted(parts[part], key=order.index)) for part in order]


def helper_sources() -> list[tuple[str, list[str]]]:
    """Sources under csrc/ that no kernel of the registry has the name of, each with the host files that load it."""
    loaded_by: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                loaded_by[node.value].add(shown(path))
    names = sorted(path.relative_to(sources.directory()).as_posix() for path in sources.directory().rglob("*.cu"))
    return [(name, sorted(loaded_by[name])) for name in names if name.removesuffix(".cu") not in KERNELS]


def headers() -> list[str]:
    """The folders of csrc/include, each with the number of its headers."""
    folder = sources.directory() / "include"
    return [f"{one.name} {len(list(one.rglob('*.cuh')))}" for one in sorted(folder.iterdir()) if one.is_dir()]


def shown(path: Path) -> str:
    return path.relative_to(PACKAGE.parent).as_posix()


def host_of(kernel: Kernel) -> Path:
    return Path(inspect.getfile(type(kernel)))


# The path of a call.

Stack = tuple[tuple[Path, str], ...]  # files and functions, the caller first


@dataclass
class Stop:
    """A file that a call comes through, the functions on its way there, and where it goes on."""

    path: Path
    functions: list[str] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)

    def add(self, stack: Stack) -> None:
        """Follow a stack that begins in this file. Where it ends, what a function there calls there does not count."""
        stop = self
        last = stack[-1][0]
        for path, function in stack:
            is_entered = path != stop.path
            if is_entered:
                found = next((one for one in stop.stops if one.path == path), None)
                if found is None:
                    stop.stops.append(found := Stop(path))
                stop = found
            if (is_entered or path != last) and function[0] != "_" and function not in stop.functions:
                stop.functions.append(function)

    def flat(self, depth: int = 0) -> Iterator[tuple[int, Stop]]:
        yield depth, self
        for stop in self.stops:
            yield from stop.flat(depth + 1)


class _Driver:
    """Stands in for cuda.bindings.driver and cuda.core: every call succeeds, and is noted down."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            self.called.append(name)
            return (0,)

        return call if name.startswith("cu") else mock.MagicMock()


@contextmanager
def _as_on_a_gpu() -> Iterator[_Driver]:
    """Tensors of device "meta" are served as those of a GPU are: choices, kernels, launches. Nothing is computed."""
    from gemmconv.runtime import executor, launch, nvrtc, tensor_map

    real = configs.config_of
    driver, code = _Driver(), mock.MagicMock()
    code.from_cubin.return_value.get_kernel.return_value.handle = 0

    def config(*arguments: Any, **named_arguments: Any) -> Config:
        made = real(*arguments, **named_arguments)
        return replace(made, device=torch.device("cuda", 0), spec=named(GPU))

    keys = {*dispatch._all_plain_keys, torch._C._dispatch_keys(torch.empty(0, device="meta")).raw_repr()}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"GEMMCONV_CACHE_DIR": folder}))
        for owner, name, value in (
            (configs, "config_of", config),
            (dispatch, "_all_plain_keys", keys),
            (torch.cuda, "is_available", lambda: False),
            (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
            (executor, "extension", lambda: None),  # in C as in Python
            (plain, "call_signature", signatures._call_signature_in_python),
            (launch, "driver", driver),
            (launch, "Device", mock.MagicMock()),
            (launch, "ObjectCode", code),
            (launch, "architecture", lambda index: "sm_90a"),
            (nvrtc, "compiled", lambda *_: nvrtc.Result("", "", b"")),
            (tensor_map, "encode", lambda *_: (tensor_map._Opaque)()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=name.startswith("_cuda")))
        yield driver


def _trace(call: Callable[[], object], is_landmark: Callable[[Path], bool]) -> tuple[list[Stack], set[str]]:
    """The stacks of the package's functions where one of a landmark is called, in order, and all functions called."""
    stacks: dict[Stack, None] = {}
    called = set()
    paths: dict[str, Path | None] = {}

    def of_package(frame: FrameType) -> Path | None:
        name = frame.f_code.co_filename
        if name not in paths:
            path = Path(name)
            paths[name] = path if PACKAGE in path.parents else None
        return paths[name]

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (path := of_package(frame)) is None:
            return
        called.add(f"{path}:{frame.f_code.co_name}")
        if is_landmark(path):
            stack, one = [], frame
            while one is not None:
                if (path := of_package(one)) is not None and one.f_code.co_name[0] != "<":
                    stack.append((path, one.f_code.co_name))
                one = one.f_back  # type: ignore[assignment]
            stacks[tuple(reversed(stack))] = None

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(stacks), called


def _without_loops(stack: Stack) -> Stack:
    """A stack without the detours that come back to a file: of those a file's functions are kept, no others."""
    found: list[tuple[Path, str]] = []
    for path, function in stack:
        places = [i for i, (one, _) in enumerate(found) if one == path]
        if places and found[-1][0] != path:
            del found[places[-1] + 1 :]
        found.append((path, function))
    return tuple(found)


def flow() -> tuple[Stop, Stop, list[str]]:
    """The stops of every call, those of the first one alone, and the driver's functions that every call ends with.

    A file is a stop where it is on the stack when arguments are validated, the kernel that is taken is asked for
    something, or the runtime is. To be called once in a process, which keeps what a first call prepares.
    """
    kernels = {host_of(kernel) for kernel in KERNELS.values()}

    def is_landmark(path: Path) -> bool:
        return path in kernels or path.relative_to(PACKAGE).parts[0] in ("validation.py", "runtime")

    with _as_on_a_gpu() as driver, torch.no_grad():
        layer, images = gemmconv.ConvTranspose2d(*LAYER, device="meta"), torch.empty(SHAPE, device="meta")
        first, _ = _trace(lambda: layer(images), is_landmark)
        driver.called.clear()
        second, called = _trace(lambda: layer(images), is_landmark)
    in_channels, out_channels, kernel, stride, padding = LAYER
    pairs = (kernel, kernel), (stride, stride), (padding, padding)
    problem = gemmconv.Problem(SHAPE[0], in_channels, out_channels, 1, SHAPE[2:], *pairs)
    taken = {host_of(KERNELS[gemmconv.explain(problem, gpu=GPU, precision="ieee").kernel])}
    every, once = Stop(second[0][0][0]), Stop(Path(functional.__file__))
    for stack in map(_without_loops, second):
        every.add(stack)
    for stack in map(_without_loops, first):
        if stack in map(_without_loops, second) or not {path for path, _ in stack} & kernels <= taken:
            continue
        start = max((i for i, (path, _) in enumerate(stack) if path == once.path), default=None)
        if start is not None and f"{once.path}:{stack[start][1]}" not in called:
            once.add(stack[start:])
    return every, once, list(dict.fromkeys(driver.called))


# The picture.

_WIDTH, _MARGIN, _GUTTER = 860, 16, 32
_COLUMN = (_WIDTH - 2 * _MARGIN - _GUTTER) // 2
_INDENT, _LINE, _PAD = 12, 16, 7
_MONO, _SANS = 7.4, 6.7  # px: a character's mean width in 12 px, in wide fonts
_STYLE = """
text { font: 12px -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #24292f; }
.title { font-size: 16px; font-weight: 600; }
.head { font-weight: 600; }
.mid { text-anchor: middle; }
.path, .code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.path { font-weight: 600; }
.code { fill: #0550ae; }
.note { fill: #57606a; }
rect { fill: #ffffff; stroke: #d0d7de; }
.page { stroke: none; }
.every { fill: #ddf4ff; stroke: #54aeff; }
.once { fill: #fff8c5; stroke: #d4a72c; }
.outside { fill: #eaeef2; stroke: #8c959f; }
path { fill: none; stroke: #57606a; stroke-width: 1.5; }
.tip { fill: #57606a; stroke: none; }
.rule { stroke: #d0d7de; stroke-width: 1; }
""".strip()


class _Picture:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.described: set[Path] = set()  # each file once

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        attribute = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{attribute}>{escape(text, quote=False)}</text>')

    def lines(self, x: float, y: float, width: float, text: str, kind: str = "", most: int = 9) -> float:
        """Text in lines of a width, the first with its baseline at ``y``. Returns where the next line would be."""
        size = _MONO if kind in ("code", "path") else _SANS
        for line in wrap(text, int(width / size), max_lines=most, placeholder=" ..."):
            self.text(x, y, line, kind)
            y += _LINE
        return y

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """An arrow along points, to the right at its end."""
        corners = " ".join(f"{x:g},{y:g}" for x, y in points)
        x, y = points[-1]
        self.parts.append(f'<path d="M {corners}"/><path class="tip" d="M {x:g},{y:g} l -7,-4 0,8 z"/>')

    def rule(self, y: float) -> None:
        self.parts.append(f'<path class="rule" d="M {_MARGIN},{y:g} {_WIDTH - _MARGIN},{y:g}"/>')

    def document(self, height: float, title: str) -> str:
        size = f'width="{_WIDTH}" height="{height:g}" viewBox="0 0 {_WIDTH} {height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(title)}</title>'
        page = f'<rect class="page" width="{_WIDTH}" height="{height:g}" rx="8"/>'
        return "\n".join([head, f"<style>\n{_STYLE}\n</style>", page, *self.parts, "</svg>", ""])


def _tree(picture: _Picture, x: float, y: float, root: Stop, kind: str) -> tuple[float, dict[Path, float]]:
    """Boxes of stops below each other, each with an arrow from its caller. Returns their end and middles."""
    middles: dict[Path, float] = {}
    callers: list[float] = []  # where arrows begin, by depth
    for depth, stop in root.flat():
        left = x + depth * _INDENT
        width = x + _COLUMN - left
        box = len(picture.parts)
        names = ", ".join(f"{name}()" for name in stop.functions)
        bottom = picture.lines(left + _PAD, y + _PAD + 11, width - 2 * _PAD, shown(stop.path), "path")
        bottom = picture.lines(left + _PAD, bottom, width - 2 * _PAD, names, "code", 2)
        if stop.path not in picture.described:
            picture.described.add(stop.path)
            bottom = picture.lines(left + _PAD, bottom, width - 2 * _PAD, described(stop.path), most=2)
        bottom += 3 + _PAD - _LINE
        picture.box(left, y, width, bottom - y, kind)
        picture.parts.insert(box, picture.parts.pop())  # below its text
        middles.setdefault(stop.path, (y + bottom) / 2)
        if depth:
            begin = callers[depth - 1]
            picture.arrow((left - _INDENT / 2, begin), (left - _INDENT / 2, y + 16), (left, y + 16))
        callers[depth:] = [bottom]
        y = bottom + 8
    return y, middles


def _flow(picture: _Picture, y: float) -> float:
    left, right = _MARGIN, _MARGIN + _COLUMN + _GUTTER
    every, once, driver = flow()
    picture.text(left, y, "Every call", "title")
    picture.text(right, y, "Once for each new size", "title")
    traced = f"Traced: the second call of ConvTranspose2d{LAYER} on {SHAPE}, as on an {GPU}."
    top = picture.lines(left, y + 20, _COLUMN, traced, "note")
    traced = "What a first call of these shapes, dtype and options does besides. The prepared call is kept."
    picture.lines(right, y + 20, _COLUMN, traced, "note")
    y, middles = _tree(picture, left, top, every, "every")
    depth = max(depth for depth, _ in every.flat())
    x = left + (depth + 1) * _INDENT
    picture.box(x, y, left + _COLUMN - x, 2 * _LINE + 2 * _PAD - 2, "outside")
    picture.text(x + _PAD, y + _PAD + 11, "CUDA driver", "head")
    picture.text(x + _PAD, y + _PAD + 11 + _LINE, ", ".join(f"{name}()" for name in driver), "code")
    picture.arrow((x - _INDENT / 2, y - 8), (x - _INDENT / 2, y + 15), (x, y + 15))
    ends, _ = _tree(picture, right, top, once, "once")
    turn = right - _GUTTER / 2
    begin = middles.get(once.path, middles[every.path])
    picture.arrow((left + _COLUMN, begin), (turn, begin), (turn, top + 16), (right, top + 16))
    return max(ends, _layers(picture, y + 2 * _LINE + 52))


def _layers(picture: _Picture, y: float) -> float:
    picture.text(_MARGIN, y, "Layers", "title")
    y = picture.lines(_MARGIN, y + 20, _COLUMN, "A part of gemmconv/ imports parts below it alone:", "note") + 2
    for part, used in layers():
        picture.text(_MARGIN, y, part, "path")
        y = picture.lines(_MARGIN + 100, y, _COLUMN - 100, ", ".join(used) or "none")
    return y


def _kernels(picture: _Picture, y: float) -> float:
    names, passes, serves = _MARGIN, _MARGIN + 226, _MARGIN + 430
    shared = names + 290
    columns = {name: passes + 54 * i for i, name in enumerate(get_args(Pass))}
    picture.text(names, y, "Kernels", "title")
    text = (
        "By algorithm, in the order of ALGORITHMS (gemmconv/algorithms/__init__.py). A kernel FOLDER/NAME is "
        "gemmconv/kernels/FOLDER/NAME.py on the host and csrc/FOLDER/NAME.cu on the GPU, or NAME.h in C."
    )
    y = picture.lines(names, y + 20, _WIDTH - 2 * _MARGIN, text, "note") + 8
    for name, x in columns.items():
        for i, word in enumerate(reversed({"grads": "both grads"}.get(name, name.replace("_", " ")).split())):
            picture.text(x, y + _LINE * (1 - i), word, "head mid")
    picture.text(serves, y + _LINE, "it is for", "head")
    y += _LINE + 10
    for algorithm in ALGORITHMS:
        picture.rule(y)
        picture.text(names, y + 17, algorithm.name, "path")
        features = sorted(frozenset.union(*(kernel.features for kernel in algorithm.kernels)))
        summary = algorithm.summary + (f"; needs {' and '.join(features)}" if features else "")
        y = picture.lines(names + 100, y + 17, _WIDTH - 2 * _MARGIN - 100, summary) + 2
        for kernel in algorithm.kernels:
            has_source = any((sources.directory() / f"{kernel.name}.{end}").exists() for end in ("cu", "h"))
            host = host_of(kernel).relative_to(PACKAGE).as_posix()
            picture.text(names + 10, y, kernel.name if has_source else host, "code")
            for direction in kernel.directions:
                picture.text(columns[direction], y, "\u25cf", "mid")
            y = picture.lines(serves, y, _WIDTH - _MARGIN - serves, kernel.serves) + 2
        y -= 8
    picture.rule(y)
    picture.text(names, y + 17, "What they share", "head")
    y += 17 + _LINE + 2
    for source, hosts in helper_sources():
        picture.text(names + 10, y, f"csrc/{source}", "code")
        y = picture.lines(shared, y, _WIDTH - _MARGIN - shared, f"loaded by {', '.join(hosts)}")
    picture.text(names + 10, y, "csrc/include/", "code")
    return picture.lines(shared, y, _WIDTH - _MARGIN - shared, f"headers: {', '.join(headers())}")


def drawn() -> str:
    """The map as SVG."""
    picture = _Picture()
    y = _flow(picture, 32)
    picture.rule(y + 8)
    y = _kernels(picture, y + 36)
    return picture.document(y, "How a call flows through gemmconv, file by file")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.map", description="Draws the map of the source tree.")
    parser.add_argument("file", nargs="?", type=Path, default=MAP, help="where to; benchmarks/map.svg if left out")
    parser.parse_args(arguments).file.write_text(drawn(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
