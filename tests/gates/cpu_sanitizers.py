"""Whether the kernels for a CPU stay in their buffers, do nothing that C leaves undefined, and compute what is right.

    python -m tests.gates.cpu_sanitizers [--layers 200] [--first 0] [--isa avx2,portable] [--sources csrc]

A copy of the package gets an extension that GCC's address and undefined-behaviour sanitizers watch. In it run the
random layers of tests/test_cpu.py: all passes, algorithms, types and formats, with each instruction set of this
machine. Tensors are as large as they have to be, so that the sanitizer knows where they end, and torch fills new
memory with NaN, which shows where that is read before it is written. The exit status is 1 where anything is found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1", "-g"]
_LAYERS_OF_A_PROCESS = 25  # which ends with what it finds
_NOT_HERE = 77  # exit status: this machine does not run the instruction set
_CODE = """
import sys, torch
from gemmconv.errors import KernelError
from gemmconv.kernels.cpu.library import isa_name
try:
    isa_name()
except KernelError:
    sys.exit({not_here})
from tests.test_cpu import check_layers
torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN
check_layers(range({first}, {last}))
"""


def build(sources: Path, folder: Path) -> None:
    """Copy the package to a folder, and build the extension there."""
    shutil.copytree(ROOT / "gemmconv", folder / "gemmconv", ignore=shutil.ignore_patterns("_extension*", "__pycache__"))
    for name in ("csrc", "tests"):
        (folder / name).symlink_to(ROOT / name)
    flags = ["-std=c11", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{sysconfig.get_path('include')}", *_SANITIZERS]
    files = map(str, [*sources.glob("*.c"), *sources.glob("cpu/*.c")])
    target = str(folder / "gemmconv" / "_extension.abi3.so")
    subprocess.run(["gcc", *flags, *files, "-o", target, "-ldl"], check=True)


def check(folder: Path, isa: str, first: int, last: int) -> subprocess.CompletedProcess[str]:
    """Run layers with the extension in a folder: the sanitizer's library, and C++'s, come before all else."""
    commands = [["gcc", f"-print-file-name={name}.so"] for name in ("libasan", "libstdc++")]
    loaded = [subprocess.run(one, stdout=subprocess.PIPE, text=True, check=True).stdout.strip() for one in commands]
    environment = {"LD_PRELOAD": ":".join(loaded), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"PYTHONPATH": str(folder), "GEMMCONV_CPU": isa}
    command = [sys.executable, "-c", _CODE.format(not_here=_NOT_HERE, first=first, last=last)]
    options = {"cwd": folder, "stderr": subprocess.PIPE, "text": True, "check": False}
    return subprocess.run(command, env={**os.environ, **environment}, **options)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=200, help="random layers for each instruction set")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first layer")
    parser.add_argument("--isa", default="avx512,avx2,neon,portable", help="instruction sets, with commas between")
    parser.add_argument("--sources", type=Path, default=ROOT / "csrc", help="folder of the sources in C")
    asked = parser.parse_args(arguments)
    status, end = 0, asked.first + asked.layers
    with tempfile.TemporaryDirectory() as folder:
        build(asked.sources, Path(folder))
        for isa in asked.isa.split(","):
            for first in range(asked.first, end, _LAYERS_OF_A_PROCESS):
                last = min(first + _LAYERS_OF_A_PROCESS, end)
                done = check(Path(folder), isa, first, last)
                if done.returncode == _NOT_HERE:
                    print(f"{isa}: not on this machine")
                    break
                found = done.stderr[-6000:] if done.returncode else "nothing found"
                print(f"{isa}, layers {first} to {last - 1}: {found}", flush=True)
                status |= done.returncode != 0
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
