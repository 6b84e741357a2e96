"""Whether the kernels of the working tree are compiled to the code that those of another commit are.

    python -m tests.gates.kernels COMMIT

Every variant of tests/test_runtime.py is compiled for sm_90a in both trees by one NVRTC, but for those whose sources
and macros are the same. What is compared is code, constants and resources, without the names of kernels; a variant
whose label is new is compared with those of the other commit that are not as before. The exit status is 1 where its
code is not among them. No GPU is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_ARCHITECTURE = "sm_90a"
_INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.MULTILINE)
# Sections that say what runs, and on what.
_COMPARED = (".text.", ".nv.constant", ".nv.info.", ".nv.shared", ".nv.global")


# What runs in each of the two trees, whose packages are imported there.


def _variants() -> dict[str, tuple[str, dict[str, Any]]]:
    from tests.test_runtime import kernel_variants

    found: dict[str, tuple[str, dict[str, Any]]] = kernel_variants()
    return found


def _list(tree: Path) -> dict[str, str]:
    """The variants of a tree: a digest of the sources and macros of each."""
    files = {path.relative_to(tree / "csrc").as_posix(): path for path in (tree / "csrc").rglob("*.cu*")}
    texts = {name.removeprefix("include/"): path.read_text() for name, path in files.items()}

    def closure(name: str, seen: set[str]) -> set[str]:
        if name not in seen:
            seen.add(name)
            for other in _INCLUDE.findall(texts[name]):
                closure(other, seen)
        return seen

    found = {}
    for label, (source, macros) in _variants().items():
        told = sorted((name, str(value)) for name, value in macros.items())
        found[label] = _digest([source, told, sorted((name, texts[name]) for name in closure(source, set()))])
    return found


def _compile(job: tuple[str, dict[str, Any]]) -> str:
    from gemmconv.runtime.compiler import compile

    return _digest(sorted(_sections(compile(*job, _ARCHITECTURE).cubin)))


def _in_tree(request: dict[str, Any]) -> dict[str, str]:
    if request["labels"] is None:
        return _list(Path.cwd())
    variants = _variants()
    with ProcessPoolExecutor() as pool:
        return dict(zip(request["labels"], pool.map(_compile, map(variants.get, request["labels"])), strict=True))


def _sections(cubin: bytes) -> Iterator[tuple[str, int, str]]:
    """Name up to a kernel's, registers and barriers, and content of the sections of an ELF file that are compared."""
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * size) for i in range(count)]
    names = headers[names_at][4]
    for name_at, kind, flags, _, begin, length, _, info, _, _ in headers:
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)].decode()
        for prefix in _COMPARED:
            if name.startswith(prefix):
                content = b"" if kind == 8 else cubin[begin : begin + length]  # 8: no bits, memory alone
                yield prefix, (info >> 24 if prefix == ".text." else length), _digest([flags, content.hex()])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


# What compares them.


def _ask(tree: Path, labels: Sequence[str] | None) -> dict[str, str]:
    """What this file says of a tree, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, str(Path(__file__)), "--in-tree"]
    request = json.dumps({"labels": labels})
    done = subprocess.run(
        command, cwd=tree, env=environment, input=request, stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def compare(before: Path, after: Path) -> tuple[int, list[str], list[str]]:
    """How many variants are the same, labels of those whose code is new, labels of those that are gone."""
    old, new = _ask(before, None), _ask(after, None)
    unlike = [label for label in new if old.get(label) != new[label]]
    rest = [label for label in old if old[label] != new.get(label)]
    old_code, new_code = _ask(before, rest), _ask(after, unlike)
    gone = Counter(old_code.values())
    changed = []
    for label in sorted(unlike, key=lambda label: old_code.get(label) != new_code[label]):  # same labels first
        code = new_code[label]
        if code in gone:
            gone[code] -= 1
        else:
            changed.append(label)
    return len(new) - len(changed), changed, [label for label in rest if gone[old_code[label]] > 0 and label not in new]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    commit = parser.parse_args(arguments).commit
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        same, changed, gone = compare(Path(folder), ROOT)
    print(*(f"changed: {label}" for label in changed), *(f"gone: {label}" for label in gone), sep="\n")
    print(f"{same} the same, {len(changed)} changed or new, {len(gone)} gone")
    return 1 if changed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--in-tree"]:
        sys.path[0] = str(Path.cwd())  # not this file's folder
        print(json.dumps(_in_tree(json.load(sys.stdin))))
    else:
        sys.exit(main())
