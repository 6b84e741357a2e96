"""KernelBench's problems with a transposed convolution: torch, torch.compile, converted, converted and compiled.

    python -m benchmarks.kernelbench CHECKOUT               # a checkout of ScalingIntelligence/KernelBench; a GPU
    python -m benchmarks.kernelbench CHECKOUT --compiled    # both through torch.compile too
    python -m benchmarks.kernelbench CHECKOUT --only L1/57,L2/100 --device cpu

The problems are read from the checkout and run as they are, in float32 with torch's own settings. A converted model
must be as close to the model in full float32 precision as torch's own is, within a factor of two, before it is timed.
Times are medians of forward passes without gradients, each model beside torch's own twice, which shows the noise.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import gemmconv
from benchmarks.commands import Progress
from benchmarks.contenders import torch_settings
from benchmarks.reference import relative_error
from benchmarks.summary import markdown_table, times_text
from benchmarks.timing import medians_ms

_NAMES = re.compile(r"ConvTranspose[123]d|conv_transpose[123]d")
_LEAST_ERROR = {"cuda": 2e-3, "cpu": 1e-5}  # relative to the norm: TF32 on a GPU, float32 on a CPU
_LEAST_MS, _SLOWER = 0.02, 1.03  # of torch's time: shorter ones are noise; what counts as slower beyond noise


def problems(checkout: Path, only: Sequence[str] = ()) -> Iterator[tuple[str, Path]]:
    """Names such as ``L1/57`` and files of the problems with a transposed convolution."""
    for path in sorted(checkout.glob("KernelBench/level*/*.py"), key=lambda one: (one.parent.name, _number(one))):
        name = f"L{path.parent.name[-1]}/{_number(path)}"
        if _NAMES.search(path.read_text()) and (not only or name in only):
            yield name, path


def _number(path: Path) -> int:
    return int(path.name.split("_")[0])


def loaded(path: Path) -> ModuleType:
    """The problem's module, which has ``Model``, ``get_inputs`` and ``get_init_inputs``."""
    spec = importlib.util.spec_from_file_location(f"problem_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row_of(path: Path, device: torch.device, compiled: bool) -> dict[str, Any]:
    """Milliseconds of each model, the kernels that the converted one takes, and both errors."""
    module = loaded(path)
    torch.manual_seed(0)
    original = module.Model(*module.get_init_inputs()).to(device)
    inputs = [one.to(device) if isinstance(one, Tensor) else one for one in module.get_inputs()]
    converted = gemmconv.convert(deepcopy(original))
    ours = sum(type(one).__module__.startswith("gemmconv") for one in converted.modules())
    models: dict[str, Callable[..., Any]] = {"torch": original, "again": original, "converted": converted}
    with torch.no_grad():
        with torch_settings("fp32"):
            exact = deepcopy(original)(*inputs)
        errors = {name: relative_error(model(*inputs), exact) for name, model in models.items() if name != "again"}
        if compiled:
            torch.compiler.reset()  # it gives up on a layer's code after eight other layers
            models |= {f"{name}, compiled": torch.compile(models[name]) for name in ("torch", "converted")}
            errors |= {name: relative_error(models[name](*inputs), exact) for name in models if "compiled" in name}
        del exact
        most = 2 * max(errors["torch"], _LEAST_ERROR[device.type])
        wrong = [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= most]
        if wrong:
            raise ValueError("; ".join(wrong))
        times = medians_ms([partial(model, *inputs) for model in models.values()], device)
    return {"layers": ours, **dict(zip(models, times, strict=True))}


def is_slower(row: dict[str, Any]) -> bool:
    """Whether the converted model takes longer than torch's, beyond the difference of torch's two measurements."""
    return row["torch"] >= _LEAST_MS and row["converted"] > _SLOWER * max(row["torch"], row["again"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 1 if a converted model is wrong or slower, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernelbench", description="KernelBench's problems.")
    parser.add_argument("checkout", type=Path, help="a checkout of ScalingIntelligence/KernelBench")
    parser.add_argument("--only", default="", metavar="P", help="problems, such as L1/57, with commas between")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--compiled", action="store_true", help="both models through torch.compile too")
    options = parser.parse_args(argv)
    device, only = torch.device(options.device), [name for name in options.only.split(",") if name]
    found = list(problems(options.checkout, only))
    if not found:
        print(f"no problem with a transposed convolution in {options.checkout}", file=sys.stderr)
        return 1
    rows, failed = dict[str, dict[str, Any]](), dict[str, str]()
    progress = Progress(len(found))
    for name, path in found:
        try:
            row = rows[name] = row_of(path, device, options.compiled)
            progress.say(f"{name}: {row['torch'] / row['converted']:.2f}x of {row['torch']:.3f} ms")
        except (ValueError, RuntimeError, NotImplementedError) as error:
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        gc.collect()
        progress.done += 1
    print_table(rows, failed)
    return int(bool(failed) or any(map(is_slower, rows.values())))


def print_table(rows: dict[str, dict[str, Any]], failed: dict[str, str]) -> None:
    """Print a line for each problem, those that lose first, and the geometric mean of each column's speed."""
    columns = [name for name in next(iter(rows.values()), {}) if name not in ("layers", "torch", "again")]
    cells = []
    for name, row in sorted(rows.items(), key=lambda item: item[1]["torch"] / item[1]["converted"]):
        times = (f"{row[one]:.3f}" for one in ("torch", "again"))
        speeds = (times_text(row["torch"] / row[column]) for column in columns)
        cells.append([name + " (slower)" * is_slower(row), str(row["layers"]), *times, *speeds])
    print(markdown_table(["problem", "layers of ours", "torch, ms", "torch again", *columns], cells))
    for column in columns if rows else ():
        print(f"{column}: {geometric_mean(row['torch'] / row[column] for row in rows.values()):.3f}x torch's speed")
    taken = sum(row["layers"] > 0 for row in rows.values())
    print(f"{taken} of {len(rows)} problems have layers of ours; {sum(map(is_slower, rows.values()))} are slower")
    for name, why in failed.items():
        print(f"failed: {name}: {why}")


if __name__ == "__main__":
    sys.exit(main())
