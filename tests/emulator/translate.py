"""A kernel source of csrc/ as C++ for the CPU: includes put in place, shared memory and inline assembly rewritten.

Headers whose inline assembly is put together by macros, or stands for more than a line, have a twin in twins/: the same
functions, which call the scheduler.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

Read = Callable[[str], str]  # name of a file under csrc -> its text

TWINS = {f"ptx/{path.name}": path for path in sorted((Path(__file__).parent / "twins").glob("*.cuh"))}

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
_KERNEL = re.compile(r"__global__\s+void\s+__launch_bounds__\(([^)]*)\)\s+(\w+)\(")
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];")
_STATIC_SHARED = re.compile(r"__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+(\w+)((?:\[\w+\])+);")
_ASSEMBLY = re.compile(r'\basm(?: volatile)?\("([^"]*)"((?:[\s:,]|"[^"]*"(?:\([^()]*\))?)*)\);')
_OPERAND = re.compile(r'"[^"]*"\(([^()]*)\)')
_FRAGMENTS = "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
_PRODUCT = "emulator_mma({}, {{0}}, {{1}}, {{2}}, {{3}}, {{{{{{4}}, {{5}}, {{6}}, {{7}}, {{8}}, {{9}}}}}});"
_MATRICES = "emulator_load_matrices({{4}}, {}, {{0}}, {{1}}, {{2}}, {{3}});"
_INSTRUCTIONS = {
    "": "",  # only keeps the compiler from rearranging addresses
    "cvt.f32.f16 %0, %1;": "{0} = emulator_half_to_float({1});",
    "cvt.rn.f16.f32 %0, %1;": "{0} = emulator_float_to_half({1});",
    "cvt.rn.bf16.f32 %0, %1;": "{0} = emulator_float_to_bfloat16({1});",
    "cvt.rn.tf32.f32 %0, %1;": "{0} = emulator_float_to_tf32({1});",
    "min.NaN.xorsign.abs.f32 %0, %1, %2;": "{0} = emulator_min_of_magnitudes({1}, {2});",
    "cp.async.ca.shared.global [%0], [%1], %2, %3;": "emulator_copy_async({0}, {1}, {2}, {3});",
    "prmt.b32 %0, %1, %2, %3;": "{0} = emulator_permute({1}, {2}, {3});",
    "cp.async.cg.shared.global [%0], [%1], 16, %2;": "emulator_copy_async({0}, {1}, 16, {2});",
    "{ .reg .pred outside; setp.eq.s32 outside, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, outside; }": (
        "emulator_copy_async({0}, {1}, 16, {2} != 0 ? 16 : 0);"
    ),
    "cp.async.commit_group;": "emulator_commit_copies();",
    "cp.async.wait_group %0;": "emulator_wait_for_copies({0});",
    "cp.async.wait_all;": "emulator_wait_for_copies(-1);",
    "{ .reg .pred is; setp.ne.s32 is, %5, 0; @is st.global.v4.b32 [%0], {%1, %2, %3, %4}; }": (
        "if ({5} != 0) emulator_store_words<4>({0}, {{{{{1}, {2}, {3}, {4}}}}});"
    ),
    "{ .reg .pred is; setp.ne.s32 is, %3, 0; @is st.global.v2.b32 [%0], {%1, %2}; }": (
        "if ({3} != 0) emulator_store_words<2>({0}, {{{{{1}, {2}}}}});"
    ),
    "griddepcontrol.launch_dependents;": ";",  # launches do not overlap here
    "griddepcontrol.wait;": "emulator_wait_for_previous_launch();",
    "{ .reg .pred is; elect.sync _|is, 0xffffffff; selp.u32 %0, 1, 0, is; }": (
        "__syncwarp(); {0} = threadIdx.x % 32 == 0;"
    ),
    "bar.sync %0, %1;": "emulator_barrier({0}, {1});",
    "bar.arrive %0, %1;": "emulator_barrier_pass({0}, {1});",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];": _MATRICES.format("false"),
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];": _MATRICES.format("true"),
    f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {_FRAGMENTS}": _PRODUCT.format("emulator_half_word"),
    f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {_FRAGMENTS}": _PRODUCT.format("emulator_bfloat16_word"),
    f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {_FRAGMENTS}": _PRODUCT.format("emulator_tf32_word"),
}


@functools.lru_cache(maxsize=64)
def translate(source_name: str, read: Read) -> str:
    """The whole of a source with its headers, as one text that needs nothing but cuda.h before it.

    Args:
        source_name: file under csrc, such as ``"columns/col2im.cu"``.
        read: gives the text of such a file.

    Raises:
        NotImplementedError: an inline assembly instruction that the emulator does not know.
    """
    text = _with_includes(source_name, read)
    exports = "\n".join(f"EMULATOR_EXPORT({name}, {bounds})" for bounds, name in _KERNEL.findall(text))
    text = _DYNAMIC_SHARED.sub(r"static \1* const \2 = emulator_dynamic_shared;", text)
    text = _STATIC_SHARED.sub(
        r"\1 (&\2)\3 = *static_cast<\1 (*)\3>(emulator_shared_array(__COUNTER__, sizeof(\1\3)));", text
    )
    return f"{_ASSEMBLY.sub(_instruction, text)}\n{exports}\n"


def _with_includes(name: str, read: Read) -> str:
    """A file with the files it includes in their places, each taken once, as ``#pragma once`` asks."""
    text = TWINS[name].read_text() if name in TWINS else read(name)
    guard = f"INCLUDED_{re.sub(r'[^a-z0-9]', '_', name)}"
    text = text.replace("#pragma once\n", "\n")
    parts, line, position = [f'#ifndef {guard}\n#define {guard}\n#line 1 "{name}"\n'], 1, 0
    for include in _INCLUDE.finditer(text):
        parts.append(text[position : include.start()])
        line += text.count("\n", position, include.start())
        position = include.end()
        parts.append(f'{_with_includes(str(PurePosixPath(include[1])), read)}\n#line {line} "{name}"\n')
    return "".join([*parts, text[position:], "\n#endif\n"])


def _instruction(match: re.Match[str]) -> str:
    template, operands = match[1], _OPERAND.findall(match[2])
    if template not in _INSTRUCTIONS:
        raise NotImplementedError(f"the emulator does not know the instruction {template!r}")
    return _INSTRUCTIONS[template].format(*operands)
