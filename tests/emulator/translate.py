"""A kernel source of csrc/ as C++ for the CPU: includes put in place, shared memory and inline assembly rewritten."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath

Read = Callable[[str], str]  # name of a file under csrc -> its text

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
_KERNEL = re.compile(r"__global__\s+void\s+__launch_bounds__\(([^)]*)\)\s+(\w+)\(")
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];")
_STATIC_SHARED = re.compile(r"__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+(\w+)((?:\[\w+\])+);")
_ASSEMBLY = re.compile(r'\basm\("([^"]*)"\s*:\s*"[^"]*"\(([^()]*)\)\s*(?::\s*"[^"]*"\(([^()]*)\)\s*)?\);')
_CONVERSIONS = {
    "cvt.f32.f16": "emulator_half_to_float",
    "cvt.rn.f16.f32": "emulator_float_to_half",
    "cvt.rn.bf16.f32": "emulator_float_to_bfloat16",
}


def translate(source_name: str, read: Read) -> str:
    """The whole of a source with its headers, as one text that needs nothing but cuda.h before it.

    Args:
        source_name: file under csrc, such as ``"col2im.cu"``.
        read: gives the text of such a file.

    Raises:
        NotImplementedError: an inline assembly instruction that the emulator does not know.
    """
    text = _with_includes(source_name, read, set())
    exports = "\n".join(f"EMULATOR_EXPORT({name}, {bounds})" for bounds, name in _KERNEL.findall(text))
    text = _DYNAMIC_SHARED.sub(r"static \1* const \2 = emulator_dynamic_shared;", text)
    text = _STATIC_SHARED.sub(
        r"\1 (&\2)\3 = *static_cast<\1 (*)\3>(emulator_shared_array(__COUNTER__, sizeof(\1\3)));", text
    )
    return f"{_ASSEMBLY.sub(_instruction, text)}\n{exports}\n"


def _with_includes(name: str, read: Read, seen: set[str]) -> str:
    """A file with the files it includes in their places, each once, as ``#pragma once`` asks."""
    seen.add(name)
    text = read(name).replace("#pragma once\n", "\n")
    parts, line, position = [f'#line 1 "{name}"\n'], 1, 0
    for include in _INCLUDE.finditer(text):
        parts.append(text[position : include.start()])
        line += text.count("\n", position, include.start())
        position = include.end()
        if (other := str(PurePosixPath(include[1]))) not in seen:
            parts.append(f'{_with_includes(other, read, seen)}\n#line {line} "{name}"\n')
    return "".join([*parts, text[position:]])


def _instruction(match: re.Match[str]) -> str:
    template, target, operand = match.groups()
    if not template:  # only keeps the compiler from rearranging addresses
        return ""
    for opcode, function in _CONVERSIONS.items():
        if template == f"{opcode} %0, %1;":
            return f"{target} = {function}({operand});"
    raise NotImplementedError(f"the emulator does not know the instruction {template!r}")
