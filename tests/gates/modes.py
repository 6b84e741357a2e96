"""Which branches of the kernels' preprocessor no layer of any suite takes: what is there for nobody, or a fallback.

    python -m tests.gates.modes

A branch is named by its file and condition. The exit status is 1 where one is neither taken nor in FALLBACKS, or is in
FALLBACKS and taken.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor

from benchmarks.workloads import SUITES, Workload, select
from gemmconv.runtime import sources
from tests.gates.choices import PASSES, configs_of, loads_of

# Branches that are there for what suites do not have, and what that is.
FALLBACKS = {
    "geometry/depth.cuh: defined KERNEL_D": "volumes",
    "numeric/index.cuh: defined INDEX_64": "tensors of 2**31 elements and more",
    "ptx/mma.cuh: not __CUDA_ARCH__ >= 860": "GPUs of compute capability 8.0",
    "ptx/mma.cuh: not __CUDA_ARCH__ >= 900": "GPUs before Hopper",
    "sm90/gemm_fold_narrow.cu: !BOXED": "rows of images that no tensor map describes",
    "sm90/gemm_fold_narrow.cu: not BOXED": "rows of images that no tensor map describes",
    "sm90/gemm_fold_narrow.cu: not CHANNELS_LAST": "rows of images that no tensor map describes",
}

_SOURCES = sources.directory()
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(if|ifdef|ifndef|elif|else|endif|include|define)\b[ \t]*(.*)$", re.MULTILINE)
_INCLUDE = re.compile(r'^"([^"]+)"')
_CONSTANT = re.compile(r"^(\w+)[ \t]+(\w+)\s*$")


def branches(name: str, macros: Mapping[str, object] | None) -> Iterator[str]:
    """The branches of a source and its headers that macros take; all that there are, with None."""
    defined = {} if macros is None else {"__CUDA_ARCH__": 900, **macros}
    seen: set[str] = set()

    def walk(name: str) -> Iterator[str]:
        if name in seen:
            return
        seen.add(name)
        stack: list[list[bool]] = []  # of each #if: whether a branch was taken, whether this one is
        condition: list[str] = []
        for word, rest in _DIRECTIVE.findall(sources.read(name)):
            text = rest.split("//")[0].strip()
            active = macros is None or all(one[1] for one in stack)
            if word == "include" and active and (found := _INCLUDE.match(text)):
                yield from walk(found[1])
            elif word == "define" and active and (constant := _CONSTANT.match(text)):
                defined.setdefault(constant[1], constant[2])
            elif word in ("if", "ifdef", "ifndef"):
                text = {"if": text, "ifdef": f"defined {text}", "ifndef": f"!defined {text}"}[word]
                is_true = active and (macros is None or _holds(text, defined))
                stack.append([is_true, is_true])
                condition.append(text)
            elif word in ("elif", "else"):
                outside = macros is None or all(one[1] for one in stack[:-1])
                is_true = outside and (
                    macros is None or (not stack[-1][0] and (word == "else" or _holds(text, defined)))
                )
                stack[-1] = [stack[-1][0] or is_true, is_true]
                text = condition[-1] = text if word == "elif" else f"not {condition[-1]}"
            elif word == "endif":
                stack.pop()
                condition.pop()
            if word in ("if", "ifdef", "ifndef", "elif", "else") and is_true:
                yield f"{name}: {text}"

    yield from walk(name)


def _holds(condition: str, defined: Mapping[str, object]) -> bool:
    """Whether a condition of the preprocessor is true."""
    text = re.sub(r"defined[ \t(]*(\w+)\)?", lambda found: str(int(found[1] in defined)), condition)
    while names := re.findall(r"[A-Za-z_]\w*", text):
        for name in names:
            text = re.sub(rf"\b{name}\b", f"({defined.get(name, 0)})", text)
    text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    return bool(eval(text, {"__builtins__": {}}))  # numbers and operators alone


def _of_workload(workload: Workload) -> set[str]:
    return {
        branch
        for _, _, config in configs_of(workload)
        for one in PASSES
        for source, macros in loads_of(config, one)[2]
        for branch in branches(source, macros)
    }


def unused(workloads: Iterable[Workload]) -> tuple[list[str], list[str]]:
    """Branches that no workload takes and FALLBACKS does not have; those that it has and a workload takes."""
    with ProcessPoolExecutor() as pool:
        taken = set().union(*pool.map(_of_workload, workloads))
    names = (path.relative_to(_SOURCES).as_posix() for path in _SOURCES.rglob("*.cu"))
    found = {branch for name in names for branch in branches(name, None)}
    return sorted(found - taken - FALLBACKS.keys()), sorted(taken & FALLBACKS.keys())


def main() -> int:
    dead, alive = unused(select(list(SUITES)))
    print(*(f"not taken: {branch}" for branch in dead), *(f"taken: {branch}" for branch in alive), sep="\n")
    return 1 if dead or alive else 0


if __name__ == "__main__":
    sys.exit(main())
